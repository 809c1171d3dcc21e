//! Conversions between the numbers of `verbs.h` and our types, both ways.

use std::ffi::{c_int, c_uint};
use std::net::IpAddr;
use std::ptr;

use rocinante_netdev::PortStats;
use rocinante_soft::model::device::{Atomics, HardwareAttr, Limits, MwSupport, OptionalOperations};
use rocinante_soft::model::event::AsyncEvent;
use rocinante_soft::model::qp::{PeerPath, QpCaps};
use rocinante_stack::mem::{Access, MwType, Sge};
use rocinante_stack::stats::Counters;
use rocinante_stack::types::{Key, Mtu, Psn, Qpn};
use rocinante_stack::verbs::{
    Cqe, Destination, QpEvent, QpState, QpType, RecvWr, SendData, SendOp, SendWr, Sender, WcOpcode,
    WcStatus,
};
use rocinante_stack::{AltPath, Budget, PathMigState, PeerAddress, PeerKind, PostError, QpAttr};
use rustix::io::Errno;

use super::ffi;
use super::ffi::abi::{self, mask, send_flags, wc_opcode};
pub(super) use super::ffi::abi::{
    address, gid, mtu, mtu_number, qp_state, qp_state_number, qp_type_number,
};

/// `enum ibv_access_flags`: our bits are the same.
pub(super) fn access_flags(access: Access) -> c_int {
    // A zero-based region is registered at address 0, which every device supports.
    access.without(Access::ZERO_BASED).bits() as c_int
}

/// The flags that this library knows; it ignores others.
pub(super) fn access(flags: c_uint) -> Access {
    Access::from_bits(flags & Access::KNOWN.bits()).unwrap_or(Access::NONE)
}

pub(super) fn cap(caps: QpCaps) -> abi::QpCap {
    let QpCaps { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data } = caps;
    abi::QpCap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data }
}

pub(super) fn caps(cap: abi::QpCap) -> QpCaps {
    let abi::QpCap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data } = cap;
    QpCaps { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data }
}

/// The limits of a device. It reports its limit of inline data only when a queue pair is made.
pub(super) fn limits(attr: &abi::DeviceAttr) -> Limits {
    let count = |count: c_int| u32::try_from(count).unwrap_or(0);
    Limits::default()
        .max_qp(count(attr.max_qp))
        .max_mr(count(attr.max_mr))
        .max_mw(count(attr.max_mw))
        .max_cq(count(attr.max_cq))
        .max_cqe(count(attr.max_cqe))
        .max_qp_wr(count(attr.max_qp_wr))
        .max_sge(count(attr.max_sge))
        .max_inline_data(u32::MAX)
        .max_srq(count(attr.max_srq))
        .max_srq_wr(count(attr.max_srq_wr))
        .max_srq_sge(count(attr.max_srq_sge))
        .max_qp_rd_atom(count(attr.max_qp_rd_atom).min(count(attr.max_qp_init_rd_atom)))
}

/// From the bits of `enum ib_uverbs_device_cap_flags`.
pub(super) fn optional(flags: u64) -> OptionalOperations {
    let has = |bit: u32| flags >> bit & 1 == 1;
    let mut optional = OptionalOperations::NONE;
    optional.flush_global = has(38);
    optional.flush_persistent = has(39);
    optional.atomic_write = has(40);
    optional
}

/// The types of memory windows of a device.
pub(super) fn windows(attr: &abi::DeviceAttr) -> MwSupport {
    let has = |bit| attr.device_cap_flags & bit != 0;
    MwSupport {
        type_1: has(abi::cap::MEM_WINDOW),
        type_2a: has(abi::cap::MEM_WINDOW_TYPE_2A),
        type_2b: has(abi::cap::MEM_WINDOW_TYPE_2B),
    }
}

/// `enum ibv_mw_type`.
pub(super) fn mw_type_number(mw_type: MwType) -> c_int {
    match mw_type {
        MwType::Type1 => 1,
        MwType::Type2 => 2,
    }
}

