//! Acknowledgements that wait for the program's next call, or for the peer to ask, sent at the
//! program's exit.
//!
//! Dropping an object sends its held acknowledgements. A program that returns from `main` or calls
//! `exit(3)` without dropping its objects runs the function that this module registers. A program
//! that ends by `_exit(2)` or a signal runs nothing more, unless a preloaded library intercepts the
//! former (`verbs-api/capi/paths`).

#![allow(unsafe_code)]

use std::sync::{Arc, Weak};

use super::Hca;
use crate::provider::sync::{AtomicU32, Instant, Mutex, OnceLock, Ordering, yield_now};
use crate::tuning::shard::EXIT_PATIENCE;

/// The devices of this process.
static DEVICES: Mutex<Vec<Weak<Hca>>> = Mutex::new(Vec::new());
/// The process whose devices these are, or 0. A child of fork(2) has those of its parent until it
/// starts one of its own.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// Sends what `device` holds back when the program exits.
pub(super) fn watch(device: &Arc<Hca>) {
    // A child of fork(2) has its parent's registration, too.
    static REGISTERED: OnceLock<()> = OnceLock::new();
    REGISTERED.get_or_init(register);
    let (own, mut devices) = (std::process::id(), DEVICES.lock());
    if OWNER.swap(own, Ordering::Relaxed) != own {
        devices.clear();
    }
    devices.retain(|device| device.strong_count() > 0);
    devices.push(Arc::downgrade(device));
}

#[cfg(not(miri))]
fn register() {
    // SAFETY: the function is one of this library, which outlives it: exit(3) runs it, or
    // dlclose(3) before it unmaps the library. It does not unwind.
    let full = unsafe { libc::atexit(send_held) };
    // Without room the program ends as if by _exit(2).
    debug_assert_eq!(full, 0);
}

/// Miri knows no atexit(3).
#[cfg(miri)]
fn register() {
    let _: extern "C" fn() = send_held;
}

/// Sends held acknowledgements at `_exit(2)`. A signal handler may call that, or a child of
/// `vfork(2)`: so it only tries for locks, and gives none back.
pub extern "C" fn send_held_at_once() {
    if OWNER.load(Ordering::Relaxed) != std::process::id() {
        return;
    }
    let Some(devices) = DEVICES.try_lock() else { return };
    for device in devices.iter().filter_map(Weak::upgrade) {
        for core in device.shards.all() {
            // The background thread may have it for a moment, or the thread that a signal
            // interrupted.
            let until = Instant::now() + EXIT_PATIENCE;
            let mut lock = core.shard.try_lock();
            while lock.is_none() && Instant::now() < until {
                yield_now();
                lock = core.shard.try_lock();
            }
            if let Some(mut shard) = lock {
                shard.send_last(None);
                shard.let_go();
                shard.publish_all();
                std::mem::forget(shard);
            }
        }
        std::mem::forget(device);
    }
    std::mem::forget(devices);
}

extern "C" fn send_held() {
    // A child of fork(2) has copies of its parent's devices. The parent sends for them.
    if OWNER.load(Ordering::Relaxed) != std::process::id() {
        return;
    }
    let Some(devices) = DEVICES.try_lock_for(EXIT_PATIENCE) else { return };
    for device in devices.iter().filter_map(Weak::upgrade) {
        for core in device.shards.all() {
            if let Some(mut shard) = core.shard.try_lock_for(EXIT_PATIENCE) {
                shard.send_last(None);
                shard.let_go();
                shard.publish_all();
            }
        }
        // Leaks the device, so that the exit does not wait for its threads.
        std::mem::forget(device);
    }
}
