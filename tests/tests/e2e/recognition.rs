//! Programs that swap the numbers of their queue pairs by hand do not announce their peer kind.
//! Their devices recognise each other all the same, on every backend, while the programs go on.

use rocinante::verbs::{PeerKind, SendOp};
use rocinante::{Access, WcStatus};
use rocinante_tests::harness::{
    Backend, Harness, Setup, Side, assert_same, next, pattern, wait_until, wr,
};
use rocinante_tests::on_each_backend;

on_each_backend!(reliable_connections_become_ours_while_they_write, shards_tell_each_other,);

fn are_ours(side: &Side) -> bool {
    let qps = side.ctx.qps().unwrap();
    qps.iter().all(|qp| qp.peer_kind.is_some_and(PeerKind::is_rocinante))
}

/// Questions sent and received, answers sent and received.
fn introductions(side: &Side) -> [u64; 4] {
    let counters = side.ctx.counters().transport;
    [counters.sent_questions, counters.rcvd_questions, counters.sent_answers, counters.rcvd_answers]
}

/// Each side writes to the other, on `pairs` queue pairs, and both recognise a Rocinante meanwhile.
fn write_by_hand(setup: &Setup, pairs: usize) {
    const LEN: usize = 300_001;
    const ROUNDS: u64 = 4;
    let harness = Harness::new(setup);
    let qps: Vec<_> = (0..pairs)
        .map(|_| {
            let qps = [0, 1].map(|at| harness.sides[at].qp().build().unwrap());
            harness.connect_by_hand(qps)
        })
        .collect();
    let strangers = harness.sides.each_ref().map(|side| side.ctx.qps().unwrap());
    let strangers = strangers.iter().flatten();
    assert!(strangers.clone().all(|qp| qp.peer_kind == Some(PeerKind::Standard)));
    let regions =
        [0, 1].map(|at| harness.sides[at].pd.allocate(2 * LEN * pairs, Access::ALL).unwrap());
    harness.both(|at, side| {
        let (own, its) = (&regions[at], &regions[1 - at]);
        for index in 0..pairs {
            own.write(2 * LEN * index, &pattern(LEN, (2 * index + at) as u64));
        }
        for round in 0..ROUNDS {
            for (index, pair) in qps.iter().enumerate() {
                let from = 2 * LEN * index;
                let remote = its.address() + (from + LEN) as u64;
                let op = SendOp::Write { remote, rkey: its.rkey(), imm: None };
                pair[at].post_send(&[wr(round, op, &[own.sge(from, LEN)])]).unwrap();
            }
            for _ in &qps {
                assert_eq!(next(&side.cq).status, WcStatus::Success);
            }
        }
        wait_until("both are ours", || {
            side.ctx.progress();
            are_ours(side)
        });
    });
    for at in [0, 1] {
        for index in 0..pairs {
            let found = regions[at].to_vec(2 * LEN * index + LEN, LEN);
            assert_same(&found, &pattern(LEN, (2 * index + 1 - at) as u64), "the bytes written");
        }
        assert_eq!(introductions(&harness.sides[at]), [1; 4]);
    }
}

fn reliable_connections_become_ours_while_they_write(backend: Backend) {
    write_by_hand(&Setup::new(backend), 2);
}

/// The shard that met the peer has the first one ask, and all shards learn the answer.
fn shards_tell_each_other(backend: Backend) {
    write_by_hand(&Setup { shards: Some(2), ..Setup::new(backend) }, 3);
}
