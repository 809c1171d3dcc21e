//! The unreliable connection: a message arrives whole or not at all, and no error is reported.

use crate::common::{BASE, PEER, Pair, Setup, Solo, pattern, reth, sge, to};
use rocinante_stack::mem::Access;
use rocinante_stack::types::{Key, Mtu};
use rocinante_stack::verbs::{
    QpEvent, QpState, QpType, RecvWr, SendData, SendOp, SendWr, WcOpcode, WcStatus,
};
use rocinante_stack::wire::Opcode as Op;
use rocinante_stack::wire::icrc::DF;
use rocinante_stack::{Budget, IpId, ModifyError, PeerAddress, PostError, QpAttr};

fn uc() -> Setup {
    Setup { qp_type: QpType::Uc, ..Setup::default() }
}

fn script() -> Solo {
    Solo::new(&Setup { qp_type: QpType::Uc, ..Setup::script() })
}

const IMM: Option<[u8; 4]> = Some([1, 2, 3, 4]);

#[test]
fn every_operation_at_every_mtu_and_no_word_from_the_receiver() {
    for mtu in Mtu::ALL {
        let setup = Setup { mtu, ..uc() };
        let bytes = mtu.bytes() as usize;
        for len in [0, 1, bytes - 1, bytes, bytes + 1, 10 * bytes + 3, 200_000] {
            let mut pair = Pair::new(&setup);
            let keys = pair.register();
            pair.pass = Box::new(|from, _| {
                assert_eq!(from, 0, "a receiver that answers");
                true
            });
            let data = pattern(len, 7);
            let half = setup.arena as u64 / 2;
            let len32 = len as u32;
            pair.ends[0].host.arena[..len].copy_from_slice(&data);
            // Two elements here, two others there.
            let cut = len32 / 3;
            let source = [sge(0, cut, keys[0]), sge(cut.into(), len32 - cut, keys[0])];
            let target = [sge(0, len32 - cut, keys[1]), sge(half / 2, cut, keys[1])];
            for wr_id in [100, 101] {
                pair.recv(1, wr_id, &target);
            }
            pair.recv(1, 102, &[]);
            let (remote, rkey) = (BASE + half, keys[1]);
            pair.send(0, 1, SendOp::Send { imm: None }, &source);
            pair.send(0, 2, SendOp::Send { imm: IMM }, &source);
            pair.send(0, 3, SendOp::Write { remote, rkey, imm: None }, &source);
            pair.send(0, 4, SendOp::Write { remote, rkey, imm: IMM }, &source);
            pair.run();
            let expected: Vec<_> = (1..=4).map(|id| (id, WcStatus::Success)).collect();
            assert_eq!(pair.ends[0].host.completed(), expected, "length {len}");
            let received: Vec<_> = pair
                .completions(1)
                .iter()
                .map(|c| (c.wr_id, c.status, c.opcode, c.byte_len, c.imm, c.sender))
                .collect();
            let recv = |id, opcode, imm| (id, WcStatus::Success, opcode, len32, imm, None);
            let expected = [
                recv(100, WcOpcode::Recv, None),
                recv(101, WcOpcode::Recv, IMM),
                recv(102, WcOpcode::RecvRdmaWithImm, IMM),
            ];
            assert_eq!(received, expected, "length {len}");
            let there = &pair.ends[1].host.arena;
            let first = len - cut as usize;
            assert!(there[..first] == data[..first], "SEND");
            assert!(there[half as usize / 2..][..cut as usize] == data[first..], "SEND");
            assert!(there[half as usize..][..len] == data[..], "WRITE");
            assert_eq!((pair.ends[0].host.sends_retired, pair.ends[1].host.recvs_retired), (4, 3));
        }
    }
}

