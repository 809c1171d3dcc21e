//! The life of a queue pair: transitions, attributes, posting in every state, flushing, RESET and
//! reuse, destruction.

use crate::common::{End, PEER, Pair, Setup, Solo, addr, qp_init, steps, to};
use rocinante_stack::mem::Access;
use rocinante_stack::types::{Mtu, Psn, Qpn};
use rocinante_stack::verbs::{
    CqId, QpEvent, QpState, RecvWr, SendData, SendOp, SendWr, WcOpcode, WcStatus,
};
use rocinante_stack::wire::{NakCode, Opcode as Op};
use rocinante_stack::{Engine, EngineConfig, ModifyError, PostError, QpAttr, QpInit, Urgency};

/// The states of a reliable connection.
const STATES: [QpState; 6] =
    [QpState::Reset, QpState::Init, QpState::Rtr, QpState::Rts, QpState::Sqd, QpState::Err];

/// A queue pair taken to `state`.
fn in_state(state: QpState) -> End {
    let setup = Setup::script();
    let mut end = End::new(1, &setup);
    let qpn = end.qpn;
    let all = steps(0, addr(1), PEER, &setup);
    let upto = match state {
        QpState::Reset => 0,
        QpState::Init => 1,
        QpState::Rtr => 2,
        QpState::Rts | QpState::Sqd | QpState::Err => 3,
        QpState::Sqe => panic!("reliable connections have no such state"),
    };
    for attr in &all[..upto] {
        end.modify(qpn, attr).expect("a legal change");
    }
    if matches!(state, QpState::Sqd | QpState::Err) {
        end.modify(qpn, &to(state)).expect("a legal change");
    }
    assert_eq!(end.state(qpn), state);
    end
}

/// The attributes of the step into `state`.
fn step(state: QpState) -> QpAttr {
    let [init, rtr, rts] = steps(0, addr(1), PEER, &Setup::script());
    match state {
        QpState::Init => init,
        QpState::Rtr => rtr,
        QpState::Rts => rts,
        other => to(other),
    }
}

#[test]
fn only_the_transitions_of_the_table_are_possible() {
    for from in STATES {
        for target in STATES {
            let mut end = in_state(from);
            let qpn = end.qpn;
            let legal = matches!(target, QpState::Reset | QpState::Err)
                || matches!(
                    (from, target),
                    (QpState::Reset | QpState::Init, QpState::Init)
                        | (QpState::Init, QpState::Rtr)
                        | (QpState::Rtr, QpState::Rts)
                        | (QpState::Rts | QpState::Sqd, QpState::Sqd)
                );
            let result = end.modify(qpn, &step(target));
            if matches!(from, QpState::Rts | QpState::Sqd) && target == QpState::Rts {
                // The transition exists, but with other attributes.
                let attribute = "IBV_QP_SQ_PSN";
                assert_eq!(result, Err(ModifyError::NotAllowed { to: target, attribute }));
            } else if legal {
                assert_eq!(result, Ok(()), "{from} to {target}");
                assert_eq!(end.state(qpn), target);
            } else {
                assert_eq!(result, Err(ModifyError::Transition { from, to: target }));
                assert_eq!(end.state(qpn), from);
            }
        }
    }
}

#[test]
fn access_and_rnr_timer_can_change_while_it_runs() {
    let mut solo = Solo::script();
    let qpn = solo.end.qpn;
    let attr = QpAttr { access: Some(Access::NONE), min_rnr_timer: Some(5), ..QpAttr::default() };
    solo.end.modify(qpn, &attr).unwrap();
    assert_eq!(solo.state(), QpState::Rts);
    assert_eq!(solo.receive_request(Op::RC_SEND_ONLY, 0, &[]).sent(), ["RNR #0 timer 5"]);
    solo.post_recv(1, &[]);
    solo.receive_request(Op::RC_SEND_ONLY, 0, &[]);
    solo.receive_request(Op::RC_RDMA_READ_REQUEST, 1, &[&solo.reth(0, 4)]);
    assert_eq!(solo.sent(), ["NAK #1 invalid"]);
}

