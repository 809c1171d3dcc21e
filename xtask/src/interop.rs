//! `cargo xtask interop`: the matrix with a real peer.

use crate::command::{self, cargo};
use crate::setup;
use std::path::Path;

/// Sets up the machine, builds, and runs the part of the matrix that `args` select: with the guest,
/// or with a device of a machine. Paths in `args` are relative to the directory `from`.
pub(crate) fn run(args: &[&str], from: &Path) -> Result<(), String> {
    if args.first() == Some(&"agent") {
        return program(args, from);
    }
    if args.iter().any(|arg| *arg == "--device" || arg.starts_with("--device=")) {
        return program(&[&["device"], args].concat(), from);
    }
    setup::packages(setup::TESTS);
    if let Some(&"bench" | &"policy") = args.first() {
        return in_guest(args);
    }
    // The libraries for unmodified programs.
    command::run(&mut cargo("build --quiet -p rocinante-capi -p rocinante-paths"))?;
    let (subset, rest): (Vec<&str>, Vec<&str>) = args.iter().partition(|arg| **arg == "--subset");
    let mut command = cargo("test --quiet -p rocinante-interop --test matrix --");
    // A filter with a typing error must not pass.
    command.args(subset.is_empty().then_some("--whole")).arg("--some");
    command::run(command.args(rest))
}

/// Runs the program that is an agent, or that tries a device, in the directory `from`; it needs
/// neither QEMU nor anything else of this project.
fn program(args: &[&str], from: &Path) -> Result<(), String> {
    // The libraries for unmodified programs at Rocinante's end.
    command::run(&mut cargo("build --release --quiet -p rocinante-capi -p rocinante-paths"))?;
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml");
    let mut run = cargo("run --release --quiet -p rocinante-interop --bin rocinante-interop");
    run.args(["--manifest-path", manifest, "--"]).args(args);
    command::run(run.current_dir(from))
}

/// Runs other work than the matrix in the guest: it measures Soft-RoCE and Rocinante side by side
/// (`args` are `bench` and its arguments), or checks the rules and limits that bind there (`policy`
/// and arguments of `rocinante policy-check`).
fn in_guest(args: &[&str]) -> Result<(), String> {
    let packages = "-p rocinante-bench -p rocinante-interop -p rocinante-cli";
    command::run(&mut cargo(&format!("build --release --bins {packages}")))?;
    let mut run = cargo("run --release -q -p rocinante-interop --bin rocinante-side-by-side --");
    command::run(run.args(args))
}
