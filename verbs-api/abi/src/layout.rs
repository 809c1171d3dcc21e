//! The sizes of structures, and the offsets of members that either side reads or writes.

use crate::*;

// Structures with types of pthread: a mutex is 40 bytes on x86-64 and 48 on aarch64.
#[cfg(target_arch = "x86_64")]
assert_layout! {
    Context 328 { ops 8 cmd_fd 264 async_fd 268 num_comp_vectors 272 mutex 280 abi_compat 320 }
    VerbsContext 648 {
        query_port 0 advise_mr 8 alloc_null_mr 16 dm 56 modify_qp_rate_limit 104
        alloc_parent_domain 112 alloc_td 128 modify_cq 136 query_rt_values 192 create_cq_ex 200
        private 208 query_device_ex 216 open_qp 256 create_qp_ex 264 get_srq_num 272
        create_srq_ex 280 open_xrcd 288 close_xrcd 296 sz 312 context 320
    }
    Cq 128 { channel 8 cq_context 16 handle 24 cqe 28 mutex 32 comp_events_completed 120 }
    CqEx 288 { comp_mask 128 status 132 wr_id 136 start_poll 144 read_completion_wallclock_ns 280 }
    Qp 160 {
        qp_context 8 pd 16 send_cq 24 recv_cq 32 srq 40 handle 48 qp_num 52 state 56 qp_type 60
        mutex 64 events_completed 152
    }
    // 352 before version 64, which appended `wr_flush`.
    QpEx 360 {
        comp_mask 160 wr_id 168 wr_flags 176 wr_atomic_cmp_swp 184 wr_start 320 wr_complete 328
        wr_abort 336 wr_flush 352
    }
    Srq 128 { handle 24 mutex 32 }
}

#[cfg(target_arch = "aarch64")]
assert_layout! {
    Context 336 { ops 8 cmd_fd 264 async_fd 268 num_comp_vectors 272 mutex 280 abi_compat 328 }
    VerbsContext 656 {
        query_port 0 advise_mr 8 alloc_null_mr 16 dm 56 modify_qp_rate_limit 104
        alloc_parent_domain 112 alloc_td 128 modify_cq 136 query_rt_values 192 create_cq_ex 200
        private 208 query_device_ex 216 open_qp 256 create_qp_ex 264 get_srq_num 272
        create_srq_ex 280 open_xrcd 288 close_xrcd 296 sz 312 context 320
    }
    Cq 136 { channel 8 cq_context 16 handle 24 cqe 28 mutex 32 comp_events_completed 128 }
    CqEx 296 { comp_mask 136 status 140 wr_id 144 start_poll 152 read_completion_wallclock_ns 288 }
    Qp 168 {
        qp_context 8 pd 16 send_cq 24 recv_cq 32 srq 40 handle 48 qp_num 52 state 56 qp_type 60
        mutex 64 events_completed 160
    }
    // 360 before version 64.
    QpEx 368 {
        comp_mask 168 wr_id 176 wr_flags 184 wr_atomic_cmp_swp 192 wr_start 328 wr_complete 336
        wr_abort 344 wr_flush 360
    }
    Srq 136 { handle 24 mutex 32 }
}

#[cfg(target_pointer_width = "64")]
assert_layout! {
    Device 664 { node_type 16 transport_type 20 name 24 dev_name 88 dev_path 152 ibdev_path 408 }
    ContextOps 256 {
        alloc_mw 56 bind_mw 64 dealloc_mw 72 poll_cq 88 req_notify_cq 96 post_srq_recv 160
        post_send 200 post_recv 208
    }
    Pd 16 {}
    Td 8 {}
    Mr 48 { addr 16 length 24 handle 32 lkey 36 rkey 40 }
    Mw 32 { rkey 16 mw_type 24 }
    CompChannel 16 { fd 8 refcnt 12 }
    Ah 24 {}
    Wc 48 { status 8 opcode 12 vendor_err 16 byte_len 20 imm_data 24 qp_num 28 src_qp 32 wc_flags 36 }
    SendWr 128 {
        next 8 sg_list 16 num_sge 24 opcode 28 send_flags 32 imm_data 36 wr 40 qp_type 72 bind_mw 80
    }
    RecvWr 32 { next 8 sg_list 16 num_sge 24 }
    Sge 16 { addr 0 len 8 lkey 12 }
    QpInitAttr 64 { cap 32 qp_type 52 sq_sig_all 56 }
    QpInitAttrEx 136 { comp_mask 60 pd 64 send_ops_flags 128 }
    QpAttr 144 { qkey 16 rq_psn 20 sq_psn 24 dest_qp_num 28 cap 36 ah_attr 56 rate_limit 136 }
    MwBind 48 { send_flags 8 info 16 }
    MwBindInfo 32 { addr 8 length 16 access 24 }
    BindMw 48 { rkey 8 info 16 }
    AhAttr 32 { is_global 29 port_num 30 }
    GlobalRoute 24 { flow_label 16 sgid_index 20 }
    DeviceAttr 232 {
        node_guid 64 max_mr_size 80 max_qp 108 atomic_cap 164 max_mw 176 max_srq 212
        phys_port_cnt 227
    }
    DeviceAttrEx 400 { device_cap_flags_ex 280 phys_port_cnt_ex 396 }
    // 52 before version 64, which appended `active_speed_ex`.
    PortAttr 56 { active_speed 44 link_layer 46 port_cap_flags2 48 active_speed_ex 52 }
    AsyncEvent 16 {}
    GidEntry 32 {}
    CqInitAttrEx 56 {}
    SrqInitAttr 24 { attr 8 }
    SrqInitAttrEx 64 {}
    ParentDomainInitAttr 48 {}
}