#[test]
fn query_says_what_was_set_and_where_it_is() {
    let mut solo = Solo::script();
    let (state, attr, init) = solo.end.engine.query_qp(solo.end.qpn).unwrap();
    assert_eq!((state, attr.state), (QpState::Rts, Some(QpState::Rts)));
    assert_eq!((attr.path_mtu, attr.timeout), (Some(Mtu::Mtu256), Some(14)));
    assert_eq!(attr.sq_psn, Some(Psn::new(0x10)));
    assert_eq!(init, qp_init(&solo.setup));
    solo.send(1, 600);
    solo.post_recv(2, &[]);
    solo.receive_request(Op::RC_SEND_ONLY, 0, &[]);
    let attr = solo.end.engine.query_qp(solo.end.qpn).unwrap().1;
    assert_eq!((attr.sq_psn, attr.rq_psn), (Some(Psn::new(0x13)), Some(Psn::new(0x5001))));
    assert!(solo.end.engine.query_qp(Qpn::new(3)).is_none());
}

fn send() -> SendWr<'static> {
    SendWr::send(SendData::NONE).wr_id(1)
}

#[test]
fn posting_in_every_state() {
    let recv = RecvWr { wr_id: 2, sges: &[] };
    for state in STATES {
        let mut end = in_state(state);
        let sent = end.engine.post_send(end.qpn, &send(), &mut end.host);
        let received = end.engine.post_recv(end.qpn, &recv, &mut end.host);
        let (may_send, may_receive) = match state {
            QpState::Reset => (false, false),
            QpState::Init | QpState::Rtr => (false, true),
            QpState::Rts | QpState::Sqd | QpState::Sqe | QpState::Err => (true, true),
        };
        let expected = |may| if may { Ok(()) } else { Err(PostError::State) };
        assert_eq!((sent, received), (expected(may_send), expected(may_receive)), "{state}");
        let flushed = [(1, WcStatus::WrFlushErr), (2, WcStatus::WrFlushErr)];
        let expected = if state == QpState::Err { &flushed[..] } else { &[] };
        assert_eq!(end.host.completed(), expected, "{state}");
        // Packets leave only in RTS.
        end.engine.poll_transmit(Default::default(), 9, &mut end.host, &mut end.out);
        assert_eq!(end.out.packets.len(), usize::from(state == QpState::Rts));
    }
    let mut end = in_state(QpState::Rts);
    let nobody = Qpn::new(0x3333);
    assert_eq!(end.engine.post_send(nobody, &send(), &mut end.host), Err(PostError::UnknownQp));
    assert_eq!(end.engine.post_recv(nobody, &recv, &mut end.host), Err(PostError::UnknownQp));
    assert_eq!(end.modify(nobody, &to(QpState::Err)), Err(ModifyError::UnknownQp));
    assert_eq!(end.engine.destroy_qp(nobody), Err(ModifyError::UnknownQp));
}

#[test]
fn packets_are_heard_only_from_rtr_on() {
    for state in STATES {
        let mut solo = Solo::script();
        solo.end = in_state(state);
        let _ = solo.try_recv(1, &[]);
        solo.end.host.completions.clear();
        let header = crate::common::reth(0, Default::default(), 0);
        solo.receive_request(Op::RC_RDMA_WRITE_ONLY, 0, &[&header]);
        let hears = matches!(state, QpState::Rtr | QpState::Rts | QpState::Sqd);
        assert_eq!(solo.sent().len(), usize::from(hears), "{state}");
        assert_eq!(solo.end.engine.drops().unknown_qpn, u64::from(!hears));
        assert_eq!(solo.event(), (state == QpState::Rtr).then_some(QpEvent::CommEst));
        assert_eq!(solo.event(), None);
        solo.receive_ack(0);
        assert!(solo.completed().is_empty());
    }
}

/// A queue pair that has never sent breaks as any other.
#[test]
fn a_bad_request_breaks_a_queue_pair_in_rtr() {
    for (opcode, payload, event, status) in [
        (Op::RC_RDMA_WRITE_ONLY, 4, Some(QpEvent::AccessErr), WcStatus::WrFlushErr),
        (Op::RC_ATOMIC_WRITE, 4, Some(QpEvent::ReqErr), WcStatus::WrFlushErr),
        (Op::RC_SEND_ONLY, 4, None, WcStatus::LocLenErr),
    ] {
        let mut solo = Solo::script();
        solo.end = in_state(QpState::Rtr);
        solo.try_recv(1, &[]).unwrap();
        let reth = crate::common::reth(0, Default::default(), 4);
        let header: &[u8] = if opcode == Op::RC_SEND_ONLY { &[] } else { &reth };
        solo.receive_request(opcode, 0, &[header, &[1; 4][..payload]]);
        let (state, attr, _) = solo.end.engine.query_qp(solo.end.qpn).unwrap();
        assert_eq!((state, attr.state), (QpState::Err, Some(QpState::Err)), "{opcode:?}");
        assert_eq!(solo.event(), Some(QpEvent::CommEst), "{opcode:?}");
        assert_eq!(solo.event(), event, "{opcode:?}");
        assert_eq!(solo.event(), None);
        assert_eq!(solo.completed(), [(1, status)]);
        assert_eq!(solo.sent().len(), 1, "the peer gets a NAK");
    }
}

