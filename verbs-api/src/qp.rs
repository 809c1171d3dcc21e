//! Queue pairs: connect, query, post.

mod builder;
mod groups;

use std::sync::Weak;

use rocinante_kernel as kernel;
use rocinante_soft as soft;
use rocinante_soft::model::endpoint::Endpoint;
use rocinante_soft::model::error::VerbsError;
use rocinante_soft::model::qp::{ConnectOptions, ModifyAttr, PeerPath, PostListError, QpCaps};
use rocinante_soft::provider::manager::Breaks;
use rocinante_soft::provider::trace;
use rocinante_stack::mem::Access;
use rocinante_stack::stats::LimitsHit;
use rocinante_stack::stats::QpCounters;
use rocinante_stack::types::{Psn, Qpn};
use rocinante_stack::verbs::{QpState, QpType, RecvWr, SendWr};
use rocinante_stack::{PostError, QpAttr};

pub use self::builder::{PreparedQp, QpBuilder};
use crate::context::Pd;
use crate::cq::Cq;
use crate::srq::Srq;

/// A queue pair. Any thread may call any method.
///
/// Dropping it destroys it: outstanding requests never complete, and the peer runs into its
/// timeout.
#[derive(Debug)]
pub struct Qp {
    pub(crate) kind: QpKind,
    sgid_index: u16,
    /// The address that was at that index, among those with which the device was opened.
    local: u16,
    psn: Psn,
    qp_type: QpType,
    peers: Peers,
    // Declared after the queue pair, because fields drop in this order and the queue pair uses
    // these.
    srq: Option<Srq>,
    cqs: (Cq, Cq),
    pd: Pd,
}

/// The accesses that peers have, from INIT on.
#[derive(Debug, Clone, Copy)]
enum Peers {
    /// The connected peer has these rights.
    Access(Access),
    /// All peers that know this Q_Key may send.
    Qkey(u32),
}

impl Peers {
    /// The change from RESET to INIT.
    fn init(self) -> ModifyAttr {
        match self {
            Self::Access(access) => ModifyAttr::init(access),
            Self::Qkey(qkey) => ModifyAttr::init_datagram(qkey),
        }
    }
}

#[derive(Debug)]
pub(crate) enum QpKind {
    Soft(soft::Qp),
    // Boxed, so that a queue pair in software takes no room for it.
    Kernel(Box<kernel::Qp>),
}

impl Qp {
    /// Its number.
    #[must_use]
    pub fn qpn(&self) -> Qpn {
        match &self.kind {
            QpKind::Soft(qp) => qp.qpn(),
            QpKind::Kernel(qp) => qp.qpn(),
        }
    }

    /// The shard of the device that it lives on (see
    /// [`OpenOptions::shards`](crate::OpenOptions::shards)); 0 for a device of the kernel.
    #[must_use]
    pub fn shard(&self) -> usize {
        match &self.kind {
            QpKind::Soft(qp) => qp.shard(),
            QpKind::Kernel(_) => 0,
        }
    }

    /// Its transport service.
    #[must_use]
    pub fn qp_type(&self) -> QpType {
        self.qp_type
    }

    /// The facts that the peer needs to connect, or to send datagrams.
    #[must_use]
    pub fn endpoint(&self) -> Endpoint {
        let device = self.pd.device();
        let (budget, queue) = device.advertised();
        let address = device.gids()[usize::from(self.local)];
        let endpoint = Endpoint::new(address, self.qpn(), self.psn, device.active_mtu());
        endpoint.budget(budget).queue(queue)
    }

    /// Changes attributes and state (`ibv_modify_qp(3)`).
    ///
    /// # Errors
    /// [`VerbsError::Modify`] names an attribute that is missing, not allowed or out of range, or a
    /// state that does not follow; [`VerbsError::Path`] if there is no path to the peer;
    /// [`VerbsError::Invalid`] if a limit of the device is exceeded; [`VerbsError::Hardware`] if
    /// the kernel's device refuses.
    pub fn modify(&self, change: &ModifyAttr) -> Result<(), VerbsError> {
        self.check_limits(&change.attr)?;
        match &self.kind {
            QpKind::Soft(qp) => qp.modify(change),
            QpKind::Kernel(qp) => qp.modify(change),
        }?;
        trace::state(self.qpn(), change.attr.state);
        Ok(())
    }

