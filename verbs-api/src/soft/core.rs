//! Which thread drives the device, and when.
//!
//! A thread that calls `post_send` or `poll` drives the shard on the spot. A background thread
//! (`background.rs`) does it for programs that do not call.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::AtomicU64 as Count;
use std::time::Duration;

use super::aside::Aside;
use super::events::Events;
use super::front::{Backlog, QpShared};
use super::shard::Shard;
use super::staging::Staging;
use crate::provider::sync::{
    AtomicBool, AtomicU32, AtomicU64, Instant, Mutex, MutexGuard, Ordering, fence, processor,
};
use crate::provider::wake::{self, AsFd as _, BorrowedFd, Calls, OwnedFd};
use crate::provider::wakers::Woken;

/// The shard and what its drivers need to agree on.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) shard: Mutex<Shard>,
    /// Work that was left for the thread that holds the lock.
    pub(super) staging: Arc<Staging>,
    /// Moves whenever the program polls.
    pub(super) epoch: AtomicU64,
    /// Where that was when the background thread was left to wake later.
    pub(super) polled_last: AtomicU64,
    /// Threads of the program that sleep on the port and drive when it wakes them.
    pub(super) waiters: AtomicU32,
    /// When the background thread will look again, in the shard's time; 0 while it is awake or soon
    /// will be.
    pub(super) parked_until: AtomicU64,
    /// The processor on which the program last did something while the background thread slept;
    /// [`NOWHERE`] if it has not.
    pub(super) caller_on: AtomicU32,
    /// The background thread leaves the port to a thread that sleeps on it, until that one wakes
    /// it.
    pub(super) resting: AtomicBool,
    /// It stands aside for longer than usual, for a program that polls without pause.
    pub(super) yields: AtomicBool,
    /// The program has asked for an event since the background thread looked last.
    pub(super) expects: AtomicBool,
    /// The port's descriptor, for waiting without the lock.
    port_fd: OwnedFd,
    /// For the background thread.
    pub(super) calls: Calls,
    pub(super) stop: AtomicBool,
    /// Threads of the program that sleep on several shards: they leave the ports to the background
    /// threads.
    pub(super) sleepers: AtomicU32,
    /// Rounds of the background thread. No order with anything else depends on it, so the models of
    /// the threads do without it.
    pub(super) rounds: Count,
    pub(crate) events: Arc<Events>,
}

/// For [`Core::caller_on`].
pub(super) const NOWHERE: u32 = u32::MAX;
/// For [`Core::parked_until`]: what is held is due before, and nothing else.
pub(super) const HELD_ONLY: u64 = 1;

impl Core {
    pub(crate) fn new(shard: Shard, events: Arc<Events>) -> std::io::Result<Self> {
        let port_fd = shard.wait_fd().try_clone_to_owned()?;
        Ok(Self {
            port_fd,
            staging: shard.staging.clone(),
            shard: Mutex::new(shard),
            epoch: AtomicU64::new(0),
            polled_last: AtomicU64::new(u64::MAX),
            waiters: AtomicU32::new(0),
            parked_until: AtomicU64::new(0),
            caller_on: AtomicU32::new(NOWHERE),
            resting: AtomicBool::new(false),
            yields: AtomicBool::new(false),
            expects: AtomicBool::new(false),
            calls: Calls::new()?,
            stop: AtomicBool::new(false),
            sleepers: AtomicU32::new(0),
            rounds: Count::new(0),
            events,
        })
    }

