//! Several ports of one machine: datagrams of a port leave by its own interface.

use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::frames::xdp::tests::another_program;
use crate::kernel::descriptors;
use crate::testing::ReceiveBy as _;
use crate::testing::sides::{self, ip, on_each, open_once};
use crate::testing::testns::{NetNs, has_address, needs};
use crate::{AnyPort, Backend, Interface, PathId, PathSpec, Port, PortConfig, RxDatagram, Slots};

/// The own addresses of the first and the second port, and the peer's.
const FIRST: [&str; 2] = ["10.9.0.1", "fd09::1"];
const SECOND: [&str; 2] = ["10.9.0.11", "fd09::11"];
const PEER: [&str; 2] = ["10.9.0.2", "fd09::2"];

/// A machine with two ports, `v0` and `v1`, and a peer, on one switch. The switch lets a port's own
/// addresses out of it and no others, as hosts of containers and virtual machines do.
struct Rails {
    a: NetNs,
    b: NetNs,
    host: NetNs,
}

impl Rails {
    /// With these lengths of prefixes of the two ports, and metrics of their IPv6 routes.
    fn new(prefixes: [u8; 2], metrics: [u16; 2]) -> Result<Self, String> {
        needs(&["nft"]).map_err(|e| e.to_string())?;
        let make = || NetNs::new().map_err(|e| e.to_string());
        let (a, b, host) = (make()?, make()?, make()?);
        host.sh(&format!(
            "ip link add br0 type bridge
             ip link add p0 mtu 4200 type veth peer name v0 mtu 4200 netns {a}
             ip link add p1 mtu 4200 type veth peer name v1 mtu 4200 netns {a}
             ip link add p2 mtu 4200 type veth peer name v0 mtu 4200 netns {b}
             for port in p0 p1 p2 br0; do
                 [ $port = br0 ] || ip link set $port master br0
                 ip link set $port up
             done
             nft add table netdev t",
            a = a.path(),
            b = b.path()
        ));
        for (port, [v4, v6]) in [FIRST, SECOND].iter().enumerate() {
            host.sh(&format!(
                "nft add chain netdev t p{port} \
                     '{{ type filter hook ingress device p{port} priority 0; }}'
                 nft add rule netdev t p{port} ip saddr != {v4} udp dport 4791 counter drop
                 nft add rule netdev t p{port} ip6 saddr != {v6} udp dport 4791 counter drop"
            ));
        }
        for (ns, port, [v4, v6]) in [(&a, 0, FIRST), (&a, 1, SECOND), (&b, 0, PEER)] {
            let (prefix, metric) = (prefixes[port], metrics[port]);
            ns.sh(&format!(
                "ip link set v{port} up
                 ip address add {v4}/{prefix} dev v{port}
                 ip address add {v6}/64 dev v{port} nodad metric {metric}"
            ));
            ns.run(|| has_address(v6)).map_err(|e| e.to_string())?;
        }
        Ok(Self { a, b, host })
    }

    /// Those that a switch would drop.
    fn spoofed(&self) -> u32 {
        let listing = self.host.sh("nft list table netdev t");
        let packets = |line: &str| line.split_once("packets ")?.1.split(' ').next()?.parse().ok();
        let counts: Vec<u32> = listing.lines().filter_map(packets).collect();
        counts.iter().sum()
    }
}

fn open_on(ns: &NetNs, name: &str, backend: Backend, own: &[&str]) -> Result<AnyPort, String> {
    let own: Vec<IpAddr> = own.iter().map(|address| ip(address)).collect();
    ns.run(|| {
        let iface = Interface::by_name(name).expect("the interface");
        open_once(&iface, backend, &own, 1).map(|mut ports| ports.pop().expect("a port"))
    })
    .map_err(|e| e.to_string())
}

fn path(ns: &NetNs, port: &mut AnyPort, local: &str, remote: &str, src_port: u16) -> PathId {
    let spec = spec(local, remote, src_port);
    ns.run(|| port.add_path(&spec)).expect("a path").id
}

fn spec(local: &str, remote: &str, src_port: u16) -> PathSpec {
    PathSpec { src_port, ..sides::spec(local, remote) }
}

