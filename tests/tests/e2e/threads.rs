//! Several threads do everything to the same devices at once: post, poll, sleep, break and destroy
//! queue pairs, take regions away. Each posted request completes exactly once, or goes with its
//! queue pair; nothing hangs, and nothing is stored outside of the named ranges.
//!
//! The number of operations is bounded. A failure names its seed: `ROCINANTE_THREADS_SEED=n` draws
//! the same operations again, though the machine orders them anew. `ROCINANTE_THREADS_TIMES=k`
//! multiplies their number by k.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use parking_lot::{Mutex, RwLock};
use rocinante::device::Backend;
use rocinante::verbs::{ModifyAttr, PostError, QpState, SendOp};
use rocinante::{
    Access, CompChannel, ConnectOptions, Cq, Mr, Qp, RecvWr, VerbsError, Wc, WcStatus,
};
use rocinante_tests::alone::at_rest;
use rocinante_tests::alone_on_each_backend;
use rocinante_tests::fuzz::Random;
use rocinante_tests::harness::{Harness, PATIENCE, Setup, assert_same, pattern, wait_until, wr};

// Only a run that hangs takes so long.
alone_on_each_backend! { 300:
    everything_at_once_udp: Udp storm;
    everything_at_once_packet: Packet storm;
    everything_at_once_afxdp: Xdp storm;
}

const THREADS: usize = 4;
/// Operations of each thread.
const OPERATIONS: usize = 10_000;
const PAIRS: usize = 6;
/// Regions of each side.
const REGIONS: usize = 3;
/// A region has three bands. Requests name only the middle one.
const BAND: usize = 6000;
/// Depth of the queues.
const DEPTH: u32 = 24;

/// Two connected queue pairs. `generation` distinguishes them from earlier ones in the same place.
struct Pair {
    qps: [Qp; 2],
    generation: u64,
}

/// One end: its queue, its regions, and its posted requests.
struct End {
    cq: Cq,
    channel: CompChannel,
    regions: Vec<RwLock<Mr>>,
    /// The generations of the outstanding requests.
    posted: Mutex<HashMap<u64, u64>>,
}

struct Storm {
    ends: [End; 2],
    pairs: Vec<RwLock<Pair>>,
    /// Generations of destroyed queue pairs.
    gone: Mutex<HashSet<u64>>,
    number: AtomicU64,
    succeeded: AtomicU64,
    failed: AtomicU64,
    events: AtomicU64,
    harness: Harness,
}

fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect(name))
}

fn storm(backend: Backend) {
    let drawn = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_micros();
    let seed = setting("ROCINANTE_THREADS_SEED").unwrap_or(drawn as u64);
    let operations = OPERATIONS * setting("ROCINANTE_THREADS_TIMES").unwrap_or(1) as usize;
    println!("ROCINANTE_THREADS_SEED={seed}");
    let storm = Storm::new(backend);
    std::thread::scope(|scope| {
        for thread in 0..THREADS as u64 {
            let (storm, mut random) = (&storm, Random::new(seed.wrapping_add(thread)));
            scope.spawn(move || (0..operations).for_each(|_| storm.one_of_all(&mut random)));
        }
    });
    storm.finish();
}

impl Storm {
    fn new(backend: Backend) -> Self {
        let mut setup = Setup::new(backend);
        // Short, so that no thread waits long for a destroyed target.
        (setup.connect.timeout, setup.connect.retry_cnt) = (10, 2);
        let harness = Harness::new(&setup);
        let ends = [0, 1].map(|at| {
            let side = &harness.sides[at];
            let channel = side.channel();
            let cq = side.ctx.create_cq_with(8192, &channel).unwrap();
            let regions = (0..REGIONS).map(|_| RwLock::new(region(&side.pd))).collect();
            End { cq, channel, regions, posted: Mutex::default() }
        });
        let number = AtomicU64::new(1);
        let pairs = (0..PAIRS).map(|_| RwLock::new(pair(&harness, &ends, &number))).collect();
        let (succeeded, failed, events) = Default::default();
        Self { harness, ends, pairs, gone: Mutex::default(), number, succeeded, failed, events }
    }

