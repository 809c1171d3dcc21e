//! The structures of `verbs.h`, as programs and `libibverbs` see them, asserted against the tables
//! that C compilers printed: `offsets.txt` for x86-64, and `offsets-aarch64.txt` for the
//! differences there.
//!
//! It is stable: every release since 2007 serves the version nodes `IBVERBS_1.0` and `IBVERBS_1.1`,
//! and structures grow only at their ends, `struct verbs_context` at its beginning.
//!
//! Their names are those of `verbs.h` without `ibv_`. Functions that a caller looks at before it
//! calls them are options.
#![allow(missing_docs, reason = "the names are those of verbs.h")]
#![allow(missing_debug_implementations, reason = "most are memory of C programs")]

mod layout;
mod numbers;
mod values;

use std::ffi::{c_char, c_int, c_uint, c_void};

pub use self::numbers::*;
pub use self::values::*;

pub use rocinante_stack::mem::Sge;

/// `pthread_mutex_t` of glibc.
pub type Mutex = [u64; if cfg!(target_arch = "aarch64") { 6 } else { 5 }];
/// `PTHREAD_MUTEX_INITIALIZER`.
pub const MUTEX: Mutex = [0; size_of::<Mutex>() / 8];
/// `pthread_cond_t` of glibc.
pub type Cond = [u64; 6];
/// `PTHREAD_COND_INITIALIZER`.
pub const COND: Cond = [0; 6];

/// A slot for a function that this library does not have: callers of a newer header check it.
pub type Slot = *const c_void;

macro_rules! structures {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $kind:ty,)* })*) => {
        $(
            $(#[$doc])*
            #[repr(C)]
            pub struct $name { $(pub $field: $kind,)* }
        )*
    };
}

