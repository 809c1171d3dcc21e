//! Calls of the engine in any order and with any values. The engine's packets come back to it: its
//! peers are its own queue pairs.

use std::net::IpAddr;

use rocinante_stack::mem::{Access, PdId, Sge};
use rocinante_stack::types::{Key, Mtu, Psn, Qpn, Time};
use rocinante_stack::verbs::{
    AhId, CqId, Destination, QpState, QpType, RecvWr, SendData, SendOp, SendWr, SrqId,
};
use rocinante_stack::wire::icrc::DF;
use rocinante_stack::{
    AltPath, Budget, Datagram, Engine, EngineConfig, IpId, PathMigState, PeerAddress, PeerKind,
    QpAttr, QpInit, SrqChange, SrqInit, Urgency,
};

use super::Input;
use super::common::{BASE, Host, PORT, Wire, addr};

const ARENA: usize = 8192;

struct Calls {
    engine: Engine,
    host: Host,
    wire: Wire,
    now: Time,
    qps: Vec<Qpn>,
    srqs: Vec<SrqId>,
    handles: Vec<AhId>,
    keys: Vec<Key>,
}

impl Calls {
    fn new(input: &mut Input<'_>) -> Self {
        let own_budget = Budget { bytes: 1 << 14, datagrams: u32::from(input.u8()) };
        let config = EngineConfig {
            own_budget,
            max_qp: 8,
            advertise_credits: input.u8().is_multiple_of(2),
            quantum: u32::from(input.u8() % 8).max(1),
            ..EngineConfig::default()
        };
        let mut wire = Wire::new(addr(1), addr(1));
        wire.room = usize::from(input.u8() % 32);
        Self {
            engine: Engine::new(config),
            host: Host::new(ARENA),
            wire,
            now: Time(1_000),
            qps: Vec::new(),
            srqs: Vec::new(),
            handles: Vec::new(),
            keys: Vec::new(),
        }
    }

    /// The number of a queue pair that exists or existed, or an arbitrary number.
    fn qpn(&self, input: &mut Input<'_>) -> Qpn {
        match input.u8() {
            any if any < 250 && !self.qps.is_empty() => self.qps[usize::from(any) % self.qps.len()],
            _ => Qpn::new(input.u32()),
        }
    }

    fn key(&self, input: &mut Input<'_>) -> Key {
        match input.u8() {
            any if any < 240 && !self.keys.is_empty() => {
                self.keys[usize::from(any) % self.keys.len()]
            }
            _ => Key(input.u32()),
        }
    }

    fn sge(&self, input: &mut Input<'_>) -> Sge {
        let addr = match input.u8() % 8 {
            0 => input.u64(),
            _ => BASE + u64::from(input.u16()) % 9000,
        };
        let len = match input.u8() % 16 {
            0 => input.u32(),
            _ => u32::from(input.u16()) % 2000,
        };
        Sge { addr, len, lkey: self.key(input) }
    }

    fn create_qp(&mut self, input: &mut Input<'_>) {
        let srq = match input.u8() % 4 {
            0 if !self.srqs.is_empty() => {
                Some(self.srqs[usize::from(input.u8()) % self.srqs.len()])
            }
            _ => None,
        };
        let init = QpInit {
            qp_type: input.of(&[QpType::Rc, QpType::Rc, QpType::Uc, QpType::Ud]),
            pd: PdId(u32::from(input.u8() % 2)),
            send_cq: CqId(u32::from(input.u8() % 2)),
            recv_cq: CqId(0),
            srq,
            max_send_wr: u32::from(input.u8() % 20),
            max_recv_wr: u32::from(input.u8() % 20),
            max_send_sge: u32::from(input.u8() % 4),
            max_recv_sge: u32::from(input.u8() % 4),
            max_inline_data: u32::from(input.u8() % 100),
            sq_sig_all: input.u8().is_multiple_of(2),
            cookie: 0,
            context: 0,
        };
        self.qps.extend(self.engine.create_qp(&init, input.u32()));
    }

