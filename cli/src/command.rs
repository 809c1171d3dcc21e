//! The command line: each subcommand is a module of its own.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::{compare, decode, demo, devices, perf, pingpong, rping};

/// RDMA over Converged Ethernet in user space: no RDMA card, no kernel module, no root
#[derive(Debug, Parser)]
#[command(name = "rocinante", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Demo(demo::Args),
    #[command(hide = true)]
    DemoWorker(demo::WorkerArgs),
    Devices(devices::Args),
    Pingpong(pingpong::Args),
    Perf(perf::Args),
    Rping(rping::Args),
    Decode(decode::Args),
    Compare(compare::Args),
    #[command(hide = true)]
    CompareWorker(compare::WorkerArgs),
}

/// Runs the command line `args`, whose first word is the program's name. Ends the process if they make no sense.
#[must_use]
pub fn run(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    match Cli::parse_from(args).command {
        Command::Demo(args) => demo::run(&args),
        Command::DemoWorker(args) => demo::run_worker(&args),
        Command::Devices(args) => devices::run(&args),
        Command::Pingpong(args) => pingpong::run(&args),
        Command::Perf(args) => perf::run(&args),
        Command::Rping(args) => rping::run(&args),
        Command::Decode(args) => decode::run(&args),
        Command::Compare(args) => compare::run(&args),
        Command::CompareWorker(args) => compare::run_worker(&args),
    }
}
