//! Scenarios by the name of the fault, where the files by role leave one out: packets in, packets
//! out, completions expected.
//!
//! `docs/conformance.md` says which rule each of them proves.

use crate::common::{BASE, Pair, Setup, Solo, pattern, reth, sge};
use rocinante_stack::mem::{Access, Sge};
use rocinante_stack::types::Key;
use rocinante_stack::verbs::{SendOp, WcStatus};
use rocinante_stack::wire::{Opcode as Op, Packet, Syndrome};

// ---- lost acknowledgements ----

/// Every operation is executed once, even if its only response is lost.
#[test]
fn a_lost_answer_of_each_operation_is_made_up_for() {
    let remote = |offset| BASE + offset;
    for n in 0..6 {
        let mut pair = Pair::new(&Setup { timeout: 8, ..Setup::script() });
        let keys = pair.register();
        let data = pattern(600, 7);
        pair.ends[0].host.arena[..600].copy_from_slice(&data);
        pair.ends[1].host.arena[4096..4696].copy_from_slice(&data);
        pair.recv(1, 90, &[sge(8192, 1000, keys[1])]);
        pair.recv(1, 91, &[sge(8192, 1000, keys[1])]);
        let (imm, rkey) = (Some([1, 2, 3, 4]), keys[1]);
        let (op, len) = match n {
            0 => (SendOp::Send { imm: None }, 600),
            1 => (SendOp::Send { imm }, 600),
            2 => (SendOp::Write { remote: remote(0), rkey, imm: None }, 600),
            3 => (SendOp::Write { remote: remote(0), rkey, imm }, 600),
            4 => (SendOp::Read { remote: remote(4096), rkey }, 600),
            _ => (SendOp::FetchAdd { remote: remote(16_384), rkey, add: 3 }, 8),
        };
        pair.send(0, 1, op, &[sge(if n < 4 { 0 } else { 16_384 }, len, keys[0])]);
        // The first responses are lost.
        let mut lost = 0;
        pair.pass = Box::new(move |from, _| {
            lost += u32::from(from == 1 && lost < 3);
            from == 0 || lost >= 3
        });
        pair.run();
        let ids: Vec<_> = pair.ends[0].host.completed();
        assert_eq!(ids, [(1, WcStatus::Success)], "operation {n}");
        let received = pair.completions(1).len();
        assert_eq!(received, usize::from(matches!(n, 0 | 1 | 3)), "operation {n}");
        let [a, b] = &pair.ends;
        match n {
            0 | 1 => assert_eq!(b.host.arena[8192..8792], data[..]),
            2 | 3 => assert_eq!(b.host.arena[..600], data[..]),
            4 => assert_eq!(a.host.arena[16_384..16_984], data[..]),
            _ => assert_eq!(b.host.arena[16_384..16_392], 3u64.to_ne_bytes()),
        }
    }
}

// ---- duplicates ----

#[test]
fn a_duplicate_atomic_with_other_operands_is_answered_as_the_first_was() {
    let mut solo = Solo::script();
    let (add, other) = (solo.atomic_eth(0, 5, 0), solo.atomic_eth(64, 77, 0));
    solo.receive_request(Op::RC_FETCH_ADD, 0, &[&add]);
    solo.receive_request(Op::RC_FETCH_ADD, 0, &[&other]);
    solo.receive_request(Op::RC_COMPARE_SWAP, 0, &[&other]);
    // One response was still to leave: it serves all three.
    assert_eq!(solo.sent(), ["ATOMIC_ACKNOWLEDGE #0 =0"]);
    solo.receive_request(Op::RC_FETCH_ADD, 0, &[&other]);
    assert_eq!(solo.sent(), ["ATOMIC_ACKNOWLEDGE #0 =0"]);
    assert_eq!(solo.end.host.arena[64..72], [0; 8]);
}

/// PSNs are compared within half of their space: up to 2^23 − 1 behind is a duplicate, and as far
/// ahead is out of order.
#[test]
fn half_of_the_numbers_are_old_and_half_are_to_come() {
    let mut solo = Solo::script();
    let header = solo.reth(0, 4);
    let body: &[&[u8]] = &[&header, &[9; 4]];
    assert_eq!(solo.receive_request(Op::RC_RDMA_WRITE_ONLY, 0, body).sent(), ["ACK #0"]);
    solo.receive_request(Op::RC_RDMA_WRITE_ONLY, 1 - 0x7f_ffff, body);
    assert_eq!(solo.sent(), ["ACK #0"]);
    solo.receive_request(Op::RC_RDMA_WRITE_ONLY, 1 + 0x7f_ffff, body);
    assert_eq!(solo.sent(), ["NAK #1 sequence"]);
    let counters = solo.end.engine.counters();
    assert_eq!((counters.duplicate_request, counters.out_of_seq_request), (1, 1));
}

