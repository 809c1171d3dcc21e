//! The report: the same blocks as Markdown and as one file of HTML.

mod render;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use rocinante_cli::output::{Failure, Result, digits};

pub(super) use self::render::{Block, Link as Anchor};
use self::render::{html, markdown};
use super::experiment::Experiment;
use super::judge::{self, Answer, QUESTIONS, Seen, title, unit, with_unit};
use super::plan::{MODES, Mode};
use super::solutions;
use super::store::ROWS;
use super::study::Study;
use crate::chart::{Chart, Line, X};
use crate::goal;

const TITLE: &str = "A study of this machine";

/// The plots: an experiment and a figure over its points, and the file.
const PLOTS: [(Experiment, &str, &str); 20] = {
    use Experiment::{
        Control, Isolation, Load, ManyToOne, Pressure, Rate, Scale, Size, Start, Starvation,
    };
    [
        (Size, "write_gbps", "Throughput of WRITEs, and of TCP's streams"),
        (Size, "send_gbps", "Throughput of SENDs"),
        (Size, "read_gbps", "Throughput of READs"),
        (Size, "p50_us", "Half a round trip, median"),
        (Size, "p999_us", "Half a round trip, 99.9 %"),
        (Scale, "sum_gbps", "All pairs together"),
        (Scale, "slowest_gbps", "The slowest pair"),
        (Scale, "probe_p99_us", "A probe beside them: half a round trip, 99 %"),
        (Scale, "kernel_mib", "Memory of the kernel"),
        (Scale, "start_ms", "From the first start until the last is connected"),
        (Load, "p50_us", "From the planned time to the answer, median"),
        (Load, "p99_us", "From the planned time to the answer, 99 %"),
        (ManyToOne, "sum_gbps", "All senders to one receiver"),
        (Isolation, "probe_p99_us", "A probe beside neighbours at full rate, 99 %"),
        (Starvation, "sum_u18_gbps", "A pair beside busy loops, ACK timeout 18"),
        (Start, "first_byte_last_ms", "From the first start until the last pair moved a message"),
        (Control, "reached_gbps", "The rate reached behind a token bucket"),
        (Rate, "1_thread_mops", "Messages of 64 B of one thread"),
        (Rate, "8_threads_mops", "Messages of 64 B of eight threads"),
        (Pressure, "packets", "Packets of a message, both ways"),
    ]
};

/// Writes the report into the directory of the study. Error: a file cannot be written.
pub(super) fn write(dir: &Path, study: &Study) -> Result {
    let (blocks, plots) = blocks(study)?;
    let put = |file: &str, text: &str| {
        let path = dir.join(file);
        fs::write(&path, text)
            .map_err(|error| Failure::Failed(format!("{}: {error}", path.display())))
    };
    plots.iter().try_for_each(|(file, svg)| put(file, svg))?;
    put("report.md", &markdown(TITLE, &blocks))?;
    put("report.html", &html(TITLE, &blocks))
}

/// The first page.
pub(super) fn summary(study: &Study) -> String {
    let seen = Seen(&study.store.rows);
    markdown(TITLE, &[which_to_use(seen), Block::Markdown(bars(seen))])
}

/// The name of a file, and its text.
type File = (String, String);

/// All blocks of the report, and its plots with their files.
fn blocks(study: &Study) -> Result<(Vec<Block>, Vec<File>)> {
    let seen = Seen(&study.store.rows);
    let session = &study.session;
    let mut blocks = vec![
        Block::Text(format!("{}. {}", session.machine, about(study))),
        Block::Heading("Which to use when", None),
        which_to_use(seen),
        Block::Text(
            "The best of a line wins; modes within 10 % of it are named with it, as good.".into(),
        ),
        Block::Heading("Bars", None),
        Block::Markdown(bars(seen)),
        Block::Heading("Modes", None),
        modes(seen),
        Block::Heading("Solutions for containers", None),
        Block::Text(solutions::THRESHOLDS.into()),
        solutions::table(seen),
    ];
    let mut plots = Vec::new();
    for experiment in Experiment::ALL {
        let Some(rows) = rows(seen, experiment) else { continue };
        blocks.push(Block::Heading(experiment.name(), Some(experiment.name())));
        blocks.push(Block::Text(experiment.about().into()));
        for (_, figure, title) in PLOTS.iter().filter(|(of, ..)| *of == experiment) {
            let Some((chart, samples)) = chart(seen, experiment, figure, title) else { continue };
            let (svg, file) = (chart.svg()?, format!("{}-{figure}.svg", experiment.name()));
            let caption = format!(
                "{}. {samples} for each point: the line goes through the medians, bars \
                 from the smallest to the largest.",
                in_unit(title, figure)
            );
            blocks.push(Block::Plot { file: file.clone(), svg: svg.clone(), caption });
            plots.push((file, svg));
        }
        blocks.push(rows);
    }
    Ok((blocks, plots))
}

fn about(study: &Study) -> String {
    let quick = if study.session.choice.quick { "A quick study" } else { "A study" };
    let skipped = match study.skipped {
        0 => String::new(),
        count => format!(" There was no time for {count} measurements."),
    };
    let busy = match study.store.busy {
        0 => String::new(),
        count => format!(" Other programs had the processors beside {count} of them."),
    };
    let version = env!("CARGO_PKG_VERSION");
    format!(
        "{quick} by rocinante {version}, {} rows: {ROWS} has them all.{busy}{skipped} A line of a \
         mode ends where it could not be measured.",
        study.store.rows.len()
    )
}

