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
pub(in crate::hw) struct Device {
    _opaque: [u8; 0],
}

/// `struct ibv_pd`; only ever behind a pointer.
#[repr(C)]
pub(in crate::hw) struct Pd {
    _opaque: [u8; 0],
}

/// `struct ibv_context`, up to the last member that is read.
#[repr(C)]
pub(in crate::hw) struct Context {
    pub(in crate::hw) device: *mut Device,
    pub(in crate::hw) ops: ContextOps,
    pub(in crate::hw) cmd_fd: c_int,
    pub(in crate::hw) async_fd: c_int,
    _num_comp_vectors: c_int,
    _mutex: [u64; 5],
    /// All ones if this is the end of a `struct verbs_context`.
    pub(in crate::hw) abi_compat: *const c_void,
}

/// `struct ibv_context_ops`: the functions that the header's inline functions call.
#[repr(C)]
pub(in crate::hw) struct ContextOps {
    _before_mw: [*const c_void; 7],
    pub(in crate::hw) alloc_mw: Option<unsafe extern "C" fn(*mut Pd, c_int) -> *mut Mw>,
    pub(in crate::hw) bind_mw: Option<unsafe extern "C" fn(*mut Qp, *mut Mw, *mut MwBind) -> c_int>,
    pub(in crate::hw) dealloc_mw: Option<unsafe extern "C" fn(*mut Mw) -> c_int>,
    _create_cq: *const c_void,
    pub(in crate::hw) poll_cq: Option<unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int>,
    pub(in crate::hw) req_notify_cq: Option<unsafe extern "C" fn(*mut Cq, c_int) -> c_int>,
    _before_post_srq: [*const c_void; 7],
    pub(in crate::hw) post_srq_recv:
        Option<unsafe extern "C" fn(*mut Srq, *mut RecvWr, *mut *mut RecvWr) -> c_int>,
    _before_post: [*const c_void; 4],
    pub(in crate::hw) post_send:
        Option<unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int>,
    pub(in crate::hw) post_recv:
        Option<unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> c_int>,
    _after: [*const c_void; 5],
}

/// `struct ibv_mr`.
#[repr(C)]
pub(in crate::hw) struct Mr {
    _context: *mut Context,
    _pd: *mut Pd,
    _addr: *mut c_void,
    _length: usize,
    _handle: u32,
    pub(in crate::hw) lkey: u32,
    pub(in crate::hw) rkey: u32,
}

/// Bits of `enum ibv_rereg_mr_flags`.
pub(in crate::hw) const REREG_TRANSLATION: c_int = 1;
/// As above.
pub(in crate::hw) const REREG_PD: c_int = 1 << 1;
/// As above.
pub(in crate::hw) const REREG_ACCESS: c_int = 1 << 2;

/// `struct ibv_mw`.
#[repr(C)]
pub(in crate::hw) struct Mw {
    _context: *mut Context,
    _pd: *mut Pd,
    pub(in crate::hw) rkey: u32,
    _handle: u32,
    _mw_type: c_int,
}

/// `struct ibv_mw_bind_info`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(in crate::hw) struct MwBindInfo {
    pub(in crate::hw) mr: *mut Mr,
    pub(in crate::hw) addr: u64,
    pub(in crate::hw) length: u64,
    pub(in crate::hw) access: c_uint,
}

/// `struct ibv_mw_bind`.
#[repr(C)]
pub(in crate::hw) struct MwBind {
    pub(in crate::hw) wr_id: u64,
    pub(in crate::hw) send_flags: c_uint,
    pub(in crate::hw) info: MwBindInfo,
}

/// `struct ibv_comp_channel`.
#[repr(C)]
pub(in crate::hw) struct CompChannel {
    _context: *mut Context,
    pub(in crate::hw) fd: c_int,
    _refcnt: c_int,
}

/// `struct ibv_cq`, up to the last member that is read.
#[repr(C)]
pub(in crate::hw) struct Cq {
    pub(in crate::hw) context: *mut Context,
    _channel: *mut CompChannel,
    pub(in crate::hw) cq_context: *mut c_void,
    pub(in crate::hw) handle: u32,
    pub(in crate::hw) cqe: c_int,
}

/// `struct ibv_srq`, up to the last member that is read.
#[repr(C)]
pub(in crate::hw) struct Srq {
    pub(in crate::hw) context: *mut Context,
    _srq_context: *mut c_void,
    _pd: *mut Pd,
    pub(in crate::hw) handle: u32,
}

