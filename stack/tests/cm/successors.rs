//! Two objects with one number: the release of the first leaves the entries of the second in place.

use rocinante_stack::cm::{CmEvent, ConnId, Ended, SidrQueryId, SidrReqId};
use rocinante_stack::types::{Pkey, Qpn};
use rocinante_stack::wire::cm::{
    CmMessage, CommId, Dreq, IpHeader, PortSpace, Rej, RejReason, Req, ServiceId, SidrReq, Subject,
};

use crate::net::{A, B, Net, SERVICE, address, disconnected, released, unresolved};
use crate::scenarios::rejection;

const UDP: ServiceId = ServiceId::of_port(PortSpace::Udp, 7174);
/// After this time a connection that has ended is released.
const RELEASE: u64 = 1_000;

/// A connection that both sides have ended, and that neither has released.
fn ended(net: &mut Net, qpn_a: u32, qpn_b: u32) -> [ConnId; 2] {
    let (a, b) = net.connected(qpn_a, qpn_b);
    net.leave(A, a);
    assert_eq!(net.one(A), disconnected(a, Ended::ByUs));
    assert_eq!(net.one(B), disconnected(b, Ended::ByPeer));
    [a, b]
}

/// The active side uses its queue pair again, and dies later. The passive side finds the second
/// connection stale by that number, although the first was released in between.
#[test]
fn who_asks_with_one_queue_pair_twice_and_dies_is_found_stale() {
    let mut net = Net::new();
    net.listen(4);
    let [a, b] = ended(&mut net, 0x11, 0x22);
    let (_, second) = net.connected(0x11, 0x23);
    net.run(RELEASE);
    assert_eq!((net.take(A), net.take(B)), (vec![released(a, 0x11)], vec![released(b, 0x22)]));
    net.restart(A, 99);
    net.connect(0x11);
    net.run(1);
    assert_eq!(rejection(&net.take(A)[0]), RejReason::STALE_CONNECTION);
    assert_eq!(net.take(B)[0], disconnected(second, Ended::Stale));
    net.run(RELEASE);
    assert_eq!(net.take(B), vec![released(second, 0x23)]);
    net.take(A);
    net.assert_nothing_left();
}

/// The same for the passive side: it uses its queue pair again, and dies later.
#[test]
fn who_accepts_with_one_queue_pair_twice_and_dies_is_found_stale() {
    let mut net = Net::new();
    net.listen(4);
    ended(&mut net, 0x11, 0x22);
    let (second, _) = net.connected(0x12, 0x22);
    net.run(RELEASE);
    let _ = [A, B].map(|side| net.take(side));
    net.restart(B, 99);
    net.listen(4);
    let (third, asked) = net.asked(0x13);
    net.accept(asked, 0x22);
    net.run(1);
    let heard = net.take(A);
    assert!(heard.contains(&disconnected(second, Ended::Stale)), "{heard:?}");
    assert_eq!(rejection(&heard[0]), RejReason::STALE_CONNECTION);
    assert!(heard.contains(&released(third, 0x13)));
    net.run(RELEASE);
    let _ = [A, B].map(|side| net.take(side));
    net.assert_nothing_left();
}

/// B receives a request of A for `qpn`, with this communication id.
fn receive_req(net: &mut Net, id: u32, qpn: u32) {
    let mut other = Net::new();
    other.connect(qpn);
    let sent = other.cm[A].poll_transmit().unwrap().mad;
    let Ok((header, CmMessage::Req(req))) = CmMessage::parse(&sent) else { panic!("no request") };
    let req = Req { local: CommId(id), qpn: Qpn::new(qpn), ..req };
    net.cm[B].handle_mad(net.now, address(A), address(B), &CmMessage::Req(req).emit(header.tid));
}

/// The connection of the request that B received.
#[track_caller]
fn asked(net: &mut Net) -> ConnId {
    let CmEvent::Request { conn, .. } = net.one(B) else { panic!("no request") };
    conn
}

/// The reason of the rejection that B sends now.
#[track_caller]
fn refused(net: &mut Net) -> RejReason {
    let sent = net.cm[B].poll_transmit().expect("an answer");
    let Ok((_, CmMessage::Rej(rej))) = CmMessage::parse(&sent.mad) else { panic!("no rejection") };
    rej.reason
}

