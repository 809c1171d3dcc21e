//! QP1: what comes to it reaches the connection manager if it is whole and has the key, and nothing else does.

mod common;

use common::{PORT, Solo, addr, template};
use rocinante_stack::cm::{CmConfig, CmEvent};
use rocinante_stack::types::{Pkey, Psn, Qpn};
use rocinante_stack::wire::cm::{CommId, Dreq, Message, PortSpace, ServiceId};
use rocinante_stack::wire::mad::{GSI_PACKET_LEN, write_gsi};
use rocinante_stack::wire::{Bth, Opcode};
use rocinante_stack::{Datagram, IpId};

/// A message for a connection that is not known: it is answered.
fn packet() -> [u8; GSI_PACKET_LEN] {
    let (local, remote, remote_qpn) = (CommId(7), CommId(8), Qpn::new(9));
    let mad = Message::Dreq(Dreq { local, remote, remote_qpn, private: b"" }).emit(3);
    let mut packet = [0; GSI_PACKET_LEN];
    write_gsi(&mut packet, Psn::new(1), &mad);
    packet
}

fn hear(solo: &mut Solo, bytes: &[u8], ip_id: IpId) {
    let (src, dst) = (addr(2), addr(1));
    let datagram = Datagram { bytes, src, dst, src_port: PORT, ip_id, tos: 0, hop_limit: None };
    solo.end.engine.handle_datagram(solo.now, &datagram, &mut solo.end.host);
}

const WHOLE: IpId = IpId::Exact { id: 0, flags: 0x4000 };

fn sealed(mut packet: [u8; GSI_PACKET_LEN]) -> [u8; GSI_PACKET_LEN] {
    let mut template = template(addr(2), addr(1));
    template.set_id(0, 0x4000);
    template.seal(&mut packet);
    packet
}

#[test]
fn without_a_connection_manager_there_is_no_qp1() {
    let mut solo = Solo::script();
    hear(&mut solo, &sealed(packet()), WHOLE);
    assert_eq!(solo.end.engine.drops().unknown_qpn, 1);
    assert!(solo.end.engine.cm().is_none());
}

#[test]
fn only_whole_datagrams_with_the_key_reach_it() {
    let mut solo = Solo::script();
    solo.end.engine.start_cm(CmConfig::default());
    hear(&mut solo, &sealed(packet()), WHOLE);
    let cm = solo.end.engine.cm().unwrap();
    let answer = cm.poll_transmit().unwrap();
    assert_eq!((answer.local, answer.remote), (addr(1), addr(2)));
    assert!(matches!(Message::parse(&answer.mad), Ok((_, Message::Drep(_)))));

    let mut damaged = sealed(packet());
    damaged[100] ^= 1;
    hear(&mut solo, &damaged, WHOLE);
    let mut key = packet();
    key[12..16].copy_from_slice(&[0, 0, 0, 1]);
    hear(&mut solo, &sealed(key), WHOLE);
    let bth = |opcode, pkey, qpn| {
        let mut other = packet();
        other[..12].copy_from_slice(&Bth::new(opcode, pkey, qpn, Psn::new(1)).bytes());
        sealed(other)
    };
    hear(&mut solo, &bth(Opcode::UD_SEND_ONLY, Pkey(0x8001), Qpn::GSI), WHOLE);
    hear(&mut solo, &bth(Opcode::RC_SEND_ONLY, Pkey::DEFAULT, Qpn::GSI), WHOLE);
    hear(&mut solo, &bth(Opcode::UD_SEND_ONLY, Pkey::DEFAULT, Qpn::new(0)), WHOLE);
    let drops = *solo.end.engine.drops();
    assert_eq!((drops.icrc, drops.qkey, drops.pkey), (1, 1, 1));
    assert_eq!((drops.wrong_service, drops.unknown_qpn), (1, 1));
    let cm = solo.end.engine.cm().unwrap();
    assert_eq!((cm.counters().received, cm.poll_transmit()), (1, None));
}

