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
//! The *guard* is a UDP socket on port 4791 that drops all its input. It stops the kernel from
//! answering "port unreachable", and sends for paths with an unknown neighbour. Multicast goes
//! through it in both directions, because the kernel knows which groups have been joined.
//!
//! Linux 6.2 is the first kernel that gives UDP super-packets to such sockets.

mod filter;
mod open;
mod ring;
mod rx;
mod staging;
mod sys;
mod tx;
mod vnet;

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::time::Duration;

use crate::PortConfig;
use crate::error::OpenError;
use crate::ethtool::Segmentation;
use crate::fd::{Epoll, Interest, attach_filter};
use crate::iface::Interface;
use crate::loopback::{LoopHeader, LoopQueue};
use crate::port::{
    Capabilities, Path, PathId, PathSpec, Port, PortStats, Runs, RxDatagram, TxFailure, TxSlot,
};
use crate::resolve::{Hop, PathTable, Sent};
use crate::udp::UdpPort;
use ring::Ring;
use rx::RxCounters;
use staging::{IP_IDS_MIN, RunLimits, Staging};
use sys::{PacketSocket, SendScratch, Transmit};
use tx::{Sender, TxCounters};

/// A port over an `AF_PACKET` socket.
///
/// While the port is [blocked](Port::wants_write), [`wait_fd`](Port::wait_fd) also becomes readable
/// when the kernel takes more: no need to wait for `POLLOUT`.
pub struct PacketPort {
    capabilities: Capabilities,
    addresses: Vec<IpAddr>,
    interface: u32,
    mac: [u8; 6],
    limits: RunLimits,
    // The ring is unmapped before its socket is closed.
    ring: Ring,
    socket: PacketSocket,
    paths: PathTable,
    guard: UdpPort,
    looped: LoopQueue,
    looped_first: bool,
    staging: Staging,
    sender: Sender,
    /// `None` where it makes no difference: without super-packets.
    segmentation: Option<Segmentation>,
    scratch: SendScratch,
    reserved: Reserved,
    rx: RxCounters,
    /// Datagrams that went through the guard.
    unresolved: u64,
    epoll: Epoll,
    /// Whether the socket is in the epoll set.
    watched: bool,
    /// Whether the epoll set waits for room in the socket.
    waits_for_write: bool,
    /// The errno that ended the port's life.
    dead: Option<i32>,
}

/// Where the last reserved slot is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reserved {
    Nothing,
    Staged,
    Guard,
    Looped,
}

impl PacketPort {
    /// Opens a port on `iface` for these own `addresses`, in GID order.
    ///
    /// # Errors
    /// No `CAP_NET_RAW`, an interface that is down or not Ethernet, an address of another
    /// interface, UDP/4791 in use by another process, or a kernel before 6.2.
    pub fn open(
        iface: &Interface,
        addresses: &[IpAddr],
        config: &PortConfig,
    ) -> Result<Self, OpenError> {
        let mut ports = open::open(iface, addresses, config, 1)?;
        Ok(ports.pop().expect("one was asked for"))
    }

