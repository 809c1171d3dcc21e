//! Addresses: binding, resolving, listening.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use crate::devices::Found;
use crate::plain::{ListenerId, NextHop, ServiceId};

use super::devices::{Opened, toward, zone};
use super::event::{Kind, Param};
use super::id::{Earlier, Held, Id, Phase, ToListener};
use super::ports::Bound;
use super::words::{Address, SOCKADDR_IN6, errno};
use super::{Answer, Command, Outcome, Ucma};

/// Most requests that wait for the program, where it names no number (`ucma.c`, `max_backlog`).
const BACKLOG: u32 = 1024;
/// The most requests that the connection manager keeps for a listener that decides on them one
/// after the other: those that the program has read, too.
const PENDING: usize = 16_384;

impl Id {
    /// The service that its listener has.
    pub(super) fn service_of(&self, held: &Held) -> ServiceId {
        ServiceId::of_port(self.space, held.local.map_or(0, |local| local.port()))
    }
}

impl Held {
    fn earlier(&self) -> Earlier {
        let Self { local, found, opened, .. } = self;
        Earlier { local: *local, found: found.clone(), opened: opened.clone() }
    }

    /// Its port at this address, with its options.
    pub(super) fn bound(&self, id: &Id, address: SocketAddr) -> Bound {
        // As `rdma_bind_addr_dst` of `cma.c`.
        let one_family = self.one_family.unwrap_or_else(|| address.is_ipv4() || v6_alone());
        Bound { id: id.number, address, reuse: self.reuse, one_family }
    }
}

impl Command<'_> {
    pub(super) fn bind_ip(&self) -> Outcome<Answer> {
        let id = self.id(8 + SOCKADDR_IN6)?;
        self.bind_to(&id, self.body.address(8)?)
    }

    pub(super) fn bind(&self) -> Outcome<Answer> {
        let id = self.id(0)?;
        self.bind_to(&id, self.body.address(8)?)
    }

    fn bind_to(&self, id: &Arc<Id>, address: Address) -> Outcome<Answer> {
        let mut held = id.held.lock();
        if address == (Address::Ib { is_any: true }) && matches!(held.phase, Phase::Idle) {
            // librdmacm asks so whether such addresses are known. There are none.
            held.phase = Phase::Bound;
            return Ok(Answer::default());
        }
        self.bind_held(id, &mut held, address.ip()?)?;
        Ok(Answer::default())
    }

    fn bind_held(&self, id: &Id, held: &mut Held, address: SocketAddr) -> Outcome<()> {
        if !matches!(held.phase, Phase::Idle) {
            return Err(libc::EINVAL);
        }
        // An id of loopback has no device until it resolves an address or listens, as in `cma.c`:
        // libfabric takes an id without one for those of all devices.
        let has_none = address.ip().is_unspecified() || address.ip().is_loopback();
        let near = match address.ip() {
            // As `cma_check_linklocal`.
            _ if zone(address) == Some(0) => return Err(libc::EINVAL),
            ip if ip.is_unspecified() => self.it.devices.all().unwrap_or_default(),
            ip if ip.is_loopback() => self.it.devices.of(address).into_iter().collect(),
            _ => vec![self.it.devices.of(address)?],
        };
        // Other processes see a port on devices that are open. One that cannot be opened says so
        // when the id connects or listens.
        let opened: Vec<_> =
            near.iter().filter_map(|found| self.it.open_device(found, false).ok()).collect();
        self.bind_port(id, held, address)?;
        if !has_none {
            (held.found, held.opened) = (near.into_iter().next(), opened.into_iter().next());
        }
        Ok(())
    }

    /// Binds the port on devices that are open.
    fn bind_port(&self, id: &Id, held: &mut Held, address: SocketAddr) -> Outcome<()> {
        let bound = held.bound(id, address);
        held.local = Some(self.it.ports.lock().bind(id.space, bound)?);
        (held.has_port, held.one_family, held.phase) = (true, Some(bound.one_family), Phase::Bound);
        Ok(())
    }

    pub(super) fn resolve_ip(&self) -> Outcome<Answer> {
        let id = self.id(2 * SOCKADDR_IN6)?;
        let ends = (self.body.address(0)?, self.body.address(SOCKADDR_IN6)?);
        self.resolve(&id, ends, self.body.u32(2 * SOCKADDR_IN6 + 4))
    }

    pub(super) fn resolve_addr(&self) -> Outcome<Answer> {
        let id = self.id(0)?;
        let local = if self.body.u16(8) == 0 { Address::None } else { self.body.address(16)? };
        self.resolve(&id, (local, self.body.address(16 + 128)?), self.body.u32(4))
    }

    fn resolve(
        &self,
        id: &Arc<Id>,
        (local, peer): (Address, Address),
        patience_ms: u32,
    ) -> Outcome<Answer> {
        let peer = peer.ip()?;
        let mut held = id.held.lock();
        let is_idle = matches!(held.phase, Phase::Idle);
        let local = match (is_idle, local) {
            (true, Address::None) if peer.is_ipv4() => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
            (true, Address::None) => SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
            (true, local) => local.ip()?,
            (false, _) => held.local.ok_or(libc::EINVAL)?,
        };
        if local.is_ipv4() != peer.is_ipv4() || !is_idle && !matches!(held.phase, Phase::Bound) {
            return Err(libc::EINVAL);
        }
        // As `rdma_resolve_ip`: later failures come as an event.
        let (from, to) = toward(Some(local), peer)?;
        let found = self.it.devices.of(from);
        let near = found.as_ref().ok().and_then(|found| self.it.open_device(found, false).ok());
        match is_idle {
            // Its port is one of the address where the way begins.
            true if local.ip().is_unspecified() => self.bind_port(id, &mut held, local)?,
            true => self.bind_held(id, &mut held, local)?,
            false => {}
        }
        match found {
            Ok(found) => {
                let earlier = held.earlier();
                let local = with_port(from, held.local.unwrap_or(local).port());
                if held.has_port {
                    // Of a wildcard: it has the port where its way begins alone.
                    let _ = self.it.ports.lock().change(id.space, &held.bound(id, local));
                }
                (held.local, held.peer) = (Some(local), Some(with_port(to, peer.port())));
                held.opened = held.opened.take().or(near);
                held.found = Some(found);
                // A failed query of the kernel's neighbours is no reason to wait.
                let hop = NextHop::of(from.ip(), to).unwrap_or(None);
                held.phase = Phase::AddrQuery(earlier);
                let patience = Duration::from_millis(patience_ms.into());
                if !hop.is_some_and(|hop| self.it.resolving.add(self.it, id, (hop, patience))) {
                    held.phase = Phase::AddrResolved;
                    id.tell(Kind::AddrResolved, 0, Param::default());
                }
            }
            Err(errno) => {
                held.peer = Some(peer);
                let errno = if errno == libc::EADDRNOTAVAIL { libc::ENODEV } else { errno };
                id.tell(Kind::AddrError, -errno, Param::default());
            }
        }
        Ok(Answer::default())
    }

    pub(super) fn resolve_route(&self) -> Outcome<Answer> {
        let id = self.id(0)?;
        let mut held = id.held.lock();
        if !matches!(held.phase, Phase::AddrResolved) {
            return Err(libc::EINVAL);
        }
        held.phase = Phase::RouteResolved;
        id.tell(Kind::RouteResolved, 0, Param::default());
        Ok(Answer::default())
    }

    pub(super) fn listen(&self) -> Outcome<Answer> {
        let id = self.id(0)?;
        let mut held = id.held.lock();
        if matches!(held.phase, Phase::Idle) {
            self.bind_held(&id, &mut held, SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0))?;
        }
        let (Phase::Bound, Some(local)) = (&held.phase, held.local) else {
            return Err(libc::EINVAL);
        };
        self.it.ports.lock().listen(id.space, &held.bound(&id, local))?;
        held.reuse = false;
        let backlog = match self.body.u32(4) {
            given @ 1..BACKLOG => given,
            _ => BACKLOG,
        };
        id.facts.lock().backlog = backlog as usize;
        let Some(at) = Listens::of(&id, &held) else { return Err(libc::EINVAL) };
        let devices = if at.is_wildcard() {
            self.it.follow()?;
            self.it.devices.all()?
        } else {
            vec![self.it.devices.of(local)?]
        };
        let (mut places, mut failed) = (Vec::new(), None);
        for found in devices {
            match self.it.listen_at(&id, at, &found) {
                Ok(place) => places.push(place),
                Err(why) => failed = Some(why),
            }
        }
        // A wildcard is for all devices that can be opened. But a port has one listener.
        match failed {
            Some(why) if places.is_empty() || why == libc::EADDRINUSE => {
                for (opened, listener) in places {
                    opened.device.unlisten(listener, at.service);
                }
                return Err(why);
            }
            _ => held.phase = Phase::Listening(places),
        }
        Ok(Answer::default())
    }
}

