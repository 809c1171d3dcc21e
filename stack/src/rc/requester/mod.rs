//! The requester: its place in its queue, and the requests in flight.
//!
//! Whether something may leave is [`permit`]'s decision; [`burst`] plans and sends it;
//! [`ack_policy`] decides which packets ask, and [`recovery`] which ones go again. All of this is
//! private here. The queue pair reports what happened ([`events`]), and gives the requester its
//! part of a turn ([`turn`]).

mod ack_policy;
mod ack_requests;
mod burst;
mod events;
pub(crate) mod lists;
mod permit;
mod recovery;
mod split;
mod turn;

use crate::budget::{Budget, Cost};
use crate::mem::PdId;
use crate::peer::{Expected, PeerId, Peers};
use crate::qp::sq::{SendQueue, Wqe, WqeIndex};
use crate::rc::congestion::rtt::RoundTrip;
use crate::rc::requester::ack_policy::Acks;
use crate::rc::requester::ack_requests::AckRequests;
use crate::rc::requester::burst::ResponseRequest;
pub(in crate::rc) use crate::rc::requester::events::Repair;
use crate::rc::requester::lists::SpareLists;
use crate::rc::requester::permit::SendControl;
pub(crate) use crate::rc::requester::permit::{Situation, Wait, Want, permit};
use crate::rc::requester::recovery::{Probe, Recovery};
use crate::ring::Ring;
use crate::types::{Mtu, Seq, Time};

/// The cost to its receiver of a READ request or another that has a response of its own: an atomic
/// is the longest.
const REQUEST: Cost = Cost::of(1, Budget::cost(12 + 28 + 4));

/// A READ request or another that waits for a response of its own.
#[derive(Debug, Clone, Copy, Default)]
struct Outstanding {
    first: Seq,
    last: Seq,
    /// The room for its response.
    response: Expected,
}

impl Outstanding {
    /// Packets of its response from `from` on and before `to`.
    fn packets(&self, from: Seq, to: Seq) -> u64 {
        to.min(self.last + 1).saturating_sub(from.max(self.first))
    }
}

/// A path to a peer of which nothing is known yet.
#[derive(Debug, Clone, Copy)]
pub(in crate::rc) struct PathParams {
    pub(in crate::rc) mtu: Mtu,
    /// Packets that may be in flight.
    pub(in crate::rc) window_max: u32,
    /// READs and atomics that may be outstanding.
    pub(in crate::rc) max_rd_atomic: u8,
    /// Packets of READ responses that our own receive queue holds if they come one by one.
    pub(in crate::rc) room: u32,
    /// Whether the peer is a Rocinante.
    pub(in crate::rc) to_rocinante: bool,
}

/// Values that the connection sets.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ConnParams {
    /// The name under which it asks for credit.
    pub(in crate::rc) slot: u32,
    pub(in crate::rc) mtu: Mtu,
    pub(in crate::rc) pd: PdId,
    pub(in crate::rc) peer: PeerId,
    /// Whether the peer is a Rocinante, and packets that come too early are held.
    pub(in crate::rc) selective: bool,
    /// Whether WRITEs may be cut.
    pub(in crate::rc) splits_writes: bool,
}

#[derive(Debug)]
pub(crate) struct Requester {
    /// Index of the request under the cursor; the queue's tail if all were sent.
    wqe_next: WqeIndex,
    /// The highest that `wqe_next` ever was: requests before it that concern this side only were
    /// executed.
    wqe_max: WqeIndex,
    /// Next PSN to send.
    snd_nxt: Seq,
    /// First PSN not acknowledged.
    snd_una: Seq,
    /// One more than the highest PSN ever sent.
    snd_max: Seq,
    responses: Ring<Outstanding>,
    round_trip: RoundTrip,
    ack_requests: AckRequests,
    acks: Acks,
    control: SendControl,
    recovery: Recovery,
}

