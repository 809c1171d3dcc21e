//! Puts a control on its path, reads its figures, and takes it away.

use std::fmt::Write as _;
use std::net::IpAddr;

use rocinante_lab::{LabError, Netns, ShaperStats};
use rocinante_netdev::{Interface, TcxDrop};

use super::lab::{Family, Network};
use super::table::{Beside, End, Mark, Place, Rule, Shaper};
use super::{BURST, RATE};
use crate::orders::PROBE;
use crate::workers::{SECOND, SENDER};

/// The reason why a control is not there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Trouble {
    /// The kernel lacks this option, or the user this right.
    NotToBeHad(String),
    /// Something else.
    Failed(String),
}

impl From<LabError> for Trouble {
    fn from(error: LabError) -> Self {
        Self::Failed(error.to_string())
    }
}

/// Name of the table of nftables in every namespace, and of its counters.
const TABLE: &str = "rocinante_policy";
/// Counts packets that the rule takes.
pub(super) const HITS: &str = "hits";
/// Counts packets that it should have taken, or takes elsewhere.
pub(super) const OTHERS: &str = "others";

const IFB: &str = "ifb0";
/// An MTU that a path MTU of 4096 does not fit.
const SHORT_MTU: &str = "1500";
const MTU: &str = "9000";
/// Queue of a shaper, in bytes.
const QUEUE: u32 = 1_000_000;
/// Burst and queue of the shaper whose queue is too short for a burst of the sender: it holds one
/// super-packet, and not two.
pub(super) const SHORT_BURST: u32 = 16 << 10;
const SHORT_QUEUE: u32 = 64 << 10;

