//! Guardians for programs that do not behave. `tests/tests/cli/outlived.rs` has those that do.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::asker::{As, Asker, eventually};
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
    of_agent: PathBuf,
}

impl Hanging {
    /// Starts the agent with it, which listens to `rate` programs of a container in a second.
    /// Returns also the number of the agent's descriptors.
    fn start(host: &mut Host, rate: u32) -> (Self, usize) {
        let (log, program) = (host.dir().join("guardians"), host.dir().join("hang"));
        // It becomes the user, as the real one does.
        let user = "exec setpriv --reuid $5 --regid $7 --clear-groups sleep 60";
        let text = format!("#!/bin/sh\necho $$ $* >> {}\n{user}\n", log.display());
        fs::write(&log, "").expect("written");
        fs::write(&program, text).expect("written");
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("ours");
        host.configure(&format!("guardian = {program:?}\nrequests_per_second = {rate}"));
        let of_agent = host.dir().join("log");
        host.start();
        // An agent that has just started has one more for a moment.
        let samples = (0..40).map(|_| {
            std::thread::sleep(Duration::from_millis(5));
            host.descriptors()
        });
        let before = samples.min().expect("some");
        (Self { log, of_agent }, before)
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

    /// The lines of the agent's log with these words.
    fn logged(&self, words: &str) -> usize {
        let log = fs::read_to_string(&self.of_agent).expect("a log");
        log.lines().filter(|line| line.contains(words)).count()
    }

    /// Waits until the agent keeps this number of descriptors beside those of its start. It may
    /// have had one more at that moment.
    fn kept(host: &Host, before: usize, count: usize) {
        let most = before + count;
        let keeps = || (most - 1..=most).contains(&host.descriptors());
        eventually(&format!("{count} descriptors are kept"), keeps);
    }

    fn alive(&self) -> Vec<Pid> {
        let runs = |pid: &Pid| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            [&b"sleep\x0060"[..], b"/bin/sh", b"setpriv"].iter().any(|of| line.starts_with(of))
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
    // Those that are refused count until they have been closed, so fewer may be kept than fit.
    let most = DESCRIPTORS_MAX / WHOLE;
    let least = (AT_ONCE_MAX + 2).max(most / 2);
    eventually("many are kept", || host.descriptors() >= before + least * WHOLE);
    // A moment later the others are gone.
    eventually("and no more", || host.descriptors() <= before + DESCRIPTORS_MAX);
    // At the powers of two: 200 at most.
    let logged = || guardians.logged("no descriptors are left for a program");
    eventually("the log has it", || logged() > 0);
    assert!(logged() <= 8);
    let mut other = host.asker(1);
    other.tell("leave 1 1");
    hostile.kill();
    eventually("guardians start", || guardians.alive().len() == AT_ONCE_MAX);
    // Another container waits for none of them.
    other.kill();
    eventually("another one starts", || guardians.alive().len() > AT_ONCE_MAX);
    let told = "guardian --part be-for-one --user 65534 --group 65534 --seconds 8";
    assert!(guardians.started().iter().all(|(_, words)| words == told));
    // What waits for one holds the sockets of addresses, so it does not wait long.
    let at_work = (AT_ONCE_MAX + 1) * WHOLE;
    eventually("the others are let go of", || host.descriptors() <= before + at_work);
    assert_eq!(guardians.alive().len(), AT_ONCE_MAX + 1);
    // They have changed their user, and are killed all the same. None of it stays.
    eventually("nothing is left", || {
        guardians.alive().is_empty() && host.descriptors() <= before && host.children() == 0
    });
    assert_eq!(guardians.started().len(), AT_ONCE_MAX + 1);
}

/// Programs that stay, more than may ask at one time: each is listened to for as long as it lives.
#[test]
fn as_many_programs_are_kept_as_there_is_room_for() {
    const PROGRAMS: usize = 400;
    let mut host = host_or_skip!("guards::as_many_programs_are_kept", 1);
    let (guardians, before) = Hanging::start(&mut host, 1000);
    let mut asker = host.asker(0);
    assert_eq!(asker.tell(&format!("leave {PROGRAMS} 1")), format!("connected {PROGRAMS}"));
    Hanging::kept(&host, before, PROGRAMS * (3 + 4));
    assert_eq!(guardians.logged("no descriptors are left"), 0);
    // No guardian is to start.
    host.kill();
}

/// Sockets whose close waits for a peer that does not read.
#[test]
fn one_container_sends_what_cannot_be_closed_and_others_are_served() {
    let mut host = host_or_skip!("guards::one_container_sends_what_cannot_be_closed", 2);
    let (guardians, before) = Hanging::start(&mut host, 1000);
    let (mut hostile, mut other) = (host.asker(0), host.asker(1));
    assert_eq!(hostile.tell("rights"), other.tell("rights"));
    assert_eq!(hostile.tell("linger 20"), "sent");
    // As much with requests, unless the kernel refuses it.
    let _ = hostile.tell("linger-request 20");
    eventually("none of it is open here", || host.descriptors() <= before);
    let [v4, _] = host.addresses(1);
    other.granted(v4);
    other.tell("leave 1 1");
    let kept = before + 3 + 4;
    eventually("the other program is looked after", || host.descriptors() >= kept);
    other.kill();
    eventually("the other one has a guardian", || !guardians.started().is_empty());
    assert_eq!(hostile.tell("linger 20"), "sent");
    host.terminate();
}

/// Any program makes network namespaces without end.
#[test]
fn namespaces_without_an_end_on_the_host_share_one_limit_and_get_no_guardian() {
    let mut host = host_or_skip!("guards::namespaces_without_an_end", 1);
    let (guardians, before) = Hanging::start(&mut host, 5);
    let nested = || {
        let own = std::env::current_exe().expect("this program");
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"]);
        command.args(["unshare", "--user", "--net"]).arg(own);
        Asker::of_command(host.container(0).netns(), &host.socket(), &mut command)
    };
    let mut strangers = [nested(), nested(), nested()];
    for stranger in &mut strangers {
        stranger.tell("rights");
        stranger.tell("leave 5 1");
    }
    let mut asker = host.asker(0);
    asker.tell("leave 1 1");
    Hanging::kept(&host, before, 3 + 4);
    let [v4, _] = host.addresses(0);
    // The third asks once each time. While others have the processors, floods are slow.
    eventually("the third one shares the limit", || {
        for stranger in &mut strangers[..2] {
            stranger.tell(&format!("flood 20 {v4}"));
        }
        strangers[2].refused(v4).contains("too often")
    });
    asker.granted(v4);
    strangers.into_iter().for_each(Asker::kill);
    asker.kill();
    eventually("it has a guardian", || !guardians.started().is_empty());
    assert_eq!(guardians.started().len(), 1);
}

/// Users of the host's network, as a container's with that network, have limits of their own.
#[test]
fn a_user_on_the_host_takes_no_other_ones_room() {
    let mut host = host_or_skip!("guards::a_user_on_the_host", 1);
    let (guardians, before) = Hanging::start(&mut host, 2000);
    let start = |who| Asker::start(host.lab.host(), &host.socket(), who);
    let (mut hostile, mut other) = (start(As::Nobody), start(As::Root));
    // Connections without a parcel take the rest.
    hostile.tell("leave 8 64");
    hostile.tell("leave 900 0");
    eventually("there is no more room", || host.descriptors() + 3 > before + DESCRIPTORS_MAX);
    other.tell("leave 1 64");
    eventually("the other user has room", || host.descriptors() > before + DESCRIPTORS_MAX + 200);
    other.kill();
    eventually("it has a guardian", || {
        guardians.started().iter().any(|(_, words)| words.contains("--user 0 "))
    });
}

#[test]
fn parcels_beyond_the_limit_are_dropped_and_the_log_has_their_count() {
    let mut host = host_or_skip!("guards::parcels_beyond_the_limit", 1);
    let (guardians, before) = Hanging::start(&mut host, 1000);
    let logged = || guardians.logged("a program has more than 64 addresses");
    let mut asker = host.asker(0);
    asker.tell("leave 1 64");
    Hanging::kept(&host, before, WHOLE);
    assert_eq!(logged(), 0);
    asker.tell("leave 3 65");
    Hanging::kept(&host, before, 4 * WHOLE);
    // The first and the second, and not the third.
    eventually("the log says so", || logged() == 2);
    asker.tell("leave 1 66");
    eventually("the fourth is logged", || logged() == 3);
    // It is hung up on.
    Hanging::kept(&host, before, 4 * WHOLE);
    asker.kill();
    eventually("guardians start", || !guardians.started().is_empty());
}

#[test]
fn a_program_that_comes_too_often_or_talks_nonsense_gets_none() {
    let mut host = host_or_skip!("guards::a_program_that_comes_too_often", 2);
    let (guardians, before) = Hanging::start(&mut host, 10);
    let mut hostile = host.asker(0);
    // Connections that leave nothing, and one that leaves too much.
    hostile.tell("leave 5 0");
    hostile.tell("leave 1 66");
    hostile.tell("leave 500 0");
    eventually("few are listened to", || host.descriptors() <= before + 3 * 20);
    hostile.kill();
    eventually("nothing is left", || host.descriptors() <= before);
    assert_eq!(guardians.started().len(), 0);
    let mut other = host.asker(1);
    other.tell("leave 2 3");
    Hanging::kept(&host, before, 2 * (3 + 3 * 4));
    other.kill();
    // One takes both.
    eventually("a guardian starts", || !guardians.started().is_empty());
    eventually("nothing is left", || {
        guardians.kill();
        host.descriptors() <= before
    });
}
