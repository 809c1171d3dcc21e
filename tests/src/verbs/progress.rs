//! Progress and notification: channels, solicited events, several threads, a passive target.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use rocinante::verbs::{
    AsyncEvent, ModifyAttr, Mtu, PeerPath, PostError, QpAttr, QpEvent, QpState, QpType, SendData,
    SendOp,
};
use rocinante::{Access, CompChannel, ConnectOptions, Qp, RecvWr, SendWr, VerbsError, WcStatus};

use crate::harness::{
    Harness, On, PATIENCE, Setup, Side, StopOnDrop, assert_same, next, pattern, woken, wr,
};

const SEND: SendOp = SendOp::Send { imm: None };

/// A channel, and a completion queue of the side with that channel.
fn with_channel(side: &Side) -> (CompChannel, rocinante::Cq) {
    let channel = side.channel();
    let cq = side.ctx.create_cq_with(1024, &channel).unwrap();
    (channel, cq)
}

/// A pair. Its passive end completes to a queue with a channel.
fn pair_with_channel(harness: &Harness) -> (Qp, Qp, CompChannel, rocinante::Cq) {
    let [a, b] = &harness.sides;
    let (channel, cq) = with_channel(b);
    let its = b.pd.qp(&cq, &cq).access(Access::ALL).build().unwrap();
    let [qp, peer] = harness.connect([a.qp().build().unwrap(), its]);
    (qp, peer, channel, cq)
}

pub fn a_channel_wakes_its_sleeper(on: On) {
    let harness = Harness::new(&Setup::new(on));
    let [a, _] = &harness.sides;
    let (qp, peer, channel, cq) = pair_with_channel(&harness);
    // A queue that is not armed raises no event.
    peer.post_recv(&[RecvWr { wr_id: 7, sges: &[] }]).unwrap();
    qp.post_send(&[wr(7, SEND, &[])]).unwrap();
    a.succeed(7);
    assert_eq!(next(&cq).wr_id, 7);
    let nothing = channel.wait_event(Some(Duration::from_millis(10)));
    assert!(matches!(nothing, Err(VerbsError::TimedOut)));

    const ROUNDS: u64 = 300;
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| {
            for round in 0..ROUNDS {
                cq.req_notify(false).unwrap();
                peer.post_recv(&[RecvWr { wr_id: round, sges: &[] }]).unwrap();
                assert!(channel.wait_event(Some(PATIENCE)).expect("an event") == cq);
                assert_eq!(next(&cq).wr_id, round);
                // The answer makes both sides sleep in turn.
                peer.post_send(&[wr(round, SEND, &[]).signaled(false)]).unwrap();
            }
        });
        for round in 0..ROUNDS {
            qp.post_recv(&[RecvWr { wr_id: 1000 + round, sges: &[] }]).unwrap();
            if round % 50 == 0 {
                // Long enough for all threads to fall asleep.
                std::thread::sleep(Duration::from_millis(30));
            }
            qp.post_send(&[wr(round, SEND, &[]).signaled(false)]).unwrap();
            a.succeed(1000 + round);
        }
        sleeper.join().unwrap();
    });
    assert!(channel.try_event().is_none());
}

fn is_readable(fd: &impl AsFd, timeout: Duration) -> bool {
    let timeout = Timespec::try_from(timeout).unwrap();
    poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&timeout)).unwrap() == 1
}

pub fn a_channel_wakes_a_poll_of_its_descriptor(on: On) {
    let harness = Harness::new(&Setup::new(on));
    let [a, _] = &harness.sides;
    let (qp, peer, channel, cq) = pair_with_channel(&harness);
    for round in 0..20 {
        peer.post_recv(&[RecvWr { wr_id: round, sges: &[] }]).unwrap();
        cq.req_notify(false).unwrap();
        assert!(!is_readable(&channel, Duration::from_millis(1)));
        // No thread calls verbs here: the background thread must notice it.
        qp.post_send(&[wr(round, SEND, &[])]).unwrap();
        assert!(woken(&channel) == cq);
        assert!(!is_readable(&channel, Duration::ZERO));
        assert_eq!(cq.poll_one().unwrap().map(|wc| wc.wr_id), Some(round));
        a.succeed(round);
    }
    // A queue without a channel cannot be armed.
    assert!(a.cq.req_notify(false).is_err());
}

