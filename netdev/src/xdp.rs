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

mod asm;
mod attach_error;
mod bpf;
mod cursor;
mod mapping;
mod open;
mod prog;
mod retry;
mod ring;
mod rx;
mod socket;
mod timer;
mod tx;
mod umem;

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::PortConfig;
use crate::error::OpenError;
use crate::fd::{Epoll, Interest};
use crate::headers::{ETH_LEN, Frame, HEADERS_V6, parse_frame};
use crate::iface::Interface;
use crate::loopback::{LoopHeader, LoopQueue};
use crate::port::{
    Backend, Capabilities, Path, PathId, PathSpec, Port, PortStats, RxBudget, RxDatagram, RxIpId,
    TxFailure, TxSlot,
};
use crate::resolve::{Hop, PathTable, Sent};
use crate::udp::UdpPort;
use bpf::Link;
use open::{Opened, RX_CHUNK_BYTES};
use prog::OwnAddresses;
use retry::Retry;
use rx::RxHalf;
use socket::Socket;
use tx::TxHalf;
use umem::{CHUNK, Umem};

/// A port over an `AF_XDP` socket.
///
/// While the port is [blocked](Port::wants_write), [`wait_fd`](Port::wait_fd) also becomes readable
/// when it is time to flush again: no need to wait for `POLLOUT`.
pub struct XdpPort {
    capabilities: Capabilities,
    addresses: Vec<IpAddr>,
    /// Dropped first: the program leaves the interface before its socket closes.
    _link: Arc<Link>,
    /// Shared by all ports with this program.
    own: Arc<Mutex<OwnAddresses>>,
    tx: TxHalf,
    rx: RxHalf,
    socket: Socket,
    umem: Umem,
    zero_copy: bool,
    /// Whether to run the driver's queue before the ring is read.
    busy_poll: bool,
    paths: PathTable,
    guard: UdpPort,
    /// Datagrams to our own addresses: an interface does not receive what it sends.
    looped: LoopQueue,
    /// Whether the next `receive` begins with `looped`; the two alternate, so that neither starves.
    looped_first: bool,
    reserved: Reserved,
    epoll: Epoll,
    /// In the epoll set: when to check again whether the kernel takes more.
    retry: Retry,
    /// The errno that ended the port's life.
    dead: Option<i32>,
    counters: Counters,
}

/// Where the last reserved slot is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reserved {
    Nothing,
    /// In the UMEM, at this offset, a frame of `len` bytes.
    Frame {
        path: PathId,
        at: usize,
        len: usize,
    },
    /// In the guard.
    Guard,
    /// In the loopback queue, `len` bytes.
    Looped {
        len: usize,
    },
}

#[derive(Debug, Clone, Copy, Default)]
struct Counters {
    rx_datagrams: u64,
    rx_bytes: u64,
    rx_malformed: u64,
    tx_datagrams: u64,
    tx_bytes: u64,
    tx_failed: u64,
    tx_blocked: u64,
}

impl XdpPort {
    /// Opens a socket on queue [`PortConfig::xdp_queue`] of an interface, loads the program for
    /// `addresses` and attaches it, in native mode unless [`PortConfig::xdp_generic`].
    ///
    /// [`PortConfig::ring_frames`] is the number of 4096-byte chunks for each direction, rounded up
    /// to a power of two and down to what `RLIMIT_MEMLOCK` allows. A frame of more than 3840 bytes
    /// takes two of them.
    ///
    /// # Errors
    /// A missing capability (`CAP_NET_RAW`, `CAP_NET_ADMIN`, `CAP_BPF`), another XDP program or
    /// AF_XDP socket on the interface, a driver without native XDP or not at this MTU, several
    /// receive queues, the loopback interface, locked-memory limits, or UDP/4791 in use by another
    /// process. The hint says what to do.
    pub fn open(
        iface: &Interface,
        addresses: &[IpAddr],
        config: &PortConfig,
    ) -> Result<Self, OpenError> {
        let mut ports = Self::open_shards(iface, addresses, config, 1)?;
        Ok(ports.pop().expect("one was asked for"))
    }

