//! Pairs of objects, on a device of two shards where that matters; and calls that fail after they
//! acquired something.

mod beside;
mod tables;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rocinante_netdev::sim::{SimConfig, SimNet, Verdict};
use rocinante_netdev::{AnyPort, PathSpec, Port as _, PortConfig};
use rocinante_soft::Settings;
use rocinante_soft::model::device::Limits;
use rocinante_soft::model::error::VerbsError;
use rocinante_soft::model::event::AsyncEvent;
use rocinante_soft::model::qp::{ConnectOptions, PeerPath};
use rocinante_stack::mem::Access;
use rocinante_stack::types::{Mtu, QueueKind};
use rocinante_stack::verbs::{QpType, RecvWr, SendData, SendOp, SendWr, WcStatus};
use rocinante_stack::{Budget, PeerKind};

use crate::asynchronous::AsyncQp;
use crate::cm::{
    CmFailure, Connecting, DatagramListener, Listener, Params, RejReason, Resolving, SidrStatus,
};
use crate::context::{Context, Pd};
use crate::cq::{Cq, CqKind};
use crate::device::Device;
use crate::exchange::Exchange;
use crate::mr::Rereg;
use crate::qp::{PreparedQp, Qp};
use crate::srq::SrqKind;
use crate::tuning::exchange::LINE_MAX;

pub(super) const PATIENCE: Duration = Duration::from_secs(30);
pub(super) const QKEY: u32 = 0x1111_1111;

pub(super) fn ip(last: u8) -> IpAddr {
    [10, 0, 0, last].into()
}

pub(super) fn settings(background: bool) -> Settings {
    Settings {
        limits: Limits::default().max_qp(64).max_mr(64).max_mw(64),
        window_max: 512,
        advertise_credits: false,
        port: PortConfig::default(),
        cut_writes: true,
        recognises: false,
        cm_retries: None,
        keep_alive: std::time::Duration::ZERO,
        refuses_late: false,
        background,
        cpus: Vec::new(),
        fault: rocinante_soft::faults::FaultWish::default(),
    }
}

/// A device with a shard for each of these addresses.
fn device(net: &SimNet, own: &[u8], background: bool) -> Context {
    device_with(net, own, &settings(background))
}

pub(super) fn device_with(net: &SimNet, own: &[u8], settings: &Settings) -> Context {
    let port = |last: &u8| AnyPort::from(net.port(&[ip(*last)], &SimConfig::default()).unwrap());
    let ports = own.iter().map(port).collect();
    let why = "a test wants it".to_owned();
    let hca = rocinante_soft::Hca::start(settings, "sim", (ports, None), (why, None), None, None)
        .unwrap();
    let inbox = Arc::new(rocinante_soft::Inbox::new().unwrap());
    let device = rocinante_soft::Device::new(hca, inbox, true).unwrap();
    Context { device: Device::Soft(device) }
}

fn soft(ctx: &Context) -> &Arc<rocinante_soft::Device> {
    let Device::Soft(device) = &ctx.device else { panic!("a device in software") };
    device
}

/// A program's objects on a device.
pub(super) struct Side {
    pub(super) ctx: Context,
    pub(super) pd: Pd,
    pub(super) cq: Cq,
}

impl Side {
    pub(super) fn new(ctx: Context) -> Self {
        let (pd, cq) = (ctx.alloc_pd(), ctx.create_cq(64).unwrap());
        Self { ctx, pd, cq }
    }

    fn qp(&self) -> PreparedQp {
        self.pd.qp(&self.cq, &self.cq).access(Access::ALL).build().unwrap()
    }

    fn datagrams(&self) -> Qp {
        let qp = self.pd.qp(&self.cq, &self.cq).qp_type(QpType::Ud).qkey(QKEY);
        qp.build().unwrap().ready().unwrap()
    }
}

/// Two devices of one shard.
fn sides(net: &SimNet, background: bool) -> [Side; 2] {
    [1, 2].map(|own| Side::new(device(net, &[own], background)))
}

const SERVER: SocketAddr = SocketAddr::new(IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2)), 7471);

