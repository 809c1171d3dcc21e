//! Folding by carry-less multiplication, after Gopal et al., "Fast CRC Computation for Generic
//! Polynomials Using PCLMULQDQ Instruction" (Intel, 2009). Each step shifts 16 bytes by the
//! distance to the next 16, and adds the two.

use core::arch::x86_64::{
    __m128i, _mm_clmulepi64_si128, _mm_cvtsi32_si128, _mm_extract_epi32, _mm_or_si128,
    _mm_set_epi32, _mm_set_epi64x, _mm_shuffle_epi8, _mm_srli_si128, _mm_xor_si128,
};

use crate::summer::{BTH_LEN, MASKED, PACKET_MIN, plain};
use crate::{power, update};

/// Two factors, for the halves of 16 bytes: they shift them by a given number of bits.
pub type Factors = (i64, i64);

/// Bytes of a lane, and the factors that shift a lane to the next one.
const LANE: usize = 16;
const LANE_ON: Factors = further(8 * LANE as u64);
/// The longest input in one chain, in bytes. Beyond it, several chains in parallel are faster.
const SHORT: usize = 320;
/// The block size in bytes at which the library is fastest.
const BLOCK: usize = 64;
/// The polynomial, bit-reversed in 33 bits.
const POLYNOMIAL: i64 = 0x1_db71_0641;
/// x^95 divided by the polynomial, bit-reversed in 64 bits.
const QUOTIENT: i64 = {
    let (mut rest, mut quotient) = (1u128 << 95, 0u64);
    let mut bit = 64;
    while bit > 0 {
        bit -= 1;
        if rest >> (bit + 32) & 1 == 1 {
            rest ^= 0x1_04c1_1db7 << bit;
            quotient |= 1 << bit;
        }
    }
    quotient.reverse_bits().cast_signed()
};

/// Shuffle masks: the 16 bytes from place n on move n bytes to the end, with zeros before them.
const TO_THE_END: [u8; 2 * LANE] = {
    let mut window = [0x80; 2 * LANE];
    let mut at = 0;
    while at < LANE {
        window[LANE + at] = at as u8;
        at += 1;
    }
    window
};
/// The factors that shift 16 bytes by this number of `bits`.
#[must_use]
pub const fn further(bits: u64) -> Factors {
    (factor(bits + 32), factor(bits - 32))
}

/// x^bits modulo the polynomial, bit-reversed in 33 bits.
const fn factor(bits: u64) -> i64 {
    ((power(bits) as u64) << 1).cast_signed()
}

/// As [`Summer::packet`](crate::Summer::packet).
#[target_feature(enable = "pclmulqdq,avx")]
pub(crate) fn packet(before: u32, head: &[u8; PACKET_MIN], covered: &[u8]) -> u32 {
    // The state before counts in the place of the first four bytes, so these stay together. One
    // comparison covers three cases: too few bytes, too many, and no multiple of 4.
    let usual = covered.len().wrapping_sub(BTH_LEN).rotate_right(2) <= (SHORT - BTH_LEN) / 4;
    if usual { short(before, head, covered) } else { unusual(before, head, covered) }
}

/// As [`packet`], for any packet. For a long one, the library sums a multiple of its block size.
#[inline(never)]
#[target_feature(enable = "pclmulqdq,avx")]
fn unusual(before: u32, head: &[u8; PACKET_MIN], covered: &[u8]) -> u32 {
    let odd = covered.len() % BLOCK;
    let first = if odd < BTH_LEN { odd + BLOCK } else { odd };
    match covered.split_at_checked(first) {
        Some((first, rest)) if covered.len().is_multiple_of(4) => {
            update(short(before, head, first), rest)
        }
        _ => plain(before, covered),
    }
}

