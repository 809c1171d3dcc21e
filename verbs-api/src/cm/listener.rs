//! The passive side.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use rocinante_stack::cm::{Accept, CmEvent, ConnId, Request as Asked};
use rocinante_stack::types::Mtu;
use rocinante_stack::verbs::QpType;
use rocinante_stack::wire::cm::{RejReason, Transport};

use super::connection::Connecting;
use super::inbox::{Inbox, Port};
use super::{ListensTo, Manager, Params, endpoint_of, side_of, transport_of};
use crate::context::{Context, Device};
use crate::error::VerbsError;
use crate::qp::{ConnectOptions, PreparedQp};

/// Listens for connections on a port (`rdma_listen(3)`); dropping it rejects who waits.
#[derive(Debug)]
pub struct Listener(Port);

impl Listener {
    /// Listens on a port of the device: on one of its addresses, or on all of them if the address is the unspecified one. Of requests that
    /// are not accepted yet, or not established, there are `backlog` at most; further peers are rejected.
    ///
    /// The port is one of `RDMA_PS_TCP`, which has nothing to do with TCP's, and it is this device's.
    ///
    /// # Errors
    /// [`VerbsError::Cm`] if somebody listens there already; [`VerbsError::Invalid`] for an address that the device has not, or port 0;
    /// [`VerbsError::Hardware`] if the kernel's connection manager cannot be used; [`VerbsError::Io`] if there are no descriptors left.
    pub fn bind(ctx: &Context, address: SocketAddr, backlog: usize) -> Result<Self, VerbsError> {
        Port::bind(ctx, address, backlog, ListensTo::Connections).map(Self)
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.0.address
    }

    /// The next request, if there is one now. The device must be driven for one to come, by its background thread or
    /// [`Context::progress`].
    ///
    /// # Errors
    /// [`VerbsError::Hardware`] if nobody will come any more, because the kernel's device is gone or its connection manager has failed; then
    /// [`VerbsError::Io`] whenever it is asked again.
    pub fn try_request(&self) -> Result<Option<Request>, VerbsError> {
        self.0.next(|event| match event {
            CmEvent::Request { conn, request, .. } => {
                let (device, manager) = (self.0.device.clone(), self.0.inbox.manager.clone());
                Some(Request { device, manager, conn, asked: request, decided: false })
            }
            _ => None,
        })
    }

    /// Waits for the next request.
    ///
    /// # Errors
    /// [`VerbsError::TimedOut`] if there is none within `timeout`; `None` waits for ever. As [`try_request`](Self::try_request).
    pub fn request(&self, timeout: Option<Duration>) -> Result<Request, VerbsError> {
        self.0.inbox.wait(timeout, || self.try_request())
    }
}

/// Readable while [`try_request`](Listener::try_request) has something, or an error.
impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Listener {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}
/// A peer asks for a connection. It is patient for about a minute; dropping the request rejects it.
#[derive(Debug)]
pub struct Request {
    device: Device,
    manager: Arc<dyn Manager>,
    conn: ConnId,
    asked: Box<Asked>,
    decided: bool,
}

