//! Connections by the connection manager: as `librdmacm` makes them, over the network that the queue pairs use, and with its programs at
//! the other end.
//!
//! ```
//! use std::net::SocketAddr;
//! use std::time::Duration;
//! use rocinante::{Context, ConnectOptions, cm};
//!
//! # let (here, there) = rocinante::doc::addresses();
//! let patience = Duration::from_secs(10);
//! let server = Context::open(there)?;
//! let listener = cm::Listener::bind(&server, SocketAddr::new(there, 7471), 16)?;
//! let server = std::thread::spawn(move || -> Result<_, rocinante::VerbsError> {
//!     let (pd, cq) = (server.alloc_pd(), server.create_cq(16)?);
//!     let request = listener.request(Some(patience))?;
//!     assert_eq!(&request.private_data()[..5], b"hello");
//!     let qp = pd.qp(&cq, &cq).build()?;
//!     request.accept(qp, &cm::Params::default().private_data(b"welcome"))?.wait(patience)
//! });
//!
//! let client = Context::open(here)?;
//! let (pd, cq) = (client.alloc_pd(), client.create_cq(16)?);
//! let qp = pd.qp(&cq, &cq).build()?;
//! let params = cm::Params::default().private_data(b"hello");
//! let connection = cm::connect(qp, SocketAddr::new(there, 7471), &params, patience)?;
//! assert_eq!(&connection.private_data()[..7], b"welcome");
//!
//! // A connection is a queue pair in RTS that knows when the peer ends it.
//! let at_server = server.join().unwrap()?;
//! connection.disconnect()?;
//! at_server.wait_disconnected(patience)?;
//! # Ok::<(), rocinante::VerbsError>(())
//! ```
//!
//! Nothing here needs a thread: what waits drives the device. A program with a loop of its own, or an asynchronous one, sleeps on descriptors instead, and calls
//! what does not wait: [`Listener::try_request`], [`Connecting::try_finish`], [`Connection::is_disconnected`]. A [`Listener`] is a descriptor itself
//! (`AsFd`, `AsRawFd`), and [`Connecting::notifier`] and [`Connection::notifier`] give one; so it is with [`DatagramListener`] and [`Resolving`]. The example `async_echo` does so with tokio's `AsyncFd`.
//!
//! For datagrams there is no connection: who listens answers with a queue pair and its Q_Key, and may do so for each peer with another one.
//!
//! ```
//! use std::net::SocketAddr;
//! use std::time::Duration;
//! use rocinante::{Context, QpType, cm};
//!
//! # let (here, there) = rocinante::doc::addresses();
//! let patience = Duration::from_secs(10);
//! let (server, client) = (Context::open(there)?, Context::open(here)?);
//! let listener = cm::DatagramListener::bind(&server, SocketAddr::new(there, 7174), 16)?;
//! let server = std::thread::spawn(move || -> Result<_, rocinante::VerbsError> {
//!     let (pd, cq) = (server.alloc_pd(), server.create_cq(16)?);
//!     let qp = pd.qp(&cq, &cq).qp_type(QpType::Ud).qkey(cm::UDP_QKEY).build()?;
//!     let qp = qp.ready().map_err(|(_, error)| error)?;
//!     listener.request(Some(patience))?.accept(&qp, b"welcome")?;
//!     Ok(qp)
//! });
//! let service = cm::resolve(&client, 0, SocketAddr::new(there, 7174), b"hello", patience)?;
//! assert_eq!(service.qpn(), server.join().unwrap()?.qpn());
//! assert_eq!(&service.private_data()[..7], b"welcome");
//! let ah = service.address_handle(&client.alloc_pd())?;
//! let _to = service.destination(&ah);
//! # Ok::<(), rocinante::VerbsError>(())
//! ```
//!
//! Queue pairs of the kernel's devices are connected by the kernel's connection manager, through the system's `librdmacm`, which is opened with the first call (Debian and
//! Ubuntu: `apt-get install librdmacm1`). What happens is the same, but for what that does not let programs say: whoever is rejected hears
//! [`RejReason::CONSUMER`], also where a backlog is full or queue pairs do not fit; a datagram service has no other Q_Key than [`UDP_QKEY`], and refuses
//! what is beyond its backlog; and the kernel adds
//! to the ACK timeout that it tells peers what its device needs. Addresses of a link only (`fe80::`) are not listened to.

