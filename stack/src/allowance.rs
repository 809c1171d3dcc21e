//! How often something may be done: a number of times at once, and once more after each unit of
//! time.

use crate::types::Time;

/// An allowance that grows with the time, up to a limit.
#[derive(Debug)]
pub struct Allowance {
    max: u32,
    unit: u64,
    left: u32,
    /// Time of the last growth.
    since: Time,
}

impl Allowance {
    /// A full allowance of `max`, which grows by one in `unit` nanoseconds.
    ///
    /// # Panics
    /// If the unit is 0.
    #[must_use]
    pub const fn new(max: u32, unit: u64) -> Self {
        assert!(unit > 0, "it grows in time");
        Self { max, unit, left: max, since: Time(0) }
    }

    /// Takes one, unless none is left.
    pub fn take(&mut self, now: Time) -> bool {
        let grown = now.since(self.since) / self.unit;
        let left = self.left.saturating_add(u32::try_from(grown).unwrap_or(u32::MAX));
        self.left = self.max.min(left);
        // The rest of a unit counts for the next one, unless the allowance is full.
        self.since = if self.left == self.max { now } else { self.since.after(grown * self.unit) };
        let granted = self.left > 0;
        self.left -= u32::from(granted);
        granted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn taken(of: &mut Allowance, at: u64, times: usize) -> usize {
        (0..times).filter(|_| of.take(Time(at))).count()
    }

    #[test]
    fn what_was_used_up_comes_back_slowly() {
        let mut fresh = Allowance::new(64, 10 * MS);
        for (ms, expected) in [(1000, 64), (1005, 0), (1030, 3), (60_000, 64)] {
            assert_eq!(taken(&mut fresh, ms * MS, 1000), expected, "{ms}");
        }
    }

    /// The length of the pauses makes no difference: each unit that passes grants one question.
    #[test]
    fn what_comes_back_does_not_depend_on_how_often_one_asks() {
        const UNIT: u64 = 10 * MS;
        for pause in [1, 999_999, 7 * MS, UNIT - 1, UNIT, UNIT + 1, 3 * UNIT / 2, 7 * UNIT + 1] {
            let (mut fresh, start) = (Allowance::new(64, UNIT), 1000 * UNIT);
            assert_eq!(taken(&mut fresh, start, 1000), 64);
            // Each pause asks often enough to take all that has come back.
            let asks = usize::try_from(pause / UNIT).unwrap() + 1;
            let pauses = (500 * UNIT / pause).min(20_000);
            let granted: usize =
                (1..=pauses).map(|n| taken(&mut fresh, start + n * pause, asks)).sum();
            assert_eq!(granted as u64, pauses * pause / UNIT, "every {pause} ns");
        }
    }

    #[test]
    fn a_full_allowance_saves_nothing_up() {
        let mut fresh = Allowance::new(64, 10 * MS);
        let mut granted = |ms| taken(&mut fresh, ms * MS, 100);
        let all = [60_009, 60_018, 60_019, 60_028, 60_029].map(&mut granted);
        assert_eq!(all, [64, 0, 1, 0, 1]);
    }

    #[test]
    fn a_clock_that_goes_back_or_ends_gives_nothing_for_nothing() {
        let mut fresh = Allowance::new(2, MS);
        let mut granted = |at| taken(&mut fresh, at, 10);
        let all = [5 * MS, 4 * MS, 5 * MS, 6 * MS, u64::MAX, u64::MAX].map(&mut granted);
        assert_eq!(all, [2, 0, 0, 1, 2, 0]);
    }
}
