//! Scenarios by the name of the fault, where the files by role leave one out: packets in, packets
//! out, completions expected.
//!
//! `docs/conformance.md` says which rule each of them proves.

use crate::common::{BASE, Pair, Setup, Solo, pattern, reth, sge};
use rocinante_stack::mem::Access;
use rocinante_stack::types::Key;
use rocinante_stack::verbs::{SendOp, WcStatus};
use rocinante_stack::wire::{Opcode as Op, Syndrome};

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
fn duplicates_that_come_before_the_answer_left_get_one_answer() {
    let mut solo = Solo::script();
    let (add, other) = (solo.atomic_eth(0, 5, 0), solo.atomic_eth(64, 77, 0));
    solo.receive_request(Op::RC_FETCH_ADD, 0, &[&add]);
    solo.receive_request(Op::RC_FETCH_ADD, 0, &[&other]);
    solo.receive_request(Op::RC_COMPARE_SWAP, 0, &[&other]);
    // One response was still to leave: it serves all three.
    assert_eq!(solo.sent(), ["ATOMIC_ACKNOWLEDGE #0 =0"]);
    assert_eq!(solo.end.host.arena[64..72], [0; 8]);
}

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

// ---- receives ----

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
