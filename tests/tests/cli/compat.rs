//! The exchanges of other programs, with our program on both sides, and with peers that violate
//! them.

use super::{Addresses, Done, both, run};
use serde_json::Value;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::{Duration, Instant};

#[test]
fn pingpong_as_ibv_rc_pingpong() {
    for options in ["-c -n 30", "-c -n 20 -s 0", "-c -e -n 50 -s 100001 -m 512", "-n 40 -s 7 -r 1"]
    {
        let line = format!("pingpong --compat ibv {options}");
        let (server, client) = both(&line, &line);
        let (server, client) = (server.succeeded(), client.succeeded());
        let lines: Vec<&str> = client.out.lines().collect();
        let [local, remote, bytes, iters] = lines[..] else { panic!("{}", client.out) };
        assert!(local.starts_with("  local address:  LID 0x0000, QPN 0x"), "{local}");
        assert!(remote.starts_with("  remote address: LID 0x0000, QPN 0x"), "{remote}");
        assert!(bytes.ends_with(" Mbit/sec") && iters.ends_with(" usec/iter"), "{}", client.out);
        let turned =
            server.out.lines().next().unwrap().replace("local address: ", "remote address:");
        assert_eq!(turned, remote);
    }
}

#[test]
fn pingpong_as_ibv_uc_pingpong_and_ibv_ud_pingpong() {
    // Nothing between the two loses packets.
    for options in [
        "ibv-uc -c -n 30",
        "ibv-uc -c -e -n 20 -s 9001 -m 512",
        "ibv-uc -n 20 -s 0",
        "ibv-ud -c -n 30",
        "ibv-ud -c -e -n 20 -s 1000",
        "ibv-ud -n 20 -s 0 -r 1",
    ] {
        let line = format!("pingpong --compat {options}");
        let (server, client) = both(&line, &line);
        server.succeeded();
        client.succeeded();
    }
    let line = "pingpong --compat ibv-ud -s 5000";
    let (server, client) = both(line, line);
    client.failed(2, &["-s 5000", "4096 bytes"]);
    drop(server);
}

#[test]
fn pingpong_as_ibv_srq_pingpong() {
    let line = "pingpong --compat ibv-srq -c -n 100 -s 3000 -q 5 --json";
    let (server, client) = both(line, line);
    for done in [server.succeeded(), client.succeeded()] {
        let json = done.json();
        assert_eq!((&json["qps"], &json["validated"]), (&5.into(), &true.into()), "{json}");
    }
    let (server, client) = both("pingpong --compat ibv-srq -q 3", "pingpong --compat ibv-srq -q 2");
    server.failed(1, &["queue pair 3", "-q", "telling addresses"]);
    client.failed(1, &["telling addresses", "closed the connection"]);
}

#[test]
fn the_report_says_what_was_done() {
    let line = "perf read-bw --compat perftest -s 64 --json";
    let (server, client) = both(line, line);
    let (server, client) = (server.succeeded().json(), client.succeeded().json());
    assert_eq!(client["results"][0]["messages"], 1000, "{client}");
    for json in [server, client] {
        let plan = [&json["iters"], &json["cq_mod"], &json["tx_depth"], &json["limited"]];
        assert_eq!(plan, [&1000.into(), &32.into(), &128.into(), &Value::from(false)], "{json}");
    }
}

#[test]
fn options_of_no_meaning_say_why() {
    for (options, word) in [
        ("--compat ibv -o", "memory is always present"),
        ("--compat ibv -l 3", "VLAN"),
        ("--compat ibv -q 2", "ibv-srq"),
        ("--compat ibv-ud -q 2", "ibv_ud_pingpong has one"),
        ("--compat ibv-srq -q 256", "255"),
        ("--compat ibv-srq -r 8 -q 9", "-r 8"),
        ("-q 1", "--compat ibv-srq"),
    ] {
        run(&format!("pingpong {options}")).failed(2, &[word]);
    }
}

/// A server meets a client that sends these words only, and then closes the connection unless it
/// stays. Returns the server's result, and how long it took.
fn meets(command: &str, words: &[u8], stays: bool) -> (Done, Duration) {
    let addresses = Addresses::new();
    let server = addresses.serve(command);
    let mut peer = TcpStream::connect((addresses.server, 18515)).unwrap();
    let start = Instant::now();
    // A server closes once it has read enough.
    let _ = peer.write_all(words);
    if !stays {
        peer.shutdown(Shutdown::Write).unwrap();
    }
    let done = server.finish();
    (done, start.elapsed())
}

