//! The responder: checks a request, executes it, and remembers what it owes.
//!
//! The order of the checks is the protocol's: PSN, opcode sequence, opcode validity, resources, length, key,
//! then execution (`rxe_resp.c` has the same pipeline). The responder returns what happened; completions, state changes and
//! counters are the queue pair's.

use std::collections::VecDeque;

use super::rq::RecvQueue;
use crate::mem::{Access, AtomicOp, Memory, PdId, Sge};
use crate::types::{Key, Mtu};
use crate::verbs::{WcOpcode, WcStatus};
use crate::wire::{NakCode, Operation, Packet, Place, Syndrome};

/// A READ or atomic that was accepted: its response, for now and for duplicates.
#[derive(Debug, Clone, Copy)]
struct Record {
    first: u64,
    last: u64,
    /// First PSN of the response under way.
    from: u64,
    /// Next PSN of the response to send; beyond `until` if all was sent.
    next: u64,
    /// Last PSN of the response that is asked for now.
    until: u64,
    /// Whether all of it was sent once: from then on it is kept for duplicates only.
    answered: bool,
    msn: u32,
    kind: RecordKind,
}

#[derive(Debug, Clone, Copy)]
enum RecordKind {
    Read { va: u64, rkey: Key, len: u32 },
    Atomic { found: u64 },
}

/// Where in a message the responder is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Message {
    None,
    Send { placed: u32 },
    Write { va: u64, rkey: Key, left: u32, len: u32 },
}

/// What the connection permits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rights {
    pub(crate) pd: PdId,
    pub(crate) mtu: Mtu,
    pub(crate) access: Access,
    pub(crate) min_rnr_timer: u8,
}

/// A receive that is to be completed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Received {
    pub(crate) wr_id: u64,
    pub(crate) status: WcStatus,
    pub(crate) opcode: WcOpcode,
    pub(crate) byte_len: u32,
    pub(crate) imm: Option<[u8; 4]>,
    pub(crate) solicited: bool,
}

/// What became of a request.
#[derive(Debug)]
pub(crate) enum Outcome {
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

#[derive(Debug)]
pub(crate) struct Responder {
    /// Expected PSN.
    epsn: u64,
    msn: u32,
    message: Message,
    /// A NAK for `epsn` is out: silence until it arrives.
    nak_sent: bool,
    records: VecDeque<Record>,
    max_records: usize,
    /// Index of the first record with something to send.
    unsent: usize,
    /// An acknowledgement is due.
    ack: bool,
    nak: Option<Syndrome>,
    pub(crate) rq: RecvQueue,
}

/// The next response to send.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Response {
    /// A packet of a READ response.
    Read { psn: u64, place: Place, at: Sge, msn: u32 },
    /// The result of an atomic.
    Atomic { psn: u64, found: u64, msn: u32 },
    /// An ACK or NAK.
    Acknowledge { psn: u64, syndrome: Syndrome, msn: u32 },
}

impl Responder {
    pub(crate) fn new(rq: RecvQueue) -> Self {
        Self {
            epsn: 0,
            msn: 0,
            message: Message::None,
            nak_sent: false,
            records: VecDeque::new(),
            max_records: 0,
            unsent: 0,
            ack: false,
            nak: None,
            rq,
        }
    }

    pub(crate) fn start(&mut self, psn: u64, max_dest_rd_atomic: u8) {
        self.epsn = psn;
        self.msn = 0;
        self.message = Message::None;
        self.nak_sent = false;
        self.max_records = usize::from(max_dest_rd_atomic);
        self.records.clear();
        self.records.reserve(self.max_records);
        self.unsent = 0;
        self.ack = false;
        self.nak = None;
    }

    pub(crate) fn expected(&self) -> u64 {
        self.epsn
    }

    /// Whether a SEND is half placed in the oldest receive.
    pub(crate) fn in_receive(&self) -> bool {
        matches!(self.message, Message::Send { .. })
    }

    /// Drops what was to be sent, except a NAK that tells the peer why the queue pair broke.
    pub(crate) fn stop(&mut self) {
        self.records.clear();
        self.unsent = 0;
        self.ack = false;
        self.message = Message::None;
    }

