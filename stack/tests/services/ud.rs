//! Unreliable datagrams: any sender reaches any queue pair that has the Q_Key and a receive.

use std::net::IpAddr;

use crate::common::{BASE, End, PORT, QKEY, Setup, addr, pattern, sge, steps, to};
use rocinante_stack::mem::{Access, PdId};
use rocinante_stack::types::{Key, Mtu, Pkey, Psn, Qpn, Time};
use rocinante_stack::verbs::{
    AhId, Cqe, Destination, QpEvent, QpState, QpType, RecvWr, SendData, SendOp, SendWr, Sender,
    WcOpcode, WcStatus,
};
use rocinante_stack::wire::icrc::{DF, IpFields, Template};
use rocinante_stack::wire::{Bth, Deth, ICRC_LEN, Opcode, bth};
use rocinante_stack::{
    Budget, Datagram, IpId, PeerAddress, PeerKind, PostError, QpAttr, grh_addresses,
};

fn ud() -> Setup {
    Setup { qp_type: QpType::Ud, ..Setup::default() }
}

/// An end with a ready queue pair, and the key of its arena.
fn ready(n: u8) -> (End, Key) {
    let setup = ud();
    let mut end = End::new(n, &setup);
    end.connect(end.qpn, 0, Qpn::default(), &setup);
    let key = end.host.register(0, setup.arena as u64, Access::ALL);
    (end, key)
}

fn peer(end: &End, remote: IpAddr) -> PeerAddress {
    let (budget, kind) = (Budget::STANDARD, PeerKind::Standard);
    PeerAddress { local: end.addr, remote, path: 0, budget, kind }
}

fn handle(end: &mut End, remote: IpAddr) -> AhId {
    let to = peer(end, remote);
    end.engine.create_ah(crate::common::PD, &to).unwrap()
}

fn post(end: &mut End, wr_id: u64, op: SendOp, data: SendData<'_>) -> Result<(), PostError> {
    let wr = SendWr::new(op, data).wr_id(wr_id);
    end.engine.post_send(end.qpn, &wr, &mut end.host)
}

fn recv(end: &mut End, wr_id: u64, list: &[rocinante_stack::mem::Sge]) {
    end.engine.post_recv(end.qpn, &RecvWr { wr_id, sges: list }, &mut end.host).unwrap();
}

/// The packets that an end sends now.
fn packets(end: &mut End) -> Vec<Vec<u8>> {
    end.engine.poll_transmit(Time(1000), 1000, &mut end.host, &mut end.out);
    end.out.packets.drain(..).collect()
}

/// Delivers a sealed packet.
fn receive(end: &mut End, src: IpAddr, packet: &[u8]) {
    let ip_id = IpId::Exact { id: 0, flags: DF };
    let (dst, src_port) = (end.addr, PORT);
    let datagram =
        Datagram { bytes: packet, src, dst, src_port, ip_id, tos: 0x69, hop_limit: Some(63) };
    end.engine.handle_datagram(Time(1000), &datagram, &mut end.host);
}

/// A datagram from an unknown sender at `src` to the queue pair.
fn made(end: &End, src: IpAddr, deth: Deth, payload: &[u8]) -> Vec<u8> {
    let mut header = Bth::new(Opcode::UD_SEND_ONLY, Pkey::DEFAULT, end.qpn, Psn::new(0x77));
    header.pad = (payload.len().next_multiple_of(4) - payload.len()) as u8;
    let mut packet = header.bytes().to_vec();
    packet.resize(bth::LEN + Deth::LEN, 0);
    deth.write(&mut packet[bth::LEN..]);
    packet.extend_from_slice(payload);
    packet.resize(packet.len() + usize::from(header.pad) + ICRC_LEN, 0);
    crate::common::template(src, end.addr).seal(&mut packet);
    packet
}

fn from(src_qpn: u32) -> Deth {
    Deth { qkey: QKEY, reserved: 0, src_qpn: Qpn::new(src_qpn) }
}

