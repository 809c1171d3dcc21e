//! Receiver credit: the room in a peer's receive queue, and in ours.
//!
//! The window belongs to the receiver, not to the queue pair: all queue pairs that send to one
//! queue share its socket buffer or ring. Before a packet leaves, its cost is charged to the credit
//! of its receiver. The acknowledgement gives it back. READ responses and atomic results are
//! charged to our own credit when they are requested.
//!
//! Packets that no peer acknowledges are paced instead ([`Pace`]).
//!
//! A queue pair without credit joins the wait queue of the receiver. While the queue is not empty,
//! no other queue pair gets credit. The first is granted a turn as soon as the credit that it needs
//! is available, the next one when that turn is over.

mod account;
mod admitted;
mod confidence;
mod expected;
mod kind;
mod runs;
mod stretch;

use core::net::IpAddr;
use std::collections::VecDeque;

pub(crate) use self::account::CreditAccount;
use self::admitted::Admitted;
use self::expected::Epochs;
pub(crate) use self::expected::Expected;
pub use self::kind::PeerKind;
pub use self::runs::RunLimits;
use self::runs::{RunEstimate, RunLength};
pub(crate) use self::stretch::datagrams_max;
use crate::budget::{Budget, Cost};
use crate::pacing::{Pace, Pacing};
use crate::tuning::long_runs::ENOUGH;
use crate::types::{Qpn, QueueKind, Time};
use crate::verbs::SendOp;

/// The receive queues of all peers, and our own.
#[derive(Debug)]
pub(crate) struct Peers {
    own: CreditAccount,
    /// How datagrams leave, and how they arrive.
    sent: RunEstimate,
    received: RunEstimate,
    runs: RunLimits,
    pacing: Pacing,
    epochs: Epochs,
    /// Packets without a loss after which the losses before count no more.
    stable_packets: u32,
    peers: Vec<Peer>,
    /// Queue pairs that were granted a turn, for the engine to enqueue.
    pub(crate) granted: VecDeque<u32>,
}

/// A peer's receive queue: an address, and the slot of the shard or process behind it that owns the
/// queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct QueueKey {
    address: IpAddr,
    /// [`Qpn::slot`], if the peer's numbers have slots.
    slot: Option<u8>,
}

/// The receive queue of a peer.
#[derive(Debug)]
struct Peer {
    key: QueueKey,
    /// Our address, from which it is reached.
    local: IpAddr,
    users: u32,
    /// The generation in which a packet left for it that no peer acknowledges.
    seen: u32,
    receiver: CreditAccount,
    pace: Pace,
    admitted: Admitted,
}

/// Index of a receive queue: [`PeerId::OWN`] or a peer's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PeerId(u32);

impl PeerId {
    pub(crate) const OWN: Self = Self(u32::MAX);
}

impl Peers {
    pub(crate) fn new(own: Budget, stable_packets: u32) -> Self {
        Self {
            own: CreditAccount::new(own, QueueKind::Frames, stable_packets),
            sent: RunEstimate::default(),
            received: RunEstimate::default(),
            runs: RunLimits::default(),
            pacing: Pacing::default(),
            epochs: Epochs::default(),
            stable_packets,
            peers: Vec::new(),
            granted: VecDeque::new(),
        }
    }

    /// Sets the kind of our own queue.
    pub(crate) fn of_kind(mut self, queue: QueueKind) -> Self {
        self.own.announce(self.own.announced, queue);
        self
    }

    /// The port sends runs of this length, and unacknowledged packets leave at this pace.
    pub(crate) fn sending(self, runs: RunLimits, pacing: Pacing) -> Self {
        Self { runs, pacing, ..self }
    }

    /// The longest run that leaves at once.
    #[inline]
    pub(crate) fn runs(&self) -> RunLimits {
        self.runs
    }

    /// The pace of packets for `id` that no peer acknowledges.
    #[inline]
    pub(crate) fn pace(&self, id: PeerId) -> &Pace {
        &self.peers[id.0 as usize].pace
    }

    #[inline]
    pub(crate) fn pace_mut(&mut self, id: PeerId) -> &mut Pace {
        &mut self.peers[id.0 as usize].pace
    }

    /// The addresses of `id`, ours first, if no packet that no peer acknowledges had left for it in
    /// this generation. A group has none.
    #[inline]
    pub(crate) fn first_in(&mut self, id: PeerId, generation: u32) -> Option<(IpAddr, IpAddr)> {
        let Peer { key, local, seen, .. } = &mut self.peers[id.0 as usize];
        if *seen == generation {
            return None;
        }
        *seen = generation;
        Some((*local, key.address)).filter(|(_, remote)| !remote.is_multicast())
    }

