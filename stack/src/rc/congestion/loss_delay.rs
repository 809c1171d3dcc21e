//! The controller in use: it follows losses, and the delay that they came with.
//!
//! The answer to a loss depends on its likely reason. Where a queue overflowed, the packets just
//! before the loss took long: the window shrinks in proportion to the growth of the round trip, to
//! a half at most, which drains that queue. Where the round trip did not grow, the loss was an
//! accident or a policer's, and only its frequency tells which. Then the number of packets that get
//! through between two losses bounds the window, by a multiple. More would be thrown away where
//! everything behind a loss goes again; much less would leave the path idle.

use super::ecn::Reaction;
use super::rtt::RoundTrip;
use super::{Controller, Repeat};
use crate::tuning::congestion::{GROWTH, RUNS, WINDOW_MIN};
use crate::types::Time;

/// A congestion window in packets, with the state that moves it.
#[derive(Debug)]
pub(in crate::rc) struct LossDelay {
    cwnd: u32,
    ssthresh: u32,
    max: u32,
    /// Packets acknowledged since the window last grew.
    acknowledged: u32,
    /// When a loss was answered.
    answered: Time,
    /// Packets that got through since the last loss, and on average between two.
    run: u32,
    usual_run: u32,
    ecn: Reaction,
}

impl LossDelay {
    pub(in crate::rc) fn new(max: u32) -> Self {
        let max = max.max(WINDOW_MIN);
        Self {
            cwnd: max,
            ssthresh: max,
            max,
            acknowledged: 0,
            answered: Time::default(),
            run: 0,
            usual_run: u32::MAX,
            ecn: Reaction::new(),
        }
    }

    /// Whether a loss was answered so lately that this one belongs to it.
    fn has_answered(&self, now: Time, rtt: &RoundTrip) -> bool {
        now.since(self.answered) < rtt.min_rtt()
    }

    fn shrink(&mut self, ssthresh: u32) {
        self.ssthresh = ssthresh.max(WINDOW_MIN);
        self.acknowledged = 0;
    }

    /// The largest window that the losses permit.
    fn bound(&self) -> u32 {
        self.usual_run.saturating_mul(RUNS).max(8 * WINDOW_MIN)
    }

    fn end_run(&mut self, now: Time) {
        self.answered = now;
        let run = core::mem::take(&mut self.run);
        self.usual_run = match self.usual_run {
            u32::MAX => run.max(self.cwnd),
            usual => usual - usual / 8 + run / 8,
        };
    }
}

impl Controller for LossDelay {
    #[inline]
    fn cwnd(&self) -> u32 {
        self.cwnd
    }

    #[inline]
    fn max(&self) -> u32 {
        self.max
    }

    /// A window that no loss has reduced becomes the new maximum, as if it had begun so. One that a
    /// loss has reduced is an estimate of the path, and grows from there.
    fn grow(&mut self, max: u32) {
        if max <= self.max {
            return;
        }
        if self.ssthresh == self.max {
            (self.cwnd, self.ssthresh) = (max, max);
        }
        self.max = max;
    }

    #[inline]
    fn on_ack(&mut self, packets: u32) {
        self.run = self.run.saturating_add(packets);
        if self.cwnd >= self.max {
            return;
        }
        if self.cwnd < self.ssthresh {
            self.cwnd = (self.cwnd + packets).min(self.max);
            return;
        }
        self.acknowledged += packets;
        if self.acknowledged >= self.cwnd {
            self.acknowledged = 0;
            self.cwnd = (self.cwnd + 1 + self.cwnd / GROWTH).min(self.max);
        }
    }

    fn on_loss(&mut self, now: Time, rtt: &RoundTrip, repeat: Repeat) {
        if self.has_answered(now, rtt) {
            return;
        }
        self.end_run(now);
        let drained = rtt.without_queue(self.cwnd).max(self.cwnd / 2);
        self.shrink(match repeat {
            Repeat::FromThere => drained.min(self.bound()),
            // Nothing else is thrown away with it, however often that happens.
            Repeat::Alone => drained,
        });
        self.cwnd = self.ssthresh;
    }

    fn on_timeout(&mut self, now: Time) {
        self.end_run(now);
        self.shrink((self.cwnd / 2).min(self.bound()));
        self.cwnd = self.cwnd.min(4 * WINDOW_MIN);
    }

    fn on_ecn(&mut self, now: Time, rtt: &RoundTrip) {
        if let Some(left) = self.ecn.notified(now, rtt.srtt(), self.cwnd) {
            self.shrink(left);
            self.cwnd = self.ssthresh;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Seq;

    const NOW: Time = Time(1 << 40);

    /// A path whose round trip is now `times` times the shortest.
    fn path(times: u64) -> RoundTrip {
        let mut path = RoundTrip::default();
        for (turn, took) in [(1, 1_000), (2, 1_000 * times)] {
            let sent = Time(1_000_000 * turn);
            path.sent(Seq(turn), sent, false);
            path.acknowledged(Seq(turn + 1), sent.after(took), true);
        }
        path
    }

    #[test]
    fn one_loss_episode_is_answered_once() {
        for repeat in [Repeat::FromThere, Repeat::Alone] {
            let mut controller = LossDelay::new(64);
            controller.on_loss(NOW, &path(10), repeat);
            controller.on_loss(NOW.after(999), &path(10), repeat);
            assert_eq!(controller.cwnd(), 32);
            controller.on_loss(NOW.after(2_000), &path(10), repeat);
            assert_eq!(controller.cwnd(), 16);
        }
    }

    #[test]
    fn it_shrinks_by_as_much_as_the_round_trip_grew() {
        let mut controller = LossDelay::new(600);
        controller.on_loss(NOW, &path(1), Repeat::FromThere);
        assert_eq!(controller.cwnd(), 600, "no queue overflowed");
        let mut path = path(1);
        path.sent(Seq(9), Time(50_000_000), false);
        path.acknowledged(Seq(10), Time(50_001_500), true);
        controller.on_loss(NOW.after(10_000), &path, Repeat::FromThere);
        assert_eq!(controller.cwnd(), 400);
    }

    #[test]
    fn frequent_losses_bound_it_though_no_queue_grows() {
        for (repeat, bounded) in [(Repeat::FromThere, true), (Repeat::Alone, false)] {
            let mut controller = LossDelay::new(512);
            for episode in 1..100 {
                controller.on_ack(10);
                controller.on_loss(NOW.after(10_000 * episode), &path(1), repeat);
            }
            let cwnd = controller.cwnd();
            assert_eq!((30..=64).contains(&cwnd), bounded, "{repeat:?}: {cwnd}");
            assert!(bounded || cwnd == 512);
        }
    }

    #[test]
    fn it_grows_back_and_no_further_than_its_bound() {
        let mut controller = LossDelay::new(64);
        controller.on_timeout(NOW);
        assert_eq!(controller.cwnd(), 8);
        for _ in 0..10_000 {
            controller.on_ack(1);
        }
        assert_eq!(controller.cwnd(), 64);
    }

    #[test]
    fn marks_shrink_it_to_what_they_leave() {
        let mut controller = LossDelay::new(64);
        controller.on_ecn(NOW, &path(1));
        let cwnd = controller.cwnd();
        assert!((32..64).contains(&cwnd), "{cwnd}");
        controller.on_ecn(NOW.after(1), &path(1));
        assert_eq!(controller.cwnd(), cwnd, "once in a round trip");
    }
}
