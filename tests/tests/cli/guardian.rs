//! The guardian of `rocinante run`: it disconnects the peers of a program that is killed, and the
//! program sees nothing of it.

use std::fs;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use rocinante::cm::{Listener, Params};
use rocinante::device::Backend;
use rocinante_lab::{ChildGuard, Lab, LabConfig};
use rocinante_tests::alone::myself;
use rocinante_tests::harness::{Family, PATIENCE, Setup, Side, address, wait_until};
use rocinante_tests::idle::Client;
use rocinante_tests::{need, require, with_idle_clients};

use super::run::Installed;

const PORT: u16 = 7471;
const PROGRAMS: usize = 3;
const CONNECTIONS: usize = 4;

with_idle_clients! { peers_are_told:
    peers_of_programs_that_are_killed_together_are_told_udp: Udp;
    peers_of_programs_that_are_killed_together_are_told_packet: Packet;
}

/// All processes of an address die in one moment, with all of their process group: no neighbour is
/// left.
fn peers_are_told(backend: Backend, test: &str) {
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let installed = Installed::new();
    let [own, survivor] = [0, 1].map(|container| address(&lab, container, Family::V4));
    let side = Side::open(lab.container(1).netns(), survivor, &Setup::new(backend));
    side.run(|| {
        let listener = Listener::bind(&side.ctx, SocketAddr::new(survivor, PORT), 16).unwrap();
        let (mut programs, mut connections) = (Vec::new(), Vec::new());
        for _ in 0..PROGRAMS {
            let program = myself(test);
            let mut run = installed.run(&["--"]);
            run.arg(program.get_program()).args(program.get_args()).process_group(0);
            let client = Client { own, connections: CONNECTIONS };
            let mut child = lab.container(0).spawn(client.prepare(&mut run, &listener)).unwrap();
            // No questions to silent peers: they know it by the guardian alone.
            let params = Params::default().keep_alive(None);
            connections.extend(client.accept(&mut child, (&side, &listener), &params));
            programs.push(child);
        }
        let place = fs::metadata(format!("/proc/{}/ns/net", programs[0].id())).unwrap();
        let place = (place.dev(), place.ino());
        for program in &programs {
            killpg(Pid::from_raw(program.id().try_into().unwrap()), Signal::SIGKILL).unwrap();
        }
        let killed = Instant::now();
        for connection in &connections {
            connection.wait_disconnected(PATIENCE).unwrap();
        }
        println!("{} connections: known after {:?}", connections.len(), killed.elapsed());
        drop(programs);
        wait_until("the guardians have ended", || processes_in(place) == 0);
    });
}

/// The processes in a network namespace.
fn processes_in(place: (u64, u64)) -> usize {
    let all = fs::read_dir("/proc").unwrap().flatten();
    let namespaces = all.filter_map(|entry| fs::metadata(entry.path().join("ns/net")).ok());
    namespaces.filter(|it| (it.dev(), it.ino()) == place).count()
}

/// Prints the processes, descriptors and signals that a program was given.
const LOOK: &str = "read children < /proc/$$/task/$$/children; echo \"children: $children\"; \
    for fd in /proc/$$/fd/*; do echo ${fd##*/}; done; \
    read pid name state parent group session rest < /proc/$$/stat; echo $parent $group $session; \
    while read key value; do case $key in Sig[BIC]*|Shd*|Uid:) echo $key $value;; esac; done \
        < /proc/$$/status; \
    wait; echo $?; sh -c 'exit 7'; echo $?; exit 3";

#[test]
fn a_program_sees_nothing_of_its_guardian() {
    let installed = Installed::new();
    let look = |mut command: Command| {
        let output = command.stdin(Stdio::null()).output().unwrap();
        assert_eq!(output.status.code(), Some(3), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let mut plain = Command::new("sh");
    plain.args(["-c", LOOK]);
    let plain = look(plain);
    assert!(plain.starts_with("children: \n0\n1\n"), "{plain}");
    assert_eq!(look(installed.run(&["--", "sh", "-c", LOOK])), plain);
    // The end of its output is the program's own, although the guardian ends later.
    let name = "echo ${ROCINANTE_GUARDIAN:-none}";
    assert_ne!(installed.run(&["--", "sh", "-c", name]).output().unwrap().stdout, b"none\n");
}

#[test]
fn a_program_that_is_pid_1_has_none() {
    require!(need::machine_root());
    if !Path::new("/usr/bin/unshare").exists() {
        rocinante_tests::skip!("no unshare: apt install util-linux");
    }
    let installed = Installed::new();
    // Nor another program's, which would not know when this one ends.
    let script = format!("echo $$ ${{ROCINANTE_GUARDIAN:-none}}; {LOOK}");
    let run = installed.run(&["-v", "--", "sh", "-c", &script]);
    let mut unshare = Command::new("unshare");
    unshare.args(["--pid", "--fork", "--mount-proc", "--kill-child"]);
    unshare.arg(run.get_program()).args(run.get_args());
    unshare.env("XDG_RUNTIME_DIR", installed.place()).env("ROCINANTE_GUARDIAN", "another's");
    let output = unshare.stdin(Stdio::null()).output().unwrap();
    let [out, error] = [output.stdout, output.stderr].map(|it| String::from_utf8(it).unwrap());
    assert_eq!(output.status.code(), Some(3), "{error}");
    assert!(out.starts_with("1 none\nchildren: \n0\n1\n"), "{out}");
    assert!(error.contains("no guardian, so peers wait"), "{error}");
}

/// It reads the messages of a hostile program. No process of its user may trace it either, not
/// even where that is root without rights.
#[test]
fn a_guardian_that_becomes_a_user_has_no_right() {
    require!(need::machine_root());
    for (user, group) in [(65534, 65533), (0, 0)] {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let line = format!("guardian --part be-for-one --user {user} --group {group}");
        let mut guardian = {
            let mut command = super::rocinante(super::words(&line));
            ChildGuard::spawn(command.stdin(OwnedFd::from(theirs))).unwrap()
        };
        let file = |name: &str| format!("/proc/{}/{name}", guardian.id());
        let status = || fs::read_to_string(file("status")).unwrap();
        let ids = [("Uid", user), ("Gid", group)];
        let ids = ids.map(|(id, is)| format!("{id}:\t{is}\t{is}\t{is}\t{is}\n"));
        let sets = ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"];
        let sets = sets.map(|set| format!("{set}\t{:016x}\n", 0));
        wait_until("it has become the user", || {
            let status = status();
            ids.iter().chain(&sets).all(|line| status.contains(line))
        });
        let groups = status().lines().find_map(|it| it.strip_prefix("Groups:").map(str::to_owned));
        assert_eq!(groups.unwrap().trim(), "");
        let reads = |process: &str| {
            let mut command = Command::new("setpriv");
            command.args([format!("--reuid={user}"), format!("--regid={group}")]);
            command.args(["--clear-groups", "--inh-caps=-all", "--bounding-set=-all", "cat"]);
            command.arg(format!("/proc/{process}/environ")).output().unwrap().status.success()
        };
        assert!(reads("self") && !reads(&guardian.id().to_string()), "it can be traced");
        drop(ours);
        assert!(guardian.wait(PATIENCE).unwrap().success());
    }
}
