//! The contents of the tables of a shard, of a queue pair's operations and of a device: nothing
//! that is over, and all that is not.

use rocinante_soft::model::qp::ModifyAttr;
use rocinante_stack::types::Time;
use rocinante_stack::verbs::QpState;

use super::*;
use crate::asynchronous::Operation;
use crate::mr::Mr;

/// Drives all shards of both devices until nothing more happens.
fn settle(sides: &[Side; 2]) {
    for _ in 0..4 {
        sides.iter().rev().for_each(|side| side.ctx.progress());
    }
}

/// The entries of the connection manager's tables on the shards.
fn held(sides: &[Side; 2]) -> [usize; 2] {
    sides.each_ref().map(|side| soft(&side.ctx).cm_core().hold().cm_owners.held())
}

/// Everything that a program can begin there, ended in each way.
#[test]
fn the_tables_of_the_connection_manager_hold_what_is_not_over() {
    let net = SimNet::new();
    let sides = sides(&net, false);
    let [a, b] = &sides;
    assert_eq!(held(&sides), [0, 0]);
    let listener = Listener::bind(&b.ctx, SERVER, 4).unwrap();
    let questions = DatagramListener::bind(&b.ctx, SERVER, 4).unwrap();
    // A listener has its place, which is claimed.
    let listening = [0, 6];
    assert_eq!(held(&sides), listening);
    let ask = || {
        let asked = Connecting::start(a.qp(), SERVER, &Params::default()).unwrap();
        settle(&sides);
        asked
    };
    let question = || {
        let asked = Resolving::start(&a.ctx, 0, SERVER, b"").unwrap();
        settle(&sides);
        asked
    };
    let ends: [(&str, &dyn Fn()); 7] = [
        ("given up before it is taken", &|| drop(ask())),
        ("given up after it is taken", &|| {
            let (asked, request) = (ask(), listener.try_request().unwrap().unwrap());
            drop(asked);
            settle(&sides);
            drop(request);
        }),
        ("rejected", &|| {
            let (mut asked, request) = (ask(), listener.try_request().unwrap().unwrap());
            request.reject(b"").unwrap();
            settle(&sides);
            assert!(asked.try_finish().is_err());
        }),
        ("refused by its own side", &|| {
            let (_asked, request) = (ask(), listener.try_request().unwrap().unwrap());
            request.accept(b.qp(), &Params::default().private_data(&[1; 197])).unwrap_err();
            settle(&sides);
        }),
        ("a question that is given up", &|| {
            drop(question());
            drop(questions.try_request());
        }),
        ("a question that is refused", &|| {
            let (mut asked, request) = (question(), questions.try_request().unwrap().unwrap());
            request.reject(b"").unwrap();
            settle(&sides);
            assert!(asked.try_finish().is_err());
        }),
        ("a question that cannot be asked", &|| {
            Resolving::start(&a.ctx, 0, SERVER, &[1; 181]).unwrap_err();
            Resolving::start(&a.ctx, 0, "[fd00::1]:1".parse().unwrap(), b"").unwrap_err();
        }),
    ];
    for (what, end) in ends {
        for _ in 0..3 {
            end();
            settle(&sides);
            assert_eq!(held(&sides), listening, "{what}");
        }
    }
    // Two listeners, each with requests: one goes with its own.
    let other = SocketAddr::new(ip(2), 7472);
    let second = Listener::bind(&b.ctx, other, 4).unwrap();
    let [mut first, mut its, mut its_too] =
        [SERVER, other, other].map(|to| Connecting::start(a.qp(), to, &Params::default()).unwrap());
    let asks = [(); 2].map(|()| question());
    settle(&sides);
    drop(second);
    settle(&sides);
    assert!(its.try_finish().is_err() && its_too.try_finish().is_err(), "both are rejected");
    assert!(first.try_finish().unwrap().is_none());
    let request = listener.try_request().unwrap().expect("that of the first stays");
    let [left, kept] = asks;
    drop(left);
    drop(questions.try_request().unwrap().expect("the first question"));
    let answered = questions.try_request().unwrap().expect("and the second");
    drop((request, answered, first, its, its_too, kept, listener, questions));
    settle(&sides);
    assert_eq!(held(&sides), [0, 0]);
}

