//! Datagram services: who has a queue pair for datagrams, and how it is reached.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use rocinante_stack::cm::{AskId, Asked, CmEvent, QueryId};
use rocinante_stack::types::Qpn;
use rocinante_stack::verbs::{Destination, QpType};
use rocinante_stack::wire::cm::SidrStatus;

use super::inbox::{Inbox, Notifier, Port};
use super::{CmFailure, ListensTo, Manager};
use crate::ah::Ah;
use crate::context::{Context, Device, Pd};
use crate::error::VerbsError;
use crate::qp::{PeerPath, Qp};

/// The Q_Key that programs of `librdmacm` use for datagrams and multicast unless they say otherwise (`RDMA_UDP_QKEY`).
pub const UDP_QKEY: u32 = 0x0123_4567;

/// Listens on a port to those who ask for a queue pair for datagrams (`rdma_listen(3)` with `RDMA_PS_UDP`); dropping it refuses who waits.
#[derive(Debug)]
pub struct DatagramListener(Port);

impl DatagramListener {
    /// Listens on a port of the device: on one of its addresses, or on all of them if the address is the unspecified one. Of questions that are not
    /// answered yet there are `backlog` at most; further ones are dropped, and their peers ask again.
    ///
    /// The port is one of `RDMA_PS_UDP`, which has nothing to do with UDP's, and it is this device's.
    ///
    /// # Errors
    /// As [`Listener::bind`](super::Listener::bind).
    pub fn bind(ctx: &Context, address: SocketAddr, backlog: usize) -> Result<Self, VerbsError> {
        Port::bind(ctx, address, backlog, ListensTo::Datagrams).map(Self)
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
    pub fn try_request(&self) -> Result<Option<DatagramRequest>, VerbsError> {
        self.0.next(|event| match event {
            CmEvent::Asked { ask, asked, .. } => {
                let (device, manager) = (self.0.device.clone(), self.0.inbox.manager.clone());
                Some(DatagramRequest { device, manager, ask, asked, decided: false })
            }
            _ => None,
        })
    }

    /// Waits for the next request.
    ///
    /// # Errors
    /// [`VerbsError::TimedOut`] if there is none within `timeout`; `None` waits for ever. As [`try_request`](Self::try_request).
    pub fn request(&self, timeout: Option<Duration>) -> Result<DatagramRequest, VerbsError> {
        self.0.inbox.wait(timeout, || self.try_request())
    }
}

/// Readable while [`try_request`](DatagramListener::try_request) has something, or an error.
impl AsFd for DatagramListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for DatagramListener {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}
/// A peer asks for a queue pair to which it can send datagrams. It asks again for some seconds; dropping the request refuses it.
#[derive(Debug)]
pub struct DatagramRequest {
    device: Device,
    manager: Arc<dyn Manager>,
    ask: AskId,
    asked: Box<Asked>,
    decided: bool,
}

impl DatagramRequest {
    /// The peer's address and port. Its queue pair is known once it sends something: [`Wc::src_qp`](crate::Wc::src_qp).
    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        self.asked.peer
    }

    /// Our address, to which the request came.
    #[must_use]
    pub fn local(&self) -> IpAddr {
        self.asked.local
    }

    /// What the peer's program says: 180 bytes, zeros behind what it filled.
    #[must_use]
    pub fn private_data(&self) -> &[u8] {
        &self.asked.private
    }

    /// Answers with a queue pair, its Q_Key, and 136 bytes at most for the peer's program. Post receives before: the peer may send at once. One queue pair
    /// may serve any number of peers.
    ///
    /// # Errors
    /// [`VerbsError::Invalid`] for a queue pair that is no ready one for datagrams, or another device's or address's; [`VerbsError::Cm`] for too much private data,
    /// or if the peer does not wait any more. It is refused then.
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

    /// Refuses, and tells the peer's program why: 136 bytes at most.
    ///
    /// # Errors
    /// [`VerbsError::Cm`] if that is too much, and the peer is refused without a word; or if it
    /// does not wait any more.
    pub fn reject(mut self, private_data: &[u8]) -> Result<(), VerbsError> {
        self.manager.answer(self.ask, Err(SidrStatus::REJECT), private_data)?;
        self.decided = true;
        Ok(())
    }
}

