//! The neighbour that packets to a peer leave for, asked of the kernel as it resolves it for its
//! own connections.

use std::io;
use std::net::{IpAddr, SocketAddr, SocketAddrV6, UdpSocket};
use std::os::fd::OwnedFd;

use super::sys::Socket;
use crate::kernel::interface::Interface;
use crate::kernel::rtnl::{Link, NeighbourStatus, RouteQuery, Rtnl, Way};

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
    /// resolved: its Ethernet address is known, the peer is this machine or a group, or the link
    /// has no neighbours.
    ///
    /// # Errors
    /// The kernel knows no route, or tells nothing of its routes to this process.
    pub fn of(from: IpAddr, to: SocketAddr) -> io::Result<Option<Self>> {
        let mut rtnl = Rtnl::open()?;
        let zone = match to {
            SocketAddr::V6(it) if it.ip().is_unicast_link_local() => Some(it.scope_id()),
            _ => None,
        };
        if to.ip().is_multicast() {
            return Ok(None);
        }
        let is_own = |it: &&Interface| it.has(from) && zone.is_none_or(|zone| zone == it.index);
        let all = rtnl.interfaces()?;
        let own = Interface::nearest(all.iter().filter(is_own), |it| it);
        let Some(own) = own else { return Ok(None) };
        let domain = rtnl.domain(own.index)?;
        let query = RouteQuery {
            destination: to.ip(),
            source: Some(from),
            interface: None,
            tos: 0,
            src_port: 0,
        };
        let Way::Port(route) = rtnl.way(own, domain, query)? else { return Ok(None) };
        let (interface, address) = (route.interface, route.gateway.unwrap_or(to.ip()));
        let has_neighbours = |link: &Link| link.index == interface && link.has_neighbours;
        if is_known(&mut rtnl, interface, address)? || !rtnl.links()?.iter().any(has_neighbours) {
            return Ok(None);
        }
        let toward = connected(from, to, zone, domain.unwrap_or(interface))?;
        Ok(Some(Self { rtnl, interface, address, toward }))
    }

    /// Whether the neighbour's Ethernet address is known.
    ///
    /// # Errors
    /// Any error of the kernel.
    pub fn is_known(&mut self) -> io::Result<bool> {
        is_known(&mut self.rtnl, self.interface, self.address)
    }

    /// Has the kernel resolve it, without waiting for the answer. A process without rights can do
    /// so only by sending something: an empty datagram to the port that discards (RFC 863).
    pub fn resolve(&mut self) {
        if self.rtnl.solicit(self.interface, self.address).is_err() {
            // An error is of an earlier datagram, or means that this neighbour is not there.
            let _ = self.toward.send(&[]);
        }
    }
}

fn is_known(rtnl: &mut Rtnl, interface: u32, address: IpAddr) -> io::Result<bool> {
    let found = rtnl.neighbour(interface, address)?;
    Ok(found.is_some_and(|it| it.status != NeighbourStatus::Unresolved))
}

/// A socket that sends to the peer by this interface, or this VRF.
fn connected(
    from: IpAddr,
    to: SocketAddr,
    zone: Option<u32>,
    interface: u32,
) -> io::Result<UdpSocket> {
    const DISCARD: u16 = 9;
    let own = match (from, zone) {
        (IpAddr::V6(from), Some(zone)) => SocketAddrV6::new(from, 0, 0, zone).into(),
        _ => SocketAddr::new(from, 0),
    };
    let mut to = to;
    to.set_port(DISCARD);
    let socket = Socket::new(from.is_ipv6())?;
    socket.bind_to_interface(interface)?;
    let socket = OwnedFd::from(socket);
    rustix::net::bind(&socket, &own)?;
    let socket = UdpSocket::from(socket);
    socket.connect(to)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::testing::testns::{Pair, as_user, or_skip};

    fn hop(from: &str, to: &str) -> Option<NextHop> {
        NextHop::of(from.parse().expect("ours"), to.parse().expect("a peer")).expect("a route")
    }

    /// Whether the neighbour is known, once the kernel was made to ask.
    fn answers(mut hop: NextHop, patience: Duration) -> bool {
        hop.resolve();
        let until = Instant::now() + patience;
        while !hop.is_known().expect("netlink") && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(2));
        }
        hop.is_known().expect("netlink")
    }

    #[test]
    fn a_process_without_rights_has_the_kernel_ask() {
        let pair = or_skip!(Pair::new());
        pair.a.sh("ip route add 192.0.2.0/24 via 10.9.0.2
                   ip link add d0 type veth peer name d1
                   ip link set d1 up
                   ip link set d0 arp off up
                   ip address add 10.8.0.1/24 dev d0");
        let unprivileged = || {
            as_user(65534, || {
                let (patience, short) = (Duration::from_secs(20), Duration::from_millis(50));
                let dead = hop("10.9.0.1", "10.9.0.77:1").expect("on the link");
                assert!(!answers(dead, short), "no machine has it");
                let gateway = hop("10.9.0.1", "192.0.2.9:1").expect("by the gateway");
                assert_eq!(gateway.address, IpAddr::from([10, 9, 0, 2]));
                assert!(answers(gateway, patience));
                // Hops known by now, this machine, and a link without neighbours.
                for (from, to) in [
                    ("10.9.0.1", "10.9.0.2:1"),
                    ("127.0.0.1", "127.0.0.1:1"),
                    ("10.9.0.1", "10.9.0.1:1"),
                    ("10.8.0.1", "10.8.0.2:1"),
                    ("10.9.0.1", "224.0.0.9:1"),
                ] {
                    assert!(hop(from, to).is_none(), "{to}");
                }
            })
        };
        pair.a.run(unprivileged).expect("another user");
    }
}
