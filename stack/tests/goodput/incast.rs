//! Many hosts that send to one through a switch: each has a link of its own, and the port to the
//! receiver has a finite queue.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr};

use rocinante_stack::mem::{Access, Sge};
use rocinante_stack::types::{Mtu, Time};
use rocinante_stack::verbs::{SendData, SendOp, SendWr, WcStatus};
use rocinante_stack::wire::icrc::{DF, Summed, Template};
use rocinante_stack::{
    Budget, Datagram, Engine, EngineConfig, IpId, PeerAddress, PeerKind, TxSink,
};

use crate::common::{BASE, Host, PORT, Setup, addr, qp_init, steps, template};
use crate::lane::{Lane, Link};

/// Bytes of a message, and messages of each sender in flight.
const MESSAGE: u32 = 64 << 10;
const DEPTH: u64 = 16;
const RATE: u64 = 10_000_000_000;
/// From a host to the switch, in nanoseconds.
const DELAY: u64 = 5_000;
const DURATION: u64 = 1_000_000_000;
/// From then on messages count.
const BEGIN: u64 = 600_000_000;
/// A host sends this much late at most, in nanoseconds. Without it packets keep a phase in which
/// one host always finds room in the queue, and another never (Floyd and Jacobson, "On traffic
/// phase effects in packet-switched gateways", 1992).
const JITTER: u64 = 4_000;

/// A host: an engine, and a path to each of its peers.
struct Node {
    engine: Engine,
    host: Host,
    out: Paths,
    addr: IpAddr,
}

/// Packets that leave, each with its path.
struct Paths {
    templates: Vec<Template>,
    packets: VecDeque<(usize, Vec<u8>)>,
}

impl TxSink for Paths {
    fn send<E>(
        &mut self,
        path: u32,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<Option<Summed>, E>,
    ) -> Result<bool, E> {
        let (mut packet, path) = (vec![0; len], path as usize);
        let summed = fill(&mut packet)?;
        self.templates[path].seal_around(&mut packet, summed);
        self.packets.push_back((path, packet));
        Ok(true)
    }
}

impl Node {
    fn new(addr: IpAddr, peers: &[IpAddr], setup: &Setup) -> Self {
        let config = EngineConfig {
            own_budget: setup.budget,
            own_queue: PeerKind::announced(setup.budget, None).queue(),
            port_mtu: setup.mtu,
            reorder_packets_max: setup.held,
            ..EngineConfig::default()
        };
        let templates = peers.iter().map(|peer| template(addr, *peer)).collect();
        let out = Paths { templates, packets: VecDeque::new() };
        Self { engine: Engine::new(config), host: Host::new(setup.arena), out, addr }
    }

    fn send(&mut self, now: u64) -> impl Iterator<Item = (usize, Vec<u8>)> + '_ {
        self.engine.poll_transmit(Time(now), 1 << 20, &mut self.host, &mut self.out);
        self.out.packets.drain(..)
    }

    fn receive(&mut self, now: u64, src: IpAddr, bytes: &[u8], tos: u8) {
        let (dst, ip_id) = (self.addr, IpId::Exact { id: 0, flags: DF });
        let datagram = Datagram { bytes, src, dst, src_port: PORT, ip_id, tos, hop_limit: None };
        self.engine.handle_datagram(Time(now), &datagram, &mut self.host);
    }
}

#[derive(Debug, Default)]
struct Outcome {
    /// Bytes of each sender after its window has settled.
    shares: Vec<u64>,
    sent: u64,
    again: u64,
    timeouts: u64,
    overflowed: u64,
    /// Queue pairs that ended by error.
    errors: u64,
}

