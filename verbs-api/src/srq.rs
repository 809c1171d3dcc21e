//! Shared receive queues: receives that several queue pairs share.

use std::sync::Arc;

use rocinante_kernel as kernel;
use rocinante_soft as soft;
use rocinante_soft::model::error::{Refused, VerbsError};
use rocinante_soft::model::qp::PostListError;
use rocinante_stack::SrqAttr;
use rocinante_stack::SrqChange;
use rocinante_stack::verbs::RecvWr;

use crate::context::{Pd, PdKind};
use crate::device::Device;

/// A shared receive queue (`struct ibv_srq`). Queue pairs that are made with it take their receives
/// from it, the oldest first, and have none of their own. Cheap to clone. It lives until the last
/// clone and the last queue pair that uses it are gone.
///
/// When a queue pair breaks, it flushes the receives that it had taken; the others stay. Then it
/// reports [`QpEvent::LastWqeReached`](crate::verbs::QpEvent::LastWqeReached): all receives that it
/// ever took are complete.
///
/// ```
/// use std::net::IpAddr;
/// use std::time::Duration;
/// use rocinante::verbs::AsyncEvent;
/// use rocinante::{Access, ConnectOptions, Context, RecvWr, SendWr, VerbsError};
///
/// fn main() -> Result<(), VerbsError> {
///     let [here, there] = [1, 2].map(|host| IpAddr::from([127, 0, 0, host]));
/// #   let (here, there) = rocinante::doc::addresses();
///     let (client, server) = (Context::open(here)?, Context::open(there)?);
///     let (pd_c, pd_s) = (client.alloc_pd(), server.alloc_pd());
///     let (cq_c, cq_s) = (client.create_cq(16)?, server.create_cq(64)?);
///
///     // The server has 64 receives of 1024 bytes for all its clients together.
///     let srq = pd_s.create_srq(64, 1)?;
///     let buffers = pd_s.allocate(64 * 1024, Access::LOCAL_WRITE)?;
///     let post = |number: u64| {
///         let buffer = buffers.sge(number as usize * 1024, 1024);
///         srq.post_recv(&[RecvWr::new(number, &[buffer])])
///     };
///     for number in 0..64 {
///         post(number)?;
///     }
///     // Once, when fewer than 16 are left, an event shall report it.
///     srq.arm(16)?;
///
///     // Two clients.
///     let options = ConnectOptions::default();
///     let mut connected = Vec::new();
///     for _ in 0..2 {
///         let qp_c = pd_c.qp(&cq_c, &cq_c).build()?;
///         let qp_s = pd_s.qp(&cq_s, &cq_s).srq(&srq).build()?;
///         let (to_s, to_c) = (qp_s.endpoint(), qp_c.endpoint());
///         connected.push((qp_c.connect(&to_s, &options)?, qp_s.connect(&to_c, &options)?));
///     }
///     // Each message takes the oldest receive, whichever queue pair it comes to.
///     for (number, (qp_c, qp_s)) in (0..).zip(&connected) {
///         qp_c.post(SendWr::send(b"hello"))?;
///         let wc = cq_s.wait_one(Duration::from_secs(5))?;
///         assert_eq!((wc.wr_id, wc.qpn), (number, qp_s.qpn()));
///         assert_eq!(buffers.to_vec(wc.wr_id as usize * 1024, 5), b"hello");
///         post(wc.wr_id)?;
///     }
///     // A server that posts too slowly learns of it here. The event disarms the queue.
///     if let Some(AsyncEvent::SrqLimitReached { .. }) = server.poll_async_event() {
///         srq.arm(16)?;
///     }
///     Ok(())
/// }
/// ```
#[derive(Debug, Clone)]
pub struct Srq {
    inner: Arc<SrqInner>,
}

#[derive(Debug)]
struct SrqInner {
    kind: SrqKind,
    // Declared after the queue, because it must outlive the queue.
    pd: Pd,
}

#[derive(Debug)]
pub(crate) enum SrqKind {
    Soft(soft::Srq),
    Kernel(kernel::Srq),
}

