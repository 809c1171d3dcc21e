//! The base of the engine's tests: memory, a wire, connected ends and a virtual clock.
//!
//! [`Pair`] joins two engines by a link that loses the packets that a test chooses. [`Solo`] has
//! one engine, and the test plays its peer, packet by packet.
#![allow(dead_code, unreachable_pub, unused_imports)]

mod pair;
mod solo;
mod tables;

use std::cell::Cell;
use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr};
use std::ops::Range;

use rocinante_stack::cm::CmConfig;
use rocinante_stack::mem::{
    Access, AccessError, Atomic, AtomicOp, Checked, Memory, PdId, Read, Region, RegionTable, Sge,
    Write,
};
use rocinante_stack::types::{Key, Mtu, Psn, Qpn, QueueKind};
use rocinante_stack::verbs::{CqId, Cqe, QpState, QpType, RecvWr, SrqId, WcStatus};
use rocinante_stack::wire::PeerInfo;
use rocinante_stack::wire::icrc::{DF, IpFields, Summed, Template};
use rocinante_stack::{
    Budget, Completions, Engine, EngineConfig, ModifyError, PeerAddress, PeerKind, PostError,
    QpAttr, QpInit, SrqInit, TxSink,
};

pub use self::pair::{Pair, Pass, one_lost_in};
pub use self::solo::{PEER, Solo, seal};
pub(crate) use self::tables::{assert_same, tables};
pub use rocinante_scripts::{describe, pattern, reth};

/// User memory: one arena, in which regions are ranges.
pub struct Host {
    pub regions: RegionTable,
    pub arena: Vec<u8>,
    /// Addresses without memory (any more), although they may be registered.
    pub gone: Range<u64>,
    pub completions: Vec<Cqe>,
    pub sends_retired: u32,
    pub recvs_retired: u32,
    /// How often the engine asked for the table of regions.
    pub lookups: Cell<u64>,
}

/// Where the arena begins in the addresses of work requests.
pub const BASE: u64 = 0x10_0000;

/// The protection domain of all queue pairs here.
pub const PD: PdId = PdId(1);

impl Host {
    pub fn new(bytes: usize) -> Self {
        Self {
            regions: RegionTable::new(64),
            arena: vec![0; bytes],
            gone: 0..0,
            completions: Vec::new(),
            sends_retired: 0,
            recvs_retired: 0,
            lookups: Cell::new(0),
        }
    }

    pub fn register(&mut self, offset: u64, len: u64, access: Access) -> Key {
        self.register_in(PD, offset, len, access)
    }

    pub fn register_in(&mut self, pd: PdId, offset: u64, len: u64, access: Access) -> Key {
        let region = Region { pd, start: BASE + offset, len, host: offset, access };
        let count = self.regions.len() as u32;
        let random = 0x5eed_0000u32.wrapping_add(count.wrapping_mul(0x1357_9b00));
        self.regions.insert(region, random).expect("room in the table")
    }

    /// Registers `len` bytes of the arena from `host` on. Their address begins `offset` bytes
    /// behind [`BASE`].
    pub fn register_at(&mut self, host: u64, offset: u64, len: u64, access: Access) -> Key {
        let region = Region { pd: PD, start: BASE + offset, len, host, access };
        self.regions.insert(region, 0x7a57_e000).expect("room in the table")
    }

    /// Whether these bytes of the arena are memory.
    fn bears(&self, at: u64, len: u32) -> Result<(), AccessError> {
        let apart = at + u64::from(len) <= self.gone.start || at >= self.gone.end;
        if apart { Ok(()) } else { Err(AccessError::Memory) }
    }

    /// `wr_id` and status of the completions since the last call.
    pub fn completed(&mut self) -> Vec<(u64, WcStatus)> {
        self.completions.drain(..).map(|cqe| (cqe.wr_id, cqe.status)).collect()
    }
}

impl Memory for Host {
    fn regions(&self) -> &RegionTable {
        self.lookups.set(self.lookups.get() + 1);
        &self.regions
    }

    fn regions_mut(&mut self) -> &mut RegionTable {
        &mut self.regions
    }

    fn place(&mut self, dst: Checked<Write>, src: &[u8]) -> Result<(), AccessError> {
        assert_eq!(dst.len() as usize, src.len());
        self.bears(dst.host(), dst.len())?;
        self.arena[dst.host() as usize..][..src.len()].copy_from_slice(src);
        Ok(())
    }

    fn fetch(&self, src: Checked<Read>, dst: &mut [u8]) -> Result<(), AccessError> {
        assert_eq!(src.len() as usize, dst.len());
        self.bears(src.host(), src.len())?;
        dst.copy_from_slice(&self.arena[src.host() as usize..][..dst.len()]);
        Ok(())
    }

    fn fetch_summed(&self, src: Checked<Read>, dst: &mut [u8]) -> Result<Option<u32>, AccessError> {
        self.fetch(src, dst)?;
        Ok(Some(crc32fast::hash(dst)))
    }

