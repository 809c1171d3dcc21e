//! The binary interface of `libibverbs.so.1`: the structures and numbers of `verbs.h` that this
//! crate uses.
//!
//! It is stable: every release since 2007 serves the version nodes `IBVERBS_1.0` and `IBVERBS_1.1`,
//! and structures grow only at their ends. The code below asserts the layout against offsets that a
//! C compiler printed. Of structures that the library makes, only the beginning is declared; this
//! crate never makes or copies them.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_uint, c_void};

use rocinante_stack::mem::Sge;

/// `struct ibv_device`; only ever behind a pointer.
#[repr(C)]
pub(in crate::kernel) struct Device {
    _opaque: [u8; 0],
}

/// `struct ibv_pd`; only ever behind a pointer.
#[repr(C)]
pub(in crate::kernel) struct Pd {
    _opaque: [u8; 0],
}

/// `struct ibv_context`, up to the last member that is read.
#[repr(C)]
pub(in crate::kernel) struct Context {
    pub(in crate::kernel) device: *mut Device,
    pub(in crate::kernel) ops: ContextOps,
    pub(in crate::kernel) cmd_fd: c_int,
    pub(in crate::kernel) async_fd: c_int,
    _num_comp_vectors: c_int,
    _mutex: [u64; 5],
    /// All ones if this is the end of a `struct verbs_context`.
    pub(in crate::kernel) abi_compat: *const c_void,
}

/// `struct ibv_context_ops`: the functions that the header's inline functions call.
#[repr(C)]
pub(in crate::kernel) struct ContextOps {
    _before_mw: [*const c_void; 7],
    pub(in crate::kernel) alloc_mw: Option<unsafe extern "C" fn(*mut Pd, c_int) -> *mut Mw>,
    pub(in crate::kernel) bind_mw:
        Option<unsafe extern "C" fn(*mut Qp, *mut Mw, *mut MwBind) -> c_int>,
    pub(in crate::kernel) dealloc_mw: Option<unsafe extern "C" fn(*mut Mw) -> c_int>,
    _create_cq: *const c_void,
    pub(in crate::kernel) poll_cq: Option<unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int>,
    pub(in crate::kernel) req_notify_cq: Option<unsafe extern "C" fn(*mut Cq, c_int) -> c_int>,
    _before_post_srq: [*const c_void; 7],
    pub(in crate::kernel) post_srq_recv:
        Option<unsafe extern "C" fn(*mut Srq, *mut RecvWr, *mut *mut RecvWr) -> c_int>,
    _before_post: [*const c_void; 4],
    pub(in crate::kernel) post_send:
        Option<unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int>,
    pub(in crate::kernel) post_recv:
        Option<unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> c_int>,
    _after: [*const c_void; 5],
}

/// `struct ibv_mr`.
#[repr(C)]
pub(in crate::kernel) struct Mr {
    _context: *mut Context,
    _pd: *mut Pd,
    _addr: *mut c_void,
    _length: usize,
    _handle: u32,
    pub(in crate::kernel) lkey: u32,
    pub(in crate::kernel) rkey: u32,
}

/// Bits of `enum ibv_rereg_mr_flags`.
pub(in crate::kernel) const REREG_TRANSLATION: c_int = 1;
/// As above.
pub(in crate::kernel) const REREG_PD: c_int = 1 << 1;
/// As above.
pub(in crate::kernel) const REREG_ACCESS: c_int = 1 << 2;

/// `struct ibv_mw`.
#[repr(C)]
pub(in crate::kernel) struct Mw {
    _context: *mut Context,
    _pd: *mut Pd,
    pub(in crate::kernel) rkey: u32,
    _handle: u32,
    _mw_type: c_int,
}

/// `struct ibv_mw_bind_info`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(in crate::kernel) struct MwBindInfo {
    pub(in crate::kernel) mr: *mut Mr,
    pub(in crate::kernel) addr: u64,
    pub(in crate::kernel) length: u64,
    pub(in crate::kernel) access: c_uint,
}

/// `struct ibv_mw_bind`.
#[repr(C)]
pub(in crate::kernel) struct MwBind {
    pub(in crate::kernel) wr_id: u64,
    pub(in crate::kernel) send_flags: c_uint,
    pub(in crate::kernel) info: MwBindInfo,
}

/// `struct ibv_comp_channel`.
#[repr(C)]
pub(in crate::kernel) struct CompChannel {
    _context: *mut Context,
    pub(in crate::kernel) fd: c_int,
    _refcnt: c_int,
}

