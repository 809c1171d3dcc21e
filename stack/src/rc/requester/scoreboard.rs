//! Selective repeat: what the peer holds of what was sent, and what of it is missing and goes
//! again, alone. See [`held`](crate::rc::reorder) for how it is told.
//!
//! What is held is charged no more: the peer's receive queue has room for something else. What went
//! again and is still missing goes once more when what left after it has arrived, and no sooner
//! than after a round trip.
//!
//! Requests that wait for a response of their own are not repeated so, and nothing behind them:
//! what is missing there is sent again with all that follows.

use std::collections::VecDeque;

use crate::peer::{Cost, Peers};
use crate::qp::outbound::RequestPacket;
use crate::qp::sq::SendQueue;
use crate::rc::reorder::SPAN;
use crate::rc::requester::{Limits, Requester};
use crate::types::Time;

/// What is known of packets behind the first that is not acknowledged.
#[derive(Debug, Default)]
pub(in crate::rc) struct Scoreboard {
    /// A bit for each PSN that the peer holds, at PSN modulo [`SPAN`].
    held: Bits,
    /// Up to here it is known what is held and what is missing; 0 if nothing is held.
    end: u64,
    /// Those before `end` that are not, ascending.
    missing: VecDeque<Missing>,
    /// Of those, the first of which that may be due: what goes again goes in order.
    next: usize,
    /// When the last packet that arrived after it had been missing had left.
    arrived: Time,
}

/// What a report said that was not known.
#[derive(Debug, Clone, Copy)]
pub(in crate::rc) struct News {
    /// Something is lost.
    pub(in crate::rc) lost: bool,
    /// Something is held.
    pub(in crate::rc) arrived: bool,
}

#[derive(Debug)]
struct Bits([u64; (SPAN / 64) as usize]);

impl Default for Bits {
    fn default() -> Self {
        Self([0; (SPAN / 64) as usize])
    }
}

impl Bits {
    fn has(&self, psn: u64) -> bool {
        self.0[(psn % SPAN / 64) as usize] & (1 << (psn % 64)) != 0
    }

    fn set(&mut self, psn: u64) {
        self.0[(psn % SPAN / 64) as usize] |= 1 << (psn % 64);
    }

    fn clear(&mut self, psn: u64) {
        self.0[(psn % SPAN / 64) as usize] &= !(1 << (psn % 64));
    }
}

#[derive(Debug, Clone, Copy)]
struct Missing {
    psn: u64,
    again: Option<Again>,
}

/// How it went again.
#[derive(Debug, Clone, Copy)]
struct Again {
    /// What has this PSN, or a higher one, left later.
    before: u64,
    at: Time,
}

impl Scoreboard {
    fn is_idle(&self) -> bool {
        self.missing.is_empty() && self.end == 0
    }

    /// Which goes again next.
    fn due(&self) -> Option<usize> {
        let due = |at: &usize| self.missing[*at].again.is_none();
        (self.next..self.missing.len()).find(due)
    }

    fn has(&self, psn: u64) -> bool {
        psn < self.end && self.held.has(psn)
    }

    /// Everything before `to` has arrived; `from` is where that began before. Returns how many of
    /// them were to go again.
    fn arrived(&mut self, from: u64, to: u64) -> usize {
        let mut due = 0;
        for psn in from..to.min(self.end) {
            self.held.clear(psn);
        }
        while let Some(missing) = self.missing.front()
            && missing.psn < to
        {
            let left = missing.again.map_or(Time::default(), |again| again.at);
            due += usize::from(missing.again.is_none());
            self.arrived = self.arrived.max(left);
            self.missing.pop_front();
            self.next = self.next.saturating_sub(1);
        }
        if to >= self.end {
            self.end = 0;
        }
        due
    }