/// The service and the address at which an id listens.
#[derive(Clone, Copy)]
pub(super) struct Listens {
    service: ServiceId,
    local: SocketAddr,
    /// The only one on each device; `None` for all.
    address: Option<IpAddr>,
}

impl Listens {
    /// `None` if it is at no address.
    pub(super) fn of(id: &Id, held: &Held) -> Option<Self> {
        let local = held.local?;
        let is_for_all = local.ip().is_unspecified() && held.one_family != Some(true);
        let address = Some(local.ip()).filter(|_| !is_for_all);
        Some(Self { service: id.service_of(held), local, address })
    }

    pub(super) fn is_wildcard(&self) -> bool {
        self.local.ip().is_unspecified()
    }
}

impl Ucma {
    /// Has an id listen on a device, which is opened for that.
    pub(super) fn listen_at(
        self: &Arc<Self>,
        id: &Arc<Id>,
        at: Listens,
        found: &Found,
    ) -> Outcome<(Arc<Opened>, ListenerId)> {
        let opened = self.open_device(found, true)?;
        let sink = ToListener {
            id: id.clone(),
            local: at.local,
            opened: Arc::downgrade(&opened),
            table: self.table.clone(),
        };
        let listener = opened.device.listen(at.service, (at.address, PENDING), Arc::new(sink));
        Ok((opened.clone(), listener.map_err(|error| errno(&error))?))
    }
}

/// Whether wildcards of IPv6 are not of IPv4, too, where the program does not say (`bindv6only`).
fn v6_alone() -> bool {
    std::fs::read_to_string("/proc/sys/net/ipv6/bindv6only").is_ok_and(|text| text.trim() == "1")
}

/// The address, its scope included, with another port.
fn with_port(mut address: SocketAddr, port: u16) -> SocketAddr {
    address.set_port(port);
    address
}
