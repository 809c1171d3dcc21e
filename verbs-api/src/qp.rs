//! Queue pairs: made, connected, posted to.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use parking_lot::Mutex;
use rocinante_netdev::PathSpec;
use rocinante_stack::mem::{Access, Sge};
use rocinante_stack::types::{Mtu, Psn, Qpn};
use rocinante_stack::verbs::{QpState, RecvWr, SendData, SendOp, SendWr};
use rocinante_stack::{Budget, ModifyError, PeerAddress, PostError, QpAttr, QpInit};

use crate::context::{ContextInner, Pd};
use crate::cq::Cq;
use crate::error::VerbsError;
use crate::exchange::Endpoint;
use crate::shard::Shard;

/// What a queue pair shares between those who post and those who drive.
#[derive(Debug)]
pub(crate) struct QpShared {
    qpn: Qpn,
    front: Mutex<Front>,
    pub(crate) send_retired: AtomicU64,
    pub(crate) recv_retired: AtomicU64,
    state: AtomicU8,
    caps: QpCaps,
}

/// The posting side.
#[derive(Debug, Default)]
struct Front {
    sends: u64,
    recvs: u64,
    staged: Vec<Staged>,
    sges: Vec<Sge>,
    inline: Vec<u8>,
    /// In the list of queue pairs with staged work.
    listed: bool,
}

/// A work request that could not be given to the engine at once; its lists are in the arenas of [`Front`].
#[derive(Debug, Clone, Copy)]
enum Staged {
    Send { wr_id: u64, op: SendOp, sges: u32, inline: Option<u32>, flags: [bool; 3] },
    Recv { wr_id: u64, sges: u32 },
}

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

/// A request of a list could not be posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PostListError {
    /// Index of the first request that was not posted; those before it were (`bad_wr` of `ibv_post_send(3)`).
    pub index: usize,
    /// Why.
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

impl QpShared {
    fn state(&self) -> QpState {
        STATES[usize::from(self.state.load(Ordering::Acquire))]
    }

    fn set_state(&self, state: QpState) {
        let index = STATES.iter().position(|s| *s == state).unwrap_or(0);
        self.state.store(u8::try_from(index).unwrap_or(0), Ordering::Release);
    }

    /// Gives staged requests to the engine.
    pub(crate) fn post_staged(&self, shard: &mut Shard) {
        self.front.lock().give(self.qpn, shard);
    }

    fn check_send(&self, front: &Front, wr: &SendWr<'_>) -> Result<(), PostError> {
        match self.state() {
            QpState::Rts | QpState::Err => {}
            _ => return Err(PostError::State),
        }
        let out = front.sends - self.send_retired.load(Ordering::Acquire);
        if out >= u64::from(self.caps.max_send_wr) {
            return Err(PostError::Full);
        }
        let (count, len, inline) = match wr.data {
            SendData::Sges(list) => (list.len(), total(list), 0),
            SendData::Inline(bytes) => (0, bytes.len() as u64, bytes.len()),
        };
        if count > self.caps.max_send_sge as usize {
            return Err(PostError::TooManySges);
        }
        if inline > self.caps.max_inline_data as usize {
            return Err(PostError::InlineTooLong);
        }
        if len > 1 << 31 {
            return Err(PostError::TooLong);
        }
        match (wr.op, wr.data) {
            (op, SendData::Inline(_)) if op.has_response() => Err(PostError::InlineResponse),
            (SendOp::CompareSwap { remote, .. } | SendOp::FetchAdd { remote, .. }, _)
                if remote % 8 != 0 || len < 8 =>
            {
                Err(PostError::BadAtomic)
            }
            _ => Ok(()),
        }
    }

    fn check_recv(&self, front: &Front, wr: &RecvWr<'_>) -> Result<(), PostError> {
        if self.state() == QpState::Reset {
            return Err(PostError::State);
        }
        let out = front.recvs - self.recv_retired.load(Ordering::Acquire);
        if out >= u64::from(self.caps.max_recv_wr) {
            return Err(PostError::Full);
        }
        if wr.sges.len() > self.caps.max_recv_sge as usize {
            return Err(PostError::TooManySges);
        }
        if total(wr.sges) > 1 << 31 {
            return Err(PostError::TooLong);
        }
        Ok(())
    }
}

const STATES: [QpState; 5] =
    [QpState::Reset, QpState::Init, QpState::Rtr, QpState::Rts, QpState::Err];

fn total(list: &[Sge]) -> u64 {
    list.iter().map(|sge| u64::from(sge.len)).sum()
}

