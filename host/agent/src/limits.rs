//! The rate at which a container may ask, the number of its requests at one time, and whose turn
//! it is.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Mutex as Lane, OwnedMutexGuard, OwnedSemaphorePermit, Semaphore};

/// Requests of a container that are there at a time: read, waiting for their turn, or worked.
const AT_ONCE_MAX: usize = 256;
/// Requests of all containers that are there at a time. Each has up to three descriptors.
const ALL_AT_ONCE_MAX: usize = 8192;
/// Requests that are worked at a time, each on a thread. Each is of another container.
pub(crate) const WORKED_MAX: usize = 32;
/// Between two looks whether a container that asks too often may be answered again.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// Containers that are remembered. One of which nothing is known has asked for nothing lately.
const REMEMBERED_MAX: usize = 4096;

/// The programs that share a container's limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Share {
    /// Those that get no port: of unknown processes, and of namespaces without a host's end, which
    /// any program can make.
    Stranger,
    /// Those of a container: the inode of its network namespace.
    Container(u64),
    /// Those of a user in the agent's network namespace.
    User(u32),
}

/// Work that is done in turn: one job of each kind at a time, the kinds one behind the other.
#[derive(Debug)]
pub(crate) struct Turns<K> {
    /// The jobs of a kind wait here.
    lanes: Mutex<HashMap<K, Arc<Lane<()>>>>,
    /// The kinds wait here, each with one job.
    places: Arc<Semaphore>,
}

/// The turn of a job, until it is dropped.
#[derive(Debug)]
pub(crate) struct Turn {
    _of_all: OwnedSemaphorePermit,
    _of_kind: OwnedMutexGuard<()>,
}

impl<K: Eq + Hash> Turns<K> {
    /// For this number of jobs at a time.
    pub(crate) fn new(places: usize) -> Self {
        Self { lanes: Mutex::default(), places: Arc::new(Semaphore::new(places)) }
    }

    /// Waits for the turn of a job: behind those of its kind, then for `ready`, and then behind one
    /// of each other kind.
    pub(crate) async fn turn(&self, kind: K, ready: impl Future<Output = ()>) -> Option<Turn> {
        let lane = {
            let mut lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
            // Those in which no job waits or runs.
            lanes.retain(|_, lane| Arc::strong_count(lane) > 1);
            Arc::clone(lanes.entry(kind).or_default())
        };
        let of_kind = lane.lock_owned().await;
        ready.await;
        // Nothing closes it.
        let of_all = Arc::clone(&self.places).acquire_owned().await.ok()?;
        Some(Turn { _of_all: of_all, _of_kind: of_kind })
    }
}

/// Counts the requests of each share, and takes them in turn.
#[derive(Debug)]
pub(crate) struct Limits {
    rates: Arc<Mutex<Rates>>,
    inner: Mutex<Inner>,
    turns: Turns<Share>,
}

/// Requests in a second.
#[derive(Debug)]
struct Rates {
    each: u32,
    /// Of the shares that have another rate.
    others: HashMap<Share, u32>,
}

#[derive(Debug, Default)]
struct Inner {
    containers: HashMap<Share, Container>,
    at_once: usize,
}

#[derive(Debug)]
struct Container {
    /// A token is a request; a second's worth may be saved.
    tokens: f64,
    since: Instant,
    at_once: usize,
}

/// The permission to be there with one request, until it is dropped.
#[derive(Debug)]
pub(crate) struct Permit {
    limits: Arc<Limits>,
    share: Share,
}

impl Limits {
    pub(crate) fn new(per_second: u32) -> Self {
        Self::of(Arc::new(Mutex::new(Rates { each: per_second, others: HashMap::new() })))
    }

    /// Those of requests of another kind, at the same rates.
    pub(crate) fn alike(&self) -> Self {
        Self::of(Arc::clone(&self.rates))
    }

    fn of(rates: Arc<Mutex<Rates>>) -> Self {
        Self { rates, inner: Mutex::default(), turns: Turns::new(WORKED_MAX) }
    }

