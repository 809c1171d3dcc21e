//! "May this leave now?": one function answers, with an amount and a reason.
//!
//! - Problem: transport rules, congestion, the peer's receive queue, our own and the turns of other
//!   queue pairs decide together, and each at another time.
//! - Rule: each packet asks [`permit`] before it leaves. The answer changes nothing. The
//!   first limit that applies is the reason. [`Requester::reserve`] then takes the credit that the
//!   answer is about; nothing is taken back.
//! - Cost if wrong: a packet waits for a timer although it could leave, or it is lost although it
//!   could have waited.
//! - Measured: the reasons are counted for each queue pair ([`Limit`]).

mod batching;
mod control;
mod credits;
pub(super) mod read_window;

use self::batching::Awaited;
pub(super) use self::control::SendControl;
use crate::budget::{Budget, Cost};
use crate::pacing::Pace;
use crate::peer::{Expected, PeerId, Peers, RunLimits};
use crate::qp::sq::{OVERHEAD, SendQueue, Wqe};
use crate::rc::reorder::SPAN;
use crate::rc::requester::ack_requests::ACK;
use crate::rc::requester::burst::{Burst, PARTS, request_header};
use crate::rc::requester::{ConnParams, REQUEST, Requester};
use crate::stats::Limit;
use crate::tuning::ack_requests::{INTERVAL_MAX, TIMES_OF_WINDOW};
use crate::tuning::message_runs;
use crate::types::{Seq, Time};
use crate::verbs::SendOp;

/// The next packets to send, and their origin.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Want<'a> {
    /// Packets of SENDs and WRITEs, from the cursor on: no more than [`Want::Request`] permits.
    Data(&'a Requester, &'a Wqe, &'a ConnParams, u32),
    /// A request with a response of its own, which has this number of packets and needs credit of
    /// this cost.
    Response(&'a Requester, &'a ConnParams, u32, Cost),
    /// Anything that is at the cursor, which may send nothing.
    Request(&'a Requester),
    /// The last packet again, to probe.
    Probe(&'a Requester),
    /// One packet that is known to be lost, again and alone.
    Lost(&'a Requester),
    /// Anything that is the next of a service without acknowledgements, which may send nothing. It
    /// is `held` if it begins a message in SQD.
    Unreliable { held: bool },
    /// One packet of such a service, for the receiver of this pace, and of this cost.
    Datagram { now: Time, pace: &'a Pace, cost: Cost },
}

/// The packet that a burst goes on with.
#[derive(Debug, Clone, Copy)]
pub(super) struct NextPacket {
    pub(super) psn: Seq,
    /// Whether it begins a message, or ends a request.
    pub(super) begins: bool,
    pub(super) ends: bool,
    /// Bytes from BTH to ICRC.
    pub(super) size: u32,
    pub(super) cost: u32,
    /// The cost of the burst with it.
    pub(super) bytes: u64,
}

/// Everything beside the requester that an answer depends on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Situation<'a> {
    pub(crate) sq: &'a SendQueue,
    pub(crate) peers: &'a Peers,
    /// Packets that are left of the turn.
    pub(crate) turn: usize,
}

/// The number of packets that may leave now, or why none may.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Permit {
    /// Packets; 0 if nothing may leave.
    pub(crate) packets: u32,
    /// The sum of their costs.
    pub(super) bytes: u64,
    /// Of the packets, those that may leave before another permit is asked for.
    pub(super) burst: u32,
    /// The packets that may ask for an acknowledgement.
    pub(super) acks: AckPermit,
    /// Our own credit for one acknowledgement.
    pub(super) ack_room: AckRoom,
    /// Why nothing may leave; meaningless if something may.
    pub(crate) limited_by: Limit,
    /// What it waits for, beside acknowledgements.
    pub(crate) wait: Wait,
}

/// What a packet waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    Nothing,
    /// This credit of this receiver, in line.
    Credit(PeerId, Cost),
    Until(Time),
}

/// Which packets may ask for an acknowledgement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct AckPermit {
    /// The last packet of a message asks, and each this number of PSNs after the last one that
    /// asked.
    pub(super) interval: u32,
    /// Acknowledgements with credit, beside one that is reserved for the last packet that may
    /// leave.
    pub(super) spare: u32,
}

