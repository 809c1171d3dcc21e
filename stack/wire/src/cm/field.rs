//! The common fields of the messages: their ids, times and private data.

use super::super::mad::MAD_DATA_LEN;

/// The bytes after the MAD header.
pub(super) type Data = [u8; MAD_DATA_LEN];

/// A communication id: one side chooses it, unpredictably. 0 is no id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct CommId(pub u32);

/// Converts a 5-bit time of InfiniBand management, 4.096 µs · 2^code, to nanoseconds.
#[must_use]
pub const fn code_to_ns(code: u8) -> u64 {
    4096 << (code & 31)
}

/// Writes the part of the private data that fits.
pub(super) fn put(out: &mut [u8], private: &[u8]) {
    let len = private.len().min(out.len());
    out[..len].copy_from_slice(&private[..len]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_codes() {
        assert_eq!(code_to_ns(0), 4096);
        assert_eq!(code_to_ns(20), 4_294_967_296);
    }
}
