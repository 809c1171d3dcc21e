//! End-to-end flow control: the receives that a responder announces (IBTA volume 1, 9.7.7.2 [M]).
//!
//! A limit holds for messages that consume a receive, and only for their beginning. Beyond it one
//! message may still be tried at a time: its first packet, alone and asking for an acknowledgement.
//! The response shows whether there is a receive, and has the new limit.

use crate::qp::sq::Wqe;
use crate::types::{Psn, Seq};
use crate::verbs::SendOp;
use crate::wire::{AckKind, Aeth, ext};

/// The peer's grant.
#[derive(Debug)]
pub(in crate::rc::requester) struct Credits {
    /// Messages that the peer has completed, of the newest AETH; counted from [`FIRST`], so that
    /// one from before the connection is older.
    completed: Seq,
    /// The number of the last message for which there is a receive; none is known before the peer's
    /// first response.
    limit: Option<u64>,
}

/// Message numbers are of 24 bits.
const FIRST: Seq = Seq(1 << 24);

impl Default for Credits {
    fn default() -> Self {
        Self { completed: FIRST, limit: None }
    }
}

impl Credits {
    /// Takes the AETH of a positive response; or of an RNR NAK, by which a peer that sets limits
    /// grants nothing.
    #[inline]
    pub(in crate::rc::requester) fn on_aeth(&mut self, aeth: Aeth) {
        let credit = match aeth.syndrome.kind() {
            AckKind::Ack { credit } => credit,
            AckKind::RnrNak { .. } if self.limit.is_some() => 0,
            AckKind::RnrNak { .. } | AckKind::Nak(_) | AckKind::Reserved => return,
        };
        // As PSNs are.
        let completed = Psn::new(aeth.msn).expand(self.completed);
        if completed >= self.completed {
            self.completed = completed;
            self.limit = ext::credits(credit).map(|count| completed - FIRST + u64::from(count));
        }
    }

    /// Whether `wqe` is beyond the limit.
    #[inline]
    pub(super) fn exceeded(&self, wqe: &Wqe) -> bool {
        self.lacks(wqe, 0)
    }

    /// Whether `wqe`, or the last of `more` requests behind it, is beyond the limit.
    #[inline]
    pub(super) fn lacks(&self, wqe: &Wqe, more: u32) -> bool {
        self.is_beyond(wqe.messages.wrapping_add(more))
            && matches!(
                wqe.op,
                SendOp::Send { .. } | SendOp::SendInv { .. } | SendOp::Write { imm: Some(_), .. }
            )
    }

    /// Whether a message is beyond the limit. The numbers of messages in flight lie close together.
    #[inline]
    fn is_beyond(&self, message: u32) -> bool {
        self.limit.is_some_and(|limit| message.wrapping_sub(limit as u32).cast_signed() > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Syndrome;

    /// The AETH of a peer that has completed this number of messages, and has two receives.
    fn aeth(completed: u64) -> Aeth {
        let msn = (completed & 0xff_ffff) as u32;
        Aeth { syndrome: Syndrome::credits(2), msn }
    }

    /// Message numbers have 24 bits, and begin again.
    #[test]
    fn the_limit_follows_the_peer_over_each_wrap() {
        let (mut credits, mut completed) = (Credits::default(), 0);
        for step in [1 << 22, (1 << 23) - 1, 1 << 20, 12_345].repeat(8) {
            for completed_now in [completed + step - 1, completed + step] {
                credits.on_aeth(aeth(completed_now));
                assert_eq!(credits.limit, Some(completed_now + 2));
            }
            completed += step;
            // An AETH that was overtaken changes nothing.
            credits.on_aeth(aeth(completed - 1));
            assert_eq!(credits.limit, Some(completed + 2));
        }
        assert!(completed > 5 << 24, "it has wrapped five times");
    }

    #[test]
    fn a_message_is_beyond_the_limit_over_the_wrap_of_its_count_too() {
        for limit in [5, u64::from(u32::MAX) - 1, u64::from(u32::MAX), 1 << 32, (1 << 33) + 2] {
            let credits = Credits { limit: Some(limit), ..Credits::default() };
            let beyond = [limit - 1, limit, limit + 1, limit + 1000]
                .map(|message| credits.is_beyond(message as u32));
            assert_eq!(beyond, [false, false, true, true], "{limit}");
        }
        assert!(!Credits::default().is_beyond(7), "no limit is known");
    }
}
