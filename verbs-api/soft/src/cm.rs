//! The connection manager on a shard: sending its datagrams, and delivering its events.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Weak};
use std::time::Instant;

use rocinante_netdev::PortClaim;
use rocinante_stack::Engine;
use rocinante_stack::cm::{
    Accept, CmConfig, CmError, CmEvent, ConnId, Connect, ConnectionManager, ListenerId,
    SidrQueryId, SidrReqId, Transmit,
};
use rocinante_stack::stats::CmCounters;
use rocinante_stack::types::{Qpn, Time};
use rocinante_stack::wire::MadBytes;
use rocinante_stack::wire::cm::{PortSpace, RejReason, ServiceId, SidrStatus};

use super::gsi_paths::GsiPaths;
use super::owner::Owner;
use super::progress::Core;
use super::shard::Shard;
use super::sidr::Services;
use super::{Device, Settings, gone};
use crate::model::error::VerbsError;
use crate::provider::mailbox::Mailbox;
use crate::provider::manager::{Breaks, Chosen, ListensTo, Manager, Place, WithMailbox};
use crate::provider::random::random;
use crate::provider::trace;
use crate::provider::wakers::Woken;

/// The state that the connection manager needs on its shard.
#[derive(Debug, Default)]
pub struct CmOwners {
    pub ways: GsiPaths,
    conns: BTreeMap<ConnId, (Qpn, Arc<dyn Owner>)>,
    listeners: BTreeMap<ListenerId, Arc<dyn Owner>>,
    /// Where each of them listens, as other processes on the addresses see it.
    claims: BTreeMap<ListenerId, (ServiceId, Option<IpAddr>)>,
    /// The same places, and those of calls that are not over.
    claimed: BTreeSet<(ServiceId, Option<IpAddr>)>,
    /// The listener that got each request.
    asked: BTreeMap<ConnId, ListenerId>,
    pub(super) services: Services,
}

impl CmOwners {
    /// The number of places that are listened at, or claimed by a call that is not over.
    pub(super) fn places(&self) -> usize {
        self.claimed.len()
    }

    /// All that its tables hold, for tests of leaks.
    #[must_use]
    pub fn held(&self) -> usize {
        let listening = self.listeners.len() + self.claims.len() + self.claimed.len();
        listening + self.conns.len() + self.asked.len() + self.services.owners().count()
    }

    /// Gives the event of a connection to its owner.
    fn put(&self, conn: ConnId, event: CmEvent, woken: &mut Woken) {
        let owner = self.conns.get(&conn).map(|(_, owner)| owner);
        if let Some(put) = owner.and_then(|owner| owner.put(event)) {
            woken.append(put);
        }
    }

    /// Gives a request to its listener. Returns whether that took it: it may just have been
    /// dropped, or have no room.
    fn ask(
        &mut self,
        (listener, conn): (ListenerId, ConnId),
        request: CmEvent,
        woken: &mut Woken,
    ) -> bool {
        let owner = self.listeners.get(&listener);
        let Some(put) = owner.and_then(|owner| owner.put(request)) else { return false };
        self.asked.insert(conn, listener);
        woken.append(put);
        true
    }

    /// The queue pair of a connection, if it is to break with it.
    fn breaks_with(&self, conn: ConnId) -> Option<Qpn> {
        let (qpn, owner) = self.conns.get(&conn)?;
        owner.breaks().then_some(*qpn)
    }

    /// The connection is over: withdraws its request from the listener.
    fn release(&mut self, conn: ConnId) {
        self.conns.remove(&conn);
        let listener = self.asked.remove(&conn);
        if let Some(owner) = listener.and_then(|listener| self.listeners.get(&listener)) {
            owner.withdraw(conn);
        }
    }

    /// The interface is gone: no more events will come.
    pub(super) fn fail(&self, woken: &mut Woken) {
        let conns = self.conns.values().map(|(_, owner)| owner);
        let owners = conns.chain(self.listeners.values()).chain(self.services.owners());
        owners.for_each(|owner| woken.append(owner.fail(gone())));
    }
}

impl Shard {
    /// The connection manager.
    pub fn cm(&mut self) -> &mut ConnectionManager {
        self.engine.cm().expect("started with the device")
    }

    /// Delivers the connection manager's events, and sends its datagrams. The caller delivers the
    /// completions that result.
    pub(super) fn serve_cm(&mut self, now: Time) {
        // An answer leaves before the program sees the event that it answers: that event may be the
        // last that the program waits for.
        self.transmit_cm(now);
        let mut any = false;
        while let Some(event) = self.engine.cm().and_then(ConnectionManager::poll_event) {
            self.deliver_cm(event);
            any = true;
        }
        if any {
            self.router.write_mail(&mut self.engine);
        }
        self.router.note_connections(&mut self.engine);
        if any {
            self.transmit_cm(now);
        }
    }