/// `struct ibv_cq`, up to the last member that is read.
#[repr(C)]
pub(in crate::kernel) struct Cq {
    pub(in crate::kernel) context: *mut Context,
    _channel: *mut CompChannel,
    pub(in crate::kernel) cq_context: *mut c_void,
    pub(in crate::kernel) handle: u32,
    pub(in crate::kernel) cqe: c_int,
}

/// `struct ibv_srq`, up to the last member that is read.
#[repr(C)]
pub(in crate::kernel) struct Srq {
    pub(in crate::kernel) context: *mut Context,
    _srq_context: *mut c_void,
    _pd: *mut Pd,
    pub(in crate::kernel) handle: u32,
}

/// `struct ibv_srq_attr`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(in crate::kernel) struct SrqAttr {
    pub(in crate::kernel) max_wr: u32,
    pub(in crate::kernel) max_sge: u32,
    pub(in crate::kernel) srq_limit: u32,
}

/// `struct ibv_srq_init_attr`.
#[repr(C)]
pub(in crate::kernel) struct SrqInitAttr {
    pub(in crate::kernel) srq_context: *mut c_void,
    pub(in crate::kernel) attr: SrqAttr,
}

/// Bits of `enum ibv_srq_attr_mask`.
pub(in crate::kernel) const SRQ_MAX_WR: c_int = 1;
/// As above.
pub(in crate::kernel) const SRQ_LIMIT: c_int = 1 << 1;

/// `struct ibv_qp`, up to the last member that is read.
#[repr(C)]
pub(in crate::kernel) struct Qp {
    pub(in crate::kernel) context: *mut Context,
    _qp_context: *mut c_void,
    _pd: *mut Pd,
    _send_cq: *mut Cq,
    _recv_cq: *mut Cq,
    _srq: *mut Srq,
    _handle: u32,
    pub(in crate::kernel) qp_num: u32,
}

/// `struct ibv_device_attr`.
#[repr(C)]
pub(in crate::kernel) struct DeviceAttr {
    pub(in crate::kernel) fw_ver: [c_char; 64],
    /// Big-endian, as is the next member.
    pub(in crate::kernel) node_guid: u64,
    _sys_image_guid: u64,
    pub(in crate::kernel) max_mr_size: u64,
    _page_size_cap: u64,
    pub(in crate::kernel) vendor_id: u32,
    pub(in crate::kernel) vendor_part_id: u32,
    pub(in crate::kernel) hw_ver: u32,
    pub(in crate::kernel) max_qp: c_int,
    pub(in crate::kernel) max_qp_wr: c_int,
    pub(in crate::kernel) device_cap_flags: c_uint,
    pub(in crate::kernel) max_sge: c_int,
    _max_sge_rd: c_int,
    pub(in crate::kernel) max_cq: c_int,
    pub(in crate::kernel) max_cqe: c_int,
    pub(in crate::kernel) max_mr: c_int,
    _max_pd: c_int,
    pub(in crate::kernel) max_qp_rd_atom: c_int,
    _max_ee_rd_atom: c_int,
    _max_res_rd_atom: c_int,
    pub(in crate::kernel) max_qp_init_rd_atom: c_int,
    _max_ee_init_rd_atom: c_int,
    pub(in crate::kernel) atomic_cap: c_int,
    _max_ee: [c_int; 2],
    pub(in crate::kernel) max_mw: c_int,
    _unused: [c_int; 8],
    pub(in crate::kernel) max_srq: c_int,
    pub(in crate::kernel) max_srq_wr: c_int,
    pub(in crate::kernel) max_srq_sge: c_int,
    _max_pkeys: u16,
    _local_ca_ack_delay: u8,
    pub(in crate::kernel) phys_port_cnt: u8,
    /// Room for a newer library's longer structure.
    _reserve: [u64; 16],
}

/// Bits of `enum ibv_device_cap_flags` for memory windows.
pub(in crate::kernel) mod cap {
    use std::ffi::c_uint;

    pub(in crate::kernel) const MEM_WINDOW: c_uint = 1 << 17;
    pub(in crate::kernel) const MEM_WINDOW_TYPE_2A: c_uint = 1 << 23;
    pub(in crate::kernel) const MEM_WINDOW_TYPE_2B: c_uint = 1 << 24;
}

