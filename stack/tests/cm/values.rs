//! The numeric fields that a peer chooses: smallest, greatest and absurd values, in every state.
//! None of them makes us wait longer than our own configuration says, or keep anything for ever.

use rocinante_stack::cm::{Accept, CmConfig, CmEvent, ConnId, SidrQueryId};
use rocinante_stack::types::{Pkey, Psn, Qpn, QueueKind};
use rocinante_stack::wire::cm::{
    Announced, Apr, CmMessage, CmPath, CommId, Drep, Dreq, Lap, Mra, PortSpace, Rej, RejReason,
    Rep, Req, Rtu, ServiceId, SidrRep, SidrReq, SidrStatus, Subject, Transport, code_to_ns,
};
use rocinante_stack::wire::mad::MadBytes;

use crate::net::{A, B, MS, Net, address, config, released, side};
use crate::scenarios::FOR_EVER;
use crate::thirds::{STEPS, Step, at, finish};

/// All codes of a time.
const CODES: std::ops::Range<u8> = 0..32;

/// The longest time that we wait: for a program, ours or the peer's, and for a packet.
fn longest(config: &CmConfig) -> u64 {
    code_to_ns(config.service_timeout) + code_to_ns(config.packet_lifetime)
}

/// How long a side waits now.
fn waits(net: &Net, side: usize) -> Option<u64> {
    net.cm[side].poll_timeout().map(|due| due.since(net.now))
}

#[track_caller]
fn assert_waits_no_longer(net: &Net, side: usize, what: &dyn std::fmt::Debug) {
    let longest = longest(net.cm[side].config());
    assert!(waits(net, side).is_none_or(|wait| wait <= longest), "{what:?}");
}

// ---- MRA ----

/// The peer's program gets no more time than ours, even if the peer announces more.
#[test]
fn the_time_of_an_mra_is_limited_to_what_our_own_program_may_take() {
    for (step, side, subject) in [(Step::Asked, A, Subject::Req), (Step::Accepted, B, Subject::Rep)]
    {
        for service_timeout in CODES {
            let (mut net, a, b) = at(step);
            let (here, there) = if side == A { (a, b) } else { (b, a) };
            let (local, remote) = (there.0, here.0);
            let mra = Mra { local, remote, subject, service_timeout, private: b"" };
            let (now, mad) = (net.now, CmMessage::Mra(mra).emit(1));
            net.cm[side].handle_mad(now, address(1 - side), address(side), &mad);
            let config = *net.cm[side].config();
            let most = service_timeout.min(config.service_timeout);
            let expected = code_to_ns(most) + code_to_ns(config.packet_lifetime);
            assert_eq!(waits(&net, side), Some(expected), "{step:?} code {service_timeout}");
            finish(net, a, b, step);
        }
    }
}

/// A peer may send an MRA after each repetition: the repetitions still count.
#[test]
fn a_peer_that_asks_for_patience_again_and_again_is_given_up() {
    for (step, side, subject) in [(Step::Asked, A, Subject::Req), (Step::Accepted, B, Subject::Rep)]
    {
        let (mut net, a, b) = at(step);
        let (here, there) = if side == A { (a, b) } else { (b, a) };
        let began = net.now;
        let config = *net.cm[side].config();
        let (local, remote, mut mras) = (there.0, here.0, 0);
        let over = loop {
            let mra = Mra { local, remote, subject, service_timeout: 31, private: b"" };
            let mad = CmMessage::Mra(mra).emit(1);
            net.cm[side].handle_mad(net.now, address(1 - side), address(side), &mad);
            mras += 1;
            assert!(mras < 100, "it is not given up");
            net.now = net.cm[side].poll_timeout().expect("a deadline");
            net.cm[side].handle_timeout(net.now);
            while net.cm[side].poll_transmit().is_some() {}
            if let Some(event) = net.cm[side].poll_event() {
                break event;
            }
        };
        assert_eq!(over, CmEvent::TimedOut { conn: here });
        assert_eq!(mras, u64::from(config.max_retries) + 1);
        assert!(net.now.since(began) <= mras * longest(&config), "{step:?}");
    }
}

// ---- the time that a queue pair's number rests ----