mod connection;
mod datagram;
mod failure;
mod inbox;
mod listener;
mod mailbox;
#[cfg(test)]
mod mailbox_tests;
mod manager;

use std::net::SocketAddr;
use std::time::Duration;

use rocinante_stack::Budget;
use rocinante_stack::cm::QpSide;
use rocinante_stack::types::Mtu;
use rocinante_stack::verbs::QpType;
use rocinante_stack::wire::cm::{Announced, Transport};
pub use rocinante_stack::wire::cm::{RejReason, SidrStatus};

pub use self::connection::{Connecting, Connection};
pub use self::datagram::{
    DatagramListener, DatagramRequest, DatagramService, Resolving, UDP_QKEY, resolve,
};
pub use self::failure::CmFailure;
pub use self::inbox::Notifier;
pub use self::listener::{Listener, Request};
pub(crate) use self::mailbox::Mailbox;
pub(crate) use self::manager::{Chosen, ListensTo, Manager, Place};
use crate::error::VerbsError;
use crate::exchange::Endpoint;
use crate::qp::{ConnectOptions, PreparedQp};

/// How to connect: what the queue pair is connected with (`struct rdma_conn_param`), and what the peer's program is told.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Params {
    options: ConnectOptions,
    private: Vec<u8>,
}

impl Params {
    /// Connects with these options. Of READs and atomics each side gets as many as both permit; path MTU, ACK timeout and retry counts are the
    /// asking side's.
    #[must_use]
    pub fn options(mut self, options: ConnectOptions) -> Self {
        self.options = options;
        self
    }

    /// Tells the peer's program this: 56 bytes at most in a request, 196 in its answer. The peer gets zeros behind it, and cannot
    /// tell how long it was.
    #[must_use]
    pub fn private_data(mut self, private: &[u8]) -> Self {
        self.private = private.to_vec();
        self
    }
}

/// Connects a queue pair to whoever listens on `peer`, and waits for it.
///
/// # Errors
/// [`VerbsError::Cm`] if the peer rejects it, which names the reason; [`VerbsError::TimedOut`] if it is silent, or `patience` is over;
/// [`VerbsError::Path`] if there is no way to it. The queue pair is gone then.
pub fn connect(
    qp: PreparedQp,
    peer: SocketAddr,
    params: &Params,
    patience: Duration,
) -> Result<Connection, VerbsError> {
    Connecting::start(qp, peer, params)?.wait(patience)
}

/// The transport of a queue pair that can be connected.
fn transport_of(qp: &PreparedQp) -> Result<Transport, VerbsError> {
    match qp.qp_type() {
        QpType::Rc => Ok(Transport::Rc),
        QpType::Uc => Ok(Transport::Uc),
        _ => {
            let why =
                "a queue pair for datagrams has no peer: the connection manager connects RC and UC";
            Err(VerbsError::Invalid(why.into()))
        }
    }
}

/// What the peer is told of a queue pair.
fn side_of(
    endpoint: &Endpoint,
    responder_resources: u8,
    initiator_depth: u8,
    rnr_retry: u8,
    has_srq: bool,
) -> QpSide {
    let Budget { bytes, datagrams } = endpoint.budget;
    QpSide {
        qpn: endpoint.qpn,
        psn: endpoint.psn,
        responder_resources,
        initiator_depth,
        rnr_retry,
        flow_control: false,
        srq: has_srq,
        announced: Some(Announced { bytes, datagrams }),
    }
}

/// What a queue pair is to be connected to.
fn endpoint_of(side: &QpSide, peer: SocketAddr, mtu: Mtu) -> Endpoint {
    let budget = match side.announced {
        Some(Announced { bytes, datagrams }) if bytes > 0 && datagrams > 0 => {
            Budget { bytes, datagrams }
        }
        _ => Budget::STRANGER,
    };
    Endpoint { address: peer.ip(), qpn: side.qpn, psn: side.psn, mtu, budget }
}
