//! A client that is started before its server.

use super::{Running, rocinante, words};
use rocinante_tests::unique;
use std::time::{Duration, Instant};

/// Longer than the connection manager repeats one request (6.5 s), three times.
const LATE: Duration = Duration::from_secs(20);

#[test]
fn a_client_waits_for_a_server_that_comes_late() {
    let commands: Vec<(String, String)> = [
        ("pingpong --bind {s}", "pingpong -n 10 --bind {c} {s}"),
        ("pingpong --cm --bind {s}", "pingpong --cm -n 10 --bind {c} {s}"),
        ("perf read-lat --cm --bind {s}", "perf read-lat --cm -n 10 --bind {c} {s}"),
        ("rping -s -a {s}", "rping -c -C 3 -a {s} -I {c}"),
    ]
    .into_iter()
    .map(|(server, client)| {
        let [s, c] = [(); 2].map(|()| unique::loopback().to_string());
        let fill =
            |line: &str| format!("{line} --netdev udp").replace("{s}", &s).replace("{c}", &c);
        (fill(server), format!("{} --patience 45", fill(client)))
    })
    .collect();
    let start = |line: &String| Running::start(&mut rocinante(words(line)));
    let clients: Vec<Running> = commands.iter().map(|(_, client)| start(client)).collect();
    std::thread::sleep(LATE);
    let servers: Vec<Running> = commands.iter().map(|(server, _)| start(server)).collect();
    for running in clients.into_iter().chain(servers) {
        running.finish().succeeded();
    }
}

/// The time that is given is the time that is waited.
#[test]
fn patience_is_what_it_says() {
    let [server, client] = [(); 2].map(|()| unique::loopback());
    for (line, seconds) in [
        (format!("rping -c -a {server} -I {client}"), 8),
        (format!("pingpong --bind {client} {server}"), 2),
    ] {
        let line = format!("{line} --netdev udp --patience {seconds}");
        let given = f64::from(seconds);
        let is_in_time = |_| {
            let begin = Instant::now();
            Running::start(&mut rocinante(words(&line))).finish().failed(1, &["cannot connect"]);
            let took = begin.elapsed().as_secs_f64();
            assert!(took >= given - 0.5, "{line}: {took}");
            took < given + 5.0
        };
        // On a busy machine not each time.
        assert!((0..5).any(is_in_time), "{line}: longer than {given} s");
    }
}
