//! `cargo xtask interop`: the matrix with a real peer.

use crate::command::{self, cargo};
use crate::setup;

/// Sets up the machine, builds, and runs what `args` choose of the matrix.
///
/// # Errors
/// A cell failed, or the guest cannot be had.
pub(crate) fn run(args: &[&str]) -> Result<(), String> {
    setup::packages(setup::TESTS);
    if let Some((&"compare", rest)) = args.split_first() {
        return compare(rest);
    }
    let (subset, rest): (Vec<&str>, Vec<&str>) = args.iter().partition(|arg| **arg == "--subset");
    let mut command =
        cargo(["test", "--quiet", "-p", "rocinante-interop", "--test", "matrix", "--"]);
    if subset.is_empty() {
        command.arg("--whole");
    }
    command::run(command.args(rest))
}

/// Measures Soft-RoCE and Rocinante side by side in the guest; `args` are those of `rocinante compare`.
fn compare(args: &[&str]) -> Result<(), String> {
    let build = ["build", "--release", "-p", "rocinante-cli", "-p", "rocinante-interop", "--bins"];
    command::run(&mut cargo(build))?;
    let run = [
        "run",
        "--release",
        "-q",
        "-p",
        "rocinante-interop",
        "--bin",
        "rocinante-side-by-side",
        "--",
    ];
    command::run(cargo(run).args(args))
}
