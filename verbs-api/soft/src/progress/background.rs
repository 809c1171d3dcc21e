//! The background thread: it drives the shard for programs that do not call, sleeps on the port,
//! and steps aside while the program drives.

use std::time::Duration;

use rocinante_stack::types::Time;

use super::super::shard::Shard;
use super::core::{Core, NOWHERE};
use super::spin::Spin;
use super::standby::Standby;
use super::watch::State;
use crate::provider::sync::{Instant, Mutex, MutexGuard, Ordering, fence, processor, spin_loop};
use crate::provider::wake::BorrowedFd;
use crate::provider::wakers::Woken;
use crate::tuning::standby::{self, LATE};

impl Core {
    /// The background thread's loop until the device is closed.
    pub(crate) fn background(&self) {
        prepare_to_block();
        let mut standby = Standby::new();
        let mut active_until = Instant::now();
        let mut spin = Spin::new();
        let mut shares = false;
        // It was woken for something, or was not given the processor in time, as the program may
        // not be either: where many threads want it, a thread that goes to sleep again without a
        // look may sleep for as long as a connection lasts.
        let mut look = false;
        while !self.watch.view().is_stopped() {
            self.rounds.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let polls = self.polls.load(Ordering::Relaxed);
            let polled = polls != self.polls_seen.load(Ordering::Relaxed);
            // A round that only looks leaves posted requests to the next round.
            let steadily = !look && polled && self.is_polled_steadily(&standby);
            // Work that was left while this thread held the lock is this thread's.
            fence(Ordering::SeqCst);
            let rung = self.staging.has_some();
            let view = self.watch.view();
            let leaves = polled && !standby.is_needed();
            if !rung && (leaves || view.is_waited()) && !view.is_slept_on() {
                if std::mem::take(&mut look) {
                    self.look(false);
                    continue;
                }
                // The program drives, or sleeps on the port itself: look again in a while whether
                // it still does.
                if !polled {
                    standby.waited();
                } else if standby.driven(steadily) {
                    // It was left alone for long, and may have stopped at once.
                    self.look(false);
                } else if standby.moment().is_some_and(|moment| !self.is_driven_within(moment)) {
                    standby.looked(self.look(false));
                }
                self.polls_seen.store(polls, Ordering::Relaxed);
                look = self.stand_by(&standby);
                if self.watch.view().is_waited() {
                    self.look(true);
                }
                continue;
            }
            // A thread that holds it and does not run may wait for this processor.
            let Some(mut shard) = self.shard.try_lock_for(standby::MIN) else { continue };
            shard.take_staged();
            let now = Instant::now();
            let found = shard.drive(false);
            spin.looked(found, now);
            if found {
                active_until = Instant::now() + spin.span();
                if shard.drivers.is_watched() {
                    self.leave_unwatched(&mut shard);
                }
            }
            if std::mem::take(&mut look) {
                shard.hear();
            }
            let mut woken = Woken::default();
            self.events.collect(&mut shard, &mut woken);
            if !woken.is_empty() || !shares && now < active_until {
                drop(shard);
                drop(woken);
                spin_loop();
                continue;
            }
            shard.drivers.assist(standby.is_needed());
            let (port, sleep) = self.watched(&mut shard, None);
            let asleep = Instant::now();
            look = self.park(State::Watching, shard, port, sleep);
            let slept = asleep.elapsed();
            spin.slept(slept, look);
            // If threads sleep on the port, too, nothing may have happened for long enough to rest.
            let polled =
                self.polls.load(Ordering::Relaxed) != self.polls_seen.load(Ordering::Relaxed);
            standby.slept(if polled { Duration::ZERO } else { slept });
            // Where the program has the same processor, it would wait for the end of every spin,
            // and for nothing else.
            shares = self.caller_on.swap(NOWHERE, Ordering::Relaxed) == processor();
        }
    }

    /// Leaves the port to the program for a while. Returns whether to look at the port before the
    /// next: something was due, or the thread was not given the processor in time.
    fn stand_by(&self, standby: &Standby) -> bool {
        let pause = standby.pause();
        if standby.is_steady() {
            // The program sends held acknowledgements, too.
            if self.watch.enter(State::CallerPolls) {
                let late = self.sleep_for(pause);
                self.watch.wake_up();
                return late;
            }
        } else if pause > standby::MIN
            && let Some(shard) = self.shard.try_lock()
        {
            if pause >= standby::MAX {
                return self.park(State::Resting, shard, None, None);
            }
            let asleep = Instant::now();
            self.park(State::Standby, shard, None, Some(pause));
            return asleep.elapsed() > pause + LATE;
        }
        self.sleep_for(standby::MIN)
    }

    /// Sleeps unless another thread calls. Returns whether it became much longer.
    fn sleep_for(&self, pause: Duration) -> bool {
        let asleep = Instant::now();
        self.calls.wait(None, Some(pause));
        asleep.elapsed() > pause + LATE
    }

    /// Whether the program, which has polled since the last look, did so just now and has not asked
    /// for an event since.
    fn is_polled_steadily(&self, standby: &Standby) -> bool {
        let wants_event = self.watch.view().wants_event() && self.watch.take_wants_event();
        !wants_event && (standby.is_first_look() || self.is_driven_within(standby::MIN))
    }

    /// Whether the program drives, or did in the last `span`.
    fn is_driven_within(&self, span: Duration) -> bool {
        self.shard.try_lock().is_none_or(|shard| shard.drivers.has_driven_within(span, shard.now()))
    }

    /// Drives once, in place of the program, or only if a deadline has passed: a thread that sleeps
    /// on the port knows only those that were set when it fell asleep. Returns whether there was
    /// something to do.
    fn look(&self, if_due: bool) -> bool {
        let mut busy = false;
        if let Some(mut shard) = self.shard.try_lock()
            && (!if_due || shard.needed().is_some_and(|due| due <= shard.now()))
        {
            shard.take_staged();
            busy = shard.drive(false);
            if !if_due {
                shard.hear();
            }
            let mut woken = Woken::default();
            self.events.collect(&mut shard, &mut woken);
            drop(shard);
            drop(woken);
        }
        busy
    }

    /// Sleeps as `state`, if it still may, until something is due, or `port` has something, or
    /// another thread calls. Returns whether there is something to do: the thread that calls may do
    /// it itself.
    pub(super) fn park(
        &self,
        state: State,
        mut shard: MutexGuard<'_, Shard>,
        port: Option<(BorrowedFd<'_>, bool)>,
        at_most: Option<Duration>,
    ) -> bool {
        let at_most = at_most.into_iter().chain(shard.tell()).min();
        let (now, due) = (shard.now(), shard.needed());
        shard.drivers.park_until(due.unwrap_or(Time(u64::MAX)));
        let may_sleep = self.watch.enter(state);
        drop(shard);
        fence(Ordering::SeqCst);
        let mut woken = false;
        if may_sleep && !self.staging.has_some() {
            let sleep = due.map(|due: Time| Duration::from_nanos(due.since(now)));
            let sleep = sleep.into_iter().chain(at_most).min();
            woken = self.calls.wait(port, sleep);
        }
        self.watch.wake_up();
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