/// `struct ibv_srq_attr`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(in crate::hw) struct SrqAttr {
    pub(in crate::hw) max_wr: u32,
    pub(in crate::hw) max_sge: u32,
    pub(in crate::hw) srq_limit: u32,
}

/// `struct ibv_srq_init_attr`.
#[repr(C)]
pub(in crate::hw) struct SrqInitAttr {
    pub(in crate::hw) srq_context: *mut c_void,
    pub(in crate::hw) attr: SrqAttr,
}

/// Bits of `enum ibv_srq_attr_mask`.
pub(in crate::hw) const SRQ_MAX_WR: c_int = 1;
/// As above.
pub(in crate::hw) const SRQ_LIMIT: c_int = 1 << 1;

/// `struct ibv_qp`, up to the last member that is read.
#[repr(C)]
pub(in crate::hw) struct Qp {
    pub(in crate::hw) context: *mut Context,
    _qp_context: *mut c_void,
    _pd: *mut Pd,
    _send_cq: *mut Cq,
    _recv_cq: *mut Cq,
    _srq: *mut Srq,
    _handle: u32,
    pub(in crate::hw) qp_num: u32,
}

/// `struct ibv_device_attr`.
#[repr(C)]
pub(in crate::hw) struct DeviceAttr {
    pub(in crate::hw) fw_ver: [c_char; 64],
    /// Big-endian, as is the next member.
    pub(in crate::hw) node_guid: u64,
    _sys_image_guid: u64,
    pub(in crate::hw) max_mr_size: u64,
    _page_size_cap: u64,
    pub(in crate::hw) vendor_id: u32,
    pub(in crate::hw) vendor_part_id: u32,
    pub(in crate::hw) hw_ver: u32,
    pub(in crate::hw) max_qp: c_int,
    pub(in crate::hw) max_qp_wr: c_int,
    pub(in crate::hw) device_cap_flags: c_uint,
    pub(in crate::hw) max_sge: c_int,
    _max_sge_rd: c_int,
    pub(in crate::hw) max_cq: c_int,
    pub(in crate::hw) max_cqe: c_int,
    pub(in crate::hw) max_mr: c_int,
    _max_pd: c_int,
    pub(in crate::hw) max_qp_rd_atom: c_int,
    _max_ee_rd_atom: c_int,
    _max_res_rd_atom: c_int,
    pub(in crate::hw) max_qp_init_rd_atom: c_int,
    _max_ee_init_rd_atom: c_int,
    pub(in crate::hw) atomic_cap: c_int,
    _max_ee: [c_int; 2],
    pub(in crate::hw) max_mw: c_int,
    _unused: [c_int; 8],
    pub(in crate::hw) max_srq: c_int,
    pub(in crate::hw) max_srq_wr: c_int,
    pub(in crate::hw) max_srq_sge: c_int,
    _max_pkeys: u16,
    _local_ca_ack_delay: u8,
    pub(in crate::hw) phys_port_cnt: u8,
    /// Room for a newer library's longer structure.
    _reserve: [u64; 16],
}

/// Bits of `enum ibv_device_cap_flags` for memory windows.
pub(in crate::hw) mod cap {
    use std::ffi::c_uint;

    pub(in crate::hw) const MEM_WINDOW: c_uint = 1 << 17;
    pub(in crate::hw) const MEM_WINDOW_TYPE_2A: c_uint = 1 << 23;
    pub(in crate::hw) const MEM_WINDOW_TYPE_2B: c_uint = 1 << 24;
}

/// `struct ibv_port_attr`.
#[repr(C)]
pub(in crate::hw) struct PortAttr {
    pub(in crate::hw) state: c_int,
    pub(in crate::hw) max_mtu: c_int,
    pub(in crate::hw) active_mtu: c_int,
    _gid_tbl_len: c_int,
    _port_cap_flags: u32,
    pub(in crate::hw) max_msg_sz: u32,
    _counters: [u32; 2],
    _lids: [u16; 3],
    _subnet: [u8; 5],
    pub(in crate::hw) active_width: u8,
    pub(in crate::hw) active_speed: u8,
    _phys_state: u8,
    pub(in crate::hw) link_layer: u8,
    _flags: u8,
    _port_cap_flags2: u16,
    /// Room for a newer library's longer structure.
    _reserve: [u64; 16],
}

/// `struct ibv_qp_cap`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(in crate::hw) struct QpCap {
    pub(in crate::hw) max_send_wr: u32,
    pub(in crate::hw) max_recv_wr: u32,
    pub(in crate::hw) max_send_sge: u32,
    pub(in crate::hw) max_recv_sge: u32,
    pub(in crate::hw) max_inline_data: u32,
}

