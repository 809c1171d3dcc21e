//! The state behind each permit: events go in, and only [`permit`](super) asks it.

use super::batching::Batch;
use super::credits::Credits;
use super::read_window::ReadWindow;
use crate::budget::Cost;
use crate::peer::{PeerId, Peers};
use crate::qp::sq::Wqe;
use crate::rc::congestion::Congestion;
use crate::rc::requester::PathParams;
use crate::stats::Limit;
use crate::types::{Mtu, Time};

/// The state that decides whether packets may leave, beside the cursor and known losses.
#[derive(Debug)]
pub(in crate::rc::requester) struct SendControl {
    /// The cost of the packets from `snd_una` to `snd_nxt` that the peer is not known to hold.
    pub(in crate::rc::requester) in_flight: Cost,
    pub(in crate::rc::requester) congestion: Congestion,
    pub(in crate::rc::requester) read_window: ReadWindow,
    pub(in crate::rc::requester) credits: Credits,
    pub(in crate::rc::requester) batch: Batch,
    /// When the peer may have a receive again; [`Time::NEVER`] without an RNR NAK.
    pub(in crate::rc::requester) rnr_until: Time,
    pub(in crate::rc::requester) max_rd_atomic: u8,
    /// No request is begun: SQD.
    pub(in crate::rc::requester) drains: bool,
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

    /// The most packets in flight, and the most READs and atomics outstanding.
    pub(in crate::rc::requester) fn most(&self) -> (u32, u8) {
        (self.congestion.max(), self.max_rd_atomic)
    }

    /// The peer is not known to lack a receive any more.
    #[inline]
    pub(in crate::rc::requester) fn forget_rnr(&mut self) {
        self.rnr_until = Time::NEVER;
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
