//! What the library says, and where: nothing, unless `ROCINANTE_LOG` asks for it.

use std::fmt::Arguments;
use std::fs::File;
use std::io::Write as _;
use std::sync::OnceLock;

/// How much is said. The order is that of the words of [`VARIABLE`].
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
    file: Option<File>,
}

static LOG: OnceLock<Log> = OnceLock::new();

fn log() -> &'static Log {
    LOG.get_or_init(|| parse(&std::env::var(VARIABLE).unwrap_or_default()))
}

fn parse(text: &str) -> Log {
    let (word, path) = text.split_once(',').map_or((text, None), |(word, path)| (word, Some(path)));
    let level = match word.trim() {
        "warn" => Level::Warn,
        "info" => Level::Info,
        "debug" => Level::Debug,
        _ => Level::Off,
    };
    let file = path.and_then(|path| File::options().append(true).create(true).open(path).ok());
    Log { level, file }
}

/// Says a line.
pub(crate) fn say(level: Level, line: Arguments<'_>) {
    let log = log();
    if level > log.level {
        return;
    }
    let line = format!("rocinante[{}]: {line}\n", std::process::id());
    // A program may have closed stderr: then nobody reads it.
    let _ = match &log.file {
        Some(file) => (&mut &*file).write_all(line.as_bytes()),
        None => std::io::stderr().write_all(line.as_bytes()),
    };
}
