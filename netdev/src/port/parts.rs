//! A port in two steps, for programs whose privileged part is another process.
//!
//! *Acquiring* takes everything that may need a privilege: sockets with their options, rings, the
//! XDP program. *Assembling* makes the port of these [`Parts`]. It needs no privilege, so a process
//! without capabilities can do it with descriptors that it was sent (`SCM_RIGHTS` of unix(7)). That
//! process must be in the network namespace in which the parts were acquired, and the thread that
//! assembles, too.
//!
//! A port without privileges differs from another in little:
//! - The kernel resolves the neighbour of a new path when it is first sent to, not before
//!   (`NTF_USE` needs `CAP_NET_ADMIN`). Until then datagrams leave through the guard.
//! - Sockets made later, to send from other source ports and for groups, have buffers up to
//!   `net.core.wmem_max` and `rmem_max`.
//! - Netfilter rules about the owner of a socket see the user that acquired it.

#![allow(unsafe_code)]

use std::any::Any;
use std::net::IpAddr;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::kernel::descriptors::socket_family;
use crate::kernel::inherited;
use crate::kernel::interface::Interface;
use crate::port::config::PortConfig;
use crate::port::contract::Backend;
use crate::port::error::OpenError;

/// The parts from which a port is assembled: descriptors, and plain values about them.
#[derive(Debug)]
pub struct Parts {
    pub(crate) manifest: Manifest,
    /// In the order of [`Manifest::descriptors`].
    pub(crate) fds: Vec<OwnedFd>,
    /// The backend's memory, if this process mapped it to acquire the parts.
    pub(crate) mapped: Option<Box<dyn Any + Send>>,
    /// Stays open as long as the port: its end says that all other descriptors are closed.
    pub(crate) lease: Option<Arc<OwnedFd>>,
}

/// The plain values of [`Parts`]. They can be serialised.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
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

/// The kind of a descriptor of [`Parts`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Descriptor {
    /// A UDP socket on port 4791 of this address: of the backend `udp`, or of a guard.
    Udp(IpAddr),
    /// An `AF_PACKET` socket, bound, with its receive ring and its filter.
    Packet,
    /// An `AF_XDP` socket, bound, with its rings.
    Xdp,
    /// The memory of the `AF_XDP` socket (`memfd_create(2)`).
    Memory,
    /// The link of the XDP program: it stays attached while a process has this open.
    Program,
    /// The BPF map with the Ethernet address whose frames the program takes.
    Mac,
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

    /// The kinds of the descriptors, in their order.
    #[must_use]
    pub fn descriptors(&self) -> Vec<Descriptor> {
        use Descriptor::{Mac, Memory, Packet, Program, Udp, Xdp};
        let own: &[Descriptor] = match self.backend {
            BackendParts::Udp => &[],
            BackendParts::Packet { .. } => &[Packet],
            BackendParts::Xdp { .. } => &[Xdp, Memory, Program, Mac],
        };
        own.iter().copied().chain(self.addresses.iter().copied().map(Udp)).collect()
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

    /// The descriptors, each with its kind.
    pub fn descriptors(&self) -> impl Iterator<Item = (Descriptor, BorrowedFd<'_>)> {
        self.manifest.descriptors().into_iter().zip(self.fds.iter().map(OwnedFd::as_fd))
    }

    /// Parts that another process acquired: their plain values, and descriptors in the same order.
    ///
    /// # Safety
    /// The descriptors are those of one port, as the process that acquired them got them, and
    /// nothing else uses their memory: neither that process, nor another port of the same parts. So
    /// the sender must be trusted. The rings and the memory of frames are shared with every process
    /// that has these descriptors.
    ///
    /// # Errors
    /// No address, another number of descriptors than the manifest's, or a socket of
    /// another family.
    pub unsafe fn from_descriptors(
        manifest: Manifest,
        fds: Vec<OwnedFd>,
    ) -> Result<Self, OpenError> {
        let backend = manifest.backend();
        let refused = |what: String| {
            let hint = "send the descriptors in the order of the manifest";
            Err(OpenError::plain(backend, what, hint))
        };
        let wanted = manifest.descriptors();
        if manifest.addresses.is_empty() || fds.len() != wanted.len() {
            return refused(format!("{} descriptors, not {}", fds.len(), wanted.len()));
        }
        for (wanted, fd) in wanted.into_iter().zip(&fds) {
            let family = match wanted {
                Descriptor::Udp(IpAddr::V4(_)) => libc::AF_INET,
                Descriptor::Udp(IpAddr::V6(_)) => libc::AF_INET6,
                Descriptor::Packet => libc::AF_PACKET,
                Descriptor::Xdp => libc::AF_XDP,
                // The backend checks the memory and the map when it assembles the port. Another
                // descriptor in the place of the program's link does not keep it attached.
                Descriptor::Memory | Descriptor::Program | Descriptor::Mac => continue,
            };
            if socket_family(fd).ok() != Some(family) {
                return refused(format!("a descriptor is not of its kind, {wanted:?}"));
            }
        }
        Ok(Self::new(manifest, fds))
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
