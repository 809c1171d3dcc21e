//! A third container sends malformed, truncated, oversized and forged packets. They are dropped and
//! counted by reason, and the connection between the other two does not suffer.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rocinante::device::Backend;
use rocinante::stats::DeviceCounters;
use rocinante::verbs::{Mtu, Psn, Qpn, SendOp};
use rocinante::{Access, Qp, RecvWr, WcStatus};
use rocinante_stack::types::Pkey;
use rocinante_stack::wire::{Aeth, Bth, Opcode};
use rocinante_tests::attacker::{Attacker, packet};
use rocinante_tests::harness::{
    Family, Harness, PATIENCE, Setup, StopOnDrop, address, assert_same, pattern, wr,
};
use rocinante_tests::on_each_backend;

on_each_backend!(hostile_packets_over_ipv4, hostile_packets_over_ipv6);

fn hostile_packets_over_ipv4(backend: Backend) {
    attack(backend, Family::V4);
}

fn hostile_packets_over_ipv6(backend: Backend) {
    attack(backend, Family::V6);
}

type Count = fn(&DeviceCounters) -> u64;

/// A packet, its source, and the counter that must see it.
struct Attack {
    name: &'static str,
    src: IpAddr,
    bytes: Vec<u8>,
    count: Count,
}

/// So far from the expected PSN that traffic never gets there.
const FAR: u32 = 1 << 22;

/// Attacks on `qp`, from `own`. The peer of `qp` is `peer`.
fn attacks(attacker: &Attacker, own: IpAddr, peer: IpAddr, qp: &Qp) -> Vec<Attack> {
    let (qpn, attr) = (qp.qpn(), qp.query().1);
    let ahead = |psn: Option<Psn>| Psn::new(psn.unwrap().value().wrapping_add(FAR));
    let behind = |psn: Option<Psn>| Psn::new(psn.unwrap().value().wrapping_sub(FAR));
    let expected = ahead(attr.rq_psn);
    let bth = |opcode| Bth::new(opcode, Pkey::DEFAULT, qpn, expected);
    let send = bth(Opcode::RC_SEND_ONLY);
    let mut list = Vec::new();
    let mut add = |name, src, bytes, count: Count| list.push(Attack { name, src, bytes, count });
    let sealed = |src, bytes| attacker.sealed(src, bytes);

    for len in [0, 1, 11, 12, 15] {
        add("truncated", peer, packet(&send, 0)[..len].to_vec(), |c| c.drops.malformed);
    }
    let write = packet(&bth(Opcode::RC_RDMA_WRITE_ONLY), 0);
    add("half a RETH", peer, write[..24].to_vec(), |c| c.drops.malformed);
    let padded = Bth { pad: 3, ..send };
    let padded = sealed(peer, packet(&padded, 2));
    add("more padding than payload", peer, padded, |c| c.drops.malformed);
    for opcode in [0x15, 0x40, 0x7f, 0xa0, 0xff] {
        let bytes = sealed(peer, packet(&bth(Opcode(opcode)), 64));
        add("a reserved opcode", peer, bytes, |c| c.drops.unknown_opcode);
    }
    let mut other = packet(&send, 64);
    other[1] |= 0x01;
    add("another version", peer, sealed(peer, other), |c| c.drops.version);
    for number in [0, 0xff_ffff, qpn.value() ^ 0x5555] {
        let other = Bth::new(Opcode::RC_SEND_ONLY, Pkey::DEFAULT, Qpn::new(number), expected);
        let bytes = sealed(peer, packet(&other, 64));
        add("another QPN", peer, bytes, |c| c.drops.unknown_qpn);
    }
    let gsi = |opcode, len| {
        sealed(peer, packet(&Bth::new(opcode, Pkey::DEFAULT, Qpn::GSI, expected), len))
    };
    let request = gsi(Opcode::RC_SEND_ONLY, 256);
    add("another service to QP1", peer, request, |c| c.drops.wrong_service);
    let keyless = gsi(Opcode::UD_SEND_ONLY, 256);
    add("another Q_Key to QP1", own, attacker.sealed(own, keyless), |c| c.drops.qkey);
    for pkey in [0x0000, 0x1234, 0xfffe, 0x8001] {
        let other = Bth::new(Opcode::RC_SEND_ONLY, Pkey(pkey), qpn, expected);
        add("another P_Key", peer, sealed(peer, packet(&other, 64)), |c| c.drops.pkey);
    }
    let all_right = sealed(own, packet(&send, 64));
    add("from another address", own, all_right, |c| c.drops.wrong_source);
    let bytes = sealed(own, packet(&send, 64));
    add("sealed for another source", peer, bytes, |c| c.drops.icrc);
    let mut damaged = sealed(peer, packet(&send, 64));
    damaged[40] ^= 0x10;
    add("damaged", peer, damaged, |c| c.drops.icrc);
    add("oversized and not sealed", peer, packet(&send, 8000), |c| c.drops.icrc);
    for opcode in [Opcode::UC_SEND_ONLY, Opcode::UD_SEND_ONLY, Opcode(0x2a)] {
        let bytes = sealed(peer, packet(&bth(opcode), 64));
        add("another service", peer, bytes, |c| c.drops.wrong_service);
    }
    let ack = |psn| {
        let bth = Bth::new(Opcode::RC_ACKNOWLEDGE, Pkey::DEFAULT, qpn, psn);
        let mut bytes = packet(&bth, 0);
        Aeth::ack(1).write(&mut bytes[12..16]);
        sealed(peer, bytes)
    };
    add("an answer to nothing", peer, ack(ahead(attr.sq_psn)), |c| c.drops.ghost_response);
    let old = ack(behind(attr.sq_psn));
    add("an answer to an answered request", peer, old, |c| c.transport.duplicate_response);
    list
}

