//! The state that the queue pairs of an engine share, and the limits of an engine.

use crate::ah::Handles;
use crate::budget::Budget;
use crate::contacts::Contacts;
use crate::events::Events;
use crate::pacing::Pacing;
use crate::peer::{Peers, RunLimits};
use crate::rc::reorder::ReorderSlab;
use crate::rc::requester::lists::SpareLists;
use crate::ring::Ring;
use crate::srq::Srqs;
use crate::stats::LimitsHit;
use crate::stats::{Counters, Drops};
use crate::timer::{Deadline, Timers};
use crate::tuning::engine::{LATE_NS, QPS, QUANTUM, REORDER_PACKETS_MAX, WINDOW_MAX};
use crate::tuning::long_runs::STABLE_PACKETS;
use crate::types::{Mtu, Qpn, QueueKind, Time};
use crate::verbs::QpEvent;

/// Limits and settings of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineConfig {
    /// Queue pairs, at most 65,000.
    pub max_qp: u32,
    /// The upper 8 bits of every QPN.
    pub qpn_slot: u8,
    /// Receiver credit of our own queue: its room for responses to our READs and atomics.
    pub own_budget: Budget,
    /// The kind of our own queue.
    pub own_queue: QueueKind,
    /// The path MTU for UD.
    pub port_mtu: Mtu,
    /// The most unacknowledged packets of a queue pair.
    pub window_max: u32,
    /// Whether acknowledgements announce the number of posted receives, as hardware does.
    /// Otherwise they set no limit, like those of rxe and of shared receive queues.
    pub advertise_credits: bool,
    /// Most packets in the reorder buffers of all queue pairs together. Such a packet arrived out
    /// of order, from a peer that announced a budget, and waits until the packets before it arrive
    /// (selective repeat). Each takes 4132 bytes, allocated when needed. With 0 they are dropped,
    /// as in the specification, and the peer sends everything behind a loss again.
    pub reorder_packets_max: u32,
    /// Whether a WRITE of several packets, without immediate, may leave as that many messages of
    /// one packet. It does so only while other packets to that peer are unacknowledged, and only if
    /// super-packets then carry more. Set it where the port sends runs of equal packets as
    /// super-packets.
    pub split_writes: bool,
    /// After a loss, a peer's queue may have overflowed. After this many packets without a further
    /// loss, it is again taken to hold more of the packets that leave as super-packets
    /// ([`Engine::departed`](crate::Engine::departed)).
    pub stable_packets: u32,
    /// The longest run that the port sends at once. While enough is in flight, small messages wait
    /// until they fill one.
    pub runs: RunLimits,
    /// How fast packets leave that no peer acknowledges.
    pub pacing: Pacing,
    /// Engines that may send to the same peers: each takes this part of the capacity of a
    /// recognised peer. 0 counts as 1.
    pub sharers: u32,
    /// Packets that a queue pair sends before other queue pairs get their turn. 0 counts as 1, and
    /// more than 65,535 as that.
    pub quantum: u32,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            max_qp: QPS,
            qpn_slot: 0,
            own_budget: Budget::STANDARD,
            own_queue: QueueKind::Frames,
            port_mtu: Mtu::Mtu4096,
            window_max: WINDOW_MAX,
            advertise_credits: false,
            reorder_packets_max: REORDER_PACKETS_MAX,
            split_writes: false,
            stable_packets: STABLE_PACKETS,
            runs: RunLimits::default(),
            pacing: Pacing::default(),
            sharers: 1,
            quantum: QUANTUM,
        }
    }
}

/// The state that the queue pairs of an engine share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) config: EngineConfig,
    pub(crate) peers: Peers,
    pub(crate) contacts: Contacts,
    /// When an epoch of credit or a generation of peers ends.
    pub(crate) due: Time,
    pub(crate) handles: Handles,
    pub(crate) srqs: Srqs,
    /// Reorder buffers: memory for packets that arrived out of order.
    pub(crate) reorder_slab: ReorderSlab,
    /// Unused in-flight lists.
    pub(crate) lists: SpareLists,
    pub(crate) timers: Timers,
    pub(crate) counters: Counters,
    pub(crate) drops: Drops,
    pub(crate) limits_hit: LimitsHit,
    /// Queue pairs with something to send, oldest first.
    pub(crate) dirty: Ring<u32>,
    /// Whether one of them has more to send than a plain acknowledgement.
    pub(crate) more_than_acks: bool,
    /// When the last packet for a queue pair arrived.
    pub(crate) arrived_at: Time,
    pub(crate) events: Events,
    /// The microseconds without a driver before the deadlines of now were due.
    pub(crate) undriven_us_before: u64,
}

impl Shared {
    /// Whether the queue pair that the timers popped has a deadline that is due. Of the deadlines
    /// that are met at one time the latest counts as time without a driver.
    pub(crate) fn is_due(&mut self, slot: u32, deadline: &mut Deadline, now: Time) -> bool {
        let Some(due) = self.timers.settle(slot, deadline, now) else { return false };
        let late = now.since(due);
        if late >= LATE_NS {
            let undriven = &mut self.counters.undriven_us;
            *undriven = (*undriven).max(self.undriven_us_before + late / 1000);
        }
        true
    }

    /// Packets per turn.
    #[inline]
    pub(crate) fn quantum(&self) -> u16 {
        self.config.quantum as u16
    }

    #[inline]
    pub(crate) fn enqueue(&mut self, slot: u32, queued: &mut bool) {
        self.more_than_acks = true;
        self.enqueue_lazily(slot, queued);
    }

    /// As [`enqueue`](Self::enqueue), for a plain acknowledgement of packets that have just
    /// arrived: it may wait and leave with other packets.
    #[inline]
    pub(crate) fn enqueue_lazily(&mut self, slot: u32, queued: &mut bool) {
        if !*queued {
            *queued = true;
            self.dirty.push_back(slot);
        }
    }

    /// Time passes: overdue responses reserve no credit any more, and generations end.
    #[inline]
    pub(crate) fn age(&mut self, now: Time) {
        if now >= self.due {
            self.come_due(now);
        }
    }

    #[cold]
    fn come_due(&mut self, now: Time) {
        self.due = self.peers.age(now).min(self.contacts.age(now));
    }

    /// The generation of peers ends at `then`, if not before.
    pub(crate) fn renew_at(&mut self, then: Time) {
        self.contacts.end_at(then);
        self.due = self.due.min(then);
    }

    pub(crate) fn event(&mut self, qpn: Qpn, event: QpEvent) {
        self.events.push(qpn, event);
    }
}
