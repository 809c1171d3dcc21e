//! Sockets that one process opens for another: both sides.

use std::net::IpAddr;
use std::os::fd::OwnedFd;

use super::ring::RingGeometry;
use super::sys::{self, Kept, PacketSocket};
use super::{filter, open};
use crate::handed::{Granted, Handed, Ring, unusable};
use crate::kernel::descriptors::socket_family;
use crate::kernel::interface::Interface;
use crate::port::config::{PortConfig, Shards};
use crate::port::contract::Backend;
use crate::port::error::OpenError;
use crate::port::parts::Parts;
use crate::udp;

/// Opens the sockets of the ports that another process makes, with locked filters. Their rings stay
/// as they are as long as the [`Kept`] live. Error: as those of opening the ports; `EPERM` without
/// `CAP_NET_RAW`.
pub(crate) fn open_for_another(
    iface: &Interface,
    addresses: &[IpAddr],
    config: &PortConfig,
    shards: Shards,
) -> Result<(Ring, Vec<OwnedFd>, Vec<Kept>), OpenError> {
    open::check(iface, addresses)?;
    let program = filter::program(addresses, shards);
    let sockets = open::open_sockets(iface, config, shards, &program)?;
    let layout = RingGeometry::new(config.packet.ring_frames, sys::page_bytes());
    open::bind(&sockets, iface, layout, shards)?;
    let lock = |socket: &PacketSocket| {
        // Forbids for ever, to any privilege, to replace or to remove the filter (socket(7)). The
        // lock comes last: it also forbids to set the program of the fan-out group.
        let locked = socket.set(libc::SOL_SOCKET, libc::SO_LOCK_FILTER, 1);
        locked.map_err(|e| open::os("cannot lock the filter", e, ""))?;
        socket.keep_ring(layout).map_err(open::no_ring)
    };
    let kept = sockets.iter().map(lock).collect::<Result<Vec<_>, _>>()?;
    Ok((layout.into(), sockets.into_iter().map(OwnedFd::from).collect(), kept))
}

/// Bytes of kernel memory of a ring with this number of frames.
pub(crate) fn ring_bytes(frames: u32) -> usize {
    RingGeometry::new(frames, sys::page_bytes()).kernel_bytes()
}

/// Keeps the ring of a socket that an earlier agent opened, by a copy of the descriptor. Error: it
/// is no packet socket, or its ring has another length.
pub fn keep_again(socket: OwnedFd, ring: Ring) -> std::io::Result<Kept> {
    let layout = RingGeometry::new(ring.frames, sys::page_bytes());
    if Ring::from(layout) != ring || socket_family(&socket)? != libc::AF_PACKET {
        return Err(std::io::ErrorKind::InvalidInput.into());
    }
    PacketSocket::from(socket).keep_ring(layout)
}

/// Makes parts of sockets that an agent opened for this process, and of guards of its own, which
/// are in this thread's network namespace. The sockets are compared with the request and with the
/// agent's description. Error: a descriptor is not as it should be; or no memory is left.
pub(crate) fn assemble_from(
    iface: &Interface,
    addresses: &[IpAddr],
    config: &PortConfig,
    Handed { granted, descriptors, lease }: Handed,
    guards: udp::Acquired,
) -> Result<Vec<Parts>, OpenError> {
    let refused = |what: &str| unusable(Backend::Packet, what);
    let Granted::Packet { ring } = granted else { return Err(refused("another backend")) };
    let layout = RingGeometry::new(ring.frames, sys::page_bytes());
    if Ring::from(layout) != ring {
        return Err(refused("a ring of another geometry"));
    }
    if descriptors.len() != guards.sockets.len() {
        return Err(refused("not one socket for each port"));
    }
    let sockets: Vec<PacketSocket> = descriptors.into_iter().map(PacketSocket::from).collect();
    let here = udp::namespace_of(&guards.sockets[0][0]);
    let groups = sockets.iter().map(|socket| check(socket, iface, here));
    let groups = groups.collect::<Result<Vec<_>, _>>().map_err(|what| refused(&what))?;
    if sockets.len() > 1 && groups.iter().any(|group| *group == 0 || *group != groups[0]) {
        return Err(refused("sockets that do not share received frames"));
    }
    let link = open::link_of(iface)?;
    let manifest = open::manifest(iface, addresses, config, &link, layout, guards.segments_max);
    let all = sockets.into_iter().zip(guards.into_ports());
    let parts = all.map(|(socket, guard)| Parts {
        manifest: manifest.clone(),
        fds: std::iter::once(socket.into()).chain(guard).collect(),
        mapped: None,
        lease: Some(lease.clone()),
    });
    Ok(parts.collect())
}

/// Checks a socket; returns its fan-out group, or 0. That its ring has the length of the geometry
/// shows when it is mapped.
fn check(socket: &PacketSocket, iface: &Interface, here: Option<u64>) -> Result<u32, String> {
    let version = libc::tpacket_versions::TPACKET_V2 as u32;
    if socket_family(socket).ok() != Some(libc::AF_PACKET) {
        return Err("a descriptor that is no packet socket".into());
    }
    let unknown = |e: std::io::Error| format!("a socket that does not answer ({e})");
    if here.is_some_and(|here| socket.namespace().ok() != Some(here)) {
        return Err("a socket of another network namespace than this thread's".into());
    }
    if socket.word(libc::SOL_SOCKET, libc::SO_TYPE).map_err(unknown)? != libc::SOCK_RAW as u32
        || socket.packet_option(libc::PACKET_VERSION).map_err(unknown)? != version
        || socket.packet_option(libc::PACKET_VNET_HDR).map_err(unknown)? != 1
    {
        return Err("a socket with other options".into());
    }
    if socket.bound_to().map_err(unknown)? != (iface.index, libc::ETH_P_ALL as u16) {
        return Err(format!("a socket that is not bound to {}", iface.name));
    }
    if socket.word(libc::SOL_SOCKET, libc::SO_LOCK_FILTER).map_err(unknown)? == 0 {
        return Err("a socket whose filter is not locked".into());
    }
    socket.packet_option(libc::PACKET_FANOUT).map_err(unknown)
}

impl From<RingGeometry> for Ring {
    fn from(layout: RingGeometry) -> Self {
        let RingGeometry { block_bytes, blocks, frame_bytes, .. } = layout;
        Self { block_bytes, blocks, frame_bytes, frames: layout.frames() }
    }
}
