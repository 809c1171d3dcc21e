//! The device in software: a shard for each port, and the contexts that share it.

use std::net::IpAddr;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rocinante_netdev::{self as netdev, AnyPort, Backend, Capabilities, Port, Slots};
use rocinante_stack::mem::PdId;
use rocinante_stack::types::{Mtu, Qpn, QueueKind};
use rocinante_stack::{Budget, PeerAddress, PeerKind};

use super::charge::{self, Charge};
use super::events::{Events, Inbox, Owner};
use super::exit;
use super::faults::{DeviceFaults, Verb};
use super::opens::Claim;
use super::rivals::{self, EmptyPolls};
use super::shard::Shard;
use super::shards::Shards;
use super::wishes::Settings;
use crate::model::device::{DeviceAttr, DeviceCounters, Limits, MwSupport, OptionalOperations};
use crate::model::error::VerbsError;
use crate::model::event::AsyncEvent;
use crate::model::qp::{PeerPath, QpInfo};
use crate::model::resources::Resources;
use crate::provider::sync::Mutex;
use crate::provider::wakers::Wakers;
use crate::provider::worker::Worker;

pub(super) fn counted(shard: &Shard) -> DeviceCounters {
    DeviceCounters {
        transport: *shard.engine.counters(),
        drops: *shard.engine.drops(),
        limits_hit: *shard.engine.limits_hit(),
        port: shard.io.port.stats(),
        refused: shard.io.refused(),
        handed_over: (shard.router.handed_over(), shard.router.lost_mail()),
    }
}

/// One opening of the device: a program's context. It lives as long as any of its objects.
pub struct Device {
    hca: Arc<Hca>,
    /// The asynchronous events of its objects.
    pub events: Arc<Inbox>,
    _charge: Charge,
}

impl Deref for Device {
    type Target = Hca;

    #[inline]
    fn deref(&self) -> &Hca {
        &self.hca
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.hca.events().leave(&self.events);
    }
}

/// The device itself: all contexts that the process has opened share it.
pub struct Hca {
    /// The thread of its faults, which ends before the shards do.
    _events: Option<Worker>,
    pub shards: Shards,
    faults: Option<Arc<DeviceFaults>>,
    empty_polls: EmptyPolls,
    /// Its slots, if it shares its addresses with other processes. After the shards, whose ports
    /// have them, too.
    pub(super) slots: Option<Arc<Slots>>,
    /// Its settings at the start.
    pub settings: Settings,
    pub limits: Limits,
    pub active_mtu: Mtu,
    /// The receive budget that peers learn: that of one shard.
    pub advertised: Budget,
    /// Its kind.
    pub queue: QueueKind,
    pub name: String,
    /// Why this backend was chosen, and the one that was named and a neighbour has.
    why: (String, Option<Backend>),
    pub capabilities: Capabilities,
    pub gids: Vec<IpAddr>,
    pub pds: AtomicU32,
    /// Protection domains and address handles of the C ABI, which announces limits of both.
    pub plain_pds: AtomicU32,
    pub plain_ahs: AtomicU32,
    /// Queue pairs.
    pub(super) qps: AtomicU32,
    /// Shared receive queues.
    pub(super) srqs: AtomicU32,
    /// The next shard for queue pairs without a chosen one.
    next: AtomicU32,
    /// Its entry among the open devices. This is the last field: the entry outlives the ports.
    _claim: Option<Arc<Claim>>,
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.hca.fmt(f)
    }
}

impl std::fmt::Debug for Hca {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hca")
            .field("name", &self.name)
            .field("backend", &self.capabilities.backend)
            .field("gids", &self.gids)
            .finish_non_exhaustive()
    }
}

impl Device {
    /// Opens the device. Its events go to `events`. `counts` says whether it is a context of the
    /// program's.
    ///
    /// # Errors
    /// The container has as many contexts as it may.
    pub fn new(hca: Arc<Hca>, events: Arc<Inbox>, counts: bool) -> Result<Arc<Self>, VerbsError> {
        let charge = Charge::context(hca.slots.as_ref(), counts)?;
        Ok(Self::charged(hca, events, charge))
    }

