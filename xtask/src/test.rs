//! `cargo xtask test`: every check and every test, each with its name and time.

use crate::command::{self, Shown, cargo};
use crate::skips::{self, Allowed};
use crate::{arrows, demo, deny, fuzz, instructions, machine, memory, setup, unsafe_files};
use serde_json::Value;
use std::fs;
use std::ops::AddAssign;
use std::process::Command;
use std::time::Instant;

/// How much to test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    /// Everything.
    All,
    /// All but cargo-deny, miri, the instructions, cargo-fuzz and the demo.
    Quick,
}

/// What a step found.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) passed: usize,
    failed: usize,
    /// Each `name: reason`.
    skips: Vec<String>,
    /// What to say of the failure.
    why: Option<String>,
}

impl Outcome {
    /// Of a step that is one check, which may have left out parts.
    fn of_check(result: Result<Vec<String>, String>) -> Self {
        match result {
            Ok(skips) => Self { passed: 1, skips, ..Self::default() },
            Err(why) => Self { failed: 1, why: Some(why), ..Self::default() },
        }
    }
}

impl AddAssign for Outcome {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skips.extend(other.skips);
    }
}

/// Runs everything that `scope` asks for. The last line of standard output is
/// `N passed, N failed`, with `, N skipped` if any.
///
/// # Errors
/// Anything failed; the text is empty, because all has been said.
pub(crate) fn run(scope: Scope) -> Result<(), String> {
    setup::packages(setup::TESTS);
    setup::toolchain()?;
    println!("{}", machine::room(&demo::target()?));
    let allowed = Allowed::read(machine::has_all_rights())?;
    let mut total = Outcome::default();
    let mut broken = Vec::new();
    for (name, what) in steps(scope) {
        println!("== {name}");
        let start = Instant::now();
        let mut outcome = what();
        let unlisted = allowed.unlisted(&outcome.skips);
        if !unlisted.is_empty() {
            let why = format!("skipped without leave: {}", unlisted.join(" | "));
            outcome.why =
                Some(outcome.why.map_or_else(|| why.clone(), |first| format!("{first}; {why}")));
            outcome.failed += unlisted.len();
            outcome.skips.retain(|skip| allowed.unlisted(std::slice::from_ref(skip)).is_empty());
        }
        for skip in &outcome.skips {
            println!("SKIPPED {skip}");
        }
        let verdict = if outcome.failed == 0 { "ok" } else { "FAILED" };
        println!("== {name}: {verdict}, {:.1} s", start.elapsed().as_secs_f64());
        if outcome.failed > 0 {
            broken.push(format!("{name}: {}", outcome.why.as_deref().unwrap_or("see above")));
        }
        total += outcome;
    }
    for failure in &broken {
        println!("FAILED {failure}");
    }
    println!("{}", closing_line(&total));
    if total.failed == 0 { Ok(()) } else { Err(String::new()) }
}

/// The members of the workspace and its target directory, as `cargo metadata` has them.
pub(crate) fn metadata() -> Result<Value, String> {
    let metadata = command::read(&mut cargo(["metadata", "--format-version=1", "--no-deps"]))?;
    serde_json::from_str(&metadata).map_err(|error| error.to_string())
}

