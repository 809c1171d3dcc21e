//! Memory as a peer sees it: the last byte of a WRITE comes last, sequence numbers wrap, and a
//! device reaches itself.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use rocinante::verbs::{ModifyAttr, Mtu, PeerPath, Psn, QpAttr, QpType, SendOp};
use rocinante::{Access, Mr, Qp, RecvWr};

use crate::harness::{Harness, On, PATIENCE, Setup, Side, assert_same, pattern, wr};
use crate::oracles::Oracle;

/// A reader spins on the last byte, without calling verbs; then it compares all other bytes at
/// once.
pub fn the_last_byte_of_a_write_comes_last(on: On) {
    for mtu in [Mtu::Mtu4096, Mtu::Mtu1024] {
        spin(&Harness::new(&Setup::new(on.clone()).mtu(mtu)), mtu.bytes() as usize);
    }
}

const LARGEST: usize = 70_000;

/// Sizes and alignments: all small ones, and those around packets and words.
fn shapes(mtu: usize) -> Vec<(usize, usize)> {
    let mut sizes: Vec<usize> = (1..=40).collect();
    for near in [mtu, 2 * mtu, 5 * mtu, 65_536] {
        sizes.extend([near - 9, near - 8, near - 1, near, near + 1, near + 7, near + 8]);
    }
    sizes.into_iter().flat_map(|len| [0, 1, 4, 7].map(|align| (len, align))).collect()
}

fn spin(harness: &Harness, mtu: usize) {
    let [a, b] = &harness.sides;
    let [qp, _peer] = harness.pair();
    let source = a.pd.allocate(LARGEST, Access::NONE).unwrap();
    let target = b.pd.allocate(LARGEST + 8, Access::ALL).unwrap();
    let shapes = shapes(mtu);
    let ordered = harness.is_software();
    // The round that the reader waits for, and the round that it has seen.
    let (ready, seen) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            for (round, &(len, align)) in (1..).zip(&shapes) {
                let expected = content(round, len);
                target.write(0, &vec![0; len + 8]);
                ready.store(round, Ordering::Release);
                while target.load_byte(align + len - 1) == 0 {
                    std::hint::spin_loop();
                }
                // InfiniBand promises no such order. A kernel whose memcpy goes backward, as on
                // processors without ERMS, writes the last byte first.
                let end = Instant::now() + PATIENCE;
                while !ordered && target.to_vec(align, len) != expected && Instant::now() < end {
                    std::thread::yield_now();
                }
                let found = target.to_vec(align, len);
                assert_same(&found, &expected, &format!("{len} bytes at {align}"));
                seen.store(round, Ordering::Release);
            }
        });
        for (round, &(len, align)) in (1..).zip(&shapes) {
            wait_for(&ready, round, &reader);
            source.write(0, &content(round, len));
            let remote = target.address() + align as u64;
            let write = SendOp::Write { remote, rkey: target.rkey(), imm: None };
            qp.post_send(&[wr(round, write, &[source.sge(0, len)])]).unwrap();
            a.succeed(round);
            wait_for(&seen, round, &reader);
        }
    });
}

/// Bytes that are never zero, different in each round.
fn content(round: u64, len: usize) -> Vec<u8> {
    pattern(len, round).into_iter().map(|byte| byte | 1).collect()
}

fn wait_for<T>(counter: &AtomicU64, round: u64, reader: &std::thread::ScopedJoinHandle<'_, T>) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        // Asked before the counter is read: after the last round the reader ends by itself.
        let ended = reader.is_finished();
        if counter.load(Ordering::Acquire) >= round {
            return;
        }
        assert!(!ended, "the reader failed in round {round}");
        assert!(Instant::now() < deadline, "the reader saw nothing in round {round}");
        std::thread::yield_now();
    }
}

