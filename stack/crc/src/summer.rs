//! The sum of the bytes of a packet that the ICRC covers.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use crate::folding;
use crc32fast::Hasher;

/// Bytes of a base transport header, the shortest input.
pub const BTH_LEN: usize = 12;
/// The shortest packet: a BTH and an ICRC.
pub const PACKET_MIN: usize = 16;

/// Index of the byte of the BTH that counts as ones.
pub(crate) const MASKED: usize = 4;

/// The method for this processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Summer {
    /// Only [`detect`](Self::detect) sets it.
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

    /// The CRC-32 of an input followed by `covered`, the bytes at the beginning of a packet;
    /// `before` is the CRC-32 of that input. The packet starts with `head`, and its fifth byte
    /// counts as ones.
    #[inline]
    #[must_use]
    pub fn packet(self, before: u32, head: &[u8; PACKET_MIN], covered: &[u8]) -> u32 {
        #[cfg(target_arch = "x86_64")]
        if self.folds {
            // SAFETY: the processor has the required features: `folds` is true only then.
            return unsafe { folding::packet(before, head, covered) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = head;
        plain(before, covered)
    }
}

/// As [`Summer::packet`], by means of the library.
#[cfg_attr(target_arch = "x86_64", cold)]
pub(crate) fn plain(before: u32, covered: &[u8]) -> u32 {
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
        // Bytes that are not covered make no difference, wherever the covered ones end.
        let head = packet.first_chunk().unwrap();
        for covered in (0..700usize).chain([996, 1000, 4112, 4116, 4999]) {
            let expected = update(before, &masked[..covered]);
            for summer in [Summer::detect(), Summer { folds: false }] {
                let sum = summer.packet(before, head, &packet[..covered]);
                assert_eq!(sum, expected, "{covered} bytes, {summer:?}");
            }
        }
    }
}
