//! Plain UDP sockets: no privilege, `UDP_SEGMENT` out, `UDP_GRO` in.
//!
//! Each own address has one socket on UDP/4791 that receives. Datagrams leave from a socket bound
//! to the path's source port, opened for the first path that needs it. All sockets are unconnected
//! and never fragment (`IP_PMTUDISC_DO`). Linux then writes IPv4 identification 0, and datagram *i*
//! of a super-packet gets *i* when it is segmented, so the sender knows what the ICRC must cover.
//! The receiver cannot read the identification; it is a hint
//! ([`RxIpId::Hint`](crate::RxIpId::Hint)).
//!
//! Each joined group has a socket of its own (`groups`), which shares UDP/4791 with those of other
//! programs on this machine.
//!
//! Datagrams to the port's own addresses go through the kernel's loopback like any other.

mod groups;
pub mod holder;
mod offload;
mod paths;
mod rx;
mod sockets;
mod staging;
mod sys;
mod tx;

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::time::Duration;

use crate::PortConfig;
use crate::error::OpenError;
use crate::fd::{Epoll, Interest};
use crate::iface::Interface;
use crate::port::{
    Backend, Capabilities, Path, PathId, PathSpec, Port, PortStats, Runs, RxBudget, RxDatagram,
    TxFailure, TxSlot,
};
use groups::Groups;
use offload::Offload;
use paths::Paths;
use rx::Receiver;
use sockets::{Home, Role};
use staging::{RUN_BYTES_MAX, Staging};
use sys::{SendScratch, Socket};

/// A port over UDP sockets.
///
/// While the port is [blocked](Port::wants_write), [`wait_fd`](Port::wait_fd) also becomes readable
/// when the kernel takes more: no need to wait for `POLLOUT`.
pub struct UdpPort {
    capabilities: Capabilities,
    addresses: Vec<IpAddr>,
    config: PortConfig,
    paths: Paths,
    receiver: Receiver,
    groups: Groups,
    staging: Staging,
    scratch: SendScratch,
    /// The socket that the kernel takes no more from.
    blocked: Option<usize>,
    epoll: Epoll,
    tx: TxStats,
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
    failed: u64,
    blocked: u64,
}

impl UdpPort {
    /// Opens UDP/4791 on each of `addresses`, which are addresses of `iface` in GID order.
    ///
    /// # Errors
    /// No address, an address outside this network namespace, or an address with port 4791 in use;
    /// the hint then names the process that holds it, as far as `/proc` shows it.
    pub fn open(
        iface: &Interface,
        addresses: &[IpAddr],
        config: &PortConfig,
    ) -> Result<Self, OpenError> {
        Self::open_as(iface, addresses, config, Role::Receive)
    }

