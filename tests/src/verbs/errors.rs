//! Faults between two devices. Each ends with the status that verbs users know, at both ends, and
//! changes no byte that it should not.

use std::time::{Duration, Instant};

use rocinante::verbs::{AsyncEvent, Key, QpEvent, QpState, SendOp, WcOpcode};
use rocinante::{Access, ConnectOptions, Mr, Qp, RecvWr, WcStatus};

use crate::harness::{Harness, On, PATIENCE, Setup, Side, pattern, wait_until, wr};

/// Patient enough for a busy machine, but bounded: about a second.
fn hasty() -> ConnectOptions {
    ConnectOptions::default().timeout(16).retry_cnt(3)
}

fn read(mr: &Mr) -> SendOp {
    SendOp::Read { remote: mr.address(), rkey: mr.rkey() }
}

fn write(mr: &Mr) -> SendOp {
    SendOp::Write { remote: mr.address(), rkey: mr.rkey(), imm: None }
}

fn add(mr: &Mr) -> SendOp {
    SendOp::FetchAdd { remote: mr.address(), rkey: mr.rkey(), add: 1 }
}

/// The operation with another address and key.
fn at(op: SendOp, remote: u64, rkey: Key) -> SendOp {
    match op {
        SendOp::Write { imm, .. } => SendOp::Write { remote, rkey, imm },
        SendOp::Read { .. } => SendOp::Read { remote, rkey },
        SendOp::FetchAdd { add, .. } => SendOp::FetchAdd { remote, rkey, add },
        SendOp::CompareSwap { compare, swap, .. } => {
            SendOp::CompareSwap { remote, rkey, compare, swap }
        }
        SendOp::Flush { len, placement, level, .. } => {
            SendOp::Flush { remote, rkey, len, placement, level }
        }
        SendOp::AtomicWrite { .. } => SendOp::AtomicWrite { remote, rkey },
        _ => op,
    }
}

/// Waits for an asynchronous event of a queue pair.
fn event(side: &Side, qp: &Qp, event: QpEvent) {
    wait_until(&format!("{event:?}"), || {
        side.ctx.poll_async_event() == Some(AsyncEvent::Qp { qpn: qp.qpn(), event })
    });
}

/// Posts a request that the peer must refuse, and one behind it. Both queue pairs break, and both
/// requests complete with an error.
fn refused(harness: &Harness, qps: &[Qp; 2], op: SendOp, source: &Mr, len: usize, is: WcStatus) {
    let [a, b] = &harness.sides;
    let sges = [source.sge(0, len)];
    qps[0].post_send(&[wr(1, op, &sges), wr(2, SendOp::Send { imm: None }, &[])]).unwrap();
    a.complete(1, is);
    a.complete(2, WcStatus::WrFlushErr);
    assert_eq!(qps[0].state(), QpState::Err);
    wait_until("the responder breaks too", || qps[1].state() == QpState::Err);
    if harness.is_rxe() {
        // Soft-RoCE raises no event.
        assert_eq!(b.ctx.poll_async_event(), None);
    } else {
        let kind = if is == WcStatus::RemAccessErr { QpEvent::AccessErr } else { QpEvent::ReqErr };
        event(b, &qps[1], kind);
    }
    // In the error state, requests are flushed at once.
    qps[0].post_send(&[wr(3, SendOp::Send { imm: None }, &[])]).unwrap();
    a.complete(3, WcStatus::WrFlushErr);
    qps[1].post_recv(&[RecvWr { wr_id: 4, sges: &[] }]).unwrap();
    if !harness.is_rxe() {
        // Receives, too; but the kernel's part of Soft-RoCE does not learn of a new receive.
        b.complete(4, WcStatus::WrFlushErr);
    }
}

