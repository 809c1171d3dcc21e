//! Scenarios of a connection, by name.

use rocinante_stack::cm::{
    Accept, CmConfig, CmError, CmEvent, Connect, ConnectionManager, Ended, SidrQueryId,
};
use rocinante_stack::types::{Mtu, Psn, Qpn, QueueKind};
use rocinante_stack::wire::cm::{
    Announced, CmMessage, CommId, Lap, PortSpace, RejReason, ServiceId, SidrStatus,
};

use crate::net::{
    A, B, MS, Net, SERVICE, address, ask, config, disconnected, released, side, unresolved,
};

/// Milliseconds after which even a peer that never answers has been given up.
pub(crate) const FOR_EVER: u64 = 200_000;

#[track_caller]
pub(crate) fn rejection(event: &CmEvent) -> RejReason {
    let CmEvent::Rejected { reason, .. } = event else { panic!("{event:?}") };
    *reason
}

#[test]
fn connect_and_disconnect() {
    let mut net = Net::new();
    let listener = net.listen(1);
    let a = net.connect(0x11);
    net.run(1);
    let CmEvent::Request { listener: of, conn: b, request } = net.one(B) else { panic!() };
    assert_eq!(of, listener);
    assert_eq!((request.side.qpn, request.side.psn), (Qpn::new(0x11), Psn::new(0x77)));
    assert_eq!((request.side.responder_resources, request.side.initiator_depth), (4, 5));
    assert_eq!((request.local, request.peer), (address(B), "10.0.0.1:40000".parse().unwrap()));
    assert_eq!((request.mtu, request.ack_timeout, request.retry_count), (Mtu::Mtu1024, 14, 7));
    assert_eq!((&request.private[..6], request.private.len()), (&b"hello\0"[..], 56));
    net.accept(b, 0x22);
    net.run(1);
    let CmEvent::Replied { conn, reply } = net.one(A) else { panic!() };
    assert_eq!((conn, reply.side), (a, side(0x22)));
    assert_eq!((&reply.private[..8], reply.private.len()), (&b"welcome\0"[..], 196));
    net.established(a, b);
    assert_eq!(net.sent(), [(A, "REQ"), (B, "REP"), (A, "RTU")]);
    // Nothing more happens while the connection lives.
    net.run(FOR_EVER);
    assert_eq!((net.take(A), net.take(B), net.sent()), (vec![], vec![], vec![]));
    let now = net.now;
    net.cm[A].disconnect(now, a, b"").unwrap();
    net.run(1);
    assert_eq!(net.one(A), disconnected(a, Ended::ByUs));
    assert_eq!(net.one(B), disconnected(b, Ended::ByPeer));
    assert_eq!(net.sent(), [(A, "DREQ"), (B, "DREP")]);
    assert_eq!(net.cm[A].disconnect(now, a, b""), Err(CmError::Unknown));
    // The numbers of the queue pairs may be used again twice 67 ms after that, and not before.
    net.run(130);
    assert_eq!((net.take(A), net.take(B)), (vec![], vec![]));
    net.run(10);
    assert_eq!((net.one(A), net.one(B)), (released(a, 0x11), released(b, 0x22)));
    net.assert_nothing_left();
}

#[test]
fn nobody_listens() {
    let mut net = Net::new();
    let a = net.connect(0x11);
    net.run(1);
    let received = net.take(A);
    assert_eq!(rejection(&received[0]), RejReason::INVALID_SERVICE_ID);
    assert_eq!(received[1..], [released(a, 0x11)]);
    assert_eq!((net.take(B), net.sent()), (vec![], vec![(A, "REQ"), (B, "REJ")]));
    net.assert_nothing_left();
}