/// `struct ibv_port_attr`.
#[repr(C)]
pub(in crate::kernel) struct PortAttr {
    pub(in crate::kernel) state: c_int,
    pub(in crate::kernel) max_mtu: c_int,
    pub(in crate::kernel) active_mtu: c_int,
    _gid_tbl_len: c_int,
    _port_cap_flags: u32,
    pub(in crate::kernel) max_msg_sz: u32,
    _counters: [u32; 2],
    _lids: [u16; 3],
    _subnet: [u8; 5],
    pub(in crate::kernel) active_width: u8,
    pub(in crate::kernel) active_speed: u8,
    _phys_state: u8,
    pub(in crate::kernel) link_layer: u8,
    _flags: u8,
    _port_cap_flags2: u16,
    /// Room for a newer library's longer structure.
    _reserve: [u64; 16],
}

/// `struct ibv_qp_cap`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(in crate::kernel) struct QpCap {
    pub(in crate::kernel) max_send_wr: u32,
    pub(in crate::kernel) max_recv_wr: u32,
    pub(in crate::kernel) max_send_sge: u32,
    pub(in crate::kernel) max_recv_sge: u32,
    pub(in crate::kernel) max_inline_data: u32,
}

/// `struct ibv_qp_init_attr`.
#[repr(C)]
pub(in crate::kernel) struct QpInitAttr {
    pub(in crate::kernel) qp_context: *mut c_void,
    pub(in crate::kernel) send_cq: *mut Cq,
    pub(in crate::kernel) recv_cq: *mut Cq,
    pub(in crate::kernel) srq: *mut Srq,
    pub(in crate::kernel) cap: QpCap,
    pub(in crate::kernel) qp_type: c_int,
    pub(in crate::kernel) sq_sig_all: c_int,
}

/// `struct ibv_ah`, of which nothing is read.
#[repr(C)]
pub(in crate::kernel) struct Ah {
    _context: *mut Context,
}

/// `struct ibv_global_route`.
#[repr(C, align(8))]
#[derive(Clone, Copy, Default)]
pub(in crate::kernel) struct GlobalRoute {
    pub(in crate::kernel) dgid: [u8; 16],
    pub(in crate::kernel) flow_label: u32,
    pub(in crate::kernel) sgid_index: u8,
    pub(in crate::kernel) hop_limit: u8,
    pub(in crate::kernel) traffic_class: u8,
}

/// `struct ibv_ah_attr`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(in crate::kernel) struct AhAttr {
    pub(in crate::kernel) grh: GlobalRoute,
    _dlid: u16,
    _sl: u8,
    _src_path_bits: u8,
    _static_rate: u8,
    pub(in crate::kernel) is_global: u8,
    pub(in crate::kernel) port_num: u8,
}

/// `struct ibv_qp_attr`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(in crate::kernel) struct QpAttr {
    pub(in crate::kernel) qp_state: c_int,
    pub(in crate::kernel) cur_qp_state: c_int,
    pub(in crate::kernel) path_mtu: c_int,
    pub(in crate::kernel) path_mig_state: c_int,
    pub(in crate::kernel) qkey: u32,
    pub(in crate::kernel) rq_psn: u32,
    pub(in crate::kernel) sq_psn: u32,
    pub(in crate::kernel) dest_qp_num: u32,
    pub(in crate::kernel) qp_access_flags: c_uint,
    pub(in crate::kernel) cap: QpCap,
    pub(in crate::kernel) ah_attr: AhAttr,
    pub(in crate::kernel) alt_ah_attr: AhAttr,
    pub(in crate::kernel) pkey_index: u16,
    pub(in crate::kernel) alt_pkey_index: u16,
    pub(in crate::kernel) en_sqd_async_notify: u8,
    _sq_draining: u8,
    pub(in crate::kernel) max_rd_atomic: u8,
    pub(in crate::kernel) max_dest_rd_atomic: u8,
    pub(in crate::kernel) min_rnr_timer: u8,
    pub(in crate::kernel) port_num: u8,
    pub(in crate::kernel) timeout: u8,
    pub(in crate::kernel) retry_cnt: u8,
    pub(in crate::kernel) rnr_retry: u8,
    pub(in crate::kernel) alt_port_num: u8,
    pub(in crate::kernel) alt_timeout: u8,
    _rate_limit: u32,
}

impl QpAttr {
    /// The attributes for this state of `enum ibv_qp_state`.
    pub(in crate::kernel) fn to(state: c_int) -> Self {
        Self { qp_state: state, ..Self::default() }
    }
}

