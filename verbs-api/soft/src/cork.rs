//! Packets that wait on a shard to leave together with more (`TCP_CORK`), and their deadline.
//!
//! Problem: a packet that leaves alone costs a system call, and its peer a wake-up. Rule: requests
//! wait while answers are in flight that have the shard driven again, datagrams for 50 µs, and
//! acknowledgements for the next call of a program that is about to answer. Cost if wrong: waiting
//! packets are late by one look of the background thread.

use rocinante_stack::Urgency;
use rocinante_stack::types::Time;

use crate::tuning::cork::{ENABLED, HELD_MAX, HELD_UNASKED, REQUESTS_MAX};

/// The requests and acknowledgements that wait.
#[derive(Debug)]
pub(super) struct Cork {
    /// How soon the shard must be driven for them. Requests that wait for answers in flight do not
    /// count: the answers have the shard driven.
    waits: Urgency,
    /// Requests posted since the last transmission.
    requests: u32,
    /// No request has left at once since the shard was driven.
    is_open: bool,
    /// The program was shown a completed receive or a message of several packets, and has posted
    /// nothing since.
    shown: bool,
    /// It answered the last ones that it was shown: it posted before it was shown more.
    answers: bool,
}

impl Cork {
    pub(super) fn new() -> Self {
        Self { waits: Urgency::Idle, requests: 0, is_open: true, shown: false, answers: false }
    }

    /// `requests` were posted; `urgency` is what the queue pair answered before the post. Returns
    /// whether to transmit now.
    ///
    /// While answers are in flight, the first post since the shard was driven leaves at once, and
    /// those after it wait. Datagrams that nothing answers wait whether they are the first or not.
    #[inline]
    pub(super) fn posted(
        &mut self,
        requests: u32,
        urgency: Urgency,
        now: impl FnOnce() -> Time,
    ) -> bool {
        if std::mem::take(&mut self.shown) {
            self.answers = true;
        }
        self.requests += requests;
        let waits = self.requests < REQUESTS_MAX
            && match urgency {
                Urgency::Now => false,
                Urgency::Idle => !self.is_open,
                Urgency::By(time) => now() < time,
            };
        if waits {
            self.waits = self.waits.or(urgency);
        } else {
            self.is_open = false;
        }
        !waits
    }

    /// The end of a burst of `received` datagrams, before the program sees it; `completes` says
    /// whether one of them completed a receive. Returns whether their plain acknowledgements wait
    /// for its next call: only if nothing else is to be sent, and if nothing waited for this call.
    ///
    /// Those of a completed receive, and of more than [`HELD_UNASKED`] packets, wait only for a
    /// program that answered the one before: any other may end right after the completion, or look
    /// seldom, and its peer would ask or wait in vain.
    pub(super) fn keeps(
        &mut self,
        received: usize,
        completes: bool,
        urgency: impl FnOnce() -> Urgency,
    ) -> bool {
        if !(1..=HELD_MAX).contains(&received) {
            return false;
        }
        let shows = completes || received > HELD_UNASKED;
        if shows && std::mem::replace(&mut self.shown, true) {
            self.answers = false;
        }
        if shows && !self.answers {
            return false;
        }
        let urgency = urgency();
        let keeps = ENABLED && matches!(urgency, Urgency::By(_)) && self.waits == Urgency::Idle;
        if keeps {
            self.waits = urgency;
        }
        keeps
    }

    /// The shard transmits.
    #[inline]
    pub(super) fn pull(&mut self) {
        (self.waits, self.requests) = (Urgency::Idle, 0);
    }

    /// The shard was driven.
    #[inline]
    pub(super) fn driven(&mut self) {
        self.is_open = true;
    }

    /// Whether something waits that nothing but a call of the program sends.
    #[inline]
    pub(super) fn is_in(&self) -> bool {
        self.waits != Urgency::Idle
    }

    /// The time at which waiting packets must leave.
    #[inline]
    pub(super) fn deadline(&self) -> Option<Time> {
        match self.waits {
            Urgency::By(time) => Some(time),
            Urgency::Idle | Urgency::Now => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Time = Time(1_000);
    const LATER: Time = Time(2_000);

    fn posted(cork: &mut Cork, requests: u32, urgency: Urgency) -> bool {
        cork.posted(requests, urgency, || NOW)
    }

    #[test]
    fn the_first_post_leaves_at_once_and_the_next_wait_for_the_answers() {
        let mut cork = Cork::new();
        assert!(posted(&mut cork, 1, Urgency::Idle));
        cork.pull();
        for _ in 0..2 {
            assert!(!posted(&mut cork, 1, Urgency::Idle));
        }
        assert!(!cork.is_in() && cork.deadline().is_none(), "the answers have the shard driven");
        assert!(posted(&mut cork, 1, Urgency::Now), "nothing will");
        cork.pull();
        assert!(!posted(&mut cork, 1, Urgency::Idle));
        cork.driven();
        assert!(posted(&mut cork, 1, Urgency::Idle));
    }

    #[test]
    fn no_more_than_so_many_requests_wait() {
        let mut cork = Cork::new();
        assert!(posted(&mut cork, 1, Urgency::Idle));
        cork.pull();
        assert!(!posted(&mut cork, REQUESTS_MAX - 1, Urgency::Idle));
        assert!(posted(&mut cork, 1, Urgency::Idle));
        cork.pull();
        assert!(!posted(&mut cork, REQUESTS_MAX - 1, Urgency::By(LATER)));
        assert!(posted(&mut cork, 1, Urgency::By(LATER)));
    }

    #[test]
    fn datagrams_wait_until_their_time() {
        let mut cork = Cork::new();
        assert!(posted(&mut cork, 1, Urgency::By(NOW)), "that time has come");
        cork.pull();
        assert!(!posted(&mut cork, 1, Urgency::By(LATER)));
        assert!(!posted(&mut cork, 1, Urgency::By(Time(LATER.0 + 1))));
        assert!(cork.is_in());
        assert_eq!(cork.deadline(), Some(LATER), "the earlier of two");
        cork.pull();
        assert!(!cork.is_in());
    }

    fn keeps(cork: &mut Cork, received: usize, completes: bool) -> bool {
        cork.keeps(received, completes, || Urgency::By(LATER))
    }

    #[test]
    fn acknowledgements_wait_for_one_call_and_not_beside_other_packets() {
        let mut cork = Cork::new();
        for urgency in [Urgency::Idle, Urgency::Now] {
            assert!(!cork.keeps(1, false, || urgency));
        }
        assert!(keeps(&mut cork, 1, false));
        assert!(cork.is_in());
        assert!(!keeps(&mut cork, 1, false), "it waited for this call");
        cork.pull();
        assert!(keeps(&mut cork, 1, false));
        cork.pull();
        assert!(!keeps(&mut cork, 0, false) && !keeps(&mut cork, HELD_MAX + 1, false));
    }

    #[test]
    fn those_of_a_message_wait_for_a_program_that_answered_the_last() {
        for (received, completes) in [(1, true), (HELD_UNASKED + 1, false)] {
            let mut cork = Cork::new();
            assert!(!keeps(&mut cork, received, completes), "it has answered nothing yet");
            posted(&mut cork, 1, Urgency::Now);
            cork.pull();
            assert!(keeps(&mut cork, received, completes), "it answered");
            cork.pull();
            assert!(!keeps(&mut cork, received, completes), "it did not answer that one");
            assert!(keeps(&mut cork, HELD_UNASKED, false), "it sees nothing of these");
        }
    }
}
