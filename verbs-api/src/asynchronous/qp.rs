//! Queue pairs whose operations own their memory.

use std::net::SocketAddr;
use std::ops::Deref;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use rocinante_soft::model::endpoint::Endpoint;
use rocinante_soft::model::error::VerbsError;
use rocinante_soft::model::qp::ConnectOptions;
use rocinante_soft::model::wc::{Wc, WcError};
use rocinante_stack::mem::{RemoteSlice, Sge};
use rocinante_stack::types::Qpn;
use rocinante_stack::verbs::{RecvWr, SendOp, SendWr, WcOpcode, WcStatus};

use super::pending_ops::{Open, PendingOps};
use crate::cm::{Connecting, Connection, Params, Request};
use crate::mr::{Mr, PoolBuffer};
use crate::qp::{PreparedQp, Qp};

/// Memory that an operation owns until it is complete.
pub trait Buffer: Send + 'static {
    /// The bytes that the operation transfers.
    fn sge(&self) -> Sge;
}

/// The operation transfers all of its bytes.
impl Buffer for Mr {
    fn sge(&self) -> Sge {
        Mr::sge(self, 0, self.len())
    }
}

/// As for [`Mr`]. The program may read the region while the operation lasts.
impl Buffer for Arc<Mr> {
    fn sge(&self) -> Sge {
        Mr::sge(self, 0, self.len())
    }
}

impl Buffer for PoolBuffer {
    fn sge(&self) -> Sge {
        self.slice().sge()
    }
}

/// A part of a buffer, for messages that are shorter than it.
#[derive(Debug)]
pub struct Part<B> {
    buffer: B,
    offset: u32,
    len: u32,
}

impl<B: Buffer> Part<B> {
    /// `len` bytes of a buffer, from `offset` on.
    ///
    /// # Panics
    /// If they are not inside the buffer.
    #[must_use]
    pub fn new(buffer: B, offset: u32, len: u32) -> Self {
        let all = buffer.sge().len;
        let is_inside = offset.checked_add(len).is_some_and(|end| end <= all);
        assert!(is_inside, "{len} bytes at {offset} are not inside a buffer of {all}");
        Self { buffer, offset, len }
    }

    /// The whole buffer.
    #[must_use]
    pub fn into_inner(self) -> B {
        self.buffer
    }
}

impl<B: Buffer> Buffer for Part<B> {
    fn sge(&self) -> Sge {
        let all = self.buffer.sge();
        Sge { addr: all.addr + u64::from(self.offset), len: self.len, ..all }
    }
}

/// A queue pair in a state in which it takes operations.
pub trait Carrier: sealed::Carrier {}

impl Carrier for Qp {}
impl Carrier for PreparedQp {}
impl Carrier for Connection {}

mod sealed {
    use super::{Connection, PreparedQp, Qp};

    pub trait Carrier {
        fn carrier(&self) -> &Qp;
    }

    impl Carrier for Qp {
        fn carrier(&self) -> &Qp {
            self
        }
    }

    impl Carrier for PreparedQp {
        fn carrier(&self) -> &Qp {
            self.qp()
        }
    }

    impl Carrier for Connection {
        fn carrier(&self) -> &Qp {
            self.qp()
        }
    }
}

/// A queue pair whose operations are futures that own their memory: see the
/// [module](crate::asynchronous).
///
/// Dropping it destroys the queue pair. Operations in flight then end with
/// [`WcStatus::WrFlushErr`].
#[derive(Debug)]
pub struct AsyncQp<C = Connection> {
    carrier: C,
    // Declared after the queue pair: memory is freed once the queue pair is gone.
    pending: Open,
}

impl<C: Carrier> AsyncQp<C> {
    /// Takes a queue pair over, and its completion queues, which no other queue pair may use. It
    /// drops completions of requests that the program posts by other calls.
    ///
    /// # Errors
    /// [`VerbsError::Invalid`] if a completion queue has a channel, or another `AsyncQp`.
    pub fn new(carrier: C) -> Result<Self, VerbsError> {
        let pending = Open(PendingOps::new(carrier.carrier().cqs())?);
        Ok(Self { carrier, pending })
    }

    /// SEND of the buffer.
    pub fn send<B: Buffer>(&self, buffer: B) -> Operation<B> {
        self.operation(SendOp::Send { imm: None }, buffer)
    }

    /// WRITE of the buffer to the beginning of `remote`.
    pub fn write<B: Buffer>(&self, buffer: B, remote: RemoteSlice) -> Operation<B> {
        let op = SendOp::Write { remote: remote.address, rkey: remote.rkey, imm: None };
        self.transfer(op, buffer, remote)
    }

    /// READ from the beginning of `remote` into the whole buffer.
    pub fn read<B: Buffer>(&self, buffer: B, remote: RemoteSlice) -> Operation<B> {
        let op = SendOp::Read { remote: remote.address, rkey: remote.rkey };
        self.transfer(op, buffer, remote)
    }

    fn transfer<B: Buffer>(&self, op: SendOp, buffer: B, remote: RemoteSlice) -> Operation<B> {
        let len = buffer.sge().len;
        if u64::from(len) > remote.len {
            let why = format!("{len} bytes are longer than the peer's {}", remote.len);
            return self.refused(buffer, VerbsError::Invalid(why));
        }
        self.operation(op, buffer)
    }

