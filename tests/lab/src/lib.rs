//! A network of containers in one process: a "host" with a bridge, and N "containers". Each
//! container has its own network namespace and a veth `eth0`. The other end of the veth is a port
//! of the bridge.
//!
//! ```text
//!  container 0            host                     container 1
//!  eth0 10.77.0.1/24 ── veth0 ┐ br0 ┌ veth1 ── eth0 10.77.0.2/24
//!       fd00:77::1/64         └─────┘               fd00:77::2/64
//! ```
//!
//! A [`Pair`] is two containers with nothing between them. With [`Lab::routed`] the host forwards
//! between the containers' networks. [`Lab::of_hosts`] has several hosts, and a network between
//! them: [`Between`].
//!
//! The namespaces have no names. They exist as long as this process holds their descriptors, or a
//! process that was started inside them lives. So nothing is left behind, not even after `kill -9`.
//! The lab never touches the network of the machine.
//!
//! The host's policy ([`Rule`], [`Shaper`]) is plain `nft` and `tc` on the host's side. Its figures
//! are the kernel's.
//!
//! It works as root, and for any user where user namespaces are allowed: call
//! [`enter_user_namespace`] first thing in `main`. [`Availability`] names the available parts, and
//! the reason for each of the others.
//!
//! ```no_run
//! use rocinante_lab::{Lab, LabConfig, Match};
//! use std::process::Command;
//!
//! let lab = Lab::new(&LabConfig::default())?;
//! let seen = lab.count(&Match::roce())?;
//! let mut server = lab.container(1).spawn(Command::new("rocinante").arg("pingpong"))?;
//! let peer = lab.container(1).ipv4().to_string();
//! lab.container(0).output(Command::new("rocinante").args(["pingpong", &peer]))?;
//! server.kill();
//! println!("the bridge saw {} packets", seen.counter()?.packets);
//! # Ok::<(), rocinante_lab::LabError>(())
//! ```

mod availability;
mod changes;
mod child;
mod container;
mod error;
mod hosts;
mod netns;
mod network;
mod pair;
mod rules;
mod shaper;
mod tap;
mod tool;
mod userns;

pub use availability::Availability;
pub use changes::Changes;
pub use child::{ChildGuard, exit_with_parent, kill_children, kill_children_on_signal, lines};
pub use container::Container;
pub use error::{LabError, Result};
pub use hosts::{Between, Hosts, UPLINK, VXLAN};
pub use netns::Netns;
pub use pair::Pair;
pub use rules::{Chain, Counter, Match, Rule};
pub use shaper::{Shaper, ShaperStats, Tbf};
pub use userns::{Privilege, enter_user_namespace};

use std::time::{Duration, Instant};

/// Name of the bridge in the host's namespace.
pub const BRIDGE: &str = "br0";

/// Time limit for links to come up in [`Lab::new`]. The kernel notices a carrier once a second, and
/// needs a lock for that. Every thread that creates or ends a namespace waits for the same lock.
/// With many such threads it took more than ten seconds.
const LINKS_UP_MAX: Duration = Duration::from_secs(60);

/// The shape of a [`Lab`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LabConfig {
    /// Number of containers, 1 to 250.
    pub containers: u8,
    /// MTU in bytes of every link, IP header included. With 9000 a path MTU of 4096 fits.
    pub mtu: u32,
    /// Whether the containers also get IPv6 addresses.
    pub ipv6: bool,
    /// Number of queues of each end of a container's link, in either direction.
    pub queues: u32,
}

impl Default for LabConfig {
    /// Two containers, MTU 9000, IPv4 and IPv6, one queue.
    fn default() -> Self {
        Self { containers: 2, mtu: 9000, ipv6: true, queues: 1 }
    }
}

/// Containers behind a host, which has a bridge or routes. Everything vanishes once it is dropped
/// and the last process in it has ended.
#[derive(Debug)]
pub struct Lab {
    hosts: Vec<Netns>,
    /// The switch or router between several hosts.
    between: Option<Netns>,
    containers: Vec<Container>,
}

