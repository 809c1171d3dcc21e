//! Route lookup: `RTM_GETROUTE` for one destination, as `ip route get` does it.

use std::io;
use std::net::IpAddr;

use super::Rtnl;
use super::query::{Query, family, ip, word};
use super::socket::Attributes;
use crate::ROCE_PORT;

/// Length of `struct rtmsg` (linux/rtnetlink.h, as are those below).
const HEADER_LEN: usize = 12;
/// The answer is the route of the tables that matches, not the way that follows from it.
const RTM_F_FIB_MATCH: u32 = 0x2000;
const RTA_VIA: u16 = 18;
const RTA_IP_PROTO: u16 = 27;
const RTA_SPORT: u16 = 28;
const RTA_DPORT: u16 = 29;
const RTAX_MTU: u16 = 2;
const RTAX_HOPLIMIT: u16 = 10;

/// The datagram to route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RouteQuery {
    /// Destination.
    pub destination: IpAddr,
    /// Source address, if it is already chosen; must be local.
    pub source: Option<IpAddr>,
    /// Output interface, or VRF. With it, the kernel treats an IPv4 destination without a route as
    /// a direct neighbour.
    pub interface: Option<u32>,
    /// TOS or traffic class byte, for rules that match it.
    pub tos: u8,
    /// UDP source port, for rules and multipath hashes that use it.
    pub src_port: u16,
}

/// Kind of destination of a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RouteKind {
    /// A neighbour or a gateway.
    Unicast,
    /// An address of the own namespace.
    Local,
    /// A broadcast address.
    Broadcast,
    /// A group.
    Multicast,
}

/// The way of a datagram out of this namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Route {
    /// Kind of destination.
    pub kind: RouteKind,
    /// Index of the output interface.
    pub interface: u32,
    /// Next hop; `None` if the destination is on the link. May be IPv6 for an IPv4 destination.
    pub gateway: Option<IpAddr>,
    /// The source address that the kernel would choose.
    pub preferred_source: Option<IpAddr>,
    /// MTU of the route, if it is less than the interface's or was discovered.
    pub mtu: Option<u32>,
    /// TTL or hop limit of the route, if it has one.
    pub hop_limit: Option<u8>,
}

impl Rtnl {
    /// Asks where a UDP datagram to port 4791 would leave. Does not allocate. Error: `ENETUNREACH`
    /// or `EHOSTUNREACH` without a route, `EACCES` or `EINVAL` if a route or a rule forbids it, and
    /// `EINVAL` if the source address is not local.
    pub(crate) fn route(&mut self, query: &RouteQuery) -> io::Result<Route> {
        self.ask_one(libc::RTM_GETROUTE, libc::RTM_NEWROUTE, &message_for(query, 0), |message| {
            Some(route_from(message))
        })?
    }
}

impl Rtnl {
    /// Whether a route of the tables leads where [`route`](Self::route) says, so that the kernel
    /// has not taken the destination for a neighbour. Does not allocate. Error: as
    /// [`route`](Self::route), except that there is no such route.
    pub(crate) fn is_routed(&mut self, query: &RouteQuery) -> io::Result<bool> {
        let message = message_for(query, RTM_F_FIB_MATCH);
        let found = self.ask_one(libc::RTM_GETROUTE, libc::RTM_NEWROUTE, &message, |_| Some(true));
        found.or_else(|error| if is_no_route(&error) { Ok(false) } else { Err(error) })
    }
}

pub(super) fn is_no_route(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENETUNREACH | libc::EHOSTUNREACH))
}

fn unreachable() -> io::Error {
    io::Error::from_raw_os_error(libc::ENETUNREACH)
}

fn message_for(query: &RouteQuery, flags: u32) -> Query {
    let (family, bits) = family(query.destination);
    let source_bits = if query.source.is_some() { bits } else { 0 };
    let mut header = [0; HEADER_LEN];
    // Routes and rules match the DSCP only; the kernel refuses a lookup with ECN bits.
    header[..4].copy_from_slice(&[family, bits, source_bits, query.tos & 0xfc]);
    header[8..].copy_from_slice(&flags.to_ne_bytes());
    let mut message = Query::new(&header).address(libc::RTA_DST, query.destination);
    if let Some(source) = query.source {
        message = message.address(libc::RTA_SRC, source);
    }
    if let Some(interface) = query.interface {
        message = message.attribute(libc::RTA_OIF, &interface.to_ne_bytes());
    }
    message
        .attribute(RTA_IP_PROTO, &[libc::IPPROTO_UDP as u8])
        .attribute(RTA_SPORT, &query.src_port.to_be_bytes())
        .attribute(RTA_DPORT, &ROCE_PORT.to_be_bytes())
}

