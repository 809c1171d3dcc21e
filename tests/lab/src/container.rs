//! One container: a namespace, its `eth0`, and the other end of that veth in the host's namespace.

use crate::child::ChildGuard;
use crate::error::{LabError, Result};
use crate::netns::Netns;
use crate::network::Network;
use crate::{BRIDGE, LabConfig, tool};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::process::{Command, Output};

/// A "container": its own network namespace with `lo` and one veth, `eth0`.
#[derive(Debug)]
pub struct Container {
    netns: Netns,
    host_end: String,
    ipv4: Ipv4Addr,
    ipv6: Option<Ipv6Addr>,
}

impl Container {
    /// Name of the interface inside the container.
    pub const DEVICE: &str = "eth0";

    /// A container on the host's bridge.
    pub(super) fn new(host: &Netns, index: u8, config: &LabConfig) -> Result<Self> {
        let (netns, host_end) = Self::bridged(host, index, config)?;
        Self::with_addresses(netns, host_end, index, config)
    }

    /// A container on the bridge of a host that is the router of this network.
    pub(super) fn behind(
        host: &Netns,
        index: u8,
        network: Network,
        config: &LabConfig,
    ) -> Result<Self> {
        let (netns, host_end) = Self::bridged(host, index, config)?;
        Self::in_network(netns, host_end, network, index + 2, config)
    }

    /// A container on a network of its own, with the host as its router.
    pub(super) fn routed(host: &Netns, index: u8, config: &LabConfig) -> Result<Self> {
        let (netns, host_end) = (Self::new_netns()?, format!("veth{index}"));
        joined(host, &host_end, &netns, index, config)?;
        let network = Network::of_containers(index);
        network.join(host, &host_end, 1, config.ipv6)?;
        Self::in_network(netns, host_end, network, 2, config)
    }

    /// A namespace with an `eth0` whose other end is a port of the host's bridge.
    fn bridged(host: &Netns, index: u8, config: &LabConfig) -> Result<(Netns, String)> {
        let (netns, host_end) = (Self::new_netns()?, format!("veth{index}"));
        joined(host, &host_end, &netns, index, config)?;
        host.command(&format!("ip link set {host_end} master {BRIDGE} up"))?;
        Ok((netns, host_end))
    }

    /// Gives `eth0` the addresses of this number, and the network's router.
    fn in_network(
        netns: Netns,
        host_end: String,
        network: Network,
        number: u8,
        config: &LabConfig,
    ) -> Result<Self> {
        let own_v6 = config.ipv6.then(|| (network.v6(number), 64));
        let container = Self::on_device(netns, host_end, (network.v4(number), 24), own_v6)?;
        network.route_by(&container.netns, 1, config.ipv6)?;
        Ok(container)
    }

    /// Two containers with one veth between them.
    pub(super) fn pair(config: &LabConfig) -> Result<[Self; 2]> {
        let (first, second) = (Self::new_netns()?, Self::new_netns()?);
        joined(&first, Self::DEVICE, &second, 1, config)?;
        first.command(&format!("ip link set {} address {}", Self::DEVICE, mac(0)))?;
        let end =
            |netns, index| Self::with_addresses(netns, Self::DEVICE.to_owned(), index, config);
        Ok([end(first, 0)?, end(second, 1)?])
    }

    /// Gives `eth0` its addresses and sets it up.
    fn with_addresses(
        netns: Netns,
        host_end: String,
        index: u8,
        config: &LabConfig,
    ) -> Result<Self> {
        let number = index + 1;
        let ipv4 = Ipv4Addr::new(10, 77, 0, number);
        let ipv6 = config.ipv6.then(|| Ipv6Addr::new(0xfd00, 0x77, 0, 0, 0, 0, 0, number.into()));
        Self::on_device(netns, host_end, (ipv4, 24), ipv6.map(|address| (address, 64)))
    }

    /// A container around an `eth0` that is in `netns` already. Gives it addresses and sets it up.
    pub(super) fn on_device(
        netns: Netns,
        host_end: String,
        (ipv4, v4_prefix): (Ipv4Addr, u8),
        ipv6: Option<(Ipv6Addr, u8)>,
    ) -> Result<Self> {
        let device = Self::DEVICE;
        netns.command(&format!("ip address add {ipv4}/{v4_prefix} dev {device}"))?;
        if let Some((ipv6, prefix)) = ipv6 {
            netns.command(&format!("ip -6 address add {ipv6}/{prefix} dev {device} nodad"))?;
        }
        netns.command(&format!("ip link set {device} up"))?;
        Ok(Self { netns, host_end, ipv4, ipv6: ipv6.map(|(address, _)| address) })
    }

