//! What the rows say: which mode to use when, and the bars.

use rocinante_cli::measure::Spread;
use rocinante_cli::output::digits;

use super::experiment::Experiment;
use super::plan::{MODES, Mode, PAIRS_MAX};
use super::store::Row;
use crate::goal::{Bound, Goal, Judged};
use crate::workers::Link;

/// Modes within this part of the best are as good: runs differ by as much.
const AS_GOOD: f64 = 0.9;

/// The rows, to look figures up in.
#[derive(Clone, Copy)]
pub(super) struct Seen<'a>(pub(super) &'a [Row]);

impl Seen<'_> {
    /// The values of a figure in all rounds: their spread and their number.
    pub(super) fn spread(
        &self,
        experiment: Experiment,
        mode: &str,
        x: u64,
        figure: &str,
    ) -> Option<(Spread, usize)> {
        let is_of = |row: &&Row| {
            row.key.experiment == experiment.name() && row.key.mode == mode && row.key.x == x
        };
        let rows = self.0.iter().filter(is_of);
        let values: Vec<f64> = rows.filter_map(|row| row.figures.get(figure).copied()).collect();
        let count = values.len();
        Some((Spread::of(values)?, count))
    }

    fn value(&self, experiment: Experiment, mode: &str, x: u64, figure: &str) -> Option<f64> {
        Some(self.spread(experiment, mode, x, figure)?.0.median)
    }

    /// The points of an experiment that any row of a mode has figures at.
    pub(super) fn points(&self, experiment: Experiment, mode: &str) -> Vec<u64> {
        let is_of = |row: &&Row| {
            row.key.experiment == experiment.name() && row.key.mode == mode && row.missing.is_none()
        };
        let mut points: Vec<u64> = self.0.iter().filter(is_of).map(|row| row.key.x).collect();
        points.sort_unstable();
        points.dedup();
        points
    }

    /// The last reason why a mode has no figures.
    pub(super) fn missing(&self, mode: &str) -> Option<&str> {
        let rows = self.0.iter().rev().filter(|row| row.key.mode == mode);
        rows.filter_map(|row| row.missing.as_deref()).next()
    }
}

/// A question of a user, and the figure that answers it.
pub(super) struct Question {
    pub(super) need: &'static str,
    pub(super) experiment: Experiment,
    /// The point; `None` for the largest that was measured.
    pub(super) x: Option<u64>,
    pub(super) figure: &'static str,
    pub(super) rises: bool,
    /// The modes that come into question.
    of: fn(&Mode) -> bool,
}

const fn question(
    need: &'static str,
    experiment: Experiment,
    x: Option<u64>,
    figure: &'static str,
    rises: bool,
    of: fn(&Mode) -> bool,
) -> Question {
    Question { need, experiment, x, figure, rises, of }
}

const SMALL: Option<u64> = Some(64);
const LARGE: Option<u64> = Some(1 << 20);

fn on_one_host(mode: &Mode) -> bool {
    mode.link == Link::Plain && !mode.is_programs()
}

fn without_rights(mode: &Mode) -> bool {
    on_one_host(mode) && (mode.is_handed() || mode.is_tcp() || mode.name.ends_with("udp"))
}

/// The table behind the report's first page. In each line the best mode wins, and those within
/// [`AS_GOOD`] of it are as good.
pub(super) static QUESTIONS: [Question; 11] = {
    use Experiment::{Failure, Load, Rate, Scale, Size};
    [
        question("small messages, soon", Size, SMALL, "p50_us", false, on_one_host),
        question("… and always soon", Size, SMALL, "p99_us", false, on_one_host),
        question("large messages", Size, LARGE, "write_gbps", true, on_one_host),
        question("… without rights", Size, LARGE, "write_gbps", true, without_rights),
        question("small ones without rights", Size, SMALL, "p50_us", false, without_rights),
        question("large ones over VXLAN", Size, LARGE, "write_gbps", true, |mode| {
            mode.link == Link::Vxlan
        }),
        question("many containers at once", Scale, None, "sum_gbps", true, on_one_host),
        question("… for little processor", Scale, None, "cpu_s_per_gb", false, on_one_host),
        question("requests at half load", Load, Some(50), "p99_us", false, on_one_host),
        question("most small messages", Rate, None, "1_thread_mops", true, on_one_host),
        question("work after a killed peer", Failure, Some(0), "again_ms", false, on_one_host),
    ]
};