// ---- gaps ----

// ---- responses out of their order ----

/// A READ response with an opcode that does not fit its position is accepted by its PSN, if its
/// length fits that PSN: hardware and rxe differ in how they split a repeated response. Its payload
/// is never placed anywhere else.
#[test]
fn a_read_response_is_placed_by_its_number_with_the_length_of_its_place() {
    use Op as O;
    let (first, middle, last, only) = (
        O::RC_RDMA_READ_RESPONSE_FIRST,
        O::RC_RDMA_READ_RESPONSE_MIDDLE,
        O::RC_RDMA_READ_RESPONSE_LAST,
        O::RC_RDMA_READ_RESPONSE_ONLY,
    );
    // The response to a repeated READ begins with FIRST again, in the middle of the whole.
    let good: [&[(Op, usize)]; 2] =
        [&[(first, 256), (first, 256), (last, 88)], &[(first, 256), (middle, 256), (only, 88)]];
    for talk in good {
        let mut solo = Solo::script();
        solo.read(1, 600).sent();
        for (psn, (opcode, len)) in talk.iter().enumerate() {
            solo.receive_data(*opcode, psn as i64, &vec![psn as u8 + 1; *len]);
        }
        assert_eq!(solo.completed(), [(1, WcStatus::Success)], "{talk:?}");
        let arena = &solo.end.host.arena;
        assert_eq!((arena[255], arena[256], arena[512], arena[600]), (1, 2, 3, 0));
    }
    // Each position with each wrong length.
    for (psn, right) in [(0, 256), (1, 256), (2, 88)] {
        for (opcode, len) in [(middle, 256), (last, 88), (last, 87), (only, 255), (only, 0)] {
            if len == right {
                continue;
            }
            let mut solo = Solo::script();
            solo.read(1, 600).sent();
            (0..psn).for_each(|psn| _ = solo.receive_data(first, psn, &[1; 256]));
            solo.receive_data(opcode, psn, &vec![9; len]);
            assert_eq!(solo.completed(), [(1, WcStatus::BadRespErr)], "#{psn} {opcode:?} {len}");
            assert!(solo.end.host.arena.iter().all(|byte| *byte != 9));
        }
    }
}

#[test]
fn an_ack_in_the_middle_of_a_read_does_not_end_it() {
    let mut solo = Solo::script();
    solo.read(1, 600).sent();
    solo.receive_data(Op::RC_RDMA_READ_RESPONSE_FIRST, 0, &[1; 256]);
    solo.receive_ack(2);
    assert!(solo.completed().is_empty());
    // The ACK says that the missing response was sent, so the READ is repeated.
    assert_eq!(solo.sent(), ["READ #1 @9100+344"]);
}

#[test]
fn an_ack_with_more_behind_it_is_still_an_ack() {
    let mut solo = Solo::sending(&Setup::script(), 1, 10);
    let aeth = [Syndrome::ACK_UNLIMITED.0, 0, 0, 0];
    solo.receive(&solo.response(Op::RC_ACKNOWLEDGE, 0, &[&aeth, &[0xaa; 64]]));
    assert_eq!(solo.completed(), [(1, WcStatus::Success)]);
    assert!(solo.end.host.arena.iter().all(|byte| *byte == 0));
}

// ---- lengths ----

#[test]
fn zero_length_of_every_request_takes_one_packet_and_completes() {
    let mut solo = Solo::script();
    let (remote, rkey, imm) = (0xdead_beef, Key(0x66), Some([1, 2, 3, 4]));
    let ops = [
        SendOp::Send { imm: None },
        SendOp::Send { imm },
        SendOp::Write { remote, rkey, imm: None },
        SendOp::Write { remote, rkey, imm },
        SendOp::Read { remote, rkey },
    ];
    for (id, op) in ops.into_iter().enumerate() {
        // No list at all, and an empty element with an unregistered key.
        solo.post(id as u64, op, &[]);
        solo.post(id as u64 + 10, op, &[sge(0, 0, Key(0x55))]);
    }
    let sent = solo.packets();
    assert_eq!(sent.len(), 10);
    assert!(sent.iter().all(|bytes| Packet::parse(bytes).unwrap().payload().is_empty()));
    solo.receive_data(Op::RC_RDMA_READ_RESPONSE_ONLY, 8, &[]);
    solo.receive_data(Op::RC_RDMA_READ_RESPONSE_ONLY, 9, &[]);
    let ids: Vec<_> = solo.completed();
    let expected: Vec<_> =
        (0..5).flat_map(|id| [(id, WcStatus::Success), (id + 10, WcStatus::Success)]).collect();
    assert_eq!(ids, expected);
}

