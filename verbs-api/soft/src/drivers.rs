//! A shard's knowledge of the threads that drive it, and of their sleep.

use std::time::Duration;

use rocinante_stack::types::Time;

use super::io::Io;
use crate::tuning::shard::{ARRIVALS, POLLS};

/// The program's thread, and the background thread.
#[derive(Debug)]
pub(super) struct Drivers {
    /// Whether the port's descriptor reports arrivals, and the number of looks in a row since then
    /// that found some.
    is_watched: bool,
    arrivals: u32,
    /// Something was received when the shard was last driven.
    has_received: bool,
    /// When the program drove last.
    driven_at: Time,
    /// How often the program has polled since, while the background thread slept.
    polls: u32,
    /// The background thread wakes for each packet, however often the program polls.
    is_assisted: bool,
    /// When the background thread looks again, while it sleeps.
    parked_until: Time,
}

impl Drivers {
    pub(super) fn new() -> Self {
        Self {
            is_watched: true,
            arrivals: 0,
            has_received: false,
            driven_at: Time(0),
            polls: 0,
            is_assisted: false,
            parked_until: Time(u64::MAX),
        }
    }

    /// A thread drives the shard: the program's if `calls_again`.
    #[inline]
    pub(super) fn drive(&mut self, now: Time, calls_again: bool) {
        if calls_again {
            self.driven_at = now;
        }
        self.has_received = false;
    }

    /// It looked at the port, and received this number of datagrams.
    #[inline]
    pub(super) fn looked(&mut self, received: usize) {
        self.has_received |= received > 0;
        self.arrivals = self.arrivals.saturating_add(u32::from(received > 0));
    }

    /// Whether something was received when the shard was last driven.
    #[inline]
    pub(super) fn has_received(&self) -> bool {
        self.has_received
    }

    /// Turns the descriptor's reports of arrivals on, or spares the kernel that. Returns whether
    /// they are as wished.
    pub(super) fn watch(&mut self, wished: bool, io: &mut Io) -> bool {
        (self.arrivals, self.polls) = (0, 0);
        if wished != self.is_watched && io.watch(wished).is_ok() {
            self.is_watched = wished;
        }
        self.is_watched == wished
    }

    /// Whether that is so: see [`watch`](Self::watch).
    #[inline]
    pub(super) fn is_watched(&self) -> bool {
        self.is_watched
    }

    /// Whether arrivals are too frequent for a report of each.
    pub(super) fn is_busy(&self) -> bool {
        self.arrivals > ARRIVALS
    }

    /// Whether the program drove in the last `span`.
    pub(super) fn has_driven_within(&self, span: Duration, now: Time) -> bool {
        Duration::from_nanos(now.since(self.driven_at)) <= span
    }

    /// Counts a poll while the background thread sleeps on the port. Returns whether the program
    /// does nothing but poll.
    pub(super) fn polls_without_pause(&mut self) -> bool {
        self.polls = self.polls.saturating_add(1);
        self.polls > POLLS && !self.is_assisted
    }

    /// Says whether the program needs the background thread beside its own polls.
    pub(super) fn assist(&mut self, assisted: bool) {
        self.is_assisted = assisted;
    }

    /// The background thread sleeps, and looks again then.
    pub(super) fn park_until(&mut self, due: Time) {
        self.parked_until = due;
    }

    /// When it does.
    #[inline]
    pub(super) fn parked_until(&self) -> Time {
        self.parked_until
    }
}
