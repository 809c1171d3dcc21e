//! The acknowledgements that a requester asks for. Each may become a packet of its own in our
//! receive queue, so there is credit for it before the first packet that it will acknowledge
//! leaves: a queue pair that has taken credit of the peer can always ask for it back. A NAK for a
//! gap comes without having been asked for; there are few.

use crate::budget::{Budget, Cost};
use crate::peer::{Expected, Peers};
use crate::ring::Ring;
use crate::types::Seq;

/// The cost of an acknowledgement to us: BTH, AETH, ICRC.
pub(super) const ACK: Cost = Cost::of(1, Budget::cost(12 + 4 + 4));

/// The PSNs that asked and are not acknowledged, ascending, and the room for the next
/// acknowledgement.
#[derive(Debug, Default)]
pub(super) struct AckRequests {
    pub(super) runs: Ring<Run>,
    /// For the packet that asks next.
    next: Option<Expected>,
}

/// Packets that asked one after the other.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Run {
    first: Seq,
    count: u32,
    /// The room for the acknowledgement of each.
    each: Expected,
}

impl Run {
    #[inline]
    fn end(&self) -> Seq {
        self.first + u64::from(self.count)
    }

    /// Number of its packets before `to`.
    #[inline]
    fn before(&self, to: Seq) -> u32 {
        to.saturating_sub(self.first).min(self.count.into()) as u32
    }
}

impl AckRequests {
    /// Whether credit for the next acknowledgement is reserved.
    #[inline]
    pub(super) fn is_open(&self) -> bool {
        self.next.is_some()
    }

    /// Whether the room for the next acknowledgement was kept for so long that others have it.
    #[inline]
    pub(super) fn is_stale(&self, peers: &Peers) -> bool {
        self.next.is_some_and(|answer| peers.has_forgotten(answer))
    }

    /// Takes room for the next acknowledgement.
    #[inline]
    pub(super) fn open(&mut self, answer: Expected) {
        debug_assert!(self.next.is_none());
        self.next = Some(answer);
    }

    /// Gives back the room for the next acknowledgement, because none is awaited.
    #[cold]
    pub(super) fn close(&mut self, peers: &mut Peers) {
        if let Some(answer) = self.next.take() {
            peers.answered(answer);
        }
    }

    /// One more than the last PSN that asked and is not acknowledged.
    #[inline]
    pub(super) fn end(&self) -> Option<Seq> {
        self.runs.back().map(Run::end)
    }

    /// Whether the packet of `psn` asked and is not acknowledged.
    pub(super) fn has(&self, psn: Seq) -> bool {
        let behind = self.runs.partition_point(|run| run.first <= psn);
        let last = behind.checked_sub(1).and_then(|at| self.runs.get(at));
        last.is_some_and(|run| psn < run.end())
    }

    /// `count` packets from `first` on, each of which asks, left. There is credit for the
    /// acknowledgement of the first, and the caller checked that there is for the others; `silent`
    /// if none is taken.
    #[inline(always)]
    pub(super) fn asked(
        &mut self,
        mut first: Seq,
        mut count: u32,
        silent: bool,
        peers: &mut Peers,
    ) {
        if count == 0 {
            return;
        }
        if let Some(next) = self.next.take() {
            self.add_reserved(first, next);
            (first, count) = (first + 1, count - 1);
        }
        if count > 0 {
            let each = if silent { Expected::NOTHING } else { peers.expect_each(ACK, count) };
            self.add(first, count, each);
        }
    }

    #[cold]
    fn add_reserved(&mut self, first: Seq, answer: Expected) {
        self.add(first, 1, answer);
    }

    #[inline(always)]
    fn add(&mut self, first: Seq, count: u32, each: Expected) {
        match self.runs.back_mut() {
            Some(last) if last.end() == first && last.each == each => last.count += count,
            _ => self.runs.push_back(Run { first, count, each }),
        }
    }

