//! Unacknowledged packets leave in runs, and no faster than a receiver takes them.

use crate::common::{QKEY, Setup, Solo, addr, sge, to};
use rocinante_stack::types::{Mtu, Qpn, Time};
use rocinante_stack::verbs::{Destination, QpState, QpType, SendData, SendOp, SendWr};
use rocinante_stack::{Budget, PeerAddress, PeerKind, Urgency};

const US: u64 = 1000;

/// A queue pair that can send to a peer of unknown queue size, and its SEND operation.
fn sender(qp_type: QpType) -> (Solo, SendOp) {
    let (mtu, budget) = (Mtu::Mtu1024, Budget::STANDARD);
    let mut solo = Solo::new(&Setup { qp_type, mtu, budget, depth: 1024, ..Setup::default() });
    let (local, remote) = (addr(1), addr(2));
    let peer =
        PeerAddress { local, remote, path: 0, budget: Budget::STANDARD, kind: PeerKind::Standard };
    let imm = None;
    let op = match qp_type {
        QpType::Ud => {
            let ah = solo.end.engine.create_ah(crate::common::PD, &peer).unwrap();
            SendOp::SendTo { to: Destination { ah, qpn: Qpn::new(9), qkey: QKEY }, imm }
        }
        _ => SendOp::Send { imm },
    };
    (solo, op)
}

fn post(solo: &mut Solo, op: SendOp, count: usize, len: u32) {
    let data = SendData::Sges(&[sge(0, len, solo.key)]);
    let wr = SendWr::new(op, data).wr_id(1);
    for _ in 0..count {
        solo.end.engine.post_send(solo.end.qpn, &wr, &mut solo.end.host).unwrap();
    }
}

#[test]
fn at_once_leaves_half_of_a_queue_and_then_runs_at_a_rate() {
    for qp_type in [QpType::Ud, QpType::Uc] {
        for (len, at_once, each_ns) in [(64, 128, 818), (1024, 46, 1100)] {
            let (mut solo, op) = sender(qp_type);
            post(&mut solo, op, 1000, len);
            assert_eq!(solo.packets().len(), at_once, "{qp_type:?} of {len} bytes");
            // The packets handed over are complete, although the rest waits.
            assert_eq!(solo.completed().len(), at_once);
            let (begin, mut sent) = (solo.now, at_once);
            while sent < 1000 {
                assert!(solo.packets().is_empty(), "a while means a while");
                solo.wait_for_timer().expect("something is due");
                let run = solo.packets().len();
                assert!(run >= 16 || sent + run == 1000, "{run} are hardly a run");
                sent += run;
            }
            let took = solo.now.since(begin);
            let expected = (1000 - at_once) as u64 * each_ns;
            assert!(took.abs_diff(expected) < expected / 10, "{took} ns, not {expected}");
            assert_eq!(solo.completed().len(), 1000 - at_once);
        }
    }
}

/// All of them go to one receiver.
#[test]
fn all_senders_of_one_peer_share_its_pace() {
    let (mut solo, op) = sender(QpType::Ud);
    let SendOp::SendTo { to, .. } = op else { panic!("not of datagrams") };
    let (local, remote) = (addr(1), addr(3));
    let other =
        PeerAddress { local, remote, path: 0, budget: Budget::STANDARD, kind: PeerKind::Standard };
    let ah = solo.end.engine.create_ah(crate::common::PD, &other).unwrap();
    post(&mut solo, op, 128, 64);
    assert_eq!(solo.packets().len(), 128);
    let again =
        solo.end.engine.create_ah(crate::common::PD, &PeerAddress { remote: addr(2), ..other });
    let same = SendOp::SendTo { to: Destination { ah: again.unwrap(), ..to }, imm: None };
    post(&mut solo, same, 1, 64);
    assert!(solo.packets().is_empty());
    solo.wait_for_timer().expect("its turn comes");
    assert_eq!(solo.packets().len(), 1);
    // Another peer has a queue of its own.
    post(&mut solo, SendOp::SendTo { to: Destination { ah, ..to }, imm: None }, 128, 64);
    assert_eq!(solo.packets().len(), 128);
}

#[test]
fn who_told_what_it_holds_gets_half_of_that() {
    let mut solo = Solo::new(&Setup { qp_type: QpType::Ud, depth: 1024, ..Setup::default() });
    let budget = Budget { bytes: 4 << 20, datagrams: 700 };
    let kind = PeerKind::announced(budget, None);
    let peer = PeerAddress { local: addr(1), remote: addr(2), path: 0, budget, kind };
    let ah = solo.end.engine.create_ah(crate::common::PD, &peer).unwrap();
    let to = Destination { ah, qpn: Qpn::new(9), qkey: QKEY };
    post(&mut solo, SendOp::SendTo { to, imm: None }, 1000, 64);
    assert_eq!(solo.packets().len(), 350);
}

#[test]
fn what_follows_upon_others_may_wait_for_company_for_a_while() {
    for qp_type in [QpType::Ud, QpType::Uc] {
        let (mut solo, op) = sender(qp_type);
        let qpn = solo.end.qpn;
        let urgency = |solo: &Solo| solo.end.engine.post_urgency(qpn);
        assert_eq!(urgency(&solo), Urgency::Now);
        post(&mut solo, op, 1, 64);
        assert_eq!(urgency(&solo), Urgency::Idle, "it is about to leave");
        solo.packets();
        assert_eq!(urgency(&solo), Urgency::Now, "one that may be answered");
        solo.wait(10 * US);
        post(&mut solo, op, 1, 64);
        solo.packets();
        assert_eq!(urgency(&solo), Urgency::By(solo.now.after(50 * US)));
        // A single post again.
        solo.wait(51 * US);
        post(&mut solo, op, 1, 64);
        solo.packets();
        assert_eq!(urgency(&solo), Urgency::Now);
    }
}

#[test]
fn a_queue_pair_that_broke_while_it_waited_sends_nothing() {
    let (mut solo, op) = sender(QpType::Uc);
    let qpn = solo.end.qpn;
    post(&mut solo, op, 200, 64);
    assert_eq!(solo.packets().len(), 128);
    solo.completed();
    solo.end.modify(qpn, &to(QpState::Err)).unwrap();
    assert_eq!(solo.completed().len(), 72);
    assert_ne!(solo.end.engine.post_urgency(qpn), Urgency::Idle);
    solo.wait(1_000_000);
    assert!(solo.packets().is_empty());
    assert!(solo.now > Time(0));
}
