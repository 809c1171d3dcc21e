//! The requester: where it is in its queue, and what it holds. What leaves next it decides in
//! `plan`; the queue pair writes the packet and tells it that it left.

mod ack_policy;
mod ack_requests;
mod batching;
mod credits;
pub(crate) mod lists;
pub(super) mod plan;
pub(super) mod read_window;
mod run;
mod scoreboard;
mod split;

use std::collections::VecDeque;

use crate::mem::PdId;
use crate::peer::{Budget, Cost, Expected, PeerId, Peers};
use crate::qp::sq::{SendQueue, Wqe};
use crate::rc::congestion::rtt::RoundTrip;
use crate::rc::congestion::window::Window;
use crate::rc::requester::ack_policy::Quiet;
use crate::rc::requester::ack_requests::AckRequests;
use crate::rc::requester::batching::Batch;
use crate::rc::requester::credits::Credits;
use crate::rc::requester::lists::SpareLists;
use crate::rc::requester::plan::{Shape, request_header};
use crate::rc::requester::read_window::ReadWindow;
use crate::rc::requester::scoreboard::Scoreboard;
use crate::types::{Mtu, Time};

/// What a READ request or another that has a response of its own costs its receiver: an atomic is
/// the longest.
pub(in crate::rc) const REQUEST: Cost = Cost::of(1, Budget::cost(12 + 28 + 4));

/// A READ request or another that waits for a response of its own.
#[derive(Debug, Clone, Copy)]
pub(in crate::rc) struct Outstanding {
    pub(in crate::rc) first: u64,
    pub(in crate::rc) last: u64,
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
pub(in crate::rc) struct Limits {
    /// The name under which it asks for credit.
    pub(in crate::rc) slot: u32,
    pub(in crate::rc) mtu: Mtu,
    pub(in crate::rc) pd: PdId,
    pub(in crate::rc) peer: PeerId,
    /// Whether the peer is one of us, and what comes too early is held.
    pub(in crate::rc) selective: bool,
    /// Whether WRITEs may be cut.
    pub(in crate::rc) cuts_writes: bool,
}

#[derive(Debug)]
pub(in crate::rc) struct Requester {
    /// Index of the request under the cursor; the queue's tail if all were sent.
    pub(in crate::rc) wqe_next: u64,
    /// The highest that `cur` ever was: what concerns this side only and is before it was executed.
    pub(in crate::rc) wqe_max: u64,
    /// Next PSN to send.
    pub(in crate::rc) snd_nxt: u64,
    /// First PSN not acknowledged.
    pub(in crate::rc) snd_una: u64,
    /// One more than the highest PSN ever sent.
    pub(in crate::rc) snd_max: u64,
    pub(in crate::rc) responses: VecDeque<Outstanding>,
    pub(in crate::rc) read_window: ReadWindow,
    pub(in crate::rc) max_rd_atomic: u8,
    pub(in crate::rc) window: Window,
    pub(in crate::rc) round_trip: RoundTrip,
    /// What the packets from `una` to `nxt` are charged with.
    pub(in crate::rc) in_flight: Cost,
    pub(in crate::rc) last_ack_req: u64,
    pub(in crate::rc) quiet: Quiet,
    pub(in crate::rc) ack_requests: AckRequests,
    pub(in crate::rc) credits: Credits,
    pub(in crate::rc) batch: Batch,
    /// Selective repeat; `None` before the first gap.
    pub(in crate::rc) repair: Option<Box<Scoreboard>>,
    /// Packets that are to go again alone.
    pub(in crate::rc) repairs: usize,
    /// The next of them asks, whether or not it did when it left first.
    pub(in crate::rc) repair_asks: bool,
    /// The PSN from which an overtaken response was asked for again.
    implied: Option<u64>,
    /// Whether requests that were not begun may be: not in SQD.
    pub(in crate::rc) begins: bool,
    /// Set while the peer has no receive.
    pub(in crate::rc) rnr_until: Option<Time>,
    /// It waited for room as long as for an answer: one packet may leave without.
    pub(in crate::rc) overdraft: bool,
    /// The peer left the last thing that it was asked unanswered for the whole timeout: nothing is
    /// reckoned with, so that it keeps nobody waiting.
    pub(in crate::rc) silent: bool,
    /// It has room for an acknowledgement, and waits for the peer's.
    pub(in crate::rc) half_way: bool,
    /// The next packet asks, whatever it is.
    pub(in crate::rc) force_ack_req: bool,
    /// The next packet only asks what became of it.
    pub(in crate::rc) probing: bool,
}

impl Requester {
    pub(in crate::rc) fn new() -> Self {
        Self {
            wqe_next: 0,
            wqe_max: 0,
            snd_nxt: 0,
            snd_una: 0,
            snd_max: 0,
            responses: VecDeque::new(),
            read_window: ReadWindow::new(Mtu::Mtu256, 0, false),
            max_rd_atomic: 0,
            window: Window::new(1),
            round_trip: RoundTrip::default(),
            in_flight: Cost::default(),
            last_ack_req: 0,
            quiet: Quiet::default(),
            ack_requests: AckRequests::default(),
            credits: Credits::default(),
            batch: Batch::default(),
            repair: None,
            repairs: 0,
            repair_asks: false,
            implied: None,
            begins: true,
            rnr_until: None,
            overdraft: false,
            silent: false,
            half_way: false,
            force_ack_req: false,
            probing: false,
        }
    }

