//! A port of whole Ethernet frames: all that the backends `packet` and `afxdp` have in common.
//!
//! [`FramePort`] finds the way of each datagram ([`PathTable`]), follows changes of the interface,
//! and counts. A [`FrameIo`] moves frames to and from the kernel.
//!
//! The *guard* is a UDP socket on port 4791 that takes datagrams that do not come by the interface:
//! over loopback, or by another one that answers ARP for this one's addresses. It stops the kernel
//! from answering "port unreachable", and sends for paths with an unknown neighbour. Two things go
//! through it in both directions: multicast, because the kernel knows which groups have been
//! joined, and datagrams to the own addresses, of this process or of another one that shares them,
//! because an interface does not receive its own frames.

pub(crate) mod packet;
pub(crate) mod resolve;
pub(crate) mod xdp;

use std::any::Any;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use crate::frames::resolve::{Hop, PathTable, Sent};
use crate::kernel::descriptors::{Epoll, Interest};
use crate::kernel::interface::Interface;
use crate::port::config::{PortConfig, Shards};
use crate::port::contract::{
    Backend, Capabilities, Path, PathId, PathSpec, Port, PortRuns, PortStats, RxDatagram,
    TxFailure, TxSlot,
};
use crate::port::error::OpenError;
use crate::port::parts::{Fds, Manifest, Parts, SharedSockets};
use crate::udp::{SharedAddresses, UdpPort};

/// See [`Capabilities::copies_because`].
const FRAMES_ARE_COPIED: &str = "sockets of frames copy";

/// The two steps in which a [`FrameIo`] is opened.
pub trait Acquire: Sized {
    /// The backend.
    const BACKEND: Backend;

    /// Takes the kernel's objects for the ports: parts for each, in the order of their numbers.
    /// `shared` has the guards' sockets where other processes share the addresses. Error: the
    /// missing object or right, and the remedy.
    fn acquire(
        iface: &Interface,
        addresses: &[IpAddr],
        config: &PortConfig,
        shards: Shards,
        shared: Option<SharedSockets>,
    ) -> Result<Vec<Parts>, OpenError>;

    /// Makes the backend's part of a port, of the first of these descriptors. `mapped` is
    /// [`Parts::mapped`]. Error: descriptors that do not fit the manifest; no descriptors or no
    /// memory left.
    fn assemble(
        manifest: &Manifest,
        fds: &mut Fds,
        mapped: Option<Box<dyn Any + Send>>,
    ) -> Result<Assembled<Self>, OpenError>;
}