#[test]
fn a_queue_that_goes_is_forgotten_by_every_shard() {
    let ctx = device(&SimNet::new(), &[1, 2], false);
    for _ in 0..3 {
        let cq = ctx.create_cq(4).unwrap();
        let CqKind::Soft(shared) = &cq.kind else { panic!() };
        let id = shared.id();
        for shard in soft(&ctx).shards.hold_all().iter_mut() {
            assert_eq!(shard.host.cqs.get(id.0).map(|cq| cq.id), Some(id.0));
        }
        drop(cq);
        for shard in soft(&ctx).shards.hold_all().iter_mut() {
            assert_eq!(shard.host.cqs.len(), 0);
        }
    }
}

#[test]
fn shared_receive_queues_of_two_shards_have_two_numbers() {
    let ctx = device(&SimNet::new(), &[1, 2], false);
    let pd = ctx.alloc_pd();
    let both = [(); 2].map(|()| pd.create_srq(4, 1).unwrap());
    let shards = both.each_ref().map(|srq| match srq.kind() {
        SrqKind::Soft(srq) => srq.shard(),
        SrqKind::Kernel(_) => panic!(),
    });
    assert_ne!(shards[0], shards[1]);
    assert_ne!(both[0].number(), both[1].number());
}

#[test]
fn a_number_in_a_connection_is_kept_by_the_shard_that_gave_it() {
    let ctx = device(&SimNet::new(), &[1, 2], false);
    let kept = |ctx: &Context| {
        [0, 1].map(|at| soft(ctx).shards.get(at).unwrap().hold().engine.reserved_qpns())
    };
    for shard in [0, 1] {
        let side = Side::new(ctx.clone());
        let qp = side.pd.qp(&side.cq, &side.cq).access(Access::ALL).shard(shard).build().unwrap();
        let asked = Connecting::start(qp, SERVER, &Params::default()).unwrap();
        let mut one = [0, 0];
        one[shard] = 1;
        assert_eq!(kept(&ctx), one);
        drop(asked);
        ctx.progress();
        assert_eq!(kept(&ctx), [0, 0]);
    }
}

#[test]
fn the_last_queue_pair_of_a_group_takes_the_port_out_of_it() {
    let net = SimNet::new();
    let side = Side::new(device(&net, &[1], false));
    let group = IpAddr::from([239, 1, 2, 3]);
    let mut sender = net.port(&[ip(9)], &SimConfig::default()).unwrap();
    let (local, remote) = (ip(9), group);
    let spec = PathSpec { local, remote, src_port: 0xc001, tos: 0, ttl: 64, flow_label: 0 };
    let path = sender.add_path(&spec).unwrap().id;
    let mut delivered = || {
        let before = net.stats().delivered;
        sender.reserve(path, 64).unwrap().buf.fill(0);
        sender.commit();
        sender.flush(|failure| panic!("{failure:?}"));
        net.stats().delivered - before
    };
    let both = [side.datagrams(), side.datagrams()];
    both.iter().for_each(|qp| qp.attach_mcast(group).unwrap());
    assert_eq!(delivered(), 1);
    let [first, last] = both;
    drop(first);
    assert_eq!(delivered(), 1, "the other is there");
    drop(last);
    assert_eq!(delivered(), 0);
}

#[test]
fn datagrams_leave_before_the_handle_goes_that_they_name() {
    let net = SimNet::new();
    let [a, b] = &sides(&net, false);
    let (from, to) = (a.datagrams(), b.datagrams());
    let source = a.pd.allocate(64, Access::NONE).unwrap();
    for round in 0..20 {
        let before = net.stats().sent;
        let ah = a.pd.create_ah(&PeerPath::new(ip(2))).unwrap();
        let sges = [source.sge(0, 64)];
        for wr_id in [0, 1] {
            let op = SendOp::SendTo { to: ah.to(to.qpn(), QKEY), imm: None };
            let wr = SendWr::new(op, SendData::Sges(&sges)).wr_id(wr_id);
            // The second is batched.
            from.post_send(&[wr]).unwrap();
        }
        drop(ah);
        for wr_id in [0, 1] {
            let wc = a.cq.wait_one(PATIENCE).unwrap();
            assert_eq!((wc.wr_id, wc.status), (wr_id, WcStatus::Success), "round {round}");
        }
        assert_eq!(net.stats().sent - before, 2, "round {round}");
    }
}

