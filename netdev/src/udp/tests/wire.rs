//! Two ports in two namespaces: the packets on the wire, and sends that the kernel refuses.

use std::time::Instant;

use super::*;
use crate::testing::testns::{NetNs, Pair, needs, or_skip};

const A: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 9, 0, 1));
const B: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 9, 0, 2));

fn v6(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn v0(ns: &NetNs) -> Interface {
    ns.run(|| Interface::by_name("v0").unwrap())
}

/// A port in each namespace, on these addresses.
fn ports(pair: &Pair, a: IpAddr, b: IpAddr, config: &PortConfig) -> (UdpPort, UdpPort) {
    let open = |ns: &NetNs, address| {
        let iface = v0(ns);
        ns.run(|| UdpPort::open(&iface, &[address], config).unwrap())
    };
    (open(&pair.a, a), open(&pair.b, b))
}

/// Two namespaces, if these programs are there to set them up.
fn pair_with(programs: &[&str]) -> io::Result<Pair> {
    needs(programs).and_then(|()| Pair::new())
}

fn path(pair: &Pair, port: &mut UdpPort, spec: &PathSpec) -> PathId {
    pair.a.run(|| port.add_path(spec).unwrap()).id
}

fn flush(port: &mut UdpPort) -> Vec<TxFailure> {
    let mut failures = Vec::new();
    port.flush(|failure| failures.push(failure));
    failures
}

#[test]
fn the_identification_on_the_wire_is_the_one_in_the_slot() {
    let pair = or_skip!(pair_with(&["nft", "ethtool"]));
    let (mut a, mut b) = ports(&pair, A, B, &PortConfig::default());
    let to_b = path(&pair, &mut a, &spec(A, B));
    // Segmented by the sender's kernel: b sees every datagram with its own header.
    pair.a.sh("ethtool -K v0 tx-udp-segmentation off");
    pair.b.sh("nft add table inet t");
    pair.b.sh("nft add chain inet t c '{ type filter hook prerouting priority 0; }'");
    for id in 0..6 {
        let rule = format!("ip id {id} ip frag-off 0x4000 ip ttl 64 udp dport 4791 counter");
        pair.b.sh(&format!("nft add rule inet t c {rule}"));
    }
    assert_eq!(send(&mut a, to_b, &[1040, 1040, 1040, 1040, 70]), [0, 1, 2, 3, 4]);
    for _ in 0..3 {
        assert_eq!(send(&mut a, to_b, &[100]), [0]);
    }
    let got = receive(&mut b, 8);
    assert_eq!(got.iter().map(|g| g.payload.len()).sum::<usize>(), 4 * 1040 + 70 + 300);
    let listing = pair.b.sh("nft list chain inet t c");
    let packets = |line: &str| line.split_once("packets ")?.1.split(' ').next()?.parse().ok();
    let counts: Vec<u32> = listing.lines().filter_map(packets).collect();
    assert_eq!(counts, [4, 1, 1, 1, 1, 0], "{listing}");
    // The interface took runs whole when the port was opened, and the port has not looked since.
    assert_eq!(a.runs().departed, Some(Runs { runs: 4, datagrams: 8, bytes: 4 * 1040 + 70 + 300 }));
    look(&mut a);
    send(&mut a, to_b, &[100; 3]);
    assert_eq!(a.runs().departed.map(|now| now.runs), Some(4 + 3));
}

/// Makes the port read the kernel's announcements; returns the number of its requests until now.
fn look(port: &mut UdpPort) -> u32 {
    port.offload.as_mut().expect("it makes a difference").make_due();
    assert_eq!(port.maintain(), None);
    port.offload.as_ref().expect("as before").segmentation.questions
}

/// The number of runs of these datagrams on the wire, as far as the port knows.
fn departed(port: &mut UdpPort, path: PathId, sizes: &[usize]) -> u64 {
    let before = port.runs().departed.expect("it counts").runs;
    send(port, path, sizes);
    port.runs().departed.expect("it counts").runs - before
}

#[test]
fn it_asks_when_the_interface_changed_and_in_calm_nothing() {
    let pair = or_skip!(needs(&["ethtool"]).and_then(|()| Pair::new_in_calm()));
    let (mut a, _b) = ports(&pair, A, B, &PortConfig::default());
    let to_b = path(&pair, &mut a, &spec(A, B));
    let mut asked = look(&mut a);
    for (change, runs) in [("off", 4), ("on", 1)] {
        // Neither do neighbours, addresses and other links.
        pair.a.sh("ip neigh replace 10.9.0.7 lladdr 02:00:00:00:00:07 dev v0
                   ip address replace 10.9.0.9/32 dev v0
                   ip link add w0 type veth peer name w1; ip link del w0");
        assert_eq!((0..20).map(|_| look(&mut a)).max(), Some(asked), "nothing was reported");
        pair.a.sh(&format!("ethtool -K v0 tx-udp-segmentation {change}"));
        assert_eq!(look(&mut a), asked + 1, "{change}");
        assert_eq!(departed(&mut a, to_b, &[100; 4]), runs, "{change}");
        asked = look(&mut a);
    }
}

#[test]
fn what_was_not_answered_is_asked_again_until_it_is() {
    let pair = or_skip!(Pair::new_in_calm());
    let (mut a, _b) = ports(&pair, A, B, &PortConfig::default());
    let asked = look(&mut a);
    for again in 1..4 {
        let offload = a.offload.as_mut().expect("it makes a difference");
        offload.segmentation.was_not_answered();
        assert_eq!((0..5).map(|_| look(&mut a)).last(), Some(asked + again), "once each");
    }
}

#[test]
fn where_the_interface_takes_fewer_segments_longer_runs_are_taken_apart() {
    let pair = or_skip!(pair_with(&[]));
    pair.a.sh("ip link set v0 gso_max_segs 8");
    let (mut a, mut b) = ports(&pair, A, B, &PortConfig::default());
    let to_b = path(&pair, &mut a, &spec(A, B));
    for (sizes, runs) in [(vec![100; 8], 1), (vec![100; 9], 9)] {
        assert_eq!(departed(&mut a, to_b, &sizes), runs);
        let before = b.stats().rx_runs;
        receive(&mut b, sizes.len());
        assert_eq!(b.stats().rx_runs - before, runs, "and so they came");
    }
    // The kernel does not announce this change alone.
    pair.a.sh("ip link set v0 gso_max_segs 65535 gso_max_size 10000; ip link set v0 mtu 4100");
    look(&mut a);
    assert_eq!(departed(&mut a, to_b, &[1000; 9]), 1);
    assert_eq!(departed(&mut a, to_b, &[1000; 10]), 10);
}

#[test]
fn where_it_makes_no_difference_nothing_is_asked() {
    let pair = or_skip!(pair_with(&[]));
    let iface = v0(&pair.a);
    let single = PortConfig { no_segmentation: true, ..PortConfig::default() };
    let (alone, _) = ports(&pair, A, B, &single);
    assert!(alone.offload.is_none());
    drop(alone);
    let guard = pair.a.run(|| open_guard(&iface, A));
    assert!(guard.offload.is_none());
}

#[test]
fn a_rule_of_the_own_namespace_is_reported() {
    let pair = or_skip!(pair_with(&["nft"]));
    let (mut a, mut b) = ports(&pair, A, B, &PortConfig::default());
    let to_b = path(&pair, &mut a, &spec(A, B));
    pair.a.sh("nft add table inet t");
    pair.a.sh("nft add chain inet t c '{ type filter hook output priority 0; }'");
    pair.a.sh("nft add rule inet t c udp length 308 drop");
    stage(&mut a, to_b, &[100; 2]);
    stage(&mut a, to_b, &[300; 1]);
    stage(&mut a, to_b, &[400; 2]);
    assert_eq!(flush(&mut a), [TxFailure { path: to_b, datagrams: 1, errno: libc::EPERM }]);
    let lens: Vec<_> = receive(&mut b, 4).iter().map(|g| g.payload.len()).collect();
    assert_eq!(lens, [100, 100, 400, 400]);
    assert_eq!((a.stats().tx_failed, a.stats().tx_datagrams), (1, 4));
}

#[test]
fn a_path_with_a_small_mtu_fails_and_segmentation_stays() {
    let pair = or_skip!(pair_with(&[]));
    let (mut a, mut b) = ports(&pair, A, B, &PortConfig::default());
    let to_b = path(&pair, &mut a, &spec(A, B));
    pair.a.sh("ip route add 10.9.0.2/32 dev v0 mtu 1400");
    stage(&mut a, to_b, &[4000; 5]);
    assert_eq!(flush(&mut a), [TxFailure { path: to_b, datagrams: 5, errno: libc::EMSGSIZE }]);
    pair.a.sh("ip route del 10.9.0.2/32");
    assert_eq!(stage(&mut a, to_b, &[4000; 5]), [0, 1, 2, 3, 4]);
    assert_eq!(flush(&mut a), []);
    assert_eq!(receive(&mut b, 5).len(), 5);
    assert_eq!(a.stats().tx_runs, 1);
}

#[test]
fn where_the_kernel_does_not_segment_datagrams_leave_singly() {
    let pair = or_skip!(pair_with(&[]));
    let (mut a, mut b) = ports(&pair, A, B, &PortConfig::default());
    let to_b = path(&pair, &mut a, &spec(A, B));
    // More segments than any kernel takes: EINVAL, as from a kernel with a lower limit than
    // assumed.
    a.paths.entry_mut(to_b).segments_max = 300;
    assert_eq!(stage(&mut a, to_b, &[64; 300]), (0..300).collect::<Vec<_>>());
    stage(&mut a, to_b, &[65; 2]);
    // The first datagram of the refused run was sealed for the identification of a single datagram;
    // the kernel takes the run behind it.
    assert_eq!(flush(&mut a), [TxFailure { path: to_b, datagrams: 299, errno: libc::EINVAL }]);
    let got = receive(&mut b, 3);
    assert_eq!(got.iter().map(|g| g.payload.len()).collect::<Vec<_>>(), [64, 65, 65]);
    // The path has learnt.
    assert_eq!(stage(&mut a, to_b, &[64; 5]), [0; 5]);
    assert_eq!(flush(&mut a), []);
    assert_eq!(receive(&mut b, 5).len(), 5);
    assert_eq!(a.stats().tx_runs, 1 + 1 + 5);
    // Other paths do not need to learn.
    let other = path(&pair, &mut a, &spec(A, B));
    assert_eq!(stage(&mut a, other, &[64; 3]), [0, 1, 2]);
}

#[test]
fn where_the_kernel_does_not_segment_ipv6_loses_nothing() {
    let pair = or_skip!(pair_with(&[]));
    let (a6, b6) = (v6("fd09::1"), v6("fd09::2"));
    let (mut a, mut b) = ports(&pair, a6, b6, &PortConfig::default());
    let to_b = path(&pair, &mut a, &spec(a6, b6));
    // Until the neighbour is known the kernel queues 212,992 bytes for it, 256 datagrams, and drops
    // the rest.
    send(&mut a, to_b, &[64]);
    receive(&mut b, 1);
    a.paths.entry_mut(to_b).segments_max = 300;
    stage(&mut a, to_b, &[64; 300]);
    assert_eq!(flush(&mut a), []);
    for (i, got) in receive(&mut b, 300).iter().enumerate() {
        assert_eq!(got.payload, [i as u8; 64]);
    }
    assert_eq!((a.stats().tx_runs, a.stats().tx_datagrams), (301, 301));
}

#[test]
fn a_full_queue_blocks_and_the_descriptor_tells_when_it_drains() {
    let pair = or_skip!(pair_with(&["tc"]));
    let config =
        PortConfig { tx_buffer_bytes: 100_000, force_buffers: false, ..PortConfig::default() };
    let (mut a, mut b) = ports(&pair, A, B, &config);
    pair.a.sh("tc qdisc add dev v0 root tbf rate 400mbit burst 128kb limit 16mb");
    // From a socket of its own, and from that of UDP/4791, which also waits for input.
    for src_port in [0xC123, 4791] {
        let to_b = path(&pair, &mut a, &PathSpec { src_port, ..spec(A, B) });
        let blocked = a.stats().tx_blocked;
        let mut next = 0_u32;
        let mut received = 0_u32;
        while next < 900 || a.wants_write() {
            while let Some(slot) = a.reserve(to_b, 4120).filter(|_| next < 900) {
                slot.buf[..4].copy_from_slice(&next.to_be_bytes());
                a.commit();
                next += 1;
            }
            assert_eq!(flush(&mut a), []);
            if a.wants_write() {
                assert!(descriptors::wait_readable(a.wait_fd(), 5_000).unwrap(), "it never drains");
                assert_eq!(a.receive_by(10, &mut |_| panic!("nothing was sent to it")).unwrap(), 0);
            }
            received += check_order(&mut b, received);
        }
        while received < 900 {
            assert!(descriptors::wait_readable(b.wait_fd(), 5_000).unwrap(), "{received} of 900");
            received += check_order(&mut b, received);
        }
        assert!(a.stats().tx_blocked > blocked);
        assert!(
            !descriptors::wait_readable(a.wait_fd(), 0).unwrap(),
            "nothing to wait for is left"
        );
    }
    assert_eq!((a.stats().tx_failed, b.stats().rx_queue_drops), (0, 0));
}

/// Receives the waiting datagrams, numbered from `first`; returns their number.
fn check_order(port: &mut UdpPort, first: u32) -> u32 {
    let mut next = first;
    let sink = |d: RxDatagram<'_>| {
        assert_eq!(d.payload[..4], next.to_be_bytes());
        next += 1;
    };
    port.receive(usize::MAX, sink).unwrap() as u32
}

#[test]
fn link_local_addresses_work() {
    let pair = or_skip!(Pair::new());
    for (ns, host) in [(&pair.a, 1), (&pair.b, 2)] {
        // The kernel accepts packets to the address a moment after it is there.
        ns.sh(&format!(
            "ip address add fe80::{host}/64 dev v0 nodad
             until ip -6 route show table local | grep -q 'fe80::{host} '; do sleep 0.01; done"
        ));
    }
    let (a6, b6) = (v6("fe80::1"), v6("fe80::2"));
    let (mut a, mut b) = ports(&pair, a6, b6, &PortConfig::default());
    let to_b = path(&pair, &mut a, &spec(a6, b6));
    send(&mut a, to_b, &[70, 70, 20]);
    let got = receive(&mut b, 3);
    assert!(got.iter().all(|g| (g.src, g.dst) == (a6, b6)), "{got:?}");
}

#[test]
fn ipv6_datagrams_without_a_checksum_are_accepted() {
    const UDP_NO_CHECK6_TX: i32 = 101;
    let pair = or_skip!(Pair::new());
    let (a6, b6) = (v6("fd09::1"), v6("fd09::2"));
    let iface = v0(&pair.b);
    let mut b = pair.b.run(|| UdpPort::open(&iface, &[b6], &PortConfig::default()).unwrap());
    let a = pair.a.run(|| Socket::new(true).unwrap());
    a.set(libc::SOL_UDP, UDP_NO_CHECK6_TX, 1).unwrap();
    a.bind(&(a6, 0xC000).into()).unwrap();
    let name = sys::SockAddr::new(&(b6, 4791).into());
    let dest = sys::Dest { name, tos: None, ttl: None };
    let message = sys::Message { payload: b"no checksum", dest: &dest, by: None, segment: 0 };
    sys::send(&a, &mut SendScratch::new(), std::iter::once(message)).unwrap();
    assert_eq!(receive(&mut b, 1)[0].payload, b"no checksum");
}

#[test]
fn a_destination_without_a_route_is_refused() {
    let pair = or_skip!(Pair::new());
    let (mut a, _b) = ports(&pair, A, B, &PortConfig::default());
    let nowhere = spec(A, IpAddr::from([192, 0, 2, 1]));
    let error = pair.a.run(|| a.add_path(&nowhere).unwrap_err());
    assert_eq!(error.kind(), io::ErrorKind::NetworkUnreachable, "{error}");
}

/// Its sockets do not: they have the address still.
#[test]
fn the_end_of_the_interface_ends_the_port() {
    let pair = or_skip!(pair_with(&[]));
    let (mut a, mut b) = ports(&pair, A, B, &PortConfig::default());
    let look = |port: &mut UdpPort| {
        let is_told = descriptors::wait_readable(port.wait_fd(), 20_000).expect("poll");
        assert!(is_told, "it is woken");
        let received = port.receive_by(1, &mut |_| {});
        port.maintain();
        received
    };
    pair.a.sh("ip link set v0 down");
    look(&mut a).expect("it is down, and not gone");
    pair.b.sh("ip link del v0");
    for port in [&mut a, &mut b] {
        let end = Instant::now() + Duration::from_secs(20);
        while !port.link.as_ref().expect("it receives").is_gone() {
            assert!(Instant::now() < end, "it goes");
            look(port).expect("not yet");
        }
        assert_eq!(port.maintain(), Some(Duration::ZERO), "there is news");
        let error = port.receive_by(1, &mut |_| {}).expect_err("the interface is gone");
        assert_eq!(error.raw_os_error(), Some(libc::ENODEV));
        assert!(!descriptors::wait_readable(port.wait_fd(), 0).expect("poll"), "all is read");
    }
}