#[test]
fn an_error_flushes_sends_then_receives_in_order() {
    let mut solo = Solo::script();
    solo.sends(1..=3, 10);
    (4..=6).for_each(|id| solo.post_recv(id, &[]));
    solo.sent();
    let qpn = solo.end.qpn;
    solo.end.modify(qpn, &to(QpState::Err)).unwrap();
    let cqes = std::mem::take(&mut solo.end.host.completions);
    assert!(cqes.iter().all(|cqe| cqe.status == WcStatus::WrFlushErr && cqe.qpn == qpn));
    assert_eq!(cqes.iter().map(|cqe| cqe.wr_id).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6]);
    assert_eq!((cqes[0].opcode, cqes[5].opcode), (WcOpcode::Send, WcOpcode::Recv));
    assert_eq!((solo.end.host.sends_retired, solo.end.host.recvs_retired), (3, 3));
    // A second change to ERR has no effect.
    solo.end.modify(qpn, &to(QpState::Err)).unwrap();
    assert!(solo.completed().is_empty());
    assert!(solo.sent().is_empty());
}

#[test]
fn unsignaled_requests_complete_only_when_flushed() {
    let mut solo = Solo::script();
    for wr_id in 1..=3 {
        solo.post_wr(&send().wr_id(wr_id).signaled(wr_id == 2)).unwrap();
    }
    solo.sent();
    assert_eq!(solo.receive_ack(1).completed(), [(2, WcStatus::Success)]);
    assert_eq!(solo.end.host.sends_retired, 2);
    solo.end.modify(solo.end.qpn, &to(QpState::Err)).unwrap();
    assert_eq!(solo.completed(), [(3, WcStatus::WrFlushErr)]);
}

#[test]
fn reset_forgets_all_work_without_completions_and_the_queue_pair_serves_again() {
    let mut solo = Solo::script();
    let qpn = solo.end.qpn;
    solo.send(1, 1000);
    solo.post_recv(2, &[]);
    let old_request = solo.request(Op::RC_SEND_ONLY, 0, &[]);
    let old_ack = solo.response(Op::RC_ACKNOWLEDGE, 3, &[&[0x1f, 0, 0, 0]]);
    solo.sent();
    solo.end.modify(qpn, &to(QpState::Reset)).unwrap();
    assert!(solo.completed().is_empty());
    assert_eq!(solo.end.engine.query_qp(qpn).unwrap().1, to(QpState::Reset));
    // Old packets are still in flight while it is set up again.
    let setup = Setup { psn: [0x800, 0x6000], ..Setup::script() };
    for attr in steps(0, addr(1), PEER, &setup) {
        solo.receive(&old_request);
        solo.receive(&old_ack);
        solo.end.modify(qpn, &attr).unwrap();
    }
    solo.setup = setup;
    // From RTR on, the old request is a duplicate by its PSN, and is acknowledged as one. Nothing
    // is executed.
    assert_eq!(solo.sent(), ["ACK #-1"]);
    assert_eq!(solo.send(3, 10).sent(), ["SEND_ONLY #0 10B ack"]);
    solo.receive(&old_ack);
    assert!(solo.completed().is_empty());
    assert_eq!(solo.receive_ack(0).completed(), [(3, WcStatus::Success)]);
    solo.wait(1 << 40);
    assert_eq!(solo.end.engine.counters().local_ack_timeout_err, 0);
}

#[test]
fn reset_with_a_nak_still_to_send_sends_nothing() {
    let mut solo = Solo::script();
    let qpn = solo.end.qpn;
    solo.receive_request(Op::RC_SEND_MIDDLE, 0, &[&[1; 256]]);
    solo.end.modify(qpn, &to(QpState::Reset)).unwrap();
    assert!(solo.sent().is_empty());
    for attr in steps(0, addr(1), PEER, &Setup::script()) {
        solo.end.modify(qpn, &attr).unwrap();
        assert!(solo.sent().is_empty());
    }
}

