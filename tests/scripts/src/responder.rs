//! The script sends requests, the subject responds: order and duplicates.

use rocinante_stack::mem::Access;
use rocinante_stack::types::Key;
use rocinante_stack::verbs::{QpState, WcOpcode};
use rocinante_stack::wire::Opcode as Op;

use crate::departures;
use crate::packet::{pattern, reth, two_messages};
use crate::subject::{Options, Step};
use crate::talk::Talk;

// ---- duplicates ----

/// The ACK of a SEND is lost, so the SEND is repeated: it is acknowledged again, but not executed
/// again.
pub(crate) fn duplicate_send(t: &mut Talk<'_>) -> Step {
    t.begin(Options::default())?;
    t.post_recv(1, &[Talk::at(0, 64)])?;
    t.ask(Op::RC_SEND_ONLY, 0, &[b"first"])?;
    t.says(&["ACK #0 msn 1"])?;
    t.received(1, 5, None)?;
    t.post_recv(2, &[Talk::at(0, 64)])?;
    t.ask(Op::RC_SEND_ONLY, 0, &[b"again"])?;
    t.says(&["ACK #0 msn 1"])?;
    t.nothing_ends()?;
    t.holds(0, b"first\0")?;
    // The next SEND takes the receive.
    t.ask(Op::RC_SEND_ONLY, 1, &[b"second"])?;
    t.says(&["ACK #1 msn 2"])?;
    t.received(2, 6, None)
}

/// Repeated WRITEs, without and with immediate.
pub(crate) fn duplicate_write(t: &mut Talk<'_>) -> Step {
    t.begin(Options::default())?;
    t.write(0, 100, b"first")?;
    t.says(&["ACK #0 msn 1"])?;
    t.write(0, 100, b"again")?;
    t.says(&["ACK #0 msn 1"])?;
    t.holds(100, b"first")?;
    t.post_recv(1, &[])?;
    t.post_recv(2, &[])?;
    let (imm, header) = ([1, 2, 3, 4], t.reth(200, 5));
    let opcode = Op::RC_RDMA_WRITE_ONLY_WITH_IMMEDIATE;
    t.ask(opcode, 1, &[&header, &imm, b"first"])?;
    t.says(&["ACK #1 msn 2"])?;
    t.received_as(1, WcOpcode::RecvRdmaWithImm, 5, Some(imm))?;
    t.ask(opcode, 1, &[&header, &[0; 4], b"again"])?;
    t.says(&["ACK #1 msn 2"])?;
    t.nothing_ends()?;
    t.holds(200, b"first")
}

/// Every packet of every message is repeated after all of them: the response is the latest ACK, and
/// nothing else happens.
pub(crate) fn duplicate_packets_of_messages(t: &mut Talk<'_>) -> Step {
    t.begin(Options::default())?;
    t.post_recv(1, &[Talk::at(0, 1000)])?;
    t.post_recv(2, &[Talk::at(0, 1000)])?;
    let imm = [4, 3, 2, 1];
    let talk = two_messages(&t.reth(4096, 600), imm);
    for (psn, (opcode, body)) in talk.iter().enumerate() {
        t.ask(*opcode, psn as i64, &[body])?;
        match psn {
            2 => drop(t.says(&["ACK #2 msn 1"])?),
            5 => drop(t.says(&["ACK #5 msn 2"])?),
            _ => {}
        }
    }
    t.received(1, 600, Some(imm))?;
    t.received_as(2, WcOpcode::RecvRdmaWithImm, 600, Some(imm))?;
    t.post_recv(3, &[Talk::at(0, 1000)])?;
    for (psn, (opcode, body)) in talk.iter().enumerate() {
        let body: Vec<u8> = body.iter().map(|byte| !byte).collect();
        t.ask_with(*opcode, psn as i64, &[&body], true)?;
        t.says(&["ACK #5 msn 2"])?;
    }
    t.nothing_ends()?;
    let whole = |seed: u8| [vec![seed; 256], vec![seed + 1; 256], vec![seed + 2; 88]].concat();
    t.holds(0, &whole(1))?;
    t.holds(4096, &whole(4))
}

