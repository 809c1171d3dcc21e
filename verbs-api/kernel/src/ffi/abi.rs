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
pub(crate) struct Device {
    _opaque: [u8; 0],
}

/// `struct ibv_pd`; only ever behind a pointer.
#[repr(C)]
pub(crate) struct Pd {
    _opaque: [u8; 0],
}

/// `struct ibv_context`, up to the last member that is read.
#[repr(C)]
pub(crate) struct Context {
    pub(crate) device: *mut Device,
    pub(crate) ops: ContextOps,
    pub(crate) cmd_fd: c_int,
    pub(crate) async_fd: c_int,
    _num_comp_vectors: c_int,
    _mutex: [u64; 5],
    /// All ones if this is the end of a `struct verbs_context`.
    pub(crate) abi_compat: *const c_void,
}

/// `struct ibv_context_ops`: the functions that the header's inline functions call.
#[repr(C)]
pub(crate) struct ContextOps {
    _before_mw: [*const c_void; 7],
    pub(crate) alloc_mw: Option<unsafe extern "C" fn(*mut Pd, c_int) -> *mut Mw>,
    pub(crate) bind_mw: Option<unsafe extern "C" fn(*mut Qp, *mut Mw, *mut MwBind) -> c_int>,
    pub(crate) dealloc_mw: Option<unsafe extern "C" fn(*mut Mw) -> c_int>,
    _create_cq: *const c_void,
    pub(crate) poll_cq: Option<unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int>,
    pub(crate) req_notify_cq: Option<unsafe extern "C" fn(*mut Cq, c_int) -> c_int>,
    _before_post_srq: [*const c_void; 7],
    pub(crate) post_srq_recv:
        Option<unsafe extern "C" fn(*mut Srq, *mut RecvWr, *mut *mut RecvWr) -> c_int>,
    _before_post: [*const c_void; 4],
    pub(crate) post_send:
        Option<unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int>,
    pub(crate) post_recv:
        Option<unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> c_int>,
    _after: [*const c_void; 5],
}

/// `struct ibv_mr`.
#[repr(C)]
pub(crate) struct Mr {
    _context: *mut Context,
    _pd: *mut Pd,
    _addr: *mut c_void,
    _length: usize,
    _handle: u32,
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
}

/// Bits of `enum ibv_rereg_mr_flags`.
pub(crate) const REREG_TRANSLATION: c_int = 1;
/// As above.
pub(crate) const REREG_PD: c_int = 1 << 1;
/// As above.
pub(crate) const REREG_ACCESS: c_int = 1 << 2;

/// `struct ibv_mw`.
#[repr(C)]
pub(crate) struct Mw {
    _context: *mut Context,
    _pd: *mut Pd,
    pub(crate) rkey: u32,
    _handle: u32,
    _mw_type: c_int,
}

/// `struct ibv_mw_bind_info`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct MwBindInfo {
    pub(crate) mr: *mut Mr,
    pub(crate) addr: u64,
    pub(crate) length: u64,
    pub(crate) access: c_uint,
}

/// `struct ibv_mw_bind`.
#[repr(C)]
pub(crate) struct MwBind {
    pub(crate) wr_id: u64,
    pub(crate) send_flags: c_uint,
    pub(crate) info: MwBindInfo,
}

/// `struct ibv_comp_channel`.
#[repr(C)]
pub(crate) struct CompChannel {
    _context: *mut Context,
    pub(crate) fd: c_int,
    _refcnt: c_int,
}

/// `struct ibv_cq`, up to the last member that is read.
#[repr(C)]
pub(crate) struct Cq {
    pub(crate) context: *mut Context,
    _channel: *mut CompChannel,
    pub(crate) cq_context: *mut c_void,
    pub(crate) handle: u32,
    pub(crate) cqe: c_int,
}

/// `struct ibv_srq`, up to the last member that is read.
#[repr(C)]
pub(crate) struct Srq {
    pub(crate) context: *mut Context,
    _srq_context: *mut c_void,
    _pd: *mut Pd,
    pub(crate) handle: u32,
}