    /// A peer announced the pace of its queues, of which each of the first slots has one; `None` if
    /// its earlier announcement holds no more.
    pub(crate) fn learn(&mut self, address: IpAddr, takes: Option<(u8, Pacing)>) {
        for Peer { key, pace, .. } in self.peers.iter_mut().filter(|it| it.key.address == address) {
            match takes {
                None => pace.follow(self.pacing),
                Some((slots, pacing)) if key.slot.is_none_or(|slot| slot < slots) => {
                    pace.follow(pacing.at_most(&self.pacing));
                }
                Some(_) => {}
            }
        }
    }

    /// Moves the charge of one user of `from` to `to`, which it has joined.
    pub(crate) fn take_over(&mut self, from: PeerId, to: PeerId, charge: Cost) {
        self.get(to).charge(charge);
        let receiver = self.get(from);
        receiver.in_flight.take(charge);
        self.leave(from);
        self.grant(from);
    }

    /// The receive queue behind an address and the number of the peer's queue pair, with one more
    /// user. A Rocinante's announcement replaces earlier knowledge of the same slot. A standard
    /// peer announces nothing: `limit` counts only if no other user announced more.
    ///
    /// The numbers of a standard peer's queue pairs do not name its queues, so all of them share
    /// one credit. So do all address handles (`dest` is `None`): the number comes with the request,
    /// and to find the queue of each slot would cost each datagram a search. All datagrams to an
    /// address are paced as if they went to one slot, which they may.
    pub(crate) fn join(
        &mut self,
        (local, address): (IpAddr, IpAddr),
        dest: Option<Qpn>,
        limit: Budget,
        kind: PeerKind,
    ) -> PeerId {
        let slot = dest.filter(|_| kind.is_rocinante()).map(Qpn::slot);
        let key = QueueKey { address, slot };
        let known = |peer: &Peer| peer.key == key && peer.users > 0;
        let at = self.peers.iter().position(known).unwrap_or_else(|| {
            let receiver = CreditAccount::new(limit, kind.queue(), self.stable_packets);
            let pace = Pace::new(self.pacing, limit);
            let admitted = Admitted::default();
            let fresh = Peer { key, local, users: 0, seen: 0, receiver, pace, admitted };
            match self.peers.iter().position(|peer| peer.users == 0) {
                Some(free) => {
                    self.peers[free] = fresh;
                    free
                }
                None => {
                    self.peers.push(fresh);
                    self.peers.len() - 1
                }
            }
        });
        let Peer { users, receiver, pace, .. } = &mut self.peers[at];
        *users += 1;
        if let PeerKind::Rocinante(queue) = kind {
            receiver.announce(limit, queue);
            pace.fit(limit);
        }
        receiver.fit(self.sent.length(), ENOUGH);
        let waiting = receiver.wait_queue.len();
        receiver.wait_queue.reserve((*users as usize).saturating_sub(waiting));
        let id = PeerId(at as u32);
        self.grant(id);
        id
    }

    /// Whether packets to this peer are in flight.
    #[inline]
    pub(crate) fn is_used(&self, id: PeerId) -> bool {
        let peer = self.peers.get(id.0 as usize);
        peer.is_some_and(|peer| peer.receiver.in_flight.datagrams > 0)
    }

    /// Whether this peer has admitted a WRITE of several packets to all of that range before.
    pub(crate) fn admits(&self, id: PeerId, op: &SendOp, len: u32) -> bool {
        self.peers.get(id.0 as usize).is_some_and(|peer| peer.admitted.has(op, len))
    }

    /// This peer executed a request of several packets.
    pub(crate) fn executed(&mut self, id: PeerId, op: &SendOp, len: u32) {
        if let Some(peer) = self.peers.get_mut(id.0 as usize) {
            peer.admitted.executed(op, len);
        }
    }

    /// Users of the receive queues of peers, packets charged to those, and queue pairs that wait
    /// for credit or were granted a turn, of our own queue too.
    pub(crate) fn held(&self) -> (usize, u64, usize) {
        let waiting = |receiver: &CreditAccount| {
            receiver.wait_queue.len() + usize::from(receiver.granted.is_some())
        };
        let mut held = (0, 0, waiting(&self.own));
        for Peer { users, receiver, .. } in &self.peers {
            held.0 += *users as usize;
            held.1 += u64::from(receiver.in_flight.datagrams);
            held.2 += waiting(receiver);
        }
        held
    }

