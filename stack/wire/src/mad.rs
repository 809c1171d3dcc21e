//! Management datagrams (IBTA volume 1, 13.4.3 \[M\]; `struct ib_mad_hdr` of Linux,
//! `include/rdma/ib_mad.h`).

use core::fmt;

use super::bth::{self, Bth};
use super::ext::Deth;
use super::icrc::ICRC_LEN;
use super::opcode::Opcode;
use crate::types::{Pkey, Psn, Qpn};

/// Length of a management datagram in bytes; QP1 takes no other length.
pub const MAD_LEN: usize = 256;
/// Length of the common header of management datagrams.
pub const MAD_HEADER_LEN: usize = 24;
/// Length of the data after the header.
pub const MAD_DATA_LEN: usize = MAD_LEN - MAD_HEADER_LEN;

/// The queue key of QP1 (`IB_QP1_QKEY`; seen in captures of rxe).
pub const GSI_QKEY: u32 = 0x8001_0000;

/// A whole management datagram.
pub type MadBytes = [u8; MAD_LEN];

/// Length of the packet that carries a management datagram, BTH to ICRC.
pub const GSI_PACKET_LEN: usize = bth::LEN + Deth::LEN + MAD_LEN + ICRC_LEN;

/// Writes the packet that carries a management datagram from QP1 to QP1: a UD SEND in the default
/// partition. It leaves out the ICRC, the last four bytes: only the sink knows the headers around
/// the packet.
///
/// # Panics
/// If `out` is shorter than [`GSI_PACKET_LEN`].
pub fn write_gsi(out: &mut [u8], psn: Psn, mad: &MadBytes) {
    let bth = Bth::new(Opcode::UD_SEND_ONLY, Pkey::DEFAULT, Qpn::GSI, psn);
    out[..bth::LEN].copy_from_slice(&bth.bytes());
    let deth = Deth { qkey: GSI_QKEY, reserved: 0, src_qpn: Qpn::GSI };
    deth.write(&mut out[bth::LEN..]);
    out[bth::LEN + Deth::LEN..GSI_PACKET_LEN - ICRC_LEN].copy_from_slice(mad);
}

/// The header of a management datagram, as a value. All integers are big-endian.
///
/// ```text
///  0        base version       1
///  1        management class   7: communication management
///  2        class version      2
///  3        R(1) method(7)     3: Send
///  4..6     status
///  6..8     class specific
///  8..16    transaction id
/// 16..18    attribute id
/// 18..20    reserved
/// 20..24    attribute modifier
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MadHeader {
    /// Version of this header; only 1 exists.
    pub base_version: u8,
    /// Management class.
    pub class: u8,
    /// Version of the class.
    pub class_version: u8,
    /// The method; the top bit marks a response.
    pub method: u8,
    /// Status; 0 in requests.
    pub status: u16,
    /// Has a meaning in some classes only.
    pub class_specific: u16,
    /// Transaction id: the same in a request and its answers.
    pub tid: u64,
    /// Attribute id: the kind of message.
    pub attribute: u16,
    /// Two reserved bytes.
    pub reserved: u16,
    /// A parameter of the attribute.
    pub modifier: u32,
}

/// Why bytes are not a management datagram of the expected class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MadError {
    /// Not 256 bytes.
    Length(usize),
    /// A base version other than 1.
    BaseVersion(u8),
    /// Another management class than communication management.
    Class(u8),
    /// A version of that class other than 2.
    ClassVersion(u8),
    /// A method other than Send.
    Method(u8),
    /// The attribute is not a message of the communication manager.
    Attribute(u16),
}

impl fmt::Display for MadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length(len) => write!(f, "{len} bytes, not {MAD_LEN}"),
            Self::BaseVersion(version) => write!(f, "base version {version}, not 1"),
            Self::Class(class) => write!(f, "management class 0x{class:02x}, not 0x07"),
            Self::ClassVersion(version) => write!(f, "class version {version}, not 2"),
            Self::Method(method) => write!(f, "method 0x{method:02x}, not Send"),
            Self::Attribute(id) => write!(f, "no message has the attribute 0x{id:04x}"),
        }
    }
}

impl core::error::Error for MadError {}

