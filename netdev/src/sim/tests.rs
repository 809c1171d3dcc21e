use super::*;
use crate::kernel::descriptors::wait_readable;
use crate::testing::ReceiveBy as _;

const A: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));
const B: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2));
const C: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 3));
const A6: IpAddr = IpAddr::V6(std::net::Ipv6Addr::new(0xFD00, 0, 0, 0, 0, 0, 0, 1));

/// Datagrams handed up: number written by the sender, and length.
type Trace = Vec<(u32, usize)>;

fn spec(local: IpAddr, remote: IpAddr) -> PathSpec {
    PathSpec { local, remote, src_port: 0xC000, tos: 2, ttl: 64, flow_label: 0 }
}

fn pair() -> (SimNet, SimPort, SimPort, PathId) {
    let net = SimNet::new();
    let mut a = net.port(&[A], &SimConfig::default()).unwrap();
    let b = net.port(&[B], &SimConfig::default()).unwrap();
    let path = a.add_path(&spec(A, B)).unwrap().id;
    (net, a, b, path)
}

/// Sends `count` datagrams of `len` bytes, each with its number in front; flushes after each 16.
fn send(port: &mut SimPort, path: PathId, count: u32, len: usize) {
    for i in 0..count {
        let slot = port.reserve(path, len).unwrap();
        slot.buf.fill(0);
        slot.buf[..4].copy_from_slice(&i.to_be_bytes());
        port.commit();
        if i % 16 == 15 {
            port.flush(crate::testing::no_failure);
        }
    }
    port.flush(crate::testing::no_failure);
}

/// Everything that has arrived.
fn drain(port: &mut SimPort) -> Trace {
    let mut trace = Vec::new();
    let mut sink = |d: RxDatagram<'_>| {
        let number = d.payload.first_chunk().map_or(u32::MAX, |n| u32::from_be_bytes(*n));
        trace.push((number, d.payload.len()));
    };
    while port.receive(usize::MAX, &mut sink).unwrap() > 0 {}
    trace
}

/// Also where datagrams read before and those read now make up the burst.
#[test]
fn a_burst_is_no_longer_than_it_may_be() {
    let (_net, mut a, mut b, path) = pair();
    let received = |b: &mut SimPort, budget| b.receive_by(budget, &mut |_| ()).unwrap();
    send(&mut a, path, 3, 64);
    assert_eq!(received(&mut b, 2), 2);
    send(&mut a, path, 3, 64);
    let bursts = [2; 4].map(|budget| received(&mut b, budget));
    assert!(bursts.iter().all(|burst| *burst <= 2), "{bursts:?}");
    assert_eq!(bursts.iter().sum::<usize>(), 4);
}

#[test]
fn all_arrive_in_their_order() {
    let (net, mut a, mut b, path) = pair();
    for _ in 0..20 {
        send(&mut a, path, 1000, 64);
        assert_eq!(drain(&mut b), (0..1000).map(|i| (i, 64)).collect::<Trace>());
    }
    assert_eq!(net.stats(), SimStats { sent: 20_000, delivered: 20_000, unroutable: 0 });
}

#[test]
fn a_full_receive_queue_drops_and_counts() {
    let net = SimNet::new();
    let budget = RxBudget { bytes: 64 * RxBudget::cost(64), datagrams: 1000 };
    let few = SimConfig { rx_budget: budget, ..SimConfig::default() };
    let mut a = net.port(&[A], &SimConfig::default()).unwrap();
    let mut b = net.port(&[B], &few).unwrap();
    let path = a.add_path(&spec(A, B)).unwrap().id;
    send(&mut a, path, 100, 64);
    assert_eq!(drain(&mut b).len(), 64);
    assert_eq!(b.stats().rx_queue_drops, 36);
    // The budget's number of datagrams always fits.
    send(&mut a, path, 64, 64);
    assert_eq!(drain(&mut b).len(), 64);
    assert_eq!(b.stats().rx_queue_drops, 36);
}

