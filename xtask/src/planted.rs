//! `cargo xtask planted`: bugs as engineers make them, planted one at a time in a copy of the
//! workspace. For each of them a named test must fail.
//!
//! The rows are in `planted/`: `right` occurs exactly once in its file, and the bug replaces it by
//! `wrong`. The bugs of the engine are in `tests/sim/broken-stack/bugs.rs`; the simulator finds
//! them.

mod cm;
mod netdev;
mod verbs;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::command::{self, cargo};
use crate::demo;

/// A bug and the tests that find it.
#[derive(Debug)]
pub(crate) struct Bug {
    name: &'static str,
    /// Its effect, in words.
    what: &'static str,
    /// Path from the root of the workspace.
    file: &'static str,
    right: &'static str,
    wrong: &'static str,
    /// Each of these tests finds it.
    found_by: &'static [Test],
}

/// One test function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Test {
    package: &'static str,
    target: Target,
    name: &'static str,
}

/// The program that a test is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Target {
    Lib,
    Test(&'static str),
}

impl Target {
    fn name(self) -> &'static str {
        match self {
            Self::Lib => "lib",
            Self::Test(name) => name,
        }
    }
}

const fn unit(package: &'static str, name: &'static str) -> Test {
    Test { package, target: Target::Lib, name }
}

const fn test(package: &'static str, target: &'static str, name: &'static str) -> Test {
    Test { package, target: Target::Test(target), name }
}

/// How long a test may take to find a bug.
const PATIENCE: Duration = Duration::from_secs(60);

fn bugs() -> impl Iterator<Item = &'static Bug> {
    [netdev::BUGS, verbs::BUGS, cm::BUGS].into_iter().flatten()
}

/// `cargo xtask planted [PART/OF | NAME...]`.
///
/// # Errors
/// A test does not find its bug, or fails without it; or nothing can be built.
pub(crate) fn run(args: &[&str]) -> Result<(), String> {
    let chosen = choose(args)?;
    let home = std::path::absolute(demo::target()?.join("planted"));
    let home = home.map_err(|error| error.to_string())?;
    let nursery = Nursery { tree: home.join("tree"), build: home.join("build") };
    nursery.copy()?;
    let tests: BTreeSet<Test> = chosen.iter().flat_map(|bug| bug.found_by).copied().collect();
    let mut broken = Vec::new();
    for test in tests {
        let (ended, _) = nursery.ask(test)?;
        if ended != Ended::Passed {
            broken.push(format!("{}: without a bug it has {ended:?}", test.name));
        }
    }
    println!("\n| bug | where | what | found by | seconds |\n|---|---|---|---|--:|");
    for bug in chosen {
        for test in bug.found_by {
            let (ended, took) = nursery.with(bug, || nursery.ask(*test))??;
            println!("{}", row(bug, *test, took));
            if ended != Ended::Failed {
                broken.push(format!("{}: {} has {ended:?}", bug.name, test.name));
            }
        }
    }
    if broken.is_empty() { Ok(()) } else { Err(broken.join("\n")) }
}

/// The bugs that the arguments select: all, every *n*-th, or some.
fn choose(args: &[&str]) -> Result<Vec<&'static Bug>, String> {
    let part = |text: &str| {
        let (part, of) = text.split_once('/')?;
        let (part, of): (usize, usize) = (part.parse().ok()?, of.parse().ok()?);
        (part < of).then_some((part, of))
    };
    if let [only] = args
        && only.contains('/')
    {
        let (part, of) = part(only).ok_or_else(|| format!("{only}: parts are 0/N to (N-1)/N"))?;
        return Ok(bugs().skip(part).step_by(of).collect());
    }
    if let Some(unknown) = args.iter().find(|name| !bugs().any(|bug| bug.name == **name)) {
        return Err(format!("no bug is called {unknown}"));
    }
    Ok(bugs().filter(|bug| args.is_empty() || args.contains(&bug.name)).collect())
}

/// A row in the form of docs/proof.md.
fn row(bug: &Bug, test: Test, took: Duration) -> String {
    let Bug { name, what, file, .. } = bug;
    let (target, seconds) = (test.target.name(), took.as_secs_f64());
    format!("| `{name}` | `{file}` | {what} | {target}: `{}` | {seconds:.1} |", test.name)
}

