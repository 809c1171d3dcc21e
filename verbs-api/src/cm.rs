//! Connections through the connection manager, as `librdmacm` makes them: over the network of the
//! queue pairs, and with programs of `librdmacm` as peers.
//!
//! ```
//! use std::net::{IpAddr, SocketAddr};
//! use std::time::Duration;
//! use rocinante::{Context, VerbsError, cm};
//!
//! fn main() -> Result<(), VerbsError> {
//!     let [here, there] = [1, 2].map(|host| IpAddr::from([127, 0, 0, host]));
//! #   let (here, there) = rocinante::doc::addresses();
//!     let (address, patience) = (SocketAddr::new(there, 7471), Duration::from_secs(10));
//!     let server = Context::open(there)?;
//!     let listener = cm::Listener::bind(&server, address, 16)?;
//!     let server = std::thread::spawn(move || -> Result<_, VerbsError> {
//!         let (pd, cq) = (server.alloc_pd(), server.create_cq(16)?);
//!         let request = listener.request(Some(patience))?;
//!         assert_eq!(&request.private_data()[..5], b"hello");
//!         let qp = pd.qp(&cq, &cq).build()?;
//!         request.accept(qp, &cm::Params::default().private_data(b"welcome"))?.wait(patience)
//!     });
//!
//!     let client = Context::open(here)?;
//!     let (pd, cq) = (client.alloc_pd(), client.create_cq(16)?);
//!     let qp = pd.qp(&cq, &cq).build()?;
//!     let params = cm::Params::default().private_data(b"hello");
//!     let connection = cm::connect(qp, address, &params, patience)?;
//!     assert_eq!(&connection.private_data()[..7], b"welcome");
//!
//!     // A connection is a queue pair in RTS that knows when the peer ends it.
//!     let at_server = server.join().unwrap()?;
//!     connection.disconnect()?;
//!     at_server.wait_disconnected(patience)
//! }
//! ```
//!
//! No call here needs a thread: calls that wait drive the device. An asynchronous program awaits
//! [`Listener::accept`], [`Connecting`] and [`Connection::disconnected`]: see the
//! [guide](crate::guide::asynchronous). An event loop sleeps on descriptors, and uses the calls
//! that do not wait: [`Listener::try_request`], [`Connecting::try_finish`],
//! [`Connection::is_disconnected`]. A [`Listener`] is a descriptor itself (`AsFd`, `AsRawFd`);
//! [`Connecting::notifier`] and [`Connection::notifier`] return one. The same holds for
//! [`DatagramListener`] and [`Resolving`].
//!
//! # Messages that overtake the connection
//!
//! A client may send as soon as it has the server's answer. So a server's receive may complete
//! before [`Connecting::wait`] or [`Connecting::try_finish`] has returned the [`Connection`]: the
//! message overtakes the last one of the handshake, and establishes the connection, too. Therefore
//! a server
//!
//! - posts its receives before it accepts (see [`PreparedQp::post_recv`]);
//! - gives each queue pair a [`context`](crate::QpBuilder::context) that it knows beforehand, such
//!   as the index of its client's entry, and finds the client by [`Wc::context`](crate::Wc), not by
//!   the number of a queue pair that it has not got yet;
//! - keeps a message that it cannot answer yet until the connection is there.
//!
//! # Datagrams
//!
//! Datagrams have no connection. The listening program answers with a queue pair and its Q_Key, and
//! may choose another one for each peer.
//!
//! ```
//! use std::net::{IpAddr, SocketAddr};
//! use std::time::Duration;
//! use rocinante::verbs::QpType;
//! use rocinante::{Context, VerbsError, cm};
//!
//! fn main() -> Result<(), VerbsError> {
//!     let [here, there] = [1, 2].map(|host| IpAddr::from([127, 0, 0, host]));
//! #   let (here, there) = rocinante::doc::addresses();
//!     let (address, patience) = (SocketAddr::new(there, 7174), Duration::from_secs(10));
//!     let (server, client) = (Context::open(there)?, Context::open(here)?);
//!     let listener = cm::DatagramListener::bind(&server, address, 16)?;
//!     let server = std::thread::spawn(move || -> Result<_, VerbsError> {
//!         let (pd, cq) = (server.alloc_pd(), server.create_cq(16)?);
//!         let qp = pd.qp(&cq, &cq).qp_type(QpType::Ud).qkey(cm::UDP_QKEY).build()?;
//!         let qp = qp.ready()?;
//!         listener.request(Some(patience))?.accept(&qp, b"welcome")?;
//!         Ok(qp)
//!     });
//!     let service = cm::resolve(&client, 0, address, b"hello", patience)?;
//!     assert_eq!(service.qpn(), server.join().unwrap()?.qpn());
//!     assert_eq!(&service.private_data()[..7], b"welcome");
//!     let ah = service.address_handle(&client.alloc_pd())?;
//!     let _to = service.destination(&ah);
//!     Ok(())
//! }
//! ```
//!
//! For queue pairs of the kernel's devices, the kernel's connection manager makes the connections,
//! through the system's `librdmacm`. The first call opens that library (Debian and Ubuntu: `apt-get
//! install librdmacm1`). The behaviour is the same, except where `librdmacm` gives programs no
//! choice:
//!
//! - A rejected peer always sees [`RejReason::CONSUMER`], even if a backlog is full or queue pairs
//!   do not fit.
//! - The Q_Key of a datagram service is always [`UDP_QKEY`], and the service refuses requests
//!   beyond its backlog.
//! - The kernel adds its device's delay to the ACK timeout that it tells peers.
//! - Listeners do not take link-local addresses (`fe80::`).

