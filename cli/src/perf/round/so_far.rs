//! The result so far of a measurement, also if it ends early.

use std::time::Duration;

use hdrhistogram::Histogram;

use crate::measure::{self, BulkResult};
use crate::perf::interval::Meter;
use crate::perf::table::{Bandwidth, Latency, Row};
use crate::perf::test::Test;

/// The result so far of a measurement.
pub(super) struct SoFar {
    pub(super) bulk: BulkResult,
    peak: Peak,
    pub(super) times: Histogram<u64>,
    /// Whether the messages before the measured ones have passed.
    pub(super) warm: bool,
    /// Messages that did not arrive.
    pub(super) lost: Option<u64>,
    /// The counts for the lines of intervals.
    pub(super) meter: Option<Meter>,
}

impl SoFar {
    /// Nothing.
    pub(super) fn new(meter: Option<Meter>) -> Self {
        Self {
            bulk: BulkResult::default(),
            peak: Peak::default(),
            times: measure::histogram(),
            warm: false,
            lost: None,
            meter,
        }
    }

    /// Takes in the whole so far.
    pub(super) fn observe(&mut self, result: &BulkResult) {
        self.peak.observe(result);
        self.bulk = *result;
        if let Some(meter) = &self.meter {
            meter.observe(result);
        }
    }

    /// The row of `test`, with messages of `bytes` bytes; none if nothing has been measured.
    pub(super) fn row(&self, test: Test, bytes: usize) -> Option<Row> {
        let Self { bulk, peak, times, lost, .. } = self;
        if !test.is_bandwidth() {
            return (!times.is_empty()).then(|| Row::Latency(Latency::new(bytes, times)));
        }
        let gbps = bulk.gbps();
        (bulk.messages > 0).then(|| {
            Row::Bandwidth(Bandwidth {
                bytes,
                messages: bulk.messages,
                seconds: bulk.elapsed.as_secs_f64(),
                gbps_peak: peak.best.max(gbps),
                gbps,
                mpps: bulk.mops(),
                lost: *lost,
            })
        })
    }
}

/// The best stretch of a run so far.
#[derive(Debug, Default)]
struct Peak {
    bytes: u64,
    at: Duration,
    best: f64,
}

impl Peak {
    /// Over shorter stretches the rate depends on the moments of polling.
    const STRETCH: Duration = Duration::from_millis(10);

    fn observe(&mut self, so_far: &BulkResult) {
        let time = so_far.elapsed - self.at;
        if time >= Self::STRETCH {
            let gbps = (so_far.bytes - self.bytes) as f64 * 8.0 / time.as_secs_f64() / 1e9;
            self.best = self.best.max(gbps);
            (self.bytes, self.at) = (so_far.bytes, so_far.elapsed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_stretch_is_found() {
        let mut peak = Peak::default();
        let at = |bytes, ms| BulkResult { messages: 1, bytes, elapsed: Duration::from_millis(ms) };
        for (bytes, ms) in [(1_000_000, 1), (12_500_000, 10), (37_500_000, 20), (40_000_000, 60)] {
            peak.observe(&at(bytes, ms));
        }
        assert!((peak.best - 20.0).abs() < 1e-9, "{peak:?}");
    }
}
