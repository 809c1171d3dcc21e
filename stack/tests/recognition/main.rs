//! Two Rocinantes recognise each other although no program gives the kind of its peer, and a
//! standard peer is asked once.

#[path = "../common/mod.rs"]
mod common;
mod learned;

use std::net::IpAddr;

use common::{
    End, INFO, PD, Pair, QKEY, Setup, Solo, addr, pattern, qp_init, sge, steps, template, to,
};
use rocinante_scripts::aeth;
use rocinante_stack::types::{Key, Psn, Qpn, QueueKind};
use rocinante_stack::verbs::{
    AhId, Destination, QpState, QpType, SendData, SendOp, SendWr, WcStatus,
};
use rocinante_stack::wire::icrc::DF;
use rocinante_stack::wire::mad::{GSI_PACKET_LEN, write_gsi};
use rocinante_stack::wire::{MadBytes, Opcode, Packet, PeerInfo, RecognitionMad, Syndrome};
use rocinante_stack::{Budget, Engine, EngineConfig, HandOff, IpId, PeerAddress, PeerKind, QpAttr};

const PAUSE: u64 = 600_000_000_000;
const OURS: PeerKind = PeerKind::Rocinante(QueueKind::Frames);

/// Ends whose programs do not give the kind of the peer.
fn strangers(qp_type: QpType) -> Setup {
    Setup { qp_type, recognises: true, budget: Budget::STANDARD, held: 2048, ..Setup::default() }
}

/// The message of recognition in a packet, with its transaction id.
fn recognition(packet: &[u8]) -> Option<(u64, RecognitionMad)> {
    let packet = Packet::parse(packet).ok()?;
    (packet.bth().dest_qpn == Qpn::GSI).then(|| RecognitionMad::parse(packet.payload()))?
}

/// The transaction ids of the questions among packets; nothing else goes to QP1.
fn questions(packets: &[Vec<u8>]) -> Vec<u64> {
    let asked = packets.iter().filter_map(|packet| recognition(packet));
    asked
        .map(|(tid, mad)| {
            assert_eq!(mad, RecognitionMad::Probe);
            tid
        })
        .collect()
}

fn sealed(from: IpAddr, mad: &MadBytes) -> Vec<u8> {
    let mut packet = vec![0; GSI_PACKET_LEN];
    write_gsi(&mut packet, Psn::new(1), mad);
    template(from, addr(1)).seal(&mut packet);
    packet
}

/// A message of recognition arrives.
fn hear(solo: &mut Solo, from: IpAddr, tid: u64, mad: RecognitionMad) {
    let packet = sealed(from, &mad.emit(tid));
    solo.receive_from(from, addr(1), IpId::Exact { id: 0, flags: DF }, &packet);
}

fn answer(solo: &mut Solo, tid: u64) {
    hear(solo, addr(2), tid, RecognitionMad::Reply(Some(INFO)));
}

fn kind(end: &End) -> PeerKind {
    end.engine.peer_kind(end.qpn).expect("a peer")
}

fn handle_of(end: &mut End, remote: IpAddr) -> AhId {
    let (budget, kind) = (Budget::STANDARD, PeerKind::Standard);
    let to = PeerAddress { local: end.addr, remote, path: 0, budget, kind };
    end.engine.create_ah(PD, &to).expect("room")
}

fn send_to(end: &mut End, ah: AhId, key: Key, count: usize) {
    let op = SendOp::SendTo { to: Destination { ah, qpn: Qpn::new(9), qkey: QKEY }, imm: None };
    let list = [sge(0, 64, key)];
    let wr = SendWr::new(op, SendData::Sges(&list));
    for _ in 0..count {
        end.engine.post_send(end.qpn, &wr, &mut end.host).expect("room");
    }
}

// ---- two of us ----

#[test]
fn two_of_us_recognise_each_other_in_both_directions() {
    for qp_type in [QpType::Rc, QpType::Uc] {
        let mut pair = Pair::new(&strangers(qp_type));
        let keys = pair.register();
        for (at, key) in keys.into_iter().enumerate() {
            assert_eq!(kind(&pair.ends[at]), PeerKind::Standard);
            let remote = sge(0, 1, keys[1 - at]).addr;
            let op = SendOp::Write { remote, rkey: keys[1 - at], imm: None };
            pair.send(at, 1, op, &[sge(4096, 100, key)]);
        }
        pair.run();
        for end in &pair.ends {
            assert_eq!(kind(end), OURS, "{qp_type:?}");
            let counters = end.engine.counters();
            let asked = (counters.sent_questions, counters.rcvd_questions);
            let answered = (counters.sent_answers, counters.rcvd_answers);
            assert_eq!((asked, answered), ((1, 1), (1, 1)), "{qp_type:?}");
            assert_eq!(end.engine.peer_info(addr(2)).is_some(), end.addr == addr(1));
        }
    }
}