/// The paths of QP1 stay as long as they are used.
#[test]
fn a_path_that_is_used_is_not_idle() {
    let ctx = device(&SimNet::new(), &[1], false);
    let mut shard = soft(&ctx).cm_core().hold();
    let (start, ways) = (shard.now(), [(ip(1), ip(2)), (ip(1), ip(3))]);
    let at = |ms: u64| Time(start.0 + ms * 1_000_000);
    let paths = ways.map(|way| shard.cm_path(at(0), way).unwrap());
    assert_eq!(shard.cm_path(at(1500), ways[0]).unwrap(), paths[0]);
    for (ms, left, due) in [(1999, 2, Some(1)), (2000, 1, Some(1500)), (3499, 1, Some(1))] {
        let next = shard.tidy_cm_paths(at(ms));
        assert_eq!(
            (shard.cm_owners.ways.count(), next),
            (left, due.map(|ms| ms * 1_000_000)),
            "{ms}"
        );
    }
    assert_eq!(shard.cm_path(at(3499), ways[0]).unwrap(), paths[0], "the same one");
    assert_eq!((shard.tidy_cm_paths(at(5499)), shard.cm_owners.ways.count()), (None, 0));
}

/// More ways than QP1 has paths for: a new one takes the place of the one used longest ago.
#[test]
fn a_path_too_many_takes_the_place_of_the_one_used_longest_ago() {
    let ctx = device(&SimNet::new(), &[1], false);
    let mut shard = soft(&ctx).cm_core().hold();
    let start = shard.now();
    // As often as a path may be made.
    let at = |nth: u16| Time(start.0 + u64::from(nth) * 10_000_000);
    let way = |nth: u16| (ip(1), std::net::Ipv4Addr::from(0x0a01_0000 | u32::from(nth)).into());
    let mut made = 0;
    while shard.cm_owners.ways.count() == usize::from(made) {
        // The first two are used again and again.
        (0..made.min(2)).for_each(|used| _ = shard.cm_path(at(made), way(used)).unwrap());
        shard.cm_path(at(made), way(made)).unwrap();
        made += 1;
    }
    let max = shard.cm_owners.ways.count();
    assert_eq!(max, usize::from(made) - 1);
    // At one time, for as long as paths may be made.
    let now = at(made);
    let more = (made..).take_while(|nth| shard.cm_path(now, way(*nth)).is_ok()).count();
    assert!((2..max - 4).contains(&more), "{more}");
    let left = (0..made).filter(|nth| shard.cm_path(now, way(*nth)).is_ok());
    let gone = 2..2 + 1 + u16::try_from(more).unwrap();
    assert!(left.eq((0..made).filter(|nth| !gone.contains(nth))), "{gone:?}");
    assert_eq!(shard.cm_owners.ways.count(), max);
}

