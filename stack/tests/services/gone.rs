//! A range that was registered and is no memory any more: the access ends in an error, the queue
//! pair that made it ends, and another one goes on.

use crate::common::{BASE, Pair, Setup, sge};
use rocinante_stack::mem::Sge;
use rocinante_stack::types::{Key, Mtu};
use rocinante_stack::verbs::{QpState, QpType, RecvWr, SendOp, WcStatus};

/// The part of the arena that is gone: three packets long.
const GONE: std::ops::Range<u64> = 20_000..20_768;

fn pair(qp_type: QpType, srq: Option<u32>) -> (Pair, [Key; 2]) {
    let mtu = Mtu::Mtu256;
    let mut pair = Pair::new(&Setup { qp_type, mtu, qps: 2, srq, ..Setup::default() });
    let keys = pair.register();
    (pair, keys)
}

fn statuses(pair: &mut Pair, at: usize) -> Vec<(u64, WcStatus)> {
    pair.ends[at].host.completed()
}

fn recv(pair: &mut Pair, wr_id: u64, list: &[Sge]) {
    let end = &mut pair.ends[1];
    if end.srq.is_some() {
        end.share(wr_id, list).unwrap();
    } else {
        end.engine.post_recv(end.qpn, &RecvWr { wr_id, sges: list }, &mut end.host).unwrap();
    }
}

/// The other queue pair of both ends still carries messages.
fn the_other_lives(pair: &mut Pair, keys: [Key; 2]) {
    let op = SendOp::Write { remote: BASE + 5000, rkey: keys[1], imm: None };
    pair.send_on(0, 1, 99, op, &[sge(6000, 700, keys[0])]);
    pair.run();
    assert_eq!(statuses(pair, 0), [(99, WcStatus::Success)]);
    for end in &pair.ends {
        assert_eq!(end.state(end.qpns[1]), QpState::Rts);
    }
}

/// Beginnings and lengths of messages: in the part that is gone, and with packets before it.
const MESSAGES: [(u64, u32); 3] = [(GONE.start, 8), (GONE.start, 700), (GONE.start - 512, 700)];

#[test]
fn a_peer_that_names_it_gets_an_access_error() {
    for (at, len) in MESSAGES {
        let (remote, wanted) = (BASE + at, WcStatus::RemAccessErr);
        let write = |rkey| SendOp::Write { remote, rkey, imm: None };
        let read = |rkey| SendOp::Read { remote, rkey };
        let add = |rkey| SendOp::FetchAdd { remote, rkey, add: 1 };
        let store = |rkey| SendOp::AtomicWrite { remote, rkey };
        let ops: [&dyn Fn(Key) -> SendOp; 4] = [&write, &read, &add, &store];
        for op in &ops[..if len == 8 { 4 } else { 2 }] {
            let (mut pair, keys) = pair(QpType::Rc, None);
            pair.ends[1].host.gone = GONE;
            let op = op(keys[1]);
            pair.send(0, 1, op, &[sge(0, len, keys[0])]);
            pair.run();
            assert_eq!(statuses(&mut pair, 0), [(1, wanted)], "{op:?} of {len}");
            for end in &pair.ends {
                assert_eq!(end.state(end.qpns[0]), QpState::Err, "{op:?} of {len}");
            }
            the_other_lives(&mut pair, keys);
        }
    }
}

#[test]
fn a_request_that_names_it_is_a_local_protection_error() {
    for (at, len) in MESSAGES {
        let remote = BASE;
        let send = |_| SendOp::Send { imm: None };
        let write = |rkey| SendOp::Write { remote, rkey, imm: None };
        let read = |rkey| SendOp::Read { remote, rkey };
        let add = |rkey| SendOp::FetchAdd { remote, rkey, add: 1 };
        let ops: [&dyn Fn(Key) -> SendOp; 4] = [&send, &write, &read, &add];
        for op in &ops[..if len == 8 { 4 } else { 3 }] {
            let (mut pair, keys) = pair(QpType::Rc, None);
            recv(&mut pair, 7, &[sge(0, 700, keys[1])]);
            pair.ends[0].host.gone = GONE;
            let (op, good) = (op(keys[1]), SendOp::Write { remote, rkey: keys[1], imm: None });
            pair.send(0, 1, good, &[sge(0, 8, keys[0])]);
            pair.send(0, 2, op, &[sge(at, len, keys[0])]);
            pair.send(0, 3, good, &[sge(0, 8, keys[0])]);
            pair.run();
            let wanted =
                [(1, WcStatus::Success), (2, WcStatus::LocProtErr), (3, WcStatus::WrFlushErr)];
            assert_eq!(statuses(&mut pair, 0), wanted, "{op:?} of {len}");
            assert_eq!(pair.ends[0].state(pair.ends[0].qpns[0]), QpState::Err);
            the_other_lives(&mut pair, keys);
        }
    }
}

