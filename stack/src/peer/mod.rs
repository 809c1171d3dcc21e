//! Room in receive queues: what a peer's can take, and what ours can.
//!
//! The window belongs to the receiver, not to the queue pair: all queue pairs that send to one
//! device share its socket buffer or ring. Before a packet leaves, its cost is charged to the
//! receiver's pool; the acknowledgement gives it back. READ responses and atomic results are
//! charged to our own pool when they are asked for.
//!
//! Packets that nobody acknowledges are paced instead ([`Pace`]).
//!
//! A queue pair that finds no room waits in line. While there is a line, no other gets room; its
//! first is called when what it needs fits, and the next when the first had its turn.

mod arrivals;
mod budget;
mod expected;
mod receiver;
mod run_length;

use core::net::IpAddr;
use std::collections::VecDeque;

use self::arrivals::Arrivals;
pub use self::budget::Budget;
pub(crate) use self::budget::Cost;
use self::expected::Epochs;
pub(crate) use self::expected::Expected;
pub(crate) use self::receiver::Receiver;
pub(crate) use self::run_length::{CALM, datagrams_max};
use self::run_length::{ENOUGH, Watched};
use crate::types::Time;

/// The receive queues of all peers, by address, and our own.
#[derive(Debug)]
pub(crate) struct Peers {
    own: Receiver,
    arrivals: Arrivals,
    /// How dense what we send leaves, and what comes to us.
    sent: Watched,
    received: Watched,
    epochs: Epochs,
    /// So many datagrams without a loss, and it is forgotten.
    calm: u32,
    peers: Vec<(IpAddr, u32, Receiver)>,
    /// Queue pairs that were called and have not been told.
    called: VecDeque<u32>,
}

/// Index of a receive queue: [`PeerId::OWN`] or a peer's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PeerId(u32);

impl PeerId {
    pub(crate) const OWN: Self = Self(u32::MAX);
}

impl Peers {
    pub(crate) fn new(own: Budget, calm: u32) -> Self {
        Self {
            own: Receiver::new(own, calm),
            arrivals: Arrivals::default(),
            sent: Watched::default(),
            received: Watched::default(),
            epochs: Epochs::default(),
            calm,
            peers: Vec::new(),
            called: VecDeque::new(),
        }
    }

