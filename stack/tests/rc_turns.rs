//! Many queue pairs and one receiver whose room comes back in pieces of any size: all get as much of it.

mod common;

use common::{BASE, Pair, Setup, sge};
use rocinante_stack::Budget;
use rocinante_stack::types::Mtu;
use rocinante_stack::verbs::{SendOp, WcStatus};

/// Bytes of a message: 16 packets.
const MESSAGE: u32 = 16 * 4096;

/// How many messages of each of `qps` queue pairs complete while a receiver that has room for 84 packets takes `packets`, `pieces` of them at a time, and
/// the sender's port `port` at a time.
fn shares(qps: usize, depth: u64, pieces: &[usize], port: usize, packets: usize) -> Vec<u64> {
    let budget = Budget { bytes: u32::MAX, datagrams: 84 };
    let own = Some(Budget { bytes: u32::MAX, datagrams: 28 });
    let mut pair = Pair::new(&Setup { mtu: Mtu::Mtu4096, budget, own, qps, ..Setup::default() });
    let keys = pair.register();
    let (mut posted, mut done) = (vec![0; qps], vec![0; qps]);
    let mut pieces = pieces.iter().cycle();
    let mut taken = 0;
    pair.ends[0].out.room = port;
    while taken < packets {
        for qp in 0..qps {
            while posted[qp] - done[qp] < depth {
                let op = SendOp::Write { remote: BASE, rkey: keys[1], imm: None };
                pair.send_on(0, qp, qp as u64, op, &[sge(0, MESSAGE, keys[0])]);
                posted[qp] += 1;
            }
        }
        let (now, [end, other]) = (pair.now, &mut pair.ends);
        end.engine.poll_transmit(now, 1024, &mut end.host, &mut end.out);
        let (src, dst) = (end.addr, other.addr);
        let piece: Vec<_> = {
            let there = end.out.packets.len();
            end.out.packets.drain(..there.min(*pieces.next().unwrap())).collect()
        };
        taken += piece.len();
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
    done
}

/// Two turns of 64 packets, by which two queue pairs may be apart at any time.
const APART: u64 = 2 * 4;

#[test]
fn room_in_small_and_large_pieces_is_shared_equally() {
    for pieces in [&[1][..], &[3], &[16], &[17], &[40], &[84], &[7, 2, 19], &[1, 60], &[5, 31, 2]] {
        for (qps, depth) in [(3, 16), (4, 16), (5, 13), (16, 4)] {
            for port in [usize::MAX, 40] {
                let shares = shares(qps, depth, pieces, port, 10_000);
                let (least, most) = (shares.iter().min().unwrap(), shares.iter().max().unwrap());
                assert!(*least > 30 && most - least <= APART, "{pieces:?} {port}: {shares:?}");
            }
        }
    }
}
