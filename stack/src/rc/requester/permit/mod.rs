//! "May this leave now?": one function answers, with an amount and a reason.
//!
//! - Problem: transport rules, congestion, the peer's receive queue and our own decide together,
//!   and each at another time.
//! - Rule: each packet asks [`Requester::permit`] before it leaves. The state that the answer needs
//!   beside the cursor is private here. The first limit that applies is the reason.
//! - Cost if wrong: a packet waits for a timer although it could leave, or it is lost although it
//!   could have waited.
//! - Measured: the reasons are counted for each queue pair ([`Limit`]).

mod batching;
mod credits;
mod read_window;

use self::batching::{Awaited, Batch};
use self::credits::Credits;
use self::read_window::ReadWindow;
use crate::peer::{Budget, Cost, Expected, PeerId, Peers, RunLimits};
use crate::qp::sq::{OVERHEAD, SendQueue, Wqe};
use crate::rc::congestion::rtt::RoundTrip;
use crate::rc::congestion::{Congestion, Repeat};
use crate::rc::reorder::SPAN;
use crate::rc::requester::ack_requests::ACK;
use crate::rc::requester::burst::request_header;
use crate::rc::requester::{Limits, NewPath, REQUEST, Requester};
use crate::stats::Limit;
use crate::types::{Mtu, Seq, Time};
use crate::verbs::SendOp;
use crate::wire::Aeth;

/// The kind of packet that is to leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Want {
    /// Packets of SENDs and WRITEs, from the cursor on.
    Data,
    /// A request with a response of its own, which has `packets` packets and needs credit of
    /// `cost`.
    Response { packets: u32, cost: Cost },
    /// Anything that is at the cursor, which may send nothing.
    Request,
    /// The last packet again, to probe.
    Probe,
    /// One packet that is known to be lost, again and alone.
    Lost,
}

/// The number of packets that may leave now, or why none may.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Permit {
    /// Packets; 0 if nothing may leave.
    pub(super) packets: u32,
    /// The sum of their costs.
    pub(super) bytes: u64,
    /// Of the packets, those that may leave before another permit is asked for.
    pub(super) burst: u32,
    /// Number of responses with credit, beside one that is reserved.
    pub(super) responses: u32,
    /// The congestion window as it is now.
    pub(super) window: u32,
    /// Why nothing may leave; meaningless if something may.
    pub(super) limited_by: Limit,
    /// The credit that it waits for in line.
    pub(super) wait: Option<(PeerId, Cost)>,
}

impl Permit {
    const ONE: Self = Self { packets: 1, ..Self::none(Limit::CongestionWindow) };

    const fn none(limited_by: Limit) -> Self {
        Self { packets: 0, bytes: 0, burst: 0, responses: 0, window: 0, limited_by, wait: None }
    }

    const fn wait(limited_by: Limit, receiver: PeerId, need: Cost) -> Self {
        Self { wait: Some((receiver, need)), ..Self::none(limited_by) }
    }
}

/// The state that decides whether packets may leave, beside the cursor and known losses.
#[derive(Debug)]
pub(super) struct SendControl {
    /// The cost of the packets from `snd_una` to `snd_nxt` that the peer is not known to hold.
    in_flight: Cost,
    congestion: Congestion,
    read_window: ReadWindow,
    credits: Credits,
    batch: Batch,
    /// When the peer may have a receive again; [`Time::NEVER`] without an RNR NAK.
    rnr_until: Time,
    max_rd_atomic: u8,
    /// No request is begun: SQD.
    drains: bool,
}

impl Default for SendControl {
    /// Of no connection.
    fn default() -> Self {
        let nowhere = NewPath {
            mtu: Mtu::Mtu256,
            window_max: 1,
            max_rd_atomic: 0,
            room: 0,
            to_rocinante: false,
        };
        Self::new(&nowhere)
    }
}

impl SendControl {
    /// Of a connection on this path.
    pub(super) fn new(path: &NewPath) -> Self {
        Self {
            in_flight: Cost::default(),
            congestion: Congestion::new(path.window_max),
            read_window: ReadWindow::new(path.mtu, path.room, path.to_rocinante),
            credits: Credits::default(),
            batch: Batch::default(),
            rnr_until: Time::NEVER,
            max_rd_atomic: path.max_rd_atomic,
            drains: false,
        }
    }