#[test]
fn packets_carry_the_services_opcodes_and_ask_for_nothing() {
    let mut solo = script();
    solo.send(1, 600);
    let (remote, rkey) = (0x9000, Key(0x99));
    let list = [solo.sge(0, 300)];
    solo.post(2, SendOp::Write { remote, rkey, imm: IMM }, &list);
    let wr = SendWr::new(SendOp::Send { imm: IMM }, SendData::Inline(&[7; 9]))
        .wr_id(3)
        .signaled(false)
        .solicited()
        .fence();
    solo.post_wr(&wr).unwrap();
    let packets = solo.packets();
    let opcodes: Vec<_> = packets.iter().map(|packet| Op(packet[0])).collect();
    let expected = [
        Op::UC_SEND_FIRST,
        Op::UC_SEND_MIDDLE,
        Op::UC_SEND_LAST,
        Op::UC_RDMA_WRITE_FIRST,
        Op::UC_RDMA_WRITE_LAST_WITH_IMMEDIATE,
        Op::UC_SEND_ONLY_WITH_IMMEDIATE,
    ];
    assert_eq!(opcodes, expected);
    assert!(packets.iter().all(|packet| packet[8] == 0), "AckReq");
    assert_eq!(packets[5][1] & 0x80, 0x80, "solicited");
    // Done when sent; the last is unsignaled.
    assert_eq!(solo.completed(), [(1, WcStatus::Success), (2, WcStatus::Success)]);
    assert_eq!(solo.end.host.sends_retired, 3);
    assert_eq!(solo.wait_for_timer(), None);
}

#[test]
fn whatever_packet_is_lost_the_message_is_lost_and_the_receive_is_the_next_messages() {
    for lost in 0..4 {
        let mut pair = Pair::new(&Setup { mtu: Mtu::Mtu256, ..uc() });
        let keys = pair.register();
        let mut count = 0;
        pair.pass = Box::new(move |_, _| {
            count += 1;
            count != lost + 1
        });
        pair.ends[0].host.arena[..2000].copy_from_slice(&pattern(2000, 3));
        pair.recv(1, 100, &[sge(0, 1000, keys[1])]);
        pair.recv(1, 101, &[sge(1000, 1000, keys[1])]);
        pair.send(0, 1, SendOp::Send { imm: None }, &[sge(0, 1000, keys[0])]);
        pair.send(0, 2, SendOp::Send { imm: None }, &[sge(1000, 900, keys[0])]);
        pair.run();
        assert_eq!(pair.completions(0).len(), 2, "both were sent");
        let received = pair.completions(1);
        assert_eq!(received.len(), 1, "packet {lost}");
        assert_eq!((received[0].wr_id, received[0].byte_len), (100, 900));
        assert!(pair.ends[1].host.arena[..900] == pattern(2000, 3)[1000..1900]);
        let engine = &pair.ends[1].engine;
        assert_eq!(engine.counters().out_of_seq_request, 1);
        // Packets behind the lost one that begin no message.
        assert_eq!(engine.drops().incomplete, 3 - lost);
    }
}

#[test]
fn a_write_that_is_not_whole_announces_nothing() {
    let mut solo = script();
    solo.post_recv(1, &[]);
    solo.receive_request(Op::UC_RDMA_WRITE_FIRST, 0, &[&solo.reth(0x1000, 600), &[1; 256]]);
    solo.receive_request(Op::UC_RDMA_WRITE_LAST_WITH_IMMEDIATE, 2, &[&[0; 4], &[3; 88]]);
    assert_eq!(solo.completed(), []);
    solo.receive_request(
        Op::UC_RDMA_WRITE_ONLY_WITH_IMMEDIATE,
        3,
        &[&solo.reth(0, 1), &[0; 4], &[9]],
    );
    assert_eq!(solo.completed(), [(1, WcStatus::Success)]);
    assert_eq!(solo.end.engine.drops().incomplete, 1);
}

#[test]
fn a_new_message_ends_an_unfinished_one() {
    let mut solo = script();
    solo.post_recv(1, &[solo.sge(0, 1000)]);
    solo.receive_request(Op::UC_SEND_FIRST, 0, &[&[1; 256]]);
    // In sequence, but the sender gave the message up.
    solo.receive_request(Op::UC_SEND_FIRST, 1, &[&[2; 256]]);
    solo.receive_request(Op::UC_SEND_LAST, 2, &[&[3; 4]]);
    let cqe = solo.end.host.completions[0];
    assert_eq!((cqe.wr_id, cqe.status, cqe.byte_len), (1, WcStatus::Success, 260));
    assert_eq!(solo.end.host.arena[..256], [2; 256]);
    assert_eq!(solo.end.host.arena[256..260], [3; 4]);
}

#[test]
fn query_says_what_is_expected_and_what_leaves_next() {
    let mut solo = script();
    let numbers = |solo: &Solo| {
        let (_, attr, _) = solo.end.engine.query_qp(solo.end.qpn).unwrap();
        [attr.sq_psn, attr.rq_psn].map(|psn| psn.unwrap().value())
    };
    let [sent, expected] = solo.setup.psn;
    assert_eq!(numbers(&solo), [sent, expected]);
    solo.send(1, 600).sent();
    solo.receive_request(Op::UC_SEND_ONLY, 0, &[&[1; 8]]);
    solo.receive_request(Op::UC_SEND_ONLY, 4, &[&[1; 8]]);
    assert_eq!(numbers(&solo), [sent + 3, expected + 5]);
}