structures! {
    Device {
        ops: [Slot; 2],
        node_type: c_int,
        transport_type: c_int,
        name: [c_char; 64],
        dev_name: [c_char; 64],
        dev_path: [c_char; 256],
        ibdev_path: [c_char; 256],
    }
    ContextOps {
        compat_mw: [Slot; 7],
        alloc_mw: Option<unsafe extern "C" fn(*mut Pd, c_int) -> *mut Mw>,
        bind_mw: Option<unsafe extern "C" fn(*mut Qp, *mut Mw, *mut MwBind) -> c_int>,
        dealloc_mw: Option<unsafe extern "C" fn(*mut Mw) -> c_int>,
        compat_create_cq: Slot,
        poll_cq: Option<unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int>,
        req_notify_cq: Option<unsafe extern "C" fn(*mut Cq, c_int) -> c_int>,
        compat_srq: [Slot; 7],
        post_srq_recv: Option<unsafe extern "C" fn(*mut Srq, *mut RecvWr, *mut *mut RecvWr) -> c_int>,
        compat_qp: [Slot; 4],
        post_send: Option<unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int>,
        post_recv: Option<unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> c_int>,
        compat_rest: [Slot; 5],
    }
    Context {
        device: *mut Device,
        ops: ContextOps,
        cmd_fd: c_int,
        async_fd: c_int,
        num_comp_vectors: c_int,
        mutex: Mutex,
        abi_compat: *mut c_void,
    }
    VerbsContext {
        query_port: Option<unsafe extern "C" fn(*mut Context, u8, *mut PortAttr, usize) -> c_int>,
        advise_mr: Option<unsafe extern "C" fn(*mut Pd, c_int, u32, *mut Sge, u32) -> c_int>,
        alloc_null_mr: Slot,
        counters: [Slot; 4],
        dm: [Slot; 3],
        flow_action: [Slot; 3],
        modify_qp_rate_limit: Slot,
        alloc_parent_domain:
            Option<unsafe extern "C" fn(*mut Context, *mut ParentDomainInitAttr) -> *mut Pd>,
        dealloc_td: Option<unsafe extern "C" fn(*mut Td) -> c_int>,
        alloc_td: Option<unsafe extern "C" fn(*mut Context, *mut TdInitAttr) -> *mut Td>,
        modify_cq: Slot,
        post_srq_ops: Slot,
        rwq_and_wq: [Slot; 5],
        query_rt_values: Slot,
        create_cq_ex: Option<unsafe extern "C" fn(*mut Context, *mut CqInitAttrEx) -> *mut CqEx>,
        private: Slot,
        query_device_ex: Option<unsafe extern "C" fn(
            *mut Context,
            *const QueryDeviceExInput,
            *mut DeviceAttrEx,
            usize,
        ) -> c_int>,
        flows: [Slot; 4],
        open_qp: Slot,
        create_qp_ex: Option<unsafe extern "C" fn(*mut Context, *mut QpInitAttrEx) -> *mut Qp>,
        get_srq_num: Option<unsafe extern "C" fn(*mut Srq, *mut u32) -> c_int>,
        create_srq_ex: Option<unsafe extern "C" fn(*mut Context, *mut SrqInitAttrEx) -> *mut Srq>,
        open_xrcd: Slot,
        close_xrcd: Option<unsafe extern "C" fn(*mut c_void) -> c_int>,
        placeholder: u64,
        sz: usize,
        context: Context,
    }
    Pd { context: *mut Context, handle: u32, }
    Td { context: *mut Context, }
    TdInitAttr { comp_mask: u32, }
    ParentDomainInitAttr {
        pd: *mut Pd,
        td: *mut Td,
        comp_mask: u32,
        alloc: Slot,
        free: Slot,
        pd_context: *mut c_void,
    }
    Mr {
        context: *mut Context,
        pd: *mut Pd,
        addr: *mut c_void,
        length: usize,
        handle: u32,
        lkey: u32,
        rkey: u32,
    }
    MrInitAttr {
        length: usize,
        access: c_int,
        comp_mask: u64,
        iova: u64,
        addr: *mut c_void,
        fd: c_int,
        fd_offset: u64,
        dmah: *mut c_void,
        buf: *mut c_void,
    }
    Mw {
        context: *mut Context,
        pd: *mut Pd,
        rkey: u32,
        handle: u32,
        mw_type: c_int,
    }
    MwBind { wr_id: u64, send_flags: c_uint, info: MwBindInfo, }
    CompChannel { context: *mut Context, fd: c_int, refcnt: c_int, }
    Cq {
        context: *mut Context,
        channel: *mut CompChannel,
        cq_context: *mut c_void,
        handle: u32,
        cqe: c_int,
        mutex: Mutex,
        cond: Cond,
        comp_events_completed: u32,
        async_events_completed: u32,
    }
    CqEx {
        cq: Cq,
        comp_mask: u32,
        status: c_int,
        wr_id: u64,
        start_poll: unsafe extern "C" fn(*mut CqEx, *mut u32) -> c_int,
        next_poll: unsafe extern "C" fn(*mut CqEx) -> c_int,
        end_poll: unsafe extern "C" fn(*mut CqEx),
        read_opcode: unsafe extern "C" fn(*mut CqEx) -> c_int,
        read_vendor_err: unsafe extern "C" fn(*mut CqEx) -> u32,
        read_byte_len: unsafe extern "C" fn(*mut CqEx) -> u32,
        read_imm_data: unsafe extern "C" fn(*mut CqEx) -> u32,
        read_qp_num: unsafe extern "C" fn(*mut CqEx) -> u32,
        read_src_qp: unsafe extern "C" fn(*mut CqEx) -> u32,
        read_wc_flags: unsafe extern "C" fn(*mut CqEx) -> c_uint,
        read_slid: unsafe extern "C" fn(*mut CqEx) -> u32,
        read_sl: unsafe extern "C" fn(*mut CqEx) -> u8,
        read_dlid_path_bits: unsafe extern "C" fn(*mut CqEx) -> u8,
        read_completion_ts: unsafe extern "C" fn(*mut CqEx) -> u64,
        read_cvlan: unsafe extern "C" fn(*mut CqEx) -> u16,
        read_flow_tag: unsafe extern "C" fn(*mut CqEx) -> u32,
        read_tm_info: unsafe extern "C" fn(*mut CqEx, *mut c_void),
        read_completion_wallclock_ns: unsafe extern "C" fn(*mut CqEx) -> u64,
    }
    CqInitAttrEx {
        cqe: u32,
        cq_context: *mut c_void,
        channel: *mut CompChannel,
        comp_vector: u32,
        wc_flags: u64,
        comp_mask: u32,
        flags: u32,
        parent_domain: *mut Pd,
    }
    Srq {
        context: *mut Context,
        srq_context: *mut c_void,
        pd: *mut Pd,
        handle: u32,
        mutex: Mutex,
        cond: Cond,
        events_completed: u32,
    }
    SrqInitAttr { srq_context: *mut c_void, attr: SrqAttr, }
    SrqInitAttrEx {
        srq_context: *mut c_void,
        attr: SrqAttr,
        comp_mask: u32,
        srq_type: c_int,
        pd: *mut Pd,
        xrcd: *mut c_void,
        cq: *mut Cq,
        tm_cap: [u32; 2],
    }
    Qp {
        context: *mut Context,
        qp_context: *mut c_void,
        pd: *mut Pd,
        send_cq: *mut Cq,
        recv_cq: *mut Cq,
        srq: *mut Srq,
        handle: u32,
        qp_num: u32,
        state: c_int,
        qp_type: c_int,
        mutex: Mutex,
        cond: Cond,
        events_completed: u32,
    }
    QpEx {
        qp: Qp,
        comp_mask: u64,
        wr_id: u64,
        wr_flags: c_uint,
        wr_atomic_cmp_swp: Option<unsafe extern "C" fn(*mut QpEx, u32, u64, u64, u64)>,
        wr_atomic_fetch_add: Option<unsafe extern "C" fn(*mut QpEx, u32, u64, u64)>,
        wr_bind_mw: Option<unsafe extern "C" fn(*mut QpEx, *mut Mw, u32, *const MwBindInfo)>,
        wr_local_inv: Option<unsafe extern "C" fn(*mut QpEx, u32)>,
        wr_rdma_read: Option<unsafe extern "C" fn(*mut QpEx, u32, u64)>,
        wr_rdma_write: Option<unsafe extern "C" fn(*mut QpEx, u32, u64)>,
        wr_rdma_write_imm: Option<unsafe extern "C" fn(*mut QpEx, u32, u64, u32)>,
        wr_send: Option<unsafe extern "C" fn(*mut QpEx)>,
        wr_send_imm: Option<unsafe extern "C" fn(*mut QpEx, u32)>,
        wr_send_inv: Option<unsafe extern "C" fn(*mut QpEx, u32)>,
        wr_send_tso: Option<unsafe extern "C" fn(*mut QpEx, *mut c_void, u16, u16)>,
        wr_set_ud_addr: Option<unsafe extern "C" fn(*mut QpEx, *mut Ah, u32, u32)>,
        wr_set_xrc_srqn: Option<unsafe extern "C" fn(*mut QpEx, u32)>,
        wr_set_inline_data: Option<unsafe extern "C" fn(*mut QpEx, *mut c_void, usize)>,
        wr_set_inline_data_list: Option<unsafe extern "C" fn(*mut QpEx, usize, *const DataBuf)>,
        wr_set_sge: Option<unsafe extern "C" fn(*mut QpEx, u32, u64, u32)>,
        wr_set_sge_list: Option<unsafe extern "C" fn(*mut QpEx, usize, *const Sge)>,
        wr_start: Option<unsafe extern "C" fn(*mut QpEx)>,
        wr_complete: Option<unsafe extern "C" fn(*mut QpEx) -> c_int>,
        wr_abort: Option<unsafe extern "C" fn(*mut QpEx)>,
        wr_atomic_write: Option<unsafe extern "C" fn(*mut QpEx, u32, u64, *const c_void)>,
        wr_flush: Option<unsafe extern "C" fn(*mut QpEx, u32, u64, usize, u8, u8)>,
    }
    DataBuf { addr: *mut c_void, length: usize, }
    QpInitAttr {
        qp_context: *mut c_void,
        send_cq: *mut Cq,
        recv_cq: *mut Cq,
        srq: *mut Srq,
        cap: QpCap,
        qp_type: c_int,
        sq_sig_all: c_int,
    }
    Ah { context: *mut Context, pd: *mut Pd, handle: u32, }
    QueryDeviceExInput { comp_mask: u32, }
}

