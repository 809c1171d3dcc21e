//! `cargo xtask interop`: the matrix with a real peer.

use std::path::Path;

use crate::command::{self, cargo};
use crate::setup;

/// Sets up the machine, builds, and runs the part of the matrix that `args` select: with the guest,
/// or with a device of a machine. Paths in `args` are relative to the directory `from`.
///
/// # Errors
/// A cell failed, or the guest or device is not available.
pub(crate) fn run(args: &[&str], from: &Path) -> Result<(), String> {
    if args.first() == Some(&"agent") {
        return program(args, from);
    }
    if args.iter().any(|arg| *arg == "--device" || arg.starts_with("--device=")) {
        return program(&[&["device"], args].concat(), from);
    }
    setup::packages(setup::TESTS);
    if let Some(&"compare" | &"bench") = args.first() {
        return side_by_side(args);
    }
    let (subset, rest): (Vec<&str>, Vec<&str>) = args.iter().partition(|arg| **arg == "--subset");
    let mut command =
        cargo(["test", "--quiet", "-p", "rocinante-interop", "--test", "matrix", "--"]);
    if subset.is_empty() {
        command.arg("--whole");
    }
    // A filter with a typing error must not pass.
    command.arg("--some");
    command::run(command.args(rest))
}

/// Runs the program that is an agent, or that tries a device, in the directory `from`; it needs
/// neither QEMU nor anything else of this project.
fn program(args: &[&str], from: &Path) -> Result<(), String> {
    let root = std::env::current_dir().map_err(|error| error.to_string())?;
    let manifest = root.join("Cargo.toml");
    let mut run = cargo(["run", "--release", "--quiet", "--manifest-path"]);
    run.arg(manifest).args(["-p", "rocinante-interop", "--bin", "rocinante-interop", "--"]);
    command::run(run.args(args).current_dir(from))
}

/// Measures Soft-RoCE and Rocinante side by side in the guest; `args` are `compare` or `bench` and
/// their arguments.
fn side_by_side(args: &[&str]) -> Result<(), String> {
    let build =
        ["build", "--release", "-p", "rocinante-bench", "-p", "rocinante-interop", "--bins"];
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
