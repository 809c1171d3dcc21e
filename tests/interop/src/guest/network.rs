//! The guest's two links: one into the lab's bridge, and one with a tap that is itself the
//! interface of a container.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use rocinante_lab::{Container, Lab};

use super::Guest;
use super::qemu::Nic;
use crate::error::{Error, Result};

/// MTU of all links: a path MTU of 4096 fits.
const MTU: u32 = 9000;

/// How packets get to the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Link {
    /// Through a veth and the host's bridge.
    Veth,
    /// Through the tap that is the virtual machine's end.
    Tap,
}

/// One of the guest's interfaces.
#[derive(Debug, Clone)]
pub(super) struct Port {
    pub(super) tap: String,
    pub(super) mac: String,
    rxe: &'static str,
    ipv4: Ipv4Addr,
    ipv6: Ipv6Addr,
}

/// The guest's interfaces and their other ends.
#[derive(Debug, Clone)]
pub struct Network {
    bridged: Port,
    direct: Port,
    container: std::sync::Arc<std::sync::OnceLock<Container>>,
}

impl Network {
    /// Makes the taps in the lab's host.
    pub(super) fn prepare(lab: &Lab) -> Result<Self> {
        let bridged = Port {
            tap: "bridged".into(),
            mac: "02:00:0a:4d:00:c8".into(),
            rxe: "rxe0",
            ipv4: Ipv4Addr::new(10, 77, 0, 200),
            ipv6: Ipv6Addr::new(0xfd00, 0x77, 0, 0, 0, 0, 0, 200),
        };
        let direct = Port {
            tap: "direct".into(),
            mac: "02:00:0a:4e:00:02".into(),
            rxe: "rxe1",
            ipv4: Ipv4Addr::new(10, 78, 0, 2),
            ipv6: Ipv6Addr::new(0xfd00, 0x78, 0, 0, 0, 0, 0, 2),
        };
        lab.add_tap(&bridged.tap, MTU, true)?;
        lab.add_tap(&direct.tap, MTU, false)?;
        Ok(Self { bridged, direct, container: std::sync::Arc::default() })
    }

    pub(super) fn nics(&self) -> Vec<Nic> {
        vec![Nic::from(&self.bridged), Nic::from(&self.direct)]
    }

    /// Moves the second tap into its container, and sets up addresses and RDMA devices in the
    /// guest.
    pub(super) fn join(&self, lab: &Lab, guest: &Guest) -> Result<()> {
        let container = lab.adopt(
            &self.direct.tap,
            (Ipv4Addr::new(10, 78, 0, 1), 24),
            (Ipv6Addr::new(0xfd00, 0x78, 0, 0, 0, 0, 0, 1), 64),
        )?;
        let _ = self.container.set(container);
        let mut script = String::from("set -e\nmodprobe -a ib_uverbs ib_umad rdma_ucm rdma_rxe\n");
        for port in [&self.bridged, &self.direct] {
            script += &format!(
                "dev=$(grep -l {mac} /sys/class/net/*/address | cut -d/ -f5)\n\
                 echo 0 > /proc/sys/net/ipv6/conf/$dev/accept_dad\n\
                 ip link set $dev mtu {MTU} up\n\
                 ip address add {v4}/24 dev $dev\n\
                 ip -6 address add {v6}/64 dev $dev nodad\n\
                 rdma link add {rxe} type rxe netdev $dev\n",
                mac = port.mac,
                v4 = port.ipv4,
                v6 = port.ipv6,
                rxe = port.rxe,
            );
        }
        guest.read(&script, Duration::from_secs(30))?;
        lab.wait_for_port(&self.bridged.tap).map_err(Error::from)
    }

    /// The container with Rocinante at the other end of `link`. Panics if the guest is not up yet.
    #[must_use]
    pub fn container<'a>(&'a self, lab: &'a Lab, link: Link) -> &'a Container {
        match link {
            Link::Veth => lab.container(0),
            Link::Tap => self.container.get().expect("a guest that is up has joined"),
        }
    }

    /// The guest's address on `link`.
    #[must_use]
    pub fn address(&self, link: Link, ipv6: bool) -> IpAddr {
        let port = self.port(link);
        if ipv6 { port.ipv6.into() } else { port.ipv4.into() }
    }

    /// The guest's RDMA device on `link`.
    #[must_use]
    pub fn device(&self, link: Link) -> &'static str {
        self.port(link).rxe
    }

    /// The name of the guest's end in the lab's host, for rules.
    #[must_use]
    pub fn tap(&self) -> &str {
        &self.bridged.tap
    }

    fn port(&self, link: Link) -> &Port {
        match link {
            Link::Veth => &self.bridged,
            Link::Tap => &self.direct,
        }
    }
}
