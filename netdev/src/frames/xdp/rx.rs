//! The receiving half: the RX ring, the fill ring, and whole frames out of both.
//!
//! A frame that spans chunks arrives as several descriptors. In copy mode the kernel fills a chunk
//! from byte 256 to its end and continues at byte 256 of the next one. The chunks of a frame almost
//! always follow one another, because the fill ring is first in, first out. Then the frame becomes
//! contiguous by moving its *tail* down over the next chunk's unused first bytes: for a 4096-byte
//! RoCE payload that is a copy of some 330 bytes instead of 4170. If the chunks do not follow one
//! another (the end of the region, a driver with its own order), the frame is assembled in a
//! scratch buffer.

use std::ops::Range;

use super::ring::{Desc, FillRing, RxRing};
use super::umem::{CHUNK, Umem};
use crate::tuning::xdp::JOINED_MAX;

/// The receiving half of a socket. Its chunks are the first ones of the UMEM.
#[derive(Debug)]
pub(super) struct RxHalf {
    ring: RxRing,
    fill: FillRing,
    chunks: u32,
    /// Chunks that did not fit into the fill ring. The ring is twice as large as needed, because
    /// the kernel shows a frame a moment before it shows that the frame's chunk has left the fill
    /// ring. So no chunk should ever wait here.
    waiting: Vec<u32>,
    scratch: Box<[u8]>,
    /// Frames that were too long or had invalid descriptors.
    pub(super) unusable: u64,
}

impl RxHalf {
    /// Takes the rings over and gives all receive chunks to the kernel.
    pub(super) fn new(ring: RxRing, fill: FillRing, chunks: u32, umem: &mut Umem) -> Self {
        let scratch = vec![0; JOINED_MAX].into();
        let waiting = Vec::with_capacity(chunks as usize);
        let mut half = Self { ring, fill, chunks, waiting, scratch, unusable: 0 };
        (0..chunks).for_each(|chunk| half.refill(umem, chunk));
        half.fill.publish();
        half
    }

    /// Hands up to `budget` frames to `each`, oldest first, and their chunks back to the kernel.
    /// Returns the number of frames.
    pub(super) fn receive(
        &mut self,
        umem: &mut Umem,
        budget: usize,
        mut each: impl FnMut(&[u8]),
    ) -> usize {
        let waited = self.waiting.len();
        for _ in 0..waited {
            let chunk = self.waiting.swap_remove(0);
            self.refill(umem, chunk);
        }
        self.ring.filled();
        let (mut taken, mut frames) = (0, 0);
        while frames < budget {
            let Some(parts) = self.parts(taken) else { break };
            match self.frame(umem, taken, parts) {
                Some(frame) => each(frame),
                None => self.unusable += 1,
            }
            self.recycle(umem, taken, parts);
            taken += parts;
            frames += 1;
        }
        if taken > 0 {
            self.ring.release(taken);
        }
        if taken > 0 || waited > 0 {
            self.fill.publish();
        }
        frames
    }

    /// Whether more than `eighths` eighths of the chunks wait to be read.
    pub(super) fn is_filled(&self, eighths: u32) -> bool {
        self.ring.waiting().min(self.chunks) * 8 > self.chunks * eighths
    }

    /// Whether the driver needs a wake-up for new chunks.
    pub(super) fn needs_wakeup(&self) -> bool {
        self.fill.needs_wakeup()
    }

    /// The number of descriptors of the frame that starts `first` places after the oldest; `None`
    /// if the frame has not wholly arrived.
    fn parts(&self, first: u32) -> Option<u32> {
        let mut parts = 1;
        while self.ring.peek(first + parts - 1)?.continues() {
            parts += 1;
        }
        Some(parts)
    }

    /// Takes the frame's chunks back and makes the frame one slice.
    fn frame<'a>(&'a mut self, umem: &'a mut Umem, first: u32, parts: u32) -> Option<&'a [u8]> {
        let mut ours = true;
        for part in first..first + parts {
            let (_, returned) = self.ring.take(part)?;
            ours &= umem.reclaim(&returned, 0..self.chunks).is_some();
        }
        if !ours {
            return None;
        }
        let head = bytes_of(self.ring.peek(first)?)?;
        if parts == 1 {
            return umem.get(head);
        }
        match join_in_place(&self.ring, umem, first, parts) {
            Some(range) => umem.get(range),
            None => self.join_in_scratch(umem, first, parts),
        }
    }

