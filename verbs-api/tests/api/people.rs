//! The conveniences of the API: contexts of queue pairs, completions as errors, parts of regions,
//! pools of buffers, safe defaults. Two of each.

use std::time::{Duration, Instant};

use crate::sim::{ADDRESSES, Side, connect, undriven, until};
use rocinante::stats::Limit;
use rocinante::verbs::{PeerPath, PostError, QpType, WcOpcode};
use rocinante::{
    Access, BufferPool, ConnectOptions, PoolBuffer, Qp, RecvWr, SendWr, VerbsError, Wc, WcStatus,
};

/// The next completion of `of`, while the other side is driven.
fn next(of: &Side, other: &Side) -> Wc {
    let mut wc = None;
    until("a request completes", || {
        other.ctx.progress();
        wc = of.cq.poll_one().unwrap();
        wc.is_some()
    });
    wc.unwrap()
}

fn connected(sides: &[Side; 2], access: Access, context: u64) -> [Qp; 2] {
    let qps = sides.each_ref().map(|side| {
        let qp = side.pd.qp(&side.cq, &side.cq).access(access).context(context);
        qp.build().unwrap()
    });
    let ends = qps.each_ref().map(rocinante::PreparedQp::endpoint);
    let options = ConnectOptions::default();
    let [qp, peer] = qps;
    let qp = qp.connect(&ends[1], &options).unwrap();
    [qp, peer.connect(&ends[0], &options).unwrap()]
}

#[test]
fn completions_carry_the_context_of_their_queue_pair() {
    let sides = undriven();
    let [a, b] = &sides;
    let pairs = [7, u64::MAX].map(|context| connected(&sides, Access::NONE, context));
    for (pair, context) in pairs.iter().zip([7, u64::MAX]) {
        pair[1].post_recv(&[RecvWr::new(3, &[b.mr.sge(0, 64)])]).unwrap();
        pair[0].post(SendWr::send(b"hello").wr_id(4).imm(0x0102_0304)).unwrap();
        let (sent, received) = (next(a, b), next(b, a));
        assert_eq!((sent.wr_id, sent.context, sent.qpn), (4, context, pair[0].qpn()));
        assert_eq!((received.wr_id, received.context, received.qpn), (3, context, pair[1].qpn()));
        assert_eq!(received.imm_data(), Some(0x0102_0304));
        assert_eq!(b.mr.slice(0, 5).to_vec(), b"hello");
        // Flushed requests have it, too.
        pair[1].post_recv(&[RecvWr::new(5, &[])]).unwrap();
        pair[1]
            .modify(&rocinante::verbs::ModifyAttr::state(rocinante::verbs::QpState::Err))
            .unwrap();
        let flushed = next(b, a);
        assert_eq!((flushed.status, flushed.opcode), (WcStatus::WrFlushErr, WcOpcode::Recv));
        assert_eq!((flushed.wr_id, flushed.context), (5, context));
    }
}

#[test]
fn a_queue_pair_admits_no_remote_access_unless_told() {
    let sides = undriven();
    let [a, b] = &sides;
    let remote = b.mr.remote();
    let requests = [
        SendWr::write(&[1; 8], remote),
        SendWr::read(&[], remote.slice(0, 0)),
        SendWr::fetch_add(&[], remote, 1),
    ];
    let sge = [a.mr.sge(0, 8)];
    for mut wr in requests {
        if wr.data.is_empty() {
            wr.data = (&sge).into();
        }
        let [qp, _peer] = connected(&sides, Access::NONE, 9);
        qp.post(wr.wr_id(6)).unwrap();
        let error = next(a, b).ok().unwrap_err();
        // IBTA: a WRITE or READ that is not permitted is an invalid request or an access error.
        assert!(matches!(error.status, WcStatus::RemAccessErr | WcStatus::RemInvReqErr), "{error}");
        assert_eq!((error.wr_id, error.opcode, error.qpn), (6, wr.op.completion(), qp.qpn()));
        assert_eq!((error.context, error.peer), (9, Some(ADDRESSES[1])));
        assert!(error.to_string().contains("10.0.0.2"), "{error}");
        assert!(matches!(VerbsError::from(error), VerbsError::Completion(_)));
        let [qp, _peer] = connected(&sides, Access::ALL, 9);
        qp.post(wr.wr_id(7)).unwrap();
        let done = next(a, b).ok().unwrap();
        assert_eq!((done.wr_id, done.peer), (7, None));
    }
}

#[test]
fn completions_fill_the_room_from_its_beginning() {
    let sides = undriven();
    let [a, b] = &sides;
    let [qp, _peer] = connect(&sides, 14);
    let mut room = [Wc::default(); 3];
    assert!(a.cq.poll(&mut room).unwrap().is_empty());
    for wr_id in 1..=5 {
        qp.post(SendWr::write(b"", b.mr.remote()).wr_id(wr_id)).unwrap();
    }
    let mut ids = Vec::new();
    until("all complete", || {
        b.ctx.progress();
        let completed = a.cq.poll(&mut room).unwrap();
        assert!(completed.len() <= 3);
        ids.extend(completed.iter().map(|wc| wc.ok().unwrap().wr_id));
        ids.len() == 5
    });
    assert_eq!(ids, [1, 2, 3, 4, 5]);
}