/// Our own credit for the acknowledgement of packets that do not ask: a queue pair that has taken
/// credit of the peer can always ask for it back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AckRoom {
    /// Needed for packets that left without asking, if there are some.
    AsNeeded,
    /// Kept if it is there: packets are about to leave, or wait in line for the peer's credit.
    Kept,
    /// Reserved before anything leaves, because there is hardly any.
    Reserved,
}

impl Permit {
    const NOTHING: Self = Self {
        packets: 0,
        bytes: 0,
        burst: 0,
        acks: AckPermit { interval: 0, spare: 0 },
        ack_room: AckRoom::AsNeeded,
        limited_by: Limit::SendQueueEmpty,
        wait: Wait::Nothing,
    };

    pub(super) const ONE: Self = Self { packets: 1, ..Self::NOTHING };

    const fn none(limited_by: Limit) -> Self {
        Self { limited_by, ..Self::NOTHING }
    }

    const fn wait(limited_by: Limit, receiver: PeerId, need: Cost, ack_room: AckRoom) -> Self {
        Self { wait: Wait::Credit(receiver, need), ack_room, ..Self::none(limited_by) }
    }

    /// One packet, unless the `turn` is over.
    const fn one_of(turn: usize) -> Self {
        if turn == 0 { Self::none(Limit::Turn) } else { Self::ONE }
    }
}

/// The amount of `want` that may leave now.
#[inline(always)]
pub(crate) fn permit(want: Want<'_>, at: &Situation<'_>) -> Permit {
    match want {
        Want::Request(of) => match of.transport_limit(at.sq) {
            Ok(burst) => Permit { burst, ..Permit::ONE },
            Err(limit) => Permit::none(limit),
        },
        Want::Data(of, wqe, params, burst) => of.permit_data(wqe, params, burst, at),
        Want::Response(of, params, packets, cost) => of.permit_response(packets, cost, params, at),
        Want::Lost(of) => of.permit_lost(at.turn),
        Want::Probe(of) => of.permit_probe(),
        Want::Unreliable { .. } if at.sq.is_empty() => Permit::none(Limit::SendQueueEmpty),
        Want::Unreliable { held: true } => Permit::none(Limit::Draining),
        Want::Unreliable { held: false } => Permit::one_of(at.turn),
        Want::Datagram { now, pace, cost } => match pace.admit(now, cost) {
            Ok(()) => Permit::ONE,
            Err(until) => Permit { wait: Wait::Until(until), ..Permit::none(Limit::Pacing) },
        },
    }
}

impl Requester {
    /// Takes or gives back our own credit for an acknowledgement, as `permit` needs it.
    #[inline]
    pub(super) fn reserve(&mut self, permit: &Permit, peers: &mut Peers) {
        match permit.ack_room {
            AckRoom::AsNeeded => self.give_back_ack_room(peers),
            AckRoom::Kept => {}
            AckRoom::Reserved => self.reserve_ack_room(peers),
        }
    }

    #[cold]
    fn reserve_ack_room(&mut self, peers: &mut Peers) {
        // Others have the room that was kept for too long.
        self.ack_requests.close(peers);
        self.open(self.recovery.peer_is_silent(), peers);
    }

    /// A READ is not sent again only to ask: it would be answered twice, and there is credit for
    /// one answer.
    fn permit_probe(&self) -> Permit {
        if !self.outstanding() {
            Permit::none(Limit::SendQueueEmpty)
        } else if self.control.awaits_receive() {
            Permit::none(Limit::Rnr)
        } else if !self.responses.is_empty() && !self.recovery.has_lost() {
            Permit::none(Limit::RdAtomic)
        } else {
            Permit::ONE
        }
    }

    /// A lost packet is not in flight, and takes no more of the window than any other.
    fn permit_lost(&self, turn: usize) -> Permit {
        let lost = self.recovery.lost();
        let in_flight = self.control.in_flight.datagrams.saturating_sub(lost);
        let may = in_flight < self.control.congestion.packets() || self.recovery.lost_probes();
        match lost > 0 && may {
            true => Permit::one_of(turn),
            false => Permit::none(self.control.window_limit()),
        }
    }

