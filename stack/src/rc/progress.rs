//! Responses from the peer and the passing of time: their meaning for outstanding requests.

use crate::mem::Memory;
use crate::qp::sq::WqeIndex;
use crate::rc::Qp;
use crate::rc::completer::{self, DataVerdict, Verdict, Why};
use crate::rc::requester::Repair;
use crate::shared::Shared;
use crate::types::{Seq, Time};
use crate::verbs::{Completions, SendOp, WcStatus};
use crate::wire::ext::rnr_timer_us;
use crate::wire::{AckKind, Aeth, Operation, Packet, Place};

impl Qp {
    /// A response from the peer.
    #[inline(never)]
    pub(crate) fn handle_response<H: Memory + Completions>(
        &mut self,
        now: Time,
        packet: &Packet<'_>,
        shared: &mut Shared,
        host: &mut H,
    ) {
        if !self.core.state.requests() {
            return shared.drops.ghost_response += 1;
        }
        let psn = packet.bth().psn.expand(self.requester.snd_una());
        match packet.info.operation {
            Operation::Acknowledge => self.handle_ack(now, psn, packet, shared, host),
            _ => self.handle_data(now, psn, packet, shared, host),
        }
    }

    fn handle_ack<H: Completions>(
        &mut self,
        now: Time,
        psn: Seq,
        packet: &Packet<'_>,
        shared: &mut Shared,
        host: &mut H,
    ) {
        let Some(aeth) = packet.aeth() else { return };
        let (una, sent) = (self.requester.snd_una(), self.requester.snd_max());
        let gate = self.requester.gate(&self.core.sq, psn + 1).map(|(_, at)| at);
        match completer::judge(aeth.syndrome, psn, una, sent, gate) {
            Verdict::Advance { to } => {
                self.requester.on_aeth(aeth);
                self.acknowledged(now, to, shared, host);
            }
            Verdict::Retry { to, from, why } => {
                self.advance(now, to, shared, host);
                let report = packet.payload();
                let selective = self.params.selective && !report.is_empty();
                if why == Why::SequenceNak && selective {
                    self.repair(now, from, report, shared);
                } else {
                    self.retry(now, from, why, shared);
                }
            }
            Verdict::RnrWait { to, timer } => {
                self.core.tally.not_ready(&mut shared.counters);
                self.requester.on_aeth(aeth);
                self.advance(now, to, shared, host);
                self.rnr_wait(now, to, timer, shared, host);
            }
            Verdict::Fatal { to, status } => {
                self.advance(now, to, shared, host);
                self.fail_head(status, shared, host);
            }
            Verdict::Duplicate if psn + 1 == una => self.hear_credits(aeth, shared),
            Verdict::Duplicate => shared.counters.duplicate_response += 1,
            Verdict::Ghost => shared.drops.ghost_response += 1,
            Verdict::BadSyndrome => shared.drops.bad_syndrome += 1,
        }
    }

    /// A responder repeats its last acknowledgement to grant more receives.
    fn hear_credits(&mut self, aeth: Aeth, shared: &mut Shared) {
        self.requester.on_aeth(aeth);
        if self.requester.cursor() != self.core.sq.tail {
            shared.enqueue(self.core.slot, &mut self.core.queued);
        }
    }

    fn handle_data<H: Memory + Completions>(
        &mut self,
        now: Time,
        psn: Seq,
        packet: &Packet<'_>,
        shared: &mut Shared,
        host: &mut H,
    ) {
        if let Some(aeth) = packet.aeth()
            && !matches!(aeth.syndrome.kind(), AckKind::Ack { .. })
        {
            shared.drops.bad_syndrome += 1;
            return;
        }
        let (una, sent) = (self.requester.snd_una(), self.requester.snd_max());
        let gate = self.requester.gate(&self.core.sq, psn + 1);
        match completer::judge_data(psn, una, sent, gate.map(|(_, at)| at)) {
            DataVerdict::Take => {}
            DataVerdict::Retry { from } => return self.retry(now, from, Why::Implied, shared),
            DataVerdict::Duplicate => return shared.counters.duplicate_response += 1,
            DataVerdict::Ghost => return shared.drops.ghost_response += 1,
        }
        let Some((index, _)) = gate else { return };
        if let Some(aeth) = packet.aeth() {
            self.requester.on_aeth(aeth);
        }
        // Everything before the READ is acknowledged by its response.
        if psn > una {
            self.advance(now, psn, shared, host);
        }
        match self.place_response(index, psn, packet, shared, host) {
            Ok(()) => self.advance(now, psn + 1, shared, host),
            Err(status) => self.fail_head(status, shared, host),
        }
    }

