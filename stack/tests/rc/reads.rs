//! READs and atomics: implied NAKs, partial retries, duplicates and limits, on both sides.

use crate::common::{Setup, Solo, pattern};
use rocinante_stack::Budget;
use rocinante_stack::types::{Key, Mtu};
use rocinante_stack::verbs::{SendData, SendOp, SendWr, WcStatus};
use rocinante_stack::wire::{NakCode, Opcode, Packet};

const TIMEOUT_14: u64 = 4096 << 14;
use Opcode as Op;

#[test]
fn an_ack_that_passes_an_unanswered_read_is_an_implied_nak() {
    let mut solo = Solo::script();
    solo.read(1, 300);
    assert_eq!(solo.send(2, 10).sent(), ["READ #0 @9000+300", "SEND_ONLY #2 10B ack"]);
    solo.receive_ack(2);
    assert!(solo.completed().is_empty());
    assert_eq!(solo.sent(), ["READ #0 @9000+300", "SEND_ONLY #2 10B ack"]);
    // Only once: the next response may have been in flight.
    assert!(solo.receive_ack(2).sent().is_empty());
    assert_eq!(solo.end.engine.counters().implied_nak_seq_err, 1);
    // But a timeout sends it again.
    solo.wait(TIMEOUT_14);
    assert_eq!(solo.sent().len(), 2);
    solo.receive_data(Op::RC_RDMA_READ_RESPONSE_FIRST, 0, &[1; 256]);
    solo.receive_data(Op::RC_RDMA_READ_RESPONSE_LAST, 1, &[2; 44]);
    assert_eq!(solo.receive_ack(2).completed(), [(1, WcStatus::Success), (2, WcStatus::Success)]);
}

#[test]
fn an_atomic_that_was_passed_over_is_asked_for_again() {
    for code in [None, Some(NakCode::PsnSequenceError), Some(NakCode::RemoteAccessError)] {
        let mut solo = Solo::script();
        solo.send(1, 10);
        solo.add(2, 0);
        solo.send(3, 10).sent();
        match code {
            None => solo.receive_ack(2),
            Some(code) => solo.receive_nak(2, code),
        };
        // The requests before the atomic are acknowledged all the same.
        assert_eq!(solo.completed(), [(1, WcStatus::Success)], "{code:?}");
        assert_eq!(solo.sent(), ["FETCH_ADD #1", "SEND_ONLY #2 10B ack"]);
        assert_eq!(solo.receive_found(1, 5).completed(), [(2, WcStatus::Success)]);
    }
}

#[test]
fn a_lost_response_in_mid_read_is_asked_for_from_there_with_the_same_end() {
    let mut solo = Solo::script();
    let again = |solo: &Solo| solo.end.engine.counters().retransmitted_pkts;
    solo.read(1, 1000).sent();
    assert_eq!(again(&solo), 0);
    let data = pattern(1000, 9);
    solo.receive_data(Op::RC_RDMA_READ_RESPONSE_FIRST, 0, &data[..256]);
    // #1 is lost.
    solo.receive_data(Op::RC_RDMA_READ_RESPONSE_MIDDLE, 2, &data[512..768]);
    assert_eq!(solo.sent(), ["READ #1 @9100+744"]);
    assert_eq!(again(&solo), 1);
    assert!(solo.receive_data(Op::RC_RDMA_READ_RESPONSE_LAST, 3, &data[768..]).sent().is_empty());
    solo.receive_data(Op::RC_RDMA_READ_RESPONSE_FIRST, 1, &data[256..512]);
    solo.receive_data(Op::RC_RDMA_READ_RESPONSE_MIDDLE, 2, &data[512..768]);
    solo.receive_data(Op::RC_RDMA_READ_RESPONSE_LAST, 3, &data[768..]);
    assert_eq!(solo.completed(), [(1, WcStatus::Success)]);
    assert_eq!(solo.end.host.arena[..1000], data[..]);
}

