//! Many queue pairs and one receiver. Its credit is never exceeded, no queue pair starves, and a
//! queue pair that leaves returns its credit. Also: a sink that is full at any point.

use crate::common::{BASE, End, Pair, Setup, sge};
use rocinante_stack::mem::Access;
use rocinante_stack::types::{Key, Qpn, Time};
use rocinante_stack::verbs::{QpState, SendData, SendOp, SendWr, WcStatus};
use rocinante_stack::wire::{Operation, Packet};
use rocinante_stack::{Budget, QpAttr};

const QPS: usize = 64;

fn setup(budget: Budget) -> Setup {
    Setup { budget, qps: QPS, timeout: 20, ..Setup::default() }
}

fn write(rkey: Key) -> SendOp {
    SendOp::Write { remote: BASE, rkey, imm: None }
}

/// Everything that all queue pairs send while nothing arrives. Returns cost and number of the
/// packets of `kind`.
fn flood(pair: &mut Pair, from: usize, kind: impl Fn(&Packet<'_>) -> bool) -> (u32, u32) {
    let end = &mut pair.ends[from];
    end.engine.poll_transmit(pair.now, 1 << 20, &mut end.host, &mut end.out);
    let charged = end.out.packets.iter().filter(|bytes| kind(&Packet::parse(bytes).unwrap()));
    charged.fold((0, 0), |(cost, n), packet| (cost + Budget::cost(packet.len() as u32), n + 1))
}

fn within(budget: Budget, (cost, datagrams): (u32, u32)) -> bool {
    cost <= budget.bytes && datagrams <= budget.datagrams
}

#[test]
fn writes_of_all_stay_within_the_peers_room_and_nobody_starves() {
    for (budget, len) in [
        (Budget { bytes: 425_984, datagrams: 512 }, 3000),
        (Budget { bytes: 425_984, datagrams: 512 }, 64),
        (Budget { bytes: 30 * 2304, datagrams: 1000 }, 10_000),
        (Budget { bytes: 1 << 30, datagrams: 7 }, 2000),
        (Budget::STANDARD, 50),
    ] {
        let mut pair = Pair::new(&setup(budget));
        let keys = pair.register();
        let mut posted = [0u64; QPS];
        let mut done = [0u64; QPS];
        for round in 0..600 {
            for qp in 0..QPS {
                // The first posts up to its depth, the others little.
                let depth = if qp == 0 { 60 } else { 2 };
                while posted[qp] - done[qp] < depth {
                    pair.send_on(0, qp, qp as u64, write(keys[1]), &[sge(0, len, keys[0])]);
                    posted[qp] += 1;
                }
            }
            let flight = flood(&mut pair, 0, |_| true);
            assert!(within(budget, flight), "{flight:?} in round {round} exceeds {budget:?}");
            assert!(
                flight.1 >= budget.datagrams.min(budget.bytes / 8448) / 2,
                "{flight:?}: too timid"
            );
            pair.deliver(0);
            pair.deliver(1);
            pair.now = pair.now.after(50_000);
            for cqe in pair.completions(0) {
                assert_eq!(cqe.status, WcStatus::Success);
                done[cqe.wr_id as usize] += 1;
            }
        }
        assert_eq!(pair.ends[0].engine.counters().retransmitted_pkts, 0);
        let (least, most) = (done[1..].iter().min().unwrap(), done[1..].iter().max().unwrap());
        assert!(*least > 0 && *most <= least * 2, "{budget:?} {len}: {done:?}");
    }
}

/// Queue pairs whose numbers have the same upper byte share a queue of the peer's, others do not.
#[test]
fn slots_behind_one_address_do_not_share_credit() {
    let room = Budget { bytes: 1 << 30, datagrams: 7 };
    let own = Some(Budget { bytes: 1 << 20, datagrams: 256 });
    for (budget, dests, datagrams) in [
        (room, [0x01_0005, 0x01_0006], 7),
        (room, [0x01_0005, 0x02_0005], 14),
        // The numbers of another implementation's queue pairs name no queue.
        (Budget::STANDARD, [0x01_0005, 0x02_0005], 16),
    ] {
        let setup = Setup { qps: 2, own, ..setup(budget) };
        let mut end = End::new(1, &setup);
        let key = end.host.register(0, 1 << 20, Access::ALL);
        for (qpn, dest) in end.qpns.clone().into_iter().zip(dests) {
            end.connect(qpn, 0, Qpn::new(dest), &setup);
            for wr_id in 0..60 {
                let sges = [sge(0, 64, key)];
                let wr = SendWr::new(write(Key(9)), SendData::Sges(&sges)).wr_id(wr_id);
                end.engine.post_send(qpn, &wr, &mut end.host).expect("room");
            }
        }
        end.engine.poll_transmit(Time(1), 1 << 20, &mut end.host, &mut end.out);
        assert_eq!(end.out.packets.len(), datagrams, "{dests:x?}");
    }
}

#[test]
fn acknowledgements_of_all_stay_within_our_own_room() {
    let (room, own) =
        (Budget { bytes: 1 << 30, datagrams: 500 }, Budget { bytes: 1 << 20, datagrams: 40 });
    let mut pair = Pair::new(&Setup { own: Some(own), ..setup(room) });
    let keys = pair.register();
    let mut done = 0;
    for qp in 0..QPS {
        for _ in 0..60 {
            pair.send_on(0, qp, qp as u64, write(keys[1]), &[sge(0, 64, keys[0])]);
        }
    }
    let mut fullest = 0;
    while done < 60 * QPS {
        // The worst case: each packet with AckReq gets its own response.
        let (_, asked) = flood(&mut pair, 0, |packet| packet.bth().ack_req);
        fullest = fullest.max(asked);
        assert!(asked <= own.datagrams, "{asked} acknowledgements");
        pair.deliver(0);
        pair.deliver(1);
        pair.now = pair.now.after(50_000);
        done += pair.completions(0).len();
    }
    assert!(fullest >= own.datagrams - 1, "{fullest}: too timid");
    let counters = pair.ends[0].engine.counters();
    assert_eq!((counters.retransmitted_pkts, counters.local_ack_timeout_err), (0, 0));
}

#[test]
fn more_queue_pairs_than_there_is_room_for_answers_take_turns() {
    let own = Budget { bytes: 1 << 20, datagrams: 8 };
    let mut pair = Pair::new(&Setup { own: Some(own), timeout: 0, qps: 32, ..Setup::default() });
    let keys = pair.register();
    let mut done = [0; 32];
    for qp in 0..32 {
        for _ in 0..20 {
            pair.send_on(0, qp, qp as u64, write(keys[1]), &[sge(0, 3000, keys[0])]);
        }
    }
    let mut rounds = 0;
    while done.iter().sum::<u64>() < 20 * 32 {
        let (_, asked) = flood(&mut pair, 0, |packet| packet.bth().ack_req);
        assert!(asked <= own.datagrams, "{asked} acknowledgements");
        pair.deliver(0);
        pair.deliver(1);
        pair.now = pair.now.after(50_000);
        for cqe in pair.completions(0) {
            done[cqe.wr_id as usize] += 1;
        }
        rounds += 1;
        assert!(rounds < 200, "{done:?}");
    }
    assert_eq!(pair.ends[0].engine.counters().retransmitted_pkts, 0);
}

#[test]
fn small_messages_of_others_starve_no_read() {
    let own = Budget { bytes: 1 << 20, datagrams: 8 };
    let mut pair = Pair::new(&Setup { own: Some(own), timeout: 0, qps: 16, ..Setup::default() });
    let keys = pair.register();
    let read = SendOp::Read { remote: BASE, rkey: keys[1] };
    for qp in 1..16 {
        pair.send_on(0, qp, 0, write(keys[1]), &[sge(0, 8, keys[0])]);
    }
    pair.send_on(0, 0, 1, read, &[sge(0, 3000, keys[0])]);
    let mut rounds = 0;
    loop {
        flood(&mut pair, 0, |_| true);
        // Half of the responses arrive in each round, and the queue pairs that got theirs start
        // again: no queue pair is ever the last.
        pair.deliver(0);
        flood(&mut pair, 1, |_| true);
        let later = pair.ends[1].out.packets.split_off(pair.ends[1].out.packets.len().div_ceil(2));
        pair.deliver(1);
        pair.ends[1].out.packets.extend(later);
        pair.now = pair.now.after(1_000);
        let done = pair.completions(0);
        if done.iter().any(|cqe| cqe.wr_id == 1) {
            return;
        }
        for cqe in done {
            let qp = pair.ends[0].qpns.iter().position(|qpn| *qpn == cqe.qpn).unwrap();
            pair.send_on(0, qp, 0, write(keys[1]), &[sge(0, 8, keys[0])]);
        }
        rounds += 1;
        assert!(rounds < 100);
    }
}

#[test]
fn the_dead_keep_nobody_waiting_for_long() {
    let own = Budget { bytes: 1 << 20, datagrams: 8 };
    let mut pair = Pair::new(&Setup { own: Some(own), timeout: 0, qps: 32, ..Setup::default() });
    let keys = pair.register();
    // The packets of the first 31 are lost, and they have no timer: they wait for ever.
    let living = pair.ends[1].qpns[31].value().to_be_bytes();
    pair.pass = Box::new(move |from, packet| from == 1 || packet[5..8] == living[1..]);
    let begun = pair.now;
    for qp in 0..32 {
        pair.send_on(0, qp, qp as u64, write(keys[1]), &[sge(0, 8, keys[0])]);
    }
    pair.run_until(|pair| pair.ends[0].host.completions.iter().any(|cqe| cqe.wr_id == 31));
    assert!(pair.now.since(begun) <= 4 * 200_000_000, "{:?}", pair.now);
}

#[test]
fn reads_of_all_stay_within_our_own_room() {
    let budget = Budget { bytes: 100 * 2304, datagrams: 100 };
    let mut pair = Pair::new(&setup(budget));
    let keys = pair.register();
    let mut done = [0u64; QPS];
    let read = SendOp::Read { remote: BASE, rkey: keys[1] };
    for qp in 0..QPS {
        for _ in 0..20 {
            pair.send_on(0, qp, qp as u64, read, &[sge(0, 20_000, keys[0])]);
        }
    }
    let mut rounds = 0;
    while done.iter().sum::<u64>() < 20 * QPS as u64 {
        assert!(flood(&mut pair, 0, |_| true).1 <= budget.datagrams);
        pair.deliver(0);
        let responses =
            flood(&mut pair, 1, |packet| packet.info.operation == Operation::ReadResponse);
        assert!(within(budget, responses), "{responses:?} exceeds {budget:?}");
        pair.deliver(1);
        pair.now = pair.now.after(50_000);
        for cqe in pair.completions(0) {
            assert_eq!(cqe.status, WcStatus::Success);
            done[cqe.wr_id as usize] += 1;
        }
        let (least, most) = (done.iter().min().unwrap(), done.iter().max().unwrap());
        // A turn takes all the credit: five READs, twice before the second queue pair gets its own
        // turn.
        assert!(*most <= least + 10, "{done:?}");
        rounds += 1;
        assert!(rounds < 10_000);
    }
}

#[test]
fn reads_and_writes_share_without_blocking_each_other() {
    let mut pair = Pair::new(&setup(Budget { bytes: 50 * 2304, datagrams: 50 }));
    let keys = pair.register();
    let read = SendOp::Read { remote: BASE, rkey: keys[1] };
    let add = SendOp::FetchAdd { remote: BASE, rkey: keys[1], add: 1 };
    for qp in 0..QPS {
        for n in 0..30 {
            let (op, len) = match (qp + n) % 3 {
                0 => (write(keys[1]), 9000),
                1 => (read, 9000),
                _ => (add, 8),
            };
            pair.send_on(0, qp, 0, op, &[sge(8 * (1 + qp as u64), len, keys[0])]);
            pair.send_on(1, qp, 0, op_for(op, keys[0]), &[sge(1 << 18, len, keys[1])]);
        }
    }
    pair.run();
    for at in 0..2 {
        let cqes = pair.completions(at);
        assert_eq!(cqes.len(), 30 * QPS);
        assert!(cqes.iter().all(|cqe| cqe.status == WcStatus::Success));
    }
}

fn op_for(op: SendOp, key: Key) -> SendOp {
    match op {
        SendOp::Read { remote, .. } => SendOp::Read { remote, rkey: key },
        SendOp::FetchAdd { remote, add, .. } => SendOp::FetchAdd { remote, rkey: key, add },
        _ => write(key),
    }
}

/// All queue pairs want more than there is credit for, and nothing has arrived yet.
fn crowded() -> (Pair, [Key; 2], Budget) {
    let budget = Budget { bytes: 1 << 30, datagrams: 10 };
    let mut pair = Pair::new(&setup(budget));
    let keys = pair.register();
    for qp in 0..QPS {
        pair.send_on(0, qp, qp as u64, write(keys[1]), &[sge(0, 5000, keys[0])]);
    }
    assert_eq!(flood(&mut pair, 0, |_| true).1, 10);
    (pair, keys, budget)
}

#[test]
fn who_is_destroyed_or_reset_or_breaks_gives_its_room_and_its_place_to_others() {
    for leave in 0..3 {
        let (mut pair, keys, budget) = crowded();
        let end = &mut pair.ends[0];
        // Every other queue pair leaves, both those with credit and those that wait for it.
        for qp in (0..QPS).step_by(2) {
            let qpn = end.qpns[qp];
            let to = |state| QpAttr { state: Some(state), ..QpAttr::default() };
            match leave {
                0 => end.engine.destroy_qp(qpn).unwrap(),
                1 => end.modify(qpn, &to(QpState::Reset)).unwrap(),
                _ => end.modify(qpn, &to(QpState::Err)).unwrap(),
            }
        }
        end.host.completions.clear();
        pair.run();
        let mut done: Vec<_> = pair.completions(0).iter().map(|c| (c.wr_id, c.status)).collect();
        done.sort_by_key(|(id, _)| *id);
        let expected: Vec<_> =
            (1..QPS as u64).step_by(2).map(|id| (id, WcStatus::Success)).collect();
        assert_eq!(done, expected);
        // All credit is there again.
        pair.send_on(0, 1, 1, write(keys[1]), &[sge(0, 100_000, keys[0])]);
        assert_eq!(flood(&mut pair, 0, |_| true).1, budget.datagrams);
    }
}

#[test]
fn a_reset_waiter_waits_again_where_it_is_connected_next() {
    let (mut pair, keys, _) = crowded();
    // The last one waits; it starts over and waits again, for the same credit.
    pair.reconnect(QPS - 1, &setup(Budget { bytes: 1 << 30, datagrams: 10 }));
    pair.send_on(0, QPS - 1, 1000, write(keys[1]), &[sge(0, 5000, keys[0])]);
    pair.run();
    let done = pair.completions(0);
    assert_eq!(done.len(), QPS);
    assert!(done.iter().all(|cqe| cqe.status == WcStatus::Success));
    assert!(done.iter().any(|cqe| cqe.wr_id == 1000));
}

#[test]
fn a_peer_that_refuses_one_gives_back_its_room() {
    let (mut pair, keys, budget) = crowded();
    pair.run();
    pair.completions(0);
    for qp in 0..QPS {
        let op = SendOp::Write { remote: BASE, rkey: Key(1), imm: None };
        pair.send_on(
            0,
            qp,
            qp as u64,
            if qp < 32 { op } else { write(keys[1]) },
            &[sge(0, 5000, keys[0])],
        );
    }
    pair.run();
    let done = pair.completions(0);
    assert_eq!(done.iter().filter(|cqe| cqe.status == WcStatus::RemAccessErr).count(), 32);
    assert_eq!(done.iter().filter(|cqe| cqe.status == WcStatus::Success).count(), 32);
    pair.send_on(0, 50, 1, write(keys[1]), &[sge(0, 100_000, keys[0])]);
    assert_eq!(flood(&mut pair, 0, |_| true).1, budget.datagrams);
}

#[test]
fn a_silent_peer_holds_its_room_no_longer_than_the_timeout() {
    let (mut pair, _, _) = crowded();
    // The first ones take all credit and lose their packets; every queue pair succeeds in the end.
    pair.ends[0].out.packets.clear();
    pair.run();
    assert_eq!(pair.completions(0).len(), QPS);
}

#[test]
fn who_asks_the_dead_is_told_so_in_time_however_many_do() {
    let budget = Budget { bytes: 1 << 30, datagrams: 10 };
    let mut pair = Pair::new(&Setup { retry_cnt: 3, ..setup(budget) });
    let keys = pair.register();
    pair.pass = Box::new(|_, _| false);
    for qp in 0..QPS {
        pair.send_on(0, qp, qp as u64, write(keys[1]), &[sge(0, 5000, keys[0])]);
    }
    let (start, timeout) = (pair.now, 4096 << 20);
    let mut ended = Vec::new();
    pair.run_until(|pair| {
        let ends = pair.ends[0].host.completions.len();
        ended.resize(ends, pair.now.since(start));
        ends == QPS
    });
    assert!(pair.completions(0).iter().all(|cqe| cqe.status == WcStatus::RetryExcErr));
    // The time counts from each queue pair's own AckReq: those without credit at first sent theirs
    // only after the first ones had no response in time.
    assert!(ended.iter().all(|at| *at >= 4 * timeout), "too early: {ended:?}");
    assert!(ended.iter().all(|at| *at <= 5 * timeout + timeout / 100), "too late: {ended:?}");
}

#[test]
fn a_full_sink_loses_nothing() {
    for room in [1, 2, 3, 7] {
        let mut pair = Pair::new(&Setup { timeout: 20, ..Setup::default() });
        let keys = pair.register();
        for end in &mut pair.ends {
            end.out.room = room;
        }
        let read = SendOp::Read { remote: BASE, rkey: keys[1] };
        let add = SendOp::FetchAdd { remote: BASE + 80_000, rkey: keys[1], add: 1 };
        for n in 0..10 {
            pair.recv(1, n, &[sge(500_000, 5000, keys[1])]);
            pair.send(0, n, write(keys[1]), &[sge(0, 5000, keys[0])]);
            pair.send(0, n, read, &[sge(100_000, 5000, keys[0])]);
            pair.send(0, n, SendOp::Send { imm: Some([1; 4]) }, &[sge(0, 5000, keys[0])]);
            pair.send(0, n, add, &[sge(200_000, 8, keys[0])]);
        }
        pair.run();
        assert_eq!(pair.completions(0).len(), 40);
        assert_eq!(pair.completions(1).len(), 10);
        let counter = &pair.ends[1].host.arena[80_000..80_008];
        assert_eq!(counter, 10u64.to_ne_bytes());
        for end in &pair.ends {
            assert_eq!(end.engine.counters().retransmitted_pkts, 0);
            assert_eq!(end.engine.counters().duplicate_request, 0);
        }
    }
}

#[test]
fn a_closed_sink_costs_no_retries() {
    let mut pair = Pair::new(&Setup { timeout: 8, retry_cnt: 0, ..Setup::default() });
    let keys = pair.register();
    pair.ends[0].out.room = 0;
    pair.send(0, 1, write(keys[1]), &[sge(0, 5000, keys[0])]);
    for _ in 0..10 {
        pair.deliver(0);
        pair.now = pair.now.after(10_000_000);
        let (now, end) = (pair.now, &mut pair.ends[0]);
        end.engine.handle_timeout(now, &mut end.host);
    }
    pair.ends[0].out.room = 100;
    pair.run();
    assert_eq!(pair.completions(0)[0].status, WcStatus::Success);
}

#[test]
fn sixteen_queue_pairs_keep_their_lists_at_rest_and_more_hand_them_on() {
    for (qps, kept) in [(15, 15), (16, 16), (17, 16), (40, 16)] {
        let mut pair = Pair::new(&Setup { qps, ..Setup::default() });
        let keys = pair.register();
        for qp in 0..qps {
            pair.send_on(0, qp, qp as u64, write(keys[1]), &[sge(0, 8, keys[0])]);
        }
        pair.run();
        assert_eq!(pair.completions(0).len(), qps);
        let left = pair.ends[0].engine.footprint();
        let lists = (left.in_flight_lists, left.spare_in_flight_lists);
        assert_eq!(lists, (kept, qps - kept), "{qps} queue pairs");
    }
}

#[test]
fn turns_are_short_and_go_round() {
    let mut pair = Pair::new(&Setup { qps: 4, arena: 4 << 20, ..Setup::default() });
    let keys = pair.register();
    for qp in 0..4 {
        pair.send_on(0, qp, qp as u64, write(keys[1]), &[sge(0, 1 << 20, keys[0])]);
    }
    let end = &mut pair.ends[0];
    let mut seen = Vec::new();
    for _ in 0..4 {
        end.engine.poll_transmit(Time(1000), 64, &mut end.host, &mut end.out);
        let qpns: Vec<_> = end.out.packets.drain(..).map(|p| p[7]).collect();
        assert_eq!(qpns.len(), 64);
        assert!(qpns.iter().all(|qpn| *qpn == qpns[0]));
        seen.push(qpns[0]);
    }
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), 4);
}

