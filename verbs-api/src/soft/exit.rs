//! What the program's end must not lose: acknowledgements that wait for its next call.
//!
//! Objects that are dropped send what they owe. A program that returns from `main` or calls
//! `exit(3)` without dropping them runs the function that is registered here. One that ends by
//! `_exit(2)` or a signal runs nothing more.

#![allow(unsafe_code)]

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::Device;
use crate::sync::{Mutex, OnceLock};

/// The devices of this process.
static DEVICES: Mutex<Vec<Weak<Device>>> = Mutex::new(Vec::new());
/// The process that registered [`send_held`].
static OWNER: OnceLock<u32> = OnceLock::new();
/// How long the end of the program waits for a thread that holds a lock.
const PATIENCE: Duration = Duration::from_millis(20);

/// Has what `device` holds sent when the program exits.
pub(super) fn watch(device: &Arc<Device>) {
    OWNER.get_or_init(|| {
        // SAFETY: the function is one of this library, which outlives it: exit(3) runs it, or
        // dlclose(3) before it unmaps the library. It does not unwind.
        let full = unsafe { libc::atexit(send_held) };
        // Without room the program ends as if by _exit(2).
        debug_assert_eq!(full, 0);
        std::process::id()
    });
    let mut devices = DEVICES.lock();
    devices.retain(|device| device.strong_count() > 0);
    devices.push(Arc::downgrade(device));
}

extern "C" fn send_held() {
    // A child of fork(2) has copies of its parent's devices. What they owe, the parent sends.
    if OWNER.get() != Some(&std::process::id()) {
        return;
    }
    let Some(devices) = DEVICES.try_lock_for(PATIENCE) else { return };
    for device in devices.iter().filter_map(Weak::upgrade) {
        for core in device.shards.all() {
            if let Some(mut shard) = core.shard.try_lock_for(PATIENCE)
                && shard.held
            {
                shard.send_waiting();
            }
        }
        // Its threads need not be waited for.
        std::mem::forget(device);
    }
}