/// A listener's methods, whatever its requests are for.
macro_rules! listens {
    ($listener:ident, $request:ident) => {
        impl $listener {
            /// The address and port that it listens on.
            #[must_use]
            pub fn address(&self) -> SocketAddr {
                self.0.address
            }

            /// Waits for the next request.
            ///
            /// # Errors
            /// [`VerbsError::TimedOut`] if there is none within `timeout`; `None` waits without
            /// limit. Else as [`try_request`](Self::try_request).
            pub fn request(&self, timeout: Option<Duration>) -> Result<$request, VerbsError> {
                self.0.inbox.wait(timeout, || self.try_request())
            }

            /// Takes the next request, or has the task woken when there is one.
            ///
            /// # Errors
            /// As [`try_request`](Self::try_request).
            pub fn poll_accept(
                &self,
                cx: &mut std::task::Context<'_>,
            ) -> std::task::Poll<Result<$request, VerbsError>> {
                self.0.inbox.poll(cx, || self.try_request())
            }

            /// The next request. If the future is dropped, no request is lost.
            ///
            /// # Errors
            /// As [`try_request`](Self::try_request).
            pub async fn accept(&self) -> Result<$request, VerbsError> {
                self.0.inbox.until(|| self.try_request()).await
            }
        }

        /// Readable while `try_request` has something, or an error.
        impl std::os::fd::AsFd for $listener {
            fn as_fd(&self) -> BorrowedFd<'_> {
                self.0.as_fd()
            }
        }

        impl std::os::fd::AsRawFd for $listener {
            fn as_raw_fd(&self) -> std::os::fd::RawFd {
                self.0.as_fd().as_raw_fd()
            }
        }
    };
}

mod connection;
mod datagram;
mod inbox;
mod listener;
mod tasks;

use std::net::SocketAddr;
use std::time::Duration;

#[doc(inline)]
pub use rocinante_soft::model::cm::{CmFailure, UDP_QKEY};
use rocinante_soft::model::endpoint::Endpoint;
use rocinante_soft::model::error::VerbsError;
use rocinante_soft::model::qp::ConnectOptions;
use rocinante_stack::Budget;
use rocinante_stack::cm::QpSide;
use rocinante_stack::types::Mtu;
use rocinante_stack::verbs::QpType;
use rocinante_stack::wire::cm::{Announced, Transport};
pub use rocinante_stack::wire::cm::{RejReason, SidrStatus};

pub use self::connection::{Connecting, Connection};
pub use self::datagram::{DatagramListener, DatagramRequest, DatagramService, Resolving, resolve};
pub use self::inbox::Notifier;
pub use self::listener::{Listener, Request};
use crate::qp::PreparedQp;

