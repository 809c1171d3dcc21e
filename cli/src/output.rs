//! The output of commands, and their exit codes.
//!
//! Without `--json`, results go to standard output and everything else to standard error. With
//! `--json`, standard output ends with one JSON object on one line, and everything else goes to
//! standard error. Exit codes: 0 success, 1 failure, 2 the command line makes no sense.

use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;

use rocinante::VerbsError;
use serde::Serialize;

use crate::measure::MeasureError;

/// The reason why a command failed, and what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// The command line contradicts itself.
    Usage(String),
    /// Something went wrong.
    Failed(String),
}

impl Failure {
    /// The exit code.
    #[must_use]
    pub const fn code(&self) -> u8 {
        match self {
            Self::Failed(_) => 1,
            Self::Usage(_) => 2,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Usage(text) | Self::Failed(text)) = self;
        f.write_str(text)
    }
}

impl std::error::Error for Failure {}

impl From<VerbsError> for Failure {
    fn from(error: VerbsError) -> Self {
        Self::Failed(match error {
            // The user runs one of the two sides, so the bare reason is clear.
            VerbsError::Exchange(why) => why,
            VerbsError::Open(error) if error.errno() == libc::EADDRINUSE => {
                format!("{error} with --bind")
            }
            error => error.to_string(),
        })
    }
}

impl From<MeasureError> for Failure {
    fn from(error: MeasureError) -> Self {
        match error {
            MeasureError::Verbs(error) => error.into(),
            error => Self::Failed(error.to_string()),
        }
    }
}

/// The destination of a command's results.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Output {
    /// Whether standard output is for the JSON object alone.
    pub json: bool,
}

impl Output {
    /// A line of the result.
    pub fn line(self, text: impl fmt::Display) {
        // The reader of our output may be gone; the exit status has the result, too.
        let _ = if self.json {
            writeln!(io::stderr(), "{text}")
        } else {
            writeln!(io::stdout(), "{text}")
        };
    }

    /// A line of a result that is one JSON object per line.
    pub fn result(self, object: impl fmt::Display) {
        let _ = writeln!(io::stdout(), "{object}");
    }

    /// A remark that is no result.
    pub fn note(self, text: impl fmt::Display) {
        let _ = writeln!(io::stderr(), "{text}");
    }

    /// Ends the command: prints the JSON object if one is wanted and the error, after the words of
    /// `program`, if there is one. Returns the exit code.
    #[must_use]
    pub fn end<T: Serialize>(self, program: &str, result: &Result<T, Failure>) -> ExitCode {
        #[derive(Serialize)]
        struct Error<'a> {
            error: &'a str,
        }
        let (line, code) = match result {
            Ok(value) => (serde_json::to_string(value), ExitCode::SUCCESS),
            Err(failure) => {
                self.note(format_args!("{program}: {failure}"));
                let (Failure::Usage(error) | Failure::Failed(error)) = failure;
                (serde_json::to_string(&Error { error }), ExitCode::from(failure.code()))
            }
        };
        if self.json {
            let _ = writeln!(io::stdout(), "{}", line.expect("results are JSON"));
        }
        code
    }
}

/// Formats three significant digits.
pub fn digits(value: f64) -> String {
    let whole = value.abs().max(f64::MIN_POSITIVE).log10().floor() as i32;
    format!("{value:.*}", usize::try_from(2 - whole).unwrap_or(0).min(4))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_digits_count() {
        assert_eq!(
            ["0.123", "1.23", "12.3", "123", "1235"],
            [0.12341, 1.2341, 12.341, 123.41, 1234.6].map(digits)
        );
    }
}
