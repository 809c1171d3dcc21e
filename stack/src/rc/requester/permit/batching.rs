//! Small messages wait while enough is in flight, so that super-packets are filled.
//!
//! - Problem: the cost is that of super-packets. A message that is posted when an acknowledgement
//!   of another comes in would leave alone, be acknowledged alone, and make the next leave alone.
//! - Rule: while at least two runs, or half a window, are in flight, a message waits until there is
//!   a run to send or less is in flight. Meanwhile no run begins that the window would cut short;
//!   `CreditAccount::withholds` is the rule for the receiver's room, which queue pairs share.
//! - Cost if wrong: half of the rate of small messages, or latency where little is in flight.
//! - Measured: `docs/performance/method.md`.

use crate::peer::RunLimits;
use crate::tuning::batching::{ENABLED, RUNS_IN_FLIGHT, RUNS_OF_WINDOW};

/// How far the run is that is being sent: packets of one size, of which only the last may be
/// shorter.
#[derive(Debug, Default)]
pub(in crate::rc::requester) struct Batch {
    /// Packets that may still join, and the longest of them; both 0 if none may.
    left: u32,
    size: u32,
}

impl Batch {
    /// Another turn begins, and with it another run.
    #[inline]
    pub(in crate::rc::requester) fn begin(&mut self) {
        *self = Self::default();
    }

    /// Whether a packet of `bytes` bytes would continue the run.
    #[inline]
    pub(super) fn is_joined_by(&self, bytes: u32) -> bool {
        bytes <= self.size
    }

    /// Whether a packet of `bytes` bytes would be the last of its run, if others follow or not.
    #[inline]
    pub(in crate::rc::requester) fn is_ended_by(&self, bytes: u32, runs: RunLimits) -> bool {
        match self.is_joined_by(bytes) {
            true => self.left == 1 || bytes < self.size,
            false => runs.packets_of(bytes) == 1,
        }
    }

    /// A packet of `bytes` bytes left.
    #[inline]
    pub(in crate::rc::requester) fn sent(&mut self, bytes: u32, runs: RunLimits) {
        if !self.is_joined_by(bytes) {
            (self.left, self.size) = (runs.packets_of(bytes), bytes);
        }
        self.left -= 1;
        if self.left == 0 || bytes < self.size {
            self.begin();
        }
    }

    /// The reason why a packet of `bytes` bytes should wait, if `queued` packets are to be sent,
    /// and `in_flight` of the `window` are in flight; `begins` if it is the first of a message. If
    /// it need not wait, because there is a run to send: the number of packets that must have room.
    #[inline]
    pub(super) fn awaited(
        &self,
        bytes: u32,
        runs: RunLimits,
        begins: bool,
        queued: u64,
        in_flight: u32,
        window: u32,
    ) -> Awaited {
        if !ENABLED || self.is_joined_by(bytes) {
            return Awaited::Nothing;
        }
        let run = runs.packets_of(bytes);
        if in_flight < (RUNS_IN_FLIGHT * run).min(window / 2).max(2) {
            return Awaited::Nothing;
        }
        if begins && queued < u64::from(run) {
            return Awaited::Messages;
        }
        // Of a window of few runs every packet counts, and the rest of it may be all there is.
        if window < RUNS_OF_WINDOW * run {
            return Awaited::Nothing;
        }
        let packets = run.min(u32::try_from(queued).unwrap_or(u32::MAX));
        if in_flight + packets > window { Awaited::Window } else { Awaited::Room(packets) }
    }
}

/// The reason why a packet should wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Awaited {
    Nothing,
    /// More to send.
    Messages,
    /// Acknowledgements.
    Window,
    /// Room for this number of packets at the receiver.
    Room(u32),
}

#[cfg(test)]
mod tests {
    use super::*;

    const FULL: u32 = 4096 + 16;
    /// Fifteen of those are a run.
    const RUNS: RunLimits = RunLimits { bytes: 65_470, packets: 64 };

    fn waits(batch: &Batch, queued: u64, under_way: u32, window: u32) -> bool {
        matches!(
            batch.awaited(FULL, RUNS, true, queued, under_way, window),
            Awaited::Messages | Awaited::Window
        )
    }

    #[test]
    fn nothing_waits_while_little_is_under_way() {
        let batch = Batch::default();
        assert!(!waits(&batch, 1, 29, 512));
        assert!(waits(&batch, 1, 30, 512));
        assert!(!waits(&batch, 15, 30, 512), "a run is there");
        assert!(!waits(&batch, 1, 7, 16));
        assert!(waits(&batch, 1, 8, 16), "half a window");
        assert!(!waits(&batch, 1, 1, 2));
    }

    #[test]
    fn a_run_that_was_begun_is_not_cut_short() {
        let mut batch = Batch::default();
        for _ in 0..14 {
            batch.sent(FULL, RUNS);
            assert!(!waits(&batch, 1, 100, 512));
        }
        batch.sent(FULL, RUNS);
        assert!(waits(&batch, 1, 100, 512));
        batch.sent(FULL, RUNS);
        batch.begin();
        assert!(waits(&batch, 1, 100, 512));
    }

    #[test]
    fn the_first_packet_of_a_write_is_larger_so_the_second_ends_its_run() {
        let mut batch = Batch::default();
        batch.sent(FULL + 16, RUNS);
        assert!(batch.is_joined_by(FULL) && !batch.is_joined_by(FULL + 17));
        batch.sent(FULL, RUNS);
        assert!(!batch.is_joined_by(FULL) && !batch.is_joined_by(1));
        batch.sent(FULL, RUNS);
        assert!(batch.is_joined_by(FULL) && !batch.is_joined_by(FULL + 16));
    }

    #[test]
    fn the_last_packet_of_a_run_ends_it() {
        let mut batch = Batch::default();
        for _ in 0..14 {
            assert!(!batch.is_ended_by(FULL, RUNS));
            batch.sent(FULL, RUNS);
        }
        assert!(batch.is_ended_by(FULL, RUNS));
        assert!(!batch.is_ended_by(FULL + 1, RUNS), "it begins a run");
        assert!(batch.is_ended_by(RUNS.bytes, RUNS), "a run of one");
        batch.begin();
        batch.sent(FULL, RUNS);
        assert!(batch.is_ended_by(FULL - 1, RUNS), "a shorter one is the last");
    }

    #[test]
    fn a_run_begins_only_if_the_window_takes_all_of_it() {
        let batch = Batch::default();
        let awaited = |queued, under_way| batch.awaited(FULL, RUNS, false, queued, under_way, 64);
        let small = |under_way| batch.awaited(FULL, RUNS, false, 200, under_way, 59);
        assert_eq!(small(58), Awaited::Nothing, "a window of few runs");
        assert_eq!(awaited(200, 29), Awaited::Nothing, "little is under way");
        assert_eq!(awaited(200, 49), Awaited::Room(15));
        assert_eq!(awaited(200, 50), Awaited::Window);
        assert_eq!(awaited(3, 61), Awaited::Room(3), "the end of a message is less than a run");
        assert_eq!(awaited(3, 62), Awaited::Window);
    }
}
