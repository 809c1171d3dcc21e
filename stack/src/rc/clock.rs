//! The timers of a queue pair: one deadline, the earliest of several.
//!
//! The acknowledgement timeout and its retries are those that the program set, neither earlier nor
//! later, however often the queue pair probes in between. Probes cost no retry: see [`Qp::probe`].

use crate::peer::PeerKind;
use crate::rc::Qp;
use crate::shared::Shared;
use crate::tuning::probes::{DOUBLINGS, PATIENCE_NS, ROUND_TRIPS};
use crate::types::Time;
use crate::verbs::{Completions, WcStatus};

/// When something is to be done, or [`Time::NEVER`]: each queue pair has these, so they are short.
#[derive(Debug)]
pub(super) struct Clock {
    /// The acknowledgement timeout.
    ack_timeout: Time,
    /// Nothing came back for several round trips: the last packet, or its acknowledgement, may be
    /// lost, and no later packet would show it. It is sent again, with AckReq.
    tail_probe: Time,
    /// More may be sent.
    pacing: Time,
    /// Probes since something was acknowledged.
    probes: u16,
    /// A NAK came since something was acknowledged. Its sender stays silent until the packet that
    /// it misses arrives.
    pub(super) nak_seen: bool,
    /// The engine's microseconds without a driver before the first of the timeouts in a row, modulo
    /// 2^32.
    undriven_us: u32,
}

impl Default for Clock {
    fn default() -> Self {
        let never = Time::NEVER;
        Self {
            ack_timeout: never,
            tail_probe: never,
            pacing: never,
            probes: 0,
            nak_seen: false,
            undriven_us: 0,
        }
    }
}

/// The size in each queue pair, no more.
const _: () = assert!(size_of::<Clock>() == 32);

impl Clock {
    /// Something was acknowledged.
    #[inline]
    pub(super) fn heard(&mut self) {
        self.probes = 0;
        self.nak_seen = false;
    }

    /// Whether no probe left since something was acknowledged: a response that comes now answers
    /// the original packets.
    pub(super) fn has_not_asked(&self) -> bool {
        self.probes == 0
    }

    /// The window opens further at this time.
    #[inline]
    pub(super) fn wake_at(&mut self, at: Option<Time>) {
        self.pacing = at.unwrap_or(Time::NEVER);
    }

    /// Whether `at` has come; then it is over.
    fn is_due(at: &mut Time, now: Time) -> bool {
        let due = *at <= now && *at != Time::NEVER;
        if due {
            *at = Time::NEVER;
        }
        due
    }
}

impl Qp {
    /// Whether the peer owes no response: the packets in flight left without AckReq, and no probe
    /// followed them.
    #[inline]
    pub(super) fn peer_owes_nothing(&self) -> bool {
        self.requester.asked_nothing() && self.clock.has_not_asked()
    }

    /// Starts the acknowledgement timer over.
    #[inline]
    pub(super) fn arm(&mut self, now: Time, shared: &mut Shared) {
        self.waits_to_send = false;
        self.clock.ack_timeout = self.answer_by(now);
        let usual = self.requester.srtt();
        let asks = usual > 0 && self.requester.outstanding();
        self.clock.tail_probe = Time::NEVER;
        if asks {
            self.put_off_probe(now);
        }
        self.schedule(shared);
    }

    /// Whether the acknowledgement timer runs; or, where there is none, the probe timer.
    #[inline]
    pub(super) fn is_armed(&self) -> bool {
        let Clock { ack_timeout, tail_probe, .. } = self.clock;
        ack_timeout != Time::NEVER || (self.timeout().is_none() && tail_probe != Time::NEVER)
    }

    /// Nothing is awaited any more.
    #[inline]
    pub(super) fn disarm(&mut self) {
        (self.clock.ack_timeout, self.clock.tail_probe) = (Time::NEVER, Time::NEVER);
        self.core.deadline.clear();
    }

    /// Nothing is awaited any more, nor for long: a thread that was idle but for a probe is not
    /// woken again because of it.
    #[cold]
    pub(super) fn forget_deadline(&mut self, shared: &mut Shared) {
        shared.timers.remove(self.core.slot, &mut self.core.deadline);
    }

    /// Sets the deadline.
    #[inline]
    pub(super) fn schedule(&mut self, shared: &mut Shared) {
        let Clock { ack_timeout, tail_probe, pacing, .. } = self.clock;
        let ready = self.requester.ready_at();
        match ack_timeout.min(tail_probe).min(pacing).min(ready) {
            Time::NEVER => self.core.deadline.clear(),
            next => shared.timers.set(self.core.slot, &mut self.core.deadline, next),
        }
    }

