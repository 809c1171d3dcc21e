//! Line charts, as SVG.

use std::path::Path;

use plotters::element::DashedPathElement;
use plotters::prelude::*;
use rocinante_cli::output::{Failure, Result};

/// A chart over one quantity.
#[derive(Debug, Clone)]
pub(crate) struct Chart {
    pub(crate) title: String,
    /// The quantity of the horizontal axis.
    pub(crate) x: X,
    pub(crate) lines: Vec<Line>,
}

/// The quantity of a horizontal axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum X {
    /// Bytes of a message; the axis is logarithmic, as all that follow.
    Bytes,
    /// A number of things.
    Count(&'static str),
    /// Percent of something; a linear axis.
    Percent(&'static str),
    /// A number of things, or none of them; a linear axis.
    Few(&'static str),
}

/// A line of a chart.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Line {
    pub(crate) name: String,
    /// Where it is, and its value.
    pub(crate) points: Vec<(f64, f64)>,
    /// Where it is, and the smallest and the largest of several values.
    pub(crate) spread: Vec<(f64, f64, f64)>,
    /// Whether it is a dashed line.
    pub(crate) is_baseline: bool,
}

/// The end of a baseline's name.
pub(crate) const BASELINE: &str = ", raw baseline";

impl Line {
    /// The peer of this line, or of the line that this one is the baseline of.
    fn peer(&self) -> &str {
        self.name.strip_suffix(BASELINE).unwrap_or(&self.name)
    }
}

impl Chart {
    /// Writes the chart to a file. Error: it cannot be written.
    pub(crate) fn write(&self, path: &Path) -> Result {
        let failed = |why: &dyn std::fmt::Display| {
            Failure::Failed(format!("--report: {}: {why}", path.display()))
        };
        std::fs::write(path, self.svg()?).map_err(|error| failed(&error))
    }

    /// The chart as SVG.
    pub(crate) fn svg(&self) -> Result<String> {
        let mut svg = String::new();
        let drawn = self.draw(&mut svg);
        drawn.map_err(|error| Failure::Failed(format!("{}: {error}", self.title)))?;
        Ok(svg)
    }

    fn draw<'a>(&'a self, svg: &'a mut String) -> Result<(), Box<dyn std::error::Error>> {
        let root = SVGBackend::with_string(svg, (960, 600)).into_drawing_area();
        root.fill(&WHITE)?;
        // Beside the chart: in it they would hide lines.
        let (root, names) = root.split_horizontally(790);
        for (line, y) in self.lines.iter().zip((60..).step_by(18)) {
            let (style, stroke) = (colour(line.peer()).stroke_width(2), [(4, y), (28, y)]);
            if line.is_baseline {
                names.draw(&DashedPathElement::new(stroke, 4, 4, style))?;
            } else {
                names.draw(&PathElement::new(stroke, style))?;
            }
            names.draw(&Text::new(line.name.as_str(), (34, y - 6), ("sans-serif", 12)))?;
        }
        let ends = |value: &(f64, f64, f64)| [(value.0, value.1), (value.0, value.2)];
        let points = self
            .lines
            .iter()
            .flat_map(|line| line.points.iter().copied().chain(line.spread.iter().flat_map(ends)));
        let points: Vec<(f64, f64)> = points.collect();
        let (low, high) = range(points.iter().map(|point| point.1));
        // An axis of few decades needs more marks.
        let base = if high / low < 100.0 { 2.0 } else { 10.0 };
        let y = (low..high).log_scale().base(base);
        let (left, right) = range(points.iter().map(|point| point.0));
        let mut builder = ChartBuilder::on(&root);
        builder.caption(&self.title, ("sans-serif", 22)).margin(12);
        builder.x_label_area_size(44).y_label_area_size(64);
        // The two kinds of axes have different types.
        if matches!(self.x, X::Percent(_) | X::Few(_)) {
            let most = if matches!(self.x, X::Percent(_)) { 100.0 } else { right };
            let mut chart = builder.build_cartesian_2d(0.0..most, y)?;
            chart.configure_mesh().x_desc(self.x.name()).y_label_formatter(&plain).draw()?;
            self.draw_lines(&mut chart)?;
        } else {
            let x = (left..right).log_scale().base(2.0);
            let mut chart = builder.build_cartesian_2d(x, y)?;
            let label: &dyn Fn(&f64) -> String =
                if self.x == X::Bytes { &bytes } else { &|value| format!("{value:.0}") };
            chart
                .configure_mesh()
                .x_desc(self.x.name())
                .x_label_formatter(&label)
                .y_label_formatter(&plain)
                .draw()?;
            self.draw_lines(&mut chart)?;
        }
        Ok(root.present()?)
    }

    fn draw_lines<'a, XAxis>(
        &'a self,
        chart: &mut ChartContext<'a, SVGBackend<'a>, Cartesian2d<XAxis, LogCoord<f64>>>,
    ) -> Result<(), Box<dyn std::error::Error>>
    where
        XAxis: Ranged<ValueType = f64> + 'a,
    {
        for line in &self.lines {
            let style = colour(line.peer()).stroke_width(2);
            let points = line.points.iter().copied();
            if line.is_baseline {
                let dashes = DashedLineSeries::new(points, 4, 4, style);
                chart.draw_series(dashes).map_err(told)?;
                continue;
            }
            let dots = points.clone().map(|point| Circle::new(point, 3, style.filled()));
            chart.draw_series(dots).map_err(told)?;
            let thin = colour(line.peer()).stroke_width(1);
            let spread = line.spread.iter();
            let bars = spread.map(|(x, min, max)| PathElement::new([(*x, *min), (*x, *max)], thin));
            chart.draw_series(bars).map_err(told)?;
            chart.draw_series(LineSeries::new(points, style)).map_err(told)?;
        }
        Ok(())
    }
}

