//! The part of libibverbs that the agent uses, opened at run time.
//!
//! Layouts and numbers are those of `infiniband/verbs.h` (rdma-core 44 and all since: its ABI is stable), checked below
//! where a test can.
#![allow(unsafe_code)]
#![allow(missing_docs)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::transmute_copy;

/// Opaque objects.
pub(super) type Device = c_void;
pub(super) type Pd = c_void;
pub(super) type Channel = c_void;

#[repr(C)]
pub(super) struct Context {
    device: *mut Device,
    ops: [*const c_void; 32],
    cmd_fd: c_int,
    pub(super) async_fd: c_int,
}

#[repr(C)]
pub(super) struct Mr {
    context: *mut Context,
    pd: *mut Pd,
    pub(super) addr: *mut c_void,
    length: usize,
    handle: u32,
    pub(super) lkey: u32,
    pub(super) rkey: u32,
}

/// The parts of `ibv_cq`, `ibv_qp` and `ibv_srq` that come first.
#[repr(C)]
pub(super) struct Cq {
    pub(super) context: *mut Context,
}

#[repr(C)]
pub(super) struct Srq {
    pub(super) context: *mut Context,
}

#[repr(C)]
pub(super) struct Qp {
    pub(super) context: *mut Context,
    qp_context: *mut c_void,
    pd: *mut Pd,
    send_cq: *mut Cq,
    recv_cq: *mut Cq,
    srq: *mut Srq,
    handle: u32,
    pub(super) qp_num: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Sge {
    pub(super) addr: u64,
    pub(super) length: u32,
    pub(super) lkey: u32,
}

#[repr(C)]
pub(super) struct SendWr {
    pub(super) wr_id: u64,
    pub(super) next: *mut SendWr,
    pub(super) sg_list: *mut Sge,
    pub(super) num_sge: c_int,
    pub(super) opcode: u32,
    pub(super) send_flags: u32,
    /// In network byte order.
    pub(super) imm_data: u32,
    /// Of the union `wr`: `rdma` has its key where `atomic` has what to compare with.
    pub(super) remote_addr: u64,
    pub(super) compare_add: u64,
    pub(super) swap: u64,
    pub(super) atomic_rkey: u32,
    pub(super) rest: [u64; 7],
}

#[repr(C)]
pub(super) struct RecvWr {
    pub(super) wr_id: u64,
    pub(super) next: *mut RecvWr,
    pub(super) sg_list: *mut Sge,
    pub(super) num_sge: c_int,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Wc {
    pub(super) wr_id: u64,
    pub(super) status: u32,
    pub(super) opcode: u32,
    vendor_err: u32,
    pub(super) byte_len: u32,
    pub(super) imm_data: u32,
    pub(super) qp_num: u32,
    src_qp: u32,
    pub(super) wc_flags: u32,
    rest: [u32; 2],
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct QpCap {
    pub(super) max_send_wr: u32,
    pub(super) max_recv_wr: u32,
    pub(super) max_send_sge: u32,
    pub(super) max_recv_sge: u32,
    pub(super) max_inline_data: u32,
}

#[repr(C)]
pub(super) struct QpInitAttr {
    pub(super) qp_context: *mut c_void,
    pub(super) send_cq: *mut Cq,
    pub(super) recv_cq: *mut Cq,
    pub(super) srq: *mut Srq,
    pub(super) cap: QpCap,
    pub(super) qp_type: u32,
    pub(super) sq_sig_all: c_int,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct SrqAttr {
    pub(super) max_wr: u32,
    pub(super) max_sge: u32,
    pub(super) srq_limit: u32,
}

#[repr(C)]
pub(super) struct SrqInitAttr {
    pub(super) srq_context: *mut c_void,
    pub(super) attr: SrqAttr,
}

#[repr(C, align(8))]
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Gid(pub(super) [u8; 16]);

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct AhAttr {
    pub(super) dgid: Gid,
    pub(super) flow_label: u32,
    pub(super) sgid_index: u8,
    pub(super) hop_limit: u8,
    pub(super) traffic_class: u8,
    pub(super) dlid: u16,
    pub(super) sl: u8,
    pub(super) src_path_bits: u8,
    pub(super) static_rate: u8,
    pub(super) is_global: u8,
    pub(super) port_num: u8,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct QpAttr {
    pub(super) qp_state: u32,
    pub(super) cur_qp_state: u32,
    pub(super) path_mtu: u32,
    pub(super) path_mig_state: u32,
    pub(super) qkey: u32,
    pub(super) rq_psn: u32,
    pub(super) sq_psn: u32,
    pub(super) dest_qp_num: u32,
    pub(super) qp_access_flags: u32,
    pub(super) cap: QpCap,
    pub(super) ah_attr: AhAttr,
    pub(super) alt_ah_attr: AhAttr,
    pub(super) pkey_index: u16,
    pub(super) alt_pkey_index: u16,
    pub(super) en_sqd_async_notify: u8,
    pub(super) sq_draining: u8,
    pub(super) max_rd_atomic: u8,
    pub(super) max_dest_rd_atomic: u8,
    pub(super) min_rnr_timer: u8,
    pub(super) port_num: u8,
    pub(super) timeout: u8,
    pub(super) retry_cnt: u8,
    pub(super) rnr_retry: u8,
    pub(super) alt_port_num: u8,
    pub(super) alt_timeout: u8,
    pub(super) rate_limit: u32,
}

#[repr(C)]
pub(super) struct AsyncEvent {
    pub(super) element: *mut c_void,
    pub(super) event_type: u32,
}

const _: () = {
    assert!(size_of::<SendWr>() == 128 && size_of::<Wc>() == 48 && size_of::<RecvWr>() == 32);
    assert!(size_of::<QpInitAttr>() == 64 && size_of::<QpAttr>() == 144);
    assert!(size_of::<AhAttr>() == 32 && size_of::<SrqInitAttr>() == 24);
    assert!(std::mem::offset_of!(Qp, qp_num) == 52 && std::mem::offset_of!(Mr, lkey) == 36);
    assert!(std::mem::offset_of!(Context, async_fd) == 268);
    assert!(std::mem::offset_of!(QpAttr, pkey_index) == 120);
};

/// Indices into `struct ibv_context_ops`.
const POLL_CQ: usize = 11;
const REQ_NOTIFY_CQ: usize = 12;
const POST_SRQ_RECV: usize = 20;
const POST_SEND: usize = 25;
const POST_RECV: usize = 26;

/// Functions of the library: `name(arguments) -> result` declares the field and finds the symbol.
macro_rules! functions {
    ($($field:ident = $symbol:literal ( $($arg:ty),* ) $(-> $result:ty)?;)+) => {
        /// The library's functions.
        #[derive(Clone, Copy)]
        pub(super) struct Library {
            $(pub(super) $field: unsafe extern "C" fn($($arg),*) $(-> $result)?,)+
        }

        impl Library {
            /// Opens the library.
            ///
            /// # Errors
            /// It is not installed, or too old.
            pub(super) fn open() -> Result<Self, String> {
                // SAFETY: the name is a C string; loading the library runs its constructors, which is what is wanted.
                let library = unsafe { libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_NOW) };
                if library.is_null() {
                    return Err("libibverbs.so.1 is not installed: apt install libibverbs1".into());
                }
                Ok(Self {
                    $($field: {
                        let name: &CStr = $symbol;
                        // SAFETY: the library is open and never closed; the name is a C string.
                        let symbol = unsafe { libc::dlsym(library, name.as_ptr()) };
                        if symbol.is_null() {
                            return Err(format!("libibverbs has no {}", name.to_string_lossy()));
                        }
                        // SAFETY: the symbol is the function that verbs.h declares with this signature.
                        unsafe { transmute_copy(&symbol) }
                    },)+
                })
            }
        }
    };
}

functions! {
    get_device_list = c"ibv_get_device_list"(*mut c_int) -> *mut *mut Device;
    free_device_list = c"ibv_free_device_list"(*mut *mut Device);
    get_device_name = c"ibv_get_device_name"(*mut Device) -> *const c_char;
    open_device = c"ibv_open_device"(*mut Device) -> *mut Context;
    close_device = c"ibv_close_device"(*mut Context) -> c_int;
    query_gid = c"ibv_query_gid"(*mut Context, u8, c_int, *mut Gid) -> c_int;
    alloc_pd = c"ibv_alloc_pd"(*mut Context) -> *mut Pd;
    dealloc_pd = c"ibv_dealloc_pd"(*mut Pd) -> c_int;
    reg_mr = c"ibv_reg_mr"(*mut Pd, *mut c_void, usize, c_int) -> *mut Mr;
    dereg_mr = c"ibv_dereg_mr"(*mut Mr) -> c_int;
    create_comp_channel = c"ibv_create_comp_channel"(*mut Context) -> *mut Channel;
    destroy_comp_channel = c"ibv_destroy_comp_channel"(*mut Channel) -> c_int;
    create_cq = c"ibv_create_cq"(*mut Context, c_int, *mut c_void, *mut Channel, c_int) -> *mut Cq;
    destroy_cq = c"ibv_destroy_cq"(*mut Cq) -> c_int;
    get_cq_event = c"ibv_get_cq_event"(*mut Channel, *mut *mut Cq, *mut *mut c_void) -> c_int;
    ack_cq_events = c"ibv_ack_cq_events"(*mut Cq, u32);
    create_srq = c"ibv_create_srq"(*mut Pd, *mut SrqInitAttr) -> *mut Srq;
    modify_srq = c"ibv_modify_srq"(*mut Srq, *mut SrqAttr, c_int) -> c_int;
    destroy_srq = c"ibv_destroy_srq"(*mut Srq) -> c_int;
    create_qp = c"ibv_create_qp"(*mut Pd, *mut QpInitAttr) -> *mut Qp;
    modify_qp = c"ibv_modify_qp"(*mut Qp, *mut QpAttr, c_int) -> c_int;
    query_qp = c"ibv_query_qp"(*mut Qp, *mut QpAttr, c_int, *mut QpInitAttr) -> c_int;
    destroy_qp = c"ibv_destroy_qp"(*mut Qp) -> c_int;
    get_async_event = c"ibv_get_async_event"(*mut Context, *mut AsyncEvent) -> c_int;
    ack_async_event = c"ibv_ack_async_event"(*mut AsyncEvent);
    event_type_str = c"ibv_event_type_str"(u32) -> *const c_char;
}

impl Context {
    /// # Safety
    /// `T` must be the type of the operation at `index`.
    unsafe fn operation<T>(&self, index: usize) -> T {
        // SAFETY: the caller names the type; the provider fills every operation of its contexts.
        unsafe { transmute_copy(&self.ops[index]) }
    }
}

/// `ibv_poll_cq`, which `verbs.h` has inline.
///
/// # Safety
/// The queue must exist, and `out` be as long as `count` says.
pub(super) unsafe fn poll_cq(cq: *mut Cq, count: c_int, out: *mut Wc) -> c_int {
    type Poll = unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int;
    // SAFETY: the operation's type is that of verbs.h; the rest is the caller's promise.
    unsafe { (*(*cq).context).operation::<Poll>(POLL_CQ)(cq, count, out) }
}

/// `ibv_req_notify_cq`.
///
/// # Safety
/// The queue must exist.
pub(super) unsafe fn req_notify_cq(cq: *mut Cq, solicited: c_int) -> c_int {
    type Notify = unsafe extern "C" fn(*mut Cq, c_int) -> c_int;
    // SAFETY: as in `poll_cq`.
    unsafe { (*(*cq).context).operation::<Notify>(REQ_NOTIFY_CQ)(cq, solicited) }
}

/// `ibv_post_send`.
///
/// # Safety
/// The queue pair must exist, and the request and its list be as `verbs.h` says.
pub(super) unsafe fn post_send(qp: *mut Qp, wr: *mut SendWr) -> c_int {
    type Post = unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int;
    let mut bad = std::ptr::null_mut();
    // SAFETY: as in `poll_cq`.
    unsafe { (*(*qp).context).operation::<Post>(POST_SEND)(qp, wr, &raw mut bad) }
}

/// `ibv_post_recv`.
///
/// # Safety
/// As [`post_send`].
pub(super) unsafe fn post_recv(qp: *mut Qp, wr: *mut RecvWr) -> c_int {
    type Post = unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> c_int;
    let mut bad = std::ptr::null_mut();
    // SAFETY: as in `poll_cq`.
    unsafe { (*(*qp).context).operation::<Post>(POST_RECV)(qp, wr, &raw mut bad) }
}

/// `ibv_post_srq_recv`.
///
/// # Safety
/// As [`post_send`].
pub(super) unsafe fn post_srq_recv(srq: *mut Srq, wr: *mut RecvWr) -> c_int {
    type Post = unsafe extern "C" fn(*mut Srq, *mut RecvWr, *mut *mut RecvWr) -> c_int;
    let mut bad = std::ptr::null_mut();
    // SAFETY: as in `poll_cq`.
    unsafe { (*(*srq).context).operation::<Post>(POST_SRQ_RECV)(srq, wr, &raw mut bad) }
}
