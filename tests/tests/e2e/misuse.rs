//! Misuse of the API causes the errors that verbs users know, and breaks nothing.
//!
//! None of these tests depends on the backend: one device per end is enough.

use std::net::UdpSocket;

use rocinante::device::{Backend, Limits};
use rocinante::verbs::{ModifyAttr, Mtu, PeerPath, Psn, QpAttr, QpState, Qpn, SendOp};
use rocinante::{Access, ConnectOptions, OpenOptions, RecvWr, VerbsError, WcStatus};
use rocinante_lab::{Lab, LabConfig};
use rocinante_tests::harness::{Family, Harness, Setup, Side, address, wait_until, wr};
use rocinante_tests::oracles::Oracles;
use rocinante_tests::{need, require};

rocinante_tests::misuse!(on udp);

const SEND: SendOp = SendOp::Send { imm: None };

/// The values of errno that the manual pages name.
const ENOMEM: i32 = 12;
const EBUSY: i32 = 16;
const EINVAL: i32 = 22;

fn harness() -> Harness {
    Harness::new(&Setup::new(Backend::Udp))
}

#[test]
fn a_region_with_work_in_flight_is_not_deregistered() {
    require!(need::lab());
    let harness = harness();
    let [a, b] = &harness.sides;
    let [qp, peer] = harness.pair();
    let source = a.pd.allocate(4096, Access::NONE).unwrap();
    let target = b.pd.allocate(4096, Access::LOCAL_WRITE).unwrap();
    let sge = [target.sge(0, 4096)];
    peer.post_recv(&[RecvWr { wr_id: 10, sges: &sge }]).unwrap();
    let rocinante::Refused { value: target, error } = target.deregister().unwrap_err();
    assert_eq!(error.errno(), EBUSY);
    qp.post_send(&[wr(1, SEND, &[source.sge(0, 64)])]).unwrap();
    a.succeed(1);
    b.succeed(10);
    // No receive is posted for this one.
    qp.post_send(&[wr(2, SEND, &[source.sge(0, 64)])]).unwrap();
    let rocinante::Refused { value: source, error } = source.deregister().unwrap_err();
    assert_eq!(error.errno(), EBUSY);
    qp.modify(&ModifyAttr::state(QpState::Err)).unwrap();
    a.complete(2, WcStatus::WrFlushErr);
    source.deregister().unwrap();
    target.deregister().unwrap();
}

#[test]
fn limits_are_reported_and_kept() {
    require!(need::lab());
    let mut setup = Setup::new(Backend::Udp);
    setup.limits = Limits::default()
        .max_qp(3)
        .max_mr(4)
        .max_mw(4)
        .max_cq(2)
        .max_cqe(5000)
        .max_qp_wr(600)
        .max_sge(5)
        .max_inline_data(300)
        .max_srq(2)
        .max_srq_wr(700)
        .max_srq_sge(6)
        .max_qp_rd_atom(8);
    let harness = Harness::new(&setup);
    let [a, _] = &harness.sides;
    assert_eq!(a.ctx.query_device().limits, setup.limits);
    let limit = |error: VerbsError| {
        assert!(matches!(error, VerbsError::Limit { .. }) && error.errno() == ENOMEM, "{error}");
    };
    let invalid = |error: VerbsError| {
        assert!(matches!(error, VerbsError::Invalid(_)) && error.errno() == EINVAL, "{error}");
    };
    // The side has one queue already.
    let cq = a.ctx.create_cq(5000).unwrap();
    limit(a.ctx.create_cq(1).unwrap_err());
    drop(cq);
    invalid(a.ctx.create_cq(5001).unwrap_err());
    invalid(a.ctx.create_cq(0).unwrap_err());

    let srqs = [700, 1].map(|depth| a.pd.create_srq(depth, 6).unwrap());
    limit(a.pd.create_srq(1, 1).unwrap_err());
    drop(srqs);
    invalid(a.pd.create_srq(701, 1).unwrap_err());
    invalid(a.pd.create_srq(0, 1).unwrap_err());
    invalid(a.pd.create_srq(1, 7).unwrap_err());

    let qps: Vec<_> = (0..3).map(|_| a.qp().build().unwrap()).collect();
    limit(a.qp().build().unwrap_err());
    drop(qps);
    invalid(a.qp().max_send_wr(601).build().unwrap_err());
    invalid(a.qp().max_recv_wr(601).build().unwrap_err());
    invalid(a.qp().max_sge(6).build().unwrap_err());
    invalid(a.qp().max_inline_data(301).build().unwrap_err());
    invalid(a.qp().sgid_index(1).build().unwrap_err());

    let regions: Vec<_> = (0..4).map(|_| a.pd.allocate(16, Access::ALL).unwrap()).collect();
    limit(a.pd.allocate(16, Access::ALL).unwrap_err());
    drop(regions);
    invalid(a.pd.allocate(16, Access::REMOTE_WRITE).unwrap_err());
    a.pd.allocate(16, Access::ALL).unwrap();

    // The limits of outstanding READs and atomics, in either direction.
    let [_, b] = &harness.sides;
    let peer = b.qp().build().unwrap().endpoint();
    for options in [
        ConnectOptions::default().max_rd_atomic(9).max_dest_rd_atomic(1),
        ConnectOptions::default().max_rd_atomic(1).max_dest_rd_atomic(9),
    ] {
        let qp = a.qp().build().unwrap();
        let error = a.run(|| qp.connect(&peer, &options)).unwrap_err().error;
        assert_eq!(error.errno(), EINVAL, "{error}");
    }
}

