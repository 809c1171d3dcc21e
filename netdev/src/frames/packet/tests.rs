mod blocked;
mod capture;
pub(crate) mod handed;
mod life;
mod two;

use std::time::{Duration, Instant};

use super::*;
use crate::ROCE_PORT;
use crate::kernel::descriptors::wait_readable;
use crate::kernel::interface::Interface;
use crate::port::config::{PacketConfig, PortConfig};
use crate::port::contract::{Path, PathSpec, Port as _, RxBudget, RxIpId};
use crate::port::headers::FrameTemplate;
use crate::testing::ReceiveBy as _;
use crate::testing::sides::{Got, Open as _, ip, receive_for, spec};
use crate::testing::testns::{
    NetNs, Pair, arrives, has_arrivals, look_after, needs, or_skip, wait_until, without_capability,
};

/// Of capabilities(7).
const CAP_NET_RAW: u32 = 13;
const A4: &str = "10.9.0.1";
const B4: &str = "10.9.0.2";
const A6: &str = "fd09::1";
const B6: &str = "fd09::2";

fn open_on(ns: &NetNs, iface: &str, own: &[&str], config: &PortConfig) -> PacketPort {
    ns.run(|| {
        let iface = Interface::by_name(iface).expect("the interface");
        let own: Vec<IpAddr> = own.iter().map(|a| ip(a)).collect();
        once_free(|| PacketPort::open(&iface, &own, config), |e| e.errno()).expect("a port")
    })
}

/// Tries again for a while if UDP/4791 is in use: between fork and exec, a child of another test
/// holds copies of closed sockets.
fn once_free<T, E>(open: impl Fn() -> Result<T, E>, errno: impl Fn(&E) -> i32) -> Result<T, E> {
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        match open() {
            Err(e) if errno(&e) == libc::EADDRINUSE && Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(5));
            }
            result => return result,
        }
    }
}

/// Ports at both ends, with each other's Ethernet address in the neighbour cache.
fn ports(pair: &Pair) -> (PacketPort, PacketPort) {
    for (ns, peer) in [(&pair.a, 2), (&pair.b, 1)] {
        ns.sh(&format!(
            "ip neigh replace 10.9.0.{peer} lladdr 02:00:00:00:09:0{peer} dev v0
             ip neigh replace fd09::{peer} lladdr 02:00:00:00:09:0{peer} dev v0"
        ));
    }
    let config = PortConfig::default();
    (open_on(&pair.a, "v0", &[A4, A6], &config), open_on(&pair.b, "v0", &[B4, B6], &config))
}

/// A pair, and a port at each end.
fn pair_with_ports() -> io::Result<(Pair, PacketPort, PacketPort)> {
    let pair = Pair::new()?;
    let (a, b) = ports(&pair);
    Ok((pair, a, b))
}

fn path(ns: &NetNs, port: &mut PacketPort, local: &str, remote: &str) -> Path {
    let spec = PathSpec { src_port: 0xc123, tos: 0x0a, ..spec(local, remote) };
    ns.run(|| port.add_path(&spec)).expect("a path")
}

/// Datagram `index` of a test.
fn payload(index: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 + index * 7) as u8).collect()
}

/// Commits datagrams of these lengths, without flushing; returns their identifications.
fn commit(port: &mut PacketPort, path: PathId, lens: &[usize]) -> Vec<u16> {
    let mut ids = Vec::new();
    for (index, len) in lens.iter().enumerate() {
        let slot = port.reserve(path, *len).expect("room");
        slot.buf.copy_from_slice(&payload(index, *len));
        ids.push(slot.ip_id);
        port.commit();
    }
    ids
}

/// Commits and flushes; nothing may fail.
fn send(port: &mut PacketPort, path: PathId, lens: &[usize]) -> Vec<u16> {
    let ids = commit(port, path, lens);
    port.flush(crate::testing::no_failure);
    assert!(!port.wants_write());
    ids
}

fn drain(port: &mut PacketPort) -> Vec<Got> {
    receive_for(port, 0, Duration::ZERO)
}

/// Receives until `count` datagrams have arrived; a veth delivers within the sender's system call,
/// but the kernel may defer it.
fn receive(port: &mut PacketPort, count: usize) -> Vec<Got> {
    let mut got = receive_for(port, count, Duration::from_secs(20));
    got.extend(drain(port));
    assert!(got.iter().all(|got| got.tos.is_some()));
    got
}

