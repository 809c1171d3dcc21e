//! Paths of every backend: two that use one id in turn, and several ports of one device.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::kernel::descriptors;
use crate::testing::ReceiveBy as _;
use crate::testing::sides::{ip, on_each, open, open_shards, sides, spec};
use crate::testing::testns::{NetNs, Pair, arrives, has_arrivals, needs, wait_until};
use crate::{AnyPort, Backend, PathId, PathSpec, Port, RxDatagram};

const A: [&str; 2] = ["10.9.0.1", "fd09::1"];
const B: [&str; 2] = ["10.9.0.2", "fd09::2"];

fn path(ns: &NetNs, port: &mut AnyPort, local: &str, remote: &str) -> PathId {
    ns.run(|| port.add_path(&spec(local, remote))).expect("a path").id
}

/// Commits datagrams of `len` bytes filled with `mark`.
fn commit(port: &mut AnyPort, path: PathId, count: usize, len: usize, mark: u8) {
    for _ in 0..count {
        port.reserve(path, len).expect("room").buf.fill(mark);
        port.commit();
    }
}

/// A datagram: its mark, length, source and destination.
type Heard = (u8, usize, IpAddr, IpAddr);

/// Receives until `want` datagrams have arrived, or for a long time.
fn receive(port: &mut AnyPort, want: usize) -> Vec<Heard> {
    let end = Instant::now() + Duration::from_secs(20);
    let (mut received, mut taken) = (Vec::new(), 0);
    while received.len() < want && Instant::now() < end {
        descriptors::wait_readable(port.wait_fd(), 20).expect("poll");
        let sink = |d: RxDatagram<'_>| {
            assert!(d.payload.iter().all(|byte| *byte == d.payload[0]), "of one datagram");
            received.push((d.payload[0], d.payload.len(), d.src, d.dst));
        };
        taken += port.receive(64, sink).expect("alive");
        port.maintain();
    }
    assert_eq!(taken, received.len(), "receive() returns their number");
    received.sort_unstable();
    received
}

/// Makes the neighbours known, or leaves their resolution to the kernel.
fn know(pair: &Pair, known: bool) {
    let [verb, state] = if known { ["replace", "permanent"] } else { ["del", ""] };
    for (ns, host) in [(&pair.a, 2), (&pair.b, 1)] {
        for address in [format!("10.9.0.{host}"), format!("fd09::{host}")] {
            let lladdr =
                if known { format!("lladdr 02:00:00:00:09:0{host} nud") } else { String::new() };
            ns.sh(&format!("ip neigh {verb} {address} dev v0 {lladdr} {state} || true"));
        }
    }
}

/// Datagrams committed to a path follow that path, and the next path with its id starts anew: with
/// known neighbours or not, to others and to itself.
fn a_reused_id_is_a_new_path(backend: Backend) -> Result<(), String> {
    let (pair, mut a, mut b) = sides(backend)?;
    for known in [true, false] {
        know(&pair, known);
        let mut ids = Vec::new();
        // Datagrams of both paths could form one run, or could not, depending on their sizes.
        for (mark, [first, second]) in (0..).zip([[100, 100], [100, 40], [40, 100], [1000, 1000]]) {
            for (old, new) in [(0, 1), (1, 0)] {
                let before = path(&pair.a, &mut a, A[old], B[old]);
                commit(&mut a, before, 3, first, 2 * mark);
                a.remove_path(before);
                assert!(a.reserve(before, first).is_none(), "it is gone");
                let after = path(&pair.a, &mut a, A[new], B[new]);
                let itself = path(&pair.a, &mut a, A[old], A[old]);
                commit(&mut a, after, 3, second, 2 * mark + 1);
                commit(&mut a, itself, 1, second, 99);
                a.flush(crate::testing::no_failure);
                let of = |mark, len, at: usize| (mark, len, ip(A[at]), ip(B[at]));
                let mut expected = vec![of(2 * mark, first, old); 3];
                expected.extend([of(2 * mark + 1, second, new); 3]);
                assert_eq!(receive(&mut b, 6), expected, "known: {known}");
                assert_eq!(receive(&mut a, 1), [(99, second, ip(A[old]), ip(A[old]))]);
                ids.extend([before, after, itself]);
                [after, itself].into_iter().for_each(|path| a.remove_path(path));
                a.flush(crate::testing::no_failure);
            }
        }
        assert!(ids.iter().all(|id| id.0 < 4), "ids are used again: {ids:?}");
    }
    Ok(())
}

