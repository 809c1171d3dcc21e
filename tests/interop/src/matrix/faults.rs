//! Faults on the way, recovered or given up.

use std::time::Duration;

use super::losses::Losses;
use super::node::{BUFFER, SEND, Step, at, signaled};
use super::operations::write_send_read;
use super::scenario::Session;
use crate::agent::proto::{Opcode, QpState};

const HALF: usize = BUFFER / 2;

/// A receive comes late: the requester waits for the timer of the RNR NAK, and then succeeds.
pub(super) fn receiver_not_ready(s: &mut Session<'_>) -> Step {
    let len = s.mtu() + 1;
    s.active.fill(at(0, len), 1)?;
    s.active.post(&[signaled(0, SEND, &[at(0, len)]), signaled(1, SEND, &[at(0, 1)])])?;
    std::thread::sleep(Duration::from_millis(3));
    s.passive.receive(0, &[at(HALF, len), at(0, 1)])?;
    s.active.succeeds(0, Opcode::Send)?;
    s.active.succeeds(1, Opcode::Send)?;
    s.passive.received(0, len, None)?;
    s.passive.received(1, 1, None)?;
    s.passive.holds(at(HALF, len), 1)
}

/// A receive never comes.
pub(super) fn receiver_never_ready(s: &mut Session<'_>) -> Step {
    s.active.post(&[signaled(0, SEND, &[at(0, 9)]), signaled(1, SEND, &[at(0, 9)])])?;
    s.active.ends(0, "RNR_RETRY_EXC_ERR")?;
    s.active.ends(1, "WR_FLUSH_ERR")?;
    let state = s.active.state()?;
    s.active.expect(&state, &QpState::Err, "the state")?;
    let state = s.passive.state()?;
    s.passive.expect(&state, &QpState::Rts, "the state")
}

pub(super) fn requests_lost(s: &mut Session<'_>) -> Step {
    // Not more: Soft-RoCE resets its retry counter only after a whole message.
    with_losses(s, true, 6.0)
}

pub(super) fn responses_lost(s: &mut Session<'_>) -> Step {
    // More: there are fewer of them, even more so if a READ's responses leave as one super-packet.
    with_losses(s, false, 15.0)
}

/// Everything arrives once and in order, though packets are lost.
fn with_losses(s: &mut Session<'_>, requests: bool, percent: f64) -> Step {
    let len = 6 * s.mtu().min(2048) + 5;
    let mut losses = Losses::begin(s, &[(requests, percent)])?;
    for round in 0..60 {
        write_send_read(s, &mut losses, len, round, false)?;
        if round >= 2 && losses.least()? >= 3 {
            return Ok(());
        }
    }
    Err("hardly a packet was lost".into())
}

/// The peer's answers never come.
pub(super) fn nobody_answers(s: &mut Session<'_>) -> Step {
    let rule = s.lose(false, 100.0)?;
    let op = s.passive.write_to(0, None);
    s.active.post(&[signaled(0, op, &[at(0, 9)]), signaled(1, op, &[at(0, 9)])])?;
    s.active.ends(0, "RETRY_EXC_ERR")?;
    s.active.ends(1, "WR_FLUSH_ERR")?;
    if rule.lost()? == 0 {
        return Err("nothing was lost".into());
    }
    Ok(())
}