pub fn solicited_events_are_for_solicited_sends_and_errors(on: On) {
    let harness = Harness::new(&Setup::new(on));
    let [a, b] = &harness.sides;
    let (qp, peer, channel, cq) = pair_with_channel(&harness);
    let target = b.pd.allocate(64, Access::ALL).unwrap();
    for wr_id in 0..5 {
        peer.post_recv(&[RecvWr { wr_id, sges: &[] }]).unwrap();
    }
    cq.req_notify(true).unwrap();
    let write = |imm| SendOp::Write { remote: target.address(), rkey: target.rkey(), imm };
    let solicited = |request: SendWr<'static>| request.solicited();
    let quiet = || channel.wait_event(Some(Duration::from_millis(10))).is_err();

    qp.post_send(&[wr(0, SEND, &[])]).unwrap();
    a.succeed(0);
    assert!(quiet(), "not solicited");
    // A WRITE without immediate completes nothing, solicited or not.
    qp.post_send(&[solicited(wr(1, write(None), &[]))]).unwrap();
    a.succeed(1);
    assert!(quiet());
    qp.post_send(&[solicited(wr(2, SEND, &[]))]).unwrap();
    assert!(channel.wait_event(Some(PATIENCE)).is_ok());
    a.succeed(2);
    // It was armed for one event only.
    qp.post_send(&[solicited(wr(3, SEND, &[]))]).unwrap();
    a.succeed(3);
    assert!(quiet());
    cq.req_notify(true).unwrap();
    qp.post_send(&[solicited(wr(4, write(Some([1, 2, 3, 4])), &[]))]).unwrap();
    assert!(channel.wait_event(Some(PATIENCE)).is_ok());
    a.succeed(4);
    let received = std::iter::from_fn(|| cq.poll_one().unwrap()).map(|wc| wc.wr_id);
    assert_eq!(received.collect::<Vec<_>>(), [0, 1, 2, 3]);
    if harness.is_rxe() {
        // On Soft-RoCE an error raises no event, although ibv_req_notify_cq(3) counts it as
        // solicited.
        return;
    }
    cq.req_notify(true).unwrap();
    peer.modify(&ModifyAttr::state(QpState::Err)).unwrap();
    assert!(channel.wait_event(Some(PATIENCE)).is_ok());
    assert_eq!(cq.poll_one().unwrap().map(|wc| wc.status), Some(WcStatus::WrFlushErr));
}

/// The target's program never calls verbs. One-sided operations are served all the same, also after
/// a long sleep.
pub fn a_passive_target_serves_everything(on: On) {
    const LEN: usize = 200_000;
    let harness = Harness::new(&Setup::new(on));
    let [a, b] = &harness.sides;
    let [qp, _peer] = harness.pair();
    let target = b.pd.allocate(LEN + 8, Access::ALL).unwrap();
    let mine = a.pd.allocate(2 * LEN, Access::LOCAL_WRITE).unwrap();
    let (remote, rkey) = (target.address(), target.rkey());
    for round in 0..10u64 {
        if round % 3 == 2 {
            std::thread::sleep(Duration::from_millis(40));
        }
        let bytes = pattern(LEN, round);
        mine.write(0, &bytes);
        let write = SendOp::Write { remote, rkey, imm: None };
        let word = remote + LEN as u64;
        let parts = [[mine.sge(0, LEN)], [mine.sge(LEN, LEN)], [mine.sge(0, 8)]];
        let add = SendOp::FetchAdd { remote: word, rkey, add: 1 };
        let swap = SendOp::CompareSwap { remote: word, rkey, compare: round + 1, swap: round + 1 };
        let list = [
            wr(1, write, &parts[0]),
            wr(2, SendOp::Read { remote, rkey }, &parts[1]),
            wr(3, add, &parts[2]).fence(),
            wr(4, swap, &parts[2]),
        ];
        qp.post_send(&list).unwrap();
        for wr_id in 1..=4 {
            a.succeed(wr_id);
        }
        assert_same(&mine.to_vec(LEN, LEN), &bytes, "the bytes written and read back");
        assert_eq!(mine.load_u64(0), round + 1);
    }
    assert_eq!(target.load_u64(LEN), 10);
}

