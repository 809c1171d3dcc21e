//! `cargo xtask dropin`: unmodified programs of others on `rocinante run`.

use crate::command::{self, cargo};
use crate::{demo, setup};
use std::process::Command;

/// What the programs need, and what they are run by.
const PACKAGES: [&str; 4] =
    ["rocinante-cli", "rocinante-capi", "rocinante-paths", "rocinante-dropin"];
/// The table of what works.
const DOCUMENT: &str = "docs/dropin.md";

/// Sets up the machine, builds, and runs the table of programs; with `--suite` rdma-core's own
/// tests. `--accept` writes the table in [`DOCUMENT`] anew.
///
/// # Errors
/// A row failed, or something does not build.
pub(crate) fn run(args: &[&str]) -> Result<(), String> {
    setup::packages(setup::DROPIN);
    let build = ["build", "--release", "--quiet"];
    command::run(cargo(build).args(PACKAGES.iter().flat_map(|package| ["-p", *package])))?;
    let mut program = Command::new(demo::target()?.join("release/rocinante-dropin"));
    let document = args.contains(&"--accept").then_some(DOCUMENT);
    for arg in args {
        program.arg(arg).args(document.filter(|_| *arg == "--accept"));
    }
    // It has said what failed.
    let status = program.status().map_err(|error| format!("rocinante-dropin: {error}"))?;
    if status.success() { Ok(()) } else { Err(String::new()) }
}