/// The other attributes of a device.
pub(super) fn hardware_attr(
    attr: &abi::DeviceAttr,
    port_attr: &abi::PortAttr,
    (port, gid_indices): (u8, Vec<u8>),
) -> HardwareAttr {
    #[allow(clippy::cast_sign_loss, clippy::unnecessary_cast)]
    let firmware = attr.fw_ver.iter().map(|byte| *byte as u8).take_while(|byte| *byte != 0);
    let mut hardware = HardwareAttr::of_port(port, mtu(port_attr.max_mtu).unwrap_or(Mtu::Mtu4096));
    hardware.firmware = firmware.map(char::from).collect();
    hardware.node_guid = u64::from_be_bytes(attr.node_guid);
    hardware.vendor_id = attr.vendor_id;
    hardware.vendor_part_id = attr.vendor_part_id;
    hardware.hw_ver = attr.hw_ver;
    hardware.max_mr_size = attr.max_mr_size;
    hardware.atomics = match attr.atomic_cap {
        1 => Atomics::Device,
        2 => Atomics::Global,
        _ => Atomics::None,
    };
    hardware.max_msg_sz = port_attr.max_msg_sz;
    hardware.gid_indices = gid_indices;
    hardware
}

/// Adds the value of a file of `hw_counters` or `counters`, under the names of rxe and of mlx5.
pub(super) fn count(name: &str, value: u64, transport: &mut Counters, port: &mut PortStats) {
    let field = match name {
        "sent_pkts" | "port_xmit_packets" => {
            port.tx_datagrams = port.tx_datagrams.max(value);
            &mut transport.sent_pkts
        }
        "rcvd_pkts" | "port_rcv_packets" => {
            port.rx_datagrams = port.rx_datagrams.max(value);
            &mut transport.rcvd_pkts
        }
        // In words of four bytes.
        "port_xmit_data" => {
            port.tx_bytes = value.saturating_mul(4);
            return;
        }
        "port_rcv_data" => {
            port.rx_bytes = value.saturating_mul(4);
            return;
        }
        "duplicate_request" => &mut transport.duplicate_request,
        "out_of_seq_request" | "out_of_sequence" => &mut transport.out_of_seq_request,
        "send_rnr_err" | "out_of_buffer" => &mut transport.send_rnr_err,
        "rcvd_rnr_err" => &mut transport.rcvd_rnr_err,
        "rcvd_seq_err" | "packet_seq_err" => &mut transport.rcvd_seq_err,
        "implied_nak_seq_err" => &mut transport.implied_nak_seq_err,
        "local_ack_timeout_err" => &mut transport.local_ack_timeout_err,
        "retry_exceeded_err" => &mut transport.retry_exceeded_err,
        "retry_rnr_exceeded_err" | "rnr_nak_retry_err" => &mut transport.retry_rnr_exceeded_err,
        "resp_remote_access_errors" => &mut transport.remote_access_errors,
        "np_cnp_sent" => &mut transport.sent_cnp,
        "rp_cnp_handled" => &mut transport.rcvd_cnp,
        "np_ecn_marked_roce_packets" => &mut transport.rcvd_ecn_ce,
        _ => return,
    };
    *field = value.max(*field);
}

/// Attributes and their mask. Our port 1 is the device's `port`.
pub(super) fn qp_attr(attr: &QpAttr, path: Option<&abi::AhAttr>, port: u8) -> (abi::QpAttr, c_int) {
    let mut out = abi::QpAttr::default();
    let mut bits = 0;
    macro_rules! set {
        ($($from:ident => $to:ident, $bit:ident, |$value:ident| $with:expr;)*) => {
            $(if let Some($value) = attr.$from {
                out.$to = $with;
                bits |= mask::$bit;
            })*
        };
    }
    set! {
        state => qp_state, STATE, |state| qp_state_number(state);
        cur_state => cur_qp_state, CUR_STATE, |state| qp_state_number(state);
        path_mig_state => path_mig_state, PATH_MIG_STATE, |state| state as c_int;
        sqd_async_notify => en_sqd_async_notify, EN_SQD_ASYNC_NOTIFY, |wanted| u8::from(wanted);
        pkey_index => pkey_index, PKEY_INDEX, |index| index;
        port => port_num, PORT, |_one| port;
        access => qp_access_flags, ACCESS_FLAGS, |access| access.bits();
        qkey => qkey, QKEY, |qkey| qkey;
        path_mtu => path_mtu, PATH_MTU, |mtu| mtu_number(mtu);
        dest_qpn => dest_qp_num, DEST_QPN, |qpn| qpn.value();
        rq_psn => rq_psn, RQ_PSN, |psn| psn.value();
        max_dest_rd_atomic => max_dest_rd_atomic, MAX_DEST_RD_ATOMIC, |count| count;
        min_rnr_timer => min_rnr_timer, MIN_RNR_TIMER, |code| code;
        sq_psn => sq_psn, SQ_PSN, |psn| psn.value();
        max_rd_atomic => max_rd_atomic, MAX_QP_RD_ATOMIC, |count| count;
        retry_cnt => retry_cnt, RETRY_CNT, |count| count;
        rnr_retry => rnr_retry, RNR_RETRY, |count| count;
        timeout => timeout, TIMEOUT, |code| code;
    }
    if let Some(path) = path {
        out.ah_attr = *path;
        bits |= mask::AV;
    }
    if let Some(alt) = attr.alt_path {
        out.alt_ah_attr = self::path(&PeerPath::new(alt.remote), alt.sgid_index, port);
        (out.alt_pkey_index, out.alt_port_num) = (alt.pkey_index, port);
        out.alt_timeout = alt.timeout;
        bits |= mask::ALT_PATH;
    }
    (out, bits)
}

