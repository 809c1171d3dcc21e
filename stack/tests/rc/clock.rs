//! Deadlines, probes and repeated NAKs come neither earlier nor later than promised, with any
//! events in between.

use crate::common::{BASE, Pair, Setup, Solo, describe, sge};
use rocinante_stack::types::Key;
use rocinante_stack::verbs::{SendOp, WcStatus};
use rocinante_stack::wire::{NakCode, Opcode};
use rocinante_stack::{Budget, TxStop};
const TIMEOUT_14: u64 = 4096 << 14;
fn write(rkey: Key) -> SendOp {
    SendOp::Write { remote: BASE, rkey, imm: None }
}

/// Lets everything leave and every timer expire, for 100 s at most.
fn until_something_completes(solo: &mut Solo) {
    let start = solo.now;
    while solo.end.host.completions.is_empty() && solo.now.since(start) < 100_000_000_000 {
        solo.sent();
        if solo.wait_for_timer().is_none() {
            break;
        }
    }
}

#[test]
fn a_full_sink_at_the_timeout_does_not_stop_the_clock() {
    let mut solo = Solo::new(&Setup { retry_cnt: 1, ..Setup::script() });
    solo.know_round_trip(1000);
    solo.send(2, 10).sent();
    solo.end.out.room = 0;
    solo.wait(2_000_000);
    solo.sent();
    solo.wait(TIMEOUT_14);
    solo.sent();
    solo.end.out.room = usize::MAX;
    until_something_completes(&mut solo);
    assert_eq!(solo.completed(), [(2, WcStatus::RetryExcErr)]);
}

#[test]
fn a_nak_right_before_the_timeout_does_not_stop_the_clock() {
    let mut solo = Solo::new(&Setup { retry_cnt: 1, ..Setup::script() });
    solo.know_round_trip(1000);
    solo.send(2, 10);
    solo.send(3, 10).sent();
    let mut left = TIMEOUT_14;
    while left > 40_000_000 {
        solo.wait(1_000_000);
        solo.sent();
        left -= 1_000_000;
    }
    solo.wait(left - 1);
    solo.sent();
    solo.receive_nak(1, NakCode::PsnSequenceError);
    solo.wait(1);
    until_something_completes(&mut solo);
    assert_eq!(solo.completed()[0], (2, WcStatus::RetryExcErr));
}

fn two(budget: Budget, timeout: u8) -> (Pair, [Key; 2]) {
    let mut setup = Setup {
        budget,
        own: Some(Budget { bytes: 8 << 20, datagrams: 256 }),
        qps: 2,
        timeout: 0,
        ..Setup::default()
    };
    let mut pair = Pair::new(&setup);
    let keys = pair.register();
    setup.timeout = timeout;
    setup.retry_cnt = 1;
    pair.reconnect(1, &setup);
    (pair, keys)
}

#[test]
fn who_was_nacked_and_waits_for_room_still_gives_up_in_time() {
    let (mut pair, keys) = two(Budget::STANDARD, 14);
    pair.send_on(0, 1, 1, write(keys[1]), &[sge(0, 100, keys[0])]);
    pair.run();
    assert_eq!(pair.completions(0).len(), 1);
    pair.send_on(0, 1, 2, write(keys[1]), &[sge(0, 100, keys[0])]);
    pair.send_on(0, 1, 3, write(keys[1]), &[sge(0, 100, keys[0])]);
    let mut n = 0;
    pair.pass = Box::new(move |from, _| {
        if from == 0 {
            n += 1;
            n == 2
        } else {
            true
        }
    });
    pair.deliver(0);
    pair.send_on(0, 0, 9, write(keys[1]), &[sge(0, 40_000, keys[0])]);
    pair.deliver(0);
    pair.deliver(1);
    pair.pass = Box::new(|_, _| false);
    let limit = pair.now.after(100_000_000_000);
    pair.run_until(|pair| pair.now > limit || !pair.ends[0].host.completions.is_empty());
    let done: Vec<_> = pair.completions(0).iter().map(|c| (c.wr_id, c.status)).collect();
    assert_eq!(done, [(2, WcStatus::RetryExcErr), (3, WcStatus::WrFlushErr)]);
}

