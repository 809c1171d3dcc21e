//! The sending half: slots of whole chunks, the TX ring, and the completion ring.
//!
//! A slot is one chunk, or two adjacent ones if the link's MTU needs them: a frame in it is
//! contiguous, and leaves as one or two descriptors. The ring has two entries for every chunk,
//! because older kernels show completions long before they show which entries they took from the
//! ring.

use super::ring::{CompletionRing, TxRing};
use super::socket::XdpSocket;
use super::umem::{CHUNK, Umem};
use crate::port::contract::PathId;
use std::io;
use std::ops::Range;

/// Descriptors that one `sendto` sends on kernels without the option to change it
/// (`TX_BATCH_SIZE`).
const CALL_BUDGET_DEFAULT: u32 = 32;

/// The sending half of a socket.
#[derive(Debug)]
pub(super) struct TxHalf {
    ring: TxRing,
    completion: CompletionRing,
    /// The first of the chunks for sending.
    base: u32,
    chunks_per_slot: u32,
    /// For each slot, its chunks that the kernel has.
    lent: Box<[u8]>,
    /// For each slot, the path of its last frame.
    paths: Box<[PathId]>,
    /// Free slots, the latest used last: it is used next and is still in the cache.
    free: Vec<u32>,
    /// The slot that was reserved last and not yet sent.
    current: Option<u32>,
    /// Descriptors pushed that the kernel has not taken, as far as we know.
    queued: u32,
    /// Descriptors ever pushed.
    pushed: u64,
    /// The index in the ring up to which the kernel has taken descriptors, as far as we know.
    taken: u32,
    call_budget: u32,
    blocked: bool,
    /// The interface was down at the last flush: what is queued leaves once it is up.
    down: bool,
    /// A slot was requested, and there was none.
    starved: bool,
}

/// The result of a flush.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Flushed {
    /// Frames that the interface refused for good.
    pub(super) refused: u64,
    /// Whether frames remain that the kernel did not take.
    pub(super) blocked: bool,
}

impl TxHalf {
    /// Takes the rings over; `base` and `chunks` are the range of UMEM chunks for sending.
    pub(super) fn new(
        ring: TxRing,
        completion: CompletionRing,
        base: u32,
        chunks: u32,
        chunks_per_slot: u32,
    ) -> Self {
        let slots = chunks / chunks_per_slot;
        let taken = ring.pushed();
        Self {
            ring,
            completion,
            base,
            chunks_per_slot,
            lent: vec![0; slots as usize].into(),
            paths: vec![PathId::NONE; slots as usize].into(),
            free: (0..slots).rev().collect(),
            current: None,
            queued: 0,
            pushed: 0,
            taken,
            call_budget: CALL_BUDGET_DEFAULT,
            blocked: false,
            down: false,
            starved: false,
        }
    }

    /// Lets one `sendto` send `budget` descriptors, where the kernel has the option.
    pub(super) fn set_call_budget(&mut self, socket: &XdpSocket, budget: u32) {
        if socket.set_tx_budget(budget) {
            self.call_budget = budget;
        }
    }

    pub(super) fn slot_bytes(&self) -> usize {
        self.chunks_per_slot as usize * CHUNK
    }

    /// Where to write the next frame, or `None` if all slots are in use.
    pub(super) fn reserve(&mut self, umem: &mut Umem) -> Option<Range<usize>> {
        if self.current.is_none() {
            if self.free.is_empty() {
                self.reap(umem);
            }
            let room = self.ring.free(self.chunks_per_slot) >= self.chunks_per_slot;
            self.current = if room { self.free.pop() } else { None };
            self.starved |= self.current.is_none();
        }
        let first = (self.base + self.current? * self.chunks_per_slot) as usize * CHUNK;
        Some(first..first + self.slot_bytes())
    }

