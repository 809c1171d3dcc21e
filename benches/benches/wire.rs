//! The wire alone: the cost of a packet before any other work on it.
//!
//! `cargo bench -p rocinante-benches --bench wire`. Compare rows of one run only; `memcpy` and
//! `crc32` are the machine's own speed.

// criterion_group! makes a public function.
#![allow(missing_docs)]

use std::hint::black_box;
use std::net::{Ipv4Addr, Ipv6Addr};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use rocinante_stack::types::{Key, Pkey, Psn, Qpn};
use rocinante_stack::wire::Solver;
use rocinante_stack::wire::icrc::{DF, IpFields, Template};
use rocinante_stack::wire::{Bth, ICRC_LEN, Opcode, Packet, Reth, bth};

const PAYLOADS: [usize; 3] = [64, 1024, 4096];

fn ipv4() -> Template {
    let ip = IpFields::V4 {
        src: Ipv4Addr::new(10, 77, 0, 2),
        dst: Ipv4Addr::new(10, 77, 0, 3),
        id: 0,
        flags: DF,
    };
    Template::new(&ip, 0xc123)
}

fn ipv6() -> Template {
    let ip = IpFields::V6 { src: Ipv6Addr::LOCALHOST, dst: Ipv6Addr::LOCALHOST };
    Template::new(&ip, 0xc123)
}

fn header() -> Bth {
    Bth::new(Opcode::RC_RDMA_WRITE_ONLY, Pkey::DEFAULT, Qpn::new(0x12_3456), Psn::new(77))
}

/// A WRITE of `payload` bytes, without its ICRC.
fn write_packet(payload: usize) -> Vec<u8> {
    let mut packet = vec![0x5a; bth::LEN + Reth::LEN + payload + ICRC_LEN];
    emit(&mut packet, payload);
    packet
}

fn emit(packet: &mut [u8], payload: usize) {
    packet[..bth::LEN].copy_from_slice(&header().bytes());
    let len = u32::try_from(payload).expect("a small payload");
    let reth = Reth { va: 0x7f00_1234_5678, rkey: Key(0xabcd_ef01), len };
    reth.write(&mut packet[bth::LEN..]);
}

/// The whole ICRC of a packet: as a receiver computes it, and with a changing identification, as a
/// sender does.
fn icrc(c: &mut Criterion) {
    for (name, template) in [("ipv4", ipv4()), ("ipv6", ipv6())] {
        let mut group = c.benchmark_group(format!("icrc/{name}"));
        for payload in PAYLOADS {
            let packet = write_packet(payload);
            group.throughput(Throughput::Bytes(packet.len() as u64));
            group.bench_function(BenchmarkId::new("of", payload), |b| {
                b.iter(|| black_box(&template).of(black_box(&packet)));
            });
            let (mut template, mut packet, mut id) = (template, packet, 0);
            group.bench_function(BenchmarkId::new("seal", payload), |b| {
                b.iter(|| {
                    id = (id + 1) & 63;
                    template.set_id(id, DF);
                    template.seal(black_box(&mut packet));
                });
            });
        }
        group.finish();
    }
}

/// Only the part before the first byte behind the BTH.
fn icrc_start(c: &mut Criterion) {
    let (template, bth) = (ipv4(), header().bytes());
    c.bench_function("icrc/start", |b| {
        b.iter(|| black_box(&template).start(black_box(96), black_box(&bth)));
    });
}

fn headers(c: &mut Criterion) {
    let mut packet = write_packet(64);
    ipv4().seal(&mut packet);
    c.bench_function("packet/parse", |b| {
        b.iter(|| {
            let packet = Packet::parse(black_box(&packet)).expect("a packet");
            (packet.bth().psn, packet.reth(), packet.payload().len())
        });
    });
    c.bench_function("packet/emit headers", |b| {
        b.iter(|| emit(black_box(&mut packet), black_box(64)));
    });
}

/// A receiver that cannot read the identification: the same length repeatedly, and a new one each
/// time.
fn solver(c: &mut Criterion) {
    let (mut truth, guess) = (ipv4(), ipv4());
    truth.set_id(17, DF);
    let mut group = c.benchmark_group("solver");
    for payload in PAYLOADS {
        let packet = write_packet(payload);
        let (found, computed) = (truth.of(&packet), guess.of(&packet));
        let mut solver = Solver::default();
        group.bench_function(BenchmarkId::new("known length", payload), |b| {
            b.iter(|| solver.solve(&guess, black_box(packet.len()), computed, found));
        });
    }
    let mut solver = Solver::default();
    let mut len = 16;
    group.bench_function("new length", |b| {
        b.iter(|| {
            len = if len < 4000 { len + 4 } else { 16 };
            solver.solve(&guess, black_box(len), 1, 2)
        });
    });
    group.finish();
}

/// The machine's own speed, for comparison.
fn machine(c: &mut Criterion) {
    let mut group = c.benchmark_group("machine");
    for len in [48, 140, 1024, 4096] {
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
    name = wire;
    config = Criterion::default()
        .sample_size(50)
        .warm_up_time(std::time::Duration::from_millis(300))
        .measurement_time(std::time::Duration::from_secs(1));
    targets = icrc, icrc_start, headers, solver, machine
}
criterion_main!(wire);
