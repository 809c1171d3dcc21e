//! Credit, wait queues and turns.

use super::*;
use crate::tuning::credit::EXPECTED_NS;
use crate::tuning::long_runs::STABLE_PACKETS;
use crate::types::QueueKind::{Frames, Memory, Places};

const OURS: IpAddr = IpAddr::V4(core::net::Ipv4Addr::new(10, 0, 0, 1));

/// The peer's queue pair.
const QPN: Option<Qpn> = Some(Qpn::new(0x07_0123));
const ROOM: Budget = Budget { bytes: 10_000, datagrams: 4 };

/// One peer, for which all queue pairs here wait.
fn peers() -> (Peers, PeerId) {
    let mut peers = Peers::new(ROOM, STABLE_PACKETS);
    peers.reserve(8);
    let id = peers.join((OURS, [10, 0, 0, 2].into()), QPN, ROOM, PeerKind::Rocinante(Frames));
    (peers, id)
}

fn granted(peers: &mut Peers) -> Vec<u32> {
    std::iter::from_fn(|| peers.granted.pop_front()).collect()
}

#[test]
fn a_datagram_costs_its_slab_and_the_skb() {
    let steps = [(160, 832), (608, 1280), (1632, 2304), (3680, 4352), (7776, 8448)];
    let mut next = 0;
    for (last, cost) in steps {
        assert_eq!([next, last].map(Budget::cost), [cost; 2]);
        next = last + 1;
    }
    assert_eq!(Budget::cost(7777), 2 * 7777 + 2048);
    assert_eq!(Budget::cost(u32::MAX), u32::MAX);
    let peers = Peers::new(ROOM, STABLE_PACKETS);
    assert_eq!([100, 1000, 2000].map(|len| peers.answers(len)), [4, 4, 2]);
}

#[test]
fn a_part_is_rounded_down() {
    let part = Budget { bytes: 1001, datagrams: 7 }.part(3, 4);
    assert_eq!(part, Budget { bytes: 750, datagrams: 5 });
    let all = Budget { bytes: u32::MAX, datagrams: u32::MAX };
    assert_eq!(all.part(u32::MAX, u32::MAX), all);
}

/// Whether our own receive queue has spare credit for `datagrams` datagrams.
fn spares(peers: &Peers, datagrams: u32) -> bool {
    peers.spared().datagrams >= datagrams
}

#[test]
fn bytes_and_datagrams_both_limit() {
    let mut receiver = CreditAccount::new(ROOM, Frames, STABLE_PACKETS);
    assert!(receiver.fits(Cost::of(1, 10_001)), "with nothing in flight anything fits");
    receiver.charge(Cost::of(2, 2_000));
    assert!(receiver.fits(Cost::of(2, 3_000)));
    assert!(!receiver.fits(Cost::of(2, 3_001)) && !receiver.fits(Cost::of(3, 1)));
}

#[test]
fn a_queue_pair_that_stops_waiting_takes_no_other_along() {
    let (mut peers, id) = peers();
    peers.get(id).charge(Cost::of(4, 1));
    let (mut first, mut second, mut third) = (None, None, None);
    for (slot, waiting) in [(1, &mut first), (2, &mut second), (3, &mut third)] {
        peers.wait(slot, waiting, id, Cost::of(1, 1), false);
    }
    assert!(!peers.has_granted());
    peers.quit(2, &mut second);
    assert_eq!(granted(&mut peers), []);
    peers.release(id, Cost::of(4, 1));
    // One at a time: the next when the turn before is over.
    assert!(peers.has_granted());
    assert_eq!(granted(&mut peers), [1]);
    assert!(peers.get(id).admits(1, Cost::of(1, 1)));
    assert!(!peers.get(id).admits(3, Cost::of(1, 1)));
    peers.quit(1, &mut first);
    assert_eq!(granted(&mut peers), [3]);
    peers.quit(3, &mut third);
    assert_eq!((granted(&mut peers), first, second, third), (vec![], None, None, None));
}

