//! Messages from peers.

use core::net::{IpAddr, SocketAddr};

use super::alive::Alive;
use super::conn::{Conn, State};
use super::notes::Requested;
use super::tables::places;
use super::{CmEvent, ConnId, ConnectionManager, Ended, ListenerId, QpSide, Reply, Request};
use crate::ids::slot_of;
use crate::types::{Mtu, Pkey, Qpn, Time};
use crate::wire::AliveMad;
use crate::wire::cm::{
    Apr, CmMessage, CommId, Drep, Dreq, IpHeader, Lap, Mra, Rej, RejReason, Rep, Req, Rtu, Subject,
    Transport, code_to_ns,
};

impl ConnectionManager {
    /// Takes a management datagram that came from `src` to `dst`. Bad ones are dropped and counted.
    pub fn handle_mad(&mut self, now: Time, src: IpAddr, dst: IpAddr, mad: &[u8]) {
        self.counters.received += 1;
        if let Some((tid, mad)) = AliveMad::parse(mad) {
            return self.on_alive(now, (src, dst), tid, mad);
        }
        let Ok((header, message)) = CmMessage::parse(mad) else {
            return self.counters.malformed += 1;
        };
        let (way, tid) = ((src, dst), header.tid);
        match message {
            CmMessage::Req(req) => self.on_req(now, way, tid, &req, true),
            CmMessage::Mra(mra) => self.on_mra(now, way, &mra),
            CmMessage::Rej(rej) => self.on_rej(now, way, &rej),
            CmMessage::Rep(rep) => self.on_rep(now, way, tid, &rep),
            CmMessage::Rtu(rtu) => self.on_rtu(way, &rtu),
            CmMessage::Dreq(dreq) => self.on_dreq(now, way, tid, &dreq),
            CmMessage::Drep(drep) => self.on_drep(now, way, &drep),
            CmMessage::SidrReq(ask) => self.on_sidr_req(now, way, tid, &ask, true),
            CmMessage::SidrRep(rep) => self.on_sidr_rep(way, tid, &rep),
            CmMessage::Lap(lap) => self.on_lap(way, tid, &lap),
            // We never ask for another path.
            CmMessage::Apr(_) => self.counters.stray += 1,
        }
    }

    /// Takes a request. One for which there is no listener may wait for one.
    pub(super) fn on_req(
        &mut self,
        now: Time,
        (src, dst): (IpAddr, IpAddr),
        tid: u64,
        req: &Req<'_>,
        may_wait: bool,
    ) {
        if req.local == CommId(0) {
            return self.counters.malformed += 1;
        }
        let known = self.by_request.get(&(src, req.local)).copied();
        if let Some(conn) = known.and_then(|id| self.conns.get(&id))
            && conn.remote_qpn == req.qpn
        {
            let (id, state) = (conn.local, conn.state);
            return self.on_known_req(now, id, state, (src, dst), tid, req);
        }
        // One connection may have its communication id, another its queue pair, and either may have
        // ended.
        let by_qpn = self.by_qpn.get(&(src, req.qpn)).copied();
        let mut both = [known, by_qpn].into_iter().flatten();
        let stale = both.find(|id| !self.is_over(*id, req.ca_guid));
        match self.judge(stale, (src, dst), req) {
            Ok((listener, peer, user)) => {
                self.take_request(now, (src, dst), tid, req, (listener, peer, user));
            }
            Err(RejReason::INVALID_SERVICE_ID)
                if may_wait
                    && self.wait_for_listener(
                        now,
                        (src, dst),
                        (req.service, req.local.0),
                        || CmMessage::Req(*req).emit(tid),
                    ) => {}
            Err(reason) => {
                self.refuse((src, dst), tid, (CommId(0), req.local), Subject::Req, reason);
                if let Some(id) = stale.filter(|_| reason == RejReason::STALE_CONNECTION) {
                    self.end_stale(now, id, req.ca_guid);
                }
            }
        }
    }

