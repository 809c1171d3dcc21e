//! Replaces `verbs-api/soft/src/provider/sync.rs`.

use std::ops::{Deref, DerefMut};
use std::time::Duration;

pub(crate) use loom::sync::atomic::{
    AtomicBool, AtomicI32, AtomicU8, AtomicU32, AtomicU64, Ordering, fence,
};
pub(crate) use loom::thread::yield_now;
/// Only set under a lock.
pub(crate) use std::sync::OnceLock;

pub(crate) fn spin_loop() {
    yield_now();
}

pub(crate) fn processor() -> u32 {
    0
}

/// A lock with the memory orderings of `parking_lot`. A failed `try_lock` synchronises with
/// nothing, and may see the lock as taken when it is free again.
#[derive(Debug, Default)]
pub struct Mutex<T> {
    locked: AtomicBool,
    /// Looks so far. Not one of loom's atomics.
    looks: std::sync::atomic::AtomicUsize,
    /// Never contended: `locked` guards it.
    data: std::sync::Mutex<T>,
}

/// Number of looks that may see the lock as taken when it is free again.
const LOOKS_MAX: usize = 8;

/// A locked mutex.
#[derive(Debug)]
pub struct MutexGuard<'a, T> {
    lock: &'a Mutex<T>,
    data: Option<std::sync::MutexGuard<'a, T>>,
}

impl<T> Mutex<T> {
    pub fn new(data: T) -> Self {
        Self { locked: AtomicBool::new(false), looks: 0.into(), data: std::sync::Mutex::new(data) }
    }

    pub fn lock(&self) -> MutexGuard<'_, T> {
        while !self.acquire() {
            yield_now();
        }
        self.guard()
    }

    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        // A look may be out of date, but only a bounded number of times.
        let looks = self.looks.fetch_add(1, std::sync::atomic::Ordering::Relaxed) < LOOKS_MAX;
        let locked = looks && self.locked.load(Ordering::Relaxed);
        (!locked && self.acquire()).then(|| self.guard())
    }

    pub fn try_lock_for(&self, _: Duration) -> Option<MutexGuard<'_, T>> {
        yield_now();
        self.try_lock()
    }

    fn acquire(&self) -> bool {
        self.locked.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    fn guard(&self) -> MutexGuard<'_, T> {
        MutexGuard { lock: self, data: Some(self.data.try_lock().expect("guarded by `locked`")) }
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.data.as_ref().expect("locked until it is dropped")
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.data.as_mut().expect("locked until it is dropped")
    }
}

impl<T> Drop for MutexGuard<'_, T> {
    fn drop(&mut self) {
        self.data = None;
        self.lock.locked.store(false, Ordering::Release);
    }
}

/// A clock that each look advances by a nanosecond, and nothing else: the shard has [another
/// clock](crate::provider::wake::clock).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Instant(u64);

loom::lazy_static! {
    /// Not one of loom's types.
    static ref LOOKS: std::sync::atomic::AtomicU64 = 0.into();
}

impl Instant {
    pub(crate) fn now() -> Self {
        Self(LOOKS.fetch_add(1, std::sync::atomic::Ordering::Relaxed))
    }

    pub(crate) fn elapsed(self) -> Duration {
        Duration::ZERO
    }

    pub(crate) fn saturating_duration_since(self, _: Self) -> Duration {
        Duration::ZERO
    }
}

impl std::ops::Add<Duration> for Instant {
    type Output = Self;

    fn add(self, time: Duration) -> Self {
        Self(self.0 + time.as_nanos() as u64)
    }
}