impl Request {
    /// The peer's address and port.
    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        self.asked.peer
    }

    /// Our address, to which the request came.
    #[must_use]
    pub fn local(&self) -> IpAddr {
        self.asked.local
    }

    /// What the peer's program says: 56 bytes, zeros behind what it filled.
    #[must_use]
    pub fn private_data(&self) -> &[u8] {
        &self.asked.private
    }

    /// The type of queue pair that the peer asks for: a reliable connection, or an unreliable one.
    #[must_use]
    pub fn qp_type(&self) -> QpType {
        // The connection manager hands over no others.
        if self.asked.transport == Transport::Uc { QpType::Uc } else { QpType::Rc }
    }

    /// The path MTU that the peer asks for; the connection has it, or there is none.
    #[must_use]
    pub fn mtu(&self) -> Mtu {
        self.asked.mtu
    }

    /// READs and atomics that the peer wants to have outstanding, and those that it serves at a time.
    #[must_use]
    pub fn rd_atomic(&self) -> (u8, u8) {
        (self.asked.side.initiator_depth, self.asked.side.responder_resources)
    }

    /// Accepts: connects the queue pair and tells the peer. The queue pair's address must be that to which the request came
    /// ([`QpBuilder::gid_index`](crate::QpBuilder::gid_index)).
    ///
    /// # Errors
    /// [`VerbsError::Cm`] if the peer does not wait any more; [`VerbsError::Invalid`] for a queue pair of another device or address,
    /// or if the link does not take the path MTU that the peer asks for, which is told so; [`VerbsError::Path`]. The peer is rejected then.
    pub fn accept(mut self, qp: PreparedQp, params: &Params) -> Result<Connecting, VerbsError> {
        if transport_of(&qp)? != self.asked.transport {
            self.decided = true;
            self.manager.reject(self.conn, RejReason::INVALID_TRANSPORT_TYPE, &[])?;
            let (asked, has) = (self.qp_type(), qp.qp_type());
            let why = format!(
                "the peer asks for {asked:?}, the queue pair is {has:?}: make it of the type that the request says"
            );
            return Err(VerbsError::Invalid(why));
        }
        if !self.device.is(qp.device()) {
            let why = "the queue pair is another device's: make it on the one that listens";
            return Err(VerbsError::Invalid(why.into()));
        }
        let endpoint = qp.endpoint();
        if endpoint.address != self.asked.local {
            let why = format!(
                "the request came to {}, the queue pair is of {}: give it that GID index",
                self.asked.local, endpoint.address
            );
            return Err(VerbsError::Invalid(why));
        }
        if self.asked.mtu > endpoint.mtu {
            self.decided = true;
            self.manager.reject(self.conn, RejReason::INVALID_MTU, &[])?;
            let why = format!(
                "the peer asks for a path MTU of {}, the link takes {}: raise its MTU or lower the peer's",
                self.asked.mtu, endpoint.mtu
            );
            return Err(VerbsError::Invalid(why));
        }
        let options = self.options(&params.options);
        let peer = endpoint_of(&self.asked.side, self.asked.peer, self.asked.mtu);
        let ours = self.manager.chosen(self.conn).map(|chosen| chosen.psn);
        let qp = qp.connect_by_cm(&peer, ours, &options).map_err(|(_, error)| error)?;
        let (serve, ask) = (options.max_dest_rd_atomic, options.max_rd_atomic);
        let side = side_of(&endpoint, serve, ask, params.options.rnr_retry, qp.srq().is_some());
        let accept = Accept { side, private: &params.private };
        let mailbox = self.manager.accept(self.conn, &accept, &qp)?;
        self.decided = true;
        let private = std::mem::take(&mut self.asked.private);
        let inbox = Inbox::new(self.manager.clone(), mailbox);
        Ok(Connecting::accepted((inbox, self.conn), qp, self.asked.peer, private))
    }

    /// What both sides permit.
    fn options(&self, ours: &ConnectOptions) -> ConnectOptions {
        let side = &self.asked.side;
        ConnectOptions {
            mtu: Some(self.asked.mtu),
            max_rd_atomic: ours.max_rd_atomic.min(side.responder_resources),
            max_dest_rd_atomic: ours.max_dest_rd_atomic.min(side.initiator_depth),
            timeout: if self.asked.ack_timeout == 0 {
                ours.timeout
            } else {
                self.asked.ack_timeout
            },
            retry_cnt: self.asked.retry_count,
            rnr_retry: side.rnr_retry,
            traffic_class: self.asked.traffic_class,
            ..*ours
        }
    }

    /// Rejects (`rdma_reject(3)`), and tells the peer's program why: 148 bytes at most.
    ///
    /// # Errors
    /// [`VerbsError::Cm`] if that is too much, and the peer is rejected without a word; or if it
    /// does not wait any more.
    pub fn reject(mut self, private_data: &[u8]) -> Result<(), VerbsError> {
        self.manager.reject(self.conn, RejReason::CONSUMER, private_data)?;
        self.decided = true;
        Ok(())
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if !self.decided {
            self.manager.forget(self.conn);
        }
    }
}