/// For every ACK timeout of the peer: at least 134 ms, and at most 34 s.
#[test]
fn the_rest_of_a_number_is_bounded_on_both_sides_whatever_the_peer_says() {
    for code in CODES {
        let mut net = Net::new();
        net.listen(4);
        receive_req(&mut net, |req| req.primary.ack_timeout = code);
        let CmEvent::Request { conn, request, .. } = net.one(B) else { panic!("no request") };
        assert_eq!(request.ack_timeout, code, "the program gets the peer's values");
        net.accept(conn, 0x22);
        net.cm[B].message_arrived(conn);
        let (local, remote) = (CommId(77), conn.0);
        let dreq = Dreq { local, remote, remote_qpn: Qpn::new(0x22), private: b"" };
        let (now, mad) = (net.now, CmMessage::Dreq(dreq).emit(1));
        net.cm[B].handle_mad(now, address(A), address(B), &mad);
        assert_eq!(waits(&net, B), Some(2 * code_to_ns(code.clamp(14, 22))), "code {code}");
        net.run(FOR_EVER);
        assert_eq!(net.take(B).last(), Some(&released(conn, 0x22)));
        assert_eq!((net.cm[B].len(), net.cm[B].poll_timeout()), (0, None));
    }
}

// ---- REQ ----

