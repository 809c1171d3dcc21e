//! The reliable connection, end to end between two engines.

use crate::common::{BASE, Pair, Pass, Setup, pattern};
use rocinante_stack::mem::Sge;
use rocinante_stack::types::Mtu;
use rocinante_stack::verbs::{SendOp, WcOpcode, WcStatus};

/// Every operation, at sizes around the MTU, over a link that loses packets as `pass` decides.
fn all_operations(setup: &Setup, pass: impl Fn() -> Pass) {
    let mtu = setup.mtu.bytes() as usize;
    for len in [0, 1, mtu - 1, mtu, mtu + 1, 10 * mtu + 3, 200_000] {
        let mut pair = Pair::new(setup);
        pair.pass = pass();
        let half = setup.arena as u64 / 2;
        let keys = pair.register();
        let data = pattern(len, 7);
        pair.ends[0].host.arena[..len].copy_from_slice(&data);
        let local = |offset: u64| Sge { addr: BASE + offset, len: len as u32, lkey: keys[0] };
        let remote = BASE + half;
        pair.recv(1, 100, &[Sge { addr: BASE, len: len as u32, lkey: keys[1] }]);
        pair.recv(1, 101, &[]);
        pair.send(0, 1, SendOp::Send { imm: None }, &[local(0)]);
        let imm = Some([1, 2, 3, 4]);
        pair.send(0, 2, SendOp::Write { remote, rkey: keys[1], imm }, &[local(0)]);
        pair.send(0, 3, SendOp::Read { remote, rkey: keys[1] }, &[local(half)]);
        let word = Sge { addr: BASE + half - 8, len: 8, lkey: keys[0] };
        let counter = BASE + setup.arena as u64 - 8;
        for wr_id in 4..8 {
            let add = SendOp::FetchAdd { remote: counter, rkey: keys[1], add: 5 };
            pair.send(0, wr_id, add, &[word]);
        }
        let swap = SendOp::CompareSwap { remote: counter, rkey: keys[1], compare: 20, swap: 99 };
        pair.send(0, 8, swap, &[word]);
        pair.run();

        let sent = pair.completions(0);
        let ids: Vec<_> = sent.iter().map(|c| (c.wr_id, c.status)).collect();
        let expected: Vec<_> = (1..=8).map(|id| (id, WcStatus::Success)).collect();
        assert_eq!(ids, expected, "length {len}");
        let received = pair.completions(1);
        let opcodes: Vec<_> = received.iter().map(|c| (c.wr_id, c.opcode, c.byte_len)).collect();
        let len32 = len as u32;
        assert_eq!(
            opcodes,
            [(100, WcOpcode::Recv, len32), (101, WcOpcode::RecvRdmaWithImm, len32)]
        );
        assert_eq!(received[1].imm, imm);
        let [a, b] = &pair.ends;
        assert!(b.host.arena[..len] == data[..], "SEND");
        assert!(b.host.arena[half as usize..][..len] == data[..], "WRITE");
        assert!(a.host.arena[half as usize..][..len] == data[..], "READ");
        assert_eq!(b.host.arena[setup.arena - 8..], 99u64.to_ne_bytes());
        assert_eq!(a.host.arena[half as usize - 8..][..8], 20u64.to_ne_bytes());
        assert_eq!((a.host.sends_retired, b.host.recvs_retired), (8, 2));
    }
}

#[test]
fn every_operation_at_every_mtu() {
    for mtu in Mtu::ALL {
        let setup = Setup { mtu, ..Setup::default() };
        all_operations(&setup, || Box::new(|_, _| true));
    }
}

#[test]
fn every_operation_with_random_loss() {
    for seed in 1..20u64 {
        let setup = Setup { timeout: 8, ..Setup::default() };
        all_operations(&setup, || crate::common::one_lost_in(10, seed));
    }
}

#[test]
fn a_silent_peer_ends_in_retry_exceeded() {
    let mut pair = Pair::new(&Setup { timeout: 8, retry_cnt: 3, ..Setup::default() });
    pair.pass = Box::new(|_, _| false);
    let start = pair.now;
    pair.send(0, 1, SendOp::Send { imm: None }, &[]);
    pair.send(0, 2, SendOp::Send { imm: None }, &[]);
    pair.run();
    let statuses: Vec<_> = pair.completions(0).iter().map(|c| (c.wr_id, c.status)).collect();
    assert_eq!(statuses, [(1, WcStatus::RetryExcErr), (2, WcStatus::WrFlushErr)]);
    // Four sends, 4.096 µs * 2^8 apart.
    assert_eq!(pair.now.since(start) / 1000, 4 * 1_048_576 / 1000);
}

#[test]
fn a_peer_without_receives_is_asked_again_and_then_given_up() {
    let mut pair = Pair::new(&Setup { rnr_retry: 2, ..Setup::default() });
    pair.send(0, 1, SendOp::Send { imm: None }, &[]);
    pair.run();
    assert_eq!(pair.completions(0)[0].status, WcStatus::RnrRetryExcErr);
    assert_eq!(pair.ends[1].engine.counters().send_rnr_err, 3);

    let mut pair = Pair::new(&Setup::default());
    pair.send(0, 1, SendOp::Send { imm: None }, &[]);
    pair.run_until(|pair| pair.ends[0].engine.counters().rcvd_rnr_err == 20);
    pair.recv(1, 9, &[]);
    pair.run();
    assert_eq!(pair.completions(0)[0].status, WcStatus::Success);
    assert_eq!(pair.completions(1)[0].wr_id, 9);
}
