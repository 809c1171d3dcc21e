//! The engine alone: two of them on one core, joined by arenas. No I/O, but everything else: real bytes, the ICRC
//! computed and checked, acknowledgements, one post and one completion per request.
//!
//! `cargo bench -p rocinante-benches --bench engine`. Compare rows of one run only; `machine` is the machine's own
//! speed: a 4 KiB WRITE costs at least two CRCs and two copies of 4 KiB.
// criterion_group! makes functions without documentation.
#![allow(missing_docs)]

use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use rocinante_stack::mem::{
    Access, Atomic, AtomicOp, Checked, Memory, PdId, Read, Region, RegionTable, Sge, Write,
};
use rocinante_stack::types::{Key, Mtu, Psn, Qpn, Time};
use rocinante_stack::verbs::{
    CqId, Cqe, QpState, QpType, RecvWr, SendData, SendOp, SendWr, WcOpcode, WcStatus,
};
use rocinante_stack::wire::icrc::{DF, IpFields, Template};
use rocinante_stack::{
    Budget, Completions, Datagram, Engine, EngineConfig, IpId, PeerAddress, QpAttr, QpInit, TxSink,
};

/// Where the memory begins in the addresses of requests.
const BASE: u64 = 0x7f00_0000_0000;
const MEMORY: usize = 4 << 20;
const PORT: u16 = 0xc001;

/// User memory and a completion queue.
struct Host {
    regions: RegionTable,
    memory: Vec<u8>,
    queue: Vec<Cqe>,
}

impl Memory for Host {
    fn regions(&self) -> &RegionTable {
        &self.regions
    }

    fn regions_mut(&mut self) -> &mut RegionTable {
        &mut self.regions
    }

    fn place(&mut self, dst: Checked<Write>, src: &[u8]) {
        self.memory[dst.host() as usize..][..src.len()].copy_from_slice(src);
    }

    fn fetch(&self, src: Checked<Read>, dst: &mut [u8]) {
        dst.copy_from_slice(&self.memory[src.host() as usize..][..dst.len()]);
    }

    fn atomic(&mut self, at: Checked<Atomic>, op: AtomicOp) -> u64 {
        let word = &mut self.memory[at.host() as usize..][..8];
        let found = u64::from_ne_bytes((&*word).try_into().expect("eight bytes"));
        if let AtomicOp::FetchAdd { add } = op {
            word.copy_from_slice(&found.wrapping_add(add).to_ne_bytes());
        }
        found
    }
}

impl Completions for Host {
    fn complete(&mut self, _cq: CqId, cqe: Cqe) {
        self.queue.push(cqe);
    }

    fn send_retired(&mut self, _cookie: u64, _count: u32) {}

    fn recv_retired(&mut self, _cookie: u64, _count: u32) {}
}

/// Packets in one run of bytes, sealed as they are written.
struct Arena {
    bytes: Vec<u8>,
    ends: Vec<usize>,
    template: Template,
}

/// Datagrams of one super-packet: their identifications count up.
const SEGMENTS: usize = 15;

impl TxSink for Arena {
    #[inline]
    fn send<E>(
        &mut self,
        _path: u32,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<bool, E> {
        let start = self.ends.last().copied().unwrap_or(0);
        let Some(packet) = self.bytes.get_mut(start..start + len) else { return Ok(false) };
        fill(packet)?;
        self.template.set_id((self.ends.len() % SEGMENTS) as u16, DF);
        self.template.seal(packet);
        self.ends.push(start + len);
        Ok(true)
    }
}

struct End {
    engine: Engine,
    host: Host,
    out: Arena,
    qpn: Qpn,
    key: Key,
    addr: IpAddr,
}

impl End {
    fn new(n: u8) -> Self {
        let addr = |n| Ipv4Addr::new(10, 77, 0, n);
        let budget = Budget { bytes: 8 << 20, datagrams: 512 };
        let config = EngineConfig { own_budget: budget, ..EngineConfig::default() };
        let mut engine = Engine::new(config);
        let init = QpInit {
            qp_type: QpType::Rc,
            pd: PdId(1),
            send_cq: CqId(0),
            recv_cq: CqId(0),
            srq: None,
            max_send_wr: 256,
            max_recv_wr: 256,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 64,
            sq_sig_all: false,
            cookie: 0,
        };
        let qpn = engine.create_qp(&init, u32::from(n) * 0x1111).expect("room");
        let mut regions = RegionTable::new(1024);
        let region =
            Region { pd: PdId(1), start: BASE, len: MEMORY as u64, host: 0, access: Access::ALL };
        let key = regions.insert(region, 0x5eed_1234).expect("room");
        let memory = (0..MEMORY).map(|i| (i * 7 + (i >> 8)) as u8 ^ n).collect();
        let host = Host { regions, memory, queue: Vec::with_capacity(4096) };
        let ip = IpFields::V4 { src: addr(n), dst: addr(3 - n), id: 0, flags: DF };
        let out = Arena {
            bytes: vec![0; 4 << 20],
            ends: Vec::with_capacity(4096),
            template: Template::new(&ip, PORT),
        };
        Self { engine, host, out, qpn, key, addr: IpAddr::V4(addr(n)) }
    }