/// All attributes that [`qp_attr_back`] reads.
pub(super) const QUERY_ALL: c_int = mask::STATE
    | mask::PKEY_INDEX
    | mask::PORT
    | mask::ACCESS_FLAGS
    | mask::QKEY
    | mask::AV
    | mask::PATH_MTU
    | mask::DEST_QPN
    | mask::RQ_PSN
    | mask::MAX_DEST_RD_ATOMIC
    | mask::MIN_RNR_TIMER
    | mask::SQ_PSN
    | mask::MAX_QP_RD_ATOMIC
    | mask::RETRY_CNT
    | mask::RNR_RETRY
    | mask::TIMEOUT
    | mask::ALT_PATH
    | mask::PATH_MIG_STATE
    | mask::CAP;

/// The attributes that a queue pair at `local` reports, without those that its state has not set
/// yet.
pub(super) fn qp_attr_back(
    attr: &abi::QpAttr,
    qp_type: QpType,
    local: IpAddr,
) -> (QpState, QpAttr) {
    let state = qp_state(attr.qp_state).unwrap_or(QpState::Err);
    let mut out = QpAttr { state: Some(state), ..QpAttr::default() };
    if state == QpState::Reset {
        return (state, out);
    }
    out.pkey_index = Some(attr.pkey_index);
    out.port = Some(1);
    let (receives, sends) = (state.receives() || state == QpState::Err, state.takes_sends());
    if sends {
        out.sq_psn = Some(Psn::new(attr.sq_psn));
    }
    if qp_type == QpType::Ud {
        out.qkey = Some(attr.qkey);
        return (state, out);
    }
    out.access = Some(access(attr.qp_access_flags));
    if attr.ah_attr.is_global != 0 && receives {
        out.peer = Some(PeerAddress {
            local,
            remote: address(attr.ah_attr.grh.dgid),
            path: 0,
            budget: Budget::STANDARD,
            kind: PeerKind::Standard,
        });
        out.path_mtu = mtu(attr.path_mtu);
        out.dest_qpn = Some(Qpn::new(attr.dest_qp_num));
        out.rq_psn = Some(Psn::new(attr.rq_psn));
        out.alt_path = (attr.alt_ah_attr.is_global != 0).then(|| AltPath {
            remote: address(attr.alt_ah_attr.grh.dgid),
            sgid_index: attr.alt_ah_attr.grh.sgid_index,
            pkey_index: attr.alt_pkey_index,
            port: 1,
            timeout: attr.alt_timeout,
        });
        // Devices without migration answer 0, which is also what most programs set.
        out.path_mig_state = match attr.path_mig_state {
            1 => Some(PathMigState::Rearm),
            2 => Some(PathMigState::Armed),
            _ => None,
        };
    }
    if qp_type == QpType::Rc && out.peer.is_some() {
        out.max_dest_rd_atomic = Some(attr.max_dest_rd_atomic);
        out.min_rnr_timer = Some(attr.min_rnr_timer);
    }
    if qp_type == QpType::Rc && sends {
        out.max_rd_atomic = Some(attr.max_rd_atomic);
        out.retry_cnt = Some(attr.retry_cnt);
        out.rnr_retry = Some(attr.rnr_retry);
        out.timeout = Some(attr.timeout);
    }
    (state, out)
}

