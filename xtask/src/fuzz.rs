//! The fuzz targets of `tests/fuzz/` under cargo-fuzz, each for a limited time. Without cargo-fuzz,
//! `tests/tests/fuzz.rs` still runs the same functions over their corpora and over changed copies
//! of those.

use crate::command::{self, cargo};
use crate::files;
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
    if command::needs_cargo("fuzz").is_err() {
        return Ok(vec!["fuzz: cargo-fuzz is not installed".into()]);
    }
    all(SMOKE_SECONDS, &[]).map(|()| vec![])
}

/// `cargo xtask fuzz [SECONDS] [TARGET...]`.
///
/// # Errors
/// A target fails or does not build, or cargo-fuzz is missing.
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
    let targets = targets()?;
    if let Some(unknown) = wanted.iter().find(|name| !targets.iter().any(|known| known == *name)) {
        return Err(format!("no fuzz target {unknown}: there are {}", targets.join(", ")));
    }
    for name in targets.iter().filter(|name| wanted.is_empty() || wanted.contains(&name.as_str())) {
        println!("fuzz {name} for {seconds} s");
        let limit = format!("-max_total_time={seconds}");
        let limits = ["--", &limit, "-max_len=4096", "-print_final_stats=1", "-verbosity=0"];
        command::run(fuzz("run").arg(name).args(limits))?;
    }
    Ok(())
}

/// The targets, one per file.
fn targets() -> Result<Vec<String>, String> {
    let folder = format!("{FOLDER}/fuzz_targets");
    let folder = fs::read_dir(&folder).map_err(files::said(folder))?;
    let names = folder.filter_map(|entry| Some(entry.ok()?.path().file_stem()?.to_str()?.into()));
    let mut names: Vec<String> = names.collect();
    names.sort();
    Ok(names)
}

/// `cargo fuzz WHAT`. The sanitizer is an unstable feature of the compiler, but works with the
/// stable compiler.
fn fuzz(what: &str) -> Command {
    let mut command = cargo(&format!("fuzz {what} --fuzz-dir {FOLDER}"));
    command.env("RUSTC_BOOTSTRAP", "1");
    command
}
