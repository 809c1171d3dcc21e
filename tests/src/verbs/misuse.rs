//! Misuse of the API causes the errors that verbs users know, and breaks nothing.
//!
//! None of these tests depends on the backend.

use std::time::Duration;

use rocinante::verbs::{
    AsyncEvent, ModifyAttr, ModifyError, Mtu, PeerPath, PostError, PostListError, Psn, QpAttr,
    QpCaps, QpEvent, QpState, Qpn, SendOp,
};
use rocinante::{Access, Qp, RecvWr, SendWr, VerbsError, WcStatus};

use crate::harness::{Harness, On, Setup, wait_until, wr};

const SEND: SendOp = SendOp::Send { imm: None };

/// The values of errno that the manual pages name.
const ENOMEM: i32 = 12;
const EBUSY: i32 = 16;
const EINVAL: i32 = 22;

fn inline(wr_id: u64, op: SendOp, bytes: &[u8]) -> SendWr<'_> {
    SendWr::new(op, bytes).wr_id(wr_id)
}

/// Checks the error and the errno of a failed post, and the index of its request.
fn refused(result: Result<(), PostListError>, index: usize, error: PostError, errno: i32) {
    let found = result.expect_err("a refusal");
    assert_eq!((found.index, found.error), (index, error));
    assert_eq!(VerbsError::from(found).errno(), errno);
    assert!(!found.to_string().is_empty());
}

pub fn posting_needs_the_right_state(on: On) {
    let harness = Harness::new(&Setup::new(on));
    let [a, _] = &harness.sides;
    let qp = a.qp().build_reset().unwrap();
    let recv = |wr_id| RecvWr { wr_id, sges: &[] };
    refused(qp.post_send(&[wr(1, SEND, &[])]), 0, PostError::State, EINVAL);
    refused(qp.post_recv(&[recv(1)]), 0, PostError::State, EINVAL);
    qp.modify(&ModifyAttr::init(Access::ALL)).unwrap();
    refused(qp.post_send(&[wr(1, SEND, &[])]), 0, PostError::State, EINVAL);
    qp.post_recv(&[recv(7)]).unwrap();
    // A receive posted in INIT is flushed by ERR; so is one posted in ERR.
    qp.modify(&ModifyAttr::state(QpState::Err)).unwrap();
    a.complete(7, WcStatus::WrFlushErr);
    qp.post_send(&[wr(8, SEND, &[])]).unwrap();
    a.complete(8, WcStatus::WrFlushErr);
    qp.post_recv(&[recv(9)]).unwrap();
    if !harness.is_rxe() {
        // The kernel's part of Soft-RoCE does not learn of a new receive, so it does not flush it.
        a.complete(9, WcStatus::WrFlushErr);
    }
    qp.modify(&ModifyAttr::state(QpState::Reset)).unwrap();
    refused(qp.post_send(&[wr(1, SEND, &[])]), 0, PostError::State, EINVAL);
}

