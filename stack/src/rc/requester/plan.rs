//! What leaves next: the requester's decisions. Nothing changes here but what is kept in line and
//! in hand.

use crate::mem::RegionTable;
use crate::peer::{Budget, Cost, Expected, PeerId, Peers};
use crate::qp::outbound::RequestPacket;
use crate::qp::sq::{OVERHEAD, SendQueue, Wqe};
use crate::rc::reorder::SPAN;
use crate::rc::requester::ack_requests::ACK;
use crate::rc::requester::batching::Awaited;
use crate::rc::requester::{Limits, REQUEST, Requester};
use crate::types::Mtu;
use crate::verbs::{SendOp, WcStatus};
use crate::wire::{ICRC_LEN, Opcode, Reth, bth};

/// The packet to send next.
#[derive(Debug, Clone, Copy)]
pub(in crate::rc) struct Shape {
    pub(in crate::rc) piece: RequestPacket,
    /// Last PSN that the packet asks a response for; its own except for READ requests.
    pub(in crate::rc) last: u64,
    pub(in crate::rc) charge: Cost,
}

/// What the requester can do now.
#[derive(Debug)]
pub(in crate::rc) enum Plan {
    Send(Shape),
    /// This again, alone.
    Repair(RequestPacket),
    /// The request under the cursor concerns this side only, and may be executed.
    Local,
    /// Nothing until an acknowledgement, a response, a timer or a post.
    Idle,
    /// Nothing until the pool has room for this.
    Wait(PeerId, Cost),
    /// The request under the cursor cannot be executed.
    Fault(WcStatus),
}

impl Plan {
    fn waits_for(&self, pool: PeerId) -> bool {
        matches!(self, Self::Wait(at, _) if *at == pool)
    }
}

impl Requester {
    /// What to send next.
    #[inline]
    pub(in crate::rc) fn plan(
        &mut self,
        sq: &SendQueue,
        limits: &Limits,
        peers: &mut Peers,
        regions: &RegionTable,
    ) -> Plan {
        self.half_way = false;
        let plan = self.next(sq, limits, peers, regions);
        if !matches!(plan, Plan::Send(_)) {
            self.half_way = plan.waits_for(limits.peer);
            self.settle(peers);
        }
        plan
    }

    #[inline]
    fn next(
        &mut self,
        sq: &SendQueue,
        limits: &Limits,
        peers: &mut Peers,
        regions: &RegionTable,
    ) -> Plan {
        if self.wqe_next < self.wqe_max {
            self.skip_executed(sq);
        }
        if self.may_repair()
            && let Some(piece) = self.next_repair(sq, limits)
        {
            return Plan::Repair(piece);
        }
        if self.wqe_next == sq.tail || self.rnr_until.is_some() {
            return Plan::Idle;
        }
        if self.snd_nxt - self.snd_una > self.window.behind_the_missing() && !self.force_ack_req {
            return Plan::Idle;
        }
        // The peer would not hold more.
        if self.snd_nxt - self.snd_una >= SPAN && self.is_repairing() {
            return Plan::Idle;
        }
        let wqe = sq.get(self.wqe_next);
        if self.snd_nxt == wqe.first {
            if !self.begins && self.snd_nxt >= self.snd_max {
                return Plan::Idle;
            }
            if wqe.is_fenced() && !self.responses.is_empty() {
                return Plan::Idle;
            }
            if wqe.op.is_local() {
                // An invalidation waits for all that was asked for before (IBTA volume 1, 10.6.5.1,
                // as cited by `rxe_req.c`).
                let waits = matches!(wqe.op, SendOp::LocalInv { .. }) && self.wqe_next != sq.head;
                return if waits { Plan::Idle } else { Plan::Local };
            }
            // One packet is checked when it is gathered; of more, none leaves unless all can.
            let single = wqe.first == wqe.last() && !wqe.op.has_response();
            if !single && sq.admits(self.wqe_next, limits.pd, regions).is_err() {
                return Plan::Fault(WcStatus::LocProtErr);
            }
        }
        if wqe.op.has_response() {
            self.plan_response(wqe, limits, peers)
        } else {
            self.plan_data(wqe, limits, peers, sq)
        }
    }

