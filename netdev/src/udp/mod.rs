//! Plain UDP sockets: no privilege, `UDP_SEGMENT` out, `UDP_GRO` in.
//!
//! Each own address has one socket on UDP/4791 that receives. Datagrams leave from a socket bound
//! to the path's source port, opened for the first path that needs it. All sockets are unconnected
//! and never fragment (`IP_PMTUDISC_DO`). Linux then writes IPv4 identification 0, and datagram *i*
//! of a super-packet gets *i* when it is segmented, so the sender knows the bytes that the ICRC
//! must cover. The receiver cannot read the identification; it is a hint
//! ([`RxIpId::Hint`](crate::RxIpId::Hint)).
//!
//! Each joined group has a socket of its own (`groups`), which shares UDP/4791 with those of other
//! programs on this machine.
//!
//! Datagrams to the port's own addresses go through the kernel's loopback like any other.

mod domain;
mod groups;
pub(crate) mod handoff;
pub mod holder;
mod link;
mod neighbours;
pub(crate) mod next_hop;
mod offload;
mod pages;
mod paths;
mod rings;
mod rx;
mod sockets;
mod staging;
pub(crate) mod sys;
mod tx;

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::kernel::descriptors::{Epoll, Interest};
use crate::kernel::interface::Interface;
use crate::port::config::{PortConfig, Shards};
use crate::port::contract::{
    Backend, Capabilities, Path, PathId, PathSpec, Port, PortRuns, PortStats, QueueKind, Runs,
    RxBudget, RxDatagram, TxFailure, TxSlot,
};
use crate::port::error::OpenError;
use crate::port::parts::{BackendParts, Fds, Manifest, Parts, SharedSockets};
pub(crate) use domain::domain_of;
use groups::Groups;
use link::Link;
use neighbours::Neighbours;
pub(crate) use neighbours::SharedAddresses;
use offload::Offload;
use paths::Paths;
use rx::Receiver;
pub(crate) use sockets::open_shared;
use sockets::{Home, Options, Role};
use staging::{RUN_BYTES_MAX, Staging};
use sys::SendScratch;
pub(crate) use sys::Socket;

/// A port over UDP sockets.
///
/// While the port is [blocked](Port::wants_write), [`wait_fd`](Port::wait_fd) also becomes readable
/// when the kernel takes more: no need to wait for `POLLOUT`.
pub struct UdpPort {
    capabilities: Capabilities,
    addresses: Vec<IpAddr>,
    options: Options,
    paths: Paths,
    receiver: Receiver,
    groups: Groups,
    neighbours: Option<Neighbours>,
    staging: Staging,
    scratch: SendScratch,
    /// The socket that the kernel takes no more from.
    blocked: Option<usize>,
    epoll: Epoll,
    tx: TxStats,
    /// The interface, unless the port only sends.
    link: Option<Link>,
    /// `None` where it makes no difference (a guard, or no super-packets), and if changes cannot be
    /// monitored: then no run counts as taken whole.
    offload: Option<Offload>,
}

/// The sending half of [`PortStats`].
#[derive(Debug, Clone, Copy, Default)]
struct TxStats {
    datagrams: u64,
    bytes: u64,
    runs: u64,
    /// Of runs that the kernel segmented for the interface, all datagrams but the first of each.
    apart: u64,
    /// Datagrams of runs that left by reference.
    by_reference: u64,
    failed: u64,
    blocked: u64,
}

impl UdpPort {
    /// Opens UDP/4791 on each of `addresses`, which are addresses of `iface` in GID order, for one
    /// port each. `shared` has the sockets where other processes share the addresses. Super-packets
    /// are not split between several ports: they follow their first datagram.
    ///
    /// # Errors
    /// No address, an address outside this network namespace, or an address with port 4791 in use;
    /// the hint then names the process that holds it, as far as `/proc` shows it. For several
    /// ports, also that the kernel does not let a classic BPF program select a socket (before Linux
    /// 4.5).
    pub fn acquire(
        iface: &Interface,
        addresses: &[IpAddr],
        config: &PortConfig,
        shards: Shards,
        shared: Option<SharedSockets>,
    ) -> Result<Vec<Parts>, OpenError> {
        let acquired = acquire(iface, addresses, config, Role::Receive, shards, shared)?;
        let segments_max = acquired.segments_max;
        let manifest = Manifest::new(iface, addresses, config, segments_max, BackendParts::Udp);
        let parts = |fds| Parts::new(manifest.clone(), fds);
        Ok(acquired.into_ports().map(parts).collect())
    }

