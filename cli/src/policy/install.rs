//! Puts a control on its path, reads its figures, and takes it away.

use rocinante_lab::{Chain, Changes, Lab, LabError, Rule, Shaper, ShaperStats, Tbf};
use rocinante_netdev::{Interface, ROCE_PORT, TcxDrop};

use super::lab::{Family, address, device, netns};
use super::table::{self, Beside, End, Mark, Place, Taken};
use super::{BURST, RATE};
use crate::messages::PROBE;
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
    /// The error of a command that needs an option of the kernel's names that.
    fn from(error: LabError) -> Self {
        Self::of(&error)
    }
}

impl Trouble {
    pub(super) fn of(error: &LabError) -> Self {
        let LabError::Failed { command, .. } = error else {
            return Self::Failed(error.to_string());
        };
        let option = OPTIONS.iter().find(|(words, _)| command.contains(words));
        option.map_or_else(|| Self::Failed(error.to_string()), |(_, option)| absent(option, error))
    }
}

/// Words of commands, and the options of the kernel that those need.
const OPTIONS: [(&str, &str); 6] = [
    ("type vxlan", "VXLAN"),
    ("root tbf", "NET_SCH_TBF"),
    ("htb default", "NET_SCH_HTB"),
    ("type ifb", "IFB"),
    ("action mirred", "NET_ACT_MIRRED"),
    ("ingress", "NET_SCH_INGRESS"),
];

/// Counts packets that the rule takes.
pub(super) const HITS: &str = "hits";
/// Counts packets that it should have taken, or takes elsewhere.
pub(super) const OTHERS: &str = "others";

/// Matches packets of VXLAN (RFC 7348, 5).
const VXLAN: &str = "udp dport 4789";

/// An MTU that a path MTU of 4096 does not fit.
const SHORT_MTU: u32 = 1500;
const MTU: u32 = 9000;
/// The limit of every shaper.
const LIMIT: Tbf = Tbf { rate_bits: RATE as u64, burst_bytes: BURST, limit_bytes: 1_000_000 };
/// The burst of the shaper whose queue is too short for a burst of the sender: it holds one
/// super-packet, and not two.
pub(super) const SHORT_BURST: u32 = 16 << 10;
const SHORT: Tbf = Tbf { burst_bytes: SHORT_BURST, limit_bytes: 64 << 10, ..LIMIT };

/// A control on its path. Dropping this takes it away.
pub(super) struct Installed<'a> {
    network: &'a Lab,
    rule: Option<Rule>,
    /// A rule in another namespace than that of the counters.
    other: Option<Rule>,
    tcx: Option<TcxDrop>,
    shaper: Option<Shaper>,
    changes: Changes,
    /// The addition to the rule, once the probe has been counted.
    later: Beside,
}

impl<'a> Installed<'a> {
    /// No rule, no shaper and no BPF program.
    pub(super) fn nothing(network: &'a Lab) -> Self {
        let (changes, later) = (Changes::default(), Beside::Nothing);
        Self { network, rule: None, other: None, tcx: None, shaper: None, changes, later }
    }

    /// A rule that drops requests of this family and the probe.
    pub(super) fn rule(
        network: &'a Lab,
        rule: table::Rule,
        family: Family,
    ) -> Result<Self, Trouble> {
        let mut this = Self::nothing(network);
        let requests = requests(network, family);
        match rule {
            table::Rule::Nft { place, chain, device, taken, beside } => {
                if let Beside::BridgeNfCall(_) = beside {
                    this.bridge_nf_call(true)?;
                }
                this.later = beside;
                let taken = match taken {
                    Taken::Requests => requests,
                    Taken::Encapsulating => VXLAN.to_owned(),
                    Taken::Outer => format!("udp dport {PROBE}-{ROCE_PORT}"),
                };
                let seen = format!("{taken} counter name {OTHERS}");
                let before = (chain.1 == "input").then_some((("inet", "prerouting"), 0, &*seen));
                let rule = format!("{taken} counter name {HITS} drop");
                this.chain(place, chain, device, &rule, before)?;
            }
            table::Rule::Tcx { place, end, ingress } => {
                let attached = netns(network, place).run(|| {
                    let index = Interface::by_name(device(network, end))?.index;
                    TcxDrop::attach(index, ingress, [PROBE, ROCE_PORT])
                })?;
                this.tcx = Some(attached.map_err(|error| match error.raw_os_error() {
                    Some(libc::EPERM | libc::EACCES) => {
                        Trouble::NotToBeHad("bpf(2), which needs root".into())
                    }
                    Some(libc::EINVAL | libc::ENOSYS) => Trouble::NotToBeHad("NET_XGRESS".into()),
                    _ => Trouble::Failed(error.to_string()),
                })?);
            }
            table::Rule::NewFromThePeer => {
                let rule = format!(
                    "ct state established,related accept; {requests} ct state new accept; \
                     udp dport {} counter name {HITS} drop",
                    ROCE_PORT
                );
                this.chain(Place::Host, ("inet", "forward"), None, &rule, None)
                    .map_err(|trouble| of_option("NFT_CT", trouble))?;
            }
        }
        Ok(this)
    }