#[test]
fn parts_of_regions_are_checked_and_name_the_same_bytes() {
    let [a, _] = undriven();
    let part = a.mr.slice(64, 32);
    assert_eq!((part.offset(), part.len(), part.sge()), (64, 32, a.mr.sge(64, 32)));
    assert_eq!(part.remote(), a.mr.remote().slice(64, 32));
    let inner = part.slice(8, 8);
    inner.write(&[1, 2, 3]);
    inner.store(4, &0x0807_0605_u32.to_le_bytes());
    assert_eq!(a.mr.to_vec(72, 8), [1, 2, 3, 0, 5, 6, 7, 8]);
    assert_eq!(inner.load::<[u8; 4]>(4), [5, 6, 7, 8]);
    assert_eq!(a.mr.load::<u64>(72), inner.load::<u64>(0));
    let mut bytes = [0; 3];
    inner.read(&mut bytes);
    assert_eq!((bytes, inner.to_vec().len()), ([1, 2, 3], 8));
    for (offset, len) in [(0, 33), (33, 0), (1, 32), (usize::MAX, 1), (1, usize::MAX)] {
        assert!(part.get(offset, len).is_none(), "{len} at {offset}");
    }
    assert!(part.get(32, 0).is_some_and(|part| part.is_empty()));
    assert!(a.mr.get(4096, 1).is_none() && a.mr.get(0, 4096).is_some());
    let panics =
        |of: &dyn Fn()| std::panic::catch_unwind(std::panic::AssertUnwindSafe(of)).is_err();
    assert!(panics(&|| inner.write(&[0; 9])));
    assert!(panics(&|| inner.read(&mut [0; 9])));
    assert!(panics(&|| inner.store(1, &0_u64)));
    assert!(panics(&|| {
        let _ = inner.load::<u64>(1);
    }));
}

#[test]
fn buffers_of_a_pool_are_apart_and_come_back_once() {
    let [a, _] = undriven();
    let pool = BufferPool::new(&a.pd, 3, 100, Access::LOCAL_WRITE).unwrap();
    let [one, two, three] = [(); 3].map(|()| pool.take().unwrap());
    assert!(pool.take().is_none() && pool.free() == 0);
    let starts = [&one, &two, &three].map(|buffer| buffer.slice().sge().addr);
    assert!(starts.iter().all(|start| start.is_multiple_of(64)));
    for (buffer, byte) in [&one, &two, &three].iter().zip(1..) {
        buffer.slice().write(&[byte; 100]);
    }
    assert!((1..).zip([&one, &two, &three]).all(|(n, it)| it.slice().to_vec() == [n; 100]));
    drop(two);
    assert_eq!(pool.free(), 1);
    // Given away, it is not free: only its number brings it back, and only once.
    let start = one.slice().sge();
    let number = one.give_away();
    let other = three.give_away();
    assert!(number != other && pool.free() == 1);
    let again = pool.take_back(number).unwrap();
    assert_eq!(again.slice().sge(), start);
    assert!(pool.take_back(number).is_none());
    drop(again);
    assert_eq!(pool.free(), 2);
    assert!([3, u64::MAX].iter().all(|number| pool.take_back(*number).is_none()));
    drop(pool.take_back(other));
    assert_eq!(pool.free(), 3);
    let huge = BufferPool::new(&a.pd, usize::MAX, 64, Access::NONE).unwrap_err();
    assert!(matches!(huge, VerbsError::Invalid(_)), "{huge}");
}

/// Its number is known before it is given away. So another thread may take it back at once.
#[test]
fn a_buffer_that_is_taken_back_at_once_has_one_owner() {
    let [a, _] = undriven();
    let pool = BufferPool::new(&a.pd, 1, 64, Access::NONE).unwrap();
    let rounds = if cfg!(miri) { 20 } else { 20_000 };
    let wait = |take: &dyn Fn() -> Option<PoolBuffer>| {
        let begin = Instant::now();
        loop {
            match take() {
                Some(buffer) => return buffer,
                None => std::thread::yield_now(),
            }
            assert!(begin.elapsed() < crate::sim::PATIENCE, "the buffer is lost");
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| (0..rounds).for_each(|_| _ = wait(&|| pool.take()).give_away()));
        (0..rounds).for_each(|_| drop(wait(&|| pool.take_back(0))));
    });
    assert_eq!(pool.free(), 1);
}

#[test]
fn the_source_address_is_named_with_the_path() {
    let [a, _] = undriven();
    let builder = || a.pd.qp(&a.cq, &a.cq);
    let error = builder().sgid_index(1).build().unwrap_err();
    assert!(error.to_string().contains("GID index 1"), "{error}");
    let qp = builder().build_reset().unwrap();
    qp.modify(&rocinante::verbs::ModifyAttr::init(Access::NONE)).unwrap();
    let mut rtr = rocinante::verbs::ModifyAttr::default();
    rtr.attr.state = Some(rocinante::verbs::QpState::Rtr);
    rtr.path = Some(PeerPath::new(ADDRESSES[1]).sgid_index(1));
    let error = qp.modify(&rtr).unwrap_err();
    assert!(error.to_string().contains("GID index 1"), "{error}");
    let error = a.pd.create_ah(&PeerPath::new(ADDRESSES[1]).sgid_index(2)).unwrap_err();
    assert!(error.to_string().contains("GID index 2"), "{error}");
}

