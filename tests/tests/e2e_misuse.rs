//! Misuse of the API: the errors that verbs users know, and nothing broken afterwards.
//!
//! Nothing here depends on the backend: one device per end suffices.

use std::time::Duration;

use rocinante::{
    Access, AsyncEvent, Backend, ConnectOptions, Limits, ModifyAttr, ModifyError, Mtu, OpenOptions,
    PeerPath, PostError, QpAttr, QpCaps, QpEvent, QpState, RecvWr, SendData, SendOp, SendWr,
    VerbsError, WcStatus,
};
use rocinante_tests::harness::{Harness, Setup, wait_until, wr};
use rocinante_tests::require_lab;

const SEND: SendOp = SendOp::Send { imm: None };

/// The values of errno that the manual pages name.
const ENOMEM: i32 = 12;
const EBUSY: i32 = 16;
const EINVAL: i32 = 22;

fn harness() -> Harness {
    Harness::new(&Setup::new(Backend::Udp))
}

fn inline(wr_id: u64, op: SendOp, bytes: &[u8]) -> SendWr<'_> {
    SendWr { data: SendData::Inline(bytes), ..wr(wr_id, op, &[]) }
}

/// The errno of a failed post, and which request it was.
fn refused(
    result: Result<(), rocinante::PostListError>,
    index: usize,
    error: PostError,
    errno: i32,
) {
    let found = result.expect_err("a refusal");
    assert_eq!((found.index, found.error), (index, error));
    assert_eq!(VerbsError::from(found).errno(), errno);
    assert!(!found.to_string().is_empty());
}

#[test]
fn posting_needs_the_right_state() {
    require_lab!();
    let harness = harness();
    let [a, _] = &harness.sides;
    let qp = a.qp().build_reset().unwrap();
    let recv = |wr_id| RecvWr { wr_id, sges: &[] };
    refused(qp.post_send(&[wr(1, SEND, &[])]), 0, PostError::State, EINVAL);
    refused(qp.post_recv(&[recv(1)]), 0, PostError::State, EINVAL);
    qp.modify(&ModifyAttr::init(Access::ALL)).unwrap();
    refused(qp.post_send(&[wr(1, SEND, &[])]), 0, PostError::State, EINVAL);
    qp.post_recv(&[recv(7)]).unwrap();
    // What is posted in INIT is flushed by ERR, and what is posted in ERR too.
    qp.modify(&ModifyAttr::state(QpState::Err)).unwrap();
    a.complete(7, WcStatus::WrFlushErr);
    qp.post_send(&[wr(8, SEND, &[])]).unwrap();
    a.complete(8, WcStatus::WrFlushErr);
    qp.post_recv(&[recv(9)]).unwrap();
    a.complete(9, WcStatus::WrFlushErr);
    qp.modify(&ModifyAttr::state(QpState::Reset)).unwrap();
    refused(qp.post_send(&[wr(1, SEND, &[])]), 0, PostError::State, EINVAL);
}