/// `struct ibv_srq_attr`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct SrqAttr {
    pub(crate) max_wr: u32,
    pub(crate) max_sge: u32,
    pub(crate) srq_limit: u32,
}

/// `struct ibv_srq_init_attr`.
#[repr(C)]
pub(crate) struct SrqInitAttr {
    pub(crate) srq_context: *mut c_void,
    pub(crate) attr: SrqAttr,
}

/// Bits of `enum ibv_srq_attr_mask`.
pub(crate) const SRQ_MAX_WR: c_int = 1;
/// As above.
pub(crate) const SRQ_LIMIT: c_int = 1 << 1;

/// `struct ibv_qp`, up to the last member that is read.
#[repr(C)]
pub(crate) struct Qp {
    pub(crate) context: *mut Context,
    _qp_context: *mut c_void,
    _pd: *mut Pd,
    _send_cq: *mut Cq,
    _recv_cq: *mut Cq,
    _srq: *mut Srq,
    _handle: u32,
    pub(crate) qp_num: u32,
}

/// `struct ibv_device_attr`.
#[repr(C)]
pub(crate) struct DeviceAttr {
    pub(crate) fw_ver: [c_char; 64],
    /// Big-endian, as is the next member.
    pub(crate) node_guid: u64,
    _sys_image_guid: u64,
    pub(crate) max_mr_size: u64,
    _page_size_cap: u64,
    pub(crate) vendor_id: u32,
    pub(crate) vendor_part_id: u32,
    pub(crate) hw_ver: u32,
    pub(crate) max_qp: c_int,
    pub(crate) max_qp_wr: c_int,
    pub(crate) device_cap_flags: c_uint,
    pub(crate) max_sge: c_int,
    _max_sge_rd: c_int,
    pub(crate) max_cq: c_int,
    pub(crate) max_cqe: c_int,
    pub(crate) max_mr: c_int,
    _max_pd: c_int,
    pub(crate) max_qp_rd_atom: c_int,
    _max_ee_rd_atom: c_int,
    _max_res_rd_atom: c_int,
    pub(crate) max_qp_init_rd_atom: c_int,
    _max_ee_init_rd_atom: c_int,
    pub(crate) atomic_cap: c_int,
    _max_ee: [c_int; 2],
    pub(crate) max_mw: c_int,
    _unused: [c_int; 8],
    pub(crate) max_srq: c_int,
    pub(crate) max_srq_wr: c_int,
    pub(crate) max_srq_sge: c_int,
    _max_pkeys: u16,
    _local_ca_ack_delay: u8,
    pub(crate) phys_port_cnt: u8,
    /// Room for a newer library's longer structure.
    _reserve: [u64; 16],
}

/// Bits of `enum ibv_device_cap_flags` for memory windows.
pub(crate) mod cap {
    use std::ffi::c_uint;

    pub(crate) const MEM_WINDOW: c_uint = 1 << 17;
    pub(crate) const MEM_WINDOW_TYPE_2A: c_uint = 1 << 23;
    pub(crate) const MEM_WINDOW_TYPE_2B: c_uint = 1 << 24;
}

/// `struct ibv_port_attr`.
#[repr(C)]
pub(crate) struct PortAttr {
    pub(crate) state: c_int,
    pub(crate) max_mtu: c_int,
    pub(crate) active_mtu: c_int,
    _gid_tbl_len: c_int,
    _port_cap_flags: u32,
    pub(crate) max_msg_sz: u32,
    _counters: [u32; 2],
    _lids: [u16; 3],
    _subnet: [u8; 5],
    pub(crate) active_width: u8,
    pub(crate) active_speed: u8,
    _phys_state: u8,
    pub(crate) link_layer: u8,
    _flags: u8,
    _port_cap_flags2: u16,
    /// Room for a newer library's longer structure.
    _reserve: [u64; 16],
}