fn grh(end: &End, offset: usize) -> [u8; 40] {
    end.host.arena[offset..offset + 40].try_into().unwrap()
}

#[test]
fn a_datagram_arrives_behind_its_ip_header_and_says_who_sent_it() {
    let ((mut a, key_a), (mut b, key_b)) = (ready(1), ready(2));
    let to = Destination { ah: handle(&mut a, addr(2)), qpn: b.qpn, qkey: QKEY };
    for (wr_id, len) in [0usize, 1, 5, 1023, 1024].into_iter().enumerate() {
        let imm = (len % 2 == 1).then_some([9, 8, 7, 6]);
        let data = pattern(len, wr_id as u8);
        a.host.arena[..len].copy_from_slice(&data);
        b.host.arena.fill(0xee);
        // Header and payload need no list elements of their own.
        recv(&mut b, 50 + wr_id as u64, &[sge(0, 10, key_b), sge(100, 1054, key_b)]);
        let list = [sge(0, len as u32, key_a)];
        let wr_id = wr_id as u64;
        post(&mut a, wr_id, SendOp::SendTo { to, imm }, SendData::Sges(&list)).unwrap();
        let sent = packets(&mut a);
        assert_eq!(sent.len(), 1);
        assert_eq!(a.host.completed(), [(wr_id, WcStatus::Success)]);
        receive(&mut b, addr(1), &sent[0]);
        let expected = Cqe {
            wr_id: 50 + wr_id,
            status: WcStatus::Success,
            opcode: WcOpcode::Recv,
            byte_len: 40 + len as u32,
            imm,
            invalidated: None,
            qpn: b.qpn,
            context: 0,
            sender: Some(Sender { qpn: a.qpn, ipv4: true }),
            solicited: false,
        };
        assert_eq!(std::mem::take(&mut b.host.completions), [expected]);
        let mut placed = b.host.arena[..10].to_vec();
        placed.extend_from_slice(&b.host.arena[100..130 + len]);
        assert_eq!(placed[40..], data);
        let header: [u8; 40] = placed[..40].try_into().unwrap();
        let total = (20 + 8 + sent[0].len() as u16).to_be_bytes();
        assert_eq!(header[..20], [0; 20]);
        assert_eq!(header[20..30], [0x45, 0x69, total[0], total[1], 0, 0, 0x40, 0, 63, 17]);
        assert_eq!(header[32..], [10, 0, 0, 1, 10, 0, 0, 2]);
        assert_eq!(grh_addresses(&header), Some((addr(1), addr(2))));
        assert_eq!(b.host.arena[130 + len], 0xee);
    }
    assert!(packets(&mut b).is_empty());
    assert_eq!((a.host.sends_retired, b.host.recvs_retired), (5, 5));
}

#[test]
fn over_ipv6_the_header_fills_the_area() {
    let (mut end, key) = ready(1);
    let [src, dst] =
        [IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, 9]), [0xfd00, 0, 0, 0, 0, 0, 0, 1].into()];
    recv(&mut end, 1, &[sge(0, 100, key)]);
    let mut packet = made(&end, addr(2), from(0x99), &[7; 6]);
    let (IpAddr::V6(src6), IpAddr::V6(dst6)) = (src, dst) else { panic!("IPv6 here") };
    Template::new(&IpFields::V6 { src: src6, dst: dst6 }, PORT).seal(&mut packet);
    let (ip_id, hop_limit) = (IpId::None, None);
    let datagram =
        Datagram { bytes: &packet, src, dst, src_port: PORT, ip_id, tos: 0x69, hop_limit };
    end.engine.handle_datagram(Time(1), &datagram, &mut end.host);
    assert_eq!(end.host.completions[0].sender, Some(Sender { qpn: Qpn::new(0x99), ipv4: false }));
    assert_eq!(end.host.completed(), [(1, WcStatus::Success)]);
    let grh = grh(&end, 0);
    let len = (8 + packet.len() as u16).to_be_bytes();
    assert_eq!(grh[..8], [0x66, 0x90, 0, 0, len[0], len[1], 17, 64]);
    assert_eq!(grh_addresses(&grh), Some((src, dst)));
    assert_eq!(end.host.arena[40..46], [7; 6]);
}

