//! REQ and REP: the parameters that two queue pairs must exchange.

use super::super::mad::{put_u24, u16_at, u24_at, u32_at, u64_at};
use super::field::{CommId, Data, put};
use super::ip::{Gid, ServiceId};
use crate::types::{Pkey, Psn, Qpn, QueueKind};

/// The transport service that a REQ asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Transport {
    /// Reliable connection, 0.
    Rc,
    /// Unreliable connection, 1.
    Uc,
    /// Reliable datagram, 2; no known implementation has it.
    Rd,
    /// The fourth value; the extended transport type specifies it (XRC).
    Extended,
}

impl Transport {
    const ALL: [Self; 4] = [Self::Rc, Self::Uc, Self::Rd, Self::Extended];

    const fn of(code: u8) -> Self {
        Self::ALL[(code & 3) as usize]
    }
}

/// A path as a REQ describes it, 44 bytes.
///
/// ```text
///  0..2     local LID             RoCE: 0xFFFF, as Linux sends, or anything
///  2..4     remote LID
///  4..20    local GID             the sender's
/// 20..36    remote GID            the receiver's
/// 36        flow label(20) reserved(6) packet rate(6)
/// 40        traffic class
/// 41        hop limit
/// 42        SL(4) subnet local(1) reserved(3)
/// 43        local ACK timeout(5) reserved(3)
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct CmPath {
    /// The sender's LID; `CmPath::PERMISSIVE_LID` where the GID is enough.
    pub local_lid: u16,
    /// The receiver's LID.
    pub remote_lid: u16,
    /// The sender's GID.
    pub local_gid: Gid,
    /// The receiver's GID.
    pub remote_gid: Gid,
    /// Flow label, 20 bits.
    pub flow_label: u32,
    /// Packet rate, 6 bits: a code of `enum ib_rate`.
    pub rate: u8,
    /// Traffic class.
    pub traffic_class: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Service level, 4 bits.
    pub service_level: u8,
    /// Whether the peer is in the same InfiniBand subnet.
    pub subnet_local: bool,
    /// The sender's ACK timeout: 4.096 µs · 2^code.
    pub ack_timeout: u8,
}

impl CmPath {
    /// The LID of RoCE, which has none.
    pub const PERMISSIVE_LID: u16 = 0xffff;
    const LEN: usize = 44;

    fn read(b: &[u8]) -> Self {
        let gid = |at: usize| Gid(*b[at..].first_chunk().expect("within the path"));
        Self {
            local_lid: u16_at(b, 0),
            remote_lid: u16_at(b, 2),
            local_gid: gid(4),
            remote_gid: gid(20),
            flow_label: u32_at(b, 36) >> 12,
            rate: b[39] & 0x3f,
            traffic_class: b[40],
            hop_limit: b[41],
            service_level: b[42] >> 4,
            subnet_local: b[42] & 8 != 0,
            ack_timeout: b[43] >> 3,
        }
    }

    fn write(&self, b: &mut [u8]) {
        b[0..2].copy_from_slice(&self.local_lid.to_be_bytes());
        b[2..4].copy_from_slice(&self.remote_lid.to_be_bytes());
        b[4..20].copy_from_slice(&self.local_gid.0);
        b[20..36].copy_from_slice(&self.remote_gid.0);
        let word = self.flow_label << 12 | u32::from(self.rate & 0x3f);
        b[36..40].copy_from_slice(&word.to_be_bytes());
        b[40] = self.traffic_class;
        b[41] = self.hop_limit;
        b[42] = self.service_level << 4 | u8::from(self.subnet_local) << 3;
        b[43] = self.ack_timeout << 3;
    }
}

