//! The scoreboard of selective repeat (RFC 6675): the packets that the peer holds, and the lost
//! ones, which go again, alone. [`reorder`](crate::rc::reorder) has the format of the report.
//!
//! Packets that the peer holds are in flight no more: its receive queue has credit for others. A
//! packet that went again and is still missing goes once more when packets that left after it have
//! arrived, and no sooner than after a round trip.
//!
//! Requests with a response of their own are not repeated so, and nothing behind them: a missing
//! packet there goes again with all that follows.

use std::collections::VecDeque;

use super::Recovery;
use crate::budget::Cost;
use crate::peer::Peers;
use crate::qp::outbound::RequestPacket;
use crate::qp::sq::SendQueue;
use crate::rc::reorder::SPAN;
use crate::rc::requester::{ConnParams, Requester};
use crate::types::{Seq, Time};

/// The known state of packets behind the first unacknowledged one.
#[derive(Debug, Default)]
pub(super) struct Scoreboard {
    /// A bit for each PSN that the peer holds, at PSN modulo [`SPAN`].
    held: Bits,
    /// Up to here each packet is known to be held or lost; 0 if nothing is held.
    end: Seq,
    /// Those before `end` that are lost, ascending.
    lost: VecDeque<Lost>,
    /// Of those, the first that may be due: they go again in order.
    next: usize,
    /// Number of those that are due: they have not gone again since they were lost.
    due: u32,
    /// The next that goes again asks, whether or not it did when it left first.
    probes: bool,
    /// When the last of those that arrived had gone again.
    arrived: Time,
}

/// The news of a report.
#[derive(Debug, Clone, Copy)]
pub(in crate::rc::requester) struct News {
    pub(in crate::rc::requester) lost: bool,
    /// Something is held.
    pub(in crate::rc::requester) arrived: bool,
}

#[derive(Debug)]
struct Bits([u64; (SPAN / 64) as usize]);

impl Default for Bits {
    fn default() -> Self {
        Self([0; (SPAN / 64) as usize])
    }
}

impl Bits {
    fn has(&self, psn: Seq) -> bool {
        self.0[(psn.0 % SPAN / 64) as usize] & (1 << (psn.0 % 64)) != 0
    }

    fn set(&mut self, psn: Seq) {
        self.0[(psn.0 % SPAN / 64) as usize] |= 1 << (psn.0 % 64);
    }

    fn clear(&mut self, psn: Seq) {
        self.0[(psn.0 % SPAN / 64) as usize] &= !(1 << (psn.0 % 64));
    }
}

#[derive(Debug, Clone, Copy)]
struct Lost {
    psn: Seq,
    again: Option<Again>,
}

impl Lost {
    fn is_due(&self) -> bool {
        self.again.is_none()
    }
}

/// How a packet went again.
#[derive(Debug, Clone, Copy)]
struct Again {
    /// Packets of this PSN, or a higher one, left later.
    before: Seq,
    at: Time,
}

impl Scoreboard {
    fn is_idle(&self) -> bool {
        self.lost.is_empty() && self.end == Seq::default()
    }

    /// Number of packets that are to go again.
    pub(super) fn due(&self) -> u32 {
        self.due
    }

    pub(super) fn probes(&self) -> bool {
        self.probes
    }

    /// Which goes again next.
    fn next_due(&self) -> Option<usize> {
        (self.next..self.lost.len()).find(|at| self.lost[*at].is_due())
    }

    fn has(&self, psn: Seq) -> bool {
        psn < self.end && self.held.has(psn)
    }

    fn count_due(&mut self) {
        self.next = 0;
        let due = self.lost.iter().filter(|lost| lost.is_due()).count() as u32;
        self.due = due;
    }

    /// Everything before `to` has arrived; `from` is where that began before.
    fn arrived(&mut self, from: Seq, to: Seq) {
        for psn in from.until(to.min(self.end)) {
            self.held.clear(psn);
        }
        while let Some(lost) = self.lost.front()
            && lost.psn < to
        {
            self.due -= u32::from(lost.is_due());
            self.arrived = self.arrived.max(lost.again.map_or(Time::default(), |again| again.at));
            self.lost.pop_front();
            self.next = self.next.saturating_sub(1);
        }
        if to >= self.end {
            self.end = Seq::default();
        }
    }

    /// Finds the lost packets, now that more is held, from the former `end` on; and the
    /// retransmissions that were lost, which takes no less than `patience` to know. Returns whether
    /// anything more is lost.
    fn judge(&mut self, end: Seq, now: Time, patience: u64) -> bool {
        let Self { held, lost, arrived, .. } = self;
        lost.retain(|lost| {
            let is_here = held.has(lost.psn);
            if let Some(again) = lost.again.filter(|_| is_here) {
                *arrived = (*arrived).max(again.at);
            }
            !is_here
        });
        let mut more = false;
        for lost in lost.iter_mut() {
            let passed = |again: Again| {
                let overtaken = self.end > again.before || *arrived > again.at;
                overtaken && now.since(again.at) >= patience
            };
            if lost.again.is_some_and(passed) {
                lost.again = None;
                more = true;
            }
        }
        let known = lost.len();
        let new = end.until(self.end).filter(|psn| !held.has(*psn));
        lost.extend(new.map(|psn| Lost { psn, again: None }));
        more |= lost.len() > known;
        self.count_due();
        more
    }