/// A duplicate without AckReq needs no acknowledgement.
pub(crate) fn duplicate_that_asks_for_nothing(t: &mut Talk<'_>) -> Step {
    t.begin(Options::default())?;
    t.ask_with(Op::RC_RDMA_WRITE_ONLY, 0, &[&t.reth(0, 4), b"data"], false)?;
    t.quiet()?;
    t.once_more()?;
    if t.departs(&departures::UNASKED_ACK) {
        t.says(&["ACK #0 msn 1"])?;
    }
    t.quiet()?;
    t.serves(1, 2)
}

/// A duplicate READ reads again.
pub(crate) fn duplicate_read(t: &mut Talk<'_>) -> Step {
    t.begin(Options::default())?;
    t.store(0, b"before")?;
    t.ask_read(0, 0, 6)?;
    is(&t.says(&["READ_ONLY #0 6B msn 1"])?, b"before")?;
    t.store(0, b"behind")?;
    t.ask_read(0, 0, 6)?;
    is(&t.says(&["READ_ONLY #0 6B"])?, b"behind")?;
    t.serves(1, 2)
}

/// A READ of several packets is repeated: from the first, from a later packet, and a part that ends
/// earlier.
pub(crate) fn part_of_a_read(t: &mut Talk<'_>) -> Step {
    t.begin(Options::default())?;
    let data = pattern(1000, 5);
    t.store(0, &data)?;
    let all = ["READ_FIRST #0 256B", "READ_MIDDLE #1 256B", "READ_MIDDLE #2 256B"];
    let all = [&all[..], &["READ_LAST #3 232B"]].concat();
    for _ in 0..2 {
        t.ask_read(0, 0, 1000)?;
        is(&t.says(&all)?, &data)?;
    }
    t.ask_read(2, 512, 488)?;
    let rest = if t.departs(&departures::PARTIAL_READ_IN_THE_MIDDLE) {
        t.says(&["READ_MIDDLE #2 256B", "READ_LAST #3 232B"])?
    } else {
        t.says(&["READ_FIRST #2 256B", "READ_LAST #3 232B"])?
    };
    is(&rest, &data[512..])?;
    // More of it than in the last repetition.
    t.ask_read(1, 256, 256)?;
    match t.departs(&departures::READ_AGAIN_BEFORE_THE_PART) {
        true => t.quiet()?,
        false => is(&t.says(&["READ_ONLY #1 256B"])?, &data[256..512])?,
    }
    t.serves(4, 2)
}

/// A duplicate READ that is not a part of the first is dropped.
pub(crate) fn duplicate_read_of_something_else(t: &mut Talk<'_>) -> Step {
    t.begin(Options::default())?;
    t.ask_read(0, 64, 8)?;
    t.says(&["READ_ONLY #0 8B msn 1"])?;
    let (address, key) = (t.memory().address, t.memory().rkey);
    let wrong = [t.reth(72, 8), t.reth(64, 9), t.reth(56, 8), reth(address + 64, Key(1), 8)];
    for header in &wrong {
        t.ask(Op::RC_RDMA_READ_REQUEST, 0, &[header])?;
        t.quiet()?;
    }
    t.ask(Op::RC_RDMA_READ_REQUEST, 0, &[&reth(address + 64, key, 8)])?;
    t.says(&["READ_ONLY #0 8B msn 1"])?;
    t.serves(1, 2)
}

