//! A stalled host: its packets leave late, it reads late, or it responds late.

use crate::common::{Pair, Setup, Solo, sge, to};
use rocinante_stack::Urgency;
use rocinante_stack::types::{Qpn, Time};
use rocinante_stack::verbs::{QpState, SendOp, WcStatus};

const TIMEOUT_14: u64 = 4096 << 14;

/// The requester does not run for three timeouts. The response arrived meanwhile, and is read
/// first.
#[test]
fn an_answer_that_came_while_the_host_stood_still_is_taken() {
    let mut solo = Solo::script();
    solo.send(1, 600);
    assert_eq!(solo.send(2, 10).sent().len(), 4);
    solo.now = solo.now.after(3 * TIMEOUT_14);
    // First the whole receive queue, then expired timers.
    solo.receive_ack(2);
    solo.receive_ack(3);
    solo.wait(0);
    assert!(solo.sent().is_empty());
    assert_eq!(solo.completed(), [(1, WcStatus::Success), (2, WcStatus::Success)]);
    assert_eq!(solo.end.engine.counters().local_ack_timeout_err, 0);
    // A response to a part restarts the full time for the rest.
    solo.send(3, 10);
    solo.send(11, 10).sent();
    solo.now = solo.now.after(3 * TIMEOUT_14);
    solo.receive_ack(4);
    solo.wait(0);
    solo.wait(TIMEOUT_14 - 1);
    assert!(solo.sent().is_empty());
    solo.wait(1);
    assert_eq!(solo.sent(), ["SEND_ONLY #5 10B ack"]);
}

#[test]
fn the_timeout_counts_from_when_the_packet_left() {
    let mut solo = Solo::new(&Setup { retry_cnt: 1, ..Setup::script() });
    solo.send(1, 10);
    let written = solo.now;
    assert_eq!(solo.sent().len(), 1);
    // The host stalled before it handed the packet over.
    solo.now = written.after(5 * TIMEOUT_14);
    solo.end.engine.left_late(written, solo.now);
    solo.wait(0);
    solo.wait(TIMEOUT_14 - 1);
    assert!(solo.sent().is_empty());
    solo.wait(1);
    // The same for a retransmission.
    let written = solo.now;
    assert_eq!(solo.sent(), ["SEND_ONLY #0 10B ack"]);
    solo.now = written.after(5 * TIMEOUT_14);
    solo.end.engine.left_late(written, solo.now);
    solo.wait(TIMEOUT_14 - 1);
    assert!(solo.completed().is_empty());
    solo.wait(1);
    assert_eq!(solo.completed(), [(1, WcStatus::RetryExcErr)]);
    assert_eq!(solo.end.engine.counters().local_ack_timeout_err, 2);
}

/// A side that gets no processor while it waits counts that time of those that it gave up alone.
#[test]
fn a_side_that_was_not_driven_while_it_waited_says_for_how_long() {
    let mut solo = Solo::new(&Setup { retry_cnt: 2, ..Setup::script() });
    let late = |solo: &Solo| {
        let counters = solo.end.engine.counters();
        (counters.undriven_us, counters.retry_exceeded_undriven_us)
    };
    let ms = 1_000_000;
    // An answer comes after a stall: that connection goes on.
    solo.send(1, 10);
    solo.sent();
    solo.wait(TIMEOUT_14 + 30 * ms);
    solo.sent();
    assert_eq!(late(&solo), (30_000, 0));
    solo.receive_ack(0);
    solo.wait(0);
    assert_eq!(solo.completed(), [(1, WcStatus::Success)]);
    // Of three timeouts two are met late, one by too little to count.
    solo.send(2, 10);
    solo.sent();
    for stall in [100 * ms, ms / 2, 200 * ms] {
        solo.wait(TIMEOUT_14 + stall);
        solo.sent();
    }
    assert_eq!(solo.completed(), [(2, WcStatus::RetryExcErr)]);
    let (all, (sum, given_up)) = (330_000, late(&solo));
    // The timers may be due a little early.
    assert!((all..all + 1000).contains(&sum) && sum - given_up == 30_000, "{sum} {given_up}");
}

/// The timer of a request that is acknowledged may still be filed: nothing waits for it.
#[test]
fn a_side_that_waits_for_nothing_is_not_late() {
    let mut solo = Solo::script();
    solo.send(1, 10);
    solo.sent();
    solo.receive_ack(0);
    solo.wait(10 * TIMEOUT_14);
    assert_eq!((solo.end.engine.counters().undriven_us, solo.completed().len()), (0, 1));
}

/// Only the packets written at that time have left late.
#[test]
fn what_was_under_way_before_gains_nothing_by_a_late_packet() {
    let mut solo = Solo::sending(&Setup::script(), 1, 10);
    solo.now = solo.now.after(TIMEOUT_14 / 2);
    let written = solo.now;
    assert_eq!(solo.send(2, 10).sent(), ["SEND_ONLY #1 10B ack"]);
    solo.now = solo.now.after(TIMEOUT_14 / 4);
    solo.end.engine.left_late(written, solo.now);
    solo.wait(TIMEOUT_14 / 4 - 1);
    assert!(solo.sent().is_empty());
    solo.wait(1);
    assert_eq!(solo.sent().len(), 2);
}

