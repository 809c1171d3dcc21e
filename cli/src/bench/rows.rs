//! What was measured, by rows.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::measure::Spread;
use crate::workers::Measure;

/// What a row is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(super) struct Key {
    pub(super) measure: Measure,
    /// Our backend, or what else carried it.
    pub(super) netdev: &'static str,
    /// Bytes of a message.
    pub(super) size: usize,
    /// Path MTU; of TCP and UDP the link's MTU.
    pub(super) mtu: u32,
    pub(super) qps: u32,
}

/// One value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Sample {
    /// Counted from 1.
    pub(super) run: usize,
    pub(super) value: f64,
    /// What was measured right before as its ceiling.
    pub(super) ceiling: Option<f64>,
}

/// Everything that was measured.
#[derive(Debug, Default)]
pub(super) struct Rows {
    samples: BTreeMap<Key, Vec<Sample>>,
    /// Runs that do not count, and why.
    pub(super) invalid: BTreeMap<usize, String>,
}

/// A row: the median of its samples that count.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Row {
    #[serde(flatten)]
    pub(super) key: Key,
    pub(super) value: f64,
    pub(super) min: f64,
    pub(super) max: f64,
    pub(super) unit: &'static str,
    pub(super) ceiling: Option<f64>,
    /// The value by the ceiling.
    pub(super) ratio: Option<f64>,
    /// Samples that count.
    pub(super) samples: usize,
    /// Whether they are of valid runs.
    pub(super) valid: bool,
}

impl Row {
    /// As one line.
    pub(super) fn json(&self) -> String {
        serde_json::to_string(self).expect("a row is JSON")
    }
}

/// A ceiling below this multiple of one iperf3 stream is no ceiling.
const CEILING_MIN: f64 = 2.5;

impl Rows {
    pub(super) fn add(&mut self, key: Key, sample: Sample) {
        self.samples.entry(key).or_default().push(sample);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.samples.is_empty()
    }

    /// Whether nothing of `netdev` was measured.
    pub(super) fn is_empty_of(&self, netdev: &str) -> bool {
        self.samples.keys().all(|key| key.netdev != netdev)
    }

    /// Finds the runs in which a ceiling was no ceiling.
    pub(super) fn judge(&mut self, large: usize, mtu: u32) {
        let streams = |netdev: &str, run: usize, pick: fn(&Sample) -> Option<f64>| {
            let is_of = |key: &Key| {
                let large = netdev == "iperf3" || (key.size, key.mtu) == (large, mtu);
                key.measure == Measure::WriteBw && key.netdev == netdev && key.qps == 1 && large
            };
            let samples = self.samples.iter().filter(|(key, _)| is_of(key));
            let samples = samples.flat_map(|(_, samples)| samples);
            let values = samples.filter(|sample| sample.run == run).filter_map(pick);
            Some(Spread::of(values.collect())?.median)
        };
        let runs: BTreeSet<usize> =
            self.samples.values().flatten().map(|sample| sample.run).collect();
        let mut invalid = BTreeMap::new();
        for run in runs {
            let Some(iperf3) = streams("iperf3", run, |sample| Some(sample.value)) else {
                continue;
            };
            for netdev in ["udp", "packet"] {
                let ceiling = streams(netdev, run, |sample| sample.ceiling);
                let Some(low) = ceiling.filter(|ceiling| *ceiling < CEILING_MIN * iperf3) else {
                    continue;
                };
                let why = format!(
                    "the ceiling of {netdev} ({low:.1} Gb/s) is below {CEILING_MIN} times one iperf3 stream ({iperf3:.1} Gb/s)"
                );
                invalid.entry(run).or_insert(why);
            }
        }
        self.invalid = invalid;
    }

    /// All rows, of the valid runs, or of all if none is.
    pub(super) fn rows(&self) -> Vec<Row> {
        let all = self.samples.iter();
        all.filter_map(|(key, samples)| self.row(*key, samples)).collect()
    }