    fn connect(&mut self, remote: IpAddr, dest: Qpn, mtu: Mtu) {
        let budget = Budget { bytes: 8 << 20, datagrams: 512 };
        let init = QpAttr {
            state: Some(QpState::Init),
            pkey_index: Some(0),
            port: Some(1),
            access: Some(Access::ALL),
            ..QpAttr::default()
        };
        let rtr = QpAttr {
            state: Some(QpState::Rtr),
            peer: Some(PeerAddress { local: self.addr, remote, path: 0, budget }),
            path_mtu: Some(mtu),
            dest_qpn: Some(dest),
            rq_psn: Some(Psn::new(77)),
            max_dest_rd_atomic: Some(16),
            min_rnr_timer: Some(12),
            ..QpAttr::default()
        };
        let rts = QpAttr {
            state: Some(QpState::Rts),
            sq_psn: Some(Psn::new(77)),
            max_rd_atomic: Some(16),
            retry_cnt: Some(7),
            rnr_retry: Some(7),
            timeout: Some(14),
            ..QpAttr::default()
        };
        for attr in [init, rtr, rts] {
            self.engine.modify_qp(self.qpn, &attr, &mut self.host).expect("a legal change");
        }
    }
}

/// Two connected ends and a clock.
struct Pair {
    a: End,
    b: End,
    now: Time,
}

/// What is measured.
#[derive(Clone, Copy)]
struct Work {
    kind: Kind,
    len: u32,
    /// Requests under way at a time.
    depth: u64,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Write,
    Send,
    Read,
    FetchAdd,
}

impl Pair {
    fn new(mtu: Mtu) -> Self {
        let (mut a, mut b) = (End::new(1), End::new(2));
        a.connect(b.addr, b.qpn, mtu);
        b.connect(a.addr, a.qpn, mtu);
        Self { a, b, now: Time(1) }
    }

    fn post(&mut self, work: Work, wr_id: u64) {
        let slots = MEMORY as u64 / u64::from(work.len.max(64));
        let offset = wr_id % slots * u64::from(work.len.max(64));
        let (remote, rkey) = (BASE + offset, self.b.key);
        let op = match work.kind {
            Kind::Write => SendOp::Write { remote, rkey, imm: None },
            Kind::Send => SendOp::Send { imm: None },
            Kind::Read => SendOp::Read { remote, rkey },
            Kind::FetchAdd => SendOp::FetchAdd { remote, rkey, add: 1 },
        };
        if work.kind == Kind::Send {
            let sges = [Sge { addr: BASE + offset, len: work.len, lkey: self.b.key }];
            let wr = RecvWr { wr_id, sges: &sges };
            self.b.engine.post_recv(self.b.qpn, &wr, &mut self.b.host).expect("room");
        }
        let sges = [Sge { addr: BASE + offset, len: work.len, lkey: self.a.key }];
        let data = SendData::Sges(&sges);
        let wr = SendWr { wr_id, op, data, signaled: true, solicited: false, fence: false };
        self.a.engine.post_send(self.a.qpn, &wr, &mut self.a.host).expect("room");
    }

    /// Performs `count` requests.
    fn run(&mut self, work: Work, count: u64) {
        let (mut posted, mut done) = (0, 0);
        while done < count {
            while posted < count && posted - done < work.depth {
                self.post(work, posted);
                posted += 1;
            }
            deliver(self.now, &mut self.a, &mut self.b);
            deliver(self.now, &mut self.b, &mut self.a);
            self.now = self.now.after(1000);
            for cqe in self.a.host.queue.drain(..) {
                assert!(cqe.status == WcStatus::Success && cqe.wr_id == done);
                done += 1;
            }
            for cqe in self.b.host.queue.drain(..) {
                assert!(cqe.status == WcStatus::Success && cqe.opcode == WcOpcode::Recv);
            }
        }
        assert_eq!(self.a.engine.counters().retransmitted_pkts, 0);
    }
}

#[inline]
fn deliver(now: Time, from: &mut End, to: &mut End) {
    from.engine.poll_transmit(now, usize::MAX, &mut from.host, &mut from.out);
    let mut start = 0;
    for (i, end) in from.out.ends.drain(..).enumerate() {
        let datagram = Datagram {
            bytes: &from.out.bytes[start..end],
            src: from.addr,
            dst: to.addr,
            src_port: PORT,
            ip_id: IpId::Hint((i % SEGMENTS) as u16),
            tos: 0,
            hop_limit: None,
        };
        to.engine.handle_datagram(now, &datagram, &mut to.host);
        start = end;
    }
}

fn engine(c: &mut Criterion) {
    let mut group = c.benchmark_group("engine");
    for (name, kind, len, depth) in [
        ("write", Kind::Write, 64, 128),
        ("write", Kind::Write, 4096, 32),
        ("write", Kind::Write, 1 << 20, 2),
        ("send", Kind::Send, 64, 128),
        ("read", Kind::Read, 4096, 16),
        ("fetch-add", Kind::FetchAdd, 8, 16),
        // One at a time: what a round trip costs the CPU.
        ("write alone", Kind::Write, 64, 1),
    ] {
        let work = Work { kind, len, depth };
        let mut pair = Pair::new(Mtu::Mtu4096);
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
