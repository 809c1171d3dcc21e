//! Devices with several shards: a queue pair works the same on each shard, and shared objects work
//! on all.

use std::collections::BTreeSet;
use std::time::Duration;

use rocinante::device::SHARDS_VARIABLE;
use rocinante::verbs::{GRH_LEN, MwType, PeerPath, QpType, Rereg, SendOp};
use rocinante::{Access, OpenOptions, Qp, RecvWr, SendWr, VerbsError, WcStatus};
use rocinante_lab::ChildGuard;
use rocinante_tests::alone::myself;
use rocinante_tests::harness::{
    Backend, Family, Harness, PATIENCE, Setup, Side, assert_same, next, pattern, wait_until, wr,
};
use rocinante_tests::oracles::Oracle;
use rocinante_tests::verbs::{self, death};
use rocinante_tests::{alone_on_each_backend, need, on_each_backend, require, test_name};

const SEND: SendOp = SendOp::Send { imm: None };
const QKEY: u32 = 0x1111_1111;

on_each_backend!(
    queue_pairs_of_both_shards_do_everything,
    datagrams_in_one_run_reach_both_shards,
    a_region_is_gone_on_both_shards,
    a_request_on_any_shard_keeps_a_region,
    one_queue_and_one_channel_serve_both_shards,
    nothing_is_left_behind,
    a_shared_receive_queue_is_on_one_shard,
    what_there_cannot_be_is_refused,
);

// Other tests' devices have threads of the same names.
alone_on_each_backend! { 60:
    threads_stay_on_their_processors_udp: Udp threads_stay_on_their_processors;
    threads_stay_on_their_processors_packet: Packet threads_stay_on_their_processors;
    threads_stay_on_their_processors_afxdp: Xdp threads_stay_on_their_processors;
}

fn two_shards(backend: Backend) -> Harness {
    let harness = Harness::new(&Setup { shards: Some(2), ..Setup::new(backend) });
    assert_eq!(harness.sides.each_ref().map(|side| side.ctx.shards()), [2, 2]);
    harness
}

/// A pair with each end on the given shard.
fn pair_on(harness: &Harness, shards: [usize; 2]) -> [Qp; 2] {
    let [a, b] = [0, 1].map(|at| harness.sides[at].qp().shard(shards[at]).build().unwrap());
    let qps = harness.connect([a, b]);
    assert_eq!(qps.each_ref().map(Qp::shard), shards);
    qps
}

/// A pair for each combination of shards.
fn all_pairs(harness: &Harness) -> Vec<[Qp; 2]> {
    let shards = [[0, 0], [0, 1], [1, 0], [1, 1]];
    shards.into_iter().map(|shards| pair_on(harness, shards)).collect()
}

fn queue_pairs_of_both_shards_do_everything(backend: Backend) {
    [Family::V4, Family::V6].into_iter().for_each(|family| all_do_everything(backend, family));
}

