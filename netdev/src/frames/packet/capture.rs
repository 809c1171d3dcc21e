//! Frames that pass an interface, both ways, for a capture file.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::time::Duration;

use super::filter;
pub use super::filter::Direction;
use super::ring::{PacketRing, RingGeometry};
use super::rx::Drops;
use super::sys::{self, PacketSocket};
use crate::kernel::descriptors::attach_filter;
use crate::tuning::packet::CAPTURE_FRAMES;

/// A packet socket that takes datagrams to UDP port 4791 in both directions. Needs `CAP_NET_RAW`.
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
}

impl Capture {
    /// Takes all of an interface, or what goes in one of `directions`.
    ///
    /// # Errors
    /// No right to packet sockets, no such interface, or no memory for the ring.
    pub fn open(interface: u32, directions: &[Direction]) -> io::Result<Self> {
        let socket = PacketSocket::new()?;
        let version = libc::tpacket_versions::TPACKET_V2 as i32;
        socket.set(libc::SOL_PACKET, libc::PACKET_VERSION, version)?;
        // The ring's frames have that header.
        socket.set(libc::SOL_PACKET, libc::PACKET_VNET_HDR, 1)?;
        attach_filter(socket.as_fd(), &filter::of_directions(directions))?;
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
            take(Captured { time, bytes: frame.bytes })
        });
        // The kernel's description of a frame is always valid.
        taken.flatten()
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
