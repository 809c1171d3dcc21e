//! What is measured.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// One figure of the table; its name in JSON is that of `rocinante demo --json`.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    clap::ValueEnum,
)]
pub enum Figure {
    /// Goodput of WRITEs of 1 MiB, in 10⁹ payload bits per second.
    #[serde(rename = "gbps_1048576")]
    #[value(name = "gbps_1048576")]
    Large,
    /// Goodput of WRITEs of 64 KiB, in 10⁹ payload bits per second.
    #[serde(rename = "gbps_65536")]
    #[value(name = "gbps_65536")]
    Medium,
    /// Median of half the round trip of a WRITE of 64 bytes, in microseconds, both sides polling.
    #[serde(rename = "latency_us_p50")]
    #[value(name = "latency_us_p50")]
    Latency,
    /// WRITEs of 64 bytes on one queue pair, in 10⁶ per second.
    #[serde(rename = "rate_mops")]
    #[value(name = "rate_mops")]
    Rate,
}

impl Figure {
    /// All, in the order in which they are measured.
    pub const ALL: [Self; 4] = [Self::Latency, Self::Rate, Self::Medium, Self::Large];

    /// What the table calls it.
    #[must_use]
    pub const fn title(self) -> &'static str {
        match self {
            Self::Large => "1 MiB WRITE, Gb/s",
            Self::Medium => "64 KiB WRITE, Gb/s",
            Self::Latency => "64 B WRITE, half round trip p50, µs",
            Self::Rate => "64 B WRITEs, 10⁶/s",
        }
    }

    /// Bytes of one message.
    #[must_use]
    pub const fn message(self) -> usize {
        match self {
            Self::Large => 1 << 20,
            Self::Medium => 1 << 16,
            Self::Latency | Self::Rate => 64,
        }
    }
}

/// What one process pair measured.
pub type Figures = BTreeMap<Figure, f64>;

/// What one process pair is to measure.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Which figures.
    pub figures: Vec<Figure>,
    /// Path MTU in bytes.
    pub mtu: usize,
    /// How long each, in seconds.
    pub seconds: f64,
}

/// Length of the regions from which payload comes and to which it goes.
pub const REGION: usize = 4 << 20;
