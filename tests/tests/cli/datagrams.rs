//! `rocinante udaddy` and `rocinante mckey` over loopback, and `mckey` between containers.

use std::net::IpAddr;
use std::process::Stdio;

use rocinante::device::Backend;
use rocinante_node::{Lab, LabConfig};
use rocinante_tests::{require_backend, require_lab};

use super::{Addresses, Running, rocinante, words};

fn start(line: &str) -> Running {
    Running::start(&mut rocinante(words(line)))
}

#[test]
fn udaddy_sends_there_and_back() {
    let Addresses { server, client } = Addresses::new();
    for (connections, count, size) in [(1, 10, 100), (3, 20, 1024), (2, 0, 100), (1, 5, 0)] {
        let options = format!("-c {connections} -C {count} -S {size} --json");
        let mut at_server = start(&format!("udaddy -b {server} {options}"));
        at_server.says("waiting for a client");
        let at_client = start(&format!("udaddy -s {server} -b {client} {options}")).finish();
        let expected = if size == 0 { 0 } else { connections * count };
        for done in [at_client.succeeded(), at_server.finish().succeeded()] {
            let json = done.json();
            let counts = (json["sent"].as_u64(), json["received"].as_u64());
            assert_eq!(counts, (Some(expected), Some(expected)), "{options}");
        }
    }
}

#[test]
fn mckey_sends_to_all_members() {
    let Addresses { server, client } = Addresses::new();
    let octets = std::process::id().to_be_bytes();
    let group = format!("239.82.{}.{}", octets[2], octets[3]);
    let mut receiver = start(&format!("mckey -m {group} -b {server} -c 2 -C 30 --json"));
    receiver.says("receiving data transfers");
    // A sender that has not joined sends to both queue pairs of the receiver.
    let line = format!("mckey -m {group} -b {client} -s -o -C 30 --pause 0 --json");
    let sender = start(&line).finish().succeeded();
    let receiver = receiver.finish().succeeded();
    assert_eq!((&sender.json()["sent"], &sender.json()["received"]), (&30.into(), &0.into()));
    assert_eq!((&receiver.json()["sent"], &receiver.json()["received"]), (&0.into(), &60.into()));
}

/// Members join by address on one side and by GID on the other, with either family. A queue pair
/// that has not joined receives nothing.
fn groups_are_joined(backend: Backend) {
    let lab = Lab::new(&LabConfig { containers: 3, ..LabConfig::default() }).unwrap();
    let within = |container: usize, line: &str| {
        let mut command = rocinante(words(&format!("mckey {line} --netdev {backend} --json")));
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        Running::of(lab.container(container).spawn(&mut command).unwrap())
    };
    let local = |container: usize, ipv6: bool| -> Option<IpAddr> {
        let container = lab.container(container);
        if ipv6 { container.ipv6().map(IpAddr::from) } else { Some(container.ipv4().into()) }
    };
    for (ipv6, group, gid, other) in [
        (true, "ff15::82:1", "ff15::82:1", "ff15::82:2"),
        (false, "239.82.0.1", "::ffff:239.82.0.1", "239.82.0.2"),
    ] {
        let (Some(first), Some(second), Some(sender)) =
            (local(0, ipv6), local(1, ipv6), local(2, ipv6))
        else {
            rocinante_tests::skip!("no IPv6 here");
        };
        let receiver = format!("-m {group} -b {first} -c 2 -C 20 -S 500");
        let mut receivers = [
            within(0, &receiver),
            within(1, &format!("-m {other} -b {second} -C 20 -S 500 --patience 1")),
        ];
        receivers.iter_mut().for_each(|receiver| receiver.says("receiving data transfers"));
        let line = format!("-M {gid} -b {sender} -s -C 20 -S 500 --pause 0");
        let sent = within(2, &line).finish().succeeded().json();
        assert_eq!((&sent["sent"], &sent["group"]), (&20.into(), &group.into()));
        let [member, other] = receivers.map(Running::finish);
        assert_eq!(member.succeeded().json()["received"], 40);
        other.failed(1, &["0 of 20 datagrams have come"]);
    }
}

#[test]
fn groups_are_joined_by_udp() {
    require_lab!();
    groups_are_joined(Backend::Udp);
}

#[test]
fn groups_are_joined_by_packet() {
    require_lab!();
    require_backend!(Backend::Packet);
    groups_are_joined(Backend::Packet);
}

#[test]
fn groups_are_joined_by_afxdp() {
    require_lab!();
    require_backend!(Backend::Xdp);
    groups_are_joined(Backend::Xdp);
}

#[test]
fn errors_say_what_to_do() {
    let Addresses { server, client } = Addresses::new();
    start("udaddy -b eth77").finish().failed(2, &["neither an IP address nor an interface"]);
    let line = format!("udaddy -s {server} -b {client} --patience 1");
    start(&line).finish().failed(1, &["cannot find the queue pair", "UDP port 4791"]);
    let line = format!("udaddy -s {server} -b {client} -S 5000");
    start(&line).finish().failed(2, &["larger than a packet", "4096 at most"]);
    // A device is there, but no program listens on that port.
    let mut at_server = start(&format!("udaddy -b {server}"));
    at_server.says("waiting for a client");
    let line = format!("udaddy -s {server} -b {client} --port 9 --patience 1");
    start(&line).finish().failed(1, &["nobody serves that", "start the server first"]);
    start(&format!("mckey -m 10.0.0.1 -b {client}")).finish().failed(2, &["no multicast group"]);
    let line = format!("mckey -m ff15::1 -b {client}");
    start(&line).finish().failed(2, &["of two families"]);
    let line = format!("mckey -M ff15::1 -b {client}");
    start(&line).finish().failed(2, &["of two families"]);
    let line = format!("mckey -M 239.82.0.1 -b {client}");
    start(&line).finish().failed(2, &["--unmapped", "invalid IPv6 address"]);
    start(&format!("mckey -b {client}")).finish().failed(2, &["--multicast"]);
    let line = format!("mckey -m 239.82.0.1 -M ff15::1 -b {client}");
    start(&line).finish().failed(2, &["cannot be used with"]);
    let line = format!("mckey -m 239.82.0.1 -b {client} --patience 1");
    start(&line).finish().failed(1, &["0 of 10 datagrams have come"]);
}