/// Also the second of two elements, and the receive of a shared queue.
#[test]
fn a_receive_that_names_it_fails_on_both_sides() {
    for srq in [None, Some(8)] {
        for (at, len) in MESSAGES {
            for split in [false, true] {
                let (mut pair, keys) = pair(QpType::Rc, srq);
                pair.ends[1].host.gone = GONE;
                let bad = sge(at, 1000, keys[1]);
                let list = if split { vec![sge(0, 4, keys[1]), bad] } else { vec![bad] };
                recv(&mut pair, 7, &list);
                pair.send(0, 1, SendOp::Send { imm: None }, &[sge(0, len, keys[0])]);
                pair.run();
                assert_eq!(statuses(&mut pair, 0), [(1, WcStatus::RemOpErr)], "{len}, {split}");
                assert_eq!(statuses(&mut pair, 1)[0], (7, WcStatus::LocProtErr), "{len}, {split}");
                the_other_lives(&mut pair, keys);
            }
        }
    }
}

#[test]
fn an_unreliable_connection_ends_only_where_it_is_gone() {
    let write = |rkey| SendOp::Write { remote: BASE + GONE.start, rkey, imm: None };
    for srq in [None, Some(8)] {
        // The sender's.
        let (mut pair, keys) = self::pair(QpType::Uc, srq);
        pair.ends[0].host.gone = GONE;
        pair.send(0, 1, SendOp::Send { imm: None }, &[sge(GONE.start - 512, 700, keys[0])]);
        pair.run();
        assert_eq!(statuses(&mut pair, 0), [(1, WcStatus::LocProtErr)]);
        assert_eq!(pair.ends[0].state(pair.ends[0].qpns[0]), QpState::Sqe);
        // The receiver's: no answer is awaited.
        let (mut pair, keys) = self::pair(QpType::Uc, srq);
        pair.ends[1].host.gone = GONE;
        pair.send(0, 1, write(keys[1]), &[sge(0, 700, keys[0])]);
        pair.run();
        assert_eq!(statuses(&mut pair, 0), [(1, WcStatus::Success)]);
        assert_eq!(pair.ends[1].engine.counters().remote_access_errors, 1);
        assert_eq!(pair.ends[1].state(pair.ends[1].qpns[0]), QpState::Rts);
        recv(&mut pair, 7, &[sge(GONE.start, 700, keys[1])]);
        pair.send(0, 2, SendOp::Send { imm: None }, &[sge(0, 700, keys[0])]);
        pair.run();
        assert_eq!(statuses(&mut pair, 0), [(2, WcStatus::Success)]);
        assert_eq!(statuses(&mut pair, 1)[0], (7, WcStatus::LocProtErr));
    }
}

/// A READ that was answered before, and is repeated when the memory is gone, does no harm.
#[test]
fn a_repeated_read_of_what_is_gone_is_dropped() {
    let (mut pair, keys) = pair(QpType::Rc, None);
    let mut lost = false;
    // The answer is lost once.
    pair.pass = Box::new(move |from, _| from == 0 || std::mem::replace(&mut lost, true));
    let read = SendOp::Read { remote: BASE + GONE.start, rkey: keys[1] };
    pair.send(0, 1, read, &[sge(0, 8, keys[0])]);
    pair.deliver(0);
    pair.deliver(1);
    pair.ends[1].host.gone = GONE;
    pair.run_until(|pair| !pair.ends[0].host.completions.is_empty());
    assert_eq!(statuses(&mut pair, 0)[0].1, WcStatus::RetryExcErr);
    assert_eq!(pair.ends[1].state(pair.ends[1].qpns[0]), QpState::Rts);
}
