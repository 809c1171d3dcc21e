//! `cargo xtask dropin`: unmodified programs of others on `rocinante run`.

use crate::command::{self, cargo};
use crate::foreign::Root;
use crate::{demo, dist, setup};
use std::path::Path;
use std::process::Command;

/// The table of programs that work.
const DOCUMENT: &str = "docs/dropin.md";

/// Sets up the machine, builds, and runs the table of programs; with `--suite` rdma-core's own
/// tests, with `--foreign PROCESSOR` programs of another processor. `--accept` writes the table in
/// [`DOCUMENT`] anew.
pub(crate) fn run(args: &[&str]) -> Result<(), String> {
    setup::packages(setup::DROPIN);
    command::run(&mut cargo(
        "build --release --quiet -p rocinante-cli -p rocinante-dropin -p rocinante-capi \
         -p rocinante-paths",
    ))?;
    let target = demo::target()?;
    let mut program = Command::new(target.join("release/rocinante-dropin"));
    let document = args.contains(&"--accept").then_some(DOCUMENT);
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        if *arg == "--foreign" {
            let processor = args.next().ok_or("--foreign: which processor?")?;
            program.arg(arg).args(foreign(processor, &target)?);
            continue;
        }
        program.arg(arg).args(document.filter(|_| *arg == "--accept"));
    }
    command::become_it(&mut program)
}

/// Builds the libraries for another processor. Returns its emulator, a root file system with
/// programs for it, and where the libraries are.
fn foreign(processor: &str, target: &Path) -> Result<[String; 3], String> {
    setup::packages(setup::DIST);
    let emulator = dist::emulator(processor).and_then(|mut words| words.pop());
    let emulator = emulator.ok_or(format!("no qemu-{processor}: apt install qemu-user-static"))?;
    let triple = format!("{processor}-unknown-linux-gnu");
    setup::target(&triple)?;
    let root = Root::of(processor, target)?;
    let mut build = cargo("build --release --quiet -p rocinante-capi -p rocinante-paths --target");
    command::run(build.arg(&triple).args(root.linking(&triple)))?;
    let built = target.join(triple).join("release");
    Ok([emulator, root.path.display().to_string(), built.display().to_string()])
}