/// A REQ from A with the id 77, changed.
fn req_mad(change: impl FnOnce(&mut Req<'_>)) -> MadBytes {
    let mut net = Net::new();
    net.connect(0x11);
    let sent = net.cm[A].poll_transmit().unwrap().mad;
    let Ok((header, CmMessage::Req(mut req))) = CmMessage::parse(&sent) else {
        panic!("no request")
    };
    req.local = CommId(77);
    change(&mut req);
    CmMessage::Req(req).emit(header.tid)
}

fn receive_req(net: &mut Net, change: impl FnOnce(&mut Req<'_>)) {
    let (now, mad) = (net.now, req_mad(change));
    net.cm[B].handle_mad(now, address(A), address(B), &mad);
}

type Change = (&'static str, fn(&mut Req<'_>));

/// Each numeric field of a REQ at its smallest and greatest value, and at invalid ones.
const REQS: [Change; 45] = [
    ("as it is", |_| {}),
    ("id 1", |req| req.local = CommId(1)),
    ("id 2^32 - 1", |req| req.local = CommId(u32::MAX)),
    ("service 0", |req| req.service = ServiceId(0)),
    ("service 2^64 - 1", |req| req.service = ServiceId(u64::MAX)),
    ("GUID 0", |req| req.ca_guid = 0),
    ("GUID 2^64 - 1", |req| req.ca_guid = u64::MAX),
    ("Q_Key 2^32 - 1", |req| req.qkey = u32::MAX),
    ("queue pair 0", |req| req.qpn = Qpn::new(0)),
    ("queue pair 1", |req| req.qpn = Qpn::new(1)),
    ("queue pair 2", |req| req.qpn = Qpn::new(2)),
    ("queue pair 2^24 - 2", |req| req.qpn = Qpn::new(0xff_fffe)),
    ("queue pair 2^24 - 1", |req| req.qpn = Qpn::new(0xff_ffff)),
    ("responder resources 0", |req| req.responder_resources = 0),
    ("responder resources 255", |req| req.responder_resources = 255),
    ("initiator depth 0", |req| req.initiator_depth = 0),
    ("initiator depth 255", |req| req.initiator_depth = 255),
    ("an answer within 4 us", |req| req.remote_response_timeout = 0),
    ("an answer within 2.4 h", |req| req.remote_response_timeout = 31),
    ("answers within 4 us", |req| req.local_response_timeout = 0),
    ("answers within 2.4 h", |req| req.local_response_timeout = 31),
    ("retry count 0", |req| req.retry_count = 0),
    ("RNR retry count 0", |req| req.rnr_retry = 0),
    ("RNR retry count 7", |req| req.rnr_retry = 7),
    ("repeated never", |req| req.max_cm_retries = 0),
    ("repeated 15 times", |req| req.max_cm_retries = 15),
    ("PSN 0", |req| req.psn = Psn::new(0)),
    ("PSN 2^24 - 1", |req| req.psn = Psn::new(0xff_ffff)),
    ("P_Key 0", |req| req.pkey = Pkey(0)),
    ("P_Key 0x7fff", |req| req.pkey = Pkey(0x7fff)),
    ("MTU 0", |req| req.mtu = 0),
    ("MTU 15", |req| req.mtu = 15),
    ("MTU 5", |req| req.mtu = 5),
    ("transport 3", |req| (req.transport, req.extended_transport) = (Transport::Extended, 7)),
    ("flow label 2^20 - 1", |req| req.primary.flow_label = 0xf_ffff),
    ("rate 63", |req| req.primary.rate = 63),
    ("hop limit 0", |req| req.primary.hop_limit = 0),
    ("hop limit 255", |req| req.primary.hop_limit = 255),
    ("traffic class 255", |req| req.primary.traffic_class = 255),
    ("service level 15", |req| req.primary.service_level = 15),
    ("ACK timeout 0", |req| req.primary.ack_timeout = 0),
    ("ACK timeout 31", |req| req.primary.ack_timeout = 31),
    ("another path", |req| req.alternate = CmPath { ack_timeout: 31, ..req.primary }),
    ("room for nothing", |req| {
        req.announced = Some(Announced { bytes: 0, datagrams: 0, queue: None, answers: false });
    }),
    ("room for everything", |req| {
        let queue = Some(QueueKind::Memory);
        req.announced =
            Some(Announced { bytes: u32::MAX, datagrams: u32::MAX, queue, answers: false });
    }),
];

/// The program's reaction to a request.
#[derive(Debug, Clone, Copy)]
enum Program {
    Sleeps,
    Accepts,
    Rejects,
}

/// For every request and every reaction of our program: nothing is left after the peer has been
/// silent for long.
#[test]
fn no_value_of_a_request_makes_us_wait_for_long_or_hold_anything_for_ever() {
    for (what, change) in REQS {
        for program in [Program::Sleeps, Program::Accepts, Program::Rejects] {
            let mut net = Net::new();
            net.listen(4);
            receive_req(&mut net, change);
            net.mute = [true; 2];
            for event in net.take(B) {
                let CmEvent::Request { conn, .. } = event else { panic!("{event:?}") };
                let now = net.now;
                match program {
                    Program::Sleeps => {}
                    Program::Accepts => net.accept(conn, 0x22),
                    Program::Rejects => {
                        net.cm[B].reject(conn, RejReason::CONSUMER, b"").unwrap();
                    }
                }
                assert_eq!(net.now, now);
            }
            let mut steps = 0;
            while let Some(wait) = waits(&net, B) {
                assert_waits_no_longer(&net, B, &(what, program));
                net.run(wait / MS + 1);
                steps += 1;
                assert!(steps < 50, "{what}: it goes on for ever");
            }
            assert_eq!(net.cm[B].len(), 0, "{what} {program:?}");
        }
    }
}

/// The same requests with a connection already present: none is taken for a second connection.
#[test]
fn a_request_of_a_known_connection_changes_nothing_but_what_it_says() {
    for (what, change) in REQS {
        let mut net = Net::new();
        net.listen(4);
        receive_req(&mut net, |_| {});
        let CmEvent::Request { conn, .. } = net.one(B) else { panic!("no request") };
        net.accept(conn, 0x22);
        net.cm[B].message_arrived(conn);
        assert_eq!(net.take(B), vec![CmEvent::Established { conn }]);
        receive_req(&mut net, change);
        assert!(net.cm[B].len() <= 2, "{what}");
        assert_waits_no_longer(&net, B, &what);
        net.run(FOR_EVER);
        net.cm[B].forget(net.now, conn);
        net.run(FOR_EVER);
        net.take(B);
        assert_eq!((net.cm[B].len(), net.cm[B].poll_timeout()), (0, None), "{what}");
    }
}

/// The program gets the values of the message unchanged.
#[test]
fn the_program_hears_the_greatest_and_the_least_values() {
    for (extreme, few, three, psn) in [(0, 0, 0, 0), (255, 31, 7, 0xff_ffff)] {
        let mut net = Net::new();
        net.listen(4);
        receive_req(&mut net, |req| {
            (req.responder_resources, req.initiator_depth) = (extreme, extreme);
            (req.retry_count, req.rnr_retry, req.primary.ack_timeout) = (three, three, few);
            (req.psn, req.primary.traffic_class) = (Psn::new(psn), extreme);
        });
        let CmEvent::Request { request, .. } = net.one(B) else { panic!("no request") };
        let side = request.side;
        assert_eq!((side.responder_resources, side.initiator_depth), (extreme, extreme));
        assert_eq!((request.retry_count, side.rnr_retry, request.ack_timeout), (three, three, few));
        assert_eq!((side.psn, request.traffic_class), (Psn::new(psn), extreme));
    }
}

// ---- everything else that the connected peer can say ----

/// All messages about a connection, each with its numeric fields at their limits. The ids are
/// right.
fn messages(local: CommId, remote: CommId) -> Vec<CmMessage<'static>> {
    let rep = Rep {
        local,
        remote,
        qkey: 0,
        qpn: Qpn::new(0x99),
        announced: None,
        psn: Psn::new(1),
        responder_resources: 1,
        initiator_depth: 1,
        target_ack_delay: 1,
        failover: 0,
        flow_control: false,
        rnr_retry: 1,
        srq: false,
        ca_guid: 77,
        private: b"",
    };
    let everything = Announced {
        bytes: u32::MAX,
        datagrams: u32::MAX,
        queue: Some(QueueKind::Frames),
        answers: false,
    };
    let reps = [
        rep,
        Rep { local: CommId(0), ..rep },
        Rep { local: CommId(u32::MAX), ..rep },
        Rep { qkey: u32::MAX, ca_guid: u64::MAX, ..rep },
        Rep { ca_guid: 0, psn: Psn::new(0xff_ffff), ..rep },
        Rep { qpn: Qpn::new(0), ..rep },
        Rep { qpn: Qpn::new(1), ..rep },
        Rep { qpn: Qpn::MULTICAST, ..rep },
        Rep {
            announced: Some(Announced { bytes: 0, datagrams: 0, queue: None, answers: false }),
            ..rep
        },
        Rep { announced: Some(everything), ..rep },
        Rep {
            responder_resources: 0,
            initiator_depth: 0,
            target_ack_delay: 0,
            rnr_retry: 0,
            ..rep
        },
        Rep {
            responder_resources: 255,
            initiator_depth: 255,
            target_ack_delay: 31,
            failover: 3,
            rnr_retry: 7,
            ..rep
        },
    ];
    let mut all: Vec<_> = reps.into_iter().map(CmMessage::Rep).collect();
    for subject in [Subject::Req, Subject::Rep, Subject::Other, Subject::Reserved] {
        for service_timeout in [0, 1, 24, 30, 31] {
            all.push(CmMessage::Mra(Mra { local, remote, subject, service_timeout, private: b"" }));
        }
        for reason in [0, 1, 4, 10, 28, 33, 34, u16::MAX] {
            let (reason, info) = (RejReason(reason), &[0xff; 72][..]);
            all.push(CmMessage::Rej(Rej { local, remote, subject, reason, info, private: b"" }));
        }
    }
    for qpn in [0, 1, 0x11, 0x22, 0xff_ffff] {
        let remote_qpn = Qpn::new(qpn);
        all.push(CmMessage::Dreq(Dreq { local, remote, remote_qpn, private: b"" }));
        all.push(CmMessage::Lap(Lap { local, remote, remote_qpn }));
    }
    all.push(CmMessage::Rtu(Rtu { local, remote, private: b"" }));
    all.push(CmMessage::Drep(Drep { local, remote, private: b"" }));
    all.extend([0, 1, u8::MAX].map(|status| CmMessage::Apr(Apr { local, remote, status })));
    all
}

