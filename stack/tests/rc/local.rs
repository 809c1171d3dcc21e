//! Our own requests: lists, inline data, local errors and their order, requests that cannot be
//! posted.

use crate::common::{BASE, Pair, Setup, Solo, pattern, sge};
use rocinante_stack::PostError;
use rocinante_stack::mem::{Access, PdId, Sge};
use rocinante_stack::types::Key;
use rocinante_stack::verbs::{QpState, RecvWr, SendData, SendOp, SendWr, WcStatus};
use rocinante_stack::wire::NakCode;

const SEND: SendOp = SendOp::Send { imm: None };

fn wr<'a>(wr_id: u64, op: SendOp, data: SendData<'a>) -> SendWr<'a> {
    SendWr::new(op, data).wr_id(wr_id)
}

#[test]
fn lists_are_gathered_and_scattered_at_any_border() {
    for (lengths, room) in [
        ([1, 255, 256, 700], [700, 0, 500, 12]),
        ([0, 0, 1000, 0], [256, 256, 256, 232]),
        ([300, 300, 300, 300], [1, 1, 1, 1197]),
    ] {
        let mut pair = Pair::new(&Setup::script());
        let keys = pair.register();
        let lay = |lengths: [u32; 4], key| {
            let mut at = 0;
            lengths.map(|len| {
                let element = sge(at, len, key);
                at += u64::from(len) + 13;
                element
            })
        };
        let (from, to) = (lay(lengths, keys[0]), lay(room, keys[1]));
        let data = pattern(4096, 5);
        pair.ends[0].host.arena[..4096].copy_from_slice(&data);
        pair.recv(1, 1, &to);
        pair.send(0, 1, SEND, &from);
        // Reads it back from the other side, into a list as well.
        pair.run();
        let total: u32 = lengths.iter().sum();
        assert_eq!(pair.completions(1)[0].byte_len, total);
        let bytes = |list: &[Sge], arena: &[u8]| -> Vec<u8> {
            let part = |s: &Sge| arena[(s.addr - BASE) as usize..][..s.len as usize].to_vec();
            list.iter().flat_map(part).collect()
        };
        let sent = bytes(&from, &pair.ends[0].host.arena);
        let received = bytes(&to, &pair.ends[1].host.arena);
        assert_eq!(received[..total as usize], sent[..]);
        assert!(received[total as usize..].iter().all(|byte| *byte == 0));

        let back = lay(room, keys[0]).map(|s| Sge { addr: s.addr + 8192, ..s });
        let read: u32 = room.iter().sum();
        pair.ends[1].host.arena[20_000..20_000 + read as usize]
            .copy_from_slice(&data[..read as usize]);
        pair.send(0, 2, SendOp::Read { remote: BASE + 20_000, rkey: keys[1] }, &back);
        pair.run();
        assert_eq!(bytes(&back, &pair.ends[0].host.arena), data[..read as usize]);
    }
}

#[test]
fn inline_data_is_copied_when_posted() {
    let mut solo = Solo::script();
    let mut bytes = [7u8; 64];
    let op = SendOp::Write { remote: 0x9000, rkey: Key(1), imm: None };
    solo.post_wr(&wr(1, op, SendData::Inline(&bytes))).unwrap();
    bytes.fill(9);
    solo.post_wr(&wr(2, SEND, SendData::Inline(&bytes[..3]))).unwrap();
    let packets = solo.packets();
    assert_eq!(packets[0][28..92], [7; 64]);
    assert_eq!(packets[1][12..15], [9; 3]);
    // No region is involved: it works without any, also in a retransmission.
    solo.end.host.regions.remove(solo.key);
    solo.wait(4096 << 14);
    assert_eq!(solo.packets().len(), 2);
}

#[test]
fn the_completion_frees_the_place_not_the_sending() {
    let mut solo = Solo::new(&Setup { depth: 2, ..Setup::script() });
    assert_eq!(solo.sends(1..=2, 8).sent().len(), 2);
    assert_eq!(solo.post_wr(&wr(1, SEND, SendData::Sges(&[]))), Err(PostError::Full));
    solo.receive_ack(0);
    solo.send(3, 8);
}

#[test]
fn a_queue_pair_without_queues_can_only_be_connected() {
    let mut solo = Solo::new(&Setup { depth: 0, ..Setup::script() });
    assert_eq!(solo.post_wr(&wr(1, SEND, SendData::Sges(&[]))), Err(PostError::Full));
    assert_eq!(solo.try_recv(1, &[]), Err(PostError::Full));
    let header = solo.reth(0, 4);
    solo.receive_request(rocinante_stack::wire::Opcode::RC_RDMA_WRITE_ONLY, 0, &[&header, &[1; 4]]);
    solo.receive_request(rocinante_stack::wire::Opcode::RC_SEND_ONLY, 1, &[]);
    assert_eq!(solo.sent(), ["RNR #1 timer 12"]);
    assert!(!solo.end.engine.uses_key(solo.key));
}