/// `struct ibv_qp_cap`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct QpCap {
    pub(crate) max_send_wr: u32,
    pub(crate) max_recv_wr: u32,
    pub(crate) max_send_sge: u32,
    pub(crate) max_recv_sge: u32,
    pub(crate) max_inline_data: u32,
}

/// `struct ibv_qp_init_attr`.
#[repr(C)]
pub(crate) struct QpInitAttr {
    pub(crate) qp_context: *mut c_void,
    pub(crate) send_cq: *mut Cq,
    pub(crate) recv_cq: *mut Cq,
    pub(crate) srq: *mut Srq,
    pub(crate) cap: QpCap,
    pub(crate) qp_type: c_int,
    pub(crate) sq_sig_all: c_int,
}

/// `struct ibv_ah`, of which nothing is read.
#[repr(C)]
pub(crate) struct Ah {
    _context: *mut Context,
}

/// `struct ibv_global_route`.
#[repr(C, align(8))]
#[derive(Clone, Copy, Default)]
pub(crate) struct GlobalRoute {
    pub(crate) dgid: [u8; 16],
    pub(crate) flow_label: u32,
    pub(crate) sgid_index: u8,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
}

/// `struct ibv_ah_attr`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct AhAttr {
    pub(crate) grh: GlobalRoute,
    _dlid: u16,
    _sl: u8,
    _src_path_bits: u8,
    _static_rate: u8,
    pub(crate) is_global: u8,
    pub(crate) port_num: u8,
}

/// `struct ibv_qp_attr`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct QpAttr {
    pub(crate) qp_state: c_int,
    pub(crate) cur_qp_state: c_int,
    pub(crate) path_mtu: c_int,
    pub(crate) path_mig_state: c_int,
    pub(crate) qkey: u32,
    pub(crate) rq_psn: u32,
    pub(crate) sq_psn: u32,
    pub(crate) dest_qp_num: u32,
    pub(crate) qp_access_flags: c_uint,
    pub(crate) cap: QpCap,
    pub(crate) ah_attr: AhAttr,
    pub(crate) alt_ah_attr: AhAttr,
    pub(crate) pkey_index: u16,
    pub(crate) alt_pkey_index: u16,
    pub(crate) en_sqd_async_notify: u8,
    _sq_draining: u8,
    pub(crate) max_rd_atomic: u8,
    pub(crate) max_dest_rd_atomic: u8,
    pub(crate) min_rnr_timer: u8,
    pub(crate) port_num: u8,
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) alt_port_num: u8,
    pub(crate) alt_timeout: u8,
    _rate_limit: u32,
}

impl QpAttr {
    /// The attributes for this state of `enum ibv_qp_state`.
    pub(crate) fn to(state: c_int) -> Self {
        Self { qp_state: state, ..Self::default() }
    }
}

/// Bits of `enum ibv_qp_attr_mask`.
pub(crate) mod mask {
    use std::ffi::c_int;

    pub(crate) const STATE: c_int = 1;
    pub(crate) const CUR_STATE: c_int = 1 << 1;
    pub(crate) const EN_SQD_ASYNC_NOTIFY: c_int = 1 << 2;
    pub(crate) const ACCESS_FLAGS: c_int = 1 << 3;
    pub(crate) const PKEY_INDEX: c_int = 1 << 4;
    pub(crate) const PORT: c_int = 1 << 5;
    pub(crate) const QKEY: c_int = 1 << 6;
    pub(crate) const AV: c_int = 1 << 7;
    pub(crate) const PATH_MTU: c_int = 1 << 8;
    pub(crate) const TIMEOUT: c_int = 1 << 9;
    pub(crate) const RETRY_CNT: c_int = 1 << 10;
    pub(crate) const RNR_RETRY: c_int = 1 << 11;
    pub(crate) const RQ_PSN: c_int = 1 << 12;
    pub(crate) const MAX_QP_RD_ATOMIC: c_int = 1 << 13;
    pub(crate) const ALT_PATH: c_int = 1 << 14;
    pub(crate) const MIN_RNR_TIMER: c_int = 1 << 15;
    pub(crate) const SQ_PSN: c_int = 1 << 16;
    pub(crate) const MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
    pub(crate) const PATH_MIG_STATE: c_int = 1 << 18;
    pub(crate) const CAP: c_int = 1 << 19;
    pub(crate) const DEST_QPN: c_int = 1 << 20;
}