    /// All that is lost goes again, and the first of it asks. Returns whether anything is lost.
    fn all_again(&mut self) -> bool {
        self.lost.iter_mut().for_each(|lost| lost.again = None);
        self.count_due();
        self.probes = self.due > 0;
        self.probes
    }

    /// The one that was due left at `now`; `next_psn` is the first PSN to leave after it.
    fn left(&mut self, now: Time, next_psn: Seq) {
        if let Some(at) = self.next_due() {
            self.lost[at].again = Some(Again { before: next_psn, at: now });
            self.next = at + 1;
            self.due -= 1;
            self.probes = false;
        }
    }

    /// Everything from `from` on goes again.
    fn forget(&mut self, from: Seq, una: Seq) {
        for psn in from.until(self.end) {
            self.held.clear(psn);
        }
        self.lost.retain(|lost| lost.psn < from);
        self.end = if from <= una { Seq::default() } else { self.end.min(from) };
        self.count_due();
        self.probes = false;
    }

    /// Ranges of PSNs from `from` to before `to` that are held.
    fn held_ranges(&self, from: Seq, to: Seq) -> impl Iterator<Item = (Seq, Seq)> {
        let (mut at, to) = (from, to.min(self.end));
        core::iter::from_fn(move || {
            let first = at.until(to).find(|psn| self.held.has(*psn))?;
            at = first.until(to).find(|psn| !self.held.has(*psn)).unwrap_or(to);
            Some((first, at))
        })
    }
}

impl Recovery {
    /// Whether a packet behind the first missing one is known to be held, or to be lost.
    #[inline]
    pub(in crate::rc::requester) fn is_selective(&self) -> bool {
        self.scoreboard.as_ref().is_some_and(|board| !board.is_idle())
    }

    /// Whether something is known to be lost, whether or not it went again.
    pub(in crate::rc::requester) fn has_lost(&self) -> bool {
        self.scoreboard.as_ref().is_some_and(|board| !board.lost.is_empty())
    }

    /// All that is lost goes again; `false` if nothing is known to be.
    pub(in crate::rc::requester) fn all_again(&mut self) -> bool {
        self.scoreboard.as_mut().is_some_and(|board| board.all_again())
    }

    /// Everything before `to` is acknowledged; up to now that was `from`.
    #[cold]
    pub(in crate::rc::requester) fn arrived(&mut self, from: Seq, to: Seq) {
        if let Some(board) = &mut self.scoreboard {
            board.arrived(from, to);
        }
    }

    /// Everything from `from` on goes again; `una` is the first that is not acknowledged.
    #[cold]
    pub(in crate::rc::requester) fn forget_from(&mut self, from: Seq, una: Seq) {
        if let Some(board) = &mut self.scoreboard {
            board.forget(from, una);
        }
    }

    /// The cost of the packets from `from` to before `to` that are not charged, because the peer
    /// holds them.
    pub(in crate::rc::requester) fn held_cost(
        &self,
        sq: &SendQueue,
        from: Seq,
        to: Seq,
        params: &ConnParams,
    ) -> Cost {
        let mut sum = Cost::default();
        if let Some(board) = &self.scoreboard {
            for (from, to) in board.held_ranges(from, to) {
                sum.add(sq.cost_between(from, to, params.mtu));
            }
        }
        sum
    }
}

impl Requester {
    /// The peer misses the first unacknowledged packet, and holds those that `report` lists. `None`
    /// if that cannot be so, or if nothing of it can go again alone.
    pub(in crate::rc::requester) fn on_report(
        &mut self,
        now: Time,
        report: &[u8],
        sq: &SendQueue,
        params: &ConnParams,
        peers: &mut Peers,
    ) -> Option<News> {
        let una = self.snd_una;
        let behind = self.gate(sq, self.snd_nxt).map_or(self.snd_nxt, |(_, at)| at).min(una + SPAN);
        let board = self.recovery.scoreboard.get_or_insert_default();
        let mut arrived = Cost::default();
        let end = board.end.max(una);
        let told = una.until(behind).zip(bits(report)).skip(1);
        for (psn, _) in told.filter(|(_, held)| *held) {
            if !board.has(psn) {
                arrived.add(sq.cost_between(psn, psn + 1, params.mtu));
                board.held.set(psn);
                board.end = board.end.max(psn + 1);
            }
        }
        if board.end > end {
            self.round_trip.acknowledged(board.end, now, true);
        }
        let lost = board.judge(end, now, self.round_trip.min_rtt());
        let credible = board.lost.front().is_some_and(|lost| lost.psn == una);
        self.recovery.back.times = 0;
        self.release(arrived, params, peers);
        self.control.congestion.on_ack(arrived.datagrams);
        credible.then_some(News { lost, arrived: arrived.datagrams > 0 })
    }

