//! Long simulations: one seed after the other, until the time is over or an invariant is violated.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rocinante_sim::{Faults, Options};
use serde::Serialize;

use super::{print_json, violated};

/// Interval of the progress lines.
const PROGRESS: Duration = Duration::from_secs(30);

/// The sums over all seeds of a run.
#[derive(Debug, Default, Serialize)]
struct Total {
    /// The first seed, and the number of seeds, which follow each other.
    seed: u64,
    seeds: u64,
    swarm: bool,
    scarce: bool,
    strangers: bool,
    /// Number of seeds that omitted each fault, policy and kind of scarcity.
    omissions: BTreeMap<&'static str, u64>,
    seconds: f64,
    steps: u64,
    steps_per_second: f64,
    packets: u64,
    ops: u64,
    completions: u64,
    calls: u64,
    released: u64,
    notifications: u64,
    faults: Faults,
    qps_ended: BTreeMap<String, u64>,
    violations: u64,
    /// The seed that violated an invariant.
    violated_by: Option<u64>,
}

/// Simulates from `seed` on, or from a fresh seed.
pub(super) fn run(seed: Option<u64>, options: &Options, time: Duration) -> ExitCode {
    let Options { swarm, scarce, strangers, .. } = *options;
    let seed = seed.unwrap_or_else(fresh);
    let mut total = Total { seed, swarm, scarce, strangers, ..Total::default() };
    let start = Instant::now();
    let mut reported = start;
    while start.elapsed() < time {
        let seed = total.seed.wrapping_add(total.seeds);
        let options = Options { seed, ..*options };
        let report = rocinante_sim::run(&options);
        total.add(&report, start.elapsed());
        if let Some(violation) = report.violation {
            total.violated_by = Some(seed);
            print_json(&total);
            return violated(&violation, &options);
        }
        if reported.elapsed() >= PROGRESS {
            reported = Instant::now();
            eprintln!("{}", total.line(seed));
        }
    }
    print_json(&total);
    ExitCode::SUCCESS
}

/// A seed from the clock. Two runs hardly ever begin in the same nanosecond.
fn fresh() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    // The low half, which changes.
    since.as_nanos() as u64
}

impl Total {
    fn add(&mut self, report: &rocinante_sim::Report, passed: Duration) {
        self.seeds += 1;
        for feature in &report.omitted {
            *self.omissions.entry(feature).or_default() += 1;
        }
        self.steps += report.steps;
        self.packets += report.packets;
        self.ops += report.ops;
        self.completions += report.completions;
        self.calls += report.calls;
        self.released += report.released;
        self.notifications += report.notifications;
        self.faults.add(&report.faults);
        for (how, count) in &report.qps_ended {
            *self.qps_ended.entry(how.clone()).or_default() += count;
        }
        self.violations += report.violations;
        self.seconds = passed.as_secs_f64();
        let steps = self.steps as f64;
        self.steps_per_second = (steps / self.seconds.max(f64::EPSILON)).round();
    }

    fn line(&self, seed: u64) -> String {
        format!(
            "seed {seed}: {} seeds in {:.0} s, {} packets, {} operations, {} steps/s, no violation",
            self.seeds, self.seconds, self.packets, self.ops, self.steps_per_second
        )
    }
}

/// Parses a time: a number of seconds, or a number with `s`, `m` or `h`.
pub(super) fn time(text: &str) -> Result<Duration, String> {
    let (number, unit) = match text.as_bytes().last() {
        Some(b's') => (&text[..text.len() - 1], 1),
        Some(b'm') => (&text[..text.len() - 1], 60),
        Some(b'h') => (&text[..text.len() - 1], 3600),
        _ => (text, 1),
    };
    let seconds = number.parse::<u64>().ok().and_then(|number| number.checked_mul(unit));
    seconds.map(Duration::from_secs).ok_or_else(|| "write 90s, 15m or 2h".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read() {
        let seconds = |text| time(text).map(|time| time.as_secs());
        assert_eq!(seconds("90"), Ok(90));
        assert_eq!(seconds("90s"), Ok(90));
        assert_eq!(seconds("15m"), Ok(900));
        assert_eq!(seconds("2h"), Ok(7200));
        assert!(
            ["", "h", "2d", "-1s", "99999999999999999999h"].map(time).iter().all(Result::is_err)
        );
    }

    #[test]
    fn seeds_follow_each_other_and_add_up() {
        let mut total = Total { seed: 3, ..Total::default() };
        let run = |seed| Options { seed, steps: 3_000, swarm: true, ..Options::default() };
        let reports = [3, 4].map(|seed| rocinante_sim::run(&run(seed)));
        reports.iter().for_each(|report| total.add(report, Duration::from_secs(2)));
        assert_eq!(total.seeds, 2);
        assert_eq!(total.packets, reports[0].packets + reports[1].packets);
        assert_eq!(total.calls, reports[0].calls + reports[1].calls);
        assert_eq!(total.faults.drop, reports[0].faults.drop + reports[1].faults.drop);
        let omitted = reports.iter().map(|report| report.omitted.len() as u64).sum::<u64>();
        assert_eq!(total.omissions.values().sum::<u64>(), omitted);
        assert!(total.line(4).starts_with("seed 4: 2 seeds in 2 s"));
    }
}
