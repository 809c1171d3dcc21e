//! Service id resolution: asks for the queue pair of a datagram service.

use core::fmt;

use super::super::mad::{put_u24, u16_at, u24_at, u32_at, u64_at};
use super::field::{Data, put};
use super::ip::ServiceId;
use crate::types::{Pkey, Qpn};

/// Asks for the queue pair of a service (attribute 0x17).
///
/// ```text
///  0..4     request id
///  4..6     P_Key
///  8..16    service id
/// 16..232   private data
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SidrReq<'a> {
    /// The sender's number of the request.
    pub request: u32,
    /// Partition key.
    pub pkey: Pkey,
    /// The service.
    pub service: ServiceId,
    /// Private data; begins with an [`IpHeader`](super::IpHeader) where the service id is one of
    /// `rdma_cm`.
    pub private: &'a [u8],
}

impl<'a> SidrReq<'a> {
    /// Bytes of private data.
    pub const PRIVATE_LEN: usize = 216;

    pub(super) fn read(b: &'a Data) -> Self {
        Self {
            request: u32_at(b, 0),
            pkey: Pkey(u16_at(b, 4)),
            service: ServiceId(u64_at(b, 8)),
            private: &b[16..],
        }
    }

    pub(super) fn write(&self, b: &mut Data) {
        b[0..4].copy_from_slice(&self.request.to_be_bytes());
        b[4..6].copy_from_slice(&self.pkey.0.to_be_bytes());
        b[8..16].copy_from_slice(&self.service.0.to_be_bytes());
        put(&mut b[16..], self.private);
    }
}

/// Result of a resolution (`enum ib_cm_sidr_status`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SidrStatus(pub u8);

impl SidrStatus {
    /// The message names the queue pair.
    pub const SUCCESS: Self = Self(0);
    /// The service does not exist here.
    pub const UNSUPPORTED: Self = Self(1);
    /// The program refuses.
    pub const REJECT: Self = Self(2);
    /// No queue pair is left.
    pub const NO_QP: Self = Self(3);
}

impl fmt::Display for SidrStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.0 {
            0 => "resolved",
            1 => "nobody serves that",
            2 => "the program refuses",
            3 => "no queue pair is left",
            4 => "another address is responsible",
            5 => "unsupported version",
            _ => "unknown",
        };
        write!(f, "{name} (status {})", self.0)
    }
}

/// The queue pair of a service (attribute 0x18).
///
/// ```text
///  0..4     request id
///  4        status
///  5        length of additional information
///  8..11    QPN
/// 12..20    service id
/// 20..24    Q_Key
/// 24..96    additional information
/// 96..232   private data
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SidrRep<'a> {
    /// The number of the request.
    pub request: u32,
    /// The result.
    pub status: SidrStatus,
    /// The queue pair.
    pub qpn: Qpn,
    /// The service.
    pub service: ServiceId,
    /// The queue key for datagrams to the queue pair.
    pub qkey: u32,
    /// Depends on the status; 72 bytes at most.
    pub info: &'a [u8],
    /// Private data.
    pub private: &'a [u8],
}

impl<'a> SidrRep<'a> {
    /// Most bytes of additional information.
    pub const INFO_LEN: usize = 72;
    /// Bytes of private data.
    pub const PRIVATE_LEN: usize = 136;

    pub(super) fn read(b: &'a Data) -> Self {
        let len = usize::from(b[5]).min(Self::INFO_LEN);
        Self {
            request: u32_at(b, 0),
            status: SidrStatus(b[4]),
            qpn: Qpn::new(u24_at(b, 8)),
            service: ServiceId(u64_at(b, 12)),
            qkey: u32_at(b, 20),
            info: &b[24..24 + len],
            private: &b[96..],
        }
    }

    pub(super) fn write(&self, b: &mut Data) {
        b[0..4].copy_from_slice(&self.request.to_be_bytes());
        b[4] = self.status.0;
        let len = self.info.len().min(Self::INFO_LEN) as u8;
        b[5] = len;
        put_u24(b, 8, self.qpn.value());
        b[12..20].copy_from_slice(&self.service.0.to_be_bytes());
        b[20..24].copy_from_slice(&self.qkey.to_be_bytes());
        put(&mut b[24..96], self.info);
        put(&mut b[96..], self.private);
    }
}
