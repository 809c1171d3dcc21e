//! Useless packets: damaged, forged, or for no queue pair.
//!
//! A look at each one costs a system call and a wake-up, several times the cost of a packet among
//! others. And a thread that looks at all of them never sleeps: another one on its core, the peer's
//! on the same machine or the program's own, has to wait for the end of its time slice after every
//! window. So in a flood the port is left alone for a moment and then read at once.

use rocinante_stack::types::Time;

use crate::tuning::flood::{AHEAD, EACH, PAUSE};

/// Whether more come for nothing than are worth a look each, and the pause if so.
#[derive(Debug, Default)]
pub(super) struct Flood {
    /// When those that came would have come, at the rate that is taken as it is.
    spent: Time,
    /// The port is left alone until then.
    resume_at: Option<Time>,
}

impl Flood {
    /// Adds `wasted` useless packets.
    #[inline]
    pub(super) fn add(&mut self, now: Time, wasted: u64) {
        if wasted > 0 {
            let spent = self.spent.max(now).after(wasted.saturating_mul(EACH));
            // It is over soon after the last.
            self.spent = spent.min(now.after(2 * AHEAD));
        }
    }

    /// Whether it goes on.
    #[inline]
    fn is_on(&self, now: Time) -> bool {
        self.spent > now.after(AHEAD)
    }

    /// The shard was driven: the port is left alone for a moment if it is drained in a flood.
    #[inline]
    pub(super) fn driven(&mut self, now: Time, drained: bool) {
        self.resume_at = (drained && self.is_on(now)).then(|| now.after(PAUSE));
    }

    /// Until when the port is left alone.
    #[inline]
    pub(super) fn resume_at(&self) -> Option<Time> {
        self.resume_at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The state after `each_ms` packets in each of a hundred milliseconds.
    fn after(each_ms: u64) -> (Flood, Time) {
        let mut flood = Flood::default();
        let mut now = Time(1_000_000_000);
        for _ in 0..100 {
            for part in 0..10 {
                now = now.after(100_000);
                flood.add(now, each_ms * (part + 1) / 10 - each_ms * part / 10);
            }
        }
        (flood, now)
    }

    #[test]
    fn few_are_taken_as_they_come_and_many_are_not() {
        for (each_ms, is_on) in [(0, false), (10, false), (50, false), (60, true), (1000, true)] {
            let (flood, now) = after(each_ms);
            assert_eq!(flood.is_on(now), is_on, "{each_ms} in a millisecond");
        }
    }

    #[test]
    fn it_is_over_soon_after_the_last() {
        let (flood, now) = after(100_000);
        assert!(flood.is_on(now.after(AHEAD / 2)));
        assert!(!flood.is_on(now.after(AHEAD)));
    }

    #[test]
    fn a_burst_is_no_flood() {
        let (mut flood, now) = (Flood::default(), Time(1_000_000_000));
        flood.add(now, 64);
        assert!(!flood.is_on(now));
        flood.add(now, 1);
        assert!(flood.is_on(now));
        flood.add(now, u64::MAX);
        assert!(!flood.is_on(now.after(AHEAD)), "however many");
    }
}
