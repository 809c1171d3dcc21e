//! Shared receive queues: a queue pair that needs a receive takes the oldest. No receive is lost
//! when the queue pair that took it goes away.

use crate::common::{
    BASE, End, PD, PEER, Pair, QKEY, Setup, Solo, addr, pattern, qp_init, sge, steps, to,
};
use rocinante_stack::mem::{Access, PdId};
use rocinante_stack::types::{Key, Qpn, Time};
use rocinante_stack::verbs::{
    Destination, QpEvent, QpState, QpType, RecvWr, SendData, SendOp, SendWr, SrqId, WcOpcode,
    WcStatus,
};
use rocinante_stack::wire::Opcode as Op;
use rocinante_stack::{
    Budget, PeerAddress, PeerKind, PostError, QpInit, SrqAttr, SrqChange, SrqError, SrqInit,
};

const SEND: SendOp = SendOp::Send { imm: None };

fn pair(qp_type: QpType, qps: usize, depth: u32) -> (Pair, [Key; 2]) {
    let mut pair = Pair::new(&Setup { qp_type, qps, srq: Some(depth), ..Setup::script() });
    let keys = pair.register();
    (pair, keys)
}

fn solo(depth: u32) -> Solo {
    Solo::new(&Setup { srq: Some(depth), advertise: true, ..Setup::script() })
}

/// Posts receives of 1,000 bytes each, `wr_id` thousand bytes into the arena.
fn share(end: &mut End, wr_ids: impl IntoIterator<Item = u64>, key: Key) {
    for wr_id in wr_ids {
        end.share(wr_id, &[sge(wr_id * 1000, 1000, key)]).unwrap();
    }
}

/// `wr_id` and queue pair of the completions; all must be successful.
fn received(end: &mut End) -> Vec<(u64, Qpn)> {
    let done = end.host.completions.drain(..);
    done.map(|cqe| {
        assert_eq!(cqe.status, WcStatus::Success, "{cqe:?}");
        (cqe.wr_id, cqe.qpn)
    })
    .collect()
}

fn limit(end: &mut End, srq_limit: u32) -> Result<(), SrqError> {
    let change = SrqChange { srq_limit: Some(srq_limit), max_wr: None };
    end.engine.modify_srq(end.srq.unwrap(), &change)
}

fn armed(end: &End) -> u32 {
    end.engine.query_srq(end.srq.unwrap()).unwrap().srq_limit
}

#[test]
fn whoever_needs_a_receive_takes_the_oldest() {
    for qp_type in [QpType::Rc, QpType::Uc] {
        let (mut pair, keys) = pair(qp_type, 3, 8);
        share(&mut pair.ends[1], 1..=6, keys[1]);
        let qpns = pair.ends[1].qpns.clone();
        for (round, qp) in [2, 0, 1, 1, 2].into_iter().enumerate() {
            let data = pattern(700, round as u8);
            pair.ends[0].host.arena[..700].copy_from_slice(&data);
            pair.send_on(0, qp, 9, SEND, &[sge(0, 700, keys[0])]);
            pair.run();
            let wr_id = 1 + round as u64;
            assert_eq!(received(&mut pair.ends[1]), [(wr_id, qpns[qp])], "{qp_type}");
            assert_eq!(pair.ends[1].host.arena[wr_id as usize * 1000..][..700], data);
        }
        // A WRITE with immediate takes one too, a plain WRITE none.
        let (remote, rkey) = (BASE + 20_000, keys[1]);
        pair.send_on(0, 0, 9, SendOp::Write { remote, rkey, imm: None }, &[sge(0, 700, keys[0])]);
        pair.run();
        assert!(pair.ends[1].host.completions.is_empty());
        let op = SendOp::Write { remote, rkey, imm: Some([5; 4]) };
        pair.send_on(0, 0, 9, op, &[sge(0, 700, keys[0])]);
        pair.run();
        let cqe = pair.ends[1].host.completions[0];
        assert_eq!((cqe.wr_id, cqe.opcode), (6, WcOpcode::RecvRdmaWithImm));
        // No receive of a queue pair's own queue was retired.
        assert_eq!(pair.ends[1].host.recvs_retired, 0);
    }
}

