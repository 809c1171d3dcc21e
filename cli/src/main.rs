//! The `rocinante` command: see the library's module `command`.

use std::process::ExitCode;

fn main() -> ExitCode {
    rocinante_cli::command::run(std::env::args_os())
}
