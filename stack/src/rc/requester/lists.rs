//! The lists of a queue pair's work in flight: which packets asked and are not acknowledged, when
//! packets left, which responses are to come. With room for a whole window they take several times
//! the memory of all the rest of a queue pair, so only a queue pair with work in flight has any.
//!
//! They are handed on and never freed, so that nothing is allocated per packet. And while few queue
//! pairs have some, one at rest keeps them: it need not fetch them for each request if it sends one
//! after the other.

use crate::qp::sq::SendQueue;
use crate::rc::congestion::rtt::Turn;
use crate::rc::requester::ack_requests::Run;
use crate::rc::requester::{Outstanding, Requester};
use crate::ring::Ring;
use crate::tuning::congestion::TURNS;
use crate::tuning::in_flight::KEEPERS;

/// The lists of one queue pair.
#[derive(Debug, Default)]
struct Lists {
    asks: Ring<Run>,
    turns: Ring<Turn>,
    responses: Ring<Outstanding>,
}

/// Those of all queue pairs.
#[derive(Debug, Default)]
pub(crate) struct SpareLists {
    free: Vec<Lists>,
    lent: usize,
}

impl SpareLists {
    /// Number of queue pairs that have some.
    pub(crate) fn lent(&self) -> usize {
        self.lent
    }

    /// Number of lists that wait for a queue pair.
    pub(crate) fn spare(&self) -> usize {
        self.free.len()
    }
}

impl Requester {
    #[inline]
    pub(in crate::rc) fn has_lists(&self) -> bool {
        self.round_trip.turns.capacity() > 0
    }

    /// Whether nothing is to be sent or in flight, and it has no lists.
    #[inline]
    pub(in crate::rc) fn has_nothing(&self, sq: &SendQueue) -> bool {
        self.cursor() == sq.tail && !self.outstanding() && !self.has_lists()
    }

    /// Something is about to leave: gets lists, with room for all that may be in flight.
    #[inline(never)]
    pub(in crate::rc) fn take_lists(&mut self, spares: &mut SpareLists) {
        debug_assert!(!self.has_lists());
        spares.lent += 1;
        let mut lists = spares.free.pop().unwrap_or_default();
        // So that there is room for it when it comes back.
        spares.free.reserve(spares.lent);
        let (packets, responses) = self.control.most();
        lists.asks.reserve(packets as usize);
        lists.turns.reserve(TURNS);
        lists.responses.reserve(responses.into());
        self.swap(&mut lists);
    }

    /// Nothing is in flight or to be sent: others may have the lists, if there are many.
    #[inline]
    pub(in crate::rc) fn rest(&mut self, spares: &mut SpareLists) {
        if spares.lent > KEEPERS {
            self.give_lists_back(spares);
        }
    }

    /// Others may have the lists.
    pub(super) fn give_lists_back(&mut self, spares: &mut SpareLists) {
        if !self.has_lists() {
            return;
        }
        debug_assert!(self.ack_requests.runs.is_empty() && self.responses.is_empty());
        let mut lists = Lists::default();
        self.swap(&mut lists);
        // All of it was acknowledged, or is not awaited any more.
        lists.turns.clear();
        spares.free.push(lists);
        spares.lent -= 1;
    }

    #[inline]
    fn swap(&mut self, lists: &mut Lists) {
        core::mem::swap(&mut self.ack_requests.runs, &mut lists.asks);
        core::mem::swap(&mut self.round_trip.turns, &mut lists.turns);
        core::mem::swap(&mut self.responses, &mut lists.responses);
    }
}
