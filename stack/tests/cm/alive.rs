//! Peers that end without a word while nothing is in flight, and peers that are only silent.

use rocinante_stack::cm::{ASKS, CmConfig, CmEvent, ConnId, ConnectionManager, Ended, Transmit};
use rocinante_stack::types::{Qpn, Time};
use rocinante_stack::wire::cm::{Announced, CmMessage, CommId};
use rocinante_stack::wire::{AliveMad, Pairs};

use crate::net::{A, B, FLIGHT, MS, Net, address, config, disconnected, released};

const PERIOD: u64 = 10_000 * MS;
/// A dead peer's connection has ended after this many milliseconds without any answer.
const NOTICED: u64 = 14_500;

/// Both sides ask and answer.
fn watching(side: usize) -> CmConfig {
    CmConfig { keep_alive: PERIOD, answers: true, ..config(side) }
}

fn both() -> Net {
    Net::with(watching, 1)
}

fn watched() -> (Net, ConnId, ConnId) {
    let mut net = both();
    net.listen(1_024);
    let (a, b) = net.connected(0x11, 0x22);
    net.sent();
    (net, a, b)
}

fn count(net: &mut Net, what: (usize, &str)) -> usize {
    net.sent().iter().filter(|sent| **sent == what).count()
}

/// The next datagram of a side, before the other gets it.
fn intercepted(net: &mut Net, side: usize) -> Transmit {
    let until = net.now.after(20_000 * MS);
    loop {
        let cm = &mut net.cm[side];
        if let Some(transmit) = cm.poll_transmit() {
            return transmit;
        }
        let due = cm.poll_timeout().filter(|due| *due <= until).expect("something is due");
        net.now = net.now.max(due);
        cm.handle_timeout(net.now);
        while let Some((conn, _)) = cm.poll_look() {
            cm.looked(net.now, conn, None);
        }
    }
}

fn hear(net: &mut Net, side: usize, tid: u64, mad: AliveMad) {
    net.cm[side].handle_mad(net.now, address(1 - side), address(side), &mad.emit(tid));
}

// ---- deaths ----

#[test]
fn a_peer_that_dies_while_idle_is_noticed_by_either_side() {
    for dead in [A, B] {
        for idle_before in [0, 60_000, 61_300] {
            let (mut net, a, b) = watched();
            net.run(idle_before);
            net.mute[dead] = true;
            let (died, lives) = (net.now, 1 - dead);
            let (conn, qpn) = if lives == A { (a, 0x11) } else { (b, 0x22) };
            net.sent();
            let until = died.after(NOTICED * MS);
            while net.heard[lives].is_empty() && net.step(until) {}
            assert_eq!(net.one(lives), disconnected(conn, Ended::Gone), "{idle_before}");
            assert_eq!(count(&mut net, (lives, "question")), usize::from(ASKS));
            assert_eq!(net.cm[lives].counters().silent_peers, 1);
            // It ends once, and as any other.
            net.run(60_000);
            assert_eq!(net.take(lives), [released(conn, qpn)]);
            assert_eq!((net.cm[lives].len(), net.cm[lives].poll_timeout()), (0, None));
        }
    }
}

/// The manager's count of received packets is at most one look old.
#[test]
fn a_peer_that_dies_in_the_middle_of_traffic_is_noticed_as_soon() {
    for extra in [0, 1, 250, 499, 500, 501, 999] {
        let (mut net, _, b) = watched();
        for _ in 0..100 {
            for (side, qpn) in [(A, 0x11), (B, 0x22)] {
                *net.packets[side].entry(Qpn::new(qpn)).or_default() += 1;
            }
            net.run(331);
        }
        net.run(extra);
        *net.packets[B].entry(Qpn::new(0x22)).or_default() += 1;
        assert_eq!(count(&mut net, (B, "question")), 0, "while packets come");
        net.mute[A] = true;
        let died = net.now;
        let until = died.after(NOTICED * MS);
        while net.heard[B].is_empty() && net.step(until) {}
        assert_eq!(net.one(B), disconnected(b, Ended::Gone), "{extra}");
        assert!(net.now.since(died) > PERIOD, "{extra}");
    }
}

