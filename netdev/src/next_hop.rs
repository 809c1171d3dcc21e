//! The neighbour that packets to a peer leave for, asked of the kernel as it resolves it for its own
//! connections.

use std::io;
use std::net::{IpAddr, SocketAddr, SocketAddrV6, UdpSocket};

use crate::rtnl::{NeighbourStatus, RouteKind, RouteQuery, Rtnl};

/// A neighbour, on its link.
#[derive(Debug)]
pub struct NextHop {
    rtnl: Rtnl,
    interface: u32,
    address: IpAddr,
    /// A socket connected to the peer.
    toward: UdpSocket,
}

impl NextHop {
    /// The one by which packets from an address of ours reach a peer. `None` if nothing has to be
    /// resolved: the peer is this machine or a group, or the link has no neighbours.
    ///
    /// # Errors
    /// The kernel knows no route, or tells nothing of its routes to this process.
    pub fn of(from: IpAddr, to: SocketAddr) -> io::Result<Option<Self>> {
        let mut rtnl = Rtnl::open()?;
        let zone = match to {
            SocketAddr::V6(it) if it.ip().is_unicast_link_local() => Some(it.scope_id()),
            _ => None,
        };
        let route = rtnl.route(&RouteQuery {
            destination: to.ip(),
            source: Some(from),
            interface: zone,
            tos: 0,
            src_port: 0,
        })?;
        if to.ip().is_multicast() || route.kind != RouteKind::Unicast {
            return Ok(None);
        }
        let links = rtnl.links()?;
        if !links.iter().any(|link| link.index == route.interface && link.has_neighbours) {
            return Ok(None);
        }
        let (interface, address) = (route.interface, route.gateway.unwrap_or(to.ip()));
        Ok(Some(Self { rtnl, interface, address, toward: connected(from, to, zone)? }))
    }

    /// Whether the neighbour's Ethernet address is known.
    ///
    /// # Errors
    /// Any error of the kernel.
    pub fn is_known(&mut self) -> io::Result<bool> {
        let found = self.rtnl.neighbour(self.interface, self.address)?;
        Ok(found.is_some_and(|it| it.status != NeighbourStatus::Unresolved))
    }

    /// Has the kernel resolve it, without waiting for the answer. A process without rights can do so
    /// only by sending something: an empty datagram to the port that discards (RFC 863).
    pub fn resolve(&mut self) {
        if self.rtnl.solicit(self.interface, self.address).is_err() {
            // An error is of an earlier datagram, or means that this neighbour is not there.
            let _ = self.toward.send(&[]);
        }
    }
}

fn connected(from: IpAddr, to: SocketAddr, zone: Option<u32>) -> io::Result<UdpSocket> {
    const DISCARD: u16 = 9;
    let own = match (from, zone) {
        (IpAddr::V6(from), Some(zone)) => SocketAddrV6::new(from, 0, 0, zone).into(),
        _ => SocketAddr::new(from, 0),
    };
    let mut to = to;
    to.set_port(DISCARD);
    let socket = UdpSocket::bind(own)?;
    socket.connect(to)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}