    /// "New from one side, established from the other" with an exception for RoCEv2 that works: by
    /// port, or without connection tracking.
    pub(super) fn remedy(network: &'a Lab, untracked: bool) -> Result<Self, Trouble> {
        let mut this = Self::nothing(network);
        let roce = format!("udp dport {}", ROCE_PORT);
        let notrack = format!("{roce} notrack");
        let before = untracked.then_some((("inet", "prerouting"), -300, &*notrack));
        let accept = if untracked {
            "ct state established,related,untracked accept".to_owned()
        } else {
            format!("{roce} accept; ct state established,related accept")
        };
        let rules = format!("{accept}; {roce} counter name {HITS} drop");
        this.chain(Place::Host, ("inet", "forward"), None, &rules, before)?;
        Ok(this)
    }

    /// Sets up the addition to the rule. Before it, the rule takes the probe.
    pub(super) fn complete(&mut self) -> Result<(), Trouble> {
        match self.later {
            Beside::Nothing | Beside::BridgeNfCall(true) => {}
            Beside::BridgeNfCall(false) => self.bridge_nf_call(false)?,
            Beside::Ifb => self.shaper = Some(ifb(self.network)?),
        }
        Ok(())
    }

    /// A limit of a rate.
    pub(super) fn shaper(
        network: &'a Lab,
        shaper: table::Shaper,
        family: Family,
    ) -> Result<Self, Trouble> {
        let mut this = Self::nothing(network);
        let (host, towards) = (network.host(), device(network, End::Receiver));
        this.shaper = Some(match shaper {
            table::Shaper::Tbf => Shaper::tbf(host, towards, &LIMIT)?,
            table::Shaper::ShortTbf => Shaper::tbf(host, towards, &SHORT)?,
            table::Shaper::Own => {
                let own = netns(network, Place::Sender);
                Shaper::tbf(own, device(network, End::Own), &LIMIT)?
            }
            table::Shaper::Htb => Shaper::htb(host, towards, &LIMIT, &[LIMIT.rate_bits])?,
            table::Shaper::Ifb => ifb(network)?,
            table::Shaper::On(end) => Shaper::tbf(host, device(network, end), &LIMIT)?,
            table::Shaper::Uplink | table::Shaper::Tunnel => {
                let [first, second] = [SENDER, SECOND].map(|at| address(network, at, family));
                let map = format!(
                    "meta priority set {} saddr map {{ {first} : 1:10, {second} : 1:20 }}",
                    family.nft()
                );
                // Behind VXLAN the addresses of the containers are no longer in the outer header.
                let (chain, at, link) = match shaper {
                    table::Shaper::Tunnel => (("bridge", "forward"), None, End::Uplink),
                    _ => (("netdev", "egress"), Some(End::Receiver), End::Receiver),
                };
                this.chain(Place::Host, chain, at, &map, None)?;
                let rates = [LIMIT.rate_bits / 2; 2];
                Shaper::htb(host, device(network, link), &LIMIT, &rates)?
            }
            table::Shaper::Policer => {
                let requests = requests(network, family);
                let rule = format!(
                    "{requests} limit rate over {} kbytes/second burst {} kbytes \
                     counter name {HITS} drop; {requests} counter name {OTHERS}",
                    // nft's kbyte has 1024 bytes.
                    RATE / 8 / 1024,
                    BURST / 1024
                );
                this.chain(Place::Host, ("bridge", "forward"), None, &rule, None)
                    .map_err(|trouble| of_option("NFT_LIMIT", trouble))?;
                return Ok(this);
            }
        });
        Ok(this)
    }

