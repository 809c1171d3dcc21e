//! The requester: what is sent, what is acknowledged, and what that is charged with.
//!
//! It decides which packet leaves next ([`plan`](super::plan)) and keeps the cursors; the queue pair writes the packet and
//! tells it that it left.

use std::collections::VecDeque;

use super::asks::Asks;
use super::plan::{Limits, OVERHEAD, Shape};
use super::sq::SendQueue;
use super::window::Window;
use crate::pool::{Budget, Charge, PoolId, Pools};
use crate::types::{Mtu, Time};

/// What a READ request or an atomic itself costs its receiver.
pub(super) const REQUEST: Charge = Charge::of(1, Budget::cost(12 + 28 + 4));

/// A READ request or an atomic that waits for its response.
#[derive(Debug, Clone, Copy)]
pub(super) struct Outstanding {
    last: u64,
    /// What its response is charged with, to our own pool.
    response: Charge,
}

#[derive(Debug)]
pub(crate) struct Requester {
    /// Index of the request under the cursor; the queue's tail if all were sent.
    pub(super) cur: u64,
    /// Next PSN to send.
    pub(super) nxt: u64,
    /// First PSN not acknowledged.
    pub(super) una: u64,
    /// One more than the highest PSN ever sent.
    pub(super) sent: u64,
    pub(super) rd: VecDeque<Outstanding>,
    pub(super) max_rd_atomic: usize,
    pub(crate) window: Window,
    /// What the packets from `una` to `nxt` are charged with.
    pub(super) charged: Charge,
    pub(super) ack_asked: u64,
    pub(super) asks: Asks,
    /// The PSN from which an overtaken response was asked for again.
    implied: Option<u64>,
    /// Set while the peer has no receive.
    pub(crate) rnr_until: Option<Time>,
    /// The oldest packet shall be repeated.
    pub(super) probe: bool,
    /// It waited for room as long as for an answer: one packet may leave without.
    pub(crate) overdraft: bool,
}

impl Requester {
    pub(crate) fn new() -> Self {
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
            implied: None,
            rnr_until: None,
            probe: false,
            overdraft: false,
        }
    }

    /// Starts at `psn` with the request `index`.
    pub(crate) fn start(&mut self, psn: u64, index: u64, max_rd_atomic: u8, window_max: u32) {
        self.cur = index;
        (self.nxt, self.una, self.sent, self.ack_asked) = (psn, psn, psn, psn);
        self.max_rd_atomic = usize::from(max_rd_atomic);
        self.rd.clear();
        self.rd.reserve(self.max_rd_atomic);
        self.asks.start(window_max);
        self.window = Window::new(window_max);
        self.implied = None;
        self.rnr_until = None;
        self.probe = false;
        self.overdraft = false;
    }

    pub(crate) fn una(&self) -> u64 {
        self.una
    }

    pub(crate) fn sent_max(&self) -> u64 {
        self.sent
    }

    /// Whether something was sent that is not acknowledged.
    pub(crate) fn outstanding(&self) -> bool {
        self.una < self.nxt
    }

    /// Whether a packet of `psn` would be a retransmission.
    pub(crate) fn was_sent(&self, psn: u64) -> bool {
        psn < self.sent
    }

    /// The next response with data that is still to come for a request that begins before `to`: index of the
    /// request and PSN. Nothing beyond it can be acknowledged.
    #[inline]
    pub(crate) fn gate(&self, sq: &SendQueue, to: u64) -> Option<(u64, u64)> {
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
    pub(crate) fn cursor(&self) -> u64 {
        self.cur
    }

    /// The packet left: moves the cursor.
    #[inline]
    pub(crate) fn sent(
        &mut self,
        shape: &Shape,
        sq: &SendQueue,
        limits: &Limits,
        pools: &mut Pools,
    ) {
        if shape.probe {
            self.probe = false;
            return;
        }
        let wqe = sq.get(shape.index);
        if wqe.op.has_response() {
            pools.get(PoolId::OWN).charge(shape.charge);
            pools.get(limits.peer).charge(REQUEST);
            self.rd.push_back(Outstanding { last: shape.last, response: shape.charge });
        } else {
            pools.get(limits.peer).charge(shape.charge);
            self.charged.add(shape.charge);
            if shape.ack_req {
                self.asks.asked(shape.psn, pools);
            }
        }
        if shape.ack_req {
            self.ack_asked = shape.psn;
        }
        self.overdraft = false;
        self.nxt = shape.last + 1;
        self.sent = self.sent.max(self.nxt);
        if self.nxt > wqe.last {
            self.cur += 1;
        }
    }

    /// Everything before `to` is acknowledged. The caller retires the requests; READs and atomics before `to` must be
    /// answered, or the one at the front partly.
    #[inline]
    pub(crate) fn advance(&mut self, to: u64, sq: &SendQueue, limits: &Limits, pools: &mut Pools) {
        debug_assert!(to > self.una && to <= self.sent);
        let charge = self.charge_of(sq, self.una, to.min(self.nxt), limits.mtu);
        self.release(charge, limits, pools);
        self.asks.answered(to, pools);
        self.window.acknowledged(charge.datagrams);
        self.una = to;
        self.implied = None;
        self.probe = false;
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
    pub(crate) fn go_back(
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
        self.probe = false;
    }

    /// The oldest packet is to be repeated: once, moving nothing. A READ or an atomic is asked for again, with all that
    /// follows it.
    pub(crate) fn probe(&mut self, sq: &SendQueue, limits: &Limits, pools: &mut Pools) {
        if sq.get(sq.head).op.has_response() {
            self.go_back(self.una, sq, limits, pools);
        } else {
            self.probe = true;
        }
    }

    /// The probe cannot be sent.
    pub(crate) fn give_up_probe(&mut self) {
        self.probe = false;
    }

    /// Whether a response that overtook `expected` should make it go back: once, until something arrives.
    pub(crate) fn implied_nak(&mut self, expected: u64) -> bool {
        self.implied.replace(expected) != Some(expected)
    }

    /// A timeout makes any repetition due again.
    pub(crate) fn forget_implied(&mut self) {
        self.implied = None;
    }

    /// Gives back everything that is charged.
    pub(crate) fn release_all(&mut self, limits: &Limits, pools: &mut Pools) {
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