    fn modify(&mut self, input: &mut Input<'_>) {
        let (qpn, present) = (self.qpn(input), input.u32());
        let mut bit = 0;
        let mut some = || {
            bit += 1;
            present >> (bit - 1) & 1 == 0
        };
        let remote: IpAddr = addr(1);
        let budget = Budget { bytes: 1 << 14, datagrams: u32::from(input.u8()) };
        let peer = PeerAddress {
            local: addr(1),
            remote,
            path: 0,
            budget,
            kind: PeerKind::announced(budget, None),
        };
        let attr = QpAttr {
            state: some().then(|| input.of(&QpState::ALL)),
            sqd_async_notify: (!some()).then_some(true),
            pkey_index: some().then(|| u16::from(input.u8() % 2)),
            port: some().then(|| input.u8() % 3),
            access: some()
                .then(|| Access::from_bits(u32::from(input.u8() % 16)).unwrap_or_default()),
            qkey: some().then(|| input.u32()),
            peer: some().then_some(peer),
            path_mtu: some().then(|| input.of(&Mtu::ALL)),
            dest_qpn: some().then(|| self.qpn(input)),
            rq_psn: some().then(|| Psn::new(input.u32() & 0xff_ffff)),
            max_dest_rd_atomic: some().then(|| input.u8() % 20),
            min_rnr_timer: some().then(|| input.u8() % 40),
            sq_psn: some().then(|| Psn::new(input.u32() & 0xff_ffff)),
            max_rd_atomic: some().then(|| input.u8() % 20),
            retry_cnt: some().then(|| input.u8() % 9),
            rnr_retry: some().then(|| input.u8() % 9),
            timeout: some().then(|| input.u8() % 34),
            cur_state: (!some()).then(|| input.of(&QpState::ALL)),
            alt_path: (!some()).then(|| AltPath {
                remote,
                sgid_index: input.u8(),
                pkey_index: u16::from(input.u8() % 2),
                port: input.u8() % 3,
                timeout: input.u8() % 34,
            }),
            path_mig_state: (!some()).then_some(PathMigState::Armed),
        };
        let _ = self.engine.modify_qp(qpn, &attr, &mut self.host);
    }

    /// Takes a queue pair of any type and state to RTS. Random attributes hardly ever do.
    fn connect(&mut self, input: &mut Input<'_>) {
        let (qpn, dest) = (self.qpn(input), self.qpn(input));
        let Some((_, _, init)) = self.engine.query_qp(qpn) else { return };
        let mtu = input.of(&Mtu::ALL);
        let setup = super::common::Setup {
            qp_type: init.qp_type,
            mtu,
            psn: [u32::from(input.u8()); 2],
            timeout: input.u8() % 20,
            budget: Budget { bytes: 1 << 14, datagrams: u32::from(input.u8()) },
            ..Default::default()
        };
        let reset = QpAttr { state: Some(QpState::Reset), ..QpAttr::default() };
        let steps = super::common::steps(0, addr(1), dest, &setup);
        for mut attr in std::iter::once(reset).chain(steps) {
            if let Some(peer) = &mut attr.peer {
                peer.remote = addr(1);
            }
            let _ = self.engine.modify_qp(qpn, &attr, &mut self.host);
        }
    }

    fn post_send(&mut self, input: &mut Input<'_>) {
        let qpn = self.qpn(input);
        let (remote, rkey, imm) = (self.sge(input).addr, self.key(input), Some(input.bytes()));
        let ah = self.handles.first().copied().unwrap_or(AhId(input.u32()));
        let to = Destination { ah, qpn: self.qpn(input), qkey: input.u32() };
        let op = match input.u8() % 8 {
            0 => SendOp::Send { imm: None },
            1 => SendOp::Send { imm },
            2 => SendOp::Write { remote, rkey, imm: None },
            3 => SendOp::Write { remote, rkey, imm },
            4 => SendOp::Read { remote, rkey },
            5 => SendOp::FetchAdd { remote, rkey, add: input.u64() },
            6 => SendOp::CompareSwap { remote, rkey, compare: 0, swap: input.u64() },
            _ => SendOp::SendTo { to, imm },
        };
        let list = [self.sge(input), self.sge(input), self.sge(input)];
        let flags = input.u8();
        let data = match flags & 7 {
            0 => SendData::Inline(input.slice(usize::from(flags))),
            n => SendData::Sges(&list[..usize::from(n) % 4]),
        };
        let (signaled, solicited, fence) = (flags & 8 == 0, flags & 16 == 0, flags & 32 == 0);
        let mut wr = SendWr::new(op, data).wr_id(1).signaled(signaled);
        wr.solicited = solicited;
        wr.fence = fence;
        let _ = self.engine.post_send(qpn, &wr, &mut self.host);
    }

    fn post_recv(&mut self, input: &mut Input<'_>) {
        let (qpn, list) = (self.qpn(input), [self.sge(input), self.sge(input)]);
        let wr = RecvWr { wr_id: 2, sges: &list[..usize::from(input.u8() % 3)] };
        match self.srqs.last().filter(|_| input.u8().is_multiple_of(4)) {
            Some(srq) => drop(self.engine.post_srq_recv(*srq, &wr)),
            None => drop(self.engine.post_recv(qpn, &wr, &mut self.host)),
        }
    }

    fn shared(&mut self, input: &mut Input<'_>) {
        let id = self.srqs.first().copied().unwrap_or(SrqId(input.u32()));
        match input.u8() % 4 {
            0 if self.srqs.len() < 4 => {
                let (max_wr, max_sge) = (u32::from(input.u8()), u32::from(input.u8() % 5));
                self.srqs.extend(self.engine.create_srq(&SrqInit { pd: PdId(1), max_wr, max_sge }));
            }
            1 => drop(self.engine.destroy_srq(id)),
            _ => {
                let mut some = || (input.u8().is_multiple_of(2)).then(|| u32::from(input.u8()));
                let change = SrqChange { max_wr: some(), srq_limit: some() };
                let _ = self.engine.modify_srq(id, &change);
                let _ = self.engine.query_srq(id);
            }
        }
    }