type Step = (&'static str, fn() -> Outcome);

fn steps(scope: Scope) -> Vec<Step> {
    let mut steps: Vec<Step> = vec![
        ("format", || check(cargo(["fmt", "--all", "--check"]))),
        ("dependency direction", || Outcome::of_check(arrows::check().map(|()| vec![]))),
        ("unsafe files", || Outcome::of_check(unsafe_files::check().map(|()| vec![]))),
        ("clippy", || {
            check(cargo([
                "clippy",
                "--quiet",
                "--workspace",
                "--all-targets",
                "--",
                "-D",
                "warnings",
            ]))
        }),
        ("documentation", || {
            let mut doc = cargo(["doc", "--quiet", "--workspace", "--no-deps"]);
            doc.env("RUSTDOCFLAGS", "-D warnings");
            check(doc)
        }),
        ("stack for wasm32", || {
            let wasm = "--target=wasm32-unknown-unknown";
            check(cargo(["build", "--quiet", "-p", "rocinante-stack", wasm]))
        }),
        ("cargo-deny", || Outcome::of_check(deny::check())),
        ("tests", || {
            tests().unwrap_or_else(|why| Outcome {
                failed: 1,
                why: Some(why),
                ..Outcome::default()
            })
        }),
        ("miri", || Outcome::of_check(memory::check())),
        ("instructions", || Outcome::of_check(instructions::check())),
        ("fuzz targets", || Outcome::of_check(fuzz::check())),
        ("demo", || Outcome::of_check(demo::check())),
    ];
    if scope == Scope::Quick {
        steps.retain(|(name, _)| {
            !["cargo-deny", "miri", "instructions", "fuzz targets", "demo"].contains(name)
        });
    }
    steps
}

fn check(mut command: Command) -> Outcome {
    Outcome::of_check(command::run(&mut command).map(|()| vec![]))
}

/// All tests of the workspace, those in documentation included.
fn tests() -> Result<Outcome, String> {
    let log = demo::target()?.join("skipped-tests.txt");
    fs::write(&log, "").map_err(|error| format!("{}: {error}", log.display()))?;
    let mut command = cargo(["test", "--workspace", "--no-fail-fast"]);
    command.env("ROCINANTE_TEST_LOG", &log);
    // Fresh seeds for the simulator.
    command.env("ROCINANTE_SIM_SECONDS", "120");
    if !machine::has_all_rights() {
        match machine::user_namespace() {
            Some(prefix) => {
                println!("not root, or not all of its rights: tests run in a user namespace");
                let triple = machine::triple()?.to_uppercase().replace('-', "_");
                command.env(format!("CARGO_TARGET_{triple}_RUNNER"), prefix);
            }
            None => {
                println!("neither root's rights nor user namespaces: tests of networks cannot run");
            }
        }
    }
    let shown = command::show(&mut command)?;
    let log = fs::read_to_string(&log).map_err(|error| format!("{}: {error}", log.display()))?;
    Ok(judge(&shown, &log))
}

/// What `cargo test` did, from its output and from the log of skipped tests.
pub(crate) fn judge(shown: &Shown, log: &str) -> Outcome {
    let output = shown.stdout.iter().chain(&shown.stderr).map(String::as_str);
    let skips = skips::found(output.chain(log.lines()));
    let (mut passed, mut failed, mut ignored) = (0, 0, 0);
    for line in shown.stdout.iter().filter(|line| line.starts_with("test result: ")) {
        passed += figure(line, "passed");
        failed += figure(line, "failed");
        ignored += figure(line, "ignored");
    }
    let mut why = None;
    if ignored > 0 {
        failed += ignored;
        why = Some(format!("{ignored} tests are ignored: let them run, or say why not by skip!"));
    }
    if !shown.ok && failed == 0 {
        failed = 1;
        why = Some("cargo test failed".into());
    }
    // The harness counts a test that skipped itself as passed.
    Outcome { passed: passed.saturating_sub(skips.len()), failed, skips, why }
}

/// The number before `word` in a result line: `test result: ok. 3 passed; 0 failed; …`.
fn figure(line: &str, word: &str) -> usize {
    let words: Vec<&str> = line.split([' ', ';']).filter(|word| !word.is_empty()).collect();
    words.windows(2).find(|pair| pair[1] == word).and_then(|pair| pair[0].parse().ok()).unwrap_or(0)
}

fn closing_line(total: &Outcome) -> String {
    let mut line = format!("{} passed, {} failed", total.passed, total.failed);
    if !total.skips.is_empty() {
        line += &format!(", {} skipped", total.skips.len());
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(ok: bool, stdout: &[&str]) -> Shown {
        let stdout = stdout.iter().map(|&line| line.to_owned()).collect();
        Shown { ok, stdout, stderr: vec!["SKIPPED x::a: no tun".into()] }
    }

    const GOOD: &str = "test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out";
    const BAD: &str =
        "test result: FAILED. 1 passed; 2 failed; 1 ignored; 0 measured; 0 filtered out";

    #[test]
    fn results_are_summed_and_skips_are_not_passes() {
        let outcome =
            judge(&shown(true, &["running 3 tests", GOOD, GOOD]), "SKIPPED x::b: no tap\n");
        assert_eq!((outcome.passed, outcome.failed, outcome.skips.len()), (4, 0, 2));
        assert_eq!(closing_line(&outcome), "4 passed, 0 failed, 2 skipped");
    }

    #[test]
    fn ignored_tests_are_failures() {
        let outcome = judge(&shown(false, &[GOOD, BAD]), "");
        assert_eq!((outcome.passed, outcome.failed), (3, 3));
        assert!(outcome.why.unwrap().starts_with("1 tests are ignored"));
    }

    #[test]
    fn tests_that_do_not_compile_are_a_failure() {
        let outcome = judge(&shown(false, &[]), "");
        assert_eq!((outcome.passed, outcome.failed), (0, 1));
    }

    #[test]
    fn the_closing_line_says_no_more_than_it_must() {
        let total = Outcome { passed: 7, ..Outcome::default() };
        assert_eq!(closing_line(&total), "7 passed, 0 failed");
    }
}
