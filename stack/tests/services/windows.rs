//! Memory windows: bound, used by the peer, bound again and invalidated, by either side.

use crate::common::{BASE, PD, Pair, Setup, Solo, pattern, reth, sge, to};
use rocinante_stack::mem::{Access, Accessor, Bind, MwType};
use rocinante_stack::types::Key;
use rocinante_stack::verbs::{
    QpEvent, QpState, QpType, SendData, SendOp, SendWr, WcOpcode, WcStatus,
};
use rocinante_stack::wire::Opcode as Op;

const REMOTE: Access = Access::REMOTE_WRITE.with(Access::REMOTE_READ).with(Access::REMOTE_ATOMIC);
const SEND: SendOp = SendOp::Send { imm: None };

/// The next key of a window.
fn next(key: Key) -> Key {
    Key(key.0 & !0xff | (key.0 + 1) & 0xff)
}

/// A request that binds `len` bytes of the arena from `offset` on.
fn bind(mw: Key, region: Key, offset: u64, len: u64) -> SendOp {
    SendOp::BindMw { mw, rkey: next(mw), region, addr: BASE + offset, len, access: REMOTE }
}

fn write(rkey: Key, offset: u64) -> SendOp {
    SendOp::Write { remote: BASE + offset, rkey, imm: None }
}

/// Two ends. The second has memory to which windows may be bound, and a window.
struct Ends {
    pair: Pair,
    /// The whole arena of the first end.
    source: Key,
    /// The whole arena of the second end, without remote access.
    region: Key,
    mw: Key,
}

fn ends(setup: &Setup, mw_type: MwType) -> Ends {
    let mut pair = Pair::new(setup);
    let len = setup.arena as u64;
    let source = pair.ends[0].host.register(0, len, Access::ALL);
    let region = pair.ends[1].host.register(0, len, Access::LOCAL_WRITE | Access::MW_BIND);
    let mw = pair.ends[1].host.regions.insert_window(PD, mw_type, 0x7654_3200).unwrap();
    pair.ends[0].host.arena.copy_from_slice(&pattern(setup.arena, 3));
    Ends { pair, source, region, mw }
}

/// `wr_id` and status of the completions at one end.
fn done(pair: &mut Pair, at: usize) -> Vec<(u64, WcStatus)> {
    pair.ends[at].host.completed()
}

#[test]
fn a_window_admits_the_peer_until_it_is_invalidated() {
    for qp_type in [QpType::Rc, QpType::Uc] {
        let setup = Setup { qp_type, ..Setup::default() };
        let Ends { mut pair, source, region, mw } = ends(&setup, MwType::Type2);
        let rkey = next(mw);
        pair.send(1, 1, bind(mw, region, 4096, 8192), &[]);
        pair.run();
        let bound = pair.completions(1)[0];
        assert_eq!(
            (bound.wr_id, bound.status, bound.opcode),
            (1, WcStatus::Success, WcOpcode::BindMw)
        );
        pair.send(0, 2, write(rkey, 4096), &[sge(100, 8192, source)]);
        pair.run();
        assert_eq!(done(&mut pair, 0), [(2, WcStatus::Success)]);
        assert_eq!(pair.ends[1].host.arena[4096..4096 + 8192], pattern(1 << 20, 3)[100..8292]);
        pair.send(1, 3, SendOp::LocalInv { rkey }, &[]);
        pair.run();
        let gone = pair.completions(1)[0];
        assert_eq!(
            (gone.wr_id, gone.status, gone.opcode),
            (3, WcStatus::Success, WcOpcode::LocalInv)
        );
        let before = pair.ends[1].host.arena.clone();
        pair.send(0, 4, write(rkey, 4096), &[sge(0, 10, source)]);
        pair.run();
        let refused =
            if qp_type == QpType::Rc { WcStatus::RemAccessErr } else { WcStatus::Success };
        assert_eq!(done(&mut pair, 0), [(4, refused)]);
        assert_eq!(pair.ends[1].host.arena, before);
        assert_eq!(pair.ends[1].engine.counters().remote_access_errors, 1);
    }
}

