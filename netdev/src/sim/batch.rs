//! Datagrams end to end in one fixed piece of memory.

use std::net::IpAddr;

use crate::port::{PathId, RxBudget};

/// Datagrams start on a cache line.
const ALIGN: usize = 64;

/// What is known of a datagram besides its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Meta {
    pub(super) src: IpAddr,
    pub(super) dst: IpAddr,
    pub(super) path: PathId,
    pub(super) src_port: u16,
    /// The IPv4 identification it was sealed for.
    pub(super) id: u16,
    /// Its position in its run.
    pub(super) index: u16,
    pub(super) tos: u8,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    meta: Meta,
    at: u32,
    len: u32,
}

/// A bounded list of datagrams. Its memory is allocated once.
pub(super) struct Batch {
    bytes: Box<[u8]>,
    used: usize,
    entries: Vec<Entry>,
    datagrams_max: usize,
    /// Sum of [`RxBudget::cost`].
    cost: u64,
    /// Whether all have the same source and destination.
    one_flow: bool,
}

impl Batch {
    /// One that holds whatever `budget` allows.
    pub(super) fn new(budget: RxBudget) -> Self {
        let datagrams_max = budget.datagrams as usize;
        Self {
            // The cost of a datagram is more than its bytes rounded up to a cache line.
            bytes: vec![0; budget.bytes as usize].into_boxed_slice(),
            used: 0,
            entries: Vec::with_capacity(datagrams_max),
            datagrams_max,
            cost: 0,
            one_flow: true,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Bytes in use, gaps included.
    pub(super) fn used(&self) -> usize {
        self.used
    }

    pub(super) fn clear(&mut self) {
        self.entries.clear();
        self.used = 0;
        self.cost = 0;
        self.one_flow = true;
    }

    /// Room for another datagram, within the budget it was made for.
    pub(super) fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        let cost = u64::from(RxBudget::cost(u32::try_from(len).ok()?));
        let fits = self.entries.len() < self.datagrams_max
            && self.cost + cost <= self.bytes.len() as u64
            && self.used + len <= self.bytes.len();
        fits.then(|| &mut self.bytes[self.used..self.used + len])
    }

    /// Accepts a datagram that was written to the room last reserved.
    pub(super) fn commit(&mut self, meta: Meta, len: usize) {
        if let Some(first) = self.entries.first() {
            self.one_flow &= first.meta.dst == meta.dst && first.meta.src == meta.src;
        }
        self.entries.push(Entry { meta, at: self.used as u32, len: len as u32 });
        self.used = (self.used + len).next_multiple_of(ALIGN);
        self.cost += u64::from(RxBudget::cost(len as u32));
    }

    /// Copies a datagram in; false if there is no room.
    pub(super) fn push(&mut self, meta: Meta, payload: &[u8]) -> bool {
        let Some(room) = self.reserve(payload.len()) else { return false };
        room.copy_from_slice(payload);
        self.commit(meta, payload.len());
        true
    }

    pub(super) fn get(&self, i: usize) -> (&Meta, &[u8]) {
        let Entry { meta, at, len } = &self.entries[i];
        (meta, &self.bytes[*at as usize..][..*len as usize])
    }

    /// Source and destination, if all datagrams have the same.
    pub(super) fn flow(&self) -> Option<(IpAddr, IpAddr)> {
        let first = self.entries.first().filter(|_| self.one_flow)?;
        Some((first.meta.src, first.meta.dst))
    }

    /// Payload bytes of all datagrams.
    pub(super) fn payload_bytes(&self) -> u64 {
        self.entries.iter().map(|e| u64::from(e.len)).sum()
    }

    /// Whether the two can be exchanged without either bound changing.
    pub(super) fn same_size(&self, other: &Self) -> bool {
        self.bytes.len() == other.bytes.len() && self.datagrams_max == other.datagrams_max
    }
}