#[test]
fn no_value_of_any_message_in_any_state_makes_us_wait_for_long_or_leaves_anything() {
    for step in STEPS {
        for to in [A, B] {
            for index in 0..messages(CommId(1), CommId(2)).len() {
                let (mut net, a, b) = at(step);
                let (local, remote) = if to == B { (a.0, b.0) } else { (b.0, a.0) };
                let message = messages(local, remote)[index];
                for tid in [0, u64::MAX] {
                    let (now, mad) = (net.now, message.emit(tid));
                    net.cm[to].handle_mad(now, address(1 - to), address(to), &mad);
                    assert_waits_no_longer(&net, to, &(step, message));
                    net.take(to);
                }
                finish(net, a, b, step);
            }
        }
    }
}

/// Every attribute with a body of zeros and of ones, from the peer, with right and wrong ids.
#[test]
fn no_message_of_all_zeros_or_all_ones_does_any_harm_in_any_state() {
    for (step, to) in STEPS.into_iter().flat_map(|step| [(step, A), (step, B)]) {
        let (mut net, a, b) = at(step);
        let rtu = CmMessage::Rtu(Rtu { local: a.0, remote: b.0, private: b"" }).emit(1);
        for attribute in 0x0f..=0x1bu8 {
            for (fill, whole) in [(0, true), (0xff, true), (0, false), (0xff, false)] {
                let mut mad = rtu;
                // Fills everything behind the header, or behind the ids.
                mad[if whole { 24 } else { 32 }..].fill(fill);
                mad[17] = attribute;
                if to == A && !whole {
                    mad[24..28].copy_from_slice(&b.0.0.to_be_bytes());
                    mad[28..32].copy_from_slice(&a.0.0.to_be_bytes());
                }
                net.cm[to].handle_mad(net.now, address(1 - to), address(to), &mad);
                assert_waits_no_longer(&net, to, &(step, attribute, fill));
                net.take(to);
            }
        }
        finish(net, a, b, step);
    }
}

