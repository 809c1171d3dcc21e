//! `AF_XDP`: frames straight from the driver, through our own XDP program.
//!
//! The program (`xdp/prog.rs`) hands RoCEv2 frames to one of our addresses to the socket and leaves
//! everything else to the kernel. It detaches when the port is dropped or the process ends. Frames
//! lie in memory shared with the kernel (`xdp/umem.rs`): the port hands received frames up from
//! there, and writes frames to send there, headers first. A veth copies between that memory and its
//! socket buffers; a driver with zero-copy support does not.
//!
//! These frames bypass the own namespace's netfilter and `tc` rules and its counters. On a veth,
//! they pass the host's rules.

mod attach_error;
mod cursor;
mod handing;
pub(super) mod mapping;
mod open;
mod prog;
mod retry;
mod ring;
mod rx;
mod socket;
mod tx;
mod umem;

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::frames::resolve::{Hop, PathTable, Sent};
use crate::frames::{FrameIo, FramePort, State};
use crate::port::contract::{PathId, PortStats, RxDatagram, RxIpId, TxFailure, TxSlot};
use crate::port::headers::{Frame, parse_frame};
/// A descriptor of bpf(2).
#[cfg(test)]
pub(crate) fn test_map() -> std::io::Result<std::os::fd::OwnedFd> {
    crate::kernel::bpf::Map::hash("test", 4, 1)?.as_fd().try_clone_to_owned()
}

pub(crate) use handing::{assemble_from, chunks_within, memory_bytes, open_for_another};
pub(crate) use mapping::{SharedWords, is_memory_file, memory_file};
use prog::OwnMac;
use retry::Retry;
use rx::RxHalf;
use socket::XdpSocket;
use tx::TxHalf;
use umem::Umem;

/// A port over an `AF_XDP` socket, with a program on the interface that takes frames to its
/// addresses.
///
/// Opening it needs `CAP_NET_RAW`, `CAP_NET_ADMIN` and `CAP_BPF`. It fails if
/// another XDP program or AF_XDP socket is on the interface, if the driver has no native XDP or not
/// at this MTU, if the interface has receive queues that are not read, and if too little memory may
/// be locked. Several ports read one receive queue each, from the first on; a single port reads the
/// configured one. The interface selects the queue for a frame, and it knows only addresses and
/// ports.
pub type XdpPort = FramePort<XdpIo>;

/// Frames through an `AF_XDP` socket.
pub struct XdpIo {
    /// Keeps the program attached. Dropped first: the program leaves the interface before its
    /// socket closes.
    _link: OwnedFd,
    mac: OwnMac,
    tx: TxHalf,
    rx: RxHalf,
    socket: XdpSocket,
    umem: Umem,
    /// The longest frame that the link carries.
    frame_bytes_max: usize,
    /// The reserved slot.
    reserved: Option<ReservedFrame>,
    /// When to check again whether the kernel takes more.
    retry: Retry,
}

/// A frame in the UMEM that was reserved and not committed.
#[derive(Debug, Clone, Copy)]
struct ReservedFrame {
    path: PathId,
    at: usize,
    len: usize,
}

impl FrameIo for XdpIo {
    fn receive(
        &mut self,
        budget: usize,
        state: &mut State,
        sink: &mut impl FnMut(RxDatagram<'_>),
    ) -> usize {
        let stats = &mut state.stats;
        let frames = self.rx.receive(&mut self.umem, budget, |frame| {
            let Some(frame) = parse_frame(frame) else {
                stats.rx_malformed += 1;
                return;
            };
            stats.rx_datagrams += 1;
            stats.rx_runs += 1;
            stats.rx_bytes += frame.payload.len() as u64;
            sink(datagram(frame));
        });
        // Even after an empty read: a driver that ran out of room sleeps until a wake-up tells it
        // about the chunks added since.
        if self.rx.needs_wakeup() {
            self.kick_receive(state);
        }
        frames
    }

    #[inline]
    fn is_filled(&self, eighths: u32) -> bool {
        self.rx.is_filled(eighths)
    }

    fn reserve(&mut self, paths: &mut PathTable, path: PathId, len: usize) -> Option<TxSlot<'_>> {
        let ip_id = paths.peek_ip_id(path, 1);
        let Some(Hop::Direct(template)) = paths.hop(path) else { return None };
        let header = template.header_len();
        let frame_len = header + len;
        if frame_len > self.frame_bytes_max {
            return None;
        }
        let slot = self.tx.reserve(&mut self.umem)?;
        let frame = self.umem.get_mut(slot.clone())?.get_mut(..frame_len)?;
        template.write(frame, len, ip_id);
        self.reserved = Some(ReservedFrame { path, at: slot.start, len: frame_len });
        let ip_id = if template.is_ipv6() { 0 } else { ip_id };
        Some(TxSlot { buf: &mut frame[header..], ip_id })
    }

