//! Every way in which a queue pair can fail, more often than there are buffers: nothing leaks.

use rocinante_stack::mem::Access;
use rocinante_stack::types::Key;
use rocinante_stack::verbs::{CqId, QpState, QpType, SendOp, SendWr, WcStatus};
use rocinante_stack::wire::{NakCode, Opcode as Op};
use rocinante_stack::{Budget, Footprint};

use crate::common::{PEER, Setup, Solo, sge, to};

/// More than a queue's depth, the reorder buffers, the responder resources and the peer's credit.
const ROUNDS: usize = 12;
const DEPTH: u32 = 4;
/// `wr_id`s of receives begin here.
const RECEIVES: u64 = 90;

fn setup() -> Setup {
    Setup {
        depth: DEPTH,
        held: 8,
        rd_atomic: 2,
        retry_cnt: 1,
        rnr_retry: 1,
        budget: Budget { bytes: 1 << 20, datagrams: 8 },
        ..Setup::script()
    }
}

/// A key that belongs to no region.
const NOTHING: Key = Key(0x1234_5600);

fn write(solo: &mut Solo, psn: i64, key: Key) {
    let header = crate::common::reth(crate::common::BASE, key, 8);
    solo.receive_request(Op::RC_RDMA_WRITE_ONLY, psn, &[&header, &[1; 8]]);
}

/// Posts receives until the queue is full.
fn receives(solo: &mut Solo) {
    let list = [solo.sge(8192, 700)];
    for wr_id in RECEIVES..RECEIVES + u64::from(DEPTH) {
        match solo.end.srq {
            Some(_) => solo.end.share(wr_id, &list).map_or((), drop),
            None => solo.post_recv(wr_id, &list),
        }
    }
}

fn sends(solo: &mut Solo) {
    solo.sends(1..=3, 10).sent();
}

/// All memory is deregistered during `act`; afterwards some is registered again.
fn without_memory(solo: &mut Solo, act: impl FnOnce(&mut Solo)) {
    let key = solo.key;
    solo.end.host.regions.remove(key).expect("registered");
    act(solo);
    solo.key = solo.end.host.register(0, solo.setup.arena as u64, Access::ALL);
}

fn breaks(solo: &mut Solo) {
    solo.end.modify(solo.end.qpn, &to(QpState::Err)).unwrap();
}

