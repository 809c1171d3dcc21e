//! Events of the kernel.

use std::io;
use std::mem;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Weak;
use std::sync::atomic::Ordering;

use rocinante_soft::model::error::VerbsError;
use rocinante_soft::provider::manager::Chosen;
use rocinante_soft::provider::{trace, wake};
use rocinante_stack::cm::{Asked, CmEvent, Ended, QpSide, Reply, Request};
use rocinante_stack::types::{Mtu, Psn, Qpn};
use rocinante_stack::verbs::QpState;
use rocinante_stack::wire::cm::{PortSpace, RejReason, ServiceId, SidrStatus, Transport};
use rustix::io::Errno;

use super::super::ffi::rdmacm::{Event, Id, Param, Path, event};
use super::super::{convert, error};
use super::{
    Conn, FINDING, Listening, Query, Shared, Stage, Table, ask_id, conn_id, listener_id, query_id,
};

/// An object to drop after the table is unlocked, because destroying an identifier is a call into
/// the kernel.
#[derive(Debug)]
enum Gone {
    Nothing,
    Conn { _conn: Conn },
    Query { _query: Query },
    Id { _id: Id },
    Listening { _listening: Listening },
}

impl From<Option<Id>> for Gone {
    fn from(id: Option<Id>) -> Self {
        id.map_or(Self::Nothing, |id| Self::Id { _id: id })
    }
}

impl Shared {
    /// Handles events until `stop` is readable.
    pub(super) fn serve(&self, stop: &OwnedFd) {
        loop {
            wake::wait(Some((self.channel.fd(), false)), stop.as_fd(), None);
            if wake::take(stop) {
                return;
            }
            loop {
                match self.channel.next_event() {
                    Ok(Some(event)) => {
                        drop(self.handle(event));
                        let woken = mem::take(&mut self.table.lock().woken);
                        drop(woken);
                    }
                    Ok(None) => break,
                    Err(error) if error.raw_os_error() == Some(Errno::INTR.raw_os_error()) => {}
                    Err(error) => return self.fail(&error),
                }
            }
        }
    }

    /// The kernel reports no more events.
    fn fail(&self, why: &io::Error) {
        self.dead.store(true, Ordering::Release);
        let table = mem::take(&mut *self.table.lock());
        // A request without a decision has its listener's mailbox; it is withdrawn there, because
        // no decision is possible any more.
        for (number, conn) in &table.conns {
            if matches!(conn.stage, Stage::Requested(_)) {
                conn.mailbox.withdraw(conn_id(*number));
            }
        }
        let decided =
            table.conns.values().filter(|conn| !matches!(conn.stage, Stage::Requested(_)));
        let mailboxes = decided.map(|conn| &conn.mailbox);
        let mailboxes = mailboxes.chain(table.queries.values().map(|query| &query.mailbox));
        for mailbox in mailboxes.chain(table.listeners.values().map(|one| &one.mailbox)) {
            let again = io::Error::from_raw_os_error(why.raw_os_error().unwrap_or_default());
            drop(mailbox.fail(error::failed("rdma_get_cm_event", again)));
        }
    }

    fn handle(&self, event: Event) -> Gone {
        let Ok(number) = u32::try_from(event.number) else { return event.id.into() };
        let mut table = self.table.lock();
        if event.kind == event::CONNECT_REQUEST {
            self.requested(&mut table, number, event).into()
        } else if table.conns.contains_key(&number) {
            let gone = of_conn(&mut table, number, event);
            gone.map_or(Gone::Nothing, |conn| Gone::Conn { _conn: conn })
        } else if table.queries.contains_key(&number) {
            let gone = of_query(&mut table, number, event);
            gone.map_or(Gone::Nothing, |query| Gone::Query { _query: query })
        } else if event.kind != event::DEVICE_REMOVAL {
            Gone::Nothing
        } else if let Some(listening) = table.listeners.remove(&number) {
            table.woken.append(listening.mailbox.fail(removed()));
            Gone::Listening { _listening: listening }
        } else {
            // A service request that waits for an answer.
            table.asks.remove(&number).into()
        }
    }

