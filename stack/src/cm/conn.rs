//! One connection, and the states that it has.
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

use core::net::IpAddr;

use super::types::{ConnId, ListenerId};
use crate::types::{Qpn, Time};
use crate::wire::cm::{CommId, code_to_ns};
use crate::wire::mad::MadBytes;

/// Where a connection is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// We asked.
    ReqSent,
    /// A peer asks; our program has to decide.
    ReqReceived,
    /// We accepted.
    RepSent,
    /// The peer accepted; our program has to bring its queue pair to RTS.
    RepReceived,
    /// It is.
    Established,
    /// We end it.
    DreqSent,
    /// It has ended. Packets may still be under way, so its queue pairs' numbers must not be used again yet.
    TimeWait,
}

/// A connection.
#[derive(Debug)]
pub(super) struct Conn {
    pub(super) state: State,
    /// An MRA has been sent or received for the message that is waited for or to be answered.
    pub(super) mra: bool,
    /// The program has heard, or does not want to hear, that it ended.
    pub(super) told: bool,
    /// We asked for it.
    pub(super) active: bool,
    pub(super) addresses: (IpAddr, IpAddr),
    pub(super) local: CommId,
    /// 0 while it is not known.
    pub(super) remote: CommId,
    pub(super) tid: u64,
    pub(super) qpn: Qpn,
    /// 0 while it is not known.
    pub(super) remote_qpn: Qpn,
    /// The peer's channel adapter; a number that only those know who saw its REQ or REP.
    pub(super) remote_guid: u64,
    /// In whose backlog it is.
    pub(super) listener: Option<ListenerId>,
    /// What is sent again.
    pub(super) mad: Option<Box<MadBytes>>,
    pub(super) retries: u8,
    pub(super) deadline: Option<Time>,
    /// ACK timeout of the queue pairs, a code.
    pub(super) ack_timeout: u8,
    /// The peer tells what its receive queue holds, and so reads what ours does.
    pub(super) announces: bool,
}

/// The longest ACK timeout that counts, a code: 17 s.
const ACK_TIMEOUT_MAX: u8 = 22;
/// The shortest: 67 ms, as long as packets live on any network of ours.
const ACK_TIMEOUT_MIN: u8 = 14;

impl Conn {
    pub(super) fn id(&self) -> ConnId {
        ConnId(self.local)
    }

    /// How long packets may still be under way: twice the ACK timeout, nanoseconds. 0 means that nobody waits for one; a peer that names
    /// a short one makes nobody forget too soon.
    pub(super) fn timewait(&self) -> u64 {
        2 * code_to_ns(self.ack_timeout.clamp(ACK_TIMEOUT_MIN, ACK_TIMEOUT_MAX))
    }
}
