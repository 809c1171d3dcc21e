//! The contract between a backend and its driver.
//!
//! A [`Port`] moves RoCEv2 datagrams: the bytes from the BTH to the ICRC, which are the payload of
//! a UDP datagram to port 4791. The port owns the Ethernet, IP and UDP headers; it never reads the
//! payload. Because the ICRC covers fields of those headers, the port gives the IP identification
//! that a datagram will carry ([`TxSlot::ip_id`]) and its knowledge of a received one's
//! ([`RxIpId`]).
//!
//! Drive a port in bursts: `receive` until it returns 0, then `reserve`/`commit` for each datagram
//! to send, then one `flush`.

use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// The backend of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Backend {
    /// Plain UDP sockets with `UDP_SEGMENT` and `UDP_GRO`; needs no privilege.
    Udp,
    /// `AF_PACKET` with `PACKET_VNET_HDR` and a mapped receive ring; needs `CAP_NET_RAW`.
    Packet,
    /// `AF_XDP` with our own XDP program; needs `CAP_NET_RAW`,
    /// `CAP_NET_ADMIN` and `CAP_BPF`.
    Xdp,
    /// The seeded in-memory network.
    Sim,
}

impl Backend {
    /// The name used on the command line and in JSON: `udp`, `packet`, `afxdp`, `sim`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Udp => "udp",
            Self::Packet => "packet",
            Self::Xdp => "afxdp",
            Self::Sim => "sim",
        }
    }
}

impl std::fmt::Display for Backend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Backend {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "udp" => Ok(Self::Udp),
            "packet" => Ok(Self::Packet),
            "afxdp" | "xdp" => Ok(Self::Xdp),
            "sim" => Ok(Self::Sim),
            other => Err(format!("unknown netdev {other:?}: choose afxdp, packet or udp")),
        }
    }
}

/// Capabilities of a port; constant while it is open.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// The backend.
    pub backend: Backend,
    /// MTU of the link in bytes, IP header included.
    pub link_mtu: u32,
    /// The most datagrams one run (super-packet) may hold; 1 without segmentation offload.
    pub segments_max: u16,
    /// The most UDP payload bytes one run may hold.
    pub run_bytes_max: u32,
    /// Whether the IPv4 identification of a received datagram is read (`true`) or must be solved
    /// from the ICRC (`false`).
    pub ip_id_exact: bool,
    /// As `rx_budget`, of datagrams from the port's own addresses.
    pub local_budget: RxBudget,
    /// Whether each path sends with its own `PathSpec::tos`.
    pub tos_on_send: bool,
    /// Whether received datagrams carry their TOS byte.
    pub tos_on_receive: bool,
    /// Capacity of the receive queue.
    pub rx_budget: RxBudget,
    /// The resource that limits the receive queue.
    pub rx_queue: QueueKind,
    /// Why the kernel copies all super-packets that are sent; `None` if it takes pages of long ones
    /// by reference, where several are sent at once.
    pub copies_because: Option<String>,
}

/// The resource that limits a receive queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum QueueKind {
    /// Memory: the kernel charges the socket with the buffers of waiting datagrams. A super-packet
    /// costs little more than its bytes. Sockets of `udp`.
    Memory,
    /// Places, of which each takes a frame or a super-packet of any length. The ring of `packet`.
    Places,
    /// Frames: each takes a place, and super-packets do not arrive. The rings of `afxdp`.
    Frames,
}

/// Capacity of a receive queue: beyond it the queue drops. A peer that keeps its unacknowledged
/// packets within it cannot overrun the queue.
///
/// The cost of a datagram is [`RxBudget::cost`]; the sum of costs stays at or below `bytes`, and
/// the number of datagrams at or below `datagrams`, whether or not they arrive as super-packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RxBudget {
    /// Bytes of kernel memory (`truesize`), or of ring space.
    pub bytes: u32,
    /// Datagrams.
    pub datagrams: u32,
}

