//! Many queue pairs and one receiver with credit that comes back in pieces of any size: all queue
//! pairs get an equal share.

use crate::common::{BASE, Pair, Setup, sge};
use rocinante_stack::Budget;
use rocinante_stack::types::Mtu;
use rocinante_stack::verbs::{SendOp, WcStatus};
use rocinante_stack::wire::Packet;

/// The senders, their messages and the receiver.
#[derive(Debug, Clone, Copy)]
struct Line {
    qps: usize,
    /// Messages that each queue pair keeps posted.
    depth: u64,
    /// Packets of a message.
    message: u32,
    /// Packets that the receiver has room for.
    room: u32,
}

/// Number of messages of each queue pair that complete while the receiver takes `packets`. `pieces`
/// has the number that it takes at a time, in turn; the sender's port holds `port` at a time. Too
/// little time passes for any deadline.
fn shares(line: Line, pieces: &[usize], port: usize, packets: usize) -> Vec<u64> {
    watch(line, pieces, port, packets).0
}

/// The same, and the average number of packets of one queue pair that leave together.
fn watch(line: Line, pieces: &[usize], port: usize, packets: usize) -> (Vec<u64>, f64) {
    let Line { qps, depth, message, room } = line;
    let budget = Budget { bytes: u32::MAX, datagrams: room };
    let own = Some(Budget { bytes: u32::MAX, datagrams: 28 });
    let mut pair = Pair::new(&Setup { mtu: Mtu::Mtu4096, budget, own, qps, ..Setup::default() });
    let keys = pair.register();
    let (mut posted, mut done) = (vec![0; qps], vec![0; qps]);
    let (pieces_of, mut pieces) = (pieces, pieces.iter().cycle());
    let (mut taken, mut idle) = (0, 0);
    let (mut left, mut runs) = (0, 0);
    pair.ends[0].out.room = port;
    while taken < packets {
        for qp in 0..qps {
            while posted[qp] - done[qp] < depth {
                let op = SendOp::Write { remote: BASE, rkey: keys[1], imm: None };
                pair.send_on(0, qp, qp as u64, op, &[sge(0, message * 4096, keys[0])]);
                posted[qp] += 1;
            }
        }
        let (now, [end, other]) = (pair.now, &mut pair.ends);
        let waiting = end.out.packets.len();
        end.engine.poll_transmit(now, 1024, &mut end.host, &mut end.out);
        let to = end
            .out
            .packets
            .range(waiting..)
            .map(|packet| Packet::parse(packet).expect("a packet of ours").bth().dest_qpn);
        let to: Vec<_> = to.collect();
        left += to.len();
        runs += to.chunk_by(|a, b| a == b).count();
        let (src, dst) = (end.addr, other.addr);
        let piece: Vec<_> = {
            let there = end.out.packets.len();
            end.out.packets.drain(..there.min(*pieces.next().unwrap())).collect()
        };
        taken += piece.len();
        idle = if piece.is_empty() { idle + 1 } else { 0 };
        assert!(
            idle < 3,
            "all wait, and no packet asks: {line:?} {pieces_of:?} {port}, after {taken}"
        );
        for packet in piece {
            pair.inject(1, src, dst, &packet);
        }
        pair.deliver(1);
        pair.now = now.after(5_000);
        for cqe in pair.completions(0) {
            assert_eq!(cqe.status, WcStatus::Success);
            done[cqe.wr_id as usize] += 1;
        }
    }
    assert_eq!(pair.ends[0].engine.counters().retransmitted_pkts, 0);
    (done, left as f64 / runs as f64)
}

/// Two turns of 64 packets: the most by which two queue pairs may differ at any time.
const APART: u64 = 2 * 4;

#[test]
fn room_in_small_and_large_pieces_is_shared_equally() {
    for pieces in [&[1][..], &[3], &[16], &[17], &[40], &[84], &[7, 2, 19], &[1, 60], &[5, 31, 2]] {
        for (qps, depth) in [(3, 16), (4, 16), (5, 13), (16, 4)] {
            let line = Line { qps, depth, message: 16, room: 84 };
            for port in [usize::MAX, 40] {
                let shares = shares(line, pieces, port, 10_000);
                let (least, most) = (shares.iter().min().unwrap(), shares.iter().max().unwrap());
                assert!(*least > 30 && most - least <= APART, "{pieces:?} {port}: {shares:?}");
            }
        }
    }
}

/// A packet that may wait for an earlier response needs less room after that response has arrived.
/// A queue pair that waits for room for a whole run must then stop waiting.
#[test]
fn long_messages_never_wait_for_what_nobody_asks_for() {
    for room in [17, 33, 40, 84, 100, 151] {
        for qps in [1, 2, 3, 5] {
            let line = Line { qps, depth: 2, message: 256, room };
            for pieces in [&[1][..], &[16], &[17], &[84], &[7, 2, 19], &[1, 60], &[5, 31, 2]] {
                let shares = shares(line, pieces, usize::MAX, 8_000);
                assert!(shares.iter().all(|share| *share > 1), "{line:?} {pieces:?}: {shares:?}");
            }
        }
    }
}

#[test]
fn a_turn_of_any_length_is_one() {
    for quantum in [0, 1, u32::from(u16::MAX), u32::from(u16::MAX) + 1, u32::MAX] {
        let mut pair = Pair::new(&Setup { qps: 2, quantum, ..Setup::default() });
        let keys = pair.register();
        for qp in [0, 1] {
            let op = SendOp::Write { remote: BASE, rkey: keys[1], imm: None };
            pair.send_on(0, qp, qp as u64, op, &[sge(0, 5 * 1024, keys[0])]);
        }
        pair.run();
        let mut done: Vec<_> = pair.completions(0).iter().map(|c| (c.wr_id, c.status)).collect();
        done.sort_unstable_by_key(|(wr_id, _)| *wr_id);
        assert_eq!(done, [(0, WcStatus::Success), (1, WcStatus::Success)], "{quantum}");
    }
}

/// Credit that comes back in small pieces is not spent in small pieces: the run of a queue pair
/// waits until all of it fits, whichever has the rest of the credit. A run has 16 packets here.
#[test]
fn runs_stay_whole_however_small_the_pieces_are() {
    for pieces in [&[1][..], &[3], &[16], &[7, 2, 19], &[1, 60], &[5, 31, 2]] {
        for qps in [2, 16, 64] {
            let line = Line { qps, depth: 4, message: 16, room: 84 };
            let (shares, run) = watch(line, pieces, usize::MAX, 10_000);
            assert!(run > 16.0, "{qps} {pieces:?}: {run}");
            assert!(shares.iter().all(|share| *share > 3), "{qps} {pieces:?}: {shares:?}");
        }
    }
}
