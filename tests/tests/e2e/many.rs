//! Many queue pairs between two devices: mixed operations, with each byte verified; and receive
//! queues that are never overrun.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rocinante::device::Backend;
use rocinante::stats::PortStats;
use rocinante::verbs::{Mtu, SendOp};
use rocinante::{Access, Cq, Mr, Qp, WcStatus};
use rocinante_tests::harness::{Harness, Setup, Side, next, wr};
use rocinante_tests::{need, on_backends, on_each_backend, require};

on_each_backend!(many::*);

/// One test per backend, number of queue pairs, kind of load, and whether super-packets leave the
/// containers whole.
macro_rules! never_overrun {
    ($( $name:ident: $backend:ident $qps:literal $load:ident $whole:literal; )*) => {
        mod never_overrun {
            use super::*;

            $(
                #[test]
                fn $name() {
                    require!(need::backend(Backend::$backend));
                    require!(need::ethtool());
                    never_overrun(Backend::$backend, $qps, Load::$load, $whole);
                }
            )*
        }
    };
}

never_overrun! {
    udp_1: Udp 1 Mixed true;
    udp_1_small: Udp 1 Small true;
    udp_1_without_segmentation: Udp 1 Mixed false;
    udp_64: Udp 64 Mixed true;
    udp_64_small: Udp 64 Small true;
    udp_64_without_segmentation: Udp 64 Mixed false;
    udp_64_small_without_segmentation: Udp 64 Small false;
    packet_1: Packet 1 Mixed true;
    packet_1_small: Packet 1 Small true;
    packet_1_without_segmentation: Packet 1 Mixed false;
    packet_64: Packet 64 Mixed true;
    packet_64_small: Packet 64 Small true;
    packet_64_without_segmentation: Packet 64 Mixed false;
    packet_64_small_without_segmentation: Packet 64 Small false;
    afxdp_1: Xdp 1 Mixed true;
    afxdp_1_small: Xdp 1 Small true;
    afxdp_64: Xdp 64 Mixed true;
    afxdp_64_small: Xdp 64 Small true;
}

/// One test per backend with a receive queue that holds more if super-packets stay whole.
mod taken_apart_on_the_way {
    use super::*;

    on_backends! {
        udp: Udp + ethtool => taken_apart_on_the_way(Backend::Udp);
        packet: Packet + ethtool => taken_apart_on_the_way(Backend::Packet);
    }
}

/// Super-packets that leave whole arrive as single datagrams. The sender finds that out by a loss,
/// which costs no retry, and then remembers it.
///
/// This thread drives both devices in turn. So a turn sends the announced budget of the peer's
/// queue, and packets beyond the queue's room are lost, because the peer does not run meanwhile.
/// A socket holds them all the same: parts of a super-packet share its pages, so the socket is
/// charged less for them than for datagrams that left one by one, on which its budget is based.
fn taken_apart_on_the_way(backend: Backend) {
    const LEN: usize = 1 << 20;
    let mut setup = Setup::new(backend).small_buffers().mtu(Mtu::Mtu1024);
    // A timeout of 4 s, and no retry.
    (setup.connect.timeout, setup.connect.retry_cnt) = (20, 0);
    (setup.background, setup.shards) = (false, Some(1));
    let harness = Harness::new(&setup);
    harness.lab().set_udp_segmentation_towards(1, false).expect("ethtool");
    let qps = harness.pair();
    let regions = harness.sides.each_ref().map(|side| side.pd.allocate(LEN, Access::ALL).unwrap());
    know_each_other(&harness, &qps, &regions);
    let [mine, theirs] = &regions;
    let [a, b] = &harness.sides;
    let op = SendOp::Write { remote: theirs.address(), rkey: theirs.rkey(), imm: None };
    let post = |id| qps[0].post_send(&[wr(id, op, &[mine.sge(0, LEN)])]).unwrap();
    (0..DEPTH).for_each(post);
    let deadline = Instant::now() + ENDS_WITHIN;
    let (mut done, mut turns) = (0, Vec::new());
    while done < WRITES {
        assert!(Instant::now() < deadline, "{done} of {WRITES}: {:#?}", a.ctx.counters());
        drive(a, |port| port.tx_datagrams);
        turns.push(drive(b, |port| port.rx_datagrams));
        while let Some(wc) = a.cq.poll_one().unwrap() {
            assert_eq!(wc.status, WcStatus::Success, "{wc:?}");
            done += 1;
            if done + DEPTH <= WRITES {
                post(wc.wr_id);
            }
        }
    }
    let [sent, came] = harness.sides.each_ref().map(|side| side.ctx.counters());
    println!("{sent:#?} {came:#?}");
    assert!(sent.port.tx_runs < sent.port.tx_datagrams / 8, "{:?}", sent.port);
    assert!(came.port.rx_runs > came.port.rx_datagrams / 2, "{:?}", came.port);
    // At most the budget of a ring of 256 slots, once.
    assert!(came.port.rx_queue_drops < 640, "{:?}", came.port);
    if backend == Backend::Packet {
        assert!(came.port.rx_queue_drops > 0, "{:?}", came.port);
        assert!(sent.transport.retransmitted_pkts > 0, "{:?}", sent.transport);
    } else {
        // At first the budget that the peer announced, and then more.
        let first = turns.iter().find(|&&at_once| at_once > 0);
        assert!(first < turns.iter().max(), "{first:?} at once, and never more");
    }
}

