//! The subject sends requests, the script responds: valid and invalid acknowledgements.

use rocinante_stack::types::Key;
use rocinante_stack::verbs::WcStatus::{
    BadRespErr, FatalErr, LocProtErr, RemAccessErr, RemInvReqErr, RemOpErr, Success, WrFlushErr,
};
use rocinante_stack::verbs::{QpState, SendOp};
use rocinante_stack::wire::{NakCode, Opcode as Op, Syndrome};

use crate::departures;
use crate::packet::{aeth, pattern};
use crate::subject::{Options, Step};
use crate::talk::{REMOTE, Talk};

// ---- acknowledgements ----

/// An ACK of a PSN that was not sent yet, both with a request outstanding and without.
pub(crate) fn ghost_ack(t: &mut Talk<'_>) -> Step {
    t.begin(Options::default())?;
    t.ack(0)?;
    t.nak(3, NakCode::RemoteAccessError)?;
    t.send(1, 10)?;
    t.says(&["SEND_ONLY #0 10B"])?;
    t.ack(0)?;
    t.ends(&[(1, Success)])?;
    t.send(2, 10)?;
    t.says(&["SEND_ONLY #1 10B"])?;
    t.ack(2)?;
    if t.departs(&departures::GHOST_ACK) {
        return t.ends(&[(2, Success)]);
    }
    t.nothing_ends()?;
    t.ack(1)?;
    t.ends(&[(2, Success)])
}

/// A NAK and an RNR NAK of an acknowledged packet.
pub(crate) fn nak_of_an_acknowledged_packet(t: &mut Talk<'_>) -> Step {
    t.begin(Options::default())?;
    t.send(1, 10)?;
    t.send(2, 10)?;
    t.says(&["SEND_ONLY #0 10B", "SEND_ONLY #1 10B"])?;
    t.ack(0)?;
    t.nak(0, NakCode::RemoteOperationalError)?;
    t.nak(0, NakCode::PsnSequenceError)?;
    t.rnr(0, 1)?;
    t.ends_as(1, &[Success])?;
    t.ack(1)?;
    t.ends(&[(2, Success)])?;
    t.quiet()
}

/// The ACKs of the first requests are lost: the ACK of the last covers them.
pub(crate) fn lost_ack(t: &mut Talk<'_>) -> Step {
    t.begin(Options::default())?;
    for id in 0..4 {
        t.send(id, 10)?;
        t.says(&[&format!("SEND_ONLY #{id} 10B")])?;
    }
    t.ack(3)?;
    t.ends(&[(0, Success), (1, Success), (2, Success), (3, Success)])?;
    t.quiet()
}

/// ACKs that come twice, or after others that cover them.
pub(crate) fn old_ack(t: &mut Talk<'_>) -> Step {
    t.begin(Options::default())?;
    for id in 0..3 {
        t.send(id, 10)?;
        t.says(&[&format!("SEND_ONLY #{id} 10B")])?;
    }
    t.ack(1)?;
    t.ack(0)?;
    t.ack(1)?;
    t.ack(-5)?;
    t.ends_as(0, &[Success])?;
    t.ends_as(1, &[Success])?;
    t.ack(2)?;
    t.ends(&[(2, Success)])
}

/// Reserved syndromes.
pub(crate) fn invalid_aeth(t: &mut Talk<'_>) -> Step {
    for syndrome in [0x40, 0x5f, 0x65, 0x7f, 0x80, 0xff] {
        t.begin(Options::default())?;
        t.send(1, 10)?;
        t.says(&["SEND_ONLY #0 10B"])?;
        t.answer(0, Syndrome(syndrome))?;
        if t.departs(&departures::INVALID_AETH) {
            let kind = match syndrome & 0xe0 {
                0x60 => RemOpErr,
                _ => Success,
            };
            t.ends(&[(1, kind)])?;
            t.becomes(QpState::Err)?;
        } else {
            t.nothing_ends()?;
            t.ack(0)?;
            t.ends(&[(1, Success)])?;
        }
    }
    Ok(())
}

