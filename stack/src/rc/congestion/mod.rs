//! Congestion control: the number of packets of a queue pair that may be in flight.
//!
//! - Problem: a path may carry less than the receiver holds, and shows it only by losses, delay and
//!   marks.
//! - Rule: a [`Controller`] answers acknowledgements, losses, timeouts and marks with a window.
//!   After a loss a [`Pacer`] opens that window in the time of a round trip, because packets that
//!   were sent in vain are still in flight.
//! - Cost if wrong: a bottleneck overflows again and again, or a clear path is idle.
//! - Measured: `stack/tests/goodput/goodput.txt`.

pub(in crate::rc) mod ecn;
mod loss_delay;
pub(in crate::rc) mod rtt;

use self::loss_delay::LossDelay;
use self::rtt::RoundTrip;
use crate::pacing::Pacer;
use crate::tuning::congestion::{FIRST, PACED_NS, STEPS};
use crate::types::Time;

/// How a lost packet goes again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::rc) enum Repeat {
    /// With everything behind it (go-back-N).
    FromThere,
    /// Alone (selective repeat).
    Alone,
}

/// The algorithm that decides the congestion window. It has no clock: the time comes with each
/// call.
pub(in crate::rc) trait Controller {
    /// Packets that may be in flight.
    fn cwnd(&self) -> u32;

    /// The largest window: the room of the receiver.
    fn max(&self) -> u32;

    /// The receiver turned out to have room for `max` packets.
    fn grow(&mut self, max: u32);

    /// `packets` packets were acknowledged, or are known to be held.
    fn on_ack(&mut self, packets: u32);

    /// A packet was lost, and goes again in this way.
    fn on_loss(&mut self, now: Time, rtt: &RoundTrip, repeat: Repeat);

    /// Nothing came back in time.
    fn on_timeout(&mut self, now: Time);

    /// The peer reports that packets were marked (CNP).
    fn on_ecn(&mut self, now: Time, rtt: &RoundTrip);
}

/// The congestion control of a queue pair.
#[derive(Debug)]
pub(in crate::rc) struct Congestion<C = LossDelay> {
    controller: C,
    pacer: Pacer,
    /// Packets that may be in flight now: the window, or less while it is paced.
    allowed: u32,
}

impl Congestion {
    /// Of a receiver that has room for `max` packets.
    pub(in crate::rc) fn new(max: u32) -> Self {
        Self::with(LossDelay::new(max))
    }
}

impl<C: Controller> Congestion<C> {
    fn with(controller: C) -> Self {
        Self { allowed: controller.cwnd(), pacer: Pacer::default(), controller }
    }

    /// The room of the receiver, which the path may not carry.
    pub(in crate::rc) fn max(&self) -> u32 {
        self.controller.max()
    }

    /// See [`Controller::grow`].
    pub(in crate::rc) fn grow(&mut self, max: u32) {
        self.controller.grow(max);
        self.resized();
    }

    /// Packets that may be in flight now.
    #[inline]
    pub(in crate::rc) fn packets(&self) -> u32 {
        self.allowed
    }

    /// Whether they are the room of the receiver: no loss has reduced the window.
    #[inline]
    pub(in crate::rc) fn is_whole(&self) -> bool {
        self.allowed >= self.controller.max()
    }

    /// Whether pacing keeps a part of the window back.
    pub(in crate::rc) fn is_paced(&self) -> bool {
        self.allowed < self.controller.cwnd()
    }

    /// Opens the paced window as far as time permits. Returns when more of it opens, unless all is
    /// open.
    #[inline]
    pub(in crate::rc) fn tick(&mut self, now: Time) -> Option<Time> {
        if self.pacer.is_empty() { None } else { self.open(now) }
    }

    #[cold]
    fn open(&mut self, now: Time) -> Option<Time> {
        let cwnd = self.controller.cwnd();
        let held = self.pacer.held(now);
        if self.pacer.is_empty() {
            self.allowed = cwnd;
            return None;
        }
        self.allowed = cwnd.saturating_sub(held).max(FIRST).min(cwnd);
        Some(now.after((self.pacer.takes_ns() / STEPS).max(1)))
    }

