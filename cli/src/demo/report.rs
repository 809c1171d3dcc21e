//! The results of the demo, as JSON and as text.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use crate::messages::ByOp;

/// All results (`rocinante demo --json`).
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(super) struct Report {
    pub(super) backends: Vec<BackendReport>,
    pub(super) skipped: Vec<Skipped>,
}

impl Report {
    /// Whether a backend ran, and all backends passed.
    pub(super) fn is_ok(&self) -> bool {
        !self.backends.is_empty() && self.backends.iter().all(|backend| backend.ok)
    }
}

/// A backend that is not available here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Skipped {
    pub(super) netdev: String,
    pub(super) why: String,
}

/// The results of one backend.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(super) struct BackendReport {
    pub(super) netdev: String,
    pub(super) ok: bool,
    pub(super) verified_bytes: u64,
    pub(super) verified_by_op: ByOp,
    /// By path MTU.
    pub(super) mtu: BTreeMap<String, Figures>,
    pub(super) policy: Option<Policy>,
    /// The reason why there is no `policy`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) policy_why: Option<String>,
    /// The failures, if `ok` is false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) error: Option<String>,
}

/// The figures at one path MTU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(super) struct Figures {
    /// Half the round trip of a 64-byte WRITE, median, in microseconds.
    pub(super) latency_us_p50: f64,
    /// 10⁶ 64-byte WRITEs per second.
    pub(super) rate_mops: f64,
    /// 10⁹ payload bits per second, WRITEs of 64 KiB.
    pub(super) gbps_65536: f64,
    /// 10⁹ payload bits per second, WRITEs of 1 MiB.
    pub(super) gbps_1048576: f64,
}

/// The effects of the host's rules.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(super) struct Policy {
    /// Packets that a counter on the host's bridge saw. These are the kernel's packets (skbs): a
    /// super-packet counts as one.
    pub(super) counted_skbs: u64,
    /// Status of a WRITE while a rule on the host's bridge dropped its packets.
    pub(super) drop_status: String,
    /// Time until its completion, in seconds.
    pub(super) drop_seconds: f64,
    /// Whether a new connection moved data once the rule was gone.
    pub(super) after_drop_ok: bool,
    /// 10⁶ payload bits per second without the shaper.
    pub(super) unshaped_mbps: f64,
    /// The rate of the shaper on the host's end of the receiver's veth.
    pub(super) shaped_limit_mbps: u32,
    /// 10⁶ payload bits per second through the shaper.
    pub(super) shaped_mbps: f64,
    /// Bytes that the shaper passed, and how often it held a packet back, from the kernel's
    /// statistics.
    pub(super) tbf_bytes: u64,
    pub(super) tbf_overlimits: u64,
}

impl fmt::Display for ByOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = self.entries().map(|(name, bytes)| format!("{name} {}", Bytes(bytes)));
        write!(f, "{}: {}", Bytes(self.total()), parts.join(", "))
    }
}

impl Figures {
    /// The heading above the lines of [`Figures::line`].
    pub(super) const HEADING: &str =
        "path MTU   64 B half RTT p50   64 B WRITEs       64 KiB         1 MiB";

    pub(super) fn line(&self, mtu: &str) -> String {
        format!(
            "{mtu:>8}   {:>14.2} µs   {:>8.3} M/s   {:>6.2} Gb/s   {:>6.2} Gb/s",
            self.latency_us_p50, self.rate_mops, self.gbps_65536, self.gbps_1048576
        )
    }
}

/// A number of bytes in a readable unit.
pub(super) struct Bytes(pub(super) u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bytes @ 0..10_240 => write!(f, "{bytes} B"),
            bytes @ 10_240..10_485_760 => write!(f, "{} KiB", bytes >> 10),
            bytes => write!(f, "{} MiB", bytes >> 20),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_shown_is_no_success() {
        assert!(!Report::default().is_ok());
    }

    #[test]
    fn bytes_are_short() {
        let shown = [17, 10_240, 64 << 20].map(|bytes| Bytes(bytes).to_string());
        assert_eq!(shown, ["17 B", "10 KiB", "64 MiB"]);
    }
}
