//! Two addresses, several groups: events of one do not affect another.

use super::*;
use crate::testing::testns::{NetNs, or_skip};

/// A port on two addresses of loopback in a namespace of its own, and a port that sends.
fn ports(ns: &NetNs) -> (UdpPort, UdpPort) {
    ns.run(|| {
        let open = |own: &[IpAddr]| UdpPort::open(&lo(), own, &PortConfig::default()).unwrap();
        (open(&[A, B]), open(&[C]))
    })
}

const A: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(127, 0, 0, 1));
const B: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(127, 0, 0, 2));
const C: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(127, 0, 0, 3));

#[test]
fn a_path_that_is_refused_is_no_path_of_its_address() {
    let ns = or_skip!(NetNs::new());
    let (mut two, mut other) = ports(&ns);
    ns.run(|| {
        two.add_path(&spec(A, [192, 0, 2, 1].into())).expect_err("nothing leads there");
        let path = other.add_path(&spec(C, B)).unwrap();
        // While there is no path, each call reads all addresses.
        for n in 0..4 {
            send(&mut other, path.id, &[40]);
            assert!(descriptors::wait_readable(two.wait_fd(), 5_000).unwrap());
            assert_eq!(two.receive_by(64, &mut |_| ()).unwrap(), 1, "call {n}");
        }
    });
}

/// Rules may tell traffic classes apart.
#[test]
fn the_way_is_that_of_the_traffic_class() {
    let pair = or_skip!(crate::testing::testns::Pair::new());
    pair.a.sh("ip rule add prio 77 tos 0x10 prohibit; ip -6 rule add prio 77 tos 0x10 prohibit");
    pair.a.run(|| {
        let v0 = Interface::by_name("v0").unwrap();
        let ways = [["10.9.0.1", "10.9.0.2"], ["fd09::1", "fd09::2"]];
        let ways = ways.map(|way| way.map(|address| address.parse::<IpAddr>().unwrap()));
        let own = ways.map(|[local, _]| local);
        let mut port = UdpPort::open(&v0, &own, &PortConfig::default()).unwrap();
        for [local, remote] in ways {
            // The first answer does not depend on earlier ones.
            for _ in 0..2 {
                port.add_path(&spec(local, remote)).unwrap();
                for tos in [0x10, 0x12] {
                    let spec = PathSpec { tos, ..spec(local, remote) };
                    let error = port.add_path(&spec).expect_err("prohibited").to_string();
                    assert!(error.contains(&format!("{local} to {remote}")), "{error}");
                }
            }
        }
        let elsewhere =
            port.add_path(&spec([10, 9, 0, 9].into(), ways[0][1])).expect_err("not ours");
        assert_eq!(elsewhere.kind(), io::ErrorKind::AddrNotAvailable, "{elsewhere}");
        let mixed = port.add_path(&spec(own[0], ways[1][1])).expect_err("two families");
        assert_eq!(mixed.kind(), io::ErrorKind::InvalidInput, "{mixed}");
    });
}

#[test]
fn who_leaves_groups_hears_those_that_stay() {
    let pair = or_skip!(crate::testing::testns::Pair::new());
    let groups = [[239, 9, 3, 1], [239, 9, 3, 2], [239, 9, 3, 3]].map(IpAddr::from);
    let open = |ns: &NetNs, own: [u8; 4]| {
        ns.run(|| {
            let iface = Interface::by_name("v0").unwrap();
            UdpPort::open(&iface, &[own.into()], &PortConfig::default()).unwrap()
        })
    };
    let (mut tx, mut rx) = (open(&pair.a, [10, 9, 0, 1]), open(&pair.b, [10, 9, 0, 2]));
    pair.b.run(|| groups.iter().for_each(|group| rx.join(*group).unwrap()));
    let paths = groups
        .map(|group| pair.a.run(|| tx.add_path(&spec([10, 9, 0, 1].into(), group)).unwrap().id));
    // The budget ends with the second, so that the third is next.
    send(&mut tx, paths[1], &[40]);
    assert_eq!(receive_at_most(&mut rx, 1), 1);
    rx.leave(groups[0]);
    rx.leave(groups[2]);
    send(&mut tx, paths[1], &[40]);
    assert_eq!(receive_at_most(&mut rx, 64), 1);
}

/// Receives with this budget when there is something; returns the number of datagrams.
fn receive_at_most(port: &mut UdpPort, budget: usize) -> usize {
    assert!(descriptors::wait_readable(port.wait_fd(), 5_000).unwrap());
    port.receive_by(budget, &mut |_| ()).unwrap()
}
