//! The host's nftables rules on the bridge.

use crate::container::Container;
use crate::error::LabError;
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
        self.to_port(container.host_end())
    }

    /// Matches only packets from the bridge's port `name`.
    #[must_use]
    pub fn from_port(self, name: &str) -> Self {
        self.and(&format!("iifname {name:?}"))
    }

    /// Matches only packets to the bridge's port `name`.
    #[must_use]
    pub fn to_port(self, name: &str) -> Self {
        self.and(&format!("oifname {name:?}"))
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

/// A rule in the host's bridge (family `bridge`, hook `forward`) with a counter. Dropping this
/// value removes the rule.
#[derive(Debug)]
pub struct Rule {
    host: Netns,
    table: String,
    removed: bool,
}

/// Name of the counter in a rule's table.
const COUNTER: &str = "hits";

impl Rule {
    pub(super) fn count(host: &Netns, what: &Match) -> Result<Self, LabError> {
        // The priority puts it before the rules that drop.
        Self::add(host, "count", -10, &what.0, "accept")
    }

    pub(super) fn block(host: &Netns, what: &Match) -> Result<Self, LabError> {
        Self::add(host, "block", 0, &what.0, "drop")
    }

    pub(super) fn lose(host: &Netns, what: &Match, percent: f64) -> Result<Self, LabError> {
        Self::add(host, "lose", 0, &format!("{} {}", what.0, one_in(percent)), "drop")
    }

    fn add(
        host: &Netns,
        kind: &str,
        priority: i32,
        what: &str,
        verdict: &str,
    ) -> Result<Self, LabError> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        // With its own table, the rule can be removed without its handle.
        let table = format!("rocinante_{kind}_{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        let script = format!(
            "table bridge {table} {{\n\
             counter {COUNTER} {{\n}}\n\
             chain forward {{\n\
             type filter hook forward priority {priority}; policy accept;\n\
             {what} counter name \"{COUNTER}\" {verdict}\n\
             }}\n}}\n"
        );
        tool::nft_script(host, &script)?;
        Ok(Self { host: host.clone(), table, removed: false })
    }

    /// The packets that the rule has matched so far, from `nft -j`.
    ///
    /// # Errors
    /// `nft` fails, or its output has an unknown form.
    pub fn counter(&self) -> Result<Counter, LabError> {
        counter(&self.host, "bridge", &self.table, COUNTER)
    }

    /// Removes the rule.
    ///
    /// # Errors
    /// `nft` fails.
    pub fn remove(mut self) -> Result<(), LabError> {
        self.delete()
    }

    fn delete(&mut self) -> Result<(), LabError> {
        if std::mem::replace(&mut self.removed, true) {
            return Ok(());
        }
        tool::run(&self.host, "nft", &["delete", "table", "bridge", &self.table]).map(drop)
    }
}

impl Drop for Rule {
    fn drop(&mut self) {
        // The lab's namespace vanishes later with all its rules, so an error does not matter.
        let _ = self.delete();
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

/// Reads a named counter.
pub(super) fn counter(
    netns: &Netns,
    family: &str,
    table: &str,
    name: &str,
) -> Result<Counter, LabError> {
    let args = ["-j", "list", "counter", family, table, name];
    let listing = tool::run_json(netns, "nft", &args)?;
    parse_counter(&listing).ok_or_else(|| LabError::Output {
        command: format!("nft {}", args.join(" ")),
        problem: "no counter in it".into(),
    })
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
