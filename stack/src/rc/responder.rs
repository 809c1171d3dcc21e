//! The responder: checks a request, executes it, and remembers what it owes.
//!
//! The order of the checks is the protocol's: PSN, opcode sequence, opcode validity, resources, length, key,
//! then execution (`rxe_resp.c` has the same pipeline). The responder returns what happened; completions, state changes and
//! counters are the queue pair's.

use super::records::{DataResponse, Kind, Records};
use super::rq::RecvQueue;
use super::sq::MESSAGE_MAX;
use crate::mem::{Access, AtomicOp, Memory, PdId, Sge};
use crate::types::{Key, Mtu};
use crate::verbs::{WcOpcode, WcStatus};
use crate::wire::{Aeth, NakCode, Operation, Packet, Place, Syndrome};

/// Where in a message the responder is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Message {
    None,
    Send { placed: u32 },
    Write { va: u64, rkey: Key, left: u32, len: u32 },
}

/// What the connection permits.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rights {
    pub(super) pd: PdId,
    pub(super) mtu: Mtu,
    pub(super) access: Access,
    pub(super) min_rnr_timer: u8,
}

/// A receive that is to be completed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Received {
    pub(super) wr_id: u64,
    pub(super) status: WcStatus,
    pub(super) opcode: WcOpcode,
    pub(super) byte_len: u32,
    pub(super) imm: Option<[u8; 4]>,
    pub(super) solicited: bool,
}

/// What became of a request.
#[derive(Debug)]
pub(super) enum Outcome {
    /// Executed; a receive may be complete, a response may be due.
    Done { received: Option<Received>, respond: bool },
    /// Seen before; a response may be due again.
    Duplicate { respond: bool },
    /// A duplicate that cannot be answered any more.
    Stale,
    /// After a gap; `report` if that is news to the peer.
    Gap { report: bool },
    /// No receive was posted.
    NotReady,
    /// Refused for good: the NAK is queued, the queue pair must break.
    Refused { code: NakCode, received: Option<Received> },
}

/// A NAK that is due: for the request at `psn`, with everything before it acknowledged.
#[derive(Debug, Clone, Copy)]
struct Nak {
    psn: u64,
    syndrome: Syndrome,
}

#[derive(Debug)]
pub(super) struct Responder {
    /// Expected PSN.
    epsn: u64,
    msn: u32,
    message: Message,
    /// A NAK for `epsn` is due or out: silence until that arrives.
    nak_sent: bool,
    /// The highest PSN that came too early.
    gap: u64,
    records: Records,
    /// An acknowledgement of everything up to `ackable` is due.
    ack: bool,
    /// The last PSN of a SEND or WRITE that was executed. READs and atomics are acknowledged by their own responses, and
    /// never by an ACK: some requesters would take it for the response.
    ackable: u64,
    nak: Option<Nak>,
    /// Whether acknowledgements say how many receives are posted.
    advertise: bool,
    pub(super) rq: RecvQueue,
}

/// The next response to send.
#[derive(Debug, Clone, Copy)]
pub(super) enum Response {
    /// With data.
    Data(DataResponse),
    /// An ACK or NAK.
    Acknowledge { psn: u64, syndrome: Syndrome, msn: u32 },
}

impl Responder {
    pub(super) fn new(rq: RecvQueue) -> Self {
        Self {
            epsn: 0,
            msn: 0,
            message: Message::None,
            nak_sent: false,
            gap: 0,
            records: Records::default(),
            ack: false,
            ackable: 0,
            nak: None,
            advertise: false,
            rq,
        }
    }

    pub(super) fn start(&mut self, psn: u64, max_dest_rd_atomic: u8, advertise: bool) {
        self.stop();
        self.advertise = advertise;
        self.epsn = psn;
        self.ackable = psn - 1;
        self.msn = 0;
        self.nak_sent = false;
        self.gap = 0;
        self.records.start(usize::from(max_dest_rd_atomic));
    }

    pub(super) fn expected(&self) -> u64 {
        self.epsn
    }

    /// Whether a SEND is half placed in the oldest receive.
    pub(super) fn in_receive(&self) -> bool {
        matches!(self.message, Message::Send { .. })
    }

    /// Drops everything that was to be sent.
    pub(super) fn stop(&mut self) {
        self.close();
        self.records.clear();
        self.nak = None;
    }

