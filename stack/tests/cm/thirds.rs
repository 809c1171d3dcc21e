//! Messages of a third party, in every state of the two sides; and messages of the peer itself at
//! the wrong time.

use rocinante_stack::cm::{CmEvent, ConnId};
use rocinante_stack::types::{Psn, Qpn};
use rocinante_stack::wire::cm::{
    CmMessage, CommId, Drep, Dreq, Lap, Mra, Rej, RejReason, Rep, Rtu, Subject,
};

use crate::net::{A, B, Net, address, disconnected};

/// The step that a connection has reached when another message interferes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    Asked,
    Accepted,
    Replied,
    Established,
    Ending,
    Ended,
}

pub(crate) const STEPS: [Step; 6] =
    [Step::Asked, Step::Accepted, Step::Replied, Step::Established, Step::Ending, Step::Ended];

/// Two managers; both ends of their connection have reached `step`. Nothing is in flight.
pub(crate) fn at(step: Step) -> (Net, ConnId, ConnId) {
    let mut net = Net::new();
    net.listen(4);
    let (a, b) = net.asked(0x11);
    if step == Step::Asked {
        return (net, a, b);
    }
    if step == Step::Accepted {
        // The reply is lost.
        net.mute[B] = true;
        net.accept(b, 0x22);
        net.collect();
        net.mute[B] = false;
        return (net, a, b);
    }
    net.replied(b, 0x22);
    if step == Step::Replied {
        return (net, a, b);
    }
    net.established(a, b);
    if step == Step::Established {
        return (net, a, b);
    }
    let now = net.now;
    net.mute[B] = step == Step::Ending;
    net.cm[A].disconnect(now, a, b"").unwrap();
    net.run(1);
    net.mute[B] = false;
    let _ = [A, B].map(|side| net.take(side));
    (net, a, b)
}

/// All messages that a sender with knowledge of both ids can send about a connection.
fn messages(local: CommId, remote: CommId) -> Vec<CmMessage<'static>> {
    let rep = Rep {
        local,
        remote,
        qkey: 0,
        qpn: Qpn::new(0x99),
        announced: None,
        psn: Psn::default(),
        responder_resources: 1,
        initiator_depth: 1,
        target_ack_delay: 0,
        failover: 0,
        flow_control: false,
        rnr_retry: 0,
        srq: false,
        ca_guid: 77,
        private: b"",
    };
    let rej = |subject, reason| {
        CmMessage::Rej(Rej { local, remote, subject, reason, info: b"", private: b"" })
    };
    let mra =
        |subject| CmMessage::Mra(Mra { local, remote, subject, service_timeout: 31, private: b"" });
    vec![
        CmMessage::Rep(rep),
        CmMessage::Rtu(Rtu { local, remote, private: b"" }),
        CmMessage::Dreq(Dreq { local, remote, remote_qpn: Qpn::new(0x22), private: b"" }),
        CmMessage::Dreq(Dreq { local, remote, remote_qpn: Qpn::new(0x11), private: b"" }),
        CmMessage::Drep(Drep { local, remote, private: b"" }),
        mra(Subject::Req),
        mra(Subject::Rep),
        rej(Subject::Req, RejReason::CONSUMER),
        rej(Subject::Rep, RejReason::CONSUMER),
        rej(Subject::Req, RejReason::TIMEOUT),
        rej(Subject::Req, RejReason::STALE_CONNECTION),
        CmMessage::Lap(Lap { local, remote, remote_qpn: Qpn::new(0x22) }),
    ]
}

/// A third party that knows the ids, and even the queue pair number, but sends from another
/// address.
#[test]
fn a_third_party_changes_nothing_in_any_state() {
    let third = "10.0.0.3".parse().unwrap();
    for step in STEPS {
        let (mut net, a, b) = at(step);
        let before = [A, B].map(|side| (net.cm[side].len(), net.cm[side].poll_timeout()));
        for (side, local, remote) in [(B, a.0, b.0), (A, b.0, a.0)] {
            for message in messages(local, remote) {
                net.cm[side].handle_mad(net.now, third, address(side), &message.emit(1));
                assert_eq!(net.cm[side].poll_event(), None, "{step:?} {message:?}");
                while let Some(answer) = net.cm[side].poll_transmit() {
                    assert_eq!(answer.remote, third, "{step:?} {message:?}");
                }
            }
        }
        let after = [A, B].map(|side| (net.cm[side].len(), net.cm[side].poll_timeout()));
        assert_eq!(before, after, "{step:?}");
        // The connection goes on undisturbed, and leaves nothing.
        finish(net, a, b, step);
    }
}

/// Both sides end the connection, from any state.
pub(crate) fn finish(mut net: Net, a: ConnId, b: ConnId, step: Step) {
    let now = net.now;
    net.cm[A].forget(now, a);
    net.run(1);
    net.cm[B].forget(net.now, b);
    net.run(400_000);
    let _ = [A, B].map(|side| net.take(side));
    for (side, cm) in net.cm.iter().enumerate() {
        assert_eq!((cm.len(), cm.poll_timeout()), (0, None), "side {side} after {step:?}");
    }
}

