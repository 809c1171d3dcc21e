//! The soak test of `tests/tests/soak` in release mode, for longer than among the other tests.

use crate::command::{self, cargo};
use crate::{setup, skips};

/// Time for each backend, in seconds.
const SECONDS: u32 = 600;

/// `cargo xtask soak [SECONDS [BACKEND]]`: the backends one after the other.
///
/// # Errors
/// Something was lost, wrong, late or left behind; or it does not build.
pub(crate) fn run(args: &[&str]) -> Result<(), String> {
    let (seconds, backend) = match *args {
        [] => (SECONDS, None),
        [seconds] => (parse(seconds)?, None),
        [seconds, backend @ ("udp" | "packet" | "afxdp")] => (parse(seconds)?, Some(backend)),
        _ => return Err("soak [SECONDS [udp|packet|afxdp]]".into()),
    };
    let mut test = cargo(["test", "--release", "-p", "rocinante-tests", "--test", "soak", "--"]);
    test.args(["--nocapture", "--test-threads", "1"]).args(backend);
    setup::packages(setup::TESTS);
    let shown = command::show(test.env("ROCINANTE_SOAK_SECONDS", seconds.to_string()))?;
    let left_out = skips::found(shown.stdout.iter().chain(&shown.stderr).map(String::as_str));
    match (shown.ok, left_out.first()) {
        (true, None) => Ok(()),
        (true, Some(skip)) => Err(format!("not all was run: {skip}")),
        (false, _) => Err("the soak failed: see above".into()),
    }
}

fn parse(seconds: &str) -> Result<u32, String> {
    seconds.parse().map_err(|_| format!("{seconds} are no seconds: give a whole number"))
}
