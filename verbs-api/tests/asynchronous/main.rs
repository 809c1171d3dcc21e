//! Tasks that wait: for completions, events and connections, and for operations that own their
//! memory. Two devices on a simulated network, in real time; under tokio and under none.

mod operations;
#[path = "../sim/mod.rs"]
mod sim;
mod tasks;

use std::future::{Future, poll_fn};
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use rocinante::asynchronous::{AsyncQp, Buffer, Part};
use rocinante::cm::{CmFailure, Connecting, Connection, Listener, Params, RejReason};
use rocinante::verbs::{AsyncEvent, SendOp, Sge, WcOpcode};
use rocinante::{
    Access, ConnectOptions, Cq, Mr, Qp, RecvWr, RemoteSlice, SendWr, VerbsError, Wc, WcStatus,
};
use rocinante_netdev::sim::SimNet;
use sim::{ADDRESSES, PATIENCE, Side, connect, send, sides, until, write};

/// Runs a test under each of tokio's runtimes.
fn under_tokio<F: Future<Output = ()>>(test: impl Fn() -> F) {
    for threads in [0, 2] {
        let mut builder = match threads {
            0 => tokio::runtime::Builder::new_current_thread(),
            _ => tokio::runtime::Builder::new_multi_thread(),
        };
        let runtime = builder.worker_threads(threads.max(1)).enable_time().build().unwrap();
        let done = async { tokio::time::timeout(PATIENCE, test()).await };
        runtime.block_on(done).expect("the test ends");
    }
}

/// Ends after `ms` milliseconds.
async fn within<F: Future>(ms: u64, future: F) -> Option<F::Output> {
    tokio::time::timeout(Duration::from_millis(ms), future).await.ok()
}

fn driven() -> [Side; 2] {
    sides(&SimNet::new(), [true, true])
}

/// Queue pairs whose operations own their memory; b's device is driven only by the test if not
/// `b_runs`.
fn owning(b_runs: bool) -> ([Side; 2], AsyncQp<Qp>, AsyncQp<Qp>) {
    let sides = sides(&SimNet::new(), [true, b_runs]);
    let [a, b] = sides.each_ref().map(|side| {
        let cq = side.ctx.create_cq(64).unwrap();
        let qp = side.pd.qp(&cq, &cq).access(Access::ALL).max_send_wr(8).max_recv_wr(8);
        AsyncQp::new(qp.build().unwrap()).unwrap()
    });
    let [to_a, to_b] = [&a, &b].map(|qp| qp.endpoint());
    let options = ConnectOptions::default().timeout(18);
    (sides, a.connect_to(&to_b, &options).unwrap(), b.connect_to(&to_a, &options).unwrap())
}

fn region(mr: &Mr) -> RemoteSlice {
    mr.remote()
}

fn status<T: std::fmt::Debug>(result: Result<T, VerbsError>) -> WcStatus {
    match result {
        Err(VerbsError::Completion(error)) => error.status,
        other => panic!("{other:?}"),
    }
}

/// A region that says when it is freed.
struct Watched {
    mr: Mr,
    freed: Arc<AtomicBool>,
}

impl Watched {
    fn new(side: &Side) -> (Self, Arc<AtomicBool>) {
        let freed = Arc::new(AtomicBool::new(false));
        let mr = side.pd.allocate(64, Access::LOCAL_WRITE).unwrap();
        (Self { mr, freed: freed.clone() }, freed)
    }
}

impl Buffer for Watched {
    fn sge(&self) -> Sge {
        Buffer::sge(&self.mr)
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.freed.store(true, Ordering::SeqCst);
    }
}

/// Polls once, as a task without a waker.
fn poll_once<T>(future: impl Future<Output = T>) -> Option<T> {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => Some(result),
        Poll::Pending => None,
    }
}

#[test]
fn a_task_that_sleeps_is_woken_by_a_completion() {
    under_tokio(|| async {
        let sides = driven();
        let [qp, peer] = connect(&sides, 18);
        let sges = [sides[1].mr.sge(0, 64)];
        for wr_id in 0..200 {
            peer.post_recv(&[RecvWr { wr_id, sges: &sges }]).unwrap();
            qp.post_send(&[send(wr_id, b"hello")]).unwrap();
            let (sent, received) = tokio::join!(sides[0].cq.next(), sides[1].cq.next());
            assert_eq!(sent.map(|wc| (wc.wr_id, wc.opcode)).unwrap(), (wr_id, WcOpcode::Send));
            assert_eq!(received.map(|wc| (wc.wr_id, wc.byte_len)).unwrap(), (wr_id, 5));
        }
    });
}