    /// Takes no more requests: what remains to be sent are the responses to earlier requests and the NAK that tells
    /// the peer why the queue pair broke.
    pub(super) fn close(&mut self) {
        self.ack = false;
        self.message = Message::None;
    }

    /// Takes a request.
    #[inline]
    pub(super) fn request(
        &mut self,
        packet: &Packet<'_>,
        rights: &Rights,
        memory: &mut impl Memory,
    ) -> Outcome {
        let psn = packet.bth.psn.expand(self.epsn);
        if psn > self.epsn {
            return self.early(psn);
        }
        if psn < self.epsn {
            return self.duplicate(packet, psn, rights.mtu);
        }
        let outcome = match packet.info.operation {
            Operation::Send => self.send(packet, rights, memory),
            Operation::Write => self.write(packet, rights, memory),
            Operation::ReadRequest => self.read(packet, rights, memory),
            Operation::CompareSwap | Operation::FetchAdd => self.atomic(packet, rights, memory),
            _ => Err(Refusal::Invalid),
        };
        match outcome {
            Ok(received) => {
                self.heard();
                Outcome::Done { received, respond: self.has_response() }
            }
            Err(Refusal::NotReady) => {
                // Said each time the expected packet comes; what follows it is dropped in silence.
                self.queue_nak(Syndrome::rnr(rights.min_rnr_timer));
                Outcome::NotReady
            }
            Err(refusal) => self.refuse(refusal),
        }
    }

    /// The expected request came and was executed: a NAK that asked for it is answered.
    #[inline]
    fn heard(&mut self) {
        self.nak_sent = false;
        let Some(nak) = &mut self.nak else { return };
        // It has not even left.
        if nak.syndrome == Syndrome::nak(NakCode::PsnSequenceError) && self.gap >= self.epsn {
            nak.psn = self.epsn;
            self.nak_sent = true;
        } else {
            self.nak = None;
            self.ack = true;
        }
    }

    fn send(
        &mut self,
        packet: &Packet<'_>,
        rights: &Rights,
        memory: &mut impl Memory,
    ) -> Result<Option<Received>, Refusal> {
        let place = packet.info.place;
        let placed = match self.message {
            Message::None if place.begins() => 0,
            Message::Send { placed } if !place.begins() => placed,
            _ => return Err(Refusal::Invalid),
        };
        let payload = packet.payload();
        check_length(payload.len(), place, rights.mtu)?;
        let Some(wr_id) = self.rq.front() else { return Err(Refusal::NotReady) };
        if payload.len() as u64 + u64::from(placed) > u64::from(self.rq.room()) {
            return Err(Refusal::Receive(NakCode::InvalidRequest, WcStatus::LocLenErr));
        }
        if packet.invalidate().is_some() {
            // Ordinary regions cannot be invalidated by a peer, and nothing else has a key yet.
            return Err(Refusal::Access);
        }
        self.rq
            .scatter(placed, payload, rights.pd, memory)
            .map_err(|_| Refusal::Receive(NakCode::RemoteOperationalError, WcStatus::LocProtErr))?;
        #[allow(clippy::cast_possible_truncation)]
        let placed = placed + payload.len() as u32;
        self.accept(packet);
        if !place.ends() {
            self.message = Message::Send { placed };
            return Ok(None);
        }
        Ok(Some(self.receive(packet, wr_id, WcOpcode::Recv, placed)))
    }

    fn write(
        &mut self,
        packet: &Packet<'_>,
        rights: &Rights,
        memory: &mut impl Memory,
    ) -> Result<Option<Received>, Refusal> {
        let place = packet.info.place;
        let payload = packet.payload();
        #[allow(clippy::cast_possible_truncation)]
        let now = payload.len() as u32;
        let (va, rkey, left, len) = match (self.message, packet.reth()) {
            (Message::None, Some(reth)) if place.begins() => {
                (reth.va, reth.rkey, reth.len, reth.len)
            }
            (Message::Write { va, rkey, left, len }, None) if !place.begins() => {
                (va, rkey, left, len)
            }
            _ => return Err(Refusal::Invalid),
        };
        if !rights.access.admits(Access::REMOTE_WRITE) {
            return Err(Refusal::Invalid);
        }
        let receive = if packet.info.consumes_receive() {
            Some(self.rq.front().ok_or(Refusal::NotReady)?)
        } else {
            None
        };
        check_length(payload.len(), place, rights.mtu)?;
        let fits = if place.ends() { now == left } else { now < left };
        if !fits || u64::from(len) > MESSAGE_MAX {
            return Err(Refusal::Invalid);
        }
        if len > 0 {
            let regions = memory.regions();
            if place == Place::First {
                // The whole range, before the first byte is placed.
                let whole = Sge { addr: va, len, lkey: rkey };
                regions.remote_write(rights.pd, &whole).map_err(|_| Refusal::Access)?;
            }
            let target = Sge { addr: va, len: now, lkey: rkey };
            let target = regions.remote_write(rights.pd, &target).map_err(|_| Refusal::Access)?;
            memory.place(target, payload);
        }
        self.accept(packet);
        if !place.ends() {
            let va = va.wrapping_add(u64::from(now));
            self.message = Message::Write { va, rkey, left: left - now, len };
            return Ok(None);
        }
        self.finish();
        Ok(receive.map(|wr_id| self.receive(packet, wr_id, WcOpcode::RecvRdmaWithImm, len)))
    }

