//! The log: lines on standard error, each with its priority where that is the journal's
//! (sd-daemon(3)), and with the name of the program elsewhere.
//!
//! Strings that a container chose are fields, which are quoted and escaped, and [`short`].

use std::env;
use std::fmt;
use std::io;
use std::os::fd::AsFd;
use std::sync::OnceLock;

use serde::Deserialize;
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, layer};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::reload;
use tracing_subscriber::util::SubscriberInitExt as _;

/// The longest string from a container that is written, in characters before they are escaped.
const SHORT_MAX: usize = 200;
/// Addresses that a line names.
const LISTED_MAX: usize = 8;

/// The lines that are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    /// Those about something that the agent cannot do.
    Error,
    /// Also those about refused, late and hostile programs.
    Warn,
    /// Also those about all that the agent does.
    Info,
}

impl From<LogLevel> for LevelFilter {
    fn from(level: LogLevel) -> Self {
        match level {
            LogLevel::Error => Self::ERROR,
            LogLevel::Warn => Self::WARN,
            LogLevel::Info => Self::INFO,
        }
    }
}

type Setter = Box<dyn Fn(LevelFilter) + Send + Sync>;
static SET_LEVEL: OnceLock<Setter> = OnceLock::new();

/// Begins to write what this process logs.
pub(crate) fn start() {
    let lines = Lines { is_journal: is_journal() };
    let (filter, handle) = reload::Layer::new(LevelFilter::INFO);
    let lines = layer().with_writer(io::stderr).event_format(lines);
    // A program that uses this library may have a log of its own.
    if tracing_subscriber::registry().with(filter).with(lines).try_init().is_ok() {
        let set = move |level| drop(handle.reload(level));
        let _ = SET_LEVEL.set(Box::new(set));
    }
}

/// Writes lines of this level and above from now on.
pub(crate) fn set_level(level: LogLevel) {
    if let Some(set) = SET_LEVEL.get() {
        set(level.into());
    }
}

/// Whether standard error is the stream that systemd connected to the journal (systemd.exec(5)).
fn is_journal() -> bool {
    let Ok(named) = env::var("JOURNAL_STREAM") else { return false };
    let own = rustix::fs::fstat(io::stderr().as_fd());
    own.is_ok_and(|own| named == format!("{}:{}", own.st_dev, own.st_ino))
}

/// The format.
struct Lines {
    is_journal: bool,
}

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        writer.write_str(match (self.is_journal, *event.metadata().level()) {
            (false, _) => "rocinante-agent: ",
            (true, Level::ERROR) => "<3>",
            (true, Level::WARN) => "<4>",
            (true, _) => "<6>",
        })?;
        let mut text = String::new();
        context.field_format().format_fields(Writer::new(&mut text), event)?;
        // Errors of TOML have several lines.
        for (place, part) in text.split_whitespace().enumerate() {
            write!(writer, "{}{part}", if place == 0 { "" } else { " " })?;
        }
        writeln!(writer)
    }
}

/// The beginning of a string that a container chose.
pub(crate) fn short(text: &str) -> &str {
    text.char_indices().nth(SHORT_MAX).map_or(text, |(end, _)| &text[..end])
}

/// A few values of a list, and the number of the others.
pub(crate) struct Listed<I>(pub(crate) I);

impl<I> fmt::Debug for Listed<I>
where
    I: Iterator<Item: fmt::Display> + Clone,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (place, value) in self.0.clone().take(LISTED_MAX).enumerate() {
            write!(f, "{}{value}", if place == 0 { "" } else { " " })?;
        }
        match self.0.clone().count().saturating_sub(LISTED_MAX) {
            0 => f.write_str("]"),
            more => write!(f, " and {more} more]"),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().expect("not poisoned").extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// What is written while something is done.
    pub(crate) fn written(is_journal: bool, log: impl FnOnce()) -> String {
        let written = Written::default();
        let to = written.clone();
        let builder = tracing_subscriber::fmt().event_format(Lines { is_journal });
        tracing::subscriber::with_default(builder.with_writer(move || to.clone()).finish(), log);
        let bytes = written.0.lock().expect("not poisoned").clone();
        String::from_utf8(bytes).expect("UTF-8")
    }

    #[test]
    fn a_line_has_its_priority_for_the_journal_alone() {
        let log = || {
            tracing::error!(socket = "/a", "one");
            tracing::warn!(count = 3, "two");
            tracing::info!("three {}", "1 |\n  | ^^\n");
        };
        assert_eq!(written(true, log), "<3>one socket=\"/a\"\n<4>two count=3\n<6>three 1 | | ^^\n");
        let plain = "rocinante-agent: one socket=\"/a\"\nrocinante-agent: two count=3\n";
        assert_eq!(written(false, log), format!("{plain}rocinante-agent: three 1 | | ^^\n"));
    }

    #[test]
    fn a_container_writes_no_line_of_its_own() {
        let name = format!("eth0\n<3>forged\u{1b}[2J\u{202e}{}", "é".repeat(10_000));
        let line = written(true, || tracing::warn!(name = short(&name), "refused"));
        assert_eq!(line.matches('\n').count(), 1, "{line}");
        assert!(line.chars().count() < 500 && line.ends_with("\"\n"), "{line}");
        let forged = |c: char| c != '\n' && (c.is_control() || c == '\u{202e}');
        assert!(!line.contains(forged), "{line:?}");
        let many = (0..20).map(|at| std::net::Ipv4Addr::new(10, 0, 0, at));
        let listed = format!("{:?}", Listed(many));
        assert!(listed.ends_with("10.0.0.7 and 12 more]"), "{listed}");
        assert_eq!(format!("{:?}", Listed([1, 2].iter())), "[1 2]");
    }
}