/// A sender's announcement of its receive queue. In a REQ it is in the four reserved bytes 24 to
/// 27. In a REP it is in the number of the end-to-end context, which only reliable datagrams use,
/// and in the reserved byte behind it (16 to 19). Receivers that do not know it do not read these
/// bytes. A REP has it only in answer to a REQ that has it.
///
/// ```text
/// 0  0x52
/// 1  bytes                        rounded
/// 2  datagrams                    rounded
/// 3  QueueKind::code, lower seven bits   0: the sender does not say it
///    answers, upper bit
/// ```
///
/// A sender that says nothing of its queue announces 0 bytes and 0 datagrams.
///
/// Both numbers are rounded down to one byte each, by less than an eighth: five bits of exponent,
/// three of mantissa.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Announced {
    /// Bytes that the receive queue holds.
    pub bytes: u32,
    /// Datagrams that it holds.
    pub datagrams: u32,
    /// Its kind, if the sender announces it.
    pub queue: Option<QueueKind>,
    /// Whether the sender answers questions about connections that have been idle for long
    /// ([`AliveMad`](crate::AliveMad)).
    pub answers: bool,
}

impl Announced {
    /// Marks the fields as an announcement.
    const MARK: u8 = 0x52;
    const ANSWERS: u8 = 0x80;

    fn read(b: &[u8]) -> Option<Self> {
        (b[0] == Self::MARK).then(|| Self {
            bytes: expand(b[1]),
            datagrams: expand(b[2]),
            queue: QueueKind::from_code(b[3] & !Self::ANSWERS),
            answers: b[3] & Self::ANSWERS != 0,
        })
    }

    fn write(self) -> [u8; 4] {
        let queue = self.queue.map_or(0, QueueKind::code);
        let answers = if self.answers { Self::ANSWERS } else { 0 };
        [Self::MARK, compress(self.bytes), compress(self.datagrams), queue | answers]
    }
}

/// The code of the largest number; higher codes mean the same.
const CODE_MAX: u8 = 29 << 3 | 7;

/// A 32-bit number from a byte: below 8 the byte itself, else (8 + the lower three bits) << (the
/// upper five − 1).
const fn expand(code: u8) -> u32 {
    let code = if code > CODE_MAX { CODE_MAX } else { code } as u32;
    let (exponent, mantissa) = (code >> 3, code & 7);
    match exponent {
        0 => mantissa,
        _ => (8 + mantissa) << (exponent - 1),
    }
}

/// The largest code of a number that is at most `value`.
const fn compress(value: u32) -> u8 {
    if value < 8 {
        return value as u8;
    }
    let shift = value.ilog2() - 3;
    ((shift + 1) << 3 | (value >> shift) & 7) as u8
}

/// Asks for a connection (attribute 0x10).
///
/// ```text
///   0..4    local communication id
///   4..8    reserved
///   8..16   service id
///  16..24   local CA GUID
///  24..28   reserved                              here: see Announced
///  28..32   local Q_Key
///  32..35   local QPN
///  35       responder resources
///  36..39   local EECN                            reliable datagrams only
///  39       initiator depth
///  40..43   remote EECN
///  43       remote CM response timeout(5) transport(2) end-to-end flow control(1)
///  44..47   starting PSN
///  47       local CM response timeout(5) retry count(3)
///  48..50   P_Key
///  50       path MTU(4) RDC exists(1) RNR retry count(3)
///  51       max CM retries(4) SRQ(1) extended transport(3)
///  52..96   primary path
///  96..140  alternate path                        zeros: none
/// 140..232  private data
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Req<'a> {
    /// The sender's communication id.
    pub local: CommId,
    /// The service to connect to.
    pub service: ServiceId,
    /// The sender's GUID.
    pub ca_guid: u64,
    /// The sender's announcement of its receive queue, if any.
    pub announced: Option<Announced>,
    /// Queue key, for reliable datagrams only.
    pub qkey: u32,
    /// The sender's queue pair.
    pub qpn: Qpn,
    /// READs and atomics that it serves at a time.
    pub responder_resources: u8,
    /// READs and atomics that it may have outstanding.
    pub initiator_depth: u8,
    /// How long the receiver may take to answer: 4.096 µs · 2^code.
    pub remote_response_timeout: u8,
    /// Transport service.
    pub transport: Transport,
    /// Whether its acknowledgements carry credits.
    pub flow_control: bool,
    /// The first PSN that the sender expects; the receiver of the message shall begin to send with
    /// it (captures of Linux).
    pub psn: Psn,
    /// How long the sender itself will take to answer: 4.096 µs · 2^code.
    pub local_response_timeout: u8,
    /// Retries of packets that are not acknowledged.
    pub retry_count: u8,
    /// Partition key.
    pub pkey: Pkey,
    /// Code of the path MTU, as [`Mtu::code`](crate::types::Mtu::code).
    pub mtu: u8,
    /// Whether a reliable datagram channel exists.
    pub rdc_exists: bool,
    /// RNR retries; 7 means for ever.
    pub rnr_retry: u8,
    /// Retries of connection manager messages.
    pub max_cm_retries: u8,
    /// Whether the queue pair takes receives from a shared queue.
    pub srq: bool,
    /// Extended transport type, 3 bits.
    pub extended_transport: u8,
    /// The path.
    pub primary: CmPath,
    /// Another path for path migration; all zeros if there is none.
    pub alternate: CmPath,
    /// Private data; begins with an [`IpHeader`](super::IpHeader) where the service id is one of
    /// `rdma_cm`.
    pub private: &'a [u8],
}

