//! How long the background thread leaves the port to the program, before it looks whether the
//! program still drives.

use std::time::Duration;

use crate::tuning::standby;

/// A look is a timer and two switches: some 15 µs that a program on the same processor waits. So
/// the background thread looks less often at a program that polls without pause. It looks often
/// enough that no peer repeats a packet when the program stops: until then no other thread looks at
/// the port.
#[derive(Debug)]
pub(super) struct Standby {
    pause: Duration,
    /// Looks in a row at a program that polled without pause.
    steady: u32,
    /// Looks in a row that found packets left by a program that polls now and then.
    missed: u32,
    /// Sleeps for which the background thread does not stand aside any more.
    needed: u32,
}

impl Standby {
    pub(super) fn new() -> Self {
        Self { pause: standby::MIN, steady: 0, missed: 0, needed: 0 }
    }

    /// The program has driven since the last look; `steadily` if also just now. Returns whether it
    /// was taken to poll without pause and does not any more.
    pub(super) fn driven(&mut self, steadily: bool) -> bool {
        let stopped = self.is_steady() && !steadily;
        self.steady = if steadily { self.steady.saturating_add(1) } else { 0 };
        self.pause =
            if self.is_steady() { (self.pause * 2).min(standby::STEADY_MAX) } else { standby::MIN };
        stopped
    }

    /// The program has driven since the last look, and not just now; `found` if something waited.
    ///
    /// Such a program polls until its request is done, and then watches its memory for the peer's.
    /// Packets that arrive meanwhile would wait for the next look each time.
    pub(super) fn looked(&mut self, found: bool) {
        self.missed = if found { self.missed + 1 } else { 0 };
        if found {
            (self.steady, self.pause) = (0, standby::MIN);
        }
        if self.missed >= standby::MISSED {
            (self.missed, self.needed) = (0, standby::NEEDED);
        }
    }

    /// A program that has not driven for so long is to be [looked](Self::looked) at.
    pub(super) fn moment(&self) -> Option<Duration> {
        Some(standby::MOMENT)
    }

    /// Whether the background thread drives beside a program that polls now and then.
    pub(super) fn is_needed(&self) -> bool {
        self.needed > 0
    }

    /// No thread has driven, but one of the program sleeps on the port.
    pub(super) fn waited(&mut self) {
        *self = Self { pause: (self.pause * 2).min(standby::MAX), ..Self::new() };
    }

    /// The background thread has driven, and nothing has happened for so long.
    pub(super) fn slept(&mut self, span: Duration) {
        self.steady = 0;
        self.needed = self.needed.saturating_sub(1);
        if span >= standby::MAX {
            self.pause = standby::MAX;
        }
    }

    /// How long until the next look.
    pub(super) fn pause(&self) -> Duration {
        self.pause
    }

    /// Whether nothing is known of the program yet.
    pub(super) fn is_first_look(&self) -> bool {
        self.steady == 0
    }

    /// Whether the program polls without pause.
    pub(super) fn is_steady(&self) -> bool {
        standby::ENABLED && self.steady > standby::LOOKS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_polls_without_pause_is_looked_at_less_often() {
        let mut standby = Standby::new();
        for look in 0..standby::LOOKS {
            assert_eq!(standby.is_first_look(), look == 0);
            assert!(!standby.driven(true));
            assert_eq!((standby.pause(), standby.is_steady()), (standby::MIN, false));
        }
        for pause in [2 * standby::MIN, standby::STEADY_MAX, standby::STEADY_MAX] {
            assert!(!standby.driven(true));
            assert_eq!((standby.pause(), standby.is_steady()), (pause, true));
        }
        // A program that polls now and then begins anew.
        for stopped in [true, false] {
            assert_eq!(standby.driven(false), stopped);
            assert_eq!((standby.pause(), standby.is_steady()), (standby::MIN, false));
        }
    }

    #[test]
    fn a_program_that_watches_its_memory_between_polls_is_helped() {
        let mut standby = Standby::new();
        let misses = |standby: &mut Standby, looks| {
            for _ in 0..looks {
                standby.driven(false);
                standby.looked(true);
            }
        };
        misses(&mut standby, standby::MISSED - 1);
        standby.looked(false);
        misses(&mut standby, standby::MISSED - 1);
        assert!(!standby.is_needed());
        misses(&mut standby, 1);
        for _ in 0..standby::NEEDED {
            assert!(standby.is_needed());
            standby.slept(standby::MIN);
        }
        assert!(!standby.is_needed());
        misses(&mut standby, standby::MISSED - 1);
        assert!(!standby.is_needed());
        misses(&mut standby, 1);
        assert!(standby.is_needed());
    }

    #[test]
    fn who_sleeps_on_the_port_is_looked_at_less_and_less_often() {
        let mut standby = Standby::new();
        for times in [2, 4, 8, 16] {
            standby.waited();
            assert_eq!((standby.pause(), standby.is_steady()), (times * standby::MIN, false));
        }
        standby.waited();
        assert_eq!(standby.pause(), standby::MAX);
        standby.driven(true);
        assert_eq!(standby.pause(), standby::MIN);
        standby.slept(standby::MAX / 2);
        assert_eq!(standby.pause(), standby::MIN);
        standby.slept(standby::MAX);
        assert_eq!(standby.pause(), standby::MAX);
    }
}
