//! The answering messages, and those that end a connection.

use core::fmt;

use super::super::mad::{put_u24, u16_at, u24_at, u32_at};
use super::field::{CommId, Data, put};
use crate::types::Qpn;

fn ids(b: &Data) -> (CommId, CommId) {
    (CommId(u32_at(b, 0)), CommId(u32_at(b, 4)))
}

fn put_ids(b: &mut Data, local: CommId, remote: CommId) {
    b[0..4].copy_from_slice(&local.0.to_be_bytes());
    b[4..8].copy_from_slice(&remote.0.to_be_bytes());
}

/// The subject of an MRA or a REJ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Subject {
    /// A REQ, 0.
    Req,
    /// A REP, 1.
    Rep,
    /// A LAP in an MRA, another message in a REJ, 2.
    Other,
    /// The fourth value, which has no meaning.
    Reserved,
}

impl Subject {
    const ALL: [Self; 4] = [Self::Req, Self::Rep, Self::Other, Self::Reserved];
}

/// Message receipt acknowledgement: the answer will take its time (attribute 0x11).
///
/// ```text
///  0..4     local communication id
///  4..8     remote communication id
///  8        message MRAed(2) reserved(6)
///  9        service timeout(5) reserved(3)
/// 10..232   private data
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mra<'a> {
    /// The sender's communication id.
    pub local: CommId,
    /// The receiver's.
    pub remote: CommId,
    /// The message received.
    pub subject: Subject,
    /// How long the answer may take: 4.096 µs · 2^code.
    pub service_timeout: u8,
    /// Private data.
    pub private: &'a [u8],
}

impl<'a> Mra<'a> {
    /// Bytes of private data.
    pub const PRIVATE_LEN: usize = 222;

    pub(super) fn read(b: &'a Data) -> Self {
        let (local, remote) = ids(b);
        let subject = Subject::ALL[usize::from(b[8] >> 6)];
        Self { local, remote, subject, service_timeout: b[9] >> 3, private: &b[10..] }
    }

    pub(super) fn write(&self, b: &mut Data) {
        put_ids(b, self.local, self.remote);
        b[8] = (self.subject as u8) << 6;
        b[9] = self.service_timeout << 3;
        put(&mut b[10..], self.private);
    }
}

/// Why a connection is rejected (`enum ib_cm_rej_reason`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RejReason(pub u16);

impl RejReason {
    /// No queue pair.
    pub const NO_QP: Self = Self(1);
    /// No resources.
    pub const NO_RESOURCES: Self = Self(3);
    /// No answer in time.
    pub const TIMEOUT: Self = Self(4);
    /// Something in the request is not supported.
    pub const UNSUPPORTED: Self = Self(5);
    /// No such communication id.
    pub const INVALID_COMM_ID: Self = Self(6);
    /// The message does not fit the state of the connection.
    pub const INVALID_COMM_INSTANCE: Self = Self(7);
    /// No listener.
    pub const INVALID_SERVICE_ID: Self = Self(8);
    /// The transport service is not supported.
    pub const INVALID_TRANSPORT_TYPE: Self = Self(9);
    /// The queue pair is connected already, as far as the sender knows.
    pub const STALE_CONNECTION: Self = Self(10);
    /// The GID is not of this port.
    pub const INVALID_GID: Self = Self(12);
    /// The path MTU is invalid or too large.
    pub const INVALID_MTU: Self = Self(26);
    /// More READs and atomics than can be served.
    pub const INSUFFICIENT_RESPONDER_RESOURCES: Self = Self(27);
    /// The program does not want it; private data may say why.
    pub const CONSUMER: Self = Self(28);

    const NAMES: [(u16, &'static str); 33] = [
        (1, "no queue pair is left"),
        (2, "no end-to-end context is left"),
        (3, "no resources are left"),
        (4, "timed out"),
        (5, "unsupported request"),
        (6, "unknown communication id"),
        (7, "the message does not fit the state of the connection"),
        (8, "nobody listens there"),
        (9, "the transport service is not supported"),
        (10, "the queue pair is still connected"),
        (11, "no such reliable datagram channel"),
        (12, "the GID is not of that port"),
        (13, "the LID is not of that port"),
        (14, "invalid service level"),
        (15, "invalid traffic class"),
        (16, "invalid hop limit"),
        (17, "invalid packet rate"),
        (18, "the alternate GID is not of that port"),
        (19, "the alternate LID is not of that port"),
        (20, "invalid alternate service level"),
        (21, "invalid alternate traffic class"),
        (22, "invalid alternate hop limit"),
        (23, "invalid alternate packet rate"),
        (24, "another port and communication manager are responsible"),
        (25, "another port is responsible"),
        (26, "invalid path MTU"),
        (27, "too many READs and atomics at a time"),
        (28, "the program refuses"),
        (29, "invalid RNR retry count"),
        (30, "the communication id is in use"),
        (31, "invalid class version"),
        (32, "invalid flow label"),
        (33, "invalid alternate flow label"),
    ];
}

impl fmt::Display for RejReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = Self::NAMES.iter().find(|(code, _)| *code == self.0);
        match known {
            Some((code, name)) => write!(f, "{name} (reason {code})"),
            None => write!(f, "reason {}", self.0),
        }
    }
}

