//! The test programs of the workspace: building them, running them, and reading their output.

use crate::command::{self, cargo, words};
use crate::{machine, skips};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::test::Outcome;

/// A test program that cargo has built.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Program {
    /// The folder of its package and its own name: `tests::cm`.
    pub(crate) name: String,
    file: PathBuf,
    /// The folder in which cargo runs it.
    package: PathBuf,
}

/// Builds every test program of the workspace.
pub(crate) fn build() -> Result<Vec<Program>, String> {
    let format = "--message-format=json-render-diagnostics";
    let mut build = cargo(&format!("test --workspace --no-run --quiet {format}"));
    let output = build
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| format!("cannot run cargo: {error}"))?;
    if !output.status.success() {
        return Err(format!("{}: {}", command::describe(&build), output.status));
    }
    let mut programs: Vec<Program> =
        String::from_utf8_lossy(&output.stdout).lines().filter_map(program).collect();
    programs.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(programs)
}

/// The test program that a message of cargo announces.
pub(crate) fn program(line: &str) -> Option<Program> {
    let message: Value = serde_json::from_str(line).ok()?;
    if message["profile"]["test"] != true {
        return None;
    }
    let package = Path::new(message["manifest_path"].as_str()?).parent()?;
    let target = message["target"]["name"].as_str()?;
    let folder = package.file_name()?.to_string_lossy();
    let name = match message["target"]["kind"][0].as_str()? {
        "lib" => folder.into_owned(),
        "bin" => format!("{folder}::{target} (bin)"),
        _ => format!("{folder}::{target}"),
    };
    let file = message["executable"].as_str()?.into();
    Some(Program { name, file, package: package.to_owned() })
}

impl Program {
    /// How to run it, as cargo would.
    pub(crate) fn command(&self, runner: Option<&str>) -> Command {
        let mut command = runner.map_or_else(|| Command::new(&self.file), words);
        command.args(runner.map(|_| &self.file));
        command.current_dir(&self.package).env("CARGO_MANIFEST_DIR", &self.package);
        command
    }
}

/// The command prefix with which a test program may make network namespaces, if it needs one.
/// Prints the rights that are missing.
pub(crate) fn runner() -> Option<&'static str> {
    if machine::has_all_rights() {
        return None;
    }
    let prefix = machine::user_namespace();
    match prefix {
        Some(_) => println!("not root, or not all of its rights: tests run in a user namespace"),
        None => println!("neither root's rights nor user namespaces: tests of networks cannot run"),
    }
    prefix
}

/// The outcome of test programs, from their output, skipped tests included.
pub(crate) fn judge(ok: bool, output: &str) -> Outcome {
    let skips = skips::found(output.lines());
    let (mut passed, mut failed, mut ignored) = (0, 0, 0);
    for line in output.lines().filter(|line| line.starts_with("test result: ")) {
        passed += figure(line, "passed");
        failed += figure(line, "failed");
        ignored += figure(line, "ignored");
    }
    let mut why = None;
    if ignored > 0 {
        failed += ignored;
        why = Some(format!("{ignored} tests are ignored: let them run, or say why not by skip!"));
    }
    if !ok && failed == 0 {
        failed = 1;
        why = Some("it failed".into());
    }
    // The harness counts a test that skipped itself as passed.
    Outcome { passed: passed.saturating_sub(skips.len()), failed, skips, why }
}

/// The output of a test program without the lines of passed tests.
pub(crate) fn without_passes(output: &str) -> String {
    let passed = |line: &&str| line.starts_with("test ") && line.contains(" ... ok");
    output.lines().filter(|line| !passed(line)).map(|line| format!("{line}\n")).collect()
}

/// The number before `word` in a line of figures: `test result: ok. 3 passed; 0 failed; …`.
pub(crate) fn figure(line: &str, word: &str) -> usize {
    let words: Vec<&str> = line.split([' ', ';', ',']).filter(|word| !word.is_empty()).collect();
    words.windows(2).find(|pair| pair[1] == word).and_then(|pair| pair[0].parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out";
    const BAD: &str =
        "test result: FAILED. 1 passed; 2 failed; 1 ignored; 0 measured; 0 filtered out";

    #[test]
    fn results_are_summed_and_skips_are_not_passes() {
        let outcome =
            judge(true, &format!("{GOOD}\nSKIPPED x::a: no tun\n{GOOD}\nSKIPPED x::b: no tap"));
        assert_eq!((outcome.passed, outcome.failed, outcome.skips.len()), (4, 0, 2));
    }

    #[test]
    fn ignored_tests_are_failures() {
        let outcome = judge(false, &format!("{GOOD}\n{BAD}"));
        assert_eq!((outcome.passed, outcome.failed), (4, 3));
        assert!(outcome.why.unwrap().starts_with("1 tests are ignored"));
    }

    #[test]
    fn a_program_that_dies_is_a_failure() {
        let outcome = judge(false, "");
        assert_eq!((outcome.passed, outcome.failed), (0, 1));
    }

    #[test]
    fn of_what_failed_no_passes_are_shown() {
        let output = "running 3 tests\ntest a ... ok\ntest b ... FAILED\ntest c::d ... ok (2.45 s)";
        assert_eq!(without_passes(output), "running 3 tests\ntest b ... FAILED\n");
    }

    #[test]
    fn messages_of_cargo_name_the_programs() {
        let message = |kind: &str, test: bool| {
            format!(
                r#"{{"reason":"compiler-artifact","manifest_path":"/r/tests/Cargo.toml",
                "target":{{"kind":["{kind}"],"name":"x"}},"profile":{{"test":{test}}},"executable":"/r/x-1"}}"#
            )
        };
        let name = |kind, test| program(&message(kind, test)).map(|program| program.name);
        assert_eq!(name("test", true).as_deref(), Some("tests::x"));
        assert_eq!(name("lib", true).as_deref(), Some("tests"));
        assert_eq!(name("bin", true).as_deref(), Some("tests::x (bin)"));
        assert_eq!(name("bin", false), None);
        assert_eq!(program("not JSON"), None);
    }
}