pub fn a_queue_takes_what_it_was_made_for(on: On) {
    let harness = Harness::new(&Setup::new(on));
    let [a, b] = &harness.sides;
    let caps = QpCaps {
        max_send_wr: 4,
        max_recv_wr: 3,
        max_send_sge: 2,
        max_recv_sge: 1,
        max_inline_data: 16,
    };
    let qps = [a, b]
        .map(|side| side.pd.qp(&side.cq, &side.cq).access(Access::ALL).caps(caps).build().unwrap());
    let [qp, peer] = harness.connect(qps);
    let mr = a.pd.allocate(4096, Access::LOCAL_WRITE).unwrap();
    let sge = mr.sge(0, 8);
    // A device may give more than the program asked for (ibv_create_qp(3)), and reports it.
    let caps = given(&harness, &qp, caps);

    // Each limit exceeded: that request is not posted, those before it in the list are.
    let many = vec![sge; caps.max_send_sge.max(caps.max_recv_sge) as usize + 1];
    let sends = &many[..=caps.max_send_sge as usize];
    refused(qp.post_send(&[wr(1, SEND, sends)]), 0, PostError::TooManySges, EINVAL);
    let long = vec![0; caps.max_inline_data as usize + 1];
    refused(qp.post_send(&[inline(1, SEND, &long)]), 0, PostError::InlineTooLong, EINVAL);
    let read = SendOp::Read { remote: 0, rkey: mr.rkey() };
    refused(qp.post_send(&[inline(1, read, &[0; 8])]), 0, PostError::InlineResponse, EINVAL);
    if harness.is_software() {
        // Hardware need not look at lengths before it sends.
        let mut long = sge;
        long.len = 1 << 31;
        refused(qp.post_send(&[wr(1, SEND, &[long, sge])]), 0, PostError::TooLong, EINVAL);
    }
    let odd = SendOp::FetchAdd { remote: 4, rkey: mr.rkey(), add: 1 };
    refused(qp.post_send(&[wr(1, odd, &[sge])]), 0, PostError::BadAtomic, EINVAL);
    let even = SendOp::FetchAdd { remote: 8, rkey: mr.rkey(), add: 1 };
    refused(qp.post_send(&[wr(1, even, &[mr.sge(0, 7)])]), 0, PostError::BadAtomic, EINVAL);
    let sges = &many[..=caps.max_recv_sge as usize];
    refused(peer.post_recv(&[RecvWr { wr_id: 1, sges }]), 0, PostError::TooManySges, EINVAL);
    a.quiet(Duration::from_millis(5));

    // The peer has no receive: the requests stay in the queue until it is full.
    let (room, receives) = (u64::from(caps.max_send_wr), u64::from(caps.max_recv_wr));
    let list: Vec<_> = (0..room + 2).map(|wr_id| inline(wr_id, SEND, &[7; 16])).collect();
    refused(qp.post_send(&list), room as usize, PostError::Full, ENOMEM);
    refused(qp.post_send(&list[room as usize..]), 0, PostError::Full, ENOMEM);
    let list_of = |count| (10..10 + count).map(|wr_id| RecvWr { wr_id, sges: &[] });
    let list_of_receives: Vec<_> = list_of(receives + 1).collect();
    // Inline data needs space in a receive, too: these receives have none.
    refused(peer.post_recv(&list_of_receives), receives as usize, PostError::Full, ENOMEM);
    let [there, here] = harness.too_long();
    a.complete(0, there);
    (1..room).for_each(|wr_id| {
        a.complete(wr_id, WcStatus::WrFlushErr);
    });
    b.complete(10, here);
    // There is the same room again.
    assert!(qp.post_send(&list[..room as usize]).is_ok());
}

/// The capabilities that a queue pair got for `asked`.
fn given(harness: &Harness, qp: &Qp, asked: QpCaps) -> QpCaps {
    let given = qp.query().2;
    if harness.is_software() {
        assert_eq!(given, asked);
    }
    let each = |caps: QpCaps| {
        [
            caps.max_send_wr,
            caps.max_recv_wr,
            caps.max_send_sge,
            caps.max_recv_sge,
            caps.max_inline_data,
        ]
    };
    assert!(each(given).iter().zip(each(asked)).all(|(given, asked)| *given >= asked), "{given:?}");
    given
}

pub fn room_in_a_queue_comes_back_with_completions(on: On) {
    let harness = Harness::new(&Setup::new(on));
    let [a, b] = &harness.sides;
    let qps = [a, b].map(|side| side.qp().max_send_wr(8).max_recv_wr(8).build().unwrap());
    let [qp, peer] = harness.connect(qps);
    let caps = qp.query().2;
    let room = u64::from(caps.max_recv_wr.min(caps.max_send_wr));
    if harness.is_software() {
        assert_eq!(room, 8);
    }
    let receives: Vec<_> = (0..room).map(|wr_id| RecvWr { wr_id, sges: &[] }).collect();
    // An unsignaled request holds its place until it is acknowledged.
    let last = room - 1;
    let sends: Vec<_> =
        (0..room).map(|wr_id| wr(wr_id, SEND, &[]).signaled(wr_id == last)).collect();
    for _ in 0..200 {
        peer.post_recv(&receives).unwrap();
        refused(peer.post_recv(&receives[..1]), 0, PostError::Full, ENOMEM);
        qp.post_send(&sends).unwrap();
        a.succeed(last);
        for wr_id in 0..room {
            b.succeed(wr_id);
        }
    }
    // A reset also frees all places.
    for _ in 0..3 {
        peer.post_recv(&receives).unwrap();
        refused(peer.post_recv(&receives[..1]), 0, PostError::Full, ENOMEM);
        peer.modify(&ModifyAttr::state(QpState::Reset)).unwrap();
        peer.modify(&ModifyAttr::init(Access::ALL)).unwrap();
    }
    b.quiet(Duration::from_millis(1));
}