/// A connection of B in TimeWait, with this communication id and queue pair of the peer.
fn waiting(net: &mut Net, id: u32, qpn: u32) -> ConnId {
    receive_req(net, id, qpn);
    let conn = asked(net);
    net.accept(conn, 0x2000 + qpn);
    net.cm[B].message_arrived(conn);
    let (local, remote, remote_qpn) = (CommId(id), conn.0, Qpn::new(0x2000 + qpn));
    let dreq = CmMessage::Dreq(Dreq { local, remote, remote_qpn, private: b"" }).emit(1);
    net.cm[B].handle_mad(net.now, address(A), address(B), &dreq);
    while net.cm[B].poll_transmit().is_some() {}
    assert_eq!(net.take(B), [CmEvent::Established { conn }, disconnected(conn, Ended::ByPeer)]);
    conn
}

/// The peer uses its communication id again for another queue pair. The request of the second is
/// still known when the first is released.
#[test]
fn a_communication_id_that_is_used_again_is_the_second_ones() {
    let mut net = Net::new();
    net.listen(4);
    let first = waiting(&mut net, 77, 0x11);
    receive_req(&mut net, 77, 0x12);
    let second = asked(&mut net);
    net.run(200);
    assert_eq!(net.take(B), vec![released(first, 0x2011)]);
    receive_req(&mut net, 77, 0x12);
    assert_eq!((net.take(B), net.cm[B].len()), (vec![], 1), "it is a duplicate");
    // A peer that gives up before it knows our id is found by its own id.
    let rej = Rej {
        local: CommId(77),
        remote: CommId(0),
        subject: Subject::Req,
        reason: RejReason::TIMEOUT,
        info: b"",
        private: b"",
    };
    net.cm[B].handle_mad(net.now, address(A), address(B), &CmMessage::Rej(rej).emit(9));
    let heard = net.take(B);
    assert_eq!(rejection(&heard[0]), RejReason::TIMEOUT);
    assert_eq!(heard[1..], [released(second, 0)]);
    net.assert_nothing_left();
}

/// One connection has the communication id of a request and is over. Another has its queue pair and
/// is alive.
#[test]
fn a_request_with_the_id_of_one_connection_and_the_queue_pair_of_another_is_judged_by_both() {
    let mut net = Net::new();
    net.listen(4);
    receive_req(&mut net, 88, 0x12);
    let lives = asked(&mut net);
    net.accept(lives, 0x33);
    net.cm[B].message_arrived(lives);
    assert_eq!(net.take(B), vec![CmEvent::Established { conn: lives }]);
    waiting(&mut net, 77, 0x11);
    while net.cm[B].poll_transmit().is_some() {}
    receive_req(&mut net, 77, 0x12);
    assert_eq!(refused(&mut net), RejReason::STALE_CONNECTION);
    assert_eq!(net.take(B)[0], disconnected(lives, Ended::Stale));
}

/// Each peer has its own space of queue pair numbers.
#[test]
fn two_peers_have_the_same_numbers() {
    let mut net = Net::new();
    net.listen(4);
    let (_, b) = net.connected(0x11, 0x22);
    let mut other = Net::new();
    other.connect(0x11);
    let sent = other.cm[A].poll_transmit().unwrap().mad;
    let Ok((header, CmMessage::Req(mut req))) = CmMessage::parse(&sent) else {
        panic!("no request")
    };
    let third: std::net::IpAddr = "10.0.0.3".parse().unwrap();
    req.primary.local_gid = third.into();
    let now = net.now;
    net.cm[B].handle_mad(now, third, address(B), &CmMessage::Req(req).emit(header.tid));
    let CmEvent::Request { conn, .. } = net.cm[B].poll_event().expect("a request") else {
        panic!("no request")
    };
    assert_ne!(conn, b);
    // After the third's connection is forgotten, the other peer is still found by its number.
    net.cm[B].forget(now, conn);
    while net.cm[B].poll_transmit().is_some() {}
    assert_eq!(net.take(B), vec![released(conn, 0)]);
    net.restart(A, 99);
    net.connect(0x11);
    net.run(1);
    assert_eq!(rejection(&net.take(A)[0]), RejReason::STALE_CONNECTION);
    assert_eq!(net.take(B)[0], disconnected(b, Ended::Stale));
}

// ---- listeners ----