    /// The limit of the request at the cursor, also of one that sends nothing; or the packets that
    /// may still leave while losses are repaired.
    #[inline]
    fn transport_limit(&self, sq: &SendQueue) -> Result<u32, Limit> {
        if self.wqe_next == sq.tail {
            return Err(Limit::SendQueueEmpty);
        }
        if self.control.awaits_receive() {
            return Err(Limit::Rnr);
        }
        let left = self.recovery_left();
        if left == 0 {
            return Err(Limit::Recovering);
        }
        let left = u32::try_from(left).unwrap_or(u32::MAX);
        let wqe = sq.get(self.wqe_next);
        if self.snd_nxt != wqe.first {
            return Ok(left);
        }
        if self.control.drains && self.snd_nxt >= self.snd_max {
            return Err(Limit::Draining);
        }
        // An invalidation waits for all that was asked for before (IBTA volume 1, 10.6.5.1, as
        // cited by `rxe_req.c`).
        let invalidates = matches!(wqe.op, SendOp::LocalInv { .. });
        let waits = (wqe.is_fenced() && !self.responses.is_empty())
            || (invalidates && self.wqe_next != sq.head);
        if waits { Err(Limit::Fence) } else { Ok(left) }
    }

    /// Whether nothing but credit may hold back the request at the cursor, and no response is to
    /// come after which it is looked at again. Nothing is in flight then, so the window has room.
    pub(in crate::rc) fn lacks_only_credit(&self, sq: &SendQueue) -> bool {
        self.transport_limit(sq).is_ok() && !self.outstanding()
    }

    /// The reason why the packet of `psn`, of `bytes` bytes, should wait; it `begins` a message or
    /// not. `left` more packets are in flight than are charged.
    #[inline]
    fn awaits(
        &self,
        sq: &SendQueue,
        psn: Seq,
        (bytes, runs): (u32, RunLimits),
        begins: bool,
        left: u32,
    ) -> Awaited {
        let SendControl { batch, congestion, in_flight, .. } = &self.control;
        let (queued, in_flight) = (sq.next_psn - psn, in_flight.datagrams + left);
        match batch.awaited(bytes, runs, begins, queued, in_flight, congestion.packets()) {
            // After a loss the window keeps the path full, and every packet of it counts.
            Awaited::Window | Awaited::Room(_)
                if !congestion.is_whole() || self.recovery.is_selective() =>
            {
                Awaited::Nothing
            }
            awaited => awaited,
        }
    }

    /// Number of packets that may still follow the first unacknowledged one while losses are
    /// repaired.
    #[inline]
    fn recovery_left(&self) -> u64 {
        let behind = match self.recovery.probes() {
            true => u64::MAX,
            false => self.recovery.behind_the_lost(),
        };
        if behind == u64::MAX && !self.recovery.is_selective() {
            return u64::MAX;
        }
        let outstanding = self.snd_nxt - self.snd_una;
        let behind = behind.saturating_add(1).saturating_sub(outstanding);
        // The peer would not hold more.
        let span =
            if self.recovery.is_selective() { SPAN.saturating_sub(outstanding) } else { u64::MAX };
        behind.min(span)
    }

