//! The round trip: the time from when packets left until the peer responds.

use crate::ring::Ring;
use crate::tuning::congestion::{MEMORY_NS, TURNS};
use crate::types::{Seq, Time};

/// The round trip of a path.
#[derive(Debug, Default)]
pub(in crate::rc) struct RoundTrip {
    /// Packets that left together and are not acknowledged, ascending.
    pub(in crate::rc) turns: Ring<Turn>,
    /// The last measurement, in nanoseconds; 0 before the first.
    latest: u64,
    /// A moving average.
    srtt: u64,
    min_rtt: u64,
    /// When that was.
    measured: Time,
}

/// Packets that left at one time.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::rc) struct Turn {
    first: Seq,
    left: Time,
    /// A retransmission: an acknowledgement may answer either of the two (Karn's algorithm, RFC
    /// 6298).
    again: bool,
}

impl RoundTrip {
    /// The packet of `psn` left, for the first time or `again`.
    #[inline]
    pub(in crate::rc) fn sent(&mut self, psn: Seq, now: Time, again: bool) {
        let new = self.turns.back().is_none_or(|last| last.left != now || last.again != again);
        if new && self.turns.len() < TURNS {
            self.turns.push_back(Turn { first: psn, left: now, again });
        }
    }

    /// Everything before `to` is acknowledged; `measured` if that took as long as the path takes.
    #[inline]
    pub(in crate::rc) fn acknowledged(&mut self, to: Seq, now: Time, measured: bool) {
        let answered = match self.turns.len() {
            0 | 1 => self.turns.front().copied().filter(|turn| turn.first < to),
            _ => self.pass(to),
        };
        if let Some(turn) = answered
            && measured
            && !turn.again
        {
            self.measure(now.since(turn.left).max(1), now);
        }
    }

    /// Drops the turns of which everything is before `to`. Returns the last that begins before it.
    #[inline(never)]
    fn pass(&mut self, to: Seq) -> Option<Turn> {
        let mut answered = None;
        while let Some(turn) = self.turns.front()
            && turn.first < to
        {
            answered = Some(*turn);
            // The others of its turn are still to be acknowledged.
            if self.turns.get(1).is_none_or(|next| next.first > to) {
                break;
            }
            self.turns.pop_front();
        }
        answered
    }

    /// The packet of `psn` is reported missing: measures the packets behind it, which caused the
    /// report.
    pub(in crate::rc) fn missing(&mut self, psn: Seq, now: Time) {
        let turn = self.turns.iter().rev().find(|turn| turn.first <= psn).copied();
        match turn {
            Some(turn) if turn.again => self.latest = now.since(turn.left).max(1),
            Some(turn) => self.measure(now.since(turn.left).max(1), now),
            None => {}
        }
    }

    /// Everything from `from` on is sent again: a response may answer either transmission then.
    pub(in crate::rc) fn taken_back(&mut self, from: Seq) {
        while self.turns.back().is_some_and(|turn| turn.first >= from) {
            self.turns.pop_back();
        }
    }

    fn measure(&mut self, took: u64, now: Time) {
        self.latest = took;
        self.srtt = if self.srtt == 0 { took } else { self.srtt - self.srtt / 8 + took / 8 };
        if self.min_rtt == 0 || took <= self.min_rtt || now.since(self.measured) > MEMORY_NS {
            (self.min_rtt, self.measured) = (took, now);
        }
    }

    /// The last measurement in nanoseconds; 0 before the first.
    pub(in crate::rc) fn latest(&self) -> u64 {
        self.latest
    }

    /// The shortest for some time in nanoseconds; 0 before the first.
    pub(in crate::rc) fn min_rtt(&self) -> u64 {
        self.min_rtt
    }

    /// A moving average in nanoseconds; 0 before the first.
    #[inline]
    pub(in crate::rc) fn srtt(&self) -> u64 {
        self.srtt
    }

    /// Of `packets` in flight, those that the length of the path keeps there, and that do not wait
    /// in a queue.
    pub(in crate::rc) fn without_queue(&self, packets: u32) -> u32 {
        if self.latest == 0 {
            return 0;
        }
        let packets = u64::from(packets) * self.min_rtt / self.latest.max(self.min_rtt);
        u32::try_from(packets).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(turns: &[(u64, u64, bool)]) -> RoundTrip {
        let mut round_trip = RoundTrip::default();
        turns.iter().for_each(|(psn, at, again)| round_trip.sent(Seq(*psn), Time(*at), *again));
        round_trip
    }

    #[test]
    fn an_answer_is_measured_from_when_the_last_packet_it_answers_left() {
        let mut round_trip = sent(&[(10, 1000, false), (20, 2000, false)]);
        round_trip.acknowledged(Seq(15), Time(5000), true);
        assert_eq!(round_trip.latest(), 4000);
        round_trip.acknowledged(Seq(25), Time(5000), true);
        assert_eq!(round_trip.latest(), 3000);
    }

    #[test]
    fn what_is_missing_is_measured_from_when_it_left() {
        let mut round_trip = sent(&[(10, 1000, false), (20, 2000, false)]);
        round_trip.missing(Seq(15), Time(5000));
        assert_eq!(round_trip.latest(), 4000);
        round_trip.missing(Seq(20), Time(5000));
        assert_eq!(round_trip.latest(), 3000);
        round_trip.missing(Seq(9), Time(9000));
        assert_eq!(round_trip.latest(), 3000, "that left long before");
    }
}
