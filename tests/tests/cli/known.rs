//! Options and output that users of perftest and rdma-core know.

use super::{Addresses, Done, Running, both, run, start, words};
use nix::sys::signal::Signal;
use rocinante_lab::{Container, Lab, LabConfig};
use rocinante_tests::{need, require};
use serde_json::Value;
use std::net::Ipv6Addr;
use std::process::Command;

fn row(done: &Done) -> Value {
    done.json()["results"][0].clone()
}

/// Runs both sides of `perf`, the client with `--json`. The server succeeds.
#[track_caller]
fn perf(server: &str, client: &str) -> Done {
    let (server, client) = both(&format!("perf {server}"), &format!("perf {client} --json"));
    server.succeeded();
    client
}

#[test]
fn names_and_options_of_perftest_work() {
    for (server, client, messages) in [
        ("ib_send_bw", "send_bw -n 200 -s 1K -u 12", 200),
        ("write_bw -I 64", "ib_write_bw -n 200 -s 64 -I 64 --tclass 8", 200),
        ("ib_read_bw", "read_bw -n 50 -s 64K -o 2 --tclass 8", 50),
        ("atomic_lat -e", "ib_atomic_lat -n 50 -e -o 1", 50),
        ("ib_send_lat -e", "ib_send_lat -n 50 -e", 50),
        ("read_bw -e", "read_bw -n 50 -e", 50),
        ("send_bw -e -b", "send_bw -n 50 -e -b", 100),
        ("write_lat --cm", "ib_write_lat -n 50 --cm -I 0", 50),
        ("write_bw -r 2", "write_bw -n 50 -r 4", 50),
    ] {
        let client = perf(server, client).succeeded();
        assert_eq!(row(&client)["messages"], messages, "{}", client.out);
    }
    let json = perf("read_bw", "read_bw -n 10 -o 3 -u 9 --tclass 4").succeeded().json();
    assert_eq!((&json["outs"], &json["tclass"]), (&3.into(), &4.into()), "{json}");
    let (server, client) = both("perf read_bw -u 8", "perf read_bw -n 10 -u 9");
    for done in [server, client] {
        done.failed(1, &["is 9 at the client and 8 at the server"]);
    }
}

#[test]
fn what_has_no_meaning_says_why() {
    for (line, words) in [
        ("perf write_bw -c UD", "UD for send"),
        ("perf write_bw -o 4", "-o is for READs and atomics"),
        ("perf write_lat -e", "write-lat waits for memory"),
        ("perf send_lat -c UD -u 4", "a datagram is not acknowledged"),
        ("perf send_lat -w 1", "-w and -y are for bandwidth"),
        ("perf send_bw -s 64X", "1GiB"),
        ("pingpong -s 2G", "0 to 1073741824"),
        ("perf send_bw -P 10.0.0.1", "cannot be used with"),
    ] {
        run(line).failed(2, &[words]);
    }
}

#[test]
fn unreliable_services_are_measured() {
    for (test, options) in [
        ("write-bw", "-c UC -n 500 -s 5000"),
        ("write-lat", "-c UC -n 50"),
        ("send-lat", "-c UC -n 50 -e"),
        ("send-lat", "-c UD -n 50 -s 1000"),
        ("send-lat", "-c uc -n 50 --cm"),
        ("send-lat", "-c UD -n 50 --cm"),
    ] {
        let cm = if options.contains("--cm") { "--cm" } else { "" };
        let client = perf(&format!("{test} {cm}"), &format!("{test} {options}")).succeeded();
        assert!(row(&client)["messages"].as_u64() >= Some(50), "{}", client.out);
        assert_eq!(client.json()["connection"], if options.contains("UD") { "UD" } else { "UC" });
    }
    let (server, client) = both("perf send-lat", "perf send-lat -c UD -s 8K");
    for done in [server, client] {
        done.failed(1, &["a datagram has 4096 bytes at most"]);
    }
}