    /// Opens `count` ports, each on a receive queue of its own, starting at the first. For a single
    /// port, uses the configured queue. The interface selects the port for a frame, and it knows
    /// only addresses and ports.
    ///
    /// # Errors
    /// As [`open`](Self::open); the interface has fewer or more receive queues.
    pub fn open_shards(
        iface: &Interface,
        addresses: &[IpAddr],
        config: &PortConfig,
        count: usize,
    ) -> Result<Vec<Self>, OpenError> {
        // The guards come first: from the first redirected frame on, UDP/4791 is ours.
        let guards = UdpPort::open_guards(iface, addresses, config, count)
            .map_err(|e| OpenError { backend: Backend::Xdp, ..e })?;
        let opened = open::open(iface, addresses, config, count)?;
        let over = |(opened, guard)| Self::over(opened, guard, iface, addresses, config);
        opened.into_iter().zip(guards).map(over).collect()
    }

    fn over(
        opened: Opened,
        guard: UdpPort,
        iface: &Interface,
        addresses: &[IpAddr],
        config: &PortConfig,
    ) -> Result<Self, OpenError> {
        let os = |what: &'static str| move |e| OpenError::os(Backend::Xdp, what, e, "");
        let paths = PathTable::open(iface, addresses).map_err(os("cannot open rtnetlink"))?;
        let Opened { link, own, tx, rx, socket, umem, zero_copy, chunks_each } = opened;
        let epoll = Epoll::new().map_err(os("cannot make an epoll set"))?;
        epoll.add(socket.as_fd(), Interest::Read).map_err(os("cannot wait for the socket"))?;
        epoll.add(paths.wait_fd(), Interest::Read).map_err(os("cannot wait for rtnetlink"))?;
        epoll.add(guard.wait_fd(), Interest::Read).map_err(os("cannot wait for the guard"))?;
        let looped = LoopQueue::new(chunks_each as usize * CHUNK, chunks_each as usize)
            .map_err(os("cannot make the loopback queue"))?;
        epoll.add(looped.wait_fd(), Interest::Read).map_err(os("cannot wait for loopback"))?;
        let retry = Retry::new().map_err(os("cannot make a timer"))?;
        epoll.add(retry.as_fd(), Interest::Read).map_err(os("cannot wait for a timer"))?;
        let frame_max = tx.slot_bytes().min(iface.mtu as usize + ETH_LEN);
        Ok(Self {
            capabilities: Capabilities {
                backend: Backend::Xdp,
                link_mtu: iface.mtu,
                segments_max: 1,
                run_bytes_max: frame_max.saturating_sub(HEADERS_V6) as u32,
                ip_id_exact: true,
                tos_on_send: true,
                tos_on_receive: true,
                rx_budget: rx_budget(chunks_each, iface.mtu),
            },
            addresses: addresses.to_vec(),
            _link: link,
            own,
            tx,
            rx,
            socket,
            umem,
            zero_copy,
            busy_poll: config.xdp_busy_poll_us.is_some(),
            paths,
            guard,
            looped,
            looped_first: false,
            reserved: Reserved::Nothing,
            epoll,
            retry,
            dead: None,
            counters: Counters::default(),
        })
    }

    /// Whether the driver works on the shared memory without copying.
    #[must_use]
    pub fn zero_copy(&self) -> bool {
        self.zero_copy
    }

