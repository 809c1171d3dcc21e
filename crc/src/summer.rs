//! Packets: the sum of the bytes that the ICRC covers.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use crate::folding;
use crc32fast::Hasher;

/// Bytes of a base transport header, the shortest that is summed.
pub const BTH_LEN: usize = 12;
/// The shortest packet: a BTH and an ICRC.
pub const PACKET_MIN: usize = 16;

/// The byte of the BTH that is taken for ones.
pub(crate) const MASKED: usize = 4;

/// How this processor sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Summer {
    /// Only [`detect`](Self::detect) says so.
    folds: bool,
}

impl Summer {
    /// Asks the processor.
    #[must_use]
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        return Self {
            folds: is_x86_feature_detected!("pclmulqdq") && is_x86_feature_detected!("avx"),
        };
        #[cfg(not(target_arch = "x86_64"))]
        Self { folds: false }
    }

    /// The CRC-32 of something of which it was `before`, and the first `covered` bytes of a packet behind it, of which the fifth counts as ones. What is
    /// not there of it counts as nothing.
    #[must_use]
    #[inline]
    pub fn packet(self, before: u32, packet: &[u8], covered: usize) -> u32 {
        #[cfg(target_arch = "x86_64")]
        if self.folds {
            // SAFETY: the processor has what it takes: `folds` is true of no other.
            return unsafe { folding::packet(before, packet, covered) };
        }
        plain(before, packet, covered)
    }
}

/// The same by what the library has.
#[cfg_attr(target_arch = "x86_64", cold)]
pub(crate) fn plain(before: u32, packet: &[u8], covered: usize) -> u32 {
    let covered = packet.get(..covered).unwrap_or(packet);
    let (first, rest) = covered.split_at(covered.len().min(BTH_LEN));
    let mut bth = [0; BTH_LEN];
    bth[..first.len()].copy_from_slice(first);
    bth[MASKED] = 0xff;
    let mut hasher = Hasher::new_with_initial(before);
    hasher.update(&bth[..first.len()]);
    hasher.update(rest);
    hasher.finalize()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::update;

    #[test]
    fn a_packet_is_summed_as_any_bytes_but_for_one() {
        let packet: Vec<u8> =
            (0..5000u32).map(|i| (i.wrapping_mul(0x9e37_79b1) >> 24) as u8).collect();
        let mut masked = packet.clone();
        masked[MASKED] = 0xff;
        let before = crc32fast::hash(b"what stands before");
        for len in (0..700usize).chain([1000, 4116, 4999]) {
            // What is not covered makes no difference, wherever it ends.
            for covered in [len.saturating_sub(4), len, BTH_LEN, len / 2, 0, 3, len + 1, len + 4] {
                let expected = update(before, &masked[..covered.min(len)]);
                for summer in [Summer::detect(), Summer { folds: false }] {
                    let sum = summer.packet(before, &packet[..len], covered);
                    assert_eq!(sum, expected, "{covered} of {len} bytes, {summer:?}");
                }
            }
        }
    }
}
