//! Arguments and events of the connection manager.

use core::fmt;
use core::net::{IpAddr, SocketAddr};

use crate::tuning::cm::CONNECTIONS_MAX;
use crate::types::{Mtu, Psn, Qpn};
use crate::wire::cm::{Announced, CommId, RejReason, ServiceId, SidrStatus, Transport};
use crate::wire::mad::MadBytes;

/// Timeouts and limits of a connection manager.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CmConfig {
    /// A random key; the communication ids are derived from it.
    pub key: [u64; 2],
    /// Where several devices share an address: the slot of this one, the upper byte of its queue
    /// pairs' numbers and of all ids that it draws ([`addressee`](crate::addressee)).
    pub slot: Option<u8>,
    /// The device's GUID; peers identify the device by it.
    pub ca_guid: u64,
    /// Most connections. Those count that wait until their queue pairs' numbers may be used again.
    pub max_connections: usize,
    /// How long a peer may take to answer: 4.096 µs · 2^code.
    pub response_timeout: u8,
    /// Longest life of a packet in the network: 4.096 µs · 2^code.
    pub packet_lifetime: u8,
    /// How often a message is repeated, 0 to 15.
    pub max_retries: u8,
    /// How long a request or a question waits for a listener where there is none, before it is
    /// refused, nanoseconds; 0 for not at all. A peer that knows of a program that is about to
    /// listen may be faster than that program.
    pub refusal_delay: u64,
    /// After how many nanoseconds of silence the peer of a connection is asked whether it is still
    /// there, unless [`Connect`] or [`Accept`] say otherwise; 0 for never. Only peers are asked
    /// that announced that they answer.
    pub keep_alive: u64,
    /// Announces that this device answers such questions: it is driven also while its program does
    /// something else.
    pub answers: bool,
    /// How long the program may take to decide, and the longest time that a peer may claim for its
    /// program: 4.096 µs · 2^code.
    pub service_timeout: u8,
}

impl Default for CmConfig {
    fn default() -> Self {
        Self {
            key: [0; 2],
            slot: None,
            ca_guid: 0,
            max_connections: CONNECTIONS_MAX,
            // 0.27 s and 67 ms: a message is repeated after 0.4 s.
            response_timeout: 16,
            packet_lifetime: 14,
            max_retries: 15,
            refusal_delay: 0,
            keep_alive: 0,
            answers: false,
            // 69 s, as in Linux (CMA_CM_MRA_SETTING).
            service_timeout: 24,
        }
    }
}

/// A connection, while the connection manager knows it: its local communication id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnId(pub CommId);

/// A listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ListenerId(pub u64);

/// A question for the queue pair of a datagram service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SidrQueryId(pub u32);

/// A question for the queue pair of a datagram service, for the program to decide.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SidrReqId(pub u32);

/// A peer's question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asked {
    /// Our address, to which the question came.
    pub local: IpAddr,
    /// The peer's address; the port is 0 where the service has none.
    pub peer: SocketAddr,
    /// The service.
    pub service: ServiceId,
    /// Private data from the peer's program: 180 bytes where the service has a port, else 216.
    /// Unused bytes are 0.
    pub private: Vec<u8>,
}

/// The connection parameters of a queue pair; both sides have them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QpSide {
    /// Its number.
    pub qpn: Qpn,
    /// The first PSN that it expects; the other side begins with it.
    pub psn: Psn,
    /// READs and atomics that it serves at a time.
    pub responder_resources: u8,
    /// READs and atomics that it may have outstanding.
    pub initiator_depth: u8,
    /// RNR retries, 0 to 7; 7 means for ever.
    pub rnr_retry: u8,
    /// Whether its acknowledgements carry credits.
    pub flow_control: bool,
    /// Whether it takes receives from a shared queue.
    pub srq: bool,
    /// The announcement of its receive queue, if any.
    pub announced: Option<Announced>,
}

impl QpSide {
    /// With one READ or atomic at a time each way, and RNR retries for ever.
    pub const fn new(qpn: Qpn, psn: Psn) -> Self {
        Self {
            qpn,
            psn,
            responder_resources: 1,
            initiator_depth: 1,
            rnr_retry: 7,
            flow_control: false,
            srq: false,
            announced: None,
        }
    }
}

