//! Random loss on the host's bridge, in whole super-packets or datagram by datagram. Each SEND
//! arrives once and in order, and each fetch-and-add is executed once.
//!
//! The unit of loss is the kernel's packet. With super-packets one loss takes up to a whole run of
//! datagrams; with segmentation switched off it takes one datagram.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rocinante::device::Backend;
use rocinante::verbs::{Mtu, SendOp, WcOpcode};
use rocinante::{Access, Mr, Qp, RecvWr};
use rocinante_lab::{Match, Rule};
use rocinante_stack::Budget;
use rocinante_tests::harness::{Harness, Setup, Side, assert_same, pattern, wr};
use rocinante_tests::oracles::Oracle;
use rocinante_tests::{need, on_each_backend, require};

on_each_backend!(
    super_packets_1_percent + nft + ethtool,
    datagrams_1_percent + nft + ethtool,
    super_packets_10_percent + nft + ethtool,
    datagrams_10_percent + nft + ethtool,
    congestion_is_notified_to_its_sender,
);

fn super_packets_1_percent(backend: Backend) {
    run(backend, 1.0, true);
}

fn datagrams_1_percent(backend: Backend) {
    run(backend, 1.0, false);
}

fn super_packets_10_percent(backend: Backend) {
    run(backend, 10.0, true);
}

fn datagrams_10_percent(backend: Backend) {
    run(backend, 10.0, false);
}

/// A rule marks packets as a congested switch would. The sender is notified of its congestion, and
/// everything arrives.
fn congestion_is_notified_to_its_sender(backend: Backend) {
    let mut setup = Setup::new(backend);
    setup.connect.traffic_class = 3;
    let harness = Harness::new(&setup);
    let [qp, _peer] = harness.pair();
    let [a, b] = &harness.sides;
    let (mine, theirs) = (mapped(a, 1 << 20), mapped(b, 1 << 20));
    let op = SendOp::Write { remote: theirs.address(), rkey: theirs.rkey(), imm: None };
    for round in 0..20 {
        qp.post_send(&[wr(round, op, &[mine.sge(0, 1 << 20)])]).unwrap();
        a.succeed(round);
    }
    let [told, teller] = [a, b].map(|side| side.ctx.counters().transport);
    assert!(teller.rcvd_ecn_ce > 5000 && teller.sent_cnp > 0, "{teller:?}");
    assert!(teller.sent_cnp < teller.rcvd_ecn_ce / 4, "in turns: {teller:?}");
    assert!(told.rcvd_cnp > 0, "{told:?}");
}

#[test]
fn a_packet_receiver_with_an_overloaded_queue_slows_its_senders() {
    overloaded(Backend::Packet);
}

#[test]
fn an_afxdp_receiver_with_an_overloaded_queue_slows_its_senders() {
    overloaded(Backend::Xdp);
}

/// A sender that takes the receive queue for many times as large as it is stands for many that do
/// not know of each other. It is notified without a mark of a switch, and everything arrives. (A
/// socket holds more than can be sent while the program pauses.)
fn overloaded(backend: Backend) {
    require!(need::backend(backend));
    let mut setup = Setup::new(backend)
        .mtu(Mtu::Mtu1024)
        .may_break(Oracle::Retransmissions, "the receive queue overflows");
    setup.segmentation = false;
    let harness = Harness::new(&setup);
    let qps = harness.sides.each_ref().map(|side| side.qp().build().unwrap());
    let mut ends = [qps[0].endpoint(), qps[1].endpoint()];
    let announced = ends[1].budget;
    let huge = Budget { bytes: announced.bytes * 16, datagrams: announced.datagrams * 16 };
    ends[1] = ends[1].budget(huge);
    let [qp, _peer] = harness.connect_to(qps, ends, [&setup.connect; 2]);
    let [a, b] = &harness.sides;
    let (mine, theirs) = (mapped(a, 1 << 22), mapped(b, 1 << 22));
    let op = SendOp::Write { remote: theirs.address(), rkey: theirs.rkey(), imm: None };
    let counters = || harness.sides.each_ref().map(|side| side.ctx.counters().transport);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                qp.post_send(&[wr(1, op, &[mine.sge(0, 1 << 22)])]).unwrap();
                a.succeed(1);
            }
        });
        // The background thread leaves the device to a program that polls. This one pauses.
        let end = Instant::now() + PATIENCE;
        while counters()[1].rcvd_overload == 0 && Instant::now() < end {
            for _ in 0..100 {
                assert!(b.cq.poll_one().unwrap().is_none());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        done.store(true, Ordering::Relaxed);
    });
    let [told, teller] = counters();
    assert!(teller.rcvd_overload > 0, "the queue was never overloaded: {told:?} {teller:?}");
    assert!(teller.sent_cnp > 0 && teller.rcvd_ecn_ce == 0, "{teller:?}");
    assert!(told.rcvd_cnp > 0, "{told:?}");
}