/// A receive posted before the peer sends is there for that message, whichever thread drives the
/// device at that moment.
pub fn a_receive_that_was_posted_is_there(on: On) {
    const ROUNDS: u64 = 500;
    let harness = Harness::new(&Setup::new(on));
    let [a, b] = &harness.sides;
    let strict = harness.setup.connect.rnr_retry(0);
    let [qp, peer] = harness
        .connect_with([a.qp().build().unwrap(), b.qp().build().unwrap()], [&strict, &strict]);
    let others = [a, b].map(|side| side.ctx.create_cq(64).unwrap());
    let made = [(a, &others[0]), (b, &others[1])];
    let [noise, _target] = harness
        .connect(made.map(|(side, cq)| side.pd.qp(cq, cq).access(Access::ALL).build().unwrap()));
    let region = b.pd.allocate(64, Access::ALL).unwrap();
    let write = SendOp::Write { remote: region.address(), rkey: region.rkey(), imm: None };
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                noise.post_send(&[wr(1, write, &[])]).unwrap();
                assert_eq!(next(&others[0]).status, WcStatus::Success);
            }
        });
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                assert_eq!(others[1].poll_one().unwrap(), None);
                // Where there are fewer processors than threads: do not use up the time slice.
                std::thread::yield_now();
            }
        });
        let ended = Ended(&over);
        for round in 0..ROUNDS {
            peer.post_recv(&[RecvWr { wr_id: round, sges: &[] }]).unwrap();
            qp.post_send(&[wr(round, SendOp::Send { imm: None }, &[])]).unwrap();
            a.succeed(round);
            b.succeed(round);
        }
        drop(ended);
    });
    if harness.is_software() {
        assert_eq!(b.ctx.counters().transport.send_rnr_err, 0);
    }
}

/// Stops the other threads, also after a panic.
struct Ended<'a>(&'a AtomicBool);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Four threads post to one queue pair and four poll its completion queue: each request completes
/// once.
pub fn several_threads_share_one_queue_pair(on: On) {
    const EACH: u64 = 2000;
    const THREADS: u64 = 4;
    let harness = Harness::new(&Setup::new(on));
    let [a, b] = &harness.sides;
    let (qp, peer) = {
        let [qp, peer] = harness.pair();
        (qp, peer)
    };
    let target = b.pd.allocate(8 * THREADS as usize, Access::ALL).unwrap();
    let results = a.pd.allocate(8 * THREADS as usize, Access::ALL).unwrap();
    let open = AtomicU64::new(0);
    let done: Vec<AtomicU64> = (0..EACH * THREADS).map(|_| AtomicU64::new(0)).collect();
    let completed = AtomicU64::new(0);
    let failed = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (qp, results, target, open, failed) = (&qp, &results, &target, &open, &failed);
            scope.spawn(move || {
                for nth in 0..EACH {
                    let deadline = Instant::now() + PATIENCE;
                    let at = 8 * thread;
                    let (remote, rkey) = (target.address() + at, target.rkey());
                    let sge = [results.sge(at as usize, 8)];
                    let wr_id = thread * EACH + nth;
                    let request = match nth % 3 {
                        0 => wr(wr_id, SendOp::FetchAdd { remote, rkey, add: 1 }, &sge),
                        1 => {
                            let op = SendOp::Write { remote, rkey, imm: None };
                            SendWr::new(op, SendData::Inline(&[])).wr_id(wr_id)
                        }
                        _ => wr(wr_id, SendOp::Read { remote, rkey }, &sge),
                    };
                    // The queue may be full: other requests complete first.
                    while let Err(error) = qp.post_send(&[request]) {
                        assert_eq!(error.error, PostError::Full);
                        assert!(Instant::now() < deadline && !failed.load(Ordering::Relaxed));
                        std::thread::yield_now();
                    }
                    open.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        for _ in 0..THREADS {
            scope.spawn(|| {
                let mut deadline = Instant::now() + PATIENCE;
                while completed.load(Ordering::SeqCst) < EACH * THREADS {
                    let Some(wc) = a.cq.poll_one().unwrap() else {
                        if Instant::now() > deadline {
                            failed.store(true, Ordering::Relaxed);
                            panic!("only {completed:?}: {:?}", a.ctx.counters());
                        }
                        std::thread::yield_now();
                        continue;
                    };
                    deadline = Instant::now() + PATIENCE;
                    assert_eq!(wc.status, WcStatus::Success);
                    assert_eq!(done[wc.wr_id as usize].fetch_add(1, Ordering::SeqCst), 0);
                    completed.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
    });
    assert!(done.iter().all(|count| count.load(Ordering::SeqCst) == 1));
    for thread in 0..THREADS {
        assert_eq!(target.load_u64(8 * thread as usize), EACH.div_ceil(3), "of thread {thread}");
    }
    drop(peer);
}

/// A thread that only queries the device never makes another thread's post get lost.
pub fn asking_questions_loses_no_work(on: On) {
    // An ACK timeout of 2 s: a late ACK on a busy machine must not count as lost.
    let connect = ConnectOptions::default().timeout(19);
    let harness = Harness::new(&Setup { connect, ..Setup::new(on) });
    let [a, b] = &harness.sides;
    let (channel, cq) = with_channel(a);
    let mine = a.pd.qp(&cq, &cq).access(Access::ALL).build().unwrap();
    let [qp, _peer] = harness.connect([mine, b.qp().build().unwrap()]);
    let target = b.pd.allocate(64, Access::ALL).unwrap();
    let write = SendOp::Write { remote: target.address(), rkey: target.rkey(), imm: None };
    let stop = AtomicBool::new(false);
    let rounds = if harness.is_software() { 3000 } else { 300 };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let _ = (a.ctx.counters(), qp.state());
                drop(a.pd.allocate(64, Access::ALL).unwrap());
                drop(a.ctx.create_cq(1).unwrap());
            }
        });
        let stop_at_the_end = StopOnDrop(&stop);
        for round in 0..rounds {
            cq.req_notify(false).unwrap();
            qp.post_send(&[wr(round, write, &[])]).unwrap();
            channel.wait_event(Some(PATIENCE)).expect("the WRITE completes");
            assert_eq!(next(&cq).wr_id, round);
        }
        drop(stop_at_the_end);
    });
    if harness.is_software() {
        assert_eq!(a.ctx.counters().transport.local_ack_timeout_err, 0);
    }
}

