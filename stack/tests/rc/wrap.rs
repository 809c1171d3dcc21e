//! The PSN wraps at 2^24, at any position in a message.

use crate::common::{BASE, Pair, Setup, pattern, sge};
use rocinante_stack::types::Mtu;
use rocinante_stack::verbs::{SendOp, WcStatus};

#[test]
fn it_wraps_in_every_position_of_every_operation() {
    let len = 1000u32; // four packets of 256
    for before in 0..14u32 {
        for seed in 0..8u64 {
            let psn = [0x100_0000 - before, 0x100_0000 - before / 2];
            let setup = Setup { mtu: Mtu::Mtu256, psn, timeout: 8, ..Setup::default() };
            let mut pair = Pair::new(&setup);
            let keys = pair.register();
            let data = pattern(len as usize, before as u8);
            pair.ends[0].host.arena[..len as usize].copy_from_slice(&data);
            if seed > 0 {
                pair.pass = crate::common::one_lost_in(6, seed);
            }
            pair.recv(1, 9, &[sge(0, len, keys[1])]);
            let (remote, rkey) = (BASE + 4096, keys[1]);
            pair.send(0, 1, SendOp::Send { imm: None }, &[sge(0, len, keys[0])]);
            pair.send(0, 2, SendOp::Write { remote, rkey, imm: None }, &[sge(0, len, keys[0])]);
            pair.send(0, 3, SendOp::Read { remote, rkey }, &[sge(8192, len, keys[0])]);
            let add = SendOp::FetchAdd { remote: BASE + 16_384, rkey, add: 7 };
            pair.send(0, 4, add, &[sge(16_384, 8, keys[0])]);
            pair.send(0, 5, add, &[sge(16_384, 8, keys[0])]);
            pair.run();
            let done = pair.ends[0].host.completed();
            let expected: Vec<_> = (1..=5).map(|id| (id, WcStatus::Success)).collect();
            assert_eq!(done, expected, "wrap after {before}, seed {seed}");
            let [a, b] = &pair.ends;
            assert_eq!(b.host.arena[..len as usize], data[..]);
            assert_eq!(b.host.arena[4096..][..len as usize], data[..]);
            assert_eq!(a.host.arena[8192..][..len as usize], data[..]);
            assert_eq!(a.host.arena[16_384..16_392], 7u64.to_ne_bytes());
            assert_eq!(b.host.arena[16_384..16_392], 14u64.to_ne_bytes());
        }
    }
}

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
