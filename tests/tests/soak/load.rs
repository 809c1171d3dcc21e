//! Connections with default options beside busy loops that take most of the processors' time: no
//! queue pair may end in an error, and each byte is compared as in the other soak. A ping-pong
//! between two further containers measures how late answers come, and TCP in turn with it.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Stdio;
use std::time::{Duration, Instant};

use rocinante::cm::{Connecting, Connection, Listener, Params};
use rocinante::device::Backend;
use rocinante::verbs::{Sge, WcOpcode};
use rocinante::{Access, Context, Cq, Mr, OpenOptions, RecvWr, SendWr};
use rocinante_lab::{ChildGuard, Container, Lab, LabConfig, exit_with_parent};
use rocinante_tests::alone::{Held, at_rest, myself};
use rocinante_tests::harness::{Family, Setup, Side, address};

use super::party::{PATIENCE, Party};
use super::process::{Options, Process, Role};
use super::survivor::{PORT, nothing_is_left};

/// The containers of the lanes, and of the ping-pong.
const LANES: [usize; 2] = [0, 1];
const PINGS: [usize; 2] = [2, 3];
/// Bytes of a ping.
const SIZE: usize = 64;
/// Receives of each side of the ping-pong.
const RECEIVES: u64 = 4;

/// Makes a process of this program a busy loop: the most seconds that it runs.
const HOG: &str = "ROCINANTE_SOAK_HOG";
/// Makes it the other side of the ping-pong: its address, and the side that asks.
const PONG: &str = "ROCINANTE_SOAK_PONG";

/// Plays this process's part of the load. Returns whether it has one.
pub(super) fn has_a_part(backend: Backend) -> bool {
    if let Ok(seconds) = std::env::var(HOG) {
        exit_with_parent();
        let end = Instant::now() + Duration::from_secs(seconds.parse().unwrap());
        while Instant::now() < end {}
        return true;
    }
    let Ok(role) = std::env::var(PONG) else { return false };
    exit_with_parent();
    let (own, to) = role.split_once(' ').expect("two addresses");
    let ctx = OpenOptions::new().netdev(backend).open(own.parse().unwrap()).unwrap();
    pong(&ctx, to.parse().unwrap());
    true
}

