//! The cost of a search: the hardest inputs known, of the greatest size. The goal is a millisecond.

#![allow(missing_docs)]

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use rocinante_placement::{INTERFACES_MAX, Interface, Rates, STEPS, UPLINKS_MAX, Uplink, place};

fn out(rates: impl IntoIterator<Item = u64>) -> Vec<Interface> {
    let one = |egress| Interface { min: Rates { egress, ingress: 0 }, max: None };
    rates.into_iter().map(one).collect()
}

fn equal(speed: u64) -> Vec<Uplink> {
    vec![Uplink::new("u", speed); UPLINKS_MAX]
}

/// By name; a seed makes the same numbers in every run.
fn cases() -> Vec<(&'static str, Vec<Uplink>, Vec<Interface>)> {
    let mut random = fastrand::Rng::with_seed(37);
    let near: Vec<u64> = (0..INTERFACES_MAX).map(|_| random.u64(2_000_000..2_010_000)).collect();
    let each = near.iter().sum::<u64>().div_ceil(UPLINKS_MAX as u64);
    // Three of these in an uplink, a little more than a third each.
    let thirds: Vec<u64> = (0..48).map(|_| random.u64(330_000..340_000)).collect();
    let third = thirds.iter().sum::<u64>().div_ceil(UPLINKS_MAX as u64);
    let unequal: Vec<Uplink> =
        (0..UPLINKS_MAX).map(|at| Uplink::new("u", 1_000_000 + 7 * at as u64)).collect();
    let both: Vec<Interface> = (0..INTERFACES_MAX)
        .map(|_| {
            let egress = random.u64(1..250_000);
            Interface { min: Rates { egress, ingress: 250_000 - egress }, max: None }
        })
        .collect();
    vec![
        ("easy", equal(10_000_000), out(near.iter().copied().take(8))),
        ("near", equal(each), out(near)),
        ("thirds", equal(third), out(thirds)),
        ("unequal", unequal.clone(), out((0..INTERFACES_MAX as u64).map(|at| 249_990 + at % 13))),
        ("both", unequal, both),
    ]
}

fn all(criterion: &mut Criterion) {
    for (name, uplinks, wanted) in cases() {
        let answer = place(&uplinks, &wanted, STEPS).map(|places| places.len());
        criterion.bench_function(&format!("place/{name}: {answer:?}"), |bencher| {
            bencher.iter(|| place(black_box(&uplinks), black_box(&wanted), STEPS));
        });
    }
}

criterion_group!(benches, all);
criterion_main!(benches);