    /// Creates a namespace in which addresses are usable at once.
    pub(super) fn new_netns() -> Result<Netns> {
        let netns = Netns::new()?;
        no_duplicate_address_detection(&netns)?;
        Ok(netns)
    }

    /// Its namespace.
    #[must_use]
    pub fn netns(&self) -> &Netns {
        &self.netns
    }

    /// Its address on the IPv4 network of the bridge or its own, a /24.
    #[must_use]
    pub fn ipv4(&self) -> Ipv4Addr {
        self.ipv4
    }

    /// Its address on that IPv6 network, a /64, if the lab has IPv6.
    #[must_use]
    pub fn ipv6(&self) -> Option<Ipv6Addr> {
        self.ipv6
    }

    /// Its IPv6 address if `v6` asks for it and the lab has IPv6, else its IPv4 address.
    #[must_use]
    pub fn address(&self, v6: bool) -> IpAddr {
        match self.ipv6.filter(|_| v6) {
            Some(ipv6) => ipv6.into(),
            None => self.ipv4.into(),
        }
    }

    /// Name of the other end of its veth, in the host's namespace. In a [`Pair`](crate::Pair) that
    /// end is in the other container's namespace.
    #[must_use]
    pub fn host_end(&self) -> &str {
        &self.host_end
    }

    /// As [`Netns::run`]. Error: the caller has no right to enter the namespace.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        self.netns.run(work)
    }

    /// As [`Netns::spawn`]. Error: the program does not exist or cannot be started.
    pub fn spawn(&self, command: &mut Command) -> Result<ChildGuard> {
        self.netns.spawn(command)
    }

    /// As [`Netns::output`]. Error: the program does not exist or cannot be started.
    pub fn output(&self, command: &mut Command) -> Result<Output> {
        self.netns.output(command)
    }

    /// Feeds a script to `nft` inside the container. Its rules belong to the container's namespace,
    /// and apply beside the host's. Error: there is no `nft`, or it refuses the script; the error
    /// has its message.
    pub fn nft(&self, script: &str) -> Result {
        self.netns.nft(script)
    }

    /// Lets UDP super-packets leave `eth0` whole (`true`, the default of a veth), or lets the
    /// kernel split them into datagrams before the host sees them. Rules and counters then work
    /// packet by packet. Error: there is no `ethtool`, or the kernel is older than 4.18.
    pub fn set_udp_segmentation(&self, whole: bool) -> Result {
        set_udp_segmentation(&self.netns, Self::DEVICE, whole)
    }

    /// Switches segmentation and merging off on `eth0`, of TCP and UDP alike (`ethtool -K eth0 gso
    /// off tso off gro off`): the kernel splits each super-packet before it leaves, and the packets
    /// that arrive stay single.
    pub fn disable_offloads(&self) -> Result {
        let names = [
            ("gso", "generic-segmentation-offload"),
            ("tso", "tcp-segmentation-offload"),
            ("gro", "generic-receive-offload"),
            UDP_SEGMENTATION,
        ];
        names.into_iter().try_for_each(|name| set_feature(&self.netns, Self::DEVICE, name, false))
    }

    /// Takes over the link-layer address and the addresses of `old`, which has none afterwards, and
    /// announces them, as after a cold move of `old` to this place. The own addresses go. Error:
    /// `ip` fails, or `/proc/sys` cannot be written.
    pub fn take_addresses(&self, old: &Self) -> Result {
        let device = Self::DEVICE;
        let command = format!("ip -j address show dev {device}");
        let listing = old.netns.json(&command)?;
        let link = tool::objects(&listing).next();
        let mac = link.and_then(|link| link["address"].as_str());
        let (Some(link), Some(mac)) = (link, mac) else {
            let problem = "no link-layer address in it".to_owned();
            return Err(LabError::Output { command, problem });
        };
        old.netns.command(&format!("ip address flush dev {device} scope global"))?;
        self.netns.command(&format!("ip link set {device} down"))?;
        self.netns.command(&format!("ip address flush dev {device}"))?;
        let announces = self.run(|| {
            ["ipv4/conf/eth0/arp_notify", "ipv6/conf/eth0/ndisc_notify"]
                .into_iter()
                .try_for_each(|switch| std::fs::write(format!("/proc/sys/net/{switch}"), "1"))
        })?;
        announces.map_err(|source| LabError::Namespace { doing: "announce addresses", source })?;
        self.netns.command(&format!("ip link set {device} address {mac} up"))?;
        for info in tool::objects(&link["addr_info"]).filter(|info| info["scope"] == "global") {
            let (Some(address), Some(prefix)) =
                (info["local"].as_str(), info["prefixlen"].as_u64())
            else {
                continue;
            };
            let nodad = if address.contains(':') { " nodad" } else { "" };
            self.netns
                .command(&format!("ip address add {address}/{prefix} dev {device}{nodad}"))?;
        }
        Ok(())
    }

    /// Names each part that is not up yet.
    pub(super) fn not_yet_up(&self) -> Result<Vec<String>> {
        let mut waiting = Vec::new();
        let links = self.netns.json(&format!("ip -j link show dev {}", Self::DEVICE))?;
        if !tool::objects(&links).any(|link| link["operstate"] == "UP") {
            waiting.push(format!("{} at {} has no carrier", Self::DEVICE, self.ipv4));
        }
        let tentative = self.netns.json("ip -j -6 address show tentative")?;
        if tool::objects(&tentative).next().is_some() {
            waiting.push(format!("IPv6 addresses at {} are tentative", self.ipv4));
        }
        Ok(waiting)
    }
}

