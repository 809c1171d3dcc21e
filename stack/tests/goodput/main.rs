//! Goodput of one queue pair in virtual time, over a link with a rate, a delay, a finite queue and
//! a loss per packet. The table of results shows the gain from loss recovery; it is committed
//! beside the test.

#[path = "../common/mod.rs"]
mod common;
mod incast;
mod lane;

use std::fmt::Write as _;

use common::{BASE, End, PORT, Setup};
use lane::{Lane, Link};
use rocinante_stack::mem::Sge;
use rocinante_stack::types::{Mtu, Time};
use rocinante_stack::verbs::{SendData, SendOp, SendWr, WcStatus};
use rocinante_stack::wire::icrc::DF;
use rocinante_stack::{Budget, Datagram, EngineConfig, IpId};

/// Bytes of a message.
const MESSAGE: u32 = 1 << 20;
/// Messages in flight.
const DEPTH: u64 = 16;
/// The results.
#[derive(Debug)]
struct Outcome {
    /// Gb/s.
    goodput: f64,
    timeouts: u64,
    again: u64,
    overflowed: u64,
    /// The longest queue after the window had settled, in bytes.
    longest: u64,
    notified: u64,
}

/// Writes messages for `duration`.
fn run(link: Link, held: u32, duration: u64, seed: u64) -> Outcome {
    let setup = Setup {
        mtu: Mtu::Mtu4096,
        timeout: 14,
        arena: MESSAGE as usize,
        budget: Budget { bytes: 64 << 20, datagrams: 4096 },
        held,
        ..Setup::default()
    };
    let mut ends = [End::new(1, &setup), End::new(2, &setup)];
    let [a, b] = [ends[0].qpn, ends[1].qpn];
    ends[0].connect(a, 0, b, &setup);
    ends[1].connect(b, 1, a, &setup);
    let keys = [0, 1].map(|at: usize| {
        let host = &mut ends[at].host;
        host.register(0, u64::from(MESSAGE), rocinante_stack::mem::Access::ALL)
    });
    let mut lanes = [Lane::new(link, 2 * seed + 1), Lane::new(link, 2 * seed + 2)];
    let list = [Sge { addr: BASE, len: MESSAGE, lkey: keys[0] }];
    let op = SendOp::Write { remote: BASE, rkey: keys[1], imm: None };
    let post = |end: &mut End, wr_id| {
        let wr = SendWr::new(op, SendData::Sges(&list)).wr_id(wr_id);
        end.engine.post_send(end.qpn, &wr, &mut end.host).expect("room");
    };
    (0..DEPTH).for_each(|wr_id| post(&mut ends[0], wr_id));
    let (mut now, mut posted, mut done) = (1_000, DEPTH, 0);
    while now < duration {
        for at in [0, 1] {
            let (end, lane) = (&mut ends[at], &mut lanes[at]);
            end.engine.poll_transmit(Time(now), 1 << 20, &mut end.host, &mut end.out);
            end.out.packets.drain(..).for_each(|packet| lane.take(now, packet));
        }
        let arrivals = lanes.iter().filter_map(|lane| Some(lane.arrivals.front()?.0));
        let timers = ends.iter().filter_map(|end| Some(end.engine.poll_timeout()?.0));
        now = arrivals.chain(timers).min().expect("something is always under way").max(now);
        for at in [0, 1] {
            let (src, dst) = (ends[at].addr, ends[1 - at].addr);
            let end = &mut ends[1 - at];
            while let Some((packet, tos)) = lanes[at].next(now) {
                let ip_id = IpId::Exact { id: 0, flags: DF };
                let (bytes, src_port) = (&packet[..], PORT);
                let hop_limit = None;
                let datagram = Datagram { bytes, src, dst, src_port, ip_id, tos, hop_limit };
                end.engine.handle_datagram(Time(now), &datagram, &mut end.host);
            }
            ends[at].engine.handle_timeout(Time(now), &mut ends[at].host);
        }
        for cqe in std::mem::take(&mut ends[0].host.completions) {
            assert_eq!(cqe.status, WcStatus::Success);
            done += u64::from(MESSAGE);
            post(&mut ends[0], posted);
            posted += 1;
        }
    }
    let counters = ends[0].engine.counters();

    Outcome {
        goodput: done as f64 * 8.0 / now as f64,
        timeouts: counters.local_ack_timeout_err,
        again: counters.retransmitted_pkts,
        overflowed: lanes[0].overflowed,
        longest: lanes[0].longest,
        notified: counters.rcvd_cnp,
    }
}

