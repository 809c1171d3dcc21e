//! What leaves next: the requester's decisions. Nothing changes here but what is kept in line and
//! in hand.

use super::asks::ACK;
use super::company::Awaited;
use super::held::SPAN;
use super::requester::{Limits, REQUEST, Requester};
use crate::mem::RegionTable;
use crate::pool::{Budget, Charge, Expected, PoolId, Pools};
use crate::qp::outbound::RequestPacket;
use crate::qp::sq::{OVERHEAD, SendQueue, Wqe};
use crate::types::Mtu;
use crate::verbs::{SendOp, WcStatus};
use crate::wire::{ICRC_LEN, Opcode, Reth, bth};

/// The packet to send next.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) piece: RequestPacket,
    /// Last PSN that the packet asks a response for; its own except for READ requests.
    pub(super) last: u64,
    pub(super) charge: Charge,
}

/// What the requester can do now.
#[derive(Debug)]
pub(super) enum Plan {
    Send(Shape),
    /// This again, alone.
    Repair(RequestPacket),
    /// The request under the cursor concerns this side only, and may be executed.
    Local,
    /// Nothing until an acknowledgement, a response, a timer or a post.
    Idle,
    /// Nothing until the pool has room for this.
    Wait(PoolId, Charge),
    /// The request under the cursor cannot be executed.
    Fault(WcStatus),
}

impl Plan {
    fn waits_for(&self, pool: PoolId) -> bool {
        matches!(self, Self::Wait(at, _) if *at == pool)
    }
}

impl Requester {
    /// What to send next.
    #[inline]
    pub(super) fn plan(
        &mut self,
        sq: &SendQueue,
        limits: &Limits,
        pools: &mut Pools,
        regions: &RegionTable,
    ) -> Plan {
        self.half_way = false;
        let plan = self.next(sq, limits, pools, regions);
        if !matches!(plan, Plan::Send(_)) {
            self.half_way = plan.waits_for(limits.peer);
            self.settle(pools);
        }
        plan
    }

