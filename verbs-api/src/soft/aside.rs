//! How long the background thread leaves the port to a program that drives, before it looks whether
//! that still does.

use std::time::Duration;

/// A look is a timer and two switches: some 15 µs that a program on the same processor waits. So
/// one that polls without pause is looked at less often, but not so seldom that a peer must repeat
/// what it sent when the program stops: nobody else looks at the port until then.
#[derive(Debug)]
pub(super) struct Aside {
    pause: Duration,
    /// Looks in a row at a program that polled without pause.
    steady: u32,
}

impl Aside {
    /// From one look to the next.
    pub(super) const MIN: Duration = Duration::from_micros(500);
    /// The same at most where a program polls without pause. It may stop up to [`MIN`](Self::MIN)
    /// before a look without that being seen: 2 ms in all, and a peer waits for as long at least
    /// before it asks again.
    pub(super) const STEADY_MAX: Duration = Duration::from_micros(1500);
    /// The same at most while a thread of the program sleeps on the port; if nothing happens for so
    /// long, the background thread rests.
    pub(super) const MAX: Duration = Duration::from_millis(10);
    /// Of a program that polls without pause, looks before it gets more time.
    const LOOKS: u32 = 4;

    pub(super) fn new() -> Self {
        Self { pause: Self::MIN, steady: 0 }
    }

    /// The program has driven since the last look; `steadily` if also just now. Returns whether it
    /// was taken to poll without pause and does not any more.
    pub(super) fn driven(&mut self, steadily: bool) -> bool {
        let stopped = self.is_steady() && !steadily;
        self.steady = if steadily { self.steady.saturating_add(1) } else { 0 };
        self.pause =
            if self.is_steady() { (self.pause * 2).min(Self::STEADY_MAX) } else { Self::MIN };
        stopped
    }

    /// Nobody has driven, but a thread of the program sleeps on the port.
    pub(super) fn waited(&mut self) {
        *self = Self { pause: (self.pause * 2).min(Self::MAX), steady: 0 };
    }

    /// The background thread has driven, and nothing has happened for so long.
    pub(super) fn slept(&mut self, span: Duration) {
        self.steady = 0;
        if span >= Self::MAX {
            self.pause = Self::MAX;
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
        self.steady > Self::LOOKS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_polls_without_pause_is_looked_at_less_often() {
        let mut aside = Aside::new();
        for look in 0..Aside::LOOKS {
            assert_eq!(aside.is_first_look(), look == 0);
            assert!(!aside.driven(true));
            assert_eq!((aside.pause(), aside.is_steady()), (Aside::MIN, false));
        }
        for pause in [2 * Aside::MIN, Aside::STEADY_MAX, Aside::STEADY_MAX] {
            assert!(!aside.driven(true));
            assert_eq!((aside.pause(), aside.is_steady()), (pause, true));
        }
        // A program that polls now and then begins anew.
        for stopped in [true, false] {
            assert_eq!(aside.driven(false), stopped);
            assert_eq!((aside.pause(), aside.is_steady()), (Aside::MIN, false));
        }
    }

    #[test]
    fn who_sleeps_on_the_port_is_looked_at_less_and_less_often() {
        let mut aside = Aside::new();
        for times in [2, 4, 8, 16] {
            aside.waited();
            assert_eq!((aside.pause(), aside.is_steady()), (times * Aside::MIN, false));
        }
        aside.waited();
        assert_eq!(aside.pause(), Aside::MAX);
        aside.driven(true);
        assert_eq!(aside.pause(), Aside::MIN);
        aside.slept(Aside::MAX / 2);
        assert_eq!(aside.pause(), Aside::MIN);
        aside.slept(Aside::MAX);
        assert_eq!(aside.pause(), Aside::MAX);
    }
}