/// A request for a connection, by us.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Connect<'a> {
    /// Our address.
    pub local: IpAddr,
    /// The peer's.
    pub remote: IpAddr,
    /// The service to connect to.
    pub service: ServiceId,
    /// Our port, where the service has one.
    pub source_port: u16,
    /// Our queue pair.
    pub side: QpSide,
    /// Transport service.
    pub transport: Transport,
    /// The largest path MTU.
    pub mtu: Mtu,
    /// ACK timeout of the connection: 4.096 µs · 2^code.
    pub ack_timeout: u8,
    /// Retries of packets that are not acknowledged, 0 to 7.
    pub retry_count: u8,
    /// Traffic class of the connection.
    pub traffic_class: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// As [`CmConfig::keep_alive`], for this connection.
    pub keep_alive: Option<u64>,
    /// Private data for the peer's program: at most 56 bytes where the service has a port, else 92.
    pub private: &'a [u8],
}

impl Connect<'static> {
    /// Of a reliable connection between our address and the peer's, with usual values: path MTU
    /// 1024, 7 retries after 67 ms each, hop limit 64.
    pub const fn new(
        [local, remote]: [IpAddr; 2],
        service: ServiceId,
        source_port: u16,
        side: QpSide,
    ) -> Self {
        Self {
            local,
            remote,
            service,
            source_port,
            side,
            transport: Transport::Rc,
            mtu: Mtu::Mtu1024,
            ack_timeout: 14,
            retry_count: 7,
            traffic_class: 0,
            hop_limit: 64,
            keep_alive: None,
            private: b"",
        }
    }
}

/// An acceptance, by us.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Accept<'a> {
    /// Our queue pair. Its receive queue is announced only to peers that announced theirs.
    pub side: QpSide,
    /// As [`CmConfig::keep_alive`], for this connection.
    pub keep_alive: Option<u64>,
    /// Private data for the peer's program: at most 196 bytes.
    pub private: &'a [u8],
}

/// A peer's request for a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Our address, to which the request came.
    pub local: IpAddr,
    /// The peer's address; the port is 0 where the service has none.
    pub peer: SocketAddr,
    /// The service that it wants.
    pub service: ServiceId,
    /// Its queue pair.
    pub side: QpSide,
    /// Transport service.
    pub transport: Transport,
    /// The largest path MTU that the peer takes.
    pub mtu: Mtu,
    /// ACK timeout: 4.096 µs · 2^code.
    pub ack_timeout: u8,
    /// Retries of packets that are not acknowledged.
    pub retry_count: u8,
    /// Traffic class of the connection.
    pub traffic_class: u8,
    /// Private data from its program, in the full length of the field; unused bytes are 0.
    pub private: Vec<u8>,
}

/// A peer's acceptance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// Its queue pair.
    pub side: QpSide,
    /// ACK delay of the peer: 4.096 µs · 2^code.
    pub target_ack_delay: u8,
    /// Private data from its program, 196 bytes.
    pub private: Vec<u8>,
}

/// The cause of the end of an established connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    /// The peer ended it.
    ByPeer,
    /// We ended it, and the peer has answered.
    ByUs,
    /// We ended it, and the peer did not answer.
    Unanswered,
    /// The peer has ended without a word: it has not answered [`ASKS`](super::ASKS)
    /// questions, or the device at its address now does not know the connection.
    Gone,
    /// The peer's queue pair asks for another connection, so it has forgotten this one.
    Stale,
    /// The peer says that there is no such connection, or gave it up before it knew that it was
    /// established.
    Rejected {
        /// The reason.
        reason: RejReason,
        /// Private data from its program, 148 bytes.
        private: Vec<u8>,
    },
}

