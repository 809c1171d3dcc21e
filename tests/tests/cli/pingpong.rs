//! `rocinante pingpong` over loopback.

use super::{Addresses, Running, both, rocinante, words};
use rocinante::device::NETDEV_VARIABLE;

#[test]
fn lines_are_those_of_ibv_rc_pingpong() {
    let (server, client) = both("pingpong", "pingpong");
    for done in [server, client] {
        let done = done.succeeded();
        let lines: Vec<&str> = done.out.lines().collect();
        let [local, remote, bytes, iters] = lines[..] else { panic!("{}", done.out) };
        assert!(local.starts_with("  local address:  LID 0x0000, QPN 0x"), "{local}");
        assert!(remote.starts_with("  remote address: LID 0x0000, QPN 0x"), "{remote}");
        assert!(local.contains(", PSN 0x") && local.contains(", GID ::ffff:127."), "{local}");
        assert!(bytes.starts_with("8192000 bytes in ") && bytes.ends_with(" Mbit/sec"), "{bytes}");
        assert!(iters.starts_with("1000 iters in ") && iters.ends_with(" usec/iter"), "{iters}");
    }
}

#[test]
fn json_is_one_line_and_the_only_one() {
    let (server, client) = both("pingpong --json", "pingpong --json -n 20 -s 100 -m 512 -c");
    let (server, client) = (server.succeeded(), client.succeeded());
    assert!(client.err.contains("local address"), "{}", client.err);
    for done in [&server, &client] {
        assert_eq!(done.out.lines().count(), 1, "{}", done.out);
        let json = done.json();
        assert_eq!(json["iters"], 20);
        assert_eq!(
            (&json["bytes"], &json["mtu"], &json["size"]),
            (&4000.into(), &512.into(), &100.into())
        );
        assert_eq!((&json["netdev"], &json["validated"]), (&"udp".into(), &true.into()));
        assert!(json["us_per_iter"].as_f64().unwrap() > 0.0);
    }
    assert_eq!(server.json()["local"], client.json()["remote"]);
    assert_eq!(server.json()["remote"], client.json()["local"]);
}

#[test]
fn every_size_arrives_whole_polled_and_by_events() {
    for (server, client) in [
        ("pingpong", "pingpong -c -n 20 -s 0"),
        ("pingpong", "pingpong -c -n 20 -s 1"),
        ("pingpong -e", "pingpong -c -n 200 -s 1025 -e"),
        ("pingpong", "pingpong -c -n 5 -s 3000003 -m 4096 -r 2"),
        ("pingpong -e -r 1", "pingpong -c -n 50 -r 1"),
    ] {
        let (server, client) = both(server, client);
        server.succeeded();
        client.succeeded();
    }
}

#[test]
fn the_command_line_goes_before_the_variable() {
    let addresses = Addresses::new();
    let start =
        |line: &str| Running::start(rocinante(words(line)).env(NETDEV_VARIABLE, "carrier-pigeon"));
    let server = format!("pingpong --bind {}", addresses.server);
    start(&server).finish().failed(1, &[NETDEV_VARIABLE, "carrier-pigeon", "auto"]);
    let server = start(&format!("{server} --netdev auto")).that_waits();
    let Addresses { server: host, client } = addresses;
    let client = start(&format!("pingpong -n 10 --json --netdev auto --bind {client} {host}"));
    let client = client.finish().succeeded();
    assert!(client.err.contains("loopback"), "{}", client.err);
    assert_eq!(client.json()["netdev"], "udp");
    server.finish().succeeded();
}

#[test]
fn counters_are_printed_on_request() {
    let (server, client) = both("pingpong", "pingpong -n 30 --counters --json");
    server.succeeded();
    let client = client.succeeded();
    assert!(client.err.contains("transport.sent_pkts"), "{}", client.err);
    let counters = &client.json()["counters"];
    // 30 messages of four packets.
    assert!(counters["transport"]["sent_pkts"].as_u64().unwrap() >= 120, "{counters}");
    assert_eq!(counters["drops"]["icrc"], 0);
    assert!(counters["port"]["rx_datagrams"].as_u64().unwrap() >= 120);
}
