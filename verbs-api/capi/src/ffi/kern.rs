//! Structures of the kernel's interface as those of `verbs.h` and `sa.h`, for librdmacm.
#![allow(unsafe_code)]

use std::ffi::c_int;

use super::border::quiet;
use crate::abi;

/// `struct ib_uverbs_ah_attr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct KernAh {
    dgid: [u8; 16],
    flow_label: u32,
    sgid_index: u8,
    hop_limit: u8,
    traffic_class: u8,
    reserved: u8,
    dlid: u16,
    sl: u8,
    src_path_bits: u8,
    static_rate: u8,
    is_global: u8,
    port_num: u8,
    reserved_too: u8,
}

/// `struct ib_uverbs_qp_attr`.
#[repr(C)]
pub(super) struct KernQp {
    mask: u32,
    qp_state: u32,
    cur_qp_state: u32,
    path_mtu: u32,
    path_mig_state: u32,
    qkey: u32,
    rq_psn: u32,
    sq_psn: u32,
    dest_qp_num: u32,
    qp_access_flags: u32,
    ah_attr: KernAh,
    alt_ah_attr: KernAh,
    cap: abi::QpCap,
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
    reserved: [u8; 5],
}

/// `struct ib_user_path_rec`.
#[repr(C)]
pub(super) struct KernPath {
    dgid: [u8; 16],
    sgid: [u8; 16],
    dlid: u16,
    slid: u16,
    raw_traffic: u32,
    flow_label: u32,
    reversible: u32,
    mtu: u32,
    pkey: u16,
    hop_limit: u8,
    traffic_class: u8,
    numb_path: u8,
    sl: u8,
    mtu_selector: u8,
    rate_selector: u8,
    rate: u8,
    packet_life_time_selector: u8,
    packet_life_time: u8,
    preference: u8,
}

/// `struct ibv_sa_path_rec`.
#[repr(C, align(8))]
pub(super) struct Path {
    dgid: [u8; 16],
    sgid: [u8; 16],
    dlid: u16,
    slid: u16,
    raw_traffic: c_int,
    flow_label: u32,
    hop_limit: u8,
    traffic_class: u8,
    reversible: c_int,
    numb_path: u8,
    pkey: u16,
    sl: u8,
    mtu_selector: u8,
    mtu: u8,
    rate_selector: u8,
    rate: u8,
    packet_life_time_selector: u8,
    packet_life_time: u8,
    preference: u8,
}

const _: () = assert!(size_of::<KernAh>() == 32 && size_of::<KernQp>() == 144);
const _: () = assert!(size_of::<KernPath>() == 64 && size_of::<Path>() == 64);

macro_rules! copied {
    ($to:ident, $from:ident: $($field:ident)*) => { $($to.$field = $from.$field;)* };
}

fn ah(from: &KernAh) -> abi::AhAttr {
    let grh = abi::GlobalRoute {
        dgid: from.dgid,
        flow_label: from.flow_label,
        sgid_index: from.sgid_index,
        hop_limit: from.hop_limit,
        traffic_class: from.traffic_class,
    };
    abi::AhAttr {
        grh,
        dlid: from.dlid,
        sl: from.sl,
        src_path_bits: from.src_path_bits,
        static_rate: from.static_rate,
        is_global: from.is_global,
        port_num: from.port_num,
    }
}

pub(super) unsafe extern "C" fn copy_ah_attr_from_kern(to: *mut abi::AhAttr, from: *const KernAh) {
    // SAFETY: the caller's structures.
    quiet(|| unsafe { to.write(ah(&*from)) });
}

pub(super) unsafe extern "C" fn copy_qp_attr_from_kern(to: *mut abi::QpAttr, from: *const KernQp) {
    quiet(|| {
        // SAFETY: the caller's structures.
        let (to, from) = unsafe { (&mut *to, &*from) };
        copied!(to, from: qkey rq_psn sq_psn dest_qp_num qp_access_flags cap pkey_index
            alt_pkey_index en_sqd_async_notify sq_draining max_rd_atomic max_dest_rd_atomic
            min_rnr_timer port_num timeout retry_cnt rnr_retry alt_port_num alt_timeout);
        to.qp_state = from.qp_state.cast_signed();
        to.cur_qp_state = from.cur_qp_state.cast_signed();
        to.path_mtu = from.path_mtu.cast_signed();
        to.path_mig_state = from.path_mig_state.cast_signed();
        (to.ah_attr, to.alt_ah_attr) = (ah(&from.ah_attr), ah(&from.alt_ah_attr));
        to.rate_limit = 0;
    });
}

pub(super) unsafe extern "C" fn copy_path_rec_from_kern(to: *mut Path, from: *const KernPath) {
    quiet(|| {
        // SAFETY: the caller's structures.
        let (to, from) = unsafe { (&mut *to, &*from) };
        copied!(to, from: dgid sgid dlid slid flow_label hop_limit traffic_class numb_path pkey sl
            mtu_selector rate_selector rate packet_life_time_selector packet_life_time preference);
        to.raw_traffic = from.raw_traffic.cast_signed();
        to.reversible = from.reversible.cast_signed();
        to.mtu = u8::try_from(from.mtu).unwrap_or(0);
    });
}

pub(super) unsafe extern "C" fn copy_path_rec_to_kern(to: *mut KernPath, from: *const Path) {
    quiet(|| {
        // SAFETY: the caller's structures.
        let (to, from) = unsafe { (&mut *to, &*from) };
        copied!(to, from: dgid sgid dlid slid flow_label hop_limit traffic_class numb_path pkey sl
            mtu_selector rate_selector rate packet_life_time_selector packet_life_time preference);
        to.raw_traffic = from.raw_traffic.cast_unsigned();
        to.reversible = from.reversible.cast_unsigned();
        to.mtu = from.mtu.into();
    });
}
