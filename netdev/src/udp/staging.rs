//! Datagrams waiting for the kernel: runs in one linear arena, or in the ring of a peer.
//!
//! A run is the contents of one message of `sendmmsg`: datagrams of one path, all of the same size
//! but the last, which may be shorter. They lie end to end, as `UDP_SEGMENT` wants them. The arena
//! is filled from front to back and starts again at the front once the kernel has taken everything,
//! so an unblocked sender always works in the same warm memory. A run that leaves by reference is
//! in a [ring](super::rings) instead; it counts as if it were in the arena.

use std::io;

use super::pages::end_message;
use super::rings::{RingId, Rings};
use super::sys::Socket;
use crate::port::contract::PathId;
use crate::port::headers::TUNNELS_MAX;
use crate::tuning::udp::{ARENA_BYTES, LONG_RUN};

/// The longest headers before a run: Ethernet, one VLAN tag, IPv6 and UDP.
pub(super) const HEADERS_MAX: usize = 14 + 4 + 40 + 8;

/// The most UDP payload bytes in one run.
///
/// The kernel would take 65,507 bytes. But it segments a super-packet in software, which is slow,
/// if that is not shorter than the device's `gso_max_size`: 65,536 bytes with the headers by
/// default. And a tunnel may follow.
pub(super) const RUN_BYTES_MAX: usize = 65_535 - HEADERS_MAX - TUNNELS_MAX;

/// The most runs that wait for the kernel at once.
pub(super) const RUNS_MAX: usize = super::sys::SEND_MAX;

/// Runs start on a cache line.
const RUN_ALIGN: usize = 64;

/// Datagrams that leave as one message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) path: PathId,
    /// Size of every datagram but the last.
    pub(super) segment: u16,
    /// Number of datagrams.
    pub(super) segments: u16,
    /// Offset of the bytes in the arena, or in the ring.
    start: u32,
    len: u32,
    ring: Option<RingId>,
    /// The errno with which the kernel refused the run; it is now sent datagram by datagram.
    pub(super) refused: Option<i32>,
}

impl Run {
    pub(super) fn bytes(&self) -> usize {
        self.len as usize
    }

    /// Size of the first datagram.
    pub(super) fn first_bytes(&self) -> usize {
        usize::from(self.segment).min(self.len as usize)
    }

    /// Whether it is long enough for what several system calls cost.
    pub(super) fn is_long(&self) -> bool {
        self.bytes() >= LONG_RUN
    }

    /// Whether it leaves by reference.
    pub(super) fn by_reference(&self) -> bool {
        self.ring.is_some() && self.is_long() && self.segments > 1 && self.refused.is_none()
    }

    fn is_whole(&self) -> bool {
        self.len == u32::from(self.segment) * u32::from(self.segments)
    }
}

#[derive(Debug)]
struct Reserved {
    path: PathId,
    len: u16,
    joins: bool,
    ring: Option<RingId>,
    /// Offset of its bytes, in the arena or in the ring.
    at: usize,
}

/// The arena and its runs.
pub(super) struct Staging {
    arena: Vec<u8>,
    pub(super) rings: Rings,
    /// The first byte not used by a run.
    tail: usize,
    runs: Vec<Run>,
    /// The first run that the kernel has not taken.
    head: usize,
    /// Whether the last run may grow.
    open: bool,
    reserved: Option<Reserved>,
}

impl Staging {
    pub(super) fn new(ring_bytes: usize) -> Self {
        Self {
            arena: vec![0; ARENA_BYTES],
            rings: Rings::new(ring_bytes),
            tail: 0,
            runs: Vec::with_capacity(RUNS_MAX),
            head: 0,
            open: false,
            reserved: None,
        }
    }

    /// Room for a datagram in a run of at most `segments_max`, and its index in that run. A new run
    /// is in `ring`.
    pub(super) fn reserve(
        &mut self,
        path: PathId,
        len: usize,
        segments_max: u16,
        ring: Option<RingId>,
    ) -> Option<(&mut [u8], u16)> {
        self.reserved = None;
        if len > RUN_BYTES_MAX {
            return None;
        }
        let (at, index, ring) = match self.joinable(path, len, segments_max) {
            Some(run) => (run.start as usize + run.bytes(), run.segments, run.ring),
            None => {
                let at = self.room_for_a_run()?;
                match ring.and_then(|ring| Some((ring, self.rings.next(ring)?))) {
                    Some((ring, at)) => (at, 0, Some(ring)),
                    None => (at, 0, None),
                }
            }
        };
        self.reserved = Some(Reserved { path, len: len as u16, joins: index > 0, ring, at });
        let bytes = match ring {
            Some(ring) => self.rings.bytes_mut(ring),
            None => &mut self.arena,
        };
        Some((&mut bytes[at..at + len], index))
    }