/// A NAK becomes a completion status, and later requests are flushed.
pub(crate) fn refusals(t: &mut Talk<'_>) -> Step {
    for (code, status) in [
        (NakCode::InvalidRequest, RemInvReqErr),
        (NakCode::RemoteAccessError, RemAccessErr),
        (NakCode::RemoteOperationalError, RemOpErr),
    ] {
        t.begin(Options::default())?;
        t.post_recv(9, &[])?;
        for id in 0..3 {
            t.send(id, 10)?;
            t.says(&[&format!("SEND_ONLY #{id} 10B")])?;
        }
        t.nak(1, code)?;
        t.ends_as(0, &[Success])?;
        t.ends_as(1, &[status])?;
        t.becomes(QpState::Err)?;
        t.ends_in_any_order(&[2, 9], WrFlushErr)?;
    }
    Ok(())
}

/// A sequence NAK in the middle of a message acknowledges the packets before it, and the rest is
/// sent again.
pub(crate) fn sequence_nak_in_mid_message(t: &mut Talk<'_>) -> Step {
    t.begin(Options::default())?;
    let data = pattern(1000, 3);
    t.store(0, &data)?;
    t.send(1, 10)?;
    t.send(2, 1000)?;
    let rest = ["SEND_MIDDLE #3 256B", "SEND_LAST #4 232B"];
    t.says(&["SEND_ONLY #0 10B", "SEND_FIRST #1 256B", "SEND_MIDDLE #2 256B"])?;
    t.says(&rest)?;
    t.nak(3, NakCode::PsnSequenceError)?;
    t.ends_as(1, &[Success])?;
    same(&t.comes_to(&rest)?, &data[512..])?;
    t.nothing_ends()?;
    t.ack(4)?;
    t.ends(&[(2, Success)])
}

/// A WRITE that is sent again from its first packet has the same RETH. From a later packet, it has
/// none.
pub(crate) fn sequence_nak_of_a_write(t: &mut Talk<'_>) -> Step {
    t.begin(Options::default())?;
    let op = SendOp::Write { remote: REMOTE, rkey: Key(0x99), imm: Some([1, 2, 3, 4]) };
    t.post(1, op, &[Talk::at(0, 600)])?;
    let all = [
        "WRITE_FIRST #0 256B @9000+600",
        "WRITE_MIDDLE #1 256B",
        "WRITE_LAST_IMM #2 88B imm 01020304",
    ];
    t.says(&all)?;
    t.nak(0, NakCode::PsnSequenceError)?;
    t.comes_to(&all)?;
    t.nak(1, NakCode::PsnSequenceError)?;
    match t.departs(&departures::SECOND_SEQUENCE_NAK) {
        true => t.quiet()?,
        false => drop(t.comes_to(&all[1..])?),
    }
    t.ack(2)?;
    t.ends(&[(1, Success)])
}

// ---- READs and atomics ----

/// An ACK with a later PSN than an unanswered READ is an implied NAK of the READ.
pub(crate) fn implied_nak_of_a_read(t: &mut Talk<'_>) -> Step {
    t.begin(Options::default())?;
    t.send(1, 10)?;
    t.read(2, 300)?;
    t.send(3, 10)?;
    let rest = ["READ #1 @9000+300", "SEND_ONLY #3 10B"];
    t.says(&["SEND_ONLY #0 10B"])?;
    t.says(&rest)?;
    t.ack(3)?;
    // The requests before the READ are acknowledged all the same.
    t.ends_as(1, &[Success])?;
    t.comes_to(&rest)?;
    t.nothing_ends()?;
    let data = pattern(300, 8);
    t.data(Op::RC_RDMA_READ_RESPONSE_FIRST, 1, &data[..256])?;
    t.data(Op::RC_RDMA_READ_RESPONSE_LAST, 2, &data[256..])?;
    t.ends_as(2, &[Success])?;
    t.holds(0, &data)?;
    t.ack(3)?;
    t.ends(&[(3, Success)])
}

