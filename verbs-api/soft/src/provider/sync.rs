//! Primitives for sharing between threads, and the clock. The models in `tests/models` compile the
//! files that use them with loom's in their place.

pub(crate) use std::hint::spin_loop;
pub(crate) use std::sync::OnceLock;
pub(crate) use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicU8, AtomicU32, AtomicU64, Ordering, fence,
};
pub(crate) use std::thread::yield_now;
pub(crate) use std::time::Instant;

pub(crate) use parking_lot::{Mutex, MutexGuard};

/// The processor that runs this thread now.
#[cfg(not(miri))]
pub(crate) fn processor() -> u32 {
    rustix::thread::sched_getcpu() as u32
}

/// Miri has no such call.
#[cfg(miri)]
pub(crate) fn processor() -> u32 {
    0
}
