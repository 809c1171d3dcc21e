//! The common interface of two connection managers: that of the device in software, and the
//! kernel's.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Weak};
use std::time::Instant;

use rocinante_stack::cm::{Accept, ConnId, Connect, ListenerId, SidrQueryId, SidrReqId};
use rocinante_stack::types::{Mtu, Psn, Qpn};
use rocinante_stack::wire::cm::{RejReason, SidrStatus};

use super::mailbox::Mailbox;
use crate::model::error::VerbsError;

/// A new object, and the mailbox of its events.
pub type WithMailbox<T> = Result<(T, Arc<Mailbox>), VerbsError>;

/// A queue pair that breaks when the peer ends its connection.
pub trait Breaks: fmt::Debug + Send + Sync {
    /// Takes it to the error state, so that all posted requests complete.
    fn break_off(&self);
}

/// Makes connections, and reports their events in mailboxes.
pub trait Manager: fmt::Debug + Send + Sync {
    /// Listens on a port, at one of the device's addresses or at all of them.
    fn listen(&self, place: Place, to: ListensTo) -> WithMailbox<ListenerId>;

    /// Stops listening, and rejects the requests that the program has not taken.
    fn unlisten(&self, listener: ListenerId, to: ListensTo);

    /// Requests a connection of a queue pair from a peer. `qp` breaks when the peer ends the
    /// connection; `None` if the manager finds the queue pair by its number.
    fn connect(&self, ask: &Connect<'_>, qp: Option<Weak<dyn Breaks>>) -> WithMailbox<ConnId>;

    /// The values that the manager has chosen for the queue pair, if it chooses any.
    fn chosen(&self, conn: ConnId) -> Option<Chosen>;

    /// Accepts a peer's request; the queue pair is in RTS. `qp` is as in
    /// [`connect`](Self::connect).
    fn accept(
        &self,
        conn: ConnId,
        accept: &Accept<'_>,
        qp: Option<Weak<dyn Breaks>>,
    ) -> Result<Arc<Mailbox>, VerbsError>;

    /// Rejects a peer's request, or its answer.
    fn reject(&self, conn: ConnId, reason: RejReason, private: &[u8]) -> Result<(), VerbsError>;

    /// The peer has accepted, and the queue pair is in RTS.
    fn establish(&self, conn: ConnId) -> Result<(), VerbsError>;

    /// Sends batched packets: once a queue pair is in the error state, the peer would never get
    /// them.
    fn flush(&self);

    /// Ends a connection. One that has already ended is no error.
    fn disconnect(&self, conn: ConnId) -> Result<(), VerbsError>;

    /// The program has dropped the connection: rejects or disconnects it.
    fn forget(&self, conn: ConnId);

    /// Answers a datagram service request with a queue pair and its Q_Key, or refuses.
    fn answer(
        &self,
        ask: SidrReqId,
        answer: Result<(Qpn, u32), SidrStatus>,
        private: &[u8],
    ) -> Result<(), VerbsError>;

    /// Requests a datagram service, from an address of the device.
    fn resolve(&self, local: IpAddr, peer: SocketAddr, private: &[u8]) -> WithMailbox<SidrQueryId>;

    /// Drops the request.
    fn forget_query(&self, query: SidrQueryId);

    /// Sleeps until the mailbox has an event, or until `until`. Drives the device meanwhile if it
    /// needs that.
    fn wait(&self, mailbox: &Mailbox, until: Option<Instant>) -> io::Result<()>;
}

/// The values that the kernel's connection manager chooses itself.
#[derive(Debug, Clone, Copy)]
pub struct Chosen {
    /// The first PSN that the queue pair receives.
    pub psn: Psn,
    /// The connection's path MTU.
    pub mtu: Mtu,
}

/// The place of a listener, and its backlog.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// The unspecified address of a family for all its addresses; `None` for all of the device.
    pub address: Option<IpAddr>,
    pub port: u16,
    pub backlog: usize,
}

impl Place {
    /// Whether a listener there takes requests to an address.
    pub fn covers(&self, address: &IpAddr) -> bool {
        self.address.is_none_or(|own| match own.is_unspecified() {
            true => own.is_ipv4() == address.is_ipv4(),
            false => own == *address,
        })
    }
}

/// The kind of requests that a listener takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ListensTo {
    /// A connection.
    Connections,
    /// A queue pair for datagrams.
    Datagrams,
}