/// Bits of `enum ibv_qp_attr_mask`.
pub(in crate::kernel) mod mask {
    use std::ffi::c_int;

    pub(in crate::kernel) const STATE: c_int = 1;
    pub(in crate::kernel) const CUR_STATE: c_int = 1 << 1;
    pub(in crate::kernel) const EN_SQD_ASYNC_NOTIFY: c_int = 1 << 2;
    pub(in crate::kernel) const ACCESS_FLAGS: c_int = 1 << 3;
    pub(in crate::kernel) const PKEY_INDEX: c_int = 1 << 4;
    pub(in crate::kernel) const PORT: c_int = 1 << 5;
    pub(in crate::kernel) const QKEY: c_int = 1 << 6;
    pub(in crate::kernel) const AV: c_int = 1 << 7;
    pub(in crate::kernel) const PATH_MTU: c_int = 1 << 8;
    pub(in crate::kernel) const TIMEOUT: c_int = 1 << 9;
    pub(in crate::kernel) const RETRY_CNT: c_int = 1 << 10;
    pub(in crate::kernel) const RNR_RETRY: c_int = 1 << 11;
    pub(in crate::kernel) const RQ_PSN: c_int = 1 << 12;
    pub(in crate::kernel) const MAX_QP_RD_ATOMIC: c_int = 1 << 13;
    pub(in crate::kernel) const ALT_PATH: c_int = 1 << 14;
    pub(in crate::kernel) const MIN_RNR_TIMER: c_int = 1 << 15;
    pub(in crate::kernel) const SQ_PSN: c_int = 1 << 16;
    pub(in crate::kernel) const MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
    pub(in crate::kernel) const PATH_MIG_STATE: c_int = 1 << 18;
    pub(in crate::kernel) const CAP: c_int = 1 << 19;
    pub(in crate::kernel) const DEST_QPN: c_int = 1 << 20;
}

/// `struct ibv_send_wr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(in crate::kernel) struct SendWr {
    pub(in crate::kernel) wr_id: u64,
    pub(in crate::kernel) next: *mut SendWr,
    pub(in crate::kernel) sg_list: *const Sge,
    pub(in crate::kernel) num_sge: c_int,
    pub(in crate::kernel) opcode: c_int,
    pub(in crate::kernel) send_flags: c_uint,
    /// Big-endian immediate data; or the key to invalidate, in host byte order.
    pub(in crate::kernel) imm_data: [u8; 4],
    pub(in crate::kernel) wr: Remote,
    /// For other transport services.
    pub(in crate::kernel) unused: u64,
    pub(in crate::kernel) bind_mw: BindMw,
}

/// The member `bind_mw` of `struct ibv_send_wr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(in crate::kernel) struct BindMw {
    pub(in crate::kernel) mw: *mut Mw,
    pub(in crate::kernel) rkey: u32,
    pub(in crate::kernel) info: MwBindInfo,
}

impl BindMw {
    /// For requests without a binding.
    pub(in crate::kernel) const NONE: Self = Self {
        mw: std::ptr::null_mut(),
        rkey: 0,
        info: MwBindInfo { mr: std::ptr::null_mut(), addr: 0, length: 0, access: 0 },
    };
}

/// The union `wr` of `struct ibv_send_wr`, as for atomics. `rdma` has its key at `compare_add`.
/// `ud` has its handle at the address, and behind it the number and the Q_Key of the queue pair.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::kernel) struct Remote {
    pub(in crate::kernel) remote_addr: u64,
    /// For an RDMA operation: the key in the first four bytes.
    pub(in crate::kernel) compare_add: u64,
    pub(in crate::kernel) swap: u64,
    pub(in crate::kernel) rkey: u32,
}

/// Flags of `enum ibv_send_flags`.
pub(in crate::kernel) mod send_flags {
    use std::ffi::c_uint;

    pub(in crate::kernel) const FENCE: c_uint = 1;
    pub(in crate::kernel) const SIGNALED: c_uint = 1 << 1;
    pub(in crate::kernel) const SOLICITED: c_uint = 1 << 2;
    pub(in crate::kernel) const INLINE: c_uint = 1 << 3;
}

/// `struct ibv_recv_wr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(in crate::kernel) struct RecvWr {
    pub(in crate::kernel) wr_id: u64,
    pub(in crate::kernel) next: *mut RecvWr,
    pub(in crate::kernel) sg_list: *const Sge,
    pub(in crate::kernel) num_sge: c_int,
}