#[test]
fn everything_through_a_window_stays_inside() {
    for (op, need) in [
        (write(Key(0), 0), Access::REMOTE_WRITE),
        (SendOp::Read { remote: BASE, rkey: Key(0) }, Access::REMOTE_READ),
        (SendOp::FetchAdd { remote: BASE, rkey: Key(0), add: 1 }, Access::REMOTE_ATOMIC),
    ] {
        // Inside, outside on either side, and without the right.
        let cases = [(4096, need, true), (4088, need, false), (8192, need, false)];
        let other = REMOTE.without(need);
        for (at, access, admitted) in cases.into_iter().chain([(4096, other, false)]) {
            let Ends { mut pair, source, region, mw } = ends(&Setup::default(), MwType::Type2);
            let rkey = next(mw);
            let addr = BASE + 4096;
            pair.send(1, 1, SendOp::BindMw { mw, rkey, region, addr, len: 4096, access }, &[]);
            pair.run();
            let remote = BASE + at;
            let op = match op {
                SendOp::Write { imm, .. } => SendOp::Write { remote, rkey, imm },
                SendOp::Read { .. } => SendOp::Read { remote, rkey },
                _ => SendOp::FetchAdd { remote, rkey, add: 1 },
            };
            pair.send(0, 2, op, &[sge(0, 8, source)]);
            pair.run();
            let expected = if admitted { WcStatus::Success } else { WcStatus::RemAccessErr };
            assert_eq!(done(&mut pair, 0), [(2, expected)], "{op:?} at {at} with {access:?}");
        }
    }
}

#[test]
fn a_send_with_invalidate_takes_the_window_away() {
    for len in [0, 10, 256, 700] {
        let setup = Setup { arena: 1 << 20, ..Setup::script() };
        let Ends { mut pair, source, region, mw } = ends(&setup, MwType::Type2);
        let rkey = next(mw);
        pair.send(1, 1, bind(mw, region, 4096, 4096), &[]);
        pair.recv(1, 2, &[sge(65_536, 1000, region)]);
        pair.run();
        assert_eq!(done(&mut pair, 1), [(1, WcStatus::Success)]);
        let list = [sge(0, len, source)];
        pair.send(0, 3, SendOp::SendInv { rkey }, if len > 0 { &list } else { &[] });
        pair.run();
        let sent = pair.completions(0)[0];
        assert_eq!((sent.wr_id, sent.status, sent.opcode), (3, WcStatus::Success, WcOpcode::Send));
        let received = pair.completions(1)[0];
        assert_eq!((received.status, received.opcode), (WcStatus::Success, WcOpcode::Recv));
        assert_eq!((received.byte_len, received.imm), (len, None));
        assert_eq!(received.invalidated, Some(rkey));
        assert!(!pair.ends[1].host.regions.has_windows(region));
        pair.send(0, 4, write(rkey, 4096), &[sge(0, 1, source)]);
        pair.run();
        assert_eq!(done(&mut pair, 0), [(4, WcStatus::RemAccessErr)]);
    }
}

