//! Multicast groups: every attached queue pair gets its copy, and no other queue pair does.

use std::net::IpAddr;

use crate::common::{End, PORT, QKEY, Setup, addr, sge, to};
use rocinante_stack::cm::CmConfig;
use rocinante_stack::mem::Access;
use rocinante_stack::stats::Drops;
use rocinante_stack::types::{Key, Pkey, Psn, Qpn, Time};
use rocinante_stack::verbs::{
    Destination, QpState, QpType, RecvWr, SendData, SendOp, SendWr, WcStatus,
};
use rocinante_stack::wire::cm::{CmMessage, CommId, Dreq};
use rocinante_stack::wire::icrc::{DF, IpFields, Template};
use rocinante_stack::wire::mad::{GSI_PACKET_LEN, write_gsi};
use rocinante_stack::wire::{Bth, Deth, ICRC_LEN, Opcode, bth};
use rocinante_stack::{
    Budget, Datagram, GroupError, IpId, PeerAddress, PeerKind, QpAttr, grh_addresses,
};

const LEN: usize = 40 + 8;

fn group(n: u8) -> IpAddr {
    IpAddr::from([239, 0, 0, n])
}

fn ud() -> Setup {
    Setup { qp_type: QpType::Ud, ..Setup::default() }
}

/// An end with `count` ready queue pairs, and the key of its arena.
fn ready(count: usize) -> (End, Vec<Qpn>, Key) {
    let setup = ud();
    let mut end = End::new(1, &setup);
    let init = crate::common::qp_init(&setup);
    let mut qpns = vec![end.qpn];
    qpns.extend((1..count).map(|n| end.engine.create_qp(&init, 0x100 + n as u32).unwrap()));
    for qpn in &qpns {
        end.connect(*qpn, 0, Qpn::default(), &setup);
    }
    let key = end.host.register(0, setup.arena as u64, Access::ALL);
    (end, qpns, key)
}

fn recv(end: &mut End, qpn: Qpn, wr_id: u64, key: Key) {
    let sges = [sge(LEN as u64 * wr_id, LEN as u32, key)];
    end.engine.post_recv(qpn, &RecvWr { wr_id, sges: &sges }, &mut end.host).unwrap();
}

/// Eight bytes from an unknown sender to a queue pair number at an address.
fn made((src, dst): (IpAddr, IpAddr), bth: &Bth, qkey: u32) -> Vec<u8> {
    let mut packet = bth.bytes().to_vec();
    packet.resize(bth::LEN + Deth::LEN, 0);
    Deth { qkey, reserved: 0, src_qpn: Qpn::new(0x99) }.write(&mut packet[bth::LEN..]);
    packet.extend_from_slice(b"to all!!");
    packet.resize(packet.len() + ICRC_LEN, 0);
    Template::new(&IpFields::between(src, dst).unwrap(), PORT).seal(&mut packet);
    packet
}

fn to_all() -> Bth {
    Bth::new(Opcode::UD_SEND_ONLY, Pkey::DEFAULT, Qpn::MULTICAST, Psn::new(5))
}

fn receive(end: &mut End, (src, dst): (IpAddr, IpAddr), bytes: &[u8]) {
    let ip_id = if dst.is_ipv4() { IpId::Exact { id: 0, flags: DF } } else { IpId::None };
    let (src_port, hop_limit) = (PORT, Some(9));
    let datagram = Datagram { bytes, src, dst, src_port, ip_id, tos: 0, hop_limit };
    end.engine.handle_datagram(Time(1000), &datagram, &mut end.host);
}

/// Delivers a good datagram for a group.
fn receive_group(end: &mut End, to: IpAddr) {
    let way = (addr(2), to);
    receive(end, way, &made(way, &to_all(), QKEY));
}

