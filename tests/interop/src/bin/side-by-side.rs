//! `rocinante-bench compare` or `rocinante-bench` in a guest, with Soft-RoCE beside ours; or the
//! policy check there. The arguments are `compare`, `bench` or `policy`, and the arguments of that.

use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let done = match args.split_first() {
        Some((first, rest)) if first == "policy" => rocinante_interop::policy::run(rest),
        _ => rocinante_interop::side_by_side::run(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("side-by-side: {error}");
            ExitCode::FAILURE
        }
    }
}
