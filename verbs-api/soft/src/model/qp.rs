//! Attributes of a queue pair, at creation and later.

use std::net::IpAddr;

use rocinante_stack::mem::Access;
use rocinante_stack::stats::LimitsHit;
use rocinante_stack::stats::QpCounters;
use rocinante_stack::types::{Mtu, Qpn, QueueKind};
use rocinante_stack::verbs::{QpState, QpType, RecvWr, SendWr};
use rocinante_stack::{Budget, PeerKind, PostError, QpAttr, SendLimits, check_recv};

use super::endpoint::Endpoint;
use super::error::VerbsError;

/// Depths and sizes of a queue pair (`struct ibv_qp_cap`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QpCaps {
    /// Depth of the send queue.
    pub max_send_wr: u32,
    /// Depth of the receive queue.
    pub max_recv_wr: u32,
    /// Scatter-gather elements of a send.
    pub max_send_sge: u32,
    /// Scatter-gather elements of a receive.
    pub max_recv_sge: u32,
    /// Bytes of inline data of a send.
    pub max_inline_data: u32,
}

impl Default for QpCaps {
    fn default() -> Self {
        Self {
            max_send_wr: 128,
            max_recv_wr: 128,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 64,
        }
    }
}

/// The checks of a send request that need no queue.
#[derive(Debug, Clone, Copy)]
pub struct SendRules {
    /// The capacities of the queue pair.
    pub caps: QpCaps,
    /// Its transport service.
    pub qp_type: QpType,
    /// The MTU of the port: the longest datagram.
    pub mtu: Mtu,
}

impl SendRules {
    /// Checks one.
    ///
    /// # Errors
    /// The first rule that it breaks.
    #[inline]
    pub fn check(&self, wr: &SendWr<'_>) -> Result<(), PostError> {
        let QpCaps { max_send_sge, max_inline_data, .. } = self.caps;
        SendLimits::new(self.qp_type, max_send_sge, max_inline_data, self.mtu).check(wr).map(drop)
    }
}

impl QpCaps {
    /// The checks of a receive request that need no queue.
    #[doc(hidden)]
    #[inline]
    pub fn check_recv(&self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        check_recv(wr, self.max_recv_sge).map(drop)
    }
}

/// A request of a list could not be posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PostListError {
    /// Index of the first request that was not posted; those before it were (`bad_wr` of
    /// `ibv_post_send(3)`).
    pub index: usize,
    /// The reason.
    pub error: PostError,
}

impl std::fmt::Display for PostListError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "work request {}: {}", self.index, self.error)
    }
}

impl std::error::Error for PostListError {}

impl From<PostListError> for VerbsError {
    fn from(error: PostListError) -> Self {
        Self::Post(error.error)
    }
}

/// The peer's address, and the marks of packets to it (`struct ibv_ah_attr`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeerPath {
    /// The peer's address.
    pub remote: IpAddr,
    /// The device's address that packets leave from: its index in `Context::gid_table`, from 0,
    /// which is the first address. It is `ibv_global_route::sgid_index` of `ibv_modify_qp(3)` and
    /// `ibv_create_ah(3)`, where it has 8 bits. `Qp::modify` and `Pd::create_ah` return
    /// `VerbsError::Invalid` for an index without an address, as after the interface has lost it,
    /// and `VerbsError::Path` for an address without a route to the peer.
    pub sgid_index: usize,
    /// TOS or traffic class: DSCP in the upper six bits, ECN in the lower two. With 2, ECT(0),
    /// congested switches may mark the packets. The peer then reports it (CNP), and the queue pair
    /// sends less.
    pub traffic_class: u8,
    /// TTL or hop limit of datagrams to a group. To one peer it is the route's
    /// (`ip route … hoplimit`), or else the interface's, as for devices of the kernel.
    pub hop_limit: u8,
    /// IPv6 flow label. It also decides the UDP source port; with 0 the queue pairs' numbers
    /// decide.
    pub flow_label: u32,
    /// The peer's receive budget, as the peer announced it. Only Rocinante announces one, or a
    /// `queue`; it is then sent reports of gaps that other implementations do not understand.
    /// [`Budget::STANDARD`] if the peer announced none.
    pub budget: Budget,
    /// The resource that limits the peer's receive queue, as the peer announced it. `None`
    /// if it announced none, or a budget alone, as earlier versions do: then the budget decides.
    pub queue: Option<QueueKind>,
}

impl PeerPath {
    /// A path from the device's first address, without marks, hop limit 64.
    #[must_use]
    pub const fn new(remote: IpAddr) -> Self {
        Self {
            remote,
            sgid_index: 0,
            traffic_class: 0,
            hop_limit: 64,
            flow_label: 0,
            budget: Budget::STANDARD,
            queue: None,
        }
    }

