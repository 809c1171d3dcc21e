//! The checks of shared state, and how each is taken away.

use super::Site;

/// A name, the source with the check, which occurs once, and the source without it.
#[rustfmt::skip]
const CORE: &[[&str; 3]] = &[
    ["unwatched though a thread waits",
     "view.is_waited() || view.is_slept_on()", "view.is_slept_on()"],
    ["unwatched though a thread sleeps",
     "view.is_waited() || view.is_slept_on()", "view.is_waited()"],
    ["unwatched without a call", "self.tell(Event::Polled, standby::MIN.min(left));", "let _ = left;"],
    ["unwatched with less traffic", "            shard.drivers.is_busy()\n", "            true\n"],
    ["an event is wanted", "            self.tell(Event::Armed, standby::MIN);\n", ""],
    ["released while it sleeps", "if self.watch.view().is_asleep() {", "if false {"],
    ["due before it looks", "&& due < shard.drivers.parked_until()\n", "&& false\n"],
    ["due already", "        if due > now {", "        if true {"],
    ["the new time of its look", "            shard.drivers.park_until(due);\n", ""],
    ["left while the shard was driven",
     "        self.staging.has_some()\n    }\n", "        false\n    }\n"],
    ["mail for a thread that sleeps",
     "view.is_asleep() || view.is_waited()", "view.is_waited()"],
    ["mail while a thread waits", "view.is_asleep() || view.is_waited()", "view.is_asleep()"],
    ["left while a thread went to wait", "if self.staging.has_some() {", "if false {"],
];

#[rustfmt::skip]
const BACKGROUND: &[[&str; 3]] = &[
    ["left before standby", "if !rung && (leaves", "if (leaves"],
    ["standby for a thread that waits", "(leaves || view.is_waited())", "leaves"],
    ["standby though a thread sleeps", " && !view.is_slept_on() {", " {"],
    ["a deadline of a thread that waits", "                    self.look(true);\n", ""],
    ["left while it went to sleep",
     "if may_sleep && !self.staging.has_some() {", "if may_sleep {"],
    ["permitted to sleep", "if may_sleep && !self", "if !self"],
];

#[rustfmt::skip]
const WATCH: &[[&str; 3]] = &[
    ["no long standby for a program that wants an event",
     "State::CallerPolls => !self.wants_event(),", "State::CallerPolls => true,"],
    ["no rest without a thread that waits",
     "State::Standby | State::Resting => self.is_waited(),",
     "State::Standby | State::Resting => true,"],
];

const MAIL: &str = "[(A, IfWaited), (C, IfWaited), (A, Now), (A, Now), (A, Now)],";
const EARLIER: &str = "[(A, No), (C, No), (S, No), (R, InTime), (W, InTime)],";
const OVERDUE: &str = "[(A, No), (C, No), (A, Soon), (A, Soon), (A, Soon)],";
const POLLED: &str = "[(A, No), (C, No), (S, No), (R, No), (A, Soon)],";
const ARMED: &str = "[(A, No), (A, Soon), (S, No), (R, No), (W, No)],";
const LEAVES: &str = "[(A, No), (C, No), (S, No), (A, Now), (W, No)],";
const SLEEPS: &str = "[(A, Now), (A, Now), (A, Now), (R, No), (W, No)],";
const STOP: &str = "[(A, Now), (A, Now), (A, Now), (A, Now), (A, Now)],";

/// Rows of the table in `watch.rs`, and the states whose answer is taken away.
const TABLE: &[(&str, &str, &str)] = &[
    ("mail in the table, while a thread waits", MAIL, "AC"),
    ("mail in the table, on standby", MAIL, "S"),
    ("mail in the table, at rest", MAIL, "R"),
    ("mail in the table, while it watches", MAIL, "W"),
    ("an earlier deadline in the table, at rest", EARLIER, "R"),
    ("an earlier deadline in the table, while it watches", EARLIER, "W"),
    ("overdue in the table, on standby", OVERDUE, "S"),
    ("overdue in the table, at rest", OVERDUE, "R"),
    ("overdue in the table, while it watches", OVERDUE, "W"),
    ("polled in the table", POLLED, "W"),
    ("an event is wanted in the table", ARMED, "C"),
    ("the last thread that waits in the table", LEAVES, "R"),
    ("a thread that sleeps in the table, awake", SLEEPS, "A"),
    ("a thread that sleeps in the table, polled", SLEEPS, "C"),
    ("a thread that sleeps in the table, on standby", SLEEPS, "S"),
    ("the end in the table", STOP, "ACSRW"),
];

/// The row without the answers of some states: they stay, and wake no thread.
fn unanswered(row: &str, states: &str) -> String {
    let answers = row.trim_matches(['[', ')', ']', ',']).split("), ").zip("ACSRW".chars());
    let answers = answers.map(|(answer, state)| match states.contains(state) {
        true => format!("({state}, No)"),
        false => format!("{answer})"),
    });
    format!("[{}],", answers.collect::<Vec<_>>().join(", "))
}

/// The checks of a file.
pub(super) fn of(file: &'static str, source: &str) -> Result<Vec<Site>, String> {
    let (checks, rows) = match file.rsplit('/').next() {
        Some("core.rs") => (CORE, &[][..]),
        Some("background.rs") => (BACKGROUND, &[][..]),
        Some("watch.rs") => (WATCH, TABLE),
        _ => return Ok(vec![]),
    };
    let checks = checks.iter().map(|[name, right, wrong]| (*name, *right, (*wrong).to_owned()));
    let rows = rows.iter().map(|(name, row, states)| (*name, *row, unanswered(row, states)));
    let site = |(name, right, rest): (&str, &str, String)| {
        let mut places = source.match_indices(right);
        match (places.next(), places.next()) {
            (Some((at, _)), None) => {
                Ok(Site { name: name.into(), file, place: at..at + right.len(), rest })
            }
            (None, _) => Err(format!("{name}: its place is not in {file}")),
            _ => Err(format!("{name}: its place is more than once in {file}")),
        }
    };
    checks.chain(rows).map(site).collect()
}