/// The receives that completed, with their queue pairs.
fn received(end: &mut End) -> Vec<(Qpn, u64)> {
    let all = std::mem::take(&mut end.host.completions);
    assert!(all.iter().all(|cqe| cqe.status == WcStatus::Success));
    assert!(all.iter().all(|cqe| cqe.sender.is_some_and(|sender| sender.qpn == Qpn::new(0x99))));
    all.iter().map(|cqe| (cqe.qpn, cqe.wr_id)).collect()
}

/// Checks that the packet is dropped for the reason that `count` reads, and for no other.
fn assert_dropped(end: &mut End, times: u64, count: fn(&Drops) -> u64, act: impl FnOnce(&mut End)) {
    let sum = |drops: &Drops| drops.iter().map(|(_, n)| n).sum::<u64>();
    let before = *end.engine.drops();
    act(end);
    let after = *end.engine.drops();
    assert_eq!((count(&after) - count(&before), sum(&after) - sum(&before)), (times, times));
}

#[test]
fn all_attached_queue_pairs_get_a_copy_behind_a_header_that_names_the_group() {
    let (mut end, qpns, key) = ready(4);
    let v6 = IpAddr::from([0xff15, 0, 0, 0, 0, 0, 0, 7]);
    let from6 = IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, 2]);
    for (way, to) in [((addr(2), group(1)), group(1)), ((from6, v6), v6)] {
        for (n, qpn) in qpns.iter().enumerate() {
            recv(&mut end, *qpn, n as u64, key);
        }
        assert_eq!(end.engine.attach_multicast(qpns[0], to), Ok(true));
        assert_eq!(end.engine.attach_multicast(qpns[2], to), Ok(false));
        assert_eq!(end.engine.attach_multicast(qpns[2], to), Ok(false), "again");
        receive(&mut end, way, &made(way, &to_all(), QKEY));
        assert_eq!(received(&mut end), [(qpns[0], 0), (qpns[2], 2)]);
        for n in [0, 2] {
            let bytes = &end.host.arena[n * LEN..][..LEN];
            assert_eq!(grh_addresses(bytes.first_chunk().unwrap()), Some(way));
            assert_eq!(&bytes[40..], b"to all!!");
        }
        for n in [1, 3] {
            assert_eq!(end.host.arena[n * LEN..][..LEN], [0; LEN], "not attached");
        }
        assert_eq!(end.engine.detach_multicast(qpns[0], to), Ok(false));
        recv(&mut end, qpns[2], 2, key);
        receive(&mut end, way, &made(way, &to_all(), QKEY));
        assert_eq!(received(&mut end), [(qpns[2], 2)]);
        assert_eq!(end.engine.detach_multicast(qpns[2], to), Ok(true));
        assert_dropped(
            &mut end,
            1,
            |drops| drops.unknown_group,
            |end| {
                receive(end, way, &made(way, &to_all(), QKEY));
            },
        );
        // Cleans up the state of the case before.
        for (n, qpn) in qpns.iter().enumerate() {
            end.modify(*qpn, &crate::common::to(QpState::Reset)).unwrap();
            end.connect(*qpn, 0, Qpn::default(), &ud());
            end.host.arena[n * LEN..][..LEN].fill(0);
        }
    }
}

/// An IPv4 address mapped into IPv6, as in GIDs, names the same group.
#[test]
fn a_mapped_address_is_the_same_group() {
    let (mut end, qpns, key) = ready(1);
    let mapped = IpAddr::from([0, 0, 0, 0, 0, 0xffff, 0xef00, 1]);
    assert_eq!(end.engine.attach_multicast(qpns[0], mapped), Ok(true));
    assert_eq!(end.engine.attach_multicast(qpns[0], group(1)), Ok(false));
    assert_eq!(end.engine.groups_of(qpns[0]), [group(1)]);
    recv(&mut end, qpns[0], 0, key);
    receive_group(&mut end, group(1));
    assert_eq!(received(&mut end).len(), 1);
    assert_eq!(end.engine.detach_multicast(qpns[0], mapped), Ok(true));
    assert!(end.engine.groups_of(qpns[0]).is_empty());
}

