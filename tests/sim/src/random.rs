//! Pseudo-random numbers, the same on every platform and for ever.

/// SplitMix64 (Steele, Lea, Flood 2014): 64 bits of state, full period, every seed is good.
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `bound`, (nearly) uniform; 0 for 0.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    /// As [`below`](Self::below), for indices.
    pub(crate) fn index(&mut self, bound: usize) -> usize {
        self.below(bound as u64) as usize
    }

    /// A number from `low` on, below `high`.
    pub(crate) fn range(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low)
    }

    /// True once in `n` times; never for 0.
    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        n > 0 && self.below(n) == 0
    }

    pub(crate) fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.index(choices.len())]
    }

    pub(crate) fn bits(&mut self) -> u32 {
        (self.next() >> 32) as u32
    }

    pub(crate) fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let word = self.next().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }
}

const fn mix(z: u64) -> u64 {
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A digest of all that happened: two runs that differ anywhere differ here.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Digest(u64);

impl Digest {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(mix(seed ^ 0x5eed))
    }

    pub(crate) fn add(&mut self, value: u64) {
        self.0 = mix(self.0.rotate_left(5) ^ value);
    }

    pub(crate) const fn value(self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_never_change() {
        // The first outputs of the reference implementation for the seed 1234567.
        let mut random = Random::new(1_234_567);
        assert_eq!(random.next(), 6_457_827_717_110_365_317);
        assert_eq!(random.next(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn a_digest_tells_order() {
        let of = |values: &[u64]| {
            let mut digest = Digest::new(1);
            values.iter().for_each(|value| digest.add(*value));
            digest.value()
        };
        assert_ne!(of(&[1, 2]), of(&[2, 1]));
        assert_eq!(of(&[1, 2]), of(&[1, 2]));
    }
}
