//! Queue pairs of the extended interface (`ibv_create_qp_ex`, `ibv_wr_start(3)`), because `struct
//! ibv_send_wr` has no form for FLUSH and ATOMIC WRITE.
//!
//! A queue pair is extended if the device reports these operations. All other requests use
//! `ibv_post_send`, which the library permits beside it (`ibv_wr_post(3)`).
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::mem::{MaybeUninit, offset_of, size_of};
use std::ptr::{self, NonNull};

use rocinante_stack::PostError;
use rocinante_stack::mem::FlushLevel;
use rocinante_stack::verbs::{SendData, SendOp, SendWr};
use rustix::io::Errno;

use super::abi::{self, DeviceAttrEx, QpEx, QpInitAttrEx, VerbsContext, send_flags};
use super::{Context, Library};
use crate::convert;

/// `IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS`.
const INIT_PD_AND_SEND_OPS: u32 = 1 | 1 << 6;

/// The operations of a new queue pair: bits of `enum ibv_qp_create_send_ops_flags`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SendOps(u64);

impl SendOps {
    /// The operations that need no extended queue pair.
    pub(crate) const USUAL: Self = Self(0);
    const FLUSH: u64 = 1 << 11;
    const ATOMIC_WRITE: u64 = 1 << 12;

    /// The operations to try on a device that reports these.
    pub(crate) fn new(flush: bool, atomic_write: bool) -> Self {
        let flag = |wanted, flag| if wanted { flag } else { 0 };
        Self(flag(flush, Self::FLUSH) | flag(atomic_write, Self::ATOMIC_WRITE))
    }

    fn has(self, flag: u64) -> bool {
        self.0 & flag != 0
    }
}

impl Context {
    /// A member of the table of newer operations, if the library's table reaches to its `offset`.
    fn newer<T>(&self, offset: usize, member: impl Fn(*const VerbsContext) -> T) -> Option<T> {
        let context = self.pointer.as_ptr();
        // SAFETY: the device is open.
        if unsafe { (*context).abi_compat }.addr() != usize::MAX {
            return None;
        }
        // SAFETY: the mark says that the context is the end of a `struct verbs_context`, of which
        // `sz` bytes are there; all versions have its size. No reference is made to it, because an
        // older one begins later.
        unsafe {
            let newer = context.byte_sub(offset_of!(VerbsContext, context)).cast::<VerbsContext>();
            ((*newer).sz >= size_of::<VerbsContext>() - offset).then(|| member(newer))
        }
    }

    /// Bits of `enum ib_uverbs_device_cap_flags`, without those that an older library does not
    /// report.
    pub(crate) fn capabilities(&self) -> u64 {
        // SAFETY: `newer` found the member.
        let query = self.newer(offset_of!(VerbsContext, query_device_ex), |newer| unsafe {
            (*newer).query_device_ex
        });
        let Some(query) = query.flatten() else { return 0 };
        let mut attr = MaybeUninit::<DeviceAttrEx>::zeroed();
        // SAFETY: the device is open, and the structure as long as it says.
        let result = unsafe {
            query(self.pointer.as_ptr(), ptr::null(), attr.as_mut_ptr(), size_of::<DeviceAttrEx>())
        };
        // SAFETY: all-zero bytes are a valid value, and the call writes only numbers.
        if result == 0 { unsafe { attr.assume_init() }.device_cap_flags_ex } else { 0 }
    }

    /// Makes a queue pair with those of these operations that the library knows. `None` if the
    /// queue pair cannot be extended.
    ///
    /// # Safety
    /// The domain and the queues of `init` exist.
    pub(super) unsafe fn create_qp(
        &self,
        pd: NonNull<abi::Pd>,
        init: &mut abi::QpInitAttr,
        wanted: SendOps,
    ) -> Option<(NonNull<abi::Qp>, Extended)> {
        // SAFETY: `newer` found the member.
        let create = self.newer(offset_of!(VerbsContext, create_qp_ex), |newer| unsafe {
            (*newer).create_qp_ex
        })??;
        for ops in [wanted.0, wanted.0 & SendOps::ATOMIC_WRITE] {
            if ops == 0 {
                break;
            }
            let mut attr = QpInitAttrEx {
                qp_context: init.qp_context,
                send_cq: init.send_cq,
                recv_cq: init.recv_cq,
                srq: init.srq,
                cap: init.cap,
                qp_type: init.qp_type,
                sq_sig_all: init.sq_sig_all,
                comp_mask: INIT_PD_AND_SEND_OPS,
                pd: pd.as_ptr(),
                xrcd: ptr::null_mut(),
                create_flags: 0,
                max_tso_header: 0,
                rwq_ind_tbl: ptr::null_mut(),
                rx_hash: [0; 3],
                source_qpn: 0,
                send_ops_flags: ops,
            };
            // SAFETY: the device is open; the caller vouches for the rest.
            let Some(qp) = NonNull::new(unsafe { create(self.pointer.as_ptr(), &mut attr) }) else {
                continue;
            };
            // SAFETY: it was just made.
            if let Some(extended) = unsafe { Extended::of(self.library, qp, SendOps(ops)) } {
                init.cap = attr.cap;
                return Some((qp, extended));
            }
            // SAFETY: it was just made, and nothing uses it.
            unsafe { (self.library.ibv_destroy_qp)(qp.as_ptr()) };
        }
        None
    }
}

