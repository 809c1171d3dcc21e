//! The counters and the footprint of a connection manager, and the messages behind them.

use rocinante_stack::cm::{CmEvent, CmFootprint};
use rocinante_stack::types::Qpn;
use rocinante_stack::wire::cm::{
    Apr, CmMessage, CommId, Drep, Dreq, Lap, PortSpace, Rej, RejReason, Rep, Rtu, ServiceId,
    SidrStatus, Subject,
};

use crate::net::{A, B, Net, address, ask};
use crate::scenarios::rejection;

const UDP: ServiceId = ServiceId::of_port(PortSpace::Udp, 7174);
const PLACE: (Qpn, u32) = (Qpn::new(0x55), 0x1234);

fn resolve(net: &mut Net) {
    let (now, way) = (net.now, (address(A), address(B)));
    net.cm[A].resolve(now, way, (UDP, 40_000), b"").unwrap();
    net.run(1);
}

#[test]
fn whatever_happens_twice_is_counted_twice() {
    let mut net = Net::new();
    net.listen(4);
    net.cm[B].listen_datagrams(UDP, None, 4).unwrap();
    for qpn in [0x11, 0x12] {
        net.connected(qpn, qpn + 0x10);
    }
    for qpn in [0x31, 0x32] {
        let (_, b) = net.asked(qpn);
        net.cm[B].reject(b, RejReason::CONSUMER, &[1; 148]).unwrap();
        net.run(1);
        assert_eq!(rejection(&net.take(A)[0]), RejReason::CONSUMER);
        net.take(B);
    }
    for answer in [Ok(PLACE), Err(SidrStatus::REJECT), Ok(PLACE)] {
        resolve(&mut net);
        let CmEvent::Asked { ask, .. } = net.take(B).remove(0) else { panic!("no question") };
        net.cm[B].answer(net.now, ask, answer, b"").unwrap();
        net.run(1);
    }
    let [a, b] = [A, B].map(|side| *net.cm[side].counters());
    assert_eq!((a.connects, a.requests, a.established, a.by_message), (4, 0, 2, 0));
    assert_eq!((b.connects, b.requests, b.established, b.by_message), (0, 4 + 3, 2, 0));
    assert_eq!((a.rejects_sent, a.rejects_received), (0, 2));
    assert_eq!((b.rejects_sent, b.rejects_received), (2, 0));
    assert_eq!((a.sidr_answered, b.sidr_answered), (0, 2), "the refused one does not count");
    // REQ, RTU; REQ; SIDR_REQ: and the other side's REP, REJ, SIDR_REP.
    assert_eq!((a.sent, a.received), (2 * 2 + 2 + 3, 2 + 2 + 3));
    assert_eq!((b.sent, b.received), (a.received, a.sent));
    for side in [a, b] {
        assert_eq!((side.malformed, side.stray, side.duplicates, side.repeated), (0, 0, 0, 0));
        assert_eq!((side.tx_overflow, side.backlog_overflow), (0, 0));
        assert_eq!((side.timeouts, side.stale), (0, 0));
    }
}

#[test]
fn a_footprint_is_what_is_there() {
    let mut net = Net::new();
    net.listen(4);
    net.cm[B].listen_datagrams(UDP, None, 4).unwrap();
    let listening = CmFootprint { listeners: 2, ..CmFootprint::default() };
    assert_eq!(net.cm[B].footprint(), listening);
    for qpn in [0x11, 0x12] {
        net.connect(qpn);
    }
    let asking = net.cm[A].footprint();
    assert_eq!((asking.connections, asking.timers, asking.datagrams), (2, 2, 2));
    net.run(1);
    assert_eq!(net.cm[A].footprint().datagrams, 0);
    let heard = net.take(B);
    for _ in 0..2 {
        resolve(&mut net);
    }
    assert_eq!((net.cm[A].footprint().queries, net.cm[A].footprint().timers), (2, 4));
    let questions = net.take(B);
    assert_eq!((heard.len(), questions.len()), (2, 2));
    let expected = CmFootprint {
        connections: 2,
        by_request: 2,
        by_qpn: 2,
        pending: 4,
        asks: 2,
        by_ask: 2,
        timers: 4,
        ..listening
    };
    assert_eq!(net.cm[B].footprint(), expected);
    let CmEvent::Asked { ask, .. } = questions[0] else { panic!("no question") };
    net.cm[B].answer(net.now, ask, Ok(PLACE), b"").unwrap();
    let answered = CmFootprint { pending: 3, datagrams: 1, ..expected };
    assert_eq!(net.cm[B].footprint(), answered, "the answer is kept");
}