/// The path to the peer, from the GID of this index at this port.
pub(super) fn path(path: &PeerPath, sgid_index: u8, port: u8) -> abi::AhAttr {
    let grh = abi::GlobalRoute {
        dgid: gid(path.remote),
        flow_label: path.flow_label & 0xf_ffff,
        sgid_index,
        hop_limit: path.hop_limit,
        traffic_class: path.traffic_class,
    };
    abi::AhAttr { grh, is_global: 1, port_num: port, ..abi::AhAttr::default() }
}

/// A send request in the library's form, and the element for its inline data, which the caller puts
/// into its list. Both are valid as long as the borrows of `wr`, and as long as `ah`, the address
/// of the handle of a datagram. `None` for an operation without such a form.
#[inline]
pub(super) fn send_wr(wr: &SendWr<'_>, ah: u64) -> Option<(abi::SendWr, Option<Sge>)> {
    let (opcode, imm, remote) = operation(&wr.op, ah)?;
    let mut flags = 0;
    for (wanted, flag) in [
        (wr.signaled, send_flags::SIGNALED),
        (wr.solicited, send_flags::SOLICITED),
        (wr.fence, send_flags::FENCE),
    ] {
        if wanted {
            flags |= flag;
        }
    }
    let mut out = abi::SendWr {
        wr_id: wr.wr_id,
        next: ptr::null_mut(),
        sg_list: ptr::null(),
        num_sge: 0,
        opcode,
        send_flags: flags,
        imm_data: imm,
        wr: remote,
        qp_type: 0,
        bind_mw: bind(&wr.op),
    };
    let inline = match wr.data {
        SendData::Sges(list) => {
            out.sg_list = list.as_ptr();
            out.num_sge = list.len() as c_int;
            None
        }
        SendData::Inline([]) => None,
        SendData::Inline(bytes) => {
            out.send_flags |= send_flags::INLINE;
            out.num_sge = 1;
            Some(Sge { addr: bytes.as_ptr() as u64, len: bytes.len() as u32, lkey: Key::default() })
        }
    };
    Some((out, inline))
}

/// The binding of a request, without window and region, which the library takes by their addresses.
#[inline]
fn bind(op: &SendOp) -> abi::BindMw {
    let none = abi::BindMw::NONE;
    match *op {
        SendOp::BindMw { rkey, addr, len, access, .. } => {
            let info =
                abi::MwBindInfo { addr, length: len, access: access.bits() as c_uint, ..none.info };
            abi::BindMw { rkey: rkey.0, info, ..none }
        }
        _ => none,
    }
}

/// Opcode, immediate data or the key to invalidate, and the union `wr`.
#[inline]
fn operation(op: &SendOp, ah: u64) -> Option<(c_int, [u8; 4], abi::Remote)> {
    // Two 32-bit numbers in one word, in memory order.
    let pair = |first: u32, second: u32| {
        let (low, high) =
            if cfg!(target_endian = "little") { (first, second) } else { (second, first) };
        u64::from(high) << 32 | u64::from(low)
    };
    // The key of an RDMA operation is in the first four bytes of the second word.
    let rdma = |remote: u64, rkey: u32| abi::Remote {
        remote_addr: remote,
        compare_add: pair(rkey, 0),
        ..abi::Remote::default()
    };
    let ud = |to: &Destination| abi::Remote {
        remote_addr: ah,
        compare_add: pair(to.qpn.value(), to.qkey),
        ..abi::Remote::default()
    };
    Some(match *op {
        SendOp::Write { remote, rkey, imm: None } => (0, [0; 4], rdma(remote, rkey.0)),
        SendOp::Write { remote, rkey, imm: Some(imm) } => (1, imm, rdma(remote, rkey.0)),
        SendOp::Send { imm: None } => (2, [0; 4], abi::Remote::default()),
        SendOp::Send { imm: Some(imm) } => (3, imm, abi::Remote::default()),
        SendOp::SendTo { to, imm: None } => (2, [0; 4], ud(&to)),
        SendOp::SendTo { to, imm: Some(imm) } => (3, imm, ud(&to)),
        SendOp::Read { remote, rkey } => (4, [0; 4], rdma(remote, rkey.0)),
        SendOp::CompareSwap { remote, rkey, compare, swap } => {
            let wr = abi::Remote { remote_addr: remote, compare_add: compare, swap, rkey: rkey.0 };
            (5, [0; 4], wr)
        }
        SendOp::FetchAdd { remote, rkey, add } => {
            let wr = abi::Remote { remote_addr: remote, compare_add: add, swap: 0, rkey: rkey.0 };
            (6, [0; 4], wr)
        }
        SendOp::LocalInv { rkey } => (7, rkey.0.to_ne_bytes(), abi::Remote::default()),
        SendOp::BindMw { .. } => (8, [0; 4], abi::Remote::default()),
        SendOp::SendInv { rkey } => (9, rkey.0.to_ne_bytes(), abi::Remote::default()),
        // FLUSH and ATOMIC WRITE have a call of their own (`ibv_wr_flush`).
        _ => return None,
    })
}

