//! The extension headers (IBTA volume 1, 9.2 and 9.3 \[M\]; `rxe_hdr.h`). All integers are
//! big-endian.

use super::opcode::Ext;
use crate::types::{Key, Qpn};

#[inline]
fn u32_at<const N: usize>(b: &[u8; N], at: usize) -> u32 {
    u32::from_be_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

#[inline]
fn u64_at<const N: usize>(b: &[u8; N], at: usize) -> u64 {
    (u64::from(u32_at(b, at)) << 32) | u64::from(u32_at(b, at + 4))
}

/// The first `N` bytes.
#[inline]
fn head<const N: usize>(b: &[u8]) -> &[u8; N] {
    b.first_chunk().expect("a whole header")
}

/// RDMA extended transport header: the memory that a WRITE or READ addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Reth {
    /// Virtual address at the responder.
    pub va: u64,
    /// Remote key.
    pub rkey: Key,
    /// Length of the whole message in bytes.
    pub len: u32,
}

impl Reth {
    /// Length in bytes.
    pub const LEN: usize = Ext::Reth.size();

    /// Reads the first 16 bytes of `b`.
    ///
    /// # Panics
    /// If there are fewer; packets checked by [`Packet::parse`](super::Packet::parse) have them.
    #[must_use]
    #[inline]
    pub fn read(b: &[u8]) -> Self {
        let b: &[u8; Self::LEN] = head(b);
        Self { va: u64_at(b, 0), rkey: Key(u32_at(b, 8)), len: u32_at(b, 12) }
    }

    /// Writes the first 16 bytes of `out`.
    ///
    /// # Panics
    /// If there are fewer.
    #[inline]
    pub fn write(&self, out: &mut [u8]) {
        let out: &mut [u8; Self::LEN] = out.first_chunk_mut().expect("room for a header");
        out[0..8].copy_from_slice(&self.va.to_be_bytes());
        out[8..12].copy_from_slice(&self.rkey.0.to_be_bytes());
        out[12..16].copy_from_slice(&self.len.to_be_bytes());
    }
}

/// Flush extended transport header: four bits of placement type, two of selectivity level, and 26
/// reserved bits above.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Feth(pub u32);

impl Feth {
    /// Length in bytes.
    pub const LEN: usize = Ext::Feth.size();

    /// From the two fields; higher bits of the arguments are dropped.
    #[must_use]
    #[inline]
    pub const fn new(placement: u8, level: u8) -> Self {
        Self((level as u32 & 3) << 4 | placement as u32 & 0xf)
    }

    /// Placement type: 1 global visibility, 2 persistence, 3 both.
    #[inline]
    #[must_use]
    pub const fn placement(self) -> u8 {
        (self.0 & 0xf) as u8
    }

    /// Selectivity level: 0 the range of the RETH, 1 the whole region.
    #[inline]
    #[must_use]
    pub const fn level(self) -> u8 {
        (self.0 >> 4 & 3) as u8
    }

    /// Reads the first 4 bytes of `b`.
    ///
    /// # Panics
    /// If there are fewer.
    #[must_use]
    #[inline]
    pub fn read(b: &[u8]) -> Self {
        Self(u32_at(head::<{ Self::LEN }>(b), 0))
    }

    /// Writes the first 4 bytes of `out`.
    ///
    /// # Panics
    /// If there are fewer.
    #[inline]
    pub fn write(self, out: &mut [u8]) {
        let out: &mut [u8; Self::LEN] = out.first_chunk_mut().expect("room for a header");
        *out = self.0.to_be_bytes();
    }
}

/// Atomic extended transport header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AtomicEth {
    /// Virtual address at the responder, a multiple of 8.
    pub va: u64,
    /// Remote key.
    pub rkey: Key,
    /// The value to swap in, or to add.
    pub swap_add: u64,
    /// The value to compare with; ignored by fetch-and-add.
    pub compare: u64,
}

impl AtomicEth {
    /// Length in bytes.
    pub const LEN: usize = Ext::AtomicEth.size();

    /// Reads the first 28 bytes of `b`.
    ///
    /// # Panics
    /// If there are fewer.
    #[must_use]
    #[inline]
    pub fn read(b: &[u8]) -> Self {
        let b: &[u8; Self::LEN] = head(b);
        Self {
            va: u64_at(b, 0),
            rkey: Key(u32_at(b, 8)),
            swap_add: u64_at(b, 12),
            compare: u64_at(b, 20),
        }
    }