    /// Finds out what is missing, now that more is held, from the former `end` on; and what went
    /// again in vain, which takes no less than `patience` to know. Returns whether there is
    /// anything new.
    fn judge(&mut self, end: u64, now: Time, patience: u64) -> bool {
        let Self { held, missing, arrived, .. } = self;
        missing.retain(|missing| {
            let is_here = held.has(missing.psn);
            if let Some(again) = missing.again.filter(|_| is_here) {
                *arrived = (*arrived).max(again.at);
            }
            !is_here
        });
        let mut lost = false;
        for missing in missing.iter_mut() {
            let passed = |again: Again| {
                let overtaken = self.end > again.before || *arrived > again.at;
                overtaken && now.since(again.at) >= patience
            };
            if missing.again.is_some_and(passed) {
                missing.again = None;
                lost = true;
            }
        }
        self.next = 0;
        let known = missing.len();
        let new = (end..self.end).filter(|psn| !held.has(*psn));
        missing.extend(new.map(|psn| Missing { psn, again: None }));
        lost || missing.len() > known
    }

    /// Everything from `from` on is sent again.
    fn forget(&mut self, from: u64, una: u64) {
        for psn in from..self.end {
            self.held.clear(psn);
        }
        self.missing.retain(|missing| missing.psn < from);
        self.next = 0;
        self.end = if from <= una { 0 } else { self.end.min(from) };
    }

    /// Ranges of PSNs from `from` to before `to` that are held.
    fn runs(&self, from: u64, to: u64) -> impl Iterator<Item = (u64, u64)> {
        let (mut at, to) = (from, to.min(self.end));
        core::iter::from_fn(move || {
            let first = (at..to).find(|psn| self.held.has(*psn))?;
            at = (first..to).find(|psn| !self.held.has(*psn)).unwrap_or(to);
            Some((first, at))
        })
    }
}

impl Requester {
    /// Whether some of what follows the first that is missing is known to have arrived, or to be
    /// missing.
    #[inline]
    pub(in crate::rc) fn is_repairing(&self) -> bool {
        self.repair.as_ref().is_some_and(|repair| !repair.is_idle())
    }

    /// The peer misses the first that is not acknowledged, and holds what `report` says. `None` if
    /// that cannot be so, or is nothing that can be repaired alone.
    pub(in crate::rc) fn hear_report(
        &mut self,
        now: Time,
        report: &[u8],
        sq: &SendQueue,
        limits: &Limits,
        peers: &mut Peers,
    ) -> Option<News> {
        let una = self.snd_una;
        let behind = self.gate(sq, self.snd_nxt).map_or(self.snd_nxt, |(_, at)| at).min(una + SPAN);
        let mut repair = self.repair.take().unwrap_or_default();
        let mut arrived = Cost::default();
        let end = repair.end.max(una);
        let told = (una..behind).zip(bits(report)).skip(1);
        for (psn, _) in told.filter(|(_, held)| *held) {
            if !repair.has(psn) {
                arrived.add(sq.cost_between(psn, psn + 1, limits.mtu));
                repair.held.set(psn);
                repair.end = repair.end.max(psn + 1);
            }
        }
        if repair.end > end {
            self.round_trip.acknowledged(repair.end, now, true);
        }
        let lost = repair.judge(end, now, self.round_trip.min_rtt());
        self.repairs = due(&repair);
        let credible = repair.missing.front().is_some_and(|missing| missing.psn == una);
        self.repair = Some(repair);
        self.release(arrived, limits, peers);
        self.window.acknowledged(arrived.datagrams);
        credible.then_some(News { lost, arrived: arrived.datagrams > 0 })
    }

    /// Everything that is missing goes again; `false` if nothing is known to be.
    pub(in crate::rc) fn repair_all(&mut self) -> bool {
        let Some(repair) = &mut self.repair else { return false };
        repair.missing.iter_mut().for_each(|missing| missing.again = None);
        repair.next = 0;
        self.repairs = due(repair);
        self.repair_asks = self.repairs > 0;
        self.repair_asks
    }

    /// Whether one may go again now: what is lost is not on its way, and takes no more of the
    /// window than anything else.
    #[inline]
    pub(in crate::rc) fn may_repair(&self) -> bool {
        let lost = u32::try_from(self.repairs).unwrap_or(u32::MAX);
        let under_way = self.in_flight.datagrams.saturating_sub(lost);
        self.repairs > 0 && (under_way < self.window.packets() || self.repair_asks)
    }