/// Its name for `ethtool -K`, and the one that `ethtool -k` prints.
const UDP_SEGMENTATION: (&str, &str) = ("tx-udp-segmentation", "tx-udp-segmentation");

/// Sets whether super-packets leave `device` whole.
pub(super) fn set_udp_segmentation(netns: &Netns, device: &str, whole: bool) -> Result {
    set_feature(netns, device, UDP_SEGMENTATION, whole)
}

pub(super) fn set_feature(
    netns: &Netns,
    device: &str,
    (name, printed): (&str, &str),
    on: bool,
) -> Result {
    let wanted = if on { "on" } else { "off" };
    let command = format!("ethtool -K {device} {name} {wanted}");
    netns.command(&command)?;
    // ethtool reports success for some features that it could not change.
    let features = netns.command(&format!("ethtool -k {device}"))?;
    match feature(&features, printed) {
        Some(is) if is == wanted => Ok(()),
        is => Err(LabError::Output {
            command,
            problem: format!("{printed} is {}", is.unwrap_or("unknown")),
        }),
    }
}

/// Joins a container with its host by a veth: its `eth0`, and the host's end.
fn joined(host: &Netns, host_end: &str, netns: &Netns, index: u8, config: &LabConfig) -> Result {
    let LabConfig { mtu, queues, .. } = config;
    let link = format!("mtu {mtu} numtxqueues {queues} numrxqueues {queues}");
    let (own_end, mac, path) = (Container::DEVICE, mac(index), netns.path());
    host.command(&format!(
        "ip link add {host_end} {link} type veth peer name {own_end} {link} address {mac} \
         netns {path}"
    ))
    .map(drop)
}

fn mac(index: u8) -> String {
    format!("02:00:0a:4d:00:{:02x}", index + 1)
}

/// Lets link-local addresses come up at once in interfaces that are created after this. Where
/// /proc/sys is read-only they take a second or two, and the lab waits for them.
fn no_duplicate_address_detection(netns: &Netns) -> Result {
    netns.run(|| {
        for (name, value) in [("accept_dad", "0"), ("dad_transmits", "0")] {
            let _ = std::fs::write(format!("/proc/sys/net/ipv6/conf/default/{name}"), value);
        }
    })
}

/// The state of a feature in the output of `ethtool -k`: `on` or `off`.
fn feature<'a>(features: &'a str, name: &str) -> Option<&'a str> {
    features.lines().find_map(|line| {
        let state = line.trim().strip_prefix(name)?.strip_prefix(':')?;
        state.split_whitespace().next()
    })
}

#[cfg(test)]
mod tests {
    use super::feature;

    #[test]
    fn features_are_read_from_ethtool() {
        let features = "Features for eth0:\ntx-udp_tnl-segmentation: on\ntx-udp-segmentation: off [requested on]\n";
        assert_eq!(feature(features, "tx-udp-segmentation"), Some("off"));
        assert_eq!(feature(features, "tx-udp"), None);
    }
}