/// An ACK with a later PSN than an unanswered atomic is an implied NAK of the atomic.
pub(crate) fn implied_nak_of_an_atomic(t: &mut Talk<'_>) -> Step {
    t.begin(Options::default())?;
    t.send(1, 10)?;
    t.add(2, 64)?;
    t.send(3, 10)?;
    let rest = ["FETCH_ADD #1 @9000 1 0", "SEND_ONLY #2 10B"];
    t.says(&["SEND_ONLY #0 10B"])?;
    t.says(&rest)?;
    t.ack(2)?;
    t.ends_as(1, &[Success])?;
    t.comes_to(&rest)?;
    t.nothing_ends()?;
    t.found(1, 5)?;
    t.ends_as(2, &[Success])?;
    t.holds(64, &5u64.to_ne_bytes())?;
    t.ack(2)?;
    t.ends(&[(3, Success)])
}

/// A READ is placed packet by packet; its response also acknowledges the requests before it.
pub(crate) fn read_in_several_packets(t: &mut Talk<'_>) -> Step {
    t.begin(Options::default())?;
    let data = pattern(600, 3);
    t.send(1, 10)?;
    t.read(2, 600)?;
    t.says(&["SEND_ONLY #0 10B", "READ #1 @9000+600"])?;
    t.data(Op::RC_RDMA_READ_RESPONSE_FIRST, 1, &data[..256])?;
    t.ends_as(1, &[Success])?;
    t.data(Op::RC_RDMA_READ_RESPONSE_MIDDLE, 2, &data[256..512])?;
    t.data(Op::RC_RDMA_READ_RESPONSE_LAST, 3, &data[512..])?;
    t.ends(&[(2, Success)])?;
    t.holds(0, &data)
}

/// A response in the middle of a READ is lost: the READ is repeated from there on, with the same
/// end.
pub(crate) fn partial_read_retried(t: &mut Talk<'_>) -> Step {
    t.begin(Options { timeout: 15, retry_cnt: 7, ..Options::default() })?;
    t.read(1, 1000)?;
    t.says(&["READ #0 @9000+1000"])?;
    let data = pattern(1000, 9);
    t.data(Op::RC_RDMA_READ_RESPONSE_FIRST, 0, &data[..256])?;
    // #1 is lost; the responses behind it are not placed.
    t.data(Op::RC_RDMA_READ_RESPONSE_MIDDLE, 2, &[0xff; 256])?;
    t.data(Op::RC_RDMA_READ_RESPONSE_LAST, 3, &[0xff; 232])?;
    t.comes_to(&["READ #1 @9100+744"])?;
    t.nothing_ends()?;
    t.data(Op::RC_RDMA_READ_RESPONSE_FIRST, 1, &data[256..512])?;
    t.data(Op::RC_RDMA_READ_RESPONSE_MIDDLE, 2, &data[512..768])?;
    t.data(Op::RC_RDMA_READ_RESPONSE_LAST, 3, &data[768..])?;
    t.ends(&[(1, Success)])?;
    t.holds(0, &data)
}

/// An ACK with the last PSN of a READ does not end the READ while responses are missing.
pub(crate) fn ack_in_the_middle_of_a_read(t: &mut Talk<'_>) -> Step {
    t.begin(Options::default())?;
    t.read(1, 600)?;
    t.says(&["READ #0 @9000+600"])?;
    let data = pattern(600, 4);
    t.data(Op::RC_RDMA_READ_RESPONSE_FIRST, 0, &data[..256])?;
    t.ack(2)?;
    t.nothing_ends()?;
    t.data(Op::RC_RDMA_READ_RESPONSE_MIDDLE, 1, &data[256..512])?;
    t.data(Op::RC_RDMA_READ_RESPONSE_LAST, 2, &data[512..])?;
    t.ends(&[(1, Success)])?;
    t.holds(0, &data)
}

/// An ACK with the PSN of the missing response does not end the READ either.
pub(crate) fn ack_instead_of_a_response(t: &mut Talk<'_>) -> Step {
    t.begin(Options::default())?;
    t.read(1, 8)?;
    t.says(&["READ #0 @9000+8"])?;
    t.ack(0)?;
    if t.departs(&departures::ACK_INSTEAD_OF_A_RESPONSE) {
        t.ends(&[(1, Success)])?;
        return t.holds(0, &[0; 8]);
    }
    t.nothing_ends()?;
    t.data(Op::RC_RDMA_READ_RESPONSE_ONLY, 0, b"new data")?;
    t.ends(&[(1, Success)])?;
    t.holds(0, b"new data")
}

