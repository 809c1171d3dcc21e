//! The fuzz targets of `tests/fuzz/` under cargo-fuzz, each for a limited time. Without cargo-fuzz,
//! `tests/tests/fuzz.rs` still runs the same functions over their corpora and over changed copies
//! of those.

use crate::command::{self, cargo};
use std::fs;
use std::process::Command;

/// Where cargo-fuzz finds the targets.
const FOLDER: &str = "tests/fuzz";
/// Time for each target in `cargo xtask test`, in seconds.
const SMOKE_SECONDS: u32 = 10;

/// Runs each target for a moment; returns targets that could not run as `name: reason`.
///
/// # Errors
/// A target fails, or does not build.
pub(crate) fn check() -> Result<Vec<String>, String> {
    if command::read(&mut cargo(["fuzz", "--version"])).is_err() {
        return Ok(vec!["fuzz: cargo-fuzz is not installed".into()]);
    }
    all(SMOKE_SECONDS, &[]).map(|()| vec![])
}

/// `cargo xtask fuzz [SECONDS] [TARGET...]`.
///
/// # Errors
/// A target fails or does not build, or cargo-fuzz is missing.
pub(crate) fn run(args: &[&str]) -> Result<(), String> {
    let (seconds, wanted) = match args.split_first() {
        Some((first, rest)) if first.parse::<u32>().is_ok() => {
            (first.parse().unwrap_or(SMOKE_SECONDS), rest)
        }
        _ => (SMOKE_SECONDS, args),
    };
    command::read(&mut cargo(["fuzz", "--version"]))
        .map_err(|_| "cargo-fuzz is not installed: cargo install --locked cargo-fuzz".to_owned())?;
    all(seconds, wanted)
}

fn all(seconds: u32, wanted: &[&str]) -> Result<(), String> {
    let corpus = ["run", "--quiet", "-p", "rocinante-tests", "--bin", "fuzz-corpus"];
    command::run(cargo(corpus).args(["--", &format!("{FOLDER}/corpus")]))?;
    command::run(&mut fuzz(&["build"]))?;
    let targets = targets()?;
    if let Some(unknown) = wanted.iter().find(|name| !targets.iter().any(|known| known == *name)) {
        return Err(format!("no fuzz target {unknown}: there are {}", targets.join(", ")));
    }
    for name in targets.iter().filter(|name| wanted.is_empty() || wanted.contains(&name.as_str())) {
        println!("fuzz {name} for {seconds} s");
        let limit = format!("-max_total_time={seconds}");
        let limits = ["--", &limit, "-max_len=4096", "-print_final_stats=1", "-verbosity=0"];
        command::run(fuzz(&["run", name]).args(limits))?;
    }
    Ok(())
}

/// The targets, one per file.
fn targets() -> Result<Vec<String>, String> {
    let folder =
        fs::read_dir(format!("{FOLDER}/fuzz_targets")).map_err(|error| error.to_string())?;
    let names = folder.filter_map(|entry| Some(entry.ok()?.path().file_stem()?.to_str()?.into()));
    let mut names: Vec<String> = names.collect();
    names.sort();
    Ok(names)
}

/// `cargo fuzz ARGS`. The sanitizer is an unstable feature of the compiler, but works with the
/// stable compiler.
fn fuzz(args: &[&str]) -> Command {
    let mut command = cargo(["fuzz"]);
    let (what, args) = args.split_first().expect("a command of cargo-fuzz");
    command.args([what, "--fuzz-dir", FOLDER]).args(args).env("RUSTC_BOOTSTRAP", "1");
    command
}
