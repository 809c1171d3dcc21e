//! Each future that the crate has, polled by more than one task: the last one that polled is woken,
//! one that was dropped keeps no other waiting, and of two things that happen at once none is lost.
//!
//! Only the test drives the devices, so nothing happens between two polls.

use std::pin::Pin;

use rocinante::cm::{DatagramListener, DatagramService, Resolving, UDP_QKEY};
use rocinante::verbs::QpType;
use rocinante::{CompChannel, PreparedQp};
use sim::undriven;

use super::*;

/// A task that counts how often it is woken.
#[derive(Default)]
struct Task(AtomicUsize);

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl Task {
    fn new() -> Arc<Self> {
        Arc::default()
    }

    fn poll<F: Future + ?Sized>(self: &Arc<Self>, future: Pin<&mut F>) -> Poll<F::Output> {
        future.poll(&mut Context::from_waker(&Waker::from(self.clone())))
    }

    fn is_woken(&self) -> bool {
        self.0.load(Ordering::SeqCst) > 0
    }
}

/// Polls from one task and another in turn; `happen` is the event that the future waits for.
fn the_last_task_is_woken<F: Future>(what: &str, future: F, happen: impl FnOnce()) -> F::Output {
    let mut future = Box::pin(future);
    let [first, last] = [(); 2].map(|()| Task::new());
    for task in [&first, &last, &first, &last] {
        assert!(task.poll(future.as_mut()).is_pending(), "{what}: it is ready already");
    }
    assert!(!first.is_woken() && !last.is_woken(), "{what}: nothing has happened");
    happen();
    assert!(last.is_woken(), "{what}: the last task sleeps");
    match last.poll(future.as_mut()) {
        Poll::Ready(done) => done,
        Poll::Pending => panic!("{what}: woken for nothing"),
    }
}

/// Futures of one thing, each of a task of its own: one is dropped before `happen` does what two
/// of them wait for.
fn whoever_waits_is_woken<F: Future>(
    what: &str,
    make: impl Fn() -> F,
    happen: impl FnOnce(),
) -> [F::Output; 2] {
    let tasks = [(); 3].map(|()| Task::new());
    let mut futures = [(); 3].map(|()| Box::pin(make()));
    for (task, future) in tasks.iter().zip(&mut futures) {
        assert!(task.poll(future.as_mut()).is_pending(), "{what}: it is ready already");
    }
    let [gone, one, two] = futures;
    drop(gone);
    happen();
    assert!(!tasks[0].is_woken(), "{what}: its future is gone");
    let mut left = [one, two].into_iter().zip(&tasks[1..]);
    [(); 2].map(|()| {
        let (mut future, task) = left.next().unwrap();
        assert!(task.is_woken(), "{what}: a task sleeps");
        match task.poll(future.as_mut()) {
            Poll::Ready(done) => done,
            Poll::Pending => panic!("{what}: one of two things is lost"),
        }
    })
}

