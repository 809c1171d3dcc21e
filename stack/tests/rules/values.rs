//! The numeric fields that a peer chooses: smallest, greatest and absurd values.

use rocinante_stack::mem::Access;
use rocinante_stack::types::Key;
use rocinante_stack::verbs::{AhId, Destination, QpState, QpType, RecvWr, SendOp, WcStatus};
use rocinante_stack::wire::{
    Feth, NakCode, Opcode as Op, Packet, Syndrome, ext::credits, ext::rnr_timer_us,
};
use rocinante_stack::{Budget, PeerAddress, PeerKind};

use crate::common::{BASE, PD, QKEY, Setup, Solo, addr, reth, seal, sge};
use rocinante_scripts::aeth;

// ---- DMA lengths and addresses ----

/// The longest message.
const LONGEST: u32 = 1 << 31;
/// The part of the arena that the peer may access.
const OPEN: u32 = 4096;

/// The responder's answer to a request for this range.
fn answer(solo: &mut Solo, packet: &[u8]) -> &'static str {
    solo.receive(packet);
    let state = solo.state();
    let first = solo.packets().first().cloned().expect("an answer");
    let first = Packet::parse(&first).expect("a packet of ours");
    let syndrome = first.aeth().map(|aeth| aeth.syndrome);
    match (syndrome, state) {
        (Some(nak), QpState::Err) if nak == Syndrome::nak(NakCode::RemoteAccessError) => "access",
        (Some(nak), QpState::Err) if nak == Syndrome::nak(NakCode::InvalidRequest) => "invalid",
        (Some(Syndrome::ACK_UNLIMITED), QpState::Rts) => "done",
        other => panic!("{other:?}"),
    }
}

/// Each kind of request with each length at each address: a range beyond the region is refused, and
/// nothing outside of the region is touched.
#[test]
fn no_length_and_no_address_of_any_request_reaches_beyond_a_region() {
    let lens = [0, 1, 8, 256, 257, OPEN, OPEN + 1, LONGEST - 1, LONGEST, LONGEST + 1, u32::MAX];
    let start = BASE + u64::from(OPEN);
    let end = start + u64::from(OPEN);
    let addresses = [0, 1, start - 1, start, end - 8, end - 1, end, u64::MAX - 7, u64::MAX];
    let access = Access::ALL.with(Access::FLUSH_GLOBAL);
    for (len, va) in lens.into_iter().flat_map(|len| addresses.map(|va| (len, va))) {
        let inside = va >= start && va.checked_add(u64::from(len)).is_some_and(|to| to <= end);
        for request in ["WRITE", "READ", "FLUSH", "ATOMIC WRITE"] {
            let mut solo =
                Solo::new(&Setup { access, arena: 3 * OPEN as usize, ..Setup::script() });
            let key = solo.end.host.register(OPEN.into(), OPEN.into(), access);
            let header = reth(va, key, len);
            let mut feth = [0; Feth::LEN];
            Feth::new(1, 0).write(&mut feth);
            let payload = vec![0xee; len.min(256) as usize];
            let packet = match request {
                "WRITE" if len > 256 => {
                    solo.request(Op::RC_RDMA_WRITE_FIRST, 0, &[&header, &payload])
                }
                "WRITE" => solo.request(Op::RC_RDMA_WRITE_ONLY, 0, &[&header, &payload]),
                "READ" => solo.request(Op::RC_RDMA_READ_REQUEST, 0, &[&header]),
                "FLUSH" => solo.request(Op::RC_FLUSH, 0, &[&feth, &header]),
                _ => solo.request(Op::RC_ATOMIC_WRITE, 0, &[&header, &[0xee; 8]]),
            };
            let expected = match request {
                "ATOMIC WRITE" if len != 8 || !va.is_multiple_of(8) => "invalid",
                _ if len > LONGEST => "invalid",
                // An empty request checks no key; an empty FLUSH still names a region.
                "WRITE" | "READ" if len == 0 => "done",
                _ if inside => "done",
                _ => "access",
            };
            assert_eq!(answer(&mut solo, &packet), expected, "{request} of {len} at {va:#x}");
            let (before, rest) = solo.end.host.arena.split_at(OPEN as usize);
            let outside = before.iter().chain(&rest[OPEN as usize..]);
            assert!(outside.into_iter().all(|byte| *byte == 0), "{request} of {len} at {va:#x}");
        }
    }
}

