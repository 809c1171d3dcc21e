//! After a refusal, or beside something under way, all else is as before.

use std::sync::Barrier;

use rocinante_netdev::{Interface, Shards, Slots};
use rocinante_soft::model::qp::{ModifyAttr, PostListError};
use rocinante_soft::{Hca, Inbox};
use rocinante_stack::cm::{CmError, ListenerId};
use rocinante_stack::mem::MwType;
use rocinante_stack::types::{Key, Psn};
use rocinante_stack::verbs::{QpEvent, QpState, WcOpcode};
use rocinante_stack::wire::cm::{PortSpace, ServiceId};
use rocinante_stack::{PostError, QpAttr};

use super::*;
use crate::mr::Mr;

const SERVICE: ServiceId = ServiceId::of_port(PortSpace::Tcp, 7471);

/// A place where this process does not get to listen, because the connection manager refuses, or a
/// process that comes to an end has it: the next attempt fails for no other reason, and succeeds
/// once nothing is in the way.
#[test]
fn a_place_that_was_refused_is_free() {
    let ctx = device(&SimNet::new(), &[1], false);
    let device = soft(&ctx);
    for address in [None, Some(ip(1)), Some("fe80::1".parse().unwrap())] {
        let place = (SERVICE, address);
        for _ in 0..3 {
            let before = ctx.resources();
            let refused = device.claim(place, |_| Err(CmError::Full)).unwrap_err();
            assert_eq!(refused.to_string(), VerbsError::from(CmError::Full).to_string());
            assert_eq!(ctx.resources(), before);
        }
        let listener = device.claim(place, |_| Ok(ListenerId(7))).unwrap();
        assert_eq!(ctx.resources().unwrap().listeners, 1);
        // The same place is taken, and is so after the refusal; another is not.
        for _ in 0..2 {
            let refused = device.claim(place, |_| Ok(ListenerId(8))).unwrap_err();
            assert_eq!(refused.to_string(), VerbsError::from(CmError::InUse).to_string());
        }
        let other = (ServiceId::of_port(PortSpace::Udp, 7471), address);
        let second = device.claim(other, |_| Ok(ListenerId(9))).unwrap();
        for listener in [listener, second, ListenerId(8)] {
            device.release_claim(&mut device.cm_core().hold(), listener);
        }
        assert_eq!(ctx.resources().unwrap().listeners, 0);
    }
}

/// The same for other processes on the address: a second lease is one, as far as the kernel knows.
#[test]
fn a_place_that_was_refused_is_free_for_neighbours() {
    let here = crate::doc::addresses().0;
    let lo = Interface::by_name("lo").unwrap();
    let lease = || Slots::lease(&lo, &[here], &PortConfig::default(), Shards::ONE).unwrap();
    let [own, neighbour] = [(); 2].map(|()| Arc::new(lease()));
    let port = SimNet::new().port(&[here], &SimConfig::default()).unwrap();
    let parts = (vec![AnyPort::from(port)], Some(own));
    let hca =
        Hca::start(&settings(false), "sim", parts, (String::new(), None), None, None).unwrap();
    let device = rocinante_soft::Device::new(hca, Arc::new(Inbox::new().unwrap()), true).unwrap();
    for address in [None, Some(here)] {
        let place = (SERVICE, address);
        for _ in 0..2 {
            device.claim(place, |_| Err(CmError::Full)).unwrap_err();
            neighbour.listen(SERVICE.0, address).expect("it is free");
            let refused = device.claim(place, |_| Ok(ListenerId(7))).unwrap_err();
            assert_eq!(refused.to_string(), VerbsError::from(CmError::InUse).to_string());
            neighbour.unlisten(SERVICE.0, address);
        }
        let listener = device.claim(place, |_| Ok(ListenerId(7))).unwrap();
        neighbour.listen(SERVICE.0, address).expect_err("it is taken");
        device.release_claim(&mut device.cm_core().hold(), listener);
        neighbour.listen(SERVICE.0, address).expect("it is free again");
        neighbour.unlisten(SERVICE.0, address);
    }
}

