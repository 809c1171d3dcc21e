//! The acknowledgements that a requester asks for. Each may become a packet of its own in our receive queue, so there is room
//! for it before the first packet that it will acknowledge leaves: whoever has taken room of the peer can always ask for it back. A NAK for a
//! gap comes without having been asked for; there are few.

use std::collections::VecDeque;

use crate::pool::{Budget, Charge, Expected, Pools};

/// What an acknowledgement costs us: BTH, AETH, ICRC.
pub(super) const ACK: Charge = Charge::of(1, Budget::cost(12 + 4 + 4));

/// The PSNs that asked and are not answered, ascending, and the room for the next.
#[derive(Debug, Default)]
pub(super) struct Asks {
    psns: VecDeque<(u64, Expected)>,
    /// For whoever asks next.
    next: Option<Expected>,
}

impl Asks {
    /// Starts over with room for `max`, so that asking does not allocate.
    pub(super) fn start(&mut self, max: u32) {
        debug_assert!(self.next.is_none(), "given back when the queue pair was reset");
        self.psns.clear();
        self.psns.reserve(max as usize);
    }

    /// Whether packets may leave: there is room for the answer to whoever of them asks.
    #[inline]
    pub(super) fn is_open(&self) -> bool {
        self.next.is_some()
    }

    /// Whether the room for the next answer was kept for so long that others have it.
    #[inline]
    pub(super) fn is_stale(&self, pools: &Pools) -> bool {
        self.next.is_some_and(|answer| pools.has_forgotten(answer))
    }

    /// Takes room for the next answer.
    #[inline]
    pub(super) fn open(&mut self, answer: Expected) {
        debug_assert!(self.next.is_none());
        self.next = Some(answer);
    }

    /// Gives the room for the next answer back, because nobody waits for it.
    #[inline]
    pub(super) fn close(&mut self, pools: &mut Pools) {
        if let Some(answer) = self.next.take() {
            pools.answered(answer);
        }
    }

    /// One more than the last PSN that asked and is not answered.
    #[inline]
    pub(super) fn end(&self) -> Option<u64> {
        self.psns.back().map(|(psn, _)| psn + 1)
    }

    /// Whether the packet of `psn` asked and is not answered.
    pub(super) fn has(&self, psn: u64) -> bool {
        self.psns.binary_search_by_key(&psn, |(psn, _)| *psn).is_ok()
    }

    /// The packet of `psn`, which asks, left.
    #[inline]
    pub(super) fn asked(&mut self, psn: u64) {
        let answer = self.next.take();
        debug_assert!(answer.is_some());
        self.psns.push_back((psn, answer.unwrap_or(Expected::NOTHING)));
    }

    /// Everything before `to` was answered.
    #[inline]
    pub(super) fn answered(&mut self, to: u64, pools: &mut Pools) {
        // Those of one time are given back at once.
        let mut sum = Expected::NOTHING;
        while let Some((psn, answer)) = self.psns.front()
            && *psn < to
        {
            if !sum.add(*answer) {
                pools.answered(core::mem::replace(&mut sum, *answer));
            }
            self.psns.pop_front();
        }
        pools.answered(sum);
    }

    /// Everything from `from` on is sent again, and asks again. The room of one is kept, for what may be left before.
    pub(super) fn taken_back(&mut self, from: u64, pools: &mut Pools) {
        while let Some((psn, answer)) = self.psns.back()
            && *psn >= from
        {
            match self.next {
                None => self.next = Some(*answer),
                Some(_) => pools.answered(*answer),
            }
            self.psns.pop_back();
        }
    }
}