    fn discard(&mut self) {
        self.reserved = None;
    }

    fn commit(&mut self, paths: &mut PathTable, state: &mut State) {
        let Some(ReservedFrame { path, at, len }) = self.reserved.take() else { return };
        let Some(Hop::Direct(template)) = paths.hop(path) else { return };
        // Without a checksum an IPv6 datagram would be dropped by most receivers; for IPv4 the ICRC
        // suffices.
        if template.is_ipv6()
            && let Some(frame) = self.umem.get_mut(at..at + len)
        {
            template.complete_checksum(frame);
        }
        state.stats.tx_datagrams += 1;
        state.stats.tx_runs += 1;
        state.stats.tx_bytes += (len - template.header_len()) as u64;
        self.tx.send(&mut self.umem, path, len);
        paths.sent(path, self.tx.last());
        paths.take_ip_ids(path, 1);
    }

    fn forget(&mut self, path: PathId) {
        self.tx.forget(path);
    }

    fn flush(&mut self, state: &mut State, failed: &mut impl FnMut(TxFailure)) {
        let Self { tx, umem, socket, .. } = self;
        let stats = &mut state.stats;
        let dropped = |path| {
            stats.tx_failed += 1;
            stats.tx_datagrams = stats.tx_datagrams.saturating_sub(1);
            stats.tx_runs = stats.tx_runs.saturating_sub(1);
            failed(TxFailure { path, datagrams: 1, errno: libc::EBUSY });
        };
        match tx.flush(umem, || socket.kick_send(), dropped) {
            Ok(flushed) => state.stats.tx_blocked += u64::from(flushed.blocked),
            Err(e) => state.note_error(&e),
        }
    }

    fn is_blocked(&self) -> bool {
        self.tx.is_blocked()
    }

    fn timer(&self) -> Option<BorrowedFd<'_>> {
        Some(self.retry.as_fd())
    }

    fn set_timer(&mut self, paths_wait: bool) {
        self.retry.schedule(self.tx.is_blocked() || paths_wait);
    }

    fn holds(&self, sent: &Sent) -> bool {
        self.tx.holds(sent.last)
    }

    fn maintain(&mut self, _: bool, state: &mut State) {
        self.kick_receive(state);
    }

    fn follow(&mut self, mac: [u8; 6], _: &[IpAddr]) -> io::Result<()> {
        self.mac.follow(mac);
        Ok(())
    }

    fn add_kernel_stats(&self, stats: &mut PortStats) {
        stats.rx_malformed += self.rx.unusable;
        if let Ok(kernel) = self.socket.statistics() {
            stats.rx_queue_drops += kernel.rx_dropped + kernel.rx_ring_full;
        }
    }
}

impl XdpIo {
    fn kick_receive(&self, state: &mut State) {
        self.socket.kick_receive().unwrap_or_else(|e| state.note_error(&e));
    }
}

impl XdpPort {
    /// Sends a whole frame as it is. For tests of frames that leave a container: a process with a
    /// socket can do so. Error: `EAGAIN` without room; the kernel's.
    #[doc(hidden)]
    pub fn send_frame(&mut self, frame: &[u8]) -> io::Result<()> {
        let XdpIo { tx, umem, socket, .. } = &mut self.io;
        let full = || io::Error::from(io::ErrorKind::WouldBlock);
        let slot = tx.reserve(umem).ok_or_else(full)?;
        let room = umem.get_mut(slot).and_then(|slot| slot.get_mut(..frame.len()));
        room.ok_or_else(full)?.copy_from_slice(frame);
        tx.send(umem, PathId::NONE, frame.len());
        tx.flush(umem, || socket.kick_send(), |_| ()).map(drop)
    }
}

impl AsFd for XdpIo {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn datagram(frame: Frame<'_>) -> RxDatagram<'_> {
    let headers = frame.headers;
    RxDatagram {
        payload: frame.payload,
        src: headers.src,
        dst: headers.dst,
        src_port: headers.src_port,
        ip_id: headers.ip_id.map_or(RxIpId::None, |(id, flags)| RxIpId::Exact { id, flags }),
        tos: Some(headers.tos),
    }
}

#[cfg(test)]
pub(crate) mod tests;
