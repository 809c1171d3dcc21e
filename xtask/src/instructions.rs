//! The number of instructions per operation of the engine, compared with the committed baseline.
//! Unlike a time, it is the same on a busy machine, so it can fail a build.
//!
//! The work is fixed (`benches/src/bin/instructions.rs`). callgrind counts it for one number of
//! operations and for its double, so that the set-up cancels out. The compiler decides the rest:
//! with another compiler than the baseline's nothing is compared.
//!
//! The last row is of `libibverbs.so.1`: the instructions that it adds to a post and the poll that
//! finds its completion, beside the Rust API. Both drive a whole device, of which only the code
//! above `soft` counts. Neither polls before the device had time: threads would decide the number
//! of polls in vain.

use crate::command::{self, cargo, is_installed, words};
use crate::{demo, files, machine};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

/// The committed baseline.
const BASELINE: &str = "benches/instructions.json";

/// Operations of the shorter run.
const COUNT: u64 = 1024;

/// The percentage of the baseline by which a count may differ, to whole instructions upwards.
const TOLERANCE: u64 = 3;

/// The row of the C ABI.
const C_ABI: &str = "c-abi-adds";

/// The C library's copies must not depend on the machine: no string instructions, for any length.
const TUNABLES: &str =
    "glibc.cpu.x86_rep_movsb_threshold=0x10000000:glibc.cpu.x86_rep_stosb_threshold=0x10000000";

/// `cargo xtask instructions [--update]`.
pub(crate) fn run(args: &[&str]) -> Result<(), String> {
    let update = match args {
        [] => false,
        ["--update"] => true,
        _ => return Err("instructions takes no argument but --update".into()),
    };
    if !is_installed("valgrind") {
        return Err("valgrind is not installed: as root, apt install valgrind".into());
    }
    if update {
        let mut counts = count()?;
        counts.extend([count_device()?.map_err(|why| format!("the C ABI: {why}"))?]);
        let text = serde_json::to_string_pretty(&(environment()?, counts));
        return files::write(BASELINE, text.map_err(|error| error.to_string())? + "\n");
    }
    check()?.iter().for_each(|skip| println!("SKIPPED {skip}"));
    Ok(())
}

/// As a step of `cargo xtask test`; returns the parts that were left out.
pub(crate) fn check() -> Result<Vec<String>, String> {
    let (of, mut baseline): (String, Counts) = serde_json::from_str(&files::read(BASELINE)?)
        .map_err(|error| format!("{BASELINE}: {error}"))?;
    if !is_installed("valgrind") {
        return Ok(vec!["instructions: valgrind is not installed".into()]);
    }
    let with = environment()?;
    if with != of {
        return Ok(vec![format!("instructions: the baseline is of {of}, this is {with}")]);
    }
    let mut counts = count()?;
    let mut skips = Vec::new();
    match count_device()? {
        Ok(device) => counts.extend([device]),
        Err(why) => {
            baseline.remove(C_ABI);
            skips.push(format!("instructions: the C ABI: {why}"));
        }
    }
    judge(&baseline, &counts).map(|()| skips)
}

/// Everything besides the source that the counts depend on.
fn environment() -> Result<String, String> {
    let rustc = command::read(&mut words("rustc --version"))?;
    // Its copies are counted too.
    let libc = command::read(&mut words("getconf GNU_LIBC_VERSION"));
    let libc = libc.unwrap_or_else(|_| "another libc".into());
    let (arch, features) = (std::env::consts::ARCH, features());
    Ok(format!("{}, {}, {arch} with {features}", rustc.trim(), libc.trim()))
}

/// The features of the processor that select the CRC method, as far as callgrind supports them.
fn features() -> String {
    #[cfg(target_arch = "x86_64")]
    let known = [
        ("pclmulqdq", std::arch::is_x86_feature_detected!("pclmulqdq")),
        ("avx2", std::arch::is_x86_feature_detected!("avx2")),
        ("vpclmulqdq", std::arch::is_x86_feature_detected!("vpclmulqdq")),
    ];
    #[cfg(not(target_arch = "x86_64"))]
    let known = [("nothing special", true)];
    let found = known.iter().filter(|(_, found)| *found).map(|(name, _)| *name);
    found.collect::<Vec<_>>().join(", ")
}

