//! Bulk leaves by reference, arrives as it was, and is copied where it must be.

use super::*;
use crate::testing::testns::{forbid_call, needs};
use crate::tuning::udp::RING_RUNS;

const LEN: usize = 4120;
/// Datagrams of a long run.
const RUN: usize = 15;

/// Stages `runs` long runs whose datagrams count on from `first`, and sends them.
fn send_runs(port: &mut UdpPort, path: PathId, runs: usize, first: &mut u64) -> Vec<TxFailure> {
    for _ in 0..runs * RUN {
        let slot = port.reserve(path, LEN).expect("room");
        slot.buf.fill(*first as u8);
        // The opcode of a SEND of a reliable connection is in front.
        slot.buf[..8].copy_from_slice(&first.to_be_bytes());
        port.commit();
        *first += 1;
    }
    let mut failures = Vec::new();
    port.flush(|failure| failures.push(failure));
    assert!(!port.wants_write());
    failures
}

/// Receives such datagrams, which count on from `first`.
fn receive_runs(port: &mut UdpPort, runs: usize, first: &mut u64) {
    for got in receive(port, runs * RUN) {
        assert_eq!(got.payload.len(), LEN);
        assert_eq!(got.payload[..8], first.to_be_bytes());
        assert!(got.payload[8..].iter().all(|byte| *byte == *first as u8), "datagram {first}");
        *first += 1;
    }
}

/// Sends two long runs at once and receives them, `times` times.
fn exchange(
    tx: &mut UdpPort,
    path: PathId,
    rx: &mut UdpPort,
    times: usize,
    (sent, got): (&mut u64, &mut u64),
) {
    for _ in 0..times {
        assert!(send_runs(tx, path, 2, sent).is_empty());
        receive_runs(rx, 2, got);
    }
}

/// A port, and two peers at the other end of its link.
fn sender_and_peers(v6: bool, config: &PortConfig) -> io::Result<(Pair, UdpPort, Vec<UdpPort>)> {
    let pair = Pair::new()?;
    pair.b.sh("ip address add 10.9.0.12/24 dev v0; ip address add fd09::12/64 dev v0 nodad");
    let peers = if v6 { ["fd09::2", "fd09::12"] } else { ["10.9.0.2", "10.9.0.12"] };
    let own = if v6 { "fd09::1" } else { "10.9.0.1" };
    let open = |own: &str| {
        UdpPort::open(&Interface::by_name("v0").unwrap(), &[own.parse().unwrap()], config).unwrap()
    };
    let tx = pair.a.run(|| open(own));
    let peers = pair.b.run(|| peers.map(open)).into();
    Ok((pair, tx, peers))
}

fn paths_to(pair: &Pair, tx: &mut UdpPort, peers: &[UdpPort]) -> Vec<PathId> {
    let own = tx.addresses()[0];
    let to: Vec<_> = peers.iter().map(|peer| spec(own, peer.addresses()[0])).collect();
    pair.a.run(|| to.iter().map(|spec| tx.add_path(spec).unwrap().id).collect())
}

#[test]
fn bulk_to_two_peers_arrives_as_it_was_while_their_rings_go_round() {
    for v6 in [false, true] {
        let (pair, mut tx, mut peers) = or_skip!(sender_and_peers(v6, &PortConfig::default()));
        assert_eq!(tx.capabilities().copies_because, None);
        let paths = paths_to(&pair, &mut tx, &peers);
        let (mut sent, mut got) = ([0, 1 << 32], [0, 1 << 32]);
        // Once alone: one long run is not bulk.
        for (at, peer) in peers.iter_mut().enumerate() {
            assert!(send_runs(&mut tx, paths[at], 1, &mut sent[at]).is_empty());
            receive_runs(peer, 1, &mut got[at]);
        }
        assert_eq!(tx.stats().tx_by_reference, 0);
        for _ in 0..2 * RING_RUNS / 3 + 2 {
            for (at, peer) in peers.iter_mut().enumerate() {
                assert!(send_runs(&mut tx, paths[at], 3, &mut sent[at]).is_empty());
                receive_runs(peer, 3, &mut got[at]);
            }
        }
        assert_eq!(tx.staging.rings.count(), 2, "no peer's memory is another's");
        let all = sent[0] + (sent[1] - (1 << 32));
        let copied = all - tx.stats().tx_by_reference;
        assert_eq!(copied as usize, 2 * RUN + 2 * 3 * RUN, "those before bulk was noted");
        assert_eq!(tx.stats().tx_datagrams, all);
    }
}

