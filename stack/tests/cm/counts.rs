//! What a connection manager counts and holds, and what its messages say of it.

use rocinante_stack::cm::{CmEvent, CmFootprint};
use rocinante_stack::types::Qpn;
use rocinante_stack::wire::cm::{Message, PortSpace, Rej, RejReason, ServiceId, SidrStatus};

use crate::net::{A, B, Net, address, ask};
use crate::scenarios::rejection;

const UDP: ServiceId = ServiceId::of_port(PortSpace::Udp, 7174);
const SERVED: ServiceId = ServiceId::of_port(PortSpace::Udp, 7175);
const PLACE: (Qpn, u32) = (Qpn::new(0x55), 0x1234);

fn resolve(net: &mut Net, service: ServiceId) {
    let (now, way) = (net.now, (address(A), address(B)));
    net.cm[A].resolve(now, way, (service, 40_000), b"").unwrap();
    net.run(1);
}

#[test]
fn whatever_happens_twice_is_counted_twice() {
    let mut net = Net::new();
    net.listen(4);
    net.cm[B].listen_datagrams(UDP, None, 4).unwrap();
    net.cm[B].serve(SERVED, None, PLACE, b"").unwrap();
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
        resolve(&mut net, UDP);
        let CmEvent::Asked { ask, .. } = net.take(B).remove(0) else { panic!("no question") };
        let now = net.now;
        net.cm[B].answer(now, ask, answer, b"").unwrap();
        net.run(1);
    }
    for _ in 0..2 {
        resolve(&mut net, SERVED);
    }
    let [a, b] = [A, B].map(|side| *net.cm[side].counters());
    assert_eq!((a.connects, a.requests, a.established, a.by_message), (4, 0, 2, 0));
    assert_eq!((b.connects, b.requests, b.established, b.by_message), (0, 4 + 3, 2, 0));
    assert_eq!((a.rejects_sent, a.rejects_received), (0, 2));
    assert_eq!((b.rejects_sent, b.rejects_received), (2, 0));
    assert_eq!((a.sidr_answered, b.sidr_answered), (0, 4), "the refused one does not count");
    // REQ, RTU; REQ; SIDR_REQ: and the other side's REP, REJ, SIDR_REP.
    assert_eq!((a.sent, a.received), (2 * 2 + 2 + 5, 2 + 2 + 5));
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
    net.cm[B].serve(SERVED, None, PLACE, b"").unwrap();
    let listening = CmFootprint { listeners: 3, ..CmFootprint::default() };
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
        resolve(&mut net, UDP);
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
    let now = net.now;
    net.cm[B].answer(now, ask, Ok(PLACE), b"").unwrap();
    let answered = CmFootprint { pending: 3, datagrams: 1, ..expected };
    assert_eq!(net.cm[B].footprint(), answered, "the answer is kept");
}

/// The rejection that a side sends next, if it sends one.
fn next_rejection(net: &mut Net, side: usize, look: impl Fn(&Rej<'_>)) -> bool {
    while let Some(sent) = net.cm[side].poll_transmit() {
        if let Message::Rej(rej) = Message::parse(&sent.mad).unwrap().1 {
            look(&rej);
            return true;
        }
    }
    false
}

/// The peer cannot know the number of a side that gave up before it was answered.
#[test]
fn only_a_rejection_for_time_names_the_adapter() {
    let mut net = Net::new();
    net.listen(1);
    let (_, b) = net.asked(0x11);
    net.cm[B].reject(b, RejReason::CONSUMER, b"no").unwrap();
    let by_consumer = |rej: &Rej<'_>| {
        assert_eq!((rej.reason, rej.info), (RejReason::CONSUMER, &b""[..]));
    };
    assert!(next_rejection(&mut net, B, by_consumer));
    let (mut net, mut now) = (Net::new(), Net::new().now);
    net.cm[A].connect(now, &ask(0x12, b"")).unwrap();
    let by_time = |rej: &Rej<'_>| {
        assert_eq!((rej.reason, rej.info), (RejReason::TIMEOUT, &100u64.to_be_bytes()[..]));
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
            resolve(net, UDP);
            let CmEvent::Asked { ask, .. } = net.one(B) else { panic!("no question") };
            let now = net.now;
            net.cm[B].answer(now, ask, Ok(PLACE), b"").unwrap();
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
