//! The measured values, gathered into rows.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::workers::Measure;
use rocinante_cli::measure::Spread;

/// The subject of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(super) struct Key {
    pub(super) measure: Measure,
    /// Our backend, or the peer.
    pub(super) netdev: &'static str,
    /// Bytes of a message.
    pub(super) size: usize,
    /// Path MTU; for TCP and UDP the link's MTU.
    pub(super) mtu: u32,
    pub(super) qps: u32,
}

/// One value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Sample {
    /// The run, counted from 1.
    pub(super) run: usize,
    pub(super) value: f64,
    /// Its baseline, measured right before.
    pub(super) baseline: Option<f64>,
}

/// All samples of all runs.
#[derive(Debug, Default)]
pub(super) struct Rows {
    samples: BTreeMap<Key, Vec<Sample>>,
    /// The standing of each run.
    standings: BTreeMap<usize, Standing>,
}

/// The standing of a run. Better standings come first: the runs of the best one count.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Standing {
    /// The baselines are high enough.
    Valid,
    /// Unknown, and why.
    NotJudged(String),
    /// A baseline is too low, and which.
    Invalid(String),
}

impl Standing {
    /// The `valid` column of the rows.
    const fn is_valid(&self) -> Option<bool> {
        match self {
            Self::Valid => Some(true),
            Self::NotJudged(_) => None,
            Self::Invalid(_) => Some(false),
        }
    }

    /// A remark for the report, unless the run is valid.
    pub(super) fn remark(&self, run: usize) -> Option<String> {
        match self {
            Self::Valid => None,
            Self::NotJudged(why) => Some(format!("run {run} was not judged: {why}")),
            Self::Invalid(why) => Some(format!("run {run} is invalid: {why}")),
        }
    }
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
    /// The median of the raw baselines. The rows of earlier versions have it by this name, too.
    #[serde(rename = "ceiling")]
    pub(super) baseline: Option<f64>,
    /// The value divided by the baseline.
    pub(super) ratio: Option<f64>,
    /// Number of samples that count.
    pub(super) samples: usize,
    /// Whether they come from valid runs; `None` if those runs were not judged.
    pub(super) valid: Option<bool>,
}

impl Row {
    /// Whether a goal may use it.
    pub(super) fn counts(&self) -> bool {
        self.valid != Some(false)
    }

    /// The row as one line of JSON.
    pub(super) fn json(&self) -> String {
        rocinante_cli::output::object("rocinante-bench", self)
    }
}

/// A baseline below this multiple of one iperf3 stream is too low.
const BASELINE_MIN: f64 = 2.5;

impl Rows {
    pub(super) fn add(&mut self, key: Key, sample: Sample) {
        self.samples.entry(key).or_default().push(sample);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.samples.is_empty()
    }

    /// Judges each run by its baselines for `large` bytes at path MTU `mtu`.
    pub(super) fn judge(&mut self, large: usize, mtu: u32) {
        let stands = |run| (run, self.standing(run, large, mtu));
        self.standings = self.runs().into_iter().map(stands).collect();
    }

    /// Judges no run, for the reason `why`.
    pub(super) fn leave_unjudged(&mut self, why: &str) {
        let stands = |run| (run, Standing::NotJudged(why.to_owned()));
        self.standings = self.runs().into_iter().map(stands).collect();
    }

    fn runs(&self) -> BTreeSet<usize> {
        self.samples.values().flatten().map(|sample| sample.run).collect()
    }

    fn standing(&self, run: usize, large: usize, mtu: u32) -> Standing {
        let streams = |netdev: &str, pick: fn(&Sample) -> Option<f64>| {
            let is_of = |key: &Key| {
                let large = netdev == "iperf3" || (key.size, key.mtu) == (large, mtu);
                key.measure == Measure::WriteBw && key.netdev == netdev && key.qps == 1 && large
            };
            let samples = self.samples.iter().filter(|(key, _)| is_of(key));
            let samples = samples.flat_map(|(_, samples)| samples);
            let values = samples.filter(|sample| sample.run == run).filter_map(pick);
            Some(Spread::of(values.collect())?.median)
        };
        let baseline =
            |netdev: &'static str| Some((netdev, streams(netdev, |sample| sample.baseline)?));
        let baselines: Vec<(&str, f64)> =
            ["udp", "packet"].into_iter().filter_map(baseline).collect();
        let Some(iperf3) = streams("iperf3", |sample| Some(sample.value)) else {
            return Standing::NotJudged("there is no iperf3 stream of it".into());
        };
        if baselines.is_empty() {
            let why =
                format!("there is no raw baseline of udp or packet of {large} B at path MTU {mtu}");
            return Standing::NotJudged(why);
        }
        match baselines.iter().find(|(_, baseline)| *baseline < BASELINE_MIN * iperf3) {
            Some((netdev, low)) => Standing::Invalid(format!(
                "the raw baseline of {netdev} ({low:.1} Gb/s) is below {BASELINE_MIN} times one iperf3 stream ({iperf3:.1} Gb/s)"
            )),
            None => Standing::Valid,
        }
    }

