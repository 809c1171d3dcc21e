//! Runs of the simulator: fixed seeds, and a fresh one. A failure prints how to replay it.

use std::time::{Duration, Instant, SystemTime};

use rocinante_sim::{Options, Report, run};

fn passes(options: &Options) -> Report {
    let report = run(options);
    if let Some(violation) = &report.violation {
        panic!("replay with {options}: {violation}");
    }
    report
}

/// No program gives the kind of its peer, and engines find out while everything goes wrong.
fn strangers(seed: u64, steps: u64) -> Options {
    Options { strangers: true, ..usual(seed, steps) }
}

fn usual(seed: u64, steps: u64) -> Options {
    Options { seed, steps, ..Options::default() }
}

fn swarm(seed: u64, steps: u64) -> Options {
    Options { swarm: true, ..usual(seed, steps) }
}

fn scarce(seed: u64, steps: u64) -> Options {
    Options { scarce: true, ..usual(seed, steps) }
}

#[test]
fn fixed_seeds_hold_and_meet_every_fault() {
    let mut faults = rocinante_sim::Faults::default();
    for seed in 1..=40 {
        faults.add(&passes(&usual(seed, 50_000)).faults);
    }
    for (name, count) in faults.iter() {
        assert!(count > 0, "{name} never happened");
    }
}

/// The seeds by which this simulator found faults of the engine, at the length at which it did.
#[test]
fn seeds_that_found_faults_hold() {
    for seed in [1, 2, 7, 10, 12, 19] {
        passes(&usual(seed, 300_000));
    }
}

/// Streams of a shared queue end with requests that take no receive: none waits for another's.
#[test]
fn a_proof_over_a_shared_queue_ends() {
    passes(&usual(1_883_152_852_189_189, 100_000));
}

#[test]
fn what_a_swarm_omits_does_not_happen() {
    for seed in 1..=40 {
        let report = passes(&swarm(seed, 20_000));
        for (name, count) in report.faults.iter().filter(|(_, count)| *count > 0) {
            assert!(!report.omitted.contains(&name), "seed {seed}: {name} happened {count} times");
        }
    }
}

#[test]
fn queue_pairs_that_wait_for_each_other_all_end() {
    for seed in 1..=4 {
        passes(&scarce(seed, 50_000));
    }
}

#[test]
fn engines_that_recognise_each_other_lose_nothing() {
    for seed in 1..=20 {
        passes(&strangers(seed, 50_000));
        passes(&Options { swarm: true, ..strangers(seed, 20_000) });
    }
    passes(&Options { scarce: true, ..strangers(1, 50_000) });
}

/// Other seeds each time; `ROCINANTE_SIM_SECONDS` sets the time.
#[test]
fn fresh_seeds_hold() {
    let (mut seed, until) = (fresh(), Instant::now() + time());
    while Instant::now() < until {
        seed += 1;
        passes(&usual(seed, 100_000));
    }
}

/// The seeds that fit in a quarter of that time.
#[test]
fn fresh_seeds_of_a_swarm_hold() {
    let (mut seed, until) = (fresh(), Instant::now() + time() / 4);
    while Instant::now() < until {
        seed += 1;
        passes(&swarm(seed, 100_000));
    }
}

fn fresh() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.map_or(1, |now| now.as_secs() << 20)
}

fn time() -> Duration {
    let seconds = std::env::var("ROCINANTE_SIM_SECONDS");
    Duration::from_secs(seconds.map_or(10, |text| text.parse().expect("ROCINANTE_SIM_SECONDS")))
}

#[test]
fn the_same_seed_does_the_same() {
    let strangers = strangers(7, 30_000);
    for options in [usual(7, 30_000), swarm(7, 30_000), scarce(7, 30_000), strangers] {
        let [first, second] = [passes(&options), passes(&options)];
        assert_eq!(first, second);
        assert_ne!(first.digest, passes(&Options { seed: 8, ..options }).digest);
    }
}