    /// The acknowledgement timeout in nanoseconds; `None` if it waits for ever.
    #[inline]
    pub(super) fn timeout(&self) -> Option<u64> {
        let exponent = self.core.attr.timeout.filter(|exponent| *exponent > 0)?;
        Some(4096 << exponent)
    }

    /// The time by which the acknowledgement of a packet that leaves now is due.
    #[inline]
    fn answer_by(&self, now: Time) -> Time {
        self.timeout().map_or(Time::NEVER, |timeout| now.after(timeout))
    }

    /// The packets sent at `now` left only at `left`: the timer starts then.
    pub(crate) fn left_late(&mut self, now: Time, left: Time, shared: &mut Shared) {
        if let Some(timeout) = self.timeout()
            && self.clock.ack_timeout == now.after(timeout)
        {
            let waits = self.waits_to_send;
            self.arm(left, shared);
            self.waits_to_send = waits;
        }
    }

    /// The heap's entry came up.
    pub(crate) fn handle_timer<H: Completions>(
        &mut self,
        now: Time,
        shared: &mut Shared,
        host: &mut H,
    ) {
        if !shared.is_due(self.core.slot, &mut self.core.deadline, now) {
            return;
        }
        let mut sends = self.requester.ready(now);
        sends |= Clock::is_due(&mut self.clock.pacing, now);
        if !self.core.state.requests() {
            return self.disarm();
        }
        if Clock::is_due(&mut self.clock.ack_timeout, now) {
            // No AckReq left: we did not run for so long that the probe is late as well, or the
            // packet with the AckReq waits for credit. The peer's time starts now.
            if self.peer_owes_nothing() && self.probe(now, shared) {
                self.clock.ack_timeout = self.answer_by(now);
                sends = true;
            } else {
                self.timed_out(now, shared, host);
            }
        } else if Clock::is_due(&mut self.clock.tail_probe, now) {
            sends |= self.probe(now, shared);
        }
        if sends {
            shared.enqueue(self.core.slot, &mut self.core.queued);
        }
        self.schedule(shared);
    }

    /// Probes: asks for an acknowledgement of the packets in flight. Returns whether that may be
    /// now.
    fn probe(&mut self, now: Time, shared: &mut Shared) -> bool {
        // A Rocinante repeats its NAK when probed; a standard responder does not. Its NAK may be
        // lost, so go back to `snd_una`.
        let standard = self.core.peer().is_none_or(|peer| peer.kind == PeerKind::Standard);
        let nak_lost = standard && (self.clock.nak_seen || self.clock.probes > 0);
        let (sq, params, peers) = (&self.core.sq, &self.params, &mut shared.peers);
        if !self.requester.on_silence(now, nak_lost, sq, params, peers) {
            return false;
        }
        shared.counters.tail_probes += 1;
        self.clock.probes = self.clock.probes.saturating_add(1);
        self.put_off_probe(now);
        true
    }

    /// Puts the probe off: the peer responded, or was probed just now.
    pub(super) fn put_off_probe(&mut self, now: Time) {
        let patience = (ROUND_TRIPS * self.requester.srtt()).max(PATIENCE_NS);
        self.clock.tail_probe = now.after(patience << u32::from(self.clock.probes).min(DOUBLINGS));
    }

    fn timed_out<H: Completions>(&mut self, now: Time, shared: &mut Shared, host: &mut H) {
        if !self.requester.outstanding() {
            if core::mem::take(&mut self.waits_to_send) {
                self.requester.give_up_room();
                shared.enqueue(self.core.slot, &mut self.core.queued);
            }
            return;
        }
        self.core.tally.timed_out(&mut shared.counters);
        if self.retries == 0 {
            self.clock.undriven_us = shared.undriven_us_before as u32;
        }
        if self.retries >= self.core.attr.retry_cnt.unwrap_or(0) {
            shared.counters.retry_exceeded_err += 1;
            let undriven = shared.counters.undriven_us as u32;
            let undriven = undriven.wrapping_sub(self.clock.undriven_us);
            shared.counters.retry_exceeded_undriven_us += u64::from(undriven);
            if let Some(peer) = self.core.peer() {
                shared.contacts.gave_up(peer.remote);
            }
            return self.fail_head(WcStatus::RetryExcErr, shared, host);
        }
        self.retries += 1;
        self.requester.on_timeout(now, &self.core.sq, &self.params, &mut shared.peers);
        // Counts from now if nothing can be sent, and else from when it leaves.
        self.arm(now, shared);
        self.waits_to_send = true;
        shared.enqueue(self.core.slot, &mut self.core.queued);
    }
}
