//! FLUSH and ATOMIC WRITE: order, rights, ranges, duplicates and losses, on both sides.

use crate::common::{BASE, Pair, Setup, Solo, pattern, reth, sge};
use rocinante_stack::PostError;
use rocinante_stack::mem::{Access, FlushLevel, PdId, Placement, Sge};
use rocinante_stack::types::Key;
use rocinante_stack::verbs::{QpEvent, QpState, SendData, SendOp, SendWr, WcOpcode, WcStatus};
use rocinante_stack::wire::{Feth, NakCode, Opcode as Op, Packet, Reth};

const TIMEOUT_14: u64 = 4096 << 14;
const FLUSHABLE: Access = Access::ALL.with(Access::FLUSH_GLOBAL);

fn setup() -> Setup {
    Setup { access: FLUSHABLE.with(Access::FLUSH_PERSISTENT), ..Setup::script() }
}

fn flush(len: u32) -> SendOp {
    let (placement, level) = (Placement::GLOBAL, FlushLevel::Range);
    SendOp::Flush { remote: 0x9000, rkey: Key(0x99), len, placement, level }
}

const STORE: SendOp = SendOp::AtomicWrite { remote: 0x9000, rkey: Key(0x99) };

/// The bytes of a FLUSH behind the BTH.
fn flush_of(placement: u8, level: u8, va: u64, rkey: Key, len: u32) -> Vec<u8> {
    let mut bytes = vec![0; Feth::LEN];
    Feth::new(placement, level).write(&mut bytes);
    bytes.extend(reth(va, rkey, len));
    bytes
}

/// A side with an arena that may be written and flushed everywhere.
fn flushable(setup: &Setup) -> Solo {
    let mut solo = Solo::new(setup);
    solo.key = solo.end.host.register(0, setup.arena as u64, FLUSHABLE);
    solo
}

#[test]
fn a_flush_says_what_is_meant_and_has_no_data() {
    let mut solo = Solo::new(&setup());
    let both = Placement::GLOBAL.with(Placement::PERSISTENT);
    let (remote, rkey, len) = (0x1234_5678_9abc, Key(0x77), 300);
    let cases = [
        (Placement::GLOBAL, FlushLevel::Range, 0x01),
        (Placement::PERSISTENT, FlushLevel::Range, 0x02),
        (both, FlushLevel::Region, 0x13),
    ];
    for (placement, level, _) in cases {
        solo.post(1, SendOp::Flush { remote, rkey, len, placement, level }, &[]);
    }
    let packets = solo.packets();
    for (packet, (_, _, bits)) in packets.iter().zip(cases) {
        let packet = Packet::parse(packet).unwrap();
        assert_eq!((packet.bth().opcode, packet.bth().ack_req), (Op::RC_FLUSH, true));
        assert_eq!(packet.feth(), Some(Feth(bits)));
        assert_eq!(packet.reth(), Some(Reth { va: remote, rkey, len }));
        assert!(packet.payload().is_empty());
    }
    assert_eq!(packets.len(), 3);
}

#[test]
fn an_atomic_write_carries_its_eight_bytes_from_a_list_or_inline() {
    let mut solo = Solo::new(&setup());
    solo.end.host.arena[100..108].copy_from_slice(b"listlist");
    solo.post(1, STORE, &[solo.sge(100, 4), solo.sge(104, 4)]);
    solo.post_wr(&SendWr::new(STORE, SendData::Inline(b"inlineWR")).wr_id(2)).unwrap();
    for (packet, bytes) in solo.packets().iter().zip([b"listlist", b"inlineWR"]) {
        let packet = Packet::parse(packet).unwrap();
        assert_eq!((packet.bth().opcode, packet.bth().ack_req), (Op::RC_ATOMIC_WRITE, true));
        assert_eq!(packet.reth(), Some(Reth { va: 0x9000, rkey: Key(0x99), len: 8 }));
        assert_eq!(packet.payload(), bytes);
    }
    for psn in 0..2 {
        solo.receive_data(Op::RC_RDMA_READ_RESPONSE_ONLY, psn, &[]);
    }
    assert_eq!(solo.end.host.completions[0].byte_len, 8);
    assert_eq!(solo.end.host.completions[0].opcode, WcOpcode::AtomicWrite);
    assert_eq!(solo.completed(), [(1, WcStatus::Success), (2, WcStatus::Success)]);
}

