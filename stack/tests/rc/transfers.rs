//! The reliable connection, end to end between two engines.

use crate::common::{BASE, Pair, Setup, pattern, sge};
use rocinante_stack::mem::Sge;
use rocinante_stack::types::Mtu;
use rocinante_stack::verbs::{SendOp, WcOpcode, WcStatus};

/// Every operation, at sizes around the MTU.
fn all_operations(setup: &Setup) {
    let mtu = setup.mtu.bytes() as usize;
    for len in [0, 1, mtu - 1, mtu, mtu + 1, 10 * mtu + 3, 200_000] {
        let mut pair = Pair::new(setup);
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
        all_operations(&setup);
    }
}

/// The PSN wraps at 2^24.
#[test]
fn a_wrap_in_the_middle_of_a_stream_costs_nothing() {
    for start in (0xff_ff00..0x100_0000u32).step_by(37) {
        let mut pair = Pair::new(&Setup { mtu: Mtu::Mtu256, psn: [start, 0], ..Setup::default() });
        let keys = pair.register();
        for n in 0..8 {
            let op = SendOp::Write { remote: BASE, rkey: keys[1], imm: None };
            pair.send(0, n, op, &[sge(0, 20_000, keys[0])]);
        }
        pair.run();
        assert_eq!(pair.completions(0).len(), 8);
        assert_eq!(pair.ends[0].engine.counters().retransmitted_pkts, 0);
    }
}
