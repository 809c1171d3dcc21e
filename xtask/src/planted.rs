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
use std::time::Duration;

use crate::nursery::{Ended, Nursery, Test, test, unit};

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

fn bugs() -> impl Iterator<Item = &'static Bug> {
    [netdev::BUGS, verbs::BUGS, cm::BUGS].into_iter().flatten()
}

/// `cargo xtask planted [PART/OF | NAME...]`.
///
/// # Errors
/// A test does not find its bug, or fails without it; or nothing can be built.
pub(crate) fn run(args: &[&str]) -> Result<(), String> {
    let chosen = choose(args)?;
    let nursery = Nursery::new("planted")?;
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
            let plant = |good: &str| planted(bug, good);
            let (ended, took) = nursery.with(bug.file, plant, || nursery.ask(*test))??;
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

/// The file with the bug in it.
fn planted(bug: &Bug, good: &str) -> Result<String, String> {
    match good.matches(bug.right).count() {
        1 => Ok(good.replacen(bug.right, bug.wrong, 1)),
        count => Err(format!("{}: its place is {count} times in {}", bug.name, bug.file)),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::nursery::{HOMES, Target};

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
