//! The measured values, gathered into rows.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::machine::Standing;
use crate::workers::{Congestion, Link, Measure, Posting};
use rocinante_cli::measure::Spread;

/// The backends of the device in software.
pub(super) const BACKENDS: [&str; 3] = ["udp", "packet", "afxdp"];

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
    /// Queue pairs; with many processes those of all.
    pub(super) qps: u32,
    /// The link between the two sides.
    #[serde(skip_serializing_if = "Link::is_plain")]
    pub(super) link: Link,
    #[serde(flatten)]
    pub(super) tcp: Option<Tcp>,
}

impl Key {
    /// Our backend, or the peer and its congestion control; the link unless it is the plain one.
    pub(super) fn name(&self) -> String {
        let cc = self.tcp.map(|tcp| format!(" {}", tcp.cc.name()));
        let link = Some(self.link).filter(|link| !link.is_plain());
        let link = link.map(|link| format!(" over {}", link.name()));
        format!("{}{}{}", self.netdev, cc.unwrap_or_default(), link.unwrap_or_default())
    }

    /// How its requests are posted, if it is of a device in software.
    fn posting(&self) -> Option<Posting> {
        let is_ours = BACKENDS.contains(&self.netdev);
        is_ours.then(|| Posting::of(self.measure, self.size, self.qps))?
    }
}

/// How a TCP stream ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(super) struct Tcp {
    pub(super) cc: Congestion,
    /// Whether both ends span, or else slept in their calls.
    pub(super) spin: bool,
    /// Bytes written at once.
    pub(super) write_size: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Sample {
    /// The run, counted from 1.
    pub(super) run: usize,
    pub(super) value: f64,
    /// Its baseline, measured right before.
    #[serde(rename = "ceiling")]
    pub(super) baseline: Option<f64>,
}

/// All samples of all runs.
#[derive(Debug, Default)]
pub(super) struct Rows {
    samples: BTreeMap<Key, Vec<Sample>>,
    /// The standing of each run.
    standings: BTreeMap<usize, Standing>,
}

/// A row: the median of its samples that count.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Row {
    #[serde(flatten)]
    pub(super) key: Key,
    #[serde(flatten)]
    pub(super) posting: Option<Posting>,
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

impl Rows {
    pub(super) fn add(&mut self, key: Key, sample: Sample) {
        self.samples.entry(key).or_default().push(sample);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.samples.is_empty()
    }

    /// Judges each run.
    pub(super) fn judge(&mut self, standing: impl Fn(usize) -> Standing) {
        let runs: BTreeSet<usize> =
            self.samples.values().flatten().map(|sample| sample.run).collect();
        self.standings = runs.into_iter().map(|run| (run, standing(run))).collect();
    }