    /// Queues the first `len` bytes of the last reserved slot, as a frame of `path`.
    pub(super) fn send(&mut self, umem: &mut Umem, path: PathId, len: usize) {
        let Some(slot) = self.current.take() else { return };
        self.paths[slot as usize] = path;
        let first = self.base + slot * self.chunks_per_slot;
        let parts = len.div_ceil(CHUNK) as u32;
        debug_assert!(parts >= 1 && parts <= self.chunks_per_slot);
        let mut left = len;
        for part in 0..parts {
            let bytes = left.min(CHUNK);
            left -= bytes;
            // The chunk is ours, because the slot was; and there is room, because `reserve`
            // checked.
            let Some(chunk) = umem.lend(first + part) else { continue };
            self.ring.push(chunk, bytes as u32, left > 0);
            self.lent[slot as usize] += 1;
            self.queued += 1;
            self.pushed += 1;
        }
    }

    /// A path was removed: its frames are of no path now.
    pub(super) fn forget(&mut self, path: PathId) {
        let of_it = self.paths.iter_mut().filter(|other| **other == path);
        of_it.for_each(|other| *other = PathId::NONE);
    }

    /// Gives everything queued to the kernel, which takes it on a `kick`. `dropped` gets the path
    /// of each frame that the interface refused for good. Error: the interface is down (`ENETDOWN`)
    /// or gone (`ENXIO`); queued frames stay queued.
    pub(super) fn flush(
        &mut self,
        umem: &mut Umem,
        kick: impl FnMut() -> io::Result<()>,
        dropped: impl FnMut(PathId),
    ) -> io::Result<Flushed> {
        if self.queued == 0 {
            if self.starved {
                self.reap(umem);
            }
            return Ok(Flushed::default());
        }
        self.ring.publish();
        let flushed = self.wake(kick, dropped);
        // An error also leaves frames in the ring: they wait until the link is up again.
        let blocked = flushed.as_ref().map_or(true, |flushed| flushed.blocked);
        self.queued = if blocked { self.ring.pending() } else { 0 };
        self.blocked = self.queued > 0;
        self.down = flushed.is_err();
        if self.blocked {
            self.see_taken();
        } else {
            self.taken = self.ring.pushed();
        }
        self.reap(umem);
        flushed
    }

    /// Tells the kernel to take the frames in the ring.
    fn wake(
        &mut self,
        mut kick: impl FnMut() -> io::Result<()>,
        mut dropped: impl FnMut(PathId),
    ) -> io::Result<Flushed> {
        let mut flushed = Flushed::default();
        let mut calls = self.queued.div_ceil(self.call_budget);
        while self.ring.needs_wakeup() {
            match kick() {
                Ok(()) => break,
                // One frame is lost; the others are still in the ring.
                Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {
                    flushed.refused += 1;
                    dropped(self.last_taken());
                }
                Err(e) if retry(&e) => {
                    self.see_taken();
                    calls = calls.saturating_sub(1);
                }
                Err(e) => return Err(e),
            }
            let pending = self.ring.pending();
            if pending == 0 || calls == 0 || flushed.refused > u64::from(self.queued) {
                flushed.blocked = pending > 0;
                break;
            }
        }
        Ok(flushed)
    }

    /// Notes the frames that the kernel has taken. Returns whether it shows more than before.
    fn see_taken(&mut self) -> bool {
        let shown = self.ring.taken();
        let is_more = shown.wrapping_sub(self.taken).cast_signed() > 0;
        if is_more {
            self.taken = shown;
        }
        is_more
    }

    /// The path of the frame that the kernel took last, and dropped.
    ///
    /// The kernel shows a call's progress only if the call sent a frame before the one that it
    /// dropped. If it shows nothing new, the call took one frame. Before Linux 6.17 it shows that
    /// later: then the path may be that of an earlier frame.
    fn last_taken(&mut self) -> PathId {
        let (is_shown, pushed) = (self.see_taken(), self.ring.pushed());
        let mut last = if is_shown { self.taken.wrapping_sub(1) } else { self.taken };
        while last != pushed && self.ring.pushed_at(last).continues() {
            last = last.wrapping_add(1);
        }
        if last == pushed {
            // The kernel cannot have taken a frame: there was none.
            return PathId::NONE;
        }
        self.taken = last.wrapping_add(1);
        let chunk = self.ring.pushed_at(last).addr / CHUNK as u64;
        let slot = chunk.saturating_sub(u64::from(self.base)) / u64::from(self.chunks_per_slot);
        let path = usize::try_from(slot).ok().and_then(|slot| self.paths.get(slot));
        path.copied().unwrap_or(PathId::NONE)
    }

