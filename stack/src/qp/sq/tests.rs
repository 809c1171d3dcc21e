//! The ring, its lists, and the cost of its packets.

use super::*;
use crate::budget::Budget;
use crate::mem::Sge;
use crate::qp::scatter::parts;
use crate::types::Key;
use crate::verbs::QpType;

const FIRST: Seq = Seq(1 << 24);

fn queue(depth: u32) -> SendQueue {
    SendQueue::new(depth, SendLimits::new(QpType::Rc, 1, 16, Mtu::Mtu1024))
}

#[test]
fn parts_walk_a_list_with_holes() {
    let sge = |addr, len| Sge { addr, len, lkey: Key(1) };
    let list = [sge(100, 10), sge(0, 0), sge(200, 5), sge(300, 100)];
    let walk = |offset, len| parts(&list, offset, len).map(|p| (p.addr, p.len)).collect::<Vec<_>>();
    assert_eq!(walk(0, 10), [(100, 10)]);
    assert_eq!(walk(8, 10), [(108, 2), (200, 5), (300, 3)]);
    assert_eq!(walk(15, 4), [(300, 4)]);
    assert_eq!(walk(15, 0), []);
}

#[test]
fn requests_occupy_consecutive_psns() {
    let mut sq = queue(2);
    sq.reset(FIRST);
    let wr = SendWr::send(SendData::Sges(&[Sge { addr: 0, len: 2500, lkey: Key(1) }])).wr_id(1);
    let empty = SendWr { data: SendData::Inline(&[]), ..wr };
    for wr in [&wr, &empty] {
        sq.push(wr, sq.check(wr).unwrap(), Mtu::Mtu1024, 4, false);
    }
    assert_eq!((sq.get(WqeIndex(0)).first, sq.get(WqeIndex(0)).last()), (FIRST, FIRST + 2));
    assert_eq!((sq.get(WqeIndex(1)).first, sq.get(WqeIndex(1)).last()), (FIRST + 3, FIRST + 3));
    assert_eq!((sq.get(WqeIndex(0)).messages, sq.get(WqeIndex(1)).messages), (1, 2));
    assert_eq!(sq.get(WqeIndex(0)).payload(FIRST + 2, Mtu::Mtu1024), 452);
    assert_eq!(sq.check(&wr), Err(PostError::Full));
}

/// The cost of a range is the sum of its packets' costs, for all kinds of requests and also after
/// some are retired.
#[test]
fn a_range_is_charged_with_what_its_packets_cost() {
    let mtu = Mtu::Mtu1024;
    let remote = (0x1000, Key(9));
    let write = SendOp::Write { remote: remote.0, rkey: remote.1, imm: None };
    let read = SendOp::Read { remote: remote.0, rkey: remote.1 };
    let local = SendOp::LocalInv { rkey: Key(9) };
    let mut sq = queue(16);
    sq.reset(FIRST);
    // Close to the wrap of the number of packets.
    sq.totals.costs.datagrams = u32::MAX - 3;
    let mut costs = Vec::new();
    for (op, len) in
        [(write, 64), (read, 3000), (write, 2500), (local, 0), (write, 0), (write, 1024)]
    {
        let sges = [Sge { addr: 0, len, lkey: Key(1) }];
        let wr = SendWr::new(op, SendData::Sges(&sges[..usize::from(op != local)])).wr_id(1);
        sq.push(&wr, sq.check(&wr).unwrap(), mtu, 4, false);
        let wqe = sq.get(sq.tail - 1);
        costs.extend(wqe.first.until(wqe.last() + 1).map(|psn| match op {
            SendOp::Write { .. } => Cost::of(1, Budget::cost(wqe.payload(psn, mtu) + OVERHEAD)),
            _ => Cost::default(),
        }));
    }
    assert_eq!(costs.len(), 1 + 3 + 3 + 1 + 1);
    for retired in [0, 1, 2] {
        if retired > 0 {
            sq.pop();
        }
        let from = sq.get(sq.head).first;
        for from in from.until(sq.next_psn + 1) {
            for to in from.until(sq.next_psn + 1) {
                let range = (from - FIRST) as usize..(to - FIRST) as usize;
                let mut sum = Cost::default();
                costs[range].iter().for_each(|cost| sum.add(*cost));
                assert_eq!(sq.cost_between(from, to, mtu), sum, "{from:?} to {to:?}");
            }
        }
    }
    assert_eq!(sq.cost_between(sq.next_psn, sq.next_psn - 1, mtu), Cost::default());
}

#[test]
fn only_one_packet_that_waits_for_nothing_is_plain() {
    let mut sq = queue(8);
    let write = SendOp::Write { remote: 0, rkey: Key(9), imm: None };
    let read = SendOp::Read { remote: 0, rkey: Key(9) };
    let local = SendOp::LocalInv { rkey: Key(9) };
    for (op, len, fence, plain) in [
        (write, 1024, false, true),
        (write, 1025, false, false),
        (write, 0, false, true),
        (write, 64, true, false),
        (SendOp::Send { imm: None }, 64, false, true),
        (read, 64, false, false),
        (local, 0, false, false),
    ] {
        let sges = [Sge { addr: 0, len, lkey: Key(1) }];
        let mut wr = SendWr::new(op, SendData::Sges(&sges[..usize::from(op != local)])).wr_id(1);
        wr.fence = fence;
        let len = sq.check(&wr).unwrap();
        sq.push(&wr, len, Mtu::Mtu1024, 4, false);
        assert_eq!(sq.get(sq.tail - 1).is_plain(), plain, "{op:?} of {len} bytes");
    }
}
