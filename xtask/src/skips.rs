//! Tests that could not run, and the committed list of those that may.

use std::process::Command;

use crate::{command, files};

/// The committed list.
const LIST: &str = "tests/allowed-skips.txt";

/// Marks an entry that counts only where the tests run without root's rights.
const UNPRIVILEGED: &str = "[unprivileged]";

/// The committed list of tests that may be skipped, each with its reason.
pub(crate) struct Allowed(Vec<String>);

impl Allowed {
    /// Reads the committed list.
    pub(crate) fn read(has_all_rights: bool) -> Result<Self, String> {
        Ok(Self::parse(&files::read(LIST)?, has_all_rights))
    }

    pub(crate) fn parse(list: &str, has_all_rights: bool) -> Self {
        let lines = list.lines().map(str::trim);
        let lines = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
        let entry = |line: &str| match line.strip_prefix(UNPRIVILEGED) {
            Some(_) if has_all_rights => None,
            Some(line) => Some(line.trim().to_owned()),
            None => Some(line.to_owned()),
        };
        Self(lines.filter_map(entry).collect())
    }

    /// The entries of `skips` (`name: reason`) that are not on the list.
    pub(crate) fn unlisted<'a>(&self, skips: &'a [String]) -> Vec<&'a str> {
        let listed = |skip: &str| self.0.iter().any(|pattern| matches(pattern, skip));
        skips.iter().map(String::as_str).filter(|skip| !listed(skip)).collect()
    }
}

/// The skips in lines of output or of the log, each once: the text after `SKIPPED`.
pub(crate) fn found<'a>(lines: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    let mut skips: Vec<String> = lines
        .into_iter()
        .filter_map(|line| line.trim().strip_prefix("SKIPPED "))
        .filter(|skip| skip.contains(": "))
        .map(str::to_owned)
        .collect();
    skips.sort_unstable();
    skips.dedup();
    skips
}

/// Shows a run of tests, and returns those that were skipped.
pub(crate) fn of(test: &mut Command) -> Result<Vec<String>, String> {
    let shown = command::show(test)?;
    let skips = found(shown.stdout.iter().chain(&shown.stderr).map(String::as_str));
    if shown.ok { Ok(skips) } else { Err("a test failed: see above".into()) }
}

/// Shows a run of tests, none of which may be skipped.
pub(crate) fn none(test: &mut Command) -> Result<(), String> {
    of(test)?.first().map_or(Ok(()), |skip| Err(format!("not all was run: {skip}")))
}

/// Whether `text` matches `pattern`; a `*` stands for any text.
fn matches(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((start, rest)) => text.strip_prefix(start).is_some_and(|tail| {
            tail.char_indices()
                .map(|(at, _)| at)
                .chain([tail.len()])
                .any(|at| matches(rest, &tail[at..]))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = "# comment\n\na::b: no such thing\n[unprivileged] c::*: needs root*\n";

    #[test]
    fn only_listed_skips_pass() {
        let skips = found([
            "SKIPPED a::b: no such thing",
            "test a::b ... ok",
            "SKIPPED c::d: needs root outside of a user namespace",
            "SKIPPED a::b: no such thing",
            "SKIPPED a::b: another reason",
        ]);
        assert_eq!(skips.len(), 3);
        let unlisted =
            |has_all_rights| Allowed::parse(LIST, has_all_rights).unlisted(&skips).join(" | ");
        assert_eq!(unlisted(false), "a::b: another reason");
        assert_eq!(
            unlisted(true),
            "a::b: another reason | c::d: needs root outside of a user namespace"
        );
    }

    #[test]
    fn stars_stand_for_any_text() {
        assert!(matches("*: needs * installed", "x: needs nft installed"));
        assert!(matches("a*", "a"));
        assert!(!matches("a*b", "acc"));
        assert!(!matches("a", "ab"));
    }
}