    /// The number of the last frame sent: its last descriptor's number, from 1.
    pub(super) fn last(&self) -> u64 {
        self.pushed
    }

    /// Whether a frame still waits for the kernel, and leaves soon.
    pub(super) fn holds(&self, frame: u64) -> bool {
        !self.down && frame > self.pushed - u64::from(self.queued)
    }

    /// Whether frames wait for the kernel, or a caller waits for a slot that the kernel has.
    pub(super) fn is_blocked(&self) -> bool {
        self.blocked || self.starved
    }

    /// Free slots.
    #[cfg(test)]
    pub(super) fn spare(&mut self, umem: &mut Umem) -> usize {
        self.reap(umem);
        self.free.len() + usize::from(self.current.is_some())
    }

    /// Takes back the chunks of sent frames.
    fn reap(&mut self, umem: &mut Umem) {
        let Self { completion, lent, free, base, chunks_per_slot, starved, .. } = self;
        completion.drain(|returned| {
            let Some(chunk) = umem.reclaim(&returned, *base..u32::MAX) else { return };
            let slot = (chunk - *base) / *chunks_per_slot;
            if let Some(lent) = lent.get_mut(slot as usize).filter(|lent| **lent > 0) {
                *lent -= 1;
                if *lent == 0 {
                    free.push(slot);
                    *starved = false;
                }
            }
        });
    }
}

