//! The requester: where it is in its queue, and what it holds. What leaves next it decides in
//! `plan`; the queue pair writes the packet and tells it that it left.

use std::collections::VecDeque;

use super::asks::Asks;
use super::company::Company;
use super::credits::Credits;
use super::lists::SpareLists;
use super::plan::{Shape, request_header};
use super::quiet::Quiet;
use super::reads::Flow;
use super::repair::Repair;
use super::rtt::RoundTrip;
use super::window::Window;
use crate::mem::PdId;
use crate::pool::{Budget, Charge, Expected, PoolId, Pools};
use crate::qp::sq::{SendQueue, Wqe};
use crate::types::{Mtu, Time};

/// What a READ request or another that has a response of its own costs its receiver: an atomic is
/// the longest.
pub(super) const REQUEST: Charge = Charge::of(1, Budget::cost(12 + 28 + 4));

/// A READ request or another that waits for a response of its own.
#[derive(Debug, Clone, Copy)]
pub(super) struct Outstanding {
    pub(super) first: u64,
    pub(super) last: u64,
    /// The room for its response.
    response: Expected,
}

impl Outstanding {
    /// Packets of its answer from `from` on and before `to`.
    fn packets(&self, from: u64, to: u64) -> u64 {
        to.min(self.last + 1).saturating_sub(from.max(self.first))
    }
}

/// Limits that the connection sets.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// The name under which it asks the pools.
    pub(super) slot: u32,
    pub(super) mtu: Mtu,
    pub(super) pd: PdId,
    pub(super) peer: PoolId,
    /// Whether the peer is one of us, and what comes too early is held.
    pub(super) selective: bool,
    /// Whether WRITEs may be cut.
    pub(super) cuts_writes: bool,
}

#[derive(Debug)]
pub(super) struct Requester {
    /// Index of the request under the cursor; the queue's tail if all were sent.
    pub(super) cur: u64,
    /// The highest that `cur` ever was: what concerns this side only and is before it was executed.
    pub(super) reached: u64,
    /// Next PSN to send.
    pub(super) nxt: u64,
    /// First PSN not acknowledged.
    pub(super) una: u64,
    /// One more than the highest PSN ever sent.
    pub(super) sent: u64,
    pub(super) rd: VecDeque<Outstanding>,
    pub(super) flow: Flow,
    pub(super) max_rd_atomic: u8,
    pub(super) window: Window,
    pub(super) round_trip: RoundTrip,
    /// What the packets from `una` to `nxt` are charged with.
    pub(super) charged: Charge,
    pub(super) ack_asked: u64,
    pub(super) quiet: Quiet,
    pub(super) asks: Asks,
    pub(super) credits: Credits,
    pub(super) company: Company,
    /// Selective repeat; `None` before the first gap.
    pub(super) repair: Option<Box<Repair>>,
    /// Packets that are to go again alone.
    pub(super) repairs: usize,
    /// The next of them asks, whether or not it did when it left first.
    pub(super) repair_asks: bool,
    /// The PSN from which an overtaken response was asked for again.
    implied: Option<u64>,
    /// Whether requests that were not begun may be: not in SQD.
    pub(super) begins: bool,
    /// Set while the peer has no receive.
    pub(super) rnr_until: Option<Time>,
    /// It waited for room as long as for an answer: one packet may leave without.
    pub(super) overdraft: bool,
    /// The peer left the last thing that it was asked unanswered for the whole timeout: nothing is
    /// reckoned with, so that it keeps nobody waiting.
    pub(super) silent: bool,
    /// It has room for an acknowledgement, and waits for the peer's.
    pub(super) half_way: bool,
    /// The next packet asks, whatever it is.
    pub(super) solicits: bool,
    /// The next packet only asks what became of it.
    pub(super) probing: bool,
}