/// A control on its path. Dropping this takes it away.
pub(super) struct Installed<'a> {
    network: &'a Network,
    undo: Vec<(Netns, Tool, Vec<String>)>,
    table: Option<(Netns, &'static str)>,
    tcx: Option<TcxDrop>,
    qdisc: Option<(Netns, String, &'static str)>,
    /// The addition to the rule, once the probe has been counted.
    later: Beside,
}

enum Tool {
    Ip,
    Tc,
    Nft,
}

impl<'a> Installed<'a> {
    /// No rule, no shaper and no BPF program.
    pub(super) fn nothing(network: &'a Network) -> Self {
        let (undo, later) = (Vec::new(), Beside::Nothing);
        Self { network, undo, table: None, tcx: None, qdisc: None, later }
    }

    /// A rule that drops requests of this family and the probe.
    pub(super) fn rule(network: &'a Network, rule: Rule, family: Family) -> Result<Self, Trouble> {
        let mut this = Self::nothing(network);
        let requests = this.requests(family);
        match rule {
            Rule::Nft { place, chain, device, beside } => {
                if let Beside::BridgeNfCall(_) = beside {
                    this.bridge_nf_call(true)?;
                }
                this.later = beside;
                let before = if chain.1 == "input" {
                    format!(
                        "chain before {{ type filter hook prerouting priority 0; policy accept; \
                         {requests} counter name {OTHERS}\n}}\n"
                    )
                } else {
                    String::new()
                };
                let rule = format!("{requests} counter name {HITS} drop");
                this.chain(place, chain, device, &rule, &before)?;
            }
            Rule::Tcx { place, end, ingress } => {
                let device = network.device(end);
                let attached = network.netns(place).run(|| {
                    let index = Interface::by_name(device)?.index;
                    TcxDrop::attach(index, ingress, [PROBE, rocinante_netdev::ROCE_PORT])
                })?;
                this.tcx = Some(attached.map_err(|error| match error.raw_os_error() {
                    Some(libc::EPERM | libc::EACCES) => {
                        Trouble::NotToBeHad("bpf(2), which needs root".into())
                    }
                    Some(libc::EINVAL | libc::ENOSYS) => Trouble::NotToBeHad("NET_XGRESS".into()),
                    _ => Trouble::Failed(error.to_string()),
                })?);
            }
            Rule::NewFromThePeer => {
                let rule = format!(
                    "ct state established,related accept; {requests} ct state new accept; \
                     udp dport {} counter name {HITS} drop",
                    rocinante_netdev::ROCE_PORT
                );
                this.chain(Place::Host, ("inet", "forward"), None, &rule, "")
                    .map_err(|trouble| of_option("NFT_CT", trouble))?;
            }
        }
        Ok(this)
    }

    /// "New from one side, established from the other" with an exception for RoCEv2 that works: by
    /// port, or without connection tracking.
    pub(super) fn remedy(network: &'a Network, untracked: bool) -> Result<Self, Trouble> {
        let mut this = Self::nothing(network);
        let roce = format!("udp dport {}", rocinante_netdev::ROCE_PORT);
        let (before, accept) = if untracked {
            let chain = format!(
                "chain before {{ type filter hook prerouting priority -300; policy accept; \
                 {roce} notrack\n}}\n"
            );
            (chain, "ct state established,related,untracked accept".to_owned())
        } else {
            (String::new(), format!("{roce} accept; ct state established,related accept"))
        };
        let rules = format!("{accept}; {roce} counter name {HITS} drop");
        this.chain(Place::Host, ("inet", "forward"), None, &rules, &before)?;
        Ok(this)
    }

    /// Sets up the addition to the rule. Before it, the rule takes the probe.
    pub(super) fn complete(&mut self) -> Result<(), Trouble> {
        match self.later {
            Beside::Nothing | Beside::BridgeNfCall(true) => Ok(()),
            Beside::BridgeNfCall(false) => self.bridge_nf_call(false),
            Beside::Ifb => self.ifb(),
        }
    }

    /// A limit of a rate.
    pub(super) fn shaper(
        network: &'a Network,
        shaper: Shaper,
        family: Family,
    ) -> Result<Self, Trouble> {
        let mut this = Self::nothing(network);
        let towards = network.device(End::Receiver).to_owned();
        match shaper {
            Shaper::Tbf => this.tbf(Place::Host, &towards, BURST, QUEUE)?,
            Shaper::ShortTbf => this.tbf(Place::Host, &towards, SHORT_BURST, SHORT_QUEUE)?,
            Shaper::Own => this.tbf(Place::Sender, network.device(End::Own), BURST, QUEUE)?,
            Shaper::Htb => this.htb(&towards, &[("1:10", RATE)], "10")?,
            Shaper::Ifb => this.ifb()?,
            Shaper::Uplink => {
                let half = RATE / 2;
                this.htb(&towards, &[("1:10", half), ("1:20", half)], "10")?;
                let map = this.classes(family);
                this.chain(Place::Host, ("netdev", "egress"), Some(End::Receiver), &map, "")?;
            }
            Shaper::Policer => {
                let requests = this.requests(family);
                let rule = format!(
                    "{requests} limit rate over {} kbytes/second burst {} kbytes \
                     counter name {HITS} drop; {requests} counter name {OTHERS}",
                    // nft's kbyte has 1024 bytes.
                    RATE / 8 / 1024,
                    BURST / 1024
                );
                this.chain(Place::Host, ("bridge", "forward"), None, &rule, "")
                    .map_err(|trouble| of_option("NFT_LIMIT", trouble))?;
            }
        }
        Ok(this)
    }

    /// A change of requests, and counters behind it.
    pub(super) fn mark(network: &'a Network, mark: Mark, family: Family) -> Result<Self, Trouble> {
        let mut this = Self::nothing(network);
        let (requests, ip) = (this.requests(family), family.nft());
        let hop = if family == Family::V4 { "ttl" } else { "hoplimit" };
        let (set, marked) = match mark {
            Mark::Dscp => (format!("{ip} dscp set cs3"), format!("{ip} dscp cs3")),
            Mark::Ce => (format!("{ip} ecn set ce"), format!("{ip} ecn ce")),
            // The router takes one off.
            Mark::Ttl => (format!("{ip} {hop} set 9"), format!("{ip} {hop} 8")),
            Mark::Mtu => {
                this.mtu(SHORT_MTU)?;
                return Ok(this);
            }
        };
        let bridge = if mark == Mark::Ttl { "inet" } else { "bridge" };
        let behind = format!(
            "chain behind {{ type filter hook postrouting priority 0; policy accept; \
             {requests} {marked} counter name {HITS} accept; {requests} counter name {OTHERS}\n}}\n"
        );
        let chain = (bridge, "prerouting");
        this.chain(Place::Host, chain, None, &format!("{requests} {set}"), &behind)?;
        Ok(this)
    }

    /// The value of a counter.
    pub(super) fn count(&self, name: &str) -> Result<u64, String> {
        if let Some(tcx) = &self.tcx {
            return tcx.dropped().map_err(|error| error.to_string());
        }
        let (netns, family) = self.table.as_ref().ok_or("there is no rule")?;
        let counter = netns.counter(family, TABLE, name).map_err(|error| error.to_string())?;
        Ok(counter.packets)
    }

    /// Bytes that the rules have let pass.
    pub(super) fn passed(&self) -> Result<u64, String> {
        let (netns, family) = self.table.as_ref().ok_or("there is no rule")?;
        let counter = netns.counter(family, TABLE, OTHERS).map_err(|error| error.to_string())?;
        Ok(counter.bytes)
    }

    /// The figures of the shaper.
    pub(super) fn shaped(&self) -> Result<ShaperStats, String> {
        let (netns, device, kind) = self.qdisc.as_ref().ok_or("there is no shaper")?;
        netns.qdisc(device, kind).map_err(|error| error.to_string())
    }

    /// Takes the rules and shapers away behind the back of the measurement.
    pub(super) fn forget(mut self) -> Result<Self, Trouble> {
        self.tcx = None;
        self.undo_all()?;
        Ok(Self::nothing(self.network))
    }

    /// Takes the control away.
    pub(super) fn remove(mut self) -> Result<(), String> {
        self.tcx = None;
        self.undo_all().map_err(|error| error.to_string())
    }

    fn undo_all(&mut self) -> Result<(), LabError> {
        let mut result = Ok(());
        while let Some((netns, tool, words)) = self.undo.pop() {
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            let undone = match tool {
                Tool::Ip => netns.ip(&words),
                Tool::Tc => netns.tc(&words),
                Tool::Nft => netns.nft(&words.join(" ")),
            };
            result = result.and(undone);
        }
        result
    }

    /// Matches requests of the sender, and its probe.
    fn requests(&self, family: Family) -> String {
        let (ip, sender) = (family.nft(), self.network.address(SENDER, family));
        format!("{ip} saddr {sender} udp dport {PROBE}-{}", rocinante_netdev::ROCE_PORT)
    }

    /// The class of each container.
    fn classes(&self, family: Family) -> String {
        let ip = family.nft();
        let [first, second]: [IpAddr; 2] =
            [SENDER, SECOND].map(|index| self.network.address(index, family));
        format!("meta priority set {ip} saddr map {{ {first} : 1:10, {second} : 1:20 }}")
    }

    fn chain(
        &mut self,
        place: Place,
        (family, hook): (&'static str, &'static str),
        device: Option<End>,
        rules: &str,
        before: &str,
    ) -> Result<(), Trouble> {
        let netns = self.network.netns(place);
        let device =
            device.map_or(String::new(), |end| format!(" device \"{}\"", self.network.device(end)));
        let mut script = format!("table {family} {TABLE} {{\n");
        for counter in [HITS, OTHERS] {
            let _ = writeln!(script, "counter {counter} {{\n}}");
        }
        let _ = write!(
            script,
            "{before}chain rules {{\ntype filter hook {hook}{device} priority 0; policy accept;\n\
             {rules}\n}}\n}}\n"
        );
        let option = match (family, hook) {
            ("netdev", "ingress") => "NETFILTER_INGRESS",
            ("netdev", _) => "NETFILTER_EGRESS",
            ("bridge", _) => "NF_TABLES_BRIDGE",
            _ => "NF_TABLES_INET",
        };
        netns.nft(&script).map_err(|error| absent(option, error))?;
        let delete = ["delete table", family, TABLE].map(str::to_owned).to_vec();
        self.undo.push((netns.clone(), Tool::Nft, delete));
        self.table = Some((netns.clone(), family));
        Ok(())
    }

    fn tbf(&mut self, place: Place, device: &str, burst: u32, queue: u32) -> Result<(), Trouble> {
        let netns = self.network.netns(place);
        let [rate, burst, queue] = [format!("{RATE}bit"), format!("{burst}b"), format!("{queue}b")];
        #[rustfmt::skip]
        let add = ["qdisc", "add", "dev", device, "root", "tbf",
                   "rate", &rate, "burst", &burst, "limit", &queue];
        netns.tc(&add).map_err(|error| absent("NET_SCH_TBF", error))?;
        self.undo_tc(netns, &["qdisc", "del", "dev", device, "root"]);
        self.qdisc = Some((netns.clone(), device.to_owned(), "tbf"));
        Ok(())
    }

    /// An htb with classes of these rates, which may borrow from each other.
    fn htb(&mut self, device: &str, rates: &[(&str, u32)], other: &str) -> Result<(), Trouble> {
        let netns = self.network.host();
        let root = ["qdisc", "add", "dev", device, "root", "handle", "1:", "htb", "default", other];
        netns.tc(&root).map_err(|error| absent("NET_SCH_HTB", error))?;
        self.undo_tc(netns, &["qdisc", "del", "dev", device, "root"]);
        let class = |parent: &str, id: &str, rate: u32| {
            let (rate, ceil) = (format!("{rate}bit"), format!("{RATE}bit"));
            let burst = format!("{BURST}b");
            #[rustfmt::skip]
            let words = ["class", "add", "dev", device, "parent", parent, "classid", id, "htb",
                         "rate", &rate, "ceil", &ceil, "burst", &burst, "cburst", &burst,
                         "quantum", "60000"];
            netns.tc(&words)
        };
        class("1:", "1:1", RATE)?;
        for (id, rate) in rates {
            class("1:1", id, *rate)?;
        }
        self.qdisc = Some((netns.clone(), device.to_owned(), "htb"));
        Ok(())
    }

    /// Redirects the traffic from the sender's veth to an ifb with a tbf.
    fn ifb(&mut self) -> Result<(), Trouble> {
        let (netns, device) = (self.network.host(), self.network.device(End::Sender));
        netns
            .ip(&["link", "add", IFB, "mtu", MTU, "type", "ifb"])
            .map_err(|error| absent("IFB", error))?;
        let delete = ["link", "del", IFB].map(str::to_owned).to_vec();
        self.undo.push((netns.clone(), Tool::Ip, delete));
        netns.ip(&["link", "set", IFB, "up"])?;
        self.tbf(Place::Host, IFB, BURST, QUEUE)?;
        netns
            .tc(&["qdisc", "add", "dev", device, "ingress"])
            .map_err(|error| absent("NET_SCH_INGRESS", error))?;
        self.undo_tc(netns, &["qdisc", "del", "dev", device, "ingress"]);
        #[rustfmt::skip]
        let redirect = ["filter", "add", "dev", device, "parent", "ffff:", "protocol", "all",
                        "u32", "match", "u32", "0", "0",
                        "action", "mirred", "egress", "redirect", "dev", IFB];
        netns.tc(&redirect).map_err(|error| absent("NET_ACT_MIRRED", error))
    }

    fn mtu(&mut self, mtu: &str) -> Result<(), Trouble> {
        let (netns, device) = (self.network.host(), self.network.device(End::Receiver));
        netns.ip(&["link", "set", "dev", device, "mtu", mtu])?;
        let back = ["link", "set", "dev", device, "mtu", MTU].map(str::to_owned).to_vec();
        self.undo.push((netns.clone(), Tool::Ip, back));
        Ok(())
    }

    /// Whether rules of `ip`, `ip6` and `inet` see bridged packets.
    fn bridge_nf_call(&self, on: bool) -> Result<(), Trouble> {
        let value = if on { "1" } else { "0" };
        let wrote = self.network.host().run(|| {
            ["iptables", "ip6tables"].into_iter().try_for_each(|name| {
                std::fs::write(format!("/proc/sys/net/bridge/bridge-nf-call-{name}"), value)
            })
        })?;
        wrote.map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => Trouble::NotToBeHad("BRIDGE_NETFILTER".into()),
            std::io::ErrorKind::PermissionDenied | std::io::ErrorKind::ReadOnlyFilesystem => {
                Trouble::NotToBeHad("a /proc/sys that can be written".into())
            }
            _ => Trouble::Failed(format!("bridge-nf-call: {error}")),
        })
    }

    fn undo_tc(&mut self, netns: &Netns, words: &[&str]) {
        let words = words.iter().map(|word| (*word).to_owned()).collect();
        self.undo.push((netns.clone(), Tool::Tc, words));
    }
}

