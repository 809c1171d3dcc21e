//! Frames in, frames out: the ways a RoCEv2 datagram reaches the kernel and comes back.
//!
//! Nothing here knows of a queue pair. See [`port`] for the contract that every backend keeps.

pub mod any;
pub mod auto;
pub mod error;
pub mod fd;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
#[cfg(test)]
mod group_tests;
pub mod headers;
pub mod iface;
pub mod loopback;
pub mod packet;
pub mod policy;
pub mod port;
mod recent;
pub mod resolve;
pub mod rtnl;
pub mod sim;
#[cfg(test)]
mod testns;
pub mod udp;
pub mod xdp;

pub use any::AnyPort;
pub use error::OpenError;
pub use iface::Interface;
pub use port::{
    Backend, Capabilities, Path, PathId, PathSpec, Port, PortStats, ROCE_PORT, RxBudget,
    RxDatagram, RxIpId, TxFailure, TxSlot,
};

/// How a port is opened. The defaults suit a program that is alone on its interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortConfig {
    /// Wanted receive buffer of a socket in bytes, as given to `SO_RCVBUF` (the kernel caps it at
    /// `net.core.rmem_max`; `SO_RCVBUFFORCE` is tried first only if `force_buffers`).
    pub rx_buffer_bytes: u32,
    /// Wanted send buffer in bytes.
    pub tx_buffer_bytes: u32,
    /// Whether to exceed `rmem_max`/`wmem_max` with `SO_*BUFFORCE` where the process may.
    pub force_buffers: bool,
    /// Frames in the `AF_PACKET` ring and descriptors in the `AF_XDP` rings.
    pub ring_frames: u32,
    /// Whether `AF_XDP` may attach in generic (SKB) mode. Never implied: it is slow, and broken
    /// together with a sender that segments.
    pub xdp_generic: bool,
    /// The receive queue that `AF_XDP` binds to.
    pub xdp_queue: u32,
    /// The interface steers all of UDP/4791 to `xdp_queue` (`ethtool -N`), so that `AF_XDP` may be
    /// used although there are other queues, which it does not read.
    pub xdp_steered: bool,
    /// Take no segmentation offload even where there is one.
    pub no_segmentation: bool,
}

impl Default for PortConfig {
    fn default() -> Self {
        Self {
            rx_buffer_bytes: 4 << 20,
            tx_buffer_bytes: 4 << 20,
            force_buffers: true,
            ring_frames: 256,
            xdp_generic: false,
            xdp_queue: 0,
            xdp_steered: false,
            no_segmentation: false,
        }
    }
}
