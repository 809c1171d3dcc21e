//! Acquiring the parts of a port, with a hint for each possible error, and assembling them.

use std::any::Any;
use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd as _;

use super::ring::{PacketRing, RingGeometry};
use super::rx::Drops;
use super::staging::{FrameStaging, RunLimits, SEGMENTS_MAX};
use super::sys::{self, PacketSocket, SendScratch};
use super::trial::sends_super_packets;
use super::tx::Sender;
use super::{PacketIo, filter};
use crate::frames::{Acquire, Assembled, FRAMES_ARE_COPIED};
use crate::kernel::denied::{Capability, Needs};
use crate::kernel::descriptors::attach_filter;
use crate::kernel::ethtool::Segmentation;
use crate::kernel::interface::Interface;
use crate::kernel::rtnl::{Link, Rtnl};
use crate::port::config::{PortConfig, Shards};
use crate::port::contract::{Backend, Capabilities, QueueKind, RxBudget};
use crate::port::error::OpenError;
use crate::port::headers::{HEADERS_MAX, PAYLOAD_MAX, TUNNELS_MAX};
use crate::port::parts::{BackendParts, Fds, Manifest, Parts, SharedSockets};
use crate::port::steering;
use crate::udp;

/// Puts the payload of a received IPv4 datagram at a multiple of 64 bytes: the kernel puts the IP
/// header at 90 bytes (headers of the ring, of a link address and of virtio) plus this.
const RING_RESERVE: i32 = 10;

impl Acquire for PacketIo {
    const BACKEND: Backend = Backend::Packet;

    /// Opens a bound socket with a ring for each port, and its guard's sockets.
    fn acquire(
        iface: &Interface,
        addresses: &[IpAddr],
        config: &PortConfig,
        shards: Shards,
        shared: Option<SharedSockets>,
    ) -> Result<Vec<Parts>, OpenError> {
        let link = check(iface, addresses)?;
        // Before the guards, which need no privilege: the missing capability is the usual error.
        let program = filter::program(addresses, shards);
        let sockets = open_sockets(iface, config, shards, &program)?;
        let guards =
            udp::acquire_guards(Backend::Packet, iface, addresses, config, shards, shared)?;
        let layout = RingGeometry::new(config.packet.ring_frames, sys::page_bytes());
        bind(&sockets, iface, layout, shards)?;
        let manifest = manifest(iface, addresses, config, &link, layout, guards.segments_max);
        let all = sockets.into_iter().zip(guards.into_ports());
        let parts = all.map(|(socket, guard)| {
            Parts::new(manifest.clone(), std::iter::once(socket.into()).chain(guard).collect())
        });
        Ok(parts.collect())
    }

    /// Maps the ring of a socket.
    fn assemble(
        manifest: &Manifest,
        fds: &mut Fds,
        _: Option<Box<dyn Any + Send>>,
    ) -> Result<Assembled<Self>, OpenError> {
        let BackendParts::Packet { ring_frames, segments_max, run_bytes_max } = manifest.backend
        else {
            unreachable!("the port has checked the backend")
        };
        let socket = PacketSocket::from(fds.take());
        let layout = RingGeometry::new(ring_frames, sys::page_bytes());
        let ring = PacketRing::new(&socket, layout).map_err(no_ring)?;
        // Of another process they may be anything.
        let bytes = (run_bytes_max as usize).min(PAYLOAD_MAX);
        let limits = RunLimits { datagrams: segments_max.clamp(1, SEGMENTS_MAX), bytes };
        let iface = &manifest.interface;
        let segmentation = (limits.datagrams > 1)
            .then(|| Segmentation::new(socket.as_fd(), iface.index))
            .transpose()
            .map_err(|e| os("cannot open rtnetlink", e, ""))?;
        let mut sender = Sender::new(limits.datagrams > 1);
        sender.leaves_whole = segmentation.as_ref().is_some_and(|s| limits.are_taken_by(s));
        let capabilities = capabilities(iface, limits, ring.frames());
        let io = Self {
            ring,
            socket,
            limits,
            staging: FrameStaging::new(),
            sender,
            segmentation,
            scratch: SendScratch::new(),
            drops: Drops::default(),
        };
        Ok(Assembled { io, capabilities })
    }
}

