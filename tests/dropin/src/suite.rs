//! rdma-core's own tests, as Debian ships them with python3-pyverbs.
//!
//! `suite.txt` has a state for each test that is of no single driver. A test that must pass must
//! run: if it skips itself, it fails.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rocinante_lab::{LabConfig, Pair};

use crate::NOBODY;
use crate::install::Installation;

/// Where Debian's package rdma-core has the tests, most of them compressed.
pub const TESTS: &str = "/usr/share/doc/rdma-core/tests";
/// Debian's Python, which has pyverbs; another may be the first on the search path.
const PYTHON: &str = "/usr/bin/python3";
/// The number of huge pages of 2 MiB that the machine sets aside, and the number that tests need.
const HUGE_PAGES: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
const HUGE_PAGES_WANTED: u32 = 8;
/// How long the tests of a class may take.
const LIMIT: Duration = Duration::from_secs(60);

/// The result required of a test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// It has to run and pass.
    Must,
    /// It is of something that is not offered.
    Out,
    /// It has to pass once the feature that it needs is there.
    Later,
}

/// A test of the suite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Test {
    /// `module.Class.method`.
    pub name: &'static str,
    /// The result required.
    pub state: State,
    /// Why it need not pass.
    pub reason: &'static str,
}

/// How a test ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It ran and passed.
    Passed,
    /// It did not run, for this reason.
    Skipped(String),
    /// It failed, for this reason.
    Failed(String),
}

/// All tests, in the suite's order. Panics if a line of the list makes no sense.
#[must_use]
pub fn tests() -> Vec<Test> {
    let lines = include_str!("suite.txt").lines().filter(|line| !line.starts_with('#'));
    lines.map(|line| parse(line).unwrap_or_else(|| panic!("suite.txt: {line}"))).collect()
}

fn parse(line: &'static str) -> Option<Test> {
    let (word, rest) = line.split_once(' ')?;
    let state = match word {
        "must" => State::Must,
        "out" => State::Out,
        "later" => State::Later,
        _ => return None,
    };
    let (name, reason) = rest.split_once(": ").unwrap_or((rest, ""));
    ((state == State::Must) == reason.is_empty()).then_some(Test { name, state, reason })
}

/// Runs these tests, by their names, on a device on `udp`, as a user without capabilities. Calls
/// `each` as they end. Error: there is no network or no suite here.
pub fn run(
    names: &[&str],
    installed: &Installation,
    mut each: impl FnMut(&str, &Verdict),
) -> Result<(), String> {
    let suite = unpack(&installed.runtime()).map_err(|error| {
        format!("{TESTS}: {error}: as root: apt install rdma-core python3-pyverbs")
    })?;
    let _huge_pages = HugePages::set_aside();
    // Each class for itself, so that one that dies takes no other with it.
    let mut classes: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for name in names {
        let class = name.rsplit_once('.').map_or(*name, |(class, _)| class);
        classes.entry(class).or_default().push(name);
    }
    for names in classes.values() {
        let mut rest = &names[..];
        while !rest.is_empty() {
            let ended = some(rest, installed, &suite)?;
            ended.iter().zip(rest).for_each(|(verdict, name)| each(name, verdict));
            rest = &rest[ended.len()..];
        }
    }
    Ok(())
}

/// Runs tests until one kills the process; the verdicts, of one test at least.
fn some(names: &[&str], installed: &Installation, suite: &Path) -> Result<Vec<Verdict>, String> {
    let pair = Pair::new(&LabConfig::default()).map_err(|error| error.to_string())?;
    let script = suite.join("suite.py");
    let options = ["--dev", "roce0", "--"];
    let mut command = installed.run("udp", [Path::new(PYTHON), &script]);
    command.args(options).args(names).current_dir(suite).uid(NOBODY).gid(NOBODY);
    command.env("PYTHONDONTWRITEBYTECODE", "1");
    let program = pair.containers()[0].spawn(&mut command).map_err(|error| error.to_string())?;
    let output = program.wait_with_output(LIMIT);
    let (said, end) = match &output {
        Ok(output) => {
            let stderr = String::from_utf8_lossy(&output.stderr);
            let last = stderr.trim().lines().last().unwrap_or_default();
            let end = format!("the process ended before: {}: {last}", output.status);
            (String::from_utf8_lossy(&output.stdout), end)
        }
        Err(error) => (String::new().into(), error.to_string()),
    };
    Ok(verdicts(&said, names, &end))
}

/// The verdicts of these tests, in their order, as far as they ran. If the process died meanwhile,
/// the last is that of the test that ran then.
fn verdicts(said: &str, names: &[&str], end: &str) -> Vec<Verdict> {
    let mut verdicts = Vec::new();
    for name in names {
        let mark = format!("@end tests.{name} ");
        let Some(rest) = said.lines().find_map(|line| line.strip_prefix(&mark)) else {
            verdicts.push(Verdict::Failed(end.to_owned()));
            return verdicts;
        };
        let (word, reason) = rest.split_once(' ').unwrap_or((rest, ""));
        verdicts.push(match word {
            "ok" => Verdict::Passed,
            "skipped" => Verdict::Skipped(reason.to_owned()),
            _ => Verdict::Failed(reason.to_owned()),
        });
    }
    verdicts
}

/// Huge pages that the machine sets aside until this is dropped.
struct HugePages {
    before: String,
}

impl HugePages {
    /// `None` if there are enough, or none can be had: then the tests that want them say so.
    fn set_aside() -> Option<Self> {
        let before = fs::read_to_string(HUGE_PAGES).ok()?;
        let few = before.trim().parse::<u32>().is_ok_and(|pages| pages < HUGE_PAGES_WANTED);
        (few && fs::write(HUGE_PAGES, HUGE_PAGES_WANTED.to_string()).is_ok())
            .then_some(Self { before })
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = fs::write(HUGE_PAGES, &self.before);
    }
}

/// Copies the suite, decompressed, to where every user can read it.
fn unpack(place: &Path) -> io::Result<PathBuf> {
    let suite = place.join("suite");
    let tests = suite.join("tests");
    fs::create_dir_all(&tests)?;
    fs::write(suite.join("suite.py"), include_str!("suite.py"))?;
    for entry in fs::read_dir(TESTS)? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            fs::copy(entry.path(), tests.join(entry.file_name()))?;
        }
    }
    let packed = fs::read_dir(&tests)?.flatten().map(|entry| entry.path());
    let packed = packed.filter(|path| path.extension().is_some_and(|end| end == "gz"));
    let status = Command::new("gzip").arg("-d").args(packed).status()?;
    if status.success() { Ok(suite) } else { Err(io::Error::other("gzip failed")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_generic_test_has_a_state() {
        let tests = tests();
        let of = |state| tests.iter().filter(|test| test.state == state).count();
        assert_eq!((of(State::Must), of(State::Out), of(State::Later)), (118, 51, 2));
        for (at, test) in tests.iter().enumerate() {
            assert!(!tests[..at].iter().any(|other| other.name == test.name), "{}", test.name);
        }
    }

    #[test]
    fn a_test_that_kills_the_process_failed() {
        let said = "@begin tests.a\nnoise\n@end tests.a ok \n@end tests.b skipped no XRC\n@begin \
                    tests.c\n";
        assert_eq!(
            verdicts(said, &["a", "b", "c", "d"], "signal: 6"),
            [
                Verdict::Passed,
                Verdict::Skipped("no XRC".into()),
                Verdict::Failed("signal: 6".into())
            ]
        );
    }
}
