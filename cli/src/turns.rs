//! The processor time that other programs took while this one measured.

use std::fmt;
use std::time::Instant;

use rocinante::Turns;
use serde::Serialize;

use crate::output::Output;

/// A measurement on the calling thread, from its begin on.
#[derive(Debug)]
pub struct Watch {
    before: Option<Turns>,
    started: Instant,
}

/// How the measuring thread got its processor.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Processor {
    seconds: f64,
    ran_s: f64,
    waited_s: f64,
    turns: u64,
}

impl Watch {
    /// Begins.
    #[must_use]
    pub fn start() -> Self {
        Self { before: Turns::of_thread(), started: Instant::now() }
    }

    /// The figures so far; `None` where the kernel has none.
    #[must_use]
    pub fn so_far(&self) -> Option<Processor> {
        let Turns { ran, waited, turns, .. } = Turns::of_thread()?.since(self.before?);
        let [seconds, ran_s, waited_s] =
            [self.started.elapsed(), ran, waited].map(|time| time.as_secs_f64());
        Some(Processor { seconds, ran_s, waited_s, turns })
    }

    /// The same. Prints an explanation if others had the processor for long.
    #[must_use]
    pub fn end(&self, out: Output) -> Option<Processor> {
        let processor = self.so_far()?;
        if processor.is_contended() {
            out.note(processor);
        }
        Some(processor)
    }
}

impl Processor {
    /// The part of the time for which a thread may wait before the figures say more of the machine
    /// than of the network.
    const PART: f64 = 0.1;

    /// Whether other programs had the processors for a good part of the time.
    fn is_contended(&self) -> bool {
        self.waited_s > Self::PART * self.seconds
    }
}

impl fmt::Display for Processor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seconds, waited_s, turns, .. } = self;
        let percent = 100.0 * waited_s / seconds;
        write!(
            f,
            "other programs had the processors: this side waited for one for {waited_s:.3} of \
             {seconds:.3} s ({percent:.0} %), in {turns} turns. So the figures say more of this \
             machine than of the network. Stop the other programs, or give each side a processor \
             of its own: docs/troubleshooting.md, \"On a busy machine\""
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_of_a_tenth_is_worth_a_word() {
        let processor = Processor { seconds: 2.0, ran_s: 1.7, waited_s: 0.19, turns: 40 };
        assert!(!processor.is_contended());
        let processor = Processor { waited_s: 0.5, ..processor };
        assert!(processor.is_contended());
        assert!(processor.to_string().contains("for 0.500 of 2.000 s (25 %), in 40 turns"));
    }

    #[test]
    fn a_thread_that_runs_is_seen_to() {
        let watch = Watch::start();
        while watch.started.elapsed().as_millis() < 20 {}
        let Some(Processor { seconds, ran_s, .. }) = watch.so_far() else { return };
        assert!(seconds >= 0.02 && ran_s > 0.0);
    }
}
