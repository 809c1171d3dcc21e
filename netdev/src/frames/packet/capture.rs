//! Frames that pass an interface, both ways, for a capture file.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::time::Duration;

use super::filter;
pub use super::filter::{Direction, Wanted};
use super::ring::{PacketRing, RingGeometry};
use super::rx::Drops;
use super::sys::{self, PacketSocket};
use super::vnet::{Incoming, incoming};
use crate::kernel::descriptors::attach_filter;
use crate::tuning::packet::CAPTURE_FRAMES;

/// A packet socket that takes datagrams to UDP port 4791 in both directions. Needs `CAP_NET_RAW`.
///
/// The kernel copies each frame into its ring while the sender waits. A socket without a ring has
/// references to the sender's pages, which may have other bytes when it is read: `udp` sends in
/// bulk from the pages of messages.
pub struct Capture {
    // The ring is unmapped before its socket is closed.
    ring: PacketRing,
    socket: PacketSocket,
    drops: Drops,
}

/// A frame.
#[derive(Debug, Clone, Copy)]
pub struct Captured<'a> {
    /// When the kernel took it, since 1970.
    pub time: Duration,
    /// From the Ethernet header on. A super-packet is whole; checksums may be left to the device.
    pub bytes: &'a [u8],
    /// Of a super-packet, the bytes of UDP payload of each datagram but the last.
    pub segment: Option<u16>,
}

impl Capture {
    /// Begins with the wanted datagrams of an interface.
    ///
    /// # Errors
    /// No right to packet sockets, no such interface, or no memory for the ring.
    pub fn open(interface: u32, wanted: &Wanted) -> io::Result<Self> {
        let socket = PacketSocket::new()?;
        let version = libc::tpacket_versions::TPACKET_V2 as i32;
        socket.set(libc::SOL_PACKET, libc::PACKET_VERSION, version)?;
        // The ring's frames have that header.
        socket.set(libc::SOL_PACKET, libc::PACKET_VNET_HDR, 1)?;
        attach_filter(socket.as_fd(), &filter::of_capture(wanted))?;
        let layout = RingGeometry::new(CAPTURE_FRAMES, sys::page_bytes());
        socket.make_ring(layout)?;
        let ring = PacketRing::new(&socket, layout)?;
        socket.bind(interface)?;
        Ok(Self { ring, socket, drops: Drops::default() })
    }

    /// Hands the next frame to `take`. `None` if there is none yet.
    pub fn next<R>(&mut self, take: impl FnOnce(Captured<'_>) -> R) -> Option<R> {
        let taken = self.ring.take(|frame| {
            let (seconds, nanoseconds) = frame.time;
            let time = Duration::new(seconds.into(), nanoseconds);
            let segment = match incoming(frame.vnet) {
                Incoming::Run(segment) => Some(segment),
                Incoming::Single | Incoming::Other => None,
            };
            take(Captured { time, bytes: frame.bytes, segment })
        });
        // The kernel's description of a frame is always valid.
        taken.flatten()
    }

    /// An error if the interface is down, or has gone, since the last call.
    ///
    /// # Errors
    /// `ENETDOWN`.
    pub fn check(&self) -> io::Result<()> {
        match self.socket.word(libc::SOL_SOCKET, libc::SO_ERROR)? {
            0 => Ok(()),
            error => Err(io::Error::from_raw_os_error(error.cast_signed())),
        }
    }

    /// Frames that the kernel dropped because the ring was full.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.drops.read(&self.socket)
    }

    /// The descriptor that becomes readable when there are frames.
    #[must_use]
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