impl RxBudget {
    /// Upper bound of the kernel memory that one received datagram of `payload` UDP payload bytes
    /// occupies in a socket's queue (skb, shared info and a power-of-two data buffer).
    #[must_use]
    pub const fn cost(payload: u32) -> u32 {
        // An skb (256 bytes) and a slab bucket for headroom, headers, payload and shared info.
        // Measured on Linux 6.18 for IPv4 and IPv6 at SO_RCVBUF 212,992 (doubled by the kernel to
        // 425,984): 512, 332, 184, 97 and 50 datagrams of up to 184, 632, 1656, 3704 and 7800
        // bytes. The limits here are a little lower, for devices that want more headroom.
        match payload {
            0..=160 => 832,
            161..=608 => 256 + 1024,
            609..=1632 => 256 + 2048,
            1633..=3680 => 256 + 4096,
            3681..=7776 => 256 + 8192,
            _ => payload.saturating_mul(2).saturating_add(2048),
        }
    }
}

/// A destination: the fields that the port needs to write the headers of a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PathSpec {
    /// Source address; one of the port's own.
    pub local: IpAddr,
    /// Destination address, of the same family; it may be a multicast group's, joined or not.
    pub remote: IpAddr,
    /// Wanted UDP source port. A backend may use another: see [`Path::src_port`].
    pub src_port: u16,
    /// IPv4 TOS or IPv6 traffic class byte: DSCP in the upper six bits, ECN in the lower two.
    pub tos: u8,
    /// IPv4 TTL or IPv6 hop limit; 0 for that of the route when the path is added, which is the
    /// interface's or the namespace's if the route has none, and 1 for a group.
    pub ttl: u8,
    /// IPv6 flow label (20 bits); ignored for IPv4.
    pub flow_label: u32,
}

/// Index of a path in its port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PathId(pub u32);

impl PathId {
    /// No path: of a datagram committed to a path that is gone.
    pub(crate) const NONE: Self = Self(u32::MAX);
}

/// A registered path: its id and the source port that is really on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Path {
    /// Identifies the path in [`Port::reserve`].
    pub id: PathId,
    /// The UDP source port that its datagrams will carry.
    pub src_port: u16,
}

/// Room for one datagram: the UDP payload, from the BTH to the ICRC.
#[derive(Debug)]
pub struct TxSlot<'a> {
    /// Exactly as long as requested; its old content is arbitrary.
    pub buf: &'a mut [u8],
    /// The IPv4 identification that this datagram will carry on the wire (0 for IPv6). IPv4
    /// datagrams always go out with DF set, fragment offset 0 and no options.
    pub ip_id: u16,
}

/// Knowledge of the IPv4 identification of a received datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RxIpId {
    /// Read from the header, with the 16-bit flags-and-fragment-offset field.
    Exact {
        /// Identification.
        id: u16,
        /// Flags (DF is 0x4000) and fragment offset.
        flags: u16,
    },
    /// A guess: the position in a super-packet, or 0. The real value can be solved from the ICRC.
    Hint(u16),
    /// IPv6: there is none.
    None,
}

/// One received datagram; borrows the port's buffer.
#[derive(Debug, Clone, Copy)]
pub struct RxDatagram<'a> {
    /// The UDP payload, from the BTH to the ICRC.
    pub payload: &'a [u8],
    /// Source address.
    pub src: IpAddr,
    /// Destination address.
    pub dst: IpAddr,
    /// UDP source port.
    pub src_port: u16,
    /// The IPv4 identification as far as the port knows it.
    pub ip_id: RxIpId,
    /// TOS or traffic class byte, where the backend can read it.
    pub tos: Option<u8>,
}

/// A run that the kernel refused for good. Its datagrams are lost; the transport recovers them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TxFailure {
    /// The destination.
    pub path: PathId,
    /// Number of datagrams in the run.
    pub datagrams: u32,
    /// The kernel's errno: `EPERM` if a netfilter rule of the own namespace refused the
    /// packet, `ENOBUFS` if a queue was full, or another.
    pub errno: i32,
}

