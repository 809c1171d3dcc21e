//! Queue pairs adopt an introduction at any moment.

use super::*;

/// The first 128 datagrams leave at once in either case; the others at the pace for unknown peers,
/// or at the pace that the receiver announced.
#[test]
fn datagrams_leave_as_fast_as_the_receiver_said() {
    for qp_type in [QpType::Ud, QpType::Uc] {
        let took = [false, true].map(|ours| {
            let mut solo = Solo::new(&Setup { depth: 2048, ..strangers(qp_type) });
            let post = |solo: &mut Solo, count: usize| match qp_type {
                QpType::Ud => {
                    let ah = handle_of(&mut solo.end, addr(2));
                    send_to(&mut solo.end, ah, solo.key, count);
                }
                _ => (0..count).for_each(|_| _ = solo.send(1, 64)),
            };
            post(&mut solo, 1);
            let tid = questions(&solo.packets())[0];
            if ours {
                answer(&mut solo, tid);
            }
            solo.wait(1_000_000);
            post(&mut solo, 2000);
            let (begin, mut sent) = (solo.now, solo.packets().len());
            assert_eq!(sent, 128);
            while sent < 2000 {
                solo.wait_for_timer().expect("something is due");
                sent += solo.packets().len();
            }
            solo.now.since(begin)
        });
        let expected = [1872 * 818, 1872 * 256];
        for (took, expected) in took.into_iter().zip(expected) {
            assert!(took.abs_diff(expected) < expected / 10, "{qp_type:?} {took} {expected}");
        }
    }
}

#[test]
fn the_window_grows_while_requests_are_in_flight() {
    let mut solo = Solo::new(&strangers(QpType::Rc));
    let list = [solo.sge(0, 64 << 10)];
    solo.post(1, SendOp::Send { imm: None }, &list);
    let first = solo.packets();
    let tid = questions(&first)[0];
    assert_eq!((first.len(), solo.packets().len()), (16 + 1, 0), "the budget of an unknown peer");
    answer(&mut solo, tid);
    assert_eq!(solo.packets().len(), 64 - 16, "all of it");
    let footprint = solo.end.engine.footprint();
    assert_eq!((footprint.credit_users, footprint.in_flight_packets), (1, 64));
    assert_eq!(footprint.forgotten, 0);
    assert_eq!(solo.receive_ack(63).completed(), [(1, WcStatus::Success)]);
    assert_eq!(solo.end.engine.footprint().in_flight_packets, 0);
}

/// A queue pair that waits for the credit of a stranger leaves that queue.
#[test]
fn who_waits_for_credit_goes_on() {
    let mut solo = Solo::new(&Setup { qps: 2, ..strangers(QpType::Rc) });
    let (setup, second) = (solo.setup.clone(), solo.end.qpns[1]);
    solo.end.connect(second, 0, Qpn::new(0x78), &setup);
    let list = [solo.sge(0, 16 << 10)];
    let wr = SendWr::new(SendOp::Send { imm: None }, SendData::Sges(&list));
    for qpn in [solo.end.qpn, second] {
        solo.end.engine.post_send(qpn, &wr, &mut solo.end.host).unwrap();
    }
    let sent = solo.packets();
    assert_eq!(sent.len(), 16 + 1);
    let waiting = solo.end.engine.footprint();
    assert_eq!((waiting.waiting_for_credit, waiting.forgotten), (1, 0));
    answer(&mut solo, questions(&sent)[0]);
    assert_eq!(solo.packets().len(), 16);
    let after = solo.end.engine.footprint();
    assert_eq!((after.waiting_for_credit, after.forgotten, after.in_flight_packets), (0, 0, 32));
    assert_eq!(after.credit_users, 2);
}

/// READs in flight are charged to the peer, too.
#[test]
fn reads_in_flight_move_with_their_queue_pair() {
    let mut solo = Solo::new(&strangers(QpType::Rc));
    (0..4).for_each(|id| _ = solo.read(id, 1000));
    let sent = solo.packets();
    assert_eq!(solo.end.engine.footprint().in_flight_packets, 4);
    answer(&mut solo, questions(&sent)[0]);
    assert_eq!(solo.end.engine.footprint().in_flight_packets, 4);
    for psn in 0..4 {
        solo.receive_data(Opcode::RC_RDMA_READ_RESPONSE_ONLY, psn, &[7; 1000]);
    }
    assert_eq!(solo.completed().len(), 4);
    assert_eq!(solo.end.engine.footprint().in_flight_packets, 0);
}

/// Each side learns at a moment of its own, or never, while packets are lost: no message is, and
/// all charges are given back.
#[test]
fn whoever_learns_when_nothing_is_lost() {
    let mut repaired = 0;
    for seed in 0..400u64 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut draw = move |below: u64| random.u64(..below);
        let mut pair = Pair::new(&Setup { arena: 1 << 20, retry_cnt: 7, ..strangers(QpType::Rc) });
        let keys = pair.register();
        let messages = 12;
        let bytes = pattern(256 << 10, 7);
        let mut expected = [vec![0; 1 << 20], vec![0; 1 << 20]];
        for (expected, end) in expected.iter_mut().zip(&mut pair.ends) {
            expected[..bytes.len()].copy_from_slice(&bytes);
            end.host.arena[..bytes.len()].copy_from_slice(&bytes);
        }
        for at in 0..2 {
            for id in 0..messages {
                let offset = (id * 20_011) % (200 << 10);
                let len = 1 + draw(40_000) as u32;
                let remote = sge((512 << 10) + offset, 1, keys[1 - at]).addr;
                let rkey = keys[1 - at];
                let op = match draw(4) {
                    0 => SendOp::Read { remote: sge(offset, 1, rkey).addr, rkey },
                    _ => SendOp::Write { remote, rkey, imm: None },
                };
                let (here, end, to) = match op {
                    SendOp::Read { .. } => ((768 << 10) + offset, at, (768 << 10) + offset),
                    _ => (offset, 1 - at, (512 << 10) + offset),
                };
                let from = offset as usize..offset as usize + len as usize;
                expected[end][to as usize..][..len as usize].copy_from_slice(&bytes[from]);
                pair.send(at, id, op, &[sge(here, len, keys[at])]);
            }
        }
        // A question or an answer may be lost: then that side never learns.
        let loses = 8 + draw(60);
        pair.pass = Box::new(move |_, packet| match recognition(packet) {
            Some(_) => draw(4) > 0,
            None => draw(loses) > 0,
        });
        pair.run();
        for at in 0..2 {
            let end = &mut pair.ends[at];
            let done = end.host.completed();
            let expected: Vec<_> = (0..messages).map(|id| (id, WcStatus::Success)).collect();
            assert_eq!(done, expected, "seed {seed}");
            let footprint = end.engine.footprint();
            let left = (footprint.in_flight_packets, footprint.waiting_for_credit);
            assert_eq!((left, footprint.forgotten), ((0, 0), 0), "seed {seed}");
            assert_eq!((footprint.credit_users, footprint.reordered_packets), (1, 0));
            repaired += end.engine.counters().retransmitted_pkts;
        }
        let arenas = pair
            .ends
            .each_ref()
            .map(|end| end.host.arena == expected[usize::from(end.addr == addr(2))]);
        assert_eq!(arenas, [true; 2], "seed {seed}");
    }
    assert!(repaired > 1000, "{repaired}");
}

// ---- several engines of one device ----
