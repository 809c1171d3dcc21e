//! Rules of the own network namespace that a backend would bypass.
//!
//! A backend that writes and reads whole frames skips hooks that a UDP socket passes, and
//! administrators put rules there on purpose. [`audit`] lists the rules that could concern RoCEv2
//! (UDP/4791) on an interface, so that the choice of a backend never skips one silently. It reads
//!
//! - nftables' base chains and rules, also those made by `iptables-nft`,
//! - the tables of legacy `iptables` and `ip6tables`,
//! - the policies of IPsec,
//! - `tc` filters on `ingress` and `clsact`, programs on tcx, and queueing disciplines that shape.
//!
//! A rule is left out only if it provably cannot match: another protocol or port, another
//! interface, a loopback address. Reading nftables needs `CAP_NET_ADMIN` over the namespace;
//! reading tcx needs it over the machine. [`Audit::unseen`] lists rules that could not be read. The
//! audit does not cover rules outside the namespace, which apply to every backend on a veth, nor
//! BPF programs of cgroups and of netfilter links.

mod expression;
mod nft;
mod sys;
mod tc;
mod xfrm;
mod xtables;

use crate::kernel::denied::{Capability, Needs};
use crate::kernel::interface::Interface;
use crate::port::contract::Backend;

/// A rule that could concern RoCEv2.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rule {
    /// What and where it is: `nft: rule 7 in chain output of table inet filter`.
    pub what: String,
    /// Whether [`Backend::Packet`] bypasses it too. [`Backend::Xdp`] bypasses all.
    pub packet_bypasses: bool,
}

/// The known rules on an interface.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Audit {
    /// Rules that could concern RoCEv2.
    pub rules: Vec<Rule>,
    /// Rules that could not be read, and why.
    pub unseen: Vec<String>,
}

/// What reading rules needs, except those of tcx.
const ADMIN: Needs =
    Needs { call: "reading rules", capabilities: &[Capability::NetAdmin], of_the_host: false };

/// The rules that a backend would bypass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum AuditVerdict {
    /// All rules were read, and it bypasses none.
    Clear,
    /// The backend bypasses these rules.
    Bypasses(Vec<String>),
    /// Some rules could not be read.
    Unseen(Vec<String>),
}

impl Audit {
    /// The rules that the given backend would bypass. A UDP socket bypasses none.
    #[must_use]
    pub(crate) fn verdict(&self, backend: Backend) -> AuditVerdict {
        if matches!(backend, Backend::Udp | Backend::Sim) {
            return AuditVerdict::Clear;
        }
        let bypassed: Vec<String> = self
            .rules
            .iter()
            .filter(|rule| backend == Backend::Xdp || rule.packet_bypasses)
            .map(|rule| rule.what.clone())
            .collect();
        if !bypassed.is_empty() {
            AuditVerdict::Bypasses(bypassed)
        } else if !self.unseen.is_empty() {
            AuditVerdict::Unseen(self.unseen.clone())
        } else {
            AuditVerdict::Clear
        }
    }

    fn found(&mut self, what: String, packet_bypasses: bool) {
        self.rules.push(Rule { what, packet_bypasses });
    }

    /// Records rules that could not be read, and why; `denied` explains `EPERM`.
    fn note_unseen(&mut self, what: &str, denied: impl FnOnce() -> String, error: &std::io::Error) {
        let why = match error.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => denied(),
            _ => error.to_string(),
        };
        self.unseen.push(format!("{what} cannot be read ({why})"));
    }
}

/// Reads the rules on the path of RoCEv2 through `iface`, in the calling thread's network
/// namespace.
#[must_use]
pub(crate) fn audit(iface: &Interface) -> Audit {
    let mut audit = Audit::default();
    nft::audit(iface, &mut audit);
    xtables::audit(&mut audit);
    xfrm::audit(iface, &mut audit);
    tc::audit(iface, &mut audit);
    audit
}

/// Rules in one place that neither `nft` nor `tc` lists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unlisted {
    /// `ip` and `ip6` of legacy iptables, `xfrm` of IPsec.
    pub family: &'static str,
    /// The hook, as nftables names it; of IPsec the direction, `in`, `out` or `fwd`.
    pub hook: &'static str,
    /// What and where they are: `iptables filter (forward)`.
    pub what: String,
}

/// The rules in the calling thread's network namespace that neither `nft` nor `tc` lists: those of
/// legacy iptables, and the policies of IPsec that RoCEv2 from and to the addresses of `iface`
/// could meet there. With `forwards` the addresses are of others, for which the namespace forwards.
/// The second list has rules that could not be read, and why.
#[must_use]
pub fn unlisted_rules(iface: &Interface, forwards: bool) -> (Vec<Unlisted>, Vec<String>) {
    let (mut audit, mut rules) = (Audit::default(), Vec::new());
    for xtables::Table { family, name, hooks } in xtables::tables(&mut audit) {
        rules.extend(hooks.into_iter().map(|hook| Unlisted {
            family: family.nft,
            hook,
            what: format!("{} {name} ({hook})", family.name),
        }));
    }
    rules.extend(xfrm::policies(iface, forwards, &mut audit).into_iter().map(|(hook, count)| {
        Unlisted {
            family: "xfrm",
            hook,
            what: format!("ipsec: {count} policies of direction {hook}"),
        }
    }));
    (rules, audit.unseen)
}

/// Parses the payload of a netlink message as a chain and as a rule.
#[cfg(feature = "fuzzing")]
pub(crate) fn try_payload(family: u8, payload: &[u8]) {
    nft::try_payload(family, payload);
}

#[cfg(test)]
mod tests;
