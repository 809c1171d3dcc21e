//! The library's log, and its place: nothing, unless `ROCINANTE_LOG` asks for it. Faults of the
//! user's settings are printed in any case.
//!
//! It writes with system calls of its own: a preloaded library may have taken over those of the C
//! library. It holds no descriptor, so that it writes into no file that the program opened after it
//! closed ours.

use std::collections::BTreeSet;
use std::fmt::{Arguments, Display};
use std::fs::File;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::OnceLock;

use parking_lot::Mutex;
use rocinante_soft::environment;
pub(crate) use rocinante_soft::environment::LogLevel as Level;
use rustix::fs::{Mode, OFlags, fstat, open};

use crate::devices::inherited;
use crate::plain::OfProcess;

struct Log {
    wish: environment::LogWish,
    /// Device and inode of stderr when the library was first called. A program may close it, and
    /// open something else in its place.
    stderr: Option<(u64, u64)>,
}

static LOG: OnceLock<Log> = OnceLock::new();

fn log() -> &'static Log {
    let mut fault = None;
    let log = LOG.get_or_init(|| {
        let wish = environment::log().unwrap_or_else(|error| {
            fault = Some(error.to_string());
            environment::LogWish::default()
        });
        if let Some(path) = &wish.file
            && let Err(error) = append(path)
        {
            let path = path.display();
            fault = Some(format!("{}: {path}: {error}", environment::LOG_VARIABLE));
        }
        Log { wish, stderr: stderr() }
    });
    if let Some(fault) = fault {
        print(format_args!("{fault}"));
    }
    log
}

/// Takes note of the variable and of stderr as they are now.
pub(crate) fn begin() {
    log();
}

fn append(path: &Path) -> rustix::io::Result<File> {
    let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE;
    let flags = flags | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    open(path, flags, Mode::from_raw_mode(0o644)).map(File::from)
}

fn stderr() -> Option<(u64, u64)> {
    fstat(std::io::stderr().as_fd()).ok().map(|file| (file.st_dev, file.st_ino))
}

/// Whether lines of this level are logged.
#[inline]
pub(crate) fn says(level: Level) -> bool {
    level <= log().wish.level
}

pub(crate) fn say(level: Level, line: Arguments<'_>) {
    if says(level) {
        print(line);
    }
}

/// Prints why something cannot be used: at any level and once for each reason, because programs
/// show an errno at most. The errno of a shortage is enough: such a line has the level `warn`.
pub(crate) fn refuse(what: impl Display, why: impl Display, errno: i32) {
    static PRINTED: OfProcess<Mutex<BTreeSet<String>>> = OfProcess::none();
    const SHORTAGES: [i32; 4] = [libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::EAGAIN];
    const PRINTED_MAX: usize = 64;
    let line = format!("{what}: {why}");
    let is_new = || {
        let printed = PRINTED.get_or(|it| Mutex::new(it.and_then(inherited).unwrap_or_default()));
        let mut printed = printed.lock();
        printed.len() < PRINTED_MAX && printed.insert(line.clone())
    };
    if says(Level::Warn) || !SHORTAGES.contains(&errno) && is_new() {
        print(format_args!("{line}"));
    }
}

/// Logs lines at any level.
pub(crate) fn print(lines: Arguments<'_>) {
    let text = format!("rocinante[{}]: {lines}\n", std::process::id());
    let log = log();
    match log.wish.file.as_deref().and_then(|path| append(path).ok()) {
        Some(file) => write_all(&file, text.as_bytes()),
        // There is no other place to report an error.
        None if log.stderr.is_some() && log.stderr == stderr() => {
            write_all(std::io::stderr(), text.as_bytes());
        }
        None => {}
    }
}

fn write_all(to: impl std::os::fd::AsFd, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        match rocinante_netdev::write_without_signal(to.as_fd(), bytes) {
            Ok(0) => return,
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}
