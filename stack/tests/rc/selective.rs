//! Selective repeat between two Rocinantes: the receiver keeps and reports packets out of order,
//! and only missing packets are sent again. The encoding is documented in
//! `stack/src/rc/reorder.rs`.

use crate::common::{BASE, Pair, Setup, Solo, pattern, seal, sge};
use rocinante_stack::types::{Key, Mtu};
use rocinante_stack::verbs::{SendData, SendOp, SendWr, WcStatus};
use rocinante_stack::wire::{NakCode, Opcode as Op, Syndrome};
use rocinante_stack::{Budget, EngineConfig};

const TIMEOUT_14: u64 = 4096 << 14;

fn setup() -> Setup {
    Setup { held: EngineConfig::default().reorder_packets_max, ..Setup::script() }
}

fn solo() -> Solo {
    Solo::new(&setup())
}

/// A WRITE of one packet and one byte, `byte`, to `256 * byte`.
fn receive_write(solo: &mut Solo, psn: i64, byte: u8) {
    let header = solo.reth(256 * u64::from(byte), 1);
    solo.receive_request(Op::RC_RDMA_WRITE_ONLY, psn, &[&header, &[byte]]);
}

fn written(solo: &Solo) -> Vec<u8> {
    (1..=9).filter(|byte| solo.end.host.arena[256 * usize::from(*byte)] == *byte).collect()
}

// ---- the receiver ----

#[test]
fn what_came_too_early_is_held_told_of_and_placed_in_order() {
    let mut solo = solo();
    receive_write(&mut solo, 0, 1);
    receive_write(&mut solo, 2, 3);
    receive_write(&mut solo, 4, 5);
    assert_eq!(solo.sent(), ["NAK #1 sequence holds [2, 4]"]);
    assert_eq!(written(&solo), [1], "nothing after the gap is placed");
    receive_write(&mut solo, 1, 2);
    assert_eq!(written(&solo), [1, 2, 3]);
    assert_eq!(solo.sent(), ["NAK #3 sequence holds [4]"], "the next gap");
    receive_write(&mut solo, 3, 4);
    assert_eq!(written(&solo), [1, 2, 3, 4, 5]);
    assert_eq!(solo.sent(), ["ACK #4"]);
    let counters = solo.end.engine.counters();
    assert_eq!((counters.out_of_seq_request, counters.duplicate_request), (2, 0));
    assert_eq!(counters.sent_seq_err, 3, "each gap, and the next when the one before it closed");
    assert_eq!(solo.end.engine.drops().out_of_sequence, 0);
}

#[test]
fn what_is_held_already_is_not_held_twice_and_keeps_its_first_bytes() {
    let mut solo = solo();
    receive_write(&mut solo, 1, 2);
    solo.sent();
    solo.receive_request(Op::RC_RDMA_WRITE_ONLY, 1, &[&solo.reth(512, 1), &[99]]);
    assert_eq!(solo.sent(), ["NAK #0 sequence holds [1]"], "it asked");
    receive_write(&mut solo, 0, 1);
    assert_eq!(written(&solo), [1, 2]);
}

/// Many packets that ask for nothing are reported on their own. An acknowledgement in between lists
/// none of them.
#[test]
fn a_plain_acknowledgement_is_no_report() {
    let mut solo = solo();
    receive_write(&mut solo, 0, 1);
    receive_write(&mut solo, 2, 3);
    assert_eq!(solo.sent(), ["NAK #1 sequence holds [2]"]);
    let quiet = |solo: &mut Solo, psn| {
        let mut packet = solo.request(Op::RC_RDMA_WRITE_ONLY, psn, &[&solo.reth(0, 1), &[9]]);
        packet[8] &= 0x7f;
        seal(&mut packet);
        solo.receive(&packet);
    };
    (3..34).for_each(|psn| quiet(&mut solo, psn));
    assert!(solo.sent().is_empty());
    receive_write(&mut solo, 0, 1);
    assert_eq!(solo.sent(), ["ACK #0"]);
    quiet(&mut solo, 34);
    let report = solo.sent();
    assert!(
        report.len() == 1 && report[0].starts_with("NAK #1 sequence holds [2, 3,"),
        "{report:?}"
    );
}