/// `struct ibv_wc`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(in crate::kernel) struct Wc {
    pub(in crate::kernel) wr_id: u64,
    pub(in crate::kernel) status: c_int,
    pub(in crate::kernel) opcode: c_int,
    _vendor_err: u32,
    pub(in crate::kernel) byte_len: u32,
    /// Big-endian immediate data; or the invalidated key, in host byte order.
    pub(in crate::kernel) imm_data: [u8; 4],
    pub(in crate::kernel) qp_num: u32,
    pub(in crate::kernel) src_qp: u32,
    pub(in crate::kernel) wc_flags: c_uint,
    _pkey_index: u16,
    _slid: u16,
    _sl: u8,
    _dlid_path_bits: u8,
}

/// `IBV_WC_GRH`.
pub(in crate::kernel) const WC_GRH: c_uint = 1;

/// `IBV_WC_WITH_IMM`.
pub(in crate::kernel) const WC_WITH_IMM: c_uint = 1 << 1;

/// `IBV_WC_IP_CSUM_OK`. The same bit is Linux's `IB_WC_WITH_INVALIDATE`, which Soft-RoCE passes to
/// programs unchanged.
pub(in crate::kernel) const WC_IP_CSUM_OK: c_uint = 1 << 2;

/// `IBV_WC_WITH_INV`.
pub(in crate::kernel) const WC_WITH_INV: c_uint = 1 << 3;

/// `struct ibv_async_event`. The union is a pointer, or a port number in its first bytes.
#[repr(C)]
#[derive(Clone, Copy)]
pub(in crate::kernel) struct AsyncEvent {
    pub(in crate::kernel) element: *mut c_void,
    pub(in crate::kernel) event_type: c_int,
}

macro_rules! assert_layout {
    ($($name:ty: $size:literal { $($field:ident $offset:literal)* })*) => {
        const _: () = {
            $(
                assert!(std::mem::size_of::<$name>() == $size, concat!(stringify!($name), " has another size"));
                $(assert!(
                    std::mem::offset_of!($name, $field) == $offset,
                    concat!(stringify!($name), ".", stringify!($field), " is elsewhere"),
                );)*
            )*
        };
    };
}

pub(super) use assert_layout;

// For 64-bit systems. Structures that are only read have no size of their own.
#[cfg(target_pointer_width = "64")]
assert_layout! {
    Sge: 16 { addr 0 len 8 lkey 12 }
    ContextOps: 256 { alloc_mw 56 bind_mw 64 dealloc_mw 72 poll_cq 88 req_notify_cq 96 post_srq_recv 160 post_send 200 post_recv 208 }
    Context: 328 { ops 8 cmd_fd 264 async_fd 268 abi_compat 320 }
    Mr: 48 { lkey 36 rkey 40 }
    Mw: 32 { rkey 16 }
    MwBind: 48 { send_flags 8 info 16 }
    MwBindInfo: 32 { addr 8 length 16 access 24 }
    CompChannel: 16 { fd 8 }
    Cq: 32 { context 0 cq_context 16 handle 24 cqe 28 }
    Srq: 32 { context 0 handle 24 }
    SrqInitAttr: 24 { attr 8 }
    Qp: 56 { context 0 qp_num 52 }
    DeviceAttr: 360 { node_guid 64 max_mr_size 80 max_qp 108 atomic_cap 164 max_mw 176 max_srq 212 phys_port_cnt 227 _reserve 232 }
    PortAttr: 184 { max_msg_sz 20 active_width 43 active_speed 44 link_layer 46 _port_cap_flags2 48 }
    QpInitAttr: 64 { cap 32 qp_type 52 sq_sig_all 56 }
    GlobalRoute: 24 { flow_label 16 sgid_index 20 }
    AhAttr: 32 { is_global 29 port_num 30 }
    QpAttr: 144 { qkey 16 rq_psn 20 sq_psn 24 dest_qp_num 28 cap 36 ah_attr 56 pkey_index 120 _rate_limit 136 }
    SendWr: 128 { next 8 sg_list 16 num_sge 24 opcode 28 send_flags 32 imm_data 36 wr 40 unused 72 bind_mw 80 }
    BindMw: 48 { rkey 8 info 16 }
    RecvWr: 32 { next 8 sg_list 16 num_sge 24 }
    Wc: 48 { status 8 opcode 12 byte_len 20 imm_data 24 qp_num 28 src_qp 32 wc_flags 36 }
    AsyncEvent: 16 { event_type 8 }
}
