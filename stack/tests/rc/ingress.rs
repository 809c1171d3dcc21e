//! Packets that never reach a queue pair: spoofed, misaddressed, damaged ones. And the IP
//! identification that a UDP receiver cannot read.

use std::net::IpAddr;

use crate::common::{PEER, PORT, Setup, Solo, addr, reth};
use rocinante_stack::verbs::{QpState, WcStatus};
use rocinante_stack::wire::icrc::{DF, IpFields, Template};
use rocinante_stack::wire::{Opcode as Op, Packet};
use rocinante_stack::{Datagram, IpId};

const EXACT: IpId = IpId::Exact { id: 0, flags: DF };

/// A WRITE that would be executed.
fn good(solo: &Solo) -> Vec<u8> {
    let header = solo.reth(0, 8);
    solo.request(Op::RC_RDMA_WRITE_ONLY, 0, &[&header, &[0xff; 8]])
}

#[test]
fn every_damaged_bit_is_noticed() {
    let mut solo = Solo::script();
    let packet = good(&solo);
    for bit in 0..packet.len() * 8 {
        let mut damaged = packet.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        solo.receive(&damaged);
        if bit / 8 == 4 {
            // The ICRC does not cover byte 4 of the BTH: the packet is good all the same.
            let mut fresh = Solo::script();
            fresh.receive(&damaged);
            assert_eq!(fresh.sent(), ["ACK #0"]);
            solo = Solo::script();
            continue;
        }
        assert!(solo.sent().is_empty(), "bit {bit}");
    }
    assert!(solo.end.engine.drops().icrc > 100);
}

#[test]
fn truncated_packets_are_malformed_or_damaged() {
    let mut solo = Solo::script();
    let packet = good(&solo);
    for len in 0..packet.len() {
        let malformed = solo.end.engine.drops().malformed;
        solo.receive(&packet[..len]);
        // Header and ICRC alone are 32 bytes.
        assert_eq!(solo.end.engine.drops().malformed, malformed + u64::from(len < 32));
        assert!(solo.sent().is_empty());
    }
}

#[test]
fn congestion_is_told_of_and_ends_nothing() {
    let mut solo = Solo::script();
    let packet = solo.request(Op::CNP, 0, &[&[0; 16]]);
    solo.receive(&packet);
    assert_eq!(solo.end.engine.counters().rcvd_cnp, 1);
    let packet = good(&solo);
    let datagram = Datagram {
        bytes: &packet,
        src: addr(2),
        dst: addr(1),
        src_port: PORT,
        ip_id: EXACT,
        tos: 3,
        hop_limit: None,
    };
    solo.end.engine.handle_datagram(solo.now, &datagram, &mut solo.end.host);
    assert_eq!(solo.end.engine.counters().rcvd_ecn_ce, 1);
    let sent = solo.packets();
    assert_eq!(sent.len(), 2);
    let cnp = Packet::parse(&sent[0]).expect("a packet");
    assert_eq!((cnp.bth().opcode, cnp.bth().becn, cnp.bth().psn.value()), (Op::CNP, true, 0));
    assert_eq!((cnp.bth().dest_qpn, cnp.payload()), (PEER, &[0; 16][..]));
    assert_eq!(Packet::parse(&sent[1]).expect("a packet").bth().opcode, Op::RC_ACKNOWLEDGE);
    assert_eq!(solo.end.engine.counters().sent_cnp, 1);
}

#[test]
fn the_source_port_may_change_and_is_covered() {
    let mut solo = Solo::script();
    for (psn, port) in [PORT, 0xc222, 0x1234, PORT].into_iter().enumerate() {
        let header = solo.reth(0, 0);
        let mut packet = solo.request(Op::RC_RDMA_WRITE_ONLY, psn as i64, &[&header]);
        let (IpAddr::V4(src), IpAddr::V4(dst)) = (addr(2), addr(1)) else { unreachable!() };
        Template::new(&IpFields::V4 { src, dst, id: 0, flags: DF }, port).seal(&mut packet);
        let mut datagram = Datagram {
            bytes: &packet,
            src: addr(2),
            dst: addr(1),
            src_port: port ^ 1,
            ip_id: EXACT,
            tos: 0,
            hop_limit: None,
        };
        let (engine, host) = (&mut solo.end.engine, &mut solo.end.host);
        engine.handle_datagram(solo.now, &datagram, host);
        assert_eq!(engine.drops().icrc, psn as u64 + 1);
        datagram.src_port = port;
        engine.handle_datagram(solo.now, &datagram, host);
        assert_eq!(solo.sent(), [format!("ACK #{psn}")]);
    }
}

/// A WRITE with this IPv4 identification and these flags.
fn numbered(solo: &Solo, psn: i64, id: u16, flags: u16) -> Vec<u8> {
    let header = reth(0, Default::default(), 0);
    let mut packet = solo.request(Op::RC_RDMA_WRITE_ONLY, psn, &[&header]);
    let (IpAddr::V4(src), IpAddr::V4(dst)) = (addr(2), addr(1)) else { unreachable!() };
    Template::new(&IpFields::V4 { src, dst, id, flags }, PORT).seal(&mut packet);
    packet
}

