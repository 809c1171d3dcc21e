//! How many packets a queue pair may have unacknowledged: starts with what the receiver has room
//! for, and follows what the path shows.
//!
//! A loss is answered by its likely reason. Where a queue overflowed, what came through just before
//! took long: the window shrinks by as much as the round trip grew, to a half at most, which drains
//! that queue. Where the round trip did not grow the loss was an accident or a policer's, which
//! only its frequency can tell: the window is bounded by a multiple of what gets through between
//! two losses. More would be thrown away, because everything behind a loss is sent again; and much
//! less would leave the path idle.

use crate::rc::congestion::rtt::RoundTrip;
use crate::types::Time;

/// A congestion window, in packets.
#[derive(Debug, Clone)]
pub(in crate::rc) struct Window {
    /// Without regard to pace.
    cwnd: u32,
    ssthresh: u32,
    max: u32,
    acknowledged: u32,
    /// When a loss was answered.
    answered: Time,
    /// When it went back to the packet that was missing last.
    gone_back: Time,
    /// Packets that got through since the last loss, and on average between two.
    run: u32,
    usual_run: u32,
    /// What was sent in vain is still on its way: what is sent again takes its place bit by bit,
    /// from this time on for so many nanoseconds.
    paced: Option<(Time, u64)>,
    /// What may be on its way now; `size` if it is not paced.
    paced_cwnd: u32,
    /// The PSN that was missing last, and how often it was missing again.
    missing: (u64, u32),
}

const MIN: u32 = 2;
/// What may leave at once although it is paced.
const FIRST: u32 = 8;
/// Steps in which it may be the whole window.
const STEPS: u64 = 16;
/// Round trips of less are not worth pacing.
const PACED_NS: u64 = 50_000;
/// How many times what gets through between two losses may be on its way: this many parts of the
/// best that going back to a lost packet can reach are reached then, of one part more.
const RUNS: u32 = 4;

impl Window {
    pub(in crate::rc) fn new(max: u32) -> Self {
        let max = max.max(MIN);
        Self {
            cwnd: max,
            ssthresh: max,
            max,
            acknowledged: 0,
            answered: Time::default(),
            gone_back: Time::default(),
            run: 0,
            usual_run: u32::MAX,
            paced: None,
            paced_cwnd: max,
            missing: (u64::MAX, 0),
        }
    }

    /// What the receiver has room for, whatever the path shows.
    pub(in crate::rc) fn max(&self) -> u32 {
        self.max
    }

    #[inline]
    pub(in crate::rc) fn packets(&self) -> u32 {
        self.paced_cwnd
    }

    /// Whether it is what the receiver has room for: no loss has made it smaller.
    #[inline]
    pub(in crate::rc) fn is_whole(&self) -> bool {
        self.paced_cwnd >= self.max
    }

    /// Takes over what time permits; when it will permit more, if it does not permit all.
    #[inline]
    pub(in crate::rc) fn tick(&mut self, now: Time) -> Option<Time> {
        let (begun, span) = self.paced?;
        let passed = now.since(begun);
        if passed >= span {
            self.paced = None;
            self.paced_cwnd = self.cwnd;
            return None;
        }
        let part = u64::from(self.cwnd) * passed / span;
        self.paced_cwnd = u32::try_from(part).unwrap_or(u32::MAX).max(FIRST).min(self.cwnd);
        Some(now.after((span / STEPS).max(1)))
    }

    fn resize(&mut self, packets: u32) {
        self.cwnd = packets;
        self.paced_cwnd = if self.paced.is_some() { self.paced_cwnd.min(packets) } else { packets };
    }

    /// `packets` were acknowledged.
    #[inline]
    pub(in crate::rc) fn acknowledged(&mut self, packets: u32) {
        self.missing.1 = 0;
        self.run = self.run.saturating_add(packets);
        if self.cwnd >= self.max {
            return;
        }
        if self.cwnd < self.ssthresh {
            return self.resize((self.cwnd + packets).min(self.max));
        }
        self.acknowledged += packets;
        if self.acknowledged >= self.cwnd {
            self.acknowledged = 0;
            // One sixteenth more per round trip: a lossy shaper is probed gently, a clear path is
            // full in a dozen.
            self.resize((self.cwnd + 1 + self.cwnd / 16).min(self.max));
        }
    }

    /// How many packets may follow the first that is not acknowledged: few, and ever fewer, if what
    /// was sent again in its place was lost again and again, because all that followed it was sent
    /// in vain.
    #[inline]
    pub(in crate::rc) fn behind_the_missing(&self) -> u64 {
        match self.missing.1 {
            0 => u64::MAX,
            times => u64::from(FIRST >> times.min(8)),
        }
    }

    /// Whether `psn` was missing before, so lately that what was sent again in its place cannot
    /// have been heard of.
    pub(in crate::rc) fn has_gone_back(&self, psn: u64, now: Time, round_trip: u64) -> bool {
        self.missing.0 == psn && now.since(self.gone_back) < round_trip
    }

