//! Queue pairs of the engine.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;
use rocinante_netdev::PathSpec;
use rocinante_stack::stats::{LimitsHit, QpCounters};
use rocinante_stack::types::Qpn;
use rocinante_stack::verbs::{QpState, QpType, RecvWr, SendWr};
use rocinante_stack::{ModifyError, PostError, QpAttr, QpInit};

use super::charge::Charge;
use super::faults::Verb;
use super::front::QpShared;
use super::progress::Core;
use super::{Counted, Cq, Device, Pd, Srq, ah};
use crate::model::error::VerbsError;
use crate::model::event::AsyncEvent;
use crate::model::qp::{ModifyAttr, PeerPath, PostListError, QpCaps, SendRules};
use crate::provider::memory::faults;
use crate::provider::random::random;

/// The attributes of a new queue pair.
#[derive(Debug)]
pub struct QpInitAttr<'a> {
    pub qp_type: QpType,
    pub send_cq: &'a Arc<Cq>,
    pub recv_cq: &'a Arc<Cq>,
    /// The shared receive queue in place of its own.
    pub srq: Option<&'a Srq>,
    pub caps: QpCaps,
    pub sq_sig_all: bool,
    /// The program's own value.
    pub context: u64,
    /// The shard that it lives on, if the program chose one.
    pub shard: Option<usize>,
}

/// A queue pair; dropping it destroys it.
#[derive(Debug)]
pub struct Qp {
    shared: Arc<QpShared>,
    pub(super) device: Arc<Device>,
    pub(super) core: Arc<Core>,
    // Polling these drives the shard.
    cqs: [Arc<Cq>; 2],
    pub(super) qpn: Qpn,
    cookie: u32,
    path: Mutex<Option<u32>>,
}

