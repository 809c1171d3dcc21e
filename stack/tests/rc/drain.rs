//! SQD: requests that have begun are finished, and no other begins until RTS.

use crate::common::{PEER, Setup, Solo, addr, template, to};
use rocinante_scripts::aeth;
use rocinante_stack::types::Key;
use rocinante_stack::verbs::{QpEvent, QpState, SendData, SendOp, SendWr, WcStatus};
use rocinante_stack::wire::icrc::DF;
use rocinante_stack::wire::{Opcode as Op, Syndrome};
use rocinante_stack::{Budget, IpId, ModifyError, PeerAddress, PeerKind, QpAttr};

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
    modify(solo, &to(QpState::Rts)).expect("from SQD");
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
    assert_eq!(solo.send(3, 8).sent(), ["SEND_ONLY #0 8B ack", "SEND_FIRST #1 256B ack"]);
    let is_draining = |solo: &Solo| solo.end.engine.is_draining(solo.end.qpn);
    assert!(!is_draining(&solo), "in RTS");
    drain(&mut solo, true);
    assert!(is_draining(&solo));
    solo.send(4, 8);
    assert_eq!(solo.receive_ack(0).sent().len(), 1, "a begun message goes on");
    assert_eq!(solo.receive_ack(1).sent().len(), 1);
    assert_eq!((solo.event(), is_draining(&solo)), (None, true));
    solo.receive_ack(3);
    assert_eq!((solo.event(), is_draining(&solo)), (Some(QpEvent::SqDrained), false));
    assert!(solo.sent().is_empty());
    assert_eq!(solo.completed(), [(1, WcStatus::Success), (2, WcStatus::Success)]);
    solo.wait_for_timer();
    assert!(solo.sent().is_empty(), "nothing waits for an answer");
    resume(&mut solo);
    assert_eq!(solo.sent().len(), 2);
    assert_eq!(solo.receive_ack(5).completed(), [(3, WcStatus::Success), (4, WcStatus::Success)]);
    assert_eq!(solo.event(), None);
}

#[test]
fn what_is_lost_is_sent_again_in_sqd_and_gives_up_in_time() {
    let mut solo = Solo::sending(&Setup { retry_cnt: 1, ..Setup::script() }, 1, 8);
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
    solo.post_recv(1, &[solo.sge(0, 256)]);
    solo.receive_request(Op::RC_SEND_ONLY, 0, &[&[1; 8]]);
    assert_eq!(solo.completed(), [(1, WcStatus::Success)]);
    solo.receive_request(Op::RC_RDMA_READ_REQUEST, 1, &[&solo.reth(0, 8)]);
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
    assert_eq!(solo.add(2, 8).sent().len(), 1, "one atomic at a time now");
    assert_eq!(solo.wait_for_timer(), Some(4096 << 10));
    assert_eq!(solo.completed()[0], (1, WcStatus::RetryExcErr), "no retries now");
}

#[test]
fn a_fence_does_not_begin_a_request_in_sqd() {
    let mut solo = Solo::script();
    solo.read(1, 8);
    let op = SendOp::Write { remote: 0x9000, rkey: Key(0x99), imm: None };
    solo.post_wr(&SendWr::new(op, SendData::Inline(&[])).wr_id(2).fence()).expect("a good request");
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
    let mut solo = Solo::sending(&Setup::script(), 1, 8);
    drain(&mut solo, true);
    resume(&mut solo);
    solo.receive_ack(0);
    drain(&mut solo, false);
    assert_eq!(solo.event(), None);
}

#[test]
fn a_read_that_was_begun_survives_that_no_more_are_allowed() {
    let mut solo = Solo::script();
    assert_eq!(solo.read(1, 8).sent().len(), 1);
    let attr = QpAttr { max_rd_atomic: Some(0), ..QpAttr::default() };
    drain(&mut solo, false);
    modify(&mut solo, &QpAttr { state: Some(QpState::Sqd), ..attr }).expect("in SQD");
    solo.wait_for_timer();
    assert_eq!(solo.sent().len(), 1, "its response was lost");
    solo.receive_data(Op::RC_RDMA_READ_RESPONSE_ONLY, 0, &[7; 8]);
    assert_eq!(solo.completed(), [(1, WcStatus::Success)]);
}

