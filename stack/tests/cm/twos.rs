//! Two of the same object, consecutive phases, and the state left after repetitions.

use rocinante_stack::cm::{CmEvent, Connect, Ended};
use rocinante_stack::types::Pkey;
use rocinante_stack::wire::cm::{
    CmMessage, CommId, IpHeader, PortSpace, RejReason, Rep, ServiceId, SidrReq, SidrStatus,
};
use rocinante_stack::wire::mad::MadBytes;

use crate::net::{A, B, MS, Net, address, ask, disconnected, released};
use crate::scenarios::rejection;

const UDP: ServiceId = ServiceId::of_port(PortSpace::Udp, 7174);

/// How often a side sent a message since the last call.
fn count(net: &mut Net, side: usize, what: &str) -> usize {
    net.sent().into_iter().filter(|sent| *sent == (side, what)).count()
}

#[test]
fn each_message_is_repeated_as_often_as_any_other() {
    let (mut net, _, b) = Net::asking();
    // The first replies are lost.
    net.mute[B] = true;
    net.accept(b, 0x22);
    net.run(1_500);
    net.mute[B] = false;
    net.run(1_000);
    assert!(count(&mut net, B, "REP") >= 4, "it was repeated");
    assert!(matches!(net.one(A), CmEvent::Replied { .. }));
    net.mute[A] = true;
    net.cm[B].disconnect(net.now, b, b"").unwrap();
    net.run(20_000);
    assert_eq!(count(&mut net, B, "DREQ"), 1 + usize::from(net.cm[B].config().max_retries));
}

#[test]
fn who_is_accepted_may_ask_for_patience_whoever_asked_for_it_before() {
    let (mut net, _, b) = Net::asking();
    // The listening program takes its time, and then the asking program.
    net.run(500);
    assert_eq!(count(&mut net, B, "MRA"), 1);
    net.accept(b, 0x22);
    net.run(2_000);
    assert_eq!(net.cm[A].counters().stray + net.cm[B].counters().stray, 0);
    let sent = net.sent();
    let replies = sent.iter().filter(|sent| **sent == (B, "REP")).count();
    assert_eq!((replies, sent.contains(&(A, "MRA"))), (1, true), "{sent:?}");
}

#[test]
fn a_connection_leaves_its_listeners_backlog_once() {
    let mut net = Net::new();
    net.listen(1);
    let (a, _) = net.connected(0x11, 0x21);
    // The second connection takes the only place, and keeps it while the first ends and is
    // released.
    net.asked(0x12);
    net.cm[A].disconnect(net.now, a, b"").unwrap();
    net.run(1_000);
    net.take(A);
    assert_eq!(net.take(B).len(), 2, "disconnected and released");
    net.connect(0x13);
    net.run(1);
    assert_eq!(rejection(&net.take(A)[0]), RejReason::NO_RESOURCES);
}

#[test]
fn a_late_copy_of_a_request_makes_no_second_connection_until_the_first_is_released() {
    let mut net = Net::new();
    net.listen(4);
    let a = net.connect(0x11);
    let req = net.cm[A].poll_transmit().unwrap();
    let receive = |net: &mut Net| {
        net.cm[B].handle_mad(net.now, req.local, req.remote, &req.mad);
    };
    receive(&mut net);
    let CmEvent::Request { conn: b, .. } = net.one(B) else { panic!("no request") };
    net.replied(b, 0x22);
    net.cm[A].establish(a, b"").unwrap();
    net.run(1);
    net.leave(A, a);
    let received = net.take(B);
    assert_eq!(received.last(), Some(&disconnected(b, Ended::ByPeer)), "{received:?}");
    receive(&mut net);
    assert_eq!(net.take(B), []);
    assert_eq!(net.cm[B].len(), 1);
    assert_eq!(net.cm[B].counters().duplicates, 1);
}

#[test]
fn of_two_requests_of_a_peer_the_one_that_it_withdraws_goes() {
    for withdrawn in [0, 1] {
        let mut net = Net::new();
        net.listen(4);
        let both = [net.asked(0x11), net.asked(0x12)];
        let (now, (gone, at_b)) = (net.now, both[withdrawn]);
        net.cm[A].forget(now, gone);
        net.run(1);
        let received = net.take(B);
        let rejected =
            |event: &CmEvent| matches!(event, CmEvent::Rejected { conn, .. } if *conn == at_b);
        assert!(rejected(&received[0]), "{received:?}");
        assert_eq!((received.len(), net.cm[B].len()), (2, 1));
        // The other connection goes on.
        net.accept(both[1 - withdrawn].1, 0x22);
        net.run(1);
        assert!(net.take(A).iter().any(|event| matches!(event, CmEvent::Replied { .. })));
    }
}

/// Of the requests that wait for a listener which goes, those that the program has not seen are
/// refused, and the other is still the program's.
#[test]
fn a_listener_that_goes_refuses_each_request_that_waits() {
    let mut net = Net::new();
    let listener = net.listen(4);
    let asked = [0x11, 0x12, 0x13].map(|qpn| net.asked(qpn));
    let (_, seen) = asked[1];
    net.cm[B].unlisten(listener, |conn| conn == seen);
    net.run(1);
    let received = net.take(A);
    for (at, (conn, _)) in asked.iter().enumerate() {
        let refused = received
            .iter()
            .find(|event| matches!(event, CmEvent::Rejected { conn: of, .. } if of == conn));
        let reason = (at != 1).then_some(RejReason::INVALID_SERVICE_ID);
        assert_eq!(refused.map(rejection), reason, "request {at}: {received:?}");
    }
    assert_eq!(net.cm[B].len(), 1);
    net.replied(seen, 0x22);
}

