//! `rocinante-bench`, as far as a test can check it: which rows there are and their parts, not
//! their values.

use std::collections::BTreeSet;

use super::evaluate::Dir;
use super::run_bench;
use rocinante::device::Backend;
use rocinante_tests::{need, require};
use serde_json::Value;

fn rows(out: &str) -> Vec<Value> {
    out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn named(row: &Value) -> String {
    let word = |name: &str| row[name].as_str().unwrap().to_owned();
    format!("{} {} {} {}", word("measure"), word("netdev"), row["size"], row["mtu"])
}

/// Each field is there, and the fields agree with each other.
#[track_caller]
fn is_complete(row: &Value) {
    let number = |name: &str| row[name].as_f64().unwrap_or_else(|| panic!("{name} of {row}"));
    let [value, min, max] = ["value", "min", "max"].map(number);
    assert!(min <= value && value <= max, "{row}");
    assert!(number("qps") >= 1.0 && number("samples") >= 1.0, "{row}");
    let unit = match row["measure"].as_str().unwrap() {
        "write_rate" | "write_rate_single" | "write_rate_small_buffers" | "ud_rate" => "Mop/s",
        "write_bw_fairness" | "write_bw_queued_fairness" | "fan_in_fairness" => "1",
        "fan_in" => "Gb/s",
        "fan_in_errors" => "queue pairs",
        "fan_in_retransmits" => "packets",
        "cpu_per_gb" => "s/GB",
        "qp_bytes" => "B",
        "idle_wakeups" => "1/s",
        measure if measure.contains("_bw") => "Gb/s",
        _ => "us",
    };
    assert_eq!(row["unit"], unit, "{row}");
    if row["ceiling"].is_null() {
        assert!(row["ratio"].is_null(), "{row}");
    } else {
        let ratio = value / number("ceiling");
        assert!((number("ratio") / ratio - 1.0).abs() < 1e-9, "{row}");
    }
}

#[test]
fn rows_are_complete_and_the_report_has_them_all() {
    require!(need::lab());
    require!(need::backend(Backend::Packet));
    let dir = Dir::new();
    let done = run_bench(&format!(
        "--only write_bw,write_lat,write_rate,tcp-spin,tcp-blocking --netdev udp,packet --mtu 4096 --runs 2 --seconds 0.01 \
         --patient --json --report {}",
        dir.path().display()
    ))
    .succeeded();
    let rows = rows(&done.out);
    rows.iter().for_each(is_complete);
    let names: BTreeSet<String> = rows.iter().map(named).collect();
    let of = |netdev| {
        [
            format!("write_bw {netdev} 1048576 4096"),
            format!("write_lat {netdev} 64 4096"),
            format!("write_lat_p99 {netdev} 64 4096"),
            format!("write_lat_p999 {netdev} 64 4096"),
            format!("write_rate {netdev} 64 4096"),
        ]
    };
    let mut expected: BTreeSet<String> = ["udp", "packet"].into_iter().flat_map(of).collect();
    let is_tcp = |row: &&Value| row["netdev"].as_str().unwrap().starts_with("tcp");
    for row in rows.iter().filter(|row| !is_tcp(row)) {
        let is_tail = row["measure"].as_str().unwrap().starts_with("write_lat_p99");
        assert!(row["ceiling"].is_number() != is_tail && row.get("cc").is_none(), "{row}");
        let in_lists = row["measure"] == "write_rate";
        assert_eq!(row["list"], if in_lists { 32 } else { 1 }, "{row}");
        assert!(row["outstanding"].is_number() && row["spins"] == "both", "{row}");
        assert!(row.get("link").is_none(), "{row}");
    }
    for netdev in ["tcp-spin", "tcp-blocking"] {
        for size in [65_536, 262_144, 1_048_576] {
            expected.insert(format!("write_bw {netdev} {size} 9000"));
            expected.insert(format!("write_bw_per_core {netdev} {size} 9000"));
        }
    }
    for measure in ["write_lat", "write_lat_p99", "write_lat_p999"] {
        expected.insert(format!("{measure} tcp-spin 64 9000"));
    }
    assert_eq!(names, expected);
    // Every kernel has cubic, unless it is configured without.
    for row in rows.iter().filter(is_tcp) {
        assert!(row["cc"] == "cubic" || row["cc"] == "bbr", "{row}");
        assert_eq!(row["spin"], row["netdev"] == "tcp-spin", "{row}");
        assert_eq!(row["write_size"], row["size"], "{row}");
    }
    assert_eq!(dir.read("rows.jsonl"), done.out);
    // All runs are published, not only those that count.
    let samples = self::rows(&dir.read("samples.jsonl"));
    for row in &rows {
        let same = |sample: &&Value| {
            ["measure", "netdev", "size", "mtu", "qps", "cc"]
                .iter()
                .all(|name| sample.get(name) == row.get(name))
        };
        let runs: Vec<u64> =
            samples.iter().filter(same).map(|sample| sample["run"].as_u64().unwrap()).collect();
        // Large writes are measured beside each of the two backends.
        let is_large = row["size"] != 64;
        let expected = if is_tcp(&row) && is_large { vec![1, 1, 2, 2] } else { vec![1, 2] };
        assert_eq!(runs, expected, "{row}");
    }
    let text = dir.read("report.md");
    for row in &rows {
        let [measure, netdev] = ["measure", "netdev"].map(|name| row[name].as_str().unwrap());
        let cc = row["cc"].as_str().map(|cc| format!(" {cc}")).unwrap_or_default();
        let line = format!(
            "| {measure} | {netdev}{cc} | {} | {} | {} |",
            row["size"], row["mtu"], row["qps"]
        );
        assert!(text.contains(&line), "{line} is not in {text}");
    }
    let plot = dir.read("throughput.svg");
    for name in ["udp", "packet", "udp, raw baseline", "tcp-spin cubic", "WRITE throughput"] {
        assert!(plot.contains(name), "{name} is not in {plot}");
    }
}

#[test]
fn every_measure_can_be_had() {
    require!(need::lab());
    let done = run_bench(
        "--only bandwidth,rate,latency,both,qps,small_buffers,links,fan_in,idle --netdev udp --mtu 4096 --runs 1 --seconds 0.02 \
         --patient --json",
    )
    .succeeded();
    let rows = rows(&done.out);
    rows.iter().for_each(is_complete);
    other_links_are_told(&rows, &done.err);
    senders_are_told(&rows);
    let measures: BTreeSet<&str> =
        rows.iter().map(|row| row["measure"].as_str().unwrap()).collect();
    let expected = [
        "atomic_lat",
        "atomic_lat_asleep",
        "atomic_lat_passive",
        "cpu_per_gb",
        "fan_in",
        "fan_in_errors",
        "fan_in_fairness",
        "fan_in_retransmits",
        "idle_wakeups",
        "qp_bytes",
        "read_bw",
        "read_lat",
        "read_lat_asleep",
        "read_lat_one_cpu",
        "read_lat_passive",
        "send_bw",
        "send_lat_blocking",
        "ud_rate",
        "wake_up",
        "write_bw",
        "write_bw_both",
        "write_bw_fairness",
        "write_bw_passive",
        "write_bw_per_core",
        "write_bw_queued",
        "write_bw_queued_fairness",
        "write_bw_small_buffers",
        "write_lat",
        "write_lat_memory",
        "write_lat_one_cpu",
        "write_lat_p99",
        "write_lat_p999",
        "write_lat_signaled",
        "write_rate",
        "write_rate_single",
        "write_rate_small_buffers",
    ];
    let mut expected = BTreeSet::from(expected);
    if done.err.contains("no wake_up: ") {
        // A machine on which other work takes the core of the spinning thread has no such row.
        expected.remove("wake_up");
    }
    assert_eq!(measures, expected, "{}", done.err);
    let qps: BTreeSet<u64> = rows.iter().map(|row| row["qps"].as_u64().unwrap()).collect();
    assert_eq!(qps, BTreeSet::from([1, 4, 16, 64, 256, 1000]), "{}", done.err);
    for row in rows.iter().filter(|row| row["measure"] == "write_bw_fairness") {
        let index = row["value"].as_f64().unwrap();
        assert!(index > 0.0 && index <= 1.0 + 1e-9, "{row}");
    }
}

/// Ours and TCP's rows of each link, where it can be made.
#[track_caller]
fn other_links_are_told(rows: &[Value], notes: &str) {
    for (link, path_mtu, mtu) in
        [("mtu1500", 1024, 1500), ("bridge", 4096, 9000), ("no_offload", 4096, 9000)]
    {
        if link == "no_offload" && notes.contains("the link no_offload: ethtool is not installed") {
            continue;
        }
        let of = |netdev: &str| {
            let is_of = |row: &&Value| row["link"] == link && row["netdev"] == netdev;
            let rows = rows.iter().filter(is_of).filter(|row| row["measure"] == "write_bw");
            rows.collect::<Vec<&Value>>()
        };
        let [ours] = of("udp")[..] else { panic!("ours over {link}: {notes}") };
        assert!(ours["ceiling"].is_number(), "{ours}");
        assert_eq!((&ours["mtu"], &ours["size"]), (&path_mtu.into(), &65_536.into()), "{ours}");
        for netdev in ["tcp-spin", "tcp-blocking"] {
            let tcp = of(netdev);
            assert!(tcp.len() >= 3 && tcp.iter().all(|row| row["mtu"] == mtu), "{tcp:?} {notes}");
        }
    }
}

#[track_caller]
fn senders_are_told(rows: &[Value]) {
    for (measure, senders) in [("fan_in", &[1, 16, 64][..]), ("fan_in_fairness", &[16, 64])] {
        let of = rows.iter().filter(|row| row["measure"] == measure);
        let of: Vec<&Value> = of.collect();
        assert_eq!(of.iter().map(|row| row["qps"].as_u64().unwrap()).collect::<Vec<_>>(), senders);
        for row in of {
            assert_eq!((&row["link"], &row["spins"]), (&"bridge".into(), &"neither".into()));
            assert_eq!(row["outstanding"], 16, "{row}");
        }
    }
}

#[test]
fn without_json_there_is_a_table() {
    require!(need::lab());
    let done = run_bench("--only write_lat --netdev udp --runs 1 --seconds 0.01 --patient");
    let done = done.succeeded();
    assert!(done.out.contains("| write_lat | udp | 64 | 4096 | 1 |"), "{}", done.out);
    assert!(done.err.contains("run 1, 1 of 1: latency: udp"), "progress: {}", done.err);
}

#[test]
fn what_cannot_be_measured_is_refused() {
    run_bench("--only wriet_bw").failed(2, &["there is no wriet_bw", "write_bw_both"]);
    run_bench("--mtu 1500").failed(2, &["a path MTU is 256, 512, 1024, 2048 or 4096"]);
    run_bench("--seconds 0").failed(2, &["--seconds must be from 0.01 to 60"]);
    run_bench("--netdev hw").failed(2, &["--devices", "rocinante devices"]);
}
