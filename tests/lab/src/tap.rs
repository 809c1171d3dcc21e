//! Taps: virtual machines' network interfaces in the lab.

use crate::container::Container;
use crate::error::Result;
use crate::netns::Netns;
use crate::{BRIDGE, Lab, Ports, wait_until_none};
use std::net::{Ipv4Addr, Ipv6Addr};

impl Lab {
    /// Creates a tap in the host's namespace, for a virtual machine that is started there. With
    /// `bridged` the tap is a port of the bridge. It has a carrier only while the machine runs.
    /// Error: there is no `/dev/net/tun` or no `ip`, or the name is taken.
    pub fn add_tap(&self, name: &str, mtu: u32, bridged: bool) -> Result {
        self.host().command(&format!("ip tuntap add dev {name} mode tap"))?;
        let master = if bridged { format!("master {BRIDGE}") } else { String::new() };
        self.host().command(&format!("ip link set {name} mtu {mtu} {master} up")).map(drop)
    }

    /// Waits until the bridge forwards to the port `name`. Error: the bridge does not forward in
    /// time: the virtual machine has not opened the tap.
    pub fn wait_for_port(&self, name: &str) -> Result {
        wait_until_none(|| {
            let ports = Ports::of(self.host())?;
            let waiting = (!ports.forwarding(name)).then(|| format!("{name} is not forwarding"));
            Ok(waiting.into_iter().collect())
        })
    }

    /// Creates a container and moves the tap `name` from the host into it, as its `eth0`. The
    /// virtual machine that has opened the tap is then its direct neighbour. Error: the host has no
    /// such interface, or no program has opened it.
    pub fn adopt(
        &self,
        name: &str,
        ipv4: (Ipv4Addr, u8),
        ipv6: (Ipv6Addr, u8),
    ) -> Result<Container> {
        let container = Container::adopt(self.host(), name, ipv4, ipv6)?;
        wait_until_none(|| container.not_yet_up())?;
        Ok(container)
    }
}

impl Container {
    fn adopt(
        host: &Netns,
        name: &str,
        (ipv4, v4_prefix): (Ipv4Addr, u8),
        (ipv6, v6_prefix): (Ipv6Addr, u8),
    ) -> Result<Self> {
        let netns = Self::new_netns()?;
        host.command(&format!("ip link set {name} down"))?;
        let (path, device) = (netns.path(), Self::DEVICE);
        host.command(&format!("ip link set {name} netns {path} name {device}"))?;
        // The interface still has the host's IPv6 defaults of the time when the tap was created.
        netns.run(|| {
            let _ = std::fs::write("/proc/sys/net/ipv6/conf/eth0/disable_ipv6", "0");
            let _ = std::fs::write("/proc/sys/net/ipv6/conf/eth0/accept_dad", "0");
        })?;
        Self::on_device(netns, name.to_owned(), (ipv4, v4_prefix), Some((ipv6, v6_prefix)))
    }
}