#[test]
fn a_large_read_is_cut_and_retried_with_the_same_borders() {
    // Our queue holds 8 datagrams, so a READ asks for 4 at a time.
    let budget = Budget { bytes: 1 << 20, datagrams: 8 };
    let mut solo = Solo::new(&Setup { budget, ..Setup::script() });
    assert_eq!(solo.read(1, 2560).sent(), ["READ #0 @9000+1024", "READ #4 @9400+1024"]);
    for psn in 0..4 {
        let opcode = match psn {
            0 => Op::RC_RDMA_READ_RESPONSE_FIRST,
            3 => Op::RC_RDMA_READ_RESPONSE_LAST,
            _ => Op::RC_RDMA_READ_RESPONSE_MIDDLE,
        };
        assert!(solo.sent().is_empty());
        solo.receive_data(opcode, psn, &[psn as u8; 256]);
    }
    assert_eq!(solo.sent(), ["READ #8 @9800+512"]);
    solo.receive_data(Op::RC_RDMA_READ_RESPONSE_FIRST, 4, &[4; 256]);
    solo.wait(TIMEOUT_14);
    assert_eq!(solo.sent(), ["READ #5 @9500+768", "READ #8 @9800+512"]);
}

/// Number of packets in each request of a READ of `packets`, if our own queue holds `own`.
fn pieces(mtu: Mtu, own: Budget, packets: u32) -> Vec<u32> {
    let mut solo = Solo::new(&Setup { mtu, own: Some(own), arena: 1 << 20, ..Setup::script() });
    solo.read(1, packets * mtu.bytes());
    let sent = solo.packets();
    let asked = sent.iter().map(|sent| Packet::parse(sent).unwrap().reth().unwrap().len);
    asked.map(|len| len / mtu.bytes()).collect()
}

#[test]
fn a_read_asks_for_a_third_of_our_room_in_full_runs_or_for_half_of_it() {
    let wide = Budget { bytes: 8 << 20, datagrams: 4096 };
    assert_eq!(pieces(Mtu::Mtu256, wide, 1200), [259, 259, 259], "16 times 60 at first");
    assert_eq!(pieces(Mtu::Mtu4096, wide, 255), [78, 78, 78], "16 times 15 at first");
    let third = |datagrams| pieces(Mtu::Mtu4096, Budget { datagrams, ..wide }, 200);
    assert_eq!(third(99), [33, 33, 33], "no more than our room at a time");
    assert_eq!(third(53), [15, 15, 15]);
    // A response of 256 or of 512 bytes costs 1,280: this is credit for nine.
    for mtu in [Mtu::Mtu256, Mtu::Mtu512] {
        let nine = Budget { bytes: 9 * 1280, ..wide };
        assert_eq!(pieces(mtu, nine, 4), [4], "{mtu:?}");
        assert_eq!(pieces(mtu, nine, 6)[0], 4, "{mtu:?}");
    }
    let one = Budget { datagrams: 1, ..wide };
    assert_eq!(pieces(Mtu::Mtu256, one, 2)[0], 1, "something must be asked for");
}

/// A super-packet that arrives as one takes one slot of our queue. Then READs gradually ask for
/// more at once. A READ that has begun keeps its request boundaries.
#[test]
fn where_super_packets_arrive_whole_a_read_asks_for_more() {
    let own = Some(Budget { bytes: 8 << 20, datagrams: 48 });
    let mut solo = Solo::new(&Setup { mtu: Mtu::Mtu4096, own, arena: 1 << 20, ..Setup::script() });
    let asked = |solo: &mut Solo| {
        let sent = solo.packets();
        let asked = sent.iter().map(|sent| Packet::parse(sent).unwrap().reth().unwrap().len);
        asked.map(|len| len / 4096).collect::<Vec<_>>()
    };
    for _ in 0..100 {
        solo.end.engine.arrived(10, 150, 150 * 4112);
    }
    solo.read(1, 45 * 4096);
    assert_eq!(asked(&mut solo), [15, 15, 15]);
    for psn in 0..45 {
        let opcode = match psn % 15 {
            0 => Op::RC_RDMA_READ_RESPONSE_FIRST,
            14 => Op::RC_RDMA_READ_RESPONSE_LAST,
            _ => Op::RC_RDMA_READ_RESPONSE_MIDDLE,
        };
        solo.receive_data(opcode, psn, &[7; 4096]);
    }
    assert_eq!(solo.completed(), [(1, WcStatus::Success)]);
    solo.read(2, 130 * 4096);
    assert_eq!(asked(&mut solo), [18; 5], "93 are expected to get through");
    solo.wait(TIMEOUT_14);
    assert_eq!(asked(&mut solo), [18, 18], "nothing came of 90");
}

