//! Queue pairs of the extended interface (`ibv_create_qp_ex`, `ibv_wr_start(3)`), because `struct
//! ibv_send_wr` has no form for FLUSH and ATOMIC WRITE.
//!
//! A queue pair is extended if the device reports these operations. All other requests use
//! `ibv_post_send`, which the library permits beside it (`ibv_wr_post(3)`).
#![allow(unsafe_code)]

use std::ffi::{c_int, c_uint, c_void};
use std::mem::{MaybeUninit, offset_of, size_of};
use std::ptr::{self, NonNull};

use rocinante_stack::PostError;
use rocinante_stack::mem::FlushLevel;
use rocinante_stack::verbs::{SendData, SendOp, SendWr};
use rustix::io::Errno;

use super::abi::{self, QpCap, send_flags};
use super::{Context, Library};
use crate::convert;

/// `struct verbs_context`, up to the `struct ibv_context` at its end: it grows at its beginning.
#[repr(C)]
struct VerbsContext {
    _newer: [*const c_void; 27],
    query_device_ex: Option<
        unsafe extern "C" fn(*mut abi::Context, *const c_void, *mut DeviceAttrEx, usize) -> c_int,
    >,
    _flows_and_ah: [*const c_void; 5],
    create_qp_ex:
        Option<unsafe extern "C" fn(*mut abi::Context, *mut QpInitAttrEx) -> *mut abi::Qp>,
    _older: [*const c_void; 5],
    sz: usize,
}

/// The length of the `struct verbs_context` that introduced these members.
const VERBS_CONTEXT: usize = 648;

/// `struct ibv_device_attr_ex`.
#[repr(C)]
struct DeviceAttrEx {
    _orig_attr: [u64; 29],
    _comp_mask: u32,
    _between: [u64; 5],
    device_cap_flags_ex: u64,
    _after: [u64; 14],
}

/// `struct ibv_qp_init_attr_ex`.
#[repr(C)]
struct QpInitAttrEx {
    qp_context: *mut c_void,
    send_cq: *mut abi::Cq,
    recv_cq: *mut abi::Cq,
    srq: *mut abi::Srq,
    cap: QpCap,
    qp_type: c_int,
    sq_sig_all: c_int,
    comp_mask: u32,
    pd: *mut abi::Pd,
    _between: [u64; 7],
    send_ops_flags: u64,
}

/// `IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS`.
const INIT_PD_AND_SEND_OPS: u32 = 1 | 1 << 6;

/// `struct ibv_qp_ex`.
#[repr(C)]
pub(super) struct QpEx {
    _base: [u64; 20],
    _comp_mask: u64,
    wr_id: u64,
    wr_flags: c_uint,
    _other_operations: [*const c_void; 17],
    wr_start: Option<unsafe extern "C" fn(*mut QpEx)>,
    wr_complete: Option<unsafe extern "C" fn(*mut QpEx) -> c_int>,
    _wr_abort: *const c_void,
    wr_atomic_write: Option<unsafe extern "C" fn(*mut QpEx, u32, u64, *const c_void)>,
    /// Only if the queue pair was made with this operation: the structure of older libraries ends
    /// before it.
    wr_flush: Option<unsafe extern "C" fn(*mut QpEx, u32, u64, usize, u8, u8)>,
}

#[cfg(target_pointer_width = "64")]
const _: () = {
    assert!(offset_of!(VerbsContext, query_device_ex) == 216);
    assert!(offset_of!(VerbsContext, create_qp_ex) == 264);
    assert!(offset_of!(VerbsContext, sz) == 312 && size_of::<VerbsContext>() == 320);
    assert!(offset_of!(DeviceAttrEx, device_cap_flags_ex) == 280);
    assert!(size_of::<DeviceAttrEx>() == 400 && size_of::<QpInitAttrEx>() == 136);
    assert!(offset_of!(QpInitAttrEx, cap) == 32 && offset_of!(QpInitAttrEx, qp_type) == 52);
    assert!(offset_of!(QpInitAttrEx, comp_mask) == 60 && offset_of!(QpInitAttrEx, pd) == 64);
    assert!(offset_of!(QpInitAttrEx, send_ops_flags) == 128);
    assert!(offset_of!(QpEx, wr_id) == 168 && offset_of!(QpEx, wr_flags) == 176);
    assert!(offset_of!(QpEx, wr_start) == 320 && offset_of!(QpEx, wr_complete) == 328);
    assert!(offset_of!(QpEx, wr_atomic_write) == 344 && offset_of!(QpEx, wr_flush) == 352);
};

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
    /// The table of newer operations, if the library's table reaches to `offset`.
    fn newer(&self, offset: usize) -> Option<&VerbsContext> {
        let context = self.pointer.as_ptr();
        // SAFETY: the device is open.
        if unsafe { (*context).abi_compat }.addr() != usize::MAX {
            return None;
        }
        // SAFETY: the mark says that the context is the end of a `struct verbs_context`, of which
        // `sz` bytes are there; all versions have its size.
        unsafe {
            let newer = context.byte_sub(size_of::<VerbsContext>()).cast::<VerbsContext>();
            ((*newer).sz >= VERBS_CONTEXT - offset).then(|| &*newer)
        }
    }

    /// Bits of `enum ib_uverbs_device_cap_flags`, without those that an older library does not
    /// report.
    pub(crate) fn capabilities(&self) -> u64 {
        let newer = self.newer(offset_of!(VerbsContext, query_device_ex));
        let Some(query) = newer.and_then(|newer| newer.query_device_ex) else { return 0 };
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
        let newer = self.newer(offset_of!(VerbsContext, create_qp_ex))?;
        let create = newer.create_qp_ex?;
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
                _between: [0; 7],
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
