//! Several hosts, and the network between them.

use crate::container::Container;
use crate::error::{LabError, Result};
use crate::netns::Netns;
use crate::network::Network;
use crate::{BRIDGE, Lab, LabConfig, add_bridge, forward, quiet_host, tool};

/// Name of a host's interface towards the other hosts.
pub const UPLINK: &str = "uplink0";
/// Name of a host's VXLAN device, a port of its bridge.
pub const VXLAN: &str = "vxlan0";

/// The shape of a [`Lab`] of several hosts. Each has a bridge and an uplink.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hosts {
    /// Number of hosts, 1 to 250.
    pub hosts: u8,
    /// Number of containers on each host: in all 1 to 250.
    pub containers_each: u8,
    /// The network between the hosts.
    pub between: Between,
}

/// The network between hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Between {
    /// A switch: each uplink is a port of its host's bridge, and all containers are in one network
    /// of layer 2.
    Plain,
    /// A router: the containers of each host have a network of their own, and the host is its
    /// router.
    Routed,
    /// A switch between the hosts' own addresses, and VXLAN over it: the containers are in one
    /// network of layer 2.
    Vxlan {
        /// Whether the hosts' addresses, outside, are of IPv6.
        ipv6: bool,
    },
}

impl Between {
    /// Bytes of a frame on the uplink beside the IP packet of a container: outer IP and UDP, VXLAN,
    /// inner Ethernet (RFC 7348, 5).
    #[must_use]
    pub const fn overhead(self) -> u32 {
        match self {
            Self::Plain | Self::Routed => 0,
            Self::Vxlan { ipv6: false } => 20 + 8 + 8 + 14,
            Self::Vxlan { ipv6: true } => 40 + 8 + 8 + 14,
        }
    }
}

impl Lab {
    /// Hosts with containers, and the network between them. Container `n` is on host `n` modulo
    /// the number of hosts. `config` is that of the containers' links, and its number of containers
    /// has no meaning here. The uplinks have room for the headers of VXLAN beside that MTU.
    ///
    /// ```text
    ///  container 0     host 0               between              host 1     container 1
    ///  eth0 ── veth0 ┐ br0 ┌ uplink0 ── host0 ┐ br0 ┌ host1 ── uplink0 ┐ br0 ┌ veth1 ── eth0
    /// ```
    ///
    /// Error: as [`new`](Self::new); also if the kernel has no VXLAN, or `/proc/sys` cannot be
    /// written.
    pub fn of_hosts(shape: &Hosts, config: &LabConfig) -> Result<Self> {
        let routed = shape.between == Between::Routed;
        let middle = if routed { router()? } else { quiet_host(config.mtu + shape.overhead())? };
        let hosts: Vec<_> =
            (0..shape.hosts).map(|at| shape.host(&middle, at, config)).collect::<Result<_>>()?;
        let containers = (0..shape.hosts * shape.containers_each).map(|index| {
            let at = index % shape.hosts;
            let host = &hosts[usize::from(at)];
            match shape.between {
                Between::Routed => {
                    Container::behind(host, index, Network::of_containers(at), config)
                }
                _ => Container::new(host, index, config),
            }
        });
        let containers = containers.collect::<Result<Vec<_>>>()?;
        let bridges: Vec<_> = hosts.iter().chain((!routed).then_some(&middle)).cloned().collect();
        let lab = Self { hosts, between: Some(middle), containers };
        lab.wait(&bridges)?;
        Ok(lab)
    }
}

impl Hosts {
    fn overhead(&self) -> u32 {
        self.between.overhead()
    }

    /// A host with its bridge and its uplink.
    fn host(&self, middle: &Netns, at: u8, config: &LabConfig) -> Result<Netns> {
        let routed = self.between == Between::Routed;
        let host = if routed { router()? } else { quiet_host(config.mtu)? };
        let (mtu, path, port) = (config.mtu + self.overhead(), middle.path(), format!("host{at}"));
        host.command(&format!(
            "ip link add {UPLINK} mtu {mtu} type veth peer name {port} mtu {mtu} netns {path}"
        ))?;
        match self.between {
            Between::Routed => route(&host, middle, at, config)?,
            Between::Plain => {
                middle.command(&format!("ip link set {port} master {BRIDGE} up"))?;
                host.command(&format!("ip link set {UPLINK} master {BRIDGE} up"))?;
            }
            Between::Vxlan { ipv6 } => {
                middle.command(&format!("ip link set {port} master {BRIDGE} up"))?;
                self.tunnel(&host, at, config.mtu, ipv6)?;
            }
        }
        Ok(host)
    }

    /// Gives the uplink an address, and the bridge a VXLAN device over it. Frames to unknown
    /// addresses go to every other host.
    fn tunnel(&self, host: &Netns, at: u8, mtu: u32, ipv6: bool) -> Result {
        if ipv6 {
            host.run(|| {
                let switch = |name| format!("/proc/sys/net/ipv6/conf/{UPLINK}/{name}");
                std::fs::write(switch("accept_dad"), "0")?;
                std::fs::write(switch("disable_ipv6"), "0")
            })?
            .map_err(|source| LabError::Namespace { doing: "switch IPv6 on", source })?;
        }
        let network = Network::of_uplinks(0);
        network.join(host, UPLINK, at + 1, ipv6)?;
        let address = |at: u8| match ipv6 {
            true => network.v6(at + 1).to_string(),
            false => network.v4(at + 1).to_string(),
        };
        host.command(&format!(
            "ip link add {VXLAN} mtu {mtu} type vxlan id 77 dstport 4789 local {} dev {UPLINK}",
            address(at)
        ))?;
        for other in (0..self.hosts).filter(|other| *other != at) {
            let other = address(other);
            host.command(&format!("bridge fdb append 00:00:00:00:00:00 dev {VXLAN} dst {other}"))?;
        }
        host.command(&format!("ip link set {VXLAN} master {BRIDGE} up")).map(drop)
    }
}

/// Makes the host a router between its containers and the router in the middle.
fn route(host: &Netns, middle: &Netns, at: u8, config: &LabConfig) -> Result {
    let (inner, outer) = (Network::of_containers(at), Network::of_uplinks(at));
    add_bridge(host, config.mtu)?;
    inner.join(host, BRIDGE, 1, config.ipv6)?;
    outer.join(host, UPLINK, 2, config.ipv6)?;
    outer.join(middle, &format!("host{at}"), 1, config.ipv6)?;
    outer.route_by(host, 1, config.ipv6)?;
    inner.reach(middle, outer, 2, config.ipv6)
}

/// A namespace that forwards between networks.
fn router() -> Result<Netns> {
    let netns = Container::new_netns()?;
    forward(&netns)?;
    Ok(netns)
}

/// Names the uplink if it is not up yet.
pub(super) fn uplink_not_yet_up(host: &Netns) -> Result<Option<String>> {
    let links = host.json(&format!("ip -j link show dev {UPLINK}"))?;
    let up = tool::objects(&links).any(|link| link["operstate"] == "UP");
    Ok((!up).then(|| format!("{UPLINK} has no carrier")))
}