#[test]
fn what_comes_again_or_too_late_is_dropped() {
    let mut solo = script();
    for wr_id in 0..4 {
        solo.post_recv(wr_id, &[solo.sge(wr_id * 16, 16)]);
    }
    solo.receive_request(Op::UC_SEND_ONLY, 0, &[&[1]]);
    solo.receive_request(Op::UC_SEND_ONLY, 0, &[&[1]]);
    solo.receive_request(Op::UC_SEND_ONLY, 2, &[&[3]]);
    solo.receive_request(Op::UC_SEND_ONLY, 1, &[&[2]]);
    assert_eq!(solo.completed(), [(0, WcStatus::Success), (1, WcStatus::Success)]);
    assert_eq!(solo.end.engine.counters().duplicate_request, 2);
    // Far behind: the peer has started again.
    solo.receive_request(Op::UC_SEND_ONLY, -5000, &[&[4]]);
    solo.receive_request(Op::UC_SEND_ONLY, -4999, &[&[5]]);
    assert_eq!(solo.completed(), [(2, WcStatus::Success), (3, WcStatus::Success)]);
    assert_eq!(solo.end.host.arena[48], 5);
}

#[test]
fn what_is_refused_is_counted_and_nothing_breaks() {
    let mut solo = script();
    let read_only = solo.end.host.register(0x8000, 0x1000, Access::NONE);
    let bad = |key| reth(BASE + 0x8000, key, 600);
    // Whole messages: after a refused packet, the rest of its message is dropped.
    for (n, key) in [read_only, Key(0x1234_5678)].into_iter().enumerate() {
        let psn = 3 * n as i64;
        solo.receive_request(Op::UC_RDMA_WRITE_FIRST, psn, &[&bad(key), &[1; 256]]);
        solo.receive_request(Op::UC_RDMA_WRITE_MIDDLE, psn + 1, &[&[1; 256]]);
        solo.receive_request(Op::UC_RDMA_WRITE_LAST, psn + 2, &[&[1; 88]]);
    }
    assert_eq!(solo.end.engine.counters().remote_access_errors, 2);
    assert_eq!(solo.end.engine.drops().incomplete, 4);
    // No receive; a receive that is too small; lengths that contradict each other; a message within
    // another.
    solo.receive_request(Op::UC_SEND_ONLY, 6, &[&[1; 8]]);
    assert_eq!(solo.end.engine.drops().no_receive, 1);
    solo.post_recv(7, &[solo.sge(0, 8)]);
    solo.receive_request(Op::UC_SEND_ONLY, 7, &[&[1; 9]]);
    assert_eq!(solo.end.engine.drops().too_long, 1);
    solo.receive_request(Op::UC_RDMA_WRITE_ONLY, 8, &[&solo.reth(0, 5), &[1; 4]]);
    solo.receive_request(Op::UC_SEND_FIRST, 9, &[&[1; 255]]);
    solo.receive_request(Op::UC_SEND_FIRST, 10, &[&[1; 8]]);
    assert_eq!(solo.end.engine.counters().remote_invalid_request, 3);
    assert!(solo.end.host.arena.iter().all(|byte| *byte == 0));
    // The receive is still there.
    solo.receive_request(Op::UC_SEND_ONLY, 11, &[&[5; 8]]);
    assert_eq!(solo.completed(), [(7, WcStatus::Success)]);
    assert_eq!((solo.state(), solo.event()), (QpState::Rts, None));
    assert!(solo.packets().is_empty());
    assert_eq!(solo.end.engine.counters().out_of_seq_request, 0);
}

#[test]
fn without_the_right_to_write_there_is_none() {
    let setup = Setup { qp_type: QpType::Uc, access: Access::LOCAL_WRITE, ..Setup::script() };
    let mut solo = Solo::new(&setup);
    solo.receive_request(Op::UC_RDMA_WRITE_ONLY, 0, &[&solo.reth(0, 4), &[1; 4]]);
    assert_eq!(solo.end.engine.counters().remote_invalid_request, 1);
    assert_eq!(solo.end.host.arena[..4], [0; 4]);
}

