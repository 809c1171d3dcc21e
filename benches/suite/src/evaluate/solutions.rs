//! Solutions for RDMA in containers, side by side: modes of this study by its rows, and others by
//! published sources.

use rocinante_cli::output::digits;

use super::experiment::{Experiment, VERDICTS};
use super::judge::{Seen, with_unit};
use super::report::{Anchor, Block};

/// The properties, and the solutions that are not on this machine, with what was published of them.
const PUBLISHED: &str = include_str!("solutions.tsv");

/// The words of measured cells: the first whose bound a value keeps.
///
/// Isolation is a probe's 99th percentile beside the most neighbours at full rate, by that alone;
/// fairness is Jain's index of the most pairs; control is how far the rate behind a token bucket of
/// [`ASKED`] Mb/s is from that.
const ISOLATION: [(f64, &str); 3] = [(1.5, "strong"), (4.0, "fair"), (f64::INFINITY, "weak")];
const CONTROL: [(f64, &str); 3] = [(0.02, "exact"), (0.1, "close"), (f64::INFINITY, "loose")];
const FAIRNESS: [(f64, &str); 3] = [(0.95, "even"), (0.8, "uneven"), (0.0, "unfair")];

/// Mb/s.
const ASKED: u64 = 100;

/// The same, for readers.
pub(super) const THRESHOLDS: &str = "Words of measured cells: a probe's p99 beside the most \
    neighbours at full rate, by that of the probe alone, is strong up to 1.5, fair up to 4, else \
    weak. Jain's index of the most pairs is even from 0.95, uneven from 0.8, else unfair. The \
    rate behind a token bucket of 100 Mb/s is exact within 2 %, close within 10 %, else loose. \
    Published figures are of other machines, with cards: they stand in no comparison with measured \
    ones.";

/// The modes that have a row.
const MEASURED: [&str; 6] =
    ["udp", "packet", "afxdp", "packet-agent", "afxdp-agent", "tcp-blocking"];

/// The table of all solutions.
pub(super) fn table(seen: Seen<'_>) -> Block {
    let mut lines = PUBLISHED.lines();
    let head = lines.next().unwrap_or_default().split('\t').map(str::to_owned).collect();
    let measured = MEASURED.iter().map(|mode| {
        let mut row = vec![Anchor::none(mode), Anchor::none("*measured* here")];
        row.extend(cells(seen, mode));
        row
    });
    let published = lines.map(|line| line.split('\t').map(Anchor::none).collect());
    Block::Table { id: Some("solutions".into()), head, rows: measured.chain(published).collect() }
}