#[test]
fn a_request_waits_for_its_listener() {
    let delay = 100 * MS;
    let mut net = Net::with(|side| CmConfig { refusal_delay: delay, ..config(side) }, 1);
    let (a, other) = (net.connect(0x11), net.connect(0x12));
    net.run(50);
    assert_eq!((net.take(A), net.take(B), net.cm[B].footprint().early), (vec![], vec![], 2));
    // A listener for another service changes nothing.
    net.cm[B].listen(ServiceId::of_port(PortSpace::Tcp, 1), None, 4).unwrap();
    net.run(10);
    assert_eq!((net.take(B), net.cm[B].footprint().early), (vec![], 2));
    let listener = net.listen(4);
    net.run(1);
    let asked = |event: &CmEvent| match event {
        CmEvent::Request { listener: of, request, .. } if *of == listener => request.side.qpn,
        other => panic!("{other:?}"),
    };
    let mut heard: Vec<_> = net.take(B).iter().map(asked).collect();
    heard.sort_unstable();
    assert_eq!(heard, [Qpn::new(0x11), Qpn::new(0x12)]);
    assert_eq!((net.take(A), net.cm[B].footprint().early), (vec![], 0));
    for conn in [a, other] {
        net.cm[A].forget(net.now, conn);
    }
    net.run(1);
    assert_eq!(net.cm[B].len(), 0);
}

/// A question waits as a request does, and neither listens in the other's place.
#[test]
fn a_question_waits_for_its_listener() {
    let delay = 100 * MS;
    let mut net = Net::with(|side| CmConfig { refusal_delay: delay, ..config(side) }, 1);
    let service = ServiceId::of_port(PortSpace::Udp, 7);
    let ask = |net: &mut Net| {
        let way = (address(A), address(B));
        net.cm[A].resolve(net.now, way, (service, 9), b"").unwrap()
    };
    for accepted in [false, true] {
        let (query, second) = (ask(&mut net), ask(&mut net));
        net.run(50);
        let other = net.cm[B].listen(ServiceId::of_port(PortSpace::Tcp, 7), None, 4).unwrap();
        net.run(10);
        assert_eq!((net.take(A), net.take(B), net.cm[B].footprint().early), (vec![], vec![], 2));
        net.cm[B].unlisten(other, |_| false);
        let listener = net.cm[B].listen_datagrams(service, None, 4).unwrap();
        net.run(1);
        if accepted {
            net.answer((Qpn::new(0x22), 5), b"");
            net.run(1);
            let resolved = |event: &CmEvent| matches!(event, CmEvent::Resolved { qkey: 5, .. });
            assert!(net.take(A).iter().filter(|event| resolved(event)).count() == 2);
        } else {
            let events = net.take(B);
            let asked = |event: &CmEvent| match event {
                CmEvent::Asked { listener: of, ask, .. } if *of == listener => *ask,
                other => panic!("{other:?}"),
            };
            for id in events.iter().map(asked) {
                net.cm[B].answer(net.now, id, Err(SidrStatus::REJECT), b"").unwrap();
            }
            net.run(1);
            let status = Some(SidrStatus::REJECT);
            let mut told = net.take(A);
            let expected = [query, second].map(|query| unresolved(query, status, b""));
            told.sort_by_key(|event| *event != expected[0]);
            assert_eq!(told, expected);
        }
        net.cm[B].unlisten_datagrams(net.now, listener, |_| false);
        assert_eq!(net.cm[B].footprint().early, 0);
    }
    // Without one it is refused, late and once.
    let query = ask(&mut net);
    net.run(99);
    assert_eq!(net.take(A), []);
    net.run(2);
    let status = Some(SidrStatus::UNSUPPORTED);
    assert_eq!(net.one(A), unresolved(query, status, b""));
}

#[test]
fn a_request_without_a_listener_is_refused_late_and_once() {
    let mut net = Net::with(|side| CmConfig { refusal_delay: 500 * MS, ..config(side) }, 1);
    net.connect(0x11);
    // The peer repeats it meanwhile.
    net.run(499);
    assert_eq!((net.take(A), net.sent()), (vec![], vec![(A, "REQ"), (A, "REQ")]));
    net.run(2);
    assert_eq!(rejection(&net.take(A)[0]), RejReason::INVALID_SERVICE_ID);
    assert_eq!(net.sent(), [(B, "REJ")]);
    net.assert_nothing_left();
}