#[test]
fn forty_bytes_that_are_no_header_name_nobody() {
    for grh in [[0; 40], [0xff; 40], [0x45; 40]] {
        assert_eq!(grh_addresses(&grh), None);
    }
}

#[test]
fn what_lies_before_an_ipv4_header_does_not_matter() {
    let (mut end, key) = ready(1);
    recv(&mut end, 1, &[sge(0, 100, key)]);
    let packet = made(&end, addr(2), from(0x99), &[7; 6]);
    let ip_id = IpId::Exact { id: 0, flags: 0x4000 };
    let (src, dst) = (addr(2), addr(1));
    let datagram =
        Datagram { bytes: &packet, src, dst, src_port: PORT, ip_id, tos: 0, hop_limit: None };
    end.engine.handle_datagram(Time(1), &datagram, &mut end.host);
    let mut grh = grh(&end, 0);
    // Hardware leaves the earlier contents in the bytes before the IPv4 header.
    grh[0] = 0x60;
    assert_eq!(grh_addresses(&grh), Some((src, dst)));
    // Soft-RoCE has zeros there, and no checksum in packets that stay on the machine.
    grh[..20].fill(0);
    grh[30..32].fill(0);
    assert_eq!(grh_addresses(&grh), Some((src, dst)));
    grh[0] = 0x60;
    assert_ne!(grh_addresses(&grh), Some((src, dst)), "that would be IPv6");
}

#[test]
fn a_controlled_q_key_is_the_queue_pairs_own() {
    let (mut end, _) = ready(1);
    let ah = handle(&mut end, addr(2));
    for (asked, sent) in [(5, 5), (0x7fff_ffff, 0x7fff_ffff), (0x8000_0000, QKEY), (u32::MAX, QKEY)]
    {
        let to = Destination { ah, qpn: Qpn::new(0x55), qkey: asked };
        post(&mut end, 1, SendOp::SendTo { to, imm: None }, SendData::Inline(&[1])).unwrap();
        let packet = packets(&mut end).remove(0);
        let deth = Deth::read(&packet[bth::LEN..]);
        assert_eq!((deth.qkey, deth.src_qpn, deth.reserved), (sent, end.qpn, 0));
        assert_eq!(Bth::read(packet.first_chunk().unwrap()).dest_qpn, Qpn::new(0x55));
        assert_eq!(packet[8], 0, "AckReq");
    }
    // The Q_Key may change while it sends.
    let qpn = end.qpn;
    end.modify(qpn, &QpAttr { qkey: Some(0x8001_0000), ..QpAttr::default() }).unwrap();
    let to = Destination { ah, qpn: Qpn::GSI, qkey: 0x8001_0000 };
    post(&mut end, 1, SendOp::SendTo { to, imm: None }, SendData::Inline(&[1])).unwrap();
    assert_eq!(Deth::read(&packets(&mut end)[0][bth::LEN..]).qkey, 0x8001_0000);
}