#[test]
fn a_tap_sees_all_and_can_drop() {
    let (net, mut a, mut b, path) = pair();
    net.set_tap(Some(Box::new(|d| {
        assert_eq!((d.src, d.dst, d.payload.len()), (A, B, 64));
        if d.payload[3] == 2 { Verdict::Drop } else { Verdict::Pass }
    })));
    send(&mut a, path, 4, 64);
    let numbers = |trace: Trace| trace.iter().map(|d| d.0).collect::<Vec<_>>();
    assert_eq!(numbers(drain(&mut b)), [0, 1, 3]);
    net.set_tap(None);
    send(&mut a, path, 4, 64);
    assert_eq!(numbers(drain(&mut b)), [0, 1, 2, 3]);
    assert_eq!(net.stats(), SimStats { sent: 8, delivered: 7, unroutable: 0 });
}

#[test]
fn identifications_are_as_the_ports_say() {
    let exact = |id| RxIpId::Exact { id, flags: 0x4000 };
    let hint = RxIpId::Hint;
    let cases = [
        (SimIpId::Exact, vec![exact(0), exact(1), exact(2), exact(3)], [0, 1, 2, 3]),
        (SimIpId::Hint, vec![hint(0), hint(1), hint(0), hint(0)], [0, 1, 0, 0]),
    ];
    for (ip_id, expected, sealed) in cases {
        let net = SimNet::new();
        let config = SimConfig { ip_id, ..SimConfig::default() };
        let mut a = net.port(&[A], &config).unwrap();
        let mut b = net.port(&[B], &config).unwrap();
        let path = a.add_path(&spec(A, B)).unwrap().id;
        let mut ids = Vec::new();
        for len in [50, 50, 80, 90] {
            ids.push(a.reserve(path, len).unwrap().ip_id);
            a.commit();
        }
        a.flush(crate::testing::no_failure);
        let mut got = Vec::new();
        let sink = |d: RxDatagram<'_>| {
            assert_eq!((d.src, d.dst, d.src_port, d.tos), (A, B, 0xC000, Some(2)));
            got.push(d.ip_id);
        };
        b.receive(10, sink).unwrap();
        assert_eq!((ids, got), (sealed.to_vec(), expected), "{ip_id:?}");
        assert_eq!((a.stats().tx_runs, b.stats().rx_runs), (3, 3));
    }
}

#[test]
fn ipv6_and_the_own_address_work() {
    let net = SimNet::new();
    let mut a = net.port(&[A, A6], &SimConfig::default()).unwrap();
    let path = a.add_path(&spec(A6, A6)).unwrap().id;
    assert_eq!(a.reserve(path, 10).unwrap().ip_id, 0);
    a.commit();
    a.flush(crate::testing::no_failure);
    let check = |d: RxDatagram<'_>| assert_eq!((d.src, d.dst, d.ip_id), (A6, A6, RxIpId::None));
    assert_eq!(a.receive(10, check).unwrap(), 1);
}

#[test]
fn what_a_port_cannot_do_is_refused() {
    let (net, mut a, b, path) = pair();
    assert_eq!(
        net.port(&[B], &SimConfig::default()).err().unwrap().kind(),
        io::ErrorKind::AddrInUse
    );
    assert!(net.port(&[], &SimConfig::default()).is_err());
    assert!(a.add_path(&spec(B, A)).is_err());
    assert!(a.add_path(&spec(A, A6)).is_err());
    // 9000 bytes of MTU take 8972 of payload.
    for (len, ok) in [(8972, true), (8973, false)] {
        a.reserve(path, len).unwrap();
        a.commit();
        let mut failures = Vec::new();
        a.flush(|f| failures.push((f.path, f.datagrams, f.errno)));
        let expected = if ok { vec![] } else { vec![(path, 1, libc::EMSGSIZE)] };
        assert_eq!(failures, expected);
    }
    assert_eq!((a.stats().tx_failed, a.stats().tx_datagrams), (1, 1));
    // A removed path takes no datagrams; a removed device receives none.
    a.reserve(path, 10).unwrap();
    a.commit();
    a.remove_path(path);
    assert!(a.reserve(path, 10).is_none());
    drop(b);
    a.flush(crate::testing::no_failure);
    assert_eq!(net.stats().unroutable, 1);
    net.port(&[B], &SimConfig::default()).unwrap();
}