/// Runs lanes and ping-pong for `time`, beside `hogs` busy loops.
pub(super) fn soak(backend: Backend, test: &str, time: Duration, hogs: u32) {
    let lab = Lab::new(&LabConfig { containers: 4, ..LabConfig::default() }).unwrap();
    let setup = Setup::new(backend);
    let [lanes, pings] = [LANES, PINGS].map(|[at, _]| {
        Side::open(lab.container(at).netns(), address(&lab, at, Family::V4), &setup)
    });
    let before = Held::now(&[&lanes.ctx, &pings.ctx]);
    assert_eq!(before.resources, [at_rest(); 2]);
    let mut hogs: Vec<ChildGuard> = (0..hogs).map(|_| hog(test, time)).collect();
    let (tally, [ours, tcp]) = std::thread::scope(|scope| {
        let container = lab.container(PINGS[1]);
        let trips = scope.spawn(|| pings.run(|| ping(&lab, &pings, container, test, time)));
        let tally = work(&lab, &lanes, test, time);
        (tally, trips.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    for hog in &mut hogs {
        assert_eq!(hog.try_wait().unwrap(), None, "a busy loop ended by itself");
    }
    let count = hogs.len();
    drop(hogs);
    let counters = lanes.ctx.counters();
    println!(
        "soak {backend} beside {count} busy loops: {} s: {} operations and {} messages, {:.2} GB \
         compared; {} packets sent again, {} ACK timeouts; longest silence {:.2} s; {}; {SIZE} B there \
         and back: {}; TCP: {}",
        time.as_secs(),
        tally.requests,
        tally.received,
        tally.bytes as f64 / 1e9,
        counters.transport.retransmitted_pkts,
        counters.transport.local_ack_timeout_err,
        tally.silence.as_secs_f64(),
        waited(),
        summary(ours),
        summary(tcp),
    );
    nothing_is_left(&[&lanes, &pings], &before);
    assert_eq!((counters.drops.malformed, counters.drops.icrc), (0, 0), "{counters:?}");
}

fn hog(test: &str, time: Duration) -> ChildGuard {
    // If nothing else ends it, this does.
    let seconds = (time + 4 * PATIENCE).as_secs();
    let mut command = myself(test);
    ChildGuard::spawn(command.env(HOG, seconds.to_string()).stdout(Stdio::null())).unwrap()
}

/// The lanes work for `time`, and end peacefully.
fn work(lab: &Lab, side: &Side, test: &str, time: Duration) -> super::lane::Tally {
    let survivor = SocketAddr::new(side.address, PORT);
    let own = SocketAddr::new(address(lab, LANES[1], Family::V4), PORT);
    let role = Role { own, survivor, life: 1, options: Options::Default };
    side.run(|| {
        let listener = Listener::bind(&side.ctx, survivor, 64).unwrap();
        let mut process = Process::start(lab.container(LANES[1]), test, &role);
        let mut party = Party::accept(&side.ctx, &listener, &role, || process.is_ready());
        let (end, mut stops) = (Instant::now() + time, false);
        party.work(|| {
            if !stops && Instant::now() >= end {
                stops = true;
                process.order("stop");
            }
            stops
        });
        process.end(&party);
        party.tally()
    })
}

/// One end of the ping-pong.
struct Ball {
    ctx: Context,
    qp: Connection,
    cq: Cq,
    mr: Mr,
    received: u64,
}

impl Ball {
    /// A queue pair, which `connect` connects.
    fn new(ctx: &Context, connect: impl FnOnce(rocinante::PreparedQp) -> Connection) -> Self {
        let (pd, cq) = (ctx.alloc_pd(), ctx.create_cq(64).unwrap());
        let mr = pd.allocate(RECEIVES as usize * SIZE, Access::LOCAL_WRITE).unwrap();
        let qp = pd.qp(&cq, &cq).max_send_wr(16).max_recv_wr(RECEIVES as u32);
        let qp = qp.max_inline_data(SIZE as u32).build().unwrap();
        for number in 0..RECEIVES {
            qp.post_recv(&[RecvWr { wr_id: number, sges: &[place(&mr, number)] }]).unwrap();
        }
        Self { ctx: ctx.clone(), qp: connect(qp), cq, mr, received: 0 }
    }

    fn send(&self, bytes: &[u8; SIZE]) {
        self.qp.post_send(&[SendWr::send(bytes)]).unwrap();
    }

    fn receive(&mut self) -> [u8; SIZE] {
        loop {
            let wc = self.cq.wait(Some(PATIENCE)).unwrap();
            let wc = wc.ok().unwrap_or_else(|error| {
                let counters = self.ctx.counters();
                panic!("message {}: {error}: {counters:?}; {}", self.received, waited())
            });
            if wc.opcode != WcOpcode::Recv {
                continue;
            }
            let number = self.received;
            assert_eq!((wc.wr_id, wc.byte_len as usize), (number, SIZE));
            let mut bytes = [0; SIZE];
            self.mr.read((number % RECEIVES) as usize * SIZE, &mut bytes);
            self.received += 1;
            let next = RecvWr { wr_id: number + RECEIVES, sges: &[place(&self.mr, number)] };
            self.qp.post_recv(&[next]).unwrap();
            return bytes;
        }
    }
}

fn place(mr: &Mr, number: u64) -> Sge {
    mr.sge((number % RECEIVES) as usize * SIZE, SIZE)
}

/// How long each round trip took, ours and TCP's, in turns.
fn ping(
    lab: &Lab,
    side: &Side,
    container: &Container,
    test: &str,
    time: Duration,
) -> [Vec<Duration>; 2] {
    let at = SocketAddr::new(side.address, PORT);
    let own = address(lab, PINGS[1], Family::V4);
    let (listener, tcp) =
        (Listener::bind(&side.ctx, at, 1).unwrap(), TcpListener::bind(at).unwrap());
    let mut command = myself(test);
    command.env(PONG, format!("{own} {at}")).stdout(Stdio::null());
    let mut process = container.spawn(&mut command).unwrap();
    let request = listener.request(Some(PATIENCE)).unwrap();
    let mut ball = Ball::new(&side.ctx, |qp| {
        request.accept(qp, &Params::default()).unwrap().wait(PATIENCE).unwrap()
    });
    let mut stream = prompt(tcp.accept().unwrap().0);
    let mut trips = [Vec::new(), Vec::new()];
    let end = Instant::now() + time;
    for number in 0u64.. {
        let (mut bytes, mut back) = ([0; SIZE], [0; SIZE]);
        bytes[..8].copy_from_slice(&number.to_ne_bytes());
        let start = Instant::now();
        stream.write_all(&bytes).unwrap();
        stream.read_exact(&mut back).unwrap();
        let turn = Instant::now();
        assert_eq!(back, bytes, "ping {number} over TCP");
        ball.send(&bytes);
        back = ball.receive();
        let done = Instant::now();
        assert_eq!(back, bytes, "ping {number}");
        trips[0].push(done - turn);
        trips[1].push(turn - start);
        if done >= end {
            break;
        }
    }
    ball.qp.disconnect().unwrap();
    drop(stream);
    let status = process.wait(PATIENCE).unwrap();
    assert!(status.success(), "the other side of the ping-pong: {status}");
    trips
}

/// Sends back each message, over TCP and over Rocinante in turns, until the stream ends.
fn pong(ctx: &Context, to: SocketAddr) {
    let mut ball = Ball::new(ctx, |qp| {
        Connecting::start(qp, to, &Params::default()).unwrap().wait(PATIENCE).unwrap()
    });
    let mut stream = prompt(TcpStream::connect(to).unwrap());
    let mut bytes = [0; SIZE];
    while let Ok(()) = stream.read_exact(&mut bytes) {
        stream.write_all(&bytes).unwrap();
        let bytes = ball.receive();
        ball.send(&bytes);
    }
    ball.qp.wait_disconnected(PATIENCE).unwrap();
}

fn prompt(stream: TcpStream) -> TcpStream {
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Percentiles of round trips.
fn summary(mut trips: Vec<Duration>) -> String {
    trips.sort_unstable();
    let last = trips.len() - 1;
    let us = |part: f64| trips[(last as f64 * part) as usize].as_secs_f64() * 1e6;
    format!(
        "{} round trips, median {:.0} µs, p99 {:.0} µs, p99.9 {:.0} µs, longest {:.0} µs",
        trips.len(),
        us(0.5),
        us(0.99),
        us(0.999),
        us(1.0)
    )
}

/// How long the background threads of this process's devices ran, and how long they waited for a
/// processor, from `/proc/PID/task/TID/schedstat`.
fn waited() -> String {
    let mut sum = [0; 3];
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let task = task.unwrap().path();
        // A thread may have ended since.
        let read = |name: &str| std::fs::read_to_string(task.join(name)).unwrap_or_default();
        if read("comm").starts_with("roce-") {
            for (sum, word) in sum.iter_mut().zip(read("schedstat").split_whitespace()) {
                *sum += word.parse::<u64>().unwrap();
            }
        }
    }
    let [ran, waited, times] = sum;
    let mean = waited / times.max(1);
    format!(
        "background threads ran for {:.2} s, and waited {times} times for a processor, {:.1} ms on average",
        ran as f64 / 1e9,
        mean as f64 / 1e6
    )
}
