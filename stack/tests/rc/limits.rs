//! Why does it not send? Each limit, alone, is the reason that is counted.

use crate::common::{Setup, Solo, to};
use rocinante_stack::Budget;
use rocinante_stack::stats::Limit;
use rocinante_stack::types::Mtu;
use rocinante_stack::verbs::{QpState, SendOp, SendWr};
use rocinante_stack::wire::{NakCode, Opcode, Syndrome};

/// The limits that ended turns since the last call.
struct Reasons([u64; Limit::ALL.len()]);

impl Reasons {
    fn of(solo: &Solo) -> Self {
        let hit = solo.end.engine.qp_limits_hit(solo.end.qpn).expect("a queue pair");
        assert_eq!(hit, *solo.end.engine.limits_hit(), "one queue pair: the device has no more");
        Self(Limit::ALL.map(|limit| hit.of(limit)))
    }

    fn since(&mut self, solo: &Solo) -> Vec<(Limit, u64)> {
        let now = Self::of(solo);
        let before = std::mem::replace(&mut self.0, now.0);
        let hit = Limit::ALL.into_iter().zip(before.into_iter().zip(now.0));
        hit.filter(|(_, (before, now))| now > before)
            .map(|(limit, (before, now))| (limit, now - before))
            .collect()
    }
}

/// Number of packets that leave now, and why no more.
fn turn(solo: &mut Solo) -> (usize, Vec<(Limit, u64)>) {
    let mut reasons = Reasons::of(solo);
    let packets = solo.packets().len();
    (packets, reasons.since(solo))
}

fn write(solo: &Solo) -> SendOp {
    SendOp::Write { remote: 0x9000, rkey: solo.key, imm: None }
}

#[test]
fn a_queue_pair_that_has_nothing_to_send_is_limited_by_its_program() {
    let mut solo = Solo::script();
    assert_eq!(turn(&mut solo), (0, vec![]), "it had no turn");
    solo.send(1, 10);
    assert_eq!(turn(&mut solo), (1, vec![(Limit::SendQueueEmpty, 1)]));
}

#[test]
fn a_queue_pair_that_only_answers_is_not_limited() {
    let mut solo = Solo::script();
    for psn in 0..3 {
        solo.receive_request(Opcode::RC_RDMA_WRITE_ONLY, psn, &[&solo.reth(0, 1), &[1]]);
        assert_eq!(turn(&mut solo), (1, vec![]), "it has no request to send");
    }
}

#[test]
fn the_rules_of_the_transport() {
    let mut solo = Solo::new(&Setup { rd_atomic: 2, ..Setup::script() });
    for id in 1..=3 {
        solo.read(id, 10);
    }
    assert_eq!(turn(&mut solo), (2, vec![(Limit::RdAtomic, 1)]));

    let mut solo = Solo::script();
    solo.read(1, 10);
    let (op, sge) = (write(&solo), [solo.sge(0, 10)]);
    let fenced = SendWr::new(op, rocinante_stack::verbs::SendData::Sges(&sge)).fence();
    solo.post_wr(&fenced).expect("a good request");
    assert_eq!(turn(&mut solo), (1, vec![(Limit::Fence, 1)]));

    let mut solo = Solo::script();
    solo.send(1, 10);
    solo.packets();
    solo.receive_rnr(0, 12);
    assert_eq!(turn(&mut solo).1, vec![], "its turn comes with the timer");
    solo.send(2, 10);
    assert_eq!(turn(&mut solo), (0, vec![(Limit::Rnr, 1)]));

    let mut solo = Solo::script();
    solo.end.modify(solo.end.qpn, &to(QpState::Sqd)).expect("a legal change");
    solo.packets();
    solo.send(1, 10);
    assert_eq!(turn(&mut solo), (0, vec![(Limit::Draining, 1)]));

    let mut solo = Solo::script();
    solo.send(1, 10);
    solo.packets();
    solo.receive_syndrome(0, Syndrome::credits(0));
    solo.sends(2..=4, 10);
    assert_eq!(turn(&mut solo), (1, vec![(Limit::Credits, 1)]), "one that asks");
}

