//! `rocinante-sim`: the deterministic simulator, from a seed. It can plant a bug in the engine, or
//! run for hours with one seed after the other.

mod long;

use std::process::ExitCode;
use std::time::Duration;

use std::io::Write as _;

use clap::Parser;
use rocinante_sim::{Options, Report, run};
use rocinante_stack_broken::broken;
use serde::Serialize;

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
    #[arg(long = "for", value_name = "TIME", value_parser = long::time, conflicts_with_all = ["bug", "trace"])]
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
    /// Plant a bug in a copy of the engine, to see it found; "list" lists them
    #[arg(long = "break", value_name = "NAME")]
    bug: Option<String>,
    /// Print every packet, request and completion on standard error
    #[arg(long)]
    trace: bool,
    /// Accepted without effect: standard output has only one line of JSON anyway
    #[arg(long)]
    json: bool,
}

/// The output of a run.
#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Line {
    Engine(Report),
    Broken(rocinante_sim_broken::Report),
}

impl Line {
    fn violation(&self) -> Option<&str> {
        match self {
            Self::Engine(report) => report.violation.as_deref(),
            Self::Broken(report) => report.violation.as_deref(),
        }
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    if args.bug.as_deref() == Some("list") {
        for bug in broken::BUGS {
            print(format_args!("{:26} seed {:<3} {}", bug.name, bug.seed, bug.what));
        }
        return ExitCode::SUCCESS;
    }
    if let Some(time) = args.time {
        return long::run(args.seed, &args.options(), time);
    }
    let line = match simulate(&args) {
        Ok(line) => line,
        Err(error) => {
            eprintln!("rocinante-sim: {error}");
            let error = serde_json::json!({
                "kind": "usage", "stage": "options", "message": error
            });
            print_json(&serde_json::json!({ "error": error, "results": [] }));
            return ExitCode::from(2);
        }
    };
    print_json(&line);
    let Some(violation) = line.violation() else { return ExitCode::SUCCESS };
    let bug = args.bug.as_ref().map(|bug| format!(" --break {bug}")).unwrap_or_default();
    violated(violation, &args.options(), &bug)
}

impl Args {
    fn options(&self) -> Options {
        let Self { steps, trace, swarm, scarce, strangers, .. } = *self;
        Options { seed: self.seed.unwrap_or(FIRST), steps, trace, swarm, scarce, strangers }
    }
}

/// Prints a line of the result. The reader of standard output may be gone.
fn print(line: impl std::fmt::Display) {
    let _ = writeln!(std::io::stdout(), "{line}");
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

fn print_json(result: &impl Serialize) {
    let (version, command) = (env!("CARGO_PKG_VERSION"), "rocinante-sim");
    let object = Object { schema: 1, version, command, result };
    print(serde_json::to_string(&object).expect("results are JSON"));
}

/// Reports the violation, and the command that repeats it.
fn violated(violation: &str, options: &Options, bug: &str) -> ExitCode {
    eprintln!("rocinante-sim: {violation}");
    eprintln!("replay with {options}{bug}");
    ExitCode::FAILURE
}

/// The default seed.
const FIRST: u64 = 1;

fn simulate(args: &Args) -> Result<Line, String> {
    let options = args.options();
    let Some(bug) = &args.bug else {
        return Ok(Line::Engine(run(&options)));
    };
    if broken::LOST.contains(&bug.as_str()) || !broken::plant(Some(bug)) {
        return Err(format!("no bug is called {bug}: rocinante-sim --break list lists them"));
    }
    let Options { seed, steps, trace, swarm, scarce, strangers } = options;
    let options = rocinante_sim_broken::Options { seed, steps, trace, swarm, scarce, strangers };
    let report = rocinante_sim_broken::run(&options);
    broken::plant(None);
    Ok(Line::Broken(report))
}
