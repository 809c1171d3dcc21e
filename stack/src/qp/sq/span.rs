//! The amounts that a request takes: PSNs, messages, and cost to its receiver.

use crate::budget::{Budget, Cost};
use crate::types::Mtu;
use crate::verbs::SendOp;

/// Longest headers of a packet with payload, with its ICRC: BTH, RETH, immediate.
pub(crate) const OVERHEAD: u32 = 12 + 16 + 4 + 4;

/// The cost of the longest packet.
const COST_MAX: u32 = Budget::cost(4096 + OVERHEAD);
const _: () = assert!(COST_MAX <= u16::MAX as u32);

/// The highest cost of a full packet to its receiver.
pub(crate) fn full_cost(mtu: Mtu) -> u32 {
    Budget::cost(OVERHEAD + mtu.bytes())
}

/// A sum of [`Cost`]s; each component is modulo 2^32. The difference of two sums is the exact
/// charge between them, because no receiver has room for 2^32 bytes.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct CostSum {
    pub(super) bytes: u32,
    pub(super) datagrams: u32,
}

impl CostSum {
    /// This sum and `count` packets that cost `each`.
    #[inline]
    pub(super) fn and(self, count: u32, each: u32) -> Self {
        Self {
            bytes: self.bytes.wrapping_add(count.wrapping_mul(each)),
            datagrams: self.datagrams.wrapping_add(count),
        }
    }

    #[inline]
    pub(super) fn since(self, earlier: Self) -> Cost {
        Cost {
            bytes: self.bytes.wrapping_sub(earlier.bytes).into(),
            datagrams: self.datagrams.wrapping_sub(earlier.datagrams),
        }
    }
}

/// The totals of a send queue.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Totals {
    /// Messages posted since the start, modulo 2^32.
    pub(super) messages: u32,
    /// Sum of the costs of all packets of SENDs and WRITEs.
    pub(super) costs: CostSum,
}

/// The amounts that a request takes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Span {
    pub(super) packets: u32,
    pub(super) measure: u16,
    /// Whether each of several packets is a message.
    pub(super) is_split: bool,
    /// The queue's totals, this request included.
    pub(super) totals: Totals,
}

impl Span {
    /// The span of a SEND or WRITE of one packet, after a queue with these totals.
    #[inline]
    pub(super) fn of_one(before: &Totals, len: u32) -> Self {
        let cost = Budget::cost(len + OVERHEAD);
        Self {
            packets: 1,
            // Even the cost of the longest packet fits: see `COST_MAX`.
            measure: cost as u16,
            is_split: false,
            totals: Totals {
                messages: before.messages.wrapping_add(1),
                costs: before.costs.and(1, cost),
            },
        }
    }

    /// The span of any other request. `split` is as in `SendQueue::push`.
    pub(super) fn of(before: &Totals, op: &SendOp, len: u32, mtu: Mtu, split: u16) -> Self {
        if op.is_local() {
            return Self { packets: 0, measure: 0, is_split: false, totals: *before };
        }
        // At most 2^31 bytes and one path MTU.
        let packets = ((len + mtu.bytes() - 1) >> mtu.shift()).max(1);
        if op.carries_data() {
            let full = packets - 1;
            let last = Self::of_one(before, len - (full << mtu.shift()));
            let costs = last.totals.costs.and(full, full_cost(mtu));
            let is_split = split > 0 && matches!(op, SendOp::Write { .. });
            let messages = last.totals.messages.wrapping_add(if is_split { full } else { 0 });
            return Self { packets, is_split, totals: Totals { messages, costs }, ..last };
        }
        let (messages, measure) = match op {
            SendOp::Read { .. } => (packets.div_ceil(split.max(1).into()), split),
            _ => (1, 0),
        };
        let messages = before.messages.wrapping_add(messages);
        let totals = Totals { messages, costs: before.costs };
        Self { packets, measure, is_split: false, totals }
    }
}
