//! The `rocinante-bench` command: see the library's module `command`.

use std::process::ExitCode;

fn main() -> ExitCode {
    rocinante_bench::command::run(std::env::args_os())
}
