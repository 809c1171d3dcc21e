//! Datagrams from a port to its own addresses, for backends that do not receive their own frames.
//!
//! The sender does not receive a frame that it sends through `AF_PACKET` or `AF_XDP`, even if the
//! frame is addressed to it. Two queue pairs of one device are the usual first test, so such ports
//! keep these datagrams in a [`LoopQueue`].

use std::collections::VecDeque;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd as _, BorrowedFd};

use crate::fd::EventFd;
use crate::port::{PathSpec, RxDatagram, RxIpId};

/// Datagrams start on a cache line.
const ALIGN: usize = 64;

/// The headers that a looped datagram would have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LoopHeader {
    /// Source address.
    pub src: IpAddr,
    /// Destination address.
    pub dst: IpAddr,
    /// UDP source port.
    pub src_port: u16,
    /// The IPv4 identification that its ICRC covers; [`RxIpId::None`] for IPv6.
    pub ip_id: RxIpId,
    /// TOS or traffic class byte.
    pub tos: u8,
}

impl LoopHeader {
    /// The header of a datagram along `spec` from `src_port`, with this IPv4 identification
    /// (ignored for IPv6).
    #[must_use]
    pub(crate) fn new(spec: &PathSpec, src_port: u16, id: u16) -> Self {
        /// "Do not fragment" in the flags and fragment offset field.
        const DF: u16 = 0x4000;
        let ip_id = match spec.local {
            IpAddr::V4(_) => RxIpId::Exact { id, flags: DF },
            IpAddr::V6(_) => RxIpId::None,
        };
        Self { src: spec.local, dst: spec.remote, src_port, ip_id, tos: spec.tos }
    }
}

#[derive(Debug, Clone, Copy)]
struct Queued {
    header: LoopHeader,
    at: usize,
    len: usize,
}

/// A bounded first-in first-out queue of datagrams in one fixed piece of memory.
///
/// It allocates only on creation. A datagram can be popped as soon as it is committed;
/// [`publish`](Self::publish) makes the descriptor readable for waiting threads.
#[derive(Debug)]
pub(crate) struct LoopQueue {
    arena: Box<[u8]>,
    entries: VecDeque<Queued>,
    datagrams_max: usize,
    reserved: Option<Queued>,
    event: EventFd,
    published: bool,
}

impl LoopQueue {
    /// A queue of at most `bytes` bytes (each datagram rounded up to 64) and `datagrams` datagrams.
    ///
    /// # Errors
    /// No descriptor left for the event.
    pub(crate) fn new(bytes: usize, datagrams: usize) -> io::Result<Self> {
        Ok(Self {
            arena: vec![0; bytes].into_boxed_slice(),
            entries: VecDeque::with_capacity(datagrams),
            datagrams_max: datagrams,
            reserved: None,
            event: EventFd::new()?,
            published: false,
        })
    }

    /// Whether the queue is empty.
    #[must_use]
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The number of queued datagrams.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Room for a datagram of `len` bytes, or `None` while the queue is full. Discards a
    /// reservation that was not committed.
    pub(crate) fn reserve(&mut self, header: LoopHeader, len: usize) -> Option<&mut [u8]> {
        self.reserved = None;
        let at = self.find(len)?;
        self.reserved = Some(Queued { header, at, len });
        Some(&mut self.arena[at..at + len])
    }

    /// A free block of `len` bytes behind the youngest datagram, or else at the front.
    fn find(&self, len: usize) -> Option<usize> {
        if self.entries.len() >= self.datagrams_max {
            return None;
        }
        let (Some(oldest), Some(youngest)) = (self.entries.front(), self.entries.back()) else {
            return (len <= self.arena.len()).then_some(0);
        };
        // Even an empty datagram takes a line, so that no two start at the same place.
        let next = (youngest.at + youngest.len.max(1)).next_multiple_of(ALIGN);
        if youngest.at >= oldest.at {
            // In use: oldest.at .. next. Free: next .. end, and 0 .. oldest.at.
            if next + len <= self.arena.len() {
                return Some(next);
            }
            return (len.max(1) <= oldest.at).then_some(0);
        }
        (next + len.max(1) <= oldest.at).then_some(next)
    }

    /// Accepts the last reservation.
    pub(crate) fn commit(&mut self) {
        let entry = self.reserved.take();
        debug_assert!(entry.is_some(), "commit without reserve");
        self.entries.extend(entry);
    }

    /// Makes [`wait_fd`](Self::wait_fd) readable if the queue is not empty; call it from the port's
    /// `flush`. Costs a system call only if the queue was empty at the previous call.
    pub(crate) fn publish(&mut self) {
        if !self.published && !self.entries.is_empty() {
            self.event.signal();
            self.published = true;
        }
    }