/// Moves frames between a [`FramePort`] and the kernel. Its descriptor is the socket.
pub trait FrameIo: Acquire + AsFd + Send {
    /// Hands received datagrams to `sink`, from about `budget` datagrams or frames. Returns their
    /// number, where a frame without a datagram counts as one; fewer than `budget` if the queue was
    /// empty.
    fn receive(
        &mut self,
        budget: usize,
        state: &mut State,
        sink: &mut impl FnMut(RxDatagram<'_>),
    ) -> usize;

    /// See [`Port::is_filled`].
    fn is_filled(&self, eighths: u32) -> bool;

    /// Room for a datagram along a path that leaves directly. Discards an earlier slot.
    fn reserve(&mut self, paths: &mut PathTable, path: PathId, len: usize) -> Option<TxSlot<'_>>;

    /// Discards a reserved slot.
    fn discard(&mut self);

    /// Accepts the reserved slot, if there is one.
    fn commit(&mut self, paths: &mut PathTable, state: &mut State);

    /// A path was removed: its frames still leave, but under [`PathId::NONE`], because its id may
    /// be given to another path.
    fn forget(&mut self, path: PathId);

    /// Gives all committed frames to the kernel, and reports those refused for good.
    fn flush(&mut self, state: &mut State, failed: &mut impl FnMut(TxFailure));

    /// Whether frames wait for the kernel, or the caller waits for a slot that the kernel has.
    fn is_blocked(&self) -> bool;

    /// Whether `EPOLLOUT` of the socket says when [`is_blocked`](Self::is_blocked) ends.
    fn waits_for_room(&self) -> bool {
        false
    }

    /// A descriptor that says when `is_blocked` may end, if the socket does not.
    fn timer(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Sets that timer if frames wait, or paths do.
    fn set_timer(&mut self, _paths_wait: bool) {}

    /// Whether frames of a path wait for the kernel.
    fn holds(&self, sent: &Sent) -> bool;

    /// Chores; `changed` says whether the interface changed.
    fn maintain(&mut self, changed: bool, state: &mut State);

    /// Receives frames to this Ethernet address from now on. Error: the kernel's; the next change
    /// of the interface tries again.
    fn follow(&mut self, mac: [u8; 6], addresses: &[IpAddr]) -> io::Result<()>;

    /// Adds the counters that only the kernel has.
    fn add_kernel_stats(&self, stats: &mut PortStats);

    /// As [`Port::runs`].
    fn runs(&self, _: &PortStats) -> PortRuns {
        PortRuns::default()
    }
}

/// A [`FrameIo`], and the facts that its port has to know.
pub struct Assembled<F> {
    pub(crate) io: F,
    pub(crate) capabilities: Capabilities,
}

/// The counters of a port, and whether its interface is gone.
#[derive(Debug, Default)]
pub struct State {
    pub(crate) stats: PortStats,
    /// The errno that ended the port's life.
    pub(crate) dead: Option<i32>,
}

impl State {
    /// Ends the port's life if the interface is gone for good. Other errors mean that it was only
    /// switched off for a while.
    pub(crate) fn note_error(&mut self, error: &io::Error) {
        if matches!(error.raw_os_error(), Some(libc::ENXIO | libc::ENODEV)) {
            self.dead = error.raw_os_error();
        }
    }
}

/// A port over a socket for whole frames.
///
/// While the port is [blocked](Port::wants_write), [`wait_fd`](Port::wait_fd) also becomes readable
/// when it is time to flush again: no need to wait for `POLLOUT`.
pub struct FramePort<F: FrameIo> {
    capabilities: Capabilities,
    /// Dropped before the guard: a program leaves the interface before UDP/4791 is free.
    pub(crate) io: F,
    pub(crate) paths: PathTable,
    pub(crate) guard: UdpPort,
    reserved: Slot,
    pub(crate) epoll: Epoll,
    /// Whether the socket is in the epoll set.
    watched: bool,
    /// Whether the epoll set waits for room in the socket.
    waits_for_room: bool,
    pub(crate) state: State,
    /// Dropped last: it says that all of the above are closed.
    _lease: Option<Arc<OwnedFd>>,
}

/// Where the last reserved slot is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Slot {
    Nothing,
    Frame,
    Guard,
}

impl<F: FrameIo> FramePort<F> {
    /// Takes what ports on `iface` for these own `addresses`, in GID order, need of the kernel, for
    /// one port each. Frames for the ports are dropped until these are assembled, or wait in their
    /// rings. Error: a missing privilege, an interface that is down or not Ethernet, an address of
    /// another interface, UDP/4791 in use by another process; and those of the backend.
    pub fn acquire(
        iface: &Interface,
        addresses: &[IpAddr],
        config: &PortConfig,
        shards: Shards,
        shared: Option<SharedSockets>,
    ) -> Result<Vec<Parts>, OpenError> {
        F::acquire(iface, addresses, config, shards, shared)
    }

    /// Makes a port of its parts, in the network namespace where they were acquired. Error: parts
    /// of another backend or of another network namespace, no descriptors or no memory left; and
    /// `afxdp` parts of another process before Linux 6.4.
    pub fn assemble(parts: Parts) -> Result<Self, OpenError> {
        parts.check_backend(F::BACKEND)?;
        let Parts { manifest, fds, mapped, lease } = parts;
        let os = |what: &'static str| move |e| OpenError::os(F::BACKEND, what, e, "");
        let mut fds = Fds::new(fds);
        let Assembled { io, mut capabilities } = F::assemble(&manifest, &mut fds, mapped)?;
        let guard = UdpPort::assemble_guard(&manifest, fds)?;
        let paths = PathTable::open(&manifest.interface, &manifest.addresses)
            .map_err(os("cannot open rtnetlink"))?;
        capabilities.local_budget = guard.capabilities().local_budget;
        let epoll = Epoll::new().map_err(os("cannot make an epoll set"))?;
        let fds = [io.as_fd(), paths.wait_fd(), guard.wait_fd()];
        for fd in fds.into_iter().chain(io.timer()) {
            epoll.add(fd, Interest::Read).map_err(os("cannot wait for the socket"))?;
        }
        Ok(Self {
            capabilities,
            io,
            paths,
            guard,
            reserved: Slot::Nothing,
            epoll,
            watched: true,
            waits_for_room: false,
            state: State::default(),
            _lease: lease,
        })
    }

    /// As [`UdpPort::share`].
    pub(crate) fn share(
        &mut self,
        addresses: Arc<dyn SharedAddresses>,
        nth: usize,
    ) -> Result<(), OpenError> {
        let shared = self.guard.share(addresses, nth);
        shared.map_err(|e| OpenError { backend: F::BACKEND, ..e })
    }

    /// Looks after its chores until the next datagram of a path leaves by the guard.
    #[cfg(test)]
    #[track_caller]
    pub(crate) fn turns_to_guard(&mut self, path: PathId) {
        crate::testing::testns::wait_until("it looks", || {
            crate::testing::testns::look_after(self, 50);
            matches!(self.paths.hop(path), Some(Hop::Guard(_)))
        });
    }

    /// Discards a slot that was reserved and not committed.
    fn discard(&mut self) {
        self.reserved = Slot::Nothing;
        self.io.discard();
    }

