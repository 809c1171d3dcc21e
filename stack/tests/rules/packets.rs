//! The rules about a packet, for every kind of packet: faults for which it is dropped, and
//! differences that have no effect.

use std::net::IpAddr;

use rocinante_stack::stats::Drops;
use rocinante_stack::types::{Pkey, Qpn};
use rocinante_stack::verbs::{QpState, QpType};
use rocinante_stack::wire::icrc::DF;
use rocinante_stack::wire::{Bth, ICRC_LEN, Opcode as Op, bth};
use rocinante_stack::{IpId, QpAttr, Urgency};

use crate::common::{PEER, Solo, addr, assert_same, seal, steps, tables};
use crate::kinds::{KINDS, Kind};

const EXACT: IpId = IpId::Exact { id: 0, flags: DF };

/// The packet with a changed header.
fn with(packet: &[u8], change: impl FnOnce(&mut Bth)) -> Vec<u8> {
    let mut packet = packet.to_vec();
    let mut header = Bth::read(packet.first_chunk().expect("a header"));
    change(&mut header);
    packet[..bth::LEN].copy_from_slice(&header.bytes());
    seal(&mut packet);
    packet
}

/// A packet that must be dropped, with source and destination, and the counter that counts it.
struct Bad {
    why: &'static str,
    way: (IpAddr, IpAddr),
    packet: Vec<u8>,
    count: fn(&Drops) -> u64,
}

/// All faults that any packet may have.
fn bad(kind: &Kind, solo: &Solo, good: &[u8]) -> Vec<Bad> {
    let way = (addr(2), addr(1));
    let mut all = Vec::new();
    let mut add = |why, way, packet, count| all.push(Bad { why, way, packet, count });
    // PSN, AckReq, the first byte behind the BTH, the last before the ICRC, the ICRC.
    let last = good.len() - ICRC_LEN;
    for at in [11, 9, 8, 12, last - 1, last, good.len() - 1] {
        let mut damaged = good.to_vec();
        damaged[at] ^= 0x10;
        add("damaged", way, damaged, |drops| drops.icrc);
    }
    for pkey in [0, 0x7ffe, 0xfffe, 0x1234, 1] {
        add("P_Key", way, with(good, |bth| bth.pkey = Pkey(pkey)), |drops| drops.pkey);
    }
    for version in 1..16 {
        add("version", way, with(good, |bth| bth.version = version), |drops| drops.version);
    }
    let qpn = solo.end.qpn.value();
    for other in [0, 1, qpn + 1, qpn ^ 0x1_0000, qpn | 0xff_0000] {
        let packet = with(good, |bth| bth.dest_qpn = Qpn::new(other));
        add("queue pair", way, packet, |drops| drops.unknown_qpn);
    }
    let to_all = with(good, |bth| bth.dest_qpn = Qpn::MULTICAST);
    add("queue pair of groups", way, to_all, |drops| drops.unknown_qpn);
    for opcode in (0..=u8::MAX).map(Op).filter(|opcode| opcode.info().is_none()) {
        let packet = with(good, |bth| bth.opcode = opcode);
        add("opcode", way, packet, |drops| drops.unknown_opcode);
    }
    let services = [
        (QpType::Rc, Op::RC_SEND_MIDDLE),
        (QpType::Uc, Op::UC_SEND_MIDDLE),
        (QpType::Ud, Op::UD_SEND_ONLY),
    ];
    // Room for the header of a datagram.
    let eight = [&good[..bth::LEN], &[0; 8 + ICRC_LEN]].concat();
    for (_, opcode) in services.into_iter().filter(|(of, _)| *of != kind.qp_type) {
        let packet = with(&eight, |bth| (bth.pad, bth.opcode) = (0, opcode));
        add("service", way, packet, |drops| drops.wrong_service);
    }
    for len in [0, 1, 11, 15] {
        add("cut short", way, good[..len].to_vec(), |drops| drops.malformed);
    }
    let padded = with(&good[..bth::LEN + ICRC_LEN], |bth| {
        (bth.pad, bth.opcode) = (3, Op::RC_SEND_MIDDLE);
    });
    add("padding", way, padded, |drops| drops.malformed);
    add("to a group", (addr(2), [239, 0, 0, 1].into()), good.to_vec(), |drops| drops.wrong_source);
    if kind.qp_type != QpType::Ud {
        let v6 = IpAddr::from([0u16, 0, 0, 0, 0, 0xffff, 0x0a00, 2]);
        for way in [(addr(3), addr(1)), (addr(2), addr(3)), (addr(1), addr(2)), (v6, v6)] {
            add("address", way, good.to_vec(), |drops| drops.wrong_source);
        }
    }
    all
}

