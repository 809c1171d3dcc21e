//! The last will of a process: notes in the file that all share, which are work of its neighbours
//! once it has gone. Their meaning is the caller's.
//!
//! The file has a number for each slot, of the places that have been used, and the places behind.
//! Behind these are marks, by which the note of a living process is found.
//! Any process of the user can write anything there, so all that is read is bounded, and the caller
//! judges the notes.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Mutex, PoisonError};

use super::layout::{COUNTS, MARK_BYTES, MARKS, MARKS_AT, NOTE_BYTES, NOTES_AT, NOTES_MAX};
use super::locks::Locks;

/// A place without a note.
const EMPTY: [u8; NOTE_BYTES] = [0; NOTE_BYTES];

/// Where this process's notes are.
#[derive(Debug, Default)]
pub(super) struct LastWill(Mutex<Places>);

#[derive(Debug, Default)]
struct Places {
    by_key: BTreeMap<u32, usize>,
    free: Vec<usize>,
    /// The number of places that have been used.
    count: usize,
}

fn count_at(slot: usize) -> u64 {
    NOTES_AT + slot as u64 * 8
}

fn place_at(slot: usize, place: usize) -> u64 {
    NOTES_AT + (COUNTS + (slot * NOTES_MAX + place) * NOTE_BYTES) as u64
}

impl LastWill {
    /// Keeps a note under a key, which [`marked`] finds by its mark. There may be no room for it:
    /// then nothing is done for it later. The mark stays when the note is dropped.
    pub(super) fn keep(
        &self,
        locks: &Locks,
        slot: u8,
        key: u32,
        (note, mark): (&[u8; NOTE_BYTES], u64),
    ) {
        let mut places = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Places { by_key, free, count } = &mut *places;
        let number = u32::from(slot) + 1;
        let slot = usize::from(slot);
        let place = match by_key.get(&key).copied().or_else(|| free.pop()) {
            Some(place) => place,
            None if *count < NOTES_MAX => *count,
            None => return,
        };
        if locks.write(note, place_at(slot, place)).is_err() {
            return;
        }
        by_key.insert(key, place);
        if place == *count {
            *count += 1;
            let _ = locks.write(&(*count as u64).to_ne_bytes(), count_at(slot));
        }
        let _ = locks.write(&(number | (place as u32) << 16).to_ne_bytes(), mark_at(mark));
    }

    /// Drops the note with a key, if there is one.
    pub(super) fn drop(&self, locks: &Locks, slot: u8, key: u32) {
        let mut places = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = places.by_key.remove(&key) {
            let _ = locks.write(&EMPTY, place_at(usize::from(slot), place));
            places.free.push(place);
        }
    }
}

fn mark_at(mark: u64) -> u64 {
    MARKS_AT + mark % MARKS * MARK_BYTES as u64
}

/// The slot and the place to which a mark leads.
fn led(locks: &Locks, mark: u64) -> io::Result<Option<(u8, usize)>> {
    let mut word = [0; MARK_BYTES];
    locks.read(&mut word, mark_at(mark))?;
    let word = u32::from_ne_bytes(word);
    let slot = (word & 0xffff).checked_sub(1).and_then(|slot| u8::try_from(slot).ok());
    Ok(slot.map(|slot| (slot, (word >> 16) as usize % NOTES_MAX)))
}

/// The slot's note with this mark is found by it no more, but stays.
pub(super) fn unmark(locks: &Locks, slot: u8, mark: u64) {
    if led(locks, mark).is_ok_and(|to| to.is_some_and(|(last, _)| last == slot)) {
        let _ = locks.write(&[0; MARK_BYTES], mark_at(mark));
    }
}

/// The slot with a note that `suits`, if it was the last that gave one this mark: `own`, or that of
/// another process that lives.
pub(super) fn marked(
    locks: &Locks,
    own: u8,
    mark: u64,
    suits: impl Fn(&[u8; NOTE_BYTES]) -> bool,
) -> io::Result<Option<u8>> {
    let Some((slot, place)) = led(locks, mark)? else { return Ok(None) };
    if slot != own && !locks.is_taken(slot.into())? {
        return Ok(None);
    }
    let mut note = EMPTY;
    locks.read(&mut note, place_at(slot.into(), place))?;
    Ok((note != EMPTY && suits(&note)).then_some(slot))
}

/// Forgets the notes of a former process on the slot.
pub(super) fn clear(locks: &Locks, slot: usize) -> io::Result<()> {
    locks.write(&[0; 8], count_at(slot))
}

/// Whether a process that has gone left notes on its slot.
pub(super) fn are_left(locks: &Locks, slot: usize) -> io::Result<bool> {
    let mut count = [0; 8];
    locks.read(&mut count, count_at(slot))?;
    let count = u64::from_ne_bytes(count);
    Ok(count > 0 && !locks.is_taken(slot)? && are_among(locks, slot, count)?)
}

/// Whether there are notes at the first `count` places of a slot.
pub(super) fn are_among(locks: &Locks, slot: usize, count: u64) -> io::Result<bool> {
    Ok(count > 0 && !read_left(locks, slot, count)?.is_empty())
}

/// The notes at the first `count` places of a slot.
fn read_left(locks: &Locks, slot: usize, count: u64) -> io::Result<Vec<[u8; NOTE_BYTES]>> {
    let count = usize::try_from(count).map_or(NOTES_MAX, |count| count.min(NOTES_MAX));
    let mut bytes = vec![0; count * NOTE_BYTES];
    locks.read(&mut bytes, place_at(slot, 0))?;
    let notes = bytes.chunks_exact(NOTE_BYTES).filter_map(|note| note.try_into().ok());
    Ok(notes.filter(|note| *note != EMPTY).collect())
}

/// Tells the slots and the notes of processes that have gone, those of `own` slots aside. Under the
/// lock of all.
pub(super) fn left(
    locks: &Locks,
    own: std::ops::Range<usize>,
    mut each: impl FnMut(usize, Vec<[u8; NOTE_BYTES]>),
) -> io::Result<()> {
    for (slot, seen) in locks.look()?.iter().enumerate() {
        if seen.notes == 0 || seen.is_taken || own.contains(&slot) {
            continue;
        }
        // The file may be shorter.
        each(slot, read_left(locks, slot, seen.notes).unwrap_or_default());
    }
    Ok(())
}