/// A responder has to know its peer, too: it holds the packets that came too early.
#[test]
fn who_only_answers_recognises_its_peer() {
    let mut pair = Pair::new(&strangers(QpType::Rc));
    let [key, remote] = pair.register();
    let op = SendOp::Write { remote: sge(0, 1, remote).addr, rkey: remote, imm: None };
    pair.send(0, 1, op, &[sge(0, 100, key)]);
    pair.run();
    assert_eq!(pair.ends.each_ref().map(kind), [OURS, OURS]);
}

#[test]
fn who_sends_datagrams_recognises_their_receiver() {
    let mut pair = Pair::new(&strangers(QpType::Ud));
    let [key, _] = pair.register();
    let ah = handle_of(&mut pair.ends[0], addr(2));
    send_to(&mut pair.ends[0], ah, key, 1);
    pair.run();
    let told = |at: usize, n| pair.ends[at].engine.peer_info(addr(n));
    assert_eq!((told(0, 2), told(1, 1)), (Some(INFO), None), "it sent nothing itself");
}

/// An introduction holds for the address that it came from: on another path to that address, but
/// not at another address, which is asked.
#[test]
fn a_peer_at_another_address_is_a_stranger_again() {
    let mut solo = Solo::new(&strangers(QpType::Rc));
    solo.send(1, 10);
    let tid = questions(&solo.packets()[1..])[0];
    answer(&mut solo, tid);
    solo.receive_ack(0);
    assert_eq!(kind(&solo.end), OURS);
    let qpn = solo.end.qpn;
    let to = |state| QpAttr { state: Some(state), ..QpAttr::default() };
    solo.end.modify(qpn, &to(QpState::Sqd)).unwrap();
    let (budget, kind_of_av) = (Budget::STANDARD, PeerKind::Standard);
    let mut peer =
        PeerAddress { local: addr(1), remote: addr(2), path: 4, budget, kind: kind_of_av };
    let another = |solo: &mut Solo, peer| {
        solo.end.modify(qpn, &QpAttr { peer: Some(peer), ..QpAttr::default() }).unwrap();
    };
    another(&mut solo, peer);
    assert_eq!(kind(&solo.end), OURS, "the same address");
    peer.remote = addr(3);
    another(&mut solo, peer);
    assert_eq!(kind(&solo.end), PeerKind::Standard);
    solo.end.modify(qpn, &to(QpState::Rts)).unwrap();
    let list = [sge(0, 8, solo.key)];
    let wr = SendWr::new(SendOp::Send { imm: None }, SendData::Sges(&list));
    for _ in 0..40 {
        solo.end.engine.post_send(qpn, &wr, &mut solo.end.host).unwrap();
    }
    let packets = solo.packets();
    let asked = questions(
        &packets.iter().filter(|packet| recognition(packet).is_some()).cloned().collect::<Vec<_>>(),
    );
    assert_eq!((packets.len() - asked.len(), asked.len()), (16, 1), "as for a stranger");
    hear(&mut solo, addr(3), asked[0], RecognitionMad::Reply(Some(INFO)));
    let mut ack = solo.response(Opcode::RC_ACKNOWLEDGE, 16, &[&aeth(Syndrome::ACK_UNLIMITED, 0)]);
    template(addr(3), addr(1)).seal(&mut ack);
    solo.receive_from(addr(3), addr(1), IpId::Exact { id: 0, flags: DF }, &ack);
    assert_eq!((kind(&solo.end), solo.packets().len()), (OURS, 24));
}

/// Nothing of it is there where it is not asked for.
#[test]
fn without_recognition_nobody_asks_or_answers() {
    let mut pair = Pair::new(&Setup { recognises: false, ..strangers(QpType::Rc) });
    let [key, remote] = pair.register();
    let op = SendOp::Write { remote: sge(0, 1, remote).addr, rkey: remote, imm: None };
    pair.send(0, 1, op, &[sge(0, 100, key)]);
    pair.pass = Box::new(|_, packet| {
        assert_eq!(recognition(packet), None);
        true
    });
    pair.run();
    assert_eq!(pair.ends.each_ref().map(kind), [PeerKind::Standard; 2]);
    assert_eq!(pair.ends[0].engine.footprint().known_peers, 0);
}

