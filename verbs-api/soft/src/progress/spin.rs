//! How long the background thread looks for more before it sleeps.

use std::time::{Duration, Instant};

use crate::tuning::spinning;

/// Grows while sleeps turn out too short to have been worth it, and falls back after a long one: as
/// KVM's `halt_poll_ns` does (Documentation/virt/kvm/halt-polling.rst).
///
/// A peer that asks again and again, each time soon after the answer, thus pays for one wake-up and
/// not for one each time; a device that is idle spins once, for [`MAX`](spinning::MAX) at most.
///
/// A spin that found nothing, and a sleep after it that was hardly longer: the peer may have waited
/// for this processor, which a fair scheduler then gave it for as long. The next sleeps come
/// without a spin, their number doubles each time, up to [`MAX_LEFT_OUT`](spinning::MAX_LEFT_OUT),
/// until a spin has found something again. A find after another thread had the processor does not
/// count.
#[derive(Debug)]
pub(super) struct Spin {
    span: Duration,
    /// When the last look was that found nothing since the last sleep.
    missed: Option<Instant>,
    /// A look has found something right after one that had not.
    found: bool,
    /// Sleeps without a spin after the last spin in vain.
    penalty: u32,
    /// Sleeps without a spin still to come.
    left_out: u32,
}

impl Spin {
    pub(super) fn new() -> Self {
        Self { span: spinning::MIN, missed: None, found: false, penalty: 0, left_out: 0 }
    }

    /// How long to look from the last activity on.
    pub(super) fn span(&self) -> Duration {
        if spinning::ENABLED && self.left_out == 0 { self.span } else { Duration::ZERO }
    }

    /// Learns whether a look, which began `at` some time, has found something.
    pub(super) fn looked(&mut self, found: bool, at: Instant) {
        if !found {
            self.missed = Some(at);
        } else if self.missed.is_some_and(|missed| at - missed < spinning::GAP) {
            self.found = true;
        }
    }

    /// Learns from a sleep that took so long, and ended because there was something if `woken`.
    pub(super) fn slept(&mut self, span: Duration, woken: bool) {
        let spun = self.span;
        if span >= spinning::MAX {
            self.span = spinning::MIN;
        } else if woken {
            self.span = (self.span * 2).min(spinning::MAX);
        }
        if self.found {
            (self.penalty, self.left_out) = (0, 0);
        } else if self.left_out > 0 {
            self.left_out -= 1;
        } else if woken && span < spun * 2 {
            self.penalty = (self.penalty * 2).clamp(1, spinning::MAX_LEFT_OUT);
            self.left_out = self.penalty;
        }
        (self.missed, self.found) = (None, false);
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
        assert_eq!(spin.span, spinning::MIN * 4);
        // A deadline of the device's own is no sign of traffic.
        spin.slept(soon, false);
        assert_eq!(spin.span, spinning::MIN * 4);
        spin.slept(soon, true);
        assert_eq!(spin.span, spinning::MAX);
        spin.slept(Duration::from_millis(3), true);
        assert_eq!(spin.span, spinning::MIN);
    }

    /// One spin of which the looks found this, and the sleep after it.
    fn round(spin: &mut Spin, looks: &[bool], sleep: Duration) -> bool {
        let spins = !spin.span().is_zero();
        let now = Instant::now();
        looks.iter().for_each(|&found| spin.looked(found, now));
        spin.slept(sleep, true);
        spins
    }

    #[test]
    fn a_spin_that_keeps_the_peer_from_the_processor_is_left_out() {
        let mut spin = Spin::new();
        let at_once = Duration::from_micros(10);
        let spins = (0..1034).filter(|_| round(&mut spin, &[true, false], at_once)).count();
        // After 0, 1, 2, 4 … 128 sleeps without, and then each 257th.
        assert_eq!(spins, 9 + (1034 - 9 - 255) / 257);
    }

    #[test]
    fn a_spin_that_finds_something_ends_that() {
        let mut spin = Spin::new();
        let at_once = Duration::from_micros(10);
        while round(&mut spin, &[true, false], at_once) || spin.penalty < spinning::MAX_LEFT_OUT {}
        while !round(&mut spin, &[true, false, true, false], at_once) {}
        assert!(!spin.span().is_zero());
        // The next one in vain costs one sleep, as the first one did.
        assert!(round(&mut spin, &[true, false], at_once));
        assert!(!round(&mut spin, &[true, false], at_once));
        assert!(round(&mut spin, &[true, false], at_once));
    }

    #[test]
    fn a_peer_that_takes_its_time_is_not_in_the_way() {
        let mut spin = Spin::new();
        for _ in 0..10 {
            let as_long_again = spin.span * 2;
            assert!(round(&mut spin, &[true, false], as_long_again));
        }
        // Something that comes in one burst is no find of the spin.
        let now = Instant::now();
        spin.looked(true, now);
        spin.looked(true, now);
        assert!(!spin.found);
    }

    #[test]
    fn what_came_while_another_thread_had_the_processor_is_no_find() {
        let mut spin = Spin::new();
        let now = Instant::now();
        spin.looked(false, now);
        spin.looked(true, now + spinning::GAP);
        assert!(!spin.found);
        spin.looked(false, now + spinning::GAP * 2);
        spin.looked(true, now + spinning::GAP * 3 - Duration::from_nanos(1));
        assert!(spin.found);
    }
}