/// Both fields of a FLUSH with all their values; the reserved bits above them have no meaning.
#[test]
fn every_placement_and_level_of_a_flush_is_done_or_invalid() {
    let access = Access::ALL.with(Access::FLUSH_GLOBAL);
    for (bits, reserved) in (0..64u32).flat_map(|bits| [(bits, 0), (bits, !0 << 6)]) {
        let mut solo = Solo::new(&Setup { access, ..Setup::script() });
        let key = solo.end.host.register(0, OPEN.into(), access);
        let feth = (bits | reserved).to_be_bytes();
        let packet = solo.request(Op::RC_FLUSH, 0, &[&feth, &reth(BASE, key, 8)]);
        // Global visibility of a range or a region. No memory is persistent.
        let expected = if matches!(bits, 0x01 | 0x11) { "done" } else { "invalid" };
        assert_eq!(answer(&mut solo, &packet), expected, "{bits:#x}");
    }
}

/// A duplicate READ is dropped if it asks for anything but a part of the first.
#[test]
fn no_length_or_address_of_a_repeated_read_is_answered_with_more_than_was_asked_for() {
    let lens = [0, 1, 255, 256, 257, 444, 445, 699, 701, LONGEST, u32::MAX];
    for len in lens {
        for (psn, skipped) in [(0, 0), (1, 256), (2, 512)] {
            for va in [BASE, BASE + skipped, BASE + 1, 0, u64::MAX] {
                let mut solo = Solo::script();
                solo.receive_request(Op::RC_RDMA_READ_REQUEST, 0, &[&solo.reth(0, 700)]);
                assert_eq!(solo.sent().len(), 3);
                solo.receive_request(Op::RC_RDMA_READ_REQUEST, psn, &[&reth(va, solo.key, len)]);
                let to = skipped + u64::from(len);
                let ends = to == 700 || (to < 700 && len > 0 && len.is_multiple_of(256));
                let good = va == BASE + skipped && ends;
                let expected = if good { len.div_ceil(256).max(1) as usize } else { 0 };
                assert_eq!(solo.sent().len(), expected, "{len} at #{psn} {va:#x}");
                assert_eq!(solo.end.engine.drops().stale_duplicate, u64::from(!good));
                assert_eq!(solo.state(), QpState::Rts);
            }
        }
    }
}

// ---- PSNs and syndromes of acknowledgements ----

/// Half of all PSNs.
const HALF: i64 = 1 << 23;

/// Every syndrome at every relevant PSN: which requests complete, and how.
#[test]
fn every_syndrome_at_every_psn_means_what_it_says_and_nothing_else() {
    let psns = [-HALF, -HALF + 1, -2, -1, 0, 1, 2, 3, 4, HALF - 2, HALF - 1];
    for psn in psns {
        let inside = (1..=3).contains(&psn);
        let mut last = None;
        for code in 0..=u8::MAX {
            // If nothing changes, the queue pair is used for the next case.
            let kept = last.take().filter(|_| !inside);
            // #0 was acknowledged, #1 to #3 are in flight.
            let mut solo = kept.unwrap_or_else(|| {
                let mut fresh = Solo::script();
                (0..4).for_each(|wr_id| _ = fresh.send(wr_id, 10));
                fresh.sent();
                fresh.receive_ack(0);
                fresh.completed();
                fresh
            });
            solo.receive_syndrome(psn, Syndrome(code));
            let done = solo.completed();
            let before =
                |to: i64| (1..to.max(1) as u64).map(|id| (id, WcStatus::Success)).collect();
            let fatal = |status| -> Vec<_> {
                let mut all: Vec<_> = before(psn);
                all.push((psn as u64, status));
                all.extend((psn as u64 + 1..4).map(|id| (id, WcStatus::WrFlushErr)));
                all
            };
            let expected = match code {
                _ if !inside => vec![],
                0x00..=0x1f => before(psn + 1),
                0x20..=0x3f | 0x60 => before(psn),
                0x61 | 0x64 => fatal(WcStatus::RemInvReqErr),
                0x62 => fatal(WcStatus::RemAccessErr),
                0x63 => fatal(WcStatus::RemOpErr),
                _ => vec![],
            };
            assert_eq!(done, expected, "{code:#x} at {psn}");
            last = Some(solo);
        }
    }
}