// ---- standard peers ----

#[test]
fn a_standard_peer_is_asked_once_and_not_before_the_first_packet() {
    let mut solo = Solo::new(&strangers(QpType::Rc));
    assert!(solo.packets().is_empty());
    solo.receive_ack(0);
    assert!(solo.packets().is_empty(), "a response that is not awaited is no reason");
    solo.end.out.room = 0;
    solo.send(1, 10);
    assert!(solo.packets().is_empty());
    solo.end.out.room = usize::MAX;
    let first = solo.packets();
    assert_eq!(recognition(&first[0]), None, "the program's packet leaves first");
    assert_eq!((first.len(), questions(&first).len()), (2, 1));
    // With any later packets.
    for round in 0..20 {
        solo.receive_ack(round);
        solo.send(1, 10);
        assert_eq!(questions(&solo.packets()), [0; 0]);
        solo.wait(PAUSE / 20);
    }
    solo.send(1, 10);
    solo.receive_ack(20);
    assert_eq!(questions(&solo.packets()).len(), 1, "ten minutes later");
    assert_eq!(kind(&solo.end), PeerKind::Standard);
    assert_eq!(solo.end.engine.counters().sent_questions, 2);
}

#[test]
fn an_acknowledgement_is_a_first_packet() {
    let mut solo = Solo::new(&strangers(QpType::Rc));
    solo.receive_request(Opcode::RC_RDMA_WRITE_ONLY, 0, &[&solo.reth(0, 4), &[1; 4]]);
    let sent = solo.packets();
    assert_eq!((sent.len(), questions(&sent).len()), (2, 1));
}

#[test]
fn two_queue_pairs_to_one_peer_ask_once() {
    let mut solo = Solo::new(&Setup { qps: 2, ..strangers(QpType::Rc) });
    let (setup, second) = (solo.setup.clone(), solo.end.qpns[1]);
    solo.end.connect(second, 0, Qpn::new(0x78), &setup);
    solo.send(1, 10);
    let list = [solo.sge(0, 10)];
    let wr = SendWr::new(SendOp::Send { imm: None }, SendData::Sges(&list));
    solo.end.engine.post_send(second, &wr, &mut solo.end.host).unwrap();
    let sent = solo.packets();
    assert_eq!((sent.len(), questions(&sent).len()), (3, 1));
    answer(&mut solo, questions(&sent)[0]);
    let kinds = [0, 1].map(|at| solo.end.engine.peer_kind(solo.end.qpns[at]));
    assert_eq!(kinds, [Some(OURS); 2], "the answer is for both");
    // And for one that begins later, without a question.
    let third = solo.end.engine.create_qp(&qp_init(&setup), 0x99).unwrap();
    solo.end.connect(third, 0, Qpn::new(0x79), &setup);
    solo.end.engine.post_send(third, &wr, &mut solo.end.host).unwrap();
    let sent = solo.packets();
    assert_eq!((sent.len(), questions(&sent).len()), (1, 0));
    assert_eq!(solo.end.engine.peer_kind(third), Some(OURS));
}

#[test]
fn each_of_two_peers_is_asked_and_a_group_is_not() {
    let mut solo = Solo::new(&strangers(QpType::Ud));
    let group = "239.1.2.3".parse().unwrap();
    let handles = [addr(2), addr(3), group].map(|to| handle_of(&mut solo.end, to));
    for _ in 0..2 {
        for ah in handles {
            send_to(&mut solo.end, ah, solo.key, 3);
        }
        solo.packets();
    }
    assert_eq!(solo.end.engine.counters().sent_questions, 2);
    assert_eq!(solo.end.engine.footprint().known_peers, 2);
}

// ---- answers ----

/// A reliable connection that has asked; the transaction id.
fn asked() -> (Solo, u64) {
    let mut solo = Solo::new(&strangers(QpType::Rc));
    solo.send(1, 10);
    let tid = questions(&solo.packets())[0];
    (solo, tid)
}

