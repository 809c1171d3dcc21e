//! Congestion notifications (annex A17 of the InfiniBand specification \[M\]; Zhu et al.,
//! "Congestion Control for Large-Scale RDMA Deployments", 2015): the receiver of marked packets
//! sends notifications, and their sender then sends less.
//!
//! Switches mark packets whose sender declares them capable of it: with ECT(0) in the traffic class
//! (2), which is the program's to set.

use crate::tuning::ecn::{GAIN, PACE_NS};
use crate::types::Time;

/// The unit of [`Reaction::share`].
const ONE: u32 = 1 << 16;

/// The notifications of a receiver.
#[derive(Debug, Default)]
pub(in crate::rc) struct Notifier {
    pub(in crate::rc) due: bool,
    last: Option<Time>,
}

impl Notifier {
    /// A marked packet came. Returns whether a notification is due.
    pub(in crate::rc) fn marked(&mut self, now: Time) -> bool {
        if self.last.is_some_and(|last| now.since(last) < PACE_NS) {
            return false;
        }
        (self.due, self.last) = (true, Some(now));
        true
    }
}

/// The sender's reaction. The window takes the place of the rate, and its own growth that of
/// DCQCN's recovery. The window shrinks by half of the share of round trips in which there were
/// notifications, a moving average.
#[derive(Debug)]
pub(in crate::rc) struct Reaction {
    share: u32,
    /// When the share was brought up to date.
    at: Time,
}

impl Reaction {
    pub(in crate::rc) fn new() -> Self {
        Self { share: ONE, at: Time::default() }
    }

    /// A notification came. Returns the remainder of a window of `window` packets. At most once in
    /// a `round_trip`.
    pub(in crate::rc) fn notified(
        &mut self,
        now: Time,
        round_trip: u64,
        window: u32,
    ) -> Option<u32> {
        let period = round_trip.max(PACE_NS);
        let periods = now.since(self.at) / period;
        if periods == 0 {
            return None;
        }
        // More round trips without a notification make no difference.
        for _ in 1..periods.min(16 * u64::from(GAIN)) {
            self.share -= self.share / GAIN;
        }
        self.share += (ONE - self.share) / GAIN;
        self.at = now;
        let cut = u64::from(window) * u64::from(self.share) / u64::from(2 * ONE);
        Some(window - u32::try_from(cut).unwrap_or(window))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Time = Time(1 << 40);

    #[test]
    fn marks_are_answered_no_more_than_once_in_50_us() {
        let mut notifier = Notifier::default();
        assert!(notifier.marked(NOW));
        assert!(!notifier.marked(NOW.after(PACE_NS - 1)));
        assert!(notifier.marked(NOW.after(PACE_NS)));
    }

    #[test]
    fn a_first_notification_halves_and_rare_ones_hardly_matter() {
        let mut reaction = Reaction::new();
        // The first comes after a long time without: it is as if it were the first ever.
        reaction.at = NOW;
        assert_eq!(reaction.notified(NOW.after(100_000), 100_000, 1000), Some(500));
        assert_eq!(reaction.notified(NOW.after(199_999), 100_000, 1000), None, "one round trip");
        let later = NOW.after(100_000_000);
        let rare = reaction.notified(later, 100_000, 1000).expect("another round trip");
        assert!((960..=970).contains(&rare), "{rare}");
        let mut last = rare;
        for trip in 1..100 {
            last = reaction.notified(later.after(100_000 * trip), 100_000, 1000).expect("each");
        }
        assert!((500..=505).contains(&last), "marks in each round trip halve: {last}");
    }

    #[test]
    fn each_round_trip_without_marks_takes_a_sixteenth_of_the_share() {
        for (trips, left) in [(1, 500), (2, 530), (3, 557), (17, 802)] {
            let mut reaction = Reaction::new();
            reaction.at = NOW;
            let window = reaction.notified(NOW.after(100_000 * trips), 100_000, 1000);
            assert_eq!(window, Some(left), "one in {trips} round trips");
        }
    }
}