/// A list in which a request is refused, posted to a device that is free, and while another thread
/// has it: those before it execute, those from it on do not.
#[test]
fn of_a_list_all_before_the_refused_request_is_posted_and_no_more() {
    let net = SimNet::new();
    let [a, b] = &sides(&net, false);
    let made = [a, b].map(|side| {
        let qp = side.pd.qp(&side.cq, &side.cq).access(Access::ALL);
        qp.max_send_wr(2).max_recv_wr(2).max_inline_data(64).build().unwrap()
    });
    let [to_a, to_b] = made.each_ref().map(|qp| qp.endpoint());
    let [near, far] = made;
    let options = ConnectOptions::default();
    let (near, far) =
        (near.connect(&to_b, &options).unwrap(), far.connect(&to_a, &options).unwrap());
    let mrs = [a, b].map(|side| side.pd.allocate(64, Access::ALL).unwrap());
    let (long, many) = ([0; 65], [mrs[0].sge(0, 1); 17]);
    let too_long = SendWr::send(&long);
    let too_wide = SendWr::send(&many);
    let good = |wr_id| SendWr::send(b"good").wr_id(wr_id);
    let settle = || {
        for _ in 0..3 {
            b.ctx.progress();
            a.ctx.progress();
        }
        let all = |side: &Side| std::iter::from_fn(|| side.cq.poll_one().unwrap()).count();
        (all(a), all(b))
    };
    let receive = |wr_id, mr: &Mr| far.post_recv(&[RecvWr { wr_id, sges: &[mr.sge(0, 64)] }]);
    for held in [false, true] {
        for all_or_none in [false, true] {
            let lists = [
                (vec![good(1), too_long, good(3)], 1, PostError::InlineTooLong),
                (vec![good(1), too_wide, good(3)], 1, PostError::TooManySges),
                (vec![good(1), good(2), good(3)], 2, PostError::Full),
                (vec![too_long, good(2)], 0, PostError::InlineTooLong),
            ];
            for (list, index, error) in lists {
                (0..2).for_each(|wr_id| receive(wr_id, &mrs[1]).unwrap());
                let holds = held.then(|| soft(&a.ctx).shards.first().hold());
                let refused = match all_or_none {
                    false => near.post_send(&list).unwrap_err(),
                    true => near.post_send_all(&list).unwrap_err(),
                };
                drop(holds);
                let what = format!("{error:?}, held {held}, all or none {all_or_none}");
                assert_eq!(refused, PostListError { index, error }, "{what}");
                let posted = if all_or_none { 0 } else { index };
                assert_eq!(settle(), (posted, posted), "{what}");
                // The queue has the room that it had.
                (posted..2).for_each(|n| near.post(good(n as u64)).unwrap());
                assert_eq!(settle(), (2 - posted, 2 - posted), "{what}");
            }
        }
        // The other queue likewise.
        let list = [mrs[1].sge(0, 64)];
        let [first, second, third] = [1, 2, 3].map(|wr_id| RecvWr { wr_id, sges: &list });
        let wide = [mrs[1].sge(0, 1); 17];
        let too_wide = RecvWr { wr_id: 4, sges: &wide };
        for (list, index, error) in [
            ([first, too_wide, third], 1, PostError::TooManySges),
            ([first, second, third], 2, PostError::Full),
        ] {
            let holds = held.then(|| soft(&b.ctx).shards.first().hold());
            let refused = far.post_recv(&list).unwrap_err();
            drop(holds);
            assert_eq!(refused, PostListError { index, error });
            (index..2).for_each(|_| receive(9, &mrs[1]).unwrap());
            (0..2).for_each(|n| near.post(good(n)).unwrap());
            assert_eq!(settle(), (2, 2), "{error:?}, held {held}");
        }
    }
}