/// Instructions for one of each operation, by its name.
type Counts = BTreeMap<String, u64>;

fn count() -> Result<Counts, String> {
    // With the command, so that what the demo has built fits.
    let packages = "-p rocinante-cli -p rocinante-capi -p rocinante-benches";
    let what = "--lib --bin instructions --bin post";
    command::run(&mut cargo(&format!("build --quiet --release {packages} {what}")))?;
    let target = demo::target()?;
    let (program, log) = (target.join("release/instructions"), target.join("instructions.log"));
    let names = command::read(&mut Command::new(&program))?;
    let run = |name: &str, count: u64| {
        let mut valgrind = words("valgrind --tool=callgrind --callgrind-out-file=/dev/null");
        valgrind.arg(format!("--log-file={}", log.display())).arg(&program).arg(name);
        command::read(valgrind.arg(count.to_string()).env("GLIBC_TUNABLES", TUNABLES))?;
        let said = fs::read_to_string(&log).unwrap_or_default();
        collected(&said).ok_or(format!("callgrind counted nothing: see {}", log.display()))
    };
    names.lines().map(|name| Ok((name.to_owned(), each(|count| run(name, count))?))).collect()
}

/// Instructions of one operation, from the difference between [`COUNT`] operations and the double.
fn each(run: impl Fn(u64) -> Result<u64, String>) -> Result<u64, String> {
    Ok(run(2 * COUNT)?.saturating_sub(run(COUNT)?).div_ceil(COUNT))
}

/// The row of the C ABI: two queue pairs of a device are each other's peers on the loopback
/// interface of a network namespace. Or why there is none.
fn count_device() -> Result<Result<(String, u64), String>, String> {
    /// The same work in both.
    const SOURCE: &str = "verbs-api/capi/cost/post.c";
    for (program, package) in [("cc", "gcc"), ("ip", "iproute2"), ("unshare", "util-linux")] {
        if !is_installed(program) {
            return Ok(Err(format!("{package} is not installed")));
        }
    }
    if !Path::new("/usr/include/infiniband/verbs.h").exists() {
        return Ok(Err("libibverbs-dev is not installed".into()));
    }
    // A user namespace, unless this is root.
    let flags = if machine::is_root() { "-n" } else { "-rn" };
    if command::read(Command::new("unshare").args([flags, "true"])).is_err() {
        return Ok(Err("make a network namespace: not permitted".into()));
    }
    let release = demo::target()?.join("release");
    let (by_rust, by_c) = (release.join("post"), release.join("post-by-c"));
    let compile = format!("cc -O2 -Wall -Werror {SOURCE} -libverbs -o");
    command::run(words(&compile).arg(&by_c))?;
    let profile = release.join("instructions.profile");
    let of = |program: &Path, library: &Path, count: u64| {
        let mut valgrind = Command::new("unshare");
        let up = "ip link set lo up && LD_PRELOAD=\"$0\" exec valgrind \"$@\"";
        valgrind.args([flags, "sh", "-c", up]).arg(library).arg("--tool=callgrind");
        valgrind.arg(format!("--callgrind-out-file={}", profile.display()));
        valgrind.arg(program).arg(count.to_string()).env("GLIBC_TUNABLES", TUNABLES);
        command::read(valgrind.env("ROCINANTE_DEVICES", "lo").env("ROCINANTE_NETDEV", "udp"))?;
        let mut rows = words("callgrind_annotate --auto=no --show-percs=no --threshold=100");
        command::read(rows.arg(&profile)).map(|said| above(&said))
    };
    let library = release.join("librocinante_ibverbs.so");
    let rust = each(|count| of(&by_rust, Path::new(""), count))?;
    let c = each(|count| of(&by_c, &library, count))?;
    println!("a post and its completion: {rust} instructions by the Rust API, {c} by the C ABI");
    Ok(Ok((C_ABI.to_owned(), c.saturating_sub(rust))))
}

