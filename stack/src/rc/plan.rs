//! Which packet of which request leaves next, if one may.

use super::requester::{REQUEST, Requester};
use super::sq::{SendQueue, Wqe};
use crate::mem::{PdId, RegionTable};
use crate::pool::{Budget, Charge, PoolId, Pools};
use crate::types::Mtu;
use crate::verbs::{SendOp, WcStatus};
use crate::wire::{AtomicEth, Ext, Opcode, Reth};

/// Longest headers of a packet with payload, with its ICRC: BTH, RETH, immediate.
pub(crate) const OVERHEAD: u32 = 12 + 16 + 4 + 4;

/// The packet to send next.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) index: u64,
    pub(crate) psn: u64,
    pub(crate) opcode: Opcode,
    /// Last PSN that the packet asks a response for; `psn` except for READ requests.
    pub(crate) last: u64,
    /// Offset of its data in the message.
    pub(crate) offset: u32,
    /// Payload bytes, or the length of the READ.
    pub(crate) len: u32,
    pub(crate) ack_req: bool,
    pub(crate) solicited: bool,
    /// It repeats the oldest packet and moves nothing.
    pub(super) probe: bool,
    pub(super) charge: Charge,
}

/// What the requester can do now.
#[derive(Debug)]
pub(crate) enum Plan {
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
pub(crate) struct Limits {
    /// Who asks the pools.
    pub(crate) slot: u32,
    pub(crate) mtu: Mtu,
    pub(crate) pd: PdId,
    pub(crate) peer: PoolId,
    /// Packets of one READ request; a constant of the connection, so that a READ sent again has the same borders.
    pub(crate) read_packets: u32,
}

impl Requester {
    /// What to send next.
    #[inline]
    pub(crate) fn plan(
        &mut self,
        sq: &SendQueue,
        limits: &Limits,
        pools: &mut Pools,
        regions: &RegionTable,
    ) -> Plan {
        if self.rnr_until.is_some() {
            return Plan::Idle;
        }
        if self.probe {
            return self.plan_probe(sq, limits);
        }
        if self.cur == sq.tail {
            return Plan::Idle;
        }
        let wqe = sq.get(self.cur);
        if self.nxt == wqe.first {
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

    /// The oldest packet once more.
    fn plan_probe(&self, sq: &SendQueue, limits: &Limits) -> Plan {
        let (wqe, psn) = (sq.get(sq.head), self.una);
        let (begins, ends) = (psn == wqe.first, psn == wqe.last);
        Plan::Send(Shape {
            index: sq.head,
            psn,
            opcode: data_opcode(&wqe.op, begins, ends),
            last: psn,
            offset: wqe.offset(psn, limits.mtu),
            len: wqe.payload(psn, limits.mtu),
            ack_req: true,
            solicited: wqe.solicited && ends,
            probe: true,
            charge: Charge::default(),
        })
    }

    fn plan_data(&self, wqe: &Wqe, limits: &Limits, pools: &mut Pools, sq: &SendQueue) -> Plan {
        if self.charged.datagrams >= self.window.packets() {
            return Plan::Idle;
        }
        let psn = self.nxt;
        let len = wqe.payload(psn, limits.mtu);
        let charge = Charge::of(1, Budget::cost(len + OVERHEAD));
        let pool = pools.get(limits.peer);
        if !pool.admits(limits.slot, charge) && !self.overdraft {
            return Plan::Wait(limits.peer, charge);
        }
        let (begins, ends) = (psn == wqe.first, psn == wqe.last);
        // Ask before the window or the pool closes, often enough in between that acknowledgements arrive before that,
        // where it begins again, so that one packet is progress, and at the end of a message.
        let interval = u64::from((self.window.packets() / 4).clamp(1, 32));
        let ack_req = (psn == self.una && psn < self.sent)
            || psn - self.ack_asked >= interval
            || self.charged.datagrams + 1 >= self.window.packets()
            || pool.closes_with(charge)
            || (ends && self.asks.should(self.cur + 1 == sq.tail, pools));
        debug_assert!(self.cur < sq.tail);
        Plan::Send(Shape {
            index: self.cur,
            psn,
            opcode: data_opcode(&wqe.op, begins, ends),
            last: psn,
            offset: wqe.offset(psn, limits.mtu),
            len,
            ack_req,
            solicited: wqe.solicited && ends,
            probe: false,
            charge,
        })
    }

    fn plan_response(&self, wqe: &Wqe, limits: &Limits, pools: &mut Pools) -> Plan {
        if self.rd.len() >= self.max_rd_atomic {
            // Without any allowed it would wait for ever.
            return if self.max_rd_atomic == 0 {
                Plan::Fault(WcStatus::LocQpOpErr)
            } else {
                Plan::Idle
            };
        }
        let psn = self.nxt;
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
        Plan::Send(Shape {
            index: self.cur,
            psn,
            opcode,
            last,
            offset,
            len,
            ack_req: true,
            solicited: false,
            probe: false,
            charge,
        })
    }
}

fn data_opcode(op: &SendOp, begins: bool, ends: bool) -> Opcode {
    let imm = matches!(op, SendOp::Send { imm: Some(_) } | SendOp::Write { imm: Some(_), .. });
    let send = matches!(op, SendOp::Send { .. });
    match (send, begins, ends, imm) {
        (true, true, true, false) => Opcode::RC_SEND_ONLY,
        (true, true, true, true) => Opcode::RC_SEND_ONLY_WITH_IMMEDIATE,
        (true, true, false, _) => Opcode::RC_SEND_FIRST,
        (true, false, false, _) => Opcode::RC_SEND_MIDDLE,
        (true, false, true, false) => Opcode::RC_SEND_LAST,
        (true, false, true, true) => Opcode::RC_SEND_LAST_WITH_IMMEDIATE,
        (false, true, true, false) => Opcode::RC_RDMA_WRITE_ONLY,
        (false, true, true, true) => Opcode::RC_RDMA_WRITE_ONLY_WITH_IMMEDIATE,
        (false, true, false, _) => Opcode::RC_RDMA_WRITE_FIRST,
        (false, false, false, _) => Opcode::RC_RDMA_WRITE_MIDDLE,
        (false, false, true, false) => Opcode::RC_RDMA_WRITE_LAST,
        (false, false, true, true) => Opcode::RC_RDMA_WRITE_LAST_WITH_IMMEDIATE,
    }
}

/// Writes the extension headers of a request after its BTH.
#[inline]
pub(crate) fn write_extensions(shape: &Shape, wqe: &Wqe, out: &mut [u8]) {
    let Some(info) = shape.opcode.info() else { return };
    match wqe.op {
        SendOp::Write { remote, rkey, .. } if info.has(Ext::Reth) => {
            Reth { va: remote, rkey, len: wqe.len }.write(&mut out[..Reth::LEN]);
        }
        SendOp::Read { remote, rkey } => {
            let va = remote.wrapping_add(u64::from(shape.offset));
            Reth { va, rkey, len: shape.len }.write(&mut out[..Reth::LEN]);
        }
        SendOp::CompareSwap { remote, rkey, compare, swap } => {
            AtomicEth { va: remote, rkey, swap_add: swap, compare }
                .write(&mut out[..AtomicEth::LEN]);
        }
        SendOp::FetchAdd { remote, rkey, add } => {
            AtomicEth { va: remote, rkey, swap_add: add, compare: 0 }
                .write(&mut out[..AtomicEth::LEN]);
        }
        _ => {}
    }
    if let SendOp::Send { imm: Some(imm) } | SendOp::Write { imm: Some(imm), .. } = wqe.op
        && info.has(Ext::ImmDt)
    {
        let at = if info.has(Ext::Reth) { Reth::LEN } else { 0 };
        out[at..at + 4].copy_from_slice(&imm);
    }
}