/// A queue pair that breaks before it may send is in ERR, and flushes what is posted, as one in RTS
/// does: with the device free, and while another thread has it.
#[test]
fn one_that_breaks_in_rtr_flushes_what_is_posted() {
    let net = SimNet::new();
    let [a, b] = &sides(&net, false);
    for (all, held) in [(false, false), (false, true), (true, false), (true, true)] {
        let near = a.qp();
        let far = b.pd.qp(&b.cq, &b.cq).build_reset().unwrap();
        let (to_near, to_far) = (near.endpoint(), far.endpoint());
        let rtr = QpAttr {
            state: Some(QpState::Rtr),
            path_mtu: Some(Mtu::Mtu1024),
            dest_qpn: Some(to_near.qpn),
            rq_psn: Some(to_near.psn),
            max_dest_rd_atomic: Some(1),
            min_rnr_timer: Some(12),
            ..QpAttr::default()
        };
        far.modify(&ModifyAttr::init(Access::ALL)).unwrap();
        far.modify(&ModifyAttr { attr: rtr, path: Some(PeerPath::to(&to_near)) }).unwrap();
        let near = near.connect(&to_far, &ConnectOptions::default()).unwrap();
        let post = || {
            let wr = SendWr::send(b"").wr_id(7);
            let posted = if all { far.post_send_all(&[wr]) } else { far.post_send(&[wr]) };
            posted.map_err(|refused| refused.error)
        };
        assert_eq!(post(), Err(PostError::State));
        let op = SendOp::Write { remote: 0, rkey: Key(0x77), imm: None };
        near.post(SendWr::new(op, SendData::Inline(b"no"))).unwrap();
        [b, a].iter().for_each(|side| side.ctx.progress());
        assert_eq!((far.state(), far.query().0), (QpState::Err, QpState::Err));
        let events = std::iter::from_fn(|| b.ctx.poll_async_event()).collect::<Vec<_>>();
        let of_far = |event| AsyncEvent::Qp { qpn: to_far.qpn, event };
        assert_eq!(events.last(), Some(&of_far(QpEvent::AccessErr)), "{events:?}");
        std::thread::scope(|scope| {
            let holds = held.then(|| soft(&b.ctx).shards.first().hold());
            let posting = scope.spawn(post);
            std::thread::sleep(Duration::from_millis(if held { 20 } else { 0 }));
            drop(holds);
            assert_eq!(posting.join().unwrap(), Ok(()));
        });
        let wc = b.cq.poll_one().unwrap().unwrap();
        assert_eq!((wc.wr_id, wc.status), (7, WcStatus::WrFlushErr));
        let wc = a.cq.poll_one().unwrap().unwrap();
        assert_eq!(wc.status, WcStatus::RemAccessErr);
    }
}

/// A change of a queue pair that is refused leaves its completions, its receives and the room of
/// its queues.
#[test]
fn a_refused_change_leaves_requests_and_completions() {
    let net = SimNet::new();
    let [a, b] = &sides(&net, false);
    let (path, psn) = (Some(PeerPath::new(ip(2))), Some(Psn::new(7)));
    let to = |state| QpAttr { state: Some(state), ..QpAttr::default() };
    let foreign = Some(PeerPath::new("fd00::2".parse().unwrap()));
    for (what, attr, path) in [
        ("RESET with a path", to(QpState::Reset), path),
        ("RESET with a PSN", QpAttr { sq_psn: psn, ..to(QpState::Reset) }, None),
        ("ERR with a path", to(QpState::Err), path),
        ("ERR with a PSN", QpAttr { rq_psn: psn, ..to(QpState::Err) }, None),
        ("INIT", ModifyAttr::init(Access::ALL).attr, None),
        ("RTR", to(QpState::Rtr), path),
        ("SQD with retries", QpAttr { retry_cnt: Some(1), ..to(QpState::Sqd) }, None),
        ("RTS with a timer", QpAttr { min_rnr_timer: Some(32), ..to(QpState::Rts) }, None),
        ("another family", to(QpState::Reset), foreign),
        ("an MTU", QpAttr { path_mtu: Some(Mtu::Mtu256), ..QpAttr::default() }, None),
    ] {
        let made = [a, b].map(|side| {
            let qp = side.pd.qp(&side.cq, &side.cq).access(Access::ALL);
            qp.max_send_wr(2).max_recv_wr(2).build().unwrap()
        });
        let [to_a, to_b] = made.each_ref().map(|qp| qp.endpoint());
        let options = ConnectOptions::default();
        let [near, far] = made;
        let near = near.connect(&to_b, &options).unwrap();
        let far = far.connect(&to_a, &options).unwrap();
        let mrs = [a, b].map(|side| side.pd.allocate(64, Access::ALL).unwrap());
        let receive = |qp: &Qp, wr_id, mr: &Mr| {
            let posted = qp.post_recv(&[RecvWr { wr_id, sges: &[mr.sge(0, 64)] }]);
            posted.map_err(|refused| refused.error)
        };
        let settle = || [a, b, a].iter().for_each(|side| side.ctx.progress());
        let taken = || {
            let all = std::iter::from_fn(|| a.cq.poll_one().unwrap());
            all.map(|wc| (wc.wr_id, wc.status)).collect::<Vec<_>>()
        };
        receive(&near, 5, &mrs[0]).unwrap();
        receive(&far, 6, &mrs[1]).unwrap();
        near.post(SendWr::send(b"before").wr_id(1)).unwrap();
        settle();
        for _ in 0..2 {
            let before = near.query();
            near.modify(&ModifyAttr { attr, path }).expect_err(what);
            assert_eq!(near.query(), before, "{what}");
        }
        assert_eq!(taken(), [(1, WcStatus::Success)], "{what}");
        // One of its receives is there, and no more room than for another.
        receive(&near, 7, &mrs[0]).unwrap();
        assert_eq!(receive(&near, 8, &mrs[0]), Err(PostError::Full), "{what}");
        (0..2).for_each(|_| far.post(SendWr::send(b"after")).unwrap());
        settle();
        assert_eq!(taken(), [5, 7].map(|wr_id| (wr_id, WcStatus::Success)), "{what}");
        (2..4).for_each(|wr_id| near.post(SendWr::send(b"after").wr_id(wr_id)).unwrap());
        assert_eq!(near.post(SendWr::send(b"after")), Err(PostError::Full), "{what}");
        drop((near, far));
        while b.cq.poll_one().unwrap().is_some() {}
    }
}

