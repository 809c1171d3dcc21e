//! Responses that we requested, which will arrive in our own receive queue.

use crate::budget::Cost;
use crate::tuning::credit::EXPECTED_NS;
use crate::types::Time;

/// A charge to our own credit, and its time: to give it back.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Expected {
    bytes: u32,
    datagrams: u32,
    epoch: u32,
}

impl Expected {
    /// The charge of a response that a silent peer may still send: nothing.
    pub(crate) const NOTHING: Self = Self { bytes: 0, datagrams: 0, epoch: 0 };

    /// The charge of `count` responses.
    #[inline]
    pub(crate) fn times(self, count: u32) -> Self {
        Self { bytes: self.bytes * count, datagrams: self.datagrams * count, ..self }
    }

    #[inline]
    pub(super) fn charge(self) -> Cost {
        Cost { bytes: self.bytes.into(), datagrams: self.datagrams }
    }

    /// Adds a charge of the same epoch. Returns `false`, and does nothing, if the other is of
    /// another epoch.
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

/// The responses that were requested in this epoch and in the one before.
#[derive(Debug, Default)]
pub(super) struct Epochs {
    current: u32,
    pub(super) ends: Time,
    asked: [Cost; 2],
}

impl Epochs {
    /// `count` responses of that cost are requested. Returns the charge of each.
    #[inline]
    pub(super) fn ask(&mut self, answer: Cost, count: u32) -> Expected {
        let epoch = self.current;
        // It fits our own receive queue, whose size is a `u32`.
        let bytes = u32::try_from(answer.bytes).unwrap_or(u32::MAX);
        let each = Expected { bytes, datagrams: answer.datagrams, epoch };
        self.asked[epoch as usize % 2].add(each.times(count).charge());
        each
    }

    /// Whether it is overdue, and its credit was given back.
    #[inline]
    pub(super) fn has_forgotten(&self, answer: Expected) -> bool {
        self.current.wrapping_sub(answer.epoch) > 1 && answer.datagrams > 0
    }

    /// The response arrived, or will not arrive any more. Returns the credit to give back.
    #[inline]
    pub(super) fn answered(&mut self, answer: Expected) -> Option<Cost> {
        if self.has_forgotten(answer) || answer.datagrams == 0 {
            return None;
        }
        self.asked[answer.epoch as usize % 2].take(answer.charge());
        Some(answer.charge())
    }

    /// The next epoch begins. Returns the charges that are overdue.
    pub(super) fn pass(&mut self, now: Time) -> Cost {
        // After a pause all are.
        let passed = if now.since(self.ends) < EXPECTED_NS { 1 } else { 2 };
        let mut overdue = Cost::default();
        for _ in 0..passed {
            self.current = self.current.wrapping_add(1);
            overdue.add(core::mem::take(&mut self.asked[self.current as usize % 2]));
        }
        self.ends = now.after(EXPECTED_NS);
        overdue
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_of_its_epoch_and_the_next_also_when_their_numbers_begin_again() {
        let cost = Cost { bytes: 100, datagrams: 1 };
        for current in [7, u32::MAX - 1, u32::MAX] {
            let mut epochs = Epochs { current, ..Epochs::default() };
            let [first, second] = [(); 2].map(|()| epochs.ask(cost, 1));
            let nothing = epochs.pass(Time(0)).datagrams;
            let third = epochs.ask(cost, 1);
            assert_eq!((epochs.answered(first), nothing), (Some(cost), 0), "{current}");
            // Of the first two one has come.
            assert_eq!(epochs.pass(Time(1)).datagrams, 1, "{current}");
            assert!(epochs.has_forgotten(second) && !epochs.has_forgotten(third), "{current}");
            assert_eq!((epochs.answered(second), epochs.answered(third)), (None, Some(cost)));
            assert_eq!(epochs.pass(Time(2)).datagrams, 0, "{current}");
        }
    }
}
