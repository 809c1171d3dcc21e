//! `AF_PACKET`: whole frames, in super-packets both ways.
//!
//! Out, a run of datagrams leaves as one frame of up to 64 KiB with a virtio header
//! (`PACKET_VNET_HDR`, `VIRTIO_NET_HDR_GSO_UDP_L4`) that the device or the kernel segments. One
//! `sendmmsg(2)` sends several runs. In, frames are read in place from a ring that the kernel fills
//! (`TPACKET_V2`), without a system call. The backend needs only `CAP_NET_RAW`.
//!
//! Frames pass the own namespace's `tc` and nft `netdev` egress, because the socket does not bypass
//! the queueing discipline. They pass none of its other nft hooks, and no hook on receive. On a
//! veth, all frames pass the host's rules.
//!
//! Linux 6.2 gives UDP super-packets to such sockets. Whether the running kernel does is tried.

mod capture;
mod filter;
mod handing;
mod open;
mod ring;
mod rx;
mod staging;
mod sys;
mod trial;
mod tx;
mod vnet;

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};

use crate::frames::resolve::{Hop, PathTable, Sent};
use crate::frames::{FrameIo, FramePort, State};
use crate::kernel::ethtool::Segmentation;
use crate::port::contract::{PathId, PortRuns, PortStats, Runs, RxDatagram, TxFailure, TxSlot};
use crate::tuning::packet::IP_IDS_MIN;
pub use capture::{Capture, Captured, Direction, Run, Wanted};
pub use handing::keep_again;
pub(crate) use handing::{assemble_from, open_for_another, ring_bytes};
use ring::PacketRing;
use rx::Drops;
use staging::{FrameStaging, RunLimits};
pub use sys::Kept;
pub(crate) use sys::page_bytes;
use sys::{PacketSocket, SendScratch, Transmit};
use tx::Sender;

/// Sends a frame by an interface of the calling thread's network namespace. Error: no right to
/// packet sockets; the interface is down, or has gone.
pub fn send_frame(interface: u32, frame: &[u8]) -> io::Result<()> {
    PacketSocket::new()?.send_by(interface, frame)
}

/// A port over an `AF_PACKET` socket. Opening it needs `CAP_NET_RAW` and Linux 6.2. Several ports
/// share received frames by `PACKET_FANOUT`.
pub type PacketPort = FramePort<PacketIo>;

/// Frames through an `AF_PACKET` socket.
pub struct PacketIo {
    // The ring is unmapped before its socket is closed.
    ring: PacketRing,
    socket: PacketSocket,
    limits: RunLimits,
    staging: FrameStaging,
    sender: Sender,
    /// `None` where it makes no difference: without super-packets.
    segmentation: Option<Segmentation>,
    scratch: SendScratch,
    drops: Drops,
}

impl PacketIo {
    /// Asks which super-packets the interface takes whole.
    fn check_segmentation(&mut self) {
        if let Some(segmentation) = &mut self.segmentation {
            segmentation.refresh(self.socket.as_fd());
            self.sender.leaves_whole = self.limits.are_taken_by(segmentation);
        }
    }
}

impl FrameIo for PacketIo {
    fn receive(
        &mut self,
        budget: usize,
        state: &mut State,
        sink: &mut impl FnMut(RxDatagram<'_>),
    ) -> usize {
        let mut count = 0;
        // Frames without a datagram also count against the budget: garbage must not keep us here.
        while count < budget {
            match self.ring.take(|frame| rx::deliver(frame, &mut state.stats, sink)) {
                Some(Some(datagrams)) => count += datagrams.max(1),
                Some(None) => {
                    state.stats.rx_malformed += 1;
                    count += 1;
                }
                None => break,
            }
        }
        count
    }

    #[inline]
    fn is_filled(&self, eighths: u32) -> bool {
        self.ring.is_filled(eighths)
    }

    fn reserve(&mut self, paths: &mut PathTable, path: PathId, len: usize) -> Option<TxSlot<'_>> {
        let mut limits = self.limits;
        limits.datagrams = limits.datagrams.min(self.sender.segments_max());
        // The borrow checker does not see that a `None` borrows nothing: check first, then borrow.
        if self.staging.can_grow(path, len, limits) {
            let (buf, ip_id) = self.staging.grow(len)?;
            return Some(TxSlot { buf, ip_id });
        }
        let ip_id = paths.peek_ip_id(path, IP_IDS_MIN);
        let Some(Hop::Direct(template)) = paths.hop(path) else { return None };
        let ip_id = if template.is_ipv6() { 0 } else { ip_id };
        if len > limits.bytes {
            return None;
        }
        let buf = self.staging.begin(path, len, template, ip_id)?;
        Some(TxSlot { buf, ip_id })
    }

    fn discard(&mut self) {
        self.staging.discard();
    }

    fn commit(&mut self, paths: &mut PathTable, _: &mut State) {
        if let Some(path) = self.staging.commit() {
            paths.take_ip_ids(path, 1);
        }
    }

    fn forget(&mut self, path: PathId) {
        self.staging.forget(path);
    }

    fn flush(&mut self, state: &mut State, failed: &mut impl FnMut(TxFailure)) {
        let mut kernel = Transmit { socket: &self.socket, scratch: &mut self.scratch };
        self.sender.send(&mut kernel, &mut self.staging, &mut state.stats, failed);
    }

    fn is_blocked(&self) -> bool {
        !self.staging.is_empty()
    }

    fn waits_for_room(&self) -> bool {
        !self.staging.is_empty()
    }

    fn holds(&self, sent: &Sent) -> bool {
        self.staging.holds(sent.path)
    }

    fn maintain(&mut self, changed: bool, _: &mut State) {
        // It clears the socket's pending error, such as `ENETDOWN` after its interface went down:
        // until then its descriptor would be ready. It cannot fail: the descriptor is a socket. The
        // error itself is discarded: the kernel's announcements of the interface give its meaning.
        let _ = self.socket.word(libc::SOL_SOCKET, libc::SO_ERROR);
        if changed || self.segmentation.as_ref().is_some_and(Segmentation::is_unanswered) {
            self.check_segmentation();
        }
    }

    fn follow(&mut self, _: [u8; 6], _: &[IpAddr]) -> io::Result<()> {
        // The filter does so by itself.
        Ok(())
    }

    fn add_kernel_stats(&self, stats: &mut PortStats) {
        stats.rx_queue_drops += self.drops.read(&self.socket);
    }

    fn runs(&self, stats: &PortStats) -> PortRuns {
        let PortStats { rx_runs, rx_datagrams, rx_bytes, tx_runs, tx_datagrams, tx_bytes, .. } =
            *stats;
        let departed = tx_runs + self.sender.apart;
        PortRuns {
            arrived: Some(Runs { runs: rx_runs, datagrams: rx_datagrams, bytes: rx_bytes }),
            departed: Some(Runs { runs: departed, datagrams: tx_datagrams, bytes: tx_bytes }),
        }
    }
}

impl AsFd for PacketIo {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
pub(crate) mod tests;
