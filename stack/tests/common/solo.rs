//! One engine; the test plays its peer. PSNs are relative to the first of their direction.

use std::net::IpAddr;

use rocinante_scripts::{aeth, atomic_eth, packet, reth};
use rocinante_stack::mem::{Access, Sge};
use rocinante_stack::types::{Key, Psn, Qpn, Time};
use rocinante_stack::verbs::{QpEvent, QpState, RecvWr, SendData, SendOp, SendWr, WcStatus};
use rocinante_stack::wire::icrc::DF;
use rocinante_stack::wire::{NakCode, Opcode, Syndrome};
use rocinante_stack::{Datagram, IpId, PostError, TxStop};

use super::{End, PORT, Setup, addr, describe, template};

/// The number of the peer's queue pair.
pub const PEER: Qpn = Qpn::new(0x77);

pub struct Solo {
    pub end: End,
    pub now: Time,
    pub setup: Setup,
    /// The whole arena, with all rights.
    pub key: Key,
}

impl Solo {
    pub fn new(setup: &Setup) -> Self {
        let mut end = End::new(1, setup);
        end.connect(end.qpn, 0, PEER, setup);
        let key = end.host.register(0, setup.arena as u64, Access::ALL);
        Self { end, now: Time(1_000), setup: setup.clone(), key }
    }

    pub fn script() -> Self {
        Self::new(&Setup::script())
    }

    /// With `count` SENDs of `len` bytes under way, from `wr_id` 1 on.
    pub fn sending(setup: &Setup, count: u64, len: u32) -> Self {
        let mut solo = Self::new(setup);
        solo.sends(1..=count, len).sent();
        solo
    }

    // ---- our side ----

    /// Posts a signaled request with data of the arena.
    pub fn post(&mut self, wr_id: u64, op: SendOp, sges: &[Sge]) -> &mut Self {
        self.post_wr(&SendWr::new(op, SendData::Sges(sges)).wr_id(wr_id)).expect("a good request");
        self
    }

    pub fn post_wr(&mut self, wr: &SendWr<'_>) -> Result<(), PostError> {
        self.end.engine.post_send(self.end.qpn, wr, &mut self.end.host)
    }

    pub fn post_recv(&mut self, wr_id: u64, sges: &[Sge]) {
        self.try_recv(wr_id, sges).expect("a good request");
    }

    pub fn try_recv(&mut self, wr_id: u64, sges: &[Sge]) -> Result<(), PostError> {
        let wr = RecvWr { wr_id, sges };
        self.end.engine.post_recv(self.end.qpn, &wr, &mut self.end.host)
    }

    /// A range of the arena.
    pub fn sge(&self, offset: u64, len: u32) -> Sge {
        super::sge(offset, len, self.key)
    }

    /// Posts a SEND of the first `len` bytes of the arena.
    pub fn send(&mut self, wr_id: u64, len: u32) -> &mut Self {
        self.post(wr_id, SendOp::Send { imm: None }, &[self.sge(0, len)])
    }

    /// Posts a SEND for each `wr_id`.
    pub fn sends(&mut self, wr_ids: impl IntoIterator<Item = u64>, len: u32) -> &mut Self {
        wr_ids.into_iter().for_each(|wr_id| _ = self.send(wr_id, len));
        self
    }

    /// Sends a first message, `wr_id` 1, and acknowledges it after `nanoseconds`: now the round
    /// trip is known.
    pub fn know_round_trip(&mut self, nanoseconds: u64) {
        self.send(1, 10).sent();
        self.wait(nanoseconds);
        assert_eq!(self.receive_ack(0).completed(), [(1, WcStatus::Success)]);
    }

    /// Posts a READ of `len` bytes to the start of the arena.
    pub fn read(&mut self, wr_id: u64, len: u32) -> &mut Self {
        self.post(wr_id, SendOp::Read { remote: 0x9000, rkey: Key(0x99) }, &[self.sge(0, len)])
    }

    /// Posts a fetch-and-add; its result goes to `offset`.
    pub fn add(&mut self, wr_id: u64, offset: u64) -> &mut Self {
        let op = SendOp::FetchAdd { remote: 0x9000, rkey: Key(0x99), add: 1 };
        self.post(wr_id, op, &[self.sge(offset, 8)])
    }

    /// The packets that leave now, raw.
    pub fn packets(&mut self) -> Vec<Vec<u8>> {
        let end = &mut self.end;
        let sent = end.engine.poll_transmit(self.now, 1 << 16, &mut end.host, &mut end.out);
        assert_ne!(sent.stop, TxStop::Budget);
        assert_eq!(sent.packets, end.out.packets.len(), "it says what it sent");
        end.probe();
        end.out.packets.drain(..).collect()
    }

    /// The packets that leave now, described.
    pub fn sent(&mut self) -> Vec<String> {
        let first = [self.setup.psn[0], self.setup.psn[1]];
        self.packets().iter().map(|packet| describe(packet, first)).collect()
    }

    /// The completions since the last call.
    pub fn completed(&mut self) -> Vec<(u64, WcStatus)> {
        self.end.host.completed()
    }