/// Every list that names memory that is not ours, for reading or, if `write`, for writing.
fn bad_lists(solo: &mut Solo, write: bool) -> Vec<(&'static str, Sge)> {
    let end = solo.setup.arena as u64;
    let host = &mut solo.end.host;
    let gone = host.register(0, 4096, Access::ALL);
    host.regions.remove(gone);
    let foreign = host.register_in(PdId(2), 0, 4096, Access::ALL);
    let readable = host.register(0, 4096, Access::NONE);
    let mut list = vec![
        ("deregistered", sge(0, 8, gone)),
        ("foreign", sge(0, 8, foreign)),
        ("behind the end", sge(end - 4, 8, solo.key)),
        ("wrapping", Sge { addr: u64::MAX - 3, len: 8, lkey: solo.key }),
        ("before the start", Sge { addr: BASE - 1, len: 8, lkey: solo.key }),
    ];
    if write {
        list.push(("read-only", sge(0, 8, readable)));
    }
    list
}

#[test]
fn a_local_protection_error_comes_in_order() {
    for (op, write) in [
        (SEND, false),
        (SendOp::Write { remote: 0x9000, rkey: Key(9), imm: None }, false),
        (SendOp::Read { remote: 0x9000, rkey: Key(9) }, true),
        (SendOp::FetchAdd { remote: 0x9000, rkey: Key(9), add: 1 }, true),
    ] {
        for i in 0..bad_lists(&mut Solo::script(), write).len() {
            let mut solo = Solo::script();
            let (name, bad) = bad_lists(&mut solo, write).swap_remove(i);
            // The bad element stands behind a good one, and behind the first packet.
            let good = solo.sge(0, 300);
            let list = if op.is_atomic() { vec![bad] } else { vec![good, bad] };
            solo.send(1, 10);
            solo.post(2, op, &list);
            assert_eq!(solo.send(3, 10).sent(), ["SEND_ONLY #0 10B ack"], "{name}");
            assert!(solo.completed().is_empty());
            assert_eq!(solo.state(), QpState::Rts);
            assert!(solo.receive_ack(0).sent().is_empty());
            use WcStatus::{LocProtErr, Success, WrFlushErr};
            assert_eq!(
                solo.completed(),
                [(1, Success), (2, LocProtErr), (3, WrFlushErr)],
                "{name}"
            );
            assert_eq!(solo.state(), QpState::Err);
        }
    }
}

#[test]
fn the_first_request_fails_at_once() {
    let mut solo = Solo::script();
    assert!(solo.post(1, SEND, &[sge(0, 8, Key(5))]).sent().is_empty());
    assert_eq!(solo.completed(), [(1, WcStatus::LocProtErr)]);
}

#[test]
fn an_empty_element_needs_no_key() {
    let (remote, rkey, imm) = (0x9000, Key(9), Some([1, 2, 3, 4]));
    for (op, line) in [
        (SEND, "SEND_ONLY #0 0B ack"),
        (SendOp::Write { remote, rkey, imm: None }, "WRITE_ONLY #0 0B ack"),
        (SendOp::Write { remote, rkey, imm }, "WRITE_ONLY_IMM #0 0B ack"),
        (SendOp::Read { remote, rkey }, "READ #0 @9000+0"),
    ] {
        assert_eq!(Solo::script().post(1, op, &[sge(0, 0, Key(5))]).sent(), [line]);
    }
}

#[test]
fn memory_that_goes_away_before_the_response_is_a_local_error() {
    let mut solo = Solo::script();
    solo.read(1, 8).sent();
    let key = solo.key;
    assert!(solo.end.engine.uses_key(key));
    solo.end.host.regions.remove(key);
    solo.receive_data(rocinante_stack::wire::Opcode::RC_RDMA_READ_RESPONSE_ONLY, 0, &[1; 8]);
    assert_eq!(solo.completed(), [(1, WcStatus::LocProtErr)]);
    assert!(!solo.end.engine.uses_key(key));
    assert_eq!(solo.end.host.arena[..8], [0; 8]);
}

#[test]
fn memory_that_goes_away_in_mid_send_is_a_local_error() {
    let mut solo = Solo::script();
    solo.end.out.room = 1;
    assert_eq!(solo.send(1, 600).sent(), ["SEND_FIRST #0 256B"]);
    solo.end.host.regions.remove(solo.key);
    assert!(solo.sent().is_empty());
    assert_eq!(solo.completed(), [(1, WcStatus::LocProtErr)]);
}

#[test]
fn a_read_that_does_not_fit_its_list_is_placed_nowhere_else() {
    let mut solo = Solo::script();
    // The READ asks for 12 bytes, in two elements of 8 and 4.
    let list = [solo.sge(100, 8), solo.sge(200, 4)];
    solo.post(1, SendOp::Read { remote: 0x9000, rkey: Key(9) }, &list).sent();
    solo.receive_data(rocinante_stack::wire::Opcode::RC_RDMA_READ_RESPONSE_ONLY, 0, &[7; 12]);
    assert_eq!(solo.completed(), [(1, WcStatus::Success)]);
    let arena = &solo.end.host.arena;
    assert_eq!(arena.iter().filter(|byte| **byte != 0).count(), 12);
    assert_eq!((&arena[100..108], &arena[200..204]), (&[7; 8][..], &[7; 4][..]));
}