#[test]
fn a_receive_whose_memory_is_gone_breaks_the_queue_pair() {
    let mut solo = script();
    solo.post_recv(1, &[sge(0, 100, Key(0x4242_4242))]);
    solo.post_recv(2, &[]);
    solo.receive_request(Op::UC_SEND_ONLY, 0, &[&[1; 8]]);
    assert_eq!(solo.completed(), [(1, WcStatus::LocProtErr), (2, WcStatus::WrFlushErr)]);
    assert_eq!(solo.state(), QpState::Err);
    assert!(solo.packets().is_empty());
}

#[test]
fn a_send_that_fails_stops_the_sends_until_they_are_let_go_on() {
    let mut solo = script();
    solo.post_recv(9, &[solo.sge(0, 100)]);
    solo.send(1, 300);
    solo.post(2, SendOp::Send { imm: None }, &[sge(0, 300, Key(0x4242_4242))]);
    assert_eq!(solo.send(3, 10).sent(), ["SEND_FIRST #0 256B", "SEND_LAST #1 44B"]);
    let failed = [(1, WcStatus::Success), (2, WcStatus::LocProtErr), (3, WcStatus::WrFlushErr)];
    assert_eq!(solo.completed(), failed);
    assert_eq!((solo.state(), solo.end.host.sends_retired), (QpState::Sqe, 3));
    // Further sends are flushed at once; receives still work.
    assert_eq!(solo.send(4, 10).completed(), [(4, WcStatus::WrFlushErr)]);
    solo.receive_request(Op::UC_SEND_ONLY, 0, &[&[1; 8]]);
    assert_eq!(solo.completed(), [(9, WcStatus::Success)]);
    solo.end.modify(solo.end.qpn, &to(QpState::Rts)).unwrap();
    solo.send(5, 10);
    // The PSNs of flushed requests are skipped: the peer takes the next packet as the next message.
    assert_eq!(solo.sent(), ["SEND_ONLY #6 10B"]);
    assert_eq!(solo.completed(), [(5, WcStatus::Success)]);
}

#[test]
fn memory_that_goes_while_a_message_is_sent_ends_it() {
    let mut pair = Pair::new(&Setup { mtu: Mtu::Mtu256, ..uc() });
    let keys = pair.register();
    let gone = pair.ends[0].host.register(0, 4096, Access::NONE);
    pair.recv(1, 100, &[sge(0, 4096, keys[1])]);
    pair.ends[0].out.room = 3;
    pair.send(0, 1, SendOp::Send { imm: None }, &[sge(0, 4096, gone)]);
    pair.deliver(0);
    pair.ends[0].host.regions.remove(gone);
    pair.run();
    assert_eq!(pair.ends[0].host.completed(), [(1, WcStatus::LocProtErr)]);
    assert_eq!(pair.completions(1), []);
    pair.ends[0].out.room = usize::MAX;
    pair.ends[0].modify(pair.ends[0].qpn, &to(QpState::Rts)).unwrap();
    pair.send(0, 2, SendOp::Send { imm: None }, &[sge(0, 500, keys[0])]);
    pair.run();
    let received = pair.completions(1);
    assert_eq!((received[0].wr_id, received[0].byte_len), (100, 500));
}

#[test]
fn only_send_and_write_can_be_posted() {
    let mut solo = script();
    let (remote, rkey) = (0x9000, Key(9));
    for op in [
        SendOp::Read { remote, rkey },
        SendOp::FetchAdd { remote, rkey, add: 1 },
        SendOp::CompareSwap { remote, rkey, compare: 0, swap: 1 },
        SendOp::SendTo { to: Default::default(), imm: None },
    ] {
        let data = SendData::Sges(&[solo.sge(0, 8)]);
        assert_eq!(solo.post_wr(&SendWr::new(op, data).wr_id(1)), Err(PostError::Operation));
    }
    assert!(solo.packets().is_empty() && solo.completed().is_empty());
}

