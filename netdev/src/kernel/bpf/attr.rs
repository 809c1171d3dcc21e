//! Layouts and numbers of `include/uapi/linux/bpf.h`: prefixes of `union bpf_attr`, and the
//! kernel's descriptions of objects.

// `enum bpf_cmd`.
pub(super) const MAP_CREATE: libc::c_long = 0;
pub(super) const MAP_LOOKUP_ELEM: libc::c_long = 1;
pub(super) const MAP_UPDATE_ELEM: libc::c_long = 2;
pub(super) const MAP_DELETE_ELEM: libc::c_long = 3;
pub(super) const MAP_GET_NEXT_KEY: libc::c_long = 4;
pub(super) const PROG_LOAD: libc::c_long = 5;
pub(super) const PROG_ATTACH: libc::c_long = 8;
pub(super) const PROG_DETACH: libc::c_long = 9;
pub(super) const PROG_TEST_RUN: libc::c_long = 10;
pub(super) const PROG_GET_FD_BY_ID: libc::c_long = 13;
pub(super) const MAP_GET_FD_BY_ID: libc::c_long = 14;
pub(super) const OBJ_GET_INFO_BY_FD: libc::c_long = 15;
pub(super) const PROG_QUERY: libc::c_long = 16;
pub(super) const LINK_CREATE: libc::c_long = 28;

pub(super) const MAP_TYPE_HASH: u32 = 1;
pub(super) const MAP_TYPE_ARRAY: u32 = 2;
pub(super) const MAP_TYPE_XSKMAP: u32 = 17;
pub(super) const MAP_TYPE_RINGBUF: u32 = 27;
pub(super) const PROG_TYPE_SOCKET_FILTER: u32 = 1;
pub(super) const PROG_TYPE_SCHED_CLS: u32 = 3;
pub(super) const PROG_TYPE_XDP: u32 = 6;
pub(super) const ATTACH_XDP: u32 = 37;
pub(super) const ATTACH_TCX_INGRESS: u32 = 46;
pub(super) const ATTACH_TCX_EGRESS: u32 = 47;
/// `BPF_F_MMAPABLE`: processes may map the array.
pub(super) const F_MMAPABLE: u32 = 1 << 10;
/// `BPF_F_REPLACE`, `BPF_F_BEFORE` and `BPF_F_AFTER`: in the place of a program; before all others;
/// behind them.
pub(super) const F_REPLACE: u32 = 1 << 2;
pub(super) const F_BEFORE: u32 = 1 << 3;
pub(super) const F_AFTER: u32 = 1 << 4;
/// Length of a program's tag, and of an object's name.
pub(super) const TAG_LEN: usize = 8;
pub(super) const NAME_LEN: usize = 16;
/// `BPF_F_XDP_HAS_FRAGS`: the program reads only the linear part and so accepts frames of several
/// fragments, which a veth needs above an MTU of about 3500.
pub(super) const F_XDP_HAS_FRAGS: u32 = 1 << 5;
/// `if_link.h`: the driver runs it.
pub(super) const XDP_FLAGS_DRV_MODE: u32 = 1 << 2;

#[repr(C)]
pub(super) struct MapCreate {
    pub(super) map_type: u32,
    pub(super) key_size: u32,
    pub(super) value_size: u32,
    pub(super) max_entries: u32,
    pub(super) flags: u32,
    pub(super) inner_map_fd: u32,
    pub(super) numa_node: u32,
    pub(super) name: [u8; NAME_LEN],
}

#[repr(C)]
pub(super) struct MapElem {
    pub(super) map_fd: u32,
    pub(super) pad: u32,
    pub(super) key: u64,
    pub(super) value: u64,
    pub(super) flags: u64,
}

#[repr(C)]
pub(super) struct ProgLoad {
    pub(super) prog_type: u32,
    pub(super) insn_cnt: u32,
    pub(super) insns: u64,
    pub(super) license: u64,
    pub(super) log_level: u32,
    pub(super) log_size: u32,
    pub(super) log_buf: u64,
    pub(super) kern_version: u32,
    pub(super) prog_flags: u32,
    pub(super) name: [u8; NAME_LEN],
    pub(super) ifindex: u32,
    pub(super) expected_attach_type: u32,
}

#[derive(Default)]
#[repr(C)]
pub(super) struct ProgAttach {
    pub(super) target_ifindex: u32,
    pub(super) attach_bpf_fd: u32,
    pub(super) attach_type: u32,
    pub(super) attach_flags: u32,
    pub(super) replace_bpf_fd: u32,
    pub(super) relative_fd: u32,
    pub(super) expected_revision: u64,
}

#[derive(Default)]
#[repr(C)]
pub(super) struct ProgQuery {
    pub(super) target_ifindex: u32,
    pub(super) attach_type: u32,
    pub(super) query_flags: u32,
    pub(super) attach_flags: u32,
    pub(super) prog_ids: u64,
    pub(super) prog_cnt: u32,
    pub(super) pad: u32,
    pub(super) prog_attach_flags: u64,
    pub(super) link_ids: u64,
    pub(super) link_attach_flags: u64,
    pub(super) revision: u64,
}

#[repr(C)]
pub(super) struct GetId {
    pub(super) id: u32,
    pub(super) next_id: u32,
    pub(super) open_flags: u32,
}

#[repr(C)]
pub(super) struct GetInfo {
    pub(super) bpf_fd: u32,
    pub(super) info_len: u32,
    pub(super) info: u64,
}

/// The start of `struct bpf_prog_info`.
#[derive(Default)]
#[repr(C)]
pub(super) struct ProgInfo {
    pub(super) kind: u32,
    pub(super) id: u32,
    pub(super) tag: [u8; TAG_LEN],
    pub(super) jited_len: u32,
    pub(super) xlated_len: u32,
    pub(super) jited: u64,
    pub(super) xlated: u64,
    pub(super) load_time: u64,
    pub(super) uid: u32,
    pub(super) nr_map_ids: u32,
    pub(super) map_ids: u64,
    pub(super) name: [u8; NAME_LEN],
}

/// The start of `struct bpf_map_info`.
#[derive(Default)]
#[repr(C)]
pub(super) struct MapInfo {
    pub(super) kind: u32,
    pub(super) id: u32,
    pub(super) key_size: u32,
    pub(super) value_size: u32,
    pub(super) max_entries: u32,
    pub(super) flags: u32,
    pub(super) name: [u8; NAME_LEN],
}

#[repr(C)]
pub(super) struct LinkCreate {
    pub(super) prog_fd: u32,
    pub(super) target_ifindex: u32,
    pub(super) attach_type: u32,
    pub(super) flags: u32,
}

/// Of `enum tcx_action_base`: the next program decides.
pub const TCX_NEXT: i32 = -1;
/// The frame is dropped.
pub const TCX_DROP: i32 = 2;
