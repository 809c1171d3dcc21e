//! Values of `verbs.h` and of this project, one as the other.

use std::ffi::{c_char, c_int, c_uint};

use rocinante_soft::model::error::VerbsError;
use rocinante_soft::model::qp::{ModifyAttr, PeerPath, QpCaps};
use rocinante_stack::mem::Access;
use rocinante_stack::types::{Psn, Qpn};
use rocinante_stack::{AltPath, PathMigState, QpAttr};

use crate::abi::{self, WC_GRH, WC_WITH_IMM, WC_WITH_INV, mask};
pub(crate) use crate::abi::{
    address, gid, mtu_number as mtu_code, qp_state_number as state_code, qp_type,
};
use crate::log::{Level, say};
use crate::plain::{Cqe, Sender};

/// The errno of an error, which is logged.
#[cold]
#[inline(never)]
pub(crate) fn errno(what: &str, error: &VerbsError) -> c_int {
    say(Level::Info, format_args!("{what}: {error}"));
    error.errno()
}

/// Text in a structure, with a zero at its end.
pub(crate) fn text<const N: usize>(from: &str) -> [c_char; N] {
    let mut to = [0; N];
    for (to, from) in to[..N - 1].iter_mut().zip(from.bytes()) {
        // The sign of a `char` is the processor's.
        *to = from as c_char;
    }
    to
}

/// `IBV_ACCESS_OPTIONAL_RANGE`: bits that a device may ignore, such as relaxed ordering.
const OPTIONAL: u32 = 0x3ff0_0000;
/// On-demand paging and huge pages: memory is reached by its addresses anyhow.
const PAGING: u32 = 1 << 6 | 1 << 7;

/// Access flags; `None` if one is unknown.
pub(crate) fn access(bits: c_uint) -> Option<Access> {
    Access::from_bits(bits & !OPTIONAL & !PAGING)
}

pub(crate) fn caps(cap: &abi::QpCap) -> QpCaps {
    QpCaps {
        max_send_wr: cap.max_send_wr,
        max_recv_wr: cap.max_recv_wr,
        max_send_sge: cap.max_send_sge,
        max_recv_sge: cap.max_recv_sge,
        max_inline_data: cap.max_inline_data,
    }
}

/// A path to the other end; `None` if the attributes are those of no RoCE path.
pub(crate) fn path(av: &abi::AhAttr) -> Option<PeerPath> {
    if av.is_global == 0 || av.port_num != 1 {
        return None;
    }
    let remote = address(av.grh.dgid);
    if remote.is_unspecified() {
        return None;
    }
    let path = PeerPath::new(remote)
        .sgid_index(usize::from(av.grh.sgid_index))
        .traffic_class(av.grh.traffic_class)
        .hop_limit(av.grh.hop_limit)
        .flow_label(av.grh.flow_label & 0xf_ffff);
    Some(path)
}

/// All that a change may have. Capabilities cannot change, and there is no rate limit.
const KNOWN: c_int = 0x0017_ffff;