impl Pd {
    /// Makes a shared receive queue for at most `max_wr` receives, 1 or more, of at most `max_sge`
    /// scatter-gather elements each (`ibv_create_srq(3)`). The memory that its receives name must
    /// belong to this domain.
    ///
    /// # Errors
    /// [`VerbsError::Invalid`] if a limit of the device is exceeded, [`VerbsError::Limit`] if there
    /// are too many, [`VerbsError::Hardware`] if the kernel's device refuses.
    pub fn create_srq(&self, max_wr: u32, max_sge: u32) -> Result<Srq, VerbsError> {
        let limits = self.device().limits();
        for (name, wanted, least, most) in
            [("max_wr", max_wr, 1, limits.max_srq_wr), ("max_sge", max_sge, 0, limits.max_srq_sge)]
        {
            if !(least..=most).contains(&wanted) {
                return Err(VerbsError::Invalid(format!(
                    "{name} of a shared receive queue is {wanted}, the device takes {least} to {most}"
                )));
            }
        }
        let kind = match &self.inner.kind {
            PdKind::Soft(pd) => SrqKind::Soft(soft::Srq::create(pd, max_wr, max_sge)?),
            PdKind::Kernel(pd) => SrqKind::Kernel(kernel::Srq::create(pd, max_wr, max_sge)?),
        };
        Ok(Srq { inner: Arc::new(SrqInner { kind, pd: self.clone() }) })
    }
}

impl Srq {
    pub(crate) fn kind(&self) -> &SrqKind {
        &self.inner.kind
    }

    /// Whether it belongs to `device`.
    pub(crate) fn is_of(&self, device: &Device) -> bool {
        match (self.inner.pd.device(), device) {
            (Device::Soft(own), Device::Soft(other)) => Arc::ptr_eq(own, other),
            (Device::Kernel(own), Device::Kernel(other)) => Arc::ptr_eq(own, other),
            _ => false,
        }
    }

    /// Its number on the device, by which asynchronous events name it.
    #[must_use]
    pub fn number(&self) -> u32 {
        on!(SrqKind, self.kind(), srq => srq.number())
    }

    /// Posts receive requests in order (`ibv_post_srq_recv(3)`).
    ///
    /// # Errors
    /// [`PostListError`] names the first request that was not posted; those before it are posted.
    #[inline]
    pub fn post_recv(&self, list: &[RecvWr<'_>]) -> Result<(), PostListError> {
        on!(SrqKind, self.kind(), srq => srq.post_recv(list))
    }

    /// Changes the depth (`max_wr`) or the limit for an event (`srq_limit`), both numbers of
    /// receives (`ibv_modify_srq(3)`); `None` leaves it. Not every device of the kernel can change
    /// the depth.
    ///
    /// # Errors
    /// [`VerbsError::Invalid`] if the depth is 0, above the device's limit or below the number of
    /// posted receives, or if the limit is above the depth; [`VerbsError::Hardware`] if the
    /// kernel's device refuses.
    pub fn modify(&self, change: &SrqChange) -> Result<(), VerbsError> {
        let most = self.inner.pd.device().limits().max_srq_wr;
        if change.max_wr.is_some_and(|depth| depth > most) {
            let why = format!("max_wr is too large: the device takes {most} at most");
            return Err(VerbsError::Invalid(why));
        }
        on!(SrqKind, self.kind(), srq => srq.modify(change))
    }

    /// Requests one event,
    /// [`AsyncEvent::SrqLimitReached`](crate::verbs::AsyncEvent::SrqLimitReached), once fewer than
    /// `srq_limit` receives are left; 0 requests none. Only an arriving message raises the event; a
    /// queue that is already below the limit does not.
    ///
    /// # Errors
    /// As [`modify`](Self::modify).
    pub fn arm(&self, srq_limit: u32) -> Result<(), VerbsError> {
        self.modify(&SrqChange { srq_limit: Some(srq_limit), max_wr: None })
    }

    /// Its depth, its elements of a receive, and its limit (`ibv_query_srq(3)`). The limit is 0
    /// unless [`arm`](Self::arm) set one whose event is still to come.
    ///
    /// # Errors
    /// [`VerbsError::Hardware`] if the kernel's device refuses.
    pub fn query(&self) -> Result<SrqAttr, VerbsError> {
        match self.kind() {
            SrqKind::Soft(srq) => Ok(srq.query()),
            SrqKind::Kernel(srq) => srq.query(),
        }
    }

    /// Destroys it (`ibv_destroy_srq(3)`). Posted receives never complete.
    ///
    /// # Errors
    /// [`VerbsError::Busy`], with the queue, while a queue pair or another clone uses it.
    pub fn destroy(self) -> Result<(), Refused<Self>> {
        match Arc::try_unwrap(self.inner) {
            Ok(_) => Ok(()),
            Err(inner) => {
                let why = "a queue pair or another handle uses the shared receive queue";
                Err(Refused::new(Self { inner }, VerbsError::Busy(why)))
            }
        }
    }
}
