//! Two of each object that has a number, a key, a descriptor or a queue: an action on one does not
//! affect the other, and a new object inherits nothing from a destroyed one in its place.

use std::net::IpAddr;

use crate::sim::{PATIENCE, Side, connect, done, is_ready, request, send, sides, undriven, write};
use rocinante::verbs::{
    AsyncEvent, BindMw, ModifyAttr, MwPart, MwType, PeerPath, QpAttr, QpEvent, QpState, QpType,
    SendData, SendOp,
};
use rocinante::{
    Access, CompChannel, ConnectOptions, Cq, Mr, Mw, Qp, RecvWr, VerbsError, WcStatus,
};
use rocinante_netdev::sim::{SimConfig, SimNet};

/// A queue pair of the first side that completes to these queues, and its peer.
fn pair(sides: &[Side; 2], send_cq: &Cq, recv_cq: &Cq) -> [Qp; 2] {
    let qp = sides[0].pd.qp(send_cq, recv_cq).access(Access::ALL).build().unwrap();
    let peer = sides[1].qp();
    let ends = [qp.endpoint(), peer.endpoint()];
    let options = ConnectOptions::default();
    let peer = peer.connect(&ends[0], &options).unwrap();
    [qp.connect(&ends[1], &options).unwrap(), peer]
}

#[test]
fn events_of_queues_come_to_their_channels_and_all_of_them() {
    let sides = undriven();
    let [a, b] = &sides;
    let channels: [CompChannel; 2] = [(); 2].map(|()| a.ctx.create_comp_channel().unwrap());
    let queue = |at: usize| a.ctx.create_cq_with(16, &channels[at]).unwrap();
    // The first channel has two queues, the second one.
    let queues = [queue(0), queue(0), queue(1)];
    let qps = queues.each_ref().map(|cq| pair(&sides, cq, cq));
    for round in 0..3 {
        for (cq, [qp, _]) in queues.iter().zip(&qps) {
            cq.req_notify(false).unwrap();
            qp.post_send(&[write(round, (b.mr.address(), b.mr.rkey()))]).unwrap();
        }
        assert!(channels.iter().all(|channel| !is_ready(channel)));
        b.ctx.progress();
        b.ctx.progress();
        a.ctx.progress();
        assert!(channels.iter().all(is_ready));
        assert!(channels[0].try_event().unwrap() == queues[0]);
        assert!(is_ready(&channels[0]), "the other queue's event waits");
        assert!(channels[0].try_event().unwrap() == queues[1]);
        assert!(!is_ready(&channels[0]) && channels[0].try_event().is_none());
        assert!(is_ready(&channels[1]), "of another channel");
        assert!(channels[1].try_event().unwrap() == queues[2]);
        assert!(!is_ready(&channels[1]));
        for cq in &queues {
            assert_eq!(cq.poll_one().unwrap().unwrap().wr_id, round);
        }
    }
}

#[test]
fn a_queue_pair_with_two_queues_tells_two_channels() {
    let sides = undriven();
    let [a, b] = &sides;
    let channels: [CompChannel; 2] = [(); 2].map(|()| a.ctx.create_comp_channel().unwrap());
    let queues = channels.each_ref().map(|channel| a.ctx.create_cq_with(16, channel).unwrap());
    let [qp, peer] = pair(&sides, &queues[0], &queues[1]);
    for round in 0..3 {
        qp.post_recv(&[RecvWr { wr_id: 2, sges: &[a.mr.sge(0, 64)] }]).unwrap();
        queues.iter().for_each(|cq| cq.req_notify(false).unwrap());
        peer.post_send(&[send(1, &[7; 8])]).unwrap();
        a.ctx.progress();
        assert_eq!(channels.each_ref().map(is_ready), [false, true], "{round}");
        assert!(channels[1].try_event().unwrap() == queues[1]);
        qp.post_send(&[write(1, (b.mr.address(), b.mr.rkey()))]).unwrap();
        b.ctx.progress();
        b.ctx.progress();
        a.ctx.progress();
        assert_eq!(channels.each_ref().map(is_ready), [true, false], "{round}");
        assert!(channels[0].try_event().unwrap() == queues[0]);
        assert_eq!(queues.each_ref().map(|cq| cq.poll_one().unwrap().unwrap().wr_id), [1, 2]);
        assert!(b.cq.poll_one().unwrap().is_some());
    }
}