    /// Takes a request.
    #[inline]
    pub(crate) fn request(
        &mut self,
        packet: &Packet<'_>,
        rights: &Rights,
        memory: &mut impl Memory,
    ) -> Outcome {
        let psn = packet.bth.psn.expand(self.epsn);
        if psn > self.epsn {
            return Outcome::Gap { report: self.report(NakCode::PsnSequenceError) };
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
                self.nak_sent = false;
                let respond = self.ack || self.unsent < self.records.len();
                Outcome::Done { received, respond }
            }
            Err(Refusal::NotReady) => {
                // Said each time the expected packet comes; what follows it is dropped in silence.
                self.nak = Some(Syndrome::rnr(rights.min_rnr_timer));
                self.nak_sent = true;
                Outcome::NotReady
            }
            Err(refusal) => self.refuse(refusal),
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
        if !fits || u64::from(len) > super::sq::MESSAGE_MAX {
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
            && u64::from(reth.len) <= super::sq::MESSAGE_MAX;
        if !admitted {
            return Err(Refusal::Invalid);
        }
        self.make_room()?;
        if reth.len > 0 {
            let whole = Sge { addr: reth.va, len: reth.len, lkey: reth.rkey };
            memory.regions().remote_read(rights.pd, &whole).map_err(|_| Refusal::Access)?;
        }
        let packets = u64::from(reth.len.div_ceil(rights.mtu.bytes()).max(1));
        let kind = RecordKind::Read { va: reth.va, rkey: reth.rkey, len: reth.len };
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
        self.make_room()?;
        let regions = memory.regions();
        let at = regions.remote_atomic(rights.pd, eth.va, eth.rkey).map_err(|_| Refusal::Access)?;
        let op = match packet.info.operation {
            Operation::CompareSwap => {
                AtomicOp::CompareSwap { compare: eth.compare, swap: eth.swap_add }
            }
            _ => AtomicOp::FetchAdd { add: eth.swap_add },
        };
        let found = memory.atomic(at, op);
        self.record(1, RecordKind::Atomic { found });
        Ok(None)
    }

    /// Makes room for one more record: the oldest goes, if it was answered.
    fn make_room(&mut self) -> Result<(), Refusal> {
        if self.records.len() < self.max_records {
            return Ok(());
        }
        match self.records.front() {
            Some(oldest) if oldest.answered => {
                self.records.pop_front();
                self.unsent = self.unsent.saturating_sub(1);
                Ok(())
            }
            // More at a time than the peer was told it may have.
            _ => Err(Refusal::Invalid),
        }
    }

    fn record(&mut self, packets: u64, kind: RecordKind) {
        let (first, last) = (self.epsn, self.epsn + packets - 1);
        self.epsn += packets;
        self.finish();
        let (from, next, until, answered) = (first, first, last, false);
        self.records.push_back(Record {
            first,
            last,
            from,
            next,
            until,
            answered,
            msn: self.msn,
            kind,
        });
    }

    fn accept(&mut self, packet: &Packet<'_>) {
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

    fn duplicate(&mut self, packet: &Packet<'_>, psn: u64, mtu: Mtu) -> Outcome {
        let operation = packet.info.operation;
        if matches!(operation, Operation::Send | Operation::Write) {
            self.ack |= packet.bth.ack_req;
            return Outcome::Duplicate { respond: self.ack };
        }
        // Newest first: that is what is asked for again.
        let Some(at) = self.records.iter().rposition(|r| (r.first..=r.last).contains(&psn)) else {
            return Outcome::Stale;
        };
        let record = &mut self.records[at];
        let until = match (record.kind, operation, packet.reth()) {
            (RecordKind::Atomic { .. }, Operation::CompareSwap | Operation::FetchAdd, _) => psn,
            (RecordKind::Read { va, rkey, len }, Operation::ReadRequest, Some(reth)) => {
                match repeated(record, psn, (va, rkey, len), &reth, mtu) {
                    Some(until) => until,
                    None => return Outcome::Stale,
                }
            }
            _ => return Outcome::Stale,
        };
        let pending = record.next <= record.until;
        if pending && record.next <= psn && until <= record.until {
            // Still to be sent anyway.
            return Outcome::Duplicate { respond: true };
        }
        record.until = if pending { until.max(record.until) } else { until };
        (record.from, record.next) = (psn, psn);
        self.unsent = self.unsent.min(at);
        Outcome::Duplicate { respond: true }
    }

    fn refuse(&mut self, refusal: Refusal) -> Outcome {
        let (code, status) = match refusal {
            Refusal::Receive(code, status) => (code, Some(status)),
            Refusal::Access => (NakCode::RemoteAccessError, None),
            Refusal::Invalid | Refusal::NotReady => (NakCode::InvalidRequest, None),
        };
        self.nak = Some(Syndrome::nak(code));
        self.nak_sent = true;
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

    /// Queues a NAK unless one is out; whether it did.
    fn report(&mut self, code: NakCode) -> bool {
        if self.nak_sent {
            return false;
        }
        self.nak = Some(Syndrome::nak(code));
        self.nak_sent = true;
        true
    }

    /// Whether there is a response to send.
    #[inline]
    pub(crate) fn has_response(&self) -> bool {
        self.ack || self.nak.is_some() || self.unsent < self.records.len()
    }

    /// The response to send next: READs and atomics in the order of their PSNs, then the acknowledgement, which
    /// therefore never overtakes one of them; a NAK takes the acknowledgement's place.
    #[inline]
    pub(crate) fn response(&mut self, mtu: Mtu) -> Option<Response> {
        while let Some(record) = self.records.get(self.unsent) {
            if record.next > record.until {
                self.unsent += 1;
                continue;
            }
            return Some(match record.kind {
                RecordKind::Atomic { found } => {
                    Response::Atomic { psn: record.first, found, msn: record.msn }
                }
                RecordKind::Read { va, rkey, len } => read_response(record, va, rkey, len, mtu),
            });
        }
        let (psn, syndrome) = match self.nak {
            Some(syndrome) => (self.epsn, syndrome),
            None if self.ack => (self.epsn - 1, Syndrome::ACK_UNLIMITED),
            None => return None,
        };
        Some(Response::Acknowledge { psn, syndrome, msn: self.msn })
    }

    /// `response` left.
    #[inline]
    pub(crate) fn responded(&mut self, response: &Response) {
        match response {
            Response::Acknowledge { .. } => {
                self.nak = None;
                self.ack = false;
            }
            Response::Read { psn, .. } | Response::Atomic { psn, .. } => {
                if let Some(record) = self.records.get_mut(self.unsent) {
                    record.next = psn + 1;
                    record.answered |= *psn == record.last;
                    self.unsent += usize::from(record.next > record.until);
                }
            }
        }
    }

    /// The memory of a READ under way is gone: it ends with a NAK.
    pub(crate) fn read_failed(&mut self) {
        self.stop();
        self.nak = Some(Syndrome::nak(NakCode::RemoteAccessError));
        self.nak_sent = true;
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

/// The last PSN that a repeated READ request asks for, if it asks for a part of what `record` answered.
fn repeated(
    record: &Record,
    psn: u64,
    (va, rkey, len): (u64, Key, u32),
    reth: &crate::wire::Reth,
    mtu: Mtu,
) -> Option<u64> {
    let skipped = (psn - record.first) << mtu.shift();
    if reth.rkey != rkey || reth.va != va.wrapping_add(skipped) {
        return None;
    }
    if skipped + u64::from(reth.len) > u64::from(len) {
        return None;
    }
    Some(psn + u64::from(reth.len.div_ceil(mtu.bytes()).max(1)) - 1)
}

fn read_response(record: &Record, va: u64, rkey: Key, len: u32, mtu: Mtu) -> Response {
    let psn = record.next;
    #[allow(clippy::cast_possible_truncation)]
    let offset = ((psn - record.first) as u32) << mtu.shift();
    let at = Sge {
        addr: va.wrapping_add(u64::from(offset)),
        len: (len - offset).min(mtu.bytes()),
        lkey: rkey,
    };
    // A response that begins in the middle of the READ begins with FIRST (or ONLY) all the same.
    let place = place_of(psn == record.from, psn == record.until);
    Response::Read { psn, place, at, msn: record.msn }
}

fn place_of(begins: bool, ends: bool) -> Place {
    match (begins, ends) {
        (true, true) => Place::Only,
        (true, false) => Place::First,
        (false, true) => Place::Last,
        (false, false) => Place::Middle,
    }
}
