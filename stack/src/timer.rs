//! Deadlines of queue pairs: one heap, filed lazily.
//!
//! A queue pair has at most one deadline that counts, and moves it with every acknowledgement. Moving
//! it later costs a store: the heap keeps the old time, and whoever pops it files it again.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::types::Time;

/// The deadline of one queue pair, with what the heap knows of it.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Deadline {
    /// When it is due; `None` if there is none.
    due: Option<Time>,
    /// The earliest time under which it is filed.
    filed: Option<Time>,
}

/// All deadlines.
#[derive(Debug, Default)]
pub(crate) struct Timers {
    heap: BinaryHeap<Reverse<(Time, u32)>>,
}

impl Deadline {
    pub(crate) fn due(&self) -> Option<Time> {
        self.due
    }

    pub(crate) fn clear(&mut self) {
        self.due = None;
    }
}

impl Timers {
    /// Makes room for `queue_pairs` of them, so that setting one does not allocate.
    pub(crate) fn reserve(&mut self, queue_pairs: usize) {
        // A deadline that moves earlier leaves its later entry behind until that pops.
        self.heap.reserve((queue_pairs * 4).saturating_sub(self.heap.len()));
    }

    /// Sets the deadline of `owner`.
    #[inline]
    pub(crate) fn set(&mut self, owner: u32, deadline: &mut Deadline, due: Time) {
        deadline.due = Some(due);
        if deadline.filed.is_none_or(|filed| due < filed) {
            deadline.filed = Some(due);
            self.heap.push(Reverse((due, owner)));
        }
    }

    /// When to look again. May be early, never late.
    pub(crate) fn next(&self) -> Option<Time> {
        self.heap.peek().map(|Reverse((at, _))| *at)
    }

    /// Takes an owner whose filed time has come; what is really due is told by [`Timers::settle`].
    pub(crate) fn pop(&mut self, now: Time) -> Option<(Time, u32)> {
        match self.heap.peek() {
            Some(Reverse((at, _))) if *at <= now => self.heap.pop().map(|Reverse(entry)| entry),
            _ => None,
        }
    }

    /// Whether the owner popped at `filed` is due now; if not, files it again.
    pub(crate) fn settle(
        &mut self,
        owner: u32,
        deadline: &mut Deadline,
        filed: Time,
        now: Time,
    ) -> bool {
        if deadline.filed != Some(filed) {
            return false; // a leftover of an entry that was overtaken by an earlier one
        }
        deadline.filed = None;
        match deadline.due {
            Some(due) if due <= now => {
                deadline.due = None;
                true
            }
            Some(due) => {
                self.set(owner, deadline, due);
                false
            }
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_moved_later_fires_once_and_on_time() {
        let (mut timers, mut deadline) = (Timers::default(), Deadline::default());
        timers.set(7, &mut deadline, Time(10));
        timers.set(7, &mut deadline, Time(30));
        assert_eq!(timers.next(), Some(Time(10)));
        let (filed, owner) = timers.pop(Time(12)).unwrap();
        assert!(!timers.settle(owner, &mut deadline, filed, Time(12)));
        assert_eq!(timers.next(), Some(Time(30)));
        let (filed, owner) = timers.pop(Time(30)).unwrap();
        assert!(timers.settle(owner, &mut deadline, filed, Time(30)));
        assert_eq!(timers.next(), None);
    }

    #[test]
    fn a_deadline_moved_earlier_fires_early() {
        let (mut timers, mut deadline) = (Timers::default(), Deadline::default());
        timers.set(1, &mut deadline, Time(30));
        timers.set(1, &mut deadline, Time(10));
        let (filed, owner) = timers.pop(Time(10)).unwrap();
        assert!(timers.settle(owner, &mut deadline, filed, Time(10)));
        let (filed, owner) = timers.pop(Time(30)).unwrap();
        assert!(!timers.settle(owner, &mut deadline, filed, Time(30)));
    }

    #[test]
    fn a_cleared_deadline_never_fires() {
        let (mut timers, mut deadline) = (Timers::default(), Deadline::default());
        timers.set(1, &mut deadline, Time(10));
        deadline.clear();
        assert_eq!(deadline.due(), None);
        let (filed, owner) = timers.pop(Time(10)).unwrap();
        assert!(!timers.settle(owner, &mut deadline, filed, Time(10)));
    }
}