    /// Everything before `to` was answered.
    #[inline]
    pub(super) fn answered(&mut self, to: Seq, peers: &mut Peers) {
        match self.runs.back() {
            // The usual case: all of them, which asked one after the other.
            Some(last) if last.end() <= to && self.runs.len() == 1 => {
                peers.answered(last.each.times(last.count));
                self.runs.clear();
            }
            Some(_) => self.answered_in_part(to, peers),
            None => {}
        }
    }

    #[inline(never)]
    fn answered_in_part(&mut self, to: Seq, peers: &mut Peers) {
        // Those of one time are given back at once.
        let mut sum = Expected::NOTHING;
        while let Some(run) = self.runs.front_mut()
            && run.first < to
        {
            let count = run.before(to);
            let answers = run.each.times(count);
            if !sum.add(answers) {
                peers.answered(core::mem::replace(&mut sum, answers));
            }
            if count < run.count {
                run.first += u64::from(count);
                run.count -= count;
                break;
            }
            self.runs.pop_front();
        }
        peers.answered(sum);
    }

    /// Everything from `from` on is sent again, and asks again. The room of one acknowledgement is
    /// kept, for packets before `from`.
    pub(super) fn taken_back(&mut self, from: Seq, peers: &mut Peers) {
        while let Some(run) = self.runs.back_mut()
            && run.end() > from
        {
            let stays = run.before(from);
            let kept = u32::from(self.next.is_none());
            self.next = self.next.or(Some(run.each));
            peers.answered(run.each.times(run.count - stays - kept));
            if stays > 0 {
                run.count = stays;
                break;
            }
            self.runs.pop_back();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOM: Budget = Budget { bytes: 1 << 20, datagrams: 100 };

    /// Three ask, one does not, two ask.
    fn asks(peers: &mut Peers) -> AckRequests {
        let mut asks = AckRequests::default();
        asks.asked(Seq(10), 3, false, peers);
        for psn in [14, 15] {
            asks.open(peers.expect(ACK));
            asks.asked(Seq(psn), 1, false, peers);
        }
        asks
    }

    /// Number of acknowledgements for which there is room left.
    fn left(peers: &Peers) -> u32 {
        peers.spared().datagrams
    }

    #[test]
    fn who_asked_is_known_until_it_is_answered() {
        let mut peers = Peers::new(ROOM, crate::tuning::long_runs::STABLE_PACKETS);
        let mut asks = asks(&mut peers);
        let known =
            |asks: &AckRequests| (9..17).filter(|psn| asks.has(Seq(*psn))).collect::<Vec<_>>();
        assert_eq!(known(&asks), [10, 11, 12, 14, 15]);
        assert_eq!((asks.runs.len(), asks.end(), left(&peers)), (2, Some(Seq(16)), 95));
        for (to, remaining, room) in [(10, 5, 95), (12, 3, 97), (15, 1, 99), (99, 0, 100)] {
            asks.answered(Seq(to), &mut peers);
            assert_eq!((known(&asks).len(), left(&peers)), (remaining, room), "before {to}");
        }
        assert_eq!(asks.end(), None);
    }

    #[test]
    fn of_what_is_taken_back_the_room_of_one_is_kept() {
        let mut peers = Peers::new(ROOM, crate::tuning::long_runs::STABLE_PACKETS);
        for (from, end, room) in
            [(16, Some(16), 95), (15, Some(15), 95), (12, Some(12), 97), (0, None, 99)]
        {
            let mut peers = Peers::new(ROOM, crate::tuning::long_runs::STABLE_PACKETS);
            let mut asks = asks(&mut peers);
            asks.taken_back(Seq(from), &mut peers);
            assert_eq!((asks.end(), left(&peers)), (end.map(Seq), room), "from {from}");
            assert_eq!(asks.is_open(), from < 16);
        }
        let mut asks = asks(&mut peers);
        asks.open(peers.expect(ACK));
        asks.taken_back(Seq(0), &mut peers);
        assert_eq!(left(&peers), 99, "there was one");
        asks.close(&mut peers);
        assert_eq!(left(&peers), 100);
    }
}
