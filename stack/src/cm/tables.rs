//! What the tables of a connection manager hold, other than connections.

use core::net::IpAddr;

use super::types::{AskId, ListenerId, QueryId};
use crate::types::{Qpn, Time};
use crate::wire::cm::{CommId, ServiceId};
use crate::wire::mad::MadBytes;

/// Most listeners and datagram services, and most open questions.
pub(super) const SERVICES_MAX: usize = 65_536;

/// A listener.
#[derive(Debug)]
pub(super) struct Listener {
    pub(super) id: ListenerId,
    pub(super) backlog: usize,
    /// Requests not yet decided, and accepted connections not yet established.
    pub(super) pending: usize,
}

/// The owner of a deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Timer {
    Conn(CommId),
    Query(QueryId),
    Ask(AskId),
}

/// The address of a listener: a service, on one address or on all.
pub(super) type ListenAddress = (ServiceId, Option<IpAddr>);

/// A question, decided or not.
#[derive(Debug)]
pub(super) struct Ask {
    /// Ours, and the peer's.
    pub(super) addresses: (IpAddr, IpAddr),
    pub(super) request: u32,
    pub(super) tid: u64,
    pub(super) service: ServiceId,
    pub(super) stage: Stage,
    pub(super) due: Time,
}

#[derive(Debug)]
pub(super) enum Stage {
    Waits(ListenerId),
    Answered(Box<MadBytes>),
}

/// The answer to questions for a service.
#[derive(Debug)]
pub(super) struct ServingQp {
    pub(super) qpn: Qpn,
    pub(super) qkey: u32,
    pub(super) private: Vec<u8>,
}

/// A question of ours.
#[derive(Debug)]
pub(super) struct Query {
    pub(super) addresses: (IpAddr, IpAddr),
    pub(super) service: ServiceId,
    pub(super) tid: u64,
    pub(super) mad: Box<MadBytes>,
    pub(super) retries: u8,
    pub(super) due: Time,
}
