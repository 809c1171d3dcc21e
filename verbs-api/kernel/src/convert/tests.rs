//! Every number of `verbs.h` in use, both ways.

use rocinante_stack::verbs::AhId;

use super::*;

#[test]
fn states_both_ways() {
    // enum ibv_qp_state
    let numbers = [0, 1, 2, 3, 4, 5, 6];
    for (state, number) in QpState::ALL.into_iter().zip(numbers) {
        assert_eq!(qp_state_number(state), number, "{state}");
        assert_eq!(qp_state(number), Some(state));
    }
    // UNKNOWN, and an invalid number.
    assert_eq!([7, -1].map(qp_state), [None; 2]);
    // enum ibv_qp_type
    assert_eq!(QpType::ALL.map(qp_type_number), [2, 3, 4]);
}

#[test]
fn path_mtus_both_ways() {
    let all = [256, 512, 1024, 2048, 4096];
    for (number, bytes) in (1..).zip(all) {
        let size = Mtu::from_bytes(bytes).unwrap();
        assert_eq!(mtu_number(size), number);
        assert_eq!(mtu(number), Some(size));
    }
    assert_eq!([0, 6, -3, 32].map(mtu), [None; 4]);
}

#[test]
fn access_flags_both_ways() {
    // enum ibv_access_flags
    let flags = [
        (Access::LOCAL_WRITE, 1),
        (Access::REMOTE_WRITE, 2),
        (Access::REMOTE_READ, 4),
        (Access::REMOTE_ATOMIC, 8),
        (Access::ALL, 15),
        (Access::MW_BIND, 16),
        (Access::NONE, 0),
    ];
    for (flag, bits) in flags {
        assert_eq!(access_flags(flag), bits);
        // With flags that this library does not know: on-demand paging, relaxed ordering.
        assert_eq!(access(bits as c_uint | 0x10_0040), flag);
    }
    // Zero-based decides the address of registration, and is no flag of the registration.
    assert_eq!(access_flags(Access::ALL | Access::ZERO_BASED), 15);
    assert_eq!(access(32), Access::ZERO_BASED);
}

#[test]
fn addresses_and_gids_both_ways() {
    for (text, bytes) in [
        ("10.77.0.2", [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 77, 0, 2]),
        ("fd77::2", [0xfd, 0x77, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2]),
    ] {
        let parsed: IpAddr = text.parse().unwrap();
        assert_eq!(gid(parsed), bytes);
        assert_eq!(address(bytes), parsed);
    }
}

#[test]
fn capabilities_both_ways() {
    let caps = QpCaps {
        max_send_wr: 1,
        max_recv_wr: 2,
        max_send_sge: 3,
        max_recv_sge: 4,
        max_inline_data: 5,
    };
    assert_eq!(super::caps(cap(caps)), caps);
}

/// Each attribute with a distinct value.
fn attributes() -> QpAttr {
    QpAttr {
        state: Some(QpState::Rts),
        sqd_async_notify: None,
        pkey_index: Some(0),
        port: Some(1),
        access: Some(Access::REMOTE_READ),
        qkey: Some(0x8877_6655),
        peer: None,
        path_mtu: Some(Mtu::Mtu2048),
        dest_qpn: Some(Qpn::new(0x11)),
        rq_psn: Some(Psn::new(0x22)),
        max_dest_rd_atomic: Some(3),
        min_rnr_timer: Some(4),
        sq_psn: Some(Psn::new(0x55)),
        max_rd_atomic: Some(6),
        retry_cnt: Some(7),
        rnr_retry: Some(5),
        timeout: Some(18),
        cur_state: None,
        alt_path: Some(AltPath {
            remote: [10, 0, 0, 3].into(),
            sgid_index: 4,
            pkey_index: 0,
            port: 1,
            timeout: 21,
        }),
        path_mig_state: Some(PathMigState::Armed),
    }
}