    /// Handles a peer's request. Returns its identifier if it must be dropped, which tells the
    /// peer.
    fn requested(&self, table: &mut Table, listener: u32, event: Event) -> Option<Id> {
        let id = event.id?;
        let (local, peer) = id.addresses()?;
        let Some(listening) = table.listeners.get(&listener) else { return Some(id) };
        let (mailbox, backlog) = (listening.mailbox.clone(), listening.backlog);
        if self.check(&id, local.ip()).is_err() {
            return Some(id);
        }
        if id.is_datagrams() {
            if mailbox.len() >= backlog {
                return Some(id);
            }
            let number = table.number();
            id.set_number(number.into());
            let service = ServiceId::of_port(PortSpace::Udp, local.port());
            let asked = Asked { local: local.ip(), peer, service, private: event.private };
            table.asks.insert(number, id);
            let (listener, ask) = (listener_id(listener), ask_id(number));
            let asked = CmEvent::Asked { listener, ask, asked: Box::new(asked) };
            trace::connection(&asked);
            table.woken.append(mailbox.push(asked));
            return None;
        }
        let Ok(agreed) = Agreed::of(&id) else { return Some(id) };
        if table.waiting(listener) >= backlog {
            return Some(id);
        }
        let number = table.number();
        id.set_number(number.into());
        let transport = if id.is_unreliable() { Transport::Uc } else { Transport::Rc };
        let request = Request {
            local: local.ip(),
            peer,
            service: ServiceId::of_port(PortSpace::Tcp, local.port()),
            side: agreed.side(&event.param),
            transport,
            mtu: agreed.mtu,
            ack_timeout: agreed.timeout,
            retry_count: agreed.retry_count,
            traffic_class: agreed.traffic_class,
            private: event.private,
        };
        let stage = Stage::Requested(listener);
        let chosen = Some(agreed.chosen());
        let conn = Conn { id, stage, mailbox, qp: None, chosen };
        let mailbox = conn.mailbox.clone();
        table.conns.insert(number, conn);
        let (listener, conn) = (listener_id(listener), conn_id(number));
        let request = CmEvent::Request { listener, conn, request: Box::new(request) };
        trace::connection(&request);
        table.woken.append(mailbox.push(request));
        None
    }
}

/// The error for a device that the kernel has removed.
fn removed() -> VerbsError {
    error::failed("the device", Errno::NODEV.into())
}

/// Handles an event of a connection. Returns the connection if it is over.
fn of_conn(table: &mut Table, number: u32, event: Event) -> Option<Conn> {
    let conn = table.conns.get_mut(&number)?;
    let id = conn_id(number);
    let over: Result<CmEvent, VerbsError> = match event.kind {
        event::ADDR_RESOLVED => match conn.find_route() {
            Ok(()) => return None,
            Err(error) => Err(error),
        },
        event::ROUTE_RESOLVED => match conn.ask() {
            Ok(()) => return None,
            Err(error) => Err(error::failed("rdma_connect", error)),
        },
        event::CONNECT_RESPONSE => match Agreed::of(&conn.id) {
            Ok(agreed) => {
                conn.stage = Stage::Replied;
                conn.chosen = Some(agreed.chosen());
                let side = agreed.side(&event.param);
                let reply = Reply { side, target_ack_delay: 0, private: event.private };
                let replied = CmEvent::Replied { conn: id, reply: Box::new(reply) };
                trace::connection(&replied);
                table.woken.append(conn.mailbox.push(replied));
                return None;
            }
            Err(error) => Err(error::failed("rdma_init_qp_attr", error)),
        },
        event::ESTABLISHED => {
            if matches!(conn.stage, Stage::Accepted(_)) {
                conn.stage = Stage::Established;
                let established = CmEvent::Established { conn: id };
                trace::connection(&established);
                table.woken.append(conn.mailbox.push(established));
            }
            return None;
        }
        event::REJECTED => {
            let reason = RejReason(u16::try_from(event.status).unwrap_or(0));
            Ok(CmEvent::Rejected { conn: id, reason, private: event.private })
        }
        event::DISCONNECTED => {
            conn.end();
            Ok(CmEvent::Disconnected { conn: id, ended: Ended::ByPeer })
        }
        event::ADDR_ERROR | event::ROUTE_ERROR | event::CONNECT_ERROR | event::UNREACHABLE => {
            failure(event.status).map(|()| CmEvent::TimedOut { conn: id })
        }
        event::DEVICE_REMOVAL => Err(removed()),
        _ => return None,
    };
    if matches!(conn.stage, Stage::Requested(_)) {
        // No decision is needed any more. If the program has already taken the request, its
        // decision reports the error.
        conn.mailbox.withdraw(id);
    } else {
        table.woken.append(match over {
            Ok(event) => {
                trace::connection(&event);
                conn.mailbox.push(event)
            }
            Err(why) => conn.mailbox.fail(why),
        });
    }
    table.conns.remove(&number)
}