/// The old queue's event waits in the channel, and its number is reused.
#[test]
fn a_queue_in_the_place_of_another_hears_nothing_of_that() {
    let sides = undriven();
    let [a, b] = &sides;
    let channel = a.ctx.create_comp_channel().unwrap();
    let mut numbers = Vec::new();
    for _ in 0..4 {
        let cq = a.ctx.create_cq_with(1, &channel).unwrap();
        numbers.push(cq.number());
        assert!(!is_ready(&channel) && channel.try_event().is_none());
        assert_eq!((a.ctx.poll_async_event(), is_ready(&a.ctx.async_fd())), (None, false));
        assert_eq!(cq.poll_one().unwrap(), None);
        let [qp, _peer] = pair(&sides, &cq, &cq);
        cq.req_notify(false).unwrap();
        // More than it holds.
        let at = (b.mr.address(), b.mr.rkey());
        qp.post_send(&[write(1, at), write(2, at)]).unwrap();
        b.ctx.progress();
        b.ctx.progress();
        a.ctx.progress();
        assert!(is_ready(&channel) && is_ready(&a.ctx.async_fd()));
        drop(qp);
        cq.destroy().unwrap();
    }
    assert!(numbers.windows(2).all(|two| two[0] == two[1]), "{numbers:?}: given again");
}

/// The events of one device, oldest first.
fn events(side: &Side) -> Vec<AsyncEvent> {
    std::iter::from_fn(|| side.ctx.poll_async_event()).collect()
}

#[test]
fn two_queues_that_overflow_are_told_in_their_order() {
    let sides = undriven();
    let [a, b] = &sides;
    let queues = [(); 2].map(|()| a.ctx.create_cq(1).unwrap());
    let qps = queues.each_ref().map(|cq| pair(&sides, cq, cq));
    let at = (b.mr.address(), b.mr.rkey());
    for [qp, _] in &qps {
        qp.post_send(&[write(1, at), write(2, at)]).unwrap();
    }
    b.ctx.progress();
    b.ctx.progress();
    a.ctx.progress();
    let overflown = |event: &AsyncEvent| match event {
        AsyncEvent::CqOverflow { cq } => Some(*cq),
        _ => None,
    };
    let all = events(a);
    let told: Vec<_> = all.iter().filter_map(overflown).collect();
    assert_eq!(told, queues.each_ref().map(Cq::number), "{all:?}");
    let fatal = |of: &Qp| AsyncEvent::Qp { qpn: of.qpn(), event: QpEvent::Fatal };
    assert!(qps.iter().all(|[qp, _]| all.contains(&fatal(qp))), "{all:?}");
    assert!(!is_ready(&a.ctx.async_fd()));
}

/// Its number may soon be another's.
#[test]
fn of_a_queue_pair_that_is_gone_nobody_hears() {
    let sides = undriven();
    let [a, b] = &sides;
    let cq = a.ctx.create_cq(1).unwrap();
    let [qp, _peer] = pair(&sides, &cq, &cq);
    let at = (b.mr.address(), b.mr.rkey());
    qp.post_send(&[write(1, at), write(2, at)]).unwrap();
    b.ctx.progress();
    b.ctx.progress();
    a.ctx.progress();
    drop(qp);
    assert_eq!(events(a), [AsyncEvent::CqOverflow { cq: cq.number() }]);
    assert!(!is_ready(&a.ctx.async_fd()));
}

#[test]
fn two_regions_have_keys_rights_and_ends_of_their_own() {
    let sides = undriven();
    let [_, b] = &sides;
    let both = [Access::ALL, Access::LOCAL_WRITE].map(|access| b.pd.allocate(64, access).unwrap());
    assert_ne!(both[0].rkey(), both[1].rkey());
    let [first, second] = both;
    let [gone, second_key] = [first.rkey(), second.rkey()];
    let at = first.address();
    first.deregister().unwrap();
    // The old key reaches no region that is registered later.
    let others: Vec<_> = (0..60).map(|_| b.pd.allocate(64, Access::ALL).unwrap()).collect();
    assert!(others.iter().all(|other| other.rkey() != gone));
    for (to, status) in [
        ((at, gone), WcStatus::RemAccessErr),
        ((second.address(), second_key), WcStatus::RemAccessErr),
        ((others[0].address(), gone), WcStatus::RemAccessErr),
        ((others[0].address(), others[0].rkey()), WcStatus::Success),
        ((others[0].address(), others[1].rkey()), WcStatus::RemAccessErr),
    ] {
        let [qp, _peer] = connect(&sides, 14);
        assert_eq!(done(&sides, &qp, write(1, to)), status, "{to:?}");
    }
}

