//! CRC-32 as a linear map: how a change of a few bytes changes the result, and the inverse.
//!
//! Take two messages of one length that differ by a pattern. Their CRCs differ by an amount that
//! depends only on the pattern and on the number of bytes behind it. So if a length and an
//! identification in a header change, no new pass over the header is needed: a few look-ups,
//! combined with XOR, are enough.

use rocinante_crc::{ONE, multiply, power, times_x};

/// The share of a byte in the CRC, by its value.
pub(super) type Table = [u32; 256];

/// The share of a byte that has `behind` bytes behind it.
pub(super) const fn byte(behind: usize) -> Table {
    let (mut table, moved) = (last_byte(), power(8 * behind as u64));
    let mut value = 0;
    while value < 256 {
        table[value] = multiply(table[value], moved);
        value += 1;
    }
    table
}

const fn last_byte() -> Table {
    let mut table = [0; 256];
    let mut value = 0;
    while value < 256 {
        let mut crc = value as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = times_x(crc);
            bit += 1;
        }
        table[value] = crc;
        value += 1;
    }
    table
}

/// The share of a big-endian 16-bit field.
pub(super) struct Field {
    high: Table,
    low: Table,
}

impl Field {
    /// A field that has `behind` bytes behind it.
    pub(super) const fn new(behind: usize) -> Self {
        Self { high: byte(behind + 1), low: byte(behind) }
    }

    #[inline]
    pub(super) const fn of(&self, value: u16) -> u32 {
        let [high, low] = value.to_be_bytes();
        self.high[high as usize] ^ self.low[low as usize]
    }
}

/// The share of a CRC in the CRC of the same bytes with others behind them (zlib's
/// `crc32_combine`).
pub(super) struct Moved([Table; 4]);

impl Moved {
    /// With `bytes` bytes behind them, at least four.
    pub(super) const fn by(bytes: usize) -> Self {
        Self([byte(bytes - 1), byte(bytes - 2), byte(bytes - 3), byte(bytes - 4)])
    }

    #[inline]
    pub(super) const fn of(&self, crc: u32) -> u32 {
        let ([first, second, third, fourth], bytes) = (&self.0, crc.to_le_bytes());
        first[bytes[0] as usize]
            ^ second[bytes[1] as usize]
            ^ third[bytes[2] as usize]
            ^ fourth[bytes[3] as usize]
    }
}

/// x^-8, which undoes one byte of zeros in a CRC, squared 0 to 16 times.
static BACK: [u32; 17] = {
    // The polynomial is primitive: x has the order 2^32 - 1.
    let mut back = [power(u32::MAX as u64 - 8); 17];
    let mut i = 1;
    while i < back.len() {
        back[i] = multiply(back[i - 1], back[i - 1]);
        i += 1;
    }
    back
};

/// The factor that undoes `bytes` bytes of zeros in a CRC, at most 131,071.
pub(super) fn back(bytes: usize) -> u32 {
    debug_assert!(bytes >> BACK.len() == 0);
    let set = BACK.iter().enumerate().filter(|(i, _)| bytes >> i & 1 == 1);
    set.fold(ONE, |product, (_, power)| multiply(product, *power))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_adds_what_its_crc_differs_by() {
        for behind in [0, 1, 5, 29, 47] {
            let table = byte(behind);
            let zeros = vec![0; behind + 1];
            for value in 0..=255 {
                let mut bytes = zeros.clone();
                bytes[0] = value;
                let difference = crc32fast::hash(&bytes) ^ crc32fast::hash(&zeros);
                assert_eq!(table[usize::from(value)], difference, "{value} before {behind}");
            }
        }
    }

    #[test]
    fn a_crc_is_moved_by_what_comes_behind() {
        let (first, second) = ([0x5a; 77], [0xc3; 300]);
        for len in [4, 5, 16, 300] {
            let (first, second) = (&first[..], &second[..len]);
            let both = crc32fast::hash(&[first, second].concat());
            let moved = Moved::by(len).of(crc32fast::hash(first));
            assert_eq!(moved ^ crc32fast::hash(second), both, "{len}");
        }
    }

    #[test]
    fn powers_invert() {
        for bytes in [0, 1, 68, 4125, 65_600] {
            assert_eq!(multiply(power(8 * bytes), back(bytes.try_into().unwrap())), ONE);
        }
    }
}
