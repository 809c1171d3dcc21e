//! The responder: checks a request, executes it, and remembers the responses that it owes.
//!
//! First comes the PSN, then the checks of [`Message`]. The responder returns the outcome;
//! completions, state changes and counters are the queue pair's.

pub(super) mod resources;

use crate::mem::{Access, AtomicOp, FlushLevel, Memory, Placement, Sge};
use crate::qp::message::{Message, Refusal, Rights, fail};
use crate::qp::post::MESSAGE_MAX;
use crate::qp::rq::RecvQueue;
use crate::rc::responder::resources::{DataResponse, Kind, Records};
use crate::srq::Receives;
use crate::types::{Mtu, Seq};
use crate::wire::{Aeth, NakCode, Operation, Packet, Syndrome};

/// The outcome of a request.
#[derive(Debug)]
pub(in crate::rc) enum Outcome {
    /// Executed; a response may be due.
    Done,
    /// Seen before; a response may be due again.
    Duplicate { respond: bool },
    /// A duplicate that cannot be answered any more.
    Stale,
    /// After a gap; `report` if the peer gets a report of it. The peer `went_back`, or probes.
    Gap { psn: Seq, report: bool, went_back: bool },
    /// No receive was posted.
    NotReady,
    /// Refused for good: the NAK is queued, the queue pair must break.
    Refused(NakCode),
}

/// A NAK that is due: for the request at `psn`, with everything before it acknowledged.
#[derive(Debug, Clone, Copy)]
struct Nak {
    psn: Seq,
    syndrome: Syndrome,
}

#[derive(Debug)]
pub(in crate::rc) struct Responder {
    /// Expected PSN.
    epsn: Seq,
    msn: u32,
    message: Message,
    /// Permissions of the connection.
    pub(in crate::rc) rights: Rights,
    /// A NAK for `epsn` is due or out: silence until that arrives.
    nak_sent: bool,
    /// The highest PSN that came too early.
    gap: Seq,
    /// The last that came too early.
    last_early: Seq,
    /// Which packet made it report the gap, and whether one from behind came since.
    reported: (Seq, bool),
    /// The NAK that is due or out is about a gap.
    gap_reported: bool,
    records: Records,
    /// An acknowledgement of everything up to `ackable` is due.
    ack: bool,
    /// The last PSN of a SEND or WRITE that was executed. READs and atomics are acknowledged by
    /// their own responses, and never by an ACK: some requesters would take it for the response.
    ackable: Seq,
    /// The last PSN that was acknowledged.
    told: Seq,
    nak: Option<Nak>,
    /// Whether acknowledgements announce the number of posted receives.
    advertise: bool,
    /// 5-bit code of the delay that is asked for while no receive is posted.
    pub(in crate::rc) min_rnr_timer: u8,
}

/// The next response to send.
#[derive(Debug, Clone, Copy)]
pub(in crate::rc) enum Response {
    Data(DataResponse),
    /// An ACK or NAK.
    Acknowledge {
        psn: Seq,
        aeth: Aeth,
    },
}

impl Responder {
    pub(in crate::rc) fn new() -> Self {
        Self {
            epsn: Seq::default(),
            msn: 0,
            message: Message::None,
            rights: Rights::NONE,
            nak_sent: false,
            gap: Seq::default(),
            last_early: Seq::default(),
            reported: (Seq::default(), false),
            gap_reported: false,
            records: Records::default(),
            ack: false,
            ackable: Seq::default(),
            told: Seq::default(),
            nak: None,
            advertise: false,
            min_rnr_timer: 0,
        }
    }

    pub(in crate::rc) fn start(&mut self, psn: Seq, max_dest_rd_atomic: u8, advertise: bool) {
        self.stop();
        self.advertise = advertise;
        self.epsn = psn;
        (self.ackable, self.told) = (psn - 1, psn - 1);
        self.msn = 0;
        self.nak_sent = false;
        (self.gap, self.last_early) = (Seq::default(), Seq::default());
        self.gap_reported = false;
        self.records.start(usize::from(max_dest_rd_atomic));
    }

    /// Sets the number of READs and atomics that the peer may have outstanding.
    pub(in crate::rc) fn set_max_dest_rd_atomic(&mut self, max: u8) {
        self.records.resize(usize::from(max));
    }

    pub(in crate::rc) fn expected(&self) -> Seq {
        self.epsn
    }

    /// Number of responses that it keeps.
    pub(in crate::rc) fn records(&self) -> usize {
        self.records.len()
    }

    /// Whether a SEND is half placed in the oldest receive.
    pub(in crate::rc) fn in_receive(&self) -> bool {
        self.message.in_receive()
    }

    /// Drops everything that was to be sent.
    pub(in crate::rc) fn stop(&mut self) {
        self.close();
        self.records.clear();
        self.nak = None;
        self.told = self.ackable;
    }