    /// A repeated request.
    fn on_known_req(
        &mut self,
        now: Time,
        id: CommId,
        state: State,
        (src, dst): (IpAddr, IpAddr),
        tid: u64,
        req: &Req<'_>,
    ) {
        self.counters.duplicates += 1;
        match state {
            State::ReqReceived => self.repeat_mra(now, id),
            State::RepSent => self.send_stored(id),
            State::TimeWait => {
                let stale = RejReason::STALE_CONNECTION;
                self.refuse((src, dst), tid, (CommId(0), req.local), Subject::Req, stale);
            }
            // The peer has our reply.
            _ => {}
        }
    }

    /// Whether a new request can be offered to the program. Returns the listener, the peer's
    /// address and the user's private data.
    fn judge<'a>(
        &mut self,
        stale: Option<CommId>,
        (src, dst): (IpAddr, IpAddr),
        req: &Req<'a>,
    ) -> Result<(ListenerId, SocketAddr, &'a [u8]), RejReason> {
        if !matches!(req.transport, Transport::Rc | Transport::Uc) {
            return Err(RejReason::INVALID_TRANSPORT_TYPE);
        }
        if req.qpn <= Qpn::GSI || req.qpn == Qpn::MULTICAST || !Pkey::DEFAULT.admits(req.pkey) {
            return Err(RejReason::UNSUPPORTED);
        }
        if mtu_of(req.mtu).is_none() {
            return Err(RejReason::INVALID_MTU);
        }
        if req.primary.local_gid.address() != src || req.primary.remote_gid.address() != dst {
            return Err(RejReason::INVALID_GID);
        }
        let (peer, user) = match req.service.port() {
            None => (SocketAddr::new(src, 0), req.private),
            Some(_) => match IpHeader::parse(req.private) {
                Ok((header, user)) if header.dst == dst => (header.src, user),
                Ok(_) => return Err(RejReason::INVALID_SERVICE_ID),
                Err(_) => return Err(RejReason::UNSUPPORTED),
            },
        };
        // Before the listener, as Linux has it: on a shared address that may be a neighbour's.
        if stale.is_some() {
            return Err(RejReason::STALE_CONNECTION);
        }
        let full = self.conns.len() >= self.config.max_connections;
        let service = req.service;
        let place = [service, service.listened()]
            .map(|it| places(it, dst))
            .into_iter()
            .flatten()
            .find(|place| self.listeners.contains_key(place))
            .ok_or(RejReason::INVALID_SERVICE_ID)?;
        let listener = self.listeners.get_mut(&place).ok_or(RejReason::INVALID_SERVICE_ID)?;
        if full || listener.pending >= listener.backlog {
            self.counters.backlog_overflow += 1;
            return Err(RejReason::NO_RESOURCES);
        }
        listener.pending += 1;
        Ok((listener.id, peer, user))
    }

    fn take_request(
        &mut self,
        now: Time,
        (src, dst): (IpAddr, IpAddr),
        tid: u64,
        req: &Req<'_>,
        (listener, peer, user): (ListenerId, SocketAddr, &[u8]),
    ) {
        let local = self.draw_id();
        let conn = Conn {
            state: State::ReqReceived,
            mra: false,
            end_reported: false,
            active: false,
            addresses: (dst, src),
            local,
            remote: req.local,
            tid,
            qpn: Qpn::default(),
            remote_qpn: req.qpn,
            remote_guid: req.ca_guid,
            listener: Some(listener),
            mad: None,
            retries: 0,
            deadline: None,
            ack_timeout: req.primary.ack_timeout,
            announces: req.announced.is_some(),
            answers: req.announced.is_some_and(|announced| announced.answers),
            alive: Alive::default(),
        };
        self.conns.insert(local, conn);
        self.by_request.insert((src, req.local), local);
        self.note_request((dst, src), Requested::Connection(req.local), true);
        self.by_qpn.insert((src, req.qpn), local);
        self.counters.requests += 1;
        let request = Box::new(Request {
            local: dst,
            peer,
            service: req.service,
            side: QpSide {
                qpn: req.qpn,
                psn: req.psn,
                responder_resources: req.responder_resources,
                initiator_depth: req.initiator_depth,
                rnr_retry: req.rnr_retry,
                flow_control: req.flow_control,
                srq: req.srq,
                announced: req.announced,
            },
            transport: req.transport,
            mtu: mtu_of(req.mtu).unwrap_or(Mtu::Mtu256),
            ack_timeout: req.primary.ack_timeout,
            retry_count: req.retry_count,
            traffic_class: req.primary.traffic_class,
            private: user.to_vec(),
        });
        self.events.push_back(CmEvent::Request { listener, conn: ConnId(local), request });
        // The peer needs an MRA before it gives up.
        let wait = code_to_ns(req.remote_response_timeout).min(self.patience()) / 2;
        self.set_deadline(local, Some(now.after(wait)));
    }

    fn on_mra(&mut self, now: Time, way: (IpAddr, IpAddr), mra: &Mra<'_>) {
        let most = self.config.service_timeout;
        let wait =
            code_to_ns(mra.service_timeout.min(most)) + code_to_ns(self.config.packet_lifetime);
        let Some(conn) = self.conn_of(way, mra.remote) else {
            return self.counters.stray += 1;
        };
        let fits = match conn.state {
            State::ReqSent => mra.subject == Subject::Req,
            State::RepSent => mra.subject == Subject::Rep && mra.local == conn.remote,
            _ => false,
        };
        if !fits || std::mem::replace(&mut conn.mra, true) {
            return self.counters.stray += 1;
        }
        self.set_deadline(mra.remote, Some(now.after(wait)));
    }

    fn on_rej(&mut self, now: Time, (src, dst): (IpAddr, IpAddr), rej: &Rej<'_>) {
        self.counters.rejects_received += 1;
        // A peer that gave up before it got an answer knows only its own id.
        let id = match rej.remote {
            CommId(0) => self.by_request.get(&(src, rej.local)).copied().unwrap_or_default(),
            id => id,
        };
        let Some(conn) = self.conn_of((src, dst), id) else { return self.counters.stray += 1 };
        // A rejection of a request need not have an id.
        if conn.state != State::ReqSent && conn.remote != rej.local {
            return self.counters.stray += 1;
        }
        let (state, conn) = (conn.state, ConnId(id));
        let (reason, private) = (rej.reason, rej.private.to_vec());
        match state {
            State::ReqSent | State::ReqReceived if reason != RejReason::STALE_CONNECTION => {
                self.report_end(id, CmEvent::Rejected { conn, reason, private });
                self.remove(id);
            }
            // Its queue pair may have got packets; or may still get those of the connection that
            // the peer has with that number (Linux cm.c, `cm_rej_handler`).
            State::ReqSent | State::ReqReceived | State::RepReceived | State::RepSent => {
                self.report_end(id, CmEvent::Rejected { conn, reason, private });
                self.enter_timewait(now, id);
            }
            State::Established | State::DreqSent => {
                let ended = Ended::Rejected { reason, private };
                self.report_end(id, CmEvent::Disconnected { conn, ended });
                self.enter_timewait(now, id);
            }
            State::TimeWait => self.counters.duplicates += 1,
        }
    }

    fn on_rep(&mut self, now: Time, way: (IpAddr, IpAddr), tid: u64, rep: &Rep<'_>) {
        let Some(conn) = self.conn_of(way, rep.remote) else {
            self.counters.stray += 1;
            return self.on_unknown_rep(now, way, tid, rep);
        };
        let (id, active) = (conn.local, conn.active);
        match conn.state {
            State::ReqSent => {}
            State::RepReceived if conn.remote == rep.local => {
                self.counters.duplicates += 1;
                return self.repeat_mra(now, id);
            }
            State::Established if active && conn.remote == rep.local => {
                self.counters.duplicates += 1;
                return self.send_stored(id);
            }
            _ => return self.counters.stray += 1,
        }
        if rep.local == CommId(0) || rep.qpn <= Qpn::GSI || rep.qpn == Qpn::MULTICAST {
            return self.counters.malformed += 1;
        }
        conn.remote = rep.local;
        let stale = self.by_qpn.get(&(way.0, rep.qpn)).copied();
        if let Some(stale) = stale.filter(|stale| !self.is_over(*stale, rep.ca_guid)) {
            let reason = RejReason::STALE_CONNECTION;
            self.reject_conn(id, Subject::Rep, reason, &[]);
            self.report_end(
                id,
                CmEvent::Rejected { conn: ConnId(id), reason, private: Vec::new() },
            );
            self.remove(id);
            return self.end_stale(now, stale, rep.ca_guid);
        }
        self.take_reply(now, id, way.0, rep);
    }

    /// A reply to no request of this device. A neighbour on the address may have asked: then its
    /// queue pair led it here, if that is in a connection.
    fn on_unknown_rep(&mut self, now: Time, way: (IpAddr, IpAddr), tid: u64, rep: &Rep<'_>) {
        let is_neighbours = self.config.slot.is_some_and(|slot| slot != slot_of(rep.remote.0));
        let known = self.by_qpn.get(&(way.0, rep.qpn)).copied().filter(|_| is_neighbours);
        let stale = known.filter(|id| !self.is_over(*id, rep.ca_guid));
        let reason = match stale {
            Some(_) => RejReason::STALE_CONNECTION,
            None => RejReason::INVALID_COMM_ID,
        };
        self.refuse(way, tid, (rep.remote, rep.local), Subject::Rep, reason);
        if let Some(id) = stale {
            self.end_stale(now, id, rep.ca_guid);
        }
    }

    fn take_reply(&mut self, now: Time, id: CommId, peer: IpAddr, rep: &Rep<'_>) {
        // The peer repeats its reply after the time that we announced.
        let wait = code_to_ns(self.config.response_timeout).min(self.patience()) / 2;
        let Some(conn) = self.conns.get_mut(&id) else { return };
        (conn.state, conn.mra, conn.mad) = (State::RepReceived, false, None);
        (conn.remote_qpn, conn.remote_guid) = (rep.qpn, rep.ca_guid);
        conn.answers = rep.announced.is_some_and(|announced| announced.answers);
        self.by_qpn.insert((peer, rep.qpn), id);
        self.set_deadline(id, Some(now.after(wait)));
        let reply = Box::new(Reply {
            side: QpSide {
                qpn: rep.qpn,
                psn: rep.psn,
                responder_resources: rep.responder_resources,
                initiator_depth: rep.initiator_depth,
                rnr_retry: rep.rnr_retry,
                flow_control: rep.flow_control,
                srq: rep.srq,
                announced: rep.announced,
            },
            target_ack_delay: rep.target_ack_delay,
            private: rep.private.to_vec(),
        });
        self.events.push_back(CmEvent::Replied { conn: ConnId(id), reply });
    }

    fn on_rtu(&mut self, way: (IpAddr, IpAddr), rtu: &Rtu<'_>) {
        match self.conn_of(way, rtu.remote) {
            Some(conn) if conn.remote == rtu.local && conn.state == State::RepSent => {
                let id = conn.local;
                self.establish_passive(id);
            }
            Some(conn) if conn.remote == rtu.local && !conn.active => self.counters.duplicates += 1,
            _ => self.counters.stray += 1,
        }
    }

    /// A message arrived on the queue pair of a connection that waits for its RTU. So the peer is
    /// in RTS, and the RTU is no longer needed (IBTA volume 1, 12.9 \[M\]). Without this rule, a
    /// lost RTU would come again only after a repeated REP.
    pub fn message_arrived(&mut self, conn: ConnId) {
        if self.conns.get(&conn.0).is_some_and(|conn| conn.state == State::RepSent) {
            self.counters.by_message += 1;
            self.establish_passive(conn.0);
        }
    }

    /// The peer is ready.
    fn establish_passive(&mut self, id: CommId) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        (conn.state, conn.mad) = (State::Established, None);
        self.counters.established += 1;
        self.leave_backlog(id);
        self.watch(id);
        self.events.push_back(CmEvent::Established { conn: ConnId(id) });
    }

    fn on_dreq(&mut self, now: Time, way: (IpAddr, IpAddr), tid: u64, dreq: &Dreq<'_>) {
        // A DREQ for an unknown connection gets an answer too, so that the peer stops asking.
        let (local, remote) = (dreq.remote, dreq.local);
        let drep = CmMessage::Drep(Drep { local, remote, private: &[] }).emit(tid);
        let Some(conn) = self.conn_of(way, dreq.remote) else {
            self.counters.stray += 1;
            return self.send((way.1, way.0), drep);
        };
        let (id, state) = (conn.local, conn.state);
        let ready = !matches!(state, State::ReqSent | State::ReqReceived);
        if !ready || conn.remote != dreq.local || conn.qpn != dreq.remote_qpn {
            return self.counters.stray += 1;
        }
        self.send((way.1, way.0), drep);
        if state == State::TimeWait {
            return self.counters.duplicates += 1;
        }
        self.report_end(id, CmEvent::Disconnected { conn: ConnId(id), ended: Ended::ByPeer });
        self.enter_timewait(now, id);
    }

    fn on_drep(&mut self, now: Time, way: (IpAddr, IpAddr), drep: &Drep<'_>) {
        match self.conn_of(way, drep.remote) {
            Some(conn) if conn.remote == drep.local && conn.state == State::DreqSent => {
                let id = conn.local;
                self.report_end(id, CmEvent::Disconnected { conn: ConnId(id), ended: Ended::ByUs });
                self.enter_timewait(now, id);
            }
            Some(conn) if conn.remote == drep.local && conn.state == State::TimeWait => {
                self.counters.duplicates += 1;
            }
            _ => self.counters.stray += 1,
        }
    }

    /// Path migration is not supported.
    fn on_lap(&mut self, way: (IpAddr, IpAddr), tid: u64, lap: &Lap) {
        let known = self.conn_of(way, lap.remote).is_some_and(|conn| conn.remote == lap.local);
        let status = if known { Apr::UNSUPPORTED } else { Apr::INVALID_COMM_ID };
        let apr = Apr { local: lap.remote, remote: lap.local, status };
        self.send((way.1, way.0), CmMessage::Apr(apr).emit(tid));
    }

    /// The connection with this id, if its peer sent the datagram.
    pub(super) fn conn_of(
        &mut self,
        (src, dst): (IpAddr, IpAddr),
        id: CommId,
    ) -> Option<&mut Conn> {
        self.conns.get_mut(&id).filter(|conn| conn.addresses == (dst, src))
    }

    /// Rejects a message that has no connection here.
    fn refuse(
        &mut self,
        (src, dst): (IpAddr, IpAddr),
        tid: u64,
        (local, remote): (CommId, CommId),
        subject: Subject,
        reason: RejReason,
    ) {
        let rej = Rej { local, remote, subject, reason, info: &[], private: &[] };
        self.send_rej((dst, src), tid, &rej);
    }

    /// Whether a connection is over: it only waits for a DREP, or until *our* queue pair's number
    /// may be used again. The same peer may already use its own number again: it may have entered
    /// TIMEWAIT before us, its DREP may have been lost, and packets of the old connection go to
    /// another queue pair here.
    fn is_over(&self, id: CommId, guid: u64) -> bool {
        let over = |conn: &Conn| {
            matches!(conn.state, State::DreqSent | State::TimeWait) && conn.remote_guid == guid
        };
        self.conns.get(&id).is_some_and(over)
    }

    /// The peer's queue pair is in another connection now, or is about to be. If it is the same
    /// peer, it has forgotten this connection. Addresses can be forged and queue pair numbers
    /// guessed, but the peer does not tell the GUID of its adapter to others.
    fn end_stale(&mut self, now: Time, id: CommId, guid: u64) {
        let Some(conn) = self.conns.get(&id).filter(|conn| conn.remote_guid == guid) else {
            return self.counters.stray += 1;
        };
        self.counters.stale += 1;
        let ended = CmEvent::Disconnected { conn: ConnId(id), ended: Ended::Stale };
        let withdrawn = CmEvent::Rejected {
            conn: ConnId(id),
            reason: RejReason::STALE_CONNECTION,
            private: Vec::new(),
        };
        match conn.state {
            State::ReqSent | State::DreqSent | State::TimeWait => {}
            State::ReqReceived | State::RepReceived => {
                self.report_end(id, withdrawn);
                self.remove(id);
            }
            State::RepSent => {
                self.report_end(id, withdrawn);
                self.begin_disconnect(now, id, &[]);
            }
            State::Established => {
                self.report_end(id, ended);
                self.begin_disconnect(now, id, &[]);
            }
        }
    }
}

fn mtu_of(code: u8) -> Option<Mtu> {
    Mtu::ALL.into_iter().find(|mtu| mtu.code() == code)
}
