//! Our own room for acknowledgements: a queue pair reserves it while it has packets in flight that
//! did not ask for one, and no longer. All queue pairs share the room. It is so small here that a
//! reservation of one holds up another.

use crate::common::{BASE, Setup, Solo};
use rocinante_stack::Budget;
use rocinante_stack::types::{Key, Qpn};
use rocinante_stack::verbs::{SendData, SendOp, SendWr, WcStatus};
use rocinante_stack::wire::Opcode as Op;

/// `qps` connected queue pairs that share room for `answers`.
fn solo(qps: usize, answers: u32, quantum: u32) -> Solo {
    let own = Some(Budget { bytes: 1 << 20, datagrams: answers });
    let setup = Setup { qps, own, quantum, ..Setup::script() };
    let mut solo = Solo::new(&setup);
    for qp in 1..qps {
        solo.end.connect(solo.end.qpns[qp], 0, Qpn::new(0x77 + qp as u32), &setup);
    }
    solo
}

/// Calls `post` for another queue pair than the first.
fn other(solo: &mut Solo, qp: usize, post: impl FnOnce(&mut Solo)) {
    let first = std::mem::replace(&mut solo.end.qpn, solo.end.qpns[qp]);
    post(solo);
    solo.end.qpn = first;
}

#[test]
fn a_queue_pair_that_waits_for_a_receive_reserves_nothing() {
    let mut solo = solo(2, 1, 64);
    assert_eq!(solo.send(1, 10).sent(), ["SEND_ONLY #0 10B ack"]);
    other(&mut solo, 1, |solo| _ = solo.send(2, 20));
    assert_eq!(solo.sent(), [""; 0], "there is room for one answer");
    assert_eq!(solo.receive_rnr(0, 12).sent(), ["SEND_ONLY #0 20B ack"]);
}

/// The response to the READ acknowledges the quiet WRITE before it, too.
#[test]
fn a_read_behind_a_quiet_write_ends_its_reservation() {
    let mut solo = solo(2, 2, 64);
    solo.know_round_trip(1000);
    solo.receive_request(Op::RC_RDMA_WRITE_ONLY, 0, &[&solo.reth(0, 1), &[1]]);
    let op = SendOp::Write { remote: BASE, rkey: Key(0x99), imm: None };
    let quiet = SendWr::new(op, SendData::Inline(&[5; 8])).signaled(false);
    solo.post_wr(&quiet).expect("a good request");
    assert_eq!(solo.sent(), ["WRITE_ONLY #1 8B", "ACK #0"]);
    assert_eq!(solo.read(2, 10).sent(), ["READ #2 @9000+10"]);
    other(&mut solo, 1, |solo| _ = solo.read(3, 20));
    assert_eq!(solo.sent(), ["READ #0 @9000+20"]);
    solo.receive_data(Op::RC_RDMA_READ_RESPONSE_ONLY, 2, &[7; 10]);
    assert_eq!(solo.completed(), [(2, WcStatus::Success)]);
}

/// The port is full after the first packet of the connection, and the turn ends there. That packet
/// did not ask, so one of the other two queue pairs waits for its room.
#[test]
fn the_first_packet_of_a_connection_reserves_an_answer_if_it_does_not_ask() {
    let mut solo = solo(3, 2, 1);
    solo.end.out.room = 1;
    assert_eq!(solo.send(1, 600).sent(), ["SEND_FIRST #0 256B"]);
    solo.end.out.room = usize::MAX;
    for qp in [1, 2] {
        other(&mut solo, qp, |solo| _ = solo.read(2, 10));
    }
    assert_eq!(solo.sent(), ["READ #0 @9000+10", "SEND_MIDDLE #1 256B", "SEND_LAST #2 88B ack"]);
    assert_eq!(solo.receive_ack(2).completed(), [(1, WcStatus::Success)]);
    assert_eq!(solo.sent(), ["READ #0 @9000+10"], "the other one");
}
