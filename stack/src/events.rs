//! Asynchronous events of queue pairs that the caller has not polled yet.

use std::collections::VecDeque;

use crate::types::Qpn;
use crate::verbs::QpEvent;

/// Events of a queue pair from one reset to the next: it may be established, be drained, break with
/// a READ whose memory is gone, and take no more from its shared receive queue.
const PER_QP: usize = 5;

/// The events, oldest first.
///
/// A peer causes at most [`PER_QP`] events of a queue pair. The program can cause more, if it
/// resets or drains queue pairs and does not poll. From then on an event that is already queued is
/// not queued again, so that the number of events stays below a bound.
#[derive(Debug, Default)]
pub(crate) struct Events {
    queue: VecDeque<(Qpn, QpEvent)>,
    /// Number of events that peers can cause.
    room: usize,
}

impl Events {
    /// Makes room for the events of `qps` queue pairs: two of each, so that a packet allocates only
    /// if the program does not poll.
    pub(crate) fn reserve(&mut self, qps: usize) {
        self.room = PER_QP * qps;
        self.queue.reserve((2 * qps).saturating_sub(self.queue.len()));
    }

    pub(crate) fn push(&mut self, qpn: Qpn, event: QpEvent) {
        if self.queue.len() < self.room || !self.queue.contains(&(qpn, event)) {
            self.queue.push_back((qpn, event));
        }
    }

    pub(crate) fn pop(&mut self) -> Option<(Qpn, QpEvent)> {
        self.queue.pop_front()
    }

    /// Drops the events of a queue pair that is gone: its number may be given out again.
    pub(crate) fn forget(&mut self, qpn: Qpn) {
        self.queue.retain(|(of, _)| *of != qpn);
    }

    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_that_nobody_polls_are_bounded_and_none_is_lost() {
        let mut events = Events::default();
        events.reserve(2);
        let [a, b] = [2, 3].map(Qpn::new);
        for _ in 0..1000 {
            events.push(a, QpEvent::CommEst);
            events.push(a, QpEvent::SqDrained);
        }
        assert_eq!(events.len(), 2 * PER_QP);
        // The other queue pair's events are new, and so is one that has been polled.
        events.push(b, QpEvent::CommEst);
        assert_eq!(events.pop(), Some((a, QpEvent::CommEst)));
        events.push(b, QpEvent::Fatal);
        let rest: Vec<_> = core::iter::from_fn(|| events.pop()).collect();
        assert_eq!(rest[rest.len() - 2..], [(b, QpEvent::CommEst), (b, QpEvent::Fatal)]);
        events.push(a, QpEvent::CommEst);
        assert_eq!(events.pop(), Some((a, QpEvent::CommEst)));
    }

    #[test]
    fn the_events_of_a_queue_pair_go_with_it() {
        let mut events = Events::default();
        events.reserve(2);
        let [a, b] = [2, 3].map(Qpn::new);
        for qpn in [a, b, a] {
            events.push(qpn, QpEvent::Fatal);
        }
        events.forget(a);
        assert_eq!((events.pop(), events.pop()), (Some((b, QpEvent::Fatal)), None));
    }
}
