//! `rocinante-bench` in a guest, with Soft-RoCE beside ours; or the policy check there. The
//! arguments are `bench` or `policy`, and the arguments of that.

use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let done = match args.split_first() {
        Some((first, rest)) if first == "policy" => rocinante_interop::policy::run(rest),
        Some((first, rest)) if first == "bench" => rocinante_interop::side_by_side::run(rest),
        _ => Err(rocinante_interop::Error::new("say `bench` or `policy`")),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("side-by-side: {error}");
            ExitCode::FAILURE
        }
    }
}