#[test]
fn messages_that_come_at_once_keep_their_receives() {
    for qp_type in [QpType::Rc, QpType::Uc] {
        let (mut pair, keys) = pair(qp_type, 2, 2);
        share(&mut pair.ends[1], [1, 2], keys[1]);
        let data = pattern(1400, 3);
        pair.ends[0].host.arena[..1400].copy_from_slice(&data);
        for qp in 0..2 {
            pair.send_on(0, qp, 9, SEND, &[sge(qp as u64 * 700, 700, keys[0])]);
        }
        let end = &mut pair.ends[0];
        end.engine.poll_transmit(pair.now, 100, &mut end.host, &mut end.out);
        let packets: Vec<_> = end.out.packets.drain(..).collect();
        assert_eq!(packets.len(), 6);
        for at in [3, 0, 1, 4, 5, 2] {
            pair.inject(1, addr(1), addr(2), &packets[at]);
        }
        let end = &mut pair.ends[1];
        assert_eq!(received(end), [(1, end.qpns[1]), (2, end.qpns[0])]);
        assert_eq!(end.host.arena[1000..1700], data[700..]);
        assert_eq!(end.host.arena[2000..2700], data[..700]);
    }
}

#[test]
fn without_a_receive_the_sender_waits_until_one_is_posted() {
    let mut solo = solo(4);
    let send = |solo: &mut Solo| _ = solo.receive_request(Op::RC_SEND_ONLY, 0, &[&[7; 8]]);
    send(&mut solo);
    assert_eq!(solo.sent(), ["RNR #0 timer 12"]);
    solo.end.share(5, &[solo.sge(0, 100)]).unwrap();
    send(&mut solo);
    // Shared receives are promised to no peer.
    assert_eq!(solo.sent(), ["ACK #0"]);
    assert_eq!(solo.completed(), [(5, WcStatus::Success)]);
    // Two engines find that out on their own.
    let (mut pair, keys) = pair(QpType::Rc, 1, 4);
    pair.send(0, 9, SEND, &[sge(0, 700, keys[0])]);
    pair.run_until(|pair| pair.ends[0].engine.counters().rcvd_rnr_err > 2);
    share(&mut pair.ends[1], [1], keys[1]);
    pair.run();
    assert_eq!(pair.ends[0].host.completed(), [(9, WcStatus::Success)]);
}

#[test]
fn the_limit_is_told_once_and_again_when_it_is_set_again() {
    let (mut pair, keys) = pair(QpType::Rc, 2, 8);
    assert_eq!(limit(&mut pair.ends[1], 9), Err(SrqError::Limit));
    assert_eq!(limit(&mut pair.ends[1], 3), Ok(()));
    // A small number of posted receives alone raises no event: no message has come.
    share(&mut pair.ends[1], 1..=4, keys[1]);
    assert_eq!((pair.ends[1].engine.poll_srq_event(), armed(&pair.ends[1])), (None, 3));
    let mut told = Vec::new();
    for message in 0..4 {
        pair.send_on(0, message % 2, 9, SEND, &[]);
        pair.run();
        told.push(pair.ends[1].engine.poll_srq_event());
    }
    let srq = pair.ends[1].srq;
    assert_eq!(told, [None, srq, None, None]);
    assert_eq!(armed(&pair.ends[1]), 0);
    // With none left, the next message raises the event, although it finds no receive.
    assert_eq!(limit(&mut pair.ends[1], 1), Ok(()));
    assert_eq!(pair.ends[1].engine.poll_srq_event(), None);
    pair.send(0, 9, SEND, &[]);
    pair.run_until(|pair| pair.ends[0].engine.counters().rcvd_rnr_err > 2);
    assert_eq!((pair.ends[1].engine.poll_srq_event(), armed(&pair.ends[1])), (srq, 0));
    assert_eq!(pair.ends[1].engine.poll_srq_event(), None);
    share(&mut pair.ends[1], [5], keys[1]);
    // 0 means no event.
    assert_eq!(limit(&mut pair.ends[1], 1).and_then(|()| limit(&mut pair.ends[1], 0)), Ok(()));
    pair.run();
    assert_eq!(pair.ends[1].engine.poll_srq_event(), None);
}