#[test]
fn attributes_both_ways() {
    let (local, remote) = ([10, 0, 0, 1].into(), IpAddr::from([10, 0, 0, 2]));
    let peer = PeerPath::new(remote).traffic_class(0x68).hop_limit(3).flow_label(0xfff_1234);
    let path = path(&peer, 9, 2);
    assert_eq!((path.grh.sgid_index, path.grh.hop_limit, path.grh.traffic_class), (9, 3, 0x68));
    // Twenty bits.
    assert_eq!((path.grh.flow_label, path.port_num, path.is_global), (0xf_1234, 2, 1));
    let (there, mask) = qp_attr(&attributes(), Some(&path), 2);
    assert_eq!(mask | mask::CAP, QUERY_ALL);
    assert_eq!(there.port_num, 2);
    let (state, back) = qp_attr_back(&there, QpType::Rc, local);
    assert_eq!(state, QpState::Rts);
    let found = back.peer.unwrap();
    assert_eq!((found.local, found.remote, found.budget), (local, remote, Budget::STANDARD));
    assert_eq!(QpAttr { peer: None, ..back }, QpAttr { qkey: None, ..attributes() });
    let (_, back) = qp_attr_back(&there, QpType::Uc, local);
    assert_eq!((back.timeout, back.min_rnr_timer, back.qkey), (None, None, None));
    assert_eq!((back.rq_psn, back.dest_qpn), (attributes().rq_psn, attributes().dest_qpn));
    let (_, back) = qp_attr_back(&there, QpType::Ud, local);
    assert_eq!((back.qkey, back.sq_psn), (attributes().qkey, attributes().sq_psn));
    assert_eq!((back.peer, back.access, back.dest_qpn), (None, None, None));
}

#[test]
fn only_what_is_set_is_in_the_mask() {
    let only = |attr: QpAttr| qp_attr(&attr, None, 1).1;
    assert_eq!(only(QpAttr::default()), 0);
    // enum ibv_qp_attr_mask
    let bits = [
        (QpAttr { state: Some(QpState::Err), ..QpAttr::default() }, 0),
        (QpAttr { sqd_async_notify: Some(true), ..QpAttr::default() }, 2),
        (QpAttr { access: Some(Access::NONE), ..QpAttr::default() }, 3),
        (QpAttr { pkey_index: Some(0), ..QpAttr::default() }, 4),
        (QpAttr { port: Some(1), ..QpAttr::default() }, 5),
        (QpAttr { qkey: Some(0), ..QpAttr::default() }, 6),
        (QpAttr { path_mtu: Some(Mtu::Mtu256), ..QpAttr::default() }, 8),
        (QpAttr { timeout: Some(0), ..QpAttr::default() }, 9),
        (QpAttr { retry_cnt: Some(0), ..QpAttr::default() }, 10),
        (QpAttr { rnr_retry: Some(0), ..QpAttr::default() }, 11),
        (QpAttr { rq_psn: Some(Psn::new(0)), ..QpAttr::default() }, 12),
        (QpAttr { max_rd_atomic: Some(0), ..QpAttr::default() }, 13),
        (QpAttr { min_rnr_timer: Some(0), ..QpAttr::default() }, 15),
        (QpAttr { sq_psn: Some(Psn::new(0)), ..QpAttr::default() }, 16),
        (QpAttr { max_dest_rd_atomic: Some(0), ..QpAttr::default() }, 17),
        (QpAttr { dest_qpn: Some(Qpn::new(0)), ..QpAttr::default() }, 20),
        (QpAttr { cur_state: Some(QpState::Rts), ..QpAttr::default() }, 1),
        (QpAttr { alt_path: attributes().alt_path, ..QpAttr::default() }, 14),
        (QpAttr { path_mig_state: Some(PathMigState::Rearm), ..QpAttr::default() }, 18),
    ];
    for (attr, bit) in bits {
        assert_eq!(only(attr), 1 << bit, "{attr:?}");
    }
    let notify = QpAttr { sqd_async_notify: Some(true), ..QpAttr::default() };
    assert_eq!(qp_attr(&notify, None, 1).0.en_sqd_async_notify, 1);
}

#[test]
fn a_queue_pair_says_only_what_its_state_has_set() {
    let local = [10, 0, 0, 1].into();
    let mut attr = abi::QpAttr::default();
    let (state, said) = qp_attr_back(&attr, QpType::Rc, local);
    assert_eq!(state, QpState::Reset);
    assert_eq!(said, QpAttr { state: Some(QpState::Reset), ..QpAttr::default() });
    attr.qp_state = 1;
    let (_, said) = qp_attr_back(&attr, QpType::Rc, local);
    assert!(said.port == Some(1) && said.peer.is_none() && said.sq_psn.is_none());
    attr.qp_state = 2;
    attr.ah_attr.is_global = 1;
    attr.path_mtu = 3;
    let (_, said) = qp_attr_back(&attr, QpType::Rc, local);
    assert!(said.path_mtu == Some(Mtu::Mtu1024) && said.sq_psn.is_none());
}

