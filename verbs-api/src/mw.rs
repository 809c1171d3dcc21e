//! Memory windows: keys of their own to parts of a region, given and taken back while the region stays registered.

use std::sync::atomic::{AtomicU32, Ordering};

use rocinante_stack::mem::{Access, MwType};
use rocinante_stack::types::Key;
use rocinante_stack::verbs::{SendData, SendOp, SendWr};

use crate::context::{Pd, PdKind};
use crate::error::VerbsError;
use crate::mr::Mr;
use crate::qp::{Qp, QpKind};
use crate::{hw, soft};

impl Pd {
    /// Allocates a memory window (`ibv_alloc_mw(3)`), which is bound to nothing yet.
    ///
    /// # Errors
    /// [`VerbsError::Limit`] if there are too many; [`VerbsError::Hardware`] if the kernel's device refuses, or has none.
    pub fn alloc_mw(&self, mw_type: MwType) -> Result<Mw, VerbsError> {
        let kind = match &self.inner.kind {
            PdKind::Soft(pd) => MwKind::Soft(soft::Window::alloc(pd, mw_type)?),
            PdKind::Hw(pd) => MwKind::Hw(hw::Window::alloc(pd, mw_type)?),
        };
        let first = match &kind {
            MwKind::Soft(window) => window.first_key(),
            MwKind::Hw(window) => window.first_key(),
        };
        Ok(Mw { rkey: AtomicU32::new(first.0), kind, mw_type, _pd: self.clone() })
    }
}

/// A memory window (`struct ibv_mw`): it shows peers a part of a region, under a key of its own. The region needs
/// [`Access::MW_BIND`], and no right of the peers'.
///
/// - Type 1 is bound by [`Qp::bind_mw`], as often as wanted. All queue pairs of the protection domain get through it.
/// - Type 2 is bound by the request that [`bind`](Self::bind) makes, and freed by [`SendOp::LocalInv`], or by a [`SendOp::SendInv`] of the peer's; then
///   it may be bound again. Only the queue pair that bound it gets through it (type 2B).
///
/// Each binding has a new key: the low 8 bits count. From the moment when the request is executed the old key is refused; after 256 bindings
/// it comes again. While a window is bound to it, a region is neither deregistered nor changed.
///
/// Dropping it deallocates it (`ibv_dealloc_mw(3)`): then its key is refused, and a request in flight that binds it fails.
///
/// ```
/// # use std::time::Duration;
/// # use rocinante::{Access, ConnectOptions, Context, MwPart, MwType, SendData, SendOp, SendWr, WcStatus};
/// # let (here, there) = rocinante::doc::addresses();
/// # let (a, b) = (Context::open(here)?, Context::open(there)?);
/// # let (pd_a, pd_b) = (a.alloc_pd(), b.alloc_pd());
/// # let (cq_a, cq_b) = (a.create_cq(16)?, b.create_cq(16)?);
/// # let (qp_a, qp_b) = (pd_a.qp(&cq_a, &cq_a).build()?, pd_b.qp(&cq_b, &cq_b).build()?);
/// # let (to_b, to_a) = (qp_b.endpoint(), qp_a.endpoint());
/// # let options = ConnectOptions::default();
/// # let qp_a = qp_a.connect(&to_b, &options).map_err(|(_, error)| error)?;
/// # let qp_b = qp_b.connect(&to_a, &options).map_err(|(_, error)| error)?;
/// # let source = pd_a.allocate(64, Access::NONE)?;
/// # let request = |op, list: &'static [_]| SendWr { wr_id: 1, op, data: SendData::Sges(list), signaled: true, solicited: false, fence: false };
/// // `qp_b`'s peer may write 64 bytes of the region, until they are taken back.
/// let region = pd_b.allocate(4096, Access::LOCAL_WRITE | Access::MW_BIND)?;
/// let mw = pd_b.alloc_mw(MwType::Type2)?;
/// let part = MwPart { mr: &region, offset: 1024, len: 64, access: Access::REMOTE_WRITE };
/// qp_b.post_send(&[request(mw.bind(&part), &[])])?;
/// assert_eq!(cq_b.wait_one(Duration::from_secs(5))?.status, WcStatus::Success);
/// let (remote, rkey) = (part.address(), mw.rkey());
///
/// let write = SendOp::Write { remote, rkey, imm: None };
/// qp_a.post_send(&[SendWr { data: SendData::Sges(&[source.sge(0, 64)]), ..request(write, &[]) }])?;
/// assert_eq!(cq_a.wait_one(Duration::from_secs(5))?.status, WcStatus::Success);
///
/// qp_b.post_send(&[request(SendOp::LocalInv { rkey }, &[])])?;
/// assert_eq!(cq_b.wait_one(Duration::from_secs(5))?.status, WcStatus::Success);
/// # Ok::<(), rocinante::VerbsError>(())
/// ```
#[derive(Debug)]
pub struct Mw {
    kind: MwKind,
    mw_type: MwType,
    /// Of the last binding that was asked for.
    rkey: AtomicU32,
    _pd: Pd,
}

#[derive(Debug)]
enum MwKind {
    Soft(soft::Window),
    Hw(hw::Window),
}

