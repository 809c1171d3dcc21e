//! The transmit path of an unreliable queue pair, as far as the sink has room and the receiver's
//! pace allows.

use super::Qp;
use crate::budget::{Budget, Cost};
use crate::mem::Memory;
use crate::peer::PeerId;
use crate::qp::opcode::data_opcode;
use crate::qp::outbound::{RequestPacket, Sent, Target};
use crate::qp::sq::OVERHEAD;
use crate::qp::{Turn, TurnEnd};
use crate::rc::requester::{Situation, Wait, Want, permit};
use crate::shared::Shared;
use crate::sink::TxSink;
use crate::stats::Limit;
use crate::types::{Qpn, Time};
use crate::verbs::{Completions, Destination, QpState, SendOp, WcStatus};
use crate::wire::{Deth, Opcode};

impl Qp {
    /// Sends as many packets as the turn has left.
    #[inline]
    pub(crate) fn transmit<H: Memory + Completions>(
        &mut self,
        now: Time,
        turn: &mut Turn,
        shared: &mut Shared,
        host: &mut H,
        sink: &mut impl TxSink,
    ) {
        if !self.core.state.requests() {
            return;
        }
        let (mut retired, before) = (0, turn.left);
        let (end, limit) = loop {
            match self.transmit_one(now, turn.left, shared, host, sink) {
                Ok(ended) => retired += u32::from(ended),
                Err(Stop::SinkFull) => break (TurnEnd::SinkFull, Limit::Port),
                Err(Stop::Blocked(Limit::Turn)) => break (TurnEnd::Quantum, Limit::Turn),
                Err(Stop::Blocked(limit)) => break (TurnEnd::Idle, limit),
                Err(Stop::Fault(status)) => {
                    self.local_fault(status, retired, host);
                    return;
                }
            }
            turn.left -= 1;
        };
        (turn.end, turn.progress) = (end, true);
        if retired > 0 {
            host.send_retired(self.core.init.cookie, retired);
        }
        self.core.limited(limit, &mut shared.limits_hit);
        if turn.left < before {
            self.recent.left(now, before - turn.left);
        }
        self.report_drained(shared);
    }

    /// Sends the next packet of the oldest request, if the `turn` has one left. Returns whether the
    /// request ends with it.
    fn transmit_one<H: Memory + Completions>(
        &mut self,
        now: Time,
        turn: usize,
        shared: &mut Shared,
        host: &mut H,
        sink: &mut impl TxSink,
    ) -> Result<bool, Stop> {
        let sq = &self.core.sq;
        let at = Situation { sq, peers: &shared.peers, turn };
        let held = !self.begins && self.is_drained();
        let next = permit(Want::Unreliable { held }, &at);
        if next.packets == 0 {
            return Err(Stop::Blocked(next.limited_by));
        }
        let index = sq.head;
        let wqe = sq.get(index);
        if wqe.op.is_local() {
            self.core.run_local(index, host).map_err(Stop::Fault)?;
            self.core.retire_send(host);
            self.core.tally.retired(&mut shared.counters, 1);
            return Ok(true);
        }
        let psn = self.next;
        let (begins, ends) = (psn == wqe.first, psn == wqe.last());
        // One packet is checked when it is gathered; of more, none leaves unless all can.
        if begins && !ends && sq.admits(index, self.core.init.pd, host.regions()).is_err() {
            return Err(PROTECTION);
        }
        let (target, receiver) = self.target_of(&wqe.op, shared).ok_or(PROTECTION)?;
        let len = wqe.payload(psn, self.mtu);
        let charge = Cost::of(1, Budget::cost(len + OVERHEAD));
        shared.peers.pace_mut(receiver).tick(now);
        let at = Situation { sq, peers: &shared.peers, turn };
        let pace = shared.peers.pace(receiver);
        let paced = permit(Want::Datagram { now, pace, cost: charge }, &at);
        if let Wait::Until(until) = paced.wait {
            shared.peers.pace_mut(receiver).put_off(until);
            shared.timers.set(self.core.slot, &mut self.core.deadline, until);
            return Err(Stop::Blocked(paced.limited_by));
        }
        let piece = RequestPacket {
            index,
            psn,
            opcode: opcode(&wqe.op, begins, ends),
            offset: wqe.offset(psn, self.mtu),
            len,
            message: wqe.len,
            ack_req: false,
            solicited: wqe.is_solicited() && ends,
        };
        match self.core.send_packet(&piece, &target, &mut shared.counters, host, sink) {
            Sent::Yes => {}
            Sent::Full => return Err(Stop::SinkFull),
            Sent::Refused => return Err(PROTECTION),
        }
        shared.peers.pace_mut(receiver).sent(charge, len);
        shared.contacts.packet_left(receiver, &mut shared.peers);
        shared.counters.sent_multicast_pkts += u64::from(target.qpn == Qpn::MULTICAST);
        self.next += 1;
        if ends {
            self.core.retire_send(host);
            self.core.tally.retired(&mut shared.counters, 1);
        }
        Ok(ends)
    }

    fn target_of(&self, op: &SendOp, shared: &Shared) -> Option<(Target, PeerId)> {
        let SendOp::SendTo { to, .. } = op else {
            return Some((self.core.target()?, self.connection.as_ref()?.receiver));
        };
        let handle = shared.handles.get(to.ah).filter(|handle| handle.pd == self.core.init.pd)?;
        let qkey = self.qkey_for(to);
        let deth = Some(Deth { qkey, reserved: 0, src_qpn: self.core.qpn });
        Some((Target { path: handle.path, qpn: to.qpn, deth }, handle.receiver))
    }

    /// The Q_Key that a datagram carries: a controlled one, which has the highest bit set, is the
    /// queue pair's, so that only a program that may give it one can send it (IBTA volume 1, 10.2.5
    /// [M]; `rxe_req.c` does the same).
    fn qkey_for(&self, to: &Destination) -> u32 {
        if to.qkey & 0x8000_0000 != 0 { self.core.attr.qkey.unwrap_or(0) } else { to.qkey }
    }

    /// The oldest request cannot be executed: it fails, those behind it are flushed, and none is
    /// sent until the queue pair is RTS again. Receiving goes on.
    fn local_fault<H: Completions>(&mut self, status: WcStatus, retired: u32, host: &mut H) {
        if retired > 0 {
            host.send_retired(self.core.init.cookie, retired);
        }
        self.core.set_state(QpState::Sqe);
        self.core.fail_send(status, host);
        self.core.flush_sends(host);
    }
}

/// Why the next packet does not leave.
#[derive(Debug, Clone, Copy)]
enum Stop {
    SinkFull,
    /// It may not, or there is none.
    Blocked(Limit),
    Fault(WcStatus),
}

const PROTECTION: Stop = Stop::Fault(WcStatus::LocProtErr);

fn opcode(op: &SendOp, begins: bool, ends: bool) -> Opcode {
    match op {
        SendOp::SendTo { imm: None, .. } => Opcode::UD_SEND_ONLY,
        SendOp::SendTo { imm: Some(_), .. } => Opcode::UD_SEND_ONLY_WITH_IMMEDIATE,
        _ => data_opcode(op, begins, ends).unreliable(),
    }
}