    /// Writes the first 28 bytes of `out`.
    ///
    /// # Panics
    /// If there are fewer.
    #[inline]
    pub fn write(&self, out: &mut [u8]) {
        let out: &mut [u8; Self::LEN] = out.first_chunk_mut().expect("room for a header");
        out[0..8].copy_from_slice(&self.va.to_be_bytes());
        out[8..12].copy_from_slice(&self.rkey.0.to_be_bytes());
        out[12..20].copy_from_slice(&self.swap_add.to_be_bytes());
        out[20..28].copy_from_slice(&self.compare.to_be_bytes());
    }
}

/// Datagram extended transport header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Deth {
    /// Queue key.
    pub qkey: u32,
    /// A reserved byte.
    pub reserved: u8,
    /// The sender's queue pair.
    pub src_qpn: Qpn,
}

impl Deth {
    /// Length in bytes.
    pub const LEN: usize = Ext::Deth.size();

    /// Reads the first 8 bytes of `b`.
    ///
    /// # Panics
    /// If there are fewer.
    #[must_use]
    #[inline]
    pub fn read(b: &[u8]) -> Self {
        let b: &[u8; Self::LEN] = head(b);
        Self { qkey: u32_at(b, 0), reserved: b[4], src_qpn: Qpn::new(u32_at(b, 4)) }
    }

    /// Writes the first 8 bytes of `out`.
    ///
    /// # Panics
    /// If there are fewer.
    #[inline]
    pub fn write(&self, out: &mut [u8]) {
        let out: &mut [u8; Self::LEN] = out.first_chunk_mut().expect("room for a header");
        out[0..4].copy_from_slice(&self.qkey.to_be_bytes());
        out[4..8].copy_from_slice(&self.src_qpn.value().to_be_bytes());
        out[4] = self.reserved;
    }
}

/// Acknowledge extended transport header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Aeth {
    /// ACK, RNR NAK or NAK, with its value.
    pub syndrome: Syndrome,
    /// Message sequence number: the number of messages that the responder has completed (24 bits).
    pub msn: u32,
}

impl Aeth {
    /// Length in bytes.
    pub const LEN: usize = Ext::Aeth.size();

    /// An ACK without a credit limit.
    #[must_use]
    #[inline]
    pub const fn ack(msn: u32) -> Self {
        Self { syndrome: Syndrome::ACK_UNLIMITED, msn }
    }

    /// Reads the first 4 bytes of `b`.
    ///
    /// # Panics
    /// If there are fewer.
    #[must_use]
    #[inline]
    pub fn read(b: &[u8]) -> Self {
        let b: &[u8; Self::LEN] = head(b);
        Self { syndrome: Syndrome(b[0]), msn: u32_at(b, 0) & 0xff_ffff }
    }

    /// Writes the first 4 bytes of `out`.
    ///
    /// # Panics
    /// If there are fewer.
    #[inline]
    pub fn write(&self, out: &mut [u8]) {
        let out: &mut [u8; Self::LEN] = out.first_chunk_mut().expect("room for a header");
        out[0..4].copy_from_slice(&self.msn.to_be_bytes());
        out[0] = self.syndrome.0;
    }
}

/// The syndrome byte of an AETH: a kind in the upper three bits, a value in the lower five.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Syndrome(pub u8);

/// The meaning of a [`Syndrome`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AckKind {
    /// Positive, with a credit code (see [`credits`]); 0x1f means no limit.
    Ack {
        /// The 5-bit credit code.
        credit: u8,
    },
    /// The receiver was not ready: try again after the timer (see [`rnr_timer_us`]).
    RnrNak {
        /// The 5-bit timer code.
        timer: u8,
    },
    /// Negative.
    Nak(NakCode),
    /// A reserved combination: a malformed packet.
    Reserved,
}

/// Why a responder refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NakCode {
    /// 0x60: a packet is missing before this one.
    PsnSequenceError,
    /// 0x61: the request is malformed, or the QP does not allow it.
    InvalidRequest,
    /// 0x62: the memory key, range or permission is wrong.
    RemoteAccessError,
    /// 0x63: the responder failed at its own side.
    RemoteOperationalError,
    /// 0x64: an invalid reliable-datagram request.
    InvalidRdRequest,
}

