use super::*;
use crate::kernel::descriptors::wait_readable;

const A: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));
const B: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2));
const C: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 3));
const A6: IpAddr = IpAddr::V6(std::net::Ipv6Addr::new(0xFD00, 0, 0, 0, 0, 0, 0, 1));

/// Datagrams handed up: number written by the sender, length, time.
type Trace = Vec<(u32, usize, Duration)>;

fn spec(local: IpAddr, remote: IpAddr) -> PathSpec {
    PathSpec { local, remote, src_port: 0xC000, tos: 2, ttl: 64, flow_label: 0 }
}

fn pair(seed: u64) -> (SimNet, SimPort, SimPort, PathId) {
    let net = SimNet::new(seed);
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
            port.flush(|failure| panic!("{failure:?}"));
        }
    }
    port.flush(|failure| panic!("{failure:?}"));
}

/// Runs the clock from event to event and collects arrivals.
fn drain(net: &SimNet, port: &mut SimPort) -> Trace {
    let mut trace = Vec::new();
    loop {
        let now = net.now();
        let sink = |d: RxDatagram<'_>| {
            let number = d.payload.first_chunk().map_or(u32::MAX, |n| u32::from_be_bytes(*n));
            trace.push((number, d.payload.len(), now));
        };
        port.receive(usize::MAX, sink).unwrap();
        match net.next_event() {
            Some(next) => net.advance_to(next),
            None => return trace,
        }
    }
}

/// Also where datagrams read before and those read now make up the burst.
#[test]
fn a_burst_is_no_longer_than_it_may_be() {
    let (net, mut a, mut b, path) = pair(1);
    let received = |b: &mut SimPort, budget| {
        while let Some(next) = net.next_event() {
            net.advance_to(next);
        }
        b.receive(budget, |_| ()).unwrap()
    };
    send(&mut a, path, 3, 64);
    assert_eq!(received(&mut b, 2), 2);
    send(&mut a, path, 3, 64);
    let bursts = [2; 4].map(|budget| received(&mut b, budget));
    assert!(bursts.iter().all(|burst| *burst <= 2), "{bursts:?}");
    assert_eq!(bursts.iter().sum::<usize>(), 4);
}

/// Sends 20,000 datagrams over this link.
fn run(seed: u64, link: LinkConfig) -> (SimStats, Trace) {
    let (net, mut a, mut b, path) = pair(seed);
    net.set_link(A, B, link);
    let mut trace = Vec::new();
    for _ in 0..20 {
        send(&mut a, path, 1000, 64);
        trace.extend(drain(&net, &mut b));
    }
    (net.stats(), trace)
}

fn all_faults() -> LinkConfig {
    LinkConfig {
        delay: Duration::from_micros(3),
        jitter: Duration::from_micros(1),
        drop_ppm: 20_000,
        burst_ppm: 5_000,
        burst_max: 8,
        duplicate_ppm: 10_000,
        reorder_ppm: 10_000,
        reorder_delay: Duration::from_micros(20),
        corrupt_ppm: 10_000,
        truncate_ppm: 10_000,
        mark_ppm: 10_000,
        every: 400,
        rate: Some(Rate { bits_per_second: 10_000_000_000, queue_bytes: 60_000 }),
        ..LinkConfig::default()
    }
}

#[test]
fn the_same_seed_gives_the_same_network_and_another_seed_another() {
    let first = run(1, all_faults());
    assert_eq!(first, run(1, all_faults()));
    assert_ne!(first.1, run(2, all_faults()).1);
}

#[test]
fn every_datagram_is_accounted_for() {
    let (stats, trace) = run(3, all_faults());
    assert_eq!(stats.sent, 20_000);
    let lost = stats.dropped + stats.dropped_in_bursts + stats.dropped_by_rate;
    assert!(stats.dropped > 0 && stats.dropped_in_bursts > 0 && stats.dropped_by_rate > 0);
    assert_eq!(stats.sent - lost + stats.duplicated, stats.delivered);
    assert_eq!(stats.delivered, trace.len() as u64);
    assert_eq!((stats.unroutable, stats.dropped_at_receiver, stats.dropped_by_tap), (0, 0, 0));
}

