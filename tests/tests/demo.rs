//! `rocinante demo`, run as users run it: its report, and that it leaves nothing behind.

#[path = "common/schema.rs"]
mod schema;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rocinante_lab::ChildGuard;
use rocinante_tests::{need, require};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The demo's own limit, and a margin.
const LIMIT: Duration = Duration::from_secs(125);
const NOBODY: u32 = 65534;
const SOON: Duration = Duration::from_secs(20);

/// A demo needs the machine for itself.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A demo that runs.
struct Demo {
    child: ChildGuard,
    stdout: ChildStdout,
    /// Lines of its standard error.
    lines: Receiver<String>,
}

const PROGRAM: &str = env!("CARGO_BIN_EXE_rocinante-under-test");

impl Demo {
    fn start(args: &[&str]) -> Self {
        Self::start_as(&mut Command::new(PROGRAM), args)
    }

    fn start_as(command: &mut Command, args: &[&str]) -> Self {
        command.args(["demo", "--json", "--quick"]).args(args).stdin(Stdio::null());
        let mut child =
            ChildGuard::spawn(command.stdout(Stdio::piped()).stderr(Stdio::piped())).unwrap();
        let stdout = child.child_mut().stdout.take().unwrap();
        let stderr = BufReader::new(child.child_mut().stderr.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                eprintln!("{line}");
                let _ = sender.send(line);
            }
        });
        Self { child, stdout, lines }
    }

    /// Waits for a line of its report.
    fn says(&self, what: &str) {
        let deadline = Instant::now() + LIMIT;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(left);
            if line.unwrap_or_else(|_| panic!("never said {what:?}")).contains(what) {
                return;
            }
        }
    }

    /// Its processes in the containers a and b.
    fn workers(&self) -> [u32; 2] {
        let mut workers: Vec<u32> = processes().filter(|pid| self.has_worker(*pid)).collect();
        workers.sort_by_key(|pid| command_line(*pid));
        workers.try_into().expect("two processes in the containers")
    }

    fn has_worker(&self, pid: u32) -> bool {
        let parent = format!("PPid:\t{}\n", self.child.id());
        let status = fs::read_to_string(format!("/proc/{pid}/status"));
        status.is_ok_and(|status| status.contains(&parent))
            && command_line(pid).contains("lab-worker")
    }

    /// Exit code and standard output.
    fn end(mut self) -> (Option<i32>, String) {
        // The output fits into a pipe.
        let status = self.child.wait(LIMIT).unwrap();
        let mut stdout = String::new();
        self.stdout.read_to_string(&mut stdout).unwrap();
        (status.code(), stdout)
    }
}

/// The report of a demo that ended with this exit code.
fn report(demo: Demo, code: i32) -> Value {
    let (status, stdout) = demo.end();
    assert_eq!(status, Some(code), "{stdout}");
    assert_eq!(stdout.lines().count(), 1, "all but the JSON goes to standard error: {stdout}");
    let report = serde_json::from_str(&stdout).unwrap();
    schema::check(&report);
    report
}

