//! Two of each object that queue pairs use: shared receive queues, address handles, peers, keys,
//! windows, completion queues, groups. A reused number carries nothing of its former owner.

use rocinante_stack::mem::{Access, Accessor, Bind, MwType, PdId};
use rocinante_stack::types::Key;
use rocinante_stack::verbs::{AhId, CqId, Destination, QpState, QpType, RecvWr, SendOp, WcStatus};
use rocinante_stack::wire::Opcode as Op;
use rocinante_stack::{Budget, PeerAddress, PeerKind, QpInit, SrqChange, SrqError, SrqInit};

use crate::common::{BASE, End, PD, PEER, QKEY, Setup, Solo, addr, qp_init, reth, sge, to};
use crate::reuse::{OTHER, setup, turn_to, two};

// ---- shared receive queues ----

fn srq_end() -> (Solo, [rocinante_stack::verbs::SrqId; 2]) {
    let mut solo = two();
    let make = |solo: &mut Solo| {
        let init = SrqInit { pd: PD, max_wr: 4, max_sge: 4 };
        solo.end.engine.create_srq(&init).unwrap()
    };
    let both = [make(&mut solo), make(&mut solo)];
    let old = solo.end.qpns.clone();
    for (qpn, srq) in old.into_iter().zip(both) {
        solo.end.engine.destroy_qp(qpn).unwrap();
        let init = QpInit { srq: Some(srq), ..qp_init(&setup()) };
        assert_eq!(solo.end.engine.create_qp(&init, qpn.value()), Some(qpn));
        solo.end.connect(qpn, 0, PEER, &setup());
    }
    (solo, both)
}

#[test]
fn two_shared_receive_queues_have_receives_limits_and_events_of_their_own() {
    let (mut solo, [first, second]) = srq_end();
    let [a, b] = [solo.end.qpns[0], solo.end.qpns[1]];
    let list = [solo.sge(8192, 100)];
    let limit = SrqChange { max_wr: None, srq_limit: Some(1) };
    for (srq, base) in [(first, 10), (second, 20)] {
        for wr_id in base..base + 2 {
            solo.end.engine.post_srq_recv(srq, &RecvWr { wr_id, sges: &list }).unwrap();
        }
        solo.end.engine.modify_srq(srq, &limit).unwrap();
    }
    for (qpn, base) in [(b, 20), (a, 10)] {
        turn_to(&mut solo, qpn);
        for psn in 0..2 {
            solo.receive_request(Op::RC_SEND_ONLY, psn, &[&[1; 8]]);
        }
        assert_eq!(solo.completed(), [(base, WcStatus::Success), (base + 1, WcStatus::Success)]);
    }
    // The first queue is destroyed with its event; the event of the other is still pending.
    solo.end.engine.destroy_qp(a).unwrap();
    assert_eq!(solo.end.engine.destroy_srq(second), Err(SrqError::InUse));
    solo.end.engine.destroy_srq(first).unwrap();
    // Its number is given out again; the new queue inherits nothing.
    let init = SrqInit { pd: PD, max_wr: 4, max_sge: 4 };
    assert_eq!(solo.end.engine.create_srq(&init), Some(first));
    assert_eq!(solo.end.engine.query_srq(first).unwrap().srq_limit, 0);
    assert_eq!(solo.end.engine.poll_srq_event(), Some(second));
    assert_eq!(solo.end.engine.poll_srq_event(), None);
    let init = QpInit { srq: Some(first), ..qp_init(&setup()) };
    let c = solo.end.engine.create_qp(&init, a.value()).unwrap();
    solo.end.connect(c, 0, PEER, &setup());
    turn_to(&mut solo, c);
    solo.sent();
    solo.receive_request(Op::RC_SEND_ONLY, 0, &[&[1; 8]]);
    assert_eq!(solo.sent(), ["RNR #0 timer 12"], "it is empty");
}

// ---- address handles and peers ----

