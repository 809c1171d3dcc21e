//! Results as rows of a table, with the columns of perftest.

use std::fmt;

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use super::test::Test;

/// The result of one measurement.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Row {
    /// The result of a bandwidth test.
    Bandwidth(Bandwidth),
    /// The result of a latency test.
    Latency(Latency),
}

/// A bandwidth.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Bandwidth {
    /// Bytes of each message.
    pub bytes: usize,
    /// Messages, over all queue pairs.
    pub messages: u64,
    /// From the first post to the last completion.
    pub seconds: f64,
    /// 10⁹ payload bits per second, in the best stretch of at least 10 ms.
    pub gbps_peak: f64,
    /// 10⁹ payload bits per second.
    pub gbps: f64,
    /// 10⁶ messages per second.
    pub mpps: f64,
    /// Messages that did not arrive, over all queue pairs. Known only where messages may be lost
    /// and this side knows their number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost: Option<u64>,
}

impl Bandwidth {
    /// Both directions together, as perftest adds them.
    #[must_use]
    pub fn and(self, other: &Self) -> Self {
        Self {
            messages: self.messages.saturating_add(other.messages),
            seconds: self.seconds.max(other.seconds),
            gbps_peak: self.gbps_peak + other.gbps_peak,
            gbps: self.gbps + other.gbps,
            mpps: self.mpps + other.mpps,
            lost: self.lost.zip(other.lost).map(|(a, b)| a.saturating_add(b)),
            ..self
        }
    }
}

/// A latency, in microseconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Latency {
    pub(crate) bytes: usize,
    pub(crate) messages: u64,
    pub(crate) us_min: f64,
    pub(crate) us_p50: f64,
    pub(crate) us_avg: f64,
    pub(crate) us_stdev: f64,
    pub(crate) us_p90: f64,
    pub(crate) us_p99: f64,
    pub(crate) us_p99_9: f64,
    pub(crate) us_max: f64,
}

impl Latency {
    /// The figures of a histogram of nanoseconds.
    #[must_use]
    pub fn new(bytes: usize, histogram: &Histogram<u64>) -> Self {
        let at = |quantile| histogram.value_at_quantile(quantile) as f64 / 1e3;
        Self {
            bytes,
            messages: histogram.len(),
            us_min: histogram.min() as f64 / 1e3,
            us_p50: at(0.5),
            us_avg: histogram.mean() / 1e3,
            us_stdev: histogram.stdev() / 1e3,
            us_p90: at(0.9),
            us_p99: at(0.99),
            us_p99_9: at(0.999),
            us_max: histogram.max() as f64 / 1e3,
        }
    }
}

/// The headings of the columns.
#[must_use]
pub fn header(test: Test) -> String {
    if test.is_bandwidth() {
        format!(
            " {:<10} {:<12} {:>13} {:>16} {:>14}",
            "#bytes", "#iterations", "BW peak[Gb/s]", "BW average[Gb/s]", "MsgRate[Mpps]"
        )
    } else {
        let mut line = format!(" {:<10} {:<12}", "#bytes", "#iterations");
        for column in ["min", "p50", "avg", "stdev", "p90", "p99", "p99.9", "max"] {
            line.push_str(&format!(" {:>11}", format!("{column}[usec]")));
        }
        line
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bandwidth(row) => {
                let Bandwidth { bytes, messages, gbps_peak, gbps, mpps, lost, .. } = row;
                write!(
                    f,
                    " {bytes:<10} {messages:<12} {gbps_peak:>13.2} {gbps:>16.2} {mpps:>14.6}"
                )?;
                match lost {
                    Some(lost) => write!(f, "   lost {lost}"),
                    None => Ok(()),
                }
            }
            Self::Latency(row) => {
                write!(f, " {:<10} {:<12}", row.bytes, row.messages)?;
                for value in [
                    row.us_min,
                    row.us_p50,
                    row.us_avg,
                    row.us_stdev,
                    row.us_p90,
                    row.us_p99,
                    row.us_p99_9,
                    row.us_max,
                ] {
                    write!(f, " {value:>11.2}")?;
                }
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_stand_below_their_heads() {
        let mut histogram = Histogram::new(3).unwrap();
        (1..=1000).for_each(|us| histogram.record(us * 1000).unwrap());
        let latency = Latency::new(64, &histogram);
        assert!((latency.us_p50 - 500.0).abs() < 1.0 && (latency.us_p99_9 - 999.0).abs() < 1.5);
        let row = Row::Latency(latency).to_string();
        assert_eq!(row.chars().count(), header(Test::WriteLat).chars().count(), "{row}");
        let (bytes, messages) = (65_536, 5000);
        let lost = None;
        let row =
            Bandwidth { bytes, messages, seconds: 1.0, gbps_peak: 9.0, gbps: 8.5, mpps: 0.1, lost };
        let row = Row::Bandwidth(row).to_string();
        assert_eq!(row.chars().count(), header(Test::WriteBw).chars().count(), "{row}");
    }
}