#[test]
fn a_ring_that_is_not_used_is_freed_and_made_again() {
    let (pair, mut tx, mut peers) = or_skip!(sender_and_peers(false, &PortConfig::default()));
    let paths = paths_to(&pair, &mut tx, &peers);
    let (mut sent, mut got) = (0, 0);
    for _ in 0..2 {
        let before = tx.stats().tx_by_reference;
        exchange(&mut tx, paths[0], &mut peers[0], 3, (&mut sent, &mut got));
        assert!(tx.stats().tx_by_reference > before);
        assert_eq!(tx.staging.rings.count(), 1);
        assert!(send_runs(&mut tx, paths[0], 2, &mut sent).is_empty());
        while let Some(pause) = tx.maintain() {
            std::thread::sleep(pause);
        }
        assert_eq!(tx.staging.rings.count(), 0, "and nothing is to be done any more");
        // The kernel still has the pages of runs that have not arrived.
        receive_runs(&mut peers[0], 2, &mut got);
    }
    // The memory is another peer's now, so a run to the first is no longer in it.
    let (mut other, before) = (1 << 32, tx.stats().tx_by_reference);
    for _ in 0..3 {
        assert!(send_runs(&mut tx, paths[1], 2, &mut other).is_empty());
    }
    assert!(send_runs(&mut tx, paths[0], 1, &mut sent).is_empty());
    receive_runs(&mut peers[0], 1, &mut got);
    assert_eq!((tx.stats().tx_by_reference - before) as usize, 2 * 2 * RUN);
}

#[test]
fn a_datagram_that_is_late_by_a_whole_round_has_later_bytes_of_the_same_peer() {
    let (pair, mut tx, mut peers) = or_skip!(sender_and_peers(false, &PortConfig::default()));
    let paths = paths_to(&pair, &mut tx, &peers);
    let (mut sent, mut got) = ([0, 1 << 32], [0, 1 << 32]);
    for _ in 0..2 {
        for (at, peer) in peers.iter_mut().enumerate() {
            assert!(send_runs(&mut tx, paths[at], 2, &mut sent[at]).is_empty());
            receive_runs(peer, 2, &mut got[at]);
        }
    }
    let (late, round) = (2, RING_RUNS * RUN);
    for _ in 0..(RING_RUNS + late) / 2 {
        for at in [0, 1] {
            assert!(send_runs(&mut tx, paths[at], 2, &mut sent[at]).is_empty());
        }
    }
    for (at, peer) in peers.iter_mut().enumerate() {
        for datagram in receive(peer, round + late * RUN) {
            let number = u64::from_be_bytes(datagram.payload[..8].try_into().unwrap());
            let is_late = got[at] < sent[at] - round as u64;
            assert_eq!(number, got[at] + if is_late { round as u64 } else { 0 });
            got[at] += 1;
        }
        assert_eq!(got[at], sent[at]);
    }
}

#[test]
fn a_peer_for_which_no_memory_is_left_gets_copies() {
    let one = RING_RUNS as u32 * 65_536;
    let udp = UdpConfig { ring_bytes: 2 * one - 1, ..UdpConfig::default() };
    let config = PortConfig { udp, ..PortConfig::default() };
    let (pair, mut tx, mut peers) = or_skip!(sender_and_peers(false, &config));
    let paths = paths_to(&pair, &mut tx, &peers);
    let (mut sent, mut got) = ([0; 2], [0; 2]);
    let mut counts = Vec::new();
    for at in [0, 1] {
        exchange(&mut tx, paths[at], &mut peers[at], 3, (&mut sent[at], &mut got[at]));
        counts.push(tx.stats().tx_by_reference as usize);
    }
    assert_eq!(counts, [2 * 2 * RUN, 2 * 2 * RUN]);
    // Without room for one ring there is none, and the port says so.
    let udp = UdpConfig { ring_bytes: one - 1, ..UdpConfig::default() };
    let config = PortConfig { udp, ..PortConfig::default() };
    let own = loopback();
    let port = UdpPort::open(&lo(), &[own], &config).unwrap();
    let why = port.capabilities().copies_because.clone().unwrap();
    assert!(why.contains("no room"), "{why}");
}

