//! The completer: the meaning of a response for the requester. It judges; the queue pair acts.

use crate::types::Seq;
use crate::verbs::WcStatus;
use crate::wire::{AckKind, NakCode, Syndrome};

/// What to do about a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Everything before `to` is acknowledged.
    Advance { to: Seq },
    /// Everything before `to` is acknowledged; send again from `from` on.
    Retry { to: Seq, from: Seq, why: Why },
    /// Everything before `to` is acknowledged; the peer has no receive for it, wait as the 5-bit
    /// code says.
    RnrWait { to: Seq, timer: u8 },
    /// Everything before `to` is acknowledged; the request at `to` failed.
    Fatal { to: Seq, status: WcStatus },
    /// It was acknowledged before.
    Duplicate,
    /// It answers no request.
    Ghost,
    /// A reserved syndrome.
    BadSyndrome,
}

/// Why packets are sent again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Why {
    /// The peer reported a gap.
    SequenceNak,
    /// A response overtook one that is missing.
    Implied,
}

/// Judges an acknowledgement of `psn`, given the unacknowledged PSNs (`una..sent`) and the PSN of
/// the oldest response with data that is still to come.
///
/// An acknowledgement covers all before it, except that a READ or atomic is acknowledged only by
/// its own response: one that is passed over is an implied NAK of it (IBTA volume 1, 9.7.5.1 [M]).
pub(super) fn judge(
    syndrome: Syndrome,
    psn: Seq,
    una: Seq,
    sent: Seq,
    gate: Option<Seq>,
) -> Verdict {
    if psn >= sent {
        return Verdict::Ghost;
    }
    if psn < una {
        return Verdict::Duplicate;
    }
    let kind = syndrome.kind();
    // A NAK acknowledges the packets before `psn`, an ACK that of `psn`, too.
    let to = match kind {
        AckKind::Ack { .. } => psn + 1,
        _ => psn,
    };
    if kind == AckKind::Reserved {
        return Verdict::BadSyndrome;
    }
    if let Some(expected) = gate
        && expected < to
    {
        return Verdict::Retry { to: expected, from: expected, why: Why::Implied };
    }
    match kind {
        AckKind::Ack { .. } => Verdict::Advance { to },
        AckKind::RnrNak { timer } => Verdict::RnrWait { to, timer },
        AckKind::Nak(NakCode::PsnSequenceError) => {
            Verdict::Retry { to, from: to, why: Why::SequenceNak }
        }
        AckKind::Nak(NakCode::InvalidRequest | NakCode::InvalidRdRequest) => {
            Verdict::Fatal { to, status: WcStatus::RemInvReqErr }
        }
        AckKind::Nak(NakCode::RemoteAccessError) => {
            Verdict::Fatal { to, status: WcStatus::RemAccessErr }
        }
        AckKind::Nak(NakCode::RemoteOperationalError) => {
            Verdict::Fatal { to, status: WcStatus::RemOpErr }
        }
        AckKind::Reserved => Verdict::BadSyndrome,
    }
}

/// What to do about a packet that carries a READ response or an atomic's result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DataVerdict {
    /// It is the next one expected; everything before it is acknowledged too.
    Take,
    /// One before it is missing: send the request again from there on.
    Retry { from: Seq },
    /// It arrived before.
    Duplicate,
    /// It answers no request.
    Ghost,
}

/// Judges a response with data at `psn`; `gate` as for [`judge`].
pub(super) fn judge_data(psn: Seq, una: Seq, sent: Seq, gate: Option<Seq>) -> DataVerdict {
    if psn >= sent {
        return DataVerdict::Ghost;
    }
    if psn < una {
        return DataVerdict::Duplicate;
    }
    match gate {
        Some(expected) if psn == expected => DataVerdict::Take,
        Some(expected) if psn > expected => DataVerdict::Retry { from: expected },
        // The PSNs from `una` to the next READ are those of other requests, whose responses have no
        // data.
        _ => DataVerdict::Ghost,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of 10 to 19, which are not acknowledged.
    fn judged(syndrome: Syndrome, psn: u64, gate: Option<u64>) -> Verdict {
        judge(syndrome, Seq(psn), Seq(10), Seq(20), gate.map(Seq))
    }

    fn judged_data(psn: u64) -> DataVerdict {
        judge_data(Seq(psn), Seq(10), Seq(20), Some(Seq(12)))
    }

    #[test]
    fn acknowledgements_outside_the_window_change_nothing() {
        assert_eq!(judged(Syndrome::ACK_UNLIMITED, 20, None), Verdict::Ghost);
        assert_eq!(judged(Syndrome::ACK_UNLIMITED, 9, None), Verdict::Duplicate);
        let nak = Syndrome::nak(NakCode::RemoteAccessError);
        assert_eq!(judged(nak, 9, None), Verdict::Duplicate);
        assert_eq!(judged(nak, 20, None), Verdict::Ghost);
    }

    #[test]
    fn an_ack_that_passes_a_missing_response_is_an_implied_nak_of_it() {
        let verdict = judged(Syndrome::ACK_UNLIMITED, 15, Some(12));
        assert_eq!(verdict, Verdict::Retry { to: Seq(12), from: Seq(12), why: Why::Implied });
        assert_eq!(judged(Syndrome::ACK_UNLIMITED, 11, Some(12)), Verdict::Advance { to: Seq(12) });
        assert_eq!(judged_data(12), DataVerdict::Take);
        assert_eq!(judged_data(13), DataVerdict::Retry { from: Seq(12) });
        assert_eq!(judged_data(11), DataVerdict::Ghost);
        assert_eq!(judged_data(9), DataVerdict::Duplicate);
    }

    #[test]
    fn an_ack_covers_all_before_it_and_a_nak_all_but_itself() {
        assert_eq!(judged(Syndrome::ACK_UNLIMITED, 15, None), Verdict::Advance { to: Seq(16) });
        let nak = Syndrome::nak(NakCode::PsnSequenceError);
        let expected = Verdict::Retry { to: Seq(15), from: Seq(15), why: Why::SequenceNak };
        assert_eq!(judged(nak, 15, None), expected);
        assert_eq!(
            judged(Syndrome::rnr(12), 15, None),
            Verdict::RnrWait { to: Seq(15), timer: 12 }
        );
        assert_eq!(judged(Syndrome(0x80), 15, None), Verdict::BadSyndrome);
    }
}
