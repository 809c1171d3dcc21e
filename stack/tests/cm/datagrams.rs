//! Datagram services for which the program decides.

use rocinante_stack::cm::{Asked, CmError, CmEvent, ListenerId, SidrQueryId, SidrReqId};
use rocinante_stack::types::{Pkey, Qpn};
use rocinante_stack::wire::cm::{
    CmMessage, IpHeader, PortSpace, ServiceId, SidrRep, SidrReq, SidrStatus,
};
use rocinante_stack::wire::mad::MadBytes;

use crate::net::{A, B, MS, Net, address, unresolved};

const UDP: ServiceId = ServiceId::of_port(PortSpace::Udp, 7174);
const QP: (Qpn, u32) = (Qpn::new(0x77), 0x0123_4567);

fn listen(net: &mut Net, backlog: usize) -> ListenerId {
    net.cm[B].listen_datagrams(UDP, None, backlog).unwrap()
}

fn resolve(net: &mut Net) -> SidrQueryId {
    let (now, way) = (net.now, (address(A), address(B)));
    net.cm[A].resolve(now, way, (UDP, 40_000), b"who").unwrap()
}

/// The only question that B received.
#[track_caller]
fn asked(net: &mut Net) -> (SidrReqId, Box<Asked>) {
    let CmEvent::Asked { ask, asked, .. } = net.one(B) else { panic!("no question") };
    (ask, asked)
}

fn answer(net: &mut Net, ask: SidrReqId) -> Result<(), CmError> {
    let now = net.now;
    net.cm[B].answer(now, ask, Ok(QP), b"here")
}

/// A question of A, with this number.
fn question(request: u32, tid: u64) -> MadBytes {
    let header = IpHeader { src: (address(A), 40_000).into(), dst: address(B) };
    let (pkey, private) = (Pkey::DEFAULT, &header.bytes()[..]);
    CmMessage::SidrReq(SidrReq { request, pkey, service: UDP, private }).emit(tid)
}

fn receive(net: &mut Net, mad: &[u8]) {
    net.cm[B].handle_mad(net.now, address(A), address(B), mad);
}

/// The status of B's next answer.
fn status(net: &mut Net) -> Option<SidrStatus> {
    let transmit = net.cm[B].poll_transmit()?;
    let Ok((_, CmMessage::SidrRep(rep))) = CmMessage::parse(&transmit.mad) else {
        panic!("no answer")
    };
    Some(rep.status)
}

#[test]
fn the_program_answers_each_question_with_a_queue_pair() {
    let mut net = Net::new();
    let listener = listen(&mut net, 4);
    let query = resolve(&mut net);
    net.run(1);
    let CmEvent::Asked { listener: of, ask, asked } = net.one(B) else { panic!("no question") };
    assert_eq!((of, asked.local, asked.peer), (listener, address(B), (address(A), 40_000).into()));
    assert_eq!(
        (asked.service, asked.private.len(), &asked.private[..4]),
        (UDP, 180, &b"who\0"[..])
    );
    answer(&mut net, ask).unwrap();
    assert_eq!(answer(&mut net, ask), Err(CmError::Unknown), "once only");
    net.run(1);
    let CmEvent::Resolved { query: of, qpn, qkey, private } = net.one(A) else { panic!("nothing") };
    assert_eq!((of, (qpn, qkey), &private[..5]), (query, QP, &b"here\0"[..]));
    // The answer is kept for a while, and then discarded.
    net.cm[B].unlisten_datagrams(net.now, listener, |_| true);
    assert!(!net.cm[B].is_empty());
    net.run(61_000);
    assert!(net.cm[A].is_empty() && net.cm[B].is_empty());
    assert_eq!(net.take(B), vec![]);
}

#[test]
fn a_lost_answer_comes_again_and_the_program_is_asked_once() {
    let mut net = Net::new();
    listen(&mut net, 4);
    resolve(&mut net);
    net.run(1);
    let (ask, _) = asked(&mut net);
    net.mute[B] = true;
    answer(&mut net, ask).unwrap();
    net.run(1000);
    net.mute[B] = false;
    net.run(1000);
    assert!(matches!(net.one(A), CmEvent::Resolved { .. }));
    assert_eq!(net.take(B), vec![]);
    assert!(net.cm[B].counters().duplicates >= 2);
}

