//! Many queue pairs between two devices: mixed operations, every byte verified.

use std::sync::atomic::{AtomicBool, Ordering};

use rocinante::verbs::{Mtu, SendOp, WcOpcode};
use rocinante::{Access, Mr, Qp, RecvWr, WcStatus};

use crate::harness::{Harness, On, Setup, assert_same, next, pattern, wr};

const QPS: usize = 64;

/// Each queue pair has its own slice of the regions of both sides. In each round each queue pair
/// posts one of each operation, with sizes of its own; then all bytes are compared.
pub fn mixed_operations_on_64_queue_pairs(on: On) {
    const SLICE: usize = 5 * SPAN;
    let harness = Harness::new(&Setup::new(on).mtu(Mtu::Mtu1024));
    let [a, b] = &harness.sides;
    let qps: Vec<[Qp; 2]> = (0..QPS).map(|_| harness.pair()).collect();
    let mine = a.pd.allocate(QPS * SLICE, Access::ALL).unwrap();
    let its = b.pd.allocate(QPS * SLICE, Access::ALL).unwrap();
    for round in 0..4u64 {
        let mut expected = Vec::new();
        for index in 0..QPS {
            let at = index * SLICE;
            let seed = round * QPS as u64 + index as u64;
            let job = Job { seed, at, mine: &mine, its: &its };
            expected.push(job.prepare());
        }
        for (index, [_, peer]) in qps.iter().enumerate() {
            let sges = [its.sge(index * SLICE + SPAN, SPAN)];
            peer.post_recv(&[RecvWr { wr_id: index as u64, sges: &sges }]).unwrap();
            peer.post_recv(&[RecvWr { wr_id: index as u64, sges: &[] }]).unwrap();
        }
        for (index, [qp, _]) in qps.iter().enumerate() {
            let seed = round * QPS as u64 + index as u64;
            Job { seed, at: index * SLICE, mine: &mine, its: &its }.post(qp);
        }
        let mut done = [0; QPS];
        for _ in 0..QPS * 5 {
            let wc = a.next();
            assert_eq!(wc.status, WcStatus::Success);
            // In order within each queue pair.
            let index = (wc.wr_id / 8) as usize;
            assert_eq!((wc.wr_id % 8, wc.qpn), (done[index], qps[index][0].qpn()));
            done[index] += 1;
        }
        for _ in 0..QPS * 2 {
            let wc = b.next();
            let imm = (wc.opcode == WcOpcode::RecvRdmaWithImm).then_some([1, 2, 3, 4]);
            assert_eq!((wc.status, wc.imm), (WcStatus::Success, imm));
            assert_eq!(wc.qpn, qps[wc.wr_id as usize][1].qpn());
        }
        for (index, expected) in expected.iter().enumerate() {
            let at = index * SLICE;
            let what = format!("round {round}, queue pair {index}");
            assert_same(&mine.to_vec(at, SLICE), &expected.mine, &format!("{what}, here"));
            assert_same(&its.to_vec(at, SLICE), &expected.its, &format!("{what}, there"));
        }
    }
    assert_eq!((a.cq.poll_one().unwrap(), b.cq.poll_one().unwrap()), (None, None));
}

/// Room for one operation's data.
const SPAN: usize = 12_000;

/// The work of one queue pair in one round. Both slices have five spans: a source, the target of a
/// SEND, of a WRITE with immediate, of a READ, and words for atomics.
struct Job<'a> {
    seed: u64,
    at: usize,
    mine: &'a Mr,
    its: &'a Mr,
}

struct Slices {
    mine: Vec<u8>,
    its: Vec<u8>,
}