/// A way in which a queue pair breaks.
type Failure = (&'static str, fn(&mut Solo));

const FAILURES: [Failure; 21] = [
    ("a held packet is refused", |solo| {
        write(solo, 1, NOTHING);
        let key = solo.key;
        (2..4).for_each(|psn| write(solo, psn, key));
        write(solo, 0, key);
    }),
    ("it breaks while something is held", |solo| {
        let key = solo.key;
        (1..=4).for_each(|psn| write(solo, psn, key));
        solo.sent();
        breaks(solo);
    }),
    ("it breaks in a message", |solo| {
        receives(solo);
        solo.receive_request(Op::RC_SEND_FIRST, 0, &[&[7; 256]]);
        breaks(solo);
    }),
    ("a message is too long for its receive", |solo| {
        receives(solo);
        for psn in 0..3 {
            let opcode = if psn == 0 { Op::RC_SEND_FIRST } else { Op::RC_SEND_MIDDLE };
            solo.receive_request(opcode, psn, &[&[7; 256]]);
        }
    }),
    ("the memory of a receive is gone", |solo| {
        receives(solo);
        without_memory(solo, |solo| _ = solo.receive_request(Op::RC_SEND_ONLY, 0, &[&[7; 8]]));
    }),
    ("the memory of a READ is gone while it is answered", |solo| {
        solo.receive_request(Op::RC_RDMA_READ_REQUEST, 0, &[&solo.reth(0, 700)]);
        without_memory(solo, |solo| assert_eq!(solo.sent(), ["NAK #0 access"]));
    }),
    ("it breaks while responses are due", |solo| {
        let (read, add) = (solo.reth(0, 700), solo.atomic_eth(0, 1, 0));
        solo.receive_request(Op::RC_RDMA_READ_REQUEST, 0, &[&read]);
        solo.receive_request(Op::RC_FETCH_ADD, 3, &[&add]);
        breaks(solo);
    }),
    ("more READs than were agreed", |solo| {
        for psn in 0..3 {
            solo.receive_request(Op::RC_RDMA_READ_REQUEST, psn, &[&solo.reth(0, 8)]);
        }
    }),
    ("a request is invalid", |solo| _ = solo.receive_request(Op::RC_SEND_LAST, 0, &[&[7; 8]])),
    ("a key is wrong", |solo| write(solo, 0, NOTHING)),
    ("the peer is silent", |solo| {
        sends(solo);
        solo.read(4, 700);
        for _ in 0..20 {
            solo.wait(4096 << 14);
            solo.sent();
        }
    }),
    ("the peer never has a receive", |solo| {
        sends(solo);
        for _ in 0..3 {
            solo.receive_rnr(0, 1);
            solo.wait(1_000_000);
            solo.sent();
        }
    }),
    ("the peer refuses", |solo| {
        sends(solo);
        solo.receive_nak(1, NakCode::RemoteAccessError);
    }),
    ("the peer refuses the retransmission", |solo| {
        sends(solo);
        solo.receive_gap(0, &[1]);
        solo.receive_nak(0, NakCode::RemoteOperationalError);
    }),
    ("a response is wrong", |solo| {
        solo.read(1, 700);
        solo.add(2, 4096).sent();
        solo.receive_data(Op::RC_RDMA_READ_RESPONSE_ONLY, 0, &[7; 8]);
    }),
    ("the memory of a response is gone", |solo| {
        solo.read(1, 700).sent();
        without_memory(solo, |solo| {
            solo.receive_data(Op::RC_RDMA_READ_RESPONSE_FIRST, 0, &[7; 256]);
        });
    }),
    ("the memory of a request is gone", |solo| {
        solo.post(1, SendOp::Send { imm: None }, &[sge(0, 8, NOTHING)]).sent();
    }),
    ("the memory of a retransmission is gone", |solo| {
        sends(solo);
        without_memory(solo, |solo| {
            solo.receive_gap(0, &[1]).sent();
        });
    }),
    ("a window is not bound", |solo| {
        let (region, access) = (solo.key, Access::REMOTE_READ);
        let op = SendOp::BindMw { mw: NOTHING, rkey: NOTHING, region, addr: 0, len: 8, access };
        solo.post(1, op, &[]);
        sends(solo);
    }),
    ("there is no room in the sink", |solo| {
        solo.receive_request(Op::RC_RDMA_READ_REQUEST, 0, &[&solo.reth(0, 700)]);
        solo.end.out.room = 0;
        sends(solo);
        breaks(solo);
        solo.end.out.room = usize::MAX;
    }),
    ("a completion queue is full", |solo| {
        receives(solo);
        sends(solo);
        let end = &mut solo.end;
        end.engine.cq_overflow(CqId(0), &mut end.host);
    }),
];

/// Checks that each posted request completes once, and frees its slot once.
fn assert_each_is_retired(solo: &mut Solo, before: (u32, u32), what: &str) {
    let done = solo.completed();
    let sends = done.iter().filter(|(wr_id, _)| *wr_id < RECEIVES).count() as u32;
    let recvs = done.len() as u32 - sends;
    let host = &solo.end.host;
    assert_eq!(host.sends_retired - before.0, sends, "{what}");
    let own = if solo.end.srq.is_some() { 0 } else { recvs };
    assert_eq!(host.recvs_retired - before.1, own, "{what}");
}

fn idle(solo: &mut Solo) -> Footprint {
    solo.sent();
    while solo.event().is_some() {}
    solo.end.engine.footprint()
}

/// The queue pair fails, and then is used again: after a reset, or as another queue pair.
fn fails_again_and_again(setup: &Setup, name: &str, fail: fn(&mut Solo), anew: bool) {
    let mut solo = Solo::new(setup);
    let mut first = None;
    for round in 0..ROUNDS {
        let retired = (solo.end.host.sends_retired, solo.end.host.recvs_retired);
        fail(&mut solo);
        assert_eq!(solo.state(), QpState::Err, "{name} in round {round}");
        assert_each_is_retired(&mut solo, retired, name);
        let qpn = solo.end.qpn;
        // A queue pair in the error state blocks no other, and keeps no resources for packets that
        // will not come.
        let broken = idle(&mut solo);
        assert_eq!((broken.reordered_packets, broken.in_flight_lists), (0, 0), "{name}");
        assert_eq!((broken.waiting_for_credit, broken.in_flight_packets), (0, 0), "{name}");
        if anew {
            solo.end.engine.destroy_qp(qpn).unwrap();
            let init =
                rocinante_stack::QpInit { srq: solo.end.srq, ..crate::common::qp_init(setup) };
            solo.end.qpn = solo.end.engine.create_qp(&init, qpn.value()).unwrap();
        } else {
            solo.end.modify(qpn, &to(QpState::Reset)).unwrap();
        }
        solo.end.connect(solo.end.qpn, 0, PEER, setup);
        let now = idle(&mut solo);
        assert_eq!(
            (now.timers, now.waiting_for_credit, now.in_flight_packets),
            (0, 0, 0),
            "{name}"
        );
        assert_eq!(
            (now.reordered_packets, now.responder_resources, now.in_flight_lists),
            (0, 0, 0),
            "{name}"
        );
        assert_eq!(*first.get_or_insert(now), now, "{name} in round {round}");
    }
    // It works: all its resources are there.
    receives(&mut solo);
    for psn in 0..4 {
        solo.receive_request(Op::RC_SEND_ONLY, psn, &[&[7; 8]]);
    }
    solo.sends(1..=4, 10);
    assert_eq!(solo.sent().iter().filter(|sent| sent.starts_with("SEND_ONLY")).count(), 4);
    solo.receive_ack(3);
    let done = solo.completed();
    assert!(done.len() == 8 && done.iter().all(|(_, status)| *status == WcStatus::Success));
}

#[test]
fn a_connection_that_fails_again_and_again_loses_nothing_of_what_it_takes() {
    for (name, fail) in FAILURES {
        for anew in [false, true] {
            fails_again_and_again(&setup(), name, fail, anew);
        }
    }
}

/// Its receives are shared: those that a queue pair took are there again, or were completed.
#[test]
fn a_connection_that_fails_again_and_again_loses_no_place_of_a_shared_receive_queue() {
    let setup = Setup { srq: Some(DEPTH), ..setup() };
    for (name, fail) in FAILURES {
        for anew in [false, true] {
            fails_again_and_again(&setup, name, fail, anew);
        }
    }
}

/// Two queue pairs wait for the credit of the same peer, and break while they wait.
#[test]
fn who_breaks_while_it_waits_for_room_gives_its_place_in_the_line_back() {
    let setup = Setup { qps: 2, budget: Budget { bytes: 1 << 20, datagrams: 2 }, ..setup() };
    let mut solo = Solo::new(&setup);
    let both = [solo.end.qpns[0], solo.end.qpns[1]];
    solo.end.connect(both[1], 0, PEER, &setup);
    let mut first = None;
    for round in 0..ROUNDS {
        for qpn in both {
            solo.end.qpn = qpn;
            solo.sends(1..=4, 10);
        }
        solo.sent();
        assert!(solo.end.engine.footprint().waiting_for_credit > 0, "round {round}");
        for qpn in both {
            solo.end.modify(qpn, &to(QpState::Err)).unwrap();
        }
        let broken = solo.end.engine.footprint();
        assert_eq!((broken.waiting_for_credit, broken.in_flight_packets), (0, 0), "round {round}");
        for qpn in both {
            solo.end.modify(qpn, &to(QpState::Reset)).unwrap();
        }
        for qpn in both {
            solo.end.connect(qpn, 0, PEER, &setup);
        }
        let now = idle(&mut solo);
        assert_eq!((now.timers, now.waiting_for_credit, now.in_flight_packets), (0, 0, 0));
        assert_eq!(*first.get_or_insert(now), now, "round {round}");
    }
}

/// A local error of an unreliable queue pair stops its sends; they resume afterwards.
#[test]
fn an_unreliable_queue_pair_goes_on_after_any_number_of_local_errors() {
    let mut solo = Solo::new(&Setup { qp_type: QpType::Uc, ..setup() });
    let mut first = None;
    for round in 0..ROUNDS {
        for (wr_id, key) in [(1, solo.key), (2, NOTHING), (3, solo.key)] {
            solo.post(wr_id, SendOp::Send { imm: None }, &[sge(0, 600, key)]);
        }
        assert_eq!(solo.sent().len(), 3, "the first alone leaves");
        let statuses = [WcStatus::Success, WcStatus::LocProtErr, WcStatus::WrFlushErr];
        let expected: Vec<_> = (1..).zip(statuses).collect();
        assert_eq!(solo.completed(), expected);
        solo.end.modify(solo.end.qpn, &to(QpState::Rts)).unwrap();
        assert_eq!(solo.end.host.sends_retired, 3 * (round as u32 + 1));
        let now = idle(&mut solo);
        assert_eq!(*first.get_or_insert(now), now, "round {round}");
        // Time for the receiver, so that the packets sent do not pace later ones.
        solo.wait(1_000_000);
    }
}

/// Inline data is copied: a request that is refused for its length leaves room for the next.
#[test]
fn requests_are_refused_more_often_than_the_queue_is_deep() {
    let mut solo = Solo::new(&setup());
    let inline = rocinante_stack::verbs::SendData::Inline(&[7; 65]);
    let (op, wr_id) = (SendOp::Send { imm: None }, 9);
    let refused = SendWr::new(op, inline).wr_id(wr_id);
    for _ in 0..ROUNDS {
        assert!(solo.post_wr(&refused).is_err());
    }
    (1..=u64::from(DEPTH)).for_each(|wr_id| _ = solo.send(wr_id, 10));
    assert_eq!(solo.sent().len(), DEPTH as usize);
}
