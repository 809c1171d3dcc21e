//! Programs that swap the numbers of their queue pairs by hand do not announce their peer kind.
//! Their devices recognise each other all the same, on every backend, while the programs go on.

use rocinante::verbs::{Destination, PeerKind, PeerPath, QpType, SendOp};
use rocinante::{Access, OpenOptions, SendWr, WcStatus};
use rocinante_tests::harness::{
    Backend, Harness, Setup, Side, assert_same, next, pattern, wait_until, wr,
};
use rocinante_tests::on_each_backend;

const QKEY: u32 = 0x1111_1111;

on_each_backend!(
    reliable_connections_become_ours_while_they_write,
    unreliable_ones_and_datagrams_find_out_who_receives,
    shards_tell_each_other,
    two_contexts_ask_once
);

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

fn unreliable_ones_and_datagrams_find_out_who_receives(backend: Backend) {
    let harness = Harness::new(&Setup::new(backend));
    let [a, b] = &harness.sides;
    let qps = [a, b].map(|side| side.qp().qp_type(QpType::Uc).build().unwrap());
    let [sends, _receives] = harness.connect_by_hand(qps);
    let qp = a.qp().qp_type(QpType::Ud).qkey(QKEY).build().unwrap().ready().unwrap();
    a.run(|| {
        let ah = a.pd.create_ah(&PeerPath::new(b.address)).unwrap();
        let buffer = a.pd.allocate(64, Access::NONE).unwrap();
        let sges = [buffer.sge(0, 64)];
        let to = Destination { ah: ah.id(), qpn: qp.qpn(), qkey: QKEY };
        qp.post_send(&[wr(1, SendOp::SendTo { to, imm: None }, &sges)]).unwrap();
        sends.post_send(&[wr(2, SendOp::Send { imm: None }, &sges)]).unwrap();
        for _ in 0..2 {
            assert_eq!(next(&a.cq).status, WcStatus::Success);
        }
        wait_until("it is ours", || {
            a.ctx.progress();
            introductions(a) == [1, 0, 0, 1]
        });
    });
    let kinds: Vec<_> = a.ctx.qps().unwrap().iter().map(|qp| qp.peer_kind).collect();
    assert!(matches!(kinds[..], [Some(PeerKind::Rocinante(_)), None]), "{kinds:?}");
    assert_eq!(introductions(b), [0, 1, 1, 0], "it sent nothing");
}

/// The contexts of a process share a device, which asks once for both.
fn two_contexts_ask_once(backend: Backend) {
    let harness = Harness::new(&Setup::new(backend));
    let [a, b] = &harness.sides;
    let second = a.run(|| OpenOptions::new().netdev(backend).open(a.address).unwrap());
    let (pd, cq) = (second.alloc_pd(), second.create_cq(8).unwrap());
    let first = harness.connect_by_hand([a, b].map(|side| side.qp().build().unwrap()));
    let far = b.qp().build().unwrap();
    let near = pd.qp(&cq, &cq).access(Access::ALL).build().unwrap();
    let other = harness.connect_by_hand([near, far]);
    a.run(|| {
        for (qp, cq) in [(&first[0], &a.cq), (&other[0], &cq)] {
            let op = SendOp::Write { remote: 0, rkey: Default::default(), imm: None };
            let wr = SendWr::new(op, rocinante::verbs::SendData::Sges(&[])).wr_id(1);
            qp.post_send(&[wr]).unwrap();
            assert_eq!(next(cq).status, WcStatus::Success);
        }
        wait_until("both are ours", || {
            a.ctx.progress();
            are_ours(a)
        });
    });
    assert_eq!(introductions(a)[0], 1);
}