/// An event. Each connection ends with exactly one of `Rejected`, `TimedOut` and `Disconnected`;
/// `Released` follows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CmEvent {
    /// A peer requests a connection; accept or reject it.
    Request {
        /// The listener.
        listener: ListenerId,
        /// The new connection.
        conn: ConnId,
        /// The request.
        request: Box<Request>,
    },
    /// The peer accepts; bring the queue pair to RTS, then establish the connection, or reject it.
    Replied {
        /// The connection.
        conn: ConnId,
        /// The peer's side.
        reply: Box<Reply>,
    },
    /// The peer is in RTS.
    Established {
        /// The connection.
        conn: ConnId,
    },
    /// The peer rejects the connection, or withdraws.
    Rejected {
        /// The connection.
        conn: ConnId,
        /// The reason.
        reason: RejReason,
        /// Private data from its program, 148 bytes.
        private: Vec<u8>,
    },
    /// The peer did not answer, or our program did not decide in time.
    TimedOut {
        /// The connection.
        conn: ConnId,
    },
    /// An established connection has ended; do not use its queue pair any more.
    Disconnected {
        /// The connection.
        conn: ConnId,
        /// The cause.
        ended: Ended,
    },
    /// The connection manager has forgotten the connection: its queue pair's number may be used
    /// again.
    Released {
        /// The connection.
        conn: ConnId,
        /// Its queue pair; 0 if it never had one.
        qpn: Qpn,
    },
    /// The queue pair of a datagram service.
    Resolved {
        /// The question.
        query: SidrQueryId,
        /// The queue pair.
        qpn: Qpn,
        /// The queue key for datagrams to it.
        qkey: u32,
        /// Private data from its program, 136 bytes.
        private: Vec<u8>,
    },
    /// A peer asks for the queue pair of a datagram service; answer the question.
    Asked {
        /// The listener.
        listener: ListenerId,
        /// The id of the question.
        ask: SidrReqId,
        /// The question.
        asked: Box<Asked>,
    },
    /// The program did not answer a question in time.
    AskOver {
        /// The question.
        ask: SidrReqId,
    },
    /// There is no queue pair for the service.
    Unresolved {
        /// The question.
        query: SidrQueryId,
        /// The peer's status; `None` if it did not answer.
        status: Option<SidrStatus>,
        /// The private data of its answer.
        private: Vec<u8>,
    },
}

/// Why a call does nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CmError {
    /// The service has a listener already.
    InUse,
    /// There is no such connection or listener, or no longer.
    Unknown,
    /// The state of the connection does not permit the call.
    State,
    /// More private data than the message takes.
    PrivateTooLong {
        /// The most bytes that it takes.
        max: usize,
    },
    /// The limit of connections is reached.
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
            Self::Full => f.write_str("the limit of connections is reached"),
            Self::Family => f.write_str("the addresses are of different families"),
        }
    }
}

impl core::error::Error for CmError {}

/// A management datagram to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transmit {
    /// The source, an address of ours.
    pub local: IpAddr,
    /// The destination.
    pub remote: IpAddr,
    /// A queue pair of ours whose peer is there: its path serves for the datagram, and the peer is
    /// known.
    pub via: Option<Qpn>,
    /// The datagram.
    pub mad: MadBytes,
}

/// The footprint of a connection manager. Its configuration, its listeners and the program's calls
/// bound all of it. Messages from peers cannot exceed the bound.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CmFootprint {
    /// Connections, also those that only wait for their release.
    pub connections: usize,
    /// Entries that find a connection by the peer's communication id.
    pub by_request: usize,
    /// Entries that find a connection by the peer's queue pair.
    pub by_qpn: usize,
    /// Listeners for connections and for questions.
    pub listeners: usize,
    /// Requests and questions that count in a backlog.
    pub pending: usize,
    /// Questions of peers for a datagram service: undecided ones, and kept answers.
    pub asks: usize,
    /// Entries that find those questions.
    pub by_ask: usize,
    /// Our questions for a datagram service.
    pub queries: usize,
    /// Requests that wait for a listener.
    pub early: usize,
    /// Deadlines.
    pub timers: usize,
    /// Datagrams that wait to be sent.
    pub datagrams: usize,
    /// Events and notes that the caller has not polled yet.
    pub events: usize,
}
