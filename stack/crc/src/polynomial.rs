//! Polynomials modulo that of CRC-32, bit-reversed: bit 31 is x^0.

/// The polynomial of CRC-32.
const POLYNOMIAL: u32 = 0xedb8_8320;

/// x^0.
pub const ONE: u32 = 1 << 31;

/// a·b modulo the polynomial.
#[must_use]
pub const fn multiply(a: u32, mut b: u32) -> u32 {
    let mut product = 0;
    let mut bit = 32;
    while bit > 0 {
        bit -= 1;
        product ^= b & 0u32.wrapping_sub((a >> bit) & 1);
        b = times_x(b);
    }
    product
}

/// a·x modulo the polynomial.
#[must_use]
pub const fn times_x(a: u32) -> u32 {
    (a >> 1) ^ (POLYNOMIAL & 0u32.wrapping_sub(a & 1))
}

/// x^`exponent` modulo the polynomial.
#[must_use]
pub const fn power(mut exponent: u64) -> u32 {
    let (mut result, mut square) = (ONE, times_x(ONE));
    while exponent > 0 {
        if exponent & 1 == 1 {
            result = multiply(square, result);
        }
        square = multiply(square, square);
        exponent >>= 1;
    }
    result
}