impl Front {
    #[allow(clippy::cast_possible_truncation)]
    fn stage_send(&mut self, wr: &SendWr<'_>) {
        let (sges, inline) = match wr.data {
            SendData::Sges(list) => {
                self.sges.extend_from_slice(list);
                (list.len() as u32, None)
            }
            SendData::Inline(bytes) => {
                self.inline.extend_from_slice(bytes);
                (0, Some(bytes.len() as u32))
            }
        };
        let flags = [wr.signaled, wr.solicited, wr.fence];
        self.staged.push(Staged::Send { wr_id: wr.wr_id, op: wr.op, sges, inline, flags });
    }

    #[allow(clippy::cast_possible_truncation)]
    fn stage_recv(&mut self, wr: &RecvWr<'_>) {
        self.sges.extend_from_slice(wr.sges);
        self.staged.push(Staged::Recv { wr_id: wr.wr_id, sges: wr.sges.len() as u32 });
    }

    /// Gives what is staged to the engine. It was checked when it was posted; an engine that refuses it now has
    /// been reset meanwhile, and forgets it as a reset does.
    fn give(&mut self, qpn: Qpn, shard: &mut Shard) {
        self.listed = false;
        if self.staged.is_empty() {
            return;
        }
        let (mut sge, mut byte) = (0, 0);
        for staged in &self.staged {
            match *staged {
                Staged::Send { wr_id, op, sges, inline, flags } => {
                    let list = &self.sges[sge..sge + sges as usize];
                    sge += sges as usize;
                    let data = match inline {
                        None => SendData::Sges(list),
                        Some(len) => {
                            let bytes = &self.inline[byte..byte + len as usize];
                            byte += len as usize;
                            SendData::Inline(bytes)
                        }
                    };
                    let [signaled, solicited, fence] = flags;
                    let wr = SendWr { wr_id, op, data, signaled, solicited, fence };
                    let _ = shard.engine.post_send(qpn, &wr, &mut shard.host);
                }
                Staged::Recv { wr_id, sges } => {
                    let list = &self.sges[sge..sge + sges as usize];
                    sge += sges as usize;
                    let wr = RecvWr { wr_id, sges: list };
                    let _ = shard.engine.post_recv(qpn, &wr, &mut shard.host);
                }
            }
        }
        self.staged.clear();
        self.sges.clear();
        self.inline.clear();
    }
}

/// Makes queue pairs: see [`Pd::qp`].
#[derive(Debug, Clone)]
pub struct QpBuilder {
    pd: Pd,
    send_cq: Cq,
    recv_cq: Cq,
    caps: QpCaps,
    access: Access,
    sq_sig_all: bool,
    gid_index: usize,
}

impl QpBuilder {
    pub(crate) fn new(pd: &Pd, send_cq: &Cq, recv_cq: &Cq) -> Self {
        Self {
            pd: pd.clone(),
            send_cq: send_cq.clone(),
            recv_cq: recv_cq.clone(),
            caps: QpCaps::default(),
            access: Access::ALL,
            sq_sig_all: false,
            gid_index: 0,
        }
    }

    /// Depths and sizes; 128 requests of one element each and 64 bytes inline unless said otherwise.
    #[must_use]
    pub fn caps(mut self, caps: QpCaps) -> Self {
        self.caps = caps;
        self
    }

    /// Depth of the send queue.
    #[must_use]
    pub fn max_send_wr(mut self, depth: u32) -> Self {
        self.caps.max_send_wr = depth;
        self
    }

    /// Depth of the receive queue.
    #[must_use]
    pub fn max_recv_wr(mut self, depth: u32) -> Self {
        self.caps.max_recv_wr = depth;
        self
    }

    /// Scatter-gather elements of sends and receives.
    #[must_use]
    pub fn max_sge(mut self, elements: u32) -> Self {
        self.caps.max_send_sge = elements;
        self.caps.max_recv_sge = elements;
        self
    }

    /// Bytes of inline data.
    #[must_use]
    pub fn max_inline_data(mut self, bytes: u32) -> Self {
        self.caps.max_inline_data = bytes;
        self
    }

    /// What the peer may do (`IBV_QP_ACCESS_FLAGS`); everything unless said otherwise. A region's own flags
    /// limit it further.
    #[must_use]
    pub fn access(mut self, access: Access) -> Self {
        self.access = access;
        self
    }