    /// A remark for each run that is not valid.
    pub(super) fn remarks(&self) -> Vec<String> {
        self.standings.iter().filter_map(|(run, standing)| standing.remark(*run)).collect()
    }

    /// What the remarks mean for the rows. Empty if all rows come from valid runs.
    pub(super) fn caution(&self) -> String {
        let best = self.standings.values().map(Standing::is_valid).fold(Some(false), better);
        let rows = self.rows();
        let any = |valid| rows.iter().any(|row| row.valid == valid);
        let mut out = match best {
            Some(true) => String::new(),
            None => "No run was found to be valid, since none could be judged.\n".to_owned(),
            Some(false) => "No run was valid.\n".to_owned(),
        };
        if best != Some(false) && any(Some(false)) {
            out.push_str("Rows marked **no** are of invalid runs alone.\n");
        }
        if best == Some(true) && any(None) {
            out.push_str("Rows marked – are of runs that were not judged.\n");
        }
        out
    }

    /// All rows. A row takes its samples from valid runs, else from runs that were not judged, else
    /// from invalid ones.
    pub(super) fn rows(&self) -> Vec<Row> {
        let all = self.samples.iter();
        all.filter_map(|(key, samples)| self.row(*key, samples)).collect()
    }

    fn row(&self, key: Key, samples: &[Sample]) -> Option<Row> {
        let of = |sample: &Sample| self.standings.get(&sample.run).and_then(Standing::is_valid);
        let valid = samples.iter().map(of).fold(Some(false), better);
        let counted: Vec<&Sample> = samples.iter().filter(|sample| of(sample) == valid).collect();
        let value = Spread::of(counted.iter().map(|sample| sample.value).collect())?;
        let baseline = Spread::of(counted.iter().filter_map(|sample| sample.baseline).collect());
        let baseline = baseline.map(|spread| spread.median);
        Some(Row {
            key,
            value: value.median,
            min: value.min,
            max: value.max,
            unit: key.measure.unit(),
            baseline,
            ratio: baseline
                .filter(|baseline| *baseline > 0.0)
                .map(|baseline| value.median / baseline),
            samples: counted.len(),
            valid,
        })
    }
}