/// At the end the harness checks that the kernel gave each packet to the right shard.
fn all_do_everything(backend: Backend, family: Family) {
    const LEN: usize = 100_000;
    let setup = Setup { shards: Some(2), ..Setup::new(backend) }.family(family);
    let harness = Harness::new(&setup);
    let [a, b] = &harness.sides;
    let mut qps = all_pairs(&harness);
    // Queue pairs made without a choice of shard take turns.
    let turns: Vec<[Qp; 2]> = (0..6).map(|_| harness.pair()).collect();
    for at in [0, 1] {
        let used: Vec<_> = turns.iter().map(|pair| pair[at].shard()).collect();
        assert_eq!(used.iter().sum::<usize>(), 3, "{used:?}");
    }
    qps.extend(turns);
    for qp in qps.iter().flatten() {
        assert_eq!((qp.qpn().value() >> 16) as usize, qp.shard());
    }
    let regions = [a, b].map(|side| side.pd.allocate(3 * LEN * qps.len(), Access::ALL).unwrap());
    let ends = [0, 1].map(|at| qps.iter().map(|pair| &pair[at]).collect::<Vec<_>>());
    harness.both(|at, side| {
        let (own, its) = (&regions[at], &regions[1 - at]);
        for (index, qp) in ends[at].iter().enumerate() {
            // Each has its part: for data sent, received and written. The peer also reads the first
            // part.
            let from = 3 * LEN * index;
            own.write(from, &pattern(LEN, (2 * index + at) as u64));
            let sges = [own.sge(from + LEN, LEN)];
            qp.post_recv(&[RecvWr { wr_id: index as u64, sges: &sges }]).unwrap();
        }
        let count = ends[at].len() as u64;
        for (index, qp) in ends[at].iter().enumerate() {
            let from = 3 * LEN * index;
            let remote = its.address() + (from + 2 * LEN) as u64;
            let write = SendOp::Write { remote, rkey: its.rkey(), imm: None };
            for (nth, op) in [SEND, write].into_iter().enumerate() {
                let wr_id = (nth as u64 + 1) * count + index as u64;
                qp.post_send(&[wr(wr_id, op, &[own.sge(from, LEN)])]).unwrap();
            }
        }
        let done: BTreeSet<u64> = (0..3 * count)
            .map(|_| {
                let wc = side.next();
                assert_eq!(wc.status, WcStatus::Success, "{wc:?}");
                wc.wr_id
            })
            .collect();
        assert_eq!(done.len() as u64, 3 * count);
    });
    for (index, [qp, peer]) in qps.iter().enumerate() {
        let from = 3 * LEN * index;
        for at in [0, 1] {
            let sent = pattern(LEN, (2 * index + 1 - at) as u64);
            let what = format!("pair {index} {:?}, side {at}", [qp.shard(), peer.shard()]);
            assert_same(&regions[at].to_vec(from + LEN, LEN), &sent, &format!("{what}: SEND"));
            assert_same(&regions[at].to_vec(from + 2 * LEN, LEN), &sent, &format!("{what}: WRITE"));
        }
        let read =
            SendOp::Read { remote: regions[1].address() + from as u64, rkey: regions[1].rkey() };
        qp.post_send(&[wr(1, read, &[regions[0].sge(from + LEN, LEN)])]).unwrap();
        a.succeed(1);
        let there = pattern(LEN, (2 * index + 1) as u64);
        assert_same(&regions[0].to_vec(from + LEN, LEN), &there, "READ");
    }
    for side in [a, b] {
        let counters = side.ctx.counters();
        assert_eq!(counters.handed_over.1, 0, "{counters:?}");
    }
}

fn datagrams(side: &Side, shard: usize) -> Qp {
    let qp = side.qp().qp_type(QpType::Ud).qkey(QKEY).shard(shard).build().unwrap();
    qp.ready().unwrap()
}

/// A super-packet goes to one shard, even if its datagrams are for several.
fn datagrams_in_one_run_reach_both_shards(backend: Backend) {
    const LEN: usize = 500;
    const EACH: usize = 8;
    let setup = Setup { shards: Some(2), ..Setup::new(backend) };
    let why = "a super-packet has datagrams for both shards, and goes to one";
    let harness = Harness::new(&match backend {
        Backend::Xdp => setup,
        _ => setup.breaks(Oracle::Steering, why),
    });
    let [a, b] = &harness.sides;
    let (from, to) = (datagrams(a, 1), [0, 1].map(|shard| datagrams(b, shard)));
    let index = a.ctx.gids().iter().position(|gid| *gid == a.address).unwrap();
    let ah = a.run(|| a.pd.create_ah(&PeerPath::new(b.address).sgid_index(index))).unwrap();
    let source = a.pd.allocate(2 * EACH * LEN, Access::NONE).unwrap();
    source.write(0, &pattern(2 * EACH * LEN, 3));
    let room = GRH_LEN + LEN;
    let buffers = b.pd.allocate(2 * EACH * room, Access::LOCAL_WRITE).unwrap();
    for nth in 0..2 * EACH {
        let sges = [buffers.sge(nth * room, room)];
        to[nth % 2].post_recv(&[RecvWr { wr_id: nth as u64, sges: &sges }]).unwrap();
    }
    let sges: Vec<_> = (0..2 * EACH).map(|nth| [source.sge(nth * LEN, LEN)]).collect();
    let list: Vec<SendWr<'_>> = (0..2 * EACH)
        .map(|nth| {
            let op = SendOp::SendTo { to: ah.to(to[nth % 2].qpn(), QKEY), imm: None };
            wr(nth as u64, op, &sges[nth])
        })
        .collect();
    from.post_send(&list).unwrap();
    for _ in 0..2 * EACH {
        assert_eq!(a.next().status, WcStatus::Success);
        let wc = b.next();
        let nth = wc.wr_id as usize;
        assert_eq!((wc.status, wc.qpn), (WcStatus::Success, to[nth % 2].qpn()));
        let data = buffers.to_vec(nth * room + GRH_LEN, LEN);
        assert_same(&data, &pattern(2 * EACH * LEN, 3)[nth * LEN..][..LEN], "a datagram");
    }
    let (handed_over, lost) = b.ctx.counters().handed_over;
    // All are of one flow, so they came to one queue.
    assert!(handed_over > 0 && lost == 0, "{handed_over} handed over, {lost} lost");
}

