//! A directory of results: Markdown, the rows as JSON, and plots.

use std::fs;
use std::path::Path;

use super::rows::Row;
use super::run::Bench;
use super::{plot, table};
use crate::chart::{Chart, X};
use crate::goal::{self, Judged};
use rocinante_cli::output::{Failure, Result};

/// File names in a report. The plots have names of their own.
const TEXT: &str = "report.md";
const ROWS: &str = "rows.jsonl";
const SAMPLES: &str = "samples.jsonl";

/// Writes the report to the directory `dir`, and creates it first if it is missing. Error: a file
/// that cannot be written, and why.
pub(super) fn write(dir: &Path, bench: &Bench, rows: &[Row], goals: &[Judged]) -> Result {
    let failed = |path: &Path, error: std::io::Error| {
        Failure::Failed(format!("--report: {}: {error}", path.display()))
    };
    fs::create_dir_all(dir).map_err(|error| failed(dir, error))?;
    let mut plots = String::new();
    for (measure, file, title) in plot::PLOTS {
        // One point makes no line.
        if rows.iter().filter(|row| row.key.measure == measure).count() > 1 {
            let lines = plot::lines(rows, measure);
            Chart { title: title.to_owned(), x: X::Bytes, lines }.write(&dir.join(file))?;
            plots.push_str(&format!("![{title}]({file})\n\n"));
        }
    }
    let put = |file: &str, text: &str| {
        let path = dir.join(file);
        fs::write(&path, text).map_err(|error| failed(&path, error))
    };
    put(ROWS, &rows.iter().map(|row| row.json() + "\n").collect::<String>())?;
    put(SAMPLES, &bench.rows.samples().map(|sample| sample + "\n").collect::<String>())?;
    put(TEXT, &text(bench, rows, goals, &plots))
}

fn text(bench: &Bench, rows: &[Row], goals: &[Judged], plots: &str) -> String {
    let runs = (1..).zip(&bench.calibrations);
    let runs: String =
        runs.map(|(run, calibration)| format!("- run {run}: {calibration}\n")).collect();
    let caution = bench.rows.caution();
    let goals = match goals {
        [] => String::new(),
        goals => format!("## Goals\n\n{}\n", goal::markdown(goals, &caution)),
    };
    format!(
        "# `rocinante-bench`\n\n{}\n\n{runs}\n{plots}{goals}## Rows\n\n{}\n{}",
        bench.machine,
        table::markdown(rows, &caution),
        bench.remarks(),
    )
}