#[test]
fn a_stranger_hears_nothing_of_it() {
    let mut solo = Solo::new(&Setup { budget: Budget::STANDARD, ..setup() });
    receive_write(&mut solo, 1, 2);
    assert_eq!(solo.sent(), ["NAK #0 sequence"]);
    receive_write(&mut solo, 0, 1);
    assert_eq!(written(&solo), [1], "it is to be sent again");
    // And its report beyond the specification is ignored.
    solo.sends(1..=4, 10).sent();
    assert_eq!(solo.receive_gap(0, &[1, 2, 3]).sent().len(), 4);
}

#[test]
fn without_a_receive_everything_behind_is_to_come_again() {
    let mut solo = solo();
    solo.receive_request(Op::RC_SEND_ONLY, 1, &[&[1]]);
    receive_write(&mut solo, 2, 3);
    solo.sent();
    receive_write(&mut solo, 0, 1);
    assert_eq!(solo.sent(), ["RNR #1 timer 12"]);
    receive_write(&mut solo, 2, 3);
    assert!(solo.sent().is_empty(), "silence until the SEND comes");
    assert_eq!(written(&solo), [1]);
    solo.post_recv(7, &[solo.sge(0, 8)]);
    solo.receive_request(Op::RC_SEND_ONLY, 1, &[&[1]]);
    assert_eq!(solo.completed(), [(7, WcStatus::Success)]);
    assert_eq!(written(&solo), [1], "#2 was not held");
}

/// The peer probes because the RNR NAK was lost, or the SEND when it came again. Of packets that
/// were in flight behind the SEND none comes twice.
#[test]
fn who_probes_behind_a_missing_receive_gets_a_report() {
    let mut solo = solo();
    (1..=2).for_each(|psn| receive_write(&mut solo, psn, psn as u8 + 1));
    solo.sent();
    for _ in 0..2 {
        solo.receive_request(Op::RC_SEND_ONLY, 0, &[&[1]]);
        (1..=2).for_each(|psn| receive_write(&mut solo, psn, psn as u8 + 1));
        assert_eq!(solo.sent(), ["RNR #0 timer 12"]);
    }
    receive_write(&mut solo, 2, 3);
    assert_eq!(solo.sent(), ["NAK #0 sequence holds [2]"]);
    solo.post_recv(7, &[solo.sge(0, 8)]);
    solo.receive_request(Op::RC_SEND_ONLY, 0, &[&[1]]);
    receive_write(&mut solo, 1, 2);
    assert_eq!(solo.sent(), ["ACK #2"]);
    assert_eq!(written(&solo), [2, 3]);
}

#[test]
fn what_is_lost_while_a_receive_is_missing_costs_no_timeout() {
    // The SEND is lost when it goes again, or the RNR NAK is. Nothing need be held for a repair.
    let held = EngineConfig::default().reorder_packets_max;
    for (from, nth, held) in [(0, 2, held), (1, 1, held), (0, 2, 0), (1, 1, 0)] {
        let mut pair = Pair::new(&Setup { held, ..setup() });
        let keys = pair.register();
        let send = |pair: &mut Pair, wr_id| {
            pair.send(0, wr_id, SendOp::Send { imm: None }, &[sge(0, 10, keys[0])]);
        };
        let recv = |pair: &mut Pair, wr_id| pair.recv(1, wr_id, &[sge(0, 10, keys[1])]);
        recv(&mut pair, 1);
        send(&mut pair, 1);
        pair.run();
        let mut count = 0;
        pair.pass = Box::new(move |sender, packet| {
            let it = sender == from && packet[11] == 0x11;
            count += u32::from(it);
            !it || count != nth
        });
        (2..=3).for_each(|wr_id| send(&mut pair, wr_id));
        pair.run_until(|pair| pair.ends[1].engine.counters().send_rnr_err == 1);
        (2..=3).for_each(|wr_id| recv(&mut pair, wr_id));
        let before = pair.now;
        pair.run();
        let done: Vec<_> = (1..=3).map(|wr_id| (wr_id, WcStatus::Success)).collect();
        assert_eq!([0, 1].map(|at| pair.ends[at].host.completed()), [&done[..], &done[..]]);
        assert_eq!(pair.ends[0].engine.counters().local_ack_timeout_err, 0);
        assert!(pair.now.since(before) < TIMEOUT_14 / 2, "the {nth}th of {from}, {held} held");
    }
}

