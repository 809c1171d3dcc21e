//! A whole RoCEv2 packet: BTH, extension headers, payload, padding, ICRC.

use core::fmt;

use super::bth::{self, Bth};
use super::ext::{Aeth, AtomicEth, Deth, Feth, Reth};
use super::icrc::ICRC_LEN;
use super::opcode::{Ext, Opcode, OpcodeInfo};
use crate::types::Key;

/// Why bytes are not a RoCEv2 packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WireError {
    /// Shorter than its headers and ICRC.
    Truncated,
    /// An opcode that the table does not have.
    UnknownOpcode(u8),
    /// More padding than payload.
    Padding,
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Truncated => f.write_str("shorter than its headers"),
            Self::UnknownOpcode(opcode) => write!(f, "unknown opcode 0x{opcode:02x}"),
            Self::Padding => f.write_str("more padding than payload"),
        }
    }
}

impl core::error::Error for WireError {}

/// A view of the bytes from the BTH to the ICRC. Once parsed, no accessor panics.
///
/// Parsing checks structure only. Other code decides whether a queue pair accepts the packet
/// (version, keys, lengths, order, ICRC).
#[derive(Debug, Clone, Copy)]
pub struct Packet<'a> {
    header: &'a [u8; bth::LEN],
    /// The opcode's entry in the table.
    pub info: &'static OpcodeInfo,
    bytes: &'a [u8],
    payload: &'a [u8],
}

impl<'a> Packet<'a> {
    /// Parses a UDP payload.
    ///
    /// # Errors
    /// [`WireError`], if the bytes cannot be such a packet.
    #[inline]
    pub fn parse(bytes: &'a [u8]) -> Result<Self, WireError> {
        let Some(header) = bytes.first_chunk::<{ bth::LEN }>() else {
            return Err(WireError::Truncated);
        };
        let opcode = Opcode(header[0]);
        let Some(info) = opcode.info() else {
            return Err(WireError::UnknownOpcode(opcode.0));
        };
        let Some(end) = bytes.len().checked_sub(ICRC_LEN).filter(|end| *end >= info.header_len)
        else {
            return Err(WireError::Truncated);
        };
        let end = end - usize::from(Bth::read(header).pad);
        let Some(payload) = bytes.get(info.header_len..end) else {
            return Err(WireError::Padding);
        };
        Ok(Self { header, info, bytes, payload })
    }

    /// The base transport header.
    #[inline]
    #[must_use]
    pub const fn bth(&self) -> Bth {
        Bth::read(self.header)
    }

    /// All bytes, from the BTH to the ICRC.
    #[inline]
    #[must_use]
    pub const fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The payload, without padding.
    #[inline]
    #[must_use]
    pub const fn payload(&self) -> &'a [u8] {
        self.payload
    }

    /// The padding, 0 to 3 bytes of any value.
    #[inline]
    #[must_use]
    pub fn padding(&self) -> &'a [u8] {
        let end = self.bytes.len() - ICRC_LEN;
        &self.bytes[end - usize::from(self.bth().pad)..end]
    }

    /// The ICRC in the packet (little-endian on the wire).
    #[inline]
    #[must_use]
    pub fn icrc(&self) -> u32 {
        let at = self.bytes.len() - ICRC_LEN;
        u32::from_le_bytes([
            self.bytes[at],
            self.bytes[at + 1],
            self.bytes[at + 2],
            self.bytes[at + 3],
        ])
    }

    /// The RETH, if the opcode has one.
    #[inline]
    #[must_use]
    pub fn reth(&self) -> Option<Reth> {
        self.ext(Ext::Reth).map(Reth::read)
    }

    /// The AETH, if the opcode has one.
    #[inline]
    #[must_use]
    pub fn aeth(&self) -> Option<Aeth> {
        self.ext(Ext::Aeth).map(Aeth::read)
    }

    /// The AtomicETH, if the opcode has one.
    #[inline]
    #[must_use]
    pub fn atomic_eth(&self) -> Option<AtomicEth> {
        self.ext(Ext::AtomicEth).map(AtomicEth::read)
    }

    /// The original value of an atomic acknowledge, if the opcode has one.
    #[inline]
    #[must_use]
    pub fn atomic_ack(&self) -> Option<u64> {
        let b = self.ext(Ext::AtomicAckEth)?;
        Some(u64::from_be_bytes(*b.first_chunk()?))
    }

    /// The DETH, if the opcode has one.
    #[inline]
    #[must_use]
    pub fn deth(&self) -> Option<Deth> {
        self.ext(Ext::Deth).map(Deth::read)
    }

    /// The immediate data, in network byte order as the application gave it, if the opcode has any.
    #[inline]
    #[must_use]
    pub fn immediate(&self) -> Option<[u8; 4]> {
        self.ext(Ext::ImmDt)?.first_chunk().copied()
    }

    /// The key to invalidate, if the opcode has one.
    #[inline]
    #[must_use]
    pub fn invalidate(&self) -> Option<Key> {
        Some(Key(u32::from_be_bytes(*self.ext(Ext::Ieth)?.first_chunk()?)))
    }

    /// The flush header, if the opcode has one.
    #[inline]
    #[must_use]
    pub fn feth(&self) -> Option<Feth> {
        self.ext(Ext::Feth).map(Feth::read)
    }

    /// Parses to values and writes them again into `out`; returns the number of bytes written. The
    /// ICRC is copied, not computed. For checks that parsing loses nothing.
    ///
    /// # Panics
    /// If `out` is shorter than the packet.
    pub fn emit(&self, out: &mut [u8]) -> usize {
        out[..bth::LEN].copy_from_slice(&self.bth().bytes());
        let mut at = bth::LEN;
        for ext in self.info.extensions {
            let out = &mut out[at..at + ext.size()];
            match ext {
                Ext::Deth => self.deth().expect("in the table").write(out),
                Ext::Reth => self.reth().expect("in the table").write(out),
                Ext::AtomicEth => self.atomic_eth().expect("in the table").write(out),
                Ext::Aeth => self.aeth().expect("in the table").write(out),
                Ext::AtomicAckEth => {
                    out.copy_from_slice(&self.atomic_ack().expect("in the table").to_be_bytes());
                }
                Ext::ImmDt => out.copy_from_slice(&self.immediate().expect("in the table")),
                Ext::Ieth => {
                    out.copy_from_slice(&self.invalidate().expect("in the table").0.to_be_bytes());
                }
                Ext::Feth => self.feth().expect("in the table").write(out),
            }
            at += ext.size();
        }
        for part in [self.payload(), self.padding(), &self.icrc().to_le_bytes()] {
            out[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
        at
    }

    #[inline(always)]
    fn ext(&self, ext: Ext) -> Option<&'a [u8]> {
        let at = self.info.offset(ext)?;
        self.bytes.get(at..at + ext.size())
    }
}