#[test]
fn an_atomic_uses_the_first_eight_bytes_of_its_list() {
    let mut solo = Solo::script();
    let list = [solo.sge(100, 3), solo.sge(200, 50)];
    solo.post(1, SendOp::FetchAdd { remote: 0x9000, rkey: Key(9), add: 1 }, &list).sent();
    assert_eq!(solo.receive_found(0, u64::MAX).completed(), [(1, WcStatus::Success)]);
    let arena = &solo.end.host.arena;
    assert_eq!(
        (&arena[100..104], &arena[200..206]),
        (&[255, 255, 255, 0][..], &[255, 255, 255, 255, 255, 0][..])
    );
}

#[test]
fn the_peers_refusals_become_statuses() {
    use rocinante_stack::wire::NakCode as Nak;
    for (code, status) in [
        (Nak::InvalidRequest, WcStatus::RemInvReqErr),
        (Nak::RemoteAccessError, WcStatus::RemAccessErr),
        (Nak::RemoteOperationalError, WcStatus::RemOpErr),
        (Nak::InvalidRdRequest, WcStatus::RemInvReqErr),
    ] {
        let mut solo = Solo::sending(&Setup::script(), 3, 300);
        // The NAK names the second packet of the second message.
        solo.receive_nak(3, code);
        let expected = [(1, WcStatus::Success), (2, status), (3, WcStatus::WrFlushErr)];
        assert_eq!(solo.completed(), expected);
        assert!(solo.sent().is_empty());
    }
}

#[test]
fn errors_meet_on_both_sides() {
    let statuses = |post: &dyn Fn(&mut Pair, [Key; 2])| {
        let mut pair = Pair::new(&Setup::script());
        let keys = pair.register();
        post(&mut pair, keys);
        pair.run();
        [0, 1].map(|at| pair.ends[at].host.completed())
    };
    let long = statuses(&|pair, keys| {
        pair.recv(1, 5, &[sge(0, 10, keys[1])]);
        pair.send(0, 1, SEND, &[sge(0, 11, keys[0])]);
    });
    assert_eq!(long, [vec![(1, WcStatus::RemInvReqErr)], vec![(5, WcStatus::LocLenErr)]]);
    let wrong_key = statuses(&|pair, keys| {
        pair.recv(1, 5, &[]);
        let op = SendOp::Write { remote: BASE, rkey: Key(keys[1].0 ^ 0x100), imm: None };
        pair.send(0, 1, op, &[sge(0, 11, keys[0])]);
        pair.send(0, 2, SEND, &[]);
    });
    let sender = vec![(1, WcStatus::RemAccessErr), (2, WcStatus::WrFlushErr)];
    assert_eq!(wrong_key, [sender, vec![(5, WcStatus::WrFlushErr)]]);
    let bad_receive = statuses(&|pair, keys| {
        let wr = RecvWr { wr_id: 5, sges: &[sge(0, 10, Key(3))] };
        let end = &mut pair.ends[1];
        end.engine.post_recv(end.qpn, &wr, &mut end.host).unwrap();
        pair.send(0, 1, SEND, &[sge(0, 10, keys[0])]);
    });
    assert_eq!(bad_receive, [vec![(1, WcStatus::RemOpErr)], vec![(5, WcStatus::LocProtErr)]]);
    // Responses to earlier requests still come before the refusal.
    let read_first = statuses(&|pair, keys| {
        pair.send(0, 1, SendOp::Read { remote: BASE, rkey: keys[1] }, &[sge(0, 3000, keys[0])]);
        pair.send(0, 2, SendOp::Read { remote: 0, rkey: keys[1] }, &[sge(0, 3000, keys[0])]);
    });
    let sender = vec![(1, WcStatus::Success), (2, WcStatus::RemAccessErr)];
    assert_eq!(read_first, [sender, vec![]]);
}

/// The engine asks for the regions once for each plan, and once for each packet with their data.
#[test]
fn packets_that_leave_together_are_planned_together() {
    let lookups = |solo: &mut Solo, packets: usize| {
        let before = solo.end.host.lookups.get();
        assert_eq!(solo.packets().len(), packets);
        solo.end.host.lookups.get() - before
    };
    let mut solo = Solo::script();
    for wr_id in 0..30 {
        solo.post_wr(&wr(wr_id, SEND, SendData::Inline(&[7; 32]))).expect("a good request");
    }
    assert_eq!(lookups(&mut solo, 30), 1);
    solo.receive_nak(10, NakCode::PsnSequenceError);
    assert_eq!(lookups(&mut solo, 20), 1, "again");
    solo.receive_ack(29);
    solo.send(30, 30 * 256);
    let with_data = lookups(&mut solo, 30);
    assert!((30..40).contains(&with_data), "{with_data}");
}