#[test]
fn who_waits_for_room_that_never_comes_finds_out_whether_the_peer_lives() {
    let budget = Budget { bytes: 1 << 30, datagrams: 10 };
    let mut setup = Setup { budget, qps: 2, timeout: 0, ..Setup::default() };
    let mut pair = Pair::new(&setup);
    let keys = pair.register();
    // The second gives up after a while; the first never does.
    setup.timeout = 8;
    setup.retry_cnt = 1;
    pair.reconnect(1, &setup);
    pair.pass = Box::new(|_, _| false);
    pair.send_on(0, 0, 0, write(keys[1]), &[sge(0, 20_000, keys[0])]);
    let read = SendOp::Read { remote: BASE, rkey: keys[1] };
    for op in [write(keys[1]), read] {
        pair.send_on(0, 1, 1, op, &[sge(0, 5000, keys[0])]);
    }
    pair.run();
    let done: Vec<_> = pair.completions(0).iter().map(|c| (c.wr_id, c.status)).collect();
    assert_eq!(done, [(1, WcStatus::RetryExcErr), (1, WcStatus::WrFlushErr)]);
    // Where the peer lives, the work is done, packet by packet.
    let (mut pair, keys, _) = crowded();
    pair.ends[0].out.packets.clear();
    pair.pass = Box::new(|_, packet| packet[7] != 0x34);
    for n in 0..3 {
        pair.send_on(0, 1, 1000 + n, write(keys[1]), &[sge(0, 5000, keys[0])]);
    }
    pair.run_until(|pair| pair.ends[0].host.completions.iter().any(|c| c.wr_id == 1002));
}

