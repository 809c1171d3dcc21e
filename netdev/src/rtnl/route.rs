//! Route lookup: `RTM_GETROUTE` for one destination, as `ip route get` does it.

use std::io;
use std::net::IpAddr;

use netlink_packet_route::AddressFamily;
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteMessage, RouteMetric, RouteType, RouteVia,
};

use super::Rtnl;
use crate::port::ROCE_PORT;

const RTM_NEWROUTE: u16 = 24;
const RTM_GETROUTE: u16 = 26;

/// Which datagram is to be routed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouteQuery {
    /// Destination.
    pub destination: IpAddr,
    /// Source address, if it is chosen already; must be local.
    pub source: Option<IpAddr>,
    /// Output interface, where the route may not choose it: link-local and multicast destinations.
    /// With it, the kernel takes an IPv4 destination that no route covers for a direct neighbour.
    pub interface: Option<u32>,
    /// TOS or traffic class byte, for rules that look at it.
    pub tos: u8,
    /// UDP source port, for rules and multipath hashes that look at it.
    pub src_port: u16,
}

/// What kind of destination a route leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouteKind {
    /// A neighbour or a gateway.
    Unicast,
    /// An address of the own namespace.
    Local,
    /// A broadcast address.
    Broadcast,
    /// A group.
    Multicast,
}

/// Where a datagram leaves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// What kind of destination it is.
    pub kind: RouteKind,
    /// Index of the output interface.
    pub interface: u32,
    /// Next hop; `None` if the destination is on the link. May be IPv6 for an IPv4 destination.
    pub gateway: Option<IpAddr>,
    /// The source address that the kernel would choose.
    pub preferred_source: Option<IpAddr>,
    /// MTU of the route, where it is less than the interface's or was discovered.
    pub mtu: Option<u32>,
}

impl Rtnl {
    /// Asks where a UDP datagram to port 4791 would leave.
    ///
    /// # Errors
    /// `ENETUNREACH` or `EHOSTUNREACH` without a route, `EACCES` or `EINVAL` where a route or a rule
    /// forbids it, and `EINVAL` if the source address is not local.
    pub fn route(&mut self, query: &RouteQuery) -> io::Result<Route> {
        let found: Vec<RouteMessage> =
            self.ask(RTM_GETROUTE, RTM_NEWROUTE, false, &message_for(query))?;
        let message = found.first().ok_or_else(unreachable)?;
        route_from(message)
    }
}

fn unreachable() -> io::Error {
    io::Error::from_raw_os_error(libc::ENETUNREACH)
}

fn message_for(query: &RouteQuery) -> RouteMessage {
    let bits = if query.destination.is_ipv4() { 32 } else { 128 };
    let mut message = RouteMessage::default();
    message.header.address_family =
        if query.destination.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    message.header.destination_prefix_length = bits;
    // Routes and rules look at the DSCP only; the kernel refuses a lookup with ECN bits.
    message.header.tos = query.tos & 0xfc;
    let attributes = &mut message.attributes;
    attributes.push(RouteAttribute::Destination(query.destination.into()));
    if let Some(source) = query.source {
        message.header.source_prefix_length = bits;
        attributes.push(RouteAttribute::Source(source.into()));
    }
    if let Some(interface) = query.interface {
        attributes.push(RouteAttribute::Oif(interface));
    }
    attributes.push(RouteAttribute::IpProto(libc::IPPROTO_UDP as u8));
    attributes.push(RouteAttribute::Sport(query.src_port));
    attributes.push(RouteAttribute::Dport(ROCE_PORT));
    message
}

fn route_from(message: &RouteMessage) -> io::Result<Route> {
    let kind = match message.header.kind {
        RouteType::Unicast | RouteType::Anycast => RouteKind::Unicast,
        RouteType::Local => RouteKind::Local,
        RouteType::Broadcast => RouteKind::Broadcast,
        RouteType::Multicast => RouteKind::Multicast,
        RouteType::Prohibit => return Err(io::Error::from_raw_os_error(libc::EACCES)),
        RouteType::BlackHole => return Err(io::Error::from_raw_os_error(libc::EINVAL)),
        _ => return Err(unreachable()),
    };
    let mut route = Route { kind, interface: 0, gateway: None, preferred_source: None, mtu: None };
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Oif(index) => route.interface = *index,
            RouteAttribute::Gateway(address) => route.gateway = ip_from(address),
            RouteAttribute::Via(via) => route.gateway = via_from(via),
            RouteAttribute::PrefSource(address) => route.preferred_source = ip_from(address),
            RouteAttribute::Metrics(metrics) => route.mtu = mtu_of(metrics),
            _ => {}
        }
    }
    if route.interface == 0 {
        return Err(unreachable());
    }
    Ok(route)
}

fn ip_from(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(a) => Some((*a).into()),
        RouteAddress::Inet6(a) => Some((*a).into()),
        _ => None,
    }
}

fn via_from(via: &RouteVia) -> Option<IpAddr> {
    match via {
        RouteVia::Inet(a) => Some((*a).into()),
        RouteVia::Inet6(a) => Some((*a).into()),
        _ => None,
    }
}

fn mtu_of(metrics: &[RouteMetric]) -> Option<u32> {
    metrics.iter().find_map(|metric| match metric {
        RouteMetric::Mtu(mtu) => Some(*mtu),
        _ => None,
    })
}