/// `struct ibv_send_wr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct SendWr {
    pub(crate) wr_id: u64,
    pub(crate) next: *mut SendWr,
    pub(crate) sg_list: *const Sge,
    pub(crate) num_sge: c_int,
    pub(crate) opcode: c_int,
    pub(crate) send_flags: c_uint,
    /// Big-endian immediate data; or the key to invalidate, in host byte order.
    pub(crate) imm_data: [u8; 4],
    pub(crate) wr: Remote,
    /// For other transport services.
    pub(crate) unused: u64,
    pub(crate) bind_mw: BindMw,
}

/// The member `bind_mw` of `struct ibv_send_wr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct BindMw {
    pub(crate) mw: *mut Mw,
    pub(crate) rkey: u32,
    pub(crate) info: MwBindInfo,
}

impl BindMw {
    /// For requests without a binding.
    pub(crate) const NONE: Self = Self {
        mw: std::ptr::null_mut(),
        rkey: 0,
        info: MwBindInfo { mr: std::ptr::null_mut(), addr: 0, length: 0, access: 0 },
    };
}

/// The union `wr` of `struct ibv_send_wr`, as for atomics. `rdma` has its key at `compare_add`.
/// `ud` has its handle at the address, and behind it the number and the Q_Key of the queue pair.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Remote {
    pub(crate) remote_addr: u64,
    /// For an RDMA operation: the key in the first four bytes.
    pub(crate) compare_add: u64,
    pub(crate) swap: u64,
    pub(crate) rkey: u32,
}

/// Flags of `enum ibv_send_flags`.
pub(crate) mod send_flags {
    use std::ffi::c_uint;

    pub(crate) const FENCE: c_uint = 1;
    pub(crate) const SIGNALED: c_uint = 1 << 1;
    pub(crate) const SOLICITED: c_uint = 1 << 2;
    pub(crate) const INLINE: c_uint = 1 << 3;
}

/// `struct ibv_recv_wr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct RecvWr {
    pub(crate) wr_id: u64,
    pub(crate) next: *mut RecvWr,
    pub(crate) sg_list: *const Sge,
    pub(crate) num_sge: c_int,
}

/// `struct ibv_wc`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Wc {
    pub(crate) wr_id: u64,
    pub(crate) status: c_int,
    pub(crate) opcode: c_int,
    _vendor_err: u32,
    pub(crate) byte_len: u32,
    /// Big-endian immediate data; or the invalidated key, in host byte order.
    pub(crate) imm_data: [u8; 4],
    pub(crate) qp_num: u32,
    pub(crate) src_qp: u32,
    pub(crate) wc_flags: c_uint,
    _pkey_index: u16,
    _slid: u16,
    _sl: u8,
    _dlid_path_bits: u8,
}

/// `IBV_WC_GRH`.
pub(crate) const WC_GRH: c_uint = 1;

/// `IBV_WC_WITH_IMM`.
pub(crate) const WC_WITH_IMM: c_uint = 1 << 1;

/// `IBV_WC_IP_CSUM_OK`. The same bit is Linux's `IB_WC_WITH_INVALIDATE`, which Soft-RoCE passes to
/// programs unchanged.
pub(crate) const WC_IP_CSUM_OK: c_uint = 1 << 2;

/// `IBV_WC_WITH_INV`.
pub(crate) const WC_WITH_INV: c_uint = 1 << 3;

/// `struct ibv_async_event`. The union is a pointer, or a port number in its first bytes.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AsyncEvent {
    pub(crate) element: *mut c_void,
    pub(crate) event_type: c_int,
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
