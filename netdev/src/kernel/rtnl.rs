//! The kernel's interfaces, routes, neighbours and queueing disciplines.
//!
//! `Rtnl` asks over an rtnetlink socket (rtnetlink(7)): one request, one answer, blocking, with a
//! timeout. Use it to open a port, to add a path and for periodic chores, never on the fast path.
//! `Monitor` receives announcements of changes. Nothing here needs a privilege. The answers are
//! those of the network namespace of the thread that called `Rtnl::open`.

mod link;
mod monitor;
mod neighbour;
mod qdisc;
pub mod query;
mod requests;
mod route;
pub mod socket;
mod way;

pub(crate) use link::Link;
pub(crate) use monitor::{Change, Monitor};
pub(crate) use neighbour::{Neighbour, NeighbourStatus};
pub(crate) use qdisc::FilterHook;
pub use qdisc::{Queued, queues};
pub(crate) use requests::Rtnl;
pub(crate) use route::{Route, RouteKind, RouteQuery};
pub(crate) use way::Way;

/// Parses the payload of a message as each type it could be.
#[cfg(feature = "fuzzing")]
pub(crate) fn try_payload(payload: &[u8]) {
    let _ = (route::route_from(payload), neighbour::neighbour_from(payload));
    qdisc::try_payload(payload);
    monitor::hand_out(payload, &mut |change| {
        let _ = change.is_of_way_to([10, 0, 0, 1].into());
    });
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;
    use crate::kernel::interface::Interface;
    use crate::testing::testns::{Pair, needs, or_skip, wait_until};

    fn ip(address: &str) -> IpAddr {
        address.parse().expect("an address")
    }

    fn query(destination: &str) -> RouteQuery {
        RouteQuery {
            destination: ip(destination),
            source: None,
            interface: None,
            tos: 0x03,
            src_port: 0xc001,
        }
    }

    #[test]
    fn interfaces_carry_addresses_in_gid_order() {
        let pair = or_skip!("rtnl::interfaces_carry_addresses_in_gid_order", Pair::new());
        pair.a.sh("ip address add 10.9.1.1/32 dev v0; ip address add 2001:db8::7/64 dev v0");
        pair.a.run(|| {
            let v0 = Interface::by_name("v0").expect("v0");
            assert_eq!((v0.mtu, v0.up, v0.loopback), (4200, true, false));
            assert_eq!(v0.mac, [2, 0, 0, 0, 9, 1]);
            let mut families: Vec<u8> = Vec::new();
            for (address, _) in &v0.addresses {
                families.push(gid_rank(address));
            }
            assert!(families.is_sorted(), "{:?}", v0.addresses);
            assert_eq!(v0.addresses[0], (ip("10.9.0.1"), 24));
            assert_eq!(v0.addresses[1], (ip("10.9.1.1"), 32));
            assert_eq!(Interface::by_address(ip("10.9.1.1")).expect("v0").name, "v0");
            assert_eq!(Interface::by_address(ip("127.0.0.2")).expect("lo").name, "lo");
            let missing = Interface::by_name("eth9").expect_err("no eth9").to_string();
            assert!(missing.contains("v0"), "{missing}");
            assert!(Interface::by_address(ip("10.9.0.2")).is_err());
            let link = Rtnl::open().and_then(|mut r| r.link(v0.index)).expect("link");
            assert_eq!(link.kind.as_deref(), Some("veth"));
            assert!(link.ethernet && !link.xdp_attached);
        });
    }

    fn gid_rank(address: &IpAddr) -> u8 {
        match address {
            IpAddr::V4(_) => 0,
            IpAddr::V6(a) if !a.is_unicast_link_local() => 1,
            IpAddr::V6(_) => 2,
        }
    }

    #[test]
    fn routes_say_where_a_datagram_leaves() {
        let pair = or_skip!("rtnl::routes_say_where_a_datagram_leaves", Pair::new());
        pair.a.sh("ip route add 192.0.2.0/24 via 10.9.0.2 mtu 1400
                   ip route add prohibit 198.51.100.0/24
                   ip route add 203.0.113.0/24 via inet6 fd09::2 dev v0
                   ip route add 2001:db8:1::/64 via fd09::2");
        pair.a.run(|| {
            let v0 = Interface::by_name("v0").expect("v0").index;
            let mut rtnl = Rtnl::open().expect("rtnetlink");
            let direct = rtnl.route(&query("10.9.0.2")).expect("a route");
            assert_eq!((direct.kind, direct.interface), (RouteKind::Unicast, v0));
            assert_eq!((direct.gateway, direct.mtu), (None, None));
            assert_eq!(direct.preferred_source, Some(ip("10.9.0.1")));
            let via = rtnl.route(&query("192.0.2.9")).expect("a route");
            assert_eq!((via.gateway, via.mtu), (Some(ip("10.9.0.2")), Some(1400)));
            let six = rtnl.route(&query("2001:db8:1::9")).expect("a route");
            assert_eq!((six.gateway, six.interface), (Some(ip("fd09::2")), v0));
            let mixed = rtnl.route(&query("203.0.113.5")).expect("a route");
            assert_eq!(mixed.gateway, Some(ip("fd09::2")));
            let own = rtnl.route(&query("10.9.0.1")).expect("a route");
            assert_eq!(own.kind, RouteKind::Local);
            // The kernel adds that route a moment after the address.
            wait_until("the own address has its route", || {
                rtnl.route(&query("fd09::1")).expect("a route").kind == RouteKind::Local
            });
            let none = rtnl.route(&query("8.8.8.8")).expect_err("no default route");
            assert_eq!(none.raw_os_error(), Some(libc::ENETUNREACH));
            assert!(rtnl.route(&query("198.51.100.1")).is_err());
        });
    }

    #[test]
    fn neighbours_are_found_one_by_one() {
        let pair = or_skip!("rtnl::neighbours_are_found_one_by_one", Pair::new());
        pair.a.sh("ip neigh add 10.9.0.7 lladdr 02:00:00:00:00:07 dev v0
                   ip neigh add fd09::7 lladdr 02:00:00:00:00:08 dev v0 nud stale");
        pair.a.run(|| {
            let v0 = Interface::by_name("v0").expect("v0").index;
            let mut rtnl = Rtnl::open().expect("rtnetlink");
            let permanent = rtnl.neighbour(v0, ip("10.9.0.7")).expect("an answer").expect("entry");
            assert_eq!(permanent.mac, Some([2, 0, 0, 0, 0, 7]));
            assert_eq!(permanent.status, NeighbourStatus::Valid);
            let stale = rtnl.neighbour(v0, ip("fd09::7")).expect("an answer").expect("entry");
            assert_eq!(stale.mac, Some([2, 0, 0, 0, 0, 8]));
            assert_eq!(stale.status, NeighbourStatus::Stale);
            assert_eq!(rtnl.neighbour(v0, ip("10.9.0.99")).expect("an answer"), None);
        });
    }

    #[test]
    fn qdiscs_are_listed_per_interface() {
        let pair = or_skip!(
            "rtnl::qdiscs_are_listed_per_interface",
            needs(&["tc"]).and_then(|()| Pair::new())
        );
        pair.a.sh("tc qdisc add dev v0 clsact
                   tc qdisc add dev v0 root tbf rate 100kbit burst 2kb limit 20kb");
        pair.a.run(|| {
            let v0 = Interface::by_name("v0").expect("v0").index;
            let kinds: Vec<String> = Rtnl::open()
                .and_then(|mut r| r.qdiscs(v0))
                .expect("qdiscs")
                .into_iter()
                .map(|q| q.kind)
                .collect();
            assert!(kinds.contains(&"clsact".into()) && kinds.contains(&"tbf".into()), "{kinds:?}");
            // More than its burst at once: some of it waits for a second, and more has no room.
            let socket = std::net::UdpSocket::bind("10.9.0.1:0").expect("a socket");
            (0..200).for_each(|_| drop(socket.send_to(&[0; 1400], "10.9.0.2:9")));
            let queued = queues().expect("queues")[&v0];
            assert!(queued.dropped > 0 && queued.delayed > 0, "{queued:?}");
            assert!(queued.backlog_packets > 0 && queued.backlog_bytes > 1400, "{queued:?}");
        });
    }
}
