//! Congestion notifications: the marked packets that cause one, and those that must not.

use std::net::IpAddr;

use rocinante_stack::cm::CmConfig;
use rocinante_stack::types::{Mtu, Psn, Qpn};
use rocinante_stack::verbs::{QpState, QpType};
use rocinante_stack::wire::cm::{CmMessage, CommId, Dreq};
use rocinante_stack::wire::icrc::DF;
use rocinante_stack::wire::mad::{GSI_PACKET_LEN, write_gsi};
use rocinante_stack::wire::{Opcode as Op, Packet};
use rocinante_stack::{Datagram, IpId, QpAttr};

use crate::common::{PEER, PORT, Setup, Solo, addr, seal, template, to};
use crate::kinds::KINDS;

/// The TOS byte of a packet with the mark "congestion experienced".
const MARKED: u8 = 0x68 | 3;
/// At most one notification in this time.
const PACE: u64 = 50_000;

fn receive(solo: &mut Solo, (src, dst): (IpAddr, IpAddr), tos: u8, bytes: &[u8]) {
    let ip_id = IpId::Exact { id: 0, flags: DF };
    let datagram = Datagram { bytes, src, dst, src_port: PORT, ip_id, tos, hop_limit: None };
    solo.end.engine.handle_datagram(solo.now, &datagram, &mut solo.end.host);
}

/// Number of notifications that leave now. Checks that each is whole, and for the peer's queue
/// pair.
fn notified(solo: &mut Solo, peer: Qpn) -> usize {
    let sent = solo.packets();
    let all = sent.iter().map(|bytes| Packet::parse(bytes).expect("a packet of ours"));
    let cnps: Vec<_> = all.filter(|packet| packet.bth().opcode == Op::CNP).collect();
    for cnp in &cnps {
        assert_eq!((cnp.bth().dest_qpn, cnp.bth().becn, cnp.bth().psn), (peer, true, Psn::new(0)));
        assert_eq!(cnp.payload(), [0; 16]);
    }
    cnps.len()
}

#[test]
fn every_marked_packet_of_a_reliable_connection_is_answered_and_no_other() {
    for kind in &KINDS {
        for tos in 0..4 {
            let (mut solo, packet) = kind.ready();
            receive(&mut solo, (addr(2), addr(1)), tos, &packet);
            // A queue pair in the error state sends nothing.
            let broke = solo.state() == QpState::Err;
            let marked = tos == 3;
            let answered = marked && kind.qp_type == QpType::Rc && !broke;
            assert_eq!(notified(&mut solo, PEER), usize::from(answered), "{} {tos}", kind.name);
            let counters = solo.end.engine.counters();
            assert_eq!(counters.rcvd_ecn_ce, u64::from(marked), "{}", kind.name);
            assert_eq!(counters.sent_cnp, u64::from(answered), "{}", kind.name);
        }
    }
}

/// A packet with a mark counts as marked, from any queue.
#[test]
fn what_waited_in_an_overloaded_queue_is_answered_as_if_it_were_marked() {
    for kind in &KINDS {
        for (tos, is_overloaded) in [(0, true), (MARKED, true), (0, false)] {
            let (mut solo, packet) = kind.ready();
            solo.end.engine.set_overloaded(true);
            solo.end.engine.set_overloaded(is_overloaded);
            receive(&mut solo, (addr(2), addr(1)), tos, &packet);
            let broke = solo.state() == QpState::Err;
            let answered = is_overloaded && kind.qp_type == QpType::Rc && !broke;
            assert_eq!(notified(&mut solo, PEER), usize::from(answered), "{} {tos}", kind.name);
            let counters = solo.end.engine.counters();
            let (marked, overloaded) =
                (u64::from(tos == MARKED), u64::from(tos == 0 && is_overloaded));
            assert_eq!((counters.rcvd_ecn_ce, counters.rcvd_overload), (marked, overloaded));
            assert_eq!(counters.sent_cnp, u64::from(answered), "{}", kind.name);
        }
    }
}