impl Requester {
    pub(in crate::rc) fn new() -> Self {
        Self {
            wqe_next: WqeIndex::default(),
            wqe_max: WqeIndex::default(),
            snd_nxt: Seq::default(),
            snd_una: Seq::default(),
            snd_max: Seq::default(),
            responses: Ring::default(),
            round_trip: RoundTrip::default(),
            ack_requests: AckRequests::default(),
            acks: Acks::default(),
            control: SendControl::default(),
            recovery: Recovery::default(),
        }
    }

    /// Starts at `psn` with the request `index`.
    pub(in crate::rc) fn start(&mut self, psn: Seq, index: WqeIndex, path: &PathParams) {
        debug_assert!(!self.has_lists(), "given back when the queue pair was reset");
        (self.wqe_next, self.wqe_max) = (index, index);
        (self.snd_nxt, self.snd_una, self.snd_max) = (psn, psn, psn);
        self.acks = Acks::start(psn);
        self.control = SendControl::new(path);
        self.round_trip = RoundTrip::default();
        self.recovery = Recovery::default();
    }

    /// Begins no request any more, or does again. Requests that left without AckReq now ask for
    /// their acknowledgement: draining ends with the last.
    pub(in crate::rc) fn drain(&mut self, drains: bool) {
        self.control.drains = drains;
        self.acks.drains();
    }

    /// All packets that left were acknowledged; later ones take another path. The lists go back
    /// first: the old round trip has one of them.
    pub(in crate::rc) fn take_path(&mut self, path: &PathParams, spares: &mut SpareLists) {
        self.give_lists_back(spares);
        self.control.take_path(path);
        self.round_trip = RoundTrip::default();
    }

    /// Sets the number of READs and atomics that may be outstanding.
    pub(in crate::rc) fn set_max_rd_atomic(&mut self, max: u8) {
        self.control.max_rd_atomic = max;
        if self.has_lists() {
            self.responses.reserve(usize::from(max).saturating_sub(self.responses.len()));
        }
    }

    /// Whether everything that was begun is acknowledged, to the end of its message.
    pub(in crate::rc) fn is_drained(&self, sq: &SendQueue) -> bool {
        self.snd_una == self.snd_max && (sq.is_empty() || sq.get(sq.head).first >= self.snd_max)
    }

    pub(in crate::rc) fn snd_una(&self) -> Seq {
        self.snd_una
    }

    pub(in crate::rc) fn snd_max(&self) -> Seq {
        self.snd_max
    }

    /// Whether something was sent that is not acknowledged.
    pub(in crate::rc) fn outstanding(&self) -> bool {
        self.snd_una < self.snd_nxt
    }

    /// Whether a packet of `psn` would be a retransmission.
    fn was_sent(&self, psn: Seq) -> bool {
        psn < self.snd_max
    }

