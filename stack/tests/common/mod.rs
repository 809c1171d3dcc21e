//! Two engines, a link between them that loses what a test wants lost, and a virtual clock that jumps to the next
//! thing to happen.
#![allow(dead_code, unreachable_pub)]

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr};

use rocinante_stack::mem::{
    Access, Atomic, AtomicOp, Checked, Memory, PdId, Read, Region, RegionTable, Sge, Write,
};
use rocinante_stack::types::{Key, Mtu, Psn, Qpn, Time};
use rocinante_stack::verbs::{CqId, Cqe, QpState, RecvWr, SendData, SendOp, SendWr};
use rocinante_stack::wire::icrc::{DF, IpFields, Template};
use rocinante_stack::{
    Budget, Completions, Datagram, Engine, EngineConfig, IpId, PeerAddress, QpAttr, QpInit, TxSink,
};

/// User memory: one arena, in which regions are ranges.
pub struct Host {
    pub regions: RegionTable,
    pub arena: Vec<u8>,
    pub completions: Vec<Cqe>,
    pub sends_retired: u32,
    pub recvs_retired: u32,
}

/// Where the arena begins in the addresses of work requests.
pub const BASE: u64 = 0x10_0000;

impl Host {
    pub fn new(bytes: usize) -> Self {
        Self {
            regions: RegionTable::new(64),
            arena: vec![0; bytes],
            completions: Vec::new(),
            sends_retired: 0,
            recvs_retired: 0,
        }
    }

    pub fn register(&mut self, offset: u64, len: u64, access: Access) -> Key {
        let region = Region { pd: PdId(1), start: BASE + offset, len, host: offset, access };
        let random = 0x5eed_0000u32.wrapping_add(self.regions.len() as u32 * 0x1357_9b00);
        self.regions.insert(region, random).expect("room in the table")
    }
}

impl Memory for Host {
    fn regions(&self) -> &RegionTable {
        &self.regions
    }

    fn place(&mut self, dst: Checked<Write>, src: &[u8]) {
        assert_eq!(dst.len() as usize, src.len());
        self.arena[dst.host() as usize..][..src.len()].copy_from_slice(src);
    }

    fn fetch(&self, src: Checked<Read>, dst: &mut [u8]) {
        assert_eq!(src.len() as usize, dst.len());
        dst.copy_from_slice(&self.arena[src.host() as usize..][..dst.len()]);
    }

    fn atomic(&mut self, at: Checked<Atomic>, op: AtomicOp) -> u64 {
        let word = &mut self.arena[at.host() as usize..][..8];
        let found = u64::from_ne_bytes(word.try_into().expect("eight bytes"));
        let stored = match op {
            AtomicOp::CompareSwap { compare, swap } if found == compare => swap,
            AtomicOp::CompareSwap { .. } => found,
            AtomicOp::FetchAdd { add } => found.wrapping_add(add),
        };
        word.copy_from_slice(&stored.to_ne_bytes());
        found
    }
}

impl Completions for Host {
    fn complete(&mut self, _cq: CqId, cqe: Cqe) {
        self.completions.push(cqe);
    }

    fn send_retired(&mut self, _cookie: u64, count: u32) {
        self.sends_retired += count;
    }

    fn recv_retired(&mut self, _cookie: u64, count: u32) {
        self.recvs_retired += count;
    }
}

/// Packets on their way in one direction.
pub struct Wire {
    pub packets: VecDeque<Vec<u8>>,
    template: Template,
    pub room: usize,
}

impl Wire {
    fn new(src: IpAddr, dst: IpAddr) -> Self {
        Self { packets: VecDeque::new(), template: template(src, dst), room: usize::MAX }
    }
}

fn template(src: IpAddr, dst: IpAddr) -> Template {
    let (IpAddr::V4(src), IpAddr::V4(dst)) = (src, dst) else { panic!("IPv4 here") };
    Template::new(&IpFields::V4 { src, dst, id: 0, flags: DF }, PORT)
}

const PORT: u16 = 0xc001;

impl TxSink for Wire {
    fn send<E>(
        &mut self,
        _path: u32,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<bool, E> {
        if self.packets.len() >= self.room {
            return Ok(false);
        }
        let mut packet = vec![0xee; len];
        fill(&mut packet)?;
        self.template.seal(&mut packet);
        self.packets.push_back(packet);
        Ok(true)
    }
}

/// One end.
pub struct End {
    pub engine: Engine,
    pub host: Host,
    pub out: Wire,
    pub qpn: Qpn,
    pub addr: IpAddr,
}

/// Decides of each packet whether it arrives: sender, its bytes.
pub type Pass = Box<dyn FnMut(usize, &[u8]) -> bool>;

/// Two connected ends.
pub struct Pair {
    pub ends: [End; 2],
    pub now: Time,
    /// Decides of each packet whether it arrives: sender, its bytes.
    pub pass: Pass,
    pub delivered: u64,
}

/// How a pair is connected.
#[derive(Clone)]
pub struct Setup {
    pub mtu: Mtu,
    pub psn: [u32; 2],
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub rd_atomic: u8,
    pub access: Access,
    pub arena: usize,
    pub depth: u32,
    pub budget: Budget,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            mtu: Mtu::Mtu1024,
            psn: [0xff_fffa, 0x100],
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            rd_atomic: 16,
            access: Access::ALL,
            arena: 1 << 20,
            depth: 64,
            budget: Budget { bytes: 8 << 20, datagrams: 256 },
        }
    }
}

