//! Which thread drives the device, and when.
//!
//! A thread that calls `post_send` or `poll` drives the shard on the spot. A background thread
//! (`background.rs`) does it for programs that do not call. `watch.rs` has its state.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::AtomicU64 as Count;
use std::time::Duration;

use rocinante_stack::types::Time;

use super::super::events::Events;
use super::super::shard::Shard;
use super::super::staging::Staging;
use super::watch::{Call, Event, Watch};
use crate::provider::sync::{
    AtomicBool, AtomicU32, AtomicU64, Instant, Mutex, MutexGuard, Ordering, fence, processor,
};
use crate::provider::wake::{self, AsFd as _, BorrowedFd, Calls, OwnedFd};
use crate::provider::wakers::Woken;
use crate::tuning::standby;

/// The shard and the state by which its drivers agree.
#[derive(Debug)]
pub struct Core {
    pub(crate) shard: Mutex<Shard>,
    /// Work that was left for the thread that holds the lock.
    pub(crate) staging: Arc<Staging>,
    /// The state of the background thread, and the sleeping threads of the program.
    pub(super) watch: Watch,
    /// Moves whenever the program polls.
    pub(super) polls: AtomicU64,
    /// The value of `polls` when the background thread looked last, or was called to look soon.
    pub(super) polls_seen: AtomicU64,
    /// The processor on which the program last did something while the background thread slept;
    /// [`NOWHERE`] if it has not.
    pub(super) caller_on: AtomicU32,
    /// The port's descriptor, for waiting without the lock.
    port_fd: OwnedFd,
    /// A thread that polls sleeps on the port.
    rested_on: AtomicBool,
    /// For the background thread.
    pub(super) calls: Calls,
    /// Rounds of the background thread. No order with anything else depends on it, so the models of
    /// the threads do without it.
    pub(crate) rounds: Count,
    pub(crate) events: Arc<Events>,
}

/// For [`Core::caller_on`].
pub(super) const NOWHERE: u32 = u32::MAX;

impl Core {
    pub(crate) fn new(shard: Shard, events: Arc<Events>) -> std::io::Result<Self> {
        let port_fd = wake::apart(shard.io.wait_fd().try_clone_to_owned()?);
        Ok(Self {
            port_fd,
            staging: shard.router.staging.clone(),
            shard: Mutex::new(shard),
            watch: Watch::new(),
            polls: AtomicU64::new(0),
            polls_seen: AtomicU64::new(0),
            caller_on: AtomicU32::new(NOWHERE),
            rested_on: AtomicBool::new(false),
            calls: Calls::new()?,
            rounds: Count::new(0),
            events,
        })
    }