#[test]
fn who_breaks_flushes_what_it_took_and_leaves_the_rest() {
    let (mut pair, keys) = pair(QpType::Rc, 2, 4);
    share(&mut pair.ends[1], 1..=4, keys[1]);
    let [dies, lives] = [pair.ends[1].qpns[0], pair.ends[1].qpns[1]];
    pair.send(0, 9, SEND, &[sge(0, 700, keys[0])]);
    // The last packet is lost.
    let mut count = 0;
    pair.pass = Box::new(move |from, _| {
        count += usize::from(from == 0);
        from == 1 || count < 3
    });
    pair.deliver(0);
    let end = &mut pair.ends[1];
    assert!(end.host.completions.is_empty());
    end.modify(dies, &to(QpState::Err)).unwrap();
    let cqe = end.host.completions.pop().unwrap();
    assert_eq!((cqe.wr_id, cqe.status, cqe.qpn), (1, WcStatus::WrFlushErr, dies));
    assert!(end.host.completions.is_empty());
    let events: Vec<_> = std::iter::from_fn(|| end.engine.poll_event()).collect();
    assert_eq!(events, [(dies, QpEvent::LastWqeReached)]);
    // Only once, even after a second transition to ERR.
    end.modify(dies, &to(QpState::Err)).unwrap();
    assert_eq!((end.engine.poll_event(), end.host.completions.len()), (None, 0));
    // The other queue pair takes the next, and there is room for one again.
    pair.pass = Box::new(|_, _| true);
    pair.send_on(0, 1, 8, SEND, &[]);
    pair.run_until(|pair| !pair.ends[1].host.completions.is_empty());
    assert_eq!(received(&mut pair.ends[1]), [(2, lives)]);
    share(&mut pair.ends[1], [5, 6], keys[1]);
    assert_eq!(pair.ends[1].share(7, &[]), Err(PostError::Full));
}

#[test]
fn a_message_that_fails_breaks_its_own_queue_pair() {
    let (mut pair, keys) = pair(QpType::Rc, 2, 4);
    share(&mut pair.ends[1], [1, 2], keys[1]);
    let qpns = pair.ends[1].qpns.clone();
    pair.send(0, 9, SEND, &[sge(0, 1001, keys[0])]);
    pair.run();
    assert_eq!(pair.ends[0].host.completed(), [(9, WcStatus::RemInvReqErr)]);
    assert_eq!(pair.ends[1].host.completed(), [(1, WcStatus::LocLenErr)]);
    let last = (qpns[0], QpEvent::LastWqeReached);
    assert_eq!(std::iter::from_fn(|| pair.ends[1].engine.poll_event()).last(), Some(last));
    pair.send_on(0, 1, 8, SEND, &[sge(0, 1000, keys[0])]);
    pair.run();
    assert_eq!(received(&mut pair.ends[1]), [(2, qpns[1])]);
}

#[test]
fn what_is_refused_takes_no_receive() {
    let mut solo = solo(4);
    solo.end.share(1, &[solo.sge(0, 1000)]).unwrap();
    // A FIRST packet must be full; this one is not.
    solo.receive_request(Op::RC_SEND_FIRST, 0, &[&[7; 8]]);
    assert_eq!(solo.sent(), ["NAK #0 invalid"]);
    assert!(solo.completed().is_empty());
    let events: Vec<_> = std::iter::from_fn(|| solo.event()).collect();
    assert_eq!(events, [QpEvent::ReqErr, QpEvent::LastWqeReached]);
    assert!(solo.end.engine.uses_key(solo.key));
}