/// The time for which an answer is kept does not depend on the time that the program took to
/// decide.
#[test]
fn an_answer_is_kept_from_when_it_was_given() {
    let mut net = Net::new();
    listen(&mut net, 4);
    receive(&mut net, &question(5, 1));
    let (ask, _) = asked(&mut net);
    net.run(60_000);
    answer(&mut net, ask).unwrap();
    assert_eq!(status(&mut net), Some(SidrStatus::SUCCESS));
    net.run(59_000);
    receive(&mut net, &question(5, 1));
    assert_eq!((status(&mut net), net.take(B)), (Some(SidrStatus::SUCCESS), vec![]));
    net.run(2_000);
    assert_eq!(net.cm[B].poll_timeout(), None, "and no longer than for a minute");
}

#[test]
fn who_refuses_says_so() {
    let mut net = Net::new();
    let listener = listen(&mut net, 4);
    let query = resolve(&mut net);
    net.run(1);
    let ((ask, _), now) = (asked(&mut net), net.now);
    net.cm[B].answer(now, ask, Err(SidrStatus::REJECT), b"no").unwrap();
    net.run(1);
    assert_eq!(net.one(A), unresolved(query, Some(SidrStatus::REJECT), b"no"));
    // After the listener stops, B refuses the questions that its program has not seen.
    let [heard, unheard] = [0, 1].map(|_| resolve(&mut net));
    net.run(1);
    let events = net.take(B);
    let CmEvent::Asked { ask: first, .. } = &events[0] else { panic!("no question") };
    net.cm[B].unlisten_datagrams(net.now, listener, |ask| ask == *first);
    net.run(1);
    assert_eq!(net.one(A), unresolved(unheard, Some(SidrStatus::REJECT), b""));
    answer(&mut net, *first).unwrap();
    net.run(1);
    assert!(matches!(net.one(A), CmEvent::Resolved { query, .. } if query == heard));
}

#[test]
fn a_program_that_never_answers_loses_the_question() {
    let mut net = Net::new();
    let listener = listen(&mut net, 4);
    let query = resolve(&mut net);
    net.run(1);
    let (ask, _) = asked(&mut net);
    net.run(10_000);
    assert_eq!(net.one(A), unresolved(query, None, b""));
    net.run(70_000);
    assert_eq!(net.one(B), CmEvent::AskOver { ask });
    assert_eq!(answer(&mut net, ask), Err(CmError::Unknown));
    assert_eq!(net.cm[B].counters().timeouts, 1);
    net.cm[B].unlisten_datagrams(net.now, listener, |_| false);
    assert!(net.cm[A].is_empty() && net.cm[B].is_empty());
}

#[test]
fn a_flood_is_limited_to_the_backlog_and_leaves_nothing_behind() {
    let mut net = Net::new();
    let listener = listen(&mut net, 8);
    for n in 0..5000 {
        receive(&mut net, &question(n, u64::from(n) + 9));
    }
    let events = net.take(B);
    assert_eq!(events.len(), 8);
    let counters = *net.cm[B].counters();
    assert_eq!((counters.requests, counters.backlog_overflow, counters.sent), (8, 4992, 0));
    // Each decision frees a place in the backlog.
    let CmEvent::Asked { ask, .. } = events[3] else { panic!("no question") };
    answer(&mut net, ask).unwrap();
    receive(&mut net, &question(9000, 1));
    receive(&mut net, &question(9001, 1));
    assert!(matches!(net.one(B), CmEvent::Asked { .. }));
    net.run(70_000);
    assert_eq!(net.take(B).len(), 8, "each of those that wait is over once");
    net.cm[B].unlisten_datagrams(net.now, listener, |_| false);
    assert!(net.cm[B].is_empty());
}

#[test]
fn a_question_again_is_none() {
    let mut net = Net::new();
    listen(&mut net, 8);
    for _ in 0..100 {
        receive(&mut net, &question(5, 1));
    }
    let (ask, _) = asked(&mut net);
    assert_eq!(net.cm[B].counters().duplicates, 99);
    // While the question waits, the same number in another exchange is not from this peer.
    receive(&mut net, &question(5, 2));
    assert_eq!(net.cm[B].counters().stray, 1);
    answer(&mut net, ask).unwrap();
    assert_eq!(status(&mut net), Some(SidrStatus::SUCCESS));
    for _ in 0..3 {
        receive(&mut net, &question(5, 1));
        assert_eq!(status(&mut net), Some(SidrStatus::SUCCESS));
    }
    assert_eq!(net.take(B), vec![]);
    // Afterwards it is another question: the peer has started again.
    receive(&mut net, &question(5, 2));
    let (again, _) = asked(&mut net);
    assert_ne!(again, ask);
}