    #[inline]
    fn next(
        &mut self,
        sq: &SendQueue,
        limits: &Limits,
        pools: &mut Pools,
        regions: &RegionTable,
    ) -> Plan {
        if self.cur < self.reached {
            self.skip_executed(sq);
        }
        if self.may_repair()
            && let Some(piece) = self.next_repair(sq, limits)
        {
            return Plan::Repair(piece);
        }
        if self.cur == sq.tail || self.rnr_until.is_some() {
            return Plan::Idle;
        }
        if self.nxt - self.una > self.window.behind_the_missing() && !self.solicits {
            return Plan::Idle;
        }
        // The peer would not hold more.
        if self.nxt - self.una >= SPAN && self.is_repairing() {
            return Plan::Idle;
        }
        let wqe = sq.get(self.cur);
        if self.nxt == wqe.first {
            if !self.begins && self.nxt >= self.sent {
                return Plan::Idle;
            }
            if wqe.is_fenced() && !self.rd.is_empty() {
                return Plan::Idle;
            }
            if wqe.op.is_local() {
                // An invalidation waits for all that was asked for before (IBTA volume 1, 10.6.5.1,
                // as cited by `rxe_req.c`).
                let waits = matches!(wqe.op, SendOp::LocalInv { .. }) && self.cur != sq.head;
                return if waits { Plan::Idle } else { Plan::Local };
            }
            // One packet is checked when it is gathered; of more, none leaves unless all can.
            let single = wqe.first == wqe.last() && !wqe.op.has_response();
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

    #[inline]
    fn plan_data(&mut self, wqe: &Wqe, limits: &Limits, pools: &mut Pools, sq: &SendQueue) -> Plan {
        if self.charged.datagrams >= self.window.packets() && !self.solicits {
            return Plan::Idle;
        }
        let psn = self.nxt;
        let limited = self.credits.exceeded(wqe);
        // The first packet goes alone, the others when it has found a receive.
        if limited && if psn == wqe.first { self.una < psn } else { self.una <= wqe.first } {
            return Plan::Idle;
        }
        let len = wqe.payload(psn, limits.mtu);
        // What is awaited comes with an acknowledgement.
        if psn >= self.sent && self.asks.end().is_some() {
            let begins = wqe.begins(psn);
            let bytes = len + request_header(&wqe.op, begins);
            match self.awaits(sq, psn, bytes, begins, 0) {
                Awaited::Nothing => {}
                Awaited::Messages | Awaited::Window => return Plan::Idle,
                Awaited::Room(packets) => {
                    let all = Charge::of(packets, Budget::cost(len + OVERHEAD));
                    // In line: a queue pair that left it would lose the rest of its turn.
                    if !pools.get(limits.peer).fits(all) {
                        return Plan::Wait(limits.peer, all);
                    }
                }
            }
        }
        if !self.is_unasked() && self.asks.is_stale(pools) {
            self.asks.close(pools);
        }
        if !self.asks.is_open() {
            if !self.may_ask(limits.slot, pools) {
                return Plan::Wait(PoolId::OWN, ACK);
            }
            self.asks.open(if self.silent { Expected::NOTHING } else { pools.expect(ACK) });
        }
        let charge = Charge::of(1, Budget::cost(len + OVERHEAD));
        let pool = pools.get(limits.peer);
        if !pool.admits(limits.slot, charge) && !self.overdraft {
            return Plan::Wait(limits.peer, charge);
        }
        let (begins, ends) = (psn == wqe.first, psn == wqe.last());
        // Ask before the window or the pool closes, where it begins again, so that one packet is
        // progress, and at the end of what can be sent. Where there is room for more answers, also
        // often enough in between that they arrive before that, and at the end of each message.
        let interval = u64::from((self.window.packets() / 4).clamp(1, 32));
        let must = self.solicits
            || (psn == self.una && psn < self.sent)
            || self.charged.datagrams + 1 >= self.window.packets()
            || pool.closes_with(charge, if ends { full_packet(limits.mtu) } else { charge })
            || (limited && begins)
            || (ends && self.is_held_up_behind(sq));
        let may = ends || psn - self.ack_asked >= interval;
        let ack_req = must || (may && pools.spares(ACK));
        debug_assert!(self.cur < sq.tail);
        let piece = RequestPacket {
            index: self.cur,
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
    fn may_ask(&self, slot: u32, pools: &mut Pools) -> bool {
        self.silent || self.overdraft || pools.get(PoolId::OWN).admits(slot, ACK)
    }

    /// Whether what follows the request under the cursor could not ask for an acknowledgement now:
    /// nothing, what sends nothing, what needs a receive, or what waits for room of another kind.
    #[inline]
    fn is_held_up_behind(&self, sq: &SendQueue) -> bool {
        let next = self.cur + 1;
        if next == sq.tail {
            return true;
        }
        let next = sq.get(next);
        next.op.has_response() || next.op.is_local() || self.credits.exceeded(next)
    }

    fn plan_response(&self, wqe: &Wqe, limits: &Limits, pools: &mut Pools) -> Plan {
        let psn = self.nxt;
        // What was begun while more were allowed may be asked for again.
        let begun = psn < self.sent && self.rd.is_empty();
        if self.rd.len() >= usize::from(self.max_rd_atomic) && !begun {
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
            && !self.rd.is_empty()
            && !self.flow.allows(self.answers_under_way(), packets)
        {
            return Plan::Idle;
        }
        let charge = match self.flow.comes_whole() {
            true => pools.charge_of_answer(packets, each),
            false => Charge::of(packets, each),
        };
        let has_room = pools.get(PoolId::OWN).admits(limits.slot, charge);
        if !has_room && !self.overdraft && !self.silent {
            return Plan::Wait(PoolId::OWN, charge);
        }
        // The peer's room is asked for too, but one request a queue pair may always have there:
        // else one that waited for our own room would have to wait again.
        if !self.rd.is_empty() && !pools.get(limits.peer).fits(REQUEST) {
            return Plan::Idle;
        }
        let (index, ack_req, solicited) = (self.cur, true, false);
        let piece =
            RequestPacket { index, psn, opcode, offset, len, message: len, ack_req, solicited };
        Plan::Send(Shape { piece, last, charge })
    }
}

/// Bytes around the payload of a packet of a SEND or WRITE: BTH, RETH, ICRC.
#[inline]
pub(super) fn request_header(op: &SendOp, begins: bool) -> u32 {
    let reth = if begins && matches!(op, SendOp::Write { .. }) { Reth::LEN } else { 0 };
    (bth::LEN + reth + ICRC_LEN) as u32
}

/// What a packet costs at most.
fn full_packet(mtu: Mtu) -> Charge {
    Charge::of(1, Budget::cost(mtu.bytes() + OVERHEAD))
}