#[test]
fn what_cannot_be_meant_is_not_posted() {
    let mut solo = Solo::new(&setup());
    let mut refused = |op, data| {
        let wr = SendWr::new(op, data).wr_id(1);
        solo.post_wr(&wr)
    };
    let odd = SendOp::AtomicWrite { remote: 0x9004, rkey: Key(0x99) };
    assert_eq!(refused(odd, SendData::Inline(&[0; 8])), Err(PostError::BadAtomic));
    for len in [0, 7, 9] {
        let data = SendData::Inline(&[0; 9][..len]);
        assert_eq!(refused(STORE, data), Err(PostError::BadAtomic), "{len}");
    }
    assert_eq!(refused(flush(8), SendData::Inline(&[0; 8])), Err(PostError::FlushData));
    let list = [Sge { addr: BASE, len: 1, lkey: Key(1) }];
    assert_eq!(refused(flush(8), SendData::Sges(&list)), Err(PostError::FlushData));
    assert_eq!(refused(flush(8), SendData::Inline(&[])), Ok(()));
    assert_eq!(refused(STORE, SendData::Inline(&[0; 8])), Ok(()));
}

#[test]
fn they_count_among_the_reads_that_may_be_outstanding() {
    let mut solo = Solo::new(&Setup { rd_atomic: 2, ..setup() });
    solo.post(1, flush(8), &[]);
    solo.post(2, STORE, &[solo.sge(0, 8)]);
    solo.post(3, flush(8), &[]);
    assert_eq!(solo.read(4, 8).sent(), ["FLUSH #0", "ATOMIC_WRITE #1 8B ack"]);
    assert_eq!(solo.receive_data(Op::RC_RDMA_READ_RESPONSE_ONLY, 0, &[]).sent(), ["FLUSH #2"]);
    solo.receive_data(Op::RC_RDMA_READ_RESPONSE_ONLY, 1, &[]);
    assert_eq!(solo.sent(), ["READ #3 @9000+8"]);
    solo.receive_data(Op::RC_RDMA_READ_RESPONSE_ONLY, 2, &[]);
    solo.receive_data(Op::RC_RDMA_READ_RESPONSE_ONLY, 3, &[1; 8]);
    assert_eq!(solo.completed().len(), 4);
    // None allowed: an error instead of an endless wait.
    let mut solo = Solo::new(&Setup { rd_atomic: 0, ..setup() });
    assert!(solo.post(1, flush(8), &[]).sent().is_empty());
    assert_eq!(solo.completed(), [(1, WcStatus::LocQpOpErr)]);
}

#[test]
fn what_is_fenced_waits_for_them() {
    let mut solo = Solo::new(&setup());
    solo.post(1, flush(8), &[]);
    let (op, data) = (SendOp::Send { imm: None }, SendData::Sges(&[solo.sge(0, 4)]));
    solo.post_wr(&SendWr::new(op, data).wr_id(2).fence()).unwrap();
    assert_eq!(solo.sent(), ["FLUSH #0"]);
    solo.receive_data(Op::RC_RDMA_READ_RESPONSE_ONLY, 0, &[]);
    assert_eq!(solo.sent(), ["SEND_ONLY #1 4B ack"]);
}

#[test]
fn an_acknowledgement_is_no_answer_but_a_response_answers_what_is_before_it() {
    for op in [flush(8), STORE] {
        let mut solo = Solo::new(&setup());
        let list = if op == STORE { vec![solo.sge(0, 8)] } else { vec![] };
        solo.send(1, 10);
        solo.post(2, op, &list);
        let asked = solo.sent();
        solo.receive_ack(1);
        // An implied NAK: the requests before it are acknowledged.
        assert_eq!(solo.completed(), [(1, WcStatus::Success)]);
        assert_eq!(solo.sent(), asked[1..]);
        solo.receive_data(Op::RC_RDMA_READ_RESPONSE_ONLY, 1, &[]);
        assert_eq!(solo.completed(), [(2, WcStatus::Success)]);
    }
}

