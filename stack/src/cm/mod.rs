//! The connection manager (IBTA volume 1, chapter 12 \[M\]; behaviour of Linux where captures show
//! it).
//!
//! Sans-IO like the engine: management datagrams and the time go in; management datagrams, events
//! and the next deadline come out. It knows queue pairs by their numbers only. Its caller connects
//! them when the events say so.
//!
//! - Active: [`connect`](ConnectionManager::connect), then [`CmEvent::Replied`]; bring the queue
//!   pair to RTS; [`establish`](ConnectionManager::establish).
//! - Passive: [`listen`](ConnectionManager::listen), then [`CmEvent::Request`]; bring the queue
//!   pair to RTS; [`accept`](ConnectionManager::accept), then [`CmEvent::Established`].
//! - Either: [`disconnect`](ConnectionManager::disconnect), then [`CmEvent::Disconnected`], and
//!   after a while [`CmEvent::Released`]: only then another queue pair may get the number.
//!
//! A peer cannot make it hold more than a bound: a listener's backlog, the number of connections,
//! the number of datagrams that wait to be sent. It refuses requests beyond the bound and keeps no
//! state for them. It answers a message for an unknown connection from the message alone.

mod alive;
mod asks;
mod calls;
mod conn;
mod early;
mod footprint;
mod notes;
mod receive;
mod sidr;
mod tables;
mod timers;
mod types;

use core::net::IpAddr;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use self::alive::{Letter, Notices};
use self::conn::{Conn, State};
pub use self::notes::{Note, Noted, Requested};
use self::tables::{Ask, Early, ListenAddress, Listener, Query, Timer};
pub use self::types::{
    Accept, Asked, CmConfig, CmError, CmEvent, CmFootprint, ConnId, Connect, Ended, ListenerId,
    QpSide, Reply, Request, SidrQueryId, SidrReqId, Transmit,
};
use crate::ids::Ids;
use crate::stats::CmCounters;
pub use crate::tuning::cm::ASKS;
use crate::tuning::cm::TX_MAX;
use crate::types::{Qpn, Time};
use crate::wire::cm::{CmMessage, CommId, Dreq, Rej, RejReason, Subject, code_to_ns};
use crate::wire::mad::MadBytes;

/// All connections of a device.
#[derive(Debug)]
pub struct ConnectionManager {
    config: CmConfig,
    ids: Ids,
    conns: BTreeMap<CommId, Conn>,
    /// Requests of peers, by address and communication id of the peer.
    by_request: BTreeMap<(IpAddr, CommId), CommId>,
    /// Connections, by address and queue pair of the peer.
    by_qpn: BTreeMap<(IpAddr, Qpn), CommId>,
    listeners: BTreeMap<ListenAddress, Listener>,
    /// Listeners for questions about datagram services.
    resolvers: BTreeMap<ListenAddress, Listener>,
    asks: BTreeMap<SidrReqId, Ask>,
    /// Questions, by address and number of the peer.
    by_ask: BTreeMap<(IpAddr, u32), SidrReqId>,
    /// The answered questions, oldest first.
    answered: VecDeque<SidrReqId>,
    queries: BTreeMap<SidrQueryId, Query>,
    early: BTreeMap<u64, Early>,
    timers: BTreeSet<(Time, Timer)>,
    tx: VecDeque<Transmit>,
    events: VecDeque<CmEvent>,
    notes: VecDeque<Noted>,
    /// Connections to look at.
    looks: VecDeque<CommId>,
    /// Those whose peers are to be asked whether they are still there.
    letters: BTreeMap<Letter, Vec<CommId>>,
    notices: Notices,
    counters: CmCounters,
}

