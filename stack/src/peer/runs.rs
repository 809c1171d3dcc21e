//! The number of datagrams in a run: a super-packet, or a datagram that travels alone.
//!
//! A super-packet takes one place of a ring, or of a socket's memory little more than its bytes.
//! Interfaces, routers and bridges join datagrams or take them apart, and change that without
//! notice. So an estimate is of recent runs, and begins with datagrams that travel one by one.

use crate::budget::Budget;
use crate::tuning::long_runs::{
    BYTES_STEP, DATAGRAMS_MAX, EIGHTHS_MAX, LENGTH_MAX, MARGIN, RECENT, RUN_COST,
};
use crate::tuning::runs;

/// The longest run that leaves at once: packets of one size, of which only the last may be shorter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunLimits {
    /// Bytes of all packets together, BTH to ICRC.
    pub bytes: u32,
    /// Packets, at least 1.
    pub packets: u32,
}

impl Default for RunLimits {
    /// The longest super-packet that Linux sends.
    fn default() -> Self {
        Self { bytes: runs::BYTES, packets: runs::PACKETS }
    }
}

impl RunLimits {
    /// Packets of `bytes` bytes (BTH to ICRC) that a run holds, at least 1.
    #[inline]
    #[must_use]
    pub fn packets_of(self, bytes: u32) -> u32 {
        (self.bytes / bytes.max(1)).min(self.packets).max(1)
    }
}

/// The datagrams of recent runs.
#[derive(Debug)]
pub(super) struct RunEstimate {
    runs: u64,
    datagrams: u64,
    bytes: u64,
    length: RunLength,
}

/// The length of runs, rounded so that it seldom changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RunLength {
    /// Datagrams of a run, [`LENGTH_MAX`] at most.
    pub(super) datagrams: u32,
    /// Eighths of its budget that a socket's memory holds of such runs, 8 at least.
    pub(super) eighths: u32,
    /// Bytes of a datagram.
    pub(super) bytes: u32,
}

impl Default for RunLength {
    fn default() -> Self {
        Self { datagrams: 1, eighths: 8, bytes: 0 }
    }
}

impl Default for RunEstimate {
    fn default() -> Self {
        let length = RunLength::default();
        Self { runs: RECENT / 2, datagrams: RECENT / 2, bytes: 0, length }
    }
}

impl RunEstimate {
    /// Takes `datagrams` of `bytes` in all into account, which travelled in `runs`. Returns whether
    /// that changes [`length`](Self::length).
    #[inline]
    pub(super) fn add(&mut self, runs: u32, datagrams: u32, bytes: u64) -> bool {
        // Datagrams that travel one by one, as all did before, change nothing.
        (runs != datagrams || self.runs != self.datagrams) && self.add_runs(runs, datagrams, bytes)
    }

    fn add_runs(&mut self, runs: u32, datagrams: u32, bytes: u64) -> bool {
        let datagrams = datagrams.clamp(runs, runs.saturating_mul(DATAGRAMS_MAX));
        self.runs += u64::from(runs);
        self.datagrams += u64::from(datagrams);
        self.bytes = self.bytes.saturating_add(bytes);
        if self.runs <= RECENT {
            return false;
        }
        while self.runs > RECENT {
            self.runs = self.runs.div_ceil(2);
            self.datagrams = (self.datagrams / 2).max(self.runs);
            self.bytes /= 2;
        }
        let length = self.measure();
        std::mem::replace(&mut self.length, length) != length
    }

    #[inline]
    pub(super) fn length(&self) -> RunLength {
        self.length
    }

    /// Places that `datagrams` will take, which travel together: a rest takes one, too.
    pub(super) fn places_of(&self, datagrams: u32) -> u32 {
        let places = scale(datagrams, self.runs * MARGIN.0, self.datagrams * MARGIN.1);
        places.saturating_add(1).min(datagrams)
    }

    /// Datagrams that `places` will hold.
    pub(super) fn datagrams_in(&self, places: u32) -> u32 {
        scale(places, self.datagrams * MARGIN.1, self.runs * MARGIN.0).max(places)
    }

    fn measure(&self) -> RunLength {
        let datagrams = (self.datagrams + self.runs / 2) / self.runs;
        if datagrams < 2 {
            return RunLength::default();
        }
        let charged = self.bytes.saturating_add(self.runs * RUN_COST) / self.datagrams;
        let mean = self.bytes / self.datagrams;
        // Lengths differ, and the cost of their mean is not the mean of their costs. So the length
        // is a little below the mean, below a step of the cost, and the cost seven eighths of it.
        let bytes = u32::try_from(mean - mean / 32).unwrap_or(u32::MAX);
        let eighths = 7 * u64::from(Budget::cost(bytes)) / charged.max(1);
        RunLength {
            datagrams: datagrams.min(LENGTH_MAX) as u32,
            eighths: eighths.clamp(8, EIGHTHS_MAX) as u32,
            bytes: bytes / BYTES_STEP * BYTES_STEP,
        }
    }
}

