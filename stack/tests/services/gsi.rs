//! QP1: a packet reaches the connection manager if it is whole and has the right Q_Key, and only
//! then.

use std::net::IpAddr;

use crate::common::{PORT, Solo, addr, template, to};
use rocinante_stack::cm::{
    Accept, CmConfig, CmEvent, ConnId, Connect, ConnectionManager, Ended, QpSide, Requested,
};
use rocinante_stack::types::{Mtu, Pkey, Psn, Qpn, QueueKind, Time};
use rocinante_stack::verbs::QpState;
use rocinante_stack::wire::cm::{CmMessage, CommId, Dreq, PortSpace, ServiceId};
use rocinante_stack::wire::mad::{GSI_PACKET_LEN, write_gsi};
use rocinante_stack::wire::{
    AliveMad, Bth, MadBytes, Opcode, Packet, Pairs, PeerInfo, RecognitionMad,
};
use rocinante_stack::{Addressee, Datagram, IpId, addressee};

/// A message for an unknown connection: it gets an answer.
fn packet() -> [u8; GSI_PACKET_LEN] {
    let (local, remote, remote_qpn) = (CommId(7), CommId(8), Qpn::new(9));
    let mad = CmMessage::Dreq(Dreq { local, remote, remote_qpn, private: b"" }).emit(3);
    let mut packet = [0; GSI_PACKET_LEN];
    write_gsi(&mut packet, Psn::new(1), &mad);
    packet
}

fn receive(solo: &mut Solo, bytes: &[u8], ip_id: IpId) {
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
    receive(&mut solo, &sealed(packet()), WHOLE);
    assert_eq!(solo.end.engine.drops().unknown_qpn, 1);
    assert!(solo.end.engine.cm().is_none());
}

#[test]
fn only_whole_datagrams_with_the_key_reach_it() {
    let mut solo = Solo::script();
    solo.end.engine.start_cm(CmConfig::default());
    receive(&mut solo, &sealed(packet()), WHOLE);
    let cm = solo.end.engine.cm().unwrap();
    let answer = cm.poll_transmit().unwrap();
    assert_eq!((answer.local, answer.remote), (addr(1), addr(2)));
    assert!(matches!(CmMessage::parse(&answer.mad), Ok((_, CmMessage::Drep(_)))));

    let mut damaged = sealed(packet());
    damaged[100] ^= 1;
    receive(&mut solo, &damaged, WHOLE);
    let mut key = packet();
    key[12..16].copy_from_slice(&[0, 0, 0, 1]);
    receive(&mut solo, &sealed(key), WHOLE);
    let bth = |opcode, pkey, qpn| {
        let mut other = packet();
        other[..12].copy_from_slice(&Bth::new(opcode, pkey, qpn, Psn::new(1)).bytes());
        sealed(other)
    };
    receive(&mut solo, &bth(Opcode::UD_SEND_ONLY, Pkey(0x8001), Qpn::GSI), WHOLE);
    receive(&mut solo, &bth(Opcode::RC_SEND_ONLY, Pkey::DEFAULT, Qpn::GSI), WHOLE);
    receive(&mut solo, &bth(Opcode::UD_SEND_ONLY, Pkey::DEFAULT, Qpn::new(0)), WHOLE);
    let drops = *solo.end.engine.drops();
    assert_eq!((drops.icrc, drops.qkey, drops.pkey), (1, 1, 1));
    assert_eq!((drops.wrong_service, drops.unknown_qpn), (1, 1));
    let cm = solo.end.engine.cm().unwrap();
    assert_eq!((cm.counters().received, cm.poll_transmit()), (1, None));
}

/// A peer that numbers its packets, through a socket that does not show the number.
#[test]
fn the_identification_of_a_stranger_is_solved() {
    let mut solo = Solo::script();
    solo.end.engine.start_cm(CmConfig::default());
    for id in [0xaa36, 0xaa39, 0] {
        receive(&mut solo, &numbered(id), IpId::Hint(0));
    }
    assert_eq!(solo.end.engine.cm().unwrap().counters().received, 3);
    assert_eq!(solo.end.engine.counters().icrc_id_solved, 2);
}

