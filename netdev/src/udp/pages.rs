//! Memory whose pages the kernel takes by reference, and the pipe that hands them to a socket.
//!
//! Sources: vmsplice(2), splice(2), pipe(7); udp(7) for `MSG_MORE`.
#![allow(unsafe_code)]

use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd as _, OwnedFd};
use std::ptr::NonNull;

use rustix::io::retry_on_intr;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use rustix::net::SendFlags;
use rustix::pipe::{
    IoSliceRaw, PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice, vmsplice,
};

use super::sys::Socket;
use crate::kernel::inherited;

/// Memory of its own mapping. The kernel may hold a page for longer than this lives, and then frees
/// it: no other memory of the process is ever in its place.
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
        // SAFETY: neither advice changes a byte of the mapping. A child of fork gets zeroes, and
        // may unmap them; kernels without large pages refuse the second.
        unsafe {
            madvise(mapping.as_ptr().cast(), all, Advice::LinuxWipeOnFork)?;
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

/// A pipe by which pages go to a socket. It is empty between two calls that succeed.
pub(super) struct Pipe {
    read: OwnedFd,
    write: OwnedFd,
}

/// Room for the pages of a message that begins and ends within a page.
const PIPE_BYTES: usize = 2 * 65_536;

/// Why a message that was begun did not leave by its pages. The pipe may still have some.
pub(super) enum NotSent {
    /// Nothing was sent. The message is open, unless the error was the socket's.
    Nothing(io::Error),
    /// A part was.
    Part,
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
            Ok(_) => return Err(NotSent::Nothing(io::ErrorKind::WriteZero.into())),
            Err(e) => return Err(NotSent::Nothing(e.into())),
        }
        let mut left = payload.len();
        while left > 0 {
            let call =
                || splice(&self.read, None, socket.as_fd(), None, left, SpliceFlags::NONBLOCK);
            match retry_on_intr(call) {
                Ok(0) => return Err(NotSent::Part),
                Ok(sent) => left -= sent,
                Err(e) if left == payload.len() => return Err(NotSent::Nothing(e.into())),
                Err(_) => return Err(NotSent::Part),
            }
        }
        Ok(())
    }
}

/// Ends the message that was begun at `socket`; the kernel copies `payload`.
pub(super) fn end_message(socket: &Socket, payload: &[u8]) -> io::Result<()> {
    rustix::net::send(socket, payload, SendFlags::DONTWAIT)?;
    Ok(())
}