/// The answer to a question.
#[derive(Debug, PartialEq)]
pub(super) struct Answer {
    /// The point that it is of.
    pub(super) x: u64,
    /// The best, and those that are as good.
    pub(super) modes: Vec<&'static str>,
    pub(super) value: f64,
    /// The best of TCP, unless that is among them.
    pub(super) tcp: Option<(&'static str, f64)>,
}

impl Question {
    /// The answer of the rows. `None` if they have none.
    pub(super) fn answer(&self, seen: Seen<'_>) -> Option<Answer> {
        let modes = || MODES.iter().filter(|mode| (self.of)(mode));
        let x = self.x.or_else(|| {
            modes().filter_map(|mode| seen.points(self.experiment, mode.name).pop()).max()
        })?;
        let value = |mode: &'static Mode| {
            let value = seen.value(self.experiment, mode.name, x, self.figure)?;
            (value > 0.0).then_some((mode, value))
        };
        let mut all: Vec<(&Mode, f64)> = modes().filter_map(value).collect();
        all.sort_by(|a, b| if self.rises { b.1.total_cmp(&a.1) } else { a.1.total_cmp(&b.1) });
        let &(_, best) = all.first()?;
        let is_as_good = |value: f64| {
            if self.rises { value >= AS_GOOD * best } else { AS_GOOD * value <= best }
        };
        let good: Vec<_> = all.iter().take_while(|(_, value)| is_as_good(*value)).collect();
        let tcp = all.iter().find(|(mode, _)| mode.is_tcp());
        let tcp = tcp.filter(|(_, value)| !is_as_good(*value)).map(|(mode, at)| (mode.name, *at));
        let modes = good.iter().map(|(mode, _)| mode.name).collect();
        Some(Answer { x, modes, value: best, tcp })
    }
}

/// The unit of a figure, which is the end of its name.
pub(super) fn unit(figure: &str) -> &'static str {
    match figure.rsplit('_').next() {
        Some("gbps") => "Gb/s",
        Some("us") => "µs",
        Some("mops") => "10⁶/s",
        Some("mib") => "MiB",
        Some("gb") => "s/GB",
        Some("ms") => "ms",
        _ => "",
    }
}

/// A figure's name without its unit.
pub(super) fn title(figure: &str) -> String {
    let name = match unit(figure) {
        "" => figure,
        "s/GB" => "processor time",
        _ => figure.rsplit_once('_').map_or(figure, |(name, _)| name),
    };
    name.replace('_', " ")
}

/// A value with its unit.
pub(super) fn with_unit(value: f64, figure: &str) -> String {
    format!("{} {}", digits(value), unit(figure)).trim_end().to_owned()
}

/// The bars of a study.
pub(super) fn bars(seen: Seen<'_>) -> Vec<Judged> {
    let mut goals = Vec::new();
    let at = |mode, x, figure| seen.value(Experiment::Scale, mode, x, figure);
    let kept = |mode| by(at(mode, PAIRS_MAX, "sum_gbps"), at(mode, 1, "sum_gbps"));
    for mode in ["udp", "packet"] {
        let what = format!("{PAIRS_MAX} pairs of containers at once, `{mode}`");
        let goal =
            |text: &str, bound, value| Goal { text: format!("{what}: {text}"), bound, value };
        let errors = at(mode, PAIRS_MAX, "errors");
        goals.push(goal("connections that ended by error", Bound::AtMost(0.0), errors));
        let mean = at(mode, PAIRS_MAX, "sum_gbps").map(|sum| sum / PAIRS_MAX as f64);
        let slowest = by(at(mode, PAIRS_MAX, "slowest_gbps"), mean);
        goals.push(goal("the slowest pair by the mean", Bound::AtLeast(0.01), slowest));
        let jain = at(mode, PAIRS_MAX, "jain");
        goals.push(goal("Jain's index", Bound::AtLeast(0.9), jain));
        let least = kept("tcp-blocking").unwrap_or(1.0).min(0.8);
        let text = "sum by one pair's (0.8, or what TCP keeps of its own)";
        goals.push(goal(text, Bound::AtLeast(least), kept(mode)));
    }
    let half = |mode| {
        by(
            seen.value(Experiment::Load, mode, 50, "p99_us"),
            seen.value(Experiment::Load, mode, 50, "unloaded_us"),
        )
    };
    goals.push(Goal {
        text: "at half of its peak, open loop, p99 by the unloaded median, better backend".into(),
        bound: Bound::AtMost(3.0),
        value: ["udp", "packet", "afxdp"].into_iter().filter_map(half).min_by(f64::total_cmp),
    });
    for mode in ["vxlan-udp", "vxlan-packet"] {
        let of = |figure| seen.value(Experiment::Size, mode, 1 << 20, figure);
        goals.push(Goal {
            text: format!("1 MiB WRITE over VXLAN, `{mode}`, by the raw baseline over it"),
            bound: Bound::AtLeast(0.9),
            value: by(of("write_gbps"), of("raw_gbps")),
        });
    }
    for mode in ["udp", "packet"] {
        let at = |mode, x, figure| seen.value(Experiment::ManyToOne, mode, x, figure);
        let kept = |mode| by(at(mode, 64, "sum_gbps"), at(mode, 1, "sum_gbps"));
        let goal = |text: &str, bound, value| Goal {
            text: format!("64 senders to one, `{mode}`: {text}"),
            bound,
            value,
        };
        let least = kept("tcp-blocking");
        let value = least.and_then(|_| kept(mode));
        let text = "sum by one sender's, as TCP keeps of its own";
        goals.push(goal(text, Bound::AtLeast(least.unwrap_or(1.0)), value));
        goals.push(goal("Jain's index", Bound::AtLeast(0.9), at(mode, 64, "jain")));
        let errors = at(mode, 64, "errors");
        goals.push(goal("queue pairs in error", Bound::AtMost(0.0), errors));
    }
    for mode in ["udp", "packet"] {
        for (figure, name) in [("probe_p50_us", "median"), ("probe_p99_us", "p99")] {
            let raised = |mode| {
                let at = |x| seen.value(Experiment::Isolation, mode, x, figure);
                by(at(1), at(0))
            };
            let text = format!(
                "a neighbour at full rate raises a probe's {name}, `{mode}`, by TCP's rise"
            );
            let (bound, value) = (Bound::AtMost(1.0), by(raised(mode), raised("tcp-blocking")));
            goals.push(Goal { text, bound, value });
        }
    }
    goals.into_iter().map(|goal| Judged { goal, has_invalid: false }).collect()
}