    /// Whether every send makes a completion (`sq_sig_all`).
    #[must_use]
    pub fn signal_all(mut self, all: bool) -> Self {
        self.sq_sig_all = all;
        self
    }

    /// Which of the device's addresses it uses: an index into [`Context::gids`](crate::Context::gids).
    #[must_use]
    pub fn gid_index(mut self, index: usize) -> Self {
        self.gid_index = index;
        self
    }

    /// Makes the queue pair in the RESET state, for programs that change its state themselves by [`Qp::modify`].
    ///
    /// # Errors
    /// [`VerbsError::Limit`] or [`VerbsError::Invalid`] where the device's limits are exceeded.
    pub fn build_reset(self) -> Result<Qp, VerbsError> {
        let ctx = self.pd.inner.ctx.clone();
        if !Arc::ptr_eq(&ctx, &self.send_cq.inner.ctx)
            || !Arc::ptr_eq(&ctx, &self.recv_cq.inner.ctx)
        {
            return Err(VerbsError::Invalid(
                "protection domain and completion queues belong to different devices".into(),
            ));
        }
        ctx.limits.check(&self.caps)?;
        let Some(local) = ctx.gids().get(self.gid_index).copied() else {
            return Err(VerbsError::Invalid(format!("there is no GID index {}", self.gid_index)));
        };
        let random = crate::context::random()?;
        let mut guard = ctx.core.shard.lock();
        let shard = &mut *guard;
        let mut qpn = None;
        let cookie = shard.host.qps.insert(|cookie| {
            let init = self.engine_init(cookie);
            qpn = shard.engine.create_qp(&init, random);
            Arc::new(QpShared {
                qpn: qpn.unwrap_or_default(),
                front: Mutex::new(Front::default()),
                send_retired: AtomicU64::new(0),
                recv_retired: AtomicU64::new(0),
                state: AtomicU8::new(0),
                caps: self.caps,
            })
        });
        let Some(qpn) = qpn else {
            shard.host.qps.remove(cookie);
            return Err(VerbsError::Limit {
                what: "queue pairs",
                max: u64::from(shard.engine.config().max_qp),
            });
        };
        let shared = shard.host.qps.get(cookie).expect("just inserted").clone();
        drop(guard);
        {
            let mut front = shared.front.lock();
            let depth = (self.caps.max_send_wr + self.caps.max_recv_wr) as usize;
            front.staged.reserve(depth.min(4096));
        }
        Ok(Qp {
            shared,
            ctx,
            qpn,
            cookie,
            local,
            path: Mutex::new(None),
            psn: Psn::new(crate::context::random()?),
            access: self.access,
            _pd: self.pd,
            _cqs: (self.send_cq, self.recv_cq),
        })
    }

    /// Makes the queue pair in the INIT state: receives can be posted, and [`PreparedQp::connect`] does the rest.
    ///
    /// # Errors
    /// As [`build_reset`](Self::build_reset).
    pub fn build(self) -> Result<PreparedQp, VerbsError> {
        let access = self.access;
        let qp = self.build_reset()?;
        qp.modify(&ModifyAttr::init(access))?;
        Ok(PreparedQp { qp })
    }

    fn engine_init(&self, cookie: u32) -> QpInit {
        QpInit {
            pd: self.pd.id(),
            send_cq: self.send_cq.id(),
            recv_cq: self.recv_cq.id(),
            max_send_wr: self.caps.max_send_wr,
            max_recv_wr: self.caps.max_recv_wr,
            max_send_sge: self.caps.max_send_sge,
            max_recv_sge: self.caps.max_recv_sge,
            max_inline_data: self.caps.max_inline_data,
            sq_sig_all: self.sq_sig_all,
            cookie: u64::from(cookie),
        }
    }
}

/// Where the peer is and how packets to it are marked (`struct ibv_ah_attr`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerPath {
    /// The peer's address.
    pub remote: IpAddr,
    /// TOS or traffic class: DSCP in the upper six bits, ECN in the lower two.
    pub traffic_class: u8,
    /// TTL or hop limit.
    pub hop_limit: u8,
    /// IPv6 flow label, which also decides the UDP source port; 0 lets the queue pairs' numbers decide.
    pub flow_label: u32,
    /// What the peer's receive queue holds; [`Budget::STRANGER`] if it did not say.
    pub budget: Budget,
}

impl PeerPath {
    /// A path without marks, hop limit 64.
    #[must_use]
    pub const fn new(remote: IpAddr) -> Self {
        Self { remote, traffic_class: 0, hop_limit: 64, flow_label: 0, budget: Budget::STRANGER }
    }
}