/// It has been idle for long, sends once more, and dies before the next look.
#[test]
fn a_peer_that_dies_after_its_last_words_is_noticed_as_soon() {
    for last_words in (0..10_000).step_by(700) {
        let (mut net, _, b) = watched();
        net.run(40_000 + last_words);
        *net.packets[B].entry(Qpn::new(0x22)).or_default() += 1;
        net.mute[A] = true;
        let until = net.now.after(NOTICED * MS);
        while net.heard[B].is_empty() && net.step(until) {}
        assert_eq!(net.one(B), disconnected(b, Ended::Gone), "{last_words}");
    }
}

#[test]
fn a_connection_in_use_is_not_asked_about() {
    for idle in [0, 35_000] {
        let (mut net, ..) = watched();
        net.run(idle);
        net.sent();
        for round in 0..1_000 {
            for (side, qpn) in [(A, 0x11), (B, 0x22)] {
                *net.packets[side].entry(Qpn::new(qpn)).or_default() += 1;
            }
            net.run(100);
            assert!(round < 100 || net.sent().is_empty(), "{round}");
        }
        assert_eq!((net.take(A), net.take(B)), (vec![], vec![]));
    }
}

#[test]
fn what_follows_at_the_address_says_no_at_once() {
    let (mut net, _, b) = watched();
    net.run(5_000);
    // It has an own connection from the same queue pair, but other ids.
    net.restart(A, 77);
    net.cm[A] = ConnectionManager::new(CmConfig { key: [77, 77], ..watching(A) });
    net.run(5_001);
    assert_eq!(net.take(B)[0], disconnected(b, Ended::Gone));
    assert_eq!((count(&mut net, (B, "question")), net.cm[B].counters().denied), (1, 1));
    assert_eq!(net.cm[A].counters().asked_alive, 0);
}

/// The new process has a connection by the same two queue pairs' numbers.
#[test]
fn a_successor_with_the_same_queue_pairs_does_not_keep_the_old_connection() {
    let (mut net, _, old) = watched();
    // B died, and another B begins with the same numbers: A asks for the old one.
    net.cm[B] = ConnectionManager::new(CmConfig { key: [78, 78], ca_guid: 1, ..watching(B) });
    net.heard[B].clear();
    net.listen(4);
    net.cm[A].forget(net.now, ConnId(CommId(1)));
    let a = {
        assert_eq!(net.take(A), []);
        net.connect(0x12)
    };
    net.run(1);
    let CmEvent::Request { conn: b, .. } = net.one(B) else { panic!() };
    assert_ne!(b, old);
    net.accept(b, 0x23);
    net.run(1);
    assert!(matches!(net.one(A), CmEvent::Replied { .. }));
    net.cm[A].establish(a, b"").unwrap();
    net.run(12_000);
    let ended = net.take(A);
    assert!(matches!(ended[0], CmEvent::Disconnected { ended: Ended::Gone, .. }), "{ended:?}");
    assert!(!ended.contains(&disconnected(a, Ended::Gone)), "the new one lives");
    net.run(60_000);
    assert_eq!((net.cm[A].len(), net.cm[B].len()), (1, 1));
}

/// B gave up one of two connections, and its messages were lost.
#[test]
fn of_two_connections_the_one_that_the_peer_has_not_ends() {
    let (mut net, kept, _) = watched();
    let (lost, b) = net.connected(0x12, 0x23);
    net.mute[B] = true;
    net.cm[B].forget(net.now, b);
    net.run(7_500);
    net.take(B);
    assert_eq!(net.cm[B].len(), 1);
    net.mute[B] = false;
    net.run(3_500);
    assert_eq!(net.take(A), [disconnected(lost, Ended::Gone), released(lost, 0x12)]);
    net.run(60_000);
    assert_eq!(net.take(A), []);
    assert_eq!(net.cm[A].counters().denied, 1);
    assert_ne!(kept, lost);
}

// ---- peers that live ----

