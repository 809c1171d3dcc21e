//! `cargo xtask interop`: the matrix with a real peer.

use crate::command::{self, cargo};
use crate::setup;

/// Sets up the machine, builds, and runs what `args` choose of the matrix.
///
/// # Errors
/// A cell failed, or the guest cannot be had.
pub(crate) fn run(args: &[&str]) -> Result<(), String> {
    setup::packages();
    let (subset, rest): (Vec<&str>, Vec<&str>) = args.iter().partition(|arg| **arg == "--subset");
    let mut command =
        cargo(["test", "--quiet", "-p", "rocinante-interop", "--test", "matrix", "--"]);
    if subset.is_empty() {
        command.arg("--whole");
    }
    command::run(command.args(rest))
}
