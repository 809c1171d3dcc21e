//! Turns: the queue pairs with something to send, those that wait for credit, and how long each may
//! send.

use super::Engine;
use crate::mem::Memory;
use crate::peer::PeerId;
use crate::qp::{Core, Turn, TurnEnd, Urgency};
use crate::recognition::calls::{look_up, sent};
use crate::shared::Shared;
use crate::sink::TxSink;
use crate::tuning::engine::ACK_DELAY_NS;
use crate::types::Time;
use crate::verbs::Completions;

/// Why [`Engine::poll_transmit`] returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TxStop {
    /// There is nothing to send: call again after input, a timeout or a post.
    Idle,
    /// The sink has no room: call again when it has.
    SinkFull,
    /// The budget is used up: call again soon.
    Budget,
}

/// The result of [`Engine::poll_transmit`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transmitted {
    /// Why it returned.
    pub stop: TxStop,
    /// Packets that the sink took.
    pub packets: usize,
}

impl Engine {
    /// Writes up to `budget` packets into `sink`. Queue pairs with something to send take turns of
    /// at most [`EngineConfig::quantum`](crate::EngineConfig::quantum) packets (deficit round
    /// robin). Plain acknowledgements do not count against `budget`.
    #[inline]
    pub fn poll_transmit<H: Memory + Completions>(
        &mut self,
        now: Time,
        budget: usize,
        host: &mut H,
        sink: &mut impl TxSink,
    ) -> Transmitted {
        let before = self.shared.counters.sent_pkts;
        let stop = self.take_turns(now, budget, host, sink);
        Transmitted { stop, packets: (self.shared.counters.sent_pkts - before) as usize }
    }

    #[inline]
    fn take_turns<H: Memory + Completions>(
        &mut self,
        now: Time,
        budget: usize,
        host: &mut H,
        sink: &mut impl TxSink,
    ) -> TxStop {
        let mut left = budget;
        self.shared.age(now);
        loop {
            self.enqueue_granted();
            if self.shared.contacts.has_some() {
                self.take_contacts(now);
            }
            let Some(slot) = self.shared.dirty.pop_front() else {
                self.shared.more_than_acks = false;
                return TxStop::Idle;
            };
            let Some(Some(qp)) = self.qps.get_mut(slot as usize) else { continue };
            if left == 0 {
                self.shared.dirty.push_front(slot);
                return TxStop::Budget;
            }
            let core = qp.core_mut();
            core.queued = false;
            let unknown = match core.peers_seen == self.shared.contacts.generation() {
                true => None,
                false => look_up(&self.gsi.recognition, now, qp, &mut self.shared),
            };
            let share = left.min(left_of_turn(&self.shared, qp.core_mut()));
            let mut turn = Turn { left: share, progress: false, end: TurnEnd::Idle };
            qp.transmit(now, &mut turn, &mut self.shared, host, sink);
            let used = share - turn.left;
            left -= used;
            if let Some(before) = unknown {
                sent(before, qp, &mut self.shared);
            }
            end_turn(&mut self.shared, qp.core_mut(), used, &turn);
            if turn.end == TurnEnd::SinkFull {
                return TxStop::SinkFull;
            }
        }
    }

    /// Queue pairs that were granted credit take turns again.
    #[inline]
    fn enqueue_granted(&mut self) {
        while let Some(slot) = self.shared.peers.granted.pop_front() {
            if let Some(Some(qp)) = self.qps.get_mut(slot as usize) {
                self.shared.enqueue(slot, &mut qp.core_mut().queued);
            }
        }
    }

    /// Reports that the packets that `poll_transmit(now, …)` wrote really left at `left`, because
    /// the caller was delayed in between (on a busy processor, possibly for longer than a timeout).
    /// The peer's time to answer begins then. It looks at the queue pairs that have a timer.
    pub fn left_late(&mut self, now: Time, left: Time) {
        // The heap neither grows nor shrinks here, and an entry moves only to where this has been.
        for at in 0..self.shared.timers.count() {
            let slot = self.shared.timers.owner(at);
            if let Some(Some(qp)) = self.qps.get_mut(slot as usize) {
                qp.left_late(now, left, &mut self.shared);
            }
        }
    }

    /// The urgency of a call of [`poll_transmit`](Self::poll_transmit). Plain acknowledgements may
    /// wait for [`ACK_DELAY_NS`](crate::ACK_DELAY_NS), to leave with the program's next requests.
    #[inline]
    #[must_use]
    pub fn urgency(&self) -> Urgency {
        let shared = &self.shared;
        match shared.dirty.is_empty() {
            _ if shared.peers.has_granted() => Urgency::Now,
            true => Urgency::Idle,
            false if shared.more_than_acks => Urgency::Now,
            false => Urgency::By(shared.arrived_at.after(ACK_DELAY_NS)),
        }
    }
}

/// The packets that are left of the queue pair's turn.
#[inline]
fn left_of_turn(shared: &Shared, core: &Core) -> usize {
    (shared.quantum() - core.spent).into()
}

/// A queue pair has used `used` packets of its turn, which is over.
#[inline]
fn end_turn(shared: &mut Shared, core: &mut Core, used: usize, turn: &Turn) {
    if turn.end == TurnEnd::Idle {
        core.spent = 0;
        return shared.peers.quit(core.slot, &mut core.waiting);
    }
    interrupt_turn(shared, core, used, turn);
}

/// As [`end_turn`], of a queue pair that has more to send.
#[inline(never)]
fn interrupt_turn(shared: &mut Shared, core: &mut Core, used: usize, turn: &Turn) {
    let (used, progress) = (used as u16, turn.progress);
    let (whole, before, slot) = (shared.quantum(), std::mem::take(&mut core.spent), core.slot);
    match turn.end {
        TurnEnd::Idle => {}
        TurnEnd::Wait(receiver, need) => {
            // The peer's credit comes back in pieces of any size. One turn may span several of
            // them.
            let spent = if progress { before + used } else { before };
            let over = progress && (receiver == PeerId::OWN || spent == whole);
            if core.waiting == Some(receiver) && !over {
                core.spent = spent;
            }
            shared.peers.wait(slot, &mut core.waiting, receiver, need, over);
        }
        TurnEnd::Quantum => {
            shared.peers.quit(slot, &mut core.waiting);
            shared.enqueue(slot, &mut core.queued);
        }
        TurnEnd::SinkFull => {
            // Responses count too, so that other queue pairs get their turn.
            core.spent = before + used;
            if !core.queued {
                core.queued = true;
                shared.dirty.push_front(slot);
            }
        }
    }
}