#[test]
fn two_completion_queues_that_overflow_at_once_break_both_queue_pairs() {
    require!(need::lab());
    let harness = harness();
    let [a, b] = &harness.sides;
    let target = b.pd.allocate(64, Access::ALL).unwrap();
    let write = SendOp::Write { remote: target.address(), rkey: target.rkey(), imm: None };
    let small = [0, 1].map(|_| a.ctx.create_cq(2).unwrap());
    let qps = small.each_ref().map(|cq| {
        let mine = a.pd.qp(cq, cq).access(Access::ALL).build().unwrap();
        harness.connect([mine, b.qp().build().unwrap()])
    });
    let list: Vec<_> = (0..64).map(|wr_id| wr(wr_id, write, &[])).collect();
    for [qp, _] in &qps {
        qp.post_send(&list).unwrap();
    }
    for [qp, _] in &qps {
        wait_until("the queue pair breaks", || qp.state() == QpState::Err);
    }
    for cq in small {
        assert!(cq.poll_one().unwrap().is_some() && cq.poll_one().unwrap().is_some());
        assert!(cq.poll_one().is_err());
    }
}

#[test]
fn a_device_is_found_by_what_it_has() {
    require!(need::lab());
    let harness = Harness::new(&Setup { containers: 3, ..Setup::new(Backend::Udp) });
    let [a, b] = &harness.sides;
    let error = a.run(|| OpenOptions::new().open(b.address)).unwrap_err();
    assert!(matches!(error, VerbsError::NoDevice(_)), "{error}");
    assert!(error.to_string().contains(&b.address.to_string()), "{error}");
    // One owner of the port: the error names its process.
    let container = harness.lab().container(2);
    let taken = || {
        let address = container.ipv4();
        let _owner = UdpSocket::bind((address, 4791)).unwrap();
        OpenOptions::new().netdev(Backend::Udp).open(address.into()).unwrap_err()
    };
    let error = container.netns().run(taken).unwrap();
    assert!(error.to_string().contains(&std::process::id().to_string()), "{error}");
    let error = a.run(|| OpenOptions::new().cm_retries(16).open(a.address)).unwrap_err();
    assert!(error.to_string().contains("0 to 15 times, not 16"), "{error}");
    let error = a.run(|| OpenOptions::new().open_interface("eth7")).unwrap_err();
    assert!(matches!(error, VerbsError::NoDevice(_)), "{error}");
}

/// Packets that never fit would block all packets behind them, of all queue pairs.
#[test]
fn a_path_mtu_that_the_link_does_not_carry_is_refused() {
    require!(need::lab());
    let lab = Lab::new(&LabConfig { mtu: 1500, ..LabConfig::default() }).unwrap();
    let [own, peer] = [0, 1].map(|at| address(&lab, at, Family::V4));
    let side = Side::open(lab.container(0).netns(), own, &Setup::new(Backend::Udp));
    // Objects made for a refused change are not kept.
    let _oracles = Oracles::of(&side);
    let qp = side.qp().build_reset().unwrap();
    let rtr = |mtu| ModifyAttr {
        attr: QpAttr {
            state: Some(QpState::Rtr),
            path_mtu: Some(mtu),
            dest_qpn: Some(Qpn::new(77)),
            rq_psn: Some(Psn::new(5)),
            max_dest_rd_atomic: Some(1),
            min_rnr_timer: Some(12),
            ..QpAttr::default()
        },
        path: Some(PeerPath::new(peer)),
    };
    let early = side.run(|| qp.modify(&rtr(Mtu::Mtu1024))).unwrap_err();
    assert!(matches!(early, VerbsError::Modify(_)), "{early}");
    qp.modify(&ModifyAttr::init(Access::ALL)).unwrap();
    let error = side.run(|| qp.modify(&rtr(Mtu::Mtu2048))).unwrap_err();
    assert_eq!((error.errno(), qp.state()), (EINVAL, QpState::Init), "{error}");
    assert!(error.to_string().contains("carries 1024"), "{error}");
    side.run(|| qp.modify(&rtr(Mtu::Mtu1024))).unwrap();
}
