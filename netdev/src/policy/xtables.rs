//! Legacy `iptables` and `ip6tables` (`include/uapi/linux/netfilter_ipv4/ip_tables.h`).
//!
//! `/proc` lists the tables in the namespace. An empty one has one entry per hook, its policy, and
//! an end mark; any other entry counts as a rule that concerns us.

use std::io;

use rustix::net::AddressFamily;

use super::sys::{TableInfo, table_entries, table_info};
use super::{ADMIN, Audit};
use crate::fd::datagram_socket;

/// One of the two families.
#[derive(Debug, Clone, Copy)]
pub(super) struct Family {
    name: &'static str,
    names: &'static str,
    family: AddressFamily,
    pub(super) level: i32,
    /// Offset in an entry of the distance to its target.
    target_offset_at: usize,
}

const FAMILIES: [Family; 2] = [
    Family {
        name: "iptables",
        names: "/proc/self/net/ip_tables_names",
        family: AddressFamily::INET,
        level: libc::IPPROTO_IP,
        target_offset_at: 88,
    },
    Family {
        name: "ip6tables",
        names: "/proc/self/net/ip6_tables_names",
        family: AddressFamily::INET6,
        level: libc::IPPROTO_IPV6,
        target_offset_at: 140,
    },
];

/// `-NF_ACCEPT - 1`: the encoding of the policy ACCEPT in a table.
const ACCEPT: i32 = -2;
/// Length of `struct xt_entry_target`; a standard target's verdict follows it.
const TARGET_LEN: usize = 32;

/// Adds the tables that hold rules.
pub(super) fn audit(audit: &mut Audit) {
    for family in FAMILIES {
        let names = match std::fs::read_to_string(thread_path(family.names)) {
            Ok(names) => names,
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            Err(e) => {
                audit.note_unseen(
                    &format!("the tables of {}", family.name),
                    || "needs root".into(),
                    &e,
                );
                continue;
            }
        };
        for table in names.split_whitespace() {
            match is_pristine(family, table) {
                Ok(true) => {}
                Ok(false) => audit.found(format!("{}: rules in table {table}", family.name), true),
                Err(e) => {
                    audit.note_unseen(
                        &format!("table {table} of {}", family.name),
                        || ADMIN.explain(),
                        &e,
                    );
                }
            }
        }
    }
}

/// `/proc/self/net` is the namespace of the process's first thread; this thread may be in another.
fn thread_path(path: &str) -> String {
    path.replace("/proc/self/", "/proc/thread-self/")
}

/// Whether a table has no rules, and accepts everything.
fn is_pristine(family: Family, table: &str) -> io::Result<bool> {
    let socket = datagram_socket(family.family)?;
    let info = table_info(&socket, family.level, table)?;
    if info.num_entries > info.valid_hooks.count_ones() + 1 {
        return Ok(false);
    }
    let entries = table_entries(&socket, family.level, table, info.size)?;
    Ok(policies_accept(family, &info, &entries))
}

fn policies_accept(family: Family, info: &TableInfo, entries: &[u8]) -> bool {
    (0..5).filter(|hook| info.valid_hooks & (1 << hook) != 0).all(|hook| {
        let entry = info.underflow[hook] as usize;
        let verdict = u16_at(entries, entry + family.target_offset_at)
            .and_then(|target| i32_at(entries, entry + usize::from(target) + TARGET_LEN));
        verdict == Some(ACCEPT)
    })
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn i32_at(bytes: &[u8], at: usize) -> Option<i32> {
    Some(i32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testns::{NetNs, or_skip};

    #[test]
    fn a_fresh_table_is_pristine_and_a_changed_policy_is_seen() {
        let ns = or_skip!(
            "policy::a_fresh_table_is_pristine_and_a_changed_policy_is_seen",
            NetNs::new()
        );
        ns.run(|| {
            for family in FAMILIES {
                let socket = datagram_socket(family.family).expect("a socket");
                // Asking makes the kernel create the table, if it has it.
                let info = or_skip!(
                    "policy::a_fresh_table_is_pristine_and_a_changed_policy_is_seen",
                    table_info(&socket, family.level, "filter")
                );
                let names = std::fs::read_to_string(thread_path(family.names)).expect("names");
                assert!(names.contains("filter"), "{names:?}");
                assert!(is_pristine(family, "filter").expect("readable"));
                let mut found = Audit::default();
                audit(&mut found);
                assert_eq!(found, Audit::default());
                let mut entries =
                    table_entries(&socket, family.level, "filter", info.size).expect("readable");
                let entry = info.underflow[1] as usize;
                let target = u16_at(&entries, entry + family.target_offset_at).expect("there");
                let at = entry + usize::from(target) + TARGET_LEN;
                entries[at..at + 4].copy_from_slice(&(-1_i32).to_ne_bytes()); // DROP
                assert!(!policies_accept(family, &info, &entries));
                assert!(!policies_accept(family, &info, &[]));
            }
        });
    }
}
