//! The requester: which packet of which request leaves next.
//!
//! It decides and keeps the cursors; the queue pair writes the packet and tells it that it left.

use std::collections::VecDeque;

use super::asks::Asks;
use super::company::Company;
use super::credits::Credits;
use super::window::Window;
use crate::mem::{PdId, RegionTable};
use crate::pool::{Budget, Charge, PoolId, Pools};
use crate::qp::outbound::{Piece, data_opcode};
use crate::qp::sq::{SendQueue, Wqe};
use crate::types::{Mtu, Time};
use crate::verbs::{SendOp, WcStatus};
use crate::wire::Opcode;

/// Longest headers of a packet with payload, with its ICRC: BTH, RETH, immediate.
pub(super) const OVERHEAD: u32 = 12 + 16 + 4 + 4;

/// What a READ request or an atomic itself costs its receiver.
const REQUEST: Charge = Charge::of(1, Budget::cost(12 + 28 + 4));

/// A READ request or an atomic that waits for its response.
#[derive(Debug, Clone, Copy)]
struct Outstanding {
    last: u64,
    /// What its response is charged with, to our own pool.
    response: Charge,
}

/// The packet to send next.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) piece: Piece,
    /// Last PSN that the packet asks a response for; its own except for READ requests.
    last: u64,
    charge: Charge,
}

/// What the requester can do now.
#[derive(Debug)]
pub(super) enum Plan {
    Send(Shape),
    /// Nothing until an acknowledgement, a response, a timer or a post.
    Idle,
    /// Nothing until the pool has room for this.
    Wait(PoolId, Charge),
    /// The request under the cursor cannot be executed.
    Fault(WcStatus),
}

/// Limits that the connection sets.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Who asks the pools.
    pub(super) slot: u32,
    pub(super) mtu: Mtu,
    pub(super) pd: PdId,
    pub(super) peer: PoolId,
    /// Packets of one READ request; a constant of the connection, so that a READ sent again has the same borders.
    pub(super) read_packets: u32,
}

#[derive(Debug)]
pub(super) struct Requester {
    /// Index of the request under the cursor; the queue's tail if all were sent.
    cur: u64,
    /// Next PSN to send.
    nxt: u64,
    /// First PSN not acknowledged.
    una: u64,
    /// One more than the highest PSN ever sent.
    sent: u64,
    rd: VecDeque<Outstanding>,
    max_rd_atomic: usize,
    pub(super) window: Window,
    /// What the packets from `una` to `nxt` are charged with.
    charged: Charge,
    ack_asked: u64,
    asks: Asks,
    pub(super) credits: Credits,
    pub(super) company: Company,
    /// The PSN from which an overtaken response was asked for again.
    implied: Option<u64>,
    /// Whether requests that were not begun may be: not in SQD.
    pub(super) begins: bool,
    /// Set while the peer has no receive.
    pub(super) rnr_until: Option<Time>,
    /// It waited for room as long as for an answer: one packet may leave without.
    pub(super) overdraft: bool,
    /// The next packet asks, whatever it is.
    solicits: bool,
}

impl Requester {
    pub(super) fn new() -> Self {
        Self {
            cur: 0,
            nxt: 0,
            una: 0,
            sent: 0,
            rd: VecDeque::new(),
            max_rd_atomic: 0,
            window: Window::new(1),
            charged: Charge::default(),
            ack_asked: 0,
            asks: Asks::default(),
            credits: Credits::default(),
            company: Company::default(),
            implied: None,
            begins: true,
            rnr_until: None,
            overdraft: false,
            solicits: false,
        }
    }

    /// Starts at `psn` with the request `index`.
    pub(super) fn start(&mut self, psn: u64, index: u64, max_rd_atomic: u8, window_max: u32) {
        self.cur = index;
        (self.nxt, self.una, self.sent, self.ack_asked) = (psn, psn, psn, psn);
        self.rd.clear();
        self.set_max_rd_atomic(max_rd_atomic);
        self.begins = true;
        self.asks.start(window_max);
        self.credits = Credits::default();
        self.window = Window::new(window_max);
        self.implied = None;
        self.rnr_until = None;
        self.overdraft = false;
        self.solicits = false;
    }