    /// The packet of `psn` was lost; `false` if that was said of what is on its way again.
    pub(in crate::rc) fn lost(&mut self, now: Time, psn: u64, round_trip: &RoundTrip) -> bool {
        let (missing, times) = self.missing;
        if missing == psn && now.since(self.gone_back) < round_trip.min_rtt() {
            return false;
        }
        self.gone_back = now;
        self.missing = (psn, if missing == psn { times + 1 } else { 0 });
        let span = round_trip.latest().min(2 * round_trip.srtt());
        if span >= PACED_NS && self.cwnd > FIRST {
            self.paced = Some((now, span));
            self.paced_cwnd = FIRST;
        }
        // Everything was sent again: what is missing then was lost then, but for what was said
        // while that was on its way.
        if now.since(self.answered) < round_trip.min_rtt() {
            return true;
        }
        self.answered = now;
        self.end_run();
        let drained = round_trip.without_queue(self.cwnd).max(self.cwnd / 2);
        self.shrink(drained);
        self.resize(self.ssthresh);
        true
    }

    /// Something was lost that goes again alone: nothing else is thrown away with it, however often
    /// that happens.
    pub(in crate::rc) fn lost_one(&mut self, now: Time, round_trip: &RoundTrip) {
        if now.since(self.answered) < round_trip.min_rtt() {
            return;
        }
        self.answered = now;
        self.end_run();
        self.ssthresh = round_trip.without_queue(self.cwnd).max(self.cwnd / 2).max(MIN);
        self.acknowledged = 0;
        self.resize(self.ssthresh);
    }

    /// Without regard to pace.
    pub(in crate::rc) fn cwnd(&self) -> u32 {
        self.cwnd
    }

    /// The path is congested: so many packets are left of it, and it grows from there.
    pub(in crate::rc) fn congested(&mut self, left: u32) {
        self.ssthresh = left.max(MIN);
        self.acknowledged = 0;
        self.resize(self.ssthresh);
    }

    /// Nothing came back in time.
    pub(in crate::rc) fn timed_out(&mut self, now: Time) {
        self.answered = now;
        self.end_run();
        self.shrink(self.cwnd / 2);
        self.resize(self.cwnd.min(4 * MIN));
    }

    /// What is found to be good, if what gets through between two losses permits.
    fn shrink(&mut self, good: u32) {
        let bound = self.usual_run.saturating_mul(RUNS).max(8 * MIN);
        self.ssthresh = good.min(bound).max(MIN);
        self.acknowledged = 0;
    }

    fn end_run(&mut self) {
        let run = core::mem::take(&mut self.run);
        self.usual_run = match self.usual_run {
            u32::MAX => run.max(self.cwnd),
            usual => usual - usual / 8 + run / 8,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Time;

    const NOW: Time = Time(1 << 40);

    /// A path whose round trip is now so many times the shortest.
    fn path(times: u64) -> RoundTrip {
        let mut path = RoundTrip::default();
        for (psn, took) in [(1, 1_000), (2, 1_000 * times)] {
            let sent = Time(1_000_000 * psn);
            path.sent(psn, sent, false);
            path.acknowledged(psn + 1, sent.after(took), true);
        }
        path
    }

    #[test]
    fn one_loss_episode_is_answered_once() {
        let mut window = Window::new(64);
        _ = window.lost(NOW, 1, &path(10));
        _ = window.lost(NOW.after(999), 2, &path(10));
        assert_eq!(window.packets(), 32);
        _ = window.lost(NOW.after(2_000), 3, &path(10));
        assert_eq!(window.packets(), 16);
    }

    #[test]
    fn it_shrinks_by_as_much_as_the_round_trip_grew() {
        let mut window = Window::new(600);
        _ = window.lost(NOW, 1, &path(1));
        assert_eq!(window.packets(), 600, "no queue overflowed");
        let mut path = path(1);
        path.sent(9, Time(50_000_000), false);
        path.acknowledged(10, Time(50_001_500), true);
        _ = window.lost(NOW.after(10_000), 2, &path);
        assert_eq!(window.packets(), 400);
    }

    #[test]
    fn frequent_losses_bound_it_though_no_queue_grows() {
        let mut window = Window::new(512);
        for episode in 1..100 {
            window.acknowledged(10);
            _ = window.lost(NOW.after(10_000 * episode), episode, &path(1));
        }
        assert!((30..=64).contains(&window.packets()), "{}", window.packets());
    }

    #[test]
    fn it_grows_back_and_no_further_than_its_bound() {
        let mut window = Window::new(64);
        window.timed_out(NOW);
        assert_eq!(window.packets(), 8);
        for _ in 0..10_000 {
            window.acknowledged(1);
        }
        assert_eq!(window.packets(), 64);
    }
}
