//! Two engines on one core, joined by arenas: no I/O, but everything else. Real bytes, the ICRC
//! computed and checked, acknowledgements, one post and one completion per request.

use std::net::{IpAddr, Ipv4Addr};

use rocinante_stack::mem::{
    Access, AccessError, Atomic, AtomicOp, Checked, Memory, PdId, Read, Region, RegionTable, Sge,
    Write,
};
use rocinante_stack::types::{Key, Mtu, Psn, Qpn, Time};
use rocinante_stack::verbs::{
    AhId, Completions, CqId, Cqe, Destination, QpType, RecvWr, SendData, SendOp, SendWr, WcOpcode,
    WcStatus,
};
use rocinante_stack::wire::icrc::{DF, IpFields, Summed, Template};
use rocinante_stack::{
    Budget, Datagram, Engine, EngineConfig, IpId, PeerAddress, PeerKind, QpAttr, QpInit, TxSink,
};

/// The address of the memory's first byte in requests.
const BASE: u64 = 0x7f00_0000_0000;
const MEMORY: usize = 4 << 20;
const PORT: u16 = 0xc001;
const QKEY: u32 = 0x1234;
/// Bytes before the payload in the receive of a datagram.
const GRH: u32 = 40;
/// The announced receive budget of each side.
const BUDGET: Budget = Budget { bytes: 8 << 20, datagrams: 512 };
/// The most requests posted and in flight at a time.
const DEPTH: u32 = 256;

/// Repeated work.
#[derive(Debug, Clone, Copy)]
pub struct Work {
    /// The request.
    pub kind: Kind,
    /// Bytes of each.
    pub len: u32,
    /// Requests in flight at a time.
    pub depth: u64,
    /// When more are posted.
    pub pace: Pace,
}

/// A request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// WRITE.
    Write,
    /// SEND, into a receive posted for it.
    Send,
    /// READ.
    Read,
    /// FETCH AND ADD.
    FetchAdd,
    /// SEND of a datagram, into a receive posted for it.
    Datagram,
}

/// When more requests are posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pace {
    /// One for each completed request; each makes a completion.
    Steady,
    /// The whole depth, once all before are complete; only the last of them makes a completion.
    Bursts,
}

/// Two connected ends and a clock.
#[derive(Debug)]
pub struct Pair {
    a: End,
    b: End,
    now: Time,
}

impl Pair {
    /// Two ends, connected for requests of this kind.
    #[must_use]
    pub fn new(kind: Kind) -> Self {
        let service = if kind == Kind::Datagram { QpType::Ud } else { QpType::Rc };
        let (mut a, mut b) = (End::new(1, service), End::new(2, service));
        a.connect(&b.name());
        b.connect(&a.name());
        Self { a, b, now: Time(1) }
    }

    /// Performs `count` requests. Panics if a request fails, or is lost and retransmitted.
    pub fn run(&mut self, work: Work, count: u64) {
        let (mut posted, mut done) = (0, 0);
        while done < count {
            let until = match work.pace {
                Pace::Bursts if posted > done => posted,
                _ => count.min(done + work.depth),
            };
            while posted < until {
                let signaled = work.pace == Pace::Steady || posted + 1 == until;
                self.post(work, posted, signaled);
                posted += 1;
            }
            deliver(self.now, &mut self.a, &mut self.b);
            deliver(self.now, &mut self.b, &mut self.a);
            // Unacknowledged datagrams leave no faster than the assumed rate of their receiver.
            let each = if work.kind == Kind::Datagram { 1000 * work.depth } else { 1000 };
            self.now = self.now.after(each);
            for cqe in self.a.host.queue.drain(..) {
                assert!(cqe.status == WcStatus::Success && cqe.wr_id < posted);
                assert!(work.pace == Pace::Bursts || cqe.wr_id == done);
                done = cqe.wr_id + 1;
            }
            for cqe in self.b.host.queue.drain(..) {
                assert!(cqe.status == WcStatus::Success && cqe.opcode == WcOpcode::Recv);
            }
        }
        assert_eq!(self.a.engine.counters().retransmitted_pkts, 0);
        assert_eq!(self.b.engine.drops().iter().map(|(_, dropped)| dropped).sum::<u64>(), 0);
    }