    /// Locks the shard for something else than driving it.
    pub fn hold(&self) -> Held<'_> {
        Held { core: self, shard: Some(self.shard.lock()) }
    }

    /// Drives the shard unless another thread does, for a program that will do so again. Returns
    /// whether anything happened.
    #[inline]
    pub(crate) fn drive(&self) -> bool {
        self.note_poll();
        let mut any = false;
        self.drive_and(true, &mut Woken::default(), |shard, busy| {
            any |= busy;
            if shard.drivers.is_watched() {
                self.leave_unwatched(shard);
            }
        });
        any
    }

    /// The same for a program that may not.
    #[inline]
    pub(crate) fn drive_once(&self) {
        self.drive_and(true, &mut Woken::default(), |_, _| {});
    }

    /// The same for a task. It sleeps if it finds nothing, so nothing waits for its next call.
    #[inline]
    pub(crate) fn drive_for_task(&self) {
        self.drive_and(false, &mut Woken::default(), |_, _| {});
    }

    /// The same, and tells `then` each time whether anything happened. Adds the tasks to wake to
    /// `woken`.
    #[inline]
    fn drive_and(&self, hold: bool, woken: &mut Woken, mut then: impl FnMut(&mut Shard, bool)) {
        while let Some(mut shard) = self.shard.try_lock() {
            shard.take_staged();
            let busy = shard.drive(hold);
            then(&mut shard, busy);
            if !self.release_into(shard, woken) {
                return;
            }
        }
    }

    /// The caller polls the port, so it stops the port's notifications, unless another thread
    /// sleeps until they come.
    ///
    /// While the background thread sleeps on the port, only a program that polls all the time does
    /// so. A program that polls when its own loop wakes it, or now and then, needs the background
    /// thread to bring packets.
    #[cold]
    pub(super) fn leave_unwatched(&self, shard: &mut Shard) {
        let view = self.watch.view();
        if view.is_waited() || view.is_slept_on() {
            return;
        }
        let unwatched = if view.is_asleep() {
            let spins = shard.drivers.polls_without_pause();
            if spins {
                // The background thread looks whether the program goes on, and handles deadlines.
                let left = Duration::from_nanos(shard.drivers.parked_until().since(shard.now()));
                self.note_polls_seen();
                self.tell(Event::Polled, standby::MIN.min(left));
            }
            spins
        } else {
            shard.drivers.is_busy()
        };
        if unwatched {
            shard.watch(false);
        }
    }

    /// The program may be about to sleep on something that only the background thread brings. So
    /// that thread looks at it as often as at any program, and soon if it left this one alone.
    #[inline]
    pub(crate) fn expect(&self) {
        if !self.watch.view().wants_event() {
            self.tell(Event::Armed, standby::MIN);
        }
    }

    /// Changes the state of the background thread, and wakes it as that wants it.
    fn tell(&self, event: Event, time: Duration) {
        self.call(self.watch.on(event), time);
    }

    /// Wakes the background thread at once or after `time`, or not at all.
    fn call(&self, call: Call, time: Duration) {
        match call {
            Call::No | Call::IfWaited => {}
            Call::InTime | Call::Soon => self.calls.wake_in(time),
            Call::Now => self.calls.wake(),
        }
    }

    /// The background thread is about to be called to look soon. If the program has not polled
    /// again by then, it polls no more.
    fn note_polls_seen(&self) {
        self.polls_seen.store(self.polls.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// The program polls: the background thread may stand aside.
    #[inline]
    pub(crate) fn note_poll(&self) {
        // Lost increments do no harm: the number only has to move.
        self.polls.store(self.polls.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    /// Unlocks, and wakes the tasks whose completions or events are there. Returns whether another
    /// thread left work meanwhile.
    #[inline]
    pub(crate) fn release(&self, shard: MutexGuard<'_, Shard>) -> bool {
        self.release_into(shard, &mut Woken::default())
    }

    /// The same, and adds the tasks to `woken`: the thread may hold another shard.
    #[inline]
    fn release_into(&self, mut shard: MutexGuard<'_, Shard>, woken: &mut Woken) -> bool {
        self.events.collect(&mut shard, woken);
        if self.watch.view().is_asleep() {
            self.caller_on.store(processor(), Ordering::Relaxed);
            if let Some(due) = shard.needed()
                && due < shard.drivers.parked_until()
            {
                self.arm_wakeup(&mut shard, due);
            }
        }
        drop(shard);
        fence(Ordering::SeqCst);
        self.staging.has_some()
    }

    /// Has the background thread wake in time: it sleeps longer than the engine can wait. Not at
    /// once: the program is busy, perhaps on the same processor, and waits for an answer.
    #[cold]
    fn arm_wakeup(&self, shard: &mut Shard, due: Time) {
        let now = shard.now();
        if due > now {
            shard.drivers.park_until(due);
            self.tell(Event::Earlier, Duration::from_nanos(due.since(now)));
        } else {
            self.note_polls_seen();
            self.tell(Event::Overdue, standby::MIN);
        }
    }

    /// Another shard left mail: a thread that drives this one finds it; without one, the background
    /// thread shall.
    pub(crate) fn kick(&self) {
        fence(Ordering::SeqCst);
        let view = self.watch.view();
        // Otherwise it looks within a moment, or the program drives.
        if view.is_asleep() || view.is_waited() {
            self.tell(Event::Mail, Duration::ZERO);
        }
    }

    /// A thread of the program is about to sleep on something that this shard and others bring: the
    /// background thread watches the port until [`wakes`](Self::wakes).
    pub(crate) fn sleeps(&self) {
        let call = self.watch.on(Event::Sleeps);
        self.drive();
        self.call(call, Duration::ZERO);
    }

    /// That thread is awake.
    pub(crate) fn wakes(&self) {
        self.tell(Event::Wakes, Duration::ZERO);
    }

    /// Sleeps until the port or `fd` has something, or `until`; then drives. For a thread of the
    /// program's that waits.
    pub(crate) fn wait(&self, fd: BorrowedFd<'_>, until: Option<Instant>) {
        let (port, sleep) = self.waits(until);
        self.waited(wake::wait(port, fd, sleep) && port.is_some());
    }

    /// A thread of the program is about to sleep on the port, and on a descriptor of its own, until
    /// `until`: the port to watch, if it shall, and the longest sleep. After it, and however it
    /// ends, [`waited`](Self::waited) follows.
    pub(crate) fn waits(
        &self,
        until: Option<Instant>,
    ) -> (Option<(BorrowedFd<'_>, bool)>, Option<Duration>) {
        self.tell(Event::Waits, Duration::ZERO);
        let sleep = until.map(|until| until.saturating_duration_since(Instant::now()));
        let Some(mut shard) = self.shard.try_lock() else {
            // The thread that drives will find the completion that this one waits for, or leave it
            // to the next.
            return (None, Some(sleep.unwrap_or(standby::MIN).min(standby::MIN)));
        };
        let (mut port, mut sleep) = (None, sleep);
        shard.take_staged();
        let busy = shard.drive(false);
        if !busy {
            let now = shard.now();
            if let Some(due) = shard.deadline() {
                let due = Duration::from_nanos(due.since(now));
                sleep = Some(sleep.map_or(due, |sleep| sleep.min(due)));
            }
            (port, sleep) = self.watched(&mut shard, sleep);
        } else {
            sleep = Some(Duration::ZERO);
        }
        let mut woken = Woken::default();
        self.events.collect(&mut shard, &mut woken);
        drop(shard);
        fence(Ordering::SeqCst);
        drop(woken);
        if self.staging.has_some() {
            sleep = Some(Duration::ZERO);
        }
        (port, sleep)
    }

    /// The sleep is over; `woken` if the port or the time ended it. Drives.
    pub(crate) fn waited(&self, mut woken: bool) {
        // A poll counts only if something arrived: then the background thread stands aside. A
        // wake-up without a datagram is a change of the network.
        self.drive_and(true, &mut Woken::default(), |shard, busy| {
            if busy {
                self.note_poll();
            }
            if std::mem::take(&mut woken) {
                shard.hear();
            }
        });
        // If it was the last, no thread watches the port now: one that rests is woken.
        self.tell(Event::Leaves, Duration::ZERO);
    }

    /// As [`wait`](Self::wait), for a thread that polls. Of several, one watches the port: a packet
    /// wakes no other, and a completion for another wakes that one by its `fd`.
    pub(crate) fn rest(&self, fd: BorrowedFd<'_>, until: Instant) {
        if self.rested_on.swap(true, Ordering::Relaxed) {
            wake::wait(None, fd, Some(until.saturating_duration_since(Instant::now())));
            return;
        }
        self.wait(fd, Some(until));
        self.rested_on.store(false, Ordering::Relaxed);
    }

    /// The port's descriptor to wait on, with whether to wait for room to send, and the longest
    /// sleep. None for a broken port, which is always ready, and a flooded one, which is at once.
    pub(super) fn watched(
        &self,
        shard: &mut Shard,
        sleep: Option<Duration>,
    ) -> (Option<(BorrowedFd<'_>, bool)>, Option<Duration>) {
        if shard.io.is_broken() || shard.is_flooded() {
            return (None, sleep);
        }
        if !shard.watch(true) {
            return (None, Some(sleep.unwrap_or(standby::MIN).min(standby::MIN)));
        }
        (Some((self.port_fd.as_fd(), shard.io.wants_write())), sleep)
    }

    /// Ends the background thread.
    pub(crate) fn shut_down(&self) {
        self.tell(Event::Stop, Duration::ZERO);
    }
}

/// The locked shard. A thread that posts meanwhile cannot drive it: that is made up for when it is
/// unlocked.
pub struct Held<'a> {
    core: &'a Core,
    shard: Option<MutexGuard<'a, Shard>>,
}

impl Deref for Held<'_> {
    type Target = Shard;

    fn deref(&self) -> &Shard {
        self.shard.as_ref().expect("locked until it is dropped")
    }
}

impl DerefMut for Held<'_> {
    fn deref_mut(&mut self) -> &mut Shard {
        self.shard.as_mut().expect("locked until it is dropped")
    }
}

impl Held<'_> {
    /// Unlocks it while the thread holds another shard. Adds the tasks to wake to `woken`.
    pub(crate) fn release_into(mut self, woken: &mut Woken) {
        self.unlock(woken);
    }

    fn unlock(&mut self, woken: &mut Woken) {
        let Some(mut shard) = self.shard.take() else { return };
        // Staged requests may have completed at once, and no other thread need drive soon.
        shard.deliver();
        if self.core.release_into(shard, woken) {
            self.core.drive_and(true, woken, |_, _| {});
        }
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.unlock(&mut Woken::default());
    }
}