/// The sum of `bytes` in one chain; their number is a multiple of 4 and at least [`BTH_LEN`]. The
/// packet that contains them starts with `head`.
#[inline]
#[target_feature(enable = "pclmulqdq,avx")]
fn short(before: u32, head: &[u8; PACKET_MIN], bytes: &[u8]) -> u32 {
    // The first lane gets 1 to 16 bytes, so that a multiple of 16 remains. Zeros before them do not
    // change the CRC.
    let Some((_, but_one)) = bytes.split_first() else { return before };
    let (first, mut lanes) = but_one.as_rchunks::<LANE>();
    let first = first.len() + 1;
    let state = _mm_cvtsi32_si128((!before).cast_signed());
    let lane = _mm_xor_si128(_mm_or_si128(load(head), byte(MASKED)), state);
    let mut lane = _mm_shuffle_epi8(lane, window(&TO_THE_END, first));
    let factors = (upper(LANE_ON.0), upper(LANE_ON.1));
    if first == MASKED
        && let Some((next, rest)) = lanes.split_first()
    {
        lane = fold(lane, _mm_or_si128(load(next), byte(0)), factors);
        lanes = rest;
    }
    // Unrolled by hand: a compiler that unrolls it counts the lanes first.
    while let Some(([a, b, c, d], rest)) = lanes.split_first_chunk() {
        lane = fold(fold(lane, load(a), factors), load(b), factors);
        lane = fold(fold(lane, load(c), factors), load(d), factors);
        lanes = rest;
    }
    if let Some(([a, b], rest)) = lanes.split_first_chunk() {
        lane = fold(fold(lane, load(a), factors), load(b), factors);
        lanes = rest;
    }
    if let [last] = lanes {
        lane = fold(lane, load(last), factors);
    }
    reduce(lane)
}

/// Ones in byte number `at`, which is below 8.
#[inline]
#[target_feature(enable = "sse2")]
fn byte(at: usize) -> __m128i {
    _mm_set_epi64x(0, 0xff << (8 * at))
}

/// `lane`, shifted by `factors`, plus `next`.
#[inline]
#[target_feature(enable = "pclmulqdq")]
fn fold(lane: __m128i, next: __m128i, factors: (__m128i, __m128i)) -> __m128i {
    let low = _mm_clmulepi64_si128(lane, factors.0, 0x10);
    let high = _mm_clmulepi64_si128(lane, factors.1, 0x11);
    _mm_xor_si128(low, _mm_xor_si128(high, next))
}

/// The CRC-32 of 128 bits. One more folding leaves 96 bits; Barrett's reduction divides the first
/// 64 of them and leaves the last 32.
///
/// # Safety
/// Only the processor matters: a caller without these target features must know that the processor
/// has them.
#[inline]
#[target_feature(enable = "pclmulqdq,sse4.1")]
#[must_use]
pub fn reduce(lane: __m128i) -> u32 {
    let folded = _mm_clmulepi64_si128(lane, upper(LANE_ON.1), 0x10);
    let folded = _mm_xor_si128(folded, _mm_srli_si128(lane, 8));
    let times = _mm_clmulepi64_si128(folded, upper(QUOTIENT), 0x10);
    let rest = _mm_clmulepi64_si128(times, upper(POLYNOMIAL), 0x10);
    !_mm_extract_epi32(_mm_xor_si128(folded, rest), 2).cast_unsigned()
}

/// A factor in the upper half: there a multiplication reads it from memory, and the lower half of a
/// constant takes two instructions to make.
#[inline]
#[target_feature(enable = "sse2")]
fn upper(factor: i64) -> __m128i {
    _mm_set_epi64x(factor, 0)
}

/// 16 bytes of a window, from place `from` on.
#[inline]
#[target_feature(enable = "sse2")]
fn window(all: &[u8; 2 * LANE], from: usize) -> __m128i {
    match all[from..].first_chunk() {
        Some(bytes) => load(bytes),
        None => _mm_set_epi32(0, 0, 0, 0),
    }
}

#[inline]
#[target_feature(enable = "sse2")]
fn load(bytes: &[u8; LANE]) -> __m128i {
    let both = u128::from_le_bytes(*bytes);
    _mm_set_epi64x((both >> 64) as i64, both as i64)
}