    /// The pool of a peer; counts one more user. It gets `limit` if the peer itself `said` so, or
    /// nobody knows better.
    pub(crate) fn join(&mut self, peer: IpAddr, limit: Budget, said: bool) -> PeerId {
        let known = |(addr, users, _): &(IpAddr, u32, Receiver)| *addr == peer && *users > 0;
        let at = self.peers.iter().position(known).unwrap_or_else(|| {
            let fresh = (peer, 0, Receiver::new(limit, self.calm));
            match self.peers.iter().position(|(_, users, _)| *users == 0) {
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
        let (_, users, pool) = &mut self.peers[at];
        *users += 1;
        if said {
            pool.announce(limit);
        }
        pool.fit(self.sent.density, ENOUGH);
        pool.line.reserve((*users as usize).saturating_sub(pool.line.len()));
        #[allow(clippy::cast_possible_truncation)]
        let id = PeerId(at as u32);
        self.call(id);
        id
    }

    /// Whether something is under way to the peer of this pool.
    #[inline]
    pub(crate) fn is_used(&self, id: PeerId) -> bool {
        self.peers.get(id.0 as usize).is_some_and(|(_, _, pool)| pool.used.datagrams > 0)
    }

    /// Users of the receive queues of peers, packets charged to those, and queue pairs that wait for room or have
    /// been called, in our own too.
    pub(crate) fn held(&self) -> (usize, u64, usize) {
        let waiting = |pool: &Receiver| pool.line.len() + usize::from(pool.called.is_some());
        let mut held = (0, 0, waiting(&self.own));
        for (_, users, pool) in &self.peers {
            held.0 += *users as usize;
            held.1 += u64::from(pool.used.datagrams);
            held.2 += waiting(pool);
        }
        held
    }

    /// One user less.
    pub(crate) fn leave(&mut self, id: PeerId) {
        if let Some((_, users, _)) = self.peers.get_mut(id.0 as usize) {
            *users = users.saturating_sub(1);
        }
    }

    /// Makes room in the lines for `queue_pairs`, so that waiting does not allocate.
    pub(crate) fn reserve(&mut self, queue_pairs: usize) {
        self.own.line.reserve(queue_pairs.saturating_sub(self.own.line.len()));
        self.called.reserve((2 * queue_pairs).saturating_sub(self.called.len()));
    }

    /// Gives back what was charged.
    #[inline]
    pub(crate) fn release(&mut self, id: PeerId, charge: Cost) {
        let (density, enough) = match id {
            PeerId::OWN => (self.received.density, u64::MAX),
            _ => (self.sent.density, ENOUGH),
        };
        let pool = self.get(id);
        pool.release(charge, density, enough);
        if !pool.line.is_empty() {
            self.call(id);
        }
    }

    /// How much room our own pool has that nobody needs.
    #[inline]
    pub(crate) fn spared(&self) -> Cost {
        if self.own.called.is_none() && self.own.line.is_empty() {
            self.own.left()
        } else {
            Cost::default()
        }
    }

    /// So many datagrams took so many places of our own receive queue.
    #[inline]
    pub(crate) fn arrived(&mut self, datagrams: u32, places: u32) {
        self.arrivals.add(datagrams, places);
    }

    /// So many datagrams left in so many super-packets.
    #[inline]
    pub(crate) fn departed(&mut self, runs: u32, datagrams: u32, bytes: u64) {
        if self.sent.add(runs, datagrams, bytes) {
            self.refit();
        }
    }

    /// So many datagrams arrived in so many super-packets, in a queue of which their memory counts.
    #[inline]
    pub(crate) fn arrived_in_runs(&mut self, runs: u32, datagrams: u32, bytes: u64) {
        if self.received.add(runs, datagrams, bytes) {
            self.own.fit(self.received.density, u64::MAX);
            self.call(PeerId::OWN);
        }
    }

    /// What leaves is as dense as it was not before: peers hold more of it, or less.
    #[cold]
    fn refit(&mut self) {
        let density = self.sent.density;
        for at in 0..self.peers.len() {
            self.peers[at].2.fit(density, ENOUGH);
            #[allow(clippy::cast_possible_truncation)]
            self.call(PeerId(at as u32));
        }
    }

    /// Something that was sent to the peer of this pool was lost, and may have found its queue
    /// full.
    #[cold]
    pub(crate) fn lost(&mut self, id: PeerId) {
        self.get(id).lost();
    }

    /// How many packets of `len` bytes of an answer our own receive queue has room for, when
    /// nothing else is on its way to it.
    pub(crate) fn answers(&self, len: u32) -> u32 {
        let limit = self.own.goal;
        self.arrivals.held_by(limit.datagrams).min(limit.bytes / Budget::cost(len))
    }

    /// As many, if each comes alone.
    pub(crate) fn answers_one_by_one(&self, len: u32) -> u32 {
        self.own.limit.datagrams.min(self.own.limit.bytes / Budget::cost(len))
    }

    /// What an answer of so many `packets`, of which each costs so much, takes of our own receive
    /// queue.
    #[inline]
    pub(crate) fn charge_of_answer(&self, packets: u32, each: u32) -> Cost {
        let all = Cost::of(packets, each);
        if packets == 1 { all } else { Cost { datagrams: self.arrivals.places_of(packets), ..all } }
    }

    /// `answer` will be asked for: our own receive queue keeps room for it.
    #[inline]
    pub(crate) fn expect(&mut self, answer: Cost) -> Expected {
        self.expect_each(answer, 1)
    }

    /// `count` answers of that kind will be asked for; returns what each is charged with.
    #[inline]
    pub(crate) fn expect_each(&mut self, answer: Cost, count: u32) -> Expected {
        let each = self.epochs.ask(answer, count);
        self.own.charge(each.times(count).charge());
        each
    }

    /// Whether it is not reckoned with any more.
    #[inline]
    pub(crate) fn has_forgotten(&self, answer: Expected) -> bool {
        self.epochs.has_forgotten(answer)
    }

    /// It came, or will not come any more.
    #[inline]
    pub(crate) fn answered(&mut self, answer: Expected) {
        if let Some(charge) = self.epochs.answered(answer) {
            self.release(PeerId::OWN, charge);
        }
    }

    /// Time passes: what was asked for long ago is not reckoned with any more.
    #[inline]
    pub(crate) fn age(&mut self, now: Time) {
        if now >= self.epochs.ends {
            self.begin_epoch(now);
        }
    }

    #[cold]
    fn begin_epoch(&mut self, now: Time) {
        let forgotten = self.epochs.pass(now);
        self.own.used.take(forgotten);
        self.call(PeerId::OWN);
    }

    /// When one that waits for room of our own may have it without any answer.
    #[inline]
    pub(crate) fn next_age(&self) -> Option<Time> {
        (!self.own.line.is_empty()).then_some(self.epochs.ends)
    }

    /// `slot`, which waits in the line of `waiting` or in none, cannot go on before `id` has room
    /// for `need`. If it was called, it stays the first until its turn is `over`.
    pub(crate) fn wait(
        &mut self,
        slot: u32,
        waiting: &mut Option<PeerId>,
        id: PeerId,
        need: Cost,
        over: bool,
    ) {
        if *waiting == Some(id) {
            let pool = self.get(id);
            if pool.called != Some(slot) {
                // Perhaps less than before.
                pool.renew(slot, need);
                return self.call(id);
            }
            if !over {
                pool.called = None;
                return pool.line.push_front((slot, need));
            }
        }
        self.quit(slot, waiting);
        *waiting = Some(id);
        self.get(id).line.push_back((slot, need));
        self.call(id);
    }

    /// `slot` waits for nothing any more, or had its turn.
    #[inline]
    pub(crate) fn quit(&mut self, slot: u32, waiting: &mut Option<PeerId>) {
        if let Some(id) = waiting.take() {
            self.get(id).leave(slot);
            self.call(id);
        }
    }

    /// The next queue pair that was called.
    #[inline]
    pub(crate) fn next_called(&mut self) -> Option<u32> {
        self.called.pop_front()
    }

    /// Whether somebody was called.
    #[inline]
    pub(crate) fn has_called(&self) -> bool {
        !self.called.is_empty()
    }

    /// Forgets that `slot`, which goes away, was called.
    pub(crate) fn forget(&mut self, slot: u32) {
        self.called.retain(|called| *called != slot);
    }

    #[inline]
    pub(crate) fn get(&mut self, id: PeerId) -> &mut Receiver {
        if id == PeerId::OWN {
            return &mut self.own;
        }
        &mut self.peers[id.0 as usize].2
    }

    /// Gives the first in line a turn, if there is room for it.
    fn call(&mut self, id: PeerId) {
        if let Some(slot) = self.get(id).call() {
            self.called.push_back(slot);
        }
    }
}

#[cfg(test)]
mod tests;
