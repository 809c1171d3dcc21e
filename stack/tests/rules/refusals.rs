//! Refused calls change nothing: every table stays the same.

use rocinante_stack::mem::{FlushLevel, PdId, Placement, Sge};
use rocinante_stack::types::{Key, Qpn, Time};
use rocinante_stack::verbs::{
    AhId, Destination, QpState, QpType, RecvWr, SendData, SendOp, SendWr, SrqId, WcStatus,
};
use rocinante_stack::{
    Budget, Engine, EngineConfig, GroupError, ModifyError, PeerAddress, PeerKind, PostError,
    QpAttr, QpInit, SrqChange, SrqError, SrqInit,
};

use crate::common::{
    BASE, End, Host, PD, PEER, QKEY, Setup, Solo, addr, assert_same, qp_init, sge, steps, tables,
    to,
};

/// Every type of queue pair in each state that it can be in.
fn states() -> impl Iterator<Item = (QpType, QpState)> {
    let all = QpType::ALL.into_iter().flat_map(|of| QpState::ALL.map(|state| (of, state)));
    all.filter(|(of, state)| *of != QpType::Rc || *state != QpState::Sqe)
}

/// A queue pair of this type in this state, with some work if it can have any.
fn in_state(qp_type: QpType, state: QpState) -> End {
    let setup = Setup { qp_type, ..Setup::script() };
    let mut end = End::new(1, &setup);
    let qpn = end.qpn;
    let reached = match state {
        QpState::Reset => 0,
        QpState::Init => 1,
        QpState::Rtr => 2,
        _ => 3,
    };
    for attr in &steps(0, addr(1), PEER, &setup)[..reached] {
        end.modify(qpn, attr).unwrap();
    }
    if state != QpState::Reset {
        end.engine.post_recv(qpn, &RecvWr { wr_id: 1, sges: &[] }, &mut end.host).unwrap();
    }
    match state {
        QpState::Sqd | QpState::Err => end.modify(qpn, &to(state)).unwrap(),
        QpState::Sqe => {
            let list = [sge(0, 8, Key(0x1234_5600))];
            let op = match qp_type {
                QpType::Ud => SendOp::SendTo { to: Destination::default(), imm: None },
                _ => SendOp::Send { imm: None },
            };
            end.engine.post_send(qpn, &wr(op, SendData::Sges(&list)), &mut end.host).unwrap();
            end.engine.poll_transmit(Time(1), 9, &mut end.host, &mut end.out);
        }
        _ => {}
    }
    assert_eq!(end.state(qpn), state);
    end
}

