//! The requester's part of a turn: one plan after the other, until nothing more may leave.

use crate::mem::Memory;
use crate::qp::TurnEnd;
use crate::qp::outbound::{RequestPacket, Sent};
use crate::rc::Qp;
use crate::rc::requester::burst::{Plan, ResponseRequest, request_header};
use crate::rc::requester::permit::Permit;
use crate::shared::Shared;
use crate::sink::TxSink;
use crate::stats::Limit;
use crate::types::Time;
use crate::verbs::{Completions, WcStatus};

impl Qp {
    /// Sends requests, up to `quantum` packets, which it counts down. Returns how that ended.
    pub(in crate::rc) fn transmit_requests<H: Memory + Completions>(
        &mut self,
        now: Time,
        quantum: &mut usize,
        shared: &mut Shared,
        host: &mut H,
        sink: &mut impl TxSink,
    ) -> TurnEnd {
        self.requester.control.begin_turn();
        loop {
            let mut limit = None;
            let (sq, limits, peers) = (&self.core.sq, &self.limits, &mut shared.peers);
            let plan = self.requester.plan(sq, limits, peers, host.regions());
            if *quantum == 0 && !self.continues_beyond_turn(&plan) {
                self.core.limited(Limit::Turn, &mut shared.limits_hit);
                return TurnEnd::Quantum;
            }
            let sent = match plan {
                Plan::Burst(permit) => {
                    Ok(self.send_burst(now, &permit, quantum, shared, host, sink))
                }
                Plan::Request(request) => {
                    Ok(self.send_request(&request, quantum, shared, host, sink))
                }
                Plan::Lost(packet) => Ok(self.send_lost(now, &packet, quantum, shared, host, sink)),
                Plan::Local => match self.core.run_local(self.requester.cursor(), host) {
                    Ok(()) => {
                        self.requester.executed();
                        self.retire(self.requester.snd_una(), host);
                        continue;
                    }
                    Err(status) => Err(Some(status)),
                },
                Plan::Blocked(Permit { limited_by, wait: Some((receiver, need)), .. }) => {
                    self.core.limited(limited_by, &mut shared.limits_hit);
                    return TurnEnd::Wait(receiver, need);
                }
                Plan::Blocked(Permit { limited_by, .. }) => {
                    limit = Some(limited_by);
                    Err(None)
                }
                Plan::Fault(status) => Err(Some(status)),
            };
            let fault = match sent {
                // The usual end: all of it left, and asked.
                Ok(Sent::Yes) if self.requester.has_asked_for_all(&self.core.sq) => {
                    self.core.limited(Limit::SendQueueEmpty, &mut shared.limits_hit);
                    return TurnEnd::Idle;
                }
                Ok(Sent::Yes) => continue,
                Ok(Sent::Full) => {
                    self.core.limited(Limit::Port, &mut shared.limits_hit);
                    return TurnEnd::SinkFull;
                }
                Ok(Sent::Refused) => Some(WcStatus::LocProtErr),
                Err(fault) => fault,
            };
            if let Some(status) = fault
                && self.local_fault(status, shared, host)
            {
                return TurnEnd::Idle;
            }
            let (sq, limits, peers) = (&self.core.sq, &self.limits, &mut shared.peers);
            if !self.requester.ask_again(sq, limits, peers) {
                self.requester.settle(peers);
                if let Some(limit) = limit {
                    self.core.limited(limit, &mut shared.limits_hit);
                }
                return TurnEnd::Idle;
            }
        }
    }

    /// Whether the plan goes on although the turn is over: a run that was begun is not cut short,
    /// and a request that sends nothing costs the others nothing.
    fn continues_beyond_turn(&self, plan: &Plan) -> bool {
        match plan {
            Plan::Burst(_) => {
                let (index, psn) = (self.requester.cursor(), self.requester.snd_nxt);
                let wqe = self.core.sq.get(index);
                let len = wqe.payload(psn, self.limits.mtu);
                let bytes = len + request_header(&wqe.op, wqe.begins(psn));
                self.requester.control.continues_run(bytes)
            }
            Plan::Request(_) | Plan::Lost(_) => false,
            Plan::Local | Plan::Fault(_) | Plan::Blocked(_) => true,
        }
    }

    /// The request under the cursor cannot be executed: it fails once those before it are done.
    /// Returns whether that was now.
    fn local_fault<H: Completions>(
        &mut self,
        status: WcStatus,
        shared: &mut Shared,
        host: &mut H,
    ) -> bool {
        let first = self.requester.cursor() == self.core.sq.head;
        if first {
            self.fail_head(status, shared, host);
        }
        first
    }

    #[inline]
    fn send_request<H: Memory>(
        &mut self,
        request: &ResponseRequest,
        quantum: &mut usize,
        shared: &mut Shared,
        host: &H,
        sink: &mut impl TxSink,
    ) -> Sent {
        let Some(to) = self.core.target() else { return Sent::Refused };
        let sent = self.core.send_packet(&request.packet, &to, &mut shared.counters, host, sink);
        if sent == Sent::Yes {
            let requester = &mut self.requester;
            if requester.was_sent(request.packet.psn) && !requester.recovery.is_tail_probe() {
                self.core.tally.sent_again(&mut shared.counters, 1);
            }
            requester.request_left(request, &self.core.sq, &self.limits, &mut shared.peers);
            *quantum -= 1;
        }
        sent
    }

    #[cold]
    fn send_lost<H: Memory>(
        &mut self,
        now: Time,
        packet: &RequestPacket,
        quantum: &mut usize,
        shared: &mut Shared,
        host: &H,
        sink: &mut impl TxSink,
    ) -> Sent {
        let Some(to) = self.core.target() else { return Sent::Refused };
        match self.core.send_packet(packet, &to, &mut shared.counters, host, sink) {
            Sent::Yes => {
                self.core.tally.sent_again(&mut shared.counters, 1);
                self.requester.lost_left(now);
            }
            Sent::Full => return Sent::Full,
            // Its memory is gone: the request fails when it is the oldest.
            Sent::Refused => {
                let (una, peers) = (self.requester.snd_una(), &mut shared.peers);
                self.requester.go_back(una, &self.core.sq, &self.limits, peers);
            }
        }
        *quantum -= 1;
        Sent::Yes
    }
}
