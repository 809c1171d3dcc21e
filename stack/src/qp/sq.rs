//! The send queue: immutable work requests in a ring, each with the packet sequence numbers it
//! occupies.

mod span;

use self::span::{CostSum, Span, Totals};
pub(crate) use self::span::{OVERHEAD, full_cost};
use crate::budget::Cost;
use crate::mem::{AccessError, Memory, PdId, RegionTable, Sge};
use crate::qp::opcode::data_opcode;
use crate::qp::post::{PostError, SendLimits};
use crate::qp::scatter::{gather_parts, part_of, parts, place};
use crate::types::{Mtu, Seq};
use crate::verbs::{SendData, SendOp, SendWr};
use crate::wire::Opcode;

/// The index of a work request in its send queue: the number of requests that were posted before it
/// since the queue was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(crate) struct WqeIndex(u64);

rocinante_wire::counts!(WqeIndex);

/// A posted work request. It does not change until it is retired: progress is a PSN.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wqe {
    pub(crate) wr_id: u64,
    pub(crate) op: SendOp,
    /// First PSN.
    pub(crate) first: Seq,
    /// Sum of the costs of all packets of the SENDs and WRITEs before it.
    before: CostSum,
    /// Number of its PSNs: one for a message without payload, none for a request that sends
    /// nothing.
    packets: u32,
    /// Number of messages that the peer has completed after this one, modulo 2^32: the count in the
    /// peer's AETHs. A READ that is split into several requests counts one message for each.
    pub(crate) messages: u32,
    /// Message length in bytes.
    pub(crate) len: u32,
    /// SEND or WRITE: the cost of its last packet to the receiver. READ: the packets of each of its
    /// requests but the last; it stays the same for retransmissions. Other requests: 0.
    measure: u16,
    sges: u8,
    flags: u8,
}

/// Bits of [`Wqe::flags`].
const PLAIN: u8 = 1;
const INLINE: u8 = 2;
const SIGNALED: u8 = 4;
const SOLICITED: u8 = 8;
const FENCE: u8 = 16;
const RESPONSE: u8 = 32;
const SPLIT: u8 = 64;

impl Wqe {
    /// Whether it is a SEND or WRITE of one packet, without a fence.
    #[inline]
    pub(crate) fn is_plain(&self) -> bool {
        self.flags & PLAIN != 0
    }

    /// Whether it has several PSNs.
    #[inline]
    pub(crate) fn is_long(&self) -> bool {
        self.packets > 1
    }

    #[inline]
    fn is_inline(&self) -> bool {
        self.flags & INLINE != 0
    }

    /// Whether its data was copied at the post and it completes only on failure.
    #[inline]
    pub(crate) fn is_inline_and_unsignaled(&self) -> bool {
        self.flags & (INLINE | SIGNALED) == INLINE
    }

    #[inline]
    pub(crate) fn is_signaled(&self) -> bool {
        self.flags & SIGNALED != 0
    }

    #[inline]
    pub(crate) fn is_solicited(&self) -> bool {
        self.flags & SOLICITED != 0
    }

    /// Whether it waits for all earlier requests that have responses of their own.
    #[inline]
    pub(crate) fn is_fenced(&self) -> bool {
        self.flags & FENCE != 0
    }

    /// Whether it has a response of its own: [`SendOp::has_response`].
    #[inline]
    pub(crate) fn has_response(&self) -> bool {
        self.flags & RESPONSE != 0
    }

    /// Whether it is a WRITE that is split: each packet is a message of its own.
    #[inline]
    pub(crate) fn is_split(&self) -> bool {
        self.flags & SPLIT != 0
    }

    /// Whether the packet `psn` begins a message.
    #[inline]
    pub(crate) fn begins(&self, psn: Seq) -> bool {
        psn == self.first || self.is_split()
    }

    /// If the packet begins a message: the bytes of that message. `payload` is the packet's.
    #[inline]
    pub(crate) fn message(&self, payload: u32) -> u32 {
        if self.is_split() { payload } else { self.len }
    }

