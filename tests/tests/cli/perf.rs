//! `rocinante perf` over loopback.

use super::{both, run};
use serde_json::Value;

const LATENCIES: [&str; 4] = ["send-lat", "write-lat", "read-lat", "atomic-lat"];
const BANDWIDTHS: [&str; 3] = ["send-bw", "write-bw", "read-bw"];

fn rows(json: &Value) -> &[Value] {
    json["results"].as_array().map_or(&[], Vec::as_slice)
}

#[test]
fn every_latency_has_its_percentiles() {
    for test in LATENCIES {
        let (server, client) = both(&format!("perf {test}"), &format!("perf {test} -n 50 --json"));
        let server = server.succeeded();
        assert!(server.out.contains(&format!("{test} ")), "{}", server.out);
        let client = client.succeeded();
        let json = client.json();
        assert_eq!((&json["test"], &json["role"]), (&test.into(), &"client".into()));
        let [row] = rows(&json) else { panic!("{json}") };
        assert_eq!(row["messages"], 50);
        assert_eq!(row["bytes"], if test == "atomic-lat" { 8 } else { 2 });
        let columns = ["us_min", "us_p50", "us_p90", "us_p99", "us_p99_9", "us_max"];
        let times = columns.map(|column| row[column].as_f64().unwrap());
        assert!(times[0] > 0.0 && times.is_sorted(), "{row}");
        let table = client.err.lines().filter(|line| line.contains("p99.9[usec]")).count();
        assert_eq!(table, 1, "{}", client.err);
    }
}

#[test]
fn every_bandwidth_counts_all_messages() {
    for test in BANDWIDTHS {
        let (server, client) = both(
            &format!("perf {test} --json"),
            &format!("perf {test} -n 300 -s 5000 -q 3 --json"),
        );
        let (server, client) = (server.succeeded().json(), client.succeeded().json());
        let [row] = rows(&client) else { panic!("{client}") };
        assert_eq!((&row["messages"], &row["bytes"]), (&900.into(), &5000.into()));
        let (gbps, peak) = (row["gbps"].as_f64().unwrap(), row["gbps_peak"].as_f64().unwrap());
        let by_rate = row["mpps"].as_f64().unwrap() * 5000.0 * 8.0 / 1e3;
        assert!(gbps > 0.0 && peak >= gbps && (gbps / by_rate - 1.0).abs() < 1e-6, "{row}");
        // All messages sent were received.
        let received = rows(&server).iter().map(|row| row["messages"].as_u64().unwrap());
        let received: Vec<u64> = received.collect();
        assert_eq!(received, if test == "send-bw" { vec![900] } else { vec![] });
        assert_eq!(client["qps"], 3);
    }
}

#[test]
fn a_device_of_several_shards_serves_all_queue_pairs() {
    let (server, client) = both(
        "perf write-bw --shards 3 --json",
        "perf write-bw --shards 2 -n 300 -s 5000 -q 5 --json",
    );
    let (server, client) = (server.succeeded(), client.succeeded());
    assert!(server.err.contains(", 3 shards, "), "{}", server.err);
    assert!(client.err.contains(", 2 shards, "), "{}", client.err);
    let json = client.json();
    let [row] = rows(&json) else { panic!("{json}") };
    assert_eq!(row["messages"], 1500);
    let refused = run("perf write-bw --bind 127.0.0.1 --shards 0");
    assert_eq!(refused.status, 1);
    assert!(refused.err.contains("a device has 1 to 64 shards, not 0"), "{}", refused.err);
}

#[test]
fn both_directions_are_added() {
    for (test, size) in [("send-bw", 5000), ("write-bw", 5000), ("read-bw", 5000), ("atomic-bw", 8)]
    {
        let options = format!("-n 300 -s {size} -q 2 -b --json");
        let (server, client) =
            both(&format!("perf {test} --json"), &format!("perf {test} {options}"));
        let (server, client) = (server.succeeded(), client.succeeded());
        assert!(client.err.contains(&format!("bidirectional {test}")), "{}", client.err);
        let (server, client) = (server.json(), client.json());
        let ([here], [there]) = (rows(&client), rows(&server)) else { panic!("{client} {server}") };
        assert_eq!((&here["messages"], &here["bytes"]), (&1200.into(), &size.into()));
        for column in ["messages", "gbps", "mpps", "gbps_peak"] {
            let [a, b] = [here, there].map(|row| row[column].as_f64().unwrap());
            assert!(a > 0.0 && (a / b - 1.0).abs() < 1e-9, "{column}: {client} {server}");
        }
    }
    let (server, client) = both("perf send-bw", "perf send-bw -D 1 -s 64 -b");
    server.succeeded();
    client.succeeded();
}

#[test]
fn every_option_of_a_bandwidth_works() {
    let options = "-n 100 -s 64 -t 8 -l 4 -Q 4 -m 256 --counters";
    let (server, client) =
        both("perf send-bw -r 16 --counters", &format!("perf send-bw -r 16 {options}"));
    let server = server.succeeded();
    assert!(server.err.contains("transport.rcvd_pkts"), "{}", server.err);
    let client = client.succeeded();
    let row = client.out.lines().last().unwrap();
    let columns: Vec<&str> = row.split_whitespace().collect();
    assert_eq!((columns[0], columns[1], columns.len()), ("64", "100", 5), "{row}");
}

#[test]
fn all_sizes_are_measured_in_turn() {
    for test in ["write-bw", "send-lat"] {
        let (server, client) =
            both(&format!("perf {test} -a"), &format!("perf {test} -a -n 2 --json"));
        server.succeeded();
        let json = client.succeeded().json();
        let sizes: Vec<u64> =
            rows(&json).iter().map(|row| row["bytes"].as_u64().unwrap()).collect();
        assert_eq!(sizes, (1..=23).map(|shift| 1 << shift).collect::<Vec<u64>>(), "{test}");
    }
}

#[test]
fn a_time_ends_a_measurement() {
    for test in ["send-bw", "read-bw", "write-lat"] {
        let start = std::time::Instant::now();
        let (server, client) =
            both(&format!("perf {test} -D 1"), &format!("perf {test} -D 1 --json"));
        server.succeeded();
        let json = client.succeeded().json();
        let [row] = rows(&json) else { panic!("{json}") };
        assert!(row["messages"].as_u64().unwrap() > 10, "{row}");
        assert!(start.elapsed().as_secs_f64() >= 1.0);
        if let Some(seconds) = row["seconds"].as_f64() {
            assert!(seconds >= 1.0, "{row}");
        }
    }
}

#[test]
fn compare_and_swap_is_an_atomic_too() {
    let (server, client) = both("perf atomic-lat", "perf atomic-lat -A compare-swap -n 20");
    let server = server.succeeded();
    assert!(server.out.contains("compare and swap"), "{}", server.out);
    client.succeeded();
}