/// The better of two standings: true, then unknown, then false.
fn better(a: Option<bool>, b: Option<bool>) -> Option<bool> {
    match (a, b) {
        (Some(true), _) | (_, Some(true)) => Some(true),
        (Some(false), other) | (other, Some(false)) => other,
        (None, None) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LARGE: usize = 1 << 20;

    fn key(measure: Measure, netdev: &'static str, size: usize) -> Key {
        Key { measure, netdev, size, mtu: 4096, qps: 1 }
    }

    fn rows(baselines: [f64; 3]) -> Rows {
        let mut rows = Rows::default();
        for (run, baseline) in (1..).zip(baselines) {
            let value = run as f64;
            let ours = key(Measure::WriteBw, "udp", LARGE);
            rows.add(ours, Sample { run, value, baseline: Some(baseline) });
            let iperf3 = Key { mtu: 9000, ..key(Measure::WriteBw, "iperf3", 131_072) };
            rows.add(iperf3, Sample { run, value: 10.0, baseline: None });
        }
        rows.judge(LARGE, 4096);
        rows
    }

    #[test]
    fn a_row_is_the_median_beside_the_median_of_its_baselines() {
        let rows = rows([30.0, 50.0, 40.0]);
        assert_eq!((rows.remarks(), rows.caution()), (Vec::new(), String::new()));
        let [iperf3, ours] = &rows.rows()[..] else { panic!("two rows") };
        assert_eq!((iperf3.key.netdev, iperf3.ratio), ("iperf3", None));
        assert_eq!((ours.min, ours.value, ours.max), (1.0, 2.0, 3.0));
        assert_eq!((ours.baseline, ours.ratio), (Some(40.0), Some(2.0 / 40.0)));
        assert_eq!((ours.samples, ours.valid, ours.unit), (3, Some(true), "Gb/s"));
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
            ("valid", true.into()),
        ];
        for (name, value) in named {
            let value: serde_json::Value = value;
            assert_eq!(json[name], value, "{name} of {json}");
        }
    }

    #[test]
    fn a_run_with_too_low_a_baseline_does_not_count() {
        let rows = rows([24.9, 50.0, 40.0]);
        let [remark] = &rows.remarks()[..] else { panic!("{:?}", rows.remarks()) };
        assert!(remark.starts_with("run 1 is invalid") && remark.contains("24.9 Gb/s"), "{remark}");
        assert_eq!(rows.caution(), "");
        let [iperf3, ours] = &rows.rows()[..] else { panic!("two rows") };
        assert_eq!((ours.min, ours.max, ours.samples, ours.valid), (2.0, 3.0, 2, Some(true)));
        assert_eq!((iperf3.samples, iperf3.valid), (2, Some(true)));
    }

    #[test]
    fn if_no_run_counts_all_are_shown_as_invalid() {
        let rows = rows([20.0, 24.0, 10.0]);
        assert_eq!(rows.remarks().len(), 3);
        assert!(rows.caution().starts_with("No run was valid"), "{}", rows.caution());
        assert!(rows.rows().iter().all(|row| !row.counts() && row.samples == 3));
    }

    #[test]
    fn what_only_an_invalid_run_has_is_invalid() {
        let mut rows = rows([24.9, 50.0, 40.0]);
        let rate = key(Measure::WriteRate, "udp", 64);
        rows.add(rate, Sample { run: 1, value: 1.0, baseline: None });
        let found = rows.rows().into_iter().find(|row| row.key == rate).unwrap();
        assert_eq!((found.valid, found.samples), (Some(false), 1));
        assert!(rows.caution().starts_with("Rows marked **no**"), "{}", rows.caution());
    }

    #[test]
    fn without_iperf3_or_a_baseline_nothing_is_judged() {
        let ours = key(Measure::WriteBw, "udp", LARGE);
        let iperf3 = Key { mtu: 9000, ..key(Measure::WriteBw, "iperf3", 131_072) };
        for (key, baseline, why) in
            [(ours, Some(1.0), "no iperf3"), (iperf3, None, "no raw baseline")]
        {
            let mut rows = Rows::default();
            rows.add(key, Sample { run: 1, value: 1.0, baseline });
            rows.judge(LARGE, 4096);
            let [row] = rows.rows()[..] else { panic!("a row") };
            assert!(row.valid.is_none() && row.counts(), "{row:?}");
            let json: serde_json::Value = serde_json::from_str(&row.json()).unwrap();
            assert!(json.as_object().unwrap()["valid"].is_null(), "{json}");
            let [remark] = &rows.remarks()[..] else { panic!("{:?}", rows.remarks()) };
            assert!(remark.starts_with("run 1 was not judged") && remark.contains(why), "{remark}");
            assert!(rows.caution().contains("none could be judged"), "{}", rows.caution());
        }
    }

    #[test]
    fn what_is_left_unjudged_is_neither_valid_nor_not() {
        let mut rows = rows([24.9, 50.0, 40.0]);
        rows.leave_unjudged("too slow");
        assert!(rows.rows().iter().all(|row| row.valid.is_none() && row.samples == 3));
        assert_eq!(rows.remarks()[2], "run 3 was not judged: too slow");
    }

    #[test]
    fn a_run_without_iperf3_stands_behind_valid_ones_and_before_invalid_ones() {
        let mut rows = rows([24.9, 50.0, 40.0]);
        let (ours, rate) =
            (key(Measure::WriteBw, "udp", LARGE), key(Measure::WriteRate, "udp", 64));
        rows.add(ours, Sample { run: 4, value: 9.0, baseline: Some(1.0) });
        for run in [1, 4] {
            rows.add(rate, Sample { run, value: run as f64, baseline: None });
        }
        rows.judge(LARGE, 4096);
        let of = |key| rows.rows().into_iter().find(|row| row.key == key).unwrap();
        assert_eq!((of(ours).samples, of(ours).max, of(ours).valid), (2, 3.0, Some(true)));
        assert_eq!((of(rate).samples, of(rate).value, of(rate).valid), (1, 4.0, None));
        assert!(rows.caution().starts_with("Rows marked –"), "{}", rows.caution());
    }
}