fn told(error: impl std::fmt::Display) -> Box<dyn std::error::Error> {
    error.to_string().into()
}

impl X {
    const fn name(self) -> &'static str {
        match self {
            Self::Bytes => "bytes of a message",
            Self::Count(name) | Self::Percent(name) | Self::Few(name) => name,
        }
    }
}

/// A range around positive values.
fn range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let positive = values.filter(|value| *value > 0.0);
    let (min, max) = positive.fold((f64::MAX, f64::MIN), |(min, max), v| (min.min(v), max.max(v)));
    if min <= max { (min / 1.2, max * 1.2) } else { (1.0, 10.0) }
}

fn plain(value: &f64) -> String {
    value.to_string()
}

/// Each peer has the same colour in every chart, and its baseline has that colour, too.
fn colour(peer: &str) -> RGBColor {
    match peer {
        "udp" => RGBColor(0x1f, 0x77, 0xb4),
        "packet" => RGBColor(0xd6, 0x27, 0x28),
        "afxdp" => RGBColor(0x2c, 0xa0, 0x2c),
        "packet-agent" => RGBColor(0xe3, 0x77, 0xc2),
        "afxdp-agent" => RGBColor(0x98, 0xdf, 0x8a),
        "vxlan-udp" => RGBColor(0x39, 0x3b, 0x79),
        "vxlan-packet" => RGBColor(0x84, 0x3c, 0x39),
        "vxlan-tcp" => RGBColor(0x63, 0x79, 0x39),
        "bare-udp" => RGBColor(0xae, 0xc7, 0xe8),
        "bare-packet" => RGBColor(0xff, 0x98, 0x96),
        "bare-tcp" => RGBColor(0xdb, 0xdb, 0x8d),
        "podman-udp" => RGBColor(0x52, 0x52, 0xa3),
        "perftest-udp" => RGBColor(0x00, 0x3f, 0x5c),
        "perftest-packet" => RGBColor(0x7b, 0x00, 0x1c),
        "ucx-udp" => RGBColor(0x6b, 0xae, 0xd6),
        "ucx-packet" => RGBColor(0xfd, 0xae, 0x6b),
        "rxe" => RGBColor(0x94, 0x67, 0xbd),
        "hw" | "kernel" => RGBColor(0xff, 0x7f, 0x0e),
        "tcp-spin cubic" | "tcp-spin" => RGBColor(0x7f, 0x7f, 0x7f),
        "tcp-spin bbr" => RGBColor(0xc7, 0xc7, 0xc7),
        "tcp-blocking cubic" | "tcp-blocking" => RGBColor(0x17, 0xbe, 0xcf),
        "tcp-blocking bbr" => RGBColor(0x9e, 0xda, 0xe5),
        "iperf3 cubic" | "iperf3 bbr" | "iperf3" => BLACK,
        "quinn-udp" => RGBColor(0xbc, 0xbd, 0x22),
        _ => RGBColor(0x8c, 0x56, 0x4b),
    }
}

/// A number of bytes, in short.
pub(crate) fn bytes(size: &f64) -> String {
    match *size {
        size if size >= 1_048_576.0 => format!("{:.0} Mi", size / 1_048_576.0),
        size if size >= 1024.0 => format!("{:.0} Ki", size / 1024.0),
        size => format!("{size:.0}"),
    }
}
