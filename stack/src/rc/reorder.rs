//! Requests that came too early. Between two Rocinantes they are held until the packets missing
//! before them come, and are then executed in order. The NAK that reports the gap lists them, so
//! that only missing packets are sent again.
//!
//! The report is the payload of the NAK, which has none otherwise: a bitmap whose bit `i % 8` of
//! byte `i / 8` stands for PSN + `i`, with the PSN of the NAK; a multiple of four bytes, 128 at
//! most. Only a Rocinante ([`PeerKind`](crate::PeerKind)) gets it.

use std::collections::VecDeque;

use crate::tuning::selective_repeat::{GAP_NEWS, NEWS, PLACES_KEPT};
use crate::types::Seq;
use crate::wire::{Operation, Packet};

/// PSNs after the first that is missing which are held, and the bits of a report.
pub(super) const SPAN: u64 = 1024;
/// The longest packet: BTH, RETH, immediate data, payload, ICRC.
const BLOCK: usize = 12 + 16 + 4 + 4096 + 4;

/// A packet that is held.
#[derive(Debug)]
pub(crate) struct Block {
    bytes: Box<[u8]>,
    len: usize,
}

impl Block {
    /// The packet, from its BTH to its ICRC.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// The memory for packets that are held, of all queue pairs. It is allocated as it is needed, and
/// kept.
#[derive(Debug)]
pub(crate) struct ReorderSlab {
    free: Vec<Block>,
    /// Packets for which memory may still be allocated.
    left: u32,
}

impl ReorderSlab {
    /// Memory for `max` packets.
    pub(crate) fn new(max: u32) -> Self {
        Self { free: Vec::new(), left: max }
    }

    /// Memory that waits for the next packet, in packets.
    pub(crate) fn spare(&self) -> usize {
        self.free.len()
    }

    /// Packets of `max` for which memory was allocated.
    pub(crate) fn blocks(&self, max: u32) -> usize {
        (max - self.left) as usize
    }

    fn unused(&self) -> u32 {
        self.left.saturating_add(u32::try_from(self.free.len()).unwrap_or(u32::MAX))
    }

    fn copy(&mut self, packet: &[u8]) -> Option<Block> {
        if packet.len() > BLOCK {
            return None;
        }
        let mut block = match self.free.pop() {
            Some(block) => block,
            None => {
                self.left = self.left.checked_sub(1)?;
                Block { bytes: vec![0; BLOCK].into(), len: 0 }
            }
        };
        block.bytes[..packet.len()].copy_from_slice(packet);
        block.len = packet.len();
        Some(block)
    }

    /// Has no memory until it is [opened](Self::open) with what this returns.
    pub(crate) fn close(&mut self) -> Self {
        std::mem::replace(self, Self::new(0))
    }

    pub(crate) fn open(&mut self, closed: Self) {
        let Self { free, .. } = std::mem::replace(self, closed);
        self.free.extend(free);
    }

    /// Takes a packet back that is executed.
    pub(super) fn give_back(&mut self, block: Block) {
        self.free.push(block);
    }
}

/// The treatment of a packet that came too early.
#[derive(Debug, Clone, Copy)]
pub(super) struct Hold {
    /// Else it was dropped.
    pub(super) held: bool,
    /// Whether the peer should get a report.
    pub(super) news: bool,
}

/// The packets that a queue pair holds.
#[derive(Debug, Default)]
pub(super) struct ReorderBuffer {
    /// From the expected PSN on.
    places: VecDeque<Option<Block>>,
    /// The PSN of the first place.
    first: Seq,
    count: u32,
    /// Held packets that no report has listed.
    news: u32,
    /// Something was dropped, for want of memory or because it is not held.
    overflowed: bool,
}

impl ReorderBuffer {
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub(super) fn len(&self) -> usize {
        self.count as usize
    }

    /// Holds the packet of `psn`, which came while `expected` was expected.
    pub(super) fn hold(
        &mut self,
        packet: &Packet<'_>,
        expected: Seq,
        psn: Seq,
        store: &mut ReorderSlab,
    ) -> Hold {
        self.align(expected, store);
        let data = matches!(packet.info.operation, Operation::Send | Operation::Write);
        if !data || psn - expected >= SPAN {
            return self.drop_one();
        }
        let at = (psn - expected) as usize;
        let next = self.places.len();
        let asked = packet.bth().ack_req;
        if self.places.get(at).is_some_and(Option::is_some) {
            return Hold { held: true, news: asked };
        }
        // Each queue pair leaves the others at least one block for each that it takes.
        let room = self.count < store.unused();
        let Some(block) = room.then(|| store.copy(packet.bytes())).flatten() else {
            return self.drop_one();
        };
        while self.places.len() <= at {
            self.places.push_back(None);
        }
        self.places[at] = Some(block);
        self.count += 1;
        self.news += 1;
        let another_gap = at > next && self.news >= GAP_NEWS;
        Hold { held: true, news: asked || next == 0 || another_gap || self.news >= NEWS }
    }

    /// The first dropped packet is reported: the retransmission before it may have been lost, too.
    fn drop_one(&mut self) -> Hold {
        Hold { held: false, news: !core::mem::replace(&mut self.overflowed, true) }
    }

    /// Takes out the packet of the PSN that is expected now.
    pub(super) fn take(&mut self, expected: Seq, store: &mut ReorderSlab) -> Option<Block> {
        self.align(expected, store);
        let block = self.places.front_mut()?.take()?;
        self.count -= 1;
        Some(block)
    }

    /// Gives everything back.
    pub(super) fn clear(&mut self, store: &mut ReorderSlab) {
        for block in self.places.drain(..).flatten() {
            store.give_back(block);
        }
        (self.count, self.news, self.overflowed) = (0, 0, false);
        self.places.shrink_to(PLACES_KEPT);
    }

    /// Whether something came too early that is still to be executed, or was dropped meanwhile.
    pub(super) fn is_behind_a_gap(&mut self) -> bool {
        core::mem::take(&mut self.overflowed) || !self.is_empty()
    }

    /// Bytes of a report in a NAK of `psn`; 0 if there is nothing to tell.
    pub(super) fn report_len(&self, psn: Seq) -> usize {
        if self.is_empty() || self.first != psn {
            return 0;
        }
        self.places.len().div_ceil(32) * 4
    }

    /// Writes the report.
    pub(super) fn report(&self, out: &mut [u8]) {
        out.fill(0);
        for (at, place) in self.places.iter().enumerate() {
            out[at / 8] |= u8::from(place.is_some()) << (at % 8);
        }
    }

    /// The peer has a report of all held packets.
    pub(super) fn reported(&mut self) {
        self.news = 0;
    }

    /// `expected` is the first place.
    fn align(&mut self, expected: Seq, store: &mut ReorderSlab) {
        while self.first < expected
            && let Some(place) = self.places.pop_front()
        {
            self.first += 1;
            if let Some(block) = place {
                self.count -= 1;
                store.give_back(block);
            }
        }
        if self.places.is_empty() {
            self.first = expected;
        }
    }
}
