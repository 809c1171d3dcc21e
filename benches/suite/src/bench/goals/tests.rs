//! The goals, judged by made-up rows.

use super::*;
use crate::goal::{Verdict, markdown};

fn row(measure: Measure, netdev: &'static str, size: usize, mtu: u32, qps: u32, value: f64) -> Row {
    let key = Key { measure, netdev, size, mtu, qps, link: Link::Plain, tcp: None };
    let (min, max, unit) = (value, value, measure.unit());
    Row {
        key,
        posting: None,
        value,
        min,
        max,
        unit,
        baseline: None,
        ratio: None,
        samples: 3,
        valid: Some(true),
    }
}

fn over(link: Link, row: Row) -> Row {
    Row { key: Key { link, ..row.key }, ..row }
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
fn rates_are_judged_by_themselves() {
    for (goal, measure, netdev, least) in [
        ("64 B WRITEs on one queue pair", Measure::WriteRate, "udp", 5.0),
        ("64 B WRITEs one by one, `udp`", Measure::WriteRateSingle, "udp", 2.5),
        ("64 B WRITEs one by one, `packet`", Measure::WriteRateSingle, "packet", 4.0),
        ("64 B datagrams of UD, `udp`", Measure::UdRate, "udp", 4.0),
        ("64 B datagrams of UD, `packet`", Measure::UdRate, "packet", 4.0),
    ] {
        let rate = |netdev, value| row(measure, netdev, SMALL, MTU, 1, value);
        assert_eq!(verdict(&[rate(netdev, least + 0.1)], goal, ""), Verdict::Met);
        assert_eq!(verdict(&[rate(netdev, least - 0.1)], goal, ""), Verdict::Missed);
        assert_eq!(verdict(&[rate("afxdp", least)], goal, ""), Verdict::NotMeasured);
    }
}

#[test]
fn a_read_on_one_processor_is_judged_by_the_write_there() {
    let one_cpu = |measure, value| row(measure, "udp", SMALL, MTU, 1, value);
    let of = |read| {
        let write = one_cpu(Measure::WriteLatOneCpu, 10.0);
        [write, one_cpu(Measure::WriteLat, 100.0), one_cpu(Measure::ReadLatOneCpu, read)]
    };
    let goal = "64 B READ, `udp`, one processor";
    assert_eq!(verdict(&of(30.0), goal, ""), Verdict::Met);
    assert_eq!(verdict(&of(30.1), goal, ""), Verdict::Missed);
}

#[test]
fn a_link_is_judged_by_itself() {
    let write = |link, mtu, value, ratio| {
        over(link, with_ratio(row(Measure::WriteBw, "udp", SHARED, mtu, 1, value), ratio))
    };
    let tcp = |link, value| over(link, row(Measure::WriteBw, "tcp-spin", SHARED, 9000, 1, value));
    for (link, mtu, goal) in [
        (Link::Mtu1500, 1024, "64 KiB WRITE, `udp`, MTU 1500"),
        (Link::Bridge, MTU, "64 KiB WRITE, `udp`, over a bridge"),
        (Link::NoOffload, MTU, "64 KiB WRITE, `udp`, no offload"),
    ] {
        let of = |ratio| [write(link, mtu, 20.0, ratio), write(Link::Plain, mtu, 20.0, 0.1)];
        assert_eq!(verdict(&of(0.91), goal, "of the baseline"), Verdict::Met);
        assert_eq!(verdict(&of(0.89), goal, "of the baseline"), Verdict::Missed);
        let plain = [write(Link::Plain, mtu, 20.0, 0.95)];
        assert_eq!(verdict(&plain, goal, "of the baseline"), Verdict::NotMeasured);
    }
    let goal = "64 KiB WRITE, `udp`, no offload, by the fastest TCP";
    for (value, expected) in [(12.0, Verdict::Met), (11.9, Verdict::Missed)] {
        let link = Link::NoOffload;
        let rows = [write(link, MTU, value, 0.9), tcp(link, 12.0), tcp(Link::Plain, 60.0)];
        assert_eq!(verdict(&rows, goal, ""), expected);
    }
    // What another link carries is no rival of the plain one.
    let large = with_ratio(row(Measure::WriteBw, "udp", LARGE, MTU, 1, 10.0), 0.99);
    let rows = [large, tcp(Link::Bridge, 90.0)];
    assert_eq!(verdict(&rows, "1 MiB WRITE, `udp`", "fastest TCP"), Verdict::NotMeasured);
}

#[test]
fn many_senders_are_judged_by_one() {
    let of = |sum: f64, fairness: f64, errors: f64| {
        let fan_in = |measure, senders, value| {
            over(Link::Bridge, row(measure, "packet", SHARED, MTU, senders, value))
        };
        [
            fan_in(Measure::FanIn, 1, 10.0),
            fan_in(Measure::FanIn, 64, sum),
            fan_in(Measure::FanInFairness, 64, fairness),
            fan_in(Measure::FanInErrors, 64, errors),
        ]
    };
    let (good, bad) = (of(8.0, 0.9, 0.0), of(7.9, 0.89, 1.0));
    for (rows, expected) in [(&good, Verdict::Met), (&bad, Verdict::Missed)] {
        for goal in ["sum by one sender's", "Jain's index", "queue pairs in error"] {
            let begins = "64 KiB WRITEs of 64 senders to one receiver, `packet`";
            assert_eq!(verdict(rows, begins, goal), expected, "{goal}");
        }
    }
    let goal = "64 KiB WRITEs of 16 senders to one receiver, `packet`";
    assert_eq!(verdict(&good, goal, "sum"), Verdict::NotMeasured);
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
fn many_queue_pairs_are_judged_by_one() {
    let of = |at_64: f64, fairness: f64| {
        let (bw, jain) = (Measure::WriteBwQueued, Measure::WriteBwQueuedFairness);
        [
            row(bw, "udp", SHARED, MTU, 1, 10.0),
            row(bw, "udp", SHARED, MTU, 64, at_64),
            row(jain, "udp", SHARED, MTU, 64, fairness),
            // Fewer outstanding on each.
            row(Measure::WriteBw, "udp", SHARED, MTU, 64, 10.0),
        ]
    };
    for (rows, expected) in [(of(8.6, 0.96), Verdict::Met), (of(8.4, 0.94), Verdict::Missed)] {
        let goal = "64 KiB WRITEs, 16 outstanding on each of 64 queue pairs, `udp`";
        assert_eq!(verdict(&rows, goal, "by one queue pair's"), expected);
        assert_eq!(verdict(&rows, goal, "Jain's index"), expected);
        let goal = "64 KiB WRITEs, 16 outstanding on each of 256 queue pairs, `udp`";
        assert_eq!(verdict(&rows, goal, "by one"), Verdict::NotMeasured);
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