    /// The path to a queue pair that announced its receive budget.
    #[must_use]
    pub const fn to(peer: &Endpoint) -> Self {
        Self { budget: peer.budget, queue: peer.queue, ..Self::new(peer.address) }
    }
}

/// The address at an index of the GID table.
pub fn gid_at(gids: &[IpAddr], index: usize) -> Result<IpAddr, VerbsError> {
    let none = || VerbsError::Invalid(format!("there is no GID index {index}"));
    gids.get(index).copied().ok_or_else(none)
}

setters! {
    PeerPath {
        sgid_index: usize,
        traffic_class: u8,
        hop_limit: u8,
        flow_label: u32,
        budget: Budget,
        queue: Option<QueueKind>,
    }
}

/// A queue pair of a device, as `rdma resource show qp` and `rdma statistic qp` tell it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct QpInfo {
    /// Its number.
    pub qpn: Qpn,
    /// Its transport service.
    pub qp_type: QpType,
    /// Its state.
    pub state: QpState,
    /// Where its peer is, from RTR on.
    pub peer: Option<IpAddr>,
    /// The peer's number.
    pub dest_qpn: Option<Qpn>,
    /// Whether its peer is another Rocinante, as the program stated or as the device found out
    /// itself. `None` without a peer.
    pub peer_kind: Option<PeerKind>,
    /// The program's own value: `QpBuilder::context`.
    pub context: u64,
    /// Its counters of packets and messages.
    pub counters: QpCounters,
    /// Why it sent nothing more when it had its turn: `Qp::limits_hit`.
    pub limits_hit: LimitsHit,
}

/// Attributes to set (`struct ibv_qp_attr` with its mask). [`QpAttr`] documents each.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ModifyAttr {
    /// All attributes but the path; leave `peer` empty.
    pub attr: QpAttr,
    /// `IBV_QP_AV`.
    pub path: Option<PeerPath>,
}

impl ModifyAttr {
    /// RESET to INIT, of a connection.
    #[must_use]
    pub fn init(access: Access) -> Self {
        let attr = QpAttr {
            state: Some(QpState::Init),
            pkey_index: Some(0),
            port: Some(1),
            access: Some(access),
            ..QpAttr::default()
        };
        Self { attr, path: None }
    }

    /// RESET to INIT, of a queue pair for datagrams.
    #[must_use]
    pub fn init_datagram(qkey: u32) -> Self {
        let attr = QpAttr {
            state: Some(QpState::Init),
            pkey_index: Some(0),
            port: Some(1),
            qkey: Some(qkey),
            ..QpAttr::default()
        };
        Self { attr, path: None }
    }

    /// Any state to `state` if that needs no other attribute: RESET or ERR, or RTS from SQD or SQE.
    #[must_use]
    pub fn state(state: QpState) -> Self {
        let attr = QpAttr { state: Some(state), ..QpAttr::default() };
        Self { attr, path: None }
    }
}

/// Timeouts, retries and limits of a connection:
/// `ConnectOptions::default().timeout(10).retry_cnt(3)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConnectOptions {
    /// Path MTU; the connection uses the smallest of this, the device's and the peer's.
    pub mtu: Option<Mtu>,
    /// READs and atomics outstanding at the peer, which must permit that number.
    pub max_rd_atomic: u8,
    /// READs and atomics that the peer may have outstanding here.
    pub max_dest_rd_atomic: u8,
    /// ACK timeout: 4.096 µs · 2^timeout; 0 is never.
    pub timeout: u8,
    /// How often an unacknowledged request is retransmitted, 0 to 7.
    pub retry_cnt: u8,
    /// How often a request is retransmitted to a peer without receives; 7 means without limit.
    pub rnr_retry: u8,
    /// Code of the RNR delay that the peer shall wait if no receive is posted: 12 is 0.64 ms.
    pub min_rnr_timer: u8,
    /// TOS or traffic class.
    pub traffic_class: u8,
    /// TTL or hop limit that a request of the connection manager names. Packets leave with the
    /// route's: see [`PeerPath::hop_limit`].
    pub hop_limit: u8,
}

setters! {
    ConnectOptions {
        mtu: Option<Mtu>,
        max_rd_atomic: u8,
        max_dest_rd_atomic: u8,
        timeout: u8,
        retry_cnt: u8,
        rnr_retry: u8,
        min_rnr_timer: u8,
        traffic_class: u8,
        hop_limit: u8,
    }
}

impl Default for ConnectOptions {
    fn default() -> Self {
        Self {
            mtu: None,
            max_rd_atomic: 16,
            max_dest_rd_atomic: 16,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            min_rnr_timer: 12,
            traffic_class: 0,
            hop_limit: 64,
        }
    }
}
