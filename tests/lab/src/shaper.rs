//! The host's traffic shaping on its end of a container's veth.

use crate::error::LabError;
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

/// A shaper on the host's end of a container's veth. Dropping this value removes the shaper.
#[derive(Debug)]
pub struct Shaper {
    host: Netns,
    device: String,
    removed: bool,
}

impl Shaper {
    pub(super) fn new(host: &Netns, device: &str, tbf: &Tbf) -> Result<Self, LabError> {
        let rate = format!("{}bit", tbf.rate_bits);
        let (burst, limit) = (format!("{}b", tbf.burst_bytes), format!("{}b", tbf.limit_bytes));
        #[rustfmt::skip]
        tool::run(host, "tc", &["qdisc", "add", "dev", device, "root", "tbf",
                                "rate", &rate, "burst", &burst, "limit", &limit])?;
        Ok(Self { host: host.clone(), device: device.to_owned(), removed: false })
    }

    /// Its statistics so far, read from the kernel.
    ///
    /// # Errors
    /// `tc` fails, or its output has an unknown form.
    pub fn stats(&self) -> Result<ShaperStats, LabError> {
        stats(&self.host, &self.device, "tbf")
    }

    /// Removes the shaper. Packets in its queue are lost.
    ///
    /// # Errors
    /// `tc` fails.
    pub fn remove(mut self) -> Result<(), LabError> {
        self.delete()
    }

    fn delete(&mut self) -> Result<(), LabError> {
        if std::mem::replace(&mut self.removed, true) {
            return Ok(());
        }
        tool::run(&self.host, "tc", &["qdisc", "del", "dev", &self.device, "root"]).map(drop)
    }
}

impl Drop for Shaper {
    fn drop(&mut self) {
        // The lab's namespace vanishes later with everything in it, so an error does not matter.
        let _ = self.delete();
    }
}

/// Reads the statistics of the first discipline of this kind on `device`.
pub(super) fn stats(netns: &Netns, device: &str, kind: &str) -> Result<ShaperStats, LabError> {
    let args = ["-s", "-j", "qdisc", "show", "dev", device];
    let listing = tool::run_json(netns, "tc", &args)?;
    parse_stats(&listing, kind).ok_or_else(|| LabError::Output {
        command: format!("tc {}", args.join(" ")),
        problem: format!("no {kind} with statistics in it"),
    })
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