fn by(value: Option<f64>, of: Option<f64>) -> Option<f64> {
    value.zip(of.filter(|of| *of > 0.0)).map(|(value, of)| value / of)
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::BTreeMap;

    use super::super::store::Key;
    use super::*;
    use crate::goal::Verdict;

    pub(crate) fn row(experiment: &str, mode: &str, x: u64, figures: &[(&str, f64)]) -> Row {
        let (experiment, mode) = (experiment.to_owned(), mode.to_owned());
        let figures = figures.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
        Row { key: Key { experiment, mode, x, round: 1 }, figures, missing: None }
    }

    fn question(need: &str) -> &'static Question {
        QUESTIONS.iter().find(|question| question.need == need).unwrap()
    }

    #[test]
    fn the_best_wins_and_those_close_to_it_are_as_good() {
        let size = |mode, us, gbps| {
            [
                row("size", mode, 64, &[("p50_us", us)]),
                row("size", mode, 1 << 20, &[("write_gbps", gbps)]),
            ]
        };
        let rows = [
            size("udp", 5.0, 40.0),
            size("packet", 3.0, 39.0),
            size("packet-agent", 3.2, 20.0),
            size("tcp-spin", 9.0, 35.0),
            size("vxlan-udp", 1.0, 99.0),
        ]
        .concat();
        let seen = Seen(&rows);
        let soon = question("small messages, soon").answer(seen).unwrap();
        assert_eq!((soon.modes, soon.value), (vec!["packet", "packet-agent"], 3.0));
        assert_eq!(soon.tcp, Some(("tcp-spin", 9.0)));
        let large = question("large messages").answer(seen).unwrap();
        assert_eq!((large.modes, large.tcp), (vec!["udp", "packet"], Some(("tcp-spin", 35.0))));
        let free = question("… without rights").answer(seen).unwrap();
        assert_eq!((free.modes, free.tcp), (vec!["udp"], Some(("tcp-spin", 35.0))));
        assert_eq!(question("large ones over VXLAN").answer(seen).unwrap().modes, ["vxlan-udp"]);
        assert_eq!(question("many containers at once").answer(seen), None);
    }

    #[test]
    fn the_largest_number_of_pairs_answers() {
        let rows: Vec<Row> =
            [("udp", 1, 9.0), ("udp", 24, 5.0), ("packet", 24, 4.0), ("packet", 1, 30.0)]
                .map(|(mode, x, sum)| row("scale", mode, x, &[("sum_gbps", sum)]))
                .into();
        let answer = question("many containers at once").answer(Seen(&rows)).unwrap();
        assert_eq!((answer.x, answer.modes, answer.value), (24, vec!["udp"], 5.0));
    }

    #[test]
    fn bars_are_met_missed_or_not_measured() {
        let verdicts = |rows: &[Row]| -> BTreeMap<String, Verdict> {
            bars(Seen(rows)).iter().map(|bar| (bar.goal.text.clone(), bar.verdict())).collect()
        };
        let none = verdicts(&[]);
        assert!(none.values().all(|verdict| *verdict == Verdict::NotMeasured), "{none:?}");
        let pairs = |mode, x, sum, jain, errors| {
            let figures = [
                ("sum_gbps", sum),
                ("slowest_gbps", sum / 200.0),
                ("jain", jain),
                ("errors", errors),
            ];
            row("scale", mode, x, &figures)
        };
        let rows = [
            pairs("udp", 1, 10.0, 1.0, 0.0),
            pairs("udp", 100, 6.0, 0.95, 0.0),
            pairs("packet", 1, 10.0, 1.0, 0.0),
            pairs("packet", 100, 4.0, 0.8, 3.0),
            pairs("tcp-blocking", 1, 20.0, 1.0, 0.0),
            pairs("tcp-blocking", 100, 10.0, 1.0, 0.0),
            row("load", "udp", 50, &[("p99_us", 40.0), ("unloaded_us", 10.0)]),
            row("load", "packet", 50, &[("p99_us", 20.0), ("unloaded_us", 8.0)]),
            row("size", "vxlan-udp", 1 << 20, &[("write_gbps", 8.0), ("raw_gbps", 10.0)]),
            row("many_to_one", "udp", 1, &[("sum_gbps", 10.0)]),
            row("many_to_one", "udp", 64, &[("sum_gbps", 4.0), ("jain", 0.95), ("errors", 1.0)]),
            row("many_to_one", "tcp-blocking", 1, &[("sum_gbps", 10.0)]),
            row("many_to_one", "tcp-blocking", 64, &[("sum_gbps", 5.0)]),
            row("isolation", "udp", 0, &[("probe_p99_us", 10.0)]),
            row("isolation", "udp", 1, &[("probe_p99_us", 30.0)]),
            row("isolation", "packet", 0, &[("probe_p99_us", 5.0)]),
            row("isolation", "packet", 1, &[("probe_p99_us", 25.0)]),
            row("isolation", "tcp-blocking", 0, &[("probe_p99_us", 10.0)]),
            row("isolation", "tcp-blocking", 1, &[("probe_p99_us", 40.0)]),
        ];
        let all = verdicts(&rows);
        let of = |begin: &str, end: &str| {
            let mut found =
                all.iter().filter(|(text, _)| text.contains(begin) && text.contains(end));
            *found.next().unwrap_or_else(|| panic!("{begin} {end}: {all:?}")).1
        };
        for (mode, verdict) in [("`udp`", Verdict::Met), ("`packet`", Verdict::Missed)] {
            assert_eq!(of(mode, "ended by error"), verdict);
            assert_eq!(of(&format!("at once, {mode}"), "Jain"), verdict);
            // TCP keeps a half of its own.
            assert_eq!(of(mode, "sum by one"), verdict);
            assert_eq!(of(mode, "slowest"), Verdict::Met);
        }
        assert_eq!(of("half of its peak", ""), Verdict::Met);
        assert_eq!(of("64 senders to one, `udp`", "sum"), Verdict::Missed);
        assert_eq!(of("64 senders to one, `udp`", "Jain"), Verdict::Met);
        assert_eq!(of("64 senders to one, `udp`", "in error"), Verdict::Missed);
        assert_eq!(of("64 senders to one, `packet`", "sum"), Verdict::NotMeasured);
        assert_eq!(of("a probe's p99, `udp`", ""), Verdict::Met);
        assert_eq!(of("a probe's p99, `packet`", ""), Verdict::Missed);
        assert_eq!(of("a probe's median, `udp`", ""), Verdict::NotMeasured);
        assert_eq!(of("vxlan-udp", ""), Verdict::Missed);
        assert_eq!(of("vxlan-packet", ""), Verdict::NotMeasured);
    }

    #[test]
    fn names_end_with_their_units() {
        for (figure, name, unit_of) in [
            ("write_gbps", "write", "Gb/s"),
            ("probe_p99_us", "probe p99", "µs"),
            ("cpu_s_per_gb", "processor time", "s/GB"),
            ("kernel_mib", "kernel", "MiB"),
            ("jain", "jain", ""),
        ] {
            assert_eq!((title(figure).as_str(), unit(figure)), (name, unit_of));
        }
    }
}
