//! The credit of one receiver.

use std::collections::VecDeque;

use super::confidence::Confidence;
use super::runs::RunLength;
use super::stretch::stretched;
use crate::budget::{Budget, Cost};
use crate::tuning::shared_credit::{RUNS_HELD, RUNS_IN_FLIGHT};
use crate::tuning::{long_runs, shared_credit};
use crate::types::QueueKind;

/// The credit of one receiver, and the queue pairs that wait for some.
#[derive(Debug)]
pub(crate) struct CreditAccount {
    /// Its announced budget.
    pub(super) announced: Budget,
    pub(super) queue: QueueKind,
    /// Its assumed budget: more than it announced while runs are long and nothing is lost.
    pub(super) capacity: Budget,
    /// The target of `capacity`, which grows to it at once. It shrinks by half of the credit that
    /// is given back: packets in flight may need credit to request their acknowledgement.
    pub(super) target: Budget,
    confidence: Confidence,
    pub(super) in_flight: Cost,
    /// Queue pairs that wait for credit, each with the credit that it needs, oldest first.
    pub(super) wait_queue: VecDeque<(u32, Cost)>,
    /// The queue pair with a turn: it left the wait queue and has not sent yet.
    pub(super) granted: Option<u32>,
}

impl CreditAccount {
    /// `stable_packets`: see [`Confidence::new`].
    pub(super) fn new(announced: Budget, queue: QueueKind, stable_packets: u32) -> Self {
        Self {
            announced,
            queue,
            capacity: announced,
            target: announced,
            confidence: Confidence::new(stable_packets),
            in_flight: Cost::default(),
            wait_queue: VecDeque::new(),
            granted: None,
        }
    }

    /// Whether `charge` fits. With nothing in flight anything does, so that nothing waits for ever.
    #[inline]
    pub(crate) fn fits(&self, charge: Cost) -> bool {
        self.in_flight.datagrams == 0 || self.holds(charge.bytes, charge.datagrams)
    }

    /// The cost of `run`, if the run should wait until all of it fits, so that credit that comes
    /// back in pieces is not spent in pieces (silly window avoidance, RFC 9293, 3.8.6.2.1). Two
    /// such runs are in flight then, from any queue pairs, so credit comes back; and the queue
    /// holds four. With fewer than two datagrams in flight the cost is not computed.
    #[inline(always)]
    pub(crate) fn withholds(&self, run: impl FnOnce() -> Cost) -> Option<Cost> {
        if !shared_credit::ENABLED || self.in_flight.datagrams < 2 {
            return None;
        }
        let run = run();
        let waits = self.in_flight.datagrams >= RUNS_IN_FLIGHT * run.datagrams
            && self.capacity.datagrams >= RUNS_HELD * run.datagrams
            && u64::from(self.capacity.bytes) >= u64::from(RUNS_HELD) * run.bytes
            && !self.holds(run.bytes, run.datagrams);
        waits.then_some(run)
    }

    #[inline]
    fn holds(&self, bytes: u64, datagrams: u32) -> bool {
        self.in_flight.bytes + bytes <= u64::from(self.capacity.bytes)
            && self.in_flight.datagrams + datagrams <= self.capacity.datagrams
    }

    /// The receiver announces its queue, perhaps anew.
    pub(super) fn announce(&mut self, budget: Budget, queue: QueueKind) {
        if (budget, queue) != (self.announced, self.queue) {
            (self.announced, self.capacity, self.target) = (budget, budget, budget);
            self.queue = queue;
        }
    }

    /// Follows the length of runs to it, up to `enough` bytes of payload.
    pub(super) fn fit(&mut self, runs: RunLength, enough: u64) {
        self.target = match long_runs::ENABLED && self.confidence.is_restored() {
            true => stretched(self.announced, self.queue, runs, enough),
            false => self.announced,
        };
        self.capacity.bytes = self.capacity.bytes.max(self.target.bytes);
        self.capacity.datagrams = self.capacity.datagrams.max(self.target.datagrams);
    }