#[test]
fn an_idle_peer_that_answers_keeps_its_connection_and_one_of_the_two_asks() {
    let (mut net, ..) = watched();
    net.run(100_000);
    assert_eq!((net.take(A), net.take(B)), (vec![], vec![]));
    let sent = net.sent();
    let of = |what| sent.iter().filter(|sent| **sent == what).count();
    let asked = of((B, "question"));
    assert!((9..=10).contains(&asked), "every ten seconds: {asked}");
    assert_eq!((of((A, "question")), of((A, "answer"))), (0, asked), "the one that accepted");
    assert_eq!(sent.len(), 2 * asked);
}

#[test]
fn lost_questions_and_lost_answers_are_no_deaths() {
    for lost in 1..ASKS {
        for mute in [A, B] {
            let (mut net, ..) = watched();
            net.mute[mute] = true;
            while count(&mut net, (B, "question")) == 0 {
                assert!(net.step(net.now.after(20_000 * MS)));
            }
            net.run(u64::from(lost) * 1_000 - 500);
            net.mute[mute] = false;
            net.run(2_000);
            assert_eq!((net.take(A), net.take(B)), (vec![], vec![]), "{lost} {mute}");
            net.run(30_000);
            assert_eq!((net.cm[A].len(), net.cm[B].len()), (1, 1));
        }
    }
}

/// The answer to the first question comes after the third.
#[test]
fn a_peer_that_is_only_slow_lives() {
    let (mut net, ..) = watched();
    let first = intercepted(&mut net, B);
    let Some((tid, AliveMad::Question(pairs))) = AliveMad::parse(&first.mad) else { panic!() };
    for _ in 1..ASKS {
        let again = intercepted(&mut net, B);
        let said = AliveMad::parse(&again.mad);
        assert_eq!(said, Some((tid, AliveMad::Question(pairs))), "the same question");
    }
    net.now = net.now.after(900 * MS);
    hear(&mut net, B, tid, AliveMad::Answer(pairs, 1));
    net.run(5_000);
    assert_eq!(net.take(B), []);
    assert_eq!((net.cm[B].counters().asked_alive, net.cm[B].len()), (3, 1));
}

#[test]
fn a_thousand_idle_connections_wake_their_device_as_often_as_one() {
    let (mut net, ..) = watched();
    for qpn in 0..1_000 {
        net.connected(0x1000 + qpn, 0x2000 + qpn);
        net.run(7);
    }
    net.run(20_000);
    net.sent();
    net.wakes = [0; 2];
    net.run(100_000);
    assert_eq!((net.take(A), net.take(B)), (vec![], vec![]));
    let [a, b] = net.wakes;
    assert!(b <= 10 * 8 && a == 0, "{a} and {b} in ten periods");
    // Each is asked about every ten seconds, many at once.
    let asked = net.cm[B].counters().asked_alive;
    assert!(asked > 9 * 1_000, "{asked}");
    assert_eq!(net.cm[A].counters().asked_alive, 0);
}

// ---- which side asks, and which is asked ----

#[test]
fn a_side_that_does_not_ask_answers_all_the_same() {
    for off in [A, B] {
        let keep_alive = |side| if side == off { 0 } else { PERIOD };
        let with = |side| CmConfig { keep_alive: keep_alive(side), ..watching(side) };
        let mut net = Net::with(with, 1);
        net.listen(4);
        net.connected(0x11, 0x22);
        net.run(60_000);
        let asked = [A, B].map(|side| net.cm[side].counters().asked_alive);
        assert_eq!((asked[off], asked[1 - off] >= 5), (0, true));
        assert_eq!((net.cm[A].len(), net.cm[B].len()), (1, 1));
        assert_eq!(net.cm[off].poll_timeout(), None, "nothing is due where nothing is asked");
    }
}

/// A standard peer announces nothing; a device without a thread of its own does not
/// announce that it answers.
#[test]
fn peers_that_do_not_answer_are_never_asked() {
    for mute in [A, B] {
        let with = |side| CmConfig { answers: side != mute, ..watching(side) };
        let mut net = Net::with(with, 1);
        net.listen(4);
        net.connected(0x11, 0x22);
        net.sent();
        net.mute[mute] = true;
        net.run(60_000);
        assert_eq!(count(&mut net, (1 - mute, "question")), 0);
        assert_eq!(net.cm[1 - mute].len(), 1);
    }
}