    /// The peer turned out to be a Rocinante, with room for `window_max` packets of the queue pair.
    pub(super) fn upgrade(&mut self, window_max: u32) {
        self.congestion.grow(window_max);
        self.read_window.upgrade();
    }

    /// Begins on another path as on a first one. The peer's receives are the same, and it drains as
    /// before.
    pub(super) fn take_path(&mut self, path: &NewPath) {
        let Self { congestion, read_window, .. } = Self::new(path);
        (self.congestion, self.read_window) = (congestion, read_window);
    }

    /// Sets the number of READs and atomics that may be outstanding.
    pub(super) fn set_max_rd_atomic(&mut self, max: u8) {
        self.max_rd_atomic = max;
    }

    /// Sets whether no request is begun: SQD.
    pub(super) fn drain(&mut self, drains: bool) {
        self.drains = drains;
    }

    /// The most packets in flight, and the most READs and atomics outstanding.
    pub(super) fn most(&self) -> (u32, u8) {
        (self.congestion.max(), self.max_rd_atomic)
    }

    /// Packets of each request of a READ that is posted now.
    pub(super) fn read_request_packets(&self, mtu: Mtu, peers: &Peers) -> u16 {
        read_window::request_packets(mtu, peers, &self.read_window)
    }

    /// The charge of the packets in flight.
    pub(super) fn in_flight(&self) -> Cost {
        self.in_flight
    }

    /// A turn begins, and with it a run.
    #[inline]
    pub(super) fn begin_turn(&mut self) {
        self.batch.begin();
    }

    /// Whether a packet of `bytes` bytes continues the run that was begun.
    #[inline]
    pub(super) fn continues_run(&self, bytes: u32) -> bool {
        self.batch.is_joined_by(bytes)
    }

    /// Whether a packet of `bytes` bytes is the last of its run.
    #[inline]
    pub(super) fn ends_run(&self, bytes: u32, runs: RunLimits) -> bool {
        self.batch.is_ended_by(bytes, runs)
    }

    /// A packet of `bytes` bytes left.
    #[inline]
    pub(super) fn packet_left(&mut self, bytes: u32, runs: RunLimits) {
        self.batch.sent(bytes, runs);
    }

    /// Packets of this cost left.
    #[inline]
    pub(super) fn left(&mut self, cost: Cost) {
        self.in_flight.add(cost);
    }

    /// Packets of this cost are in flight no more.
    #[inline]
    pub(super) fn release(&mut self, cost: Cost) {
        self.in_flight.take(cost);
    }

    /// An AETH announces the number of receives.
    #[inline]
    pub(super) fn on_aeth(&mut self, aeth: Aeth) {
        self.credits.on_aeth(aeth);
    }

    /// `packets` packets were acknowledged, or are known to be held.
    #[inline]
    pub(super) fn on_ack(&mut self, packets: u32) {
        self.congestion.on_ack(packets);
    }

    /// `packets` packets of READ responses came.
    #[inline]
    pub(super) fn on_responses(&mut self, packets: u64) {
        self.read_window.came(packets);
    }

    /// Of `in_flight` packets of READ responses in flight, some were lost.
    pub(super) fn on_lost_responses(&mut self, in_flight: u64) {
        self.read_window.lost(in_flight);
    }

    /// Packets were lost, and go again in this way.
    pub(super) fn on_loss(&mut self, now: Time, rtt: &RoundTrip, repeat: Repeat) {
        self.congestion.on_loss(now, rtt, repeat);
    }

    /// Nothing came back in time.
    pub(super) fn on_timeout(&mut self, now: Time) {
        self.congestion.on_timeout(now);
    }

    /// Packets were marked (CNP).
    pub(super) fn on_ecn(&mut self, now: Time, rtt: &RoundTrip) {
        self.congestion.on_ecn(now, rtt);
    }

    /// Takes note of the time; returns when more may leave, if pacing keeps something back.
    #[inline]
    pub(super) fn tick(&mut self, now: Time) -> Option<Time> {
        self.congestion.tick(now)
    }

    /// The peer has no receive until then.
    pub(super) fn on_rnr(&mut self, until: Time) {
        self.rnr_until = until;
    }

    /// The peer is not known to lack a receive any more.
    #[inline]
    pub(super) fn forget_rnr(&mut self) {
        self.rnr_until = Time::NEVER;
    }

