//! Messages between `policy-check` and its processes in the containers: one JSON object per line.

use serde::{Deserialize, Serialize};

/// From the command to a process in a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub(super) enum Order {
    /// Open the device over this backend.
    Open {
        /// Its name.
        netdev: String,
    },
    /// Connect a new queue pair, in place of the one before in this slot.
    Connect {
        /// Which connection of this container.
        slot: usize,
        /// Path MTU.
        mtu: u32,
        /// ACK timeout: 4.096 µs · 2^timeout.
        timeout: u8,
        /// Number of retries for a silent peer.
        retry_cnt: u8,
        /// TOS or traffic class of the packets.
        traffic_class: u8,
    },
    /// Send one WRITE whose bytes are all `fill`, and report its status.
    Write {
        /// The bytes.
        fill: u8,
    },
    /// Report the number of bytes that are `fill` where the peer's WRITEs go.
    Look {
        /// The bytes.
        fill: u8,
    },
    /// Send WRITEs, several at a time.
    Bulk {
        /// Time before the measurement, in milliseconds.
        warm_millis: u64,
        /// Time of the measurement, in milliseconds.
        millis: u64,
    },
    /// Send a datagram to the peer's port [`PROBE`](super::PROBE) from a socket of the kernel's.
    Probe,
    /// Report the device's counters.
    Count,
}

/// From a process in a container to the command: one answer per order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub(super) enum Answer {
    /// Done, without further data.
    Done,
    /// The backend is not available here.
    Unavailable {
        /// The reason, and what to do.
        why: String,
    },
    /// The result of one WRITE.
    Wrote {
        /// The status of its completion.
        status: String,
        /// Time until its completion.
        seconds: f64,
    },
    /// The bytes found.
    Found {
        /// Their number.
        bytes: u64,
    },
    /// The measured traffic.
    Bulk(Bulk),
    /// The counters.
    Counted {
        /// Congestion notifications that arrived.
        rcvd_cnp: u64,
        /// Congestion notifications that left.
        sent_cnp: u64,
    },
    /// The order failed.
    Failed {
        /// The reason.
        why: String,
    },
}

/// The result of a bulk transfer.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Bulk {
    /// The status of the last completion.
    pub(super) status: String,
    /// Payload between the first and the last completion after the warm-up.
    pub(super) bytes: u64,
    /// Time between them.
    pub(super) seconds: f64,
    /// Payload of all.
    pub(super) all_bytes: u64,
    /// Before the first was posted and after the last completion, in nanoseconds of the clock that
    /// all processes of this machine share (`CLOCK_MONOTONIC`).
    pub(super) from_to: (u64, u64),
}