    /// The events of the socket in the epoll set: also room, while frames wait for it.
    fn interest(&self) -> Interest {
        if self.waits_for_room { Interest::ReadWrite } else { Interest::Read }
    }

    fn watch_room(&mut self) {
        let waits = self.io.waits_for_room();
        if waits != std::mem::replace(&mut self.waits_for_room, waits) && self.watched {
            let changed = self.epoll.modify(self.io.as_fd(), self.interest());
            // A failed change is tried again.
            self.waits_for_room = waits == changed.is_ok();
        }
    }

    /// Ends the port's life if the interface is gone; follows a change of its Ethernet address.
    fn check_interface(&mut self) {
        let mac = self.paths.check_interface();
        let followed = mac.and_then(|mac| self.io.follow(mac, self.guard.addresses()));
        followed.unwrap_or_else(|e| self.state.note_error(&e));
    }
}

impl<F: FrameIo> Port for FramePort<F> {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn addresses(&self) -> &[IpAddr] {
        self.guard.addresses()
    }

    fn add_path(&mut self, spec: &PathSpec) -> io::Result<Path> {
        self.paths.add(spec, &mut self.guard)
    }

    fn remove_path(&mut self, path: PathId) {
        self.discard();
        self.io.forget(path);
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
        let mut count = self.io.receive(budget, &mut self.state, &mut sink);
        count += self.guard.receive(budget.saturating_sub(count), &mut sink)?;
        // Datagrams that arrived before the end of the interface still count.
        match self.state.dead {
            Some(errno) if count == 0 => Err(io::Error::from_raw_os_error(errno)),
            _ => Ok(count),
        }
    }

    #[inline]
    fn is_filled(&self, eighths: u32) -> bool {
        self.io.is_filled(eighths)
    }

    fn runs(&self) -> PortRuns {
        self.io.runs(&self.state.stats)
    }

    fn reserve(&mut self, path: PathId, len: usize) -> Option<TxSlot<'_>> {
        self.discard();
        match self.paths.hop(path)? {
            Hop::Direct(_) => {
                let slot = self.io.reserve(&mut self.paths, path, len)?;
                self.reserved = Slot::Frame;
                Some(slot)
            }
            Hop::Guard(path) => {
                let slot = self.guard.reserve(path, len)?;
                self.reserved = Slot::Guard;
                Some(slot)
            }
        }
    }

    fn commit(&mut self) {
        match std::mem::replace(&mut self.reserved, Slot::Nothing) {
            Slot::Nothing => {}
            Slot::Frame => self.io.commit(&mut self.paths, &mut self.state),
            Slot::Guard => self.guard.commit(),
        }
    }

    fn flush(&mut self, mut failed: impl FnMut(TxFailure)) {
        self.discard();
        self.io.flush(&mut self.state, &mut |failure| {
            // A removed path gets no report: its id may be in use again.
            if failure.path != PathId::NONE {
                failed(failure);
            }
        });
        let paths = &self.paths;
        self.guard.flush(|failure| {
            if let Some(path) = paths.of_guard(failure.path) {
                failed(TxFailure { path, ..failure });
            }
        });
        let Self { paths, io, guard, .. } = self;
        paths.flushed(|sent| holds(io, guard, sent));
        self.watch_room();
        self.io.set_timer(self.paths.is_turning());
    }

    fn wants_write(&self) -> bool {
        self.io.is_blocked() || self.guard.wants_write() || self.paths.is_turning()
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    fn watch(&mut self, on: bool) -> io::Result<()> {
        if on != self.watched {
            self.epoll.set(self.io.as_fd(), on.then(|| self.interest()))?;
            self.watched = on;
        }
        Ok(())
    }

    fn maintain(&mut self) -> Option<Duration> {
        self.discard();
        let guard = self.guard.maintain();
        let Self { paths, io, guard: through, .. } = self;
        let again = paths.maintain(|sent| holds(io, through, sent));
        let changed = self.paths.take_interface_change();
        self.io.maintain(changed, &mut self.state);
        if changed {
            self.check_interface();
        }
        self.io.set_timer(self.paths.is_turning());
        // Nothing else calls `receive`, which says that the interface is gone.
        let gone = self.state.dead.map(|_| Duration::ZERO);
        guard.into_iter().chain(again).chain(gone).min()
    }

    fn stats(&self) -> PortStats {
        let mut stats = self.state.stats;
        self.io.add_kernel_stats(&mut stats);
        let guard = self.guard.stats();
        stats.tx_unresolved += guard.tx_datagrams;
        stats.add(&guard);
        stats
    }
}

/// Whether datagrams of a path wait for the kernel.
fn holds(io: &impl FrameIo, guard: &UdpPort, sent: &Sent) -> bool {
    io.holds(sent) || guard.holds(sent.guard)
}

impl<F: FrameIo> std::fmt::Debug for FramePort<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FramePort({} on {:?})", F::BACKEND, self.addresses())
    }
}