    /// Makes a port of its parts, in the network namespace where they were acquired.
    ///
    /// # Errors
    /// Parts of another backend or of another network namespace, or no descriptors left.
    pub fn assemble(parts: Parts) -> Result<Self, OpenError> {
        parts.check_backend(Backend::Udp)?;
        let Parts { manifest, fds, .. } = parts;
        Self::over(&manifest, Fds::new(fds), Role::Receive)
    }

    /// The companion of a port that reads frames elsewhere (`AF_PACKET`, `AF_XDP`).
    ///
    /// It owns UDP/4791 on each address, so that the kernel never answers "port unreachable" and no
    /// program takes the port. `receive` returns only datagrams to groups, those that do not come
    /// by the port's interface, and those that neighbours hand over: other input is dropped before
    /// it is queued. Sending works as on a port of [`assemble`](Self::assemble), through the
    /// kernel's routing and neighbour resolution.
    pub(crate) fn assemble_guard(manifest: &Manifest, sockets: Fds) -> Result<Self, OpenError> {
        let backend = manifest.backend();
        let role = guard_of(&manifest.interface, Shards::ONE);
        Self::over(manifest, sockets, role).map_err(|e| OpenError { backend, ..e })
    }

    fn over(manifest: &Manifest, sockets: Fds, role: Role) -> Result<Self, OpenError> {
        let Manifest { interface: iface, addresses, config, .. } = manifest;
        let segments_max = manifest.udp_segments_max;
        let own: Vec<Socket> = sockets.rest().map(Socket::from).collect();
        let os = |what: &str, e| OpenError::os(Backend::Udp, what, e, "");
        let epoll = Epoll::new().map_err(|e| os("cannot make an epoll set", e))?;
        if role != Role::Shut {
            for socket in &own {
                epoll
                    .add(socket.as_fd(), Interest::Read)
                    .map_err(|e| os("cannot wait for a UDP socket", e))?;
            }
        }
        let home = Home::of(&own[0]);
        // Without a descriptor to ask with, it is taken to be so.
        if Socket::new(addresses[0].is_ipv6()).is_ok_and(|here| !home.has(&here)) {
            return Err(OpenError::plain(
                Backend::Udp,
                "the parts of the port are of another network namespace",
                "assemble the port there",
            ));
        }
        let options = Options::new(config, home.domain);
        let counts = role == Role::Receive && segments_max > 1;
        // It comes first, so that it announces changes during the request.
        let link = (role == Role::Receive).then(|| Link::open(iface.index, &epoll)).transpose();
        let link = link.map_err(|e| os("cannot follow the interface", e))?;
        let offload = counts.then(|| Offload::open(&own[0], iface.index).ok()).flatten();
        let copies_because = match role {
            Role::Receive if segments_max == 1 => Some("no super-packets".into()),
            Role::Receive => {
                rings::try_reference(iface, addresses[0], options, config.udp.ring_bytes).err()
            }
            _ => Some("a guard".into()),
        };
        let ring_bytes = if copies_because.is_none() { config.udp.ring_bytes as usize } else { 0 };
        Ok(Self {
            neighbours: None,
            capabilities: Capabilities {
                backend: Backend::Udp,
                link_mtu: iface.mtu,
                segments_max,
                run_bytes_max: RUN_BYTES_MAX as u32,
                ip_id_exact: false,
                tos_on_send: true,
                tos_on_receive: true,
                rx_budget: rx_budget(&own),
                local_budget: rx_budget(&own),
                rx_queue: QueueKind::Memory,
                copies_because,
            },
            groups: Groups::new(iface, home).map_err(|e| os("cannot make an epoll set", e))?,
            receiver: Receiver::new(addresses, &own, role),
            paths: Paths::new(iface, home, addresses, own, segments_max),
            addresses: addresses.clone(),
            options,
            staging: Staging::new(ring_bytes),
            scratch: SendScratch::new(),
            blocked: None,
            epoll,
            tx: TxStats::default(),
            link,
            offload,
        })
    }

    /// Shares its addresses with other processes from now on, as the `nth` port of its device.
    ///
    /// # Errors
    /// No descriptor left, or a shared object that is none of ours.
    pub(crate) fn share(
        &mut self,
        addresses: Arc<dyn SharedAddresses>,
        nth: usize,
    ) -> Result<(), OpenError> {
        let neighbours = Neighbours::new(addresses, nth, &self.addresses, &self.epoll);
        self.neighbours = Some(neighbours.map_err(|e| {
            OpenError::os(Backend::Udp, "cannot read the neighbours' datagrams", e, "")
        })?);
        // What cannot be done yet is tried again with the chores.
        let _ = self.meet_neighbours();
        Ok(())
    }
}