    /// As [`new`](Self::new), with the charge of the context.
    pub(super) fn charged(hca: Arc<Hca>, events: Arc<Inbox>, charge: Charge) -> Arc<Self> {
        hca.events().join(&events);
        // Events from before this context was there happened to it, too.
        if hca.is_broken() {
            let _ = events.push(AsyncEvent::DeviceFatal);
        }
        let device = Arc::new(Self { hca, events, _charge: charge });
        if let Some(faults) = &device.faults {
            faults.opened();
        }
        device
    }

    pub fn hca(&self) -> &Arc<Hca> {
        &self.hca
    }

    pub fn tasks(&self) -> &Wakers {
        &self.events.tasks
    }

    /// The GID table of this context: a hole is `None`.
    pub fn gid_table(&self) -> Vec<Option<IpAddr>> {
        self.events.gids().unwrap_or_else(|| self.gids.iter().copied().map(Some).collect())
    }

    /// The address that packets leave from, by its index.
    pub fn local(&self, sgid_index: usize) -> Result<IpAddr, VerbsError> {
        let invalid = |why| Err(VerbsError::Invalid(why));
        match self.gid_table().get(sgid_index) {
            None => invalid(format!("there is no GID index {sgid_index}")),
            Some(None) => invalid(format!("GID index {sgid_index} is a hole: its address is gone")),
            Some(Some(local)) if self.gids.contains(local) => Ok(*local),
            Some(Some(local)) => invalid(format!(
                "{} has {local} since it was opened, and cannot send from there: close all \
                 contexts of the device, and open it again",
                self.name
            )),
        }
    }

    /// Directs the events of an object to this context. Returns whether none has its number.
    pub(super) fn add_owner(&self, owner: Owner) -> bool {
        self.hca.events().add(owner, &self.events)
    }

    /// The object is gone, and its number will be reused: forgets its events.
    pub(super) fn remove_owner(&self, owner: Owner, is_of: impl Fn(&AsyncEvent) -> bool) {
        self.hca.events().remove(owner);
        self.events.forget(is_of);
    }
}

impl Hca {
    /// Starts a device with one shard per port.
    pub fn start(
        settings: &Settings,
        name: &str,
        (ports, slots): (Vec<AnyPort>, Option<Arc<Slots>>),
        why: (String, Option<Backend>),
        faults: Option<Arc<DeviceFaults>>,
        claim: Option<Claim>,
    ) -> Result<Arc<Self>, VerbsError> {
        let Some(first) = ports.first() else {
            return Err(VerbsError::Invalid("a device needs a port".into()));
        };
        let capabilities = first.capabilities().clone();
        let gids = first.addresses().to_vec();
        let budget = capabilities.rx_budget;
        let budget = Budget { bytes: budget.bytes, datagrams: budget.datagrams };
        let active_mtu = active_mtu(name, capabilities.link_mtu)?;
        // Three quarters for peers' own requests, one quarter for responses to ours.
        let (queue, count) = (queue_kind(&capabilities), ports.len());
        let own = (budget.part(1, 4), queue);
        let advertised = advertised(budget, capabilities.backend, count);
        let shards = (settings, name, ports, active_mtu);
        let claim = claim.map(Arc::new);
        let shards =
            Shards::start(shards, &why.0, own, advertised, (slots.as_ref(), claim.as_ref()))?;
        let mut events = None;
        if let Some(faults) = &faults {
            shards.hold_all().iter_mut().for_each(|shard| shard.meet(faults));
            events = faults.start(shards.all().cloned().collect())?;
        }
        let hca = Arc::new(Self {
            _events: events,
            shards,
            faults,
            empty_polls: EmptyPolls::default(),
            slots,
            settings: settings.clone(),
            limits: settings.limits,
            active_mtu,
            advertised,
            queue,
            name: name.to_owned(),
            why,
            capabilities,
            gids,
            pds: AtomicU32::new(1),
            plain_pds: AtomicU32::new(0),
            plain_ahs: AtomicU32::new(0),
            qps: AtomicU32::new(0),
            srqs: AtomicU32::new(0),
            next: AtomicU32::new(0),
            _claim: claim,
        });
        exit::watch(&hca);
        Ok(hca)
    }

