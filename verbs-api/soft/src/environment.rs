//! The variables of the environment that `libibverbs.so.1` alone reads. `rocinante run` checks
//! them before its program begins.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use crate::model::error::VerbsError;

/// The environment variable of the log: `off`, `warn`, `info` or `debug`, and after a comma a file
/// that lines are appended to instead of stderr.
pub const LOG_VARIABLE: &str = "ROCINANTE_LOG";

/// The environment variable that has the library print its counters at exit: `1`, or `0`.
pub const COUNTERS_VARIABLE: &str = "ROCINANTE_COUNTERS";

/// The level of the log.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum LogLevel {
    #[default]
    Off,
    Warn,
    Info,
    Debug,
}

/// A log as its variable has it.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct LogWish {
    pub level: LogLevel,
    pub file: Option<PathBuf>,
}

/// The log of the environment. Error: there is no such level.
pub fn log() -> Result<LogWish, VerbsError> {
    settle_log(&std::env::var_os(LOG_VARIABLE).unwrap_or_default())
}

/// Whether the environment asks for counters. Error: the value is neither `1` nor `0`.
pub fn wants_counters() -> Result<bool, VerbsError> {
    settle_counters(&std::env::var_os(COUNTERS_VARIABLE).unwrap_or_default())
}

fn settle_log(value: &OsStr) -> Result<LogWish, VerbsError> {
    let mut parts = value.as_bytes().splitn(2, |byte| *byte == b',');
    let level = match parts.next().unwrap_or_default().trim_ascii() {
        b"" | b"off" => LogLevel::Off,
        b"warn" => LogLevel::Warn,
        b"info" => LogLevel::Info,
        b"debug" => LogLevel::Debug,
        _ => {
            return Err(VerbsError::Invalid(format!(
                "{LOG_VARIABLE}={}: give it off, warn, info or debug, and after a comma a file",
                value.display()
            )));
        }
    };
    let file = parts.next().map(|path| OsString::from(OsStr::from_bytes(path)));
    // The program may change its working directory.
    let absolute = |path: OsString| std::path::absolute(&path).unwrap_or_else(|_| path.into());
    Ok(LogWish { level, file: file.map(absolute) })
}

fn settle_counters(value: &OsStr) -> Result<bool, VerbsError> {
    match value.as_bytes() {
        b"" | b"0" => Ok(false),
        b"1" => Ok(true),
        _ => {
            let value = value.display();
            Err(VerbsError::Invalid(format!("{COUNTERS_VARIABLE}={value}: give it 1 or 0")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_has_a_level_and_perhaps_a_file() {
        let settled = |value: &[u8]| settle_log(OsStr::from_bytes(value));
        for (value, level, file) in [
            (&b""[..], LogLevel::Off, None),
            (b"off", LogLevel::Off, None),
            (b"warn", LogLevel::Warn, None),
            (b" info ", LogLevel::Info, None),
            (b"debug,/a,b", LogLevel::Debug, Some(&b"/a,b"[..])),
            (b",/a", LogLevel::Off, Some(b"/a")),
            (b"warn,/\xff", LogLevel::Warn, Some(b"/\xff")),
        ] {
            let file = file.map(|path| PathBuf::from(OsStr::from_bytes(path)));
            assert_eq!(settled(value).unwrap(), LogWish { level, file }, "{value:?}");
        }
        for value in [&b"loud"[..], b"WARN", b"1", b"warning,/a", b"\xff"] {
            let error = settled(value).unwrap_err().to_string();
            assert!(error.contains("ROCINANTE_LOG=") && error.contains("warn, info"), "{error}");
        }
    }

    #[test]
    fn counters_are_asked_for_or_not() {
        let settled = |value: &str| settle_counters(OsStr::new(value));
        for (value, wanted) in [("", false), ("0", false), ("1", true)] {
            assert_eq!(settled(value).unwrap(), wanted, "{value}");
        }
        for value in ["false", "off", "yes", "2"] {
            let error = settled(value).unwrap_err().to_string();
            assert_eq!(error, format!("ROCINANTE_COUNTERS={value}: give it 1 or 0"));
        }
    }
}
