//! Short turns on the processor for threads that are woken by packets.
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

/// Gives this thread short turns, if the kernel can and the thread is an ordinary one.
pub(super) fn shorten() {
    if ENABLED
        && let Some(mut attr) = get()
        && matches!(attr.sched_policy.cast_signed(), libc::SCHED_OTHER | libc::SCHED_BATCH)
    {
        attr.sched_runtime = TURN_NS;
        // SAFETY: the kernel reads the structure, which has the size that it says. 0 is this
        // thread.
        let _ = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) };
    }
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
            shorten();
            (before, get().unwrap())
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
