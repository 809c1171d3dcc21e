//! The library's log, and its place: nothing, unless `ROCINANTE_LOG` asks for it.
//!
//! It writes with system calls of its own: a preloaded library may have taken over those of the C
//! library. It holds no descriptor, so that it writes into no file that the program opened after it
//! closed ours.

use std::fmt::Arguments;
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::sync::OnceLock;

use rustix::fs::{Mode, OFlags, fstat, open};
use rustix::io::{Errno, write};

/// The level of the log. The order is that of the words of [`VARIABLE`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    Off,
    Warn,
    Info,
    Debug,
}

/// Names the environment variable: `warn`, `info` or `debug`, and after a comma a file that lines
/// are appended to instead of stderr.
const VARIABLE: &str = "ROCINANTE_LOG";

struct Log {
    level: Level,
    file: Option<PathBuf>,
    /// Device and inode of stderr when the library was first called. A program may close it, and
    /// open something else in its place.
    stderr: Option<(u64, u64)>,
}

static LOG: OnceLock<Log> = OnceLock::new();

fn log() -> &'static Log {
    LOG.get_or_init(|| parse(&std::env::var(VARIABLE).unwrap_or_default()))
}

/// Takes note of the variable and of stderr as they are now.
pub(crate) fn begin() {
    log();
}

fn parse(text: &str) -> Log {
    let (word, path) = text.split_once(',').map_or((text, None), |(word, path)| (word, Some(path)));
    let level = match word.trim() {
        "warn" => Level::Warn,
        "info" => Level::Info,
        "debug" => Level::Debug,
        _ => Level::Off,
    };
    // The program may change its working directory.
    let file = path.map(|path| std::path::absolute(path).unwrap_or_else(|_| path.into()));
    Log { level, file, stderr: stderr() }
}

fn stderr() -> Option<(u64, u64)> {
    fstat(std::io::stderr().as_fd()).ok().map(|file| (file.st_dev, file.st_ino))
}

/// Whether lines of this level are logged.
#[inline]
pub(crate) fn says(level: Level) -> bool {
    level <= log().level
}

pub(crate) fn say(level: Level, line: Arguments<'_>) {
    if says(level) {
        print(line);
    }
}

/// Logs lines at any level.
pub(crate) fn print(lines: Arguments<'_>) {
    let text = format!("rocinante[{}]: {lines}\n", std::process::id());
    let log = log();
    // There is no other place to report an error.
    if let Some(path) = &log.file {
        let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE;
        let flags = flags | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
        if let Ok(file) = open(path, flags, Mode::from_raw_mode(0o644)) {
            write_all(&file, text.as_bytes());
        }
    } else if log.stderr.is_some() && log.stderr == stderr() {
        write_all(std::io::stderr(), text.as_bytes());
    }
}

fn write_all(to: impl std::os::fd::AsFd, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        match write(&to, bytes) {
            Ok(0) => return,
            Ok(written) => bytes = &bytes[written..],
            Err(Errno::INTR) => {}
            Err(_) => return,
        }
    }
}
