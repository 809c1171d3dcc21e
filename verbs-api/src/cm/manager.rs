//! What the connection manager of the device in software and the kernel's have in common.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use rocinante_stack::cm::{Accept, AskId, ConnId, Connect, ListenerId, QueryId};
use rocinante_stack::types::{Mtu, Psn, Qpn};
use rocinante_stack::wire::cm::{RejReason, SidrStatus};

use super::Mailbox;
use crate::context::Device;
use crate::error::VerbsError;
use crate::qp::Qp;

/// Makes connections, and tells what becomes of them in mailboxes.
pub(crate) trait Manager: fmt::Debug + Send + Sync {
    /// Listens to those who come to a port, at one of the device's addresses or at all of them.
    fn listen(&self, place: Place, to: ListensTo)
    -> Result<(ListenerId, Arc<Mailbox>), VerbsError>;

    /// Listens no longer; rejects what the program has not taken.
    fn unlisten(&self, listener: ListenerId, to: ListensTo);

    /// Asks a peer to be connected with the queue pair.
    fn connect(&self, ask: &Connect<'_>, qp: &Qp) -> Result<(ConnId, Arc<Mailbox>), VerbsError>;

    /// What the manager has chosen for the queue pair, unless it leaves that to the queue pair.
    fn chosen(&self, conn: ConnId) -> Option<Chosen>;

    /// Accepts what a peer asked for; the queue pair is in RTS.
    fn accept(
        &self,
        conn: ConnId,
        accept: &Accept<'_>,
        qp: &Qp,
    ) -> Result<Arc<Mailbox>, VerbsError>;

    /// Rejects what a peer asked for, or its answer.
    fn reject(&self, conn: ConnId, reason: RejReason, private: &[u8]) -> Result<(), VerbsError>;

    /// The peer has accepted, and the queue pair is in RTS.
    fn establish(&self, conn: ConnId) -> Result<(), VerbsError>;

    /// Sends what waits for company: once a queue pair is in the error state the peer would never get it.
    fn flush(&self);

    /// Ends a connection. That it has ended is no error.
    fn disconnect(&self, conn: ConnId) -> Result<(), VerbsError>;

    /// The program is not interested any more: what is under way is rejected or disconnected.
    fn forget(&self, conn: ConnId);

    /// Answers a question with a queue pair and its Q_Key, or refuses.
    fn answer(
        &self,
        ask: AskId,
        answer: Result<(Qpn, u32), SidrStatus>,
        private: &[u8],
    ) -> Result<(), VerbsError>;

    /// Asks for a datagram service, from an address of the device's.
    fn resolve(
        &self,
        local: IpAddr,
        peer: SocketAddr,
        private: &[u8],
    ) -> Result<(QueryId, Arc<Mailbox>), VerbsError>;

    /// Asks no longer.
    fn forget_query(&self, query: QueryId);

    /// Sleeps until the mailbox has something, or `until`, and drives the device meanwhile where it has to be.
    fn wait(&self, mailbox: &Mailbox, until: Option<Instant>) -> io::Result<()>;
}

/// What the kernel's connection manager does not let its user choose.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Chosen {
    /// What the queue pair has to receive first.
    pub(crate) psn: Psn,
    /// The connection's path MTU.
    pub(crate) mtu: Mtu,
}

/// Where somebody listens, and how many may wait there.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    /// All of the device's if none.
    pub(crate) address: Option<IpAddr>,
    pub(crate) port: u16,
    pub(crate) backlog: usize,
}

/// What those who come to a listener want.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ListensTo {
    /// A connection.
    Connections,
    /// A queue pair for datagrams.
    Datagrams,
}

impl Place {
    /// Of what a program says: the unspecified address stands for all.
    pub(super) fn of(
        device: &Device,
        address: SocketAddr,
        backlog: usize,
    ) -> Result<Self, VerbsError> {
        let ip = Some(address.ip()).filter(|ip| !ip.is_unspecified());
        if let Some(ip) = ip.filter(|ip| !device.gids().contains(ip)) {
            let name = device.name();
            let why = format!("{name} has not the address {ip}: see `rocinante devices`");
            return Err(VerbsError::Invalid(why));
        }
        if address.port() == 0 {
            return Err(VerbsError::Invalid("port 0 is none: choose one".into()));
        }
        Ok(Self { address: ip, port: address.port(), backlog })
    }
}

impl Device {
    /// Its connection manager.
    pub(super) fn manager(&self) -> Arc<dyn Manager> {
        match self {
            Self::Soft(device) => device.clone(),
            Self::Hw(device) => device.clone(),
        }
    }
}
