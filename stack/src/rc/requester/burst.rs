//! The planner: the request at the cursor, the part of it that leaves, and the packets of it that
//! ask.
//!
//! A burst is packets of SENDs and WRITEs that leave one after the other under one permit, from one
//! request or from several. A check that holds for all of them is made once. The next plan finds
//! the reason for the end of a burst.

use crate::mem::{Memory, RegionTable};
use crate::peer::{Budget, Cost, Peers, RunLimits};
use crate::qp::outbound::{RequestPacket, Sent};
use crate::qp::sq::{OVERHEAD, SendQueue, Wqe, WqeIndex, full_cost};
use crate::rc::Qp;
use crate::rc::requester::ack_policy::AckPolicy;
use crate::rc::requester::permit::{Permit, Want};
use crate::rc::requester::recovery::Probe;
use crate::rc::requester::{Limits, Requester};
use crate::shared::Shared;
use crate::sink::TxSink;
use crate::tuning::message_runs::ENABLED;
use crate::types::{Seq, Time};
use crate::verbs::{SendOp, WcStatus};
use crate::wire::{ICRC_LEN, Opcode, Reth, bth};

/// The next step of the requester.
#[derive(Debug)]
pub(super) enum Plan {
    /// A burst from the cursor on.
    Burst(Permit),
    /// A request with a response of its own.
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

/// A READ request, or another that has a response of its own.
#[derive(Debug, Clone, Copy)]
pub(super) struct ResponseRequest {
    pub(super) packet: RequestPacket,
    /// The last PSN of its response.
    pub(super) last: Seq,
    /// The cost of its response.
    pub(super) cost: Cost,
}

/// Packets that leave one after the other.
struct Burst {
    policy: AckPolicy,
    /// The next packet, and the request that it belongs to.
    psn: Seq,
    index: WqeIndex,
    left: Cost,
    /// Packets that asked, the last of them, and the number of them that are written down.
    asked: u32,
    last_asked: Seq,
    noted: u32,
    /// Packets that are left of the turn, and the longest run.
    turn: usize,
    runs: RunLimits,
    /// It sends packets that had left before.
    again: bool,
    /// The peer is silent, so no credit is taken for its answers.
    silent: bool,
}

impl Requester {
    /// What to do next.
    #[inline]
    pub(super) fn plan(
        &mut self,
        sq: &SendQueue,
        limits: &Limits,
        peers: &mut Peers,
        regions: &RegionTable,
    ) -> Plan {
        let plan = self.next(sq, limits, peers, regions);
        match &plan {
            Plan::Burst(_) => {}
            // It keeps the credit for the answer while it waits in line for the peer's.
            Plan::Blocked(Permit { wait: Some((receiver, _)), .. }) if *receiver == limits.peer => {
            }
            _ => self.settle(peers),
        }
        plan
    }

    #[inline]
    fn next(
        &mut self,
        sq: &SendQueue,
        limits: &Limits,
        peers: &mut Peers,
        regions: &RegionTable,
    ) -> Plan {
        if self.wqe_next < self.wqe_max {
            self.skip_executed(sq);
        }
        if self.recovery.lost() > 0
            && self.permit(Want::Lost, sq, limits, peers).packets > 0
            && let Some(packet) = self.next_lost(sq, limits)
        {
            return Plan::Lost(packet);
        }
        let permit = self.permit(Want::Request, sq, limits, peers);
        if permit.packets == 0 {
            return Plan::Blocked(permit);
        }
        let wqe = sq.get(self.wqe_next);
        if self.snd_nxt == wqe.first && !wqe.is_plain() {
            if wqe.op.is_local() {
                return Plan::Local;
            }
            // One packet is checked when it is gathered; of more, none leaves unless all can.
            let single = wqe.first == wqe.last() && !wqe.has_response();
            if !single && sq.admits(self.wqe_next, limits.pd, regions).is_err() {
                return Plan::Fault(WcStatus::LocProtErr);
            }
        }
        if wqe.has_response() {
            return self.plan_request(wqe, sq, limits, peers);
        }
        match self.permit(Want::Data, sq, limits, peers) {
            permit if permit.packets == 0 => Plan::Blocked(permit),
            permit => Plan::Burst(permit),
        }
    }

