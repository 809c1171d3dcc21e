//! `cargo xtask orderings`: takes away each fence, each memory ordering and each check of the state
//! that threads share, one at a time, in a copy of the workspace. For each of them a named model
//! must fail.
//!
//! The fences and orderings are found in [`FILES`]; the checks are listed in `orderings/checks.rs`.
//! docs/orderings.md has a row for each, with the test that notices.

mod checks;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;

use crate::files;
use crate::nursery::{Ended, Nursery, try_test};

/// The files whose threads the models run.
const FILES: &[&str] = &[
    "verbs-api/soft/src/progress/core.rs",
    "verbs-api/soft/src/progress/background.rs",
    "verbs-api/soft/src/progress/watch.rs",
    "verbs-api/soft/src/staging.rs",
    "verbs-api/soft/src/mail.rs",
    "verbs-api/soft/src/announce.rs",
    "verbs-api/soft/src/front.rs",
    "verbs-api/soft/src/provider/state.rs",
];
/// The table of the test that notices each.
const TABLE: &str = "docs/orderings.md";
/// The models, as arguments of `cargo test`, and where their tests are.
const MODELS: &str = "-p rocinante-models --test threads";
const MODELS_SOURCE: &str = "tests/models/tests/threads.rs";
/// The unit tests of the device in software, for checks that only save wake-ups.
const UNITS: &str = "-p rocinante-soft --lib";

/// Something that can be taken away from a file.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Site {
    /// Such as `core release fence 1`: the file, the function, the kind, and its number.
    name: String,
    file: &'static str,
    /// Its place in the file, and the text that replaces it.
    place: Range<usize>,
    rest: String,
}

/// `cargo xtask orderings [--find] [PART-OF-A-NAME...]`.
pub(crate) fn run(args: &[&str]) -> Result<(), String> {
    let (find, parts) = match args.split_first() {
        Some((&"--find", parts)) => (true, parts),
        _ => (false, args),
    };
    let sites = all_sites(Path::new("."))?;
    let chosen: Vec<&Site> = sites
        .iter()
        .filter(|site| parts.is_empty() || parts.iter().any(|part| site.name.contains(part)))
        .collect();
    if chosen.is_empty() {
        return Err(format!("no fence, ordering or check has {} in its name", parts.join(" or ")));
    }
    let nursery = Nursery::new("orderings")?;
    nursery.copy()?;
    if find { find_tests(&nursery, &chosen) } else { confirm(&nursery, &chosen) }
}