#[test]
fn clients_that_talk_nonsense_are_named() {
    let http = b"GET / HTTP/1.1\r\nHost: example.org\r\nUser-Agent: none\r\n\r\n";
    let (done, time) = meets("pingpong --compat ibv", http, true);
    done.failed(1, &["peer 127.0.0.1:", "telling addresses", "GET / HTTP"]);
    assert!(time < Duration::from_secs(10), "{time:?}");
    let (done, _) = meets("pingpong --compat ibv", &http[..9], false);
    done.failed(1, &["telling addresses", "after 9 bytes of a message of 52"]);
    let (done, _) = meets("pingpong --compat ibv", &[], false);
    done.failed(1, &["telling addresses", "closed the connection"]);
}

#[test]
fn a_server_that_vanishes_is_named() {
    let addresses = Addresses::new();
    let listener = TcpListener::bind((addresses.server, 18515)).unwrap();
    let there = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut message = [0; 52];
        stream.read_exact(&mut message).unwrap();
        // Its own address with another queue pair: nothing answers there.
        stream.write_all(b"0000:abcdef:123456:00000000000000000000ffff7ffffffe\0").unwrap();
        let mut done = [0; 5];
        stream.read_exact(&mut done).unwrap();
        (message, done)
    });
    let start = Instant::now();
    let done = addresses.call("pingpong --compat ibv -n 3");
    done.failed(1, &["first message", "127.255.255.254", "RETRY_EXC_ERR"]);
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    let (message, done) = there.join().unwrap();
    assert_eq!(&done, b"done\0");
    assert!(message.starts_with(b"0000:") && message.ends_with(b"\0"));
}

#[test]
fn perf_as_perftest() {
    for (options, rows) in [
        ("write-bw -n 100 -s 4000", 1),
        ("write-bw -n 60 -s 100 -b -q 3 -l 5", 1),
        ("write-lat -n 50 -s 8", 1),
        ("send-bw -n 200 -s 5000 -q 2 -m 512", 1),
        ("send-bw -n 60 -s 300 -b -r 7 -e", 1),
        ("send-lat -n 50", 1),
        ("read-bw -n 50 -o 3 -q 2 -b", 1),
        ("read-lat -n 50 -e", 1),
        ("atomic-bw -n 100 -q 2", 1),
        ("atomic-bw -n 100 -b -A CMP_AND_SWAP", 1),
        ("atomic-lat -n 20", 1),
        ("write-bw -n 5 -a -b", 23),
        ("send-bw -n 5 -a", 23),
        ("write-lat -n 5 -a", 23),
        ("send-bw -D 2 -f 0 -s 64", 1),
        ("write-lat -D 2", 1),
    ] {
        measures(options, rows);
    }
}

/// Both sides as perftest's programs. One of them spends the time with latencies in which it takes
/// no part.
#[track_caller]
pub(super) fn measures(options: &str, rows: usize) -> Value {
    let line = format!("perf --compat perftest --json {options}");
    let (server, client) = both(&line, &line);
    // The reason may be at either side.
    let statuses = (server.status, client.status);
    assert_eq!(statuses, (0, 0), "{options}: {}{}", server.err, client.err);
    let json = client.json();
    assert_eq!(json["perftest"], "6.06", "{json}");
    let results = json["results"].as_array().unwrap();
    assert_eq!(results.len(), rows, "{options}: {json}");
    assert!(client.err.contains("#bytes") && client.err.contains("#iterations"), "{}", client.err);
    for row in results {
        let measured = row["gbps"].as_f64().or(row["us_p50"].as_f64()).unwrap();
        assert!(measured > 0.0, "{options}: {row}");
    }
    let passive = ["read-lat", "atomic-lat"].iter().any(|test| options.starts_with(test));
    assert!(passive || server.err.matches("\n ").count() > rows, "{}", server.err);
    json
}

/// Five receives are too few for runs of dozens of messages. Each side counts the lost ones, and
/// both succeed.
#[test]
fn what_is_lost_on_the_way_is_counted() {
    for (options, sizes, both_ways) in [
        ("-c UD -s 64 -n 2000", 1, false),
        ("-c UC -s 64 -n 2000 -q 2", 1, false),
        ("-c UD -n 300 -a", 8, false),
        ("-c UC -s 64 -n 500 -b", 1, true),
    ] {
        let line = format!("perf send-bw --compat perftest --json -r 5 {options}");
        let (server, client) = both(&line, &line);
        let (server, client) = (server.succeeded(), client.succeeded());
        let rows = server.json()["results"].as_array().unwrap().clone();
        assert!(rows.len() >= sizes, "{options}: {rows:?}");
        assert_eq!(client.json()["results"].as_array().unwrap().len(), rows.len());
        let words = options.split_whitespace();
        let count = words.clone().skip_while(|word| *word != "-n").nth(1).unwrap();
        let qps = if words.clone().any(|word| word == "-q") { 2 } else { 1 };
        let all = count.parse::<u64>().unwrap() * qps;
        for row in &rows {
            let (messages, lost) = (row["messages"].as_u64().unwrap(), row["lost"].as_u64());
            let lost = lost.unwrap_or_else(|| panic!("{options}: {row}"));
            assert!(lost > 0 && lost < all, "{options}: {row}");
            // In both directions, a row counts the messages sent.
            assert!(both_ways || messages + lost == all, "{options}: {row}");
        }
        assert!(server.err.contains(" messages were lost on their way here"), "{}", server.err);
    }
}