/// Both directions start just below 2^24, set by modify.
pub fn sequence_numbers_wrap(on: On) {
    let harness = Harness::new(&Setup::new(on.clone()).mtu(Mtu::Mtu256));
    let [a, b] = &harness.sides;
    for below in [1u32, 2, 37, 200] {
        let start = [(1 << 24) - below, (1 << 24) - 2 * below];
        let qps = harness.sides.each_ref().map(|side| side.qp().build_reset().unwrap());
        for at in 0..2 {
            let (side, peer) = (&harness.sides[at], &harness.sides[1 - at]);
            connect_at(side, &qps[at], peer, &qps[1 - at], start[at], start[1 - at]);
        }
        let [qp, peer] = &qps;
        const LEN: usize = 50_000;
        let source = a.pd.allocate(LEN, Access::ALL).unwrap();
        let target = b.pd.allocate(LEN + 8, Access::ALL).unwrap();
        let bytes = pattern(LEN, below.into());
        source.write(0, &bytes);
        let (remote, rkey) = (target.address(), target.rkey());
        let sges = [source.sge(0, LEN)];
        let into = [target.sge(0, LEN)];
        let words = a.pd.allocate(8, Access::LOCAL_WRITE).unwrap();
        for turn in 0..3u64 {
            let add = SendOp::FetchAdd { remote: remote + LEN as u64, rkey, add: 1 };
            qp.post_send(&[wr(1, add, &[words.sge(0, 8)])]).unwrap();
            a.succeed(1);
            assert_eq!(words.load_u64(0), turn);

            peer.post_recv(&[RecvWr { wr_id: 2, sges: &into }]).unwrap();
            qp.post_send(&[wr(2, SendOp::Send { imm: None }, &sges)]).unwrap();
            a.succeed(2);
            b.succeed(2);
            assert_same(&target.to_vec(0, LEN), &bytes, "SEND");
            source.write(0, &vec![0; LEN]);
            qp.post_send(&[wr(3, SendOp::Read { remote, rkey }, &sges)]).unwrap();
            a.succeed(3);
            assert_same(&source.to_vec(0, LEN), &bytes, "READ");
            // The other direction.
            let write = SendOp::Write { remote: source.address(), rkey: source.rkey(), imm: None };
            peer.post_send(&[wr(4, write, &into)]).unwrap();
            b.succeed(4);
        }
        for (qp, start) in qps.iter().zip(start) {
            let next = qp.query().1.sq_psn.unwrap().value();
            assert!(next < start, "the PSN went from {start} to {next}: it did not wrap");
        }
    }
    // On a busy machine an answer may come after the timeout, and a tunnel in user space may lose.
    let is_lossless = harness.is_software() && on != On::Encrypted;
    if is_lossless && a.ctx.counters().transport.local_ack_timeout_err == 0 {
        assert_eq!(a.ctx.counters().transport.retransmitted_pkts, 0);
        assert_eq!(a.ctx.counters().drops.ghost_response, 0);
    }
}

/// RESET to RTS with the given PSNs.
fn connect_at(side: &Side, qp: &Qp, peer: &Side, its: &Qp, sq_psn: u32, rq_psn: u32) {
    let attr = QpAttr {
        path_mtu: Some(Mtu::Mtu256),
        dest_qpn: Some(its.qpn()),
        rq_psn: Some(Psn::new(rq_psn)),
        max_dest_rd_atomic: Some(16),
        min_rnr_timer: Some(12),
        sq_psn: Some(Psn::new(sq_psn)),
        max_rd_atomic: Some(16),
        retry_cnt: Some(7),
        rnr_retry: Some(7),
        timeout: Some(14),
        ..QpAttr::default()
    };
    let [_, rtr, rts] = attr.steps(QpType::Rc);
    let path = PeerPath::new(peer.address).budget(its.endpoint().budget);
    side.run(|| {
        qp.modify(&ModifyAttr::init(Access::ALL)).unwrap();
        qp.modify(&ModifyAttr { attr: rtr, path: Some(path) }).unwrap();
        qp.modify(&ModifyAttr { attr: rts, path: None }).unwrap();
    });
}