    /// The window is another now.
    #[inline]
    fn resized(&mut self) {
        let cwnd = self.controller.cwnd();
        self.allowed = if self.pacer.is_empty() { cwnd } else { self.allowed.min(cwnd) };
    }

    /// See [`Controller::on_ack`].
    #[inline]
    pub(in crate::rc) fn on_ack(&mut self, packets: u32) {
        let before = self.controller.cwnd();
        self.controller.on_ack(packets);
        if self.controller.cwnd() != before {
            self.resized();
        }
        debug_assert!(self.allowed == self.controller.cwnd() || !self.pacer.is_empty());
    }

    /// See [`Controller::on_loss`].
    pub(in crate::rc) fn on_loss(&mut self, now: Time, rtt: &RoundTrip, repeat: Repeat) {
        let before = self.controller.cwnd();
        self.controller.on_loss(now, rtt, repeat);
        if repeat == Repeat::FromThere && span(rtt) >= PACED_NS && before > FIRST {
            self.pacer.fill(now, self.controller.cwnd(), span(rtt));
            self.allowed = FIRST;
        }
        self.resized();
    }

    /// See [`Controller::on_timeout`].
    pub(in crate::rc) fn on_timeout(&mut self, now: Time) {
        self.controller.on_timeout(now);
        self.resized();
    }

    /// See [`Controller::on_ecn`].
    pub(in crate::rc) fn on_ecn(&mut self, now: Time, rtt: &RoundTrip) {
        self.controller.on_ecn(now, rtt);
        self.resized();
    }
}

/// The time in which a window opens after a loss.
fn span(rtt: &RoundTrip) -> u64 {
    rtt.latest().min(2 * rtt.srtt())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Seq;

    /// A window that nothing moves.
    struct Fixed(u32);

    impl Controller for Fixed {
        fn cwnd(&self) -> u32 {
            self.0
        }

        fn max(&self) -> u32 {
            self.0
        }

        fn grow(&mut self, _: u32) {}

        fn on_ack(&mut self, _: u32) {}

        fn on_loss(&mut self, _: Time, _: &RoundTrip, _: Repeat) {}

        fn on_timeout(&mut self, _: Time) {}

        fn on_ecn(&mut self, _: Time, _: &RoundTrip) {}
    }

    const NOW: Time = Time(1 << 40);

    fn path(took: u64) -> RoundTrip {
        let mut path = RoundTrip::default();
        path.sent(Seq(1), Time(1), false);
        path.acknowledged(Seq(2), Time(1 + took), true);
        path
    }

    #[test]
    fn after_going_back_the_window_opens_within_a_round_trip() {
        let path = path(160_000);
        let mut congestion = Congestion::with(Fixed(64));
        congestion.on_loss(NOW, &path, Repeat::FromThere);
        assert_eq!((congestion.packets(), congestion.is_paced()), (8, true));
        let mut last = 8;
        let mut now = NOW;
        while let Some(later) = congestion.tick(now) {
            assert!(congestion.packets() >= last && later > now);
            let due = 64 * now.since(NOW) / 160_000;
            assert!(u64::from(congestion.packets()).abs_diff(due.max(8)) <= 2, "{now:?}");
            (last, now) = (congestion.packets(), later);
        }
        assert_eq!((congestion.packets(), congestion.is_paced()), (64, false));
        assert_eq!(now.since(NOW), 160_000);
    }

    #[test]
    fn what_goes_again_alone_and_short_paths_and_small_windows_are_not_paced() {
        for (repeat, took, window) in [
            (Repeat::Alone, 160_000, 64),
            (Repeat::FromThere, PACED_NS - 1, 64),
            (Repeat::FromThere, 160_000, FIRST),
        ] {
            let mut congestion = Congestion::with(Fixed(window));
            congestion.on_loss(NOW, &path(took), repeat);
            assert_eq!(congestion.packets(), window, "{repeat:?} {took} {window}");
            assert_eq!(congestion.tick(NOW), None);
        }
    }
}