/// As above, each alone; then the peer behaves. Everything completes, or has been broken.
#[test]
fn after_any_syndrome_at_any_psn_an_acknowledgement_ends_what_is_left() {
    for psn in [-HALF, -1, 0, 1, 2, 3, HALF - 1] {
        for code in [0x00, 0x01, 0x1e, 0x1f, 0x20, 0x21, 0x3f, 0x40, 0x5f, 0x60, 0x65, 0x80, 0xff] {
            let mut solo = Solo::script();
            solo.sends(0..3, 10).sent();
            solo.receive_syndrome(psn, Syndrome(code));
            assert_eq!(solo.state(), QpState::Rts, "{code:#x} at {psn}");
            let mut done = solo.completed();
            for _ in 0..4 {
                solo.wait_for_timer();
                solo.sent();
            }
            solo.receive_ack(2);
            done.extend(solo.completed());
            let all: Vec<_> = (0..3).map(|id| (id, WcStatus::Success)).collect();
            assert_eq!(done, all, "{code:#x} at {psn}");
            solo.send(3, 10);
            solo.receive_syndrome(2, Syndrome::ACK_UNLIMITED);
            assert_eq!(solo.sent(), ["SEND_ONLY #3 10B ack"], "{code:#x} at {psn}");
        }
    }
}

/// For every MSN and credit of a peer: messages beyond the limit are tried one by one.
#[test]
fn no_message_number_and_no_credit_stops_a_sender_for_good() {
    let msns = [0, 1, 2, 3, 1000, (1 << 23) - 1, 1 << 23, (1 << 23) + 1, (1 << 24) - 1];
    for msn in msns {
        for code in 0..32 {
            let mut solo = Solo::script();
            solo.sends(0..4, 10);
            let mut sent = solo.sent().len() as i64;
            for _ in 0..8 {
                let header = aeth(Syndrome(code), msn);
                solo.receive(&solo.response(Op::RC_ACKNOWLEDGE, sent - 1, &[&header]));
                if solo.end.host.completions.len() < 8 && sent == 4 {
                    solo.sends(4..8, 10);
                }
                sent += solo.sent().len() as i64;
                if sent == 8 {
                    break;
                }
            }
            assert_eq!(sent, 8, "MSN {msn}, credits {:?}", credits(code));
            assert_eq!(solo.receive_ack(7).completed().len(), 8);
        }
    }
}

#[test]
fn every_code_of_an_rnr_nak_is_waited_for_as_long_as_the_table_says() {
    for code in 0..32 {
        let mut solo = Solo::sending(&Setup::script(), 1, 10);
        solo.receive_rnr(0, code);
        let wait = u64::from(rnr_timer_us(code)) * 1000;
        solo.wait(wait - 1);
        assert!(solo.sent().is_empty(), "code {code}");
        solo.wait(1);
        assert_eq!(solo.sent(), ["SEND_ONLY #0 10B ack"], "code {code}");
    }
}

// ---- reports of packets received out of order ----

/// A report of any length, with all bits, none, or only the last: the sender repeats no more than
/// is in flight, and completes everything once it is acknowledged.
#[test]
fn a_report_of_any_length_and_content_leaves_a_sender_that_goes_on() {
    for len in (0..=12).chain([124, 127, 128, 129, 132, 1000, 4096]) {
        for (name, fill, last) in [("all", 0xff, 0xff), ("nothing", 0, 0), ("the last", 0, 0x80)] {
            for psn in [0, 1, 3, 5, 6] {
                let mut solo = Solo::sending(&Setup { held: 64, ..Setup::script() }, 6, 10);
                let mut report = vec![fill; len];
                if let Some(byte) = report.last_mut() {
                    *byte = last;
                }
                let nak = aeth(Syndrome::nak(NakCode::PsnSequenceError), 0);
                let packet = solo.response(Op::RC_ACKNOWLEDGE, psn, &[&nak, &report]);
                for _ in 0..2 {
                    solo.receive(&packet);
                    assert!(solo.sent().len() <= 6, "{name} in {len} bytes at #{psn}");
                }
                assert_eq!(solo.completed().len() as i64, psn % 6, "the requests before it");
                solo.wait(4096 << 14);
                solo.sent();
                solo.receive_ack(5);
                assert_eq!(solo.completed().len() as i64, 6 - psn % 6, "{name}, {len}, #{psn}");
                assert_eq!(solo.end.engine.footprint().in_flight_packets, 0);
            }
        }
    }
}

// ---- the announced receive queue of a peer ----

