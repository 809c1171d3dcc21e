//! Datagrams end to end in one fixed block of memory.

use std::net::IpAddr;

use crate::port::contract::{PathId, RxBudget};

/// Datagrams start on a cache line.
const ALIGN: usize = 64;
/// Flows with preallocated room.
const FLOWS: usize = 256;

/// Properties shared by datagrams of one path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Flow {
    pub(super) path: PathId,
    pub(super) src_port: u16,
    pub(super) tos: u8,
    pub(super) src: IpAddr,
    pub(super) dst: IpAddr,
}

/// Properties of a datagram besides its flow and its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Mark {
    /// The IPv4 identification that its ICRC covers.
    pub(super) id: u16,
    /// Its position in its run.
    pub(super) index: u16,
}

#[derive(Debug, Clone, Copy)]
struct Datagram {
    flow: u32,
    mark: Mark,
    at: u32,
    len: u32,
}

/// A bounded list of datagrams. Its memory is allocated once.
pub(super) struct Batch {
    bytes: Box<[u8]>,
    used: usize,
    entries: Vec<Datagram>,
    /// Adjacent ones differ.
    flows: Vec<Flow>,
    datagrams_max: usize,
    /// Sum of [`RxBudget::cost`].
    cost: u64,
    /// Whether all have the same source and destination.
    one_pair: bool,
}

impl Batch {
    /// A batch that holds everything within `budget`.
    pub(super) fn new(budget: RxBudget) -> Self {
        let datagrams_max = budget.datagrams as usize;
        Self {
            // The cost of a datagram is more than its bytes rounded up to a cache line.
            bytes: vec![0; budget.bytes as usize].into_boxed_slice(),
            used: 0,
            entries: Vec::with_capacity(datagrams_max),
            flows: Vec::with_capacity(datagrams_max.min(FLOWS)),
            datagrams_max,
            cost: 0,
            one_pair: true,
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
        self.flows.clear();
        self.used = 0;
        self.cost = 0;
        self.one_pair = true;
    }

    /// Room for another datagram, within the budget of [`new`](Self::new).
    pub(super) fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        let cost = u64::from(RxBudget::cost(u32::try_from(len).ok()?));
        let fits = self.entries.len() < self.datagrams_max
            && self.cost + cost <= self.bytes.len() as u64
            && self.used + len <= self.bytes.len();
        fits.then(|| &mut self.bytes[self.used..self.used + len])
    }

    /// Accepts a datagram that was written to the last reserved room.
    pub(super) fn commit(&mut self, flow: &Flow, mark: Mark, len: usize) {
        if self.flows.last() != Some(flow) {
            self.one_pair &=
                self.flows.last().is_none_or(|last| last.src == flow.src && last.dst == flow.dst);
            self.flows.push(*flow);
        }
        let flow = self.flows.len() as u32 - 1;
        self.entries.push(Datagram { flow, mark, at: self.used as u32, len: len as u32 });
        self.used = (self.used + len).next_multiple_of(ALIGN);
        self.cost += u64::from(RxBudget::cost(len as u32));
    }

    /// Copies a datagram in; false if there is no room.
    pub(super) fn push(&mut self, flow: &Flow, mark: Mark, payload: &[u8]) -> bool {
        let Some(room) = self.reserve(payload.len()) else { return false };
        room.copy_from_slice(payload);
        self.commit(flow, mark, payload.len());
        true
    }

    pub(super) fn get(&self, i: usize) -> (&Flow, Mark, &[u8]) {
        let Datagram { flow, mark, at, len } = self.entries[i];
        (&self.flows[flow as usize], mark, &self.bytes[at as usize..][..len as usize])
    }

    /// Source and destination, if all datagrams share them.
    pub(super) fn pair(&self) -> Option<(IpAddr, IpAddr)> {
        let first = self.flows.first().filter(|_| self.one_pair)?;
        Some((first.src, first.dst))
    }

    /// Payload bytes of all datagrams.
    pub(super) fn payload_bytes(&self) -> u64 {
        self.entries.iter().map(|e| u64::from(e.len)).sum()
    }

    /// Whether the two can be swapped without a change of either bound.
    pub(super) fn same_size(&self, other: &Self) -> bool {
        self.bytes.len() == other.bytes.len() && self.datagrams_max == other.datagrams_max
    }
}
