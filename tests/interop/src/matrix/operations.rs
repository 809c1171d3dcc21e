//! All operations, done correctly.

use super::losses::Losses;
use super::node::{BUFFER, SEND, Step, at, signaled};
use super::scenario::Session;
use crate::agent::proto::{Op, Opcode, Send};

const HALF: usize = BUFFER / 2;

pub(super) fn send_sizes(s: &mut Session<'_>) -> Step {
    for (number, len) in (0..).zip(s.sizes()) {
        s.active.fill(at(0, len), number)?;
        s.passive.receive(number, &[at(HALF, len + 5)])?;
        s.active.perform(number, SEND, &[at(0, len)])?;
        s.passive.received(number, len, None)?;
        s.passive.holds(at(HALF, len), number)?;
    }
    Ok(())
}

pub(super) fn send_zero(s: &mut Session<'_>) -> Step {
    s.passive.receive(1, &[at(0, 64), at(0, 0)])?;
    s.active.perform(1, SEND, &[])?;
    s.active.perform(2, Op::Send { imm: Some(7) }, &[])?;
    s.passive.received(1, 0, None)?;
    s.passive.received(2, 0, Some(7))?;
    s.passive.untouched(at(0, 64))
}

pub(super) fn send_immediate(s: &mut Session<'_>) -> Step {
    for (number, len) in (0..).zip([5, 2 * s.mtu() + 1]) {
        let imm = 0xdead_0000 + u32::try_from(len).unwrap_or(0);
        s.active.fill(at(0, len), 9)?;
        s.passive.receive(number, &[at(0, len)])?;
        s.active.perform(number, Op::Send { imm: Some(imm) }, &[at(0, len)])?;
        s.passive.received(number, len, Some(imm))?;
        s.passive.holds(at(0, len), 9)?;
    }
    Ok(())
}

pub(super) fn send_inline(s: &mut Session<'_>) -> Step {
    s.needs_inline()?;
    s.active.fill(at(0, 64), 3)?;
    s.passive.receive(0, &[at(0, 64), at(64, 64)])?;
    let inline = Send { inline: true, ..signaled(0, SEND, &[at(0, 64)]) };
    let list = [inline.clone(), Send { wr_id: 1, ranges: vec![at(0, 9), at(9, 20)], ..inline }];
    s.active.post(&list)?;
    // Inline data is copied when posted, so later changes of the memory do not matter.
    s.active.fill(at(0, 64), 4)?;
    for (wr_id, len) in [(0, 64), (1, 29)] {
        s.active.succeeds(wr_id, Opcode::Send)?;
        s.passive.received(wr_id, len, None)?;
    }
    s.passive.holds(at(0, 64), 3)?;
    s.passive.holds(at(64, 29), 3)
}

pub(super) fn send_scattered(s: &mut Session<'_>) -> Step {
    let third = s.mtu() - 3;
    let len = 3 * third;
    s.active.fill(at(0, len), 5)?;
    s.passive.receive_scattered(1, &[at(100, 11), at(HALF, len)])?;
    s.active.perform(1, SEND, &[at(0, third), at(third, third), at(2 * third, third)])?;
    s.passive.received(1, len, None)?;
    s.passive.holds(at(100, 11), 5)?;
    s.passive.holds_part(at(HALF, len - 11), 5, 11)
}

pub(super) fn send_solicited(s: &mut Session<'_>) -> Step {
    s.passive.arm(true)?;
    s.passive.receive(0, &[at(0, 8), at(0, 8)])?;
    s.active.perform(0, SEND, &[at(0, 8)])?;
    if s.passive.event(100)? {
        return Err("an event though nothing was solicited".into());
    }
    s.active.post(&[Send { solicited: true, ..signaled(1, SEND, &[at(0, 8)]) }])?;
    s.active.succeeds(1, Opcode::Send)?;
    if !s.passive.event(5000)? {
        return Err("no event though one was solicited".into());
    }
    s.passive.received(0, 8, None)?;
    s.passive.received(1, 8, None)
}

pub(super) fn write_sizes(s: &mut Session<'_>) -> Step {
    for (number, len) in (0..).zip(s.sizes()) {
        s.active.fill(at(0, len), number)?;
        s.active.perform(number, s.passive.write_to(HALF + 3, None), &[at(0, len)])?;
        s.passive.holds(at(HALF + 3, len), number)?;
    }
    s.passive.untouched(at(0, HALF + 3))?;
    writes_in_a_list(s)
}

