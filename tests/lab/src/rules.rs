//! Rules of nftables, on the host's bridge and elsewhere.

use crate::changes::Changes;
use crate::container::Container;
use crate::error::{LabError, Result};
use crate::netns::Netns;
use crate::tool;
use std::fmt::Write;
use std::sync::atomic::{AtomicU32, Ordering};

/// A filter for packets on the bridge.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Match(String);

impl Match {
    /// RoCEv2: IPv4 or IPv6, UDP to port 4791.
    #[must_use]
    pub fn roce() -> Self {
        Self::udp(4791)
    }

    /// UDP to `port`.
    #[must_use]
    pub fn udp(port: u16) -> Self {
        Self(format!("meta l4proto udp udp dport {port}"))
    }

    /// Matches only packets from `container`.
    #[must_use]
    pub fn from(self, container: &Container) -> Self {
        self.from_port(container.host_end())
    }

    /// Matches only packets to `container`.
    #[must_use]
    pub fn to(self, container: &Container) -> Self {
        self.and(&format!("oifname {:?}", container.host_end()))
    }

    /// Matches only packets from the bridge's port `name`.
    #[must_use]
    pub fn from_port(self, name: &str) -> Self {
        self.and(&format!("iifname {name:?}"))
    }

    /// Matches only packets that also match `expression`, as in nft(8): `"@ih,0,8 0x0a"`,
    /// `"meta length < 100"`.
    #[must_use]
    pub fn and(mut self, expression: &str) -> Self {
        let _ = write!(self.0, " {expression}");
        self
    }
}

/// The values of an nftables counter.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counter {
    /// The kernel's packets (skbs): a super-packet counts as one.
    pub packets: u64,
    /// Their bytes, from the IP header on.
    pub bytes: u64,
}

/// A base chain of nftables, as in nft(8).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chain<'a> {
    /// Its family: `bridge`, `inet`, `netdev` and others.
    pub family: &'a str,
    /// Its hook.
    pub hook: &'a str,
    /// The interface of a `netdev` chain.
    pub device: Option<&'a str>,
    /// Its priority.
    pub priority: i32,
}

impl Chain<'static> {
    /// The chain `forward` of the host's bridge.
    pub const BRIDGE: Self = Self { family: "bridge", hook: "forward", device: None, priority: 0 };
}

/// Rules in a table of their own, which has the counters `hits` and `others`. Dropping this value
/// removes them.
#[derive(Debug)]
pub struct Rule {
    netns: Netns,
    /// Family and name.
    table: String,
    changes: Changes,
}

impl Rule {
    /// Adds base chains of one family, each with its rules, one a line, which may name the two
    /// counters. Error: there is no `nft`, or the kernel has no such chain. Panics if there is no
    /// chain.
    pub fn new(netns: &Netns, chains: &[(Chain<'_>, &str)]) -> Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let (process, number) = (std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        Self::in_the_place_of(netns, &format!("rocinante_{process}_{number}"), chains)
    }

    /// As [`new`](Self::new), in the place of a table with this name that a process left behind.
    pub fn in_the_place_of(
        netns: &Netns,
        name: &str,
        chains: &[(Chain<'_>, &str)],
    ) -> Result<Self> {
        // With its own table, the rule can be removed without its handle.
        let table = format!("{} {name}", chains[0].0.family);
        let mut script = format!(
            "add table {table}\ndelete table {table}\ntable {table} {{\ncounter hits {{\n}}\ncounter others {{\n}}\n"
        );
        for (Chain { hook, device, priority, .. }, rules) in chains {
            let device = device.map_or(String::new(), |name| format!("device {name:?}"));
            let _ = write!(
                script,
                "chain {hook} {{\ntype filter hook {hook} {device} priority {priority}; \
                 policy accept;\n{rules}\n}}\n"
            );
        }
        netns.nft(&(script + "}\n"))?;
        let mut changes = Changes::default();
        changes.made(netns, &format!("nft delete table {table}"));
        Ok(Self { netns: netns.clone(), table, changes })
    }

    pub(super) fn count(host: &Netns, what: &Match) -> Result<Self> {
        // The priority puts it before the rules that drop.
        let chain = Chain { priority: -10, ..Chain::BRIDGE };
        Self::new(host, &[(chain, &format!("{} counter name hits accept", what.0))])
    }

    pub(super) fn block(host: &Netns, what: &Match) -> Result<Self> {
        Self::new(host, &[(Chain::BRIDGE, &format!("{} counter name hits drop", what.0))])
    }

    pub(super) fn lose(host: &Netns, what: &Match, percent: f64) -> Result<Self> {
        Self::block(host, &what.clone().and(&one_in(percent)))
    }

    /// The packets that the counter `hits` has counted so far: those that a rule of the lab has
    /// matched. Error: `nft` fails, or its output has an unknown form.
    pub fn counter(&self) -> Result<Counter> {
        self.counted("hits")
    }

    /// The same for the counter `name`: `hits` or `others`.
    pub fn counted(&self, name: &str) -> Result<Counter> {
        let command = format!("nft -j list counter {} {name}", self.table);
        parse_counter(&self.netns.json(&command)?)
            .ok_or_else(|| LabError::Output { command, problem: "no counter in it".into() })
    }

    /// Removes the rules. Error: `nft` fails.
    pub fn remove(self) -> Result {
        self.changes.undo()
    }
}

/// A random match of `percent`, in steps of a thousandth of a percent. Empty if it would match
/// everything.
fn one_in(percent: f64) -> String {
    let of_100_000 = (percent.clamp(0.0, 100.0) * 1000.0).round();
    if of_100_000 >= 100_000.0 {
        return String::new();
    }
    format!("numgen random mod 100000 < {of_100_000}")
}

fn parse_counter(listing: &serde_json::Value) -> Option<Counter> {
    tool::objects(&listing["nftables"]).find_map(|item| {
        let counter = item.get("counter")?;
        Some(Counter { packets: counter["packets"].as_u64()?, bytes: counter["bytes"].as_u64()? })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn counters_are_read_from_nft() {
        let listing = json!({"nftables": [
            {"metainfo": {"version": "1.0.6", "json_schema_version": 1}},
            {"counter": {"family": "bridge", "name": "hits", "table": "t", "handle": 1,
                         "packets": 12, "bytes": 345}}
        ]});
        assert_eq!(parse_counter(&listing), Some(Counter { packets: 12, bytes: 345 }));
        assert_eq!(parse_counter(&json!({"nftables": []})), None);
    }

    #[test]
    fn percentages_become_whole_numbers() {
        assert_eq!(one_in(1.0), "numgen random mod 100000 < 1000");
        assert_eq!(one_in(0.001), "numgen random mod 100000 < 1");
        assert_eq!(one_in(250.0), "");
    }
}