    fn join_in_scratch(&mut self, umem: &Umem, first: u32, parts: u32) -> Option<&[u8]> {
        let mut len = 0;
        for part in first..first + parts {
            let bytes = umem.get(bytes_of(self.ring.peek(part)?)?)?;
            self.scratch.get_mut(len..len + bytes.len())?.copy_from_slice(bytes);
            len += bytes.len();
        }
        Some(&self.scratch[..len])
    }

    /// Gives the chunks of a frame back to the kernel, in order.
    fn recycle(&mut self, umem: &mut Umem, first: u32, parts: u32) {
        for part in first..first + parts {
            if let Some(desc) = self.ring.peek(part) {
                let chunk = desc.addr / CHUNK as u64;
                self.refill(umem, u32::try_from(chunk).unwrap_or(u32::MAX));
            }
        }
    }

    fn refill(&mut self, umem: &mut Umem, chunk: u32) {
        if !self.fill.has_room() {
            self.waiting.push(chunk);
            return;
        }
        // A chunk that is not for receiving, or that the kernel already has, can only come from an
        // invalid descriptor.
        if chunk < self.chunks
            && let Some(lent) = umem.lend(chunk)
        {
            self.fill.push(lent);
        }
    }
}

/// The UMEM range of a descriptor.
fn bytes_of(desc: Desc) -> Option<Range<usize>> {
    let start = usize::try_from(desc.addr).ok()?;
    let end = start.checked_add(desc.len as usize)?;
    // All within one chunk: the next one was not reclaimed with it.
    (desc.len > 0 && start / CHUNK == (end - 1) / CHUNK).then_some(start..end)
}

