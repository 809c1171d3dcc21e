//! Room, lines and turns.

use super::expected::EXPECTED_NS;
use super::*;

const ROOM: Budget = Budget { bytes: 10_000, datagrams: 4 };

/// A pool of one peer, which everybody here waits for.
fn pools() -> (Pools, PoolId) {
    let mut pools = Pools::new(ROOM, crate::pool::CALM);
    pools.reserve(8);
    let id = pools.join([10, 0, 0, 2].into(), ROOM, true);
    (pools, id)
}

fn called(pools: &mut Pools) -> Vec<u32> {
    std::iter::from_fn(|| pools.next_called()).collect()
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
    let pools = Pools::new(ROOM, crate::pool::CALM);
    assert_eq!([100, 1000, 2000].map(|len| pools.answers(len)), [4, 4, 2]);
}

#[test]
fn a_part_is_rounded_down() {
    let part = Budget { bytes: 1001, datagrams: 7 }.part(3, 4);
    assert_eq!(part, Budget { bytes: 750, datagrams: 5 });
    let all = Budget { bytes: u32::MAX, datagrams: u32::MAX };
    assert_eq!(all.part(u32::MAX, u32::MAX), all);
}

#[test]
fn bytes_and_datagrams_both_limit() {
    let mut pool = Pool::new(ROOM, CALM);
    assert!(pool.fits(Charge::of(1, 10_001)), "a pool that nobody uses takes anything");
    assert!(!pool.spares(Charge::of(1, 10_001)));
    pool.charge(Charge::of(2, 2_000));
    assert!(pool.fits(Charge::of(2, 3_000)) && pool.spares(Charge::of(2, 3_000)));
    assert!(!pool.fits(Charge::of(2, 3_001)) && !pool.fits(Charge::of(3, 1)));
    let one = Charge::of(1, 1);
    assert!(!pool.closes_with(one, one));
    assert!(pool.closes_with(one, Charge::of(2, 1)));
    assert!(pool.closes_with(Charge::of(1, 3_000), Charge::of(1, 3_001)));
    assert!(!pool.closes_with(Charge::of(1, 3_000), Charge::of(1, 3_000)));
}

#[test]
fn who_leaves_the_line_takes_nobody_along() {
    let (mut pools, id) = pools();
    pools.get(id).charge(Charge::of(4, 1));
    let (mut first, mut second, mut third) = (None, None, None);
    for (slot, waiting) in [(1, &mut first), (2, &mut second), (3, &mut third)] {
        pools.wait(slot, waiting, id, Charge::of(1, 1), false);
    }
    assert!(!pools.has_called());
    pools.quit(2, &mut second);
    assert_eq!(called(&mut pools), []);
    pools.release(id, Charge::of(4, 1));
    // One at a time: the next when the one before had its turn.
    assert!(pools.has_called());
    assert_eq!(called(&mut pools), [1]);
    assert!(pools.get(id).admits(1, Charge::of(1, 1)));
    assert!(!pools.get(id).admits(3, Charge::of(1, 1)));
    pools.quit(1, &mut first);
    assert_eq!(called(&mut pools), [3]);
    pools.quit(3, &mut third);
    assert_eq!((called(&mut pools), first, second, third), (vec![], None, None, None));
}

#[test]
fn who_was_called_in_vain_stays_the_first() {
    let (mut pools, id) = pools();
    pools.get(id).charge(Charge::of(4, 1));
    let (mut first, mut second) = (None, None);
    pools.wait(1, &mut first, id, Charge::of(1, 1), false);
    pools.wait(2, &mut second, id, Charge::of(1, 1), false);
    pools.release(id, Charge::of(1, 1));
    assert_eq!(called(&mut pools), [1]);
    pools.get(id).charge(Charge::of(1, 1));
    pools.wait(1, &mut first, id, Charge::of(1, 1), false);
    pools.release(id, Charge::of(1, 1));
    assert_eq!(called(&mut pools), [1]);
    // One that got something done goes to the end.
    pools.wait(1, &mut first, id, Charge::of(1, 1), true);
    assert_eq!(called(&mut pools), [2]);
    pools.forget(2);
    assert!(!pools.has_called());
}

#[test]
fn what_is_not_answered_is_forgotten_in_its_turn() {
    let (mut pools, _) = pools();
    pools.age(Time(EXPECTED_NS));
    let old = pools.expect(Charge::of(2, 100));
    // It is not the same to have asked later.
    pools.age(Time(2 * EXPECTED_NS - 1));
    assert!({ old }.add(pools.expect(Charge::of(1, 100))));
    pools.age(Time(2 * EXPECTED_NS));
    let young = pools.expect(Charge::of(1, 100));
    assert!(!{ young }.add(old));
    assert!(!pools.spares(Charge::of(1, 1)), "both are reckoned with");
    pools.age(Time(3 * EXPECTED_NS));
    assert!(pools.has_forgotten(old) && !pools.has_forgotten(young));
    assert!(pools.spares(Charge::of(3, 1)) && !pools.spares(Charge::of(4, 1)));
    // A late answer gives nothing back twice.
    pools.answered(old);
    assert!(!pools.spares(Charge::of(4, 1)));
    pools.answered(young);
    assert!(pools.spares(Charge::of(4, 1)));
}

