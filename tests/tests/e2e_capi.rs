//! Debian's own programs for libibverbs, unchanged, on `capi`'s library: as an ordinary user, each
//! side in a container of its own.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rocinante_node::{ChildGuard, Container, LabConfig, Pair};
use rocinante_tests::running::{Done, Running};
use rocinante_tests::{require, require_lab, require_program};

const NOBODY: u32 = 65534;

/// A folder with the library under its name, where every user can read it.
struct Library(PathBuf);

impl Library {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let folder = std::env::temp_dir().join(format!(
            "rocinante-capi-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        ));
        fs::create_dir(&folder).unwrap();
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
        // Cargo builds it beside this program.
        let built = std::env::current_exe().unwrap().with_file_name("librocinante_ibverbs.so");
        let copy = folder.join("libibverbs.so.1");
        fs::copy(built, &copy).unwrap();
        fs::set_permissions(&copy, fs::Permissions::from_mode(0o755)).unwrap();
        Self(folder)
    }

    /// A program that gets the library, as the user `nobody`, without capabilities.
    fn command(&self, line: &str) -> Command {
        let mut words = line.split_whitespace();
        let mut command = Command::new(words.next().unwrap());
        command
            .args(words)
            .uid(NOBODY)
            .gid(NOBODY)
            .current_dir("/")
            .env("LD_PRELOAD", self.0.join("libibverbs.so.1"))
            .env("LD_LIBRARY_PATH", &self.0)
            .env("ROCINANTE_NETDEV", "udp")
            .env("ROCINANTE_LOG", "warn")
            .stdin(Stdio::null());
        command
    }

    fn start(&self, at: &Container, line: &str) -> Running {
        let mut command = self.command(line);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        Running::of(at.spawn(&mut command).unwrap())
    }

    fn run(&self, at: &Container, line: &str) -> Done {
        self.start(at, line).finish()
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn pair() -> Pair {
    Pair::new(&LabConfig::default()).unwrap()
}

/// Waits until something in the container listens on a TCP port.
fn listens(at: &Container, server: &mut ChildGuard) {
    let deadline = Instant::now() + Duration::from_secs(30);
    let ss = || Command::new("ss").args(["-Hltn"]).output().map(|output| output.stdout);
    while at.run(ss).unwrap().unwrap().is_empty() {
        assert!(server.try_wait().unwrap().is_none(), "the server ended");
        assert!(Instant::now() < deadline, "the server never listened");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Runs a program in both containers: the second one's connects to the first one's.
fn between(library: &Library, pair: &Pair, line: &str) -> [Done; 2] {
    let [a, b] = pair.containers();
    let mut server = library.start(a, line);
    listens(a, &mut server.child);
    let client = library.run(b, &format!("{line} {}", a.ipv4()));
    [server.finish().succeeded(), client.succeeded()]
}

#[test]
fn devices_are_listed_and_described_and_nothing_is_opened() {
    require_lab!();
    require_program!("ibv_devinfo");
    let (library, pair) = (Library::new(), pair());
    let [a, _] = pair.containers();
    let list = library.run(a, "ibv_devices").succeeded().out;
    let names: Vec<&str> =
        list.lines().skip(2).filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(names, ["roce0", "roce1"], "{list}");
    // The port of RoCE is taken, and the questions are answered all the same.
    let taken = a.run(|| std::net::UdpSocket::bind((a.ipv4(), 4791)).unwrap()).unwrap();
    let told = library.run(a, "ibv_devinfo -v -d roce0").succeeded().out;
    drop(taken);
    for words in ["PORT_ACTIVE (4)", "active_mtu:\t\t4096 (5)", "RoCE v2", "max_qp:\t\t\t\t16384"] {
        assert!(told.contains(words), "no {words:?} in {told}");
    }
    let [c, d] = [a.ipv4().octets()[2], a.ipv4().octets()[3]];
    let gid = format!("::ffff:{}.{}.{c}.{d}", a.ipv4().octets()[0], a.ipv4().octets()[1]);
    assert!(told.contains(&gid), "no {gid} in {told}");
    // A chosen device under a chosen name.
    let mut command = library.command("ibv_devices");
    let named = command.env("ROCINANTE_DEVICES", "lo=mlx5_0");
    let list = String::from_utf8(a.output(named).unwrap().stdout).unwrap();
    assert!(list.contains("mlx5_0") && !list.contains("roce"), "{list}");
}

#[test]
fn the_ping_pongs_of_rdma_core_verify_every_byte() {
    require_lab!();
    require_program!("ibv_rc_pingpong");
    let (library, pair) = (Library::new(), pair());
    for line in [
        "ibv_rc_pingpong -g 0 -n 200 -c",
        "ibv_rc_pingpong -g 0 -n 200 -e -c",
        "ibv_rc_pingpong -g 0 -n 200 -N -c",
        "ibv_rc_pingpong -g 0 -n 200 -e -N -c",
        "ibv_rc_pingpong -g 0 -n 20 -s 1000000 -m 4096 -c",
        // The table's IPv6 address.
        "ibv_rc_pingpong -g 1 -n 200 -c",
        "ibv_uc_pingpong -g 0 -n 200 -e -c",
        "ibv_ud_pingpong -g 0 -n 200 -e -c",
        "ibv_srq_pingpong -g 0 -n 200 -c",
        "ibv_srq_pingpong -g 0 -n 200 -e -c",
    ] {
        let [server, client] = between(&library, &pair, line);
        for side in [server, client] {
            assert!(side.out.contains("iters in"), "{line}: {}{}", side.out, side.err);
            assert!(!side.out.contains("invalid data"), "{line}: {}", side.out);
        }
    }
}

#[test]
fn perftest_measures_every_operation() {
    require_lab!();
    require_program!("ib_write_bw");
    let (library, pair) = (Library::new(), pair());
    for line in [
        "ib_send_bw -n 200",
        "ib_send_lat -n 200",
        "ib_write_bw -n 200",
        "ib_write_lat -n 200",
        "ib_read_bw -n 200",
        "ib_read_lat -n 200",
        "ib_atomic_bw -n 200",
        "ib_atomic_lat -n 200",
        "ib_send_bw -n 200 -e",
        "ib_send_bw -n 200 -c UD",
        "ib_send_bw -n 200 -r 512 --use-srq",
        "ib_write_bw -n 200 -q 4",
        "ib_write_bw -n 200 -b",
    ] {
        let [_, client] = between(&library, &pair, &format!("{line} -x 0 -d roce0"));
        let header = client.out.lines().any(|line| line.trim_start().starts_with("#bytes"));
        assert!(header, "{line}: {}", client.out);
    }
}

/// Calls with what no correct program gives: an error each, and the program goes on.
#[test]
fn bad_arguments_get_the_errno_of_the_manual() {
    require_lab!();
    require_program!("python3");
    let (library, pair) = (Library::new(), pair());
    let script = library.0.join("misuse.py");
    fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join("data/capi/misuse.py"), &script).unwrap();
    let line = format!("/usr/bin/python3 {}", script.display());
    let done = library.run(&pair.containers()[0], &line).succeeded();
    assert!(done.out.ends_with("all as expected\n"), "{}{}", done.out, done.err);
}

/// The tests of rdma-core that Debian ships beside pyverbs. The list has those that must run and
/// pass; a skip of one of them fails.
#[test]
fn the_suite_of_rdma_core_passes() {
    require_lab!();
    require!(suite());
    let (library, pair) = (Library::new(), pair());
    let [a, _] = pair.containers();
    let root = library.0.join("suite");
    let unpacked = Command::new("sh")
        .arg("-c")
        .arg("mkdir $1 && cp -r /usr/share/doc/rdma-core/tests $1/tests && gunzip -f $1/tests/*.gz && chmod -R a+rX $1")
        .args(["sh", &root.display().to_string()])
        .status();
    assert!(unpacked.unwrap().success());
    let list = include_str!("../data/capi/suite.txt").lines();
    let wanted: Vec<&str> = list.filter(|line| !line.starts_with('#')).map(str::trim).collect();
    let mut failed = Vec::new();
    let modules: std::collections::BTreeSet<&str> =
        wanted.iter().filter_map(|name| name.split('.').next()).collect();
    for module in modules {
        let names: Vec<String> = wanted
            .iter()
            .filter(|name| name.split('.').next() == Some(module))
            .map(|name| format!("tests.{name}"))
            .collect();
        let mut command = library.command(&format!(
            "/usr/bin/python3 tests/run_tests.py --dev roce0 -v {}",
            names.join(" ")
        ));
        let output = a.output(command.current_dir(&root)).unwrap();
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        let ran = format!("Ran {} test", names.len());
        let skipped = told.contains(" ... skipped ");
        if !told.contains(&ran) || !told.lines().any(|line| line == "OK") || skipped {
            failed.push(told);
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

fn suite() -> Result<(), String> {
    let there = Path::new("/usr/share/doc/rdma-core/tests").is_dir()
        && Path::new("/usr/lib/python3/dist-packages/pyverbs").is_dir();
    if there { Ok(()) } else { Err("python3-pyverbs is not installed".into()) }
}
