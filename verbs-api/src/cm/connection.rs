//! The active side, and the connections of both sides.

use std::net::SocketAddr;
use std::ops::Deref;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rocinante_soft::model::cm::CmFailure;
use rocinante_soft::model::error::{Refused, VerbsError};
use rocinante_soft::model::qp::{ConnectOptions, ModifyAttr};
use rocinante_soft::provider::random::random;
use rocinante_stack::cm::{CmEvent, ConnId, Connect, Reply};
use rocinante_stack::types::Mtu;
use rocinante_stack::verbs::QpState;
use rocinante_stack::wire::cm::{PortSpace, RejReason, ServiceId, Transport};

use super::inbox::{Inbox, Notifier};
use super::{Params, endpoint_of, side_of, transport_of};
use crate::qp::{PreparedQp, Qp};

/// A connection in the connection manager's state. Dropping it gives it up.
#[derive(Debug)]
struct Link {
    inbox: Inbox,
    conn: ConnId,
}

impl Drop for Link {
    fn drop(&mut self) {
        self.inbox.manager.forget(self.conn);
    }
}

/// A connection in setup, of either side. Dropping it gives it up.
#[derive(Debug)]
pub struct Connecting {
    stage: Stage,
    peer: SocketAddr,
    private: Vec<u8>,
    // Declared after the queue pair: the peer learns of the end once the queue pair is gone.
    link: Option<Link>,
}

#[derive(Debug)]
enum Stage {
    /// The active side, which sent a request.
    Asked(Box<PreparedQp>, ConnectOptions, Mtu),
    /// The passive side, which accepted.
    Accepted(Box<Qp>),
    /// Done or failed.
    Done,
}

impl Connecting {
    /// Requests a connection from the program that listens on `peer`, and does not wait.
    ///
    /// # Errors
    /// [`VerbsError::Cm`] for too much private data, too many connections, or an address of another
    /// family; [`VerbsError::Invalid`] for a queue pair for datagrams; [`VerbsError::Hardware`] if
    /// the kernel's connection manager cannot be used.
    pub fn start(qp: PreparedQp, peer: SocketAddr, params: &Params) -> Result<Self, VerbsError> {
        let manager = qp.device().manager();
        let transport = transport_of(&qp)?;
        // In the kernel's connection manager, `RDMA_PS_TCP` has reliable connections only.
        let space = if transport == Transport::Uc { PortSpace::Ib } else { PortSpace::Tcp };
        let endpoint = qp.endpoint();
        let options = params.options;
        let mtu = options.mtu.unwrap_or(endpoint.mtu).min(endpoint.mtu);
        let (serve, ask) = (options.max_dest_rd_atomic, options.max_rd_atomic);
        let source_port = 0x8000 | random()? as u16;
        let ask = Connect {
            local: endpoint.address,
            remote: peer.ip(),
            service: ServiceId::of_port(space, peer.port()),
            source_port,
            side: side_of(&endpoint, serve, ask, options.rnr_retry, qp.srq().is_some()),
            transport,
            mtu,
            ack_timeout: options.timeout,
            retry_count: options.retry_cnt,
            traffic_class: options.traffic_class,
            hop_limit: options.hop_limit,
            keep_alive: params.keep_alive_ns(),
            private: &params.private,
        };
        let (conn, mailbox) = manager.connect(&ask, qp.qp().breaks())?;
        Ok(Self {
            stage: Stage::Asked(Box::new(qp), options, mtu),
            peer,
            private: Vec::new(),
            link: Some(Link { inbox: Inbox::new(manager, mailbox), conn }),
        })
    }

    pub(super) fn accepted(
        (inbox, conn): (Inbox, ConnId),
        qp: Qp,
        peer: SocketAddr,
        private: Vec<u8>,
    ) -> Self {
        let link = Some(Link { inbox, conn });
        Self { stage: Stage::Accepted(Box::new(qp)), peer, private, link }
    }

