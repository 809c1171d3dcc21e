//! Guardians for programs that do not behave. `tests/tests/cli/outlived.rs` has those that do.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use rustix::process::{Pid, Signal, kill_process};

use crate::asker::eventually;
use crate::lab::{Host, host_or_skip};

/// The most that the agent keeps for a container.
const DESCRIPTORS_MAX: usize = 4096;
/// The guardians of a container at a time.
const AT_ONCE_MAX: usize = 4;
/// A program with the most parcels.
const WHOLE: usize = 3 + 64 * 4;

/// A guardian that does not end, until this is dropped.
struct Hanging {
    log: PathBuf,
}

impl Hanging {
    /// Starts the agent with it, which listens to `rate` programs of a container in a second.
    /// Returns also the number of the agent's descriptors.
    fn start(host: &mut Host, rate: u32) -> (Self, usize) {
        let (log, program) = (host.dir().join("guardians"), host.dir().join("hang"));
        let text = format!("#!/bin/sh\necho $$ $* >> {}\nexec sleep 60\n", log.display());
        fs::write(&log, "").expect("written");
        fs::write(&program, text).expect("written");
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("ours");
        host.configure(&format!("guardian = {program:?}\nrequests_per_second = {rate}"));
        host.start();
        (Self { log }, host.descriptors())
    }

    /// All started guardians, with their arguments.
    fn started(&self) -> Vec<(Pid, String)> {
        let text = fs::read_to_string(&self.log).expect("a file");
        let of = |line: &str| {
            let (pid, words) = line.split_once(' ')?;
            Some((Pid::from_raw(pid.parse().ok()?)?, words.to_owned()))
        };
        text.lines().filter_map(of).collect()
    }

    fn alive(&self) -> Vec<Pid> {
        let runs = |pid: &Pid| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.starts_with(b"sleep\x0060") || line.starts_with(b"/bin/sh")
        };
        self.started().into_iter().map(|(pid, _)| pid).filter(runs).collect()
    }

    fn kill(&self) {
        for pid in self.alive() {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

impl Drop for Hanging {
    fn drop(&mut self) {
        self.kill();
    }
}

#[test]
fn one_container_has_few_guardians_and_they_end() {
    let mut host = host_or_skip!("guards::one_container_has_few", 2);
    let (guardians, before) = Hanging::start(&mut host, 1000);
    let mut hostile = host.asker(0);
    assert_eq!(hostile.tell("leave 200 64"), "connected 200");
    let most = DESCRIPTORS_MAX / WHOLE;
    eventually("there is no more room", || host.descriptors() >= before + most * WHOLE);
    // A moment later the others are gone.
    eventually("and no more", || host.descriptors() <= before + DESCRIPTORS_MAX);
    let mut other = host.asker(1);
    other.tell("leave 1 1");
    hostile.kill();
    eventually("guardians start", || guardians.alive().len() == AT_ONCE_MAX);
    // Another container waits for none of them.
    other.kill();
    eventually("another one starts", || guardians.alive().len() > AT_ONCE_MAX);
    let told = "guardian --part be-for-one --user 65534 --group 65534";
    assert!(guardians.started().iter().all(|(_, words)| words == told));
    let first = guardians.started().len();
    eventually("they are killed, and others start", || {
        let alive = guardians.alive().len();
        assert!(alive <= AT_ONCE_MAX + 1, "{alive}");
        guardians.started().len() > first
    });
    // All of it is given back, however long they take.
    eventually("nothing is left", || {
        guardians.kill();
        host.descriptors() <= before
    });
    // One that the agent came to later may have found room.
    let started = guardians.started().len();
    assert!((most + 1..200).contains(&started), "{started}");
}

#[test]
fn a_program_that_comes_too_often_or_talks_nonsense_gets_none() {
    let mut host = host_or_skip!("guards::a_program_that_comes_too_often", 2);
    let (guardians, before) = Hanging::start(&mut host, 10);
    let mut hostile = host.asker(0);
    // Connections that leave nothing, and one that leaves too much.
    hostile.tell("leave 5 0");
    hostile.tell("leave 1 65");
    hostile.tell("leave 500 0");
    eventually("few are listened to", || host.descriptors() <= before + 3 * 20);
    hostile.kill();
    eventually("nothing is left", || host.descriptors() <= before);
    assert_eq!(guardians.started().len(), 0);
    let mut other = host.asker(1);
    other.tell("leave 2 3");
    // An agent that has just started may have had one for a moment.
    let kept = before + 2 * (3 + 3 * 4);
    eventually("both are kept", || (kept - 1..=kept).contains(&host.descriptors()));
    other.kill();
    // One takes both.
    eventually("a guardian starts", || !guardians.started().is_empty());
    eventually("nothing is left", || {
        guardians.kill();
        host.descriptors() <= before
    });
}
