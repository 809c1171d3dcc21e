//! Memory windows: keys to parts of a region, bound and invalidated while the region stays
//! registered.

use std::sync::atomic::{AtomicU32, Ordering};

use rocinante_kernel as kernel;
use rocinante_soft as soft;
use rocinante_soft::model::error::VerbsError;
use rocinante_stack::mem::{Access, MwType, RemoteSlice};
use rocinante_stack::types::Key;
use rocinante_stack::verbs::{SendData, SendOp, SendWr};

use crate::context::{Pd, PdKind};
use crate::mr::Mr;
use crate::qp::{Qp, QpKind};

impl Pd {
    /// Allocates a memory window (`ibv_alloc_mw(3)`), which is not bound yet.
    ///
    /// # Errors
    /// [`VerbsError::Limit`] if there are too many; [`VerbsError::Invalid`] if the software device
    /// has several shards; [`VerbsError::Hardware`] if the kernel's device refuses or has no
    /// windows.
    pub fn alloc_mw(&self, mw_type: MwType) -> Result<Mw, VerbsError> {
        let kind = match &self.inner.kind {
            PdKind::Soft(pd) => MwKind::Soft(soft::Window::alloc(pd, mw_type)?),
            PdKind::Kernel(pd) => MwKind::Kernel(kernel::Window::alloc(pd, mw_type)?),
        };
        let first = on!(MwKind, &kind, window => window.first_key());
        Ok(Mw { rkey: AtomicU32::new(first.0), kind, mw_type, _pd: self.clone() })
    }
}

/// A memory window (`struct ibv_mw`): it gives peers access to a part of a region, under a key of
/// its own. The region needs [`Access::MW_BIND`], but no remote permission.
///
/// - Type 1: [`Qp::bind_mw`] binds it, any number of times. All queue pairs of the protection
///   domain may use it.
/// - Type 2: the request that [`bind`](Self::bind) makes binds it. [`SendOp::LocalInv`], or a
///   [`SendOp::SendInv`] of the peer, invalidates it; then it may be bound again. Only the queue
///   pair that bound it may use it (type 2B).
///
/// Each binding has a new key, which counts up in the low 8 bits. Once the request is executed,
/// accesses with the old key fail; after 256 bindings the key repeats. A region with a bound window
/// can be neither deregistered nor changed.
///
/// Dropping it deallocates it (`ibv_dealloc_mw(3)`): accesses with its key then fail, and so does a
/// request in flight that binds it.
///
/// ```
/// use std::net::IpAddr;
/// use std::time::Duration;
/// use rocinante::verbs::{MwPart, MwType, SendData};
/// use rocinante::{Access, ConnectOptions, Context, SendWr, VerbsError};
///
/// fn main() -> Result<(), VerbsError> {
///     let [here, there] = [1, 2].map(|host| IpAddr::from([127, 0, 0, host]));
/// #   let (here, there) = rocinante::doc::addresses();
///     let (a, b) = (Context::open(here)?, Context::open(there)?);
///     let (pd_a, pd_b) = (a.alloc_pd(), b.alloc_pd());
///     let (cq_a, cq_b) = (a.create_cq(16)?, b.create_cq(16)?);
///     let qp_a = pd_a.qp(&cq_a, &cq_a).build()?;
///     let qp_b = pd_b.qp(&cq_b, &cq_b).access(Access::REMOTE_WRITE).build()?;
///     let (to_b, to_a) = (qp_b.endpoint(), qp_a.endpoint());
///     let options = ConnectOptions::default();
///     let qp_a = qp_a.connect(&to_b, &options)?;
///     let qp_b = qp_b.connect(&to_a, &options)?;
///
///     // `qp_b`'s peer may write 64 bytes of the region, until they are taken back.
///     let region = pd_b.allocate(4096, Access::LOCAL_WRITE | Access::MW_BIND)?;
///     let mw = pd_b.alloc_mw(MwType::Type2)?;
///     let part = MwPart { mr: &region, offset: 1024, len: 64, access: Access::REMOTE_WRITE };
///     qp_b.post(SendWr::new(mw.bind(&part), SendData::NONE))?;
///     cq_b.wait_one(Duration::from_secs(5))?.ok()?;
///
///     let source = pd_a.allocate(64, Access::NONE)?;
///     qp_a.post(SendWr::write(&[source.sge(0, 64)], mw.remote(&part)))?;
///     cq_a.wait_one(Duration::from_secs(5))?.ok()?;
///
///     qp_b.post(SendWr::local_inv(mw.rkey()))?;
///     cq_b.wait_one(Duration::from_secs(5))?.ok()?;
///     Ok(())
/// }
/// ```
#[derive(Debug)]
pub struct Mw {
    kind: MwKind,
    mw_type: MwType,
    /// The key of the last requested binding.
    rkey: AtomicU32,
    _pd: Pd,
}

#[derive(Debug)]
enum MwKind {
    Soft(soft::Window),
    Kernel(kernel::Window),
}