/// For some damaged packets, an identification exists that makes the ICRC right. Once the sender's
/// is known, only one near it counts.
#[test]
fn damage_is_no_identification() {
    let mut solo = Solo::script();
    solo.end.engine.start_cm(CmConfig::default());
    receive(&mut solo, &numbered(0xaa36), IpId::Hint(0));
    let whole = numbered(0xaa37);
    let mut count = 0;
    for (at, bits) in (24..GSI_PACKET_LEN - 4).flat_map(|at| (1..=255).map(move |b| (at, b))) {
        let mut damaged = whole;
        damaged[at] ^= bits;
        receive(&mut solo, &damaged, IpId::Hint(0));
        count += 1;
    }
    let heard = solo.end.engine.cm().unwrap().counters().received;
    assert_eq!((heard, solo.end.engine.drops().icrc), (1, count));
    // Undamaged packets still arrive. A sender that starts at another number is accepted from its
    // second packet on.
    for (id, heard) in [(0xaa40, 2), (0x1074, 2), (0x1075, 3)] {
        receive(&mut solo, &numbered(id), IpId::Hint(0));
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
        receive(&mut solo, &cut, WHOLE);
    }
    let cm = solo.end.engine.cm().unwrap();
    assert_eq!(cm.counters().received, cm.counters().malformed);
    assert_eq!((cm.poll_transmit(), cm.poll_event()), (None::<_>, None::<CmEvent>));
}

/// The engine's deadline includes that of the connection manager, which acts in time.
#[test]
fn deadlines_of_the_connection_manager_are_the_engines() {
    let mut solo = Solo::script();
    solo.end.engine.start_cm(CmConfig { max_retries: 0, ..CmConfig::default() });
    assert_eq!(solo.end.engine.poll_timeout(), None);
    let (now, way) = (solo.now, (addr(1), addr(2)));
    let service = (ServiceId::of_port(PortSpace::Udp, 5), 6);
    let query = solo.end.engine.cm().unwrap().resolve(now, way, service, b"").unwrap();
    solo.wait(solo.end.engine.poll_timeout().unwrap().since(now));
    let event = solo.end.engine.cm().unwrap().poll_event();
    assert_eq!(event, Some(CmEvent::Unresolved { query, status: None, private: Vec::new() }));
    assert_eq!(solo.end.engine.poll_timeout(), None);
}

/// The number of a destroyed queue pair is not given to another while packets for it may be in
/// flight.
#[test]
fn a_number_that_is_kept_is_not_used_again() {
    let mut solo = Solo::script();
    let qpn = solo.end.qpn;
    let init = crate::common::qp_init(&solo.setup);
    solo.end.engine.reserve_qpn(qpn);
    solo.end.engine.destroy_qp(qpn).unwrap();
    let other = solo.end.engine.create_qp(&init, qpn.value()).unwrap();
    assert_ne!(other, qpn);
    solo.end.engine.destroy_qp(other).unwrap();
    solo.end.engine.release_qpn(qpn);
    assert_eq!(solo.end.engine.create_qp(&init, qpn.value()), Some(qpn));
}

/// Two connections of one queue pair keep its number. The release by one does not free it.
#[test]
fn a_number_that_was_kept_twice_is_free_when_it_was_released_twice() {
    let mut solo = Solo::script();
    let (qpn, init) = (solo.end.qpn, crate::common::qp_init(&solo.setup));
    solo.end.engine.reserve_qpn(qpn);
    solo.end.engine.reserve_qpn(qpn);
    solo.end.engine.destroy_qp(qpn).unwrap();
    for released in 0..2 {
        assert_eq!(solo.end.engine.reserved_qpns(), 1);
        let other = solo.end.engine.create_qp(&init, qpn.value()).unwrap();
        assert_ne!(other, qpn, "released {released} times");
        solo.end.engine.destroy_qp(other).unwrap();
        solo.end.engine.release_qpn(qpn);
    }
    assert_eq!(solo.end.engine.reserved_qpns(), 0);
    assert_eq!(solo.end.engine.create_qp(&init, qpn.value()), Some(qpn));
    // Releasing a number that is not kept, or not as often, changes nothing.
    solo.end.engine.release_qpn(qpn);
    solo.end.engine.reserve_qpn(qpn);
    assert_eq!(solo.end.engine.reserved_qpns(), 1);
}

