//! The completions in a queue, and the events for its channel.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::task::Waker;

use rocinante_stack::types::Qpn;
use rocinante_stack::verbs::Cqe;

use crate::provider::listeners::fresh_number;
use crate::provider::sync::{AtomicBool, AtomicU8, Mutex, MutexGuard, Ordering};
use crate::provider::wake::{self, AsFd, BorrowedFd, OwnedFd};
use crate::provider::wakers::{Wakers, Woken};

/// The part of a completion queue that the driving thread uses.
#[derive(Debug)]
pub struct CqShared {
    pub id: u32,
    /// The queue's number in its channel's events.
    pub(super) number: u64,
    ring: Mutex<Ring>,
    armed: AtomicU8,
    ended: AtomicU8,
    channel: Option<Arc<ChannelShared>>,
    /// Tasks that wait for completions. A queue with a channel has none: the channel's tasks wait.
    pub(super) tasks: Wakers,
    /// Threads that poll and sleep for a moment ([`rest`](super::cq::Cq::rest)), and whether there
    /// are some.
    pollers: Wakers,
    rested: AtomicBool,
}

/// The completions that the program has not taken, and their limit.
#[derive(Debug)]
struct Ring {
    completions: VecDeque<Cqe>,
    capacity: usize,
    /// The most completions of a [push](CqShared::push); none where faults decide on each.
    room: usize,
}

/// The result of a push.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pushed {
    /// They are in the queue.
    All,
    /// Some did not fit; `news` if this is the first overflow.
    Overflow { news: bool },
    /// None is: faults are to decide on each first.
    Not,
}

/// Why no more completions come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// Completions were lost.
    Overflow,
    /// The interface is gone.
    Gone,
}

const DISARMED: u8 = 0;
const ARMED_SOLICITED: u8 = 1;
const ARMED: u8 = 2;

/// For [`CqShared::ended`].
const OPEN: u8 = 0;
const OVERFLOWED: u8 = 1;
const GONE: u8 = 2;

impl CqShared {
    pub(super) fn new(id: u32, capacity: usize, channel: Option<Arc<ChannelShared>>) -> Self {
        Self {
            id,
            number: fresh_number(),
            ring: Mutex::new(Ring {
                completions: VecDeque::with_capacity(capacity),
                capacity,
                room: capacity,
            }),
            armed: AtomicU8::new(DISARMED),
            ended: AtomicU8::new(OPEN),
            channel,
            tasks: Wakers::default(),
            pollers: Wakers::with_room(4),
            rested: AtomicBool::new(false),
        }
    }

    /// Faults decide on its completions.
    pub(super) fn judged(self) -> Self {
        self.ring.lock().room = 0;
        self
    }

    /// Has a thread woken once that polls, before the next completion can be missed. Returns
    /// whether there is one already.
    pub(super) fn rests(&self, thread: &Waker) -> bool {
        self.pollers.set(0, thread);
        self.rested.store(true, Ordering::Relaxed);
        // As with a queue that is armed: the lock makes it visible to the next push.
        !self.ring.lock().completions.is_empty() || self.has_ended()
    }

    /// Wakes the threads that poll.
    #[inline]
    fn wake_pollers(&self, woken: &mut Woken) {
        if self.rested.load(Ordering::Relaxed) {
            self.rested.store(false, Ordering::Relaxed);
            woken.append(self.pollers.take());
        }
    }

    /// Appends completions. Adds the tasks that wait for them to `woken`.
    pub(super) fn push(&self, completions: impl Iterator<Item = Cqe>, woken: &mut Woken) -> Pushed {
        self.push_within(completions, |ring| ring.room, woken)
    }

    /// Appends completions on which faults have decided; with `overrun`, as if the next did not
    /// fit.
    #[cold]
    pub(super) fn push_judged(
        &self,
        completions: &[Cqe],
        overrun: bool,
        woken: &mut Woken,
    ) -> Pushed {
        let pushed = self.push_within(completions.iter().copied(), |ring| ring.capacity, woken);
        if overrun && pushed == Pushed::All { self.overrun(woken) } else { pushed }
    }

    fn push_within(
        &self,
        completions: impl Iterator<Item = Cqe>,
        room: impl Fn(&Ring) -> usize,
        woken: &mut Woken,
    ) -> Pushed {
        let mut solicited = false;
        let mut fits = true;
        let mut ring = self.ring.lock();
        for cqe in completions {
            if ring.completions.len() >= room(&ring) {
                if room(&ring) == 0 {
                    return Pushed::Not;
                }
                fits = false;
                break;
            }
            solicited |= cqe.solicited;
            ring.completions.push_back(cqe);
        }
        drop(ring);
        self.wake_pollers(woken);
        let overflow = if fits { Pushed::All } else { self.overrun(woken) };
        // If a thread armed the queue and then found it empty, it took the lock before this push.
        // That makes its arming visible here.
        match self.armed.load(Ordering::Relaxed) {
            ARMED => self.announce(woken),
            ARMED_SOLICITED if solicited => self.announce(woken),
            _ => {}
        }
        overflow
    }