#[test]
fn what_left_late_still_waits_for_room() {
    for late in [false, true] {
        let (mut pair, keys) = two(Budget { bytes: 1 << 30, datagrams: 10 }, 8);
        pair.pass = Box::new(|_, _| false);
        pair.send_on(0, 0, 0, write(keys[1]), &[sge(0, 20_000, keys[0])]);
        pair.send_on(0, 1, 1, write(keys[1]), &[sge(0, 5000, keys[0])]);
        pair.deliver(0);
        if late {
            let now = pair.now;
            pair.ends[0].engine.left_late(now, now.after(500_000));
        }
        pair.run();
        let done: Vec<_> = pair.completions(0).iter().map(|c| (c.wr_id, c.status)).collect();
        assert_eq!(done, [(1, WcStatus::RetryExcErr)], "late: {late}");
    }
}

#[test]
fn a_nak_that_comes_several_times_is_answered_once() {
    for times in 1..7 {
        let mut solo = Solo::script();
        solo.sends(0..40, 10).sent();
        solo.wait(1000);
        solo.receive_ack(0);
        for _ in 0..times {
            solo.receive_nak(1, NakCode::PsnSequenceError);
        }
        assert_eq!(solo.sent().len(), 39, "{times} NAKs");
    }
}

#[test]
fn overtaken_packets_cost_one_nak() {
    let mut solo = Solo::script();
    (0..9).for_each(|id| solo.post_recv(id, &[]));
    let mut said = Vec::new();
    for psn in [6, 5, 4, 3, 2, 1] {
        solo.receive_request(Opcode::RC_SEND_ONLY, psn, &[]);
        said.extend(solo.sent());
    }
    assert_eq!(said, ["NAK #0 sequence"]);
}

#[test]
fn a_question_that_is_answered_before_it_leaves_leaves_no_licence() {
    let (mut pair, keys) = two(Budget { bytes: 1 << 30, datagrams: 10 }, 20);
    pair.send_on(0, 1, 1, write(keys[1]), &[sge(0, 100, keys[0])]);
    pair.run();
    pair.send_on(0, 1, 2, write(keys[1]), &[sge(0, 100, keys[0])]);
    pair.pass = Box::new(|from, _| from == 0);
    pair.deliver(0);
    let end = &mut pair.ends[1];
    end.engine.poll_transmit(pair.now, 100, &mut end.host, &mut end.out);
    let ack = end.out.packets.pop_front().unwrap();
    pair.now = pair.now.after(3_000_000);
    let now = pair.now;
    let end = &mut pair.ends[0];
    end.engine.handle_timeout(now, &mut end.host);
    assert_eq!(end.engine.counters().tail_probes, 1);
    let (a, b) = (pair.ends[0].addr, pair.ends[1].addr);
    pair.inject(0, b, a, &ack);
    pair.pass = Box::new(|_, _| false);
    pair.send_on(0, 0, 0, write(keys[1]), &[sge(0, 20_000, keys[0])]);
    let end = &mut pair.ends[0];
    end.engine.poll_transmit(pair.now, 100, &mut end.host, &mut end.out);
    let first = end.out.packets.drain(..).count();
    pair.send_on(0, 1, 3, write(keys[1]), &[sge(0, 100, keys[0])]);
    let end = &mut pair.ends[0];
    end.engine.poll_transmit(pair.now, 100, &mut end.host, &mut end.out);
    assert_eq!((first, end.out.packets.len()), (10, 0), "the room is used up");
}

#[test]
fn the_wait_of_a_question_is_no_round_trip() {
    let mut solo = Solo::new(&Setup { timeout: 20, ..Setup::script() });
    solo.send(100, 10).sent();
    solo.wait(60_000);
    solo.receive_ack(0);
    solo.sends(0..40, 10).sent();
    for _ in 0..4 {
        solo.wait_for_timer();
        solo.sent();
    }
    solo.wait(60_000);
    solo.receive_nak(1, NakCode::PsnSequenceError);
    let start = solo.now;
    let mut n = 0;
    while n < 40 {
        n += solo.sent().len();
        if solo.wait_for_timer().is_none() || solo.now.since(start) > 100_000_000 {
            break;
        }
    }
    assert_eq!(n, 40);
    assert!(solo.now.since(start) < 1_000_000, "{} us", solo.now.since(start) / 1000);
}

/// Of a request 60 packets left that did not ask. Then the port was full, and stays so.
fn full_before_anything_asked() -> Solo {
    let own = Some(Budget { bytes: 8 << 20, datagrams: 1 });
    let mut solo = Solo::new(&Setup { own, retry_cnt: 0, ..Setup::script() });
    solo.send(1, 100 * 256);
    let end = &mut solo.end;
    end.out.room = 60;
    let sent = end.engine.poll_transmit(solo.now, 5, &mut end.host, &mut end.out);
    assert_eq!((sent.stop, sent.packets, end.out.packets.len()), (TxStop::SinkFull, 60, 60));
    end.out.room = 0;
    let first = [solo.setup.psn[0], solo.setup.psn[1]];
    let sent: Vec<_> = end.out.packets.drain(..).map(|packet| describe(&packet, first)).collect();
    assert!(sent.iter().all(|packet| !packet.ends_with("ack")), "{sent:?}");
    solo
}

