//! The planner: the request at the cursor, the part of it that leaves, and the packets of it that
//! ask.
//!
//! A burst is packets of SENDs and WRITEs that leave one after the other under one permit, from one
//! request or from several. A check that holds for all of them is made once. The next plan finds
//! the reason for the end of a burst.

use crate::budget::{Budget, Cost};
use crate::mem::{Memory, RegionTable};
use crate::peer::{Peers, RunLimits};
use crate::qp::outbound::{RequestPacket, Sent};
use crate::qp::sq::{OVERHEAD, SendQueue, Wqe, WqeIndex, full_cost};
use crate::rc::Qp;
use crate::rc::requester::permit::{NextPacket, Permit, Situation, Want, permit};
use crate::rc::requester::recovery::Probe;
use crate::rc::requester::{ConnParams, Requester};
use crate::shared::Shared;
use crate::sink::TxSink;
use crate::stats::Limit;
use crate::types::{Mtu, Seq, Time};
use crate::verbs::{SendOp, WcStatus};
use crate::wire::{ICRC_LEN, Opcode, Reth, bth};

/// The next step of the requester.
#[derive(Debug)]
pub(super) enum Plan {
    /// A burst from the cursor on.
    Burst(Permit),
    Request(ResponseRequest),
    /// This lost packet again, alone.
    Lost(RequestPacket),
    /// The request under the cursor concerns this side only, and may be executed.
    Local,
    /// The request under the cursor cannot be executed.
    Fault(WcStatus),
    /// Nothing.
    Blocked(Permit),
}

impl Plan {
    /// Its permit.
    #[inline]
    pub(super) fn permit(&self) -> &Permit {
        match self {
            Self::Burst(permit) | Self::Blocked(permit) => permit,
            Self::Request(_) | Self::Lost(_) | Self::Local | Self::Fault(_) => &Permit::ONE,
        }
    }
}

/// A READ request, or another that has a response of its own.
#[derive(Debug, Clone, Copy)]
pub(super) struct ResponseRequest {
    pub(super) packet: RequestPacket,
    /// The last PSN of its response.
    pub(super) last: Seq,
    /// The cost of its response.
    pub(super) cost: Cost,
}

/// The kinds of bursts: packets of one request; requests of one packet each; one packet, that of
/// the last request of the queue, which asks or does not.
pub(super) const PARTS: u8 = 0;
const SINGLES: u8 = 1;
const LAST: u8 = 2;
const QUIET: u8 = 3;

/// Packets that leave one after the other.
#[derive(Debug)]
pub(super) struct Burst<'a> {
    pub(super) permit: &'a Permit,
    /// None of them asks.
    quiet: bool,
    /// The next packet, and the request that it belongs to.
    psn: Seq,
    index: WqeIndex,
    /// The packets that left, and the most that may.
    pub(super) left: Cost,
    most: u32,
    /// Packets that asked, the last of them, and the number of them that are written down.
    asked: u32,
    last_asked: Seq,
    noted: u32,
    /// Packets that are left of the turn, and the longest run.
    pub(super) turn: usize,
    pub(super) runs: RunLimits,
    /// Packets may wait for more: an acknowledgement is outstanding, which ends the wait.
    pub(super) batches: bool,
    /// It sends packets that had left before.
    again: bool,
    /// The peer is silent, so no credit is taken for its answers.
    silent: bool,
}

