//! Late answers: the tail-loss probe finds out what was lost long before the timeout, and spends no retry.

mod common;

use common::{Pair, Setup, Solo, sge};
use rocinante_stack::types::Key;
use rocinante_stack::verbs::{SendOp, WcStatus};
use rocinante_stack::wire::{NakCode, Opcode as Op};

const TIMEOUT_14: u64 = 4096 << 14;
/// The delay of the first probe after fast answers.
const PROBE: u64 = 1_000_000;

/// A requester that knows that answers take 20 µs.
fn informed() -> Solo {
    let mut solo = Solo::script();
    solo.send(0, 10);
    solo.sent();
    solo.wait(20_000);
    solo.hear_ack(0);
    assert_eq!(solo.completed(), [(0, WcStatus::Success)]);
    solo
}

#[test]
fn without_experience_there_is_no_probe() {
    let mut solo = Solo::script();
    solo.send(1, 10);
    solo.sent();
    solo.wait(TIMEOUT_14 - 1);
    assert!(solo.sent().is_empty());
}

#[test]
fn a_lost_last_packet_is_probed_and_acknowledged() {
    let mut solo = informed();
    solo.send(1, 10);
    solo.sent();
    solo.wait(PROBE - 1);
    assert!(solo.sent().is_empty());
    solo.wait(1);
    assert_eq!(solo.sent(), ["SEND_ONLY #1 10B ack"]);
    solo.hear_ack(1);
    assert_eq!(solo.completed(), [(1, WcStatus::Success)]);
    let counters = solo.end.engine.counters();
    assert_eq!((counters.tail_probes, counters.local_ack_timeout_err), (1, 0));
}

#[test]
fn after_a_lost_nak_the_probe_repeats_one_packet_and_its_answer_the_rest() {
    let mut solo = informed();
    solo.send(1, 1000);
    assert_eq!(solo.sent().len(), 4);
    // #1 and the NAK for it are lost.
    solo.wait(PROBE);
    assert_eq!(solo.sent(), ["SEND_FIRST #1 256B ack"]);
    solo.hear_ack(1);
    let rest = ["SEND_MIDDLE #2 256B ack", "SEND_MIDDLE #3 256B", "SEND_LAST #4 232B ack"];
    assert_eq!(solo.sent(), rest);
    solo.hear_ack(4);
    assert_eq!(solo.completed(), [(1, WcStatus::Success)]);
}

#[test]
fn where_only_the_ack_was_lost_nothing_else_is_repeated() {
    let mut solo = informed();
    solo.send(1, 1000);
    solo.sent();
    solo.wait(PROBE);
    assert_eq!(solo.sent().len(), 1);
    solo.hear_ack(4);
    assert!(solo.sent().is_empty());
    assert_eq!(solo.completed(), [(1, WcStatus::Success)]);
}

#[test]
fn a_nak_that_the_probe_provokes_is_followed() {
    let mut solo = informed();
    solo.send(1, 1000);
    solo.sent();
    solo.wait(PROBE);
    solo.sent();
    solo.hear_nak(3, NakCode::PsnSequenceError);
    assert_eq!(solo.sent(), ["SEND_MIDDLE #3 256B ack", "SEND_LAST #4 232B ack"]);
}

#[test]
fn what_is_posted_meanwhile_leaves_as_ever() {
    let mut solo = informed();
    solo.send(1, 10);
    solo.sent();
    solo.wait(PROBE);
    solo.send(2, 10);
    assert_eq!(solo.sent(), ["SEND_ONLY #1 10B ack", "SEND_ONLY #2 10B ack"]);
    solo.hear_ack(2);
    assert_eq!(solo.completed().len(), 2);
}

#[test]
fn probes_become_rarer_and_do_not_move_the_timeout() {
    let mut solo = informed();
    let start = solo.now;
    solo.send(1, 10);
    solo.sent();
    let (mut probes, mut ends) = (Vec::new(), Vec::new());
    let mut timeouts = 0;
    while solo.end.host.completions.is_empty() {
        solo.wait_for_timer().expect("a deadline");
        let sent = solo.sent().len();
        let now = solo.end.engine.counters().local_ack_timeout_err;
        if now > timeouts {
            timeouts = now;
            ends.push(solo.now.since(start));
        } else if sent > 0 {
            probes.push(solo.now.since(start));
        }
    }
    assert_eq!(solo.completed(), [(1, WcStatus::RetryExcErr)]);
    assert_eq!(probes[..6], [1, 3, 7, 15, 31, 63].map(|n| n * PROBE));
    let promised: Vec<_> = (1..=8).map(|n| n * TIMEOUT_14).collect();
    assert_eq!(ends, promised);
}