#[test]
fn a_turn_in_vain_keeps_its_place() {
    let (mut peers, id) = peers();
    peers.get(id).charge(Cost::of(4, 1));
    let (mut first, mut second) = (None, None);
    peers.wait(1, &mut first, id, Cost::of(1, 1), false);
    peers.wait(2, &mut second, id, Cost::of(1, 1), false);
    peers.release(id, Cost::of(1, 1));
    assert_eq!(granted(&mut peers), [1]);
    peers.get(id).charge(Cost::of(1, 1));
    peers.wait(1, &mut first, id, Cost::of(1, 1), false);
    peers.release(id, Cost::of(1, 1));
    assert_eq!(granted(&mut peers), [1]);
    // One that got something done goes to the end.
    peers.wait(1, &mut first, id, Cost::of(1, 1), true);
    assert_eq!(granted(&mut peers), [2]);
    peers.forget(2);
    assert!(!peers.has_granted());
}

#[test]
fn a_queue_pair_that_waits_for_longer_than_it_must_is_counted() {
    let (mut peers, id) = peers();
    peers.get(id).charge(Cost::of(4, 1));
    let mut waiting = [None; 2];
    for (slot, waiting) in (0..).zip(&mut waiting) {
        peers.wait(slot, waiting, id, Cost::of(1, 1), false);
    }
    let forgotten = |peers: &Peers, waiting: [Option<PeerId>; 2], has_turn| {
        peers.forgotten(|slot| waiting[slot as usize], |_| has_turn)
    };
    assert_eq!(forgotten(&peers, waiting, false), 0, "there is no credit");
    assert_eq!(
        forgotten(&peers, [waiting[0], None], false),
        1,
        "one is in a wait queue for naught"
    );
    peers.get(id).release(Cost::of(1, 1));
    assert_eq!(forgotten(&peers, waiting, false), 1, "there is credit, and no slot was called");
    peers.grant(id);
    assert_eq!(forgotten(&peers, waiting, false), 0, "the engine will call it");
    assert_eq!(granted(&mut peers), [0]);
    assert_eq!(forgotten(&peers, waiting, true), 0, "it has a turn");
    assert_eq!(forgotten(&peers, waiting, false), 1, "it has none");
    peers.quit(0, &mut waiting[0]);
    peers.get(id).charge(Cost::of(1, 1));
    assert_eq!(forgotten(&peers, waiting, false), 0, "the turn is the other's");
}

#[test]
fn an_overdue_answer_gives_its_credit_back_once() {
    let (mut peers, _) = peers();
    peers.age(Time(EXPECTED_NS));
    let old = peers.expect(Cost::of(2, 100));
    // The epoch decides.
    peers.age(Time(2 * EXPECTED_NS - 1));
    assert!({ old }.add(peers.expect(Cost::of(1, 100))));
    peers.age(Time(2 * EXPECTED_NS));
    let young = peers.expect(Cost::of(1, 100));
    assert!(!{ young }.add(old));
    assert!(!spares(&peers, 1), "neither is overdue");
    peers.age(Time(3 * EXPECTED_NS));
    assert!(peers.has_forgotten(old) && !peers.has_forgotten(young));
    assert!(spares(&peers, 3) && !spares(&peers, 4));
    // A late answer gives nothing back twice.
    peers.answered(old);
    assert!(!spares(&peers, 4));
    peers.answered(young);
    assert!(spares(&peers, 4));
}

#[test]
fn after_a_pause_all_answers_are_overdue() {
    let (mut peers, _) = peers();
    peers.age(Time(EXPECTED_NS));
    let asked = peers.expect(Cost::of(4, 100));
    peers.age(Time(3 * EXPECTED_NS));
    assert!(peers.has_forgotten(asked));
    assert!(spares(&peers, 4));
}

