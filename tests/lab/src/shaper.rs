//! Traffic shaping, by the host on its end of a container's veth and elsewhere.

use crate::changes::Changes;
use crate::error::{LabError, Result};
use crate::netns::Netns;
use crate::tool;
use serde_json::Value;

/// A token bucket, as in tc-tbf(8).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tbf {
    /// Bits per second on the wire, Ethernet header included.
    pub rate_bits: u64,
    /// Bytes that may pass at once. Larger super-packets are split into datagrams.
    pub burst_bytes: u32,
    /// Bytes that may wait in the queue before it drops.
    pub limit_bytes: u32,
}

impl Tbf {
    /// A bucket of `mbit` · 10⁶ bit/s with a queue of 1 MB. Its burst lets a super-packet of 64 KiB
    /// pass whole.
    #[must_use]
    pub const fn mbit(mbit: u32) -> Self {
        Self { rate_bits: mbit as u64 * 1_000_000, burst_bytes: 128 << 10, limit_bytes: 1_000_000 }
    }
}

/// Statistics of a shaper, as `tc -s -j` reports them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ShaperStats {
    /// Bytes that passed, Ethernet header included.
    pub bytes: u64,
    /// The kernel's packets (skbs) that passed. Each piece of a split packet counts.
    pub packets: u64,
    /// Packets dropped because the queue was full.
    pub drops: u64,
    /// How often a packet had to wait for tokens.
    pub overlimits: u64,
    /// Bytes waiting now.
    pub backlog_bytes: u64,
}

/// A shaper on an interface. Dropping this value removes the shaper.
#[derive(Debug)]
pub struct Shaper {
    netns: Netns,
    device: String,
    kind: &'static str,
    changes: Changes,
}

impl Shaper {
    /// A token bucket for packets that leave by `device`. Error: there is no `tc`, the kernel has
    /// no `sch_tbf`, or the device is shaped already.
    pub fn tbf(netns: &Netns, device: &str, tbf: &Tbf) -> Result<Self> {
        let mut shaper = Self::nothing(netns, device, "tbf");
        shaper.bucket(tbf)?;
        Ok(shaper)
    }

    /// An htb for packets that leave by `device`, with classes `1:10`, `1:20` and so on of these
    /// rates in bits per second. They may borrow from each other up to the bucket's rate. The first
    /// class has the traffic that no rule gives to another. Error: there is no `tc`, the kernel has
    /// no `sch_htb`, or the device is shaped already.
    pub fn htb(netns: &Netns, device: &str, all: &Tbf, rates: &[u64]) -> Result<Self> {
        let mut shaper = Self::nothing(netns, device, "htb");
        shaper.root("handle 1: htb default 10")?;
        let (ceil, burst) = (all.rate_bits, all.burst_bytes);
        let classes = (1u64..).zip(rates).map(|(number, rate)| ("1:1", number * 10, *rate));
        for (parent, id, rate) in [("1:", 1, ceil)].into_iter().chain(classes) {
            netns.command(&format!(
                "tc class add dev {device} parent {parent} classid 1:{id} htb rate {rate}bit \
                 ceil {ceil}bit burst {burst}b cburst {burst}b quantum 60000"
            ))?;
        }
        Ok(shaper)
    }

    /// A token bucket for packets that arrive by `device`: they are redirected to an ifb. Error:
    /// there is no `tc`, or the kernel has no ifb, `sch_ingress`, `act_mirred` or `sch_tbf`.
    pub fn ifb(netns: &Netns, device: &str, mtu: u32, tbf: &Tbf) -> Result<Self> {
        const IFB: &str = "ifb0";
        let mut shaper = Self::nothing(netns, IFB, "tbf");
        let changes = &mut shaper.changes;
        let add = format!("ip link add {IFB} mtu {mtu} type ifb");
        changes.make(netns, &add, &format!("ip link del {IFB}"))?;
        netns.command(&format!("ip link set {IFB} up"))?;
        shaper.bucket(tbf)?;
        let ingress = |verb| format!("tc qdisc {verb} dev {device} ingress");
        shaper.changes.make(netns, &ingress("add"), &ingress("del"))?;
        netns.command(&format!(
            "tc filter add dev {device} parent ffff: protocol all u32 match u32 0 0 action mirred \
             egress redirect dev {IFB}"
        ))?;
        Ok(shaper)
    }

    fn nothing(netns: &Netns, device: &str, kind: &'static str) -> Self {
        let (netns, device) = (netns.clone(), device.to_owned());
        Self { netns, device, kind, changes: Changes::default() }
    }

    fn bucket(&mut self, tbf: &Tbf) -> Result {
        let Tbf { rate_bits, burst_bytes, limit_bytes } = tbf;
        self.root(&format!("tbf rate {rate_bits}bit burst {burst_bytes}b limit {limit_bytes}b"))
    }

    /// Gives the device this root discipline.
    fn root(&mut self, discipline: &str) -> Result {
        let device = &self.device;
        let add = format!("tc qdisc add dev {device} root {discipline}");
        self.changes.make(&self.netns, &add, &format!("tc qdisc del dev {device} root"))
    }

    /// Its statistics so far, read from the kernel. Error: `tc` fails, or its output has an unknown
    /// form.
    pub fn stats(&self) -> Result<ShaperStats> {
        let (command, kind) = (format!("tc -s -j qdisc show dev {}", self.device), self.kind);
        parse_stats(&self.netns.json(&command)?, kind).ok_or_else(|| LabError::Output {
            command,
            problem: format!("no {kind} with statistics in it"),
        })
    }

    /// Removes the shaper. Packets in its queue are lost. Error: `tc` or `ip` fails.
    pub fn remove(self) -> Result {
        self.changes.undo()
    }
}

fn parse_stats(listing: &Value, kind: &str) -> Option<ShaperStats> {
    let qdisc = tool::objects(listing).find(|qdisc| qdisc["kind"] == kind)?;
    let figure = |name: &str| qdisc.get(name)?.as_u64();
    Some(ShaperStats {
        bytes: figure("bytes")?,
        packets: figure("packets")?,
        drops: figure("drops")?,
        overlimits: figure("overlimits")?,
        backlog_bytes: figure("backlog")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn statistics_are_read_from_tc() {
        let listing = json!([
            {"kind": "ingress", "handle": "ffff:", "options": {}},
            {"kind": "tbf", "handle": "8001:", "root": true, "bytes": 5, "packets": 4, "drops": 3,
             "overlimits": 2, "requeues": 0, "backlog": 1, "qlen": 1}
        ]);
        let expected =
            ShaperStats { bytes: 5, packets: 4, drops: 3, overlimits: 2, backlog_bytes: 1 };
        assert_eq!(parse_stats(&listing, "tbf"), Some(expected));
        assert_eq!(parse_stats(&listing, "htb"), None);
        assert_eq!(parse_stats(&json!([]), "tbf"), None);
    }
}
