//! The devices of addresses.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, UdpSocket};
use std::sync::Arc;

use parking_lot::Mutex;
use rocinante_netdev::{Backend, Interface};
use rocinante_soft::{BackendChoice, Wishes};
use rocinante_stack::types::Mtu;

use super::Outcome;
use super::removal::Watch;
use crate::convert::errno;
use crate::devices::{self, Found};
use crate::ffi::without_signals;
use crate::plain;

/// The port that a route is looked up for.
const ROCE: u16 = 4791;

/// An open device.
pub(super) struct Opened {
    pub(super) device: plain::Device,
    pub(super) found: Found,
}

impl Opened {
    /// The place of one of its addresses in the GID table.
    pub(super) fn gid_index(&self, address: IpAddr) -> Outcome<u8> {
        let table = self.device.gid_table();
        let index = table.iter().position(|gid| *gid == Some(address));
        index.and_then(|index| u8::try_from(index).ok()).ok_or(libc::EADDRNOTAVAIL)
    }

    /// An address at this device, or of a peer on its link: a link-local one has its interface as
    /// the scope.
    pub(super) fn scoped(&self, mut address: SocketAddr) -> SocketAddr {
        if let (Some(_), SocketAddr::V6(it)) = (zone(address), &mut address) {
            it.set_scope_id(self.found.interface.index);
        }
        address
    }

    /// The largest path MTU that its link takes.
    pub(super) fn mtu(&self) -> Mtu {
        self.found.mtu().min(self.device.mtu())
    }
}

/// A device that is open, and its watcher.
type Watched = (Arc<Opened>, Watch);

/// The devices that ids have opened. They stay open until the program closes its last file: one
/// that listens anew, again and again, finds them open.
#[derive(Default)]
pub(super) struct Devices {
    open: Mutex<HashMap<String, Watched>>,
    /// The devices that there are, if not all those of the machine. They send by sockets.
    only: Option<Vec<Found>>,
    /// For ids at wildcard addresses.
    arrivals: Mutex<Option<Watch>>,
}

impl Devices {
    /// For programs that must not reach every device of the machine.
    pub(super) fn only(these: Vec<Found>) -> Self {
        Self { only: Some(these), ..Self::default() }
    }

    /// All devices.
    pub(super) fn all(&self) -> Outcome<Vec<Found>> {
        if let Some(only) = &self.only {
            return Ok(only.clone());
        }
        devices::list().map_err(|error| error.raw_os_error().unwrap_or(libc::ENODEV))
    }

    /// The device that has an address; of a link-local one, that of its scope. Error:
    /// `EADDRNOTAVAIL`; `ENODEV` if the scope is no device.
    pub(super) fn of(&self, address: SocketAddr) -> Outcome<Found> {
        let zone = zone(address);
        let has = |found: &Found| {
            zone.is_none_or(|zone| zone == found.interface.index)
                && found.interface.addresses.iter().any(|(it, _)| *it == address.ip())
        };
        let all = self.all()?;
        if zone.is_some_and(|zone| all.iter().all(|found| found.interface.index != zone)) {
            return Err(libc::ENODEV);
        }
        Interface::nearest(all.into_iter().filter(has), |found| &found.interface)
            .ok_or(libc::EADDRNOTAVAIL)
    }

    /// Opens a device, unless it is open. `watch` begins to watch it.
    pub(super) fn open(
        &self,
        found: &Found,
        is_needed: bool,
        watch: impl FnOnce(&Arc<Opened>) -> std::io::Result<Watch>,
    ) -> Outcome<Arc<Opened>> {
        let mut open = self.open.lock();
        if let Some((opened, _)) = open.get(&found.name) {
            return Ok(opened.clone());
        }
        let device = without_signals(|| {
            let mut wishes = Wishes { refuses_late: true, uncounted: true, ..Wishes::default() };
            if self.only.is_some() {
                wishes.netdev = BackendChoice::Only(Backend::Udp);
            }
            let prepared = wishes.prepare_interface(&found.interface.name)?;
            prepared.events.take_places(&found.gids);
            prepared.open()
        });
        let device = device.map_err(|error| match is_needed {
            true => found.refused(&error),
            false => errno(&found.name, &error),
        });
        let device = plain::Device::new(device?);
        let opened = Arc::new(Opened { device, found: found.clone() });
        let watch = without_signals(|| watch(&opened));
        let watch = watch.map_err(|error| error.raw_os_error().unwrap_or(libc::EAGAIN))?;
        open.insert(found.name.clone(), (opened.clone(), watch));
        Ok(opened)
    }