#[test]
fn send_requests_in_the_librarys_form() {
    let sges = [Sge { addr: 0x1000, len: 9, lkey: Key(0x77) }; 2];
    let (remote, rkey) = (0x8000, Key(0xaabb_ccdd));
    let imm = Some([1, 2, 3, 4]);
    let rdma = abi::Remote { remote_addr: remote, ..abi::Remote::default() };
    let key_first = u64::from_ne_bytes({
        let mut bytes = [0; 8];
        bytes[..4].copy_from_slice(&rkey.0.to_ne_bytes());
        bytes
    });
    let rdma = abi::Remote { compare_add: key_first, ..rdma };
    let atomic =
        |compare_add, swap| abi::Remote { remote_addr: remote, compare_add, swap, rkey: rkey.0 };
    // enum ibv_wr_opcode
    for (op, opcode, imm_data, wr) in [
        (SendOp::Write { remote, rkey, imm: None }, 0, [0; 4], rdma),
        (SendOp::Write { remote, rkey, imm }, 1, [1, 2, 3, 4], rdma),
        (SendOp::Send { imm: None }, 2, [0; 4], abi::Remote::default()),
        (SendOp::Send { imm }, 3, [1, 2, 3, 4], abi::Remote::default()),
        (SendOp::Read { remote, rkey }, 4, [0; 4], rdma),
        (SendOp::CompareSwap { remote, rkey, compare: 5, swap: 6 }, 5, [0; 4], atomic(5, 6)),
        (SendOp::FetchAdd { remote, rkey, add: 7 }, 6, [0; 4], atomic(7, 0)),
    ] {
        let wr_of = SendWr::new(op, SendData::Sges(&sges)).wr_id(42).signaled(false);
        let (out, inline) = send_wr(&wr_of, 0).unwrap();
        assert_eq!(
            (out.wr_id, out.opcode, out.imm_data, out.wr),
            (42, opcode, imm_data, wr),
            "{op:?}"
        );
        assert_eq!((out.sg_list, out.num_sge, inline), (sges.as_ptr(), 2, None));
        assert!(out.next.is_null() && out.send_flags == 0 && out.qp_type == 0);
        assert!(out.bind_mw.mw.is_null() && out.bind_mw.info.mr.is_null());
    }
}

#[test]
fn requests_about_windows_in_the_librarys_form() {
    let form = |op| {
        let data = SendData::Sges(&[]);
        send_wr(&SendWr::new(op, data).wr_id(1), 0).unwrap().0
    };
    // The key is in host byte order, in place of the immediate data.
    let rkey = Key(0x0102_0304);
    for (op, opcode) in [(SendOp::LocalInv { rkey }, 7), (SendOp::SendInv { rkey }, 9)] {
        let out = form(op);
        assert_eq!((out.opcode, u32::from_ne_bytes(out.imm_data)), (opcode, rkey.0));
    }
    let access = Access::REMOTE_WRITE | Access::ZERO_BASED;
    let (mw, region, addr, len) = (Key(0x0102_0303), Key(9), 0x7000, 1 << 33);
    let out = form(SendOp::BindMw { mw, rkey, region, addr, len, access });
    let abi::MwBindInfo { addr: at, length, access: flags, .. } = out.bind_mw.info;
    assert_eq!((out.opcode, out.bind_mw.rkey), (8, rkey.0));
    // IBV_ACCESS_REMOTE_WRITE, IBV_ACCESS_ZERO_BASED
    assert_eq!((at, length, flags), (0x7000, 1 << 33, 2 | 32));
}