impl Burst<'_> {
    /// The next packet, of the request `wqe`.
    #[inline(always)]
    fn next<const KIND: u8>(&self, wqe: &Wqe, mtu: Mtu) -> NextPacket {
        let plain = KIND != PARTS;
        let psn = if plain { wqe.first } else { self.psn };
        let ends = plain || psn == wqe.last();
        let cost = if ends { wqe.cost() } else { full_cost(mtu) };
        let (len, begins) = match plain {
            true => (wqe.len, true),
            false => (wqe.payload(psn, mtu), wqe.begins(psn)),
        };
        let size = len + request_header(&wqe.op, begins);
        NextPacket { psn, begins, ends, size, cost, bytes: self.left.bytes + u64::from(cost) }
    }

    /// The packet left, and `asks` or not. The burst ends with the last packet that may ask, and
    /// with its request, or of single packets with the last of the queue.
    #[inline(always)]
    fn sent<const KIND: u8>(&mut self, packet: &NextPacket, asks: bool, tail: WqeIndex) {
        self.left = Cost { bytes: packet.bytes, datagrams: self.left.datagrams + 1 };
        self.psn += 1;
        self.index += u64::from(packet.ends);
        let plain = KIND != PARTS;
        let mut over = if plain { self.index == tail } else { packet.ends };
        if asks {
            self.asked += 1;
            self.last_asked = packet.psn;
            self.batches = !self.again;
            // Each packet that leaves can ask: there is credit for one answer. And of requests of
            // one packet those that ask follow each other.
            let spare = self.permit.acks.spare;
            over |= if plain { self.asked >= spare } else { self.asked > spare && !self.silent };
        }
        if over {
            self.most = self.left.datagrams;
        }
    }
}

impl Requester {
    /// What to do next.
    #[inline]
    pub(super) fn plan(
        &self,
        params: &ConnParams,
        at: &Situation<'_>,
        regions: &RegionTable,
    ) -> Plan {
        let sq = at.sq;
        if self.recovery.lost() > 0 {
            let again = permit(Want::Lost(self), at);
            let goes = again.packets > 0;
            if (goes || again.limited_by == Limit::Turn)
                && let Some(packet) = self.next_lost(sq, params)
            {
                return if goes { Plan::Lost(packet) } else { Plan::Blocked(again) };
            }
        }
        let any = permit(Want::Request(self), at);
        if any.packets == 0 {
            return Plan::Blocked(any);
        }
        let wqe = sq.get(self.wqe_next);
        if !wqe.is_plain() {
            if self.snd_nxt == wqe.first {
                if wqe.op.is_local() {
                    return Plan::Local;
                }
                // One packet is checked when it is gathered; of more, none leaves unless all can.
                let single = wqe.first == wqe.last() && !wqe.has_response();
                if !single && sq.admits(self.wqe_next, params.pd, regions).is_err() {
                    return Plan::Fault(WcStatus::LocProtErr);
                }
            }
            if wqe.has_response() {
                return self.plan_request(wqe, params, at);
            }
        }
        match permit(Want::Data(self, wqe, params, any.burst), at) {
            permit if permit.packets == 0 => Plan::Blocked(permit),
            permit => Plan::Burst(permit),
        }
    }

    fn plan_request(&self, wqe: &Wqe, params: &ConnParams, at: &Situation<'_>) -> Plan {
        if self.allows_no_response() {
            return Plan::Fault(WcStatus::LocQpOpErr);
        }
        let psn = self.snd_nxt;
        let offset = wqe.offset(psn, params.mtu);
        let (opcode, last, len) = match wqe.op {
            SendOp::CompareSwap { .. } => (Opcode::RC_COMPARE_SWAP, psn, 8),
            SendOp::FetchAdd { .. } => (Opcode::RC_FETCH_ADD, psn, 8),
            SendOp::AtomicWrite { .. } => (Opcode::RC_ATOMIC_WRITE, psn, 8),
            SendOp::Flush { .. } => (Opcode::RC_FLUSH, psn, 0),
            _ => {
                let each = u64::from(wqe.read_packets());
                let part = (psn - wqe.first) / each + 1;
                let last = (wqe.first + part * each - 1).min(wqe.last());
                let end = wqe.offset(last, params.mtu) + wqe.payload(last, params.mtu);
                (Opcode::RC_RDMA_READ_REQUEST, last, end - offset)
            }
        };
        let packets = (last - psn + 1) as u32;
        let each = Budget::cost(len.min(params.mtu.bytes()) + OVERHEAD);
        let cost = self.response_cost(packets, each, at.peers);
        let allowed = permit(Want::Response(self, params, packets, cost), at);
        if allowed.packets == 0 {
            return Plan::Blocked(allowed);
        }
        let (index, ack_req, solicited) = (self.wqe_next, true, false);
        let packet =
            RequestPacket { index, psn, opcode, offset, len, message: len, ack_req, solicited };
        Plan::Request(ResponseRequest { packet, last, cost })
    }