#[test]
fn a_region_that_may_not_be_changed_is_what_it_was() {
    let side = Side::new(device(&SimNet::new(), &[1], false));
    let mut mr = side.pd.allocate(64, Access::LOCAL_WRITE).unwrap();
    mr.write(0, &[7; 64]);
    let qp = side.qp();
    qp.post_recv(&[RecvWr { wr_id: 1, sges: &[mr.sge(0, 64)] }]).unwrap();
    let before = (mr.address(), mr.len(), mr.lkey());
    let larger = Rereg { len: Some(4096), ..Rereg::default() };
    let flushed = Access::LOCAL_WRITE | Access::FLUSH_PERSISTENT;
    let error = mr.rereg(&Rereg { access: Some(flushed), ..larger }).unwrap_err();
    assert!(matches!(error, VerbsError::Invalid(_)), "{error}");
    assert_eq!((mr.address(), mr.len(), mr.lkey()), before);
    assert_eq!(mr.to_vec(0, 64), [7; 64]);
    drop(qp);
    mr.rereg(&larger).unwrap();
    assert_eq!(mr.len(), 4096);
}

#[test]
fn a_question_that_is_given_up_is_asked_no_more() {
    let net = SimNet::new();
    net.set_tap(Some(Box::new(|_| Verdict::Drop)));
    let ctx = device(&net, &[1], false);
    let is_idle = || soft(&ctx).cm_core().hold().cm().is_empty();
    let asked = Resolving::start(&ctx, 0, SERVER, b"").unwrap();
    assert!(!is_idle());
    drop(asked);
    assert!(is_idle());
}

/// The acknowledgement of a message of several packets waits for the program's answer, once the
/// program has answered another. Twice without an answer, and none waits.
#[test]
fn a_long_write_is_acknowledged_with_the_answer_of_a_program_that_answers() {
    let net = SimNet::new();
    let sides = sides(&net, false);
    let made = sides.each_ref().map(|side| side.qp());
    let [to_a, to_b] = made.each_ref().map(|qp| qp.endpoint());
    let [a, b] = made;
    let options = ConnectOptions::default();
    let qps = [a.connect(&to_b, &options).unwrap(), b.connect(&to_a, &options).unwrap()];
    let length = 5 * Mtu::Mtu4096.bytes();
    let mrs = sides.each_ref().map(|side| side.pd.allocate(length as usize, Access::ALL).unwrap());
    let write = |from: usize| {
        let sges = [mrs[from].sge(0, length as usize)];
        let (remote, rkey) = (mrs[1 - from].address(), mrs[1 - from].rkey());
        let op = SendOp::Write { remote, rkey, imm: None };
        qps[from].post_send(&[SendWr::new(op, SendData::Sges(&sges))]).unwrap();
    };
    let acks = || soft(&sides[1].ctx).shards.get(0).unwrap().hold().engine.counters().sent_acks;
    // Acknowledged when the WRITE is read; when the answer is posted; by one look more.
    let turn = |answers: bool| {
        let before = acks();
        write(0);
        sides[1].ctx.progress();
        let at_once = acks() - before;
        if answers {
            write(1);
        } else {
            sides[1].ctx.progress();
        }
        let then = acks() - before - at_once;
        for side in &sides {
            side.ctx.progress();
            side.ctx.progress();
            while side.cq.poll_one().unwrap().is_some() {}
        }
        (at_once, then)
    };
    assert_eq!(turn(true), (1, 0), "it is not yet known to answer");
    assert_eq!(turn(true), (0, 1), "with the answer");
    assert_eq!(turn(true), (0, 1));
    assert_eq!(turn(false), (0, 1), "it does not answer any more: by the next look");
    assert_eq!(turn(false), (1, 0), "nor is it expected to");
}

/// A connecting side that waits for its answer, and the request on the other side.
fn asked(a: &Side, listener: &Listener) -> (Connecting, crate::cm::Request) {
    let asked = Connecting::start(a.qp(), SERVER, &Params::default()).unwrap();
    (asked, listener.request(Some(PATIENCE)).unwrap())
}

