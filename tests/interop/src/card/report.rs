//! The report: the cells tried, the devices, the results, and why some cells were not run.

use std::collections::BTreeMap;
use std::fmt;
use std::process::Command;
use std::time::Instant;

use super::cells::CardCell;
use super::stage::{Stage, list};
use crate::agent::machine::{Device, Kind, Machine};
use crate::matrix::Verdict;

/// The most names shown of cells that were not run for one reason.
const NAMES_MAX: usize = 40;

/// The result of one cell.
#[derive(Debug)]
pub(super) struct Entry {
    name: String,
    row: String,
    verdict: Verdict,
}

impl Entry {
    pub(super) fn new(cell: &CardCell, verdict: Verdict) -> Self {
        Self { name: cell.to_string(), row: cell.row(), verdict }
    }
}

/// The contents of the report.
#[derive(Debug)]
pub(super) struct Report {
    command: String,
    begun: (String, Instant),
    facts: Vec<(&'static str, String)>,
    remarks: Vec<String>,
    /// Departures of the device from the specification, each with the first cell that showed it.
    pub(super) noticed: BTreeMap<String, String>,
    /// The results of the cells.
    pub(super) entries: Vec<Entry>,
}

/// Counts of cells.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Counts {
    passed: usize,
    failed: usize,
    not_run: usize,
}

impl Counts {
    fn add(&mut self, verdict: &Verdict) {
        match verdict {
            Verdict::Passed => self.passed += 1,
            Verdict::Failed(_) => self.failed += 1,
            Verdict::NotRun(_) => self.not_run += 1,
        }
    }

    fn all(self) -> usize {
        self.passed + self.failed + self.not_run
    }
}

impl Report {
    /// A report that begins now.
    pub(super) fn begin() -> Self {
        let words: Vec<String> = std::env::args().map(|word| quoted(&word)).collect();
        Self {
            command: words.join(" "),
            begun: (now(), Instant::now()),
            facts: vec![],
            remarks: vec![],
            noticed: BTreeMap::new(),
            entries: vec![],
        }
    }

    /// Describes both machines and the device.
    pub(super) fn describe(&mut self, stage: &Stage) {
        self.facts.extend(machine("the device's machine", &stage.machine));
        if let Some(device) = &stage.machine.device {
            self.facts.extend(facts_of(device));
        }
        self.facts.push(("addresses that are used", stage.used()));
        self.facts.extend(machine("our machine", &stage.here));
        self.facts.extend(stage.our_side());
        self.facts.push(("Rocinante", env!("CARGO_PKG_VERSION").into()));
        self.remarks.extend(stage.remarks());
    }

    /// Records why nothing was run.
    pub(super) fn give_up(&mut self, why: &str) {
        self.remarks.push(format!("nothing was run: {why}"));
    }

    fn count(&self) -> Counts {
        let mut count = Counts::default();
        self.entries.iter().for_each(|entry| count.add(&entry.verdict));
        count
    }

    /// Whether at least one cell passed, and none failed.
    pub(super) fn is_good(&self) -> bool {
        let count = self.count();
        count.passed > 0 && count.failed == 0
    }

    /// The totals, as one line.
    pub(super) fn totals(&self) -> String {
        let count = self.count();
        let Counts { passed, failed, not_run } = count;
        format!("{} cells: {passed} passed, {failed} failed, {not_run} not run", count.all())
    }

    fn table(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rows: BTreeMap<&str, Counts> = BTreeMap::new();
        self.entries.iter().for_each(|e| rows.entry(&e.row).or_default().add(&e.verdict));
        writeln!(f, "| what | passed | failed | not run | all |\n|---|--:|--:|--:|--:|")?;
        let total = ("**all**", self.count());
        for (row, count) in rows.into_iter().chain([total]) {
            let Counts { passed, failed, not_run } = count;
            writeln!(f, "| {row} | {passed} | {failed} | {not_run} | {} |", count.all())?;
        }
        Ok(())
    }

    fn failures(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\n## Failures\n")?;
        let mut none = true;
        for Entry { name, verdict, .. } in &self.entries {
            if let Verdict::Failed(why) = verdict {
                writeln!(f, "- `{name}`\n\n  ```text\n{}\n  ```", indented(why))?;
                none = false;
            }
        }
        if none { writeln!(f, "None.") } else { Ok(()) }
    }

    fn not_run(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\n## Not run\n")?;
        let mut reasons: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for Entry { name, verdict, .. } in &self.entries {
            if let Verdict::NotRun(why) = verdict {
                reasons.entry(why).or_default().push(name);
            }
        }
        if reasons.is_empty() {
            return writeln!(f, "None.");
        }
        for (why, names) in reasons {
            let shown: Vec<String> =
                names.iter().take(NAMES_MAX).map(|name| format!("`{name}`")).collect();
            let more = names.len().saturating_sub(NAMES_MAX);
            let more = if more > 0 { format!(", and {more} more") } else { String::new() };
            let why = why.replace('\n', " ");
            writeln!(
                f,
                "- **{}**: {why}\n  <details>{}{more}</details>",
                names.len(),
                shown.join(", ")
            )?;
        }
        Ok(())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (begun, since) = &self.begun;
        writeln!(f, "# Rocinante and an RDMA device of the kernel\n\n{}.\n", self.totals())?;
        writeln!(f, "| | |\n|---|---|\n| command | `{}` |", self.command)?;
        writeln!(f, "| begun | {begun} UTC, took {} s |", since.elapsed().as_secs())?;
        for (what, value) in &self.facts {
            writeln!(f, "| {what} | {} |", value.replace('|', "\\|").replace('\n', " "))?;
        }
        writeln!(f)?;
        self.remarks.iter().try_for_each(|remark| writeln!(f, "**Beware:** {remark}\n"))?;
        self.table(f)?;
        self.failures(f)?;
        writeln!(f, "\n## Departures from the specification\n")?;
        if self.noticed.is_empty() {
            writeln!(f, "None was noticed, but for the failures.")?;
        }
        for (what, cell) in &self.noticed {
            writeln!(f, "- {what} (first in `{cell}`)")?;
        }
        self.not_run(f)
    }
}

