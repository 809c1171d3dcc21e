//! Two own addresses, and many paths of each; source ports, buffers and TTLs at their ends.

use std::collections::BTreeMap;

use super::*;
use crate::testing::testns::watched;

fn open_two(addresses: [IpAddr; 2]) -> UdpPort {
    UdpPort::open(&lo(), &addresses, &PortConfig::default()).unwrap()
}

/// Also where paths share their source ports.
#[test]
fn datagrams_of_each_address_leave_from_it() {
    let (own, peer) = ([loopback(), loopback()], loopback());
    let (mut tx, mut rx) = (open_two(own), open(peer));
    let mut paths = Vec::new();
    for n in 0..100 {
        for local in own {
            let wanted = PathSpec { src_port: 0xC000 + n, ..spec(local, peer) };
            paths.push((local, tx.add_path(&wanted).unwrap()));
        }
    }
    // And from UDP/4791.
    for local in own {
        let wanted = PathSpec { src_port: ROCE_PORT, ..spec(local, peer) };
        paths.push((local, tx.add_path(&wanted).unwrap()));
    }
    for (local, path) in &paths {
        send(&mut tx, path.id, &[9]);
        let got = receive(&mut rx, 1);
        assert_eq!((got[0].src, got[0].src_port), (*local, path.src_port));
    }
    // The paths of one address go, those of the other stay.
    let (gone, stay): (Vec<_>, Vec<_>) = paths.into_iter().partition(|(local, _)| *local == own[0]);
    gone.iter().for_each(|(_, path)| tx.remove_path(path.id));
    for (local, path) in &stay {
        send(&mut tx, path.id, &[9]);
        let got = receive(&mut rx, 1);
        assert_eq!((got[0].src, got[0].src_port), (*local, path.src_port));
    }
    // Both addresses receive, with paths or without.
    for local in own {
        let to = rx.add_path(&spec(peer, local)).unwrap();
        send(&mut rx, to.id, &[1, 1, 1]);
        assert!(receive(&mut tx, 3).iter().all(|got| got.dst == local));
    }
}

/// An address with a path is read in every call; one without a path only now and then while another
/// has some.
#[test]
fn an_address_is_read_at_once_while_it_has_a_path() {
    let (own, peer) = ([loopback(), loopback()], loopback());
    let (mut port, mut other) = (open_two(own), open(peer));
    let to = own.map(|local| other.add_path(&spec(peer, local)).unwrap().id);
    let mut paths: Vec<_> = [own[1], own[0], own[1], own[0]]
        .map(|local| port.add_path(&spec(local, peer)).unwrap().id)
        .into();
    while let Some(path) = paths.pop() {
        // The paths of the first address are added and removed as often as those of the second.
        let with_paths = if paths.is_empty() { 1 } else { 2 };
        for _ in 0..20 {
            for to in &to[2 - with_paths..] {
                send(&mut other, *to, &[3]);
            }
            for at in 2 - with_paths..2 {
                assert!(descriptors::wait_readable(port.paths.socket(at), 5_000).unwrap());
            }
            let received = port.receive_by(64, &mut |_| ()).unwrap();
            assert_eq!(received, with_paths, "with {} paths", paths.len() + 1);
        }
        port.remove_path(path);
    }
}

/// The ids wait for the datagrams committed to any of the removed paths.
#[test]
fn paths_that_are_removed_together_all_give_back_what_they_had() {
    let (own, peer) = ([loopback(), loopback()], loopback());
    let (mut tx, mut rx) = (open_two(own), open(peer));
    let calm = watched(tx.wait_fd());
    let mut greatest = 0;
    for round in 0..20 {
        let paths: Vec<PathId> = (0..10)
            .flat_map(|n| own.map(|local| PathSpec { src_port: 0xC100 + n, ..spec(local, peer) }))
            .map(|wanted| tx.add_path(&wanted).unwrap().id)
            .collect();
        greatest = greatest.max(paths.iter().map(|path| path.0).max().unwrap());
        for path in &paths[..10] {
            tx.reserve(*path, 5).unwrap().buf.fill(5);
            tx.commit();
        }
        paths.iter().for_each(|path| tx.remove_path(*path));
        tx.flush(crate::testing::no_failure);
        assert_eq!(receive(&mut rx, 10).len(), 10);
        assert_eq!(tx.paths.open_senders(), 0, "round {round}");
        assert_eq!(watched(tx.wait_fd()), calm);
    }
    assert_eq!(greatest, 19, "ids are used again");
}