pub(super) fn route_from(message: &[u8]) -> io::Result<Route> {
    let Some((header, attributes)) = message.split_first_chunk::<HEADER_LEN>() else {
        return Err(io::Error::from(io::ErrorKind::InvalidData));
    };
    let kind = match header[7] {
        libc::RTN_UNICAST | libc::RTN_ANYCAST => RouteKind::Unicast,
        libc::RTN_LOCAL => RouteKind::Local,
        libc::RTN_BROADCAST => RouteKind::Broadcast,
        libc::RTN_MULTICAST => RouteKind::Multicast,
        libc::RTN_PROHIBIT => return Err(io::Error::from_raw_os_error(libc::EACCES)),
        libc::RTN_BLACKHOLE => return Err(io::Error::from_raw_os_error(libc::EINVAL)),
        _ => return Err(unreachable()),
    };
    let mut route = Route {
        kind,
        interface: 0,
        gateway: None,
        preferred_source: None,
        mtu: None,
        hop_limit: None,
    };
    for (kind, value) in Attributes(attributes) {
        match kind {
            libc::RTA_OIF => route.interface = word(value).unwrap_or(0),
            libc::RTA_GATEWAY => route.gateway = ip(value),
            // The address family comes first.
            RTA_VIA => route.gateway = value.get(2..).and_then(ip),
            libc::RTA_PREFSRC => route.preferred_source = ip(value),
            libc::RTA_METRICS => {
                route.mtu = metric(value, RTAX_MTU);
                let limit = metric(value, RTAX_HOPLIMIT).filter(|limit| *limit > 0);
                route.hop_limit = limit.and_then(|limit| u8::try_from(limit).ok());
            }
            _ => {}
        }
    }
    if route.interface == 0 {
        return Err(unreachable());
    }
    Ok(route)
}

fn metric(metrics: &[u8], wanted: u16) -> Option<u32> {
    Attributes(metrics).find(|(kind, _)| *kind == wanted).and_then(|(_, value)| word(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A `struct rtmsg` of this type, with these attributes.
    fn message(kind: u8, attributes: &[(u16, &[u8])]) -> Vec<u8> {
        let mut bytes = vec![0; HEADER_LEN];
        bytes[7] = kind;
        for (kind, value) in attributes {
            bytes.extend((value.len() as u16 + 4).to_ne_bytes());
            bytes.extend(kind.to_ne_bytes());
            bytes.extend(*value);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
        }
        bytes
    }

    #[test]
    fn only_types_that_lead_somewhere_are_routes() {
        for kind in 0..=u8::MAX {
            let found = route_from(&message(kind, &[(libc::RTA_OIF, &[7, 0, 0, 0])]));
            let expected = match kind {
                1 | 4 => Ok(RouteKind::Unicast), // and anycast
                2 => Ok(RouteKind::Local),
                3 => Ok(RouteKind::Broadcast),
                5 => Ok(RouteKind::Multicast),
                6 => Err(libc::EINVAL), // black hole
                8 => Err(libc::EACCES), // prohibited
                _ => Err(libc::ENETUNREACH),
            };
            let found = found.map(|route| route.kind);
            assert_eq!(found.map_err(|e| e.raw_os_error().unwrap_or(0)), expected, "{kind}");
        }
    }

    #[test]
    fn attributes_of_any_length_are_read_or_left() {
        let bytes = [9; 32];
        let oif = (libc::RTA_OIF, &[1, 0, 0, 0][..]);
        for length in 0..bytes.len() {
            let value = &bytes[..length];
            let alone = route_from(&message(1, &[(libc::RTA_OIF, value)]));
            assert_eq!(alone.is_ok(), length == 4, "an interface of {length} bytes");
            for (kind, before) in [(libc::RTA_GATEWAY, 0), (RTA_VIA, 2), (libc::RTA_PREFSRC, 0)] {
                let route = route_from(&message(1, &[oif, (kind, value)])).expect("a route");
                let address = [4, 16].contains(&length.wrapping_sub(before));
                let (gateway, source) = (route.gateway.is_some(), route.preferred_source.is_some());
                assert_eq!(gateway, address && kind != libc::RTA_PREFSRC, "{kind}: {length}");
                assert_eq!(source, address && kind == libc::RTA_PREFSRC, "{kind}: {length}");
            }
            let metrics = route_from(&message(1, &[oif, (libc::RTA_METRICS, value)]));
            let metrics = metrics.expect("a route");
            assert_eq!((metrics.mtu, metrics.hop_limit), (None, None));
        }
        for (limit, read) in [(0_u32, None), (1, Some(1)), (255, Some(255)), (256, None)] {
            let metric = [&[8, 0, 10, 0][..], &limit.to_ne_bytes()].concat();
            let route = route_from(&message(1, &[oif, (libc::RTA_METRICS, &metric)]));
            assert_eq!(route.expect("a route").hop_limit, read);
        }
        for mtu in [0, 1, u32::MAX] {
            let metric = [&[8, 0, 2, 0][..], &mtu.to_ne_bytes()].concat();
            let route = route_from(&message(1, &[oif, (libc::RTA_METRICS, &metric)]));
            assert_eq!(route.expect("a route").mtu, Some(mtu));
        }
    }
}
