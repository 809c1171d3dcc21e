//! The accesses where there are no guarded ones.
#![allow(unsafe_code)]

use std::ptr;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use super::{Done, Op};

/// All accesses.
///
/// # Safety
/// As the function of [`guarded`](super) that calls it, and the memory must be there.
pub(super) unsafe extern "C" fn access(
    to: *mut u8,
    from: *const u8,
    len: usize,
    op: Op,
    more: u64,
) -> Done {
    let mut found = 0;
    // SAFETY: the caller vouches for all of it; atomics may be shared.
    unsafe {
        match op {
            Op::LoadWords => (0..len).step_by(8).for_each(|at| {
                let word = AtomicU64::from_ptr(from.add(at).cast_mut().cast());
                to.add(at).cast::<u64>().write_unaligned(word.load(Ordering::Acquire));
            }),
            Op::StoreWords => (0..len).step_by(8).for_each(|at| {
                let word = from.add(at).cast::<u64>().read_unaligned();
                AtomicU64::from_ptr(to.add(at).cast()).store(word, Ordering::Release);
            }),
            Op::Copy | Op::CopyWide => ptr::copy_nonoverlapping(from, to, len),
            Op::LoadBytes => (0..len).for_each(|at| {
                let byte = AtomicU8::from_ptr(from.add(at).cast_mut());
                to.add(at).write(byte.load(Ordering::Acquire));
            }),
            Op::StoreBytes => (0..len).for_each(|at| {
                AtomicU8::from_ptr(to.add(at)).store(*from.add(at), Ordering::Release);
            }),
            Op::Add => found = word(to).fetch_add(len as u64, Ordering::SeqCst),
            Op::Swap => {
                let (compare, order) = (len as u64, Ordering::SeqCst);
                found = word(to)
                    .compare_exchange(compare, more, order, order)
                    .unwrap_or_else(|found| found);
            }
            #[cfg(target_arch = "x86_64")]
            Op::Summed => return Done { there: 0, found },
            Op::End => return Done { there: 0, found },
        }
    }
    Done { there: 1, found }
}

/// # Safety
/// An aligned word must be there.
unsafe fn word<'a>(at: *mut u8) -> &'a AtomicU64 {
    // SAFETY: the caller vouches for it; atomics may be shared.
    unsafe { AtomicU64::from_ptr(at.cast()) }
}
