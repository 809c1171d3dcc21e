//! The socket table that processes share: a stream that is written and never read. In its queue are
//! descriptors (`SCM_RIGHTS` of unix(7)), one message for each slot, in their order. To look into
//! the queue (`MSG_PEEK`) makes copies of them. Its sockets stay open while any process has the
//! stream.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use rustix::net::{
    AddressFamily, RecvFlags, ReturnFlags, SocketFlags, SocketType, socketpair, sockopt,
};

use crate::kernel::descriptors::look_from;
use crate::kernel::inherited;
use crate::kernel::rights;
use crate::tuning::shared::{MAILBOX_BYTES, QUEUE_BYTES};
use crate::udp::Socket;

/// The bytes of a message; they mean nothing.
const MESSAGE: usize = 1;
/// The descriptors of an entry.
const DESCRIPTORS: usize = 3;
const SPACE: usize = rustix::cmsg_space!(ScmRights(DESCRIPTORS));

/// The table: the stream's two ends.
#[derive(Debug)]
pub(super) struct SocketTable {
    reader: OwnedFd,
    writer: OwnedFd,
}

/// The sockets of a slot.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) socket: Socket,
    /// The end of its mailbox that the slot's process reads.
    pub(super) inbox: OwnedFd,
    /// The end that its neighbours write.
    pub(super) outbox: OwnedFd,
}

impl Entry {
    /// An entry with a new mailbox.
    pub(super) fn new(socket: Socket) -> io::Result<Self> {
        let (inbox, outbox) = pair()?;
        sockopt::set_socket_send_buffer_size(&outbox, MAILBOX_BYTES)?;
        Ok(Self { socket, inbox, outbox })
    }
}

impl SocketTable {
    pub(super) fn new() -> io::Result<Self> {
        let (reader, writer) = pair()?;
        let _ = sockopt::set_socket_send_buffer_size(&writer, QUEUE_BYTES);
        Ok(Self { reader, writer })
    }

    pub(super) fn from_ends([reader, writer]: [OwnedFd; 2]) -> Self {
        Self { reader, writer }
    }

    pub(super) fn ends(&self) -> [BorrowedFd<'_>; 2] {
        [self.reader.as_fd(), self.writer.as_fd()]
    }

    /// The number of entries.
    pub(super) fn len(&self) -> io::Result<usize> {
        let bytes = rustix::io::ioctl_fionread(&self.reader)?;
        Ok(usize::try_from(bytes).map_err(io::Error::other)? / MESSAGE)
    }

    /// Puts an entry behind the others. Error: the queue is full, or `ETOOMANYREFS`: the user has
    /// the most descriptors in messages, which is the limit of open ones; `InvalidData` if the two
    /// ends are not of one stream.
    pub(super) fn put(&self, entry: &Entry) -> io::Result<()> {
        let descriptors = [entry.socket.as_fd(), entry.inbox.as_fd(), entry.outbox.as_fd()];
        let before = self.len()?;
        rights::send::<SPACE>(&self.writer, &[0; MESSAGE], &descriptors)?;
        // The two ends came from another process.
        if self.len()? > before { Ok(()) } else { Err(io::ErrorKind::InvalidData.into()) }
    }

    /// Copies of an entry. The place where the kernel looks is the stream's, so the lock of all is
    /// held. Error: there is no such entry, or no descriptor left; `InvalidData` if it is none of
    /// ours.
    pub(super) fn get(&self, index: usize) -> io::Result<Entry> {
        look_from(&self.reader, index * MESSAGE)?;
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let (_, said, all) = rights::receive::<SPACE>(&self.reader, &mut [0; MESSAGE], flags)?;
        let all: Vec<OwnedFd> = all.into_iter().map(inherited::noted).collect();
        let missing = |_| match said.contains(ReturnFlags::CTRUNC) {
            true => io::Error::from_raw_os_error(libc::EMFILE),
            false => io::ErrorKind::InvalidData.into(),
        };
        let [socket, inbox, outbox] = <[OwnedFd; DESCRIPTORS]>::try_from(all).map_err(missing)?;
        // Any process of the user can put something else in: to empty that might take for ever.
        let [v4, v6] = [AddressFamily::INET, AddressFamily::INET6];
        let is_udp = [v4, v6].map(|family| is_socket(&socket, family, SocketType::DGRAM));
        let are_ends = [&inbox, &outbox].map(is_stream);
        if is_udp == [false; 2] || are_ends != [true; 2] {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(Entry { socket: Socket::from(socket), inbox, outbox })
    }
}

/// Whether this is a socket of that kind.
pub(super) fn is_socket(fd: &OwnedFd, family: AddressFamily, kind: SocketType) -> bool {
    sockopt::socket_domain(fd) == Ok(family) && sockopt::socket_type(fd) == Ok(kind)
}

/// Whether this may be an end of a stream.
pub(super) fn is_stream(fd: &OwnedFd) -> bool {
    is_socket(fd, AddressFamily::UNIX, SocketType::STREAM)
}

/// The two ends of a stream.
fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (one, other) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    Ok((inherited::noted(one), inherited::noted(other)))
}
