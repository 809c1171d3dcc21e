//! Messages between the demo and its processes in the containers: one JSON object per line.

use serde::{Deserialize, Serialize};

/// From the demo to a process in a container, on its standard input.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub(super) enum Order {
    /// Open the device over this backend.
    Open {
        /// Its name.
        netdev: String,
    },
    /// Connect a new queue pair with the other container, in place of the one before.
    Connect {
        /// Path MTU.
        mtu: u32,
        /// ACK timeout: 4.096 µs · 2^timeout.
        timeout: u8,
        /// Number of retries for a silent peer.
        retry_cnt: u8,
    },
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
    /// Send WRITEs to the other container, which has to [`Serve`](Self::Serve).
    Bulk(BulkOrder),
    /// Serve until the other container is done.
    Serve,
    /// Send one WRITE, and report its status.
    Write,
}

/// Parameters of a bulk transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct BulkOrder {
    /// Bytes of each WRITE.
    pub(super) size: usize,
    /// Number of outstanding WRITEs.
    pub(super) depth: usize,
    /// WRITEs that are posted at once. Only the last of them is signaled.
    pub(super) list: usize,
    /// Time before the measurement, in milliseconds.
    pub(super) warm_millis: u64,
    /// Time of the measurement, in milliseconds.
    pub(super) millis: u64,
}

/// From a process in a container to the demo, on its standard output: one answer per order.
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
    /// All bytes are right.
    Verified(ByOp),
    /// The measured latency.
    Latency {
        /// Median of half the round trip, in nanoseconds.
        p50_nanos: u64,
    },
    /// The measured traffic.
    Bulk {
        /// Messages completed while measuring.
        messages: u64,
        /// Their payload.
        bytes: u64,
        /// Duration of the measurement.
        seconds: f64,
        /// Payload of all messages, including those before and after the measurement.
        all_bytes: u64,
    },
    /// The result of one WRITE.
    Wrote {
        /// The status of its completion.
        status: String,
        /// Time until its completion.
        seconds: f64,
        /// Its payload.
        bytes: u64,
    },
    /// The order failed.
    Failed {
        /// The reason.
        why: String,
    },
}

/// Bytes by the operation that moved them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ByOp {
    pub(super) send: u64,
    pub(super) write: u64,
    pub(super) write_imm: u64,
    pub(super) read: u64,
    pub(super) cas: u64,
    pub(super) faa: u64,
}

impl ByOp {
    /// Each operation's name in the verbs API, and its bytes.
    pub(super) fn entries(&self) -> [(&'static str, u64); 6] {
        [
            ("SEND", self.send),
            ("WRITE", self.write),
            ("WRITE with immediate", self.write_imm),
            ("READ", self.read),
            ("CAS", self.cas),
            ("FAA", self.faa),
        ]
    }

    pub(super) fn total(&self) -> u64 {
        self.entries().iter().map(|(_, bytes)| bytes).sum()
    }

    /// Adds the bytes of `other`.
    pub(super) fn add(&mut self, other: &Self) {
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
    fn orders_are_one_line() {
        let bulk = BulkOrder { size: 64, depth: 8, list: 4, warm_millis: 1, millis: 2 };
        let order = Order::Bulk(bulk);
        let line = serde_json::to_string(&order).unwrap();
        assert_eq!(
            line,
            r#"{"do":"bulk","size":64,"depth":8,"list":4,"warm_millis":1,"millis":2}"#
        );
        assert_eq!(serde_json::from_str::<Order>(&line).unwrap(), order);
    }

    #[test]
    fn totals_are_of_all_operations() {
        let one = ByOp { send: 1, write: 2, write_imm: 4, read: 8, cas: 16, faa: 32 };
        let mut sum = one;
        sum.add(&one);
        assert_eq!((one.total(), sum.total()), (63, 126));
    }
}