#[test]
fn a_response_that_is_not_of_a_read_of_nothing_is_a_bad_response() {
    for op in [flush(8), STORE] {
        for (opcode, payload) in [
            (Op::RC_RDMA_READ_RESPONSE_ONLY, &[1; 8][..]),
            (Op::RC_RDMA_READ_RESPONSE_FIRST, &[]),
            (Op::RC_RDMA_READ_RESPONSE_LAST, &[]),
        ] {
            let mut solo = Solo::new(&setup());
            let list = if op == STORE { vec![solo.sge(0, 8)] } else { vec![] };
            solo.post(1, op, &list).sent();
            solo.receive_data(opcode, 0, payload);
            assert_eq!(solo.completed(), [(1, WcStatus::BadRespErr)], "{op:?} {opcode:?}");
        }
        let mut solo = Solo::new(&setup());
        let list = if op == STORE { vec![solo.sge(0, 8)] } else { vec![] };
        solo.post(1, op, &list).sent();
        solo.receive_found(0, 7);
        assert_eq!(solo.completed(), [(1, WcStatus::BadRespErr)], "{op:?} atomic");
    }
}

#[test]
fn a_lost_response_is_asked_for_again_and_a_refusal_ends_the_queue_pair() {
    let mut solo = Solo::new(&setup());
    assert_eq!(solo.post(1, flush(8), &[]).sent(), ["FLUSH #0"]);
    solo.wait(TIMEOUT_14);
    assert_eq!(solo.sent(), ["FLUSH #0"]);
    solo.receive_data(Op::RC_RDMA_READ_RESPONSE_ONLY, 0, &[]);
    assert_eq!(solo.completed(), [(1, WcStatus::Success)]);
    for (code, status) in [
        (NakCode::RemoteAccessError, WcStatus::RemAccessErr),
        (NakCode::InvalidRequest, WcStatus::RemInvReqErr),
    ] {
        for op in [flush(8), STORE] {
            let mut solo = Solo::new(&setup());
            let list = if op == STORE { vec![solo.sge(0, 8)] } else { vec![] };
            solo.post(1, op, &list).sent();
            assert_eq!(solo.receive_nak(0, code).completed(), [(1, status)]);
        }
    }
}

#[test]
fn a_responder_answers_each_with_a_read_response_of_nothing_in_order() {
    let mut solo = flushable(&setup());
    let to = solo.reth(64, 8);
    let whole = flush_of(1, 0, BASE, solo.key, 4096);
    solo.receive_request(Op::RC_RDMA_WRITE_ONLY, 0, &[&to, b"written!"]);
    solo.receive_request(Op::RC_FLUSH, 1, &[&whole]);
    solo.receive_request(Op::RC_ATOMIC_WRITE, 2, &[&to, b"atomical"]);
    solo.receive_request(Op::RC_RDMA_READ_REQUEST, 3, &[&to]);
    // The responses acknowledge the WRITE.
    assert_eq!(solo.sent(), ["READ_ONLY #1 0B", "READ_ONLY #2 0B", "READ_ONLY #3 8B"]);
    assert_eq!(solo.end.host.arena[64..72], *b"atomical");
    assert_eq!(solo.state(), QpState::Rts);
}

