//! The cost of attacks over real namespaces: a flood of damaged packets from the peer's address,
//! and guesses of keys.
//!
//! `cargo bench -p rocinante-benches --bench flood [-- BACKEND]`, as root. Goodput is that of 64
//! KiB WRITEs on one queue pair, measured in turns: without a flood, with the same flood to a third
//! device that drops it unread (the cost of the flood's sender and of the kernel), and with the
//! flood at the queue pair. The ratio is that of the last two. The processor time is that of the
//! process without the flooding thread, per damaged packet, on an otherwise idle device.

mod writes;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rocinante::device::Backend;
use rocinante::verbs::{Psn, QpType, SendOp};
use rocinante::{Access, ConnectOptions, Mr, Qp, WcStatus};
use rocinante_stack::types::{Key, Pkey};
use rocinante_stack::wire::{Bth, Opcode};
use rocinante_tests::attacker::{Attacker, packet};
use rocinante_tests::harness::{Family, Harness, Setup, address, wr};

/// Bytes of a message, and messages in flight.
const MESSAGE: usize = 64 << 10;
const DEPTH: u64 = 16;
/// Payload of a damaged packet.
const PAYLOAD: usize = 1024;
/// Duration of one measurement, and number of measurements.
const TIME: Duration = Duration::from_millis(300);
const TURNS: usize = 5;
/// Damaged packets per second; `None` for the highest rate of a thread.
const RATES: [Option<u64>; 3] = [Some(10_000), Some(50_000), None];

