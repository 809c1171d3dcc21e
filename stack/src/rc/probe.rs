//! The tail-loss probe: when an answer is overdue by the measure of earlier ones, the oldest unacknowledged packet is sent
//! again, long before the timeout and without spending a retry.
//!
//! After a lost NAK the responder is silent, and after a lost last packet it does not know. The answer to the probe tells
//! which it was: if it covers the probe alone, everything behind it is lost too.

use crate::types::Time;

/// No probe leaves earlier after the last sign of progress: the peer may be busy, or asleep for a moment.
const DELAY_MIN: u64 = 1_000_000;

/// Doublings of the delay at most; the timeout comes first.
const DOUBLINGS_MAX: u32 = 16;

/// What a requester knows of the time that answers take.
#[derive(Debug, Default)]
pub(crate) struct Probe {
    /// Smoothed, in nanoseconds; 0 before the first sample.
    round_trip: u64,
    /// Its mean deviation.
    deviation: u64,
    /// A packet under way that is measured: its PSN, and when it left.
    sample: Option<(u64, Time)>,
    /// Probes since the last progress.
    doublings: u32,
    /// The PSN of the probe whose answer is expected.
    pending: Option<u64>,
}

impl Probe {
    /// A packet that asks for an answer left for the first time.
    #[inline]
    pub(crate) fn sent(&mut self, psn: u64, now: Time) {
        if self.sample.is_none() {
            self.sample = Some((psn, now));
        }
    }

    /// Everything before `to` is acknowledged. Whether that is the probe and nothing behind it.
    #[inline]
    pub(crate) fn acknowledged(&mut self, to: u64, now: Time) -> bool {
        if let Some((psn, left)) = self.sample
            && psn < to
        {
            self.sample = None;
            self.measured(now.since(left));
        }
        self.doublings = 0;
        self.pending.take().is_some_and(|psn| psn + 1 == to)
    }

    /// Packets are sent again: an answer could be to either.
    pub(crate) fn forget(&mut self) {
        self.sample = None;
        self.pending = None;
    }

    /// The oldest unacknowledged packet, `psn`, is probed.
    pub(crate) fn probed(&mut self, psn: u64) {
        self.sample = None;
        self.pending = Some(psn);
        self.doublings = (self.doublings + 1).min(DOUBLINGS_MAX);
    }

    /// How long after the last progress to probe; `None` before anything was measured.
    #[inline]
    pub(crate) fn delay(&self) -> Option<u64> {
        if self.round_trip == 0 {
            return None;
        }
        let usual = self.round_trip + self.round_trip.max(4 * self.deviation);
        Some(usual.max(DELAY_MIN) << self.doublings)
    }

    fn measured(&mut self, nanoseconds: u64) {
        let nanoseconds = nanoseconds.max(1);
        if self.round_trip == 0 {
            (self.round_trip, self.deviation) = (nanoseconds, nanoseconds / 2);
            return;
        }
        // The usual weights: an eighth for the mean, a quarter for the deviation.
        let error = nanoseconds.abs_diff(self.round_trip);
        self.deviation = (3 * self.deviation + error) / 4;
        self.round_trip = ((7 * self.round_trip + nanoseconds) / 8).max(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_knows_nothing_before_the_first_answer() {
        let mut probe = Probe::default();
        assert_eq!(probe.delay(), None);
        probe.sent(5, Time(100));
        assert!(!probe.acknowledged(5, Time(200)));
        assert_eq!(probe.delay(), None);
        assert!(!probe.acknowledged(6, Time(5_000_100)));
        assert_eq!(probe.delay(), Some(15_000_000));
    }

    #[test]
    fn fast_answers_do_not_make_it_nervous_and_silence_makes_it_patient() {
        let mut probe = Probe::default();
        for psn in 0..100 {
            probe.sent(psn, Time(psn * 1000));
            probe.acknowledged(psn + 1, Time(psn * 1000 + 20));
        }
        assert_eq!(probe.delay(), Some(DELAY_MIN));
        probe.probed(100);
        probe.probed(100);
        assert_eq!(probe.delay(), Some(4 * DELAY_MIN));
        assert!(probe.acknowledged(101, Time(1 << 30)));
        assert_eq!(probe.delay(), Some(DELAY_MIN));
    }

    #[test]
    fn what_was_sent_twice_is_not_measured() {
        let mut probe = Probe::default();
        probe.sent(1, Time(0));
        probe.forget();
        probe.acknowledged(2, Time(1 << 40));
        assert_eq!(probe.delay(), None);
    }
}
