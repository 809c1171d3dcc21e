//! The state behind each permit: events go in, and only [`permit`](super) asks it.

use super::batching::Batch;
use super::credits::Credits;
use super::read_window::{self, ReadWindow};
use crate::budget::Cost;
use crate::peer::{PeerId, Peers, RunLimits};
use crate::qp::sq::Wqe;
use crate::rc::congestion::rtt::RoundTrip;
use crate::rc::congestion::{Congestion, Repeat};
use crate::rc::requester::PathParams;
use crate::stats::Limit;
use crate::types::{Mtu, Time};
use crate::wire::Aeth;

/// The state that decides whether packets may leave, beside the cursor and known losses.
#[derive(Debug)]
pub(in crate::rc::requester) struct SendControl {
    /// The cost of the packets from `snd_una` to `snd_nxt` that the peer is not known to hold.
    pub(super) in_flight: Cost,
    pub(super) congestion: Congestion,
    pub(super) read_window: ReadWindow,
    pub(super) credits: Credits,
    pub(super) batch: Batch,
    /// When the peer may have a receive again; [`Time::NEVER`] without an RNR NAK.
    rnr_until: Time,
    pub(super) max_rd_atomic: u8,
    /// No request is begun: SQD.
    pub(super) drains: bool,
}

impl Default for SendControl {
    /// Of no connection.
    fn default() -> Self {
        let nowhere = PathParams {
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
    pub(in crate::rc::requester) fn new(path: &PathParams) -> Self {
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
    pub(in crate::rc::requester) fn upgrade(&mut self, window_max: u32) {
        self.congestion.grow(window_max);
        self.read_window.upgrade();
    }

    /// Begins on another path as on a first one. The peer's receives are the same, and it drains as
    /// before.
    pub(in crate::rc::requester) fn take_path(&mut self, path: &PathParams) {
        let Self { congestion, read_window, .. } = Self::new(path);
        (self.congestion, self.read_window) = (congestion, read_window);
    }

    /// Sets the number of READs and atomics that may be outstanding.
    pub(in crate::rc::requester) fn set_max_rd_atomic(&mut self, max: u8) {
        self.max_rd_atomic = max;
    }

    /// Sets whether no request is begun: SQD.
    pub(in crate::rc::requester) fn drain(&mut self, drains: bool) {
        self.drains = drains;
    }

    /// The most packets in flight, and the most READs and atomics outstanding.
    pub(in crate::rc::requester) fn most(&self) -> (u32, u8) {
        (self.congestion.max(), self.max_rd_atomic)
    }

    /// Packets of each request of a READ that is posted now.
    pub(in crate::rc::requester) fn read_request_packets(&self, mtu: Mtu, peers: &Peers) -> u16 {
        read_window::request_packets(mtu, peers, &self.read_window)
    }

    /// The charge of the packets in flight.
    pub(in crate::rc::requester) fn in_flight(&self) -> Cost {
        self.in_flight
    }

    /// A turn begins, and with it a run.
    #[inline]
    pub(in crate::rc::requester) fn begin_turn(&mut self) {
        self.batch.begin();
    }

    /// Whether a packet of `bytes` bytes is the last of its run.
    #[inline]
    pub(in crate::rc::requester) fn ends_run(&self, bytes: u32, runs: RunLimits) -> bool {
        self.batch.is_ended_by(bytes, runs)
    }

    /// A packet of `bytes` bytes left.
    #[inline]
    pub(in crate::rc::requester) fn packet_left(&mut self, bytes: u32, runs: RunLimits) {
        self.batch.sent(bytes, runs);
    }

    /// Packets of this cost left.
    #[inline]
    pub(in crate::rc::requester) fn left(&mut self, cost: Cost) {
        self.in_flight.add(cost);
    }

    /// Packets of this cost are in flight no more.
    #[inline]
    pub(in crate::rc::requester) fn release(&mut self, cost: Cost) {
        self.in_flight.take(cost);
    }

    /// An AETH announces the number of receives.
    #[inline]
    pub(in crate::rc::requester) fn on_aeth(&mut self, aeth: Aeth) {
        self.credits.on_aeth(aeth);
    }

    /// `packets` packets were acknowledged, or are known to be held.
    #[inline]
    pub(in crate::rc::requester) fn on_ack(&mut self, packets: u32) {
        self.congestion.on_ack(packets);
    }

    /// `packets` packets of READ responses came.
    #[inline]
    pub(in crate::rc::requester) fn on_responses(&mut self, packets: u64) {
        self.read_window.came(packets);
    }

    /// Of `in_flight` packets of READ responses in flight, some were lost.
    pub(in crate::rc::requester) fn on_lost_responses(&mut self, in_flight: u64) {
        self.read_window.lost(in_flight);
    }

    /// Packets were lost, and go again in this way.
    pub(in crate::rc::requester) fn on_loss(&mut self, now: Time, rtt: &RoundTrip, repeat: Repeat) {
        self.congestion.on_loss(now, rtt, repeat);
    }

    /// Nothing came back in time.
    pub(in crate::rc::requester) fn on_timeout(&mut self, now: Time) {
        self.congestion.on_timeout(now);
    }

    /// Packets were marked (CNP).
    pub(in crate::rc::requester) fn on_ecn(&mut self, now: Time, rtt: &RoundTrip) {
        self.congestion.on_ecn(now, rtt);
    }

    /// Takes note of the time; returns when more may leave, if pacing keeps something back.
    #[inline]
    pub(in crate::rc::requester) fn tick(&mut self, now: Time) -> Option<Time> {
        self.congestion.tick(now)
    }

    /// The peer has no receive until then.
    pub(in crate::rc::requester) fn on_rnr(&mut self, until: Time) {
        self.rnr_until = until;
    }

    /// The peer is not known to lack a receive any more.
    #[inline]
    pub(in crate::rc::requester) fn forget_rnr(&mut self) {
        self.rnr_until = Time::NEVER;
    }

    /// When the wait for a receive is over; [`Time::NEVER`] if there is none.
    #[inline]
    pub(in crate::rc::requester) fn ready_at(&self) -> Time {
        self.rnr_until
    }

    pub(in crate::rc::requester) fn awaits_receive(&self) -> bool {
        self.rnr_until != Time::NEVER
    }

    /// Whether credit for `more` packets can be given back late without a loss for other queue
    /// pairs, and the peer has receives for `wqe` and `more` messages behind it, or announces none.
    pub(in crate::rc::requester) fn has_ample(
        &self,
        more: u32,
        wqe: &Wqe,
        peer: PeerId,
        peers: &Peers,
    ) -> bool {
        let window = self.congestion.is_whole() && self.congestion.packets() > more;
        peers.receiver(peer).is_mostly_free(more) && window && !self.credits.lacks(wqe, more)
    }

    /// Packets that the congestion window has left.
    #[inline]
    pub(super) fn window_left(&self) -> u32 {
        self.congestion.packets().saturating_sub(self.in_flight.datagrams)
    }

    pub(super) fn window_limit(&self) -> Limit {
        if self.congestion.is_paced() { Limit::Pacing } else { Limit::CongestionWindow }
    }
}
