//! `cargo xtask test`: every check and every test, each with its name and time.
//!
//! Steps of seconds run first, then the build of the tests. Test programs wait for timers and
//! peers, so several run at once ([`pool::run`]); what they leave of the processors goes to the
//! remaining steps, each as `cargo xtask test --only STEP`.

use crate::command::{self, cargo, words};
use crate::pool::{self, Ended};
use crate::programs::{self, Program, figure};
use crate::skips::{self, Allowed};
use crate::{
    api, demo, deny, fuzz, instructions, machine, memory, prose, publish, setup, soak, unsafe_files,
};
use serde_json::Value;
use std::collections::VecDeque;
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

/// The selection of tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope<'a> {
    All,
    /// A selection that takes minutes: nothing of [`SLOW`] and nothing after the tests.
    Quick,
    /// These steps.
    Only(&'a [&'a str]),
}

/// The result of a step.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) passed: usize,
    pub(crate) failed: usize,
    /// Each `name: reason`.
    pub(crate) skips: Vec<String>,
    /// The reason of a failure.
    pub(crate) why: Option<String>,
}

/// When a step runs, and its work.
enum When {
    /// Before the tests, with nothing beside it.
    First(fn() -> Outcome),
    /// The build of the tests; then each of them in parallel with the others.
    Tests,
    /// Beside the tests, with lower priority.
    Beside(fn() -> Outcome),
    /// After everything else.
    Last(fn() -> Outcome),
}

/// In their order.
const STEPS: &[(&str, When)] = &[
    ("format", When::First(format)),
    ("unsafe files", When::First(|| check(unsafe_files::check()))),
    ("prose", When::First(|| check(prose::check()))),
    ("tests", When::Tests),
    ("clippy", When::Beside(|| does("clippy --quiet --workspace --all-targets -- -D warnings"))),
    ("features", When::Beside(features)),
    ("documentation", When::Beside(documentation)),
    (
        "stack for wasm32",
        When::Beside(|| does("build -q -p rocinante-stack --target=wasm32-unknown-unknown")),
    ),
    ("miri", When::Beside(|| Outcome::of_check(memory::check()))),
    ("fuzz targets", When::Beside(|| Outcome::of_check(fuzz::check()))),
    ("cargo-deny", When::Beside(|| Outcome::of_check(deny::check()))),
    ("api", When::Beside(|| Outcome::of_check(api::check()))),
    ("packages", When::Beside(|| Outcome::of_check(publish::check()))),
    ("instructions", When::Beside(|| Outcome::of_check(instructions::check()))),
    ("build of the demo", When::Beside(|| check(demo::build().map(drop)))),
    ("demo", When::Last(|| Outcome::of_check(demo::check()))),
    ("soak under load", When::Last(|| Outcome::of_check(soak::check()))),
];

/// Slow programs and steps: the programs start before the others, and `--quick` leaves both out.
const SLOW: [&str; 11] = [
    "interop::matrix",
    "interop::guest",
    "tests::soak",
    "tests::bad_peers",
    "miri",
    "fuzz targets",
    "cargo-deny",
    "api",
    "packages",
    "instructions",
    "build of the demo",
];

/// Long programs, which start before those that end soon. Most tests of these wait for timers and
/// peers, so twice as many of them run at once as there would.
const LONG: [&str; 3] = ["tests::e2e", "tests::cli", "tests::overlay"];

/// After this time a program or a step counts as hung: the slowest beside three busy loops takes
/// half of it.
const LIMIT: Duration = Duration::from_secs(60 * 60);

/// Runs everything that `scope` selects. The last line of standard output is `N passed, N failed`,
/// with `, N skipped` if any. After a failure the error is empty: everything has been printed.
pub(crate) fn run(scope: Scope<'_>) -> Result<(), String> {
    if let Scope::Only(names) = scope
        && let Some(unknown) =
            names.iter().find(|name| STEPS.iter().all(|(known, _)| known != *name))
    {
        let known: Vec<&str> = STEPS.iter().map(|(name, _)| *name).collect();
        return Err(format!("no step {unknown:?}: there are {}", known.join(", ")));
    }
    setup::packages(setup::TESTS);
    setup::toolchain()?;
    let target = demo::target()?;
    println!("{}", machine::room(&target));
    let mut report = Report::new(Allowed::read(machine::has_all_rights())?);
    // Programs wait for two thirds of their time.
    let slots = 2 * std::thread::available_parallelism().map_or(2, usize::from);
    let logs = target.join("test-logs");
    if !matches!(scope, Scope::Only(_)) {
        // Logs of an earlier run would be misleading.
        let _ = fs::remove_dir_all(&logs);
    }
    let (mut tests, mut beside) = (Jobs::new(), Jobs::new());
    for (name, when) in STEPS.iter().filter(|step| scope.has(step)) {
        match when {
            When::First(work) => report.run(name, work),
            When::Tests => {
                let mut programs = Vec::new();
                let build = || check(programs::build().map(|built| programs = built));
                report.run("build of the tests", build);
                tests = commands(programs, scope, slots)?;
            }
            When::Beside(work) if matches!(scope, Scope::Only(_)) => report.run(name, work),
            When::Beside(_) => beside.push_back(((*name).to_owned(), myself(name)?)),
            When::Last(_) => {}
        }
    }
    // A step is a compiler, or one thread.
    let queues = [(tests, slots), (beside, slots / 2)];
    pool::run(queues, &logs, LIMIT, |ended| report.ended(&ended));
    for (name, when) in STEPS.iter().filter(|step| scope.has(step)) {
        if let When::Last(work) = when {
            report.run(name, work);
        }
    }
    report.close()
}