    #[inline]
    fn permit_data(
        &self,
        wqe: &Wqe,
        params: &ConnParams,
        mut burst: u32,
        at: &Situation<'_>,
    ) -> Permit {
        let Situation { sq, peers, turn } = *at;
        let probes = self.recovery.probes();
        let window = self.control.window_left();
        if window == 0 && !probes {
            return Permit::none(self.control.window_limit());
        }
        let psn = self.snd_nxt;
        let limited = self.control.credits.exceeded(wqe);
        // The first packet goes alone, the others when it has found a receive.
        if limited && if psn == wqe.first { self.snd_una < psn } else { self.snd_una <= wqe.first }
        {
            return Permit::none(Limit::Credits);
        }
        let (len, begins, runs) = (wqe.payload(psn, params.mtu), wqe.begins(psn), peers.runs());
        let bytes = len + request_header(&wqe.op, begins);
        let each = Budget::cost(len + OVERHEAD);
        let cost = Cost::of(1, each);
        let receiver = peers.receiver(params.peer);
        if psn < self.snd_max {
            // Retransmissions and new packets are bursts of their own.
            burst = u32::try_from(self.snd_max - psn).unwrap_or(u32::MAX).min(burst);
        } else {
            // An acknowledgement ends the wait, so one must be outstanding.
            let awaited = match self.ack_requests.end() {
                Some(_) => self.awaits(sq, psn, (bytes, runs), begins, 0),
                None => Awaited::Nothing,
            };
            if matches!(awaited, Awaited::Messages | Awaited::Window) {
                return Permit::none(Limit::Batch);
            }
            let run = || {
                let queued = u32::try_from(sq.next_psn - psn).unwrap_or(u32::MAX);
                Cost::of(runs.packets_of(bytes).min(queued), each)
            };
            // In line: a queue pair that left it would lose the rest of its turn.
            if self.fills_runs(bytes)
                && !probes
                && let Some(all) = receiver.withholds(run)
            {
                return Permit::wait(Limit::PeerRoom, params.peer, all, AckRoom::Kept);
            }
        }
        let Some((spare, ack_room)) = self.credit_for_responses(params.slot, peers) else {
            return Permit::wait(Limit::AckRoom, PeerId::OWN, ACK, AckRoom::AsNeeded);
        };
        let room = if receiver.admits(params.slot, cost) {
            receiver.available()
        } else if probes {
            receiver.room_for(params.slot)
        } else {
            return Permit::wait(Limit::PeerRoom, params.peer, cost, ack_room);
        };
        // A run that was begun is not cut short.
        if turn == 0 && !self.control.batch.is_joined_by(bytes) {
            return Permit { ack_room, ..Permit::none(Limit::Turn) };
        }
        let alone = probes || (limited && psn == wqe.first);
        let packets = if alone { 1 } else { room.datagrams.min(window).max(1) };
        let interval = (self.control.congestion.packets() / TIMES_OF_WINDOW).clamp(1, INTERVAL_MAX);
        Permit {
            packets,
            bytes: room.bytes.max(cost.bytes),
            burst: packets.min(burst),
            acks: AckPermit { interval, spare },
            ack_room,
            ..Permit::ONE
        }
    }

    /// Whether a burst, of which packets have left, goes on with `packet` of the request `wqe`: a
    /// single packet of another request, unless `KIND` is `PARTS`.
    #[inline(always)]
    pub(super) fn goes_on<const KIND: u8>(
        &self,
        burst: &Burst<'_>,
        packet: &NextPacket,
        wqe: &Wqe,
        sq: &SendQueue,
    ) -> bool {
        let (left, runs) = (burst.left.datagrams as usize, burst.runs);
        let follows =
            KIND == PARTS || (message_runs::ENABLED && wqe.is_plain() && self.may_follow(wqe));
        let begins = || {
            let waits = burst.batches && !self.joins(sq, packet, runs, burst);
            !waits && left < burst.turn
        };
        // A run that was begun is not cut short.
        let goes = self.control.batch.is_joined_by(packet.size) || begins();
        follows && packet.bytes <= burst.permit.bytes && goes
    }

    /// Whether a packet of `bytes` bytes begins a run that should not be cut short. After a loss
    /// every packet of the window counts.
    #[inline]
    fn fills_runs(&self, bytes: u32) -> bool {
        let SendControl { batch, congestion, .. } = &self.control;
        !batch.is_joined_by(bytes) && congestion.is_whole() && !self.recovery.is_selective()
    }

    /// Number of responses with credit beside one, for which there is room already, or will be:
    /// a queue pair that has taken credit of the peer can always ask for it back. `None` if there
    /// is not even that one.
    #[inline]
    fn credit_for_responses(&self, slot: u32, peers: &Peers) -> Option<(u32, AckRoom)> {
        let spared = peers.spared();
        let spare = (spared.bytes / ACK.bytes).min(u64::from(spared.datagrams)) as u32;
        if !self.ack_requests.is_open() && spare > 1 {
            return Some((spare - 1, AckRoom::Kept));
        }
        self.credit_for_one(slot, spare, peers)
    }

