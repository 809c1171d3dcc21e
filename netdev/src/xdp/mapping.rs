//! Mapped memory: the UMEM (anonymous) and the rings (of the socket).
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;

/// A readable and writable mapping, unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread. `Mapping` itself gives out only its
// address; the code that dereferences it is responsible for the access.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Fresh zeroed memory, present in RAM and absent from forked children.
    pub(crate) fn anonymous(len: usize) -> io::Result<Self> {
        // Miri supports neither populating nor advice.
        let populate = if cfg!(miri) { 0 } else { libc::MAP_POPULATE };
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | populate;
        let mapping = Self::map(len, flags, -1, 0)?;
        if !cfg!(miri) {
            // SAFETY: the range is the mapping just made. The advice is best effort: without it a
            // child would inherit a copy that it cannot use.
            unsafe { libc::madvise(mapping.base.as_ptr().cast(), len, libc::MADV_DONTFORK) };
        }
        Ok(mapping)
    }

    /// Memory of `fd` at `offset`.
    pub(crate) fn of_fd(fd: BorrowedFd<'_>, offset: u64, len: usize) -> io::Result<Self> {
        Self::map(len, libc::MAP_SHARED | libc::MAP_POPULATE, fd.as_raw_fd(), offset)
    }

    /// First byte; page-aligned.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    fn map(len: usize, flags: i32, fd: i32, offset: u64) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(std::ptr::null_mut(), len, protection, flags, fd, offset.cast_signed())
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mapped at 0"))?;
        Ok(Self { base, len })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is the mapping that this value owns, and nothing borrowed from it
        // outlives its owner.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}