/// The receiver drops the packets that it holds when it has no receive, and does not count them as
/// a gap when they come again.
#[test]
fn what_was_dropped_for_want_of_a_receive_is_not_reported_as_the_next_gap() {
    let mut solo = solo();
    solo.receive_request(Op::RC_SEND_ONLY, 1, &[&[1]]);
    (2..=5).for_each(|psn| receive_write(&mut solo, psn, psn as u8 + 1));
    solo.sent();
    receive_write(&mut solo, 0, 1);
    assert_eq!(solo.sent(), ["RNR #1 timer 12"]);
    solo.post_recv(7, &[solo.sge(0, 8)]);
    assert_eq!(solo.receive_request(Op::RC_SEND_ONLY, 1, &[&[1]]).sent(), ["ACK #1"]);
    let reported = solo.end.engine.counters().sent_seq_err;
    // All of them come again; #2 and #3 swap places on the way.
    receive_write(&mut solo, 3, 4);
    assert_eq!(solo.sent(), ["NAK #2 sequence holds [3]"]);
    receive_write(&mut solo, 2, 3);
    assert_eq!(solo.sent(), ["ACK #3"], "nothing is missing before #4 and #5");
    (4..=5).for_each(|psn| receive_write(&mut solo, psn, psn as u8 + 1));
    assert_eq!(solo.sent(), ["ACK #5"]);
    assert_eq!(written(&solo), [1, 3, 4, 5, 6]);
    assert_eq!(solo.end.engine.counters().sent_seq_err - reported, 1);
}

/// As above, if the packet that was overtaken comes before the NAK has left.
#[test]
fn what_was_dropped_for_want_of_a_receive_is_no_gap_behind_one_that_closed() {
    let mut solo = solo();
    solo.receive_request(Op::RC_SEND_ONLY, 1, &[&[1]]);
    (2..=5).for_each(|psn| receive_write(&mut solo, psn, psn as u8 + 1));
    solo.sent();
    receive_write(&mut solo, 0, 1);
    // Packets that had left before the RNR NAK arrived count no more than those dropped with it.
    receive_write(&mut solo, 6, 7);
    assert_eq!(solo.sent(), ["RNR #1 timer 12"]);
    solo.post_recv(7, &[solo.sge(0, 8)]);
    assert_eq!(solo.receive_request(Op::RC_SEND_ONLY, 1, &[&[1]]).sent(), ["ACK #1"]);
    receive_write(&mut solo, 3, 4);
    receive_write(&mut solo, 2, 3);
    assert_eq!(solo.sent(), ["ACK #3"], "nothing is missing before #4");
    (4..=6).for_each(|psn| receive_write(&mut solo, psn, psn as u8 + 1));
    assert_eq!(solo.sent(), ["ACK #6"]);
    assert_eq!(written(&solo), [1, 3, 4, 5, 6, 7]);
}

#[test]
fn what_is_refused_when_its_turn_comes_breaks_the_connection_then() {
    let mut solo = solo();
    let mut header = solo.reth(0, 1);
    header[8] ^= 0xff; // another key
    solo.receive_request(Op::RC_RDMA_WRITE_ONLY, 1, &[&header, &[1]]);
    receive_write(&mut solo, 2, 3);
    assert_eq!(solo.sent(), ["NAK #0 sequence holds [1, 2]"]);
    receive_write(&mut solo, 0, 1);
    assert_eq!(solo.sent(), ["NAK #1 access"]);
    assert_eq!(written(&solo), [1]);
}

#[test]
fn memory_is_bounded_and_what_found_none_is_asked_for_again() {
    let mut solo = Solo::new(&Setup { held: 4, ..setup() });
    for psn in 1..=5 {
        receive_write(&mut solo, psn, psn as u8 + 1);
    }
    // Each queue pair leaves the others one buffer for each that it takes.
    assert_eq!(solo.sent(), ["NAK #0 sequence holds [1, 2]"]);
    receive_write(&mut solo, 0, 1);
    assert_eq!(written(&solo), [1, 2, 3]);
    assert_eq!(solo.sent(), ["NAK #3 sequence"]);
    for psn in 3..=5 {
        receive_write(&mut solo, psn, psn as u8 + 1);
    }
    assert_eq!(written(&solo), [1, 2, 3, 4, 5, 6]);
}