#[test]
fn a_connection_may_have_a_period_of_its_own() {
    let mut net = both();
    net.listen(4);
    let now = net.now;
    let ask =
        |keep_alive| rocinante_stack::cm::Connect { keep_alive, ..crate::net::ask(0x11, b"") };
    for (at, keep_alive) in [Some(0), Some(3_000 * MS), None].into_iter().enumerate() {
        let qpn = 0x11 + at as u32;
        let mut ask = ask(keep_alive);
        ask.side.qpn = Qpn::new(qpn);
        let a = net.cm[A].connect(now, &ask).unwrap();
        net.run(1);
        let CmEvent::Request { conn: b, request, .. } = net.one(B) else { panic!() };
        let announced = Announced { answers: true, ..Announced::default() };
        assert_eq!(request.side.announced, Some(announced), "nothing of its queue");
        net.accept(b, 0x22 + at as u32);
        net.run(1);
        net.take(A);
        net.cm[A].establish(a, b"").unwrap();
        net.run(1);
        net.take(B);
    }
    net.mute[B] = true;
    net.run(7_000);
    assert_eq!(net.take(A).len(), 2, "the one of 3 s has ended, and is released");
    net.run(8_000);
    assert_eq!(net.take(A).len(), 2, "the one of 10 s");
    net.run(60_000);
    assert_eq!((net.take(A), net.cm[A].len()), (vec![], 1));
}

/// Questions are for one device of several at an address.
#[test]
fn a_question_names_one_device_of_an_address() {
    let slot = |side: usize| Some(if side == A { 3 } else { 9 });
    let mut net = Net::with(|side| CmConfig { slot: slot(side), ..watching(side) }, 1);
    net.listen(64);
    for qpn in 0..40 {
        net.connected(0x03_0011 + qpn, 0x09_0022 + qpn);
    }
    let mut asked = 0;
    for _ in 0..2 {
        let question = intercepted(&mut net, B);
        let Some((tid, AliveMad::Question(pairs))) = AliveMad::parse(&question.mad) else {
            panic!()
        };
        assert_eq!(tid as u32 >> 24, 9, "the answer comes back");
        assert!(pairs.iter().all(|(ours, theirs)| (ours.0 >> 24, theirs.0 >> 24) == (9, 3)));
        assert!(question.via.is_some_and(|qpn| qpn.slot() == 9));
        asked += pairs.iter().count();
    }
    assert_eq!(asked, 40);
}

// ---- hostile ----

#[test]
fn answers_without_a_question_change_nothing() {
    let (mut net, a, b) = watched();
    let pair = Pairs::new([(b.0, a.0)]);
    // Before any question, with any id.
    for tid in [0, 1, u64::MAX] {
        for known in [0, 1] {
            hear(&mut net, B, tid, AliveMad::Answer(pair, known));
        }
    }
    let question = intercepted(&mut net, B);
    let Some((tid, said)) = AliveMad::parse(&question.mad) else { panic!() };
    assert_eq!(said, AliveMad::Question(pair));
    let wrong = [
        (tid ^ 1, pair),
        (0, pair),
        (tid, Pairs::new([(b.0, CommId(a.0.0 ^ 1))])),
        (tid, Pairs::new([(CommId(b.0.0 ^ 1), a.0)])),
        (tid, Pairs::new([(a.0, b.0)])),
    ];
    for (tid, pairs) in wrong {
        for known in [0, 1] {
            hear(&mut net, B, tid, AliveMad::Answer(pairs, known));
        }
    }
    // From a third, and to another address of ours.
    let (now, third) = (net.now, "10.0.0.3".parse().unwrap());
    let no = AliveMad::Answer(pair, 0).emit(tid);
    net.cm[B].handle_mad(now, third, address(B), &no);
    net.cm[B].handle_mad(now, address(A), third, &no);
    assert_eq!((net.take(B), net.cm[B].len()), (vec![], 1));
    assert_eq!(net.cm[B].counters().stray, 6 + 10 + 2);
    // None of them was a sign of the peer either.
    net.mute[A] = true;
    net.run(3_500);
    assert_eq!(net.take(B)[0], disconnected(b, Ended::Gone));
}

