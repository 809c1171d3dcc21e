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
}

fn main() -> ExitCode {
    let Arguments { command: Command::Run { config } } = Arguments::parse();
    let config = config.map_or_else(|| Ok(Config::default()), |path| Config::read(&path));
    match config.and_then(|config| run(&config)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rocinante-agent: {error}");
            ExitCode::FAILURE
        }
    }
}