/// Moves the later parts of a frame down so that they follow the first, if each part but the last
/// fills its chunk to the end and each lies in the chunk after.
fn join_in_place(ring: &RxRing, umem: &mut Umem, first: u32, parts: u32) -> Option<Range<usize>> {
    let head = bytes_of(ring.peek(first)?)?;
    let mut next_chunk = head.end;
    let mut total = head.len();
    for part in first + 1..first + parts {
        let bytes = bytes_of(ring.peek(part)?)?;
        if !next_chunk.is_multiple_of(CHUNK) || bytes.start / CHUNK != next_chunk / CHUNK {
            return None;
        }
        next_chunk = bytes.end;
        total += bytes.len();
    }
    if total > JOINED_MAX {
        return None;
    }
    let mut end = head.end;
    for part in first + 1..first + parts {
        let bytes = bytes_of(ring.peek(part)?)?;
        let region = umem.get_mut(end..bytes.end)?;
        region.copy_within(bytes.start - end.., 0);
        end += bytes.len();
    }
    Some(head.start..end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frames::xdp::ring::plain::{self, Kernel};

    const CHUNKS: u32 = 8;
    const HEADROOM: u64 = 256;
    /// Bytes of a frame in one chunk.
    const PART: usize = CHUNK - HEADROOM as usize;

    /// A receiving half over plain memory, with the kernel's side of its rings.
    struct Port {
        half: RxHalf,
        umem: Umem,
        rx: Kernel<Desc>,
        fill: Kernel<u64>,
    }

    impl Port {
        fn new() -> Self {
            let mut umem = Umem::new(2 * CHUNKS).unwrap();
            let (ring, rx) = plain::rx(2 * CHUNKS);
            let (filling, fill) = plain::fill(2 * CHUNKS);
            let half = RxHalf::new(ring, filling, CHUNKS, &mut umem);
            Self { half, umem, rx, fill }
        }

        /// The kernel receives a frame into the chunks that it needs; `spoil` changes their
        /// descriptors.
        fn arrives(&mut self, frame: &[u8], spoil: fn(&mut Vec<Desc>)) {
            let count = frame.len().div_ceil(PART);
            let place = |(number, bytes): (usize, &[u8])| {
                let addr = self.fill.take().expect("a chunk") + HEADROOM;
                self.umem.kernel_writes(addr, bytes);
                let options = if number + 1 < count { libc::XDP_PKT_CONTD } else { 0 };
                Desc { addr, len: bytes.len() as u32, options }
            };
            let mut parts = frame.chunks(PART).enumerate().map(place).collect();
            spoil(&mut parts);
            parts.into_iter().for_each(|desc| self.rx.put(desc));
        }

        /// The frames of one call, and the number that it returned.
        fn receive(&mut self, budget: usize) -> (Vec<Vec<u8>>, usize) {
            let mut frames = Vec::new();
            let count =
                self.half.receive(&mut self.umem, budget, |frame| frames.push(frame.to_vec()));
            (frames, count)
        }
    }

    fn frame(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i * 7 + len) as u8).collect()
    }

    /// Name, length and damage of each.
    type Unusable = (&'static str, usize, fn(&mut Vec<Desc>));

    const UNUSABLE: [Unusable; 9] = [
        ("empty", 100, |parts| parts[0].len = 0),
        ("longer than its chunk", 100, |parts| parts[0].len = PART as u32 + 1),
        ("as long as can be", 100, |parts| parts[0].len = u32::MAX),
        ("at the end of its chunk", 100, |parts| {
            (parts[0].addr, parts[0].len) = (parts[0].addr | (CHUNK as u64 - 1), 2);
        }),
        ("nothing in its first part", 5000, |parts| parts[0].len = 0),
        ("nothing in its second part", 5000, |parts| parts[1].len = 0),
        ("a second part that is too long", 5000, |parts| parts[1].len = u32::MAX),
        ("a last part that is too long", 9000, |parts| parts[2].len = CHUNK as u32),
        ("too many parts", JOINED_MAX + 1, |_| ()),
    ];

    /// Of frames in one chunk and in two; and after a call that left some.
    #[test]
    fn it_is_known_how_many_chunks_wait() {
        for (len, parts) in [(100, 1), (5000, 2)] {
            let mut port = Port::new();
            for round in 0..3 * CHUNKS {
                for arrived in 1..=CHUNKS / parts {
                    port.arrives(&frame(len), |_| ());
                    for eighths in 0..8 {
                        let filled = port.half.is_filled(eighths);
                        assert_eq!(filled, arrived * parts > eighths, "{round} {arrived}");
                    }
                }
                assert_eq!(port.receive(1).1, 1);
                assert!(port.half.is_filled(7 - parts) && !port.half.is_filled(8 - parts));
                port.receive(64);
                assert!(!port.half.is_filled(0));
            }
        }
    }

    /// Each of them more often than there are chunks.
    #[test]
    fn the_chunks_of_frames_that_cannot_be_used_come_back() {
        for (what, len, spoil) in UNUSABLE {
            let mut port = Port::new();
            for round in 0..3 * u64::from(CHUNKS) {
                assert_eq!(port.fill.filled(), CHUNKS, "{what}, round {round}");
                port.arrives(&frame(len), spoil);
                assert_eq!(port.receive(64), (vec![], 1), "{what}, round {round}");
                assert_eq!(port.half.unusable, round + 1, "{what}");
            }
            for len in [1, PART, PART + 1, JOINED_MAX] {
                port.arrives(&frame(len), |_| ());
                assert_eq!(port.receive(64), (vec![frame(len)], 1), "{what}, then {len}");
            }
            assert_eq!((port.fill.filled(), port.rx.filled()), (CHUNKS, 0), "{what}");
        }
    }

    #[test]
    fn frames_that_cannot_be_used_take_nothing_from_others() {
        let mut port = Port::new();
        for (what, len, spoil) in UNUSABLE.iter().filter(|(_, len, _)| len.div_ceil(PART) < 4) {
            for budget in 1..5 {
                port.arrives(&frame(60), |_| ());
                port.arrives(&frame(*len), *spoil);
                port.arrives(&frame(PART + 60), |_| ());
                let mut got = Vec::new();
                for _ in 0..3_usize.div_ceil(budget) {
                    let (frames, count) = port.receive(budget);
                    assert!(count <= budget, "{what}: {count} of {budget}");
                    got.extend(frames);
                }
                assert_eq!(got, [frame(60), frame(PART + 60)], "{what}, {budget} at once");
                assert_eq!(port.receive(budget), (vec![], 0));
                assert_eq!(port.fill.filled(), CHUNKS, "{what}, {budget} at once");
            }
        }
    }

    /// The chunks that the kernel may receive into, sorted.
    fn lent(port: &Port) -> Vec<u64> {
        let all = (0..port.fill.filled()).map(|at| port.fill.peek(at).unwrap() / CHUNK as u64);
        let mut all: Vec<u64> = all.collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn descriptors_of_chunks_that_are_not_the_kernels_change_nothing() {
        let mut port = Port::new();
        let sending = u64::from(CHUNKS) * CHUNK as u64;
        let end = 2 * sending;
        for addr in [sending, end - 1, end, u64::MAX, u64::MAX - 4095] {
            for options in [&[0][..], &[libc::XDP_PKT_CONTD, 0]] {
                options.iter().for_each(|&options| port.rx.put(Desc { addr, len: 64, options }));
                port.arrives(&frame(10), |_| ());
                let unusable = port.half.unusable;
                assert_eq!(port.receive(64), (vec![frame(10)], 2), "{addr:x}");
                assert_eq!(port.half.unusable, unusable + 1);
                assert_eq!(lent(&port), (0..u64::from(CHUNKS)).collect::<Vec<_>>(), "{addr:x}");
            }
        }
        // One chunk occurs twice in a frame: it comes back once, and the other chunk was never
        // named.
        port.arrives(&frame(5000), |parts| parts[1].addr = parts[0].addr);
        assert_eq!(port.receive(64), (vec![], 1));
        assert!(lent(&port).windows(2).all(|pair| pair[0] < pair[1]), "each once");
        assert_eq!(port.fill.filled(), CHUNKS - 1);
    }

    #[test]
    fn a_frame_is_left_until_it_is_whole() {
        let mut port = Port::new();
        for round in 0..3 * CHUNKS {
            port.arrives(&frame(60), |_| ());
            port.arrives(&frame(9000), |parts| drop(parts.drain(1..)));
            assert_eq!(port.receive(64), (vec![frame(60)], 1), "round {round}");
            assert_eq!(port.receive(64), (vec![], 0), "round {round}");
            // The rest of the frame: the chunks that the kernel used for it.
            let first = port.rx.peek(0).unwrap().addr;
            let chunk = |number: u64| {
                (first - HEADROOM + number * CHUNK as u64) % (u64::from(CHUNKS) * CHUNK as u64)
                    + HEADROOM
            };
            let rest = 9000 - 2 * PART;
            port.rx.put(Desc { addr: chunk(1), len: PART as u32, options: libc::XDP_PKT_CONTD });
            port.rx.put(Desc { addr: chunk(2), len: rest as u32, options: 0 });
            assert_eq!(port.receive(64), (vec![frame(9000)], 1), "round {round}");
            assert_eq!(port.fill.filled(), CHUNKS, "round {round}");
        }
    }

    /// The kernel shows frames before it shows that their chunks have left the fill ring.
    #[test]
    fn chunks_that_found_the_fill_ring_full_wait_until_it_is_not() {
        let mut port = Port::new();
        for late in 0..2 * CHUNKS {
            let addr = port.fill.peek(late).expect("a chunk") + HEADROOM;
            port.umem.kernel_writes(addr, &frame(60));
            port.rx.put(Desc { addr, len: 60, options: 0 });
            assert_eq!(port.receive(64), (vec![frame(60)], 1));
        }
        assert_eq!(port.half.waiting.len() as u32, CHUNKS, "there is no room for them");
        port.fill.consume(2 * CHUNKS);
        assert_eq!(port.receive(64), (vec![], 0));
        assert_eq!(
            (port.fill.filled(), port.half.waiting.len()),
            (CHUNKS, 0),
            "the kernel sees them"
        );
        for _ in 0..3 * CHUNKS {
            port.arrives(&frame(5000), |_| ());
            assert_eq!(port.receive(64), (vec![frame(5000)], 1));
        }
    }
}
