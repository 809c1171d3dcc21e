//! The way of a port's datagrams, as the kernel's `flowi_oif` decides it for its own devices: out
//! of the port's interface, whichever interface the routing table prefers.

use std::io;
use std::net::IpAddr;

use super::route::is_no_route;
use super::{Link, Route, RouteKind, RouteQuery, Rtnl};
use crate::kernel::interface::Interface;

/// Where the datagrams of a port go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Way {
    /// To an address of this machine, of whichever interface: the kernel's loopback carries them.
    Own,
    /// Out of the port's interface.
    Port(Route),
    /// Where the kernel sends them: the interface itself carries nothing (loopback, `dummy`, a
    /// VRF), but may have the address that others reach this machine by.
    Any(Route),
}

impl Rtnl {
    /// The way of a datagram to `query.destination`; `query.interface` is set here. `domain` is the
    /// VRF of the interface ([`domain`](Self::domain)). Allocates only for an error's text. Error:
    /// as [`route`](Self::route); and `HostUnreachable` if the only route leads out of another
    /// interface.
    pub(crate) fn way(
        &mut self,
        iface: &Interface,
        domain: Option<u32>,
        query: RouteQuery,
    ) -> io::Result<Way> {
        let by_port = RouteQuery { interface: Some(iface.index), ..query };
        let found = |route: Route| match route.kind {
            RouteKind::Local if !iface.loopback => Way::Own,
            _ if iface.loopback => Way::Any(route),
            _ => Way::Port(route),
        };
        if needs_interface(query.destination) {
            return self.route(&by_port).map(found);
        }
        let any = self.route(&RouteQuery { interface: domain, ..query });
        if iface.loopback || any.as_ref().is_ok_and(|route| route.kind == RouteKind::Local) {
            return any.map(found);
        }
        let is_usual = any.as_ref().is_ok_and(|route| route.interface == iface.index);
        let by_port = match self.route_by(&by_port, is_usual) {
            Err(error) if is_no_route(&error) => None,
            by_port => by_port?,
        };
        by_port.map_or_else(|| self.not_by(iface, query.destination, any), |it| Ok(found(it)))
    }

    /// The route out of the query's interface. `None` if there is none.
    fn route_by(&mut self, by_port: &RouteQuery, is_usual: bool) -> io::Result<Option<Route>> {
        let route = self.route(by_port)?;
        if Some(route.interface) != by_port.interface {
            // For IPv6 with a source address the interface is a preference; without one it is a
            // condition.
            let strict = self.route(&RouteQuery { source: None, ..*by_port })?;
            return Ok(Some(strict).filter(|it| Some(it.interface) == by_port.interface));
        }
        // Without a route to an IPv4 address the kernel takes it for a neighbour.
        let is_known = is_usual
            || route.gateway.is_some()
            || by_port.destination.is_ipv6()
            || self.is_routed(by_port)?;
        Ok(is_known.then_some(route))
    }

    /// What there is instead of a way out of the port: `any` is the kernel's choice.
    fn not_by(
        &mut self,
        iface: &Interface,
        destination: IpAddr,
        any: io::Result<Route>,
    ) -> io::Result<Way> {
        let any = any?;
        let link = self.link(iface.index)?;
        if matches!(link.kind.as_deref(), Some("dummy" | "vrf")) {
            return Ok(Way::Any(any));
        }
        let why = if link.up {
            let other = self.link(any.interface).map_or_else(|_| String::new(), |it| it.name);
            format!(
                "{destination} is not reached through {0} but through {other}: open that one, or \
                 give {0} a route to it (`ip route add … dev {0}`)",
                iface.name
            )
        } else {
            format!("{destination} is not reached through {}, which is down", iface.name)
        };
        Err(io::Error::new(io::ErrorKind::HostUnreachable, why))
    }

    /// The VRF that an interface belongs to, or is: its addresses and routes are in the VRF's
    /// table, and only sockets bound to the VRF have them. Error: `ENODEV` if there is no such
    /// interface, or another error of the kernel.
    pub(crate) fn domain(&mut self, interface: u32) -> io::Result<Option<u32>> {
        let is_vrf = |link: &Link| link.kind.as_deref() == Some("vrf");
        let link = self.link(interface)?;
        if is_vrf(&link) {
            return Ok(Some(link.index));
        }
        let Some(master) = link.master else { return Ok(None) };
        Ok(Some(self.link(master)?).filter(is_vrf).map(|vrf| vrf.index))
    }
}

/// Whether a destination is ambiguous without an interface.
fn needs_interface(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(_) => false,
        IpAddr::V6(a) => a.is_unicast_link_local(),
    }
}