#[test]
fn an_address_handle_in_the_place_of_another_is_another() {
    let mut solo = Solo::new(&Setup { qp_type: QpType::Ud, ..Setup::script() });
    let peer = |n| PeerAddress {
        local: addr(1),
        remote: addr(n),
        path: n.into(),
        budget: Budget::STANDARD,
        kind: PeerKind::Standard,
    };
    let [first, second] = [2, 3].map(|n| solo.end.engine.create_ah(PD, &peer(n)).unwrap());
    assert!(solo.end.engine.destroy_ah(first));
    let third = solo.end.engine.create_ah(PD, &peer(4)).unwrap();
    assert!(!solo.end.engine.destroy_ah(first), "it is gone");
    let footprint = solo.end.engine.footprint();
    assert_eq!((footprint.address_handles, footprint.credit_users), (2, 2));
    let send = |solo: &mut Solo, ah: AhId| {
        let to = Destination { ah, qpn: PEER, qkey: QKEY };
        solo.post(1, SendOp::SendTo { to, imm: None }, &[]);
        let sent = solo.sent().len();
        (sent, solo.completed()[0].1)
    };
    for ah in [second, third] {
        assert_eq!(send(&mut solo, ah), (1, WcStatus::Success));
    }
    assert_eq!(send(&mut solo, first), (0, WcStatus::LocProtErr));
}

/// All queue pairs that send to a peer share its credit. One that is destroyed gives back only the
/// credit of its own packets. When all have gone, the next peer in that slot begins with its
/// announced credit.
#[test]
fn the_room_of_a_peer_belongs_to_all_who_send_there() {
    let budget = Budget { bytes: 1 << 20, datagrams: 4 };
    let setup = Setup { budget, ..setup() };
    let mut solo = Solo::new(&setup);
    let [a, b] = [solo.end.qpns[0], solo.end.qpns[1]];
    solo.end.connect(b, 0, OTHER, &setup);
    for qpn in [a, b] {
        turn_to(&mut solo, qpn);
        solo.sends(1..=2, 10);
    }
    assert_eq!(solo.sent().len(), 4);
    solo.end.engine.destroy_qp(a).unwrap();
    assert_eq!(solo.end.engine.footprint().in_flight_packets, 2, "the other's");
    assert_eq!(solo.sends(3..=6, 10).sent().len(), 2, "as much as the first gave back");
    solo.end.engine.destroy_qp(b).unwrap();
    let left = solo.end.engine.footprint();
    assert_eq!((left.in_flight_packets, left.credit_users, left.waiting_for_credit), (0, 0, 0));
    // Another peer in the slot of the first, with other credit.
    let setup = Setup { budget: Budget { bytes: 1 << 20, datagrams: 3 }, ..setup };
    let c = solo.end.engine.create_qp(&qp_init(&setup), a.value()).unwrap();
    for mut attr in crate::common::steps(0, addr(1), PEER, &setup) {
        if let Some(peer) = &mut attr.peer {
            peer.remote = addr(9);
        }
        solo.end.modify(c, &attr).unwrap();
    }
    turn_to(&mut solo, c);
    assert_eq!(solo.sends(1..=6, 10).sent().len(), 3);
}

// ---- keys and windows ----

