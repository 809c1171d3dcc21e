//! `rocinante completions` and `rocinante man`: the files for a shell and `man`, made from the
//! definition of the command line.

use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::builder::Resettable;
use clap::{Arg, Command};
use clap_complete::Shell;

use crate::output::{Failure, Output};

/// Print the script with which a shell completes the commands and options of rocinante
///
/// For bash: rocinante completions bash > /etc/bash_completion.d/rocinante
#[derive(Debug, clap::Args)]
pub struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    pub shell: Shell,
}

/// Write a man page for each command into a directory
///
/// To read one: man DIR/rocinante-pingpong.1
#[derive(Debug, clap::Args)]
pub struct ManArgs {
    /// The directory; it is made if it does not exist
    #[arg(value_name = "DIR")]
    pub directory: PathBuf,
}

/// Prints the completions of `cli`.
#[must_use]
pub fn run_completions(args: &CompletionsArgs, cli: &Command) -> ExitCode {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut visible(cli), "rocinante", &mut script);
    // The reader of our output may be gone.
    let _ = io::stdout().write_all(&script);
    ExitCode::SUCCESS
}

/// Writes the man pages of `cli`.
#[must_use]
pub fn run_man(args: &ManArgs, cli: &Command) -> ExitCode {
    let wrote = fs::create_dir_all(&args.directory)
        .and_then(|()| clap_mangen::generate_to(visible(cli), &args.directory))
        .map_err(|error| Failure::Failed(format!("{}: {error}", args.directory.display())));
    Output { json: false }.end("rocinante man", &wrote)
}

/// A command without its hidden commands and options, which `clap_complete` would offer. Those are
/// there to say why they are not taken.
fn visible(command: &Command) -> Command {
    // An option that is left out would be missed by those that name it.
    let alone = |arg: &Arg| {
        let arg = arg.clone().conflicts_with(Resettable::Reset).requires(Resettable::Reset);
        arg.overrides_with(Resettable::Reset).group(Resettable::Reset)
    };
    let args = command.get_arguments().filter(|arg| !arg.is_hide_set()).map(alone);
    let below = command.get_subcommands().filter(|command| !command.is_hide_set()).map(visible);
    let mut shown = Command::new(command.get_name().to_owned()).args(args).subcommands(below);
    if let Some(about) = command.get_about() {
        shown = shown.about(about.clone());
    }
    if let Some(about) = command.get_long_about() {
        shown = shown.long_about(about.clone());
    }
    match command.get_version() {
        Some(version) => shown.version(version.to_owned()),
        None => shown,
    }
}
