//! Tools that watch memory while the tests run: miri and the sanitizers. They need a nightly toolchain, which nothing else does.

use crate::command;
use crate::machine;
use std::process::Command;

/// A run of miri: a package, the filter of its unit tests, and what miri is told besides.
const MIRI: &[(&str, &[&str])] = &[
    ("rocinante-netdev", &["--lib", "--", "xdp::cursor", "xdp::ring", "packet::ring", "headers"]),
    ("rocinante", &["--lib", "--", "memory", "listeners", "soft::spin"]),
    ("rocinante-stack", &["--lib"]),
];

/// `cargo xtask miri`: the engine, and of the other crates what does not ask the kernel for more than memory.
///
/// # Errors
/// There is no nightly toolchain with miri, or it found something.
pub(crate) fn miri() -> Result<(), String> {
    command::read(&mut nightly(&["miri", "--version"])).map_err(|_| {
        "miri is missing: rustup toolchain install nightly --component miri,rust-src".to_owned()
    })?;
    for (package, rest) in MIRI {
        // The files of a test, the clock and random numbers are the machine's; addresses of user memory are numbers in requests.
        let flags = "-Zmiri-disable-isolation -Zmiri-permissive-provenance";
        command::run(
            nightly(&["miri", "test", "-p", package]).args(*rest).env("MIRIFLAGS", flags),
        )?;
    }
    Ok(())
}

/// `cargo xtask sanitize address|thread`: the tests with unsafe code or threads under that sanitizer.
///
/// # Errors
/// There is no nightly toolchain with the sources of the standard library, or it found something.
pub(crate) fn sanitize(which: &str) -> Result<(), String> {
    let host = format!("--target={}", machine::triple()?);
    let mut command = nightly(&["test", &host, "-p", "rocinante-netdev", "-p", "rocinante"]);
    command.args(["--lib", "--tests"]);
    match which {
        "address" => {}
        // It has to see the standard library's atomics, too.
        "thread" => {
            command.arg("-Zbuild-std");
        }
        _ => return Err(format!("no sanitizer {which}: address, thread")),
    }
    let target = format!("{}/sanitize-{which}", crate::demo::target()?.display());
    command.env("RUSTFLAGS", format!("-Zsanitizer={which}")).env("CARGO_TARGET_DIR", target);
    command::run(&mut command)
}

/// `cargo ARGS` of the nightly toolchain.
fn nightly(args: &[&str]) -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", "nightly", "cargo"]).args(args);
    command
}