/// A duplicate atomic gets the first response and is not executed again: for both kinds, and with
/// other operands.
pub(crate) fn duplicate_atomic(t: &mut Talk<'_>) -> Step {
    t.begin(Options::default())?;
    let swap = t.atomic_eth(0, 100, 5);
    t.ask_add(0, 0, 5)?;
    t.says(&["ATOMIC_ACKNOWLEDGE #0 =0 msn 1"])?;
    t.ask(Op::RC_COMPARE_SWAP, 1, &[&swap])?;
    t.says(&["ATOMIC_ACKNOWLEDGE #1 =5 msn 2"])?;
    for _ in 0..3 {
        t.ask_add(0, 0, 5)?;
        t.says(&["ATOMIC_ACKNOWLEDGE #0 =0"])?;
        t.ask(Op::RC_COMPARE_SWAP, 1, &[&swap])?;
        t.says(&["ATOMIC_ACKNOWLEDGE #1 =5"])?;
    }
    t.ask_add(0, 64, 77)?;
    t.says(&["ATOMIC_ACKNOWLEDGE #0 =0"])?;
    t.holds(0, &100u64.to_ne_bytes())?;
    t.holds(64, &[0; 8])?;
    t.serves(2, 3)
}

/// Responder resources for the READs and atomics that may be outstanding; older ones are replaced.
/// A duplicate without resources is dropped, and not executed again.
pub(crate) fn records_wrap(t: &mut Talk<'_>) -> Step {
    // A power of two, because Soft-RoCE rounds up to one.
    const KEPT: i64 = 4;
    t.begin(Options { rd_atomic: KEPT as u8, ..Options::default() })?;
    for psn in 0..7 {
        t.ask_add(psn, 0, 1)?;
        t.says(&[&format!("ATOMIC_ACKNOWLEDGE #{psn} ={psn} msn {}", psn + 1)])?;
    }
    for psn in 0..7 {
        t.ask_add(psn, 0, 1)?;
        match psn < 7 - KEPT {
            true => t.quiet()?,
            false => drop(t.says(&[&format!("ATOMIC_ACKNOWLEDGE #{psn} ={psn}")])?),
        }
    }
    t.holds(0, &7u64.to_ne_bytes())?;
    for psn in 7..12 {
        t.ask_read(psn, 0, 8)?;
        t.says(&[&format!("READ_ONLY #{psn} 8B msn {}", psn + 1)])?;
    }
    t.ask_add(6, 0, 1)?;
    t.quiet()?;
    for psn in 7..12 {
        t.ask_read(psn, 0, 8)?;
        match psn < 12 - KEPT {
            true => t.quiet()?,
            false => drop(t.says(&[&format!("READ_ONLY #{psn} 8B")])?),
        }
    }
    t.holds(0, &7u64.to_ne_bytes())?;
    t.serves(12, 13)
}

/// A READ is repeated after the program has deregistered the memory.
pub(crate) fn late_duplicate_read_of_a_region_that_is_gone(t: &mut Talk<'_>) -> Step {
    t.begin(Options::default())?;
    let other = t.register(4096, Access::ALL, false)?;
    let header = reth(other.address, other.rkey, 8);
    t.ask(Op::RC_RDMA_READ_REQUEST, 0, &[&header])?;
    t.says(&["READ_ONLY #0 8B msn 1"])?;
    t.deregister(1)?;
    t.ask(Op::RC_RDMA_READ_REQUEST, 0, &[&header])?;
    if t.departs(&departures::DUPLICATE_READ_OF_A_DEAD_KEY) {
        t.says(&["NAK #0 access msn 1"])?;
        return t.becomes(QpState::Err);
    }
    t.quiet()?;
    t.serves(1, 2)
}

/// PSNs are compared within half of their space: up to 2^23 − 1 behind is a duplicate, and as far
/// ahead is out of order.
pub(crate) fn half_of_the_numbers_are_old(t: &mut Talk<'_>) -> Step {
    t.begin(Options::default())?;
    t.serves(0, 1)?;
    t.write(1 - 0x7f_ffff, 0, b"old")?;
    t.says(&["ACK #0 msn 1"])?;
    t.write(1 + 0x7f_ffff, 0, b"early")?;
    t.says(&["NAK #1 sequence msn 1"])?;
    t.holds(0, &[0; 8])?;
    t.serves(1, 2)
}

// ---- gaps ----