#[test]
fn sqd_ends_between_two_messages() {
    let mut solo = script();
    let qpn = solo.end.qpn;
    solo.end.out.room = 1;
    solo.send(1, 600);
    solo.send(2, 600);
    assert_eq!(solo.packets().len(), 1);
    solo.end.modify(qpn, &QpAttr { sqd_async_notify: Some(true), ..to(QpState::Sqd) }).unwrap();
    assert_eq!((solo.packets().len(), solo.event()), (1, None));
    assert!(solo.end.engine.is_draining(qpn));
    assert_eq!((solo.packets().len(), solo.event()), (1, Some(QpEvent::SqDrained)));
    assert!(!solo.end.engine.is_draining(qpn));
    assert_eq!((solo.packets().len(), solo.completed()), (0, vec![(1, WcStatus::Success)]));
    solo.end.modify(qpn, &to(QpState::Rts)).unwrap();
    solo.end.out.room = usize::MAX;
    assert_eq!(solo.packets().len(), 3);
    assert_eq!(solo.completed(), [(2, WcStatus::Success)]);
}

/// Between two messages another path can be taken; the PSNs go on.
#[test]
fn another_path_is_taken_in_sqd() {
    let mut solo = script();
    let qpn = solo.end.qpn;
    let remote = crate::common::addr(3);
    let before = solo.end.engine.query_qp(qpn).unwrap().1.peer.unwrap();
    let peer = PeerAddress { remote, path: 9, ..before };
    let attr = QpAttr { peer: Some(peer), ..QpAttr::default() };
    solo.end.out.room = 1;
    solo.send(1, 600);
    assert_eq!(solo.packets().len(), 1);
    solo.end.modify(qpn, &to(QpState::Sqd)).unwrap();
    assert!(matches!(solo.end.modify(qpn, &attr), Err(ModifyError::Value { .. })), "in a message");
    solo.end.out.room = usize::MAX;
    assert_eq!((solo.packets().len(), solo.end.out.path), (2, 0));
    solo.end.modify(qpn, &attr).unwrap();
    solo.end.modify(qpn, &to(QpState::Rts)).unwrap();
    solo.send(2, 8);
    assert_eq!((solo.sent(), solo.end.out.path), (vec!["SEND_ONLY #3 8B".into()], 9));
    // Only packets from the peer's new address count.
    solo.post_recv(7, &[solo.sge(0, 64)]);
    solo.completed();
    for (from, completed) in [(crate::common::addr(2), 0), (remote, 1)] {
        let mut packet = solo.request(Op::UC_SEND_ONLY, 0, &[&[1; 8]]);
        crate::common::template(from, crate::common::addr(1)).seal(&mut packet);
        solo.receive_from(from, crate::common::addr(1), IpId::Exact { id: 0, flags: DF }, &packet);
        assert_eq!(solo.completed().len(), completed, "{from}");
    }
}

/// Packets of one long message are paced like messages; `pace.rs` has the other tests.
#[test]
fn a_receiver_gets_time_for_what_it_is_sent() {
    let budget = Budget { bytes: 8 << 20, datagrams: 512 };
    let setup =
        Setup { qp_type: QpType::Uc, mtu: Mtu::Mtu256, budget, arena: 1 << 18, ..Setup::script() };
    let mut solo = Solo::new(&setup);
    solo.send(1, 400 * 256);
    assert_eq!((solo.packets().len(), solo.completed().len()), (256, 0));
    assert!(solo.wait_for_timer().is_some());
    assert_eq!((solo.packets().len(), solo.completed().len()), (128, 0));
    assert!(solo.wait_for_timer().is_some());
    assert_eq!((solo.packets().len(), solo.completed().len()), (16, 1));
    assert_eq!(solo.wait_for_timer(), None);
}

#[test]
fn an_event_says_that_the_first_packet_came() {
    let setup = Setup { qp_type: QpType::Uc, ..Setup::script() };
    let mut end = crate::common::End::new(1, &setup);
    let qpn = end.qpn;
    for attr in &crate::common::steps(0, crate::common::addr(1), PEER, &setup)[..2] {
        end.modify(qpn, attr).unwrap();
    }
    let key = end.host.register(0, 4096, Access::ALL);
    let mut solo = script();
    (solo.end, solo.key) = (end, key);
    solo.post_recv(1, &[solo.sge(0, 8)]);
    solo.receive_request(Op::UC_SEND_ONLY, 0, &[&[1; 8]]);
    assert_eq!((solo.event(), solo.event()), (Some(QpEvent::CommEst), None));
    assert_eq!(solo.completed(), [(1, WcStatus::Success)]);
    solo.end.engine.post_recv(qpn, &RecvWr { wr_id: 2, sges: &[] }, &mut solo.end.host).unwrap();
    solo.end.modify(qpn, &to(QpState::Err)).unwrap();
    assert_eq!(solo.completed(), [(2, WcStatus::WrFlushErr)]);
}
