//! SQD: requests that have begun are finished, and no other begins until RTS.

mod common;

use common::{Setup, Solo};
use rocinante_stack::types::Key;
use rocinante_stack::verbs::{QpEvent, QpState, SendData, SendOp, SendWr, WcStatus};
use rocinante_stack::wire::Opcode as Op;
use rocinante_stack::{Budget, ModifyError, QpAttr};

fn modify(solo: &mut Solo, attr: &QpAttr) -> Result<(), ModifyError> {
    let qpn = solo.end.qpn;
    solo.end.modify(qpn, attr)
}

/// Goes to SQD, with the event or without.
fn drain(solo: &mut Solo, notify: bool) {
    let sqd_async_notify = notify.then_some(true);
    let attr = QpAttr { state: Some(QpState::Sqd), sqd_async_notify, ..QpAttr::default() };
    modify(solo, &attr).expect("from RTS and SQD");
}

fn resume(solo: &mut Solo) {
    let attr = QpAttr { state: Some(QpState::Rts), ..QpAttr::default() };
    modify(solo, &attr).expect("from SQD");
}

#[test]
fn an_idle_queue_is_drained_at_once() {
    let mut solo = Solo::script();
    drain(&mut solo, true);
    assert_eq!(solo.event(), Some(QpEvent::SqDrained));
    drain(&mut solo, false);
    assert_eq!(solo.event(), None);
    assert_eq!(solo.state(), QpState::Sqd);
}

#[test]
fn what_was_begun_ends_and_what_was_not_waits() {
    let mut solo =
        Solo::new(&Setup { budget: Budget { bytes: 1 << 20, datagrams: 2 }, ..Setup::script() });
    solo.send(1, 8);
    solo.send(2, 700);
    solo.send(3, 8);
    assert_eq!(solo.sent(), ["SEND_ONLY #0 8B ack", "SEND_FIRST #1 256B ack"]);
    drain(&mut solo, true);
    solo.send(4, 8);
    solo.receive_ack(0);
    assert_eq!(solo.sent().len(), 1, "a begun message goes on");
    solo.receive_ack(1);
    assert_eq!(solo.sent().len(), 1);
    assert_eq!(solo.event(), None);
    solo.receive_ack(3);
    assert_eq!(solo.event(), Some(QpEvent::SqDrained));
    assert!(solo.sent().is_empty());
    assert_eq!(solo.completed(), [(1, WcStatus::Success), (2, WcStatus::Success)]);
    solo.wait_for_timer();
    assert!(solo.sent().is_empty(), "nothing waits for an answer");
    resume(&mut solo);
    assert_eq!(solo.sent().len(), 2);
    solo.receive_ack(5);
    assert_eq!(solo.completed(), [(3, WcStatus::Success), (4, WcStatus::Success)]);
    assert_eq!(solo.event(), None);
}

#[test]
fn what_is_lost_is_sent_again_in_sqd_and_gives_up_in_time() {
    let mut solo = Solo::new(&Setup { retry_cnt: 1, ..Setup::script() });
    solo.send(1, 8);
    solo.sent();
    solo.send(2, 8);
    drain(&mut solo, true);
    solo.wait_for_timer().expect("a timeout");
    assert_eq!(solo.sent(), ["SEND_ONLY #0 8B ack"]);
    solo.wait_for_timer().expect("a timeout");
    assert_eq!(solo.state(), QpState::Err);
    assert_eq!(solo.completed(), [(1, WcStatus::RetryExcErr), (2, WcStatus::WrFlushErr)]);
    assert_eq!(solo.event(), None);
}

#[test]
fn the_peer_is_served_in_sqd() {
    let mut solo = Solo::script();
    drain(&mut solo, false);
    let list = [solo.sge(0, 256)];
    solo.post_recv(1, &list);
    solo.receive_request(Op::RC_SEND_ONLY, 0, &[&[1; 8]]);
    assert_eq!(solo.completed(), [(1, WcStatus::Success)]);
    let reth = solo.reth(0, 8);
    solo.receive_request(Op::RC_RDMA_READ_REQUEST, 1, &[&reth]);
    assert_eq!(solo.sent(), ["READ_ONLY #1 8B"]);
}

#[test]
fn attributes_change_in_sqd() {
    let mut solo = Solo::script();
    drain(&mut solo, false);
    let attr = QpAttr {
        max_rd_atomic: Some(1),
        timeout: Some(10),
        retry_cnt: Some(0),
        ..QpAttr::default()
    };
    modify(&mut solo, &attr).expect("these");
    let mtu = QpAttr { path_mtu: Some(rocinante_stack::types::Mtu::Mtu4096), ..QpAttr::default() };
    let attribute = "IBV_QP_PATH_MTU";
    assert_eq!(
        modify(&mut solo, &mtu),
        Err(ModifyError::NotAllowed { to: QpState::Sqd, attribute })
    );
    resume(&mut solo);
    solo.add(1, 0);
    solo.add(2, 8);
    assert_eq!(solo.sent().len(), 1, "one atomic at a time now");
    assert_eq!(solo.wait_for_timer(), Some(4096 << 10));
    assert_eq!(solo.completed()[0], (1, WcStatus::RetryExcErr), "no retries now");
}

#[test]
fn a_fence_does_not_begin_a_request_in_sqd() {
    let mut solo = Solo::script();
    solo.read(1, 8);
    let op = SendOp::Write { remote: 0x9000, rkey: Key(0x99), imm: None };
    let data = SendData::Inline(&[]);
    let wr = SendWr::new(op, data).wr_id(2).fence();
    solo.post_wr(&wr).expect("a good request");
    assert_eq!(solo.sent().len(), 1);
    drain(&mut solo, true);
    solo.receive_data(Op::RC_RDMA_READ_RESPONSE_ONLY, 0, &[1; 8]);
    assert_eq!(solo.event(), Some(QpEvent::SqDrained));
    assert!(solo.sent().is_empty());
    resume(&mut solo);
    assert_eq!(solo.sent(), ["WRITE_ONLY #1 0B ack"]);
}

#[test]
fn nobody_is_told_who_did_not_ask_this_time() {
    let mut solo = Solo::script();
    solo.send(1, 8);
    solo.sent();
    drain(&mut solo, true);
    resume(&mut solo);
    solo.receive_ack(0);
    drain(&mut solo, false);
    assert_eq!(solo.event(), None);
}

#[test]
fn a_read_that_was_begun_survives_that_no_more_are_allowed() {
    let mut solo = Solo::script();
    solo.read(1, 8);
    assert_eq!(solo.sent().len(), 1);
    let attr = QpAttr { max_rd_atomic: Some(0), ..QpAttr::default() };
    drain(&mut solo, false);
    modify(&mut solo, &QpAttr { state: Some(QpState::Sqd), ..attr }).expect("in SQD");
    solo.wait_for_timer();
    assert_eq!(solo.sent().len(), 1, "its response was lost");
    solo.receive_data(Op::RC_RDMA_READ_RESPONSE_ONLY, 0, &[7; 8]);
    assert_eq!(solo.completed(), [(1, WcStatus::Success)]);
}