impl Job<'_> {
    /// Length of operation `nth`: small ones and large ones.
    fn len(&self, nth: u64) -> usize {
        let mixed = (self.seed * 8 + nth).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33;
        if mixed.is_multiple_of(3) { (mixed % 100) as usize } else { (mixed as usize) % SPAN }
    }

    /// Fills both slices, and returns their expected content.
    fn prepare(&self) -> Slices {
        let mut mine = pattern(5 * SPAN, 2 * self.seed);
        let mut its = pattern(5 * SPAN, 2 * self.seed + 1);
        self.mine.write(self.at, &mine);
        self.its.write(self.at, &its);
        let (send, write, read) = (self.len(0), self.len(1), self.len(2));
        its[SPAN..SPAN + send].copy_from_slice(&mine[..send]);
        its[2 * SPAN..2 * SPAN + write].copy_from_slice(&mine[..write]);
        mine[3 * SPAN..3 * SPAN + read].copy_from_slice(&its[..read]);
        let word = |bytes: &[u8]| u64::from_ne_bytes(bytes[4 * SPAN..][..8].try_into().unwrap());
        let found = word(&its);
        let sum = found.wrapping_add(self.seed);
        mine[4 * SPAN..][..8].copy_from_slice(&found.to_ne_bytes());
        mine[4 * SPAN + 8..][..8].copy_from_slice(&sum.to_ne_bytes());
        its[4 * SPAN..][..8].copy_from_slice(&(!sum).to_ne_bytes());
        Slices { mine, its }
    }

    fn post(&self, qp: &Qp) {
        let (mine, its, at) = (self.mine, self.its, self.at);
        let rkey = its.rkey();
        let there = |offset: usize| its.address() + (at + offset) as u64;
        let (send, write, read) = (self.len(0), self.len(1), self.len(2));
        let mut word = [0; 8];
        its.read(at + 4 * SPAN, &mut word);
        let sum = u64::from_ne_bytes(word).wrapping_add(self.seed);
        let imm = Some([1, 2, 3, 4]);
        let requests = [
            (SendOp::Send { imm: None }, mine.sge(at, send)),
            (SendOp::Write { remote: there(2 * SPAN), rkey, imm }, mine.sge(at, write)),
            (SendOp::Read { remote: there(0), rkey }, mine.sge(at + 3 * SPAN, read)),
            (
                SendOp::FetchAdd { remote: there(4 * SPAN), rkey, add: self.seed },
                mine.sge(at + 4 * SPAN, 8),
            ),
            (
                SendOp::CompareSwap { remote: there(4 * SPAN), rkey, compare: sum, swap: !sum },
                mine.sge(at + 4 * SPAN + 8, 8),
            ),
        ];
        let index = (at / (5 * SPAN)) as u64;
        for (nth, (op, sge)) in requests.into_iter().enumerate() {
            qp.post_send(&[wr(8 * index + nth as u64, op, &[sge])]).unwrap();
        }
    }
}

/// Queue pairs are made, connected, used and destroyed, some with work outstanding, while eight
/// others work undisturbed.
pub fn queue_pairs_come_and_go_while_others_work(on: On) {
    const LEN: usize = 30_000;
    let harness = Harness::new(&Setup::new(on));
    let [a, b] = &harness.sides;
    let target = b.pd.allocate(9 * LEN, Access::ALL).unwrap();
    let source = a.pd.allocate(LEN, Access::ALL).unwrap();
    source.write(0, &pattern(LEN, 4));
    let stop = AtomicBool::new(false);
    let steady_cq = a.ctx.create_cq(64).unwrap();
    let steady: Vec<[Qp; 2]> = (0..8)
        .map(|_| {
            let mine = a.pd.qp(&steady_cq, &steady_cq).access(Access::ALL).build().unwrap();
            harness.connect([mine, b.qp().build().unwrap()])
        })
        .collect();
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let mut turns = 0u64;
            while !stop.load(Ordering::Relaxed) {
                for (index, [qp, _]) in steady.iter().enumerate() {
                    let remote = target.address() + (index * LEN) as u64;
                    let write = SendOp::Write { remote, rkey: target.rkey(), imm: None };
                    qp.post_send(&[wr(turns, write, &[source.sge(0, LEN)])]).unwrap();
                }
                for _ in &steady {
                    let wc = next(&steady_cq);
                    let counters = || [a, b].map(|side| side.ctx.counters());
                    assert_eq!(wc.status, WcStatus::Success, "{wc:?}\n{:#?}", counters());
                    assert_eq!(wc.wr_id, turns);
                }
                turns += 1;
            }
            turns
        });
        for round in 0..60u64 {
            let [qp, peer] = harness.pair();
            let remote = target.address() + (8 * LEN) as u64;
            let rkey = target.rkey();
            let write = SendOp::Write { remote, rkey, imm: None };
            let sges = [source.sge(0, LEN)];
            qp.post_send(&[wr(round, write, &sges)]).unwrap();
            a.succeed(round);
            if round % 2 == 0 {
                let list: Vec<_> = (0..32).map(|_| wr(u64::MAX, write, &sges)).collect();
                qp.post_send(&list).unwrap();
            }
            if round % 4 < 2 {
                drop(peer);
                drop(qp);
            } else {
                drop(qp);
                drop(peer);
            }
            // Take the completions of the destroyed queue pair.
            while a.cq.poll_one().unwrap().is_some() {}
        }
        stop.store(true, Ordering::Relaxed);
        assert!(worker.join().unwrap() > 0);
    });
    assert_same(&target.to_vec(0, LEN), &source.to_vec(0, LEN), "the last WRITE");
}
