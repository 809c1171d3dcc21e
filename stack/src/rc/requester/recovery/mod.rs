//! Loss recovery: the lost packets that go again alone, and the purpose of the next packet beside
//! its data.
//!
//! - Problem: a lost packet that nothing follows is never reported; a receiver that is full, dead
//!   or slow looks alike.
//! - Rule: a report repairs ([`scoreboard`]); silence is probed, first by a tail-loss probe, then
//!   by the ACK timeout.
//! - Cost if wrong: every loss costs a timeout, or retransmissions flood a slow receiver.
//! - Measured: `stack/tests/goodput/goodput.txt`, and the table of losses in
//!   `docs/performance/results.md`.

mod scoreboard;

pub(super) use self::scoreboard::News;
use self::scoreboard::Scoreboard;
use crate::tuning::go_back::BEHIND;
use crate::types::{Seq, Time};

/// The purpose of the next packet beside its data. It asks for an acknowledgement, and neither
/// congestion nor a lack of credit holds it back.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Probe {
    #[default]
    Nothing,
    /// The last packets did not ask, and the packet that was to ask in their place cannot be sent.
    Unasked,
    /// Nothing came back for several round trips (RFC 8985, tail-loss probe).
    Tail,
    /// The ACK timeout expired, or credit did not come in that time.
    Timeout,
}

/// The known losses.
#[derive(Debug)]
pub(super) struct Recovery {
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
    /// The PSN that was lost last, and the number of times that it was lost again.
    psn: Seq,
    times: u32,
    at: Time,
}

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
    pub(super) fn probes(&self) -> bool {
        self.probe != Probe::Nothing
    }

    /// Whether the next packet is only a tail-loss probe: it is no retransmission for a loss.
    #[inline]
    pub(super) fn is_tail_probe(&self) -> bool {
        self.probe == Probe::Tail
    }

    /// The next packet probes, or it does not.
    #[inline]
    pub(super) fn set_probe(&mut self, probe: Probe) {
        self.probe = probe;
    }

    /// Whether the ACK timeout expired, and nothing was acknowledged since.
    #[inline]
    pub(super) fn peer_is_silent(&self) -> bool {
        self.peer_silent
    }

    /// The ACK timeout expired. Any retransmission is due again.
    pub(super) fn on_timeout(&mut self) {
        (self.peer_silent, self.implied) = (true, NONE);
    }

    /// Something was acknowledged.
    #[inline]
    pub(super) fn on_ack(&mut self) {
        (self.peer_silent, self.implied) = (false, NONE);
        self.back.times = 0;
    }

    /// Everything from the packet `psn` on goes again, because that was lost. `false` if it went
    /// again within a `round_trip`: the NAK is older than the retransmission in flight.
    pub(super) fn goes_back(&mut self, psn: Seq, now: Time, round_trip: u64) -> bool {
        if self.has_gone_back(psn, now, round_trip) {
            return false;
        }
        let times = if self.back.psn == psn { self.back.times + 1 } else { 0 };
        self.back = GoBack { psn, times, at: now };
        true
    }

    /// Whether `psn` was lost before, within a `round_trip`: its retransmission is in flight.
    pub(super) fn has_gone_back(&self, psn: Seq, now: Time, round_trip: u64) -> bool {
        self.back.psn == psn && now.since(self.back.at) < round_trip
    }

    /// Number of packets that may follow the first unacknowledged one: few, and ever fewer, if its
    /// retransmission was lost again and again, because all packets behind it went in vain.
    #[inline]
    pub(super) fn behind_the_lost(&self) -> u64 {
        match self.back.times {
            0 => u64::MAX,
            times => BEHIND >> times.min(8),
        }
    }

    /// Whether a response that overtook `expected` should make the requester go back: once, until
    /// something is acknowledged.
    pub(super) fn implied_nak(&mut self, expected: Seq) -> bool {
        core::mem::replace(&mut self.implied, expected) != expected
    }

    /// Whether nothing is known to be lost, and nothing is probed.
    #[inline]
    pub(super) fn is_open(&self) -> bool {
        !self.probes() && !self.peer_silent && !self.is_selective()
    }

    /// Packets that are lost and have not gone again.
    #[inline]
    pub(super) fn lost(&self) -> u32 {
        self.scoreboard.as_ref().map_or(0, |board| board.due())
    }

    /// Whether the next lost packet that goes again asks, whether or not it did at first.
    #[inline]
    pub(super) fn lost_probes(&self) -> bool {
        self.scoreboard.as_ref().is_some_and(|board| board.probes())
    }
}