/// Two queue pairs wrote at one time: the peer gets its time for each.
#[test]
fn late_packets_of_two_queue_pairs_count_from_when_they_left() {
    let setup = Setup { qps: 2, ..Setup::script() };
    let mut solo = Solo::new(&setup);
    let other = solo.end.qpns[1];
    solo.end.connect(other, 0, Qpn::new(0x78), &setup);
    let written = solo.now;
    assert_eq!(solo.send(1, 10).sent().len(), 1);
    let first = std::mem::replace(&mut solo.end.qpn, other);
    assert_eq!(solo.send(2, 10).sent().len(), 1);
    solo.end.qpn = first;
    solo.end.engine.left_late(written, written.after(TIMEOUT_14 / 4));
    solo.wait(TIMEOUT_14 + TIMEOUT_14 / 4 - 1);
    assert!(solo.sent().is_empty());
    solo.wait(1);
    assert_eq!(solo.sent(), ["SEND_ONLY #0 10B ack"; 2]);
}

/// The peer has asked for an RNR delay; a packet's late departure does not change that.
#[test]
fn a_late_packet_does_not_make_a_pause_longer() {
    let mut solo = Solo::script();
    solo.wait(TIMEOUT_14);
    solo.send(1, 10).sent();
    let now = solo.now;
    // Code 25 means 61.44 ms, about as long as the timeout.
    solo.receive_rnr(0, 25);
    let pause = solo.end.engine.poll_timeout();
    solo.end.engine.left_late(now, now.after(TIMEOUT_14));
    solo.end.engine.left_late(Time(now.0 - (TIMEOUT_14 - 61_440_000)), now.after(TIMEOUT_14));
    assert_eq!(solo.end.engine.poll_timeout(), pause);
}

/// After a timeout the port has no room for half of another timeout: the peer still gets a whole
/// one to respond.
#[test]
fn what_is_sent_again_late_is_waited_for_as_long() {
    let mut solo = Solo::sending(&Setup { retry_cnt: 1, ..Setup::script() }, 1, 10);
    solo.end.out.room = 0;
    solo.wait(TIMEOUT_14);
    assert!(solo.sent().is_empty());
    solo.wait(TIMEOUT_14 / 2);
    solo.end.out.room = usize::MAX;
    assert_eq!(solo.sent(), ["SEND_ONLY #0 10B ack"]);
    solo.wait(TIMEOUT_14 - 1);
    assert!(solo.completed().is_empty());
    solo.wait(1);
    assert_eq!(solo.completed(), [(1, WcStatus::RetryExcErr)]);
}

/// The responder stalls for two and a half timeouts, again and again. Then it gets both the
/// original packets and their retransmissions. Atomics are executed once, and the connection
/// survives.
#[test]
fn a_responder_that_stands_still_answers_everything_once() {
    const ATOMICS: u64 = 100;
    let mut pair = Pair::new(&Setup { depth: 256, ..Setup::default() });
    let keys = pair.register();
    for number in 0..ATOMICS {
        let op = SendOp::FetchAdd { remote: crate::common::BASE, rkey: keys[1], add: 1 };
        pair.send(0, number, op, &[sge(64 + 8 * number, 8, keys[0])]);
        let op = SendOp::Write { remote: crate::common::BASE + 8, rkey: keys[1], imm: None };
        pair.send(0, 1000 + number, op, &[sge(8192, 3000, keys[0])]);
    }
    let mut unread: Vec<Vec<u8>> = Vec::new();
    for turn in 0..1000 {
        let end = &mut pair.ends[0];
        end.engine.poll_transmit(pair.now, 1 << 20, &mut end.host, &mut end.out);
        unread.extend(end.out.packets.drain(..));
        if turn % 3 == 2 {
            // Its turn: it reads all packets, then it responds.
            let [src, dst] = [pair.ends[0].addr, pair.ends[1].addr];
            for packet in unread.drain(..) {
                pair.inject(1, src, dst, &packet);
            }
            pair.deliver(1);
        }
        pair.now = pair.now.after(TIMEOUT_14 * 5 / 6);
        let end = &mut pair.ends[0];
        end.engine.handle_timeout(pair.now, &mut end.host);
        if end.engine.post_urgency(end.qpn) == Urgency::Now {
            break;
        }
    }
    let completions = pair.completions(0);
    assert_eq!(completions.len() as u64, 2 * ATOMICS);
    assert!(completions.iter().all(|wc| wc.status == WcStatus::Success));
    for number in 0..ATOMICS {
        let at = 64 + 8 * number as usize;
        assert_eq!(pair.ends[0].host.arena[at..at + 8], number.to_ne_bytes());
    }
    assert_eq!(pair.ends[1].host.arena[..8], ATOMICS.to_ne_bytes());
    let [requester, responder] = [0, 1].map(|at| *pair.ends[at].engine.counters());
    assert!(requester.local_ack_timeout_err > 10, "{requester:?}");
    assert!(responder.duplicate_request > 10, "{responder:?}");
    assert_eq!(pair.ends[1].engine.drops().stale_duplicate, 0);
}

#[test]
fn a_post_is_not_urgent_while_requests_wait_for_room_or_an_answer() {
    let mut solo = Solo::script();
    let urgency = |solo: &Solo| solo.end.engine.post_urgency(solo.end.qpn);
    assert_eq!(urgency(&solo), Urgency::Now);
    solo.send(1, 10);
    assert_eq!(urgency(&solo), Urgency::Idle, "it is about to leave");
    solo.sent();
    assert_eq!(urgency(&solo), Urgency::Idle, "it is on its way");
    solo.receive_ack(0);
    assert_eq!(urgency(&solo), Urgency::Now);
    // A request posted to a broken queue pair is not in flight.
    solo.send(2, 10);
    let qpn = solo.end.qpn;
    solo.end.modify(qpn, &to(QpState::Err)).unwrap();
    assert_eq!(urgency(&solo), Urgency::Now);
}