#[test]
fn a_notification_is_not_answered_by_one() {
    let mut solo = Solo::script();
    let mut cnp = solo.request(Op::CNP, 0, &[&[0; 16]]);
    cnp[4] |= 0x40;
    seal(&mut cnp);
    for _ in 0..3 {
        receive(&mut solo, (addr(2), addr(1)), MARKED, &cnp);
        solo.now = solo.now.after(PACE);
        assert_eq!(notified(&mut solo, PEER), 0);
    }
    let counters = solo.end.engine.counters();
    assert_eq!((counters.rcvd_cnp, counters.rcvd_ecn_ce, counters.sent_cnp), (3, 0, 0));
}

/// Only the peer can cause a notification; a dropped packet never does.
#[test]
fn no_marked_packet_that_is_dropped_is_answered() {
    for kind in KINDS.iter().filter(|kind| kind.qp_type == QpType::Rc) {
        let (mut solo, packet) = kind.ready();
        let way = (addr(2), addr(1));
        let mut damaged = packet.clone();
        damaged[11] ^= 1;
        receive(&mut solo, way, MARKED, &damaged);
        for (at, bits) in [(0, 0x20), (0, 0xe0), (1, 1), (2, 0x40), (3, 1), (7, 0x40)] {
            let mut other = packet.clone();
            other[at] ^= bits;
            seal(&mut other);
            receive(&mut solo, way, MARKED, &other);
        }
        receive(&mut solo, (addr(3), addr(1)), MARKED, &packet);
        receive(&mut solo, (addr(2), addr(4)), MARKED, &packet);
        receive(&mut solo, way, MARKED, &packet[..14]);
        assert_eq!(notified(&mut solo, PEER), 0, "{}", kind.name);
        let counters = solo.end.engine.counters();
        assert_eq!((counters.rcvd_ecn_ce, counters.sent_cnp), (0, 0), "{}", kind.name);
        let drops = solo.end.engine.drops();
        assert_eq!(drops.iter().map(|(_, n)| n).sum::<u64>(), 10, "{}", kind.name);
    }
}

/// QP1 has no peer.
#[test]
fn a_marked_datagram_to_the_connection_manager_is_not_answered() {
    let mut solo = Solo::script();
    solo.end.engine.start_cm(CmConfig::default());
    let (local, remote, remote_qpn) = (CommId(7), CommId(8), Qpn::new(9));
    let mad = CmMessage::Dreq(Dreq { local, remote, remote_qpn, private: b"" }).emit(3);
    let mut packet = [0; GSI_PACKET_LEN];
    write_gsi(&mut packet, Psn::new(1), &mad);
    template(addr(2), addr(1)).seal(&mut packet);
    receive(&mut solo, (addr(2), addr(1)), MARKED, &packet);
    assert_eq!(solo.end.engine.cm().unwrap().counters().received, 1);
    assert_eq!(notified(&mut solo, PEER), 0);
}

#[test]
fn a_queue_pair_that_only_receives_or_is_drained_says_so_too() {
    for state in [QpState::Rtr, QpState::Rts, QpState::Sqd] {
        let mut solo = Solo::script();
        let qpn = solo.end.qpn;
        let to = |state| QpAttr { state: Some(state), ..QpAttr::default() };
        match state {
            QpState::Rtr => {
                solo.end.modify(qpn, &to(QpState::Reset)).unwrap();
                for attr in &crate::common::steps(0, addr(1), PEER, &solo.setup)[..2] {
                    solo.end.modify(qpn, attr).unwrap();
                }
            }
            QpState::Sqd => solo.end.modify(qpn, &to(QpState::Sqd)).unwrap(),
            _ => {}
        }
        let write = solo.request(Op::RC_RDMA_WRITE_ONLY, 0, &[&solo.reth(0, 8), &[1; 8]]);
        receive(&mut solo, (addr(2), addr(1)), MARKED, &write);
        assert_eq!(notified(&mut solo, PEER), 1, "{state}");
    }
}

