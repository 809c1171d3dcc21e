//! Tests that cannot run here report it.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;

/// Names the environment variable with the path of the file that collects skipped tests.
pub const LOG_VARIABLE: &str = "ROCINANTE_TEST_LOG";

/// Ends the surrounding test, with a reason in `format!` style: `skip!("needs {what}")`. The test
/// may return `()` or a `Result<(), _>`.
#[macro_export]
macro_rules! skip {
    ($($reason:tt)+) => {{
        $crate::skip::report($crate::test_name!(), &format!($($reason)+));
        return $crate::skip::Skipped::skipped();
    }};
}

/// The path of the surrounding function: `end_to_end::rc::write_of_every_size`.
#[macro_export]
macro_rules! test_name {
    () => {{
        fn here() {}
        $crate::skip::function_name(std::any::type_name_of_val(&here))
    }};
}

/// The result type of a test that may skip itself.
pub trait Skipped {
    /// The value that means success.
    fn skipped() -> Self;
}

impl Skipped for () {
    fn skipped() -> Self {}
}

impl<E> Skipped for Result<(), E> {
    fn skipped() -> Self {
        Ok(())
    }
}

/// Reports that the test `name` cannot run here because of `reason`, as [`skip!`] does.
pub fn report(name: &str, reason: &str) {
    let line = format!("SKIPPED {name}: {}\n", one_line(reason));
    // Not `eprint!`: the harness captures that macro in tests that pass, but not the stream itself.
    let _ = io::stderr().lock().write_all(line.as_bytes());
    if let Some(log) = std::env::var_os(LOG_VARIABLE)
        && let Err(error) = append(Path::new(&log), &line)
    {
        panic!("cannot write {LOG_VARIABLE} {}: {error}", log.display());
    }
}

/// The function around a `here` as [`test_name!`] makes it.
#[doc(hidden)]
#[must_use]
pub fn function_name(here: &'static str) -> &'static str {
    let mut name = here.strip_suffix("::here").unwrap_or(here);
    while let Some(outer) = name.strip_suffix("::{{closure}}") {
        name = outer;
    }
    name
}

fn one_line(reason: &str) -> String {
    reason.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// One write to a file opened for appending, so that lines of parallel tests do not mix.
fn append(log: &Path, line: &str) -> io::Result<()> {
    OpenOptions::new().create(true).append(true).open(log)?.write_all(line.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_knows_its_name() {
        let in_a_closure = || test_name!();
        assert_eq!(test_name!(), "rocinante_tests::skip::tests::a_test_knows_its_name");
        assert_eq!(in_a_closure(), test_name!());
    }

    #[test]
    fn lines_are_appended_whole() {
        let log = std::env::temp_dir().join(format!("rocinante-skip-{}", std::process::id()));
        append(&log, "SKIPPED a: b\n").unwrap();
        append(&log, &format!("SKIPPED c: {}\n", one_line("d\n  e"))).unwrap();
        let text = std::fs::read_to_string(&log).unwrap();
        std::fs::remove_file(&log).unwrap();
        assert_eq!(text, "SKIPPED a: b\nSKIPPED c: d e\n");
    }
}
