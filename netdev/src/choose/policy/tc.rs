//! `tc`: filters on `ingress` and `clsact`, programs on tcx, and disciplines that shape.

use super::rules::{ADMIN, Audit};
use crate::kernel::denied::{Capability, Needs};
use crate::kernel::interface::Interface;
use crate::kernel::rtnl::{FilterHook, Rtnl};
use crate::kernel::tcx::tcx_programs;

/// Disciplines that an interface has by default, or that only schedule.
const PLAIN: [&str; 6] = ["noqueue", "pfifo_fast", "pfifo", "fq_codel", "mq", "fq"];

/// Adds the disciplines, filters and programs on the interface.
pub(super) fn audit(iface: &Interface, audit: &mut Audit) {
    let what = format!("tc on {}", iface.name);
    if let Err(e) = disciplines(iface, audit) {
        audit.note_unseen(&what, || ADMIN.explain(), &e);
    }
    let mut unseen = None;
    for (ingress, name) in [(true, "ingress"), (false, "egress")] {
        match tcx_programs(iface.index, ingress) {
            Ok(0) => {}
            Ok(n) => audit.found(format!("tcx: {n} programs on {name} of {}", iface.name), ingress),
            Err(e) => unseen = Some(e),
        }
    }
    if let Some(e) = unseen {
        let what = format!("the tcx programs of {}", iface.name);
        let needs =
            Needs { call: "bpf(2)", capabilities: &[Capability::NetAdmin], of_the_host: true };
        audit.note_unseen(&what, || needs.explain(), &e);
    }
}

fn disciplines(iface: &Interface, audit: &mut Audit) -> std::io::Result<()> {
    let mut rtnl = Rtnl::open()?;
    for qdisc in rtnl.qdiscs(iface.index)? {
        let hooks: &[(FilterHook, &str, bool)] = match qdisc.kind.as_str() {
            "ingress" => &[(FilterHook::IngressQdisc, "ingress", true)],
            "clsact" => &[
                (FilterHook::ClsactIngress, "clsact ingress", true),
                // A packet socket's frames pass this one.
                (FilterHook::ClsactEgress, "clsact egress", false),
            ],
            kind if PLAIN.contains(&kind) => &[],
            kind => {
                audit.found(format!("tc: {kind} on {}", iface.name), false);
                &[]
            }
        };
        for (hook, name, bypassed) in hooks {
            if rtnl.has_filters(iface.index, *hook)? {
                audit.found(format!("tc: a filter on {name} of {}", iface.name), *bypassed);
            }
        }
    }
    Ok(())
}