    fn memory(&mut self, input: &mut Input<'_>) {
        if input.u8().is_multiple_of(3) && !self.keys.is_empty() {
            let key = self.keys.swap_remove(usize::from(input.u8()) % self.keys.len());
            let _ = self.engine.uses_key(key);
            self.host.regions.remove(key);
        } else if self.keys.len() < 16 {
            let start = u64::from(input.u16()) % 4096;
            let access = Access::from_bits(u32::from(input.u8() % 16)).unwrap_or_default();
            let pd = PdId(u32::from(input.u8() % 2));
            let len = u64::from(input.u16()) % 4096;
            self.keys.push(self.host.register_in(pd, start, len, access));
        }
    }

    fn handle(&mut self, input: &mut Input<'_>) {
        if let (2.., Some(ah)) = (self.handles.len(), self.handles.pop()) {
            self.engine.destroy_ah(ah);
            return;
        }
        let budget = Budget { bytes: u32::from(input.u16()), datagrams: u32::from(input.u8()) };
        let to = PeerAddress {
            local: addr(1),
            remote: addr(1),
            path: 0,
            budget,
            kind: PeerKind::announced(budget, None),
        };
        self.handles.extend(self.engine.create_ah(PdId(u32::from(input.u8() % 2)), &to));
    }

    /// Packets sent come back, or are lost.
    fn deliver(&mut self, input: &mut Input<'_>) {
        let budget = usize::from(input.u8());
        self.engine.poll_transmit(self.now, budget, &mut self.host, &mut self.wire);
        let lost = input.u8();
        let packets: Vec<_> = self.wire.packets.drain(..).collect();
        for (n, bytes) in packets.iter().enumerate() {
            if lost >> (n % 8) & 1 == 1 {
                continue;
            }
            let datagram = Datagram {
                bytes,
                src: addr(1),
                dst: addr(1),
                src_port: PORT,
                ip_id: IpId::Exact { id: 0, flags: DF },
                tos: input.u8(),
                hop_limit: None,
            };
            self.engine.handle_datagram(self.now, &datagram, &mut self.host);
        }
    }

    fn time(&mut self, input: &mut Input<'_>) {
        self.now = match input.u8() % 2 {
            0 => self.now.after(u64::from(input.u32())),
            _ => self.engine.poll_timeout().unwrap_or(self.now).max(self.now),
        };
        self.engine.handle_timeout(self.now, &mut self.host);
    }

    fn destroy(&mut self, input: &mut Input<'_>) {
        let qpn = self.qpn(input);
        match input.u8() % 4 {
            0 => self.engine.cq_overflow(CqId(u32::from(input.u8() % 2)), &mut self.host),
            1 => self.engine.left_late(self.now, self.now.after(1000)),
            _ => drop(self.engine.destroy_qp(qpn)),
        }
        while self.engine.poll_event().is_some() || self.engine.poll_srq_event().is_some() {}
    }
}

pub(super) fn run(data: &[u8]) {
    let mut input = Input(data);
    let mut calls = Calls::new(&mut input);
    let mut steps = 0;
    while !input.is_empty() && steps < 300 {
        steps += 1;
        match input.u8() % 16 {
            0 => calls.create_qp(&mut input),
            1 => calls.modify(&mut input),
            2 | 3 => calls.connect(&mut input),
            4..=6 => calls.post_send(&mut input),
            7 | 8 => calls.post_recv(&mut input),
            9 => calls.memory(&mut input),
            10 => calls.shared(&mut input),
            11 => calls.handle(&mut input),
            12 => calls.time(&mut input),
            13 if input.u8().is_multiple_of(4) => calls.destroy(&mut input),
            _ => calls.deliver(&mut input),
        }
        calls.host.completions.clear();
    }
    for qpn in std::mem::take(&mut calls.qps) {
        let _ = calls.engine.destroy_qp(qpn);
    }
    assert_eq!(calls.engine.qp_count(), 0);
    assert!(calls.engine.urgency() == Urgency::Idle, "nothing is left to send");
}

pub(super) fn corpus() -> Vec<Vec<u8>> {
    (0..64u64)
        .map(|seed| {
            let mut random = super::Random::new(seed + 1000);
            let len = 200 + random.below(1200);
            // A start: memory, queue pairs, connections.
            let mut input = vec![64, 0, 3, 31, 9, 1, 0, 0, 15, 1, 0, 16, 9, 1, 0, 0, 15, 1, 0, 16];
            input.extend((0..len).map(|_| random.below(256) as u8));
            input
        })
        .collect()
}
