//! The invariants of the responder: the work of an engine for the peer.

use rocinante_stack::mem::AtomicOp;
use rocinante_stack::types::Psn;
use rocinante_stack::verbs::{Cqe, QpType, WcOpcode, WcStatus};

use crate::check::{Context, Verdict};
use crate::model::{End, EndId, Op, Phase, Receive, Request, Stream, locate, peer};
use crate::world::World;

impl World<'_> {
    /// The request that `end` is executing, of its peer's stream in the same life. On an unreliable
    /// connection the packet tells which one it is.
    pub(crate) fn executing(
        &mut self,
        end: EndId,
        context: Option<&Context<'_>>,
    ) -> Result<u64, String> {
        let End { generation, phase, terms, .. } = self.ends[end];
        if phase != Phase::Ready {
            return Err(format!("end {end} is {phase:?}, and executes a request"));
        }
        if let Some(context) = context
            && context.generation != generation
        {
            return Err(format!("end {end} took a packet from an earlier life"));
        }
        let (qp_type, start) = (self.connections[end / 2].qp_type, terms.psn[peer(end) % 2]);
        let stream = self.serving(end)?;
        if qp_type == QpType::Rc {
            return Ok(stream.frontier());
        }
        let context = context.ok_or("a request without a packet")?;
        let number = Psn::new(context.psn.wrapping_sub(start)).value();
        let number = stream
            .at_packet(u64::from(number))
            .ok_or_else(|| format!("PSN {} is of no request", context.psn))?;
        if number < stream.exec {
            return Err(format!("request {number} of end {} again, or too late", peer(end)));
        }
        if number > stream.exec {
            // Requests between, and one that was begun, are lost.
            (stream.exec, stream.exec_bytes) = (number, 0);
        }
        Ok(number)
    }

    /// The requests to `end` in its present life.
    pub(crate) fn serving(&mut self, end: EndId) -> Result<&mut Stream, String> {
        let generation = self.ends[end].generation;
        self.ends[peer(end)]
            .stream_mut(generation)
            .ok_or_else(|| format!("end {end} got no request"))
    }

    /// The engine placed bytes of a WRITE at `end`.
    pub(crate) fn written(
        &mut self,
        end: EndId,
        at: u64,
        bytes: &[u8],
        context: Option<&Context<'_>>,
    ) -> Verdict {
        let number = self.executing(end, context)?;
        let stream = self.serving(end)?;
        let offset = stream.exec_bytes as usize;
        let request = stream.get(number).ok_or_else(|| {
            format!("end {end}: {} bytes were written that were not sent", bytes.len())
        })?;
        let (target, imm) = match request.op {
            Op::Write { at, imm } => (at, imm),
            Op::AtomicWrite { at } if bytes.len() == 8 => (at, None),
            other => return Err(format!("end {end}: a WRITE was placed instead of {other:?}")),
        };
        if request.void {
            return Err(format!("end {end}: request {number} went through a window that was gone"));
        }
        let inside = offset + bytes.len() <= request.overruns as usize;
        if request.bad.is_some() && !inside {
            return Err(format!("end {end}: request {number}, which must fail, was placed"));
        }
        let right = request.data.get(offset..offset + bytes.len()) == Some(bytes);
        if at != target + offset as u64 || !right {
            return Err(format!(
                "end {end}: request {number}, byte {offset}: {} bytes placed at {at:#x}, which {}",
                bytes.len(),
                if right { "is the wrong place" } else { "differ from those that were sent" }
            ));
        }
        let len = request.len;
        stream.exec_bytes += bytes.len() as u32;
        if stream.exec_bytes == len && imm.is_none() {
            stream.executed();
        }
        Ok(())
    }

    /// The engine placed bytes of a SEND in a receive of `end`.
    pub(crate) fn filled(
        &mut self,
        end: EndId,
        at: u64,
        bytes: &[u8],
        context: Option<&Context<'_>>,
    ) -> Verdict {
        let number = self.executing(end, context)?;
        self.take_receive(end);
        let place = self.next_receive(end).map(|receive| receive.list.clone());
        let list = place.ok_or("a SEND was placed, but no receive is posted")?;
        let [sender, taker] = self.ends.get_disjoint_mut([peer(end), end]).map_err(|_| "ends")?;
        let stream = sender.stream_mut(taker.generation).ok_or("no stream")?;
        let offset = stream.exec_bytes;
        let request = stream.get(number).ok_or_else(|| {
            format!("end {end}: {} bytes were received that were not sent", bytes.len())
        })?;
        if !request.op.is_send() || request.bad.is_some() {
            return Err(format!("end {end}: a SEND was placed instead of {:?}", request.op));
        }
        let from = offset as usize;
        if request.data.get(from..from + bytes.len()) != Some(bytes) {
            return Err(format!(
                "end {end}: request {number}, byte {offset}: wrong bytes received"
            ));
        }
        match locate(&list, offset) {
            Some((place, room)) if place == at && bytes.len() <= room as usize => {}
            other => {
                return Err(format!(
                    "end {end}: byte {offset} of a SEND was placed at {at:#x} instead of {other:x?}"
                ));
            }
        }
        stream.exec_bytes += bytes.len() as u32;
        Ok(())
    }

    /// The engine executed an atomic at `end`.
    pub(crate) fn calculated(&mut self, end: EndId, at: u64, op: AtomicOp, found: u64) -> Verdict {
        let number = self.executing(end, None)?;
        let stream = self.serving(end)?;
        let request = stream.get_mut(number).ok_or("an atomic that was not sent")?;
        if request.op != (Op::Atomic { at, op }) || request.bad.is_some() {
            return Err(format!("end {end}: {op:?} at {at:#x} instead of {:?}", request.op));
        }
        request.found = Some(found);
        stream.executed();
        Ok(())
    }

    /// A receive completed.
    pub(crate) fn received(
        &mut self,
        end: EndId,
        cqe: &Cqe,
        context: Option<&Context<'_>>,
    ) -> Verdict {
        let this = &self.ends[end];
        if cqe.status == WcStatus::WrFlushErr && this.srq.is_some() && this.taken.is_none() {
            return Err(format!("end {end}: a shared receive was flushed that it did not take"));
        }
        let Some(receive) = self.pop_receive(end) else {
            return Err(format!("end {end}: a receive completed that was not posted"));
        };
        if receive.id != cqe.wr_id {
            return Err(format!("end {end}: receive {:x} instead of {:x}", cqe.wr_id, receive.id));
        }
        match cqe.status {
            WcStatus::WrFlushErr => Ok(()),
            _ if self.is_datagram(end) => self.datagram_received(end, &receive, cqe, context),
            WcStatus::Success => self.received_well(end, cqe, context),
            WcStatus::RemInvReqErr => self.invalidated_nothing(end, context),
            status => self.receive_failed(end, &receive, status, context),
        }
    }

    pub(crate) fn received_well(
        &mut self,
        end: EndId,
        cqe: &Cqe,
        context: Option<&Context<'_>>,
    ) -> Verdict {
        let number = self.executing(end, context)?;
        let stream = self.serving(end)?;
        let request = stream.get(number).ok_or("a message arrived that was not sent")?;
        let (opcode, whole) = match request.op {
            Op::Send { .. } => (WcOpcode::Recv, true),
            Op::SendInv { wrong, .. } => (WcOpcode::Recv, !wrong),
            Op::Write { imm: Some(_), .. } => (WcOpcode::RecvRdmaWithImm, true),
            _ => (WcOpcode::Recv, false),
        };
        if !whole || request.bad.is_some() || stream.exec_bytes != request.len {
            return Err(format!(
                "end {end}: a receive completed with {} of {} bytes of request {number}, {:?}",
                stream.exec_bytes, request.len, request.op
            ));
        }
        let invalidated = match request.op {
            Op::SendInv { key, .. } => Some(key),
            _ => None,
        };
        let expected = (opcode, request.len, request.immediate(), request.solicited, invalidated);
        let found = (cqe.opcode, cqe.byte_len, cqe.imm, cqe.solicited, cqe.invalidated);
        if found != expected || cqe.sender.is_some() {
            return Err(format!(
                "end {end}: request {number} arrived as {found:?} instead of {expected:?}"
            ));
        }
        let op = request.op;
        stream.executed();
        if let Op::SendInv { .. } = op {
            self.pane_changed(end, Op::Invalidate);
        }
        Ok(())
    }

    /// A SEND arrived that was to invalidate a window that does not exist. The receive reports an
    /// error, and the queue pair breaks.
    fn invalidated_nothing(&mut self, end: EndId, context: Option<&Context<'_>>) -> Verdict {
        let number = self.executing(end, context)?;
        self.ends[end].reason.get_or_insert(WcStatus::RemInvReqErr);
        let stream = self.serving(end)?;
        let whole = stream.exec_bytes;
        let request = stream.get(number).ok_or("a message arrived that was not sent")?;
        let (op, len) = (request.op, request.len);
        stream.executed();
        match op {
            Op::SendInv { key, wrong } if whole == len && self.may_be_gone(end, key, wrong) => {
                Ok(())
            }
            _ => Err(format!("end {end}: {op:?} is said to invalidate nothing")),
        }
    }

    pub(crate) fn receive_failed(
        &mut self,
        end: EndId,
        receive: &Receive,
        status: WcStatus,
        context: Option<&Context<'_>>,
    ) -> Verdict {
        let number = self.executing(end, context)?;
        self.ends[end].reason.get_or_insert(status);
        let stream = self.serving(end)?;
        let request = stream.get_mut(number).ok_or("a receive failed, but nothing was sent")?;
        let excuse = match status {
            WcStatus::LocLenErr if request.len > receive.room => WcStatus::RemInvReqErr,
            WcStatus::LocProtErr if receive.bad => WcStatus::RemOpErr,
            _ => return Err(format!("end {end}: a receive failed with {status} for no reason")),
        };
        request.excuses.push(excuse);
        Ok(())
    }

    /// `end` refused a request of its peer: checks that there is one to refuse.
    pub(crate) fn refused(&mut self, end: EndId, status: WcStatus) -> Verdict {
        let generation = self.ends[end].generation;
        self.ends[end].reason.get_or_insert(status);
        let stream = self.ends[peer(end)].stream_mut(generation).ok_or("refused no request")?;
        let due = |request: &mut Request| {
            request.bad == Some(status) || request.excuses.contains(&status)
        };
        if stream.pending_mut().any(due) {
            return Ok(());
        }
        let asked: Vec<_> =
            stream.pending().map(|request| (request.op, request.len, request.through)).collect();
        Err(format!(
            "end {end} refused a request with {status}, and nothing was wrong with any of {asked:x?}; its windows are {:x?}",
            self.ends[end].panes
        ))
    }
}