/// Rejects a connection (attribute 0x12).
///
/// ```text
///  0..4     local communication id                0 if the sender has none
///  4..8     remote communication id
///  8        message rejected(2) reserved(6)
///  9        length of additional information(7) reserved(1)
/// 10..12    reason
/// 12..84    additional information
/// 84..232   private data
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rej<'a> {
    /// The sender's communication id.
    pub local: CommId,
    /// The receiver's.
    pub remote: CommId,
    /// The message rejected.
    pub subject: Subject,
    /// The reason.
    pub reason: RejReason,
    /// Depends on the reason; 72 bytes at most.
    pub info: &'a [u8],
    /// Private data.
    pub private: &'a [u8],
}

impl<'a> Rej<'a> {
    /// Most bytes of additional information.
    pub const INFO_LEN: usize = 72;
    /// Bytes of private data.
    pub const PRIVATE_LEN: usize = 148;

    pub(super) fn read(b: &'a Data) -> Self {
        let (local, remote) = ids(b);
        let len = usize::from(b[9] >> 1).min(Self::INFO_LEN);
        Self {
            local,
            remote,
            subject: Subject::ALL[usize::from(b[8] >> 6)],
            reason: RejReason(u16_at(b, 10)),
            info: &b[12..12 + len],
            private: &b[84..],
        }
    }

    pub(super) fn write(&self, b: &mut Data) {
        put_ids(b, self.local, self.remote);
        b[8] = (self.subject as u8) << 6;
        let len = self.info.len().min(Self::INFO_LEN);
        let len_byte = (len as u8) << 1;
        b[9] = len_byte;
        b[10..12].copy_from_slice(&self.reason.0.to_be_bytes());
        put(&mut b[12..84], self.info);
        put(&mut b[84..], self.private);
    }
}

/// A message of two communication ids and private data.
macro_rules! plain {
    ($(#[$meta:meta])* $name:ident) => {
        $(#[$meta])*
        ///
        /// ```text
        ///  0..4     local communication id
        ///  4..8     remote communication id
        ///  8..232   private data
        /// ```
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub struct $name<'a> {
            /// The sender's communication id.
            pub local: CommId,
            /// The receiver's.
            pub remote: CommId,
            /// Private data.
            pub private: &'a [u8],
        }

        impl<'a> $name<'a> {
            /// Bytes of private data.
            pub const PRIVATE_LEN: usize = 224;

            pub(super) fn read(b: &'a Data) -> Self {
                let (local, remote) = ids(b);
                Self { local, remote, private: &b[8..] }
            }

            pub(super) fn write(&self, b: &mut Data) {
                put_ids(b, self.local, self.remote);
                put(&mut b[8..], self.private);
            }
        }
    };
}

plain! {
    /// The connection is ready to use (attribute 0x14).
    Rtu
}

plain! {
    /// The connection has ended (attribute 0x16).
    Drep
}

/// Ends a connection (attribute 0x15).
///
/// ```text
///  0..4     local communication id
///  4..8     remote communication id
///  8..11    remote QPN                            the receiver's
/// 12..232   private data
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dreq<'a> {
    /// The sender's communication id.
    pub local: CommId,
    /// The receiver's.
    pub remote: CommId,
    /// The receiver's queue pair.
    pub remote_qpn: Qpn,
    /// Private data.
    pub private: &'a [u8],
}

impl<'a> Dreq<'a> {
    /// Bytes of private data.
    pub const PRIVATE_LEN: usize = 220;

    pub(super) fn read(b: &'a Data) -> Self {
        let (local, remote) = ids(b);
        Self { local, remote, remote_qpn: Qpn::new(u24_at(b, 8)), private: &b[12..] }
    }

    pub(super) fn write(&self, b: &mut Data) {
        put_ids(b, self.local, self.remote);
        put_u24(b, 8, self.remote_qpn.value());
        put(&mut b[12..], self.private);
    }
}

/// Asks for an alternate path (attribute 0x19). The path itself is not read, because path migration
/// is not supported.
///
/// ```text
///  0..4     local communication id
///  4..8     remote communication id
/// 12..15    remote QPN                            the receiver's
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lap {
    /// The sender's communication id.
    pub local: CommId,
    /// The receiver's.
    pub remote: CommId,
    /// The receiver's queue pair.
    pub remote_qpn: Qpn,
}

impl Lap {
    pub(super) fn read(b: &Data) -> Self {
        let (local, remote) = ids(b);
        Self { local, remote, remote_qpn: Qpn::new(u24_at(b, 12)) }
    }

    pub(super) fn write(&self, b: &mut Data) {
        put_ids(b, self.local, self.remote);
        put_u24(b, 12, self.remote_qpn.value());
    }
}

/// Result of a request for an alternate path (attribute 0x1A).
///
/// ```text
///  0..4     local communication id
///  4..8     remote communication id
///  8        length of additional information      not read
///  9        status
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Apr {
    /// The sender's communication id.
    pub local: CommId,
    /// The receiver's.
    pub remote: CommId,
    /// Result (`enum ib_cm_apr_status`).
    pub status: u8,
}

impl Apr {
    /// There is no connection with these ids.
    pub const INVALID_COMM_ID: u8 = 1;
    /// Path migration is not supported.
    pub const UNSUPPORTED: u8 = 2;

    pub(super) fn read(b: &Data) -> Self {
        let (local, remote) = ids(b);
        Self { local, remote, status: b[9] }
    }

    pub(super) fn write(&self, b: &mut Data) {
        put_ids(b, self.local, self.remote);
        b[9] = self.status;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_have_names() {
        assert_eq!(RejReason::INVALID_SERVICE_ID.to_string(), "nobody listens there (reason 8)");
        assert_eq!(RejReason(34).to_string(), "reason 34");
    }
}