impl Drop for Installed<'_> {
    fn drop(&mut self) {
        // The namespaces vanish with all of it at the end.
        let _ = self.undo_all();
    }
}

/// The options that further controls need, and that the kernel lacks, found out by trying.
pub(super) fn lacking(network: &Network) -> Vec<&'static str> {
    let (host, device) = (network.host(), network.device(End::Sender));
    let ingress = ["qdisc", "add", "dev", device, "ingress"];
    #[rustfmt::skip]
    let police = ["filter", "add", "dev", device, "parent", "ffff:", "protocol", "all",
                  "u32", "match", "u32", "0", "0",
                  "action", "police", "rate", "1mbit", "burst", "10k"];
    let link = |kind| {
        let added = host.ip(&["link", "add", "link", device, "name", "probe0", "type", kind]);
        let _ = host.ip(&["link", "del", "probe0"]);
        added
    };
    let qdisc = |kind| {
        let added = host.tc(&["qdisc", "add", "dev", device, "root", kind]);
        let _ = host.tc(&["qdisc", "del", "dev", device, "root"]);
        added
    };
    let policed = host.tc(&ingress).and_then(|()| host.tc(&police));
    let _ = host.tc(&["qdisc", "del", "dev", device, "ingress"]);
    let tried = [
        ("NET_ACT_POLICE", policed),
        ("NET_SCH_FQ", qdisc("fq")),
        ("IPVLAN", link("ipvlan")),
        ("NETKIT", host.ip(&["link", "add", "probe0", "type", "netkit"])),
    ];
    let _ = host.ip(&["link", "del", "probe0"]);
    tried.into_iter().filter(|(_, result)| result.is_err()).map(|(option, _)| option).collect()
}