fn scale(value: u32, numerator: u64, denominator: u64) -> u32 {
    u32::try_from(u64::from(value) * numerator / denominator).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_ends_where_a_limit_is_reached() {
        let limits = RunLimits::default();
        let sizes = [4112, 1040, 1023, 1022, 80, 1, 0, 65_470, 65_471, u32::MAX];
        let packets = sizes.map(|bytes| limits.packets_of(bytes));
        assert_eq!(packets, [15, 62, 63, 64, 64, 64, 64, 1, 1, 1]);
        let none = RunLimits { bytes: 0, packets: 0 };
        assert_eq!(none.packets_of(80), 1);
        assert_eq!(RunLimits { bytes: 8192, packets: 4 }.packets_of(80), 4);
        assert_eq!(RunLimits { bytes: 8192, packets: 4 }.packets_of(4112), 1);
    }

    fn places_of(runs: &RunEstimate, datagrams: u32) -> (u32, u32) {
        (runs.places_of(datagrams), runs.datagrams_in(datagrams))
    }

    #[test]
    fn without_a_report_datagrams_travel_one_by_one() {
        let runs = RunEstimate::default();
        for count in [1, 2, 15, 1000, u32::MAX] {
            assert_eq!(places_of(&runs, count), (count, count));
        }
        assert_eq!(runs.length(), RunLength::default());
    }

    #[test]
    fn places_follow_recent_runs_and_stay_on_the_safe_side() {
        let mut runs = RunEstimate::default();
        for _ in 0..200 {
            runs.add(1, 12, 0);
        }
        assert_eq!([1, 12, 48].map(|count| runs.places_of(count)), [1, 2, 6]);
        assert!((400..=48 * 12 * 3 / 4).contains(&runs.datagrams_in(48)), "{runs:?}");
        // They travel one by one.
        runs.add(64, 64, 0);
        assert!(runs.places_of(48) > 12 && runs.datagrams_in(48) < 200, "{runs:?}");
        for _ in 0..10 {
            runs.add(64, 64, 0);
        }
        assert_eq!(places_of(&runs, 48), (48, 48), "{runs:?}");
    }

    #[test]
    fn many_runs_at_once_count_as_they_are() {
        let mut runs = RunEstimate::default();
        for _ in 0..10 {
            runs.add(256, 256, 0);
        }
        assert_eq!(places_of(&runs, 48), (48, 48), "{runs:?}");
        for _ in 0..10 {
            runs.add(256, 2560, 0);
        }
        assert!((350..=48 * 10 * 3 / 4).contains(&runs.datagrams_in(48)), "{runs:?}");
    }

    #[test]
    fn impossible_numbers_do_no_harm() {
        let mut runs = RunEstimate::default();
        for (datagrams, count) in [(0, 0), (0, 9), (u32::MAX, 1), (u32::MAX, u32::MAX), (5, 0)] {
            runs.add(count, datagrams, u64::MAX / 2);
            assert!(runs.runs > 0 && runs.datagrams >= runs.runs);
            assert!(runs.places_of(1000) >= 1000 / DATAGRAMS_MAX);
            assert!((8..=EIGHTHS_MAX as u32).contains(&runs.measure().eighths));
        }
    }

    #[test]
    fn a_socket_is_never_taken_to_hold_more_bytes_than_are_there() {
        // For each length, super-packets of `each` datagrams: the kernel's charge for them fits
        // wherever their stretched cost does.
        let step = if cfg!(miri) { 997 } else { 1 };
        for len in (16..=4200_u32).step_by(step) {
            for each in (2..=(60_000 / len).min(64)).step_by(step.min(20)) {
                let mut runs = RunEstimate::default();
                for _ in 0..200 {
                    runs.add(1, each, u64::from(each * len));
                }
                let length = runs.length();
                let charged = u64::from(each * Budget::cost(len)) * 8;
                let real = u64::from(each * len) + RUN_COST - 30;
                assert!(
                    length.eighths == 8 || real * u64::from(length.eighths) <= charged,
                    "{each} of {len}: {length:?}"
                );
            }
        }
    }

    #[test]
    fn the_length_follows_recent_runs() {
        let mut runs = RunEstimate::default();
        let long = |eighths, bytes| RunLength { datagrams: 8, eighths, bytes };
        (0..200).for_each(|_| _ = runs.add(4, 60, 60 * 4112));
        assert_eq!(runs.length(), long(14, 3968));
        // So long that their bytes are nearly their cost.
        (0..200).for_each(|_| _ = runs.add(1, 16, 16 * 3600));
        assert_eq!(runs.length(), long(8, 3456));
        assert!(runs.add(1000, 1000, 1000 * 3600));
        assert_eq!(runs.length(), RunLength::default());
        // Nothing is left of it, even without a look in between.
        (0..9).for_each(|_| assert!(!runs.add(64, 64, 64 * 3600)));
        assert_eq!(places_of(&runs, 48), (48, 48));
    }
}
