//! What threads share by, and what they read the time from. The models in `tests/models` compile the files that use it with loom's in its place.

pub(crate) use std::hint::spin_loop;
pub(crate) use std::sync::OnceLock;
pub(crate) use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicU8, AtomicU32, AtomicU64, Ordering, fence,
};
pub(crate) use std::thread::yield_now;
pub(crate) use std::time::Instant;

pub(crate) use parking_lot::{Mutex, MutexGuard};

/// The processor that this thread runs on, for now.
#[cfg(not(miri))]
pub(crate) fn processor() -> u32 {
    rustix::thread::sched_getcpu() as u32
}

/// Miri knows of none.
#[cfg(miri)]
pub(crate) fn processor() -> u32 {
    0
}
