//! The subject sends requests and gets no response, or a late one: timers and retries, draining and
//! resetting.

use rocinante_stack::verbs::QpState;
use rocinante_stack::verbs::WcStatus::{RetryExcErr, RnrRetryExcErr, Success, WrFlushErr};
use rocinante_stack::wire::{NakCode, Opcode as Op};

use crate::departures;
use crate::subject::{Options, Step};
use crate::talk::Talk;

/// Long timeouts: the subject does not give up before the slowest machine has responded.
fn patient() -> Options {
    Options { timeout: 17, retry_cnt: 7, ..Options::default() }
}

/// The last packet of a message, or its ACK, is lost. After the timeout it is sent again, with all
/// unacknowledged packets before it.
pub(crate) fn lost_last_packet(t: &mut Talk<'_>) -> Step {
    t.begin(patient())?;
    t.send(1, 600)?;
    t.says(&["SEND_FIRST #0 256B", "SEND_MIDDLE #1 256B", "SEND_LAST #2 88B"])?;
    t.ack(1)?;
    // Only the timeout shows that the last one was lost.
    t.comes_to(&["SEND_LAST #2 88B"])?;
    t.nothing_ends()?;
    t.ack(2)?;
    t.ends(&[(1, Success)])
}

/// Packets that were reported missing had only been late. The message is acknowledged while it is
/// being sent again, and the peer sends no further ACK for it. (The repeated packets, or the
/// responses to them, are lost.)
pub(crate) fn acknowledged_while_repeated(t: &mut Talk<'_>) -> Step {
    const PACKETS: i64 = 100;
    /// How often the subject may be so quick that it has sent everything again before the ACK
    /// comes.
    const TRIES: i64 = 20;
    t.begin(patient())?;
    for id in 0..TRIES {
        let [first, last] = [PACKETS * id, PACKETS * (id + 1) - 1];
        let ends = format!("SEND_LAST #{last} 256B");
        t.send(id as u64, 256 * PACKETS as usize)?;
        t.comes_to(&[&ends])?;
        t.nak(first + 1, NakCode::PsnSequenceError)?;
        t.ack(last)?;
        if !t.departs(&departures::ACK_WHILE_REPEATED) {
            return t.ends(&[(id as u64, Success)]);
        }
        t.comes_to(&[&ends])?;
        if t.has_ended(id as u64, Success)? {
            continue;
        }
        // Longer than two timeouts.
        (0..150).try_for_each(|_| t.quiet())?;
        if t.has_ended(id as u64, Success)? {
            continue;
        }
        t.becomes(QpState::Rts)?;
        // Until a later message is acknowledged. If that one must be sent again, so is this
        // message, with the later one's PSN and no bytes.
        t.send(TRIES as u64, 10)?;
        t.comes_to(&[&format!("SEND_ONLY #{} 10B", last + 1)])?;
        t.comes_to(&[&format!("SEND_ONLY #{} 0B", last + 1)])?;
        t.comes_to(&[&format!("SEND_ONLY #{} 10B", last + 2)])?;
        t.ack(last + 2)?;
        return t.ends(&[(id as u64, Success), (TRIES as u64, Success)]);
    }
    Err(format!("{TRIES} messages ended though they were acknowledged while they were repeated"))
}

/// The request of an atomic or READ is lost, or its response.
pub(crate) fn lost_response(t: &mut Talk<'_>) -> Step {
    t.begin(patient())?;
    t.add(1, 64)?;
    t.comes_to(&["FETCH_ADD #0 @9000 1 0", "FETCH_ADD #0 @9000 1 0"])?;
    t.found(0, 4)?;
    t.ends(&[(1, Success)])?;
    t.holds(64, &4u64.to_ne_bytes())?;
    t.read(2, 8)?;
    t.comes_to(&["READ #1 @9000+8", "READ #1 @9000+8"])?;
    t.data(Op::RC_RDMA_READ_RESPONSE_ONLY, 1, b"new data")?;
    t.ends(&[(2, Success)])?;
    t.holds(0, b"new data")
}

/// No response at all: the oldest request fails, and the others are flushed.
pub(crate) fn retries_exhausted(t: &mut Talk<'_>) -> Step {
    for retry_cnt in [0, 2] {
        t.begin(Options { timeout: 12, retry_cnt, ..Options::default() })?;
        t.post_recv(9, &[])?;
        t.send(1, 10)?;
        t.send(2, 10)?;
        for _ in 0..=retry_cnt {
            t.comes_to(&["SEND_ONLY #0 10B"])?;
        }
        t.ends_as(1, &[RetryExcErr])?;
        t.becomes(QpState::Err)?;
        t.ends_in_any_order(&[2, 9], WrFlushErr)?;
        // No further repetition.
        while let Some((line, _)) = t.next(false)? {
            if line != "SEND_ONLY #1 10B" {
                return Err(format!("{line:?} after the last retry"));
            }
        }
    }
    Ok(())
}

