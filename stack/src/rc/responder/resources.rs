//! Responder resources: READs and other requests with responses of their own that a responder
//! accepted, the responses that it owes for them, and those that it repeats for duplicates.

use std::collections::VecDeque;

use crate::mem::Sge;
use crate::types::{Key, Mtu, Seq};
use crate::wire::{Operation, Packet, Place, Reth};

/// A request that was accepted: its response, for now and for duplicates.
#[derive(Debug, Clone, Copy)]
struct Record {
    first: Seq,
    last: Seq,
    /// First PSN of the response that is being sent.
    from: Seq,
    /// Next PSN of the response to send; beyond `until` if all was sent.
    next: Seq,
    /// Last PSN of the response that is asked for now.
    until: Seq,
    /// Whether all of it was sent once: from then on it is kept for duplicates only.
    answered: bool,
    msn: u32,
    kind: Kind,
}

/// The operation of the request.
#[derive(Debug, Clone, Copy)]
pub(in crate::rc) enum Kind {
    Read {
        va: u64,
        rkey: Key,
        len: u32,
    },
    Atomic {
        found: u64,
    },
    /// A FLUSH, or an ATOMIC WRITE: the response shows only that it was executed.
    Done {
        operation: Operation,
    },
}

#[derive(Debug, Clone, Copy)]
pub(in crate::rc) enum DataResponse {
    /// A packet of a READ response; an empty one shows that a FLUSH or ATOMIC WRITE was executed.
    Read { psn: Seq, place: Place, at: Sge, msn: u32 },
    /// The result of an atomic.
    Atomic { psn: Seq, found: u64, msn: u32 },
}

/// The last `max_dest_rd_atomic` of them, oldest first.
#[derive(Debug, Default)]
pub(in crate::rc) struct Records {
    list: VecDeque<Record>,
    max: usize,
    /// Index of the first with something to send.
    unsent: usize,
}

impl Records {
    /// Starts over, for at most `max`.
    pub(in crate::rc) fn start(&mut self, max: usize) {
        self.clear();
        self.max = max;
    }

    /// Forgets all of them.
    pub(in crate::rc) fn clear(&mut self) {
        self.list.clear();
        self.unsent = 0;
    }

    pub(in crate::rc) fn len(&self) -> usize {
        self.list.len()
    }

    /// Whether a response is due.
    #[inline]
    pub(in crate::rc) fn due(&self) -> bool {
        self.unsent < self.list.len()
    }

    /// At most `max` from now on. Earlier requests of the peer are still answered.
    pub(in crate::rc) fn resize(&mut self, max: usize) {
        self.max = max;
        while self.list.len() > max && self.drop_oldest() {}
    }

    /// Makes room for one more: the oldest goes, if it was answered. `false` if the peer has more
    /// outstanding than its limit.
    pub(in crate::rc) fn make_room(&mut self) -> bool {
        // After a change there may be more than one too many.
        while self.list.len() >= self.max {
            if !self.drop_oldest() {
                return false;
            }
        }
        if self.list.capacity() < self.max {
            self.allocate();
        }
        true
    }

    fn drop_oldest(&mut self) -> bool {
        let answered = self.list.front().is_some_and(|oldest| oldest.answered);
        if answered {
            self.list.pop_front();
            self.unsent = self.unsent.saturating_sub(1);
        }
        answered
    }

    /// With the first request that needs one: most queue pairs never see any.
    #[cold]
    fn allocate(&mut self) {
        self.list.reserve_exact(self.max - self.list.len());
    }

    /// Whether the peer may send no request that needs one.
    pub(in crate::rc) fn has_none(&self) -> bool {
        self.max == 0
    }

    /// Appends the request that occupies the PSNs `first..=last`; its response is due.
    pub(in crate::rc) fn push(&mut self, first: Seq, last: Seq, msn: u32, kind: Kind) {
        debug_assert!(self.list.len() < self.max);
        let (from, next, until, answered) = (first, first, last, false);
        self.list.push_back(Record { first, last, from, next, until, answered, msn, kind });
    }

    /// Repeats the response to a request that came again at `psn`; `false` if its record is gone or
    /// does not match.
    pub(in crate::rc) fn repeat(&mut self, packet: &Packet<'_>, psn: Seq, mtu: Mtu) -> bool {
        // Newest first: a duplicate is most likely of those.
        let Some(at) = self.list.iter().rposition(|r| (r.first..=r.last).contains(&psn)) else {
            return false;
        };
        let record = &mut self.list[at];
        let until = match (record.kind, packet.info.operation, packet.reth()) {
            (Kind::Atomic { .. }, Operation::CompareSwap | Operation::FetchAdd, _) => Some(psn),
            (Kind::Done { operation }, again, _) if operation == again => Some(psn),
            (Kind::Read { .. }, Operation::ReadRequest, Some(reth)) => record.part(psn, &reth, mtu),
            _ => None,
        };
        let Some(until) = until else { return false };
        let pending = record.next <= record.until;
        record.until = if pending { until.max(record.until) } else { until };
        if pending && record.next <= psn {
            return true; // The run under way comes to it.
        }
        (record.from, record.next) = (psn, psn);
        self.unsent = self.unsent.min(at);
        true
    }