    fn place_response<H: Memory>(
        &self,
        index: WqeIndex,
        psn: Seq,
        packet: &Packet<'_>,
        shared: &mut Shared,
        host: &mut H,
    ) -> Result<(), WcStatus> {
        let wqe = self.core.sq.get(index);
        let pd = self.core.init.pd;
        let placed = match (&wqe.op, packet.atomic_ack()) {
            (SendOp::Read { .. }, None) => {
                let payload = packet.payload();
                if payload.len() != wqe.payload(psn, self.params.mtu) as usize {
                    return Err(WcStatus::BadRespErr);
                }
                self.core.tally.accepted(&mut shared.counters, payload.len());
                let offset = wqe.offset(psn, self.params.mtu);
                self.core.sq.scatter(index, offset, payload, pd, host)
            }
            (SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. }, Some(found)) => {
                self.core.sq.scatter(index, 0, &found.to_ne_bytes(), pd, host)
            }
            // Their response is that of a READ of nothing.
            (SendOp::Flush { .. } | SendOp::AtomicWrite { .. }, None)
                if packet.info.place == Place::Only && packet.payload().is_empty() =>
            {
                Ok(())
            }
            _ => return Err(WcStatus::BadRespErr),
        };
        placed.map_err(|_| WcStatus::LocProtErr)
    }

    /// As [`acknowledged`](Self::acknowledged), where that is rare.
    #[inline(never)]
    fn advance<H: Completions>(&mut self, now: Time, to: Seq, shared: &mut Shared, host: &mut H) {
        self.acknowledged(now, to, shared, host);
    }

    /// Everything before `to` is acknowledged.
    #[inline(always)]
    fn acknowledged<H: Completions>(
        &mut self,
        now: Time,
        to: Seq,
        shared: &mut Shared,
        host: &mut H,
    ) {
        if to <= self.requester.snd_una() {
            return;
        }
        self.requester.advance(now, to, &self.core.sq, &self.params, &mut shared.peers);
        if !self.core.sq.is_empty() && self.core.sq.get(self.core.sq.head).is_long() {
            self.note_executed(to, shared);
        }
        self.retire(to, shared, host);
        (self.retries, self.rnr_retries) = (0, 0);
        let asked = !self.clock.has_not_asked();
        self.clock.heard();
        if self.requester.outstanding() {
            self.arm(now, shared);
        } else {
            self.disarm();
            if asked {
                self.forget_deadline(shared);
            }
        }
        if self.requester.cursor() != self.core.sq.tail {
            shared.enqueue(self.core.slot, &mut self.core.queued);
        } else if !self.requester.outstanding() {
            self.requester.rest(&mut shared.lists);
        }
        self.report_drained(shared);
    }

    /// The peer executed the oldest request, one of several packets, if all of it is before `to`.
    #[inline(never)]
    fn note_executed(&self, to: Seq, shared: &mut Shared) {
        let oldest = self.core.sq.get(self.core.sq.head);
        if oldest.last() < to {
            shared.peers.executed(self.params.peer, &oldest.op, oldest.len);
        }
    }

    /// Completes the oldest requests whose packets are all before `to`.
    #[inline(always)]
    pub(super) fn retire<H: Completions>(&mut self, to: Seq, shared: &mut Shared, host: &mut H) {
        let mut retired = 0;
        while !self.core.sq.is_empty() {
            let (head, wqe) = (self.core.sq.head, self.core.sq.get(self.core.sq.head));
            if wqe.last() >= to || !self.requester.is_executed(head, wqe) {
                break;
            }
            self.core.retire_send(host);
            retired += 1;
        }
        if retired > 0 {
            self.core.tally.retired(&mut shared.counters, retired);
            host.send_retired(self.core.init.cookie, retired);
        }
    }

    /// In SQD, reports once that all requests that were begun are done.
    #[inline]
    pub(super) fn report_drained(&mut self, shared: &mut Shared) {
        if self.core.awaits_drain() && self.is_drained() {
            self.core.drained(&mut shared.events);
        }
    }

    fn retry(&mut self, now: Time, from: Seq, why: Why, shared: &mut Shared) {
        match why {
            Why::SequenceNak => self.core.tally.missed(&mut shared.counters),
            Why::Implied if self.requester.is_overtaken(from) => {
                shared.counters.implied_nak_seq_err += 1;
            }
            Why::Implied => return,
        }
        self.clock.nak_seen = true;
        let how = (why == Why::Implied, !self.clock.has_not_asked());
        let (sq, params, peers) = (&self.core.sq, &self.params, &mut shared.peers);
        if self.requester.on_nak(now, from, how, sq, params, peers) {
            // The deadline stays: only progress moves it, so that a peer that repeats NAKs for ever
            // is given up in time.
            shared.enqueue(self.core.slot, &mut self.core.queued);
        }
    }

    /// The peer misses the packet of `from`, and `report` lists those behind it that it holds.
    fn repair(&mut self, now: Time, from: Seq, report: &[u8], shared: &mut Shared) {
        let (sq, params, peers) = (&self.core.sq, &self.params, &mut shared.peers);
        let arrived = match self.requester.on_gap(now, from, report, sq, params, peers) {
            Repair::Alone { arrived } => arrived,
            Repair::FromThere => return self.retry(now, from, Why::SequenceNak, shared),
            Repair::Old => return,
        };
        self.core.tally.missed(&mut shared.counters);
        self.clock.nak_seen = true;
        if arrived {
            self.put_off_probe(now);
        }
        // The deadline stays, as above.
        self.schedule(shared);
        shared.enqueue(self.core.slot, &mut self.core.queued);
    }

    fn rnr_wait<H: Completions>(
        &mut self,
        now: Time,
        to: Seq,
        timer: u8,
        shared: &mut Shared,
        host: &mut H,
    ) {
        if self.requester.awaits_receive() || to != self.requester.snd_una() {
            return;
        }
        if self.core.attr.rnr_retry != Some(7) {
            if self.rnr_retries >= self.core.attr.rnr_retry.unwrap_or(0) {
                shared.counters.retry_rnr_exceeded_err += 1;
                return self.fail_head(WcStatus::RnrRetryExcErr, shared, host);
            }
            self.rnr_retries += 1;
        }
        // It is there, if not ready.
        self.retries = 0;
        let until = now.after(u64::from(rnr_timer_us(timer)) * 1000);
        self.requester.on_rnr(to, until, &self.core.sq, &self.params, &mut shared.peers);
        self.disarm();
        self.schedule(shared);
    }

    /// The oldest request failed, and with it the queue pair.
    pub(super) fn fail_head<H: Completions>(
        &mut self,
        status: WcStatus,
        shared: &mut Shared,
        host: &mut H,
    ) {
        if self.core.sq.is_empty() {
            return;
        }
        self.core.fail_send(status, host);
        self.responder.stop();
        self.break_down(shared, host);
    }
}