/// Each message that one side sent has arrived at the other, or is counted as lost at both.
#[test]
fn lost_messages_are_counted_at_both_sides() {
    for options in ["-c UD -n 3000 -q 2", "-c UC -D 1 -s 4K", "-c UD -D 1 -e"] {
        let (server, client) =
            both("perf send-bw --json -r 64", &format!("perf send-bw --json -r 64 {options}"));
        let (there, here) = (row(&server.succeeded()), row(&client.succeeded()));
        let of = |row: &Value, name: &str| row[name].as_u64().unwrap();
        assert_eq!(there["lost"], here["lost"], "{there} {here}");
        assert_eq!(of(&here, "messages"), of(&there, "messages") + of(&there, "lost"), "{options}");
        assert!(of(&there, "messages") > 0, "{there}");
    }
    for options in ["-c UD -n 2000", "-c UC -D 1"] {
        let (server, client) =
            both("perf send-bw --json -b", &format!("perf send-bw --json -b {options}"));
        let (there, here) = (row(&server.succeeded()), row(&client.succeeded()));
        assert_eq!((&there["messages"], &there["lost"]), (&here["messages"], &here["lost"]));
    }
    let client = perf("send-bw -a", "send-bw -a -c UD -n 20 -m 1024").succeeded();
    assert_eq!(client.json()["results"].as_array().unwrap().len(), 10, "2 to 1024 bytes");
}

#[test]
fn each_interval_has_a_line() {
    for (test, server_too) in [("write-bw", false), ("send-bw", true), ("read-lat", false)] {
        let at_server = if server_too { "-i 0.2 --json" } else { "" };
        let (server, client) =
            both(&format!("perf {test} {at_server}"), &format!("perf {test} -D 2 -i 0.2 --json"));
        let (server, client) = (server.succeeded(), client.succeeded());
        for done in [&client, &server].into_iter().take(1 + usize::from(server_too)) {
            let lines: Vec<Value> =
                done.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
            let (result, intervals) = lines.split_last().unwrap();
            // The server measures from the first message to the last, and that may be late.
            let whole = || result["results"][0]["seconds"].as_f64().unwrap() / 0.2;
            let least = if std::ptr::eq(done, &raw const client) { 10.0 } else { whole() - 1.0 };
            assert!(intervals.len() as f64 >= least, "{}", done.out);
            let mut end = 0.0;
            for (number, line) in (1..).zip(intervals) {
                assert_eq!(line["interval"]["number"], number, "{line}");
                assert_eq!(line["interval"]["begin_seconds"].as_f64(), Some(end), "{line}");
                end = line["interval"]["end_seconds"].as_f64().unwrap();
            }
            let of = |line: &Value| line["messages"].as_u64().unwrap();
            let counted: u64 = intervals.iter().map(|line| of(&line["interval"])).sum();
            let all = of(&result["results"][0]);
            assert!(counted > 0 && counted <= all, "{counted} of {all}: {}", done.out);
        }
        let lines = client.err.lines().filter(|line| line.ends_with(" s") && line.contains('-'));
        assert!(lines.count() >= 3, "{}", client.err);
    }
}

#[test]
fn a_run_without_end_ends_by_a_signal() {
    let addresses = Addresses::new();
    let server = addresses.serve("perf send-bw");
    let line = addresses.client_line("perf send-bw --run_infinitely -i 0.2 --json");
    let mut client = Running::start(&mut super::rocinante(words(&line)));
    let mut intervals = 0;
    client.hears("a second interval, and messages", |line| {
        intervals += usize::from(line.ends_with(" s"));
        intervals >= 2 && line.split_whitespace().nth(1).is_some_and(|messages| messages != "0")
    });
    client.child.signal(Signal::SIGINT);
    let client = client.finish().failed(130, &["stopped by SIGINT"]);
    let last: Value = serde_json::from_str(client.out.lines().last().unwrap()).unwrap();
    assert_eq!(last["error"]["kind"], "signal", "{last}");
    assert!(last["results"][0]["messages"].as_u64() > Some(0), "{last}");
    server.finish().failed(1, &["gave up: stopped by SIGINT"]);
}

