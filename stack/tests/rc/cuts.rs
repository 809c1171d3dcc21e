//! WRITEs of several packets that leave as messages of one packet each:
//! `stack/src/rc/requester/split.rs`.

use std::collections::BTreeMap;

use crate::common::{BASE, Pair, Setup, Solo, pattern, sge};
use rocinante_stack::Budget;
use rocinante_stack::mem::Access;
use rocinante_stack::types::{Key, Mtu};
use rocinante_stack::verbs::{SendOp, WcStatus};
use rocinante_stack::wire::{Aeth, ICRC_LEN, NakCode, Opcode as Op, Packet, Syndrome};

const REMOTE: u64 = 0x9000;
const WRITE: SendOp = SendOp::Write { remote: REMOTE, rkey: Key(0x99), imm: None };
const WRITE_IMM: SendOp = SendOp::Write { remote: REMOTE, rkey: Key(0x99), imm: Some([0; 4]) };

fn setup() -> Setup {
    Setup { split_writes: true, ..Setup::script() }
}

/// A WRITE of 600 bytes was alone, so it has left as one message. It is not acknowledged.
fn solo() -> Solo {
    let mut solo = Solo::new(&setup());
    solo.end.host.arena[..4096].copy_from_slice(&pattern(4096, 7));
    post(&mut solo, 1, WRITE, 600);
    assert_eq!(
        solo.sent(),
        ["WRITE_FIRST #0 256B", "WRITE_MIDDLE #1 256B", "WRITE_LAST #2 88B ack"]
    );
    solo
}

fn post(solo: &mut Solo, wr_id: u64, op: SendOp, len: u32) {
    solo.post(wr_id, op, &[solo.sge(0, len)]);
}

/// The address, length and bytes that a packet writes. It must be a whole message.
fn placed(packet: &[u8]) -> (u64, u32, Vec<u8>) {
    let packet = Packet::parse(packet).expect("a packet");
    assert_eq!(packet.bth().opcode, Op::RC_RDMA_WRITE_ONLY);
    let reth = packet.reth().expect("a RETH");
    assert_eq!(reth.rkey, Key(0x99));
    (reth.va, reth.len, packet.payload().to_vec())
}

/// The packets that leave now, without the parts that may change in a retransmission: AckReq, and
/// so the ICRC.
fn unasked(solo: &mut Solo) -> Vec<Vec<u8>> {
    let mut packets = solo.packets();
    for packet in &mut packets {
        packet[8] &= 0x7f;
        packet.truncate(packet.len() - ICRC_LEN);
    }
    packets
}

#[test]
fn what_has_company_leaves_as_messages_of_one_packet() {
    let mut solo = solo();
    post(&mut solo, 2, WRITE, 700);
    let packets = solo.packets();
    let sent: Vec<_> = packets.iter().map(|packet| placed(packet)).collect();
    let bytes = pattern(4096, 7);
    let part =
        |at: usize, len: usize| (REMOTE + at as u64, len as u32, bytes[at..at + len].to_vec());
    assert_eq!(sent, [part(0, 256), part(256, 256), part(512, 188)]);
    let asks: Vec<_> = packets.iter().map(|p| Packet::parse(p).unwrap().bth().ack_req).collect();
    assert_eq!(asks, [false, false, true], "of a request one packet asks, as of a message");
    assert_eq!(solo.receive_ack(5).completed(), [(1, WcStatus::Success), (2, WcStatus::Success)]);
}