const EXTREMES: [u32; 5] = [0, 1, 17, 1 << 31, u32::MAX];

/// For every announcement of a peer: all messages leave and complete, and no number overflows.
#[test]
fn no_announced_budget_stops_a_sender_or_overflows() {
    for (bytes, datagrams) in EXTREMES.into_iter().flat_map(|b| EXTREMES.map(|d| (b, d))) {
        let budget = Budget { bytes, datagrams };
        let mut solo = Solo::new(&Setup { budget, held: 64, ..Setup::script() });
        // Packets that leave as super-packets stretch the credit.
        (0..300).for_each(|_| solo.end.engine.departed(1, 40, 40 * 300));
        solo.sends(1..=5, 600);
        let mut acknowledged = 0;
        for _ in 0..100 {
            let sent = solo.sent().len() as i64;
            if sent == 0 {
                break;
            }
            acknowledged += sent;
            solo.receive_ack(acknowledged - 1);
        }
        assert_eq!(solo.completed().len(), 5, "{budget:?}");
        assert_eq!(solo.read(6, 700).sent().len(), 1, "{budget:?}");
    }
}

/// Unacknowledged packets are paced, and leave in the end.
#[test]
fn no_announced_budget_keeps_what_nobody_acknowledges_for_ever() {
    for (bytes, datagrams) in EXTREMES.into_iter().flat_map(|b| EXTREMES.map(|d| (b, d))) {
        for qp_type in [QpType::Uc, QpType::Ud] {
            let budget = Budget { bytes, datagrams };
            let mut solo = Solo::new(&Setup { qp_type, budget, ..Setup::script() });
            let (local, remote, kind) = (addr(1), addr(2), PeerKind::announced(budget, None));
            let to = PeerAddress { local, remote, path: 0, budget, kind };
            let ah = solo.end.engine.create_ah(PD, &to).unwrap();
            let op = match qp_type {
                QpType::Ud => {
                    let to = Destination { ah, qpn: crate::common::PEER, qkey: QKEY };
                    SendOp::SendTo { to, imm: None }
                }
                _ => SendOp::Send { imm: None },
            };
            let (mut sent, mut posted) = (0, 0);
            while sent < 500 {
                while posted < 500 && posted - sent < 60 {
                    solo.post(posted as u64, op, &[solo.sge(0, 200)]);
                    posted += 1;
                }
                sent += solo.packets().len();
                if sent < posted {
                    assert!(solo.wait_for_timer().is_some(), "{budget:?}: it waits for nothing");
                }
            }
            assert_eq!(solo.completed().len(), 500, "{qp_type} {budget:?}");
        }
    }
}

// ---- datagrams ----

/// The sender's QPN is reported exactly as the packet has it; a Q_Key is compared whole.
#[test]
fn the_numbers_of_a_datagram_are_told_as_they_are() {
    for src_qpn in [0u32, 1, 2, 0xff_fffe, 0xff_ffff] {
        for (qkey, is_right) in [(QKEY, true), (0, false), (u32::MAX, false), (QKEY ^ 1, false)] {
            let mut solo = Solo::new(&Setup { qp_type: QpType::Ud, ..Setup::script() });
            solo.post_recv(1, &[solo.sge(0, 100)]);
            let deth = [qkey.to_be_bytes(), src_qpn.to_be_bytes()].concat();
            solo.receive(&solo.request(Op::UD_SEND_ONLY, 0xff_ffff, &[&deth, &[7; 8]]));
            let told = solo.end.host.completions.first().and_then(|cqe| cqe.sender);
            assert_eq!(
                told.map(|sender| sender.qpn.value()),
                is_right.then_some(src_qpn),
                "{qkey:#x}"
            );
            assert_eq!(solo.end.engine.drops().qkey, u64::from(!is_right));
        }
    }
}

/// A handle that never existed, or one with all bits set.
#[test]
fn a_number_of_no_address_handle_is_a_local_error() {
    for ah in [AhId(0), AhId(1 << 20), AhId(u32::MAX)] {
        let mut solo = Solo::new(&Setup { qp_type: QpType::Ud, ..Setup::script() });
        let to = Destination { ah, qpn: crate::common::PEER, qkey: QKEY };
        assert!(solo.post(1, SendOp::SendTo { to, imm: None }, &[]).sent().is_empty());
        assert_eq!(solo.completed(), [(1, WcStatus::LocProtErr)], "{ah:?}");
    }
}

// ---- keys ----