/// The sockets of several ports.
pub(crate) struct Acquired {
    /// For each port, one for each own address.
    pub(crate) sockets: Vec<Vec<OwnedFd>>,
    /// The most datagrams that the kernel takes in one message.
    pub(crate) segments_max: u16,
}

impl Acquired {
    /// The sockets of each port.
    pub(crate) fn into_ports(self) -> impl Iterator<Item = Vec<OwnedFd>> {
        self.sockets.into_iter()
    }
}

/// The network namespace of a socket: see [`Socket::netns`].
pub(crate) fn namespace_of(socket: &OwnedFd) -> Option<u64> {
    let socket = socket.try_clone().ok()?;
    Socket::from(socket).netns()
}

/// The role of a guard of this interface: on loopback the port itself receives those datagrams.
fn guard_of(iface: &Interface, shards: Shards) -> Role {
    let Interface { index, mac, loopback, .. } = *iface;
    if loopback { Role::Shut } else { Role::Guard { iface: index, mac, shards } }
}

/// Opens the sockets of guards: see [`UdpPort::assemble_guard`].
pub(crate) fn acquire_guards(
    backend: Backend,
    iface: &Interface,
    addresses: &[IpAddr],
    config: &PortConfig,
    shards: Shards,
    shared: Option<SharedSockets>,
) -> Result<Acquired, OpenError> {
    acquire(iface, addresses, config, guard_of(iface, shards), shards, shared)
        .map_err(|e| OpenError { backend, ..e })
}

fn acquire(
    iface: &Interface,
    addresses: &[IpAddr],
    config: &PortConfig,
    role: Role,
    shards: Shards,
    shared: Option<SharedSockets>,
) -> Result<Acquired, OpenError> {
    let Some(&first) = addresses.first() else {
        return Err(OpenError::plain(
            Backend::Udp,
            format!("{} has no address", iface.name),
            format!("give it one: `ip address add ADDRESS/PREFIX dev {}`", iface.name),
        ));
    };
    let options = Options::new(config, domain_of(iface));
    let mut sockets: Vec<Vec<OwnedFd>> = (0..shards.count).map(|_| Vec::new()).collect();
    let mut shared = shared.map(Vec::into_iter);
    for &address in addresses {
        let opened = match &mut shared {
            Some(shared) => taken_over(shared.next().unwrap_or_default(), address, options, role)
                .map_err(|e| {
                OpenError::os(Backend::Udp, "cannot take the sockets over", e, "")
            })?,
            None => sockets::open_own(iface, address, options, role, shards)?,
        };
        sockets.iter_mut().zip(opened).for_each(|(own, socket)| own.push(socket.into()));
    }
    let segments_max =
        if config.no_segmentation { 1 } else { sockets::segments_max(iface, first, options) };
    Ok(Acquired { sockets, segments_max })
}

/// Sockets of this process among those that processes share, with its options.
fn taken_over(
    own: Vec<OwnedFd>,
    address: IpAddr,
    options: Options,
    role: Role,
) -> io::Result<Vec<Socket>> {
    let own: Vec<Socket> = own.into_iter().map(Socket::from).collect();
    own.iter().try_for_each(|socket| sockets::take_over(socket, address, options, role))?;
    Ok(own)
}

impl UdpPort {
    /// Reads the sockets that this process inherits from neighbours.
    fn meet_neighbours(&mut self) -> io::Result<()> {
        let Self { neighbours: Some(neighbours), epoll, options, .. } = self else {
            return Ok(());
        };
        neighbours.inherit(epoll, |socket, address| sockets::inherit(socket, address, *options))
    }

    /// Whether datagrams of a path wait for the kernel.
    pub(crate) fn holds(&self, path: PathId) -> bool {
        self.staging.holds(path)
    }
}

impl Port for UdpPort {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn addresses(&self) -> &[IpAddr] {
        &self.addresses
    }

    fn add_path(&mut self, spec: &PathSpec) -> io::Result<Path> {
        let path = self.paths.add(spec, self.options)?;
        self.receiver.path_added(spec.local, self.paths.loops(path.id));
        Ok(path)
    }