#[test]
fn an_answer_is_believed_only_if_it_is_one() {
    let good = RecognitionMad::Reply(Some(INFO));
    let (mut solo, tid) = asked();
    for (from, tid, mad) in [
        (addr(2), tid ^ 1, good),
        (addr(2), 0, good),
        (addr(3), tid, good),
        (addr(2), tid, RecognitionMad::Unknown),
    ] {
        hear(&mut solo, from, tid, mad);
        assert_eq!(kind(&solo.end), PeerKind::Standard, "{from} {mad:?}");
    }
    // To another address than the one that asked.
    let packet = {
        let mut packet = vec![0; GSI_PACKET_LEN];
        write_gsi(&mut packet, Psn::new(1), &good.emit(tid));
        template(addr(2), addr(4)).seal(&mut packet);
        packet
    };
    solo.receive_from(addr(2), addr(4), IpId::Exact { id: 0, flags: DF }, &packet);
    assert_eq!(kind(&solo.end), PeerKind::Standard);
    assert_eq!(solo.end.engine.drops().unasked_answer, 5);
    answer(&mut solo, tid);
    assert_eq!(kind(&solo.end), OURS);
    // The same again, with other values, answers no question any more.
    let other = PeerInfo { queue: QueueKind::Memory, ..INFO };
    hear(&mut solo, addr(2), tid, RecognitionMad::Reply(Some(other)));
    assert_eq!((kind(&solo.end), solo.end.engine.drops().unasked_answer), (OURS, 6));
    assert_eq!(solo.end.engine.counters().rcvd_answers, 1);
}

#[test]
fn an_answer_of_an_unknown_version_is_that_of_a_standard_peer() {
    let (mut solo, tid) = asked();
    let mut mad = RecognitionMad::Reply(Some(INFO)).emit(tid);
    mad[40] = 2;
    solo.receive(&sealed(addr(2), &mad));
    assert_eq!(kind(&solo.end), PeerKind::Standard);
    answer(&mut solo, tid);
    assert_eq!(kind(&solo.end), PeerKind::Standard, "it has answered");
    let counters = solo.end.engine.counters();
    assert_eq!((counters.rcvd_answers, solo.end.engine.drops().unasked_answer), (1, 1));
}

#[test]
fn a_lost_answer_is_asked_for_again_ten_minutes_later() {
    let (mut solo, first) = asked();
    solo.receive_ack(0);
    solo.wait(PAUSE);
    // It is too late for that.
    answer(&mut solo, first);
    assert_eq!(kind(&solo.end), PeerKind::Standard);
    solo.send(1, 10);
    let again = questions(&solo.packets());
    assert!(again.len() == 1 && again[0] != first);
    answer(&mut solo, first);
    assert_eq!(kind(&solo.end), PeerKind::Standard, "it is the answer to another question");
    answer(&mut solo, again[0]);
    assert_eq!(kind(&solo.end), OURS);
}

/// Numbers that no device has do no harm: a queue of nothing, one without end, all of the time.
#[test]
fn absurd_answers_do_no_harm() {
    for number in [0, 1, u32::MAX] {
        for qp_type in [QpType::Rc, QpType::Uc] {
            let told = PeerInfo {
                bytes: number,
                datagrams: number,
                packet_ns: number,
                kib_ns: number,
                ..INFO
            };
            let mut solo = Solo::new(&strangers(qp_type));
            solo.sends(0..20, 10);
            let tid = questions(&solo.packets())[0];
            hear(&mut solo, addr(2), tid, RecognitionMad::Reply(Some(told)));
            for round in 0..200 {
                solo.packets();
                solo.receive_ack(round % 20);
                solo.wait(10_000);
            }
            let done = solo.completed();
            assert_eq!(done.len(), 20, "{number} {qp_type:?}");
            assert!(done.iter().all(|(_, status)| *status == WcStatus::Success));
        }
    }
}

/// The introduction for one slot of numbers does not describe another.
#[test]
fn a_number_beyond_the_slots_stays_a_strangers() {
    let mut solo = Solo::new(&strangers(QpType::Rc));
    let (setup, qpn) = (solo.setup.clone(), solo.end.qpn);
    solo.end.modify(qpn, &to(QpState::Reset)).unwrap();
    solo.end.connect(qpn, 0, Qpn::new(0x01_0077), &setup);
    solo.send(1, 10);
    let tid = questions(&solo.packets())[0];
    answer(&mut solo, tid);
    assert_eq!(kind(&solo.end), PeerKind::Standard);
    solo.receive_ack(0);
    solo.send(1, 10);
    assert_eq!(questions(&solo.packets()), [0; 0]);
}