    /// Serves the requests and questions that have waited for a listener.
    pub(super) fn serve_early(&mut self) {
        let now = self.now();
        self.engine.handle_cm_timeout(now);
        self.router.write_mail(&mut self.engine);
        self.serve_cm(now);
    }

    fn deliver_cm(&mut self, event: CmEvent) {
        trace::connection(&event);
        let Self { engine, host, cm_owners: owners, router, .. } = self;
        match event {
            CmEvent::Request { listener, conn, .. } => {
                if !owners.ask((listener, conn), event, &mut host.woken) {
                    let now = self.now();
                    self.cm().forget(now, conn);
                }
            }
            CmEvent::Released { conn, qpn } => {
                router.release_number(qpn, engine);
                owners.put(conn, event, &mut host.woken);
                owners.release(conn);
            }
            CmEvent::Asked { .. }
            | CmEvent::AskOver { .. }
            | CmEvent::Resolved { .. }
            | CmEvent::Unresolved { .. } => {
                if let Some(ask) = owners.services.deliver(event, &mut host.woken) {
                    let now = self.now();
                    let _ = self.cm().answer(now, ask, Err(SidrStatus::REJECT), &[]);
                }
            }
            CmEvent::Disconnected { conn, .. } => {
                if let Some(qpn) = owners.breaks_with(conn) {
                    // The peer no longer answers: posted requests complete now.
                    router.end_connection_of(qpn, engine, host);
                }
                owners.put(conn, event, &mut host.woken);
            }
            CmEvent::Replied { conn, .. }
            | CmEvent::Established { conn }
            | CmEvent::Rejected { conn, .. }
            | CmEvent::TimedOut { conn } => owners.put(conn, event, &mut host.woken),
        }
    }

    fn transmit_cm(&mut self, now: Time) {
        if self.engine.cm().is_none_or(|cm| !cm.wants_transmit()) {
            return;
        }
        self.router.note_connections(&mut self.engine);
        while let Some(transmit) = self.engine.cm().and_then(ConnectionManager::poll_transmit) {
            // Without a path to the peer the message is lost, as on any network; it is repeated if
            // it matters.
            let Ok(path) = self.path_of_mad(now, &transmit) else { continue };
            if !self.send_mad(&transmit.mad, path) {
                self.cm().put_back(transmit);
                break;
            }
        }
        self.io.flush();
    }

    /// The path of a datagram: that of the queue pair whose peer it is for, or one of QP1's.
    fn path_of_mad(&mut self, now: Time, transmit: &Transmit) -> io::Result<u32> {
        if let Some(path) = transmit.via.and_then(|qpn| self.engine.path_of(qpn)) {
            return Ok(path);
        }
        let way = (transmit.local, transmit.remote);
        self.cm_owners.ways.path_to(&mut self.io, now, way, transmit.via.is_some())
    }

    /// QP1's path of a way.
    pub fn cm_path(&mut self, now: Time, way: (IpAddr, IpAddr)) -> io::Result<u32> {
        self.cm_owners.ways.path_to(&mut self.io, now, way, false)
    }

    /// Drops idle ones: see [`GsiPaths::tidy`].
    pub fn tidy_cm_paths(&mut self, now: Time) -> Option<u64> {
        self.cm_owners.ways.tidy(&mut self.io, now)
    }

    /// Sends a management datagram on a path. Returns whether there was room.
    pub(super) fn send_mad(&mut self, mad: &MadBytes, path: u32) -> bool {
        self.engine.send_mad(mad, path, &mut self.io) || {
            self.io.flush();
            self.engine.send_mad(mad, path, &mut self.io)
        }
    }
}

impl Device {
    /// Calls the connection manager, and handles the consequences.
    pub(super) fn with_cm<T>(&self, call: impl FnOnce(&mut ConnectionManager, Time) -> T) -> T {
        let mut shard = self.cm_core().hold();
        let now = shard.now();
        let result = call(shard.cm(), now);
        shard.serve_cm(now);
        result
    }

    /// The shard of the connection manager.
    pub fn cm_core(&self) -> &Arc<Core> {
        self.shards.first()
    }

    /// Reserves the number of a queue pair until its connection is over. With `awaited_by`, the
    /// first message from the peer is reported to that connection. `first` is the shard of the
    /// connection manager, which is locked.
    fn keep(&self, first: &mut Shard, qpn: Qpn, awaited_by: Option<ConnId>) {
        let keep = |engine: &mut Engine| {
            engine.reserve_qpn(qpn);
            if let Some(conn) = awaited_by {
                engine.await_message(qpn, conn);
            }
        };
        match self.shards.of_qpn(qpn) {
            Some(core) if !Arc::ptr_eq(core, self.cm_core()) => {
                let mut held = core.hold();
                keep(&mut held.engine);
                held.release_into(&mut first.host.woken);
            }
            _ => keep(&mut first.engine),
        }
    }