impl ConnectionManager {
    /// A connection manager without connections.
    #[must_use]
    pub fn new(config: CmConfig) -> Self {
        let config = CmConfig {
            response_timeout: config.response_timeout.min(31),
            packet_lifetime: config.packet_lifetime.min(31),
            max_retries: config.max_retries.min(15),
            service_timeout: config.service_timeout.min(31),
            ..config
        };
        Self {
            config,
            ids: Ids::new(config.key, config.slot),
            conns: BTreeMap::new(),
            by_request: BTreeMap::new(),
            by_qpn: BTreeMap::new(),
            listeners: BTreeMap::new(),
            resolvers: BTreeMap::new(),
            asks: BTreeMap::new(),
            by_ask: BTreeMap::new(),
            answered: VecDeque::new(),
            queries: BTreeMap::new(),
            early: BTreeMap::new(),
            timers: BTreeSet::new(),
            tx: VecDeque::new(),
            events: VecDeque::new(),
            notes: VecDeque::new(),
            looks: VecDeque::new(),
            letters: BTreeMap::new(),
            notices: Notices::default(),
            counters: CmCounters::default(),
        }
    }

    /// The next datagram to send. Call after every other call.
    pub fn poll_transmit(&mut self) -> Option<Transmit> {
        self.tx.pop_front().or_else(|| self.next_question())
    }

    /// Whether there is something to send.
    #[must_use]
    pub fn wants_transmit(&self) -> bool {
        !self.tx.is_empty() || !self.letters.is_empty()
    }

    /// Puts back a datagram for which there was no room.
    pub fn put_back(&mut self, transmit: Transmit) {
        self.tx.push_front(transmit);
    }

    /// The next event. Call after every other call.
    pub fn poll_event(&mut self) -> Option<CmEvent> {
        self.events.pop_front()
    }