#[test]
fn the_entry_of_a_peer_without_users_is_taken_by_the_next() {
    let (mut peers, first) = peers();
    let said = Budget { bytes: 1, datagrams: 1 };
    let same = peers.join((OURS, [10, 0, 0, 2].into()), QPN, ROOM, PeerKind::Rocinante(Frames));
    assert_eq!((same, peers.get(same).announced), (first, ROOM));
    assert_ne!(peers.join((OURS, [10, 0, 0, 3].into()), QPN, said, PeerKind::Standard), first);
    peers.leave(first);
    assert_ne!(
        peers.join((OURS, [10, 0, 0, 4].into()), QPN, said, PeerKind::Standard),
        first,
        "one still uses it"
    );
    peers.leave(first);
    let next = peers.join((OURS, [10, 0, 0, 5].into()), QPN, said, PeerKind::Standard);
    assert_eq!((next, peers.get(next).announced), (first, said));
}

/// Several shards or processes behind one address have a queue each.
#[test]
fn slots_behind_one_address_have_queues_of_their_own() {
    let mut peers = Peers::new(ROOM, STABLE_PACKETS);
    let address = [10, 0, 0, 2].into();
    let join = |peers: &mut Peers, qpn, limit, kind| {
        let id = peers.join((OURS, address), Some(Qpn::new(qpn)), limit, kind);
        (id, peers.get(id).announced)
    };
    let (first, _) = join(&mut peers, 0x01_0002, ROOM, PeerKind::Rocinante(Frames));
    assert_eq!(join(&mut peers, 0x01_ffff, ROOM, PeerKind::Rocinante(Frames)), (first, ROOM));
    let other = Budget { bytes: 7_000, datagrams: 3 };
    let (second, limit) = join(&mut peers, 0x02_0002, other, PeerKind::Rocinante(Memory));
    assert_eq!((limit, peers.get(first).announced), (other, ROOM), "it speaks for itself");
    peers.get(first).charge(Cost::of(4, 1));
    assert!(!peers.get(first).admits(1, Cost::of(1, 1)));
    assert!(peers.get(second).admits(1, Cost::of(3, 1)));
    // It announces anew, which the other slot does not notice.
    assert_eq!(join(&mut peers, 0x02_0003, ROOM, PeerKind::Rocinante(Memory)), (second, ROOM));
    peers.get(second).charge(Cost::of(1, 1));
    // A number of another implementation's names no slot, and neither does an address handle.
    let (standard, limit) = join(&mut peers, 0x01_0002, Budget::STANDARD, PeerKind::Standard);
    assert!(standard != first && limit == Budget::STANDARD);
    assert_eq!(join(&mut peers, 0x02_0002, ROOM, PeerKind::Standard), (standard, limit));
    let handle = peers.join((OURS, address), None, other, PeerKind::Rocinante(Memory));
    assert_eq!((handle, peers.get(handle).announced), (standard, other), "which it announced");
    assert_eq!(join(&mut peers, 0x03_0000, ROOM, PeerKind::Standard), (standard, other));
}

#[test]
fn the_engine_knows_when_our_own_credit_comes_back() {
    let (mut peers, _) = peers();
    peers.age(Time(EXPECTED_NS));
    peers.expect(Cost::of(4, 100));
    assert_eq!(peers.next_age(), None);
    peers.wait(1, &mut None, PeerId::OWN, Cost::of(1, 1), false);
    assert_eq!(peers.next_age(), Some(Time(2 * EXPECTED_NS)));
    peers.age(Time(4 * EXPECTED_NS));
    assert_eq!(granted(&mut peers), [1]);
}