#[test]
fn a_duplicate_is_answered_and_not_executed_again() {
    let mut solo = flushable(&setup());
    let to = solo.reth(64, 8);
    let whole = flush_of(1, 0, BASE, solo.key, 4096);
    solo.receive_request(Op::RC_ATOMIC_WRITE, 0, &[&to, b"__once__"]);
    solo.receive_request(Op::RC_FLUSH, 1, &[&whole]);
    assert_eq!(solo.sent(), ["READ_ONLY #0 0B", "READ_ONLY #1 0B"]);
    // Another writer has changed the memory since.
    solo.end.host.arena[64..72].copy_from_slice(b"changed!");
    solo.receive_request(Op::RC_ATOMIC_WRITE, 0, &[&to, b"__once__"]);
    assert_eq!(solo.sent(), ["READ_ONLY #0 0B"]);
    assert_eq!(solo.end.host.arena[64..72], *b"changed!");
    assert_eq!(solo.receive_request(Op::RC_FLUSH, 1, &[&whole]).sent(), ["READ_ONLY #1 0B"]);
    // Another operation with the PSN of one of them is not its duplicate.
    solo.receive_request(Op::RC_FLUSH, 0, &[&whole]);
    solo.receive_request(Op::RC_ATOMIC_WRITE, 1, &[&to, b"__once__"]);
    assert!(solo.receive_request(Op::RC_RDMA_READ_REQUEST, 0, &[&to]).sent().is_empty());
    assert_eq!(solo.end.host.arena[64..72], *b"changed!");
    assert_eq!(solo.end.engine.drops().stale_duplicate, 3);
}

/// The NAK that a single request gets, and the event.
fn refused(setup: &Setup, opcode: Op, rest: &dyn Fn(&mut Solo) -> Vec<u8>) -> (String, QpEvent) {
    let mut solo = flushable(setup);
    let bytes = rest(&mut solo);
    solo.receive_request(opcode, 0, &[&bytes]);
    let sent = solo.sent();
    assert_eq!((sent.len(), solo.state()), (1, QpState::Err), "{opcode:?} {sent:?}");
    (sent[0].clone(), solo.event().expect("an event"))
}

#[test]
fn an_atomic_write_is_refused_for_the_reason_that_rxe_names() {
    let invalid = ("NAK #0 invalid".to_owned(), QpEvent::ReqErr);
    let access = ("NAK #0 access".to_owned(), QpEvent::AccessErr);
    let store = |setup: &Setup, header: &dyn Fn(&mut Solo) -> Vec<u8>, len: usize| {
        let rest = |solo: &mut Solo| [header(solo), vec![9; len]].concat();
        refused(setup, Op::RC_ATOMIC_WRITE, &rest)
    };
    let good = |solo: &mut Solo| solo.reth(64, 8);
    for offset in [65, 68] {
        assert_eq!(store(&setup(), &|solo| solo.reth(offset, 8), 8), invalid, "{offset}");
    }
    for (announced, len) in [(8, 7), (8, 9), (8, 0), (4, 4), (16, 16), (0, 0), (0, 8), (16, 8)] {
        let header = |solo: &mut Solo| solo.reth(64, announced);
        assert_eq!(store(&setup(), &header, len), invalid, "{announced} {len}");
    }
    let no_write = Setup { access: Access::LOCAL_WRITE.with(Access::REMOTE_READ), ..setup() };
    assert_eq!(store(&no_write, &good, 8), invalid);
    let none = Setup { dest_rd_atomic: Some(0), ..setup() };
    assert_eq!(store(&none, &good, 8), invalid);
    let end = setup().arena as u64;
    let read_only = |solo: &mut Solo| {
        let key = solo.end.host.register(0, 4096, Access::LOCAL_WRITE.with(Access::REMOTE_READ));
        reth(BASE, key, 8)
    };
    let foreign =
        |solo: &mut Solo| reth(BASE, solo.end.host.register_in(PdId(2), 0, 4096, FLUSHABLE), 8);
    // Aligned for the peer, but not in the process.
    let askew = |solo: &mut Solo| reth(BASE + 8, solo.end.host.register_at(4, 8, 64, FLUSHABLE), 8);
    assert_eq!(store(&setup(), &|solo| solo.reth(end, 8), 8), access);
    assert_eq!(store(&setup(), &|_| reth(BASE, Key(0xdead), 8), 8), access);
    assert_eq!(store(&setup(), &read_only, 8), access);
    assert_eq!(store(&setup(), &foreign, 8), access);
    assert_eq!(store(&setup(), &askew, 8), access);
}