/// Whether the per-call budget is used up, memory is short, or a signal arrived.
fn retry(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::ENOBUFS | libc::EINTR))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frames::xdp::ring::Desc;
    use crate::frames::xdp::ring::plain::{self, Kernel};

    const CHUNKS: u32 = 8;

    /// A sending half over plain memory, with the kernel's side of its rings.
    struct Port {
        half: TxHalf,
        umem: Umem,
        kernel: Driver,
        /// The path of the next frame: each has its own.
        next: u32,
        /// Paths of dropped frames.
        dropped: Vec<PathId>,
    }

    struct Driver {
        tx: Kernel<Desc>,
        done: Kernel<u64>,
    }

    impl Driver {
        /// Takes the oldest frame; its chunks come back at once. `None` if there is none.
        fn take(&self) -> Option<usize> {
            let mut len = 0;
            loop {
                let part = self.tx.take()?;
                len += part.len as usize;
                self.done.put(part.addr);
                if !part.continues() {
                    return Some(len);
                }
            }
        }
    }

    impl Port {
        fn new(chunks_per_slot: u32) -> Self {
            let (ring, tx) = plain::tx(2 * CHUNKS);
            let (completion, done) = plain::completion(2 * CHUNKS);
            tx.sleep();
            Self {
                half: TxHalf::new(ring, completion, CHUNKS, CHUNKS, chunks_per_slot),
                umem: Umem::new(2 * CHUNKS).unwrap(),
                kernel: Driver { tx, done },
                next: 0,
                dropped: Vec::new(),
            }
        }

        /// Queues a frame that fills a slot, if there is one.
        fn send(&mut self) -> bool {
            let room = self.half.reserve(&mut self.umem).is_some();
            if room {
                let len = self.half.slot_bytes();
                self.half.send(&mut self.umem, PathId(self.next), len);
                self.next += 1;
            }
            room
        }

        fn flush(
            &mut self,
            mut kick: impl FnMut(&Driver) -> io::Result<()>,
        ) -> (io::Result<Flushed>, u32) {
            let (mut kicks, kernel, dropped) = (0, &self.kernel, &mut self.dropped);
            let kick = || {
                kicks += 1;
                assert!(kicks <= 3 * CHUNKS, "it calls without end");
                kick(kernel)
            };
            let flushed = self.half.flush(&mut self.umem, kick, |path| dropped.push(path));
            (flushed, kicks)
        }
    }

    fn os(errno: i32) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(errno))
    }

    fn take_all(kernel: &Driver) -> io::Result<()> {
        while kernel.take().is_some() {}
        Ok(())
    }

    /// More often than there are slots, for any answer of the kernel.
    #[test]
    fn no_slot_is_lost_whatever_the_kernel_answers() {
        let answers: [(i32, bool, bool); 7] = [
            // The errno, whether it ends the call, and whether the call returns it.
            (libc::EAGAIN, true, false),
            (libc::ENOBUFS, true, false),
            (libc::EINTR, true, false),
            (libc::ENETDOWN, true, true),
            (libc::ENXIO, true, true),
            (libc::EIO, true, true),
            (libc::EBUSY, false, false),
        ];
        for per_slot in [1, 2] {
            let slots = (CHUNKS / per_slot) as usize;
            for (errno, blocks, told) in answers {
                let mut port = Port::new(per_slot);
                for round in 0..3 * slots {
                    let sent = 1 + round % slots;
                    for _ in 0..sent {
                        assert!(port.send(), "errno {errno}, round {round}");
                    }
                    let (flushed, kicks) = port.flush(|kernel| {
                        if errno == libc::EBUSY {
                            // The interface refuses one frame, which is gone.
                            assert!(kernel.take().is_some());
                        }
                        os(errno)
                    });
                    assert_eq!(flushed.is_err(), told, "errno {errno}");
                    if blocks {
                        assert!(kicks <= 2, "errno {errno}: {kicks} calls for nothing");
                        assert!(port.half.is_blocked());
                        assert_eq!(port.half.holds(port.half.last()), !told, "errno {errno}");
                        let (flushed, _) = port.flush(take_all);
                        assert_eq!(flushed.unwrap(), Flushed::default(), "errno {errno}");
                    } else {
                        let refused = Flushed { refused: sent as u64, blocked: false };
                        assert_eq!(flushed.unwrap(), refused, "errno {errno}");
                        let paths: Vec<u32> = port.dropped.drain(..).map(|path| path.0).collect();
                        let last = port.next;
                        assert_eq!(paths, (last - sent as u32..last).collect::<Vec<_>>());
                    }
                    assert!(!port.half.is_blocked(), "errno {errno}, round {round}");
                    assert!(!port.half.holds(port.half.last()), "errno {errno}");
                    assert_eq!(port.half.spare(&mut port.umem), slots, "errno {errno}");
                }
            }
        }
    }

    /// The kernel sends some frames and drops the next, in each call.
    #[test]
    fn a_dropped_frame_is_of_its_path() {
        for per_slot in [1, 2] {
            let slots = CHUNKS / per_slot;
            let mut port = Port::new(per_slot);
            for round in 0..12 {
                // `before` frames are sent before each that is dropped.
                for before in 0..slots {
                    let first = port.next;
                    (0..slots).for_each(|_| assert!(port.send(), "round {round}"));
                    let (flushed, _) = port.flush(|kernel| {
                        let sent = (0..before).take_while(|_| kernel.take().is_some()).count();
                        if sent as u32 == before && kernel.take().is_some() {
                            return os(libc::EBUSY);
                        }
                        Ok(())
                    });
                    assert_eq!(flushed.unwrap().refused, u64::from(slots / (before + 1)));
                    let dropped: Vec<u32> = port.dropped.drain(..).map(|path| path.0).collect();
                    let every = before as usize + 1;
                    let expected: Vec<u32> =
                        (first..first + slots).skip(before as usize).step_by(every).collect();
                    assert_eq!(dropped, expected, "round {round}, {before} before");
                }
            }
        }
    }

    /// The kernel does not show the progress of a call that sent nothing.
    #[test]
    fn a_dropped_frame_is_the_oldest_if_the_kernel_shows_nothing() {
        for per_slot in [1, 2] {
            let mut port = Port::new(per_slot);
            for round in 0..12 {
                (0..3).for_each(|_| assert!(port.send(), "round {round}"));
                let mut calls = 0;
                let (flushed, _) = port.flush(|kernel| {
                    calls += 1;
                    if calls < 3 {
                        return os(libc::EBUSY);
                    }
                    take_all(kernel)
                });
                assert_eq!(flushed.unwrap().refused, 2);
                let dropped: Vec<u32> = port.dropped.drain(..).map(|path| path.0).collect();
                assert_eq!(dropped, [3 * round, 3 * round + 1], "round {round}");
            }
        }
    }

    #[test]
    fn what_was_sent_in_an_earlier_call_was_not_dropped() {
        let mut port = Port::new(1);
        for round in 0..12 {
            (0..3).for_each(|_| assert!(port.send(), "round {round}"));
            let (flushed, _) = port.flush(|kernel| {
                kernel.take();
                os(libc::EAGAIN)
            });
            assert!(flushed.unwrap().blocked);
            let mut calls = 0;
            let (flushed, _) = port.flush(|kernel| {
                calls += 1;
                if calls == 1 { os(libc::EBUSY) } else { take_all(kernel) }
            });
            assert_eq!(flushed.unwrap().refused, 1);
            assert_eq!(std::mem::take(&mut port.dropped), [PathId(3 * round + 1)]);
        }
    }

    #[test]
    fn a_frame_of_a_path_that_is_gone_is_of_no_path() {
        let mut port = Port::new(1);
        (0..3).for_each(|_| assert!(port.send()));
        port.half.forget(PathId(1));
        let (flushed, _) = port.flush(|kernel| {
            kernel.take();
            os(libc::EBUSY)
        });
        assert_eq!(flushed.unwrap().refused, 3);
        assert_eq!(port.dropped, [PathId(0), PathId::NONE, PathId(2)]);
    }

    #[test]
    fn what_the_kernel_takes_part_of_goes_on_where_it_stopped() {
        let mut port = Port::new(2);
        for round in 0..12 {
            (0..4).for_each(|_| assert!(port.send(), "round {round}"));
            assert!(!port.send(), "all slots are on their way");
            let mut lens = Vec::new();
            while port.half.is_blocked() || lens.is_empty() {
                // One frame per call, and then the call's budget is used up.
                let mut once = true;
                let (flushed, kicks) = port.flush(|kernel| {
                    lens.extend(std::mem::take(&mut once).then(|| kernel.take()).flatten());
                    os(libc::EAGAIN)
                });
                assert!(kicks <= 2);
                assert_eq!(flushed.unwrap().blocked, lens.len() < 4, "round {round}");
            }
            assert_eq!(lens, [2 * CHUNK; 4], "round {round}");
            assert_eq!(port.half.spare(&mut port.umem), 4);
        }
    }

    #[test]
    fn completions_that_make_no_sense_free_nothing() {
        let mut port = Port::new(2);
        let base = u64::from(CHUNKS) * CHUNK as u64;
        for round in 0..12 {
            (0..4).for_each(|_| assert!(port.send(), "round {round}"));
            assert!(port.half.reserve(&mut port.umem).is_none());
            let mut sent = Vec::new();
            let (flushed, _) = port.flush(|kernel| {
                sent.extend(std::iter::from_fn(|| kernel.tx.take()));
                Ok(())
            });
            flushed.unwrap();
            // Chunks for receiving, beyond the end, and half of a frame, twice.
            let [half, other] = [sent[0].addr, sent[1].addr];
            for addr in [0, base - 1, 2 * base, u64::MAX, half, half + 17, half] {
                port.kernel.done.put(addr);
            }
            assert_eq!(port.half.spare(&mut port.umem), 0, "round {round}");
            port.kernel.done.put(other + 4095);
            assert_eq!(port.half.spare(&mut port.umem), 1, "round {round}");
            sent[2..].iter().for_each(|part| port.kernel.done.put(part.addr));
            assert_eq!(port.half.spare(&mut port.umem), 4, "round {round}");
        }
    }

    #[test]
    fn a_slot_that_was_not_sent_is_the_next() {
        let mut port = Port::new(2);
        let first = port.half.reserve(&mut port.umem);
        for _ in 0..3 * CHUNKS {
            assert_eq!(port.half.reserve(&mut port.umem), first);
        }
        assert_eq!(port.flush(take_all).1, 0, "there is nothing to tell the kernel");
        assert_eq!(port.half.spare(&mut port.umem), 4);
    }
}
