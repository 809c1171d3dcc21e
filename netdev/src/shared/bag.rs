//! A bag of sockets that processes share: a stream that is written and never read. In its queue are
//! descriptors (`SCM_RIGHTS` of unix(7)), one message for each slot, in their order. To look into
//! the queue (`MSG_PEEK`) makes copies of them. What is in it stays open while any process has the
//! stream.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
    sockopt,
};

use crate::fd::look_from;
use crate::inherited;
use crate::udp::Socket;

/// The bytes of a message; they mean nothing.
const MESSAGE: usize = 1;
/// The queue's size: hundreds of messages, as far as the system lets it (`net.core.wmem_max`).
const QUEUE_BYTES: usize = 1 << 20;
/// The size of a mailbox, many times a datagram's.
const MAILBOX_BYTES: usize = 1 << 18;
/// The descriptors of an entry.
const DESCRIPTORS: usize = 3;

/// The bag: the stream's two ends.
#[derive(Debug)]
pub(super) struct Bag {
    reader: OwnedFd,
    writer: OwnedFd,
}

/// What is kept for a slot.
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

impl Bag {
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

    /// Puts an entry behind the others.
    ///
    /// # Errors
    /// The queue is full, or `ETOOMANYREFS`: the user has as many descriptors in messages as it may
    /// have open.
    pub(super) fn put(&self, entry: &Entry) -> io::Result<()> {
        let descriptors = [entry.socket.as_fd(), entry.inbox.as_fd(), entry.outbox.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)), "there is room");
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        sendmsg(&self.writer, &[IoSlice::new(&[0; MESSAGE])], &mut control, flags)?;
        Ok(())
    }

    /// Copies of an entry. The place where the kernel looks is the stream's, so the lock of all is
    /// held.
    ///
    /// # Errors
    /// There is no such entry, or no descriptor left.
    pub(super) fn get(&self, index: usize) -> io::Result<Entry> {
        look_from(&self.reader, index * MESSAGE)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut bytes = [0; MESSAGE];
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        recvmsg(&self.reader, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags)?;
        let descriptors = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        });
        let all: Vec<OwnedFd> = descriptors.flatten().map(inherited::noted).collect();
        let missing = |_| io::Error::from_raw_os_error(libc::EMFILE);
        let [socket, inbox, outbox] = <[OwnedFd; DESCRIPTORS]>::try_from(all).map_err(missing)?;
        Ok(Entry { socket: Socket::from(socket), inbox, outbox })
    }
}

/// The two ends of a stream.
fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (one, other) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    Ok((inherited::noted(one), inherited::noted(other)))
}