#[test]
fn answers_that_are_kept_are_limited() {
    let mut net = Net::new();
    listen(&mut net, 8);
    for n in 0..1025 {
        receive(&mut net, &question(n, 1));
        let (ask, _) = asked(&mut net);
        answer(&mut net, ask).unwrap();
        assert_eq!(status(&mut net), Some(SidrStatus::SUCCESS));
    }
    receive(&mut net, &question(1, 1));
    assert_eq!((status(&mut net), net.take(B)), (Some(SidrStatus::SUCCESS), vec![]));
    receive(&mut net, &question(0, 1));
    let _asked_again = asked(&mut net);
}

#[test]
fn questions_that_contradict_themselves_are_refused_or_dropped() {
    let mut net = Net::new();
    listen(&mut net, 8);
    let whole = question(5, 1);
    for len in 0..whole.len() {
        receive(&mut net, &whole[..len]);
    }
    assert_eq!(net.cm[B].counters().malformed, whole.len() as u64);
    // The header names another address; the header is missing; the service is another.
    let elsewhere = IpHeader { src: (address(A), 40_000).into(), dst: address(A) }.bytes();
    let other = ServiceId::of_port(PortSpace::Udp, 7175);
    let tcp = ServiceId::of_port(PortSpace::Tcp, 7174);
    let good = IpHeader { src: (address(A), 40_000).into(), dst: address(B) }.bytes();
    for (service, private) in [(UDP, &elsewhere[..]), (UDP, &[]), (other, &good), (tcp, &good)] {
        let ask = SidrReq { request: 7, pkey: Pkey::DEFAULT, service, private };
        receive(&mut net, &CmMessage::SidrReq(ask).emit(3));
        assert_eq!(status(&mut net), Some(SidrStatus::UNSUPPORTED), "{service:?}");
    }
    assert_eq!(net.take(B), vec![]);
}

#[test]
fn an_answer_to_nothing_is_counted() {
    let mut net = Net::new();
    let query = resolve(&mut net);
    let mad = net.cm[A].poll_transmit().unwrap().mad;
    let Ok((header, CmMessage::SidrReq(ask))) = CmMessage::parse(&mad) else {
        panic!("no question")
    };
    let (status, service) = (SidrStatus::SUCCESS, ask.service);
    let (qpn, qkey) = QP;
    let good =
        SidrRep { request: ask.request, status, qpn, service, qkey, info: &[], private: &[] };
    let other = ServiceId::of_port(PortSpace::Udp, 1);
    let now = net.now;
    let mut stray = 0;
    for (from, rep, tid) in [
        (B, SidrRep { request: !ask.request, ..good }, header.tid),
        (B, SidrRep { service: other, ..good }, header.tid),
        (B, good, header.tid + 1),
        (A, good, header.tid),
    ] {
        stray += 1;
        net.cm[A].handle_mad(now, address(from), address(A), &CmMessage::SidrRep(rep).emit(tid));
        assert_eq!((net.cm[A].counters().stray, net.take(A)), (stray, vec![]));
    }
    net.cm[A].handle_mad(now, address(B), address(A), &CmMessage::SidrRep(good).emit(header.tid));
    assert!(matches!(net.one(A), CmEvent::Resolved { query: of, .. } if of == query));
    net.cm[A].handle_mad(now, address(B), address(A), &CmMessage::SidrRep(good).emit(header.tid));
    assert_eq!((net.cm[A].counters().stray, net.take(A)), (5, vec![]));
    assert!(net.cm[A].is_empty() && net.now.since(now) < MS);
}

#[test]
fn a_place_is_one_programs() {
    let mut net = Net::new();
    let (service, cm) = (UDP, &mut net.cm[B]);
    cm.listen_datagrams(service, None, 1).unwrap();
    assert_eq!(cm.listen_datagrams(service, None, 1), Err(CmError::InUse));
    cm.listen_datagrams(service, Some(address(B)), 1).unwrap();
    assert_eq!(cm.listen_datagrams(service, Some(address(B)), 1), Err(CmError::InUse));
    let long = [0; 137];
    let now = net.now;
    assert_eq!(
        net.cm[B].answer(now, SidrReqId(1), Ok(QP), &long),
        Err(CmError::PrivateTooLong { max: 136 })
    );
    assert_eq!(net.cm[B].answer(now, SidrReqId(1), Ok(QP), b""), Err(CmError::Unknown));
}
