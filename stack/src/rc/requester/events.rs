//! What happened, for the requester: responses, losses and the passing of time.
//!
//! The queue pair judges a response or a deadline, and reports its meaning here. What may leave
//! afterwards is decided in the next turn.

use crate::peer::{PeerId, Peers};
use crate::qp::sq::SendQueue;
use crate::rc::congestion::Repeat;
use crate::rc::requester::permit::{Situation, Want, permit};
use crate::rc::requester::recovery::{News, Probe};
use crate::rc::requester::{ConnParams, Requester};
use crate::types::{Seq, Time};
use crate::wire::Aeth;

/// The answer to a report of missing packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::rc) enum Repair {
    /// Packets go again alone; `arrived` if the report says that others arrived.
    Alone { arrived: bool },
    /// The report is of no use: everything goes again.
    FromThere,
    /// The report is older than the retransmission in flight.
    Old,
}

impl Requester {
    /// An AETH announces the number of receives.
    #[inline]
    pub(in crate::rc) fn on_aeth(&mut self, aeth: Aeth) {
        self.control.credits.on_aeth(aeth);
    }

    /// Our packets were marked (CNP).
    pub(in crate::rc) fn on_ecn(&mut self, now: Time) {
        self.control.congestion.on_ecn(now, &self.round_trip);
    }

    /// A response to a READ came with a congestion mark.
    pub(in crate::rc) fn on_marked_response(&mut self) {
        let under_way = self.responses_in_flight();
        self.control.read_window.marked(under_way);
    }

    /// The peer turned out to be a Rocinante, with room for `window_max` packets of the queue pair.
    pub(in crate::rc) fn upgrade(&mut self, window_max: u32) {
        self.control.upgrade(window_max);
    }

    /// Takes note of the time; returns when more may leave, if pacing keeps something back.
    #[inline]
    pub(in crate::rc) fn tick(&mut self, now: Time) -> Option<Time> {
        self.control.congestion.tick(now)
    }

    /// The round trip in nanoseconds; 0 if it is not known.
    #[inline]
    pub(in crate::rc) fn srtt(&self) -> u64 {
        self.round_trip.srtt()
    }

    /// A response overtook the one from `from` on. Returns whether that is news.
    pub(in crate::rc) fn is_overtaken(&mut self, from: Seq) -> bool {
        self.recovery.implied_nak(from)
    }

    /// The packet of `from` is missing, or its response was `overtaken`: everything from there on
    /// goes again, unless it does already. With `asked`, a probe left, so the response may be to
    /// that. Returns whether something goes again.
    pub(in crate::rc) fn on_nak(
        &mut self,
        now: Time,
        from: Seq,
        (overtaken, asked): (bool, bool),
        sq: &SendQueue,
        params: &ConnParams,
        peers: &mut Peers,
    ) -> bool {
        if from >= self.snd_nxt {
            return false;
        }
        if !asked {
            self.round_trip.missing(from, now);
        }
        if !self.recovery.goes_back(from, now, self.round_trip.min_rtt()) {
            return false;
        }
        self.control.congestion.on_loss(now, &self.round_trip, Repeat::FromThere);
        peers.lost(params.peer);
        if overtaken {
            self.on_lost_responses(peers);
        }
        self.go_back(from, sq, params, peers);
        true
    }

    /// The packet of `from` is missing, and `report` lists those behind it that the peer holds.
    pub(in crate::rc) fn on_gap(
        &mut self,
        now: Time,
        from: Seq,
        report: &[u8],
        sq: &SendQueue,
        params: &ConnParams,
        peers: &mut Peers,
    ) -> Repair {
        let is_behind = from < self.snd_nxt;
        let news = is_behind.then(|| self.on_report(now, report, sq, params, peers)).flatten();
        let Some(News { lost, arrived }) = news else {
            // The peer repeats the NAK for each packet that asks: for those that left before its
            // first NAK arrived, that is old news.
            return match self.recovery.has_gone_back(from, now, self.round_trip.latest()) {
                true => Repair::Old,
                false => Repair::FromThere,
            };
        };
        if lost {
            self.control.congestion.on_loss(now, &self.round_trip, Repeat::Alone);
            peers.lost(params.peer);
        }
        Repair::Alone { arrived }
    }

    /// The peer has no receive for the packet of `from` until then.
    pub(in crate::rc) fn on_rnr(
        &mut self,
        from: Seq,
        until: Time,
        sq: &SendQueue,
        params: &ConnParams,
        peers: &mut Peers,
    ) {
        self.go_back(from, sq, params, peers);
        self.control.rnr_until = until;
    }

    /// Whether it waits until the peer has a receive.
    pub(in crate::rc) fn awaits_receive(&self) -> bool {
        self.control.awaits_receive()
    }

    /// When the wait for a receive is over; [`Time::NEVER`] if there is none.
    #[inline]
    pub(in crate::rc) fn ready_at(&self) -> Time {
        self.control.rnr_until
    }

    /// Ends the wait for a receive, if it is over by now. Returns whether it was.
    pub(in crate::rc) fn ready(&mut self, now: Time) -> bool {
        let ready = self.control.rnr_until <= now;
        if ready {
            self.control.forget_rnr();
        }
        ready
    }

    /// Nothing came back within the ACK timeout: everything goes again.
    pub(in crate::rc) fn on_timeout(
        &mut self,
        now: Time,
        sq: &SendQueue,
        params: &ConnParams,
        peers: &mut Peers,
    ) {
        self.control.congestion.on_timeout(now);
        peers.lost(params.peer);
        self.recovery.on_timeout();
        self.on_lost_responses(peers);
        self.go_back(self.snd_una, sq, params, peers);
        // One packet asks again, whether or not there is room. In line behind others that ask the
        // same dead peer in vain, each try would take twice as long.
        self.recovery.set_probe(Probe::Timeout);
    }

    /// Room did not come in the ACK timeout: others hold it, and may hold it for ever. The next
    /// packet probes without room.
    pub(in crate::rc) fn give_up_room(&mut self) {
        self.recovery.set_probe(Probe::Timeout);
    }

    /// Probes: has the last packet, or the known losses, go again and ask. Everything goes
    /// again with `nak_lost`: the peer may have sent a NAK that was lost, and repeats none. Returns
    /// whether that may be now.
    pub(in crate::rc) fn on_silence(
        &mut self,
        now: Time,
        nak_lost: bool,
        sq: &SendQueue,
        params: &ConnParams,
        peers: &mut Peers,
    ) -> bool {
        let at = Situation { sq, peers, turn: 1 };
        if permit(Want::Probe(self), &at).packets == 0 {
            return false;
        }
        if self.recovery.all_again() {
            // The missing packet asks in the place of the last packet.
        } else if nak_lost {
            self.control.congestion.on_timeout(now);
            self.go_back(self.snd_una, sq, params, peers);
        } else {
            self.probe(Probe::Tail, sq, params, peers);
        }
        true
    }

    /// Requested responses did not come, if there were some; our own queue may have been full.
    fn on_lost_responses(&mut self, peers: &mut Peers) {
        let in_flight = self.responses_in_flight();
        if in_flight > 1 {
            self.control.read_window.lost(in_flight);
            peers.lost(PeerId::OWN);
        }
    }
}