#[test]
fn after_a_pause_nothing_is_reckoned_with() {
    let (mut pools, _) = pools();
    pools.age(Time(EXPECTED_NS));
    let asked = pools.expect(Charge::of(4, 100));
    pools.age(Time(3 * EXPECTED_NS));
    assert!(pools.has_forgotten(asked));
    assert!(pools.spares(Charge::of(4, 1)));
}

#[test]
fn the_place_of_a_peer_that_left_is_the_next_ones() {
    let (mut pools, first) = pools();
    let said = Budget { bytes: 1, datagrams: 1 };
    let same = pools.join([10, 0, 0, 2].into(), said, false);
    assert_eq!((same, pools.get(same).limit), (first, ROOM));
    let other = pools.join([10, 0, 0, 3].into(), said, false);
    assert_ne!(other, first);
    pools.leave(first);
    assert_ne!(pools.join([10, 0, 0, 4].into(), said, false), first, "one still uses it");
    pools.leave(first);
    let next = pools.join([10, 0, 0, 5].into(), said, false);
    assert_eq!((next, pools.get(next).limit), (first, said));
}

#[test]
fn somebody_is_told_when_our_own_room_will_be_free() {
    let (mut pools, _) = pools();
    pools.age(Time(EXPECTED_NS));
    pools.expect(Charge::of(4, 100));
    assert_eq!(pools.next_age(), None);
    pools.wait(1, &mut None, PoolId::OWN, Charge::of(1, 1), false);
    assert_eq!(pools.next_age(), Some(Time(2 * EXPECTED_NS)));
    pools.age(Time(4 * EXPECTED_NS));
    assert_eq!(called(&mut pools), [1]);
}

#[test]
fn a_ring_is_taken_to_hold_more_while_super_packets_leave_and_nothing_is_lost() {
    let ring = Budget { bytes: 100 * 133_118, datagrams: 100 };
    let mut pools = Pools::new(ROOM, crate::pool::CALM);
    let id = pools.join([10, 0, 0, 2].into(), ring, true);
    let room = |pools: &mut Pools| pools.get(id).room_for(1).datagrams;
    let acknowledge = |pools: &mut Pools, packets| {
        for _ in 0..packets / 64 {
            pools.get(id).charge(Charge::of(64, 2304));
            pools.release(id, Charge::of(64, 2304));
        }
    };
    let depart = |pools: &mut Pools, each| {
        (0..400).for_each(|_| pools.departed(1, each, u64::from(each) * 1040));
    };
    depart(&mut pools, 40);
    assert_eq!(room(&mut pools), 100, "before anything was acknowledged");
    acknowledge(&mut pools, 1024);
    assert_eq!(room(&mut pools), 400);
    let other = pools.join([10, 0, 0, 3].into(), Budget::STANDARD, false);
    acknowledge(&mut pools, 4096);
    assert_eq!(pools.get(other).room_for(1).datagrams, 16, "it said nothing");
    depart(&mut pools, 1);
    assert_eq!(room(&mut pools), 400, "they leave one by one: as what is under way comes");
    acknowledge(&mut pools, 64);
    assert_eq!(room(&mut pools), 368, "it shrinks by half of that");
    acknowledge(&mut pools, 640);
    assert_eq!(room(&mut pools), 100);
    depart(&mut pools, 2);
    assert_eq!(room(&mut pools), 150);
    depart(&mut pools, 40);
    pools.get(id).charge(Charge::of(390, 2304));
    pools.lost(id);
    assert_eq!(room(&mut pools), 0);
    pools.release(id, Charge::of(390, 2304));
    assert_eq!(room(&mut pools), 100);
    acknowledge(&mut pools, (2 << 20) - 512);
    assert_eq!(room(&mut pools), 100);
    acknowledge(&mut pools, 512);
    assert_eq!(room(&mut pools), 400, "forgotten");
    assert_eq!(pools.get(PoolId::OWN).room_for(1).datagrams, 4, "our own is what it is");
    let smaller = Budget { bytes: 50 * 133_118, datagrams: 50 };
    pools.join([10, 0, 0, 2].into(), smaller, true);
    assert_eq!(room(&mut pools), 200, "it says so anew: at once four times that, and no more");
}

#[test]
fn more_is_asked_for_while_answers_come_dense_and_none_is_lost() {
    let socket = Budget { bytes: 300 * 8448, datagrams: 300 * 8448 / 832 };
    let mut pools = Pools::new(socket, crate::pool::CALM);
    let come = |pools: &mut Pools, runs: u32| {
        for _ in 0..200 {
            pools.arrived_in_runs(runs, 15, 15 * 4112);
        }
    };
    let ask = |pools: &mut Pools, packets| {
        for _ in 0..packets / 64 {
            let asked = pools.expect(Charge::of(64, 8448));
            pools.answered(asked);
        }
    };
    come(&mut pools, 1);
    assert_eq!(pools.answers(4112), 300, "before any came");
    ask(&mut pools, 1024);
    assert_eq!(pools.answers(4112), 525);
    come(&mut pools, 15);
    assert_eq!(pools.answers(4112), 300, "one by one");
    come(&mut pools, 1);
    assert_eq!(pools.answers(4112), 525);
    pools.lost(PoolId::OWN);
    assert_eq!(pools.answers(4112), 300);
    ask(&mut pools, (2 << 20) - 64);
    assert_eq!(pools.answers(4112), 300);
    ask(&mut pools, 64);
    assert_eq!(pools.answers(4112), 525, "forgotten");
}
