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
/// use rocinante::{Access, ConnectOptions, Context, RecvWr, SendWr, VerbsError};
///
/// fn main() -> Result<(), VerbsError> {
///     let [here, there] = [1, 2].map(|host| IpAddr::from([127, 0, 0, host]));
/// #   let (here, there) = rocinante::doc::addresses();
///     let (a, b) = (Context::open(here)?, Context::open(there)?);
///     let (pd_a, pd_b) = (a.alloc_pd(), b.alloc_pd());
///     let (cq_a, cq_b) = (a.create_cq(16)?, b.create_cq(16)?);
///     // Ten clients would need no more than one queue's receives.
///     let srq = pd_b.create_srq(64, 1)?;
///     let qp_a = pd_a.qp(&cq_a, &cq_a).build()?;
///     let qp_b = pd_b.qp(&cq_b, &cq_b).srq(&srq).build()?;
///     let (to_b, to_a) = (qp_b.endpoint(), qp_a.endpoint());
///     let options = ConnectOptions::default();
///     let (qp_a, qp_b) = (qp_a.connect(&to_b, &options)?, qp_b.connect(&to_a, &options)?);
///
///     let buffers = pd_b.allocate(64 * 1024, Access::LOCAL_WRITE)?;
///     for wr_id in 0..64 {
///         srq.post_recv(&[RecvWr::new(wr_id, &[buffers.sge(wr_id as usize * 1024, 1024)])])?;
///     }
///     // Say so when fewer than 16 are left.
///     srq.arm(16)?;
///     qp_a.post(SendWr::send(b"for any of them"))?;
///     let wc = cq_b.wait_one(Duration::from_secs(5))?;
///     assert_eq!((wc.wr_id, wc.qpn), (0, qp_b.qpn()));
///     assert_eq!(buffers.to_vec(0, 15), b"for any of them");
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
    /// Makes a shared receive queue for at most `max_wr` receives of at most `max_sge` elements
    /// (`ibv_create_srq(3)`). The memory that its receives name must belong to this domain.
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
        match self.kind() {
            SrqKind::Soft(srq) => srq.number(),
            SrqKind::Kernel(srq) => srq.number(),
        }
    }

    /// Posts receive requests in order (`ibv_post_srq_recv(3)`).
    ///
    /// # Errors
    /// [`PostListError`] names the first request that was not posted; those before it are posted.
    #[inline]
    pub fn post_recv(&self, list: &[RecvWr<'_>]) -> Result<(), PostListError> {
        match self.kind() {
            SrqKind::Soft(srq) => srq.post_recv(list),
            SrqKind::Kernel(srq) => srq.post_recv(list),
        }
    }

    /// Changes depth or limit (`ibv_modify_srq(3)`). Not every device of the kernel can change the
    /// depth.
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
        match self.kind() {
            SrqKind::Soft(srq) => srq.modify(change),
            SrqKind::Kernel(srq) => srq.modify(change),
        }
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

    /// Its attributes (`ibv_query_srq(3)`). The limit is 0 unless its event is still due.
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