impl MadHeader {
    /// The management class of the communication manager (`IB_MGMT_CLASS_CM`).
    pub const CLASS_CM: u8 = 0x07;
    /// The version of that class (`IB_CM_CLASS_VERSION`).
    pub const CM_CLASS_VERSION: u8 = 2;
    /// The method that all messages of that class use (`IB_MGMT_METHOD_SEND`).
    pub const METHOD_SEND: u8 = 3;

    /// The header of a message of the communication manager.
    #[must_use]
    pub const fn cm(attribute: u16, tid: u64) -> Self {
        Self {
            base_version: 1,
            class: Self::CLASS_CM,
            class_version: Self::CM_CLASS_VERSION,
            method: Self::METHOD_SEND,
            status: 0,
            class_specific: 0,
            tid,
            attribute,
            reserved: 0,
            modifier: 0,
        }
    }

    /// Reads a header; any bytes form one.
    #[must_use]
    pub fn read(b: &[u8; MAD_HEADER_LEN]) -> Self {
        Self {
            base_version: b[0],
            class: b[1],
            class_version: b[2],
            method: b[3],
            status: u16_at(b, 4),
            class_specific: u16_at(b, 6),
            tid: u64_at(b, 8),
            attribute: u16_at(b, 16),
            reserved: u16_at(b, 18),
            modifier: u32_at(b, 20),
        }
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> [u8; MAD_HEADER_LEN] {
        let mut b = [0; MAD_HEADER_LEN];
        b[0..4].copy_from_slice(&[self.base_version, self.class, self.class_version, self.method]);
        b[4..6].copy_from_slice(&self.status.to_be_bytes());
        b[6..8].copy_from_slice(&self.class_specific.to_be_bytes());
        b[8..16].copy_from_slice(&self.tid.to_be_bytes());
        b[16..18].copy_from_slice(&self.attribute.to_be_bytes());
        b[18..20].copy_from_slice(&self.reserved.to_be_bytes());
        b[20..24].copy_from_slice(&self.modifier.to_be_bytes());
        b
    }

    /// Checks that it is a header of the communication manager.
    ///
    /// # Errors
    /// [`MadError`] says which field is wrong.
    pub const fn check_cm(&self) -> Result<(), MadError> {
        match self {
            Self { base_version, .. } if *base_version != 1 => {
                Err(MadError::BaseVersion(*base_version))
            }
            Self { class, .. } if *class != Self::CLASS_CM => Err(MadError::Class(*class)),
            Self { class_version, .. } if *class_version != Self::CM_CLASS_VERSION => {
                Err(MadError::ClassVersion(*class_version))
            }
            Self { method, .. } if *method != Self::METHOD_SEND => Err(MadError::Method(*method)),
            _ => Ok(()),
        }
    }
}

// Callers pass slices of fixed length, and offsets within them.

#[inline]
pub(super) fn u16_at(b: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([b[at], b[at + 1]])
}

#[inline]
pub(super) fn u24_at(b: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([0, b[at], b[at + 1], b[at + 2]])
}

#[inline]
pub(super) fn u32_at(b: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

#[inline]
pub(super) fn u64_at(b: &[u8], at: usize) -> u64 {
    (u64::from(u32_at(b, at)) << 32) | u64::from(u32_at(b, at + 4))
}

#[inline]
pub(super) fn put_u24(b: &mut [u8], at: usize, value: u32) {
    b[at..at + 3].copy_from_slice(&value.to_be_bytes()[1..]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_survives_its_bytes() {
        let bytes: [u8; MAD_HEADER_LEN] =
            core::array::from_fn(|i| (i as u8).wrapping_mul(11).wrapping_add(3));
        assert_eq!(MadHeader::read(&bytes).bytes(), bytes);
    }

    #[test]
    fn only_the_class_of_the_communication_manager_passes() {
        let good = MadHeader::cm(0x10, 7);
        assert_eq!(good.check_cm(), Ok(()));
        let bad = [
            (MadHeader { base_version: 2, ..good }, MadError::BaseVersion(2)),
            (MadHeader { class: 3, ..good }, MadError::Class(3)),
            (MadHeader { class_version: 1, ..good }, MadError::ClassVersion(1)),
            (MadHeader { method: 0x83, ..good }, MadError::Method(0x83)),
        ];
        for (header, error) in bad {
            assert_eq!(header.check_cm(), Err(error));
        }
    }
}
