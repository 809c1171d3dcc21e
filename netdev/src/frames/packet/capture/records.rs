//! A ring of records that a BPF program writes and this process reads in order
//! (`BPF_MAP_TYPE_RINGBUF`).
//!
//! A page has the reader's position, the next one the writer's. Then come the bytes, mapped twice,
//! so that each record is in one piece. Positions count bytes and never go back. Sources:
//! `Documentation/bpf/ringbuf.rst`, `kernel/bpf/ringbuf.c`.
#![allow(unsafe_code)]

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::frames::packet::page_bytes;
use crate::frames::xdp::mapping::Mapping;
use crate::kernel::bpf::Map;

/// Bytes before each record: its length with two flags, and the offset of its page.
const HEADER: usize = 8;
/// `BPF_RINGBUF_BUSY_BIT`: the program is still writing the record.
const BUSY: u32 = 1 << 31;
/// `BPF_RINGBUF_DISCARD_BIT`, which our programs never set.
const DISCARDED: u32 = 1 << 30;

/// The records of a map of [`Map::records`].
#[derive(Debug)]
pub(super) struct Records {
    /// The page with the position here.
    reader: Mapping,
    /// The page with the writer's position, and twice the bytes.
    writer: Mapping,
    /// Bytes of a page, and of the ring, which is a power of two of pages.
    page: usize,
    bytes: usize,
    position: u64,
}

impl Records {
    /// Maps the ring of `bytes` bytes, of which nothing was read yet. Error: no memory.
    pub(super) fn of_map(map: &Map, bytes: u32) -> io::Result<Self> {
        let (page, bytes) = (page_bytes() as usize, bytes as usize);
        let reader = Mapping::of_fd(map.as_fd(), 0, page)?;
        let len = page + 2 * bytes;
        let writer = Mapping::shared(map.as_fd(), libc::PROT_READ, page as u64, len)?;
        Ok(Self { reader, writer, page, bytes, position: 0 })
    }

    /// Hands the next record to `take`, and its room back to the program. `None` if there is none.
    pub(super) fn take<R>(&mut self, take: impl FnOnce(&[u8]) -> R) -> Option<R> {
        let written = word(self.writer.base());
        // SAFETY: the start of a mapping, aligned to a page, which lives as long as `self`. The
        // kernel accesses the number as a whole, too.
        let end = unsafe { written.as_ref() }.load(Ordering::Acquire);
        if self.position == end {
            return None;
        }
        let at = self.page + (self.position as usize & (self.bytes - 1));
        // SAFETY: below the end of the first copy of the bytes. Positions are multiples of eight,
        // so that the number is aligned.
        let header = unsafe { self.writer.base().add(at).cast::<AtomicU32>().as_ref() };
        let header = header.load(Ordering::Acquire);
        if header & BUSY != 0 {
            return None;
        }
        let len = (header & !DISCARDED) as usize;
        // SAFETY: it begins in the first copy of the bytes and is shorter than one, so that it ends
        // in the second. The program does not write to it again before the position is behind it.
        let record = unsafe {
            let start = self.writer.base().add(at + HEADER).as_ptr();
            std::slice::from_raw_parts(start, len.min(self.bytes - HEADER))
        };
        let taken = take(record);
        self.position += (HEADER + len).next_multiple_of(HEADER) as u64;
        // SAFETY: as of the writer's position.
        let read = unsafe { word(self.reader.base()).as_ref() };
        read.store(self.position, Ordering::Release);
        Some(taken)
    }
}

fn word(page: NonNull<u8>) -> NonNull<AtomicU64> {
    page.cast()
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: usize = 4096;

    fn ring() -> Records {
        let page = page_bytes() as usize;
        let [reader, writer] =
            [page, page + 2 * BYTES].map(|len| Mapping::anonymous(len).expect("memory"));
        Records { reader, writer, page, bytes: BYTES, position: 0 }
    }

    /// Writes a record as the kernel does, of which `flags` say how far it is.
    fn write(ring: &Records, at: u64, bytes: &[u8], flags: u32) -> u64 {
        let header = [bytes.len() as u32 | flags, 0].map(u32::to_ne_bytes).concat();
        for (offset, byte) in header.iter().chain(bytes).enumerate() {
            let place = (at as usize + offset) % BYTES;
            for copy in [place, place + BYTES] {
                // SAFETY: within the second mapping, which nothing else refers to now.
                unsafe { ring.writer.base().add(ring.page + copy).write(*byte) };
            }
        }
        let end = at + (HEADER + bytes.len()).next_multiple_of(HEADER) as u64;
        // SAFETY: the start of the mapping.
        unsafe { word(ring.writer.base()).as_ref() }.store(end, Ordering::Release);
        end
    }

    #[test]
    fn records_come_in_order_and_whole_also_around_the_end() {
        let mut ring = ring();
        let mut end = 0;
        for round in 0..500_u64 {
            let [one, two] = [round * 37 % 1500, round * 11 % 700]
                .map(|len| (0..len).map(|n| (n + round) as u8).collect::<Vec<u8>>());
            end = write(&ring, end, &one, 0);
            end = write(&ring, end, &two, 0);
            for record in [&one, &two] {
                assert_eq!(ring.take(<[u8]>::to_vec).as_ref(), Some(record), "round {round}");
            }
            assert_eq!(ring.take(<[u8]>::len), None);
            // SAFETY: the start of the mapping.
            let read = unsafe { word(ring.reader.base()).as_ref() }.load(Ordering::Relaxed);
            assert_eq!(read, end, "the room is the program's again");
        }
    }

    #[test]
    fn a_record_that_is_being_written_is_none_yet() {
        let mut ring = ring();
        write(&ring, 0, &[7; 20], BUSY);
        assert_eq!(ring.take(<[u8]>::len), None);
        write(&ring, 0, &[7; 20], 0);
        assert_eq!(ring.take(<[u8]>::to_vec), Some(vec![7; 20]));
    }
}