#[test]
fn a_result_below_the_limit_has_its_own_exit_status() {
    for (server, client, status) in [
        ("read-bw", "read-bw -n 100 -w 1000000", 3),
        ("read-bw", "read-bw -n 100 -s 8 -y 1e6", 3),
        ("read-bw", "read-bw -n 100 -w 0.000001 -y 1e-9", 0),
    ] {
        let client = perf(server, client);
        assert_eq!(client.status, status, "{}", client.err);
        let json = client.json();
        assert!(json["results"][0]["gbps"].as_f64() > Some(0.0), "{json}");
        let kind = if status == 3 { "limit".into() } else { Value::Null };
        assert_eq!(json["error"]["kind"], kind, "{json}");
    }
}

#[test]
fn a_persistent_server_serves_one_client_after_the_other() {
    for (server, clients) in [
        ("perf write-bw -P -s 64", ["perf write-bw -n 10 -s 64", "perf write-bw -n 10 -s 65"]),
        ("perf send-lat -P --cm -s 64", ["perf send-lat -s 64 --cm", "perf send-lat -s 65 --cm"]),
        ("pingpong -P -s 64", ["pingpong -n 10 -s 64", "pingpong -s 65"]),
        ("pingpong -P --cm -s 64", ["pingpong -n 10 -s 64 --cm", "pingpong -s 65 --cm"]),
    ] {
        let addresses = Addresses::new();
        let mut running = addresses.serve(&format!("{server} --json"));
        let [good, bad] = clients;
        addresses.call(good).succeeded();
        addresses.call(bad).failed(1, &["65 at the client and 64 at the server"]);
        addresses.call(good).succeeded();
        running.says("not served: ");
        // After the second client, and after the third.
        running.says("waiting for the next client");
        running.says("waiting for the next client");
        running.child.signal(Signal::SIGTERM);
        let done = running.finish().failed(143, &["stopped by SIGTERM"]);
        let lines: Vec<Value> =
            done.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        // Each client's, and the signal's.
        assert_eq!(lines.len(), 3, "{}", done.out);
        assert_eq!(lines[2]["error"]["kind"], "signal");
    }
}

#[test]
fn a_server_of_the_connection_manager_is_told_from_one_of_tcp() {
    let addresses = Addresses::new();
    let server = addresses.serve("perf write-bw --cm");
    let client = addresses.call("perf write-bw --patience 1");
    client.failed(1, &["a server with --cm is reached with --cm alone"]);
    drop(server);
}

/// The link-local address of a container's interface.
fn link_local(container: &Container) -> Option<Ipv6Addr> {
    let output = container.output(Command::new("ip").args(["-6", "-o", "addr", "show", "eth0"]));
    let text = String::from_utf8(output.ok()?.stdout).ok()?;
    let mut words = text.split_whitespace().filter_map(|word| word.split('/').next());
    words.find(|word| word.starts_with("fe80:")).and_then(|word| word.parse().ok())
}

#[test]
fn addresses_are_taken_as_users_name_them() {
    require!(need::lab());
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let [there, here] = [lab.container(1), lab.container(0)];
    let v4 = there.ipv4().to_string();
    let mut pairs = vec![
        ("pingpong --bind eth0".to_owned(), format!("pingpong --bind eth0 {v4}")),
        ("pingpong --device eth0".to_owned(), format!("pingpong --device eth0 {v4}")),
        ("perf send-lat --device eth0".to_owned(), format!("perf send-lat --device eth0 {v4}")),
        ("rping -s -a eth0".to_owned(), format!("rping -c -C 2 -I eth0 -a {v4}")),
    ];
    if let Some(v6) = there.ipv6() {
        let [local, own] = [there, here].map(|container| link_local(container).unwrap());
        pairs.extend([
            ("pingpong --bind eth0".to_owned(), format!("pingpong --bind eth0 {v6}")),
            ("perf write-lat".to_owned(), format!("perf write-lat --device eth0 {v6}")),
            ("pingpong".to_owned(), format!("pingpong {local}%eth0")),
            ("pingpong --cm".to_owned(), format!("pingpong --cm {local}%eth0")),
            (
                format!("pingpong --bind {local}%eth0"),
                format!("pingpong --bind {own}%eth0 {local}%eth0"),
            ),
            (
                format!("perf write-bw --bind {local}%eth0"),
                format!("perf write-bw -n 100 {local}%eth0"),
            ),
            (format!("rping -s -a {local}%eth0"), format!("rping -c -C 2 -a {local}%eth0")),
        ]);
        let bare = start(here, &format!("pingpong {local}")).finish();
        bare.failed(1, &[&format!("give {local}%eth0")]);
    }
    for (server, client) in pairs {
        let at_server = start(there, &format!("{server} --netdev udp")).that_says("waiting for");
        start(here, &format!("{client} --netdev udp")).finish().succeeded();
        at_server.finish().succeeded();
    }
    start(here, "pingpong --bind eth7 10.0.0.1").finish().failed(2, &["rocinante devices"]);
}

