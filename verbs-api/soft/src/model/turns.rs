//! How a thread shares its processor with others.

use std::time::Duration;

/// How long a thread has run, and how long it could have run and had to wait, because other threads
/// had the processors (`/proc/PID/schedstat`).
///
/// A program that measures compares its own before and after: a figure that was taken while the
/// thread waited says little about the network.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Turns {
    /// The time that it ran. Some milliseconds of the present turn may be missing.
    pub ran: Duration,
    /// The time that it waited for a processor.
    pub waited: Duration,
    /// How often it was given a processor, at once or after a wait.
    pub turns: u64,
}

impl Turns {
    /// Those of the calling thread since it began. `None` if the kernel does not say, as where
    /// `/proc` is not mounted.
    #[must_use]
    pub fn of_thread() -> Option<Self> {
        use rustix::fs::{Mode, OFlags, open};
        let file = "/proc/thread-self/schedstat";
        let file = open(file, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
        let mut text = [0; 80];
        let len = rustix::io::read(&file, &mut text).ok()?;
        Self::parse(std::str::from_utf8(&text[..len]).ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        let mut words = text.split_ascii_whitespace().map_while(|word| word.parse().ok());
        let mut next = || words.next();
        let [ran, waited, turns] = [next()?, next()?, next()?];
        let [ran, waited] = [ran, waited].map(Duration::from_nanos);
        Some(Self { ran, waited, turns })
    }

    /// The times added since `before`.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self {
            ran: self.ran.saturating_sub(before.ran),
            waited: self.waited.saturating_sub(before.waited),
            turns: self.turns.saturating_sub(before.turns),
        }
    }

    /// The part of the time that it could have run in which it waited: 0 to 1.
    #[must_use]
    pub fn share(&self) -> f64 {
        let wanted = (self.ran + self.waited).as_secs_f64();
        if wanted > 0.0 { self.waited.as_secs_f64() / wanted } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_words_are_read() {
        let [ran, waited] = [12, 36].map(Duration::from_nanos);
        let turns = Turns { ran, waited, turns: 6 };
        assert_eq!(Turns::parse("12 36 6\n"), Some(turns));
        assert!((turns.share() - 0.75).abs() < 1e-9);
        assert_eq!(["", "12", "12 36", "12 36 x", "12 -1 6"].map(Turns::parse), [None; 5]);
        assert_eq!((turns.since(turns), Turns::default().share()), (Turns::default(), 0.0));
        let later = Turns { ran: 3 * ran, turns: 7, ..turns };
        assert_eq!(later.since(turns), Turns { ran: 2 * ran, waited: Duration::ZERO, turns: 1 });
    }

    #[test]
    #[cfg(not(miri))]
    fn a_thread_has_had_turns() {
        match Turns::of_thread() {
            // The time of the present turn may be added later.
            Some(turns) => assert!(turns.turns > 0, "{turns:?}"),
            None => assert!(!std::path::Path::new("/proc/thread-self/schedstat").exists()),
        }
    }
}