/// Each queue pair checks on its own: key, receive, room, state.
#[test]
fn one_that_cannot_take_it_is_no_trouble_to_the_others() {
    let (mut end, qpns, key) = ready(6);
    for qpn in &qpns {
        end.engine.attach_multicast(*qpn, group(1)).unwrap();
    }
    end.modify(qpns[0], &QpAttr { qkey: Some(QKEY ^ 1), ..QpAttr::default() }).unwrap();
    recv(&mut end, qpns[0], 0, key);
    // The second has no receive, the third a short one, the fourth is broken.
    let sges = [sge(2 * LEN as u64, LEN as u32 - 1, key)];
    end.engine.post_recv(qpns[2], &RecvWr { wr_id: 2, sges: &sges }, &mut end.host).unwrap();
    end.modify(qpns[3], &to(QpState::Err)).unwrap();
    recv(&mut end, qpns[4], 4, key);
    recv(&mut end, qpns[5], 5, key);
    let before = *end.engine.drops();
    receive_group(&mut end, group(1));
    let drops = *end.engine.drops();
    assert_eq!(received(&mut end), [(qpns[4], 4), (qpns[5], 5)]);
    assert_eq!((drops.qkey, drops.no_receive, drops.too_long), (1, 1, 1));
    assert_eq!(before.iter().map(|(_, n)| n).sum::<u64>(), 0);
    assert_eq!(end.engine.counters().rcvd_pkts, 1);
}

#[test]
fn what_is_wrong_is_dropped_and_counted_and_touches_no_receive() {
    let (mut end, qpns, key) = ready(1);
    end.engine.start_cm(CmConfig::default());
    end.engine.attach_multicast(qpns[0], group(1)).unwrap();
    recv(&mut end, qpns[0], 0, key);
    let way = (addr(2), group(1));
    let mut case = |count: fn(&Drops) -> u64, way, packet: &[u8]| {
        assert_dropped(&mut end, 1, count, |end| receive(end, way, packet));
        assert!(end.host.completed().is_empty() && end.host.arena.iter().all(|byte| *byte == 0));
    };
    let other = (addr(2), group(2));
    case(|drops| drops.unknown_group, other, &made(other, &to_all(), QKEY));
    // The multicast number at a unicast address, and a queue pair's number at the group's address.
    let single = (addr(2), addr(1));
    case(|drops| drops.unknown_qpn, single, &made(single, &to_all(), QKEY));
    let one = Bth { dest_qpn: qpns[0], ..to_all() };
    case(|drops| drops.wrong_source, way, &made(way, &one, QKEY));
    case(|drops| drops.qkey, way, &made(way, &to_all(), QKEY ^ 1));
    let pkey = Bth::new(Opcode::UD_SEND_ONLY, Pkey(0x8001), Qpn::MULTICAST, Psn::new(5));
    case(|drops| drops.pkey, way, &made(way, &pkey, QKEY));
    for opcode in [Opcode::RC_SEND_ONLY, Opcode::UC_SEND_ONLY] {
        let service = Bth::new(opcode, Pkey::DEFAULT, Qpn::MULTICAST, Psn::new(5));
        case(|drops| drops.wrong_service, way, &made(way, &service, QKEY));
    }
    let mut damaged = made(way, &to_all(), QKEY);
    damaged[30] ^= 1;
    case(|drops| drops.icrc, way, &damaged);
    case(|drops| drops.malformed, way, &damaged[..18]);
    // Every host would answer a management datagram to a group.
    let (local, remote, remote_qpn) = (CommId(7), CommId(8), Qpn::new(9));
    let mad = CmMessage::Dreq(Dreq { local, remote, remote_qpn, private: b"" }).emit(3);
    let mut packet = [0; GSI_PACKET_LEN];
    write_gsi(&mut packet, Psn::new(1), &mad);
    Template::new(&IpFields::between(way.0, way.1).unwrap(), PORT).seal(&mut packet);
    case(|drops| drops.wrong_source, way, &packet);
    assert_eq!(end.engine.cm().unwrap().poll_transmit(), None);
    receive_group(&mut end, group(1));
    assert_eq!(received(&mut end), [(qpns[0], 0)]);
}