    /// Opens `count` ports that share the interface and the addresses. The port with number *n*
    /// gets the frames with *n* as the upper byte of the queue pair number in their transport
    /// header (`PACKET_FANOUT`). The first port gets those for which there is no such port.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_shards(
        iface: &Interface,
        addresses: &[IpAddr],
        config: &PortConfig,
        count: usize,
    ) -> Result<Vec<Self>, OpenError> {
        open::open(iface, addresses, config, count)
    }

    /// Ends the port's life if the interface is gone. Otherwise follows a change of its Ethernet
    /// address and of its segmentation limits.
    fn check_interface(&mut self) {
        self.check_segmentation();
        match self.paths.check_interface() {
            Ok(mac) if mac != self.mac => {
                // A new filter replaces the old one.
                let program = filter::program(mac, &self.addresses);
                if attach_filter(self.socket.as_fd(), &program).is_ok() {
                    self.mac = mac;
                }
            }
            Err(e) if e.raw_os_error() == Some(libc::ENODEV) => self.dead = Some(libc::ENODEV),
            _ => {}
        }
    }

    fn check_segmentation(&mut self) {
        if let Some(segmentation) = &mut self.segmentation {
            segmentation.refresh(self.socket.as_fd());
            self.sender.leaves_whole = self.limits.are_taken_by(segmentation);
        }
    }

    /// The events of the socket in the epoll set: also room, while staged datagrams wait for it.
    fn interest(&self) -> Interest {
        if self.waits_for_write { Interest::ReadWrite } else { Interest::Read }
    }

    fn watch_writes(&mut self) {
        let waits = !self.staging.is_empty();
        if waits != std::mem::replace(&mut self.waits_for_write, waits) && self.watched {
            let changed = self.epoll.modify(self.socket.as_fd(), self.interest());
            // A failed change is tried again.
            self.waits_for_write = waits == changed.is_ok();
        }
    }

    fn receive_frames(&mut self, budget: usize, sink: &mut impl FnMut(RxDatagram<'_>)) -> usize {
        let mut count = 0;
        // Frames without a datagram also count against the budget: garbage must not keep us here.
        for _ in 0..budget {
            if count >= budget {
                break;
            }
            let rx = &mut self.rx;
            match self.ring.take(|frame| rx::deliver(frame, rx, sink)) {
                Some(Some(datagrams)) => count += datagrams,
                Some(None) => self.rx.malformed += 1,
                None => break,
            }
        }
        count
    }

    fn receive_looped(&mut self, budget: usize, sink: &mut impl FnMut(RxDatagram<'_>)) -> usize {
        let rx = &mut self.rx;
        self.looped.pop(budget, |datagram| {
            rx.datagrams += 1;
            rx.runs += 1;
            rx.bytes += datagram.payload.len() as u64;
            sink(datagram);
        })
    }

    /// A slot in the buffer of runs.
    fn stage(&mut self, path: PathId, len: usize) -> Option<TxSlot<'_>> {
        let mut limits = self.limits;
        limits.datagrams = limits.datagrams.min(self.sender.segments_max());
        // The borrow checker does not see that a `None` borrows nothing: check first, then borrow.
        if self.staging.can_grow(path, len, limits) {
            let (buf, ip_id) = self.staging.grow(len)?;
            self.reserved = Reserved::Staged;
            return Some(TxSlot { buf, ip_id });
        }
        let ip_id = self.paths.peek_ip_id(path, IP_IDS_MIN);
        let Some(Hop::Direct(template)) = self.paths.hop(path) else { return None };
        let ip_id = if template.is_ipv6() { 0 } else { ip_id };
        if len > limits.bytes {
            return None;
        }
        let buf = self.staging.begin(path, len, template, ip_id)?;
        self.reserved = Reserved::Staged;
        Some(TxSlot { buf, ip_id })
    }
}

impl Port for PacketPort {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn addresses(&self) -> &[IpAddr] {
        &self.addresses
    }

    fn add_path(&mut self, spec: &PathSpec) -> io::Result<Path> {
        self.paths.add(spec, &mut self.guard)
    }

    fn remove_path(&mut self, path: PathId) {
        // The id may be reused: datagrams of its next path must not join this run.
        self.staging.close();
        self.paths.remove(path, &mut self.guard);
    }

    fn join(&mut self, group: IpAddr) -> io::Result<()> {
        self.guard.join(group)
    }

    fn leave(&mut self, group: IpAddr) {
        self.guard.leave(group);
    }

    fn receive(
        &mut self,
        budget: usize,
        mut sink: impl FnMut(RxDatagram<'_>),
    ) -> io::Result<usize> {
        // The two take turns to be first, so that neither starves the other.
        self.looped_first = !self.looped_first && !self.looped.is_empty();
        let mut count = 0;
        if self.looped_first {
            count += self.receive_looped(budget, &mut sink);
        }
        count += self.receive_frames(budget.saturating_sub(count), &mut sink);
        if !self.looped_first && !self.looped.is_empty() {
            count += self.receive_looped(budget.saturating_sub(count), &mut sink);
        }
        if self.guard.has_groups() {
            count += self.guard.receive(budget.saturating_sub(count), &mut sink)?;
        }
        match self.dead {
            Some(errno) if count == 0 => Err(io::Error::from_raw_os_error(errno)),
            _ => Ok(count),
        }
    }

    fn rx_places(&self) -> Option<(u64, u64)> {
        Some((self.rx.runs, self.rx.datagrams))
    }

    fn departed(&self) -> Option<Runs> {
        let TxCounters { runs, apart, datagrams, bytes, .. } = self.sender.counters;
        Some(Runs { runs: runs + apart, datagrams, bytes })
    }

    fn reserve(&mut self, path: PathId, len: usize) -> Option<TxSlot<'_>> {
        self.staging.discard();
        self.reserved = Reserved::Nothing;
        match self.paths.hop(path)? {
            Hop::Direct(_) => self.stage(path, len),
            Hop::Guard(id) => {
                let slot = self.guard.reserve(id, len)?;
                self.reserved = Reserved::Guard;
                Some(slot)
            }
            Hop::Loopback => {
                let (spec, src_port) = self.paths.spec(path)?;
                let header = LoopHeader::new(spec, src_port, 0);
                let buf = self.looped.reserve(header, len)?;
                self.reserved = Reserved::Looped;
                Some(TxSlot { buf, ip_id: 0 })
            }
        }
    }

