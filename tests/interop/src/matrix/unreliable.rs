//! Unreliable connections: a message arrives whole, or is lost without notice.

use super::datagrams::LOST_MS;
use super::node::{BUFFER, GRH, SEND, Step, at, signaled};
use super::scenario::Session;
use crate::agent::machine::Kind;
use crate::agent::proto::{LOCAL_WRITE, Op, Opcode, QpState, Range};

const HALF: usize = BUFFER / 2;

/// SENDs of all sizes, with immediate and without.
pub(super) fn send(s: &mut Session<'_>) -> Step {
    let sizes = s.sizes().into_iter().chain([0]);
    for (number, len) in (0..).zip(sizes) {
        let imm = (number % 2 == 0).then_some(0xfeed_0000 | len as u32);
        s.active.fill(at(0, len), number)?;
        s.passive.receive(number, &[at(HALF, len + 5)])?;
        s.active.perform(number, Op::Send { imm }, &[at(0, len)])?;
        s.passive.received(number, len, imm)?;
        s.passive.holds(at(HALF, len), number)?;
    }
    Ok(())
}

/// WRITEs of all sizes; a WRITE without immediate is announced by the SEND behind it.
pub(super) fn write(s: &mut Session<'_>) -> Step {
    let sizes = s.sizes().into_iter().chain([0]);
    for (number, len) in (0..).zip(sizes) {
        s.active.fill(at(0, len), number)?;
        s.passive.receive(number, &[at(0, 0)])?;
        let imm = (number % 2 == 0).then_some(0xbeef_0000 | len as u32);
        s.active.perform(number, s.passive.write_to(HALF + 3, imm), &[at(0, len)])?;
        let wanted = match imm {
            Some(_) => (Opcode::RecvRdmaWithImm, len),
            None => {
                s.active.perform(number, SEND, &[])?;
                (Opcode::Recv, 0)
            }
        };
        let wc = s.passive.ends(number, "SUCCESS")?;
        s.passive.expect(&(wc.opcode, wc.byte_len as usize), &wanted, "opcode and length")?;
        s.passive.expect(&wc.imm, &imm, "the immediate")?;
        s.passive.holds(at(HALF + 3, len), number)?;
    }
    s.passive.untouched(at(0, HALF + 3))
}

/// The first PSNs are just below 2²⁴.
pub(super) fn psn_wraps(s: &mut Session<'_>) -> Step {
    let len = 4 * s.mtu() + 3;
    for round in 0..3 {
        s.active.fill(at(0, len), round)?;
        s.passive.receive(round, &[at(HALF, len)])?;
        s.active.perform(round, SEND, &[at(0, len)])?;
        s.passive.received(round, len, None)?;
        s.passive.holds(at(HALF, len), round)?;
    }
    Ok(())
}

/// If a packet of a message is lost, the whole message is lost without notice. Messages that arrive
/// are complete and in order.
pub(super) fn lost(s: &mut Session<'_>) -> Step {
    let len = 6 * s.mtu().min(2048) + 5;
    let rule = s.lose(true, 8.0)?;
    let (mut posted, mut last, mut missed, mut behind) = (false, None, 0, false);
    for round in 1..200 {
        s.active.fill(at(0, len), round)?;
        if !posted {
            s.passive.receive(round, &[at(HALF, len)])?;
        }
        // The immediate identifies the message, in case it comes late.
        let imm = u32::try_from(round).unwrap_or(0);
        s.active.perform(round, Op::Send { imm: Some(imm) }, &[at(0, len)])?;
        let found = s.passive.poll(1, LOST_MS)?;
        posted = found.is_empty();
        let Some(wc) = found.first() else {
            missed += 1;
            continue;
        };
        s.passive.expect(&wc.status.as_str(), &"SUCCESS", "the status")?;
        s.passive.expect(&(wc.byte_len as usize), &len, "the length")?;
        if wc.imm <= last {
            return Err(format!("after {last:?} came {:?}", wc.imm));
        }
        last = wc.imm;
        s.passive.holds(at(HALF, len), last.unwrap_or(0).into())?;
        behind |= missed > 0;
        if missed >= 2 && behind && rule.lost()? > 0 {
            return s.both_in(QpState::Rts);
        }
    }
    Err(format!("{missed} messages of 199 were lost, {} packets", rule.lost()?))
}