    /// Hands up to `budget` datagrams to `sink`, oldest first, and returns their number.
    pub(crate) fn pop(&mut self, budget: usize, mut sink: impl FnMut(RxDatagram<'_>)) -> usize {
        let count = budget.min(self.entries.len());
        for Queued { header, at, len } in self.entries.drain(..count) {
            sink(RxDatagram {
                payload: &self.arena[at..at + len],
                src: header.src,
                dst: header.dst,
                src_port: header.src_port,
                ip_id: header.ip_id,
                tos: Some(header.tos),
            });
        }
        if self.published && self.entries.is_empty() {
            self.event.clear();
            self.published = false;
        }
        count
    }

    /// Readable from [`publish`](Self::publish) until the queue is empty.
    #[must_use]
    pub(crate) fn wait_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fd::wait_readable;

    fn header(id: u16) -> LoopHeader {
        let here = IpAddr::from([10, 0, 0, 1]);
        let spec =
            PathSpec { local: here, remote: here, src_port: 1, tos: 3, ttl: 64, flow_label: 0 };
        LoopHeader::new(&spec, 0xC000, id)
    }

    fn push(queue: &mut LoopQueue, id: u16, len: usize) -> bool {
        let Some(buf) = queue.reserve(header(id), len) else { return false };
        buf.fill(id as u8);
        queue.commit();
        true
    }

    fn pop(queue: &mut LoopQueue, budget: usize) -> Vec<(u16, usize)> {
        let mut got = Vec::new();
        let count = queue.pop(budget, |d| {
            let RxIpId::Exact { id, flags: 0x4000 } = d.ip_id else { panic!("{:?}", d.ip_id) };
            assert!(d.payload.iter().all(|&b| b == id as u8), "datagram {id} was overwritten");
            assert_eq!((d.src, d.src_port, d.tos), (d.dst, 0xC000, Some(3)));
            got.push((id, d.payload.len()));
        });
        assert_eq!(count, got.len());
        got
    }

    #[test]
    fn datagrams_come_out_as_they_went_in_within_the_budget() {
        let mut queue = LoopQueue::new(4096, 8).unwrap();
        for (id, len) in [(1, 100), (2, 0), (3, 1000)] {
            assert!(push(&mut queue, id, len));
        }
        assert!(queue.reserve(header(9), 10).is_some(), "reserved and not committed");
        assert!(push(&mut queue, 4, 1));
        assert_eq!(pop(&mut queue, 2), [(1, 100), (2, 0)]);
        assert_eq!(pop(&mut queue, 9), [(3, 1000), (4, 1)]);
        assert!(queue.is_empty());
    }

    #[test]
    fn it_is_bounded_in_bytes_and_in_datagrams() {
        let mut queue = LoopQueue::new(1024, 3).unwrap();
        assert!(!push(&mut queue, 0, 1025));
        assert!(push(&mut queue, 1, 1024));
        assert!(!push(&mut queue, 2, 1));
        assert_eq!(pop(&mut queue, 9).len(), 1);
        for id in 0..3 {
            assert!(push(&mut queue, id, 1));
        }
        assert!(!push(&mut queue, 3, 1));
    }

    #[test]
    fn waiters_see_what_is_published_until_all_is_popped() {
        let mut queue = LoopQueue::new(1024, 3).unwrap();
        queue.publish();
        assert!(!wait_readable(queue.wait_fd(), 0).unwrap());
        push(&mut queue, 1, 1);
        push(&mut queue, 2, 1);
        queue.publish();
        pop(&mut queue, 1);
        assert!(wait_readable(queue.wait_fd(), 0).unwrap());
        pop(&mut queue, 1);
        assert!(!wait_readable(queue.wait_fd(), 0).unwrap());
    }

    #[test]
    fn nothing_is_lost_or_overwritten_however_it_wraps() {
        // All combinations of sizes and depths of a small generator, against a model.
        let mut state = 1_u32;
        let mut next = move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 16
        };
        let mut queue = LoopQueue::new(8192, 32).unwrap();
        let mut model = VecDeque::new();
        let (mut id, mut refused) = (0_u16, 0);
        for _ in 0..50_000 {
            if next() % 2 == 0 {
                let len = (next() % 1500) as usize;
                if push(&mut queue, id, len) {
                    model.push_back((id, len));
                } else {
                    refused += 1;
                    assert!(model.len() >= 4, "refused with {} of 1500 bytes at most", model.len());
                }
                id = id.wrapping_add(1);
            } else {
                let budget = (next() % 4) as usize;
                let expected: Vec<_> = model.drain(..budget.min(model.len())).collect();
                assert_eq!(pop(&mut queue, budget), expected);
            }
            assert_eq!(queue.len(), model.len());
        }
        assert!(refused > 100, "the queue was full {refused} times only");
    }
}
