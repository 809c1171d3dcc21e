//! What runs inside the guest: `control` serves the host's commands, `agent` the host's verbs; `check`, `open` and `watch` try the kernel's device,
//! and `rocinante` is the command of that name.

use std::process::ExitCode;

use rocinante_interop::hardware::checks;

fn main() -> ExitCode {
    rocinante_tests::verbs::death::be_the_peer_if_asked();
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let served = match args[..] {
        ["control"] => rocinante_interop::guest::control::serve().map_err(|e| e.to_string()),
        ["agent", address] => {
            rocinante_interop::agent::serve(address).map_err(|error| error.to_string())
        }
        ["check", "all", device, address] => {
            parsed(address).and_then(|address| checks::run_all(device, address))
        }
        ["check", name, device, address] => {
            parsed(address).and_then(|address| checks::run(name, device, address))
        }
        ["watch", device, address, seconds] => parsed(address)
            .and_then(|address| checks::watch(device, address, parsed(seconds)?)),
        ["open", device, address, bytes, user] => parsed(address).and_then(|address| {
            checks::open(device, address, parsed(bytes)?, parsed(user)?)
        }),
        ["rocinante", ..] => {
            return rocinante_cli::command::run(std::env::args_os().skip(1));
        }
        _ => Err("usage: rocinante-guest control | agent ADDRESS:PORT | check NAME|all DEVICE ADDRESS | open DEVICE ADDRESS BYTES USER | watch DEVICE ADDRESS SECONDS | \
                  rocinante …"
            .into()),
    };
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rocinante-guest: {error}");
            ExitCode::FAILURE
        }
    }
}

fn parsed<T: std::str::FromStr>(word: &str) -> Result<T, String> {
    word.parse().map_err(|_| format!("{word:?} makes no sense"))
}