/// Another process on the address has the listener by then: it gets the repetitions.
#[test]
fn a_request_is_left_to_the_process_that_listens_meanwhile() {
    let mut net = Net::with(|side| CmConfig { refusal_delay: 500 * MS, ..config(side) }, 1);
    net.connect(0x11);
    net.run(100);
    let elsewhere = |service: ServiceId, _| service == ServiceId::of_port(PortSpace::Tcp, 1);
    let cm = &mut net.cm[B];
    cm.leave_to_others(net.now.after(500 * MS), elsewhere);
    cm.leave_to_others(net.now, |_, _| true);
    assert_eq!(cm.footprint().early, 1, "it is not due, or is another's");
    net.now = net.now.after(500 * MS);
    net.cm[B].leave_to_others(net.now, |_, address| address == crate::net::address(B));
    assert_eq!((net.cm[B].footprint().early, net.cm[B].poll_timeout()), (0, None));
    net.sent();
}

#[test]
fn few_requests_wait_for_a_listener() {
    let mut net = Net::with(|side| CmConfig { refusal_delay: 100 * MS, ..config(side) }, 1);
    for qpn in 0..100 {
        net.connect(0x11 + qpn);
    }
    net.run(1);
    assert_eq!(net.cm[B].footprint().early, 64);
    assert_eq!(net.take(A).iter().filter(|it| matches!(it, CmEvent::Rejected { .. })).count(), 36);
    net.run(200);
    net.take(A);
    net.assert_nothing_left();
}

#[test]
fn a_listener_on_another_address_does_not_hear() {
    let mut net = Net::new();
    net.cm[B].listen(SERVICE, Some("10.9.9.9".parse().unwrap()), 1).unwrap();
    net.connect(0x11);
    net.run(1);
    assert_eq!(rejection(&net.take(A)[0]), RejReason::INVALID_SERVICE_ID);
    // On its own address it does, and it takes precedence over a listener on all addresses.
    net.listen(1);
    let own = net.cm[B].listen(SERVICE, Some(address(B)), 1).unwrap();
    assert_eq!(net.cm[B].listen(SERVICE, Some(address(B)), 1), Err(CmError::InUse));
    net.connect(0x11);
    net.run(1);
    assert!(matches!(net.one(B), CmEvent::Request { listener, .. } if listener == own));
}

#[test]
fn the_program_rejects() {
    let (mut net, a, b) = Net::asking();
    net.cm[B].reject(b, RejReason::CONSUMER, b"not today").unwrap();
    net.run(1);
    let received = net.take(A);
    let CmEvent::Rejected { conn, reason, private } = &received[0] else { panic!("{received:?}") };
    assert_eq!((*conn, *reason, &private[..10]), (a, RejReason::CONSUMER, &b"not today\0"[..]));
    assert_eq!(net.one(B), released(b, 0));
    net.assert_nothing_left();
    // Its place in the backlog is free again.
    net.asked(0x11);
}

#[test]
fn the_asking_program_rejects_the_reply() {
    let (mut net, a, b) = Net::asking();
    net.replied(b, 0x22);
    net.cm[A].reject(a, RejReason::CONSUMER, b"").unwrap();
    net.run(1);
    assert_eq!(rejection(&net.one(B)), RejReason::CONSUMER);
    net.run(200);
    assert_eq!((net.one(A), net.one(B)), (released(a, 0x11), released(b, 0x22)));
    net.assert_nothing_left();
}

#[test]
fn a_peer_that_is_silent_is_given_up() {
    let mut net = Net::new();
    net.mute[B] = true;
    let a = net.connect(0x11);
    net.run(6_000);
    assert_eq!(net.take(A), vec![]);
    net.run(1_000);
    assert_eq!(net.take(A), vec![CmEvent::TimedOut { conn: a }, released(a, 0x11)]);
    assert_eq!(net.sent().iter().filter(|sent| **sent == (A, "REQ")).count(), 16);
    net.assert_nothing_left();
}

