//! Deadlines of queue pairs: one heap with one entry per queue pair, filed lazily.
//!
//! A queue pair has at most one deadline that counts, and moves it with every acknowledgement.
//! Moving it later costs one store: the heap keeps the old time, and the pop files the entry again.
//! Moving it earlier moves the entry, so the heap never holds more entries than there are queue
//! pairs.

use crate::types::Time;

/// Never: nothing is due, nothing is filed.
const NEVER: Time = Time::NEVER;

/// The deadline of one queue pair, and the time of its heap entry.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline {
    due: Time,
    /// The time of its entry in the heap. It is never later than `due`, unless `due` is never.
    filed: Time,
}

impl Default for Deadline {
    fn default() -> Self {
        Self { due: NEVER, filed: NEVER }
    }
}

impl Deadline {
    #[inline]
    pub(crate) fn is_set(&self) -> bool {
        self.due != NEVER
    }

    #[inline]
    pub(crate) fn clear(&mut self) {
        self.due = NEVER;
    }
}

/// All deadlines.
#[derive(Debug, Default)]
pub(crate) struct Timers {
    /// A binary heap, earliest first.
    heap: Vec<(Time, u32)>,
    /// Position in the heap of each owner's entry; meaningless for owners without one.
    positions: Vec<u32>,
}

impl Timers {
    /// Makes room for owners below `owners`, so that setting a deadline does not allocate.
    pub(crate) fn reserve(&mut self, owners: usize) {
        if self.positions.len() < owners {
            self.positions.resize(owners, 0);
            self.heap.reserve(owners - self.heap.len());
        }
    }

    /// Number of entries that are filed.
    pub(crate) fn count(&self) -> usize {
        self.heap.len()
    }

    /// The owner of an entry.
    pub(crate) fn owner(&self, at: usize) -> u32 {
        self.heap[at].1
    }

    #[inline]
    pub(crate) fn set(&mut self, owner: u32, deadline: &mut Deadline, due: Time) {
        deadline.due = due;
        if due < deadline.filed {
            self.file(owner, deadline, due);
        }
    }

    /// When to look again. This may be early, never late.
    #[inline]
    pub(crate) fn next(&self) -> Option<Time> {
        self.heap.first().map(|(at, _)| *at)
    }

    /// Takes an owner from the heap if its filed time has come; [`Timers::settle`] decides whether
    /// its deadline is really due.
    pub(crate) fn pop(&mut self, now: Time) -> Option<u32> {
        let (at, owner) = *self.heap.first()?;
        if at > now {
            return None;
        }
        self.take_out(0);
        Some(owner)
    }

    /// Returns the deadline of the owner just popped, if it has come; else files it again.
    pub(crate) fn settle(
        &mut self,
        owner: u32,
        deadline: &mut Deadline,
        now: Time,
    ) -> Option<Time> {
        deadline.filed = NEVER;
        let due = deadline.due;
        if due <= now {
            deadline.clear();
            return Some(due);
        }
        if deadline.is_set() {
            self.set(owner, deadline, due);
        }
        None
    }

    /// Forgets the deadline of an owner that goes away.
    pub(crate) fn remove(&mut self, owner: u32, deadline: &mut Deadline) {
        if deadline.filed != NEVER {
            self.take_out(self.positions[owner as usize] as usize);
        }
        *deadline = Deadline::default();
    }

    fn file(&mut self, owner: u32, deadline: &mut Deadline, due: Time) {
        let at = if deadline.filed == NEVER {
            self.heap.push((due, owner));
            self.heap.len() - 1
        } else {
            let at = self.positions[owner as usize] as usize;
            self.heap[at].0 = due;
            at
        };
        deadline.filed = due;
        self.rise(at);
    }

    fn take_out(&mut self, at: usize) {
        self.heap.swap_remove(at);
        if at < self.heap.len() {
            self.sink(at);
            self.rise(at);
        }
    }

    /// Moves an entry up to its place.
    fn rise(&mut self, mut at: usize) {
        while at > 0 && self.heap[at] < self.heap[(at - 1) / 2] {
            self.heap.swap(at, (at - 1) / 2);
            self.note(at);
            at = (at - 1) / 2;
        }
        self.note(at);
    }