/// The page for readers in a hurry.
fn which_to_use(seen: Seen<'_>) -> Block {
    let head = ["need", "use", "", "TCP", "measured as"].map(str::to_owned).to_vec();
    let row = |question: &judge::Question| {
        let figure = question.figure;
        let experiment = question.experiment;
        let (name, Some(Answer { x, modes, value, tcp })) =
            (experiment.name(), question.answer(seen))
        else {
            return [question.need, "not measured", "", "", ""].map(Anchor::none).to_vec();
        };
        let tcp = tcp.map(|(mode, value)| format!("{mode}: {}", with_unit(value, figure)));
        let at = format!("{name}, {}: {}", experiment.point(x), title(figure));
        vec![
            Anchor::none(question.need),
            Anchor::none(&modes.join(", ")),
            Anchor::none(&with_unit(value, figure)),
            Anchor::none(&tcp.unwrap_or_default()),
            Anchor { text: at, to: Some(format!("rows-{name}")) },
        ]
    };
    Block::Table { id: None, head, rows: QUESTIONS.iter().map(row).collect() }
}

fn bars(seen: Seen<'_>) -> String {
    goal::markdown(&judge::bars(seen), "")
}

fn modes(seen: Seen<'_>) -> Block {
    let row = |mode: &Mode| {
        let has = Experiment::ALL.into_iter().filter(|of| !seen.points(*of, mode.name).is_empty());
        let has: Vec<&str> = has.map(Experiment::name).collect();
        let missing = seen.missing(mode.name).unwrap_or_default();
        [mode.name, mode.about, &has.join(", "), missing].map(Anchor::none).to_vec()
    };
    let head = ["mode", "", "measured", "not measured, because"].map(str::to_owned).to_vec();
    Block::Table { id: None, head, rows: MODES.iter().map(row).collect() }
}

/// A table of all rows of an experiment.
fn rows(seen: Seen<'_>, experiment: Experiment) -> Option<Block> {
    let of = || seen.0.iter().filter(|row| row.key.experiment == experiment.name());
    let figures: BTreeSet<&str> =
        of().flat_map(|row| row.figures.keys().map(String::as_str)).collect();
    if figures.is_empty() {
        return None;
    }
    let mut head = vec!["mode".to_owned(), experiment.x().to_owned(), "samples".to_owned()];
    head.extend(figures.iter().map(|figure| in_unit(&title(figure), figure)));
    let mut rows = Vec::new();
    for mode in &MODES {
        for x in seen.points(experiment, mode.name) {
            let spread = |figure: &&str| seen.spread(experiment, mode.name, x, figure);
            let samples = figures.iter().filter_map(spread).map(|(_, count)| count).max();
            let mut cells =
                vec![mode.name.to_owned(), experiment.point(x), samples.unwrap_or(0).to_string()];
            cells.extend(figures.iter().map(|figure| match spread(figure) {
                None => "–".to_owned(),
                Some((spread, 1)) => digits(spread.median),
                Some((spread, _)) => {
                    let [median, min, max] = [spread.median, spread.min, spread.max].map(digits);
                    format!("{median} ({min}–{max})")
                }
            }));
            rows.push(cells.iter().map(|cell| Anchor::none(cell)).collect());
        }
    }
    Some(Block::Table { id: Some(format!("rows-{}", experiment.name())), head, rows })
}

/// The title of a figure with its unit, if it has one.
fn in_unit(title: &str, figure: &str) -> String {
    let unit = unit(figure);
    if unit.is_empty() { title.to_owned() } else { format!("{title}, {unit}") }
}

/// A plot, and the number of samples of a point. `None` if there are not two points to join.
fn chart(
    seen: Seen<'_>,
    experiment: Experiment,
    figure: &str,
    title: &str,
) -> Option<(Chart, String)> {
    let mut counts = BTreeSet::new();
    let line = |mode: &Mode| {
        let mut line = Line { name: mode.name.to_owned(), ..Line::default() };
        for x in seen.points(experiment, mode.name) {
            if let Some((spread, count)) = seen.spread(experiment, mode.name, x, figure) {
                counts.insert(count);
                line.points.push((x as f64, spread.median));
                line.spread.push((x as f64, spread.min, spread.max));
            }
        }
        (!line.points.is_empty()).then_some(line)
    };
    let lines: Vec<Line> = MODES.iter().filter_map(line).collect();
    if lines.iter().all(|line| line.points.len() < 2) {
        return None;
    }
    let x = match experiment {
        Experiment::Size => X::Bytes,
        Experiment::Scale => X::Count("pairs of containers at once"),
        Experiment::Load => X::Percent("percent of the mode's own highest rate"),
        Experiment::ManyToOne => X::Count("senders"),
        Experiment::Isolation => X::Few("neighbours at full rate"),
        Experiment::Starvation => X::Few("busy loops"),
        Experiment::Failure => X::Few("event"),
        Experiment::Start => X::Count("programs"),
        Experiment::Control => X::Count("Mb/s asked"),
        Experiment::Rate => X::Count("queue pairs, or streams"),
        Experiment::Pressure => X::Bytes,
    };
    let samples = match (counts.first(), counts.last()) {
        (Some(1), Some(1)) => "1 sample".to_owned(),
        (Some(first), Some(last)) if first < last => format!("{first} to {last} samples"),
        (_, last) => format!("{} samples", last.unwrap_or(&0)),
    };
    Some((Chart { title: in_unit(title, figure), x, lines }, samples))
}