pub fn events_are_told(on: On) {
    let harness = Harness::new(&Setup::new(on));
    let [a, b] = &harness.sides;
    assert_eq!(b.ctx.poll_async_event(), None);
    // Only the active side is in RTS. The passive side gets the first request while in RTR.
    let prepared = [a, b].map(|side| side.qp().build_reset().unwrap());
    let [qp, peer] = &prepared;
    let steps = |qp: &Qp, its: &Qp| {
        let attr = QpAttr {
            path_mtu: Some(Mtu::Mtu1024),
            dest_qpn: Some(its.qpn()),
            rq_psn: Some(its.endpoint().psn),
            max_dest_rd_atomic: Some(4),
            min_rnr_timer: Some(12),
            sq_psn: Some(qp.endpoint().psn),
            max_rd_atomic: Some(4),
            retry_cnt: Some(7),
            rnr_retry: Some(7),
            timeout: Some(14),
            ..QpAttr::default()
        };
        attr.steps(QpType::Rc)
    };
    for (side, its_side, qp, its) in [(b, a, peer, qp), (a, b, qp, peer)] {
        let path = Some(PeerPath::new(its_side.address));
        side.run(|| {
            qp.modify(&ModifyAttr::init(Access::ALL)).unwrap();
            qp.modify(&ModifyAttr { attr: steps(qp, its)[1], path }).unwrap();
        });
    }
    qp.modify(&ModifyAttr { attr: steps(qp, peer)[2], path: None }).unwrap();
    peer.post_recv(&[RecvWr { wr_id: 1, sges: &[] }]).unwrap();
    assert!(!is_readable(&b.ctx.async_fd(), Duration::from_millis(1)));
    qp.post_send(&[wr(1, SEND, &[])]).unwrap();
    a.succeed(1);
    b.succeed(1);
    if harness.is_rxe() {
        // Soft-RoCE raises no such event, although the first packet may well find the queue pair in
        // RTR.
        assert!(!is_readable(&b.ctx.async_fd(), Duration::from_millis(100)));
        return;
    }
    assert!(is_readable(&b.ctx.async_fd(), PATIENCE));
    let established = AsyncEvent::Qp { qpn: peer.qpn(), event: QpEvent::CommEst };
    assert_eq!(b.ctx.poll_async_event(), Some(established));
    assert_eq!(b.ctx.poll_async_event(), None);
    assert!(!is_readable(&b.ctx.async_fd(), Duration::ZERO));
    assert_eq!(a.ctx.poll_async_event(), None);
}
