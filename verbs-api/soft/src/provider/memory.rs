//! User memory: buffers, and the only code that dereferences it.
//!
//! Registered memory is shared with a peer, as memory under DMA is. The peer may read or write it
//! at any time, and so may other threads of the program. So this module makes no Rust reference to
//! it: all access is by raw copies and atomics. A copy during a concurrent write sees any mix of
//! old and new aligned words.
#![allow(unsafe_code)]

pub(crate) mod faults;
mod guarded;
mod mappings;
mod summed;

use std::ffi::c_void;
use std::io;
use std::ptr;
use std::sync::atomic::AtomicU64;

use rocinante_stack::mem::{Access, AtomicOp};
use rustix::io::Errno;
use rustix::mm;

pub(crate) use self::summed::Summing;
use crate::tuning::memory::{PREFETCH_MIN, WORDS_MAX};

/// Memory that a region owns: zero and page-aligned. Its pages come in when they are used.
#[derive(Debug)]
pub struct Buffer {
    start: *mut c_void,
    len: usize,
}

// SAFETY: the buffer is plain bytes that this value owns; every access goes through raw copies and
// atomics.
unsafe impl Send for Buffer {}
// SAFETY: as above; shared access never makes references.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// `len` zero bytes, or `None` if there is no room.
    pub fn zeroed(len: usize) -> Option<Self> {
        let len = len.max(1).checked_next_multiple_of(rustix::param::page_size())?;
        let flags = mm::ProtFlags::READ | mm::ProtFlags::WRITE;
        // SAFETY: new memory, at an address of the kernel's choice.
        let start =
            unsafe { mm::mmap_anonymous(ptr::null_mut(), len, flags, mm::MapFlags::PRIVATE) };
        start.ok().map(|start| Self { start, len })
    }

    pub fn address(&self) -> u64 {
        self.start as u64
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: `start` was mapped with this length and is unmapped once.
        let done = unsafe { mm::munmap(self.start, self.len) };
        debug_assert_eq!(done, Ok(()));
    }
}

/// A range of the process's memory. The region table admitted it, and a region leaves the table
/// before its memory is freed; but a program may have taken its pages away, or their permission.
#[derive(Debug, Clone, Copy)]
pub struct Range {
    pub address: u64,
    pub len: usize,
}

/// What should be memory cannot be touched as it should.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoMemory;

#[inline]
fn done(there: bool) -> Result<(), NoMemory> {
    if there { Ok(()) } else { Err(NoMemory) }
}

/// Whether memory is mapped at all of `len` bytes from `address` on (mincore(2)). It changes
/// nothing, and looks at no byte: valgrind reports msync(2) for bytes that nothing was written to.
pub fn is_mapped(address: u64, len: u64) -> bool {
    let Some((start, len)) = pages(address, len) else { return false };
    if cfg!(miri) {
        return true;
    }
    let mut resident = [0_u8; 4096];
    let piece = resident.len() * rustix::param::page_size();
    // Of many pages the kernel's list is shorter.
    let covered = if len > piece { mappings::cover(start, len as u64) } else { None };
    covered.unwrap_or_else(|| {
        (0..len).step_by(piece).all(|from| {
            let (start, len) = (start as usize + from, piece.min(len - from));
            // SAFETY: the kernel writes a byte for each page of the piece, or fails.
            let found = unsafe { libc::mincore(start as *mut c_void, len, resident.as_mut_ptr()) };
            found == 0 || io::Error::last_os_error().raw_os_error() != Some(libc::ENOMEM)
        })
    })
}

/// Whether a device may take these bytes: they are mapped by mappings that may be read, and written
/// if `writable`, and their first and last page can be. It brings these two pages in, and changes
/// nothing in them.
pub(crate) fn is_usable(address: u64, len: u64, writable: bool) -> bool {
    let Some(last) = len.checked_sub(1) else { return true };
    if address.checked_add(len).is_none() {
        return false;
    }
    let permitted = if cfg!(miri) { None } else { mappings::permit(address, len, writable) };
    permitted.unwrap_or_else(|| is_mapped(address, len))
        && [address, address + last].iter().all(|byte| populate(*byte, 1, writable).is_ok())
}

/// Whether all of `len` bytes from `address` on can be read now: reads a byte of each page.
#[inline]
pub fn is_readable(address: u64, len: usize) -> bool {
    let Some(last) = (len as u64).checked_sub(1).and_then(|last| address.checked_add(last)) else {
        return len == 0;
    };
    // SAFETY: Rust may refer to that memory, and nothing is changed.
    let is_there = |at: u64| unsafe { Range { address: at, len: 1 }.load_byte(0) }.is_ok();
    // Pages of other sizes consist of several of these.
    is_there(address)
        && (address >> 12 == last >> 12
            || ((address >> 12) + 1..=last >> 12).all(|page| is_there(page << 12)))
}