#[test]
fn what_is_wrong_with_a_packet_of_any_kind_is_counted_and_changes_nothing() {
    for kind in &KINDS {
        let (mut solo, good) = kind.ready();
        // The first packet of a peer makes the entry of its source; this is not part of the
        // comparison.
        let damaged = [&good[..good.len() - 1], &[!good[good.len() - 1]]].concat();
        solo.receive(&damaged);
        let before = (tables(&solo.end.engine), solo.end.host.arena.clone());
        let sum = |drops: &Drops| drops.iter().map(|(_, n)| n).sum::<u64>();
        for Bad { why, way: (src, dst), packet, count } in bad(kind, &solo, &good) {
            let drops = *solo.end.engine.drops();
            let counters = *solo.end.engine.counters();
            solo.receive_from(src, dst, EXACT, &packet);
            let after = *solo.end.engine.drops();
            let counted = (count(&after) - count(&drops), sum(&after) - sum(&drops));
            assert_eq!(counted, (1, 1), "{}: {why}", kind.name);
            assert_eq!(*solo.end.engine.counters(), counters, "{}: {why}", kind.name);
        }
        assert_same(&before.0, &tables(&solo.end.engine), &kind.name);
        assert!(solo.end.host.arena == before.1 && solo.completed().is_empty(), "{}", kind.name);
        assert!(
            solo.end.engine.urgency() == Urgency::Idle && solo.event().is_none(),
            "{}",
            kind.name
        );
        // The good packet is accepted: it does change the tables.
        solo.receive(&good);
        assert_ne!(before.0, tables(&solo.end.engine), "{}", kind.name);
    }
}

#[test]
fn no_packet_of_any_kind_is_heard_by_who_is_not_ready_or_broken() {
    for kind in &KINDS {
        for state in [QpState::Reset, QpState::Init, QpState::Err] {
            let (mut solo, good) = kind.ready();
            let qpn = solo.end.qpn;
            let to = if state == QpState::Err { QpState::Err } else { QpState::Reset };
            solo.end.modify(qpn, &QpAttr { state: Some(to), ..QpAttr::default() }).unwrap();
            if state == QpState::Init {
                let setup = solo.setup.clone();
                solo.end.modify(qpn, &steps(0, addr(1), PEER, &setup)[0]).unwrap();
            }
            while solo.event().is_some() {}
            solo.sent();
            solo.completed();
            let before = tables(&solo.end.engine);
            solo.receive(&good);
            assert_eq!(solo.end.engine.drops().unknown_qpn, 1, "{} in {state}", kind.name);
            assert_same(&before, &tables(&solo.end.engine), &(kind.name, state));
            assert_eq!((solo.sent(), solo.completed()), (vec![], vec![]));
        }
    }
}

#[test]
fn no_packet_of_any_kind_is_heard_by_who_is_gone() {
    for kind in &KINDS {
        let (mut solo, good) = kind.ready();
        solo.end.engine.destroy_qp(solo.end.qpn).unwrap();
        let before = tables(&solo.end.engine);
        solo.receive(&good);
        assert_eq!(solo.end.engine.drops().unknown_qpn, 1, "{}", kind.name);
        assert_same(&before, &tables(&solo.end.engine), &kind.name);
    }
}

/// The effect of a packet on a queue pair: tables, memory, completions and packets sent.
fn effect(kind: &Kind, change: impl FnOnce(&mut Bth)) -> (String, Vec<u8>, String, Vec<String>) {
    let (mut solo, good) = kind.ready();
    solo.receive(&with(&good, change));
    let state = tables(&solo.end.engine);
    let done = format!("{:?}", solo.end.host.completions);
    (state, solo.end.host.arena.clone(), done, solo.sent())
}

/// A change of a header, by name.
type Change = (&'static str, fn(&mut Bth));

/// MigReq, FECN, BECN, the reserved bits, and the P_Key of a limited member.
#[test]
fn bits_that_mean_nothing_here_make_no_difference_to_any_kind() {
    for kind in &KINDS {
        let expected = effect(kind, |_| {});
        let changes: [Change; 6] = [
            ("MigReq", |bth| bth.mig_req = !bth.mig_req),
            ("FECN", |bth| bth.fecn = true),
            ("BECN", |bth| bth.becn = true),
            ("reserved a", |bth| bth.reserved_a = 0x3f),
            ("reserved b", |bth| bth.reserved_b = 0x7f),
            ("limited member", |bth| bth.pkey = Pkey(0x7fff)),
        ];
        for (what, change) in changes {
            let found = effect(kind, change);
            assert_same(&expected.0, &found.0, &(kind.name, what));
            assert_eq!((&expected.2, &expected.3), (&found.2, &found.3), "{} {what}", kind.name);
            assert!(expected.1 == found.1, "{} {what}", kind.name);
        }
        if kind.is_response {
            for change in [|bth: &mut Bth| bth.ack_req = true, |bth: &mut Bth| bth.solicited = true]
            {
                let found = effect(kind, change);
                assert_same(&expected.0, &found.0, &kind.name);
                assert_eq!((&expected.2, &expected.3), (&found.2, &found.3), "{}", kind.name);
            }
        }
    }
}

/// A NAK of a gap may cause two retransmissions. Any other response has an effect only once.
#[test]
fn a_response_of_any_kind_that_comes_twice_does_nothing_the_second_time() {
    for kind in KINDS.iter().filter(|kind| kind.is_response) {
        let (mut solo, good) = kind.ready();
        solo.receive(&good).sent();
        solo.completed();
        let state = solo.state();
        let (before, drops) = (tables(&solo.end.engine), *solo.end.engine.drops());
        solo.receive(&good);
        if kind.name != "NAK of a gap" {
            assert_same(&before, &tables(&solo.end.engine), &kind.name);
        }
        assert_eq!((solo.completed(), solo.state()), (vec![], state), "{}", kind.name);
        let broken = u64::from(state == QpState::Err);
        let unheard = solo.end.engine.drops().unknown_qpn - drops.unknown_qpn;
        assert_eq!(unheard, broken, "{}", kind.name);
    }
}
