//! The acknowledgements that a requester asked for: each may become a packet of its own in our receive queue, so each is
//! charged to our own room until it is answered.

use std::collections::VecDeque;

use crate::pool::{Budget, Charge, Pools};

/// What an acknowledgement costs us: BTH, AETH, ICRC.
const ACK: Charge = Charge::of(1, Budget::cost(12 + 4 + 4));

/// The PSNs that asked and are not answered, ascending.
#[derive(Debug, Default)]
pub(super) struct Asks {
    psns: VecDeque<u64>,
}

impl Asks {
    /// Starts over with room for `max`, so that asking does not allocate.
    pub(super) fn start(&mut self, max: u32) {
        self.psns.clear();
        self.psns.reserve(max as usize);
    }

    /// Whether the end of a message should ask: always if nothing else does, or if nothing follows that could; else only
    /// while there is room for the answer. What follows will ask then, and be answered for all before it; if it cannot be sent,
    /// the last packet is (`Requester::ask_again`).
    #[inline]
    pub(super) fn should(&self, nothing_follows: bool, pools: &mut Pools) -> bool {
        nothing_follows || self.psns.is_empty() || pools.spares_answer(ACK)
    }

    /// Whether an answer is still to come.
    #[inline]
    pub(super) fn outstanding(&self) -> bool {
        !self.psns.is_empty()
    }

    #[inline]
    pub(super) fn asked(&mut self, psn: u64, pools: &mut Pools) {
        self.psns.push_back(psn);
        pools.expect_answers(ACK);
    }

    /// Everything before `to` was answered.
    #[inline]
    pub(super) fn answered(&mut self, to: u64, pools: &mut Pools) {
        let mut count = 0;
        while self.psns.front().is_some_and(|psn| *psn < to) {
            self.psns.pop_front();
            count += 1;
        }
        release(count, pools);
    }

    /// Everything from `from` on is sent again, and asks again.
    pub(super) fn taken_back(&mut self, from: u64, pools: &mut Pools) {
        let mut count = 0;
        while self.psns.back().is_some_and(|psn| *psn >= from) {
            self.psns.pop_back();
            count += 1;
        }
        release(count, pools);
    }
}

#[inline]
fn release(count: u32, pools: &mut Pools) {
    if count > 0 {
        pools.answered(Charge { bytes: u64::from(count) * ACK.bytes, datagrams: count });
    }
}