    /// When to call [`handle_timeout`](Self::handle_timeout).
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        self.timers.first().map(|(due, _)| *due)
    }

    /// Number of connections, including those that only wait for their release.
    #[must_use]
    pub fn len(&self) -> usize {
        self.conns.len()
    }

    /// Whether there is no state at all: no connection, listener or question.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.conns.is_empty()
            && self.listeners.is_empty()
            && self.resolvers.is_empty()
            && self.asks.is_empty()
            && self.queries.is_empty()
            && self.early.is_empty()
    }

    /// The counters so far.
    #[must_use]
    pub fn counters(&self) -> &CmCounters {
        &self.counters
    }

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &CmConfig {
        &self.config
    }

    /// How long to wait for an answer before a message is sent again, nanoseconds.
    fn interval(&self) -> u64 {
        2 * code_to_ns(self.config.packet_lifetime) + code_to_ns(self.config.response_timeout)
    }

    /// How long to wait for a program, nanoseconds.
    fn patience(&self) -> u64 {
        code_to_ns(self.config.service_timeout)
    }

    fn send(&mut self, addresses: (IpAddr, IpAddr), mad: MadBytes) {
        self.send_via(None, addresses, mad);
    }

    /// Sends to the peer of a queue pair of ours, if there is one.
    fn send_via(&mut self, via: Option<Qpn>, (local, remote): (IpAddr, IpAddr), mad: MadBytes) {
        if self.tx.len() >= TX_MAX {
            self.counters.tx_overflow += 1;
            return;
        }
        self.counters.sent += 1;
        self.tx.push_back(Transmit { local, remote, via, mad });
    }

    /// Sends the stored message of the connection once more: the one that waits for an answer.
    fn send_stored(&mut self, id: CommId) {
        let Some(conn) = self.conns.get(&id) else { return };
        if let Some(mad) = &conn.mad {
            let (addresses, mad) = (conn.addresses, **mad);
            self.send(addresses, mad);
        }
    }

    /// Rejects a message; the connection, if there is one, goes on as it is.
    fn send_rej(&mut self, addresses: (IpAddr, IpAddr), tid: u64, rej: &Rej<'_>) {
        self.counters.rejects_sent += 1;
        self.send(addresses, CmMessage::Rej(*rej).emit(tid));
    }

    /// Rejects a message of a connection's peer, or one that may still come.
    fn reject_conn(&mut self, id: CommId, subject: Subject, reason: RejReason, private: &[u8]) {
        let Some(conn) = self.conns.get(&id) else { return };
        let guid = self.config.ca_guid.to_be_bytes();
        // The GUID helps a peer to find the connection if it does not know our communication id
        // yet.
        let info: &[u8] = if reason == RejReason::TIMEOUT { &guid } else { &[] };
        let rej = Rej { local: conn.local, remote: conn.remote, subject, reason, info, private };
        let (addresses, tid) = (conn.addresses, conn.tid);
        self.send_rej(addresses, tid, &rej);
    }

    /// Moves the deadline of a connection.
    fn set_deadline(&mut self, id: CommId, due: Option<Time>) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let timer = Timer::Conn(id);
        if let Some(old) = std::mem::replace(&mut conn.deadline, due) {
            self.timers.remove(&(old, timer));
        }
        if let Some(due) = due {
            self.timers.insert((due, timer));
        }
    }

    /// A new communication id that no connection has.
    fn draw_id(&mut self) -> CommId {
        loop {
            let id = CommId(self.ids.draw() as u32);
            if id != CommId(0) && !self.conns.contains_key(&id) {
                return id;
            }
        }
    }

    /// The connection no longer counts in a backlog.
    fn leave_backlog(&mut self, id: CommId) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let (addresses, remote) = (conn.addresses, conn.remote);
        let Some(listener) = conn.listener.take() else { return };
        self.note_request(addresses, Requested::Connection(remote), false);
        if let Some(listener) = self.listeners.values_mut().find(|other| other.id == listener) {
            listener.pending = listener.pending.saturating_sub(1);
        }
    }

    /// Tells the program that the connection is gone, unless it knows already.
    fn report_end(&mut self, id: CommId, event: CmEvent) {
        if let Some(conn) = self.conns.get_mut(&id)
            && !std::mem::replace(&mut conn.end_reported, true)
        {
            self.events.push_back(event);
        }
    }

    /// The connection has ended; its queue pair may still get packets. Without a queue pair of this
    /// device ([`end_for`](Self::end_for)) there is nothing to wait for.
    fn enter_timewait(&mut self, now: Time, id: CommId) {
        if self.conns.get(&id).is_some_and(|conn| conn.qpn == Qpn::default()) {
            return self.remove(id);
        }
        self.leave_backlog(id);
        self.forget_note(id);
        let Some(conn) = self.conns.get_mut(&id) else { return };
        conn.state = State::TimeWait;
        conn.mad = None;
        let due = now.after(conn.timewait());
        self.set_deadline(id, Some(due));
    }

    /// Forgets a connection.
    fn remove(&mut self, id: CommId) {
        self.leave_backlog(id);
        self.forget_note(id);
        self.set_deadline(id, None);
        let Some(conn) = self.conns.remove(&id) else { return };
        let peer = conn.addresses.1;
        if self.by_request.get(&(peer, conn.remote)) == Some(&id) {
            self.by_request.remove(&(peer, conn.remote));
        }
        if self.by_qpn.get(&(peer, conn.remote_qpn)) == Some(&id) {
            self.by_qpn.remove(&(peer, conn.remote_qpn));
        }
        self.events.push_back(CmEvent::Released { conn: conn.id(), qpn: conn.qpn });
    }

    /// Asks the peer to end the connection, until it answers.
    fn begin_disconnect(&mut self, now: Time, id: CommId, private: &[u8]) {
        self.leave_backlog(id);
        let unique = u64::from(self.ids.draw() as u32);
        let (retries, interval) = (self.config.max_retries, self.interval());
        let Some(conn) = self.conns.get_mut(&id) else { return };
        conn.tid = unique << 32 | u64::from(id.0);
        let (local, remote, remote_qpn) = (conn.local, conn.remote, conn.remote_qpn);
        let dreq = Dreq { local, remote, remote_qpn, private };
        conn.mad = Some(Box::new(CmMessage::Dreq(dreq).emit(conn.tid)));
        conn.state = State::DreqSent;
        conn.retries = retries;
        self.send_stored(id);
        self.set_deadline(id, Some(now.after(interval)));
        self.note_ending(id);
    }
}
