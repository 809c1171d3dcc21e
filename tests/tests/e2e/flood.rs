//! Attacks at the rate of a network: a flood of damaged packets from the peer's address, and keys
//! guessed one after the other.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rocinante::device::Backend;
use rocinante::verbs::{Psn, QpState, QpType, SendOp};
use rocinante::{Access, ConnectOptions, Qp, WcStatus};
use rocinante_stack::types::{Key, Pkey};
use rocinante_stack::wire::{Bth, Opcode};
use rocinante_tests::attacker::{Attacker, packet};
use rocinante_tests::harness::{Harness, Setup, StopOnDrop, assert_same, pattern, wait_until, wr};
use rocinante_tests::on_each_backend;

on_each_backend!(
    damaged_packets_without_end_break_nothing,
    each_guessed_key_costs_a_connection_and_is_counted,
    each_guessed_key_of_an_unreliable_connection_is_counted,
);

/// Damaged packets that must be counted, and messages that must arrive meanwhile.
const DAMAGED: u64 = 20_000;
const MESSAGES: u64 = 40;
/// How long both may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// Packets from the peer's own address to the right queue pair, as fast as a thread sends. An
/// attacker off the path can do no more without guessing.
fn damaged_packets_without_end_break_nothing(backend: Backend) {
    let mut setup = Setup::new(backend);
    setup.containers = 3;
    // Nine seconds: packets lost to a full queue are retransmitted in that time.
    setup.connect = ConnectOptions::default().timeout(18);
    let harness = Harness::new(&setup);
    let [a, b] = &harness.sides;
    let [qp, peer] = harness.pair();
    let attacker = Attacker::new(harness.lab().container(2), b.address);
    let bth = Bth::new(Opcode::RC_SEND_ONLY, Pkey::DEFAULT, peer.qpn(), Psn::new(1));
    let damaged = attacker.whole(a.address, &attacker.damaged(a.address, packet(&bth, 1024)));
    let (stop, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    let icrc = || b.ctx.counters().drops.icrc;
    std::thread::scope(|scope| {
        let flood = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                attacker.send_whole(&damaged);
                sent.fetch_add(1, Ordering::Relaxed);
            }
        });
        let stop_at_the_end = StopOnDrop(&stop);
        let mut traffic = Traffic::new(&harness, &qp);
        let deadline = Instant::now() + PATIENCE;
        while icrc() < DAMAGED || traffic.turn < MESSAGES {
            let (turn, count) = (traffic.turn, icrc());
            assert!(Instant::now() < deadline, "{turn} messages, {count} damaged packets");
            traffic.go_on();
        }
        drop(stop_at_the_end);
        flood.join().unwrap();
        traffic.go_on();
    });
    let (sent, drops) = (sent.into_inner(), b.ctx.counters().drops);
    println!("{sent} sent, {drops:?}");
    // Packets lost to a full queue are retransmitted. Packets behind a gap come too early, or
    // twice.
    let flood = ["icrc", "out_of_sequence", "stale_duplicate"];
    let others = drops.iter().filter(|(name, count)| !flood.contains(name) && *count > 0);
    assert_eq!(others.collect::<Vec<_>>(), [], "for another reason");
    assert!(drops.icrc <= sent, "{} of {sent}", drops.icrc);
    assert_eq!([qp, peer].map(|qp| qp.state()), [QpState::Rts; 2]);
}

/// WRITEs that are read back, with all bytes compared.
struct Traffic<'a> {
    harness: &'a Harness,
    qp: &'a Qp,
    mine: rocinante::Mr,
    its: rocinante::Mr,
    turn: u64,
}

const LEN: usize = 20_000;

impl<'a> Traffic<'a> {
    fn new(harness: &'a Harness, qp: &'a Qp) -> Self {
        let [a, b] = &harness.sides;
        let mine = a.pd.allocate(2 * LEN, Access::LOCAL_WRITE).unwrap();
        let its = b.pd.allocate(LEN, Access::ALL).unwrap();
        Self { harness, qp, mine, its, turn: 0 }
    }