pub fn states_follow_each_other_and_attributes_belong_to_them(on: On) {
    let harness = Harness::new(&Setup::new(on));
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
            dest_qpn: Some(Qpn::new(77)),
            rq_psn: Some(Psn::new(5)),
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
    // An address of another family: there is no path, and the state stays.
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
    assert!(caps.max_send_wr >= 512);
}

pub fn what_is_in_use_is_not_destroyed(on: On) {
    let harness = Harness::new(&Setup::new(on));
    let [a, _] = &harness.sides;
    let busy =
        |error: VerbsError| assert!(matches!(error, VerbsError::Busy(_)) && error.errno() == EBUSY);
    let pd = a.ctx.alloc_pd();
    let cq = a.ctx.create_cq(8).unwrap();
    let qp = pd.qp(&cq, &cq).build_reset().unwrap();
    let rocinante::Refused { value: cq, error } = cq.destroy().unwrap_err();
    busy(error);
    let rocinante::Refused { value: pd, error } = pd.dealloc().unwrap_err();
    busy(error);
    drop(qp);
    cq.destroy().unwrap();
    let mr = pd.allocate(64, Access::NONE).unwrap();
    let rocinante::Refused { value: pd, error } = pd.dealloc().unwrap_err();
    busy(error);
    drop(mr);
    pd.dealloc().unwrap();
}

pub fn a_completion_queue_that_overflows_breaks_its_queue_pairs(on: On) {
    let harness = Harness::new(&Setup::new(on));
    let [a, b] = &harness.sides;
    let small = a.ctx.create_cq(4).unwrap();
    let room = small.depth() as u64;
    let mine = a.pd.qp(&small, &small).access(Access::ALL).max_send_wr(512).build().unwrap();
    let [qp, peer] = harness.connect([mine, b.qp().build().unwrap()]);
    let other = harness.pair();
    let target = b.pd.allocate(64, Access::ALL).unwrap();
    let write = SendOp::Write { remote: target.address(), rkey: target.rkey(), imm: None };
    let list: Vec<_> = (0..2 * room).map(|wr_id| wr(wr_id, write, &[])).collect();
    qp.post_send(&list).unwrap();
    let mut expected = vec![AsyncEvent::CqOverflow { cq: small.number() }];
    // Soft-RoCE loses completions and goes on.
    if !harness.is_rxe() {
        wait_until("the queue pair breaks", || qp.state() == QpState::Err);
        expected.push(AsyncEvent::Qp { qpn: qp.qpn(), event: QpEvent::Fatal });
    }
    let mut events = Vec::new();
    wait_until("its events", || {
        events.extend(a.ctx.poll_async_event());
        expected.iter().all(|event| events.contains(event))
    });
    // The completions that fitted are there, in order. The others are lost, and an event reports
    // that.
    for wr_id in 0..room {
        assert_eq!(small.poll_one().unwrap().map(|wc| wc.wr_id), Some(wr_id));
    }
    if !harness.is_rxe() {
        assert_eq!(events.len(), expected.len(), "{events:?}");
        let error = small.poll_one().unwrap_err();
        assert!(matches!(error, VerbsError::Busy(_)), "{error}");
    }
    // Other queue pairs are not affected.
    assert_eq!((other[0].state(), peer.state()), (QpState::Rts, QpState::Rts));
    other[0].post_send(&[wr(1, write, &[])]).unwrap();
    a.succeed(1);
}

/// Objects of one device cannot be used with those of another. Panics if a check fails.
pub fn objects_of_two_devices_do_not_mix(on: On) {
    let harness = Harness::new(&Setup::new(on));
    let [a, b] = &harness.sides;
    let error = a.pd.qp(&b.cq, &a.cq).access(Access::ALL).build().unwrap_err();
    assert!(matches!(error, VerbsError::Invalid(_)));
    let channel = b.channel();
    let error = a.ctx.create_cq_with(1, &channel).unwrap_err();
    assert!(matches!(error, VerbsError::Invalid(_)), "{error}");
}