/// Attributes to set (`struct ibv_qp_attr` with its mask). [`QpAttr`] says what each means.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ModifyAttr {
    /// All attributes but the path; leave `peer` empty.
    pub attr: QpAttr,
    /// `IBV_QP_AV`.
    pub path: Option<PeerPath>,
}

impl ModifyAttr {
    /// RESET to INIT.
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

    /// Any state to `state`, which needs nothing else: RESET or ERR.
    #[must_use]
    pub fn state(state: QpState) -> Self {
        let attr = QpAttr { state: Some(state), ..QpAttr::default() };
        Self { attr, path: None }
    }
}

/// How patient a connection is and how much it may have outstanding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectOptions {
    /// Path MTU; the smaller of both sides' is taken.
    pub mtu: Option<Mtu>,
    /// READs and atomics outstanding at the peer, which must permit as many.
    pub max_rd_atomic: u8,
    /// READs and atomics that the peer may have outstanding here.
    pub max_dest_rd_atomic: u8,
    /// ACK timeout: 4.096 µs · 2^timeout; 0 is never.
    pub timeout: u8,
    /// How often a silent peer is asked again, 0 to 7.
    pub retry_cnt: u8,
    /// How often a peer without receives is asked again; 7 is for ever.
    pub rnr_retry: u8,
    /// Code of the delay asked for when no receive is posted: 12 is 0.64 ms.
    pub min_rnr_timer: u8,
    /// TOS or traffic class.
    pub traffic_class: u8,
    /// TTL or hop limit.
    pub hop_limit: u8,
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

/// A queue pair in the INIT state: receives can be posted, nothing can be sent yet.
#[derive(Debug)]
pub struct PreparedQp {
    qp: Qp,
}

impl PreparedQp {
    /// What the peer needs to know to connect.
    #[must_use]
    pub fn endpoint(&self) -> Endpoint {
        self.qp.endpoint()
    }

    /// Posts receives, which a peer may fill as soon as both sides are connected.
    ///
    /// # Errors
    /// As [`Qp::post_recv`].
    pub fn post_recv(&self, list: &[RecvWr<'_>]) -> Result<(), PostListError> {
        self.qp.post_recv(list)
    }

    /// Connects: through RTR to RTS.
    ///
    /// # Errors
    /// The queue pair comes back with the error, in the INIT or the RESET state.
    pub fn connect(
        self,
        peer: &Endpoint,
        options: &ConnectOptions,
    ) -> Result<Qp, (Box<Self>, VerbsError)> {
        match self.qp.connect_to(peer, options) {
            Ok(()) => Ok(self.qp),
            Err(error) => Err((Box::new(self), error)),
        }
    }
}

/// A queue pair. Everything may be called from any thread.
///
/// Dropping it destroys it: work that is outstanding never completes, and the peer runs into its timeout.
#[derive(Debug)]
pub struct Qp {
    shared: Arc<QpShared>,
    ctx: Arc<ContextInner>,
    qpn: Qpn,
    cookie: u32,
    local: IpAddr,
    path: Mutex<Option<u32>>,
    psn: Psn,
    access: Access,
    _pd: Pd,
    _cqs: (Cq, Cq),
}

impl Qp {
    /// Its number.
    #[must_use]
    pub fn qpn(&self) -> Qpn {
        self.qpn
    }

    /// What the peer needs to know to connect.
    #[must_use]
    pub fn endpoint(&self) -> Endpoint {
        Endpoint {
            address: self.local,
            qpn: self.qpn,
            psn: self.psn,
            mtu: self.ctx.active_mtu,
            budget: self.ctx.advertised,
        }
    }