    /// Takes no more requests. It still sends the responses to earlier requests, and the NAK with
    /// the reason why the queue pair broke.
    pub(in crate::rc) fn close(&mut self) {
        self.ack = false;
        self.message = Message::None;
    }

    /// Takes a request; a receive may be done then.
    #[inline]
    pub(in crate::rc) fn request(
        &mut self,
        packet: &Packet<'_>,
        receives: &mut Receives<'_>,
        memory: &mut impl Memory,
    ) -> Outcome {
        let psn = packet.bth().psn.expand(self.epsn);
        if psn > self.epsn {
            return self.early(psn);
        }
        if psn < self.epsn {
            return self.duplicate(packet, psn);
        }
        let ended = match packet.info.operation {
            Operation::Write => self.message.write(packet, &self.rights, receives, memory),
            Operation::Send => self.message.send(packet, &self.rights, receives, memory),
            _ => return self.answer(packet, receives, memory),
        };
        match ended {
            Ok(ended) => {
                self.accept(packet, ended);
                self.heard();
                Outcome::Done
            }
            Err(refusal) => self.refuse(refusal, receives),
        }
    }

    /// Takes a request that has a response of its own.
    #[inline(never)]
    fn answer(
        &mut self,
        packet: &Packet<'_>,
        receives: &mut Receives<'_>,
        memory: &mut impl Memory,
    ) -> Outcome {
        let executed = match packet.info.operation {
            Operation::ReadRequest => self.read(packet, memory),
            Operation::CompareSwap | Operation::FetchAdd => self.atomic(packet, memory),
            Operation::AtomicWrite => self.atomic_write(packet, memory),
            Operation::Flush => self.flush(packet, memory),
            _ => Err(Refusal::Invalid),
        };
        match executed {
            Ok(()) => {
                self.heard();
                Outcome::Done
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

    fn read(&mut self, packet: &Packet<'_>, memory: &impl Memory) -> Result<(), Refusal> {
        let Some(reth) = packet.reth() else { return Err(Refusal::Invalid) };
        let admitted = self.message == Message::None
            && self.rights.access.admits(Access::REMOTE_READ)
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
            memory.regions().remote_read(self.rights.by, &whole).map_err(|_| Refusal::Access)?;
        }
        let packets = u64::from(reth.len.div_ceil(self.rights.mtu.bytes()).max(1));
        let kind = Kind::Read { va: reth.va, rkey: reth.rkey, len: reth.len };
        self.record(packets, kind);
        Ok(())
    }

    fn atomic(&mut self, packet: &Packet<'_>, memory: &mut impl Memory) -> Result<(), Refusal> {
        let Some(eth) = packet.atomic_eth() else { return Err(Refusal::Invalid) };
        let admitted = self.message == Message::None
            && self.rights.access.admits(Access::REMOTE_ATOMIC)
            && packet.payload().is_empty()
            && eth.va % 8 == 0;
        if !admitted {
            return Err(Refusal::Invalid);
        }
        if !self.records.make_room() {
            return Err(Refusal::Invalid);
        }
        let regions = memory.regions();
        let at =
            regions.remote_atomic(self.rights.by, eth.va, eth.rkey).map_err(|_| Refusal::Access)?;
        let op = match packet.info.operation {
            Operation::CompareSwap => {
                AtomicOp::CompareSwap { compare: eth.compare, swap: eth.swap_add }
            }
            _ => AtomicOp::FetchAdd { add: eth.swap_add },
        };
        let found = memory.atomic(at, op).map_err(|_| Refusal::Access)?;
        self.record(1, Kind::Atomic { found });
        Ok(())
    }

    fn atomic_write(
        &mut self,
        packet: &Packet<'_>,
        memory: &mut impl Memory,
    ) -> Result<(), Refusal> {
        let Some(reth) = packet.reth() else { return Err(Refusal::Invalid) };
        let payload = packet.payload();
        let admitted = self.message == Message::None
            && self.rights.access.admits(Access::REMOTE_WRITE)
            && payload.len() == 8
            && reth.len == 8
            && reth.va % 8 == 0;
        if !admitted || !self.records.make_room() {
            return Err(Refusal::Invalid);
        }
        let at = memory.regions().remote_store(self.rights.by, reth.va, reth.rkey);
        // An aligned word is placed whole, and after all earlier payloads.
        at.and_then(|at| memory.place(at, payload)).map_err(|_| Refusal::Access)?;
        self.record(1, Kind::Done { operation: Operation::AtomicWrite });
        Ok(())
    }

    /// Placed bytes are visible at once, so the response is all that a FLUSH takes.
    fn flush(&mut self, packet: &Packet<'_>, memory: &impl Memory) -> Result<(), Refusal> {
        let (Some(feth), Some(reth)) = (packet.feth(), packet.reth()) else {
            return Err(Refusal::Invalid);
        };
        let level = match feth.level() {
            0 => FlushLevel::Range,
            1 => FlushLevel::Region,
            _ => return Err(Refusal::Invalid),
        };
        let Some(placement) = Placement::from_bits(feth.placement()) else {
            return Err(Refusal::Invalid);
        };
        let admitted = self.message == Message::None
            && self.rights.access.admits(placement.needs())
            && packet.payload().is_empty()
            && u64::from(reth.len) <= MESSAGE_MAX;
        if !admitted {
            return Err(Refusal::Invalid);
        }
        if !self.records.make_room() {
            // Linux rxe does not count them against its limit of outstanding requests: it can have
            // them later.
            return Err(if self.records.has_none() { Refusal::Invalid } else { Refusal::NotReady });
        }
        let at = Sge { addr: reth.va, len: reth.len, lkey: reth.rkey };
        let flushed = memory.regions().remote_flush(self.rights.by, &at, level, placement);
        flushed.map_err(|_| Refusal::Access)?;
        self.record(1, Kind::Done { operation: Operation::Flush });
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
        self.ack |= packet.bth().ack_req;
        if ended {
            self.finish();
        }
    }

    /// The number of messages that were executed, modulo 2^24.
    #[inline]
    pub(in crate::rc) fn messages(&self) -> u32 {
        self.msn
    }

    fn finish(&mut self) {
        self.msn = (self.msn + 1) & 0xff_ffff;
    }

    /// A request after a gap. The gap is reported once, and again if the peer went back and its
    /// retransmission, or the NAK, was lost. The sign of that: the last early packet comes again;
    /// or the reported one, or one before it, comes after one from behind it. Packets that are only
    /// overtaken on their way do not look so for long.
    #[cold]
    fn early(&mut self, psn: Seq) -> Outcome {
        // Behind a missing receive everything comes again.
        if self.reports_gaps() {
            self.gap = self.gap.max(psn);
        }
        let (reported, passed) = self.reported;
        let went_back = psn == self.last_early || (passed && psn <= reported);
        let report = !self.nak_sent || (self.gap_reported && went_back);
        self.last_early = psn;
        self.reported = if report { (psn, false) } else { (reported, passed || psn > reported) };
        if report {
            self.queue_nak(Syndrome::nak(NakCode::PsnSequenceError));
        }
        Outcome::Gap { psn, report, went_back }
    }

    /// Whether the last NAK reported a gap, or none is out; not if there was no receive.
    pub(in crate::rc) fn reports_gaps(&self) -> bool {
        self.gap_reported || !self.nak_sent
    }

    /// Reports the gap before `psn` (again).
    pub(in crate::rc) fn report_gap(&mut self, psn: Seq) -> bool {
        self.gap = self.gap.max(psn);
        self.queue_nak(Syndrome::nak(NakCode::PsnSequenceError));
        true
    }

    /// The missing packets have come. Reports the next gap, if a packet that came too early is
    /// still to be executed.
    pub(in crate::rc) fn report_next_gap(&mut self) -> bool {
        self.gap >= self.epsn && !self.nak_sent && self.report_gap(self.gap)
    }

    #[cold]
    fn duplicate(&mut self, packet: &Packet<'_>, psn: Seq) -> Outcome {
        if matches!(packet.info.operation, Operation::Send | Operation::Write) {
            self.ack |= packet.bth().ack_req;
            return Outcome::Duplicate { respond: self.ack };
        }
        if self.records.repeat(packet, psn, self.rights.mtu) {
            Outcome::Duplicate { respond: true }
        } else {
            Outcome::Stale
        }
    }

    fn queue_nak(&mut self, syndrome: Syndrome) {
        self.nak = Some(Nak { psn: self.epsn, syndrome });
        self.nak_sent = true;
        self.gap_reported = syndrome == Syndrome::nak(NakCode::PsnSequenceError);
    }

    #[cold]
    fn refuse(&mut self, refusal: Refusal, receives: &mut Receives<'_>) -> Outcome {
        let code = match refusal {
            Refusal::NotReady => {
                // Sent each time the expected packet comes; packets behind it are dropped in
                // silence.
                self.queue_nak(Syndrome::rnr(self.min_rnr_timer));
                (self.gap, self.last_early) = (Seq::default(), Seq::default());
                self.reported = (Seq::default(), false);
                return Outcome::NotReady;
            }
            Refusal::Receive(code, status) => {
                fail(receives, status);
                code
            }
            Refusal::Access => NakCode::RemoteAccessError,
            Refusal::Invalid => NakCode::InvalidRequest,
        };
        self.queue_nak(Syndrome::nak(code));
        Outcome::Refused(code)
    }

    /// Whether there is a response to send.
    #[inline]
    pub(in crate::rc) fn has_response(&self) -> bool {
        self.ack || self.nak.is_some() || self.records.due()
    }

    /// Whether the peer waits for one: anything but a plain acknowledgement.
    #[inline]
    pub(in crate::rc) fn has_urgent_response(&self) -> bool {
        self.nak.is_some() || self.records.due()
    }

    /// The response to send next: READs and atomics in the order of their PSNs, then the
    /// acknowledgement, which therefore never overtakes one of them; a NAK takes the
    /// acknowledgement's place.
    #[inline]
    pub(in crate::rc) fn response(&mut self, mtu: Mtu, rq: &RecvQueue) -> Option<Response> {
        if let Some(data) = self.records.response(mtu) {
            return Some(Response::Data(data));
        }
        let (psn, aeth) = match self.nak {
            Some(nak) => (nak.psn, Aeth { syndrome: nak.syndrome, msn: self.msn }),
            None => self.positive(rq)?,
        };
        Some(Response::Acknowledge { psn, aeth })
    }

    /// The acknowledgement that is due, if that is all.
    #[inline]
    pub(in crate::rc) fn acknowledgement(&self, rq: &RecvQueue) -> Option<(Seq, Aeth)> {
        if self.has_urgent_response() {
            return None;
        }
        self.positive(rq)
    }

    #[inline]
    fn positive(&self, rq: &RecvQueue) -> Option<(Seq, Aeth)> {
        self.ack.then(|| (self.ackable, self.ack(self.msn, rq)))
    }

    /// A plain acknowledgement left.
    #[inline]
    pub(in crate::rc) fn acknowledged(&mut self) {
        (self.ack, self.told) = (false, self.ackable);
    }

    /// Owes an acknowledgement of the packets that came without AckReq. Returns whether one is due.
    pub(in crate::rc) fn owe_unasked(&mut self) -> bool {
        self.ack |= self.told < self.ackable;
        self.ack
    }

    /// The AETH of a positive response to the message `msn`.
    #[inline]
    pub(in crate::rc) fn ack(&self, msn: u32, rq: &RecvQueue) -> Aeth {
        if !self.advertise {
            return Aeth::ack(msn);
        }
        // The limit is a message's number, so an older response also grants receives that were
        // completed since.
        let since = u64::from(self.msn.wrapping_sub(msn) & 0xff_ffff);
        let free = rq.len() - u64::from(self.in_receive());
        Aeth { syndrome: Syndrome::credits(since + free), msn }
    }

    /// `response` left.
    #[inline]
    pub(in crate::rc) fn responded(&mut self, response: &Response) {
        match response {
            Response::Acknowledge { .. } => {
                self.nak = None;
                self.acknowledged();
            }
            Response::Data(DataResponse::Read { psn, .. } | DataResponse::Atomic { psn, .. }) => {
                self.records.sent(*psn);
                // It acknowledges all that was before it.
                self.ack &= *psn < self.ackable;
            }
        }
    }

    /// The memory of the READ that is being answered is gone. Returns whether it had been answered
    /// before: a duplicate that comes late, when the peer has long had its response and our program
    /// has every right to take its memory back, must do no harm.
    pub(in crate::rc) fn drop_repetition(&mut self) -> bool {
        self.records.drop_repetition()
    }

    /// The queue pair broke, but the peer's last request was executed, and is acknowledged.
    pub(in crate::rc) fn acknowledge_all(&mut self) {
        self.nak = Some(Nak { psn: self.ackable, syndrome: Syndrome::ACK_UNLIMITED });
    }

    /// The memory of the READ that is being answered is gone: it ends with a NAK.
    pub(in crate::rc) fn read_failed(&mut self) {
        self.close();
        if let Some(psn) = self.records.fail() {
            self.nak = Some(Nak { psn, syndrome: Syndrome::nak(NakCode::RemoteAccessError) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::RecvWr;

    /// Message numbers have 24 bits, and wrap: the number on the wire, and the grant of an older
    /// response.
    #[test]
    fn the_numbers_of_messages_begin_again() {
        let mut rq = RecvQueue::new(8, 1);
        (0..3).for_each(|wr_id| rq.push(&RecvWr { wr_id, sges: &[] }).unwrap());
        let mut responder = Responder { advertise: true, msn: 0xff_fffd, ..Responder::new() };
        for msn in [0xff_fffe, 0xff_ffff, 0, 1] {
            responder.finish();
            assert_eq!(responder.ack(responder.msn, &rq).msn, msn);
            // The limit is a message's number: an older response has the same limit.
            let older = responder.ack(msn.wrapping_sub(2) & 0xff_ffff, &rq);
            assert_eq!(older.syndrome, Syndrome::credits(5), "{msn:#x}");
        }
    }
}