impl Lab {
    /// Creates the namespaces, joins them, and waits until every link is up and every address
    /// usable. Error: the caller has no right to create namespaces, a program (`ip`) is missing, or
    /// the kernel has no veth or bridge. The error says what to do.
    pub fn new(config: &LabConfig) -> Result<Self> {
        let host = quiet_host(config.mtu)?;
        let containers = (0..config.containers)
            .map(|index| Container::new(&host, index, config))
            .collect::<Result<Vec<_>, _>>()?;
        let lab = Self { hosts: vec![host.clone()], between: None, containers };
        lab.wait(&[host])?;
        Ok(lab)
    }

    /// The same with a host that routes, and no bridge.
    ///
    /// ```text
    ///  container 0                  host                    container 1
    ///  eth0 10.78.0.2/24 ── veth0 10.78.0.1 │ veth1 10.78.1.1 ── eth0 10.78.1.2/24
    /// ```
    ///
    /// From the view of container 0, `veth1` is the host's uplink. Error: as [`new`](Self::new);
    /// also if `/proc/sys` cannot be written.
    pub fn routed(config: &LabConfig) -> Result<Self> {
        let host = Container::new_netns()?;
        forward(&host)?;
        let containers = (0..config.containers)
            .map(|index| Container::routed(&host, index, config))
            .collect::<Result<Vec<_>, _>>()?;
        let lab = Self { hosts: vec![host], between: None, containers };
        lab.wait(&[])?;
        Ok(lab)
    }

    /// The host's namespace: it holds the bridge and the host's ends of the veths. Of several
    /// hosts, the first.
    #[must_use]
    pub fn host(&self) -> &Netns {
        &self.hosts[0]
    }

    /// The namespace of the host of the container at `index`.
    #[must_use]
    pub fn host_of(&self, index: usize) -> &Netns {
        &self.hosts[index % self.hosts.len()]
    }

    /// The namespace of the switch or router between several hosts. Its interface `host0` leads to
    /// the first host, and so on.
    #[must_use]
    pub fn between(&self) -> Option<&Netns> {
        self.between.as_ref()
    }

    /// All containers.
    #[must_use]
    pub fn containers(&self) -> &[Container] {
        &self.containers
    }

    /// The container at `index`. Panics if there is no such container.
    #[must_use]
    pub fn container(&self, index: usize) -> &Container {
        &self.containers[index]
    }

    /// Adds a counter to the host's bridge. It counts matching packets and lets them pass. Error:
    /// there is no `nft`, or the kernel has no nftables for bridges.
    pub fn count(&self, what: &Match) -> Result<Rule> {
        Rule::count(self.host(), what)
    }

    /// Adds a rule to the host's bridge that drops and counts every matching packet. Error: there
    /// is no `nft`, or the kernel has no nftables for bridges.
    pub fn block(&self, what: &Match) -> Result<Rule> {
        Rule::block(self.host(), what)
    }

    /// Adds a rule to the host's bridge that drops and counts `percent` of the matching packets, at
    /// random. The unit is the kernel's packet (skb): a super-packet is lost or passes as a whole.
    /// To lose single datagrams, switch super-packets off by [`Container::set_udp_segmentation`].
    /// Error: there is no `nft`, or the kernel has no nftables for bridges or no `numgen`.
    pub fn lose(&self, what: &Match, percent: f64) -> Result<Rule> {
        Rule::lose(self.host(), what, percent)
    }

    /// Lets UDP super-packets reach the container at `index` whole (`true`, the default), or lets
    /// the host split them into datagrams. They leave their sender whole in both cases. Error: as
    /// [`Container::set_udp_segmentation`]. Panics if there is no such container.
    pub fn set_udp_segmentation_towards(&self, index: usize, whole: bool) -> Result {
        container::set_udp_segmentation(
            self.host_of(index),
            self.container(index).host_end(),
            whole,
        )
    }

