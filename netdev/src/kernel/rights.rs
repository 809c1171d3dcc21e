//! Messages with descriptors over Unix sockets (`SCM_RIGHTS` of unix(7)). `SPACE` is the room for
//! the descriptors: `cmsg_space!(ScmRights(n))`, or 0 for none.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Sends a message, without waiting. Error: the kernel's; or there are more descriptors than there
/// is room for.
pub(crate) fn send<const SPACE: usize>(
    to: impl AsFd,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    // Padding between two headers is read, too.
    let mut space = [MaybeUninit::new(0); SPACE];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::other("more descriptors than a message can have"));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    sendmsg(to, &[IoSlice::new(bytes)], &mut control, flags)?;
    Ok(())
}

/// Receives a message: the number of its bytes, the kernel's flags, and its descriptors. Those for
/// which there is no room are not installed (`MSG_CTRUNC`). Error: the kernel's.
pub(crate) fn receive<const SPACE: usize>(
    from: impl AsFd,
    bytes: &mut [u8],
    flags: RecvFlags,
) -> Result<(usize, ReturnFlags, Vec<OwnedFd>), Errno> {
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let got = recvmsg(from, &mut [IoSliceMut::new(bytes)], &mut control, flags)?;
    let descriptors = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    Ok((got.bytes, got.flags, descriptors.flatten().collect()))
}