    /// The queue pair: of the active side in INIT, of the passive side ready to send. Messages may
    /// complete on it already: see the [module](super). `None` once it has become a
    /// [`Connection`].
    #[must_use]
    pub fn qp(&self) -> Option<&Qp> {
        match &self.stage {
            Stage::Asked(qp, ..) => Some(qp.qp()),
            Stage::Accepted(qp) => Some(qp),
            Stage::Done => None,
        }
    }

    /// Goes on as far as possible without waiting. The device must be driven meanwhile, by its
    /// background thread or [`Context::progress`](crate::Context::progress). After a result, none
    /// follows.
    ///
    /// # Errors
    /// As [`connect`](super::connect).
    pub fn try_finish(&mut self) -> Result<Option<Connection>, VerbsError> {
        while let Some(event) = self.event()? {
            let qp = match (event, std::mem::replace(&mut self.stage, Stage::Done)) {
                (CmEvent::Replied { reply, .. }, Stage::Asked(qp, options, mtu)) => {
                    self.private.clone_from(&reply.private);
                    self.finish(*qp, &options, mtu, &reply)?
                }
                (CmEvent::Established { .. }, Stage::Accepted(qp)) => *qp,
                (CmEvent::Rejected { reason, private, .. }, _) => {
                    let private_data = private;
                    return Err(VerbsError::Cm(CmFailure::Rejected { reason, private_data }));
                }
                (CmEvent::TimedOut { .. }, _) => return Err(VerbsError::TimedOut),
                (CmEvent::Disconnected { .. }, _) => return Err(VerbsError::Cm(CmFailure::Ended)),
                (_, stage) => {
                    self.stage = stage;
                    continue;
                }
            };
            let Some(link) = self.link.take() else { break };
            let private = std::mem::take(&mut self.private);
            return Ok(Some(Connection::new(qp, link, self.peer, private)));
        }
        Ok(None)
    }

    /// `None` once it has finished.
    pub(super) fn inbox(&self) -> Option<&Inbox> {
        self.link.as_ref().map(|link| &link.inbox)
    }

    fn event(&self) -> Result<Option<CmEvent>, VerbsError> {
        self.link.as_ref().map_or(Ok(None), |link| link.inbox.pop())
    }

    /// The peer has accepted: connects the queue pair.
    fn finish(
        &self,
        qp: PreparedQp,
        options: &ConnectOptions,
        mtu: Mtu,
        reply: &Reply,
    ) -> Result<Qp, VerbsError> {
        let Some(link) = &self.link else { return Err(VerbsError::Cm(CmFailure::Ended)) };
        let chosen = link.inbox.manager.chosen(link.conn);
        let mtu = chosen.map_or(mtu, |chosen| chosen.mtu);
        let options = options
            .mtu(Some(mtu))
            .max_rd_atomic(options.max_rd_atomic.min(reply.side.responder_resources))
            .max_dest_rd_atomic(options.max_dest_rd_atomic.min(reply.side.initiator_depth))
            .rnr_retry(reply.side.rnr_retry);
        let (peer, ours) = (endpoint_of(&reply.side, self.peer, mtu), chosen.map(|it| it.psn));
        match qp.connect_by_cm(&peer, ours, &options) {
            Ok(qp) => {
                link.inbox.manager.establish(link.conn)?;
                Ok(qp)
            }
            Err(Refused { error, .. }) => {
                // The peer gets no other answer, whether it still waits or not.
                let _ = link.inbox.manager.reject(link.conn, RejReason::CONSUMER, &[]);
                Err(error)
            }
        }
    }

    /// Waits for the connection.
    ///
    /// # Errors
    /// As [`connect`](super::connect).
    pub fn wait(mut self, patience: Duration) -> Result<Connection, VerbsError> {
        let Some(link) = &self.link else { return Err(VerbsError::Cm(CmFailure::Ended)) };
        let inbox = link.inbox.clone();
        inbox.wait(Some(patience), || self.try_finish())
    }

