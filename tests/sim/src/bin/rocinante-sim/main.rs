//! `rocinante-sim`: the deterministic simulator, from a seed, or for hours with one seed after the
//! other.

mod long;

use std::process::ExitCode;
use std::time::Duration;

use std::io::Write as _;

use clap::Parser;
use rocinante_sim::{Options, run};
use serde::Serialize;

/// The default seed.
const FIRST: u64 = 1;

/// Simulate hosts, queue pairs and a bad network from a seed, and check every invariant at every
/// step
///
/// The same seed does the same, to the last byte, as the digest at the end shows. A step is a
/// packet that arrives or is lost, a timer, or a call of the engine. A violation names the step;
/// the same command finds it again.
///
/// With --for, one seed after the other is simulated until the time is over or an invariant is
/// violated. The first seed is --seed, or else a fresh one for each run. Lines on standard error
/// report the progress.
///
/// With --swarm, each seed draws which faults may happen, which policies engines and programs have,
/// and which resources are scarce; it omits each with probability 1/2. So it reaches combinations
/// without the fault that hides others. The result names the omitted ones.
///
/// Exit status: 0 if no invariant was violated, 1 if one was, 2 if the command line makes no sense.
#[derive(Debug, Parser)]
#[command(name = "rocinante-sim", version)]
struct Args {
    /// Seed of all random numbers [default: 1; with --for, another one each time]
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// Number of steps after which the last round ends
    #[arg(long, value_name = "N", default_value_t = 300_000)]
    steps: u64,
    /// Go on for so long, with the next seed each time: 90s, 15m, 2h
    #[arg(long = "for", value_name = "TIME", value_parser = long::time, conflicts_with = "trace")]
    time: Option<Duration>,
    /// Omit each fault, each policy and each kind of scarcity with probability 1/2
    #[arg(long)]
    swarm: bool,
    /// Have 64 queue pairs and more for each engine, receive queues of 1 to 4 datagrams, and
    /// windows of 1 to 3 packets
    #[arg(long)]
    scarce: bool,
    /// Have no program name the kind of its peer: engines ask each other
    #[arg(long)]
    strangers: bool,
    /// Print every packet, request and completion on standard error
    #[arg(long)]
    trace: bool,
    /// Accepted without effect: standard output has only one line of JSON anyway
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let Args { steps, trace, swarm, scarce, strangers, .. } = args;
    let seed = args.seed.unwrap_or(FIRST);
    let options = Options { seed, steps, trace, swarm, scarce, strangers };
    if let Some(time) = args.time {
        return long::run(args.seed, &options, time);
    }
    let report = run(&options);
    print_json(&report);
    match &report.violation {
        Some(violation) => violated(violation, &options),
        None => ExitCode::SUCCESS,
    }
}

/// An object with the keys that those of `rocinante` begin with (`docs/json.md`).
#[derive(Serialize)]
struct Object<T> {
    schema: u32,
    version: &'static str,
    command: &'static str,
    #[serde(flatten)]
    result: T,
}

/// Prints the result. The reader of standard output may be gone.
fn print_json(result: &impl Serialize) {
    let (version, command) = (env!("CARGO_PKG_VERSION"), "rocinante-sim");
    let object = Object { schema: 1, version, command, result };
    let line = serde_json::to_string(&object).expect("results are JSON");
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// Reports the violation, and the command that repeats it.
fn violated(violation: &str, options: &Options) -> ExitCode {
    eprintln!("rocinante-sim: {violation}");
    eprintln!("replay with {options}");
    ExitCode::FAILURE
}