#[test]
fn a_run_that_a_rule_refuses_is_reported_and_nothing_of_it_arrives_later() {
    or_skip!(needs(&["nft"]));
    let (pair, mut tx, mut peers) = or_skip!(sender_and_peers(false, &PortConfig::default()));
    let paths = paths_to(&pair, &mut tx, &peers);
    let (mut sent, mut got) = (0, 0);
    exchange(&mut tx, paths[0], &mut peers[0], 2, (&mut sent, &mut got));
    let before = tx.stats().tx_by_reference;
    assert!(before > 0);
    pair.a.sh("nft 'add table ip t; add chain ip t c { type filter hook output priority 0; }
              add rule ip t c udp dport 4791 drop'");
    let failures = send_runs(&mut tx, paths[0], 2, &mut sent);
    let refused = TxFailure { path: paths[0], datagrams: RUN as u32, errno: libc::EPERM };
    assert_eq!(failures, [refused, refused]);
    assert_eq!(tx.stats().tx_by_reference, before);
    pair.a.sh("nft delete table ip t");
    got = sent;
    exchange(&mut tx, paths[0], &mut peers[0], 2, (&mut sent, &mut got));
    assert!(tx.stats().tx_by_reference > before, "by another pipe");
    assert_eq!(peers[0].receive_by(64, &mut |_| panic!("nothing else was sent")).unwrap(), 0);
}

#[test]
fn where_a_call_is_forbidden_all_is_copied_and_the_port_says_why() {
    let calls = [
        (libc::SYS_vmsplice, "vmsplice(2) or splice(2): Operation not permitted"),
        (libc::SYS_splice, "vmsplice(2) or splice(2): Operation not permitted"),
        (libc::SYS_pipe2, "no pipe: Operation not permitted"),
    ];
    for (call, reason) in calls {
        let (a, b) = (loopback(), loopback());
        std::thread::scope(|scope| {
            let confined = scope.spawn(|| {
                forbid_call(call);
                let (mut tx, mut rx) = (open(a), open(b));
                let why = tx.capabilities().copies_because.clone().unwrap();
                assert!(why.starts_with(reason), "{why}");
                let path = tx.add_path(&spec(a, b)).unwrap().id;
                let (mut sent, mut got) = (0, 0);
                exchange(&mut tx, path, &mut rx, 3, (&mut sent, &mut got));
                assert_eq!(tx.stats().tx_by_reference, 0);
            });
            confined.join().unwrap();
        });
    }
    // Forbidden while rings are in use: the message is ended by a copy, and so are all others.
    for call in [libc::SYS_vmsplice, libc::SYS_splice] {
        let (a, b) = (loopback(), loopback());
        std::thread::scope(|scope| {
            let confined = scope.spawn(|| {
                let (mut tx, mut rx) = (open(a), open(b));
                let path = tx.add_path(&spec(a, b)).unwrap().id;
                let (mut sent, mut got) = (0, 0);
                for round in 0..6 {
                    if round == 3 {
                        assert!(tx.stats().tx_by_reference > 0);
                        forbid_call(call);
                    }
                    assert!(send_runs(&mut tx, path, 2, &mut sent).is_empty());
                    receive_runs(&mut rx, 2, &mut got);
                }
                assert_eq!(tx.stats().tx_by_reference as usize, 2 * 2 * RUN);
                assert_eq!(rx.receive_by(64, &mut |_| panic!("nothing else was sent")).unwrap(), 0);
            });
            confined.join().unwrap();
        });
    }
}

#[test]
fn short_runs_take_nothing_of_a_ring() {
    let (pair, mut tx, mut peers) = or_skip!(sender_and_peers(false, &PortConfig::default()));
    let paths = paths_to(&pair, &mut tx, &peers);
    let (mut sent, mut got) = (0, 0);
    exchange(&mut tx, paths[0], &mut peers[0], 2, (&mut sent, &mut got));
    // More of them than a ring has pages, while two long ones wait at the peer.
    let count = RING_RUNS * 65_536 / 4096 + RING_RUNS;
    assert!(send_runs(&mut tx, paths[0], 2, &mut sent).is_empty());
    for _ in 0..count {
        send(&mut tx, paths[0], &[24]);
    }
    for (at, datagram) in receive(&mut peers[0], 2 * RUN + count).iter().enumerate() {
        if at < 2 * RUN {
            assert_eq!(datagram.payload[..8], (got + at as u64).to_be_bytes());
        } else {
            assert_eq!(datagram.payload, [0; 24]);
        }
    }
}

/// Each takes what its own receive buffer has room for, as the credit of peers permits.
#[test]
fn two_queues_of_one_address_have_a_ring_each() {
    let pair = or_skip!(Pair::new());
    let (config, shards) = (PortConfig::default(), Shards { count: 2, ..Shards::ONE });
    let iface = || Interface::by_name("v0").unwrap();
    let [own, peer] = [[10, 9, 0, 1], [10, 9, 0, 2]].map(IpAddr::from);
    let mut tx = pair.a.run(|| UdpPort::open(&iface(), &[own], &config).unwrap());
    let mut queues: Vec<_> = pair.b.run(|| {
        let parts = UdpPort::acquire(&iface(), &[peer], &config, shards, None).unwrap();
        parts.into_iter().map(|parts| UdpPort::assemble(parts).unwrap()).collect()
    });
    let paths = [0xC001, 0xC002].map(|src_port| {
        pair.a.run(|| tx.add_path(&PathSpec { src_port, ..spec(own, peer) })).unwrap().id
    });
    // The number of a datagram has the number of its queue in the byte that selects that.
    let (mut sent, mut got) = ([0, 1 << 16], [0, 1 << 16]);
    for (at, rx) in queues.iter_mut().enumerate() {
        exchange(&mut tx, paths[at], rx, 2, (&mut sent[at], &mut got[at]));
    }
    let (runs, budget) = (RING_RUNS / 2 + 8, queues[0].capabilities().rx_budget);
    assert!((runs * RUN) as u32 * RxBudget::cost(LEN as u32) <= budget.bytes / 4 * 3);
    for (path, sent) in paths.into_iter().zip(&mut sent) {
        for _ in 0..runs / 2 {
            assert!(send_runs(&mut tx, path, 2, sent).is_empty());
        }
    }
    queues.iter_mut().zip(&mut got).for_each(|(rx, got)| receive_runs(rx, runs, got));
    assert_eq!(tx.staging.rings.count(), 2);
}

#[test]
fn datagrams_of_other_services_are_copied() {
    let (a, b) = (loopback(), loopback());
    let (mut tx, mut rx) = (open(a), open(b));
    let path = tx.add_path(&spec(a, b)).unwrap().id;
    // UC, RD, UD.
    for service in [1_u64, 2, 3] {
        let mut sent = service << 61;
        let mut got = sent;
        exchange(&mut tx, path, &mut rx, 3, (&mut sent, &mut got));
    }
    assert_eq!(tx.stats().tx_by_reference, 0);
}

#[test]
fn runs_that_find_the_socket_full_wait_and_leave_later() {
    or_skip!(needs(&["tc"]));
    let config =
        PortConfig { tx_buffer_bytes: 1 << 16, force_buffers: false, ..PortConfig::default() };
    let (pair, mut tx, mut peers) = or_skip!(sender_and_peers(false, &config));
    let paths = paths_to(&pair, &mut tx, &peers);
    pair.a.sh("tc qdisc add dev v0 root tbf rate 200mbit burst 70kb limit 20mb");
    let (mut sent, mut got, mut blocked) = (0_u64, 0, false);
    for _ in 0..20 {
        for _ in 0..5 * RUN {
            let slot = tx.reserve(paths[0], LEN).expect("room");
            slot.buf.fill(sent as u8);
            slot.buf[..8].copy_from_slice(&sent.to_be_bytes());
            tx.commit();
            sent += 1;
        }
        tx.flush(crate::testing::no_failure);
        while tx.wants_write() {
            blocked = true;
            assert!(descriptors::wait_readable(tx.wait_fd(), 5000).unwrap(), "it drains");
            tx.flush(crate::testing::no_failure);
        }
        receive_runs(&mut peers[0], 5, &mut got);
    }
    assert!(blocked && tx.stats().tx_blocked > 0);
    assert!(tx.stats().tx_by_reference > 0);
}

#[test]
fn a_message_that_a_killed_process_began_is_not_gone_on_with() {
    let [a, b, c] = [(); 3].map(|()| loopback());
    let (mut rx, other) = (open(b), open(c));
    let config = PortConfig::default();
    let mut own =
        sockets::open_own(&lo(), a, Options::new(&config, None), Role::Receive, Shards::ONE)
            .unwrap();
    let socket = own.remove(0);
    let to = |peer| sockets::destination(&lo(), &spec(a, peer), 64);
    let (to_b, to_c) = (to(b), to(c));
    let message = |dest, payload| sys::Message { payload, dest, by: None, segment: 0 };
    let mut scratch = SendScratch::new();
    sys::begin_message(&socket, &mut scratch, message(&to_c, &[1; 100][..])).unwrap();
    sockets::take_over(&socket, a, Options::new(&config, None), Role::Receive).unwrap();
    sys::send(&socket, &mut scratch, std::iter::once(message(&to_b, &[2; 50][..]))).unwrap();
    assert_eq!(receive(&mut rx, 1)[0].payload, [2; 50]);
    drop(other);
}
