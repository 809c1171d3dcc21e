//! Legacy `iptables` and `ip6tables` (`include/uapi/linux/netfilter_ipv4/ip_tables.h`).
//!
//! `/proc` lists the tables in the namespace. A hook without rules has one entry, its policy; any
//! other entry counts as a rule that concerns us.

use std::io;

use rustix::net::AddressFamily;

use super::rules::{ADMIN, Audit};
use super::sys::{TableInfo, table_entries, table_info};
use crate::kernel::descriptors::datagram_socket;

/// One of the two families.
#[derive(Debug, Clone, Copy)]
pub(super) struct Family {
    pub(super) name: &'static str,
    /// As nftables names it.
    pub(super) nft: &'static str,
    names: &'static str,
    family: AddressFamily,
    pub(super) level: i32,
    /// Offset in an entry of the distance to its target.
    target_offset_at: usize,
}

const FAMILIES: [Family; 2] = [
    Family {
        name: "iptables",
        nft: "ip",
        names: "/proc/self/net/ip_tables_names",
        family: AddressFamily::INET,
        level: libc::IPPROTO_IP,
        target_offset_at: 88,
    },
    Family {
        name: "ip6tables",
        nft: "ip6",
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

/// The hooks, as nftables names them.
const HOOKS: [&str; 5] = ["prerouting", "input", "forward", "output", "postrouting"];

/// A table that holds rules.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) family: Family,
    pub(super) name: String,
    pub(super) hooks: Vec<&'static str>,
}

/// Adds the tables that hold rules.
pub(super) fn audit(audit: &mut Audit) {
    for Table { family, name, .. } in tables(audit) {
        audit.found(format!("{}: rules in table {name}", family.name), true);
    }
}

/// The tables that hold rules. Notes unread ones.
pub(super) fn tables(audit: &mut Audit) -> Vec<Table> {
    let mut tables = Vec::new();
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
            match hooks_with_rules(family, table) {
                Ok(hooks) if hooks.is_empty() => {}
                Ok(hooks) => tables.push(Table { family, name: table.to_owned(), hooks }),
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
    tables
}

/// `/proc/self/net` is the namespace of the process's first thread; this thread may be in another.
fn thread_path(path: &str) -> String {
    path.replace("/proc/self/", "/proc/thread-self/")
}

/// The hooks of a table that have a rule or another policy than ACCEPT.
fn hooks_with_rules(family: Family, table: &str) -> io::Result<Vec<&'static str>> {
    let socket = datagram_socket(family.family)?;
    let info = table_info(&socket, family.level, table)?;
    let entries = table_entries(&socket, family.level, table, info.size)?;
    Ok(busy(family, &info, &entries).map(|hook| HOOKS[hook]).collect())
}

fn busy(family: Family, info: &TableInfo, entries: &[u8]) -> impl Iterator<Item = usize> {
    let accepts = move |hook: usize| {
        let entry = info.underflow[hook] as usize;
        let verdict = u16_at(entries, entry + family.target_offset_at)
            .and_then(|target| i32_at(entries, entry + usize::from(target) + TARGET_LEN));
        verdict == Some(ACCEPT)
    };
    (0..HOOKS.len())
        .filter(|hook| info.valid_hooks & (1 << hook) != 0)
        .filter(move |hook| info.hook_entry[*hook] != info.underflow[*hook] || !accepts(*hook))
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
    use crate::testing::testns::{NetNs, or_skip};

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
                assert!(hooks_with_rules(family, "filter").expect("readable").is_empty());
                let mut found = Audit::default();
                audit(&mut found);
                assert_eq!(found, Audit::default());
                let mut entries =
                    table_entries(&socket, family.level, "filter", info.size).expect("readable");
                let entry = info.underflow[1] as usize;
                let target = u16_at(&entries, entry + family.target_offset_at).expect("there");
                let at = entry + usize::from(target) + TARGET_LEN;
                entries[at..at + 4].copy_from_slice(&(-1_i32).to_ne_bytes()); // DROP
                // Of three hooks, the first.
                assert_eq!(busy(family, &info, &entries).collect::<Vec<_>>(), [1]);
                assert_eq!(busy(family, &info, &[]).count(), 3);
            }
        });
    }
}