    fn plan_request(
        &mut self,
        wqe: &Wqe,
        sq: &SendQueue,
        limits: &Limits,
        peers: &mut Peers,
    ) -> Plan {
        if self.allows_no_response() {
            return Plan::Fault(WcStatus::LocQpOpErr);
        }
        let psn = self.snd_nxt;
        let offset = wqe.offset(psn, limits.mtu);
        let (opcode, last, len) = match wqe.op {
            SendOp::CompareSwap { .. } => (Opcode::RC_COMPARE_SWAP, psn, 8),
            SendOp::FetchAdd { .. } => (Opcode::RC_FETCH_ADD, psn, 8),
            SendOp::AtomicWrite { .. } => (Opcode::RC_ATOMIC_WRITE, psn, 8),
            SendOp::Flush { .. } => (Opcode::RC_FLUSH, psn, 0),
            _ => {
                let each = u64::from(wqe.read_packets());
                let part = (psn - wqe.first) / each + 1;
                let last = (wqe.first + part * each - 1).min(wqe.last());
                let end = wqe.offset(last, limits.mtu) + wqe.payload(last, limits.mtu);
                (Opcode::RC_RDMA_READ_REQUEST, last, end - offset)
            }
        };
        #[allow(clippy::cast_possible_truncation)]
        let packets = (last - psn + 1) as u32;
        let each = Budget::cost(len.min(limits.mtu.bytes()) + OVERHEAD);
        let cost = self.response_cost(packets, each, peers);
        let permit = self.permit(Want::Response { packets, cost }, sq, limits, peers);
        if permit.packets == 0 {
            return Plan::Blocked(permit);
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
        match self.core.sq.get(self.requester.cursor()).is_plain() {
            true => self.send_packets::<true, H>(now, permit, quantum, shared, host, sink),
            false => self.send_packets::<false, H>(now, permit, quantum, shared, host, sink),
        }
    }

    /// Sends requests of one packet each if they are `PLAIN`, else packets of one request.
    #[inline(never)]
    fn send_packets<const PLAIN: bool, H: Memory>(
        &mut self,
        now: Time,
        permit: &Permit,
        quantum: &mut usize,
        shared: &mut Shared,
        host: &H,
        sink: &mut impl TxSink,
    ) -> Sent {
        let policy = self.ack_policy(now, permit, &mut shared.peers);
        let Self { core, requester, responder, limits, .. } = self;
        let Some(to) = core.target() else { return Sent::Refused };
        let sq = &core.sq;
        let again = requester.snd_nxt < requester.snd_max;
        // Retransmissions and new packets are bursts of their own.
        let end = if again { requester.snd_max } else { Seq::MAX };
        let mut batches = !again && requester.ack_requests.end().is_some();
        let (full, runs) = (full_cost(limits.mtu), shared.peers.runs());
        let mut burst = Burst {
            policy,
            psn: requester.snd_nxt,
            index: requester.wqe_next,
            left: Cost::default(),
            asked: 0,
            last_asked: requester.acks.last(),
            noted: 0,
            turn: *quantum,
            runs,
            again,
            silent: requester.recovery.peer_is_silent(),
        };
        let outcome = loop {
            let (wqe, psn, left) = (sq.get(burst.index), burst.psn, burst.left);
            let ends = PLAIN || psn == wqe.last();
            let cost = if ends { wqe.cost() } else { full };
            let bytes = left.bytes + u64::from(cost);
            let (len, begins) = match PLAIN {
                true => (wqe.len, true),
                false => (wqe.payload(psn, limits.mtu), wqe.begins(psn)),
            };
            let size = len + request_header(&wqe.op, begins);
            if left.datagrams > 0 {
                let follows = !PLAIN || (ENABLED && wqe.is_plain() && requester.may_follow(wqe));
                let fits = left.datagrams < permit.burst && bytes <= permit.bytes && psn < end;
                if !follows || !fits {
                    break Sent::Yes;
                }
                let packet = (psn, size, begins, cost);
                if batches && !requester.joins(sq, packet, runs, permit, left) {
                    break Sent::Yes;
                }
                // A run that was begun is not cut short.
                if left.datagrams as usize >= *quantum && !requester.control.continues_run(size) {
                    break Sent::Yes;
                }
            }
            let next = bytes + u64::from(if ends { full } else { cost });
            let Some(ack_req) = requester.asks::<PLAIN>(&burst, ends, (size, next), permit, sq)
            else {
                break Sent::Yes;
            };
            let packet = match PLAIN {
                true => RequestPacket::of_plain(burst.index, wqe, ack_req),
                false => RequestPacket::of(burst.index, wqe, psn, limits.mtu, ack_req),
            };
            let counters = &mut shared.counters;
            let sent = match PLAIN {
                true => core.send_packet_of(wqe, &packet, &to, counters, host, sink),
                false => core.send_packet(&packet, &to, counters, host, sink),
            };
            if sent != Sent::Yes {
                break sent;
            }
            requester.control.packet_left(size, runs);
            burst.left = Cost { bytes, datagrams: left.datagrams + 1 };
            burst.psn += 1;
            burst.index += u64::from(ends);
            if ack_req {
                if !PLAIN && psn != burst.last_asked + 1 {
                    requester.note_asks(&mut burst, &mut shared.peers);
                }
                burst.asked += 1;
                burst.last_asked = psn;
                batches = !again;
            }
            if if PLAIN { burst.index == sq.tail } else { ends } {
                break Sent::Yes;
            }
        };
        let count = burst.left.datagrams;
        if count > 0 {
            *quantum = quantum.saturating_sub(count as usize);
            if again && !requester.recovery.is_tail_probe() {
                core.tally.sent_again(&mut shared.counters, count);
            }
            requester.burst_left(now, &mut burst, limits, &mut shared.peers);
            let never = policy == AckPolicy::Never;
            requester.acks.left(requester.wqe_next, never, now, responder.expected());
        }
        outcome
    }
}

impl Requester {
    /// Whether the next packet of the burst, of `size` bytes, asks, which `ends` a request or not,
    /// if the cost with it and one packet more is `next`. `None` if it may not leave: it could not
    /// ask.
    #[inline(always)]
    fn asks<const PLAIN: bool>(
        &self,
        burst: &Burst,
        ends: bool,
        (size, next): (u32, u64),
        permit: &Permit,
        sq: &SendQueue,
    ) -> Option<bool> {
        let AckPolicy::Often { interval, spare } = burst.policy else { return Some(false) };
        let often = ends || burst.psn - burst.last_asked >= interval;
        if often && burst.asked < spare {
            return Some(true);
        }
        // Each packet that leaves can ask: there is credit for one answer. And of requests of one
        // packet those that ask follow each other.
        if (burst.asked > spare && !burst.silent) || (PLAIN && burst.asked > 0) {
            return None;
        }
        // Where it begins again, so that one packet is progress; and the last packet that may
        // leave, also in a turn: the others wait for its acknowledgement.
        let turn_ends = burst.left.datagrams as usize + 1 >= burst.turn
            && self.control.ends_run(size, burst.runs);
        let must = turn_ends
            || (burst.again && burst.psn == self.snd_una)
            || burst.left.datagrams + 1 >= permit.packets
            || next > permit.bytes
            || (ends && self.is_held_up_behind(burst.index, sq));
        Some(must)
    }

    /// Writes down the last packets that asked one after the other.
    #[inline(always)]
    fn note_asks(&mut self, burst: &mut Burst, peers: &mut Peers) {
        let count = burst.asked - burst.noted;
        if count > 0 {
            let first = burst.last_asked + 1 - u64::from(count);
            self.ack_requests.asked(first, count, burst.silent, peers);
            burst.noted = burst.asked;
        }
    }

    /// The burst left: moves the cursor.
    #[inline(always)]
    fn burst_left(&mut self, now: Time, burst: &mut Burst, limits: &Limits, peers: &mut Peers) {
        peers.get(limits.peer).charge(burst.left);
        self.control.left(burst.left);
        // A packet without AckReq is not answered in a round trip.
        self.round_trip.sent(self.snd_nxt, now, burst.again || burst.policy == AckPolicy::Never);
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