#[test]
fn a_gap_is_told_of_at_once_another_after_eight_packets_and_the_rest_by_thirty_two() {
    let mut solo = solo();
    let mut is_told = |psn: &i64| {
        let header = solo.reth(0, 1);
        let mut packet = solo.request(Op::RC_RDMA_WRITE_ONLY, *psn, &[&header, &[1]]);
        packet[8] &= 0x7f; // without AckReq
        seal(&mut packet);
        solo.receive(&packet);
        !solo.sent().is_empty()
    };
    let come = [1].into_iter().chain(3..=9).chain(11..=80);
    let told: Vec<i64> = come.filter(|psn| is_told(psn)).collect();
    assert_eq!(told, [1, 11, 43, 75]);
}

#[test]
fn memory_is_used_again() {
    let mut solo = Solo::new(&Setup { held: 1, ..setup() });
    for psn in (0..40).step_by(2) {
        receive_write(&mut solo, psn + 1, 2);
        assert_eq!(solo.sent(), [format!("NAK #{psn} sequence holds [{}]", psn + 1)]);
        receive_write(&mut solo, psn, 1);
        assert_eq!(solo.sent(), [format!("ACK #{}", psn + 1)]);
    }
    assert_eq!(solo.end.engine.counters().sent_seq_err, 20);
}

#[test]
fn what_lies_too_far_ahead_is_dropped() {
    let mut solo = solo();
    receive_write(&mut solo, 1023, 2);
    receive_write(&mut solo, 1024, 3);
    receive_write(&mut solo, 400_000, 4);
    let sent = solo.packets();
    assert_eq!(sent.len(), 1);
    assert_eq!(sent[0].len(), 12 + 4 + 128 + 4, "BTH, AETH, 1024 bits, ICRC");
    assert_eq!(solo.end.engine.drops().out_of_sequence, 1, "the other is reported");
}

// ---- the requester ----

#[test]
fn only_what_is_missing_goes_again() {
    let mut solo = solo();
    assert_eq!(solo.sends(1..=6, 10).sent().len(), 6);
    solo.receive_gap(1, &[2, 4]);
    assert_eq!(solo.completed(), [(1, WcStatus::Success)], "it acknowledges the packets before");
    assert_eq!(solo.sent(), ["SEND_ONLY #1 10B ack", "SEND_ONLY #3 10B ack"]);
    assert_eq!(solo.end.engine.counters().retransmitted_pkts, 2);
    assert!(solo.receive_gap(1, &[2, 4]).sent().is_empty(), "they are on their way");
    solo.receive_ack(5);
    let rest: Vec<_> = (2..=6).map(|id| (id, WcStatus::Success)).collect();
    assert_eq!(solo.completed(), rest);
}

#[test]
fn a_repeated_packet_keeps_its_place_in_the_message_and_its_question() {
    let mut solo = solo();
    solo.post(1, SendOp::Write { remote: 0x9000, rkey: Key(9), imm: None }, &[solo.sge(0, 700)]);
    solo.send(2, 10);
    let first = solo.sent();
    assert_eq!(first.len(), 4);
    assert_eq!(solo.receive_gap(0, &[3]).sent(), first[..3]);
    assert!(solo.receive_gap(2, &[3]).sent().is_empty());
    assert_eq!(solo.receive_ack(3).completed(), [(1, WcStatus::Success), (2, WcStatus::Success)]);
}

#[test]
fn what_went_again_in_vain_goes_once_more_when_what_left_later_has_arrived() {
    let mut solo = solo();
    solo.sends(1..=3, 10).sent();
    solo.wait(10_000);
    assert_eq!(solo.receive_gap(0, &[1]).sent(), ["SEND_ONLY #0 10B ack"]);
    assert_eq!(solo.sends(4..=6, 10).sent().len(), 3);
    solo.wait(10_000);
    assert!(solo.receive_gap(0, &[1, 2]).sent().is_empty(), "those left before it went again");
    solo.receive_gap(0, &[1, 2, 3]);
    assert_eq!(solo.sent(), ["SEND_ONLY #0 10B ack"], "#3 left after it");
    solo.receive_gap(0, &[1, 2, 3, 4]);
    assert!(solo.sent().is_empty(), "no sooner than after a round trip");
}

