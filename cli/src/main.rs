//! The `rocinante` command: a dispatcher; each subcommand is a module of the library.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use rocinante_cli::{compare, decode, demo, devices, perf, pingpong};

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
    Decode(decode::Args),
    Compare(compare::Args),
    #[command(hide = true)]
    CompareWorker(compare::WorkerArgs),
}

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Demo(args) => demo::run(&args),
        Command::DemoWorker(args) => demo::run_worker(&args),
        Command::Devices(args) => devices::run(&args),
        Command::Pingpong(args) => pingpong::run(&args),
        Command::Perf(args) => perf::run(&args),
        Command::Decode(args) => decode::run(&args),
        Command::Compare(args) => compare::run(&args),
        Command::CompareWorker(args) => compare::run_worker(&args),
    }
}