    /// The next packet that goes again alone.
    pub(in crate::rc::requester) fn next_lost(
        &self,
        sq: &SendQueue,
        params: &ConnParams,
    ) -> Option<RequestPacket> {
        let board = self.recovery.scoreboard.as_ref()?;
        let psn = board.lost.get(board.next_due()?)?.psn;
        let index = self.index_of(sq, psn);
        let wqe = sq.get(index);
        // There is credit for the answer since it left first, but for that to a probe, or if
        // nothing asked.
        let ack_req = self.ack_requests.has(psn) || board.probes || self.acks.has_unasked(sq);
        Some(RequestPacket::of(index, wqe, psn, params.mtu, ack_req))
    }

    /// It left.
    pub(in crate::rc::requester) fn lost_left(&mut self, now: Time) {
        if let Some(board) = &mut self.recovery.scoreboard {
            board.left(now, self.snd_nxt);
        }
    }
}

fn bits(report: &[u8]) -> impl Iterator<Item = bool> {
    report.iter().flat_map(|byte| (0..8).map(move |bit| byte & (1 << bit) != 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The peer holds these.
    fn holding(psns: impl Iterator<Item = Seq>) -> Scoreboard {
        let mut board = Scoreboard::default();
        for psn in psns {
            board.held.set(psn);
            board.end = board.end.max(psn + 1);
        }
        board
    }

    /// The same bit stands for a PSN and for the one [`SPAN`] later.
    #[test]
    fn no_bit_of_what_is_acknowledged_or_goes_again_is_left() {
        const FIRST: Seq = Seq(1 << 24);
        let of_none = |board: &Scoreboard| board.held.0.iter().all(|word| *word == 0);
        for count in [1, 63, 64, 65, SPAN - 1] {
            let held = || (FIRST + 1).until(FIRST + count + 1).step_by(2);
            let mut board = holding(held());
            assert!(held().all(|psn| board.has(psn)));
            board.arrived(FIRST, FIRST + count / 2);
            assert!(held().all(|psn| board.has(psn) == (psn >= FIRST + count / 2)), "{count}");
            board.arrived(FIRST + count / 2, FIRST + count + 1);
            assert!(of_none(&board) && board.is_idle(), "{count} acknowledged");
            let mut board = holding(held());
            board.forget(FIRST + count / 2, FIRST);
            assert!(held().all(|psn| board.has(psn) == (psn < FIRST + count / 2)), "{count}");
            board.forget(FIRST, FIRST);
            assert!(of_none(&board) && board.is_idle(), "{count} go again");
        }
    }

    /// Packets that go again at one time prove nothing about each other: none overtook the other.
    #[test]
    fn what_went_again_is_lost_again_only_if_something_later_arrived() {
        let mut board = holding([3, 4].map(Seq).into_iter());
        board.held.clear(Seq(3));
        assert!(board.judge(Seq(1), Time(10), 1));
        assert_eq!(board.due, 3, "1, 2, 3");
        board.left(Time(11), Seq(5));
        board.left(Time(11), Seq(5));
        board.left(Time(12), Seq(5));
        board.arrived(Seq(1), Seq(2));
        assert!(!board.judge(Seq(5), Time(30), 1), "2 left with 1");
        board.held.set(Seq(3));
        assert!(board.judge(Seq(5), Time(30), 1), "3 left later than 2");
        assert_eq!((board.due, board.lost.len()), (1, 1));
    }

    #[test]
    fn what_is_due_is_counted_until_it_left_arrived_or_was_forgotten() {
        let lost = || {
            let mut board = holding([3, 6, 9].map(Seq).into_iter());
            assert!(board.judge(Seq(1), Time(10), 1));
            board
        };
        let mut board = lost();
        assert_eq!((board.due, board.lost.len()), (6, 6), "1, 2, 4, 5, 7, 8");
        board.left(Time(11), Seq(10));
        board.left(Time(11), Seq(10));
        assert_eq!(board.due, 4);
        board.arrived(Seq(1), Seq(5));
        assert_eq!((board.due, board.lost.len()), (3, 3), "5, 7, 8");
        assert!(board.all_again() && board.probes);
        board.left(Time(20), Seq(10));
        assert_eq!((board.due, board.probes), (2, false));
        board.forget(Seq(8), Seq(5));
        assert_eq!((board.due, board.lost.len()), (1, 2), "5 went again, 7 is due");
    }
}
