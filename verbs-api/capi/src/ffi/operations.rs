//! The calls that programs make through pointers in a context, and opening one with them.

use std::ptr;

use super::border::Outcome;
use super::{context, cq, memory, pd, post, qp, query, srq, stubs};
use crate::abi;
use crate::devices::Found;

pub(super) fn open(device: *mut abi::Device, found: &Found) -> Outcome<*mut abi::Context> {
    let shared = context::prepare(found)?;
    let ops = abi::ContextOps {
        compat_mw: [ptr::null(); 7],
        alloc_mw: Some(memory::alloc_mw),
        bind_mw: Some(post::bind_mw),
        dealloc_mw: Some(memory::dealloc_mw),
        compat_create_cq: ptr::null(),
        poll_cq: Some(cq::poll_cq),
        req_notify_cq: Some(cq::req_notify_cq),
        compat_srq: [ptr::null(); 7],
        post_srq_recv: Some(post::post_srq_recv),
        compat_qp: [ptr::null(); 4],
        post_send: Some(post::post_send),
        post_recv: Some(post::post_recv),
        compat_rest: [ptr::null(); 5],
    };
    let context = abi::Context {
        device,
        ops,
        // There is no file of the kernel behind it; programs only look whether it is negative.
        cmd_fd: shared.async_fd.number(),
        async_fd: shared.async_fd.number(),
        num_comp_vectors: 1,
        mutex: abi::MUTEX,
        // __VERBS_ABI_IS_EXTENDED.
        abi_compat: ptr::without_provenance_mut(usize::MAX),
    };
    let verbs = abi::VerbsContext {
        query_port: Some(query::query_port_ex),
        advise_mr: Some(memory::advise_mr),
        alloc_null_mr: ptr::null(),
        counters: [ptr::null(); 4],
        dm: [ptr::null(); 3],
        flow_action: [ptr::null(); 3],
        modify_qp_rate_limit: ptr::null(),
        alloc_parent_domain: Some(pd::alloc_parent_domain),
        dealloc_td: Some(pd::dealloc_td),
        alloc_td: Some(pd::alloc_td),
        modify_cq: ptr::null(),
        post_srq_ops: ptr::null(),
        rwq_and_wq: [ptr::null(); 5],
        query_rt_values: ptr::null(),
        create_cq_ex: Some(cq::create_cq_ex),
        private: ptr::null(),
        query_device_ex: Some(query::query_device_ex),
        flows: [ptr::null(); 4],
        open_qp: ptr::null(),
        create_qp_ex: Some(qp::create_qp_ex),
        get_srq_num: Some(srq::get_srq_num),
        create_srq_ex: Some(srq::create_srq_ex),
        open_xrcd: ptr::null(),
        // The header's inline function calls it without a look.
        close_xrcd: Some(stubs::one_argument),
        placeholder: 0,
        sz: size_of::<abi::VerbsContext>(),
        context,
    };
    Ok(context::make(verbs, shared))
}
