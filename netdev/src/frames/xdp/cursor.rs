//! Index arithmetic of a single-producer, single-consumer ring.
//!
//! Both indices run freely through all 2³² values; an entry's place is its index modulo the size, a
//! power of two. The difference of the indices is the number of filled entries. One side of a ring
//! owns one index and sees a possibly stale copy of the other.

/// Both indices of a ring as one side knows them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cursor {
    size: u32,
    produced: u32,
    consumed: u32,
}

impl Cursor {
    /// The cursor of a ring of `size` entries with these values of its indices. Panics unless
    /// `size` is a power of two.
    pub(crate) fn new(size: u32, produced: u32, consumed: u32) -> Self {
        assert!(size.is_power_of_two(), "ring size {size} is no power of two");
        let mut cursor = Self { size, produced: consumed, consumed };
        cursor.see_produced(produced);
        cursor
    }

    /// The most entries in the ring.
    pub(crate) const fn size(&self) -> u32 {
        self.size
    }

    /// Entries that were produced and not yet consumed.
    pub(crate) const fn filled(&self) -> u32 {
        self.produced.wrapping_sub(self.consumed)
    }

    /// Entries that can be produced.
    pub(crate) const fn free(&self) -> u32 {
        self.size - self.filled()
    }

    /// The producer's index.
    pub(crate) const fn produced(&self) -> u32 {
        self.produced
    }

    /// The consumer's index.
    pub(crate) const fn consumed(&self) -> u32 {
        self.consumed
    }

    /// The place of the next entry to write.
    pub(crate) const fn write_place(&self) -> usize {
        (self.produced & (self.size - 1)) as usize
    }

    /// The place of the entry `ahead` places after the oldest.
    pub(crate) const fn read_place(&self, ahead: u32) -> usize {
        (self.consumed.wrapping_add(ahead) & (self.size - 1)) as usize
    }

    /// The place of the entry with this index of the producer.
    pub(crate) const fn place_of(&self, index: u32) -> usize {
        (index & (self.size - 1)) as usize
    }

    /// Records that one entry was written at [`write_place`](Self::write_place).
    pub(crate) fn produce(&mut self) {
        debug_assert!(self.free() > 0, "ring overrun");
        self.produced = self.produced.wrapping_add(1);
    }

    /// Records that the `n` oldest entries were read.
    pub(crate) fn consume(&mut self, n: u32) {
        debug_assert!(n <= self.filled(), "ring underrun");
        self.consumed = self.consumed.wrapping_add(n);
    }

    /// Records an index published by the other side, the producer. Ignores an index that no correct
    /// producer can have reached: it would make entries appear that were never written.
    pub(crate) fn see_produced(&mut self, produced: u32) {
        if produced.wrapping_sub(self.consumed) <= self.size {
            self.produced = produced;
        }
    }

    /// Records an index published by the other side, the consumer; see
    /// [`see_produced`](Self::see_produced).
    pub(crate) fn see_consumed(&mut self, consumed: u32) {
        if self.produced.wrapping_sub(consumed) <= self.size {
            self.consumed = consumed;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    /// Two cursors that see each other only on request, against a plain queue.
    #[test]
    fn two_sides_agree_with_a_queue_across_the_wrap() {
        let seeds = if cfg!(miri) { 2 } else { 64 };
        for seed in 1..=seeds {
            let mut random = fastrand::Rng::with_seed(seed);
            let size = 1 << random.u32(..7);
            let start = 0u32.wrapping_sub(random.u32(..300));
            let mut producer = Cursor::new(size, start, start);
            let mut consumer = producer;
            let mut entries = vec![0u32; size as usize];
            let mut oracle = VecDeque::new();
            let mut next = 0;
            for step in 0..2000 {
                match random.u32(..4) {
                    0 => producer.see_consumed(consumer.consumed()),
                    1 => consumer.see_produced(producer.produced()),
                    2 => {
                        let n = random.u32(..producer.free() + 1);
                        for _ in 0..n {
                            entries[producer.write_place()] = next;
                            oracle.push_back(next);
                            producer.produce();
                            next += 1;
                        }
                    }
                    _ => {
                        let n = random.u32(..consumer.filled() + 1);
                        for ahead in 0..n {
                            let got = entries[consumer.read_place(ahead)];
                            assert_eq!(oracle.pop_front(), Some(got), "seed {seed} step {step}");
                        }
                        consumer.consume(n);
                    }
                }
                assert!(oracle.len() <= size as usize, "seed {seed} step {step}");
                assert!(consumer.filled() as usize <= oracle.len(), "seed {seed} step {step}");
                assert!(producer.filled() as usize >= oracle.len(), "seed {seed} step {step}");
                assert_eq!(producer.free() + producer.filled(), size);
            }
        }
    }

    #[test]
    fn an_impossible_index_from_the_other_side_is_ignored() {
        let mut cursor = Cursor::new(8, 4, 0);
        cursor.see_produced(9);
        assert_eq!(cursor.filled(), 4);
        cursor.see_produced(u32::MAX);
        assert_eq!(cursor.filled(), 4);
        cursor.see_consumed(5);
        assert_eq!(cursor.filled(), 4);
        cursor.see_consumed(4);
        assert_eq!(cursor.filled(), 0);
        assert_eq!(Cursor::new(8, 100, 0).filled(), 0);
    }

    #[test]
    #[should_panic(expected = "no power of two")]
    fn a_size_that_is_no_power_of_two_is_refused() {
        Cursor::new(12, 0, 0);
    }
}