    #[inline]
    fn plan_data(&mut self, wqe: &Wqe, limits: &Limits, peers: &mut Peers, sq: &SendQueue) -> Plan {
        if self.in_flight.datagrams >= self.window.packets() && !self.force_ack_req {
            return Plan::Idle;
        }
        let psn = self.snd_nxt;
        let limited = self.credits.exceeded(wqe);
        // The first packet goes alone, the others when it has found a receive.
        if limited && if psn == wqe.first { self.snd_una < psn } else { self.snd_una <= wqe.first }
        {
            return Plan::Idle;
        }
        let len = wqe.payload(psn, limits.mtu);
        // What is awaited comes with an acknowledgement.
        if psn >= self.snd_max && self.ack_requests.end().is_some() {
            let begins = wqe.begins(psn);
            let bytes = len + request_header(&wqe.op, begins);
            match self.awaits(sq, psn, bytes, begins, 0) {
                Awaited::Nothing => {}
                Awaited::Messages | Awaited::Window => return Plan::Idle,
                Awaited::Room(packets) => {
                    let all = Cost::of(packets, Budget::cost(len + OVERHEAD));
                    // In line: a queue pair that left it would lose the rest of its turn.
                    if !peers.get(limits.peer).fits(all) {
                        return Plan::Wait(limits.peer, all);
                    }
                }
            }
        }
        if !self.is_unasked() && self.ack_requests.is_stale(peers) {
            self.ack_requests.close(peers);
        }
        if !self.ack_requests.is_open() {
            if !self.may_ask(limits.slot, peers) {
                return Plan::Wait(PeerId::OWN, ACK);
            }
            self.ack_requests.open(if self.silent { Expected::NOTHING } else { peers.expect(ACK) });
        }
        let charge = Cost::of(1, Budget::cost(len + OVERHEAD));
        let pool = peers.get(limits.peer);
        if !pool.admits(limits.slot, charge) && !self.overdraft {
            return Plan::Wait(limits.peer, charge);
        }
        let (begins, ends) = (psn == wqe.first, psn == wqe.last());
        // Ask before the window or the pool closes, where it begins again, so that one packet is
        // progress, and at the end of what can be sent. Where there is room for more answers, also
        // often enough in between that they arrive before that, and at the end of each message.
        let interval = u64::from((self.window.packets() / 4).clamp(1, 32));
        let must = self.force_ack_req
            || (psn == self.snd_una && psn < self.snd_max)
            || self.in_flight.datagrams + 1 >= self.window.packets()
            || pool.closes_with(charge, if ends { full_packet(limits.mtu) } else { charge })
            || (limited && begins)
            || (ends && self.is_held_up_behind(sq));
        let may = ends || psn - self.last_ack_req >= interval;
        let ack_req = must || (may && peers.spares(ACK));
        debug_assert!(self.wqe_next < sq.tail);
        let piece = RequestPacket {
            index: self.wqe_next,
            psn,
            opcode: wqe.data_opcode(psn),
            offset: wqe.offset(psn, limits.mtu),
            len,
            message: wqe.message(len),
            ack_req,
            solicited: wqe.is_solicited() && ends,
        };
        Plan::Send(Shape { piece, last: psn, charge })
    }

    /// Whether an acknowledgement more may be asked for.
    #[inline]
    fn may_ask(&self, slot: u32, peers: &mut Peers) -> bool {
        self.silent || self.overdraft || peers.get(PeerId::OWN).admits(slot, ACK)
    }

    /// Whether what follows the request under the cursor could not ask for an acknowledgement now:
    /// nothing, what sends nothing, what needs a receive, or what waits for room of another kind.
    #[inline]
    fn is_held_up_behind(&self, sq: &SendQueue) -> bool {
        let next = self.wqe_next + 1;
        if next == sq.tail {
            return true;
        }
        let next = sq.get(next);
        next.op.has_response() || next.op.is_local() || self.credits.exceeded(next)
    }

    fn plan_response(&self, wqe: &Wqe, limits: &Limits, peers: &mut Peers) -> Plan {
        let psn = self.snd_nxt;
        // What was begun while more were allowed may be asked for again.
        let begun = psn < self.snd_max && self.responses.is_empty();
        if self.responses.len() >= usize::from(self.max_rd_atomic) && !begun {
            // Without any allowed it would wait for ever.
            return if self.max_rd_atomic == 0 && psn >= self.snd_max {
                Plan::Fault(WcStatus::LocQpOpErr)
            } else {
                Plan::Idle
            };
        }
        let offset = wqe.offset(psn, limits.mtu);
        let (opcode, last, len) = match wqe.op {
            SendOp::CompareSwap { .. } => (Opcode::RC_COMPARE_SWAP, psn, 8),
            SendOp::FetchAdd { .. } => (Opcode::RC_FETCH_ADD, psn, 8),
            SendOp::AtomicWrite { .. } => (Opcode::RC_ATOMIC_WRITE, psn, 8),
            SendOp::Flush { .. } => (Opcode::RC_FLUSH, psn, 0),
            _ => {
                let each = u64::from(wqe.read_packets());
                let piece = (psn - wqe.first) / each + 1;
                let last = (wqe.first + piece * each - 1).min(wqe.last());
                let end = wqe.offset(last, limits.mtu) + wqe.payload(last, limits.mtu);
                (Opcode::RC_RDMA_READ_REQUEST, last, end - offset)
            }
        };
        #[allow(clippy::cast_possible_truncation)]
        let packets = (last - psn + 1) as u32;
        let each = Budget::cost(len.min(limits.mtu.bytes()) + OVERHEAD);
        if packets > 1
            && !self.responses.is_empty()
            && !self.read_window.allows(self.answers_under_way(), packets)
        {
            return Plan::Idle;
        }
        let charge = match self.read_window.comes_whole() {
            true => peers.charge_of_answer(packets, each),
            false => Cost::of(packets, each),
        };
        let has_room = peers.get(PeerId::OWN).admits(limits.slot, charge);
        if !has_room && !self.overdraft && !self.silent {
            return Plan::Wait(PeerId::OWN, charge);
        }
        // The peer's room is asked for too, but one request a queue pair may always have there:
        // else one that waited for our own room would have to wait again.
        if !self.responses.is_empty() && !peers.get(limits.peer).fits(REQUEST) {
            return Plan::Idle;
        }
        let (index, ack_req, solicited) = (self.wqe_next, true, false);
        let piece =
            RequestPacket { index, psn, opcode, offset, len, message: len, ack_req, solicited };
        Plan::Send(Shape { piece, last, charge })
    }
}

/// Bytes around the payload of a packet of a SEND or WRITE: BTH, RETH, ICRC.
#[inline]
pub(in crate::rc) fn request_header(op: &SendOp, begins: bool) -> u32 {
    let reth = if begins && matches!(op, SendOp::Write { .. }) { Reth::LEN } else { 0 };
    (bth::LEN + reth + ICRC_LEN) as u32
}

/// What a packet costs at most.
fn full_packet(mtu: Mtu) -> Cost {
    Cost::of(1, Budget::cost(mtu.bytes() + OVERHEAD))
}
