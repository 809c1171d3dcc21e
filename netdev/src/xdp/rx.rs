//! The receiving half: the RX ring, the fill ring, and whole frames out of both.
//!
//! A frame that spans chunks comes as several descriptors. In copy mode the kernel fills a chunk from
//! byte 256 to its end and goes on at byte 256 of the next one, and the chunks of a frame almost
//! always follow one another, because the fill ring is first in, first out. Then moving the *tail*
//! down over the next chunk's unused first bytes makes the frame contiguous: for a 4096-byte RoCE
//! payload that is a copy of some 330 bytes instead of 4170. Only where the chunks do not follow one
//! another (the end of the region, a driver with its own order) the frame is put together in a
//! scratch buffer.

use super::ring::{Desc, FillRing, RxRing};
use super::umem::{CHUNK, Umem};
use std::ops::Range;

/// The longest frame that is put together from several chunks; longer ones are dropped.
const JOINED_MAX: usize = 16 << 10;

/// The receiving half of a socket. Its chunks are the first ones of the UMEM.
#[derive(Debug)]
pub(super) struct RxHalf {
    ring: RxRing,
    fill: FillRing,
    chunks: u32,
    /// Chunks that found the fill ring full. It is twice as large as needed, because the kernel
    /// shows a frame a moment before it shows that the frame's chunk has left the fill ring; so
    /// nothing should ever wait here.
    waiting: Vec<u32>,
    scratch: Box<[u8]>,
    /// Frames that were too long or had descriptors that made no sense.
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
    /// Returns how many there were.
    pub(super) fn receive(
        &mut self,
        umem: &mut Umem,
        budget: usize,
        mut each: impl FnMut(&[u8]),
    ) -> usize {
        for _ in 0..self.waiting.len() {
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
            self.fill.publish();
        }
        frames
    }

    /// Whether the driver waits to be told of new chunks.
    pub(super) fn needs_wakeup(&self) -> bool {
        self.fill.needs_wakeup()
    }

    /// How many descriptors the frame has that begins `first` places after the oldest; `None` if it
    /// has not wholly arrived.
    fn parts(&self, first: u32) -> Option<u32> {
        let mut parts = 1;
        while self.ring.peek(first + parts - 1)?.continues() {
            parts += 1;
        }
        Some(parts)
    }

    /// Takes the frame's chunks back and makes it one slice.
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

    /// Gives the chunks of a frame to the kernel again, in their order.
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
        // A chunk that is not for receiving, or is the kernel's already, can only be in a
        // descriptor that made no sense.
        if chunk < self.chunks
            && let Some(lent) = umem.lend(chunk)
        {
            self.fill.push(lent);
        }
    }
}

/// Where in the UMEM the bytes of a descriptor are.
fn bytes_of(desc: Desc) -> Option<Range<usize>> {
    let start = usize::try_from(desc.addr).ok()?;
    let end = start.checked_add(desc.len as usize)?;
    // All in one chunk: whatever is beyond was not reclaimed with it.
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