/// Each attack is repeated until its counter has seen it so often.
const TIMES: u64 = 5;

fn attack(backend: Backend, family: Family) {
    let mut setup = Setup::new(backend).family(family);
    setup.containers = 3;
    setup.connect.mtu = Some(Mtu::Mtu1024);
    let harness = Harness::new(&setup);
    let [a, b] = &harness.sides;
    let [qp, peer] = harness.pair();
    let own = address(harness.lab(), 2, family);
    let stop = AtomicBool::new(false);
    let moved = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let traffic = scope.spawn(|| traffic(&harness, &qp, &peer, &stop, &moved));
        let stop_at_the_end = StopOnDrop(&stop);
        let attacker = Attacker::new(harness.lab().container(2), b.address);
        for attack in attacks(&attacker, own, a.address, &peer) {
            let deadline = Instant::now() + PATIENCE;
            let before = (attack.count)(&b.ctx.counters());
            while (attack.count)(&b.ctx.counters()) < before + TIMES {
                assert!(!traffic.is_finished(), "{}: the connection broke", attack.name);
                assert!(Instant::now() < deadline, "{}: not counted", attack.name);
                attacker.send(attack.src, &attack.bytes);
                std::thread::sleep(Duration::from_micros(200));
            }
        }
        noise(&attacker, own, a.address, peer.qpn());
        forged_but_well_formed(&attacker, a.address, &peer);
        let before = moved.load(Ordering::Relaxed);
        while moved.load(Ordering::Relaxed) < before + 20 {
            assert!(!traffic.is_finished(), "the connection broke");
            std::thread::yield_now();
        }
        drop(stop_at_the_end);
        traffic.join().unwrap();
    });
    let (a, b) = (a.ctx.counters(), b.ctx.counters());
    println!("{a:#?} {b:#?}");
    assert_eq!(b.transport.remote_access_errors + b.transport.remote_invalid_request, 0);
    // This side was not attacked.
    assert_eq!((a.drops.malformed, a.drops.icrc, a.drops.wrong_source), (0, 0, 0));
}