#[test]
fn an_answer_counts_once() {
    let (mut net, a, b) = watched();
    let question = intercepted(&mut net, B);
    let Some((tid, _)) = AliveMad::parse(&question.mad) else { panic!() };
    let yes = AliveMad::Answer(Pairs::new([(b.0, a.0)]), 1);
    hear(&mut net, B, tid, yes);
    // The same again and again, and a "no" with the old id.
    net.mute[A] = true;
    for _ in 0..140 {
        net.run(100);
        hear(&mut net, B, tid, yes);
        let no = AliveMad::Answer(Pairs::new([(b.0, a.0)]), 0);
        if net.cm[B].counters().asked_alive == 1 {
            hear(&mut net, B, tid, no);
        }
    }
    assert_eq!(net.take(B)[0], disconnected(b, Ended::Gone), "the peer is dead all the same");
    assert_eq!(net.cm[B].counters().denied, 0);
}

/// A question tells its sender nothing that it does not know already; and it ends nothing.
#[test]
fn questions_of_strangers_are_answered_with_no_and_keep_nothing_alive() {
    let (mut net, a, b) = watched();
    let (now, third) = (net.now, "10.0.0.3".parse().unwrap());
    let many = Pairs::new((0..30).map(|n| (CommId(n), CommId(n + 1))));
    let cases = [
        (third, Pairs::new([(a.0, b.0)])),
        (address(A), Pairs::new([(CommId(a.0.0 ^ 1), b.0)])),
        (address(A), many),
    ];
    for (src, pairs) in cases {
        net.cm[B].handle_mad(now, src, address(B), &AliveMad::Question(pairs).emit(5));
        let answer = net.cm[B].poll_transmit().unwrap();
        assert_eq!((answer.local, answer.remote, answer.via), (address(B), src, None));
        assert_eq!(AliveMad::parse(&answer.mad), Some((5, AliveMad::Answer(pairs, 0))));
        assert_eq!(net.cm[B].poll_transmit(), None);
    }
    // The peer's own question counts as a sign of it.
    net.mute[A] = true;
    net.run(9_000);
    hear(&mut net, B, 6, AliveMad::Question(Pairs::new([(a.0, b.0)])));
    net.run(9_000);
    assert_eq!(net.take(B), []);
    net.run(6_000);
    assert_eq!(net.take(B)[0], disconnected(b, Ended::Gone));
}

/// A notice is not believed. It has the peer be asked, once a second at most.
#[test]
fn a_notice_makes_us_ask_and_ends_nothing() {
    let (mut net, ..) = watched();
    net.run(3_000);
    net.sent();
    for _ in 0..200 {
        hear(&mut net, B, 1, AliveMad::Notice(Qpn::new(0x11)));
        hear(&mut net, B, 1, AliveMad::Notice(Qpn::new(0x12)));
        net.run(10);
    }
    assert!((1..=3).contains(&count(&mut net, (B, "question"))));
    assert_eq!((net.take(B), net.cm[B].len()), (vec![], 1));
    // The successor at the address sends a notice, and is asked.
    net.cm[A] = ConnectionManager::new(CmConfig { key: [9, 9], ..watching(A) });
    net.run(1_500);
    hear(&mut net, B, 1, AliveMad::Notice(Qpn::new(0x11)));
    net.run(1);
    assert!(matches!(net.one(B), CmEvent::Disconnected { ended: Ended::Gone, .. }));
}

