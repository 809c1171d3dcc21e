//! The handler of SIGSEGV and SIGBUS that lets a [guarded](super::guarded) access fail.
//!
//! All other faults are the program's: its own handler gets them as the kernel gave them, or they
//! end the process where they happened.

#[cfg(all(not(miri), any(target_arch = "x86_64", target_arch = "aarch64")))]
mod handler;

#[cfg(all(not(miri), any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(crate) use self::handler::{unblock, watch};

/// No access is guarded here.
#[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
pub(crate) fn watch() {}

#[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
pub(crate) fn unblock() {}