    /// The last run, if the datagram may join that.
    #[inline]
    fn joinable(&self, path: PathId, len: usize, segments_max: u16) -> Option<&Run> {
        let run = self.runs.last().filter(|_| self.open)?;
        let joins = run.path == path
            && run.segments < segments_max
            && run.is_whole()
            && (1..=usize::from(run.segment)).contains(&len)
            && run.bytes() + len <= RUN_BYTES_MAX;
        joins.then_some(run)
    }

    fn room_for_a_run(&self) -> Option<usize> {
        let at = self.tail.next_multiple_of(RUN_ALIGN);
        (self.runs.len() < RUNS_MAX && at + RUN_BYTES_MAX <= self.arena.len()).then_some(at)
    }

    /// Accepts the last reservation.
    pub(super) fn commit(&mut self) {
        let Some(Reserved { path, len, joins, ring, at }) = self.reserved.take() else {
            debug_assert!(false, "commit without reserve");
            return;
        };
        if let Some(run) = self.runs.last_mut().filter(|_| joins) {
            run.segments += 1;
            run.len += u32::from(len);
        } else {
            self.tail = self.tail.next_multiple_of(RUN_ALIGN);
            self.runs.push(Run {
                path,
                segment: len,
                segments: 1,
                start: at as u32,
                len: u32::from(len),
                ring,
                refused: None,
            });
            self.open = true;
        }
        if let Some(ring) = ring {
            self.rings.end_at(ring, at + usize::from(len));
        }
        self.tail += usize::from(len);
    }

    /// Ends the last run: the next datagram starts another.
    pub(super) fn close(&mut self) {
        self.open = false;
        self.reserved = None;
    }

    pub(super) fn is_empty(&self) -> bool {
        self.head == self.runs.len()
    }

    /// The waiting runs, oldest first.
    pub(super) fn waiting(&self) -> &[Run] {
        &self.runs[self.head..]
    }

    /// Whether runs of a path wait.
    pub(super) fn holds(&self, path: PathId) -> bool {
        self.waiting().iter().any(|run| run.path == path)
    }

    pub(super) fn payload(&self, run: &Run) -> &[u8] {
        let bytes = match run.ring {
            Some(ring) => self.rings.bytes(ring),
            None => &self.arena,
        };
        &bytes[run.start as usize..][..run.bytes()]
    }

    /// Ends the message that was begun at `socket` by a run. Returns whether it left by reference.
    pub(super) fn end_message(&mut self, socket: &Socket, run: &Run) -> io::Result<bool> {
        match run.ring {
            Some(ring) => self.rings.end_message(socket, ring, run.start as usize, run.bytes()),
            None => end_message(socket, self.payload(run)).map(|()| false),
        }
    }

    /// Removes the oldest `count` runs.
    pub(super) fn pop(&mut self, count: usize) {
        self.head += count;
        debug_assert!(self.head <= self.runs.len());
        if self.is_empty() {
            self.runs.clear();
            self.rings.forget_copied();
            self.head = 0;
            self.tail = 0;
            self.open = false;
        }
    }

    /// Switches the oldest run to datagram by datagram.
    pub(super) fn refuse_first(&mut self, errno: i32) {
        self.runs[self.head].refused = Some(errno);
    }