#[test]
fn an_acknowledgement_that_nobody_can_have_sent_is_not_believed() {
    let mut solo = solo();
    solo.sends(1..=3, 10).sent();
    solo.receive_gap(0, &[0, 1, 2, 3, 500, 1000]);
    assert!(solo.completed().is_empty(), "held is not executed");
    solo.receive_gap(7, &[8]);
    assert_eq!(solo.end.engine.drops().ghost_response, 1);
    solo.wait(TIMEOUT_14);
    assert_eq!(solo.sent().len(), 3, "a liar is asked for everything again");
    assert_eq!(solo.receive_ack(2).completed().len(), 3);
}

#[test]
fn what_is_said_to_be_held_may_be_acknowledged_one_by_one() {
    for held in [&[1, 2][..], &[0, 1, 2]] {
        let mut solo = solo();
        solo.sends(1..=3, 10).sent();
        solo.receive_gap(0, held);
        (0..3).for_each(|psn| _ = solo.receive_ack(psn));
        assert_eq!(solo.completed().len(), 3, "{held:?}");
        solo.send(4, 10);
        assert_eq!(solo.sent(), ["SEND_ONLY #3 10B ack"], "nothing is charged twice or missing");
    }
}

#[test]
fn a_plain_nak_goes_back_and_forgets_what_was_held() {
    let mut solo = solo();
    solo.sends(1..=5, 10).sent();
    assert_eq!(solo.receive_gap(0, &[2, 3]).sent().len(), 2);
    solo.wait(10_000_000);
    assert_eq!(solo.receive_nak(1, NakCode::PsnSequenceError).sent().len(), 4, "#1 to #4");
    assert_eq!(solo.receive_syndrome(4, Syndrome::ACK_UNLIMITED).completed().len(), 5);
}

#[test]
fn a_gap_while_a_read_is_under_way_is_answered_by_going_back() {
    let mut solo = solo();
    solo.send(1, 10);
    solo.read(2, 100);
    solo.send(3, 10).sent();
    assert_eq!(solo.receive_gap(0, &[2]).sent().len(), 3);
}

#[test]
fn what_is_missing_is_asked_for_when_nothing_comes_back() {
    let mut solo = solo();
    solo.know_round_trip(10_000);
    solo.sends(2..=4, 10).sent();
    solo.wait(10_000);
    assert_eq!(solo.receive_gap(1, &[2]).sent(), ["SEND_ONLY #1 10B ack"]);
    assert_eq!(next_sent(&mut solo), ["SEND_ONLY #1 10B ack"], "and not the last packet");
    assert_eq!(solo.end.engine.counters().local_ack_timeout_err, 0);
}

/// A report postpones the question about other arrivals if it contains news since the one before. A
/// repetition does not.
#[test]
fn only_news_put_off_the_question() {
    for (held, asks) in [(&[2][..], true), (&[2, 3], false)] {
        let mut solo = solo();
        solo.know_round_trip(100_000);
        solo.sends(2..=5, 10).sent();
        assert_eq!(solo.receive_gap(1, &[2]).sent().len(), 1, "the missing packet goes again");
        let due = solo.end.engine.poll_timeout().unwrap().since(solo.now);
        solo.wait(due / 2);
        assert!(solo.receive_gap(1, held).sent().is_empty());
        solo.wait(due - due / 2);
        assert_eq!(!solo.sent().is_empty(), asks, "holds {held:?}");
    }
}

/// The packets that leave when the next effective timer expires.
fn next_sent(solo: &mut Solo) -> Vec<String> {
    loop {
        solo.wait_for_timer().expect("a timer");
        let sent = solo.sent();
        if !sent.is_empty() {
            return sent;
        }
    }
}

/// A retransmission in the place of a probe has AckReq, even if it had none at first: its response
/// may be the lost packet.
#[test]
fn a_lost_answer_to_a_repair_is_asked_for() {
    let mut solo = solo();
    solo.know_round_trip(10_000);
    solo.post(2, SendOp::Write { remote: 0x9000, rkey: Key(9), imm: None }, &[solo.sge(0, 2048)]);
    let first = solo.sent();
    assert!(
        first[..7].iter().all(|packet| !packet.ends_with("ack")),
        "only the last asks: {first:?}"
    );
    solo.wait(10_000);
    assert_eq!(solo.receive_gap(4, &[5, 6, 7, 8]).sent(), ["WRITE_MIDDLE #4 256B"]);
    assert_eq!(next_sent(&mut solo), ["WRITE_MIDDLE #4 256B ack"]);
    assert_eq!(solo.end.engine.counters().local_ack_timeout_err, 0);
    assert_eq!(solo.receive_ack(8).completed(), [(2, WcStatus::Success)]);
}