#[test]
fn a_queue_takes_what_it_was_made_for() {
    require_lab!();
    let harness = harness();
    let [a, b] = &harness.sides;
    let caps = QpCaps {
        max_send_wr: 4,
        max_recv_wr: 3,
        max_send_sge: 2,
        max_recv_sge: 1,
        max_inline_data: 16,
    };
    let qps = [a, b].map(|side| side.pd.qp(&side.cq, &side.cq).caps(caps).build().unwrap());
    let [qp, peer] = harness.connect(qps);
    let mr = a.pd.allocate(4096, Access::LOCAL_WRITE).unwrap();
    let sge = mr.sge(0, 8);

    // Too much of something: nothing is posted, what is before it in the list is.
    refused(qp.post_send(&[wr(1, SEND, &[sge; 3])]), 0, PostError::TooManySges, EINVAL);
    refused(qp.post_send(&[inline(1, SEND, &[0; 17])]), 0, PostError::InlineTooLong, EINVAL);
    let read = SendOp::Read { remote: 0, rkey: mr.rkey() };
    refused(qp.post_send(&[inline(1, read, &[0; 8])]), 0, PostError::InlineResponse, EINVAL);
    let mut long = sge;
    long.len = 1 << 31;
    refused(qp.post_send(&[wr(1, SEND, &[long, sge])]), 0, PostError::TooLong, EINVAL);
    let odd = SendOp::FetchAdd { remote: 4, rkey: mr.rkey(), add: 1 };
    refused(qp.post_send(&[wr(1, odd, &[sge])]), 0, PostError::BadAtomic, EINVAL);
    let even = SendOp::FetchAdd { remote: 8, rkey: mr.rkey(), add: 1 };
    refused(qp.post_send(&[wr(1, even, &[mr.sge(0, 7)])]), 0, PostError::BadAtomic, EINVAL);
    let two = [sge; 2];
    refused(peer.post_recv(&[RecvWr { wr_id: 1, sges: &two }]), 0, PostError::TooManySges, EINVAL);
    a.quiet(Duration::from_millis(5));

    // The peer has no receive: the requests stay in the queue until it is full.
    let list: Vec<_> = (0..6).map(|wr_id| inline(wr_id, SEND, &[7; 16])).collect();
    refused(qp.post_send(&list), 4, PostError::Full, ENOMEM);
    refused(qp.post_send(&list[4..]), 0, PostError::Full, ENOMEM);
    let receives: Vec<_> = (10..14).map(|wr_id| RecvWr { wr_id, sges: &[] }).collect();
    // Inline data needs room at the receiver like any other: none here.
    refused(peer.post_recv(&receives), 3, PostError::Full, ENOMEM);
    a.complete(0, WcStatus::RemInvReqErr);
    (1..4).for_each(|wr_id| {
        a.complete(wr_id, WcStatus::WrFlushErr);
    });
    b.complete(10, WcStatus::LocLenErr);
    // Room again, as much as before.
    assert!(qp.post_send(&list[..4]).is_ok());
}

#[test]
fn room_in_a_queue_comes_back_with_completions() {
    require_lab!();
    let harness = harness();
    let [a, b] = &harness.sides;
    let qps = [a, b].map(|side| side.qp().max_send_wr(8).max_recv_wr(8).build().unwrap());
    let [qp, peer] = harness.connect(qps);
    let receives: Vec<_> = (0..8).map(|wr_id| RecvWr { wr_id, sges: &[] }).collect();
    // Unsignaled requests hold their place until they are acknowledged.
    let sends: Vec<_> =
        (0..8).map(|wr_id| SendWr { signaled: wr_id == 7, ..wr(wr_id, SEND, &[]) }).collect();
    for _ in 0..200 {
        peer.post_recv(&receives).unwrap();
        refused(peer.post_recv(&receives[..1]), 0, PostError::Full, ENOMEM);
        qp.post_send(&sends).unwrap();
        a.succeed(7);
        for wr_id in 0..8 {
            b.succeed(wr_id);
        }
    }
    // A reset gives all places back, too.
    for _ in 0..3 {
        peer.post_recv(&receives).unwrap();
        refused(peer.post_recv(&receives[..1]), 0, PostError::Full, ENOMEM);
        peer.modify(&ModifyAttr::state(QpState::Reset)).unwrap();
        peer.modify(&ModifyAttr::init(Access::ALL)).unwrap();
    }
    b.quiet(Duration::from_millis(1));
}

#[test]
fn states_follow_each_other_and_attributes_belong_to_them() {
    require_lab!();
    let harness = harness();
    let [a, b] = &harness.sides;
    let qp = a.qp().build_reset().unwrap();
    let modify = |change: &ModifyAttr| a.run(|| qp.modify(change));
    let is = |error: VerbsError, expected: ModifyError| match error {
        VerbsError::Modify(found) => {
            assert_eq!(found, expected);
            assert_eq!(VerbsError::Modify(found).errno(), EINVAL);
        }
        other => panic!("{other:?}"),
    };
    let to = |state| QpAttr { state: Some(state), ..QpAttr::default() };
    let rts = ModifyAttr { attr: to(QpState::Rts), path: None };
    is(
        modify(&rts).unwrap_err(),
        ModifyError::Transition { from: QpState::Reset, to: QpState::Rts },
    );
    let mut init = ModifyAttr::init(Access::ALL);
    init.attr.port = None;
    is(
        modify(&init).unwrap_err(),
        ModifyError::Missing { to: QpState::Init, attribute: "IBV_QP_PORT" },
    );
    modify(&ModifyAttr::init(Access::ALL)).unwrap();
    let mut rtr = ModifyAttr {
        attr: QpAttr {
            path_mtu: Some(Mtu::Mtu1024),
            dest_qpn: Some(rocinante::Qpn::new(77)),
            rq_psn: Some(rocinante::Psn::new(5)),
            max_dest_rd_atomic: Some(1),
            min_rnr_timer: Some(12),
            ..to(QpState::Rtr)
        },
        path: None,
    };
    is(
        modify(&rtr).unwrap_err(),
        ModifyError::Missing { to: QpState::Rtr, attribute: "IBV_QP_AV" },
    );
    // Another family: there is no path, and the state stays.
    rtr.path = Some(PeerPath::new("fd00::1".parse().unwrap()));
    assert!(matches!(modify(&rtr), Err(VerbsError::Path(_))));
    rtr.path = Some(PeerPath::new("192.0.2.1".parse().unwrap()));
    assert!(matches!(modify(&rtr), Err(VerbsError::Path(_))), "no route to there");
    assert_eq!(qp.state(), QpState::Init);
    rtr.path = Some(PeerPath::new(b.address));
    rtr.attr.retry_cnt = Some(1);
    is(
        modify(&rtr).unwrap_err(),
        ModifyError::NotAllowed { to: QpState::Rtr, attribute: "IBV_QP_RETRY_CNT" },
    );
    rtr.attr.retry_cnt = None;
    modify(&rtr).unwrap();
    let (state, attr, caps) = qp.query();
    assert_eq!(
        (state, attr.dest_qpn, attr.path_mtu),
        (QpState::Rtr, rtr.attr.dest_qpn, rtr.attr.path_mtu)
    );
    assert_eq!(caps.max_send_wr, 512);
}