/// A queue pair that is reset has all the room of its queues, whether its requests were posted
/// while another thread had the device or not.
#[test]
fn a_queue_pair_that_is_reset_has_all_of_its_room() {
    let [a, b] = &sides(&SimNet::new(), false);
    let qp = a.pd.qp(&a.cq, &a.cq).max_send_wr(2).max_recv_wr(3).build_reset().unwrap();
    let to = b.qp();
    let path = Some(PeerPath::new(ip(2)));
    let psn = Some(Psn::new(7));
    let rtr = QpAttr {
        state: Some(QpState::Rtr),
        path_mtu: Some(Mtu::Mtu256),
        dest_qpn: Some(to.endpoint().qpn),
        rq_psn: psn,
        max_dest_rd_atomic: Some(1),
        min_rnr_timer: Some(12),
        ..QpAttr::default()
    };
    let rts = QpAttr {
        state: Some(QpState::Rts),
        sq_psn: psn,
        timeout: Some(14),
        retry_cnt: Some(7),
        rnr_retry: Some(7),
        max_rd_atomic: Some(1),
        ..QpAttr::default()
    };
    for round in 0..6 {
        qp.modify(&ModifyAttr::init(Access::ALL)).unwrap();
        qp.modify(&ModifyAttr { attr: rtr, path }).unwrap();
        qp.modify(&ModifyAttr { attr: rts, path: None }).unwrap();
        let held = (round % 2 == 1).then(|| soft(&a.ctx).shards.first().hold());
        let receive = || qp.post_recv(&[RecvWr { wr_id: 1, sges: &[] }]).map_err(|it| it.error);
        let send = || qp.post(SendWr::send(b""));
        let fits = |post: &dyn Fn() -> Result<(), PostError>| {
            (0..9).take_while(|_| post().is_ok()).count()
        };
        assert_eq!((fits(&receive), fits(&send)), (3, 2), "{round}");
        assert_eq!((receive(), send()), (Err(PostError::Full), Err(PostError::Full)));
        drop(held);
        qp.modify(&ModifyAttr::state(QpState::Reset)).unwrap();
        assert!(a.cq.poll_one().unwrap().is_none(), "nothing completes");
    }
}