    /// Starts at `psn` with the request `index`.
    pub(in crate::rc) fn start(
        &mut self,
        psn: u64,
        index: u64,
        max_rd_atomic: u8,
        window_max: u32,
    ) {
        (self.wqe_next, self.wqe_max) = (index, index);
        (self.snd_nxt, self.snd_una, self.snd_max, self.last_ack_req) = (psn, psn, psn, psn);
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
        (self.force_ack_req, self.probing) = (false, false);
    }

    /// Sets how many READs and atomics may be outstanding.
    pub(in crate::rc) fn set_max_rd_atomic(&mut self, max: u8) {
        self.max_rd_atomic = max;
        if self.has_lists() {
            self.responses.reserve(usize::from(max).saturating_sub(self.responses.len()));
        }
    }

    /// Whether everything that was begun is acknowledged, to the end of its message.
    pub(in crate::rc) fn is_drained(&self, sq: &SendQueue) -> bool {
        self.snd_una == self.snd_max && (sq.is_empty() || sq.get(sq.head).first >= self.snd_max)
    }

    pub(in crate::rc) fn snd_una(&self) -> u64 {
        self.snd_una
    }

    pub(in crate::rc) fn snd_max(&self) -> u64 {
        self.snd_max
    }

    /// Whether something was sent that is not acknowledged.
    pub(in crate::rc) fn outstanding(&self) -> bool {
        self.snd_una < self.snd_nxt
    }

    /// Whether a packet of `psn` would be a retransmission.
    pub(in crate::rc) fn was_sent(&self, psn: u64) -> bool {
        psn < self.snd_max
    }