    fn reserve_frame(&mut self, path: PathId, len: usize) -> Option<TxSlot<'_>> {
        let ip_id = self.paths.take_ip_ids(path, 1);
        let Some(Hop::Direct(template)) = self.paths.hop(path) else { return None };
        let header = template.header_len();
        let frame_len = header + len;
        if frame_len > self.capabilities.link_mtu as usize + ETH_LEN {
            return None;
        }
        let slot = self.tx.reserve(&mut self.umem)?;
        let frame = self.umem.get_mut(slot.clone())?.get_mut(..frame_len)?;
        template.write(frame, len, ip_id);
        self.reserved = Reserved::Frame { path, at: slot.start, len: frame_len };
        let ip_id = if template.is_ipv6() { 0 } else { ip_id };
        Some(TxSlot { buf: &mut frame[header..], ip_id })
    }

    fn reserve_looped(&mut self, path: PathId, len: usize) -> Option<TxSlot<'_>> {
        if len > self.capabilities.run_bytes_max as usize {
            return None;
        }
        let id = self.paths.take_ip_ids(path, 1);
        let (spec, src_port) = self.paths.spec(path)?;
        let header = LoopHeader::new(spec, src_port, id);
        let ip_id = if spec.local.is_ipv4() { id } else { 0 };
        let buf = self.looped.reserve(header, len)?;
        self.reserved = Reserved::Looped { len };
        Some(TxSlot { buf, ip_id })
    }

    fn commit_frame(&mut self, path: PathId, at: usize, len: usize) {
        let Some(Hop::Direct(template)) = self.paths.hop(path) else { return };
        // Without a checksum an IPv6 datagram would be dropped by most receivers; for IPv4 the ICRC
        // suffices.
        if template.is_ipv6()
            && let Some(frame) = self.umem.get_mut(at..at + len)
        {
            template.complete_checksum(frame);
        }
        self.counters.tx_datagrams += 1;
        self.counters.tx_bytes += (len - template.header_len()) as u64;
        self.tx.send(&mut self.umem, len);
        self.paths.sent(path, self.tx.last());
    }

    fn receive_frames(&mut self, budget: usize, sink: &mut impl FnMut(RxDatagram<'_>)) -> usize {
        if self.busy_poll {
            let polled = self.socket.kick_receive();
            polled.unwrap_or_else(|e| self.note_error(&e));
        }
        let Self { rx, umem, counters, .. } = self;
        let frames = rx.receive(umem, budget, |frame| {
            let Some(frame) = parse_frame(frame) else {
                counters.rx_malformed += 1;
                return;
            };
            counters.rx_datagrams += 1;
            counters.rx_bytes += frame.payload.len() as u64;
            sink(datagram(frame));
        });
        // Even after an empty read: a driver that ran out of room sleeps until a wake-up tells it
        // about the chunks added since.
        if self.rx.needs_wakeup() {
            let woken = self.socket.kick_receive();
            woken.unwrap_or_else(|e| self.note_error(&e));
        }
        frames
    }

    fn receive_looped(&mut self, budget: usize, sink: &mut impl FnMut(RxDatagram<'_>)) -> usize {
        let Self { looped, counters, .. } = self;
        looped.pop(budget, |datagram| {
            counters.rx_datagrams += 1;
            counters.rx_bytes += datagram.payload.len() as u64;
            sink(datagram);
        })
    }

    fn flush_frames(&mut self) {
        let Self { tx, umem, socket, .. } = self;
        match tx.flush(umem, || socket.kick_send()) {
            Ok(flushed) => {
                self.counters.tx_failed += flushed.refused;
                self.counters.tx_blocked += u64::from(flushed.blocked);
            }
            Err(e) => self.note_error(&e),
        }
    }

    /// Makes `wait_fd` readable a little later if frames wait for the kernel.
    fn schedule_retry(&mut self) {
        self.retry.schedule(self.tx.is_blocked() || self.paths.is_turning());
    }

    /// Ends the port's life if the interface is gone; follows a change of its Ethernet address.
    fn check_interface(&mut self) {
        let followed = self
            .paths
            .check_interface()
            .and_then(|mac| self.own.lock().unwrap_or_else(PoisonError::into_inner).follow(mac));
        followed.unwrap_or_else(|e| self.note_error(&e));
    }

    /// Ends the port's life if the interface is gone for good. Other errors mean that it was only
    /// switched off for a while.
    fn note_error(&mut self, error: &io::Error) {
        if matches!(error.raw_os_error(), Some(libc::ENXIO | libc::ENODEV)) {
            self.dead = error.raw_os_error();
        }
    }
}

impl Port for XdpPort {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn addresses(&self) -> &[IpAddr] {
        &self.addresses
    }

    fn add_path(&mut self, spec: &PathSpec) -> io::Result<Path> {
        self.reserved = Reserved::Nothing;
        self.paths.add(spec, &mut self.guard)
    }

    fn remove_path(&mut self, path: PathId) {
        self.reserved = Reserved::Nothing;
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
        if let Some(errno) = self.dead {
            return Err(io::Error::from_raw_os_error(errno));
        }
        self.looped_first = !self.looped_first;
        let mut count = 0;
        if self.looped_first {
            count = self.receive_looped(budget, &mut sink);
        }
        count += self.receive_frames(budget - count, &mut sink);
        if !self.looped_first {
            count += self.receive_looped(budget - count, &mut sink);
        }
        if self.guard.has_groups() {
            count += self.guard.receive(budget - count, &mut sink)?;
        }
        Ok(count)
    }

    fn reserve(&mut self, path: PathId, len: usize) -> Option<TxSlot<'_>> {
        self.reserved = Reserved::Nothing;
        match self.paths.hop(path)? {
            Hop::Direct(_) => self.reserve_frame(path, len),
            Hop::Loopback => self.reserve_looped(path, len),
            Hop::Guard(path) => {
                let slot = self.guard.reserve(path, len)?;
                self.reserved = Reserved::Guard;
                Some(slot)
            }
        }
    }

    fn commit(&mut self) {
        match std::mem::replace(&mut self.reserved, Reserved::Nothing) {
            Reserved::Nothing => {}
            Reserved::Frame { path, at, len } => self.commit_frame(path, at, len),
            Reserved::Guard => self.guard.commit(),
            Reserved::Looped { len } => {
                self.counters.tx_datagrams += 1;
                self.counters.tx_bytes += len as u64;
                self.looped.commit();
            }
        }
    }

    fn flush(&mut self, mut failed: impl FnMut(TxFailure)) {
        self.reserved = Reserved::Nothing;
        self.flush_frames();
        let paths = &self.paths;
        self.guard.flush(|failure| {
            if let Some(path) = paths.of_guard(failure.path) {
                failed(TxFailure { path, ..failure });
            }
        });
        let Self { paths, tx, guard, .. } = self;
        paths.flushed(|sent| holds(tx, guard, sent));
        self.schedule_retry();
        self.looped.publish();
    }

    fn wants_write(&self) -> bool {
        self.tx.is_blocked() || self.guard.wants_write() || self.paths.is_turning()
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    fn watch(&mut self, wished: bool) -> io::Result<()> {
        self.epoll.set(self.socket.as_fd(), wished.then_some(Interest::Read))
    }

    fn maintain(&mut self) -> Option<Duration> {
        self.reserved = Reserved::Nothing;
        let alive = self.socket.kick_receive();
        alive.unwrap_or_else(|e| self.note_error(&e));
        let guard = self.guard.maintain();
        let Self { paths, tx, guard: through, .. } = self;
        let again = paths.maintain(|sent| holds(tx, through, sent));
        if paths.take_interface_news() {
            self.check_interface();
        }
        self.schedule_retry();
        guard.into_iter().chain(again).min()
    }

    fn stats(&self) -> PortStats {
        let kernel = self.socket.statistics().ok();
        let guard = self.guard.stats();
        let own = &self.counters;
        let tx_datagrams = own.tx_datagrams.saturating_sub(own.tx_failed);
        let mut stats = PortStats {
            rx_datagrams: own.rx_datagrams,
            rx_bytes: own.rx_bytes,
            rx_runs: own.rx_datagrams,
            rx_queue_drops: kernel.map_or(0, |k| k.rx_dropped + k.rx_ring_full),
            rx_malformed: own.rx_malformed + self.rx.unusable,
            tx_datagrams,
            tx_bytes: own.tx_bytes,
            tx_runs: tx_datagrams,
            tx_failed: own.tx_failed,
            tx_blocked: own.tx_blocked,
            tx_unresolved: guard.tx_datagrams,
        };
        stats.add(&guard);
        stats
    }
}

/// Whether datagrams of a path wait for the kernel.
fn holds(tx: &TxHalf, guard: &UdpPort, sent: &Sent) -> bool {
    tx.holds(sent.last) || sent.guard.is_some_and(|path| guard.holds(path))
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

/// Capacity of `chunks` receive chunks, less an eighth for other senders' frames.
///
/// Where a frame may take two chunks, the number of datagrams is halved: the budget's bytes alone
/// would let small datagrams use up the chunks that large ones need. So with `d` datagrams allowed,
/// `k` of them in two chunks each, `d + k ≤ chunks` holds because the bytes allow `k ≤ d`.
fn rx_budget(chunks: u32, mtu: u32) -> RxBudget {
    let chunks = chunks - chunks / 8;
    let per_frame = (mtu as usize + ETH_LEN).div_ceil(RX_CHUNK_BYTES).min(2) as u32;
    let datagrams = chunks / per_frame;
    RxBudget { bytes: datagrams * RxBudget::cost(RX_CHUNK_BYTES as u32), datagrams }
}

#[cfg(test)]
pub(crate) mod tests;