#[test]
fn only_writes_are_cut_and_only_where_it_saves_something() {
    let mut solo = solo();
    post(&mut solo, 2, WRITE_IMM, 512);
    post(&mut solo, 3, SendOp::Send { imm: None }, 512);
    // Two packets, the second shorter, are one super-packet either way.
    post(&mut solo, 4, WRITE, 500);
    assert_eq!(
        solo.sent(),
        [
            "WRITE_FIRST #3 256B",
            "WRITE_LAST_IMM #4 256B ack",
            "SEND_FIRST #5 256B",
            "SEND_LAST #6 256B ack",
            "WRITE_FIRST #7 256B",
            "WRITE_LAST #8 244B ack"
        ]
    );
    solo.receive_ack(8);
    // Nothing is in flight any more, and nothing is known of that range.
    let elsewhere = SendOp::Write { remote: REMOTE + 4096, rkey: Key(0x99), imm: None };
    post(&mut solo, 5, elsewhere, 512);
    post(&mut solo, 6, WRITE, 512);
    let sent = solo.sent();
    assert_eq!(sent[..2], ["WRITE_FIRST #9 256B", "WRITE_LAST #10 256B ack"]);
    assert_eq!(sent[2..], ["WRITE_ONLY #11 256B", "WRITE_ONLY #12 256B ack"]);

    let mut whole = Solo::script();
    (1..=2).for_each(|wr_id| post(&mut whole, wr_id, WRITE, 512));
    assert!(whole.sent().iter().all(|packet| !packet.contains("ONLY")), "it was not wanted");
}

/// Alone it is cut within a range that the peer has admitted, because of one that is refused no
/// byte may be written.
#[test]
fn what_is_alone_is_cut_where_the_peer_has_written_before() {
    let mut solo = solo();
    let mut leaves = |wr_id, remote, rkey, len, acked| {
        post(&mut solo, wr_id, SendOp::Write { remote, rkey, imm: None }, len);
        let sent = solo.sent();
        solo.receive_ack(acked);
        sent.iter().all(|packet| packet.contains("ONLY"))
    };
    let key = Key(0x99);
    assert!(leaves(2, REMOTE, key, 512, 4), "it is not alone");
    // 600 bytes from there on are known.
    assert!(leaves(3, REMOTE + 88, key, 512, 6));
    assert!(!leaves(4, REMOTE + 89, key, 512, 8), "a byte more");
    assert!(leaves(5, REMOTE + 89, key, 512, 10), "which was admitted");
    assert!(!leaves(6, REMOTE, Key(0x98), 512, 12), "another key");
    assert!(leaves(7, REMOTE, Key(0x98), 512, 14), "which is known beside");
    assert!(leaves(8, REMOTE, key, 512, 16));
    assert!(!leaves(9, REMOTE, Key(0x9d), 512, 18), "a key for which it is forgotten");
    assert!(!leaves(10, REMOTE, key, 512, 20));
    assert!(!leaves(11, REMOTE - 1, key, 513, 23), "a byte before");
    assert!(leaves(12, REMOTE - 1, key, 513, 26));
    assert!(!leaves(13, u64::MAX - 100, key, 512, 28), "it wraps around");
}

#[test]
fn what_is_sent_again_is_the_same() {
    let mut solo = solo();
    post(&mut solo, 2, WRITE, 700);
    post(&mut solo, 3, WRITE, 512);
    let sent = unasked(&mut solo);
    assert_eq!(sent.len(), 5);
    // A retransmission from the middle of the second WRITE, and then from its first packet. The
    // first WRITE is acknowledged and gone, so if decided now, the second would be alone.
    solo.receive_nak(4, NakCode::PsnSequenceError);
    assert_eq!(unasked(&mut solo), sent[1..]);
    solo.wait_for_timer();
    let again = unasked(&mut solo);
    assert!(!again.is_empty() && sent[1..].ends_with(&again), "the probe");
    while solo.wait_for_timer().is_some() {
        let again = unasked(&mut solo);
        if again.len() == 4 {
            assert_eq!(again, sent[1..], "the timeout");
            assert_eq!(solo.receive_ack(7).completed().len(), 3);
            return;
        }
    }
    panic!("it was not sent again");
}