#[test]
fn the_windows() {
    let budget = Budget { bytes: 4 * 8704, datagrams: 4 };
    let wide = Setup { own: Some(Budget { bytes: 8 << 20, datagrams: 256 }), ..Setup::script() };
    // The window is the size of the peer's queue, so both are full together.
    let mut solo = Solo::new(&Setup { budget, ..wide.clone() });
    solo.send(1, 10 * 256);
    assert_eq!(turn(&mut solo), (4, vec![(Limit::CongestionWindow, 1)]));

    // After a loss the window opens again as time passes.
    let mut solo = Solo::new(&wide);
    solo.know_round_trip(1_000_000);
    solo.send(2, 40 * 256);
    assert_eq!(turn(&mut solo), (40, vec![(Limit::SendQueueEmpty, 1)]));
    solo.wait(1_000_000);
    solo.receive_nak(1, NakCode::PsnSequenceError);
    assert_eq!(turn(&mut solo), (8, vec![(Limit::Pacing, 1)]));

    // Lost once more: later packets are held back.
    solo.wait(1_000_000);
    solo.packets();
    solo.receive_nak(1, NakCode::PsnSequenceError);
    let (packets, why) = turn(&mut solo);
    assert_eq!((packets, why), (5, vec![(Limit::Recovering, 1)]));

    // A READ of more than the read window holds goes in requests.
    let mut solo = Solo::new(&Setup { mtu: Mtu::Mtu1024, arena: 1 << 20, ..Setup::script() });
    solo.read(1, 1 << 20);
    let (packets, why) = turn(&mut solo);
    assert!(packets > 1 && why == [(Limit::ReadWindow, 1)], "{packets}: {why:?}");
}

#[test]
fn receive_queues_sinks_and_turns() {
    // No credit of our own for an answer.
    let own = Some(Budget { bytes: 8 << 20, datagrams: 2 });
    let mut solo = Solo::new(&Setup { own, rd_atomic: 4, ..Setup::script() });
    (1..=3).for_each(|id| _ = solo.read(id, 10));
    assert_eq!(turn(&mut solo), (2, vec![(Limit::AckRoom, 1)]));

    // The peer holds bytes for three packets, and datagrams for more.
    let each = Budget::cost(256 + 36);
    let budget = Budget { bytes: 3 * each, datagrams: 100 };
    let own = Some(Budget { bytes: 8 << 20, datagrams: 256 });
    let mut solo = Solo::new(&Setup { budget, own, ..Setup::script() });
    solo.send(1, 10 * 256);
    assert_eq!(turn(&mut solo), (3, vec![(Limit::PeerRoom, 1)]));

    let mut solo = Solo::script();
    solo.end.out.room = 2;
    solo.send(1, 10 * 256);
    assert_eq!(turn(&mut solo), (2, vec![(Limit::Port, 1)]));

    let mut solo = Solo::new(&Setup { quantum: 3, ..Setup::script() });
    (1..=4).for_each(|id| _ = solo.post(id, write(&solo), &[solo.sge(0, 10 * id as u32)]));
    let (packets, why) = turn(&mut solo);
    assert_eq!((packets, why), (4, vec![(Limit::SendQueueEmpty, 1), (Limit::Turn, 1)]));
}

#[test]
fn small_messages_wait_for_a_run() {
    let mut solo = Solo::new(&Setup { depth: 256, ..Setup::script() });
    solo.sends(1..=200, 10);
    let why = vec![(Limit::Batch, 1), (Limit::Turn, 2)];
    assert_eq!(turn(&mut solo), (3 * 64, why), "eight wait for more");
    solo.receive_ack(3 * 64 - 1);
    assert_eq!(turn(&mut solo), (8, vec![(Limit::SendQueueEmpty, 1)]));
}
