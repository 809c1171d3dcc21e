//! Words of one moment: a sequence number that is odd while they are written.

use super::atomics::{AtomicU64, Ordering, fence};

/// A part that is being written is read this number of times.
const ATTEMPTS: usize = 8;

/// Writes under a sequence number. The one that it finds may be any. One thread at a time does so.
pub fn under(sequence: &AtomicU64, write: impl FnOnce()) {
    let odd = sequence.load(Ordering::Relaxed) | 1;
    sequence.store(odd, Ordering::Relaxed);
    fence(Ordering::Release);
    write();
    sequence.store(odd.wrapping_add(1), Ordering::Release);
}

/// The result of `read`, if the sequence number was even and the same before and behind it.
pub fn consistent<T>(
    sequence: impl Fn() -> Option<u64>,
    read: impl Fn() -> Option<T>,
) -> Option<T> {
    (0..ATTEMPTS).find_map(|_| {
        let before = sequence().filter(|number| number % 2 == 0)?;
        fence(Ordering::Acquire);
        let read = read()?;
        fence(Ordering::Acquire);
        (sequence()? == before).then_some(read)
    })
}
