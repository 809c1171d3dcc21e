//! What the background thread does: it drives the shard for programs that do not call, sleeps on
//! the port, and steps aside while the program drives.

use std::time::Duration;

use rocinante_stack::types::Time;

use super::aside::Aside;
use super::core::{Core, HELD_ONLY, NOWHERE};
use super::shard::Shard;
use super::spin::Spin;
use crate::provider::sync::{
    Instant, Mutex, MutexGuard, Ordering, fence, processor, spin_loop, yield_now,
};
use crate::provider::wake::BorrowedFd;
use crate::provider::wakers::Woken;

/// The background thread was not given the processor if it sleeps longer by this.
const LATE: Duration = Duration::from_micros(500);
impl Core {
    /// What the background thread does until the device is closed.
    pub(crate) fn background(&self) {
        prepare_to_block();
        let mut seen = self.epoch.load(Ordering::Relaxed);
        let mut aside = Aside::new();
        let mut active_until = Instant::now();
        let mut spin = Spin::new();
        let mut shares = false;
        // It was woken for something, or was not given the processor in time, as the program may
        // not be either: where many threads want it, a thread that goes to sleep again without a
        // look may sleep for as long as a connection lasts.
        let mut look = false;
        while !self.stop.load(Ordering::SeqCst) {
            self.rounds.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let epoch = self.epoch.load(Ordering::Relaxed);
            // A round that only looks leaves what the program expects to the next round.
            let steadily = !look && epoch != seen && self.is_polled_steadily(&aside);
            // Work that was left while this thread held the lock is this thread's.
            fence(Ordering::SeqCst);
            let rung = self.staging.has_some();
            let driven = epoch != seen || self.waiters.load(Ordering::SeqCst) > 0;
            if !rung && driven && self.sleepers.load(Ordering::SeqCst) == 0 {
                if std::mem::take(&mut look) {
                    self.look(false);
                    continue;
                }
                // The program drives, or sleeps on the port itself: look again in a while whether
                // it still does.
                if epoch == seen {
                    aside.waited();
                } else if aside.driven(steadily) {
                    // It was left alone for long, and may have stopped at once.
                    self.look(false);
                }
                seen = epoch;
                look = match self.rest(aside.pause()) {
                    Some(woken) => woken,
                    None if aside.is_steady() => self.yield_to_poller(aside.pause()),
                    None => self.stand_aside(aside.pause(), epoch),
                };
                if self.waiters.load(Ordering::SeqCst) > 0 {
                    self.look(true);
                }
                continue;
            }
            let Some(mut shard) = self.shard.try_lock() else {
                yield_now();
                continue;
            };
            self.take_staged(&mut shard);
            if shard.drive(false) {
                active_until = Instant::now() + spin.span();
                if shard.is_watched() {
                    self.leave_unwatched(&mut shard);
                }
            }
            if std::mem::take(&mut look) {
                shard.hear();
            }
            let mut woken = Woken::default();
            self.events.collect(&mut shard, &mut woken);
            if !woken.is_empty() || !shares && Instant::now() < active_until {
                drop(shard);
                drop(woken);
                spin_loop();
                continue;
            }
            let (port, sleep) = self.watched(&mut shard, None);
            let asleep = Instant::now();
            look = self.park(shard, port, sleep, || true);
            let slept = asleep.elapsed();
            spin.slept(slept, look);
            // The program has not polled since it was to be looked at: nobody else watches the
            // port.
            let epoch = self.epoch.load(Ordering::Relaxed);
            if self.polled_last.load(Ordering::Relaxed) == epoch {
                seen = epoch;
            }
            // If threads sleep on the port, too, nothing may have happened for long enough to rest.
            aside.slept(if epoch == seen { slept } else { Duration::ZERO });
            // Where the program has the same processor, it would wait for the end of every spin,
            // and for nothing else.
            shares = self.caller_on.swap(NOWHERE, Ordering::Relaxed) == processor();
        }
    }

