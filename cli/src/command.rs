//! The command line. Each subcommand has its own module.

use std::ffi::OsString;
use std::panic;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::{
    bench, cm_bench, compare, decode, demo, devices, mckey, perf, pingpong, rping, sim, ucmatose,
    udaddy, workers,
};

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
    Udaddy(udaddy::Args),
    Mckey(mckey::Args),
    CmBench(cm_bench::Args),
    Ucmatose(ucmatose::Args),
    RdmaServer(ucmatose::ServerArgs),
    RdmaClient(ucmatose::ClientArgs),
    Decode(decode::Args),
    Bench(bench::Args),
    Compare(compare::Args),
    Sim(sim::Args),
    #[command(hide = true)]
    MeasureWorker(workers::WorkerArgs),
}

/// Runs the command line `args`. Its first word is the program's name. Ends the process if the
/// arguments make no sense.
#[must_use]
pub fn run(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    end_quietly_without_a_reader();
    match Cli::parse_from(args).command {
        Command::Demo(args) => demo::run(&args),
        Command::DemoWorker(args) => demo::run_worker(&args),
        Command::Devices(args) => devices::run(&args),
        Command::Pingpong(args) => pingpong::run(&args),
        Command::Perf(args) => perf::run(&args),
        Command::Rping(args) => rping::run(&args),
        Command::Udaddy(args) => udaddy::run(&args),
        Command::Mckey(args) => mckey::run(&args),
        Command::CmBench(args) => cm_bench::run(&args),
        Command::Ucmatose(args) => ucmatose::run(&args),
        Command::RdmaServer(args) => ucmatose::run_server(&args),
        Command::RdmaClient(args) => ucmatose::run_client(&args),
        Command::Decode(args) => decode::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Compare(args) => compare::run(&args),
        Command::Sim(args) => sim::run_command(&args),
        Command::MeasureWorker(args) => workers::run_worker(&args),
    }
}

/// The status that shells report for a process that ended by SIGPIPE.
const BROKEN_PIPE: i32 = 141;

/// Ends this process quietly when the reader of standard output closes it early (`| head`), as
/// SIGPIPE ends other programs. Rust ignores that signal, and the sockets and the pipes to workers
/// need this; but then `println!` panics.
fn end_quietly_without_a_reader() {
    let usual = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        let said = info.payload_as_str().unwrap_or_default();
        if said.starts_with("failed printing to std") && said.contains("Broken pipe") {
            std::process::exit(BROKEN_PIPE);
        }
        usual(info);
    }));
}
