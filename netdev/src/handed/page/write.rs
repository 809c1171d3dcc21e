//! The program's side: publishes.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::sequence::under;
use super::{
    BYTES, BYTES_MIN, HELD_AT, Head, OBJECTS, QueuePair, REQUESTS_AT, ROW_BYTES, ROWS_AT,
    SECTION_BYTES, SECTIONS_AT, SHARDS_MAX, VERSION, head, rows_of, section,
};
use crate::frames::xdp::{SharedWords, is_memory_file};

/// A page in this process's memory.
#[derive(Debug)]
pub struct Page {
    words: SharedWords,
    /// Other processes of the user find it by this descriptor.
    _file: OwnedFd,
    /// A child of fork(2) has the memory, too, and writes nothing there.
    pub(super) process: u32,
    has_head: AtomicBool,
}

/// The part of a page for a shard, while it is written.
#[derive(Debug)]
pub struct Section<'a> {
    words: &'a [AtomicU64],
    rows: &'a [AtomicU64],
    /// Empty in a page of an agent of before.
    requests: &'a [AtomicU64],
    held: &'a [AtomicU64],
}

impl Page {
    /// One that no agent made, for processes of the same user. Error: no descriptor or no memory.
    pub(crate) fn own() -> io::Result<Self> {
        Self::of_fd(super::make()?, BYTES)
    }

    /// Maps a page of `bytes` bytes. Error: it is none, or could shrink; or there is no memory.
    pub(super) fn of_fd(page: OwnedFd, bytes: usize) -> io::Result<Self> {
        if bytes < BYTES_MIN || !is_memory_file(page.as_fd(), bytes) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let words = SharedWords::of_fd(page.as_fd(), bytes.min(BYTES))?;
        let (process, has_head) = (std::process::id(), AtomicBool::new(false));
        Ok(Self { words, _file: page, process, has_head })
    }

    /// Publishes a shard's part. One thread at a time does so for a shard.
    pub fn publish(&self, head: &Head, shard: usize, write: impl FnOnce(&Section<'_>)) {
        if self.process != std::process::id() || shard >= head.shards.min(SHARDS_MAX) {
            return;
        }
        let words = self.words.words();
        if !self.has_head.swap(true, Ordering::Relaxed) {
            publish_head(words, head);
        }
        let at = (SECTIONS_AT + shard * SECTION_BYTES) / 8;
        let (first, count) = rows_of(shard, head.shards);
        let rows = ROWS_AT / 8 + first * (ROW_BYTES / 8);
        let section = Section {
            words: &words[at..at + section::END],
            rows: &words[rows..rows + count * (ROW_BYTES / 8)],
            requests: words.get(REQUESTS_AT / 8 + first..).unwrap_or_default(),
            held: words.get(HELD_AT / 8 + first..).unwrap_or_default(),
        };
        under(&section.words[section::SEQUENCE], || write(&section));
    }
}

fn publish_head(words: &[AtomicU64], head: &Head) {
    under(&words[head::SEQUENCE], || {
        set(&words[head::SHARDS], head.shards as u64);
        set(&words[head::COUNTERS], super::COUNTERS.len() as u64);
        put(&words[head::DEVICE], &head.device);
        put(&words[head::BACKEND], &head.backend);
        put(&words[head::WHY], &head.why);
    });
    words[head::VERSION].store(VERSION, Ordering::Release);
}

fn set(word: &AtomicU64, value: u64) {
    word.store(value, Ordering::Relaxed);
}

/// As much of a text as there is room for, and zeros behind it.
fn put(words: &[AtomicU64], text: &str) {
    let mut bytes = text.as_bytes().chunks(8);
    for word in words {
        let mut eight = [0; 8];
        let some = bytes.next().unwrap_or_default();
        eight[..some.len()].copy_from_slice(some);
        set(word, u64::from_ne_bytes(eight));
    }
}

impl Section<'_> {
    /// The number of queue pairs that there is room for.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows.len() / (ROW_BYTES / 8)
    }

    /// The objects that only this shard counts, in their order.
    pub fn objects(&self, counts: [usize; OBJECTS.len()]) {
        let words = &self.words[section::OBJECTS..];
        words.iter().zip(counts).for_each(|(word, count)| set(word, count as u64));
    }

    /// The counters, in their order.
    pub fn counters(&self, counts: impl IntoIterator<Item = u64>) {
        let words = &self.words[section::COUNTERS..];
        words.iter().zip(counts).for_each(|(word, count)| set(word, count));
    }

    /// Says that no row from this one on has a queue pair.
    pub fn rows_end(&self, row: usize) {
        set(&self.words[section::ROWS], row as u64);
    }

    /// A queue pair, or that there is none.
    pub fn row(&self, row: usize, of: Option<&QueuePair>) {
        const WORDS: usize = ROW_BYTES / 8;
        let Some(words) = self.rows.get(row * WORDS..(row + 1) * WORDS) else { return };
        let small = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let [requests, held] = of.map_or([[0; 2]; 2], |qp| [qp.requests, qp.held]);
        for (words, [low, high]) in [(self.requests, requests), (self.held, held)] {
            words.get(row).into_iter().for_each(|word| set(word, small(low, high)));
        }
        let Some(qp) = of else { return words.iter().for_each(|word| set(word, 0)) };
        let address = match qp.peer {
            None => 0,
            Some(IpAddr::V4(address)) => address.to_ipv6_mapped().to_bits(),
            Some(IpAddr::V6(address)) => address.to_bits(),
        };
        // The upper bit says that there is one.
        let [own, peer] = qp.numbers.map(|number| number & 0xFF_FFFF);
        let [state, service] = [qp.state, qp.service].map(u32::from);
        let values = [
            small(own | state << 24, peer | (service | 0x80) << 24),
            (address >> 64) as u64,
            address as u64,
            qp.sent[0],
            qp.sent[1],
            qp.received[0],
            qp.received[1],
            small(qp.repeated, qp.not_ready),
        ];
        words.iter().zip(values).for_each(|(word, value)| set(word, value));
    }
}