/// Tasks that poll one thing by calls that keep no future, in turn: `happen` does what each of them
/// waits for, and wakes each once.
fn whoever_polls_is_woken<T>(
    what: &str,
    poll: impl Fn(&mut Context<'_>) -> Poll<T>,
    happen: impl FnOnce(),
) {
    let tasks = [(); 3].map(|()| Task::new());
    for task in [&tasks[..2], &tasks[..]].concat() {
        let waker = Waker::from(task);
        assert!(poll(&mut Context::from_waker(&waker)).is_pending(), "{what}: it is ready already");
    }
    // One that has gone on to something else is woken for nothing.
    let [.., gone] = &tasks;
    happen();
    for task in &tasks {
        assert_eq!(task.0.load(Ordering::SeqCst), 1, "{what}: a task sleeps, or is woken twice");
        if !Arc::ptr_eq(task, gone) {
            let waker = Waker::from(task.clone());
            assert!(poll(&mut Context::from_waker(&waker)).is_ready(), "{what}: one is lost");
        }
    }
}

/// Both sides send and receive what there is.
fn drive(sides: &[Side; 2]) {
    for _ in 0..4 {
        sides.iter().rev().for_each(|side| side.ctx.progress());
    }
}

fn owning(side: &Side) -> AsyncQp<PreparedQp> {
    let cq = side.ctx.create_cq(64).unwrap();
    AsyncQp::new(side.pd.qp(&cq, &cq).access(Access::ALL).build().unwrap()).unwrap()
}

fn connected_owning(sides: &[Side; 2]) -> [AsyncQp<Qp>; 2] {
    let [a, b] = sides.each_ref().map(owning);
    let [to_a, to_b] = [&a, &b].map(|qp| qp.endpoint());
    let options = ConnectOptions::default();
    [a.connect_to(&to_b, &options).unwrap(), b.connect_to(&to_a, &options).unwrap()]
}

#[test]
fn operations() {
    let sides = undriven();
    let [a, b] = &sides;
    let [qp, peer] = connected_owning(&sides);
    let (buffer, remote) = (|| a.pd.allocate(64, Access::LOCAL_WRITE).unwrap(), region(&b.mr));
    let write = the_last_task_is_woken("a WRITE", qp.write(buffer(), remote), || drive(&sides));
    assert_eq!(write.0.unwrap().opcode, WcOpcode::RdmaWrite);
    let read = the_last_task_is_woken("a READ", qp.read(buffer(), remote), || drive(&sides));
    assert_eq!(read.0.unwrap().opcode, WcOpcode::RdmaRead);
    let send = || {
        let _sent = peer.send(b.pd.allocate(8, Access::NONE).unwrap());
        drive(&sides);
    };
    assert_eq!(the_last_task_is_woken("a receive", qp.recv(buffer()), send).0.unwrap().byte_len, 8);
    let two = whoever_waits_is_woken("WRITEs", || qp.write(buffer(), remote), || drive(&sides));
    assert!(two.iter().all(|(wrote, _)| wrote.is_ok()));
    // It completes while the queue pair goes, and none of the program's tasks drives the device.
    let waiting = qp.recv(buffer());
    let ended = the_last_task_is_woken("a flushed receive", waiting, || drop(qp));
    assert_eq!(status(ended.0), WcStatus::WrFlushErr);
}

/// A future that another one replaces in the same task, as `select!` in a loop does.
#[test]
fn a_future_that_is_made_anew_is_woken() {
    let sides = undriven();
    let [qp, _peer] = connect(&sides, 18);
    let task = Task::new();
    for wr_id in 0..3 {
        for _ in 0..3 {
            assert!(task.poll(Box::pin(sides[0].cq.next()).as_mut()).is_pending());
        }
        let mut next = Box::pin(sides[0].cq.next());
        assert!(task.poll(next.as_mut()).is_pending());
        qp.post_send(&[write(wr_id, (sides[1].mr.address(), sides[1].mr.rkey()))]).unwrap();
        drive(&sides);
        assert_eq!(task.0.swap(0, Ordering::SeqCst), 1, "woken once");
        assert!(task.poll(next.as_mut()).is_ready());
    }
}

#[test]
fn completions() {
    let sides = undriven();
    let [a, b] = &sides;
    let [qp, _peer] = connect(&sides, 18);
    let at = (b.mr.address(), b.mr.rkey());
    let complete = |ids: &[u64]| {
        ids.iter().for_each(|wr_id| qp.post_send(&[write(*wr_id, at)]).unwrap());
        drive(&sides);
    };
    let wc = the_last_task_is_woken("next", a.cq.next(), || complete(&[1])).unwrap();
    assert_eq!(wc.wr_id, 1);
    let next = poll_fn(|cx| a.cq.poll_next(cx));
    let wc = the_last_task_is_woken("poll_next", next, || complete(&[2])).unwrap();
    assert_eq!(wc.wr_id, 2);
    let two = whoever_waits_is_woken("next", || a.cq.next(), || complete(&[3, 4]));
    assert_eq!(two.map(|wc| wc.unwrap().wr_id), [3, 4]);
    whoever_polls_is_woken("poll_next", |cx| a.cq.poll_next(cx), || complete(&[5, 6]));
}

/// A queue of the channel with a queue pair that writes to b.
fn announced(sides: &[Side; 2], channel: &CompChannel) -> (Cq, [Qp; 2]) {
    let [a, b] = sides;
    let cq = a.ctx.create_cq_with(16, channel).unwrap();
    let (pd, mr) = (a.pd.clone(), a.pd.allocate(64, Access::ALL).unwrap());
    let side = Side { ctx: a.ctx.clone(), pd, cq: cq.clone(), mr };
    (cq, connect(&[side, clone(b)], 18))
}

#[test]
fn events_of_channels() {
    let sides = undriven();
    let b = &sides[1];
    let channel = sides[0].ctx.create_comp_channel().unwrap();
    let queues = [(); 2].map(|()| announced(&sides, &channel));
    let complete = |count: usize| {
        for (cq, [qp, _]) in &queues[..count] {
            cq.req_notify(false).unwrap();
            qp.post_send(&[write(1, (b.mr.address(), b.mr.rkey()))]).unwrap();
        }
        drive(&sides);
    };
    let of = the_last_task_is_woken("event", channel.event(), || complete(1)).unwrap();
    assert!(of == queues[0].0);
    let event = poll_fn(|cx| channel.poll_event(cx));
    assert!(the_last_task_is_woken("poll_event", event, || complete(1)).unwrap() == queues[0].0);
    let two = whoever_waits_is_woken("events", || channel.event(), || complete(2));
    assert_eq!(two.map(Result::unwrap), queues.each_ref().map(|(cq, _)| cq.clone()));
    whoever_polls_is_woken("poll_event", |cx| channel.poll_event(cx), || complete(2));
}

#[test]
fn events_of_devices() {
    let sides = undriven();
    let [a, b] = &sides;
    // The overflow of a queue is reported, and the error of its queue pair.
    let overflow = || {
        let cq = a.ctx.create_cq(1).unwrap();
        let [qp, peer] = connect(&[Side { cq: cq.clone(), ..clone(a) }, clone(b)], 18);
        let at = (b.mr.address(), b.mr.rkey());
        qp.post_send(&[write(1, at), write(2, at)]).unwrap();
        drive(&sides);
        std::mem::forget((cq, qp, peer));
    };
    let event = the_last_task_is_woken("async_event", a.ctx.async_event(), overflow).unwrap();
    let of_queue = |event: &AsyncEvent| matches!(event, AsyncEvent::CqOverflow { .. });
    let second = a.ctx.poll_async_event().expect("two events");
    assert_eq!([&event, &second].iter().filter(|event| of_queue(event)).count(), 1);
    let event = poll_fn(|cx| a.ctx.poll_event(cx));
    the_last_task_is_woken("poll_event", event, overflow).unwrap();
    while a.ctx.poll_async_event().is_some() {}
    let two = whoever_waits_is_woken("events", || a.ctx.async_event(), overflow);
    assert_eq!(two.iter().flatten().filter(|event| of_queue(event)).count(), 1);
    while a.ctx.poll_async_event().is_some() {}
    whoever_polls_is_woken("poll_event", |cx| a.ctx.poll_event(cx), overflow);
}

const SERVER: SocketAddr = SocketAddr::new(ADDRESSES[1], 7471);

fn prepared(side: &Side) -> PreparedQp {
    side.qp()
}

#[test]
fn requests_and_connections() {
    let sides = undriven();
    let [a, b] = &sides;
    let listener = Listener::bind(&b.ctx, SERVER, 8).unwrap();
    let ask = || Connecting::start(prepared(a), SERVER, &Params::default()).unwrap();
    let mut asked = Vec::new();
    let mut asks = |count: usize| {
        (0..count).for_each(|_| asked.push(ask()));
        b.ctx.progress();
    };
    let request = the_last_task_is_woken("accept", listener.accept(), || asks(1)).unwrap();
    let accept = poll_fn(|cx| listener.poll_accept(cx));
    let second = the_last_task_is_woken("poll_accept", accept, || asks(1)).unwrap();
    let both = whoever_waits_is_woken("requests", || listener.accept(), || asks(2));
    assert!(both.iter().all(Result::is_ok));
    drop(both);
    whoever_polls_is_woken("poll_accept", |cx| listener.poll_accept(cx), || asks(2));
    // Two that connect at one time: each has news of its own, on either side.
    drive(&sides);
    let (first, other) = (asked.remove(0), asked.remove(0));
    let mut accepted = None;
    let accept = |request: rocinante::cm::Request| {
        let connecting = request.accept(prepared(b), &Params::default()).unwrap();
        (connecting, a.ctx.progress()).0
    };
    let connection = the_last_task_is_woken("a connection that is asked for", first, || {
        accepted = Some(accept(request));
    });
    let connection = connection.unwrap();
    let there = the_last_task_is_woken("an accepted one", accepted.unwrap(), || b.ctx.progress());
    let there = there.unwrap();
    let rejected = the_last_task_is_woken("a rejected one", other, || {
        second.reject(b"no").unwrap();
        a.ctx.progress();
    });
    let why = rejected.unwrap_err();
    assert!(matches!(why, VerbsError::Cm(CmFailure::Rejected { .. })), "{why}");
    ends(&sides, &listener, [connection, there]);
}

/// The end of connections: of a first, and of a second that two tasks wait for.
fn ends(sides: &[Side; 2], listener: &Listener, [here, there]: [Connection; 2]) {
    let [a, b] = sides;
    let polls = |cx: &mut Context<'_>| there.poll_disconnected(cx);
    whoever_polls_is_woken("poll_disconnected", polls, || {
        here.disconnect().unwrap();
        b.ctx.progress();
    });
    let ends = poll_fn(|cx| here.poll_disconnected(cx));
    the_last_task_is_woken("poll_disconnected", ends, || drive(sides));
    let mut asked = Connecting::start(prepared(a), SERVER, &Params::default()).unwrap();
    b.ctx.progress();
    let request = listener.try_request().unwrap().expect("it has come");
    let mut accepted = request.accept(prepared(b), &Params::default()).unwrap();
    a.ctx.progress();
    let here = asked.try_finish().unwrap().expect("accepted");
    b.ctx.progress();
    let there = accepted.try_finish().unwrap().expect("established");
    whoever_waits_is_woken(
        "ends",
        || there.disconnected(),
        || {
            here.disconnect().unwrap();
            b.ctx.progress();
        },
    );
    the_last_task_is_woken("the own end", here.disconnected(), || drive(sides));
}

/// The queue pair whose operations own their memory is connected by futures, too.
#[test]
fn connections_of_operations() {
    let sides = undriven();
    let [a, b] = &sides;
    let params = Params::default();
    let listener = Listener::bind(&b.ctx, SERVER, 8).unwrap();
    let connecting = owning(a).connect(SERVER, &params);
    let mut accepting = None;
    let near = the_last_task_is_woken("connect", connecting, || {
        b.ctx.progress();
        let request = listener.try_request().unwrap().expect("it has come");
        let mut accept = Box::pin(owning(b).accept(request, &params));
        assert!(Task::new().poll(accept.as_mut()).is_pending());
        accepting = Some(accept);
        a.ctx.progress();
    });
    let _near = near.unwrap();
    the_last_task_is_woken("accept", accepting.unwrap(), || b.ctx.progress()).unwrap();
}

#[test]
fn datagrams() {
    let sides = undriven();
    let [a, b] = &sides;
    let listener = DatagramListener::bind(&b.ctx, SERVER, 8).unwrap();
    let qp = b.pd.qp(&b.cq, &b.cq).qp_type(QpType::Ud).qkey(UDP_QKEY).build().unwrap();
    let qp = qp.ready().unwrap();
    let mut asked = Vec::new();
    let mut asks = |count: usize| {
        for _ in 0..count {
            asked.push(Resolving::start(&a.ctx, 0, SERVER, b"").unwrap());
        }
        b.ctx.progress();
    };
    let first = the_last_task_is_woken("accept", listener.accept(), || asks(1)).unwrap();
    let accept = poll_fn(|cx| listener.poll_accept(cx));
    let second = the_last_task_is_woken("poll_accept", accept, || asks(1)).unwrap();
    let two = whoever_waits_is_woken("requests", || listener.accept(), || asks(2));
    assert!(two.iter().all(Result::is_ok));
    drop(two);
    whoever_polls_is_woken("poll_accept", |cx| listener.poll_accept(cx), || asks(2));
    let (one, other) = (asked.remove(0), asked.remove(0));
    let service = the_last_task_is_woken("a service", one, || {
        first.accept(&qp, b"").unwrap();
        a.ctx.progress();
    });
    assert_eq!(service.as_ref().map(DatagramService::qpn).unwrap(), qp.qpn());
    let refused = the_last_task_is_woken("a refused one", other, || {
        second.reject(b"").unwrap();
        a.ctx.progress();
    });
    assert!(matches!(refused, Err(VerbsError::Cm(CmFailure::Unresolved { .. }))));
}