/// A failure names an existing path, or a removed one with an id that is not in use.
fn what_fails_of_a_removed_path_is_told_of_no_other(backend: Backend) -> Result<(), String> {
    let (pair, mut a, _b) = sides(backend)?;
    let itself = path(&pair.a, &mut a, A[0], A[0]);
    for round in 1..=3 {
        // The kernel sends the first of each: the neighbour is unknown.
        let gone = path(&pair.a, &mut a, A[0], "10.9.0.77");
        let stays = path(&pair.a, &mut a, A[0], "10.9.0.78");
        for path in [gone, stays] {
            commit(&mut a, path, 1, 100, 7);
        }
        a.remove_path(gone);
        let new = path(&pair.a, &mut a, A[0], A[0]);
        pair.a.sh("ip link set v0 down");
        let mut failed = Vec::new();
        a.flush(|failure| failed.push(failure));
        pair.a.sh("ip link set v0 up");
        assert_eq!(a.stats().tx_failed, 2 * round);
        assert!(failed.iter().all(|failure| failure.errno == libc::ENETUNREACH), "{failed:?}");
        let named: Vec<PathId> = failed.iter().map(|failure| failure.path).collect();
        assert!(named.contains(&stays) && named.len() <= 2, "{named:?}");
        assert!(!named.contains(&itself) && !named.contains(&new), "{named:?}");
        [stays, new].into_iter().for_each(|path| a.remove_path(path));
        a.flush(crate::testing::no_failure);
    }
    Ok(())
}

/// A thread may ask twice for the present state.
fn watching_twice_is_watching(backend: Backend) -> Result<(), String> {
    let (pair, mut a, mut b) = sides(backend)?;
    know(&pair, true);
    let to = path(&pair.a, &mut a, A[0], B[0]);
    for wished in [true, false, false, true, true] {
        b.watch(wished).expect("it is in the set already, or not at all");
    }
    assert!(!has_arrivals(&mut b));
    commit(&mut a, to, 1, 100, 7);
    a.flush(crate::testing::no_failure);
    assert!(arrives(&mut b));
    assert_eq!(receive(&mut b, 1).len(), 1);
    assert!(!has_arrivals(&mut b));
    Ok(())
}

/// Datagrams that arrived before the end of the interface are handed up after it, and then the end
/// is reported.
fn the_end_comes_after_what_arrived(backend: Backend) -> Result<(), String> {
    let (pair, mut a, mut b) = sides(backend)?;
    know(&pair, true);
    let to = path(&pair.a, &mut a, A[0], B[0]);
    let itself = path(&pair.b, &mut b, B[0], B[0]);
    commit(&mut a, to, 3, 100, 7);
    a.flush(crate::testing::no_failure);
    assert!(arrives(&mut b));
    commit(&mut b, itself, 2, 100, 8);
    b.flush(crate::testing::no_failure);
    pair.b.sh("ip link del v0");
    for _ in 0..10 {
        b.maintain();
    }
    let (mut marks, deadline) = (Vec::new(), Instant::now() + Duration::from_secs(20));
    let end = loop {
        match b.receive_by(1, &mut |d| marks.push(d.payload[0])) {
            Ok(_) => assert!(Instant::now() < deadline, "it never ends"),
            Err(e) => break e.raw_os_error(),
        }
    };
    marks.sort_unstable();
    assert!(matches!(end, Some(libc::ENODEV | libc::ENXIO)), "{end:?}");
    assert_eq!(marks, [7, 7, 7, 8, 8]);
    Ok(())
}

/// Each port receives the datagrams for its queue pairs, over either family, and nothing else.
fn shards_hear_what_is_theirs(backend: Backend) -> Result<(), String> {
    const COUNT: usize = 3;
    let pair = Pair::new().map_err(|e| e.to_string())?;
    know(&pair, true);
    let mut shards = open_shards(&pair.b, backend, &B, COUNT).map_err(|e| e.to_string())?;
    let mut a = open(&pair.a, Backend::Udp, &A).map_err(|e| e.to_string())?;
    for at in [0, 1] {
        let to = path(&pair.a, &mut a, A[at], B[at]);
        for (byte, shard) in [(0, 0), (1, 1), (2, 2), (3, 0), (255, 0), (1, 1)] {
            // Different bytes around the relevant one.
            let mut payload = [0xf0; 64];
            payload[5] = byte;
            a.reserve(to, 64).expect("room").buf.copy_from_slice(&payload);
            a.commit();
            a.flush(crate::testing::no_failure);
            let mut received = [0; COUNT];
            let end = Instant::now() + Duration::from_secs(20);
            while received == [0; COUNT] && Instant::now() < end {
                for (port, received) in shards.iter_mut().zip(&mut received) {
                    *received += port
                        .receive_by(64, &mut |d| assert_eq!(d.payload, payload))
                        .expect("alive");
                }
            }
            let mut expected = [0; COUNT];
            expected[shard] = 1;
            assert_eq!(received, expected, "{byte} to {}", B[at]);
        }
    }
    Ok(())
}

