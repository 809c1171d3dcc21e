//! Threads that poll in vain while others want their processor.
//!
//! - Problem: to a scheduler a thread that spins is one that computes. It gets turns of some
//!   milliseconds, and then waits for those of all others, even if a packet arrives for it. And
//!   while it spins, the thread that it waits for may be the one that waits for the processor. A
//!   thread that sleeps is given the processor as soon as a packet wakes it.
//! - Rule: a thread that was kept from the processor for long, and for a good part of the time in
//!   which it could have run, sleeps once it has polled in vain for a moment: until a packet or a
//!   completion comes, and not for long, because it may wait for something else. It has short turns
//!   meanwhile (`slice.rs`), so that it runs soon. After a while it spins again, and learns whether
//!   others still want the processor.
//! - The moment is a tenth of a millisecond: most answers come sooner while both sides run. A
//!   thread that waits for half of its time or more has its peer beside it too seldom for that,
//!   and sleeps at once.
//! - Cost if wrong: a wake-up for each message that a thread waits for.
//! - Measured: `docs/performance/method.md`.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

use super::slice;
use crate::model::turns::Turns;
use crate::provider::wake::{self, AsFd as _, BorrowedFd, OwnedFd};
use crate::tuning::rivals;

/// How often a queue, or a device, was polled in vain.
#[derive(Debug, Default)]
pub(super) struct EmptyPolls {
    polls: AtomicU32,
    /// What `polls` was when a poll found something.
    found: AtomicU32,
}

impl EmptyPolls {
    /// A poll found something.
    #[inline]
    pub(super) fn found(&self) {
        let polls = self.polls.load(Ordering::Relaxed);
        if self.found.load(Ordering::Relaxed) != polls {
            self.found.store(polls, Ordering::Relaxed);
        }
    }

    /// A poll found nothing. Returns until when to sleep, if the thread should not poll on.
    #[inline]
    pub(super) fn missed(&self) -> Option<Instant> {
        // Threads that poll the same queue may lose counts: that does no harm.
        let polls = self.polls.load(Ordering::Relaxed).wrapping_add(1);
        self.polls.store(polls, Ordering::Relaxed);
        if rivals::ENABLED && polls.is_multiple_of(rivals::LOOK) { self.look(polls) } else { None }
    }

    #[cold]
    fn look(&self, polls: u32) -> Option<Instant> {
        let now = Instant::now();
        let row = polls.wrapping_sub(self.found.load(Ordering::Relaxed));
        with_poller(|poller| {
            if row < 2 * rivals::LOOK {
                poller.since = now;
            }
            // Not later: a thread that is warm allocates no more.
            let _ = poller.bell.get_or_insert_with(Bell::new);
            let spin = poller.rivals.looked(now, Turns::of_thread);
            poller.choose_turns(now);
            let spin = spin?;
            (row >= rivals::LOOK && now - poller.since >= spin).then(|| now + rivals::REST)
        })
    }
}

/// A thread's knowledge of the others that want its processor.
#[derive(Debug)]
struct Rivals {
    looked: Option<Instant>,
    /// Its turns when it asked last, and before when it does not ask again.
    turns: Turns,
    ask_at: Option<Instant>,
    /// Until when it sleeps rather than spin, and how long that is from when it was found.
    until: Option<Instant>,
    span: Duration,
    /// How long it polls in vain before it sleeps.
    spin: Duration,
}

impl Rivals {
    fn new() -> Self {
        let (looked, ask_at, until) = (None, None, None);
        let (span, spin) = (rivals::SPAN_MIN, rivals::SPIN);
        Self { looked, turns: Turns::default(), ask_at, until, span, spin }
    }

