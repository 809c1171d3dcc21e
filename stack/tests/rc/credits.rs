//! End-to-end flow control: a requester keeps to the receives that its peer grants, and a responder
//! announces the number that it has.

use crate::common::{Pair, Setup, Solo, sge};
use rocinante_stack::Budget;
use rocinante_stack::types::Key;
use rocinante_stack::verbs::{SendOp, WcStatus};
use rocinante_stack::wire::{Aeth, Opcode as Op, Syndrome};

/// An ACK of everything up to `psn`, with MSN `msn`, which grants `receives` receives.
fn grant(solo: &mut Solo, psn: i64, msn: u32, receives: u64) {
    let mut aeth = [0; Aeth::LEN];
    Aeth { syndrome: Syndrome::credits(receives), msn }.write(&mut aeth);
    solo.receive(&solo.response(Op::RC_ACKNOWLEDGE, psn, &[&aeth]));
}

const WRITE: SendOp = SendOp::Write { remote: 0x9000, rkey: Key(0x99), imm: None };
const WRITE_IMM: SendOp = SendOp::Write { remote: 0x9000, rkey: Key(0x99), imm: Some([0; 4]) };

#[test]
fn what_is_granted_is_sent_and_then_one_message_at_a_time() {
    let mut solo = Solo::script();
    assert_eq!(solo.send(1, 8).sent(), ["SEND_ONLY #0 8B ack"]);
    // One message is done, and two receives are there.
    grant(&mut solo, 0, 1, 2);
    assert_eq!(solo.sends(2..=6, 8).sent(), ["SEND_ONLY #1 8B ack", "SEND_ONLY #2 8B ack"]);
    grant(&mut solo, 1, 2, 1);
    assert!(solo.sent().is_empty(), "the limit is where it was");
    grant(&mut solo, 2, 3, 0);
    assert_eq!(solo.sent(), ["SEND_ONLY #3 8B ack"], "one may be tried");
    assert!(solo.sent().is_empty());
    grant(&mut solo, 3, 4, 0);
    assert_eq!(solo.sent(), ["SEND_ONLY #4 8B ack"]);
    // A responder repeats its last acknowledgement after receives were posted.
    assert_eq!(solo.receive_syndrome(4, Syndrome::ACK_UNLIMITED).sent(), ["SEND_ONLY #5 8B ack"]);
    solo.receive_ack(5);
    let done: Vec<_> = solo.completed();
    assert_eq!(done, (1..=6).map(|wr_id| (wr_id, WcStatus::Success)).collect::<Vec<_>>());
}

#[test]
fn a_repeated_acknowledgement_raises_the_limit() {
    let mut solo = Solo::sending(&Setup::script(), 1, 8);
    grant(&mut solo, 0, 1, 1);
    assert_eq!(solo.sends(2..=5, 8).sent(), ["SEND_ONLY #1 8B ack"]);
    grant(&mut solo, 0, 1, 3);
    assert_eq!(solo.sent(), ["SEND_ONLY #2 8B ack", "SEND_ONLY #3 8B ack"]);
    // An old acknowledgement lowers nothing.
    grant(&mut solo, 2, 3, 4);
    assert_eq!(solo.sent(), ["SEND_ONLY #4 8B ack"]);
    grant(&mut solo, 0, 1, 0);
    assert!(solo.sent().is_empty());
}

#[test]
fn the_rest_of_a_tried_message_waits_for_its_first_packet() {
    let mut solo = Solo::sending(&Setup::script(), 1, 8);
    grant(&mut solo, 0, 1, 0);
    assert_eq!(solo.send(2, 700).sent(), ["SEND_FIRST #1 256B ack"]);
    grant(&mut solo, 1, 1, 0);
    assert_eq!(solo.sent(), ["SEND_MIDDLE #2 256B", "SEND_LAST #3 188B ack"]);
    grant(&mut solo, 3, 2, 0);
    assert_eq!(solo.completed(), [(1, WcStatus::Success), (2, WcStatus::Success)]);
}

#[test]
fn what_needs_no_receive_is_not_limited_but_counts() {
    let mut solo = Solo::sending(&Setup::script(), 1, 8);
    grant(&mut solo, 0, 1, 0);
    let list = [solo.sge(0, 8)];
    solo.post(2, WRITE, &list);
    solo.post(3, WRITE, &list);
    solo.post(4, WRITE_IMM, &list);
    assert_eq!(solo.sent(), ["WRITE_ONLY #1 8B ack", "WRITE_ONLY #2 8B ack"]);
    // Three messages are done, and one receive is there for the fourth.
    grant(&mut solo, 2, 3, 1);
    assert_eq!(solo.sent(), ["WRITE_ONLY_IMM #3 8B ack"]);
}