    /// Any operation, for instance an atomic: the value that the peer's word had before is then in
    /// the first eight bytes of the buffer, in the byte order of the host
    /// ([`Mr::load_u64`]).
    pub fn operation<B: Buffer>(&self, op: SendOp, buffer: B) -> Operation<B> {
        self.post(buffer, |qp, wr_id, sges| Ok(qp.post(SendWr::new(op, sges).wr_id(wr_id))?))
    }

    /// Receives a message into the buffer; its length is the completion's
    /// [`byte_len`](Wc::byte_len).
    pub fn recv<B: Buffer>(&self, buffer: B) -> Operation<B> {
        self.post(buffer, |qp, wr_id, sges| Ok(qp.post_recv(&[RecvWr { wr_id, sges }])?))
    }

    fn post<B: Buffer>(
        &self,
        buffer: B,
        post: impl FnOnce(&Qp, u64, &[Sge]) -> Result<(), VerbsError>,
    ) -> Operation<B> {
        let pending = &self.pending.0;
        let Some(number) = pending.open() else {
            return self.refused(buffer, pending.why_closed());
        };
        match post(self.carrier.carrier(), number, &[buffer.sge()]) {
            Ok(()) => self.begun(buffer, Ok(number)),
            Err(why) => {
                pending.withdraw(number);
                self.refused(buffer, why)
            }
        }
    }

    /// Operations that are not complete, or whose completion was not taken.
    #[cfg(test)]
    pub(crate) fn in_flight(&self) -> usize {
        self.pending.0.in_flight()
    }

    fn refused<B: Buffer>(&self, buffer: B, why: VerbsError) -> Operation<B> {
        self.begun(buffer, Err(why))
    }

    fn begun<B: Buffer>(&self, buffer: B, number: Result<u64, VerbsError>) -> Operation<B> {
        let (pending, qpn) = (self.pending.0.clone(), self.carrier.carrier().qpn());
        Operation { pending, qpn, state: Some((buffer, number)) }
    }
}

impl AsyncQp<PreparedQp> {
    /// Connects to the program that listens on `peer`: as [`Connecting::start`].
    ///
    /// # Errors
    /// As [`cm::connect`](crate::cm::connect).
    pub async fn connect(self, peer: SocketAddr, params: &Params) -> Result<AsyncQp, VerbsError> {
        let Self { carrier, pending } = self;
        Ok(AsyncQp { carrier: Connecting::start(carrier, peer, params)?.await?, pending })
    }

    /// Accepts a peer's request: as [`Request::accept`]. Receives posted before are ready for the
    /// peer's first messages.
    ///
    /// # Errors
    /// As [`Request::accept`] and [`Connecting::try_finish`].
    pub async fn accept(self, request: Request, params: &Params) -> Result<AsyncQp, VerbsError> {
        let Self { carrier, pending } = self;
        Ok(AsyncQp { carrier: request.accept(carrier, params)?.await?, pending })
    }

    /// Connects to a peer that is known: as [`PreparedQp::connect`].
    ///
    /// # Errors
    /// As [`PreparedQp::connect`]. The queue pair is then destroyed.
    pub fn connect_to(
        self,
        peer: &Endpoint,
        options: &ConnectOptions,
    ) -> Result<AsyncQp<Qp>, VerbsError> {
        let Self { carrier, pending } = self;
        let carrier = carrier.connect(peer, options)?;
        Ok(AsyncQp { carrier, pending })
    }
}

/// The queue pair, for instance to disconnect it. It is not to be taken to RESET while operations
/// are in flight: they would never end.
impl<C> Deref for AsyncQp<C> {
    type Target = C;

    fn deref(&self) -> &C {
        &self.carrier
    }
}

/// An operation in flight: a future of its result, and of its memory.
///
/// The operation was posted when it was made; operations of a queue pair execute in that order. If
/// it is dropped, the operation goes on, and its memory is freed when it is complete.
#[derive(Debug)]
#[must_use = "its memory is lost if it is dropped"]
pub struct Operation<B: Buffer> {
    pending: Arc<PendingOps>,
    qpn: Qpn,
    /// The buffer, and the number of its slot or why there is none; `None` once it is complete.
    state: Option<(B, Result<u64, VerbsError>)>,
}

// The buffer is not pinned.
impl<B: Buffer> Unpin for Operation<B> {}

impl<B: Buffer> Future for Operation<B> {
    /// The completion or why there is none, and the buffer.
    type Output = (Result<Wc, VerbsError>, B);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let done = match this.state.as_ref().expect("polled after it was complete") {
            (_, Ok(number)) => match this.pending.poll(*number, cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(done) => done,
            },
            (_, Err(_)) => None,
        };
        let (buffer, number) = this.state.take().expect("looked at above");
        let result = number.and_then(|_| {
            let mut lost = Wc::default();
            (lost.status, lost.opcode) = (WcStatus::WrFlushErr, WcOpcode::Unknown);
            lost.qpn = this.qpn;
            // The number is the pending's own.
            let mut wc = done.unwrap_or(lost);
            wc.wr_id = 0;
            Ok(wc.ok().map_err(WcError::without_number)?)
        });
        Poll::Ready((result, buffer))
    }
}

impl<B: Buffer> Drop for Operation<B> {
    fn drop(&mut self) {
        if let Some((buffer, Ok(number))) = self.state.take() {
            self.pending.keep(number, Box::new(buffer));
        }
    }
}