    /// The thread polls, and has found nothing. Returns after how long it should rather sleep, if
    /// it should.
    fn looked(&mut self, now: Instant, turns: impl FnOnce() -> Option<Turns>) -> Option<Duration> {
        let gap = self.looked.replace(now).map_or(Duration::ZERO, |looked| now - looked);
        if gap > rivals::GAP
            && self.ask_at.is_none_or(|at| at <= now)
            && let Some(turns) = turns()
        {
            self.ask_at = Some(now + rivals::PAUSE);
            let before = std::mem::replace(&mut self.turns, turns);
            let turns = turns.since(before);
            if turns.waited > rivals::GAP / 2 && turns.share() > rivals::SHARE {
                let again = self.until.is_some_and(|until| now < until + self.span);
                self.span =
                    if again { (self.span * 2).min(rivals::SPAN_MAX) } else { rivals::SPAN_MIN };
                // A thread that sleeps waits less: that is no sign that it need not.
                if self.until.is_none_or(|until| until <= now) || turns.share() > rivals::MOST {
                    self.spin =
                        if turns.share() > rivals::MOST { Duration::ZERO } else { rivals::SPIN };
                }
                self.until = Some(now + self.span);
            }
        }
        // A thread that polls now and then does not spin.
        (gap <= rivals::GAP && self.are_there(now)).then_some(self.spin)
    }

    fn are_there(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| now < until)
    }
}

/// The state of a thread that polls.
struct Poller {
    rivals: Rivals,
    /// Since when it polls in vain.
    since: Instant,
    /// The descriptor that wakes it when it sleeps, and the task that stands for it.
    bell: Option<(Arc<Bell>, Waker)>,
    /// The length of its turns before they were made short.
    long_turns: Option<u64>,
}

impl Poller {
    const fn new(rivals: Rivals, since: Instant) -> Self {
        Self { rivals, since, bell: None, long_turns: None }
    }

    /// Gives the thread short turns while it has rivals, and its own ones back afterwards.
    fn choose_turns(&mut self, now: Instant) {
        if !self.rivals.are_there(now) {
            if let Some(length) = self.long_turns.take() {
                slice::set(length);
            }
        } else if self.long_turns.is_none() {
            self.long_turns = slice::shorten();
        }
    }
}

thread_local! {
    static POLLER: RefCell<Poller> =
        RefCell::new(Poller::new(Rivals::new(), Instant::now()));
}

/// Does nothing for a thread that ends, whose own destructors may poll.
fn with_poller<T>(of: impl FnOnce(&mut Poller) -> Option<T>) -> Option<T> {
    POLLER.try_with(|poller| of(&mut poller.borrow_mut())).ok()?
}

/// A descriptor, once it is needed.
#[derive(Default)]
struct Bell(OnceLock<OwnedFd>);

impl Bell {
    fn new() -> (Arc<Self>, Waker) {
        let bell = Arc::<Self>::default();
        (bell.clone(), bell.into())
    }

    fn fd(&self) -> Option<&OwnedFd> {
        if self.0.get().is_none() {
            let _ = self.0.set(wake::eventfd().ok()?);
        }
        self.0.get()
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.0.get().inspect(|fd| wake::notify(fd));
    }
}

