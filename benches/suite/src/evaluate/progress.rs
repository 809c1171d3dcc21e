//! How far a study is, and the time that is left.

use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use rocinante_cli::output::Output;

/// The progress, as a bar on a terminal or as lines elsewhere.
pub(super) struct Progress {
    bar: Option<ProgressBar>,
    out: Output,
    begin: Instant,
    /// Planned seconds of all cells, and of those that are done.
    all: f64,
    done: f64,
}

impl Progress {
    pub(super) fn new(all: f64, out: Output) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new((all * 1000.0) as u64);
            let style = ProgressStyle::with_template("{wide_bar} {msg}");
            bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
        });
        Self { bar, out, begin: Instant::now(), all, done: 0.0 }
    }

    /// A cell begins.
    pub(super) fn begins(&self, what: &str) {
        let left = left(self.begin.elapsed(), self.all, self.done).as_secs();
        let text = format!("{}:{:02} left: {what}", left / 60, left % 60);
        match &self.bar {
            Some(bar) => bar.set_message(text),
            None => self.out.note(text),
        }
    }

    /// A cell of this many planned seconds is over.
    pub(super) fn ended(&mut self, seconds: f64) {
        self.done += seconds;
        if let Some(bar) = &self.bar {
            bar.set_position((self.done * 1000.0) as u64);
        }
    }

    /// A remark.
    pub(super) fn note(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(text),
            None => self.out.note(text),
        }
    }

    pub(super) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// The time that is left: the planned time, by how much longer the time so far was than planned.
fn left(elapsed: Duration, all: f64, done: f64) -> Duration {
    let factor = if done > 0.0 { elapsed.as_secs_f64() / done } else { 1.0 };
    Duration::from_secs_f64(((all - done) * factor).max(0.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_left_follows_the_time_so_far() {
        let seconds = Duration::from_secs;
        assert_eq!(left(seconds(0), 60.0, 0.0), seconds(60));
        assert_eq!(left(seconds(20), 60.0, 10.0), seconds(100));
        assert_eq!(left(seconds(90), 60.0, 60.0), seconds(0));
        assert_eq!(left(seconds(90), 60.0, 61.0), seconds(0));
    }
}
