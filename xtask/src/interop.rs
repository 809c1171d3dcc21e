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
    if let Some(&"compare" | &"bench" | &"policy") = args.first() {
        return in_guest(args);
    }
    // The libraries for unmodified programs.
    command::run(&mut cargo([
        "build",
        "--quiet",
        "-p",
        "rocinante-capi",
        "-p",
        "rocinante-paths",
    ]))?;
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
    // The libraries for unmodified programs at Rocinante's end.
    let mut build = cargo(["build", "--release", "--quiet"]);
    command::run(build.args(["-p", "rocinante-capi", "-p", "rocinante-paths"]))?;
    let mut run = cargo(["run", "--release", "--quiet", "--manifest-path"]);
    run.arg(manifest).args(["-p", "rocinante-interop", "--bin", "rocinante-interop", "--"]);
    command::run(run.args(args).current_dir(from))
}

/// Runs other work than the matrix in the guest: it measures Soft-RoCE and Rocinante side by side
/// (`args` are `compare` or `bench` and their arguments), or checks the rules and limits that bind
/// there (`policy` and arguments of `rocinante policy-check`).
fn in_guest(args: &[&str]) -> Result<(), String> {
    let mut build = cargo(["build", "--release", "--bins"]);
    command::run(
        build
            .args(["-p", "rocinante-bench", "-p", "rocinante-interop"])
            .args(["-p", "rocinante-cli"]),
    )?;
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
