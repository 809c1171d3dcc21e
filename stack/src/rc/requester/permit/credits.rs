//! End-to-end flow control: how many receives a responder says it has (IBTA volume 1, 9.7.7.2 [M]).
//!
//! A limit holds for messages that consume a receive, and only for their beginning. Beyond it one
//! message may still be tried at a time: its first packet, alone and asking for an acknowledgement,
//! which says whether there is a receive and what the limit is now.

use crate::qp::sq::Wqe;
use crate::types::{Psn, Seq};
use crate::verbs::SendOp;
use crate::wire::{AckKind, Aeth, ext};

/// What the peer grants.
#[derive(Debug)]
pub(in crate::rc) struct Credits {
    /// Messages that the peer has completed, of the newest AETH; counted from [`FIRST`], so that
    /// one from before the connection is older.
    completed: Seq,
    /// The number of the last message for which there is a receive; none is known until the peer
    /// has said something.
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
    pub(in crate::rc) fn on_aeth(&mut self, aeth: Aeth) {
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

    /// Whether `wqe`, or the last of so many `more` behind it, is beyond the limit.
    #[inline]
    pub(super) fn lacks(&self, wqe: &Wqe, more: u32) -> bool {
        let Some(limit) = self.limit else { return false };
        let consumes = matches!(
            wqe.op,
            SendOp::Send { .. } | SendOp::SendInv { .. } | SendOp::Write { imm: Some(_), .. }
        );
        // The numbers of messages that are under way lie close together.
        #[allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap)]
        let beyond = wqe.messages.wrapping_add(more).wrapping_sub(limit as u32) as i32 > 0;
        consumes && beyond
    }
}