fn main() {
    if !writes::is_wanted() {
        return;
    }
    println!(
        "| backend | flood, 10³/s | came, 10³/s | alone, Gb/s | flood elsewhere | flood here | ratio | µs for each |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    let asked = |backend: &Backend| std::env::args().any(|argument| argument == backend.name());
    let mut backends = vec![Backend::Udp, Backend::Packet, Backend::Xdp];
    if backends.iter().any(asked) {
        backends.retain(asked);
    }
    for &backend in &backends {
        let scene = Scene::new(backend);
        RATES.iter().for_each(|rate| println!("{}", scene.row(backend, *rate)));
    }
    println!(
        "\n| backend | guesses of keys, 10³/s: each a connection | each a packet of an unreliable connection |"
    );
    println!("|---|---|---|");
    for backend in backends {
        let [connections, packets] = guesses(backend).map(|rate| rate / 1e3);
        println!("| `{backend}` | {connections:.1} | {packets:.0} |");
    }
}

/// Two devices with a connection, an attacker, and a socket that is never read.
struct Scene {
    qps: [Qp; 2],
    regions: [Mr; 2],
    /// Of the queue pair, and of the other address.
    attackers: [Attacker; 2],
    damaged: [Vec<u8>; 2],
    _unread: std::net::UdpSocket,
    harness: Harness,
}

impl Scene {
    fn new(backend: Backend) -> Self {
        let mut setup = Setup::new(backend);
        setup.containers = 4;
        setup.connect = ConnectOptions::default().timeout(18);
        let harness = Harness::new(&setup);
        let qps = harness.pair();
        let [a, b] = &harness.sides;
        let regions = [a, b].map(|side| side.pd.allocate(MESSAGE, Access::ALL).expect("memory"));
        let lab = harness.lab();
        let other = address(lab, 3, Family::V4);
        let bind = || std::net::UdpSocket::bind((other, 4791)).expect("a socket");
        let unread = lab.container(3).run(bind).expect("a namespace");
        let bth = Bth::new(Opcode::RC_SEND_ONLY, Pkey::DEFAULT, qps[1].qpn(), Psn::new(1));
        let attackers = [b.address, other].map(|to| Attacker::new(lab.container(2), to));
        let damaged = attackers.each_ref().map(|attacker| {
            attacker.whole(a.address, &attacker.damaged(a.address, packet(&bth, PAYLOAD)))
        });
        Self { harness, qps, regions, attackers, damaged, _unread: unread }
    }

    fn row(&self, backend: Backend, rate: Option<u64>) -> String {
        let mut goodput = [const { Vec::new() }; 3];
        let mut came = Vec::new();
        for _ in 0..TURNS {
            goodput[0].push(self.goodput());
            for (at, index) in [(1, 1), (0, 2)] {
                let before = self.dropped();
                let start = Instant::now();
                self.flood(at, rate, || goodput[index].push(self.goodput()));
                if at == 0 {
                    came.push((self.dropped() - before) as f64 / start.elapsed().as_secs_f64());
                }
            }
        }
        let each = self.processor_time(rate);
        let [alone, elsewhere, here] = goodput.map(median);
        let (came, ratio) = (median(came) / 1e3, here / elsewhere);
        let wanted = rate.map_or("most".into(), |rate| (rate / 1000).to_string());
        format!(
            "| `{backend}` | {wanted} | {came:.0} | {alone:.2} | {elsewhere:.2} | {here:.2} | {ratio:.2} | {each:.2} |"
        )
    }

    fn dropped(&self) -> u64 {
        self.harness.sides[1].ctx.counters().drops.icrc
    }

    /// Goodput in Gb/s.
    fn goodput(&self) -> f64 {
        let [mine, its] = &self.regions;
        writes::goodput(&self.harness.sides[0], &self.qps[0], [mine, its], DEPTH, TIME)
    }

    /// Does `work` while another thread sends damaged packets.
    fn flood(&self, at: usize, rate: Option<u64>, work: impl FnOnce()) {
        let stop = AtomicBool::new(false);
        let sent = AtomicU64::new(0);
        std::thread::scope(|scope| {
            let flood = scope.spawn(|| {
                let start = Instant::now();
                while !stop.load(Ordering::Relaxed) {
                    let due = rate.map(|rate| (start.elapsed().as_secs_f64() * rate as f64) as u64);
                    if due.is_some_and(|due| sent.load(Ordering::Relaxed) >= due) {
                        std::thread::sleep(Duration::from_micros(200));
                        continue;
                    }
                    self.attackers[at].send_whole(&self.damaged[at]);
                    sent.fetch_add(1, Ordering::Relaxed);
                }
            });
            work();
            stop.store(true, Ordering::Relaxed);
            flood.join().expect("no panic");
        });
    }

    /// Microseconds of the process per damaged packet that it examined, with nothing else to do.
    fn processor_time(&self, rate: Option<u64>) -> f64 {
        let before = self.dropped();
        let mut spent = 0;
        self.flood(0, rate, || {
            let threads = others();
            std::thread::sleep(2 * TIME);
            // The flooding thread is the newest.
            spent = threads.iter().map(|(thread, then)| nanos(thread) - then).sum();
        });
        spent as f64 / 1e3 / (self.dropped() - before) as f64
    }
}

/// The threads of this process except the newest, and their processor time in ns.
fn others() -> Vec<(PathBuf, u64)> {
    let tasks = std::fs::read_dir("/proc/self/task").expect("procfs");
    let mut threads: Vec<_> = tasks.map(|task| task.expect("procfs").path()).collect();
    threads.sort_by_key(|path| path.file_name().and_then(|id| id.to_str()?.parse::<u32>().ok()));
    threads.pop();
    threads.into_iter().map(|path| (path.clone(), nanos(&path))).collect()
}

/// Processor time in ns, from `schedstat` (Documentation/scheduler/sched-stats.rst).
fn nanos(thread: &std::path::Path) -> u64 {
    let text = std::fs::read_to_string(thread.join("schedstat")).unwrap_or_default();
    text.split(' ').next().and_then(|word| word.parse().ok()).unwrap_or(0)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Keys that a connected peer can try per second: with a connection for each, and on an unreliable
/// connection.
fn guesses(backend: Backend) -> [f64; 2] {
    let harness = Harness::new(&Setup::new(backend));
    let [a, b] = &harness.sides;
    let target = b.pd.allocate(4096, Access::ALL).expect("memory");
    let mine = a.pd.allocate(64, Access::LOCAL_WRITE).expect("memory");
    let refused = || b.ctx.counters().transport.remote_access_errors;
    let wrong = |guess: u64| Key(target.rkey().0 ^ (guess as u32 | 1));
    let op = |guess| SendOp::Write { remote: target.address(), rkey: wrong(guess), imm: None };
    let list = [mine.sge(0, 64)];
    let (start, mut tried) = (Instant::now(), 0);
    while start.elapsed() < TIME {
        let [qp, _peer] = harness.pair();
        qp.post_send(&[wr(tried, op(tried), &list)]).expect("room");
        a.complete(tried, WcStatus::RemAccessErr);
        tried += 1;
    }
    let connections = refused() as f64 / start.elapsed().as_secs_f64();
    let prepared = [a, b].map(|side| side.qp().qp_type(QpType::Uc).build().expect("a queue pair"));
    let [qp, _peer] = harness.connect(prepared);
    let before = refused();
    let (start, mut posted, mut done) = (Instant::now(), 0, 0);
    while start.elapsed() < TIME {
        while posted < done + 256 {
            let wrs: [_; 32] = std::array::from_fn(|at| wr(0, op(posted + at as u64), &list));
            qp.post_send(&wrs).expect("room");
            posted += 32;
        }
        done += u64::from(a.next().status == WcStatus::Success);
    }
    [connections, (refused() - before) as f64 / start.elapsed().as_secs_f64()]
}