#[test]
fn the_accepter_waits_for_as_long_as_the_asker_said_that_packets_take() {
    const CODE: u8 = 20;
    let mut net = Net::new();
    net.listen(1);
    let (now, ask) = (net.now, Connect { ack_timeout: CODE, ..ask(0x11, b"") });
    let a = net.cm[A].connect(now, &ask).unwrap();
    net.run(1);
    let CmEvent::Request { conn: b, .. } = net.one(B) else { panic!("no request") };
    net.replied(b, 0x22);
    net.cm[A].establish(a, b"").unwrap();
    net.run(1);
    net.leave(B, b);
    net.take(A);
    net.take(B);
    let wait_ms = 2 * (4096 << CODE) / MS;
    net.run(wait_ms - 2);
    assert_eq!((net.take(A), net.take(B)), (vec![], vec![]));
    net.run(3);
    assert_eq!((net.one(A), net.one(B)), (released(a, 0x11), released(b, 0x22)));
}

#[test]
fn a_peer_that_died_and_accepts_with_the_same_queue_pair_ends_the_old_connection() {
    let (mut net, old, _) = Net::joined();
    net.restart(B, 99);
    net.listen(1);
    let (new, b) = net.asked(0x12);
    net.accept(b, 0x22);
    net.run(1);
    let received = net.take(A);
    assert!(received.contains(&disconnected(old, Ended::Stale)), "{received:?}");
    let refused =
        |event: &&CmEvent| matches!(event, CmEvent::Rejected { conn, .. } if *conn == new);
    let refused = received.iter().find(refused).expect("the new one is to be tried again");
    assert_eq!(rejection(refused), RejReason::STALE_CONNECTION);
    net.run(1_000);
    net.take(A);
    net.take(B);
    let (_, b) = net.asked(0x13);
    net.replied(b, 0x22);
}

#[test]
fn a_connection_is_established_once_by_its_rtu_and_by_a_message() {
    let (mut net, a, b) = Net::joined();
    net.cm[B].message_arrived(b);
    assert_eq!((net.take(B), net.cm[B].counters().established), (vec![], 1));
    net.leave(A, a);
    assert_eq!(net.one(B), disconnected(b, Ended::ByPeer));
    // A message on the queue pair of a connection that has ended.
    net.cm[B].message_arrived(b);
    assert_eq!(net.take(B), []);
    net.run(1_000);
    assert_eq!(net.one(B), released(b, 0x22));
}

#[test]
fn a_question_that_was_repeated_leaves_no_timer_behind() {
    let mut net = Net::new();
    net.cm[B].listen_datagrams(UDP, None, 4).unwrap();
    net.mute[A] = true;
    net.cm[A].resolve(net.now, (address(A), address(B)), (UDP, 40_000), b"").unwrap();
    net.run(600);
    net.mute[A] = false;
    net.run(600);
    assert!(count(&mut net, A, "SIDR_REQ") >= 3);
    net.answer((rocinante_stack::types::Qpn::new(7), 9), b"");
    net.run(1);
    assert!(matches!(net.one(A), CmEvent::Resolved { .. }));
    assert_eq!((net.cm[A].poll_timeout(), net.cm[A].is_empty()), (None, true));
}

/// A question of A, with this number.
fn question(request: u32, tid: u64) -> MadBytes {
    let header = IpHeader { src: (address(A), 40_000).into(), dst: address(B) };
    let (pkey, private) = (Pkey::DEFAULT, &header.bytes()[..]);
    CmMessage::SidrReq(SidrReq { request, pkey, service: UDP, private }).emit(tid)
}

#[test]
fn a_number_that_a_peer_uses_again_is_the_new_questions() {
    let mut net = Net::new();
    net.cm[B].listen_datagrams(UDP, None, 4).unwrap();
    let put = |net: &mut Net, tid| {
        net.cm[B].handle_mad(net.now, address(A), address(B), &question(5, tid));
    };
    for tid in [1, 2] {
        put(&mut net, tid);
        let CmEvent::Asked { ask, .. } = net.one(B) else { panic!("no question") };
        net.cm[B].answer(net.now, ask, Err(SidrStatus::REJECT), b"").unwrap();
        net.run(40_000);
    }
    // The first answer is forgotten by now, the second is not.
    put(&mut net, 2);
    assert_eq!(net.take(B), []);
    assert_eq!(net.cm[B].counters().duplicates, 1);
}

#[test]
fn of_two_replies_the_first_that_makes_sense_counts() {
    let (mut net, a, b) = Net::asking();
    net.accept(b, 0x22);
    let reply = net.cm[B].poll_transmit().unwrap();
    let Ok((header, CmMessage::Rep(rep))) = CmMessage::parse(&reply.mad) else {
        panic!("no reply")
    };
    let mut receive = |rep: Rep<'_>| {
        let (now, mad) = (net.now, CmMessage::Rep(rep).emit(header.tid));
        net.cm[A].handle_mad(now, address(B), address(A), &mad);
        let counters = net.cm[A].counters();
        (counters.malformed, counters.stray, counters.duplicates)
    };
    assert_eq!(receive(Rep { local: CommId(0), ..rep }), (1, 0, 0));
    assert_eq!(receive(rep), (1, 0, 0));
    assert_eq!(receive(Rep { local: CommId(rep.local.0 ^ 1), ..rep }), (1, 1, 0));
    assert_eq!(receive(rep), (1, 1, 1));
    assert!(matches!(net.one(A), CmEvent::Replied { conn, .. } if conn == a));
}
