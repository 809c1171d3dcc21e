//! User memory: buffers, and the only code that dereferences it.
//!
//! Registered memory is shared with a peer, as memory under DMA is. The peer may read or write it
//! at any time, and so may other threads of the program. So this module makes no Rust reference to
//! it: all access is by raw copies and atomics. A copy during a concurrent write sees any mix of
//! old and new aligned words.
#![allow(unsafe_code)]

mod summed;

use std::alloc::{self, Layout};
use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use rocinante_stack::mem::{Access, AtomicOp};
use rustix::io::Errno;
use rustix::mm;

pub(crate) use self::summed::Summing;

/// Memory that a region owns: zeroed, page-aligned.
#[derive(Debug)]
pub(crate) struct Buffer {
    start: *mut u8,
    layout: Layout,
}

// SAFETY: the buffer is plain bytes that this value owns; every access goes through raw copies and
// atomics.
unsafe impl Send for Buffer {}
// SAFETY: as above; shared access never makes references.
unsafe impl Sync for Buffer {}

/// Alignment of owned buffers.
const PAGE: usize = 4096;

impl Buffer {
    /// `len` zero bytes, or `None` if the allocation fails.
    pub(crate) fn zeroed(len: usize) -> Option<Self> {
        let layout = Layout::from_size_align(len.max(1), PAGE).ok()?;
        // SAFETY: the layout's size is at least 1.
        let start = unsafe { alloc::alloc_zeroed(layout) };
        (!start.is_null()).then_some(Self { start, layout })
    }

    pub(crate) fn address(&self) -> u64 {
        self.start as u64
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: `start` was allocated with this layout and is freed once.
        unsafe { alloc::dealloc(self.start, self.layout) };
    }
}

/// A range of the process's memory. Its holder vouches for its validity: the region table admitted
/// it, and a region leaves the table before its memory is freed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Range {
    pub(crate) address: u64,
    pub(crate) len: usize,
}

/// Whether memory is mapped at all of `len` bytes from `address` on: one system call, which costs a
/// step for each mapping there, and changes nothing (msync(2), `MS_ASYNC`).
pub(crate) fn is_mapped(address: u64, len: u64) -> bool {
    let Some((start, len)) = pages(address, len) else { return false };
    if len == 0 || cfg!(miri) {
        return true;
    }
    // SAFETY: the kernel writes nothing, and reports what is not mapped.
    let found = unsafe { mm::msync(start as *mut c_void, len, mm::MsyncFlags::ASYNC) };
    found != Err(Errno::NOMEM)
}

/// Whether a device may take these bytes: they are mapped, and their first and last page can be
/// read, and written if `writable`. It brings these two pages in, and changes nothing in them.
pub(crate) fn is_usable(address: u64, len: u64, writable: bool) -> bool {
    let Some(last) = len.checked_sub(1) else { return true };
    is_mapped(address, len)
        && [address, address + last].iter().all(|byte| populate(*byte, 1, writable).is_ok())
}

/// Brings the pages of a range in, for writing if `writable` (madvise(2), `MADV_POPULATE_READ`).
/// Linux before 5.14 does not know how: then pages come in when they are used.
///
/// # Errors
/// A page is not mapped, does not permit that, or is behind the end of its file.
pub(crate) fn populate(address: u64, len: u64, writable: bool) -> Result<(), Errno> {
    let (start, len) = pages(address, len).ok_or(Errno::NOMEM)?;
    if len == 0 || cfg!(miri) {
        return Ok(());
    }
    let advice =
        if writable { mm::Advice::LinuxPopulateWrite } else { mm::Advice::LinuxPopulateRead };
    // SAFETY: it changes no byte, and fails where nothing is mapped.
    let done = unsafe { mm::madvise(start as *mut c_void, len, advice) };
    match done {
        // Either the pages do not permit it, or the kernel does not know the advice.
        Err(Errno::INVAL) if knows(advice) => Err(Errno::INVAL),
        Err(error @ (Errno::NOMEM | Errno::FAULT)) => Err(error),
        _ => Ok(()),
    }
}

/// Whether the kernel knows the advice: it takes it for a page of our own.
fn knows(advice: mm::Advice) -> bool {
    let own = 0u64;
    let Some((start, len)) = pages((&raw const own) as u64, 8) else { return false };
    // SAFETY: as in `populate`.
    unsafe { mm::madvise(start as *mut c_void, len, advice) }.is_ok()
}

