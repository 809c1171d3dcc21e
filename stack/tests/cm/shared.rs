//! Two devices on one address: the messages of a peer whose queue pair is in a connection of one of
//! them lead there, although they are for the other.

use rocinante_stack::cm::{CmConfig, ConnId, Connect, ConnectionManager, Ended, Noted};
use rocinante_stack::types::Time;
use rocinante_stack::wire::MadBytes;
use rocinante_stack::wire::cm::{CmMessage, CommId, PortSpace, RejReason, Rep, ServiceId};

use crate::net::{A, B, Net, address, ask, config, disconnected, released};
use crate::scenarios::rejection;

const SLOT: u8 = 3;
/// A service that the device with the connection has no listener for.
const ELSEWHERE: ServiceId = ServiceId::of_port(PortSpace::Tcp, 7472);

/// B has a connection to the queue pair 0x11 of A, which has forgotten it.
fn bereaved() -> (Net, ConnId) {
    let of_b = CmConfig { slot: Some(SLOT), ..config(B) };
    let mut net = Net::with(|side| if side == B { of_b } else { config(side) }, 1);
    net.listen(4);
    let (_, b) = net.connected(0x11, 0x03_0022);
    net.restart(A, 99);
    (net, b)
}

/// A's request for the other device's service.
fn request(qpn: u32, now: Time) -> MadBytes {
    let mut asker = ConnectionManager::new(CmConfig { key: [5, 5], ..config(A) });
    let ask = Connect { service: ELSEWHERE, ..ask(qpn, b"") };
    asker.connect(now, &ask).unwrap();
    asker.poll_transmit().unwrap().mad
}

/// The reason of B's next message, which is a rejection.
fn refused(net: &mut Net, mad: &MadBytes) -> RejReason {
    let now = net.now;
    net.cm[B].handle_mad(now, address(A), address(B), mad);
    let sent = net.cm[B].poll_transmit().unwrap();
    match CmMessage::parse(&sent.mad).unwrap().1 {
        CmMessage::Rej(rej) => rej.reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_request_for_the_other_device_ends_the_old_connection_of_its_queue_pair() {
    let (mut net, b) = bereaved();
    let now = net.now;
    assert_eq!(refused(&mut net, &request(0x12, now)), RejReason::INVALID_SERVICE_ID);
    assert_eq!(net.take(B), []);
    assert_eq!(refused(&mut net, &request(0x11, now)), RejReason::STALE_CONNECTION);
    assert_eq!(net.take(B), [disconnected(b, Ended::Stale)]);
    net.run(500);
    assert_eq!(net.take(B), [released(b, 0x03_0022)]);
    assert_eq!(refused(&mut net, &request(0x11, now)), RejReason::INVALID_SERVICE_ID);
}

#[test]
fn a_reply_to_the_other_device_ends_the_old_connection_of_its_queue_pair() {
    let (mut net, b) = bereaved();
    let reply = |asker: u32, qpn: u32| {
        let mut replier = Net::new();
        replier.listen(1);
        let (_, conn) = replier.asked(0x77);
        replier.accept(conn, qpn);
        let sent = replier.cm[B].poll_transmit().unwrap();
        let (header, CmMessage::Rep(rep)) = CmMessage::parse(&sent.mad).unwrap() else {
            panic!("no reply")
        };
        let guid = config(A).ca_guid;
        CmMessage::Rep(Rep { remote: CommId(asker), ca_guid: guid, ..rep }).emit(header.tid)
    };
    let (own, others) = (u32::from(SLOT) << 24 | 9, 4 << 24 | 9);
    for (asker, qpn) in [(own, 0x11), (others, 0x12)] {
        let unknown = RejReason::INVALID_COMM_ID;
        assert_eq!(refused(&mut net, &reply(asker, qpn)), unknown, "{asker:#x}");
    }
    assert_eq!(net.take(B), []);
    assert_eq!(refused(&mut net, &reply(others, 0x11)), RejReason::STALE_CONNECTION);
    assert_eq!(net.take(B), [disconnected(b, Ended::Stale)]);
}

/// So requests that wait have no more locks than there may be connections.
#[test]
fn a_request_beyond_the_limit_is_refused_and_noted_by_none() {
    let of_b = CmConfig { slot: Some(SLOT), max_connections: 2, ..config(B) };
    let mut net = Net::with(|side| if side == B { of_b } else { config(side) }, 1);
    net.listen(4);
    for qpn in [0x11, 0x12] {
        net.asked(qpn);
    }
    net.connect(0x13);
    net.run(1);
    assert_eq!(rejection(&net.take(A)[0]), RejReason::NO_RESOURCES);
    let notes: Vec<Noted> = std::iter::from_fn(|| net.cm[B].poll_note()).collect();
    assert_eq!(notes.len(), 2, "{notes:?}");
    assert!(notes.iter().all(|it| matches!(it, Noted::Request { is_held: true, .. })));
}
