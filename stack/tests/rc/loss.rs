//! Packets that are lost, duplicated or late: the requester's side.

use crate::common::{Setup, Solo};
use rocinante_stack::verbs::WcStatus;
use rocinante_stack::wire::{NakCode, Opcode, Syndrome};

const TIMEOUT_14: u64 = 4096 << 14;

#[test]
fn ghost_acks_change_nothing() {
    let mut solo = Solo::script();
    solo.receive_ack(0);
    solo.send(1, 10).sent();
    for psn in [1, 2, 1000, 0x7f_fff0] {
        solo.receive_ack(psn);
        solo.receive_nak(psn, NakCode::RemoteAccessError);
    }
    assert_eq!(solo.end.engine.drops().ghost_response, 9);
    // Old PSNs, as after a wrap of the peer's, are not ghosts, and are just as harmless.
    for psn in [-1, -2, -1000] {
        solo.receive_ack(psn);
        solo.receive_nak(psn, NakCode::RemoteAccessError);
    }
    assert_eq!(solo.end.engine.counters().duplicate_response, 4);
    assert!(solo.completed().is_empty());
    assert_eq!(solo.receive_ack(0).completed(), [(1, WcStatus::Success)]);
    solo.receive_ack(0);
    assert!(solo.completed().is_empty());
}

#[test]
fn reserved_syndromes_are_counted_and_ignored() {
    let mut solo = Solo::sending(&Setup::script(), 1, 10);
    for syndrome in [0x40, 0x5f, 0x65, 0x7f, 0x80, 0xff] {
        solo.receive_syndrome(0, Syndrome(syndrome));
    }
    // And a NAK in the header of data.
    let aeth = [Syndrome::nak(NakCode::RemoteAccessError).0, 0, 0, 0];
    solo.receive(&solo.response(Opcode::RC_RDMA_READ_RESPONSE_ONLY, 0, &[&aeth, &[1; 4]]));
    assert_eq!(solo.end.engine.drops().bad_syndrome, 7);
    assert!(solo.completed().is_empty());
}

#[test]
fn after_a_sequence_nak_it_goes_back() {
    let mut solo = Solo::script();
    solo.send(1, 1000);
    let all = [
        "SEND_FIRST #0 256B",
        "SEND_MIDDLE #1 256B",
        "SEND_MIDDLE #2 256B",
        "SEND_LAST #3 232B ack",
    ];
    assert_eq!(solo.sent(), all);
    solo.receive_nak(2, NakCode::PsnSequenceError);
    // The first packet of a retransmission has AckReq: its arrival alone is progress.
    assert_eq!(solo.sent(), ["SEND_MIDDLE #2 256B ack", all[3]]);
    assert_eq!(solo.end.engine.counters().retransmitted_pkts, 2);
    assert_eq!(solo.receive_ack(3).completed(), [(1, WcStatus::Success)]);
}

#[test]
fn a_lost_last_packet_is_asked_about_and_sent_again_after_the_timeout() {
    let mut solo = Solo::sending(&Setup::script(), 2, 10);
    solo.wait(1000);
    assert_eq!(solo.receive_ack(0).completed(), [(1, WcStatus::Success)]);
    // Four round trips were 4 µs: a peer gets at least 2 ms, and twice as long each time.
    let mut passed = 0;
    for wait in [2, 4, 8, 16, 32] {
        solo.wait(wait * 1_000_000 - 1);
        assert!(solo.sent().is_empty());
        solo.wait(1);
        assert_eq!(solo.sent(), ["SEND_ONLY #1 10B ack"]);
        passed += wait * 1_000_000;
    }
    let counters = solo.end.engine.counters();
    assert_eq!((counters.tail_probes, counters.local_ack_timeout_err), (5, 0));
    solo.wait(TIMEOUT_14 - passed - 1);
    assert!(solo.sent().is_empty());
    solo.wait(1);
    assert_eq!(solo.sent(), ["SEND_ONLY #1 10B ack"]);
    assert_eq!(solo.end.engine.counters().local_ack_timeout_err, 1);
    // The lost ACK of a request that was executed all the same.
    assert_eq!(solo.receive_ack(1).completed(), [(2, WcStatus::Success)]);
}

#[test]
fn progress_starts_the_timer_over_and_reloads_the_retries() {
    let mut solo = Solo::new(&Setup { retry_cnt: 1, ..Setup::script() });
    solo.sends(0..3, 10).sent();
    for psn in 0..3 {
        solo.wait(TIMEOUT_14);
        assert_eq!(solo.sent().len(), 3 - psn as usize);
        solo.wait(TIMEOUT_14 - 1);
        assert_eq!(solo.receive_ack(psn).completed(), [(psn as u64, WcStatus::Success)]);
    }
}

#[test]
fn retries_are_exhausted_after_exactly_retry_cnt_and_one_sends_and_in_the_promised_time() {
    for (retry_cnt, timeout) in [(0, 14), (1, 8), (3, 20), (7, 1)] {
        let mut solo = Solo::new(&Setup { retry_cnt, timeout, ..Setup::script() });
        let start = solo.now;
        solo.send(1, 10);
        solo.send(2, 10);
        let mut sends = solo.sent().iter().filter(|line| line.contains("#0")).count();
        while solo.completed().is_empty() {
            solo.wait_for_timer().expect("a deadline");
            sends += solo.sent().iter().filter(|line| line.contains("#0")).count();
            if sends == usize::from(retry_cnt) + 1 && solo.end.host.completions.len() == 2 {
                break;
            }
        }
        assert_eq!(sends, usize::from(retry_cnt) + 1);
        let promised = (u64::from(retry_cnt) + 1) * (4096 << timeout);
        assert_eq!(solo.now.since(start), promised);
        assert_eq!(solo.end.engine.counters().retry_exceeded_err, 1);
    }
}