#[test]
fn tables_are_perftests() {
    let line = "perf write-bw --compat perftest -n 20 -s 1000";
    let (server, client) = both(line, line);
    for done in [server.succeeded(), client.succeeded()] {
        let lines: Vec<&str> = done.out.lines().collect();
        let head = lines.iter().position(|line| line.contains("#bytes")).unwrap();
        let columns =
            " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]";
        assert_eq!(lines[head], columns);
        let row: Vec<&str> = lines[head + 1].split_whitespace().collect();
        assert_eq!((row.len(), &row[..2]), (5, &["1000", "20"][..]), "{}", done.out);
        assert!(row[3].parse::<f64>().unwrap() > 0.0);
        assert!(lines[head + 2].starts_with("----"), "{}", done.out);
    }
}

/// The two sides print in the unit that each was given, and mean the same.
#[test]
fn the_server_prints_in_its_own_unit() {
    let line = "perf write-bw --compat perftest -n 2000 -s 20000";
    let figure = |done: Done, unit: &str| -> f64 {
        let done = done.succeeded();
        let mut lines = done.out.lines().skip_while(|line| !line.contains("#bytes"));
        assert!(lines.next().unwrap().contains(&format!("BW average[{unit}/sec]")), "{}", done.out);
        lines.next().unwrap().split_whitespace().nth(3).unwrap().parse().unwrap()
    };
    let gbits = format!("{line} --report_gbits");
    for ([server, client], [there, here], factor) in [
        ([line, gbits.as_str()], ["MB", "Gb"], 1e9 / 8.0 / 1_048_576.0),
        ([gbits.as_str(), line], ["Gb", "MB"], 1_048_576.0 * 8.0 / 1e9),
    ] {
        let (server, client) = both(server, client);
        let (server, client) = (figure(server, there), figure(client, here));
        assert!(
            (server / (client * factor) - 1.0).abs() < 0.05,
            "{server} {there}, {client} {here}"
        );
    }
}

#[test]
fn perftest_servers_name_clients_that_talk_nonsense() {
    let version = b"6.06\0\0\0\0\0\0\0\0\0\0\0\0";
    let agreed = [&version[..], &[0, 0, 16, 0, 0, 0, 0, 64], b"3\0"].concat();
    let server = "perf write-bw --compat perftest";
    let (done, time) = meets(server, b"GET / HTTP/1.1\r\n", true);
    done.failed(1, &["peer 127.0.0.1:", "telling versions", "GET / HTTP"]);
    assert!(time < Duration::from_secs(10), "{time:?}");
    let (done, _) = meets(server, &[version, &[0xff; 4][..]].concat(), true);
    done.failed(1, &["agreeing on memory", "as no machine has"]);
    let (done, _) = meets(server, &agreed, false);
    done.failed(1, &["telling addresses", "closed the connection"]);
    let (done, _) = meets(server, &[&agreed, &[b'x'; 108][..]].concat(), true);
    done.failed(1, &["telling addresses", "is no address", "-q"]);
    // A client that closes once everything is agreed.
    let keys = b"0000:0010:abcdef:123456:00000001:0000000000001000:00:00:00:00:00:00:00:00:00:00:ff:ff:7f:ff:ff:fe:00000000:\0";
    let (done, _) = meets(server, &[&agreed[..], keys, keys, keys].concat(), false);
    done.failed(1, &["measuring", "closed the connection"]);
    let (done, _) = meets(
        "perf write-lat --compat perftest",
        &[&agreed[..], keys, keys, keys, keys].concat(),
        false,
    );
    done.failed(1, &["measuring"]);
    let unequal = [&agreed[..], keys, keys, keys, keys, &[0xee; 40]].concat();
    let (done, _) = meets(server, &unequal, true);
    done.failed(1, &["telling results", "its result is out of range", "-q"]);
}