#[test]
fn a_lost_req_is_sent_again() {
    let mut net = Net::new();
    net.listen(1);
    net.mute[A] = true;
    net.connect(0x11);
    net.run(1);
    net.mute[A] = false;
    net.run(500);
    assert!(matches!(net.one(B), CmEvent::Request { .. }));
}

#[test]
fn a_lost_rep_is_sent_again() {
    let (mut net, _, b) = Net::asking();
    net.mute[B] = true;
    net.accept(b, 0x22);
    net.run(1);
    net.mute[B] = false;
    net.run(500);
    assert!(matches!(net.one(A), CmEvent::Replied { .. }));
    assert_eq!(net.take(B), vec![]);
}

#[test]
fn a_lost_rtu_is_sent_again_when_the_rep_comes_again() {
    let (mut net, a, b) = Net::asking();
    net.replied(b, 0x22);
    net.mute[A] = true;
    net.cm[A].establish(a, b"").unwrap();
    net.run(1);
    net.mute[A] = false;
    net.run(500);
    assert_eq!((net.take(A), net.one(B)), (vec![], CmEvent::Established { conn: b }));
}

#[test]
fn a_lost_dreq_and_a_lost_drep_are_made_up_for() {
    for silent in [A, B] {
        let (mut net, a, b) = Net::joined();
        net.mute[silent] = true;
        net.leave(A, a);
        net.mute[silent] = false;
        net.run(500);
        assert_eq!(net.take(A)[0], disconnected(a, Ended::ByUs));
        assert_eq!(net.take(B)[0], disconnected(b, Ended::ByPeer));
        net.run(500);
        net.assert_nothing_left();
    }
}

#[test]
fn both_disconnect_at_once() {
    let (mut net, a, b) = Net::joined();
    let now = net.now;
    net.cm[A].disconnect(now, a, b"").unwrap();
    net.cm[B].disconnect(now, b, b"").unwrap();
    net.run(500);
    for (side, conn, qpn) in [(A, a, 0x11), (B, b, 0x22)] {
        assert_eq!(net.take(side), [disconnected(conn, Ended::ByPeer), released(conn, qpn)]);
    }
    net.assert_nothing_left();
}

#[test]
fn a_disconnect_before_the_rtu_ends_both_sides() {
    let (mut net, a, b) = Net::asking();
    net.replied(b, 0x22);
    net.leave(B, b);
    assert_eq!(net.one(A), disconnected(a, Ended::ByPeer));
    assert_eq!(net.cm[A].establish(a, b""), Err(CmError::Unknown));
    net.run(500);
    net.assert_nothing_left();
}

#[test]
fn a_program_that_takes_its_time_is_waited_for() {
    let (mut net, a, b) = Net::asking();
    // A minute, with one message to the peer and none back.
    net.run(60_000);
    assert_eq!(net.sent(), [(A, "REQ"), (B, "MRA")]);
    net.replied(b, 0x22);
    // The asking program may take its time too; its peer repeats the reply now and then.
    net.sent();
    net.run(30_000);
    let sent = net.sent();
    assert!((6..10).contains(&sent.iter().filter(|sent| **sent == (A, "MRA")).count()), "{sent:?}");
    net.established(a, b);
}

#[test]
fn a_listener_that_never_accepts_is_given_up_by_both_sides() {
    let (mut net, a, b) = Net::asking();
    net.run(FOR_EVER);
    let received = net.take(A);
    assert_eq!(rejection(&received[0]), RejReason::TIMEOUT);
    assert_eq!(received[1..], [released(a, 0x11)]);
    assert_eq!(net.take(B), [CmEvent::TimedOut { conn: b }, released(b, 0)]);
    net.assert_nothing_left();
}