    /// Removes the first datagram of the oldest run, and the run if that was its last.
    pub(super) fn pop_datagram(&mut self) {
        let run = &mut self.runs[self.head];
        let bytes = run.first_bytes() as u32;
        run.start += bytes;
        run.len -= bytes;
        run.segments -= 1;
        if run.segments == 0 {
            self.pop(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: PathId = PathId(0);
    const B: PathId = PathId(1);

    fn push(staging: &mut Staging, path: PathId, len: usize) -> Option<u16> {
        let index = staging.reserve(path, len, 64, None).map(|(buf, index)| {
            assert_eq!(buf.len(), len);
            buf.fill(len as u8);
            index
        })?;
        staging.commit();
        Some(index)
    }

    fn shape(staging: &Staging) -> Vec<(u32, u16, u16, usize)> {
        staging.waiting().iter().map(|r| (r.path.0, r.segment, r.segments, r.bytes())).collect()
    }

    #[test]
    fn a_run_ends_at_a_change_of_path_or_size_and_behind_a_short_datagram() {
        let mut s = Staging::new(0);
        let indices: Vec<_> = [(A, 100), (A, 100), (A, 40), (A, 40), (B, 40), (A, 40), (A, 41)]
            .into_iter()
            .map(|(path, len)| push(&mut s, path, len).unwrap())
            .collect();
        assert_eq!(indices, [0, 1, 2, 0, 0, 0, 0]);
        assert_eq!(
            shape(&s),
            [(0, 100, 3, 240), (0, 40, 1, 40), (1, 40, 1, 40), (0, 40, 1, 40), (0, 41, 1, 41)]
        );
        let first = s.waiting()[0];
        assert_eq!(s.payload(&first), [[100; 200].as_slice(), &[40; 40]].concat());
    }

    #[test]
    fn a_run_ends_at_the_segment_limit_and_at_the_byte_limit() {
        let mut s = Staging::new(0);
        for i in 0..65 {
            assert_eq!(push(&mut s, A, 16), Some(i % 64));
        }
        s.close();
        for i in 0..16 {
            assert_eq!(push(&mut s, B, 4120), Some(i % 15));
        }
        assert_eq!(
            shape(&s),
            [(0, 16, 64, 1024), (0, 16, 1, 16), (1, 4120, 15, 61_800), (1, 4120, 1, 4120)]
        );
    }

    #[test]
    fn at_least_four_full_runs_fit_and_popping_makes_room() {
        let mut s = Staging::new(0);
        let mut count = 0;
        while push(&mut s, A, 4120).is_some() {
            count += 1;
        }
        assert!(count >= 4 * 15, "{count}");
        let runs = s.waiting().len();
        s.close();
        s.pop(runs - 1);
        assert_eq!(push(&mut s, A, 4120), None);
        s.pop(1);
        assert!(s.is_empty());
        assert_eq!(push(&mut s, A, 4120), Some(0));
    }

    #[test]
    fn the_number_of_runs_is_bounded() {
        let mut s = Staging::new(0);
        for i in 0..RUNS_MAX as u32 {
            assert_eq!(push(&mut s, PathId(i), 64), Some(0));
        }
        assert_eq!(push(&mut s, A, 64), None);
        // The last run still grows.
        assert_eq!(push(&mut s, PathId(RUNS_MAX as u32 - 1), 64), Some(1));
    }

    #[test]
    fn a_slot_that_is_not_committed_leaves_nothing() {
        let mut s = Staging::new(0);
        push(&mut s, A, 100);
        assert!(s.reserve(A, 100, 64, None).is_some());
        assert!(s.reserve(B, 7, 64, None).is_some());
        assert_eq!(push(&mut s, A, 100), Some(1));
        assert_eq!(shape(&s), [(0, 100, 2, 200)]);
        assert!(s.reserve(A, RUN_BYTES_MAX + 1, 64, None).is_none());
    }

    #[test]
    fn an_empty_datagram_is_a_run_of_its_own() {
        let mut s = Staging::new(0);
        for _ in 0..2 {
            assert_eq!(push(&mut s, A, 0), Some(0));
        }
        assert_eq!(push(&mut s, A, 1), Some(0));
        assert_eq!(shape(&s), [(0, 0, 1, 0), (0, 0, 1, 0), (0, 1, 1, 1)]);
    }

    #[test]
    fn a_refused_run_goes_datagram_by_datagram() {
        let mut s = Staging::new(0);
        for len in [100, 100, 30] {
            push(&mut s, A, len);
        }
        s.close();
        s.refuse_first(5);
        let mut sizes = Vec::new();
        while !s.is_empty() {
            let run = s.waiting()[0];
            assert_eq!(run.refused, Some(5));
            sizes.push((run.segments, s.payload(&run)[..run.first_bytes()].to_vec()));
            s.pop_datagram();
        }
        assert_eq!(sizes, [(3, vec![100; 100]), (2, vec![100; 100]), (1, vec![30; 30])]);
    }
}