/// Calls `sleep` with a task to be woken and a descriptor that is readable once it was. Does
/// nothing if there is no descriptor left.
pub(super) fn with_bell(sleep: impl FnOnce(&Waker, BorrowedFd<'_>)) {
    let own = with_poller(|poller| Some(poller.bell.get_or_insert_with(Bell::new).clone()));
    let Some((bell, task)) = own else { return };
    let Some(fd) = bell.fd() else { return };
    sleep(&task, fd.as_fd());
    wake::clear(fd);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tuning::short_turns::TURN_NS;

    /// In milliseconds.
    fn turns(ran: u64, waited: u64) -> Turns {
        let [ran, waited] = [ran, waited].map(Duration::from_millis);
        Turns { ran, waited, ..Turns::default() }
    }

    fn never() -> Option<Turns> {
        panic!("it has no reason to ask")
    }

    #[test]
    fn a_thread_that_spins_undisturbed_does_not_ask() {
        let mut rivals = Rivals::new();
        let mut now = Instant::now();
        for _ in 0..1000 {
            now += rivals::GAP;
            assert_eq!(rivals.looked(now, never), None);
        }
    }

    #[test]
    fn a_thread_that_waits_for_its_processor_sleeps_and_tries_again_later() {
        let mut rivals = Rivals::new();
        let mut now = Instant::now();
        assert_eq!(rivals.looked(now, never), None);
        let mut waited = 0;
        for times in [1, 2, 4, 8, 16, 16] {
            now += 2 * rivals::PAUSE;
            waited += 20;
            let of_thread = || Some(turns(waited / 5, waited));
            assert_eq!(rivals.looked(now, of_thread), None, "it has slept");
            assert_eq!(rivals.looked(now + rivals::GAP, never), Some(Duration::ZERO));
            now += rivals::SPAN_MIN * times;
            // It has not waited since.
            rivals.looked(now - rivals::GAP, of_thread);
            assert_eq!(rivals.looked(now - rivals::GAP / 2, never), Some(Duration::ZERO));
            assert_eq!(rivals.looked(now, never), None, "{times}");
        }
        now += 2 * rivals::SPAN_MAX;
        rivals.looked(now, || None);
        now += 2 * rivals::GAP;
        // Less than half of the time.
        rivals.looked(now, || Some(turns(waited, waited + 20)));
        assert_eq!(rivals.looked(now + rivals::GAP, never), Some(rivals::SPIN));
        rivals.looked(now + rivals::SPAN_MIN - rivals::GAP, || None);
        assert_eq!(rivals.looked(now + rivals::SPAN_MIN, never), None, "it begins anew");
    }

    /// Such a thread may wait for much else.
    #[test]
    fn a_thread_that_polls_now_and_then_does_not_sleep() {
        let mut rivals = Rivals::new();
        let mut now = Instant::now();
        for round in 1..100 {
            now += 2 * rivals::PAUSE;
            assert_eq!(rivals.looked(now, || Some(turns(round, 10 * round))), None);
        }
    }

    /// A program that computes between its polls, on a processor that it has for itself but for
    /// threads that wake for a moment.
    #[test]
    fn a_thread_that_computes_has_no_rivals() {
        let mut rivals = Rivals::new();
        let mut now = Instant::now();
        for round in 1..1000 {
            now += Duration::from_millis(10);
            assert_eq!(rivals.looked(now, || Some(turns(10 * round, round))), None);
        }
        // Questions have a price.
        assert_eq!(rivals.looked(now + 2 * rivals::GAP, never), None);
    }

    /// Kernels before 6.12 have no turns of a thread's own.
    #[test]
    fn a_thread_has_short_turns_while_it_has_rivals() {
        let mut poller = Poller::new(Rivals::new(), Instant::now());
        let (now, own) = (poller.since, slice::length());
        for _ in 0..2 {
            poller.rivals.until = Some(now + rivals::SPAN_MIN);
            for _ in 0..2 {
                poller.choose_turns(now);
                assert_eq!(slice::length(), own.map(|own| own.min(TURN_NS)));
            }
            poller.choose_turns(now + rivals::SPAN_MIN);
            assert_eq!(slice::length(), own);
        }
    }

    #[test]
    fn only_a_thread_that_polls_in_vain_for_long_sleeps() {
        let empty_polls = EmptyPolls::default();
        let has_rivals = |spin| {
            POLLER.with_borrow_mut(|poller| {
                let until = Some(Instant::now() + Duration::from_secs(60));
                poller.rivals = Rivals { until, spin, ..Rivals::new() };
            });
        };
        let misses = |count| (0..count).filter(|_| empty_polls.missed().is_some()).count();
        has_rivals(Duration::ZERO);
        for _ in 0..100 {
            assert_eq!(misses(rivals::LOOK - 1), 0);
            empty_polls.found();
        }
        empty_polls.found();
        assert!(misses(10 * rivals::LOOK) >= 9);
        has_rivals(Duration::from_secs(30));
        assert_eq!(misses(100 * rivals::LOOK), 0);
        POLLER.with_borrow_mut(|poller| poller.rivals = Rivals::new());
        assert_eq!(misses(100 * rivals::LOOK), 0);
    }

    /// Polls are counted from 0 again after 2^32 of them, which takes minutes.
    #[test]
    fn a_thread_that_polls_for_very_long_sleeps_as_well() {
        let polls = u32::MAX - rivals::LOOK;
        let empty_polls = EmptyPolls { polls: polls.into(), found: polls.into() };
        POLLER.with_borrow_mut(|poller| {
            let until = Some(Instant::now() + Duration::from_secs(60));
            poller.rivals = Rivals { until, spin: Duration::ZERO, ..Rivals::new() };
        });
        let misses = (0..10 * rivals::LOOK).filter(|_| empty_polls.missed().is_some());
        assert!(misses.count() >= 9);
    }
}