    #[cold]
    fn credit_for_one(&self, slot: u32, spare: u32, peers: &Peers) -> Option<(u32, AckRoom)> {
        let forgotten = !self.is_unasked() && self.ack_requests.is_stale(peers);
        if self.ack_requests.is_open() && !forgotten {
            return Some((spare, AckRoom::Kept));
        }
        let probes = self.recovery.peer_is_silent() || self.recovery.probes();
        let may = probes || peers.receiver(PeerId::OWN).admits(slot, ACK);
        may.then_some((spare.saturating_sub(1), AckRoom::Reserved))
    }

    /// Reserves credit for the next acknowledgement, or none if the peer is silent.
    #[inline]
    pub(super) fn open(&mut self, silent: bool, peers: &mut Peers) {
        self.ack_requests.open(if silent { Expected::NOTHING } else { peers.expect(ACK) });
    }

    fn permit_response(
        &self,
        packets: u32,
        cost: Cost,
        params: &ConnParams,
        at: &Situation<'_>,
    ) -> Permit {
        let Situation { peers, turn, .. } = *at;
        let psn = self.snd_nxt;
        // A request that began under a higher limit may be repeated.
        let begun = psn < self.snd_max && self.responses.is_empty();
        if self.responses.len() >= usize::from(self.control.max_rd_atomic) && !begun {
            return Permit::none(Limit::RdAtomic);
        }
        let window = &self.control.read_window;
        if packets > 1
            && !self.responses.is_empty()
            && !window.allows(self.responses_in_flight(), packets)
        {
            return Permit::none(Limit::ReadWindow);
        }
        let has_room = peers.receiver(PeerId::OWN).admits(params.slot, cost);
        if !has_room && !self.recovery.probes() && !self.recovery.peer_is_silent() {
            return Permit::wait(Limit::AckRoom, PeerId::OWN, cost, AckRoom::AsNeeded);
        }
        // The peer's credit is asked for too, but one request a queue pair may always have there:
        // else one that waited for our own credit would have to wait again. It waits for its own
        // responses, not in line.
        if !self.responses.is_empty() && !peers.receiver(params.peer).fits(REQUEST) {
            return Permit::none(Limit::PeerRoom);
        }
        Permit::one_of(turn)
    }

    /// The cost of the responses to a READ request of `packets` packets, each of which costs
    /// `each`.
    pub(super) fn response_cost(&self, packets: u32, each: u32, peers: &Peers) -> Cost {
        match self.control.read_window.whole {
            true => peers.charge_of_answer(packets, each),
            false => Cost::of(packets, each),
        }
    }

    /// Whether no READ or atomic is ever allowed, so that one that was not begun would wait for
    /// ever.
    pub(super) fn allows_no_response(&self) -> bool {
        self.control.max_rd_atomic == 0 && self.snd_nxt >= self.snd_max
    }

    /// Whether the request `wqe` may follow others in a burst.
    #[inline]
    pub(super) fn may_follow(&self, wqe: &Wqe) -> bool {
        !self.control.drains && !self.control.credits.exceeded(wqe)
    }

    /// Whether `packet` goes with a burst, or waits for more.
    #[inline]
    fn joins(
        &self,
        sq: &SendQueue,
        packet: &NextPacket,
        runs: RunLimits,
        burst: &Burst<'_>,
    ) -> bool {
        let NextPacket { psn, size, begins, cost, .. } = *packet;
        let (left, permit) = (burst.left, burst.permit);
        match self.awaits(sq, psn, (size, runs), begins, left.datagrams) {
            Awaited::Nothing => true,
            Awaited::Messages | Awaited::Window => false,
            Awaited::Room(packets) => {
                let all = left.bytes + u64::from(packets) * u64::from(cost);
                left.datagrams + packets <= permit.packets && all <= permit.bytes
            }
        }
    }
}