/// Operations leave nothing where their completions are awaited, however they end.
#[test]
fn an_operation_that_is_over_has_no_slot() {
    let net = SimNet::new();
    let sides = sides(&net, false);
    let [a, b] = sides.each_ref().map(|side| {
        let cq = side.ctx.create_cq(64).unwrap();
        let qp = side.pd.qp(&cq, &cq).access(Access::ALL).max_send_wr(2).max_recv_wr(2);
        AsyncQp::new(qp.build().unwrap()).unwrap()
    });
    let [to_a, to_b] = [&a, &b].map(|qp| qp.endpoint());
    let options = ConnectOptions::default();
    let a = a.connect_to(&to_b, &options).unwrap();
    let _b = b.connect_to(&to_a, &options).unwrap();
    let remote = sides[1].pd.allocate(64, Access::ALL).unwrap();
    let buffer = || sides[0].pd.allocate(64, Access::LOCAL_WRITE).unwrap();
    let regions = || sides[0].ctx.resources().unwrap().mrs;
    let before = regions();
    let poll = |operation: &mut Operation<Mr>| {
        let mut task = std::task::Context::from_waker(std::task::Waker::noop());
        std::pin::Pin::new(operation).poll(&mut task).is_ready()
    };
    // Awaited; dropped when it is complete; dropped before; refused.
    let mut write = a.write(buffer(), remote.remote());
    settle(&sides);
    assert!(poll(&mut write));
    drop(write);
    let mut write = a.write(buffer(), remote.remote());
    assert!(!poll(&mut write));
    settle(&sides);
    drop(write);
    drop(a.write(buffer(), remote.remote()));
    settle(&sides);
    assert_eq!((a.in_flight(), regions()), (0, before));
    let all = [(); 3].map(|()| a.recv(buffer()));
    assert_eq!(a.in_flight(), 2, "the queue is full");
    drop(all);
    assert_eq!((a.in_flight(), regions()), (2, before + 2), "they are still posted");
    a.modify(&ModifyAttr::state(QpState::Err)).unwrap();
    assert_eq!((a.in_flight(), regions()), (0, before));
    let mut late = a.write(buffer(), remote.remote());
    assert!(poll(&mut late));
    drop(late);
    assert_eq!((a.in_flight(), regions()), (0, before));
}

/// Contexts of one device: each gets the device's events, and the events of its own objects.
#[test]
fn each_context_of_a_device_has_its_events() {
    let ctx = device(&SimNet::new(), &[1], false);
    let inbox = Arc::new(rocinante_soft::Inbox::new().unwrap());
    let device = rocinante_soft::Device::new(soft(&ctx).hca().clone(), inbox, true).unwrap();
    let other = Context { device: Device::Soft(device) };
    // Two events: of a queue that is too small, and of its queue pair.
    let overflow = |of: &Context| {
        let (pd, cq) = (of.alloc_pd(), of.create_cq(1).unwrap());
        let qp = pd.qp(&cq, &cq).build().unwrap();
        (0..2).for_each(|wr_id| qp.post_recv(&[RecvWr { wr_id, sges: &[] }]).unwrap());
        qp.qp().modify(&ModifyAttr::state(QpState::Err)).unwrap();
        (qp, cq)
    };
    // The descriptor is readable as long as there are any.
    let events = |of: &Context| {
        let mut count = 0;
        loop {
            let is_ready = is_readable(&of.async_fd());
            match of.poll_async_event() {
                Some(event) => assert!(is_ready, "{event:?}"),
                None => return (count, assert!(!is_ready)).0,
            }
            count += 1;
        }
    };
    let _first = overflow(&ctx);
    let mine = events(&ctx);
    assert!(mine >= 1 && events(&other) == 0, "{mine}");
    let _second = overflow(&other);
    assert_eq!((events(&ctx), events(&other)), (0, mine));
    let _third = [overflow(&ctx), overflow(&ctx)];
    assert_eq!((events(&ctx), events(&other)), (2 * mine, 0));
    soft(&ctx).cm_core().hold().break_down();
    assert_eq!((events(&ctx), events(&other)), (1, 1));
}

/// The shards of a device publish the sums that an agent adds up.
#[test]
fn the_shards_of_a_device_publish_each_object_once() {
    let side = Side::new(device(&SimNet::new(), &[1, 2], false));
    let _mr = side.pd.allocate(64, Access::ALL).unwrap();
    let _made = [(); 3].map(|()| (side.qp(), side.pd.create_srq(4, 1).unwrap()));
    let mut sums = [0; 5];
    for shard in soft(&side.ctx).shards.hold_all().iter_mut() {
        sums.iter_mut().zip(shard.objects()).for_each(|(sum, count)| *sum += count);
    }
    let all = side.ctx.resources().unwrap();
    // Domains are counted when it publishes.
    assert_eq!(sums, [0, all.cqs, all.srqs, all.qps, all.mrs]);
    assert_eq!(sums, [0, 1, 3, 3, 1]);
}

