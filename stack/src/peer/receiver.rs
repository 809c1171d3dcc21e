//! One receiver's room.

use std::collections::VecDeque;

use super::budget::{Budget, Cost};
use super::run_length::{Density, Trust, stretched};
use crate::pacer::Pace;
use crate::types::Time;

/// One receiver's room, and the queue pairs that wait for some.
#[derive(Debug)]
pub(crate) struct Receiver {
    pub(super) limit: Budget,
    /// What is taken to fit: more than `limit` while super-packets leave and nothing is lost.
    pub(super) room: Budget,
    /// What `room` shrinks to, as fast as half of what is given back: what is under way may not
    /// have asked for an acknowledgement, and a packet that asks is one that finds room.
    pub(super) goal: Budget,
    trust: Trust,
    pub(super) used: Cost,
    /// Queue pairs that wait for room and what they need, oldest first.
    pub(super) line: VecDeque<(u32, Cost)>,
    /// The one whose turn it is: it left the line and has not sent yet.
    pub(super) called: Option<u32>,
    /// What was sent without hope of an acknowledgement.
    paced: Pace,
}

impl Receiver {
    /// `calm`: see [`Trust::new`].
    pub(super) fn new(limit: Budget, calm: u32) -> Self {
        Self {
            limit,
            room: limit,
            goal: limit,
            trust: Trust::new(calm),
            used: Cost::default(),
            line: VecDeque::new(),
            called: None,
            paced: Pace::default(),
        }
    }

    /// Whether `charge` fits; an unused pool takes anything, so that nothing waits for ever.
    #[inline]
    pub(crate) fn fits(&self, charge: Cost) -> bool {
        self.used.datagrams == 0 || self.has_room(charge.bytes, charge.datagrams)
    }

    #[inline]
    fn has_room(&self, bytes: u64, datagrams: u32) -> bool {
        self.used.bytes + bytes <= u64::from(self.room.bytes)
            && self.used.datagrams + datagrams <= self.room.datagrams
    }

    /// The receiver says what it holds, perhaps not what it said before.
    pub(super) fn announce(&mut self, limit: Budget) {
        if limit != self.limit {
            (self.limit, self.room, self.goal) = (limit, limit, limit);
        }
    }

    /// What is sent to it leaves so dense.
    pub(super) fn fit(&mut self, density: Density, enough: u64) {
        let whole = self.trust.is_whole();
        self.goal = if whole { stretched(self.limit, density, enough) } else { self.limit };
        self.room.bytes = self.room.bytes.max(self.goal.bytes);
        self.room.datagrams = self.room.datagrams.max(self.goal.datagrams);
    }

    /// `charge` is given back.
    #[inline]
    pub(super) fn release(&mut self, charge: Cost, density: Density, enough: u64) {
        self.used.take(charge);
        if self.trust.came(charge.datagrams) {
            self.fit(density, enough);
        }
        if self.room != self.goal {
            self.shrink(charge);
        }
    }

    fn shrink(&mut self, released: Cost) {
        let bytes = u32::try_from(released.bytes.div_ceil(2)).unwrap_or(u32::MAX);
        self.room.bytes = self.room.bytes.saturating_sub(bytes).max(self.goal.bytes);
        let datagrams = self.room.datagrams.saturating_sub(released.datagrams.div_ceil(2));
        self.room.datagrams = datagrams.max(self.goal.datagrams);
    }

    /// Something was lost, which may have found the queue full.
    pub(super) fn lost(&mut self) {
        self.trust.lost();
        (self.room, self.goal) = (self.limit, self.limit);
    }

    /// Whether three quarters of it are free, if `more` small packets are under way; never of a
    /// stranger's.
    #[inline]
    pub(crate) fn is_mostly_free(&self, more: u32) -> bool {
        4 * (self.used.datagrams + more) <= self.limit.datagrams
            && 4 * self.used.bytes <= u64::from(self.limit.bytes)
    }

    /// How much more fits.
    #[inline]
    pub(super) fn left(&self) -> Cost {
        Cost {
            bytes: u64::from(self.room.bytes).saturating_sub(self.used.bytes),
            datagrams: self.room.datagrams.saturating_sub(self.used.datagrams),
        }
    }

    /// Whether `slot` may charge `charge` now.
    #[inline]
    pub(crate) fn admits(&self, slot: u32, charge: Cost) -> bool {
        self.is_turn_of(slot) && self.fits(charge)
    }

    /// How much `slot` may charge now.
    #[inline]
    pub(crate) fn room_for(&self, slot: u32) -> Cost {
        if self.is_turn_of(slot) { self.left() } else { Cost::default() }
    }

    #[inline]
    fn is_turn_of(&self, slot: u32) -> bool {
        match self.called {
            None => self.line.is_empty(),
            Some(called) => called == slot,
        }
    }

    #[inline]
    pub(crate) fn charge(&mut self, charge: Cost) {
        self.used.add(charge);
    }

    /// Whether `charge`, which nobody will acknowledge, may leave now; if not, when it may.
    #[inline]
    pub(crate) fn pace(&mut self, now: Time, charge: Cost) -> Result<(), Time> {
        self.paced.admit(now, charge, self.limit)
    }

    /// A packet of `charge` with so many bytes of payload, which nobody will acknowledge, left.
    #[inline]
    pub(crate) fn paced(&mut self, charge: Cost, payload: u32) {
        self.paced.left(charge, payload);
    }

    /// `slot`, which waits in line, needs so much now.
    pub(super) fn renew(&mut self, slot: u32, need: Cost) {
        if let Some((_, needed)) = self.line.iter_mut().find(|(waiter, _)| *waiter == slot) {
            *needed = need;
        }
    }

    pub(super) fn leave(&mut self, slot: u32) {
        if self.called == Some(slot) {
            self.called = None;
        } else {
            self.line.retain(|(waiter, _)| *waiter != slot);
        }
    }

    /// Calls the first in line, if there is room for it and nobody is being served.
    #[inline]
    pub(super) fn call(&mut self) -> Option<u32> {
        if self.called.is_some() {
            return None;
        }
        let (slot, need) = *self.line.front()?;
        if !self.fits(need) {
            return None;
        }
        self.line.pop_front();
        self.called = Some(slot);
        self.called
    }
}