impl Requester {
    pub(super) fn new() -> Self {
        Self {
            cur: 0,
            reached: 0,
            nxt: 0,
            una: 0,
            sent: 0,
            rd: VecDeque::new(),
            flow: Flow::new(Mtu::Mtu256, 0, false),
            max_rd_atomic: 0,
            window: Window::new(1),
            round_trip: RoundTrip::default(),
            charged: Charge::default(),
            ack_asked: 0,
            quiet: Quiet::default(),
            asks: Asks::default(),
            credits: Credits::default(),
            company: Company::default(),
            repair: None,
            repairs: 0,
            repair_asks: false,
            implied: None,
            begins: true,
            rnr_until: None,
            overdraft: false,
            silent: false,
            half_way: false,
            solicits: false,
            probing: false,
        }
    }

    /// Starts at `psn` with the request `index`.
    pub(super) fn start(&mut self, psn: u64, index: u64, max_rd_atomic: u8, window_max: u32) {
        (self.cur, self.reached) = (index, index);
        (self.nxt, self.una, self.sent, self.ack_asked) = (psn, psn, psn, psn);
        debug_assert!(!self.has_lists(), "given back when the queue pair was reset");
        self.max_rd_atomic = max_rd_atomic;
        self.begins = true;
        self.credits = Credits::default();
        self.window = Window::new(window_max);
        self.round_trip = RoundTrip::default();
        (self.repair, self.repairs, self.repair_asks) = (None, 0, false);
        (self.implied, self.quiet) = (None, Quiet::default());
        self.rnr_until = None;
        (self.overdraft, self.silent, self.half_way) = (false, false, false);
        (self.solicits, self.probing) = (false, false);
    }

    /// Sets how many READs and atomics may be outstanding.
    pub(super) fn set_max_rd_atomic(&mut self, max: u8) {
        self.max_rd_atomic = max;
        if self.has_lists() {
            self.rd.reserve(usize::from(max).saturating_sub(self.rd.len()));
        }
    }

    /// Whether everything that was begun is acknowledged, to the end of its message.
    pub(super) fn is_drained(&self, sq: &SendQueue) -> bool {
        self.una == self.sent && (sq.is_empty() || sq.get(sq.head).first >= self.sent)
    }

    pub(super) fn una(&self) -> u64 {
        self.una
    }

    pub(super) fn sent_max(&self) -> u64 {
        self.sent
    }

    /// Whether something was sent that is not acknowledged.
    pub(super) fn outstanding(&self) -> bool {
        self.una < self.nxt
    }

    /// Whether a packet of `psn` would be a retransmission.
    pub(super) fn was_sent(&self, psn: u64) -> bool {
        psn < self.sent
    }

    /// The next response with data that is still to come for a request that begins before `to`:
    /// index of the request and PSN. Nothing beyond it can be acknowledged.
    #[inline]
    pub(super) fn gate(&self, sq: &SendQueue, to: u64) -> Option<(u64, u64)> {
        if !sq.expects_responses() {
            return None;
        }
        let mut index = sq.head;
        while index < sq.tail {
            let wqe = sq.get(index);
            if wqe.first >= to {
                return None;
            }
            if wqe.op.has_response() {
                return Some((index, wqe.first.max(self.una)));
            }
            index += 1;
        }
        None
    }

    /// Index of the request that a PSN belongs to.
    pub(super) fn index_of(&self, sq: &SendQueue, psn: u64) -> u64 {
        sq.locate(psn)
    }

    /// Index of the request under the cursor.
    pub(super) fn cursor(&self) -> u64 {
        self.cur
    }

    /// Whether something was sent for which nothing was asked yet.
    #[inline]
    pub(super) fn is_unasked(&self) -> bool {
        let asked = self.asks.end().unwrap_or(self.una);
        let read = self.rd.back().map_or(self.una, |read| read.last + 1);
        self.nxt > asked.max(read).max(self.una)
    }

    /// Keeps room for an acknowledgement while something needs one, and no longer.
    #[inline]
    pub(super) fn settle(&mut self, pools: &mut Pools) {
        if self.asks.is_open() && !self.half_way && !self.is_unasked() {
            self.asks.close(pools);
        }
    }