/// Parameters of a connection: those of the queue pair (`struct rdma_conn_param`), and data for the
/// peer's program.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Params {
    options: ConnectOptions,
    private: Vec<u8>,
    /// Zero for off.
    keep_alive: Option<Duration>,
}

setters! { Params:
    /// Connects with these options; [`ConnectOptions::default`] if it is not called. The *active*
    /// side calls [`connect`], the *passive* side [`Request::accept`]. Each option of a side
    /// decides, of the queue pairs of both sides:
    ///
    /// | option | of the active side | of the passive side |
    /// |---|---|---|
    /// | `mtu` | the path MTU of both, if the links take it | nothing |
    /// | `max_rd_atomic` | its own, up to `max_dest_rd_atomic` of the other | likewise |
    /// | `max_dest_rd_atomic` | its own, up to `max_rd_atomic` of the other | likewise |
    /// | `timeout` | that of both | its own, if the active side's is 0 |
    /// | `retry_cnt` | that of both | nothing |
    /// | `rnr_retry` | that of the *peer* (`rdma_connect(3)`) | that of the *peer* |
    /// | `min_rnr_timer` | its own | its own |
    /// | `traffic_class` | that of both | nothing |
    /// | `hop_limit` | the field in the request | nothing |
    ///
    /// [`ConnectOptions`] has their units and defaults.
    options(options: ConnectOptions) { options = options }
    /// Sends these bytes to the peer's program: at most 56 in a request, 196 in its answer
    /// (`rdma_connect(3)`, `rdma_accept(3)`); by default none. The peer gets 56 or 196 bytes, with
    /// zeros at the end, and so does not learn their number.
    private_data(private: &[u8]) { private = private.to_vec() }
    /// The time without packets from the peer after which it is asked whether it still has the
    /// connection (compare `TCP_KEEPIDLE`): a second at least. `None` turns it off. The default is
    /// the value of
    /// [`KEEP_ALIVE_VARIABLE`](crate::device::KEEP_ALIVE_VARIABLE), or else ten seconds.
    ///
    /// A peer that does not know the connection, or answers none of three questions a second apart,
    /// has gone: the connection ends as if the peer had ended it. Only a peer is asked that is a
    /// Rocinante with a background thread; others would not answer. The guide has
    /// [a chapter](crate::guide::peers) about peers that die. Only for the device in software.
    keep_alive(silence: Option<Duration>) { keep_alive = Some(silence.unwrap_or_default()) }
}

impl Params {
    fn keep_alive_ns(&self) -> Option<u64> {
        self.keep_alive.map(|silence| u64::try_from(silence.as_nanos()).unwrap_or(u64::MAX))
    }
}

/// Connects a queue pair to the program that listens on `peer`, and waits for the connection, at
/// most for `patience`. The queue pair must have an address of the peer's family
/// ([`QpBuilder::sgid_index`](crate::QpBuilder::sgid_index)).
///
/// # Errors
/// [`VerbsError::Cm`] with the reason if the peer rejects it; [`VerbsError::TimedOut`] if the peer
/// is silent, or `patience` is over; [`VerbsError::Path`] if there is no path to it. The queue pair
/// is then destroyed.
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

/// The description of a queue pair for the peer.
fn side_of(
    endpoint: &Endpoint,
    responder_resources: u8,
    initiator_depth: u8,
    rnr_retry: u8,
    has_srq: bool,
) -> QpSide {
    let Budget { bytes, datagrams } = endpoint.budget;
    let announced =
        |queue| Announced { bytes, datagrams, queue: Some(queue), ..Announced::default() };
    QpSide {
        qpn: endpoint.qpn,
        psn: endpoint.psn,
        responder_resources,
        initiator_depth,
        rnr_retry,
        flow_control: false,
        srq: has_srq,
        announced: endpoint.queue.map(announced),
    }
}

/// The endpoint for the queue pair to connect to.
fn endpoint_of(side: &QpSide, peer: SocketAddr, mtu: Mtu) -> Endpoint {
    let endpoint = Endpoint::new(peer.ip(), side.qpn, side.psn, mtu);
    match side.announced {
        Some(Announced { bytes, datagrams, queue, .. }) if bytes > 0 && datagrams > 0 => {
            endpoint.budget(Budget { bytes, datagrams }).queue(queue)
        }
        _ => endpoint,
    }
}
