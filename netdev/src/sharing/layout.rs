//! The file that the processes on an address share: a record for each slot, then for each slot the
//! number of places of its notes that have been used, then the places, then marks of notes.

/// The most slots: the values of a byte.
pub(super) const SLOTS_MAX: usize = 256;
/// A record: nanoseconds since the machine started until which a slot rests.
pub(super) const RECORD: u64 = 8;
/// Behind the records there are notes, of which the numbers come first.
pub(super) const NOTES_AT: u64 = SLOTS_MAX as u64 * RECORD;
/// The length of a note.
pub const NOTE_BYTES: usize = 28;
/// The most notes of a process on an address.
pub(super) const NOTES_MAX: usize = 4096;
/// The numbers of used places.
pub(super) const COUNTS: usize = SLOTS_MAX * 8;
/// The bytes of the records and the numbers.
pub(super) const TABLE: usize = NOTES_AT as usize + COUNTS;
/// The bytes of the numbers and the places.
pub(super) const NOTES_BYTES: u64 = (COUNTS + SLOTS_MAX * NOTES_MAX * NOTE_BYTES) as u64;
/// Behind the notes: for each mark, one plus the number of the slot that last gave a note this
/// mark, and in the upper half the place of the note.
pub(super) const MARKS_AT: u64 = NOTES_AT + NOTES_BYTES;
/// The marks. More: fewer notes have the same, of which the last alone is found.
pub(super) const MARKS: u64 = 1 << 16;
/// The bytes of one.
pub(super) const MARK_BYTES: usize = 4;
const _: () = assert!(NOTES_MAX <= 1 << 16);
/// The bytes of the file. Pages without a write take no memory.
pub(super) const FILE_BYTES: u64 = MARKS_AT + MARKS * MARK_BYTES as u64;