#[test]
fn the_budget_of_a_receive_is_kept_and_the_descriptor_tells_of_the_rest() {
    let (_net, mut a, mut b, path) = pair();
    assert!(!wait_readable(b.wait_fd(), 0).unwrap());
    send(&mut a, path, 10, 64);
    assert!(wait_readable(b.wait_fd(), 0).unwrap());
    assert_eq!(b.receive_by(4, &mut |_| ()).unwrap(), 4);
    assert!(wait_readable(b.wait_fd(), 0).unwrap());
    assert_eq!(b.receive_by(6, &mut |_| ()).unwrap(), 6);
    assert_eq!(b.receive_by(6, &mut |_| ()).unwrap(), 0);
    assert!(!wait_readable(b.wait_fd(), 0).unwrap());
}

#[test]
fn more_than_a_flush_takes_is_refused_until_then() {
    let (_net, mut a, mut b, path) = pair();
    let mut count = 0;
    while a.reserve(path, 4120).is_some() {
        a.commit();
        count += 1;
    }
    assert!(count >= 60, "{count}");
    a.flush(crate::testing::no_failure);
    assert!(a.reserve(path, 4120).is_some());
    assert_eq!(b.receive_by(usize::MAX, &mut |_| ()).unwrap(), count);
}

#[test]
fn a_group_is_for_those_who_have_joined() {
    let net = SimNet::new();
    let mut ports = [A, B, C].map(|own| net.port(&[own], &SimConfig::default()).unwrap());
    let group = IpAddr::from([239, 0, 0, 9]);
    ports[0].join(group).unwrap();
    ports[1].join(group).unwrap();
    assert!(ports[2].join(A).is_err(), "no group");
    let path = ports[0].add_path(&spec(A, group)).unwrap().id;
    let heard = |ports: &mut [SimPort; 3]| {
        send(&mut ports[0], path, 1, 9);
        ports.each_mut().map(|port| port.receive_by(9, &mut |d| assert_eq!(d.dst, group)).unwrap())
    };
    assert_eq!(heard(&mut ports), [1, 1, 0]);
    ports[0].leave(group);
    assert_eq!(heard(&mut ports), [0, 1, 0]);
    drop(net);
}

/// Each datagram as a port sees it: its first byte, its source, and its identification.
fn identified(port: &mut SimPort) -> Vec<(u8, IpAddr, RxIpId)> {
    let mut got = Vec::new();
    port.receive_by(usize::MAX, &mut |d| got.push((d.payload[0], d.src, d.ip_id))).unwrap();
    got
}

#[test]
fn a_path_with_a_reused_id_joins_no_run_of_the_one_before() {
    for ip_id in [SimIpId::Exact, SimIpId::Hint] {
        let net = SimNet::new();
        let config = SimConfig { ip_id, ..SimConfig::default() };
        let mut a = net.port(&[A, C], &config).unwrap();
        let mut b = net.port(&[B], &config).unwrap();
        let mut next = 0;
        for round in 0..4 {
            let mut paths = Vec::new();
            for (mark, own) in [(1, A), (2, C), (3, A)] {
                let path = a.add_path(&spec(own, B)).unwrap().id;
                for index in 0..3 {
                    let slot = a.reserve(path, 100).unwrap();
                    slot.buf.fill(mark);
                    let expected = if ip_id == SimIpId::Exact { next } else { index };
                    assert_eq!(slot.ip_id, expected, "round {round}");
                    next += 1;
                    a.commit();
                }
                paths.push(path);
                a.remove_path(path);
                assert!(a.reserve(path, 100).is_none());
            }
            assert!(paths.iter().all(|path| *path == paths[0]), "one id");
            a.flush(crate::testing::no_failure);
            let got = identified(&mut b);
            let from: Vec<_> = got.iter().map(|(mark, src, _)| (*mark, *src)).collect();
            assert_eq!(from, [vec![(1, A); 3], vec![(2, C); 3], vec![(3, A); 3]].concat());
            for (at, (.., known)) in (0..).zip(got) {
                let first = 9 * round;
                let exact = RxIpId::Exact { id: first + at, flags: 0x4000 };
                let hint = RxIpId::Hint(at % 3);
                assert_eq!(known, if ip_id == SimIpId::Exact { exact } else { hint });
            }
        }
    }
}

