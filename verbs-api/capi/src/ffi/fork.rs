//! `fork(2)`: a child has copies of its parent's objects, and none of its threads.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

/// Number of forks between the process that loaded the library and this one.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// This process, among those that forked from each other.
pub(super) fn generation() -> u32 {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        // SAFETY: the handler only adds to a number. The library is never unloaded.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
    GENERATION.load(Ordering::Relaxed)
}

unsafe extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// Memory is reached by its addresses, in the process that registered it: nothing to prepare.
pub(super) extern "C" fn fork_init() -> c_int {
    0
}

/// `IBV_FORK_UNNEEDED`.
pub(super) extern "C" fn is_fork_initialized() -> c_int {
    2
}

/// Nothing to mark.
pub(super) extern "C" fn dofork_range(_: *mut c_void, _: usize) -> c_int {
    0
}

/// Nothing to mark.
pub(super) extern "C" fn dontfork_range(_: *mut c_void, _: usize) -> c_int {
    0
}