#[test]
fn a_flush_is_refused_for_the_reason_that_rxe_names() {
    let invalid = ("NAK #0 invalid".to_owned(), QpEvent::ReqErr);
    let access = ("NAK #0 access".to_owned(), QpEvent::AccessErr);
    let flush =
        |setup: &Setup, rest: &dyn Fn(&mut Solo) -> Vec<u8>| refused(setup, Op::RC_FLUSH, rest);
    // The request asks for nothing or for something unknown, or at an unknown level.
    for (placement, level) in [(0, 0), (4, 0), (5, 0), (8, 1), (1, 2), (1, 3)] {
        let odd = |solo: &mut Solo| flush_of(placement, level, BASE, solo.key, 8);
        assert_eq!(flush(&setup(), &odd), invalid, "{placement} {level}");
    }
    let payload = |solo: &mut Solo| [flush_of(1, 0, BASE, solo.key, 8), vec![1; 8]].concat();
    assert_eq!(flush(&setup(), &payload), invalid);
    let endless = |solo: &mut Solo| flush_of(1, 0, BASE, solo.key, 0x8000_0001);
    assert_eq!(flush(&setup(), &endless), invalid);
    // The queue pair does not permit it: each placement has its own right.
    let good = |placement| move |solo: &mut Solo| flush_of(placement, 0, BASE, solo.key, 8);
    let plain = Setup { access: Access::ALL, ..setup() };
    let global = Setup { access: FLUSHABLE, ..setup() };
    let persistent = Setup { access: Access::ALL.with(Access::FLUSH_PERSISTENT), ..setup() };
    for (setup, placements) in
        [(&plain, &[1, 2, 3][..]), (&global, &[2, 3]), (&persistent, &[1, 3])]
    {
        for placement in placements {
            assert_eq!(flush(setup, &good(*placement)), invalid, "{placement}");
        }
    }
    let none = Setup { dest_rd_atomic: Some(0), ..setup() };
    assert_eq!(flush(&none, &good(1)), invalid);
    // The region does not permit it, or the range is outside it, or no region has the key. And no
    // memory is persistent.
    for placement in [1, 2, 3] {
        let plain = |solo: &mut Solo| {
            let key = solo.end.host.register(0, 4096, Access::ALL);
            flush_of(placement, 0, BASE, key, 8)
        };
        assert_eq!(flush(&setup(), &plain), access);
    }
    let vouched = |solo: &mut Solo| {
        let key = solo.end.host.register(0, 4096, FLUSHABLE.with(Access::FLUSH_PERSISTENT));
        flush_of(3, 0, BASE, key, 8)
    };
    assert_eq!(flush(&setup(), &vouched), access);
    let end = setup().arena as u32;
    assert_eq!(flush(&setup(), &|solo| flush_of(1, 0, BASE, solo.key, end + 1)), access);
    assert_eq!(flush(&setup(), &|solo| flush_of(1, 0, BASE - 1, solo.key, 8)), access);
    for level in [0, 1] {
        assert_eq!(flush(&setup(), &|_| flush_of(1, level, BASE, Key(0xdead), 8)), access);
        let foreign = |solo: &mut Solo| {
            let key = solo.end.host.register_in(PdId(2), 0, 4096, FLUSHABLE);
            flush_of(1, level, BASE, key, 8)
        };
        assert_eq!(flush(&setup(), &foreign), access);
    }
}

#[test]
fn a_whole_region_is_meant_whatever_range_is_named() {
    let mut solo = flushable(&setup());
    let key = solo.key;
    for (psn, va, len) in [(0, BASE, 8), (1, 0, 0), (2, u64::MAX, 0x8000_0000)] {
        solo.receive_request(Op::RC_FLUSH, psn, &[&flush_of(1, 1, va, key, len)]);
        assert_eq!(solo.sent(), [format!("READ_ONLY #{psn} 0B")]);
    }
    // An empty range is a range too.
    solo.receive_request(Op::RC_FLUSH, 3, &[&flush_of(1, 0, BASE, key, 0)]);
    assert_eq!(solo.sent(), ["READ_ONLY #3 0B"]);
}