#[test]
fn a_port_that_takes_anothers_place_has_nothing_of_it() {
    let (net, mut a, mut b, to_b) = pair();
    let group = IpAddr::from([239, 1, 2, 3]);
    let to_group = a.add_path(&spec(A, group)).unwrap().id;
    for round in 0..3 {
        b.join(group).unwrap();
        assert!(!wait_readable(b.wait_fd(), 0).unwrap());
        send(&mut a, to_b, 3, 64);
        send(&mut a, to_group, 3, 64);
        assert!(wait_readable(b.wait_fd(), 0).unwrap());
        drop(b);
        let mut c = net.port(&[C], &SimConfig::default()).unwrap();
        assert!(!wait_readable(c.wait_fd(), 0).unwrap());
        let lost = net.stats().unroutable;
        send(&mut a, to_b, 3, 64);
        send(&mut a, to_group, 3, 64);
        assert_eq!(drain(&mut c), [], "round {round}");
        // The group has no member any more.
        assert_eq!(net.stats().unroutable, lost + 3);
        assert!(!wait_readable(c.wait_fd(), 0).unwrap());
        drop(c);
        b = net.port(&[B], &SimConfig::default()).unwrap();
        assert_eq!((drain(&mut b), b.stats()), (vec![], PortStats::default()));
    }
}

/// Whether the descriptor is readable, and whether it is writable, as poll sees it.
fn ready(port: &SimPort) -> [bool; 2] {
    [crate::kernel::descriptors::Interest::Read, crate::kernel::descriptors::Interest::Write].map(
        |interest| {
            let set = crate::kernel::descriptors::Epoll::new().unwrap();
            set.add(port.wait_fd(), interest).unwrap();
            wait_readable(&set, 0).unwrap()
        },
    )
}

#[test]
fn a_port_behind_a_shut_gate_keeps_what_it_is_given_and_is_not_writable() {
    let net = SimNet::new();
    let (mut a, gate) = net.gated_port(&[A], &SimConfig::default()).unwrap();
    let mut b = net.port(&[B], &SimConfig::default()).unwrap();
    let to_b = a.add_path(&spec(A, B)).unwrap().id;
    let to_a = b.add_path(&spec(B, A)).unwrap().id;
    assert_eq!((ready(&a), a.wants_write()), ([false, true], false));
    for round in 0..3 {
        gate.shut();
        send(&mut a, to_b, 40, 100);
        assert_eq!((ready(&a), a.wants_write()), ([false, false], true), "{round}");
        assert_eq!(drain(&mut b), []);
        // Arrivals are signalled as before.
        send(&mut b, to_a, 1, 100);
        assert_eq!(ready(&a), [true, false], "{round}");
        assert_eq!(drain(&mut a).len(), 1);
        assert_eq!(drain(&mut a), []);
        gate.open();
        assert_eq!((ready(&a), a.wants_write()), ([false, true], true), "{round}");
        a.flush(crate::testing::no_failure);
        assert!(!a.wants_write());
        assert_eq!(drain(&mut b).len(), 40);
        assert_eq!(a.stats().tx_datagrams, 40 * (round + 1));
    }
}
