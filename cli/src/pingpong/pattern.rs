//! Test patterns. Their bytes differ between messages and between offsets, so any wrong, old or
//! misplaced byte shows.

/// Fills a message with the pattern of `seed`.
pub fn fill(message: &mut [u8], seed: u64) {
    for (index, chunk) in (0..).zip(message.chunks_mut(8)) {
        chunk.copy_from_slice(&word(seed, index)[..chunk.len()]);
    }
}

/// The offset of the first byte that differs from [`fill`]'s pattern.
#[must_use]
pub fn first_difference(message: &[u8], seed: u64) -> Option<usize> {
    let mut words = (0..).zip(message.chunks(8));
    let (index, chunk) =
        words.find(|(index, chunk)| **chunk != word(seed, *index)[..chunk.len()])?;
    let expected = word(seed, index);
    let within = chunk.iter().zip(expected).position(|(is, should)| *is != should)?;
    usize::try_from(index).ok().map(|index| index * 8 + within)
}

fn word(seed: u64, index: u64) -> [u8; 8] {
    // The odd multipliers and the shift change all bytes between neighbours of either argument.
    let mixed =
        (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ index).wrapping_mul(0xd6e8_feb8_6659_fd93);
    (mixed ^ (mixed >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_wrong_byte_is_found() {
        for len in [0, 1, 8, 13, 64] {
            let mut message = vec![0; len];
            fill(&mut message, 7);
            assert_eq!(first_difference(&message, 7), None);
            for at in 0..len {
                message[at] ^= 1;
                assert_eq!(first_difference(&message, 7), Some(at));
                message[at] ^= 1;
            }
            assert_eq!(first_difference(&message, 8), (len > 0).then_some(0));
        }
    }
}
