//! The figures of each interval, printed while the measurement runs.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use serde::Serialize;
use serde_json::json;

use super::table::{Bandwidth, Latency, Row};
use crate::measure::{self, BulkResult, Times, record};
use crate::output::{Output, object};
use crate::ticks::Ticks;

/// Parses an interval of the command line, in seconds. Error: it is none from 0.1 to 86400.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.1..=86_400.0).contains(seconds));
    let seconds = seconds.ok_or("an interval is 0.1 to 86400 seconds")?;
    Ok(Duration::from_secs_f64(seconds))
}

/// Counts messages and bytes for the lines of the intervals.
#[derive(Debug, Clone)]
pub struct Meter(Arc<Counted>);

#[derive(Debug)]
struct Counted {
    messages: AtomicU64,
    /// The times of this interval's messages, of a latency.
    times: Mutex<Histogram<u64>>,
}

impl Meter {
    /// A meter that has counted nothing.
    #[must_use]
    pub fn started() -> Self {
        Self(Arc::new(Counted {
            messages: AtomicU64::new(0),
            times: Mutex::new(measure::histogram()),
        }))
    }

    /// All messages so far, of a bandwidth.
    pub fn observe(&self, so_far: &BulkResult) {
        self.0.messages.store(so_far.messages, Ordering::Relaxed);
    }
}

/// The times of a latency, which a meter may count.
pub struct Timed<'a> {
    /// All times.
    pub all: &'a mut Histogram<u64>,
    /// The meter.
    pub meter: Option<&'a Meter>,
}

impl Times for Timed<'_> {
    fn take(&mut self, time: Duration) {
        record(self.all, time);
        if let Some(meter) = self.meter {
            record(&mut meter.0.times.lock().unwrap_or_else(PoisonError::into_inner), time);
        }
    }
}

/// An interval in a line of `--json`.
#[derive(Debug, Serialize)]
struct Interval<'a> {
    /// Of this size, from 1.
    number: u32,
    /// Since the measurement of this size began.
    begin_seconds: f64,
    end_seconds: f64,
    #[serde(flatten)]
    row: &'a Row,
}

/// Prints a line for each interval from now until the result is dropped, with messages of `bytes`
/// bytes.
pub fn start(
    meter: Meter,
    length: Duration,
    bytes: usize,
    is_bandwidth: bool,
    out: Output,
) -> Ticks {
    let begin = Instant::now();
    let (mut before, mut messages) = (Duration::ZERO, 0);
    Ticks::start(length, move |number| {
        let now = begin.elapsed();
        let row = if is_bandwidth {
            let all = meter.0.messages.load(Ordering::Relaxed);
            let new = all - std::mem::replace(&mut messages, all);
            Row::Bandwidth(bandwidth(bytes, new, now - before))
        } else {
            let mut times = meter.0.times.lock().unwrap_or_else(PoisonError::into_inner);
            let times = std::mem::replace(&mut *times, measure::histogram());
            Row::Latency(Latency::new(bytes, &times))
        };
        print(number, [before, now], &row, out);
        before = now;
    })
}

fn bandwidth(bytes: usize, messages: u64, time: Duration) -> Bandwidth {
    let seconds = time.as_secs_f64();
    let gbps = messages as f64 * bytes as f64 * 8.0 / seconds / 1e9;
    let mpps = messages as f64 / seconds / 1e6;
    Bandwidth { bytes, messages, seconds, gbps_peak: gbps, gbps, mpps, lost: None }
}

fn print(number: u32, [begin, end]: [Duration; 2], row: &Row, out: Output) {
    let [begin_seconds, end_seconds] = [begin, end].map(|time| time.as_secs_f64());
    out.line(format_args!("{row}   {begin_seconds:.1}-{end_seconds:.1} s"));
    if out.json {
        let interval = Interval { number, begin_seconds, end_seconds, row };
        out.result(object("rocinante perf", json!({ "interval": interval })));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_seconds() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        assert_eq!(seconds("10"), Ok(Duration::from_secs(10)));
        for text in ["0", "0.01", "-1", "NaN", "inf", "1s", ""] {
            assert!(seconds(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_line_is_of_its_interval_alone() {
        let row = bandwidth(1000, 500, Duration::from_millis(500));
        assert!((row.gbps - 8e-3).abs() < 1e-12 && (row.mpps - 1e-3).abs() < 1e-12, "{row:?}");
        let row = Row::Bandwidth(row);
        let line = Interval { number: 3, begin_seconds: 1.0, end_seconds: 1.5, row: &row };
        let json = serde_json::to_value(&line).unwrap();
        assert_eq!((&json["number"], &json["messages"]), (&3.into(), &500.into()));
        let meter = Meter::started();
        let mut all = measure::histogram();
        let mut timed = Timed { all: &mut all, meter: Some(&meter) };
        timed.take(Duration::from_micros(3));
        let counted = meter.0.times.lock().unwrap().len();
        assert_eq!((all.len(), counted), (1, 1));
    }
}