/// The instructions above the device in callgrind_annotate's output: of the two programs, of the C
/// library and of the Rust API, with the code inlined there but for the device itself.
fn above(said: &str) -> u64 {
    const ABOVE: [&str; 4] =
        ["rocinante_ibverbs::", "post::main", "rocinante::cq::Cq", "rocinante::qp::Qp"];
    const BELOW: [&str; 3] = ["verbs-api/soft/src", "stack/", "netdev/"];
    let row = |line: &str| {
        let (count, rest) = line.trim_start().split_once("  ")?;
        let (file, function) = rest.trim_start().split_once(':')?;
        let is_program = function.starts_with("main [") && function.contains("post-by-c");
        let counts = is_program || ABOVE.iter().any(|name| function.starts_with(name));
        let is_below = BELOW.iter().any(|folder| file.contains(folder));
        (counts && !is_below).then(|| count.replace(',', "").parse::<u64>().ok())?
    };
    said.lines().filter_map(row).sum()
}

/// The sum at the end of callgrind's output.
fn collected(said: &str) -> Option<u64> {
    let sum = said.lines().find_map(|line| line.split_once("Collected : "))?.1;
    sum.trim().parse().ok()
}

/// Compares, and prints the findings.
fn judge(baseline: &Counts, now: &Counts) -> Result<(), String> {
    let mut worse = Vec::new();
    for (name, count) in now {
        let Some(before) = baseline.get(name) else {
            worse.push(format!("{name} is not in {BASELINE}: cargo xtask instructions --update"));
            continue;
        };
        println!("{name:16} {count:6} instructions, {before:6} in the baseline");
        let tolerance = (before * TOLERANCE).div_ceil(100);
        if *count > before + tolerance {
            worse.push(format!("{name}: {count} instructions instead of {before}"));
        } else if *count < before - tolerance {
            println!("{name} became cheaper: keep it so with cargo xtask instructions --update");
        }
    }
    worse.extend(baseline.keys().filter(|name| !now.contains_key(*name)).map(|name| {
        format!("{name} is in {BASELINE}, but not counted: cargo xtask instructions --update")
    }));
    if worse.is_empty() { Ok(()) } else { Err(worse.join("; ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(entries: &[(&str, u64)]) -> Counts {
        entries.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect()
    }

    #[test]
    fn only_what_costs_more_fails() {
        let baseline = counts(&[("a", 1000), ("b", 49)]);
        let is_worse = |a, b| judge(&baseline, &counts(&[("a", a), ("b", b)])).is_err();
        assert!(!is_worse(1000, 49) && !is_worse(1030, 51) && !is_worse(500, 40));
        assert!(is_worse(1031, 49) && is_worse(1000, 52));
        assert!(judge(&baseline, &counts(&[("a", 1000)])).is_err(), "one is not counted any more");
        let more = counts(&[("a", 1000), ("b", 49), ("c", 1)]);
        assert!(judge(&baseline, &more).is_err(), "one is not in the baseline");
    }

    #[test]
    fn what_is_above_the_device_counts() {
        let said = "Ir\n\n1,500  verbs-api/capi/src/ffi/post.rs:rocinante_ibverbs::ffi::post::post_send [/x.so]\n\
                     20  /rustc/5/library/core/src/result.rs:rocinante_ibverbs::ffi::cq::poll_cq\n\
                    300  /home/x/stack/src/verbs/wr.rs:rocinante_ibverbs::ffi::post::post_send\n\
                    400  verbs-api/soft/src/cq.rs:rocinante_soft::cq::Cq::poll [/x]\n\
                      3  verbs-api/src/cq.rs:post::main\n\
                      4  ???:main [/target/release/post-by-c]\n\
                     50  ???:main [/bin/other]\n";
        assert_eq!(above(said), 1500 + 20 + 3 + 4);
    }

    #[test]
    fn the_sum_is_the_last_that_callgrind_says() {
        let said =
            "==7== Events    : Ir\n==7== Collected : 45678\n==7== \n==7== I   refs:      45,678\n";
        assert_eq!(collected(said), Some(45_678));
        assert_eq!(collected("==7== error"), None);
    }
}
