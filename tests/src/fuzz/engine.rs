//! Packets with right ICRCs at a live queue pair, between calls of its program. The sender knows
//! the queue pair's number and window.
//!
//! Nothing panics. No byte changes except where the peer, or our own requests, may write. Each
//! request completes at most once; once the queue pair is broken, all have completed.

use std::collections::BTreeSet;
use std::ops::Range;

use rocinante_stack::mem::{Access, Sge};
use rocinante_stack::types::{Key, Qpn};
use rocinante_stack::verbs::{QpState, QpType, RecvWr, SendData, SendOp, SendWr};
use rocinante_stack::wire::{Opcode, Packet, bth};
use rocinante_stack::{Budget, IpId, QpAttr};

use super::Input;
use super::common::{self, BASE, QKEY, Setup, Solo, addr};

/// Where the peer may write.
const OPEN: Range<usize> = 4096..8192;
/// Where our own requests place their results.
const OURS: Range<usize> = 16_384..32_768;

struct Victim {
    solo: Solo,
    /// The peer's key.
    open: Key,
    posted: BTreeSet<u64>,
    next_id: u64,
}

impl Victim {
    fn new(kind: u8) -> Self {
        let qp_type = [QpType::Rc, QpType::Rc, QpType::Uc, QpType::Ud][usize::from(kind) % 4];
        let budget = Budget { bytes: 1 << 16, datagrams: 16 };
        let advertise = kind & 4 != 0;
        let setup = Setup {
            qp_type,
            budget,
            advertise,
            held: 8,
            rd_atomic: 4,
            depth: 16,
            ..Setup::script()
        };
        let mut solo = Solo::new(&setup);
        solo.end.host.regions.remove(solo.key);
        let len = setup.arena as u64;
        solo.key = solo.end.host.register(0, len, Access::LOCAL_WRITE);
        let (start, span) = (OPEN.start as u64, OPEN.len() as u64);
        let open = solo.end.host.register(start, span, Access::ALL);
        Self { solo, open, posted: BTreeSet::new(), next_id: 0 }
    }

    fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// A random range in `OURS`, where results may be placed.
    fn ours(&self, input: &mut Input<'_>) -> Sge {
        let len = u32::from(input.u16()) % 1500;
        let room = OURS.len() as u64 - u64::from(len) - 8;
        self.solo.sge(OURS.start as u64 + u64::from(input.u16()) % room, len)
    }

    /// A remote address and key: where our program expects the peer's memory, or where the peer may
    /// write in ours.
    fn address(&self, input: &mut Input<'_>) -> (u64, Key) {
        let va = match input.u8() % 8 {
            0 => input.u64(),
            1 => u64::MAX - u64::from(input.u8()),
            _ => BASE + OPEN.start as u64 + u64::from(input.u16()) % 5000,
        };
        let key = match input.u8() % 8 {
            0 => self.solo.key,
            1 => Key(input.u32()),
            _ => self.open,
        };
        (va, key)
    }

    fn post_send(&mut self, input: &mut Input<'_>) {
        let wr_id = self.id();
        let list = [self.ours(input), self.ours(input)];
        let (remote, rkey) = self.address(input);
        let imm = (input.u8().is_multiple_of(2)).then_some([1, 2, 3, 4]);
        let (op, elements) = match input.u8() % 7 {
            0 | 1 => (SendOp::Send { imm }, 2),
            2 => (SendOp::Write { remote, rkey, imm }, 2),
            3 | 4 => (SendOp::Read { remote, rkey }, 2),
            5 => (SendOp::FetchAdd { remote: remote & !7, rkey, add: 1 }, 1),
            _ => (SendOp::CompareSwap { remote: remote & !7, rkey, compare: 0, swap: 1 }, 1),
        };
        let mut list = list;
        if elements == 1 {
            list[0].len = 8;
        }
        let data = SendData::Sges(&list[..elements]);
        let fence = input.u8().is_multiple_of(8);
        let mut wr = SendWr::new(op, data).wr_id(wr_id);
        wr.fence = fence;
        if self.solo.post_wr(&wr).is_ok() {
            self.posted.insert(wr_id);
        }
    }

    fn post_recv(&mut self, input: &mut Input<'_>) {
        let wr_id = self.id();
        let list = [self.ours(input), self.ours(input)];
        let end = &mut self.solo.end;
        let wr = RecvWr { wr_id, sges: &list };
        if end.engine.post_recv(end.qpn, &wr, &mut end.host).is_ok() {
            self.posted.insert(wr_id);
        }
    }

    /// A packet close to the expected one.
    fn packet(&self, input: &mut Input<'_>) -> Vec<u8> {
        let (_, attr, init) = self.solo.end.engine.query_qp(self.solo.end.qpn).expect("it lives");
        let first = match init.qp_type {
            QpType::Rc => 0,
            QpType::Uc => 0x20,
            QpType::Ud => 0x64,
        };
        let opcode = match input.u8() {
            other @ 0xf0.. => Opcode(other.wrapping_mul(17)),
            near => Opcode(first + near % 0x1f),
        };
        let mut body = self.headers(opcode, input);
        let len = usize::from(input.of(&[0u16, 1, 4, 8, 40, 255, 256, 256, 256, 257, 300]));
        body.resize(body.len() + len, 0x5a);
        let mut header = [0; bth::LEN];
        header[0] = opcode.0;
        header[1] = (body.len().next_multiple_of(4) - body.len()) as u8 * 0x10;
        if input.u8().is_multiple_of(16) {
            header[1] = input.u8();
        }
        header[2..4].copy_from_slice(&0xffffu16.to_be_bytes());
        header[4..8].copy_from_slice(&self.solo.end.qpn.value().to_be_bytes());
        let request = opcode.info().is_none_or(rocinante_stack::wire::OpcodeInfo::is_request);
        let near = if request { attr.rq_psn } else { attr.sq_psn };
        let near = near.map_or(0, |psn| psn.value());
        let psn = match input.u8() {
            0..=160 => near.wrapping_sub(u32::from(!request)),
            161..=220 => near.wrapping_sub(u32::from(input.u8() % 24)),
            221..=250 => near.wrapping_add(u32::from(input.u8() % 8)),
            _ => input.u32(),
        };
        header[8..12].copy_from_slice(&(psn & 0xff_ffff).to_be_bytes());
        header[8] = input.u8() & 0x80;
        let mut packet = [&header[..], &body].concat();
        packet.resize(packet.len().next_multiple_of(4) + 4, 0);
        if input.u8().is_multiple_of(32) {
            packet.truncate(usize::from(input.u8()) % packet.len());
        }
        if packet.len() >= 16 {
            common::seal(&mut packet);
        }
        packet
    }