#[test]
fn datagrams_of_any_length_do_no_harm() {
    let (mut end, qpns, key) = ready(1);
    end.engine.attach_multicast(qpns[0], group(1)).unwrap();
    let way = (addr(2), group(1));
    let whole = made(way, &to_all(), QKEY);
    for len in 0..whole.len() {
        recv(&mut end, qpns[0], 0, key);
        let mut cut = whole[..len].to_vec();
        if len > 8 {
            Template::new(&IpFields::between(way.0, way.1).unwrap(), PORT).seal(&mut cut);
        }
        receive(&mut end, way, &cut);
        for cqe in std::mem::take(&mut end.host.completions) {
            assert!(cqe.byte_len as usize <= 40 + len.saturating_sub(24));
        }
    }
    assert_eq!(end.state(qpns[0]), QpState::Rts);
}

#[test]
fn only_queue_pairs_for_datagrams_can_be_attached_and_only_to_groups() {
    let (mut end, qpns, _) = ready(1);
    let connected =
        end.engine.create_qp(&crate::common::qp_init(&Setup::default()), 0x777).unwrap();
    assert_eq!(end.engine.attach_multicast(connected, group(1)), Err(GroupError::Service));
    assert_eq!(end.engine.attach_multicast(Qpn::new(3), group(1)), Err(GroupError::UnknownQp));
    let no_groups = [addr(1), [255; 4].into(), [0; 4].into(), [0xfd00, 0, 0, 0, 0, 0, 0, 1].into()];
    for no_group in no_groups {
        let refused = end.engine.attach_multicast(qpns[0], no_group);
        assert_eq!(refused, Err(GroupError::NoGroup), "{no_group}");
    }
    assert_eq!(end.engine.detach_multicast(qpns[0], group(1)), Err(GroupError::NotAttached));
    end.engine.attach_multicast(qpns[0], group(1)).unwrap();
    assert_eq!(end.engine.detach_multicast(connected, group(1)), Err(GroupError::NotAttached));
}

#[test]
fn groups_and_their_queue_pairs_are_limited() {
    let (mut end, qpns, _) = ready(1);
    for n in 0..256u16 {
        let [high, low] = (n + 1).to_be_bytes();
        end.engine.attach_multicast(qpns[0], [239, 1, high, low].into()).unwrap();
    }
    assert_eq!(end.engine.attach_multicast(qpns[0], group(1)), Err(GroupError::Full { max: 256 }));
    assert_eq!(end.engine.groups_of(qpns[0]).len(), 256);
    end.engine.detach_multicast(qpns[0], [239, 1, 0, 9].into()).unwrap();
    assert_eq!(end.engine.attach_multicast(qpns[0], group(1)), Ok(true));
    let init = crate::common::qp_init(&ud());
    for n in 1..1024 {
        let qpn = end.engine.create_qp(&init, 0x2000 + n).unwrap();
        assert_eq!(end.engine.attach_multicast(qpn, group(1)), Ok(false));
    }
    let qpn = end.engine.create_qp(&init, 0x9000).unwrap();
    assert_eq!(end.engine.attach_multicast(qpn, group(1)), Err(GroupError::Full { max: 1024 }));
}

