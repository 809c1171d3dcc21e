//! What goes into the connection manager, and what comes out.

use core::fmt;
use core::net::{IpAddr, SocketAddr};

use super::{AskId, Asked};
use crate::types::{Mtu, Psn, Qpn};
use crate::wire::cm::{Announced, CommId, RejReason, ServiceId, SidrStatus, Transport};
use crate::wire::mad::MadBytes;

/// How patient a connection manager is, and how much it holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CmConfig {
    /// Drawn at random: communication ids come out of it.
    pub key: [u64; 2],
    /// The device's GUID, by which peers know it.
    pub ca_guid: u64,
    /// Connections at most, those included that wait until their queue pairs' numbers may be used again.
    pub max_connections: usize,
    /// Within what time a peer is to answer: 4.096 µs · 2^code.
    pub response_timeout: u8,
    /// How long a packet is under way at most: 4.096 µs · 2^code.
    pub packet_lifetime: u8,
    /// How often a message is repeated, 0 to 15.
    pub max_retries: u8,
    /// How long the program may take to decide, and how long a peer may say that its program does: 4.096 µs · 2^code.
    pub service_timeout: u8,
}

impl Default for CmConfig {
    fn default() -> Self {
        Self {
            key: [0; 2],
            ca_guid: 0,
            max_connections: 16_384,
            // 0.27 s and 67 ms: a message is repeated after 0.4 s.
            response_timeout: 16,
            packet_lifetime: 14,
            max_retries: 15,
            // 69 s, as Linux has it (CMA_CM_MRA_SETTING).
            service_timeout: 24,
        }
    }
}

/// A connection, as long as the connection manager knows it: its local communication id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnId(pub CommId);

/// Something that listens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ListenerId(pub u64);

/// A question for the queue pair of a datagram service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct QueryId(pub u32);

/// What a queue pair is to be connected with; both sides have one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QpSide {
    /// Its number.
    pub qpn: Qpn,
    /// The PSN that it expects first, with which the other side shall begin.
    pub psn: Psn,
    /// READs and atomics that it serves at a time.
    pub responder_resources: u8,
    /// READs and atomics that it may have outstanding.
    pub initiator_depth: u8,
    /// How often what finds no receive is sent again; 7 is for ever.
    pub rnr_retry: u8,
    /// Whether its acknowledgements carry credits.
    pub flow_control: bool,
    /// Whether it takes receives from a shared queue.
    pub srq: bool,
    /// What its receive queue holds, if known.
    pub announced: Option<Announced>,
}

/// Asks for a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Connect<'a> {
    /// Our address.
    pub local: IpAddr,
    /// The peer's.
    pub remote: IpAddr,
    /// What to be connected to.
    pub service: ServiceId,
    /// Our port, where the service has one.
    pub source_port: u16,
    /// Our queue pair.
    pub side: QpSide,
    /// Which transport.
    pub transport: Transport,
    /// The largest path MTU.
    pub mtu: Mtu,
    /// ACK timeout of the connection: 4.096 µs · 2^code.
    pub ack_timeout: u8,
    /// How often the connection repeats what is not acknowledged, 0 to 7.
    pub retry_count: u8,
    /// Traffic class of the connection.
    pub traffic_class: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// For the peer's program: 56 bytes at most where the service has a port, else 92.
    pub private: &'a [u8],
}

/// Accepts a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Accept<'a> {
    /// Our queue pair. What its receive queue holds is told only to peers that told theirs.
    pub side: QpSide,
    /// For the peer's program: 196 bytes at most.
    pub private: &'a [u8],
}

/// A peer asks for a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Our address, to which the request came.
    pub local: IpAddr,
    /// The peer's address; the port is 0 where the service has none.
    pub peer: SocketAddr,
    /// What it wants to be connected to.
    pub service: ServiceId,
    /// Its queue pair.
    pub side: QpSide,
    /// Which transport.
    pub transport: Transport,
    /// The largest path MTU that it takes.
    pub mtu: Mtu,
    /// ACK timeout: 4.096 µs · 2^code.
    pub ack_timeout: u8,
    /// How often the connection shall repeat what is not acknowledged.
    pub retry_count: u8,
    /// Traffic class of the connection.
    pub traffic_class: u8,
    /// What its program says: as many bytes as fit, zeros behind what it filled.
    pub private: Vec<u8>,
}