fn check_payloads(got: &[Got], lens: &[usize]) {
    let lengths: Vec<usize> = got.iter().map(|g| g.payload.len()).collect();
    assert_eq!(lengths, lens);
    for (index, Got { payload: bytes, .. }) in got.iter().enumerate() {
        assert!(*bytes == payload(index, bytes.len()), "datagram {index} differs");
    }
}

#[test]
fn runs_and_single_datagrams_arrive_over_ipv4_and_ipv6() {
    let (pair, mut a, mut b) = or_skip!(pair_with_ports());
    let lengths: [Vec<usize>; 8] = [
        vec![16],
        vec![4116],
        vec![80; 60],
        [vec![4116; 14], vec![20]].concat(),
        [vec![1044; 70], vec![300, 300, 16], vec![4116; 40]].concat(),
        vec![0, 1, 2],
        vec![0, 0, 100, 100, 0, 100],
        vec![80; 60],
    ];
    for (local, remote) in [(A4, B4), (A6, B6)] {
        let to = path(&pair.a, &mut a, local, remote);
        for lens in &lengths {
            let ids = send(&mut a, to.id, lens);
            let got = receive(&mut b, lens.len());
            check_payloads(&got, lens);
            for (Got { src, src_port, ip_id, .. }, id) in got.iter().zip(&ids) {
                assert_eq!((*src, *src_port), (ip(local), to.src_port));
                match ip_id {
                    RxIpId::Exact { id: got, flags } => assert_eq!((got, *flags), (id, 0x4000)),
                    RxIpId::Hint(got) => assert_eq!(got, id),
                    RxIpId::None => assert!(remote == B6 && *id == 0),
                }
            }
        }
    }
    let sent = a.stats();
    assert_eq!(sent.tx_unresolved + sent.tx_failed + sent.tx_blocked, 0);
    assert_eq!(sent.tx_datagrams, b.stats().rx_datagrams);
    assert_eq!(sent.tx_bytes, b.stats().rx_bytes);
    assert_eq!((b.stats().rx_malformed, b.stats().rx_queue_drops), (0, 0));
    assert_eq!(a.io.sender.segments_max(), staging::SEGMENTS_MAX, "nothing was refused");
}

#[test]
fn sixty_segments_are_one_super_packet() {
    let (pair, mut a, mut b) = or_skip!(pair_with_ports());
    let to = path(&pair.a, &mut a, A4, B4);
    send(&mut a, to.id, &[80; 60]);
    assert_eq!(receive(&mut b, 60).len(), 60);
    assert_eq!((a.stats().tx_runs, b.stats().rx_runs), (1, 1));
    assert_eq!(b.runs().arrived, Some(Runs { runs: 1, datagrams: 60, bytes: 60 * 80 }));
    assert_eq!(a.runs().departed, Some(Runs { runs: 1, datagrams: 60, bytes: 60 * 80 }));
    // The first has an exact identification, the others only a hint.
    assert_eq!(send(&mut a, to.id, &[80; 60]), (60..120).collect::<Vec<_>>());
    let kinds: Vec<bool> =
        receive(&mut b, 60).iter().map(|g| matches!(g.ip_id, RxIpId::Exact { .. })).collect();
    assert_eq!(kinds, [vec![true], vec![false; 59]].concat());
}

#[test]
fn the_longest_datagram_has_a_slot_and_a_longer_one_has_none() {
    let (pair, mut a, _b) = or_skip!(pair_with_ports());
    let to = path(&pair.a, &mut a, A4, B4);
    let longest = a.io.limits.bytes;
    assert!(a.reserve(to.id, longest + 1).is_none());
    assert_eq!(a.reserve(to.id, longest).map(|slot| slot.buf.len()), Some(longest));
}

#[test]
fn identifications_stay_below_128_and_runs_end_there() {
    let (pair, mut a, mut b) = or_skip!(pair_with_ports());
    let to = path(&pair.a, &mut a, A4, B4);
    assert_eq!(send(&mut a, to.id, &[80; 50]), (0..50).collect::<Vec<_>>());
    // A long run is cut where the identifications end, and the next one restarts at 0.
    assert_eq!(send(&mut a, to.id, &[80; 200]), (50..128).chain(0..122).collect::<Vec<_>>());
    assert_eq!(receive(&mut b, 250).len(), 250);
    assert_eq!(b.stats().rx_runs, 3);
    // Too few are left for a useful run.
    assert_eq!(send(&mut a, to.id, &[80; 2]), [0, 1]);
    let six = path(&pair.a, &mut a, A6, B6);
    assert_eq!(send(&mut a, six.id, &[80; 128]), [0; 128]);
    assert_eq!(receive(&mut b, 130).len(), 130);
    assert_eq!(b.stats().rx_runs, 5, "IPv6 has no such limit");
}

