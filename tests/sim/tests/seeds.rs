//! Runs of the simulator: fixed seeds, and a fresh one. A failure prints how to replay it.

use rocinante_sim::{Options, Report, run};

fn passes(seed: u64, steps: u64) -> Report {
    let report = run(&Options { seed, steps, trace: false });
    if let Some(violation) = &report.violation {
        panic!("replay with rocinante-sim --seed {seed} --steps {steps}: {violation}");
    }
    report
}

#[test]
fn fixed_seeds_hold_and_meet_every_fault() {
    let mut faults = rocinante_sim::Faults::default();
    for seed in 1..=40 {
        faults.add(&passes(seed, 50_000).faults);
    }
    for (name, count) in faults.iter() {
        assert!(count > 0, "{name} never happened");
    }
}

/// Other seeds each time; `ROCINANTE_SIM_SECONDS` sets the time.
#[test]
fn fresh_seeds_hold() {
    let seconds = std::env::var("ROCINANTE_SIM_SECONDS").ok().and_then(|text| text.parse().ok());
    let limit = std::time::Duration::from_secs(seconds.unwrap_or(10));
    let start = std::time::Instant::now();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let mut seed = now.map_or(1, |now| now.as_secs() << 20);
    while start.elapsed() < limit {
        seed += 1;
        passes(seed, 100_000);
    }
}

#[test]
fn the_same_seed_does_the_same() {
    let [first, second] = [passes(7, 30_000), passes(7, 30_000)];
    assert_eq!(first, second);
    assert_ne!(first.digest, passes(8, 30_000).digest);
}