#[test]
fn an_asking_program_that_never_establishes_is_given_up_by_both_sides() {
    let (mut net, a, b) = Net::asking();
    net.accept(b, 0x22);
    net.run(FOR_EVER);
    let received = net.take(A);
    assert!(matches!(received[0], CmEvent::Replied { .. }));
    assert_eq!(received[1..], [CmEvent::TimedOut { conn: a }, released(a, 0x11)]);
    assert_eq!(rejection(&net.take(B)[0]), RejReason::TIMEOUT);
    net.assert_nothing_left();
}

#[test]
fn the_asker_changes_its_mind() {
    let (mut net, a, b) = Net::asking();
    net.cm[A].forget(net.now, a);
    net.run(1);
    assert_eq!(net.one(A), released(a, 0x11));
    let received = net.take(B);
    assert_eq!(
        (rejection(&received[0]), &received[1..]),
        (RejReason::TIMEOUT, &[released(b, 0)][..])
    );
    net.assert_nothing_left();
}

#[test]
fn a_forgotten_connection_is_disconnected_without_an_event() {
    let (mut net, a, b) = Net::joined();
    net.cm[B].forget(net.now, b);
    net.run(500);
    assert_eq!(net.take(A), [disconnected(a, Ended::ByPeer), released(a, 0x11)]);
    assert_eq!(net.one(B), released(b, 0x22));
    net.assert_nothing_left();
}

#[test]
fn a_listener_that_goes_rejects_who_waits() {
    let mut net = Net::new();
    let listener = net.listen(1);
    net.asked(0x11);
    net.cm[B].unlisten(listener, |_| false);
    net.run(1);
    assert_eq!(rejection(&net.take(A)[0]), RejReason::INVALID_SERVICE_ID);
    net.take(B);
    net.assert_nothing_left();
    assert!(net.cm[B].is_empty());
}

#[test]
fn a_listener_that_goes_leaves_those_of_others_and_whom_the_program_knows() {
    let mut net = Net::new();
    let stays = net.cm[B].listen(SERVICE, Some(address(B)), 1).unwrap();
    net.asked(0x11);
    let goes = net.listen(2);
    net.cm[B].unlisten(goes, |_| false);
    assert_eq!((net.cm[B].len(), net.sent().len()), (1, 1), "it was another's");
    net.cm[B].unlisten(stays, |_| true);
    assert_eq!((net.cm[B].len(), net.sent().len()), (1, 0), "the program will decide");
    // No other request is accepted.
    net.connect(0x12);
    net.run(1);
    assert_eq!(rejection(&net.take(A)[0]), RejReason::INVALID_SERVICE_ID);
}

#[test]
fn a_full_backlog_refuses_and_holds_nothing() {
    let mut net = Net::new();
    net.listen(3);
    for qpn in 0x100..0x200 {
        net.connect(qpn);
    }
    net.run(1);
    assert_eq!((net.take(B).len(), net.cm[B].len()), (3, 3));
    assert_eq!(net.cm[B].counters().backlog_overflow, 253);
    let refused = net.take(A);
    let refused = refused.iter().filter(|event| matches!(event, CmEvent::Rejected { .. }));
    assert!(refused.clone().all(|event| rejection(event) == RejReason::NO_RESOURCES));
    assert_eq!(refused.count(), 253);
}

#[test]
fn the_number_of_connections_is_bounded() {
    let config =
        |side| rocinante_stack::cm::CmConfig { max_connections: 2, ..crate::net::config(side) };
    let mut net = Net::with(config, 1);
    net.listen(10);
    net.connected(0x11, 0x22);
    net.connected(0x12, 0x23);
    assert_eq!(net.cm[A].connect(net.now, &ask(0x13, b"")), Err(CmError::Full));
}

