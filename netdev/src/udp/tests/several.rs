//! Two addresses, several groups: events of one do not affect another.

use super::*;
use crate::testns::{NetNs, or_skip};

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
    let ns = or_skip!("udp::a_path_that_is_refused_is_no_path_of_its_address", NetNs::new());
    let (mut two, mut other) = ports(&ns);
    ns.run(|| {
        two.add_path(&spec(A, [192, 0, 2, 1].into())).expect_err("nothing leads there");
        let path = other.add_path(&spec(C, B)).unwrap();
        // While there is no path, each call reads all addresses.
        for n in 0..4 {
            send(&mut other, path.id, &[40]);
            assert!(fd::wait_readable(two.wait_fd(), 5_000).unwrap());
            assert_eq!(two.receive(64, |_| ()).unwrap(), 1, "call {n}");
        }
    });
}

#[test]
fn who_leaves_groups_hears_those_that_stay() {
    let pair = or_skip!("udp::who_leaves_groups_hears_those_that_stay", crate::testns::Pair::new());
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

/// Receives with this budget when there is something; returns how many came.
fn receive_at_most(port: &mut UdpPort, budget: usize) -> usize {
    assert!(fd::wait_readable(port.wait_fd(), 5_000).unwrap());
    port.receive(budget, |_| ()).unwrap()
}
