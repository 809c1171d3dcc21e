//! Rules of the own network namespace that a backend would bypass.
//!
//! Whoever writes and reads whole frames skips hooks that a UDP socket passes: rules that somebody put
//! there on purpose. [`audit`] lists those that could concern RoCEv2 (UDP/4791) on an interface, so
//! that the choice of a backend never skips one silently. It reads
//!
//! - nftables' base chains and rules, also those that `iptables-nft` made,
//! - the tables of legacy `iptables` and `ip6tables`,
//! - `tc` filters on `ingress` and `clsact`, programs on tcx, and queueing disciplines that shape.
//!
//! A rule is left out only if it provably cannot match: another protocol or port, another interface, a
//! loopback address. Reading nftables needs `CAP_NET_ADMIN` over the namespace, reading tcx needs it
//! over the machine; what cannot be read is in [`Audit::unseen`]. Not looked at are rules outside the
//! namespace, which bind every backend on a veth, and BPF programs of cgroups and of netfilter links.

mod expression;
mod nft;
mod sys;
mod tc;
mod xtables;

use crate::iface::Interface;
use crate::port::Backend;

/// A rule that could concern RoCEv2.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// What and where it is: `nft: rule 7 in chain output of table inet filter`.
    pub what: String,
    /// Whether [`Backend::Packet`] bypasses it too. [`Backend::Xdp`] bypasses all.
    pub packet_bypasses: bool,
}

/// What is known of the rules on an interface.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Audit {
    /// Rules that could concern RoCEv2.
    pub rules: Vec<Rule>,
    /// What could not be read, and why.
    pub unseen: Vec<String>,
}

/// What reading rules takes, of capabilities(7).
const ADMIN: &str = "CAP_NET_ADMIN";

/// What a backend would bypass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// All rules were read, and it bypasses none.
    Clear,
    /// It bypasses these.
    Bypasses(Vec<String>),
    /// Some rules could not be read.
    Unseen(Vec<String>),
}

impl Audit {
    /// What the given backend would bypass. A UDP socket bypasses nothing.
    #[must_use]
    pub fn verdict(&self, backend: Backend) -> Verdict {
        if matches!(backend, Backend::Udp | Backend::Sim) {
            return Verdict::Clear;
        }
        let bypassed: Vec<String> = self
            .rules
            .iter()
            .filter(|rule| backend == Backend::Xdp || rule.packet_bypasses)
            .map(|rule| rule.what.clone())
            .collect();
        if !bypassed.is_empty() {
            Verdict::Bypasses(bypassed)
        } else if !self.unseen.is_empty() {
            Verdict::Unseen(self.unseen.clone())
        } else {
            Verdict::Clear
        }
    }

    fn found(&mut self, what: String, packet_bypasses: bool) {
        self.rules.push(Rule { what, packet_bypasses });
    }

    /// Notes what could not be read, and the `capability` that it takes.
    fn note_unseen(&mut self, what: &str, capability: &str, error: &std::io::Error) {
        let why = match error.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => format!("needs {capability}"),
            _ => error.to_string(),
        };
        self.unseen.push(format!("{what} cannot be read ({why})"));
    }
}

/// Reads the rules that are on the way of RoCEv2 through `iface`, in the calling thread's network
/// namespace.
#[must_use]
pub fn audit(iface: &Interface) -> Audit {
    let mut audit = Audit::default();
    nft::audit(iface, &mut audit);
    xtables::audit(&mut audit);
    tc::audit(iface, &mut audit);
    audit
}

/// The payload of a netlink message as a chain and as a rule.
#[cfg(feature = "fuzzing")]
pub(crate) fn try_payload(family: u8, payload: &[u8]) {
    nft::try_payload(family, payload);
}

#[cfg(test)]
mod tests;