/// Class J: the SEND was placed and is acknowledged. Its receive reports the error, and the queue
/// pair breaks.
#[test]
fn a_send_that_may_not_invalidate_breaks_the_receiver_and_invalidates_nothing() {
    for which in 0..6 {
        let setup = Setup { qps: 2, ..Setup::script() };
        let mut solo = Solo::new(&setup);
        let len = setup.arena as u64;
        let region = solo.end.host.register(0, len, Access::LOCAL_WRITE | Access::MW_BIND);
        let (qpn, other) = (solo.end.qpn, solo.end.qpns[1]);
        let mut window = |mw_type, random, owner| {
            let regions = &mut solo.end.host.regions;
            let mw = regions.insert_window(PD, mw_type, random).unwrap();
            let (rkey, addr) = (next(mw), BASE);
            let bind = Bind { mw, rkey, region, addr, len: 64, access: REMOTE };
            regions.bind(Accessor { pd: PD, qpn: owner }, &bind).unwrap();
            rkey
        };
        let own = window(MwType::Type2, 0x1111_0000, qpn);
        let foreign = window(MwType::Type2, 0x2222_0000, other);
        let type_1 = window(MwType::Type1, 0x3333_0000, qpn);
        let free = solo.end.host.regions.insert_window(PD, MwType::Type2, 0x4444_0000).unwrap();
        let key = [region, foreign, type_1, free, Key(own.0 ^ 1), Key(0)][which];
        let list = [solo.sge(1024, 100)];
        solo.post_recv(1, &list);
        solo.post_recv(2, &list);
        solo.receive_request(Op::RC_SEND_ONLY_WITH_INVALIDATE, 0, &[&key.0.to_be_bytes(), &[7; 4]]);
        assert_eq!(solo.end.host.arena[1024..1028], [7; 4]);
        assert_eq!(solo.sent(), ["ACK #0"]);
        // A program that waits for solicited completions alone is woken by errors.
        assert!(solo.end.host.completions.iter().all(|cqe| cqe.solicited), "key {which}");
        let expected = [(1, WcStatus::RemInvReqErr), (2, WcStatus::WrFlushErr)];
        assert_eq!(solo.completed(), expected, "key {which}");
        assert_eq!((solo.state(), solo.event()), (QpState::Err, None));
        for key in [own, foreign, type_1] {
            assert_eq!(solo.end.host.regions.get(key).map(|shown| shown.len), Some(64));
        }
        assert!(solo.end.host.regions.get(solo.key).is_some());
        // A later request gets no response.
        solo.receive_request(Op::RC_SEND_ONLY, 1, &[&[7; 4]]);
        assert!(solo.sent().is_empty());
    }
}

#[test]
fn requests_without_packets_complete_in_order() {
    let Ends { mut pair, source, region, mw } = ends(&Setup::default(), MwType::Type2);
    for wr_id in 0..3 {
        pair.recv(0, 100 + wr_id, &[sge(0, 4096, source)]);
    }
    let (first, second) = (next(mw), next(next(mw)));
    let data = [sge(0, 3000, region)];
    pair.send(1, 1, SEND, &data);
    pair.send(1, 2, bind(mw, region, 0, 64), &[]);
    pair.send(1, 3, SEND, &data);
    pair.send(1, 4, SendOp::LocalInv { rkey: first }, &[]);
    pair.send(1, 5, bind(first, region, 64, 64), &[]);
    pair.send(1, 6, SEND, &data);
    pair.run();
    let expected: Vec<_> = (1..=6).map(|wr_id| (wr_id, WcStatus::Success)).collect();
    assert_eq!(done(&mut pair, 1), expected);
    assert_eq!(pair.ends[1].host.sends_retired, 6);
    assert_eq!(pair.ends[1].host.regions.get(second).map(|shown| shown.start), Some(BASE + 64));
    assert_eq!(pair.completions(0).len(), 3);
}

