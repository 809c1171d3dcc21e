//! The handler of SIGSEGV and SIGBUS that lets a [guarded](super::guarded) access fail.
//!
//! All other faults are the program's: its own handler gets them as the kernel gave them, or they
//! end the process where they happened.

use std::cell::Cell;

use rocinante_stack::types::Time;

use crate::tuning::memory::WATCHED_MAX;

#[cfg(all(not(miri), any(target_arch = "x86_64", target_arch = "aarch64")))]
mod handler;

#[cfg(all(not(miri), any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(crate) use self::handler::{unblock, watch};

/// No access is guarded here.
#[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
pub(crate) fn watch() {}

#[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
pub(crate) fn unblock() {}

thread_local! {
    /// When this thread was last seen to take the signals, by any shard's clock.
    static TAKEN_AT: Cell<u64> = const { Cell::new(u64::MAX) };
}

/// This thread is about to handle packets: it takes SIGSEGV and SIGBUS, also if it was made with
/// all signals blocked and another thread has driven the device until now.
#[inline]
pub(crate) fn take_signals(now: Time) {
    TAKEN_AT.with(|at| {
        if at.get().abs_diff(now.0) > WATCHED_MAX {
            at.set(now.0);
            unblock();
        }
    });
}