/// The whole pages around a range; `None` if it wraps around the address space.
fn pages(address: u64, len: u64) -> Option<(u64, usize)> {
    let page = rustix::param::page_size() as u64;
    let start = address & !(page - 1);
    let end = address.checked_add(len)?.checked_next_multiple_of(page)?;
    Some((start, usize::try_from(if len == 0 { 0 } else { end - start }).ok()?))
}

/// The most bytes that are moved word by word: a cache line.
const WORDS_MAX: usize = 64;

impl Range {
    /// Whether it is moved word by word: a few whole aligned words.
    #[inline]
    const fn is_words(self) -> bool {
        self.len <= WORDS_MAX && self.address.is_multiple_of(8) && self.len.is_multiple_of(8)
    }

    /// The word that begins `offset` bytes behind the first.
    ///
    /// # Safety
    /// The range must [consist of words](Self::is_words) and be valid for reads and writes, or for
    /// reads if the word is only loaded, as long as the reference lives; `offset` must be a
    /// multiple of 8 inside it.
    #[inline]
    unsafe fn word_at<'a>(self, offset: usize) -> &'a AtomicU64 {
        // SAFETY: the caller vouches for the range, and atomics may be shared.
        unsafe { AtomicU64::from_ptr((self.address as *mut u64).byte_add(offset)) }
    }

    /// The address by which work requests and peers name its first byte.
    pub(crate) fn start(self, access: Access) -> u64 {
        if access.admits(Access::ZERO_BASED) { 0 } else { self.address }
    }

    /// Copies `src` into the range, ascending. The last word is stored last and with release, so
    /// that a thread that sees the last byte sees all bytes. If the range ends with a whole aligned
    /// word, that word is stored at once; other ends are stored byte by byte. Up to [`WORDS_MAX`]
    /// bytes of aligned words are stored word by word, each whole and with release.
    ///
    /// # Safety
    /// The range must be valid for writes of `src.len()` bytes for the duration of the call.
    #[inline]
    pub(crate) unsafe fn store(self, src: &[u8]) {
        debug_assert_eq!(self.len, src.len());
        if self.is_words() {
            for (index, bytes) in src.as_chunks().0.iter().enumerate() {
                // SAFETY: the range consists of words, and the caller vouches for it.
                let word = unsafe { self.word_at(8 * index) };
                word.store(u64::from_ne_bytes(*bytes), Ordering::Release);
            }
            return;
        }
        let Some(last) = src.len().checked_sub(1) else { return };
        let start = self.address as *mut u8;
        // The bytes from the last word boundary on.
        let tail = ((self.address + last as u64) & !7).saturating_sub(self.address) as usize;
        // SAFETY: `tail <= last`, so both ranges are within the range for which the caller vouches.
        // User memory and a packet buffer of the port never overlap.
        unsafe {
            ptr::copy_nonoverlapping(src.as_ptr(), start, tail);
            let word = start.add(tail);
            if let Some(bytes) = src[tail..].first_chunk::<8>()
                && (word as usize).is_multiple_of(8)
            {
                let value = u64::from_ne_bytes(*bytes);
                AtomicU64::from_ptr(word.cast()).store(value, Ordering::Release);
            } else {
                for (i, byte) in src[tail..].iter().enumerate() {
                    AtomicU8::from_ptr(word.add(i)).store(*byte, Ordering::Release);
                }
            }
        }
    }

    /// Copies the range into `dst`. Up to [`WORDS_MAX`] bytes of aligned words are loaded word by
    /// word, ascending, each whole and with acquire.
    ///
    /// # Safety
    /// The range must be valid for reads of `dst.len()` bytes for the duration of the call.
    #[inline]
    pub(crate) unsafe fn load(self, dst: &mut [u8]) {
        debug_assert_eq!(self.len, dst.len());
        if self.is_words() {
            for (index, bytes) in dst.as_chunks_mut().0.iter_mut().enumerate() {
                // SAFETY: the range consists of words, and the caller vouches for it.
                let word = unsafe { self.word_at(8 * index) };
                *bytes = word.load(Ordering::Acquire).to_ne_bytes();
            }
            return;
        }
        // SAFETY: the caller vouches for the range; a packet buffer or the program's own slice does
        // not overlap registered memory.
        unsafe { ptr::copy_nonoverlapping(self.address as *const u8, dst.as_mut_ptr(), dst.len()) };
        prefetch(self.address.wrapping_add(dst.len() as u64), dst.len());
    }