/// Checks that ports can be opened; returns the interface's link.
pub(super) fn check(iface: &Interface, addresses: &[IpAddr]) -> Result<Link, OpenError> {
    check_addresses(iface, addresses)?;
    let link = link_of(iface)?;
    check_link(&link)?;
    Ok(link)
}

pub(super) fn link_of(iface: &Interface) -> Result<Link, OpenError> {
    Rtnl::open()
        .and_then(|mut rtnl| rtnl.link(iface.index))
        .map_err(|e| os(format!("cannot read {}", iface.name), e, "see `ip link`"))
}

/// Opens a socket for each port, with the filter `program`. They receive nothing yet.
pub(super) fn open_sockets(
    iface: &Interface,
    config: &PortConfig,
    shards: Shards,
    program: &[libc::sock_filter],
) -> Result<Vec<PacketSocket>, OpenError> {
    let open = |_| {
        let socket = open_socket(iface, config)?;
        attach_filter(socket.as_fd(), program).map_err(|e| os("cannot attach a filter", e, ""))?;
        Ok(socket)
    };
    (0..shards.count).map(open).collect()
}

/// Makes their rings, and lets them share received frames.
pub(super) fn bind(
    sockets: &[PacketSocket],
    iface: &Interface,
    layout: RingGeometry,
    shards: Shards,
) -> Result<(), OpenError> {
    let mut fanout = None;
    for socket in sockets {
        socket.make_ring(layout).map_err(no_ring)?;
        socket
            .bind(iface.index)
            .map_err(|e| os(format!("cannot bind to {}", iface.name), e, "see `ip link`"))?;
        if shards.count > 1 {
            let joined = socket.join_fanout(fanout, &steering::by_frame(shards));
            fanout = Some(joined.map_err(|e| os("cannot share received frames", e, ""))?);
        }
    }
    Ok(())
}

pub(super) fn manifest(
    iface: &Interface,
    addresses: &[IpAddr],
    config: &PortConfig,
    link: &Link,
    layout: RingGeometry,
    udp_segments_max: u16,
) -> Manifest {
    let limits = run_limits(link, config);
    let backend = BackendParts::Packet {
        ring_frames: layout.frames(),
        segments_max: limits.datagrams,
        run_bytes_max: limits.bytes as u32,
    };
    Manifest::new(iface, addresses, config, udp_segments_max, backend)
}

pub(super) fn no_ring(error: io::Error) -> OpenError {
    os("cannot make the receive ring", error, "fewer ring frames need less memory")
}

pub(super) fn os(what: impl Into<String>, error: io::Error, hint: impl Into<String>) -> OpenError {
    OpenError::os(Backend::Packet, what, error, hint)
}

fn plain(what: impl Into<String>, hint: impl Into<String>) -> OpenError {
    OpenError::plain(Backend::Packet, what, hint)
}

fn check_addresses(iface: &Interface, addresses: &[IpAddr]) -> Result<(), OpenError> {
    if addresses.is_empty() {
        return Err(plain(
            format!("{} has no address", iface.name),
            format!("give it one: `ip address add ADDRESS/PREFIX dev {}`", iface.name),
        ));
    }
    match addresses.iter().find(|address| !iface.has(**address)) {
        None => Ok(()),
        Some(address) => Err(plain(
            format!("{address} is not an address of {}", iface.name),
            format!("see `ip address show dev {}`", iface.name),
        )),
    }
}

fn check_link(link: &Link) -> Result<(), OpenError> {
    if !link.ethernet {
        return Err(plain(
            format!("{} is not an Ethernet interface", link.name),
            "use --netdev udp",
        ));
    }
    if !link.up {
        return Err(plain(
            format!("{} is down or has no carrier", link.name),
            format!("`ip link set {} up`, at both ends of a veth", link.name),
        ));
    }
    Ok(())
}