#[test]
fn datagrams_in_the_librarys_form() {
    let to = Destination { ah: AhId(3), qpn: Qpn::new(0x12_3456), qkey: 0x8765_4321 };
    let mut words = [0; 8];
    words[..4].copy_from_slice(&0x12_3456u32.to_ne_bytes());
    words[4..].copy_from_slice(&0x8765_4321u32.to_ne_bytes());
    let compare_add = u64::from_ne_bytes(words);
    let ud = abi::Remote { remote_addr: 0x7f00, compare_add, ..abi::Remote::default() };
    for (imm, opcode, imm_data) in [(None, 2, [0; 4]), (Some([4, 3, 2, 1]), 3, [4, 3, 2, 1])] {
        let (op, data) = (SendOp::SendTo { to, imm }, SendData::Sges(&[]));
        let wr = SendWr::new(op, data).wr_id(1);
        let (out, _) = send_wr(&wr, 0x7f00).unwrap();
        assert_eq!((out.opcode, out.imm_data, out.wr), (opcode, imm_data, ud));
    }
    let mut wc = abi::Wc::default();
    assert_eq!(cqe(&wc).sender, None);
    (wc.src_qp, wc.wc_flags, wc.opcode) = (0x99, abi::WC_GRH, 128);
    assert_eq!(cqe(&wc).sender.map(|sender| sender.qpn), Some(Qpn::new(0x99)));
    // A failed receive, and a completion that is no receive.
    for (status, opcode) in [(5, 128), (0, 0)] {
        (wc.status, wc.opcode) = (status, opcode);
        assert_eq!(cqe(&wc).sender, None);
    }
}

#[test]
fn flags_of_send_requests() {
    // enum ibv_send_flags
    for (index, bit) in [2, 4, 1].into_iter().enumerate() {
        let on = |flag| index == flag;
        let op = SendOp::Send { imm: None };
        let data = SendData::Inline(&[]);
        let mut wr = SendWr::new(op, data).wr_id(0).signaled(on(0));
        wr.solicited = on(1);
        wr.fence = on(2);
        let (out, inline) = send_wr(&wr, 0).unwrap();
        // Without inline data, no element and no flag for it.
        assert_eq!((out.send_flags, out.num_sge, inline), (bit, 0, None));
    }
    let bytes = [1, 2, 3];
    let wr = SendWr::new(SendOp::Send { imm: None }, SendData::Inline(&bytes)).signaled(false);
    let (out, inline) = send_wr(&wr, 0).unwrap();
    assert_eq!((out.send_flags, out.num_sge), (8, 1));
    assert_eq!(inline, Some(Sge { addr: bytes.as_ptr() as u64, len: 3, lkey: Key(0) }));
}

#[test]
fn receive_requests_in_the_librarys_form() {
    let sges = [Sge { addr: 0x1000, len: 9, lkey: Key(0x77) }];
    let out = recv_wr(&RecvWr { wr_id: 3, sges: &sges });
    assert_eq!((out.wr_id, out.sg_list, out.num_sge), (3, sges.as_ptr(), 1));
    assert_eq!(recv_wr(&RecvWr { wr_id: 3, sges: &[] }).num_sge, 0);
}

#[test]
fn statuses_of_completions() {
    // enum ibv_wc_status
    let names = [
        "SUCCESS",
        "LOC_LEN_ERR",
        "LOC_QP_OP_ERR",
        "GENERAL_ERR",
        "LOC_PROT_ERR",
        "WR_FLUSH_ERR",
        "MW_BIND_ERR",
        "BAD_RESP_ERR",
        "LOC_ACCESS_ERR",
        "REM_INV_REQ_ERR",
        "REM_ACCESS_ERR",
        "REM_OP_ERR",
        "RETRY_EXC_ERR",
        "RNR_RETRY_EXC_ERR",
        "GENERAL_ERR",
        "GENERAL_ERR",
        "REM_ABORT_ERR",
        "GENERAL_ERR",
        "GENERAL_ERR",
        "FATAL_ERR",
        "RESP_TIMEOUT_ERR",
        "GENERAL_ERR",
    ];
    for (number, name) in (0..).zip(names) {
        assert_eq!(wc_status(number).name(), name, "{number}");
    }
    assert_eq!(wc_status(-1), WcStatus::GeneralErr);
}

