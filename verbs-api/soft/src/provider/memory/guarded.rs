//! Accesses that fail where there is no memory, instead of ending the process.
//!
//! - Problem: a page that was registered may be gone when it is touched: unmapped, protected,
//!   behind the end of its file, a huge page beyond the pool. The kernel then sends SIGSEGV or
//!   SIGBUS.
//! - Rule: all of user memory is touched by one function, which is written in assembly and keeps
//!   nothing on the stack. If a fault is at one of its instructions, the handler of
//!   [`faults`](super::faults) has it go on at its end, where it returns that. For the compiler
//!   each access is a call that returns once.
//! - Cost if wrong: for other processors, and under miri, an access is an ordinary one, and such a
//!   page ends the process.
//! - Measured: `docs/performance/method.md`; design: `docs/design/26-memory-faults.md`.
#![allow(unsafe_code)]
#![cfg_attr(
    any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))),
    expect(dead_code, reason = "no access goes on after a fault")
)]

#[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
mod other;
#[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
use self::other::access;

#[cfg(all(target_arch = "aarch64", not(miri)))]
macro_rules! assembly {
    () => {
        include_str!("guarded/aarch64.s")
    };
}
#[cfg(all(target_arch = "x86_64", not(miri)))]
macro_rules! assembly {
    () => {
        include_str!("guarded/x86_64.s")
    };
}

/// All accesses. Nothing of them is on the stack but the address to return to.
///
/// # Safety
/// As the function of this module that calls it.
#[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
#[unsafe(naked)]
unsafe extern "C" fn access(to: *mut u8, from: *const u8, len: usize, op: Op, more: u64) -> Done {
    std::arch::naked_asm!(assembly!())
}

/// The operation of an access.
#[repr(u32)]
#[derive(Debug, Clone, Copy)]
enum Op {
    LoadWords = 0,
    StoreWords = 1,
    Copy = 2,
    /// The same by registers of 32 bytes, for at least 128 bytes.
    CopyWide = 3,
    LoadBytes = 4,
    StoreBytes = 5,
    Add = 6,
    Swap = 7,
    /// Copies and sums: `more` is the address of [`Sums`].
    #[cfg(target_arch = "x86_64")]
    Summed = 8,
    /// Returns in `there` where the function ends.
    End = 9,
}

/// Whether there was memory, and the value that an atomic found.
#[repr(C)]
struct Done {
    there: u64,
    found: u64,
}

/// For the sum of copied bytes: the factors of a round of four registers, and the registers at the
/// end.
#[cfg(target_arch = "x86_64")]
#[repr(C, align(64))]
#[derive(Debug)]
pub(super) struct Sums {
    pub(super) factors: [i64; 8],
    pub(super) registers: [[i64; 8]; 4],
}

/// Where an access goes on that has a fault at `pc`; `None` if none is there.
pub(super) fn resumes_at(pc: usize) -> Option<usize> {
    let start = access as *const () as usize;
    // SAFETY: it touches nothing.
    let done = unsafe { access(std::ptr::null_mut(), std::ptr::null(), 0, Op::End, 0) };
    let end = usize::try_from(done.there).ok()?;
    (start..end).contains(&pc).then_some(end)
}

/// Copies whole words, of which those at `from` are aligned, in ascending order, each with acquire.
/// Returns whether all were there.
///
/// # Safety
/// `to` must be valid for writes of `len` bytes, a multiple of 8 and not 0. If there is memory at
/// `from`, Rust must not refer to it by more than atomics and raw pointers.
#[inline]
pub(super) unsafe fn load_words(to: *mut u8, from: *const u8, len: usize) -> bool {
    // SAFETY: the caller vouches for it.
    unsafe { access(to, from, len, Op::LoadWords, 0) }.there != 0
}

/// The same to `to`, whose words are aligned, each with release.
///
/// # Safety
/// As [`load_words`], with the sides exchanged.
#[inline]
pub(super) unsafe fn store_words(to: *mut u8, from: *const u8, len: usize) -> bool {
    // SAFETY: the caller vouches for it.
    unsafe { access(to, from, len, Op::StoreWords, 0) }.there != 0
}

/// Copies bytes, in units and in an order that are not defined.
///
/// # Safety
/// As [`load_words`] or [`store_words`], for any `len`; the two sides must not overlap.
#[inline]
pub(super) unsafe fn copy(to: *mut u8, from: *const u8, len: usize) -> bool {
    #[cfg(target_arch = "x86_64")]
    let wide = len >= 128 && is_x86_feature_detected!("avx");
    #[cfg(not(target_arch = "x86_64"))]
    let wide = false;
    let op = if wide { Op::CopyWide } else { Op::Copy };
    // SAFETY: the caller vouches for it, and the processor has the instructions.
    unsafe { access(to, from, len, op, 0) }.there != 0
}

/// Loads bytes, one after the other, each with acquire.
///
/// # Safety
/// As [`load_words`], for any `len` but 0 and any alignment.
#[inline]
pub(super) unsafe fn load_bytes(to: *mut u8, from: *const u8, len: usize) -> bool {
    // SAFETY: the caller vouches for it.
    unsafe { access(to, from, len, Op::LoadBytes, 0) }.there != 0
}

/// Stores bytes, one after the other, each with release.
///
/// # Safety
/// As [`store_words`], for any `len` but 0.
#[inline]
pub(super) unsafe fn store_bytes(to: *mut u8, from: *const u8, len: usize) -> bool {
    // SAFETY: the caller vouches for it.
    unsafe { access(to, from, len, Op::StoreBytes, 0) }.there != 0
}

/// Adds to the word at `at`, and returns its value before.
///
/// # Safety
/// `at` must be aligned. If there is memory, Rust must not refer to it by more than atomics and raw
/// pointers.
pub(super) unsafe fn fetch_add(at: *mut u64, add: u64) -> Option<u64> {
    // SAFETY: the caller vouches for it.
    let done = unsafe { access(at.cast(), std::ptr::null(), add as usize, Op::Add, 0) };
    (done.there != 0).then_some(done.found)
}

/// Stores `swap` in the word at `at` if `compare` is there, and returns its value before.
///
/// # Safety
/// As [`fetch_add`].
pub(super) unsafe fn compare_swap(at: *mut u64, compare: u64, swap: u64) -> Option<u64> {
    // SAFETY: the caller vouches for it.
    let done = unsafe { access(at.cast(), std::ptr::null(), compare as usize, Op::Swap, swap) };
    (done.there != 0).then_some(done.found)
}

/// Copies bytes, and folds them into the registers of `sums`.
///
/// # Safety
/// As [`copy`], for a `len` that is a multiple of 256 and not 0, on a processor with AVX512F and
/// VPCLMULQDQ.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(super) unsafe fn copy_summed(
    to: *mut u8,
    from: *const u8,
    len: usize,
    sums: &mut Sums,
) -> bool {
    // SAFETY: the caller vouches for it.
    unsafe { access(to, from, len, Op::Summed, (&raw mut *sums) as u64) }.there != 0
}