/// WRITEs in one list, so that ours may split those behind the first; a SEND follows them all.
fn writes_in_a_list(s: &mut Session<'_>) -> Step {
    let (len, count) = (2 * s.mtu(), 5);
    s.active.fill(at(0, count * len), 77)?;
    s.passive.receive(9, &[at(2 * HALF - 8, 8)])?;
    let mut list: Vec<Send> = (0..count)
        .map(|number| {
            let op = s.passive.write_to(number * len, None);
            signaled(number as u64, op, &[at(number * len, len)])
        })
        .collect();
    list.push(signaled(9, SEND, &[at(0, 8)]));
    s.active.post(&list)?;
    for number in 0..count {
        s.active.succeeds(number as u64, Opcode::RdmaWrite)?;
    }
    s.active.succeeds(9, Opcode::Send)?;
    s.passive.received(9, 8, None)?;
    s.passive.holds(at(0, count * len), 77)
}

pub(super) fn write_zero(s: &mut Session<'_>) -> Step {
    s.active.perform(1, s.passive.write_to(0, None), &[])?;
    // Without bytes, neither address nor key is checked.
    s.active.perform(2, Op::Write { remote: 0, rkey: 0, imm: None }, &[])?;
    s.passive.untouched(at(0, HALF))
}

pub(super) fn write_immediate(s: &mut Session<'_>) -> Step {
    for (number, len) in (0..).zip([0, 7, 2 * s.mtu() + 1]) {
        s.active.fill(at(0, len), 8)?;
        s.passive.receive(number, &[at(0, 0)])?;
        s.active.perform(number, s.passive.write_to(HALF, Some(0xabcd)), &[at(0, len)])?;
        let wc = s.passive.ends(number, "SUCCESS")?;
        s.passive.expect(&wc.opcode, &Opcode::RecvRdmaWithImm, "the opcode")?;
        s.passive.expect(&wc.imm, &Some(0xabcd), "the immediate")?;
        s.passive.expect(&(wc.byte_len as usize), &len, "the length")?;
        s.passive.holds(at(HALF, len), 8)?;
    }
    Ok(())
}

pub(super) fn write_inline(s: &mut Session<'_>) -> Step {
    s.needs_inline()?;
    s.active.fill(at(0, 64), 3)?;
    let op = s.passive.write_to(HALF, None);
    s.active.post(&[Send { inline: true, ..signaled(0, op, &[at(0, 64)]) }])?;
    s.active.fill(at(0, 64), 4)?;
    s.active.succeeds(0, Opcode::RdmaWrite)?;
    s.passive.holds(at(HALF, 64), 3)
}

pub(super) fn write_gathered(s: &mut Session<'_>) -> Step {
    let len = 3 * s.mtu() + 9;
    s.active.fill(at(0, len), 6)?;
    let op = s.passive.write_to(1, None);
    let parts = [at(0, 1), at(1, s.mtu()), at(1 + s.mtu(), 0), at(1 + s.mtu(), len - 1 - s.mtu())];
    s.active.perform(0, op, &parts)?;
    s.passive.holds(at(1, len), 6)
}

pub(super) fn read_sizes(s: &mut Session<'_>) -> Step {
    for (number, len) in (0..).zip(s.sizes()) {
        s.passive.fill(at(5, len), number)?;
        s.active.perform(number, s.passive.read_from(5), &[at(HALF, len)])?;
        s.active.holds(at(HALF, len), number)?;
    }
    s.active.untouched(at(0, HALF))
}

pub(super) fn read_zero(s: &mut Session<'_>) -> Step {
    s.active.perform(1, s.passive.read_from(0), &[])?;
    s.active.untouched(at(0, HALF))
}

pub(super) fn read_scattered(s: &mut Session<'_>) -> Step {
    let len = 2 * s.mtu() + 30;
    s.passive.fill(at(0, len), 6)?;
    let op = s.passive.read_from(0);
    s.active.perform(0, op, &[at(0, 13), at(HALF, s.mtu()), at(20, len - 13 - s.mtu())])?;
    s.active.holds(at(0, 13), 6)?;
    s.active.holds_part(at(HALF, s.mtu()), 6, 13)?;
    s.active.holds_part(at(20, len - 13 - s.mtu()), 6, 13 + s.mtu())
}

