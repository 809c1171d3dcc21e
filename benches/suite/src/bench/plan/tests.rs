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

/// The time of measuring alone.
fn seconds(cells: &[Cell]) -> f64 {
    let of = |steps: &[Step]| steps.iter().map(|step| step.seconds).sum::<f64>();
    let raw =
        |task: &Task| if task.kind == Kind::Flood { 1.5 * task.seconds } else { task.seconds };
    let rivals = |rival: &Rival| match rival.peer {
        Peer::Iperf3 => of(&rival.steps) + IPERF3_WARM_UP,
        _ => of(&rival.steps),
    };
    cells
        .iter()
        .map(|cell| {
            let baselines: f64 = cell.tasks().iter().map(raw).sum();
            baselines + of(&cell.steps) + cell.rivals.iter().map(rivals).sum::<f64>()
        })
        .sum()
}

#[test]
fn three_runs_leave_time_for_what_is_not_measuring() {
    let of = |quick| 3.0 * seconds(&choice(&[], quick).cells());
    assert!(of(false) < 4.0 * 60.0, "{}", of(false));
    assert!(of(true) < 65.0, "{}", of(true));
}

#[test]
fn the_time_of_a_cell_is_of_all_its_parts() {
    let step = |measure, size| Step { measure, size, seconds: 2.0 };
    let cell = |rivals| Cell {
        group: Group::Bandwidth,
        ours: Some(Provider::Udp),
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
}

/// All samples of a row come from one group: a sweep keeps only what no other group measures.
#[test]
fn sweeps_leave_out_what_is_measured_anyway() {
    for (only, left_out) in [
        (&[][..], 3 * 2 + 3 + 2 * 3),
        (&["sweep", "write_bw"][..], 3),
        (&["sweep", "qps"][..], 3),
        (&["latency_sweep", "write_lat"][..], 3),
        (&["sweep", "tcp-spin"][..], 2 * 3),
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
            let expected = match (task.kind, task.message, cell.qps) {
                (Kind::PingPong, ..) => 1,
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
    for (word, count) in
        [("qps", 3 * 5), ("write_bw_small_buffers", 3 * 2), ("idle", 3), ("qp_bytes", 3)]
    {
        let cells = choice(&[word], false).cells();
        assert_eq!(cells.iter().flat_map(|cell| &cell.steps).count(), count, "{word}");
    }
    let cells = choice(&["iperf3"], false).cells();
    assert!(cells.iter().all(|cell| cell.steps.is_empty() && cell.rivals.len() == 2));
    let sweep = choice(&["sweep"], false).cells();
    assert_eq!(sweep.iter().flat_map(|cell| &cell.steps).count(), 3 * 23);
    assert!(Choice::check("write_bw").is_ok() && Choice::check("sweep").is_ok());
    assert!(Choice::check("wriet_bw").unwrap_err().contains("write_bw_both"));
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
            if let Some(of) = reference(step.measure, step.size) {
                assert!(cell.tasks().iter().any(|task| (task.kind, task.message) == of));
            }
        }
        let small = cell.key("udp", Measure::WriteBw, LARGE).map(|key| key.measure);
        let expected =
            if cell.small_buffers { Measure::WriteBwSmallBuffers } else { Measure::WriteBw };
        assert_eq!(small, Some(expected));
        assert_eq!(cell.key("udp", Measure::MachineCpuPerGb, LARGE), None);
    }
}