/// The members of the workspace and its target directory, from `cargo metadata`.
pub(crate) fn metadata() -> Result<Value, String> {
    let metadata = command::read(&mut cargo("metadata --format-version=1 --no-deps"))?;
    serde_json::from_str(&metadata).map_err(|error| error.to_string())
}

/// Programs that run beside each other, by name.
type Jobs = VecDeque<(String, Command)>;

/// The test programs, the slowest first, and the tests in documentation.
fn commands(programs: Vec<Program>, scope: Scope<'_>, slots: usize) -> Result<Jobs, String> {
    let mut jobs = Jobs::new();
    if programs.is_empty() {
        return Ok(jobs);
    }
    let runner = programs::runner();
    let quick = scope == Scope::Quick;
    // How long the simulator tries fresh seeds, in seconds.
    let sim_seconds = if quick { "15" } else { "45" };
    let rank = |program: &Program| SLOW.iter().position(|name| *name == program.name);
    let (mut slow, mut others): (Vec<_>, Vec<_>) =
        programs.into_iter().partition(|program| rank(program).is_some());
    slow.sort_by_key(rank);
    others.sort_by_key(|program| !LONG.contains(&program.name.as_str()));
    if quick {
        slow.clear();
    }
    for program in slow.iter().chain(&others) {
        let mut command = program.command(runner);
        command.env("ROCINANTE_SIM_SECONDS", sim_seconds);
        if LONG.contains(&program.name.as_str()) {
            command.env("RUST_TEST_THREADS", slots.to_string());
        }
        jobs.push_back((program.name.clone(), command));
    }
    let mut documentation = cargo("test --workspace --doc --quiet --no-fail-fast");
    if let Some(runner) = runner {
        let triple = machine::triple()?.to_uppercase().replace('-', "_");
        documentation.env(format!("CARGO_TARGET_{triple}_RUNNER"), runner);
    }
    jobs.push_back(("tests in documentation".into(), documentation));
    Ok(jobs)
}

/// This program, for one step. Its priority is lower than that of tests, which have deadlines, but
/// not so low that programs of others leave nothing to it.
fn myself(step: &str) -> Result<Command, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut command = words("nice -n 3");
    command.arg(program).args(["test", "--only", step]);
    Ok(command)
}

impl Scope<'_> {
    fn has(self, (name, when): &(&str, When)) -> bool {
        match self {
            Scope::All => true,
            Scope::Quick => !SLOW.contains(name) && !matches!(when, When::Last(_)),
            Scope::Only(names) => names.contains(name),
        }
    }
}

impl Outcome {
    /// The outcome of a step that is one check; parts of it may have been skipped.
    fn of_check(result: Result<Vec<String>, String>) -> Self {
        match result {
            Ok(skips) => Self { passed: 1, skips, ..Self::default() },
            Err(why) => Self::failure(why),
        }
    }

    fn failure(why: String) -> Self {
        Self { failed: 1, why: Some(why), ..Self::default() }
    }

    /// The outcome of a step that ran as a process of its own, from its closing line.
    fn of_step(ok: bool, output: &str) -> Self {
        let last = output.lines().last().unwrap_or_default();
        let (passed, failed) = (figure(last, "passed"), figure(last, "failed"));
        if !ok && failed == 0 {
            return Self::failure("it failed".into());
        }
        Self { passed, failed, skips: skips::found(output.lines()), why: None }
    }
}

/// The findings so far.
struct Report {
    allowed: Allowed,
    passed: usize,
    failed: usize,
    skipped: usize,
    /// The failures, each `name: why`.
    broken: Vec<String>,
}

impl Report {
    fn new(allowed: Allowed) -> Self {
        Self { allowed, passed: 0, failed: 0, skipped: 0, broken: Vec::new() }
    }

    /// Runs a step and shows its output as it arrives.
    fn run(&mut self, name: &str, work: impl FnOnce() -> Outcome) {
        println!("== {name}");
        let start = Instant::now();
        let outcome = work();
        self.add(name, outcome, start.elapsed());
    }

