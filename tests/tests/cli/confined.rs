//! Backends with the capabilities that the documents name, and the error where one is missing or a
//! seccomp profile forbids a call.

use super::{Done, Running, rocinante, start_command, words};
use rocinante::device::Backend;
use rocinante_lab::{Container, Lab, LabConfig};
use rocinante_tests::{confined, need, on_each_backend, require};
use std::process::Command;

/// Starts a command line in a container, after `confine`.
fn start(container: &Container, line: &str, confine: impl FnOnce(&mut Command)) -> Running {
    let mut command = rocinante(words(line));
    confine(&mut command);
    start_command(container, &mut command)
}

/// A client without a server: it opens its device, and ends.
fn alone(lab: &Lab, netdev: &str, confine: impl FnOnce(&mut Command)) -> Done {
    let line = format!("rping -c -a {} --patience 1 --netdev {netdev}", lab.container(1).ipv4());
    start(lab.container(0), &line, confine).finish()
}

/// The capabilities of a backend in the table of a document, by their names without `CAP_`.
fn documented(document: &str, backend: &str) -> Vec<String> {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    let text = std::fs::read_to_string(format!("{root}/{document}")).unwrap();
    let rows: Vec<Vec<&str>> =
        text.lines().map(|line| line.split('|').map(str::trim).collect()).collect();
    let column = |row: &&Vec<&str>| row.iter().position(|cell| *cell == "capabilities");
    let column = rows.iter().find_map(|row| column(&row)).unwrap();
    let is_row = |row: &&Vec<&str>| row.get(1) == Some(&format!("`{backend}`").as_str());
    let row = rows.iter().find(is_row).unwrap();
    row[column].split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// With the documented capabilities the backend carries messages; without one of them the error
/// names that one, and no other.
fn needs_what_is_documented(backend: Backend) {
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let names = documented("README.md", backend.name());
    assert_eq!(names, documented("docs/troubleshooting.md", backend.name()));
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let confine = |command: &mut Command| confined::capabilities(command, &names);
    let line = format!("pingpong --netdev {backend}");
    let server = start(lab.container(1), &line, confine).that_waits();
    let line = format!("{line} -n 50 -c {}", lab.container(1).ipv4());
    start(lab.container(0), &line, confine).finish().succeeded();
    server.finish().succeeded();
    for missing in &names {
        let others: Vec<&str> = names.iter().copied().filter(|name| name != missing).collect();
        let confine = |command: &mut Command| confined::capabilities(command, &others);
        let advice = format!("run with --cap-add {missing}, or");
        alone(&lab, backend.name(), confine).failed(1, &["needs CAP_", &advice]);
    }
}

on_each_backend!(needs_what_is_documented);

/// podman's default profile, with the documented capabilities.
#[test]
fn a_seccomp_profile_is_named() {
    require!(need::machine_root());
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let confine = |command: &mut Command| {
        confined::without_bpf(command);
        confined::capabilities(command, &["NET_RAW", "NET_ADMIN", "BPF"]);
    };
    let words = ["seccomp profile forbids bpf(2)", "--security-opt seccomp"];
    let afxdp = alone(&lab, "afxdp", confine).failed(1, &words);
    assert!(!afxdp.err.contains("--cap-add"), "{}", afxdp.err);
    // The reason of `auto`, with the way out.
    let words = ["udp: not packet", "tcx programs", words[0], "choose --netdev packet"];
    alone(&lab, "auto", confine).failed(1, &words);
    let packet = alone(&lab, "packet", confine);
    assert!(packet.err.contains("packet: asked for"), "{}", packet.err);
}

/// Without capabilities the agent is the way to `packet`: it is named where it is missing.
#[test]
fn a_missing_agent_is_named_by_what_was_lost() {
    require!(need::machine_root());
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let missing = "there is no agent at /nowhere/agent.sock";
    let with = |agent| {
        move |command: &mut Command| {
            confined::capabilities(command.env("ROCINANTE_AGENT", agent), &[]);
        }
    };
    let devices = |agent| start(lab.container(0), "devices -v", with(agent)).finish();
    let lost = devices("/nowhere/agent.sock").succeeded();
    assert!(lost.out.contains(missing) && lost.out.contains("not packet"), "{}", lost.out);
    let unasked = devices("off").succeeded();
    assert!(
        unasked.out.contains("not packet") && !unasked.out.contains("agent"),
        "{}",
        unasked.out
    );
    let words = ["needs CAP_NET_RAW", "--cap-add NET_RAW", missing];
    for netdev in ["packet", "afxdp"] {
        alone(&lab, netdev, with("/nowhere/agent.sock")).failed(1, &words);
    }
}
