//! A responder and its requests, good and bad: order, lengths, acknowledgements.

use crate::common::Solo;
use rocinante_stack::verbs::{QpEvent, QpState};
use rocinante_stack::wire::Opcode as Op;

/// The NAK that a single bad request gets, as the first bad one after `before`, and the event.
fn refused(before: &[(Op, &[&[u8]])], opcode: Op, rest: &[&[u8]]) -> (String, Option<QpEvent>) {
    let mut solo = Solo::script();
    solo.post_recv(1, &[solo.sge(0, 4096)]);
    for (psn, (opcode, rest)) in before.iter().enumerate() {
        solo.receive_request(*opcode, psn as i64, rest);
    }
    solo.sent();
    solo.receive_request(opcode, before.len() as i64, rest);
    let sent = solo.sent();
    assert_eq!(sent.len(), 1, "{opcode:?}: {sent:?}");
    assert_eq!(solo.state(), QpState::Err, "{opcode:?}");
    // No more responses from here on.
    assert!(solo.receive_request(opcode, before.len() as i64, rest).sent().is_empty());
    (sent[0].clone(), solo.event())
}

fn invalid(psn: usize) -> String {
    format!("NAK #{psn} invalid")
}

/// The scripts have all opcodes in wrong places, but for FLUSH, which Soft-RoCE does not know.
#[test]
fn a_refused_request_is_an_event_unless_a_receive_tells() {
    let (full, header) = ([7u8; 256], Solo::script().reth(0, 1024));
    let event = Some(QpEvent::ReqErr);
    assert_eq!(refused(&[], Op::RC_SEND_MIDDLE, &[&full]), (invalid(0), event));
    let send_first: (Op, &[&[u8]]) = (Op::RC_SEND_FIRST, &[&full]);
    assert_eq!(refused(&[send_first], Op::RC_FLUSH, &[&[0; 20]]), (invalid(1), None));
    let write_first: (Op, &[&[u8]]) = (Op::RC_RDMA_WRITE_FIRST, &[&header, &full]);
    assert_eq!(refused(&[write_first], Op::RC_FLUSH, &[&[0; 20]]), (invalid(1), event));
}

#[test]
fn the_bytes_of_a_write_are_as_many_as_its_header_says() {
    let check = |announced, parts: &[(Op, usize)]| {
        let mut solo = Solo::script();
        solo.post_recv(1, &[]);
        let header = solo.reth(0, announced);
        for (psn, (opcode, len)) in parts.iter().enumerate() {
            let payload = &vec![9; *len][..];
            let begins = opcode.info().unwrap().place.begins();
            let rest: &[&[u8]] = if begins { &[&header, payload] } else { &[payload] };
            solo.receive_request(*opcode, psn as i64, rest);
        }
        assert_eq!(solo.sent().last(), Some(&invalid(parts.len() - 1)), "{announced} {parts:?}");
        assert_eq!(solo.state(), QpState::Err);
    };
    // The scripts have the other lengths. Four bytes are immediate data.
    check(4, &[(Op::RC_RDMA_WRITE_ONLY_WITH_IMMEDIATE, 4 + 3)]);
    // One packet would be enough.
    check(256, &[(Op::RC_RDMA_WRITE_FIRST, 256)]);
    check(512, &[(Op::RC_RDMA_WRITE_FIRST, 256), (Op::RC_RDMA_WRITE_MIDDLE, 256)]);
}

#[test]
fn an_rnr_nak_that_has_not_left_is_withdrawn_when_the_receive_comes_in_time() {
    let mut solo = Solo::script();
    solo.end.out.room = 0;
    solo.receive_request(Op::RC_SEND_ONLY, 0, &[&[1; 10]]);
    assert!(solo.sent().is_empty());
    solo.post_recv(7, &[solo.sge(0, 100)]);
    solo.receive_request(Op::RC_SEND_ONLY, 0, &[&[1; 10]]);
    solo.end.out.room = 10;
    assert_eq!(solo.sent(), ["ACK #0"]);
}

#[test]
fn a_gap_is_reported_once_each_time_that_the_peer_goes_back() {
    let mut solo = Solo::script();
    solo.receive_request(Op::RC_RDMA_WRITE_FIRST, 0, &[&solo.reth(0, 1000), &[1; 256]]);
    assert_eq!(solo.sent(), ["ACK #0"]);
    for psn in [2, 3, 4, 5] {
        solo.receive_request(Op::RC_RDMA_WRITE_MIDDLE, psn, &[&[9; 256]]);
    }
    assert_eq!(solo.sent(), ["NAK #1 sequence"]);
    solo.receive_request(Op::RC_RDMA_WRITE_MIDDLE, 6, &[&[9; 256]]);
    assert!(solo.sent().is_empty());
    // The requester went back, and the missing packet was lost again, or the NAK was.
    for psn in [2, 3, 4] {
        solo.receive_request(Op::RC_RDMA_WRITE_MIDDLE, psn, &[&[9; 256]]);
    }
    assert_eq!(solo.sent(), ["NAK #1 sequence"]);
    let counters = solo.end.engine.counters();
    assert_eq!((counters.out_of_seq_request, counters.sent_seq_err), (8, 2));
    assert_eq!(solo.end.engine.drops().out_of_sequence, 6);
    // It arrives, and the next gap is reported again.
    solo.receive_request(Op::RC_RDMA_WRITE_MIDDLE, 1, &[&[2; 256]]);
    solo.receive_request(Op::RC_RDMA_WRITE_LAST, 3, &[&[4; 232]]);
    assert_eq!(solo.sent(), ["NAK #2 sequence"]);
    assert_eq!(solo.end.host.arena[255..257], [1, 2]);
    assert_eq!(solo.end.host.arena[512], 0);
}