/// Drives a device until the counter stops growing; returns its growth.
fn drive(side: &Side, counted: impl Fn(&PortStats) -> u64) -> u64 {
    let now = || counted(&side.ctx.counters().port);
    let first = now();
    let mut before = first;
    loop {
        side.ctx.progress();
        let after = now();
        if after == before {
            return after - first;
        }
        before = after;
    }
}

/// For a busy machine.
const ENDS_WITHIN: Duration = Duration::from_secs(120);
/// Outstanding WRITEs, and WRITEs in all.
const DEPTH: u64 = 16;
const WRITES: u64 = 240;

/// The load on the queue pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Load {
    /// WRITEs and READs from 1 byte to 256 KiB.
    Mixed,
    /// WRITEs, READs and atomics of up to 64 bytes.
    Small,
}

/// Full speed in both directions, with default socket buffers: no packet is lost to a full queue.
fn never_overrun(backend: Backend, count: usize, load: Load, whole: bool) {
    let mut setup = Setup::new(backend).small_buffers();
    setup.segmentation = whole;
    // 4 s: on a busy machine a peer may not run for a while. A retransmission then would not mean a
    // loss.
    setup.connect.timeout = 20;
    let harness = Harness::new(&setup);
    let qps: Vec<[Qp; 2]> = (0..count).map(|_| harness.pair()).collect();
    let ends = [0, 1].map(|at| qps.iter().map(|pair| &pair[at]).collect::<Vec<_>>());
    let regions =
        harness.sides.each_ref().map(|side| side.pd.allocate(2 * CHUNK, Access::ALL).unwrap());
    know_each_other(&harness, &qps[0], &regions);
    let still_busy = AtomicU64::new(2);
    let moved = harness.both(|at, side| {
        let moved = keep_busy(&ends[at], &side.cq, &regions[at], &regions[1 - at], load);
        // Serve the other side until it is done, too.
        still_busy.fetch_sub(1, Ordering::SeqCst);
        while still_busy.load(Ordering::SeqCst) > 0 {
            side.ctx.progress();
        }
        moved
    });
    harness.rests();
    let counters = harness.sides.each_ref().map(|side| side.ctx.counters());
    println!("moved {moved:?} bytes: {counters:#?}");
    for counters in counters {
        assert_eq!(counters.port.rx_queue_drops, 0);
        assert_eq!(counters.port.rx_malformed, 0);
        assert_eq!(counters.transport.retransmitted_pkts, 0);
    }
}

/// Sends one message each way, so that the neighbours are resolved. Until then the kernel holds
/// packets. It sends them when the answer comes, and packets sent at that moment may overtake them.
fn know_each_other(harness: &Harness, qps: &[Qp; 2], regions: &[Mr; 2]) {
    let deadline = Instant::now() + ENDS_WITHIN;
    for (at, side) in harness.sides.iter().enumerate() {
        let (address, rkey) = (regions[1 - at].address(), regions[1 - at].rkey());
        let op = SendOp::Write { remote: address, rkey, imm: None };
        qps[at].post_send(&[wr(0, op, &[regions[at].sge(0, 1)])]).unwrap();
        let wc = loop {
            assert!(Instant::now() < deadline, "{:#?}", side.ctx.counters());
            harness.sides.iter().for_each(|side| side.ctx.progress());
            if let Some(wc) = side.cq.poll_one().unwrap() {
                break wc;
            }
        };
        assert_eq!(wc.status, WcStatus::Success, "{wc:?}");
    }
}

const CHUNK: usize = 256 * 1024;
const LOAD_TIME: Duration = Duration::from_millis(1200);
/// The requests that all queue pairs of a side together have outstanding.
const POSTED: usize = 2048;

/// Keeps all queue pairs full of requests of many sizes; returns the bytes moved.
fn keep_busy(qps: &[&Qp], cq: &Cq, local: &Mr, remote: &Mr, load: Load) -> u64 {
    let (address, rkey) = (remote.address() + CHUNK as u64, remote.rkey());
    let mut number = 0u64;
    let mut post = |qp: &Qp, index: usize| {
        number = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = number >> 32;
        let len = match (load, mixed % 5) {
            (Load::Small, _) => 8 + (mixed >> 3) as usize % 57,
            (_, 0) => 64,
            (_, 1) => 1 + (mixed >> 3) as usize % 5000,
            (_, 2) => 4096,
            (_, 3) => 65_536,
            (_, _) => CHUNK,
        };
        let (op, at) = match (mixed >> 10) % 4 {
            0 => (SendOp::Read { remote: address, rkey }, 0),
            1 if load == Load::Small => (SendOp::FetchAdd { remote: address, rkey, add: 1 }, 0),
            _ => (SendOp::Write { remote: address - CHUNK as u64, rkey, imm: None }, CHUNK),
        };
        qp.post_send(&[wr(index as u64, op, &[local.sge(at, len)])]).unwrap();
        len as u64
    };
    let depth = match load {
        Load::Small => (POSTED / qps.len()).min(500),
        Load::Mixed => (POSTED / 16 / qps.len()).max(2),
    };
    let mut moved = 0;
    for _ in 0..depth {
        for (index, qp) in qps.iter().enumerate() {
            moved += post(qp, index);
        }
    }
    let mut open = depth * qps.len();
    let until = Instant::now() + LOAD_TIME;
    while open > 0 {
        let wc = next(cq);
        assert_eq!(wc.status, WcStatus::Success, "{wc:?}");
        open -= 1;
        if Instant::now() < until {
            moved += post(qps[wc.wr_id as usize], wc.wr_id as usize);
            open += 1;
        }
    }
    moved
}