#[test]
fn what_is_in_use_is_not_destroyed() {
    require_lab!();
    let harness = harness();
    let [a, _] = &harness.sides;
    let busy =
        |error: VerbsError| assert!(matches!(error, VerbsError::Busy(_)) && error.errno() == EBUSY);
    let pd = a.ctx.alloc_pd();
    let cq = a.ctx.create_cq(8).unwrap();
    let qp = pd.qp(&cq, &cq).build_reset().unwrap();
    let (cq, error) = cq.destroy().unwrap_err();
    busy(error);
    let (pd, error) = pd.dealloc().unwrap_err();
    busy(error);
    drop(qp);
    cq.destroy().map_err(|(_, error)| error).unwrap();
    let mr = pd.allocate(64, Access::NONE).unwrap();
    let (pd, error) = pd.dealloc().unwrap_err();
    busy(error);
    drop(mr);
    pd.dealloc().map_err(|(_, error)| error).unwrap();
}

#[test]
fn a_region_with_work_in_flight_is_not_deregistered() {
    require_lab!();
    let harness = harness();
    let [a, b] = &harness.sides;
    let [qp, peer] = harness.pair();
    let source = a.pd.allocate(4096, Access::NONE).unwrap();
    let target = b.pd.allocate(4096, Access::LOCAL_WRITE).unwrap();
    let sge = [target.sge(0, 4096)];
    peer.post_recv(&[RecvWr { wr_id: 10, sges: &sge }]).unwrap();
    let (target, error) = target.deregister().unwrap_err();
    assert_eq!(error.errno(), EBUSY);
    qp.post_send(&[wr(1, SEND, &[source.sge(0, 64)])]).unwrap();
    a.succeed(1);
    b.succeed(10);
    // No receive is posted for this one.
    qp.post_send(&[wr(2, SEND, &[source.sge(0, 64)])]).unwrap();
    let (source, error) = source.deregister().unwrap_err();
    assert_eq!(error.errno(), EBUSY);
    qp.modify(&ModifyAttr::state(QpState::Err)).unwrap();
    a.complete(2, WcStatus::WrFlushErr);
    source.deregister().map_err(|(_, error)| error).unwrap();
    target.deregister().map_err(|(_, error)| error).unwrap();
}

