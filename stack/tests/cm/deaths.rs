//! Peers that die, and queue pair numbers that are used again.

use rocinante_stack::cm::{CmEvent, Ended};
use rocinante_stack::wire::cm::{CmMessage, Rej, RejReason, Subject};

use crate::net::{A, B, Net, address, disconnected, released};
use crate::scenarios::{FOR_EVER, rejection};

#[test]
fn a_peer_that_died_and_asks_again_with_the_same_queue_pair_ends_the_old_connection() {
    let mut net = Net::new();
    net.listen(4);
    let (_, b) = net.connected(0x11, 0x22);
    net.restart(A, 99);
    let again = net.connect(0x11);
    net.run(1);
    // The new request is rejected, the old connection ends, and the next attempt succeeds, when no
    // packet of the old connection can come any more.
    assert_eq!(rejection(&net.one(A)), RejReason::STALE_CONNECTION);
    assert_eq!(net.take(B)[0], disconnected(b, Ended::Stale));
    assert_eq!(net.cm[B].counters().stale, 1);
    net.run(500);
    assert_eq!(net.one(B), released(b, 0x22));
    assert_eq!(net.one(A), released(again, 0x11));
    net.connected(0x11, 0x22);
}

#[test]
fn a_peer_that_died_is_told_when_the_old_connection_speaks() {
    let (mut net, a, _) = Net::joined();
    net.restart(B, 99);
    net.leave(A, a);
    // B does not know the connection, and answers that it has ended.
    assert_eq!(net.one(A), disconnected(a, Ended::ByUs));
    net.run(500);
    net.take(A);
    net.assert_nothing_left();
}

#[test]
fn the_asker_dies_at_each_step() {
    // After the REQ: no connection waits for the reply, and A says so.
    let (mut net, _, b) = Net::asking();
    net.restart(A, 99);
    net.accept(b, 0x22);
    net.run(1);
    assert_eq!(rejection(&net.one(B)), RejReason::INVALID_COMM_ID);
    net.run(500);
    net.take(B);
    net.assert_nothing_left();
    // After the REQ, and the address is gone too: the reply is repeated up to the limit.
    let (mut net, _, b) = Net::asking();
    net.restart(A, 99);
    net.mute[A] = true;
    net.accept(b, 0x22);
    net.run(10_000);
    assert_eq!(net.take(B), [CmEvent::TimedOut { conn: b }, released(b, 0x22)]);
    net.assert_nothing_left();
    // Before the DREQ is answered.
    let mut net = Net::new();
    net.listen(4);
    let (_, b) = net.connected(0x11, 0x22);
    net.restart(A, 99);
    net.mute[A] = true;
    net.cm[B].disconnect(net.now, b, b"").unwrap();
    net.run(10_000);
    assert_eq!(net.take(B), [disconnected(b, Ended::Unanswered), released(b, 0x22)]);
    net.assert_nothing_left();
}

#[test]
fn the_listener_dies_at_each_step() {
    // Before it answers.
    let mut net = Net::new();
    net.listen(1);
    net.asked(0x11);
    net.restart(B, 99);
    net.run(500);
    assert_eq!(rejection(&net.take(A)[0]), RejReason::INVALID_SERVICE_ID);
    // After its reply: the connection exists on one side only, and ends with its disconnect.
    let (mut net, c, d) = Net::asking();
    net.replied(d, 0x22);
    net.restart(B, 99);
    net.cm[A].establish(c, b"").unwrap();
    net.run(1);
    net.leave(A, c);
    assert_eq!(net.one(A), disconnected(c, Ended::ByUs));
}

/// Either side may enter TIMEWAIT before the other: by the flight time of a message, or longer if a
/// message is lost.
#[test]
fn who_has_waited_uses_its_number_again_while_the_peer_still_waits() {
    for first in [A, B] {
        let mut net = Net::new();
        net.listen(2);
        let (a, b) = net.connected(0x1000, 0x2000);
        let now = net.now;
        // The first side to learn of the end waits longest: the DREP is lost, and repeated.
        let (conn, other) = if first == A { (a, B) } else { (b, A) };
        net.cm[first].disconnect(now, conn, b"").unwrap();
        net.mute[other] = true;
        net.run(10);
        net.mute[other] = false;
        net.run(1000);
        let ended = [A, B].map(|side| net.take(side));
        assert!(ended.iter().flatten().count() >= 3, "{ended:?}");
        // The number is free at A, even if B still waits.
        net.cm[A].forget(now, a);
        let (a, b) = net.connected(0x1000, 0x2001);
        assert_eq!(net.cm[B].counters().stale, 0);
        net.leave(A, a);
        assert_eq!(net.one(B), disconnected(b, Ended::ByPeer));
        net.run(FOR_EVER);
        net.take(A);
        assert_eq!(net.take(B), vec![released(b, 0x2001)]);
        net.assert_nothing_left();
    }
}