    fn go_on(&mut self) {
        let Self { mine, its, turn, .. } = self;
        let [a, _] = &self.harness.sides;
        let bytes = pattern(LEN, *turn);
        mine.write(0, &bytes);
        let (remote, rkey) = (its.address(), its.rkey());
        let (from, back) = ([mine.sge(0, LEN)], [mine.sge(LEN, LEN)]);
        let write = wr(*turn, SendOp::Write { remote, rkey, imm: None }, &from);
        self.qp.post_send(&[write, wr(*turn, SendOp::Read { remote, rkey }, &back)]).unwrap();
        a.succeed(*turn);
        a.succeed(*turn);
        assert_same(&its.to_vec(0, LEN), &bytes, "written");
        assert_same(&mine.to_vec(LEN, LEN), &bytes, "read back");
        *turn += 1;
    }
}

/// Wrong guesses near a good key: the guesses of an attacker that knows a lot.
fn guesses(key: Key) -> impl Iterator<Item = Key> {
    let bits = (0..32).map(move |bit| Key(key.0 ^ 1 << bit));
    bits.chain((1..=16).map(move |step| Key(key.0.wrapping_add(step * 0x0101))))
}

/// A connected peer guesses keys. Each guess ends its connection, is counted, and changes nothing.
fn each_guessed_key_costs_a_connection_and_is_counted(backend: Backend) {
    let harness = Harness::new(&Setup::new(backend));
    let [a, b] = &harness.sides;
    let target = b.pd.allocate(4096, Access::ALL).unwrap();
    let secret = pattern(4096, 3);
    target.write(0, &secret);
    let mine = a.pd.allocate(4096, Access::LOCAL_WRITE).unwrap();
    let remote = target.address();
    for (rkey, guess) in guesses(target.rkey()).zip(1..) {
        let [qp, peer] = harness.pair();
        let op = match guess % 3 {
            0 => SendOp::Read { remote, rkey },
            1 => SendOp::Write { remote, rkey, imm: None },
            _ => SendOp::FetchAdd { remote, rkey, add: 1 },
        };
        let len = if guess % 3 == 2 { 8 } else { 64 };
        qp.post_send(&[wr(guess, op, &[mine.sge(0, len)])]).unwrap();
        a.complete(guess, WcStatus::RemAccessErr);
        assert_eq!(b.ctx.counters().transport.remote_access_errors, guess);
        assert_eq!([qp, peer].map(|qp| qp.state()), [QpState::Err; 2]);
    }
    assert_same(&target.to_vec(0, 4096), &secret, "the region of the key");
    assert_same(&mine.to_vec(0, 4096), &[0; 4096], "the target of the READ");
}

/// Here a guess costs only one packet, and the peer gets no answer; but it is counted.
fn each_guessed_key_of_an_unreliable_connection_is_counted(backend: Backend) {
    let harness = Harness::new(&Setup::new(backend));
    let [a, b] = &harness.sides;
    let target = b.pd.allocate(4096, Access::ALL).unwrap();
    let secret = pattern(4096, 3);
    target.write(0, &secret);
    let mine = a.pd.allocate(64, Access::NONE).unwrap();
    let [qp, peer] =
        harness.connect([a, b].map(|side| side.qp().qp_type(QpType::Uc).build().unwrap()));
    for (rkey, guess) in guesses(target.rkey()).zip(1..) {
        let op = SendOp::Write { remote: target.address(), rkey, imm: None };
        qp.post_send(&[wr(guess, op, &[mine.sge(0, 64)])]).unwrap();
        a.succeed(guess);
        let refused = || b.ctx.counters().transport.remote_access_errors;
        wait_until("it is counted", || refused() == guess);
    }
    assert_same(&target.to_vec(0, 4096), &secret, "the region of the key");
    assert_eq!([qp, peer].map(|qp| qp.state()), [QpState::Rts; 2]);
}
