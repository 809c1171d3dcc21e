//! What we asked for, which is on its way to our own receive queue.

use super::budget::Cost;
use crate::types::Time;

/// How long what was asked for is reckoned with: a peer that has not answered for so long is dead,
/// or a victim of some loss, and shall not keep the others waiting. Twice as long at most.
pub(super) const EXPECTED_NS: u64 = 100_000_000;

/// What was charged to our own pool, and when: to give it back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Expected {
    bytes: u32,
    datagrams: u32,
    epoch: u32,
}

impl Expected {
    /// What a peer that does not answer anyway may still say.
    pub(crate) const NOTHING: Self = Self { bytes: 0, datagrams: 0, epoch: 0 };

    /// So many of it.
    #[inline]
    pub(crate) fn times(self, count: u32) -> Self {
        Self { bytes: self.bytes * count, datagrams: self.datagrams * count, ..self }
    }

    #[inline]
    pub(super) fn charge(self) -> Cost {
        Cost { bytes: self.bytes.into(), datagrams: self.datagrams }
    }

    /// Adds what was charged at the same time; `false`, and nothing happened, if that was at
    /// another.
    #[inline]
    pub(crate) fn add(&mut self, other: Self) -> bool {
        let same = self.epoch == other.epoch;
        if same {
            self.bytes += other.bytes;
            self.datagrams += other.datagrams;
        }
        same
    }
}

/// The answers that we asked for in this epoch and the one before.
#[derive(Debug, Default)]
pub(super) struct Epochs {
    current: u32,
    pub(super) ends: Time,
    asked: [Cost; 2],
}

impl Epochs {
    /// `count` answers of that kind are asked for; returns what each is charged with.
    #[inline]
    pub(super) fn ask(&mut self, answer: Cost, count: u32) -> Expected {
        let epoch = self.current;
        // Of our own receive queue, whose size is such a number.
        let bytes = u32::try_from(answer.bytes).unwrap_or(u32::MAX);
        let each = Expected { bytes, datagrams: answer.datagrams, epoch };
        self.asked[epoch as usize % 2].add(each.times(count).charge());
        each
    }

    /// Whether it is not reckoned with any more.
    #[inline]
    pub(super) fn has_forgotten(&self, answer: Expected) -> bool {
        self.current.wrapping_sub(answer.epoch) > 1 && answer.datagrams > 0
    }

    /// It came, or will not come any more; returns what that gives back.
    #[inline]
    pub(super) fn answered(&mut self, answer: Expected) -> Option<Cost> {
        if self.has_forgotten(answer) || answer.datagrams == 0 {
            return None;
        }
        self.asked[answer.epoch as usize % 2].take(answer.charge());
        Some(answer.charge())
    }

    /// The next begins; returns what is not reckoned with any more.
    pub(super) fn pass(&mut self, now: Time) -> Cost {
        // After a pause nothing is reckoned with at all.
        let passed = if now.since(self.ends) < EXPECTED_NS { 1 } else { 2 };
        let mut forgotten = Cost::default();
        for _ in 0..passed {
            self.current = self.current.wrapping_add(1);
            forgotten.add(core::mem::take(&mut self.asked[self.current as usize % 2]));
        }
        self.ends = now.after(EXPECTED_NS);
        forgotten
    }
}
