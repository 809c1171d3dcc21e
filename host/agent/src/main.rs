//! The command `rocinante-agent`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use rocinante_agent::{AgentError, Config, control, hook, release, run, status};

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
    /// Say how the running agent is, and the containers that it knows.
    Status {
        /// The host's end of one container; without it, all.
        name: Option<String>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
        /// The configuration of the agent; without it, the defaults.
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
    /// Take the program off the host's end of a container, and forget the container. It may ask
    /// again. Without a running agent this removes what that left.
    Release {
        /// The host's end of one container.
        #[arg(required_unless_present = "all", conflicts_with = "all")]
        name: Option<String>,
        /// All containers.
        #[arg(long)]
        all: bool,
        /// Also containers with open ports, which may forge frames from then on.
        #[arg(long)]
        force: bool,
        /// The configuration of the agent; without it, the defaults.
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
    /// Have the agent know a container before it runs: an OCI hook of createRuntime, with the
    /// container's state on standard input. Without an agent, or where it does not serve the
    /// container, the container begins all the same.
    Hook {
        /// Fail then, and the container with it.
        #[arg(long)]
        required: bool,
        /// The configuration of the agent; without it, the defaults.
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
        Command::Status { name, json, config } => {
            configuration(config.as_deref()).and_then(|it| status(&it, name.as_deref(), json))
        }
        Command::Release { name, all: _, force, config } => {
            configuration(config.as_deref()).and_then(|it| release(&it, name.as_deref(), force))
        }
        Command::Hook { required, config } => {
            let done = configuration(config.as_deref())
                .and_then(|it| hook(&control::path(&it.state), std::io::stdin().lock()));
            match done {
                Err(error) if !required => {
                    eprintln!("rocinante-agent: {error}");
                    Ok(())
                }
                done => done,
            }
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

fn configuration(path: Option<&Path>) -> Result<Config, AgentError> {
    path.map_or_else(|| Ok(Config::default()), Config::read)
}
