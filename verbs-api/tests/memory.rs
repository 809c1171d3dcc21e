//! Registered memory and the programs that share it with a peer: a program that follows the rules
//! of [`Mr`] never races with the device. The test is small, because miri runs it (`cargo xtask
//! miri`): elsewhere a race would rarely show.

mod sim;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use rocinante::verbs::{SendData, SendOp};
use rocinante::{Access, Mr, Qp, RecvWr, SendWr};
use rocinante_netdev::sim::SimNet;
use sim::{PATIENCE, Side, connect, request, sides};

/// About four seconds: a peer under miri is slow.
const TIMEOUT: u8 = 20;

fn remote(mr: &Mr, offset: usize) -> SendOp {
    SendOp::Write { remote: mr.address() + offset as u64, rkey: mr.rkey(), imm: None }
}

/// Two devices, each with or without its background thread, and a connection between them.
fn connected(background: [bool; 2]) -> ([Side; 2], [Qp; 2]) {
    let sides = sides(&SimNet::new(), background);
    let qps = connect(&sides, TIMEOUT);
    (sides, qps)
}

/// Waits for `what`, without a call of verbs.
fn spin_until(mut what: impl FnMut() -> bool) {
    let start = Instant::now();
    while !what() {
        assert!(start.elapsed() < PATIENCE, "nothing came");
        thread::yield_now();
    }
}

/// Lengths, and offsets into each shape's place: whole words and parts of them, aligned and not.
const SHAPES: [(usize, usize); 10] =
    [(1, 0), (3, 9), (4, 16), (7, 24), (8, 0), (8, 3), (13, 3), (23, 1), (64, 64), (1500, 5)];

/// Distance between the places. Miri rejects a word that is stored as one and later in parts,
/// although that is no fault here.
const PLACE: usize = 128;

#[test]
fn who_polls_the_last_byte_may_read_all_of_them() {
    let ([a, b], [qp, _peer]) = &connected([false, true]);
    let shapes = || (0..).zip(SHAPES).map(|(i, (len, at))| (i as u8 + 1, len, i * PLACE + at));
    thread::scope(|scope| {
        scope.spawn(|| {
            for (round, len, at) in shapes() {
                spin_until(|| b.mr.load_byte(at + len - 1) == round);
                assert_eq!(b.mr.to_vec(at, len), vec![round; len]);
            }
        });
        for (round, len, at) in shapes() {
            a.mr.write(at, &vec![round; len]);
            let data = [a.mr.sge(at, len)];
            let write = request(round.into(), remote(&b.mr, at), SendData::Sges(&data));
            qp.post_send(&[write]).unwrap();
            a.succeed(round.into());
        }
    });
}

#[test]
fn who_polls_a_word_sees_it_whole_and_all_before_it() {
    const ROUNDS: u64 = 20;
    let ([a, b], [qp, _peer]) = &connected([false, true]);
    let seen = AtomicU64::new(0);
    let word = |round: u64| round * 0x0101_0101_0101_0101;
    thread::scope(|scope| {
        scope.spawn(|| {
            for round in 1..=ROUNDS {
                spin_until(|| {
                    let found = b.mr.load_u64(56);
                    assert!([round - 1, round].map(word).contains(&found), "{found:x} is torn");
                    found == word(round)
                });
                assert_eq!(b.mr.to_vec(0, 56), [round as u8; 56]);
                seen.store(round, Ordering::Release);
            }
        });
        for round in 1..=ROUNDS {
            let data = SendData::Inline(&[round as u8; 64]);
            qp.post_send(&[request(round, remote(&b.mr, 0), data)]).unwrap();
            a.succeed(round);
            spin_until(|| seen.load(Ordering::Acquire) == round);
        }
    });
}

#[test]
fn atomics_of_peers_and_of_the_program_add_up() {
    const ROUNDS: u64 = 15;
    let ([a, b], [qp, _peer]) = &connected([true, true]);
    let (at, rkey) = (b.mr.address() + 8, b.mr.rkey());
    thread::scope(|scope| {
        scope.spawn(|| (0..ROUNDS).for_each(|_| _ = b.mr.word(8).fetch_add(100, Ordering::SeqCst)));
        let mut last = 0;
        for round in 0..ROUNDS {
            let old = [a.mr.sge(0, 8)];
            let add = SendOp::FetchAdd { remote: at, rkey, add: 1 };
            qp.post_send(&[request(round, add, SendData::Sges(&old))]).unwrap();
            a.succeed(round);
            let found = a.mr.load_u64(0);
            assert!(found >= last && found % 100 == round, "{found} after {last}");
            last = found;
        }
    });
    let old = [a.mr.sge(0, 8)];
    let total = ROUNDS * 101;
    let swap = SendOp::CompareSwap { remote: at, rkey, compare: total, swap: 7 };
    qp.post_send(&[request(ROUNDS, swap, SendData::Sges(&old))]).unwrap();
    a.succeed(ROUNDS);
    assert_eq!((a.mr.load_u64(0), b.mr.load_u64(8)), (total, 7));
}

