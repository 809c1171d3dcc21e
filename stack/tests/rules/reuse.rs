//! Two queue pairs: one after another in the same slot, and one beside another. A successor
//! inherits nothing of its predecessor, and a destroyed queue pair takes nothing from its
//! neighbour.

use rocinante_stack::types::{Key, Qpn};
use rocinante_stack::verbs::{Destination, QpState, QpType, SendOp};
use rocinante_stack::wire::{NakCode, Opcode as Op, Syndrome};
use rocinante_stack::{PeerAddress, PeerKind, Urgency};

use crate::common::{End, PD, PEER, QKEY, Setup, Solo, addr, qp_init, sge, to};

pub(crate) fn setup() -> Setup {
    Setup { qps: 2, held: 8, rnr_retry: 3, ..Setup::script() }
}

/// The peer's queue pair number for the second queue pair.
pub(crate) const OTHER: Qpn = Qpn::new(0x78);

/// Two connected queue pairs. Posts and packets concern the first, until `turn_to`.
pub(crate) fn two() -> Solo {
    let setup = setup();
    let mut solo = Solo::new(&setup);
    solo.end.connect(solo.end.qpns[1], 0, OTHER, &setup);
    solo
}

pub(crate) fn turn_to(solo: &mut Solo, qpn: Qpn) {
    solo.end.qpn = qpn;
}

// ---- queue pairs ----

