//! The memory of a connected queue pair: the bytes allocated for it, counted.
//!
//! This is the only test of its process, because it counts the allocations of all threads.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicI64, Ordering};

use rocinante::verbs::SendOp;
use rocinante::{Access, Mr, Qp, RecvWr};
use rocinante_tests::harness::{Harness, Setup, wr};
use rocinante_tests::{need, require};

/// The system's allocator; it counts the bytes allocated.
struct Counting;

static BYTES: AtomicI64 = AtomicI64::new(0);

fn note(size: usize, sign: i64) {
    BYTES.fetch_add(sign * i64::try_from(size).unwrap_or(i64::MAX), Ordering::Relaxed);
}

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size(), 1);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        note(layout.size(), -1);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) };
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(layout.size(), -1);
        note(size, 1);
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Queue pairs of each side.
const QPS: usize = 1000;
/// Depth of each queue.
const DEPTH: u32 = 16;
/// Bytes of a queue pair that was never used. `rocinante-bench --only idle` also measures the
/// overhead of the system's allocator.
const IDLE_MAX: i64 = 3880;
/// The most bytes that a queue pair may take in addition once all have been used in turn. A few of
/// them still hold in-flight lists, which all share (`stack/src/rc/requester/lists.rs`).
const USED_MORE_MAX: i64 = 256;
const REGION: usize = 1 << 16;

#[test]
fn an_idle_queue_pair_takes_little() {
    require!(need::lab());
    let mut found = Vec::new();
    for backend in need::backends("e2e_footprint::an_idle_queue_pair_takes_little") {
        let harness = Harness::new(&Setup::new(backend));
        let regions =
            harness.sides.each_ref().map(|side| side.pd.allocate(REGION, Access::ALL).unwrap());
        // The first pair makes all allocations that happen only once.
        exchange(&harness, &pair(&harness), &regions);
        let before = BYTES.load(Ordering::SeqCst);
        let each = || (BYTES.load(Ordering::SeqCst) - before) / (2 * QPS as i64);
        let mut qps = Vec::with_capacity(QPS);
        qps.extend((0..QPS).map(|_| pair(&harness)));
        let idle = each();
        qps.iter().for_each(|qps| exchange(&harness, qps, &regions));
        found.push((backend, idle, each() - idle));
    }
    println!("backend, bytes of an idle one, and more when all were used: {found:?}");
    assert!(!found.is_empty());
    for (backend, idle, more) in found {
        assert!((1000..=IDLE_MAX).contains(&idle), "{backend}: {idle} bytes");
        assert!(more <= USED_MORE_MAX, "{backend}: {idle} bytes and {more} when it was used");
    }
}

fn pair(harness: &Harness) -> [Qp; 2] {
    let make = |at: usize| {
        let side = &harness.sides[at];
        let qp = side
            .pd
            .qp(&side.cq, &side.cq)
            .access(Access::ALL)
            .max_send_wr(DEPTH)
            .max_recv_wr(DEPTH);
        qp.max_inline_data(0).build().unwrap()
    };
    harness.connect([0, 1].map(make))
}

/// Each side writes and sends to the other. READs and atomics are left out: a queue pair keeps its
/// answers to them, for duplicates.
fn exchange(harness: &Harness, qps: &[Qp; 2], regions: &[Mr; 2]) {
    let half = REGION / 2;
    for (from, to) in [(0, 1), (1, 0)] {
        qps[to].post_recv(&[RecvWr { wr_id: 1, sges: &[regions[to].sge(half, half)] }]).unwrap();
        let (remote, rkey) = (regions[to].address() + half as u64, regions[to].rkey());
        let source = [regions[from].sge(0, half)];
        let write = wr(2, SendOp::Write { remote, rkey, imm: None }, &source);
        qps[from].post_send(&[write, wr(3, SendOp::Send { imm: None }, &source)]).unwrap();
        harness.sides[from].succeed(2);
        harness.sides[from].succeed(3);
        harness.sides[to].succeed(1);
    }
}
