//! Frames in, frames out: the ways a RoCEv2 datagram reaches the kernel and comes back.
//!
//! Nothing here knows of a queue pair. See [`port`] for the contract that every backend keeps.

pub mod any;
pub mod auto;
pub mod error;
mod ethtool;
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
#[cfg(test)]
mod path_tests;
pub mod policy;
pub mod port;
mod recent;
pub mod resolve;
pub mod rtnl;
#[cfg(test)]
mod scarcity_tests;
#[cfg(test)]
mod sides;
pub mod sim;
mod steering;
#[cfg(test)]
mod testns;
pub mod udp;
pub mod xdp;

pub use any::AnyPort;
pub use error::OpenError;
pub use iface::Interface;
pub use port::{
    Backend, Capabilities, Path, PathId, PathSpec, Port, PortStats, ROCE_PORT, Runs, RxBudget,
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
    /// The receive queue that `AF_XDP` binds to; several ports bind to the first ones, one each.
    pub xdp_queue: u32,
    /// The interface steers all of UDP/4791 to `xdp_queue` (`ethtool -N`), so that `AF_XDP` may be
    /// used although there are other queues, which it does not read; several ports' to the queues that they read.
    pub xdp_steered: bool,
    /// Run the driver's queue on the threads that use the device, for up to so many microseconds at a time, instead of in interrupts
    /// (`SO_PREFER_BUSY_POLL`): only where the driver has zero-copy `AF_XDP`, and only of use if the interface's `napi_defer_hard_irqs` and
    /// `gro_flush_timeout` put its interrupts off. Needs `CAP_NET_ADMIN`.
    pub xdp_busy_poll_us: Option<u32>,
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
            xdp_busy_poll_us: None,
            no_segmentation: false,
        }
    }
}