    /// Listens by `listen` at a place where no other process on the addresses does.
    pub fn claim(
        &self,
        claim: (ServiceId, Option<IpAddr>),
        listen: impl FnOnce(&mut Shard) -> Result<ListenerId, CmError>,
    ) -> Result<ListenerId, VerbsError> {
        // This process's own listeners are not in each other's way for the kernel.
        if !self.cm_core().hold().cm_owners.claimed.insert(claim) {
            return Err(CmError::InUse.into());
        }
        let (service, address) = claim;
        // Not while the shard is held: another process may be waited for.
        let claimed = match &self.slots {
            Some(slots) => slots.listen(service.0, address),
            None => Ok(()),
        };
        let mut shard = self.cm_core().hold();
        let listening = claimed
            .map_err(|error| match error.raw_os_error() {
                Some(libc::EADDRINUSE) => CmError::InUse.into(),
                _ => VerbsError::from(error),
            })
            .and_then(|()| {
                // Those that listened when the interface went have their error already.
                let begun = match shard.io.is_broken() {
                    true => Err(gone()),
                    false => listen(&mut shard).map_err(VerbsError::from),
                };
                begun.inspect_err(|_| {
                    if let Some(slots) = &self.slots {
                        slots.unlisten(service.0, address);
                    }
                })
            });
        match &listening {
            Ok(listener) => drop(shard.cm_owners.claims.insert(*listener, claim)),
            Err(_) => drop(shard.cm_owners.claimed.remove(&claim)),
        }
        listening
    }

    /// This process has a port of the connection manager on an address as `claim` says from now on.
    /// Error: `EADDRINUSE`: another process is in the way. None is for a device that shares no
    /// address.
    pub fn claim_port(&self, address: IpAddr, port: u32, claim: PortClaim) -> io::Result<()> {
        self.slots.as_ref().map_or(Ok(()), |slots| slots.claim_port(address, port, claim))
    }

    pub fn release_claim(&self, shard: &mut Shard, listener: ListenerId) {
        let Some(claim) = shard.cm_owners.claims.remove(&listener) else { return };
        shard.cm_owners.claimed.remove(&claim);
        if let Some(slots) = &self.slots {
            slots.unlisten(claim.0.0, claim.1);
        }
    }

    pub fn cm_counters(&self) -> CmCounters {
        *self.cm_core().hold().cm().counters()
    }
}

/// The calls for an owner of either kind.
impl Device {
    /// Listens for requests for a service.
    pub fn listen_into(
        &self,
        service: ServiceId,
        place: Place,
        owner: Arc<dyn Owner>,
    ) -> Result<ListenerId, VerbsError> {
        if service.takes_datagrams() {
            return self.cm_listen_datagrams(service, place, owner);
        }
        self.claim((service, place.address), |shard| {
            let listener = shard.cm().listen(service, place.address, place.backlog)?;
            shard.cm_owners.listeners.insert(listener, owner);
            shard.serve_early();
            Ok(listener)
        })
    }

    pub fn connect_into(
        &self,
        ask: &Connect<'_>,
        owner: Arc<dyn Owner>,
    ) -> Result<ConnId, VerbsError> {
        let mut shard = self.cm_core().hold();
        if shard.io.is_broken() {
            return Err(gone());
        }
        let now = shard.now();
        let conn = shard.cm().connect(now, ask)?;
        shard.cm_owners.conns.insert(conn, (ask.side.qpn, owner));
        self.keep(&mut shard, ask.side.qpn, None);
        shard.serve_cm(now);
        Ok(conn)
    }

    pub fn accept_into(
        &self,
        conn: ConnId,
        accept: &Accept<'_>,
        owner: Arc<dyn Owner>,
    ) -> Result<(), VerbsError> {
        let mut shard = self.cm_core().hold();
        let now = shard.now();
        shard.cm().accept(now, conn, accept)?;
        shard.cm_owners.conns.insert(conn, (accept.side.qpn, owner));
        self.keep(&mut shard, accept.side.qpn, Some(conn));
        shard.serve_cm(now);
        Ok(())
    }

    /// The queue pair of a connection got a message: as if the RTU had come.
    pub fn cm_message_arrived(&self, conn: ConnId) {
        self.with_cm(|cm, _| cm.message_arrived(conn));
    }
}

