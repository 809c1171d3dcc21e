//! Tests of the plan: its time, its rows, its baselines.

use super::*;

fn choice(only: &[&str], quick: bool) -> Choice {
    Choice {
        providers: vec![Provider::Udp, Provider::Packet, Provider::Afxdp],
        mtus: vec![4096, 1024],
        congestions: vec![Congestion::Cubic, Congestion::Bbr],
        only: only.iter().map(|word| (*word).to_owned()).collect(),
        seconds: if quick { 0.08 } else { 0.25 },
        quick,
    }
}

/// A run may take 240 seconds, or 40 if it is quick. A pair of processes takes a tenth of a second
/// to start, a crowd of them some seconds.
#[test]
fn a_run_leaves_time_for_what_is_not_measuring() {
    // Without starting processes and networks.
    let of = |quick| -> f64 {
        choice(&[], quick).cells().iter().map(|cell| cell.time(false).as_secs_f64()).sum()
    };
    assert!(of(false) < 130.0, "{}", of(false));
    assert!(of(true) < 28.0, "{}", of(true));
}

#[test]
fn the_time_of_a_cell_is_of_all_its_parts() {
    let step = |measure, size| Step { measure, size, seconds: 2.0 };
    let cell = |rivals| Cell {
        group: Group::Bandwidth,
        ours: Some(Provider::Udp),
        link: Link::Plain,
        mtu: MTU,
        qps: 1,
        small_buffers: false,
        steps: vec![step(Measure::WriteBw, LARGE), step(Measure::SendBw, LARGE)],
        rivals,
    };
    let baseline = cell(Vec::new()).tasks()[0].planned();
    assert!(baseline > Duration::from_secs(2), "with its trials");
    let time = cell(Vec::new()).time(false);
    assert_eq!(time, Duration::from_secs(4) + baseline);
    assert_eq!(cell(Vec::new()).time(true), time + baseline);
    let rivals = [Peer::TcpSpin, Peer::Iperf3].map(|peer| {
        let (cc, steps) = (Some(Congestion::Cubic), vec![step(Measure::WriteBw, 1)]);
        Rival { peer, cc, steps }
    });
    let with_rivals = cell(rivals.to_vec()).time(false);
    assert_eq!(with_rivals, time + Duration::from_secs_f64(4.0 + IPERF3_WARM_UP));
    let quinn =
        Rival { peer: Peer::QuinnUdp, cc: None, steps: vec![step(Measure::WriteBw, LARGE)] };
    assert_eq!(cell(vec![quinn]).time(false), time + baseline);
}

/// All samples of a row come from one group: a sweep keeps only what no other group measures.
#[test]
fn sweeps_leave_out_what_is_measured_anyway() {
    for (only, left_out) in [
        (&[][..], 3 * 2 + 3 + 2 * 3 + 2),
        (&["sweep", "write_bw"][..], 3),
        (&["sweep", "qps"][..], 3),
        (&["latency_sweep", "write_lat"][..], 3),
        (&["sweep", "tcp-spin"][..], 2 * 3),
        (&["latency_sweep", "tcp-spin"][..], 2),
        (&["sweep", "latency_sweep"][..], 0),
    ] {
        let cells = choice(only, false).cells();
        let of = |sweep: bool| {
            let is_of =
                |cell: &&Cell| sweep == matches!(cell.group, Group::Sweep | Group::LatencySweep);
            cells.iter().filter(is_of).flat_map(Cell::keys).collect::<Vec<Key>>()
        };
        let (headline, sweeps) = (of(false), of(true));
        assert!(sweeps.iter().all(|key| !headline.contains(key)), "{only:?}");
        let wants = |word| only.is_empty() || only.contains(&word);
        // Three backends, and TCP with two congestion controls.
        let all =
            5 * 23 * usize::from(wants("sweep")) + 5 * 16 * usize::from(wants("latency_sweep"));
        assert_eq!(sweeps.len(), all - left_out, "{only:?}");
    }
    let small = Choice { mtus: vec![1024], ..choice(&["sweep", "write_bw"], false) };
    let sizes = |cell: &Cell| cell.steps.len();
    let sweep =
        small.cells().iter().filter(|cell| cell.group == Group::Sweep).map(sizes).sum::<usize>();
    assert_eq!(sweep, 3 * 23, "it has another path MTU");
}

#[test]
fn a_baseline_uses_as_much_memory_as_we_do() {
    for cell in choice(&[], false).cells() {
        for task in cell.tasks() {
            let queued = cell.steps.iter().any(|step| step.measure == Measure::WriteBwQueued);
            let expected = match (task.kind, task.message, cell.qps) {
                (Kind::PingPong, ..) => 1,
                _ if queued => 16,
                (Kind::Flood, ..4096, _) => 512,
                (Kind::Flood, SHARED, 1) => 128,
                (Kind::Flood, SHARED, 4) => 32,
                (Kind::Flood, SHARED, 64..) => 2,
                (Kind::Flood, LARGE, _) => 8,
                _ => continue,
            };
            assert_eq!(task.depth, expected, "{cell}: {task:?}");
        }
    }
}