    /// Changes attributes and state (`ibv_modify_qp(3)`).
    ///
    /// # Errors
    /// [`VerbsError::Modify`] says which attribute is missing, too much or out of range, or that the states do not follow
    /// each other; [`VerbsError::Path`] that there is no way to the peer.
    pub fn modify(&self, change: &ModifyAttr) -> Result<(), VerbsError> {
        let mut attr = change.attr;
        let mut guard = self.ctx.core.shard.lock();
        self.ctx.core.take_staged(&mut guard);
        let shard = &mut *guard;
        let mut added = None;
        if let Some(path) = &change.path {
            let id =
                shard.add_path(&self.path_spec(path, attr.dest_qpn)).map_err(VerbsError::Path)?;
            added = Some(id);
            let (local, remote, budget) = (self.local, path.remote, path.budget);
            attr.peer = Some(PeerAddress { local, remote, path: id, budget });
        }
        let result = shard.engine.modify_qp(self.qpn, &attr, &mut shard.host);
        let mut path = self.path.lock();
        let stale = match &result {
            Ok(()) if attr.state == Some(QpState::Reset) => path.take(),
            Ok(()) if added.is_some() => std::mem::replace(&mut *path, added),
            Ok(()) => None,
            Err(_) => added,
        };
        if let Some(stale) = stale {
            shard.remove_path(stale);
        }
        let state = shard.engine.query_qp(self.qpn).map_or(QpState::Err, |(state, _, _)| state);
        self.shared.set_state(state);
        if attr.state == Some(QpState::Reset) && result.is_ok() {
            self.forget_posted();
        }
        let now = shard.now();
        shard.transmit(now);
        shard.deliver();
        let more = self.ctx.core.release(guard);
        if more {
            self.ctx.core.drive();
        }
        result.map_err(VerbsError::Modify)
    }

    /// A reset forgets all work without completing it.
    fn forget_posted(&self) {
        let mut front = self.shared.front.lock();
        front.staged.clear();
        front.sges.clear();
        front.inline.clear();
        self.shared.send_retired.store(front.sends, Ordering::Release);
        self.shared.recv_retired.store(front.recvs, Ordering::Release);
    }

    fn path_spec(&self, path: &PeerPath, dest: Option<Qpn>) -> PathSpec {
        // The port spreads connections over links and queues, and depends on the destination slot, so that a receiver
        // never merges packets of two owners (the formula of rdma_get_udp_sport in Linux).
        let dest = dest.unwrap_or_default().value();
        let label = if path.flow_label == 0 {
            let product = u64::from(self.qpn.value()) * u64::from(dest);
            #[allow(clippy::cast_possible_truncation)]
            let folded = (product ^ (product >> 20) ^ (product >> 40)) as u32;
            folded & 0xf_ffff
        } else {
            path.flow_label & 0xf_ffff
        };
        #[allow(clippy::cast_possible_truncation)]
        let low = ((label & 0x3fff) ^ (label >> 14)) as u16;
        PathSpec {
            local: self.local,
            remote: path.remote,
            src_port: 0xc000 | low,
            tos: path.traffic_class,
            ttl: path.hop_limit,
            flow_label: path.flow_label,
        }
    }

    fn connect_to(&self, peer: &Endpoint, options: &ConnectOptions) -> Result<(), VerbsError> {
        let mtu = options.mtu.unwrap_or(self.ctx.active_mtu).min(self.ctx.active_mtu).min(peer.mtu);
        let rtr = QpAttr {
            state: Some(QpState::Rtr),
            path_mtu: Some(mtu),
            dest_qpn: Some(peer.qpn),
            rq_psn: Some(peer.psn),
            max_dest_rd_atomic: Some(options.max_dest_rd_atomic),
            min_rnr_timer: Some(options.min_rnr_timer),
            ..QpAttr::default()
        };
        let path = PeerPath {
            remote: peer.address,
            traffic_class: options.traffic_class,
            hop_limit: options.hop_limit,
            flow_label: 0,
            budget: peer.budget,
        };
        let rts = QpAttr {
            state: Some(QpState::Rts),
            sq_psn: Some(self.psn),
            max_rd_atomic: Some(options.max_rd_atomic),
            retry_cnt: Some(options.retry_cnt),
            rnr_retry: Some(options.rnr_retry),
            timeout: Some(options.timeout),
            ..QpAttr::default()
        };
        self.modify(&ModifyAttr { attr: rtr, path: Some(path) })?;
        if let Err(error) = self.modify(&ModifyAttr { attr: rts, path: None }) {
            self.modify(&ModifyAttr::state(QpState::Reset))?;
            self.modify(&ModifyAttr::init(self.access))?;
            return Err(error);
        }
        Ok(())
    }

    /// State, attributes and capabilities (`ibv_query_qp(3)`).
    #[must_use]
    pub fn query(&self) -> (QpState, QpAttr, QpCaps) {
        let shard = self.ctx.core.shard.lock();
        let (state, attr, _) = shard.engine.query_qp(self.qpn).unwrap_or((
            QpState::Err,
            QpAttr::default(),
            self.bare_init(),
        ));
        (state, attr, self.shared.caps)
    }

