//! The checks of shared state, and how each is taken away.

use super::Site;

/// A check of shared state.
pub(super) struct Check {
    name: &'static str,
    /// Path from the root of the workspace.
    pub(super) file: &'static str,
    /// The source with the check; it occurs once.
    right: &'static str,
    /// The source without it.
    wrong: &'static str,
}

impl Check {
    pub(super) fn site(&self, source: &str) -> Result<Site, String> {
        let Self { name, file, right, wrong } = *self;
        let mut places = source.match_indices(right);
        match (places.next(), places.next()) {
            (Some((at, _)), None) => {
                let place = at..at + right.len();
                Ok(Site { name: name.into(), file, place, rest: wrong })
            }
            (None, _) => Err(format!("{name}: its place is not in {file}")),
            _ => Err(format!("{name}: its place is more than once in {file}")),
        }
    }
}

const CORE: &str = "verbs-api/soft/src/progress/core.rs";
const BACKGROUND: &str = "verbs-api/soft/src/progress/background.rs";
const WATCH: &str = "verbs-api/soft/src/progress/watch.rs";

const fn check(
    name: &'static str,
    file: &'static str,
    right: &'static str,
    wrong: &'static str,
) -> Check {
    Check { name, file, right, wrong }
}

pub(super) const CHECKS: &[Check] = &[
    check(
        "unwatched though a thread waits",
        CORE,
        "if view.is_waited() || view.is_slept_on() {",
        "if view.is_slept_on() {",
    ),
    check(
        "unwatched though a thread sleeps",
        CORE,
        "if view.is_waited() || view.is_slept_on() {",
        "if view.is_waited() {",
    ),
    check(
        "unwatched without a call",
        CORE,
        "self.tell(Event::Polled, Standby::MIN.min(left));",
        "let _ = left;",
    ),
    check(
        "unwatched with less traffic",
        CORE,
        "            shard.drivers.is_busy()\n",
        "            true\n",
    ),
    check("an event is wanted", CORE, "            self.tell(Event::Armed, Standby::MIN);\n", ""),
    check("released while it sleeps", CORE, "if self.watch.view().is_asleep() {", "if false {"),
    check(
        "due before it looks",
        CORE,
        "                && due < shard.drivers.parked_until()\n",
        "                && false\n",
    ),
    check("due already", CORE, "        if due > now {", "        if true {"),
    check("the new time of its look", CORE, "            shard.drivers.park_until(due);\n", ""),
    check(
        "left while the shard was driven",
        CORE,
        "        self.staging.has_some()\n    }\n",
        "        false\n    }\n",
    ),
    check(
        "mail for a thread that sleeps",
        CORE,
        "if view.is_asleep() || view.is_waited() {",
        "if view.is_waited() {",
    ),
    check(
        "mail while a thread waits",
        CORE,
        "if view.is_asleep() || view.is_waited() {",
        "if view.is_asleep() {",
    ),
    check("left while a thread went to wait", CORE, "if self.staging.has_some() {", "if false {"),
    check("left before standby", BACKGROUND, "if !rung && (leaves", "if (leaves"),
    check("standby for a thread that waits", BACKGROUND, "(leaves || view.is_waited())", "leaves"),
    check("standby though a thread sleeps", BACKGROUND, " && !view.is_slept_on() {", " {"),
    check(
        "a deadline of a thread that waits",
        BACKGROUND,
        "                    self.look(true);\n",
        "",
    ),
    check(
        "left while it went to sleep",
        BACKGROUND,
        "if may_sleep && !self.staging.has_some() {",
        "if may_sleep {",
    ),
    check("permitted to sleep", BACKGROUND, "if may_sleep && !self", "if !self"),
    check(
        "no long standby for a program that wants an event",
        WATCH,
        "State::CallerPolls => !self.wants_event(),",
        "State::CallerPolls => true,",
    ),
    check(
        "no rest without a thread that waits",
        WATCH,
        "State::Standby | State::Resting => self.is_waited(),",
        "State::Standby | State::Resting => true,",
    ),
    check(
        "mail in the table, while a thread waits",
        WATCH,
        "[(A, IfWaited), (C, IfWaited), (A, Now), (A, Now), (A, Now)],",
        "[(A, No), (C, No), (A, Now), (A, Now), (A, Now)],",
    ),
    check(
        "mail in the table, on standby",
        WATCH,
        "[(A, IfWaited), (C, IfWaited), (A, Now), (A, Now), (A, Now)],",
        "[(A, IfWaited), (C, IfWaited), (S, No), (A, Now), (A, Now)],",
    ),
    check(
        "mail in the table, at rest",
        WATCH,
        "[(A, IfWaited), (C, IfWaited), (A, Now), (A, Now), (A, Now)],",
        "[(A, IfWaited), (C, IfWaited), (A, Now), (R, No), (A, Now)],",
    ),
    check(
        "mail in the table, while it watches",
        WATCH,
        "[(A, IfWaited), (C, IfWaited), (A, Now), (A, Now), (A, Now)],",
        "[(A, IfWaited), (C, IfWaited), (A, Now), (A, Now), (W, No)],",
    ),
    check(
        "an earlier deadline in the table, at rest",
        WATCH,
        "[(A, No), (C, No), (S, No), (R, InTime), (W, InTime)],",
        "[(A, No), (C, No), (S, No), (R, No), (W, InTime)],",
    ),
    check(
        "an earlier deadline in the table, while it watches",
        WATCH,
        "[(A, No), (C, No), (S, No), (R, InTime), (W, InTime)],",
        "[(A, No), (C, No), (S, No), (R, InTime), (W, No)],",
    ),
    check(
        "overdue in the table, on standby",
        WATCH,
        "[(A, No), (C, No), (A, Soon), (A, Soon), (A, Soon)],",
        "[(A, No), (C, No), (S, No), (A, Soon), (A, Soon)],",
    ),
    check(
        "overdue in the table, at rest",
        WATCH,
        "[(A, No), (C, No), (A, Soon), (A, Soon), (A, Soon)],",
        "[(A, No), (C, No), (A, Soon), (R, No), (A, Soon)],",
    ),
    check(
        "overdue in the table, while it watches",
        WATCH,
        "[(A, No), (C, No), (A, Soon), (A, Soon), (A, Soon)],",
        "[(A, No), (C, No), (A, Soon), (A, Soon), (W, No)],",
    ),
    check(
        "polled in the table",
        WATCH,
        "[(A, No), (C, No), (S, No), (R, No), (A, Soon)],",
        "[(A, No), (C, No), (S, No), (R, No), (W, No)],",
    ),
    check(
        "an event is wanted in the table",
        WATCH,
        "[(A, No), (A, Soon), (S, No), (R, No), (W, No)],",
        "[(A, No), (C, No), (S, No), (R, No), (W, No)],",
    ),
    check(
        "the last thread that waits in the table",
        WATCH,
        "[(A, No), (C, No), (S, No), (A, Now), (W, No)],",
        "[(A, No), (C, No), (S, No), (R, No), (W, No)],",
    ),
    check(
        "a thread that sleeps in the table, awake",
        WATCH,
        "[(A, Now), (A, Now), (A, Now), (R, No), (W, No)],",
        "[(A, No), (A, Now), (A, Now), (R, No), (W, No)],",
    ),
    check(
        "a thread that sleeps in the table, polled",
        WATCH,
        "[(A, Now), (A, Now), (A, Now), (R, No), (W, No)],",
        "[(A, Now), (C, No), (A, Now), (R, No), (W, No)],",
    ),
    check(
        "a thread that sleeps in the table, on standby",
        WATCH,
        "[(A, Now), (A, Now), (A, Now), (R, No), (W, No)],",
        "[(A, Now), (A, Now), (S, No), (R, No), (W, No)],",
    ),
    check(
        "the end in the table",
        WATCH,
        "[(A, Now), (A, Now), (A, Now), (A, Now), (A, Now)],",
        "[(A, No), (C, No), (S, No), (R, No), (W, No)],",
    ),
];