/// Datagrams lost in a group's full queue stay counted when the group is left.
#[test]
fn counters_only_grow_when_a_group_is_left() {
    let own = loopback();
    let IpAddr::V4(address) = own else { unreachable!("it is IPv4") };
    // Unique to this process, as the address is.
    let [_, high, low, number] = address.octets();
    let group = IpAddr::from([239, high, low, number]);
    let config = small_buffer(20_000);
    let mut port = UdpPort::open(&lo(), &[own], &config).unwrap();
    let to_group = port.add_path(&spec(own, group)).unwrap().id;
    let mut before = PortStats::default();
    for _ in 0..3 {
        port.join(group).unwrap();
        for _ in 0..50 {
            send(&mut port, to_group, &[4120]);
        }
        let mut received = 0;
        port.receive_by(usize::MAX, &mut |_| received += 1).unwrap();
        let full = port.stats();
        port.leave(group);
        let left = port.stats();
        assert_eq!(full, left);
        assert_eq!(left.rx_datagrams - before.rx_datagrams, received);
        assert_eq!(left.rx_queue_drops - before.rx_queue_drops, 50 - received);
        assert!((1..50).contains(&received), "{received}");
        before = left;
    }
}

#[test]
fn source_ports_at_their_least_and_greatest_are_what_is_told() {
    let (own, peer) = (loopback(), loopback());
    let (mut tx, mut rx) = (open(own), open(peer));
    let taken = [u16::MAX, 0xC000].map(|port| std::net::UdpSocket::bind((own, port)).unwrap());
    let told = [0, 1, ROCE_PORT, 0xBFFF, u16::MAX].map(|src_port| {
        let path = tx.add_path(&PathSpec { src_port, ..spec(own, peer) }).unwrap();
        send(&mut tx, path.id, &[9]);
        assert_eq!(receive(&mut rx, 1)[0].src_port, path.src_port, "wanted {src_port}");
        path.src_port
    });
    assert!(told[0] > 0, "the kernel's choice");
    assert_eq!(told[2..], [ROCE_PORT, 0xBFFF, 0xC001], "from the start again");
    drop(taken);
}

#[test]
fn buffers_and_lifetimes_may_be_as_small_and_large_as_can_be() {
    let (own, peer) = (loopback(), loopback());
    for bytes in [0, 1, u32::MAX] {
        for force_buffers in [false, true] {
            let config = PortConfig {
                udp: UdpConfig { rx_buffer_bytes: bytes, ..UdpConfig::default() },
                tx_buffer_bytes: bytes,
                force_buffers,
                ..PortConfig::default()
            };
            let mut tx = UdpPort::open(&lo(), &[own], &config).unwrap();
            let mut rx = UdpPort::open(&lo(), &[peer], &config).unwrap();
            assert!(rx.capabilities().rx_budget.bytes > 1000, "{bytes}");
            for ttl in [0, 1, u8::MAX] {
                let path = tx.add_path(&PathSpec { ttl, tos: ttl, ..spec(own, peer) }).unwrap();
                send(&mut tx, path.id, &[100]);
                assert_eq!(receive(&mut rx, 1)[0].tos, Some(ttl));
            }
        }
    }
}

/// The fill is that of the queue read last, if it was not read to its end.
#[test]
fn it_is_known_how_far_the_queue_is_filled_that_is_being_read() {
    let (own, peer) = ([loopback(), loopback()], loopback());
    let udp = UdpConfig { rx_buffer_bytes: 65_536, ..UdpConfig::default() };
    let mut rx = UdpPort::open(&lo(), &own, &PortConfig { udp, ..PortConfig::default() }).unwrap();
    let mut tx = open(peer);
    let to = own.map(|local| tx.add_path(&spec(peer, local)).unwrap().id);
    for (full, other) in [(0, 1), (1, 0)] {
        while !rx.paths.socket(full).is_filled(7) {
            send(&mut tx, to[full], &[1000]);
        }
        send(&mut tx, to[other], &[1000]);
        let mut from = Vec::new();
        let mut read = |rx: &mut UdpPort| {
            assert_eq!(rx.receive_by(1, &mut |got| from.push(got.dst)).unwrap(), 1);
            (from.pop().unwrap(), [1, 4].map(|eighths| rx.is_filled(eighths)))
        };
        // They take turns.
        let both = BTreeMap::from([read(&mut rx), read(&mut rx)]);
        assert_eq!(both[&own[full]], [true, true]);
        assert_eq!(both[&own[other]], [false, false]);
        while rx.receive_by(64, &mut |_| ()).unwrap() > 0 {}
        assert!(!rx.paths.socket(full).is_filled(0));
    }
}