/// An empty message touches no memory. So the receive may name any memory, with any number of
/// elements.
#[test]
fn an_empty_message_looks_at_no_key_of_its_receive() {
    let nowhere = sge(0, 64, Key(0x55));
    for list in [&[nowhere][..], &[sge(0, 0, Key(0x55))], &[nowhere, nowhere]] {
        let mut solo = Solo::script();
        solo.post_recv(1, list);
        assert_eq!(solo.receive_request(Op::RC_SEND_ONLY, 0, &[]).sent(), ["ACK #0"]);
        assert_eq!(solo.completed(), [(1, WcStatus::Success)]);
    }
}

// ---- keys ----

#[test]
fn ranges_of_our_own_that_wrap_are_local_errors() {
    for (addr, len) in [(u64::MAX - 3, 8), (u64::MAX, 1), (0, u32::MAX >> 1), (BASE - 1, 2)] {
        let mut solo = Solo::script();
        let element = Sge { addr, len, lkey: solo.key };
        solo.post(1, SendOp::Send { imm: None }, &[element]);
        assert!(solo.sent().is_empty(), "{addr:x}+{len}");
        assert_eq!(solo.completed(), [(1, WcStatus::LocProtErr)], "{addr:x}+{len}");
        let mut solo = Solo::script();
        solo.post_recv(1, &[Sge { addr, len, lkey: solo.key }]);
        solo.receive_request(Op::RC_SEND_ONLY, 0, &[&[1; 1]]);
        assert_eq!(solo.sent(), ["NAK #0 operational"], "{addr:x}+{len}");
        assert_eq!(solo.completed(), [(1, WcStatus::LocProtErr)], "{addr:x}+{len}");
    }
}

// ---- receives ----

/// A peer that answers every request with RNR NAKs delays one request, by the time that it asks
/// for.
#[test]
fn rnr_naks_without_end_cost_one_packet_each_and_no_retry() {
    let mut solo = Solo::new(&Setup { rnr_retry: 7, retry_cnt: 0, ..Setup::script() });
    solo.send(1, 10);
    for _ in 0..1000 {
        assert_eq!(solo.sent(), ["SEND_ONLY #0 10B ack"]);
        assert!(solo.receive_rnr(0, 1).sent().is_empty());
        assert!(solo.wait_for_timer().is_some());
    }
    assert!(solo.completed().is_empty());
    assert_eq!(solo.sent().len(), 1);
    assert_eq!(solo.receive_ack(0).completed(), [(1, WcStatus::Success)]);
}

#[test]
fn an_earlier_duplicate_is_answered_first() {
    let mut solo = Solo::script();
    let (long, short) = (solo.reth(0, 600), solo.reth(600, 8));
    solo.receive_request(Op::RC_RDMA_READ_REQUEST, 0, &[&long]);
    assert_eq!(solo.receive_request(Op::RC_RDMA_READ_REQUEST, 3, &[&short]).sent().len(), 4);
    solo.receive_request(Op::RC_RDMA_READ_REQUEST, 3, &[&short]);
    solo.receive_request(Op::RC_RDMA_READ_REQUEST, 0, &[&long]);
    let all = ["READ_FIRST #0 256B", "READ_MIDDLE #1 256B", "READ_LAST #2 88B", "READ_ONLY #3 8B"];
    assert_eq!(solo.sent(), all);
}

#[test]
fn only_a_write_with_immediate_that_succeeds_takes_a_receive() {
    let mut solo = Solo::script();
    solo.post_recv(1, &[solo.sge(0, 64)]);
    let (good, bad) = (solo.reth(64, 4), reth(BASE, Key(0x1234_5600), 4));
    solo.receive_request(Op::RC_RDMA_WRITE_ONLY, 0, &[&good, &[1; 4]]);
    assert_eq!(solo.sent(), ["ACK #0"]);
    assert!(solo.completed().is_empty());
    assert_eq!(solo.end.host.recvs_retired, 0);
    let rest: &[&[u8]] = &[&bad, &[1, 2, 3, 4], &[1; 4]];
    solo.receive_request(Op::RC_RDMA_WRITE_ONLY_WITH_IMMEDIATE, 1, rest);
    assert_eq!(solo.sent(), ["NAK #1 access"]);
    // The receive is flushed with all others, and its completion has no immediate.
    let cqes = std::mem::take(&mut solo.end.host.completions);
    assert_eq!((cqes.len(), cqes[0].status, cqes[0].imm), (1, WcStatus::WrFlushErr, None));
}

#[test]
fn rights_that_contradict_themselves_are_known() {
    for remote in [Access::REMOTE_WRITE, Access::REMOTE_ATOMIC] {
        assert!(remote.is_contradictory());
        assert!((remote | Access::REMOTE_READ).is_contradictory());
        assert!(!(remote | Access::LOCAL_WRITE).is_contradictory());
    }
    assert!(!Access::REMOTE_READ.is_contradictory());
}