    /// A descriptor that is readable while [`try_finish`](Self::try_finish) has something to do.
    ///
    /// # Errors
    /// [`VerbsError::Io`] if there are no descriptors left; [`VerbsError::Cm`] once it has
    /// finished.
    pub fn fd(&self) -> Result<BorrowedFd<'_>, VerbsError> {
        match &self.link {
            Some(link) => link.inbox.fd(),
            None => Err(VerbsError::Cm(CmFailure::Ended)),
        }
    }

    /// The same descriptor, for a reactor to own. It stays valid for the finished connection.
    ///
    /// # Errors
    /// As [`fd`](Self::fd).
    pub fn notifier(&self) -> Result<Notifier, VerbsError> {
        match &self.link {
            Some(link) => link.inbox.notifier(),
            None => Err(VerbsError::Cm(CmFailure::Ended)),
        }
    }
}

/// A connected queue pair. Dropping it disconnects and destroys it.
///
/// When the peer disconnects, the queue pair goes to the error state, so that all posted requests
/// complete.
#[derive(Debug)]
pub struct Connection {
    qp: Qp,
    peer: SocketAddr,
    private: Vec<u8>,
    ended: AtomicBool,
    // Declared after the queue pair: the peer learns of the end once the queue pair is gone.
    link: Link,
}

impl Connection {
    fn new(qp: Qp, link: Link, peer: SocketAddr, private: Vec<u8>) -> Self {
        Self { qp, peer, private, ended: AtomicBool::new(false), link }
    }

    pub(super) fn inbox(&self) -> &Inbox {
        &self.link.inbox
    }

    /// The queue pair.
    #[must_use]
    pub fn qp(&self) -> &Qp {
        &self.qp
    }

    /// The peer's address and port.
    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// The data of the peer's program from the setup: 56 bytes if the peer was the active side, 196
    /// if it accepted, zeros behind its end.
    #[must_use]
    pub fn private_data(&self) -> &[u8] {
        &self.private
    }

    /// Ends the connection (`rdma_disconnect(3)`). The queue pair goes to the error state and all
    /// posted requests complete. The connection manager tells the peer, and repeats that until the
    /// peer answers, while the device is open. The call does not wait for the answer. A program
    /// that is about to exit calls [`wait_disconnected`](Self::wait_disconnected) first; else a
    /// peer that missed the message stays half-connected.
    ///
    /// # Errors
    /// As [`Qp::modify`]. A connection that has already ended is no error.
    pub fn disconnect(&self) -> Result<(), VerbsError> {
        self.link.inbox.manager.flush();
        self.qp.modify(&ModifyAttr::state(QpState::Err))?;
        self.link.inbox.manager.disconnect(self.link.conn)
    }

    /// Whether either side has ended it. The device must be driven to notice that.
    #[must_use]
    pub fn is_disconnected(&self) -> bool {
        loop {
            match self.link.inbox.pop() {
                Ok(None) => return self.ended.load(Ordering::Relaxed),
                Ok(Some(CmEvent::Established { .. })) => {}
                Ok(Some(_)) => self.ended.store(true, Ordering::Relaxed),
                // If no more events can come, that is an end, too.
                Err(_) => {
                    self.ended.store(true, Ordering::Relaxed);
                    return true;
                }
            }
        }
    }

    /// Waits until either side has ended it.
    ///
    /// # Errors
    /// [`VerbsError::TimedOut`] if it has not ended within `timeout`.
    pub fn wait_disconnected(&self, timeout: Duration) -> Result<(), VerbsError> {
        let ended = || Ok(self.is_disconnected().then_some(()));
        self.link.inbox.wait(Some(timeout), ended)
    }

    /// A descriptor that becomes readable when the connection ends, and stays so.
    ///
    /// # Errors
    /// [`VerbsError::Io`] if there are no descriptors left.
    pub fn fd(&self) -> Result<BorrowedFd<'_>, VerbsError> {
        self.link.inbox.fd()
    }

    /// The same descriptor, for a reactor to own.
    ///
    /// # Errors
    /// As [`fd`](Self::fd).
    pub fn notifier(&self) -> Result<Notifier, VerbsError> {
        self.link.inbox.notifier()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.link.inbox.manager.flush();
    }
}

impl Deref for Connection {
    type Target = Qp;

    fn deref(&self) -> &Qp {
        &self.qp
    }
}