    /// The errno of a call, if a fault has it fail.
    #[inline]
    pub(super) fn fails(&self, verb: Verb) -> Option<i32> {
        self.faults.as_ref()?.fails(verb)
    }

    /// Counts a call. Error: a fault makes it fail.
    #[inline]
    pub(super) fn called(&self, verb: Verb) -> Result<(), VerbsError> {
        self.fails(verb).map_or(Ok(()), |errno| Err(failed(errno)))
    }

    /// Whether some of these calls fail.
    pub(super) fn judges(&self, verb: Verb) -> bool {
        self.faults.as_ref().is_some_and(|faults| faults.judges(verb))
    }

    /// Whether completions meet faults.
    pub(super) fn judges_completions(&self) -> bool {
        self.faults.as_ref().is_some_and(|faults| faults.judges_completions())
    }

    /// Whether a fault has the port down.
    pub fn is_port_down(&self) -> bool {
        self.faults.as_ref().is_some_and(|faults| faults.is_port_down())
    }

    fn events(&self) -> &Events {
        &self.shards.first().events
    }

    /// Whether its interface is gone.
    pub(crate) fn is_broken(&self) -> bool {
        self.shards.all().any(|core| core.hold().io.is_broken())
    }

    /// The device's attributes.
    pub fn query(&self) -> DeviceAttr {
        DeviceAttr {
            port: Some(self.capabilities.clone()),
            active_mtu: self.active_mtu,
            chosen_because: self.why.0.clone(),
            instead_of: self.why.1,
            ..attributes(charge::least(self.limits, &self.quota()), self.shards.count())
        }
    }

    /// Whether a program that names this backend gets this device.
    pub fn is_taken_as(&self, backend: Backend) -> bool {
        backend == self.capabilities.backend || self.why.1 == Some(backend)
    }

    /// The shard of an object without a chosen one: the shards in turn.
    pub(super) fn next_shard(&self) -> usize {
        match self.shards.count() {
            1 => 0,
            count => self.next.fetch_add(1, Ordering::Relaxed) as usize % count,
        }
    }

    /// A peer as the engine of a shard gets it, at the end of the path `id`.
    pub(super) fn peer_at(&self, local: IpAddr, path: &PeerPath, id: u32) -> PeerAddress {
        let kind = PeerKind::announced(path.budget, path.queue);
        let mut budget = self.share_of(path.budget, kind);
        if self.gids.contains(&path.remote) {
            // It comes over loopback, whatever queue the peer has besides.
            let local = self.capabilities.local_budget;
            budget.bytes = budget.bytes.min(local.bytes / 4 * 3);
            budget.datagrams = budget.datagrams.min(local.datagrams / 4 * 3);
        }
        PeerAddress { local, remote: path.remote, path: id, budget, kind }
    }

    /// One shard's share of the budget that a peer announced: the other shards may send to the same
    /// queue, and none knows the packets that the others have in flight.
    pub fn share_of(&self, budget: Budget, peer: PeerKind) -> Budget {
        match peer {
            PeerKind::Standard => budget,
            #[allow(clippy::cast_possible_truncation, reason = "64 at most")]
            PeerKind::Rocinante(_) => budget.part(1, self.shards.count() as u32),
        }
    }

    pub fn counters(&self) -> DeviceCounters {
        let mut sum = DeviceCounters::default();
        for core in self.shards.all() {
            sum.add(&counted(&core.hold()));
        }
        sum
    }

    /// The counters, unless another thread holds a shard for `patience`.
    pub fn try_counters(&self, patience: Duration) -> Option<DeviceCounters> {
        let mut sum = DeviceCounters::default();
        for core in self.shards.all() {
            sum.add(&counted(&*core.shard.try_lock_for(patience)?));
        }
        Some(sum)
    }

