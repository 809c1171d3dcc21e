//! Installs what a bare Debian machine lacks.

use crate::command::{self, cargo, is_installed};
use crate::{dist, machine};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A Debian package, and a check whether its content is installed.
type Package = (&'static str, fn() -> bool);

const IPROUTE2: Package = ("iproute2", || is_installed("ip") && is_installed("tc"));
const IBVERBS_UTILS: Package = ("ibverbs-utils", || is_installed("ibv_rc_pingpong"));
const PERFTEST: Package = ("perftest", || is_installed("ib_write_bw"));
/// It has the tests of rdma-core.
const RDMA_CORE: Package = ("rdma-core", || Path::new("/usr/share/doc/rdma-core/tests").is_dir());
const PYVERBS: Package =
    ("python3-pyverbs", || Path::new("/usr/lib/python3/dist-packages/pyverbs").is_dir());
const RDMACM_UTILS: Package = ("rdmacm-utils", || is_installed("rping"));
const UCX: Package = ("ucx-utils", || is_installed("ucx_perftest"));
const OPENMPI: Package = ("openmpi-bin", || is_installed("mpirun"));
const OPENMPI_DEV: Package = ("libopenmpi-dev", || is_installed("mpicc"));
const IPERF3: Package = ("iperf3", || is_installed("iperf3"));
const NFTABLES: Package = ("nftables", || is_installed("nft"));

/// The Debian packages that the demo uses.
pub(crate) const DEMO: &[Package] = &[IPROUTE2, NFTABLES];

/// The packages that the tests use, peers and witnesses among them.
pub(crate) const TESTS: &[Package] = &[
    IPROUTE2,
    NFTABLES,
    ("ethtool", || is_installed("ethtool")),
    ("iptables", || is_installed("iptables-legacy")),
    IPERF3,
    ("python3-scapy", has_scapy),
    // Programs for libibverbs, and rdma-core's test-suite for it.
    IBVERBS_UTILS,
    PERFTEST,
    RDMA_CORE,
    PYVERBS,
    RDMACM_UTILS,
    ("librdmacm-dev", || Path::new("/usr/include/rdma/rdma_cma.h").exists()),
    // Containers.
    ("podman", || is_installed("podman")),
    // Programs for UCX and MPI.
    UCX,
    OPENMPI,
    OPENMPI_DEV,
    // Counts instructions.
    ("valgrind", || is_installed("valgrind")),
    ("tshark", || is_installed("tshark")),
    // Encrypted links.
    ("wireguard-go", || is_installed("wireguard-go")),
    ("wireguard-tools", || is_installed("wg")),
    // The guest of the interoperability tests, and the programs that unpack its kernel.
    ("qemu-system-x86", || is_installed("qemu-system-x86_64")),
    ("xz-utils", || is_installed("xz")),
    ("zstd", || is_installed("zstd")),
];

/// The packages that `cargo xtask dropin` uses: programs that know nothing of Rocinante, and what
/// those are built with that come as source.
pub(crate) const DROPIN: &[Package] = &[
    IPROUTE2,
    IBVERBS_UTILS,
    PERFTEST,
    RDMA_CORE,
    PYVERBS,
    ("git", || is_installed("git")),
    RDMACM_UTILS,
    IPERF3,
    ("fio", || is_installed("fio")),
    ("libfabric-bin", || is_installed("fi_pingpong")),
    UCX,
    ("qperf", || is_installed("qperf")),
    OPENMPI,
    OPENMPI_DEV,
    ("netpipe-openmpi", || is_installed("NPopenmpi")),
    ("hpcc", || is_installed("hpcc")),
    ("gcc", || is_installed("cc")),
    ("libibverbs-dev", || Path::new("/usr/include/infiniband/verbs.h").exists()),
    ("libclang-dev", || is_installed("clang")),
    ("clang", || is_installed("clang")),
    ("libclang-rt-14-dev", || Path::new("/usr/lib/llvm-14/lib/clang/14.0.6/lib/linux").is_dir()),
    ("valgrind", || is_installed("valgrind")),
    ("cmake", || is_installed("cmake")),
    ("libpython3.11-testsuite", has_python_tests),
];

/// Whether Debian's Python has its own tests.
fn has_python_tests() -> bool {
    let mut python = Command::new("/usr/bin/python3");
    let import = python.args(["-c", "import test.test_os, test.test_subprocess"]);
    import.stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

/// The packages that `cargo xtask dist` uses: the processors of other machines.
pub(crate) const DIST: &[Package] = &[("qemu-user-static", || {
    let processors = dist::TARGETS.map(|(_, processor)| processor);
    processors.iter().all(|name| {
        is_installed(&format!("qemu-{name}-static")) || is_installed(&format!("qemu-{name}"))
    })
})];

/// The version known to understand our deny.toml.
const CARGO_DENY: &str = "0.20.2";

/// As root, installs the missing packages among these, and says so; otherwise names them. Never
/// fails: the user of a missing package reports it again.
pub(crate) fn packages(needed: &[Package]) {
    let missing: Vec<&str> =
        needed.iter().filter(|(_, there)| !there()).map(|&(name, _)| name).collect();
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

/// Adds the parts of the Rust toolchain that the tests use.
///
/// # Errors
/// A part is missing and there is no rustup to add it, or it cannot be downloaded.
pub(crate) fn toolchain() -> Result<(), String> {
    for (component, program) in [("rustfmt", "fmt"), ("clippy", "clippy")] {
        if command::read(&mut cargo([program, "--version"])).is_err() {
            rustup(&["component", "add", component])?;
        }
    }
    let ours = dist::TARGETS.map(|(name, _)| name);
    ours.into_iter().chain(["wasm32-unknown-unknown"]).try_for_each(target)
}

/// Adds Rust's library for a target.
///
/// # Errors
/// As for [`toolchain`].
pub(crate) fn target(name: &str) -> Result<(), String> {
    let sysroot = command::read(Command::new("rustc").args(["--print", "sysroot"]))?;
    let there = Path::new(sysroot.trim()).join("lib/rustlib").join(name).is_dir();
    if there { Ok(()) } else { rustup(&["target", "add", name]) }
}

/// The path of cargo-deny: an installed one, or one built below the target directory.
///
/// # Errors
/// It is not installed and cannot be built.
pub(crate) fn cargo_deny(target: &Path) -> Result<PathBuf, String> {
    let tools = target.join("tools");
    let ours = tools.join("bin/cargo-deny");
    for candidate in [Path::new("cargo-deny"), &ours] {
        if command::read(Command::new(candidate).arg("--version")).is_ok() {
            return Ok(candidate.to_owned());
        }
    }
    println!("set-up: building cargo-deny {CARGO_DENY} into {} (a minute or two)", tools.display());
    let install = ["install", "--quiet", "--locked", "cargo-deny", "--version", CARGO_DENY];
    command::run(
        cargo(install)
            .arg("--root")
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

fn rustup(args: &[&str]) -> Result<(), String> {
    println!("set-up: rustup {}", args.join(" "));
    command::run(Command::new("rustup").args(args))
}

fn apt_install(packages: &[&str]) -> Result<(), String> {
    let apt = |args: &[&str]| {
        let mut command = Command::new("apt-get");
        command.args(["-qq", "-o", "DPkg::Lock::Timeout=300"]).args(args);
        command.env("DEBIAN_FRONTEND", "noninteractive").stdin(Stdio::null());
        command::read(&mut command)
    };
    let install = [&["install", "-y", "--no-install-recommends"], packages].concat();
    // A fresh machine has no package lists.
    apt(&install).or_else(|_| apt(&["update"]).and_then(|_| apt(&install))).map(drop)
}

/// Debian's scapy belongs to Debian's python3, which may not be the first on the search path.
fn has_scapy() -> bool {
    ["/usr/bin/python3", "python3"].iter().any(|python| {
        command::read(Command::new(python).args(["-c", "import scapy.contrib.roce"])).is_ok()
    })
}
