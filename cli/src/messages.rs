//! Messages between a command and its processes in containers: one JSON object per line. Requests
//! go to a process's standard input, and one answer to each comes from its standard output.

use serde::{Deserialize, Serialize};

/// From the command to a process in a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub(crate) enum Request {
    /// Open the device over this backend.
    Open {
        /// Its name.
        netdev: String,
    },
    /// Connect a new queue pair with another container, in place of the one before in this slot.
    Connect(ConnectRequest),
    /// Move data by every operation and compare every byte.
    Verify {
        /// Bytes of each operation but the atomics.
        bytes_per_op: u64,
        /// Seed of the data.
        seed: u64,
    },
    /// Measure half round trips of WRITEs.
    Latency {
        /// Bytes of each.
        size: usize,
        /// Duration in milliseconds.
        millis: u64,
    },
    /// Send WRITEs, several at a time.
    Bulk(BulkRequest),
    /// Serve until the other container is done.
    Serve,
    /// Send one WRITE of [`MESSAGE`] bytes that are all `fill`, and report its status.
    Write {
        /// The bytes.
        fill: u8,
    },
    /// Report the number of bytes that are `fill` where the peer's WRITE goes.
    Look {
        /// The bytes.
        fill: u8,
    },
    /// Send a datagram to the peer's port [`PROBE`] from a socket of the kernel's.
    Probe,
    /// Report the device's counters.
    Count,
}

/// Bytes of a single WRITE: a super-packet and its headers do not fit into 64 KiB.
pub(crate) const MESSAGE: usize = 64 << 10;
/// UDP port of the datagrams that show that a rule is in its place.
pub(crate) const PROBE: u16 = 4790;

/// Parameters of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ConnectRequest {
    /// Which connection of this container. Slot 0 has the one that other requests use.
    pub(crate) slot: usize,
    /// Path MTU.
    pub(crate) mtu: u32,
    /// Bytes of half the region: one half is sent, the other half receives.
    pub(crate) half: usize,
    /// ACK timeout: 4.096 µs · 2^timeout.
    pub(crate) timeout: u8,
    /// Number of retries for a silent peer.
    pub(crate) retry_cnt: u8,
    /// TOS or traffic class of the packets.
    pub(crate) traffic_class: u8,
}

/// Parameters of a bulk transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BulkRequest {
    /// Bytes of each WRITE.
    pub(crate) size: usize,
    /// Number of outstanding WRITEs.
    pub(crate) depth: usize,
    /// WRITEs that are posted at once. Only the last of them is signaled.
    pub(crate) list: usize,
    /// Time before the measurement, in milliseconds.
    pub(crate) warm_millis: u64,
    /// Time of the measurement, in milliseconds.
    pub(crate) millis: u64,
    /// Whether the peer has to [`Serve`](Request::Serve) meanwhile, and this container polls. Else
    /// both sleep.
    pub(crate) served: bool,
}

/// From a process in a container to the command: one answer per request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub(crate) enum Answer {
    /// Done, without further data.
    Done,
    /// The backend is not available here.
    Unavailable {
        /// The reason, and what to do.
        why: String,
    },
    /// All bytes are right.
    Verified(ByOp),
    /// The measured latency.
    Latency {
        /// Median of half the round trip, in nanoseconds.
        p50_nanos: u64,
    },
    /// The measured traffic.
    Bulk(Bulk),
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
    Counted {
        /// Congestion notifications that arrived.
        rcvd_cnp: u64,
        /// Congestion notifications that left.
        sent_cnp: u64,
    },
    /// The request failed.
    Failed {
        /// The reason.
        why: String,
    },
}

/// The result of a bulk transfer.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Bulk {
    /// Messages completed while measuring.
    pub(crate) messages: u64,
    /// Their payload.
    pub(crate) bytes: u64,
    /// Duration of the measurement.
    pub(crate) seconds: f64,
    /// Payload of all messages, including those before the measurement.
    pub(crate) all_bytes: u64,
    /// Before the first was posted and after the last completion, in nanoseconds of the clock that
    /// all processes of this machine share (`CLOCK_MONOTONIC`).
    pub(crate) from_to: (u64, u64),
}

/// Bytes by the operation that moved them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ByOp {
    pub(crate) send: u64,
    pub(crate) write: u64,
    pub(crate) write_imm: u64,
    pub(crate) read: u64,
    pub(crate) cas: u64,
    pub(crate) faa: u64,
}

impl ByOp {
    /// Each operation's name in the verbs API, and its bytes.
    pub(crate) fn entries(&self) -> [(&'static str, u64); 6] {
        [
            ("SEND", self.send),
            ("WRITE", self.write),
            ("WRITE with immediate", self.write_imm),
            ("READ", self.read),
            ("CAS", self.cas),
            ("FAA", self.faa),
        ]
    }

    pub(crate) fn total(&self) -> u64 {
        self.entries().iter().map(|(_, bytes)| bytes).sum()
    }

    /// Adds the bytes of `other`.
    pub(crate) fn add(&mut self, other: &Self) {
        self.send += other.send;
        self.write += other.write;
        self.write_imm += other.write_imm;
        self.read += other.read;
        self.cas += other.cas;
        self.faa += other.faa;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_are_of_all_operations() {
        let one = ByOp { send: 1, write: 2, write_imm: 4, read: 8, cas: 16, faa: 32 };
        let mut sum = one;
        sum.add(&one);
        assert_eq!((one.total(), sum.total()), (63, 126));
    }
}