    /// Copies the range into `dst`. Returns the CRC-32 of the copied bytes if the copy computed it.
    ///
    /// # Safety
    /// As for [`load`](Self::load).
    #[inline]
    pub(crate) unsafe fn load_summed(self, dst: &mut [u8], summing: Summing) -> Option<u32> {
        debug_assert_eq!(self.len, dst.len());
        // SAFETY: as in `load`, for both.
        unsafe {
            let sum = summing.copy(self.address as *const u8, dst);
            if sum.is_none() {
                self.load(dst);
            }
            sum
        }
    }

    /// Performs an atomic on the aligned word of the range, against local threads too.
    ///
    /// # Safety
    /// The range must be 8 bytes, aligned to 8, valid for reads and writes for the duration of the
    /// call.
    pub(crate) unsafe fn atomic(self, op: AtomicOp) -> u64 {
        debug_assert!(self.len == 8 && self.address.is_multiple_of(8));
        // SAFETY: the caller vouches for the word; all access to registered memory by this crate is
        // raw or atomic.
        let word = unsafe { AtomicU64::from_ptr(self.address as *mut u64) };
        match op {
            AtomicOp::FetchAdd { add } => word.fetch_add(add, Ordering::SeqCst),
            AtomicOp::CompareSwap { compare, swap } => word
                .compare_exchange(compare, swap, Ordering::SeqCst, Ordering::SeqCst)
                .unwrap_or_else(|found| found),
        }
    }

    /// Reads the byte at `at` with acquire, the counterpart of [`store`](Self::store). It reads the
    /// last byte of an aligned word as part of that word, if the range has the whole word. Two
    /// concurrent atomic accesses of different sizes to the same bytes would be a race in Rust's
    /// model (`std::sync::atomic`, "Memory model for atomic accesses").
    ///
    /// # Safety
    /// The range must be valid for reads, and `at` be inside it.
    pub(crate) unsafe fn load_byte(self, at: usize) -> u8 {
        debug_assert!(at < self.len);
        let byte = self.address + at as u64;
        // SAFETY: the caller vouches for the range, and the byte or the seven before it too are in
        // it.
        unsafe {
            if byte % 8 == 7 && at >= 7 {
                let word = AtomicU64::from_ptr((byte - 7) as *mut u64).load(Ordering::Acquire);
                word.to_ne_bytes()[7]
            } else {
                AtomicU8::from_ptr(byte as *mut u8).load(Ordering::Acquire)
            }
        }
    }

    /// The aligned word of the range.
    ///
    /// # Safety
    /// As for [`Range::atomic`], and the memory must outlive the reference.
    pub(crate) unsafe fn word<'a>(self) -> &'a AtomicU64 {
        debug_assert!(self.len == 8 && self.address.is_multiple_of(8));
        // SAFETY: the caller vouches for the word; atomics may be shared.
        unsafe { AtomicU64::from_ptr(self.address as *mut u64) }
    }
}