    /// The packet left: moves the cursor.
    #[inline]
    pub(super) fn sent(
        &mut self,
        now: Time,
        shape: &Shape,
        sq: &SendQueue,
        limits: &Limits,
        pools: &mut Pools,
    ) {
        let piece = &shape.piece;
        let wqe = sq.get(piece.index);
        if wqe.op.has_response() {
            let response = if self.silent { Expected::NOTHING } else { pools.expect(shape.charge) };
            pools.get(limits.peer).charge(REQUEST);
            self.rd.push_back(Outstanding { first: piece.psn, last: shape.last, response });
        } else {
            pools.get(limits.peer).charge(shape.charge);
            self.charged.add(shape.charge);
            let begins = wqe.begins(piece.psn);
            self.company.sent(piece.len + request_header(&wqe.op, begins));
            self.round_trip.sent(piece.psn, now, piece.psn < self.sent);
            if piece.ack_req {
                self.asks.asked(piece.psn);
            }
        }
        if piece.ack_req {
            self.ack_asked = piece.psn;
        }
        self.overdraft = false;
        (self.solicits, self.probing) = (false, false);
        self.nxt = shape.last + 1;
        self.sent = self.sent.max(self.nxt);
        if self.nxt > wqe.last() {
            self.executed();
        }
    }

    /// The request under the cursor was sent, or was executed on this side.
    #[inline]
    pub(super) fn executed(&mut self) {
        self.cur += 1;
        self.reached = self.reached.max(self.cur);
    }

    /// Whether the request `index` is done once everything before it is: what concerns this side
    /// only must have been executed.
    #[inline]
    pub(super) fn is_executed(&self, index: u64, wqe: &Wqe) -> bool {
        index < self.reached || !wqe.op.is_local()
    }

    /// What is sent again goes past what was executed in between.
    #[cold]
    pub(super) fn skip_executed(&mut self, sq: &SendQueue) {
        while self.cur < self.reached && sq.get(self.cur).op.is_local() {
            self.cur += 1;
        }
    }

    /// Everything before `to` is acknowledged. The caller retires the requests; READs and atomics
    /// before `to` must be answered, or the one at the front partly.
    #[inline]
    pub(super) fn advance(
        &mut self,
        now: Time,
        to: u64,
        sq: &SendQueue,
        limits: &Limits,
        pools: &mut Pools,
    ) {
        debug_assert!(to > self.una && to <= self.sent);
        let repairing = self.is_repairing();
        let mut charge = Charge::default();
        if repairing || self.charged.datagrams > 0 {
            charge = sq.cost_between(self.una, to.min(self.nxt), limits.mtu);
        }
        if repairing {
            charge.take(self.uncharged(sq, self.una, to.min(self.nxt), limits));
            self.repaired_until(self.una, to);
        }
        self.release(charge, limits, pools);
        self.asks.answered(to, pools);
        // What waited for something to be repaired says nothing about the path.
        self.round_trip.acknowledged(to, now, !repairing);
        self.window.acknowledged(charge.datagrams);
        let before = std::mem::replace(&mut self.una, to);
        self.implied = None;
        while let Some(front) = self.rd.front() {
            if front.first < front.last {
                self.flow.came(front.packets(before, to));
            }
            if front.last >= to {
                break;
            }
            release_response(front, limits, pools);
            self.rd.pop_front();
        }
        if self.nxt < to {
            // Acknowledged although about to be sent again.
            self.nxt = to;
            self.cur = sq.locate(to).min(self.reached);
            self.ask_no_more();
        }
        self.silent = false;
        self.settle(pools);
    }

    /// Packets of answers that were asked for and have not come.
    pub(super) fn answers_under_way(&self) -> u64 {
        self.rd.iter().map(|asked| asked.packets(self.una, u64::MAX)).sum()
    }

    /// Answers that were asked for did not come, if there were some; our own queue may have been
    /// full.
    pub(super) fn answers_lost(&mut self, pools: &mut Pools) {
        let under_way = self.answers_under_way();
        if under_way > 1 {
            self.flow.lost(under_way);
            pools.lost(PoolId::OWN);
        }
    }