fn machine(whose: &'static str, machine: &Machine) -> Vec<(&'static str, String)> {
    let Machine { name, kernel, system, processor, versions, .. } = machine;
    let mut facts = vec![(whose, format!("{name}, Linux {kernel}, {system}, {processor}"))];
    let versions: Vec<String> =
        versions.iter().map(|(what, version)| format!("{what} {version}")).collect();
    if !versions.is_empty() {
        facts.push(("its libraries and programs", versions.join(", ")));
    }
    facts
}

fn facts_of(device: &Device) -> Vec<(&'static str, String)> {
    let expected = match device.kind {
        Kind::SoftRoce => "Soft-RoCE, whose departures are known",
        Kind::Rocinante | Kind::Device => "the specification is expected",
    };
    let gids: Vec<String> =
        device.gids.iter().map(|(index, address)| format!("{index}: {address}")).collect();
    let interface = match &device.interface {
        Some((name, mtu)) => format!("{name}, MTU {mtu}"),
        None => "unknown".into(),
    };
    let (active, max) = device.mtus;
    vec![
        ("device", format!("{} ({expected})", device.name)),
        ("driver", device.driver.clone()),
        ("part", device.part.clone()),
        (
            "firmware",
            if device.firmware.is_empty() { "none".into() } else { device.firmware.clone() },
        ),
        ("node GUID", device.node_guid.clone()),
        ("port", format!("{}: {}", device.port, device.link)),
        ("its interface", interface),
        ("path MTU", format!("{active} active, {max} at most")),
        (
            "limits",
            format!(
                "{} READs and atomics outstanding, {} elements, atomics: {}",
                device.max_rd_atomic, device.max_sge, device.atomics
            ),
        ),
        ("RoCE v2 GIDs", if gids.is_empty() { list(&[]) } else { gids.join(", ") }),
    ]
}

/// Date and time, in UTC.
fn now() -> String {
    let output = Command::new("date").args(["-u", "+%Y-%m-%d %H:%M:%S"]).output();
    let said = output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    said.unwrap_or_else(|_| "at an unknown time".into())
}

/// A word, quoted for a shell.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=./:,@[]%".contains(c);
    if !word.is_empty() && word.chars().all(plain) { word.to_owned() } else { format!("'{word}'") }
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("  {line}")).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::super::cells;
    use super::*;

    #[test]
    fn every_cell_is_counted_once_and_every_reason_is_told() {
        let mut report = Report::begin();
        for (index, cell) in cells::all().iter().enumerate() {
            let verdict = match index % 3 {
                0 => Verdict::Passed,
                1 => Verdict::Failed(format!("cell {index}\nwas late")),
                _ => Verdict::NotRun("no IPv6 | here".into()),
            };
            report.entries.push(Entry::new(cell, verdict));
        }
        let all = cells::all().len();
        let count = report.count();
        assert_eq!(count.all(), all);
        assert!(count.failed > 0 && !report.is_good());
        let text = report.to_string();
        assert!(text.contains(&format!("{all} cells: {} passed", count.passed)), "{text}");
        assert!(text.contains("cell 1\n  was late"), "{text}");
        assert!(text.contains(&format!("**{}**: no IPv6 | here", count.not_run)), "{text}");
        let sums =
            text.lines().filter(|line| line.starts_with("| ") && line.matches('|').count() == 6);
        let numbers: Vec<Vec<usize>> = sums
            .map(|line| line.split('|').filter_map(|word| word.trim().parse().ok()).collect())
            .filter(|numbers: &Vec<usize>| numbers.len() == 4)
            .collect();
        let (total, rows) = numbers.split_last().unwrap();
        for column in 0..4 {
            assert_eq!(rows.iter().map(|row| row[column]).sum::<usize>(), total[column]);
        }
    }

    #[test]
    fn a_report_of_nothing_is_not_good() {
        let mut report = Report::begin();
        report.give_up("no agent");
        let left = |cell| Entry::new(cell, Verdict::NotRun("nothing was run: no agent".into()));
        report.entries = cells::all().iter().map(left).collect();
        assert!(!report.is_good());
        assert!(report.to_string().contains("**Beware:** nothing was run: no agent"));
    }

    #[test]
    fn words_are_quoted_as_a_shell_takes_them() {
        assert_eq!((quoted("mlx5_0:2"), quoted("a b")), ("mlx5_0:2".into(), "'a b'".into()));
    }
}