/// The end of a test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ended {
    Passed,
    Failed,
    Skipped,
    /// There is no test with that name.
    Unknown,
    /// It ran for longer than [`PATIENCE`].
    TooLate,
}

/// The copy of the workspace in which bugs are planted.
struct Nursery {
    tree: PathBuf,
    build: PathBuf,
}

impl Nursery {
    /// Updates the copy. Unchanged files are not written, so that they are not built again.
    fn copy(&self) -> Result<(), String> {
        let listed = command::read(Command::new("git").args(["ls-files", "-z"]))?;
        let files: BTreeSet<&Path> =
            listed.split('\0').filter(|file| !file.is_empty()).map(Path::new).collect();
        for file in &files {
            let to = self.tree.join(file);
            let Ok(bytes) = fs::read(file) else { continue };
            if fs::read(&to).is_ok_and(|old| old == bytes) {
                continue;
            }
            fs::create_dir_all(to.parent().unwrap_or(&to)).map_err(|error| said(&to, &error))?;
            fs::write(&to, bytes).map_err(|error| said(&to, &error))?;
        }
        self.remove_others(&self.tree, &files).map_err(|error| said(&self.tree, &error))
    }

    /// Removes files that no longer exist: cargo would still build them, because it finds tests by
    /// their place.
    fn remove_others(&self, folder: &Path, files: &BTreeSet<&Path>) -> std::io::Result<()> {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() {
                self.remove_others(&path, files)?;
            } else if path.strip_prefix(&self.tree).is_ok_and(|file| !files.contains(file)) {
                fs::remove_file(&path)?;
            }
        }
        Ok(())
    }

    /// Does `work` while the bug is planted.
    fn with<T>(&self, bug: &Bug, work: impl FnOnce() -> T) -> Result<T, String> {
        let file = self.tree.join(bug.file);
        let good = fs::read_to_string(&file).map_err(|error| said(&file, &error))?;
        let wrong = planted(bug, &good)?;
        fs::write(&file, wrong).map_err(|error| said(&file, &error))?;
        let done = work();
        fs::write(&file, good).map_err(|error| said(&file, &error))?;
        Ok(done)
    }

    /// Runs one test; returns how it ended and how long it ran, without the time to build it.
    fn ask(&self, test: Test) -> Result<(Ended, Duration), String> {
        let program = self.build(test)?;
        let mut command = Command::new(program);
        command.args(["--exact", test.name]).current_dir(self.home_of(test)?);
        let log = self.build.join("skipped-tests.txt");
        fs::write(&log, "").map_err(|error| said(&log, &error))?;
        command.env("ROCINANTE_TEST_LOG", &log);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let begin = Instant::now();
        let child = command.spawn().map_err(|error| said(test.name, &error))?;
        let ended = judge(child, begin).map_err(|error| said(test.name, &error))?;
        let skipped = fs::read_to_string(&log).is_ok_and(|log| !log.trim().is_empty());
        let ended = if skipped && ended == Ended::Passed { Ended::Skipped } else { ended };
        Ok((ended, begin.elapsed()))
    }

    /// Builds the program that a test is in; returns its path.
    fn build(&self, test: Test) -> Result<PathBuf, String> {
        let mut build = cargo(["test", "--no-run", "--message-format=json", "--quiet"]);
        build.args(["-p", test.package]);
        match test.target {
            Target::Lib => build.arg("--lib"),
            Target::Test(name) => build.args(["--test", name]),
        };
        build.current_dir(&self.tree).env("CARGO_TARGET_DIR", &self.build);
        // Forty builds of the same few programs each run one test: a fast build saves more time
        // than a fast program.
        build.env("CARGO_PROFILE_DEV_OPT_LEVEL", "0").env("CARGO_PROFILE_DEV_DEBUG", "0");
        let said = command::read(&mut build)?;
        said.lines()
            .filter_map(|line| serde_json::from_str::<Value>(line).ok())
            .filter(|said| said["profile"]["test"] == true)
            .find_map(|said| said["executable"].as_str().map(PathBuf::from))
            .ok_or_else(|| format!("{}: nothing was built", command::describe(&build)))
    }

    /// The folder in which cargo would run the test: that of its package.
    fn home_of(&self, test: Test) -> Result<PathBuf, String> {
        let Some((_, home)) = HOMES.iter().find(|(package, _)| *package == test.package) else {
            return Err(format!("{}: which folder is it in?", test.package));
        };
        Ok(self.tree.join(home))
    }
}