/// A destroyed queue pair frees only its own windows, and its successor has none of them.
#[test]
fn windows_of_two_queue_pairs_come_and_go_each_by_itself() {
    let mut solo = two();
    let [a, b] = [solo.end.qpns[0], solo.end.qpns[1]];
    let len = solo.setup.arena as u64;
    let region = solo.end.host.register(0, len, Access::LOCAL_WRITE | Access::MW_BIND);
    let table = &mut solo.end.host.regions;
    let mut bind = |qpn, random: u32| {
        let mw = table.insert_window(PD, MwType::Type2, random).unwrap();
        let access = Access::REMOTE_WRITE;
        let bind = Bind { mw, rkey: mw, region, addr: BASE, len: 64, access };
        table.bind(Accessor { pd: PD, qpn }, &bind).unwrap();
        mw
    };
    let windows = [bind(a, 0x7000_0000), bind(b, 0x7100_0000), bind(a, 0x7200_0000)];
    let mut psns = [0i64; 2];
    // Whether the window admits the peer of this queue pair.
    let admits = |solo: &mut Solo, qpn, key: Key, psn: &mut i64| {
        turn_to(solo, qpn);
        solo.receive_request(Op::RC_RDMA_WRITE_ONLY, *psn, &[&reth(BASE, key, 4), &[7; 4]]);
        let answer = solo.sent();
        let done = answer == [format!("ACK #{psn}")];
        if done {
            *psn += 1;
        } else {
            assert_eq!(answer, [format!("NAK #{psn} access")]);
            solo.end.modify(qpn, &to(QpState::Reset)).unwrap();
            let dest = if qpn == solo.end.qpns[0] { PEER } else { OTHER };
            solo.end.connect(qpn, 0, dest, &setup());
            while solo.event().is_some() {}
            *psn = 0;
        }
        done
    };
    assert!(admits(&mut solo, a, windows[0], &mut psns[0]));
    assert!(admits(&mut solo, b, windows[1], &mut psns[1]));
    assert!(!admits(&mut solo, b, windows[0], &mut psns[1]), "another's");
    // Its owner is gone, and the number is given out again.
    solo.end.engine.destroy_qp(a).unwrap();
    solo.end.host.regions.free_windows(a);
    assert_eq!(solo.end.engine.create_qp(&qp_init(&setup()), a.value()), Some(a));
    solo.end.connect(a, 0, PEER, &setup());
    psns[0] = 0;
    for key in [windows[0], windows[2]] {
        assert!(!admits(&mut solo, a, key, &mut psns[0]));
    }
    assert!(admits(&mut solo, b, windows[1], &mut psns[1]), "that of the other");
    assert!(solo.end.host.regions.has_windows(region));
    solo.end.host.regions.free_windows(b);
    assert!(!solo.end.host.regions.has_windows(region));
}

/// Two regions over the same memory: one key is removed alone, and a key that is given out again
/// names the new region.
#[test]
fn keys_of_two_regions_over_one_memory_come_and_go_each_by_itself() {
    let mut solo = two();
    let region =
        |access| rocinante_stack::mem::Region { pd: PD, start: BASE, len: 64, host: 0, access };
    let table = &mut solo.end.host.regions;
    let writes = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let first = table.insert(region(writes), 0x7000_0000).unwrap();
    let second = table.insert(region(writes), 0x7100_0000).unwrap();
    table.remove(first).unwrap();
    let by = Accessor { pd: PD, qpn: solo.end.qpns[0] };
    let at = |key| sge(0, 8, key);
    assert!(table.remote_write(by, &at(first)).is_err());
    assert!(table.remote_write(by, &at(second)).is_ok());
    // The same number, for another domain and other rights.
    let other = rocinante_stack::mem::Region { pd: PdId(9), ..region(Access::REMOTE_READ) };
    assert_eq!(table.insert(other, first.0), Some(first));
    assert!(
        table.remote_write(by, &at(first)).is_err() && table.remote_read(by, &at(first)).is_err()
    );
    let stranger = Accessor { pd: PdId(9), ..by };
    assert!(table.remote_read(stranger, &at(first)).is_ok());
    assert!(table.remote_write(by, &at(second)).is_ok());
}

/// Many keys hash to the same slot: whichever is removed, the others are still found.
#[test]
fn keys_that_collide_are_found_whichever_of_them_goes() {
    use rocinante_stack::mem::{Region, RegionTable};
    const COUNT: u64 = 24;
    for gone in 0..COUNT {
        let mut table = RegionTable::new(COUNT as usize);
        let region = |n| Region { pd: PD, start: n, len: 8, host: n, access: Access::ALL };
        let keys: Vec<_> = (0..COUNT)
            .map(|n| table.insert(region(n), 0x0a00_0000 + (n as u32 * 0x2400)).unwrap())
            .collect();
        assert_eq!(table.remove(keys[gone as usize]).map(|region| region.start), Some(gone));
        for (n, key) in (0..COUNT).zip(&keys) {
            assert_eq!(table.get(*key).map(|region| region.start), (n != gone).then_some(n));
        }
        let again = table.insert(region(99), keys[gone as usize].0).unwrap();
        assert_eq!((again, table.get(again).unwrap().start), (keys[gone as usize], 99));
    }
}