/// A request from a former listener does not count in the backlog of its successor.
#[test]
fn a_listener_in_the_place_of_another_has_a_backlog_of_its_own() {
    let mut net = Net::new();
    let first = net.listen(1);
    let (_, early) = net.asked(0x11);
    net.cm[B].unlisten(first, |_| true);
    net.listen(1);
    let (_, late) = net.asked(0x12);
    let full = |net: &mut Net, qpn| {
        net.connect(qpn);
        net.run(1);
        let heard = net.take(A);
        rejection(&heard[0]) == RejReason::NO_RESOURCES
    };
    assert!(full(&mut net, 0x13));
    net.accept(early, 0x21);
    net.cm[B].message_arrived(early);
    net.take(B);
    net.run(1);
    net.take(A);
    assert!(full(&mut net, 0x14), "the requests to the first listener are decided");
    net.cm[B].reject(late, RejReason::CONSUMER, b"").unwrap();
    net.run(1);
    let _ = [A, B].map(|side| net.take(side));
    net.asked(0x15);
}

#[test]
fn two_listeners_of_a_service_have_a_backlog_each() {
    let mut net = Net::new();
    let all = net.listen(1);
    let own = net.cm[B].listen(SERVICE, Some(address(B)), 1).unwrap();
    let (_, conn) = net.asked(0x11);
    net.connect(0x12);
    net.run(1);
    assert_eq!(rejection(&net.take(A)[0]), RejReason::NO_RESOURCES, "the other is not asked");
    // The end of one listener does not change the backlog of the other.
    net.cm[B].unlisten(all, |_| false);
    assert_eq!(net.take(B), vec![]);
    net.listen(1);
    net.cm[B].unlisten(own, |_| false);
    assert_eq!(net.take(B), vec![released(conn, 0)]);
    net.run(1);
    net.take(A);
    net.asked(0x13);
}

// ---- datagram services ----

/// B receives a question of A with this number and transaction.
fn receive_question(net: &mut Net, request: u32, tid: u64) {
    let header = IpHeader { src: (address(A), 40_000).into(), dst: address(B) };
    let (pkey, private) = (Pkey::DEFAULT, &header.bytes()[..]);
    let ask = SidrReq { request, pkey, service: UDP, private };
    net.cm[B].handle_mad(net.now, address(A), address(B), &CmMessage::SidrReq(ask).emit(tid));
}

/// The question that the program got; the program answers it.
#[track_caller]
fn answered(net: &mut Net) -> SidrReqId {
    let CmEvent::Asked { ask, .. } = net.one(B) else { panic!("no question") };
    net.cm[B].answer(net.now, ask, Ok((Qpn::new(7), 9)), b"").unwrap();
    assert!(net.cm[B].poll_transmit().is_some());
    ask
}

/// The first answer expires before the second, which is then still given from memory.
#[test]
fn a_question_whose_number_is_used_again_is_remembered_as_long_as_any() {
    let mut net = Net::new();
    net.cm[B].listen_datagrams(UDP, None, 4).unwrap();
    receive_question(&mut net, 5, 1);
    answered(&mut net);
    net.run(30_000);
    receive_question(&mut net, 5, 2);
    answered(&mut net);
    net.run(31_000);
    receive_question(&mut net, 5, 2);
    assert_eq!(net.cm[B].counters().duplicates, 1);
    assert!(net.cm[B].poll_transmit().is_some(), "it is answered again");
    assert_eq!(net.take(B), vec![], "and no program is asked");
    net.run(30_000);
    receive_question(&mut net, 5, 2);
    answered(&mut net);
}

#[test]
fn two_questions_of_ours_to_one_service_are_answered_or_given_up_each_by_itself() {
    let mut net = Net::new();
    let ask = |net: &mut Net| -> SidrQueryId {
        let (now, way) = (net.now, (address(A), address(B)));
        net.cm[A].resolve(now, way, (UDP, 40_000), b"").unwrap()
    };
    net.mute[A] = true;
    let only = ask(&mut net);
    net.cm[A].forget_query(only);
    assert_eq!(net.cm[A].poll_timeout(), None, "no call waits for its answer");
    let [first, second] = [ask(&mut net), ask(&mut net)];
    net.run(1_000);
    let third = ask(&mut net);
    net.cm[A].forget_query(first);
    net.run(5_600);
    assert_eq!(net.one(A), unresolved(second, None, b""));
    net.mute[A] = false;
    net.cm[B].listen_datagrams(UDP, None, 4).unwrap();
    net.run(500);
    net.answer((Qpn::new(7), 9), b"");
    net.run(1);
    assert!(matches!(net.one(A), CmEvent::Resolved { query, .. } if query == third));
    assert!(net.cm[A].is_empty() && net.cm[A].poll_timeout().is_none());
}