#[test]
fn a_response_of_the_wrong_length_is_a_bad_response() {
    for (opcode, len) in [
        (Op::RC_RDMA_READ_RESPONSE_FIRST, 255),
        (Op::RC_RDMA_READ_RESPONSE_FIRST, 257),
        (Op::RC_RDMA_READ_RESPONSE_ONLY, 0),
        (Op::RC_RDMA_READ_RESPONSE_ONLY, 600),
    ] {
        let mut solo = Solo::script();
        solo.read(1, 600);
        solo.send(2, 10).sent();
        solo.receive_data(opcode, 0, &vec![1; len]);
        use WcStatus::{BadRespErr, WrFlushErr};
        assert_eq!(solo.completed(), [(1, BadRespErr), (2, WrFlushErr)], "{opcode:?} {len}");
        assert!(solo.end.host.arena.iter().all(|byte| *byte == 0));
    }
}

#[test]
fn data_for_a_request_that_has_none_is_a_ghost() {
    let mut solo = Solo::sending(&Setup::script(), 1, 10);
    solo.receive_data(Op::RC_RDMA_READ_RESPONSE_ONLY, 0, &[1; 10]);
    solo.receive_found(0, 7);
    solo.receive_found(1, 7);
    assert_eq!(solo.end.engine.drops().ghost_response, 3);
    assert!(solo.completed().is_empty());
}

#[test]
fn where_no_reads_are_allowed_a_read_is_a_local_error() {
    let mut solo = Solo::new(&Setup { rd_atomic: 0, ..Setup::script() });
    solo.send(1, 8);
    solo.read(2, 8);
    assert_eq!(solo.send(3, 8).sent(), ["SEND_ONLY #0 8B ack"]);
    assert!(solo.completed().is_empty());
    assert!(solo.receive_ack(0).sent().is_empty());
    use WcStatus::{LocQpOpErr, Success, WrFlushErr};
    assert_eq!(solo.completed(), [(1, Success), (2, LocQpOpErr), (3, WrFlushErr)]);
}

#[test]
fn a_fence_waits_for_reads_and_atomics() {
    let mut solo = Solo::script();
    solo.read(1, 8);
    solo.add(2, 64);
    let data = SendData::Sges(&[solo.sge(0, 8)]);
    solo.post_wr(&SendWr::new(SendOp::Send { imm: None }, data).wr_id(3).fence()).unwrap();
    assert_eq!(solo.send(4, 8).sent(), ["READ #0 @9000+8", "FETCH_ADD #1"]);
    assert!(solo.receive_data(Op::RC_RDMA_READ_RESPONSE_ONLY, 0, b"new data").sent().is_empty());
    solo.receive_found(1, 3);
    let packets = solo.packets();
    assert_eq!(packets.len(), 2);
    assert_eq!(&packets[0][12..20], b"new data");
    // A retransmission keeps the order as well.
    solo.wait(TIMEOUT_14);
    assert_eq!(solo.sent(), ["SEND_ONLY #2 8B ack", "SEND_ONLY #3 8B ack"]);
}

// ---- the responder's side ----

/// A responder with `n` READs of 8 bytes answered.
fn answered(n: i64) -> Solo {
    let mut solo = Solo::new(&Setup { rd_atomic: 4, ..Setup::script() });
    for psn in 0..n {
        solo.end.host.arena[psn as usize * 8] = psn as u8 + 1;
        solo.receive_request(Op::RC_RDMA_READ_REQUEST, psn, &[&solo.reth(psn as u64 * 8, 8)]);
        assert_eq!(solo.sent(), [format!("READ_ONLY #{psn} 8B")]);
    }
    solo
}