    /// Changes the rate of each share.
    pub(crate) fn set_rate(&self, per_second: u32) {
        self.rates().each = per_second;
    }

    /// Gives these shares rates of their own, and no others.
    pub(crate) fn set_others(&self, others: HashMap<Share, u32>) {
        self.rates().others = others;
    }

    fn rates(&self) -> MutexGuard<'_, Rates> {
        self.rates.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The requests of a share in a second.
    fn full(&self, share: Share) -> f64 {
        let rates = self.rates();
        f64::from(rates.others.get(&share).copied().unwrap_or(rates.each))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets a request of a share in, unless too many are there.
    pub(crate) fn enter(self: &Arc<Self>, share: Share, now: Instant) -> Option<Permit> {
        let full = self.full(share);
        let mut inner = self.lock();
        let Inner { containers, at_once } = &mut *inner;
        if *at_once >= ALL_AT_ONCE_MAX {
            return None;
        }
        if containers.len() >= REMEMBERED_MAX && !containers.contains_key(&share) {
            let idle = |c: &Container| now.duration_since(c.since) >= Duration::from_secs(1);
            containers.retain(|_, container| container.at_once > 0 || !idle(container));
            if containers.len() >= REMEMBERED_MAX {
                return None;
            }
        }
        let of =
            containers.entry(share).or_insert(Container { tokens: full, since: now, at_once: 0 });
        if of.at_once >= AT_ONCE_MAX {
            return None;
        }
        of.at_once += 1;
        *at_once += 1;
        Some(Permit { limits: Arc::clone(self), share })
    }
}

impl Permit {
    /// Whether the share has not asked too often. Then this counts as one time more.
    pub(crate) fn counts(&self, now: Instant) -> bool {
        let full = self.limits.full(self.share);
        let mut inner = self.limits.lock();
        let Some(of) = inner.containers.get_mut(&self.share) else { return false };
        let passed = now.saturating_duration_since(of.since).as_secs_f64();
        of.tokens = (of.tokens + passed * full).min(full);
        of.since = of.since.max(now);
        let counts = of.tokens >= 1.0;
        of.tokens -= if counts { 1.0 } else { 0.0 };
        counts
    }

