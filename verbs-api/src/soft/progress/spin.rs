//! How long the background thread looks for more before it sleeps.

use std::time::Duration;

/// Grows while sleeps turn out too short to have been worth it, and falls back after a long one: as
/// KVM's `halt_poll_ns` does (Documentation/virt/kvm/halt-polling.rst).
///
/// A peer that asks again and again, each time soon after the answer, thus pays for one wake-up and
/// not for one each time; a device that is idle spins once, for [`MAX`](Self::MAX) at most.
#[derive(Debug)]
pub(super) struct Spin {
    span: Duration,
}

impl Spin {
    const MIN: Duration = Duration::from_micros(30);
    const MAX: Duration = Duration::from_micros(200);

    pub(super) fn new() -> Self {
        Self { span: Self::MIN }
    }

    /// How long to look from the last activity on.
    pub(super) fn span(&self) -> Duration {
        self.span
    }

    /// Learns from a sleep that took so long, and ended because there was something if `woken`.
    pub(super) fn slept(&mut self, span: Duration, woken: bool) {
        if span >= Self::MAX {
            self.span = Self::MIN;
        } else if woken {
            self.span = (self.span * 2).min(Self::MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_sleeps_make_it_longer_and_a_long_one_ends_that() {
        let mut spin = Spin::new();
        let soon = Duration::from_micros(90);
        spin.slept(soon, true);
        spin.slept(soon, true);
        assert_eq!(spin.span(), Spin::MIN * 4);
        // A deadline of the device's own is no sign of traffic.
        spin.slept(soon, false);
        assert_eq!(spin.span(), Spin::MIN * 4);
        spin.slept(soon, true);
        assert_eq!(spin.span(), Spin::MAX);
        spin.slept(Duration::from_millis(3), true);
        assert_eq!(spin.span(), Spin::MIN);
    }
}