    /// The opcode on a reliable connection of the packet `psn` of a SEND or WRITE.
    #[inline]
    pub(crate) fn data_opcode(&self, psn: Seq) -> Opcode {
        data_opcode(&self.op, self.begins(psn), psn == self.last() || self.is_split())
    }

    /// SEND or WRITE: the cost of its last packet to the receiver.
    #[inline]
    pub(crate) fn cost(&self) -> u32 {
        self.measure.into()
    }

    /// Packets of each request of a READ but the last.
    #[inline]
    pub(crate) fn read_packets(&self) -> u16 {
        self.measure.max(1)
    }

    /// Last PSN; the PSN before `first` if it has none.
    #[inline]
    pub(crate) fn last(&self) -> Seq {
        self.first + u64::from(self.packets) - 1
    }

    /// Offset in the message of the packet `psn`.
    #[inline]
    pub(crate) fn offset(&self, psn: Seq, mtu: Mtu) -> u32 {
        ((psn - self.first) as u32) << mtu.shift()
    }

    /// Payload bytes of the packet `psn`.
    #[inline]
    pub(crate) fn payload(&self, psn: Seq, mtu: Mtu) -> u32 {
        (self.len - self.offset(psn, mtu)).min(mtu.bytes())
    }
}

#[inline]
fn flag(bit: u8, set: bool) -> u8 {
    u8::from(set) * bit
}

/// Most elements of a request.
const SGES_MAX: u16 = u8::MAX as u16;

/// A ring of work requests, allocated when the queue pair is made. Its length is a power of two, so
/// that a mask turns an index into a slot.
#[derive(Debug)]
pub(crate) struct SendQueue {
    wqes: Box<[Wqe]>,
    sges: Box<[Sge]>,
    inline: Box<[u8]>,
    depth: u32,
    limits: SendLimits,
    /// Requests between head and tail that have responses of their own.
    responses: u32,
    /// Index of the oldest request not yet retired.
    pub(crate) head: WqeIndex,
    /// Index of the next request to be posted.
    pub(crate) tail: WqeIndex,
    /// First PSN of the next request to be posted.
    pub(crate) next_psn: Seq,
    totals: Totals,
}

impl SendQueue {
    pub(crate) fn new(depth: u32, mut limits: SendLimits) -> Self {
        let empty = Wqe {
            wr_id: 0,
            op: SendOp::Send { imm: None },
            first: Seq::default(),
            before: CostSum::default(),
            packets: 0,
            messages: 0,
            len: 0,
            measure: 0,
            sges: 0,
            flags: 0,
        };
        limits.max_sge = limits.max_sge.min(SGES_MAX);
        let slots = (depth as usize).next_power_of_two();
        Self {
            wqes: vec![empty; slots].into_boxed_slice(),
            sges: vec![Sge::default(); slots * usize::from(limits.max_sge)].into_boxed_slice(),
            inline: vec![0; slots * limits.max_inline as usize].into_boxed_slice(),
            depth,
            limits,
            responses: 0,
            head: WqeIndex::default(),
            tail: WqeIndex::default(),
            next_psn: Seq::default(),
            totals: Totals::default(),
        }
    }

    /// Forgets all work and starts over at `psn`.
    pub(crate) fn reset(&mut self, psn: Seq) {
        self.head = self.tail;
        self.next_psn = psn;
        self.responses = 0;
        self.totals.messages = 0;
    }

    /// Whether a request between head and tail expects a response of its own.
    #[inline]
    pub(crate) fn expects_responses(&self) -> bool {
        self.responses > 0
    }

    /// Retires the oldest request.
    #[inline]
    pub(crate) fn pop(&mut self) {
        debug_assert!(self.head < self.tail);
        if self.get(self.head).has_response() {
            self.responses -= 1;
        }
        self.head += 1;
    }

    #[inline]
    pub(crate) fn get(&self, index: WqeIndex) -> &Wqe {
        &self.wqes[self.slot(index)]
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.head == self.tail
    }