#[test]
fn what_cannot_be_taken_is_dropped_and_counted_and_touches_no_receive() {
    let (mut end, key) = ready(1);
    let datagram = |end: &End, deth, len| made(end, addr(2), deth, &pattern(len, 1));
    let packet = datagram(&end, from(9), 10);
    receive(&mut end, addr(2), &packet);
    assert_eq!(end.engine.drops().no_receive, 1);
    recv(&mut end, 1, &[sge(0, 50, key)]);
    for qkey in [0, QKEY ^ 1, 0x8001_0000] {
        let packet = datagram(&end, Deth { qkey, ..from(9) }, 10);
        receive(&mut end, addr(2), &packet);
    }
    assert_eq!(end.engine.drops().qkey, 3);
    let packet = datagram(&end, from(9), 11);
    receive(&mut end, addr(2), &packet);
    assert_eq!(end.engine.drops().too_long, 1);
    // To another address, and damaged: a CRC is right for one source only.
    let mut packet = datagram(&end, from(9), 10);
    receive(&mut end, addr(3), &packet);
    packet[30] ^= 4;
    receive(&mut end, addr(2), &packet);
    assert_eq!(end.engine.drops().icrc, 2);
    packet[30] ^= 4;
    packet[2] = 0;
    crate::common::template(addr(2), addr(1)).seal(&mut packet);
    receive(&mut end, addr(2), &packet);
    assert_eq!(end.engine.drops().pkey, 1);
    assert!(end.host.arena.iter().all(|byte| *byte == 0) && end.host.completed().is_empty());
    let packet = datagram(&end, from(9), 10);
    receive(&mut end, addr(2), &packet);
    assert_eq!(end.host.completed(), [(1, WcStatus::Success)]);
    assert_eq!(end.state(end.qpn), QpState::Rts);
    assert!(packets(&mut end).is_empty());
}

#[test]
fn anybody_may_send() {
    let (mut end, key) = ready(1);
    // More senders than are remembered, twice.
    for round in 0..2u64 {
        for n in 2..=250u8 {
            let wr_id = round << 8 | u64::from(n);
            recv(&mut end, wr_id, &[sge(0, 60, key)]);
            let packet = made(&end, addr(n), from(n.into()), &[n; 20]);
            receive(&mut end, addr(n), &packet);
            let cqe = end.host.completions.pop().expect("a datagram");
            let sender = Sender { qpn: Qpn::new(n.into()), ipv4: true };
            assert_eq!((cqe.wr_id, cqe.sender), (wr_id, Some(sender)));
            assert_eq!(end.host.arena[40..60], [n; 20]);
            assert_eq!(grh_addresses(&grh(&end, 0)), Some((addr(n), addr(1))));
        }
    }
    assert_eq!(end.engine.drops().icrc, 0);
}

#[test]
fn an_identification_that_nobody_sees_is_solved_for_strangers_too() {
    let (mut end, key) = ready(1);
    let (IpAddr::V4(src), IpAddr::V4(dst)) = (addr(2), addr(1)) else { panic!("IPv4 here") };
    for id in [40_000, 40_001, 40_007] {
        recv(&mut end, 1, &[sge(0, 60, key)]);
        let mut packet = made(&end, addr(2), from(2), &[3; 8]);
        Template::new(&IpFields::V4 { src, dst, id, flags: DF }, PORT).seal(&mut packet);
        let (src, dst, hop_limit) = (addr(2), addr(1), None);
        let ip_id = IpId::Hint(0);
        let datagram =
            Datagram { bytes: &packet, src, dst, src_port: PORT, ip_id, tos: 0, hop_limit };
        end.engine.handle_datagram(Time(1), &datagram, &mut end.host);
        assert_eq!(end.host.completed(), [(1, WcStatus::Success)]);
    }
    assert_eq!(end.engine.counters().icrc_id_solved, 3);
}

#[test]
fn what_is_not_a_datagram_cannot_be_posted() {
    let (mut end, key) = ready(1);
    let to = Destination { ah: handle(&mut end, addr(2)), qpn: Qpn::new(5), qkey: QKEY };
    let (remote, rkey) = (BASE, Key(9));
    for op in [
        SendOp::Send { imm: None },
        SendOp::Write { remote, rkey, imm: None },
        SendOp::Read { remote, rkey },
        SendOp::FetchAdd { remote, rkey, add: 1 },
    ] {
        let list = [sge(0, 8, key)];
        assert_eq!(post(&mut end, 1, op, SendData::Sges(&list)), Err(PostError::Operation));
    }
    // The longest datagram is the port's path MTU.
    for (len, result) in [(1024, Ok(())), (1025, Err(PostError::BeyondMtu))] {
        let list = [sge(0, len, key)];
        let op = SendOp::SendTo { to, imm: None };
        assert_eq!(post(&mut end, 2, op, SendData::Sges(&list)), result);
    }
    assert_eq!(packets(&mut end).len(), 1);
}