/// A request that was executed once is not executed again when packets around it are repeated.
#[test]
fn losses_do_not_repeat_or_skip_what_has_no_packets() {
    for seed in 1..200u64 {
        let setup = Setup { timeout: 10, retry_cnt: 7, ..Setup::default() };
        let Ends { mut pair, source, region, mw } = ends(&setup, MwType::Type2);
        let mut dice = fastrand::Rng::with_seed(seed);
        let mut random = |n: u64| dice.u64(..n);
        pair.pass = crate::common::one_lost_in(8, seed);
        let (mut key, mut bound, mut posted) = (mw, false, 0);
        for wr_id in 0..40 {
            let list = [sge(random(1000), random(5000) as u32, region)];
            let op = match random(4) {
                0 => SEND,
                1 => SendOp::Read { remote: BASE, rkey: source },
                _ if bound => SendOp::LocalInv { rkey: key },
                _ => bind(key, region, random(1000), 1 + random(1000)),
            };
            match op {
                SendOp::Send { .. } => pair.recv(0, 1000 + wr_id, &[sge(0, 8192, source)]),
                SendOp::LocalInv { .. } => bound = false,
                SendOp::BindMw { rkey, .. } => (key, bound) = (rkey, true),
                _ => {}
            }
            pair.send(1, wr_id, op, if op.is_local() { &[] } else { &list });
            posted += 1;
            if random(3) == 0 {
                pair.run_until(|_| random(4) == 0);
            }
        }
        pair.run();
        let expected: Vec<_> = (0..posted).map(|wr_id| (wr_id, WcStatus::Success)).collect();
        assert_eq!(done(&mut pair, 1), expected, "seed {seed}");
        assert_eq!(pair.ends[1].host.regions.has_windows(region), bound, "seed {seed}");
        assert!(pair.ends[1].host.regions.get(key).is_some(), "seed {seed}");
    }
}

/// A region of the whole arena, and a window that is not bound yet.
fn window() -> (Solo, Key, Key) {
    let mut solo = Solo::script();
    let len = solo.setup.arena as u64;
    let region = solo.end.host.register(0, len, Access::LOCAL_WRITE | Access::MW_BIND);
    let mw = solo.end.host.regions.insert_window(PD, MwType::Type2, 0x7654_3200).unwrap();
    (solo, region, mw)
}

#[test]
fn an_invalidation_waits_for_what_was_posted_before_it() {
    let (mut solo, region, mw) = window();
    let rkey = next(mw);
    let unasked = SendData::Sges(&[]);
    let quiet = |wr_id, op| SendWr::new(op, unasked).wr_id(wr_id).signaled(false);
    solo.post(1, bind(mw, region, 0, 64), &[]);
    // The SEND tells the peer the key, which the peer may use until it answers.
    solo.post_wr(&quiet(2, SEND)).unwrap();
    solo.post(3, SendOp::LocalInv { rkey }, &[]);
    assert_eq!(solo.send(4, 4).sent(), ["SEND_ONLY #0 0B ack"]);
    assert_eq!(solo.completed(), [(1, WcStatus::Success)]);
    let header = reth(BASE, rkey, 4);
    solo.receive_request(Op::RC_RDMA_WRITE_ONLY, 0, &[&header, &[5; 4]]);
    assert_eq!(solo.sent(), ["ACK #0"]);
    assert_eq!(solo.receive_ack(0).sent(), ["SEND_ONLY #1 4B ack"]);
    assert_eq!(solo.completed(), [(3, WcStatus::Success)]);
    solo.receive_request(Op::RC_RDMA_WRITE_ONLY, 1, &[&header, &[6; 4]]);
    assert_eq!(solo.sent(), ["NAK #1 access"]);
    assert_eq!(solo.end.host.arena[..4], [5; 4]);
}

#[test]
fn a_fenced_bind_waits_for_reads() {
    let (mut solo, region, mw) = window();
    solo.read(1, 8);
    let (op, data) = (bind(mw, region, 0, 64), SendData::Sges(&[]));
    solo.post_wr(&SendWr::new(op, data).wr_id(2).fence()).unwrap();
    assert_eq!(solo.sent().len(), 1);
    assert!(!solo.end.host.regions.has_windows(region));
    solo.receive_data(Op::RC_RDMA_READ_RESPONSE_ONLY, 0, &[1; 8]);
    solo.sent();
    assert!(solo.end.host.regions.has_windows(region));
    assert_eq!(solo.completed(), [(1, WcStatus::Success), (2, WcStatus::Success)]);
}