#[test]
fn what_was_begun_goes_again_by_as_many_as_are_allowed_now() {
    let mut solo = Solo::script();
    for wr_id in 1..=3 {
        solo.read(wr_id, 8);
    }
    assert_eq!(solo.sent().len(), 3);
    let attr = QpAttr { max_rd_atomic: Some(1), ..QpAttr::default() };
    drain(&mut solo, false);
    modify(&mut solo, &QpAttr { state: Some(QpState::Sqd), ..attr }).expect("in SQD");
    solo.wait_for_timer();
    for psn in 0..3 {
        assert_eq!(solo.sent(), [format!("READ #{psn} @9000+8")], "one at a time");
        solo.receive_data(Op::RC_RDMA_READ_RESPONSE_ONLY, psn, &[7; 8]);
        assert_eq!(solo.completed(), [(psn as u64 + 1, WcStatus::Success)]);
    }
}

/// The way to the peer at `addr(n)`.
fn path_to(n: u8, path: u32, budget: Budget) -> QpAttr {
    let (local, remote) = (addr(1), addr(n));
    let peer = PeerAddress { local, remote, path, budget, kind: PeerKind::announced(budget, None) };
    QpAttr { peer: Some(peer), ..QpAttr::default() }
}

/// A packet of the peer, from its address `addr(n)`.
fn receive_at(solo: &mut Solo, n: u8, packet: &[u8]) {
    let mut packet = packet.to_vec();
    template(addr(n), addr(1)).seal(&mut packet);
    solo.receive_from(addr(n), addr(1), IpId::Exact { id: 0, flags: DF }, &packet);
}

#[test]
fn another_path_is_taken_with_the_psns_that_are_due() {
    let mut solo = Solo::script();
    let budget = solo.setup.budget;
    solo.send(1, 8);
    assert_eq!((solo.sent().len(), solo.end.out.path), (1, 0));
    drain(&mut solo, true);
    solo.receive_ack(0);
    assert_eq!(solo.event(), Some(QpEvent::SqDrained));
    modify(&mut solo, &path_to(3, 9, budget)).expect("all is done");
    assert!(solo.send(2, 8).sent().is_empty(), "still SQD");
    resume(&mut solo);
    assert_eq!((solo.sent(), solo.end.out.path), (vec!["SEND_ONLY #1 8B ack".into()], 9));
    // Only packets from the peer's new address count.
    let ack = solo.response(Op::RC_ACKNOWLEDGE, 1, &[&aeth(Syndrome::ACK_UNLIMITED, 0)]);
    receive_at(&mut solo, 2, &ack);
    assert_eq!(solo.completed(), [(1, WcStatus::Success)]);
    receive_at(&mut solo, 3, &ack);
    assert_eq!(solo.completed(), [(2, WcStatus::Success)]);
    solo.post_recv(3, &[solo.sge(0, 256)]);
    let request = solo.request(Op::RC_SEND_ONLY, 0, &[&[1; 8]]);
    receive_at(&mut solo, 2, &request);
    assert!(solo.completed().is_empty());
    receive_at(&mut solo, 3, &request);
    assert_eq!((solo.completed(), solo.sent().len()), (vec![(3, WcStatus::Success)], 1));
    // A packet that is lost on the new path goes again on it.
    assert_eq!(solo.send(4, 8).sent().len(), 1);
    solo.wait_for_timer().expect("a timeout");
    assert_eq!((solo.sent(), solo.end.out.path), (vec!["SEND_ONLY #2 8B ack".into()], 9));
}

/// Lists of work in flight belong to no path.
#[test]
fn who_has_changed_its_path_often_has_one_set_of_lists() {
    let mut solo = Solo::script();
    let budget = solo.setup.budget;
    for psn in 0..4 {
        solo.send(psn, 8);
        assert_eq!((solo.sent().len(), solo.end.out.path), (1, psn as u32));
        assert_eq!(solo.receive_ack(psn as i64).completed(), [(psn, WcStatus::Success)]);
        let left = solo.end.engine.footprint();
        assert_eq!((left.in_flight_lists, left.spare_in_flight_lists), (1, 0));
        drain(&mut solo, false);
        modify(&mut solo, &path_to(2, psn as u32 + 1, budget)).expect("nothing is in flight");
        resume(&mut solo);
    }
}

