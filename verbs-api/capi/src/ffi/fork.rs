//! `fork(2)`: a child has copies of its parent's objects, and none of its threads.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::yield_now;
use std::time::{Duration, Instant};

/// The numbers of objects by their kinds. Their bits [`MARKS`] count the forks between the process
/// that loaded the library and this one.
static NUMBERS: [AtomicU64; KINDS] = {
    let mut numbers = [const { AtomicU64::new(0) }; KINDS];
    let mut kind = 0;
    while kind < KINDS {
        numbers[kind] = AtomicU64::new(0x524f_4345_0000_0000 | kind as u64);
        kind += 1;
    }
    numbers
};

/// Kinds of objects.
pub(super) const KINDS: usize = 16;
/// The bits of an object's number that name the process which made it.
pub(super) const MARKS: u64 = 0xffff_0000;

/// The number of the objects of a kind that this process makes.
#[inline]
pub(super) fn number(kind: usize) -> u64 {
    NUMBERS[kind].load(Ordering::Relaxed)
}

/// This process, among those that forked from each other.
pub(super) fn mark() -> u64 {
    number(0) & MARKS
}

/// Has children know that they are some, from now on.
fn follow() {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        // SAFETY: the handlers only change numbers. The library is never unloaded.
        unsafe { libc::pthread_atfork(Some(begin), Some(end), Some(in_child)) };
    });
}

/// A thread forks, or is in a place where none may.
static IS_BUSY: AtomicBool = AtomicBool::new(false);
/// How long one waits for the other. A signal's handler that forks in such a place waits for its
/// own thread.
const PATIENCE: Duration = Duration::from_secs(1);

/// Runs `body` while no thread forks. A child would find the locks of the C library that `body`
/// takes held for ever.
pub(super) fn undisturbed<T>(body: impl FnOnce() -> T) -> T {
    struct Ends;
    impl Drop for Ends {
        fn drop(&mut self) {
            end();
        }
    }
    follow();
    begin();
    let _ends = Ends;
    body()
}

extern "C" fn begin() {
    let until = Instant::now() + PATIENCE;
    while IS_BUSY.swap(true, Ordering::Acquire) && Instant::now() < until {
        yield_now();
    }
}

extern "C" fn end() {
    IS_BUSY.store(false, Ordering::Release);
}

unsafe extern "C" fn in_child() {
    end();
    for number in &NUMBERS {
        let before = number.load(Ordering::Relaxed);
        let next = before.wrapping_add(MARKS & MARKS.wrapping_neg()) & MARKS;
        number.store(before & !MARKS | next, Ordering::Relaxed);
    }
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