#[test]
fn what_is_said_before_and_after_a_connection_is_answered_with_no() {
    let mut net = both();
    net.listen(4);
    let (a, b) = net.asked(0x11);
    let asks = |net: &mut Net, side: usize, pair| {
        hear(net, side, 7, AliveMad::Question(Pairs::new([pair])));
        loop {
            let answer = net.cm[side].poll_transmit().expect("an answer");
            if let Some((7, AliveMad::Answer(_, known))) = AliveMad::parse(&answer.mad) {
                return known;
            }
        }
    };
    assert_eq!(asks(&mut net, B, (a.0, b.0)), 0, "undecided");
    net.accept(b, 0x22);
    assert_eq!(asks(&mut net, B, (a.0, b.0)), 1, "accepted");
    net.run(10_000);
    let _ = [A, B].map(|side| net.take(side));
    let (a, b) = net.connected(0x12, 0x23);
    assert_eq!([asks(&mut net, A, (b.0, a.0)), asks(&mut net, B, (a.0, b.0))], [1, 1]);
    net.leave(A, a);
    assert_eq!([asks(&mut net, A, (b.0, a.0)), asks(&mut net, B, (a.0, b.0))], [0, 0]);
}

/// Real messages with changed bytes, to either side, at any time.
#[test]
fn damaged_questions_and_answers_do_no_harm() {
    for seed in 1..100 {
        let mut net = Net::with(watching, seed);
        net.listen(4);
        let (a, b) = net.connected(0x11, 0x22);
        let mut seen = Vec::new();
        for _ in 0..60 {
            let until = net.now.after(2_000 * MS);
            for side in [A, B] {
                let cm = &mut net.cm[side];
                while let Some(due) = cm.poll_timeout().filter(|due| *due <= until) {
                    cm.handle_timeout(due.max(net.now));
                    while let Some((conn, _)) = cm.poll_look() {
                        cm.looked(due.max(net.now), conn, None);
                    }
                }
                while let Some(sent) = net.cm[side].poll_transmit() {
                    seen.push((side, sent.mad));
                    let (now, other) = (net.now, 1 - side);
                    net.cm[other].handle_mad(now, address(side), address(other), &sent.mad);
                }
            }
            net.now = until;
            for _ in 0..if seen.is_empty() { 0 } else { 4 } {
                let (side, mut mad) = seen[net.random(seen.len() as u64) as usize];
                for _ in 0..net.random(4) {
                    let at = [16, 40, 56][net.random(3) as usize] + net.random(16) as usize;
                    mad[at] ^= 1 << net.random(8);
                }
                let to = net.random(2) as usize;
                let (now, from) = (net.now, if side == to { 1 - side } else { side });
                net.cm[to].handle_mad(now, address(from), address(to), &mad);
            }
            assert!(net.cm[A].len() <= 1 && net.cm[B].len() <= 1);
        }
        for (side, conn) in [(A, a), (B, b)] {
            net.cm[side].forget(net.now, conn);
        }
        net.run(60_000);
        for side in [A, B] {
            net.take(side);
        }
        net.assert_nothing_left();
    }
}

// ---- ends of time ----

#[test]
fn the_end_of_the_clock_and_periods_without_end_do_no_harm() {
    for keep_alive in [1, 999, PERIOD, u64::MAX] {
        for start in [0, 1, u64::MAX - 30_000 * MS, u64::MAX - 3 * FLIGHT] {
            let with = |side| CmConfig { keep_alive, ..watching(side) };
            let mut net = Net::with(with, 1);
            net.now = Time(start);
            net.listen(4);
            let b = net.connect(0x11);
            net.run(1);
            let asked = net.take(B);
            let [CmEvent::Request { conn, .. }] = asked[..] else { continue };
            net.replied(conn, 0x22);
            let _ = net.cm[A].establish(b, b"");
            for _ in 0..400 {
                if !net.step(Time(u64::MAX - 1)) {
                    break;
                }
            }
            let ended = [A, B].map(|side| {
                net.take(side).iter().any(|it| matches!(it, CmEvent::Disconnected { .. }))
            });
            assert_eq!(ended, [false, false], "{keep_alive} {start}");
        }
    }
}

/// Messages of other implementations on QP1 are none of these, and the other way round.
#[test]
fn they_are_no_messages_of_the_communication_manager() {
    let (mut net, a, b) = watched();
    assert!(CmMessage::parse(&AliveMad::Question(Pairs::new([(b.0, a.0)])).emit(1)).is_err());
    hear(&mut net, B, 1, AliveMad::Unknown);
    assert_eq!(net.cm[B].counters().malformed, 1);
    assert_eq!(net.cm[B].poll_transmit(), None);
}