#[test]
fn a_perfect_link_changes_nothing() {
    let (stats, trace) = run(1, LinkConfig::default());
    assert_eq!(trace, (0..20_000).map(|i| (i % 1000, 64, Duration::ZERO)).collect::<Trace>());
    assert_eq!(stats, SimStats { sent: 20_000, delivered: 20_000, ..SimStats::default() });
}

#[test]
fn losses_come_singly_and_in_bursts() {
    let (stats, trace) = run(4, LinkConfig { drop_ppm: 10_000, ..LinkConfig::default() });
    assert!((140..260).contains(&stats.dropped), "{stats:?}");
    assert_eq!(trace.len() as u64, 20_000 - stats.dropped);

    let bursts = LinkConfig { burst_ppm: 1_000, burst_max: 64, ..LinkConfig::default() };
    let (stats, trace) = run(4, bursts);
    // About 20 bursts of 32.
    assert!((200..1600).contains(&stats.dropped_in_bursts), "{stats:?}");
    let gaps = trace.windows(2).filter(|w| w[1].0 > w[0].0 + 1).count();
    assert!(gaps as u64 * 8 < stats.dropped_in_bursts, "{gaps} gaps, {stats:?}");
}

#[test]
fn duplicates_arrive_twice() {
    let (stats, trace) = run(5, LinkConfig { duplicate_ppm: 10_000, ..LinkConfig::default() });
    assert!((140..260).contains(&stats.duplicated), "{stats:?}");
    assert_eq!(trace.windows(2).filter(|w| w[0].0 == w[1].0).count() as u64, stats.duplicated);
    assert_eq!(trace.len() as u64, 20_000 + stats.duplicated);
}

#[test]
fn late_datagrams_are_overtaken() {
    let reorder_delay = Duration::from_micros(50);
    let link = LinkConfig { reorder_ppm: 10_000, reorder_delay, ..LinkConfig::default() };
    let (stats, trace) = run(6, link);
    assert!((140..260).contains(&stats.reordered), "{stats:?}");
    assert_eq!(trace.len(), 20_000);
    let overtaken = trace.windows(2).filter(|w| w[1].0 < w[0].0).count();
    assert!(overtaken > 100, "{overtaken}");

    // With jitter, all of them are reordered.
    let link = LinkConfig { jitter: Duration::from_micros(50), ..LinkConfig::default() };
    let (stats, trace) = run(6, link);
    assert_eq!((stats.delivered, trace.len()), (20_000, 20_000));
    assert!(trace.windows(2).filter(|w| w[1].0 < w[0].0).count() > 5_000);
}

#[test]
fn any_single_bit_may_flip_that_the_icrc_covers() {
    let (net, mut a, mut b, path) = pair(7);
    net.set_link(A, B, LinkConfig { corrupt_ppm: 1_000_000, ..LinkConfig::default() });
    let mut flips = [0_u32; 64];
    for _ in 0..1000 {
        a.reserve(path, 8).unwrap().buf.fill(0);
        a.commit();
        a.flush(|failure| panic!("{failure:?}"));
        let sink = |d: RxDatagram<'_>| {
            let bits = u64::from_be_bytes(d.payload.try_into().unwrap());
            assert_eq!(bits.count_ones(), 1);
            flips[bits.trailing_zeros() as usize] += 1;
        };
        assert_eq!(b.receive(8, sink).unwrap(), 1, "it arrives at once");
    }
    // Byte 4 of eight: the lowest are of the last.
    let is_covered = |bit: usize| bit / 8 != 3;
    let is_right = |(bit, &count): (usize, &u32)| (count > 0) == is_covered(bit);
    assert!(flips.iter().enumerate().all(is_right), "{flips:?}");
    assert_eq!(net.stats().corrupted, 1000);
}

