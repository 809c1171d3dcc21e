//! The search beside a solver that tries every arrangement.

use proptest::prelude::*;
use rocinante_placement::{Interface, Rates, Refused, STEPS, Uplink, place};

/// Whether any arrangement fits: each interface in turn goes to each uplink.
fn fits(free: &mut [Rates], wanted: &[Interface]) -> bool {
    let Some((first, others)) = wanted.split_first() else { return true };
    (0..free.len()).any(|at| {
        let before = free[at];
        free[at] = before.without(first.min);
        let fitted = before.hold(first.min) && fits(free, others);
        free[at] = before;
        fitted
    })
}

/// Whether the sums of all uplinks stay within the free rates, in numbers that cannot overflow.
fn is_sound(uplinks: &[Uplink], wanted: &[Interface], places: &[usize]) -> bool {
    places.len() == wanted.len()
        && uplinks.iter().enumerate().all(|(at, uplink)| {
            let there = wanted.iter().zip(places).filter(|(_, place)| **place == at);
            let (out, into) = there.fold((0, 0), |(out, into), (it, _)| {
                (out + u128::from(it.min.egress), into + u128::from(it.min.ingress))
            });
            let free = uplink.free();
            out <= u128::from(free.egress) && into <= u128::from(free.ingress)
        })
}

fn rates(most: u64) -> impl Strategy<Value = Rates> {
    (0..=most, 0..=most).prop_map(|(egress, ingress)| Rates { egress, ingress })
}

/// One direction alone is what Link's annotation asks for.
fn either(most: u64) -> impl Strategy<Value = Rates> {
    prop_oneof![rates(most), (0..=most).prop_map(|egress| Rates { egress, ingress: 0 })]
}

fn uplinks(most: u64, count: usize) -> impl Strategy<Value = Vec<Uplink>> {
    let one = (rates(most), rates(most / 3)).prop_map(|(speed, taken)| {
        let mut uplink = Uplink::new("u", 0);
        (uplink.speed, uplink.taken) = (speed, taken);
        uplink
    });
    prop::collection::vec(one, 0..=count)
}

fn interfaces(most: u64, count: usize) -> impl Strategy<Value = Vec<Interface>> {
    let one = either(most).prop_map(|min| Interface { min, max: None });
    prop::collection::vec(one, 0..=count)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    /// Small numbers, so that many cases fit exactly or by one too few.
    #[test]
    fn it_finds_a_place_exactly_where_there_is_one(
        uplinks in uplinks(20, 4),
        wanted in interfaces(12, 7),
    ) {
        let mut free: Vec<Rates> = uplinks.iter().map(Uplink::free).collect();
        match place(&uplinks, &wanted, STEPS) {
            Ok(places) => prop_assert!(is_sound(&uplinks, &wanted, &places), "{places:?}"),
            Err(Refused::Full) => prop_assert!(!fits(&mut free, &wanted)),
            Err(other) => prop_assert!(false, "{other:?}"),
        }
    }

    /// Any numbers and sizes: it ends, and what it finds is sound.
    #[test]
    fn whatever_is_asked_it_ends_and_promises_nothing_twice(
        uplinks in prop_oneof![uplinks(u64::MAX, 16), uplinks(1000, 16), uplinks(20, 16)],
        wanted in prop_oneof![interfaces(u64::MAX, 64), interfaces(400, 64), interfaces(8, 64)],
        steps in 0..STEPS,
    ) {
        if let Ok(places) = place(&uplinks, &wanted, steps) {
            prop_assert!(is_sound(&uplinks, &wanted, &places));
        }
    }

    /// A demand that was made to fit exactly is never called full.
    #[test]
    fn a_demand_that_fills_all_uplinks_is_not_called_full(
        parts in prop::collection::vec(prop::collection::vec(1..1000_u64, 1..4), 1..=16),
    ) {
        let uplink = |parts: &Vec<u64>| Uplink::new("u", parts.iter().sum());
        let uplinks: Vec<Uplink> = parts.iter().map(uplink).collect();
        let interface = |egress: &u64| Rates { egress: *egress, ingress: 0 };
        let wanted: Vec<Interface> =
            parts.concat().iter().map(|it| Interface { min: interface(it), max: None }).collect();
        match place(&uplinks, &wanted, STEPS) {
            Ok(places) => prop_assert!(is_sound(&uplinks, &wanted, &places)),
            Err(refused) => prop_assert_eq!(refused, Refused::Undecided),
        }
    }
}