/// Half a message, then `away` with its queue pair: the receive is the oldest again.
fn comes_back(qp_type: QpType, away: impl Fn(&mut End, Qpn)) {
    let setup = Setup { qp_type, srq: Some(3), qps: 2, ..Setup::script() };
    let [first, only] = match qp_type {
        QpType::Rc => [Op::RC_SEND_FIRST, Op::RC_SEND_ONLY],
        _ => [Op::UC_SEND_FIRST, Op::UC_SEND_ONLY],
    };
    let mut solo = Solo::new(&setup);
    let other = solo.end.qpns[1];
    share(&mut solo.end, 1..=3, solo.key);
    solo.receive_request(first, 0, &[&[7; 256]]);
    // Its slot stays reserved.
    assert_eq!(solo.end.share(4, &[]), Err(PostError::Full));
    let qpn = solo.end.qpn;
    away(&mut solo.end, qpn);
    assert!(solo.completed().is_empty() && solo.event().is_none());
    solo.end.qpn = other;
    solo.end.connect(other, 0, PEER, &setup);
    for psn in 0..3 {
        solo.receive_request(only, psn, &[&[7; 8]]);
    }
    let all: Vec<_> = (1..=3).map(|wr_id| (wr_id, WcStatus::Success)).collect();
    assert_eq!(solo.completed(), all);
    assert_eq!(solo.end.share(4, &[]), Ok(()));
}

#[test]
fn a_receive_comes_back_from_a_queue_pair_that_is_reset_or_destroyed() {
    for qp_type in [QpType::Rc, QpType::Uc] {
        comes_back(qp_type, |end, qpn| end.modify(qpn, &to(QpState::Reset)).unwrap());
        comes_back(qp_type, |end, qpn| end.engine.destroy_qp(qpn).unwrap());
    }
}

#[test]
fn what_is_in_use_is_not_destroyed() {
    let mut end = End::new(1, &Setup { srq: Some(4), qps: 2, ..Setup::script() });
    let (srq, qpns) = (end.srq.unwrap(), end.qpns.clone());
    assert_eq!(end.engine.post_recv(qpns[0], &RecvWr { wr_id: 1, sges: &[] }, &mut end.host), {
        Err(PostError::Shared)
    });
    for qpn in qpns {
        assert_eq!(end.engine.destroy_srq(srq), Err(SrqError::InUse));
        end.engine.destroy_qp(qpn).unwrap();
    }
    assert_eq!(end.engine.srq_count(), 1);
    assert_eq!(end.engine.destroy_srq(srq), Ok(()));
    assert_eq!(end.engine.srq_count(), 0);
    assert_eq!(end.engine.destroy_srq(srq), Err(SrqError::Unknown));
    assert_eq!(end.share(1, &[]), Err(PostError::UnknownQp));
    assert_eq!(end.engine.query_srq(srq), None);
    let init = QpInit { srq: Some(SrqId(7)), ..qp_init(&Setup::script()) };
    assert_eq!(end.engine.create_qp(&init, 5), None);
    assert_eq!(end.engine.create_srq(&SrqInit { pd: PD, max_wr: 0, max_sge: 1 }), None);
}

#[test]
fn its_depth_can_change() {
    let (mut pair, keys) = pair(QpType::Rc, 1, 3);
    let srq = pair.ends[1].srq.unwrap();
    share(&mut pair.ends[1], 1..=3, keys[1]);
    let resize = |pair: &mut Pair, max_wr| {
        let change = SrqChange { max_wr: Some(max_wr), srq_limit: None };
        pair.ends[1].engine.modify_srq(srq, &change)
    };
    assert_eq!(resize(&mut pair, 2), Err(SrqError::Depth));
    assert_eq!(resize(&mut pair, 0), Err(SrqError::Depth));
    assert_eq!(resize(&mut pair, 5), Ok(()));
    let attr = SrqAttr { max_wr: 5, max_sge: 4, srq_limit: 0 };
    assert_eq!(pair.ends[1].engine.query_srq(srq), Some(attr));
    share(&mut pair.ends[1], [4, 5], keys[1]);
    assert_eq!(pair.ends[1].share(6, &[]), Err(PostError::Full));
    let five = [sge(0, 1, keys[1]); 5];
    assert_eq!(resize(&mut pair, 6).map(|()| pair.ends[1].share(6, &five)), {
        Ok(Err(PostError::TooManySges))
    });
    for wr_id in 1..=5 {
        pair.send(0, 9, SEND, &[sge(0, 999, keys[0])]);
        pair.run();
        assert_eq!(received(&mut pair.ends[1]), [(wr_id, pair.ends[1].qpn)]);
    }
}