/// A packet in the middle of a message is missing: one NAK, then silence until it comes. Later
/// packets are ignored.
pub(crate) fn sequence_error_in_mid_message(t: &mut Talk<'_>) -> Step {
    t.begin(Options::default())?;
    t.post_recv(1, &[Talk::at(0, 1000)])?;
    t.ask(Op::RC_SEND_FIRST, 0, &[&[1; 256]])?;
    t.ask(Op::RC_SEND_LAST, 2, &[&[3; 10]])?;
    t.says(&["NAK #1 sequence msn 0"])?;
    t.ask(Op::RC_RDMA_WRITE_LAST, 3, &[&[3; 10]])?;
    t.quiet()?;
    t.ask(Op::RC_SEND_MIDDLE, 1, &[&[2; 256]])?;
    t.ask(Op::RC_SEND_LAST, 2, &[&[3; 10]])?;
    t.says(&["ACK #2 msn 1"])?;
    t.received(1, 522, None)?;
    t.holds(0, &[vec![1; 256], vec![2; 256], vec![3; 10], vec![0; 10]].concat())?;
    // The next gap is reported again.
    t.write(4, 0, b"early")?;
    t.says(&["NAK #3 sequence msn 1"])?;
    t.serves(3, 2)
}

/// After a gap, READs and atomics are not executed either.
pub(crate) fn gap_before_reads_and_atomics(t: &mut Talk<'_>) -> Step {
    t.begin(Options::default())?;
    t.ask_add(1, 0, 1)?;
    t.says(&["NAK #0 sequence msn 0"])?;
    t.ask_read(2, 0, 600)?;
    t.quiet()?;
    t.holds(0, &[0; 8])?;
    t.serves(0, 1)?;
    t.ask_add(1, 0, 1)?;
    t.says(&["ATOMIC_ACKNOWLEDGE #1 =0 msn 2"])?;
    t.ask_read(2, 0, 600)?;
    t.says(&["READ_FIRST #2 256B msn 3", "READ_MIDDLE #3 256B", "READ_LAST #4 88B msn 3"])?;
    t.serves(5, 4)
}

/// PSNs wrap at each packet of each operation.
pub(crate) fn psn_wraps_in_every_position(t: &mut Talk<'_>) -> Step {
    for before in 0..12 {
        t.begin(Options { psn: [0x10, 0x100_0000 - before], ..Options::default() })?;
        t.post_recv(1, &[Talk::at(0, 600)])?;
        let data = pattern(600, before as u8);
        t.ask(Op::RC_SEND_FIRST, 0, &[&data[..256]])?;
        t.ask(Op::RC_SEND_MIDDLE, 1, &[&data[256..512]])?;
        t.ask(Op::RC_SEND_LAST, 2, &[&data[512..]])?;
        t.says(&["ACK #2 msn 1"])?;
        t.received(1, 600, None)?;
        t.holds(0, &data)?;
        t.ask(Op::RC_RDMA_WRITE_FIRST, 3, &[&t.reth(1024, 600), &data[..256]])?;
        t.ask(Op::RC_RDMA_WRITE_MIDDLE, 4, &[&data[256..512]])?;
        t.ask(Op::RC_RDMA_WRITE_LAST, 5, &[&data[512..]])?;
        t.says(&["ACK #5 msn 2"])?;
        t.holds(1024, &data)?;
        let all = ["READ_FIRST #6 256B", "READ_MIDDLE #7 256B", "READ_LAST #8 88B"];
        for _ in 0..2 {
            t.ask_read(6, 1024, 600)?;
            is(&t.says(&all)?, &data)?;
        }
        for _ in 0..2 {
            t.ask_add(9, 2048, 3)?;
            t.says(&["ATOMIC_ACKNOWLEDGE #9 =0"])?;
        }
        // A duplicate from before the wrap, and a gap after it.
        t.ask_with(Op::RC_SEND_FIRST, 0, &[&[0; 256]], true)?;
        // The latest request is an atomic, and an ACK cannot be the response to that.
        match t.departs(&departures::ACK_OF_AN_ATOMIC) {
            true => t.says(&["ACK #9 msn 4"])?,
            false => t.says(&["ACK #5 msn 4"])?,
        };
        t.write(11, 0, b"early")?;
        t.says(&["NAK #10 sequence msn 4"])?;
        t.serves(10, 5)?;
        t.holds(0, &data)?;
    }
    Ok(())
}

