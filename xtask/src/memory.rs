//! Tools that watch memory while the tests run: miri and the sanitizers. Only they need a nightly
//! toolchain.

use crate::command;
use crate::machine;
use std::process::Command;

/// The nightly toolchain that this file was tested with, and that CI installs: miri changes, and
/// its findings with it.
const PINNED: &str = "nightly-2026-05-20";

/// A run of miri: a package, its targets, and the names of its tests (or `--skip` and a name).
struct Run {
    package: &'static str,
    target: &'static [&'static str],
    names: &'static [&'static str],
    /// Additional flags for miri.
    flags: &'static str,
    /// The tests that `cargo xtask test` runs, if any.
    quick: Option<&'static [&'static str]>,
}

const MIRI: &[Run] = &[
    Run {
        package: "rocinante-netdev",
        target: &["--lib"],
        names: &["xdp::cursor", "xdp::ring", "xdp::umem", "packet::ring", "headers"],
        flags: "",
        quick: Some(&["xdp::ring", "xdp::umem", "packet::ring"]),
    },
    Run {
        package: "rocinante-soft",
        target: &["--lib"],
        names: &["memory", "listeners", "progress::spin"],
        // Otherwise miri gives up if a word is stored whole and, later, in parts. A single thread
        // does not need the emulation.
        flags: "-Zmiri-disable-weak-memory-emulation",
        quick: Some(&["memory", "listeners", "progress::spin"]),
    },
    // Whole devices, with their threads, on the simulated network.
    Run {
        package: "rocinante",
        target: &["--test", "memory"],
        names: &[],
        flags: "",
        quick: Some(&["who_", "atomics"]),
    },
    Run {
        package: "rocinante-stack",
        target: &["--lib"],
        // Seconds of packets at a microsecond each: safe arithmetic that takes many minutes.
        names: &["--skip", "the_rate_is_one_that_a_rec"],
        flags: "",
        // The crate forbids unsafe code: miri has little to find in it.
        quick: None,
    },
    Run {
        package: "rocinante-wire",
        target: &["--lib"],
        // CRCs of long packets, likewise.
        names: &["--skip", "is_solved_at", "--skip", "the_shortcut_is"],
        flags: "",
        quick: None,
    },
    Run {
        package: "rocinante-stack",
        target: &["--test", "rc"],
        names: &["scenarios::a_gap", "scenarios::a_lost"],
        flags: "",
        quick: None,
    },
];

/// `cargo xtask miri`: the engine, the rings over plain memory, and devices on the simulated
/// network.
///
/// # Errors
/// There is no nightly toolchain with miri, or miri found an error.
pub(crate) fn miri() -> Result<(), String> {
    let toolchain = with_miri().ok_or_else(|| {
        format!("miri is missing: rustup toolchain install {PINNED} --component miri,rust-src")
    })?;
    MIRI.iter().try_for_each(|run| run_miri(toolchain, run, run.names))
}

/// A part of [`miri`] that takes a minute, if miri is installed; returns runs that are not possible
/// as `name: reason`.
///
/// # Errors
/// Miri found an error.
pub(crate) fn check() -> Result<Vec<String>, String> {
    if with_miri().is_none() && std::env::var_os("CI").is_some() {
        install();
    }
    let Some(toolchain) = with_miri() else {
        return Ok(vec!["miri: there is no nightly toolchain with miri".into()]);
    };
    MIRI.iter()
        .filter_map(|run| Some((run, run.quick?)))
        .try_for_each(|(run, names)| run_miri(toolchain, run, names))
        .map(|()| vec![])
}

fn run_miri(toolchain: &str, run: &Run, names: &[&str]) -> Result<(), String> {
    // User memory addresses are numbers in requests; the clock and random numbers are the
    // machine's.
    let flags = format!("-Zmiri-disable-isolation -Zmiri-permissive-provenance {}", run.flags);
    let mut command = cargo(toolchain, &["miri", "test", "-p", run.package]);
    command.args(run.target).arg("--").args(names);
    let shown = command::show(command.env("MIRIFLAGS", flags))?;
    let ran = crate::programs::judge(shown.ok, &shown.stdout.join("\n")).passed;
    match (shown.ok, ran) {
        (false, _) => Err(format!("{}: failed", command::describe(&command))),
        (true, 0) => Err(format!("{}: there are no such tests", command::describe(&command))),
        (true, _) => Ok(()),
    }
}

/// A toolchain that has miri.
fn with_miri() -> Option<&'static str> {
    that_runs(&["miri", "--version"])
}

/// The toolchain known to work, or else any nightly.
fn that_runs(what: &[&str]) -> Option<&'static str> {
    let runs = |name: &&str| command::read(&mut cargo(name, what)).is_ok();
    [PINNED, "nightly"].into_iter().find(runs)
}

/// Installs a toolchain if rustup and a network are available; a failure shows soon enough.
fn install() {
    let mut command = Command::new("timeout");
    command.args(["300", "rustup", "toolchain", "install", PINNED, "--profile", "minimal"]);
    command.args(["--component", "miri,rust-src", "--no-self-update"]);
    if let Err(why) = command::run(&mut command) {
        println!("{why}");
    }
}

/// `cargo xtask sanitize address|thread`: the tests with unsafe code or threads, under that
/// sanitizer.
///
/// # Errors
/// There is no nightly toolchain with the sources of the standard library, or the sanitizer found
/// an error.
pub(crate) fn sanitize(which: &str) -> Result<(), String> {
    let host = format!("--target={}", machine::triple()?);
    let toolchain = that_runs(&["--version"]).ok_or_else(|| {
        format!("no nightly toolchain: rustup toolchain install {PINNED} --component rust-src")
    })?;
    let target = format!("{}/sanitize-{which}", crate::demo::target()?.display());
    let test = |what: &[&str]| {
        let mut command = cargo(toolchain, &["test", "--no-fail-fast", &host]);
        command.args(what);
        // It must see the standard library's atomics too.
        command.args((which == "thread").then_some("-Zbuild-std"));
        command.env("RUSTFLAGS", format!("-Zsanitizer={which}")).env("CARGO_TARGET_DIR", &target);
        command::run(&mut command)
    };
    match which {
        "address" => {
            test(&[
                "-p",
                "rocinante-netdev",
                "-p",
                "rocinante-soft",
                "-p",
                "rocinante",
                "--lib",
                "--tests",
            ])?;
            // A sanitizer uses memory and time itself: tests that measure these are left out.
            let programs = ["e2e", "cm", "capi", "e2e_allocations"];
            let targets = programs.iter().flat_map(|name| ["--test", name]);
            let end_to_end = ["-p", "rocinante-tests"].into_iter().chain(targets);
            test(&end_to_end.chain(["--", "--skip", "leaks::"]).collect::<Vec<_>>())
        }
        "thread" => test(&[
            "-p",
            "rocinante-netdev",
            "-p",
            "rocinante-soft",
            "-p",
            "rocinante",
            "--lib",
            "--tests",
        ]),
        _ => Err(format!("no sanitizer {which}: address, thread")),
    }
}

/// `cargo ARGS` of a toolchain.
fn cargo(toolchain: &str, args: &[&str]) -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", toolchain, "cargo"]).args(args);
    command
}