/// A receive that a queue pair has taken and not completed keeps its slot: it may come back.
#[test]
fn its_depth_counts_receives_that_are_taken() {
    let mut solo = solo(4);
    let srq = solo.end.srq.unwrap();
    share(&mut solo.end, 1..=3, solo.key);
    solo.receive_request(Op::RC_SEND_FIRST, 0, &[&[7; 256]]);
    share(&mut solo.end, [4], solo.key);
    assert_eq!(solo.end.share(5, &[]), Err(PostError::Full), "three are posted, and one is taken");
    let resize = |solo: &mut Solo, max_wr| {
        let change = SrqChange { max_wr: Some(max_wr), srq_limit: None };
        solo.end.engine.modify_srq(srq, &change)
    };
    assert_eq!(resize(&mut solo, 3), Err(SrqError::Depth));
    assert_eq!(resize(&mut solo, 5), Ok(()));
    share(&mut solo.end, [5], solo.key);
    assert_eq!(solo.end.share(6, &[]), Err(PostError::Full));
    assert_eq!(resize(&mut solo, 4), Err(SrqError::Depth));
    // It comes back into the queue, which has another depth now, and is the oldest.
    let qpn = solo.end.qpn;
    solo.end.modify(qpn, &to(QpState::Reset)).unwrap();
    assert_eq!(solo.end.share(6, &[]), Err(PostError::Full));
    let setup = solo.setup.clone();
    solo.end.connect(qpn, 0, PEER, &setup);
    for psn in 0..5 {
        solo.receive_request(Op::RC_SEND_ONLY, psn, &[&[7; 8]]);
    }
    let all: Vec<_> = (1..=5).map(|wr_id| (wr_id, WcStatus::Success)).collect();
    assert_eq!(solo.completed(), all);
    assert_eq!(resize(&mut solo, 1), Ok(()), "none is taken any more");
}

#[test]
fn its_receives_are_in_its_own_domain() {
    const OTHER: PdId = PdId(9);
    let setup = Setup { qps: 0, ..Setup::script() };
    let mut end = End::of(1, &setup, |engine| {
        let srq = engine.create_srq(&SrqInit { pd: OTHER, max_wr: 4, max_sge: 1 }).unwrap();
        (
            Some(srq),
            vec![engine.create_qp(&QpInit { srq: Some(srq), ..qp_init(&setup) }, 9).unwrap()],
        )
    });
    end.connect(end.qpn, 0, PEER, &setup);
    let key = end.host.register_in(OTHER, 0, 1000, Access::ALL);
    let foreign = end.host.register(2000, 1000, Access::ALL);
    let mut solo = Solo { end, now: Time(1000), setup, key };
    solo.end.share(1, &[sge(0, 1000, key)]).unwrap();
    solo.end.share(2, &[sge(2000, 1000, foreign)]).unwrap();
    solo.receive_request(Op::RC_SEND_ONLY, 0, &[&[7; 8]]);
    solo.receive_request(Op::RC_SEND_ONLY, 1, &[&[7; 8]]);
    assert_eq!(solo.completed(), [(1, WcStatus::Success), (2, WcStatus::LocProtErr)]);
}

