//! The transmit order of a queue pair: responses that the peer waits for, then requests, then a
//! plain acknowledgement. A frame is reserved before anything changes, so that nothing has to be
//! taken back.

use crate::mem::Memory;
use crate::qp::outbound::{Sent, frame, header};
use crate::qp::{Turn, TurnEnd};
use crate::rc::Qp;
use crate::rc::responder::Response;
use crate::rc::responder::resources::DataResponse;
use crate::shared::Shared;
use crate::sink::TxSink;
use crate::types::{Seq, Time};
use crate::verbs::{Completions, QpEvent};
use crate::wire::icrc::Summed;
use crate::wire::{Aeth, NakCode, Opcode, Place, Syndrome, bth};

/// Bytes behind the BTH of a notification, all zero.
const CNP_RESERVED: usize = 16;

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
        if self.notifier.due && self.core.state.receives() {
            match self.send_notification(shared, sink) {
                Sent::Full => return turn.end = TurnEnd::SinkFull,
                _ => self.notifier.due = false,
            }
        }
        if self.responder.has_urgent_response() {
            self.transmit_responses(turn, shared, host, sink);
            if turn.end != TurnEnd::Idle {
                return;
            }
        }
        if self.core.state.requests() && !self.requester.has_nothing(&self.core.sq) {
            self.take_turn(now, turn, shared, host, sink);
        }
        // Last, because the peer's program waits for a request.
        if turn.end != TurnEnd::SinkFull
            && self.responder.has_response()
            && self.acknowledge(shared, host, sink) == Sent::Full
        {
            turn.end = TurnEnd::SinkFull;
        }
    }

    /// Sends requests, and sets the timers.
    #[inline(always)]
    fn take_turn<H: Memory + Completions>(
        &mut self,
        now: Time,
        turn: &mut Turn,
        shared: &mut Shared,
        host: &mut H,
        sink: &mut impl TxSink,
    ) {
        let before = turn.left;
        if !self.requester.has_lists() && self.requester.cursor() != self.core.sq.tail {
            self.requester.take_lists(&mut shared.lists);
        }
        let more = self.requester.tick(now);
        let owed_nothing = self.peer_owes_nothing();
        self.transmit_requests(now, turn, shared, host, sink);
        if !self.core.state.requests() {
            // One of them failed: nothing is awaited any more.
        } else if self.requester.outstanding() {
            // The peer has its time from the first packet on that asks, which may have waited long.
            let asks = owed_nothing && !self.peer_owes_nothing();
            if asks || self.waits_to_send || !self.is_armed() {
                self.arm(now, shared);
            }
        } else if matches!(turn.end, TurnEnd::Wait(..)) {
            if !self.is_armed() {
                self.arm(now, shared);
            }
            self.waits_to_send = true;
        } else if self.requester.cursor() == self.core.sq.tail {
            self.requester.rest(&mut shared.lists);
        }
        if more.is_some() {
            self.clock.wake_at(more);
            self.schedule(shared);
        }
        turn.progress = turn.left < before;
    }

    /// Sends the acknowledgement that is due.
    #[inline(always)]
    fn acknowledge<H: Memory + Completions>(
        &mut self,
        shared: &mut Shared,
        host: &mut H,
        sink: &mut impl TxSink,
    ) -> Sent {
        match self.responder.acknowledgement(&self.core.rq) {
            Some((psn, aeth)) => self.send_acknowledgement(psn, aeth, shared, sink),
            None => self.transmit_other(shared, host, sink),
        }
    }

    /// Sends a response in the place of an acknowledgement: a failed request may have left
    /// something else.
    #[cold]
    fn transmit_other<H: Memory + Completions>(
        &mut self,
        shared: &mut Shared,
        host: &mut H,
        sink: &mut impl TxSink,
    ) -> Sent {
        let Some(response) = self.responder.response(self.params.mtu, &self.core.rq) else {
            return Sent::Yes;
        };
        let sent = self.send_response(&response, shared, host, sink);
        if sent == Sent::Yes {
            self.responded(&response);
        }
        sent
    }

    /// Sends a plain acknowledgement.
    #[inline]
    fn send_acknowledgement(
        &mut self,
        psn: Seq,
        aeth: Aeth,
        shared: &mut Shared,
        sink: &mut impl TxSink,
    ) -> Sent {
        let Some(to) = self.core.target() else { return Sent::Refused };
        let bth = header(Opcode::RC_ACKNOWLEDGE, to.qpn, psn, 0).bytes();
        let sent = frame(&to, bth::LEN + Aeth::LEN, 0, sink, |out| {
            out[..bth::LEN].copy_from_slice(&bth);
            aeth.write(&mut out[bth::LEN..bth::LEN + Aeth::LEN]);
            Ok(None)
        });
        if sent == Sent::Yes {
            let counters = &mut shared.counters;
            self.core.tally.sent(counters, 1, 0);
            counters.sent_acks += 1;
            self.responder.acknowledged();
        }
        sent
    }

    /// Sends the responses that are due; the turn ends if not all of them may leave.
    fn transmit_responses<H: Memory + Completions>(
        &mut self,
        turn: &mut Turn,
        shared: &mut Shared,
        host: &mut H,
        sink: &mut impl TxSink,
    ) {
        while self.responder.has_urgent_response() {
            if turn.left == 0 {
                return turn.end = TurnEnd::Quantum;
            }
            let response = self.responder.response(self.params.mtu, &self.core.rq);
            let Some(response) = response else { return };
            match self.send_response(&response, shared, host, sink) {
                Sent::Yes => self.responded(&response),
                Sent::Full => return turn.end = TurnEnd::SinkFull,
                Sent::Refused if self.responder.drop_repetition() => {
                    shared.drops.stale_duplicate += 1;
                    continue;
                }
                Sent::Refused => {
                    self.responder.read_failed();
                    shared.event(self.core.qpn, QpEvent::AccessErr);
                    self.break_down(shared, host);
                    continue;
                }
            }
            turn.left -= 1;
        }
    }

    #[inline]
    fn responded(&mut self, response: &Response) {
        self.responder.responded(response);
        if let Response::Acknowledge { aeth, .. } = response
            && aeth.syndrome == Syndrome::nak(NakCode::PsnSequenceError)
        {
            self.held.reported();
        }
    }

    /// Notifies the peer that its packets were marked (CNP).
    #[cold]
    fn send_notification(&self, shared: &mut Shared, sink: &mut impl TxSink) -> Sent {
        let Some(to) = self.core.target() else { return Sent::Refused };
        let mut bth = header(Opcode::CNP, to.qpn, Seq::default(), 0);
        bth.becn = true;
        let sent = frame(&to, bth::LEN, CNP_RESERVED, sink, |out| {
            out.fill(0);
            out[..bth::LEN].copy_from_slice(&bth.bytes());
            Ok(None)
        });
        if sent == Sent::Yes {
            self.core.tally.sent(&mut shared.counters, 1, 0);
            shared.counters.sent_cnp += 1;
        }
        sent
    }

    #[inline]
    fn send_response<H: Memory>(
        &self,
        response: &Response,
        shared: &mut Shared,
        host: &H,
        sink: &mut impl TxSink,
    ) -> Sent {
        let (psn, opcode, aeth, payload) = match *response {
            Response::Acknowledge { psn, aeth } => {
                let missing = aeth.syndrome == Syndrome::nak(NakCode::PsnSequenceError);
                let report = if missing { self.held.report_len(psn) } else { 0 };
                (psn, Opcode::RC_ACKNOWLEDGE, aeth, report)
            }
            Response::Data(DataResponse::Atomic { psn, msn, .. }) => {
                (psn, Opcode::RC_ATOMIC_ACKNOWLEDGE, self.responder.ack(msn, &self.core.rq), 0)
            }
            Response::Data(DataResponse::Read { psn, place, at, msn }) => {
                (psn, read_opcode(place), self.responder.ack(msn, &self.core.rq), at.len as usize)
            }
        };
        let source = match response {
            Response::Data(DataResponse::Read { at, .. }) if at.len > 0 => {
                match host.regions().remote_read(self.core.accessor(), at) {
                    Ok(source) => Some(source),
                    Err(_) => return Sent::Refused,
                }
            }
            _ => None,
        };
        let Some(info) = opcode.info() else { return Sent::Refused };
        let Some(to) = self.core.target() else { return Sent::Refused };
        let bth = header(opcode, to.qpn, psn, payload);
        let sent = frame(&to, info.header_len, payload, sink, |out| {
            out[..bth::LEN].copy_from_slice(&bth.bytes());
            if opcode != Opcode::RC_RDMA_READ_RESPONSE_MIDDLE {
                aeth.write(&mut out[bth::LEN..bth::LEN + Aeth::LEN]);
            }
            if let Response::Data(DataResponse::Atomic { found, .. }) = response {
                out[bth::LEN + Aeth::LEN..info.header_len].copy_from_slice(&found.to_be_bytes());
            }
            if opcode == Opcode::RC_ACKNOWLEDGE && payload > 0 {
                self.held.report(&mut out[info.header_len..info.header_len + payload]);
            }
            if let Some(source) = source {
                let end = info.header_len + payload;
                let sum = host.fetch_summed(source, &mut out[info.header_len..end])?;
                if bth.pad > 0 {
                    out[end..end + usize::from(bth.pad)].fill(0);
                }
                return Ok(sum.map(|crc| Summed { at: info.header_len, len: payload, crc }));
            }
            Ok(None)
        });
        if sent != Sent::Yes {
            return sent;
        }
        if opcode == Opcode::RC_ACKNOWLEDGE {
            shared.counters.sent_acks += 1;
            self.core.tally.sent(&mut shared.counters, 1, 0);
        } else {
            self.core.tally.sent(&mut shared.counters, 1, payload as u64);
        }
        Sent::Yes
    }
}

fn read_opcode(place: Place) -> Opcode {
    match place {
        Place::First => Opcode::RC_RDMA_READ_RESPONSE_FIRST,
        Place::Middle => Opcode::RC_RDMA_READ_RESPONSE_MIDDLE,
        Place::Last => Opcode::RC_RDMA_READ_RESPONSE_LAST,
        Place::Only => Opcode::RC_RDMA_READ_RESPONSE_ONLY,
    }
}
