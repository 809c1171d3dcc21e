//! The program's calls of the connection manager.

use core::net::{IpAddr, SocketAddr};

use super::alive::Alive;
use super::conn::{Conn, State};
use super::tables::Listener;
use super::{Accept, CmError, ConnId, Connect, ConnectionManager, ListenerId, QpSide};
use crate::tuning::cm::SERVICES_MAX;
use crate::types::{Pkey, Qpn, Time};
use crate::wire::cm::{
    Announced, CmMessage, CmPath, CommId, Dreq, IpHeader, Rej, RejReason, Rep, Req, Rtu, ServiceId,
    Subject,
};

impl ConnectionManager {
    /// Listens for requests for `service` to `address`, to any address of a family for its
    /// unspecified address, or to any address of ours. The most precise listener takes a request.
    /// The `backlog` limits the number of requests that the program has not decided plus the number
    /// of accepted connections that are not established. Requests beyond it are rejected for lack
    /// of resources.
    ///
    /// Requests that waited for it are taken by the next
    /// [`handle_timeout`](Self::handle_timeout), whose time has then come. Error:
    /// [`CmError::InUse`], [`CmError::Full`].
    pub fn listen(
        &mut self,
        service: ServiceId,
        address: Option<IpAddr>,
        backlog: usize,
    ) -> Result<ListenerId, CmError> {
        if self.listeners.contains_key(&(service, address)) {
            return Err(CmError::InUse);
        }
        if self.listeners.len() >= SERVICES_MAX {
            return Err(CmError::Full);
        }
        let id = ListenerId(self.ids.draw());
        let listener = Listener { id, backlog: backlog.max(1), pending: 0 };
        self.listeners.insert((service, address), listener);
        self.end_waits(service);
        Ok(id)
    }

    /// Stops listening. Undecided requests are rejected, unless `is_known` says that the program
    /// has seen them.
    pub fn unlisten(&mut self, listener: ListenerId, is_known: impl Fn(ConnId) -> bool) {
        self.listeners.retain(|_, other| other.id != listener);
        let waits = |conn: &&Conn| {
            let waits = conn.state == State::ReqReceived && conn.listener == Some(listener);
            waits && !is_known(conn.id())
        };
        let waiting: Vec<_> = self.conns.values().filter(waits).map(|conn| conn.local).collect();
        for id in waiting {
            self.reject_conn(id, Subject::Req, RejReason::INVALID_SERVICE_ID, &[]);
            self.remove(id);
        }
    }

    /// Asks a peer for a connection. Error: [`CmError::Family`], [`CmError::PrivateTooLong`],
    /// [`CmError::Full`].
    pub fn connect(&mut self, now: Time, ask: &Connect<'_>) -> Result<ConnId, CmError> {
        if ask.local.is_ipv4() != ask.remote.is_ipv4() {
            return Err(CmError::Family);
        }
        let private = request_private(ask.service, ask.local, ask.source_port, ask.remote);
        let private = with_user(private, ask.private, Req::PRIVATE_LEN)?;
        if self.conns.len() >= self.config.max_connections {
            return Err(CmError::Full);
        }
        let keep_alive = ask.keep_alive.unwrap_or(self.config.keep_alive);
        let local = self.draw_id();
        let tid = self.ids.draw() << 32 | u64::from(local.0);
        let mad = CmMessage::Req(self.req(local, ask, &private)).emit(tid);
        self.conns.insert(
            local,
            Conn {
                state: State::ReqSent,
                mra: false,
                end_reported: false,
                active: true,
                addresses: (ask.local, ask.remote),
                local,
                remote: CommId(0),
                tid,
                qpn: ask.side.qpn,
                remote_qpn: Qpn::default(),
                remote_guid: 0,
                listener: None,
                mad: Some(Box::new(mad)),
                retries: self.config.max_retries,
                deadline: None,
                ack_timeout: ask.ack_timeout,
                announces: false,
                answers: false,
                alive: Alive::new(keep_alive),
            },
        );
        self.counters.connects += 1;
        self.send_stored(local);
        self.set_deadline(local, Some(now.after(self.interval())));
        Ok(ConnId(local))
    }