impl<'a> Req<'a> {
    /// Bytes of private data.
    pub const PRIVATE_LEN: usize = 92;
    const PATH: usize = 52;
    const PRIVATE: usize = 140;

    pub(super) fn read(b: &'a Data) -> Self {
        Self {
            local: CommId(u32_at(b, 0)),
            service: ServiceId(u64_at(b, 8)),
            ca_guid: u64_at(b, 16),
            announced: Announced::read(&b[24..]),
            qkey: u32_at(b, 28),
            qpn: Qpn::new(u24_at(b, 32)),
            responder_resources: b[35],
            initiator_depth: b[39],
            remote_response_timeout: b[43] >> 3,
            transport: Transport::of(b[43] >> 1),
            flow_control: b[43] & 1 != 0,
            psn: Psn::new(u24_at(b, 44)),
            local_response_timeout: b[47] >> 3,
            retry_count: b[47] & 7,
            pkey: Pkey(u16_at(b, 48)),
            mtu: b[50] >> 4,
            rdc_exists: b[50] & 8 != 0,
            rnr_retry: b[50] & 7,
            max_cm_retries: b[51] >> 4,
            srq: b[51] & 8 != 0,
            extended_transport: b[51] & 7,
            primary: CmPath::read(&b[Self::PATH..]),
            alternate: CmPath::read(&b[Self::PATH + CmPath::LEN..]),
            private: &b[Self::PRIVATE..],
        }
    }

    pub(super) fn write(&self, b: &mut Data) {
        b[0..4].copy_from_slice(&self.local.0.to_be_bytes());
        b[8..16].copy_from_slice(&self.service.0.to_be_bytes());
        b[16..24].copy_from_slice(&self.ca_guid.to_be_bytes());
        if let Some(announced) = self.announced {
            b[24..28].copy_from_slice(&announced.write());
        }
        b[28..32].copy_from_slice(&self.qkey.to_be_bytes());
        put_u24(b, 32, self.qpn.value());
        b[35] = self.responder_resources;
        b[39] = self.initiator_depth;
        let transport = (self.transport as u8) << 1;
        b[43] = self.remote_response_timeout << 3 | transport | u8::from(self.flow_control);
        put_u24(b, 44, self.psn.value());
        b[47] = self.local_response_timeout << 3 | self.retry_count & 7;
        b[48..50].copy_from_slice(&self.pkey.0.to_be_bytes());
        b[50] = self.mtu << 4 | u8::from(self.rdc_exists) << 3 | self.rnr_retry & 7;
        b[51] = self.max_cm_retries << 4 | u8::from(self.srq) << 3 | self.extended_transport & 7;
        self.primary.write(&mut b[Self::PATH..]);
        self.alternate.write(&mut b[Self::PATH + CmPath::LEN..]);
        put(&mut b[Self::PRIVATE..], self.private);
    }
}

