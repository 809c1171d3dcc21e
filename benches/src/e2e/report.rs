//! What was measured, run by run.

use std::collections::BTreeMap;

use rocinante_cli::measure::Spread;
use serde_json::{Value, json};

use super::machine::Machine;
use super::worker::{Sample, Subject};
use crate::figure::Figure;

/// One backend at one path MTU in one run.
#[derive(Debug, Default)]
pub(super) struct Row {
    /// Counted from 1.
    pub run: usize,
    /// The backend.
    pub netdev: &'static str,
    /// The path MTU.
    pub mtu: usize,
    /// What was measured.
    pub samples: BTreeMap<Subject, Sample>,
    /// What could not be measured, and why.
    pub errors: Vec<String>,
}

/// What belongs to a whole run.
#[derive(Debug, Default, Clone)]
pub(super) struct Run {
    /// One stream of iperf3, in 10⁹ bits per second.
    pub iperf3: Option<f64>,
    /// One stream with both ends spinning, in 10⁹ bits per second.
    pub tcp: Option<f64>,
    /// Why the run does not count.
    pub invalid: Option<String>,
}

/// Everything.
#[derive(Debug)]
pub(super) struct Report {
    /// The machine.
    pub machine: Machine,
    /// The command line.
    pub command: String,
    /// Between the two: a veth, or a bridge.
    pub path: &'static str,
    /// The runs.
    pub runs: Vec<Run>,
    /// All rows, run by run.
    pub rows: Vec<Row>,
}

impl Row {
    /// A figure of a subject.
    #[must_use]
    pub(super) fn figure(&self, subject: Subject, figure: Figure) -> Option<f64> {
        self.samples.get(&subject)?.figures.get(&figure).copied()
    }

    /// A figure of a subject as a multiple of the ceiling's, if the machine was the same all the time.
    #[must_use]
    pub(super) fn ratio(&self, subject: Subject, figure: Figure) -> Option<f64> {
        let pair = [self.samples.get(&subject)?, self.samples.get(&Subject::Ceiling)?];
        let mut modes = pair.iter().flat_map(|sample| [sample.mode, sample.mode_after]);
        let first = modes.next()?.is_near();
        let steady = modes.all(|mode| mode.is_near() == first);
        let [ours, ceiling] = pair.map(|sample| sample.figures.get(&figure));
        Some(ours? / ceiling?).filter(|_| steady)
    }
}

/// A ceiling below this multiple of one TCP stream is no ceiling.
const CEILING_MIN: f64 = 2.5;

impl Report {
    /// Marks the runs in which a ceiling was no ceiling.
    pub(super) fn judge(&mut self) {
        for (index, run) in self.runs.iter_mut().enumerate() {
            let Some(tcp) = run.iperf3 else { continue };
            let rows = self.rows.iter().filter(|row| row.run == index + 1 && row.mtu == 4096);
            let low = rows.filter(|row| row.netdev != "afxdp").find_map(|row| {
                let ceiling = row.figure(Subject::Ceiling, Figure::Large)?;
                (ceiling < CEILING_MIN * tcp).then_some((row.netdev, ceiling))
            });
            run.invalid = low.map(|(netdev, ceiling)| {
                format!(
                    "the ceiling of {netdev} ({ceiling:.1} Gb/s) is below {CEILING_MIN} times one iperf3 \
                     stream ({tcp:.1} Gb/s)"
                )
            });
        }
    }

    /// The runs that count: the valid ones, or all if none is.
    pub(super) fn counted(&self) -> Vec<usize> {
        let all = 1..=self.runs.len();
        let valid: Vec<_> =
            all.clone().filter(|run| self.runs[run - 1].invalid.is_none()).collect();
        if valid.is_empty() { all.collect() } else { valid }
    }

    /// The spread of `value` over the rows of a backend and path MTU that count.
    pub(super) fn spread(
        &self,
        netdev: &str,
        mtu: usize,
        value: impl Fn(&Row) -> Option<f64>,
    ) -> Option<Spread> {
        let counted = self.counted();
        let rows = self
            .rows
            .iter()
            .filter(|row| row.netdev == netdev && row.mtu == mtu && counted.contains(&row.run));
        Spread::of(rows.filter_map(value).collect())
    }

    /// One line for each row, and one for all.
    pub(super) fn print_json(&self) {
        for row in &self.rows {
            println!("{}", self.row(row));
        }
        let invalid = self.runs.iter().filter(|run| run.invalid.is_some()).count();
        let summary = json!({
            "machine": self.machine, "command": self.command, "path": self.path,
            "runs": self.runs.len(), "invalid_runs": invalid,
        });
        println!("{summary}");
    }

    fn row(&self, row: &Row) -> Value {
        let run = &self.runs[row.run - 1];
        let mut object = json!({
            "run": row.run, "netdev": row.netdev, "mtu": row.mtu, "valid": run.invalid.is_none(),
            "iperf3_gbps": run.iperf3, "tcp_spinning_gbps": run.tcp, "errors": row.errors,
        });
        if let Some(why) = &run.invalid {
            object["invalid"] = why.as_str().into();
        }
        for (subject, sample) in &row.samples {
            let name = subject.name();
            object[name] = json!(sample.figures);
            object[format!("{name}_mode")] = json!(sample.mode);
            if !sample.notes.is_null() {
                object[format!("{name}_notes")] = sample.notes.clone();
            }
            let ratios = Figure::ALL.into_iter().filter_map(|f| Some((f, row.ratio(*subject, f)?)));
            let ratios: BTreeMap<Figure, f64> = ratios.collect();
            if *subject != Subject::Ceiling && !ratios.is_empty() {
                object[format!("{name}_ratio")] = json!(ratios);
            }
        }
        object
    }
}