#[test]
fn an_identification_that_is_read_must_be_right() {
    let mut solo = Solo::script();
    let packet = numbered(&solo, 0, 0x4321, 0);
    for ip_id in [EXACT, IpId::Exact { id: 0x4321, flags: DF }, IpId::None] {
        solo.receive_from(addr(2), addr(1), ip_id, &packet);
    }
    assert_eq!(solo.end.engine.drops().icrc, 3);
    solo.receive_from(addr(2), addr(1), IpId::Exact { id: 0x4321, flags: 0 }, &packet);
    assert_eq!(solo.sent(), ["ACK #0"]);
}

#[test]
fn a_wrong_hint_is_solved_below_the_segment_limit() {
    let mut solo = Solo::script();
    for (psn, (hint, id)) in [(0, 0), (0, 1), (0, 127), (5, 2), (3, 14)].into_iter().enumerate() {
        solo.receive_from(addr(2), addr(1), IpId::Hint(hint), &numbered(&solo, psn as i64, id, DF));
        assert_eq!(solo.sent(), [format!("ACK #{psn}")]);
    }
    assert_eq!(solo.end.engine.counters().icrc_id_solved, 4);
}

/// Whether a packet with this identification and these flags is accepted by a receiver that cannot
/// read them.
fn is_accepted(solo: &mut Solo, id: u16, flags: u16) -> bool {
    let packet = numbered(solo, 0, id, flags);
    let before = solo.end.engine.drops().icrc;
    solo.receive_from(addr(2), addr(1), IpId::Hint(0), &packet).sent();
    solo.end.engine.drops().icrc == before
}

#[test]
fn a_far_identification_is_refused_once_and_its_neighbours_are_accepted() {
    // rxe's come from the kernel's generator. The first packet may be the only one: a NAK is not
    // repeated.
    let mut solo = Solo::script();
    for id in [40_000, 40_001, 40_900, 41_924, 41_000] {
        assert!(is_accepted(&mut solo, id, DF), "{id}");
    }
    // Around the end of the range, and without DF, as some peers send it.
    assert!(!is_accepted(&mut solo, 65_530, 0));
    assert!(is_accepted(&mut solo, 200, 0));
    assert!(!is_accepted(&mut solo, 30_000, DF));
    // Other flags, or a fragment offset, are never accepted.
    for flags in [0x2000, 0x8000, DF | 1, 1] {
        assert!(!is_accepted(&mut solo, 0, flags));
    }
}

#[test]
fn after_a_right_identification_none_far_from_it_is_accepted() {
    let mut solo = Solo::script();
    assert!(is_accepted(&mut solo, 0, DF));
    assert!(!is_accepted(&mut solo, 40_000, DF));
    assert!(is_accepted(&mut solo, 127, DF));
}

#[test]
fn what_was_refused_is_refused_again_unless_the_counter_moved() {
    let mut solo = Solo::script();
    assert!(is_accepted(&mut solo, 5, DF));
    for _ in 0..3 {
        assert!(!is_accepted(&mut solo, 40_000, DF), "the same damage again");
    }
    assert!(is_accepted(&mut solo, 40_001, DF));
}

#[test]
fn an_identification_moves_on_with_time() {
    let mut solo = Solo::script();
    assert!(is_accepted(&mut solo, 60_000, DF));
    // Linux adds up to the number of ticks while nothing is sent.
    solo.wait(10_000_000_000);
    assert!(is_accepted(&mut solo, 5_000, DF));
    assert!(!is_accepted(&mut solo, 20_000, DF));
}

#[test]
fn damage_is_hardly_ever_taken_for_an_identification() {
    let mut solo = Solo::script();
    let packet = good(&solo);
    for bit in 0..packet.len() * 8 {
        if bit / 8 == 4 {
            continue;
        }
        let mut damaged = packet.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        solo.receive_from(addr(2), addr(1), IpId::Hint(0), &damaged);
    }
    assert_eq!(solo.end.engine.counters().icrc_id_solved, 0);
    assert!(solo.sent().is_empty());
}

#[test]
fn ipv6_has_no_identification() {
    let setup = Setup::script();
    let mut solo = Solo::new(&setup);
    let qpn = solo.end.qpn;
    let v6 = |n| IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, n]);
    let reset = rocinante_stack::QpAttr { state: Some(QpState::Reset), ..Default::default() };
    solo.end.modify(qpn, &reset).unwrap();
    for mut attr in crate::common::steps(0, addr(1), crate::common::PEER, &setup) {
        if let Some(peer) = &mut attr.peer {
            (peer.local, peer.remote) = (v6(1), v6(2));
        }
        solo.end.modify(qpn, &attr).unwrap();
    }
    let header = reth(0, Default::default(), 0);
    let mut packet = solo.request(Op::RC_RDMA_WRITE_ONLY, 0, &[&header]);
    let (IpAddr::V6(src), IpAddr::V6(dst)) = (v6(2), v6(1)) else { unreachable!() };
    Template::new(&IpFields::V6 { src, dst }, PORT).seal(&mut packet);
    for ip_id in [IpId::None, IpId::Hint(7)] {
        solo.receive_from(v6(2), v6(1), ip_id, &packet);
        assert_eq!(solo.packets().len(), 1);
    }
    packet[20] ^= 1;
    solo.receive_from(v6(2), v6(1), IpId::Hint(7), &packet);
    assert_eq!(solo.end.engine.drops().icrc, 1);
    solo.send(1, 4);
    assert_eq!(solo.packets().len(), 1);
    assert_eq!(solo.completed(), [(0, WcStatus::Success); 0]);
}