#[test]
fn what_cannot_be_bound_or_invalidated_fails_in_its_turn() {
    for (op, status) in [
        (bind(Key(1), Key(2), 0, 64), WcStatus::MwBindErr),
        (SendOp::LocalInv { rkey: Key(1) }, WcStatus::LocQpOpErr),
    ] {
        let mut solo = Solo::script();
        solo.send(1, 4);
        solo.post(2, op, &[]);
        assert_eq!(solo.send(3, 4).sent(), ["SEND_ONLY #0 4B ack"]);
        assert_eq!(solo.completed(), []);
        assert!(solo.receive_ack(0).sent().is_empty());
        let expected = [(1, WcStatus::Success), (2, status), (3, WcStatus::WrFlushErr)];
        assert_eq!(solo.completed(), expected);
        assert_eq!(solo.state(), QpState::Err);
    }
    // An unreliable queue pair goes to SQE.
    let mut solo = Solo::new(&Setup { qp_type: QpType::Uc, ..Setup::script() });
    let key = solo.key;
    solo.post(1, SendOp::LocalInv { rkey: key }, &[]);
    assert!(solo.send(2, 4).sent().is_empty());
    assert_eq!(solo.completed(), [(1, WcStatus::LocQpOpErr), (2, WcStatus::WrFlushErr)]);
    assert_eq!(solo.state(), QpState::Sqe);
    assert!(solo.end.host.regions.get(key).is_some());
}

#[test]
fn a_drained_queue_binds_nothing() {
    let (mut solo, region, mw) = window();
    let qpn = solo.end.qpn;
    solo.end.modify(qpn, &to(QpState::Sqd)).unwrap();
    solo.post(1, bind(mw, region, 0, 64), &[]);
    assert!(solo.sent().is_empty() && !solo.end.host.regions.has_windows(region));
    solo.end.modify(qpn, &to(QpState::Rts)).unwrap();
    solo.sent();
    assert!(solo.end.host.regions.has_windows(region));
    assert_eq!(solo.completed(), [(1, WcStatus::Success)]);
}

#[test]
fn a_region_that_is_to_be_bound_is_in_use() {
    let mut solo = Solo::script();
    solo.end.out.room = 0;
    solo.send(1, 4);
    solo.post(2, bind(Key(0x100), Key(0x200), 0, 64), &[]);
    assert!(solo.end.engine.uses_key(Key(0x200)));
    assert!(!solo.end.engine.uses_key(Key(0x100)));
}

#[test]
fn a_window_that_goes_while_it_is_read_or_written_ends_that() {
    let (mut solo, region, mw) = window();
    let rkey = next(mw);
    solo.post(1, bind(mw, region, 0, 4096), &[]).sent();
    solo.receive_request(Op::RC_RDMA_WRITE_FIRST, 0, &[&reth(BASE, rkey, 600), &[5; 256]]);
    solo.post(2, SendOp::LocalInv { rkey }, &[]).sent();
    solo.receive_request(Op::RC_RDMA_WRITE_MIDDLE, 1, &[&[6; 256]]);
    assert_eq!(solo.sent(), ["NAK #1 access"]);
    assert_eq!(solo.end.host.arena[255..257], [5, 0]);
    assert_eq!(solo.event(), Some(QpEvent::AccessErr));
}

#[test]
fn a_send_with_invalidate_has_the_key_in_its_last_packet() {
    let mut solo = Solo::script();
    solo.post(1, SendOp::SendInv { rkey: Key(0x0102_0304) }, &[solo.sge(0, 600)]);
    let packets = solo.packets();
    let opcodes: Vec<u8> = packets.iter().map(|packet| packet[0]).collect();
    assert_eq!(opcodes, [0x00, 0x01, 0x16]);
    assert_eq!(packets[2][12..16], [1, 2, 3, 4]);
    assert_eq!(packets[2].len(), 12 + 4 + 88 + 4);
    solo.post(2, SendOp::SendInv { rkey: Key(0x0102_0304) }, &[]);
    assert_eq!(
        solo.packets()[0][..16],
        [0x17]
            .iter()
            .chain(&packets[2][1..8])
            .chain(&[0x80, 0, 0, 0x13, 1, 2, 3, 4])
            .copied()
            .collect::<Vec<u8>>()[..]
    );
}
