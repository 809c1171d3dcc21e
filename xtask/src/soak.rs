//! The soak tests of `tests/tests/soak`, for longer than among the other tests.

use crate::command::cargo;
use crate::{setup, skips};
use std::process::Command;

/// Time for each backend, in seconds.
const SECONDS: u32 = 600;
/// Busy loops and seconds for each backend in [`check`]: it runs alone, so that no other test is
/// late, and with few loops, so that a peer has a processor within the default ACK timeouts.
const CHECK: (u32, u32) = (4, 10);

const USAGE: &str = "soak [--hogs N] [SECONDS [udp|packet|afxdp]]";

/// `cargo xtask soak [--hogs N] [SECONDS [BACKEND]]`: the backends one after the other.
pub(crate) fn run(args: &[&str]) -> Result<(), String> {
    let (hogs, args) = match args {
        ["--hogs", count, rest @ ..] => (Some(parse(count)?), rest),
        rest => (None, rest),
    };
    let (seconds, backend) = match *args {
        [] => (SECONDS, None),
        [seconds] => (parse(seconds)?, None),
        [seconds, backend @ ("udp" | "packet" | "afxdp")] => (parse(seconds)?, Some(backend)),
        _ => return Err(USAGE.into()),
    };
    let mut test = cargo("test --release -p rocinante-tests --test soak --");
    match hogs {
        Some(hogs) => under_load(&mut test, hogs, backend),
        None => test.args(backend).args(["--skip", UNDER_LOAD]),
    };
    setup::packages(setup::TESTS);
    skips::none(timed(&mut test, seconds))
}

/// Connections with default options beside busy loops, as a step of `cargo xtask test`. Returns
/// the skipped parts.
pub(crate) fn check() -> Result<Vec<String>, String> {
    let (hogs, seconds) = CHECK;
    // As the other tests were built.
    let mut test = cargo("test --workspace --quiet --test soak --");
    under_load(&mut test, hogs, None);
    skips::of(timed(&mut test, seconds))
}

/// How the names of the tests beside busy loops begin.
const UNDER_LOAD: &str = "under_load";

fn under_load<'a>(test: &'a mut Command, hogs: u32, backend: Option<&str>) -> &'a mut Command {
    let name = backend.map_or(UNDER_LOAD.into(), |backend| format!("{UNDER_LOAD}_{backend}"));
    test.arg(name).env("ROCINANTE_SOAK_HOGS", hogs.to_string())
}

fn timed(test: &mut Command, seconds: u32) -> &mut Command {
    test.args(["--nocapture", "--test-threads", "1"]);
    test.env("ROCINANTE_SOAK_SECONDS", seconds.to_string())
}

fn parse(number: &str) -> Result<u32, String> {
    number.parse().map_err(|_| format!("{number} is no whole number: {USAGE}"))
}