/// A change of a queue pair; `None` if a value is one that no queue pair can have.
pub(crate) fn modify(attr: &abi::QpAttr, bits: c_int) -> Option<ModifyAttr> {
    if bits & !KNOWN != 0 {
        return None;
    }
    let has = |bit: c_int| bits & bit != 0;
    let mut change = ModifyAttr { attr: QpAttr::default(), path: None };
    let to = &mut change.attr;
    if has(mask::STATE) {
        to.state = Some(abi::qp_state(attr.qp_state)?);
    }
    if has(mask::PATH_MTU) {
        to.path_mtu = Some(abi::mtu(attr.path_mtu)?);
    }
    if has(mask::ACCESS_FLAGS) {
        to.access = Some(access(attr.qp_access_flags)?);
    }
    if has(mask::AV) {
        change.path = Some(path(&attr.ah_attr)?);
    }
    if has(mask::CUR_STATE) {
        to.cur_state = Some(abi::qp_state(attr.cur_qp_state)?);
    }
    if has(mask::ALT_PATH) {
        let (alt, port) = (&attr.alt_ah_attr, attr.alt_port_num);
        let path = path(alt).filter(|_| alt.port_num == port)?;
        to.alt_path = Some(AltPath {
            remote: path.remote,
            sgid_index: alt.grh.sgid_index,
            pkey_index: attr.alt_pkey_index,
            port,
            timeout: attr.alt_timeout,
        });
    }
    if has(mask::PATH_MIG_STATE) {
        to.path_mig_state = Some(match attr.path_mig_state {
            0 => PathMigState::Migrated,
            1 => PathMigState::Rearm,
            2 => PathMigState::Armed,
            _ => return None,
        });
    }
    to.sqd_async_notify = has(mask::EN_SQD_ASYNC_NOTIFY).then_some(attr.en_sqd_async_notify != 0);
    to.pkey_index = has(mask::PKEY_INDEX).then_some(attr.pkey_index);
    to.port = has(mask::PORT).then_some(attr.port_num);
    to.qkey = has(mask::QKEY).then_some(attr.qkey);
    to.dest_qpn = has(mask::DEST_QPN).then(|| Qpn::new(attr.dest_qp_num & 0xff_ffff));
    to.rq_psn = has(mask::RQ_PSN).then(|| Psn::new(attr.rq_psn & 0xff_ffff));
    to.sq_psn = has(mask::SQ_PSN).then(|| Psn::new(attr.sq_psn & 0xff_ffff));
    to.max_dest_rd_atomic = has(mask::MAX_DEST_RD_ATOMIC).then_some(attr.max_dest_rd_atomic);
    to.max_rd_atomic = has(mask::MAX_QP_RD_ATOMIC).then_some(attr.max_rd_atomic);
    to.min_rnr_timer = has(mask::MIN_RNR_TIMER).then_some(attr.min_rnr_timer);
    to.retry_cnt = has(mask::RETRY_CNT).then_some(attr.retry_cnt);
    to.rnr_retry = has(mask::RNR_RETRY).then_some(attr.rnr_retry);
    to.timeout = has(mask::TIMEOUT).then_some(attr.timeout);
    Some(change)
}

/// Copies what `bits` names, so that a query gives it back.
pub(crate) fn remember(known: &mut abi::QpAttr, attr: &abi::QpAttr, bits: c_int) {
    macro_rules! copy {
        ($($bit:ident $($field:ident)+;)*) => {
            $(if bits & mask::$bit != 0 { $(known.$field = attr.$field;)+ })*
        };
    }
    copy! {
        EN_SQD_ASYNC_NOTIFY en_sqd_async_notify;
        ACCESS_FLAGS qp_access_flags;
        PKEY_INDEX pkey_index;
        PORT port_num;
        QKEY qkey;
        AV ah_attr;
        PATH_MTU path_mtu;
        TIMEOUT timeout;
        RETRY_CNT retry_cnt;
        RNR_RETRY rnr_retry;
        RQ_PSN rq_psn;
        MAX_QP_RD_ATOMIC max_rd_atomic;
        ALT_PATH alt_ah_attr alt_pkey_index alt_port_num alt_timeout;
        MIN_RNR_TIMER min_rnr_timer;
        SQ_PSN sq_psn;
        MAX_DEST_RD_ATOMIC max_dest_rd_atomic;
        PATH_MIG_STATE path_mig_state;
        DEST_QPN dest_qp_num;
    }
}

/// The service level of a datagram. RoCE has none, and ConnectX cards say here how it came: bit 3
/// if over UDP, below it 1 for IPv6 and 2 for IPv4. UCX's `ud_verbs` asks it where the address is
/// that the datagram was sent to, and drops a datagram over IPv4 that says nothing.
fn service_level(sender: Sender) -> u8 {
    if sender.ipv4 { 0b1010 } else { 0b1001 }
}

/// A completion.
#[inline]
pub(crate) fn wc(cqe: Cqe) -> abi::Wc {
    let (imm_data, with) = match (cqe.imm, cqe.invalidated) {
        (Some(imm), _) => (imm, WC_WITH_IMM),
        (None, Some(key)) => (key.0.to_ne_bytes(), WC_WITH_INV),
        (None, None) => ([0; 4], 0),
    };
    abi::Wc {
        wr_id: cqe.wr_id,
        status: c_int::from(cqe.status as u8),
        opcode: abi::wc_opcode_number(cqe.opcode),
        vendor_err: 0,
        byte_len: cqe.byte_len,
        imm_data,
        qp_num: cqe.qpn.value(),
        src_qp: cqe.sender.map_or(0, |sender| sender.qpn.value()),
        wc_flags: with | if cqe.sender.is_some() { WC_GRH } else { 0 },
        sl: cqe.sender.map_or(0, service_level),
        ..abi::Wc::default()
    }
}
