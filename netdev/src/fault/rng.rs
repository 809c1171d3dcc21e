//! Pseudo-random numbers, the same on every platform and in every version.

use std::net::IpAddr;

/// The bytes of an address, to [fork](Rng::fork) with.
pub(crate) fn name(address: IpAddr) -> [u8; 17] {
    let mut name = [0; 17];
    match address {
        IpAddr::V4(ip) => {
            name[0] = 4;
            name[1..5].copy_from_slice(&ip.octets());
        }
        IpAddr::V6(ip) => {
            name[0] = 6;
            name[1..].copy_from_slice(&ip.octets());
        }
    }
    name
}

/// SplitMix64 (Steele, Lea, Flood 2014; public domain reference by Vigna): 64 bits of state, full
/// period, every seed is good.
#[derive(Debug, Clone)]
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Another generator, derived from `seed` and `bytes`.
    pub(crate) fn fork(seed: u64, bytes: &[u8]) -> Self {
        bytes.iter().fold(Self::new(seed), |rng, &b| Self::new(rng.0 ^ u64::from(b)).stepped())
    }

    fn stepped(mut self) -> Self {
        self.0 = self.next();
        self
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Below `bound`, (nearly) uniform; 0 for 0.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    /// True `ppm` times in a million. Draws nothing for 0.
    pub(crate) fn chance(&mut self, ppm: u32) -> bool {
        ppm != 0 && self.below(1_000_000) < u64::from(ppm)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_are_those_of_the_reference() {
        let mut rng = Rng::new(1_234_567);
        let first: Vec<u64> = (0..3).map(|_| rng.next()).collect();
        assert_eq!(
            first,
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]
        );
    }

    #[test]
    fn chances_and_bounds_hold() {
        let mut rng = Rng::new(7);
        let hits = (0..100_000).filter(|_| rng.chance(10_000)).count();
        assert!((850..1150).contains(&hits), "{hits} of 100,000 at 1 %");
        assert!((0..1000).all(|_| rng.below(3) < 3 && rng.chance(1_000_000) && !rng.chance(0)));
        assert_eq!(rng.below(0), 0);
    }

    #[test]
    fn forks_differ() {
        let mut values: Vec<u64> = (0..=255_u8).map(|b| Rng::fork(1, &[b, 0]).next()).collect();
        values.sort_unstable();
        values.dedup();
        assert_eq!(values.len(), 256);
    }
}