    fn headers(&self, opcode: Opcode, input: &mut Input<'_>) -> Vec<u8> {
        let Some(info) = opcode.info() else { return input.slice(16).to_vec() };
        let mut body = vec![0; info.header_len - bth::LEN];
        let (va, key) = self.address(input);
        // A RETH and an AtomicETH begin alike; a DETH begins with the Q_Key.
        if body.len() >= 16 {
            body[..8].copy_from_slice(&va.to_be_bytes());
            body[8..12].copy_from_slice(&key.0.to_be_bytes());
            let len = match input.u8() % 4 {
                0 => input.u32(),
                _ => u32::from(input.of(&[0u16, 1, 8, 256, 300, 512, 600])),
            };
            body[12..16].copy_from_slice(&len.to_be_bytes());
            body[16..].fill(input.u8());
        } else if body.len() >= 8 && opcode.0 >= 0x60 {
            body[..4].copy_from_slice(&QKEY.to_be_bytes());
        } else if let [syndrome, rest @ ..] = &mut body[..] {
            *syndrome =
                input.of(&[0x1f, 0x1f, 0x1f, 0, 3, 0x60, 0x61, 0x62, 0x63, 0x21, 0x80, 0x64]);
            rest.fill(input.u8());
        }
        body
    }

    fn modify(&mut self, input: &mut Input<'_>) {
        let qpn = self.solo.end.qpn;
        let state = input.of(&[QpState::Sqd, QpState::Rts, QpState::Rts, QpState::Err]);
        let _ = self.solo.end.modify(qpn, &QpAttr { state: Some(state), ..QpAttr::default() });
    }

    /// Each completed request was posted, and had not completed before.
    fn settle(&mut self) {
        for (id, status) in self.solo.completed() {
            assert!(
                self.posted.remove(&id),
                "{id} completed twice, or was never posted: {status:?}"
            );
        }
        if self.solo.state() == QpState::Err {
            assert!(self.posted.is_empty(), "not flushed: {:?}", self.posted);
        }
    }
}

pub(super) fn run(data: &[u8]) {
    let mut input = Input(data);
    let mut victim = Victim::new(input.u8());
    let before = victim.solo.end.host.arena.clone();
    let mut steps = 0;
    while !input.is_empty() && steps < 200 {
        steps += 1;
        match input.u8() % 16 {
            0 | 1 => victim.post_send(&mut input),
            2 => victim.post_recv(&mut input),
            3 => {
                victim.solo.wait(1 << (10 + input.u8() % 24));
            }
            4 => {
                victim.solo.end.out.room = usize::from(input.u8() % 4);
                victim.solo.packets();
                victim.solo.end.out.room = usize::MAX;
            }
            5 if input.u8().is_multiple_of(4) => victim.modify(&mut input),
            6 if input.u8().is_multiple_of(8) => {
                victim.solo.end.host.regions.remove(victim.open);
            }
            7 => {
                let (packet, id) = (victim.packet(&mut input), input.u16());
                let from = addr(if id % 64 == 0 { 3 } else { 2 });
                victim.solo.receive_from(from, addr(1), IpId::Hint(id), &packet);
            }
            _ => {
                victim.solo.receive(&victim.packet(&mut input));
            }
        }
        check_sent(&mut victim);
        victim.settle();
    }
    let after = &victim.solo.end.host.arena;
    let outside = |at: &usize| !OPEN.contains(at) && !OURS.contains(at);
    let changed = (0..after.len()).filter(outside).find(|at| after[*at] != before[*at]);
    assert_eq!(changed, None, "a byte outside of all writable ranges");
    // At the end, each request that is left is flushed once.
    let qpn = victim.solo.end.qpn;
    let end = QpAttr { state: Some(QpState::Err), ..QpAttr::default() };
    victim.solo.end.modify(qpn, &end).expect("the error state can always be reached");
    victim.settle();
}

/// Packets sent are whole, and addressed to the peer.
fn check_sent(victim: &mut Victim) {
    for packet in victim.solo.packets() {
        let packet = Packet::parse(&packet).expect("each datagram sent is a packet");
        let to = packet.bth().dest_qpn;
        assert!(to == common::PEER || to == Qpn::new(0), "to {to:?}");
        assert!(packet.payload().len() <= 256);
    }
}

pub(super) fn corpus() -> Vec<Vec<u8>> {
    // One conversation for each kind of queue pair, made of random bytes.
    (0..64u8)
        .map(|kind| {
            let mut random = super::Random::new(u64::from(kind) + 77);
            let len = 100 + random.below(700);
            let mut input = vec![kind];
            input.extend((0..len).map(|_| random.below(256) as u8));
            input
        })
        .collect()
}
