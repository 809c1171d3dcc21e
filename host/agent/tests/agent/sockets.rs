//! The paths of the agent's sockets are its own.

use std::fs;
use std::process::{Command, Stdio};

use rocinante_netdev::handed::{guard, page};

use crate::asker::{connected, eventually};
use crate::lab::host_or_skip;

#[test]
fn a_second_agent_does_not_get_them() {
    let mut host = host_or_skip!("sockets::a_second_agent", 1);
    host.start();
    let config = host.dir().join("second.toml");
    let state = host.dir().join("u/state.json");
    let text = format!("socket = {:?}\nstate = {state:?}\n", host.socket());
    fs::write(&config, text).expect("written");
    let mut second = Command::new(host.command().get_program());
    second.arg("run").arg("--config").arg(config);
    second.stdout(Stdio::piped()).stderr(Stdio::piped());
    let second = host.lab.host().spawn(&mut second).expect("an agent");
    let output = second.wait_with_output(crate::asker::SOON).expect("it ends");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("another agent listens there"), "{said}");
    assert!(guard::path(&host.socket()).exists());
    host.asker(0).granted(host.addresses(0)[0]);
}

#[test]
fn they_come_back_when_they_vanish_and_go_with_the_agent() {
    let mut host = host_or_skip!("sockets::they_come_back", 1);
    host.start();
    let [v4, _] = host.addresses(0);
    let paths = [host.socket(), guard::path(&host.socket()), page::path(&host.socket())];
    // A path is there before a socket listens at it.
    let are_there = || paths.iter().all(|path| connected(path).is_ok());
    paths.iter().for_each(|path| fs::remove_file(path).expect("removed"));
    eventually("they are there again", are_there);
    host.asker(0).granted(v4);
    let directory = host.socket().parent().expect("a directory").to_owned();
    fs::rename(&directory, host.dir().join("away")).expect("moved");
    eventually("and again", are_there);
    host.asker(0).granted(v4);
    // The agent may make a socket again before the directory goes.
    eventually("removed", || fs::remove_dir_all(&directory).is_ok());
    eventually("and once more", are_there);
    host.asker(0).granted(v4);
    host.terminate();
    assert!(paths.iter().all(|path| !path.exists()));
}

#[test]
fn the_file_of_another_stays() {
    let mut host = host_or_skip!("sockets::the_file_of_another", 1);
    host.start();
    let (path, other) = (host.socket(), host.dir().join("s/other"));
    fs::write(&other, "of another").expect("written");
    fs::rename(&other, &path).expect("in the place of the socket");
    std::thread::sleep(std::time::Duration::from_millis(100));
    host.terminate();
    assert_eq!(fs::read_to_string(&path).expect("it stays"), "of another");
    // An agent that starts there says so.
    let mut command = host.command();
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let agent = host.lab.host().spawn(&mut command).expect("an agent");
    let output = agent.wait_with_output(crate::asker::SOON).expect("it ends");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("the file is no socket"), "{said}");
}
