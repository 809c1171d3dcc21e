//! Plots over the size of messages.

use super::plan::{LINK_MTU, MTU};
use super::rows::{Key, Row};
use crate::chart::{BASELINE, Line};
use crate::workers::Measure;

/// The measures that are plotted, with file name and title.
pub(super) const PLOTS: [(Measure, &str, &str); 2] = [
    (Measure::WriteBw, "throughput.svg", "WRITE throughput, Gb/s"),
    (Measure::WriteLat, "latency.svg", "WRITE latency, half round trip, median, µs"),
];

/// The lines of a measure: each backend, its baseline, and the peers.
pub(super) fn lines(rows: &[Row], measure: Measure) -> Vec<Line> {
    let is_of = |row: &&Row| {
        let Key { qps, mtu, link, .. } = row.key;
        row.key.measure == measure && qps == 1 && link.is_plain() && [MTU, LINK_MTU].contains(&mtu)
    };
    let mut lines: Vec<Line> = Vec::new();
    let mut add = |name: String, is_baseline, size: usize, value: f64| {
        let point = (size as f64, value);
        match lines.iter_mut().find(|line| line.name == name) {
            Some(line) => line.points.push(point),
            None => lines.push(Line { name, points: vec![point], is_baseline, ..Line::default() }),
        }
    };
    for row in rows.iter().filter(is_of) {
        add(row.key.name(), false, row.key.size, row.value);
        if let Some(baseline) = row.baseline {
            add(format!("{}{BASELINE}", row.key.name()), true, row.key.size, baseline);
        }
    }
    lines.iter_mut().for_each(|line| line.points.sort_by(|a, b| a.0.total_cmp(&b.0)));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workers::Link;

    #[test]
    fn every_backend_has_a_line_and_its_baseline_another() {
        let row = |netdev, size, mtu, qps, baseline| Row {
            key: Key {
                measure: Measure::WriteBw,
                netdev,
                size,
                mtu,
                qps,
                link: Link::Plain,
                tcp: None,
            },
            posting: None,
            value: size as f64,
            min: 1.0,
            max: 1.0,
            unit: "Gb/s",
            baseline,
            ratio: None,
            samples: 1,
            valid: Some(true),
        };
        let rows = [
            row("udp", 64, MTU, 1, Some(90.0)),
            row("udp", 2, MTU, 1, Some(9.0)),
            row("udp", 2, 1024, 1, Some(9.0)),
            row("udp", 2, MTU, 4, Some(9.0)),
            row("tcp-spin", 64, LINK_MTU, 1, None),
        ];
        let line = |name: &str, points: &[(f64, f64)], is_baseline| Line {
            name: name.to_owned(),
            points: points.to_vec(),
            is_baseline,
            ..Line::default()
        };
        let expected = [
            line("udp", &[(2.0, 2.0), (64.0, 64.0)], false),
            line("udp, raw baseline", &[(2.0, 9.0), (64.0, 90.0)], true),
            line("tcp-spin", &[(64.0, 64.0)], false),
        ];
        assert_eq!(lines(&rows, Measure::WriteBw), expected);
        assert!(lines(&rows, Measure::WriteLat).is_empty());
    }
}
