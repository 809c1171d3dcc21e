//! The receive queue: SENDs are placed in its requests, and a WRITE with immediate consumes one.

use super::post::{PostError, check_recv};
use super::scatter::place;
use crate::mem::{AccessError, Memory, PdId, Sge};
use crate::types::Key;
use crate::verbs::{RecvWr, Sender, WcOpcode, WcStatus};

#[derive(Debug, Clone, Copy, Default)]
struct Rwqe {
    wr_id: u64,
    len: u32,
    sges: u16,
}

/// A receive that is about to complete.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Received {
    pub(crate) wr_id: u64,
    pub(crate) status: WcStatus,
    pub(crate) opcode: WcOpcode,
    pub(crate) byte_len: u32,
    pub(crate) imm: Option<[u8; 4]>,
    /// The window that it invalidated.
    pub(crate) invalidated: Option<Key>,
    /// The sender of a datagram.
    pub(crate) sender: Option<Sender>,
    pub(crate) solicited: bool,
}

/// Indices begin here, so that smaller ones exist for requests that are handed back. Fewer than
/// this are outstanding.
const FIRST: u64 = 1 << 32;

/// A ring of receive requests; its length is a power of two. Allocated when the queue pair is made.
#[derive(Debug)]
pub(crate) struct RecvQueue {
    wqes: Box<[Rwqe]>,
    sges: Box<[Sge]>,
    depth: u32,
    max_sge: u32,
    head: u64,
    tail: u64,
}

impl RecvQueue {
    pub(crate) fn new(depth: u32, max_sge: u32) -> Self {
        let slots = (depth as usize).next_power_of_two();
        Self {
            wqes: vec![Rwqe::default(); slots].into_boxed_slice(),
            sges: vec![Sge::default(); slots * max_sge as usize].into_boxed_slice(),
            depth,
            max_sge,
            head: FIRST,
            tail: FIRST,
        }
    }

    pub(crate) fn reset(&mut self) {
        self.head = self.tail;
    }

    pub(crate) fn depth(&self) -> u32 {
        self.depth
    }

    pub(crate) fn max_sge(&self) -> u32 {
        self.max_sge
    }

    pub(crate) fn len(&self) -> u64 {
        self.tail - self.head
    }

    pub(crate) fn push(&mut self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        if self.len() >= self.depth.into() {
            return Err(PostError::Full);
        }
        let len = check_recv(wr, self.max_sge)?;
        let slot = self.slot(self.tail);
        self.sges[slot * self.max_sge as usize..][..wr.sges.len()].copy_from_slice(wr.sges);
        let sges = wr.sges.len() as u16;
        self.wqes[slot] = Rwqe { wr_id: wr.wr_id, len, sges };
        self.tail += 1;
        Ok(())
    }

    /// `wr_id` of the oldest request.
    pub(crate) fn front(&self) -> Option<u64> {
        (self.head < self.tail).then(|| self.wqes[self.slot(self.head)].wr_id)
    }

    /// The room of the oldest request, in bytes.
    pub(crate) fn room(&self) -> u32 {
        self.wqes[self.slot(self.head)].len
    }

    /// Retires the oldest request.
    pub(crate) fn pop(&mut self) {
        debug_assert!(self.head < self.tail);
        self.head += 1;
    }

    /// Moves the oldest request to the end of `to`, which has room for it.
    #[inline]
    pub(crate) fn hand_over(&mut self, to: &mut Self) {
        debug_assert!(to.len() < to.depth.into());
        to.put(to.tail, self);
        to.tail += 1;
        self.head += 1;
    }

    /// Moves the oldest request back to the front of `to`, where it came from.
    pub(crate) fn hand_back(&mut self, to: &mut Self) {
        debug_assert!(to.len() < to.depth.into());
        to.head -= 1;
        to.put(to.head, self);
        self.head += 1;
    }

    /// Copies the oldest request of `from` to the place `index`.
    #[inline]
    fn put(&mut self, index: u64, from: &Self) {
        let (slot, source) = (self.slot(index), from.slot(from.head));
        let wqe = from.wqes[source];
        let list = &from.sges[source * from.max_sge as usize..][..usize::from(wqe.sges)];
        self.sges[slot * self.max_sge as usize..][..list.len()].copy_from_slice(list);
        self.wqes[slot] = wqe;
    }

    /// Hides its requests. Returns the argument of [`show`](Self::show).
    pub(crate) fn hide(&mut self) -> u64 {
        std::mem::replace(&mut self.tail, self.head)
    }

    /// Shows the hidden requests again.
    pub(crate) fn show(&mut self, hidden: u64) {
        self.tail = hidden;
    }

    /// Changes the depth and keeps the requests.
    pub(crate) fn resize(&mut self, depth: u32) {
        let mut resized = Self::new(depth, self.max_sge);
        while self.len() > 0 {
            self.hand_over(&mut resized);
        }
        *self = resized;
    }

    /// Places `src` at `offset` of the oldest request's list.
    #[inline]
    pub(crate) fn scatter(
        &self,
        offset: u32,
        src: &[u8],
        pd: PdId,
        memory: &mut impl Memory,
    ) -> Result<(), AccessError> {
        place(self.list(self.head), offset, src, pd, memory)
    }

    /// Whether a request names `key`.
    pub(crate) fn uses(&self, key: Key) -> bool {
        (self.head..self.tail).any(|index| self.list(index).iter().any(|sge| sge.lkey == key))
    }

    /// Where the data of a request is.
    #[inline]
    fn list(&self, index: u64) -> &[Sge] {
        let slot = self.slot(index);
        &self.sges[slot * self.max_sge as usize..][..usize::from(self.wqes[slot].sges)]
    }

    #[inline]
    fn slot(&self, index: u64) -> usize {
        index as usize & (self.wqes.len() - 1)
    }
}