fn is_readable(fd: &impl std::os::fd::AsFd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&Timespec::default())).unwrap() > 0
}

/// Of two questions that wait for the program one is over: the other is not.
#[test]
fn a_question_that_is_over_takes_no_other_along() {
    use rocinante_stack::cm::{Asked, CmEvent, ListenerId, SidrReqId};
    use rocinante_stack::wire::cm::{PortSpace, ServiceId};

    use rocinante_soft::Owner;
    let mailbox = rocinante_soft::provider::mailbox::Mailbox::default();
    let ids = [7, 8, 9].map(SidrReqId);
    for ask in ids {
        let (local, peer, private) = (ip(2), SERVER, Vec::new());
        let asked = Asked { local, peer, service: ServiceId::of_port(PortSpace::Udp, 1), private };
        mailbox.put(CmEvent::Asked { listener: ListenerId(1), ask, asked: asked.into() }).unwrap();
    }
    mailbox.withdraw_ask(ids[1]);
    assert_eq!(ids.map(|ask| mailbox.has_ask(ask)), [true, false, true]);
    assert_eq!(mailbox.numbers(), [7, 9]);
}

/// A peer asks for more than the link takes: it is refused at once, with the reason.
#[test]
fn a_path_mtu_that_does_not_fit_is_refused_by_its_name() {
    let net = SimNet::new();
    let near = Side::new(device(&net, &[1], false));
    let config = SimConfig { mtu: 1500, ..SimConfig::default() };
    let port = AnyPort::from(net.port(&[ip(2)], &config).unwrap());
    let hca = rocinante_soft::Hca::start(
        &settings(false),
        "sim",
        (vec![port], None),
        (String::new(), None),
        None,
        None,
    );
    let inbox = Arc::new(rocinante_soft::Inbox::new().unwrap());
    let ctx = Context {
        device: Device::Soft(rocinante_soft::Device::new(hca.unwrap(), inbox, true).unwrap()),
    };
    let sides = [near, Side::new(ctx)];
    let [a, b] = &sides;
    let listener = Listener::bind(&b.ctx, SERVER, 1).unwrap();
    for _ in 0..3 {
        let mut asked = Connecting::start(a.qp(), SERVER, &Params::default()).unwrap();
        settle(&sides);
        let request = listener.try_request().unwrap().expect("the backlog has room");
        let error = request.accept(b.qp(), &Params::default()).unwrap_err();
        assert!(error.to_string().contains("path MTU of 4096"), "{error}");
        settle(&sides);
        let error = asked.try_finish().unwrap_err();
        let VerbsError::Cm(CmFailure::Rejected { reason, .. }) = error else { panic!("{error}") };
        assert_eq!(reason, RejReason::INVALID_MTU);
    }
}

/// A region that moved to another domain, with other memory and then with other rights.
#[test]
fn a_region_stays_in_the_domain_that_it_moved_to() {
    let side = Side::new(device(&SimNet::new(), &[1], false));
    let other = side.ctx.alloc_pd();
    let mut mr = side.pd.allocate(64, Access::LOCAL_WRITE).unwrap();
    let domain = |mr: &Mr| {
        [&side.pd, &other].map(|pd| {
            let crate::context::PdKind::Soft(pd) = &pd.inner.kind else { panic!() };
            rocinante_soft::Registration::locate(pd, &mr.sge(0, 8), true).is_ok()
        })
    };
    assert_eq!(domain(&mr), [true, false]);
    mr.rereg(&Rereg { pd: Some(&other), len: Some(128), ..Rereg::default() }).unwrap();
    assert_eq!(domain(&mr), [false, true]);
    let access = Some(Access::LOCAL_WRITE | Access::REMOTE_WRITE);
    mr.rereg(&Rereg { access, ..Rereg::default() }).unwrap();
    assert_eq!(domain(&mr), [false, true]);
    mr.check(mr.address(), 128, Access::REMOTE_WRITE).unwrap();
}