#[test]
fn a_destroyed_queue_pair_leaves_nothing_behind() {
    let mut solo = Solo::script();
    let qpn = solo.end.qpn;
    solo.sends(1..=9, 10);
    solo.read(10, 3000).sent();
    solo.send(11, 10);
    solo.receive_request(Op::RC_SEND_MIDDLE, 3, &[&[1; 256]]);
    solo.end.engine.destroy_qp(qpn).unwrap();
    assert_eq!(solo.end.engine.qp_count(), 0);
    assert_eq!(solo.event(), None);
    assert_eq!(solo.end.engine.poll_timeout(), None);
    assert!(solo.end.engine.urgency() == Urgency::Idle);
    assert!(solo.sent().is_empty());
    solo.receive_ack(3);
    solo.receive_nak(4, NakCode::PsnSequenceError);
    assert!(solo.completed().is_empty());
    assert_eq!(solo.end.engine.drops().unknown_qpn, 2);
    // Another queue pair uses its slot.
    let setup = Setup::script();
    solo.end.qpn = solo.end.engine.create_qp(&qp_init(&setup), 77).unwrap();
    let new = solo.end.qpn;
    solo.end.connect(new, 0, PEER, &setup);
    assert_eq!(solo.send(1, 10).sent(), ["SEND_ONLY #0 10B ack"]);
}

#[test]
fn a_peer_that_is_destroyed_costs_its_partner_the_retries() {
    let mut pair = Pair::new(&Setup { retry_cnt: 2, ..Setup::default() });
    let keys = pair.register();
    let list = [crate::common::sge(0, 1 << 20, keys[0])];
    pair.send(0, 1, SendOp::Write { remote: crate::common::BASE, rkey: keys[1], imm: None }, &list);
    pair.run_until(|pair| pair.delivered > 20);
    let end = &mut pair.ends[1];
    end.engine.destroy_qp(end.qpn).unwrap();
    pair.run();
    assert_eq!(pair.completions(0)[0].status, WcStatus::RetryExcErr);
}

#[test]
fn a_full_completion_queue_breaks_those_who_use_it() {
    let mut solo = Solo::script();
    let other = QpInit { send_cq: CqId(5), recv_cq: CqId(6), ..qp_init(&solo.setup) };
    let spared = solo.end.engine.create_qp(&other, 500).unwrap();
    solo.send(1, 10);
    solo.end.engine.cq_overflow(CqId(0), &mut solo.end.host);
    assert_eq!(solo.state(), QpState::Err);
    assert_eq!(solo.event(), Some(QpEvent::Fatal));
    assert_eq!(solo.completed(), [(1, WcStatus::WrFlushErr)]);
    assert_eq!(solo.end.state(spared), QpState::Reset);
    solo.end.engine.cq_overflow(CqId(6), &mut solo.end.host);
    assert_eq!(solo.end.state(spared), QpState::Err);
}

#[test]
fn queue_pairs_are_limited_and_numbered_without_a_pattern_of_ours() {
    let config = EngineConfig { max_qp: 300, qpn_slot: 0x5a, ..EngineConfig::default() };
    let mut engine = Engine::new(config);
    let init = qp_init(&Setup::script());
    // The same random number for all: the QPNs must differ all the same.
    let mut qpns: Vec<_> = (0..300).map(|_| engine.create_qp(&init, 0xffff).unwrap()).collect();
    assert!(engine.create_qp(&init, 1).is_none());
    assert_eq!((engine.qp_count(), engine.config().max_qp), (300, 300));
    assert!(qpns.iter().all(|qpn| qpn.slot() == 0x5a && qpn.value() & 0xffff > 1));
    assert!(qpns.iter().all(|qpn| qpn.value() & 0xffff != 0xffff));
    engine.destroy_qp(qpns[7]).unwrap();
    assert!(engine.destroy_qp(qpns[7]).is_err());
    assert_eq!(engine.create_qp(&init, qpns[7].value()).unwrap(), qpns[7]);
    qpns.sort_unstable();
    qpns.dedup();
    assert_eq!(qpns.len(), 300);
}
