//! What is done about losses: what is known to be lost and goes again alone, and what the next
//! packet is sent for beside its data.
//!
//! - Problem: a lost packet that nothing follows is never reported; a receiver that is full, dead
//!   or slow looks alike.
//! - Rule: a report repairs ([`scoreboard`]); silence is asked about, first by a tail-loss probe,
//!   then by the ACK timeout.
//! - Cost if wrong: every loss costs a timeout, or retransmissions flood a slow receiver.
//! - Measured: `stack/tests/goodput.txt`, and the table of losses in `docs/performance/results.md`.

mod scoreboard;

use self::scoreboard::Scoreboard;
use crate::types::{Seq, Time};

/// What the next packet is sent for, beside its data. It asks for an acknowledgement, and neither
/// congestion nor a lack of credit holds it back.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::rc) enum Probe {
    #[default]
    Nothing,
    /// The last packets did not ask, and what was to ask in their place cannot be sent.
    Unasked,
    /// Nothing came back for several round trips (RFC 8985, tail-loss probe).
    Tail,
    /// The ACK timeout expired, or credit did not come in that time.
    Timeout,
}

/// What is known of losses.
#[derive(Debug)]
pub(in crate::rc) struct Recovery {
    /// Selective repeat; `None` before the first gap.
    scoreboard: Option<Box<Scoreboard>>,
    probe: Probe,
    /// The ACK timeout expired. Until the peer answers, its responses reserve no credit, so a dead
    /// peer cannot block others.
    peer_silent: bool,
    /// The PSN from which a response that was overtaken was asked for again; [`NONE`] if something
    /// was acknowledged since.
    implied: Seq,
    back: GoBack,
}

/// Where go-back-N went back to.
#[derive(Debug)]
struct GoBack {
    /// The PSN that was lost last, and how often it was lost again.
    psn: Seq,
    times: u32,
    at: Time,
}

/// What may follow a packet that was lost again, the first time.
const BEHIND: u64 = 8;

/// No PSN.
const NONE: Seq = Seq::MAX;

impl Default for Recovery {
    fn default() -> Self {
        let back = GoBack { psn: NONE, times: 0, at: Time::default() };
        Self { scoreboard: None, probe: Probe::Nothing, peer_silent: false, implied: NONE, back }
    }
}

impl Recovery {
    /// Whether the next packet probes.
    #[inline]
    pub(in crate::rc) fn probes(&self) -> bool {
        self.probe != Probe::Nothing
    }

    /// Whether the next packet only asks what became of it: it is no retransmission for a loss.
    #[inline]
    pub(in crate::rc) fn is_tail_probe(&self) -> bool {
        self.probe == Probe::Tail
    }

    /// The next packet probes, or it does not.
    #[inline]
    pub(in crate::rc) fn set_probe(&mut self, probe: Probe) {
        self.probe = probe;
    }

    /// Whether the ACK timeout expired, and nothing was acknowledged since.
    #[inline]
    pub(in crate::rc) fn peer_is_silent(&self) -> bool {
        self.peer_silent
    }

    /// The ACK timeout expired. Any retransmission is due again.
    pub(in crate::rc) fn on_timeout(&mut self) {
        (self.peer_silent, self.implied) = (true, NONE);
    }

    /// Something was acknowledged.
    #[inline]
    pub(in crate::rc) fn on_ack(&mut self) {
        (self.peer_silent, self.implied) = (false, NONE);
        self.back.times = 0;
    }

    /// Everything from the packet `psn` on goes again, because that was lost; `false` if it went
    /// again within a `round_trip`: that was said of what is on its way.
    pub(in crate::rc) fn goes_back(&mut self, psn: Seq, now: Time, round_trip: u64) -> bool {
        if self.has_gone_back(psn, now, round_trip) {
            return false;
        }
        let times = if self.back.psn == psn { self.back.times + 1 } else { 0 };
        self.back = GoBack { psn, times, at: now };
        true
    }

    /// Whether `psn` was lost before, within a `round_trip`: its retransmission is on its way.
    pub(in crate::rc) fn has_gone_back(&self, psn: Seq, now: Time, round_trip: u64) -> bool {
        self.back.psn == psn && now.since(self.back.at) < round_trip
    }

    /// How many packets may follow the first that is not acknowledged: few, and ever fewer, if what
    /// went again in its place was lost again and again, because all that followed it went for
    /// nothing.
    #[inline]
    pub(in crate::rc) fn behind_the_lost(&self) -> u64 {
        match self.back.times {
            0 => u64::MAX,
            times => BEHIND >> times.min(8),
        }
    }

    /// Whether a response that overtook `expected` should make the requester go back: once, until
    /// something is acknowledged.
    pub(in crate::rc) fn implied_nak(&mut self, expected: Seq) -> bool {
        core::mem::replace(&mut self.implied, expected) != expected
    }

    /// Whether nothing is known to be lost, and nothing is asked about.
    #[inline]
    pub(in crate::rc) fn is_open(&self) -> bool {
        !self.probes() && !self.peer_silent && !self.is_selective()
    }

    /// Packets that are lost and have not gone again.
    #[inline]
    pub(in crate::rc) fn lost(&self) -> u32 {
        self.scoreboard.as_ref().map_or(0, |board| board.due())
    }

    /// Whether the next lost packet that goes again asks, whether or not it did at first.
    #[inline]
    pub(in crate::rc) fn lost_probes(&self) -> bool {
        self.scoreboard.as_ref().is_some_and(|board| board.probes())
    }
}