    fn atomic(&mut self, at: Checked<Atomic>, op: AtomicOp) -> Result<u64, AccessError> {
        self.bears(at.host(), at.len())?;
        let word = &mut self.arena[at.host() as usize..][..8];
        let found = u64::from_ne_bytes(word.try_into().expect("eight bytes"));
        let stored = match op {
            AtomicOp::CompareSwap { compare, swap } if found == compare => swap,
            AtomicOp::CompareSwap { .. } => found,
            AtomicOp::FetchAdd { add } => found.wrapping_add(add),
        };
        word.copy_from_slice(&stored.to_ne_bytes());
        Ok(found)
    }
}

impl Completions for Host {
    fn complete(&mut self, _cq: CqId, cqe: Cqe) {
        self.completions.push(cqe);
    }

    fn send_retired(&mut self, _cookie: u32, count: u32) {
        self.sends_retired += count;
    }

    fn recv_retired(&mut self, _cookie: u32, count: u32) {
        self.recvs_retired += count;
    }
}

/// Packets in flight in one direction.
pub struct Wire {
    pub packets: VecDeque<Vec<u8>>,
    pub template: Template,
    pub room: usize,
    /// The path of the last packet.
    pub path: u32,
}

/// The UDP source port of every end.
pub const PORT: u16 = 0xc001;

impl Wire {
    pub fn new(src: IpAddr, dst: IpAddr) -> Self {
        Self { packets: VecDeque::new(), template: template(src, dst), room: usize::MAX, path: 0 }
    }
}

pub fn template(src: IpAddr, dst: IpAddr) -> Template {
    Template::new(&IpFields::between(src, dst).unwrap(), PORT)
}

impl TxSink for Wire {
    fn send<E>(
        &mut self,
        path: u32,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<Option<Summed>, E>,
    ) -> Result<bool, E> {
        if self.packets.len() >= self.room {
            return Ok(false);
        }
        self.path = path;
        let mut packet = vec![0xee; len];
        let summed = fill(&mut packet)?;
        self.template.seal_around(&mut packet, summed);
        self.packets.push_back(packet);
        Ok(true)
    }
}

/// One end.
pub struct End {
    pub engine: Engine,
    pub host: Host,
    pub out: Wire,
    /// The first of the queue pairs.
    pub qpn: Qpn,
    pub qpns: Vec<Qpn>,
    /// The shared receive queue of all queue pairs, if requested.
    pub srq: Option<SrqId>,
    pub addr: IpAddr,
}

/// How ends are connected.
#[derive(Clone)]
pub struct Setup {
    pub qp_type: QpType,
    pub mtu: Mtu,
    /// The first PSN of each direction.
    pub psn: [u32; 2],
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    /// READs and atomics that each side may have outstanding.
    pub rd_atomic: u8,
    /// READs and atomics that each side serves; `rd_atomic` if `None`.
    pub dest_rd_atomic: Option<u8>,
    pub access: Access,
    pub arena: usize,
    pub depth: u32,
    pub budget: Budget,
    /// The own receive queue's budget for requested responses; `budget` if `None`.
    pub own: Option<Budget>,
    /// Whether acknowledgements announce the number of posted receives.
    pub advertise: bool,
    /// Most packets in reorder buffers, for selective repeat. With 0, scripts follow the
    /// specification alone.
    pub held: u32,
    /// Whether WRITEs may be split.
    pub split_writes: bool,
    /// The depth of a shared receive queue, if there is one.
    pub srq: Option<u32>,
    pub qps: usize,
    pub quantum: u32,
    /// Whether ends probe each other.
    pub recognises: bool,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            qp_type: QpType::Rc,
            mtu: Mtu::Mtu1024,
            psn: [0xff_fffa, 0x100],
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            rd_atomic: 16,
            dest_rd_atomic: None,
            access: Access::ALL,
            arena: 1 << 20,
            depth: 64,
            budget: Budget { bytes: 8 << 20, datagrams: 256 },
            own: None,
            advertise: false,
            held: 0,
            split_writes: false,
            srq: None,
            qps: 1,
            quantum: EngineConfig::default().quantum,
            recognises: false,
        }
    }
}

impl Setup {
    /// The smallest MTU and simple PSNs, for tests that read packets.
    pub fn script() -> Self {
        Self { mtu: Mtu::Mtu256, psn: [0x10, 0x5000], arena: 64 << 10, ..Self::default() }
    }
}

pub fn addr(n: u8) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, 0, 0, n))
}

impl End {
    /// The end number `n` (1 or 2), with its queue pairs in RESET.
    pub fn new(n: u8, setup: &Setup) -> Self {
        Self::of(n, setup, |engine| {
            let srq = setup.srq.map(|max_wr| {
                let srq = SrqInit { pd: PD, max_wr, max_sge: 4 };
                engine.create_srq(&srq).expect("a depth")
            });
            let init = QpInit { srq, ..qp_init(setup) };
            let numbers = (0..setup.qps as u32).map(|i| 0x1234 * u32::from(n) + i);
            let qpns = numbers.map(|random| engine.create_qp(&init, random).expect("room"));
            (srq, qpns.collect())
        })
    }