/// A REJ states the length of its additional information. No more is read than the field holds.
#[test]
fn the_length_of_additional_information_is_limited() {
    let (local, remote) = (CommId(1), CommId(2));
    let (subject, reason) = (Subject::Req, RejReason::TIMEOUT);
    let rej = Rej { local, remote, subject, reason, info: b"", private: b"" };
    for len in 0..=127u8 {
        let mut mad = CmMessage::Rej(rej).emit(1);
        mad[24 + 9] = len << 1;
        let Ok((_, CmMessage::Rej(rej))) = CmMessage::parse(&mad) else { panic!("no rejection") };
        assert_eq!(rej.info.len(), usize::from(len).min(Rej::INFO_LEN));
    }
}

// ---- datagram services ----

#[test]
fn no_value_of_a_question_or_an_answer_does_any_harm() {
    let service = ServiceId::of_port(PortSpace::Udp, 7174);
    let mut net = Net::new();
    net.cm[B].listen_datagrams(service, None, 1).unwrap();
    for request in [0, 1, u32::MAX] {
        for service in [service, ServiceId(0), ServiceId(u64::MAX)] {
            for pkey in [0, 0x7fff, 0xffff] {
                for tid in [0, u64::MAX] {
                    let ask = SidrReq { request, pkey: Pkey(pkey), service, private: &[0xff; 216] };
                    let (now, mad) = (net.now, CmMessage::SidrReq(ask).emit(tid));
                    net.cm[B].handle_mad(now, address(A), address(B), &mad);
                    let sent = net.cm[B].poll_transmit().expect("an answer").mad;
                    let Ok((header, CmMessage::SidrRep(rep))) = CmMessage::parse(&sent) else {
                        panic!("no answer")
                    };
                    assert_eq!((header.tid, rep.request, rep.service), (tid, request, service));
                }
            }
        }
    }
    assert_eq!((net.take(B), net.cm[B].poll_timeout()), (vec![], None), "nothing is kept");
    for (status, qpn, qkey) in [(0, 0, 0), (0, 0xff_ffff, u32::MAX), (1, 7, 9), (255, 7, 9)] {
        let (now, way) = (net.now, (address(A), address(B)));
        let query: SidrQueryId = net.cm[A].resolve(now, way, (service, 40_000), b"").unwrap();
        let sent = net.cm[A].poll_transmit().unwrap().mad;
        let Ok((header, CmMessage::SidrReq(ask))) = CmMessage::parse(&sent) else { panic!() };
        let (request, service, qpn) = (ask.request, ask.service, Qpn::new(qpn));
        let (info, private) = (&[0xff; 72][..], &[0xff; 136][..]);
        let status = SidrStatus(status);
        let rep = SidrRep { request, status, qpn, service, qkey, info, private };
        let mad = CmMessage::SidrRep(rep).emit(header.tid);
        net.cm[A].handle_mad(now, address(B), address(A), &mad);
        let expected = if status == SidrStatus::SUCCESS {
            CmEvent::Resolved { query, qpn, qkey, private: private.to_vec() }
        } else {
            CmEvent::Unresolved { query, status: Some(status), private: private.to_vec() }
        };
        assert_eq!(net.one(A), expected);
        assert!(net.cm[A].is_empty());
    }
}

/// Our own configuration may have absurd values, too.
#[test]
fn a_configuration_of_absurd_values_is_brought_to_what_a_message_can_say() {
    let absurd = |side| CmConfig {
        response_timeout: 255,
        packet_lifetime: 255,
        max_retries: 255,
        service_timeout: 255,
        ..config(side)
    };
    let mut net = Net::with(absurd, 1);
    let config = *net.cm[A].config();
    assert_eq!((config.response_timeout, config.packet_lifetime), (31, 31));
    assert_eq!((config.max_retries, config.service_timeout), (15, 31));
    net.listen(1);
    let (_, b) = net.asked(0x11);
    let accept = Accept { side: side(0x22), keep_alive: None, private: b"" };
    net.cm[B].accept(net.now, ConnId(b.0), &accept).unwrap();
    net.run(1);
    assert!(matches!(net.one(A), CmEvent::Replied { .. }));
}
