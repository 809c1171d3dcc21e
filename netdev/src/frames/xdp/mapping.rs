//! Mapped memory: the UMEM (of a memory file, so that another process can map it too), the rings
//! (of the socket), a number that the program reads, and the records of a capture's program.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::process::{Resource, getrlimit};

use crate::kernel::inherited;

const WRITABLE: i32 = libc::PROT_READ | libc::PROT_WRITE;

/// A mapping, unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread. `Mapping` itself gives out only its
// address; the code that dereferences it is responsible for the access.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Fresh zeroed memory of no descriptor.
    #[cfg(test)]
    pub(crate) fn anonymous(len: usize) -> io::Result<Self> {
        // Miri does not support populating.
        let populate = if cfg!(miri) { 0 } else { libc::MAP_POPULATE };
        Self::map(len, WRITABLE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | populate, -1, 0)
    }

    /// Memory of `fd` at `offset`, readable and writable, absent from forked children too.
    pub(crate) fn of_fd(fd: BorrowedFd<'_>, offset: u64, len: usize) -> io::Result<Self> {
        Self::shared(fd, WRITABLE, offset, len)
    }

    /// The same with this protection.
    pub(crate) fn shared(
        fd: BorrowedFd<'_>,
        protection: i32,
        offset: u64,
        len: usize,
    ) -> io::Result<Self> {
        let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
        let mapping = Self::map(len, protection, flags, fd.as_raw_fd(), offset)?;
        // SAFETY: the range is the mapping just made. The advice is best effort: without it a child
        // would keep memory that it has no use for, and the socket that it belongs to.
        unsafe { libc::madvise(mapping.base.as_ptr().cast(), len, libc::MADV_DONTFORK) };
        Ok(mapping)
    }

    /// First byte; page-aligned.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    fn map(len: usize, protection: i32, flags: i32, fd: i32, offset: u64) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
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

/// A number in a map of bpf(2), which a program reads. To change it takes no privilege, not even
/// bpf(2), which the seccomp profiles of containers forbid.
#[derive(Debug)]
pub(crate) struct SharedWord(Mapping);

impl SharedWord {
    /// Maps the first eight bytes of a map.
    pub(crate) fn of_fd(map: BorrowedFd<'_>) -> io::Result<Self> {
        Mapping::of_fd(map, 0, size_of::<AtomicU64>()).map(Self)
    }

    /// Changes the number.
    pub(crate) fn store(&self, word: u64) {
        // SAFETY: the start of the mapping, which is aligned to a page and lives as long as `self`.
        // Processes access the number as a whole. The program reads it in the kernel, in two parts:
        // it may find the MAC of one frame to be neither the old nor the new one, and pass the
        // frame.
        let shared = unsafe { self.0.base().cast::<AtomicU64>().as_ref() };
        shared.store(word, Ordering::Relaxed);
    }
}

/// The memory of a file as numbers, which another process may have, too. A page of it takes memory
/// once it is touched.
#[derive(Debug)]
pub(crate) struct SharedWords(Mapping);

// SAFETY: its memory is accessed as atomic numbers alone.
unsafe impl Sync for SharedWords {}

impl SharedWords {
    /// Maps the first `len` bytes of `fd`, which is a [memory file](memory_file) of that length at
    /// least: access to a shorter one could end this process.
    pub(crate) fn of_fd(fd: BorrowedFd<'_>, len: usize) -> io::Result<Self> {
        Mapping::map(len, WRITABLE, libc::MAP_SHARED, fd.as_raw_fd(), 0).map(Self)
    }

    /// The numbers.
    pub(crate) fn words(&self) -> &[AtomicU64] {
        let count = self.0.len() / size_of::<AtomicU64>();
        // SAFETY: the mapping is aligned to a page, as long as this, and lives as long as `self`.
        // Any bytes are numbers, and no access of this process to them is another than an atomic
        // one. The other process can change them, and not the length.
        unsafe { std::slice::from_raw_parts(self.0.base().as_ptr().cast(), count) }
    }
}

/// A file of `len` zeroed bytes in memory, which keeps its size.
pub(crate) fn memory_file(name: &CStr, len: usize) -> io::Result<OwnedFd> {
    // Beyond the limit a signal would end the process.
    if getrlimit(Resource::Fsize).current.is_some_and(|limit| limit < len as u64) {
        return Err(io::Error::from_raw_os_error(libc::EFBIG));
    }
    let make = |flags| {
        // SAFETY: the name ends with a zero; a non-negative result is a descriptor without another
        // owner.
        unsafe {
            let fd = libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | flags);
            if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(OwnedFd::from_raw_fd(fd)) }
        }
    };
    // Before Linux 6.3 the first of these flags does not exist.
    let fd = match make(libc::MFD_NOEXEC_SEAL) {
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => make(libc::MFD_ALLOW_SEALING),
        made => made,
    }?;
    let fd = inherited::noted(fd);
    let file = File::from(fd);
    file.set_len(len as u64)?;
    // SAFETY: no pointers.
    let sealed = unsafe {
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals)
    };
    if sealed < 0 { Err(io::Error::last_os_error()) } else { Ok(file.into()) }
}

/// Whether a descriptor is a [memory file](memory_file) of `len` bytes: access to a mapping of
/// another file could end this process.
pub(crate) fn is_memory_file(fd: BorrowedFd<'_>, len: usize) -> bool {
    // SAFETY: no pointers.
    let seals = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
    let length = fd.try_clone_to_owned().and_then(|fd| File::from(fd).metadata());
    seals >= 0
        && seals & libc::F_SEAL_SHRINK != 0
        && length.is_ok_and(|metadata| metadata.len() == len as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd as _;

    #[test]
    fn two_mappings_of_a_memory_file_are_one_memory_of_constant_size() {
        if cfg!(miri) {
            return;
        }
        let fd = memory_file(c"test", 8192).unwrap();
        let [one, two] = [(), ()].map(|()| Mapping::of_fd(fd.as_fd(), 0, 8192).unwrap());
        // SAFETY: both are mapped, and no other thread has them.
        let seen = unsafe {
            one.base().as_ptr().add(5000).write_volatile(7);
            two.base().as_ptr().add(5000).read_volatile()
        };
        assert_eq!(seen, 7);
        assert!(is_memory_file(fd.as_fd(), 8192) && !is_memory_file(fd.as_fd(), 4096));
        let file = File::from(fd);
        for len in [0, 4096, 16_384] {
            file.set_len(len).expect_err("its size is sealed");
        }
        let plain = File::open("/proc/self/exe").unwrap();
        let len = plain.metadata().unwrap().len() as usize;
        assert!(!is_memory_file(plain.as_fd(), len), "it could shrink");
    }
}