    /// Sends again from `from` on.
    pub(super) fn go_back(
        &mut self,
        from: u64,
        sq: &SendQueue,
        limits: &Limits,
        pools: &mut Pools,
    ) {
        debug_assert!(from >= self.una && from <= self.sent);
        if from >= self.nxt {
            return;
        }
        self.ask_no_more();
        self.quiet.ends();
        let mut charge = sq.cost_between(from, self.nxt, limits.mtu);
        if self.is_repairing() {
            charge.take(self.uncharged(sq, from, self.nxt, limits));
            self.repair_no_more(from);
        }
        self.release(charge, limits, pools);
        self.asks.taken_back(from, pools);
        self.round_trip.taken_back(from);
        while let Some(back) = self.rd.back() {
            if back.last < from {
                break;
            }
            release_response(back, limits, pools);
            self.rd.pop_back();
        }
        self.nxt = from;
        self.cur = sq.locate(from);
        self.ack_asked = from;
        self.settle(pools);
    }

    /// Takes back the last packet, to send it again and ask for an acknowledgement, if the last
    /// ones did not ask and nothing that is to come would tell of them: what was to ask in their
    /// place cannot be sent.
    pub(super) fn ask_again(&mut self, sq: &SendQueue, limits: &Limits, pools: &mut Pools) -> bool {
        let told = self.asks.end().is_some() || !self.rd.is_empty() || self.rnr_until.is_some();
        if told || !self.outstanding() || self.is_quiet(sq) {
            return false;
        }
        // Its room is still its own.
        self.go_back(self.nxt - 1, sq, limits, pools);
        (self.solicits, self.overdraft) = (true, true);
        true
    }

    /// Whether something can be sent again only to ask: a READ would be answered twice, and there
    /// is room for one answer.
    pub(super) fn may_repeat(&self) -> bool {
        self.rd.is_empty() && self.rnr_until.is_none()
    }

    /// Takes back the last packet, to send it again and ask.
    pub(super) fn probe(&mut self, sq: &SendQueue, limits: &Limits, pools: &mut Pools) {
        self.go_back(self.nxt - 1, sq, limits, pools);
        (self.solicits, self.overdraft, self.probing) = (true, true, true);
    }

    /// What was to be asked was answered, or something else is sent again.
    fn ask_no_more(&mut self) {
        (self.solicits, self.overdraft, self.probing) = (false, false, false);
    }

    /// Whether everything from `from` on was sent, and is to be sent again.
    pub(super) fn is_behind(&self, from: u64) -> bool {
        from < self.nxt
    }

    /// Whether a response that overtook `expected` should make it go back: once, until something
    /// arrives.
    pub(super) fn implied_nak(&mut self, expected: u64) -> bool {
        self.implied.replace(expected) != Some(expected)
    }

    /// A timeout makes any repetition due again.
    pub(super) fn forget_implied(&mut self) {
        self.implied = None;
    }

    /// Gives back everything that is charged, and the lists.
    pub(super) fn release_all(
        &mut self,
        limits: &Limits,
        pools: &mut Pools,
        spares: &mut SpareLists,
    ) {
        let charge = self.charged;
        self.release(charge, limits, pools);
        (self.repair, self.repairs, self.repair_asks) = (None, 0, false);
        self.asks.taken_back(0, pools);
        self.asks.close(pools);
        for outstanding in self.rd.drain(..) {
            release_response(&outstanding, limits, pools);
        }
        self.give_lists_back(spares);
    }

    #[inline]
    pub(super) fn release(&mut self, charge: Charge, limits: &Limits, pools: &mut Pools) {
        if charge.datagrams > 0 {
            self.charged.take(charge);
            pools.release(limits.peer, charge);
        }
    }
}

fn release_response(outstanding: &Outstanding, limits: &Limits, pools: &mut Pools) {
    pools.answered(outstanding.response);
    pools.release(limits.peer, REQUEST);
}