/// Two queues, each with its own task; completions of one are not the other's.
#[test]
fn each_of_two_queues_wakes_its_own_task() {
    under_tokio(|| async {
        let sides = driven();
        let [a, b] = &sides;
        let other = Side { cq: a.ctx.create_cq(16).unwrap(), ..clone(a) };
        let [first, _peer] = connect(&sides, 18);
        let [second, _its] = connect(&[clone(&other), clone(b)], 18);
        let waiting = [a, &other].map(|side| {
            let cq = side.cq.clone();
            tokio::spawn(async move { cq.next().await.unwrap().wr_id })
        });
        tokio::time::sleep(Duration::from_millis(5)).await;
        second.post_send(&[write(2, (b.mr.address(), b.mr.rkey()))]).unwrap();
        let [one, two] = waiting;
        assert_eq!(two.await.unwrap(), 2);
        assert!(!one.is_finished());
        first.post_send(&[write(1, (b.mr.address(), b.mr.rkey()))]).unwrap();
        assert_eq!(one.await.unwrap(), 1);
    });
}

fn clone(side: &Side) -> Side {
    let mr = side.pd.allocate(64, Access::ALL).unwrap();
    Side { ctx: side.ctx.clone(), pd: side.pd.clone(), cq: side.cq.clone(), mr }
}

#[test]
fn each_of_two_channels_wakes_its_own_task() {
    under_tokio(|| async {
        let [a, b] = driven();
        let channels = [(); 2].map(|()| a.ctx.create_comp_channel().unwrap());
        let cqs = channels.each_ref().map(|channel| a.ctx.create_cq_with(16, channel).unwrap());
        let qps = cqs.each_ref().map(|cq| {
            cq.req_notify(false).unwrap();
            let side = Side { cq: cq.clone(), ..clone(&a) };
            connect(&[side, clone(&b)], 18)
        });
        assert!(within(5, channels[0].event()).await.is_none());
        for at in [1, 0] {
            qps[at][0].post_send(&[write(7, (b.mr.address(), b.mr.rkey()))]).unwrap();
            assert_eq!(channels[at].event().await.unwrap(), cqs[at]);
            assert!(poll_once(channels[1 - at].event()).is_none());
            assert_eq!(cqs[at].poll_one().unwrap().map(|wc| wc.wr_id), Some(7));
        }
        // A queue with a channel is announced there and nowhere else.
        assert!(matches!(cqs[0].next().await, Err(VerbsError::Invalid(_))));
        assert!(AsyncQp::new(a.pd.qp(&cqs[0], &cqs[0]).build().unwrap()).is_err());
    });
}

#[test]
fn a_wait_that_is_given_up_loses_no_completion() {
    under_tokio(|| async {
        let sides = driven();
        let [qp, _peer] = connect(&sides, 18);
        let [a, b] = &sides;
        for wr_id in 0..50 {
            assert!(within(1, a.cq.next()).await.is_none());
            qp.post_send(&[write(wr_id, (b.mr.address(), b.mr.rkey()))]).unwrap();
            assert_eq!(a.cq.next().await.unwrap().wr_id, wr_id);
        }
    });
}

/// Tasks that take from one queue while others post: each completion wakes a task in time.
#[test]
fn tasks_that_race_for_completions_get_all_of_them() {
    const EACH: u64 = 500;
    under_tokio(|| async {
        let sides = driven();
        let [qp, _peer] = connect(&sides, 18);
        let [a, b] = &sides;
        let (qp, taken) = (Arc::new(qp), Arc::new(AtomicUsize::new(0)));
        let target = (b.mr.address(), b.mr.rkey());
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..4 {
            let (cq, taken) = (a.cq.clone(), taken.clone());
            tasks.spawn(async move {
                for _ in 0..EACH {
                    assert_eq!(cq.next().await.unwrap().status, WcStatus::Success);
                    taken.fetch_add(1, Ordering::Relaxed);
                }
            });
            let qp = qp.clone();
            tasks.spawn(async move {
                for wr_id in 0..EACH {
                    // Not without pause: where others want the processor, tasks that spin keep the
                    // device's threads from it.
                    while qp.post_send(&[write(wr_id, target)]).is_err() {
                        tokio::time::sleep(Duration::from_millis(1)).await;
                    }
                    if wr_id.is_multiple_of(7) {
                        tokio::task::yield_now().await;
                    }
                }
            });
        }
        while let Some(done) = tasks.join_next().await {
            done.unwrap();
        }
        assert_eq!(taken.load(Ordering::Relaxed), 4 * EACH as usize);
    });
}