fn keys(value: &Value) -> BTreeSet<&str> {
    value.as_object().unwrap_or_else(|| panic!("{value}")).keys().map(String::as_str).collect()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

#[test]
fn all_bytes_are_verified_and_the_host_is_obeyed() {
    require!(need::nft());
    require!(need::tc());
    let _alone = alone();
    let start = Instant::now();
    let report = report(Demo::start(&["--netdev", "udp"]), 0);
    assert!(start.elapsed() < Duration::from_secs(120));
    let all = ["schema", "version", "command", "backends", "skipped"];
    assert_eq!(keys(&report), BTreeSet::from(all));
    assert_eq!(report["skipped"], serde_json::json!([]));
    let [udp] = &report["backends"].as_array().unwrap()[..] else { panic!("{report}") };
    let expected = ["netdev", "ok", "verified_bytes", "verified_by_op", "mtu", "policy"];
    assert_eq!(keys(udp), BTreeSet::from(expected));
    assert_eq!((&udp["netdev"], &udp["ok"]), (&"udp".into(), &true.into()));
    verified(udp);
    measured(&udp["mtu"]);
    obeyed(&udp["policy"]);
}

fn verified(backend: &Value) {
    let total = backend["verified_bytes"].as_u64().unwrap();
    assert!(total >= 64 << 20, "{total}");
    let by_op = &backend["verified_by_op"];
    assert_eq!(keys(by_op), BTreeSet::from(["send", "write", "write_imm", "read", "cas", "faa"]));
    let bytes = by_op.as_object().unwrap().values().map(|bytes| bytes.as_u64().unwrap());
    assert!(bytes.clone().all(|bytes| bytes > 10_000), "{by_op}");
    assert_eq!(bytes.sum::<u64>(), total);
}

fn measured(mtu: &Value) {
    assert_eq!(keys(mtu), BTreeSet::from(["1024", "4096"]));
    let names = BTreeSet::from(["latency_us_p50", "rate_mops", "gbps_65536", "gbps_1048576"]);
    for figures in mtu.as_object().unwrap().values() {
        assert_eq!(keys(figures), names);
        assert!(figures.as_object().unwrap().values().all(|f| number(f) > 0.0), "{figures}");
    }
}

fn obeyed(policy: &Value) {
    #[rustfmt::skip]
    let names = BTreeSet::from(["counted_skbs", "drop_status", "drop_seconds", "after_drop_ok", "unshaped_mbps",
                                "shaped_limit_mbps", "shaped_mbps", "tbf_bytes", "tbf_overlimits"]);
    assert_eq!(keys(policy), names);
    assert!(policy["counted_skbs"].as_u64().unwrap() > 0);
    assert_eq!(policy["drop_status"], "RETRY_EXC_ERR");
    // At least four ACK timeouts, less a millisecond, and at most 3 s.
    let promised = (4.0 * 4.096e-6 * f64::from(1 << 12) - 0.001)..3.0;
    assert!(promised.contains(&number(&policy["drop_seconds"])), "{policy}");
    assert_eq!(policy["after_drop_ok"], true);
    let shaped = number(&policy["shaped_mbps"]);
    assert_eq!(policy["shaped_limit_mbps"], 100);
    assert!((70.0..=100.0).contains(&shaped), "{policy}");
    assert!(number(&policy["unshaped_mbps"]) >= 5.0 * shaped, "{policy}");
    // At least three seconds of the traffic that passed the shaper.
    assert!(number(&policy["tbf_bytes"]) > 3.0 * 1e6 * shaped / 8.0, "{policy}");
    assert!(policy["tbf_overlimits"].as_u64().unwrap() > 0);
}

#[test]
fn ctrl_c_ends_it_and_nothing_is_left() {
    require!(need::nft());
    let _alone = alone();
    let mut demo = Demo::start(&["--netdev", "udp"]);
    demo.says("compared byte for byte");
    let workers = demo.workers();
    let namespaces = [workers[0], workers[1], demo.child.id()].map(|pid| namespace(pid).unwrap());
    assert_ne!(namespaces[0], namespaces[1]);
    demo.child.signal(Signal::SIGINT);
    assert_eq!(demo.child.wait(SOON).unwrap().code(), Some(130));
    // At once: the workers ended before the demo did.
    for (worker, theirs) in workers.iter().zip(&namespaces) {
        assert!(!PathBuf::from(format!("/proc/{worker}")).exists(), "{worker} is left");
        let inside: Vec<u32> =
            processes().filter(|pid| namespace(*pid).as_ref() == Some(theirs)).collect();
        assert_eq!(inside, [0; 0], "still in {}", theirs.display());
    }
    assert_eq!(demo.end(), (Some(130), String::new()));
}

#[test]
fn a_container_that_dies_is_named() {
    require!(need::nft());
    let _alone = alone();
    let demo = Demo::start(&["--netdev", "udp"]);
    demo.says("compared byte for byte");
    kill(Pid::from_raw(demo.workers()[1].cast_signed()), Signal::SIGKILL).unwrap();
    let report = report(demo, 1);
    let udp = &report["backends"][0];
    assert_eq!((&udp["ok"], &udp["policy"]), (&false.into(), &Value::Null));
    let error = udp["error"].as_str().unwrap();
    assert!(error.contains("container b") && error.contains("measuring"), "{error}");
    assert!(error.contains("signal: 9"), "{error}");
}

#[test]
fn a_container_that_hangs_ends_the_demo_in_time() {
    require!(need::nft());
    let _alone = alone();
    let demo = Demo::start(&["--netdev", "udp"]);
    demo.says("compared byte for byte");
    let [_, b] = demo.workers();
    kill(Pid::from_raw(b.cast_signed()), Signal::SIGSTOP).unwrap();
    let start = Instant::now();
    let report = report(demo, 1);
    assert!(start.elapsed() < Duration::from_secs(60));
    let error = report["backends"][0]["error"].as_str().unwrap();
    assert!(error.contains("measuring at path MTU"), "{error}");
    assert!(!PathBuf::from(format!("/proc/{b}")).exists(), "{b} is left");
}

#[test]
fn without_root_it_runs_in_a_user_namespace() {
    let _alone = alone();
    // Root drops its privilege, with a copy of the program that any user may run.
    let folder = rocinante_tests::running::open_to_all();
    let copy = folder.path().join("rocinante");
    let mut command = Command::new(PROGRAM);
    if rocinante_tests::need::machine_root().is_ok() {
        fs::copy(PROGRAM, &copy).unwrap();
        command = Command::new(&copy);
        command.current_dir("/").uid(NOBODY).gid(NOBODY);
    }
    let (status, stdout) = Demo::start_as(&mut command, &[]).end();
    let report: Value = serde_json::from_str(stdout.trim()).unwrap();
    let skipped = report["skipped"].as_array().unwrap();
    if report["backends"].as_array().unwrap().is_empty() {
        rocinante_tests::skip!("{}", skipped[0]["why"].as_str().unwrap());
    }
    assert_eq!(status, Some(0), "{report}");
    let names = |list: &Value| -> Vec<String> {
        let list = list.as_array().unwrap().iter();
        list.map(|entry| entry["netdev"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(names(&report["backends"]), ["packet", "udp"]);
    assert_eq!(names(&report["skipped"]), ["afxdp"]);
    assert!(skipped[0]["why"].as_str().unwrap().contains("CAP_BPF"), "{report}");
}

fn processes() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").unwrap().map_while(Result::ok);
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

fn command_line(pid: u32) -> String {
    fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default()
}

fn namespace(pid: u32) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{pid}/ns/net")).ok()
}