#[test]
fn a_handle_that_is_gone_or_anothers_stops_the_sends() {
    let (mut end, _) = ready(1);
    let gone = handle(&mut end, addr(2));
    assert!(end.engine.destroy_ah(gone) && !end.engine.destroy_ah(gone));
    let to = peer(&end, addr(3));
    let foreign = end.engine.create_ah(PdId(77), &to).unwrap();
    let good = handle(&mut end, addr(4));
    let qpn = end.qpn;
    for bad in [gone, foreign, AhId(u32::MAX)] {
        for (wr_id, ah) in [(1, good), (2, bad), (3, good)] {
            let to = Destination { ah, qpn: Qpn::new(9), qkey: 1 };
            post(&mut end, wr_id, SendOp::SendTo { to, imm: None }, SendData::Inline(&[1]))
                .unwrap();
        }
        assert_eq!(packets(&mut end).len(), 1);
        let failed = [(1, WcStatus::Success), (2, WcStatus::LocProtErr), (3, WcStatus::WrFlushErr)];
        assert_eq!(end.host.completed(), failed);
        assert_eq!(end.state(qpn), QpState::Sqe);
        end.modify(qpn, &crate::common::to(QpState::Rts)).unwrap();
    }
}

#[test]
fn a_receive_whose_memory_is_gone_breaks_the_queue_pair() {
    let (mut end, key) = ready(1);
    recv(&mut end, 1, &[sge(0, 40, key), sge(0, 40, Key(0x4242_4242))]);
    recv(&mut end, 2, &[]);
    let packet = made(&end, addr(2), from(9), &[1]);
    receive(&mut end, addr(2), &packet);
    assert_eq!(end.host.completed(), [(1, WcStatus::LocProtErr), (2, WcStatus::WrFlushErr)]);
    assert_eq!(end.state(end.qpn), QpState::Err);
    receive(&mut end, addr(2), &packet);
    assert_eq!(end.engine.drops().unknown_qpn, 1);
}

#[test]
fn a_state_is_left_with_the_attributes_of_the_manual() {
    let setup = ud();
    let mut end = End::new(1, &setup);
    let qpn = end.qpn;
    let [init, rtr, rts] = steps(0, addr(1), Qpn::default(), &setup);
    assert!(end.modify(qpn, &QpAttr { qkey: None, ..init }).is_err());
    assert!(end.modify(qpn, &QpAttr { access: Some(Access::NONE), ..init }).is_err());
    end.modify(qpn, &init).unwrap();
    assert!(end.modify(qpn, &QpAttr { peer: Some(peer(&end, addr(2))), ..rtr }).is_err());
    end.modify(qpn, &rtr).unwrap();
    let key = end.host.register(0, 4096, Access::ALL);
    recv(&mut end, 1, &[sge(0, 60, key)]);
    let packet = made(&end, addr(2), from(9), &[1]);
    receive(&mut end, addr(2), &packet);
    assert_eq!(end.host.completed(), [(1, WcStatus::Success)]);
    assert_eq!(end.engine.poll_event(), Some((qpn, QpEvent::CommEst)));
    end.modify(qpn, &rts).unwrap();
    let (state, attr, init) = end.engine.query_qp(qpn).unwrap();
    assert_eq!((state, attr.qkey, attr.rq_psn), (QpState::Rts, Some(QKEY), None));
    assert_eq!((attr.sq_psn, init.qp_type), (rts.sq_psn, QpType::Ud));
    end.modify(qpn, &to(QpState::Reset)).unwrap();
    end.connect(qpn, 0, Qpn::default(), &setup);
    assert_eq!(end.state(qpn), QpState::Rts);
}

