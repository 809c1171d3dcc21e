//! Requests from the peer: the responder judges and executes them, the queue pair completes, counts and breaks.

use super::Qp;
use super::responder::{Outcome, Received, Rights};
use crate::engine::Shared;
use crate::mem::{Access, Memory};
use crate::verbs::{Completions, Cqe, QpEvent, QpState};
use crate::wire::{NakCode, Packet};

impl Qp {
    /// A request from the peer.
    #[inline]
    pub(crate) fn handle_request<H: Memory + Completions>(
        &mut self,
        packet: &Packet<'_>,
        shared: &mut Shared,
        host: &mut H,
    ) {
        if self.state == QpState::Rtr && !self.established {
            self.established = true;
            shared.event(self.qpn, QpEvent::CommEst);
        }
        let rights = Rights {
            pd: self.init.pd,
            mtu: self.limits.mtu,
            access: self.attr.access.unwrap_or(Access::NONE),
            min_rnr_timer: self.attr.min_rnr_timer.unwrap_or(0),
        };
        let respond = match self.responder.request(packet, &rights, host) {
            Outcome::Done { received, respond } => {
                shared.counters.rcvd_bytes += packet.payload().len() as u64;
                if let Some(received) = received {
                    self.complete_recv(&received, host);
                }
                respond
            }
            Outcome::Duplicate { respond } => {
                shared.counters.duplicate_request += 1;
                respond
            }
            Outcome::Stale => {
                shared.drops.stale_duplicate += 1;
                false
            }
            Outcome::Gap { report } => {
                shared.counters.out_of_seq_request += 1;
                shared.counters.sent_seq_err += u64::from(report);
                shared.drops.out_of_sequence += u64::from(!report);
                report
            }
            Outcome::NotReady => {
                shared.counters.send_rnr_err += 1;
                true
            }
            Outcome::Refused { code, received } => {
                self.refused(code, received, shared, host);
                true
            }
        };
        if respond && self.responder.has_urgent_response() {
            shared.enqueue(self.slot, &mut self.queued);
        } else if respond {
            shared.enqueue_lazily(self.slot, &mut self.queued);
        }
    }

    fn refused<H: Completions>(
        &mut self,
        code: NakCode,
        received: Option<Received>,
        shared: &mut Shared,
        host: &mut H,
    ) {
        let event = if code == NakCode::RemoteAccessError {
            shared.counters.remote_access_errors += 1;
            QpEvent::AccessErr
        } else {
            shared.counters.remote_invalid_request += 1;
            QpEvent::ReqErr
        };
        match received {
            Some(received) => self.complete_recv(&received, host),
            None if self.responder.in_receive() => {}
            None => shared.event(self.qpn, event),
        }
        self.break_down(shared, host);
    }

    fn complete_recv<H: Completions>(&self, received: &Received, host: &mut H) {
        host.recv_retired(self.init.cookie, 1);
        host.complete(
            self.init.recv_cq,
            Cqe {
                wr_id: received.wr_id,
                status: received.status,
                opcode: received.opcode,
                byte_len: received.byte_len,
                imm: received.imm,
                qpn: self.qpn,
                solicited: received.solicited,
            },
        );
    }
}
