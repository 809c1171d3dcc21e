//! The invariants of the requester: how an engine ends the requests of its own program.

use rocinante_stack::verbs::{Cqe, QpType, WcStatus};

use crate::check::Verdict;
use crate::model::{EndId, Op, locate, peer};
use crate::world::World;

impl World<'_> {
    /// The engine placed the result of a READ or an atomic at `end`.
    pub(crate) fn answered(&mut self, end: EndId, at: u64, bytes: &[u8]) -> Verdict {
        let far = self.ends[peer(end)].host;
        let stream = self.ends[end].current().ok_or("a response without a request")?;
        let mut number = stream.popped;
        let request = loop {
            let request = stream
                .get_mut(number)
                .ok_or_else(|| format!("end {end}: a response without a request"))?;
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
            // A long READ is requested in parts, and the first ones may be right.
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

    /// A request of `end` has completed.
    pub(crate) fn sent(&mut self, end: EndId, cqe: &Cqe) -> Verdict {
        // Unsignaled requests before it are done, too.
        let (number, stream) = loop {
            let stream = self.ends[end].current().ok_or("a completion without a connection")?;
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
        if cqe.status != WcStatus::Success {
            stream.skip(number);
        }
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

    /// The engine reports request `number` of `end` as done: checks that it is.
    pub(crate) fn succeeded(&mut self, end: EndId, number: u64) -> Verdict {
        let reliable = self.connections[end / 2].qp_type == QpType::Rc;
        let stream = self.ends[end].current().ok_or("no stream")?;
        let request = stream.get(number).ok_or("no request")?;
        if request.bad.is_some() {
            return Err(format!("end {end}: request {number}, which must fail, succeeded"));
        }
        let op = request.op;
        if op.is_local() {
            self.pane_changed(end, op);
        }
        let stream = self.ends[end].current().ok_or("no stream")?;
        let request = stream.get(number).ok_or("no request")?;
        if matches!(op, Op::Datagram { .. }) {
            if stream.left <= number {
                return Err(format!("end {end}: datagram {number} is done, and never left"));
            }
            stream.exec = number + 1;
            stream.prune();
            return Ok(());
        }
        if !reliable {
            if stream.sent < request.first + request.packets {
                return Err(format!("end {end}: request {number} is done, and never left"));
            }
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

    pub(crate) fn failed(&mut self, end: EndId, number: u64, status: WcStatus) -> Verdict {
        let mut general = Vec::new();
        if self.may_time_out() && self.connections[end / 2].qp_type == QpType::Rc {
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
        let op = request.op;
        self.ends[end].reason.get_or_insert(status);
        if op.is_local() {
            self.pane_unchanged(end, op);
        }
        Ok(())
    }

    /// The engine has retired requests: the unsignaled ones among them are done.
    pub(crate) fn retire(&mut self, end: EndId) -> Verdict {
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
}