    fn check_limits(&self, attr: &QpAttr) -> Result<(), VerbsError> {
        let max = self.pd.device().limits().max_qp_rd_atom;
        for (name, wanted) in
            [("max_rd_atomic", attr.max_rd_atomic), ("max_dest_rd_atomic", attr.max_dest_rd_atomic)]
        {
            if wanted.is_some_and(|wanted| u32::from(wanted) > max) {
                let why = format!("{name} is too large: the device takes {max} at most");
                return Err(VerbsError::Invalid(why));
            }
        }
        Ok(())
    }

    /// The queues of its sends and of its receives.
    pub(crate) fn cqs(&self) -> [&Cq; 2] {
        [&self.cqs.0, &self.cqs.1]
    }

    /// Its device.
    pub(crate) fn device(&self) -> &crate::device::Device {
        self.pd.device()
    }

    /// The queue pair as the connection manager breaks it. The device in software finds it by its
    /// number.
    pub(crate) fn breaks(&self) -> Option<Weak<dyn Breaks>> {
        match &self.kind {
            QpKind::Soft(_) => None,
            QpKind::Kernel(qp) => Some(qp.breaks()),
        }
    }

    /// Through RTR to RTS. `psns` are the first PSN to send and the first PSN to receive.
    fn connect_to(
        &self,
        peer: &Endpoint,
        psns: (Psn, Psn),
        options: &ConnectOptions,
    ) -> Result<(), VerbsError> {
        if self.qp_type == QpType::Ud {
            let why =
                "a queue pair for datagrams has no peer: make it ready instead of connecting it";
            return Err(VerbsError::Invalid(why.into()));
        }
        let reliable = self.qp_type == QpType::Rc;
        let own = self.pd.device().active_mtu();
        let mtu = options.mtu.unwrap_or(own).min(own).min(peer.mtu);
        let rtr = QpAttr {
            state: Some(QpState::Rtr),
            path_mtu: Some(mtu),
            dest_qpn: Some(peer.qpn),
            rq_psn: Some(psns.1),
            max_dest_rd_atomic: reliable.then_some(options.max_dest_rd_atomic),
            min_rnr_timer: reliable.then_some(options.min_rnr_timer),
            ..QpAttr::default()
        };
        let path = PeerPath::to(peer)
            .sgid_index(self.sgid_index.into())
            .traffic_class(options.traffic_class)
            .hop_limit(options.hop_limit);
        let rts = QpAttr {
            state: Some(QpState::Rts),
            sq_psn: Some(psns.0),
            max_rd_atomic: reliable.then_some(options.max_rd_atomic),
            retry_cnt: reliable.then_some(options.retry_cnt),
            rnr_retry: reliable.then_some(options.rnr_retry),
            timeout: reliable.then_some(options.timeout),
            ..QpAttr::default()
        };
        // Before anything has changed: on the way back from RTR, receives that are posted get lost.
        self.check_limits(&rts)?;
        rts.check(self.qp_type, QpState::Rtr).map_err(VerbsError::Modify)?;
        self.bring_up(&ModifyAttr { attr: rtr, path: Some(path) }, rts)
    }

    fn make_ready(&self) -> Result<(), VerbsError> {
        if self.qp_type != QpType::Ud {
            let why = "only a queue pair for datagrams is ready without a peer: connect it";
            return Err(VerbsError::Invalid(why.into()));
        }
        let to = |state| QpAttr { state: Some(state), ..QpAttr::default() };
        let rts = QpAttr { sq_psn: Some(self.psn), ..to(QpState::Rts) };
        self.bring_up(&ModifyAttr { attr: to(QpState::Rtr), path: None }, rts)
    }

