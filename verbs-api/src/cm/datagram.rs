//! Datagram services: finding the queue pair of a service, and answering for one.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use rocinante_soft::model::cm::CmFailure;
use rocinante_soft::model::error::VerbsError;
use rocinante_soft::model::qp::PeerPath;
use rocinante_soft::provider::manager::{ListensTo, Manager};
use rocinante_stack::cm::{Asked, CmEvent, SidrQueryId, SidrReqId};
use rocinante_stack::types::Qpn;
use rocinante_stack::verbs::{Destination, QpType};
use rocinante_stack::wire::cm::SidrStatus;

use super::inbox::{Inbox, Notifier, Port};
use crate::ah::Ah;
use crate::context::{Context, Pd};
use crate::device::Device;
use crate::qp::Qp;

/// Listens on a port for requests for a queue pair for datagrams (`rdma_listen(3)` with
/// `RDMA_PS_UDP`). Dropping it refuses the waiting requests.
#[derive(Debug)]
pub struct DatagramListener(Port);

impl DatagramListener {
    /// Listens on a port of the device, at an address as of
    /// [`Listener::bind`](super::Listener::bind). At most `backlog` requests wait for an answer; it
    /// drops further ones, and their peers repeat them.
    ///
    /// The port is one of `RDMA_PS_UDP`, unrelated to UDP's ports, and belongs to this device.
    ///
    /// # Errors
    /// As [`Listener::bind`](super::Listener::bind).
    pub fn bind(ctx: &Context, address: SocketAddr, backlog: usize) -> Result<Self, VerbsError> {
        Port::bind(ctx, address, backlog, ListensTo::Datagrams).map(Self)
    }

    /// The next request, if there is one now. Requests arrive only while the device is driven, by
    /// its background thread or [`Context::progress`].
    ///
    /// # Errors
    /// [`VerbsError::Hardware`] if no more requests can come, because the kernel's device is gone
    /// or its connection manager has failed; on later calls [`VerbsError::Io`].
    pub fn try_request(&self) -> Result<Option<DatagramRequest>, VerbsError> {
        self.0.next(|event| match event {
            CmEvent::Asked { ask, asked, .. } => {
                let (device, manager) = (self.0.device.clone(), self.0.inbox.manager.clone());
                Some(DatagramRequest { device, manager, ask, asked, decided: false })
            }
            _ => None,
        })
    }
}

listens!(DatagramListener, DatagramRequest);

/// A peer's request for a queue pair to which it can send datagrams. The peer repeats it for some
/// seconds. Dropping the request refuses it.
#[derive(Debug)]
pub struct DatagramRequest {
    device: Device,
    manager: Arc<dyn Manager>,
    ask: SidrReqId,
    asked: Box<Asked>,
    decided: bool,
}

impl DatagramRequest {
    /// The peer's address and port. The first datagram reveals its queue pair:
    /// [`Wc::src_qp`](crate::Wc::src_qp).
    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        self.asked.peer
    }

    /// The local address that received the request.
    #[must_use]
    pub fn local(&self) -> IpAddr {
        self.asked.local
    }

    /// The data of the peer's program: 180 bytes, zeros behind its end.
    #[must_use]
    pub fn private_data(&self) -> &[u8] {
        &self.asked.private
    }

    /// Answers with a queue pair, its Q_Key, and at most 136 bytes for the peer's program. Post
    /// receives first: the peer may send at once. One queue pair may serve any number of peers.
    ///
    /// # Errors
    /// [`VerbsError::Invalid`] for a queue pair that is not for datagrams or not ready, or is of
    /// another device or address; [`VerbsError::Cm`] for too much private data, or if the peer no
    /// longer waits. The request is then refused.
    pub fn accept(mut self, qp: &Qp, private_data: &[u8]) -> Result<(), VerbsError> {
        let invalid = |why: String| Err(VerbsError::Invalid(why));
        if qp.qp_type() != QpType::Ud {
            return invalid("only a queue pair of type UD takes datagrams".into());
        }
        if !self.device.is(qp.device()) {
            return invalid(
                "the queue pair is another device's: make it on the one that listens".into(),
            );
        }
        let (local, own) = (self.asked.local, qp.endpoint().address);
        if own != local {
            return invalid(format!(
                "the request came to {local}, the queue pair is of {own}: give it that GID index"
            ));
        }
        let (state, attr, _) = qp.query();
        let Some(qkey) = attr.qkey.filter(|_| state.receives()) else {
            return invalid(format!("the queue pair is in {state}: make it ready"));
        };
        self.manager.answer(self.ask, Ok((qp.qpn(), qkey)), private_data)?;
        self.decided = true;
        Ok(())
    }

    /// Refuses, and tells the peer's program why, in at most 136 bytes.
    ///
    /// # Errors
    /// [`VerbsError::Cm`] if that is too long (the peer is then refused without it), or if the peer
    /// no longer waits.
    pub fn reject(mut self, private_data: &[u8]) -> Result<(), VerbsError> {
        self.manager.answer(self.ask, Err(SidrStatus::REJECT), private_data)?;
        self.decided = true;
        Ok(())
    }
}