fn mapped(side: &Side, len: usize) -> Mr {
    side.pd.allocate(len, Access::ALL).unwrap()
}

/// The fewest packets that the rule must drop.
const DROPS_MIN: u64 = 30;
/// Numbered SENDs in flight.
const WINDOW: u64 = 64;
/// The longest SEND.
const LONGEST: usize = 40_000;
/// Rounds between two looks at the rule's counter.
const ROUND: u64 = 2 * WINDOW;
/// A run without enough drops in this time would never end.
const PATIENCE: Duration = Duration::from_secs(60);

fn run(backend: Backend, percent: f64, whole: bool) {
    let mut setup = Setup::new(backend)
        .mtu(Mtu::Mtu1024)
        .may_break(Oracle::Retransmissions, "the bridge drops packets");
    setup.segmentation = whole;
    // 0.3 s, eight times: on a busy machine a side may not run for long. A tail probe recovers a
    // loss at the very end sooner.
    setup.connect = setup.connect.timeout(16).retry_cnt(7);
    let harness = Harness::new(&setup);
    let lose = harness.lab().lose(&Match::roce(), percent).expect("a rule");
    let [qp, peer] = harness.pair();
    let mut stream = Stream::new(&harness);
    let deadline = Instant::now() + PATIENCE;
    while dropped(&lose) < DROPS_MIN {
        assert!(Instant::now() < deadline, "{} drops only", dropped(&lose));
        stream.round(&harness, &qp, &peer);
    }
    let drops = dropped(&lose);
    lose.remove().expect("no rule");
    // Again, without loss.
    stream.round(&harness, &qp, &peer);
    stream.finish(&harness);
    let [a, b] = harness.sides.each_ref().map(|side| side.ctx.counters());
    let again = a.transport.retransmitted_pkts + b.transport.duplicate_request;
    assert!(again > 0, "{drops} drops, and nothing was sent again: {a:?} {b:?}");
    assert_eq!((a.drops.icrc, b.drops.icrc), (0, 0));
}

fn dropped(rule: &Rule) -> u64 {
    rule.counter().expect("a counter").packets
}

/// Numbered SENDs, with fetch-and-adds and READs between them.
struct Stream {
    source: Mr,
    results: Mr,
    target: Mr,
    counter: Mr,
    /// SENDs so far.
    sends: u64,
    /// Fetch-and-adds so far.
    adds: u64,
    bytes: Vec<u8>,
}

impl Stream {
    fn new(harness: &Harness) -> Self {
        let [a, b] = &harness.sides;
        let bytes = pattern(LONGEST + 1024, 9);
        let source = a.pd.allocate(bytes.len() + 8 * WINDOW as usize, Access::NONE).unwrap();
        source.write(0, &bytes);
        Self {
            source,
            results: a.pd.allocate(8 * ROUND as usize, Access::LOCAL_WRITE).unwrap(),
            target: b.pd.allocate(WINDOW as usize * LONGEST, Access::LOCAL_WRITE).unwrap(),
            counter: b.pd.allocate(8, Access::ALL).unwrap(),
            sends: 0,
            adds: 0,
            bytes,
        }
    }