#[test]
fn a_ring_is_taken_to_hold_more_while_super_packets_leave_and_nothing_is_lost() {
    let ring = Budget { bytes: 100 * 133_118, datagrams: 100 };
    let mut peers = Peers::new(ROOM, STABLE_PACKETS);
    let id = peers.join((OURS, [10, 0, 0, 2].into()), QPN, ring, PeerKind::Rocinante(Places));
    let room = |peers: &mut Peers| peers.get(id).room_for(1).datagrams;
    let acknowledge = |peers: &mut Peers, packets| {
        for _ in 0..packets / 64 {
            peers.get(id).charge(Cost::of(64, 2304));
            peers.release(id, Cost::of(64, 2304));
        }
    };
    let depart = |peers: &mut Peers, each| {
        (0..400).for_each(|_| peers.departed(1, each, u64::from(each) * 1040));
    };
    depart(&mut peers, 40);
    assert_eq!(room(&mut peers), 100, "before anything was acknowledged");
    acknowledge(&mut peers, 1024);
    assert_eq!(room(&mut peers), 400);
    let other = peers.join((OURS, [10, 0, 0, 3].into()), QPN, Budget::STANDARD, PeerKind::Standard);
    acknowledge(&mut peers, 4096);
    assert_eq!(peers.get(other).room_for(1).datagrams, 16, "it announced nothing");
    depart(&mut peers, 1);
    assert_eq!(room(&mut peers), 400, "they leave one by one: as the packets in flight arrive");
    acknowledge(&mut peers, 64);
    assert_eq!(room(&mut peers), 368, "it shrinks by half of that");
    acknowledge(&mut peers, 640);
    assert_eq!(room(&mut peers), 100);
    depart(&mut peers, 2);
    assert_eq!(room(&mut peers), 150);
    depart(&mut peers, 40);
    peers.get(id).charge(Cost::of(390, 2304));
    peers.lost(id);
    assert_eq!(room(&mut peers), 0);
    peers.release(id, Cost::of(390, 2304));
    assert_eq!(room(&mut peers), 100);
    acknowledge(&mut peers, (2 << 20) - 512);
    assert_eq!(room(&mut peers), 100);
    acknowledge(&mut peers, 512);
    assert_eq!(room(&mut peers), 400, "forgotten");
    assert_eq!(peers.get(PeerId::OWN).room_for(1).datagrams, 4, "our own is the same");
    let smaller = Budget { bytes: 50 * 133_118, datagrams: 50 };
    peers.join((OURS, [10, 0, 0, 2].into()), QPN, smaller, PeerKind::Rocinante(Places));
    assert_eq!(
        room(&mut peers),
        200,
        "it announces that anew: at once four times of it, and no more"
    );
}

#[test]
fn more_is_requested_while_answers_come_in_runs_and_none_is_lost() {
    let socket = Budget { bytes: 300 * 8448, datagrams: 300 * 8448 / 832 };
    let mut peers = Peers::new(socket, STABLE_PACKETS).of_kind(Memory);
    let come = |peers: &mut Peers, runs: u32| {
        for _ in 0..200 {
            peers.arrived(runs, 15, 15 * 4112);
        }
    };
    let ask = |peers: &mut Peers, packets| {
        for _ in 0..packets / 64 {
            let asked = peers.expect(Cost::of(64, 8448));
            peers.answered(asked);
        }
    };
    come(&mut peers, 1);
    assert_eq!(peers.answers(4112), 300, "before any came");
    ask(&mut peers, 1024);
    assert_eq!(peers.answers(4112), 525);
    come(&mut peers, 15);
    assert_eq!(peers.answers(4112), 300, "one by one");
    come(&mut peers, 1);
    assert_eq!(peers.answers(4112), 525);
    assert_eq!(peers.charge_of_answer(15, 8448).datagrams, 15, "its memory counts");
    peers.lost(PeerId::OWN);
    assert_eq!(peers.answers(4112), 300);
    ask(&mut peers, (2 << 20) - 64);
    assert_eq!(peers.answers(4112), 300);
    ask(&mut peers, 64);
    assert_eq!(peers.answers(4112), 525, "forgotten");
}