fn a_region_is_gone_on_both_shards(backend: Backend) {
    let harness = two_shards(backend);
    let [a, b] = &harness.sides;
    let qps = all_pairs(&harness);
    let source = a.pd.allocate(64, Access::NONE).unwrap();
    let mut target = b.pd.allocate(64, Access::ALL).unwrap();
    let write = |qp: &Qp, remote, rkey| {
        let op = SendOp::Write { remote, rkey, imm: None };
        qp.post_send(&[wr(1, op, &[source.sge(0, 64)])]).unwrap();
    };
    // Other memory has another key, valid on all shards. The old key is valid on none.
    let old = target.rkey();
    target.rereg(&Rereg { access: Some(Access::LOCAL_WRITE), ..Rereg::default() }).unwrap();
    assert_eq!(target.rkey(), old);
    target.rereg(&Rereg { access: Some(Access::ALL), len: Some(64), ..Rereg::default() }).unwrap();
    assert_ne!(target.rkey(), old);
    for [qp, _] in &qps {
        write(qp, target.address(), target.rkey());
        a.succeed(1);
    }
    let (address, rkey) = (target.address(), target.rkey());
    target.deregister().unwrap();
    assert_eq!(b.ctx.resources().unwrap().mrs, 0);
    for ([qp, _], rkey) in qps.iter().zip([rkey, rkey, old, old]) {
        write(qp, address, rkey);
        a.complete(1, WcStatus::RemAccessErr);
    }
}

fn a_request_on_any_shard_keeps_a_region(backend: Backend) {
    let harness = two_shards(backend);
    let [_, b] = &harness.sides;
    for shard in [0, 1] {
        let [_, peer] = pair_on(&harness, [0, shard]);
        let region = b.pd.allocate(64, Access::ALL).unwrap();
        peer.post_recv(&[RecvWr { wr_id: 1, sges: &[region.sge(0, 64)] }]).unwrap();
        let Err(rocinante::Refused { value: region, error }) = region.deregister() else {
            panic!("a receive names it")
        };
        assert!(matches!(error, VerbsError::Busy(_)), "{error}");
        drop(peer);
        region.deregister().unwrap();
    }
}

fn one_queue_and_one_channel_serve_both_shards(backend: Backend) {
    const ROUNDS: u64 = 200;
    let harness = two_shards(backend);
    let [a, b] = &harness.sides;
    let channel = b.channel();
    let cq = b.ctx.create_cq_with(64, &channel).unwrap();
    let qps = [0, 1].map(|shard| {
        let ours = a.qp().shard(1 - shard).build().unwrap();
        let its = b.pd.qp(&cq, &cq).access(Access::ALL).shard(shard).build().unwrap();
        harness.connect([ours, its])
    });
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| {
            for round in 0..ROUNDS {
                cq.req_notify(false).unwrap();
                let peer = &qps[(round % 2) as usize][1];
                peer.post_recv(&[RecvWr { wr_id: round, sges: &[] }]).unwrap();
                assert!(channel.wait_event(Some(PATIENCE)).expect("an event") == cq);
                let wc = next(&cq);
                assert_eq!((wc.wr_id, wc.qpn, wc.status), (round, peer.qpn(), WcStatus::Success));
            }
        });
        for round in 0..ROUNDS {
            // If no receive is posted yet, the peer answers with an RNR NAK, and the SEND is
            // retransmitted.
            qps[(round % 2) as usize][0].post_send(&[wr(round, SEND, &[])]).unwrap();
            a.succeed(round);
        }
        sleeper.join().unwrap();
    });
}