/// The cells of a mode. Those that rows have lead to them.
fn cells(seen: Seen<'_>, mode: &str) -> Vec<Anchor> {
    use Experiment::{Control, Isolation, Pressure, Scale, Size};
    let value = |experiment, x, figure| {
        let (spread, _) = seen.spread(experiment, mode, x, figure)?;
        Some(spread.median)
    };
    let last = |experiment| seen.points(experiment, mode).pop();
    let isolation = || {
        let most = last(Isolation).filter(|most| *most > 0)?;
        let p99 = |x| value(Isolation, x, "probe_p99_us");
        let times = p99(most)? / p99(0).filter(|alone| *alone > 0.0)?;
        let word = ISOLATION.iter().find(|(bound, _)| times <= *bound)?.1;
        Some(format!("{word}: a probe's p99 × {}", digits(times)))
    };
    let resources = || {
        let cpu = value(Scale, 1, "cpu_s_per_gb")?;
        let memory = value(Scale, 1, "process_mib")?;
        Some(format!("{}, {}", with_unit(cpu, "cpu_s_per_gb"), with_unit(memory, "process_mib")))
    };
    let control = || {
        let of = value(Control, ASKED, "of_asked")?;
        let word = CONTROL.iter().find(|(bound, _)| (of - 1.0).abs() <= *bound)?.1;
        let verdicts = value(Control, VERDICTS, "as_documented")
            .zip(value(Control, VERDICTS, "controls"))
            .map(|(documented, all)| format!("; {documented} of {all} controls as documented"));
        let rate = format!("{word}: {} of {ASKED} Mb/s", digits(of * ASKED as f64));
        Some(rate + &verdicts.unwrap_or_default())
    };
    let pressure = || {
        let size = last(Pressure)?;
        let [packets, bytes] = ["packets", "header_bytes"].map(|of| value(Pressure, size, of));
        let tracked = value(Pressure, size, "tracked")
            .map(|tracked| format!("; {tracked} entries of connection tracking"));
        let costs = format!(
            "{} packets and {} header bytes for {} KiB",
            digits(packets?),
            digits(bytes?),
            digits(size as f64 / 1024.0)
        );
        Some(costs + &tracked.unwrap_or_default())
    };
    let size = |x, figure| Some(with_unit(value(Size, x, figure)?, figure));
    let scale = || {
        let most = last(Scale)?;
        let (jain, errors) = (value(Scale, most, "jain")?, value(Scale, most, "errors")?);
        let word = FAIRNESS.iter().find(|(bound, _)| jain >= *bound)?.1;
        Some(format!("{most} pairs: {word}, {errors} errors"))
    };
    let rights = || {
        let [caps, uid, seccomp] =
            ["capabilities", "uid", "seccomp"].map(|figure| value(Scale, 1, figure));
        let filter = if seccomp? > 0.0 { "filtered" } else { "not filtered" };
        Some(format!("{} capabilities as uid {}, {filter}", caps?, uid?))
    };
    let ours = mode != "tcp-blocking";
    let run = "unmodified programs, by `rocinante run`";
    let ease = || {
        let of = |mode: &str| {
            let (spread, _) = seen.spread(Size, mode, 1 << 20, "write_gbps")?;
            Some(spread.median)
        };
        let times = of(&format!("perftest-{mode}"))? / of(mode).filter(|own| *own > 0.0)?;
        Some(format!("{run}: perftest's WRITEs of 1 MiB have × {}", digits(times)))
    };
    let link = |experiment: Experiment, text: Option<String>| match text {
        Some(text) => Anchor { text, to: Some(format!("rows-{}", experiment.name())) },
        None => Anchor::none("not measured"),
    };
    vec![
        link(Isolation, isolation()),
        link(Control, control()),
        link(Scale, resources()),
        link(Size, size(1 << 20, "write_gbps")),
        link(Size, size(64, "p50_us")),
        link(Scale, scale()),
        Anchor::none("no, no card"),
        Anchor::none(if ours {
            concat!("version ", env!("CARGO_PKG_VERSION"))
        } else {
            "the kernel's"
        }),
        match ease() {
            Some(text) => link(Size, Some(text)),
            None => Anchor::none(if ours { run } else { "no RDMA" }),
        },
        link(Scale, rights()),
        link(Pressure, pressure()),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::judge::tests::row;
    use super::*;

    fn rows_of(block: Block) -> Vec<Vec<Anchor>> {
        let Block::Table { rows, .. } = block else { panic!("a table") };
        rows
    }

    #[test]
    fn every_solution_has_a_cell_for_each_property() {
        let Block::Table { head, rows, .. } = table(Seen(&[])) else { panic!("a table") };
        assert!(rows.iter().all(|row| row.len() == head.len()));
        for row in &rows {
            let published = row[1].text.starts_with("*published*: ");
            assert!(published != (row[1].text == "*measured* here"), "{row:?}");
            assert!(row.iter().all(|cell| cell.to.is_none()), "no rows to lead to: {row:?}");
        }
    }

    #[test]
    fn control_and_pressure_are_of_their_rows() {
        let of = |reached| {
            let rows = [
                row("control", "udp", 0, &[("controls", 46.0), ("as_documented", 45.0)]),
                row("control", "udp", ASKED, &[("of_asked", reached)]),
                row("pressure", "udp", 1024, &[("packets", 2.0), ("header_bytes", 120.0)]),
                row(
                    "pressure",
                    "udp",
                    65_536,
                    &[("packets", 18.0), ("header_bytes", 1200.0), ("tracked", 2.0)],
                ),
            ];
            let rows = rows_of(table(Seen(&rows)));
            let row = rows.into_iter().find(|row| row[0].text == "udp").unwrap();
            assert_eq!(row[3].to.as_deref(), Some("rows-control"));
            assert_eq!(row[12].to.as_deref(), Some("rows-pressure"));
            (row[3].text.clone(), row[12].text.clone())
        };
        let pressure = "18.0 packets and 1200 header bytes for 64.0 KiB; 2 entries of connection \
                        tracking";
        for (reached, word) in [(0.99, "exact: 99.0"), (1.05, "close: 105"), (0.5, "loose: 50.0")] {
            let control = format!("{word} of 100 Mb/s; 45 of 46 controls as documented");
            assert_eq!(of(reached), (control, pressure.to_owned()));
        }
    }

    #[test]
    fn ease_is_of_the_rows_of_programs_where_there_are_any() {
        let large = |mode: &str, gbps| row("size", mode, 1 << 20, &[("write_gbps", gbps)]);
        let rows = [large("udp", 20.0), large("perftest-udp", 19.0), large("packet", 25.0)];
        let rows = rows_of(table(Seen(&rows)));
        let cell = |mode: &str| rows.iter().find(|row| row[0].text == mode).unwrap()[10].clone();
        let run = "unmodified programs, by `rocinante run`";
        let text = format!("{run}: perftest's WRITEs of 1 MiB have × 0.950");
        assert_eq!(cell("udp"), Anchor { text, to: Some("rows-size".into()) });
        assert_eq!(cell("packet"), Anchor::none(run));
        assert_eq!(cell("tcp-blocking"), Anchor::none("no RDMA"));
    }

    #[test]
    fn measured_cells_follow_the_thresholds_and_lead_to_their_rows() {
        let probe = |x, p99| row("isolation", "udp", x, &[("probe_p99_us", p99)]);
        let scale = |x, jain, errors| {
            let figures =
                [("jain", jain), ("errors", errors), ("cpu_s_per_gb", 0.5), ("process_mib", 9.0)];
            row("scale", "udp", x, &figures)
        };
        let cells = |p99, jain| {
            let rows = [probe(0, 10.0), probe(4, p99), scale(1, 1.0, 0.0), scale(100, jain, 2.0)];
            let rows = rows_of(table(Seen(&rows)));
            let row = rows.into_iter().find(|row| row[0].text == "udp").unwrap();
            assert_eq!(row[2].to.as_deref(), Some("rows-isolation"));
            assert_eq!(row[7].to.as_deref(), Some("rows-scale"));
            (row[2].text.clone(), row[7].text.clone())
        };
        for (p99, jain, isolation, fairness) in [
            (15.0, 0.95, "strong: a probe's p99 × 1.50", "100 pairs: even, 2 errors"),
            (16.0, 0.94, "fair: a probe's p99 × 1.60", "100 pairs: uneven, 2 errors"),
            (41.0, 0.79, "weak: a probe's p99 × 4.10", "100 pairs: unfair, 2 errors"),
        ] {
            assert_eq!(cells(p99, jain), (isolation.to_owned(), fairness.to_owned()));
        }
    }
}