#[test]
fn what_it_sends_is_numbered_and_counted() {
    let mut solo = Solo::script();
    let mad = CmMessage::parse(Packet::parse(&packet()).unwrap().payload()).unwrap().1.emit(3);
    for psn in 1..=3 {
        assert!(solo.end.engine.send_mad(&mad, 0, &mut solo.end.out));
        let sent = solo.end.out.packets.pop_front().unwrap();
        let sent = Packet::parse(&sent).unwrap();
        assert_eq!((sent.bth().psn, sent.bth().dest_qpn), (Psn::new(psn), Qpn::GSI));
        assert_eq!(sent.payload(), mad);
    }
    assert_eq!(solo.end.engine.counters().sent_pkts, 3);
    // Without room, nothing is counted.
    solo.end.out.room = 0;
    assert!(!solo.end.engine.send_mad(&mad, 0, &mut solo.end.out));
    assert_eq!(solo.end.engine.counters().sent_pkts, 3);
}

fn side(qpn: Qpn) -> QpSide {
    QpSide::new(qpn, Psn::new(1))
}

fn ask(ends: [IpAddr; 2], service: ServiceId, side: QpSide) -> Connect<'static> {
    Connect { mtu: Mtu::Mtu256, ..Connect::new(ends, service, 9, side) }
}

/// An accepted connection for the queue pair of `solo`; its RTU does not come.
fn accepted(solo: &mut Solo) -> ConnId {
    accepted_with(solo, CmConfig::default())
}

fn accepted_with(solo: &mut Solo, config: CmConfig) -> ConnId {
    let service = ServiceId::of_port(PortSpace::Tcp, 7);
    let side = side(crate::common::PEER);
    let ask = ask([addr(2), addr(1)], service, side);
    let mut peer = ConnectionManager::new(CmConfig { key: [1, 2], ..config });
    peer.connect(solo.now, &ask).unwrap();
    let asked = peer.poll_transmit().unwrap();
    solo.end.engine.start_cm(config);
    let cm = solo.end.engine.cm().unwrap();
    cm.listen(service, None, 1).unwrap();
    cm.handle_mad(solo.now, addr(2), addr(1), &asked.mad);
    let Some(CmEvent::Request { conn, .. }) = cm.poll_event() else { panic!("no request") };
    let side = QpSide { qpn: solo.end.qpn, ..side };
    cm.accept(solo.now, conn, &Accept { side, keep_alive: None, private: b"" }).unwrap();
    conn
}

/// The RTU may be lost: the first message on the queue pair has the same effect. No other packet
/// has.
#[test]
fn the_first_message_says_that_the_peer_is_ready() {
    let mut solo = Solo::script();
    let conn = accepted(&mut solo);
    solo.end.engine.await_message(solo.end.qpn, conn);
    solo.receive_request(Opcode::RC_RDMA_WRITE_ONLY, 1, &[&solo.reth(0, 4), &[1; 4]]);
    assert_eq!(solo.end.engine.cm().unwrap().poll_event(), None, "it is not the expected one");
    for psn in 0..2 {
        solo.receive_request(Opcode::RC_RDMA_WRITE_ONLY, psn, &[&solo.reth(0, 4), &[1; 4]]);
    }
    let cm = solo.end.engine.cm().unwrap();
    assert_eq!(cm.poll_event(), Some(CmEvent::Established { conn }));
    assert_eq!((cm.poll_event(), cm.counters().by_message), (None, 1));
}