impl Drop for DatagramRequest {
    fn drop(&mut self) {
        if !self.decided {
            // Whether the peer still waits or not.
            let _ = self.manager.answer(self.ask, Err(SidrStatus::REJECT), &[]);
        }
    }
}

/// Where the datagrams of a service go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DatagramService {
    gid_index: usize,
    peer: SocketAddr,
    qpn: Qpn,
    qkey: u32,
    private: Vec<u8>,
}

impl DatagramService {
    /// Whom was asked.
    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Its queue pair.
    #[must_use]
    pub fn qpn(&self) -> Qpn {
        self.qpn
    }

    /// The Q_Key that it wants.
    #[must_use]
    pub fn qkey(&self) -> u32 {
        self.qkey
    }

    /// What the peer's program says: 136 bytes, zeros behind what it filled.
    #[must_use]
    pub fn private_data(&self) -> &[u8] {
        &self.private
    }

    /// An address handle for it, from the address that asked. It must live until the requests that name it are complete.
    ///
    /// # Errors
    /// As [`Pd::create_ah`].
    pub fn address_handle(&self, pd: &Pd) -> Result<Ah, VerbsError> {
        pd.create_ah(self.gid_index, &PeerPath::new(self.peer.ip()))
    }

    /// Where to send, by a handle of [`address_handle`](Self::address_handle).
    #[must_use]
    pub fn destination(&self, ah: &Ah) -> Destination {
        ah.to(self.qpn, self.qkey)
    }
}

/// A service that is being asked for. Dropping it gives it up.
#[derive(Debug)]
pub struct Resolving {
    inbox: Inbox,
    query: QueryId,
    gid_index: usize,
    peer: SocketAddr,
}

impl Resolving {
    /// Asks whoever listens on `peer`, from the device's address `gid_index`, and does not wait. Its program is told `private_data`: 180 bytes
    /// at most.
    ///
    /// # Errors
    /// [`VerbsError::Cm`] for too much private data, too many questions, or an address of another family; [`VerbsError::Invalid`] for an index that the device has not;
    /// [`VerbsError::Hardware`] if the kernel's connection manager cannot be used.
    pub fn start(
        ctx: &Context,
        gid_index: usize,
        peer: SocketAddr,
        private_data: &[u8],
    ) -> Result<Self, VerbsError> {
        let Some(local) = ctx.gids().get(gid_index).copied() else {
            return Err(VerbsError::Invalid(format!("there is no GID index {gid_index}")));
        };
        let manager = ctx.device.manager();
        let (query, mailbox) = manager.resolve(local, peer, private_data)?;
        Ok(Self { inbox: Inbox::new(manager, mailbox), query, gid_index, peer })
    }

    /// The answer, if it is there. The device must be driven meanwhile, by its background thread or [`Context::progress`]. Once this has returned
    /// something, there is nothing more to come.
    ///
    /// # Errors
    /// As [`resolve`].
    pub fn try_finish(&mut self) -> Result<Option<DatagramService>, VerbsError> {
        match self.inbox.pop()? {
            Some(CmEvent::Resolved { qpn, qkey, private, .. }) => {
                let (gid_index, peer) = (self.gid_index, self.peer);
                Ok(Some(DatagramService { gid_index, peer, qpn, qkey, private }))
            }
            Some(CmEvent::Unresolved { status: Some(status), .. }) => {
                Err(VerbsError::Cm(CmFailure::Unresolved { status }))
            }
            Some(CmEvent::Unresolved { status: None, .. }) => Err(VerbsError::TimedOut),
            _ => Ok(None),
        }
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

    /// The same descriptor, to be owned by a reactor.
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

/// Asks whoever listens on `peer` for the queue pair of a datagram service, and waits for the answer: see [`Resolving::start`].
///
/// # Errors
/// [`VerbsError::Cm`] if nobody listens there, or the program refuses; [`VerbsError::TimedOut`] if the peer is silent, or `patience` is over; and as
/// [`Resolving::start`].
pub fn resolve(
    ctx: &Context,
    gid_index: usize,
    peer: SocketAddr,
    private_data: &[u8],
    patience: Duration,
) -> Result<DatagramService, VerbsError> {
    Resolving::start(ctx, gid_index, peer, private_data)?.wait(patience)
}