impl Qp {
    /// Makes a queue pair in the RESET state.
    pub fn create(pd: &Pd, attr: &QpInitAttr<'_>) -> Result<Self, VerbsError> {
        pd.admitted()?;
        faults::watch();
        let device = pd.device.clone();
        device.called(Verb::CreateQp)?;
        let random = random()?;
        let index = choose_shard(&device, attr)?;
        let core = device.shards.get(index).expect("chosen among them").clone();
        let most = ("queue pairs", device.limits.max_qp);
        let counted = Counted::new(&device, |hca| &hca.qps, most)?;
        let charge = Charge::object(device.hca())?;
        let mut guard = core.hold();
        let shard = &mut *guard;
        let mut qpn = None;
        let cookie = shard.host.qps.insert(|cookie| {
            qpn = shard.engine.create_qp(&engine_init(pd, attr, cookie), random);
            let rules =
                SendRules { caps: attr.caps, qp_type: attr.qp_type, mtu: device.active_mtu };
            let judged = [Verb::PostSend, Verb::PostRecv].map(|verb| device.judges(verb));
            Arc::new(QpShared::new(qpn.unwrap_or_default(), rules).judged(judged))
        });
        let Some(qpn) = qpn else {
            shard.host.qps.remove(cookie);
            return Err(VerbsError::Limit {
                what: "queue pairs",
                max: u64::from(shard.engine.config().max_qp),
            });
        };
        let shared = shard.host.qps.get(cookie).expect("just inserted").clone();
        shard.router.staging.joined(shard.host.qps.len(), shared.backlog_max());
        drop(guard);
        let cqs = [attr.send_cq, attr.recv_cq].map(Arc::clone);
        cqs.iter().for_each(|cq| cq.used_by(index));
        let path = Mutex::new(None);
        counted.keep();
        charge.keep();
        Ok(Self { shared, device, core, cqs, qpn, cookie, path })
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The shard that it lives on.
    pub fn shard(&self) -> usize {
        self.device.shards.number_of(self.qpn)
    }

    pub fn qpn(&self) -> Qpn {
        self.qpn
    }

    pub fn modify(&self, change: &ModifyAttr) -> Result<(), VerbsError> {
        self.device.called(Verb::ModifyQp)?;
        let mut attr = change.attr;
        // Such a packet is lost, or never finds room (AF_XDP) and blocks all others behind it.
        if let Some(mtu) = attr.path_mtu.filter(|mtu| *mtu > self.device.active_mtu) {
            return Err(VerbsError::Invalid(format!(
                "a path MTU of {} does not fit the link, which carries {}: raise the link's MTU before the device is opened, or choose less",
                mtu.bytes(),
                self.device.active_mtu.bytes()
            )));
        }
        let local = change.path.map(|path| self.device.local(path.sgid_index)).transpose()?;
        let mut guard = self.core.hold();
        guard.settle(self.qpn);
        guard.take_staged();
        let shard = &mut *guard;
        match attr.state {
            Some(QpState::Err | QpState::Reset) => shard.send_last(Some(self.qpn)),
            _ => shard.send_waiting(),
        }
        let mut added = None;
        if let (Some(path), Some(local)) = (&change.path, local) {
            let known = || shard.engine.query_qp(self.qpn).and_then(|(_, is, _)| is.dest_qpn);
            let spec = self.path_spec(local, path, attr.dest_qpn.or_else(known));
            let id = shard.io.add_path(&spec).map_err(VerbsError::Path)?;
            added = Some(id);
            attr.peer = Some(self.device.peer_at(local, path, id));
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
        self.shared.state.set(state);
        if attr.state == Some(QpState::Reset) && result.is_ok() {
            shard.host.regions.free_windows(self.qpn);
            self.shared.forget_posted();
        }
        shard.send_waiting();
        shard.deliver();
        if attr.state == Some(QpState::Reset) && result.is_ok() {
            self.cqs.iter().for_each(|cq| cq.forget(self.qpn));
        }
        result.map_err(VerbsError::Modify)
    }

    /// The source port depends on the queue pair's number, which spreads connections, and on the
    /// destination's, so that a receiver never merges packets of two owners (the formula of
    /// rdma_get_udp_sport in Linux).
    fn path_spec(&self, local: IpAddr, path: &PeerPath, dest: Option<Qpn>) -> PathSpec {
        let dest = dest.unwrap_or_default().value();
        let product = u64::from(self.qpn.value()) * u64::from(dest);
        let folded = (product ^ (product >> 20) ^ (product >> 40)) as u32;
        ah::spec(local, path, folded & 0xf_ffff)
    }

    pub fn query(&self) -> (QpState, QpAttr, QpCaps) {
        let mut shard = self.core.hold();
        shard.settle(self.qpn);
        let (state, attr) = shard
            .engine
            .query_qp(self.qpn)
            .map_or((QpState::Err, QpAttr::default()), |(state, attr, _)| (state, attr));
        (state, attr, self.shared.caps())
    }

    /// Whether it is in SQD, and requests that were begun are not done.
    pub fn is_draining(&self) -> bool {
        self.core.hold().engine.is_draining(self.qpn)
    }

    pub fn counters(&self) -> QpCounters {
        self.core.hold().engine.qp_counters(self.qpn).unwrap_or_default()
    }

    pub fn limits_hit(&self) -> LimitsHit {
        self.core.hold().engine.qp_limits_hit(self.qpn).unwrap_or_default()
    }

    #[inline]
    pub fn post_send(&self, list: &[SendWr<'_>]) -> Result<(), PostListError> {
        let shared = &self.shared;
        match shared.post_send(&self.core, list, shared.most_sends()) {
            Ok(()) => Ok(()),
            Err(refused) => self.post_again(refused, Verb::PostSend, |most| {
                shared.post_send(&self.core, list, most)
            }),
        }
    }

    pub fn post_send_all(&self, list: &[SendWr<'_>]) -> Result<(), PostListError> {
        let shared = &self.shared;
        match shared.post_send_all(&self.core, list, shared.most_sends()) {
            Ok(()) => Ok(()),
            Err(refused) => self.post_again(refused, Verb::PostSend, |most| {
                shared.post_send_all(&self.core, list, most)
            }),
        }
    }

    /// Posts a refused list `again` if a fault had yet to decide on the call, or if the queue pair
    /// has broken since.
    #[cold]
    fn post_again(
        &self,
        mut refused: PostListError,
        verb: Verb,
        again: impl Fn(u32) -> Result<(), PostListError>,
    ) -> Result<(), PostListError> {
        let caps = self.shared.caps();
        let most = if verb == Verb::PostSend { caps.max_send_wr } else { caps.max_recv_wr };
        if refused.error == PostError::Full && self.device.judges(verb) {
            if let Some(errno) = self.device.fails(verb) {
                return Err(PostListError { index: 0, error: PostError::Refused(errno) });
            }
            match again(most) {
                Ok(()) => return Ok(()),
                Err(error) => refused = error,
            }
        }
        if self.has_broken(refused) { again(most) } else { Err(refused) }
    }

    /// Whether a list was refused for a state that takes no requests, and the queue pair has broken
    /// since it came to that state: now it takes them, and flushes them.
    fn has_broken(&self, refused: PostListError) -> bool {
        if refused != (PostListError { index: 0, error: PostError::State }) {
            return false;
        }
        let shard = self.core.hold();
        let state = shard.engine.query_qp(self.qpn).map(|(state, ..)| state);
        let broken = state.filter(|state| *state == QpState::Err);
        broken.inspect(|state| self.shared.state.set(*state)).is_some()
    }

    #[inline]
    pub fn post_recv(&self, list: &[RecvWr<'_>]) -> Result<(), PostListError> {
        let shared = &self.shared;
        match shared.post_recv(&self.core, list, shared.most_recvs()) {
            Ok(()) => Ok(()),
            Err(refused) => self.post_again(refused, Verb::PostRecv, |most| {
                shared.post_recv(&self.core, list, most)
            }),
        }
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        self.cqs.iter().for_each(|cq| cq.left_by(self.shard()));
        let mut shard = self.core.hold();
        // Requests that were staged while another thread held the shard leave as well.
        shard.take_staged();
        self.shared.front.lock().clear();
        shard.send_last(Some(self.qpn));
        self.detach_all(&mut shard);
        let gone: Result<(), ModifyError> = shard.engine.destroy_qp(self.qpn);
        debug_assert!(gone.is_ok());
        shard.host.regions.free_windows(self.qpn);
        shard.host.qps.remove(self.cookie);
        shard.deliver();
        self.cqs.iter().for_each(|cq| cq.forget(self.qpn));
        if let Some(path) = self.path.lock().take() {
            shard.remove_path(path);
        }
        self.device.qps.fetch_sub(1, Ordering::Relaxed);
        self.device.refund_object();
        // The number will be reused.
        self.device
            .events
            .forget(|event| matches!(event, AsyncEvent::Qp { qpn, .. } if *qpn == self.qpn));
    }
}

/// The program's choice, or the shard of the shared receive queue; else the shards in turn.
fn choose_shard(device: &Device, attr: &QpInitAttr<'_>) -> Result<usize, VerbsError> {
    let count = device.shards.count();
    match (attr.shard, attr.srq.map(Srq::shard)) {
        (Some(wanted), _) if wanted >= count => Err(VerbsError::Invalid(format!(
            "there is no shard {wanted}: the device has {count}, counted from 0"
        ))),
        (Some(wanted), Some(srq)) if wanted != srq => Err(VerbsError::Invalid(format!(
            "the shared receive queue is on shard {srq}, so its queue pairs are, too, and not on {wanted}"
        ))),
        (Some(shard), _) | (None, Some(shard)) => Ok(shard),
        (None, None) => Ok(device.next_shard()),
    }
}

fn engine_init(pd: &Pd, attr: &QpInitAttr<'_>, cookie: u32) -> QpInit {
    QpInit {
        qp_type: attr.qp_type,
        pd: pd.id,
        send_cq: attr.send_cq.id(),
        recv_cq: attr.recv_cq.id(),
        srq: attr.srq.map(Srq::id),
        max_send_wr: attr.caps.max_send_wr,
        max_recv_wr: attr.caps.max_recv_wr,
        max_send_sge: attr.caps.max_send_sge,
        max_recv_sge: attr.caps.max_recv_sge,
        max_inline_data: attr.caps.max_inline_data,
        sq_sig_all: attr.sq_sig_all,
        cookie,
        context: attr.context,
    }
}
