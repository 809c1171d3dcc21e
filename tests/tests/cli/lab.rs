//! The commands between two containers, with each backend, and with the host's rules on the way.

use super::{Done, start};
use rocinante::device::Backend;
use rocinante_lab::{Lab, LabConfig, Match};
use rocinante_tests::{need, on_each_backend, require};

/// Server in the second container, client in the first; no addresses are given.
fn between(lab: &Lab, server: &str, client: &str) -> (Done, Done) {
    let server = start(lab.container(1), server).that_waits();
    let client = start(lab.container(0), &format!("{client} {}", lab.container(1).ipv4()));
    let client = client.finish();
    (server.finish(), client)
}

#[test]
fn addresses_are_found_by_the_routes() {
    require!(need::lab());
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let (server, client) = between(&lab, "pingpong", "pingpong -c -n 100 --json");
    let server = server.succeeded();
    let client = client.succeeded().json();
    let [a, b] = [0, 1].map(|i| lab.container(i).ipv4().to_string());
    assert_eq!(
        (&client["local"]["address"], &client["remote"]["address"]),
        (&a.into(), &b.as_str().into())
    );
    assert!(server.err.contains(&format!("device eth0 at {b}")), "{}", server.err);
}

#[test]
fn ipv6_works_as_well() {
    require!(need::lab());
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let Some(address) = lab.container(1).ipv6() else {
        rocinante_tests::skip!("no IPv6 here");
    };
    let managed = "perf send-lat --netdev udp -n 20 --cm";
    for line in ["perf write-bw --netdev udp -n 100", managed, &format!("{managed} -c UD")] {
        let server = start(lab.container(1), line).that_waits();
        start(lab.container(0), &format!("{line} {address}")).finish().succeeded();
        server.finish().succeeded();
    }
}

fn every_test_over(backend: Backend) {
    let lab = Lab::new(&LabConfig { mtu: 9000, ..LabConfig::default() }).unwrap();
    for test in
        ["send-lat", "write-lat", "read-lat", "atomic-lat", "send-bw", "write-bw", "read-bw"]
    {
        let command = format!("perf {test} --netdev {backend}");
        let (server, client) = between(&lab, &command, &format!("{command} -n 200 --json"));
        server.succeeded();
        let json = client.succeeded().json();
        assert_eq!(
            (&json["netdev"], &json["results"][0]["messages"]),
            (&backend.name().into(), &200.into())
        );
    }
}

#[test]
fn a_host_that_is_not_there_is_named() {
    require!(need::lab());
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let [a, b, c, _] = lab.container(0).ipv4().octets();
    let nobody = format!("{a}.{b}.{c}.77");
    let client = start(lab.container(0), &format!("pingpong --patience 3 {nobody}")).finish();
    client.failed(1, &[&format!("cannot connect to {nobody}:18515"), "address"]);
    let elsewhere = start(lab.container(0), "pingpong 198.51.100.1").finish();
    elsewhere.failed(1, &["no route to 198.51.100.1", "ip route get"]);
}

#[test]
fn a_rule_of_the_own_namespace_is_named() {
    require!(need::nft());
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let rules = "add table inet t; add chain inet t out { type filter hook output priority 0; }; add rule inet t out udp \
                 dport 4791 drop";
    lab.container(0).nft(rules).unwrap();
    let (server, client) = between(&lab, "pingpong --netdev udp", "pingpong --netdev udp");
    let words =
        ["the kernel refused to send", "a rule of this network namespace", "nft list ruleset"];
    client.failed(1, &words);
    server.failed(1, &words);
}

on_each_backend!(every_test_over);

#[test]
fn the_hosts_firewall_is_named_and_harms_nobody_once_removed() {
    require!(need::nft());
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let rule = lab.block(&Match::roce()).unwrap();
    let (server, client) = between(&lab, "pingpong --netdev udp", "pingpong --netdev udp");
    let no_reply = format!(
        "no reply on UDP/4791 from {}: check the firewall between",
        lab.container(1).ipv4()
    );
    client.failed(1, &[&no_reply]);
    server.failed(1, &["it gave up", &no_reply]);
    rule.remove().unwrap();
    let (server, client) = between(&lab, "pingpong --netdev udp", "pingpong --netdev udp");
    server.succeeded();
    client.succeeded();
}

#[test]
fn a_path_mtu_that_does_not_fit_is_named() {
    require!(need::lab());
    let lab = Lab::new(&LabConfig { mtu: 1500, ..LabConfig::default() }).unwrap();
    let (server, client) = between(&lab, "pingpong --netdev udp", "pingpong --netdev udp -m 4096");
    let words = ["path MTU 4096 does not fit eth0, whose link MTU is 1500", "-m 1024"];
    client.failed(1, &words);
    server.failed(1, &words);
}

/// The socket that keeps the port drops packets that `packet` has read, and the kernel counts
/// errors: the counters explain them.
#[test]
fn what_packet_reads_twice_is_explained() {
    require!(need::backend(Backend::Packet));
    for (backend, guards) in [("packet", true), ("udp", false)] {
        let lab = Lab::new(&LabConfig::default()).unwrap();
        let _server = start(
            lab.container(1),
            &format!("rping -s -P --netdev {backend} -a {}", lab.container(1).ipv4()),
        )
        .that_waits();
        let client = format!("rping -c -C 20 --netdev {backend} -a {}", lab.container(1).ipv4());
        start(lab.container(0), &client).finish().succeeded();
        let counters = start(lab.container(1), "devices eth0 --counters --json").finish();
        let counters = counters.succeeded();
        let json = &counters.json()["counters"];
        // Sockets of slots that no process has are there, too.
        let sockets = json["roce_sockets"].as_array().unwrap();
        let has_process =
            |socket: &&serde_json::Value| socket["processes"] != serde_json::json!([]);
        let socket = sockets.iter().find(has_process).unwrap();
        assert_eq!(socket["guards"], guards, "{json}");
        assert_eq!(counters.err.contains("and nothing is lost"), guards, "{}", counters.err);
        // The kernel's errors are the guard's drops, all of them.
        assert_eq!(socket["drops"].as_u64() > Some(0), guards, "{json}");
        assert_eq!(socket["drops"], json["udp"]["InErrors"], "{json}");
    }
}
