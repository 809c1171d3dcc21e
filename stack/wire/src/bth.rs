//! The base transport header (IBTA volume 1, 9.2 \[M\]; `struct rxe_bth`).

use super::opcode::{BTH_LEN, Opcode};
use crate::types::{Pkey, Psn, Qpn};

/// Length of a BTH in bytes.
pub const LEN: usize = BTH_LEN;

/// A base transport header, as a value.
///
/// ```text
///  0        opcode
///  1        SE(1) MigReq(1) PadCnt(2) TVer(4)
///  2..4     P_Key
///  4        FECN(1) BECN(1) reserved(6)      resv8a: all ones for the ICRC
///  5..8     destination QPN
///  8        AckReq(1) reserved(7)
///  9..12    PSN
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Bth {
    /// The opcode.
    pub opcode: Opcode,
    /// Solicited event: the responder shall raise an event on completion.
    pub solicited: bool,
    /// Migration request; hardware sends 1, rxe 0. It has no meaning without path migration.
    pub mig_req: bool,
    /// Bytes of padding after the payload, 0 to 3.
    pub pad: u8,
    /// Transport header version; only 0 exists.
    pub version: u8,
    /// Partition key.
    pub pkey: Pkey,
    /// Forward explicit congestion notification.
    pub fecn: bool,
    /// Backward explicit congestion notification; set in a CNP.
    pub becn: bool,
    /// The six reserved bits of byte 4.
    pub reserved_a: u8,
    /// Destination queue pair.
    pub dest_qpn: Qpn,
    /// The requester asks for an acknowledgement.
    pub ack_req: bool,
    /// The seven reserved bits of byte 8.
    pub reserved_b: u8,
    /// Packet sequence number.
    pub psn: Psn,
}

impl Bth {
    /// The header that this stack sends: MigReq 1 as hardware does, everything else clear.
    #[must_use]
    #[inline]
    pub const fn new(opcode: Opcode, pkey: Pkey, dest_qpn: Qpn, psn: Psn) -> Self {
        Self {
            opcode,
            solicited: false,
            mig_req: true,
            pad: 0,
            version: 0,
            pkey,
            fecn: false,
            becn: false,
            reserved_a: 0,
            dest_qpn,
            ack_req: false,
            reserved_b: 0,
            psn,
        }
    }

    /// Reads a header; any 12 bytes form one.
    #[must_use]
    #[inline(always)]
    pub const fn read(b: &[u8; LEN]) -> Self {
        // Whole words: of single bytes the compiler would read only those that the types keep.
        let (words, halves) = (b.as_chunks::<4>().0, b.as_chunks::<2>().0);
        Self {
            opcode: Opcode(b[0]),
            solicited: b[1] & 0x80 != 0,
            mig_req: b[1] & 0x40 != 0,
            pad: (b[1] >> 4) & 3,
            version: b[1] & 0x0f,
            pkey: Pkey(u16::from_be_bytes(halves[1])),
            fecn: b[4] & 0x80 != 0,
            becn: b[4] & 0x40 != 0,
            reserved_a: b[4] & 0x3f,
            dest_qpn: Qpn::new(u32::from_be_bytes(words[1])),
            ack_req: b[8] & 0x80 != 0,
            reserved_b: b[8] & 0x7f,
            psn: Psn::new(u32::from_be_bytes(words[2])),
        }
    }

    /// The header's bytes.
    #[inline]
    #[must_use]
    pub const fn bytes(&self) -> [u8; LEN] {
        let flags = (self.solicited as u8) << 7
            | (self.mig_req as u8) << 6
            | (self.pad & 3) << 4
            | (self.version & 0x0f);
        let marks = (self.fecn as u8) << 7 | (self.becn as u8) << 6 | (self.reserved_a & 0x3f);
        let asks = (self.ack_req as u8) << 7 | (self.reserved_b & 0x7f);
        // Three words, so that they become three stores.
        let [a, b, c, d] =
            ((self.opcode.0 as u32) << 24 | (flags as u32) << 16 | self.pkey.0 as u32)
                .to_be_bytes();
        let [e, f, g, h] = ((marks as u32) << 24 | self.dest_qpn.value()).to_be_bytes();
        let [i, j, k, l] = ((asks as u32) << 24 | self.psn.value()).to_be_bytes();
        [a, b, c, d, e, f, g, h, i, j, k, l]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bit_survives_a_round_trip() {
        // Flips each bit of two backgrounds: the bytes read are written again unchanged.
        for background in [0u8, 0xff] {
            for bit in 0..LEN * 8 {
                let mut bytes = [background; LEN];
                bytes[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(Bth::read(&bytes).bytes(), bytes);
            }
        }
    }
}
