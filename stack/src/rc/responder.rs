//! The responder: checks a request, executes it, and remembers what it owes.
//!
//! First comes the PSN, then what [`Message`] checks. The responder returns what happened; completions, state changes and
//! counters are the queue pair's.

use super::records::{DataResponse, Kind, Records};
use crate::mem::{Access, AtomicOp, Memory, Sge};
use crate::qp::message::{Message, Received, Refusal, Rights, failed};
use crate::qp::rq::RecvQueue;
use crate::qp::sq::MESSAGE_MAX;
use crate::srq::Receives;
use crate::types::Mtu;
use crate::wire::{Aeth, NakCode, Operation, Packet, Syndrome};

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
    /// 5-bit code of the delay that is asked for while no receive is posted.
    pub(super) min_rnr_timer: u8,
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
    pub(super) fn new() -> Self {
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
            min_rnr_timer: 0,
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
        self.message.in_receive()
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
        receives: &mut Receives<'_>,
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
            Operation::Send => self.message.send(packet, rights, receives, memory).map(Some),
            Operation::Write => self.message.write(packet, rights, receives, memory).map(Some),
            Operation::ReadRequest => self.read(packet, rights, memory).map(|()| None),
            Operation::CompareSwap | Operation::FetchAdd => {
                self.atomic(packet, rights, memory).map(|()| None)
            }
            _ => Err(Refusal::Invalid),
        };
        match outcome {
            Ok(placed) => {
                if let Some(placed) = &placed {
                    self.accept(packet, placed.ended);
                }
                self.heard();
                let received = placed.and_then(|placed| placed.received);
                Outcome::Done { received, respond: self.has_response() }
            }
            Err(Refusal::NotReady) => {
                // Said each time the expected packet comes; what follows it is dropped in silence.
                self.queue_nak(Syndrome::rnr(self.min_rnr_timer));
                Outcome::NotReady
            }
            Err(refusal) => self.refuse(refusal, receives),
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

    fn read(
        &mut self,
        packet: &Packet<'_>,
        rights: &Rights,
        memory: &impl Memory,
    ) -> Result<(), Refusal> {
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
        Ok(())
    }

    fn atomic(
        &mut self,
        packet: &Packet<'_>,
        rights: &Rights,
        memory: &mut impl Memory,
    ) -> Result<(), Refusal> {
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
        Ok(())
    }

    fn record(&mut self, packets: u64, kind: Kind) {
        let first = self.epsn;
        self.epsn += packets;
        self.finish();
        self.records.push(first, self.epsn - 1, self.msn, kind);
    }

    /// A packet of a SEND or WRITE was placed.
    #[inline]
    fn accept(&mut self, packet: &Packet<'_>, ended: bool) {
        self.ackable = self.epsn;
        self.epsn += 1;
        self.ack |= packet.bth.ack_req;
        if ended {
            self.finish();
        }
    }

    fn finish(&mut self) {
        self.msn = (self.msn + 1) & 0xff_ffff;
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

    fn refuse(&mut self, refusal: Refusal, receives: &mut Receives<'_>) -> Outcome {
        let (code, status) = match refusal {
            Refusal::Receive(code, status) => (code, Some(status)),
            Refusal::Access => (NakCode::RemoteAccessError, None),
            Refusal::Invalid | Refusal::NotReady => (NakCode::InvalidRequest, None),
        };
        self.queue_nak(Syndrome::nak(code));
        let received = status.and_then(|status| failed(receives, status));
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
    pub(super) fn response(&mut self, mtu: Mtu, rq: &RecvQueue) -> Option<Response> {
        if let Some(data) = self.records.response(mtu) {
            return Some(Response::Data(data));
        }
        let (psn, syndrome) = match self.nak {
            Some(nak) => (nak.psn, nak.syndrome),
            None if self.ack => (self.ackable, self.ack(self.msn, rq).syndrome),
            None => return None,
        };
        Some(Response::Acknowledge { psn, syndrome, msn: self.msn })
    }

    /// The AETH of a positive response to the message `msn`.
    pub(super) fn ack(&self, msn: u32, rq: &RecvQueue) -> Aeth {
        if !self.advertise {
            return Aeth::ack(msn);
        }
        // The limit is a message's number, so an older response grants what has been completed since too.
        let since = u64::from(self.msn.wrapping_sub(msn) & 0xff_ffff);
        let free = rq.len() - u64::from(self.in_receive());
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