#[test]
fn what_is_named_is_measured_and_nothing_else() {
    let cells = choice(&["write_bw", "write_lat"], false).cells();
    let steps: Vec<_> = cells.iter().flat_map(|cell| &cell.steps).collect();
    assert_eq!(steps.len(), 3 * (2 + 1), "{cells:?}");
    assert!(cells.iter().all(|cell| cell.rivals.is_empty()));
    for (word, count) in [
        ("qps", 3 * 8),
        ("write_bw_queued_fairness", 3 * 3),
        ("write_bw_small_buffers", 3 * 2),
        ("write_lat_p99", 3),
        ("read_lat_one_cpu", 3),
        ("links", 3 * 3),
        ("fan_in", 3 * 3),
        ("fan_in_errors", 3 * 3),
        ("idle", 3),
        ("qp_bytes", 3),
    ] {
        let cells = choice(&[word], false).cells();
        assert_eq!(cells.iter().flat_map(|cell| &cell.steps).count(), count, "{word}");
    }
    let cells = choice(&["iperf3"], false).cells();
    assert!(cells.iter().all(|cell| cell.steps.is_empty() && cell.rivals.len() == 2));
    for peer in ["quinn-udp", "sockperf-tcp"] {
        let cells = choice(&[peer], false).cells();
        assert!(cells.iter().all(|cell| cell.steps.is_empty() && cell.rivals.len() == 1), "{peer}");
    }
    let sweep = choice(&["sweep"], false).cells();
    assert_eq!(sweep.iter().flat_map(|cell| &cell.steps).count(), 3 * 23);
    assert!(Choice::check("write_bw").is_ok() && Choice::check("sweep").is_ok());
    assert!(Choice::check("wriet_bw").unwrap_err().contains("write_bw_both"));
}

/// TCP runs over each link beside our WRITEs, on the same path.
#[test]
fn a_link_is_of_all_that_is_measured_over_it() {
    let cells = choice(&["links"], false).cells();
    for link in Link::OTHERS {
        let over: Vec<&Cell> = cells.iter().filter(|cell| cell.link == link).collect();
        assert_eq!(over.len(), 3, "one for each backend");
        assert_eq!(over[0].rivals.len(), 4, "two congestion controls, spinning and blocking");
        for cell in over {
            assert!(cell.mtu + 100 < link.mtu() && 5 * cell.mtu > 2 * link.mtu(), "{cell}");
            assert!(!cell.tasks().is_empty(), "it has a baseline");
            assert!(cell.keys().iter().all(|key| key.link == link));
            let of_peers = cell.keys().into_iter().filter(|key| key.tcp.is_some());
            assert!(of_peers.into_iter().all(|key| key.mtu == link.mtu()));
        }
    }
    let takes_long = |cell: &Cell| matches!(cell.group, Group::Links | Group::FanIn);
    assert!(!choice(&[], true).cells().iter().any(takes_long));
    assert!(choice(&["links"], true).cells().iter().all(takes_long));
    assert!(choice(&[], false).cells().iter().any(takes_long));
}

/// The two processes share a core in all steps of a cell, or in none.
#[test]
fn a_cell_is_on_one_processor_or_on_two() {
    for cell in choice(&[], false).cells() {
        let mut on_one = cell.steps.iter().map(|step| step.measure.is_on_one_cpu());
        let first = on_one.next();
        assert!(on_one.all(|one| Some(one) == first), "{cell}");
    }
}

/// SENDs need receives, and a cell has room for the receives of one step.
#[test]
fn a_cell_has_one_step_with_receives_at_most() {
    let sends = |cell: &Cell| {
        let is_send = |step: &&Step| step.measure.name().starts_with("send");
        cell.steps.iter().filter(is_send).count()
    };
    assert!(choice(&[], false).cells().iter().all(|cell| sends(cell) <= 1));
}

#[test]
fn every_figure_has_its_row_and_its_baseline() {
    for cell in choice(&[], false).cells() {
        for step in &cell.steps {
            let key = cell.key("udp", step.measure, step.size).expect("a row");
            assert_eq!((key.size, key.mtu, key.qps), (step.size, cell.mtu, cell.qps));
            assert_eq!(key.link, cell.link);
            if let Some(of) = reference(step.measure, step.size) {
                assert!(cell.tasks().iter().any(|task| (task.kind, task.message) == of));
            }
        }
        let small = cell.key("udp", Measure::WriteBw, LARGE).map(|key| key.measure);
        let expected =
            if cell.small_buffers { Measure::WriteBwSmallBuffers } else { Measure::WriteBw };
        assert_eq!(small, Some(expected));
        assert_eq!(cell.key("udp", Measure::MachineCpuPerGb, LARGE), None);
        let tails = cell.key("udp", Measure::WriteLatP99, SMALL).is_some();
        assert_eq!(tails, cell.group == Group::Latency, "a sweep is too short for them");
    }
}