/// How datagrams left an interface, or arrived. The counters only grow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Runs {
    /// Super-packets, and datagrams that travelled alone.
    pub runs: u64,
    /// Datagrams.
    pub datagrams: u64,
    /// Their UDP payload in bytes.
    pub bytes: u64,
}

/// How the datagrams of a port travelled, since it was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PortRuns {
    /// How the datagrams that were read had arrived. `None` if super-packets do not arrive.
    pub arrived: Option<Runs>,
    /// How sent datagrams left the interface. `None` if each leaves alone. A super-packet counts as
    /// its datagrams if the kernel segments it before the interface, or if the port cannot tell.
    pub departed: Option<Runs>,
}

/// Counters of a port since it was opened. They only grow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PortStats {
    /// Datagrams handed up.
    pub rx_datagrams: u64,
    /// UDP payload bytes handed up.
    pub rx_bytes: u64,
    /// Super-packets or single datagrams read.
    pub rx_runs: u64,
    /// Frames dropped by the kernel because our queue was full, as the kernel counts them.
    pub rx_queue_drops: u64,
    /// Frames that were not whole UDP/4791 datagrams to one of our addresses.
    pub rx_malformed: u64,
    /// Datagrams the kernel took.
    pub tx_datagrams: u64,
    /// UDP payload bytes the kernel took.
    pub tx_bytes: u64,
    /// Super-packets or single datagrams the kernel took.
    pub tx_runs: u64,
    /// Datagrams in runs that the kernel refused for good.
    pub tx_failed: u64,
    /// How often a flush stopped because the kernel's queue was full.
    pub tx_blocked: u64,
    /// Datagrams sent through the guard UDP socket: to groups, to own addresses, or to an unknown
    /// neighbour.
    pub tx_unresolved: u64,
    /// Datagrams in super-packets whose pages the kernel took by reference.
    pub tx_by_reference: u64,
}

impl PortStats {
    /// Adds the counters of another port.
    pub fn add(&mut self, other: &Self) {
        self.rx_datagrams += other.rx_datagrams;
        self.rx_bytes += other.rx_bytes;
        self.rx_runs += other.rx_runs;
        self.rx_queue_drops += other.rx_queue_drops;
        self.rx_malformed += other.rx_malformed;
        self.tx_datagrams += other.tx_datagrams;
        self.tx_bytes += other.tx_bytes;
        self.tx_runs += other.tx_runs;
        self.tx_failed += other.tx_failed;
        self.tx_blocked += other.tx_blocked;
        self.tx_unresolved += other.tx_unresolved;
        self.tx_by_reference += other.tx_by_reference;
    }
}

/// Frames in, frames out.
///
/// A port belongs to one thread at a time and never blocks. It allocates only when it is opened and
/// when paths are added.
pub trait Port: Send {
    /// The capabilities of this port.
    fn capabilities(&self) -> &Capabilities;

    /// The port's own addresses, in GID order.
    fn addresses(&self) -> &[IpAddr];

    /// Registers a destination. The same spec may be registered more than once. If the calling
    /// thread is in another network namespace than the port was opened in, the path sends from
    /// UDP/4791, and a missing route may show only on sending. Error: no route, a local address
    /// that is not the port's, mixed families, or a socket that cannot be made.
    fn add_path(&mut self, spec: &PathSpec) -> std::io::Result<Path>;

    /// Removes a destination. Datagrams committed before still go out.
    fn remove_path(&mut self, path: PathId);

    /// Joins a multicast group at the port's interface. From now on the port receives datagrams to
    /// the group, with the group as their destination, including those that this machine sends.
    /// Joining the same group again does nothing. Error: an address that is not a group's, too many
    /// groups, no descriptor left, a program that has UDP/4791 exclusively, or a thread in another
    /// network namespace than the port was opened in.
    fn join(&mut self, group: IpAddr) -> std::io::Result<()>;

