//! Requests from the peer: the responder judges and executes them, the queue pair completes, counts
//! and breaks.

use crate::mem::Memory;
use crate::qp::rq::Received;
use crate::rc::Qp;
use crate::rc::reorder::Hold;
use crate::rc::responder::Outcome;
use crate::shared::Shared;
use crate::types::Seq;
use crate::verbs::{Completions, QpEvent, QpState, WcStatus};
use crate::wire::{NakCode, Packet};

impl Qp {
    /// A request from the peer.
    #[inline(always)]
    pub(crate) fn handle_request<H: Memory + Completions>(
        &mut self,
        packet: &Packet<'_>,
        shared: &mut Shared,
        host: &mut H,
    ) {
        if self.core.state == QpState::Rtr {
            self.establish(shared);
        }
        self.take_request(packet, shared, host);
        if !self.held.is_empty() {
            self.take_held(shared, host);
        }
    }

    #[cold]
    fn establish(&mut self, shared: &mut Shared) {
        self.core.on_packet(&mut shared.events);
    }

    /// Executes the packets that were held, up to the next that is missing.
    #[cold]
    fn take_held<H: Memory + Completions>(&mut self, shared: &mut Shared, host: &mut H) {
        let mut taken = false;
        while let Some(block) = self.held.take(self.responder.expected(), &mut shared.reorder_slab)
        {
            if let Ok(packet) = Packet::parse(block.bytes()) {
                self.take_request(&packet, shared, host);
            }
            shared.reorder_slab.give_back(block);
            taken = true;
        }
        let gap = taken && self.core.state.receives() && self.held.is_behind_a_gap();
        if gap && self.responder.report_next_gap() {
            shared.counters.sent_seq_err += 1;
            shared.enqueue(self.core.slot, &mut self.core.queued);
        }
    }

    /// A request after a gap is held, if it can be. Returns whether the peer should get a report. A
    /// Rocinante that probes does, although it got an RNR NAK: that, or the packet that it sent
    /// again then, was lost.
    #[cold]
    fn hold(
        &mut self,
        packet: &Packet<'_>,
        psn: Seq,
        (report, went_back): (bool, bool),
        shared: &mut Shared,
    ) -> bool {
        let selective = self.params.selective;
        let to_rocinante = self.core.peer().is_some_and(|peer| peer.kind.is_rocinante());
        let report = report || (to_rocinante && went_back && self.responder.report_gap(psn));
        let hold = selective && self.responder.reports_gaps();
        let expected = self.responder.expected();
        let hold = hold.then(|| self.held.hold(packet, expected, psn, &mut shared.reorder_slab));
        let Hold { held, news } = hold.unwrap_or(Hold { held: false, news: false });
        shared.counters.out_of_seq_request += 1;
        let report = report || (news && self.responder.report_gap(psn));
        shared.drops.out_of_sequence += u64::from(!held && !report);
        shared.counters.sent_seq_err += u64::from(report);
        report
    }

    /// Judges and executes a request.
    #[inline(always)]
    fn take_request<H: Memory + Completions>(
        &mut self,
        packet: &Packet<'_>,
        shared: &mut Shared,
        host: &mut H,
    ) {
        let mut receives = self.core.receives(&mut shared.srqs);
        let before = self.responder.messages();
        let outcome = self.responder.request(packet, &mut receives, host);
        let respond = match outcome {
            Outcome::Done => {
                if let Some(received) = receives.done {
                    self.received(&received, shared, host);
                }
                self.core.tally.accepted(&mut shared.counters, packet.payload().len());
                if self.responder.messages() != before {
                    self.core.tally.executed(&mut shared.counters);
                }
                true
            }
            Outcome::Duplicate { respond } => {
                shared.counters.duplicate_request += 1;
                respond
            }
            Outcome::Stale => {
                shared.drops.stale_duplicate += 1;
                false
            }
            Outcome::Gap { psn, report, went_back } => {
                self.hold(packet, psn, (report, went_back), shared)
            }
            Outcome::NotReady => {
                self.not_ready(shared);
                true
            }
            Outcome::Refused(code) => {
                let received = receives.done;
                self.refused(code, received, shared, host);
                true
            }
        };
        if respond && self.responder.has_urgent_response() {
            shared.enqueue(self.core.slot, &mut self.core.queued);
        } else if respond && self.responder.has_response() {
            shared.enqueue_lazily(self.core.slot, &mut self.core.queued);
        }
    }

    /// No receive was posted for the request: it is sent again, with all that follows.
    #[cold]
    fn not_ready(&mut self, shared: &mut Shared) {
        shared.counters.send_rnr_err += 1;
        self.held.clear(&mut shared.reorder_slab);
    }

    /// A message is complete that used up a receive.
    #[inline]
    fn received<H: Completions>(&mut self, received: &Received, shared: &mut Shared, host: &mut H) {
        self.core.complete_recv(received, host);
        if received.status != WcStatus::Success {
            self.invalidated_nothing(shared, host);
        }
    }

    /// Owes the peer an acknowledgement of the packets that arrived without AckReq.
    #[cold]
    pub(crate) fn acknowledge_unasked(&mut self, shared: &mut Shared) {
        if self.responder.owe_unasked() {
            shared.enqueue(self.core.slot, &mut self.core.queued);
        }
    }

    /// A SEND would have invalidated a key that it may not: it is acknowledged, and nothing after
    /// it is.
    #[cold]
    fn invalidated_nothing<H: Completions>(&mut self, shared: &mut Shared, host: &mut H) {
        shared.counters.remote_access_errors += 1;
        self.break_down(shared, host);
        self.responder.acknowledge_all();
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
            Some(received) => self.core.complete_recv(&received, host),
            None if self.responder.in_receive() => {}
            None => shared.event(self.core.qpn, event),
        }
        self.break_down(shared, host);
    }
}