    fn req<'a>(&self, local: CommId, ask: &Connect<'_>, private: &'a [u8]) -> Req<'a> {
        let side = &ask.side;
        Req {
            local,
            service: ask.service,
            ca_guid: self.config.ca_guid,
            announced: self.announced(side),
            qkey: 0,
            qpn: side.qpn,
            responder_resources: side.responder_resources,
            initiator_depth: side.initiator_depth,
            remote_response_timeout: self.config.response_timeout,
            transport: ask.transport,
            flow_control: side.flow_control,
            psn: side.psn,
            local_response_timeout: self.config.response_timeout,
            retry_count: ask.retry_count.min(7),
            pkey: Pkey::DEFAULT,
            mtu: ask.mtu.code(),
            rdc_exists: false,
            rnr_retry: side.rnr_retry.min(7),
            max_cm_retries: self.config.max_retries,
            srq: side.srq,
            extended_transport: 0,
            primary: CmPath {
                local_lid: CmPath::PERMISSIVE_LID,
                remote_lid: CmPath::PERMISSIVE_LID,
                local_gid: ask.local.into(),
                remote_gid: ask.remote.into(),
                flow_label: 0,
                rate: 0,
                traffic_class: ask.traffic_class,
                hop_limit: ask.hop_limit,
                service_level: 0,
                subnet_local: false,
                ack_timeout: ask.ack_timeout.min(31),
            },
            alternate: CmPath::default(),
            private,
        }
    }

    /// Accepts a peer's request. The queue pair must be in RTS. Error: [`CmError::Unknown`] if the
    /// request has been withdrawn, [`CmError::State`], [`CmError::PrivateTooLong`].
    pub fn accept(&mut self, now: Time, conn: ConnId, accept: &Accept<'_>) -> Result<(), CmError> {
        if accept.private.len() > Rep::PRIVATE_LEN {
            return Err(CmError::PrivateTooLong { max: Rep::PRIVATE_LEN });
        }
        let (ca_guid, lifetime) = (self.config.ca_guid, self.config.packet_lifetime);
        let (retries, interval) = (self.config.max_retries, self.interval());
        let keep_alive = accept.keep_alive.unwrap_or(self.config.keep_alive);
        let announced = self.announced(&accept.side);
        let it = self.in_state(conn, &[State::ReqReceived])?;
        let side = &accept.side;
        it.alive = Alive::new(keep_alive);
        let rep = Rep {
            local: it.local,
            remote: it.remote,
            qkey: 0,
            qpn: side.qpn,
            announced: announced.filter(|_| it.announces),
            psn: side.psn,
            responder_resources: side.responder_resources,
            initiator_depth: side.initiator_depth,
            target_ack_delay: lifetime,
            failover: 0,
            flow_control: side.flow_control,
            rnr_retry: side.rnr_retry.min(7),
            srq: side.srq,
            ca_guid,
            private: accept.private,
        };
        it.mad = Some(Box::new(CmMessage::Rep(rep).emit(it.tid)));
        (it.state, it.mra, it.qpn, it.retries) = (State::RepSent, false, side.qpn, retries);
        self.note(conn.0);
        self.send_stored(conn.0);
        self.set_deadline(conn.0, Some(now.after(interval)));
        Ok(())
    }

    /// Rejects the connection: the answer to a request, or to a reply. Error: [`CmError::Unknown`],
    /// [`CmError::State`], [`CmError::PrivateTooLong`].
    pub fn reject(
        &mut self,
        conn: ConnId,
        reason: RejReason,
        private: &[u8],
    ) -> Result<(), CmError> {
        if private.len() > Rej::PRIVATE_LEN {
            return Err(CmError::PrivateTooLong { max: Rej::PRIVATE_LEN });
        }
        let it = self.in_state(conn, &[State::ReqReceived, State::RepReceived])?;
        it.end_reported = true;
        let subject = if it.state == State::ReqReceived { Subject::Req } else { Subject::Rep };
        self.reject_conn(conn.0, subject, reason, private);
        self.remove(conn.0);
        Ok(())
    }