    /// Each sample as one line of JSON, also of runs that do not count.
    pub(super) fn samples(&self) -> impl Iterator<Item = String> + '_ {
        #[derive(Serialize)]
        struct Line<'a> {
            #[serde(flatten)]
            key: &'a Key,
            #[serde(flatten)]
            sample: &'a Sample,
            unit: &'static str,
            valid: Option<bool>,
        }
        let line = |key: &Key, sample: &Sample| {
            let (unit, valid) = (key.measure.unit(), self.is_valid(sample));
            serde_json::json!(Line { key, sample, unit, valid }).to_string()
        };
        let all = self.samples.iter();
        all.flat_map(move |(key, samples)| samples.iter().map(move |sample| line(key, sample)))
    }

    fn is_valid(&self, sample: &Sample) -> Option<bool> {
        self.standings.get(&sample.run).and_then(Standing::is_valid)
    }

    /// A remark for each run that is not valid.
    pub(super) fn remarks(&self) -> Vec<String> {
        self.standings.iter().filter_map(|(run, standing)| standing.remark(*run)).collect()
    }

    /// The consequence of the remarks for the rows. Empty if all rows come from valid runs.
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
        let valid = samples.iter().map(|sample| self.is_valid(sample)).fold(Some(false), better);
        let counted: Vec<&Sample> =
            samples.iter().filter(|sample| self.is_valid(sample) == valid).collect();
        let value = Spread::of(counted.iter().map(|sample| sample.value).collect())?;
        let baseline = Spread::of(counted.iter().filter_map(|sample| sample.baseline).collect());
        let baseline = baseline.map(|spread| spread.median);
        Some(Row {
            key,
            posting: key.posting(),
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
        Key { measure, netdev, size, mtu: 4096, qps: 1, link: Link::Plain, tcp: None }
    }

    fn tcp() -> Key {
        let tcp = Some(Tcp { cc: Congestion::Cubic, spin: false, write_size: 131_072 });
        Key { mtu: 9000, tcp, ..key(Measure::WriteBw, "iperf3", 131_072) }
    }

    /// Runs with these standings, numbered from 1. The value of ours is the run's number.
    fn rows(standings: &[Standing]) -> Rows {
        let mut rows = Rows::default();
        for run in 1..=standings.len() {
            let (value, baseline) = (run as f64, Some(10.0 * run as f64));
            rows.add(key(Measure::WriteBw, "udp", LARGE), Sample { run, value, baseline });
            rows.add(tcp(), Sample { run, value: 10.0, baseline: None });
        }
        rows.judge(|run| standings[run - 1].clone());
        rows
    }

    fn invalid() -> Standing {
        Standing::Invalid("it was slow".into())
    }

    fn unknown() -> Standing {
        Standing::NotJudged("nobody knows".into())
    }

    #[test]
    fn a_row_is_the_median_beside_the_median_of_its_baselines() {
        let rows = rows(&[Standing::Valid, Standing::Valid, Standing::Valid]);
        assert_eq!((rows.remarks(), rows.caution()), (Vec::new(), String::new()));
        let [iperf3, ours] = &rows.rows()[..] else { panic!("two rows") };
        assert_eq!((iperf3.key.netdev, iperf3.ratio), ("iperf3", None));
        assert_eq!((ours.min, ours.value, ours.max), (1.0, 2.0, 3.0));
        assert_eq!((ours.baseline, ours.ratio), (Some(20.0), Some(0.1)));
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
            ("ceiling", 20.0.into()),
            ("ratio", 0.1.into()),
            ("valid", true.into()),
        ];
        for (name, value) in named {
            let value: serde_json::Value = value;
            assert_eq!(json[name], value, "{name} of {json}");
        }
        let of_tcp = ["cc", "spin", "write_size"];
        assert!(of_tcp.iter().all(|name| json.get(name).is_none()), "{json}");
        let json: serde_json::Value = serde_json::from_str(&iperf3.json()).unwrap();
        let values: [serde_json::Value; 3] = ["cubic".into(), false.into(), 131_072.into()];
        assert_eq!(of_tcp.map(|name| json[name].clone()), values, "{json}");
        assert_eq!(iperf3.key.name(), "iperf3 cubic");
    }

    #[test]
    fn a_run_that_is_invalid_does_not_count_but_is_shown() {
        let rows = rows(&[invalid(), Standing::Valid, Standing::Valid]);
        assert_eq!(rows.remarks(), ["run 1 is invalid: it was slow"]);
        assert_eq!(rows.caution(), "");
        let [iperf3, ours] = &rows.rows()[..] else { panic!("two rows") };
        assert_eq!((ours.min, ours.max, ours.samples, ours.valid), (2.0, 3.0, 2, Some(true)));
        assert_eq!((iperf3.samples, iperf3.valid), (2, Some(true)));
        let samples: Vec<serde_json::Value> =
            rows.samples().map(|line| serde_json::from_str(&line).unwrap()).collect();
        let of_ours = samples.iter().filter(|sample| sample["netdev"] == "udp");
        let of_ours: Vec<_> = of_ours
            .map(|sample| ["run", "value", "ceiling", "valid"].map(|name| sample[name].to_string()))
            .collect();
        let expected = [
            ["1", "1.0", "10.0", "false"],
            ["2", "2.0", "20.0", "true"],
            ["3", "3.0", "30.0", "true"],
        ];
        assert_eq!(of_ours, expected);
        assert_eq!(samples.len(), 6);
    }

    #[test]
    fn if_no_run_counts_all_are_shown_as_invalid() {
        let rows = rows(&[invalid(), invalid(), invalid()]);
        assert_eq!(rows.remarks().len(), 3);
        assert!(rows.caution().starts_with("No run was valid"), "{}", rows.caution());
        assert!(rows.rows().iter().all(|row| !row.counts() && row.samples == 3));
    }

    #[test]
    fn what_only_an_invalid_run_has_is_invalid() {
        let mut rows = rows(&[invalid(), Standing::Valid, Standing::Valid]);
        let rate = key(Measure::WriteRate, "udp", 64);
        rows.add(rate, Sample { run: 1, value: 1.0, baseline: None });
        let found = rows.rows().into_iter().find(|row| row.key == rate).unwrap();
        assert_eq!((found.valid, found.samples), (Some(false), 1));
        assert!(rows.caution().starts_with("Rows marked **no**"), "{}", rows.caution());
    }

    #[test]
    fn what_is_not_judged_is_neither_valid_nor_not() {
        let rows = rows(&[unknown(), unknown()]);
        assert!(rows.rows().iter().all(|row| row.valid.is_none() && row.counts()));
        assert_eq!(rows.remarks()[1], "run 2 was not judged: nobody knows");
        assert!(rows.caution().contains("none could be judged"), "{}", rows.caution());
        let json: serde_json::Value = serde_json::from_str(&rows.rows()[0].json()).unwrap();
        assert!(json.as_object().unwrap()["valid"].is_null(), "{json}");
    }

    #[test]
    fn a_run_that_is_not_judged_stands_behind_valid_ones_and_before_invalid_ones() {
        let mut rows = rows(&[invalid(), Standing::Valid, Standing::Valid, unknown()]);
        let (ours, rate) =
            (key(Measure::WriteBw, "udp", LARGE), key(Measure::WriteRate, "udp", 64));
        for run in [1, 4] {
            rows.add(rate, Sample { run, value: run as f64, baseline: None });
        }
        let of = |key| rows.rows().into_iter().find(|row| row.key == key).unwrap();
        assert_eq!((of(ours).samples, of(ours).max, of(ours).valid), (2, 3.0, Some(true)));
        assert_eq!((of(rate).samples, of(rate).value, of(rate).valid), (1, 4.0, None));
        assert!(rows.caution().starts_with("Rows marked –"), "{}", rows.caution());
    }
}
