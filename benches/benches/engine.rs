//! The engine alone: two engines on one core, joined by arenas. No I/O, but everything else: real
//! bytes, the ICRC computed and checked, acknowledgements, one post and one completion per request.
//!
//! `cargo bench -p rocinante-benches --bench engine`. Compare rows of one run only. `machine` is
//! the machine's own speed: a 4 KiB WRITE costs at least two CRCs and two copies of 4 KiB.
// criterion_group! makes functions without documentation.
#![allow(missing_docs)]

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use rocinante_benches::engine::{Kind, Pace, Pair, Work};

fn engine(c: &mut Criterion) {
    let mut group = c.benchmark_group("engine");
    for (name, kind, len, depth) in [
        ("write", Kind::Write, 64, 128),
        ("write", Kind::Write, 4096, 32),
        ("write", Kind::Write, 1 << 20, 2),
        ("send", Kind::Send, 64, 128),
        ("read", Kind::Read, 4096, 16),
        ("fetch-add", Kind::FetchAdd, 8, 16),
        ("datagram", Kind::Datagram, 64, 64),
        // One at a time: the CPU cost of a round trip.
        ("write alone", Kind::Write, 64, 1),
    ] {
        let work = Work { kind, len, depth, pace: Pace::Steady };
        let mut pair = Pair::new(kind);
        pair.run(work, 1000);
        group.throughput(match len {
            0..=64 => Throughput::Elements(1),
            _ => Throughput::Bytes(u64::from(len)),
        });
        group.bench_function(BenchmarkId::new(name, len), |b| {
            b.iter_custom(|count| {
                let start = Instant::now();
                pair.run(work, count);
                start.elapsed()
            });
        });
    }
    group.finish();
}

/// The machine's own speed, for comparison.
fn machine(c: &mut Criterion) {
    let mut group = c.benchmark_group("machine");
    for len in [64, 4096] {
        let (source, mut target) = (vec![0x5a_u8; len], vec![0_u8; len]);
        group.throughput(Throughput::Bytes(len as u64));
        group.bench_function(BenchmarkId::new("memcpy", len), |b| {
            b.iter(|| black_box(&mut target).copy_from_slice(black_box(&source)));
        });
        group.bench_function(BenchmarkId::new("crc32", len), |b| {
            b.iter(|| crc32fast::hash(black_box(&source)));
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1));
    targets = machine, engine
}
criterion_main!(benches);