#[test]
fn segmented_on_the_way_every_frame_carries_the_promised_identification() {
    let pair = or_skip!(needs(&["ethtool"]).and_then(|()| Pair::new()));
    pair.a.sh("ethtool -K v0 tx-udp-segmentation off");
    let (mut a, mut b) = ports(&pair);
    for (local, remote) in [(A4, B4), (A6, B6)] {
        let to = path(&pair.a, &mut a, local, remote);
        let lens = [vec![1044; 61], vec![9]].concat();
        let before = b.stats().rx_runs;
        let ids = send(&mut a, to.id, &lens);
        let got = receive(&mut b, lens.len());
        check_payloads(&got, &lens);
        assert_eq!(b.stats().rx_runs - before, 62, "62 frames on the wire");
        if remote == B4 {
            let want: Vec<RxIpId> =
                ids.iter().map(|id| RxIpId::Exact { id: *id, flags: 0x4000 }).collect();
            assert_eq!(got.iter().map(|g| g.ip_id).collect::<Vec<_>>(), want);
        }
    }
    let apart = a.runs().departed.expect("it counts");
    assert_eq!(apart.runs, apart.datagrams, "each datagram is a run, as on the wire");
    pair.a.sh("ethtool -K v0 tx-udp-segmentation on");
    pair.a.run(|| a.maintain());
    let to = path(&pair.a, &mut a, A4, B4);
    send(&mut a, to.id, &[1044; 20]);
    let whole = a.runs().departed.expect("it counts");
    assert_eq!(whole.datagrams - apart.datagrams, 20);
    assert!(whole.runs - apart.runs <= 2, "the change was announced: {whole:?}");
}

#[test]
fn frames_without_segmentation_are_the_same() {
    let (pair, _, mut b) = or_skip!(pair_with_ports());
    let config = PortConfig { no_segmentation: true, ..PortConfig::default() };
    let mut a = open_on(&pair.a, "v0", &[A4, A6], &config);
    assert_eq!(a.capabilities().segments_max, 1);
    for (local, remote) in [(A4, B4), (A6, B6)] {
        let to = path(&pair.a, &mut a, local, remote);
        send(&mut a, to.id, &[700; 100]);
        check_payloads(&receive(&mut b, 100), &[700; 100]);
    }
    assert_eq!(b.stats().rx_runs, 200);
}

#[test]
fn a_udp_socket_takes_what_the_port_sends() {
    // Also the checksums: a socket verifies them where they are not partial.
    let pair = or_skip!(needs(&["ethtool"]).and_then(|()| Pair::new()));
    pair.a.sh("ethtool -K v0 tx-udp-segmentation off tx off");
    let (mut a, b) = ports(&pair);
    drop(b);
    for (local, remote) in [(A4, B4), (A6, B6)] {
        let bind = || std::net::UdpSocket::bind((ip(remote), ROCE_PORT));
        let errno = |e: &io::Error| e.raw_os_error().unwrap_or(0);
        let socket = pair.b.run(|| once_free(bind, errno)).expect("a socket");
        socket.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
        let to = path(&pair.a, &mut a, local, remote);
        send(&mut a, to.id, &[501; 3]);
        send(&mut a, to.id, &[33]);
        let mut buf = [0; 2000];
        for (index, len) in [501, 501, 501, 33].into_iter().enumerate() {
            let (got, from) = socket.recv_from(&mut buf).expect("a datagram");
            assert_eq!((got, from.ip(), from.port()), (len, ip(local), to.src_port));
            assert_eq!(buf[..got], payload(index % 3, len));
        }
    }
}

#[test]
fn a_cold_neighbour_is_resolved_by_the_kernel() {
    let pair = or_skip!(Pair::new());
    for (local, remote) in [(A4, B4), (A6, B6)] {
        let config = PortConfig::default();
        let mut a = open_on(&pair.a, "v0", &[A4, A6], &config);
        let mut b = open_on(&pair.b, "v0", &[B4, B6], &config);
        let to = path(&pair.a, &mut a, local, remote);
        pair.a.sh("ip neigh flush dev v0");
        a.turns_to_guard(to.id);
        send(&mut a, to.id, &[300; 5]);
        assert_eq!(a.stats().tx_unresolved, 5, "{remote}");
        let got = receive(&mut b, 5);
        check_payloads(&got, &[300; 5]);
        assert!(got.iter().all(|g| g.src_port == to.src_port), "the same source port either way");
        wait_until("it is resolved", || {
            look_after(&mut a, 20);
            send(&mut a, to.id, &[9]);
            receive(&mut b, 1);
            a.stats().tx_unresolved == a.stats().tx_datagrams - 1
        });
        assert_eq!(b.stats().rx_malformed, 0);
    }
}

