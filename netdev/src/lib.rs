//! Frames in, frames out: the ways a RoCEv2 datagram reaches the kernel and comes back.
//!
//! Nothing here keeps state of a queue pair. See [`port`] for the contract of every backend.

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
    /// Requested receive buffer of a socket in bytes, as given to `SO_RCVBUF`. The kernel caps it
    /// at `net.core.rmem_max`. `SO_RCVBUFFORCE` is tried first only if `force_buffers`.
    pub rx_buffer_bytes: u32,
    /// Requested send buffer in bytes.
    pub tx_buffer_bytes: u32,
    /// Whether to exceed `rmem_max`/`wmem_max` with `SO_*BUFFORCE` where the process is allowed to.
    pub force_buffers: bool,
    /// Frames in the `AF_PACKET` ring and descriptors in the `AF_XDP` rings.
    pub ring_frames: u32,
    /// Whether `AF_XDP` may attach in generic (SKB) mode. Never implied: that mode is slow, and
    /// broken together with a sender that segments.
    pub xdp_generic: bool,
    /// The receive queue that `AF_XDP` binds to. Several ports bind to the first queues, one each.
    pub xdp_queue: u32,
    /// The interface steers all of UDP/4791 to `xdp_queue` (`ethtool -N`); for several ports, to
    /// the queues that they read. `AF_XDP` may then be used although other queues exist, which it
    /// does not read.
    pub xdp_steered: bool,
    /// Run the driver's queue on the threads that use the device, for up to this many microseconds
    /// at a time, instead of in interrupts (`SO_PREFER_BUSY_POLL`). Needs `CAP_NET_ADMIN` and a
    /// driver with zero-copy `AF_XDP`. It only helps if the interface's `napi_defer_hard_irqs` and
    /// `gro_flush_timeout` defer its interrupts.
    pub xdp_busy_poll_us: Option<u32>,
    /// Use no segmentation offload even where there is one.
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