/// Sends one datagram, again and again until it has arrived; returns its addresses. Those of an
/// earlier delivery that come late do not count.
fn deliver(from: &mut AnyPort, path: PathId, to: &mut AnyPort) -> Option<(IpAddr, IpAddr)> {
    static DELIVERIES: AtomicU64 = AtomicU64::new(0);
    let payload = [DELIVERIES.fetch_add(1, Ordering::Relaxed); 8].map(u64::to_be_bytes);
    let payload = payload.as_flattened();
    let end = Instant::now() + Duration::from_secs(20);
    let mut heard = None;
    while heard.is_none() && Instant::now() < end {
        if let Some(slot) = from.reserve(path, payload.len()) {
            slot.buf.copy_from_slice(payload);
            from.commit();
        }
        from.flush(crate::testing::no_failure);
        from.maintain();
        descriptors::wait_readable(to.wait_fd(), 20).expect("poll");
        let mut receives = |d: RxDatagram<'_>| {
            if d.payload == payload {
                heard = Some((d.src, d.dst));
            }
        };
        to.receive(64, &mut receives).expect("alive");
        to.maintain();
    }
    heard
}

/// Both ports talk with the peer, both ways, from sockets of these ports: that of UDP/4791 is
/// shared by all paths.
fn both_ports_talk(rails: &Rails, backend: Backend, src_ports: &[u16]) -> Result<(), String> {
    let mut first = open_on(&rails.a, "v0", backend, &FIRST)?;
    let mut second = open_on(&rails.a, "v1", backend, &SECOND)?;
    let mut peer = open_on(&rails.b, "v0", backend, &PEER)?;
    for (port, own) in [(&mut first, FIRST), (&mut second, SECOND)] {
        for family in [0, 1] {
            let (local, remote) = (own[family], PEER[family]);
            for &src_port in src_ports {
                let there = path(&rails.a, port, local, remote, src_port);
                let heard = deliver(port, there, &mut peer);
                assert_eq!(heard, Some((ip(local), ip(remote))), "from {local}:{src_port}");
                let back = path(&rails.b, &mut peer, remote, local, src_port);
                let heard = deliver(&mut peer, back, port);
                assert_eq!(heard, Some((ip(remote), ip(local))), "to {local}");
                port.remove_path(there);
                peer.remove_path(back);
            }
        }
    }
    assert_eq!(rails.spoofed(), 0, "each by its own interface");
    Ok(())
}

