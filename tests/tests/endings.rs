//! A process with a lab leaves nothing of the lab, in whichever way it ends.
//!
//! Each test starts this program again as the holder of a lab, and ends the holder.

use nix::sys::signal::Signal;
use rocinante_lab::{ChildGuard, Lab, LabConfig, exit_with_parent, kill_children_on_signal};
use rocinante_tests::harness::wait_until;
use rocinante_tests::{need, require};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// The role of a process started by a test.
const ROLE: &str = "ROCINANTE_TEST_ROLE";
const SOON: Duration = Duration::from_secs(20);

/// The exit code is the one that a shell reports for a program that the signal killed.
#[test]
fn signals_end_the_children_and_tell_the_caller_which_it_was() {
    const NAME: &str = "signals_end_the_children_and_tell_the_caller_which_it_was";
    if std::env::var(ROLE).is_ok() {
        // This process would not end by itself.
        let mut command = Command::new("sleep");
        return hold_a_lab(|lab| {
            lab.container(0).spawn(command.arg("600").stdin(Stdio::null())).unwrap()
        });
    }
    require!(need::lab());
    for (signal, code) in [(Signal::SIGINT, 130), (Signal::SIGTERM, 143), (Signal::SIGHUP, 129)] {
        let (mut holder, worker) = start_holder(NAME);
        holder.signal(signal);
        assert_eq!(holder.wait(SOON).unwrap().code(), Some(code), "{signal}");
        assert_ends_soon(worker);
    }
}

#[test]
fn after_kill_9_the_children_end_by_themselves() {
    match std::env::var(ROLE).as_deref() {
        Ok("worker") => return work(),
        Ok(_) => return hold_a_lab(start_worker),
        Err(_) => {}
    }
    require!(need::lab());
    let (mut holder, worker) = start_holder("after_kill_9_the_children_end_by_themselves");
    holder.kill();
    assert_ends_soon(worker);
}

/// Starts `test` of this program as the holder; returns also the id of the process in its lab.
fn start_holder(test: &str) -> (ChildGuard, u32) {
    let mut command = myself(test, "holder");
    let mut holder = ChildGuard::spawn(command.stdout(Stdio::piped())).unwrap();
    let stdout = holder.child_mut().stdout.take().unwrap();
    let worker = BufReader::new(stdout)
        .lines()
        .find_map(|line| line.unwrap().strip_prefix("worker ")?.parse().ok())
        .unwrap();
    assert!(is_alive(worker));
    (holder, worker)
}

fn hold_a_lab(start: impl FnOnce(&Lab) -> ChildGuard) {
    kill_children_on_signal().unwrap();
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let mut worker = start(&lab);
    println!("\nworker {}", worker.id());
    worker.wait(Duration::from_secs(600)).unwrap();
}

fn start_worker(lab: &Lab) -> ChildGuard {
    let mut command = myself("after_kill_9_the_children_end_by_themselves", "worker");
    let mut worker = lab.container(0).spawn(command.stdout(Stdio::piped())).unwrap();
    // The worker is set up once it prints this.
    let stdout = worker.child_mut().stdout.take().unwrap();
    let ready = |line: std::io::Result<String>| line.unwrap().contains("ready");
    assert!(BufReader::new(stdout).lines().any(ready));
    worker
}

fn work() {
    exit_with_parent();
    println!("\nready");
    std::thread::sleep(Duration::from_secs(600));
}

fn myself(test: &str, role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(ROLE, role).stdin(Stdio::null());
    command
}

fn assert_ends_soon(pid: u32) {
    wait_until(&format!("process {pid} ends with its parent"), || !is_alive(pid));
}

/// Whether the process exists and is not a zombie.
fn is_alive(pid: u32) -> bool {
    let status = Path::new("/proc").join(pid.to_string()).join("status");
    std::fs::read_to_string(status).is_ok_and(|status| !status.contains("State:\tZ"))
}
