//! The rate at which a container may ask, and the number of its requests at one time.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Requests of a container that are answered at a time.
pub(crate) const AT_ONCE_MAX: usize = 16;
/// Requests of all containers that are answered at a time.
const ALL_AT_ONCE_MAX: usize = 1024;
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

/// Counts the requests of each share.
#[derive(Debug)]
pub(crate) struct Limits {
    per_second: u32,
    inner: Mutex<Inner>,
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

/// The permission to answer one request, until it is dropped.
#[derive(Debug)]
pub(crate) struct Permit {
    limits: Arc<Limits>,
    share: Share,
}

impl Limits {
    pub(crate) fn new(per_second: u32) -> Self {
        Self { per_second, inner: Mutex::default() }
    }

    /// Lets a request of a share in, unless too many came or are there.
    pub(crate) fn enter(self: &Arc<Self>, share: Share, now: Instant) -> Option<Permit> {
        let full = f64::from(self.per_second);
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
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
        let passed = now.saturating_duration_since(of.since).as_secs_f64();
        of.tokens = (of.tokens + passed * full).min(full);
        of.since = of.since.max(now);
        if of.tokens < 1.0 || of.at_once >= AT_ONCE_MAX {
            return None;
        }
        of.tokens -= 1.0;
        of.at_once += 1;
        *at_once += 1;
        Some(Permit { limits: Arc::clone(self), share })
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut inner = self.limits.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.at_once -= 1;
        if let Some(container) = inner.containers.get_mut(&self.share) {
            container.at_once -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_container_has_a_rate_of_its_own() {
        let (limits, start) = (Arc::new(Limits::new(10)), Instant::now());
        let asked = |of: u64, at: Instant| {
            (0..100).filter(|_| limits.enter(Share::Container(of), at).is_some()).count()
        };
        assert_eq!(asked(1, start), 10);
        assert_eq!(asked(2, start), 10);
        assert_eq!(asked(1, start + Duration::from_millis(350)), 3);
        assert_eq!(asked(1, start + Duration::from_secs(60)), 10);
        // A clock that is behind gives nothing, then and later.
        assert_eq!(asked(1, start), 0);
        assert_eq!(asked(1, start + Duration::from_secs(60)), 0);
    }

    /// Pauses that are no multiple of a request's time, and shorter than it.
    #[test]
    fn the_rate_does_not_depend_on_how_often_one_asks() {
        for pause in [700, 9_990, 70_000, 130_000] {
            let (limits, start) = (Arc::new(Limits::new(10)), Instant::now());
            (0..10).for_each(|_| assert!(limits.enter(Share::Container(1), start).is_some()));
            let (pauses, mut granted) = (10_000_000 / pause, 0);
            for n in 1..=pauses {
                let now = start + Duration::from_micros(n * pause);
                // Another container's requests change nothing.
                drop(limits.enter(Share::Container(2), now));
                granted += u64::from(limits.enter(Share::Container(1), now).is_some());
                granted += u64::from(limits.enter(Share::Container(1), now).is_some());
            }
            // Tokens are no whole numbers.
            let due = pauses * pause / 100_000;
            assert!((due - 1..=due).contains(&granted), "{granted} every {pause} us");
        }
    }

    /// A container that asks for too much at a time loses none of its later requests.
    #[test]
    fn a_refusal_takes_no_token_and_no_place() {
        let (limits, now) = (Arc::new(Limits::new(100)), Instant::now());
        let mut held: Vec<Permit> =
            (0..AT_ONCE_MAX).map_while(|_| limits.enter(Share::Container(1), now)).collect();
        for rounds in 1..=84 / 2 {
            assert!(limits.enter(Share::Container(1), now).is_none());
            drop(held.split_off(AT_ONCE_MAX - 2));
            held.extend((0..2).map_while(|_| limits.enter(Share::Container(1), now)));
            assert_eq!(held.len(), AT_ONCE_MAX, "{rounds}");
        }
        drop(held.pop());
        assert!(limits.enter(Share::Container(1), now).is_none(), "all hundred were used");
        drop(held);
        let inner = limits.inner.lock().expect("not poisoned");
        assert_eq!((inner.at_once, inner.containers[&Share::Container(1)].at_once), (0, 0));
    }

    #[test]
    fn one_container_cannot_keep_others_out() {
        let (limits, now) = (Arc::new(Limits::new(1000)), Instant::now());
        let held: Vec<Permit> =
            (0..100).map_while(|_| limits.enter(Share::Container(1), now)).collect();
        assert_eq!(held.len(), AT_ONCE_MAX);
        assert!(limits.enter(Share::Container(2), now).is_some());
        drop(held);
        assert!(limits.enter(Share::Container(1), now).is_some());
        // All of them together.
        let mut all = Vec::new();
        for container in 0..2000 {
            all.extend(limits.enter(Share::Container(container), now));
        }
        assert_eq!(all.len(), ALL_AT_ONCE_MAX);
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
    }
}