/// Keys at the ends of the range are refused like any other unknown key.
#[test]
fn keys_of_nothing_are_refused_at_both_ends_of_their_range() {
    for key in [0, 1, 0xff, 0x100, u32::MAX - 1, u32::MAX] {
        let mut solo = Solo::script();
        let header = reth(BASE, Key(key), 8);
        let packet = solo.request(Op::RC_RDMA_WRITE_ONLY, 0, &[&header, &[7; 8]]);
        assert_eq!(answer(&mut solo, &packet), "access", "{key:#x}");
        let mut solo = Solo::script();
        solo.post_recv(1, &[solo.sge(0, 100)]);
        let packet =
            solo.request(Op::RC_SEND_ONLY_WITH_INVALIDATE, 0, &[&key.to_be_bytes(), &[7; 8]]);
        assert_eq!(solo.receive(&packet).completed(), [(1, WcStatus::RemInvReqErr)], "{key:#x}");
        let mut solo = Solo::script();
        let recv = RecvWr { wr_id: 1, sges: &[sge(0, 8, Key(key))] };
        solo.end.engine.post_recv(solo.end.qpn, &recv, &mut solo.end.host).unwrap();
        solo.receive_request(Op::RC_SEND_ONLY, 0, &[&[7; 8]]);
        assert_eq!(solo.completed(), [(1, WcStatus::LocProtErr)], "{key:#x}");
    }
}

// ---- attributes ----

/// A peer that does not answer is given up in bounded time for every timeout. Timeout 0 waits for
/// ever.
#[test]
fn every_timeout_and_retry_count_ends_or_waits_for_ever() {
    for timeout in [0, 1, 2, 14, 30, 31] {
        for retry_cnt in [0, 7] {
            let mut solo = Solo::sending(&Setup { timeout, retry_cnt, ..Setup::script() }, 1, 10);
            let began = solo.now;
            for _ in 0..200 {
                if solo.wait_for_timer().is_none() {
                    break;
                }
                solo.sent();
            }
            let expected = match timeout {
                0 => vec![],
                _ => vec![(1, WcStatus::RetryExcErr)],
            };
            assert_eq!(solo.completed(), expected, "timeout {timeout}, {retry_cnt} retries");
            if timeout > 0 {
                let most = (4096u64 << timeout) * 4 * (u64::from(retry_cnt) + 1);
                assert!(solo.now.since(began) <= most.max(1_000_000_000), "timeout {timeout}");
            }
        }
    }
}

/// The highest number of READs that can be agreed on, and the lowest.
#[test]
fn the_most_and_the_fewest_reads_that_can_be_agreed_are_served() {
    for rd_atomic in [1, 128] {
        let mut solo = Solo::new(&Setup { rd_atomic, depth: 256, ..Setup::script() });
        for psn in 0..i64::from(rd_atomic) {
            solo.receive_request(Op::RC_RDMA_READ_REQUEST, psn, &[&solo.reth(0, 8)]);
        }
        assert_eq!(solo.sent().len(), usize::from(rd_atomic));
        (0..200).for_each(|wr_id| _ = solo.read(wr_id, 8));
        assert_eq!(solo.sent().len(), usize::from(rd_atomic));
    }
    let mut solo = Solo::new(&Setup { rd_atomic: 0, ..Setup::script() });
    let header = solo.reth(0, 8);
    let packet = solo.request(Op::RC_RDMA_READ_REQUEST, 0, &[&header]);
    assert_eq!(answer(&mut solo, &packet), "invalid");
}

/// Every amount of padding that a header can announce, also more than the body holds.
#[test]
fn every_amount_of_padding_over_every_short_body_is_taken_or_malformed() {
    for body in 0..6usize {
        for pad in 0..4u8 {
            let mut solo = Solo::script();
            solo.post_recv(1, &[solo.sge(0, 100)]);
            let mut packet = solo.request(Op::RC_SEND_ONLY, 0, &[]);
            packet.splice(12..12, vec![7; body]);
            packet[1] |= pad << 4;
            seal(&mut packet);
            solo.receive(&packet);
            let fits = body >= usize::from(pad);
            let expected = fits.then(|| (body - usize::from(pad)) as u32);
            let len = solo.end.host.completions.first().map(|cqe| cqe.byte_len);
            assert_eq!(len, expected, "{pad} of {body}");
            assert_eq!(solo.end.engine.drops().malformed, u64::from(!fits));
        }
    }
}