/// An answer of several datagrams takes fewer places of a ring, which is taken to hold no more.
#[test]
fn answers_that_come_in_runs_take_fewer_places_of_a_ring() {
    for (queue, places, answers) in [(Places, 2, 500..=540), (Frames, 15, 48..=48)] {
        let own = Budget { bytes: 48 * 133_118, datagrams: 48 };
        let mut peers = Peers::new(own, STABLE_PACKETS).of_kind(queue);
        let asked = peers.expect(Cost::of(2048, 1));
        peers.answered(asked);
        (0..200).for_each(|_| peers.arrived(1, 15, 15 * 4112));
        assert_eq!(
            peers.charge_of_answer(15, 8448),
            Cost { datagrams: places, ..Cost::of(15, 8448) }
        );
        assert_eq!(peers.charge_of_answer(1, 8448), Cost::of(1, 8448));
        assert!(answers.contains(&peers.answers(4112)), "{queue:?}: {}", peers.answers(4112));
        assert_eq!((peers.get(PeerId::OWN).capacity, peers.answers_one_by_one(4112)), (own, 48));
    }
}

#[test]
fn three_quarters_of_bytes_and_of_datagrams_are_free() {
    let mut receiver =
        CreditAccount::new(Budget { bytes: 8_000, datagrams: 8 }, Frames, STABLE_PACKETS);
    receiver.charge(Cost::of(1, 2_000));
    assert!(receiver.is_mostly_free(1) && !receiver.is_mostly_free(2));
    receiver.charge(Cost { bytes: 1, datagrams: 0 });
    assert!(!receiver.is_mostly_free(0), "more than a quarter of the bytes is in flight");
}

#[test]
fn the_port_says_how_long_runs_are_and_how_fast_packets_leave() {
    let runs = RunLimits { bytes: 9_000, packets: 3 };
    let pacing = Pacing { packet_ns: 5_000_000, kib_ns: 0, queue_min: ROOM };
    let mut peers = Peers::new(ROOM, STABLE_PACKETS).sending(runs, pacing);
    assert_eq!(peers.runs(), runs);
    let id = peers.join((OURS, [10, 0, 0, 2].into()), QPN, ROOM, PeerKind::Standard);
    assert!(leave_at_once(&mut peers, id) < 8, "half of a queue of four datagrams leaves at once");
}

/// Number of unacknowledged packets that leave for `id` at once.
fn leave_at_once(peers: &mut Peers, id: PeerId) -> usize {
    let (now, charge) = (Time(1 << 40), Cost::of(1, 1_000));
    let left = (0..100).take_while(|_| {
        let may = peers.pace(id).admit(now, charge).is_ok();
        peers.pace_mut(id).sent(charge, 64);
        may
    });
    left.count()
}

#[test]
fn the_pace_follows_the_queue_that_a_peer_announces_anew() {
    let pacing = Pacing { queue_min: ROOM, ..Pacing::default() };
    let mut peers = Peers::new(ROOM, STABLE_PACKETS).sending(RunLimits::default(), pacing);
    let large = Budget { bytes: 100_000, datagrams: 40 };
    let [first, second] = [ROOM, large].map(|budget| {
        let to = (OURS, [10, 0, 0, 2].into());
        peers.join(to, QPN, budget, PeerKind::Rocinante(Frames))
    });
    assert_eq!((first == second, leave_at_once(&mut peers, first)), (true, 20));
}

#[test]
fn a_peer_speaks_for_the_slots_that_it_has() {
    let mut peers = Peers::new(ROOM, STABLE_PACKETS);
    let kind = PeerKind::Rocinante(Frames);
    let [first, second, other] =
        [(2, 0x00_0001), (2, 0x01_0001), (3, 0x00_0001)].map(|(host, qpn)| {
            peers.join((OURS, [10, 0, 0, host].into()), Some(Qpn::new(qpn)), ROOM, kind)
        });
    peers.learn([10, 0, 0, 2].into(), Some((1, Pacing { packet_ns: 100, ..Pacing::default() })));
    let paces = |peers: &Peers| [first, second, other].map(|id| peers.pace(id).packet_ns());
    assert_eq!(paces(&peers), [100, 800, 800], "it has one slot; another peer is unknown");
    peers.learn([10, 0, 0, 3].into(), None);
    assert_eq!(paces(&peers), [100, 800, 800]);
    peers.learn([10, 0, 0, 2].into(), None);
    assert_eq!(paces(&peers), [800; 3], "it holds no more");
}
