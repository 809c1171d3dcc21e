//! The goals, judged by made-up rows.

use super::*;

fn row(measure: Measure, netdev: &'static str, size: usize, mtu: u32, qps: u32, value: f64) -> Row {
    let key = Key { measure, netdev, size, mtu, qps, tcp: None };
    let (min, max, unit) = (value, value, measure.unit());
    Row { key, value, min, max, unit, baseline: None, ratio: None, samples: 3, valid: Some(true) }
}

fn with_ratio(row: Row, ratio: f64) -> Row {
    Row { baseline: Some(row.value / ratio), ratio: Some(ratio), ..row }
}

/// The verdict on the one goal with a text that begins with `begins` and contains `contains`.
fn verdict(rows: &[Row], begins: &str, contains: &str) -> Verdict {
    let goals = all(rows);
    let mut found = goals.iter().filter(|Judged { goal, .. }| {
        goal.text.starts_with(begins) && goal.text.contains(contains)
    });
    let goal = found.next().unwrap_or_else(|| panic!("no goal {begins} … {contains}"));
    assert!(found.next().is_none(), "two goals {begins} … {contains}");
    goal.verdict()
}

#[test]
fn nothing_measured_is_said_of_every_goal() {
    let goals = all(&[]);
    assert!(goals.len() > 60, "{}", goals.len());
    assert!(goals.iter().all(|goal| goal.verdict() == Verdict::NotMeasured));
    let mut texts: Vec<&str> = goals.iter().map(|judged| judged.goal.text.as_str()).collect();
    texts.sort_unstable();
    texts.dedup();
    assert_eq!(texts.len(), goals.len(), "each goal has words of its own");
    assert!(
        markdown(&goals, "").contains(&format!("0 met, 0 missed, {} not measured", goals.len()))
    );
}

#[test]
fn rows_that_are_not_valid_meet_no_goal() {
    let points = [(2, 1.0), (4, 2.0), (8, 4.0)];
    let line = points.map(|(size, value)| row(Measure::WriteBw, "udp", size, MTU, 1, value));
    let rate = with_ratio(row(Measure::WriteBw, "udp", LARGE, MTU, 1, 524_288.0), 0.95);
    let with = |valid| {
        let mut rows = [&line[..], &[rate]].concat();
        rows.iter_mut().skip(1).for_each(|row| row.valid = valid);
        rows
    };
    for (valid, expected) in
        [(Some(true), Verdict::Met), (None, Verdict::Met), (Some(false), Verdict::NoValidRun)]
    {
        let rows = with(valid);
        for goal in ["1 MiB WRITE, `udp`, path MTU 4096, of the baseline", "WRITEs by size, `udp`"]
        {
            assert_eq!(verdict(&rows, goal, ""), expected, "{goal}");
        }
        assert_eq!(verdict(&rows, "1 MiB READ, `udp`, path MTU 4096", ""), Verdict::NotMeasured);
    }
    let text = markdown(&all(&with(Some(false))), "No run was valid.\n");
    assert!(text.contains("| – | not measured (no valid run) |"), "{text}");
    assert!(text.contains("0 met, 0 missed, ") && text.ends_with("\nNo run was valid.\n"));
}

#[test]
fn bandwidth_is_judged_by_the_baseline_and_by_tcp() {
    let large = |value| row(Measure::WriteBw, "udp", LARGE, MTU, 1, value);
    let tcp = |netdev, size, value| row(Measure::WriteBw, netdev, size, LINK_MTU, 1, value);
    let [slow, fast] = [tcp("tcp-spin", TCP_WRITES[0], 10.0), tcp("tcp-blocking", LARGE, 40.0)];
    // Measured for a moment only.
    let sweep = tcp("tcp-spin", 8 << 20, 90.0);
    let of = |value: f64, ratio| [with_ratio(large(value), ratio), slow, fast, sweep];
    let (baseline, fastest) = ("1 MiB WRITE, `udp`, path MTU 4096, of", "fastest TCP");
    for (rows, by_baseline, by_tcp) in [
        (of(34.0, 0.91), Verdict::Met, Verdict::Met),
        (of(33.9, 0.89), Verdict::Missed, Verdict::Missed),
        // 0.95 of a baseline that is slower than TCP.
        (of(30.0, 0.951), Verdict::Met, Verdict::Met),
    ] {
        assert_eq!(verdict(&rows, baseline, ""), by_baseline);
        assert_eq!(verdict(&rows, "1 MiB WRITE, `udp`, path MTU 4096", fastest), by_tcp);
    }
    let packet = verdict(&of(34.0, 0.91), "1 MiB WRITE, `packet`, path MTU 4096", fastest);
    assert_eq!(packet, Verdict::NotMeasured);
}