    /// The response to send next, in the order of the PSNs.
    #[inline]
    pub(in crate::rc) fn response(&mut self, mtu: Mtu) -> Option<DataResponse> {
        while let Some(record) = self.list.get(self.unsent) {
            if record.next <= record.until {
                return Some(record.response(mtu));
            }
            self.unsent += 1;
        }
        None
    }

    /// The response at `psn`, which `response` gave, left.
    #[inline]
    pub(in crate::rc) fn sent(&mut self, psn: Seq) {
        if let Some(record) = self.list.get_mut(self.unsent) {
            debug_assert_eq!(record.next, psn);
            record.next = psn + 1;
            record.answered |= psn == record.last;
            self.unsent += usize::from(record.next > record.until);
        }
    }

    /// The response to send next has no memory any more. Drops it if it was only a repetition,
    /// which the peer does not miss. Returns whether it was.
    pub(in crate::rc) fn drop_repetition(&mut self) -> bool {
        let Some(record) = self.list.get_mut(self.unsent).filter(|record| record.answered) else {
            return false;
        };
        record.next = record.until + 1;
        self.unsent += 1;
        true
    }

    /// The next response cannot be sent, nor any after it: its PSN.
    pub(in crate::rc) fn fail(&mut self) -> Option<Seq> {
        let psn = self.list.get(self.unsent).map(|record| record.next);
        self.list.truncate(self.unsent);
        psn
    }
}

impl Record {
    /// The last PSN that a repeated READ request asks for, if it asks for a part of this one.
    fn part(&self, psn: Seq, reth: &Reth, mtu: Mtu) -> Option<Seq> {
        let Kind::Read { va, rkey, len } = self.kind else { return None };
        let skipped = (psn - self.first) << mtu.shift();
        let end = skipped + u64::from(reth.len);
        // It ends where this one ends, or at the border of a packet before.
        let ends_well = end == u64::from(len)
            || (end < u64::from(len) && reth.len > 0 && reth.len.is_multiple_of(mtu.bytes()));
        let matches = reth.rkey == rkey && reth.va == va.wrapping_add(skipped) && ends_well;
        matches.then(|| psn + u64::from(reth.len.div_ceil(mtu.bytes()).max(1)) - 1)
    }

    #[inline]
    fn response(&self, mtu: Mtu) -> DataResponse {
        let (psn, msn) = (self.next, self.msn);
        match self.kind {
            Kind::Atomic { found } => DataResponse::Atomic { psn, found, msn },
            Kind::Done { .. } => {
                let at = Sge::default();
                DataResponse::Read { psn, place: Place::Only, at, msn }
            }
            Kind::Read { va, rkey, len } => {
                let offset = ((psn - self.first) as u32) << mtu.shift();
                let len = (len - offset).min(mtu.bytes());
                let at = Sge { addr: va.wrapping_add(u64::from(offset)), len, lkey: rkey };
                // A response that begins in the middle of the READ begins with FIRST (or ONLY) all
                // the same.
                let place = place_of(psn == self.from, psn == self.until);
                DataResponse::Read { psn, place, at, msn }
            }
        }
    }
}

fn place_of(begins: bool, ends: bool) -> Place {
    match (begins, ends) {
        (true, true) => Place::Only,
        (true, false) => Place::First,
        (false, true) => Place::Last,
        (false, false) => Place::Middle,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_forgotten_is_not_sent() {
        let mut records = Records::default();
        records.start(2);
        for psn in [Seq(1), Seq(2)] {
            assert!(records.make_room());
            records.push(psn, psn, 1, Kind::Done { operation: Operation::Flush });
        }
        assert!(records.due() && records.response(Mtu::Mtu256).is_some());
        records.sent(Seq(1));
        assert_eq!((records.len(), records.due()), (2, true));
        records.start(2);
        assert_eq!((records.len(), records.due()), (0, false));
        assert!(records.response(Mtu::Mtu256).is_none());
        assert!(records.make_room());
        records.push(Seq(3), Seq(3), 1, Kind::Done { operation: Operation::Flush });
        assert!(records.due());
    }
}