/// Only an unanswered AckReq speaks against the peer.
#[test]
fn a_timeout_before_anything_asked_costs_no_retry() {
    let mut solo = full_before_anything_asked();
    solo.wait(TIMEOUT_14);
    assert_eq!(solo.completed(), [], "the peer was not asked");
    assert_eq!(solo.end.engine.counters().local_ack_timeout_err, 0);
    solo.end.out.room = usize::MAX;
    let probe = solo.sent();
    assert!(probe[0].ends_with("#59 256B ack"), "{probe:?}");
    // The peer has its time from then on, and no more.
    solo.wait(TIMEOUT_14 - 1);
    assert_eq!(solo.completed(), []);
    solo.wait(1);
    assert_eq!(solo.completed(), [(1, WcStatus::RetryExcErr)]);
}

/// The peer has its time from the first packet on that asks, however long that waited.
#[test]
fn a_packet_that_asks_late_gives_the_peer_its_whole_time() {
    let mut solo = full_before_anything_asked();
    solo.wait(TIMEOUT_14 - 1);
    solo.end.out.room = usize::MAX;
    let rest = solo.sent();
    assert!(rest.last().is_some_and(|packet| packet.ends_with("ack")), "{rest:?}");
    solo.wait(TIMEOUT_14 - 1);
    assert_eq!(solo.completed(), []);
    solo.wait(1);
    assert_eq!(solo.completed(), [(1, WcStatus::RetryExcErr)]);
}

/// With credit for two acknowledgements, the first and the last packet of a burst ask. The last one
/// is not answered: that is a timeout, although the first one was.
#[test]
fn the_packets_that_asked_are_known_one_by_one() {
    let own = Some(Budget { bytes: 8 << 20, datagrams: 2 });
    let mut solo = Solo::new(&Setup { own, ..Setup::script() });
    solo.sends(1..=10, 10);
    let asked: Vec<_> = solo.sent().iter().map(|packet| packet.ends_with("ack")).collect();
    let expected: Vec<_> = (0..10).map(|at| at == 0 || at == 9).collect();
    assert_eq!(asked, expected);
    solo.receive_ack(1);
    solo.wait(TIMEOUT_14);
    assert_eq!(solo.end.engine.counters().local_ack_timeout_err, 1);
    // It goes again from there, at first one packet, which asks.
    let again = solo.sent();
    assert!(again[0].ends_with("#2 10B ack"), "{again:?}");
}

/// The acknowledgement answers the packet before the one that the probe repeats.
#[test]
fn an_acknowledgement_of_what_is_before_it_leaves_the_probe_a_probe() {
    let mut solo = Solo::script();
    solo.know_round_trip(1000);
    solo.send(2, 10);
    solo.send(3, 10).sent();
    assert_eq!(solo.wait_for_timer(), Some(2_000_000));
    // The probe is due and has not left.
    assert_eq!(solo.receive_ack(1).sent(), ["SEND_ONLY #2 10B ack"]);
    let counters = solo.end.engine.counters();
    assert_eq!((counters.tail_probes, counters.retransmitted_pkts), (1, 0));
}

/// The answer to a READ or an atomic measures nothing, above all not what left a second before it.
#[test]
fn a_read_or_an_atomic_leaves_the_round_trip_as_it_was() {
    for atomic in [false, true] {
        let mut solo = Solo::script();
        solo.know_round_trip(1000);
        solo.wait(1_000_000_000);
        if atomic {
            solo.add(2, 0).sent();
            solo.wait(1000);
            solo.receive_found(1, 7);
        } else {
            solo.read(2, 8).sent();
            solo.wait(1000);
            solo.receive_data(Opcode::RC_RDMA_READ_RESPONSE_ONLY, 1, &[0; 8]);
        }
        assert_eq!(solo.completed(), [(2, WcStatus::Success)]);
        solo.send(3, 10).sent();
        let mut waited = 0;
        let probe = loop {
            waited += solo.wait_for_timer().expect("a probe");
            let sent = solo.sent();
            if !sent.is_empty() {
                break sent;
            }
        };
        assert_eq!((waited, &probe[..]), (2_000_000, &["SEND_ONLY #2 10B ack".to_owned()][..]));
        assert_eq!(solo.end.engine.counters().tail_probes, 1);
    }
}