    fn one_of_all(&self, random: &mut Random) {
        let at = random.below(2);
        match random.below(1000) {
            0..350 => self.send(at, random),
            350..600 => self.receive(at, random),
            600..900 => self.poll(at),
            900..960 => self.sleep(at, random),
            960..968 => self.deregister(at, random),
            968..971 => self.break_one(at, random),
            971..985 => self.replace(random),
            _ => self.ask(at),
        }
    }

    /// Posts a send request that names a part of one region of either side.
    fn send(&self, at: usize, random: &mut Random) {
        let pair = self.pairs[random.below(PAIRS)].read();
        let here = self.ends[at].regions[random.below(REGIONS)].read();
        let there = self.ends[1 - at].regions[random.below(REGIONS)].read();
        let len = if random.below(2) == 0 { 8 } else { 1 + random.below(BAND - 8) };
        let from = BAND + random.below((BAND - len) / 8) * 8;
        let (remote, rkey) = (there.address() + from as u64, there.rkey());
        let imm = (random.below(4) == 0).then_some([1, 2, 3, 4]);
        let (op, len) = match random.below(6) {
            0 => (SendOp::Send { imm }, len),
            1 | 2 => (SendOp::Write { remote, rkey, imm }, len),
            3 => (SendOp::Read { remote, rkey }, len),
            4 => (SendOp::FetchAdd { remote, rkey, add: 1 }, 8),
            _ => (SendOp::CompareSwap { remote, rkey, compare: 0, swap: 1 }, 8),
        };
        let sges = [here.sge(from, len)];
        self.post(at, &pair, |id| {
            let posted = pair.qps[at].post_send(&[wr(id, op, &sges)]);
            posted.map_err(|failure| failure.error)
        });
    }

    fn receive(&self, at: usize, random: &mut Random) {
        let pair = self.pairs[random.below(PAIRS)].read();
        let here = self.ends[at].regions[random.below(REGIONS)].read();
        let sges = [here.sge(BAND, BAND)];
        self.post(at, &pair, |id| {
            let posted = pair.qps[at].post_recv(&[RecvWr { wr_id: id, sges: &sges }]);
            posted.map_err(|failure| failure.error)
        });
    }