/// Every operation between `qp` and `peer`, which complete to the same queue.
fn talk(side: &Side, qp: &Qp, peer: &Qp, turns: u64) {
    const LEN: usize = 300_001;
    let source = side.pd.allocate(LEN, Access::ALL).unwrap();
    let target = side.pd.allocate(LEN + 15, Access::ALL).unwrap();
    for turn in 0..turns {
        let bytes = pattern(LEN, turn);
        source.write(0, &bytes);
        target.write(0, &vec![0; LEN]);
        let (remote, rkey) = (target.address(), target.rkey());
        let sges = [source.sge(0, LEN)];
        let recv = |mr: &Mr, wr_id| {
            peer.post_recv(&[RecvWr { wr_id, sges: &[mr.sge(0, LEN)] }]).unwrap();
        };
        recv(&target, 10);
        qp.post_send(&[wr(1, SendOp::Send { imm: None }, &sges)]).unwrap();
        both(side, [1, 10]);
        assert_same(&target.to_vec(0, LEN), &bytes, "SEND");

        recv(&target, 11);
        let reversed: Vec<u8> = bytes.iter().rev().copied().collect();
        source.write(0, &reversed);
        let imm = Some([9, 8, 7, 6]);
        qp.post_send(&[wr(2, SendOp::Write { remote, rkey, imm }, &sges)]).unwrap();
        both(side, [2, 11]);
        assert_same(&target.to_vec(0, LEN), &reversed, "WRITE");

        target.write(0, &bytes);
        qp.post_send(&[wr(3, SendOp::Read { remote, rkey }, &sges)]).unwrap();
        side.succeed(3);
        assert_same(&source.to_vec(0, LEN), &bytes, "READ");

        let word = (LEN + 7) & !7;
        let op = SendOp::FetchAdd { remote: remote + word as u64, rkey, add: 3 };
        qp.post_send(&[wr(4, op, &[source.sge(0, 8)])]).unwrap();
        side.succeed(4);
        assert_eq!(source.load_u64(0), 3 * turn);
    }
}

/// The send and the receive complete, in either order.
fn both(side: &Side, wr_ids: [u64; 2]) {
    let mut found = [side.next(), side.next()].map(|wc| {
        assert_eq!(wc.status, rocinante::WcStatus::Success);
        wc.wr_id
    });
    found.sort_unstable();
    assert_eq!(found, wr_ids);
}

pub fn a_device_reaches_itself(on: On) {
    for family in super::families(&on) {
        let why = "packets of a raw port to itself come back to the shard that sent them";
        let setup = Setup::new(on.clone()).family(family).may_break(Oracle::Steering, why);
        let harness = Harness::new(&setup);
        let [a, _] = &harness.sides;
        let prepared = [0, 1].map(|_| a.qp().build().unwrap());
        let ends = prepared.each_ref().map(|qp| qp.endpoint());
        let [first, second] = prepared;
        let options = &harness.setup.connect;
        let (first, second) = a.run(|| {
            let second = second.connect(&ends[0], options).unwrap();
            let first = first.connect(&ends[1], options).unwrap();
            (first, second)
        });
        // Often enough that software's rings wrap. A kernel's device is slow in a virtual machine.
        let turns = if harness.is_software() { 20 } else { 2 };
        talk(a, &first, &second, turns);
        // And a queue pair that is its own peer.
        let alone = a.qp().build().unwrap();
        let end = alone.endpoint();
        let alone = a.run(|| alone.connect(&end, options)).unwrap();
        talk(a, &alone, &alone, turns);
        if harness.is_software() {
            // Nothing is lost on the way. On a busy machine an ACK timeout may expire.
            let counters = a.ctx.counters();
            let it = &counters.transport;
            assert_eq!(it.out_of_seq_request + it.rcvd_seq_err, 0, "{counters:?}");
            assert!(it.retransmitted_pkts == 0 || it.local_ack_timeout_err > 0, "{counters:?}");
        }
    }
}