/// Another may come to the address of a peer that does not answer any more.
#[test]
fn who_does_not_answer_any_more_is_a_stranger_again() {
    let (mut solo, tid) = asked();
    answer(&mut solo, tid);
    solo.receive_ack(0);
    solo.send(1, 10);
    solo.packets();
    while solo.state() != QpState::Err {
        solo.wait_for_timer().expect("it is given up");
        solo.packets();
    }
    let (setup, qpn) = (solo.setup.clone(), solo.end.qpn);
    solo.end.modify(qpn, &to(QpState::Reset)).unwrap();
    solo.end.connect(qpn, 0, common::PEER, &setup);
    solo.send(2, 10);
    assert_eq!(questions(&solo.packets()), [0; 0], "ten minutes are not over");
    assert_eq!(kind(&solo.end), PeerKind::Standard);
}

/// An answer holds for ten minutes for queue pairs that begin then; a connection keeps the one that
/// it adopted.
#[test]
fn what_was_said_holds_for_ten_minutes() {
    let mut solo = Solo::new(&Setup { qps: 2, ..strangers(QpType::Rc) });
    let (setup, second) = (solo.setup.clone(), solo.end.qpns[1]);
    solo.send(1, 10);
    let tid = questions(&solo.packets())[0];
    answer(&mut solo, tid);
    solo.receive_ack(0);
    solo.wait(PAUSE);
    solo.send(1, 10);
    assert_eq!(questions(&solo.packets()), [0; 0]);
    solo.end.connect(second, 0, Qpn::new(0x78), &setup);
    let list = [solo.sge(0, 10)];
    let wr = SendWr::new(SendOp::Send { imm: None }, SendData::Sges(&list));
    solo.end.engine.post_send(second, &wr, &mut solo.end.host).unwrap();
    assert_eq!(questions(&solo.packets()).len(), 1);
    assert_eq!(solo.end.engine.peer_kind(second), Some(PeerKind::Standard));
    assert_eq!(kind(&solo.end), OURS);
}

// ---- bounds ----

#[test]
fn questions_are_answered_at_a_bounded_rate() {
    let mut solo = Solo::new(&strangers(QpType::Rc));
    let mut answers = 0;
    for n in 0..1000u64 {
        hear(&mut solo, addr((n % 200) as u8), n, RecognitionMad::Probe);
        let sent = solo.packets();
        assert!(
            sent.iter().all(|packet| {
                recognition(packet) == Some((n, RecognitionMad::Reply(Some(INFO))))
            })
        );
        answers += sent.len() as u64;
    }
    let (counters, drops) = (solo.end.engine.counters(), solo.end.engine.drops());
    assert_eq!((answers, counters.rcvd_questions), (256, 1000));
    assert_eq!((counters.sent_answers, drops.too_many_questions), (256, 744));
    assert_eq!(solo.end.engine.footprint().known_peers, 0, "a question leaves nothing behind");
    solo.wait(10_000_000);
    for n in 0..20 {
        hear(&mut solo, addr(2), n, RecognitionMad::Probe);
    }
    assert_eq!(solo.packets().len(), 10, "one more each millisecond");
    // Where nothing is sent, no more waits than is sent in one go.
    solo.wait(PAUSE);
    (0..1000).for_each(|n| hear(&mut solo, addr(2), n, RecognitionMad::Probe));
    assert_eq!(solo.packets().len(), 256);
}

/// More peers at once than questions may wait: the others are asked soon, and not ten minutes
/// later.
#[test]
fn a_peer_for_which_there_was_no_room_is_asked_soon() {
    let mut solo = Solo::new(&Setup { depth: 512, ..strangers(QpType::Ud) });
    let peer = |n: u32| IpAddr::from((0x0b00_0000 + n).to_be_bytes());
    let handles: Vec<AhId> = (0..300).map(|n| handle_of(&mut solo.end, peer(n))).collect();
    let mut asked = || {
        for ah in &handles {
            send_to(&mut solo.end, *ah, solo.key, 1);
        }
        let asked = questions(&solo.packets()).len();
        solo.wait(1_000_000);
        asked
    };
    assert_eq!([asked(), asked(), asked()], [256, 44, 0]);
}