impl Manager for Device {
    fn listen(&self, place: Place, to: ListensTo) -> WithMailbox<ListenerId> {
        let space = match to {
            ListensTo::Connections => PortSpace::Tcp,
            ListensTo::Datagrams => PortSpace::Udp,
        };
        let mailbox = Arc::new(Mailbox::default());
        let service = ServiceId::of_port(space, place.port);
        Ok((self.listen_into(service, place, mailbox.clone())?, mailbox))
    }

    fn unlisten(&self, listener: ListenerId, to: ListensTo) {
        if to == ListensTo::Datagrams {
            return self.cm_unlisten_datagrams(listener);
        }
        let mut shard = self.cm_core().hold();
        self.release_claim(&mut shard, listener);
        let owner = shard.cm_owners.listeners.remove(&listener);
        let now = shard.now();
        // The program still decides about requests that it has taken.
        let heard = |conn| owner.as_ref().is_none_or(|owner| !owner.has_request(conn));
        shard.cm().unlisten(listener, heard);
        shard.serve_cm(now);
    }

    fn connect(&self, ask: &Connect<'_>, _qp: Option<Weak<dyn Breaks>>) -> WithMailbox<ConnId> {
        let mailbox = Arc::new(Mailbox::default());
        Ok((self.connect_into(ask, mailbox.clone())?, mailbox))
    }

    fn chosen(&self, _conn: ConnId) -> Option<Chosen> {
        None
    }

    fn accept(
        &self,
        conn: ConnId,
        accept: &Accept<'_>,
        _qp: Option<Weak<dyn Breaks>>,
    ) -> Result<Arc<Mailbox>, VerbsError> {
        let mailbox = Arc::new(Mailbox::default());
        self.accept_into(conn, accept, mailbox.clone())?;
        Ok(mailbox)
    }

    fn reject(&self, conn: ConnId, reason: RejReason, private: &[u8]) -> Result<(), VerbsError> {
        Ok(self.with_cm(|cm, _| cm.reject(conn, reason, private))?)
    }

    fn establish(&self, conn: ConnId) -> Result<(), VerbsError> {
        Ok(self.with_cm(|cm, _| cm.establish(conn, &[]))?)
    }

    fn flush(&self) {
        for core in self.shards.all() {
            let mut shard = core.hold();
            shard.take_staged();
            shard.send_waiting();
        }
    }

    fn disconnect(&self, conn: ConnId) -> Result<(), VerbsError> {
        match self.with_cm(|cm, now| cm.disconnect(now, conn, &[])) {
            Ok(()) | Err(CmError::Unknown) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn forget(&self, conn: ConnId) {
        self.with_cm(|cm, now| cm.forget(now, conn));
    }

    fn answer(
        &self,
        ask: SidrReqId,
        answer: Result<(Qpn, u32), SidrStatus>,
        private: &[u8],
    ) -> Result<(), VerbsError> {
        Ok(self.with_cm(|cm, now| cm.answer(now, ask, answer, private))?)
    }

    fn resolve(&self, local: IpAddr, peer: SocketAddr, private: &[u8]) -> WithMailbox<SidrQueryId> {
        let service = ServiceId::of_port(PortSpace::Udp, peer.port());
        let source_port = 0x8000 | random()? as u16;
        let mailbox = Arc::new(Mailbox::default());
        let way = (local, peer.ip());
        let query = self.resolve_into(way, (service, source_port), private, mailbox.clone())?;
        Ok((query, mailbox))
    }

    fn forget_query(&self, query: SidrQueryId) {
        self.cm_forget_query(query);
    }

    fn wait(&self, mailbox: &Mailbox, until: Option<Instant>) -> io::Result<()> {
        let fd = mailbox.fd()?;
        self.cm_core().wait(fd, until);
        Ok(())
    }
}

/// The configuration of a device's connection manager.
pub(super) fn config(settings: &Settings, slot: Option<u8>) -> Result<CmConfig, VerbsError> {
    let mut words = [0; 3];
    for word in &mut words {
        let halves = [random()?, random()?];
        *word = u64::from(halves[0]) << 32 | u64::from(halves[1]);
    }
    let [first, second, ca_guid] = words;
    let max_connections = settings.limits.max_qp as usize;
    let usual = CmConfig::default();
    let max_retries = settings.cm_retries.unwrap_or(usual.max_retries);
    // 0.5 s.
    let refusal_delay = if settings.refuses_late { 500_000_000 } else { 0 };
    let key = [first, second];
    let keep_alive = u64::try_from(settings.keep_alive.as_nanos()).unwrap_or(u64::MAX);
    Ok(CmConfig {
        key,
        slot,
        ca_guid,
        max_connections,
        max_retries,
        refusal_delay,
        keep_alive,
        // A device that only its program drives may be silent for as long as the program computes.
        answers: settings.background,
        ..usual
    })
}