    /// Adds a program or step that ran in parallel. Shows its output only if it failed, without the
    /// passed tests.
    fn ended(&mut self, ended: &Ended) {
        let is_step = STEPS.iter().any(|(name, _)| *name == ended.name);
        let judge = if is_step { Outcome::of_step } else { programs::judge };
        let mut outcome = judge(ended.ok, &ended.output);
        if outcome.failed > 0 {
            println!("== {}\n{}", ended.name, programs::without_passes(&ended.output));
            let why = outcome.why.take().unwrap_or_else(|| "see above".into());
            outcome.why = Some(format!("{why}; {}", ended.how));
        }
        self.add(&ended.name, outcome, ended.took);
    }

    fn add(&mut self, name: &str, outcome: Outcome, took: Duration) {
        let Outcome { passed, mut failed, mut skips, mut why } = outcome;
        let unlisted = self.allowed.unlisted(&skips);
        if !unlisted.is_empty() {
            failed += unlisted.len();
            let more = format!("skipped without leave: {}", unlisted.join(" | "));
            why = Some(why.map_or_else(|| more.clone(), |why| format!("{why}; {more}")));
            skips.retain(|skip| self.allowed.unlisted(std::slice::from_ref(skip)).is_empty());
        }
        for skip in &skips {
            println!("SKIPPED {skip}");
        }
        let verdict = if failed == 0 { "ok" } else { "FAILED" };
        println!("== {name}: {verdict}, {passed} passed, {:.1} s", took.as_secs_f64());
        if failed > 0 {
            self.broken.push(format!("{name}: {}", why.as_deref().unwrap_or("see above")));
        }
        self.passed += passed;
        self.failed += failed;
        self.skipped += skips.len();
    }

    /// Prints the failures and the closing line.
    fn close(&self) -> Result<(), String> {
        for failure in &self.broken {
            println!("FAILED {failure}");
        }
        println!("{}", self.closing_line());
        if self.failed == 0 { Ok(()) } else { Err(String::new()) }
    }

    fn closing_line(&self) -> String {
        let mut line = format!("{} passed, {} failed", self.passed, self.failed);
        if self.skipped > 0 {
            line += &format!(", {} skipped", self.skipped);
        }
        line
    }
}

fn check(result: Result<(), String>) -> Outcome {
    Outcome::of_check(result.map(|()| vec![]))
}

/// A macro declares the modules of `tests/src/verbs`, where `cargo fmt` alone does not find them.
fn format() -> Outcome {
    let files = fs::read_dir("tests/src/verbs").and_then(Iterator::collect::<Result<Vec<_>, _>>);
    check(files.map_err(|error| format!("tests/src/verbs: {error}")).and_then(|files| {
        let files = files.iter().map(fs::DirEntry::path);
        command::run(cargo("fmt --all --check --").args(files))
    }))
}

fn does(words_of_cargo: &str) -> Outcome {
    check(command::run(&mut cargo(words_of_cargo)))
}

/// The library with none of its features; the workspace has all of them. Its tests need features.
fn features() -> Outcome {
    does("clippy --quiet -p rocinante-soft -p rocinante --lib --no-default-features -- -D warnings")
}

fn documentation() -> Outcome {
    let mut doc = cargo("doc --quiet --workspace --no-deps --all-features");
    check(command::run(doc.env("RUSTDOCFLAGS", "-D warnings")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        Report::new(Allowed::parse("x::b: no tap\n", true))
    }

    fn ended(name: &str, ok: bool, output: &str) -> Ended {
        let (name, output) = (name.into(), output.into());
        Ended { name, ok, how: "exit status: 1".into(), output, took: Duration::ZERO }
    }

    #[test]
    fn the_closing_line_says_no_more_than_it_must() {
        let mut report = report();
        report.ended(&ended("a::b", true, "test result: ok. 7 passed; 0 failed; 0 ignored"));
        assert_eq!(report.closing_line(), "7 passed, 0 failed");
        assert!(report.close().is_ok());
        report.ended(&ended("miri", true, "SKIPPED x::b: no tap\n2 passed, 0 failed, 1 skipped"));
        assert_eq!(report.closing_line(), "9 passed, 0 failed, 1 skipped");
    }

    #[test]
    fn what_fails_is_named() {
        let mut report = report();
        report.ended(&ended("miri", false, "1 passed, 3 failed"));
        report.ended(&ended("a::b", false, "killed while it ran"));
        assert_eq!(report.closing_line(), "1 passed, 4 failed");
        assert_eq!(report.broken[0], "miri: see above; exit status: 1");
        assert_eq!(report.broken[1], "a::b: it failed; exit status: 1");
        assert!(report.close().is_err());
    }

    #[test]
    fn a_skip_that_is_not_listed_is_a_failure() {
        let mut report = report();
        let output = "SKIPPED x::c: no tun\ntest result: ok. 2 passed; 0 failed; 0 ignored";
        report.ended(&ended("a::b", true, output));
        assert_eq!(report.closing_line(), "1 passed, 1 failed");
        assert!(report.broken[0].contains("x::c: no tun"), "{}", report.broken[0]);
    }

    #[test]
    fn there_are_only_known_steps() {
        let error = run(Scope::Only(&["fromat"])).unwrap_err();
        assert!(error.contains("fromat") && error.contains("unsafe files"), "{error}");
    }
}