    /// Whether nothing behind the request `index` could ask for an acknowledgement now: it is the
    /// last, or the next one sends nothing, needs a receive, or waits for credit of another kind.
    #[inline]
    fn is_held_up_behind(&self, index: WqeIndex, sq: &SendQueue) -> bool {
        index + 1 == sq.tail || {
            let next = sq.get(index + 1);
            next.has_response() || next.op.is_local() || !self.may_follow(next)
        }
    }
}

impl Qp {
    /// Sends a burst, as far as `permit`, `quantum`, which it counts down, and the sink allow.
    #[inline]
    pub(super) fn send_burst<H: Memory>(
        &mut self,
        now: Time,
        permit: &Permit,
        quantum: &mut usize,
        shared: &mut Shared,
        host: &H,
        sink: &mut impl TxSink,
    ) -> Sent {
        let (sq, cursor) = (&self.core.sq, self.requester.cursor());
        let (wqe, is_last) = (sq.get(cursor), cursor + 1 == sq.tail);
        if !wqe.is_plain() {
            self.send_packets::<PARTS, H>(now, permit, quantum, shared, host, sink)
        } else if !is_last {
            self.send_packets::<SINGLES, H>(now, permit, quantum, shared, host, sink)
        } else if wqe.is_inline_and_unsignaled() {
            self.send_inline(now, permit, quantum, shared, host, sink)
        } else {
            self.send_packets::<LAST, H>(now, permit, quantum, shared, host, sink)
        }
    }

    /// Sends the last message of the queue, which need not ask if it is an answer.
    #[inline(never)]
    fn send_inline<H: Memory>(
        &mut self,
        now: Time,
        permit: &Permit,
        quantum: &mut usize,
        shared: &mut Shared,
        host: &H,
        sink: &mut impl TxSink,
    ) -> Sent {
        match self.is_quiet_answer(now, &shared.peers) {
            true => self.send_packets::<QUIET, H>(now, permit, quantum, shared, host, sink),
            false => self.send_packets::<LAST, H>(now, permit, quantum, shared, host, sink),
        }
    }

    /// Sends packets of this `KIND`: one function for each. The last packet needs no loop, nor the
    /// checks of one.
    #[inline(never)]
    fn send_packets<const KIND: u8, H: Memory>(
        &mut self,
        now: Time,
        permit: &Permit,
        quantum: &mut usize,
        shared: &mut Shared,
        host: &H,
        sink: &mut impl TxSink,
    ) -> Sent {
        let (plain, last, quiet) = (KIND != PARTS, KIND >= LAST, KIND == QUIET);
        let Self { core, requester, responder, params, .. } = self;
        let Some(to) = core.target() else { return Sent::Refused };
        let sq = &core.sq;
        let mut burst = requester.begin(permit, quiet, *quantum, shared.peers.runs());
        debug_assert!(!last || burst.most > 0);
        let (mut sent, mut payload) = (Sent::Yes, 0);
        while last || burst.left.datagrams < burst.most {
            let wqe = sq.get(burst.index);
            let next = burst.next::<KIND>(wqe, params.mtu);
            if burst.left.datagrams > 0 && !requester.goes_on::<KIND>(&burst, &next, wqe, sq) {
                break;
            }
            let ack_req = if last { !quiet } else { requester.asks(&burst, &next, sq, params.mtu) };
            debug_assert!(!last || quiet || requester.asks(&burst, &next, sq, params.mtu));
            let packet = match plain {
                true => RequestPacket::of_plain(burst.index, wqe, ack_req),
                false => RequestPacket::of(burst.index, wqe, next.psn, params.mtu, ack_req),
            };
            sent = match plain {
                true => core.send_packet_of::<KIND, H>(wqe, &packet, packet.len, &to, host, sink),
                false => core.send_packet(&packet, &to, &mut shared.counters, host, sink),
            };
            if sent != Sent::Yes {
                break;
            }
            payload += u64::from(packet.len);
            // No packet of this turn could join the run of the last, and the next turn begins one.
            match last {
                true => requester.control.batch.begin(),
                false => requester.control.batch.sent(next.size, burst.runs),
            }
            if !plain && ack_req && next.psn != burst.last_asked + 1 {
                requester.note_asks(&mut burst, &mut shared.peers);
            }
            burst.sent::<KIND>(&next, ack_req, sq.tail);
            debug_assert!(!last || burst.index == sq.tail);
            if last {
                break;
            }
        }
        let count = burst.left.datagrams;
        if count > 0 {
            *quantum = quantum.saturating_sub(count as usize);
            if plain {
                core.tally.sent(&mut shared.counters, count, payload);
            }
            if burst.again && !requester.recovery.is_tail_probe() {
                core.tally.sent_again(&mut shared.counters, count);
            }
            requester.burst_left(now, &mut burst, params, &mut shared.peers);
            requester.acks.left(requester.wqe_next, quiet, now, responder.expected());
        }
        sent
    }
}