    fn bare_init(&self) -> QpInit {
        QpInit {
            pd: self._pd.id(),
            send_cq: self._cqs.0.id(),
            recv_cq: self._cqs.1.id(),
            max_send_wr: 0,
            max_recv_wr: 0,
            max_send_sge: 0,
            max_recv_sge: 0,
            max_inline_data: 0,
            sq_sig_all: false,
            cookie: u64::from(self.cookie),
        }
    }

    /// The state.
    #[must_use]
    pub fn state(&self) -> QpState {
        self.query().0
    }

    /// Posts send requests in order (`ibv_post_send(3)`), and sends what can be sent at once. Returns before they are done:
    /// a completion says when, and until then the memory they name must stay registered.
    ///
    /// # Errors
    /// [`PostListError`] names the first request that was not posted; those before it are on their way.
    pub fn post_send(&self, list: &[SendWr<'_>]) -> Result<(), PostListError> {
        self.ctx.core.touch();
        let mut front = self.shared.front.lock();
        let mut failed = None;
        if let Some(mut guard) = self.ctx.core.shard.try_lock() {
            let shard = &mut *guard;
            front.give(self.qpn, shard);
            let urgent = !shard.engine.is_busy(self.qpn);
            for (index, wr) in list.iter().enumerate() {
                let posted = self
                    .shared
                    .check_send(&front, wr)
                    .and_then(|()| shard.engine.post_send(self.qpn, wr, &mut shard.host));
                if let Err(error) = posted {
                    failed = Some(PostListError { index, error });
                    break;
                }
                front.sends += 1;
                shard.deferred += 1;
            }
            drop(front);
            self.ctx.core.take_staged(shard);
            if urgent || shard.deferred >= DEFER {
                let now = shard.now();
                shard.transmit(now);
            }
            shard.deliver();
            if self.ctx.core.release(guard) {
                self.ctx.core.drive();
            }
        } else {
            for (index, wr) in list.iter().enumerate() {
                if let Err(error) = self.shared.check_send(&front, wr) {
                    failed = Some(PostListError { index, error });
                    break;
                }
                front.stage_send(wr);
                front.sends += 1;
            }
            self.leave(front);
        }
        failed.map_or(Ok(()), Err)
    }

    /// Posts receive requests in order (`ibv_post_recv(3)`).
    ///
    /// # Errors
    /// [`PostListError`] names the first request that was not posted; those before it were.
    pub fn post_recv(&self, list: &[RecvWr<'_>]) -> Result<(), PostListError> {
        let mut front = self.shared.front.lock();
        let mut failed = None;
        if let Some(mut guard) = self.ctx.core.shard.try_lock() {
            let shard = &mut *guard;
            front.give(self.qpn, shard);
            for (index, wr) in list.iter().enumerate() {
                let posted = self
                    .shared
                    .check_recv(&front, wr)
                    .and_then(|()| shard.engine.post_recv(self.qpn, wr, &mut shard.host));
                if let Err(error) = posted {
                    failed = Some(PostListError { index, error });
                    break;
                }
                front.recvs += 1;
            }
            drop(front);
            shard.deliver();
            if self.ctx.core.release(guard) {
                self.ctx.core.drive();
            }
        } else {
            for (index, wr) in list.iter().enumerate() {
                if let Err(error) = self.shared.check_recv(&front, wr) {
                    failed = Some(PostListError { index, error });
                    break;
                }
                front.stage_recv(wr);
                front.recvs += 1;
            }
            self.leave(front);
        }
        failed.map_or(Ok(()), Err)
    }

    /// Somebody else drives: leaves the staged requests to them.
    fn leave(&self, mut front: parking_lot::MutexGuard<'_, Front>) {
        let listed = std::mem::replace(&mut front.listed, true);
        drop(front);
        if !listed {
            self.ctx.core.leave(&self.shared);
        }
        self.ctx.core.drive();
    }

    /// Destroys the queue pair (`ibv_destroy_qp(3)`); the same as dropping it.
    pub fn destroy(self) {}
}

/// Requests that are gathered at most before they are sent, while others are on their way and will make the device be
/// driven again.
const DEFER: u32 = 32;

impl Drop for Qp {
    fn drop(&mut self) {
        let mut shard = self.ctx.core.shard.lock();
        let gone: Result<(), ModifyError> = shard.engine.destroy_qp(self.qpn);
        debug_assert!(gone.is_ok());
        shard.host.qps.remove(self.cookie);
        if let Some(path) = self.path.lock().take() {
            shard.remove_path(path);
        }
        let _ = self.ctx.core.release(shard);
    }
}