/// Words of the errors of `nft`, `tc` and `ip` for options that the kernel lacks.
const ABSENT: [&str; 5] = [
    "not supported",
    "No such file or directory",
    "kind is unknown",
    "Unknown device type",
    "Failed to load TC action module",
];

/// The meaning of a failure, where the kernel needs `option`.
fn absent(option: &str, error: LabError) -> Trouble {
    match &error {
        LabError::Failed { stderr, .. } if ABSENT.iter().any(|text| stderr.contains(text)) => {
            Trouble::NotToBeHad(option.to_owned())
        }
        _ => error.into(),
    }
}

/// Names another option as the one that the kernel lacks.
fn of_option(option: &str, trouble: Trouble) -> Trouble {
    match trouble {
        Trouble::NotToBeHad(_) => Trouble::NotToBeHad(option.to_owned()),
        failed @ Trouble::Failed(_) => failed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_kernel_lacks_is_named() {
        let failed = |stderr: &str| LabError::Failed {
            command: "tc qdisc add".into(),
            stderr: stderr.to_owned(),
        };
        let unknown = failed("Error: Specified qdisc kind is unknown.");
        assert_eq!(absent("NET_SCH_HTB", unknown), Trouble::NotToBeHad("NET_SCH_HTB".into()));
        let other = absent("NET_SCH_HTB", failed("Error: Exclusivity flag on, cannot modify."));
        assert!(matches!(other, Trouble::Failed(_)), "{other:?}");
    }
}