    /// From INIT to RTS. If RTS fails, the queue pair goes back to INIT, without its receives.
    fn bring_up(&self, rtr: &ModifyAttr, rts: QpAttr) -> Result<(), VerbsError> {
        self.modify(rtr)?;
        if let Err(error) = self.modify(&ModifyAttr { attr: rts, path: None }) {
            self.modify(&ModifyAttr::state(QpState::Reset))?;
            self.modify(&self.peers.init())?;
            return Err(error);
        }
        Ok(())
    }

    /// State, attributes and capabilities (`ibv_query_qp(3)`).
    #[must_use]
    pub fn query(&self) -> (QpState, QpAttr, QpCaps) {
        match &self.kind {
            QpKind::Soft(qp) => qp.query(),
            QpKind::Kernel(qp) => qp.query(),
        }
    }

    /// Its counters since it was made; `None` for a device of the kernel (`rdma statistic qp`
    /// reports them if the device can).
    #[must_use]
    pub fn counters(&self) -> Option<QpCounters> {
        match &self.kind {
            QpKind::Soft(qp) => Some(qp.counters()),
            QpKind::Kernel(_) => None,
        }
    }

    /// The reasons why it does not send: the number of turns that each limit ended, modulo 2^32. A
    /// queue pair that is limited by its program's posts counts
    /// [`Limit::SendQueueEmpty`](crate::stats::Limit::SendQueueEmpty). `None` for a device of the
    /// kernel.
    #[must_use]
    pub fn limits_hit(&self) -> Option<LimitsHit> {
        match &self.kind {
            QpKind::Soft(qp) => Some(qp.limits_hit()),
            QpKind::Kernel(_) => None,
        }
    }

    /// The state.
    #[must_use]
    pub fn state(&self) -> QpState {
        self.query().0
    }

    /// Posts send requests in order (`ibv_post_send(3)`), and sends at once those that may leave.
    /// It returns before they are done: a completion reports that. Until then the memory that they
    /// name must stay registered.
    ///
    /// # Errors
    /// [`PostListError`] names the first request that was not posted; those before it are posted.
    #[inline]
    pub fn post_send(&self, list: &[SendWr<'_>]) -> Result<(), PostListError> {
        match &self.kind {
            QpKind::Soft(qp) => qp.post_send(list),
            QpKind::Kernel(qp) => qp.post_send(list),
        }
    }

    /// Posts all send requests of a list, or none (`ibv_wr_complete(3)`): as
    /// [`post_send`](Self::post_send), but checks all before it posts the first.
    ///
    /// # Errors
    /// [`PostListError`] names the first request that cannot be posted. A device of the kernel may
    /// have posted those before it.
    pub fn post_send_all(&self, list: &[SendWr<'_>]) -> Result<(), PostListError> {
        match &self.kind {
            QpKind::Soft(qp) => qp.post_send_all(list),
            QpKind::Kernel(qp) => qp.post_send(list),
        }
    }

    /// Posts one send request: as [`post_send`](Self::post_send).
    ///
    /// # Errors
    /// [`PostError`]: why it was not posted.
    #[inline]
    pub fn post(&self, wr: SendWr<'_>) -> Result<(), PostError> {
        self.post_send(&[wr]).map_err(|refused| refused.error)
    }

    /// Posts receive requests in order (`ibv_post_recv(3)`).
    ///
    /// # Errors
    /// [`PostListError`] names the first request that was not posted; those before it are posted. A
    /// queue pair with a shared receive queue takes none: see [`Srq::post_recv`].
    #[inline]
    pub fn post_recv(&self, list: &[RecvWr<'_>]) -> Result<(), PostListError> {
        if self.srq.is_some() && !list.is_empty() {
            return Err(PostListError { index: 0, error: PostError::Shared });
        }
        match &self.kind {
            QpKind::Soft(qp) => qp.post_recv(list),
            QpKind::Kernel(qp) => qp.post_recv(list),
        }
    }

    /// The shared receive queue, if it uses one.
    #[must_use]
    pub fn srq(&self) -> Option<&Srq> {
        self.srq.as_ref()
    }

    /// Destroys the queue pair (`ibv_destroy_qp(3)`); the same as dropping it. Its completions
    /// leave their queues, as they do when it is reset; a device of the kernel decides for itself.
    pub fn destroy(self) {}
}