    /// Moves an entry down to its place.
    fn sink(&mut self, mut at: usize) {
        loop {
            let left = 2 * at + 1;
            let Some(mut child) = self.heap.get(left).map(|_| left) else { break };
            if self.heap.get(left + 1).is_some_and(|right| *right < self.heap[left]) {
                child = left + 1;
            }
            if self.heap[at] <= self.heap[child] {
                break;
            }
            self.heap.swap(at, child);
            self.note(at);
            at = child;
        }
        self.note(at);
    }

    fn note(&mut self, at: usize) {
        let owner = self.heap[at].1 as usize;
        let place = at as u32;
        self.positions[owner] = place;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timers(owners: usize) -> Timers {
        let mut timers = Timers::default();
        timers.reserve(owners);
        timers
    }

    #[test]
    fn a_deadline_moved_later_fires_once_and_on_time() {
        let (mut timers, mut deadline) = (timers(8), Deadline::default());
        timers.set(7, &mut deadline, Time(10));
        timers.set(7, &mut deadline, Time(30));
        assert_eq!(timers.next(), Some(Time(10)));
        assert_eq!(timers.pop(Time(12)), Some(7));
        assert_eq!(timers.settle(7, &mut deadline, Time(12)), None);
        assert_eq!(timers.next(), Some(Time(30)));
        assert_eq!(timers.pop(Time(31)), Some(7));
        assert_eq!(timers.settle(7, &mut deadline, Time(31)), Some(Time(30)));
        assert_eq!(timers.next(), None);
    }

    #[test]
    fn a_deadline_moved_earlier_fires_early_and_leaves_nothing_behind() {
        let (mut timers, mut deadline) = (timers(2), Deadline::default());
        timers.set(1, &mut deadline, Time(30));
        timers.set(1, &mut deadline, Time(10));
        assert_eq!(timers.pop(Time(10)), Some(1));
        assert_eq!(timers.settle(1, &mut deadline, Time(10)), Some(Time(10)));
        assert_eq!(timers.next(), None);
    }

    #[test]
    fn a_cleared_deadline_never_fires() {
        let (mut timers, mut deadline) = (timers(2), Deadline::default());
        timers.set(1, &mut deadline, Time(10));
        deadline.clear();
        assert!(!deadline.is_set());
        assert_eq!(timers.pop(Time(10)), Some(1));
        assert_eq!(timers.settle(1, &mut deadline, Time(10)), None);
        assert_eq!(timers.next(), None);
    }

    #[test]
    fn it_agrees_with_a_list_whatever_happens() {
        const OWNERS: usize = 40;
        let (mut timers, mut list) = (timers(OWNERS), [Deadline::default(); OWNERS]);
        let mut due = [None; OWNERS];
        let (mut state, mut now) = (7u64, 0);
        for _ in 0..if cfg!(miri) { 500 } else { 20_000 } {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let (what, owner, span) =
                ((state >> 60) & 7, (state >> 33) as usize % OWNERS, (state >> 20) % 100);
            match what {
                0..4 => {
                    timers.set(owner as u32, &mut list[owner], Time(now + span + 1));
                    due[owner] = Some(now + span + 1);
                }
                4 => {
                    list[owner].clear();
                    due[owner] = None;
                }
                5 => {
                    timers.remove(owner as u32, &mut list[owner]);
                    due[owner] = None;
                }
                _ => now += span / 10,
            }
            let mut fired = Vec::new();
            while let Some(owner) = timers.pop(Time(now)) {
                if timers.settle(owner, &mut list[owner as usize], Time(now)).is_some() {
                    fired.push(owner as usize);
                }
            }
            fired.sort_unstable();
            let expected: Vec<_> =
                (0..OWNERS).filter(|i| due[*i].is_some_and(|at| at <= now)).collect();
            assert_eq!(fired, expected);
            fired.iter().for_each(|owner| due[*owner] = None);
            assert!(timers.heap.len() <= OWNERS);
            assert!(
                timers.next().map(|t| t.0)
                    <= due.iter().flatten().min().copied().or(Some(u64::MAX))
            );
        }
    }
}
