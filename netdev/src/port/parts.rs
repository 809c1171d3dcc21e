//! A port in two steps, since the first may be an agent's.
//!
//! *Acquiring* takes everything that may need a privilege: sockets with their options, rings, the
//! XDP program. *Assembling* makes the port of these [`Parts`]. It needs no privilege, so a process
//! without capabilities can do it with descriptors that an agent sent. Its thread must be in the
//! network namespace in which the parts were acquired.
//!
//! A port without privileges differs from another in little:
//! - The kernel resolves the neighbour of a new path when it is first sent to, not before
//!   (`NTF_USE` needs `CAP_NET_ADMIN`). Until then datagrams leave through the guard.
//! - Sockets made later, to send from other source ports and for groups, have buffers up to
//!   `net.core.wmem_max` and `rmem_max`.
//! - Netfilter rules about the owner of a socket see the user that acquired it.

use std::any::Any;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::kernel::inherited;
use crate::kernel::interface::Interface;
use crate::port::config::PortConfig;
use crate::port::contract::Backend;
use crate::port::error::OpenError;

/// The parts from which a port is assembled: descriptors, and plain values about them.
#[derive(Debug)]
pub struct Parts {
    pub(crate) manifest: Manifest,
    /// The backend's own, then the UDP socket of each address.
    pub(crate) fds: Vec<OwnedFd>,
    /// The backend's memory, if this process mapped it to acquire the parts.
    pub(crate) mapped: Option<Box<dyn Any + Send>>,
    /// Stays open as long as the port: its end says that all other descriptors are closed.
    pub(crate) lease: Option<Arc<OwnedFd>>,
}

/// The plain values of [`Parts`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    /// The interface, as it was when the parts were acquired.
    pub interface: Interface,
    /// The port's own addresses, in GID order.
    pub addresses: Vec<IpAddr>,
    /// The configuration, for sockets that the port makes later.
    pub config: PortConfig,
    /// The most datagrams that the kernel takes in one message to a UDP socket.
    pub udp_segments_max: u16,
    /// The values of the backend.
    pub backend: BackendParts,
}

/// The plain values of one backend's parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackendParts {
    /// `udp`: there are none.
    Udp,
    /// `packet`.
    Packet {
        /// Frames in the receive ring.
        ring_frames: u32,
        /// The most datagrams of a super-packet.
        segments_max: u16,
        /// The most UDP payload bytes of a super-packet.
        run_bytes_max: u32,
    },
    /// `afxdp`.
    Xdp {
        /// The receive queue that the socket is bound to.
        queue: u32,
        /// Chunks of 4096 bytes for each direction. Each ring has twice that number of entries.
        chunks: u32,
        /// Whether the driver works on the shared memory without copying.
        zero_copy: bool,
    },
}

impl Manifest {
    pub(crate) fn new(
        interface: &Interface,
        addresses: &[IpAddr],
        config: &PortConfig,
        udp_segments_max: u16,
        backend: BackendParts,
    ) -> Self {
        let (interface, addresses) = (interface.clone(), addresses.to_vec());
        Self { interface, addresses, config: config.clone(), udp_segments_max, backend }
    }

    /// The backend.
    #[must_use]
    pub fn backend(&self) -> Backend {
        match self.backend {
            BackendParts::Udp => Backend::Udp,
            BackendParts::Packet { .. } => Backend::Packet,
            BackendParts::Xdp { .. } => Backend::Xdp,
        }
    }
}

impl Parts {
    pub(crate) fn new(manifest: Manifest, fds: Vec<OwnedFd>) -> Self {
        Self { manifest, fds, mapped: None, lease: None }
    }

    /// The plain values.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// An error unless these are parts for `backend`.
    pub(crate) fn check_backend(&self, backend: Backend) -> Result<(), OpenError> {
        let is = self.manifest.backend();
        if is == backend {
            return Ok(());
        }
        Err(OpenError::plain(backend, format!("the parts are those of {is}"), "assemble that port"))
    }
}

/// The UDP sockets of this process on addresses that other processes share: for each address, one
/// for each port.
pub type SharedSockets = Vec<Vec<OwnedFd>>;

/// The descriptors of parts, in their order.
pub struct Fds(std::vec::IntoIter<OwnedFd>);

impl Fds {
    pub(crate) fn new(fds: Vec<OwnedFd>) -> Self {
        // They may be another process's.
        let fds: Vec<OwnedFd> = fds.into_iter().map(inherited::noted).collect();
        Self(fds.into_iter())
    }

    /// The next one. The manifest's number of descriptors has been checked.
    pub(crate) fn take(&mut self) -> OwnedFd {
        self.0.next().expect("checked when the parts were made")
    }

    /// All that are left: those of UDP sockets.
    pub(crate) fn rest(self) -> impl Iterator<Item = OwnedFd> {
        self.0
    }
}
