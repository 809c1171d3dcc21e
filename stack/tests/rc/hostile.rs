//! A peer that may send anything, with right ICRCs: nothing panics, nothing is written outside the
//! permitted ranges, and every queue pair stays in a valid state.

use crate::common::{Setup, Solo, pattern};
use rocinante_stack::mem::{Access, Accessor, Bind, MwType};
use rocinante_stack::types::Key;
use rocinante_stack::verbs::{QpState, SendOp};
use rocinante_stack::wire::Opcode as Op;

/// The part of the arena that the peer may write and read.
const OPEN: std::ops::Range<usize> = 4096..8192;

/// A window that the peer may invalidate, because it is bound for it, and one that it may not, of
/// type 1.
const WINDOWS: std::ops::Range<usize> = 4096..4352;

fn windows(solo: &mut Solo) -> [Key; 2] {
    let (regions, region) = (&mut solo.end.host.regions, solo.key);
    let by = Accessor { pd: crate::common::PD, qpn: solo.end.qpn };
    [MwType::Type2, MwType::Type1].map(|mw_type| {
        let random = 0x1000_0000 << mw_type as u32;
        let mw = regions.insert_window(crate::common::PD, mw_type, random).unwrap();
        let (addr, len) = (crate::common::BASE + WINDOWS.start as u64, WINDOWS.len() as u64);
        let access = Access::REMOTE_WRITE | Access::REMOTE_READ;
        regions.bind(by, &Bind { mw, rkey: mw, region, addr, len, access }).unwrap();
        mw
    })
}

/// A QP that has received packets and has requests of every kind in flight, some of them half done.
fn live() -> (Solo, Key) {
    let mut solo = Solo::new(&Setup { held: 8, ..Setup::script() });
    // The arena's key is for local use; the peer gets a window of it.
    let key = solo.key;
    solo.end.host.regions.remove(key);
    let len = solo.setup.arena as u64;
    solo.key = solo.end.host.register(0, len, Access::LOCAL_WRITE | Access::MW_BIND);
    windows(&mut solo);
    let (start, span) = (OPEN.start as u64, OPEN.len() as u64);
    let open = solo.end.host.register(start, span, Access::ALL);
    solo.end.host.arena.copy_from_slice(&pattern(solo.setup.arena, 1));
    // Received: half of a SEND, with more to come. Answered: a READ and an atomic.
    for wr_id in 0..4 {
        solo.post_recv(wr_id, &[solo.sge(16_384 + 1024 * wr_id, 700)]);
    }
    solo.receive_request(Op::RC_RDMA_READ_REQUEST, 0, &[&at(open, 0, 600)]);
    let mut atomic = at(open, 1024, 0)[..12].to_vec();
    atomic.extend_from_slice(&[0; 16]);
    solo.receive_request(Op::RC_FETCH_ADD, 3, &[&atomic]).sent();
    // In flight: a SEND, a READ that is half answered, an atomic, a WRITE.
    solo.send(10, 600);
    solo.post(11, SendOp::Read { remote: 0x9000, rkey: Key(0x99) }, &[solo.sge(32_768, 1000)]);
    solo.add(12, 40_960);
    solo.post(13, SendOp::Write { remote: 0x9000, rkey: Key(9), imm: None }, &[solo.sge(0, 300)])
        .sent();
    solo.receive_data(Op::RC_RDMA_READ_RESPONSE_FIRST, 3, &[3; 256]);
    (solo, open)
}

/// A RETH for the window.
fn at(key: Key, offset: u64, len: u32) -> Vec<u8> {
    crate::common::reth(crate::common::BASE + OPEN.start as u64 + offset, key, len)
}