/// `struct ibv_qp_init_attr`.
#[repr(C)]
pub(in crate::hw) struct QpInitAttr {
    pub(in crate::hw) qp_context: *mut c_void,
    pub(in crate::hw) send_cq: *mut Cq,
    pub(in crate::hw) recv_cq: *mut Cq,
    pub(in crate::hw) srq: *mut Srq,
    pub(in crate::hw) cap: QpCap,
    pub(in crate::hw) qp_type: c_int,
    pub(in crate::hw) sq_sig_all: c_int,
}

/// `struct ibv_ah`, of which nothing is read.
#[repr(C)]
pub(in crate::hw) struct Ah {
    _context: *mut Context,
}

/// `struct ibv_global_route`.
#[repr(C, align(8))]
#[derive(Clone, Copy, Default)]
pub(in crate::hw) struct GlobalRoute {
    pub(in crate::hw) dgid: [u8; 16],
    pub(in crate::hw) flow_label: u32,
    pub(in crate::hw) sgid_index: u8,
    pub(in crate::hw) hop_limit: u8,
    pub(in crate::hw) traffic_class: u8,
}

/// `struct ibv_ah_attr`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(in crate::hw) struct AhAttr {
    pub(in crate::hw) grh: GlobalRoute,
    _dlid: u16,
    _sl: u8,
    _src_path_bits: u8,
    _static_rate: u8,
    pub(in crate::hw) is_global: u8,
    pub(in crate::hw) port_num: u8,
}

/// `struct ibv_qp_attr`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(in crate::hw) struct QpAttr {
    pub(in crate::hw) qp_state: c_int,
    _cur_qp_state: c_int,
    pub(in crate::hw) path_mtu: c_int,
    _path_mig_state: c_int,
    pub(in crate::hw) qkey: u32,
    pub(in crate::hw) rq_psn: u32,
    pub(in crate::hw) sq_psn: u32,
    pub(in crate::hw) dest_qp_num: u32,
    pub(in crate::hw) qp_access_flags: c_uint,
    pub(in crate::hw) cap: QpCap,
    pub(in crate::hw) ah_attr: AhAttr,
    _alt_ah_attr: AhAttr,
    pub(in crate::hw) pkey_index: u16,
    _alt_pkey_index: u16,
    pub(in crate::hw) en_sqd_async_notify: u8,
    _sq_draining: u8,
    pub(in crate::hw) max_rd_atomic: u8,
    pub(in crate::hw) max_dest_rd_atomic: u8,
    pub(in crate::hw) min_rnr_timer: u8,
    pub(in crate::hw) port_num: u8,
    pub(in crate::hw) timeout: u8,
    pub(in crate::hw) retry_cnt: u8,
    pub(in crate::hw) rnr_retry: u8,
    _alt_port_num: u8,
    _alt_timeout: u8,
    _rate_limit: u32,
}

impl QpAttr {
    /// The attributes for this state of `enum ibv_qp_state`.
    pub(in crate::hw) fn to(state: c_int) -> Self {
        Self { qp_state: state, ..Self::default() }
    }
}

/// Bits of `enum ibv_qp_attr_mask`.
pub(in crate::hw) mod mask {
    use std::ffi::c_int;

    pub(in crate::hw) const STATE: c_int = 1;
    pub(in crate::hw) const EN_SQD_ASYNC_NOTIFY: c_int = 1 << 2;
    pub(in crate::hw) const ACCESS_FLAGS: c_int = 1 << 3;
    pub(in crate::hw) const PKEY_INDEX: c_int = 1 << 4;
    pub(in crate::hw) const PORT: c_int = 1 << 5;
    pub(in crate::hw) const QKEY: c_int = 1 << 6;
    pub(in crate::hw) const AV: c_int = 1 << 7;
    pub(in crate::hw) const PATH_MTU: c_int = 1 << 8;
    pub(in crate::hw) const TIMEOUT: c_int = 1 << 9;
    pub(in crate::hw) const RETRY_CNT: c_int = 1 << 10;
    pub(in crate::hw) const RNR_RETRY: c_int = 1 << 11;
    pub(in crate::hw) const RQ_PSN: c_int = 1 << 12;
    pub(in crate::hw) const MAX_QP_RD_ATOMIC: c_int = 1 << 13;
    pub(in crate::hw) const MIN_RNR_TIMER: c_int = 1 << 15;
    pub(in crate::hw) const SQ_PSN: c_int = 1 << 16;
    pub(in crate::hw) const MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
    pub(in crate::hw) const CAP: c_int = 1 << 19;
    pub(in crate::hw) const DEST_QPN: c_int = 1 << 20;
}