    /// Tells the peer that our queue pair is in RTS. The peer has accepted before. Error:
    /// [`CmError::Unknown`] if the peer has withdrawn, [`CmError::State`],
    /// [`CmError::PrivateTooLong`].
    pub fn establish(&mut self, conn: ConnId, private: &[u8]) -> Result<(), CmError> {
        if private.len() > Rtu::PRIVATE_LEN {
            return Err(CmError::PrivateTooLong { max: Rtu::PRIVATE_LEN });
        }
        let it = self.in_state(conn, &[State::RepReceived])?;
        let rtu = Rtu { local: it.local, remote: it.remote, private };
        it.mad = Some(Box::new(CmMessage::Rtu(rtu).emit(it.tid)));
        it.state = State::Established;
        self.note(conn.0);
        self.counters.established += 1;
        self.send_stored(conn.0);
        self.watch(conn.0);
        Ok(())
    }

    /// Ends a connection. [`CmEvent::Disconnected`](super::CmEvent::Disconnected) follows when the
    /// peer has answered, or when it does not answer in time. Error: [`CmError::Unknown`] if it has
    /// ended, [`CmError::State`], [`CmError::PrivateTooLong`].
    pub fn disconnect(&mut self, now: Time, conn: ConnId, private: &[u8]) -> Result<(), CmError> {
        if private.len() > Dreq::PRIVATE_LEN {
            return Err(CmError::PrivateTooLong { max: Dreq::PRIVATE_LEN });
        }
        self.in_state(conn, &[State::Established, State::RepSent])?;
        self.begin_disconnect(now, conn.0, private);
        Ok(())
    }

    /// The program has no more interest in the connection. A pending request or reply is rejected.
    /// A connection that we accepted, or that is established, is disconnected. The only further
    /// event of the connection is its release.
    pub fn forget(&mut self, now: Time, conn: ConnId) {
        let Some(it) = self.conns.get_mut(&conn.0) else { return };
        it.end_reported = true;
        match it.state {
            State::ReqSent => {
                self.reject_conn(conn.0, Subject::Req, RejReason::TIMEOUT, &[]);
                self.remove(conn.0);
            }
            State::ReqReceived => {
                self.reject_conn(conn.0, Subject::Req, RejReason::CONSUMER, &[]);
                self.remove(conn.0);
            }
            State::RepReceived => {
                self.reject_conn(conn.0, Subject::Rep, RejReason::CONSUMER, &[]);
                self.remove(conn.0);
            }
            State::RepSent | State::Established => self.begin_disconnect(now, conn.0, &[]),
            State::DreqSent | State::TimeWait => {}
        }
    }

    /// The announcement to the peer: this device's liveness answers, and the receive queue of a
    /// side.
    fn announced(&self, side: &QpSide) -> Option<Announced> {
        let answers = self.config.answers;
        let queue = side.announced.or_else(|| answers.then(Announced::default));
        queue.map(|announced| Announced { answers, ..announced })
    }

    fn in_state(&mut self, conn: ConnId, states: &[State]) -> Result<&mut Conn, CmError> {
        match self.conns.get_mut(&conn.0) {
            None => Err(CmError::Unknown),
            Some(it) if states.contains(&it.state) => Ok(it),
            Some(it) if matches!(it.state, State::DreqSent | State::TimeWait) => {
                Err(CmError::Unknown)
            }
            Some(_) => Err(CmError::State),
        }
    }
}

/// The header before the user's private data.
pub(super) fn request_private(
    service: ServiceId,
    local: IpAddr,
    source_port: u16,
    dst: IpAddr,
) -> Vec<u8> {
    if service.port().is_none() {
        return Vec::new();
    }
    IpHeader { src: SocketAddr::new(local, source_port), dst }.bytes().to_vec()
}

/// Header and user data together, if they fit.
pub(super) fn with_user(mut header: Vec<u8>, user: &[u8], room: usize) -> Result<Vec<u8>, CmError> {
    let max = room - header.len();
    if user.len() > max {
        return Err(CmError::PrivateTooLong { max });
    }
    header.extend_from_slice(user);
    Ok(header)
}