#[test]
fn naks_without_progress_do_not_put_the_end_off() {
    let mut solo = Solo::new(&Setup { retry_cnt: 2, ..Setup::script() });
    let start = solo.now;
    solo.send(1, 10);
    solo.send(2, 10).sent();
    for _ in 0..1000 {
        solo.wait(TIMEOUT_14 / 100);
        solo.receive_nak(0, NakCode::PsnSequenceError).sent();
        if !solo.end.host.completions.is_empty() {
            break;
        }
    }
    assert_eq!(solo.completed()[0], (1, WcStatus::RetryExcErr));
    // Each of the three timeouts is noticed at most one step late.
    assert!(solo.now.since(start) <= 3 * (TIMEOUT_14 + TIMEOUT_14 / 100));
}

#[test]
fn timeout_zero_waits_for_ever() {
    let mut solo = Solo::new(&Setup { timeout: 0, ..Setup::script() });
    assert_eq!(solo.send(1, 10).sent().len(), 1);
    assert_eq!(solo.end.engine.poll_timeout(), None);
    solo.wait(u64::MAX / 2);
    assert!(solo.sent().is_empty());
    assert_eq!(solo.receive_ack(0).completed(), [(1, WcStatus::Success)]);
}

#[test]
fn rnr_waits_as_asked_and_then_succeeds() {
    let mut solo = Solo::sending(&Setup::script(), 2, 10);
    solo.receive_rnr(0, 14); // 1.28 ms
    assert!(solo.sent().is_empty());
    // The same RNR NAK for a later packet changes nothing.
    solo.receive_rnr(0, 14);
    assert_eq!(solo.wait_for_timer(), Some(1_280_000));
    assert_eq!(solo.sent(), ["SEND_ONLY #0 10B ack", "SEND_ONLY #1 10B ack"]);
    assert_eq!(solo.receive_ack(1).completed().len(), 2);
}

#[test]
fn rnr_retries_are_counted_per_request_and_exhausted() {
    let mut solo = Solo::new(&Setup { rnr_retry: 2, ..Setup::script() });
    solo.send(1, 10);
    solo.send(2, 10);
    for psn in 0..2 {
        for _ in 0..2 {
            solo.sent();
            solo.receive_rnr(psn, 1);
            solo.wait(10_000);
        }
        assert_eq!(solo.sent().len(), 2 - psn as usize);
        if psn == 0 {
            solo.receive_ack(0);
        }
    }
    assert_eq!(solo.completed(), [(1, WcStatus::Success)]);
    assert_eq!(solo.receive_rnr(1, 1).completed(), [(2, WcStatus::RnrRetryExcErr)]);
    assert_eq!(solo.end.engine.counters().retry_rnr_exceeded_err, 1);
}

#[test]
fn rnr_retry_seven_never_gives_up() {
    let mut solo = Solo::sending(&Setup { rnr_retry: 7, retry_cnt: 1, ..Setup::script() }, 1, 10);
    for round in 0..5000 {
        solo.receive_rnr(0, 1);
        solo.wait(10_000);
        assert_eq!(solo.sent(), ["SEND_ONLY #0 10B ack"]);
        if round % 2 == 0 {
            // A lost packet in between costs one timeout; RNR NAKs show that the peer lives.
            solo.wait(TIMEOUT_14);
            assert_eq!(solo.sent(), ["SEND_ONLY #0 10B ack"]);
        }
    }
    assert_eq!(solo.receive_ack(0).completed(), [(1, WcStatus::Success)]);
}

#[test]
fn an_ack_during_an_rnr_wait_ends_it() {
    let mut solo = Solo::sending(&Setup::script(), 2, 10);
    solo.receive_rnr(0, 31);
    assert_eq!(solo.receive_ack(1).completed().len(), 2);
    assert_eq!(solo.send(3, 10).sent(), ["SEND_ONLY #2 10B ack"]);
}

#[test]
fn a_late_ack_during_a_retransmission_is_taken() {
    let mut solo = Solo::script();
    solo.end.out.room = 2;
    solo.send(1, 1000).sent();
    solo.sent();
    solo.wait(TIMEOUT_14);
    assert_eq!(solo.sent(), ["SEND_FIRST #0 256B ack", "SEND_MIDDLE #1 256B"]);
    // All packets had arrived; only the ACK was slow.
    assert_eq!(solo.receive_ack(3).completed(), [(1, WcStatus::Success)]);
    assert!(solo.sent().is_empty());
}

#[test]
fn credits_and_msn_of_other_implementations_are_accepted() {
    let mut solo = Solo::sending(&Setup::script(), 1, 10);
    // Hardware sends credit counts.
    solo.receive(&solo.response(Opcode::RC_ACKNOWLEDGE, 0, &[&[5, 0xab, 0xcd, 0xef]]));
    assert_eq!(solo.completed(), [(1, WcStatus::Success)]);
}