/// The rights that a packet socket needs.
const NEEDS: Needs =
    Needs { call: "sockets of AF_PACKET", capabilities: &[Capability::NetRaw], of_the_host: false };

fn open_socket(iface: &Interface, config: &PortConfig) -> Result<PacketSocket, OpenError> {
    let socket = PacketSocket::new().map_err(|e| {
        let hint = match e.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => format!("{}, or --netdev udp", NEEDS.explain()),
            _ => "use --netdev udp".to_owned(),
        };
        os(format!("cannot open a packet socket on {}", iface.name), e, hint)
    })?;
    let options = [
        (libc::PACKET_VERSION, libc::tpacket_versions::TPACKET_V2 as i32, "PACKET_VERSION"),
        (libc::PACKET_VNET_HDR, 1, "PACKET_VNET_HDR"),
        (libc::PACKET_RESERVE, RING_RESERVE, "PACKET_RESERVE"),
        (libc::PACKET_IGNORE_OUTGOING, 1, "PACKET_IGNORE_OUTGOING"),
    ];
    for (option, value, name) in options {
        socket
            .set(libc::SOL_PACKET, option, value)
            .map_err(|e| os(format!("cannot set {name}"), e, "use --netdev udp"))?;
    }
    sends_super_packets(&socket)?;
    let bytes = i32::try_from(config.tx_buffer_bytes).unwrap_or(i32::MAX);
    let forced =
        config.force_buffers && socket.set(libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, bytes).is_ok();
    if !forced {
        socket
            .set(libc::SOL_SOCKET, libc::SO_SNDBUF, bytes)
            .map_err(|e| os("cannot set SO_SNDBUF", e, ""))?;
    }
    Ok(socket)
}

/// A super-packet with its headers must stay below the device's limit; otherwise the kernel
/// segments it. It leaves room for tunnels. A single datagram may be as long as the link carries,
/// regardless of these limits.
fn run_limits(link: &Link, config: &PortConfig) -> RunLimits {
    let frame_max = (link.gso_bytes_max as usize).min(65_535 - TUNNELS_MAX);
    let datagrams = if config.no_segmentation {
        1
    } else {
        SEGMENTS_MAX.min(u16::try_from(link.gso_segs_max).unwrap_or(SEGMENTS_MAX)).max(1)
    };
    let below_limit = frame_max.saturating_sub(HEADERS_MAX + 1);
    let one_datagram = (link.mtu as usize).min(65_535 - HEADERS_MAX - 1);
    RunLimits { datagrams, bytes: below_limit.max(one_datagram) }
}

impl RunLimits {
    /// Whether the interface takes the longest run whole.
    pub(super) fn are_taken_by(self, segmentation: &Segmentation) -> bool {
        segmentation.takes(usize::from(self.datagrams), self.bytes + HEADERS_MAX)
    }
}

fn capabilities(iface: &Interface, limits: RunLimits, frames: u32) -> Capabilities {
    Capabilities {
        backend: Backend::Packet,
        link_mtu: iface.mtu,
        segments_max: limits.datagrams,
        run_bytes_max: limits.bytes as u32,
        ip_id_exact: true,
        tos_on_send: true,
        tos_on_receive: true,
        rx_budget: rx_budget(frames),
        local_budget: RxBudget { bytes: 0, datagrams: 0 },
        rx_queue: QueueKind::Places,
        copies_because: Some(FRAMES_ARE_COPIED.into()),
    }
}

/// Capacity of a ring of `frames`, less a quarter for frames that no peer's budget includes (pure
/// acknowledgements, unknown senders): each takes a whole slot. A slot holds a frame of any length,
/// so only their number counts.
fn rx_budget(frames: u32) -> RxBudget {
    let datagrams = frames - frames / 4;
    RxBudget { bytes: datagrams.saturating_mul(RxBudget::cost(u32::from(u16::MAX))), datagrams }
}