#[test]
fn a_read_or_an_atomic_is_asked_for_again() {
    let mut solo = informed();
    solo.read(1, 600);
    solo.add(2, 4096);
    solo.sent();
    solo.hear_data(Op::RC_RDMA_READ_RESPONSE_FIRST, 1, &[1; 256]);
    solo.wait(PROBE);
    assert_eq!(solo.sent(), ["READ #2 @9100+344", "FETCH_ADD #4"]);
    solo.hear_data(Op::RC_RDMA_READ_RESPONSE_FIRST, 2, &[2; 256]);
    solo.hear_data(Op::RC_RDMA_READ_RESPONSE_LAST, 3, &[3; 88]);
    solo.hear_found(4, 9);
    assert_eq!(solo.completed(), [(1, WcStatus::Success), (2, WcStatus::Success)]);
}

#[test]
fn a_peer_that_asks_for_patience_is_not_probed() {
    let mut solo = informed();
    solo.send(1, 10);
    solo.sent();
    solo.hear_rnr(1, 31); // 491.52 ms
    solo.wait(491_519_999);
    assert!(solo.sent().is_empty());
    solo.wait(1);
    assert_eq!(solo.sent(), ["SEND_ONLY #1 10B ack"]);
}

#[test]
fn a_probe_whose_memory_is_gone_fails_with_its_request() {
    let mut solo = informed();
    solo.send(1, 10);
    solo.send(2, 10);
    solo.sent();
    let key = solo.key;
    solo.end.host.regions.remove(key);
    solo.wait(PROBE);
    assert!(solo.sent().is_empty());
    // It may have arrived: only the timeout says that it has to be sent again and cannot be.
    solo.hear_ack(1);
    assert_eq!(solo.completed(), [(1, WcStatus::Success)]);
    solo.wait(TIMEOUT_14);
    solo.sent();
    assert_eq!(solo.completed(), [(2, WcStatus::LocProtErr)]);
}

#[test]
fn a_slow_peer_is_not_probed_before_its_time() {
    let mut solo = Solo::script();
    for psn in 0..20 {
        solo.send(psn as u64, 10);
        solo.sent();
        solo.wait(10_000_000);
        solo.hear_ack(psn);
    }
    let probes = solo.end.engine.counters().tail_probes;
    solo.send(20, 10);
    solo.sent();
    solo.wait(15_000_000);
    assert_eq!(solo.end.engine.counters().tail_probes, probes);
    assert_eq!(probes, 0);
}

#[test]
fn a_lossy_stream_never_waits_for_the_timeout() {
    let mut pair = Pair::new(&Setup { timeout: 20, ..Setup::default() });
    let keys = pair.register();
    let (mut state, mut warm) = (7u64, 0);
    pair.pass = Box::new(move |_, _| {
        warm += 1;
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        warm < 10 || (state >> 33) % 20 != 0
    });
    let start = pair.now;
    for n in 0..300 {
        let op = match n % 3 {
            0 => SendOp::Write { remote: common::BASE, rkey: keys[1], imm: None },
            1 => SendOp::Read { remote: common::BASE, rkey: keys[1] },
            _ => SendOp::FetchAdd { remote: common::BASE, rkey: Key(keys[1].0), add: 1 },
        };
        pair.send(0, n, op, &[sge(0, 3000, keys[0])]);
        pair.run_until(|pair| pair.ends[0].host.completions.len() as u64 == n + 1);
    }
    let counters = pair.ends[0].engine.counters();
    assert_eq!(counters.local_ack_timeout_err, 0);
    assert!(counters.tail_probes > 10);
    // One timeout would be 4.3 s.
    assert!(pair.now.since(start) < 1_000_000_000);
}