/// The peer first has no receive, then it has one: the request waits as long as the RNR NAK says
/// and is sent again.
pub(crate) fn rnr_then_success(t: &mut Talk<'_>) -> Step {
    t.begin(Options { rnr_retry: 7, ..Options::default() })?;
    t.send(1, 600)?;
    t.send(2, 10)?;
    let all = ["SEND_FIRST #0 256B", "SEND_MIDDLE #1 256B", "SEND_LAST #2 88B", "SEND_ONLY #3 10B"];
    t.says(&all)?;
    for _ in 0..20 {
        t.rnr(0, 1)?;
        t.says(&all)?;
    }
    t.nothing_ends()?;
    t.ack(2)?;
    t.ends_as(1, &[Success])?;
    // The packets before the one without a receive are acknowledged.
    t.rnr(3, 14)?;
    t.says(&all[3..])?;
    t.ack(3)?;
    t.ends(&[(2, Success)])
}

/// The peer never has a receive: after `rnr_retry` repetitions the request fails.
pub(crate) fn rnr_exhausted(t: &mut Talk<'_>) -> Step {
    for rnr_retry in [0, 2] {
        t.begin(Options { rnr_retry, ..Options::default() })?;
        t.send(1, 10)?;
        t.says(&["SEND_ONLY #0 10B"])?;
        for _ in 0..rnr_retry {
            t.rnr(0, 1)?;
            t.says(&["SEND_ONLY #0 10B"])?;
        }
        t.rnr(0, 1)?;
        t.ends(&[(1, RnrRetryExcErr)])?;
        t.becomes(QpState::Err)?;
    }
    Ok(())
}

/// RNR NAKs use no timeout retries, and timeouts no RNR retries.
pub(crate) fn rnr_and_timeouts(t: &mut Talk<'_>) -> Step {
    t.begin(Options { rnr_retry: 1, ..patient() })?;
    t.send(1, 10)?;
    t.comes_to(&["SEND_ONLY #0 10B", "SEND_ONLY #0 10B", "SEND_ONLY #0 10B"])?;
    t.rnr(0, 1)?;
    t.comes_to(&["SEND_ONLY #0 10B"])?;
    t.ack(0)?;
    t.ends(&[(1, Success)])?;
    t.send(2, 10)?;
    t.comes_to(&["SEND_ONLY #1 10B"])?;
    t.ack(1)?;
    t.ends(&[(2, Success)])
}

/// SQD completes the requests that have begun and begins no other. The peer's requests are served
/// meanwhile. RTS resumes sending.
pub(crate) fn drained(t: &mut Talk<'_>) -> Step {
    t.begin(Options::default())?;
    t.send(1, 600)?;
    t.says(&["SEND_FIRST #0 256B", "SEND_MIDDLE #1 256B", "SEND_LAST #2 88B"])?;
    t.modify(QpState::Sqd)?;
    t.send(2, 10)?;
    t.quiet()?;
    t.serves(0, 1)?;
    t.ack(2)?;
    t.ends(&[(1, Success)])?;
    t.quiet()?;
    t.modify(QpState::Rts)?;
    if t.departs(&departures::SQD_TO_RTS) {
        // It may resume only when another request is posted.
        t.send(3, 10)?;
        t.says(&["SEND_ONLY #3 10B", "SEND_ONLY #4 10B"])?;
    } else {
        t.says(&["SEND_ONLY #3 10B"])?;
        t.send(3, 10)?;
        t.says(&["SEND_ONLY #4 10B"])?;
    }
    t.ack(4)?;
    t.ends(&[(2, Success), (3, Success)])
}

/// The queue pair is reset and connected again, with other PSNs, while old responses are still in
/// flight.
pub(crate) fn reset_and_reuse_while_old_answers_fly(t: &mut Talk<'_>) -> Step {
    t.begin(Options::default())?;
    t.send(1, 10)?;
    t.read(2, 8)?;
    t.says(&["SEND_ONLY #0 10B", "READ #1 @9000+8"])?;
    // The old PSNs count as earlier than the new ones.
    t.begin(Options { psn: [0x40_0000, 0x5000], ..Options::default() })?;
    let old = 0x10 - 0x40_0000;
    t.read(3, 8)?;
    t.send(4, 10)?;
    let departs = t.departs(&departures::RESET_WITH_REQUESTS);
    if departs {
        t.says(&["WRITE_ONLY #0 0B @0+0", "WRITE_ONLY #1 0B @0+0"])?;
    }
    let next = if departs { 2 } else { 0 };
    t.says(&[&format!("READ #{next} @9000+8"), &format!("SEND_ONLY #{} 10B", next + 1)])?;
    // One ACK for each, because that of the second would not cover the first. An earlier ACK would
    // be ignored.
    (0..next).try_for_each(|psn| t.ack(psn))?;
    t.ack(old)?;
    t.data(Op::RC_RDMA_READ_RESPONSE_ONLY, old + 1, b"old data")?;
    t.data(Op::RC_RDMA_READ_RESPONSE_ONLY, next, b"new data")?;
    t.ends_as(3, &[Success])?;
    t.holds(0, b"new data")?;
    t.ack(next + 1)?;
    t.ends(&[(4, Success)])
}