macro_rules! copied_structures {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $kind:ty,)* })*) => {
        $(
            $(#[$doc])*
            #[repr(C)]
            #[derive(Clone, Copy)]
            pub struct $name { $(pub $field: $kind,)* }
        )*
    };
}

copied_structures! {
    SendWr {
        wr_id: u64,
        next: *mut SendWr,
        sg_list: *const Sge,
        num_sge: c_int,
        opcode: c_int,
        send_flags: c_uint,
        // Big-endian immediate data; or the key to invalidate, in host byte order.
        imm_data: [u8; 4],
        wr: Remote,
        qp_type: u64,
        bind_mw: BindMw,
    }
    BindMw { mw: *mut Mw, rkey: u32, info: MwBindInfo, }
    RecvWr { wr_id: u64, next: *mut RecvWr, sg_list: *const Sge, num_sge: c_int, }
    // The union of `struct ibv_async_event`: a pointer, or a port number in its first bytes.
    AsyncEvent { element: *mut c_void, event_type: c_int, }
}

macro_rules! plain_structures {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $kind:ty,)* })*) => {
        $(
            $(#[$doc])*
            #[repr(C)]
            #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
            pub struct $name { $(pub $field: $kind,)* }
        )*
    };
}

plain_structures! {
    SrqAttr { max_wr: u32, max_sge: u32, srq_limit: u32, }
    QpCap {
        max_send_wr: u32,
        max_recv_wr: u32,
        max_send_sge: u32,
        max_recv_sge: u32,
        max_inline_data: u32,
    }
    AhAttr {
        grh: GlobalRoute,
        dlid: u16,
        sl: u8,
        src_path_bits: u8,
        static_rate: u8,
        is_global: u8,
        port_num: u8,
    }
    QpAttr {
        qp_state: c_int,
        cur_qp_state: c_int,
        path_mtu: c_int,
        path_mig_state: c_int,
        qkey: u32,
        rq_psn: u32,
        sq_psn: u32,
        dest_qp_num: u32,
        qp_access_flags: c_uint,
        cap: QpCap,
        ah_attr: AhAttr,
        alt_ah_attr: AhAttr,
        pkey_index: u16,
        alt_pkey_index: u16,
        en_sqd_async_notify: u8,
        sq_draining: u8,
        max_rd_atomic: u8,
        max_dest_rd_atomic: u8,
        min_rnr_timer: u8,
        port_num: u8,
        timeout: u8,
        retry_cnt: u8,
        rnr_retry: u8,
        alt_port_num: u8,
        alt_timeout: u8,
        rate_limit: u32,
    }
    /// The union `wr` of `struct ibv_send_wr`, as for atomics. `rdma` has its key in the first half
    /// of `compare_add`; `ud` has its handle at the address, and the number and the Q_Key of the
    /// queue pair in the halves of `compare_add`.
    Remote { remote_addr: u64, compare_add: u64, swap: u64, rkey: u32, }
    Wc {
        wr_id: u64,
        status: c_int,
        opcode: c_int,
        vendor_err: u32,
        byte_len: u32,
        // Big-endian immediate data; or the invalidated key, in host byte order.
        imm_data: [u8; 4],
        qp_num: u32,
        src_qp: u32,
        wc_flags: c_uint,
        pkey_index: u16,
        slid: u16,
        sl: u8,
        dlid_path_bits: u8,
    }
    PortAttr {
        state: c_int,
        max_mtu: c_int,
        active_mtu: c_int,
        gid_tbl_len: c_int,
        port_cap_flags: u32,
        max_msg_sz: u32,
        bad_pkey_cntr: u32,
        qkey_viol_cntr: u32,
        pkey_tbl_len: u16,
        lid: u16,
        sm_lid: u16,
        lmc: u8,
        max_vl_num: u8,
        sm_sl: u8,
        subnet_timeout: u8,
        init_type_reply: u8,
        active_width: u8,
        active_speed: u8,
        phys_state: u8,
        link_layer: u8,
        flags: u8,
        port_cap_flags2: u16,
        // From version 64 on.
        active_speed_ex: u32,
    }
    GidEntry { gid: [u8; 16], gid_index: u32, port_num: u32, gid_type: u32, ndev_ifindex: u32, }
}

