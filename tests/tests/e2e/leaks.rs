//! Ten thousand queue pairs, regions, queues and handles, and hundreds of devices, are made and
//! given back one after the other. Afterwards descriptors, threads, queue pairs, their numbers,
//! regions and paths are as before, and the memory of the process has not grown. `cm/leaks.rs`
//! has the connections of the connection manager.

use std::collections::HashSet;
use std::time::Duration;

use rocinante::device::Backend;
use rocinante::verbs::{MwType, PeerPath, QpType, SendOp};
use rocinante::{Access, RecvWr};
use rocinante_lab::{Lab, LabConfig};
use rocinante_tests::alone::{Held, alone, resident_bytes};
use rocinante_tests::harness::{Family, Harness, Setup, Side, address, next, wait_until, wr};
use rocinante_tests::{need, require, test_name};

/// One test for each function, backend and number of turns.
macro_rules! turns {
    ($( $name:ident: $cycle:ident $backend:ident $count:literal; )*) => {$(
        #[test]
        fn $name() {
            require!(need::backend(Backend::$backend));
            let work = || $cycle(&Harness::new(&Setup::new(Backend::$backend)), $count);
            alone(test_name!(), Duration::from_secs(600), work);
        }
    )*};
}

turns! {
    connected_queue_pairs_udp: connected_queue_pairs Udp 10_000;
    connected_queue_pairs_packet: connected_queue_pairs Packet 10_000;
    connected_queue_pairs_afxdp: connected_queue_pairs Xdp 10_000;
    regions_and_windows_udp: regions_and_windows Udp 10_000;
    queues_and_channels_udp: queues_and_channels Udp 10_000;
    address_handles_udp: address_handles Udp 10_000;
    numbers_of_queue_pairs_come_again: numbers_come_again Udp 140_000;
    devices_udp: devices Udp 500;
    devices_packet: devices Packet 100;
    devices_afxdp: devices Xdp 100;
}

/// The most growth of the memory in the second half of the turns, in bytes. The allocator alone
/// makes it vary by one million.
const GROWTH_MAX: usize = 3 << 20;

/// Turns after which lists and caches have reached their size.
const FIRST: usize = 20;

/// Runs `turn` `count` times, and compares the resources held at first, after half of the turns,
/// and at the end.
fn repeat(harness: &Harness, count: usize, mut turn: impl FnMut(usize) + Send) {
    let held = || {
        let held = Held::now(&[&harness.sides[0].ctx, &harness.sides[1].ctx]);
        (held, std::fs::read_dir("/proc/self/task").unwrap().count())
    };
    // A thread that polls on a busy machine keeps a descriptor until it ends.
    let mut turns = |range: std::ops::Range<usize>| {
        std::thread::scope(|scope| {
            if let Err(panic) = scope.spawn(|| range.for_each(&mut turn)).join() {
                std::panic::resume_unwind(panic);
            }
        });
    };
    turns(0..FIRST);
    let first = held();
    turns(0..count / 2);
    let resident = resident_bytes();
    turns(count / 2..count);
    // A thread that has ended stays in the list for a moment.
    wait_until("no more is held than at first", || held() == first);
    let growth = resident_bytes().saturating_sub(resident);
    println!("{} KiB resident, {growth} bytes more than after half of it", resident >> 10);
    assert!(growth < GROWTH_MAX, "{growth} bytes more after {} turns", count - count / 2);
}

/// Each second time with work outstanding; either end goes first.
fn connected_queue_pairs(harness: &Harness, count: usize) {
    let [a, b] = &harness.sides;
    let target = b.pd.allocate(4096, Access::ALL).unwrap();
    let source = a.pd.allocate(4096, Access::ALL).unwrap();
    let write = SendOp::Write { remote: target.address(), rkey: target.rkey(), imm: None };
    repeat(harness, count, |turn| {
        let [qp, peer] = harness.pair();
        qp.post_send(&[wr(1, write, &[source.sge(0, 4096)])]).unwrap();
        if turn % 2 == 0 {
            assert_eq!(next(&a.cq).wr_id, 1);
        }
        let (first, last) = if turn % 4 < 2 { (qp, peer) } else { (peer, qp) };
        drop(first);
        drop(last);
        // Completions of queue pairs that are gone.
        while a.cq.poll_one().unwrap().is_some() {}
    });
}

fn regions_and_windows(harness: &Harness, count: usize) {
    let pd = &harness.sides[0].pd;
    let qp = harness.sides[0].qp().build().unwrap();
    let access = Access::LOCAL_WRITE | Access::MW_BIND;
    repeat(harness, count, |turn| {
        let region = pd.allocate(64 << 10, access).unwrap();
        region.write(turn % 64, &[1; 64]);
        let window = pd.alloc_mw(MwType::Type2).unwrap();
        assert_ne!(region.rkey(), window.rkey());
        if turn % 2 == 0 {
            drop(region);
        } else {
            region.deregister().unwrap();
        }
    });
    drop(qp);
}

/// Completion queues, their channels and shared receive queues; each tenth time with a queue pair
/// that uses them.
fn queues_and_channels(harness: &Harness, count: usize) {
    let side = &harness.sides[0];
    let region = side.pd.allocate(64, Access::LOCAL_WRITE).unwrap();
    repeat(harness, count, |turn| {
        let channel = side.ctx.create_comp_channel().unwrap();
        let cq = side.ctx.create_cq_with(64, &channel).unwrap();
        cq.req_notify(false).unwrap();
        let srq = side.pd.create_srq(16, 1).unwrap();
        srq.post_recv(&[RecvWr { wr_id: 1, sges: &[region.sge(0, 64)] }]).unwrap();
        if turn % 10 == 0 {
            drop(side.pd.qp(&cq, &cq).access(Access::ALL).srq(&srq).build().unwrap());
        }
        cq.destroy().unwrap();
    });
}

fn address_handles(harness: &Harness, count: usize) {
    let [a, b] = &harness.sides;
    let qp = a.pd.qp(&a.cq, &a.cq).qp_type(QpType::Ud).build().unwrap();
    let peer = b.pd.qp(&b.cq, &b.cq).qp_type(QpType::Ud).build().unwrap();
    let path = PeerPath::to(&peer.endpoint());
    repeat(harness, count, |_| {
        drop(a.run(|| a.pd.create_ah(&path)).unwrap());
    });
    drop(qp);
}

/// Twice the number of queue pairs that there are numbers for: numbers of destroyed queue pairs are
/// given again.
fn numbers_come_again(harness: &Harness, count: usize) {
    let side = &harness.sides[0];
    let mut numbers = HashSet::new();
    repeat(harness, count, |_| {
        numbers.insert(side.small_qp().endpoint().qpn);
    });
    println!("{} numbers for {count} queue pairs", numbers.len());
    assert!(numbers.len() > count / 4, "they are drawn from few");
    assert!(numbers.len() < count);
}

/// Devices opened and closed; each has a thread, sockets, rings and a program at the interface.
fn devices(harness: &Harness, count: usize) {
    let lab = Lab::new(&LabConfig { containers: 1, ..LabConfig::default() }).unwrap();
    let address = address(&lab, 0, Family::V4);
    repeat(harness, count, |_| {
        let side = Side::open(lab.container(0).netns(), address, &harness.setup);
        let region = side.pd.allocate(4096, Access::ALL).unwrap();
        assert_eq!(side.ctx.resources().map(|it| it.mrs), Some(1));
        drop(region);
    });
}