    /// As [`new`](Self::new), with queue pairs that `make` creates.
    pub fn of(
        n: u8,
        setup: &Setup,
        make: impl FnOnce(&mut Engine) -> (Option<SrqId>, Vec<Qpn>),
    ) -> Self {
        let own = setup.own.unwrap_or(setup.budget);
        let config = EngineConfig {
            own_budget: own,
            own_queue: PeerKind::announced(own, None).queue(),
            advertise_credits: setup.advertise,
            port_mtu: setup.mtu,
            reorder_packets_max: setup.held,
            split_writes: setup.split_writes,
            quantum: setup.quantum,
            ..EngineConfig::default()
        };
        let mut engine = Engine::new(config);
        if setup.recognises {
            engine.start_cm(CmConfig::default());
            engine.probe_unknown_peers();
            engine.start_recognition([n.into(), 7], None, INFO);
        }
        let (srq, qpns) = make(&mut engine);
        let (host, out) = (Host::new(setup.arena), Wire::new(addr(n), addr(3 - n)));
        Self { engine, host, out, qpn: qpns[0], qpns, srq, addr: addr(n) }
    }

    pub fn modify(&mut self, qpn: Qpn, attr: &QpAttr) -> Result<(), ModifyError> {
        self.engine.modify_qp(qpn, attr, &mut self.host)
    }

    /// Sends probes and replies of recognition.
    pub fn probe(&mut self) {
        while let Some(transmit) = self.engine.poll_probe() {
            assert!(self.engine.send_mad(&transmit.mad, 0, &mut self.out));
        }
    }

    /// Takes a queue pair from RESET to RTS; `at` is its side.
    pub fn connect(&mut self, qpn: Qpn, at: usize, dest: Qpn, setup: &Setup) {
        for attr in steps(at, self.addr, dest, setup) {
            self.modify(qpn, &attr).expect("a legal change");
        }
    }

    /// Posts a receive to the shared queue.
    pub fn share(&mut self, wr_id: u64, sges: &[Sge]) -> Result<(), PostError> {
        self.engine.post_srq_recv(self.srq.expect("a shared queue"), &RecvWr { wr_id, sges })
    }

    pub fn state(&self, qpn: Qpn) -> QpState {
        self.engine.query_qp(qpn).expect("a queue pair").0
    }
}

pub fn qp_init(setup: &Setup) -> QpInit {
    QpInit {
        qp_type: setup.qp_type,
        pd: PD,
        send_cq: CqId(0),
        recv_cq: CqId(0),
        srq: None,
        max_send_wr: setup.depth,
        max_recv_wr: setup.depth,
        max_send_sge: 4,
        max_recv_sge: 4,
        max_inline_data: 64,
        sq_sig_all: false,
        cookie: 0,
        context: 0,
    }
}

/// The reply of ends that recognise each other.
pub const INFO: PeerInfo = PeerInfo {
    bytes: 8 << 20,
    datagrams: 256,
    queue: QueueKind::Frames,
    slots: 1,
    packet_ns: 250,
    kib_ns: 100,
};

/// The Q_Key of all queue pairs here.
pub const QKEY: u32 = 0x1111_1111;

/// A change of the state alone.
pub fn to(state: QpState) -> QpAttr {
    QpAttr { state: Some(state), ..QpAttr::default() }
}

/// The attributes of INIT, RTR and RTS for the side `at`.
pub fn steps(at: usize, local: IpAddr, dest: Qpn, setup: &Setup) -> [QpAttr; 3] {
    let remote = if local == addr(1) { addr(2) } else { addr(1) };
    let (rc, ud) = (setup.qp_type == QpType::Rc, setup.qp_type == QpType::Ud);
    let init = QpAttr {
        state: Some(QpState::Init),
        pkey_index: Some(0),
        port: Some(1),
        access: (!ud).then_some(setup.access),
        qkey: ud.then_some(QKEY),
        ..QpAttr::default()
    };
    let kind = PeerKind::announced(setup.budget, None);
    let peer = PeerAddress { local, remote, path: 0, budget: setup.budget, kind };
    let rtr = QpAttr {
        state: Some(QpState::Rtr),
        peer: (!ud).then_some(peer),
        path_mtu: (!ud).then_some(setup.mtu),
        dest_qpn: (!ud).then_some(dest),
        rq_psn: (!ud).then_some(Psn::new(setup.psn[1 - at])),
        max_dest_rd_atomic: rc.then_some(setup.dest_rd_atomic.unwrap_or(setup.rd_atomic)),
        min_rnr_timer: rc.then_some(12),
        ..QpAttr::default()
    };
    let rts = QpAttr {
        state: Some(QpState::Rts),
        sq_psn: Some(Psn::new(setup.psn[at])),
        max_rd_atomic: rc.then_some(setup.rd_atomic),
        retry_cnt: rc.then_some(setup.retry_cnt),
        rnr_retry: rc.then_some(setup.rnr_retry),
        timeout: rc.then_some(setup.timeout),
        ..QpAttr::default()
    };
    [init, rtr, rts]
}

/// A range of the arena.
pub fn sge(offset: u64, len: u32, lkey: Key) -> Sge {
    Sge { addr: BASE + offset, len, lkey }
}
