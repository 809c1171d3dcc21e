//! The requester's part of a turn: one plan after the other, until nothing more may leave.

use crate::mem::Memory;
use crate::qp::outbound::{RequestPacket, Sent};
use crate::qp::{Turn, TurnEnd};
use crate::rc::Qp;
use crate::rc::requester::burst::{Plan, ResponseRequest};
use crate::rc::requester::permit::{Permit, Situation, Wait};
use crate::shared::Shared;
use crate::sink::TxSink;
use crate::stats::Limit;
use crate::types::Time;
use crate::verbs::{Completions, WcStatus};

impl Qp {
    /// Sends requests, as many packets as the turn has left.
    pub(in crate::rc) fn transmit_requests<H: Memory + Completions>(
        &mut self,
        now: Time,
        turn: &mut Turn,
        shared: &mut Shared,
        host: &mut H,
        sink: &mut impl TxSink,
    ) {
        self.requester.control.batch.begin();
        loop {
            let (sq, params) = (&self.core.sq, &self.params);
            self.requester.skip_executed(sq);
            let at = Situation { sq, peers: &shared.peers, turn: turn.left };
            let plan = self.requester.plan(params, &at, host.regions());
            self.requester.reserve(plan.permit(), &mut shared.peers);
            let left = &mut turn.left;
            let sent = match plan {
                Plan::Burst(permit) => self.send_burst(now, &permit, left, shared, host, sink),
                Plan::Request(request) => self.send_request(&request, left, shared, host, sink),
                Plan::Lost(packet) => self.send_lost(now, &packet, left, shared, host, sink),
                Plan::Local => match self.execute(shared, host) {
                    Err(status) if self.fault(status, shared, host) => return,
                    _ => continue,
                },
                Plan::Fault(status) if self.fault(status, shared, host) => return,
                Plan::Fault(_) => continue,
                Plan::Blocked(permit) => match self.blocked(&permit, shared) {
                    Some(end) => return turn.end = end,
                    None => continue,
                },
            };
            match sent {
                // The usual end: all of it left, and asked.
                Sent::Yes if self.requester.has_asked_for_all(&self.core.sq) => {
                    return self.core.limited(Limit::SendQueueEmpty, &mut shared.limits_hit);
                }
                Sent::Yes => {}
                Sent::Full => {
                    self.core.limited(Limit::Port, &mut shared.limits_hit);
                    return turn.end = TurnEnd::SinkFull;
                }
                Sent::Refused => {
                    if self.fault(WcStatus::LocProtErr, shared, host) {
                        return;
                    }
                }
            }
        }
    }

    /// Executes the request under the cursor, which concerns this side only.
    #[inline(never)]
    fn execute<H: Memory + Completions>(
        &mut self,
        shared: &mut Shared,
        host: &mut H,
    ) -> Result<(), WcStatus> {
        self.core.run_local(self.requester.cursor(), host)?;
        self.requester.executed();
        self.retire(self.requester.snd_una(), shared, host);
        Ok(())
    }

    /// Nothing may leave, as `permit` says. Returns how the turn ends; `None` if the last packet
    /// goes again and asks.
    #[inline]
    fn blocked(&mut self, permit: &Permit, shared: &mut Shared) -> Option<TurnEnd> {
        let end = match permit.wait {
            Wait::Credit(receiver, need) => TurnEnd::Wait(receiver, need),
            _ if permit.limited_by == Limit::Turn => TurnEnd::Quantum,
            _ if self.asks_again(shared) => return None,
            _ => TurnEnd::Idle,
        };
        self.core.limited(permit.limited_by, &mut shared.limits_hit);
        Some(end)
    }

    #[inline]
    fn asks_again(&mut self, shared: &mut Shared) -> bool {
        self.requester.ask_again(&self.core.sq, &self.params, &mut shared.peers)
    }

    /// The request under the cursor cannot be executed: it fails once those before it are done, and
    /// the last of them asks. Returns whether the turn ends with that.
    #[cold]
    fn fault<H: Completions>(
        &mut self,
        status: WcStatus,
        shared: &mut Shared,
        host: &mut H,
    ) -> bool {
        if self.requester.cursor() == self.core.sq.head {
            self.fail_head(status, shared, host);
            return true;
        }
        if self.asks_again(shared) {
            return false;
        }
        self.requester.reserve(&Permit::ONE, &mut shared.peers);
        true
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
            requester.request_left(request, &self.core.sq, &self.params, &mut shared.peers);
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
                self.requester.go_back(una, &self.core.sq, &self.params, peers);
            }
        }
        *quantum -= 1;
        Sent::Yes
    }
}