/// Some peers (Linux rxe) would take an ACK with the PSN of a READ for its response, although the
/// response may be lost.
#[test]
fn an_ack_never_has_the_psn_of_a_read() {
    let mut solo = Solo::script();
    let reth = solo.reth(0, 300);
    solo.receive_request(Op::RC_RDMA_WRITE_ONLY, 0, &[&solo.reth(0, 4), b"data"]);
    solo.receive_request(Op::RC_RDMA_READ_REQUEST, 1, &[&reth]);
    // The response also acknowledges the WRITE.
    assert_eq!(solo.sent(), ["READ_FIRST #1 256B", "READ_LAST #2 44B"]);
    solo.receive_request(Op::RC_RDMA_WRITE_ONLY, 0, &[&solo.reth(0, 4), b"data"]);
    assert_eq!(solo.sent(), ["ACK #0"]);
    solo.receive_request(Op::RC_RDMA_READ_REQUEST, 1, &[&reth]);
    solo.receive_request(Op::RC_RDMA_WRITE_ONLY, 3, &[&solo.reth(0, 4), b"more"]);
    assert_eq!(solo.sent(), ["READ_FIRST #1 256B", "READ_LAST #2 44B", "ACK #3"]);
}

#[test]
fn a_duplicate_that_does_not_match_its_record_is_dropped() {
    let mut solo = answered(1);
    let wrong = [
        solo.reth(8, 8),
        solo.reth(0, 9),
        solo.reth(0, 4),
        solo.reth(0, 0),
        crate::common::reth(crate::common::BASE, Key(1), 8),
    ];
    for reth in &wrong {
        solo.receive_request(Op::RC_RDMA_READ_REQUEST, 0, &[reth]);
    }
    solo.receive_request(Op::RC_FETCH_ADD, 0, &[&solo.atomic_eth(0, 1, 1)]);
    assert!(solo.sent().is_empty());
    assert_eq!(solo.end.engine.drops().stale_duplicate, 6);
}

/// A response that has not left yet leaves once, from its current place.
#[test]
fn a_part_that_is_asked_for_before_it_left_takes_nothing_away() {
    let mut solo = Solo::script();
    let [whole, middle, rest] = [solo.reth(0, 1000), solo.reth(256, 256), solo.reth(512, 488)];
    solo.receive_request(Op::RC_RDMA_READ_REQUEST, 0, &[&whole]);
    solo.receive_request(Op::RC_RDMA_READ_REQUEST, 2, &[&rest]);
    solo.receive_request(Op::RC_RDMA_READ_REQUEST, 1, &[&middle]);
    let all =
        ["READ_FIRST #0 256B", "READ_MIDDLE #1 256B", "READ_MIDDLE #2 256B", "READ_LAST #3 232B"];
    assert_eq!(solo.sent(), all);
    assert!(solo.sent().is_empty());
}

/// Two parts that are asked for at once leave as one run, with what is between them.
#[test]
fn a_second_part_takes_nothing_of_the_first_away() {
    let mut solo = Solo::script();
    let [whole, second, last] = [solo.reth(0, 1000), solo.reth(256, 256), solo.reth(768, 232)];
    solo.receive_request(Op::RC_RDMA_READ_REQUEST, 0, &[&whole]);
    assert_eq!(solo.sent().len(), 4);
    let run = ["READ_FIRST #1 256B", "READ_MIDDLE #2 256B", "READ_LAST #3 232B"];
    for order in [[(1, &second), (3, &last)], [(3, &last), (1, &second)]] {
        for (psn, reth) in order {
            solo.receive_request(Op::RC_RDMA_READ_REQUEST, psn, &[reth]);
        }
        assert_eq!(solo.sent(), run);
        assert!(solo.sent().is_empty());
    }
}

/// The frames of the port are full of other bytes before the engine writes them.
#[test]
fn the_pad_of_a_response_is_zero_whatever_was_in_the_frame() {
    for len in (0..=5).chain(253..=261).chain(509..=517) {
        let mut solo = Solo::script();
        solo.end.host.arena.fill(7);
        solo.receive_request(Op::RC_RDMA_READ_REQUEST, 0, &[&solo.reth(0, len)]);
        let mut rest = len as usize;
        for bytes in solo.packets() {
            let packet = Packet::parse(&bytes).expect("a packet of ours");
            let payload = packet.payload();
            assert_eq!(payload, vec![7; rest.min(256)], "{len}");
            rest -= payload.len();
            let pad = payload.len().next_multiple_of(4) - payload.len();
            assert_eq!(bytes[bytes.len() - 4 - pad..][..pad], [0; 3][..pad], "{len}");
        }
        assert_eq!(rest, 0, "{len}");
    }
}