#[test]
fn a_region_is_busy_until_the_last_of_its_windows_is_gone() {
    let sides = undriven();
    let [a, _] = &sides;
    let [qp, _peer] = connect(&sides, 14);
    let mut region = a.pd.allocate(64, Access::ALL | Access::MW_BIND).unwrap();
    fn bind(mr: &Mr) -> BindMw<'_> {
        let part = MwPart { mr, offset: 8, len: 8, access: Access::REMOTE_READ };
        BindMw { wr_id: 5, part, signaled: true, fence: false }
    }
    let windows = [(); 2].map(|()| a.pd.alloc_mw(MwType::Type1).unwrap());
    let keys = windows.each_ref().map(|mw| qp.bind_mw(mw, &bind(&region)).unwrap());
    (0..2).for_each(|_| a.succeed(5));
    assert_ne!(keys[0], keys[1]);
    let [first, second] = windows;
    drop(first);
    for _ in 0..2 {
        let rocinante::Refused { value: back, error: why } = region.deregister().unwrap_err();
        assert!(matches!(why, VerbsError::Busy(_)), "{why}");
        region = *back;
    }
    // A window that is bound again is bound once.
    qp.bind_mw(&second, &bind(&region)).unwrap();
    a.succeed(5);
    drop(second);
    region.deregister().unwrap();
}

/// The low 8 bits of a key count: they come round, and the others stay.
#[test]
fn a_window_that_is_bound_very_often_keeps_its_place_beside_another() {
    let sides = undriven();
    let [a, b] = &sides;
    let [qp, peer] = connect(&sides, 14);
    let region = a.pd.allocate(64, Access::ALL | Access::MW_BIND).unwrap();
    let windows = [(); 2].map(|()| a.pd.alloc_mw(MwType::Type2).unwrap());
    let whole = windows.each_ref().map(|mw| mw.rkey().0 & !0xff);
    assert_ne!(whole[0], whole[1]);
    for round in 0..600 {
        for (mw, whole) in windows.iter().zip(whole) {
            let old = mw.rkey();
            let part = MwPart { mr: &region, offset: 8, len: 8, access: Access::REMOTE_WRITE };
            qp.post_send(&[request(round, mw.bind(&part), SendData::NONE)]).unwrap();
            a.succeed(round);
            let low = u32::from((old.0 as u8).wrapping_add(1));
            assert_eq!(mw.rkey().0, whole | low, "{round}");
        }
        // Around the wrap of either, what it shows is written to under the new key.
        let keys = windows.each_ref().map(Mw::rkey);
        if keys.iter().any(|key| key.0 & 0xff < 2) {
            for key in keys {
                peer.post_send(&[write(round, (region.address() + 8, key))]).unwrap();
                let mut wc = None;
                crate::sim::until("it is written", || {
                    a.ctx.progress();
                    wc = b.cq.poll_one().unwrap();
                    wc.is_some()
                });
                assert_eq!(wc.unwrap().status, WcStatus::Success, "{round}: {key:?}");
            }
        }
        for rkey in keys {
            let op = SendOp::LocalInv { rkey };
            qp.post_send(&[request(round, op, SendData::NONE)]).unwrap();
            a.succeed(round);
        }
    }
}

/// A refused request does not change the key, so the window can be bound when there is room.
#[test]
fn a_window_is_bound_by_the_next_request_after_one_that_was_refused() {
    let sides = undriven();
    let [a, _] = &sides;
    let [qp, _peer] = connect(&sides, 14);
    let mw = a.pd.alloc_mw(MwType::Type1).unwrap();
    let region = a.pd.allocate(64, Access::ALL | Access::MW_BIND).unwrap();
    let part = MwPart { mr: &region, offset: 8, len: 8, access: Access::REMOTE_READ };
    assert_eq!(part.address(), region.address() + 8);
    let by_offset = MwPart { access: part.access | Access::ZERO_BASED, ..part };
    assert_eq!(by_offset.address(), 0);
    let bind = BindMw { wr_id: 5, part, signaled: true, fence: false };
    let reset = sides[0].pd.qp(&a.cq, &a.cq).build_reset().unwrap();
    for _ in 0..3 {
        let before = mw.rkey();
        for _ in 0..300 {
            let error = reset.bind_mw(&mw, &bind).unwrap_err();
            assert!(matches!(error, VerbsError::Post(_)), "{error}");
            assert_eq!(mw.rkey(), before);
        }
        assert_ne!(qp.bind_mw(&mw, &bind).unwrap(), before);
        a.succeed(5);
    }
}