/// Random bytes with a right CRC: nothing panics, and only whole datagrams are placed.
#[test]
fn hostile_bytes_do_no_harm() {
    let setup = Setup { mtu: Mtu::Mtu256, ..ud() };
    let mut ends = [QpType::Ud, QpType::Uc].map(|qp_type| {
        let setup = Setup { qp_type, ..setup.clone() };
        let mut end = End::new(1, &setup);
        end.connect(end.qpn, 0, Qpn::new(0x77), &setup);
        let key = end.host.register(0, 4096, Access::ALL);
        (end, key)
    });
    let mut random = fastrand::Rng::with_seed(1);
    let mut random = || random.u64(..);
    for round in 0..60_000 {
        let (end, key) = &mut ends[round % 2];
        if round % 7 < 2 {
            let wr = RecvWr { wr_id: 1, sges: &[sge(0, 250 + random() as u32 % 150, *key)] };
            let _ = end.engine.post_recv(end.qpn, &wr, &mut end.host);
        }
        let mut packet: Vec<u8> = (0..random() % 330).map(|_| random() as u8).collect();
        let opcodes = [0x20u8, 0x21, 0x22, 0x23, 0x24, 0x25, 0x26, 0x27, 0x28, 0x29, 0x2a, 0x2b];
        if packet.len() >= 28 {
            let opcode = opcodes[random() as usize % 12];
            let uc = round % 2 == 1;
            packet[0] = if uc { opcode } else { 0x64 + (random() % 2) as u8 };
            packet[1] &= 0x30;
            packet[2..5].copy_from_slice(&[0xff, 0xff, 0]);
            packet[5..8].copy_from_slice(&end.qpn.value().to_be_bytes()[1..]);
            if uc {
                // Mostly the expected PSN.
                let expected = end.engine.query_qp(end.qpn).unwrap().1.rq_psn.unwrap().value();
                let psn = expected.wrapping_add([0, 0, 0, 1, 2, 9, u32::MAX, 5000][round / 2 % 8]);
                packet[9..12].copy_from_slice(&psn.to_be_bytes()[1..]);
            } else if random() % 4 > 0 {
                packet[12..16].copy_from_slice(&QKEY.to_be_bytes());
            }
            if uc && random() % 2 == 0 {
                packet[12..20].copy_from_slice(&(BASE + random() % 5000).to_be_bytes());
                packet[20..24].copy_from_slice(&key.0.to_be_bytes());
            }
            crate::common::template(addr(2), addr(1)).seal(&mut packet);
        }
        receive(end, addr(2), &packet);
        assert!(packets(end).is_empty());
    }
    for (end, _) in &mut ends {
        let done = end.host.completed();
        assert!(done.iter().all(|(_, status)| *status == WcStatus::Success));
        assert!(done.len() > 100, "{} completions", done.len());
        assert!(end.host.arena[4096..].iter().all(|byte| *byte == 0));
        assert_eq!(end.state(end.qpn), QpState::Rts);
    }
}

#[test]
fn a_sink_without_room_loses_nothing() {
    let (mut end, _) = ready(1);
    let to = Destination { ah: handle(&mut end, addr(2)), qpn: Qpn::new(5), qkey: QKEY };
    for wr_id in 0..5 {
        post(&mut end, wr_id, SendOp::SendTo { to, imm: None }, SendData::Inline(&[1])).unwrap();
    }
    end.out.room = 2;
    let mut psns = Vec::new();
    for expected in [2, 2, 1, 0] {
        let sent = packets(&mut end);
        assert_eq!(sent.len(), expected);
        psns.extend(sent.iter().map(|packet| packet[11]));
    }
    assert_eq!(psns, [0xfa, 0xfb, 0xfc, 0xfd, 0xfe]);
    assert_eq!(end.host.completed().len(), 5);
}
