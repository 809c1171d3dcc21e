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

/// The smallest code for a time of at least `ns` nanoseconds; 31 (2.4 hours) if there is none.
#[must_use]
pub const fn ns_to_code(ns: u64) -> u8 {
    let mut code = 0;
    while code < 31 && code_to_ns(code) < ns {
        code += 1;
    }
    code
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
        assert_eq!(ns_to_code(4096), 0);
        assert_eq!(ns_to_code(4097), 1);
        assert_eq!(ns_to_code(u64::MAX), 31);
        for code in 0..32 {
            assert_eq!(ns_to_code(code_to_ns(code)), code);
        }
    }
}
