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
        on!(QpKind, &self.kind, qp => qp.qpn())
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

    /// The data that the peer needs to connect, or to send datagrams: address, QPN, the first PSN
    /// that it sends, path MTU, and the capacity of the device's receive queue.
    #[must_use]
    pub fn endpoint(&self) -> Endpoint {
        let device = self.pd.device();
        let (budget, queue) = device.advertised();
        let address = device.gids()[usize::from(self.local)];
        let endpoint = Endpoint::new(address, self.qpn(), self.psn, device.active_mtu());
        endpoint.budget(budget).queue(queue)
    }

    /// Changes attributes and state (`ibv_modify_qp(3)`, which has the tables of the attributes
    /// that each change needs; IBTA volume 1, 10.3.1). For most programs
    /// [`build`](QpBuilder::build) and [`PreparedQp::connect`] make the changes: from RESET to
    /// INIT, to RTR (it receives), to RTS (it sends, too). By hand they are:
    ///
    /// ```
    /// use std::net::IpAddr;
    /// use rocinante::verbs::{ModifyAttr, PeerPath, QpAttr, QpState};
    /// use rocinante::{Access, Context, VerbsError};
    ///
    /// fn main() -> Result<(), VerbsError> {
    ///     let [here, there] = [1, 2].map(|host| IpAddr::from([127, 0, 0, host]));
    /// #   let (here, there) = rocinante::doc::addresses();
    ///     let (a, b) = (Context::open(here)?, Context::open(there)?);
    ///     let (pd_a, pd_b) = (a.alloc_pd(), b.alloc_pd());
    ///     let (cq_a, cq_b) = (a.create_cq(16)?, b.create_cq(16)?);
    ///     let qp = pd_a.qp(&cq_a, &cq_a).build_reset()?;
    ///     let peer = pd_b.qp(&cq_b, &cq_b).build_reset()?.endpoint();
    ///
    ///     qp.modify(&ModifyAttr::init(Access::REMOTE_READ))?;
    ///     let rtr = QpAttr {
    ///         state: Some(QpState::Rtr),
    ///         path_mtu: Some(qp.endpoint().mtu.min(peer.mtu)),
    ///         dest_qpn: Some(peer.qpn),
    ///         rq_psn: Some(peer.psn), // The first that the peer sends.
    ///         max_dest_rd_atomic: Some(16),
    ///         min_rnr_timer: Some(12), // 0.64 ms
    ///         ..QpAttr::default()
    ///     };
    ///     qp.modify(&ModifyAttr { attr: rtr, path: Some(PeerPath::to(&peer)) })?;
    ///     let rts = QpAttr {
    ///         state: Some(QpState::Rts),
    ///         sq_psn: Some(qp.endpoint().psn), // The peer's `rq_psn`.
    ///         max_rd_atomic: Some(16),
    ///         retry_cnt: Some(7),
    ///         rnr_retry: Some(7),
    ///         timeout: Some(14), // 4.096 µs · 2^14 = 67 ms
    ///         ..QpAttr::default()
    ///     };
    ///     qp.modify(&ModifyAttr { attr: rts, path: None })?;
    ///     assert_eq!(qp.state(), QpState::Rts);
    ///
    ///     // Back, for another peer: posted requests and their completions are gone.
    ///     qp.modify(&ModifyAttr::state(QpState::Reset))?;
    ///     Ok(())
    /// }
    /// ```
    ///
    /// # Errors
    /// [`VerbsError::Modify`] names an attribute that is missing, not allowed or out of range, or a
    /// state that does not follow; [`VerbsError::Path`] if there is no path to the peer;
    /// [`VerbsError::Invalid`] if a limit of the device is exceeded; [`VerbsError::Hardware`] if
    /// the kernel's device refuses.
    pub fn modify(&self, change: &ModifyAttr) -> Result<(), VerbsError> {
        self.check_limits(&change.attr)?;
        on!(QpKind, &self.kind, qp => qp.modify(change))?;
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
        let own = self.pd.device().active_mtu();
        let mtu = options.mtu.unwrap_or(own).min(own).min(peer.mtu);
        let attr = QpAttr {
            path_mtu: Some(mtu),
            dest_qpn: Some(peer.qpn),
            rq_psn: Some(psns.1),
            max_dest_rd_atomic: Some(options.max_dest_rd_atomic),
            min_rnr_timer: Some(options.min_rnr_timer),
            sq_psn: Some(psns.0),
            max_rd_atomic: Some(options.max_rd_atomic),
            retry_cnt: Some(options.retry_cnt),
            rnr_retry: Some(options.rnr_retry),
            timeout: Some(options.timeout),
            ..QpAttr::default()
        };
        let [_, rtr, rts] = attr.steps(self.qp_type);
        let path = PeerPath::to(peer)
            .sgid_index(self.sgid_index.into())
            .traffic_class(options.traffic_class)
            .hop_limit(options.hop_limit);
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
        let attr = QpAttr { sq_psn: Some(self.psn), ..QpAttr::default() };
        let [_, rtr, rts] = attr.steps(self.qp_type);
        self.bring_up(&ModifyAttr { attr: rtr, path: None }, rts)
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

    /// In this order (`ibv_query_qp(3)`): the state, the attributes, and the capabilities that the
    /// queue pair was made with.
    ///
    /// An attribute that was never set is `None`. In the states that send, `sq_psn` is the next PSN
    /// to send; in those of a connection that receive, `rq_psn` is the next PSN expected. A device
    /// that no longer answers makes the state [`QpState::Err`] and all attributes `None`.
    #[must_use]
    pub fn query(&self) -> (QpState, QpAttr, QpCaps) {
        on!(QpKind, &self.kind, qp => qp.query())
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

    /// Why it does not send more: the number of its turns that each limit ended, modulo 2^32.
    /// `None` for a device of the kernel.
    ///
    /// Queue pairs that have something to send take turns. A *turn* lasts until the queue pair may
    /// send nothing more, or has sent its share of packets, and counts at most one
    /// [`Limit`](crate::stats::Limit): the first that applied. The limit that counts most shows
    /// what holds the queue pair back:
    ///
    /// - the program: `SendQueueEmpty`, all posted requests have left; `Draining`, the state is
    ///   SQD; `Fence`; `RdAtomic`, `max_rd_atomic` READs and atomics are outstanding;
    /// - the peer: `Rnr` and `Credits`, too few receives; `PeerRoom`, its receive queue is full;
    /// - the network: `Recovering`, losses; `CongestionWindow`, `ReadWindow`, `Pacing`;
    /// - this device: `Turn`, other queue pairs; `Batch`, a super-packet that fills; `Port`, the
    ///   port takes no more packets; `AckRoom`, its own receive queue has no room for responses.
    ///
    /// ```
    /// use std::net::IpAddr;
    /// use rocinante::{Context, VerbsError};
    ///
    /// fn main() -> Result<(), VerbsError> {
    ///     let here = IpAddr::from([127, 0, 0, 1]);
    /// #   let (here, _) = rocinante::doc::addresses();
    ///     let ctx = Context::open(here)?;
    ///     let (pd, cq) = (ctx.alloc_pd(), ctx.create_cq(16)?);
    ///     let qp = pd.qp(&cq, &cq).build_reset()?;
    ///     for (limit, count) in qp.limits_hit().iter().flat_map(|hit| hit.iter()) {
    ///         println!("{}: {count}", limit.name());
    ///     }
    ///     Ok(())
    /// }
    /// ```
    #[must_use]
    pub fn limits_hit(&self) -> Option<LimitsHit> {
        match &self.kind {
            QpKind::Soft(qp) => Some(qp.limits_hit()),
            QpKind::Kernel(_) => None,
        }
    }

    /// The state, as [`query`](Self::query) returns it.
    #[must_use]
    pub fn state(&self) -> QpState {
        self.query().0
    }

    /// Posts send requests in order (`ibv_post_send(3)`), and sends at once those that may leave.
    /// It returns before they are done: a completion in its completion queue of sends reports
    /// that. Until then the memory that they name must stay registered, and belongs to the device.
    /// Inline data are copied. Requests are taken from RTS on, also in SQD; in SQE and ERR they
    /// complete with [`WrFlushErr`](crate::WcStatus::WrFlushErr).
    ///
    /// # Errors
    /// [`PostListError`] names the first request that was not posted; those before it are posted.
    #[inline]
    pub fn post_send(&self, list: &[SendWr<'_>]) -> Result<(), PostListError> {
        on!(QpKind, &self.kind, qp => qp.post_send(list))
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

    /// Posts receive requests in order (`ibv_post_recv(3)`), in any state but RESET. Each takes one
    /// message of the peer, and its completion comes to the completion queue of receives.
    ///
    /// # Errors
    /// [`PostListError`] names the first request that was not posted; those before it are posted. A
    /// queue pair with a shared receive queue takes none: see [`Srq::post_recv`].
    #[inline]
    pub fn post_recv(&self, list: &[RecvWr<'_>]) -> Result<(), PostListError> {
        if self.srq.is_some() && !list.is_empty() {
            return Err(PostListError { index: 0, error: PostError::Shared });
        }
        on!(QpKind, &self.kind, qp => qp.post_recv(list))
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
