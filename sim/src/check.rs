//! The invariants: whatever an engine does is compared with what the model expects, at once.

use rocinante_stack::mem::AtomicOp;
use rocinante_stack::types::Psn;
use rocinante_stack::verbs::{Cqe, QpEvent, QpState, QpType, WcOpcode, WcStatus};

use crate::memory::{Effect, Zone, owner};
use crate::model::{End, EndId, Op, Phase, Receive, Request, Stream, locate, peer};
use crate::network::Packet;
use crate::world::World;

/// Whether all is as it must be; or what is not.
pub(crate) type Verdict = Result<(), String>;

/// The packet that is being handled.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Context {
    harmed: bool,
    psn: u32,
    generation: u32,
}

impl Context {
    pub(crate) fn of(packet: &Packet) -> Self {
        let psn = packet
            .bytes
            .get(9..12)
            .map_or(0, |psn| u32::from(psn[0]) << 16 | u32::from(psn[1]) << 8 | u32::from(psn[2]));
        Self { harmed: packet.harmed, psn, generation: packet.generation }
    }
}

impl World<'_> {
    /// Judges what the engine of `host` did in the call that just returned.
    pub(crate) fn settle(&mut self, host: usize, context: Option<&Context>) -> Verdict {
        let ram = &mut self.hosts[host].ram;
        if let Some(wrong) = ram.wrong.get_mut().take() {
            return Err(wrong);
        }
        let effects = std::mem::take(&mut ram.effects);
        let bytes = std::mem::take(&mut ram.bytes);
        if let Some(context) = context
            && context.harmed
            && !effects.is_empty()
        {
            return Err(format!("a damaged or misrouted packet had effects: {effects:?}"));
        }
        for effect in &effects {
            self.judge(host, effect, &bytes, context)?;
        }
        let ram = &mut self.hosts[host].ram;
        (ram.effects, ram.bytes) = (effects, bytes);
        ram.effects.clear();
        ram.bytes.clear();
        self.events(host)?;
        self.look(host)
    }

    fn judge(
        &mut self,
        host: usize,
        effect: &Effect,
        bytes: &[u8],
        context: Option<&Context>,
    ) -> Verdict {
        match *effect {
            Effect::Place { len: 0, .. } => Ok(()),
            Effect::Place { at, from, len } => {
                let (end, zone) = self.owner(host, at, len as u64)?;
                let bytes = &bytes[from..from + len];
                self.tally.digest.add(at ^ (len as u64) << 40);
                match zone {
                    Zone::Local => self.answered(end, at, bytes),
                    Zone::Receive => self.filled(end, at, bytes, context),
                    Zone::Window => self.written(end, at, bytes, context),
                    Zone::Constant | Zone::Words => Err(format!("{zone:?} was written")),
                }
            }
            Effect::Atomic { at, op, found } => {
                let (end, zone) = self.owner(host, at, 8)?;
                if zone != Zone::Words {
                    return Err(format!("an atomic in {zone:?}"));
                }
                self.calculated(end, at, op, found)
            }
            Effect::Complete(cqe) => self.completed(host, &cqe, context),
            Effect::SendRetired { cookie, count } => {
                let end = self.end_of(cookie)?;
                let stream = self.ends[end].current().ok_or("retired nothing that is known")?;
                stream.retired += u64::from(count);
                self.retire(end)
            }
            Effect::RecvRetired { cookie, count } => {
                let end = self.end_of(cookie)?;
                self.ends[end].receives_retired += u64::from(count);
                self.ends[end].touched = true;
                Ok(())
            }
        }
    }

    fn end_of(&self, cookie: u64) -> Result<EndId, String> {
        usize::try_from(cookie)
            .ok()
            .filter(|end| *end < self.ends.len())
            .ok_or_else(|| format!("the cookie {cookie} is nobody's"))
    }

    fn owner(&self, host: usize, at: u64, len: u64) -> Result<(EndId, Zone), String> {
        let (index, zone, _) = owner(at, len).ok_or_else(|| format!("{at:#x} is nobody's"))?;
        self.hosts[host].ends.get(index).map(|end| (*end, zone)).ok_or_else(|| "nobody's".into())
    }

    /// The request that `end` is executing: of its peer's stream in the same life. For an unreliable connection the packet says which one it is.
    fn executing(&mut self, end: EndId, context: Option<&Context>) -> Result<u64, String> {
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
            // What was between is lost, and what was begun.
            (stream.exec, stream.exec_bytes) = (number, 0);
        }
        Ok(number)
    }

    /// What `end` is asked for in its present life.
    fn serving(&mut self, end: EndId) -> Result<&mut Stream, String> {
        let generation = self.ends[end].generation;
        self.ends[peer(end)]
            .stream_mut(generation)
            .ok_or_else(|| format!("nobody asked end {end} for anything"))
    }

    /// A WRITE was placed at `end`.
    fn written(&mut self, end: EndId, at: u64, bytes: &[u8], context: Option<&Context>) -> Verdict {
        let number = self.executing(end, context)?;
        let stream = self.serving(end)?;
        let offset = stream.exec_bytes as usize;
        let request = stream.get(number).ok_or_else(|| {
            format!("end {end}: {} bytes were written that nobody sent", bytes.len())
        })?;
        let Op::Write { at: target, imm } = request.op else {
            return Err(format!("end {end}: a WRITE was placed instead of {:?}", request.op));
        };
        if request.bad.is_some() {
            return Err(format!("end {end}: request {number}, which must fail, was placed"));
        }
        let right = request.data.get(offset..offset + bytes.len()) == Some(bytes);
        if at != target + offset as u64 || !right {
            return Err(format!(
                "end {end}: request {number}, byte {offset}: {} bytes placed at {at:#x}, which {}",
                bytes.len(),
                if right { "is the wrong place" } else { "are not what was sent" }
            ));
        }
        let len = request.len;
        stream.exec_bytes += bytes.len() as u32;
        if stream.exec_bytes == len && imm.is_none() {
            stream.executed();
        }
        Ok(())
    }

    /// Bytes of a SEND were placed in a receive of `end`.
    fn filled(&mut self, end: EndId, at: u64, bytes: &[u8], context: Option<&Context>) -> Verdict {
        let number = self.executing(end, context)?;
        let [sender, taker] = self.ends.get_disjoint_mut([peer(end), end]).map_err(|_| "ends")?;
        let stream = sender.stream_mut(taker.generation).ok_or("no stream")?;
        let offset = stream.exec_bytes;
        let request = stream.get(number).ok_or_else(|| {
            format!("end {end}: {} bytes were received that nobody sent", bytes.len())
        })?;
        if !matches!(request.op, Op::Send { .. }) || request.bad.is_some() {
            return Err(format!("end {end}: a SEND was placed instead of {:?}", request.op));
        }
        let from = offset as usize;
        if request.data.get(from..from + bytes.len()) != Some(bytes) {
            return Err(format!(
                "end {end}: request {number}, byte {offset}: wrong bytes received"
            ));
        }
        let receive =
            taker.receives.front().ok_or("a SEND was placed, but no receive is posted")?;
        match locate(&receive.list, offset) {
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

    /// An atomic was executed at `end`.
    fn calculated(&mut self, end: EndId, at: u64, op: AtomicOp, found: u64) -> Verdict {
        let number = self.executing(end, None)?;
        let stream = self.serving(end)?;
        let request = stream.get_mut(number).ok_or("an atomic that nobody sent")?;
        if request.op != (Op::Atomic { at, op }) || request.bad.is_some() {
            return Err(format!("end {end}: {op:?} at {at:#x} instead of {:?}", request.op));
        }
        request.found = Some(found);
        stream.executed();
        Ok(())
    }

    /// The result of a READ or an atomic was placed at `end`.
    fn answered(&mut self, end: EndId, at: u64, bytes: &[u8]) -> Verdict {
        let far = self.ends[peer(end)].host;
        let stream = self.ends[end].current().ok_or("a response to nobody")?;
        let mut number = stream.popped;
        let request = loop {
            let request = stream
                .get_mut(number)
                .ok_or_else(|| format!("end {end}: a response that nobody asked for"))?;
            if request.answered < request.answer_len() {
                break request;
            }
            number += 1;
        };
        let offset = request.answered;
        match locate(&request.list, offset) {
            Some((place, room)) if place == at && bytes.len() <= room as usize => {}
            other => {
                return Err(format!(
                    "end {end}: request {number}, byte {offset} of the response placed at {at:#x} instead of {other:x?}"
                ));
            }
        }
        request.answered += bytes.len() as u32;
        if request.answered > request.answer_len() {
            return Err(format!("end {end}: request {number} was answered with too much"));
        }
        let right = match request.op {
            // A long READ is asked for in pieces, and the first ones may be all right.
            Op::Read { .. } if request.bad == Some(WcStatus::RemAccessErr) => true,
            _ if request.bad.is_some() => false,
            Op::Read { at } => {
                let source = at + u64::from(offset);
                self.hosts[far].ram.slice(source, bytes.len() as u64) == bytes
            }
            _ => {
                let found = request.found.ok_or("the result of an atomic that was not executed")?;
                let from = offset as usize;
                found.to_ne_bytes().get(from..from + bytes.len()) == Some(bytes)
            }
        };
        if !right {
            return Err(format!(
                "end {end}: request {number}, byte {offset}: wrong bytes returned"
            ));
        }
        Ok(())
    }

    fn completed(&mut self, host: usize, cqe: &Cqe, context: Option<&Context>) -> Verdict {
        self.tally.completions += 1;
        self.tally
            .digest
            .add(cqe.wr_id ^ (cqe.status as u64) << 56 ^ u64::from(cqe.byte_len) << 32);
        let end = self.hosts[host]
            .ends
            .iter()
            .copied()
            .find(|end| self.ends[*end].qpn == Some(cqe.qpn))
            .ok_or_else(|| format!("a completion of {} which is not there", cqe.qpn))?;
        self.ends[end].touched = true;
        if self.trace {
            eprintln!("{:>12} end {end}: {cqe:?}", self.now);
        }
        if cqe.wr_id >> RECEIVE & 1 == 1 {
            self.received(end, cqe, context)
        } else {
            self.sent(end, cqe)
        }
    }

    /// A receive completed.
    fn received(&mut self, end: EndId, cqe: &Cqe, context: Option<&Context>) -> Verdict {
        let Some(receive) = self.ends[end].receives.pop_front() else {
            return Err(format!("end {end}: a receive completed that was not posted"));
        };
        self.ends[end].receives_popped += 1;
        if receive.id != cqe.wr_id {
            return Err(format!("end {end}: receive {:x} instead of {:x}", cqe.wr_id, receive.id));
        }
        match cqe.status {
            WcStatus::Success => self.received_well(end, cqe, context),
            WcStatus::WrFlushErr => Ok(()),
            status => self.receive_failed(end, &receive, status, context),
        }
    }

    fn received_well(&mut self, end: EndId, cqe: &Cqe, context: Option<&Context>) -> Verdict {
        let number = self.executing(end, context)?;
        let stream = self.serving(end)?;
        let request = stream.get(number).ok_or("a message arrived that nobody sent")?;
        let (opcode, whole) = match request.op {
            Op::Send { .. } => (WcOpcode::Recv, true),
            Op::Write { imm: Some(_), .. } => (WcOpcode::RecvRdmaWithImm, true),
            _ => (WcOpcode::Recv, false),
        };
        if !whole || request.bad.is_some() || stream.exec_bytes != request.len {
            return Err(format!(
                "end {end}: a receive completed with {} of {} bytes of request {number}, {:?}",
                stream.exec_bytes, request.len, request.op
            ));
        }
        let expected = (opcode, request.len, request.immediate(), request.solicited, None);
        let found = (cqe.opcode, cqe.byte_len, cqe.imm, cqe.solicited, cqe.src_qp);
        if found != expected {
            return Err(format!(
                "end {end}: request {number} arrived as {found:?} instead of {expected:?}"
            ));
        }
        stream.executed();
        Ok(())
    }

    fn receive_failed(
        &mut self,
        end: EndId,
        receive: &Receive,
        status: WcStatus,
        context: Option<&Context>,
    ) -> Verdict {
        let number = self.executing(end, context)?;
        self.ends[end].reason.get_or_insert(status);
        let stream = self.serving(end)?;
        let request = stream.get_mut(number).ok_or("a receive failed, but nobody sent anything")?;
        let excuse = match status {
            WcStatus::LocLenErr if request.len > receive.room => WcStatus::RemInvReqErr,
            WcStatus::LocProtErr if receive.bad => WcStatus::RemOpErr,
            _ => return Err(format!("end {end}: a receive failed with {status} for no reason")),
        };
        request.excuses.push(excuse);
        Ok(())
    }

    /// A request of `end` completed.
    fn sent(&mut self, end: EndId, cqe: &Cqe) -> Verdict {
        // Those before it that wanted no completion are done.
        let (number, stream) = loop {
            let stream = self.ends[end].current().ok_or("a completion for nobody")?;
            let number = stream.popped;
            let request = stream.get(number).ok_or_else(|| {
                format!("end {end}: {:x} completed, but nothing is outstanding", cqe.wr_id)
            })?;
            if request.id == cqe.wr_id {
                break (number, self.ends[end].current().ok_or("no stream")?);
            }
            if request.signaled || cqe.status == WcStatus::WrFlushErr {
                return Err(format!("end {end}: {:x} completed, not {number}", cqe.wr_id));
            }
            stream.popped += 1;
            self.succeeded(end, number)?;
        };
        let request = stream.get(number).ok_or("no request")?;
        let (expected, signaled) = ((request.opcode, request.len), request.signaled);
        stream.popped += 1;
        match cqe.status {
            WcStatus::Success if !signaled => {
                Err(format!("end {end}: request {number} wanted no completion"))
            }
            WcStatus::Success if (cqe.opcode, cqe.byte_len) != expected => {
                Err(format!("end {end}: request {number} completed as {cqe:?}"))
            }
            WcStatus::Success => self.succeeded(end, number),
            WcStatus::WrFlushErr => Ok(()),
            status => self.failed(end, number, status),
        }
    }

    /// Request `number` of `end` is said to be done: was it?
    fn succeeded(&mut self, end: EndId, number: u64) -> Verdict {
        let reliable = self.connections[end / 2].qp_type == QpType::Rc;
        let stream = self.ends[end].current().ok_or("no stream")?;
        let request = stream.get(number).ok_or("no request")?;
        if request.bad.is_some() {
            return Err(format!("end {end}: request {number}, which must fail, succeeded"));
        }
        if !reliable {
            return Ok(());
        }
        if request.answered != request.answer_len() {
            return Err(format!(
                "end {end}: request {number} completed with {} of {} bytes",
                request.answered,
                request.answer_len()
            ));
        }
        if stream.frontier() <= number {
            return Err(format!(
                "end {end}: request {number} is said to be done, but the peer is at {}",
                stream.exec
            ));
        }
        stream.prune();
        Ok(())
    }

    fn failed(&mut self, end: EndId, number: u64, status: WcStatus) -> Verdict {
        let mut general = Vec::new();
        if self.may_time_out() {
            general.push(WcStatus::RetryExcErr);
            if self.ends[end].terms.rnr_retry < 7 {
                general.push(WcStatus::RnrRetryExcErr);
            }
        }
        let stream = self.ends[end].current().ok_or("no stream")?;
        let request = stream.get(number).ok_or("no request")?;
        let right = request.bad == Some(status)
            || request.excuses.contains(&status)
            || general.contains(&status);
        if !right {
            return Err(format!(
                "end {end}: request {number} ended with {status}, which nothing explains: {:?}, {} bytes, bad {:?}, excuses {:?}",
                request.op, request.len, request.bad, request.excuses
            ));
        }
        self.ends[end].reason.get_or_insert(status);
        Ok(())
    }

    /// The engine said that it has retired requests: those that wanted no completion are done.
    fn retire(&mut self, end: EndId) -> Verdict {
        self.ends[end].touched = true;
        loop {
            let stream = self.ends[end].current().ok_or("no stream")?;
            if stream.popped >= stream.retired {
                return Ok(());
            }
            let number = stream.popped;
            if stream.get(number).is_none_or(|request| request.signaled) {
                return Err(format!("end {end}: request {number} was retired without completion"));
            }
            stream.popped += 1;
            self.succeeded(end, number)?;
        }
    }

    /// Asynchronous events.
    fn events(&mut self, host: usize) -> Verdict {
        loop {
            let Some(engine) = &mut self.hosts[host].engine else { return Ok(()) };
            let Some((qpn, event)) = engine.poll_event() else { return Ok(()) };
            let of = |end: &&EndId| self.ends[**end].qpn == Some(qpn);
            let Some(end) = self.hosts[host].ends.iter().find(of).copied() else {
                return Err(format!("{event:?} of {qpn}, which is not there"));
            };
            self.ends[end].touched = true;
            self.tally.digest.add(event as u64 + 77);
            match event {
                QpEvent::AccessErr => self.refused(end, WcStatus::RemAccessErr)?,
                QpEvent::ReqErr => self.refused(end, WcStatus::RemInvReqErr)?,
                QpEvent::Fatal | QpEvent::LastWqeReached => {
                    return Err(format!("end {end}: {event:?} for no reason"));
                }
                QpEvent::CommEst | QpEvent::SqDrained => {}
            }
        }
    }

    /// `end` refused a request of its peer: is there one to refuse?
    fn refused(&mut self, end: EndId, status: WcStatus) -> Verdict {
        let generation = self.ends[end].generation;
        self.ends[end].reason.get_or_insert(status);
        let stream = self.ends[peer(end)].stream_mut(generation).ok_or("refused nobody")?;
        let due = |request: &mut Request| {
            request.bad == Some(status) || request.excuses.contains(&status)
        };
        if stream.pending_mut().any(due) {
            return Ok(());
        }
        Err(format!("end {end} refused a request with {status}, and nothing was wrong with any"))
    }

    /// Looks at the queue pairs that something happened to.
    fn look(&mut self, host: usize) -> Verdict {
        for at in 0..self.hosts[host].ends.len() {
            let end = self.hosts[host].ends[at];
            if std::mem::take(&mut self.ends[end].touched) {
                self.look_at(host, end)?;
            }
        }
        Ok(())
    }

    fn look_at(&mut self, host: usize, end: EndId) -> Verdict {
        let Some(engine) = &self.hosts[host].engine else { return Ok(()) };
        let this = &mut self.ends[end];
        if let Some(stream) = this.stream(this.generation)
            && stream.retired != stream.popped
        {
            return Err(format!(
                "end {end}: {} requests retired, {} completed",
                stream.retired, stream.popped
            ));
        }
        if this.receives_retired != this.receives_popped {
            return Err(format!("end {end}: the count of retired receives is wrong"));
        }
        let Some((state, ..)) = this.qpn.and_then(|qpn| engine.query_qp(qpn)) else {
            return Ok(());
        };
        if !matches!(state, QpState::Err | QpState::Sqe) {
            return Ok(());
        }
        if this.outstanding() > 0 || (state == QpState::Err && !this.receives.is_empty()) {
            return Err(format!(
                "end {end} is {state}, but {} requests and {} receives are not flushed",
                this.outstanding(),
                this.receives.len()
            ));
        }
        let Some(reason) = this.reason else {
            return Err(format!("end {end} broke for no reason"));
        };
        if state == QpState::Sqe {
            this.stopped = true;
        } else if this.phase == Phase::Ready {
            this.phase = Phase::Broken;
            *self.tally.ended.entry(reason.name()).or_default() += 1;
            self.rejoin(end);
        }
        Ok(())
    }
}

/// The bit of `wr_id` by which receives are told from sends.
pub(crate) const RECEIVE: u32 = 63;