/// The peer gets the rejection at once, without waiting for the connection manager's timeout.
#[test]
fn a_decision_that_cannot_be_told_rejects_the_request() {
    let net = SimNet::new();
    let [a, b] = &sides(&net, true);
    let listener = Listener::bind(&b.ctx, SERVER, 4).unwrap();
    let long = vec![1; 500];
    for accepts in [true, false] {
        let (asked, request) = asked(a, &listener);
        let error = if accepts {
            let params = Params::default().private_data(&long);
            request.accept(b.qp(), &params).map(drop).unwrap_err()
        } else {
            request.reject(&long).unwrap_err()
        };
        assert!(error.to_string().contains("too much private data"), "{error}");
        let error = asked.wait(PATIENCE).unwrap_err();
        let VerbsError::Cm(CmFailure::Rejected { reason, .. }) = error else { panic!("{error}") };
        assert_eq!(reason, RejReason::CONSUMER);
    }
}

#[test]
fn an_answer_that_cannot_be_told_refuses_the_question() {
    let net = SimNet::new();
    let [a, b] = &sides(&net, true);
    let listener = DatagramListener::bind(&b.ctx, SERVER, 4).unwrap();
    let asked = Resolving::start(&a.ctx, 0, SERVER, b"").unwrap();
    let request = listener.request(Some(PATIENCE)).unwrap();
    let error = request.reject(&[1; 500]).unwrap_err();
    assert!(error.to_string().contains("too much private data"), "{error}");
    let error = asked.wait(PATIENCE).unwrap_err();
    let VerbsError::Cm(CmFailure::Unresolved { status, .. }) = error else { panic!("{error}") };
    assert_eq!(status, SidrStatus::REJECT);
}

#[test]
fn each_side_asks_for_no_more_reads_than_the_other_serves() {
    let net = SimNet::new();
    let [a, b] = &sides(&net, true);
    let listener = Listener::bind(&b.ctx, SERVER, 4).unwrap();
    let params = |ask: u8, serve: u8| {
        Params::default()
            .options(ConnectOptions::default().max_rd_atomic(ask).max_dest_rd_atomic(serve))
    };
    let depths = |connecting: Connecting| {
        let (_, attr, _) = connecting.wait(PATIENCE).unwrap().query();
        (attr.max_rd_atomic.unwrap(), attr.max_dest_rd_atomic.unwrap())
    };
    // The wishes and limits of the side that asks, those of the other, and the agreed values.
    for (ours, theirs, agreed) in [((9, 8), (3, 5), (5, 3)), ((4, 2), (12, 6), (4, 2))] {
        let asked = Connecting::start(a.qp(), SERVER, &params(ours.0, ours.1)).unwrap();
        let request = listener.request(Some(PATIENCE)).unwrap();
        assert_eq!((request.rd_atomic(), request.qp_type()), (ours, QpType::Rc));
        let accepted = request.accept(b.qp(), &params(theirs.0, theirs.1)).unwrap();
        assert_eq!(depths(asked), agreed);
        assert_eq!(depths(accepted), (agreed.1, agreed.0));
    }
}

#[test]
fn a_request_says_which_type_of_queue_pair_it_is_for() {
    let net = SimNet::new();
    let [a, b] = &sides(&net, true);
    let listener = Listener::bind(&b.ctx, SERVER, 4).unwrap();
    let unreliable = a.pd.qp(&a.cq, &a.cq).access(Access::ALL).qp_type(QpType::Uc).build().unwrap();
    let _asked = Connecting::start(unreliable, SERVER, &Params::default()).unwrap();
    assert_eq!(listener.request(Some(PATIENCE)).unwrap().qp_type(), QpType::Uc);
}