#[test]
fn what_is_missing_goes_again_alone_and_is_the_same() {
    let mut solo = Solo::new(&Setup { held: 64, ..setup() });
    (1..=3).for_each(|wr_id| post(&mut solo, wr_id, WRITE, 1024));
    assert_eq!(solo.packets().len(), 12);
    solo.receive_gap(2, &[3, 4, 6, 7, 8, 10, 11]);
    let again: Vec<_> = solo.sent();
    assert_eq!(again, ["WRITE_MIDDLE #2 256B", "WRITE_ONLY #5 256B", "WRITE_ONLY #9 256B"]);
    assert_eq!(solo.receive_ack(11).completed().len(), 3);
}

/// The peer counts each packet as a message, so its limit is reached as if each packet had been
/// posted alone.
#[test]
fn they_count_as_many_messages() {
    let mut solo = Solo::sending(&setup(), 1, 8);
    let grant = |solo: &mut Solo, psn, msn, receives| {
        let mut aeth = [0; Aeth::LEN];
        Aeth { syndrome: Syndrome::credits(receives), msn }.write(&mut aeth);
        solo.receive(&solo.response(Op::RC_ACKNOWLEDGE, psn, &[&aeth]));
    };
    post(&mut solo, 2, WRITE, 1024);
    solo.send(3, 8);
    assert_eq!(solo.send(4, 8).sent().len(), 6, "no limit is known");
    // Five messages are done, and no receives are there: neither of the two SENDs finds one, and
    // one may be tried.
    grant(&mut solo, 4, 5, 0);
    solo.receive_rnr(5, 1);
    solo.wait_for_timer();
    assert_eq!(solo.sent(), ["SEND_ONLY #5 8B ack"]);
    // That SEND found a receive, and there is another.
    grant(&mut solo, 5, 6, 1);
    assert_eq!(solo.sent(), ["SEND_ONLY #6 8B ack"]);
    grant(&mut solo, 6, 7, 0);
    assert_eq!(solo.completed().len(), 4);
}

#[test]
fn a_part_that_is_refused_fails_the_request() {
    let mut solo = solo();
    post(&mut solo, 2, WRITE, 700);
    solo.send(3, 10);
    assert_eq!(solo.packets().len(), 4);
    solo.receive_nak(4, NakCode::RemoteAccessError);
    let expected = [(1, WcStatus::Success), (2, WcStatus::RemAccessErr), (3, WcStatus::WrFlushErr)];
    assert_eq!(solo.completed(), expected);
}

/// A WRITE that crosses the end of its region writes the bytes before the end and none behind it.
/// It fails with the NAK "access error".
#[test]
fn beyond_a_region_nothing_is_written() {
    let setup = setup();
    let mut pair = Pair::new(&setup);
    let [own, _] = pair.register();
    let half = pair.ends[1].host.register(0x4000, 600, Access::ALL);
    pair.ends[0].host.arena[..1024].copy_from_slice(&pattern(1024, 3));
    let list = [sge(0, 1024, own)];
    let write = SendOp::Write { remote: BASE + 0x4000, rkey: half, imm: None };
    pair.send(0, 1, write, &[sge(0, 1, own)]);
    pair.send(0, 2, write, &list);
    pair.run();
    assert_eq!(
        pair.ends[0].host.completed(),
        [(1, WcStatus::Success), (2, WcStatus::RemAccessErr)]
    );
    let arena = &pair.ends[1].host.arena;
    assert_eq!(arena[0x4000..0x4200], pattern(1024, 3)[..512]);
    assert!(arena[0x4200..0x5000].iter().all(|byte| *byte == 0));
}