    /// All queue pairs, of all contexts.
    pub fn qps(&self) -> Vec<QpInfo> {
        let mut all = Vec::new();
        for core in self.shards.all() {
            let shard = core.hold();
            all.extend(shard.host.qps.iter().filter_map(|qp| {
                let qpn = qp.qpn();
                let (state, attr, init) = shard.engine.query_qp(qpn)?;
                Some(QpInfo {
                    qpn,
                    qp_type: init.qp_type,
                    state,
                    peer: attr.peer.map(|peer| peer.remote),
                    dest_qpn: attr.dest_qpn,
                    peer_kind: shard.engine.peer_kind(qpn),
                    context: init.context,
                    counters: shard.engine.qp_counters(qpn)?,
                    limits_hit: shard.engine.qp_limits_hit(qpn)?,
                })
            }));
        }
        all
    }

    /// Where the peer of a queue pair is.
    #[cold]
    pub fn peer_of(&self, qpn: Qpn) -> Option<IpAddr> {
        let shard = self.shards.of_qpn(qpn)?.hold();
        let (_, attr, _) = shard.engine.query_qp(qpn)?;
        Some(attr.peer?.remote)
    }

    /// How long a packet of a queue pair waits for an ACK, with all retries; `None` if for ever.
    pub fn patience_of(&self, qpn: Qpn) -> Option<Duration> {
        let shard = self.shards.of_qpn(qpn)?.hold();
        let (_, attr, _) = shard.engine.query_qp(qpn)?;
        // IBTA 9.7.6.1.3, in units of 4.096 µs.
        let timeout = attr.timeout.filter(|exponent| (1..32).contains(exponent))?;
        Some(Duration::from_nanos(4096 << timeout) * (u32::from(attr.retry_cnt?) + 1))
    }

    pub fn resources(&self) -> Resources {
        let mut sum = Resources::default();
        for (index, core) in self.shards.all().enumerate() {
            let shard = core.hold();
            sum.qps += shard.engine.qp_count();
            sum.srqs += shard.engine.srq_count();
            sum.groups += shard.engine.group_count();
            sum.kept_qpns += shard.engine.reserved_qpns();
            sum.paths += shard.paths_of_queue_pairs();
            if index == 0 {
                // All shards have the same regions and completion queues.
                sum.mrs = shard.host.regions.len();
                sum.cqs = shard.host.cqs.len();
            }
        }
        let mut first = self.shards.first().hold();
        sum.connections = first.cm().len();
        sum.listeners = first.cm_owners.places();
        drop(first);
        sum.pds = self.events().pds();
        sum
    }

    pub fn background_rounds(&self) -> u64 {
        self.shards.all().map(|core| core.rounds.load(Ordering::Relaxed)).sum()
    }

    pub fn progress(&self) {
        const ALL: u64 = u64::MAX;
        if self.shards.drive(ALL) {
            self.empty_polls.found();
        } else if let Some(until) = self.empty_polls.missed() {
            rivals::with_bell(|_, fd| self.shards.rest(ALL, fd, until));
        }
    }
}

/// The error of a call that a fault has fail.
fn failed(errno: i32) -> VerbsError {
    VerbsError::Io(std::io::Error::from_raw_os_error(errno))
}

/// The attributes of every device of `shards` shards, on any backend. It knows no persistent
/// memory.
pub fn attributes(limits: Limits, shards: usize) -> DeviceAttr {
    let has_windows = shards == 1;
    DeviceAttr {
        limits: limits.max_mw(limits.max_mr),
        windows: MwSupport { type_1: has_windows, type_2a: false, type_2b: has_windows },
        optional: OptionalOperations {
            flush_global: true,
            flush_persistent: false,
            atomic_write: true,
        },
        port: None,
        hardware: None,
        active_mtu: Mtu::Mtu256,
        chosen_because: String::new(),
        instead_of: None,
    }
}

