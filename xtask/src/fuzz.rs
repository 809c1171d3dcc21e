//! The fuzz targets of `tests/fuzz/` under cargo-fuzz, each for a limited time. Without cargo-fuzz,
//! `tests/tests/fuzz.rs` still runs the same functions over their corpora and over changed copies
//! of those.

use crate::command::{self, cargo};
use std::process::Command;

/// Where cargo-fuzz finds the targets.
const FOLDER: &str = "tests/fuzz";
/// Time for each target in `cargo xtask test`, in seconds.
const SMOKE_SECONDS: u32 = 10;

/// Runs each target for a moment; returns targets that could not run as `name: reason`.
pub(crate) fn check() -> Result<Vec<String>, String> {
    if command::needs_cargo("fuzz").is_err() {
        return Ok(vec!["fuzz: cargo-fuzz is not installed".into()]);
    }
    all(SMOKE_SECONDS, &[]).map(|()| vec![])
}

/// `cargo xtask fuzz [SECONDS] [TARGET...]`.
pub(crate) fn run(args: &[&str]) -> Result<(), String> {
    let first = args.split_first().and_then(|(first, rest)| Some((first.parse().ok()?, rest)));
    let (seconds, wanted) = first.unwrap_or((SMOKE_SECONDS, args));
    command::needs_cargo("fuzz")?;
    all(seconds, wanted)
}

fn all(seconds: u32, wanted: &[&str]) -> Result<(), String> {
    let mut corpus = cargo("run --quiet -p rocinante-tests --bin fuzz-corpus --");
    command::run(corpus.arg(format!("{FOLDER}/corpus")))?;
    command::run(&mut fuzz("build"))?;
    let listed = command::read(&mut fuzz("list"))?;
    let targets = if wanted.is_empty() { listed.lines().collect() } else { wanted.to_vec() };
    for name in targets {
        println!("fuzz {name} for {seconds} s");
        let limit = format!("-max_total_time={seconds}");
        let limits = ["--", &limit, "-max_len=4096", "-print_final_stats=1", "-verbosity=0"];
        command::run(fuzz("run").arg(name).args(limits))?;
    }
    Ok(())
}

/// `cargo fuzz WHAT`. The sanitizer is an unstable feature of the compiler, but works with the
/// stable compiler.
fn fuzz(what: &str) -> Command {
    let mut command = cargo(&format!("fuzz {what} --fuzz-dir {FOLDER}"));
    command.env("RUSTC_BOOTSTRAP", "1");
    command
}