    #[inline]
    fn post(&mut self, work: Work, wr_id: u64, signaled: bool) {
        let stride = u64::from(work.len + GRH).next_multiple_of(64);
        let offset = wr_id % (MEMORY as u64 / stride) * stride;
        let (remote, rkey) = (BASE + offset, self.b.key);
        let op = match work.kind {
            Kind::Write => SendOp::Write { remote, rkey, imm: None },
            Kind::Send => SendOp::Send { imm: None },
            Kind::Read => SendOp::Read { remote, rkey },
            Kind::FetchAdd => SendOp::FetchAdd { remote, rkey, add: 1 },
            Kind::Datagram => SendOp::SendTo { to: self.a.to, imm: None },
        };
        let headers = match work.kind {
            Kind::Send => Some(0),
            Kind::Datagram => Some(GRH),
            _ => None,
        };
        if let Some(headers) = headers {
            let sges = [Sge { addr: BASE + offset, len: headers + work.len, lkey: self.b.key }];
            let wr = RecvWr { wr_id, sges: &sges };
            self.b.engine.post_recv(self.b.qpn, &wr, &mut self.b.host).expect("room");
        }
        let sges = [Sge { addr: BASE + offset, len: work.len, lkey: self.a.key }];
        let data = SendData::Sges(&sges);
        let wr = SendWr::new(op, data).wr_id(wr_id).signaled(signaled);
        self.a.engine.post_send(self.a.qpn, &wr, &mut self.a.host).expect("room");
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

/// An engine with one queue pair.
#[derive(Debug)]
struct End {
    engine: Engine,
    host: Host,
    out: Arena,
    qpn: Qpn,
    key: Key,
    addr: IpAddr,
    /// The other end, as a destination of datagrams.
    to: Destination,
}

/// Address and number of an end.
struct Name {
    addr: IpAddr,
    qpn: Qpn,
}

impl End {
    fn new(n: u8, service: QpType) -> Self {
        let addr = |n| Ipv4Addr::new(10, 77, 0, n);
        let config = EngineConfig { own_budget: BUDGET, ..EngineConfig::default() };
        let mut engine = Engine::new(config);
        let init = QpInit {
            qp_type: service,
            pd: PdId(1),
            send_cq: CqId(0),
            recv_cq: CqId(0),
            srq: None,
            max_send_wr: DEPTH,
            max_recv_wr: DEPTH,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 64,
            sq_sig_all: false,
            cookie: 0,
            context: 0,
        };
        let qpn = engine.create_qp(&init, u32::from(n) * 0x1111).expect("room");
        let mut regions = RegionTable::new(1024);
        let region =
            Region { pd: PdId(1), start: BASE, len: MEMORY as u64, host: 0, access: Access::ALL };
        let key = regions.insert(region, 0x5eed_1234).expect("room");
        let memory = vec![0x5a ^ n; MEMORY];
        let host = Host { regions, memory, queue: Vec::with_capacity(4096) };
        let ip = IpFields::V4 { src: addr(n), dst: addr(3 - n), id: 0, flags: DF };
        let out = Arena {
            bytes: vec![0; 4 << 20],
            ends: Vec::with_capacity(4096),
            template: Template::new(&ip, PORT),
        };
        let to = Destination { ah: AhId(0), qpn, qkey: QKEY };
        Self { engine, host, out, qpn, key, addr: IpAddr::V4(addr(n)), to }
    }

    fn name(&self) -> Name {
        Name { addr: self.addr, qpn: self.qpn }
    }

    fn connect(&mut self, to: &Name) {
        let kind = PeerKind::announced(BUDGET, None);
        let peer = PeerAddress { local: self.addr, remote: to.addr, path: 0, budget: BUDGET, kind };
        let init = self.engine.query_qp(self.qpn).expect("it was made").2;
        if init.qp_type == QpType::Ud {
            let ah = self.engine.create_ah(PdId(1), &peer).expect("room");
            self.to = Destination { ah, qpn: to.qpn, qkey: QKEY };
        }
        let attr = QpAttr {
            pkey_index: Some(0),
            port: Some(1),
            access: Some(Access::ALL),
            qkey: Some(QKEY),
            peer: Some(peer),
            path_mtu: Some(Mtu::Mtu4096),
            dest_qpn: Some(to.qpn),
            rq_psn: Some(Psn::new(77)),
            max_dest_rd_atomic: Some(16),
            min_rnr_timer: Some(12),
            sq_psn: Some(Psn::new(77)),
            max_rd_atomic: Some(16),
            retry_cnt: Some(7),
            rnr_retry: Some(7),
            timeout: Some(14),
            ..QpAttr::default()
        };
        for attr in attr.steps(init.qp_type) {
            self.engine.modify_qp(self.qpn, &attr, &mut self.host).expect("a legal change");
        }
    }
}

/// User memory and a completion queue.
#[derive(Debug)]
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

    fn place(&mut self, dst: Checked<Write>, src: &[u8]) -> Result<(), AccessError> {
        self.memory[dst.host() as usize..][..src.len()].copy_from_slice(src);
        Ok(())
    }

    fn fetch(&self, src: Checked<Read>, dst: &mut [u8]) -> Result<(), AccessError> {
        dst.copy_from_slice(&self.memory[src.host() as usize..][..dst.len()]);
        Ok(())
    }

    fn atomic(&mut self, at: Checked<Atomic>, op: AtomicOp) -> Result<u64, AccessError> {
        let word = &mut self.memory[at.host() as usize..][..8];
        let found = u64::from_ne_bytes((&*word).try_into().expect("eight bytes"));
        if let AtomicOp::FetchAdd { add } = op {
            word.copy_from_slice(&found.wrapping_add(add).to_ne_bytes());
        }
        Ok(found)
    }
}

impl Completions for Host {
    fn complete(&mut self, _cq: CqId, cqe: Cqe) {
        self.queue.push(cqe);
    }

    fn send_retired(&mut self, _cookie: u32, _count: u32) {}

    fn recv_retired(&mut self, _cookie: u32, _count: u32) {}
}

/// Packets end to end in one buffer, sealed when they are written.
#[derive(Debug)]
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
        fill: impl FnOnce(&mut [u8]) -> Result<Option<Summed>, E>,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_runs_to_its_end() {
        for kind in [Kind::Write, Kind::Send, Kind::Read, Kind::FetchAdd, Kind::Datagram] {
            for pace in [Pace::Steady, Pace::Bursts] {
                let len = if kind == Kind::FetchAdd { 8 } else { 64 };
                let mut pair = Pair::new(kind);
                pair.run(Work { kind, len, depth: 16, pace }, 100);
                let counters = pair.b.engine.counters();
                assert!(counters.rcvd_pkts >= 100, "{kind:?}: {}", counters.rcvd_pkts);
            }
        }
    }
}
