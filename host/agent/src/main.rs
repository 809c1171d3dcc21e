//! The command `rocinante-agent`.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use rocinante_agent::{Config, run};

/// Fast RDMA ports for containers without any capability.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve the containers of this host until a signal.
    Run {
        /// The configuration; without it, the defaults.
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
    /// Say whether a configuration is understood, and do nothing else.
    Check {
        /// The configuration.
        file: PathBuf,
    },
}

fn main() -> ExitCode {
    let done = match Arguments::parse().command {
        // It logs its own errors.
        Command::Run { config } => {
            let ran = run(config.as_deref());
            return if ran.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
        }
        Command::Check { file } => Config::read(&file).map(drop),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rocinante-agent: {error}");
            ExitCode::FAILURE
        }
    }
}