#[test]
fn goodput_times_loss_times_delay() {
    let mut table = String::new();
    writeln!(table, "1 MiB WRITEs on one queue pair, path MTU 4096, 10 Gb/s, a queue of one RTT (64 KiB at least), independent loss per packet").unwrap();
    writeln!(
        table,
        "{:>14} {:>8} {:>8} {:>9} {:>7} {:>9} {:>8} {:>9}",
        "repeat", "RTT ms", "loss %", "Gb/s", "ratio", "timeouts", "again", "overflow"
    )
    .unwrap();
    // Go back N, which hardware and rxe understand; and selective repeat, between two Rocinantes.
    let repeats = [("go back N", 0), ("selective", EngineConfig::default().reorder_packets_max)];
    for ((repeat, held), rtt) in
        repeats.iter().flat_map(|repeat| [0, 1, 10].map(|rtt| (*repeat, rtt)))
    {
        let delay = rtt * 500_000;
        let rate: u64 = 10_000_000_000;
        let queue = (rate / 8 * rtt / 1000).max(65_536 * 4);
        let mut lossless = None;
        for loss in [0, 100, 1_000, 10_000, 50_000] {
            let link = Link { rate, delay, queue, loss, marks: u64::MAX };
            let result = run(link, held, 400_000_000, 7);
            let best = *lossless.get_or_insert(result.goodput);
            writeln!(
                table,
                "{repeat:>14} {rtt:>8} {:>8} {:>9.3} {:>6.1}% {:>9} {:>8} {:>9}",
                loss as f64 / 10_000.0,
                result.goodput,
                100.0 * result.goodput / best,
                result.timeouts,
                result.again,
                result.overflowed
            )
            .unwrap();
        }
    }
    let committed = include_str!("goodput.txt");
    assert!(committed == table, "goodput.txt says otherwise; now it would be:\n{table}");
}

/// A shaper has room for two packets, or for seven: less than the run of fifteen that leaves at
/// once.
#[test]
fn a_queue_shorter_than_a_run_keeps_the_path_full() {
    let selective = EngineConfig::default().reorder_packets_max;
    for (held, least) in [(0, 0.5), (selective, 0.9)] {
        for (rate, packets) in [50_000_000_u64, 200_000_000, 1_000_000_000]
            .into_iter()
            .flat_map(|rate| [2, 7].map(|packets| (rate, packets)))
        {
            let link =
                Link { rate, delay: 10_000, queue: packets * 4200, loss: 0, marks: u64::MAX };
            let result = run(link, held, 4_000_000_000, 7);
            let ratio = result.goodput * 1e9 / rate as f64;
            assert!(ratio > least && result.overflowed > 100, "{held} {link:?}: {result:?}");
            assert!(result.timeouts <= 2, "{held} {link:?}: {result:?}");
        }
    }
}

/// A switch marks packets while more than 200 KB wait, and has room for a megabyte. The queue stays
/// short, and the path stays full. Without marks the window grows until the queue overflows.
#[test]
fn marks_keep_the_queue_short() {
    let link = |marks| {
        let (rate, delay, queue) = (10_000_000_000, 50_000, 1 << 20);
        Link { rate, delay, queue, loss: 0, marks }
    };
    let [marked, unmarked] = [200_000, u64::MAX].map(|marks| run(link(marks), 0, 400_000_000, 7));
    assert!(unmarked.longest > 1_000_000 && unmarked.notified == 0, "{unmarked:?}");
    assert!(marked.notified > 10 && marked.longest < 400_000, "{marked:?}");
    assert!(marked.goodput > 0.95 * unmarked.goodput, "{marked:?} {unmarked:?}");
    eprintln!("{marked:?} {unmarked:?}");
}
