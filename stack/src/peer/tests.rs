//! Room, lines and turns.

use super::expected::EXPECTED_NS;
use super::*;

const ROOM: Budget = Budget { bytes: 10_000, datagrams: 4 };

/// A pool of one peer, which everybody here waits for.
fn peers() -> (Peers, PeerId) {
    let mut peers = Peers::new(ROOM, crate::peer::CALM);
    peers.reserve(8);
    let id = peers.join([10, 0, 0, 2].into(), ROOM, true);
    (peers, id)
}

fn called(peers: &mut Peers) -> Vec<u32> {
    std::iter::from_fn(|| peers.next_called()).collect()
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
    let peers = Peers::new(ROOM, crate::peer::CALM);
    assert_eq!([100, 1000, 2000].map(|len| peers.answers(len)), [4, 4, 2]);
}

#[test]
fn a_part_is_rounded_down() {
    let part = Budget { bytes: 1001, datagrams: 7 }.part(3, 4);
    assert_eq!(part, Budget { bytes: 750, datagrams: 5 });
    let all = Budget { bytes: u32::MAX, datagrams: u32::MAX };
    assert_eq!(all.part(u32::MAX, u32::MAX), all);
}

/// Whether our own receive queue has credit for so many datagrams that nothing needs.
fn spares(peers: &Peers, datagrams: u32) -> bool {
    peers.spared().datagrams >= datagrams
}

#[test]
fn bytes_and_datagrams_both_limit() {
    let mut pool = Receiver::new(ROOM, CALM);
    assert!(pool.fits(Cost::of(1, 10_001)), "a pool that nobody uses takes anything");
    pool.charge(Cost::of(2, 2_000));
    assert!(pool.fits(Cost::of(2, 3_000)));
    assert!(!pool.fits(Cost::of(2, 3_001)) && !pool.fits(Cost::of(3, 1)));
}

#[test]
fn who_leaves_the_line_takes_nobody_along() {
    let (mut peers, id) = peers();
    peers.get(id).charge(Cost::of(4, 1));
    let (mut first, mut second, mut third) = (None, None, None);
    for (slot, waiting) in [(1, &mut first), (2, &mut second), (3, &mut third)] {
        peers.wait(slot, waiting, id, Cost::of(1, 1), false);
    }
    assert!(!peers.has_called());
    peers.quit(2, &mut second);
    assert_eq!(called(&mut peers), []);
    peers.release(id, Cost::of(4, 1));
    // One at a time: the next when the one before had its turn.
    assert!(peers.has_called());
    assert_eq!(called(&mut peers), [1]);
    assert!(peers.get(id).admits(1, Cost::of(1, 1)));
    assert!(!peers.get(id).admits(3, Cost::of(1, 1)));
    peers.quit(1, &mut first);
    assert_eq!(called(&mut peers), [3]);
    peers.quit(3, &mut third);
    assert_eq!((called(&mut peers), first, second, third), (vec![], None, None, None));
}

#[test]
fn who_was_called_in_vain_stays_the_first() {
    let (mut peers, id) = peers();
    peers.get(id).charge(Cost::of(4, 1));
    let (mut first, mut second) = (None, None);
    peers.wait(1, &mut first, id, Cost::of(1, 1), false);
    peers.wait(2, &mut second, id, Cost::of(1, 1), false);
    peers.release(id, Cost::of(1, 1));
    assert_eq!(called(&mut peers), [1]);
    peers.get(id).charge(Cost::of(1, 1));
    peers.wait(1, &mut first, id, Cost::of(1, 1), false);
    peers.release(id, Cost::of(1, 1));
    assert_eq!(called(&mut peers), [1]);
    // One that got something done goes to the end.
    peers.wait(1, &mut first, id, Cost::of(1, 1), true);
    assert_eq!(called(&mut peers), [2]);
    peers.forget(2);
    assert!(!peers.has_called());
}