#[test]
fn an_unreliable_message_that_is_lost_leaves_its_receive_to_the_next() {
    let (mut pair, keys) = pair(QpType::Uc, 1, 2);
    share(&mut pair.ends[1], [1, 2], keys[1]);
    let mut count = 0;
    pair.pass = Box::new(move |_, _| {
        count += 1;
        count != 2
    });
    for _ in 0..3 {
        pair.send(0, 9, SEND, &[sge(0, 700, keys[0])]);
    }
    pair.run();
    let qpn = pair.ends[1].qpn;
    assert_eq!(received(&mut pair.ends[1]), [(1, qpn), (2, qpn)]);
    pair.send(0, 9, SEND, &[]);
    pair.run();
    assert_eq!(pair.ends[1].engine.drops().no_receive, 1);
}

#[test]
fn datagrams_take_from_it_what_they_fit() {
    let setup = Setup { qp_type: QpType::Ud, qps: 2, srq: Some(4), ..Setup::script() };
    let mut pair = Pair::new(&setup);
    let keys = pair.register();
    let (budget, kind) = (Budget::STANDARD, PeerKind::Standard);
    let peer = PeerAddress { local: addr(1), remote: addr(2), path: 0, budget, kind };
    let end = &mut pair.ends[0];
    let ah = end.engine.create_ah(PD, &peer).unwrap();
    let qpns = pair.ends[1].qpns.clone();
    let send = |pair: &mut Pair, qp: usize, len: u32| {
        let to = Destination { ah, qpn: qpns[qp], qkey: QKEY };
        pair.send(0, 9, SendOp::SendTo { to, imm: None }, &[sge(0, len, keys[0])]);
        pair.run();
        received(&mut pair.ends[1])
    };
    assert!(send(&mut pair, 0, 8).is_empty());
    pair.ends[1].share(1, &[sge(0, 50, keys[1])]).unwrap();
    pair.ends[1].share(2, &[sge(1000, 100, keys[1])]).unwrap();
    // Too long: no receive is consumed or kept.
    assert!(send(&mut pair, 0, 11).is_empty());
    let qpns = pair.ends[1].qpns.clone();
    assert_eq!(send(&mut pair, 1, 10), [(1, qpns[1])]);
    assert_eq!(send(&mut pair, 0, 60), [(2, qpns[0])]);
    let drops = pair.ends[1].engine.drops();
    assert_eq!((drops.no_receive, drops.too_long), (1, 1));
    // The memory of one is not registered: the queue pair breaks, with its receive.
    pair.ends[1].share(3, &[sge(0, 100, Key(5))]).unwrap();
    pair.ends[1].share(4, &[sge(0, 100, keys[1])]).unwrap();
    let to = Destination { ah, qpn: qpns[0], qkey: QKEY };
    pair.send(0, 9, SendOp::SendTo { to, imm: None }, &[]);
    pair.run();
    assert_eq!(pair.ends[1].host.completed(), [(3, WcStatus::LocProtErr)]);
    let event = std::iter::from_fn(|| pair.ends[1].engine.poll_event()).last();
    assert_eq!(event, Some((qpns[0], QpEvent::LastWqeReached)));
}

#[test]
fn attributes_of_a_queue_pair_with_one_are_as_of_others() {
    let setup = Setup { srq: Some(2), ..Setup::script() };
    let mut end = End::new(1, &setup);
    let [init, ..] = steps(0, end.addr, PEER, &setup);
    end.modify(end.qpn, &init).unwrap();
    let wr = SendWr::new(SEND, SendData::Sges(&[])).wr_id(1);
    assert_eq!(end.engine.post_send(end.qpn, &wr, &mut end.host), Err(PostError::State));
    end.modify(end.qpn, &to(QpState::Err)).unwrap();
    assert_eq!(end.engine.poll_event(), Some((end.qpn, QpEvent::LastWqeReached)));
    // After a reset everything starts again.
    end.modify(end.qpn, &to(QpState::Reset)).unwrap();
    end.connect(end.qpn, 0, PEER, &setup);
    end.modify(end.qpn, &to(QpState::Err)).unwrap();
    assert_eq!(end.engine.poll_event(), Some((end.qpn, QpEvent::LastWqeReached)));
}
