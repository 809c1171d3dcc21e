//! Datagrams in flight, each until its time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use super::link::Fate;
use crate::tuning::faults::SPARE_BYTES;

/// Datagrams in flight, each with its facts. Some buffers are reused.
#[derive(Debug)]
pub(crate) struct Flight<T> {
    /// When each lands, its order among those of one time, and its index in `flying`.
    due: BinaryHeap<Reverse<(Duration, u64, usize)>>,
    flying: Vec<Option<(T, Vec<u8>)>>,
    /// Free indices of `flying`.
    free: Vec<usize>,
    buffers: Vec<Vec<u8>>,
    /// Their capacity.
    spare: usize,
    order: u64,
    bytes: usize,
}

impl<T> Default for Flight<T> {
    fn default() -> Self {
        let (due, flying, free, buffers) = Default::default();
        Self { due, flying, free, buffers, spare: 0, order: 0, bytes: 0 }
    }
}

impl<T> Flight<T> {
    /// When the next one lands.
    pub(crate) fn next(&self) -> Option<Duration> {
        self.due.peek().map(|Reverse((due, ..))| *due)
    }

    pub(crate) fn len(&self) -> usize {
        self.due.len()
    }

    /// Bytes in flight.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Starts a flight: of these bytes, changed as the fate says.
    pub(crate) fn launch(&mut self, of: T, payload: &[u8], fate: &Fate) {
        let mut bytes = self.buffers.pop().unwrap_or_default();
        self.spare -= bytes.capacity();
        bytes.clear();
        bytes.extend_from_slice(payload);
        if let Some(bit) = fate.flip {
            flip(&mut bytes, bit);
        }
        self.bytes += bytes.len();
        let slot = self.free.pop().unwrap_or_else(|| {
            self.flying.push(None);
            self.flying.len() - 1
        });
        self.flying[slot] = Some((of, bytes));
        self.order += 1;
        self.due.push(Reverse((fate.due, self.order, slot)));
    }

    /// The next one that is over by `now`; it goes on until it [lands](Self::land).
    pub(crate) fn peek(&self, now: Duration) -> Option<(&T, &[u8])> {
        let Reverse((due, _, slot)) = self.due.peek()?;
        let (of, bytes) = self.flying[*slot].as_ref().filter(|_| *due <= now)?;
        Some((of, bytes))
    }

    /// Ends the next flight that is over by `now`. Give the buffer [back](Self::take_back).
    pub(crate) fn land(&mut self, now: Duration) -> Option<(T, Vec<u8>)> {
        self.next().filter(|due| *due <= now)?;
        let Reverse((_, _, slot)) = self.due.pop()?;
        self.free.push(slot);
        let landed = self.flying[slot].take()?;
        self.bytes -= landed.1.len();
        Some(landed)
    }

    pub(crate) fn take_back(&mut self, buffer: Vec<u8>) {
        if self.spare + buffer.capacity() <= SPARE_BYTES {
            self.spare += buffer.capacity();
            self.buffers.push(buffer);
        }
    }
}

/// Flips a bit, by its number from the front.
pub(crate) fn flip(bytes: &mut [u8], bit: usize) {
    bytes[bit / 8] ^= 1 << (bit % 8);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_buffers_are_bounded() {
        let mut flight = Flight::default();
        for round in 1..=2_u64 {
            let at = Duration::from_secs(round);
            let sizes = (0..4000).map(|n| 100 + 2 * n);
            sizes
                .clone()
                .for_each(|len| flight.launch(len, &vec![round as u8; len], &Fate::at(at)));
            assert!(flight.peek(at - Duration::from_nanos(1)).is_none());
            for len in sizes {
                assert_eq!(flight.peek(at), Some((&len, &vec![round as u8; len][..])));
                let (of, bytes) = flight.land(at).unwrap();
                assert_eq!((of, bytes.len()), (len, len));
                flight.take_back(bytes);
            }
            let kept: usize = flight.buffers.iter().map(Vec::capacity).sum();
            assert_eq!((flight.spare, flight.bytes()), (kept, 0));
            assert!((SPARE_BYTES / 2..=SPARE_BYTES).contains(&kept), "{kept}");
        }
    }
}