    fn remove_path(&mut self, path: PathId) {
        if let Some((local, loops)) = self.paths.remove(path) {
            self.receiver.path_removed(local, loops);
        }
        self.reclaim();
    }

    fn join(&mut self, group: IpAddr) -> io::Result<()> {
        self.groups.join(group, self.options, &self.epoll)
    }

    fn leave(&mut self, group: IpAddr) {
        self.groups.leave(group);
    }

    fn receive(
        &mut self,
        budget: usize,
        mut sink: impl FnMut(RxDatagram<'_>),
    ) -> io::Result<usize> {
        if self.link.as_ref().is_some_and(Link::is_gone) {
            return Err(Errno::NODEV.into());
        }
        let mut count = self.receiver.receive(self.paths.own_sockets(), budget, &mut sink)?;
        if let Some(neighbours) = &mut self.neighbours {
            count += neighbours.receive(budget.saturating_sub(count), &mut sink)?;
        }
        if self.groups.is_empty() {
            return Ok(count);
        }
        Ok(count + self.groups.receive(budget.saturating_sub(count), sink)?)
    }

    #[inline]
    fn is_filled(&self, eighths: u32) -> bool {
        self.receiver.is_filled(self.paths.own_sockets(), eighths)
    }

    fn runs(&self) -> PortRuns {
        let TxStats { runs, apart, datagrams, bytes, .. } = self.tx;
        PortRuns {
            arrived: Some(self.receiver.runs()),
            departed: Some(Runs { runs: runs + apart, datagrams, bytes }),
        }
    }

    fn reserve(&mut self, path: PathId, len: usize) -> Option<TxSlot<'_>> {
        let entry = self.paths.get(path)?;
        let (buf, index) = self.staging.reserve(path, len, entry.segments_max, entry.ring())?;
        Some(TxSlot { buf, ip_id: if entry.v6 { 0 } else { index } })
    }

    fn commit(&mut self) {
        self.staging.commit();
    }

    fn flush(&mut self, failed: impl FnMut(TxFailure)) {
        self.flush_staged(failed);
    }

    fn wants_write(&self) -> bool {
        !self.staging.is_empty()
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    fn watch(&mut self, _: bool) -> io::Result<()> {
        Ok(())
    }

    fn maintain(&mut self) -> Option<Duration> {
        // The kernel handles routes, neighbours and other changes of the link.
        let socket = self.paths.socket(0);
        let has_changed = self.link.as_mut().is_some_and(|link| link.look(socket));
        if let Some(offload) = &mut self.offload {
            offload.maintain(socket, has_changed);
        }
        if self.link.as_ref().is_some_and(Link::is_gone) {
            // The next look for datagrams ends the port's life.
            return Some(Duration::ZERO);
        }
        // A thread that was woken and found nothing calls this.
        self.receiver.look();
        if let Some(neighbours) = &mut self.neighbours {
            neighbours.look();
        }
        let met = self.meet_neighbours().err().map(|_| Duration::from_secs(1));
        let rings = match self.staging.is_empty() {
            true => {
                let (freed, again) = self.staging.rings.maintain(Instant::now());
                if freed {
                    self.paths.forget_rings();
                }
                again
            }
            // Rings are looked at when they are done.
            false => Some(Duration::from_secs(1)),
        };
        met.into_iter().chain(rings).min()
    }

    fn stats(&self) -> PortStats {
        let mut stats = PortStats {
            tx_datagrams: self.tx.datagrams,
            tx_bytes: self.tx.bytes,
            tx_runs: self.tx.runs,
            tx_failed: self.tx.failed,
            tx_blocked: self.tx.blocked,
            tx_by_reference: self.tx.by_reference,
            ..self.receiver.stats(self.paths.own_sockets())
        };
        self.groups.add_stats(&mut stats);
        if let Some(neighbours) = &self.neighbours {
            neighbours.add_stats(&mut stats);
        }
        stats
    }
}

/// Capacity of the smallest receive queue, less an eighth for datagrams outside the peers' budgets
/// (pure acknowledgements, unknown senders, the kernel's own rounding).
fn rx_budget(own: &[Socket]) -> RxBudget {
    let bytes = own
        .iter()
        .filter_map(|s| s.get(libc::SOL_SOCKET, libc::SO_RCVBUF).ok())
        .filter_map(|bytes| u32::try_from(bytes).ok())
        .min()
        .unwrap_or(0);
    let bytes = bytes - bytes / 8;
    RxBudget { bytes, datagrams: bytes / RxBudget::cost(0) }
}

#[cfg(test)]
mod tests;
