//! The checks of a request's size, and the amounts it takes: length, packets, messages, and cost to
//! its receiver.

use super::{OVERHEAD, SendQueue, Sum, full_cost};
use crate::pool::Budget;
use crate::qp::post::PostError;
use crate::types::Mtu;
use crate::verbs::{SendData, SendOp, SendWr};

/// The most bytes of one message: 2^31.
pub(crate) const MESSAGE_MAX: u64 = 1 << 31;

/// The cost of the longest packet.
const COST_MAX: u32 = Budget::cost(4096 + OVERHEAD);
const _: () = assert!(COST_MAX <= u16::MAX as u32);

/// The amounts that a request takes, and the queue's sums including them.
pub(super) struct Extent {
    pub(super) packets: u32,
    pub(super) messages: u32,
    pub(super) measure: u16,
    pub(super) charges: Sum,
    /// Whether each of several packets is a message.
    pub(super) is_cut: bool,
}

impl SendQueue {
    /// Whether `push` would find room for `wr`, and the length of its message.
    #[inline]
    pub(crate) fn check(&self, wr: &SendWr<'_>) -> Result<u32, PostError> {
        if self.tail - self.head >= self.depth.into() {
            return Err(PostError::Full);
        }
        let len = match wr.data {
            // The usual case: one element.
            SendData::Sges([sge]) if self.max_sge > 0 => sge.len.into(),
            _ => self.data_len(wr)?,
        };
        if !wr.op.carries_data() {
            return check_special(&wr.op, len);
        }
        if len > MESSAGE_MAX {
            return Err(PostError::TooLong);
        }
        #[allow(clippy::cast_possible_truncation)]
        Ok(len as u32)
    }

    #[inline(never)]
    fn data_len(&self, wr: &SendWr<'_>) -> Result<u64, PostError> {
        match wr.data {
            SendData::Sges(list) if list.len() > self.max_sge as usize => {
                Err(PostError::TooManySges)
            }
            SendData::Sges(list) => Ok(list.iter().map(|sge| u64::from(sge.len)).sum()),
            SendData::Inline(_) if wr.op.has_result() => Err(PostError::InlineResponse),
            SendData::Inline(bytes) if bytes.len() > self.max_inline as usize => {
                Err(PostError::InlineTooLong)
            }
            SendData::Inline(bytes) => Ok(bytes.len() as u64),
        }
    }

    /// The extent of a SEND or WRITE of one packet.
    #[inline]
    pub(super) fn extent_of_one(&self, len: u32) -> Extent {
        let cost = Budget::cost(len + OVERHEAD);
        Extent {
            packets: 1,
            messages: self.messages.wrapping_add(1),
            // Even the cost of the longest packet fits: see `COST_MAX`.
            #[allow(clippy::cast_possible_truncation)]
            measure: cost as u16,
            charges: self.charges.and(1, cost),
            is_cut: false,
        }
    }

    /// The extent of any other request.
    pub(super) fn extent(&self, op: &SendOp, len: u32, mtu: Mtu, cut: u16) -> Extent {
        if op.is_local() {
            let (messages, charges) = (self.messages, self.charges);
            return Extent { packets: 0, messages, measure: 0, charges, is_cut: false };
        }
        // At most 2^31 bytes and one path MTU.
        let packets = ((len + mtu.bytes() - 1) >> mtu.shift()).max(1);
        if op.carries_data() {
            let full = packets - 1;
            let last = self.extent_of_one(len - (full << mtu.shift()));
            let charges = last.charges.and(full, full_cost(mtu));
            let is_cut = cut > 0 && matches!(op, SendOp::Write { .. });
            let messages = last.messages.wrapping_add(if is_cut { full } else { 0 });
            return Extent { packets, messages, charges, is_cut, ..last };
        }
        let (messages, measure) = match op {
            SendOp::Read { .. } => (packets.div_ceil(cut.max(1).into()), cut),
            _ => (1, 0),
        };
        let messages = self.messages.wrapping_add(messages);
        Extent { packets, messages, measure, charges: self.charges, is_cut: false }
    }
}

/// The length of a request that is neither SEND nor WRITE.
#[inline(never)]
fn check_special(op: &SendOp, len: u64) -> Result<u32, PostError> {
    match op {
        SendOp::CompareSwap { remote, .. } | SendOp::FetchAdd { remote, .. }
            if remote % 8 != 0 || len < 8 =>
        {
            Err(PostError::BadAtomic)
        }
        _ if op.is_local() => Ok(0),
        SendOp::AtomicWrite { remote, .. } if remote % 8 != 0 || len != 8 => {
            Err(PostError::BadAtomic)
        }
        SendOp::Flush { .. } if len > 0 => Err(PostError::FlushData),
        _ if len > MESSAGE_MAX => Err(PostError::TooLong),
        _ if op.is_atomic() => Ok(8),
        #[allow(clippy::cast_possible_truncation)]
        _ => Ok(len as u32),
    }
}