impl Requester {
    /// Begins a burst at the cursor.
    #[inline(always)]
    fn begin<'a>(
        &self,
        permit: &'a Permit,
        quiet: bool,
        turn: usize,
        runs: RunLimits,
    ) -> Burst<'a> {
        let again = self.snd_nxt < self.snd_max;
        Burst {
            permit,
            quiet,
            psn: self.snd_nxt,
            index: self.wqe_next,
            left: Cost::default(),
            most: permit.burst,
            asked: 0,
            last_asked: self.acks.last(),
            noted: 0,
            turn,
            runs,
            batches: !again && self.ack_requests.end().is_some(),
            again,
            silent: self.recovery.peer_is_silent(),
        }
    }

    /// Whether the next packet of the burst asks.
    #[inline(always)]
    fn asks(&self, burst: &Burst<'_>, next: &NextPacket, sq: &SendQueue, mtu: Mtu) -> bool {
        let (permit, left) = (burst.permit, burst.left.datagrams + 1);
        let often = next.ends || next.psn - burst.last_asked >= u64::from(permit.acks.interval);
        if often && burst.asked < permit.acks.spare {
            return true;
        }
        // Where it begins again, so that one packet is progress; and the last packet that may
        // leave, also in a turn: the others wait for its acknowledgement.
        let another = u64::from(if next.ends { full_cost(mtu) } else { next.cost });
        let turn_ends =
            left as usize >= burst.turn && self.control.batch.is_ended_by(next.size, burst.runs);
        turn_ends
            || (burst.again && next.psn == self.snd_una)
            || left >= permit.packets
            || next.bytes + another > permit.bytes
            || (next.ends && self.is_held_up_behind(burst.index, sq))
    }

    /// Writes down the last packets that asked one after the other.
    #[inline(always)]
    fn note_asks(&mut self, burst: &mut Burst<'_>, peers: &mut Peers) {
        let count = burst.asked - burst.noted;
        if count > 0 {
            let first = burst.last_asked + 1 - u64::from(count);
            self.ack_requests.asked(first, count, burst.silent, peers);
            burst.noted = burst.asked;
        }
    }

    /// The burst left: moves the cursor.
    #[inline(always)]
    fn burst_left(
        &mut self,
        now: Time,
        burst: &mut Burst<'_>,
        params: &ConnParams,
        peers: &mut Peers,
    ) {
        peers.get(params.peer).charge(burst.left);
        self.control.in_flight.add(burst.left);
        // A packet without AckReq is not answered in a round trip.
        self.round_trip.sent(self.snd_nxt, now, burst.again || burst.quiet);
        self.note_asks(burst, peers);
        self.acks.asked(burst.last_asked);
        self.snd_nxt = burst.psn;
        self.snd_max = self.snd_max.max(burst.psn);
        self.wqe_next = burst.index;
        self.wqe_max = self.wqe_max.max(burst.index);
        self.recovery.set_probe(Probe::Nothing);
        let asks_at_end = burst.asked > 0 && burst.last_asked + 1 == burst.psn;
        if !asks_at_end && !self.ack_requests.is_open() {
            self.open(burst.silent, peers);
        }
    }
}

/// Bytes around the payload of a packet of a SEND or WRITE: BTH, RETH, ICRC.
#[inline]
pub(super) fn request_header(op: &SendOp, begins: bool) -> u32 {
    let reth = if begins && matches!(op, SendOp::Write { .. }) { Reth::LEN } else { 0 };
    (bth::LEN + reth + ICRC_LEN) as u32
}