/// Tasks that wait cost an idle device no wake-ups.
#[test]
fn tasks_that_wait_wake_nothing() {
    under_tokio(|| async {
        let [a, _b] = driven();
        let listener = Listener::bind(&a.ctx, SocketAddr::new(ADDRESSES[0], 7471), 4).unwrap();
        let (cq, ctx) = (a.cq.clone(), a.ctx.clone());
        let waiting = [
            tokio::spawn(async move { drop(cq.next().await) }),
            tokio::spawn(async move { drop(listener.accept().await) }),
            tokio::spawn(async move { drop(ctx.async_event().await) }),
        ];
        // Their own beginnings wake the device, on a busy machine for longer.
        let end = tokio::time::Instant::now() + PATIENCE / 2;
        loop {
            let before = a.ctx.background_rounds();
            tokio::time::sleep(Duration::from_millis(200)).await;
            let after = a.ctx.background_rounds();
            if after == before {
                break;
            }
            assert!(tokio::time::Instant::now() < end, "{before:?} and {after:?} in 200 ms");
        }
        waiting.iter().for_each(|task| task.abort());
    });
}

/// A runtime may run a task when it is woken, and the task may call anything.
#[test]
fn tasks_are_woken_while_the_device_is_not_locked() {
    for background in [false, true] {
        wakes_without_locks(background);
    }
}

/// Either the background threads drive the devices, or this one.
fn wakes_without_locks(background: bool) {
    struct Inline(Side, AtomicBool);
    impl Wake for Inline {
        fn wake(self: Arc<Self>) {
            // Locks the whole device.
            drop(self.0.ctx.create_cq(4).unwrap());
            drop(self.0.pd.allocate(64, Access::NONE).unwrap());
            self.1.store(true, Ordering::SeqCst);
        }
    }
    let sides = sides(&SimNet::new(), [background; 2]);
    let [qp, peer] = connect(&sides, 18);
    let [a, b] = &sides;
    let until_woken = |what, (task, _): &(Arc<Inline>, Waker)| {
        until(what, || {
            if !background {
                a.ctx.progress();
                b.ctx.progress();
            }
            task.1.load(Ordering::SeqCst)
        });
    };
    let woken = || {
        let task = Arc::new(Inline(clone(a), AtomicBool::new(false)));
        (task.clone(), Waker::from(task))
    };
    let for_completion = woken();
    assert!(a.cq.poll_next(&mut Context::from_waker(&for_completion.1)).is_pending());
    let for_event = woken();
    assert!(a.ctx.poll_event(&mut Context::from_waker(&for_event.1)).is_pending());
    qp.post_send(&[write(1, (b.mr.address(), b.mr.rkey()))]).unwrap();
    until_woken("the completion wakes", &for_completion);
    // The queue takes one completion.
    let small = Side { cq: a.ctx.create_cq(1).unwrap(), ..clone(a) };
    let [flooding, _its] = connect(&[small, clone(b)], 18);
    let wr = write(2, (b.mr.address(), b.mr.rkey()));
    flooding.post_send(&[wr, wr, wr]).unwrap();
    until_woken("the event wakes", &for_event);
    let listener = Listener::bind(&a.ctx, SocketAddr::new(ADDRESSES[0], 7471), 4).unwrap();
    let for_request = woken();
    assert!(listener.poll_accept(&mut Context::from_waker(&for_request.1)).is_pending());
    let asking = b.pd.qp(&b.cq, &b.cq).build().unwrap();
    let _asked = Connecting::start(asking, listener.address(), &Params::default()).unwrap();
    until_woken("the request wakes", &for_request);
    drop((qp, peer));
}

#[test]
fn asynchronous_events_wake_their_task() {
    under_tokio(|| async {
        let [a, b] = driven();
        let small = Side { cq: a.ctx.create_cq(1).unwrap(), ..clone(&a) };
        let number = small.cq.number();
        let [qp, _peer] = connect(&[small, clone(&b)], 18);
        assert!(within(2, a.ctx.async_event()).await.is_none());
        let ctx = a.ctx.clone();
        let event = tokio::spawn(async move { ctx.async_event().await.unwrap() });
        tokio::task::yield_now().await;
        let wr = write(2, (b.mr.address(), b.mr.rkey()));
        qp.post_send(&[wr, wr, wr]).unwrap();
        assert_eq!(event.await.unwrap(), AsyncEvent::CqOverflow { cq: number });
    });
}

fn unconnected(side: &Side) -> rocinante::PreparedQp {
    side.pd.qp(&side.cq, &side.cq).build().unwrap()
}