/// A peer that asks more often than once in a millisecond still gets an answer each millisecond.
#[test]
fn the_rate_of_answers_does_not_depend_on_how_often_peers_ask() {
    for (pause, expected) in [(700_000, 700), (10_000, 10), (1_900_000, 1000)] {
        let mut solo = Solo::new(&strangers(QpType::Rc));
        let asked = |solo: &mut Solo, times: u64| {
            (0..times).for_each(|n| hear(solo, addr(2), n, RecognitionMad::Probe));
            solo.packets().len()
        };
        assert_eq!(asked(&mut solo, 1000), 256, "all that there is at once");
        let mut answers = 0;
        for _ in 0..1000 {
            solo.wait(pause);
            answers += asked(&mut solo, 1);
        }
        assert_eq!(answers, expected, "a question every {pause} ns");
    }
}

#[test]
fn so_many_peers_are_remembered_and_no_more() {
    let mut solo = Solo::new(&strangers(QpType::Ud));
    let mut asked = 0;
    for n in 0..5000u32 {
        let ah = handle_of(&mut solo.end, IpAddr::from((0x0b00_0000 + n).to_be_bytes()));
        send_to(&mut solo.end, ah, solo.key, 1);
        asked += questions(&solo.packets()).len();
        assert!(solo.end.engine.destroy_ah(ah));
    }
    assert_eq!((asked, solo.end.engine.footprint().known_peers), (4096, 4096));
    // Those of ten minutes ago make room.
    solo.wait(PAUSE);
    let ah = handle_of(&mut solo.end, addr(2));
    send_to(&mut solo.end, ah, solo.key, 1);
    assert_eq!(questions(&solo.packets()).len(), 1);
    assert_eq!(solo.end.engine.footprint().known_peers, 1);
}

// ---- effects ----

/// An engine without QP1 reports a new peer; the engine with QP1 asks it, and passes the answer on.
#[test]
fn an_engine_without_qp1_has_another_ask() {
    let config = EngineConfig { sharers: 2, ..EngineConfig::default() };
    let mut first = Engine::new(config);
    first.start_cm(Default::default());
    first.probe_unknown_peers();
    first.start_recognition([1, 2], None, INFO);
    let mut solo = Solo::new(&strangers(QpType::Rc));
    solo.end.engine = Engine::new(config);
    solo.end.engine.probe_unknown_peers();
    let qpn = solo.end.engine.create_qp(&qp_init(&solo.setup), 5).unwrap();
    solo.end.qpn = qpn;
    for attr in steps(0, addr(1), common::PEER, &solo.setup) {
        solo.end.modify(qpn, &attr).unwrap();
    }
    solo.send(1, 10);
    assert_eq!((solo.packets().len(), solo.end.engine.has_probes()), (1, true));
    let to = HandOff::FirstPacket { local: addr(1), remote: addr(2) };
    assert_eq!(solo.end.engine.poll_hand_off(), Some(to));
    assert_eq!(solo.end.engine.poll_hand_off(), None);
    first.take_hand_off(solo.now, &to);
    first.take_hand_off(solo.now, &to);
    assert_eq!(first.poll_hand_off(), None);
    let question = first.poll_probe().unwrap();
    assert!(first.poll_probe().is_none(), "it is asked once");
    let (tid, _) = RecognitionMad::parse(&question.mad).unwrap();
    let packet = sealed(addr(2), &RecognitionMad::Reply(Some(INFO)).emit(tid));
    let datagram = rocinante_stack::Datagram {
        bytes: &packet,
        src: addr(2),
        dst: addr(1),
        src_port: common::PORT,
        ip_id: IpId::Exact { id: 0, flags: DF },
        tos: 0,
        hop_limit: None,
    };
    first.handle_datagram(solo.now, &datagram, &mut solo.end.host);
    let learn = HandOff::Learn(addr(2), INFO);
    assert_eq!(first.poll_hand_off(), Some(learn));
    first.take_hand_off(solo.now, &to);
    assert_eq!(first.poll_hand_off(), Some(learn), "a later report gets it, too");
    solo.end.engine.take_hand_off(solo.now, &learn);
    assert_eq!(kind(&solo.end), OURS);
    let (_, attr, _) = solo.end.engine.query_qp(qpn).unwrap();
    let half = Budget { bytes: INFO.bytes / 2, datagrams: INFO.datagrams / 2 };
    assert_eq!(attr.peer.unwrap().budget, half, "each engine takes its share");
    assert!(!solo.end.engine.has_probes());
}