fn run(senders: usize, buffer: u64, marks: u64) -> Outcome {
    let setup = Setup {
        mtu: Mtu::Mtu4096,
        arena: MESSAGE as usize,
        budget: Budget { bytes: 16 << 20, datagrams: 4096 },
        held: EngineConfig::default().reorder_packets_max,
        ..Setup::default()
    };
    let to = addr(1);
    let ips: Vec<IpAddr> = (0..senders as u16)
        .map(|at| IpAddr::V4(Ipv4Addr::from(0x0a01_0000 + u32::from(at))))
        .collect();
    let mut receiver = Node::new(to, &ips, &setup);
    let region = receiver.host.register(0, u64::from(MESSAGE), Access::ALL);
    let op = SendOp::Write { remote: BASE, rkey: region, imm: None };
    let mut nodes: Vec<_> = (0..)
        .zip(&ips)
        .map(|(at, ip)| {
            let mut node = Node::new(*ip, &[to], &setup);
            let key = node.host.register(0, u64::from(MESSAGE), Access::ALL);
            let own = node.engine.create_qp(&qp_init(&setup), 0x100).expect("room");
            let its = receiver.engine.create_qp(&qp_init(&setup), 0x1000 + at).expect("room");
            for attr in steps(0, *ip, its, &setup) {
                node.engine.modify_qp(own, &attr, &mut node.host).expect("a legal change");
            }
            for mut attr in steps(1, to, own, &setup) {
                let peer = |it: PeerAddress| PeerAddress { remote: *ip, path: at, ..it };
                attr.peer = attr.peer.map(peer);
                receiver.engine.modify_qp(its, &attr, &mut receiver.host).expect("a legal change");
            }
            (node, own, key)
        })
        .collect();
    let post = |(node, qpn, key): &mut (Node, _, _), wr_id| {
        let list = [Sge { addr: BASE, len: MESSAGE, lkey: *key }];
        let wr = SendWr::new(op, SendData::Sges(&list)).wr_id(wr_id);
        node.engine.post_send(*qpn, &wr, &mut node.host).expect("room");
    };
    nodes.iter_mut().for_each(|node| (0..DEPTH).for_each(|wr_id| post(node, wr_id)));
    let link = Link { rate: RATE, delay: DELAY, queue: u64::MAX >> 8, loss: 0, marks: u64::MAX };
    let lanes = |seed| (0..senders as u64).map(move |at| Lane::new(link, 2 * at + seed)).collect();
    let (mut up, mut back): (Vec<Lane>, Vec<Lane>) = (lanes(1), lanes(2));
    let mut port = Lane::new(Link { queue: buffer, marks, ..link }, 1 << 20);
    // The sender of each packet in the port, in order.
    let mut through: VecDeque<usize> = VecDeque::new();
    let mut outcome = Outcome { shares: vec![0; senders], ..Outcome::default() };
    let mut random = fastrand::Rng::with_seed(7);
    let mut now = 1_000;
    while now < DURATION {
        for (at, (node, ..)) in nodes.iter_mut().enumerate() {
            node.send(now).for_each(|(_, packet)| up[at].take(now + random.u64(..JITTER), packet));
        }
        receiver.send(now).for_each(|(path, packet)| back[path].take(now, packet));
        let lanes = up.iter().chain(&back).chain([&port]);
        let arrivals = lanes.filter_map(|lane| Some(lane.arrivals.front()?.0));
        let engines = nodes.iter().map(|(node, ..)| &node.engine).chain([&receiver.engine]);
        let timers = engines.filter_map(|engine| Some(engine.poll_timeout()?.0));
        now = arrivals.chain(timers).min().expect("something is under way").max(now);
        for at in 0..senders {
            while let Some((packet, _)) = up[at].next(now) {
                let before = port.arrivals.len();
                port.take(now, packet);
                through.extend((port.arrivals.len() > before).then_some(at));
            }
            while let Some((packet, tos)) = back[at].next(now) {
                nodes[at].0.receive(now, to, &packet, tos);
            }
        }
        while let Some((packet, tos)) = port.next(now) {
            let at = through.pop_front().expect("its sender");
            receiver.receive(now, ips[at], &packet, tos);
        }
        receiver.engine.handle_timeout(Time(now), &mut receiver.host);
        for (at, it) in nodes.iter_mut().enumerate() {
            it.0.engine.handle_timeout(Time(now), &mut it.0.host);
            for cqe in std::mem::take(&mut it.0.host.completions) {
                if cqe.status != WcStatus::Success {
                    // Of the first request; those behind it are flushed.
                    outcome.errors += u64::from(cqe.status == WcStatus::RetryExcErr);
                    continue;
                }
                outcome.shares[at] += if now > BEGIN { u64::from(MESSAGE) } else { 0 };
                post(it, cqe.wr_id + DEPTH);
            }
        }
    }
    for (node, ..) in &nodes {
        let counters = node.engine.counters();
        outcome.again += counters.retransmitted_pkts;
        outcome.timeouts += counters.local_ack_timeout_err;
    }
    outcome.sent = up.iter().map(|lane| lane.taken).sum();
    outcome.overflowed = port.overflowed;
    outcome
}

fn jain(shares: &[u64]) -> f64 {
    let sum: u64 = shares.iter().sum();
    let squares: f64 = shares.iter().map(|share| (*share as f64).powi(2)).sum();
    (sum as f64).powi(2) / (shares.len() as f64 * squares)
}

#[test]
fn many_hosts_share_the_port_of_a_switch() {
    let mut table = String::new();
    writeln!(table, "64 KiB WRITEs of many hosts to one, 16 in flight each, path MTU 4096, links of 10 Gb/s, 5 us to the switch").unwrap();
    writeln!(
        table,
        "{:>8} {:>10} {:>10} {:>7} {:>6} {:>8} {:>9} {:>7}",
        "senders", "buffer KiB", "marks KiB", "Gb/s", "Jain", "again %", "timeouts", "errors"
    )
    .unwrap();
    for (buffer, marks) in
        [(1024, None), (1024, Some(200)), (12 << 10, None), (12 << 10, Some(200))]
    {
        for senders in [2, 16, 64] {
            let result = run(senders, buffer << 10, marks.map_or(u64::MAX, |kib| kib << 10));
            let sum: u64 = result.shares.iter().sum();
            writeln!(
                table,
                "{senders:>8} {buffer:>10} {:>10} {:>7.3} {:>6.3} {:>8.2} {:>9} {:>7}",
                marks.map_or_else(|| "-".into(), |kib: u64| kib.to_string()),
                sum as f64 * 8.0 / (DURATION - BEGIN) as f64,
                jain(&result.shares),
                100.0 * result.again as f64 / result.sent as f64,
                result.timeouts,
                result.errors,
            )
            .unwrap();
        }
    }
    let committed = include_str!("incast.txt");
    assert!(committed == table, "incast.txt says otherwise; now it would be:\n{table}");
}