/// The starting packets of an attacker: every packet that the live queue pair would accept now.
fn seeds(solo: &Solo, open: Key) -> Vec<Vec<u8>> {
    let mut atomic = at(open, 64, 0)[..12].to_vec();
    atomic.extend_from_slice(&[1; 16]);
    let (imm, ack) = ([1, 2, 3, 4], [0x1f, 0, 0, 1]);
    let window = 0x1000_0000u32 << MwType::Type2 as u32;
    let inv = window.to_be_bytes();
    let full = [9; 256];
    let request = |opcode, psn, rest: &[&[u8]]| solo.request(opcode, psn, rest);
    let response = |opcode, psn, rest: &[&[u8]]| solo.response(opcode, psn, rest);
    vec![
        request(Op::RC_SEND_FIRST, 4, &[&full]),
        request(Op::RC_SEND_ONLY, 4, &[&[9; 5]]),
        request(Op::RC_SEND_ONLY_WITH_IMMEDIATE, 4, &[&imm, &[9; 8]]),
        request(Op::RC_SEND_ONLY_WITH_INVALIDATE, 4, &[&imm, &[9; 8]]),
        request(Op::RC_SEND_ONLY_WITH_INVALIDATE, 4, &[&inv, &[9; 8]]),
        request(Op::RC_RDMA_WRITE_ONLY, 4, &[&at(Key(window), 16, 8), &[9; 8]]),
        request(Op::RC_RDMA_WRITE_FIRST, 4, &[&at(open, 0, 600), &full]),
        request(Op::RC_RDMA_WRITE_ONLY, 4, &[&at(open, 16, 8), &[9; 8]]),
        request(Op::RC_RDMA_WRITE_ONLY_WITH_IMMEDIATE, 4, &[&at(open, 16, 8), &imm, &[9; 8]]),
        request(Op::RC_RDMA_READ_REQUEST, 4, &[&at(open, 0, 600)]),
        request(Op::RC_COMPARE_SWAP, 4, &[&atomic]),
        request(Op::RC_FETCH_ADD, 4, &[&atomic]),
        // Repetitions of requests that were answered before.
        request(Op::RC_RDMA_READ_REQUEST, 0, &[&at(open, 0, 600)]),
        request(Op::RC_FETCH_ADD, 3, &[&atomic]),
        response(Op::RC_ACKNOWLEDGE, 2, &[&ack]),
        response(Op::RC_ACKNOWLEDGE, 9, &[&ack]),
        response(Op::RC_RDMA_READ_RESPONSE_MIDDLE, 4, &[&full]),
        response(Op::RC_RDMA_READ_RESPONSE_FIRST, 4, &[&ack, &full]),
        response(Op::RC_RDMA_READ_RESPONSE_LAST, 6, &[&ack, &[9; 232]]),
        response(Op::RC_ATOMIC_ACKNOWLEDGE, 7, &[&ack, &[9; 8]]),
    ]
}

/// Delivers packets and checks their effects.
fn attack(solo: &mut Solo, packets: &[&[u8]]) {
    let before = solo.end.host.arena.clone();
    for packet in packets {
        solo.receive(packet);
        solo.packets();
    }
    let after = &solo.end.host.arena;
    // The peer may write the window, and the ranges of the receives, the READ and the atomic.
    let mut allowed = vec![OPEN, 32_768 + 256..32_768 + 1000, 40_960..40_968];
    allowed.extend((0..4).map(|n| 16_384 + 1024 * n..16_384 + 1024 * n + 700));
    for (i, (old, new)) in before.iter().zip(after).enumerate() {
        assert!(old == new || allowed.iter().any(|range| range.contains(&i)), "byte {i}");
    }
    let state = solo.state();
    assert!(matches!(state, QpState::Rts | QpState::Err));
    // Only a window that is bound for the queue pair can be invalidated; a region or a window of
    // type 1 never can.
    let type_1 = Key(0x1000_0000 << MwType::Type1 as u32);
    let regions = &solo.end.host.regions;
    assert_eq!(regions.len(), 4);
    assert!(regions.get(type_1).is_some_and(|shown| shown.len == WINDOWS.len() as u64));
    // No request is lost or completed twice.
    let mut ids: Vec<_> = solo.completed().iter().map(|(id, _)| *id).collect();
    if state == QpState::Err {
        ids.sort_unstable();
        assert_eq!(ids, [0, 1, 2, 3, 10, 11, 12, 13]);
    } else {
        let all = ids.len();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), all);
        // The queue pair still works: after a timeout, or the longest delay that the peer can ask
        // for, the rest is sent again.
        solo.wait(1_000_000_000);
        let again = solo.packets().len();
        assert!(again > 0 || solo.end.host.sends_retired == 4);
    }
}