    /// Sleeps for as long as a thread of the program sleeps on the port and nothing is due. Returns
    /// whether something was; `None` if it is too early for that, or somebody drives.
    fn rest(&self, aside: Duration) -> Option<bool> {
        if aside < Aside::MAX {
            return None;
        }
        let shard = self.shard.try_lock()?;
        self.resting.store(true, Ordering::SeqCst);
        let woken = self.park(shard, None, None, || self.waiters.load(Ordering::SeqCst) > 0);
        self.resting.store(false, Ordering::SeqCst);
        Some(woken)
    }

    /// Sleeps for about `pause`, unless what is held must go. Returns whether it became much
    /// longer.
    pub(super) fn stand_aside(&self, pause: Duration, epoch: u64) -> bool {
        let mut pause = pause;
        if pause > Aside::MIN {
            self.parked_until.store(HELD_ONLY, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            // A thread that drove or rang just before that did not see it.
            if self.epoch.load(Ordering::Relaxed) != epoch || self.staging.has_some() {
                pause = Aside::MIN;
            }
        }
        let late = self.sleep_for(pause);
        self.parked_until.store(0, Ordering::SeqCst);
        late
    }

    /// The same for a program that polls without pause: it sends what is held, too.
    fn yield_to_poller(&self, pause: Duration) -> bool {
        self.yields.store(true, Ordering::Relaxed);
        let late = self.sleep_for(pause);
        self.yields.store(false, Ordering::Relaxed);
        late
    }

    /// Sleeps unless somebody calls. Returns whether it became much longer.
    fn sleep_for(&self, pause: Duration) -> bool {
        let asleep = Instant::now();
        self.calls.wait(None, Some(pause));
        asleep.elapsed() > pause + LATE
    }

    /// Whether the program, which has polled since the last look, did so just now and has not asked
    /// for an event since.
    fn is_polled_steadily(&self, aside: &Aside) -> bool {
        let expects =
            self.expects.load(Ordering::Relaxed) && self.expects.swap(false, Ordering::Relaxed);
        let just_now =
            || self.shard.try_lock().is_none_or(|shard| shard.was_driven_within(Aside::MIN));
        !expects
            && self.sleepers.load(Ordering::Relaxed) == 0
            && (aside.is_first_look() || just_now())
    }

    /// Drives once, in place of the program, or only if a deadline has passed: a thread that sleeps
    /// on the port knows only those that were set when it fell asleep.
    fn look(&self, if_due: bool) {
        if let Some(mut shard) = self.shard.try_lock()
            && (!if_due || shard.needed().is_some_and(|due| due <= shard.now()))
        {
            self.take_staged(&mut shard);
            shard.drive(false);
            if !if_due {
                shard.hear();
            }
            let mut woken = Woken::default();
            self.events.collect(&mut shard, &mut woken);
            drop(shard);
            drop(woken);
        }
    }

    /// Sleeps, if it still `may`, until something is due, or `port` has something, or somebody
    /// calls. Returns whether there is something to do: the thread that calls may do it itself.
    fn park(
        &self,
        mut shard: MutexGuard<'_, Shard>,
        port: Option<(BorrowedFd<'_>, bool)>,
        at_most: Option<Duration>,
        may: impl FnOnce() -> bool,
    ) -> bool {
        let at_most = at_most.into_iter().chain(shard.tell()).min();
        let (now, due) = (shard.now(), shard.needed());
        self.parked_until.store(due.map_or(u64::MAX, |due| due.0), Ordering::SeqCst);
        drop(shard);
        fence(Ordering::SeqCst);
        let mut woken = false;
        let awaited = self.staging.has_some() || self.stop.load(Ordering::SeqCst);
        if !awaited && may() {
            let sleep = due.map(|due: Time| Duration::from_nanos(due.since(now)));
            let sleep = sleep.into_iter().chain(at_most).min();
            woken = self.calls.wait(port, sleep);
        }
        self.parked_until.store(0, Ordering::SeqCst);
        woken
    }
}

/// A thread that waits for a lock for the first time allocates its place in the queue: better now
/// than while packets flow.
fn prepare_to_block() {
    let lock = Mutex::new(());
    let _held = lock.lock();
    let _never = lock.try_lock_for(Duration::from_nanos(1));
}
