//! Parcels that a program leaves with an agent, which has its connections ended if it dies. Only
//! the guardian that the agent starts then opens them.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::net::{AddressFamily, RecvFlags, ReturnFlags, SocketFlags, SocketType, socketpair};

use crate::kernel::rights;

/// The most parcels of a program that an agent keeps: one for each address of a device. A program
/// with more addresses sends one parcel more, which says that the rest have none.
pub const PARCELS_MAX: usize = 64;
/// The descriptors in a parcel.
pub const PARCEL_DESCRIPTORS: usize = 4;
/// The last words of a program that leaves nothing to do.
pub(crate) const FAREWELL: &[u8] = b".";

const SPACE: usize = rustix::cmsg_space!(ScmRights(PARCEL_DESCRIPTORS));
/// Two bytes and an address with its interface.
const PARCEL_BYTES_MAX: usize = 66;

/// The socket for parcels of an agent whose socket is at `socket`.
#[must_use]
pub fn path(socket: &Path) -> PathBuf {
    socket.with_extension("guard")
}

/// A message of a program. It has not been checked.
#[derive(Debug)]
pub struct Parcel {
    bytes: Vec<u8>,
    descriptors: Vec<OwnedFd>,
}

/// A message, or the end of the connection.
#[derive(Debug)]
pub enum Word {
    /// Something to keep.
    Parcel(Parcel),
    /// It ends, and has ended its connections itself.
    Farewell,
    /// It has ended, or has closed its device.
    End,
}

/// Receives from a program, without waiting. Error: `WouldBlock` if there is no message yet;
/// `InvalidData` for one that is too long or has too many descriptors, of which none is kept; the
/// kernel's.
pub fn receive(from: impl AsFd) -> io::Result<Word> {
    let mut bytes = [0; PARCEL_BYTES_MAX];
    let (count, flags, descriptors) =
        rights::receive::<SPACE>(from, &mut bytes, RecvFlags::DONTWAIT)?;
    if flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok(match &bytes[..count] {
        [] => Word::End,
        FAREWELL => Word::Farewell,
        bytes => Word::Parcel(Parcel { bytes: bytes.to_vec(), descriptors }),
    })
}

/// A connection on which a guardian finds the parcels, and then the end. Error: no descriptor left,
/// or many more than [`PARCELS_MAX`] parcels.
pub fn handed_on<'a>(parcels: impl IntoIterator<Item = &'a Parcel>) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    for parcel in parcels {
        let descriptors: Vec<_> = parcel.descriptors.iter().map(AsFd::as_fd).collect();
        rights::send::<SPACE>(&ours, &parcel.bytes, &descriptors)?;
    }
    Ok(theirs)
}