/// Accepts a connection (attribute 0x13).
///
/// ```text
///   0..4    local communication id
///   4..8    remote communication id               that of the REQ
///   8..12   local Q_Key
///  12..15   local QPN
///  16..19   local EECN                            here: see Announced
///  20..23   starting PSN
///  24       responder resources
///  25       initiator depth
///  26       target ACK delay(5) failover accepted(2) end-to-end flow control(1)
///  27       RNR retry count(3) SRQ(1) reserved(4)
///  28..36   local CA GUID
///  36..232  private data
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rep<'a> {
    /// The sender's communication id.
    pub local: CommId,
    /// The receiver's.
    pub remote: CommId,
    /// Queue key, for reliable datagrams only.
    pub qkey: u32,
    /// The sender's queue pair.
    pub qpn: Qpn,
    /// The sender's announcement of its receive queue, if any.
    pub announced: Option<Announced>,
    /// The first PSN that the sender expects; the receiver of the message shall begin to send with
    /// it (captures of Linux).
    pub psn: Psn,
    /// READs and atomics that it serves at a time.
    pub responder_resources: u8,
    /// READs and atomics that it may have outstanding.
    pub initiator_depth: u8,
    /// ACK delay of the sender: 4.096 µs · 2^code.
    pub target_ack_delay: u8,
    /// Result for the alternate path, 2 bits.
    pub failover: u8,
    /// Whether its acknowledgements carry credits.
    pub flow_control: bool,
    /// RNR retries; 7 means for ever.
    pub rnr_retry: u8,
    /// Whether the queue pair takes receives from a shared queue.
    pub srq: bool,
    /// The sender's GUID.
    pub ca_guid: u64,
    /// Private data.
    pub private: &'a [u8],
}

impl<'a> Rep<'a> {
    /// Bytes of private data.
    pub const PRIVATE_LEN: usize = 196;
    const PRIVATE: usize = 36;

    pub(super) fn read(b: &'a Data) -> Self {
        Self {
            local: CommId(u32_at(b, 0)),
            remote: CommId(u32_at(b, 4)),
            qkey: u32_at(b, 8),
            qpn: Qpn::new(u24_at(b, 12)),
            announced: Announced::read(&b[16..]),
            psn: Psn::new(u24_at(b, 20)),
            responder_resources: b[24],
            initiator_depth: b[25],
            target_ack_delay: b[26] >> 3,
            failover: b[26] >> 1 & 3,
            flow_control: b[26] & 1 != 0,
            rnr_retry: b[27] >> 5,
            srq: b[27] & 0x10 != 0,
            ca_guid: u64_at(b, 28),
            private: &b[Self::PRIVATE..],
        }
    }

    pub(super) fn write(&self, b: &mut Data) {
        b[0..4].copy_from_slice(&self.local.0.to_be_bytes());
        b[4..8].copy_from_slice(&self.remote.0.to_be_bytes());
        b[8..12].copy_from_slice(&self.qkey.to_be_bytes());
        put_u24(b, 12, self.qpn.value());
        if let Some(announced) = self.announced {
            b[16..20].copy_from_slice(&announced.write());
        }
        put_u24(b, 20, self.psn.value());
        b[24] = self.responder_resources;
        b[25] = self.initiator_depth;
        let failover = (self.failover & 3) << 1;
        b[26] = self.target_ack_delay << 3 | failover | u8::from(self.flow_control);
        b[27] = self.rnr_retry << 5 | u8::from(self.srq) << 4;
        b[28..36].copy_from_slice(&self.ca_guid.to_be_bytes());
        put(&mut b[Self::PRIVATE..], self.private);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_rounded_down_by_less_than_an_eighth() {
        for value in (0..2000).chain((0..32).map(|bit| (1u32 << bit) | 12_345)).chain([u32::MAX]) {
            let round = expand(compress(value));
            assert!(round <= value, "{value} became {round}");
            assert!(value - round <= value / 8, "{value} became {round}");
        }
        for code in 0..=u8::MAX {
            assert_eq!(compress(expand(code)), code.min(CODE_MAX), "both functions agree");
        }
    }
}