#[test]
fn datagrams_are_cut_to_any_length() {
    let (stats, trace) = run(8, LinkConfig { truncate_ppm: 1_000_000, ..LinkConfig::default() });
    assert_eq!(stats.truncated, 20_000);
    for len in 0..64 {
        assert!(trace.iter().any(|d| d.1 == len), "{len}");
    }
    assert!(trace.iter().all(|d| d.1 < 64));
}

#[test]
fn a_rate_limit_spaces_datagrams_out_and_drops_what_its_queue_cannot_hold() {
    let (net, mut a, mut b, path) = pair(9);
    // 1000 bytes with headers at 8 Mbit/s: one per millisecond.
    let rate = Some(Rate { bits_per_second: 8_000_000, queue_bytes: 4_500 });
    net.set_link(A, B, LinkConfig { rate, ..LinkConfig::default() });
    send(&mut a, path, 10, 958);
    let trace = drain(&net, &mut b);
    let expected: Trace =
        (0..4).map(|i| (i, 958, Duration::from_millis(u64::from(i) + 1))).collect();
    assert_eq!(trace, expected);
    assert_eq!(net.stats().dropped_by_rate, 6);
}

#[test]
fn a_full_receive_queue_drops_and_counts() {
    let net = SimNet::new(10);
    let budget = RxBudget { bytes: 64 * RxBudget::cost(64), datagrams: 1000 };
    let few = SimConfig { rx_budget: budget, ..SimConfig::default() };
    let mut a = net.port(&[A], &SimConfig::default()).unwrap();
    let mut b = net.port(&[B], &few).unwrap();
    let path = a.add_path(&spec(A, B)).unwrap().id;
    send(&mut a, path, 100, 64);
    assert_eq!(drain(&net, &mut b).len(), 64);
    assert_eq!(b.stats().rx_queue_drops, 36);
    assert_eq!(net.stats().dropped_at_receiver, 36);
    // The budget's number of datagrams always fits.
    send(&mut a, path, 64, 64);
    assert_eq!(drain(&net, &mut b).len(), 64);
    assert_eq!(b.stats().rx_queue_drops, 36);
}

#[test]
fn a_tap_sees_all_and_can_drop() {
    let (net, mut a, mut b, path) = pair(11);
    net.set_tap(Some(Box::new(|d| {
        assert_eq!((d.src, d.dst, d.payload.len()), (A, B, 64));
        if d.payload[3] == 2 { Verdict::Drop } else { Verdict::Pass }
    })));
    send(&mut a, path, 4, 64);
    let numbers = |trace: Trace| trace.iter().map(|d| d.0).collect::<Vec<_>>();
    assert_eq!(numbers(drain(&net, &mut b)), [0, 1, 3]);
    net.set_tap(None);
    send(&mut a, path, 4, 64);
    assert_eq!(numbers(drain(&net, &mut b)), [0, 1, 2, 3]);
    assert_eq!(net.stats().dropped_by_tap, 1);
}

#[test]
fn links_have_a_direction_and_their_own_faults() {
    let (net, mut a, mut b, a_to_b) = pair(12);
    let mut c = net.port(&[C], &SimConfig::default()).unwrap();
    let a_to_c = a.add_path(&spec(A, C)).unwrap().id;
    let b_to_a = b.add_path(&spec(B, A)).unwrap().id;
    net.set_link(A, B, LinkConfig { drop_ppm: 1_000_000, ..LinkConfig::default() });
    send(&mut a, a_to_b, 5, 64);
    send(&mut a, a_to_c, 5, 64);
    send(&mut b, b_to_a, 5, 64);
    assert_eq!([&mut b, &mut c, &mut a].map(|port| drain(&net, port).len()), [0, 5, 5]);
    // A new default does not change the link that was set.
    net.set_default_link(LinkConfig { duplicate_ppm: 1_000_000, ..LinkConfig::default() });
    send(&mut a, a_to_b, 5, 64);
    send(&mut a, a_to_c, 5, 64);
    assert_eq!([&mut b, &mut c].map(|port| drain(&net, port).len()), [0, 10]);
}