    /// When the wait for a receive is over; [`Time::NEVER`] if there is none.
    #[inline]
    pub(super) fn ready_at(&self) -> Time {
        self.rnr_until
    }

    pub(super) fn awaits_receive(&self) -> bool {
        self.rnr_until != Time::NEVER
    }

    /// Whether credit for `more` packets can be given back late without a loss for other queue
    /// pairs, and the peer has receives for `wqe` and `more` messages behind it, or announces none.
    pub(super) fn has_ample(&self, more: u32, wqe: &Wqe, peer: PeerId, peers: &mut Peers) -> bool {
        let window = self.congestion.is_whole() && self.congestion.packets() > more;
        peers.get(peer).is_mostly_free(more) && window && !self.credits.lacks(wqe, more)
    }

    /// Packets that the congestion window has left.
    #[inline]
    fn window_left(&self) -> u32 {
        self.congestion.packets().saturating_sub(self.in_flight.datagrams)
    }

    fn window_limit(&self) -> Limit {
        if self.congestion.is_paced() { Limit::Pacing } else { Limit::CongestionWindow }
    }
}

impl Requester {
    /// The amount of `want` that may leave now.
    #[inline(always)]
    pub(super) fn permit(
        &mut self,
        want: Want,
        sq: &SendQueue,
        limits: &Limits,
        peers: &mut Peers,
    ) -> Permit {
        match want {
            Want::Request => self.transport_limit(sq).map_or(Permit::ONE, Permit::none),
            Want::Data => self.permit_data(sq, limits, peers),
            Want::Response { packets, cost } => self.permit_response(packets, cost, limits, peers),
            Want::Lost => self.permit_lost(),
            Want::Probe => self.permit_probe(),
        }
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
    fn permit_lost(&self) -> Permit {
        let lost = self.recovery.lost();
        let in_flight = self.control.in_flight.datagrams.saturating_sub(lost);
        let may = in_flight < self.control.congestion.packets() || self.recovery.lost_probes();
        if lost > 0 && may { Permit::ONE } else { Permit::none(self.control.window_limit()) }
    }

    /// The limit of the request at the cursor, also of one that sends nothing.
    #[inline]
    fn transport_limit(&self, sq: &SendQueue) -> Option<Limit> {
        if self.wqe_next == sq.tail {
            return Some(Limit::SendQueueEmpty);
        }
        if self.control.awaits_receive() {
            return Some(Limit::Rnr);
        }
        if self.recovery_left() == 0 {
            return Some(Limit::Recovering);
        }
        let wqe = sq.get(self.wqe_next);
        if self.snd_nxt != wqe.first {
            return None;
        }
        if self.control.drains && self.snd_nxt >= self.snd_max {
            return Some(Limit::Draining);
        }
        // An invalidation waits for all that was asked for before (IBTA volume 1, 10.6.5.1, as
        // cited by `rxe_req.c`).
        let invalidates = matches!(wqe.op, SendOp::LocalInv { .. });
        let waits = (wqe.is_fenced() && !self.responses.is_empty())
            || (invalidates && self.wqe_next != sq.head);
        waits.then_some(Limit::Fence)
    }

    /// Whether nothing but credit may hold back the request at the cursor, and no response is to
    /// come after which it is looked at again. Nothing is in flight then, so the window has room.
    pub(in crate::rc) fn lacks_only_credit(&self, sq: &SendQueue) -> bool {
        self.transport_limit(sq).is_none() && !self.outstanding()
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
        let outstanding = self.snd_nxt - self.snd_una;
        let behind = match self.recovery.probes() {
            true => u64::MAX,
            false => self.recovery.behind_the_lost(),
        };
        let behind = behind.saturating_add(1).saturating_sub(outstanding);
        // The peer would not hold more.
        let span =
            if self.recovery.is_selective() { SPAN.saturating_sub(outstanding) } else { u64::MAX };
        behind.min(span)
    }

    #[inline]
    fn permit_data(&mut self, sq: &SendQueue, limits: &Limits, peers: &mut Peers) -> Permit {
        let wqe = sq.get(self.wqe_next);
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
        let len = wqe.payload(psn, limits.mtu);
        let each = Budget::cost(len + OVERHEAD);
        let cost = Cost::of(1, each);
        if psn >= self.snd_max {
            let (begins, runs) = (wqe.begins(psn), peers.runs());
            let bytes = len + request_header(&wqe.op, begins);
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
                && let Some(all) = peers.get(limits.peer).withholds(run)
            {
                return Permit::wait(Limit::PeerRoom, limits.peer, all);
            }
        }
        let Some(responses) = self.credit_for_responses(limits.slot, peers) else {
            return Permit::wait(Limit::AckRoom, PeerId::OWN, ACK);
        };
        let receiver = peers.get(limits.peer);
        if !receiver.admits(limits.slot, cost) && !probes {
            return Permit::wait(Limit::PeerRoom, limits.peer, cost);
        }
        let room = receiver.room_for(limits.slot);
        let alone = probes || (limited && psn == wqe.first);
        let packets = if alone { 1 } else { room.datagrams.min(window).max(1) };
        Permit {
            packets,
            bytes: room.bytes.max(cost.bytes),
            burst: packets.min(u32::try_from(self.recovery_left()).unwrap_or(u32::MAX)),
            responses,
            window: self.control.congestion.packets(),
            limited_by: Limit::PeerRoom,
            wait: None,
        }
    }

    /// Whether a packet of `bytes` bytes begins a run that should not be cut short. After a loss
    /// every packet of the window counts.
    #[inline]
    fn fills_runs(&self, bytes: u32) -> bool {
        let SendControl { batch, congestion, .. } = &self.control;
        !batch.is_joined_by(bytes) && congestion.is_whole() && !self.recovery.is_selective()
    }

    /// Number of responses with credit beside one, whose credit is there already or reserved now: a
    /// queue pair that has taken credit of the peer can always ask for it back. `None` if there is
    /// not even that one.
    #[inline]
    fn credit_for_responses(&mut self, slot: u32, peers: &mut Peers) -> Option<u32> {
        let spared = peers.spared();
        #[allow(clippy::cast_possible_truncation)]
        let spare = (spared.bytes / ACK.bytes).min(u64::from(spared.datagrams)) as u32;
        if !self.ack_requests.is_open() && spare > 1 {
            return Some(spare - 1);
        }
        self.reserve_response(slot, spare, peers)
    }

    #[cold]
    fn reserve_response(&mut self, slot: u32, spare: u32, peers: &mut Peers) -> Option<u32> {
        if !self.is_unasked() && self.ack_requests.is_stale(peers) {
            self.ack_requests.close(peers);
        }
        if self.ack_requests.is_open() {
            return Some(spare);
        }
        let silent = self.recovery.peer_is_silent();
        let may = silent || self.recovery.probes() || peers.get(PeerId::OWN).admits(slot, ACK);
        may.then(|| {
            self.open(silent, peers);
            spare.saturating_sub(1)
        })
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
        limits: &Limits,
        peers: &mut Peers,
    ) -> Permit {
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
        let has_room = peers.get(PeerId::OWN).admits(limits.slot, cost);
        if !has_room && !self.recovery.probes() && !self.recovery.peer_is_silent() {
            return Permit::wait(Limit::AckRoom, PeerId::OWN, cost);
        }
        // The peer's credit is asked for too, but one request a queue pair may always have there:
        // else one that waited for our own credit would have to wait again. It waits for its own
        // responses, not in line.
        if !self.responses.is_empty() && !peers.get(limits.peer).fits(REQUEST) {
            return Permit::none(Limit::PeerRoom);
        }
        Permit::ONE
    }

    /// The cost of the responses to a READ request of `packets` packets, each of which costs
    /// `each`.
    pub(super) fn response_cost(&self, packets: u32, each: u32, peers: &Peers) -> Cost {
        match self.control.read_window.comes_whole() {
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

    /// Whether the packet of `psn`, which has `bytes` bytes and costs `each`, goes with a burst of
    /// which `left` packets have left, or waits for more. It `begins` a message or not.
    #[inline]
    pub(super) fn joins(
        &self,
        sq: &SendQueue,
        (psn, bytes, begins, each): (Seq, u32, bool, u32),
        runs: RunLimits,
        permit: &Permit,
        left: Cost,
    ) -> bool {
        match self.awaits(sq, psn, (bytes, runs), begins, left.datagrams) {
            Awaited::Nothing => true,
            Awaited::Messages | Awaited::Window => false,
            Awaited::Room(packets) => {
                let all = left.bytes + u64::from(packets) * u64::from(each);
                left.datagrams + packets <= permit.packets && all <= permit.bytes
            }
        }
    }
}
