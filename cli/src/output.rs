//! The output of commands, and their exit codes.
//!
//! Without `--json`, results go to standard output and everything else to standard error. With
//! `--json`, standard output ends with one JSON object on one line, and everything else goes to
//! standard error. Exit codes: 0 success, 1 failure, 2 the command line makes no sense, 3 a result
//! below the user's limit, 128 plus its number a signal.

use std::fmt;
use std::io::{self, Write};

use rocinante::{Refused, VerbsError, WcStatus};
use serde::Serialize;
use serde_json::Value;

use crate::measure::MeasureError;

/// The reason why a command failed, and what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// The command line contradicts itself.
    Usage(String),
    /// Something went wrong.
    Failed(String),
    /// Something of this kind went wrong.
    Of(Kind, String),
}

/// The result of a command, or of a step of it.
pub type Result<T = (), E = Failure> = std::result::Result<T, E>;

/// A kind of failure that programs can tell from others: `error.kind` of `--json`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// There is no such device, or it cannot be opened.
    Device,
    /// There is no connection to the peer.
    Connect,
    /// The peer is gone, gave up, or sent an invalid message.
    Peer,
    /// A request ended in this status.
    Completion(WcStatus),
    /// Nothing came in time.
    Silence,
    /// The peer's data is wrong.
    Data,
    /// The result is below the least that the user wants.
    Limit,
    /// This signal ended the command.
    Signal(i32),
}

impl Failure {
    /// The exit code.
    #[must_use]
    pub fn code(&self) -> u8 {
        match self {
            Self::Usage(_) => 2,
            Self::Of(Kind::Limit, _) => 3,
            Self::Of(Kind::Signal(signal), _) => u8::try_from(128 + signal).unwrap_or(u8::MAX),
            Self::Failed(_) | Self::Of(..) => 1,
        }
    }

    /// The kind, in one word.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Usage(_) => "usage",
            Self::Failed(_) => "failed",
            Self::Of(Kind::Device, _) => "device",
            Self::Of(Kind::Connect, _) => "connect",
            Self::Of(Kind::Peer, _) => "peer",
            Self::Of(Kind::Completion(_), _) => "completion",
            Self::Of(Kind::Silence, _) => "silence",
            Self::Of(Kind::Data, _) => "data",
            Self::Of(Kind::Limit, _) => "limit",
            Self::Of(Kind::Signal(_), _) => "signal",
        }
    }

    /// The status of the request that failed.
    #[must_use]
    pub const fn status(&self) -> Option<WcStatus> {
        match self {
            Self::Of(Kind::Completion(status), _) => Some(*status),
            _ => None,
        }
    }

    /// The same failure with another text.
    #[must_use]
    pub fn told(mut self, words: impl FnOnce(&str) -> String) -> Self {
        let (Self::Usage(text) | Self::Failed(text) | Self::Of(_, text)) = &mut self;
        *text = words(text);
        self
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Usage(text) | Self::Failed(text) | Self::Of(_, text)) = self;
        f.write_str(text)
    }
}

impl std::error::Error for Failure {}

impl From<VerbsError> for Failure {
    fn from(error: VerbsError) -> Self {
        match error {
            // The user runs one of the two sides, so the bare reason is clear.
            VerbsError::Exchange(why) => Self::Of(Kind::Peer, why),
            VerbsError::Open(error) if error.errno() == libc::EADDRINUSE => {
                Self::Of(Kind::Device, format!("{error} with --bind"))
            }
            VerbsError::Open(error) => Self::Of(Kind::Device, error.to_string()),
            VerbsError::TimedOut => Self::Of(Kind::Silence, error.to_string()),
            VerbsError::Cm(_) | VerbsError::Path(_) => Self::Of(Kind::Connect, error.to_string()),
            error => Self::Failed(error.to_string()),
        }
    }
}

impl<T> From<Refused<T>> for Failure {
    fn from(refused: Refused<T>) -> Self {
        refused.error.into()
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

/// The version of the vocabulary of `--json` (`docs/json.md`): the key `schema` of each object. It
/// changes when a key goes, or changes its meaning, unit or type; not when one comes.
pub const SCHEMA: u32 = 1;

/// An object of `--json`: the keys that all of them begin with, and those of `body`.
#[derive(Debug, Serialize)]
struct Object<'a, T> {
    schema: u32,
    version: &'static str,
    command: &'a str,
    #[serde(flatten)]
    body: T,
}

/// One line of JSON of the command `program`, which is called `rocinante perf write-bw` or the
/// like. Panics if `body` is no object.
#[must_use]
pub fn object(program: &str, body: impl Serialize) -> String {
    let own = program.strip_prefix("rocinante ");
    let command = own.map_or(program, |words| words.split(' ').next().unwrap_or(words));
    let object = Object { schema: SCHEMA, version: env!("CARGO_PKG_VERSION"), command, body };
    serde_json::to_string(&object).expect("results are JSON")
}

/// The members of an object that have a value.
pub(crate) fn present(mut object: Value) -> Value {
    if let Value::Object(members) = &mut object {
        members.retain(|_, value| !value.is_null());
    }
    object
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
}

/// Rounds to three decimal places.
pub(crate) fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
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
    fn objects_begin_with_the_same_keys() {
        let line = object("rocinante perf write-bw", serde_json::json!({"b": 1}));
        let version = env!("CARGO_PKG_VERSION");
        assert_eq!(line, format!(r#"{{"schema":1,"version":"{version}","command":"perf","b":1}}"#));
        assert!(
            object("rocinante-bench cm", serde_json::json!({}))
                .contains(r#""command":"rocinante-bench cm""#)
        );
    }

    #[test]
    fn three_digits_count() {
        assert_eq!(
            ["0.123", "1.23", "12.3", "123", "1235"],
            [0.12341, 1.2341, 12.341, 123.41, 1234.6].map(digits)
        );
    }
}
