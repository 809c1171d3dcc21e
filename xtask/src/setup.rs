//! Installs the programs and targets that a bare Debian machine lacks.

use crate::command::{self, cargo, is_installed, words};
use crate::toolchain::Toolchain;
use crate::{dist, machine};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The Debian packages that the demo uses.
pub(crate) const DEMO: &[&str] = &["iproute2", "nftables"];

/// The packages that the tests use, peers and witnesses among them.
#[rustfmt::skip]
pub(crate) const TESTS: &[&str] = &[
    "iproute2", "nftables", "ethtool", "iptables", "iperf3", "python3-scapy",
    // Programs for libibverbs, and rdma-core's test-suite for it.
    "ibverbs-utils", "perftest", "rdma-core", "python3-pyverbs", "rdmacm-utils", "librdmacm-dev",
    // Programs that read the files of devices.
    "infiniband-diags", "hwloc-nox",
    // Containers. runc, which podman takes where it is alone, has no `--cgroups=disabled`.
    "podman", "crun", "containernetworking-plugins", "slirp4netns",
    // Programs for UCX and MPI.
    "ucx-utils", "openmpi-bin", "libopenmpi-dev",
    // Counts instructions.
    "valgrind", "tshark",
    // Encrypted links, and the compiler of policies for SELinux.
    "wireguard-go", "wireguard-tools", "secilc",
    // The guest of the interoperability tests, and the programs that unpack its kernel.
    "qemu-system-x86", "xz-utils", "zstd",
];

/// The engines that `cargo xtask containers` uses beside those of the tests.
pub(crate) const CONTAINERS: &[&str] =
    &["docker.io", "containerd", "containernetworking-plugins", "runc"];

/// The packages that `cargo xtask dropin` uses: unmodified programs, and the tools that build those
/// that come as source.
#[rustfmt::skip]
pub(crate) const DROPIN: &[&str] = &[
    "iproute2", "ibverbs-utils", "perftest", "rdma-core", "python3-pyverbs", "git",
    "rdmacm-utils", "iperf3", "fio", "libfabric-bin", "ucx-utils", "qperf", "openmpi-bin",
    "libopenmpi-dev", "netpipe-openmpi", "hpcc", "gcc", "libibverbs-dev", "libclang-dev", "clang",
    "libclang-rt-14-dev", "valgrind", "cmake", "libpython3.11-testsuite",
];

/// The packages that `cargo xtask dist` uses: the processors of other machines.
pub(crate) const DIST: &[&str] = &["qemu-user-static"];

/// As root, installs the missing packages among these, and says so; otherwise names them. Never
/// fails: the user of a missing package reports it again.
pub(crate) fn packages(needed: &[&str]) {
    let missing: Vec<&str> = needed.iter().filter(|name| !has(name)).copied().collect();
    if missing.is_empty() {
        return;
    }
    let list = missing.join(" ");
    if !machine::is_root() || !is_installed("apt-get") {
        println!("set-up: missing, some parts will not run: {list} (as root: apt install {list})");
        return;
    }
    println!("set-up: installing {list}");
    if let Err(error) = apt_install(&missing) {
        println!("set-up: could not install {list}, some parts will not run: {error}");
    }
}

/// Whether Debian's package is installed.
fn has(package: &str) -> bool {
    command::read(words("dpkg-query --show --showformat=${db:Status-Status}").arg(package))
        .is_ok_and(|is| is.starts_with("installed"))
}

/// Adds the parts of the Rust toolchain that the tests use.
pub(crate) fn toolchain() -> Result<(), String> {
    for (component, program) in [("rustfmt", "fmt"), ("clippy", "clippy")] {
        if command::read(&mut cargo(&format!("{program} --version"))).is_err() {
            rustup(&format!("component add {component}"))?;
        }
    }
    let ours = dist::TARGETS.map(|(name, _)| name);
    ours.into_iter().chain(["wasm32-unknown-unknown"]).try_for_each(target)
}

/// Adds Rust's library for a target.
pub(crate) fn target(name: &str) -> Result<(), String> {
    let is_there = Toolchain { name: None }.has(&[name]);
    if is_there { Ok(()) } else { rustup(&format!("target add {name}")) }
}

/// The path of a tool of cargo's, such as cargo-deny: an installed one, or one built below the
/// target directory.
pub(crate) fn tool(name: &str, version: &str, target: &Path) -> Result<PathBuf, String> {
    let tools = target.join("tools");
    let ours = tools.join("bin").join(name);
    for candidate in [Path::new(name), &ours] {
        if command::read(Command::new(candidate).arg("--version")).is_ok() {
            return Ok(candidate.to_owned());
        }
    }
    println!("set-up: building {name} {version} into {} (a minute or two)", tools.display());
    command::run(
        cargo(&format!("install --quiet --locked {name} --version {version} --root"))
            .arg(&tools)
            .env("CARGO_TARGET_DIR", tools.join("build"))
            // It runs once: building it fast matters more than running it fast.
            .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "0")
            .env("CARGO_PROFILE_RELEASE_LTO", "off")
            .env("CARGO_PROFILE_RELEASE_DEBUG", "0")
            .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "256"),
    )?;
    Ok(ours)
}

fn rustup(args: &str) -> Result<(), String> {
    println!("set-up: rustup {args}");
    command::run(&mut words(&format!("rustup {args}")))
}

fn apt_install(packages: &[&str]) -> Result<(), String> {
    let apt = |args: &[&str]| {
        let mut command = words("apt-get -qq -o DPkg::Lock::Timeout=300");
        command::read(command.args(args).env("DEBIAN_FRONTEND", "noninteractive"))
    };
    let install = [&["install", "-y", "--no-install-recommends"], packages].concat();
    // A fresh machine has no package lists.
    apt(&install).or_else(|_| apt(&["update"]).and_then(|_| apt(&install))).map(drop)
}