/// The rejection that a side sends next, if it sends one.
fn next_rejection(net: &mut Net, side: usize, look: impl Fn(&Rej<'_>)) -> bool {
    while let Some(sent) = net.cm[side].poll_transmit() {
        if let CmMessage::Rej(rej) = CmMessage::parse(&sent.mad).unwrap().1 {
            look(&rej);
            return true;
        }
    }
    false
}

/// The peer cannot know the number of a side that gave up before it was answered.
#[test]
fn only_a_rejection_for_time_names_the_adapter() {
    let (mut net, _, b) = Net::asking();
    net.cm[B].reject(b, RejReason::CONSUMER, b"no").unwrap();
    let by_consumer = |rej: &Rej<'_>| {
        assert_eq!((rej.reason, rej.info), (RejReason::CONSUMER, &b""[..]));
    };
    assert!(next_rejection(&mut net, B, by_consumer));
    let (mut net, mut now) = (Net::new(), Net::new().now);
    net.cm[A].connect(now, &ask(0x12, b"")).unwrap();
    let by_time = |rej: &Rej<'_>| {
        assert_eq!((rej.reason, rej.info), (RejReason::TIMEOUT, &100u64.to_be_bytes()[..]));
        assert_eq!(rej.subject, Subject::Req);
    };
    while !next_rejection(&mut net, A, by_time) {
        now = net.cm[A].poll_timeout().expect("it waits for an answer");
        net.cm[A].handle_timeout(now);
    }
}

/// Answers are kept for a minute, and no more than 1,024 of them.
#[test]
fn an_old_answer_that_goes_takes_no_other_with_it() {
    const KEPT: usize = 1024;
    let mut net = Net::new();
    net.cm[B].listen_datagrams(UDP, None, 4).unwrap();
    let answer = |net: &mut Net, count: usize| {
        for _ in 0..count {
            resolve(net);
            let CmEvent::Asked { ask, .. } = net.one(B) else { panic!("no question") };
            net.cm[B].answer(net.now, ask, Ok(PLACE), b"").unwrap();
        }
    };
    answer(&mut net, 1);
    net.run(59_000);
    answer(&mut net, 10);
    net.run(2_000);
    assert_eq!(net.cm[B].footprint().asks, 10);
    answer(&mut net, KEPT);
    assert_eq!(net.cm[B].footprint().asks, KEPT);
}

/// Every message arrives twice.
#[test]
fn whatever_arrives_again_is_counted_and_changes_nothing() {
    let mut net = Net::new();
    net.doubles = true;
    net.listen(4);
    for round in 1..=2 {
        let (a, _) = net.connected(0x10 + round, 0x20 + round);
        net.leave(A, a);
        let [asking, listening] = [A, B].map(|side| *net.cm[side].counters());
        // The second REP, and three of four DREPs, as each of two DREQs is answered.
        assert_eq!((asking.duplicates, asking.stray), (4 * u64::from(round), 0));
        // The second REQ, RTU and DREQ.
        assert_eq!((listening.duplicates, listening.stray), (3 * u64::from(round), 0));
        assert_eq!((asking.established, listening.established), (round.into(), round.into()));
        net.take(A);
        net.take(B);
    }
}

/// Delivers a message to a side, and returns how it counted it: as a duplicate, as a stray one.
fn counted(net: &mut Net, side: usize, message: CmMessage<'_>) -> (u64, u64) {
    let before = *net.cm[side].counters();
    net.cm[side].handle_mad(net.now, address(1 - side), address(side), &message.emit(1));
    let after = net.cm[side].counters();
    (after.duplicates - before.duplicates, after.stray - before.stray)
}

