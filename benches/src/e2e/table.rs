//! The report as Markdown.

use std::fmt::Write as _;

use rocinante_cli::measure::Spread;

use super::report::Report;
use super::worker::Subject;
use crate::figure::Figure;

/// All of the report.
pub(super) fn markdown(report: &Report) -> String {
    let mut out = String::new();
    header(report, &mut out);
    let subjects = [Subject::Port, Subject::Ours];
    let measured = |subject| report.rows.iter().any(|row| row.samples.contains_key(&subject));
    let subjects: Vec<_> = subjects.into_iter().filter(|subject| measured(*subject)).collect();
    let mut columns = vec!["netdev".to_owned(), "path MTU".to_owned(), "figure".to_owned()];
    columns.push("ceiling".to_owned());
    for subject in &subjects {
        columns.push(subject.name().to_owned());
        columns.push(format!("{}/ceiling", subject.name()));
    }
    columns.push("goal".to_owned());
    let _ = writeln!(out, "| {} |", columns.join(" | "));
    let _ = writeln!(out, "|{}", "---|".repeat(columns.len()));
    let mut seen = Vec::new();
    for row in &report.rows {
        if !seen.contains(&(row.netdev, row.mtu)) {
            seen.push((row.netdev, row.mtu));
            lines(report, &subjects, row.netdev, row.mtu, &mut out);
        }
    }
    let _ = writeln!(
        out,
        "\nEach cell: smallest / median / largest of the runs; a ratio is of two figures taken one right after the other, and \
         counts only if the cores were as near to each other all the time."
    );
    if seen.iter().any(|(netdev, _)| *netdev == "afxdp") {
        let _ = writeln!(out, "The ceiling of afxdp is the backend's own port without an engine.");
    }
    for row in &report.rows {
        for error in &row.errors {
            let _ = writeln!(out, "Run {}, {} at {}: {error}", row.run, row.netdev, row.mtu);
        }
    }
    out
}

fn header(report: &Report, out: &mut String) {
    let machine = &report.machine;
    let _ = writeln!(out, "`{}`: {}", report.command, report.path);
    let _ = writeln!(out, "\n{}, {} CPUs, Linux {}", machine.cpu, machine.cpus, machine.kernel);
    let samples = || report.rows.iter().flat_map(|row| row.samples.values());
    let crc = Spread::of(samples().map(|sample| sample.mode.crc_ns).collect());
    let copy = Spread::of(samples().map(|sample| sample.mode.memcpy_ns).collect());
    let handoff = Spread::of(samples().map(|sample| sample.mode.handoff_ns).collect());
    let (crc, copy, handoff) = (cell(crc, 0), cell(copy, 0), cell(handoff, 0));
    let _ =
        writeln!(out, "4 KiB: CRC-32 {crc} ns, copy {copy} ns; from core to core: {handoff} ns");
    for (index, run) in report.runs.iter().enumerate() {
        let gbps = |value: Option<f64>| value.map_or("–".to_owned(), |v| format!("{v:.1} Gb/s"));
        let verdict =
            run.invalid.as_ref().map_or_else(String::new, |why| format!(": INVALID, {why}"));
        let (iperf3, tcp) = (gbps(run.iperf3), gbps(run.tcp));
        let _ = writeln!(out, "Run {}: iperf3 {iperf3}, spinning TCP {tcp}{verdict}", index + 1);
    }
    out.push('\n');
}

fn lines(report: &Report, subjects: &[Subject], netdev: &str, mtu: usize, out: &mut String) {
    for figure in Figure::ALL {
        let spread = |subject| report.spread(netdev, mtu, |row| row.figure(subject, figure));
        let all = [Subject::Ceiling, Subject::Port, Subject::Ours];
        if all.into_iter().all(|subject| spread(subject).is_none()) {
            continue;
        }
        let _ = write!(out, "| {netdev} | {mtu} | {} |", figure.title());
        let digits = if figure == Figure::Large || figure == Figure::Medium { 1 } else { 2 };
        let _ = write!(out, " {} |", cell(spread(Subject::Ceiling), digits));
        for subject in subjects {
            let ratio = report.spread(netdev, mtu, |row| row.ratio(*subject, figure));
            let _ = write!(out, " {} | {} |", cell(spread(*subject), digits), cell(ratio, 2));
        }
        let _ = writeln!(out, " {} |", goal(netdev, mtu, figure));
    }
}

/// What the ratio is to be.
fn goal(netdev: &str, mtu: usize, figure: Figure) -> &'static str {
    match (figure, netdev, mtu) {
        (Figure::Latency, ..) => "≤ 1.5",
        (Figure::Large, "afxdp", 4096) => "≥ 0.8",
        (Figure::Large, _, 4096) => "≥ 0.6",
        _ => "",
    }
}

fn cell(spread: Option<Spread>, digits: usize) -> String {
    spread.map_or("–".to_owned(), |Spread { min, median, max }| {
        format!("{min:.digits$} / {median:.digits$} / {max:.digits$}")
    })
}
