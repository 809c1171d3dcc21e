//! The border to C: errno, and panics, which become errors.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

use super::wait::uncancelled;
use crate::log::{Level, say};

/// The result of a call: a value, or the errno.
pub(super) type Outcome<T> = Result<T, c_int>;

pub(super) fn errno() -> c_int {
    // SAFETY: the function returns the address of the thread's own errno.
    unsafe { *libc::__errno_location() }
}

pub(super) fn set_errno(errno: c_int) {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// Runs the body. A panic is a bug of this library, which must not end the program.
#[inline]
pub(super) fn caught<T>(body: impl FnOnce() -> Outcome<T>) -> Outcome<T> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or(Err(libc::EIO))
}

/// The result of a call that is not made per request. A program finds in errno the errno of a
/// failure; success leaves it as it was, whichever functions the body has called. None of them is a
/// cancellation point (`pthreads(7)`), as none of rdma-core's but those that sleep.
fn told<T>(body: impl FnOnce() -> Outcome<T>) -> Outcome<T> {
    let before = errno();
    reported(before, uncancelled(|| caught(body)))
}

/// Leaves the errno of a failure in errno, and the one from `before` where there is none.
pub(super) fn reported<T>(before: c_int, outcome: Outcome<T>) -> Outcome<T> {
    set_errno(outcome.as_ref().err().copied().unwrap_or(before));
    outcome
}

/// For calls that return 0 or the errno, which errno has, too.
pub(super) fn status(body: impl FnOnce() -> Outcome<()>) -> c_int {
    told(body).err().unwrap_or(0)
}

/// As [`status`], for the calls that a program makes for each request: success costs no look at
/// errno.
#[inline]
pub(super) fn posted(body: impl FnOnce() -> Outcome<()>) -> c_int {
    caught(body).map_or_else(refuse, |()| 0)
}

/// Leaves an errno where programs look for it, and returns it.
#[cold]
pub(super) fn refuse(errno: c_int) -> c_int {
    set_errno(errno);
    errno
}

/// For calls that return -1 and set errno.
pub(super) fn minus(body: impl FnOnce() -> Outcome<c_int>) -> c_int {
    told(body).unwrap_or(-1)
}

/// For calls that return NULL and set errno.
pub(super) fn pointer<T>(body: impl FnOnce() -> Outcome<*mut T>) -> *mut T {
    told(body).unwrap_or(ptr::null_mut())
}

/// For calls that return nothing.
#[inline]
pub(super) fn quiet(body: impl FnOnce()) {
    let _ = caught(|| {
        body();
        Ok(())
    });
}

/// `ENOMEM` if `bytes` bytes and a reserve cannot be allocated: where an allocation of Rust's
/// library fails, the process ends. So a call asks before it makes something.
pub(super) fn afford(bytes: usize) -> Outcome<()> {
    /// The object itself, and all small allocations.
    const BESIDES: usize = 64 << 10;
    // SAFETY: the memory is given back as it came, NULL included. Nothing touches it: the black box
    // keeps the compiler from leaving the two calls out.
    unsafe {
        let memory = std::hint::black_box(libc::malloc(bytes.saturating_add(BESIDES)));
        libc::free(memory);
        if memory.is_null() { Err(libc::ENOMEM) } else { Ok(()) }
    }
}

/// Panics of this library are logged, and not printed.
pub(super) fn hush() {
    std::panic::set_hook(Box::new(|panic| say(Level::Warn, format_args!("a bug: {panic}"))));
}