#[test]
fn a_packet_that_was_only_overtaken_costs_one_nak_for_what_is_really_missing() {
    let mut solo = Solo::script();
    let header = solo.reth(0, 4);
    for psn in [1, 0] {
        solo.receive_request(Op::RC_RDMA_WRITE_ONLY, psn, &[&header, &[1; 4]]);
    }
    assert_eq!(solo.sent(), ["NAK #1 sequence"]);
    solo.receive_request(Op::RC_RDMA_WRITE_ONLY, 2, &[&header, &[1; 4]]);
    assert!(solo.sent().is_empty());
    solo.receive_request(Op::RC_RDMA_WRITE_ONLY, 1, &[&header, &[1; 4]]);
    solo.receive_request(Op::RC_RDMA_WRITE_ONLY, 2, &[&header, &[1; 4]]);
    assert_eq!(solo.sent(), ["ACK #2"]);
}

#[test]
fn acks_are_coalesced_and_only_sent_when_asked_for() {
    let mut solo = Solo::script();
    let header = solo.reth(0, 4);
    for psn in 0..20 {
        solo.receive_request(Op::RC_RDMA_WRITE_ONLY, psn, &[&header, &[1; 4]]);
    }
    assert_eq!(solo.sent(), ["ACK #19"]);
    let mut quiet = solo.request(Op::RC_RDMA_WRITE_ONLY, 20, &[&header, &[1; 4]]);
    quiet[8] &= 0x7f;
    crate::common::seal(&mut quiet);
    assert!(solo.receive(&quiet).sent().is_empty());
}

/// A response acknowledges the requests before its own, and none after it.
#[test]
fn the_acknowledgement_owed_behind_an_atomic_or_a_read_leaves_after_its_response() {
    for (name, answer) in [("atomic", "ATOMIC_ACKNOWLEDGE"), ("READ", "READ_ONLY")] {
        let receive = |solo: &mut Solo, psn| {
            let (read, add) = (solo.reth(0, 8), solo.atomic_eth(64, 1, 0));
            match name {
                "READ" => solo.receive_request(Op::RC_RDMA_READ_REQUEST, psn, &[&read]),
                _ => solo.receive_request(Op::RC_FETCH_ADD, psn, &[&add]),
            };
        };
        let write = |solo: &mut Solo, psn| {
            solo.receive_request(Op::RC_RDMA_WRITE_ONLY, psn, &[&solo.reth(2000, 4), &[1; 4]]);
        };
        let begins = |sent: &[String]| -> Vec<String> {
            let words = sent.iter().map(|sent| sent.split(' ').take(2).collect::<Vec<_>>());
            words.map(|words| words.join(" ")).collect()
        };
        let response = |psn: i64| format!("{answer} #{psn}");
        let mut solo = Solo::script();
        // After it: both leave.
        receive(&mut solo, 0);
        write(&mut solo, 1);
        assert_eq!(begins(&solo.sent()), [response(0), "ACK #1".into()]);
        // Before it: the response acknowledges it.
        write(&mut solo, 2);
        receive(&mut solo, 3);
        assert_eq!(begins(&solo.sent()), [response(3)]);
        // Before and after it, and it comes again.
        write(&mut solo, 4);
        receive(&mut solo, 5);
        write(&mut solo, 6);
        assert_eq!(begins(&solo.sent()), [response(5), "ACK #6".into()]);
        receive(&mut solo, 5);
        write(&mut solo, 7);
        assert_eq!(begins(&solo.sent()), [response(5), "ACK #7".into()]);
        // A duplicate WRITE after it is acknowledged again, too.
        receive(&mut solo, 5);
        write(&mut solo, 6);
        assert_eq!(begins(&solo.sent()), [response(5), "ACK #7".into()]);
    }
}

#[test]
fn solicited_events_are_passed_on() {
    let mut solo = Solo::script();
    solo.post_recv(1, &[]);
    let mut packet = solo.request(Op::RC_SEND_ONLY, 0, &[]);
    packet[1] |= 0x80;
    crate::common::seal(&mut packet);
    solo.receive(&packet);
    assert!(solo.end.host.completions[0].solicited);
}