#[test]
fn what_waits_is_not_overtaken_and_keeps_no_other_path_from_looking() {
    let (pair, mut a, mut b) = or_skip!(pair_with_ports());
    // Let news about each other settle first.
    let [held, other] = [(A4, B4), (A6, B6)].map(|(from, to)| path(&pair.a, &mut a, from, to).id);
    for path in [held, other] {
        wait_until("it is resolved", || {
            look_after(&mut a, 50);
            a.flush(crate::testing::no_failure);
            matches!(a.paths.hop(path), Some(Hop::Direct(_)))
        });
    }
    commit(&mut a, held, &[1]);
    pair.a.sh("ip neigh change 10.9.0.2 dev v0 nud stale
               ip neigh change fd09::2 dev v0 nud stale");
    a.turns_to_guard(other);
    assert!(a.reserve(held, 2).is_none() && a.wants_write(), "it would be overtaken");
    a.flush(crate::testing::no_failure);
    assert!(matches!(a.paths.hop(held), Some(Hop::Guard(_))), "the kernel is to look");
    send(&mut a, held, &[2]);
    send(&mut a, held, &[3]);
    let lens: Vec<usize> = receive(&mut b, 3).iter().map(|got| got.payload.len()).collect();
    assert_eq!(lens, [1, 2, 3]);
}

#[test]
fn an_unreachable_neighbour_costs_datagrams_and_nothing_else() {
    let (pair, mut a, mut b) = or_skip!(pair_with_ports());
    let dead = path(&pair.a, &mut a, A4, "10.9.0.77");
    let live = path(&pair.a, &mut a, A4, B4);
    for _ in 0..50 {
        commit(&mut a, dead.id, &[64; 4]);
        commit(&mut a, live.id, &[64; 4]);
        a.flush(|failure| assert_eq!(failure.path, dead.id));
        a.maintain();
    }
    assert_eq!(receive(&mut b, 200).len(), 200);
}

#[test]
fn a_full_ring_drops_and_counts() {
    let (pair, mut a, b) = or_skip!(pair_with_ports());
    drop(b);
    let config = PortConfig { packet: PacketConfig { ring_frames: 8 }, ..PortConfig::default() };
    let mut b = open_on(&pair.b, "v0", &[B4, B6], &config);
    assert_eq!(b.capabilities().rx_budget.datagrams, 6);
    let to = path(&pair.a, &mut a, A4, B4);
    for _ in 0..20 {
        send(&mut a, to.id, &[64]);
    }
    wait_until("all others are dropped", || b.stats().rx_queue_drops >= 12);
    assert_eq!(receive(&mut b, 8).len(), 8);
    assert_eq!((b.stats().rx_queue_drops, b.stats().rx_queue_drops), (12, 12), "it only grows");
    send(&mut a, to.id, &[64]);
    assert_eq!(receive(&mut b, 1).len(), 1, "there is room again");
}

#[test]
fn the_budget_never_overruns_the_ring() {
    let (pair, mut a, mut b) = or_skip!(pair_with_ports());
    let budget = b.capabilities().rx_budget;
    assert!(budget.datagrams >= 256 - 256 / 4);
    let to = path(&pair.a, &mut a, A4, B4);
    // The worst case: every datagram is a frame of its own.
    for len in [1, 4116] {
        assert!(budget.datagrams * RxBudget::cost(len as u32) <= budget.bytes);
        for _ in 0..budget.datagrams {
            send(&mut a, to.id, &[len]);
        }
        assert_eq!(receive(&mut b, budget.datagrams as usize).len(), budget.datagrams as usize);
    }
    assert_eq!(b.stats().rx_queue_drops, 0);
}

#[test]
fn a_neighbours_flooded_frames_are_not_taken() {
    let (pair, mut a, mut b) = or_skip!(pair_with_ports());
    // As flooded by a bridge: another machine's frame, and our Ethernet address with another IP.
    pair.a.sh("ip neigh add 10.9.0.3 lladdr 02:00:00:00:09:03 dev v0
               ip neigh add 10.9.0.4 lladdr 02:00:00:00:09:02 dev v0
               ip neigh add fd09::4 lladdr 02:00:00:00:09:02 dev v0
               ip neigh replace 10.9.0.2 lladdr 02:00:00:00:09:03 dev v0");
    for (local, remote) in [(A4, "10.9.0.3"), (A4, "10.9.0.4"), (A6, "fd09::4"), (A4, B4)] {
        let to = path(&pair.a, &mut a, local, remote);
        send(&mut a, to.id, &[100; 3]);
    }
    let to = path(&pair.a, &mut a, A6, B6);
    send(&mut a, to.id, &[55]);
    check_payloads(&receive(&mut b, 1), &[55]);
    assert_eq!(b.stats().rx_malformed, 0);
}

#[test]
fn a_full_queueing_discipline_is_a_failure_at_once() {
    let pair = or_skip!(needs(&["tc"]).and_then(|()| Pair::new()));
    pair.a.sh("tc qdisc add dev v0 root tbf rate 1mbit burst 70000 limit 140000");
    let (mut a, _b) = ports(&pair);
    let to = path(&pair.a, &mut a, A4, B4);
    let mut failures = Vec::new();
    for _ in 0..10 {
        commit(&mut a, to.id, &[4116; 15]);
        a.flush(|failure| failures.push(failure));
        assert!(!a.wants_write());
    }
    assert!(!failures.is_empty());
    for failure in &failures {
        assert_eq!((failure.path, failure.datagrams, failure.errno), (to.id, 15, libc::ENOBUFS));
    }
    assert_eq!(a.stats().tx_failed, 15 * failures.len() as u64);
    assert_eq!(a.stats().tx_datagrams + a.stats().tx_failed, 150);
}

#[test]
fn two_ports_meet_on_the_loopback_interface() {
    let ns = or_skip!(NetNs::new());
    let config = PortConfig::default();
    let mut a = open_on(&ns, "lo", &["127.0.0.1"], &config);
    let mut b = open_on(&ns, "lo", &["127.0.0.2"], &config);
    let to_b = path(&ns, &mut a, "127.0.0.1", "127.0.0.2");
    let to_a = path(&ns, &mut b, "127.0.0.2", "127.0.0.1");
    let lens = [vec![4116; 15], vec![80; 20]].concat();
    send(&mut a, to_b.id, &lens);
    check_payloads(&receive(&mut b, lens.len()), &lens);
    send(&mut b, to_a.id, &lens);
    check_payloads(&receive(&mut a, lens.len()), &lens);
    assert_eq!(drain(&mut b).len(), 0, "nothing comes twice");
}

#[test]
fn garbage_is_counted_and_does_not_hold_the_receiver() {
    let (_pair, a, mut b) = or_skip!(pair_with_ports());
    let mut damaged = Vec::new();
    for (v6, at) in [(false, 38), (false, 39), (true, 58), (true, 59)] {
        // A UDP length that does not fit: the filter lets it pass.
        let (local, remote) = if v6 { (A6, B6) } else { (A4, B4) };
        let spec = PathSpec { src_port: 0, ttl: 9, ..spec(local, remote) };
        let to = [2, 0, 0, 0, 9, 2];
        let template = FrameTemplate::new([2; 6], to, &spec, 1).expect("one family");
        let mut frame = vec![0; template.header_len() + 64];
        template.write(&mut frame, 64, 0);
        frame[at] ^= 0x80;
        damaged.push(frame);
    }
    let vnet = vnet::outgoing(0, 0, false, None);
    let mut scratch = SendScratch::new();
    let mut kernel = Transmit { socket: &a.io.socket, scratch: &mut scratch };
    for _ in 0..10 {
        let frames = damaged.iter().map(|frame| [&vnet[..], &frame[..]]);
        assert_eq!(tx::FrameSink::send(&mut kernel, frames).expect("sent"), 4);
    }
    assert!(arrives(&mut b));
    assert_eq!(
        b.receive_by(16, &mut |_| panic!("garbage")).expect("alive"),
        16,
        "the queue is not empty"
    );
    assert_eq!(b.stats().rx_malformed, 16, "no more than the budget at once");
    assert!(arrives(&mut b), "the rest still waits");
    while b.stats().rx_malformed < 40 {
        b.receive_by(16, &mut |_| panic!("garbage")).expect("alive");
    }
    assert!(!has_arrivals(&mut b));
}
