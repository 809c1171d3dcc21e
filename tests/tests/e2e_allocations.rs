//! After warm-up, no thread of the process allocates: not to post, receive or complete.
//!
//! This is the only test of its process, because it counts the allocations of all threads.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rocinante::verbs::SendOp;
use rocinante::{Access, Mr, Qp, RecvWr, WcStatus};
use rocinante_tests::harness::{Harness, PATIENCE, Setup, wr};
use rocinante_tests::{need, require};

/// The system's allocator; it counts allocations while counting is on.
struct Counting;

static COUNTS: AtomicBool = AtomicBool::new(false);
static COUNT: AtomicU64 = AtomicU64::new(0);
static LARGEST: AtomicU64 = AtomicU64::new(0);

impl Counting {
    fn note(layout: Layout) {
        if COUNTS.load(Ordering::Relaxed) {
            COUNT.fetch_add(1, Ordering::Relaxed);
            LARGEST.fetch_max(layout.size() as u64, Ordering::Relaxed);
        }
    }
}

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::note(layout);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) };
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        Self::note(layout);
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// How often each operation is done.
const TIMES: u64 = 10_000;
/// Long enough to include chores that run once a second.
const AT_LEAST: Duration = Duration::from_millis(2500);
const OPS: usize = 7;
/// Outstanding requests.
const WINDOW: u64 = 64;

#[test]
fn nothing_is_allocated_once_warm() {
    require!(need::lab());
    block_once();
    let mut found = Vec::new();
    for backend in need::backends("e2e_allocations::nothing_is_allocated_once_warm") {
        let harness = Harness::new(&Setup::new(backend));
        let qps = harness.pair();
        let regions =
            harness.sides.each_ref().map(|side| side.pd.allocate(REGION, Access::ALL).unwrap());
        run(&harness, &qps, &regions, 500, Duration::from_millis(1200));
        let allocated = || {
            COUNT.store(0, Ordering::SeqCst);
            LARGEST.store(0, Ordering::SeqCst);
            COUNTS.store(true, Ordering::SeqCst);
            run(&harness, &qps, &regions, TIMES, AT_LEAST);
            COUNTS.store(false, Ordering::SeqCst);
            (COUNT.load(Ordering::SeqCst), LARGEST.load(Ordering::SeqCst))
        };
        // On a busy machine a queue may reach its length only now.
        let (mut count, mut largest) = allocated();
        for _ in 0..2 {
            if count > 0 {
                (count, largest) = allocated();
            }
        }
        found.push((backend, count, largest));
    }
    assert!(!found.is_empty());
    assert!(found.iter().all(|(_, count, _)| *count == 0), "backend, count, largest: {found:?}");
}

/// When a thread waits for a parking_lot lock for the first time, which may be late, its queue
/// entry is allocated.
fn block_once() {
    let lock = parking_lot::Mutex::new(());
    let _held = lock.lock();
    assert!(lock.try_lock_for(Duration::from_nanos(1)).is_none());
}

const REGION: usize = 1 << 16;

/// Does each operation `times` times and for at least `time`, with sizes from zero to several
/// packets. Both sides are polled.
fn run(harness: &Harness, [qp, peer]: &[Qp; 2], regions: &[Mr; 2], times: u64, time: Duration) {
    let [a, b] = &harness.sides;
    let [mine, its] = regions;
    let (remote, rkey) = (its.address(), its.rkey());
    let (start, until) = (Instant::now(), times * OPS as u64);
    let (mut posted, mut completed, mut receives, mut received) = (0u64, 0u64, 0u64, 0u64);
    let mut idle_since = Instant::now();
    loop {
        let more = posted < until || start.elapsed() < time;
        if !more && completed == posted && received == receives {
            return;
        }
        if more && posted - completed < WINDOW {
            let imm = Some([1, 2, 3, 4]);
            let (op, receive) = match posted % OPS as u64 {
                0 => (SendOp::Send { imm: None }, true),
                1 => (SendOp::Send { imm }, true),
                2 => (SendOp::Write { remote, rkey, imm: None }, false),
                3 => (SendOp::Write { remote, rkey, imm }, true),
                4 => (SendOp::Read { remote, rkey }, false),
                5 => (SendOp::CompareSwap { remote, rkey, compare: 0, swap: 1 }, false),
                _ => (SendOp::FetchAdd { remote, rkey, add: 1 }, false),
            };
            let len = if op.is_atomic() { 8 } else { (posted * 131) as usize % 10_000 };
            if receive {
                let sges = [its.sge(0, REGION)];
                peer.post_recv(&[RecvWr { wr_id: receives, sges: &sges }]).unwrap();
                receives += 1;
            }
            qp.post_send(&[wr(posted, op, &[mine.sge(0, len)])]).unwrap();
            posted += 1;
        }
        for (cq, count) in [(&a.cq, &mut completed), (&b.cq, &mut received)] {
            if let Some(wc) = cq.poll_one().unwrap() {
                assert_eq!((wc.wr_id, wc.status), (*count, WcStatus::Success));
                *count += 1;
                idle_since = Instant::now();
            }
        }
        assert!(idle_since.elapsed() < PATIENCE, "nothing completes");
    }
}