    pub fn event(&mut self) -> Option<QpEvent> {
        self.end.engine.poll_event().map(|(_, event)| event)
    }

    pub fn state(&self) -> QpState {
        self.end.state(self.end.qpn)
    }

    /// Lets time pass, in one step.
    pub fn wait(&mut self, nanoseconds: u64) {
        self.now = self.now.after(nanoseconds);
        self.end.engine.handle_timeout(self.now, &mut self.end.host);
    }

    /// Jumps to the next deadline; returns the time that passed.
    pub fn wait_for_timer(&mut self) -> Option<u64> {
        let due = self.end.engine.poll_timeout()?;
        let passed = due.since(self.now);
        self.wait(passed);
        Some(passed)
    }

    // ---- the peer's side ----

    /// A request to us: headers behind the BTH, payload.
    pub fn request(&self, opcode: Opcode, psn: i64, rest: &[&[u8]]) -> Vec<u8> {
        self.packet(opcode, self.setup.psn[1], psn, true, rest)
    }

    /// A response to us.
    pub fn response(&self, opcode: Opcode, psn: i64, rest: &[&[u8]]) -> Vec<u8> {
        self.packet(opcode, self.setup.psn[0], psn, false, rest)
    }

    fn packet(&self, opcode: Opcode, first: u32, psn: i64, ack: bool, rest: &[&[u8]]) -> Vec<u8> {
        let psn = Psn::new((i64::from(first) + psn) as u32);
        let mut packet = packet(opcode, self.end.qpn, psn, ack, rest);
        seal(&mut packet);
        packet
    }

    /// Delivers a sealed packet.
    pub fn receive(&mut self, packet: &[u8]) -> &mut Self {
        self.receive_from(addr(2), addr(1), IpId::Exact { id: 0, flags: DF }, packet)
    }

    pub fn receive_from(
        &mut self,
        src: IpAddr,
        dst: IpAddr,
        ip_id: IpId,
        packet: &[u8],
    ) -> &mut Self {
        let datagram =
            Datagram { bytes: packet, src, dst, src_port: PORT, ip_id, tos: 0, hop_limit: None };
        self.end.engine.handle_datagram(self.now, &datagram, &mut self.end.host);
        self
    }

    pub fn receive_request(&mut self, opcode: Opcode, psn: i64, rest: &[&[u8]]) -> &mut Self {
        self.receive(&self.request(opcode, psn, rest))
    }

    pub fn receive_syndrome(&mut self, psn: i64, syndrome: Syndrome) -> &mut Self {
        self.receive(&self.response(Opcode::RC_ACKNOWLEDGE, psn, &[&aeth(syndrome, 0)]))
    }

    pub fn receive_ack(&mut self, psn: i64) -> &mut Self {
        self.receive_syndrome(psn, Syndrome::ACK_UNLIMITED)
    }

    pub fn receive_nak(&mut self, psn: i64, code: NakCode) -> &mut Self {
        self.receive_syndrome(psn, Syndrome::nak(code))
    }

    /// The peer reports `psn` as missing, and `held` as received.
    pub fn receive_gap(&mut self, psn: i64, held: &[i64]) -> &mut Self {
        let mut report = vec![0; 4 * (held.iter().max().unwrap_or(&psn) - psn + 32) as usize / 32];
        held.iter().for_each(|held| report[(held - psn) as usize / 8] |= 1 << ((held - psn) % 8));
        let nak = aeth(Syndrome::nak(NakCode::PsnSequenceError), 0);
        self.receive(&self.response(Opcode::RC_ACKNOWLEDGE, psn, &[&nak, &report]))
    }

    pub fn receive_rnr(&mut self, psn: i64, timer: u8) -> &mut Self {
        self.receive_syndrome(psn, Syndrome::rnr(timer))
    }

    /// A READ response.
    pub fn receive_data(&mut self, opcode: Opcode, psn: i64, payload: &[u8]) -> &mut Self {
        let middle = opcode == Opcode::RC_RDMA_READ_RESPONSE_MIDDLE;
        let aeth = if middle { vec![] } else { aeth(Syndrome::ACK_UNLIMITED, 0) };
        self.receive(&self.response(opcode, psn, &[&aeth, payload]))
    }

    /// The response to an atomic.
    pub fn receive_found(&mut self, psn: i64, found: u64) -> &mut Self {
        let rest = [&aeth(Syndrome::ACK_UNLIMITED, 0)[..], &found.to_be_bytes()];
        self.receive(&self.response(Opcode::RC_ATOMIC_ACKNOWLEDGE, psn, &rest))
    }

    /// A RETH for the arena.
    pub fn reth(&self, offset: u64, len: u32) -> Vec<u8> {
        reth(super::BASE + offset, self.key, len)
    }

    /// An AtomicETH for the arena.
    pub fn atomic_eth(&self, offset: u64, swap_add: u64, compare: u64) -> Vec<u8> {
        atomic_eth(super::BASE + offset, self.key, swap_add, compare)
    }
}

/// Seals a packet from the peer to us.
pub fn seal(packet: &mut [u8]) {
    template(addr(2), addr(1)).seal(packet);
}