// ---- completion queues and groups ----

/// A completion queue may serve both queues of a queue pair, one of them, or none.
#[test]
fn who_uses_a_completion_queue_that_is_full_breaks_and_nobody_else() {
    let setup = setup();
    let mut solo = two();
    let mut make = |send, recv, random| {
        let init = QpInit { send_cq: CqId(send), recv_cq: CqId(recv), ..qp_init(&setup) };
        let qpn = solo.end.engine.create_qp(&init, random).unwrap();
        solo.end.connect(qpn, 0, PEER, &setup);
        qpn
    };
    let qpns = [make(5, 5, 0x100), make(6, 5, 0x200), make(5, 6, 0x300), make(6, 6, 0x400)];
    let states = |solo: &Solo| qpns.map(|qpn| solo.end.state(qpn));
    let (rts, err) = (QpState::Rts, QpState::Err);
    let end = &mut solo.end;
    end.engine.cq_overflow(CqId(5), &mut end.host);
    assert_eq!(states(&solo), [err, err, err, rts]);
    // Later, a queue with that number breaks the queue pairs that are not broken yet.
    assert_eq!(std::iter::from_fn(|| solo.event()).count(), 3);
    let end = &mut solo.end;
    end.engine.cq_overflow(CqId(6), &mut end.host);
    assert_eq!(states(&solo), [err; 4]);
    assert_eq!(std::iter::from_fn(|| solo.event()).count(), 1);
    assert_eq!(solo.end.qpns.iter().filter(|qpn| solo.end.state(**qpn) == rts).count(), 2);
}

/// The slot of a queue pair that is gone is the next one's; the completion queues are not.
#[test]
fn a_completion_queue_breaks_nobody_who_used_it_only_before() {
    let mut solo = two();
    let init = QpInit { send_cq: CqId(5), recv_cq: CqId(6), ..qp_init(&setup()) };
    let engine = &mut solo.end.engine;
    let qpns = [0x100, 0x200].map(|random| engine.create_qp(&init, random).unwrap());
    engine.destroy_qp(qpns[0]).unwrap();
    let next = QpInit { send_cq: CqId(7), recv_cq: CqId(7), ..init };
    let next = engine.create_qp(&next, 0x300).unwrap();
    let end = &mut solo.end;
    for cq in [5, 6] {
        end.engine.cq_overflow(CqId(cq), &mut end.host);
    }
    assert_eq!((end.state(next), end.state(qpns[1])), (QpState::Reset, QpState::Err));
    end.engine.cq_overflow(CqId(7), &mut end.host);
    assert_eq!(end.state(next), QpState::Err);
}

#[test]
fn who_leaves_one_group_stays_in_another_and_leaves_the_others_in_the_first() {
    let setup = Setup { qp_type: QpType::Ud, qps: 2, ..Setup::script() };
    let mut end = End::new(1, &setup);
    let [a, b] = [end.qpns[0], end.qpns[1]];
    let groups: [std::net::IpAddr; 2] = [[239, 0, 0, 1].into(), [239, 0, 0, 2].into()];
    for group in groups {
        assert_eq!(end.engine.attach_multicast(a, group), Ok(true));
        assert_eq!(end.engine.attach_multicast(b, group), Ok(false));
    }
    assert_eq!(end.engine.detach_multicast(a, groups[0]), Ok(false));
    assert_eq!((end.engine.groups_of(a), end.engine.groups_of(b).len()), (vec![groups[1]], 2));
    end.engine.destroy_qp(a).unwrap();
    assert_eq!(end.engine.create_qp(&qp_init(&setup), a.value()), Some(a));
    assert_eq!((end.engine.groups_of(a), end.engine.groups_of(b).len()), (vec![], 2));
    assert_eq!(end.engine.attach_multicast(a, groups[0]), Ok(false), "one is in it");
    for group in groups {
        assert_eq!(end.engine.detach_multicast(b, group), Ok(group == groups[1]));
    }
}