    /// Waits for the turn of a request: behind those of its share, until the share has not asked
    /// too often, and then behind one of each other share. `counted` if that asking counts already.
    pub(crate) async fn turn(&self, counted: bool) -> Option<Turn> {
        let ready = async {
            while !counted && !self.counts(Instant::now()) {
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        };
        self.limits.turns.turn(self.share, ready).await
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut inner = self.limits.lock();
        inner.at_once -= 1;
        if let Some(container) = inner.containers.get_mut(&self.share) {
            container.at_once -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether a request of this container is let in, and counts.
    fn asks(limits: &Arc<Limits>, of: u64, now: Instant) -> bool {
        limits.enter(Share::Container(of), now).is_some_and(|permit| permit.counts(now))
    }

    /// The permits that a container gets at once.
    fn held(limits: &Arc<Limits>, of: u64, now: Instant) -> Vec<Permit> {
        std::iter::from_fn(|| limits.enter(Share::Container(of), now)).collect()
    }

    #[test]
    fn each_container_has_a_rate_of_its_own() {
        let (limits, start) = (Arc::new(Limits::new(10)), Instant::now());
        let asked = |of: u64, at: Instant| (0..100).filter(|_| asks(&limits, of, at)).count();
        assert_eq!(asked(1, start), 10);
        assert_eq!(asked(2, start), 10);
        assert_eq!(asked(1, start + Duration::from_millis(350)), 3);
        assert_eq!(asked(1, start + Duration::from_secs(60)), 10);
        // A clock that is behind gives nothing, then and later.
        assert_eq!(asked(1, start), 0);
        assert_eq!(asked(1, start + Duration::from_secs(60)), 0);
    }

    #[test]
    fn the_rate_may_change() {
        let (limits, start) = (Arc::new(Limits::new(10)), Instant::now());
        let asked = |at: u64| {
            let now = start + Duration::from_secs(at);
            (0..100).filter(|_| asks(&limits, 1, now)).count()
        };
        assert_eq!(asked(0), 10);
        limits.set_rate(40);
        assert_eq!((asked(0), asked(1)), (0, 40));
        limits.set_rate(2);
        assert_eq!(asked(60), 2);
    }

    #[test]
    fn a_container_may_have_a_rate_of_its_own() {
        let (limits, now) = (Arc::new(Limits::new(10)), Instant::now());
        let asked = |of: u64, at: u64| {
            let at = now + Duration::from_secs(at);
            (0..100).filter(|_| asks(&limits, of, at)).count()
        };
        limits.set_others([(Share::Container(1), 3), (Share::Container(2), 40)].into());
        assert_eq!([asked(1, 0), asked(2, 0), asked(3, 0)], [3, 40, 10]);
        limits.set_others([(Share::Container(2), 5)].into());
        assert_eq!([asked(1, 60), asked(2, 60), asked(3, 60)], [10, 5, 10]);
    }

    #[test]
    fn requests_of_another_kind_have_the_same_rates_and_count_for_themselves() {
        let (limits, now) = (Arc::new(Limits::new(10)), Instant::now());
        let others = Arc::new(limits.alike());
        limits.set_others([(Share::Container(1), 3)].into());
        limits.set_rate(7);
        for limits in [&limits, &others] {
            let asked = |of: u64| (0..100).filter(|_| asks(limits, of, now)).count();
            assert_eq!([asked(1), asked(2)], [3, 7]);
        }
    }

    /// Pauses that are no multiple of a request's time, and shorter than it.
    #[test]
    fn the_rate_does_not_depend_on_how_often_one_asks() {
        for pause in [700, 9_990, 70_000, 130_000] {
            let (limits, start) = (Arc::new(Limits::new(10)), Instant::now());
            (0..10).for_each(|_| assert!(asks(&limits, 1, start)));
            let (pauses, mut granted) = (10_000_000 / pause, 0);
            for n in 1..=pauses {
                let now = start + Duration::from_micros(n * pause);
                // Another container's requests change nothing.
                asks(&limits, 2, now);
                granted += u64::from(asks(&limits, 1, now));
                granted += u64::from(asks(&limits, 1, now));
            }
            // Tokens are no whole numbers.
            let due = pauses * pause / 100_000;
            assert!((due - 1..=due).contains(&granted), "{granted} every {pause} us");
        }
    }

    #[test]
    fn one_container_cannot_keep_others_out() {
        let (limits, now) = (Arc::new(Limits::new(1000)), Instant::now());
        let one = held(&limits, 1, now);
        assert_eq!(one.len(), AT_ONCE_MAX);
        assert!(limits.enter(Share::Container(2), now).is_some());
        drop(one);
        let mut one = held(&limits, 1, now);
        assert_eq!(one.len(), AT_ONCE_MAX, "a refusal takes no place");
        one.truncate(AT_ONCE_MAX - 2);
        assert_eq!(held(&limits, 1, now).len(), 2);
        drop(one);
        // All of them together.
        let all: Vec<Permit> = (0..2000).flat_map(|of| held(&limits, of, now)).collect();
        assert_eq!(all.len(), ALL_AT_ONCE_MAX);
        drop(all);
        let inner = limits.inner.lock().expect("not poisoned");
        assert_eq!((inner.at_once, inner.containers[&Share::Container(1)].at_once), (0, 0));
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let (limits, now) = (Arc::new(Limits::new(1)), Instant::now());
        let fresh = |from: u64, at: Instant| {
            (from..from + 10_000)
                .filter(|c| limits.enter(Share::Container(*c), at).is_some())
                .count()
        };
        assert_eq!(fresh(0, now), REMEMBERED_MAX);
        assert_eq!(fresh(100_000, now), 0);
        assert_eq!(fresh(100_000, now + Duration::from_secs(1)), REMEMBERED_MAX);
        // One whose requests take long is remembered until they are over.
        let long = held(&limits, 7, now + Duration::from_secs(2));
        let later = now + Duration::from_secs(4);
        assert_eq!((long.len(), fresh(200_000, later)), (AT_ONCE_MAX, REMEMBERED_MAX - 1));
        assert!(limits.enter(Share::Container(7), later).is_none(), "it has all its places");
        drop(long);
        assert_eq!(held(&limits, 7, later).len(), AT_ONCE_MAX);
    }

    fn in_time(work: impl Future<Output = ()>) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        runtime.expect("a runtime").block_on(work);
    }

    /// The turns that are there at once.
    async fn turns(permits: &[Permit]) -> Vec<Turn> {
        let mut turns = Vec::new();
        for permit in permits {
            let turn = tokio::time::timeout(Duration::ZERO, permit.turn(true)).await;
            turns.extend(turn.ok().flatten());
        }
        turns
    }

    #[test]
    fn one_request_of_each_container_has_its_turn_at_a_time() {
        in_time(async {
            let (limits, now) = (Arc::new(Limits::new(1000)), Instant::now());
            let one = held(&limits, 1, now);
            let two: Vec<Permit> = limits.enter(Share::Container(2), now).into_iter().collect();
            let first = turns(&one).await;
            assert_eq!((first.len(), turns(&two).await.len()), (1, 1));
            drop(first);
            assert_eq!(turns(&one).await.len(), 1);
            // Not more than there are threads for.
            let each = |of| limits.enter(Share::Container(of), now);
            let many: Vec<Permit> = (100..200).filter_map(each).collect();
            assert_eq!(turns(&many).await.len(), WORKED_MAX);
        });
    }

    /// As many containers as there are places wait until they have not asked too often.
    #[test]
    fn who_asks_too_often_waits_without_a_place() {
        in_time(async {
            let (limits, now) = (Arc::new(Limits::new(1)), Instant::now());
            let enter = |of| limits.enter(Share::Container(of), now).expect("room");
            let many: Vec<Permit> = (1..=WORKED_MAX as u64).map(enter).collect();
            // None of them has a request more for an hour.
            assert!(many.iter().all(|it| it.counts(now + Duration::from_secs(3600))));
            let mut waiting: Vec<_> = many.iter().map(|it| Box::pin(it.turn(false))).collect();
            for turn in &mut waiting {
                tokio::time::timeout(Duration::ZERO, turn).await.expect_err("not yet");
            }
            assert_eq!(turns(&[enter(0)]).await.len(), 1);
        });
    }

    #[test]
    fn who_came_first_has_the_first_turn() {
        in_time(async {
            let (limits, now) = (Arc::new(Limits::new(1000)), Instant::now());
            let one = held(&limits, 1, now);
            let told = Mutex::new(Vec::new());
            let take = async |at: usize| {
                let _turn = one[at].turn(true).await.expect("a turn");
                tokio::task::yield_now().await;
                told.lock().expect("not poisoned").push(at);
            };
            tokio::join!(take(2), take(0), take(1));
            assert_eq!(*told.lock().expect("not poisoned"), [2, 0, 1]);
        });
    }

    #[test]
    fn who_asks_too_often_waits_until_that_is_over() {
        in_time(async {
            let (limits, begun) = (Arc::new(Limits::new(10)), Instant::now());
            let permits = held(&limits, 1, begun);
            let counted: Vec<bool> = permits[..12].iter().map(|it| it.counts(begun)).collect();
            assert_eq!(counted.iter().filter(|counted| **counted).count(), 10);
            for (permit, counted) in permits.iter().zip(counted) {
                drop(permit.turn(counted).await.expect("a turn"));
            }
            assert!(begun.elapsed() >= Duration::from_millis(200), "{:?}", begun.elapsed());
        });
    }
}