/// Brings the pages of a range in, for writing if `writable` (madvise(2), `MADV_POPULATE_READ`).
/// Linux before 5.14 does not know how: then pages come in when they are used. Error: a page is not
/// mapped, does not permit that, or is behind the end of its file.
pub fn populate(address: u64, len: u64, writable: bool) -> Result<(), Errno> {
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

impl Range {
    /// Whether it is moved word by word: a few whole aligned words.
    #[inline]
    const fn is_words(self) -> bool {
        self.len <= WORDS_MAX && self.address.is_multiple_of(8) && self.len.is_multiple_of(8)
    }

    /// The address by which work requests and peers name its first byte.
    pub fn start(self, access: Access) -> u64 {
        if access.admits(Access::ZERO_BASED) { 0 } else { self.address }
    }

    /// Copies `src` into the range, ascending. The last word is stored last and with release, so
    /// that a thread that sees the last byte sees all bytes. If the range ends with a whole aligned
    /// word, that word is stored at once; other ends are stored byte by byte. Up to `WORDS_MAX`
    /// bytes of aligned words are stored word by word, each whole and with release. Error: a part
    /// of the range cannot be written; the part before it may have been.
    ///
    /// # Safety
    /// If there is memory, Rust must not refer to it by more than atomics and raw pointers.
    #[inline]
    pub unsafe fn store(self, src: &[u8]) -> Result<(), NoMemory> {
        debug_assert_eq!(self.len, src.len());
        let (to, from) = (self.address as *mut u8, src.as_ptr());
        let Some(last) = src.len().checked_sub(1) else { return Ok(()) };
        // The bytes from the last word boundary on.
        let tail = ((self.address + last as u64) & !7).saturating_sub(self.address) as usize;
        let (word, rest) = (to.wrapping_add(tail), src.len() - tail);
        // SAFETY: `tail <= last`, so both parts are within the range for which the caller vouches.
        // User memory and a packet buffer of the port never overlap.
        let there = unsafe {
            if self.is_words() {
                guarded::store_words(to, from, src.len())
            } else {
                (tail == 0 || guarded::copy(to, from, tail))
                    && match rest == 8 && (word as usize).is_multiple_of(8) {
                        true => guarded::store_words(word, from.add(tail), 8),
                        false => guarded::store_bytes(word, from.add(tail), rest),
                    }
            }
        };
        done(there)
    }

    /// Copies the range into `dst`. Up to `WORDS_MAX` bytes of aligned words are loaded word by
    /// word, ascending, each whole and with acquire. Error: a part of the range cannot be read.
    ///
    /// # Safety
    /// As for [`store`](Self::store).
    #[inline]
    pub unsafe fn load(self, dst: &mut [u8]) -> Result<(), NoMemory> {
        debug_assert_eq!(self.len, dst.len());
        let (to, from, len) = (dst.as_mut_ptr(), self.address as *const u8, dst.len());
        if len == 0 {
            return Ok(());
        }
        if self.is_words() {
            // SAFETY: the caller vouches for the range.
            return done(unsafe { guarded::load_words(to, from, len) });
        }
        // SAFETY: as above; a packet buffer or the program's own slice does not overlap registered
        // memory.
        let there = unsafe { guarded::copy(to, from, len) };
        prefetch(self.address.wrapping_add(len as u64), len);
        done(there)
    }

    /// Copies the range into `dst`. Returns the CRC-32 of the copied bytes if the copy computed it.
    /// Error: as for [`load`](Self::load).
    ///
    /// # Safety
    /// As for [`store`](Self::store).
    #[inline]
    pub(crate) unsafe fn load_summed(
        self,
        dst: &mut [u8],
        summing: Summing,
    ) -> Result<Option<u32>, NoMemory> {
        debug_assert_eq!(self.len, dst.len());
        // SAFETY: as in `load`, for both.
        unsafe {
            let sum = summing.copy(self.address as *const u8, dst)?;
            if sum.is_none() {
                self.load(dst)?;
            }
            Ok(sum)
        }
    }

    /// Performs an atomic on the aligned word of the range, against local threads too. Error: the
    /// word cannot be read and written.
    ///
    /// # Safety
    /// As for [`store`](Self::store), and the range must be 8 bytes, aligned to 8.
    pub(crate) unsafe fn atomic(self, op: AtomicOp) -> Result<u64, NoMemory> {
        debug_assert!(self.len == 8 && self.address.is_multiple_of(8));
        let at = self.address as *mut u64;
        // SAFETY: the caller vouches for the word; all access to registered memory by this crate is
        // raw or atomic.
        let found = unsafe {
            match op {
                AtomicOp::FetchAdd { add } => guarded::fetch_add(at, add),
                AtomicOp::CompareSwap { compare, swap } => guarded::compare_swap(at, compare, swap),
            }
        };
        found.ok_or(NoMemory)
    }

    /// Reads the byte at `at` with acquire, the counterpart of [`store`](Self::store). It reads the
    /// last byte of an aligned word as part of that word, if the range has the whole word. Two
    /// concurrent atomic accesses of different sizes to the same bytes would be a race in Rust's
    /// model (`std::sync::atomic`, "Memory model for atomic accesses"). Error: the byte cannot be
    /// read.
    ///
    /// # Safety
    /// As for [`store`](Self::store), and `at` must be inside the range.
    pub unsafe fn load_byte(self, at: usize) -> Result<u8, NoMemory> {
        debug_assert!(at < self.len);
        let (byte, mut word) = (self.address + at as u64, [0; 8]);
        // SAFETY: the caller vouches for the range, and the byte or the seven before it too are in
        // it.
        let there = unsafe {
            if byte % 8 == 7 && at >= 7 {
                guarded::load_words(word.as_mut_ptr(), (byte - 7) as *const u8, 8)
            } else {
                guarded::load_bytes(&raw mut word[7], byte as *const u8, 1)
            }
        };
        done(there).map(|()| word[7])
    }

    /// The aligned word of the range.
    ///
    /// # Safety
    /// The range must be 8 bytes, aligned to 8, and valid for reads and writes as long as the
    /// reference lives.
    pub unsafe fn word<'a>(self) -> &'a AtomicU64 {
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
    // Shorter packets are usually whole messages.
    if len < PREFETCH_MIN {
        return;
    }
    #[cfg(target_arch = "x86_64")]
    for line in (0..len).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch is a hint: it reads nothing, and faults at no address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>((address as *const i8).wrapping_add(line)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

#[cfg(test)]
mod tests;