#[test]
fn messages_of_another_connection_or_role_are_strays() {
    const AGAIN: (u64, u64) = (1, 0);
    const STRAY: (u64, u64) = (0, 1);
    let mut net = Net::new();
    net.listen(4);
    let (a, b) = net.connected(0x11, 0x21);
    let other = CommId(b.0.0 ^ 1);
    let rtu = |local, remote| CmMessage::Rtu(Rtu { local, remote, private: &[] });
    let drep = |local, remote| CmMessage::Drep(Drep { local, remote, private: &[] });
    let remote_qpn = Qpn::new(0x22);
    let dreq = |local, remote| CmMessage::Dreq(Dreq { local, remote, remote_qpn, private: &[] });
    for _ in 0..2 {
        assert_eq!(counted(&mut net, B, rtu(a.0, b.0)), AGAIN);
        assert_eq!(counted(&mut net, B, rtu(other, b.0)), STRAY);
        assert_eq!(counted(&mut net, A, rtu(b.0, a.0)), STRAY, "it has sent the RTU");
        assert_eq!(counted(&mut net, A, drep(b.0, a.0)), STRAY, "it has not asked");
        assert_eq!(counted(&mut net, B, dreq(a.0, b.0)), STRAY, "it names another queue pair");
    }
    for (local, status) in [(b.0, Apr::UNSUPPORTED), (other, Apr::INVALID_COMM_ID)] {
        counted(
            &mut net,
            A,
            CmMessage::Lap(Lap { local, remote: a.0, remote_qpn: Qpn::new(0x11) }),
        );
        let sent = net.cm[A].poll_transmit().expect("an answer").mad;
        let (_, CmMessage::Apr(apr)) = CmMessage::parse(&sent).unwrap() else { panic!("no APR") };
        assert_eq!(apr.status, status);
    }
    net.leave(A, a);
    for _ in 0..2 {
        assert_eq!(counted(&mut net, A, drep(b.0, a.0)), AGAIN);
        assert_eq!(counted(&mut net, A, drep(other, a.0)), STRAY);
    }
}

/// The REP may have been lost.
#[test]
fn a_request_that_comes_again_gets_the_reply_again() {
    let mut net = Net::new();
    net.listen(1);
    net.connect(0x11);
    let request = net.cm[A].poll_transmit().unwrap().mad;
    let now = net.now;
    net.cm[B].handle_mad(now, address(A), address(B), &request);
    let CmEvent::Request { conn, .. } = net.one(B) else { panic!("no request") };
    net.accept(conn, 0x21);
    let reply = net.cm[B].poll_transmit().expect("a reply");
    for _ in 0..2 {
        net.cm[B].handle_mad(now, address(A), address(B), &request);
        assert_eq!(net.cm[B].poll_transmit(), Some(reply));
    }
    let (_, CmMessage::Rep(rep)) = CmMessage::parse(&reply.mad).unwrap() else { panic!("no REP") };
    assert_eq!(counted(&mut net, A, CmMessage::Rep(rep)), (0, 0));
    let CmEvent::Replied { conn, .. } = net.one(A) else { panic!("no reply") };
    assert_eq!(counted(&mut net, A, CmMessage::Rep(rep)), (1, 0));
    net.cm[A].establish(conn, b"").unwrap();
    let ready = net.cm[A].poll_transmit().expect("an RTU");
    let other = CommId(rep.local.0 ^ 1);
    for _ in 0..2 {
        assert_eq!(counted(&mut net, A, CmMessage::Rep(rep)), (1, 0));
        assert_eq!(net.cm[A].poll_transmit(), Some(ready), "the RTU may have been lost");
        assert_eq!(counted(&mut net, A, CmMessage::Rep(Rep { local: other, ..rep })), (0, 1));
        assert_eq!(net.cm[A].poll_transmit(), None);
        assert_eq!(counted(&mut net, A, CmMessage::Rep(Rep { remote: other, ..rep })), (0, 1));
        let refused = |rej: &Rej<'_>| assert_eq!(rej.reason, RejReason::INVALID_COMM_ID);
        assert!(next_rejection(&mut net, A, refused));
    }
}

#[test]
fn questions_that_nobody_answers_are_counted_each_time() {
    let mut net = Net::new();
    net.mute[A] = true;
    for round in 1..=2 {
        resolve(&mut net);
        net.run(600_000);
        let counters = net.cm[A].counters();
        assert_eq!(counters.timeouts, round);
        assert_eq!(counters.repeated % round, 0);
        assert_eq!(counters.sent, counters.repeated + round);
        assert!(matches!(net.one(A), CmEvent::Unresolved { status: None, .. }));
    }
}
