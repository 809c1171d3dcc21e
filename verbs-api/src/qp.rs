//! Queue pairs: connected, asked, posted to.

mod attr;
mod builder;
mod front;

use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use rocinante_netdev::PathSpec;
use rocinante_stack::mem::Access;
use rocinante_stack::types::{Psn, Qpn};
use rocinante_stack::verbs::{QpState, RecvWr, SendWr};
use rocinante_stack::{ModifyError, PeerAddress, QpAttr, QpInit};

pub use self::attr::{ConnectOptions, ModifyAttr, PeerPath, PostListError, QpCaps};
pub use self::builder::{PreparedQp, QpBuilder};
use self::front::Front;
pub(crate) use self::front::QpShared;
use crate::context::{ContextInner, Pd};
use crate::cq::Cq;
use crate::error::VerbsError;
use crate::exchange::Endpoint;

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
    /// each other; [`VerbsError::Path`] that there is no way to the peer; [`VerbsError::Invalid`] that a limit of the
    /// device is exceeded.
    pub fn modify(&self, change: &ModifyAttr) -> Result<(), VerbsError> {
        let mut attr = change.attr;
        self.check_limits(&attr)?;
        let mut guard = self.ctx.core.hold();
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
            self.shared.forget_posted();
        }
        let now = shard.now();
        shard.transmit(now);
        shard.deliver();
        result.map_err(VerbsError::Modify)
    }

    fn check_limits(&self, attr: &QpAttr) -> Result<(), VerbsError> {
        let max = self.ctx.limits.max_qp_rd_atom;
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
        let shard = self.ctx.core.hold();
        let (state, attr, _) = shard.engine.query_qp(self.qpn).unwrap_or((
            QpState::Err,
            QpAttr::default(),
            self.bare_init(),
        ));
        (state, attr, self.shared.caps())
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
            let busy = shard.engine.is_busy(self.qpn);
            let mut count = 0;
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
                count += 1;
            }
            drop(front);
            self.ctx.core.take_staged(shard);
            shard.posted(count, busy);
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

impl Drop for Qp {
    fn drop(&mut self) {
        let mut shard = self.ctx.core.hold();
        self.shared.forget_staged();
        let gone: Result<(), ModifyError> = shard.engine.destroy_qp(self.qpn);
        debug_assert!(gone.is_ok());
        shard.host.qps.remove(self.cookie);
        if let Some(path) = self.path.lock().take() {
            shard.remove_path(path);
        }
    }
}