/// A part of a region, and the peers' rights there (`struct ibv_mw_bind_info`).
#[derive(Debug, Clone, Copy)]
pub struct MwPart<'a> {
    /// The region.
    pub mr: &'a Mr,
    /// Offset of the part in the region, in bytes.
    pub offset: usize,
    /// Its length in bytes. Length 0 frees a window of type 1; a window of type 2 cannot be bound
    /// to length 0. The device checks at binding whether the part is inside the region.
    pub len: usize,
    /// Remote flags. For type 2 also [`Access::ZERO_BASED`]: peers then name its bytes by their
    /// offset in it.
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

    /// The key to give to peers: that of the last requested binding, valid once the binding's
    /// request is complete. If that fails, see [`set_rkey`](Self::set_rkey).
    #[must_use]
    pub fn rkey(&self) -> Key {
        Key(self.rkey.load(Ordering::Acquire))
    }

    /// The address and key with which a peer accesses the window once it is bound to `part`.
    #[must_use]
    pub fn remote(&self, part: &MwPart<'_>) -> RemoteSlice {
        RemoteSlice { address: part.address(), len: part.len as u64, rkey: self.rkey() }
    }

    /// Sets the key that the window has (as programs write `ibv_mw::rkey`). The next
    /// [`bind`](Self::bind) counts from it; devices refuse a binding that counts from another.
    ///
    /// Only for windows of type 2. [`bind`](Self::bind) counts the key before the binding is
    /// executed. If it never is, because the request was not posted, failed or was flushed, the
    /// window still has its previous key: set that. [`Qp::bind_mw`] does so itself for type 1.
    ///
    /// ```
    /// use std::net::IpAddr;
    /// use rocinante::verbs::{MwPart, MwType, SendData};
    /// use rocinante::{Access, Context, SendWr, VerbsError};
    ///
    /// fn main() -> Result<(), VerbsError> {
    ///     let here = IpAddr::from([127, 0, 0, 1]);
    /// #   let (here, _) = rocinante::doc::addresses();
    ///     let ctx = Context::open(here)?;
    ///     let (pd, cq) = (ctx.alloc_pd(), ctx.create_cq(16)?);
    ///     let qp = pd.qp(&cq, &cq).build_reset()?;
    ///     let region = pd.allocate(4096, Access::LOCAL_WRITE | Access::MW_BIND)?;
    ///     let mw = pd.alloc_mw(MwType::Type2)?;
    ///     let part = MwPart { mr: &region, offset: 0, len: 64, access: Access::REMOTE_WRITE };
    ///     let before = mw.rkey();
    ///     let request = SendWr::new(mw.bind(&part), SendData::NONE);
    ///     // `qp` is not connected, so the request is refused.
    ///     if qp.post(request).is_err() {
    ///         mw.set_rkey(before);
    ///     }
    ///     assert_eq!(mw.rkey(), before);
    ///     Ok(())
    /// }
    /// ```
    pub fn set_rkey(&self, rkey: Key) {
        self.rkey.store(rkey.0, Ordering::Release);
    }

    /// The request that binds a window of type 2 to `part`, under the next key.
    /// [`rkey`](Self::rkey) returns that key from now on. Post the requests in the order in which
    /// they were made.
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
    /// The part that peers may access.
    pub part: MwPart<'a>,
    /// Whether success makes a completion; an error always does.
    pub signaled: bool,
    /// Whether to wait for all READs and atomics of the queue pair before it (`IBV_SEND_FENCE`).
    pub fence: bool,
}

impl Qp {
    /// Binds a window of type 1 (`ibv_bind_mw(3)`) by a request in the send queue, and returns its
    /// new key at once. The new key is valid once the request is complete, the old one until the
    /// request is executed. A part of length 0 unbinds the window.
    ///
    /// # Errors
    /// [`VerbsError::Invalid`] for a window of type 2, which [`Mw::bind`] binds, or of another
    /// device; [`VerbsError::Post`] as [`post_send`](Self::post_send). A binding that the device
    /// does not permit fails with `MW_BIND_ERR` at execution; some devices check at once.
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
            (QpKind::Kernel(qp), MwKind::Kernel(window)) if window.is_of(qp.device()) => {
                mw.request(before, before, &bind.part)
            }
            _ => return invalid("the window belongs to another device"),
        };
        let (wr_id, data) = (bind.wr_id, SendData::Sges(&[]));
        let BindMw { signaled, fence, .. } = *bind;
        let mut wr = SendWr::new(op, data).wr_id(wr_id).signaled(signaled);
        wr.fence = fence;
        match &self.kind {
            // The next binding counts from the key that the window has.
            QpKind::Soft(qp) => qp.post_send(&[wr]).inspect_err(|_| mw.set_rkey(before))?,
            QpKind::Kernel(qp) => {
                let key = qp.bind_mw(&wr).map_err(VerbsError::Post)?;
                mw.set_rkey(key);
            }
        }
        Ok(mw.rkey())
    }
}
