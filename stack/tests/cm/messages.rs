//! Messages sent: their transactions, the data that fits, and the lack of room.

use rocinante_stack::cm::{Accept, CmError, CmEvent};
use rocinante_stack::types::Qpn;
use rocinante_stack::wire::cm::{CmMessage, PortSpace, RejReason, ServiceId};

use crate::net::{A, B, Net, address, ask, side};

const UDP: ServiceId = ServiceId::of_port(PortSpace::Udp, 7174);

#[test]
fn what_does_not_fit_into_a_message_is_refused() {
    let mut net = Net::new();
    let qp = Ok((Qpn::new(0x55), 0x1234));
    let too_long = |max| Err(CmError::PrivateTooLong { max });
    net.cm[B].listen_datagrams(UDP, None, 1).unwrap();
    let (now, way) = (net.now, (address(A), address(B)));
    assert!(net.cm[A].resolve(now, way, (UDP, 40_000), &[1; 181]).is_err());
    net.cm[A].resolve(now, way, (UDP, 40_000), &[1; 180]).unwrap();
    net.run(1);
    let CmEvent::Asked { ask: question, .. } = net.one(B) else { panic!("no question") };
    assert_eq!(net.cm[B].answer(now, question, qp, &[1; 137]), too_long(136));
    assert_eq!(net.cm[B].answer(now, question, qp, &[1; 136]), Ok(()));
    net.run(1);
    assert!(matches!(net.one(A), CmEvent::Resolved { private, .. } if private[..] == [1; 136]));
    assert_eq!(
        net.cm[A].connect(now, &ask(0x11, &[1; 57])),
        Err(CmError::PrivateTooLong { max: 56 })
    );
    net.listen(1);
    net.cm[A].connect(now, &ask(0x11, &[1; 56])).unwrap();
    net.run(1);
    let CmEvent::Request { conn, request, .. } = net.one(B) else { panic!() };
    assert_eq!(request.private[..], [1; 56]);
    let accept = Accept { side: side(0x22), keep_alive: None, private: &[1; 197] };
    assert_eq!(net.cm[B].accept(now, conn, &accept), too_long(196));
    assert_eq!(net.cm[B].reject(conn, RejReason::CONSUMER, &[1; 149]), too_long(148));
    net.cm[B].accept(now, conn, &Accept { private: &[1; 196], ..accept }).unwrap();
    net.run(1);
    let CmEvent::Replied { conn, reply } = net.one(A) else { panic!() };
    assert_eq!(reply.private[..], [1; 196]);
    assert_eq!(net.cm[A].establish(conn, &[1; 225]), too_long(224));
    assert_eq!(net.cm[A].establish(conn, &[1; 224]), Ok(()));
    let now = net.now;
    assert_eq!(net.cm[A].disconnect(now, conn, &[1; 221]), too_long(220));
    assert_eq!(net.cm[A].disconnect(now, conn, &[1; 220]), Ok(()));
}

#[test]
fn what_found_no_room_is_still_to_be_sent() {
    let mut net = Net::new();
    assert!(!net.cm[A].wants_transmit());
    for qpn in [0x11, 0x12] {
        net.connect(qpn);
    }
    let first = net.cm[A].poll_transmit().unwrap();
    net.cm[A].put_back(first);
    assert!(net.cm[A].wants_transmit());
    assert_eq!(net.cm[A].poll_transmit(), Some(first), "the oldest is the first again");
    assert!(net.cm[A].wants_transmit() && net.cm[A].poll_transmit().is_some());
    assert!(!net.cm[A].wants_transmit());
    assert_eq!(net.cm[A].counters().sent, 2);
}

/// An answer names its question by the transaction id: two questions have two transactions.
#[test]
fn each_question_is_a_transaction_of_its_own() {
    let mut net = Net::new();
    net.listen(2);
    let (a, _) = net.connected(0x11, 0x22);
    net.cm[A].disconnect(net.now, a, b"").unwrap();
    let end = net.cm[A].poll_transmit().unwrap();
    net.connect(0x12);
    let ask = net.cm[A].poll_transmit().unwrap();
    let [end, ask] = [&end, &ask].map(|sent| CmMessage::parse(&sent.mad).unwrap());
    let (CmMessage::Dreq(dreq), CmMessage::Req(req)) = (end.1, ask.1) else { panic!() };
    for (tid, id) in [(end.0.tid, dreq.local), (ask.0.tid, req.local)] {
        assert_eq!(tid as u32, id.0, "it ends with the number of the connection");
        assert_ne!(tid >> 32, 0, "and begins with an unknown one");
    }
}