#[test]
fn a_path_stays_while_something_is_on_it() {
    let mut solo = Solo::script();
    let budget = solo.setup.budget;
    assert_eq!(solo.send(1, 8).sent().len(), 1);
    let to = path_to(3, 9, budget);
    let is_about = |error| matches!(error, ModifyError::Value { attribute: "IBV_QP_AV", .. });
    let refused = |result: Result<(), _>| result.is_err_and(is_about);
    assert_eq!(
        modify(&mut solo, &to),
        Err(ModifyError::NotAllowed { to: QpState::Rts, attribute: "IBV_QP_AV" })
    );
    drain(&mut solo, false);
    assert!(refused(modify(&mut solo, &to)), "not acknowledged yet");
    solo.wait_for_timer().expect("a timeout");
    assert_eq!((solo.sent().len(), solo.end.out.path), (1, 0), "nothing was changed");
    solo.receive_ack(0);
    // Two families do not go together, and the change has no part that was taken.
    let mixed = PeerAddress { local: "::1".parse().unwrap(), ..to.peer.unwrap() };
    let attr = QpAttr { peer: Some(mixed), retry_cnt: Some(0), ..QpAttr::default() };
    assert!(refused(modify(&mut solo, &attr)));
    assert_eq!(modify(&mut solo, &to), Ok(()));
    let is = solo.end.engine.query_qp(solo.end.qpn).expect("a queue pair").1;
    assert_eq!((is.peer, is.retry_cnt), (to.peer, Some(7)));
}

/// Two queue pairs share the peer's receive queue. One leaves for another address. The other's
/// packets in flight still count, and the new address has room of its own.
#[test]
fn the_room_of_the_old_and_the_new_address_is_counted_apart() {
    let budget = Budget { bytes: 1 << 20, datagrams: 3 };
    let mut solo = Solo::new(&Setup { budget, qps: 2, ..Setup::script() });
    let other = solo.end.qpns[1];
    solo.end.connect(other, 0, PEER, &solo.setup.clone());
    let post = |solo: &mut Solo, qpn| {
        let list = [solo.sge(0, 8)];
        let wr = SendWr::new(SendOp::Send { imm: None }, SendData::Sges(&list));
        solo.end.engine.post_send(qpn, &wr, &mut solo.end.host).expect("room");
    };
    (0..2).for_each(|_| post(&mut solo, other));
    assert_eq!(solo.sent().len(), 2);
    drain(&mut solo, false);
    modify(&mut solo, &path_to(3, 9, budget)).expect("nothing was begun");
    resume(&mut solo);
    let moved = solo.end.qpn;
    (0..4).for_each(|_| post(&mut solo, moved));
    assert_eq!(solo.sent().len(), 3, "as if no packet had been sent");
    // Both leave: the next queue pair of either address finds all its room.
    for qpn in [moved, other] {
        solo.end.modify(qpn, &to(QpState::Reset)).expect("from everywhere");
    }
    solo.end.connect(moved, 0, PEER, &solo.setup.clone());
    (0..4).for_each(|_| post(&mut solo, moved));
    assert_eq!(solo.sent().len(), 3);
}

/// READs and atomics of the peer: fewer, while some are owed, then more.
#[test]
fn the_peer_may_ask_for_fewer_or_more_at_a_time() {
    let mut solo = Solo::new(&Setup { dest_rd_atomic: Some(3), ..Setup::script() });
    let reth = solo.reth(0, 8);
    let ask =
        |solo: &mut Solo, psn| _ = solo.receive_request(Op::RC_RDMA_READ_REQUEST, psn, &[&reth]);
    (0..3).for_each(|psn| ask(&mut solo, psn));
    drain(&mut solo, false);
    let at_most = |max| QpAttr { max_dest_rd_atomic: Some(max), ..QpAttr::default() };
    modify(&mut solo, &at_most(1)).expect("in SQD");
    assert_eq!(solo.sent().len(), 3, "accepted requests are answered");
    // Only the newest is kept for duplicates.
    ask(&mut solo, 3);
    assert_eq!(solo.sent(), ["READ_ONLY #3 8B"]);
    ask(&mut solo, 3);
    assert_eq!(solo.sent(), ["READ_ONLY #3 8B"]);
    ask(&mut solo, 2);
    assert!(solo.sent().is_empty(), "its record is gone");
    modify(&mut solo, &at_most(4)).expect("in SQD");
    (4..8).for_each(|psn| ask(&mut solo, psn));
    assert_eq!(solo.sent().len(), 4);
    // A request above the announced limit is the peer's mistake.
    modify(&mut solo, &at_most(2)).expect("in SQD");
    (8..11).for_each(|psn| ask(&mut solo, psn));
    solo.sent();
    assert_eq!(solo.state(), QpState::Err);
}