    /// `charge` is given back. Returns whether that restores the confidence, so that the target may
    /// grow.
    #[inline]
    pub(super) fn release(&mut self, charge: Cost) -> bool {
        self.in_flight.take(charge);
        if self.capacity != self.target {
            self.shrink(charge);
        }
        self.confidence.arrived(charge.datagrams)
    }

    #[inline(never)]
    fn shrink(&mut self, released: Cost) {
        let bytes = u32::try_from(released.bytes.div_ceil(2)).unwrap_or(u32::MAX);
        self.capacity.bytes = self.capacity.bytes.saturating_sub(bytes).max(self.target.bytes);
        let datagrams = self.capacity.datagrams.saturating_sub(released.datagrams.div_ceil(2));
        self.capacity.datagrams = datagrams.max(self.target.datagrams);
    }

    /// A packet was lost: the queue may have been full.
    pub(super) fn lost(&mut self) {
        self.confidence.lost();
        (self.capacity, self.target) = (self.announced, self.announced);
    }

    /// Whether three quarters of its announced budget are free, if `more` small packets are in
    /// flight.
    #[inline]
    pub(crate) fn is_mostly_free(&self, more: u32) -> bool {
        4 * (self.in_flight.datagrams + more) <= self.announced.datagrams
            && 4 * self.in_flight.bytes <= u64::from(self.announced.bytes)
    }

    /// The credit that is left.
    #[inline]
    pub(crate) fn available(&self) -> Cost {
        Cost {
            bytes: u64::from(self.capacity.bytes).saturating_sub(self.in_flight.bytes),
            datagrams: self.capacity.datagrams.saturating_sub(self.in_flight.datagrams),
        }
    }

    /// Whether `slot` may charge `charge` now.
    #[inline]
    pub(crate) fn admits(&self, slot: u32, charge: Cost) -> bool {
        self.is_turn_of(slot) && self.fits(charge)
    }

    /// The credit that `slot` may charge now.
    #[inline]
    pub(crate) fn room_for(&self, slot: u32) -> Cost {
        if self.is_turn_of(slot) { self.available() } else { Cost::default() }
    }

    #[inline]
    fn is_turn_of(&self, slot: u32) -> bool {
        match self.granted {
            None => self.wait_queue.is_empty(),
            Some(granted) => granted == slot,
        }
    }

    #[inline]
    pub(crate) fn charge(&mut self, charge: Cost) {
        self.in_flight.add(charge);
    }

    /// `slot`, which waits, needs `need` now.
    pub(super) fn renew(&mut self, slot: u32, need: Cost) {
        if let Some((_, needed)) = self.wait_queue.iter_mut().find(|(waiter, _)| *waiter == slot) {
            *needed = need;
        }
    }

    pub(super) fn leave(&mut self, slot: u32) {
        if self.granted == Some(slot) {
            self.granted = None;
        } else {
            self.wait_queue.retain(|(waiter, _)| *waiter != slot);
        }
    }

    /// Whether the first of the wait queue waits although it could go on. This judges
    /// [`grant`](Self::grant), so it shares no code with it.
    pub(super) fn overlooks_first(&self) -> bool {
        let Some((_, need)) = self.wait_queue.front() else { return false };
        let (used, most) = (self.in_flight, self.capacity);
        let has_bytes = used.bytes + need.bytes <= u64::from(most.bytes);
        let has_places = used.datagrams + need.datagrams <= most.datagrams;
        self.granted.is_none() && (used.datagrams == 0 || (has_bytes && has_places))
    }

    /// Grants the first of the wait queue a turn, if its need fits and no other has one.
    #[inline]
    pub(super) fn grant(&mut self) -> Option<u32> {
        if self.granted.is_some() {
            return None;
        }
        let (slot, need) = *self.wait_queue.front()?;
        if !self.fits(need) {
            return None;
        }
        self.wait_queue.pop_front();
        self.granted = Some(slot);
        self.granted
    }
}