/// Each queue pair notifies its own peer, and not that of another queue pair.
#[test]
fn two_queue_pairs_notify_a_peer_each() {
    let mut solo = Solo::new(&Setup { qps: 2, ..Setup::script() });
    let (setup, [first, second]) = (solo.setup.clone(), [solo.end.qpns[0], solo.end.qpns[1]]);
    let peers = [PEER, Qpn::new(0x78)];
    solo.end.connect(second, 0, peers[1], &setup);
    let mark = |solo: &mut Solo, qpn, psn| {
        solo.end.qpn = qpn;
        let write = solo.request(Op::RC_RDMA_WRITE_ONLY, psn, &[&solo.reth(0, 8), &[1; 8]]);
        receive(solo, (addr(2), addr(1)), MARKED, &write);
    };
    for (qpn, peer) in [first, second].into_iter().zip(peers) {
        mark(&mut solo, qpn, 0);
        assert_eq!(notified(&mut solo, peer), 1);
    }
    for (psn, wait, expected) in [(1, PACE - 1, 0), (2, 1, 1), (3, 1, 0)] {
        solo.now = solo.now.after(wait);
        mark(&mut solo, first, psn);
        assert_eq!(notified(&mut solo, PEER), expected, "{psn}");
    }
    mark(&mut solo, second, 1);
    assert_eq!(notified(&mut solo, peers[1]), 1);
    // A reset forgets the last notification, so the next may leave at once.
    solo.end.modify(second, &to(QpState::Reset)).unwrap();
    solo.end.connect(second, 0, peers[1], &setup);
    mark(&mut solo, second, 0);
    assert_eq!(notified(&mut solo, peers[1]), 1);
}

/// A notification without room to leave stays due. One is enough for all packets that were marked
/// meanwhile.
#[test]
fn a_notification_that_found_no_room_leaves_when_there_is_some() {
    let mut solo = Solo::script();
    solo.end.out.room = 0;
    for psn in 0..3 {
        let write = solo.request(Op::RC_RDMA_WRITE_ONLY, psn, &[&solo.reth(0, 8), &[1; 8]]);
        receive(&mut solo, (addr(2), addr(1)), MARKED, &write);
        assert_eq!(notified(&mut solo, PEER), 0);
    }
    solo.end.out.room = usize::MAX;
    assert_eq!(notified(&mut solo, PEER), 1);
    assert_eq!(solo.end.engine.counters().sent_cnp, 1);
}

/// Our requests are what fills the path of the responses: after a mark a READ goes in more of them.
#[test]
fn a_marked_response_slows_reads_and_no_other_packet_does() {
    let setup = Setup { mtu: Mtu::Mtu1024, arena: 1 << 20, ..Setup::script() };
    for tos in [0, MARKED] {
        let mut solo = Solo::new(&setup);
        solo.send(1, 10).sent();
        let ack = solo.response(Op::RC_ACKNOWLEDGE, 0, &[&[0x1f, 0, 0, 1]]);
        receive(&mut solo, (addr(2), addr(1)), MARKED, &ack);
        assert_eq!(solo.read(2, 65 << 10).packets().len(), 2, "a notification and one request");
        let all = (1..=65).map(|psn| match psn {
            1 => Op::RC_RDMA_READ_RESPONSE_FIRST,
            65 => Op::RC_RDMA_READ_RESPONSE_LAST,
            _ => Op::RC_RDMA_READ_RESPONSE_MIDDLE,
        });
        for (psn, opcode) in (1..).zip(all) {
            let aeth: &[u8] = match opcode {
                Op::RC_RDMA_READ_RESPONSE_MIDDLE => &[],
                _ => &[0x1f, 0, 0, 2],
            };
            let response = solo.response(opcode, psn, &[aeth, &[7; 1024]]);
            receive(&mut solo, (addr(2), addr(1)), tos, &response);
        }
        assert_eq!(solo.completed().len(), 2);
        solo.wait(PACE);
        solo.packets();
        let requests = solo.read(3, 65 << 10).packets().len();
        assert_eq!(requests, 1 + usize::from(tos == MARKED));
    }
}
