//! Tools that watch memory while the tests run: miri and the sanitizers. Only they need a nightly
//! toolchain.

use crate::toolchain::{Toolchain, install};
use crate::{command, machine};

/// The nightly toolchain that this file was tested with, and that CI installs: miri changes, and
/// its findings with it.
const PINNED: &str = "nightly-2026-05-20";

/// The crates with unsafe code or threads.
const LIBRARIES: &str = "-p rocinante-netdev -p rocinante-soft -p rocinante --lib --tests";

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

const RUN: Run = Run { package: "", target: &["--lib"], names: &[], flags: "", quick: None };
const MIRI: &[Run] = &[
    Run {
        package: "rocinante-netdev",
        names: &["xdp::cursor", "xdp::ring", "xdp::umem", "packet::ring", "headers"],
        quick: Some(&["xdp::ring", "xdp::umem", "packet::ring"]),
        ..RUN
    },
    Run {
        package: "rocinante-soft",
        names: &["memory", "listeners", "progress::spin"],
        // Otherwise miri gives up if a word is stored whole and, later, in parts. A single thread
        // does not need the emulation.
        flags: "-Zmiri-disable-weak-memory-emulation",
        quick: Some(&["memory", "listeners", "progress::spin"]),
        ..RUN
    },
    // Whole devices, with their threads, on the simulated network.
    Run {
        package: "rocinante",
        target: &["--test", "memory"],
        quick: Some(&["who_", "atomics"]),
        ..RUN
    },
    // Not quick: the crates forbid unsafe code, so miri has little to find in them. Left out are
    // seconds of packets at a microsecond each, and CRCs of long packets: safe arithmetic that
    // takes many minutes.
    Run { package: "rocinante-stack", names: &["--skip", "the_rate_is_one_that_a_rec"], ..RUN },
    Run {
        package: "rocinante-wire",
        names: &["--skip", "is_solved_at", "--skip", "the_shortcut_is"],
        ..RUN
    },
    Run {
        package: "rocinante-stack",
        target: &["--test", "rc"],
        names: &["scenarios::a_lost"],
        ..RUN
    },
];

/// `cargo xtask miri`: the engine, the rings over plain memory, and devices on the simulated
/// network.
pub(crate) fn miri() -> Result<(), String> {
    let toolchain = that_runs("miri --version").ok_or_else(|| {
        format!("miri is missing: rustup toolchain install {PINNED} --component miri,rust-src")
    })?;
    MIRI.iter().try_for_each(|run| run_miri(&toolchain, run, run.names))
}

/// A part of [`miri`] that takes a minute, if miri is installed; returns runs that are not possible
/// as `name: reason`.
pub(crate) fn check() -> Result<Vec<String>, String> {
    if that_runs("miri --version").is_none()
        && std::env::var_os("CI").is_some()
        && let Err(why) = command::run(&mut install(PINNED, "--component miri,rust-src"))
    {
        println!("{why}");
    }
    let Some(toolchain) = that_runs("miri --version") else {
        return Ok(vec!["miri: there is no nightly toolchain with miri".into()]);
    };
    MIRI.iter()
        .filter_map(|run| Some((run, run.quick?)))
        .try_for_each(|(run, names)| run_miri(&toolchain, run, names))
        .map(|()| vec![])
}

fn run_miri(toolchain: &Toolchain, run: &Run, names: &[&str]) -> Result<(), String> {
    // User memory addresses are numbers in requests; the clock and random numbers are the
    // machine's.
    let flags = format!("-Zmiri-disable-isolation -Zmiri-permissive-provenance {}", run.flags);
    let mut command = toolchain.cargo(&format!("miri test -p {}", run.package));
    command.args(run.target).arg("--").args(names);
    let shown = command::show(command.env("MIRIFLAGS", flags))?;
    let ran = crate::programs::judge(shown.ok, &shown.stdout.join("\n")).passed;
    match (shown.ok, ran) {
        (false, _) => Err(format!("{}: failed", command::describe(&command))),
        (true, 0) => Err(format!("{}: there are no such tests", command::describe(&command))),
        (true, _) => Ok(()),
    }
}

/// The toolchain known to work, or else any nightly.
fn that_runs(what: &str) -> Option<Toolchain> {
    let nightly = [PINNED, "nightly"].map(|name| Toolchain { name: Some(name) });
    nightly.into_iter().find(|it| command::read(&mut it.cargo(what)).is_ok())
}

/// `cargo xtask sanitize address|thread`: the tests with unsafe code or threads, under that
/// sanitizer.
pub(crate) fn sanitize(which: &str) -> Result<(), String> {
    let host = format!("--target={}", machine::triple()?);
    let toolchain = that_runs("--version").ok_or_else(|| {
        format!("no nightly toolchain: rustup toolchain install {PINNED} --component rust-src")
    })?;
    let target = format!("{}/sanitize-{which}", crate::demo::target()?.display());
    let test = |what: &str| {
        let mut command = toolchain.cargo(&format!("test --no-fail-fast {host} {what}"));
        // It must see the standard library's atomics too.
        command.args((which == "thread").then_some("-Zbuild-std"));
        command.env("RUSTFLAGS", format!("-Zsanitizer={which}")).env("CARGO_TARGET_DIR", &target);
        command::run(&mut command)
    };
    match which {
        "address" => {
            test(LIBRARIES)?;
            // A sanitizer uses memory and time itself: tests that measure these are left out.
            let programs = "--test e2e --test cm --test capi --test e2e_allocations";
            test(&format!("-p rocinante-tests {programs} -- --skip leaks::"))
        }
        "thread" => test(LIBRARIES),
        _ => Err(format!("no sanitizer {which}: address, thread")),
    }
}
