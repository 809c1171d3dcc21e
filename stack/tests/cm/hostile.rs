//! A peer that may send anything.

use rocinante_stack::cm::{CmEvent, Connect};
use rocinante_stack::types::{Pkey, Qpn};
use rocinante_stack::wire::cm::{
    CmMessage, CmPath, CommId, Dreq, PortSpace, RejReason, Rep, Req, Rtu, ServiceId, Subject,
    Transport,
};
use rocinante_stack::wire::mad::MadBytes;

use crate::net::{A, B, Net, address, ask};

/// The REQ that a connection manager sends.
fn real_req(net: &mut Net) -> MadBytes {
    net.connect(0x11);
    net.cm[A].poll_transmit().unwrap().mad
}

/// Hands a changed REQ to the other side.
fn changed(change: impl FnOnce(&mut Req<'_>)) -> (Net, u64, CommId) {
    let mut net = Net::new();
    net.listen(2);
    let mad = real_req(&mut net);
    let Ok((header, CmMessage::Req(mut req))) = CmMessage::parse(&mad) else { panic!() };
    change(&mut req);
    let (now, local, changed) = (net.now, req.local, CmMessage::Req(req).emit(header.tid));
    net.cm[B].handle_mad(now, address(A), address(B), &changed);
    (net, header.tid, local)
}

/// The rejection that a changed REQ gets, if any.
#[track_caller]
fn answer_to(change: impl FnOnce(&mut Req<'_>)) -> Option<RejReason> {
    let (mut net, tid, local) = changed(change);
    let answer = net.cm[B].poll_transmit()?;
    let Ok((again, CmMessage::Rej(rej))) = CmMessage::parse(&answer.mad) else { panic!() };
    assert_eq!((again.tid, rej.subject, rej.remote), (tid, Subject::Req, local));
    assert_eq!((net.cm[B].len(), net.cm[B].poll_event()), (0, None));
    Some(rej.reason)
}

/// Connections, malformed messages and requests for the program, after a changed REQ.
fn outcome_of(change: impl FnOnce(&mut Req<'_>)) -> (usize, u64, u64) {
    let (net, ..) = changed(change);
    let counters = net.cm[B].counters();
    (net.cm[B].len(), counters.malformed, counters.requests)
}

#[test]
fn contradictory_requests_are_rejected_for_what_is_wrong_with_them() {
    assert_eq!(answer_to(|_| {}), None);
    assert_eq!(answer_to(|req| req.alternate = CmPath::default()), None);
    // No peer could receive the answer.
    assert_eq!(answer_to(|req| req.local = CommId(0)), None);
    assert_eq!(outcome_of(|req| req.local = CommId(0)), (0, 1, 0));
    assert_eq!(outcome_of(|_| {}), (1, 0, 1));
    let reasons = [
        answer_to(|req| req.transport = Transport::Rd),
        answer_to(|req| req.qpn = Qpn::GSI),
        answer_to(|req| req.qpn = Qpn::MULTICAST),
        answer_to(|req| req.pkey = Pkey(0x8001)),
        answer_to(|req| req.mtu = 6),
        answer_to(|req| req.mtu = 0),
        answer_to(|req| req.primary.local_gid.0[15] = 99),
        answer_to(|req| req.primary.remote_gid.0[15] = 99),
        answer_to(|req| req.private = &[0; 92]),
        answer_to(|req| req.service.0 += 1),
        answer_to(|req| req.service.0 = 7),
    ];
    let expected = [9, 5, 5, 5, 26, 26, 12, 12, 5, 8, 8];
    assert_eq!(reasons, expected.map(|reason| Some(RejReason(reason))));
}

#[test]
fn a_flood_of_requests_is_bounded() {
    let mut net = Net::new();
    net.listen(64);
    let mad = real_req(&mut net);
    let Ok((_, CmMessage::Req(req))) = CmMessage::parse(&mad) else { panic!() };
    for n in 1..20_000u32 {
        let flood = Req { local: CommId(n), qpn: Qpn::new(n + 10), ..req };
        let (now, mad) = (net.now, CmMessage::Req(flood).emit(u64::from(n)));
        net.cm[B].handle_mad(now, address(A), address(B), &mad);
    }
    assert_eq!(net.cm[B].len(), 64);
    assert!(net.cm[B].counters().tx_overflow > 0);
    let mut waiting = 0;
    while net.cm[B].poll_transmit().is_some() {
        waiting += 1;
    }
    assert_eq!(waiting, 4096);
    // Another listener is served meanwhile.
    net.take(B);
    let service = ServiceId::of_port(PortSpace::Tcp, 7472);
    let other = net.cm[B].listen(service, None, 1).unwrap();
    net.cm[A].connect(net.now, &Connect { service, ..ask(0x76, b"") }).unwrap();
    net.run(1);
    assert!(matches!(net.one(B), CmEvent::Request { listener, .. } if listener == other));
    // The program decides nothing. The peers get MRAs, and then the requests expire. Nothing is
    // left, and the next request is accepted.
    net.run(200_000);
    net.take(B);
    assert_eq!((net.cm[B].len(), net.cm[B].poll_timeout()), (0, None));
    net.take(A);
    net.asked(0x77);
}

/// A reply without a connection is rejected; a rejection without a connection gets no answer. So no
/// two managers answer each other for ever.
#[test]
fn nothing_is_answered_for_ever() {
    let mut net = Net::new();
    let (now, ids) = (net.now, (CommId(77), CommId(88)));
    let (local, remote) = ids;
    let rep = Rep {
        local,
        remote,
        qkey: 0,
        qpn: Qpn::new(5),
        announced: None,
        psn: Default::default(),
        responder_resources: 0,
        initiator_depth: 0,
        target_ack_delay: 0,
        failover: 0,
        flow_control: false,
        rnr_retry: 0,
        srq: false,
        ca_guid: 0,
        private: b"",
    };
    let messages = [
        CmMessage::Rep(rep),
        CmMessage::Rtu(Rtu { local, remote, private: b"" }),
        CmMessage::Dreq(Dreq { local, remote, remote_qpn: Qpn::new(5), private: b"" }),
    ];
    for message in messages {
        net.cm[B].handle_mad(now, address(A), address(B), &message.emit(1));
        net.run(10_000);
    }
    assert_eq!(net.sent(), [(B, "REJ"), (B, "DREP")]);
    net.assert_nothing_left();
}

#[test]
fn who_forges_an_address_and_tries_queue_pairs_ends_nothing() {
    let mut net = Net::new();
    net.listen(4);
    let mad = real_req(&mut net);
    let Ok((header, CmMessage::Req(req))) = CmMessage::parse(&mad) else { panic!() };
    let mut net = Net::new();
    net.listen(4);
    net.connected(0x1000, 0x2000);
    let known = net.cm[B].counters().established;
    // A's address and queue pair number, but another adapter GUID.
    let forged = Req { local: CommId(77), qpn: Qpn::new(0x1000), ca_guid: req.ca_guid ^ 1, ..req };
    let now = net.now;
    net.cm[B].handle_mad(now, address(A), address(B), &CmMessage::Req(forged).emit(header.tid));
    let answer = net.cm[B].poll_transmit().expect("a rejection");
    let Ok((_, CmMessage::Rej(rej))) = CmMessage::parse(&answer.mad) else { panic!() };
    assert_eq!(rej.reason, RejReason::STALE_CONNECTION);
    assert_eq!((net.cm[B].poll_transmit(), net.cm[B].poll_event()), (None, None));
    let counters = net.cm[B].counters();
    assert_eq!((counters.stale, counters.stray, counters.established), (0, 1, known));
    // With the right GUID, the peer has started again.
    let again = Req { ca_guid: req.ca_guid, ..forged };
    net.cm[B].handle_mad(now, address(A), address(B), &CmMessage::Req(again).emit(header.tid));
    assert_eq!(net.cm[B].counters().stale, 1);
    assert!(matches!(net.cm[B].poll_event(), Some(CmEvent::Disconnected { .. })));
}