#[test]
fn identifications_are_as_the_ports_say() {
    let exact = |id| RxIpId::Exact { id, flags: 0x4000 };
    let hint = RxIpId::Hint;
    let cases = [
        (SimIpId::Exact, vec![exact(0), exact(1), exact(2), exact(3)], [0, 1, 2, 3]),
        (SimIpId::Hint, vec![hint(0), hint(1), hint(0), hint(0)], [0, 1, 0, 0]),
        (SimIpId::Solve, vec![hint(0); 4], [0, 1, 0, 0]),
    ];
    for (ip_id, expected, sealed) in cases {
        let net = SimNet::new(13);
        let config = SimConfig { ip_id, ..SimConfig::default() };
        let mut a = net.port(&[A], &config).unwrap();
        let mut b = net.port(&[B], &config).unwrap();
        let path = a.add_path(&spec(A, B)).unwrap().id;
        let mut ids = Vec::new();
        for len in [50, 50, 80, 90] {
            ids.push(a.reserve(path, len).unwrap().ip_id);
            a.commit();
        }
        a.flush(|failure| panic!("{failure:?}"));
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
    let net = SimNet::new(14);
    let mut a = net.port(&[A, A6], &SimConfig::default()).unwrap();
    let path = a.add_path(&spec(A6, A6)).unwrap().id;
    assert_eq!(a.reserve(path, 10).unwrap().ip_id, 0);
    a.commit();
    a.flush(|failure| panic!("{failure:?}"));
    let check = |d: RxDatagram<'_>| assert_eq!((d.src, d.dst, d.ip_id), (A6, A6, RxIpId::None));
    assert_eq!(a.receive(10, check).unwrap(), 1);
}

#[test]
fn what_a_port_cannot_do_is_refused() {
    let (net, mut a, b, path) = pair(15);
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
    a.flush(|failure| panic!("{failure:?}"));
    assert_eq!(net.stats().unroutable, 1);
    net.port(&[B], &SimConfig::default()).unwrap();
}

#[test]
fn the_budget_of_a_receive_is_kept_and_the_descriptor_tells_of_the_rest() {
    let (_net, mut a, mut b, path) = pair(16);
    assert!(!wait_readable(b.wait_fd(), 0).unwrap());
    send(&mut a, path, 10, 64);
    assert!(wait_readable(b.wait_fd(), 0).unwrap());
    assert_eq!(b.receive(4, |_| ()).unwrap(), 4);
    assert!(wait_readable(b.wait_fd(), 0).unwrap());
    assert_eq!(b.receive(6, |_| ()).unwrap(), 6);
    assert_eq!(b.receive(6, |_| ()).unwrap(), 0);
    assert!(!wait_readable(b.wait_fd(), 0).unwrap());
}

#[test]
fn more_than_a_flush_takes_is_refused_until_then() {
    let (_net, mut a, mut b, path) = pair(17);
    let mut count = 0;
    while a.reserve(path, 4120).is_some() {
        a.commit();
        count += 1;
    }
    assert!(count >= 60, "{count}");
    a.flush(|failure| panic!("{failure:?}"));
    assert!(a.reserve(path, 4120).is_some());
    assert_eq!(b.receive(usize::MAX, |_| ()).unwrap(), count);
}

#[test]
fn a_group_is_for_those_who_have_joined() {
    let net = SimNet::new(1);
    let mut ports = [A, B, C].map(|own| net.port(&[own], &SimConfig::default()).unwrap());
    let group = IpAddr::from([239, 0, 0, 9]);
    ports[0].join(group).unwrap();
    ports[1].join(group).unwrap();
    assert!(ports[2].join(A).is_err(), "no group");
    let path = ports[0].add_path(&spec(A, group)).unwrap().id;
    let heard = |ports: &mut [SimPort; 3]| {
        send(&mut ports[0], path, 1, 9);
        ports.each_mut().map(|port| port.receive(9, |d| assert_eq!(d.dst, group)).unwrap())
    };
    assert_eq!(heard(&mut ports), [1, 1, 0]);
    ports[0].leave(group);
    assert_eq!(heard(&mut ports), [0, 1, 0]);
    drop(net);
}

/// Each datagram as a port sees it: its first byte, its source, and its identification.
fn identified(port: &mut SimPort) -> Vec<(u8, IpAddr, RxIpId)> {
    let mut got = Vec::new();
    port.receive(usize::MAX, |d| got.push((d.payload[0], d.src, d.ip_id))).unwrap();
    got
}

#[test]
fn a_path_with_a_reused_id_joins_no_run_of_the_one_before() {
    for ip_id in [SimIpId::Exact, SimIpId::Hint, SimIpId::Solve] {
        let net = SimNet::new(1);
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
            a.flush(|failure| panic!("{failure:?}"));
            let got = identified(&mut b);
            let from: Vec<_> = got.iter().map(|(mark, src, _)| (*mark, *src)).collect();
            assert_eq!(from, [vec![(1, A); 3], vec![(2, C); 3], vec![(3, A); 3]].concat());
            for (at, (.., known)) in (0..).zip(got) {
                let first = 9 * round;
                let exact = RxIpId::Exact { id: first + at, flags: 0x4000 };
                let hint = RxIpId::Hint(if ip_id == SimIpId::Hint { at % 3 } else { 0 });
                assert_eq!(known, if ip_id == SimIpId::Exact { exact } else { hint });
            }
        }
    }
}

