//! Memory whose pages the kernel takes by reference, and the pipe that hands them to a socket.
//!
//! Sources: vmsplice(2), splice(2), pipe(7); udp(7) for `MSG_MORE`.
#![allow(unsafe_code)]

use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd as _, OwnedFd};
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use rustix::net::SendFlags;
use rustix::pipe::{
    IoSliceRaw, PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice, vmsplice,
};

use super::sys::Socket;
use crate::kernel::inherited;

/// Memory of its own mapping. A page that the kernel still holds when this is dropped is freed
/// after that, and becomes nothing else before.
pub(super) struct Pages {
    mapping: NonNull<u8>,
    /// Bytes in front of those that are used.
    skipped: usize,
    len: usize,
}

// SAFETY: the mapping is the process's, not a thread's, and this value alone gives access to it.
unsafe impl Send for Pages {}

/// Bytes of a large page, on most machines.
const LARGE: usize = 2 << 20;

impl Pages {
    /// `len` bytes, all zero, in large pages where the kernel has some: it counts references to
    /// each. Memory is taken when it is touched.
    pub(super) fn new(len: usize) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let (null, all) = (std::ptr::null_mut(), len + LARGE);
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let mapping = unsafe { mmap_anonymous(null, all, protection, MapFlags::PRIVATE) }?;
        let mapping = NonNull::new(mapping.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let pages = Self { mapping, skipped: mapping.align_offset(LARGE).min(LARGE), len };
        // SAFETY: neither advice changes a byte of the mapping. A child of fork has no use for it;
        // and kernels without large pages refuse the second.
        unsafe {
            madvise(mapping.as_ptr().cast(), all, Advice::LinuxDontFork)?;
            let _ = madvise(mapping.as_ptr().cast(), all, Advice::LinuxHugepage);
        }
        Ok(pages)
    }
}

impl Deref for Pages {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: a part of the mapping, which is initialised and lives as long as `self`, which
        // alone gives access to it. The kernel only reads it.
        unsafe { std::slice::from_raw_parts(self.mapping.add(self.skipped).as_ptr(), self.len) }
    }
}

impl DerefMut for Pages {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.mapping.add(self.skipped).as_ptr(), self.len) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's alone, and nothing borrowed from it outlives it.
        let result = unsafe { munmap(self.mapping.as_ptr().cast(), self.len + LARGE) };
        debug_assert!(result.is_ok(), "{result:?}");
    }
}

/// A pipe by which pages go to a socket. It is empty between two calls.
pub(super) struct Pipe {
    read: OwnedFd,
    write: OwnedFd,
}

/// Room for the pages of a message that begins and ends within a page.
const PIPE_BYTES: usize = 2 * 65_536;

/// A message that was begun did not go by its pages.
pub(super) enum NotSent {
    /// The pipe did not take them. The message is still open.
    Open,
    /// The socket refused the message, which is gone, and the pipe still has pages.
    Gone(io::Error),
}

impl Pipe {
    /// # Errors
    /// No descriptors left, or the user's limit of memory for pipes.
    pub(super) fn new() -> io::Result<Self> {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        let pipe = Self { read: inherited::noted(read), write: inherited::noted(write) };
        if fcntl_setpipe_size(&pipe.write, PIPE_BYTES)? < PIPE_BYTES {
            return Err(io::ErrorKind::QuotaExceeded.into());
        }
        Ok(pipe)
    }

    /// Ends the message that was begun at `socket` (`MSG_MORE`) by `payload`, of which the kernel
    /// takes the pages: until it has freed them, the receiver gets the bytes that they have then.
    pub(super) fn send(&self, socket: &Socket, payload: &[u8]) -> Result<(), NotSent> {
        let vector = [IoSliceRaw::from_slice(payload)];
        // SAFETY: the kernel only reads the pages, and keeps those that it still needs when they
        // are unmapped.
        let taken = unsafe { vmsplice(&self.write, &vector, SpliceFlags::NONBLOCK) };
        match taken {
            Ok(taken) if taken == payload.len() => {}
            Ok(0) | Err(_) => return Err(NotSent::Open),
            Ok(_) => return Err(NotSent::Gone(io::ErrorKind::WriteZero.into())),
        }
        let (len, flags) = (payload.len(), SpliceFlags::NONBLOCK);
        match splice(&self.read, None, socket.as_fd(), None, len, flags) {
            Ok(sent) if sent == len => Ok(()),
            // A part of a message is none.
            Ok(_) => Err(NotSent::Gone(io::ErrorKind::WriteZero.into())),
            Err(e) => Err(NotSent::Gone(e.into())),
        }
    }
}

/// Ends the message that was begun at `socket`; the kernel copies `payload`.
pub(super) fn end_message(socket: &Socket, payload: &[u8]) -> io::Result<()> {
    rustix::net::send(socket, payload, SendFlags::DONTWAIT)?;
    Ok(())
}