impl Pair {
    pub fn new(setup: &Setup) -> Self {
        let addr = |n| IpAddr::V4(Ipv4Addr::new(10, 0, 0, n));
        let end = |n: u8| {
            let config = EngineConfig { own_budget: setup.budget, ..EngineConfig::default() };
            let mut engine = Engine::new(config);
            let init = QpInit {
                pd: PdId(1),
                send_cq: CqId(0),
                recv_cq: CqId(0),
                max_send_wr: setup.depth,
                max_recv_wr: setup.depth,
                max_send_sge: 4,
                max_recv_sge: 4,
                max_inline_data: 64,
                sq_sig_all: false,
                cookie: 0,
            };
            let qpn = engine.create_qp(&init, 0x1234 * u32::from(n)).expect("room");
            let out = Wire::new(addr(n), addr(3 - n));
            End { engine, host: Host::new(setup.arena), out, qpn, addr: addr(n) }
        };
        let mut pair = Self {
            ends: [end(1), end(2)],
            now: Time(1_000),
            pass: Box::new(|_, _| true),
            delivered: 0,
        };
        for at in 0..2 {
            pair.connect(at, setup);
        }
        pair
    }

    fn connect(&mut self, at: usize, setup: &Setup) {
        let (dest_qpn, remote) = (self.ends[1 - at].qpn, self.ends[1 - at].addr);
        let end = &mut self.ends[at];
        let init = QpAttr {
            state: Some(QpState::Init),
            pkey_index: Some(0),
            port: Some(1),
            access: Some(setup.access),
            ..QpAttr::default()
        };
        let rtr = QpAttr {
            state: Some(QpState::Rtr),
            peer: Some(PeerAddress { local: end.addr, remote, path: 0, budget: setup.budget }),
            path_mtu: Some(setup.mtu),
            dest_qpn: Some(dest_qpn),
            rq_psn: Some(Psn::new(setup.psn[1 - at])),
            max_dest_rd_atomic: Some(setup.rd_atomic),
            min_rnr_timer: Some(12),
            ..QpAttr::default()
        };
        let rts = QpAttr {
            state: Some(QpState::Rts),
            sq_psn: Some(Psn::new(setup.psn[at])),
            max_rd_atomic: Some(setup.rd_atomic),
            retry_cnt: Some(setup.retry_cnt),
            rnr_retry: Some(setup.rnr_retry),
            timeout: Some(setup.timeout),
            ..QpAttr::default()
        };
        for attr in [init, rtr, rts] {
            end.engine.modify_qp(end.qpn, &attr, &mut end.host).expect("a legal change");
        }
    }

    /// Posts a signaled request.
    pub fn send(&mut self, at: usize, wr_id: u64, op: SendOp, sges: &[Sge]) {
        let end = &mut self.ends[at];
        let data = SendData::Sges(sges);
        let wr = SendWr { wr_id, op, data, signaled: true, solicited: false, fence: false };
        end.engine.post_send(end.qpn, &wr, &mut end.host).expect("room in the queue");
    }

    pub fn recv(&mut self, at: usize, wr_id: u64, sges: &[Sge]) {
        let end = &mut self.ends[at];
        let wr = RecvWr { wr_id, sges };
        end.engine.post_recv(end.qpn, &wr, &mut end.host).expect("room in the queue");
    }

    /// Lets `from` send, and delivers what passes.
    pub fn deliver(&mut self, from: usize) -> bool {
        let end = &mut self.ends[from];
        end.engine.poll_transmit(self.now, 1 << 20, &mut end.host, &mut end.out);
        let (src, dst) = (self.ends[from].addr, self.ends[1 - from].addr);
        let mut any = false;
        while let Some(packet) = self.ends[from].out.packets.pop_front() {
            any = true;
            if !(self.pass)(from, &packet) {
                continue;
            }
            self.delivered += 1;
            self.inject(1 - from, src, dst, &packet);
        }
        any
    }

    /// Hands a sealed packet to an engine.
    pub fn inject(&mut self, to: usize, src: IpAddr, dst: IpAddr, packet: &[u8]) {
        let end = &mut self.ends[to];
        let datagram = Datagram {
            bytes: packet,
            src,
            dst,
            src_port: PORT,
            ip_id: IpId::Exact { id: 0, flags: DF },
            congested: false,
        };
        end.engine.handle_datagram(self.now, &datagram, &mut end.host);
    }

    /// Runs until nothing happens any more, or until `done`.
    pub fn run_until(&mut self, mut done: impl FnMut(&Self) -> bool) {
        for _ in 0..1_000_000 {
            if done(self) {
                return;
            }
            let any = self.deliver(0) | self.deliver(1);
            if any {
                self.now = self.now.after(1_000);
                continue;
            }
            let next = self.ends.iter().filter_map(|end| end.engine.poll_timeout()).min();
            let Some(next) = next else { return };
            self.now = self.now.max(next);
            let now = self.now;
            for end in &mut self.ends {
                end.engine.handle_timeout(now, &mut end.host);
            }
        }
        panic!("it does not end");
    }

    pub fn run(&mut self) {
        self.run_until(|_| false);
    }

    pub fn completions(&mut self, at: usize) -> Vec<Cqe> {
        std::mem::take(&mut self.ends[at].host.completions)
    }
}