/// The request says it, so the side that accepts has no choice.
#[test]
fn both_sides_use_the_path_mtu_of_the_request() {
    let net = SimNet::new();
    let [a, b] = &sides(&net, true);
    let listener = Listener::bind(&b.ctx, SERVER, 4).unwrap();
    let params = |mtu| Params::default().options(ConnectOptions::default().mtu(Some(mtu)));
    let asked = Connecting::start(a.qp(), SERVER, &params(Mtu::Mtu512)).unwrap();
    let request = listener.request(Some(PATIENCE)).unwrap();
    let accepted = request.accept(b.qp(), &params(Mtu::Mtu256)).unwrap();
    for connecting in [asked, accepted] {
        let (_, attr, _) = connecting.wait(PATIENCE).unwrap().query();
        assert_eq!(attr.path_mtu, Some(Mtu::Mtu512));
    }
}

#[test]
fn shards_share_what_a_peer_says_that_it_takes() {
    let net = SimNet::new();
    let said = Budget { bytes: 1 << 20, datagrams: 1 << 10 };
    for (own, share) in [(&[1][..], said), (&[2, 3], said.part(1, 2))] {
        let ctx = device(&net, own, false);
        let share_of = |peer| soft(&ctx).share_of(said, peer);
        assert_eq!(share_of(PeerKind::Rocinante(QueueKind::Memory)), share);
        assert_eq!(share_of(PeerKind::Standard), said);
    }
}

/// A queue pair whose path is gone loses its packets, and holds up no other.
#[test]
fn a_path_that_is_gone_stops_no_other_queue_pair() {
    let net = SimNet::new();
    let [a, b] = &sides(&net, false);
    let connected = || {
        let far = b.pd.qp(&b.cq, &b.cq).qp_type(QpType::Uc).build().unwrap();
        let near = a.pd.qp(&a.cq, &a.cq).qp_type(QpType::Uc).build().unwrap();
        (near.connect(&far.endpoint(), &ConnectOptions::default()).unwrap(), far)
    };
    let [(lost, _far), (sends, _other)] = [(); 2].map(|()| connected());
    let shard = || soft(&a.ctx).shards.first().hold();
    let path_of = |qp: &Qp| shard().engine.query_qp(qp.qpn()).unwrap().1.peer.unwrap().path;
    let gone = path_of(&lost);
    shard().remove_path(gone);
    let sent = || a.ctx.counters().port.tx_datagrams;
    for round in 1..=3 {
        for qp in [&lost, &sends] {
            qp.post_send(&[SendWr::new(SendOp::Send { imm: None }, SendData::Inline(b"x"))])
                .unwrap();
        }
        a.ctx.progress();
        assert_eq!((sent(), a.ctx.counters().refused), (round, (round, libc::ENETUNREACH)));
    }
}

/// A program that only watches its peer while the peer sends much reads all of it later.
#[test]
fn what_is_held_while_nobody_reads_is_given_back() {
    const LINES: usize = 80;
    let net = SimNet::new();
    let [a, b] = &sides(&net, true);
    let listener = Listener::bind(&b.ctx, SERVER, 1).unwrap();
    let line = "x".repeat(64 << 10);
    let sent = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let saying = scope.spawn(|| {
            let request = listener.request(Some(PATIENCE)).unwrap();
            let mut exchange = Exchange::accept_cm(&b.ctx, request).unwrap();
            for _ in 0..LINES {
                exchange.say(&line).unwrap();
                sent.fetch_add(line.len(), Ordering::SeqCst);
            }
            exchange.barrier("end").unwrap();
        });
        let mut exchange = Exchange::connect_cm(&a.ctx, SERVER, PATIENCE).unwrap();
        exchange.set_patience(Some(PATIENCE));
        let watch = exchange.watch().unwrap();
        let end = Instant::now() + PATIENCE;
        let watch_until = |is_over: &dyn Fn() -> bool| {
            while !is_over() {
                assert!(!watch.is_gone() && Instant::now() < end);
            }
        };
        watch_until(&|| sent.load(Ordering::SeqCst) >= LINE_MAX);
        let refused = || a.ctx.counters().transport.send_rnr_err;
        let before = refused();
        watch_until(&|| refused() > before);
        for nth in 0..LINES {
            assert_eq!(exchange.hear().unwrap().len(), line.len(), "line {nth}");
        }
        exchange.barrier("end").unwrap();
        saying.join().unwrap();
    });
}

