//! Shared receive queues: a message that needs a receive takes the oldest. A broken queue pair does
//! not affect the others.

use super::datagrams::QKEY;
use super::node::{BUFFER, GRH, SEND, Step, at, signaled};
use super::scenario::Session;
use crate::agent::proto::{Completion, Op, Opcode, QpState, Send};

const HALF: usize = BUFFER / 2;
/// Bytes of a receive.
const SIZE: usize = 256;

/// SENDs and WRITEs with immediate on several queue pairs take receives in the order of arrival.
pub(super) fn shares(s: &mut Session<'_>) -> Step {
    let places: Vec<_> = (0..8).map(|n| at(n * SIZE, SIZE)).collect();
    s.passive.receive_shared(0, &places)?;
    let len = s.mtu() + 9;
    s.active.fill(at(0, len), 3)?;
    for (round, qp) in (0..).zip([0, 2, 1, 1, 0, 2]) {
        let id = round as u64;
        let (op, bytes) = match round % 3 {
            2 => (s.passive.write_to(HALF, Some(5)), len),
            _ => (SEND, SIZE - round),
        };
        s.active.post_on(qp, &[signaled(id, op, &[at(0, bytes)])])?;
        s.active.ends(id, "SUCCESS")?;
        let wc = s.passive.received_on(qp, id, bytes)?;
        if round % 3 == 2 {
            s.passive.expect(&wc.opcode, &Opcode::RecvRdmaWithImm, "the opcode")?;
            s.passive.holds(at(HALF, len), 3)?;
            s.passive.untouched(at(round * SIZE, SIZE))?;
        } else {
            s.passive.holds(at(round * SIZE, bytes), 3)?;
        }
    }
    Ok(())
}

/// Datagrams to several queue pairs take receives of one queue.
pub(super) fn datagrams(s: &mut Session<'_>) -> Step {
    let places: Vec<_> = (0..4).map(|n| at(n * SIZE, SIZE)).collect();
    s.passive.receive_shared(0, &places)?;
    for (round, qp) in (0..).zip([0, 1, 1, 0]) {
        let (id, len) = (round as u64, 10 + round);
        s.active.fill(at(0, len), id)?;
        let qpn = s.passive.qpn_of(qp);
        s.active.perform(
            id,
            Op::SendTo { handle: 0, qpn, qkey: QKEY, imm: None },
            &[at(0, len)],
        )?;
        let wc = s.passive.received_on(qp, id, GRH + len)?;
        s.passive.expect(&wc.source, &Some(s.active.qpn()), "the sender")?;
        s.passive.holds(at(round * SIZE + GRH, len), id)?;
    }
    Ok(())
}

/// Without receives, reliable senders wait until there are some. The order of two queue pairs is
/// open, also where each has its own processor: one takes the first receive, the other ends sooner.
pub(super) fn not_ready(s: &mut Session<'_>) -> Step {
    for qp in 0..2 {
        s.active.post_on(qp, &[signaled(qp as u64, SEND, &[at(0, 9)])])?;
    }
    s.active.quiet(20)?;
    s.passive.receive_shared(0, &[at(HALF, 9), at(HALF, 9)])?;
    let both = vec![(0, "SUCCESS"), (1, "SUCCESS")];
    let came = s.passive.completions(2)?;
    let qpns = sorted(came.iter().map(|wc| wc.qpn).collect());
    let wanted = sorted([0, 1].map(|qp| s.passive.qpn_of(qp)).to_vec());
    s.passive.expect(&qpns, &wanted, "the queue pairs")?;
    s.passive.expect(&ends(&came), &both, "the receives")?;
    let sent = s.active.completions(2)?;
    s.active.expect(&ends(&sent), &both, "the requests")
}

/// The ended requests, with their statuses.
fn ends(completions: &[Completion]) -> Vec<(u64, &str)> {
    sorted(completions.iter().map(|wc| (wc.wr_id, wc.status.as_str())).collect())
}

fn sorted<T: Ord>(mut list: Vec<T>) -> Vec<T> {
    list.sort_unstable();
    list
}

/// The event of the limit comes once.
pub(super) fn limit(s: &mut Session<'_>) -> Step {
    s.passive.receive_shared(0, &[at(0, 64); 8])?;
    s.passive.arm_srq(0, 6)?;
    for id in 0..5 {
        s.active.post_on(id as usize % 2, &[signaled(id, SEND, &[at(0, 64)])])?;
        s.active.ends(id, "SUCCESS")?;
        s.passive.received_on(id as usize % 2, id, 64)?;
        let limit = Some("SRQ limit reached".to_owned());
        let (wanted, patience) = if id == 2 { (limit, 5000) } else { (None, 10) };
        let event = s.passive.async_event(patience)?;
        s.passive.expect(&event, &wanted, &format!("the event with {} left", 7 - id))?;
    }
    Ok(())
}

/// A queue pair that breaks reports that it takes no more receives, and leaves the posted ones to
/// the others.
pub(super) fn last(s: &mut Session<'_>) -> Step {
    s.passive.receive_shared(0, &[at(0, 64); 4])?;
    s.active.post_on(0, &[signaled(0, SEND, &[at(0, 64)])])?;
    s.active.ends(0, "SUCCESS")?;
    s.passive.received_on(0, 0, 64)?;
    s.passive.modify(QpState::Err)?;
    let event = s.passive.async_event(5000)?;
    s.passive.expect(&event, &Some("last WQE reached".into()), "the event")?;
    let list: Vec<Send> = (1..4).map(|id| signaled(id, SEND, &[at(0, 64)])).collect();
    s.active.post_on(1, &list)?;
    for id in 1..4 {
        s.active.ends(id, "SUCCESS")?;
        s.passive.received_on(1, id, 64)?;
    }
    s.passive.quiet(10)
}