fn wr(op: SendOp, data: SendData<'_>) -> SendWr<'_> {
    SendWr::new(op, data).wr_id(7)
}

/// Removes one attribute.
const WITHOUT: [fn(&mut QpAttr); 14] = [
    |attr| attr.pkey_index = None,
    |attr| attr.port = None,
    |attr| attr.access = None,
    |attr| attr.qkey = None,
    |attr| attr.peer = None,
    |attr| attr.path_mtu = None,
    |attr| attr.dest_qpn = None,
    |attr| attr.rq_psn = None,
    |attr| attr.max_dest_rd_atomic = None,
    |attr| attr.min_rnr_timer = None,
    |attr| attr.sq_psn = None,
    |attr| attr.max_rd_atomic = None,
    |attr| attr.rnr_retry = None,
    |attr| attr.timeout = None,
];

/// Sets one attribute to an invalid value.
const WRONG: [fn(&mut QpAttr); 10] = [
    |attr| attr.pkey_index = Some(1),
    |attr| attr.port = Some(2),
    |attr| attr.port = Some(0),
    |attr| attr.min_rnr_timer = Some(32),
    |attr| attr.timeout = Some(u8::MAX),
    |attr| attr.retry_cnt = Some(8),
    |attr| attr.rnr_retry = Some(8),
    |attr| attr.max_rd_atomic = Some(129),
    |attr| attr.max_dest_rd_atomic = Some(u8::MAX),
    |attr| {
        let (local, remote) = (addr(1), std::net::Ipv6Addr::LOCALHOST.into());
        let (budget, kind) = (Budget::STANDARD, PeerKind::Standard);
        attr.peer = Some(PeerAddress { local, remote, path: 0, budget, kind });
    },
];

/// Changes that are refused from `from`.
fn refused(qp_type: QpType, from: QpState) -> Vec<QpAttr> {
    let all = steps(0, addr(1), PEER, &Setup { qp_type, ..Setup::script() });
    let order = [QpState::Reset, QpState::Init, QpState::Rtr, QpState::Rts];
    let mut refused = Vec::new();
    for (at, step) in all.iter().enumerate() {
        let is_next = from == order[at];
        let is_again = from == order[at + 1] && at == 0;
        let returns = at == 2 && matches!(from, QpState::Rts | QpState::Sqd | QpState::Sqe);
        if !is_next && !is_again && !returns {
            refused.push(*step);
        }
        if is_next {
            for without in WITHOUT {
                let mut attr = *step;
                without(&mut attr);
                if attr != *step {
                    refused.push(attr);
                }
            }
            // Only the change to SQD takes this.
            refused.push(QpAttr { sqd_async_notify: Some(true), ..*step });
        }
        for wrong in WRONG {
            let mut attr = *step;
            wrong(&mut attr);
            refused.push(attr);
        }
    }
    for wrong in WRONG {
        let mut attr = QpAttr::default();
        wrong(&mut attr);
        refused.push(attr);
    }
    refused.push(to(QpState::Sqe));
    if !matches!(from, QpState::Rts | QpState::Sqd) {
        refused.push(to(QpState::Sqd));
    }
    refused
}

#[test]
fn a_change_of_a_queue_pair_that_is_refused_changes_nothing_in_any_state() {
    for (qp_type, state) in states() {
        let mut end = in_state(qp_type, state);
        let (qpn, before) = (end.qpn, tables(&end.engine));
        for attr in refused(qp_type, state) {
            assert!(end.modify(qpn, &attr).is_err(), "{qp_type} in {state}: {attr:?}");
        }
        assert_same(&before, &tables(&end.engine), &(qp_type, state));
        assert_eq!((end.host.completed().len(), end.state(qpn)), (done(state), state));
    }
}

/// Number of requests that were flushed on the way to a state.
fn done(state: QpState) -> usize {
    usize::from(matches!(state, QpState::Err | QpState::Sqe))
}

const SEND: SendOp = SendOp::Send { imm: None };
const READ: SendOp = SendOp::Read { remote: BASE, rkey: Key(9) };
const STORE: SendOp = SendOp::AtomicWrite { remote: BASE, rkey: Key(9) };
const FLUSH: SendOp = SendOp::Flush {
    remote: BASE,
    rkey: Key(9),
    len: 8,
    placement: Placement::GLOBAL,
    level: FlushLevel::Range,
};

const fn add(remote: u64) -> SendOp {
    SendOp::FetchAdd { remote, rkey: Key(9), add: 1 }
}

fn send_to() -> SendOp {
    let to = Destination { ah: AhId(0), qpn: PEER, qkey: QKEY };
    SendOp::SendTo { to, imm: None }
}

/// Requests that no queue pair of this type accepts, with the errors.
fn unpostable(qp_type: QpType) -> Vec<(SendOp, SendData<'static>, PostError)> {
    const FIVE: [Sge; 5] = [Sge { addr: 0, len: 1, lkey: Key(1) }; 5];
    const HUGE: [Sge; 2] = [Sge { addr: 0, len: 1 << 30 | 1 << 29 | 1, lkey: Key(1) }; 2];
    const EIGHT: [Sge; 1] = [Sge { addr: 0, len: 8, lkey: Key(1) }];
    const FOUR: [Sge; 1] = [Sge { addr: 0, len: 4, lkey: Key(1) }];
    let (none, inline) = (SendData::Sges(&[]), SendData::Inline(&[7; 65]));
    let own = if qp_type == QpType::Ud { send_to() } else { SEND };
    let mut all = vec![
        (own, SendData::Sges(&FIVE), PostError::TooManySges),
        (own, SendData::Sges(&HUGE), PostError::TooLong),
        (own, inline, PostError::InlineTooLong),
    ];
    match qp_type {
        QpType::Rc => all.extend([
            (send_to(), none, PostError::Operation),
            (READ, SendData::Inline(&[7; 8]), PostError::InlineResponse),
            (add(BASE + 4), SendData::Sges(&EIGHT), PostError::BadAtomic),
            (add(BASE), SendData::Sges(&FOUR), PostError::BadAtomic),
            (STORE, SendData::Sges(&FOUR), PostError::BadAtomic),
            (FLUSH, SendData::Sges(&EIGHT), PostError::FlushData),
        ]),
        QpType::Uc => all.extend([
            (READ, none, PostError::Operation),
            (add(BASE), SendData::Sges(&EIGHT), PostError::Operation),
            (send_to(), none, PostError::Operation),
        ]),
        QpType::Ud => {
            const LONG: [Sge; 1] = [Sge { addr: 0, len: 257, lkey: Key(1) }];
            all.extend([
                (SEND, none, PostError::Operation),
                (READ, none, PostError::Operation),
                (send_to(), SendData::Sges(&LONG), PostError::BeyondMtu),
            ]);
        }
    }
    all
}

#[test]
fn a_request_that_cannot_be_posted_changes_nothing_in_any_state() {
    for (qp_type, state) in states() {
        let mut end = in_state(qp_type, state);
        let (qpn, before) = (end.qpn, tables(&end.engine));
        let unknown = Qpn::new(qpn.value() + 1);
        let End { engine, host, .. } = &mut end;
        for (op, data, why) in unpostable(qp_type) {
            let why = if state.takes_sends() { why } else { PostError::State };
            assert_eq!(engine.post_send(qpn, &wr(op, data), host), Err(why), "{op:?} {state}");
            assert_eq!(engine.post_send(unknown, &wr(op, data), host), Err(PostError::UnknownQp));
        }
        let five = [sge(0, 1, Key(1)); 5];
        let huge = [sge(0, u32::MAX, Key(1)); 2];
        let why = |why| if state == QpState::Reset { PostError::State } else { why };
        for (sges, why) in
            [(&five[..], why(PostError::TooManySges)), (&huge[..], why(PostError::TooLong))]
        {
            let wr = RecvWr { wr_id: 7, sges };
            assert_eq!(engine.post_recv(qpn, &wr, host), Err(why));
            assert_eq!(engine.post_recv(unknown, &wr, host), Err(PostError::UnknownQp));
        }
        assert_same(&before, &tables(&end.engine), &(qp_type, state));
        assert_eq!(end.host.completed().len(), done(state), "{qp_type} {state}");
    }
}

#[test]
fn a_request_for_which_there_is_no_room_changes_nothing() {
    for qp_type in QpType::ALL {
        let mut end = in_state(qp_type, QpState::Rts);
        let qpn = end.qpn;
        let op = if qp_type == QpType::Ud { send_to() } else { SEND };
        let (send, recv) = (wr(op, SendData::Sges(&[])), RecvWr { wr_id: 7, sges: &[] });
        let End { engine, host, .. } = &mut end;
        for _ in 0..64 {
            engine.post_send(qpn, &send, host).unwrap();
        }
        for _ in 0..63 {
            engine.post_recv(qpn, &recv, host).unwrap();
        }
        let before = tables(engine);
        assert_eq!(engine.post_send(qpn, &send, host), Err(PostError::Full));
        assert_eq!(engine.post_recv(qpn, &recv, host), Err(PostError::Full));
        assert_same(&before, &tables(engine), &qp_type);
    }
}

/// The requests before and after the refused one leave as if it had never been posted.
#[test]
fn of_a_list_that_is_refused_half_way_the_rest_is_not_concerned() {
    for (op, data, why) in unpostable(QpType::Rc) {
        let mut solo = Solo::script();
        solo.send(1, 10);
        assert_eq!(solo.post_wr(&wr(op, data)), Err(why));
        solo.send(2, 10);
        assert_eq!(solo.sent(), ["SEND_ONLY #0 10B ack", "SEND_ONLY #1 10B ack"], "{op:?}");
        solo.receive_ack(1);
        assert_eq!(solo.completed(), [(1, WcStatus::Success), (2, WcStatus::Success)]);
        assert_eq!(solo.end.host.sends_retired, 2);
    }
}

#[test]
fn a_call_about_what_is_not_there_changes_nothing() {
    let mut end = in_state(QpType::Rc, QpState::Rts);
    let unknown = Qpn::new(end.qpn.value() + 1);
    let before = tables(&end.engine);
    let End { engine, host, qpn, .. } = &mut end;
    assert_eq!(engine.destroy_qp(unknown), Err(ModifyError::UnknownQp));
    assert_eq!(engine.modify_qp(unknown, &to(QpState::Reset), host), Err(ModifyError::UnknownQp));
    assert!(!engine.destroy_ah(AhId(0)) && !engine.destroy_ah(AhId(u32::MAX)));
    let change = SrqChange { max_wr: Some(9), srq_limit: Some(1) };
    for srq in [SrqId(0), SrqId(u32::MAX)] {
        assert_eq!(engine.modify_srq(srq, &change), Err(SrqError::Unknown));
        assert_eq!(engine.destroy_srq(srq), Err(SrqError::Unknown));
        let wr = RecvWr { wr_id: 1, sges: &[] };
        assert_eq!(engine.post_srq_recv(srq, &wr), Err(PostError::UnknownQp));
        let init = QpInit { srq: Some(srq), ..qp_init(&Setup::script()) };
        assert_eq!(engine.create_qp(&init, 5), None);
    }
    assert_eq!(engine.create_srq(&SrqInit { pd: PD, max_wr: 0, max_sge: 1 }), None);
    let group = [239, 0, 0, 1].into();
    assert_eq!(engine.attach_multicast(unknown, group), Err(GroupError::UnknownQp));
    assert_eq!(engine.attach_multicast(*qpn, group), Err(GroupError::Service));
    assert_eq!(end.engine.detach_multicast(end.qpn, group), Err(GroupError::NotAttached));
    end.engine.release_qpn(unknown);
    end.engine.cq_overflow(rocinante_stack::verbs::CqId(77), &mut end.host);
    assert_same(&before, &tables(&end.engine), &"calls");
}

#[test]
fn a_change_of_a_shared_receive_queue_that_is_refused_changes_nothing() {
    let mut solo = Solo::new(&Setup { srq: Some(4), ..Setup::script() });
    let srq = solo.end.srq.unwrap();
    let list = [solo.sge(0, 700)];
    (1..=3).for_each(|wr_id| solo.end.share(wr_id, &list).unwrap());
    // One of them is taken.
    solo.receive_request(rocinante_stack::wire::Opcode::RC_SEND_FIRST, 0, &[&[7; 256]]);
    let engine = &mut solo.end.engine;
    let before = tables(engine);
    let change = |max_wr, srq_limit| SrqChange { max_wr, srq_limit };
    for (refused, why) in [
        (change(Some(0), None), SrqError::Depth),
        (change(Some(2), None), SrqError::Depth),
        (change(Some(2), Some(1)), SrqError::Depth),
        (change(None, Some(5)), SrqError::Limit),
        (change(Some(8), Some(9)), SrqError::Limit),
        (change(None, Some(u32::MAX)), SrqError::Limit),
    ] {
        assert_eq!(engine.modify_srq(srq, &refused), Err(why), "{refused:?}");
    }
    let five = [sge(0, 1, Key(1)); 5];
    let huge = [sge(0, u32::MAX, Key(1)); 2];
    for (sges, why) in [(&five[..], PostError::TooManySges), (&huge[..], PostError::TooLong)] {
        assert_eq!(engine.post_srq_recv(srq, &RecvWr { wr_id: 9, sges }), Err(why));
    }
    assert_eq!(engine.destroy_srq(srq), Err(SrqError::InUse));
    let own = RecvWr { wr_id: 9, sges: &[] };
    assert_eq!(engine.post_recv(solo.end.qpn, &own, &mut solo.end.host), Err(PostError::Shared));
    assert_same(&before, &tables(&solo.end.engine), &"a shared receive queue");
}

#[test]
fn a_queue_pair_more_than_there_may_be_takes_nothing_with_it() {
    let mut engine = Engine::new(EngineConfig { max_qp: 1, ..EngineConfig::default() });
    let srq = engine.create_srq(&SrqInit { pd: PD, max_wr: 4, max_sge: 1 }).unwrap();
    let init = qp_init(&Setup::script());
    let qpn = engine.create_qp(&init, 5).unwrap();
    let before = tables(&engine);
    assert_eq!(engine.create_qp(&QpInit { srq: Some(srq), ..init }, 6), None);
    assert_same(&before, &tables(&engine), &"create_qp");
    assert_eq!(engine.destroy_srq(srq), Ok(()), "no queue pair uses it");
    engine.destroy_qp(qpn).unwrap();
    // And none is made while every number is reserved.
    (2..65_002).for_each(|low| engine.reserve_qpn(Qpn::new(low)));
    let before = engine.footprint();
    assert_eq!(engine.create_qp(&init, 5), None);
    assert_eq!(engine.footprint(), before);
}

#[test]
fn a_group_or_member_more_than_there_may_be_is_not_attached() {
    let setup = Setup { qp_type: QpType::Ud, depth: 1, ..Setup::script() };
    let mut engine = Engine::new(EngineConfig::default());
    let mut make = |n| engine.create_qp(&qp_init(&setup), n).unwrap();
    let qpns: Vec<_> = (0..1025).map(|n| make(2 + n)).collect();
    let group = |n: u32| std::net::IpAddr::from(std::net::Ipv4Addr::from(0xef00_0000 + n));
    for n in 0..256 {
        engine.attach_multicast(qpns[0], group(n)).unwrap();
    }
    for qpn in &qpns[1..1024] {
        engine.attach_multicast(*qpn, group(0)).unwrap();
    }
    let refused = [
        (qpns[0], group(256), GroupError::Full { max: 256 }),
        (qpns[1024], group(0), GroupError::Full { max: 1024 }),
        (qpns[1024], addr(1), GroupError::NoGroup),
    ];
    for (qpn, group, why) in refused {
        assert_eq!(engine.attach_multicast(qpn, group), Err(why));
        assert_eq!(engine.detach_multicast(qpn, group), Err(GroupError::NotAttached));
    }
    assert_eq!((engine.groups_of(qpns[0]).len(), engine.groups_of(qpns[1024])), (256, vec![]));
    engine.detach_multicast(qpns[1], group(0)).unwrap();
    assert_eq!(engine.attach_multicast(qpns[1024], group(0)), Ok(false));
    assert_eq!(engine.detach_multicast(qpns[0], group(1)), Ok(true));
    assert_eq!(engine.attach_multicast(qpns[0], group(256)), Ok(true), "it is new, and joined now");
}

#[test]
fn an_address_handle_more_than_there_may_be_uses_no_room_of_the_peer() {
    let mut engine = Engine::new(EngineConfig::default());
    let (budget, kind) = (Budget::STANDARD, PeerKind::Standard);
    let to = PeerAddress { local: addr(1), remote: addr(2), path: 0, budget, kind };
    while engine.create_ah(PdId(1), &to).is_some() {}
    let full = engine.footprint();
    assert_eq!((full.address_handles, full.credit_users), (1 << 20, 1 << 20));
    assert_eq!(engine.create_ah(PdId(1), &to), None);
    assert_eq!(engine.footprint(), full);
    assert!(engine.destroy_ah(AhId(5)) && engine.create_ah(PdId(1), &to).is_some());
    assert_eq!(engine.footprint(), full);
}

/// Regions and windows: a full table, ranges that wrap, unknown keys.
#[test]
fn a_registration_that_is_refused_changes_nothing() {
    use rocinante_stack::mem::{Access, Accessor, Bind, MwType, Region};
    let mut host = Host::new(64);
    let key = host.register(0, 64, Access::ALL | Access::MW_BIND);
    let mw = host.regions.insert_window(PD, MwType::Type2, 0x7777_7700).unwrap();
    let before = format!("{:?}", host.regions);
    let table = &mut host.regions;
    let region = Region { pd: PD, start: BASE, len: 8, host: 0, access: Access::ALL };
    for wraps in [
        Region { start: u64::MAX, ..region },
        Region { host: u64::MAX - 6, ..region },
        Region { len: u64::MAX, ..region },
    ] {
        assert_eq!(table.insert(wraps, 5), None);
        assert_eq!(table.replace(key, wraps, 5), None);
    }
    assert_eq!(table.replace(Key(0x1111_1111), region, 5), None);
    assert_eq!((table.remove(mw), table.remove(Key(key.0 ^ 1))), (None, None));
    assert!(!table.remove_window(key) && !table.remove_window(Key(5)));
    let by = Accessor { pd: PD, qpn: Qpn::new(5) };
    let access = Access::REMOTE_READ;
    let bind = Bind { mw, rkey: mw, region: Key(3), addr: BASE, len: 8, access };
    assert!(table.bind(by, &bind).is_err() && table.invalidate(by, mw).is_err());
    table.free_windows(Qpn::new(5));
    assert_eq!(before, format!("{table:?}"));
    let mut full = rocinante_stack::mem::RegionTable::new(1);
    full.insert(region, 0x1234_5600).unwrap();
    let before = format!("{full:?}");
    assert_eq!(full.insert(region, 0x2345_6700), None);
    assert_eq!(full.insert_window(PD, MwType::Type1, 0x2345_6700), None);
    assert_eq!(before, format!("{full:?}"));
}