    /// A change of requests, and counters behind it.
    pub(super) fn mark(network: &'a Lab, mark: Mark, family: Family) -> Result<Self, Trouble> {
        let mut this = Self::nothing(network);
        let (requests, ip) = (requests(network, family), family.nft());
        let hop = if family == Family::V4 { "ttl" } else { "hoplimit" };
        let (set, marked) = match mark {
            Mark::Dscp => (format!("{ip} dscp set cs3"), format!("{ip} dscp cs3")),
            Mark::Ce => (format!("{ip} ecn set ce"), format!("{ip} ecn ce")),
            Mark::OuterCe => return this.outer_mark(&requests, &format!("{ip} ecn ce")),
            // The router takes one off.
            Mark::Ttl => (format!("{ip} {hop} set 9"), format!("{ip} {hop} 8")),
            Mark::Mtu => {
                let set =
                    |mtu| format!("ip link set dev {} mtu {mtu}", device(network, End::Receiver));
                this.changes.make(network.host(), &set(SHORT_MTU), &set(MTU))?;
                return Ok(this);
            }
        };
        let bridge = if mark == Mark::Ttl { "inet" } else { "bridge" };
        let counted = counted(&requests, &marked);
        let behind = Some(((bridge, "postrouting"), 0, &*counted));
        let rule = format!("{requests} {set}");
        this.chain(Place::Host, (bridge, "prerouting"), None, &rule, behind)?;
        Ok(this)
    }

    /// A switch between the hosts marks packets of VXLAN; counters behind them, on the bridge of
    /// the receiver's host.
    fn outer_mark(mut self, requests: &str, marked: &str) -> Result<Self, Trouble> {
        let switch = self.network.between().ok_or(Trouble::Failed("no switch".into()))?;
        let chain = Chain { hook: "prerouting", ..Chain::BRIDGE };
        let made = Rule::new(switch, &[(chain, &format!("{VXLAN} ip ecn set ce"))]);
        self.other = Some(made.map_err(|error| absent("NF_TABLES_BRIDGE", &error))?);
        let counted = counted(requests, marked);
        self.chain(Place::PeerHost, ("bridge", "postrouting"), None, &counted, None)?;
        Ok(self)
    }

    pub(super) fn count(&self, name: &str) -> Result<u64, String> {
        if let Some(tcx) = &self.tcx {
            return tcx.dropped().map_err(|error| error.to_string());
        }
        let rule = self.rule.as_ref().ok_or("there is no rule")?;
        Ok(rule.counted(name).map_err(|error| error.to_string())?.packets)
    }

    /// Bytes that the rules have let pass.
    pub(super) fn passed(&self) -> Result<u64, String> {
        let rule = self.rule.as_ref().ok_or("there is no rule")?;
        Ok(rule.counted(OTHERS).map_err(|error| error.to_string())?.bytes)
    }

    /// The figures of the shaper.
    pub(super) fn shaped(&self) -> Result<ShaperStats, String> {
        let shaper = self.shaper.as_ref().ok_or("there is no shaper")?;
        shaper.stats().map_err(|error| error.to_string())
    }

    /// Takes the rules and shapers away behind the back of the measurement.
    pub(super) fn forget(self) -> Result<Self, Trouble> {
        let network = self.network;
        self.remove().map_err(Trouble::Failed)?;
        Ok(Self::nothing(network))
    }

    /// Takes the control away.
    pub(super) fn remove(self) -> Result<(), String> {
        let Self { rule, other, shaper, changes, .. } = self;
        let removed = [
            rule.map_or(Ok(()), Rule::remove),
            other.map_or(Ok(()), Rule::remove),
            shaper.map_or(Ok(()), Shaper::remove),
            changes.undo(),
        ];
        removed.into_iter().collect::<Result<(), _>>().map_err(|error| error.to_string())
    }