/// A queue pair that is used for a second connection establishes only that one.
#[test]
fn the_first_message_is_that_of_the_last_connection_that_awaits_one() {
    let mut solo = Solo::script();
    let conn = accepted(&mut solo);
    let (qpn, setup) = (solo.end.qpn, solo.setup.clone());
    let reset = to(QpState::Reset);
    let established = |solo: &mut Solo, psn| {
        solo.receive_request(Opcode::RC_RDMA_WRITE_ONLY, psn, &[&solo.reth(0, 4), &[1; 4]]);
        solo.end.engine.cm().unwrap().poll_event()
    };
    solo.end.engine.await_message(qpn, conn);
    solo.end.modify(qpn, &reset).unwrap();
    solo.end.connect(qpn, 0, crate::common::PEER, &setup);
    assert_eq!(established(&mut solo, 0), None, "whatever was awaited before the reset");
    solo.end.engine.await_message(qpn, conn);
    solo.end.engine.await_message(qpn, ConnId(CommId(5)));
    assert_eq!(established(&mut solo, 1), None, "another is awaited now");
    solo.end.engine.await_message(qpn, ConnId(CommId(5)));
    solo.end.engine.await_message(qpn, conn);
    assert_eq!(established(&mut solo, 2), Some(CmEvent::Established { conn }));
    // The number of a destroyed queue pair establishes no connection.
    let conn = accepted(&mut solo);
    solo.end.engine.await_message(qpn, conn);
    solo.end.engine.destroy_qp(qpn).unwrap();
    assert_eq!(solo.end.engine.create_qp(&crate::common::qp_init(&setup), qpn.value()), Some(qpn));
    solo.end.connect(qpn, 0, crate::common::PEER, &setup);
    assert_eq!(established(&mut solo, 0), None);
}

#[test]
fn nobody_else_is_awaited() {
    let mut solo = Solo::script();
    let conn = accepted(&mut solo);
    solo.end.engine.await_message(Qpn::new(0xabcd), conn);
    solo.receive_request(Opcode::RC_RDMA_WRITE_ONLY, 0, &[&solo.reth(0, 4), &[1; 4]]);
    assert_eq!(solo.end.engine.cm().unwrap().poll_event(), None);
}

/// Where several devices share an address, each datagram to QP1 names its device: both sides draw
/// ids with their slot.
#[test]
fn each_datagram_says_whom_it_is_for() {
    let of = |mad: &MadBytes| {
        let mut packet = [0; GSI_PACKET_LEN];
        write_gsi(&mut packet, Psn::new(1), mad);
        addressee(&packet)
    };
    let (now, addresses) = (Time(1_000_000_000), [addr(1), addr(2)]);
    let [mut here, mut there] = [5, 0xc3].map(|slot| {
        let key = [u64::from(slot), 9];
        ConnectionManager::new(CmConfig { key, slot: Some(slot), ..CmConfig::default() })
    });
    let service = ServiceId::of_port(PortSpace::Tcp, 7);
    let datagrams = ServiceId::of_port(PortSpace::Udp, 8);
    there.listen(service, None, 8).unwrap();
    there.listen_datagrams(datagrams, None, 1).unwrap();
    let side = side(Qpn::new(0x05_0123));
    let ask = ask(addresses, service, side);
    let conn = here.connect(now, &ask).unwrap();
    let way = (addresses[0], addresses[1]);
    let query = here.resolve(now, way, (datagrams, 9), b"").unwrap();
    let mut seen = Vec::new();
    for _ in 0..8 {
        while let Some(sent) = here.poll_transmit() {
            seen.push((false, of(&sent.mad)));
            there.handle_mad(now, addresses[0], addresses[1], &sent.mad);
        }
        while let Some(event) = there.poll_event() {
            match event {
                CmEvent::Request { conn, .. } => {
                    let side = QpSide { qpn: Qpn::new(0xc3_0456), ..side };
                    let accept = Accept { side, keep_alive: None, private: b"" };
                    there.accept(now, conn, &accept).unwrap();
                }
                CmEvent::Asked { ask, .. } => {
                    there.answer(now, ask, Ok((Qpn::new(0x77), 1)), b"").unwrap();
                }
                _ => {}
            }
        }
        while let Some(sent) = there.poll_transmit() {
            seen.push((true, of(&sent.mad)));
            here.handle_mad(now, addresses[1], addresses[0], &sent.mad);
        }
        while let Some(event) = here.poll_event() {
            match event {
                CmEvent::Replied { conn, .. } => {
                    here.establish(conn, b"").unwrap();
                    here.disconnect(now, conn, b"").unwrap();
                }
                CmEvent::Disconnected { conn: ended, .. } => assert_eq!(ended, conn),
                _ => {}
            }
        }
    }
    let (to_here, to_there) = (Some(Addressee::Slot(5)), Some(Addressee::Slot(0xc3)));
    let (asked, questioned) = (Requested::Connection(conn.0), Requested::Service(query.0));
    assert_eq!(
        seen,
        [
            (false, Some(Addressee::Request(asked, Some(service), Some(side.qpn)))),
            (false, Some(Addressee::Request(questioned, Some(datagrams), None))),
            // REP, and the answer for the datagram service; RTU and DREQ; DREP.
            (true, Some(Addressee::Reply(5, Qpn::new(0xc3_0456)))),
            (true, to_here),
            (false, to_there),
            (false, to_there),
            (true, to_here),
        ]
    );
    // A question about connections is for the device that has them, its answer for the one that
    // asked.
    let pairs = Pairs::new([(CommId(0x0500_0001), CommId(0xc300_0002))]);
    assert_eq!(of(&AliveMad::Question(pairs).emit(0x0500_0009)), to_there);
    assert_eq!(of(&AliveMad::Answer(pairs, 0).emit(0x0500_0009)), to_here);
    assert_eq!(of(&AliveMad::Notice(Qpn::new(0xc3_0001)).emit(9)), Some(Addressee::Any));
    // The device that has QP1 answers a question, and decides about a message that names no slot.
    assert_eq!(of(&RecognitionMad::Probe.emit(0xc300_0001)), Some(Addressee::Any));
    let answer = RecognitionMad::Reply(Some(PeerInfo {
        bytes: 1,
        datagrams: 1,
        queue: QueueKind::Memory,
        slots: 1,
        packet_ns: 1,
        kib_ns: 1,
    }));
    assert_eq!(of(&answer.emit(0x1234_5678_c300_0001)), to_there);
    let nobody =
        Dreq { local: CommId(7), remote: CommId(0), remote_qpn: Qpn::new(9), private: b"" };
    assert_eq!(of(&CmMessage::Dreq(nobody).emit(3)), Some(Addressee::Any));
    // A peer that gives its request up may not know the process that has it.
    let given_up = here.connect(now, &ask).unwrap();
    let _ = here.poll_transmit();
    here.forget(now, given_up);
    let requested = Requested::Connection(given_up.0);
    let rej = here.poll_transmit().unwrap();
    assert_eq!(of(&rej.mad), Some(Addressee::Request(requested, None, None)));
    assert_eq!(of(&[0xff; 256]), Some(Addressee::Any));
    // A packet to another queue pair has no addressee, nor have other bytes.
    let mut other = packet();
    other[7] = 2;
    assert_eq!((addressee(&other), addressee(&[]), addressee(&[0x64; 11])), (None, None, None));
}

