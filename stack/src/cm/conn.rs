//! One connection, and its states.
//!
//! ```text
//!  active                                   passive
//!  ReqSent ── REP ──> RepReceived           ReqReceived ── accept ──> RepSent
//!     │                 │ establish                                     │ RTU
//!     │                 └──────────> Established <──────────────────────┘
//!     │ REJ, silence                     │ disconnect        │ DREQ
//!     v                                  v                   v
//!   (gone)                           DreqSent ── DREP ──> TimeWait ──> (gone)
//! ```
//!
//! A REJ for a stale connection leads from ReqSent to TimeWait.

use core::net::IpAddr;

use super::alive::Alive;
use super::types::{ConnId, ListenerId};
use crate::tuning::cm::{ACK_TIMEOUT_MAX, ACK_TIMEOUT_MIN};
use crate::types::{Qpn, Time};
use crate::wire::cm::{CommId, code_to_ns};
use crate::wire::mad::MadBytes;

/// State of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// We sent the request.
    ReqSent,
    /// A peer sent a request; our program has to decide.
    ReqReceived,
    /// We accepted.
    RepSent,
    /// The peer accepted; our program has to bring its queue pair to RTS.
    RepReceived,
    /// Both queue pairs are in RTS.
    Established,
    /// We are ending it.
    DreqSent,
    /// It has ended. Packets may still be in flight, so its queue pairs' numbers must not be used
    /// again yet.
    TimeWait,
}

/// A connection.
#[derive(Debug)]
pub(super) struct Conn {
    pub(super) state: State,
    /// An MRA has been sent or received, for the message that we wait for or that we have to
    /// answer.
    pub(super) mra: bool,
    /// The program knows that it ended, or does not want to know.
    pub(super) end_reported: bool,
    /// We requested it.
    pub(super) active: bool,
    pub(super) addresses: (IpAddr, IpAddr),
    pub(super) local: CommId,
    /// 0 while unknown.
    pub(super) remote: CommId,
    pub(super) tid: u64,
    pub(super) qpn: Qpn,
    /// 0 while unknown.
    pub(super) remote_qpn: Qpn,
    /// GUID of the peer's channel adapter. Only nodes that saw the peer's REQ or REP know it.
    pub(super) remote_guid: u64,
    /// The listener that counts it in its backlog.
    pub(super) listener: Option<ListenerId>,
    /// The message that is sent again.
    pub(super) mad: Option<Box<MadBytes>>,
    pub(super) retries: u8,
    pub(super) deadline: Option<Time>,
    /// ACK timeout of the queue pairs, a code.
    pub(super) ack_timeout: u8,
    /// Whether the peer announces anything about itself. If so, it also reads our announcements.
    pub(super) announces: bool,
    /// Whether it answers questions about idle connections.
    pub(super) answers: bool,
    pub(super) alive: Alive,
}

impl Conn {
    pub(super) fn id(&self) -> ConnId {
        ConnId(self.local)
    }

    /// How long packets may still be in flight: twice the ACK timeout, nanoseconds. A timeout of 0
    /// means no timeout at all, and a peer may name a very short one. The lower bound keeps
    /// TIMEWAIT long enough in both cases.
    pub(super) fn timewait(&self) -> u64 {
        2 * code_to_ns(self.ack_timeout.clamp(ACK_TIMEOUT_MIN, ACK_TIMEOUT_MAX))
    }
}