    /// Adds a chain with rules, and another one of the same family in the same namespace.
    fn chain(
        &mut self,
        place: Place,
        (family, hook): (&'static str, &'static str),
        end: Option<End>,
        rules: &str,
        other: Option<((&'static str, &'static str), i32, &str)>,
    ) -> Result<(), Trouble> {
        let device = end.map(|end| device(self.network, end));
        let mut chains = vec![(Chain { family, hook, device, priority: 0 }, rules)];
        chains.extend(other.map(|((family, hook), priority, rules)| {
            (Chain { family, hook, device: None, priority }, rules)
        }));
        let option = match (family, hook) {
            ("netdev", "ingress") => "NETFILTER_INGRESS",
            ("netdev", _) => "NETFILTER_EGRESS",
            ("bridge", _) => "NF_TABLES_BRIDGE",
            _ => "NF_TABLES_INET",
        };
        let rule = Rule::new(netns(self.network, place), &chains);
        self.rule = Some(rule.map_err(|error| absent(option, &error))?);
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
}

/// Counts requests with and without a mark.
fn counted(requests: &str, marked: &str) -> String {
    format!("{requests} {marked} counter name {HITS} accept; {requests} counter name {OTHERS}")
}

/// Matches requests of the sender, and its probe.
fn requests(network: &Lab, family: Family) -> String {
    let (ip, sender) = (family.nft(), address(network, SENDER, family));
    format!("{ip} saddr {sender} udp dport {PROBE}-{}", ROCE_PORT)
}

/// A shaper behind the host's end of the sender's veth.
fn ifb(network: &Lab) -> Result<Shaper, LabError> {
    Shaper::ifb(network.host(), device(network, End::Sender), MTU, &LIMIT)
}

/// The options that further controls need, and that the kernel lacks, found out by trying.
pub(super) fn lacking(network: &Lab) -> Vec<&'static str> {
    let (host, device) = (network.host(), device(network, End::Sender));
    let police = format!(
        "tc filter add dev {device} parent ffff: protocol all u32 match u32 0 0 action police rate \
         1mbit burst 10k"
    );
    let ingress = |verb| format!("tc qdisc {verb} dev {device} ingress");
    let qdisc = |verb| format!("tc qdisc {verb} dev {device} root fq");
    let link = |kind| format!("ip link add link {device} name probe0 type {kind}");
    let unlink = || "ip link del probe0".to_owned();
    let tried = [
        ("NET_ACT_POLICE", vec![ingress("add"), police], ingress("del")),
        ("NET_SCH_FQ", vec![qdisc("add")], qdisc("del")),
        ("IPVLAN", vec![link("ipvlan")], unlink()),
        ("NETKIT", vec!["ip link add probe0 type netkit".to_owned()], unlink()),
    ];
    let lacks = |commands: Vec<String>, undo: String| {
        let failed = commands.iter().any(|command| host.command(command).is_err());
        let _ = host.command(&undo);
        failed
    };
    let tried = tried.into_iter().filter_map(|(name, all, undo)| lacks(all, undo).then_some(name));
    tried.collect()
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
fn absent(option: &str, error: &LabError) -> Trouble {
    match error {
        LabError::Failed { stderr, .. } if ABSENT.iter().any(|text| stderr.contains(text)) => {
            Trouble::NotToBeHad(option.to_owned())
        }
        _ => Trouble::Failed(error.to_string()),
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
        let failed = |stderr: &str| {
            let command = "tc qdisc add dev veth1 root handle 1: htb default 10".into();
            Trouble::from(LabError::Failed { command, stderr: stderr.to_owned() })
        };
        let unknown = failed("Error: Specified qdisc kind is unknown.");
        assert_eq!(unknown, Trouble::NotToBeHad("NET_SCH_HTB".into()));
        let command = "ip link add vxlan0 type vxlan id 77 dstport 4789".into();
        let stderr = "Error: Unknown device type.".into();
        let vxlan = Trouble::of(&LabError::Failed { command, stderr });
        assert_eq!(vxlan, Trouble::NotToBeHad("VXLAN".into()));
        let other = failed("Error: Exclusivity flag on, cannot modify.");
        assert!(matches!(other, Trouble::Failed(_)), "{other:?}");
    }
}