/// A requester with `count` WRITEs posted; nothing has left yet.
fn unasked(setup: &Setup, count: u64) -> crate::common::Solo {
    let mut solo = crate::common::Solo::new(setup);
    let list = [solo.sge(0, 8)];
    (0..count).for_each(|n| _ = solo.post(n, write(Key(0x99)), &list));
    solo
}

/// Without a timer, and with credit for only one acknowledgement.
fn tight() -> Setup {
    let own = Budget { bytes: 1 << 20, datagrams: 1 };
    Setup { own: Some(own), timeout: 0, ..Setup::script() }
}

#[test]
fn the_end_that_did_not_ask_does_when_what_follows_cannot_be_sent() {
    let mut solo = unasked(&tight(), 2);
    let bad = rocinante_stack::mem::Sge { lkey: Key(0xbad), ..solo.sge(0, 600) };
    solo.post(2, write(Key(0x99)), &[bad]);
    assert_eq!(solo.sent(), ["WRITE_ONLY #0 8B", "WRITE_ONLY #1 8B", "WRITE_ONLY #1 8B ack"]);
    assert!(solo.receive_ack(1).sent().is_empty());
    let done = [(0, WcStatus::Success), (1, WcStatus::Success), (2, WcStatus::LocProtErr)];
    assert_eq!(solo.completed(), done);
    assert_eq!(solo.end.engine.poll_timeout(), None, "nothing is awaited in the error state");
}

#[test]
fn the_end_that_did_not_ask_does_when_the_queue_is_drained() {
    let mut solo = unasked(&tight(), 4);
    solo.end.out.room = 3;
    assert_eq!(solo.sent(), ["WRITE_ONLY #0 8B", "WRITE_ONLY #1 8B", "WRITE_ONLY #2 8B"]);
    let (qpn, sqd) = (solo.end.qpn, Some(QpState::Sqd));
    let drain = QpAttr { state: sqd, sqd_async_notify: Some(true), ..QpAttr::default() };
    solo.end.modify(qpn, &drain).unwrap();
    solo.end.out.room = 100;
    assert_eq!(solo.sent(), ["WRITE_ONLY #2 8B ack"]);
    assert_eq!(solo.event(), None);
    solo.receive_ack(2);
    assert_eq!(solo.event(), Some(rocinante_stack::verbs::QpEvent::SqDrained));
}