#[test]
fn a_read_behind_a_gap_does_not_keep_what_is_missing_from_being_asked_for() {
    let mut solo = solo();
    solo.know_round_trip(10_000);
    solo.sends(2..=4, 10).sent();
    solo.wait(10_000);
    assert_eq!(solo.receive_gap(1, &[2, 3]).sent(), ["SEND_ONLY #1 10B ack"]);
    assert_eq!(solo.read(5, 10).sent().len(), 1);
    assert_eq!(next_sent(&mut solo), ["SEND_ONLY #1 10B ack"]);
}

#[test]
fn a_read_that_is_dropped_behind_a_gap_is_told_of() {
    let mut solo = solo();
    receive_write(&mut solo, 1, 2);
    assert_eq!(solo.sent(), ["NAK #0 sequence holds [1]"]);
    let header = solo.reth(0, 8);
    solo.receive_request(Op::RC_RDMA_READ_REQUEST, 2, &[&header]);
    assert_eq!(solo.sent(), ["NAK #0 sequence holds [1]"]);
    solo.receive_request(Op::RC_RDMA_READ_REQUEST, 3, &[&header]);
    assert!(solo.sent().is_empty(), "once");
    receive_write(&mut solo, 0, 1);
    assert_eq!(solo.sent(), ["NAK #2 sequence"]);
}

#[test]
fn a_report_that_cannot_be_so_is_a_plain_nak() {
    let mut solo = solo();
    solo.sends(1..=4, 10).sent();
    assert_eq!(solo.receive_gap(0, &[]).sent().len(), 4, "it holds nothing");
    solo.wait(1_000_000);
    assert_eq!(solo.receive_gap(0, &[1, 2]).sent().len(), 1);
    solo.wait(1_000_000);
    // It had reported this packet as received.
    assert_eq!(solo.receive_gap(1, &[3]).sent().len(), 3);
}

/// Sends one message after the other, each acknowledged at once, up to the PSN `to`.
fn send_up_to(solo: &mut Solo, from: i64, to: i64) {
    for psn in from..to {
        assert_eq!(solo.send(1, 10).sent().len(), 1, "#{psn}");
        solo.receive_ack(psn);
    }
    solo.completed();
}

