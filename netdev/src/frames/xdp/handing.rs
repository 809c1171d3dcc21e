//! Sockets that one process opens for another: both sides.

use std::net::IpAddr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::time::Duration;

use super::mapping::is_memory_file;
use super::open::{Made, OnQueue, Opened, copy, open_sockets, ring_entries};
use super::socket::XdpSocket;
use super::umem::Umem;
use crate::handed::{Granted, Handed, unusable};
use crate::kernel::bpf::{interface_of, is_shared_word};
use crate::kernel::descriptors::socket_family;
use crate::kernel::interface::Interface;
use crate::port::config::{PortConfig, Shards};
use crate::port::contract::Backend;
use crate::port::error::OpenError;
use crate::port::parts::{BackendParts, Manifest, Parts};
use crate::tuning::xdp::{CHUNKS_MAX, CHUNKS_MIN};
use crate::udp;

/// Opens the sockets of the ports that another process makes. Returns the chunks of each for each
/// direction, and the descriptors, in the order of [`Granted::Xdp`]. Nothing else of the ports
/// stays with this process: neither a mapping nor a descriptor, and no process has the map of
/// addresses.
///
/// An object in use is not waited for. Error: as those of opening the ports; `EPERM` without the
/// capabilities.
pub(crate) fn open_for_another(
    iface: &Interface,
    addresses: &[IpAddr],
    config: &PortConfig,
    shards: Shards,
) -> Result<(u32, Vec<OwnedFd>), OpenError> {
    let Opened { sockets, link, mac } =
        open_sockets(iface, addresses, config, shards, Duration::ZERO)?;
    let chunks = sockets[0].made.chunks;
    if sockets.iter().any(|socket| socket.made.chunks != chunks) {
        let what = "the packet memory of each port cannot be locked";
        return Err(OpenError::plain(Backend::Xdp, what, "give the agent CAP_IPC_LOCK"));
    }
    let each = |OnQueue { made: Made { socket, memory, .. }, .. }| [socket.into(), memory];
    let mut descriptors: Vec<OwnedFd> = sockets.into_iter().flat_map(each).collect();
    descriptors.extend([link.into(), mac]);
    Ok((chunks, descriptors))
}

/// The greatest number of chunks for each direction that can be and is not above `frames`, or the
/// least.
pub(crate) fn chunks_within(frames: u32) -> u32 {
    1 << frames.clamp(CHUNKS_MIN, CHUNKS_MAX).ilog2()
}

/// Bytes of memory that a port with this number of chunks for each direction takes: the frames, the
/// four rings, and the kernel's record of each chunk.
pub(crate) fn memory_bytes(chunks: u32) -> usize {
    const PAGE: usize = 4096;
    /// `struct xdp_buff_xsk`, a pointer to it, and one to the page.
    const NOTES: usize = 160;
    let entries = ring_entries(chunks) as usize;
    let ring = |entry: usize| (entries * entry).next_multiple_of(PAGE) + PAGE;
    Umem::bytes(2 * chunks) + 2 * ring(8) + 2 * ring(16) + 2 * chunks as usize * NOTES
}

/// Makes parts of the descriptors that an agent opened for this process, and of guards of its own,
/// which are in this thread's network namespace. All is compared with the request and with the
/// agent's description, as far as the kernel reports: no option of an AF_XDP socket gives the
/// interface to which it is bound, nor its memory. Error: a descriptor is not as it should be; or
/// none is left.
pub(crate) fn assemble_from(
    iface: &Interface,
    addresses: &[IpAddr],
    config: &PortConfig,
    Handed { granted, descriptors, lease }: Handed,
    guards: udp::Acquired,
) -> Result<Vec<Parts>, OpenError> {
    let refused = |what: &str| unusable(Backend::Xdp, what);
    let Granted::Xdp { chunks } = granted else { return Err(refused("another backend")) };
    if chunks_within(chunks) != chunks {
        return Err(refused("a number of chunks that cannot be"));
    }
    let mut descriptors = descriptors.into_iter();
    let ports: Vec<(OwnedFd, OwnedFd)> = std::iter::from_fn(|| {
        (descriptors.len() > 2).then(|| Some((descriptors.next()?, descriptors.next()?)))?
    })
    .collect();
    let (Some(link), Some(mac)) = (descriptors.next(), descriptors.next()) else {
        return Err(refused("not all descriptors"));
    };
    if ports.len() != guards.sockets.len() {
        return Err(refused("not one socket for each port"));
    }
    let unknown = |e| refused(&format!("a descriptor that cannot be looked at ({e})"));
    if interface_of(link.as_fd()).map_err(unknown)? != Some(iface.index) {
        return Err(refused(&format!("no program of {}", iface.name)));
    }
    if !is_shared_word(mac.as_fd()).map_err(unknown)? {
        return Err(refused("no map of an Ethernet address"));
    }
    let here = udp::namespace_of(&guards.sockets[0][0]);
    let segments_max = guards.segments_max;
    let all = (0..).zip(ports).zip(guards.into_ports());
    let parts = all.map(|((queue, (socket, memory)), guard)| {
        check(&socket, here).map_err(|what| refused(&what))?;
        if !is_memory_file(memory.as_fd(), Umem::bytes(2 * chunks)) {
            return Err(refused("no memory of constant size for its chunks"));
        }
        let socket = XdpSocket::from(socket);
        check_rings(&socket, chunks).map_err(|what| refused(&what))?;
        let zero_copy = socket.zero_copy().unwrap_or(false);
        let mut fds = vec![socket.into(), memory, copy(link.as_fd())?, copy(mac.as_fd())?];
        fds.extend(guard);
        let backend = BackendParts::Xdp { queue, chunks, zero_copy };
        let manifest = Manifest::new(iface, addresses, config, segments_max, backend);
        Ok(Parts { lease: Some(lease.clone()), ..Parts::new(manifest, fds) })
    });
    parts.collect()
}

/// Checks a socket's family and namespace.
fn check(socket: &OwnedFd, here: Option<u64>) -> Result<(), String> {
    if socket_family(socket).ok() != Some(libc::AF_XDP) {
        return Err("a descriptor that is no AF_XDP socket".into());
    }
    if here.is_some_and(|here| udp::namespace_of(socket) != Some(here)) {
        return Err("a socket of another network namespace than this thread's".into());
    }
    Ok(())
}

/// Compares the rings with those that belong to `chunks` chunks, and asks whether they are in use.
fn check_rings(socket: &XdpSocket, chunks: u32) -> Result<(), String> {
    let unknown = |e: std::io::Error| format!("a socket that does not answer ({e})");
    if !socket.is_bound() {
        return Err("a socket that is not bound".into());
    }
    if !socket.has_rings_of(ring_entries(chunks)).map_err(unknown)? {
        return Err("rings of another size".into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_a_power_of_two_within_bounds() {
        for (frames, chunks) in [(0, 64), (64, 64), (127, 64), (128, 128), (300, 256)] {
            assert_eq!(chunks_within(frames), chunks);
        }
        assert_eq!(chunks_within(u32::MAX), CHUNKS_MAX);
    }
}
