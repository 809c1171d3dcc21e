//! A peer that may send anything.

use rocinante_stack::cm::{Accept, CmEvent, Connect};
use rocinante_stack::types::{Pkey, Qpn};
use rocinante_stack::wire::cm::{
    CmMessage, CmPath, CommId, Drep, Dreq, Mra, PortSpace, Rej, RejReason, Rep, Req, Rtu, ServiceId,
    Subject, Transport,
};
use rocinante_stack::wire::mad::MadBytes;

use crate::net::{A, B, Net, address, ask, side as side_of};

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
fn a_request_again_makes_no_second_connection() {
    let mut net = Net::new();
    net.listen(8);
    let mad = real_req(&mut net);
    let now = net.now;
    for _ in 0..100 {
        net.cm[B].handle_mad(now, address(A), address(B), &mad);
    }
    assert!(matches!(net.cm[B].poll_event(), Some(CmEvent::Request { .. })));
    assert_eq!((net.cm[B].poll_event(), net.cm[B].len()), (None, 1));
    assert_eq!(net.cm[B].counters().duplicates, 99);
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

/// A third party that guesses communication ids changes nothing.
#[test]
fn a_third_party_that_knows_the_ids_changes_nothing() {
    let (mut net, a, b) = Net::joined();
    let (local, remote) = (a.0, b.0);
    let third = "10.0.0.3".parse().unwrap();
    let messages = [
        CmMessage::Dreq(Dreq { local, remote, remote_qpn: Qpn::new(0x22), private: b"" }),
        CmMessage::Drep(Drep { local, remote, private: b"" }),
        CmMessage::Rtu(Rtu { local, remote, private: b"" }),
        CmMessage::Mra(Mra {
            local,
            remote,
            subject: Subject::Rep,
            service_timeout: 31,
            private: b"",
        }),
        CmMessage::Rej(Rej {
            local,
            remote,
            subject: Subject::Rep,
            reason: RejReason(10),
            info: b"",
            private: b"",
        }),
    ];
    for message in messages {
        net.cm[B].handle_mad(net.now, third, address(B), &message.emit(1));
        assert_eq!(net.cm[B].poll_event(), None);
        while let Some(answer) = net.cm[B].poll_transmit() {
            assert_eq!(answer.remote, third);
        }
    }
    // And the peer itself, but with another queue pair.
    let wrong = Dreq { local, remote, remote_qpn: Qpn::new(0x23), private: b"" };
    net.cm[B].handle_mad(net.now, address(A), address(B), &CmMessage::Dreq(wrong).emit(1));
    assert_eq!((net.cm[B].poll_event(), net.cm[B].poll_transmit()), (None, None));
    assert_eq!(net.cm[B].counters().stray, 6);
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

/// Real messages with changed bytes, in any order, to managers in any state: nothing panics,
/// nothing is left.
#[test]
fn damaged_messages_do_no_harm() {
    for seed in 0..150 {
        let mut net = Net::with(crate::net::config, seed);
        net.listen(3);
        let first = net.connected(0x1000, 0x2000);
        let mut established = [vec![first.0], vec![first.1]];
        let mut seen: Vec<(usize, MadBytes)> = Vec::new();
        for round in 0..60u32 {
            if net.random(3) == 0 {
                net.connect(0x100 + round);
            }
            // Messages on the wire are recorded, and some are sent again, changed.
            for side in [A, B] {
                while let Some(sent) = net.cm[side].poll_transmit() {
                    let (now, other) = (net.now, 1 - side);
                    seen.push((side, sent.mad));
                    net.cm[other].handle_mad(now, address(side), address(other), &sent.mad);
                }
            }
            for _ in 0..if seen.is_empty() { 0 } else { 4 } {
                let (side, mut mad) = seen[net.random(seen.len() as u64) as usize];
                for _ in 0..net.random(4) {
                    let at = net.random(256) as usize;
                    mad[at] ^= 1 << net.random(8);
                }
                // To either side.
                let to = if net.random(4) == 0 { side } else { 1 - side };
                net.cm[to].handle_mad(net.now, address(1 - to), address(to), &mad);
            }
            for side in [A, B] {
                for event in net.take(side) {
                    match event {
                        // A damaged message may have withdrawn either.
                        CmEvent::Request { conn, .. } if net.random(4) > 0 => {
                            let (now, side) = (net.now, side_of(0x5000 + round));
                            let _ = net.cm[B].accept(
                                now,
                                conn,
                                &Accept { side, keep_alive: None, private: b"" },
                            );
                        }
                        CmEvent::Replied { conn, .. }
                            if net.cm[side].establish(conn, b"").is_ok() =>
                        {
                            established[side].push(conn);
                        }
                        CmEvent::Established { conn } => established[side].push(conn),
                        _ => {}
                    }
                }
            }
            net.run(50);
            assert!(net.cm[B].len() < 200);
        }
        // The remaining connections end.
        for _ in 0..3 {
            for side in [A, B] {
                for event in net.take(side) {
                    if let CmEvent::Established { conn }
                    | CmEvent::Request { conn, .. }
                    | CmEvent::Replied { conn, .. } = event
                    {
                        net.cm[side].forget(net.now, conn);
                    }
                }
            }
            net.run(1_200_000);
        }
        assert_eq!([A, B].map(|side| net.cm[side].poll_timeout()), [None, None], "seed {seed}");
        // A connection without a deadline is established, and its program knows. After it ends,
        // nothing is left.
        for side in [A, B] {
            for conn in std::mem::take(&mut established[side]) {
                net.cm[side].forget(net.now, conn);
            }
        }
        net.run(1_200_000);
        for side in [A, B] {
            net.take(side);
        }
        net.assert_nothing_left();
    }
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
