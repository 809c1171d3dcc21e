//! Copies bytes and computes their CRC-32 in the same pass. The ICRC of a packet covers its
//! payload, which was just copied from registered memory: so its bytes pass through registers once,
//! not twice.
//!
//! Folding by carry-less multiplication, after Gopal et al., "Fast CRC Computation for Generic
//! Polynomials Using PCLMULQDQ Instruction" (Intel, 2009), with registers of four lanes. The lanes
//! are added in a tree, not one after the other. That matters for few rounds: 1 KiB has four.
#![allow(unsafe_code)]

use super::NoMemory;
use crate::tuning::memory::ENABLED;

/// Whether this processor copies and sums in one pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Summing(bool);

impl Summing {
    /// Asks the processor.
    pub(crate) fn detect() -> Self {
        Self(ENABLED && has_instructions())
    }

    /// Copies `dst.len()` bytes and returns their CRC-32. It returns `None` and copies nothing if
    /// the processor lacks the instructions, or if the length is not a path MTU of 1024 bytes or
    /// more: shorter payloads are not faster this way, and only the CRCs of these lengths can be
    /// joined to the ICRC (`Template::seal_around`). It fails if there is no memory.
    ///
    /// # Safety
    /// If there is memory at `src`, Rust must not refer to it by more than atomics and raw
    /// pointers, and it must not overlap `dst`.
    #[inline]
    pub(super) unsafe fn copy(
        self,
        src: *const u8,
        dst: &mut [u8],
    ) -> Result<Option<u32>, NoMemory> {
        #[cfg(target_arch = "x86_64")]
        if self.0 && matches!(dst.len(), 1024 | 2048 | 4096) {
            // SAFETY: the processor has the instructions, and the caller vouches for `src`.
            return unsafe { wide::copy(src, dst) }.map(Some);
        }
        let _ = (src, dst);
        Ok(None)
    }
}

#[cfg(target_arch = "x86_64")]
fn has_instructions() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("vpclmulqdq")
        && is_x86_feature_detected!("pclmulqdq")
}

#[cfg(not(target_arch = "x86_64"))]
fn has_instructions() -> bool {
    false
}

#[cfg(target_arch = "x86_64")]
mod wide {
    use std::arch::x86_64::{
        __m128i, __m512i, _mm_xor_si128, _mm256_castsi256_si128, _mm256_extracti128_si256,
        _mm256_xor_si256, _mm512_castsi512_si256, _mm512_clmulepi64_epi128,
        _mm512_extracti32x4_epi32, _mm512_extracti64x4_epi64, _mm512_loadu_si512, _mm512_set_epi64,
        _mm512_ternarylogic_epi64, _mm512_xor_si512,
    };

    use rocinante_crc::folding::{Factors, further, reduce};

    use super::super::guarded::{Sums, copy_summed};
    use super::NoMemory;

    /// Bits of a round: four registers.
    const ROUND_ON: Factors = further(8 * 4 * 64);
    const TWO_ON: Factors = further(1024);
    const ONE_ON: Factors = further(512);
    const THREE_LANES_ON: Factors = further(384);
    const TWO_LANES_ON: Factors = further(256);
    const LANE_ON: Factors = further(128);

    /// # Safety
    /// As `Summing::copy`, and the length of `dst` must be a multiple of a round and not 0.
    #[target_feature(enable = "avx512f,vpclmulqdq,pclmulqdq")]
    pub(super) unsafe fn copy(src: *const u8, dst: &mut [u8]) -> Result<u32, NoMemory> {
        let (low, high) = ROUND_ON;
        let factors = [low, high, low, high, low, high, low, high];
        let mut sums = Sums { factors, registers: [[0; 8]; 4] };
        // SAFETY: the caller vouches for `src` and for the length, and the processor has the
        // instructions.
        if !unsafe { copy_summed(dst.as_mut_ptr(), src, dst.len(), &mut sums) } {
            return Err(NoMemory);
        }
        let [a, b, c, d] = sums.registers.map(|lanes| {
            // SAFETY: an array of eight words is read.
            unsafe { _mm512_loadu_si512(lanes.as_ptr().cast()) }
        });
        let one = all(ONE_ON);
        let lanes = fold(fold(a, b, one), fold(c, d, one), all(TWO_ON));
        Ok(reduce(add_lanes(lanes)))
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn all((low, high): Factors) -> __m512i {
        _mm512_set_epi64(high, low, high, low, high, low, high, low)
    }

    /// `lanes`, advanced by `factors`, plus `next` at that position.
    #[inline]
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    fn fold(lanes: __m512i, next: __m512i, factors: __m512i) -> __m512i {
        const XOR: i32 = 0x96;
        let low = _mm512_clmulepi64_epi128(lanes, factors, 0x00);
        let high = _mm512_clmulepi64_epi128(lanes, factors, 0x11);
        _mm512_ternarylogic_epi64(low, high, next, XOR)
    }

    /// The sum of the four lanes, each advanced to the position of the last.
    #[inline]
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    fn add_lanes(lanes: __m512i) -> __m128i {
        let [first, second, third] = [THREE_LANES_ON, TWO_LANES_ON, LANE_ON];
        let factors =
            _mm512_set_epi64(0, 0, third.1, third.0, second.1, second.0, first.1, first.0);
        let low = _mm512_clmulepi64_epi128(lanes, factors, 0x00);
        let high = _mm512_clmulepi64_epi128(lanes, factors, 0x11);
        let moved = _mm512_xor_si512(low, high);
        let halves =
            _mm256_xor_si256(_mm512_castsi512_si256(moved), _mm512_extracti64x4_epi64(moved, 1));
        let moved =
            _mm_xor_si128(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
        _mm_xor_si128(moved, _mm512_extracti32x4_epi32(lanes, 3))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without the instructions, the test checks only that `copy` returns `None`.
    #[test]
    fn the_sum_is_the_crc_of_what_was_copied() {
        let detected = Summing::detect();
        let src: Vec<u8> =
            (0..8192u32).map(|i| (i.wrapping_mul(0x9e37_79b1) >> 24) as u8).collect();
        for (from, to) in [(0, 0), (1, 0), (63, 12), (7, 28)] {
            for len in [0, 64, 255, 256, 512, 768, 1000, 1024, 1025, 2048, 4096] {
                for summing in [detected, Summing(false)] {
                    let mut dst = vec![0xee; len + 64];
                    // SAFETY: the source has more bytes than that.
                    let sum =
                        unsafe { summing.copy(src.as_ptr().add(from), &mut dst[to..to + len]) }
                            .unwrap();
                    let copied = summing.0 && [1024, 2048, 4096].contains(&len);
                    assert_eq!(
                        sum,
                        copied.then(|| crc32fast::hash(&src[from..from + len])),
                        "{len}"
                    );
                    let expected = if copied { &src[from..from + len] } else { &vec![0xee; len] };
                    assert_eq!(&dst[to..to + len], expected, "{len} from {from} to {to}");
                    assert!(dst[..to].iter().chain(&dst[to + len..]).all(|byte| *byte == 0xee));
                }
            }
        }
    }
}