    /// Sets how many READs and atomics may be outstanding.
    pub(super) fn set_max_rd_atomic(&mut self, max: u8) {
        self.max_rd_atomic = usize::from(max);
        self.rd.reserve(self.max_rd_atomic.saturating_sub(self.rd.len()));
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

    /// The next response with data that is still to come for a request that begins before `to`: index of the
    /// request and PSN. Nothing beyond it can be acknowledged.
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

    /// Index of the request under the cursor.
    pub(super) fn cursor(&self) -> u64 {
        self.cur
    }

    /// What to send next.
    #[inline]
    pub(super) fn plan(
        &mut self,
        sq: &SendQueue,
        limits: &Limits,
        pools: &mut Pools,
        regions: &RegionTable,
    ) -> Plan {
        if self.cur == sq.tail || self.rnr_until.is_some() {
            return Plan::Idle;
        }
        let wqe = sq.get(self.cur);
        if self.nxt == wqe.first {
            if !self.begins && self.nxt >= self.sent {
                return Plan::Idle;
            }
            if wqe.fence && !self.rd.is_empty() {
                return Plan::Idle;
            }
            // One packet is checked when it is gathered; of more, none leaves unless all can.
            let single = wqe.first == wqe.last && !wqe.op.has_response();
            if !single && sq.admits(self.cur, limits.pd, regions).is_err() {
                return Plan::Fault(WcStatus::LocProtErr);
            }
        }
        if wqe.op.has_response() {
            self.plan_response(wqe, limits, pools)
        } else {
            self.plan_data(wqe, limits, pools, sq)
        }
    }

    fn plan_data(&self, wqe: &Wqe, limits: &Limits, pools: &mut Pools, sq: &SendQueue) -> Plan {
        if self.charged.datagrams >= self.window.packets() {
            return Plan::Idle;
        }
        let psn = self.nxt;
        let limited = self.credits.exceeded(wqe);
        // The first packet goes alone, the others when it has found a receive.
        if limited && if psn == wqe.first { self.una < psn } else { self.una <= wqe.first } {
            return Plan::Idle;
        }
        let len = wqe.payload(psn, limits.mtu);
        if psn == wqe.first && psn >= self.sent && self.asks.outstanding() {
            let (queued, under_way) = (sq.next_psn - psn, self.charged.datagrams);
            if self.company.awaited(len, queued, under_way, self.window.packets()) {
                return Plan::Idle;
            }
        }
        let charge = Charge::of(1, Budget::cost(len + OVERHEAD));
        let pool = pools.get(limits.peer);
        if !pool.admits(limits.slot, charge) && !self.overdraft {
            return Plan::Wait(limits.peer, charge);
        }
        let (begins, ends) = (psn == wqe.first, psn == wqe.last);
        // Ask before the window or the pool closes, often enough in between that acknowledgements arrive before that,
        // where it begins again, so that one packet is progress, and at the end of a message.
        let interval = u64::from((self.window.packets() / 4).clamp(1, 32));
        let ack_req = self.solicits
            || (psn == self.una && psn < self.sent)
            || psn - self.ack_asked >= interval
            || self.charged.datagrams + 1 >= self.window.packets()
            || pool.closes_with(charge)
            || (limited && begins)
            || (ends && self.asks.should(self.is_held_up_behind(sq), pools));
        debug_assert!(self.cur < sq.tail);
        let piece = Piece {
            index: self.cur,
            psn,
            opcode: data_opcode(&wqe.op, begins, ends),
            offset: wqe.offset(psn, limits.mtu),
            len,
            ack_req,
            solicited: wqe.solicited && ends,
        };
        Plan::Send(Shape { piece, last: psn, charge })
    }

    /// Whether nothing follows the request under the cursor that could ask for an acknowledgement now.
    #[inline]
    fn is_held_up_behind(&self, sq: &SendQueue) -> bool {
        let next = self.cur + 1;
        next == sq.tail || self.credits.exceeded(sq.get(next))
    }

    fn plan_response(&self, wqe: &Wqe, limits: &Limits, pools: &mut Pools) -> Plan {
        let psn = self.nxt;
        // What was begun while more were allowed may be asked for again.
        let begun = psn < self.sent && self.rd.is_empty();
        if self.rd.len() >= self.max_rd_atomic && !begun {
            // Without any allowed it would wait for ever.
            return if self.max_rd_atomic == 0 && psn >= self.sent {
                Plan::Fault(WcStatus::LocQpOpErr)
            } else {
                Plan::Idle
            };
        }
        let offset = wqe.offset(psn, limits.mtu);
        let (opcode, last, len) = match wqe.op {
            SendOp::CompareSwap { .. } => (Opcode::RC_COMPARE_SWAP, psn, 8),
            SendOp::FetchAdd { .. } => (Opcode::RC_FETCH_ADD, psn, 8),
            _ => {
                let piece = (psn - wqe.first) / u64::from(limits.read_packets) + 1;
                let last = (wqe.first + piece * u64::from(limits.read_packets) - 1).min(wqe.last);
                let end = wqe.offset(last, limits.mtu) + wqe.payload(last, limits.mtu);
                (Opcode::RC_RDMA_READ_REQUEST, last, end - offset)
            }
        };
        #[allow(clippy::cast_possible_truncation)]
        let packets = (last - psn + 1) as u32;
        let each = Budget::cost(len.min(limits.mtu.bytes()) + OVERHEAD);
        let charge = Charge::of(packets, each);
        if !pools.get(PoolId::OWN).admits(limits.slot, charge) && !self.overdraft {
            return Plan::Wait(PoolId::OWN, charge);
        }
        // The peer's room is asked for too, but one request a queue pair may always have there: who waited for our own
        // room would else have to wait again.
        if !self.rd.is_empty() && !pools.get(limits.peer).fits(REQUEST) {
            return Plan::Idle;
        }
        let (index, ack_req, solicited) = (self.cur, true, false);
        let piece = Piece { index, psn, opcode, offset, len, ack_req, solicited };
        Plan::Send(Shape { piece, last, charge })
    }

    /// The packet left: moves the cursor.
    #[inline]
    pub(super) fn sent(
        &mut self,
        shape: &Shape,
        sq: &SendQueue,
        limits: &Limits,
        pools: &mut Pools,
    ) {
        let piece = &shape.piece;
        let wqe = sq.get(piece.index);
        if wqe.op.has_response() {
            pools.get(PoolId::OWN).charge(shape.charge);
            pools.get(limits.peer).charge(REQUEST);
            self.rd.push_back(Outstanding { last: shape.last, response: shape.charge });
        } else {
            pools.get(limits.peer).charge(shape.charge);
            self.charged.add(shape.charge);
            self.company.sent(piece.len);
            if piece.ack_req {
                self.asks.asked(piece.psn, pools);
            }
        }
        if piece.ack_req {
            self.ack_asked = piece.psn;
        }
        self.overdraft = false;
        self.solicits = false;
        self.nxt = shape.last + 1;
        self.sent = self.sent.max(self.nxt);
        if self.nxt > wqe.last {
            self.cur += 1;
        }
    }

    /// Everything before `to` is acknowledged. The caller retires the requests; READs and atomics before `to` must be
    /// answered, or the one at the front partly.
    #[inline]
    pub(super) fn advance(&mut self, to: u64, sq: &SendQueue, limits: &Limits, pools: &mut Pools) {
        debug_assert!(to > self.una && to <= self.sent);
        let charge = self.charge_of(sq, self.una, to.min(self.nxt), limits.mtu);
        self.release(charge, limits, pools);
        self.asks.answered(to, pools);
        self.window.acknowledged(charge.datagrams);
        self.una = to;
        self.implied = None;
        while let Some(front) = self.rd.front() {
            if front.last >= to {
                break;
            }
            release_response(front, limits, pools);
            self.rd.pop_front();
        }
        if self.nxt < to {
            // Acknowledged although about to be sent again.
            self.nxt = to;
            self.cur = locate(sq, to);
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
        let charge = self.charge_of(sq, from, self.nxt, limits.mtu);
        self.release(charge, limits, pools);
        self.asks.taken_back(from, pools);
        while let Some(back) = self.rd.back() {
            if back.last < from {
                break;
            }
            release_response(back, limits, pools);
            self.rd.pop_back();
        }
        self.nxt = from;
        self.cur = locate(sq, from);
        self.ack_asked = from;
    }

    /// Takes back the last packet, to send it again and ask for an acknowledgement, if the last ones did not ask and nothing that is to come
    /// would tell of them: what was to ask in their place cannot be sent.
    pub(super) fn ask_again(&mut self, sq: &SendQueue, limits: &Limits, pools: &mut Pools) -> bool {
        let told = self.asks.outstanding() || !self.rd.is_empty() || self.rnr_until.is_some();
        if told || !self.outstanding() {
            return false;
        }
        // Its room is still its own.
        (self.solicits, self.overdraft) = (true, true);
        self.go_back(self.nxt - 1, sq, limits, pools);
        true
    }

    /// Whether a response that overtook `expected` should make it go back: once, until something arrives.
    pub(super) fn implied_nak(&mut self, expected: u64) -> bool {
        self.implied.replace(expected) != Some(expected)
    }

    /// A timeout makes any repetition due again.
    pub(super) fn forget_implied(&mut self) {
        self.implied = None;
    }

    /// Gives back everything that is charged.
    pub(super) fn release_all(&mut self, limits: &Limits, pools: &mut Pools) {
        let charge = self.charged;
        self.release(charge, limits, pools);
        self.asks.taken_back(0, pools);
        for outstanding in self.rd.drain(..) {
            release_response(&outstanding, limits, pools);
        }
    }

    #[inline]
    fn release(&mut self, charge: Charge, limits: &Limits, pools: &mut Pools) {
        if charge.datagrams > 0 {
            self.charged.take(charge);
            pools.release(limits.peer, charge);
        }
    }

    /// What the packets of SENDs and WRITEs from `from` to before `to` were charged with.
    #[inline]
    fn charge_of(&self, sq: &SendQueue, from: u64, to: u64, mtu: Mtu) -> Charge {
        let mut sum = Charge::default();
        let (mut index, mut psn) = (locate(sq, from), from);
        while psn < to && index < sq.tail {
            let wqe = sq.get(index);
            let end = (wqe.last + 1).min(to);
            if !wqe.op.has_response() && psn < end {
                #[allow(clippy::cast_possible_truncation)]
                let packets = (end - psn) as u32;
                let tail = u32::from(end > wqe.last);
                sum.add(Charge::of(packets - tail, Budget::cost(mtu.bytes() + OVERHEAD)));
                sum.add(Charge::of(tail, Budget::cost(wqe.payload(wqe.last, mtu) + OVERHEAD)));
            }
            psn = end;
            index += 1;
        }
        sum
    }
}

fn release_response(outstanding: &Outstanding, limits: &Limits, pools: &mut Pools) {
    pools.release(PoolId::OWN, outstanding.response);
    pools.release(limits.peer, REQUEST);
}

/// The request that `psn` belongs to; the tail if none does.
#[inline]
fn locate(sq: &SendQueue, psn: u64) -> u64 {
    if sq.head == sq.tail || psn <= sq.get(sq.head).last {
        return sq.head;
    }
    let (mut low, mut high) = (sq.head, sq.tail);
    while low < high {
        let middle = low + (high - low) / 2;
        if sq.get(middle).last < psn {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    low
}