/// PSNs that are 1,024 apart share a bit. The bit is cleared when its packet is acknowledged or
/// sent again. Otherwise a later packet with that bit would not be known to be missing.
#[test]
fn what_was_held_is_not_taken_for_the_packet_1024_psns_later() {
    type Way = (&'static str, fn(&mut Solo));
    let ways: [Way; 3] = [
        ("acknowledged", |solo| {
            assert_eq!(solo.receive_gap(0, &[1, 2, 3]).sent(), ["SEND_ONLY #0 10B ack"]);
        }),
        ("acknowledged in two steps", |solo| {
            assert_eq!(solo.receive_gap(0, &[1, 3]).sent().len(), 2);
            solo.receive_ack(1);
            assert!(solo.receive_gap(2, &[3]).sent().is_empty(), "it is on its way");
        }),
        ("sent again with all that follows", |solo| {
            solo.receive_gap(0, &[1, 2, 3]).sent();
            solo.wait(10_000_000);
            assert_eq!(solo.receive_nak(0, NakCode::PsnSequenceError).sent().len(), 5);
            // The peer's earlier report is no longer trusted.
            assert_eq!(solo.receive_gap(0, &[4]).sent().len(), 4, "#0 to #3");
        }),
    ];
    for (way, receive) in ways {
        let mut solo = solo();
        solo.sends(0..5, 10).sent();
        receive(&mut solo);
        assert_eq!(solo.receive_ack(4).completed().len(), 5, "{way}");
        send_up_to(&mut solo, 5, 1024);
        assert_eq!(solo.sends(0..6, 10).sent().len(), 6);
        solo.receive_gap(1024, &[1028]);
        let missing = [1024, 1025, 1026, 1027].map(|psn| format!("SEND_ONLY #{psn} 10B ack"));
        assert_eq!(solo.sent(), missing, "{way}");
    }
}

/// Solicited bit, immediate data, position in the message and payload are those of the first
/// packet.
#[test]
fn what_goes_again_alone_is_the_packet_that_was_lost() {
    let (remote, rkey) = (0x9000, Key(9));
    let ops = [
        SendOp::Send { imm: None },
        SendOp::Send { imm: Some([1, 2, 3, 4]) },
        SendOp::SendInv { rkey },
        SendOp::Write { remote, rkey, imm: None },
        SendOp::Write { remote, rkey, imm: Some([1, 2, 3, 4]) },
    ];
    for (op, len) in ops.into_iter().flat_map(|op| [0, 10, 256, 700].map(|len| (op, len))) {
        let mut solo = solo();
        let data = pattern(1000, 7);
        solo.end.host.arena[..1000].copy_from_slice(&data);
        let data = SendData::Sges(&[solo.sge(0, len)]);
        solo.post_wr(&SendWr::new(op, data).wr_id(1).solicited()).unwrap();
        let first = solo.packets();
        solo.send(2, 10);
        solo.packets();
        let held = first.len() as i64;
        solo.receive_gap(0, &[held]);
        let again = solo.packets();
        // Everything but AckReq and the ICRC.
        let meant = |packet: &Vec<u8>| [&packet[..8], &packet[9..packet.len() - 4]].concat();
        let [first, again] = [&first, &again].map(|all| all.iter().map(meant).collect::<Vec<_>>());
        assert_eq!(first, again, "{op:?} of {len}");
        let solicited = |packet: &Vec<u8>| packet[1] & 0x80 != 0;
        let marks: Vec<_> = again.iter().map(solicited).collect();
        let last = again.len() - 1;
        assert!(marks.iter().enumerate().all(|(at, mark)| *mark == (at == last)), "{op:?} {len}");
    }
}

// ---- both ----

#[test]
fn every_pattern_of_losses_in_a_message_is_repaired_with_as_many_packets() {
    for lost in 0u32..256 {
        let mut pair = Pair::new(&setup());
        let keys = pair.register();
        let data = pattern(2048, lost as u8);
        pair.ends[0].host.arena[..2048].copy_from_slice(&data);
        let op = SendOp::Write { remote: BASE + 4096, rkey: keys[1], imm: None };
        pair.send(0, 1, op, &[sge(0, 2048, keys[0])]);
        let mut index = 0;
        pair.pass = Box::new(move |from, _| {
            index += u32::from(from == 0);
            from == 1 || index > 8 || lost & (1 << (index - 1)) == 0
        });
        pair.run();
        assert_eq!(pair.ends[0].host.completed(), [(1, WcStatus::Success)], "{lost:#b}");
        assert_eq!(pair.ends[1].host.arena[4096..6144], data[..], "{lost:#b}");
        // A timeout detects a lost tail; then everything unacknowledged is sent again.
        let again = pair.ends[0].engine.counters().retransmitted_pkts;
        let tail = lost & 0x80 != 0;
        if !tail {
            assert_eq!(again, u64::from(lost.count_ones()), "{lost:#b}");
        }
    }
}

/// While nothing is lost, room for less than a run is left until there is room for all of it. After
/// a loss the next acknowledgement may be long in coming, and each packet that may leave leaves.
#[test]
fn after_a_loss_room_for_less_than_a_run_is_used() {
    let budget = Budget { bytes: u32::MAX, datagrams: 84 };
    let mut solo = Solo::new(&Setup { mtu: Mtu::Mtu4096, budget, arena: 1 << 21, ..setup() });
    let list = [solo.sge(0, 256 * 4096)];
    solo.post(1, SendOp::Write { remote: BASE, rkey: Key(9), imm: None }, &list);
    let sent = solo.packets().len();
    assert!(84 - 15 < sent && sent < 84, "{sent}");
    assert!(solo.packets().is_empty());
    // All that there is room for leaves, and the one that is missing goes again.
    solo.receive_gap(0, &[1]);
    assert_eq!(solo.packets().len(), 84 - (sent - 1) + 1);
    assert!(solo.packets().is_empty());
}