/// `struct ibv_mw_bind_info`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MwBindInfo {
    pub mr: *mut Mr,
    pub addr: u64,
    pub length: u64,
    pub access: c_uint,
}

/// `struct ibv_global_route`: its GID has the alignment of a word.
#[repr(C, align(8))]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GlobalRoute {
    pub dgid: [u8; 16],
    pub flow_label: u32,
    pub sgid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
}

/// `struct ibv_qp_init_attr_ex`: its first members are those of `ibv_qp_init_attr`, without the
/// padding at its end.
#[repr(C)]
pub struct QpInitAttrEx {
    pub qp_context: *mut c_void,
    pub send_cq: *mut Cq,
    pub recv_cq: *mut Cq,
    pub srq: *mut Srq,
    pub cap: QpCap,
    pub qp_type: c_int,
    pub sq_sig_all: c_int,
    pub comp_mask: u32,
    pub pd: *mut Pd,
    pub xrcd: *mut c_void,
    pub create_flags: u32,
    pub max_tso_header: u16,
    pub rwq_ind_tbl: *mut c_void,
    pub rx_hash: [u64; 3],
    pub source_qpn: u32,
    pub send_ops_flags: u64,
}

/// `struct ibv_device_attr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DeviceAttr {
    pub fw_ver: [c_char; 64],
    /// Big-endian, as is the next member.
    pub node_guid: [u8; 8],
    pub sys_image_guid: [u8; 8],
    pub max_mr_size: u64,
    pub page_size_cap: u64,
    pub vendor_id: u32,
    pub vendor_part_id: u32,
    pub hw_ver: u32,
    pub max_qp: c_int,
    pub max_qp_wr: c_int,
    pub device_cap_flags: c_uint,
    pub max_sge: c_int,
    pub max_sge_rd: c_int,
    pub max_cq: c_int,
    pub max_cqe: c_int,
    pub max_mr: c_int,
    pub max_pd: c_int,
    pub max_qp_rd_atom: c_int,
    pub max_ee_rd_atom: c_int,
    pub max_res_rd_atom: c_int,
    pub max_qp_init_rd_atom: c_int,
    pub max_ee_init_rd_atom: c_int,
    pub atomic_cap: c_int,
    pub max_ee: c_int,
    pub max_rdd: c_int,
    pub max_mw: c_int,
    pub max_raw_ipv6_qp: c_int,
    pub max_raw_ethy_qp: c_int,
    pub max_mcast_grp: c_int,
    pub max_mcast_qp_attach: c_int,
    pub max_total_mcast_qp_attach: c_int,
    pub max_ah: c_int,
    pub max_fmr: c_int,
    pub max_map_per_fmr: c_int,
    pub max_srq: c_int,
    pub max_srq_wr: c_int,
    pub max_srq_sge: c_int,
    pub max_pkeys: u16,
    pub local_ca_ack_delay: u8,
    pub phys_port_cnt: u8,
}