    /// The next response with data that is still to come for a request that begins before `to`:
    /// index of the request and PSN. Nothing beyond it can be acknowledged.
    #[inline]
    pub(in crate::rc) fn gate(&self, sq: &SendQueue, to: Seq) -> Option<(WqeIndex, Seq)> {
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
    fn index_of(&self, sq: &SendQueue, psn: Seq) -> WqeIndex {
        sq.locate(psn)
    }

    /// Index of the request under the cursor.
    pub(in crate::rc) fn cursor(&self) -> WqeIndex {
        self.wqe_next
    }

    /// Whether a packet left that no AckReq covers yet.
    #[inline]
    fn is_unasked(&self) -> bool {
        let asked = self.ack_requests.end().unwrap_or(self.snd_una);
        let read = self.responses.back().map_or(self.snd_una, |read| read.last + 1);
        self.snd_nxt > asked.max(read).max(self.snd_una)
    }

    /// Whether all requests left, and the last packet asked for an acknowledgement; nothing of it
    /// is known to be lost.
    #[inline]
    fn has_asked_for_all(&self, sq: &SendQueue) -> bool {
        self.wqe_next == sq.tail
            && self.ack_requests.end() == Some(self.snd_nxt)
            && self.recovery.lost() == 0
    }

    /// Gives back the credit for the acknowledgement of packets that did not ask, if one that asks
    /// covers all that left.
    #[inline(always)]
    fn give_back_ack_room(&mut self, peers: &mut Peers) {
        if self.ack_requests.is_open() && !self.is_unasked() {
            self.ack_requests.close(peers);
        }
    }

    /// A request with a response of its own left: moves the cursor.
    #[inline]
    fn request_left(
        &mut self,
        request: &ResponseRequest,
        sq: &SendQueue,
        params: &ConnParams,
        peers: &mut Peers,
    ) {
        let ResponseRequest { packet, last, cost } = *request;
        let silent = self.recovery.peer_is_silent();
        let response = if silent { Expected::NOTHING } else { peers.expect(cost) };
        peers.get(params.peer).charge(REQUEST);
        self.responses.push_back(Outstanding { first: packet.psn, last, response });
        self.acks.asked(packet.psn);
        self.recovery.set_probe(Probe::Nothing);
        self.snd_nxt = last + 1;
        self.snd_max = self.snd_max.max(self.snd_nxt);
        if self.snd_nxt > sq.get(packet.index).last() {
            self.executed();
        }
    }

    /// The request under the cursor was sent, or was executed on this side.
    #[inline]
    fn executed(&mut self) {
        self.wqe_next += 1;
        self.wqe_max = self.wqe_max.max(self.wqe_next);
    }

    /// Whether the request `index` is done once everything before it is: a local request must have
    /// been executed.
    #[inline]
    pub(in crate::rc) fn is_executed(&self, index: WqeIndex, wqe: &Wqe) -> bool {
        index < self.wqe_max || !wqe.op.is_local()
    }

    /// Retransmission goes past local requests that were executed in between.
    #[inline]
    fn skip_executed(&mut self, sq: &SendQueue) {
        while self.wqe_next < self.wqe_max && sq.get(self.wqe_next).op.is_local() {
            self.wqe_next += 1;
        }
    }

    /// Everything before `to` is acknowledged, so the peer had receives. The caller retires the
    /// requests; READs and atomics before `to` must be answered, or the one at the front partly.
    #[inline]
    pub(in crate::rc) fn advance(
        &mut self,
        now: Time,
        to: Seq,
        sq: &SendQueue,
        params: &ConnParams,
        peers: &mut Peers,
    ) {
        debug_assert!(to > self.snd_una && to <= self.snd_max);
        let selective = self.recovery.is_selective();
        let cost_of_them = || sq.cost_between(self.snd_una, to.min(self.snd_nxt), params.mtu);
        let mut cost = self.control.in_flight;
        debug_assert!(selective || to < self.snd_nxt || cost == cost_of_them());
        if selective || (to < self.snd_nxt && cost.datagrams > 0) {
            cost = cost_of_them();
        }
        if selective {
            cost.take(self.recovery.held_cost(sq, self.snd_una, to.min(self.snd_nxt), params));
            self.recovery.arrived(self.snd_una, to);
        }
        self.release(cost, params, peers);
        self.ack_requests.answered(to, peers);
        // A packet that waited for a repair is no measure of the path, nor is the answer to a READ
        // or an atomic of what left before it.
        let answers = self.responses.front().is_some_and(|front| front.first < to);
        self.round_trip.acknowledged(to, now, !selective && !answers);
        if to >= self.snd_nxt {
            self.round_trip.turns.clear();
        }
        self.control.congestion.on_ack(cost.datagrams);
        let before = std::mem::replace(&mut self.snd_una, to);
        while let Some(front) = self.responses.front() {
            if front.first < front.last {
                self.control.read_window.came(front.packets(before, to));
            }
            if front.last >= to {
                break;
            }
            release_response(front, params, peers);
            self.responses.pop_front();
        }
        if self.snd_nxt < to {
            // Acknowledged although about to be sent again.
            self.snd_nxt = to;
            self.wqe_next = sq.locate(to).min(self.wqe_max);
            self.recovery.set_probe(Probe::Nothing);
        }
        self.recovery.on_ack();
        self.control.forget_rnr();
        // Work to be sent is planned soon, and may wait in line meanwhile.
        if self.wqe_next == sq.tail {
            self.give_back_ack_room(peers);
        }
    }

    /// Packets of requested responses that have not come.
    fn responses_in_flight(&self) -> u64 {
        self.responses.iter().map(|asked| asked.packets(self.snd_una, Seq::MAX)).sum()
    }

    /// Sends again from `from` on.
    fn go_back(&mut self, from: Seq, sq: &SendQueue, params: &ConnParams, peers: &mut Peers) {
        debug_assert!(from >= self.snd_una && from <= self.snd_max);
        if from >= self.snd_nxt {
            return;
        }
        self.recovery.set_probe(Probe::Nothing);
        let mut cost = sq.cost_between(from, self.snd_nxt, params.mtu);
        if self.recovery.is_selective() {
            cost.take(self.recovery.held_cost(sq, from, self.snd_nxt, params));
            self.recovery.forget_from(from, self.snd_una);
        }
        self.release(cost, params, peers);
        self.ack_requests.taken_back(from, peers);
        self.round_trip.taken_back(from);
        while let Some(back) = self.responses.back() {
            if back.last < from {
                break;
            }
            release_response(back, params, peers);
            self.responses.pop_back();
        }
        self.snd_nxt = from;
        self.wqe_next = sq.locate(from);
        self.acks.taken_back(from);
        self.give_back_ack_room(peers);
    }

    /// Takes back the last packet, to send it again and ask for an acknowledgement, if the last
    /// ones did not ask and no response to come would acknowledge them: the packet that was to ask
    /// in their place cannot be sent.
    fn ask_again(&mut self, sq: &SendQueue, params: &ConnParams, peers: &mut Peers) -> bool {
        let told = self.ack_requests.end().is_some() || !self.responses.is_empty();
        let at = Situation { sq, peers, turn: 1 };
        if told || self.is_quiet(sq) || permit(Want::Probe(self), &at).packets == 0 {
            return false;
        }
        self.probe(Probe::Unasked, sq, params, peers);
        true
    }

    /// Takes back the last packet, whose credit is still its own, to send it again and ask.
    fn probe(&mut self, probe: Probe, sq: &SendQueue, params: &ConnParams, peers: &mut Peers) {
        self.go_back(self.snd_nxt - 1, sq, params, peers);
        self.recovery.set_probe(probe);
    }

    /// The cost charged to the peer's receive queue.
    pub(in crate::rc) fn charged(&self) -> Cost {
        let mut charged = self.control.in_flight;
        self.responses.iter().for_each(|_| charged.add(REQUEST));
        charged
    }

    /// Gives back everything that is charged, and the lists. Nothing is awaited any more.
    pub(in crate::rc) fn release_all(
        &mut self,
        params: &ConnParams,
        peers: &mut Peers,
        spares: &mut SpareLists,
    ) {
        self.release(self.control.in_flight, params, peers);
        self.control.forget_rnr();
        self.recovery = Recovery::default();
        self.ack_requests.taken_back(Seq::default(), peers);
        self.ack_requests.close(peers);
        while let Some(outstanding) = self.responses.pop_front() {
            release_response(&outstanding, params, peers);
        }
        self.give_lists_back(spares);
    }

    #[inline]
    fn release(&mut self, cost: Cost, params: &ConnParams, peers: &mut Peers) {
        if cost.datagrams > 0 {
            self.control.in_flight.take(cost);
            peers.release(params.peer, cost);
        }
    }
}

fn release_response(outstanding: &Outstanding, params: &ConnParams, peers: &mut Peers) {
    peers.answered(outstanding.response);
    peers.release(params.peer, REQUEST);
}