/// A receive request in the library's form; else as [`send_wr`].
#[inline]
pub(super) fn recv_wr(wr: &RecvWr<'_>) -> abi::RecvWr {
    abi::RecvWr {
        wr_id: wr.wr_id,
        next: ptr::null_mut(),
        sg_list: wr.sges.as_ptr(),
        num_sge: wr.sges.len() as c_int,
    }
}

/// The error for a request that the device did not post.
pub(super) fn post_error(result: c_int) -> PostError {
    // Functions of the data path return an errno, sometimes a negative one.
    match result.abs() {
        errno if errno == Errno::NOMEM.raw_os_error() => PostError::Full,
        errno => PostError::Refused(errno),
    }
}

/// `enum ibv_wc_status`, by number. Statuses of services that are not used here are general errors.
pub(super) fn wc_status(number: c_int) -> WcStatus {
    let found = WcStatus::ALL.into_iter().find(|status| *status as c_int == number);
    found.unwrap_or(WcStatus::GeneralErr)
}

/// `IBV_WC_RECV`.
const WC_RECV: c_int = 128;

/// A completion.
#[inline]
pub(super) fn cqe(wc: &abi::Wc) -> Cqe {
    // Almost all completions succeed.
    let status = if wc.status == 0 { WcStatus::Success } else { wc_status(wc.status) };
    // Without success only number, status and queue pair mean anything (ibv_poll_cq(3)).
    let success = status == WcStatus::Success;
    Cqe {
        wr_id: wc.wr_id,
        status,
        opcode: if success { wc_opcode(wc.opcode).unwrap_or_default() } else { WcOpcode::Unknown },
        byte_len: if success { wc.byte_len } else { 0 },
        imm: (success && wc.wc_flags & abi::WC_WITH_IMM != 0).then_some(wc.imm_data),
        invalidated: (success && wc.wc_flags & abi::WC_WITH_INV != 0)
            .then(|| Key(u32::from_ne_bytes(wc.imm_data))),
        qpn: Qpn::new(wc.qp_num),
        context: 0,
        // Soft-RoCE sets this flag on every receive. The queue knows whether its receives are
        // datagrams.
        sender: (success && wc.opcode == WC_RECV && wc.wc_flags & abi::WC_GRH != 0)
            .then(|| Sender { qpn: Qpn::new(wc.src_qp), ipv4: false }),
        // The device does not report whether the sender requested an event.
        solicited: !success,
    }
}

/// The port of an event, if it concerns one. The caller ignores events of ports that the device
/// does not use.
pub(super) fn port(event: &ffi::Event) -> Option<u32> {
    event.number.filter(|_| matches!(event.kind, 9..=13 | 17 | 18))
}

/// `enum ibv_event_type`.
pub(super) fn event(event: ffi::Event) -> AsyncEvent {
    let of_qp = |number: Option<u32>, event| AsyncEvent::Qp {
        qpn: Qpn::new(number.unwrap_or_default()),
        event,
    };
    match event.kind {
        0 => AsyncEvent::CqOverflow { cq: event.number.unwrap_or_default() },
        1 => of_qp(event.number, QpEvent::Fatal),
        2 => of_qp(event.number, QpEvent::ReqErr),
        3 => of_qp(event.number, QpEvent::AccessErr),
        4 => of_qp(event.number, QpEvent::CommEst),
        5 => of_qp(event.number, QpEvent::SqDrained),
        8 => AsyncEvent::DeviceFatal,
        9 => AsyncEvent::PortActive,
        10 => AsyncEvent::PortErr,
        14 => AsyncEvent::SrqErr { srq: event.number.unwrap_or_default() },
        15 => AsyncEvent::SrqLimitReached { srq: event.number.unwrap_or_default() },
        16 => of_qp(event.number, QpEvent::LastWqeReached),
        18 => AsyncEvent::GidChange,
        kind => AsyncEvent::Other { kind, number: event.number },
    }
}

#[cfg(test)]
mod tests;
