//! Short turns on the processor for threads that are woken by packets: the background threads, and
//! those of the program that sleep because others want their processor (`rivals.rs`).
//!
//! - Problem: a thread that a packet wakes waits behind a thread that computes for the rest of its
//!   turn, 3 ms by default; behind sixteen of them for most of a tenth of a second.
//! - Rule: Linux (EEVDF) runs the thread whose turn would end first of those that have had no more
//!   than their share. A thread with turns of 100 µs goes before the others, and gets no more of
//!   the processor than they do. Linux 6.12 lets each thread choose (`sched_setattr(2)`,
//!   `sched_runtime`); an older kernel, or a filter of system calls, refuses, and nothing changes.
//! - Cost if wrong: a thread that is busy for long is interrupted more often.
//! - Measured: `docs/performance/method.md`.

#![allow(unsafe_code)]

use crate::tuning::short_turns::{ENABLED, TURN_NS};

/// Gives this thread short turns, if the kernel can and the thread is an ordinary one. Returns the
/// length of its turns before, for [`set`].
pub(super) fn shorten() -> Option<u64> {
    if ENABLED { set(TURN_NS) } else { None }
}

/// Gives this thread turns of this length; 0 is the kernel's default. Returns the length before.
pub(super) fn set(turn_ns: u64) -> Option<u64> {
    let mut attr = get()?;
    let ordinary = [libc::SCHED_OTHER, libc::SCHED_BATCH];
    if !ordinary.contains(&attr.sched_policy.cast_signed()) {
        return None;
    }
    let before = std::mem::replace(&mut attr.sched_runtime, turn_ns);
    // SAFETY: the kernel reads the structure, which has the size that it says. 0 is this thread.
    let done = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) };
    (done == 0).then_some(before)
}

/// The length of this thread's turns in nanoseconds; 0 where the kernel lets no thread choose.
#[cfg(test)]
pub(super) fn length() -> Option<u64> {
    Some(get()?.sched_runtime)
}

/// Miri knows neither call.
#[cfg(miri)]
fn get() -> Option<libc::sched_attr> {
    None
}

/// This thread's attributes from the kernel.
#[cfg(not(miri))]
fn get() -> Option<libc::sched_attr> {
    // SAFETY: zeroes are a value of each of its fields.
    let mut attr: libc::sched_attr = unsafe { std::mem::zeroed() };
    let size = size_of_val(&attr);
    // SAFETY: the kernel writes `size` bytes at most. 0 is this thread.
    let done = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attr, size, 0) };
    (done == 0).then_some(attr)
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    /// Kernels before 6.12 report 0 of ordinary threads and ignore a new value.
    #[test]
    fn a_thread_gets_short_turns_and_keeps_its_nice_value() {
        let thread = std::thread::spawn(|| {
            let before = get().expect("every kernel of ours has the call");
            let length = shorten().expect("an ordinary thread");
            let short = get().unwrap();
            assert_eq!(set(length), Some(short.sched_runtime));
            assert_eq!(get().unwrap().sched_runtime, before.sched_runtime);
            (before, short)
        });
        let (before, after) = thread.join().unwrap();
        assert_eq!(
            (after.sched_policy, after.sched_nice),
            (before.sched_policy, before.sched_nice)
        );
        match before.sched_runtime {
            0 => eprintln!("this kernel has no turns of a thread's own"),
            _ => assert_eq!(after.sched_runtime, TURN_NS),
        }
    }
}