/// A datagram for a destroyed queue pair is dropped, even if another one has its number now.
#[test]
fn who_is_destroyed_is_in_no_group() {
    let (mut end, qpns, key) = ready(2);
    for to in [group(1), group(2)] {
        end.engine.attach_multicast(qpns[1], to).unwrap();
    }
    end.engine.attach_multicast(qpns[0], group(1)).unwrap();
    assert_eq!(end.engine.groups_of(qpns[1]), [group(1), group(2)]);
    end.engine.destroy_qp(qpns[1]).unwrap();
    let again = end.engine.create_qp(&crate::common::qp_init(&ud()), qpns[1].value()).unwrap();
    assert_eq!(again, qpns[1]);
    end.connect(again, 0, Qpn::default(), &ud());
    recv(&mut end, again, 1, key);
    recv(&mut end, qpns[0], 0, key);
    receive_group(&mut end, group(1));
    assert_dropped(&mut end, 1, |drops| drops.unknown_group, |end| receive_group(end, group(2)));
    assert_eq!(received(&mut end), [(qpns[0], 0)]);
}

/// A packet counts once, however many queue pairs get it, and not where it is for one alone.
#[test]
fn packets_of_groups_are_counted_apart() {
    let (mut end, qpns, key) = ready(3);
    for (n, qpn) in qpns.iter().enumerate() {
        end.engine.attach_multicast(*qpn, group(1)).unwrap();
        recv(&mut end, *qpn, n as u64, key);
    }
    end.engine.attach_multicast(qpns[0], group(2)).unwrap();
    receive_group(&mut end, group(1));
    for n in [0, 1] {
        recv(&mut end, qpns[0], n, key);
    }
    receive_group(&mut end, group(2));
    let alone = Bth::new(Opcode::UD_SEND_ONLY, Pkey::DEFAULT, qpns[0], Psn::new(5));
    let way = (addr(2), addr(1));
    receive(&mut end, way, &made(way, &alone, QKEY));
    assert_eq!(received(&mut end).len(), 5);
    let counters = end.engine.counters();
    assert_eq!((counters.rcvd_pkts, counters.rcvd_multicast_pkts), (3, 2));

    let (budget, kind) = (Budget::STANDARD, PeerKind::Standard);
    for (remote, qpn) in
        [(group(1), Qpn::MULTICAST), (group(2), Qpn::MULTICAST), (addr(2), qpns[0])]
    {
        let to = PeerAddress { local: addr(1), remote, path: 0, budget, kind };
        let ah = end.engine.create_ah(crate::common::PD, &to).unwrap();
        let to = Destination { ah, qpn, qkey: QKEY };
        let wr = SendWr::new(SendOp::SendTo { to, imm: None }, SendData::Inline(b"to all!!"));
        end.engine.post_send(qpns[1], &wr, &mut end.host).unwrap();
    }
    end.engine.poll_transmit(Time(1000), 10, &mut end.host, &mut end.out);
    let counters = end.engine.counters();
    assert_eq!((counters.sent_pkts, counters.sent_multicast_pkts), (3, 2));
}

#[test]
fn what_is_sent_to_a_group_has_its_number() {
    let (mut end, qpns, _) = ready(1);
    let (budget, kind) = (Budget::STANDARD, PeerKind::Standard);
    let to = PeerAddress { local: addr(1), remote: group(1), path: 0, budget, kind };
    let ah = end.engine.create_ah(crate::common::PD, &to).unwrap();
    let to = Destination { ah, qpn: Qpn::MULTICAST, qkey: QKEY };
    let (op, data) =
        (SendOp::SendTo { to, imm: Some([1, 2, 3, 4]) }, SendData::Inline(b"to all!!"));
    end.engine.post_send(qpns[0], &SendWr::new(op, data).wr_id(1), &mut end.host).unwrap();
    end.engine.poll_transmit(Time(1000), 10, &mut end.host, &mut end.out);
    let packet = end.out.packets.pop_front().unwrap();
    let bth = Bth::read(packet.first_chunk().unwrap());
    assert_eq!((bth.dest_qpn, bth.opcode), (Qpn::MULTICAST, Opcode::UD_SEND_ONLY_WITH_IMMEDIATE));
    assert_eq!(end.host.completed(), [(1, WcStatus::Success)]);
}