#[test]
fn what_is_not_answered_is_forgotten_in_its_turn() {
    let (mut peers, _) = peers();
    peers.age(Time(EXPECTED_NS));
    let old = peers.expect(Cost::of(2, 100));
    // It is not the same to have asked later.
    peers.age(Time(2 * EXPECTED_NS - 1));
    assert!({ old }.add(peers.expect(Cost::of(1, 100))));
    peers.age(Time(2 * EXPECTED_NS));
    let young = peers.expect(Cost::of(1, 100));
    assert!(!{ young }.add(old));
    assert!(!spares(&peers, 1), "both are reckoned with");
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
fn after_a_pause_nothing_is_reckoned_with() {
    let (mut peers, _) = peers();
    peers.age(Time(EXPECTED_NS));
    let asked = peers.expect(Cost::of(4, 100));
    peers.age(Time(3 * EXPECTED_NS));
    assert!(peers.has_forgotten(asked));
    assert!(spares(&peers, 4));
}

#[test]
fn the_place_of_a_peer_that_left_is_the_next_ones() {
    let (mut peers, first) = peers();
    let said = Budget { bytes: 1, datagrams: 1 };
    let same = peers.join([10, 0, 0, 2].into(), said, false);
    assert_eq!((same, peers.get(same).limit), (first, ROOM));
    let other = peers.join([10, 0, 0, 3].into(), said, false);
    assert_ne!(other, first);
    peers.leave(first);
    assert_ne!(peers.join([10, 0, 0, 4].into(), said, false), first, "one still uses it");
    peers.leave(first);
    let next = peers.join([10, 0, 0, 5].into(), said, false);
    assert_eq!((next, peers.get(next).limit), (first, said));
}

#[test]
fn somebody_is_told_when_our_own_room_will_be_free() {
    let (mut peers, _) = peers();
    peers.age(Time(EXPECTED_NS));
    peers.expect(Cost::of(4, 100));
    assert_eq!(peers.next_age(), None);
    peers.wait(1, &mut None, PeerId::OWN, Cost::of(1, 1), false);
    assert_eq!(peers.next_age(), Some(Time(2 * EXPECTED_NS)));
    peers.age(Time(4 * EXPECTED_NS));
    assert_eq!(called(&mut peers), [1]);
}

#[test]
fn a_ring_is_taken_to_hold_more_while_super_packets_leave_and_nothing_is_lost() {
    let ring = Budget { bytes: 100 * 133_118, datagrams: 100 };
    let mut peers = Peers::new(ROOM, crate::peer::CALM);
    let id = peers.join([10, 0, 0, 2].into(), ring, true);
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
    let other = peers.join([10, 0, 0, 3].into(), Budget::STANDARD, false);
    acknowledge(&mut peers, 4096);
    assert_eq!(peers.get(other).room_for(1).datagrams, 16, "it said nothing");
    depart(&mut peers, 1);
    assert_eq!(room(&mut peers), 400, "they leave one by one: as what is under way comes");
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
    assert_eq!(peers.get(PeerId::OWN).room_for(1).datagrams, 4, "our own is what it is");
    let smaller = Budget { bytes: 50 * 133_118, datagrams: 50 };
    peers.join([10, 0, 0, 2].into(), smaller, true);
    assert_eq!(room(&mut peers), 200, "it says so anew: at once four times that, and no more");
}

#[test]
fn more_is_asked_for_while_answers_come_dense_and_none_is_lost() {
    let socket = Budget { bytes: 300 * 8448, datagrams: 300 * 8448 / 832 };
    let mut peers = Peers::new(socket, crate::peer::CALM);
    let come = |peers: &mut Peers, runs: u32| {
        for _ in 0..200 {
            peers.arrived_in_runs(runs, 15, 15 * 4112);
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
    peers.lost(PeerId::OWN);
    assert_eq!(peers.answers(4112), 300);
    ask(&mut peers, (2 << 20) - 64);
    assert_eq!(peers.answers(4112), 300);
    ask(&mut peers, 64);
    assert_eq!(peers.answers(4112), 525, "forgotten");
}