/// The peer sends every message at every step: each connection ends at most once, and nothing is
/// left after both sides have ended.
#[test]
fn a_peer_that_says_anything_at_any_time_ends_its_connection_at_most_once() {
    for step in STEPS {
        for side in [A, B] {
            let (count, _) = (messages(CommId(1), CommId(2)).len(), ());
            for first in 0..count {
                for second in 0..count {
                    let (mut net, a, b) = at(step);
                    let (local, remote) = if side == B { (a.0, b.0) } else { (b.0, a.0) };
                    let all = messages(local, remote);
                    let mut received = Vec::new();
                    for message in [&all[first], &all[second]] {
                        let (now, mad) = (net.now, message.emit(1));
                        net.cm[side].handle_mad(now, address(1 - side), address(side), &mad);
                        received.extend(net.take(side));
                        while net.cm[side].poll_transmit().is_some() {}
                    }
                    let ends = received.iter().filter(|event| {
                        matches!(
                            event,
                            CmEvent::Rejected { .. }
                                | CmEvent::Disconnected { .. }
                                | CmEvent::TimedOut { .. }
                        )
                    });
                    assert!(ends.count() <= 1, "{step:?} {received:?}");
                    finish(net, a, b, step);
                }
            }
        }
    }
}

/// Messages are replayed long after the end: the connection does not come back to life.
#[test]
fn what_is_replayed_after_the_end_leaves_nothing() {
    let mut net = Net::new();
    net.listen(4);
    let mut said = Vec::new();
    let a = net.connect(0x11);
    for _ in 0..8 {
        for side in [A, B] {
            while let Some(sent) = net.cm[side].poll_transmit() {
                said.push((side, sent.mad));
                net.cm[1 - side].handle_mad(net.now, address(side), address(1 - side), &sent.mad);
            }
            while let Some(event) = net.cm[side].poll_event() {
                let now = net.now;
                match event {
                    CmEvent::Request { conn, .. } => net.accept(conn, 0x22),
                    CmEvent::Replied { conn, .. } => net.cm[A].establish(conn, b"").unwrap(),
                    CmEvent::Established { .. } => net.cm[A].disconnect(now, a, b"").unwrap(),
                    _ => {}
                }
            }
        }
    }
    net.run(1000);
    let _ = [A, B].map(|side| net.take(side));
    assert_eq!(said.len(), 5, "REQ, REP, RTU, DREQ, DREP");
    net.assert_nothing_left();
    // First without the request, which looks like a new one, and then with it.
    for (side, mad) in &said[1..] {
        net.cm[1 - side].handle_mad(net.now, address(*side), address(1 - side), mad);
        net.run(100);
        assert_eq!([A, B].map(|side| net.take(side)), [vec![], vec![]]);
    }
    net.assert_nothing_left();
    let (side, mad) = &said[0];
    net.cm[1 - side].handle_mad(net.now, address(*side), address(1 - side), mad);
    let CmEvent::Request { conn, .. } = net.one(B) else { panic!("no request") };
    net.accept(conn, 0x33);
    net.run(100);
    // The other side does not know the connection, and says so.
    let received = net.take(B);
    assert!(matches!(received[0], CmEvent::Rejected { reason: RejReason::INVALID_COMM_ID, .. }));
    assert!(!received.contains(&disconnected(conn, rocinante_stack::cm::Ended::ByPeer)));
    net.run(1000);
    net.take(B);
    net.assert_nothing_left();
}

/// A message that is too short or too long, or has another class or version, counts as malformed
/// and has no other effect.
#[test]
fn anything_but_a_whole_message_is_malformed() {
    let mut net = Net::new();
    net.listen(4);
    net.connect(0x11);
    let mad = net.cm[A].poll_transmit().unwrap().mad;
    let now = net.now;
    for len in 0..mad.len() {
        net.cm[B].handle_mad(now, address(A), address(B), &mad[..len]);
    }
    let mut long = mad.to_vec();
    long.push(0);
    net.cm[B].handle_mad(now, address(A), address(B), &long);
    // Base version, class, class version, method.
    for at in 0..4 {
        let mut other = mad;
        other[at] ^= 0x40;
        net.cm[B].handle_mad(now, address(A), address(B), &other);
    }
    assert_eq!(net.cm[B].counters().malformed, mad.len() as u64 + 5);
    assert_eq!((net.take(B), net.cm[B].len(), net.cm[B].poll_transmit()), (vec![], 0, None));
}

/// An MRA counts only for the message that it names, and only once.
#[test]
fn patience_is_for_what_was_said() {
    for (step, side, right) in [(Step::Asked, A, Subject::Req), (Step::Accepted, B, Subject::Rep)] {
        for subject in [Subject::Req, Subject::Rep, Subject::Other] {
            let (mut net, a, b) = at(step);
            let (here, there) = if side == A { (a, b) } else { (b, a) };
            let (local, remote) = (there.0, here.0);
            let before = (net.cm[side].poll_timeout(), net.cm[side].counters().stray);
            let mra = Mra { local, remote, subject, service_timeout: 20, private: b"" };
            let (now, mad) = (net.now, CmMessage::Mra(mra).emit(1));
            let mut receive = || {
                net.cm[side].handle_mad(now, address(1 - side), address(side), &mad);
                (net.cm[side].poll_timeout(), net.cm[side].counters().stray)
            };
            let first = receive();
            assert_eq!(first.0 > before.0, subject == right, "{step:?} {subject:?}");
            assert_eq!(first.1 - before.1, u64::from(subject != right));
            assert_eq!(receive(), (first.0, first.1 + 1), "once");
        }
    }
}
