//! The options of the two sides must agree.

use super::{Addresses, both, run};
use std::io::{Read, Write};
use std::net::TcpStream;

#[test]
fn an_option_that_differs_is_named_on_both_sides() {
    let (server, client) = both("pingpong -s 64 -n 7", "pingpong -s 128 --json");
    let words = [
        "--size is 128 at the client and 64 at the server",
        "--iters is 1000 at the client and 7 at the server",
    ];
    server.failed(1, &words);
    let client = client.failed(1, &words);
    assert!(
        client.json()["error"]["message"].as_str().unwrap().contains("--size"),
        "{}",
        client.out
    );
}

#[test]
fn options_of_perf_that_differ_are_named() {
    let (server, client) = both("perf send-bw -t 64 -q 2", "perf send-bw -t 32 -q 2");
    let words = ["--tx-depth is 32 at the client and 64 at the server"];
    let server = server.failed(1, &words);
    assert!(!server.err.contains("--qps"), "{}", server.err);
    client.failed(1, &words);
    let (server, client) = both("perf send-lat -n 5", "perf send-lat -D 1");
    server.failed(1, &["--iters is not given at the client and 5 at the server"]);
    client.failed(1, &["--iters is not given at the client and 5 at the server"]);
}

#[test]
fn another_command_is_named_on_both_sides() {
    for (server, client) in [("pingpong", "perf write-bw"), ("perf read-lat", "perf read-bw")] {
        let words = [format!("`rocinante {server}`"), format!("`rocinante {client}`")];
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let (server, client) = both(server, client);
        server.failed(1, &words);
        client.failed(1, &words);
    }
}

#[test]
fn other_programs_are_sent_away_and_the_client_is_served() {
    let addresses = Addresses::new();
    let mut server = addresses.serve("pingpong");
    for line in ["GET / HTTP/1.1\r\n\r\n", "{\"rocinante\":1}\n", "\u{1b}[2J\n", "\n"] {
        let mut other = TcpStream::connect((addresses.server, 18515)).unwrap();
        other.write_all(line.as_bytes()).unwrap();
        let mut answer = String::new();
        other.read_to_string(&mut answer).unwrap();
        assert!(answer.contains("this is a rocinante server"), "{answer}");
        server.says("is no client of rocinante");
    }
    drop(TcpStream::connect((addresses.server, 18515)).unwrap());
    addresses.call("pingpong -n 10").succeeded();
    server.finish().succeeded();
}

#[test]
fn a_command_line_without_sense_is_a_usage_error() {
    for (line, word) in [
        ("pingpong -m 1000", "256, 512, 1024, 2048 or 4096"),
        ("pingpong -n 0", "--iters"),
        ("pingpong --netdev carrier-pigeon", "choose afxdp, packet or udp"),
        ("pingpong --netdev sim", "choose auto, afxdp, packet or udp"),
        ("pingpong --bind eth77", "neither an IP address nor an interface"),
        ("perf", "<TEST>"),
        ("perf write-speed", "write-bw"),
        ("perf write-bw -s 0", "--size"),
        ("perf write-bw -n 5 -D 5", "cannot be used with"),
        ("perf write-bw -a -s 64", "cannot be used with"),
        ("perf write-lat -q 4", "-q is for bandwidth"),
        ("perf write-lat -t 4", "-t is for bandwidth"),
        ("perf atomic-lat -s 4", "an atomic has 8 bytes"),
        ("perf read-lat -A fetch-add", "-A is for atomic-bw and atomic-lat"),
    ] {
        run(line).failed(2, &[word]);
    }
}