    /// Number of queue pairs that wait for ever, or for longer than they must: the first of a wait
    /// queue, although it could go on; one that was granted a turn and gets none; a slot that does
    /// not wait there. `waits_for` returns the receiver that a slot waits for, and `has_turn`
    /// whether the engine will call it.
    pub(crate) fn forgotten(
        &self,
        waits_for: impl Fn(u32) -> Option<PeerId>,
        has_turn: impl Fn(u32) -> bool,
    ) -> usize {
        let of = |id: PeerId, receiver: &CreditAccount| {
            let called = |slot: &u32| has_turn(*slot) || self.granted.contains(slot);
            let granted = receiver.granted.iter();
            let waiting = receiver.wait_queue.iter().map(|(slot, _)| slot);
            granted.clone().filter(|slot| !called(slot)).count()
                + granted.chain(waiting).filter(|slot| waits_for(**slot) != Some(id)).count()
                + usize::from(receiver.overlooks_first())
        };
        let peers = (0..).map(PeerId).zip(&self.peers).map(|(id, peer)| of(id, &peer.receiver));
        of(PeerId::OWN, &self.own) + peers.sum::<usize>()
    }

    /// One user less.
    pub(crate) fn leave(&mut self, id: PeerId) {
        if let Some(peer) = self.peers.get_mut(id.0 as usize) {
            peer.users = peer.users.saturating_sub(1);
        }
    }

    /// Prepares the wait queues for `queue_pairs`, so that waiting does not allocate.
    pub(crate) fn reserve(&mut self, queue_pairs: usize) {
        let waiting = self.own.wait_queue.len();
        self.own.wait_queue.reserve(queue_pairs.saturating_sub(waiting));
        self.granted.reserve((2 * queue_pairs).saturating_sub(self.granted.len()));
    }

    /// Gives back a charge.
    #[inline]
    pub(crate) fn release(&mut self, id: PeerId, charge: Cost) {
        let receiver = self.get(id);
        let (restored, waits) = (receiver.release(charge), !receiver.wait_queue.is_empty());
        if restored {
            self.fit(id);
        }
        if waits {
            self.grant(id);
        }
    }

    /// Our own credit that no queue pair waits for.
    #[inline]
    pub(crate) fn spared(&self) -> Cost {
        if self.own.granted.is_none() && self.own.wait_queue.is_empty() {
            self.own.available()
        } else {
            Cost::default()
        }
    }

    /// `datagrams` of `bytes` in all left in `runs` runs.
    #[inline]
    pub(crate) fn departed(&mut self, runs: u32, datagrams: u32, bytes: u64) {
        if self.sent.add(runs, datagrams, bytes) {
            self.refit();
        }
    }

    /// `datagrams` of `bytes` in all arrived in `runs` runs.
    #[inline]
    pub(crate) fn arrived(&mut self, runs: u32, datagrams: u32, bytes: u64) {
        if self.received.add(runs, datagrams, bytes) {
            self.fit(PeerId::OWN);
            self.grant(PeerId::OWN);
        }
    }

    /// The length of the runs of which our own queue is taken to hold more. Where a run takes a
    /// place, responses are charged with fewer places instead ([`charge_of_answer`]).
    ///
    /// [`charge_of_answer`]: Self::charge_of_answer
    fn received_length(&self) -> RunLength {
        match self.own.queue {
            QueueKind::Memory => self.received.length(),
            QueueKind::Places | QueueKind::Frames => RunLength::default(),
        }
    }

    /// The receiver follows the length of runs.
    #[cold]
    fn fit(&mut self, id: PeerId) {
        let (runs, enough) = match id {
            PeerId::OWN => (self.received_length(), u64::MAX),
            _ => (self.sent.length(), ENOUGH),
        };
        self.get(id).fit(runs, enough);
    }

    /// Runs are longer or shorter than before: peers hold more of them, or less.
    #[cold]
    fn refit(&mut self) {
        let runs = self.sent.length();
        for at in 0..self.peers.len() {
            self.peers[at].receiver.fit(runs, ENOUGH);
            self.grant(PeerId(at as u32));
        }
    }

    /// A packet to this peer was lost: its queue may have been full.
    #[cold]
    pub(crate) fn lost(&mut self, id: PeerId) {
        self.get(id).lost();
    }

    /// Number of packets of a response, of `len` bytes each, that our own receive queue holds, when
    /// nothing else is in flight to it.
    pub(crate) fn answers(&self, len: u32) -> u32 {
        let Budget { bytes, datagrams } = self.own.target;
        let datagrams = match self.own.queue {
            QueueKind::Places => self.received.datagrams_in(datagrams),
            QueueKind::Memory | QueueKind::Frames => datagrams,
        };
        datagrams.min(bytes / Budget::cost(len))
    }