/// The purpose of splitting: in a stream of WRITEs of two packets, all packets within a
/// super-packet's length have one size.
#[test]
fn a_stream_of_them_leaves_in_equal_packets() {
    let budget = Budget { bytes: 8 << 20, datagrams: 512 };
    let mut pair = Pair::new(&Setup { mtu: Mtu::Mtu4096, budget, ..setup() });
    let [own, remote] = pair.register();
    let op = SendOp::Write { remote: BASE, rkey: remote, imm: None };
    for wr_id in 0..60 {
        pair.send(0, wr_id, op, &[sge(0, 8192, own)]);
    }
    let end = &mut pair.ends[0];
    end.engine.poll_transmit(pair.now, 1 << 20, &mut end.host, &mut end.out);
    let sizes: Vec<usize> = end.out.packets.iter().map(Vec::len).collect();
    assert_eq!(sizes.len(), 2 + 7 * 15, "the rest is no run, and waits for company");
    let (first, others) = sizes.split_at(2);
    assert_eq!(first, [4096 + 32, 4096 + 16]);
    assert!(others.iter().all(|size| *size == 4096 + 32));
    pair.run();
    assert!(pair.completions(0).iter().all(|cqe| cqe.status == WcStatus::Success));
}

/// For all losses: every byte is written once and in order, and a packet in flight never has two
/// shapes.
#[test]
fn each_psn_keeps_its_shape_whatever_is_lost() {
    for (held, lose) in [(0, 10), (64, 10), (64, 4)] {
        let mut pair = Pair::new(&Setup { held, mtu: Mtu::Mtu256, ..setup() });
        let [own, remote] = pair.register();
        let data = pattern(40 * 1500, 9);
        pair.ends[0].host.arena[..data.len()].copy_from_slice(&data);
        let mut shapes = BTreeMap::<u32, (Op, usize, Option<u64>)>::new();
        let mut random = fastrand::Rng::with_seed(0x5eed);
        let (seen, told) = std::sync::mpsc::channel();
        pair.pass = Box::new(move |from, bytes| {
            let packet = Packet::parse(bytes).expect("a packet");
            if from == 0 {
                let reth = packet.reth().map(|reth| reth.va);
                let bth = packet.bth();
                let shape = (bth.opcode, bytes.len(), reth);
                assert_eq!(*shapes.entry(bth.psn.value()).or_insert(shape), shape, "{:?}", bth.psn);
                seen.send(bth.opcode).expect("the test listens");
            }
            random.u64(..lose) != 0
        });
        for wr_id in 0..40_u64 {
            let op = SendOp::Write { remote: BASE + 1500 * wr_id, rkey: remote, imm: None };
            pair.send(0, wr_id, op, &[sge(1500 * wr_id, 1500, own)]);
        }
        pair.run();
        let completed = pair.ends[0].host.completed();
        assert_eq!(completed, (0..40).map(|id| (id, WcStatus::Success)).collect::<Vec<_>>());
        assert_eq!(pair.ends[1].host.arena[..data.len()], data);
        let opcodes: Vec<_> = told.try_iter().collect();
        assert!(opcodes.iter().filter(|op| **op == Op::RC_RDMA_WRITE_ONLY).count() >= 39 * 6);
        assert!(opcodes.len() > 40 * 6, "some went again");
    }
}

#[test]
fn another_queue_pair_to_the_same_peer_is_company() {
    let mut pair = Pair::new(&Setup { split_writes: true, qps: 2, ..Setup::default() });
    let keys = pair.register();
    let mtu = Setup::default().mtu.bytes();
    let mut leave = |qp: usize| {
        let op = SendOp::Write { remote: BASE, rkey: keys[1], imm: None };
        pair.send_on(0, qp, 1, op, &[sge(0, 3 * mtu, keys[0])]);
        let (now, end) = (pair.now, &mut pair.ends[0]);
        end.engine.poll_transmit(now, 1024, &mut end.host, &mut end.out);
        let opcode = |packet: Vec<u8>| Packet::parse(&packet).expect("a packet").bth().opcode;
        end.out.packets.drain(..).map(opcode).collect::<Vec<_>>()
    };
    let whole = [Op::RC_RDMA_WRITE_FIRST, Op::RC_RDMA_WRITE_MIDDLE, Op::RC_RDMA_WRITE_LAST];
    assert_eq!(leave(0), whole, "nothing is under way");
    assert_eq!(leave(1), [Op::RC_RDMA_WRITE_ONLY; 3]);
}