    /// Opens the companion of a port that reads frames elsewhere (`AF_PACKET`, `AF_XDP`).
    ///
    /// It owns UDP/4791 on each address, so that the kernel never answers "port unreachable" and no
    /// other process takes the port. It drops all input before it is queued: `receive` returns only
    /// datagrams to groups. Sending works as on a port from [`open`](Self::open), through the
    /// kernel's routing and neighbour resolution.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_guard(
        iface: &Interface,
        addresses: &[IpAddr],
        config: &PortConfig,
    ) -> Result<Self, OpenError> {
        Self::open_as(iface, addresses, config, Role::Guard)
    }

    /// Opens `count` ports that share the addresses. The port with number *n* gets the datagrams
    /// with *n* as the upper byte of the queue pair number in their transport header. The first
    /// port gets those for which there is no such port. Super-packets are not split: they follow
    /// their first datagram.
    ///
    /// # Errors
    /// As [`open`](Self::open); or the kernel does not let a classic BPF program select a socket
    /// (before Linux 4.5).
    pub fn open_shards(
        iface: &Interface,
        addresses: &[IpAddr],
        config: &PortConfig,
        count: usize,
    ) -> Result<Vec<Self>, OpenError> {
        Self::open_all(iface, addresses, config, Role::Receive, count)
    }

    /// As [`open_guard`](Self::open_guard), for `count` ports.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub(crate) fn open_guards(
        iface: &Interface,
        addresses: &[IpAddr],
        config: &PortConfig,
        count: usize,
    ) -> Result<Vec<Self>, OpenError> {
        Self::open_all(iface, addresses, config, Role::Guard, count)
    }

    fn open_as(
        iface: &Interface,
        addresses: &[IpAddr],
        config: &PortConfig,
        role: Role,
    ) -> Result<Self, OpenError> {
        let mut ports = Self::open_all(iface, addresses, config, role, 1)?;
        Ok(ports.pop().expect("one was asked for"))
    }

    fn open_all(
        iface: &Interface,
        addresses: &[IpAddr],
        config: &PortConfig,
        role: Role,
        count: usize,
    ) -> Result<Vec<Self>, OpenError> {
        let Some(&first) = addresses.first() else {
            return Err(OpenError::plain(
                Backend::Udp,
                format!("{} has no address", iface.name),
                format!("give it one: `ip address add ADDRESS/PREFIX dev {}`", iface.name),
            ));
        };
        let mut own: Vec<Vec<Socket>> = (0..count).map(|_| Vec::new()).collect();
        for &address in addresses {
            let sockets = sockets::open_own(iface, address, config, role, count)?;
            own.iter_mut().zip(sockets).for_each(|(own, socket)| own.push(socket));
        }
        let segments_max =
            if config.no_segmentation { 1 } else { sockets::segments_max(iface, first) };
        own.into_iter()
            .map(|own| Self::over(own, iface, addresses, config, role, segments_max))
            .collect()
    }

    fn over(
        own: Vec<Socket>,
        iface: &Interface,
        addresses: &[IpAddr],
        config: &PortConfig,
        role: Role,
        segments_max: u16,
    ) -> Result<Self, OpenError> {
        let os = |what: &str, e| OpenError::os(Backend::Udp, what, e, "");
        let epoll = Epoll::new().map_err(|e| os("cannot make an epoll set", e))?;
        if role == Role::Receive {
            for socket in &own {
                epoll
                    .add(socket.as_fd(), Interest::Read)
                    .map_err(|e| os("cannot wait for a UDP socket", e))?;
            }
        }
        let home = Home::of(&own[0]);
        let counts = role == Role::Receive && segments_max > 1;
        let offload = counts.then(|| Offload::open(&own[0], iface.index).ok()).flatten();
        Ok(Self {
            capabilities: Capabilities {
                backend: Backend::Udp,
                link_mtu: iface.mtu,
                segments_max,
                run_bytes_max: RUN_BYTES_MAX as u32,
                ip_id_exact: false,
                tos_on_send: true,
                tos_on_receive: true,
                rx_budget: rx_budget(&own),
            },
            groups: Groups::new(iface, home).map_err(|e| os("cannot make an epoll set", e))?,
            receiver: Receiver::new(addresses, role == Role::Receive),
            paths: Paths::new(iface, home, addresses, own, segments_max),
            addresses: addresses.to_vec(),
            config: config.clone(),
            staging: Staging::new(),
            scratch: SendScratch::new(),
            blocked: None,
            epoll,
            tx: TxStats::default(),
            offload,
        })
    }
}

impl UdpPort {
    /// Whether datagrams of a path wait for the kernel.
    pub(crate) fn holds(&self, path: PathId) -> bool {
        self.staging.waiting().iter().any(|run| run.path == path)
    }

    /// Whether the port has joined groups.
    pub(crate) fn has_groups(&self) -> bool {
        !self.groups.is_empty()
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
        let path = self.paths.add(spec, &self.config)?;
        self.receiver.path_added(spec.local);
        Ok(path)
    }

    fn remove_path(&mut self, path: PathId) {
        if let Some(local) = self.paths.remove(path) {
            self.receiver.path_removed(local);
        }
        if self.staging.is_empty() {
            self.paths.reclaim();
        }
    }

    fn join(&mut self, group: IpAddr) -> io::Result<()> {
        self.groups.join(group, &self.config, &self.epoll)
    }

    fn leave(&mut self, group: IpAddr) {
        self.groups.leave(group);
    }

    fn receive(
        &mut self,
        budget: usize,
        mut sink: impl FnMut(RxDatagram<'_>),
    ) -> io::Result<usize> {
        let count = self.receiver.receive(self.paths.own_sockets(), budget, &mut sink)?;
        if self.groups.is_empty() {
            return Ok(count);
        }
        Ok(count + self.groups.receive(budget.saturating_sub(count), sink)?)
    }

    fn arrived(&self) -> Option<Runs> {
        Some(self.receiver.runs())
    }

    fn departed(&self) -> Option<Runs> {
        let TxStats { runs, apart, datagrams, bytes, .. } = self.tx;
        Some(Runs { runs: runs + apart, datagrams, bytes })
    }

    fn reserve(&mut self, path: PathId, len: usize) -> Option<TxSlot<'_>> {
        let entry = self.paths.get(path)?;
        let (buf, index) = self.staging.reserve(path, len, entry.segments_max)?;
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
        if let Some(offload) = &mut self.offload {
            offload.maintain(self.paths.socket(0));
        }
        None
    }

    fn stats(&self) -> PortStats {
        let mut stats = PortStats {
            tx_datagrams: self.tx.datagrams,
            tx_bytes: self.tx.bytes,
            tx_runs: self.tx.runs,
            tx_failed: self.tx.failed,
            tx_blocked: self.tx.blocked,
            ..self.receiver.stats(self.paths.own_sockets())
        };
        self.groups.add_stats(&mut stats);
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

/// Parses the control messages of a datagram.
#[cfg(feature = "fuzzing")]
pub(crate) fn try_control(bytes: &[u8]) {
    sys::try_control(bytes);
}

#[cfg(test)]
mod tests;