#[test]
fn completions() {
    let opcodes = [
        (0, WcOpcode::Send),
        (1, WcOpcode::RdmaWrite),
        (2, WcOpcode::RdmaRead),
        (3, WcOpcode::CompSwap),
        (4, WcOpcode::FetchAdd),
        (5, WcOpcode::BindMw),
        (6, WcOpcode::LocalInv),
        (128, WcOpcode::Recv),
        (129, WcOpcode::RecvRdmaWithImm),
    ];
    for (number, opcode) in opcodes {
        assert_eq!(wc_opcode(number), Some(opcode));
    }
    assert_eq!(wc_opcode(7), None);
    let mut wc = abi::Wc::default();
    (wc.wr_id, wc.opcode, wc.byte_len, wc.qp_num) = (7, 129, 100, 0x12_3456);
    (wc.imm_data, wc.wc_flags) = ([9, 8, 7, 6], abi::WC_WITH_IMM);
    let expected = Cqe {
        wr_id: 7,
        status: WcStatus::Success,
        opcode: WcOpcode::RecvRdmaWithImm,
        byte_len: 100,
        imm: Some([9, 8, 7, 6]),
        invalidated: None,
        qpn: Qpn::new(0x12_3456),
        context: 0,
        sender: None,
        solicited: false,
    };
    assert_eq!(cqe(&wc), expected);
    wc.wc_flags = abi::WC_WITH_INV;
    let key = Some(Key(u32::from_ne_bytes([9, 8, 7, 6])));
    assert_eq!(cqe(&wc), Cqe { imm: None, invalidated: key, ..expected });
    wc.wc_flags = abi::WC_WITH_IMM;
    (wc.status, wc.opcode) = (10, 77);
    let failed = cqe(&wc);
    assert!(
        wc.byte_len > 0 && wc.wc_flags & abi::WC_WITH_IMM != 0,
        "fields that must not be shown"
    );
    let shown = (failed.status, failed.opcode, failed.byte_len, failed.imm, failed.solicited);
    assert_eq!(shown, (WcStatus::RemAccessErr, WcOpcode::Unknown, 0, None, true));
}

#[test]
fn why_nothing_was_posted() {
    let nomem = Errno::NOMEM.raw_os_error();
    assert_eq!([nomem, -nomem].map(post_error), [PostError::Full; 2]);
    let inval = Errno::INVAL.raw_os_error();
    assert_eq!(post_error(inval), PostError::Refused(inval));
}

#[test]
fn asynchronous_events() {
    let of = |kind, number| event(ffi::Event { kind, number });
    let qp = |event| AsyncEvent::Qp { qpn: Qpn::new(5), event };
    // enum ibv_event_type
    for (kind, expected) in [
        (0, AsyncEvent::CqOverflow { cq: 5 }),
        (1, qp(QpEvent::Fatal)),
        (2, qp(QpEvent::ReqErr)),
        (3, qp(QpEvent::AccessErr)),
        (4, qp(QpEvent::CommEst)),
        (5, qp(QpEvent::SqDrained)),
        (6, AsyncEvent::Other { kind: 6, number: Some(5) }),
        (14, AsyncEvent::SrqErr { srq: 5 }),
        (15, AsyncEvent::SrqLimitReached { srq: 5 }),
        (16, qp(QpEvent::LastWqeReached)),
    ] {
        assert_eq!(of(kind, Some(5)), expected);
    }
    for (kind, expected) in [
        (8, AsyncEvent::DeviceFatal),
        (9, AsyncEvent::PortActive),
        (10, AsyncEvent::PortErr),
        (18, AsyncEvent::GidChange),
        (13, AsyncEvent::Other { kind: 13, number: None }),
    ] {
        assert_eq!(of(kind, None), expected);
    }
    // Events of ports name the port.
    for (kind, number) in [(10, Some(2)), (18, Some(2)), (8, None), (0, None)] {
        assert_eq!(port(&ffi::Event { kind, number: Some(2) }), number);
    }
}

#[test]
fn counters_of_different_drivers_have_one_name() {
    let (mut transport, mut port) = (Counters::default(), PortStats::default());
    for (name, value) in [
        ("sent_pkts", 10),
        ("port_xmit_packets", 12),
        ("rcvd_pkts", 7),
        ("port_rcv_data", 100),
        ("packet_seq_err", 3),
        ("out_of_buffer", 4),
        ("no_such_counter", 99),
    ] {
        count(name, value, &mut transport, &mut port);
    }
    assert_eq!((transport.sent_pkts, port.tx_datagrams), (12, 12));
    assert_eq!((transport.rcvd_pkts, port.rx_datagrams, port.rx_bytes), (7, 7, 400));
    assert_eq!((transport.rcvd_seq_err, transport.send_rnr_err), (3, 4));
}