    /// Shapes the host's traffic to the container at `index`, by a token bucket on the host's end
    /// of its veth. Error: there is no `tc`, the kernel has no `sch_tbf`, or the container is
    /// shaped already. Panics if there is no such container.
    pub fn shape(&self, index: usize, tbf: &Tbf) -> Result<Shaper> {
        Shaper::tbf(self.host_of(index), self.container(index).host_end(), tbf)
    }

    /// Waits until everything is up, the bridges of these namespaces too.
    fn wait(&self, bridges: &[Netns]) -> Result {
        wait_until_none(|| self.not_yet_up(bridges))
    }

    /// Names each part that is not up yet. Empty when all are.
    fn not_yet_up(&self, bridges: &[Netns]) -> Result<Vec<String>> {
        let mut waiting = Vec::new();
        for bridge in bridges {
            let ports = Ports::of(bridge)?;
            waiting.extend(ports.waiting().map(|name| format!("{name} is not forwarding")));
        }
        if self.between.is_some() {
            let uplinks = self.hosts.iter().map(hosts::uplink_not_yet_up);
            waiting.extend(uplinks.collect::<Result<Vec<_>>>()?.into_iter().flatten());
        }
        for container in &self.containers {
            waiting.extend(container.not_yet_up()?);
        }
        Ok(waiting)
    }
}

/// The bridge's ports as `ip -j` lists them.
struct Ports(serde_json::Value);

impl Ports {
    fn of(bridge: &Netns) -> Result<Self> {
        bridge.json(&format!("ip -j -d link show master {BRIDGE}")).map(Self)
    }

    fn forwarding(&self, name: &str) -> bool {
        tool::objects(&self.0).any(|port| port["ifname"] == name && is_forwarding(port))
    }

    /// The names of those that do not forward.
    fn waiting(&self) -> impl Iterator<Item = &str> {
        let waiting = tool::objects(&self.0).filter(|port| !is_forwarding(port));
        waiting.filter_map(|port| port["ifname"].as_str())
    }
}

fn is_forwarding(port: &serde_json::Value) -> bool {
    // A VXLAN device knows no carrier.
    ["UP", "UNKNOWN"].iter().any(|state| port["operstate"] == *state)
        && port["linkinfo"]["info_slave_data"]["state"] == "forwarding"
}

/// Waits until `not_yet_up` names no link any more.
fn wait_until_none(not_yet_up: impl Fn() -> Result<Vec<String>>) -> Result {
    let deadline = Instant::now() + LINKS_UP_MAX;
    loop {
        let waiting = not_yet_up()?;
        if waiting.is_empty() {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(LabError::NotUp { links: waiting });
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Switches forwarding on in a namespace.
fn forward(host: &Netns) -> Result {
    let switches = ["net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"];
    host.run(|| {
        switches
            .into_iter()
            .try_for_each(|switch| std::fs::write(format!("/proc/sys/{switch}"), "1"))
    })?
    .map_err(|source| LabError::Namespace { doing: "switch forwarding on", source })
}

/// A host with a bridge, which sends nothing itself.
fn quiet_host(mtu: u32) -> Result<Netns> {
    let host = Netns::new()?;
    no_addresses_by_themselves(&host)?;
    add_bridge(&host, mtu)?;
    Ok(host)
}

fn add_bridge(host: &Netns, mtu: u32) -> Result {
    host.command(&format!(
        "ip link add {BRIDGE} mtu {mtu} type bridge forward_delay 0 stp_state 0 mcast_snooping 0"
    ))?;
    host.command(&format!("ip link set {BRIDGE} up")).map(drop)
}

/// Keeps IPv6 addresses off the host's interfaces, so that the host itself sends nothing on the
/// bridge.
fn no_addresses_by_themselves(host: &Netns) -> Result {
    host.run(|| {
        // Where /proc/sys is read-only the host sends a few packets, which do no harm.
        let _ = std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1");
    })
}