    /// Records a request before it is posted: it may complete before the call returns.
    fn post(&self, at: usize, pair: &Pair, post: impl FnOnce(u64) -> Result<(), PostError>) {
        let id = self.number.fetch_add(1, Ordering::Relaxed);
        self.ends[at].posted.lock().insert(id, pair.generation);
        match post(id) {
            Ok(()) => {}
            Err(PostError::Full) => {
                let noted = self.ends[at].posted.lock().remove(&id);
                assert!(noted.is_some(), "{id} was refused, and completed");
                self.poll(at);
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn poll(&self, at: usize) {
        let mut room = [Wc::default(); 16];
        for wc in self.ends[at].cq.poll(&mut room).unwrap() {
            self.completed(at, wc);
        }
    }

    fn completed(&self, at: usize, wc: &Wc) {
        let noted = self.ends[at].posted.lock().remove(&wc.wr_id);
        assert!(noted.is_some(), "never posted, or completed before: {wc:?}");
        let count = match wc.status {
            WcStatus::Success => &self.succeeded,
            _ => &self.failed,
        };
        count.fetch_add(1, Ordering::Relaxed);
    }

    /// Arms the queue, polls it, and sleeps for a moment.
    fn sleep(&self, at: usize, random: &mut Random) {
        let end = &self.ends[at];
        end.cq.req_notify(random.below(3) == 0).unwrap();
        self.poll(at);
        match end.channel.wait_event(Some(Duration::from_micros(random.below(2000) as u64))) {
            Ok(cq) => {
                assert!(cq == end.cq);
                self.events.fetch_add(1, Ordering::Relaxed);
                self.poll(at);
            }
            Err(VerbsError::TimedOut) => {}
            Err(error) => panic!("{error}"),
        }
    }

    /// Takes a region away; or only the right to it, although requests name it.
    fn deregister(&self, at: usize, random: &mut Random) {
        let mut slot = self.ends[at].regions[random.below(REGIONS)].write();
        check_bands(&slot);
        let old = std::mem::replace(&mut *slot, region(&self.harness.sides[at].pd));
        if random.below(2) == 0 {
            drop(old);
        } else if let Err(rocinante::Refused { value: old, error: why }) = old.deregister() {
            assert!(matches!(why, VerbsError::Busy(_)), "{why}");
            *slot = *old;
        }
    }

    fn break_one(&self, at: usize, random: &mut Random) {
        let pair = self.pairs[random.below(PAIRS)].read();
        pair.qps[at].modify(&ModifyAttr::state(QpState::Err)).unwrap();
    }

    /// Destroys two queue pairs in any state, and connects others in their place.
    fn replace(&self, random: &mut Random) {
        let mut slot = self.pairs[random.below(PAIRS)].write();
        let new = pair(&self.harness, &self.ends, &self.number);
        let old = std::mem::replace(&mut *slot, new);
        self.gone.lock().insert(old.generation);
        drop(old);
    }

    /// Queries that any thread may make at any time.
    fn ask(&self, at: usize) {
        let ctx = &self.harness.sides[at].ctx;
        let _ = ctx.counters();
        let resources = ctx.resources().unwrap();
        assert!(resources.qps >= PAIRS - 1, "{resources:?}");
        while ctx.poll_async_event().is_some() {}
    }

    /// All requests of the queue pairs that still live complete; then nothing is left.
    fn finish(self) {
        for pair in &self.pairs {
            for qp in &pair.read().qps {
                qp.modify(&ModifyAttr::state(QpState::Err)).unwrap();
            }
        }
        let gone = self.gone.lock();
        for at in [0, 1] {
            wait_until("all that was posted completes", || {
                self.poll(at);
                self.ends[at].posted.lock().values().all(|generation| gone.contains(generation))
            });
            assert!(self.ends[at].cq.poll_one().unwrap().is_none());
            self.ends[at].regions.iter().for_each(|region| check_bands(&region.read()));
        }
        let [succeeded, failed, events] = [&self.succeeded, &self.failed, &self.events]
            .map(|count| count.load(Ordering::Relaxed));
        let replaced = gone.len();
        println!("{succeeded} succeeded, {failed} failed, {events} events, {replaced} replaced");
        assert!(succeeded > 0 && failed > 0 && events > 0 && replaced > 0);
        drop(gone);
        self.still_good();
        let Self { harness, ends, pairs, .. } = self;
        drop((pairs, ends));
        for side in &harness.sides {
            assert_eq!(side.ctx.resources(), Some(at_rest()));
        }
    }

    /// The devices work as before.
    fn still_good(&self) {
        let [a, b] = &self.harness.sides;
        // An ACK timeout of 2 s: a late device on a busy machine is no fault.
        let connect = ConnectOptions::default().timeout(19);
        let qps = [a, b].map(|side| side.qp().build().unwrap());
        let [qp, _peer] = self.harness.connect_with(qps, [&connect, &connect]);
        let source = a.pd.allocate(100_000, Access::ALL).unwrap();
        let target = b.pd.allocate(100_000, Access::ALL).unwrap();
        source.write(0, &pattern(100_000, 3));
        let op = SendOp::Write { remote: target.address(), rkey: target.rkey(), imm: None };
        qp.post_send(&[wr(1, op, &[source.sge(0, 100_000)])]).unwrap();
        let wc = a.cq.wait_one(PATIENCE).unwrap();
        assert_eq!((wc.wr_id, wc.status), (1, WcStatus::Success));
        assert_same(&target.to_vec(0, 100_000), &pattern(100_000, 3), "the last WRITE");
    }
}

fn pair(harness: &Harness, ends: &[End; 2], number: &AtomicU64) -> Pair {
    let qps = [0, 1].map(|at| {
        let qp = harness.sides[at].pd.qp(&ends[at].cq, &ends[at].cq).access(Access::ALL);
        qp.max_send_wr(DEPTH).max_recv_wr(DEPTH).build().unwrap()
    });
    Pair { qps: harness.connect(qps), generation: number.fetch_add(1, Ordering::Relaxed) }
}

/// Zeroes between two bands that must never change.
fn region(pd: &rocinante::Pd) -> Mr {
    let region = pd.allocate(3 * BAND, Access::ALL).unwrap();
    region.write(0, &pattern(BAND, 1));
    region.write(2 * BAND, &pattern(BAND, 2));
    region
}

fn check_bands(region: &Mr) {
    assert_same(&region.to_vec(0, BAND), &pattern(BAND, 1), "before the named range");
    assert_same(&region.to_vec(2 * BAND, BAND), &pattern(BAND, 2), "behind the named range");
}
