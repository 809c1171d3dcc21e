//! How long requests waited: a histogram of some hundred bytes.

use std::time::Duration;

/// Each power of two of microseconds has this number of buckets, as a power of two.
const PART_BITS: u32 = 3;
const PARTS: u64 = 1 << PART_BITS;
/// The last bucket begins above two minutes: a request waits one at most.
const BUCKETS: usize = 200;

/// The bounds of a histogram in seconds.
const BOUNDS: [f64; 14] =
    [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, f64::INFINITY];

/// The times of requests, each within an eighth.
#[derive(Debug, Clone)]
pub(crate) struct Waits {
    buckets: [u32; BUCKETS],
    count: u64,
    sum_us: u64,
    max_us: u64,
}

impl Default for Waits {
    fn default() -> Self {
        Self { buckets: [0; BUCKETS], count: 0, sum_us: 0, max_us: 0 }
    }
}

impl Waits {
    /// Adds the time of a request.
    pub(crate) fn add(&mut self, time: Duration) {
        let us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let bucket = &mut self.buckets[bucket_of(us)];
        *bucket = bucket.saturating_add(1);
        self.count += 1;
        self.sum_us = self.sum_us.saturating_add(us);
        self.max_us = self.max_us.max(us);
    }

    /// Half of all waited no longer.
    pub(crate) fn median_us(&self) -> u64 {
        self.quantile_us(50)
    }

    /// 99 of 100 waited no longer.
    pub(crate) fn p99_us(&self) -> u64 {
        self.quantile_us(99)
    }

    /// The longest.
    pub(crate) fn max_us(&self) -> u64 {
        self.max_us
    }

    pub(crate) fn mean_us(&self) -> u64 {
        self.sum_us / self.count.max(1)
    }

    /// Seconds in all, the number of requests, and their number up to each of [`BOUNDS`] from the
    /// one before; a request counts where its eighth ends.
    pub(crate) fn histogram(&self) -> (f64, u64, Vec<(f64, u64)>) {
        let mut rest = self.buckets.iter().enumerate().peekable();
        let mut below = |bound: f64| {
            let mut sum = 0;
            let fits = |at: usize| end_of(at) as f64 <= bound * 1e6;
            while let Some((_, count)) = rest.next_if(|(at, _)| fits(*at)) {
                sum += u64::from(*count);
            }
            sum
        };
        let buckets: Vec<_> = BOUNDS.iter().map(|bound| (*bound, below(*bound))).collect();
        let count = self.buckets.iter().map(|count| u64::from(*count)).sum();
        (self.sum_us as f64 / 1e6, count, buckets)
    }

    fn quantile_us(&self, percent: u64) -> u64 {
        let all: u64 = self.buckets.iter().map(|count| u64::from(*count)).sum();
        let wanted = (all * percent).div_ceil(100);
        let mut below = 0;
        let bucket = self.buckets.iter().position(|count| {
            below += u64::from(*count);
            below >= wanted
        });
        bucket.map_or(0, end_of).min(self.max_us)
    }
}

fn bucket_of(us: u64) -> usize {
    let Some(shift) = us.checked_ilog2().and_then(|log| log.checked_sub(PART_BITS)) else {
        return us as usize;
    };
    let bucket = (u64::from(shift) << PART_BITS) + (us >> shift);
    usize::try_from(bucket).unwrap_or(usize::MAX).min(BUCKETS - 1)
}

/// The longest time of a bucket.
fn end_of(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    if bucket < PARTS {
        return bucket;
    }
    let shift = (bucket >> PART_BITS) - 1;
    ((bucket - (shift << PART_BITS) + 1) << shift) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_in_the_bucket_that_ends_an_eighth_later_at_most() {
        for us in (0..5000).chain((0..25).flat_map(|log| [(1 << log) - 1, 1 << log, 3 << log])) {
            let end = end_of(bucket_of(us));
            assert!(end >= us && end - us <= us / 8, "{us}: {end}");
        }
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
        assert!(end_of(BUCKETS - 2) > 120_000_000, "{}", end_of(BUCKETS - 2));
    }

    #[test]
    fn a_histogram_has_each_request_once() {
        let mut waits = Waits::default();
        let times: Vec<Duration> =
            (0..200).map(|nth| Duration::from_micros(1 << (nth % 27))).collect();
        times.iter().for_each(|time| waits.add(*time));
        let (sum, count, buckets) = waits.histogram();
        assert!((sum - times.iter().sum::<Duration>().as_secs_f64()).abs() < 1e-6);
        assert_eq!((count, buckets.iter().map(|(_, count)| count).sum()), (200, 200));
        let mut below = 0;
        for (bound, count) in buckets {
            below += count;
            let least = times.iter().filter(|time| time.as_secs_f64() * 1.125 <= bound).count();
            let most = times.iter().filter(|time| time.as_secs_f64() <= bound).count();
            assert!((least as u64..=most as u64).contains(&below), "{bound}: {below}");
        }
    }

    #[test]
    fn a_bucket_that_is_full_stays_so() {
        let mut waits = Waits::default();
        waits.buckets[bucket_of(5)] = u32::MAX - 1;
        (0..3).for_each(|_| waits.add(Duration::from_micros(5)));
        waits.add(Duration::from_secs(1));
        assert_eq!((waits.median_us(), waits.p99_us()), (5, 5));
        assert_eq!(waits.histogram().1, u64::from(u32::MAX) + 1);
    }

    #[test]
    fn quantiles_are_those_of_the_times() {
        let mut waits = Waits::default();
        let none = (waits.median_us(), waits.p99_us(), waits.max_us(), waits.mean_us());
        assert_eq!(none, (0, 0, 0, 0));
        waits.add(Duration::from_micros(7));
        assert_eq!((waits.median_us(), waits.p99_us()), (7, 7), "of one");
        let mut waits = Waits::default();
        (1..=1000).for_each(|ms| waits.add(Duration::from_millis(ms)));
        let near = |value: u64, wanted: u64| (wanted..=wanted + wanted / 8).contains(&value);
        assert!(near(waits.median_us(), 500_000), "{}", waits.median_us());
        assert!(near(waits.p99_us(), 990_000), "{}", waits.p99_us());
        assert_eq!((waits.max_us(), waits.mean_us()), (1_000_000, 500_500));
        waits.add(Duration::MAX);
        assert_eq!(waits.max_us(), u64::MAX);
    }
}
