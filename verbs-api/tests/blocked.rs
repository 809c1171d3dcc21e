//! A port that accepts nothing for a while. The background thread alone sends the posted requests
//! when the port accepts again, and no thread wakes without need. Nothing here is acknowledged, so
//! no timer makes up for packets that stay behind.

mod sim;

use std::fs;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use rocinante::verbs::{MwType, PeerPath, QpType, SendData, SendOp};
use rocinante::{Access, ConnectOptions, Qp, RecvWr, SendWr, WcStatus};
use rocinante_netdev::sim::{SimConfig, SimGate, SimNet};
use sim::{ADDRESSES, PATIENCE, Side, request, send, until};

const A: IpAddr = ADDRESSES[0];
const B: IpAddr = ADDRESSES[1];
/// Less than a window, and than what both ports hold.
const BURST: u64 = 40;

/// A device behind a gate, with a background thread named after the device; and a device that the
/// test drives.
fn sides(name: &str) -> (SimGate, Side, Side) {
    let net = SimNet::new();
    let (port, gate) = net.gated_port(&[A], &SimConfig::default()).unwrap();
    let a = Side::over(port, name, true);
    let b = Side::over(net.port(&[B], &SimConfig::default()).unwrap(), "far", false);
    (gate, a, b)
}

/// How often the background thread of a device has gone to sleep (`proc_pid_status(5)`).
/// A thread gives itself its name when it begins to run.
fn naps(name: &str) -> u64 {
    let mut found = None;
    until("the thread runs", || {
        found = try_naps(name);
        found.is_some()
    });
    found.unwrap()
}

fn try_naps(name: &str) -> Option<u64> {
    let thread = format!("roce-{name}");
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let of = |task: &std::path::Path| {
        let status = fs::read_to_string(task.join("status")).ok()?;
        let field = |name| status.lines().find_map(|line| Some(line.strip_prefix(name)?.trim()));
        (field("Name:")? == thread).then(|| field("voluntary_ctxt_switches:")?.parse().ok())?
    };
    let found: Vec<u64> = tasks.filter_map(|task| of(&task.unwrap().path())).collect();
    assert!(found.len() <= 1, "{thread} is one thread");
    found.first().copied()
}

/// Asserts that a device has nothing to do: its thread sleeps, except for the few looks after it
/// has driven.
fn assert_quiet(name: &str, when: &str) {
    const WINDOW: Duration = Duration::from_millis(50);
    const NAPS_MAX: u64 = 15;
    let end = Instant::now() + PATIENCE;
    // The looks become rarer, and end; on a busy machine that takes longer.
    loop {
        std::thread::sleep(WINDOW);
        let before = naps(name);
        std::thread::sleep(WINDOW);
        let count = naps(name) - before;
        if count <= NAPS_MAX {
            return;
        }
        assert!(Instant::now() < end, "{when}: woken {count} times in {WINDOW:?}");
    }
}

/// Posts bursts at a shut gate and opens it. `wr` is the request of a burst.
fn all_leaves(name: &str, (gate, a, b): (SimGate, Side, Side), from: &Qp, to: &Qp, wr: SendWr<'_>) {
    for round in 0..3 {
        for wr_id in 0..BURST {
            to.post_recv(&[RecvWr { wr_id, sges: &[b.mr.sge(0, 256)] }]).unwrap();
        }
        gate.shut();
        for wr_id in 0..BURST {
            from.post_send(&[wr.wr_id(wr_id)]).unwrap();
        }
        // A request is complete when the port has it.
        (0..BURST).for_each(|wr_id| a.succeed(wr_id));
        assert_quiet(name, "at a shut gate");
        assert_eq!(b.cq.poll_one().unwrap(), None, "round {round}");
        gate.open();
        for wr_id in 0..BURST {
            let wc =
                b.cq.wait_one(PATIENCE).unwrap_or_else(|_| panic!("{wr_id} stays: round {round}"));
            assert_eq!((wc.wr_id, wc.status), (wr_id, WcStatus::Success));
        }
        assert_quiet(name, "when all has left");
    }
}

#[test]
fn the_tail_of_an_unreliable_burst_leaves_when_the_port_takes_more() {
    let (gate, a, b) = sides("gate-uc");
    let build = |side: &Side| {
        side.pd.qp(&side.cq, &side.cq).access(Access::ALL).qp_type(QpType::Uc).build().unwrap()
    };
    let (from, to) = (build(&a), build(&b));
    let ends = [from.endpoint(), to.endpoint()];
    let options = ConnectOptions::default();
    let to = to.connect(&ends[0], &options).unwrap();
    let from = from.connect(&ends[1], &options).unwrap();
    all_leaves("gate-uc", (gate, a, b), &from, &to, send(0, &[7; 32]));
}

#[test]
fn the_tail_of_a_burst_of_datagrams_leaves_when_the_port_takes_more() {
    let (gate, a, b) = sides("gate-ud");
    let build = |side: &Side| {
        let qp = side.pd.qp(&side.cq, &side.cq).qp_type(QpType::Ud).build().unwrap();
        qp.ready().unwrap()
    };
    let (from, to) = (build(&a), build(&b));
    let ah = a.pd.create_ah(&PeerPath::to(&to.endpoint())).unwrap();
    let op = SendOp::SendTo { to: ah.to(to.qpn(), 0x1111_1111), imm: None };
    all_leaves("gate-ud", (gate, a, b), &from, &to, request(0, op, SendData::Inline(&[7; 32])));
}

/// Two devices, one of them blocked: the other's thread does not notice.
#[test]
fn a_port_that_blocks_wakes_no_other_device() {
    let (gate, a, b) = sides("gate-one");
    let net = SimNet::new();
    let port = net.port(&[A], &SimConfig::default()).unwrap();
    let other = Side::over(port, "gate-other", true);
    let build = |side: &Side| {
        let qp = side.pd.qp(&side.cq, &side.cq).qp_type(QpType::Ud).build().unwrap();
        qp.ready().unwrap()
    };
    let (from, to) = (build(&a), build(&b));
    let ah = a.pd.create_ah(&PeerPath::to(&to.endpoint())).unwrap();
    gate.shut();
    let op = SendOp::SendTo { to: ah.to(to.qpn(), 0x1111_1111), imm: None };
    from.post_send(&[request(1, op, SendData::Inline(&[7; 32]))]).unwrap();
    a.succeed(1);
    assert_quiet("gate-other", "beside a shut gate");
    // Neither calls nor the end of a device wait for a blocked port.
    drop(other.pd.alloc_mw(MwType::Type1).unwrap());
    drop(ah);
    drop(from);
    drop(a);
}

/// An acknowledgement that the port does not accept is not lost.
#[test]
fn an_acknowledgement_leaves_when_the_port_takes_more() {
    let (gate, a, b) = sides("gate-ack");
    let sides = [b, a];
    let [qp, peer] = sim::connect(&sides, 24);
    let [b, a] = &sides;
    peer.post_recv(&[RecvWr { wr_id: 1, sges: &[a.mr.sge(0, 32)] }]).unwrap();
    gate.shut();
    qp.post_send(&[send(2, &[7; 32])]).unwrap();
    a.succeed(1);
    assert_quiet("gate-ack", "at a shut gate");
    assert_eq!(b.cq.poll_one().unwrap(), None);
    gate.open();
    until("the acknowledgement", || b.cq.poll_one().unwrap().is_some());
    assert_eq!(b.ctx.counters().transport.local_ack_timeout_err, 0);
    assert_quiet("gate-ack", "when all has left");
}