/// A packet that the queue pair receives is a sign of life of the peer.
#[test]
fn a_connection_is_asked_about_once_its_queue_pair_receives_nothing() {
    let period = 10_000_000_000;
    let config = CmConfig { answers: true, keep_alive: period, ..CmConfig::default() };
    let mut solo = Solo::script();
    let conn = accepted_with(&mut solo, config);
    let qpn = solo.end.qpn;
    solo.end.engine.await_message(qpn, conn);
    let asked = |solo: &mut Solo| solo.end.engine.cm().unwrap().counters().asked_alive;
    for psn in 0..100 {
        solo.receive_request(Opcode::RC_RDMA_WRITE_ONLY, psn, &[&solo.reth(0, 4), &[1; 4]]);
        solo.wait(300_000_000);
    }
    assert_eq!(asked(&mut solo), 0);
    let last = solo.now;
    let mut questions = Vec::new();
    let ended = loop {
        solo.wait(solo.end.engine.poll_timeout().expect("something is due").since(solo.now));
        let cm = solo.end.engine.cm().unwrap();
        while let Some(sent) = cm.poll_transmit() {
            if AliveMad::parse(&sent.mad).is_some() {
                assert_eq!((sent.remote, sent.via), (addr(2), Some(qpn)));
                questions.push(solo.now);
            }
        }
        let cm = solo.end.engine.cm().unwrap();
        if let Some(event @ CmEvent::Disconnected { .. }) =
            std::iter::from_fn(|| cm.poll_event()).last()
        {
            break event;
        }
    };
    assert_eq!(ended, CmEvent::Disconnected { conn, ended: Ended::Gone });
    assert_eq!(questions.len(), 3);
    assert!((period / 4 * 3..=period + period / 8).contains(&questions[0].since(last)));
    assert!(solo.end.engine.path_of(qpn).is_some(), "their path");
    assert_eq!(solo.end.engine.counters().undriven_us, 0, "each deadline was met");
}