pub fn remote_access_is_checked(on: On) {
    let harness = Harness::new(&Setup::new(on));
    let [a, b] = &harness.sides;
    const LEN: usize = 8192;
    let source = a.pd.allocate(2 * LEN, Access::LOCAL_WRITE).unwrap();
    let fill = pattern(LEN, 1);
    let region = |access| {
        let mr = b.pd.allocate(LEN, access).unwrap();
        mr.write(0, &fill);
        mr
    };
    let all = region(Access::ALL);
    let gone = region(Access::ALL);
    let gone_key = gone.rkey();
    gone.deregister().unwrap();
    let other_pd = b.ctx.alloc_pd();
    let foreign = other_pd.allocate(LEN, Access::ALL).unwrap();
    let plain = region(Access::LOCAL_WRITE);
    let no_write = region(Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC);
    let no_read = region(Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
    let no_atomic = region(Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ);

    let start = all.address();
    let end = start + LEN as u64;
    let key = |bits: u32| Key(all.rkey().0 ^ bits);
    // A bystander: its work must go on.
    let bystander = harness.pair();
    let mut cases = Vec::new();
    for op in [write(&all), read(&all), add(&all)] {
        // A wrong index, a wrong tag, and a wrong consumer part.
        for bits in [0x8000_0000, 0x0001_0000, 0x1] {
            cases.push((at(op, start, key(bits)), 8));
        }
        cases.push((at(op, start, Key(0)), 8));
        cases.push((at(op, start, gone_key), 8));
        cases.push((at(op, foreign.address(), foreign.rkey()), 8));
        cases.push((at(op, plain.address(), plain.rkey()), 8));
        cases.push((at(op, end, all.rkey()), 8));
        cases.push((at(op, start - 8, all.rkey()), 8));
        cases.push((at(op, u64::MAX - 7, all.rkey()), 8));
    }
    for op in [write(&all), read(&all)] {
        // One byte too many, in one packet and in several.
        cases.push((at(op, end - 7, all.rkey()), 8));
        cases.push((op, LEN + 1));
        cases.push((at(op, u64::MAX - 3, all.rkey()), 8));
    }
    cases.push((write(&no_write), 8));
    cases.push((write(&no_write), LEN));
    cases.push((read(&no_read), 8));
    cases.push((add(&no_atomic), 8));
    assert_eq!(cases.len(), 40);
    for (op, len) in cases {
        refused(&harness, &harness.pair(), op, &source, len, WcStatus::RemAccessErr);
        for mr in [&all, &plain, &no_write, &no_read, &no_atomic] {
            assert_eq!(mr.to_vec(0, LEN), fill, "{op:?} of {len} bytes changed something");
        }
    }
    if harness.is_software() {
        assert_eq!(b.ctx.counters().transport.remote_access_errors, 40);
    }
    // A request without length needs no access: any key will do (IBTA volume 1, 9.4.3 [M]; rxe does
    // so too).
    bystander[0].post_send(&[wr(1, at(write(&all), 0, Key(0)), &[])]).unwrap();
    a.succeed(1);
    bystander[0].post_send(&[wr(2, write(&all), &[source.sge(0, LEN)])]).unwrap();
    a.succeed(2);
}

pub fn what_the_queue_pair_does_not_permit(on: On) {
    let harness = Harness::new(&Setup::new(on));
    let [a, b] = &harness.sides;
    let source = a.pd.allocate(64, Access::LOCAL_WRITE).unwrap();
    let target = b.pd.allocate(64, Access::ALL).unwrap();
    let all_but = |missing: Access| {
        let each = [Access::REMOTE_WRITE, Access::REMOTE_READ, Access::REMOTE_ATOMIC];
        let kept = each.into_iter().filter(|access| *access != missing);
        kept.fold(Access::LOCAL_WRITE, |all, one| all | one)
    };
    for (op, missing) in [
        (write(&target), Access::REMOTE_WRITE),
        (read(&target), Access::REMOTE_READ),
        (add(&target), Access::REMOTE_ATOMIC),
    ] {
        let [mine, its] = [a.qp(), b.qp().access(all_but(missing))];
        let qps = harness.connect([mine.build().unwrap(), its.build().unwrap()]);
        refused(&harness, &qps, op, &source, 8, WcStatus::RemInvReqErr);
        // The other operations are permitted.
        let [mine, its] = [a.qp(), b.qp().access(all_but(missing))];
        let qps = harness.connect([mine.build().unwrap(), its.build().unwrap()]);
        for (wr_id, allowed) in [write(&target), read(&target)].into_iter().enumerate() {
            if allowed != op {
                qps[0].post_send(&[wr(wr_id as u64, allowed, &[source.sge(0, 8)])]).unwrap();
                a.succeed(wr_id as u64);
            }
        }
    }
    assert_eq!(target.to_vec(0, 64), [0; 64]);
}

pub fn receives_that_do_not_fit(on: On) {
    let harness = Harness::new(&Setup::new(on));
    let [a, b] = &harness.sides;
    let source = a.pd.allocate(20_000, Access::NONE).unwrap();
    source.write(0, &pattern(20_000, 5));
    let target = b.pd.allocate(20_000, Access::LOCAL_WRITE).unwrap();
    let read_only = b.pd.allocate(20_000, Access::REMOTE_READ).unwrap();
    let gone = b.pd.allocate(20_000, Access::LOCAL_WRITE).unwrap();
    let gone_sge = gone.sge(0, 20_000);
    drop(gone);
    let too_small = harness.too_long();
    // Soft-RoCE reports both the same way.
    let unusable =
        if harness.is_rxe() { too_small } else { [WcStatus::RemOpErr, WcStatus::LocProtErr] };
    for (sges, len, [there, here]) in [
        (vec![], 1, too_small),
        (vec![target.sge(0, 63)], 64, too_small),
        // The responder notices in a later packet.
        (vec![target.sge(0, 9_000), target.sge(9_000, 10_999)], 20_000, too_small),
        (vec![read_only.sge(0, 20_000)], 64, unusable),
        (vec![gone_sge], 20_000, unusable),
    ] {
        let qps = harness.pair();
        let list = [RecvWr { wr_id: 10, sges: &sges }, RecvWr { wr_id: 11, sges: &[] }];
        qps[1].post_recv(&list).unwrap();
        qps[0].post_send(&[wr(1, SendOp::Send { imm: None }, &[source.sge(0, len)])]).unwrap();
        a.complete(1, there);
        b.complete(10, here);
        b.complete(11, WcStatus::WrFlushErr);
        assert_eq!(qps.each_ref().map(Qp::state), [QpState::Err; 2]);
    }
    assert_eq!(read_only.to_vec(0, 20_000), [0; 20_000]);
}

pub fn local_memory_is_checked(on: On) {
    let harness = Harness::new(&Setup::new(on));
    let [a, b] = &harness.sides;
    let target = b.pd.allocate(8192, Access::ALL).unwrap();
    let good = a.pd.allocate(8192, Access::LOCAL_WRITE).unwrap();
    let read_only = a.pd.allocate(8192, Access::NONE).unwrap();
    let foreign = a.ctx.alloc_pd().allocate(8192, Access::LOCAL_WRITE).unwrap();
    let gone = a.pd.allocate(8192, Access::LOCAL_WRITE).unwrap();
    let gone_sge = gone.sge(0, 8192);
    drop(gone);
    let mut beyond = good.sge(0, 8192);
    beyond.addr += 1;
    let mut wrong_key = good.sge(0, 8);
    wrong_key.lkey = Key(wrong_key.lkey.0 ^ 1);
    for (op, sge) in [
        (write(&target), gone_sge),
        (write(&target), foreign.sge(0, 8192)),
        (write(&target), beyond),
        (write(&target), wrong_key),
        (SendOp::Send { imm: None }, wrong_key),
        (read(&target), read_only.sge(0, 8192)),
        (read(&target), beyond),
        (add(&target), read_only.sge(0, 8)),
        (add(&target), wrong_key),
    ] {
        let qps = harness.pair();
        // A request posted before succeeds, one posted after is flushed.
        let before = [good.sge(0, 8192)];
        let bad = [sge];
        let list =
            [wr(1, write(&target), &before), wr(2, op, &bad), wr(3, write(&target), &before)];
        if harness.is_rxe() {
            // Soft-RoCE also flushes requests that were sent before and are not yet acknowledged,
            // and it may flush the faulty request, too.
            qps[0].post_send(&list[..1]).unwrap();
            a.succeed(1);
            qps[0].post_send(&list[1..]).unwrap();
            let wc = a.next();
            let either = [WcStatus::LocProtErr, WcStatus::WrFlushErr];
            assert!(wc.wr_id == 2 && either.contains(&wc.status), "{wc:?}");
        } else {
            qps[0].post_send(&list).unwrap();
            a.succeed(1);
            a.complete(2, WcStatus::LocProtErr);
        }
        a.complete(3, WcStatus::WrFlushErr);
        assert_eq!(qps[0].state(), QpState::Err);
        assert_eq!(qps[1].state(), QpState::Rts, "the peer has not heard of it");
    }
    if harness.is_software() {
        assert_eq!(b.ctx.counters().transport.remote_access_errors, 0);
    }
}

pub fn without_a_receive_the_sender_waits(on: On) {
    let harness = Harness::new(&Setup::new(on));
    let [a, b] = &harness.sides;
    let source = a.pd.allocate(10_000, Access::NONE).unwrap();
    let bytes = pattern(10_000, 3);
    source.write(0, &bytes);
    let target = b.pd.allocate(10_000, Access::LOCAL_WRITE | Access::REMOTE_WRITE).unwrap();
    let qps = harness.pair();
    let imm = Some([0, 0, 0, 9]);
    let send = SendOp::Send { imm: None };
    let write = SendOp::Write { remote: target.address(), rkey: target.rkey(), imm };
    let sges = [source.sge(0, 10_000)];
    qps[0].post_send(&[wr(1, send, &sges), wr(2, write, &sges)]).unwrap();
    wait_until("RNR NAKs", || a.ctx.counters().transport.rcvd_rnr_err >= 3);
    a.quiet(Duration::from_millis(5));
    qps[1].post_recv(&[RecvWr { wr_id: 10, sges: &[target.sge(0, 10_000)] }]).unwrap();
    a.succeed(1);
    assert_eq!(b.succeed(10).byte_len, 10_000);
    assert_eq!(target.to_vec(0, 10_000), bytes);
    // The WRITE with immediate needs one too.
    let seen = a.ctx.counters().transport.rcvd_rnr_err;
    wait_until("more RNR NAKs", || a.ctx.counters().transport.rcvd_rnr_err >= seen + 3);
    qps[1].post_recv(&[RecvWr { wr_id: 11, sges: &[] }]).unwrap();
    a.succeed(2);
    let received = b.succeed(11);
    assert_eq!((received.imm, received.opcode), (imm, WcOpcode::RecvRdmaWithImm));
    wait_until("the same number of RNR NAKs sent and received", || {
        let (sent, seen) = (b.ctx.counters().transport, a.ctx.counters().transport);
        // After a timeout the peer answers twice. The second answer is of no request.
        let twice = seen.local_ack_timeout_err;
        (seen.rcvd_rnr_err..=seen.rcvd_rnr_err + twice).contains(&sent.send_rnr_err)
    });
}

pub fn without_a_receive_in_time_the_sender_gives_up(on: On) {
    let mut setup = Setup::new(on);
    setup.connect = hasty().rnr_retry(2).min_rnr_timer(14);
    let harness = Harness::new(&setup);
    let [a, b] = &harness.sides;
    // A device of the kernel counts for all its users, and from its creation on.
    let before = [a, b].map(|side| side.ctx.counters().transport);
    let qps = harness.pair();
    let start = Instant::now();
    let send = SendOp::Send { imm: None };
    qps[0].post_send(&[wr(1, send, &[]), wr(2, send, &[])]).unwrap();
    a.complete(1, WcStatus::RnrRetryExcErr);
    a.complete(2, WcStatus::WrFlushErr);
    // Two retries, a millisecond apart each.
    assert!(start.elapsed() >= Duration::from_millis(2), "{:?}", start.elapsed());
    wait_until("three RNR NAKs and one loss of patience", || {
        let [at_a, at_b] = [a, b].map(|side| side.ctx.counters().transport);
        let sent = at_b.send_rnr_err - before[1].send_rnr_err;
        let given_up = at_a.retry_rnr_exceeded_err - before[0].retry_rnr_exceeded_err;
        // A request retransmitted because the first answer is late is answered, too.
        let repeated = at_a.local_ack_timeout_err - before[0].local_ack_timeout_err;
        given_up == 1 && (3..=3 + repeated).contains(&sent)
    });
    assert_eq!(qps[1].state(), QpState::Rts);
}

pub fn a_destroyed_queue_pair_ends_its_peer_only(on: On) {
    let mut setup = Setup::new(on);
    setup.connect = hasty();
    let harness = Harness::new(&setup);
    let [a, b] = &harness.sides;
    const LEN: usize = 1 << 20;
    let source = a.pd.allocate(LEN, Access::LOCAL_WRITE).unwrap();
    let target = b.pd.allocate(LEN, Access::ALL).unwrap();
    let bystander = harness.pair();
    for round in 0..4 {
        let [mine, its] = harness.pair();
        let sges = [source.sge(0, LEN)];
        let op = if round % 2 == 0 { write(&target) } else { read(&target) };
        let list: Vec<_> = (0..64).map(|wr_id| wr(wr_id, op, &sges)).collect();
        mine.post_send(&list).unwrap();
        if round < 2 {
            // The target goes in the middle of a transfer.
            a.succeed(0);
            its.destroy();
            let mut statuses: Vec<_> = (1..64).map(|_| a.next().status).collect();
            statuses.retain(|status| *status != WcStatus::Success);
            assert_eq!(statuses.first(), Some(&WcStatus::RetryExcErr));
            assert!(statuses[1..].iter().all(|status| *status == WcStatus::WrFlushErr));
            assert_eq!(mine.state(), QpState::Err);
        } else {
            // The sender goes. Its posted requests never complete, and nothing refers to its memory
            // any more.
            a.succeed(0);
            mine.destroy();
            while a.cq.poll_one().unwrap().is_some() {}
            a.quiet(Duration::from_millis(20));
            assert_eq!(its.state(), QpState::Rts);
        }
        bystander[0].post_send(&[wr(99, write(&target), &sges)]).unwrap();
        a.succeed(99);
    }
    drop(bystander);
    source.deregister().expect("no request names it");
    target.deregister().expect("no request names it");
}

pub fn more_reads_than_the_peer_permits(on: On) {
    let harness = Harness::new(&Setup::new(on));
    let [a, b] = &harness.sides;
    let target = b.pd.allocate(4096, Access::ALL).unwrap();
    let result = a.pd.allocate(4096, Access::LOCAL_WRITE).unwrap();
    let none = hasty().max_rd_atomic(0).max_dest_rd_atomic(0);
    let some = hasty();
    // With a depth of zero, Soft-RoCE waits for ever for its own first READ, and does not count the
    // peer's at all.
    if !harness.is_rxe() {
        // A local depth of zero: the READ could never be sent.
        let qps =
            harness.connect_with([a, b].map(|side| side.qp().build().unwrap()), [&none, &some]);
        qps[0].post_send(&[wr(1, read(&target), &[result.sge(0, 64)])]).unwrap();
        a.complete(1, WcStatus::LocQpOpErr);
        // A depth of zero at the peer.
        let qps =
            harness.connect_with([a, b].map(|side| side.qp().build().unwrap()), [&some, &none]);
        refused(&harness, &qps, read(&target), &result, 64, WcStatus::RemInvReqErr);
    }
    // Requests beyond the depth wait for their turn, and all are served.
    let one = hasty().max_rd_atomic(1).max_dest_rd_atomic(1);
    let qps = harness.connect_with([a, b].map(|side| side.qp().build().unwrap()), [&one, &one]);
    let start = Instant::now();
    for wr_id in 0..100 {
        let op = if wr_id % 2 == 0 { add(&target) } else { read(&target) };
        qps[0].post_send(&[wr(wr_id, op, &[result.sge(0, 8)])]).unwrap();
    }
    for wr_id in 0..100 {
        a.succeed(wr_id);
    }
    assert_eq!(target.load_u64(0), 50);
    assert!(start.elapsed() < PATIENCE);
}
