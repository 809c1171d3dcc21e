//! What runs inside the guest: `control` serves the host's commands, `agent` the host's verbs.

use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let served = match args[..] {
        ["control"] => rocinante_interop::guest::control::serve().map_err(|e| e.to_string()),
        ["agent", address] => {
            rocinante_interop::agent::serve(address).map_err(|error| error.to_string())
        }
        _ => Err("usage: rocinante-guest control | agent ADDRESS:PORT".into()),
    };
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rocinante-guest: {error}");
            ExitCode::FAILURE
        }
    }
}