/// The packages that tests are in, and their folders.
const HOMES: [(&str, &str); 4] = [
    ("rocinante-netdev", "netdev"),
    ("rocinante-stack", "stack"),
    ("rocinante", "verbs-api"),
    ("rocinante-models", "tests/models"),
];

/// The file with the bug in it.
fn planted(bug: &Bug, good: &str) -> Result<String, String> {
    match good.matches(bug.right).count() {
        1 => Ok(good.replacen(bug.right, bug.wrong, 1)),
        count => Err(format!("{}: its place is {count} times in {}", bug.name, bug.file)),
    }
}

/// Waits for a test program.
fn judge(mut child: Child, begin: Instant) -> std::io::Result<Ended> {
    // The output is short, so the pipes do not fill up before the program ends.
    while child.try_wait()?.is_none() {
        if begin.elapsed() > PATIENCE {
            child.kill()?;
            child.wait()?;
            return Ok(Ended::TooLate);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output()?;
    let [stdout, stderr] =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    Ok(if stderr.contains("SKIPPED ") || stdout.contains("SKIPPED ") {
        Ended::Skipped
    } else if stdout.contains("test result: ok. 1 passed") {
        Ended::Passed
    } else if stdout.contains("test result: ok. 0 passed") {
        Ended::Unknown
    } else {
        // A failure of the test, or an abort.
        Ended::Failed
    })
}

fn said(what: impl AsRef<Path>, error: &std::io::Error) -> String {
    format!("{}: {error}", what.as_ref().display())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root() -> &'static Path {
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace")
    }

    #[test]
    fn every_planted_bug_has_its_place_and_its_tests() {
        let mut names = BTreeSet::new();
        for bug in bugs() {
            assert!(names.insert(bug.name), "two bugs are called {}", bug.name);
            let file = root().join(bug.file);
            let good = fs::read_to_string(&file).unwrap_or_else(|e| panic!("{}: {e}", bug.file));
            let wrong = planted(bug, &good).unwrap_or_else(|why| panic!("{why}"));
            assert_ne!(good, wrong, "{}", bug.name);
            assert!(!bug.found_by.is_empty(), "nothing finds {}", bug.name);
            for test in bug.found_by {
                assert!(exists(*test), "{}: there is no test {test:?}", bug.name);
            }
        }
        assert!(names.len() >= 40, "{}", names.len());
    }

    /// Whether a possible file of the test has a test function of that name.
    fn exists(test: Test) -> bool {
        let (_, home) = HOMES.iter().find(|(package, _)| *package == test.package).expect("known");
        let folder = match test.target {
            Target::Lib => root().join(home).join("src"),
            Target::Test(_) => root().join(home).join("tests"),
        };
        let function = test.name.rsplit("::").next().unwrap_or(test.name);
        let wanted = format!("#[test]\nfn {function}() {{");
        let mut folders = vec![folder];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).expect("a folder") {
                let path = entry.expect("an entry").path();
                if path.is_dir() {
                    folders.push(path);
                } else if let Ok(text) = fs::read_to_string(&path) {
                    let flat: Vec<&str> = text.lines().map(str::trim).collect();
                    if flat.join("\n").contains(&wanted) {
                        return true;
                    }
                }
            }
        }
        false
    }

    #[test]
    fn parts_and_names_choose() {
        let names = |args: &[&str]| -> Vec<&str> {
            choose(args).expect("known").iter().map(|bug| bug.name).collect()
        };
        let all = names(&[]);
        let (even, odd) = (names(&["0/2"]), names(&["1/2"]));
        assert_eq!(even.len() + odd.len(), all.len());
        assert_eq!((even[0], odd[0]), (all[0], all[1]));
        assert_eq!(names(&[all[3]]), [all[3]]);
        for wrong in ["2/2", "x/2", "no-such-bug"] {
            assert!(choose(&[wrong]).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_place_that_is_there_twice_is_none() {
        let bug = Bug { right: "a", wrong: "b", ..*bugs().next().expect("a bug") };
        assert_eq!(planted(&bug, "cac").as_deref(), Ok("cbc"));
        assert!(planted(&bug, "aa").is_err() && planted(&bug, "c").is_err());
    }
}