    fn commit(&mut self) {
        match std::mem::replace(&mut self.reserved, Reserved::Nothing) {
            Reserved::Staged => {
                if let Some(path) = self.staging.commit() {
                    self.paths.take_ip_ids(path, 1);
                }
            }
            Reserved::Guard => {
                self.guard.commit();
                self.unresolved += 1;
            }
            Reserved::Looped => {
                self.looped.commit();
                self.sender.counters.datagrams += 1;
                self.sender.counters.runs += 1;
            }
            Reserved::Nothing => debug_assert!(false, "commit without reserve"),
        }
    }

    fn flush(&mut self, mut failed: impl FnMut(TxFailure)) {
        self.reserved = Reserved::Nothing;
        let mut kernel = Transmit { socket: &self.socket, scratch: &mut self.scratch };
        self.sender.send(&mut kernel, &mut self.staging, &mut failed);
        let paths = &self.paths;
        self.guard.flush(|failure| {
            // A removed path gets no report: its id may be in use again.
            if let Some(path) = paths.of_guard(failure.path) {
                failed(TxFailure { path, ..failure });
            }
        });
        self.looped.publish();
        let Self { paths, staging, guard, .. } = self;
        paths.flushed(|sent| holds(staging, guard, sent));
        self.watch_writes();
    }

    fn wants_write(&self) -> bool {
        !self.staging.is_empty() || self.guard.wants_write()
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    fn watch(&mut self, wished: bool) -> io::Result<()> {
        self.epoll.set(self.socket.as_fd(), wished.then(|| self.interest()))?;
        self.watched = wished;
        Ok(())
    }

    fn maintain(&mut self) -> Option<Duration> {
        let guard = self.guard.maintain();
        // It cannot fail: the descriptor is a socket. The error itself is discarded: the kernel's
        // news of the interface say what it means.
        let _ = self.socket.take_error();
        let Self { paths, staging, guard: through, .. } = self;
        let again = paths.maintain(|sent| holds(staging, through, sent));
        if paths.take_interface_news() {
            self.check_interface();
        } else if self.segmentation.as_ref().is_some_and(Segmentation::is_unanswered) {
            self.check_segmentation();
        }
        guard.into_iter().chain(again).min()
    }

    fn stats(&self) -> PortStats {
        let tx = &self.sender.counters;
        let mut stats = PortStats {
            rx_datagrams: self.rx.datagrams,
            rx_bytes: self.rx.bytes,
            rx_runs: self.rx.runs,
            rx_queue_drops: self.rx.drops(&self.socket),
            rx_malformed: self.rx.malformed,
            tx_datagrams: tx.datagrams,
            tx_bytes: tx.bytes,
            tx_runs: tx.runs,
            tx_failed: tx.failed,
            tx_blocked: tx.blocked,
            tx_unresolved: self.unresolved,
        };
        stats.add(&self.guard.stats());
        stats
    }
}

/// Whether datagrams of a path wait for the kernel.
fn holds(staging: &Staging, guard: &UdpPort, sent: &Sent) -> bool {
    staging.holds(sent.path) || sent.guard.is_some_and(|path| guard.holds(path))
}

impl std::fmt::Debug for PacketPort {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PacketPort")
            .field("interface", &self.interface)
            .field("addresses", &self.addresses)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