#[test]
fn datagrams_by_one_of_two_handles_go_on_when_the_other_is_gone() {
    let net = SimNet::new();
    let sides = sides(&net, [false, false]);
    let [a, b] = &sides;
    let port = net.port(&[[10, 0, 0, 3].into()], &SimConfig::default()).unwrap();
    let c = Side::over(port, "third", false);
    let ready = |side: &Side| {
        let qp = side.pd.qp(&side.cq, &side.cq).qp_type(QpType::Ud).build().unwrap();
        for wr_id in 0..64 {
            qp.post_recv(&[RecvWr { wr_id, sges: &[side.mr.sge(0, 128)] }]).unwrap();
        }
        qp.ready().unwrap()
    };
    let [from, to_b, to_c] = [a, b, &c].map(ready);
    let handle = |to: &Qp| a.pd.create_ah(&PeerPath::to(&to.endpoint())).unwrap();
    let kept = [handle(&to_b), handle(&to_b)];
    let paths = a.ctx.resources().unwrap().paths;
    let datagram = |ah: &rocinante::Ah, to: &Qp| {
        let op = SendOp::SendTo { to: ah.to(to.qpn(), 0x1111_1111), imm: None };
        request(9, op, SendData::Inline(&[7; 8]))
    };
    let arrived = |side: &Side| {
        side.ctx.progress();
        std::iter::from_fn(|| side.cq.poll_one().unwrap()).count()
    };
    for round in 0..10 {
        // A path's number is reused for another destination.
        let gone = handle(&to_b);
        let stale = gone.to(to_b.qpn(), 0x1111_1111);
        from.post_send(&[datagram(&gone, &to_b)]).unwrap();
        drop(gone);
        a.succeed(9);
        let elsewhere = handle(&to_c);
        from.post_send(&[datagram(&elsewhere, &to_c)]).unwrap();
        a.succeed(9);
        from.post_send(&[datagram(&kept[round % 2], &to_b)]).unwrap();
        a.succeed(9);
        assert_eq!([arrived(b), arrived(&c)], [2, 1], "{round}");
        // A request with the destroyed handle fails, and goes nowhere.
        let other = ready(a);
        let op = SendOp::SendTo { to: stale, imm: None };
        other.post_send(&[request(9, op, SendData::Inline(&[7; 8]))]).unwrap();
        assert_ne!(a.cq.wait_one(PATIENCE).unwrap().status, WcStatus::Success);
        assert_eq!([arrived(b), arrived(&c)], [0, 0], "{round}");
        drop((elsewhere, other));
        while a.cq.poll_one().unwrap().is_some() {}
        assert_eq!(a.ctx.resources().unwrap().paths, paths);
    }
}