#[test]
fn budgets_are_told_to_those_who_tell_theirs() {
    let queue = Some(QueueKind::Memory);
    let announced = Some(Announced { bytes: 147_456, datagrams: 384, queue, answers: false });
    for told in [announced, None] {
        let mut net = Net::new();
        net.listen(1);
        let ask = Connect {
            side: rocinante_stack::cm::QpSide { announced: told, ..side(1 << 8) },
            ..ask(2, b"")
        };
        let now = net.now;
        net.cm[A].connect(now, &ask).unwrap();
        net.run(1);
        let CmEvent::Request { conn, request, .. } = net.one(B) else { panic!() };
        assert_eq!(request.side.announced, told);
        let side = rocinante_stack::cm::QpSide { announced, ..side(0x22) };
        net.cm[B].accept(net.now, conn, &Accept { side, keep_alive: None, private: b"" }).unwrap();
        net.run(1);
        let CmEvent::Replied { reply, .. } = net.one(A) else { panic!() };
        assert_eq!(reply.side.announced, told.and(announced));
    }
}

#[test]
fn one_manager_connects_to_itself() {
    let mut net = Net::new();
    let cm = &mut net.cm[A];
    cm.listen(SERVICE, None, 1).unwrap();
    let now = net.now;
    let a = cm.connect(now, &Connect { remote: address(A), ..ask(0x11, b"") }).unwrap();
    let deliver = |cm: &mut ConnectionManager| {
        while let Some(sent) = cm.poll_transmit() {
            cm.handle_mad(now, sent.local, sent.remote, &sent.mad);
        }
        std::iter::from_fn(|| cm.poll_event()).collect::<Vec<_>>()
    };
    let received = deliver(cm);
    let CmEvent::Request { conn: b, .. } = received[0] else { panic!("{received:?}") };
    cm.accept(now, b, &Accept { side: side(0x22), keep_alive: None, private: b"" }).unwrap();
    assert!(matches!(deliver(cm)[..], [CmEvent::Replied { .. }]));
    cm.establish(a, b"").unwrap();
    assert_eq!(deliver(cm), [CmEvent::Established { conn: b }]);
    cm.disconnect(now, b, b"").unwrap();
    assert_eq!(deliver(cm), [disconnected(a, Ended::ByPeer), disconnected(b, Ended::ByUs)]);
}

#[test]
fn another_path_is_refused_politely() {
    let mut net = Net::new();
    let lap = Lap { local: CommId(5), remote: CommId(6), remote_qpn: Qpn::new(7) };
    net.cm[B].handle_mad(net.now, address(A), address(B), &CmMessage::Lap(lap).emit(9));
    let answer = net.cm[B].poll_transmit().unwrap();
    let Ok((header, CmMessage::Apr(apr))) = CmMessage::parse(&answer.mad) else { panic!() };
    assert_eq!((header.tid, apr.local, apr.remote, apr.status), (9, CommId(6), CommId(5), 1));
}

const UDP: ServiceId = ServiceId::of_port(PortSpace::Udp, 7174);

fn resolve(net: &mut Net) -> SidrQueryId {
    let (now, way) = (net.now, (address(A), address(B)));
    net.cm[A].resolve(now, way, (UDP, 40_000), b"who").unwrap()
}

#[test]
fn a_datagram_service_is_resolved() {
    let mut net = Net::new();
    let listener = net.cm[B].listen_datagrams(UDP, None, 1).unwrap();
    let query = resolve(&mut net);
    net.run(1);
    net.answer((Qpn::new(0x55), 0x1234), b"here");
    net.run(1);
    let CmEvent::Resolved { query: of, qpn, qkey, private } = net.one(A) else { panic!() };
    assert_eq!((of, qpn, qkey, &private[..5]), (query, Qpn::new(0x55), 0x1234, &b"here\0"[..]));
    net.cm[B].unlisten_datagrams(net.now, listener, |_| false);
    let query = resolve(&mut net);
    net.run(1);
    assert_eq!(net.one(A), unresolved(query, Some(SidrStatus::UNSUPPORTED), b""));
}

#[test]
fn a_question_is_repeated_and_given_up() {
    let mut net = Net::new();
    net.mute[B] = true;
    let query = resolve(&mut net);
    net.run(10_000);
    assert_eq!(net.one(A), unresolved(query, None, b""));
    assert_eq!(net.sent().iter().filter(|sent| **sent == (A, "SIDR_REQ")).count(), 16);
    net.assert_nothing_left();
}