    /// A completion is lost.
    fn overrun(&self, woken: &mut Woken) -> Pushed {
        let news = self.ended.fetch_max(OVERFLOWED, Ordering::Relaxed) == OPEN;
        if news {
            self.announce(woken);
        }
        Pushed::Overflow { news }
    }

    /// Disarms, and if the queue was armed notifies the channel, or the tasks.
    fn announce(&self, woken: &mut Woken) {
        if self.armed.swap(DISARMED, Ordering::Relaxed) == DISARMED {
            return;
        }
        woken.append(match &self.channel {
            Some(channel) => channel.push(self.number),
            None => self.tasks.take(),
        });
    }

    /// Requests an event for the next push. Of two requests the broader stays.
    pub(super) fn arm(&self, solicited_only: bool) {
        let level = if solicited_only { ARMED_SOLICITED } else { ARMED };
        self.armed.fetch_max(level, Ordering::Relaxed);
    }

    /// Most polls find nothing: that costs the lock and no more.
    #[inline(never)]
    pub(super) fn take<T>(&self, out: &mut [T], make: impl Fn(Cqe) -> T) -> usize {
        let ring = self.ring.lock();
        if ring.completions.is_empty() { 0 } else { take_some(ring, out, make) }
    }

    pub(super) fn take_one(&self) -> Option<Cqe> {
        self.ring.lock().completions.pop_front()
    }

    pub(super) fn capacity(&self) -> usize {
        self.ring.lock().capacity
    }

    /// Makes room for another number of completions; with an error if more are waiting.
    pub(super) fn resize(&self, capacity: usize) -> Result<(), usize> {
        let ring = &mut *self.ring.lock();
        let waiting = ring.completions.len();
        if waiting > capacity {
            return Err(waiting);
        }
        ring.completions.reserve_exact(capacity - waiting);
        ring.completions.shrink_to(capacity);
        ring.capacity = capacity;
        ring.room = if ring.room == 0 { 0 } else { capacity };
        Ok(())
    }

    /// Removes the completions of a queue pair.
    pub(super) fn forget(&self, qpn: Qpn) {
        self.ring.lock().completions.retain(|cqe| cqe.qpn != qpn);
    }

    /// The interface is gone, and all completions are in the queues. Adds the tasks that wait for
    /// more to `woken`.
    pub(super) fn gone(&self, woken: &mut Woken) {
        self.ended.fetch_max(GONE, Ordering::Relaxed);
        self.wake_pollers(woken);
        self.announce(woken);
    }

    /// Whether completions were lost, or the interface is gone.
    #[inline]
    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Relaxed) != OPEN
    }

    /// Why no more completions come, once the program has taken all that did.
    pub(super) fn end(&self) -> Option<End> {
        let end = match self.ended.load(Ordering::Relaxed) {
            OPEN => return None,
            OVERFLOWED => End::Overflow,
            _ => End::Gone,
        };
        self.ring.lock().completions.is_empty().then_some(end)
    }

    /// The queue is being destroyed: removes its events from the channel.
    pub(super) fn leave_channel(&self) {
        if let Some(channel) = &self.channel {
            channel.forget(self.number);
        }
    }

    pub(super) fn has_channel(&self) -> bool {
        self.channel.is_some()
    }
}

#[inline(never)]
fn take_some<T>(mut ring: MutexGuard<'_, Ring>, out: &mut [T], make: impl Fn(Cqe) -> T) -> usize {
    let mut count = 0;
    for slot in out {
        let Some(cqe) = ring.completions.pop_front() else { break };
        *slot = make(cqe);
        count += 1;
    }
    count
}

/// The part of a channel that the driving thread uses.
#[derive(Debug)]
pub(crate) struct ChannelShared {
    fd: OwnedFd,
    /// Numbers of queues.
    events: Mutex<VecDeque<u64>>,
    /// Tasks that wait for events.
    pub(super) tasks: Wakers,
}

impl ChannelShared {
    pub(super) fn new() -> io::Result<Self> {
        let events = Mutex::new(VecDeque::with_capacity(64));
        Ok(Self { fd: wake::eventfd()?, events, tasks: Wakers::default() })
    }

    fn push(&self, cq: u64) -> Woken {
        let mut events = self.events.lock();
        events.push_back(cq);
        // Under the lock, before a thread can take the event: the descriptor is readable exactly
        // while there are events. Each event notifies anew: a program that waits for edges
        // (`EPOLLET`) takes one event and leaves the others.
        wake::notify(&self.fd);
        drop(events);
        self.tasks.take()
    }

    /// The number of the queue of the next event.
    pub(super) fn next(&self) -> Option<u64> {
        let mut events = self.events.lock();
        let number = events.pop_front();
        if events.is_empty() {
            wake::clear(&self.fd);
        }
        number
    }

    fn forget(&self, cq: u64) {
        let mut events = self.events.lock();
        events.retain(|number| *number != cq);
        if events.is_empty() {
            wake::clear(&self.fd);
        }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