/// The port is in a group exactly as long as one of two queue pairs is.
#[test]
fn two_members_of_two_groups_get_what_is_sent_to_theirs() {
    let sides = undriven();
    let [a, b] = &sides;
    let ready = |side: &Side| {
        let qp = side.pd.qp(&side.cq, &side.cq).qp_type(QpType::Ud).build().unwrap();
        for wr_id in 0..64 {
            qp.post_recv(&[RecvWr { wr_id, sges: &[side.mr.sge(0, 128)] }]).unwrap();
        }
        qp.ready().unwrap()
    };
    let [from, first, second] = [a, b, b].map(ready);
    let groups = [[239, 1, 1, 1], [239, 1, 1, 2]].map(std::net::IpAddr::from);
    let handles = groups.map(|group| a.pd.create_ah(&PeerPath::new(group)).unwrap());
    let arrived = || {
        for ah in &handles {
            let to = ah.to(rocinante::verbs::Qpn::MULTICAST, 0x1111_1111);
            let op = SendOp::SendTo { to, imm: None };
            from.post_send(&[request(9, op, SendData::Inline(&[7; 8]))]).unwrap();
            a.succeed(9);
        }
        b.ctx.progress();
        let mut counts = [0, 0];
        while let Some(wc) = b.cq.poll_one().unwrap() {
            counts[usize::from(wc.qpn == second.qpn())] += 1;
        }
        counts
    };
    assert_eq!(arrived(), [0, 0]);
    first.attach_mcast(groups[0]).unwrap();
    second.attach_mcast(groups[0]).unwrap();
    second.attach_mcast(groups[1]).unwrap();
    assert_eq!(arrived(), [1, 2]);
    second.detach_mcast(groups[0]).unwrap();
    assert!(second.detach_mcast(groups[0]).is_err(), "it is not in it");
    assert_eq!(arrived(), [1, 1]);
    first.attach_mcast(groups[1]).unwrap();
    drop(first);
    assert_eq!(arrived(), [0, 1]);
    second.detach_mcast(groups[1]).unwrap();
    assert_eq!(arrived(), [0, 0]);
    let drops = b.ctx.counters().drops;
    assert_eq!(
        drops,
        rocinante::stats::Drops::default(),
        "no queue pair is a member, so nothing comes"
    );
}

#[test]
fn each_of_two_shared_queues_says_that_it_runs_low_and_none_in_its_place_does() {
    let sides = undriven();
    let [a, b] = &sides;
    let mut made = Vec::new();
    for round in 0..3 {
        let queues = [(); 2].map(|()| b.pd.create_srq(8, 1).unwrap());
        made.push(queues.each_ref().map(rocinante::Srq::number));
        assert_eq!(events(b), []);
        for srq in &queues {
            for wr_id in 0..2 {
                srq.post_recv(&[RecvWr { wr_id, sges: &[b.mr.sge(0, 64)] }]).unwrap();
            }
            srq.arm(2).unwrap();
        }
        let qps = queues.each_ref().map(|srq| {
            let qp = a.qp();
            let peer = b.pd.qp(&b.cq, &b.cq).access(Access::ALL).srq(srq).build().unwrap();
            let ends = [qp.endpoint(), peer.endpoint()];
            let options = ConnectOptions::default();
            let peer = peer.connect(&ends[0], &options).unwrap();
            [qp.connect(&ends[1], &options).unwrap(), peer]
        });
        assert_eq!(done(&sides, &qps[1][0], send(1, &[7; 8])), WcStatus::Success);
        assert_eq!(events(b), [AsyncEvent::SrqLimitReached { srq: queues[1].number() }]);
        // Both have an event that waits, which goes with its queue and no other.
        queues[1].arm(1).unwrap();
        for [qp, _] in &qps {
            assert_eq!(done(&sides, qp, send(1, &[7; 8])), WcStatus::Success);
        }
        let mut queues = Vec::from(queues);
        drop((qps, queues.remove(round % 2)));
        assert!(is_ready(&b.ctx.async_fd()), "{round}");
        assert_eq!(events(b), [AsyncEvent::SrqLimitReached { srq: queues[0].number() }]);
        drop(queues);
        assert!(!is_ready(&b.ctx.async_fd()), "{round}");
        while b.cq.poll_one().unwrap().is_some() {}
    }
    assert!(made.iter().flatten().all(|number| made[0].contains(number)), "{made:?}: given again");
}