    /// The request that `psn` belongs to; the tail if none does.
    #[inline]
    pub(crate) fn locate(&self, psn: Seq) -> WqeIndex {
        if self.is_empty() || psn <= self.get(self.head).last() {
            return self.head;
        }
        let (mut low, mut high) = (self.head, self.tail);
        while low < high {
            let middle = low + (high - low) / 2;
            if self.get(middle).last() < psn {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        low
    }

    /// The cost of the packets of SENDs and WRITEs from PSN `from` to before `to`.
    #[inline]
    pub(crate) fn cost_between(&self, from: Seq, to: Seq, mtu: Mtu) -> Cost {
        if from >= to {
            return Cost::default();
        }
        self.cost_before(to, mtu).since(self.cost_before(from, mtu))
    }

    /// The sum of the costs of all packets before `psn`.
    #[inline(always)]
    fn cost_before(&self, psn: Seq, mtu: Mtu) -> CostSum {
        // As it is asked when all that left was acknowledged, and nothing else was posted.
        if psn == self.next_psn {
            return self.totals.costs;
        }
        let index = self.locate(psn);
        if index == self.tail {
            return self.totals.costs;
        }
        let wqe = self.get(index);
        if psn <= wqe.first || wqe.has_response() {
            return wqe.before;
        }
        // All packets but the last are full.
        wqe.before.and((psn - wqe.first) as u32, full_cost(mtu))
    }

    /// Whether `push` would find room for `wr`, and the length of its message.
    #[inline]
    pub(crate) fn check(&self, wr: &SendWr<'_>) -> Result<u32, PostError> {
        if self.tail - self.head >= self.depth.into() {
            return Err(self.full(wr));
        }
        self.limits.check(wr)
    }

    /// Why a full queue does not take `wr`.
    #[cold]
    fn full(&self, wr: &SendWr<'_>) -> PostError {
        match self.limits.check(wr) {
            // The queue will never take it.
            Err(PostError::Operation) => PostError::Operation,
            _ => PostError::Full,
        }
    }

    /// Whether at most a quarter of it is in use: requests in flight and requests that wait.
    #[inline]
    pub(crate) fn is_mostly_free(&self) -> bool {
        4 * (self.tail - self.head) <= u64::from(self.depth)
    }

    /// Appends a request that `check` admitted with `len`. A READ of several packets is split into
    /// requests of `split` packets each. A WRITE is split into messages of one packet if `split` is
    /// not 0.
    #[inline(always)]
    pub(crate) fn push(
        &mut self,
        wr: &SendWr<'_>,
        len: u32,
        mtu: Mtu,
        split: u16,
        signal_all: bool,
    ) {
        if wr.op.carries_data() && len <= mtu.bytes() {
            let plain = flag(PLAIN, !wr.fence);
            self.append(wr, len, &Span::of_one(&self.totals, len), plain, signal_all);
        } else {
            self.push_other(wr, len, mtu, split, signal_all);
        }
    }

    /// Appends any request but a SEND or WRITE of one packet.
    #[inline(never)]
    fn push_other(&mut self, wr: &SendWr<'_>, len: u32, mtu: Mtu, split: u16, signal_all: bool) {
        let has_response = wr.op.has_response();
        let span = Span::of(&self.totals, &wr.op, len, mtu, split);
        let flags = flag(RESPONSE, has_response) | flag(SPLIT, span.is_split);
        self.append(wr, len, &span, flags, signal_all);
        self.responses += u32::from(has_response);
    }

    #[inline(always)]
    fn append(&mut self, wr: &SendWr<'_>, len: u32, span: &Span, flags: u8, signal_all: bool) {
        let slot = self.slot(self.tail);
        let (sges, inline) = match wr.data {
            SendData::Sges(list) => {
                let places = &mut self.sges[slot * usize::from(self.limits.max_sge)..];
                match (list, places.first_mut()) {
                    ([sge], Some(place)) => *place = *sge,
                    _ => places[..list.len()].copy_from_slice(list),
                }
                (list.len(), false)
            }
            SendData::Inline(bytes) => {
                self.inline[slot * self.limits.max_inline as usize..][..bytes.len()]
                    .copy_from_slice(bytes);
                (0, true)
            }
        };
        self.wqes[slot] = Wqe {
            wr_id: wr.wr_id,
            op: wr.op,
            first: self.next_psn,
            before: self.totals.costs,
            packets: span.packets,
            messages: span.totals.messages,
            len,
            measure: span.measure,
            sges: sges as u8,
            flags: flags
                | flag(INLINE, inline)
                | flag(SIGNALED, wr.signaled || signal_all)
                | flag(SOLICITED, wr.solicited)
                | flag(FENCE, wr.fence),
        };
        self.totals = span.totals;
        self.next_psn += u64::from(span.packets);
        self.tail += 1;
    }

    /// Copies `out.len()` bytes of the message of `wqe`, the request `index`, at `offset` into
    /// `out`. Returns their CRC-32 if the copy computed it.
    #[inline(always)]
    pub(crate) fn gather(
        &self,
        index: WqeIndex,
        wqe: &Wqe,
        offset: u32,
        out: &mut [u8],
        pd: PdId,
        memory: &impl Memory,
    ) -> Result<Option<u32>, AccessError> {
        let slot = self.slot(index);
        if wqe.is_inline() {
            let from = slot * self.limits.max_inline as usize + offset as usize;
            out.copy_from_slice(&self.inline[from..from + out.len()]);
            return Ok(None);
        }
        if out.is_empty() {
            return Ok(None);
        }
        match self.sges.get(slot * usize::from(self.limits.max_sge)) {
            // The usual case: one element.
            Some(sge) if wqe.sges == 1 => {
                let part = part_of(sge, offset, out.len())?;
                memory.fetch_summed(memory.regions().local_read(pd, &part)?, out)
            }
            _ => {
                gather_parts(self.list(index), offset, out, pd, memory)?;
                Ok(None)
            }
        }
    }

    /// Whether the whole list is registered for the access of the operation.
    pub(crate) fn admits(
        &self,
        index: WqeIndex,
        pd: PdId,
        regions: &RegionTable,
    ) -> Result<(), AccessError> {
        let wqe = &self.wqes[self.slot(index)];
        if wqe.is_inline() {
            return Ok(());
        }
        let admits = |part: &Sge| match wqe.op.has_result() {
            true => regions.local_write(pd, part).map(drop),
            false => regions.local_read(pd, part).map(drop),
        };
        match self.list(index) {
            // The usual case: one element.
            [sge] if wqe.len > 0 => admits(&part_of(sge, 0, wqe.len as usize)?),
            list => parts(list, 0, wqe.len as usize).try_for_each(|part| admits(&part)),
        }
    }

    /// Places `src` at `offset` of the request's list.
    #[inline]
    pub(crate) fn scatter(
        &self,
        index: WqeIndex,
        offset: u32,
        src: &[u8],
        pd: PdId,
        memory: &mut impl Memory,
    ) -> Result<(), AccessError> {
        place(self.list(index), offset, src, pd, memory)
    }

    /// Whether a request not yet retired names `key`.
    pub(crate) fn uses(&self, key: crate::types::Key) -> bool {
        let binds = |op: &SendOp| op.bind().is_some_and(|bind| bind.region == key);
        (self.head.0..self.tail.0).map(WqeIndex).any(|index| {
            binds(&self.get(index).op) || self.list(index).iter().any(|sge| sge.lkey == key)
        })
    }

    /// The scatter-gather list of a request.
    #[inline]
    fn list(&self, index: WqeIndex) -> &[Sge] {
        let slot = self.slot(index);
        &self.sges[slot * usize::from(self.limits.max_sge)..][..usize::from(self.wqes[slot].sges)]
    }

    #[inline]
    fn slot(&self, index: WqeIndex) -> usize {
        index.0 as usize & (self.wqes.len() - 1)
    }
}

#[cfg(test)]
mod tests;