/// More READs than may be outstanding.
pub(super) fn read_many(s: &mut Session<'_>) -> Step {
    let len = s.mtu() / 2 + 1;
    s.passive.fill(at(0, 20 * len), 7)?;
    let read = |s: &Session<'_>, n: usize| {
        signaled(n as u64, s.passive.read_from(n * len), &[at(n * len, len)])
    };
    let list: Vec<Send> = (0..20).map(|n| read(s, n)).collect();
    s.active.post(&list)?;
    for n in 0..20 {
        s.active.succeeds(n, Opcode::RdmaRead)?;
    }
    s.active.holds(at(0, 20 * len), 7)
}

pub(super) fn compare_swap(s: &mut Session<'_>) -> Step {
    s.needs_atomics()?;
    s.passive.store(64, 5)?;
    let (remote, rkey) = s.passive.remote(64);
    for (wr_id, compare, swap, found, after) in [
        (0, 5, u64::MAX, 5, u64::MAX),
        (1, 5, 1, u64::MAX, u64::MAX),
        (2, u64::MAX, 2, u64::MAX, 2),
    ] {
        s.active.perform(wr_id, Op::CompareSwap { remote, rkey, compare, swap }, &[at(8, 8)])?;
        let was = s.active.load(8)?;
        s.active.expect(&was, &found, "the value found")?;
        let is = s.passive.load(64)?;
        s.passive.expect(&is, &after, "the value there")?;
    }
    Ok(())
}

pub(super) fn fetch_add(s: &mut Session<'_>) -> Step {
    s.needs_atomics()?;
    s.passive.store(128, u64::MAX - 1)?;
    let (remote, rkey) = s.passive.remote(128);
    for (wr_id, add, found) in [(0, 1, u64::MAX - 1), (1, 3, u64::MAX), (2, 0, 2)] {
        s.active.perform(wr_id, Op::FetchAdd { remote, rkey, add }, &[at(0, 8)])?;
        let was = s.active.load(0)?;
        s.active.expect(&was, &found, "the value found")?;
    }
    let is = s.passive.load(128)?;
    s.passive.expect(&is, &2, "the value there")
}

/// All kinds of requests at once: they complete in order, and each has its effect.
pub(super) fn mixed(s: &mut Session<'_>) -> Step {
    s.needs_atomics()?;
    let len = s.mtu() + 1;
    s.passive.store(0, 100)?;
    s.passive.fill(at(1024, len), 1)?;
    s.active.fill(at(1024, len), 2)?;
    s.passive.receive(100, &[at(HALF, len); 6])?;
    let (remote, rkey) = s.passive.remote(0);
    let mut list = Vec::new();
    for round in 0..6 {
        let id = round * 5;
        let add = Op::FetchAdd { remote, rkey, add: 1 };
        list.push(signaled(id, SEND, &[at(1024, len)]));
        list.push(signaled(id + 1, s.passive.read_from(1024), &[at(HALF, len)]));
        list.push(signaled(id + 2, s.passive.write_to(HALF + 8192, None), &[at(1024, len)]));
        list.push(signaled(id + 3, add, &[at(8 * round as usize, 8)]));
        let unsignaled = signaled(id + 4, s.passive.write_to(HALF + 16384, None), &[at(1024, 40)]);
        list.push(Send { signaled: false, ..unsignaled });
    }
    s.active.post(&list)?;
    for send in list.iter().filter(|send| send.signaled) {
        s.active.succeeds(send.wr_id, super::node::opcode_of(send.op))?;
    }
    for round in 0..6 {
        s.passive.received(100 + round, len, None)?;
        let was = s.active.load(8 * round as usize)?;
        s.active.expect(&was, &(100 + round), "the value that the addition found")?;
    }
    s.active.holds(at(HALF, len), 1)?;
    s.passive.holds(at(HALF, len), 2)?;
    s.passive.holds(at(HALF + 8192, len), 2)?;
    s.passive.holds(at(HALF + 16384, 40), 2)
}