impl Syndrome {
    /// An ACK without a credit limit, as rxe and SRQs send it.
    pub const ACK_UNLIMITED: Self = Self(0x1f);

    /// An ACK that grants the largest number of receives that a code can express and that is at
    /// most `receives` (see [`credits`]).
    #[must_use]
    #[inline]
    pub fn credits(receives: u64) -> Self {
        let granted = |code: &u8| credits(*code).is_some_and(|count| u64::from(count) <= receives);
        Self((0..0x1f).rev().find(granted).unwrap_or(0))
    }

    /// An RNR NAK with a 5-bit timer code.
    #[must_use]
    #[inline]
    pub const fn rnr(timer: u8) -> Self {
        Self(0x20 | (timer & 0x1f))
    }

    /// A NAK.
    #[must_use]
    #[inline]
    pub const fn nak(code: NakCode) -> Self {
        Self(0x60 + code as u8)
    }

    /// Its meaning.
    #[inline]
    #[must_use]
    pub const fn kind(self) -> AckKind {
        let value = self.0 & 0x1f;
        match self.0 >> 5 {
            0 => AckKind::Ack { credit: value },
            1 => AckKind::RnrNak { timer: value },
            3 => match value {
                0 => AckKind::Nak(NakCode::PsnSequenceError),
                1 => AckKind::Nak(NakCode::InvalidRequest),
                2 => AckKind::Nak(NakCode::RemoteAccessError),
                3 => AckKind::Nak(NakCode::RemoteOperationalError),
                4 => AckKind::Nak(NakCode::InvalidRdRequest),
                _ => AckKind::Reserved,
            },
            _ => AckKind::Reserved,
        }
    }
}

/// The receives that a 5-bit credit code grants: 0, 1, 2, 3, 4, 6, 8, 12, 16, 24 … 32768; `None`
/// for 0x1f, no limit.
#[must_use]
pub const fn credits(code: u8) -> Option<u32> {
    match code & 0x1f {
        0x1f => None,
        few @ 0..2 => Some(few as u32),
        // From 2 on the codes alternate between 2^k and 1.5 * 2^k.
        c => Some((2 + (c as u32 & 1)) << ((c - 2) / 2)),
    }
}

/// The delay of a 5-bit RNR timer code in microseconds: 0 is 655.36 ms, 1 to 31 rise from 10 µs to
/// 491.52 ms.
#[must_use]
pub const fn rnr_timer_us(code: u8) -> u32 {
    match code & 0x1f {
        0 => 655_360,
        1 => 10,
        2 => 20,
        3 => 30,
        // Then 2^k and 1.5 * 2^k hundredths of 2 ms / 3 ms.
        c => {
            let unit = if c & 1 == 0 { 40 } else { 60 };
            unit << ((c - 4) / 2)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rnr_timers_are_the_table_of_the_specification() {
        // In hundredths of a millisecond, as tshark's value table prints them.
        let table = [
            65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768,
            1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
        ];
        for (code, hundredths) in table.into_iter().enumerate() {
            assert_eq!(rnr_timer_us(u8::try_from(code).unwrap()), hundredths * 10, "code {code}");
        }
    }

    #[test]
    fn credit_codes_alternate() {
        let expected = [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128];
        for (code, count) in expected.into_iter().enumerate() {
            assert_eq!(credits(u8::try_from(code).unwrap()), Some(count), "code {code}");
        }
        assert_eq!(credits(30), Some(32768));
        assert_eq!(credits(31), None);
        for (receives, code) in [(0, 0), (1, 1), (4, 4), (5, 4), (7, 5), (8, 6), (1 << 40, 30)] {
            assert_eq!(Syndrome::credits(receives), Syndrome(code), "{receives} receives");
        }
    }

    #[test]
    fn syndromes_map_to_meanings_and_back() {
        assert_eq!(Syndrome::nak(NakCode::RemoteAccessError), Syndrome(0x62));
        assert_eq!(Syndrome(0x2c).kind(), AckKind::RnrNak { timer: 12 });
        assert_eq!(Syndrome(0x1f).kind(), AckKind::Ack { credit: 31 });
        assert_eq!(Syndrome(0x60).kind(), AckKind::Nak(NakCode::PsnSequenceError));
        for reserved in [0x40, 0x5f, 0x65, 0x7f, 0x80, 0xff] {
            assert_eq!(Syndrome(reserved).kind(), AckKind::Reserved);
        }
    }
}
