//! Planted bugs: the listed seed finds each one.

use rocinante_sim_broken::{Options, run};
use rocinante_stack_broken::broken::{BUGS, LOST, plant};

/// Steps for a listed seed.
const STEPS: u64 = 300_000;

/// Seeds to try, if the listed one does not find the bug.
const TRIALS: u64 = 60;

#[test]
fn every_planted_bug_is_found_by_its_seed() {
    assert!(
        LOST.is_empty(),
        "tests/sim/broken-stack/bugs.rs: the places of these have changed: {LOST:?}"
    );
    assert!(BUGS.len() >= 15);
    let mut missed = Vec::new();
    for bug in BUGS {
        assert!(plant(Some(bug.name)));
        let options = Options { steps: STEPS, ..Options::default() };
        let simulate = |seed: u64| run(&Options { seed, ..options }).violation;
        match simulate(bug.seed) {
            Some(found) => println!("{}: {found}", bug.name),
            None => {
                let better = (1..=TRIALS).find(|seed| simulate(*seed).is_some());
                missed.push(match better {
                    Some(seed) => format!("{}: not by seed {}, but by {seed}", bug.name, bug.seed),
                    None => format!("{}: by none of the seeds to {TRIALS}", bug.name),
                });
            }
        }
    }
    plant(None);
    assert!(
        missed.is_empty(),
        "tests/sim/broken-stack/bugs.rs needs other seeds:\n{}",
        missed.join("\n")
    );
}

#[test]
fn without_a_bug_the_copy_is_the_engine() {
    plant(None);
    let copy = run(&Options { seed: 5, steps: 30_000, ..Options::default() });
    let engine = rocinante_sim::Options { seed: 5, steps: 30_000, ..Default::default() };
    assert_eq!(copy.digest, rocinante_sim::run(&engine).digest);
}