/// The response to a READ is longer than the READ, or its FIRST packet is longer than the path MTU.
pub(crate) fn response_of_the_wrong_length(t: &mut Talk<'_>) -> Step {
    t.begin(Options::default())?;
    t.read(1, 300)?;
    t.says(&["READ #0 @9000+300"])?;
    t.data(Op::RC_RDMA_READ_RESPONSE_ONLY, 0, &[1; 600])?;
    let departs = t.departs(&departures::RESPONSE_OF_THE_WRONG_LENGTH);
    t.ends_as(1, &[if departs { LocProtErr } else { BadRespErr }])?;
    t.becomes(QpState::Err)?;
    t.begin(Options::default())?;
    t.read(1, 300)?;
    t.says(&["READ #0 @9000+300"])?;
    t.data(Op::RC_RDMA_READ_RESPONSE_FIRST, 0, &[1; 257])?;
    if departs {
        t.quiet()?;
        return t.nothing_ends();
    }
    t.ends_as(1, &[BadRespErr])?;
    t.becomes(QpState::Err)
}

/// A READ response to an atomic, and an atomic response to a READ.
pub(crate) fn response_of_another_kind(t: &mut Talk<'_>) -> Step {
    t.begin(Options::default())?;
    t.read(1, 8)?;
    t.says(&["READ #0 @9000+8"])?;
    t.found(0, 7)?;
    let departs = t.departs(&departures::RESPONSE_OF_ANOTHER_KIND);
    t.ends_as(1, &[if departs { Success } else { BadRespErr }])?;
    t.holds(0, &[0; 8])?;
    t.becomes(QpState::Err)?;
    t.begin(Options::default())?;
    t.add(1, 0)?;
    t.says(&["FETCH_ADD #0 @9000 1 0"])?;
    t.data(Op::RC_RDMA_READ_RESPONSE_ONLY, 0, &[0; 8])?;
    t.ends_as(1, &[if departs { FatalErr } else { BadRespErr }])?;
    t.becomes(QpState::Err)
}

/// A NAK in the header of a READ response.
pub(crate) fn response_with_a_nak(t: &mut Talk<'_>) -> Step {
    t.begin(Options::default())?;
    t.read(1, 4)?;
    t.says(&["READ #0 @9000+4"])?;
    let header = aeth(Syndrome::nak(NakCode::RemoteAccessError), 0);
    t.respond(Op::RC_RDMA_READ_RESPONSE_ONLY, 0, &[&header, &[1; 4]])?;
    if t.departs(&departures::RESPONSE_WITH_A_NAK) {
        t.ends(&[(1, Success)])?;
        t.holds(0, &[0; 4])?;
        return t.becomes(QpState::Err);
    }
    t.nothing_ends()?;
    t.data(Op::RC_RDMA_READ_RESPONSE_ONLY, 0, b"data")?;
    t.ends(&[(1, Success)])?;
    t.holds(0, b"data")
}

/// The number of outstanding READs and atomics stays within the limit.
pub(crate) fn reads_outstanding(t: &mut Talk<'_>) -> Step {
    t.begin(Options { rd_atomic: 2, ..Options::default() })?;
    (1..=3).try_for_each(|id| t.read(id, 8))?;
    t.add(4, 64)?;
    t.says(&["READ #0 @9000+8", "READ #1 @9000+8"])?;
    t.quiet()?;
    t.data(Op::RC_RDMA_READ_RESPONSE_ONLY, 0, &[1; 8])?;
    t.says(&["READ #2 @9000+8"])?;
    t.quiet()?;
    t.data(Op::RC_RDMA_READ_RESPONSE_ONLY, 1, &[2; 8])?;
    t.says(&["FETCH_ADD #3 @9000 1 0"])?;
    t.data(Op::RC_RDMA_READ_RESPONSE_ONLY, 2, &[3; 8])?;
    t.found(3, 9)?;
    t.ends(&[(1, Success), (2, Success), (3, Success), (4, Success)])?;
    t.holds(64, &9u64.to_ne_bytes())
}