/// A fenced request sends the data of the READ before it.
pub(super) fn fence(s: &mut Session<'_>) -> Step {
    let len = 3 * s.mtu();
    s.passive.fill(at(0, len), 11)?;
    let read = signaled(0, s.passive.read_from(0), &[at(0, len)]);
    let write = signaled(1, s.passive.write_to(HALF, None), &[at(0, len)]);
    s.active.post(&[read, Send { fence: true, ..write }])?;
    s.active.succeeds(0, Opcode::RdmaRead)?;
    s.active.succeeds(1, Opcode::RdmaWrite)?;
    s.passive.holds(at(HALF, len), 11)
}

/// Both sides request at the same time over one connection.
pub(super) fn both_ask(s: &mut Session<'_>) -> Step {
    let len = 2 * s.mtu() + 5;
    s.active.fill(at(0, len), 1)?;
    s.passive.fill(at(0, len), 2)?;
    let of = |id: u64, write: Op, read: Op| {
        [signaled(id, write, &[at(0, len)]), signaled(id + 1, read, &[at(2 * 16384, len)])]
    };
    let (to_passive, from_passive) = (s.passive.write_to(16384, None), s.passive.read_from(0));
    let (to_active, from_active) = (s.active.write_to(16384, None), s.active.read_from(0));
    for round in 0..4 {
        s.active.post(&of(2 * round, to_passive, from_passive))?;
        s.passive.post(&of(2 * round, to_active, from_active))?;
    }
    for round in 0..4 {
        for node in [&mut s.active, &mut s.passive] {
            node.succeeds(2 * round, Opcode::RdmaWrite)?;
            node.succeeds(2 * round + 1, Opcode::RdmaRead)?;
        }
    }
    for (node, own, other) in [(&mut s.active, 1, 2), (&mut s.passive, 2, 1)] {
        node.holds(at(0, len), own)?;
        node.holds(at(16384, len), other)?;
        node.holds(at(2 * 16384, len), other)?;
    }
    Ok(())
}

/// The first PSNs are just below 2²⁴.
pub(super) fn psn_wraps(s: &mut Session<'_>) -> Step {
    let len = 4 * s.mtu() + 3;
    for round in 0..2 {
        write_send_read(s, &mut Losses::none(), len, round, true)?;
    }
    Ok(())
}

/// A WRITE, a SEND, and a READ of the WRITE's data; all bytes depend on `round`. The READ is posted
/// at once, unless the SEND may get stuck: nothing behind a stuck request may need a
/// retransmission.
pub(super) fn write_send_read(
    s: &mut Session<'_>,
    losses: &mut Losses,
    len: usize,
    round: u64,
    fence: bool,
) -> Step {
    s.active.fill(at(0, len), round)?;
    s.passive.receive(1, &[at(HALF, len)])?;
    let (write, read) = (s.passive.write_to(0, None), s.passive.read_from(0));
    let mut list = vec![signaled(0, write, &[at(0, len)]), signaled(1, SEND, &[at(0, len)])];
    let read = Send { fence, ..signaled(2, read, &[at(HALF, len)]) };
    let later = if losses.may_catch(s) {
        Some(read)
    } else {
        list.push(read);
        None
    };
    losses.post(s, &list)?;
    losses.succeeds(s, 0, Opcode::RdmaWrite)?;
    losses.succeeds(s, 1, Opcode::Send)?;
    if let Some(read) = later {
        s.active.post(&[read])?;
    }
    s.active.succeeds(2, Opcode::RdmaRead)?;
    s.passive.received(1, len, None)?;
    s.passive.holds(at(0, len), round)?;
    s.passive.holds(at(HALF, len), round)?;
    s.active.holds(at(HALF, len), round)?;
    Ok(())
}

/// Rocinante's acknowledgements grant credits, and the credits run out: the active side goes on all
/// the same.
pub(super) fn credits_granted(s: &mut Session<'_>) -> Step {
    let len = s.mtu() + 1;
    s.active.fill(at(0, len), 3)?;
    s.passive.receive(0, &[at(HALF, len); 4])?;
    let list: Vec<Send> = (0..12).map(|id| signaled(id, SEND, &[at(0, len)])).collect();
    s.active.post(&list)?;
    for id in 0..12 {
        if id % 4 == 3 {
            // No credit is left by now, and the peer knows it.
            s.passive.receive(id + 1, &[at(HALF, len); 4])?;
        }
        s.passive.received(id, len, None)?;
    }
    for id in 0..12 {
        s.active.succeeds(id, Opcode::Send)?;
    }
    s.passive.holds(at(HALF, len), 3)
}