/// One server for clients by IPv4, by IPv6 and by loopback.
#[test]
fn servers_without_an_address_listen_on_all() {
    require!(need::lab());
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let [there, here] = [lab.container(1), lab.container(0)];
    let (v4, v6) = (there.ipv4().to_string(), there.ipv6().map(|v6| v6.to_string()));
    for (server, client) in [
        ("pingpong --cm -P", "pingpong --cm -n 10 {}"),
        ("perf send-bw --cm -P", "perf send-bw --cm -n 10 -q 2 {}"),
        ("perf send-lat --cm -P", "perf send-lat --cm -n 10 -c UD {}"),
        ("rping -s -P", "rping -c -C 2 -a {} --counters"),
        ("rping -s -P --netdev auto", "rping -c -C 2 -a {} --netdev auto"),
        ("rping -s", "rping -c -C 2 -a {}"),
    ] {
        let persistent = server.contains("-P");
        let serve = || start(there, &with_udp(server)).that_says("waiting for");
        let mut running = serve();
        for (from, address) in
            [(here, Some(&v4)), (here, v6.as_ref()), (there, Some(&"localhost".to_owned()))]
        {
            let Some(address) = address else { continue };
            let line = client.replace("{}", address);
            let done = start(from, &with_udp(&line)).finish().succeeded();
            let counted = done.err.contains("transport.sent_pkts");
            assert_eq!(counted, line.contains("--counters"), "{}", done.err);
            if !persistent {
                running.finish().succeeded();
                running = serve();
            }
        }
        running.child.signal(Signal::SIGTERM);
        let _ = running.finish();
    }
}

/// Of the devices that such a server opens, counters are of the one that the client came to.
#[test]
fn a_server_on_all_addresses_counts_where_its_client_is() {
    require!(need::lab());
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let container = lab.container(0);
    let mut server = start(container, "rping -s -P --netdev udp --counters").that_waits();
    // By loopback, which is opened first.
    start(container, "rping -c -C 2 -a localhost --netdev udp").finish().succeeded();
    server.child.signal(Signal::SIGTERM);
    server.finish().failed(143, &["transport.sent_pkts"]);
}

/// The line with the backend `udp`, unless it has another.
fn with_udp(line: &str) -> String {
    if line.contains("--netdev") { line.to_owned() } else { format!("{line} --netdev udp") }
}

/// Two terminals on one machine, and not one option.
#[test]
fn loopback_needs_no_addresses() {
    require!(need::lab());
    let lab = Lab::new(&LabConfig::default()).unwrap();
    let container = lab.container(0);
    let mut server = start(container, "pingpong -P").that_waits();
    let line = "pingpong -n 2000 localhost";
    let clients = [line, line].map(|line| start(container, line));
    clients.into_iter().for_each(|client| drop(client.finish().succeeded()));
    server.child.signal(Signal::SIGTERM);
    let _ = server.finish();
}

#[test]
fn a_name_may_become_known() {
    let client = run("pingpong --patience 2 no.such.host.invalid");
    client.failed(1, &["trying for up to 2 s", "is the name right"]);
}