    fn read(
        &mut self,
        packet: &Packet<'_>,
        rights: &Rights,
        memory: &impl Memory,
    ) -> Result<Option<Received>, Refusal> {
        let Some(reth) = packet.reth() else { return Err(Refusal::Invalid) };
        let admitted = self.message == Message::None
            && rights.access.admits(Access::REMOTE_READ)
            && packet.payload().is_empty()
            && u64::from(reth.len) <= MESSAGE_MAX;
        if !admitted {
            return Err(Refusal::Invalid);
        }
        if !self.records.make_room() {
            return Err(Refusal::Invalid);
        }
        if reth.len > 0 {
            let whole = Sge { addr: reth.va, len: reth.len, lkey: reth.rkey };
            memory.regions().remote_read(rights.pd, &whole).map_err(|_| Refusal::Access)?;
        }
        let packets = u64::from(reth.len.div_ceil(rights.mtu.bytes()).max(1));
        let kind = Kind::Read { va: reth.va, rkey: reth.rkey, len: reth.len };
        self.record(packets, kind);
        Ok(None)
    }

    fn atomic(
        &mut self,
        packet: &Packet<'_>,
        rights: &Rights,
        memory: &mut impl Memory,
    ) -> Result<Option<Received>, Refusal> {
        let Some(eth) = packet.atomic_eth() else { return Err(Refusal::Invalid) };
        let admitted = self.message == Message::None
            && rights.access.admits(Access::REMOTE_ATOMIC)
            && packet.payload().is_empty()
            && eth.va % 8 == 0;
        if !admitted {
            return Err(Refusal::Invalid);
        }
        if !self.records.make_room() {
            return Err(Refusal::Invalid);
        }
        let regions = memory.regions();
        let at = regions.remote_atomic(rights.pd, eth.va, eth.rkey).map_err(|_| Refusal::Access)?;
        let op = match packet.info.operation {
            Operation::CompareSwap => {
                AtomicOp::CompareSwap { compare: eth.compare, swap: eth.swap_add }
            }
            _ => AtomicOp::FetchAdd { add: eth.swap_add },
        };
        let found = memory.atomic(at, op);
        self.record(1, Kind::Atomic { found });
        Ok(None)
    }

    fn record(&mut self, packets: u64, kind: Kind) {
        let first = self.epsn;
        self.epsn += packets;
        self.finish();
        self.records.push(first, self.epsn - 1, self.msn, kind);
    }

    fn accept(&mut self, packet: &Packet<'_>) {
        self.ackable = self.epsn;
        self.epsn += 1;
        self.ack |= packet.bth.ack_req;
    }

    fn finish(&mut self) {
        self.message = Message::None;
        self.msn = (self.msn + 1) & 0xff_ffff;
    }

    /// The oldest receive is done.
    fn receive(
        &mut self,
        packet: &Packet<'_>,
        wr_id: u64,
        opcode: WcOpcode,
        byte_len: u32,
    ) -> Received {
        if opcode == WcOpcode::Recv {
            self.finish();
        }
        self.rq.pop();
        Received {
            wr_id,
            status: WcStatus::Success,
            opcode,
            byte_len,
            imm: packet.immediate(),
            solicited: packet.bth.solicited,
        }
    }

    /// A request after a gap: reported once.
    fn early(&mut self, psn: u64) -> Outcome {
        self.gap = self.gap.max(psn);
        let report = !self.nak_sent;
        if report {
            self.queue_nak(Syndrome::nak(NakCode::PsnSequenceError));
        }
        Outcome::Gap { report }
    }

