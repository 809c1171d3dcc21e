//! The counters of one queue pair, beside those of the engine.

use core::cell::Cell;
use core::fmt;

use crate::stats::{Counters, QpCounters};

/// Counters of a queue pair. Packets are counted where the queue pair is only borrowed.
#[derive(Default)]
pub(crate) struct Tally {
    sent_pkts: Cell<u64>,
    sent_bytes: Cell<u64>,
    rcvd_pkts: Cell<u64>,
    rcvd_bytes: Cell<u64>,
    retransmitted_pkts: Cell<u32>,
    local_ack_timeout_err: Cell<u32>,
    rcvd_seq_err: Cell<u32>,
    rcvd_rnr_err: Cell<u32>,
    sent_requests: Cell<u32>,
    rcvd_requests: Cell<u32>,
}

fn add(cell: &Cell<u64>, count: u64) {
    cell.set(cell.get().wrapping_add(count));
}

fn bump(cell: &Cell<u32>) {
    cell.set(cell.get().wrapping_add(1));
}

impl Tally {
    /// `count` packets left with this many bytes of payload in all.
    #[inline]
    pub(crate) fn sent(&self, counters: &mut Counters, count: u32, payload: u64) {
        counters.sent_pkts += u64::from(count);
        counters.sent_bytes += payload;
        add(&self.sent_pkts, count.into());
        add(&self.sent_bytes, payload);
    }

    /// `count` of the packets that left were retransmissions.
    #[inline]
    pub(crate) fn sent_again(&self, counters: &mut Counters, count: u32) {
        counters.retransmitted_pkts += u64::from(count);
        self.retransmitted_pkts.set(self.retransmitted_pkts.get().wrapping_add(count));
    }

    /// A packet came.
    #[inline]
    pub(crate) fn received(&self) {
        add(&self.rcvd_pkts, 1);
    }

    /// Payload of this many bytes was accepted.
    #[inline]
    pub(crate) fn accepted(&self, counters: &mut Counters, payload: usize) {
        counters.rcvd_bytes += payload as u64;
        add(&self.rcvd_bytes, payload as u64);
    }

    /// `count` send requests succeeded.
    #[inline]
    pub(crate) fn retired(&self, counters: &mut Counters, count: u32) {
        counters.sent_requests += u64::from(count);
        self.sent_requests.set(self.sent_requests.get().wrapping_add(count));
    }

    /// A message of the peer was executed.
    #[inline]
    pub(crate) fn executed(&self, counters: &mut Counters) {
        counters.rcvd_requests += 1;
        bump(&self.rcvd_requests);
    }

    /// The ACK timeout expired.
    pub(crate) fn timed_out(&self, counters: &mut Counters) {
        counters.local_ack_timeout_err += 1;
        bump(&self.local_ack_timeout_err);
    }

    /// The peer reported a missing packet.
    pub(crate) fn missed(&self, counters: &mut Counters) {
        counters.rcvd_seq_err += 1;
        bump(&self.rcvd_seq_err);
    }

    /// The peer reported that it has no receive.
    pub(crate) fn not_ready(&self, counters: &mut Counters) {
        counters.rcvd_rnr_err += 1;
        bump(&self.rcvd_rnr_err);
    }

    pub(crate) fn get(&self) -> QpCounters {
        QpCounters {
            sent_pkts: self.sent_pkts.get(),
            sent_bytes: self.sent_bytes.get(),
            rcvd_pkts: self.rcvd_pkts.get(),
            rcvd_bytes: self.rcvd_bytes.get(),
            retransmitted_pkts: self.retransmitted_pkts.get().into(),
            local_ack_timeout_err: self.local_ack_timeout_err.get().into(),
            rcvd_seq_err: self.rcvd_seq_err.get().into(),
            rcvd_rnr_err: self.rcvd_rnr_err.get().into(),
            sent_requests: self.sent_requests.get().into(),
            rcvd_requests: self.rcvd_requests.get().into(),
        }
    }
}

impl fmt::Debug for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get().fmt(f)
    }
}

/// The size in each queue pair, no more.
const _: () = assert!(size_of::<Tally>() == 56);
