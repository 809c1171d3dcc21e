//! The contents of a connection manager's tables, other than connections.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::types::{ListenerId, SidrQueryId, SidrReqId};
use crate::types::Time;
use crate::wire::cm::{CommId, ServiceId};
use crate::wire::mad::MadBytes;

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
    Query(SidrQueryId),
    Ask(SidrReqId),
    Early(u64),
}

/// The address of a listener: a service, on one address, on all of a family (its unspecified
/// address), or on all.
pub(super) type ListenAddress = (ServiceId, Option<IpAddr>);

/// Possible places of a listener for messages to `dst`, the most precise place first.
pub(super) fn places(service: ServiceId, dst: IpAddr) -> [ListenAddress; 3] {
    let family: IpAddr = match dst {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    [Some(dst), Some(family), None].map(|address| (service, address))
}

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

/// A request for a service that has no listener yet.
#[derive(Debug)]
pub(super) struct Early {
    /// The peer's address, and ours.
    pub(super) way: (IpAddr, IpAddr),
    /// The peer's communication id, or the number of its question.
    pub(super) request: u32,
    pub(super) service: ServiceId,
    pub(super) mad: Box<MadBytes>,
    pub(super) due: Time,
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