/// As `attack`, with a sealed copy of `packet` that `change` has changed.
fn attack_with(packet: &[u8], change: impl FnOnce(&mut Vec<u8>)) {
    let (mut solo, _) = live();
    let mut changed = packet.to_vec();
    change(&mut changed);
    if changed.len() >= 16 {
        crate::common::seal(&mut changed);
    }
    attack(&mut solo, &[&changed]);
}

#[test]
fn the_packets_to_start_from_are_good() {
    let (solo, open) = live();
    for (i, packet) in seeds(&solo, open).iter().enumerate() {
        let (mut solo, _) = live();
        let drops = *solo.end.engine.drops();
        attack(&mut solo, &[packet]);
        assert_eq!(*solo.end.engine.drops(), drops, "packet {i}");
        let refused = i == 3; // SEND with invalidate
        assert_eq!(solo.state() == QpState::Err, refused, "packet {i}");
    }
}

#[test]
fn every_single_bit_flip() {
    let (solo, open) = live();
    for packet in seeds(&solo, open) {
        // All bits of the headers, and some of a long payload.
        for bit in (0..packet.len() * 8).filter(|bit| *bit < 60 * 8 || bit % 97 == 0) {
            attack_with(&packet, |packet| packet[bit / 8] ^= 1 << (bit % 8));
        }
    }
}

#[test]
fn every_truncation_and_some_growth() {
    let (solo, open) = live();
    for packet in seeds(&solo, open) {
        for len in 0..packet.len() {
            attack_with(&packet, |packet| packet.truncate(len));
        }
        for more in [1, 2, 3, 4, 8, 256, 4096, 60_000] {
            attack_with(&packet, |packet| packet.resize(packet.len() + more, 0xaa));
        }
    }
}

#[test]
fn every_opcode_over_every_body_at_every_psn_near() {
    let (solo, open) = live();
    for packet in seeds(&solo, open) {
        for opcode in 0..=255 {
            attack_with(&packet, |packet| packet[0] = opcode);
        }
        for byte in 0..=255 {
            attack_with(&packet, |packet| packet[11] = byte);
        }
    }
}

#[test]
fn a_broken_queue_pair_breaks_no_other() {
    let setup = Setup { qps: 2, ..Setup::script() };
    let mut solo = Solo::new(&setup);
    let other = solo.end.qpns[1];
    solo.end.connect(other, 0, crate::common::PEER, &setup);
    solo.receive_request(Op::RC_SEND_LAST, 0, &[&[1; 4]]);
    assert_eq!(solo.sent(), ["NAK #0 invalid"]);
    assert_eq!(solo.state(), QpState::Err);
    solo.end.qpn = other;
    solo.send(1, 4);
    solo.receive_request(Op::RC_RDMA_WRITE_ONLY, 0, &[&solo.reth(0, 4), &[7; 4]]);
    assert_eq!(solo.sent(), ["SEND_ONLY #0 4B ack", "ACK #0"]);
}

#[test]
fn a_read_of_everything_at_the_smallest_mtu_is_answered_in_turns() {
    let mut solo = Solo::script();
    let header = solo.reth(0, 1 << 31);
    // Not all of it is registered.
    solo.receive_request(Op::RC_RDMA_READ_REQUEST, 0, &[&header]);
    assert_eq!(solo.sent(), ["NAK #0 access"]);
    let mut solo = Solo::script();
    let len = solo.setup.arena as u32;
    solo.receive_request(Op::RC_RDMA_READ_REQUEST, 0, &[&solo.reth(0, len)]);
    let end = &mut solo.end;
    for _ in 0..4 {
        end.engine.poll_transmit(solo.now, 10, &mut end.host, &mut end.out);
    }
    assert_eq!(end.out.packets.len(), 40);
}