fn nothing_is_left_behind(backend: Backend) {
    let harness = two_shards(backend);
    let [a, b] = &harness.sides;
    let before = [a, b].map(|side| side.ctx.resources().unwrap());
    assert_eq!((before[0].qps, before[0].mrs, before[0].paths), (0, 0, 0));
    for _ in 0..3 {
        let qps = all_pairs(&harness);
        let index = a.ctx.gids().iter().position(|gid| *gid == a.address).unwrap();
        let ahs: Vec<_> = (0..3)
            .map(|_| a.run(|| a.pd.create_ah(&PeerPath::new(b.address).sgid_index(index))).unwrap())
            .collect();
        let cqs: Vec<_> = (0..3).map(|_| a.ctx.create_cq(16).unwrap()).collect();
        let regions: Vec<_> = (0..5).map(|_| a.pd.allocate(64, Access::ALL).unwrap()).collect();
        let target = b.pd.allocate(64, Access::ALL).unwrap();
        for [qp, _] in &qps {
            let op = SendOp::Write { remote: target.address(), rkey: target.rkey(), imm: None };
            qp.post_send(&[wr(1, op, &[regions[0].sge(0, 64)])]).unwrap();
            a.succeed(1);
        }
        let now = a.ctx.resources().unwrap();
        // One path for each queue pair, and one on each shard for each handle.
        assert_eq!((now.qps, now.mrs, now.paths), (4, 5, 4 + 2 * 3));
        drop((qps, ahs, cqs, regions, target));
        assert_eq!([a, b].map(|side| side.ctx.resources().unwrap()), before);
    }
}

fn a_shared_receive_queue_is_on_one_shard(backend: Backend) {
    let harness = two_shards(backend);
    let [a, b] = &harness.sides;
    let mut homes = BTreeSet::new();
    let mut numbers = BTreeSet::new();
    for _ in 0..2 {
        let srq = b.pd.create_srq(8, 1).unwrap();
        let pairs = [0, 1].map(|shard| {
            let ours = a.qp().shard(shard).build().unwrap();
            harness.connect([ours, b.qp().srq(&srq).build().unwrap()])
        });
        let home = pairs[0][1].shard();
        assert_eq!(pairs[1][1].shard(), home);
        let elsewhere = b.qp().srq(&srq).shard(1 - home).build().unwrap_err();
        assert!(elsewhere.to_string().contains(&format!("on shard {home}")), "{elsewhere}");
        for (round, [qp, peer]) in pairs.iter().enumerate() {
            srq.post_recv(&[RecvWr { wr_id: round as u64, sges: &[] }]).unwrap();
            qp.post_send(&[wr(9, SEND, &[])]).unwrap();
            a.succeed(9);
            assert_eq!(b.succeed(round as u64).qpn, peer.qpn());
        }
        homes.insert(home);
        numbers.insert(srq.number());
    }
    assert_eq!((homes.len(), numbers.len()), (2, 2), "they take turns");
}

/// The processors on which the threads of this name may run, as Linux writes them
/// (proc_pid_status(5)).
fn processors_of(threads: &str) -> Vec<(String, String)> {
    let field = |status: &str, name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap_or_default().trim().to_owned()
    };
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    // A thread may end meanwhile.
    let statuses =
        tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("status")).ok());
    let named = statuses.map(|s| (field(&s, "Name:"), field(&s, "Cpus_allowed_list:")));
    let mut found: Vec<_> = named.filter(|(name, _)| name.starts_with(threads)).collect();
    found.sort();
    found
}

fn threads_stay_on_their_processors(backend: Backend) {
    let harness = Harness::new(&Setup { shards: Some(3), containers: 3, ..Setup::new(backend) });
    let allowed = rustix::thread::sched_getaffinity(None).unwrap();
    let cpus: Vec<usize> = (0..1024).filter(|cpu| allowed.is_set(*cpu)).collect();
    let wanted: Vec<usize> = (0..3).map(|nth| cpus[nth % cpus.len()]).collect();
    let container = harness.lab().container(2);
    let address = std::net::IpAddr::V4(container.ipv4());
    let open = |options: OpenOptions| container.netns().run(|| options.open(address)).unwrap();
    let options = OpenOptions::new().netdev(backend).shards(3);
    let ctx = open(options.clone().cpus(wanted.clone())).unwrap();
    let expected: Vec<_> = ["", ".1", ".2"]
        .iter()
        .zip(&wanted)
        .map(|(shard, cpu)| (format!("roce-{}{shard}", ctx.name()), cpu.to_string()))
        .collect();
    // The two devices of the harness run on any processor.
    let pinned = || {
        let mut found = processors_of("roce-");
        found.retain(|found| expected.contains(found));
        found
    };
    assert!(cpus.len() == 1 || pinned() == expected, "{:?}", processors_of("roce-"));
    drop(ctx);
    // A joined thread may stay listed for a moment.
    wait_until("the threads end", || cpus.len() == 1 || pinned().is_empty());
    let error = open(options.cpus([1023])).unwrap_err().to_string();
    assert!(error.contains("processor 1023"), "{error}");
}

