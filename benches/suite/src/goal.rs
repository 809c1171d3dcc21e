//! Goals: values with a bound, and whether they keep it.

use std::fmt;

use rocinante_cli::output::digits;

/// The limit that a value has to keep.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

/// A goal and how far it is met.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Goal {
    /// The subject of the goal, without the bound.
    pub(crate) text: String,
    pub(crate) bound: Bound,
    /// The measured value, if there is one.
    pub(crate) value: Option<f64>,
}

/// A goal, judged by the rows that count.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Judged {
    pub(crate) goal: Goal,
    /// Whether invalid runs have a value for it.
    pub(crate) has_invalid: bool,
}

/// How a goal stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Met,
    Missed,
    NotMeasured,
    /// Only invalid runs have a value.
    NoValidRun,
}

impl Judged {
    pub(crate) fn verdict(&self) -> Verdict {
        let met = match (self.goal.value, self.goal.bound) {
            (None, _) if self.has_invalid => return Verdict::NoValidRun,
            (None, _) => return Verdict::NotMeasured,
            (Some(value), Bound::AtLeast(least)) => value >= least,
            (Some(value), Bound::AtMost(most)) => value <= most,
        };
        if met { Verdict::Met } else { Verdict::Missed }
    }
}

impl fmt::Display for Judged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Goal { text, bound, value } = &self.goal;
        let bound = match bound {
            Bound::AtLeast(least) => format!("≥ {}", digits(*least)),
            Bound::AtMost(most) => format!("≤ {}", digits(*most)),
        };
        let value = value.map_or_else(|| "–".to_owned(), digits);
        let verdict = match self.verdict() {
            Verdict::Met => "met",
            Verdict::Missed => "**missed**",
            Verdict::NotMeasured => "not measured",
            Verdict::NoValidRun => "not measured (no valid run)",
        };
        write!(f, "| {text} | {bound} | {value} | {verdict} |")
    }
}

/// All goals, as a Markdown table, followed by `caution` if it is not empty.
pub(crate) fn markdown(goals: &[Judged], caution: &str) -> String {
    let count = |verdict| goals.iter().filter(|goal| goal.verdict() == verdict).count();
    let lines: Vec<String> = goals.iter().map(|goal| format!("{goal}\n")).collect();
    format!(
        "| goal | bound | here | |\n|---|---|---|---|\n{}\n{} met, {} missed, {} not measured.\n{caution}",
        lines.concat(),
        count(Verdict::Met),
        count(Verdict::Missed),
        count(Verdict::NotMeasured) + count(Verdict::NoValidRun),
    )
}