/// A thread that waits for the completion need not look at bytes: it owns the memory again.
#[test]
fn a_completion_gives_the_memory_back() {
    const ROUNDS: u64 = 8;
    let ([a, b], [qp, peer]) = &connected([true, true]);
    // Each side has its own thread; the background threads place and fetch.
    thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..ROUNDS {
                peer.post_recv(&[RecvWr { wr_id: round, sges: &[b.mr.sge(0, 1000)] }]).unwrap();
                let ready = SendOp::Send { imm: None };
                peer.post_send(&[request(round, ready, SendData::Inline(&[]))]).unwrap();
                // The receive may complete before the send does.
                assert_eq!([0, 1].map(|_| b.cq.wait_one(PATIENCE).unwrap().wr_id), [round; 2]);
                assert_eq!(b.mr.to_vec(0, 1000), vec![round as u8; 1000]);
                b.mr.write(0, &[0xff; 1000]);
            }
        });
        echo(a, qp, ROUNDS);
    });
    let read = SendOp::Read { remote: b.mr.address(), rkey: b.mr.rkey() };
    qp.post_send(&[request(ROUNDS, read, SendData::Sges(&[a.mr.sge(2000, 1000)]))]).unwrap();
    a.succeed(ROUNDS);
    assert_eq!(a.mr.to_vec(2000, 1000), vec![0xff; 1000]);
}

/// Sends 1000 bytes for each empty message that arrives.
fn echo(side: &Side, qp: &rocinante::Qp, rounds: u64) {
    for round in 0..rounds {
        qp.post_recv(&[RecvWr { wr_id: round, sges: &[] }]).unwrap();
        side.succeed(round);
        side.mr.write(0, &[round as u8; 1000]);
        let data = [side.mr.sge(0, 1000)];
        qp.post_send(&[request(round, SendOp::Send { imm: None }, SendData::Sges(&data))]).unwrap();
        side.succeed(round);
    }
}

/// Two threads share a queue pair, and a third drives the device; then the region is dropped while
/// a peer writes to it.
#[test]
fn threads_post_at_once_and_a_region_goes_while_it_is_written() {
    const EACH: u64 = 12;
    let ([a, b], [qp, _peer]) = &connected([true, true]);
    let done = AtomicBool::new(false);
    let target = b.pd.allocate(256, Access::ALL).unwrap();
    let (at, rkey) = (target.address(), target.rkey());
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Acquire) {
                b.ctx.progress();
                thread::yield_now();
            }
        });
        let posts = [0, 1].map(|thread| {
            let qp = &qp;
            scope.spawn(move || {
                for round in 0..EACH {
                    let remote = at + thread * 128;
                    let write = SendOp::Write { remote, rkey, imm: None };
                    let data = SendData::Inline(&[7; 64]);
                    qp.post_send(&[request(thread * EACH + round, write, data)]).unwrap();
                }
            })
        });
        let mut ids: Vec<u64> =
            (0..2 * EACH).map(|_| a.cq.wait_one(PATIENCE).unwrap().wr_id).collect();
        posts.into_iter().for_each(|post| post.join().unwrap());
        ids.sort_unstable();
        assert_eq!(ids, (0..2 * EACH).collect::<Vec<_>>());
        assert_eq!(target.to_vec(128, 64), [7; 64]);
        // The region is dropped while in use: the peer's writes succeed before, and fail after.
        let writes: Vec<_> = (0..EACH)
            .map(|round| {
                let write = SendOp::Write { remote: at, rkey, imm: None };
                request(round, write, SendData::Inline(&[9; 64]))
            })
            .collect();
        qp.post_send(&writes).unwrap();
        drop(target);
        let statuses: Vec<_> = (0..EACH).map(|_| a.cq.wait_one(PATIENCE).unwrap().status).collect();
        let failed = statuses.iter().skip_while(|status| **status == rocinante::WcStatus::Success);
        assert!(failed.clone().skip(1).all(|status| *status == rocinante::WcStatus::WrFlushErr));
        let first = failed.clone().next();
        assert!(first.is_none_or(|status| *status == rocinante::WcStatus::RemAccessErr));
        done.store(true, Ordering::Release);
    });
}

/// A record of one line as the guide has it: the version before the data in the last word, the
/// version after the data in the first word. A READ loads it ascending, so it never mixes two.
#[test]
fn a_read_of_a_line_sees_a_record_whole_or_knows_it_is_not() {
    let ([a, b], [qp, _peer]) = &connected([false, true]);
    let (done, gets) = (AtomicBool::new(false), if cfg!(miri) { 3 } else { 2_000 });
    thread::scope(|scope| {
        scope.spawn(|| {
            for version in 1.. {
                if done.load(Ordering::Relaxed) {
                    return;
                }
                b.mr.word(56).store(version, Ordering::Release);
                b.mr.write(8, &version.to_ne_bytes().repeat(6));
                b.mr.word(0).store(version, Ordering::Release);
                thread::yield_now();
            }
        });
        let (mut whole, mut newest) = (0, 0);
        let mut start = Instant::now();
        while whole < gets {
            assert!(start.elapsed() < PATIENCE, "{whole} whole records");
            qp.post(SendWr::read(&[a.mr.sge(0, 64)], b.mr.remote().slice(0, 64))).unwrap();
            a.succeed(0);
            let words: Vec<u64> = (0..8).map(|at| a.mr.load(8 * at)).collect();
            if words[0] == words[7] {
                assert!(words.iter().all(|word| *word == words[0]), "{words:?}");
                assert!(words[0] >= newest, "{words:?} after {newest}");
                (whole, newest, start) = (whole + 1, words[0], Instant::now());
            }
        }
        done.store(true, Ordering::Relaxed);
    });
}