/// A peer accepts a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// Its queue pair.
    pub side: QpSide,
    /// How long its acknowledgements take: 4.096 µs · 2^code.
    pub target_ack_delay: u8,
    /// What its program says, 196 bytes.
    pub private: Vec<u8>,
}

/// Who ended an established connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// The peer asked for it.
    ByPeer,
    /// We did, and the peer has answered.
    ByUs,
    /// We did, and the peer is silent.
    Unanswered,
    /// The peer's queue pair asks for another connection, so it has forgotten this one.
    Stale,
    /// The peer says that there is none.
    Rejected(RejReason),
}

/// What happened. Each connection has one event that ends it: `Rejected`, `TimedOut` or `Disconnected`; and then `Released`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CmEvent {
    /// A peer asks; accept or reject it.
    Request {
        /// Where it asks.
        listener: ListenerId,
        /// The new connection.
        conn: ConnId,
        /// What it asks for.
        request: Box<Request>,
    },
    /// The peer accepts; bring the queue pair to RTS, then establish the connection, or reject it.
    Replied {
        /// The connection.
        conn: ConnId,
        /// The peer's side.
        reply: Box<Reply>,
    },
    /// The peer is ready.
    Established {
        /// The connection.
        conn: ConnId,
    },
    /// The peer does not want the connection, or no longer.
    Rejected {
        /// The connection.
        conn: ConnId,
        /// Why.
        reason: RejReason,
        /// What its program says, 148 bytes.
        private: Vec<u8>,
    },
    /// The peer is silent, or our program did not decide in time.
    TimedOut {
        /// The connection.
        conn: ConnId,
    },
    /// An established connection has ended; its queue pair should not be used any more.
    Disconnected {
        /// The connection.
        conn: ConnId,
        /// Who ended it.
        ended: Ended,
    },
    /// The connection manager has forgotten the connection: the number of its queue pair may be used again.
    Released {
        /// The connection.
        conn: ConnId,
        /// Its queue pair; 0 if it never had one.
        qpn: Qpn,
    },
    /// The queue pair of a datagram service.
    Resolved {
        /// The question.
        query: QueryId,
        /// The queue pair.
        qpn: Qpn,
        /// The queue key that it wants.
        qkey: u32,
        /// What its program says, 136 bytes.
        private: Vec<u8>,
    },
    /// A peer asks for the queue pair of a datagram service; answer it.
    Asked {
        /// Where it asks.
        listener: ListenerId,
        /// The question.
        ask: AskId,
        /// What it asks.
        asked: Box<Asked>,
    },
    /// The program did not answer in time.
    AskOver {
        /// The question.
        ask: AskId,
    },
    /// There is none.
    Unresolved {
        /// The question.
        query: QueryId,
        /// What the peer says; `None` if it is silent.
        status: Option<SidrStatus>,
    },
}

/// Why a call does nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CmError {
    /// Somebody listens there already.
    InUse,
    /// There is no such connection or listener, or not any more.
    Unknown,
    /// The connection is in a state in which this makes no sense.
    State,
    /// More private data than the message takes.
    PrivateTooLong {
        /// What it takes.
        max: usize,
    },
    /// There are as many connections as there may be.
    Full,
    /// The addresses are of different families.
    Family,
}

impl fmt::Display for CmError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InUse => f.write_str("somebody listens there already: take another port"),
            Self::Unknown => f.write_str("the connection has ended"),
            Self::State => f.write_str("the connection is not in a state for that"),
            Self::PrivateTooLong { max } => {
                write!(f, "too much private data: {max} bytes at most")
            }
            Self::Full => f.write_str("there are as many connections as there may be"),
            Self::Family => f.write_str("the addresses are of different families"),
        }
    }
}

impl core::error::Error for CmError {}

/// A management datagram to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transmit {
    /// From this address of ours.
    pub local: IpAddr,
    /// To this address.
    pub remote: IpAddr,
    /// The datagram.
    pub mad: MadBytes,
}