#[test]
fn they_do_not_interrupt_a_message() {
    for opcode in [Op::RC_FLUSH, Op::RC_ATOMIC_WRITE] {
        let mut solo = flushable(&setup());
        solo.receive_request(Op::RC_RDMA_WRITE_FIRST, 0, &[&solo.reth(0, 1024), &[7; 256]]);
        let (store, whole) = (solo.reth(64, 8), flush_of(1, 0, BASE, solo.key, 8));
        let rest: &[&[u8]] = if opcode == Op::RC_FLUSH { &[&whole] } else { &[&store, &[1; 8]] };
        solo.sent();
        assert_eq!(solo.receive_request(opcode, 1, rest).sent(), ["NAK #1 invalid"], "{opcode:?}");
    }
}

#[test]
fn more_flushes_than_were_announced_are_asked_for_again_later() {
    // Linux rxe sends them so, because it does not count FLUSHes.
    let mut solo = flushable(&Setup { dest_rd_atomic: Some(2), ..setup() });
    let whole = flush_of(1, 0, BASE, solo.key, 8);
    for psn in 0..4 {
        solo.receive_request(Op::RC_FLUSH, psn, &[&whole]);
    }
    assert_eq!(solo.sent(), ["READ_ONLY #0 0B", "READ_ONLY #1 0B", "RNR #2 timer 12"]);
    for psn in 2..4 {
        solo.receive_request(Op::RC_FLUSH, psn, &[&whole]);
    }
    assert_eq!(solo.sent(), ["READ_ONLY #2 0B", "READ_ONLY #3 0B"]);
    // It does count ATOMIC WRITEs.
    let store = solo.reth(64, 8);
    for psn in 4..7 {
        solo.receive_request(Op::RC_ATOMIC_WRITE, psn, &[&store, &[1; 8]]);
    }
    assert_eq!(solo.sent().last().unwrap(), "NAK #6 invalid");
}

#[test]
fn both_ends_agree_also_when_every_third_packet_is_lost() {
    for lossy in [false, true] {
        let mut pair = Pair::new(&Setup { depth: 256, ..setup() });
        let arena = pair.ends[1].host.arena.len() as u64;
        let local = pair.ends[0].host.register(0, arena, Access::ALL);
        let rkey = pair.ends[1].host.register(0, arena, FLUSHABLE);
        let mut count = 0;
        pair.pass = Box::new(move |_, _| {
            count += 1;
            !lossy || count % 3 != 0
        });
        let data = pattern(600, 5);
        pair.ends[0].host.arena[..600].copy_from_slice(&data);
        let (placement, len) = (Placement::GLOBAL, 600);
        for round in 0..20u64 {
            let remote = BASE + round * 1024;
            pair.send(
                0,
                3 * round,
                SendOp::Write { remote, rkey, imm: None },
                &[sge(0, 600, local)],
            );
            let level = if round % 2 == 0 { FlushLevel::Range } else { FlushLevel::Region };
            pair.send(0, 3 * round + 1, SendOp::Flush { remote, rkey, len, placement, level }, &[]);
            let store = SendOp::AtomicWrite { remote: BASE + 32_768, rkey };
            pair.send(0, 3 * round + 2, store, &[sge(8 * round, 8, local)]);
        }
        pair.run();
        let done = pair.completions(0);
        assert!(done.iter().all(|cqe| cqe.status == WcStatus::Success), "{done:?}");
        assert!(done.iter().map(|cqe| cqe.wr_id).eq(0..60));
        assert_eq!(done[1].opcode, WcOpcode::Flush);
        let there = &pair.ends[1].host.arena;
        assert!((0..20).all(|round| there[round * 1024..][..600] == data));
        assert_eq!(there[32_768..][..8], data[152..160]);
    }
}