    /// Leaves a group. Datagrams that have arrived but were not read may still come.
    fn leave(&mut self, group: IpAddr);

    /// Reads received datagrams, up to about `budget` of them (a super-packet is never split), and
    /// hands each to `sink`. Returns their number, in which those that it drops may count: fewer
    /// than `budget` means that the queue was empty. Makes at most a handful of system calls per
    /// call, none per datagram. Error: only errors that end the port's life (the interface is
    /// gone); a peer cannot cause one.
    fn receive(
        &mut self,
        budget: usize,
        sink: impl FnMut(RxDatagram<'_>),
    ) -> std::io::Result<usize>
    where
        Self: Sized;

    /// Whether more than `eighths` eighths (0 to 7) of the receive queue are filled. Of `udp` that
    /// is known only between two calls of [`receive`](Self::receive) of which the first did not
    /// empty its queue, because it costs a system call. By default it is not known, and `false`.
    #[inline]
    fn is_filled(&self, _eighths: u32) -> bool {
        false
    }

    /// How datagrams arrived and left, since the port was opened. By default each travels alone.
    fn runs(&self) -> PortRuns {
        PortRuns::default()
    }

    /// Room for a datagram of `len` bytes of UDP payload to `path`. `None` if there is no room
    /// until the next [`flush`](Self::flush), or until the kernel drains its queue. The next call
    /// discards a slot that was not committed, but one with its path and length returns that slot
    /// again, with its content. Consecutive slots of one path and one length (the
    /// last may be shorter) leave as one run where the backend can segment.
    fn reserve(&mut self, path: PathId, len: usize) -> Option<TxSlot<'_>>;

    /// Accepts the last reserved slot; the caller has written all its bytes.
    fn commit(&mut self);

    /// Gives all committed datagrams to the kernel. Those that do not fit stay queued in the port,
    /// and [`wants_write`](Self::wants_write) turns true. Runs refused for good are reported to
    /// `failed`.
    fn flush(&mut self, failed: impl FnMut(TxFailure))
    where
        Self: Sized;

    /// Whether committed datagrams wait for the kernel. If so, also wait for `POLLOUT`.
    fn wants_write(&self) -> bool;

    /// The descriptor that becomes readable when `receive` has something to do.
    fn wait_fd(&self) -> BorrowedFd<'_>;

    /// Whether [`wait_fd`](Self::wait_fd) becomes readable for arriving datagrams; initially it
    /// does. With `false`, the kernel does not have to signal each frame. Error: no memory for an
    /// entry of the epoll set: then it does not become readable.
    fn watch(&mut self, on: bool) -> std::io::Result<()>;

    /// Chores off the fast path: neighbours, routes, changes of the interface. Call it in three
    /// cases: when [`wait_fd`](Self::wait_fd) was readable and there was nothing to receive,
    /// because that signals a change; about once a second while datagrams are sent; and after the
    /// time that it returns, in any case. A call with nothing to do costs a system call.
    fn maintain(&mut self) -> Option<Duration>;

    /// The counters.
    fn stats(&self) -> PortStats;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_counter_is_added_to_its_own() {
        let powers = |first| PortStats {
            rx_datagrams: first,
            rx_bytes: first << 1,
            rx_runs: first << 2,
            rx_queue_drops: first << 3,
            rx_malformed: first << 4,
            tx_datagrams: first << 5,
            tx_bytes: first << 6,
            tx_runs: first << 7,
            tx_failed: first << 8,
            tx_blocked: first << 9,
            tx_unresolved: first << 10,
            tx_by_reference: first << 11,
        };
        let mut sum = powers(1);
        sum.add(&powers(1 << 20));
        assert_eq!(sum, powers(1 | 1 << 20));
        sum.add(&PortStats::default());
        assert_eq!(sum, powers(1 | 1 << 20));
    }
}