#[test]
fn a_completion_queue_that_overflows_breaks_its_queue_pairs() {
    require_lab!();
    let harness = harness();
    let [a, b] = &harness.sides;
    let small = a.ctx.create_cq(4).unwrap();
    let mine = a.pd.qp(&small, &small).build().unwrap();
    let [qp, peer] = harness.connect([mine, b.qp().build().unwrap()]);
    let other = harness.pair();
    let target = b.pd.allocate(64, Access::ALL).unwrap();
    let write = SendOp::Write { remote: target.address(), rkey: target.rkey(), imm: None };
    let list: Vec<_> = (0..8).map(|wr_id| wr(wr_id, write, &[])).collect();
    qp.post_send(&list).unwrap();
    wait_until("the queue pair breaks", || qp.state() == QpState::Err);
    let mut events = Vec::new();
    wait_until("its events", || {
        events.extend(a.ctx.poll_async_event());
        events.len() == 2
    });
    assert!(events.contains(&AsyncEvent::Qp { qpn: qp.qpn(), event: QpEvent::Fatal }));
    assert!(events.contains(&AsyncEvent::CqOverflow { cq: small.number() }));
    // What found room is there, in order; what did not is lost, and that is said.
    for wr_id in 0..4 {
        assert_eq!(small.poll_one().unwrap().map(|wc| wc.wr_id), Some(wr_id));
    }
    let error = small.poll_one().unwrap_err();
    assert!(matches!(error, VerbsError::Busy(_)), "{error}");
    // Nobody else is affected.
    assert_eq!((other[0].state(), peer.state()), (QpState::Rts, QpState::Rts));
    other[0].post_send(&[wr(1, write, &[])]).unwrap();
    a.succeed(1);
}

#[test]
fn two_completion_queues_that_overflow_at_once_break_both_queue_pairs() {
    require_lab!();
    let harness = harness();
    let [a, b] = &harness.sides;
    let target = b.pd.allocate(64, Access::ALL).unwrap();
    let write = SendOp::Write { remote: target.address(), rkey: target.rkey(), imm: None };
    let small = [0, 1].map(|_| a.ctx.create_cq(2).unwrap());
    let qps = small.each_ref().map(|cq| {
        let mine = a.pd.qp(cq, cq).build().unwrap();
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
fn limits_are_reported_and_kept() {
    require_lab!();
    let mut setup = Setup::new(Backend::Udp);
    setup.limits = Limits {
        max_qp: 3,
        max_mr: 4,
        max_cq: 2,
        max_cqe: 5000,
        max_qp_wr: 600,
        max_sge: 5,
        max_inline_data: 300,
        max_qp_rd_atom: 8,
    };
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

    let qps: Vec<_> = (0..3).map(|_| a.qp().build().unwrap()).collect();
    limit(a.qp().build().unwrap_err());
    drop(qps);
    invalid(a.qp().max_send_wr(601).build().unwrap_err());
    invalid(a.qp().max_recv_wr(601).build().unwrap_err());
    invalid(a.qp().max_sge(6).build().unwrap_err());
    invalid(a.qp().max_inline_data(301).build().unwrap_err());
    invalid(a.qp().gid_index(1).build().unwrap_err());

    let regions: Vec<_> = (0..4).map(|_| a.pd.allocate(16, Access::ALL).unwrap()).collect();
    limit(a.pd.allocate(16, Access::ALL).unwrap_err());
    drop(regions);
    invalid(a.pd.allocate(16, Access::REMOTE_WRITE).unwrap_err());
    a.pd.allocate(16, Access::ALL).unwrap();

    // READs and atomics outstanding, in either direction.
    let [_, b] = &harness.sides;
    let peer = b.qp().build().unwrap().endpoint();
    for options in [
        ConnectOptions { max_rd_atomic: 9, max_dest_rd_atomic: 1, ..ConnectOptions::default() },
        ConnectOptions { max_rd_atomic: 1, max_dest_rd_atomic: 9, ..ConnectOptions::default() },
    ] {
        let qp = a.qp().build().unwrap();
        let (_, error) = a.run(|| qp.connect(&peer, &options)).unwrap_err();
        assert_eq!(error.errno(), EINVAL, "{error}");
    }
}

#[test]
fn objects_of_two_devices_do_not_mix() {
    require_lab!();
    let harness = harness();
    let [a, b] = &harness.sides;
    let error = a.pd.qp(&b.cq, &a.cq).build().unwrap_err();
    assert!(matches!(error, VerbsError::Invalid(_)));
    let error = a.run(|| OpenOptions::new().open(b.address)).unwrap_err();
    assert!(matches!(error, VerbsError::NoDevice(_)), "{error}");
    assert!(error.to_string().contains(&b.address.to_string()), "{error}");
    // One process per address: the error names it.
    let error = a.run(|| OpenOptions::new().netdev(Backend::Udp).open(a.address)).unwrap_err();
    assert!(error.to_string().contains(&std::process::id().to_string()), "{error}");
    let error = a.run(|| OpenOptions::new().open_interface("eth7")).unwrap_err();
    assert!(matches!(error, VerbsError::NoDevice(_)), "{error}");
}
