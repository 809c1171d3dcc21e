//! `rocinante-bench compare` or `rocinante-bench` in a guest, with Soft-RoCE beside ours. The
//! arguments are `compare` or `bench` and the arguments of that.

use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match rocinante_interop::side_by_side::run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("side-by-side: {error}");
            ExitCode::FAILURE
        }
    }
}
