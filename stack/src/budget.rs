//! The capacity of a receive queue, and the cost of packets in it.

use crate::tuning::credit::STANDARD_DATAGRAMS;

/// The capacity of a receive queue before it drops: a sum of costs, and a number of datagrams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// Bytes, in the measure of [`Budget::cost`].
    pub bytes: u32,
    /// Datagrams.
    pub datagrams: u32,
}

impl Budget {
    /// Assumed of a peer that announced nothing: 16 datagrams of any size.
    pub const STANDARD: Self =
        Self { bytes: STANDARD_DATAGRAMS * 8704, datagrams: STANDARD_DATAGRAMS };

    /// Upper bound of the cost of one datagram of `len` bytes (BTH to ICRC) to its receiver: the
    /// memory that Linux accounts to a socket for it. Measured on Linux 6.18.
    #[must_use]
    #[inline]
    pub const fn cost(len: u32) -> u32 {
        // An skb and a slab bucket, measured per size: `RxBudget::cost` of the netdev crate, which
        // this crate does not know. The device in software compares the two (`soft/src/device.rs`).
        match len {
            0..=160 => 832,
            161..=608 => 256 + 1024,
            609..=1632 => 256 + 2048,
            1633..=3680 => 256 + 4096,
            3681..=7776 => 256 + 8192,
            _ => len.saturating_mul(2).saturating_add(2048),
        }
    }

    /// A part of it, rounded down; or a multiple, which saturates.
    #[must_use]
    pub const fn part(self, numerator: u32, denominator: u32) -> Self {
        const fn scale(value: u32, numerator: u32, denominator: u32) -> u32 {
            let scaled = value as u64 * numerator as u64 / denominator as u64;
            if scaled > u32::MAX as u64 { u32::MAX } else { scaled as u32 }
        }
        Self {
            bytes: scale(self.bytes, numerator, denominator),
            datagrams: scale(self.datagrams, numerator, denominator),
        }
    }
}

/// A sum of costs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Cost {
    pub(crate) bytes: u64,
    pub(crate) datagrams: u32,
}

impl Cost {
    #[inline]
    pub(crate) const fn of(packets: u32, each: u32) -> Self {
        Self { bytes: packets as u64 * each as u64, datagrams: packets }
    }

    #[inline]
    pub(crate) fn add(&mut self, other: Self) {
        self.bytes += other.bytes;
        self.datagrams += other.datagrams;
    }

    #[inline]
    pub(crate) fn take(&mut self, other: Self) {
        debug_assert!(self.bytes >= other.bytes && self.datagrams >= other.datagrams);
        self.bytes = self.bytes.saturating_sub(other.bytes);
        self.datagrams = self.datagrams.saturating_sub(other.datagrams);
    }
}
