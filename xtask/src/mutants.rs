//! `cargo xtask mutants`: which changes of the code its tests notice, by cargo-mutants
//! (<https://mutants.rs>). `.cargo/mutants.toml` has the exceptions, docs/proof.md the
//! results.

use std::fs;
use std::process::Command;

use crate::command::{self, cargo};
use crate::{demo, files};

/// The parts of the code, and the arguments that choose their mutants and the tests of these.
const PARTS: [(&str, &str); 3] = [
    (
        "stack",
        "--package=rocinante-stack --package=rocinante-wire \
         --test-package=rocinante-stack,rocinante-wire,rocinante-sim",
    ),
    ("netdev", "--package=rocinante-netdev"),
    // The guest of `interop` covers the code that asks a device of the kernel.
    (
        "verbs-api",
        "--package=rocinante-soft --package=rocinante \
         --test-package=rocinante,rocinante-soft,rocinante-models",
    ),
];
/// The memory limit of a mutant, in KiB. Some would allocate all there is.
const MEMORY_MAX_KIB: u32 = 8 << 20;

/// `cargo xtask mutants PART [ARGS of cargo-mutants]`. A mutant that was noticed before is not
/// tried again, so a run that was interrupted goes on.
/// That mutants survive is no error.
pub(crate) fn run(args: &[&str]) -> Result<(), String> {
    let part = args.split_first().and_then(|(name, args)| {
        let (_, chosen) = PARTS.iter().find(|(known, _)| known == name)?;
        Some((name, chosen, args))
    });
    let (name, chosen, args) = part
        .ok_or_else(|| format!("mutants of which part: {}?", PARTS.map(|(it, _)| it).join(", ")))?;
    command::needs_cargo("mutants")?;
    let limited = format!("ulimit -v {MEMORY_MAX_KIB}; exec \"$@\"");
    let mut command = Command::new("sh");
    command.args(["-c", &limited, "sh"]).arg(cargo("").get_program());
    let out = demo::target()?.join("mutants").join(name);
    fs::create_dir_all(&out).map_err(files::said(&out))?;
    command.args(["mutants", "--iterate", "--output"]).arg(out).args(chosen.split(' ')).args(args);
    // Less time to build means less time to try.
    command.env("CARGO_PROFILE_DEV_OPT_LEVEL", "0").env("CARGO_PROFILE_DEV_DEBUG", "0");
    let status = command.status().map_err(|error| error.to_string())?;
    // 2 and 3: some mutants survived, or did not end.
    match status.code() {
        Some(0 | 2 | 3) => Ok(()),
        _ => Err(format!("{}: {status}", command::describe(&command))),
    }
}