    /// The device is gone: another of its name is opened anew.
    pub(super) fn forget(&self, device: &Arc<Opened>) {
        let mut open = self.open.lock();
        let gone: Vec<Watched> = open
            .extract_if(|_, (opened, _)| Arc::ptr_eq(opened, device))
            .map(|(_, watched)| watched)
            .collect();
        drop(open);
        drop(gone);
    }

    /// Begins to watch for devices that come, unless that is so.
    pub(super) fn follow(&self, watch: impl FnOnce() -> io::Result<Watch>) -> io::Result<()> {
        let mut arrivals = self.arrivals.lock();
        if arrivals.is_none() {
            *arrivals = Some(without_signals(watch)?);
        }
        Ok(())
    }

    /// Whether it watches for devices that come.
    pub(super) fn follows(&self) -> bool {
        self.arrivals.lock().is_some()
    }

    pub(super) fn close(&self) {
        let arrivals = self.arrivals.lock().take();
        drop(arrivals);
        let open = std::mem::take(&mut *self.open.lock());
        drop(open);
    }
}

/// The scope of a link-local address. Without it the address could be on any link.
pub(super) fn zone(address: SocketAddr) -> Option<u32> {
    match address {
        SocketAddr::V6(it) if it.ip().is_unicast_link_local() => Some(it.scope_id()),
        _ => None,
    }
}

/// Our address towards a peer, by the kernel's routes. A destination without an address is this
/// machine, as for connect(2). Error: the kernel's: there is no route.
pub(super) fn toward(
    local: Option<SocketAddr>,
    peer: SocketAddr,
) -> Outcome<(SocketAddr, SocketAddr)> {
    let failed = |error: std::io::Error| error.raw_os_error().unwrap_or(libc::EHOSTUNREACH);
    let any: IpAddr = match peer.is_ipv4() {
        true => Ipv4Addr::UNSPECIFIED.into(),
        false => Ipv6Addr::UNSPECIFIED.into(),
    };
    let from = local.filter(|local| !local.ip().is_unspecified());
    if let Some(from) = from
        && peer.ip().is_multicast()
    {
        return Ok((from, peer));
    }
    if let Some(from) = from.filter(|from| !from.ip().is_loopback()) {
        return by_device_of(from, peer);
    }
    let mut from = from.unwrap_or(SocketAddr::new(any, 0));
    from.set_port(0);
    let mut to = peer;
    to.set_port(ROCE);
    let socket = UdpSocket::bind(from).map_err(failed)?;
    socket.connect(to).map_err(failed)?;
    Ok((socket.local_addr().map_err(failed)?, socket.peer_addr().map_err(failed)?))
}

/// The way from an own address: by the interface that has it, as a device that is bound to one.
fn by_device_of(from: SocketAddr, peer: SocketAddr) -> Outcome<(SocketAddr, SocketAddr)> {
    let failed = |error: std::io::Error| error.raw_os_error().unwrap_or(libc::EHOSTUNREACH);
    let all = Interface::all().map_err(failed)?;
    let is_its =
        |it: &&Interface| it.has(from.ip()) && zone(from).is_none_or(|scope| scope == it.index);
    let own = Interface::nearest(all.iter().filter(is_its), |it| it).ok_or(libc::EADDRNOTAVAIL)?;
    // A peer of the link is on the link of the own address.
    if zone(peer).is_some_and(|scope| scope != 0 && scope != own.index) {
        return Err(libc::EINVAL);
    }
    let to = match peer.ip() {
        IpAddr::V4(to) if to.is_unspecified() => from.ip(),
        IpAddr::V6(to) if to.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        to => to,
    };
    own.reaches(from.ip(), to).map_err(failed)?;
    let on_link = |ip: IpAddr, port| match ip {
        IpAddr::V6(ip) if ip.is_unicast_link_local() => {
            SocketAddrV6::new(ip, port, 0, own.index).into()
        }
        ip => SocketAddr::new(ip, port),
    };
    Ok((on_link(from.ip(), 0), on_link(to, ROCE)))
}