/// Prefetches the `len` bytes from `address` on. `len` bytes that end there were just copied, and
/// the next packet of the message continues there once this packet's CRC is computed. Processors do
/// not prefetch across the end of a page by themselves.
#[inline]
fn prefetch(address: u64, len: usize) {
    /// Shorter packets are usually whole messages.
    const LEN_MIN: usize = 1024;
    if len < LEN_MIN {
        return;
    }
    #[cfg(target_arch = "x86_64")]
    for line in (0..len).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch is a hint: it reads nothing, and never faults, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>((address as *const i8).wrapping_add(line)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn memory_is_there_until_it_is_unmapped() {
        let page = rustix::param::page_size();
        let flags = mm::MapFlags::PRIVATE;
        let all = mm::ProtFlags::READ | mm::ProtFlags::WRITE;
        // SAFETY: new memory, which nothing else uses.
        let start = unsafe { mm::mmap_anonymous(ptr::null_mut(), 4 * page, all, flags) }.unwrap();
        let (at, len) = (start as u64, page as u64);
        let at = |page: u64| at + page * len;
        assert!(is_usable(at(0), 4 * len, true) && is_usable(at(0), 0, true));
        // SAFETY: it is ours.
        unsafe {
            mm::munmap(start.byte_add(page), page).unwrap();
            mm::mprotect(start.byte_add(2 * page), page, mm::MprotectFlags::READ).unwrap();
            mm::mprotect(start.byte_add(3 * page), page, mm::MprotectFlags::empty()).unwrap();
        }
        for (from, to, mapped) in [(0, len, true), (0, len + 1, false), (len, len + 1, false)] {
            assert_eq!(is_mapped(at(0) + from, to - from), mapped, "{from} to {to}");
        }
        assert!(is_mapped(at(2), 2 * len) && !is_mapped(at(0), 4 * len));
        for (page, readable, writable) in
            [(0, true, true), (1, false, false), (2, true, false), (3, false, false)]
        {
            assert_eq!(is_usable(at(page) + 5, 1, false), readable, "{page}");
            assert_eq!(is_usable(at(page) + 5, 1, true), writable, "{page}");
        }
        assert!(!is_usable(at(2), len + 1, false), "its last page");
        assert!(!is_mapped(u64::MAX - 1, 4) && !is_mapped(0, 1));
        // SAFETY: as above.
        unsafe { mm::munmap(start, 4 * page).unwrap() };
    }

    #[test]
    fn every_alignment_and_length_is_stored_exactly() {
        let buffer = Buffer::zeroed(256).unwrap();
        let src: Vec<u8> = (1..=64).collect();
        for offset in 0..16 {
            for len in 0..=40 {
                let whole = Range { address: buffer.address(), len: 128 };
                // SAFETY: all ranges are inside the buffer.
                unsafe {
                    whole.store(&[0xee; 128]);
                    let range = Range { address: buffer.address() + offset, len };
                    range.store(&src[..len]);
                    let mut seen = [0; 128];
                    whole.load(&mut seen);
                    let mut expected = [0xee; 128];
                    expected[offset as usize..][..len].copy_from_slice(&src[..len]);
                    assert_eq!(seen, expected, "offset {offset} length {len}");
                }
            }
        }
    }

    #[test]
    fn each_byte_is_loaded_from_its_place() {
        let buffer = Buffer::zeroed(64).unwrap();
        let src: Vec<u8> = (1..=64).collect();
        for (start, len) in [(0, 64), (1, 63), (3, 20), (7, 9), (8, 8), (15, 1)] {
            let range = Range { address: buffer.address() + start, len };
            // SAFETY: the range is inside the buffer, and the byte inside the range.
            unsafe {
                range.store(&src[..len]);
                assert!((0..len).all(|at| range.load_byte(at) == src[at]), "{len} at {start}");
            }
        }
    }

    /// One thread counts in eight words, each of which has the same bytes, while another looks.
    fn race(write: impl Fn(&Range, u64) + Sync, check: impl Fn(&Range)) {
        let buffer = Buffer::zeroed(WORDS_MAX).unwrap();
        let range = Range { address: buffer.address(), len: WORDS_MAX };
        let rounds = if cfg!(miri) { 8 } else { 200_000 };
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| (1..=rounds).for_each(|round| write(&range, round)));
            while !writer.is_finished() {
                check(&range);
            }
        });
    }

    fn words(bytes: &[u8]) -> Vec<u64> {
        bytes.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word)).collect()
    }

    #[test]
    fn a_line_is_stored_word_by_word_ascending() {
        let write = |range: &Range, round: u64| {
            // SAFETY: the range is the buffer.
            unsafe { range.store(&round.to_ne_bytes().repeat(8)) };
        };
        let check = |range: &Range| {
            // SAFETY: as above. Descending: what was stored before a word is there with it.
            let seen = [56, 48, 40, 32, 24, 16, 8, 0]
                .map(|at| unsafe { range.word_at(at) }.load(Ordering::Acquire));
            assert!(seen.is_sorted(), "{seen:?}");
        };
        race(write, check);
    }

    #[test]
    fn a_line_is_loaded_word_by_word_ascending() {
        let write = |range: &Range, round: u64| {
            for at in [56, 48, 40, 32, 24, 16, 8, 0] {
                // SAFETY: the range is the buffer.
                unsafe { range.word_at(at) }.store(round, Ordering::Release);
            }
        };
        let check = |range: &Range| {
            let mut seen = [0; WORDS_MAX];
            // SAFETY: as above. The word that is stored last is loaded first.
            unsafe { range.load(&mut seen) };
            assert!(words(&seen).is_sorted(), "{:?}", words(&seen));
        };
        race(write, check);
    }

    #[test]
    fn atomics_return_what_they_found() {
        let buffer = Buffer::zeroed(8).unwrap();
        let range = Range { address: buffer.address(), len: 8 };
        // SAFETY: the buffer is page-aligned and has 8 bytes.
        unsafe {
            assert_eq!(range.atomic(AtomicOp::FetchAdd { add: 5 }), 0);
            assert_eq!(range.atomic(AtomicOp::CompareSwap { compare: 4, swap: 9 }), 5);
            assert_eq!(range.atomic(AtomicOp::CompareSwap { compare: 5, swap: 9 }), 5);
            assert_eq!(range.word().load(Ordering::SeqCst), 9);
        }
    }
}