/// Handles an event of a query. Returns the query if it is over.
fn of_query(table: &mut Table, number: u32, event: Event) -> Option<Query> {
    let query = table.queries.get(&number)?;
    let id = query_id(number);
    let over = match event.kind {
        event::ADDR_RESOLVED => match find_route(&query.id, None) {
            Ok(()) => return None,
            Err(error) => Err(error),
        },
        event::ROUTE_RESOLVED => match query.ask() {
            Ok(()) => return None,
            Err(error) => Err(error::failed("rdma_connect", error)),
        },
        event::ESTABLISHED => {
            let Param { qp_num, qkey, .. } = event.param;
            let (qpn, private) = (Qpn::new(qp_num), event.private);
            Ok(CmEvent::Resolved { query: id, qpn, qkey, private })
        }
        // A status from the peer is positive.
        event::UNREACHABLE if event.status > 0 => {
            let status = u8::try_from(event.status).ok().map(SidrStatus);
            Ok(CmEvent::Unresolved { query: id, status, private: event.private })
        }
        event::ADDR_ERROR | event::ROUTE_ERROR | event::CONNECT_ERROR | event::UNREACHABLE => {
            let (status, private) = (None, Vec::new());
            failure(event.status).map(|()| CmEvent::Unresolved { query: id, status, private })
        }
        event::DEVICE_REMOVAL => Err(removed()),
        _ => return None,
    };
    table.woken.append(match over {
        Ok(event) => {
            trace::connection(&event);
            query.mailbox.push(event)
        }
        Err(why) => query.mailbox.fail(why),
    });
    table.queries.remove(&number)
}

/// Uses this path, or lets the kernel find one.
fn find_route(id: &Id, path: Option<&Path>) -> Result<(), VerbsError> {
    match path {
        None => id.resolve_route(FINDING).map_err(error::no_way),
        Some(path) => id.set_path(path).map_err(|why| error::failed("rdma_set_option", why)),
    }
}

impl Conn {
    fn find_route(&self) -> Result<(), VerbsError> {
        let Stage::Finding(question) = &self.stage else { return Ok(()) };
        find_route(&self.id, question.path.as_ref())
    }

    /// Sends the request to the peer, now that there is a path.
    fn ask(&mut self) -> io::Result<()> {
        match mem::replace(&mut self.stage, Stage::Asked) {
            Stage::Finding(question) => self.id.connect(&question.terms, &question.private),
            stage => {
                self.stage = stage;
                Ok(())
            }
        }
    }

    /// The connection has ended: confirms that to the peer, and completes the posted requests.
    fn end(&self) {
        // The connection is gone in any case.
        let _ = self.id.disconnect();
        if let Some(qp) = self.qp.as_ref().and_then(Weak::upgrade) {
            qp.break_off();
        }
    }
}

impl Query {
    fn ask(&self) -> io::Result<()> {
        self.id.connect(&self.question.terms, &self.question.private)
    }
}

/// The parameters of both sides' queue pairs, as the kernel and the peer agreed them.
struct Agreed {
    dest_qpn: Qpn,
    rq_psn: Psn,
    sq_psn: Psn,
    mtu: Mtu,
    timeout: u8,
    retry_count: u8,
    rnr_retry: u8,
    traffic_class: u8,
}

impl Agreed {
    fn of(id: &Id) -> io::Result<Self> {
        let rtr = id.init_qp_attr(convert::qp_state_number(QpState::Rtr))?;
        let rts = id.init_qp_attr(convert::qp_state_number(QpState::Rts))?;
        let mtu = convert::mtu(rtr.path_mtu).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Self {
            dest_qpn: Qpn::new(rtr.dest_qp_num),
            rq_psn: Psn::new(rtr.rq_psn),
            sq_psn: Psn::new(rts.sq_psn),
            mtu,
            timeout: rts.timeout,
            retry_count: rts.retry_cnt,
            rnr_retry: rts.rnr_retry,
            traffic_class: rtr.ah_attr.grh.traffic_class,
        })
    }

    fn chosen(&self) -> Chosen {
        Chosen { psn: self.rq_psn, mtu: self.mtu }
    }

    /// The peer's side. In an event, the values for READs and atomics are those for our side.
    fn side(&self, param: &Param) -> QpSide {
        QpSide {
            qpn: self.dest_qpn,
            psn: self.sq_psn,
            responder_resources: param.initiator_depth,
            initiator_depth: param.responder_resources,
            rnr_retry: self.rnr_retry,
            flow_control: false,
            srq: param.srq,
            announced: None,
        }
    }
}

/// `Ok` for a peer that is only silent, else the reason why there is no path to it.
fn failure(status: i32) -> Result<(), VerbsError> {
    let errno = status.saturating_abs();
    if errno == Errno::TIMEDOUT.raw_os_error() {
        return Ok(());
    }
    Err(error::no_way(io::Error::from_raw_os_error(errno)))
}