/// `struct ibv_send_wr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(in crate::hw) struct SendWr {
    pub(in crate::hw) wr_id: u64,
    pub(in crate::hw) next: *mut SendWr,
    pub(in crate::hw) sg_list: *const Sge,
    pub(in crate::hw) num_sge: c_int,
    pub(in crate::hw) opcode: c_int,
    pub(in crate::hw) send_flags: c_uint,
    /// Big-endian immediate data; or the key to invalidate, in host byte order.
    pub(in crate::hw) imm_data: [u8; 4],
    pub(in crate::hw) wr: Remote,
    /// For other transport services.
    pub(in crate::hw) unused: u64,
    pub(in crate::hw) bind_mw: BindMw,
}

/// The member `bind_mw` of `struct ibv_send_wr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(in crate::hw) struct BindMw {
    pub(in crate::hw) mw: *mut Mw,
    pub(in crate::hw) rkey: u32,
    pub(in crate::hw) info: MwBindInfo,
}

impl BindMw {
    /// For requests without a binding.
    pub(in crate::hw) const NONE: Self = Self {
        mw: std::ptr::null_mut(),
        rkey: 0,
        info: MwBindInfo { mr: std::ptr::null_mut(), addr: 0, length: 0, access: 0 },
    };
}

/// The union `wr` of `struct ibv_send_wr`, as for atomics. `rdma` has its key at `compare_add`.
/// `ud` has its handle at the address, and behind it the number and the Q_Key of the queue pair.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::hw) struct Remote {
    pub(in crate::hw) remote_addr: u64,
    /// For an RDMA operation: the key in the first four bytes.
    pub(in crate::hw) compare_add: u64,
    pub(in crate::hw) swap: u64,
    pub(in crate::hw) rkey: u32,
}

/// Flags of `enum ibv_send_flags`.
pub(in crate::hw) mod send_flags {
    use std::ffi::c_uint;

    pub(in crate::hw) const FENCE: c_uint = 1;
    pub(in crate::hw) const SIGNALED: c_uint = 1 << 1;
    pub(in crate::hw) const SOLICITED: c_uint = 1 << 2;
    pub(in crate::hw) const INLINE: c_uint = 1 << 3;
}

/// `struct ibv_recv_wr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(in crate::hw) struct RecvWr {
    pub(in crate::hw) wr_id: u64,
    pub(in crate::hw) next: *mut RecvWr,
    pub(in crate::hw) sg_list: *const Sge,
    pub(in crate::hw) num_sge: c_int,
}

/// `struct ibv_wc`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(in crate::hw) struct Wc {
    pub(in crate::hw) wr_id: u64,
    pub(in crate::hw) status: c_int,
    pub(in crate::hw) opcode: c_int,
    _vendor_err: u32,
    pub(in crate::hw) byte_len: u32,
    /// Big-endian immediate data; or the invalidated key, in host byte order.
    pub(in crate::hw) imm_data: [u8; 4],
    pub(in crate::hw) qp_num: u32,
    pub(in crate::hw) src_qp: u32,
    pub(in crate::hw) wc_flags: c_uint,
    _pkey_index: u16,
    _slid: u16,
    _sl: u8,
    _dlid_path_bits: u8,
}

/// `IBV_WC_GRH`.
pub(in crate::hw) const WC_GRH: c_uint = 1;

/// `IBV_WC_WITH_IMM`.
pub(in crate::hw) const WC_WITH_IMM: c_uint = 1 << 1;

/// `IBV_WC_IP_CSUM_OK`. The same bit is Linux's `IB_WC_WITH_INVALIDATE`, which Soft-RoCE passes to
/// programs unchanged.
pub(in crate::hw) const WC_IP_CSUM_OK: c_uint = 1 << 2;

/// `IBV_WC_WITH_INV`.
pub(in crate::hw) const WC_WITH_INV: c_uint = 1 << 3;

/// `struct ibv_async_event`. The union is a pointer, or a port number in its first bytes.
#[repr(C)]
#[derive(Clone, Copy)]
pub(in crate::hw) struct AsyncEvent {
    pub(in crate::hw) element: *mut c_void,
    pub(in crate::hw) event_type: c_int,
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