/// A packet for a queue pair that the device does not have, of the peer of the one before it.
fn lost(opcode: Opcode, qpn: u32) -> Vec<u8> {
    let mut packet = vec![0; 12 + 16 + 4];
    let bth = Bth::new(opcode, Pkey::DEFAULT, Qpn::new(qpn), Psn::new(5));
    packet[..12].copy_from_slice(&bth.bytes());
    let mut template = template(addr(2), addr(1));
    template.set_id(0, 0x4000);
    template.seal(&mut packet);
    packet
}

#[test]
fn a_rocinante_is_told_of_a_queue_pair_that_does_not_exist_and_a_standard_peer_is_not() {
    let mut solo = Solo::script();
    solo.end.engine.start_cm(CmConfig::default());
    let write = lost(Opcode::RC_RDMA_WRITE_ONLY, 0x4321);
    receive(&mut solo, &write, WHOLE);
    assert!(!solo.end.engine.has_probes(), "it recognises no peer");
    solo.end.engine.start_recognition([3, 4], None, crate::common::INFO);
    // Of other services, and damaged.
    receive(&mut solo, &lost(Opcode::UD_SEND_ONLY, 0x4321), WHOLE);
    let mut damaged = write.clone();
    damaged[20] ^= 1;
    receive(&mut solo, &damaged, WHOLE);
    assert!(!solo.end.engine.has_probes());
    // An unknown peer is probed, once; a standard peer does not answer.
    for _ in 0..10 {
        receive(&mut solo, &write, WHOLE);
    }
    let question = solo.end.engine.poll_probe().unwrap();
    let Some((tid, RecognitionMad::Probe)) = RecognitionMad::parse(&question.mad) else { panic!() };
    assert_eq!(solo.end.engine.poll_probe(), None);
    assert_eq!(solo.end.engine.cm().unwrap().poll_transmit(), None);
    // A Rocinante answers, and gets notices from then on, at a limited rate.
    let answer = RecognitionMad::Reply(Some(crate::common::INFO)).emit(tid);
    let mut packet = [0; GSI_PACKET_LEN];
    write_gsi(&mut packet, Psn::new(1), &answer);
    receive(&mut solo, &sealed(packet), WHOLE);
    let qpns = [0x4321, 0x4322];
    for opcode in [Opcode::RC_RDMA_WRITE_ONLY, Opcode::UC_RDMA_WRITE_ONLY] {
        for qpn in qpns {
            receive(&mut solo, &lost(opcode, qpn), WHOLE);
            let told = solo.end.engine.cm().unwrap().poll_transmit().unwrap();
            assert_eq!((told.local, told.remote), (addr(1), addr(2)));
            let said = AliveMad::parse(&told.mad).map(|(_, said)| said);
            assert_eq!(said, Some(AliveMad::Notice(Qpn::new(qpn))));
        }
    }
    for _ in 0..1_000 {
        receive(&mut solo, &write, WHOLE);
    }
    let notices = |solo: &mut Solo| solo.end.engine.cm().unwrap().counters().notices;
    let told = notices(&mut solo);
    assert!((10..=64).contains(&told), "{told}");
    solo.wait(50_000_000);
    receive(&mut solo, &write, WHOLE);
    assert_eq!(notices(&mut solo), told + 1);
    // Damaged packets take none from whole ones, however many come at once. They have a limit of
    // their own.
    for (count, more) in [(4_000, 1), (5_000, 0)] {
        solo.wait(1_000_000_000);
        let told = notices(&mut solo);
        for _ in 0..count {
            receive(&mut solo, &damaged, WHOLE);
        }
        receive(&mut solo, &write, WHOLE);
        assert_eq!(notices(&mut solo), told + more, "after {count}");
    }
    // An engine that only replies probes no peer of its own queue pairs, even when records expire.
    solo.wait(600_000_000_000);
    solo.send(1, 10);
    solo.packets();
    assert_eq!(solo.end.engine.counters().sent_questions, 1);
}