/// Random bytes, and good packets with random damage, from all addresses.
fn noise(attacker: &Attacker, own: IpAddr, peer: IpAddr, qpn: Qpn) {
    let random = pattern(1 << 16, 99);
    let bth = Bth::new(Opcode::RC_RDMA_WRITE_ONLY, Pkey::DEFAULT, qpn, Psn::new(1));
    for (index, word) in random.chunks_exact(4).take(4000).enumerate() {
        let word = u32::from_le_bytes(word.try_into().unwrap()) as usize;
        let src = if index % 2 == 0 { own } else { peer };
        if index % 3 == 0 {
            let len = word % 2000;
            attacker.send(src, &random[word % 60_000..][..len]);
        } else {
            let mut bytes = attacker.sealed(src, packet(&bth, word % 1024));
            let at = (word >> 10) % bytes.len();
            bytes[at] ^= 1 << (word % 8);
            attacker.send(src, &bytes);
        }
        if index % 16 == 15 {
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}

/// An attacker that can forge the source and knows the QPN still does not know the PSN. A packet
/// far from the expected PSN causes at most one retransmission.
fn forged_but_well_formed(attacker: &Attacker, src: IpAddr, peer: &Qp) {
    for (opcode, ahead) in [
        (Opcode::RC_SEND_ONLY, 1u32 << 20),
        (Opcode::RC_RDMA_WRITE_ONLY, 1 << 21),
        (Opcode::RC_RDMA_READ_REQUEST, 1 << 20),
        (Opcode::RC_SEND_ONLY, 0u32.wrapping_sub(1 << 20)),
        (Opcode::RC_RDMA_WRITE_MIDDLE, 0u32.wrapping_sub(1 << 21)),
        (Opcode::RC_FETCH_ADD, 0u32.wrapping_sub(1 << 20)),
        (Opcode::RC_RDMA_READ_RESPONSE_ONLY, 1 << 20),
        (Opcode::RC_ATOMIC_ACKNOWLEDGE, 1 << 20),
        (Opcode(0x81), 0),
    ] {
        for _ in 0..3 {
            let now = peer.query().1.rq_psn.unwrap().value();
            let psn = Psn::new(now.wrapping_add(ahead));
            let bth = Bth::new(opcode, Pkey::DEFAULT, peer.qpn(), psn);
            let payload = opcode.info().map_or(16, |info| if info.has_payload() { 32 } else { 0 });
            attacker.send(src, &attacker.sealed(src, packet(&bth, payload)));
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// SENDs and WRITEs, with all bytes compared, until `stop` is set.
fn traffic(harness: &Harness, qp: &Qp, peer: &Qp, stop: &AtomicBool, moved: &AtomicU64) {
    const LEN: usize = 20_000;
    let [a, b] = &harness.sides;
    let source = a.pd.allocate(LEN, Access::NONE).unwrap();
    let target = b.pd.allocate(2 * LEN, Access::ALL).unwrap();
    let mut turn = 0u64;
    while !stop.load(Ordering::Relaxed) {
        let bytes = pattern(LEN, turn);
        source.write(0, &bytes);
        peer.post_recv(&[RecvWr { wr_id: turn, sges: &[target.sge(0, LEN)] }]).unwrap();
        let sges = [source.sge(0, LEN)];
        let remote = target.address() + LEN as u64;
        let write = SendOp::Write { remote, rkey: target.rkey(), imm: None };
        let list = [wr(turn, write, &sges), wr(turn, SendOp::Send { imm: None }, &sges)];
        qp.post_send(&list).unwrap();
        a.succeed(turn);
        a.succeed(turn);
        let received = b.next();
        assert_eq!((received.wr_id, received.status), (turn, WcStatus::Success));
        assert_eq!(received.byte_len as usize, LEN);
        assert_same(&target.to_vec(0, LEN), &bytes, "SEND");
        assert_same(&target.to_vec(LEN, LEN), &bytes, "WRITE");
        turn += 1;
        moved.fetch_add(1, Ordering::Relaxed);
    }
}