#[test]
fn connections_are_made_and_ended() {
    under_tokio(|| async {
        let [a, b] = driven();
        let address = SocketAddr::new(ADDRESSES[1], 7471);
        let listener = Listener::bind(&b.ctx, address, 16).unwrap();
        assert!(within(2, listener.accept()).await.is_none());
        let served = async {
            let request = listener.accept().await?;
            let params = Params::default().private_data(b"welcome");
            request.accept(unconnected(&b), &params)?.await
        };
        let asked = Connecting::start(unconnected(&a), address, &Params::default()).unwrap();
        let (asked, served) = tokio::join!(asked, served);
        let (asked, served) = (asked.unwrap(), Arc::new(served.unwrap()));
        assert_eq!(&asked.private_data()[..7], b"welcome");
        // Each of several tasks learns of the end.
        let learns = |connection: &Arc<Connection>| {
            let connection = connection.clone();
            tokio::spawn(async move { connection.disconnected().await })
        };
        let learning = [(); 3].map(|()| learns(&served));
        tokio::time::sleep(Duration::from_millis(2)).await;
        assert!(learning.iter().all(|task| !task.is_finished()));
        asked.disconnect().unwrap();
        asked.disconnected().await;
        for task in learning {
            task.await.unwrap();
        }
        served.disconnected().await;
        poll_fn(|cx| served.poll_disconnected(cx)).await;
    });
}

#[test]
fn connections_that_are_refused_or_never_answered_end() {
    under_tokio(|| async {
        let [a, b] = driven();
        let address = SocketAddr::new(ADDRESSES[1], 7471);
        let ask = |to| Connecting::start(unconnected(&a), to, &Params::default()).unwrap();
        let reason = |result: Result<Connection, VerbsError>| match result {
            Err(VerbsError::Cm(CmFailure::Rejected { reason, .. })) => reason,
            other => panic!("{other:?}"),
        };
        assert_eq!(reason(ask(address).await), RejReason::INVALID_SERVICE_ID);
        let listener = Listener::bind(&b.ctx, address, 16).unwrap();
        let refuses = async { listener.accept().await.unwrap().reject(b"no").unwrap() };
        let (asked, ()) = tokio::join!(ask(address), refuses);
        assert_eq!(reason(asked), RejReason::CONSUMER);
        // The request is not taken, or the address has no host: the program's patience ends.
        assert!(within(5, ask(address)).await.is_none());
        assert!(within(5, ask(SocketAddr::new([10, 0, 0, 9].into(), 7471))).await.is_none());
        // The first of these was given up, so that the listener has no request.
        until("the withdrawal", || {
            a.ctx.progress();
            b.ctx.cm_counters().unwrap().rejects_received == 1
        });
        assert!(listener.try_request().unwrap().is_none(), "nothing is left of it");
        let again = async {
            let request = listener.accept().await.unwrap();
            request.accept(unconnected(&b), &Params::default()).unwrap().await
        };
        let (asked, accepted) = tokio::join!(ask(address), again);
        assert!(asked.is_ok() && accepted.is_ok());
    });
}

/// Over sockets, and with the connection manager: a message that the client sends as soon as it is
/// connected waits in a receive that was posted before.
#[test]
fn a_client_is_answered_whatever_comes_first() {
    under_tokio(|| async {
        let (here, there) = rocinante::doc::addresses();
        let [server, client] = [there, here].map(|ip| rocinante::Context::open(ip).unwrap());
        let address = SocketAddr::new(there, 7471);
        let listener = Listener::bind(&server, address, 16).unwrap();
        let prepare = |ctx: &rocinante::Context| {
            let (pd, cq) = (ctx.alloc_pd(), ctx.create_cq(16).unwrap());
            let qp = AsyncQp::new(pd.qp(&cq, &cq).build().unwrap()).unwrap();
            (pd.allocate(64, Access::LOCAL_WRITE).unwrap(), qp)
        };
        let serving = tokio::spawn(async move {
            let (buffer, qp) = prepare(&server);
            let received = qp.recv(buffer);
            let qp = qp.accept(listener.accept().await?, &Params::default()).await?;
            let (received, buffer) = received.await;
            qp.send(Part::new(buffer, 0, received?.byte_len)).await.0?;
            qp.disconnected().await;
            Ok::<_, VerbsError>(())
        });
        let (buffer, qp) = prepare(&client);
        let qp = qp.connect(address, &Params::default()).await.unwrap();
        buffer.write(0, b"ping");
        let (sent, part) = qp.send(Part::new(buffer, 0, 4)).await;
        sent.unwrap();
        let (received, buffer) = qp.recv(part.into_inner()).await;
        assert_eq!((received.unwrap().byte_len, &buffer.to_vec(0, 4)[..]), (4, &b"ping"[..]));
        qp.disconnect().unwrap();
        serving.await.unwrap().unwrap();
    });
}

/// The futures may move between threads.
#[test]
fn futures_are_send() {
    fn is_send<T: Send>(_: &T) {}
    let ([a, _b], qp, _peer) = owning(true);
    fn next(cq: &Cq) -> impl Future<Output = Result<Wc, VerbsError>> + Send + '_ {
        cq.next()
    }
    is_send(&next(&a.cq));
    is_send(&a.ctx.async_event());
    is_send(&qp.recv(a.pd.allocate(8, Access::LOCAL_WRITE).unwrap()));
}
