//! The reader's side, an agent's or a process of the same user: a page of which any process of the
//! container may have written each byte, at any time.

use std::fs::File;
use std::net::{IpAddr, Ipv6Addr};
use std::os::unix::fs::FileExt as _;

use super::sequence::consistent;
use super::{
    Counts, HELD_AT, Head, OBJECTS, QueuePair, REQUESTS_AT, ROW_BYTES, ROWS_AT, SECTION_BYTES,
    SECTIONS_AT, SERVICES, SHARDS_MAX, STATES, VERSION, head, rows_of, section,
};

/// A page at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reading {
    /// The facts about the device: short texts without control characters.
    pub head: Head,
    /// The objects of all shards, in the order of [`OBJECTS`].
    pub objects: [u64; OBJECTS.len()],
    /// The counters of all shards, in the order of [`COUNTERS`](super::COUNTERS).
    pub counters: Counts,
}

/// Reads a page without its queue pairs. `None` if nothing is published, a part is being written
/// all the time, or the version is another.
#[must_use]
pub fn read(page: &File) -> Option<Reading> {
    let head = read_head(page)?;
    let mut reading = Reading { head, objects: Default::default(), counters: Default::default() };
    let add = |sum: &mut u64, more: u64| *sum = sum.saturating_add(more);
    for shard in 0..reading.head.shards {
        let (words, _) = read_section(page, shard, |_| Some(()))?;
        let objects = reading.objects.iter_mut().zip(&words[section::OBJECTS..]);
        objects.for_each(|(sum, more)| add(sum, *more));
        let counters = reading.counters.0.iter_mut().zip(&words[section::COUNTERS..]);
        counters.for_each(|(sum, more)| add(sum, *more));
    }
    Some(reading)
}

/// Whether something is published in this version: a page that cannot be read then is being written
/// all the time, or has nonsense.
#[must_use]
pub fn is_begun(page: &File) -> bool {
    words::<1>(page, head::VERSION * 8) == Some([VERSION])
}

/// The queue pairs of a page; of a shard whose part is being written all the time, none.
#[must_use]
pub fn queue_pairs(page: &File) -> Vec<QueuePair> {
    let Some(head) = read_head(page) else { return Vec::new() };
    let rows = |shard| {
        let (first, count) = rows_of(shard, head.shards);
        read_section(page, shard, |words| {
            let used = usize::try_from(words[section::ROWS]).unwrap_or(count).min(count);
            let mut bytes = vec![0; used * ROW_BYTES];
            page.read_exact_at(&mut bytes, (ROWS_AT + first * ROW_BYTES) as u64).ok()?;
            let more = [REQUESTS_AT, HELD_AT].map(|at| {
                let mut more = vec![0; used * 8];
                // A page of an agent of before has none.
                let _ = page.read_exact_at(&mut more, (at + first * 8) as u64);
                more
            });
            Some((bytes, more))
        })
    };
    let read = (0..head.shards).filter_map(rows);
    let rows = |(bytes, [requests, held]): (Vec<u8>, [Vec<u8>; 2])| -> Vec<QueuePair> {
        let more = requests.chunks_exact(8).zip(held.chunks_exact(8));
        let all = bytes.chunks_exact(ROW_BYTES).zip(more);
        all.filter_map(|(bytes, (requests, held))| row(bytes, [requests, held])).collect()
    };
    read.flat_map(|(_, all)| rows(all)).collect()
}

fn read_head(page: &File) -> Option<Head> {
    let read = || -> Option<[u64; head::END]> { words(page, 0) };
    let words = consistent(|| Some(read()?[head::SEQUENCE]), read)?;
    let shards = usize::try_from(words[head::SHARDS]).ok()?;
    // Counters that a program of before does not know are zero.
    let is_known = words[head::VERSION] == VERSION && (1..=SHARDS_MAX).contains(&shards);
    is_known.then(|| Head {
        device: text(&words[head::DEVICE]),
        backend: text(&words[head::BACKEND]),
        why: text(&words[head::WHY]),
        shards,
    })
}

/// The words of a shard's section, and what `more` reads of the same moment.
fn read_section<T>(
    page: &File,
    shard: usize,
    more: impl Fn(&[u64; section::END]) -> Option<T>,
) -> Option<([u64; section::END], T)> {
    let at = SECTIONS_AT + shard * SECTION_BYTES;
    let sequence = || Some(words::<1>(page, at + section::SEQUENCE * 8)?[0]);
    consistent(sequence, || {
        let words = words(page, at)?;
        let more = more(&words)?;
        Some((words, more))
    })
}

fn words<const N: usize>(page: &File, at: usize) -> Option<[u64; N]> {
    let mut words = [0; N];
    let mut bytes = [0; SECTIONS_AT];
    let bytes = &mut bytes[..N * 8];
    page.read_exact_at(bytes, at as u64).ok()?;
    let eights = bytes.chunks_exact(8).filter_map(|eight| eight.try_into().ok());
    words.iter_mut().zip(eights).for_each(|(word, eight)| *word = u64::from_ne_bytes(eight));
    Some(words)
}

/// The text up to the first zero, without control characters.
fn text(words: &[u64]) -> String {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    let plain = |c: char| if c.is_control() { '?' } else { c };
    String::from_utf8_lossy(&bytes[..end]).chars().map(plain).collect()
}

fn row(bytes: &[u8], more: [&[u8]; 2]) -> Option<QueuePair> {
    let word = |at: usize| -> Option<u64> {
        Some(u64::from_ne_bytes(bytes.get(at * 8..at * 8 + 8)?.try_into().ok()?))
    };
    let halves = |word: u64| [word as u32, (word >> 32) as u32];
    let [requests, held] = more.map(|it| it.first_chunk().map(|it| u64::from_ne_bytes(*it)));
    let [own, peer] = halves(word(0)?);
    let (state, service) = ((own >> 24) as u8, (peer >> 24) as u8);
    let is_one = service & 0x80 != 0;
    let service = service & 0x7F;
    if !is_one || usize::from(state) >= STATES.len() || usize::from(service) >= SERVICES.len() {
        return None;
    }
    let address = Ipv6Addr::from_bits(u128::from(word(1)?) << 64 | u128::from(word(2)?));
    let [repeated, not_ready] = halves(word(7)?);
    Some(QueuePair {
        numbers: [own, peer].map(|number| number & 0xFF_FFFF),
        state,
        service,
        peer: (!address.is_unspecified()).then(|| IpAddr::V6(address).to_canonical()),
        sent: [word(3)?, word(4)?],
        received: [word(5)?, word(6)?],
        repeated,
        not_ready,
        requests: halves(requests?),
        held: halves(held?),
    })
}