/// The DREP is lost, and the side that sent it has left TIMEWAIT before the DREQ is repeated. The
/// side that still waits for the DREP accepts the peer's number again as well.
#[test]
fn who_has_waited_uses_its_number_again_while_the_peer_still_asks_for_the_end() {
    for first in [A, B] {
        let mut net = Net::new();
        net.listen(2);
        let (a, b) = net.connected(0x1000, 0x2000);
        let (asks, answers) = if first == A { (a, B) } else { (b, A) };
        net.cm[first].disconnect(net.now, asks, b"").unwrap();
        net.mute[answers] = true;
        net.run(200);
        net.mute[answers] = false;
        let ended = net.take(answers);
        assert!(matches!(ended[..], [_, CmEvent::Released { .. }]), "{ended:?}");
        assert_eq!(net.take(first), vec![], "it still asks");
        // The side that is done uses its number again; the other side uses a new one.
        let numbers = if first == A { (0x1001, 0x2000) } else { (0x1000, 0x2001) };
        net.connected(numbers.0, numbers.1);
        assert_eq!([A, B].map(|side| net.cm[side].counters().stale), [0, 0]);
        // The DREQ is answered although the connection is no longer known.
        net.run(1000);
        let number = if first == A { 0x1000 } else { 0x2000 };
        assert_eq!(net.take(first), vec![disconnected(asks, Ended::ByUs), released(asks, number)]);
        assert_eq!(net.take(answers), vec![]);
    }
}

/// A rejection that comes late: the peer has given up before it knew that the connection is
/// established, or has forgotten it. Each ends the one connection that it names, with the peer's
/// words, and its queue pair's number is not used again at once.
#[test]
fn a_rejection_ends_a_connection_that_has_begun() {
    for (at, begun) in [(A, "replied"), (B, "replied"), (A, "established"), (B, "established")] {
        let mut net = Net::new();
        net.listen(4);
        let others = net.connected(0x11, 0x22);
        let (a, b) = if begun == "established" {
            net.connected(0x33, 0x44)
        } else {
            let (a, b) = net.asked(0x33);
            net.accept(b, 0x44);
            net.run(1);
            (a, b)
        };
        let _ = [A, B].map(|side| net.take(side));
        let (own, peer, qpn) = if at == A { (a, b, 0x33) } else { (b, a, 0x44) };
        let rej = |local| Rej {
            local,
            remote: own.0,
            subject: Subject::Rep,
            reason: RejReason::TIMEOUT,
            info: &[],
            private: b"too late",
        };
        let now = net.now;
        let hears = |net: &mut Net, rej: Rej<'_>| {
            net.cm[at].handle_mad(now, address(1 - at), address(at), &CmMessage::Rej(rej).emit(9));
            net.take(at)
        };
        // Of another connection of the same peer.
        let stranger = if at == A { others.1 } else { others.0 };
        assert_eq!(hears(&mut net, rej(stranger.0)), [], "{begun}");
        let ends = hears(&mut net, rej(peer.0));
        let private = [&b"too late"[..], &[0; 140]].concat();
        let reason = RejReason::TIMEOUT;
        let expected = if begun == "established" {
            disconnected(own, Ended::Rejected { reason, private })
        } else {
            CmEvent::Rejected { conn: own, reason, private }
        };
        assert_eq!(ends, [expected], "{begun}");
        assert_eq!(hears(&mut net, rej(peer.0)), [], "once");
        net.run(500);
        assert_eq!(net.take(at), [released(own, qpn)], "{begun}");
        assert_eq!(net.cm[at].len(), 1, "the other goes on");
    }
}