    fn row(&self, key: Key, samples: &[Sample]) -> Option<Row> {
        let counts = |sample: &&Sample| !self.invalid.contains_key(&sample.run);
        let valid: Vec<Sample> = samples.iter().filter(counts).copied().collect();
        let (is_valid, counted) =
            if valid.is_empty() { (false, samples) } else { (true, &valid[..]) };
        let value = Spread::of(counted.iter().map(|sample| sample.value).collect())?;
        let ceiling = Spread::of(counted.iter().filter_map(|sample| sample.ceiling).collect());
        let ceiling = ceiling.map(|spread| spread.median);
        Some(Row {
            key,
            value: value.median,
            min: value.min,
            max: value.max,
            unit: key.measure.unit(),
            ceiling,
            ratio: ceiling.filter(|ceiling| *ceiling > 0.0).map(|ceiling| value.median / ceiling),
            samples: counted.len(),
            valid: is_valid,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LARGE: usize = 1 << 20;

    fn key(measure: Measure, netdev: &'static str, size: usize) -> Key {
        Key { measure, netdev, size, mtu: 4096, qps: 1 }
    }

    fn rows(ceilings: [f64; 3]) -> Rows {
        let mut rows = Rows::default();
        for (run, ceiling) in (1..).zip(ceilings) {
            let value = run as f64;
            let ours = key(Measure::WriteBw, "udp", LARGE);
            rows.add(ours, Sample { run, value, ceiling: Some(ceiling) });
            let iperf3 = Key { mtu: 9000, ..key(Measure::WriteBw, "iperf3", 131_072) };
            rows.add(iperf3, Sample { run, value: 10.0, ceiling: None });
        }
        rows.judge(LARGE, 4096);
        rows
    }

    #[test]
    fn a_row_is_the_median_beside_the_median_of_its_ceilings() {
        let rows = rows([30.0, 50.0, 40.0]);
        assert!(rows.invalid.is_empty());
        let [iperf3, ours] = &rows.rows()[..] else { panic!("two rows") };
        assert_eq!((iperf3.key.netdev, iperf3.ratio), ("iperf3", None));
        assert_eq!((ours.min, ours.value, ours.max), (1.0, 2.0, 3.0));
        assert_eq!((ours.ceiling, ours.ratio), (Some(40.0), Some(2.0 / 40.0)));
        assert_eq!((ours.samples, ours.valid, ours.unit), (3, true, "Gb/s"));
        let json: serde_json::Value = serde_json::from_str(&ours.json()).unwrap();
        let named = [
            ("measure", "write_bw".into()),
            ("netdev", "udp".into()),
            ("size", LARGE.into()),
            ("mtu", 4096.into()),
            ("qps", 1.into()),
            ("value", 2.0.into()),
            ("min", 1.0.into()),
            ("max", 3.0.into()),
            ("unit", "Gb/s".into()),
            ("ceiling", 40.0.into()),
            ("ratio", 0.05.into()),
        ];
        for (name, value) in named {
            let value: serde_json::Value = value;
            assert_eq!(json[name], value, "{name} of {json}");
        }
    }

    #[test]
    fn a_run_whose_ceiling_is_none_does_not_count() {
        let rows = rows([24.9, 50.0, 40.0]);
        assert_eq!(rows.invalid.keys().collect::<Vec<_>>(), [&1]);
        assert!(rows.invalid[&1].contains("24.9 Gb/s"), "{}", rows.invalid[&1]);
        let [iperf3, ours] = &rows.rows()[..] else { panic!("two rows") };
        assert_eq!((ours.min, ours.max, ours.samples, ours.valid), (2.0, 3.0, 2, true));
        assert_eq!((iperf3.samples, iperf3.valid), (2, true));
    }

    #[test]
    fn if_no_run_counts_all_are_shown_as_invalid() {
        let rows = rows([20.0, 24.0, 10.0]);
        assert_eq!(rows.invalid.len(), 3);
        assert!(rows.rows().iter().all(|row| !row.valid && row.samples == 3));
    }

    #[test]
    fn without_iperf3_nothing_is_judged() {
        let mut rows = Rows::default();
        let ours = key(Measure::WriteBw, "udp", LARGE);
        rows.add(ours, Sample { run: 1, value: 1.0, ceiling: Some(1.0) });
        rows.judge(LARGE, 4096);
        assert!(rows.invalid.is_empty() && !rows.is_empty_of("udp") && rows.is_empty_of("packet"));
    }
}