/// `struct ibv_device_attr_ex`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DeviceAttrEx {
    pub orig_attr: DeviceAttr,
    pub comp_mask: u32,
    pub odp_caps: [u64; 3],
    pub completion_timestamp_mask: u64,
    pub hca_core_clock: u64,
    pub device_cap_flags_ex: u64,
    /// Segmentation, hashing, pacing, tags, moderation, memory and PCI atomics: there are none.
    pub offloads: [u32; 27],
    pub phys_port_cnt_ex: u32,
}

impl BindMw {
    /// For requests without a binding.
    pub const NONE: Self = Self {
        mw: std::ptr::null_mut(),
        rkey: 0,
        info: MwBindInfo { mr: std::ptr::null_mut(), addr: 0, length: 0, access: 0 },
    };
}

impl QpAttr {
    /// The attributes for this state of `enum ibv_qp_state`.
    pub fn to(state: c_int) -> Self {
        Self { qp_state: state, ..Self::default() }
    }
}

/// Asserts sizes and offsets at compile time.
#[macro_export]
macro_rules! assert_layout {
    ($($name:ident $size:literal { $($field:ident $offset:literal)* })*) => {
        const _: () = {
            $(
                assert!(std::mem::size_of::<$name>() == $size, concat!(stringify!($name), ": size"));
                $(assert!(
                    std::mem::offset_of!($name, $field) == $offset,
                    concat!(stringify!($name), ".", stringify!($field)),
                );)*
            )*
        };
    };
}