fn two_ports_of_a_subnet(backend: Backend) -> Result<(), String> {
    let rails = Rails::new([24, 24], [256, 256])?;
    both_ports_talk(&rails, backend, &[0xc0de, 4791])?;
    // ARP as machines with several ports in a subnet have it.
    rails.a.sh("for of in v0 v1; do
                    echo 1 > /proc/sys/net/ipv4/conf/$of/arp_ignore
                    echo 2 > /proc/sys/net/ipv4/conf/$of/arp_announce
                done; ip neigh flush all");
    rails.b.sh("ip neigh flush all");
    both_ports_talk(&rails, backend, &[0xc0de, 4791])
}

fn ranges_that_overlap(backend: Backend) -> Result<(), String> {
    // The second's route is never the longest match, nor that of the least metric.
    both_ports_talk(&Rails::new([24, 16], [256, 1000])?, backend, &[0xc0de])?;
    both_ports_talk(&Rails::new([16, 24], [1000, 256])?, backend, &[0xc0de])
}

/// Datagrams to the machine's other port stay inside, and come by loopback.
fn the_other_port_is_reached(backend: Backend) -> Result<(), String> {
    let rails = Rails::new([24, 24], [256, 256])?;
    let mut first = open_on(&rails.a, "v0", backend, &FIRST)?;
    let mut second = open_on(&rails.a, "v1", backend, &SECOND)?;
    for family in [0, 1] {
        let (local, remote) = (SECOND[family], FIRST[family]);
        let mut peer = open_on(&rails.b, "v0", backend, &PEER)?;
        // Two paths of one source port, of which one stays and one leaves, in both orders.
        for inside_first in [true, false] {
            let mut paths = [remote, PEER[family]].map(|remote| (remote, PathId::NONE));
            if !inside_first {
                paths.reverse();
            }
            for (remote, id) in &mut paths {
                *id = path(&rails.a, &mut second, local, remote, 0xc0de);
            }
            for (to, id) in paths {
                let there = if to == remote { &mut first } else { &mut peer };
                assert_eq!(deliver(&mut second, id, there), Some((ip(local), ip(to))));
                second.remove_path(id);
            }
        }
    }
    assert_eq!(rails.spoofed(), 0);
    Ok(())
}

/// The other interface answers for the port's addresses, as Linux lets it: datagrams to it are
/// received, and once.
fn what_arrives_by_another_port_is_heard(backend: Backend) -> Result<(), String> {
    let rails = Rails::new([24, 24], [256, 256])?;
    let mut second = open_on(&rails.a, "v1", backend, &SECOND)?;
    let mut peer = open_on(&rails.b, "v0", backend, &PEER)?;
    let mac = |name: &str| {
        let mac = rails.a.run(|| Interface::by_name(name).expect("the interface").mac);
        mac.map(|byte| format!("{byte:02x}")).join(":")
    };
    for family in [0, 1] {
        let (local, remote) = (PEER[family], SECOND[family]);
        let told = |mac: &str| {
            rails.b.sh(&format!("ip neigh replace {remote} lladdr {mac} dev v0 nud permanent"));
        };
        told(&mac("v0"));
        let there = path(&rails.b, &mut peer, local, remote, 0xc0de);
        assert_eq!(deliver(&mut peer, there, &mut second), Some((ip(local), ip(remote))));
        // And a datagram that arrives by the port itself is not received twice.
        told(&mac("v1"));
        peer.remove_path(there);
        let there = path(&rails.b, &mut peer, local, remote, 0xc0de);
        while second.receive_by(64, &mut |_| ()).expect("alive") > 0 {}
        peer.maintain();
        for mark in 101..=120 {
            peer.reserve(there, 64).expect("room").buf.fill(mark);
            peer.commit();
            peer.flush(crate::testing::no_failure);
            let (mut heard, end) = (Vec::new(), Instant::now() + Duration::from_secs(20));
            while heard.is_empty() && Instant::now() < end {
                descriptors::wait_readable(second.wait_fd(), 20).expect("poll");
                // Those of `deliver` may come late.
                let mut hear = |mark| heard.extend((mark > 100).then_some(mark));
                second.receive_by(64, &mut |d| hear(d.payload[0])).expect("alive");
                second.maintain();
            }
            assert_eq!(heard, [mark]);
        }
        let more =
            second.receive_by(64, &mut |d| assert!(d.payload[0] < 100, "once")).expect("alive");
        assert_eq!(more, 0);
    }
    Ok(())
}

/// While a port is down, its datagrams do not leave by another; that one goes on.
fn a_rail_is_taken_away(backend: Backend) -> Result<(), String> {
    let rails = Rails::new([24, 24], [256, 256])?;
    let mut first = open_on(&rails.a, "v0", backend, &FIRST)?;
    let mut second = open_on(&rails.a, "v1", backend, &SECOND)?;
    let mut peer = open_on(&rails.b, "v0", backend, &PEER)?;
    let mut paths = [(); 2].map(|()| PathId::NONE);
    for family in [0, 1] {
        let (local, remote) = (FIRST[family], PEER[family]);
        paths[family] = path(&rails.a, &mut first, local, remote, 0xc0de);
        assert!(deliver(&mut first, paths[family], &mut peer).is_some());
    }
    rails.a.sh("ip link set v0 down");
    peer.receive_by(64, &mut |_| ()).expect("alive");
    for family in [0, 1] {
        let spec = spec(FIRST[family], PEER[family], 0xc0df);
        // A known route holds for a second.
        let end = Instant::now() + Duration::from_secs(10);
        let why = loop {
            match rails.a.run(|| first.add_path(&spec)) {
                Ok(path) => first.remove_path(path.id),
                Err(refused) => break refused.to_string(),
            }
            assert!(Instant::now() < end, "there is no way");
            std::thread::sleep(Duration::from_millis(20));
        };
        // IPv6 addresses go with the link.
        assert!(family == 1 || why.contains("v0, which is down"), "{why}");
        let until = Instant::now() + Duration::from_millis(100);
        while Instant::now() < until {
            if let Some(slot) = first.reserve(paths[family], 64) {
                slot.buf.fill(1);
                first.commit();
            }
            first.flush(|_| ());
            first.maintain();
            // The other's may come late, as it has sent each again.
            let is_others = |src| SECOND.map(ip).contains(&src);
            peer.receive_by(64, &mut |d| assert!(is_others(d.src), "from {}", d.src))
                .expect("alive");
            std::thread::sleep(Duration::from_millis(5));
        }
        let there = path(&rails.a, &mut second, SECOND[family], PEER[family], 0xc0de);
        assert!(deliver(&mut second, there, &mut peer).is_some(), "the other goes on");
    }
    assert_eq!(rails.spoofed(), 0);
    Ok(())
}

/// An interface on another that the machine uses, too.
fn a_macvlan_on_a_port(backend: Backend) -> Result<(), String> {
    let rails = Rails::new([24, 24], [256, 256])?;
    rails.a.sh("ip address flush dev v1 scope global
                ip link add m0 link v1 type macvlan mode bridge
                ip link set m0 up
                ip address add 10.9.0.11/24 dev m0
                ip address add fd09::11/64 dev m0 nodad");
    rails.a.run(|| has_address("fd09::11")).map_err(|e| e.to_string())?;
    let mut own = open_on(&rails.a, "m0", backend, &SECOND)?;
    let mut peer = open_on(&rails.b, "v0", backend, &PEER)?;
    for family in [0, 1] {
        let (local, remote) = (SECOND[family], PEER[family]);
        let there = path(&rails.a, &mut own, local, remote, 0xc0de);
        assert_eq!(deliver(&mut own, there, &mut peer), Some((ip(local), ip(remote))));
        let back = path(&rails.b, &mut peer, remote, local, 0xc0de);
        assert_eq!(deliver(&mut peer, back, &mut own), Some((ip(remote), ip(local))));
    }
    assert_eq!(rails.spoofed(), 0);
    Ok(())
}

/// An XDP program of another owner, on one of two ports: it passes all frames, and both ports talk.
fn a_program_on_a_port(backend: Backend) -> Result<(), String> {
    let rails = Rails::new([24, 24], [256, 256])?;
    let attach = || another_program(Interface::by_name("v0").expect("the interface").index);
    let _attached = rails.a.run(attach).map_err(|e| e.to_string())?;
    both_ports_talk(&rails, backend, &[0xc0de])?;
    let refused = open_on(&rails.a, "v0", Backend::Xdp, &FIRST).expect_err("it has a program");
    assert!(refused.contains("another XDP program"), "{refused}");
    Ok(())
}

/// A port in a VRF has the addresses and the neighbours of another that is in another one.
fn a_port_in_a_vrf(backend: Backend) -> Result<(), String> {
    let rails = Rails::new([24, 24], [256, 256])?;
    let (try_vrf, a) = ("ip link add vrf1 type vrf table 10 2>&1 || true", &rails.a);
    let refused = a.sh(try_vrf);
    if !refused.is_empty() {
        return Err(format!("this kernel has no VRF: {}", refused.trim()));
    }
    a.sh("ip link add vrf0 type vrf table 9
          for port in 0 1; do
              ip link set vrf$port up
              ip link set v$port master vrf$port
          done
          ip address replace fd09::1/64 dev v0 nodad
          ip address replace fd09::11/64 dev v1 nodad
          ip address add 10.9.0.1/24 dev v1");
    rails.host.sh("nft flush chain netdev t p1");
    let both = [SECOND[0], SECOND[1], FIRST[0]];
    let mut first = open_on(a, "v0", backend, &FIRST)?;
    let mut second = open_on(a, "v1", backend, &both)?;
    let mut peer = open_on(&rails.b, "v0", backend, &PEER)?;
    for family in [0, 1] {
        let (local, remote) = (SECOND[family], PEER[family]);
        let there = path(a, &mut second, local, remote, 0xc0de);
        assert_eq!(deliver(&mut second, there, &mut peer), Some((ip(local), ip(remote))));
        let back = path(&rails.b, &mut peer, remote, local, 0xc0de);
        assert_eq!(deliver(&mut peer, back, &mut second), Some((ip(remote), ip(local))));
        let there = path(a, &mut first, FIRST[family], remote, 0xc0de);
        assert!(deliver(&mut first, there, &mut peer).is_some(), "it is disturbed by none");
        let itself = path(a, &mut second, local, local, 0xc0de);
        let mut heard = None;
        let end = Instant::now() + Duration::from_secs(10);
        while heard.is_none() && Instant::now() < end {
            second.reserve(itself, 64).expect("room").buf.fill(1);
            second.commit();
            second.flush(crate::testing::no_failure);
            descriptors::wait_readable(second.wait_fd(), 20).expect("poll");
            second.maintain();
            second.receive_by(64, &mut |d| heard = Some((d.src, d.dst))).expect("alive");
        }
        assert_eq!(heard, Some((ip(local), ip(local))), "to itself");
    }
    Ok(())
}

/// Two devices have one address, each in a domain of its own: each has a group of its own.
#[test]
fn an_address_in_two_vrfs_is_two_addresses() {
    let shared = || -> Result<(), String> {
        let rails = Rails::new([24, 24], [256, 256])?;
        let refused = rails.a.sh("ip link add vrf1 type vrf table 10 2>&1 || true");
        if !refused.is_empty() {
            return Err(format!("this kernel has no VRF: {}", refused.trim()));
        }
        rails.a.sh("ip link set vrf1 up; ip link set v1 master vrf1
                    ip address add 10.9.0.1/24 dev v1");
        rails.a.run(|| {
            let (config, shards) = (PortConfig::default(), crate::Shards::ONE);
            let lease = |name: &str| {
                let iface = Interface::by_name(name).expect("the interface");
                Slots::lease(&iface, &[ip("10.9.0.1")], &config, shards).expect("slots")
            };
            let (first, second) = (lease("v0"), lease("v1"));
            assert!(first.is_leader(ip("10.9.0.1")) && second.is_leader(ip("10.9.0.1")));
        });
        Ok(())
    };
    crate::testing::testns::or_skip!(shared());
}

/// A port has no way where only another has one, and says which.
fn a_way_of_another_port_is_none(backend: Backend) -> Result<(), String> {
    let rails = Rails::new([24, 24], [256, 256])?;
    rails.a.sh("ip route add 192.0.2.0/24 via 10.9.0.2 dev v0
                ip route add 2001:db8::/64 via fd09::2 dev v0
                ip route add 198.51.100.0/24 via 10.9.0.2 dev v1");
    let mut second = open_on(&rails.a, "v1", backend, &SECOND)?;
    for (family, remote) in [(0, "192.0.2.7"), (1, "2001:db8::7")] {
        let spec = spec(SECOND[family], remote, 0xc0de);
        let refused = rails.a.run(|| second.add_path(&spec)).expect_err("no way");
        let why = refused.to_string();
        assert!(why.contains("not reached through v1 but through v0"), "{why}");
    }
    path(&rails.a, &mut second, SECOND[0], "198.51.100.7", 0xc0de);
    let nowhere = spec(SECOND[0], "203.0.113.7", 0xc0de);
    let refused = rails.a.run(|| second.add_path(&nowhere)).expect_err("no way");
    assert!(refused.to_string().contains("unreachable"), "{refused}");
    Ok(())
}

/// An address that the machine is known by, on loopback: datagrams leave by the ports.
#[test]
fn addresses_of_loopback_leave_as_routes_say() {
    let sent = || -> Result<(), String> {
        let rails = Rails::new([24, 24], [256, 256])?;
        rails.host.sh("nft flush ruleset");
        rails.a.sh("ip address add 192.0.2.1/32 dev lo");
        rails.b.sh("ip route add 192.0.2.1/32 via 10.9.0.1");
        let mut own = open_on(&rails.a, "lo", Backend::Udp, &["192.0.2.1"])?;
        let mut peer = open_on(&rails.b, "v0", Backend::Udp, &PEER)?;
        let there = path(&rails.a, &mut own, "192.0.2.1", PEER[0], 0xc0de);
        assert!(deliver(&mut own, there, &mut peer).is_some());
        Ok(())
    };
    crate::testing::testns::or_skip!(sent());
}

on_each! { "rails":
    two_ports_of_a_subnet: udp Udp, packet Packet, afxdp Xdp;
    ranges_that_overlap: udp Udp, packet Packet;
    the_other_port_is_reached: udp Udp, packet Packet, afxdp Xdp;
    what_arrives_by_another_port_is_heard: udp Udp, packet Packet, afxdp Xdp;
    a_rail_is_taken_away: udp Udp, packet Packet;
    a_macvlan_on_a_port: udp Udp, packet Packet;
    a_program_on_a_port: udp Udp, packet Packet;
    a_port_in_a_vrf: udp Udp, packet Packet;
    a_way_of_another_port_is_none: udp Udp, packet Packet;
}