    fn duplicate(&mut self, packet: &Packet<'_>, psn: u64, mtu: Mtu) -> Outcome {
        if matches!(packet.info.operation, Operation::Send | Operation::Write) {
            self.ack |= packet.bth.ack_req;
            return Outcome::Duplicate { respond: self.ack };
        }
        if self.records.repeat(packet, psn, mtu) {
            Outcome::Duplicate { respond: true }
        } else {
            Outcome::Stale
        }
    }

    fn queue_nak(&mut self, syndrome: Syndrome) {
        self.nak = Some(Nak { psn: self.epsn, syndrome });
        self.nak_sent = true;
    }

    fn refuse(&mut self, refusal: Refusal) -> Outcome {
        let (code, status) = match refusal {
            Refusal::Receive(code, status) => (code, Some(status)),
            Refusal::Access => (NakCode::RemoteAccessError, None),
            Refusal::Invalid | Refusal::NotReady => (NakCode::InvalidRequest, None),
        };
        self.queue_nak(Syndrome::nak(code));
        let received = status.and_then(|status| {
            let wr_id = self.rq.front()?;
            self.rq.pop();
            Some(Received {
                wr_id,
                status,
                opcode: WcOpcode::Recv,
                byte_len: 0,
                imm: None,
                solicited: true,
            })
        });
        Outcome::Refused { code, received }
    }

    /// Whether there is a response to send.
    #[inline]
    pub(super) fn has_response(&self) -> bool {
        self.ack || self.nak.is_some() || self.records.due()
    }

    /// Whether somebody waits for one: anything but a plain acknowledgement.
    #[inline]
    pub(super) fn has_urgent_response(&self) -> bool {
        self.nak.is_some() || self.records.due()
    }

    /// The response to send next: READs and atomics in the order of their PSNs, then the acknowledgement, which
    /// therefore never overtakes one of them; a NAK takes the acknowledgement's place.
    #[inline]
    pub(super) fn response(&mut self, mtu: Mtu) -> Option<Response> {
        if let Some(data) = self.records.response(mtu) {
            return Some(Response::Data(data));
        }
        let (psn, syndrome) = match self.nak {
            Some(nak) => (nak.psn, nak.syndrome),
            None if self.ack => (self.ackable, self.ack(self.msn).syndrome),
            None => return None,
        };
        Some(Response::Acknowledge { psn, syndrome, msn: self.msn })
    }

    /// The AETH of a positive response to the message `msn`.
    pub(super) fn ack(&self, msn: u32) -> Aeth {
        if !self.advertise {
            return Aeth::ack(msn);
        }
        // The limit is a message's number, so an older response grants what has been completed since too.
        let since = u64::from(self.msn.wrapping_sub(msn) & 0xff_ffff);
        let free = self.rq.len() - u64::from(self.in_receive());
        Aeth { syndrome: Syndrome::credits(since + free), msn }
    }

    /// `response` left.
    #[inline]
    pub(super) fn responded(&mut self, response: &Response) {
        match response {
            Response::Acknowledge { .. } => {
                self.nak = None;
                self.ack = false;
            }
            Response::Data(DataResponse::Read { psn, .. } | DataResponse::Atomic { psn, .. }) => {
                self.records.sent(*psn);
                // It acknowledges all that was before it.
                self.ack &= *psn < self.ackable;
            }
        }
    }

    /// The memory of the READ under way is gone: it ends with a NAK.
    pub(super) fn read_failed(&mut self) {
        self.close();
        if let Some(psn) = self.records.fail() {
            self.nak = Some(Nak { psn, syndrome: Syndrome::nak(NakCode::RemoteAccessError) });
        }
    }
}

/// Why a request is not executed.
#[derive(Debug, Clone, Copy)]
enum Refusal {
    Invalid,
    Access,
    NotReady,
    /// The receive it would consume fails too.
    Receive(NakCode, WcStatus),
}

fn check_length(payload: usize, place: Place, mtu: Mtu) -> Result<(), Refusal> {
    let mtu = mtu.bytes() as usize;
    let right = match place {
        Place::First | Place::Middle => payload == mtu,
        Place::Last => payload > 0 && payload <= mtu,
        Place::Only => payload <= mtu,
    };
    if right { Ok(()) } else { Err(Refusal::Invalid) }
}