    /// As [`answers`](Self::answers), of packets that arrive one by one.
    pub(crate) fn answers_one_by_one(&self, len: u32) -> u32 {
        let Budget { bytes, datagrams } = self.own.announced;
        datagrams.min(bytes / Budget::cost(len))
    }

    /// The cost of a response of `packets` packets, which cost `each`, to our own receive queue.
    #[inline]
    pub(crate) fn charge_of_answer(&self, packets: u32, each: u32) -> Cost {
        let all = Cost::of(packets, each);
        match self.own.queue {
            QueueKind::Places if packets > 1 => {
                Cost { datagrams: self.received.places_of(packets), ..all }
            }
            _ => all,
        }
    }

    /// Reserves our own credit for the response `answer`, which will be requested.
    #[inline]
    pub(crate) fn expect(&mut self, answer: Cost) -> Expected {
        self.expect_each(answer, 1)
    }

    /// `count` responses of that cost will be requested. Returns the charge of each.
    #[inline]
    pub(crate) fn expect_each(&mut self, answer: Cost, count: u32) -> Expected {
        let each = self.epochs.ask(answer, count);
        self.own.charge(each.times(count).charge());
        each
    }

    /// Whether its credit was given back without it, because it is overdue.
    #[inline]
    pub(crate) fn has_forgotten(&self, answer: Expected) -> bool {
        self.epochs.has_forgotten(answer)
    }

    /// It arrived, or will not arrive any more.
    #[inline]
    pub(crate) fn answered(&mut self, answer: Expected) {
        if let Some(charge) = self.epochs.answered(answer) {
            self.release(PeerId::OWN, charge);
        }
    }

    /// Time passes: overdue responses reserve no credit any more. Returns when the epoch ends.
    pub(crate) fn age(&mut self, now: Time) -> Time {
        if now >= self.epochs.ends {
            let overdue = self.epochs.pass(now);
            self.own.in_flight.take(overdue);
            self.grant(PeerId::OWN);
        }
        self.epochs.ends
    }

    /// When a queue pair that waits for our own credit may get it without any response.
    #[inline]
    pub(crate) fn next_age(&self) -> Option<Time> {
        (!self.own.wait_queue.is_empty()).then_some(self.epochs.ends)
    }

    /// Queues `slot` until `id` has `need` credit, and leaves the queue `waiting` that it was in.
    /// If it was granted a turn at `id`, it stays first until the turn is `over`.
    pub(crate) fn wait(
        &mut self,
        slot: u32,
        waiting: &mut Option<PeerId>,
        id: PeerId,
        need: Cost,
        over: bool,
    ) {
        if *waiting == Some(id) {
            let receiver = self.get(id);
            if receiver.granted != Some(slot) {
                // Perhaps it needs less than before.
                receiver.renew(slot, need);
                return self.grant(id);
            }
            if !over {
                receiver.granted = None;
                return receiver.wait_queue.push_front((slot, need));
            }
        }
        self.quit(slot, waiting);
        *waiting = Some(id);
        self.get(id).wait_queue.push_back((slot, need));
        self.grant(id);
    }

    /// `slot` leaves the queue that it waits in, or ends its turn.
    #[inline]
    pub(crate) fn quit(&mut self, slot: u32, waiting: &mut Option<PeerId>) {
        if let Some(id) = waiting.take() {
            self.get(id).leave(slot);
            self.grant(id);
        }
    }

    /// Whether a queue pair was granted a turn.
    #[inline]
    pub(crate) fn has_granted(&self) -> bool {
        !self.granted.is_empty()
    }

    /// Forgets the turn of `slot`, which goes away.
    pub(crate) fn forget(&mut self, slot: u32) {
        self.granted.retain(|granted| *granted != slot);
    }

    #[inline]
    pub(crate) fn receiver(&self, id: PeerId) -> &CreditAccount {
        if id == PeerId::OWN { &self.own } else { &self.peers[id.0 as usize].receiver }
    }

    #[inline]
    pub(crate) fn get(&mut self, id: PeerId) -> &mut CreditAccount {
        if id == PeerId::OWN {
            return &mut self.own;
        }
        &mut self.peers[id.0 as usize].receiver
    }

    /// Grants the first of the wait queue a turn, if the credit that it needs is available.
    fn grant(&mut self, id: PeerId) {
        if let Some(slot) = self.get(id).grant() {
            self.granted.push_back(slot);
        }
    }
}

#[cfg(test)]
mod tests;