    /// Locks the shard for something else than driving it.
    pub(crate) fn hold(&self) -> Held<'_> {
        Held { core: self, shard: Some(self.shard.lock()) }
    }

    /// Drives the shard unless somebody else does, for a program that will do so again.
    #[inline]
    pub(crate) fn drive(&self) {
        self.touch();
        self.drive_and(true, &mut Woken::default(), |shard, _| {
            if shard.is_watched() {
                self.leave_unwatched(shard);
            }
        });
    }

    /// The same for one that may not.
    #[inline]
    pub(crate) fn drive_once(&self) {
        self.drive_and(true, &mut Woken::default(), |_, _| {});
    }

    /// The same for a task, which sleeps if it finds nothing: nothing waits for its next call.
    #[inline]
    pub(crate) fn drive_for_task(&self) {
        self.drive_and(false, &mut Woken::default(), |_, _| {});
    }

    /// The same, and tells `then` each time whether anything happened. Adds the tasks to wake to
    /// `woken`.
    #[inline]
    fn drive_and(&self, hold: bool, woken: &mut Woken, mut then: impl FnMut(&mut Shard, bool)) {
        while let Some(mut shard) = self.shard.try_lock() {
            self.take_staged(&mut shard);
            let busy = shard.drive(hold);
            then(&mut shard, busy);
            if !self.release_into(shard, woken) {
                return;
            }
        }
    }

    /// Somebody looks at the port himself: nobody need be woken by what arrives, unless somebody
    /// else waits for it.
    ///
    /// While the background thread sleeps on the port, that is for a program that polls all the
    /// time: one that looks when its own loop wakes it, or now and then, has nobody else to tell
    /// it.
    #[cold]
    pub(super) fn leave_unwatched(&self, shard: &mut Shard) {
        if self.waiters.load(Ordering::SeqCst) > 0 || self.sleepers.load(Ordering::SeqCst) > 0 {
            return;
        }
        let parked_until = self.parked_until.load(Ordering::Relaxed);
        let unwatched = if parked_until > HELD_ONLY {
            let spins = shard.is_polled_without_pause();
            if spins {
                // Whether the program goes on is to be looked at, and what is due is to be done.
                let left = Duration::from_nanos(parked_until.saturating_sub(shard.now().0));
                self.wake_background_in(Aside::MIN.min(left));
            }
            spins
        } else {
            shard.is_busy()
        };
        if unwatched {
            shard.watch(false);
        }
    }

    /// The program may be about to sleep on something that only the background thread brings: that
    /// one looks as often as at any program, and soon if it left this one alone; a program that
    /// misses it here waits for no more than [`Aside::STEADY_MAX`].
    #[inline]
    pub(crate) fn expect(&self) {
        if !self.expects.load(Ordering::Relaxed) {
            self.expects.store(true, Ordering::Relaxed);
        }
        if self.yields.load(Ordering::Relaxed) && self.yields.swap(false, Ordering::Relaxed) {
            self.calls.wake_in(Aside::MIN);
        }
    }

    /// Has the background thread wake soon, and look whether the program has polled since.
    fn wake_background_in(&self, pause: Duration) {
        self.parked_until.store(0, Ordering::Relaxed);
        self.polled_last.store(self.epoch.load(Ordering::Relaxed), Ordering::Relaxed);
        self.calls.wake_in(pause);
    }

    /// The program polls: the background thread may stand aside.
    #[inline]
    pub(crate) fn touch(&self) {
        // Lost increments do no harm: the number only has to move.
        self.epoch.store(self.epoch.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    /// Unlocks, and wakes the tasks that wait for what was done. Returns whether somebody left work
    /// meanwhile.
    #[inline]
    pub(crate) fn release(&self, shard: MutexGuard<'_, Shard>) -> bool {
        self.release_into(shard, &mut Woken::default())
    }

    /// The same, and adds the tasks to `woken`: the thread may hold another shard.
    #[inline]
    fn release_into(&self, mut shard: MutexGuard<'_, Shard>, woken: &mut Woken) -> bool {
        self.events.collect(&mut shard, woken);
        let due = shard.needed().map_or(u64::MAX, |due| due.0);
        drop(shard);
        fence(Ordering::SeqCst);
        let parked_until = self.parked_until.load(Ordering::Relaxed);
        if parked_until != 0 {
            self.caller_on.store(processor(), Ordering::Relaxed);
            // The background thread sleeps longer than the engine can wait.
            if due < parked_until {
                self.remind();
                // It held the lock, too.
                fence(Ordering::SeqCst);
            }
        }
        self.staging.has_some()
    }

    /// Has the background thread wake in time. Not at once: the program is busy, perhaps on the
    /// same processor, and waits for an answer.
    #[cold]
    fn remind(&self) {
        // A thread that holds the lock reminds for both.
        let Some(shard) = self.shard.try_lock() else { return };
        let Some(due) =
            shard.needed().filter(|due| due.0 < self.parked_until.load(Ordering::Relaxed))
        else {
            return;
        };
        let now = shard.now();
        if due > now {
            self.parked_until.store(due.0, Ordering::Relaxed);
            self.calls.wake_in(Duration::from_nanos(due.since(now)));
        } else {
            self.wake_background_in(Aside::MIN);
        }
    }

    /// Leaves posted work to the thread that holds the lock.
    pub(crate) fn leave(&self, qp: &Arc<QpShared>) {
        self.staging.leave(qp);
    }

    /// Where a queue pair stages requests, with room for so many.
    pub(super) fn spare_backlog(&self, requests: usize) -> Box<Backlog> {
        self.staging.spare_backlog(requests)
    }

    /// Another shard left mail: a thread that drives this one finds it; without one, the background
    /// thread shall.
    pub(crate) fn ring(&self) {
        fence(Ordering::SeqCst);
        // A background thread that stands aside without a time looks again soon, or the program
        // drives.
        if self.parked_until.load(Ordering::Relaxed) != 0
            || self.waiters.load(Ordering::Relaxed) > 0
        {
            self.parked_until.store(0, Ordering::Relaxed);
            self.calls.wake();
        }
    }

    /// A thread of the program is about to sleep on something that this shard and others bring: the
    /// background thread watches the port until [`wakes`](Self::wakes).
    pub(crate) fn sleeps(&self) {
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        self.drive();
        // Also if it stands aside, because the program has just driven.
        self.calls.wake();
    }

    /// That thread is awake.
    pub(crate) fn wakes(&self) {
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Posts what was left.
    #[inline]
    pub(crate) fn take_staged(&self, shard: &mut Shard) {
        self.staging.take(&mut shard.engine, &mut shard.host);
    }

    /// Sleeps until the port or `fd` has something, or `until`; then drives. For a thread of the
    /// program's that waits.
    pub(crate) fn wait(&self, fd: BorrowedFd<'_>, until: Option<Instant>) {
        self.waiters.fetch_add(1, Ordering::SeqCst);
        let mut sleep = until.map(|until| until.saturating_duration_since(Instant::now()));
        let mut port = None;
        if let Some(mut shard) = self.shard.try_lock() {
            self.take_staged(&mut shard);
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
        } else {
            // The thread that drives will complete what this one waits for, or leave it to the
            // next.
            sleep = Some(sleep.unwrap_or(Aside::MIN).min(Aside::MIN));
        }
        let mut woken = wake::wait(port, fd, sleep) && port.is_some();
        // The background thread leaves the port to a program that was given something, and rests on
        // if it was not. If the port woke this thread and there is nothing to receive, it has news.
        self.drive_and(true, &mut Woken::default(), |shard, busy| {
            if busy {
                self.touch();
            }
            if std::mem::take(&mut woken) {
                shard.hear();
            }
        });
        let last = self.waiters.fetch_sub(1, Ordering::SeqCst) == 1;
        // Nobody watches the port now.
        if last && self.resting.swap(false, Ordering::SeqCst) {
            self.calls.wake();
        }
    }

    /// What to wait for besides, the port's descriptor and whether it shall take more; and for how
    /// long. A broken port's would be ready for ever, and a flooded one's at once.
    pub(super) fn watched(
        &self,
        shard: &mut Shard,
        sleep: Option<Duration>,
    ) -> (Option<(BorrowedFd<'_>, bool)>, Option<Duration>) {
        if shard.broken.is_some() || shard.is_flooded() {
            return (None, sleep);
        }
        if !shard.watch(true) {
            return (None, Some(sleep.unwrap_or(Aside::MIN).min(Aside::MIN)));
        }
        (Some((self.port_fd.as_fd(), shard.wants_write())), sleep)
    }

    /// Ends the background thread.
    pub(crate) fn shut_down(&self) {
        self.stop.store(true, Ordering::SeqCst);
        self.calls.wake();
    }
}

/// The locked shard. A thread that posts meanwhile cannot drive it: that is made up for when it is
/// unlocked.
pub(crate) struct Held<'a> {
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
    pub(super) fn release_into(mut self, woken: &mut Woken) {
        self.unlock(woken);
    }

    fn unlock(&mut self, woken: &mut Woken) {
        let Some(mut shard) = self.shard.take() else { return };
        // What was staged may have completed at once, and nobody else need drive soon.
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