impl Drop for DatagramRequest {
    fn drop(&mut self) {
        if !self.decided {
            // The peer may no longer wait; that does not matter.
            let _ = self.manager.answer(self.ask, Err(SidrStatus::REJECT), &[]);
        }
    }
}

/// The destination of a service's datagrams.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DatagramService {
    sgid_index: usize,
    peer: SocketAddr,
    qpn: Qpn,
    qkey: u32,
    private: Vec<u8>,
}

impl DatagramService {
    /// The address and port of the service.
    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Its queue pair.
    #[must_use]
    pub fn qpn(&self) -> Qpn {
        self.qpn
    }

    /// The Q_Key of the service.
    #[must_use]
    pub fn qkey(&self) -> u32 {
        self.qkey
    }

    /// The data of the peer's program: 136 bytes, zeros behind its end.
    #[must_use]
    pub fn private_data(&self) -> &[u8] {
        &self.private
    }

    /// An address handle for the service, from the address of the request. It must live until the
    /// requests that name it are complete.
    ///
    /// # Errors
    /// As [`Pd::create_ah`].
    pub fn address_handle(&self, pd: &Pd) -> Result<Ah, VerbsError> {
        pd.create_ah(&PeerPath::new(self.peer.ip()).sgid_index(self.sgid_index))
    }

    /// The destination, by a handle of [`address_handle`](Self::address_handle).
    #[must_use]
    pub fn destination(&self, ah: &Ah) -> Destination {
        ah.to(self.qpn, self.qkey)
    }
}

/// A request for a service, in progress. Dropping it gives it up.
#[derive(Debug)]
pub struct Resolving {
    inbox: Inbox,
    query: SidrQueryId,
    sgid_index: usize,
    peer: SocketAddr,
}

impl Resolving {
    /// Sends a request to the program that listens on `peer`, from the device's address
    /// `sgid_index`, and does not wait. `private_data` goes to that program: at most 180 bytes.
    ///
    /// # Errors
    /// [`VerbsError::Cm`] for too much private data, too many requests, or an address of another
    /// family; [`VerbsError::Invalid`] for an index that the device does not have;
    /// [`VerbsError::Hardware`] if the kernel's connection manager cannot be used.
    pub fn start(
        ctx: &Context,
        sgid_index: usize,
        peer: SocketAddr,
        private_data: &[u8],
    ) -> Result<Self, VerbsError> {
        let local = ctx.device.local(sgid_index)?;
        let manager = ctx.device.manager();
        let (query, mailbox) = manager.resolve(local, peer, private_data)?;
        Ok(Self { inbox: Inbox::new(manager, mailbox), query, sgid_index, peer })
    }

    /// The answer, if it is there. It arrives only while the device is driven, by its background
    /// thread or [`Context::progress`]. After a result, none follows.
    ///
    /// # Errors
    /// As [`resolve`].
    pub fn try_finish(&mut self) -> Result<Option<DatagramService>, VerbsError> {
        match self.inbox.pop()? {
            Some(CmEvent::Resolved { qpn, qkey, private, .. }) => {
                let (sgid_index, peer) = (self.sgid_index, self.peer);
                Ok(Some(DatagramService { sgid_index, peer, qpn, qkey, private }))
            }
            Some(CmEvent::Unresolved { status: Some(status), private: private_data, .. }) => {
                Err(VerbsError::Cm(CmFailure::Unresolved { status, private_data }))
            }
            Some(CmEvent::Unresolved { status: None, .. }) => Err(VerbsError::TimedOut),
            _ => Ok(None),
        }
    }

    pub(super) fn inbox(&self) -> &Inbox {
        &self.inbox
    }

    /// Waits for the answer.
    ///
    /// # Errors
    /// As [`resolve`].
    pub fn wait(mut self, patience: Duration) -> Result<DatagramService, VerbsError> {
        let inbox = self.inbox.clone();
        inbox.wait(Some(patience), || self.try_finish())
    }

    /// A descriptor that is readable while [`try_finish`](Self::try_finish) has something to do.
    ///
    /// # Errors
    /// [`VerbsError::Io`] if there are no descriptors left.
    pub fn fd(&self) -> Result<BorrowedFd<'_>, VerbsError> {
        self.inbox.fd()
    }

    /// The same descriptor, for a reactor to own.
    ///
    /// # Errors
    /// As [`fd`](Self::fd).
    pub fn notifier(&self) -> Result<Notifier, VerbsError> {
        self.inbox.notifier()
    }
}

impl Drop for Resolving {
    fn drop(&mut self) {
        self.inbox.manager.forget_query(self.query);
    }
}

/// Asks the program that listens on `peer` for the queue pair of its datagram service, and waits
/// for the answer: see [`Resolving::start`].
///
/// # Errors
/// [`VerbsError::Cm`] if no program listens there, or the program refuses; [`VerbsError::TimedOut`]
/// if the peer is silent, or `patience` is over; else as [`Resolving::start`].
pub fn resolve(
    ctx: &Context,
    sgid_index: usize,
    peer: SocketAddr,
    private_data: &[u8],
    patience: Duration,
) -> Result<DatagramService, VerbsError> {
    Resolving::start(ctx, sgid_index, peer, private_data)?.wait(patience)
}