/// One of the objects of a device of which there is a most. It counts until it is dropped.
pub struct Counted {
    /// `None` once it was [kept](Self::keep).
    device: Option<Arc<Device>>,
    of: fn(&Hca) -> &AtomicU32,
}

impl std::fmt::Debug for Counted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Counted").finish_non_exhaustive()
    }
}

impl Counted {
    pub fn new(
        device: &Arc<Device>,
        of: fn(&Hca) -> &AtomicU32,
        (what, max): (&'static str, u32),
    ) -> Result<Self, VerbsError> {
        let room = |count| (count < max).then_some(count + 1);
        match of(device).fetch_update(Ordering::Relaxed, Ordering::Relaxed, room) {
            Ok(_) => Ok(Self { device: Some(device.clone()), of }),
            Err(_) => Err(VerbsError::Limit { what, max: max.into() }),
        }
    }

    /// It counts until its object takes it back. Queue pairs do, to be smaller.
    pub(super) fn keep(mut self) {
        self.device = None;
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        if let Some(device) = &self.device {
            (self.of)(device).fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// The largest path MTU that fits a link.
pub fn active_mtu(name: &str, link_mtu: u32) -> Result<Mtu, VerbsError> {
    let none = || format!("{name} has an MTU of {link_mtu} bytes: RoCE needs 336");
    Mtu::for_link(link_mtu).ok_or_else(|| VerbsError::Invalid(none()))
}

/// A shard's announcement of its receive queue: three quarters, because the rest is for responses.
/// Peers keep a credit for each shard. On `afxdp` the NIC spreads packets over the queues by UDP
/// source port, not by shard: all packets of peers may come to one queue.
pub(super) fn advertised(queue: Budget, backend: Backend, shards: usize) -> Budget {
    let shards = match backend {
        Backend::Xdp => u32::try_from(shards).unwrap_or(u32::MAX / 4),
        Backend::Udp | Backend::Packet | Backend::Sim => 1,
    };
    queue.part(3, 4 * shards)
}

/// Peers keep their packets within a budget in the engine's measure, and a port sets it in its own.
/// Neither crate knows the other.
const _: () = {
    let mut len = 0;
    while len < 10_000 {
        assert!(netdev::RxBudget::cost(len) == Budget::cost(len), "one measure of receive queues");
        len += 1;
    }
};

/// The kind of a port's receive queue, as the engine names it.
fn queue_kind(capabilities: &Capabilities) -> QueueKind {
    match capabilities.rx_queue {
        netdev::QueueKind::Memory => QueueKind::Memory,
        netdev::QueueKind::Places => QueueKind::Places,
        netdev::QueueKind::Frames => QueueKind::Frames,
    }
}

/// A protection domain: a number that regions and queue pairs must share.
#[derive(Debug)]
pub struct Pd {
    pub(super) device: Arc<Device>,
    pub id: PdId,
    charge: Mutex<Option<Charge>>,
    /// The errno of the fault that refused the domain.
    failed: Option<i32>,
}

impl Pd {
    pub fn new(device: &Arc<Device>) -> Self {
        // The count may have begun again, and have come to a domain that is still there.
        let fresh = || PdId(device.pds.fetch_add(1, Ordering::Relaxed));
        let id = loop {
            let id = fresh();
            if id.0 != 0 && device.add_owner(id.into()) {
                break id;
            }
        };
        let charge = Mutex::new(Charge::object(device.hca()).ok());
        Self { device: device.clone(), id, charge, failed: device.fails(Verb::AllocPd) }
    }

    /// Whether objects may be made in it. One that came when there was no room may find some now.
    ///
    /// # Errors
    /// The container has as many objects as it may without this one, or it was not made.
    pub fn admitted(&self) -> Result<(), VerbsError> {
        if let Some(errno) = self.failed {
            return Err(failed(errno));
        }
        let mut charge = self.charge.lock();
        if charge.is_none() {
            *charge = Some(Charge::object(self.device.hca())?);
        }
        Ok(())
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        self.device.remove_owner(self.id.into(), |_| false);
    }
}