/// The activity of a queue pair when it goes away.
type Past = (&'static str, fn(&mut Solo));

const PASTS: [Past; 17] = [
    ("nothing", |_| {}),
    ("requests that have not left", |solo| _ = solo.sends(1..=3, 10)),
    ("requests under way", |solo| {
        solo.sends(1..=3, 10).sent();
    }),
    ("requests that go again", |solo| {
        solo.sends(1..=3, 10).sent();
        solo.receive_gap(0, &[1]);
    }),
    ("a READ and an atomic under way", |solo| {
        solo.read(1, 700);
        solo.add(2, 4096).sent();
        solo.receive_data(Op::RC_RDMA_READ_RESPONSE_FIRST, 0, &[7; 256]);
    }),
    ("a pause for a receive", |solo| {
        solo.send(1, 10).sent();
        solo.receive_rnr(0, 31);
    }),
    ("a peer that grants no receives", |solo| {
        solo.send(1, 10).sent();
        solo.receive_syndrome(0, Syndrome(0));
    }),
    ("a timeout", |solo| {
        solo.send(1, 10).sent();
        solo.wait(4096 << 14);
    }),
    ("half a message", |solo| {
        solo.post_recv(95, &[solo.sge(8192, 700)]);
        solo.receive_request(Op::RC_SEND_FIRST, 0, &[&[9; 256]]);
    }),
    ("half a WRITE", |solo| {
        solo.receive_request(Op::RC_RDMA_WRITE_FIRST, 0, &[&solo.reth(12_000, 700), &[9; 256]]);
    }),
    ("responses that are due", |solo| {
        let (read, add) = (solo.reth(12_000, 700), solo.atomic_eth(13_000, 1, 0));
        solo.receive_request(Op::RC_RDMA_READ_REQUEST, 0, &[&read]);
        solo.receive_request(Op::RC_FETCH_ADD, 3, &[&add]);
    }),
    ("responses that are kept", |solo| {
        let (read, add) = (solo.reth(12_000, 700), solo.atomic_eth(13_000, 1, 0));
        solo.receive_request(Op::RC_RDMA_READ_REQUEST, 0, &[&read]);
        solo.receive_request(Op::RC_FETCH_ADD, 3, &[&add]).sent();
    }),
    ("packets that are held", |solo| {
        for psn in 1..4 {
            solo.receive_request(Op::RC_SEND_ONLY, psn, &[&[9; 8]]);
        }
    }),
    ("a NAK that is due", |solo| _ = solo.receive_request(Op::RC_SEND_ONLY, 0, &[&[9; 8]])),
    ("an acknowledgement that is due", |solo| {
        solo.receive_request(Op::RC_RDMA_WRITE_ONLY, 0, &[&solo.reth(12_000, 8), &[9; 8]]);
    }),
    ("a failure", |solo| {
        solo.sends(1..=3, 10).sent();
        solo.receive_nak(1, NakCode::RemoteAccessError);
    }),
    ("a request that was refused", |solo| {
        solo.receive_request(Op::RC_SEND_LAST, 0, &[&[9; 8]]);
    }),
];

/// A way in which a queue pair goes away and another, or the same, takes its place.
type Successor = (&'static str, fn(&mut End, Qpn));

const SUCCESSORS: [Successor; 3] = [
    ("reset", |end, qpn| end.modify(qpn, &to(QpState::Reset)).unwrap()),
    ("broken and reset", |end, qpn| {
        end.modify(qpn, &to(QpState::Err)).unwrap();
        end.modify(qpn, &to(QpState::Reset)).unwrap();
    }),
    ("destroyed and made anew", |end, qpn| {
        end.engine.destroy_qp(qpn).unwrap();
        let init = qp_init(&setup());
        assert_eq!(end.engine.create_qp(&init, qpn.value()), Some(qpn), "its number is free");
    }),
];

/// All packets, completions and events of a queue pair in a mixed conversation.
fn conversation(solo: &mut Solo) -> Vec<String> {
    let mut said = Vec::new();
    let list = [solo.sge(20_000, 700)];
    (90..93).for_each(|wr_id| solo.post_recv(wr_id, &list));
    solo.sends(1..=2, 300);
    solo.read(3, 300);
    solo.add(4, 4096);
    said.extend(solo.sent());
    said.push(format!("{:?}", solo.end.engine.poll_timeout()));
    // A packet out of order, then the missing one; a READ and its duplicate.
    solo.receive_request(Op::RC_SEND_ONLY, 1, &[&[2; 8]]);
    said.extend(solo.sent());
    solo.receive_request(Op::RC_SEND_ONLY, 0, &[&[1; 8]]);
    let header = solo.reth(0, 300);
    for _ in 0..2 {
        solo.receive_request(Op::RC_RDMA_READ_REQUEST, 2, &[&header]);
        said.extend(solo.sent());
    }
    solo.receive_ack(1);
    solo.receive_gap(2, &[3]);
    said.extend(solo.sent());
    solo.receive_ack(3);
    solo.receive_data(Op::RC_RDMA_READ_RESPONSE_FIRST, 4, &[7; 256]);
    solo.receive_data(Op::RC_RDMA_READ_RESPONSE_LAST, 5, &[7; 44]);
    solo.receive_found(6, 77);
    solo.send(5, 10);
    said.extend(solo.sent());
    for _ in 0..30 {
        if solo.wait_for_timer().is_none() {
            break;
        }
        said.extend(solo.sent());
    }
    said.extend(solo.completed().iter().map(|done| format!("{done:?}")));
    said.extend(std::iter::from_fn(|| solo.event()).map(|event| format!("{event:?}")));
    said.push(format!("{}", solo.state()));
    said
}

/// Discards everything that is still pending.
fn quiet(solo: &mut Solo) {
    solo.sent();
    solo.completed();
    while solo.event().is_some() {}
    solo.end.host.arena.fill(0);
}

#[test]
fn a_queue_pair_in_the_place_of_another_begins_with_nothing_of_it() {
    for (past, live) in PASTS {
        for (how, succeed) in SUCCESSORS {
            let mut solo = two();
            let qpn = solo.end.qpn;
            live(&mut solo);
            succeed(&mut solo.end, qpn);
            assert!(!how.contains("anew") || solo.end.engine.urgency() == Urgency::Idle, "{past}");
            while solo.event().is_some() {}
            assert_eq!(solo.end.engine.poll_timeout(), None, "{past}, {how}");
            assert_eq!(solo.sent(), [""; 0], "{past}, {how}");
            let left = solo.end.engine.footprint();
            assert_eq!(
                (left.timers, left.waiting_for_credit, left.in_flight_packets),
                (0, 0, 0),
                "{past}, {how}"
            );
            assert_eq!(
                (left.reordered_packets, left.responder_resources, left.in_flight_lists),
                (0, 0, 0),
                "{past}, {how}"
            );
            assert_eq!((left.credit_users, left.queued), (1, 0), "{past}, {how}: the other's");
            solo.end.connect(qpn, 0, PEER, &setup());
            quiet(&mut solo);
            // The same with a queue pair that has no past, at the same time.
            let mut fresh = two();
            fresh.now = solo.now;
            quiet(&mut fresh);
            let expected = conversation(&mut fresh);
            assert!(expected.iter().any(|said| said.contains("RetryExcErr")), "{expected:?}");
            assert_eq!(conversation(&mut solo), expected, "{past}, {how}");
        }
    }
}

/// One of two queue pairs in the same situation goes away. The other continues as if it had been
/// alone.
#[test]
fn a_queue_pair_that_goes_takes_nothing_of_another_along() {
    for (past, live) in PASTS.into_iter().filter(|(past, _)| !past.contains("timeout")) {
        let goes_on = |leaves: Option<fn(&mut End, Qpn)>| {
            let mut solo = two();
            let [first, second] = [solo.end.qpns[0], solo.end.qpns[1]];
            for qpn in [first, second] {
                turn_to(&mut solo, qpn);
                live(&mut solo);
            }
            // Both have sent everything that was due.
            solo.sent();
            solo.completed();
            if let Some(leaves) = leaves {
                leaves(&mut solo.end, first);
                while solo.event().is_some() {}
                solo.completed();
            } else {
                solo.end.modify(first, &to(QpState::Reset)).unwrap();
                while solo.event().is_some() {}
            }
            turn_to(&mut solo, second);
            let mut said = solo.sent();
            for _ in 0..20 {
                if solo.wait_for_timer().is_none() {
                    break;
                }
                said.extend(solo.sent());
            }
            said.extend(solo.completed().iter().map(|done| format!("{done:?}")));
            said.push(format!("{} {:?}", solo.state(), solo.end.engine.footprint()));
            said
        };
        let expected = goes_on(None);
        for (how, leaves) in SUCCESSORS {
            assert_eq!(goes_on(Some(leaves)), expected, "{past}, {how}");
        }
    }
}

/// Events and completions of a destroyed queue pair are not delivered, those of the other are.
#[test]
fn events_of_a_queue_pair_that_is_gone_go_with_it() {
    let mut solo = two();
    let [first, second] = [solo.end.qpns[0], solo.end.qpns[1]];
    for qpn in [second, first] {
        turn_to(&mut solo, qpn);
        solo.receive_request(Op::RC_SEND_LAST, 0, &[&[9; 8]]);
    }
    solo.end.engine.destroy_qp(first).unwrap();
    assert_eq!(solo.end.engine.create_qp(&qp_init(&setup()), first.value()), Some(first));
    let events: Vec<_> = std::iter::from_fn(|| solo.end.engine.poll_event()).collect();
    assert_eq!(events.iter().map(|(qpn, _)| *qpn).collect::<Vec<_>>(), [second]);
}

/// Any number of times: numbers, slots and shared resources are as at first.
#[test]
fn queue_pairs_come_and_go_without_end() {
    let mut solo = two();
    let before = solo.end.engine.footprint();
    let setup = setup();
    for round in 0..200 {
        let init = qp_init(&setup);
        let made =
            [7, 7, 9].map(|random| solo.end.engine.create_qp(&init, random + round).unwrap());
        for qpn in made {
            solo.end.connect(qpn, 0, PEER, &setup);
        }
        for qpn in [made[1], made[0], made[2]] {
            solo.end.engine.destroy_qp(qpn).unwrap();
        }
    }
    assert_eq!(solo.end.engine.footprint(), before);
}

// ---- unreliable queue pairs ----

/// The activity of an unreliable queue pair when it goes away.
const UNRELIABLE_PASTS: [Past; 6] = [
    ("nothing", |_| {}),
    ("requests that have not left", |solo| (1..=3).for_each(|wr_id| say(solo, wr_id, 1))),
    ("requests that are paced", |solo| {
        for wr_id in 0..500 {
            if solo.sent().is_empty() && wr_id > 0 {
                break;
            }
            (0..20).for_each(|_| say(solo, wr_id, 200));
        }
        assert!(solo.end.engine.poll_timeout().is_some(), "they wait for their time");
    }),
    ("a local error", |solo| {
        let op = speech(solo);
        solo.post(1, op, &[sge(0, 8, Key(0x1234_5600))]).sent();
        assert_eq!(solo.state(), QpState::Sqe);
    }),
    ("a queue that is drained", |solo| {
        solo.end.modify(solo.end.qpn, &to(QpState::Sqd)).unwrap();
        say(solo, 1, 1);
    }),
    ("half a message", |solo| {
        solo.post_recv(95, &[solo.sge(8192, 700)]);
        receive_first(solo);
    }),
];

fn receive_first(solo: &mut Solo) {
    if solo.setup.qp_type == QpType::Uc {
        solo.receive_request(Op::UC_SEND_FIRST, 0, &[&[9; 256]]);
    }
}

fn speech(solo: &mut Solo) -> SendOp {
    if solo.setup.qp_type == QpType::Uc {
        return SendOp::Send { imm: None };
    }
    let (budget, kind) = (solo.setup.budget, PeerKind::announced(solo.setup.budget, None));
    let to = PeerAddress { local: addr(1), remote: addr(2), path: 0, budget, kind };
    let ah = solo.end.engine.create_ah(PD, &to).unwrap();
    SendOp::SendTo { to: Destination { ah, qpn: PEER, qkey: QKEY }, imm: None }
}

fn say(solo: &mut Solo, wr_id: u64, len: u32) {
    let op = speech(solo);
    solo.post(wr_id, op, &[solo.sge(0, len)]);
}

/// All packets and completions of an unreliable queue pair.
fn words(solo: &mut Solo) -> Vec<String> {
    let list = [solo.sge(20_000, 700)];
    (90..93).for_each(|wr_id| solo.post_recv(wr_id, &list));
    for psn in 0..2 {
        let deth = [QKEY.to_be_bytes(), 0x77u32.to_be_bytes()].concat();
        match solo.setup.qp_type {
            QpType::Uc => solo.receive_request(Op::UC_SEND_ONLY, psn, &[&[1; 8]]),
            _ => solo.receive_request(Op::UD_SEND_ONLY, psn, &[&deth, &[1; 8]]),
        };
    }
    // A packet that continues no message is dropped.
    if solo.setup.qp_type == QpType::Uc {
        solo.receive_request(Op::UC_SEND_LAST, 2, &[&[1; 8]]);
    }
    (1..=3).for_each(|wr_id| say(solo, wr_id, 10));
    let mut said = solo.sent();
    said.extend(solo.completed().iter().map(|done| format!("{done:?}")));
    said.push(format!("{} {:?}", solo.state(), solo.end.engine.poll_timeout()));
    said
}

#[test]
fn an_unreliable_queue_pair_in_the_place_of_another_begins_with_nothing_of_it() {
    for qp_type in [QpType::Uc, QpType::Ud] {
        let setup = Setup { qp_type, ..setup() };
        for (past, live) in UNRELIABLE_PASTS {
            for anew in [false, true] {
                let mut solo = Solo::new(&setup);
                let qpn = solo.end.qpn;
                live(&mut solo);
                if anew {
                    solo.end.engine.destroy_qp(qpn).unwrap();
                    assert_eq!(solo.end.engine.create_qp(&qp_init(&setup), qpn.value()), Some(qpn));
                } else {
                    solo.end.modify(qpn, &to(QpState::Reset)).unwrap();
                }
                assert_eq!(solo.end.engine.poll_timeout(), None, "{qp_type}: {past}");
                assert_eq!(solo.sent(), [""; 0], "{qp_type}: {past}");
                assert_eq!(solo.end.engine.footprint().queued, 0, "{qp_type}: {past}");
                solo.end.connect(qpn, 0, PEER, &setup);
                // Pacing is per peer: let its account recover.
                solo.now = solo.now.after(1 << 40);
                quiet(&mut solo);
                let mut fresh = Solo::new(&setup);
                fresh.now = solo.now;
                let expected = words(&mut fresh);
                assert_eq!(expected.len(), 9, "three packets, five completions: {expected:?}");
                assert_eq!(words(&mut solo), expected, "{qp_type}: {past}, anew {anew}");
            }
        }
    }
}
