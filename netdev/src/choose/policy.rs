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
//! BPF programs of cgroups and of netfilter links, nor routing rules and `rp_filter` for arriving
//! datagrams.

mod expression;
pub(crate) mod nft;
mod rules;
mod sys;
mod tc;
mod xfrm;
mod xtables;

use std::io;

pub use nft::nft_at_ingress;
pub(crate) use rules::{Audit, AuditVerdict};

use self::rules::ADMIN;
use crate::kernel::interface::Interface;
use crate::kernel::rtnl::Rtnl;

/// Reads the rules on the path of RoCEv2 through `iface`, in the calling thread's network
/// namespace.
#[must_use]
pub(crate) fn audit(iface: &Interface) -> Audit {
    let mut audit = Audit::default();
    let vrf = vrf_of(iface).unwrap_or_else(|error| {
        audit.note_unseen("the VRF", || ADMIN.explain(), &error);
        None
    });
    [Some(iface), vrf.as_ref()].into_iter().flatten().for_each(|on| audit_on(on, &mut audit));
    audit
}

fn audit_on(iface: &Interface, audit: &mut Audit) {
    nft::audit(iface, audit);
    xtables::audit(audit);
    xfrm::audit(iface, audit);
    tc::audit(iface, audit);
}

/// The VRF of an interface, with the interface's addresses: datagrams pass its rules, too.
fn vrf_of(iface: &Interface) -> io::Result<Option<Interface>> {
    let mut rtnl = Rtnl::open()?;
    let Some(index) = rtnl.domain(iface.index)? else { return Ok(None) };
    let name = rtnl.link(index)?.name;
    Ok(Some(Interface { name, index, ..iface.clone() }))
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

#[cfg(test)]
mod tests;
