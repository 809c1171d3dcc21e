//! The passive side.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use rocinante_soft::model::error::VerbsError;
use rocinante_soft::model::qp::ConnectOptions;
use rocinante_soft::provider::manager::{ListensTo, Manager};
use rocinante_stack::cm::{Accept, CmEvent, ConnId, Request as Asked};
use rocinante_stack::types::Mtu;
use rocinante_stack::verbs::QpType;
use rocinante_stack::wire::cm::{RejReason, Transport};

use super::connection::Connecting;
use super::inbox::{Inbox, Port};
use super::{Params, endpoint_of, side_of, transport_of};
use crate::context::Context;
use crate::device::Device;
use crate::qp::PreparedQp;

/// Listens for connections on a port (`rdma_listen(3)`). Dropping it rejects the waiting requests.
#[derive(Debug)]
pub struct Listener(Port);

impl Listener {
    /// Listens on a port of the device: on one of its addresses, on all of IPv4 for `0.0.0.0`, or
    /// on all of both families for `::`. Of listeners on one port the most precise gets a request.
    /// At most `backlog` requests may be not yet accepted or not yet established; it
    /// rejects further peers.
    ///
    /// The port is one of `RDMA_PS_TCP`, unrelated to TCP's ports, and belongs to this device.
    ///
    /// # Errors
    /// [`VerbsError::Cm`] if there is a listener on it already; [`VerbsError::Invalid`] for an
    /// address that the device does not have, or port 0, and if a kernel's device has no address
    /// for `0.0.0.0` or `::`, which there stand for no link-local ones; [`VerbsError::Hardware`] if
    /// the kernel's connection manager cannot be used; [`VerbsError::Io`] if there are no
    /// descriptors left.
    pub fn bind(ctx: &Context, address: SocketAddr, backlog: usize) -> Result<Self, VerbsError> {
        Port::bind(ctx, address, backlog, ListensTo::Connections).map(Self)
    }

    /// The next request, if there is one now. Requests arrive only while the device is driven, by
    /// its background thread or [`Context::progress`].
    ///
    /// # Errors
    /// [`VerbsError::Hardware`] if no more requests can come, because the kernel's device is gone
    /// or its connection manager has failed; on later calls [`VerbsError::Io`].
    pub fn try_request(&self) -> Result<Option<Request>, VerbsError> {
        self.0.next(|event| match event {
            CmEvent::Request { conn, request, .. } => {
                let (device, manager) = (self.0.device.clone(), self.0.inbox.manager.clone());
                Some(Request { device, manager, conn, asked: request, decided: false })
            }
            _ => None,
        })
    }
}

listens!(Listener, Request);

/// A peer's request for a connection. The peer waits for about a minute. Dropping the request
/// rejects it.
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

    /// The local address that received the request.
    #[must_use]
    pub fn local(&self) -> IpAddr {
        self.asked.local
    }

    /// The data of the peer's program: 56 bytes, zeros behind its end.
    #[must_use]
    pub fn private_data(&self) -> &[u8] {
        &self.asked.private
    }

    /// The type of queue pair that the peer requests: a reliable connection, or an unreliable one.
    #[must_use]
    pub fn qp_type(&self) -> QpType {
        // The connection manager delivers no others.
        if self.asked.transport == Transport::Uc { QpType::Uc } else { QpType::Rc }
    }

    /// The path MTU that the peer requests. The connection has this path MTU or fails.
    #[must_use]
    pub fn mtu(&self) -> Mtu {
        self.asked.mtu
    }

    /// READs and atomics that the peer wants to have outstanding, and the number that it serves at
    /// a time.
    #[must_use]
    pub fn rd_atomic(&self) -> (u8, u8) {
        (self.asked.side.initiator_depth, self.asked.side.responder_resources)
    }

    /// Accepts: connects the queue pair and tells the peer. The queue pair's address must be the
    /// one that received the request ([`QpBuilder::sgid_index`](crate::QpBuilder::sgid_index)).
    ///
    /// # Errors
    /// [`VerbsError::Cm`] if the peer no longer waits; [`VerbsError::Invalid`] for a queue pair of
    /// another device or address, or if the link does not take the requested path MTU;
    /// [`VerbsError::Path`] if there is no way to the peer. A peer that still waits gets a REJ,
    /// with the reason "invalid path MTU" in that case.
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
        let qp = qp.connect_by_cm(&peer, ours, &options)?;
        let (serve, ask) = (options.max_dest_rd_atomic, options.max_rd_atomic);
        let side = side_of(&endpoint, serve, ask, params.options.rnr_retry, qp.srq().is_some());
        let accept = Accept { side, keep_alive: params.keep_alive_ns(), private: &params.private };
        let mailbox = self.manager.accept(self.conn, &accept, qp.breaks())?;
        self.decided = true;
        let private = std::mem::take(&mut self.asked.private);
        let inbox = Inbox::new(self.manager.clone(), mailbox);
        Ok(Connecting::accepted((inbox, self.conn), qp, self.asked.peer, private))
    }

    /// The options that both sides permit.
    fn options(&self, ours: &ConnectOptions) -> ConnectOptions {
        let side = &self.asked.side;
        ours.mtu(Some(self.asked.mtu))
            .max_rd_atomic(ours.max_rd_atomic.min(side.responder_resources))
            .max_dest_rd_atomic(ours.max_dest_rd_atomic.min(side.initiator_depth))
            .timeout(if self.asked.ack_timeout == 0 {
                ours.timeout
            } else {
                self.asked.ack_timeout
            })
            .retry_cnt(self.asked.retry_count)
            .rnr_retry(side.rnr_retry)
            .traffic_class(self.asked.traffic_class)
    }

    /// Rejects (`rdma_reject(3)`), and tells the peer's program why, in at most 148 bytes.
    ///
    /// # Errors
    /// [`VerbsError::Cm`] if that is too long (the peer is then rejected without it), or if the
    /// peer no longer waits.
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
