//! Planted bugs: each is found.

use rocinante_sim_broken::{Options, run};
use rocinante_stack_broken::broken::{BUGS, LOST, plant};

/// What a listed seed may take.
const STEPS: u64 = 300_000;

#[test]
fn every_planted_bug_is_found() {
    assert!(
        LOST.is_empty(),
        "sim/broken-stack/bugs.rs: the places of these have changed: {LOST:?}"
    );
    assert!(BUGS.len() >= 15);
    let mut missed = Vec::new();
    for bug in BUGS {
        assert!(plant(Some(bug.name)));
        // What a seed does changes with the engine: the listed one and the next few are tried.
        let seeds = bug.seed..bug.seed + 6;
        let simulate = |seed| run(&Options { seed, steps: STEPS, trace: false }).violation;
        match seeds.map(simulate).find(Option::is_some).flatten() {
            Some(found) => println!("{}: {found}", bug.name),
            None => missed.push(format!("rocinante sim --seed {} --break {}", bug.seed, bug.name)),
        }
    }
    assert!(missed.is_empty(), "not found: {missed:?}");
    plant(None);
}

#[test]
fn without_a_bug_the_copy_is_the_engine() {
    plant(None);
    let copy = run(&Options { seed: 5, steps: 30_000, trace: false });
    let engine = rocinante_sim::Options { seed: 5, steps: 30_000, trace: false };
    assert_eq!(copy.digest, rocinante_sim::run(&engine).digest);
}
