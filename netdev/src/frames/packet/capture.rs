//! Frames that pass an interface, both ways, for a capture file.

mod heads;
mod records;

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::Path;
use std::time::Duration;

use self::heads::Heads;
use super::filter;
pub use super::filter::{Direction, Wanted};
use super::ring::{PacketRing, RingGeometry};
use super::rx::Drops;
use super::sys::{self, PacketSocket};
use super::vnet::{Incoming, incoming};
use crate::handed::capture::Stream;
use crate::kernel::descriptors::attach_filter;
use crate::tuning::packet::CAPTURE_FRAMES;

/// A packet socket that takes datagrams to UDP port 4791 in both directions, here or in an agent.
///
/// The kernel copies each frame while the sender waits: the beginnings of its datagrams, if that is
/// enough and the kernel lets it, else all of it into a ring. A socket without a ring has
/// references to the sender's pages, which may have other bytes when it is read: `udp` sends in
/// bulk from the pages of messages.
pub struct Capture {
    source: Source,
    whole_because: Option<io::Error>,
}

enum Source {
    // The ring is unmapped before its socket is closed.
    Frames { ring: PacketRing, socket: PacketSocket, drops: Drops },
    Heads { heads: Heads, socket: PacketSocket },
    Agent(Stream),
}

/// A frame.
#[derive(Debug, Clone, Copy)]
pub struct Captured<'a> {
    /// When the kernel took it, since 1970.
    pub time: Duration,
    /// From the Ethernet header on, as far as it was taken. Checksums may be left to the device.
    pub bytes: &'a [u8],
    /// Of a super-packet, where its datagrams are.
    pub run: Option<Run>,
}

/// The datagrams of a super-packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Bytes of UDP payload of each but the last.
    pub datagram: usize,
    /// Bytes from the beginning of the payload of one that was taken to that of the next:
    /// `datagram`, if the frame is whole. Otherwise no more of each was taken, and it may be more
    /// than a datagram has.
    pub apart: usize,
}

impl Capture {
    /// Begins with the frames of an interface that have wanted datagrams; of UD also those that
    /// have others, which [`Wanted::has`] names. Of each datagram, only the first `snap` bytes are
    /// wanted, from the Ethernet header on, or all. Needs `CAP_NET_RAW`.
    ///
    /// # Errors
    /// No right to packet sockets, no such interface, or no memory for the ring.
    pub fn open(interface: u32, wanted: &Wanted, snap: Option<u32>) -> io::Result<Self> {
        let socket = PacketSocket::new()?;
        let heads = snap.filter(|snap| *snap <= heads::SNAP_MAX);
        let heads = heads.map(|snap| snap.max(heads::HEADERS_MAX + wanted.judged_by()));
        let wanted = filter::of_capture(wanted);
        let (source, whole_because) = match heads.map(|snap| Heads::of(&socket, &wanted, snap)) {
            Some(Ok(heads)) => {
                socket.bind(interface)?;
                (Source::Heads { heads, socket }, None)
            }
            Some(Err(error)) => (Source::frames(socket, &wanted, interface)?, Some(error)),
            None => (Source::frames(socket, &wanted, interface)?, None),
        };
        Ok(Self { source, whole_because })
    }

    /// Begins with those of an interface of this process's network namespace, or of the first, by
    /// the agent whose socket is at `agent`, which takes them on the host. Also returns the name of
    /// the interface's end there. Takes no right.
    ///
    /// # Errors
    /// There is no agent, or it refuses, in words.
    pub fn by_agent(
        agent: &Path,
        interface: Option<u32>,
        wanted: &Wanted,
        snap: Option<u32>,
    ) -> Result<(Self, String), String> {
        let (stream, begun) = Stream::ask(agent, interface, wanted, snap)?;
        let whole_because = begun.whole_because.map(io::Error::other);
        Ok((Self { source: Source::Agent(stream), whole_because }, begun.host_end))
    }

    /// Hands the next frame to `take`. `None` if there is none yet.
    pub fn next<R>(&mut self, take: impl FnOnce(Captured<'_>) -> R) -> Option<R> {
        let ring = match &mut self.source {
            Source::Frames { ring, .. } => ring,
            Source::Heads { heads, .. } => return heads.next(take),
            Source::Agent(stream) => return stream.next(take),
        };
        let taken = ring.take(|frame| {
            let (seconds, nanoseconds) = frame.time;
            let time = Duration::new(seconds.into(), nanoseconds);
            let run = match incoming(frame.vnet) {
                Incoming::Run(segment) => {
                    let datagram = usize::from(segment);
                    Some(Run { datagram, apart: datagram })
                }
                Incoming::Single | Incoming::Other => None,
            };
            take(Captured { time, bytes: frame.bytes, run })
        });
        // The kernel's description of a frame is always valid.
        taken.flatten()
    }

    /// The reason why the kernel copies whole frames, though few bytes of each datagram are wanted.
    #[must_use]
    pub fn whole_because(&self) -> Option<&io::Error> {
        self.whole_because.as_ref()
    }

    /// An error if the interface is down, or has gone, since the last call; or if the agent takes
    /// no more.
    ///
    /// # Errors
    /// `ENETDOWN`; `UnexpectedEof` of an agent.
    pub fn check(&self) -> io::Result<()> {
        let socket = match &self.source {
            Source::Agent(stream) if stream.has_ended => {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            Source::Agent(_) => return Ok(()),
            Source::Frames { socket, .. } | Source::Heads { socket, .. } => socket,
        };
        match socket.word(libc::SOL_SOCKET, libc::SO_ERROR)? {
            0 => Ok(()),
            error => Err(io::Error::from_raw_os_error(error.cast_signed())),
        }
    }

    /// Frames that the kernel dropped because the ring was full.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        match &self.source {
            Source::Frames { drops, socket, .. } => drops.read(socket),
            Source::Heads { heads, .. } => heads.lost(),
            Source::Agent(stream) => stream.lost,
        }
    }

    /// The descriptor that becomes readable when there are frames.
    #[must_use]
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.source {
            Source::Frames { socket, .. } => socket.as_fd(),
            Source::Heads { heads, .. } => heads.as_fd(),
            Source::Agent(stream) => stream.as_fd(),
        }
    }
}

impl Source {
    /// Has the socket take what the classic program takes, into a ring.
    fn frames(
        socket: PacketSocket,
        wanted: &[libc::sock_filter],
        interface: u32,
    ) -> io::Result<Self> {
        let version = libc::tpacket_versions::TPACKET_V2 as i32;
        socket.set(libc::SOL_PACKET, libc::PACKET_VERSION, version)?;
        // The ring's frames have that header.
        socket.set(libc::SOL_PACKET, libc::PACKET_VNET_HDR, 1)?;
        attach_filter(socket.as_fd(), wanted)?;
        let layout = RingGeometry::new(CAPTURE_FRAMES, sys::page_bytes());
        socket.make_ring(layout)?;
        let ring = PacketRing::new(&socket, layout)?;
        socket.bind(interface)?;
        Ok(Self::Frames { ring, socket, drops: Drops::default() })
    }
}