#[test]
fn a_port_that_takes_anothers_place_has_nothing_of_it() {
    let (net, mut a, mut b, to_b) = pair(1);
    let group = IpAddr::from([239, 1, 2, 3]);
    let to_group = a.add_path(&spec(A, group)).unwrap().id;
    net.set_default_link(LinkConfig { delay: Duration::from_micros(5), ..LinkConfig::default() });
    for round in 0..3 {
        b.join(group).unwrap();
        assert!(!wait_readable(b.wait_fd(), 0).unwrap());
        // Some have arrived, some are in flight.
        for _ in 0..2 {
            send(&mut a, to_b, 3, 64);
            send(&mut a, to_group, 3, 64);
            net.advance_to(net.now() + Duration::from_micros(3));
        }
        assert!(wait_readable(b.wait_fd(), 0).unwrap());
        assert_eq!(net.hub().flying.len(), 6);
        drop(b);
        let mut c = net.port(&[C], &SimConfig::default()).unwrap();
        assert!(!wait_readable(c.wait_fd(), 0).unwrap());
        let lost = net.stats().unroutable;
        assert_eq!(drain(&net, &mut c), [], "round {round}");
        // Datagrams to the group have no member any more.
        assert_eq!(net.stats().unroutable, lost + 3);
        assert!(!wait_readable(c.wait_fd(), 0).unwrap());
        drop(c);
        b = net.port(&[B], &SimConfig::default()).unwrap();
        assert_eq!((drain(&net, &mut b), b.stats()), (vec![], PortStats::default()));
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
    let net = SimNet::new(1);
    let (mut a, gate) = net.gated_port(&[A], &SimConfig::default()).unwrap();
    let mut b = net.port(&[B], &SimConfig::default()).unwrap();
    let to_b = a.add_path(&spec(A, B)).unwrap().id;
    let to_a = b.add_path(&spec(B, A)).unwrap().id;
    assert_eq!((ready(&a), a.wants_write()), ([false, true], false));
    for round in 0..3 {
        gate.shut();
        send(&mut a, to_b, 40, 100);
        assert_eq!((ready(&a), a.wants_write()), ([false, false], true), "{round}");
        assert_eq!(drain(&net, &mut b), []);
        // Arrivals are signalled as before.
        send(&mut b, to_a, 1, 100);
        assert_eq!(ready(&a), [true, false], "{round}");
        assert_eq!(drain(&net, &mut a).len(), 1);
        assert_eq!(drain(&net, &mut a), []);
        gate.open();
        assert_eq!((ready(&a), a.wants_write()), ([false, true], true), "{round}");
        a.flush(|failure| panic!("{failure:?}"));
        assert!(!a.wants_write());
        assert_eq!(drain(&net, &mut b).len(), 40);
        assert_eq!(a.stats().tx_datagrams, 40 * (round + 1));
    }
}