#[test]
fn a_wait_that_times_out_leaves_no_task_behind() {
    let side = Side::new(device(&SimNet::new(), &[1], true));
    for ms in [0, 1, 1] {
        assert!(matches!(side.cq.wait(Some(Duration::from_millis(ms))), Err(VerbsError::TimedOut)));
    }
    assert!(side.cq.tasks().take().is_empty());
}

/// A request that is staged while the interface goes completes before the queue says that it is
/// gone.
#[test]
fn what_is_posted_while_the_interface_goes_completes() {
    let side = Side::new(device(&SimNet::new(), &[1], false));
    let qp = side.datagrams();
    let mut shard = soft(&side.ctx).shards.get(0).unwrap().hold();
    std::thread::scope(|scope| {
        scope.spawn(|| qp.post_recv(&[RecvWr { wr_id: 7, sges: &[] }]).unwrap()).join().unwrap();
        shard.break_down();
        let waiting = scope.spawn(|| side.cq.wait_one(PATIENCE));
        std::thread::sleep(Duration::from_millis(20));
        drop(shard);
        let wc = waiting.join().unwrap().unwrap();
        assert_eq!((wc.wr_id, wc.status), (7, WcStatus::WrFlushErr));
    });
    assert!(matches!(side.cq.poll_one(), Err(VerbsError::Io(_))));
}

/// Every call that waits on a device ends when its last port breaks, and one that begins to wait
/// then ends at once. Posted requests complete before.
#[test]
fn tasks_end_when_the_interface_goes() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_time().build().unwrap();
    for own in [&[1][..], &[1, 2]] {
        let net = SimNet::new();
        let side = Side::new(device(&net, own, true));
        let ctx = &side.ctx;
        let (idle, channel) = (ctx.create_cq(4).unwrap(), ctx.create_comp_channel().unwrap());
        let with_channel = ctx.create_cq_with(4, &channel).unwrap();
        with_channel.req_notify(false).unwrap();
        let owning = AsyncQp::new(side.qp()).unwrap();
        let received = owning.recv(side.pd.allocate(64, Access::LOCAL_WRITE).unwrap());
        let at = |last| SocketAddr::new(ip(last), 7471);
        let listener = Listener::bind(ctx, at(1), 4).unwrap();
        let datagrams = DatagramListener::bind(ctx, at(1), 4).unwrap();
        let asked = Connecting::start(side.qp(), at(9), &Params::default()).unwrap();
        let (waiting, events) = (idle.clone(), ctx.clone());
        let completed = runtime.spawn(async move { waiting.next().await.err() });
        let tasks = [
            runtime.spawn(async move { listener.accept().await.err() }),
            runtime.spawn(async move { datagrams.accept().await.err() }),
            runtime.spawn(async move { asked.await.err() }),
            runtime.spawn(async move { received.await.0.err() }),
            completed,
        ];
        let event = runtime.spawn(async move { events.async_event().await.unwrap() });
        let channel = runtime.spawn(async move { channel.event().await.unwrap() });
        std::thread::sleep(Duration::from_millis(5));
        assert!(tasks.iter().all(|task| !task.is_finished()));
        assert!(!event.is_finished() && !channel.is_finished());
        for core in soft(ctx).shards.all() {
            assert!(!tasks[4].is_finished(), "a port is left");
            core.hold().break_down();
        }
        runtime.block_on(async {
            let ended = async {
                for task in tasks {
                    assert!(task.await.unwrap().is_some());
                }
                assert_eq!(event.await.unwrap(), AsyncEvent::DeviceFatal);
                assert_eq!(channel.await.unwrap(), with_channel);
            };
            tokio::time::timeout(PATIENCE, ended).await.expect("each task ends");
        });
        let is_gone = |cq: &Cq| matches!(cq.poll_one(), Err(VerbsError::Io(_)));
        assert!(is_gone(&idle) && is_gone(&with_channel) && is_gone(&ctx.create_cq(4).unwrap()));
        assert!(Listener::bind(ctx, at(1), 4).is_err());
        let refused = owning.recv(side.pd.allocate(64, Access::LOCAL_WRITE).unwrap());
        assert!(matches!(runtime.block_on(refused), (Err(VerbsError::Io(_)), _)));
    }
}
