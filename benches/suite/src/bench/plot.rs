//! Plots over the size of messages, as SVG.

use std::path::Path;

use plotters::element::DashedPathElement;
use plotters::prelude::*;

use super::plan::{LINK_MTU, MTU};
use super::rows::{Key, Row};
use crate::workers::Measure;
use rocinante_cli::output::{Failure, Result};

/// A line of a plot: points of size and value.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Line {
    name: String,
    points: Vec<(f64, f64)>,
    is_baseline: bool,
}

impl Line {
    /// The peer of this line, or of the line that this one is the baseline of.
    fn peer(&self) -> &str {
        self.name.strip_suffix(BASELINE).unwrap_or(&self.name)
    }
}

const BASELINE: &str = ", raw baseline";

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
            None => lines.push(Line { name, points: vec![point], is_baseline }),
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

/// Writes a plot of `lines`, both axes logarithmic. Error: the file cannot be written.
pub(super) fn write(path: &Path, title: &str, lines: &[Line]) -> Result {
    draw(path, title, lines)
        .map_err(|error| Failure::Failed(format!("{}: {error}", path.display())))
}

fn draw(path: &Path, title: &str, lines: &[Line]) -> Result<(), Box<dyn std::error::Error>> {
    let points = || lines.iter().flat_map(|line| &line.points);
    let range = |value: fn(&(f64, f64)) -> f64| {
        let values = points().map(value).filter(|value| *value > 0.0);
        let (min, max) =
            values.fold((f64::MAX, f64::MIN), |(min, max), v| (min.min(v), max.max(v)));
        if min <= max { (min / 1.2, max * 1.2) } else { (1.0, 10.0) }
    };
    let ((x_min, x_max), (y_min, y_max)) = (range(|point| point.0), range(|point| point.1));
    let root = SVGBackend::new(path, (960, 600)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 22))
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(
            (x_min..x_max).log_scale().base(2.0),
            (y_min..y_max).log_scale().base(base(y_min, y_max)),
        )?;
    chart
        .configure_mesh()
        .x_desc("bytes of a message")
        .x_label_formatter(&bytes)
        .y_label_formatter(&|value| value.to_string())
        .draw()?;
    for line in lines {
        let style = colour(line.peer()).stroke_width(2);
        let points = line.points.iter().copied();
        if line.is_baseline {
            chart
                .draw_series(DashedLineSeries::new(points, 4, 4, style))?
                .label(&line.name)
                .legend(move |(x, y)| DashedPathElement::new([(x, y), (x + 24, y)], 4, 4, style));
        } else {
            let dots = points.clone().map(|point| Circle::new(point, 3, style.filled()));
            chart.draw_series(dots)?;
            chart
                .draw_series(LineSeries::new(points, style))?
                .label(&line.name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 24, y)], style));
        }
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .draw()?;
    root.present()?;
    Ok(())
}

/// The base of an axis's marks: an axis of few decades needs more marks.
fn base(min: f64, max: f64) -> f64 {
    if max / min < 100.0 { 2.0 } else { 10.0 }
}

/// Each peer has the same colour in every plot, and its baseline has that colour, too.
fn colour(peer: &str) -> RGBColor {
    match peer {
        "udp" => RGBColor(0x1f, 0x77, 0xb4),
        "packet" => RGBColor(0xd6, 0x27, 0x28),
        "afxdp" => RGBColor(0x2c, 0xa0, 0x2c),
        "rxe" => RGBColor(0x94, 0x67, 0xbd),
        "hw" => RGBColor(0xff, 0x7f, 0x0e),
        "tcp-spin cubic" => RGBColor(0x7f, 0x7f, 0x7f),
        "tcp-spin bbr" => RGBColor(0xc7, 0xc7, 0xc7),
        "tcp-blocking cubic" => RGBColor(0x17, 0xbe, 0xcf),
        "tcp-blocking bbr" => RGBColor(0x9e, 0xda, 0xe5),
        "iperf3 cubic" | "iperf3 bbr" => BLACK,
        "quinn-udp" => RGBColor(0xbc, 0xbd, 0x22),
        _ => RGBColor(0x8c, 0x56, 0x4b),
    }
}

fn bytes(size: &f64) -> String {
    match *size {
        size if size >= 1_048_576.0 => format!("{:.0} Mi", size / 1_048_576.0),
        size if size >= 1024.0 => format!("{:.0} Ki", size / 1024.0),
        size => format!("{size:.0}"),
    }
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