/// Receives that were posted before a connection is refused are there for the next one.
#[test]
fn a_refused_connection_leaves_the_receives() {
    let net = SimNet::new();
    let [a, b] = &sides(&net, false);
    let usual = ConnectOptions::default();
    let foreign = b.qp().endpoint().address("fd00::2".parse().unwrap());
    for (what, options) in [
        ("family", usual),
        ("timeout", usual.timeout(32)),
        ("retries", usual.retry_cnt(8)),
        ("rnr retries", usual.rnr_retry(8)),
        ("rnr timer", usual.min_rnr_timer(32)),
        ("reads", usual.max_rd_atomic(u8::MAX)),
        ("reads of the peer", usual.max_dest_rd_atomic(u8::MAX)),
    ] {
        let (mut qp, peer) = (a.qp(), b.qp());
        let mr = a.pd.allocate(64, Access::LOCAL_WRITE).unwrap();
        qp.post_recv(&[RecvWr { wr_id: 5, sges: &[mr.sge(0, 64)] }]).unwrap();
        let (before, to) = (a.ctx.resources(), peer.endpoint());
        for _ in 0..2 {
            let to = if what == "family" { &foreign } else { &to };
            qp = *qp.connect(to, &options).map(drop).expect_err(what).value;
            assert_eq!(a.ctx.resources(), before, "{what}");
        }
        let peer = peer.connect(&qp.endpoint(), &usual).unwrap();
        let _qp = qp.connect(&to, &usual).unwrap();
        peer.post(SendWr::send(b"after it")).unwrap();
        a.ctx.progress();
        let wc = a.cq.poll_one().unwrap().expect(what);
        assert_eq!((wc.wr_id, wc.opcode, wc.status), (5, WcOpcode::Recv, WcStatus::Success));
    }
}

/// Threads that make objects at one time get no more than one after the other, on all shards
/// together; and the same number again when those are gone.
#[test]
fn threads_that_make_objects_at_once_stay_within_the_limits() {
    const THREADS: usize = 8;
    const MAX: u32 = 3;
    let limits = Limits::default().max_qp(MAX).max_cq(MAX).max_mr(MAX).max_srq(MAX).max_mw(MAX);
    type Make = fn(&Context) -> Result<Box<dyn Send>, VerbsError>;
    fn boxed<T: Send + 'static>(made: T) -> Box<dyn Send> {
        Box::new(made)
    }
    let makes: [(&str, Make); 5] = [
        ("queues", |ctx| ctx.create_cq(1).map(boxed)),
        ("regions", |ctx| ctx.alloc_pd().allocate(64, Access::ALL).map(boxed)),
        ("shared queues", |ctx| ctx.alloc_pd().create_srq(1, 1).map(boxed)),
        ("windows", |ctx| ctx.alloc_pd().alloc_mw(MwType::Type1).map(boxed)),
        ("queue pairs", |ctx| {
            let cq = ctx.create_cq(1)?;
            ctx.alloc_pd().qp(&cq, &cq).build().map(boxed)
        }),
    ];
    for own in [&[1][..], &[1, 2]] {
        let limits = limits.max_cq(64);
        let ctx = device_with(&SimNet::new(), own, &Settings { limits, ..settings(false) });
        let nothing = ctx.resources().unwrap();
        for (what, make) in makes {
            let max = match what {
                "windows" if own.len() > 1 => continue,
                "queues" => 64,
                _ => MAX as usize,
            };
            for round in 0..3 {
                let start = Barrier::new(THREADS);
                let made: Vec<_> = std::thread::scope(|scope| {
                    let threads = [(); THREADS].map(|()| {
                        scope.spawn(|| {
                            start.wait();
                            (0..max.div_ceil(THREADS) + 2).filter_map(|_| make(&ctx).ok()).collect()
                        })
                    });
                    threads.into_iter().flat_map(|it| -> Vec<_> { it.join().unwrap() }).collect()
                });
                assert_eq!(made.len(), max, "{what}, round {round}, {} shards", own.len());
                drop(made);
                assert_eq!(ctx.resources().unwrap(), nothing, "{what}");
            }
        }
    }
}

/// The numbers of protection domains begin again after 2^32 of them.
#[test]
fn no_domain_gets_the_number_of_another_that_is_there() {
    let ctx = device(&SimNet::new(), &[1], false);
    let number = |pd: &Pd| match &pd.inner.kind {
        crate::context::PdKind::Soft(pd) => pd.id.0,
        crate::context::PdKind::Kernel(_) => panic!(),
    };
    let old = [(); 3].map(|()| ctx.alloc_pd());
    soft(&ctx).pds.store(u32::MAX - 1, Ordering::Relaxed);
    let fresh = [(); 4].map(|()| ctx.alloc_pd());
    let numbers: Vec<u32> = old.iter().chain(&fresh).map(number).collect();
    assert_eq!(numbers, [1, 2, 3, u32::MAX - 1, u32::MAX, 4, 5]);
    assert_eq!(ctx.resources().unwrap().pds, numbers.len());
}