    /// The next response with data that is still to come for a request that begins before `to`:
    /// index of the request and PSN. Nothing beyond it can be acknowledged.
    #[inline]
    pub(in crate::rc) fn gate(&self, sq: &SendQueue, to: u64) -> Option<(u64, u64)> {
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
                return Some((index, wqe.first.max(self.snd_una)));
            }
            index += 1;
        }
        None
    }

    /// Index of the request that a PSN belongs to.
    pub(in crate::rc) fn index_of(&self, sq: &SendQueue, psn: u64) -> u64 {
        sq.locate(psn)
    }

    /// Index of the request under the cursor.
    pub(in crate::rc) fn cursor(&self) -> u64 {
        self.wqe_next
    }

    /// Whether something was sent for which nothing was asked yet.
    #[inline]
    pub(in crate::rc) fn is_unasked(&self) -> bool {
        let asked = self.ack_requests.end().unwrap_or(self.snd_una);
        let read = self.responses.back().map_or(self.snd_una, |read| read.last + 1);
        self.snd_nxt > asked.max(read).max(self.snd_una)
    }

    /// Keeps room for an acknowledgement while something needs one, and no longer.
    #[inline]
    pub(in crate::rc) fn settle(&mut self, peers: &mut Peers) {
        if self.ack_requests.is_open() && !self.half_way && !self.is_unasked() {
            self.ack_requests.close(peers);
        }
    }

    /// The packet left: moves the cursor.
    #[inline]
    pub(in crate::rc) fn sent(
        &mut self,
        now: Time,
        shape: &Shape,
        sq: &SendQueue,
        limits: &Limits,
        peers: &mut Peers,
    ) {
        let piece = &shape.piece;
        let wqe = sq.get(piece.index);
        if wqe.op.has_response() {
            let response = if self.silent { Expected::NOTHING } else { peers.expect(shape.charge) };
            peers.get(limits.peer).charge(REQUEST);
            self.responses.push_back(Outstanding { first: piece.psn, last: shape.last, response });
        } else {
            peers.get(limits.peer).charge(shape.charge);
            self.in_flight.add(shape.charge);
            let begins = wqe.begins(piece.psn);
            self.batch.sent(piece.len + request_header(&wqe.op, begins));
            self.round_trip.sent(piece.psn, now, piece.psn < self.snd_max);
            if piece.ack_req {
                self.ack_requests.asked(piece.psn);
            }
        }
        if piece.ack_req {
            self.last_ack_req = piece.psn;
        }
        self.overdraft = false;
        (self.force_ack_req, self.probing) = (false, false);
        self.snd_nxt = shape.last + 1;
        self.snd_max = self.snd_max.max(self.snd_nxt);
        if self.snd_nxt > wqe.last() {
            self.executed();
        }
    }

    /// The request under the cursor was sent, or was executed on this side.
    #[inline]
    pub(in crate::rc) fn executed(&mut self) {
        self.wqe_next += 1;
        self.wqe_max = self.wqe_max.max(self.wqe_next);
    }

    /// Whether the request `index` is done once everything before it is: what concerns this side
    /// only must have been executed.
    #[inline]
    pub(in crate::rc) fn is_executed(&self, index: u64, wqe: &Wqe) -> bool {
        index < self.wqe_max || !wqe.op.is_local()
    }

    /// What is sent again goes past what was executed in between.
    #[cold]
    pub(in crate::rc) fn skip_executed(&mut self, sq: &SendQueue) {
        while self.wqe_next < self.wqe_max && sq.get(self.wqe_next).op.is_local() {
            self.wqe_next += 1;
        }
    }

    /// Everything before `to` is acknowledged. The caller retires the requests; READs and atomics
    /// before `to` must be answered, or the one at the front partly.
    #[inline]
    pub(in crate::rc) fn advance(
        &mut self,
        now: Time,
        to: u64,
        sq: &SendQueue,
        limits: &Limits,
        peers: &mut Peers,
    ) {
        debug_assert!(to > self.snd_una && to <= self.snd_max);
        let repairing = self.is_repairing();
        let mut charge = Cost::default();
        if repairing || self.in_flight.datagrams > 0 {
            charge = sq.cost_between(self.snd_una, to.min(self.snd_nxt), limits.mtu);
        }
        if repairing {
            charge.take(self.uncharged(sq, self.snd_una, to.min(self.snd_nxt), limits));
            self.repaired_until(self.snd_una, to);
        }
        self.release(charge, limits, peers);
        self.ack_requests.answered(to, peers);
        // What waited for something to be repaired says nothing about the path.
        self.round_trip.acknowledged(to, now, !repairing);
        self.window.acknowledged(charge.datagrams);
        let before = std::mem::replace(&mut self.snd_una, to);
        self.implied = None;
        while let Some(front) = self.responses.front() {
            if front.first < front.last {
                self.read_window.came(front.packets(before, to));
            }
            if front.last >= to {
                break;
            }
            release_response(front, limits, peers);
            self.responses.pop_front();
        }
        if self.snd_nxt < to {
            // Acknowledged although about to be sent again.
            self.snd_nxt = to;
            self.wqe_next = sq.locate(to).min(self.wqe_max);
            self.ask_no_more();
        }
        self.silent = false;
        self.settle(peers);
    }

    /// Packets of answers that were asked for and have not come.
    pub(in crate::rc) fn answers_under_way(&self) -> u64 {
        self.responses.iter().map(|asked| asked.packets(self.snd_una, u64::MAX)).sum()
    }

    /// Answers that were asked for did not come, if there were some; our own queue may have been
    /// full.
    pub(in crate::rc) fn answers_lost(&mut self, peers: &mut Peers) {
        let under_way = self.answers_under_way();
        if under_way > 1 {
            self.read_window.lost(under_way);
            peers.lost(PeerId::OWN);
        }
    }

    /// Sends again from `from` on.
    pub(in crate::rc) fn go_back(
        &mut self,
        from: u64,
        sq: &SendQueue,
        limits: &Limits,
        peers: &mut Peers,
    ) {
        debug_assert!(from >= self.snd_una && from <= self.snd_max);
        if from >= self.snd_nxt {
            return;
        }
        self.ask_no_more();
        self.quiet.ends();
        let mut charge = sq.cost_between(from, self.snd_nxt, limits.mtu);
        if self.is_repairing() {
            charge.take(self.uncharged(sq, from, self.snd_nxt, limits));
            self.repair_no_more(from);
        }
        self.release(charge, limits, peers);
        self.ack_requests.taken_back(from, peers);
        self.round_trip.taken_back(from);
        while let Some(back) = self.responses.back() {
            if back.last < from {
                break;
            }
            release_response(back, limits, peers);
            self.responses.pop_back();
        }
        self.snd_nxt = from;
        self.wqe_next = sq.locate(from);
        self.last_ack_req = from;
        self.settle(peers);
    }

    /// Takes back the last packet, to send it again and ask for an acknowledgement, if the last
    /// ones did not ask and nothing that is to come would tell of them: what was to ask in their
    /// place cannot be sent.
    pub(in crate::rc) fn ask_again(
        &mut self,
        sq: &SendQueue,
        limits: &Limits,
        peers: &mut Peers,
    ) -> bool {
        let told = self.ack_requests.end().is_some()
            || !self.responses.is_empty()
            || self.rnr_until.is_some();
        if told || !self.outstanding() || self.is_quiet(sq) {
            return false;
        }
        // Its room is still its own.
        self.go_back(self.snd_nxt - 1, sq, limits, peers);
        (self.force_ack_req, self.overdraft) = (true, true);
        true
    }

    /// Whether something can be sent again only to ask: a READ would be answered twice, and there
    /// is room for one answer.
    pub(in crate::rc) fn may_repeat(&self) -> bool {
        self.responses.is_empty() && self.rnr_until.is_none()
    }

    /// Takes back the last packet, to send it again and ask.
    pub(in crate::rc) fn probe(&mut self, sq: &SendQueue, limits: &Limits, peers: &mut Peers) {
        self.go_back(self.snd_nxt - 1, sq, limits, peers);
        (self.force_ack_req, self.overdraft, self.probing) = (true, true, true);
    }

    /// What was to be asked was answered, or something else is sent again.
    fn ask_no_more(&mut self) {
        (self.force_ack_req, self.overdraft, self.probing) = (false, false, false);
    }

    /// Whether everything from `from` on was sent, and is to be sent again.
    pub(in crate::rc) fn is_behind(&self, from: u64) -> bool {
        from < self.snd_nxt
    }

    /// Whether a response that overtook `expected` should make it go back: once, until something
    /// arrives.
    pub(in crate::rc) fn implied_nak(&mut self, expected: u64) -> bool {
        self.implied.replace(expected) != Some(expected)
    }

    /// A timeout makes any repetition due again.
    pub(in crate::rc) fn forget_implied(&mut self) {
        self.implied = None;
    }

    /// Gives back everything that is charged, and the lists.
    pub(in crate::rc) fn release_all(
        &mut self,
        limits: &Limits,
        peers: &mut Peers,
        spares: &mut SpareLists,
    ) {
        let charge = self.in_flight;
        self.release(charge, limits, peers);
        (self.repair, self.repairs, self.repair_asks) = (None, 0, false);
        self.ack_requests.taken_back(0, peers);
        self.ack_requests.close(peers);
        for outstanding in self.responses.drain(..) {
            release_response(&outstanding, limits, peers);
        }
        self.give_lists_back(spares);
    }

    #[inline]
    pub(in crate::rc) fn release(&mut self, charge: Cost, limits: &Limits, peers: &mut Peers) {
        if charge.datagrams > 0 {
            self.in_flight.take(charge);
            peers.release(limits.peer, charge);
        }
    }
}

fn release_response(outstanding: &Outstanding, limits: &Limits, peers: &mut Peers) {
    peers.answered(outstanding.response);
    peers.release(limits.peer, REQUEST);
}