/// The extended side of a queue pair. It lives as long as the queue pair.
#[derive(Debug, Clone, Copy)]
pub(super) struct Extended {
    pointer: NonNull<QpEx>,
    ops: SendOps,
    start: unsafe extern "C" fn(*mut QpEx),
    complete: unsafe extern "C" fn(*mut QpEx) -> c_int,
}

impl Extended {
    /// # Safety
    /// The queue pair was made with these operations.
    unsafe fn of(library: &Library, qp: NonNull<abi::Qp>, ops: SendOps) -> Option<Self> {
        let to_extended = library.ibv_qp_to_qp_ex?;
        // SAFETY: the queue pair exists.
        let pointer = NonNull::new(unsafe { to_extended(qp.as_ptr()) }.cast::<QpEx>())?;
        // SAFETY: it was made as an extended queue pair, and all extended queue pairs have these
        // two functions. No reference is made to it, because it may end before its last member.
        let (start, complete) =
            unsafe { ((*pointer.as_ptr()).wr_start, (*pointer.as_ptr()).wr_complete) };
        Some(Self { pointer, ops, start: start?, complete: complete? })
    }

    /// Posts a FLUSH or an ATOMIC WRITE.
    ///
    /// # Safety
    /// The queue pair exists.
    pub(super) unsafe fn post(&self, wr: &SendWr<'_>) -> Result<(), PostError> {
        let qp = self.pointer.as_ptr();
        let flags = [(wr.signaled, send_flags::SIGNALED), (wr.fence, send_flags::FENCE)];
        let flags = flags.iter().filter(|(wanted, _)| *wanted).fold(0, |all, (_, flag)| all | flag);
        let build: &dyn Fn() = match (&wr.op, wr.data) {
            (SendOp::AtomicWrite { remote, rkey }, SendData::Inline(bytes))
                if self.ops.has(SendOps::ATOMIC_WRITE) && bytes.len() == 8 =>
            {
                // SAFETY: a queue pair with this operation has the member.
                let write = unsafe { (*qp).wr_atomic_write }.ok_or(PostError::Unsupported)?;
                // SAFETY: called between start and complete; the eight bytes are copied at once.
                &move || unsafe { write(qp, rkey.0, *remote, bytes.as_ptr().cast()) }
            }
            (SendOp::AtomicWrite { .. }, SendData::Sges(_)) => return Err(PostError::NotInline),
            (SendOp::Flush { remote, rkey, len, placement, level }, _)
                if self.ops.has(SendOps::FLUSH) =>
            {
                // SAFETY: as above.
                let flush = unsafe { (*qp).wr_flush }.ok_or(PostError::Unsupported)?;
                let (len, level) = (*len as usize, u8::from(*level == FlushLevel::Region));
                // SAFETY: as above.
                &move || unsafe { flush(qp, rkey.0, *remote, len, placement.bits(), level) }
            }
            _ => return Err(PostError::Unsupported),
        };
        // SAFETY: the queue pair exists. From start to complete the library holds its lock, so no
        // other thread writes the two members.
        let result = unsafe {
            (self.start)(qp);
            (*qp).wr_id = wr.wr_id;
            (*qp).wr_flags = flags;
            build();
            (self.complete)(qp)
        };
        match result {
            0 => Ok(()),
            full if full.abs() == Errno::NOSPC.raw_os_error() => Err(PostError::Full),
            error => Err(convert::post_error(error)),
        }
    }
}
