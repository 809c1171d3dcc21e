//! The measurements: operations, and the transport services that have them.

use std::fmt;

use clap::ValueEnum;
use rocinante::verbs::QpType;
use serde::{Deserialize, Serialize};

use crate::measure::BulkOp;
use crate::output::{Failure, Result};

/// The measurements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Test {
    /// Bandwidth of SEND
    #[value(aliases = ["send_bw", "ib_send_bw"])]
    SendBw,
    /// Latency of SEND: half the round trip
    #[value(aliases = ["send_lat", "ib_send_lat"])]
    SendLat,
    /// Bandwidth of RDMA WRITE
    #[value(aliases = ["write_bw", "ib_write_bw"])]
    WriteBw,
    /// Latency of RDMA WRITE: half the round trip, both sides polling memory
    #[value(aliases = ["write_lat", "ib_write_lat"])]
    WriteLat,
    /// Bandwidth of RDMA READ
    #[value(aliases = ["read_bw", "ib_read_bw"])]
    ReadBw,
    /// Latency of RDMA READ
    #[value(aliases = ["read_lat", "ib_read_lat"])]
    ReadLat,
    /// Bandwidth of atomics
    #[value(aliases = ["atomic_bw", "ib_atomic_bw"])]
    AtomicBw,
    /// Latency of atomics
    #[value(aliases = ["atomic_lat", "ib_atomic_lat"])]
    AtomicLat,
}

impl fmt::Display for Test {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.to_possible_value().expect("none is skipped");
        f.write_str(value.get_name())
    }
}

impl Test {
    /// The command's words after `rocinante`.
    #[must_use]
    pub fn command(self) -> String {
        format!("perf {self}")
    }

    /// The operation of a bandwidth test; `None` for latencies.
    #[must_use]
    pub const fn bulk(self, atomic: Atomic) -> Option<BulkOp> {
        match self {
            Self::SendBw => Some(BulkOp::Send),
            Self::WriteBw => Some(BulkOp::Write),
            Self::ReadBw => Some(BulkOp::Read),
            Self::AtomicBw => Some(match atomic {
                Atomic::FetchAdd => BulkOp::FetchAdd,
                Atomic::CompareSwap => BulkOp::CompareSwap,
            }),
            Self::SendLat | Self::WriteLat | Self::ReadLat | Self::AtomicLat => None,
        }
    }

    /// Whether it measures a bandwidth.
    #[must_use]
    pub const fn is_bandwidth(self) -> bool {
        self.bulk(Atomic::FetchAdd).is_some()
    }

    /// Whether it sends messages that the peer receives.
    #[must_use]
    pub const fn is_send(self) -> bool {
        matches!(self, Self::SendBw | Self::SendLat)
    }

    /// Whether its requests are answered with data.
    #[must_use]
    pub const fn has_response(self) -> bool {
        matches!(self, Self::ReadBw | Self::ReadLat) || self.is_atomic()
    }

    /// Whether it uses atomics.
    #[must_use]
    pub const fn is_atomic(self) -> bool {
        matches!(self, Self::AtomicBw | Self::AtomicLat)
    }
}

/// The atomics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Atomic {
    /// Fetch and add
    #[value(alias = "FETCH_AND_ADD")]
    FetchAdd,
    /// Compare and swap
    #[value(alias = "CMP_AND_SWAP")]
    CompareSwap,
}

/// The transport services.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Service {
    /// Reliable connections.
    #[default]
    #[serde(rename = "RC")]
    Rc,
    /// Unreliable connections.
    #[serde(rename = "UC")]
    Uc,
    /// Unreliable datagrams.
    #[serde(rename = "UD")]
    Ud,
}

impl Service {
    /// The service of this name that a test can use. Error: there is no such service, or it has no
    /// such operations.
    pub fn of(name: &str, test: Test) -> Result<Self> {
        let found = match name.to_ascii_uppercase().as_str() {
            "RC" => Some(Self::Rc),
            "UC" if test.is_send() || matches!(test, Test::WriteBw | Test::WriteLat) => {
                Some(Self::Uc)
            }
            "UD" if test.is_send() => Some(Self::Ud),
            _ => None,
        };
        found.ok_or_else(|| {
            Failure::Usage(format!(
                "-c {name}: RC is for every test, UC for send and write, UD for send: give both sides the same"
            ))
        })
    }

    /// The type of its queue pairs.
    #[must_use]
    pub const fn qp_type(self) -> QpType {
        match self {
            Self::Rc => QpType::Rc,
            Self::Uc => QpType::Uc,
            Self::Ud => QpType::Ud,
        }
    }

    /// Whether messages may be lost.
    #[must_use]
    pub fn loses(self) -> bool {
        self != Self::Rc
    }
}

impl fmt::Display for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Rc => "RC",
            Self::Uc => "UC",
            Self::Ud => "UD",
        })
    }
}