/// A WRITE with a wrong key, and a SEND without a posted receive, are dropped; the next message is
/// fine.
pub(super) fn refused(s: &mut Session<'_>) -> Step {
    let len = 2 * s.mtu() + 1;
    s.active.fill(at(0, len), 7)?;
    let (remote, rkey) = s.passive.remote(HALF);
    s.active.perform(1, Op::Write { remote, rkey: rkey ^ 0x55, imm: None }, &[at(0, len)])?;
    s.active.perform(2, SEND, &[at(0, len)])?;
    s.passive.quiet(LOST_MS)?;
    s.passive.untouched(at(0, BUFFER))?;
    s.passive.receive(3, &[at(HALF, len)])?;
    s.active.perform(3, SEND, &[at(0, len)])?;
    s.passive.received(3, len, None)?;
    s.passive.holds(at(HALF, len), 7)?;
    s.both_in(QpState::Rts)
}

/// A SEND longer than the receive is dropped, and the next message gets the receive.
pub(super) fn too_long(s: &mut Session<'_>) -> Step {
    let len = s.mtu() + 1;
    s.active.fill(at(0, len), 7)?;
    s.passive.receive(3, &[at(HALF, len - 1)])?;
    s.active.perform(1, SEND, &[at(0, len)])?;
    if s.passive.kind() == Kind::SoftRoce {
        // Soft-RoCE breaks the queue pair: see the table of its departures.
        s.notice("a SEND longer than the receive breaks an unreliable connection");
        s.passive.ends(3, "LOC_QP_OP_ERR")?;
        let state = s.passive.state()?;
        return s.passive.expect(&state, &QpState::Err, "the state");
    }
    s.passive.quiet(LOST_MS)?;
    s.passive.untouched(at(HALF + len - 1, 64))?;
    s.active.perform(2, SEND, &[at(0, len - 1)])?;
    s.passive.received(3, len - 1, None)?;
    s.passive.holds(at(HALF, len - 1), 7)?;
    s.both_in(QpState::Rts)
}

/// A request that fails locally stops the sending (SQE) and nothing else, until the program
/// restarts it.
pub(super) fn stops_sending(s: &mut Session<'_>) -> Step {
    if !stopped(s, SEND)? {
        return Ok(());
    }
    let Session { active, passive, .. } = s;
    // It still receives.
    passive.fill(at(0, 9), 5)?;
    active.receive(4, &[at(HALF, 9)])?;
    passive.perform(4, SEND, &[at(0, 9)])?;
    active.received(4, 9, None)?;
    active.holds(at(HALF, 9), 5)?;
    active.modify(QpState::Rts)?;
    active.fill(at(0, 9), 6)?;
    passive.receive(5, &[at(HALF, 9)])?;
    active.perform(5, SEND, &[at(0, 9)])?;
    passive.received(5, 9, None)?;
    passive.holds(at(HALF, 9), 6)
}

/// Posts a request `op` that may not use its memory, which fails together with the next one.
/// Returns whether the sending has stopped, and nothing else.
pub(super) fn stopped(s: &mut Session<'_>, op: Op) -> Step<bool> {
    s.active.foreign_region(64, LOCAL_WRITE)?;
    let foreign = Range { region: 1, offset: 0, len: 9 };
    // Taken now, so that it does not take a later receive.
    s.passive.receive(0, &[at(HALF, GRH + 9)])?;
    s.active.perform(1, op, &[at(0, 9)])?;
    s.passive.ends(0, "SUCCESS")?;
    s.active.post(&[signaled(2, op, &[foreign]), signaled(3, op, &[at(0, 9)])])?;
    let (state, stops) = match s.active.kind() {
        Kind::SoftRoce => {
            // Soft-RoCE breaks the queue pair: see the table of its departures.
            s.notice("a request of an unreliable queue pair that fails here breaks it, instead of taking it to SQE");
            let wc = s.active.completions(1)?.remove(0);
            s.active.expect(&wc.wr_id, &2, "the request")?;
            (QpState::Err, false)
        }
        Kind::Rocinante | Kind::Device => {
            s.active.ends(2, "LOC_PROT_ERR")?;
            (QpState::Sqe, true)
        }
    };
    s.active.ends(3, "WR_FLUSH_ERR")?;
    let is = s.active.state()?;
    s.active.expect(&is, &state, "the state")?;
    Ok(stops)
}