/// A fenced request waits for the READs and atomics before it, and sends the data that they placed.
pub(crate) fn fence(t: &mut Talk<'_>) -> Step {
    t.begin(Options::default())?;
    t.read(1, 8)?;
    t.add(2, 64)?;
    t.post_fenced(3, SendOp::Send { imm: None }, &[Talk::at(0, 8)])?;
    t.says(&["READ #0 @9000+8", "FETCH_ADD #1 @9000 1 0"])?;
    t.quiet()?;
    t.data(Op::RC_RDMA_READ_RESPONSE_ONLY, 0, b"new data")?;
    t.quiet()?;
    t.found(1, 3)?;
    same(&t.says(&["SEND_ONLY #2 8B"])?, b"new data")?;
    t.ack(2)?;
    t.ends(&[(1, Success), (2, Success), (3, Success)])
}

/// Empty requests of every kind take one packet and one PSN.
pub(crate) fn zero_length_requests(t: &mut Talk<'_>) -> Step {
    t.begin(Options::default())?;
    let (remote, rkey, imm) = (REMOTE, Key(0x66), Some([1, 2, 3, 4]));
    let ops = [
        (SendOp::Send { imm: None }, "SEND_ONLY #0 0B"),
        (SendOp::Send { imm }, "SEND_ONLY_IMM #1 0B imm 01020304"),
        (SendOp::Write { remote, rkey, imm: None }, "WRITE_ONLY #2 0B @9000+0"),
        (SendOp::Write { remote, rkey, imm }, "WRITE_ONLY_IMM #3 0B @9000+0 imm 01020304"),
        (SendOp::Read { remote, rkey }, "READ #4 @9000+0"),
    ];
    for (id, (op, line)) in (0..).zip(ops) {
        t.post(id, op, &[])?;
        t.says(&[line])?;
    }
    t.data(Op::RC_RDMA_READ_RESPONSE_ONLY, 4, &[])?;
    t.ends(&[(0, Success), (1, Success), (2, Success), (3, Success), (4, Success)])
}

/// PSNs wrap at each packet of each operation.
pub(crate) fn request_psn_wraps_in_every_position(t: &mut Talk<'_>) -> Step {
    for before in 0..12 {
        t.begin(Options { psn: [0x100_0000 - before, 0x5000], ..Options::default() })?;
        let data = pattern(600, before as u8);
        t.store(0, &data)?;
        t.send(1, 600)?;
        same(&t.says(&["SEND_FIRST #0 256B", "SEND_MIDDLE #1 256B", "SEND_LAST #2 88B"])?, &data)?;
        let op = SendOp::Write { remote: REMOTE, rkey: Key(0x99), imm: None };
        t.post(2, op, &[Talk::at(0, 600)])?;
        let all = ["WRITE_FIRST #3 256B @9000+600", "WRITE_MIDDLE #4 256B", "WRITE_LAST #5 88B"];
        same(&t.says(&all)?, &data)?;
        t.nak(4, NakCode::PsnSequenceError)?;
        t.ends_as(1, &[Success])?;
        t.comes_to(&all[1..])?;
        t.ack(5)?;
        t.ends(&[(2, Success)])?;
        t.read(3, 600)?;
        t.add(4, 1000)?;
        t.says(&["READ #6 @9000+600", "FETCH_ADD #9 @9000 1 0"])?;
        let data = pattern(600, !(before as u8));
        t.data(Op::RC_RDMA_READ_RESPONSE_FIRST, 6, &data[..256])?;
        t.data(Op::RC_RDMA_READ_RESPONSE_MIDDLE, 7, &data[256..512])?;
        t.data(Op::RC_RDMA_READ_RESPONSE_LAST, 8, &data[512..])?;
        t.found(9, 11)?;
        t.ends(&[(3, Success), (4, Success)])?;
        t.holds(0, &data)?;
    }
    Ok(())
}

pub(crate) fn same(found: &[u8], wanted: &[u8]) -> Step {
    match found == wanted {
        true => Ok(()),
        false => Err(format!("{found:02x?} was sent instead of {wanted:02x?}")),
    }
}
