//! Refused requests, and how both sides see them.

use super::node::{BUFFER, SEND, Step, at, signaled};
use super::scenario::Session;
use crate::agent::machine::Kind;
use crate::agent::proto::{LOCAL_WRITE, Op, Opcode, QpState, REMOTE_READ, Send};

pub(super) fn wrong_key(s: &mut Session<'_>) -> Step {
    let (remote, rkey) = s.passive.remote(0);
    refused(s, Op::Write { remote, rkey: rkey ^ 0x55, imm: None }, "REM_ACCESS_ERR")
}

pub(super) fn out_of_range(s: &mut Session<'_>) -> Step {
    let op = s.passive.read_from(BUFFER - 8);
    refused(s, op, "REM_ACCESS_ERR")
}

/// The region may be read and not written.
pub(super) fn region_forbids(s: &mut Session<'_>) -> Step {
    let region = s.passive.region(4096, LOCAL_WRITE | REMOTE_READ)?;
    s.active.perform(9, Op::Read { remote: region.address, rkey: region.rkey }, &[at(0, 16)])?;
    let write = Op::Write { remote: region.address, rkey: region.rkey, imm: None };
    refused(s, write, "REM_ACCESS_ERR")
}

/// The region permits everything and the queue pair nothing.
pub(super) fn queue_pair_forbids(s: &mut Session<'_>) -> Step {
    let op = s.passive.write_to(0, None);
    refused(s, op, "REM_INV_REQ_ERR")
}

/// Posts a request of 16 bytes, which is refused: it ends in `status`, the next one is flushed, and
/// no byte changes.
fn refused(s: &mut Session<'_>, op: Op, status: &str) -> Step {
    s.active.fill(at(0, 16), 1)?;
    s.active.post(&[signaled(1, op, &[at(0, 16)]), signaled(2, SEND, &[at(0, 16)])])?;
    s.active.ends(1, status)?;
    s.active.ends(2, "WR_FLUSH_ERR")?;
    let state = s.active.state()?;
    s.active.expect(&state, &QpState::Err, "the state")?;
    s.passive.untouched(at(0, 4096))?;
    let wanted = match status {
        "REM_ACCESS_ERR" => "local access violation work queue error",
        _ => "invalid request local work queue error",
    };
    // The responding program must get an event, too.
    let event = match s.passive.kind() {
        Kind::SoftRoce => return Ok(()),
        Kind::Rocinante => s.passive.async_event(5000)?,
        Kind::Device => s.passive.async_event(1000)?,
    };
    if s.passive.kind() == Kind::Device && event.is_none() {
        s.notice(format!("no event {wanted:?} where a request was refused ({status})"));
        return Ok(());
    }
    s.passive.expect(&event, &Some(wanted.into()), "the event")
}

/// The message is longer than the receive.
pub(super) fn message_too_long(s: &mut Session<'_>) -> Step {
    s.passive.receive(1, &[at(0, 10)])?;
    s.active.post(&[signaled(1, SEND, &[at(0, 11)])])?;
    // Soft-RoCE reports an operational error on both sides: see the table of its departures.
    let (status, of_the_receive) = match s.passive.kind() {
        Kind::SoftRoce => ("REM_OP_ERR", "LOC_QP_OP_ERR"),
        Kind::Rocinante | Kind::Device => ("REM_INV_REQ_ERR", "LOC_LEN_ERR"),
    };
    s.active.ends(1, status)?;
    s.passive.ends(1, of_the_receive)?;
    let state = s.passive.state()?;
    s.passive.expect(&state, &QpState::Err, "the state")?;
    if s.passive.kind() == Kind::SoftRoce {
        s.notice(format!(
            "a SEND longer than the receive ends in {status} and {of_the_receive} instead of REM_INV_REQ_ERR and LOC_LEN_ERR"
        ));
    }
    s.passive.untouched(at(10, 4096))
}

/// The peer's queue pair is in the error state: it does not answer, and its receives are flushed.
pub(super) fn peer_in_error(s: &mut Session<'_>) -> Step {
    s.passive.receive(7, &[at(0, 64), at(0, 64)])?;
    s.passive.modify(QpState::Err)?;
    s.passive.ends(7, "WR_FLUSH_ERR")?;
    s.passive.ends(8, "WR_FLUSH_ERR")?;
    s.active.post(&[signaled(1, SEND, &[at(0, 16)])])?;
    s.active.ends(1, "RETRY_EXC_ERR").map(drop)
}

pub(super) fn peer_destroyed(s: &mut Session<'_>) -> Step {
    let op = s.passive.write_to(0, None);
    s.active.perform(0, op, &[at(0, 16)])?;
    s.passive.destroy(0)?;
    s.active.post(&[signaled(1, op, &[at(0, 16)])])?;
    s.active.ends(1, "RETRY_EXC_ERR").map(drop)
}

/// Each side flushes its requests when its queue pair goes to the error state.
pub(super) fn flushed(s: &mut Session<'_>) -> Step {
    for node in [&mut s.active, &mut s.passive] {
        node.receive(0, &[at(0, 8), at(8, 8)])?;
        node.modify(QpState::Err)?;
        node.ends(0, "WR_FLUSH_ERR")?;
        node.ends(1, "WR_FLUSH_ERR")?;
        node.post(&[Send { signaled: false, ..signaled(5, SEND, &[at(0, 8)]) }])?;
        node.ends(5, "WR_FLUSH_ERR")?;
    }
    Ok(())
}

/// The queue pairs are reset in use and connected again, with other PSNs.
pub(super) fn connected_again(s: &mut Session<'_>) -> Step {
    let len = s.mtu() + 1;
    for round in 0..3 {
        s.active.fill(at(0, len), round.into())?;
        s.active.perform(0, s.passive.write_to(0, None), &[at(0, len)])?;
        s.passive.holds(at(0, len), round.into())?;
        s.reconnect(0x100 + round)?;
    }
    Ok(())
}

/// The send queue of the active side is drained and stopped (SQD), and goes on.
pub(super) fn drained(s: &mut Session<'_>) -> Step {
    s.active.fill(at(0, 64), 1)?;
    s.active.perform(0, s.passive.write_to(0, None), &[at(0, 64)])?;
    s.active.stop_sending()?;
    s.active.post(&[signaled(1, s.passive.write_to(128, None), &[at(0, 64)])])?;
    let found = s.active.poll(1, 100)?;
    s.active.expect(&found, &vec![], "the completions in SQD")?;
    s.passive.untouched(at(128, 64))?;
    // Meanwhile the active side responds.
    s.passive.perform(3, s.active.read_from(0), &[at(4096, 64)])?;
    s.passive.holds(at(4096, 64), 1)?;
    s.active.modify(QpState::Rts)?;
    let second = signaled(2, s.passive.write_to(256, None), &[at(0, 64)]);
    if s.active.kind() == Kind::SoftRoce {
        // It does not always go on by itself: see the table of its departures.
        s.active.post(&[second])?;
        s.active.succeeds(1, Opcode::RdmaWrite)?;
    } else {
        s.active.succeeds(1, Opcode::RdmaWrite)?;
        s.active.post(&[second])?;
    }
    s.active.succeeds(2, Opcode::RdmaWrite)?;
    s.passive.holds(at(128, 64), 1)?;
    s.passive.holds(at(256, 64), 1)
}