fn what_there_cannot_be_is_refused(backend: Backend) {
    let harness = two_shards(backend);
    let [a, _] = &harness.sides;
    let said = |error: VerbsError, words: &str| {
        assert!(error.to_string().contains(words), "{error}");
    };
    said(a.qp().shard(2).build().unwrap_err(), "there is no shard 2");
    said(a.pd.alloc_mw(MwType::Type1).unwrap_err(), "one shard");
    let windows = a.ctx.query_device().windows;
    assert!(!windows.type_1 && !windows.type_2a && !windows.type_2b);
    let open =
        |options: OpenOptions| a.run(|| options.netdev(backend).open(a.address)).unwrap_err();
    for count in [0, 65] {
        said(open(OpenOptions::new().shards(count)), &format!("1 to 64 shards, not {count}"));
    }
    said(open(OpenOptions::new().shards(3)), "another `shards`");
    drop(harness);
    let harness = Harness::new(&Setup { containers: 3, shards: Some(1), ..Setup::new(backend) });
    let container = harness.lab().container(2);
    let quiet = OpenOptions::new().netdev(backend).shards(2).background(false);
    let opened = container.netns().run(|| quiet.open(container.ipv4().into())).unwrap();
    said(opened.unwrap_err(), "background threads");
}

/// Tests of the API on devices with two shards. Each runs in a process with that setting in its
/// environment.
macro_rules! with_two_shards {
    ($( $name:ident: $backend:ident $work:expr; )*) => {$(
        #[test]
        fn $name() {
            if death::is_the_peer() {
                return death::be_the_peer(Backend::$backend.into());
            }
            require!(need::backend(Backend::$backend));
            if std::env::var_os(SHARDS_VARIABLE).is_some_and(|count| count == "2") {
                return $work(Backend::$backend.into());
            }
            let mut command = myself(test_name!());
            command.env(SHARDS_VARIABLE, "2").stdout(std::io::stderr());
            let mut child = ChildGuard::spawn(&mut command).unwrap();
            let status = child.wait(Duration::from_secs(300)).unwrap();
            assert!(status.success(), "{status}");
        }
    )*};
}

with_two_shards! {
    a_killed_peer_udp: Udp |on| death::survive(on, Some(test_name!()));
    a_killed_peer_packet: Packet |on| death::survive(on, Some(test_name!()));
    many_queue_pairs_udp: Udp verbs::many::mixed_operations_on_64_queue_pairs;
    many_queue_pairs_packet: Packet verbs::many::mixed_operations_on_64_queue_pairs;
    queue_pairs_come_and_go_udp: Udp verbs::many::queue_pairs_come_and_go_while_others_work;
    queue_pairs_come_and_go_packet: Packet verbs::many::queue_pairs_come_and_go_while_others_work;
    connections_udp: Udp verbs::cm::ipv4_connects_exchanges_and_disconnects;
    connections_packet: Packet verbs::cm::ipv6_connects_exchanges_and_disconnects;
    many_connections_udp: Udp verbs::cm::many_connections_one_after_the_other;
    groups_udp: Udp verbs::mcast::every_member_receives_ipv4;
    groups_packet: Packet verbs::mcast::every_member_receives_ipv6;
    a_device_reaches_itself_udp: Udp verbs::memory::a_device_reaches_itself;
    a_device_reaches_itself_packet: Packet verbs::memory::a_device_reaches_itself;
    services_udp: Udp verbs::services::a_service_is_found_and_used_over_ipv4;
    overflows_udp: Udp verbs::misuse::a_completion_queue_that_overflows_breaks_its_queue_pairs;
    threads_udp: Udp verbs::progress::several_threads_share_one_queue_pair;
}