#[test]
fn a_refused_object_comes_back_with_its_error() {
    let sides = undriven();
    let [a, _] = &sides;
    let datagrams = a.pd.qp(&a.cq, &a.cq).qp_type(QpType::Ud).build().unwrap();
    let end = datagrams.endpoint();
    let refused = datagrams.connect(&end, &ConnectOptions::default()).unwrap_err();
    assert_eq!(refused.to_string(), refused.error.to_string());
    assert_eq!(refused.value.endpoint().qpn, end.qpn);
    let ready = || -> Result<Qp, VerbsError> { Ok(refused.value.ready()?) };
    assert_eq!(ready().unwrap().post(SendWr::send(b"x")), Err(PostError::Operation));
}

#[test]
fn each_queue_pair_counts_its_own_packets() {
    let sides = undriven();
    let [a, b] = &sides;
    let pairs = [1, 2].map(|context| connected(&sides, Access::ALL, context));
    let mtu = u64::from(pairs[0][0].endpoint().mtu.bytes());
    for (pair, count) in pairs.iter().zip([1, 3]) {
        for _ in 0..count {
            pair[0].post(SendWr::write(&[a.mr.sge(0, 4096)], b.mr.remote())).unwrap();
            next(a, b).ok().unwrap();
        }
    }
    let qps = a.ctx.qps().unwrap();
    for (pair, count) in pairs.iter().zip([1, 3]) {
        let counters = pair[0].counters().unwrap();
        assert_eq!(counters.sent_pkts, count * 4096 / mtu);
        assert_eq!((counters.sent_bytes, counters.rcvd_bytes), (count * 4096, 0));
        assert!(counters.rcvd_pkts >= count && counters.retransmitted_pkts == 0);
        let peer = pair[1].counters().unwrap();
        assert_eq!((peer.rcvd_pkts, peer.rcvd_bytes), (counters.sent_pkts, count * 4096));
        assert_eq!((peer.sent_pkts, peer.sent_bytes), (counters.rcvd_pkts, 0));
        let listed = qps.iter().find(|qp| qp.qpn == pair[0].qpn()).unwrap();
        assert_eq!(listed.counters, counters);
        // Each message was all that there was to send.
        let limits = pair[0].limits_hit().unwrap();
        assert!(limits.of(Limit::SendQueueEmpty) >= count, "{limits:?}");
        assert_eq!(listed.limits_hit, limits);
        assert_eq!((listed.peer, listed.dest_qpn), (Some(ADDRESSES[1]), Some(pair[1].qpn())));
    }
    assert_eq!(qps.iter().map(|qp| qp.context).collect::<Vec<_>>(), [1, 2]);
    // Together they are the device's.
    let sum =
        |of: fn(&rocinante::stats::QpCounters) -> u64| qps.iter().map(|qp| of(&qp.counters)).sum();
    let all = a.ctx.counters().transport;
    assert_eq!((all.sent_pkts, all.rcvd_pkts), (sum(|c| c.sent_pkts), sum(|c| c.rcvd_pkts)));
    let of_all = a.ctx.counters().limits_hit;
    for limit in Limit::ALL {
        assert_eq!(of_all.of(limit), qps.iter().map(|qp| qp.limits_hit.of(limit)).sum::<u64>());
    }
    let [first, _second] = pairs;
    drop(first);
    assert_eq!(a.ctx.qps().unwrap().len(), 1);
}

#[test]
fn a_thread_sleeps_on_a_queue_without_a_channel() {
    let sides = crate::sim::sides(&rocinante_netdev::sim::SimNet::new(), [true, true]);
    let [a, b] = &sides;
    let [qp, peer] = connected(&sides, Access::ALL, 5);
    assert!(matches!(b.cq.wait(Some(Duration::from_millis(20))), Err(VerbsError::TimedOut)));
    let rounds = 50;
    std::thread::scope(|scope| {
        // Two threads wait on one queue: each completion goes to one of them.
        let waiters = [(); 2].map(|()| {
            scope.spawn(|| {
                let take = |_| b.cq.wait(Some(crate::sim::PATIENCE)).unwrap().ok().unwrap().wr_id;
                (0..rounds / 2).map(take).collect::<Vec<_>>()
            })
        });
        for wr_id in 0..rounds {
            peer.post_recv(&[RecvWr::new(wr_id, &[b.mr.sge(0, 64)])]).unwrap();
            qp.post(SendWr::send(b"wake up")).unwrap();
            a.cq.wait(Some(crate::sim::PATIENCE)).unwrap().ok().unwrap();
        }
        let mut all = waiters.map(|waiter| waiter.join().unwrap()).concat();
        all.sort_unstable();
        assert!(all.iter().copied().eq(0..rounds), "{all:?}");
    });
}