#[test]
fn a_duplicate_while_the_ring_is_full_and_the_first_answer_is_under_way() {
    let mut solo = Solo::new(&Setup { rd_atomic: 2, ..Setup::script() });
    solo.end.out.room = 1;
    let reth = [solo.reth(0, 600), solo.reth(600, 8)];
    solo.receive_request(Op::RC_RDMA_READ_REQUEST, 0, &[&reth[0]]);
    solo.receive_request(Op::RC_RDMA_READ_REQUEST, 3, &[&reth[1]]);
    assert_eq!(solo.sent(), ["READ_FIRST #0 256B"]);
    // The READ is half answered: the sent responses are sent again, and the rest follows once.
    solo.receive_request(Op::RC_RDMA_READ_REQUEST, 0, &[&reth[0]]);
    solo.receive_request(Op::RC_RDMA_READ_REQUEST, 3, &[&reth[1]]);
    let mut seen = Vec::new();
    (0..6).for_each(|_| seen.extend(solo.sent()));
    let all = ["READ_FIRST #0 256B", "READ_MIDDLE #1 256B", "READ_LAST #2 88B", "READ_ONLY #3 8B"];
    assert_eq!(seen, all);
}

#[test]
fn more_reads_than_agreed_are_an_invalid_request_after_the_answers_owed() {
    let mut solo = Solo::new(&Setup { rd_atomic: 2, ..Setup::script() });
    for psn in 0..3 {
        solo.receive_request(Op::RC_RDMA_READ_REQUEST, psn, &[&solo.reth(psn as u64 * 8, 8)]);
    }
    assert_eq!(solo.sent(), ["READ_ONLY #0 8B", "READ_ONLY #1 8B", "NAK #2 invalid"]);
}

#[test]
fn an_ack_never_overtakes_a_response() {
    let mut solo = Solo::script();
    solo.end.out.room = 1;
    let (read, write, add) = (solo.reth(0, 600), solo.reth(2000, 4), solo.atomic_eth(3000, 1, 0));
    solo.receive_request(Op::RC_RDMA_WRITE_ONLY, 0, &[&write, &[1; 4]]);
    solo.receive_request(Op::RC_RDMA_READ_REQUEST, 1, &[&read]);
    solo.receive_request(Op::RC_RDMA_WRITE_ONLY, 4, &[&write, &[1; 4]]);
    solo.receive_request(Op::RC_FETCH_ADD, 5, &[&add]);
    solo.receive_request(Op::RC_RDMA_WRITE_ONLY, 6, &[&write, &[1; 4]]);
    // After a gap: the NAK waits too.
    solo.receive_request(Op::RC_RDMA_WRITE_ONLY, 8, &[&write, &[1; 4]]);
    let mut seen = Vec::new();
    (0..7).for_each(|_| seen.extend(solo.sent()));
    let expected = [
        "READ_FIRST #1 256B",
        "READ_MIDDLE #2 256B",
        "READ_LAST #3 88B",
        "ATOMIC_ACKNOWLEDGE #5 =0",
        "NAK #7 sequence",
    ];
    assert_eq!(seen, expected);
}

#[test]
fn a_region_that_goes_away_under_a_read_ends_it_with_a_nak_at_that_packet() {
    let mut solo = Solo::script();
    solo.end.out.room = 1;
    let (read, write) = (solo.reth(0, 600), solo.reth(0, 4));
    solo.receive_request(Op::RC_RDMA_READ_REQUEST, 0, &[&read]);
    solo.receive_request(Op::RC_RDMA_WRITE_ONLY, 3, &[&write, &[1; 4]]);
    assert_eq!(solo.sent(), ["READ_FIRST #0 256B"]);
    solo.end.host.regions.remove(solo.key);
    assert_eq!(solo.sent(), ["NAK #1 access"]);
    assert_eq!(solo.event(), Some(rocinante_stack::verbs::QpEvent::AccessErr));
    assert_eq!(solo.state(), rocinante_stack::verbs::QpState::Err);
    assert!(solo.sent().is_empty());
}