/// Two queue pairs of one device and two devices of one process: only the addressed one gets the
/// message.
#[test]
fn what_is_sent_to_one_of_two_comes_to_that_one() {
    let net = SimNet::new();
    let pairs = [sides(&net, [false, false]), {
        let ports = [3, 4].map(|last| net.port(&[[10, 0, 0, last].into()], &SimConfig::default()));
        ports.map(|port| Side::over(port.unwrap(), "more", false))
    }];
    let qps = pairs.each_ref().map(|sides| [connect(sides, 20), connect(sides, 20)]);
    for (sides, qps) in pairs.iter().zip(&qps) {
        for (number, [qp, peer]) in (0..).zip(qps) {
            peer.post_recv(&[RecvWr { wr_id: number, sges: &[sides[1].mr.sge(0, 64)] }]).unwrap();
            assert_eq!(done(sides, qp, send(9, &[number as u8; 8])), WcStatus::Success);
            let wc = sides[1].cq.poll_one().unwrap().unwrap();
            assert_eq!((wc.wr_id, wc.qpn), (number, peer.qpn()));
            assert_eq!(sides[1].mr.to_vec(0, 8), [number as u8; 8]);
            assert_eq!(sides[1].cq.poll_one().unwrap(), None);
        }
    }
    let quiet = |sides: &[Side; 2]| sides.iter().all(|side| side.cq.poll_one().unwrap().is_none());
    assert!(pairs.iter().all(quiet));
    // Only its own number reaches a queue pair in the place of another.
    for (sides, qps) in pairs.iter().zip(qps) {
        let [[_, _], [qp, gone]] = qps;
        let number = gone.qpn();
        drop(gone);
        // Numbers are random: in one of 8,192 tries a successor has this one.
        let _successors = loop {
            let made = [(); 8].map(|()| connect(sides, 20));
            if made.iter().all(|[_, next]| next.qpn() != number) {
                break made;
            }
        };
        qp.post_send(&[send(1, &[7; 8])]).unwrap();
        let before = sides[1].ctx.counters().drops.unknown_qpn;
        sides[1].ctx.progress();
        assert_eq!(sides[1].ctx.counters().drops.unknown_qpn, before + 1);
        assert_eq!(sides[1].cq.poll_one().unwrap(), None);
    }
}

/// Two addresses of each device: a connection moves to the second ones while both ends are in SQD,
/// and back. A second connection stays where it is. No path is left over.
#[test]
fn a_connection_moves_to_other_addresses_in_sqd() {
    let net = SimNet::new();
    let own = [[1, 11], [2, 12]].map(|last| last.map(|last| IpAddr::from([10, 0, 0, last])));
    let sides =
        own.map(|own| Side::over(net.port(&own, &SimConfig::default()).unwrap(), "two", false));
    let qps = [connect(&sides, 20), connect(&sides, 20)];
    let paths = || sides.each_ref().map(|side| side.ctx.resources().unwrap().paths);
    let before = paths();
    let write_both_ways = |pair: &[Qp; 2]| {
        let [a, b] = &sides;
        assert_eq!(
            done(&sides, &pair[0], write(1, (b.mr.address(), b.mr.rkey()))),
            WcStatus::Success
        );
        pair[1].post_send(&[write(2, (a.mr.address(), a.mr.rkey()))]).unwrap();
        let mut wc = None;
        crate::sim::until("the other direction", || {
            a.ctx.progress();
            wc = b.cq.poll_one().unwrap();
            wc.is_some()
        });
        assert_eq!(wc.unwrap().status, WcStatus::Success);
    };
    let [moving, staying] = &qps;
    for sgid_index in [1, 0, 1] {
        moving.iter().for_each(|qp| qp.modify(&ModifyAttr::state(QpState::Sqd)).unwrap());
        for (at, qp) in moving.iter().enumerate() {
            let to = PeerPath::new(own[1 - at][sgid_index]).sgid_index(sgid_index);
            let bad = ModifyAttr { attr: QpAttr::default(), path: Some(to.sgid_index(2)) };
            assert!(matches!(qp.modify(&bad), Err(VerbsError::Invalid(_))));
            qp.modify(&ModifyAttr { attr: QpAttr::default(), path: Some(to) }).unwrap();
            let peer = qp.query().1.peer.unwrap();
            assert_eq!((peer.local, peer.remote), (own[at][sgid_index], own[1 - at][sgid_index]));
        }
        moving.iter().for_each(|qp| qp.modify(&ModifyAttr::state(QpState::Rts)).unwrap());
        for _ in 0..3 {
            write_both_ways(moving);
            write_both_ways(staying);
        }
        assert_eq!(paths(), before);
    }
    // A peer that stayed behind does not hear the other any more, and that gives up.
    let [qp, _] = staying;
    qp.modify(&ModifyAttr::state(QpState::Sqd)).unwrap();
    let attr = QpAttr { retry_cnt: Some(0), timeout: Some(1), ..QpAttr::default() };
    qp.modify(&ModifyAttr { attr, path: Some(PeerPath::new(own[1][0]).sgid_index(1)) }).unwrap();
    qp.modify(&ModifyAttr::state(QpState::Rts)).unwrap();
    let b = &sides[1];
    assert_eq!(done(&sides, qp, write(1, (b.mr.address(), b.mr.rkey()))), WcStatus::RetryExcErr);
}
