//! A capture that is still being written.

use std::io::{Read as _, Write};
use std::process::Stdio;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use nix::sys::signal::Signal;
use rocinante_lab::{ChildGuard, lines};
use rocinante_tests::running::hand_on_no_ignored_signal;
use serde_json::Value;

use super::command;
use super::made::{Style, good_frame, pcap, pcap_header, pcap_record};

const PATIENCE: Duration = Duration::from_secs(60);

#[track_caller]
fn next(lines: &Receiver<String>) -> String {
    lines.recv_timeout(PATIENCE).expect("a line, though the input has not ended")
}

#[test]
fn packets_are_printed_as_they_come() {
    let mut child = ChildGuard::spawn(
        command().arg("-").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()),
    )
    .unwrap();
    let mut to = child.child_mut().stdin.take().unwrap();
    let lines = lines(child.child_mut().stdout.take().unwrap());
    to.write_all(&pcap_header(Style::USUAL, 1)).unwrap();
    for psn in 1..4 {
        let frame = good_frame(psn, 64);
        let record = pcap_record(Style::USUAL, psn, &frame, frame.len());
        // A record may come in two parts.
        let (one, other) = record.split_at(40);
        to.write_all(one).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        to.write_all(other).unwrap();
        // The pipe stays open: without more input this line has to come.
        let line = next(&lines);
        assert!(line.contains(&format!("psn 0x{psn:06x}")), "{line}");
    }
    drop(to);
    assert!(next(&lines).contains("3  RC_RDMA_WRITE_ONLY"));
    assert_eq!(child.wait(PATIENCE).unwrap().code(), Some(0));
}

#[test]
fn a_signal_ends_it_with_the_counts() {
    let mut command = command();
    command.args(["-", "--json"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    hand_on_no_ignored_signal();
    let mut child = ChildGuard::spawn(command.stderr(Stdio::piped())).unwrap();
    let mut to = child.child_mut().stdin.take().unwrap();
    let lines = lines(child.child_mut().stderr.take().unwrap());
    to.write_all(&pcap(Style::USUAL, 1, &[good_frame(1, 64), good_frame(2, 64)])).unwrap();
    for _ in 0..2 {
        assert!(next(&lines).contains(" → "));
    }
    child.signal(Signal::SIGINT);
    assert_eq!(child.wait(PATIENCE).unwrap().code(), Some(130));
    let mut out = String::new();
    child.child_mut().stdout.take().unwrap().read_to_string(&mut out).unwrap();
    let json: Value = serde_json::from_str(out.lines().last().unwrap()).unwrap();
    assert_eq!((&json["roce"], &json["error"]["kind"]), (&2.into(), &"signal".into()));
    drop(to);
}