/// A part of a region, and what peers may do there (`struct ibv_mw_bind_info`).
#[derive(Debug, Clone, Copy)]
pub struct MwPart<'a> {
    /// The region.
    pub mr: &'a Mr,
    /// Where in the region the part begins.
    pub offset: usize,
    /// How many bytes it has; none frees a window of type 1, and cannot be bound by one of type 2. Whether the part is inside the region is found out
    /// when the window is bound.
    pub len: usize,
    /// Remote flags; and [`Access::ZERO_BASED`], only of type 2, if peers shall name its bytes by their offset in it.
    pub access: Access,
}

impl MwPart<'_> {
    /// The address by which peers name its first byte.
    #[must_use]
    pub fn address(&self) -> u64 {
        if self.access.admits(Access::ZERO_BASED) { 0 } else { self.local() }
    }

    fn local(&self) -> u64 {
        self.mr.address().wrapping_add(self.offset as u64)
    }
}

impl Mw {
    /// Its type.
    #[must_use]
    pub fn mw_type(&self) -> MwType {
        self.mw_type
    }

    /// The key for peers: of the last binding that was asked for, good once that is complete. If it is not done, see [`set_rkey`](Self::set_rkey).
    #[must_use]
    pub fn rkey(&self) -> Key {
        Key(self.rkey.load(Ordering::Acquire))
    }

    /// Says which key the window has (as programs write `ibv_mw::rkey`). To be called with the key of before when a binding of type 2 that was asked for
    /// is not done: it was not posted, it failed, or it was flushed. The next one counts from there; devices refuse to bind by any other key.
    pub fn set_rkey(&self, rkey: Key) {
        self.rkey.store(rkey.0, Ordering::Release);
    }

    /// The request that binds a window of type 2 to `part`, under the next key, which [`rkey`](Self::rkey) returns from now on. The requests are to be
    /// posted in the order in which they were made.
    #[must_use]
    pub fn bind(&self, part: &MwPart<'_>) -> SendOp {
        let next = |key: u32| Some(key & !0xff | key.wrapping_add(1) & 0xff);
        let (Ok(mw) | Err(mw)) = self.rkey.fetch_update(Ordering::AcqRel, Ordering::Acquire, next);
        let rkey = Key(next(mw).unwrap_or(mw));
        self.request(Key(mw), rkey, part)
    }

    fn request(&self, mw: Key, rkey: Key, part: &MwPart<'_>) -> SendOp {
        let (region, len) = (part.mr.lkey(), part.len as u64);
        let addr = if len == 0 { 0 } else { part.local() };
        SendOp::BindMw { mw, rkey, region, addr, len, access: part.access }
    }

    /// Deallocates it (`ibv_dealloc_mw(3)`): the same as dropping it.
    pub fn dealloc(self) {}
}

/// A request to [`Qp::bind_mw`] (`struct ibv_mw_bind`).
#[derive(Debug, Clone, Copy)]
pub struct BindMw<'a> {
    /// Returned in the completion.
    pub wr_id: u64,
    /// What to show.
    pub part: MwPart<'a>,
    /// Whether success makes a completion; errors always do.
    pub signaled: bool,
    /// Whether to wait for all READs and atomics before it.
    pub fence: bool,
}

impl Qp {
    /// Binds a window of type 1 (`ibv_bind_mw(3)`) by a request in the send queue, and returns its new key at once: it is good when the
    /// request is complete, and the old one until the request is executed. Of no bytes, it takes the window away from its region.
    ///
    /// # Errors
    /// [`VerbsError::Invalid`] for a window of type 2, which [`Mw::bind`] binds, or of another device; [`VerbsError::Post`] as
    /// [`post_send`](Self::post_send). What does not go together fails when it is executed, with `MW_BIND_ERR`; some devices look at once.
    pub fn bind_mw(&self, mw: &Mw, bind: &BindMw<'_>) -> Result<Key, VerbsError> {
        let invalid = |why: &str| Err(VerbsError::Invalid(why.into()));
        if mw.mw_type != MwType::Type1 {
            return invalid(
                "a window of type 2 is bound by a work request: post what `Mw::bind` returns",
            );
        }
        let before = mw.rkey();
        let op = match (&self.kind, &mw.kind) {
            (QpKind::Soft(qp), MwKind::Soft(window)) if window.is_of(qp.device()) => {
                mw.bind(&bind.part)
            }
            (QpKind::Hw(_), MwKind::Hw(_)) => mw.request(before, before, &bind.part),
            _ => return invalid("the window belongs to another device"),
        };
        let (wr_id, data) = (bind.wr_id, SendData::Sges(&[]));
        let BindMw { signaled, fence, .. } = *bind;
        let wr = SendWr { wr_id, op, data, signaled, solicited: false, fence };
        match &self.kind {
            // The next binding counts on from the key that the window has.
            QpKind::Soft(qp) => qp.post_send(&[wr]).inspect_err(|_| mw.set_rkey(before))?,
            QpKind::Hw(qp) => {
                let key = qp.bind_mw(&wr).map_err(VerbsError::Post)?;
                mw.set_rkey(key);
            }
        }
        Ok(mw.rkey())
    }
}