    /// Offset in the source and length of the payload of SEND `number`: mostly short, some long.
    fn payload(number: u64) -> (usize, usize) {
        let mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        let len = match mixed % 8 {
            0 => LONGEST - (mixed / 8) as usize % 5000,
            1 | 2 => 1020 + (mixed / 8) as usize % 8,
            _ => (mixed / 8) as usize % 300,
        };
        (number as usize % 1024, len.max(8))
    }

    fn round(&mut self, harness: &Harness, qp: &Qp, peer: &Qp) {
        let [a, b] = &harness.sides;
        let (first, until) = (self.sends, self.sends + ROUND);
        let first_add = self.adds;
        for number in first..first + WINDOW {
            self.receive(peer, number);
        }
        let (mut received, mut completed, mut posted) = (first, 0, first);
        let mut seen_adds = first_add;
        let expected_completions = 2 * ROUND;
        while received < until || completed < expected_completions {
            // At most one for each receive. The bytes of a SEND are not overwritten before it has
            // completed, because it may be retransmitted.
            let sent = first + completed / 2;
            while posted < until && posted < received.min(sent) + WINDOW {
                self.post(qp, posted);
                posted += 1;
            }
            if let Some(wc) = a.cq.poll_one().unwrap() {
                assert_eq!(wc.status, rocinante::WcStatus::Success, "after {completed}: {wc:?}");
                if wc.opcode == WcOpcode::FetchAdd {
                    // In order, and each found the value that the one before it left: none was
                    // lost or executed twice.
                    assert_eq!(wc.wr_id, seen_adds);
                    let at = 8 * (wc.wr_id % ROUND) as usize;
                    assert_eq!(self.results.load_u64(at), seen_adds, "the value it found");
                    seen_adds += 1;
                }
                completed += 1;
            }
            if let Some(wc) = b.cq.poll_one().unwrap() {
                assert_eq!(wc.status, rocinante::WcStatus::Success);
                assert_eq!(wc.wr_id, received, "SENDs arrive in order");
                self.verify(received, wc.byte_len as usize);
                received += 1;
                if received + WINDOW <= until {
                    self.receive(peer, received + WINDOW - 1);
                }
            }
        }
        self.sends = until;
        self.adds = seen_adds;
        assert_eq!(self.counter.load_u64(0), self.adds);
    }

    fn receive(&self, peer: &Qp, number: u64) {
        let sges = [self.target.sge((number % WINDOW) as usize * LONGEST, LONGEST)];
        peer.post_recv(&[RecvWr { wr_id: number, sges: &sges }]).unwrap();
    }

    /// A SEND that carries its number, and a fetch-and-add.
    fn post(&self, qp: &Qp, number: u64) {
        let (from, len) = Self::payload(number);
        let label = self.bytes.len() + 8 * (number % WINDOW) as usize;
        self.source.write(label, &number.to_le_bytes());
        let sges = [self.source.sge(label, 8), self.source.sge(from, len - 8)];
        let (remote, rkey) = (self.counter.address(), self.counter.rkey());
        let add = SendOp::FetchAdd { remote, rkey, add: 1 };
        let result = [self.results.sge(8 * (number % ROUND) as usize, 8)];
        let list = [wr(number, SendOp::Send { imm: None }, &sges), wr(number, add, &result)];
        qp.post_send(&list).unwrap();
    }

    fn verify(&self, number: u64, len: usize) {
        let (from, expected) = Self::payload(number);
        assert_eq!(len, expected, "length of SEND {number}");
        let found = self.target.to_vec((number % WINDOW) as usize * LONGEST, len);
        assert_eq!(found[..8], number.to_le_bytes(), "the number of SEND {number}");
        assert_same(&found[8..], &self.bytes[from..from + len - 8], &format!("SEND {number}"));
    }

    fn finish(&self, harness: &Harness) {
        assert_eq!(self.sends, self.adds);
        for side in &harness.sides {
            side.quiet(Duration::from_millis(5));
        }
    }
}
