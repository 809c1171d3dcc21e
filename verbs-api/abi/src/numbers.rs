//! Flags and masks of `verbs.h`.

use std::ffi::{c_int, c_uint};

/// Bits of `enum ibv_rereg_mr_flags`.
pub const REREG_TRANSLATION: c_int = 1;
/// As above.
pub const REREG_PD: c_int = 1 << 1;
/// As above.
pub const REREG_ACCESS: c_int = 1 << 2;

/// Bits of `enum ibv_srq_attr_mask`.
pub const SRQ_MAX_WR: c_int = 1;
/// As above.
pub const SRQ_LIMIT: c_int = 1 << 1;

/// Bits of `enum ibv_device_cap_flags` for memory windows.
pub mod cap {
    use std::ffi::c_uint;

    pub const MEM_WINDOW: c_uint = 1 << 17;
    pub const MEM_WINDOW_TYPE_2A: c_uint = 1 << 23;
    pub const MEM_WINDOW_TYPE_2B: c_uint = 1 << 24;
}

/// Bits of `enum ibv_qp_attr_mask`.
pub mod mask {
    use std::ffi::c_int;

    pub const STATE: c_int = 1;
    pub const CUR_STATE: c_int = 1 << 1;
    pub const EN_SQD_ASYNC_NOTIFY: c_int = 1 << 2;
    pub const ACCESS_FLAGS: c_int = 1 << 3;
    pub const PKEY_INDEX: c_int = 1 << 4;
    pub const PORT: c_int = 1 << 5;
    pub const QKEY: c_int = 1 << 6;
    pub const AV: c_int = 1 << 7;
    pub const PATH_MTU: c_int = 1 << 8;
    pub const TIMEOUT: c_int = 1 << 9;
    pub const RETRY_CNT: c_int = 1 << 10;
    pub const RNR_RETRY: c_int = 1 << 11;
    pub const RQ_PSN: c_int = 1 << 12;
    pub const MAX_QP_RD_ATOMIC: c_int = 1 << 13;
    pub const ALT_PATH: c_int = 1 << 14;
    pub const MIN_RNR_TIMER: c_int = 1 << 15;
    pub const SQ_PSN: c_int = 1 << 16;
    pub const MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
    pub const PATH_MIG_STATE: c_int = 1 << 18;
    pub const CAP: c_int = 1 << 19;
    pub const DEST_QPN: c_int = 1 << 20;
}

/// Flags of `enum ibv_send_flags`.
pub mod send_flags {
    use std::ffi::c_uint;

    pub const FENCE: c_uint = 1;
    pub const SIGNALED: c_uint = 1 << 1;
    pub const SOLICITED: c_uint = 1 << 2;
    pub const INLINE: c_uint = 1 << 3;
}

/// `IBV_WC_GRH`.
pub const WC_GRH: c_uint = 1;

/// `IBV_WC_WITH_IMM`.
pub const WC_WITH_IMM: c_uint = 1 << 1;

/// `IBV_WC_IP_CSUM_OK`. The same bit is Linux's `IB_WC_WITH_INVALIDATE`, which Soft-RoCE passes to
/// programs unchanged.
pub const WC_IP_CSUM_OK: c_uint = 1 << 2;

/// `IBV_WC_WITH_INV`.
pub const WC_WITH_INV: c_uint = 1 << 3;