/// Two devices of several ports each on one interface: each receives datagrams to its own addresses
/// only.
fn devices_beside_each_other_hear_their_own(backend: Backend) -> Result<(), String> {
    let pair = Pair::new().map_err(|e| e.to_string())?;
    pair.b.sh("ip address add 10.9.0.12/24 dev v0; ip address add fd09::12/64 dev v0 nodad");
    pair.b.run(|| crate::testing::testns::has_address("fd09::12")).map_err(|e| e.to_string())?;
    know(&pair, true);
    let own = [B, ["10.9.0.12", "fd09::12"]];
    let mut devices = Vec::new();
    for own in &own {
        devices.extend(open_shards(&pair.b, backend, own, 2).map_err(|e| e.to_string())?);
    }
    let mut a = open(&pair.a, Backend::Udp, &A).map_err(|e| e.to_string())?;
    // With both, and with the second alone.
    for first in [0, 1] {
        if first == 1 {
            devices.drain(..2);
        }
        for (device, own) in own.iter().enumerate().skip(first) {
            for at in [0, 1] {
                let to = path(&pair.a, &mut a, A[at], own[at]);
                for byte in [0, 1] {
                    let expected: Vec<usize> = (2 * first..4)
                        .map(|port| usize::from(port == 2 * device + usize::from(byte)))
                        .collect();
                    let mut payload = [0xf0; 64];
                    payload[5] = byte;
                    a.reserve(to, 64).expect("room").buf.copy_from_slice(&payload);
                    a.commit();
                    a.flush(crate::testing::no_failure);
                    let mut received = vec![0; devices.len()];
                    let end = Instant::now() + Duration::from_secs(20);
                    while received.iter().all(|received| *received == 0) && Instant::now() < end {
                        for (port, received) in devices.iter_mut().zip(&mut received) {
                            *received += port.receive_by(64, &mut |_| ()).expect("alive");
                        }
                    }
                    assert_eq!(received, expected, "{byte} to {}", own[at]);
                }
            }
        }
    }
    Ok(())
}

/// To itself a port sends datagrams of the link's whole MTU.
fn the_longest_datagram_reaches_itself(backend: Backend) -> Result<(), String> {
    let (pair, mut a, _b) = sides(backend)?;
    let longest = a.capabilities().link_mtu as usize - 48;
    for own in A {
        let itself = path(&pair.a, &mut a, own, own);
        commit(&mut a, itself, 1, longest, 5);
        a.flush(crate::testing::no_failure);
        assert_eq!(receive(&mut a, 1), [(5, longest, ip(own), ip(own))]);
    }
    Ok(())
}

/// A path without a hop limit has that of its route, and one with a limit keeps it.
fn the_hop_limit_is_the_routes(backend: Backend) -> Result<(), String> {
    needs(&["nft"]).map_err(|e| e.to_string())?;
    let pair = Pair::new().map_err(|e| e.to_string())?;
    pair.a.sh("echo 61 > /proc/sys/net/ipv4/ip_default_ttl
               echo 62 > /proc/sys/net/ipv6/conf/v0/hop_limit");
    know(&pair, true);
    let mut a = open(&pair.a, backend, &A).map_err(|e| e.to_string())?;
    pair.b.sh("nft add table inet t
               nft add chain inet t c '{ type filter hook prerouting priority -400; }'");
    for limit in ["ip ttl 61", "ip6 hoplimit 62", "ip ttl 7", "ip6 hoplimit 8", "ip ttl 33"] {
        pair.b.sh(&format!("nft add rule inet t c {limit} udp dport 4791 counter"));
    }
    let mut send = |local, remote, ttl| {
        let spec = PathSpec { ttl, ..spec(local, remote) };
        let path = pair.a.run(|| a.add_path(&spec)).expect("a path").id;
        commit(&mut a, path, 1, 100, 1);
        a.flush(crate::testing::no_failure);
        a.remove_path(path);
    };
    send(A[0], B[0], 0);
    send(A[1], B[1], 0);
    pair.a.sh("ip route add 10.9.0.2/32 dev v0 hoplimit 7
               ip route add fd09::2/128 dev v0 hoplimit 8");
    // Old routes stay known for a moment.
    std::thread::sleep(Duration::from_millis(1100));
    send(A[0], B[0], 0);
    send(A[1], B[1], 0);
    send(A[0], B[0], 33);
    let counts = || {
        let listing = pair.b.sh("nft list chain inet t c");
        let packets = |line: &str| line.split_once("packets ")?.1.split(' ').next()?.parse().ok();
        listing.lines().filter_map(packets).collect::<Vec<u32>>()
    };
    wait_until("each came once", || counts() == [1; 5]);
    Ok(())
}

on_each! { "paths":
    the_hop_limit_is_the_routes: udp Udp, packet Packet, afxdp Xdp;
    the_longest_datagram_reaches_itself: packet Packet, afxdp Xdp;
    what_fails_of_a_removed_path_is_told_of_no_other: udp Udp, packet Packet, afxdp Xdp;
    devices_beside_each_other_hear_their_own: udp Udp, packet Packet;
    a_reused_id_is_a_new_path: udp Udp, packet Packet, afxdp Xdp;
    watching_twice_is_watching: packet Packet, afxdp Xdp;
    the_end_comes_after_what_arrived: packet Packet, afxdp Xdp;
    shards_hear_what_is_theirs: udp Udp, packet Packet;
}