#[test]
fn a_read_in_pieces_counts_as_many_messages() {
    // 60 packets of 256 bytes are one request: half of our queue.
    let own = Some(Budget { bytes: 1 << 20, datagrams: 120 });
    let mut solo = Solo::sending(&Setup { own, ..Setup::script() }, 1, 8);
    grant(&mut solo, 0, 1, 0);
    solo.read(2, 61 * 256);
    assert_eq!(solo.send(3, 8).sent().len(), 2, "two READ requests, and no SEND");
    for psn in 1..=61 {
        let opcode = match psn {
            1 => Op::RC_RDMA_READ_RESPONSE_FIRST,
            60 => Op::RC_RDMA_READ_RESPONSE_LAST,
            61 => Op::RC_RDMA_READ_RESPONSE_ONLY,
            _ => Op::RC_RDMA_READ_RESPONSE_MIDDLE,
        };
        let mut aeth = [0; Aeth::LEN];
        let msn = if psn == 61 { 3 } else { 2 };
        Aeth { syndrome: Syndrome::credits(1), msn }.write(&mut aeth);
        let aeth: &[u8] = if opcode == Op::RC_RDMA_READ_RESPONSE_MIDDLE { &[] } else { &aeth };
        solo.receive(&solo.response(opcode, psn, &[aeth, &[7; 256]]));
    }
    assert_eq!(solo.sent(), ["SEND_ONLY #62 8B ack"]);
    grant(&mut solo, 62, 4, 0);
    assert_eq!(solo.completed().len(), 3);
}

#[test]
fn receives_are_advertised_if_wanted() {
    let mut solo = Solo::new(&Setup { advertise: true, ..Setup::script() });
    let list = [solo.sge(0, 1024)];
    (1..=6).for_each(|wr_id| solo.post_recv(wr_id, &list));
    solo.receive_request(Op::RC_SEND_ONLY, 0, &[&[1; 8]]);
    assert_eq!(solo.sent(), ["ACK #0 of 1 credits 4"], "5 has no code");
    solo.receive_request(Op::RC_SEND_FIRST, 1, &[&[1; 256]]);
    assert_eq!(solo.sent(), ["ACK #1 of 1 credits 4"], "the receive under way is no credit");
    solo.receive_request(Op::RC_SEND_LAST, 2, &[&[1; 8]]);
    assert_eq!(solo.sent(), ["ACK #2 of 2 credits 4"]);
    solo.receive_request(Op::RC_SEND_ONLY, 3, &[&[1; 8]]);
    assert_eq!(solo.sent(), ["ACK #3 of 3 credits 3"]);
}

/// SENDs to an end that posts receives late. Returns the number of retransmissions.
fn repeated(advertise: bool) -> u64 {
    const MESSAGES: u64 = 500;
    let mut pair = Pair::new(&Setup { advertise, ..Setup::default() });
    let [key, peer_key] = pair.register();
    let (mut posted, mut received, mut done, mut receives) = (0, 0, 0, 1);
    pair.recv(1, 0, &[sge(0, 4096, peer_key)]);
    while done < MESSAGES {
        // The first goes alone: its acknowledgement has the limit for the others.
        while posted < MESSAGES && posted - done < if done == 0 { 1 } else { 32 } {
            let list = [sge(0, (posted * 37 % 4096) as u32, key)];
            pair.send(0, posted, SendOp::Send { imm: None }, &list);
            posted += 1;
        }
        pair.run_until(|pair| !pair.ends[1].host.completions.is_empty() || received == MESSAGES);
        for cqe in pair.completions(1) {
            assert_eq!((cqe.wr_id, cqe.status), (received, WcStatus::Success));
            received += 1;
            // Sometimes more than one.
            for _ in 0..(1 + u64::from(received % 7 == 0)) {
                if receives < MESSAGES && receives - received < 8 {
                    pair.recv(1, receives, &[sge(0, 4096, peer_key)]);
                    receives += 1;
                }
            }
        }
        if received == MESSAGES {
            pair.run();
        }
        done += pair.completions(0).len() as u64;
    }
    pair.ends[0].engine.counters().retransmitted_pkts
}

#[test]
fn a_sender_that_knows_the_receives_repeats_less() {
    let (with, without) = (repeated(true), repeated(false));
    assert!(with * 4 < without, "{with} packets with credits, {without} without");
}

/// The first packet of the message left within the limit, without AckReq; then the limit fell.
#[test]
fn a_message_that_was_begun_within_the_limit_is_finished() {
    let mut solo = Solo::sending(&Setup { timeout: 0, ..Setup::script() }, 1, 8);
    grant(&mut solo, 0, 1, 3);
    solo.send(2, 8);
    solo.send(3, 700);
    solo.end.out.room = 2;
    assert_eq!(solo.sent(), ["SEND_ONLY #1 8B ack", "SEND_FIRST #2 256B"]);
    grant(&mut solo, 1, 2, 0);
    solo.end.out.room = 100;
    assert_eq!(solo.sent(), ["SEND_FIRST #2 256B ack"]);
    grant(&mut solo, 2, 2, 0);
    assert_eq!(solo.sent(), ["SEND_MIDDLE #3 256B", "SEND_LAST #4 188B ack"]);
    grant(&mut solo, 4, 3, 0);
    assert_eq!(solo.completed().len(), 3);
}
