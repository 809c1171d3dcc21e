//! A network that carries less than the interfaces at its ends: a bridge's port drops large
//! packets, and says nothing; a router reports its MTU by ICMP.

use super::{Running, rocinante, words};
use rocinante_lab::{Between, Hosts, Lab, LabConfig};
use rocinante_tests::harness::Backend;
use rocinante_tests::{need, require};
use std::process::{Command, Stdio};

#[test]
fn a_link_that_takes_no_large_packets_is_named() {
    require!(need::lab());
    let lab = Lab::new(&LabConfig { mtu: 9000, ..LabConfig::default() }).unwrap();
    let port = lab.container(1).host_end();
    let mut ip = Command::new("ip");
    assert!(
        lab.host().output(ip.args(["link", "set", port, "mtu", "1500"])).unwrap().status.success()
    );
    let start = |index: usize, line: &str| {
        let mut command = rocinante(words(line));
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        Running::of(lab.container(index).spawn(&mut command).unwrap())
    };
    let run = |line: &str| {
        let server = start(1, line).that_waits();
        let client = start(0, &format!("{line} {}", lab.container(1).ipv4())).finish();
        let _ = server.finish();
        client
    };
    // Single packets: super-packets pass, because the bridge does not look into them.
    let large = "4096 bytes of payload";
    for line in
        ["pingpong --cm -m 4096", "perf write-lat --cm -s 4096", "perf read-lat --cm -s 4096"]
    {
        let line = format!("{line} --netdev udp -n 20");
        run(&line).failed(1, &[large, "a link between has a smaller MTU", "try -m 1024"]);
    }
    run("pingpong --netdev udp -m 4096 -n 20").failed(1, &[large, "try -m 1024"]);
    // rping's server asks for the text first, so both sides see that nothing large passes.
    let rping = |options: &str| {
        let server = start(1, "rping -s --netdev udp").that_waits();
        let line = format!("rping -c --netdev udp -C 5 -S 4096 {options} -a");
        let client = start(0, &format!("{line} {}", lab.container(1).ipv4())).finish();
        [server.finish(), client]
    };
    for side in rping("") {
        side.failed(1, &[large, "a link between has a smaller MTU", "try -m 1024"]);
    }
    // The advice helps.
    for side in rping("-m 1024") {
        side.succeeded();
    }
    run("pingpong --cm --netdev udp -m 1024 -n 20").succeeded();
    run("perf write-lat --cm --netdev udp -s 4096 -m 1024 -n 20").succeeded();
}

#[test]
fn the_mtu_that_a_router_reports_is_named() {
    require!(need::lab());
    the_mtu_is_named("udp");
}

#[test]
fn the_mtu_that_a_router_reports_is_named_on_packet() {
    require!(need::backend(Backend::Packet));
    the_mtu_is_named("packet");
}

fn the_mtu_is_named(netdev: &str) {
    let shape = Hosts { hosts: 2, containers_each: 1, between: Between::Routed };
    let lab = Lab::of_hosts(&shape, &LabConfig::default()).unwrap();
    lab.between().unwrap().command("ip link set host1 mtu 2500").unwrap();
    let start = |index: usize, line: &str| {
        let mut command = rocinante(words(line));
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        Running::of(lab.container(index).spawn(&mut command).unwrap())
    };
    let run = |line: &str, v6| {
        let server = start(1, line).that_waits();
        let client = start(0, &format!("{line} {}", lab.container(1).address(v6))).finish();
        let _ = server.finish();
        client
    };
    for v6 in [false, true] {
        let text = ["4096 bytes of payload", "has an MTU of 2500", "try -m 2048"];
        let pingpong = format!("pingpong --netdev {netdev} -n 20");
        let perf = format!("perf write-lat --netdev {netdev} -s 4096 -m 4096 -n 20");
        run(&format!("{pingpong} -m 4096"), v6).failed(1, &text);
        run(&perf, v6).failed(1, &text);
        // The advice helps.
        run(&format!("{pingpong} -m 2048"), v6).succeeded();
    }
}