    /// The next packet that goes again alone.
    pub(in crate::rc) fn next_repair(
        &self,
        sq: &SendQueue,
        limits: &Limits,
    ) -> Option<RequestPacket> {
        let repair = self.repair.as_ref()?;
        let psn = repair.missing.get(repair.due()?)?.psn;
        let index = self.index_of(sq, psn);
        let wqe = sq.get(index);
        let len = wqe.payload(psn, limits.mtu);
        Some(RequestPacket {
            index,
            psn,
            opcode: wqe.data_opcode(psn),
            offset: wqe.offset(psn, limits.mtu),
            len,
            message: wqe.message(len),
            // There is room for the answer since it left first, but for that to a probe, or if
            // nothing asked.
            ack_req: self.ack_requests.has(psn) || self.repair_asks || self.has_quiet(sq),
            solicited: wqe.is_solicited() && psn == wqe.last(),
        })
    }

    /// It left.
    pub(in crate::rc) fn repaired(&mut self, now: Time) {
        let Some(repair) = &mut self.repair else { return };
        if let Some(at) = repair.due() {
            repair.missing[at].again = Some(Again { before: self.snd_nxt, at: now });
            repair.next = at + 1;
            self.repairs -= 1;
            self.repair_asks = false;
        }
    }

    /// What is not charged of what was sent from `from` to before `to`, because the peer holds it.
    pub(in crate::rc) fn uncharged(
        &self,
        sq: &SendQueue,
        from: u64,
        to: u64,
        limits: &Limits,
    ) -> Cost {
        let mut sum = Cost::default();
        if let Some(repair) = &self.repair {
            for (from, to) in repair.runs(from, to) {
                sum.add(sq.cost_between(from, to, limits.mtu));
            }
        }
        sum
    }

    /// Everything before `to` is acknowledged; up to now that was `from`.
    #[cold]
    pub(in crate::rc) fn repaired_until(&mut self, from: u64, to: u64) {
        if let Some(repair) = &mut self.repair {
            self.repairs -= repair.arrived(from, to);
        }
    }

    /// Everything from `from` on is sent again.
    #[cold]
    pub(in crate::rc) fn repair_no_more(&mut self, from: u64) {
        if let Some(repair) = &mut self.repair {
            repair.forget(from, self.snd_una);
            self.repairs = due(repair);
            self.repair_asks = false;
        }
    }
}

/// How many packets are to go again.
fn due(repair: &Scoreboard) -> usize {
    repair.missing.iter().filter(|missing| missing.again.is_none()).count()
}

/// The bits of a report.
fn bits(report: &[u8]) -> impl Iterator<Item = bool> {
    report.iter().flat_map(|byte| (0..8).map(move |bit| byte & (1 << bit) != 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The peer holds these.
    fn holding(psns: impl Iterator<Item = u64>) -> Scoreboard {
        let mut repair = Scoreboard::default();
        for psn in psns {
            repair.held.set(psn);
            repair.end = repair.end.max(psn + 1);
        }
        repair
    }

    /// The same bit stands for a PSN and for the one [`SPAN`] later.
    #[test]
    fn no_bit_of_what_is_acknowledged_or_goes_again_is_left() {
        const FIRST: u64 = 1 << 24;
        let of_none = |repair: &Scoreboard| repair.held.0.iter().all(|word| *word == 0);
        for count in [1, 63, 64, 65, SPAN - 1] {
            let held = || (FIRST + 1..=FIRST + count).step_by(2);
            let mut repair = holding(held());
            assert!(held().all(|psn| repair.has(psn)));
            repair.arrived(FIRST, FIRST + count / 2);
            assert!(held().all(|psn| repair.has(psn) == (psn >= FIRST + count / 2)), "{count}");
            repair.arrived(FIRST + count / 2, FIRST + count + 1);
            assert!(of_none(&repair) && repair.is_idle(), "{count} acknowledged");
            let mut repair = holding(held());
            repair.forget(FIRST + count / 2, FIRST);
            assert!(held().all(|psn| repair.has(psn) == (psn < FIRST + count / 2)), "{count}");
            repair.forget(FIRST, FIRST);
            assert!(of_none(&repair) && repair.is_idle(), "{count} go again");
        }
    }
}