/// More outstanding READs and atomics than agreed: the specification forbids that to the requester.
pub(crate) fn no_reads_agreed(t: &mut Talk<'_>) -> Step {
    for atomic in [false, true] {
        t.begin(Options { rd_atomic: 0, ..Options::default() })?;
        match atomic {
            true => t.ask_add(0, 0, 1)?,
            false => t.ask_read(0, 0, 8)?,
        }
        t.says(&["NAK #0 invalid msn 0"])?;
        t.becomes(QpState::Err)?;
        t.holds(0, &[0; 8])?;
    }
    Ok(())
}

/// The queue pair is reset and connected again, with other PSNs, while old packets are still in
/// flight.
pub(crate) fn reset_and_reuse_while_old_requests_fly(t: &mut Talk<'_>) -> Step {
    t.begin(Options::default())?;
    t.post_recv(1, &[Talk::at(0, 64)])?;
    t.ask(Op::RC_SEND_ONLY, 0, &[b"first"])?;
    t.says(&["ACK #0 msn 1"])?;
    t.received(1, 5, None)?;
    let mut old = vec![t.last().to_vec()];
    t.write(1, 100, b"write")?;
    t.says(&["ACK #1 msn 2"])?;
    old.push(t.last().to_vec());
    t.ask_add(2, 200, 1)?;
    t.says(&["ATOMIC_ACKNOWLEDGE #2 =0 msn 3"])?;
    old.push(t.last().to_vec());
    // A message; its last packet is still in flight.
    t.post_recv(2, &[Talk::at(0, 600)])?;
    t.ask(Op::RC_SEND_FIRST, 3, &[&[1; 256]])?;
    // Half of all PSNs count as old: the old packets are among them.
    t.begin(Options { psn: [0x10, 0x40_0000], ..Options::default() })?;
    t.post_recv(3, &[Talk::at(0, 64)])?;
    for packet in &old {
        t.replay(packet)?;
    }
    // Old packets may get responses, but have no effect.
    t.ask(Op::RC_SEND_ONLY, 0, &[b"anew"])?;
    t.comes_to(&["ACK #0 msn 1"])?;
    t.received(3, 4, None)?;
    t.nothing_ends()?;
    t.holds(0, b"anew\0")?;
    t.holds(100, &[0; 8])?;
    t.holds(200, &[0; 8])?;
    t.serves(1, 2)
}

/// Damaged packets, packets of another version and packets that are no requests are dropped.
pub(crate) fn what_is_no_good_is_dropped(t: &mut Talk<'_>) -> Step {
    t.begin(Options::default())?;
    t.write(0, 0, b"good")?;
    t.says(&["ACK #0 msn 1"])?;
    t.write(1, 0, b"next")?;
    t.says(&["ACK #1 msn 2"])?;
    let (psn, payload) = (11, 28);
    // The next PSN: first with the ICRC of the packet before, then with the right ICRC but an
    // unknown version.
    t.changed(|packet| packet[psn] += 1, false)?;
    t.changed(
        |packet| {
            packet[psn] += 1;
            packet[1] |= 1;
        },
        true,
    )?;
    // A key of another partition.
    t.changed(
        |packet| {
            packet[psn] += 1;
            packet[2..4].copy_from_slice(&0x8001u16.to_be_bytes());
        },
        true,
    )?;
    t.quiet()?;
    t.holds(0, b"next")?;
    t.changed(
        |packet| {
            packet[psn] += 1;
            packet[payload..payload + 4].copy_from_slice(b"text");
        },
        true,
    )?;
    t.says(&["ACK #2 msn 3"])?;
    t.holds(0, b"text")?;
    t.serves(3, 4)
}

pub(crate) fn is(found: &[u8], wanted: &[u8]) -> Step {
    match found == wanted {
        true => Ok(()),
        false => Err(format!("{found:02x?} was read instead of {wanted:02x?}")),
    }
}
