//! The options of ports.

use serde::{Deserialize, Serialize};

/// How a port is opened: common options, and those of each backend. The defaults suit a program
/// that is alone on its interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortConfig {
    /// Requested send buffer of each socket in bytes, as given to `SO_SNDBUF`; 4 MiB by default.
    /// The kernel caps it at `net.core.wmem_max`.
    pub tx_buffer_bytes: u32,
    /// Whether to exceed `net.core.rmem_max` and `wmem_max` with `SO_*BUFFORCE` where the process
    /// is allowed to (`CAP_NET_ADMIN`). By default it does.
    pub force_buffers: bool,
    /// Use no segmentation offload even where there is one. By default it is used.
    pub no_segmentation: bool,
    /// Options of UDP sockets.
    pub udp: UdpConfig,
    /// Options of the backend `packet`.
    pub packet: PacketConfig,
    /// Options of the backend `afxdp`.
    pub xdp: XdpConfig,
}

impl Default for PortConfig {
    fn default() -> Self {
        Self {
            tx_buffer_bytes: 4 << 20,
            force_buffers: true,
            no_segmentation: false,
            udp: UdpConfig::default(),
            packet: PacketConfig::default(),
            xdp: XdpConfig::default(),
        }
    }
}

/// Options of UDP sockets that receive: all those of the backend `udp`, and those of multicast
/// groups on every backend.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UdpConfig {
    /// Requested receive buffer of each socket in bytes, as given to `SO_RCVBUF`; 4 MiB by default.
    /// The kernel caps it at `net.core.rmem_max`.
    pub rx_buffer_bytes: u32,
    /// The most memory for packets that leave by reference, in bytes; 16 MiB by default. A receive
    /// queue to which several super-packets at once are sent takes 4 MiB of it, until a second
    /// after the last; that time doubles whenever it is over. With less, the kernel copies all.
    pub ring_bytes: u32,
}

impl Default for UdpConfig {
    fn default() -> Self {
        Self { rx_buffer_bytes: 4 << 20, ring_bytes: 16 << 20 }
    }
}

/// Options of the backend `packet`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PacketConfig {
    /// Frames in the receive ring, 1 to 16,384; more than 15 are rounded up to whole blocks of 15.
    /// Each has 68 KiB of the kernel's memory, for a super-packet. 256 by default; beside ports of
    /// other processes on an address each doubling of the ports halves that, to no fewer than 64.
    /// Another number is taken as it is.
    pub ring_frames: u32,
}

impl Default for PacketConfig {
    fn default() -> Self {
        Self { ring_frames: 256 }
    }
}

/// Options of the backend `afxdp`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct XdpConfig {
    /// Chunks of 4096 bytes for each direction, 64 to 32,768; 256 by default. Rounded up to a power
    /// of two, and down to what `RLIMIT_MEMLOCK` allows. A frame of more than 3840 bytes takes two.
    pub ring_frames: u32,
    /// The receive queue that a single port binds to; 0 by default. Several ports bind to the first
    /// queues, one each.
    pub queue: u32,
    /// The interface steers all of UDP/4791 to `queue` (`ethtool -N`); for several ports, to the
    /// queues that they read. Then the port opens although the interface has other queues, which it
    /// does not read. By default it does not open.
    pub steered: bool,
}

impl Default for XdpConfig {
    fn default() -> Self {
        Self { ring_frames: 256, queue: 0, steered: false }
    }
}

/// How the ports of one device share received datagrams.
///
/// One byte of each datagram says which port it is for: the first port has the value `first`, the
/// next one the next value. The kernel reads that byte where the backend lets it. The first port
/// gets the datagrams for which there is no port, and those too short for the byte. Ports on
/// `afxdp` read one receive queue of the interface each, and the interface does not know that byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shards {
    /// The value of the byte for the first port.
    pub first: u8,
    /// The number of ports, 1 to 256.
    pub count: usize,
    /// Offset of that byte in the UDP payload.
    pub selector: u16,
    /// Whether other ports have the other values of the byte. Then the first port gets its own
    /// datagrams only.
    pub shared: bool,
}

impl Shards {
    /// The byte of RoCEv2: the upper one of the destination QPN in the BTH. Processes that share an
    /// address have to agree on it.
    pub const SELECTOR: u16 = 5;

    /// A single port, which gets everything.
    pub const ONE: Self = Self { first: 0, count: 1, selector: Self::SELECTOR, shared: false };
}
