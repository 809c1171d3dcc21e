//! The command line.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use rocinante_cli::ending::handle_signals;
use rocinante_cli::{policy, worker};
use rocinante_lab::exit_with_parent;

use crate::{bench, cm, evaluate, workers};

#[derive(Debug, Parser)]
#[command(name = "rocinante-bench", version, args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(flatten)]
    bench: bench::Args,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    Cm(cm::Args),
    Evaluate(evaluate::Args),
    #[command(hide = true)]
    MeasureWorker(workers::WorkerArgs),
    /// The verdicts of a study
    #[command(hide = true)]
    PolicyCheck(policy::Args),
    #[command(hide = true)]
    LabWorker(worker::Args),
}

/// Runs the command line `args`. Its first word is the program's name. Ends the process if the
/// arguments make no sense.
#[must_use]
pub fn run(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let cli = Cli::parse_from(args);
    match cli.command {
        None => bench::run(&cli.bench),
        Some(Command::Cm(args)) => {
            if let Err(error) = handle_signals() {
                eprintln!("rocinante-bench: signals end it by themselves: {error}");
            }
            cm::run(&args)
        }
        Some(Command::Evaluate(args)) => evaluate::run(&args),
        Some(Command::MeasureWorker(args)) => workers::run_worker(&args),
        Some(Command::PolicyCheck(args)) => {
            exit_with_parent();
            policy::run(&args)
        }
        Some(Command::LabWorker(args)) => worker::run(&args),
    }
}
