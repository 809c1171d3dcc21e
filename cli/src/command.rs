//! The command line. Each subcommand has its own module.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};
use serde_json::json;

use crate::output::{self, Output};
use crate::{
    capture, decode, demo, devices, ending, manual, perf, pingpong, policy, rping, run, stat, top,
    worker,
};

/// RDMA over Converged Ethernet in user space: no RDMA card, no kernel module, no root
#[derive(Debug, Parser)]
#[command(name = "rocinante", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// The guardian alone. An agent starts hundreds at once, and for each the definition of all other
/// commands would take the time that it has.
#[derive(Debug, Parser)]
#[command(name = "rocinante")]
enum Alone {
    Guardian(run::guardian::Args),
}

#[derive(Debug, Subcommand)]
enum Command {
    Demo(demo::Args),
    Devices(devices::Args),
    PolicyCheck(policy::Args),
    #[command(hide = true)]
    LabWorker(worker::Args),
    Run(run::Args),
    #[command(hide = true)]
    Guardian(run::guardian::Args),
    Pingpong(pingpong::Args),
    Perf(perf::Args),
    Rping(rping::Args),
    Decode(decode::Args),
    Stat(stat::Args),
    Top(top::Args),
    Capture(capture::Args),
    Completions(manual::CompletionsArgs),
    Man(manual::ManArgs),
}

/// Runs the command line `args`. Its first word is the program's name.
#[must_use]
pub fn run(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let args: Vec<OsString> = args.into_iter().collect();
    if args.get(1).is_some_and(|word| word == "guardian")
        && let Ok(Alone::Guardian(args)) = Alone::try_parse_from(&args)
    {
        return run::guardian::run(&args);
    }
    let command = match Cli::try_parse_from(&args) {
        Ok(cli) => cli.command,
        Err(error) => return refuse(&error, &args),
    };
    // The demo and the policy check end their children first, and their workers end with them. The
    // program of `run` has the signals that our parent gave us. The guardian ignores them.
    let own_signals = matches!(
        command,
        Command::Demo(_)
            | Command::PolicyCheck(policy::Args { live: None, .. })
            | Command::LabWorker(_)
            | Command::Run(_)
            | Command::Guardian(_)
    );
    if !own_signals && let Err(error) = ending::handle_signals() {
        eprintln!("rocinante: signals end it without a report: {error}");
    }
    match command {
        Command::Demo(args) => demo::run(&args),
        Command::Devices(args) => devices::run(&args),
        Command::PolicyCheck(args) => policy::run(&args),
        Command::LabWorker(args) => worker::run(&args),
        Command::Run(args) => run::run(&args),
        Command::Guardian(args) => run::guardian::run(&args),
        Command::Pingpong(args) => pingpong::run(&args),
        Command::Perf(args) => perf::run(&args),
        Command::Rping(args) => rping::run(&args),
        Command::Decode(args) => decode::run(&args),
        Command::Stat(args) => stat::run(&args),
        Command::Top(args) => top::run(&args),
        Command::Capture(args) => capture::run(&args),
        Command::Completions(args) => manual::run_completions(&args, &Cli::command()),
        Command::Man(args) => manual::run_man(&args, &Cli::command()),
    }
}

/// Prints help, or why the arguments make no sense.
fn refuse(error: &clap::Error, args: &[OsString]) -> ExitCode {
    let _ = error.print();
    let json = |arg: &OsString| arg.to_str().is_some_and(|arg| arg.starts_with("--json"));
    if error.use_stderr() && args.iter().any(json) {
        let text = error.to_string();
        let message = text.trim().trim_start_matches("error: ");
        let error = json!({"kind": "usage", "stage": "options", "message": message});
        let known = |word: &&str| Cli::command().find_subcommand(word).is_some();
        let command = args.get(1).and_then(|word| word.to_str()).filter(known);
        let program = format!("rocinante {}", command.unwrap_or("rocinante"));
        let object = output::object(&program, json!({"error": error, "results": []}));
        Output { json: true }.result(object);
    }
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
}