#[test]
fn middle_sizes_are_judged_by_spinning_tcp() {
    for (netdev, good, bad) in [("packet", 5.0, 5.1), ("udp", 6.5, 6.6)] {
        let lat = |netdev, mtu, value| row(Measure::WriteLat, netdev, 8 << 10, mtu, 1, value);
        let of = |value| {
            [
                lat(netdev, MTU, value),
                lat("tcp-spin", LINK_MTU, 9.0),
                lat("tcp-spin", LINK_MTU, 5.0),
            ]
        };
        let goal = format!("8 KiB WRITE, half round trip, `{netdev}`");
        assert_eq!(verdict(&of(good), &goal, ""), Verdict::Met);
        assert_eq!(verdict(&of(bad), &goal, ""), Verdict::Missed);
    }
}

#[test]
fn the_rate_is_judged_on_udp() {
    for (value, expected) in [(5.1, Verdict::Met), (4.9, Verdict::Missed)] {
        let rate = |netdev| row(Measure::WriteRate, netdev, SMALL, MTU, 1, value);
        let goal = "64 B WRITEs on one queue pair";
        assert_eq!(verdict(&[rate("udp")], goal, ""), expected);
        assert_eq!(verdict(&[rate("packet")], goal, ""), Verdict::NotMeasured);
    }
}

#[test]
fn latencies_are_judged_by_the_write_and_by_the_wake_up() {
    let write =
        |value| with_ratio(row(Measure::WriteLat, "packet", SMALL, MTU, 1, value), value / 1.7);
    let read = |value| row(Measure::ReadLat, "packet", SMALL, MTU, 1, value);
    let asleep = |value| row(Measure::ReadLatAsleep, "packet", SMALL, MTU, 1, value);
    let wake_up = row(Measure::WakeUp, "udp-sockets", SMALL, LINK_MTU, 1, 20.0);
    let good = [write(1.9), read(4.5), asleep(24.9), wake_up];
    let bad = [write(2.1), read(5.1), asleep(25.1), wake_up];
    for (rows, expected) in [(&good, Verdict::Met), (&bad, Verdict::Missed)] {
        assert_eq!(verdict(rows, "64 B WRITE, half round trip, `packet`", "baseline"), expected);
        assert_eq!(verdict(rows, "64 B WRITE, half round trip, on the best", ""), expected);
        assert_eq!(verdict(rows, "64 B READ, `packet`, active target", ""), expected);
        assert_eq!(verdict(rows, "64 B READ, `packet`, sleeping target", ""), expected);
    }
    // One run measured no wake-up.
    let rows = [asleep(24.9), Row { samples: 2, ..wake_up }];
    let goal = "64 B READ, `packet`, sleeping target";
    assert_eq!(verdict(&rows, goal, ""), Verdict::NotMeasured);
}

#[test]
fn a_dent_in_the_line_is_seen() {
    let line = |at_8: f64| {
        let points = [(2, 1.0), (4, 2.0), (8, at_8), (16, 4.0)];
        points.map(|(size, value)| row(Measure::WriteBw, "udp", size, MTU, 1, value))
    };
    assert_eq!(verdict(&line(2.5), "WRITEs by size, `udp`", ""), Verdict::Met);
    assert_eq!(verdict(&line(2.3), "WRITEs by size, `udp`", ""), Verdict::Missed);
}

#[test]
fn the_worst_number_of_queue_pairs_decides() {
    let of = |at_64: f64, fairness: f64| {
        let values = [(1, 10.0), (4, 10.0), (16, 9.0), (64, at_64), (256, 9.5)];
        let bw = values.map(|(qps, value)| row(Measure::WriteBw, "udp", SHARED, MTU, qps, value));
        let fair =
            values.map(|(qps, _)| row(Measure::WriteBwFairness, "udp", SHARED, MTU, qps, fairness));
        [bw, fair].concat()
    };
    for (rows, expected) in [(of(8.1, 0.96), Verdict::Met), (of(7.9, 0.94), Verdict::Missed)] {
        assert_eq!(verdict(&rows, "64 KiB WRITEs on up to 256 queue pairs, `udp`", ""), expected);
        assert_eq!(verdict(&rows, "the same, `udp`", "Jain"), expected);
    }
}

#[test]
fn costs_are_judged() {
    let iperf3 = row(Measure::CpuPerGb, "iperf3", IPERF3_WRITES, LINK_MTU, 1, 1.0);
    let of = |cpu, wake_ups, bytes| {
        [
            row(Measure::CpuPerGb, "udp", LARGE, MTU, 1, cpu),
            row(Measure::IdleWakeups, "udp", 0, MTU, IDLE_QPS, wake_ups),
            row(Measure::QpBytes, "udp", 0, MTU, IDLE_QPS, bytes),
            iperf3,
        ]
    };
    let (good, bad) = (of(0.7, 0.0, 4096.0), of(0.71, 0.5, 4097.0));
    for (rows, expected) in [(&good, Verdict::Met), (&bad, Verdict::Missed)] {
        for goal in ["processor time per GB, `udp`", "wake-ups per second", "bytes per queue pair"]
        {
            assert_eq!(verdict(rows, goal, "`udp`"), expected, "{goal}");
        }
    }
}