/// Asks for each site the test that its row names.
fn confirm(nursery: &Nursery, chosen: &[&Site]) -> Result<(), String> {
    let rows = rows(&files::read(TABLE)?);
    let named = |site: &Site| rows.get(&site.name).ok_or_else(|| no_row(&site.name));
    let mut wrong = Vec::new();
    let mut asked = BTreeSet::new();
    for site in chosen {
        let notices = named(site)?;
        if asked.insert(notices) {
            let (ended, _) = try_test(&nursery.build(notices.of)?, &notices.test)?;
            if ended != Ended::Passed {
                wrong.push(format!("{}: {ended:?} with nothing taken away", notices.test));
            }
        }
    }
    for site in chosen {
        let notices = named(site)?;
        let ask = || try_test(&nursery.build(notices.of)?, &notices.test);
        let (ended, took) = nursery.with(site.file, |good| Ok(site.remove_from(good)), ask)??;
        println!("{}: {}: {ended:?} in {:.1} s", site.name, notices.test, took.as_secs_f64());
        if ended != Ended::Failed {
            wrong.push(format!("{}: {} has {ended:?}", site.name, notices.test));
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n")) }
}

/// Prints for each site the first model that notices it.
fn find_tests(nursery: &Nursery, chosen: &[&Site]) -> Result<(), String> {
    let tests = test_names(&files::read(MODELS_SOURCE)?);
    let mut unnoticed = 0;
    for site in chosen {
        let find = || -> Result<Option<String>, String> {
            let program = nursery.build(MODELS)?;
            for test in &tests {
                if try_test(&program, test)?.0 == Ended::Failed {
                    return Ok(Some(test.clone()));
                }
            }
            Ok(None)
        };
        let found = nursery.with(site.file, |good| Ok(site.remove_from(good)), find)??;
        unnoticed += usize::from(found.is_none());
        println!("| `{}` | `{}` |", site.name, found.as_deref().unwrap_or("-"));
    }
    if unnoticed == 0 { Ok(()) } else { Err(format!("no model notices {unnoticed}")) }
}

/// A test that notices something.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Notices {
    /// [`MODELS`] or [`UNITS`].
    of: &'static str,
    test: String,
}

fn no_row(name: &str) -> String {
    format!(
        "{TABLE} has no row for `{name}`: `cargo xtask orderings --find '{name}'` looks for a test"
    )
}

/// The rows of the table: the ordering taken away, in backticks in the first column; the test that
/// notices in the last, in backticks, after `units: ` if it is one of `verbs-api/soft`.
fn rows(table: &str) -> BTreeMap<String, Notices> {
    let rows = table.lines().filter_map(|line| {
        let cells: Vec<&str> = line.strip_prefix('|')?.strip_suffix('|')?.split('|').collect();
        let (first, last) = (cells.first()?.trim(), cells.last()?.trim());
        let name = first.strip_prefix('`')?.strip_suffix('`')?;
        let units = last.strip_prefix("units: ").map(|test| (UNITS, test));
        let (of, test) = units.unwrap_or((MODELS, last));
        let test = test.strip_prefix('`')?.strip_suffix('`')?;
        Some((name.into(), Notices { of, test: test.into() }))
    });
    rows.collect()
}

/// Everything that can be taken away.
fn all_sites(root: &Path) -> Result<Vec<Site>, String> {
    let mut sites = Vec::new();
    for file in FILES {
        let source = files::read(root.join(file))?;
        sites.extend(orderings_of(file, &source));
        sites.extend(checks::of(file, &source)?);
    }
    Ok(sites)
}

/// The fences of a source, and its orderings that are stronger than relaxed.
fn orderings_of(file: &'static str, source: &str) -> Vec<Site> {
    let stem = Path::new(file).file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let mut function = String::new();
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    let mut sites = Vec::new();
    let mut begin = 0;
    for line in source.split_inclusive('\n') {
        let code = line.trim();
        if code == "mod tests {" {
            break;
        }
        if let Some(name) = function_name(code) {
            function = name.into();
        }
        let mut add = |what: &str, place: Range<usize>, rest: &str| {
            let which = format!("{stem} {function} {what}");
            let count = counts.entry(which.clone()).or_default();
            *count += 1;
            let name = format!("{which} {count}");
            sites.push(Site { name, file, place, rest: rest.into() });
        };
        if code.starts_with("fence(") {
            add("fence", begin..begin + line.trim_end().len(), "");
        } else if !code.starts_with("//") && !code.starts_with("use ") {
            for word in ["Acquire", "Release", "AcqRel", "SeqCst"] {
                let ordering = format!("Ordering::{word}");
                for (at, _) in line.match_indices(&ordering) {
                    let at = begin + at;
                    add(word, at..at + ordering.len(), "Ordering::Relaxed");
                }
            }
        }
        begin += line.len();
    }
    sites
}

/// The name of the function that begins on this line.
fn function_name(code: &str) -> Option<&str> {
    let (before, name) = code.split_once("fn ")?;
    let words = ["", "pub ", "pub(crate) ", "pub(super) ", "const ", "pub(super) const "];
    let end = name.find(|c: char| !c.is_alphanumeric() && c != '_')?;
    (words.contains(&before) && end > 0).then(|| &name[..end])
}

impl Site {
    fn remove_from(&self, source: &str) -> String {
        let mut changed = source.to_owned();
        changed.replace_range(self.place.clone(), &self.rest);
        changed
    }
}

/// The names of the test functions in a source.
fn test_names(source: &str) -> Vec<String> {
    let lines: Vec<&str> = source.lines().map(str::trim).collect();
    let tests = lines.windows(2).filter(|pair| pair[0] == "#[test]");
    tests.filter_map(|pair| function_name(pair[1])).map(Into::into).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root() -> &'static Path {
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace")
    }

    #[test]
    fn each_site_has_one_row_and_its_test_exists() {
        let sites = all_sites(root()).unwrap_or_else(|why| panic!("{why}"));
        let table = files::read(root().join(TABLE)).expect(TABLE);
        let rows = rows(&table);
        let names: BTreeSet<&String> = sites.iter().map(|site| &site.name).collect();
        assert_eq!(names.len(), sites.len(), "two have one name");
        for name in &names {
            assert!(rows.contains_key(*name), "{}", no_row(name));
            assert_eq!(table.matches(&format!("`{name}`")).count(), 1, "{name} has two rows");
        }
        for name in rows.keys() {
            assert!(names.contains(name), "{TABLE}: `{name}` is not in the code any more");
        }
        let models = test_names(&files::read(root().join(MODELS_SOURCE)).expect(MODELS_SOURCE));
        for Notices { of, test } in rows.values() {
            assert!(*of == UNITS || models.contains(test), "there is no model {test}");
        }
    }

    #[test]
    fn fences_and_orderings_are_found_where_they_are() {
        let source = "\
use crate::provider::sync::{Ordering, fence};
    pub(super) fn first(&self) {
        // Ordering::SeqCst, as it was.
        self.a.store(1, Ordering::Release);
        fence(Ordering::SeqCst);
        self.b.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed);
        self.a.store(2, Ordering::Release);
    }
    fn second() { x.load(Ordering::Relaxed); fence(Ordering::SeqCst) }
mod tests {
    fn third() { x.load(Ordering::Acquire); }
";
        let sites = orderings_of("a/b.rs", source);
        let names: Vec<_> = sites.iter().map(|site| site.name.as_str()).collect();
        let of_first =
            ["Release 1", "fence 1", "Acquire 1", "Release 2"].map(|of| format!("b first {of}"));
        assert_eq!(names[..4], of_first);
        assert_eq!(names[4..], ["b second SeqCst 1"]);
        assert!(sites[1].remove_from(source).contains("Release);\n\n        self.b"));
        let weak = sites[2].remove_from(source);
        assert!(weak.contains("(0, 1, Ordering::Relaxed, Ordering::Relaxed)"));
    }

    #[test]
    fn a_row_names_what_is_taken_away_and_the_test() {
        let table = "\
| what | why | noticed by |
|---|---|---|
| `core release fence 1` | a `word` | `a_test` |
| `x` | | units: `soft::progress::tests::b` |
| none | | `c` |
";
        let rows = rows(table);
        let of = |name: &str| rows.get(name).map(|row| (row.of, row.test.as_str()));
        assert_eq!(rows.len(), 2);
        assert_eq!(of("core release fence 1"), Some((MODELS, "a_test")));
        assert_eq!(of("x"), Some((UNITS, "soft::progress::tests::b")));
    }
}