/// A peer that numbers its packets, heard through a socket that does not show the number.
#[test]
fn the_identification_of_a_stranger_is_solved() {
    let mut solo = Solo::script();
    solo.end.engine.start_cm(CmConfig::default());
    for id in [0xaa36, 0xaa39, 0] {
        hear(&mut solo, &numbered(id), IpId::Hint(0));
    }
    assert_eq!(solo.end.engine.cm().unwrap().counters().received, 3);
    assert_eq!(solo.end.engine.counters().icrc_id_solved, 2);
}

/// Of some damaged packets an identification would make the ICRC right: once the sender's is known, only one near it counts.
#[test]
fn damage_is_no_identification() {
    let mut solo = Solo::script();
    solo.end.engine.start_cm(CmConfig::default());
    hear(&mut solo, &numbered(0xaa36), IpId::Hint(0));
    let whole = numbered(0xaa37);
    let mut count = 0;
    for (at, bits) in (24..GSI_PACKET_LEN - 4).flat_map(|at| (1..=255).map(move |b| (at, b))) {
        let mut damaged = whole;
        damaged[at] ^= bits;
        hear(&mut solo, &damaged, IpId::Hint(0));
        count += 1;
    }
    let heard = solo.end.engine.cm().unwrap().counters().received;
    assert_eq!((heard, solo.end.engine.drops().icrc), (1, count));
    // What was not damaged still is heard, and so is who begins to count elsewhere: by his second.
    for (id, heard) in [(0xaa40, 2), (0x1074, 2), (0x1075, 3)] {
        hear(&mut solo, &numbered(id), IpId::Hint(0));
        assert_eq!(solo.end.engine.cm().unwrap().counters().received, heard, "{id:#x}");
    }
}

fn numbered(id: u16) -> [u8; GSI_PACKET_LEN] {
    let mut packet = packet();
    let mut template = template(addr(2), addr(1));
    template.set_id(id, 0x4000);
    template.seal(&mut packet);
    packet
}

#[test]
fn datagrams_of_any_length_do_no_harm() {
    let mut solo = Solo::script();
    solo.end.engine.start_cm(CmConfig::default());
    let whole = packet();
    for len in 16..GSI_PACKET_LEN {
        let mut cut = whole[..len].to_vec();
        let mut template = template(addr(2), addr(1));
        template.set_id(0, 0x4000);
        template.seal(&mut cut);
        hear(&mut solo, &cut, WHOLE);
    }
    let cm = solo.end.engine.cm().unwrap();
    assert_eq!(cm.counters().received, cm.counters().malformed);
    assert_eq!((cm.poll_transmit(), cm.poll_event()), (None::<_>, None::<CmEvent>));
}

/// Whatever the connection manager waits for is in the engine's deadline, and happens in its time.
#[test]
fn deadlines_of_the_connection_manager_are_the_engines() {
    let mut solo = Solo::script();
    solo.end.engine.start_cm(CmConfig { max_retries: 0, ..CmConfig::default() });
    assert_eq!(solo.end.engine.poll_timeout(), None);
    let (now, way) = (solo.now, (addr(1), addr(2)));
    let service = (ServiceId::of_port(PortSpace::Udp, 5), 6);
    let query = solo.end.engine.cm().unwrap().resolve(now, way, service, b"").unwrap();
    let due = solo.end.engine.poll_timeout().unwrap();
    solo.wait(due.since(now));
    let event = solo.end.engine.cm().unwrap().poll_event();
    assert_eq!(event, Some(CmEvent::Unresolved { query, status: None }));
    assert_eq!(solo.end.engine.poll_timeout(), None);
}

/// The number of a queue pair that is gone is not given to another while packets for it may be under way.
#[test]
fn a_number_that_is_kept_is_not_used_again() {
    let mut solo = Solo::script();
    let qpn = solo.end.qpn;
    let init = common::qp_init(&solo.setup);
    solo.end.engine.keep_qpn(qpn);
    solo.end.engine.destroy_qp(qpn).unwrap();
    let other = solo.end.engine.create_qp(&init, qpn.value()).unwrap();
    assert_ne!(other, qpn);
    solo.end.engine.destroy_qp(other).unwrap();
    solo.end.engine.release_qpn(qpn);
    assert_eq!(solo.end.engine.create_qp(&init, qpn.value()), Some(qpn));
}
