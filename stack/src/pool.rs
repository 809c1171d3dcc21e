//! Room in receive queues: what a peer's can take, and what ours can.
//!
//! The window belongs to the receiver, not to the queue pair: all queue pairs that send to one device
//! share its socket buffer or ring. Before a packet leaves, its cost is charged to the receiver's pool;
//! the acknowledgement gives it back. READ responses and atomic results are charged to our own pool when they are asked for.
//!
//! Packets that nobody acknowledges are paced instead ([`Pace`]).
//!
//! Who finds no room waits in line. While there is a line, nobody else gets room; its first is called when what it
//! needs fits, and the next when the first had its turn.

mod arrivals;
mod dense;

use core::net::IpAddr;
use std::collections::VecDeque;

use self::arrivals::Arrivals;
pub(crate) use self::dense::datagrams_max;
use self::dense::{Density, Departures, ENOUGH, Trust, stretched};
use crate::pace::Pace;
use crate::types::Time;

/// What a receive queue holds before it drops: a sum of costs, and a number of datagrams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// Bytes, in the measure of [`Budget::cost`].
    pub bytes: u32,
    /// Datagrams.
    pub datagrams: u32,
}

impl Budget {
    /// What is assumed of a peer that did not say: 16 datagrams of any size.
    pub const STRANGER: Self = Self { bytes: 16 * 8704, datagrams: 16 };

    /// Upper bound of what one datagram of `len` bytes (BTH to ICRC) costs its receiver: the memory that
    /// Linux accounts to a socket for it. Measured on Linux 6.18.
    #[must_use]
    #[inline]
    pub const fn cost(len: u32) -> u32 {
        // An skb and a slab bucket; measured per size, see `RxBudget::cost` of the netdev crate.
        match len {
            0..=160 => 832,
            161..=608 => 256 + 1024,
            609..=1632 => 256 + 2048,
            1633..=3680 => 256 + 4096,
            3681..=7776 => 256 + 8192,
            _ => len.saturating_mul(2).saturating_add(2048),
        }
    }

    /// A part of it, rounded down.
    #[must_use]
    pub const fn part(self, numerator: u32, denominator: u32) -> Self {
        #[allow(clippy::cast_possible_truncation)]
        const fn scale(value: u32, numerator: u32, denominator: u32) -> u32 {
            (value as u64 * numerator as u64 / denominator as u64) as u32
        }
        Self {
            bytes: scale(self.bytes, numerator, denominator),
            datagrams: scale(self.datagrams, numerator, denominator),
        }
    }
}

/// A sum of costs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Charge {
    pub(crate) bytes: u64,
    pub(crate) datagrams: u32,
}

impl Charge {
    #[inline]
    pub(crate) const fn of(packets: u32, each: u32) -> Self {
        Self { bytes: packets as u64 * each as u64, datagrams: packets }
    }

    #[inline]
    pub(crate) fn add(&mut self, other: Self) {
        self.bytes += other.bytes;
        self.datagrams += other.datagrams;
    }

    #[inline]
    pub(crate) fn take(&mut self, other: Self) {
        debug_assert!(self.bytes >= other.bytes && self.datagrams >= other.datagrams);
        self.bytes = self.bytes.saturating_sub(other.bytes);
        self.datagrams = self.datagrams.saturating_sub(other.datagrams);
    }
}

/// One receiver's room, and who waits for some.
#[derive(Debug)]
pub(crate) struct Pool {
    limit: Budget,
    /// What is taken to fit: more than `limit` while super-packets leave and nothing is lost.
    room: Budget,
    trust: Trust,
    used: Charge,
    /// Queue pairs that wait for room and what they need, oldest first.
    line: VecDeque<(u32, Charge)>,
    /// The one whose turn it is: it left the line and has not sent yet.
    called: Option<u32>,
    /// What was sent without hope of an acknowledgement.
    paced: Pace,
}

impl Pool {
    fn new(limit: Budget) -> Self {
        Self {
            limit,
            room: limit,
            trust: Trust::default(),
            used: Charge::default(),
            line: VecDeque::new(),
            called: None,
            paced: Pace::default(),
        }
    }

    /// Whether `charge` fits; an unused pool takes anything, so that nothing waits for ever.
    #[inline]
    pub(crate) fn fits(&self, charge: Charge) -> bool {
        self.used.datagrams == 0 || self.has_room(charge.bytes, charge.datagrams)
    }

    /// Whether nothing like `next` will fit any more once `charge` is charged.
    #[inline]
    pub(crate) fn closes_with(&self, charge: Charge, next: Charge) -> bool {
        !self.has_room(charge.bytes + next.bytes, charge.datagrams + next.datagrams)
    }

    #[inline]
    fn has_room(&self, bytes: u64, datagrams: u32) -> bool {
        self.used.bytes + bytes <= u64::from(self.room.bytes)
            && self.used.datagrams + datagrams <= self.room.datagrams
    }

    /// What is sent to it leaves so dense.
    fn fit(&mut self, density: Density, enough: u64) {
        let whole = self.trust.is_whole();
        self.room = if whole { stretched(self.limit, density, enough) } else { self.limit };
    }

    /// Whether three quarters of it are free, if `more` small packets are under way; never of a stranger's.
    #[inline]
    pub(crate) fn is_mostly_free(&self, more: u32) -> bool {
        4 * (self.used.datagrams + more) <= self.limit.datagrams
            && 4 * self.used.bytes <= u64::from(self.limit.bytes)
    }

    /// How much more fits.
    #[inline]
    fn left(&self) -> Charge {
        Charge {
            bytes: u64::from(self.room.bytes).saturating_sub(self.used.bytes),
            datagrams: self.room.datagrams.saturating_sub(self.used.datagrams),
        }
    }

    /// Whether `charge` fits, and nobody waits for room.
    #[inline]
    fn spares(&self, charge: Charge) -> bool {
        let fits = self.has_room(charge.bytes, charge.datagrams);
        self.called.is_none() && self.line.is_empty() && fits
    }

    /// Whether `slot` may charge `charge` now.
    #[inline]
    pub(crate) fn admits(&self, slot: u32, charge: Charge) -> bool {
        self.is_turn_of(slot) && self.fits(charge)
    }

    /// How much `slot` may charge now.
    #[inline]
    pub(crate) fn room_for(&self, slot: u32) -> Charge {
        if self.is_turn_of(slot) { self.left() } else { Charge::default() }
    }

    #[inline]
    fn is_turn_of(&self, slot: u32) -> bool {
        match self.called {
            None => self.line.is_empty(),
            Some(called) => called == slot,
        }
    }

    #[inline]
    pub(crate) fn charge(&mut self, charge: Charge) {
        self.used.add(charge);
    }

    /// Whether `charge`, which nobody will acknowledge, may leave now; if not, when it may.
    #[inline]
    pub(crate) fn pace(&mut self, now: Time, charge: Charge) -> Result<(), Time> {
        self.paced.admit(now, charge, self.limit)
    }

    /// A packet of `charge` with so many bytes of payload, which nobody will acknowledge, left.
    #[inline]
    pub(crate) fn paced(&mut self, charge: Charge, payload: u32) {
        self.paced.left(charge, payload);
    }

    fn leave(&mut self, slot: u32) {
        if self.called == Some(slot) {
            self.called = None;
        } else {
            self.line.retain(|(waiter, _)| *waiter != slot);
        }
    }

    /// Calls the first in line, if there is room for it and nobody is being served.
    #[inline]
    fn call(&mut self) -> Option<u32> {
        if self.called.is_some() {
            return None;
        }
        let (slot, need) = *self.line.front()?;
        if !self.fits(need) {
            return None;
        }
        self.line.pop_front();
        self.called = Some(slot);
        self.called
    }
}

/// How long what was asked for is reckoned with: who has not answered for so long is dead, or a victim of some loss, and shall not keep the
/// others waiting. Twice as long at most.
const EXPECTED_NS: u64 = 100_000_000;

/// What was charged to our own pool, and when: to give it back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Expected {
    bytes: u32,
    datagrams: u32,
    epoch: u32,
}

impl Expected {
    /// What somebody who does not answer anyway may still say.
    pub(crate) const NOTHING: Self = Self { bytes: 0, datagrams: 0, epoch: 0 };

    /// So many of it.
    #[inline]
    pub(crate) fn times(self, count: u32) -> Self {
        Self { bytes: self.bytes * count, datagrams: self.datagrams * count, ..self }
    }

    #[inline]
    fn charge(self) -> Charge {
        Charge { bytes: self.bytes.into(), datagrams: self.datagrams }
    }

    /// Adds what was charged at the same time; `false`, and nothing happened, if that was at another.
    #[inline]
    pub(crate) fn add(&mut self, other: Self) -> bool {
        let same = self.epoch == other.epoch;
        if same {
            self.bytes += other.bytes;
            self.datagrams += other.datagrams;
        }
        same
    }
}

/// The answers that we asked for in this epoch and the one before.
#[derive(Debug, Default)]
struct Epochs {
    current: u32,
    ends: Time,
    asked: [Charge; 2],
}

/// The pools of all peers, by address, and our own.
#[derive(Debug)]
pub(crate) struct Pools {
    own: Pool,
    arrivals: Arrivals,
    departures: Departures,
    density: Density,
    /// The same of what arrives.
    comings: Departures,
    own_density: Density,
    epochs: Epochs,
    peers: Vec<(IpAddr, u32, Pool)>,
    /// Queue pairs that were called and have not been told.
    called: VecDeque<u32>,
}

/// Index of a pool: [`PoolId::OWN`] or a peer's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PoolId(u32);

impl PoolId {
    pub(crate) const OWN: Self = Self(u32::MAX);
}

impl Pools {
    pub(crate) fn new(own: Budget) -> Self {
        Self {
            own: Pool::new(own),
            arrivals: Arrivals::default(),
            departures: Departures::default(),
            density: Density::default(),
            comings: Departures::default(),
            own_density: Density::default(),
            epochs: Epochs::default(),
            peers: Vec::new(),
            called: VecDeque::new(),
        }
    }

    /// The pool of a peer; counts one more user. It gets `limit` if the peer itself `said` so, or nobody knows better.
    pub(crate) fn join(&mut self, peer: IpAddr, limit: Budget, said: bool) -> PoolId {
        let known = |(addr, users, _): &(IpAddr, u32, Pool)| *addr == peer && *users > 0;
        let at = self.peers.iter().position(known).unwrap_or_else(|| {
            let fresh = (peer, 0, Pool::new(limit));
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
            pool.limit = limit;
        }
        pool.fit(self.density, ENOUGH);
        pool.line.reserve((*users as usize).saturating_sub(pool.line.len()));
        #[allow(clippy::cast_possible_truncation)]
        let id = PoolId(at as u32);
        self.call(id);
        id
    }

    /// Users of peers' pools, packets charged to those, and queue pairs that wait for room or have been called, in our own too.
    pub(crate) fn held(&self) -> (usize, u64, usize) {
        let waiting = |pool: &Pool| pool.line.len() + usize::from(pool.called.is_some());
        let mut held = (0, 0, waiting(&self.own));
        for (_, users, pool) in &self.peers {
            held.0 += *users as usize;
            held.1 += u64::from(pool.used.datagrams);
            held.2 += waiting(pool);
        }
        held
    }

    /// One user less.
    pub(crate) fn leave(&mut self, id: PoolId) {
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
    pub(crate) fn release(&mut self, id: PoolId, charge: Charge) {
        let (density, enough) = match id {
            PoolId::OWN => (self.own_density, u64::MAX),
            _ => (self.density, ENOUGH),
        };
        let pool = self.get(id);
        pool.used.take(charge);
        if pool.trust.came(charge.datagrams) {
            pool.fit(density, enough);
        }
        if !pool.line.is_empty() {
            self.call(id);
        }
    }

    /// Whether our own pool has room for `answer`, which nobody needs.
    #[inline]
    pub(crate) fn spares(&self, answer: Charge) -> bool {
        self.own.spares(answer)
    }

    /// How much room our own pool has that nobody needs.
    #[inline]
    pub(crate) fn spared(&self) -> Charge {
        if self.own.called.is_none() && self.own.line.is_empty() {
            self.own.left()
        } else {
            Charge::default()
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
        // Who sends one by one pays nothing.
        if runs == datagrams && self.density == Density::default() {
            return;
        }
        if !self.departures.add(runs, datagrams, bytes) {
            return;
        }
        let density = self.departures.density();
        if density != self.density {
            self.density = density;
            self.peers.iter_mut().for_each(|(_, _, pool)| pool.fit(density, ENOUGH));
        }
    }

    /// So many datagrams arrived in so many super-packets, in a queue of which their memory counts.
    #[inline]
    pub(crate) fn arrived_in_runs(&mut self, runs: u32, datagrams: u32, bytes: u64) {
        let alone = runs == datagrams && self.own_density == Density::default();
        if alone || !self.comings.add(runs, datagrams, bytes) {
            return;
        }
        let density = self.comings.density();
        if density != self.own_density {
            self.own_density = density;
            self.own.fit(density, u64::MAX);
        }
    }

    /// Something that was sent to the peer of this pool was lost, and may have found its queue full.
    #[cold]
    pub(crate) fn lost(&mut self, id: PoolId) {
        let pool = self.get(id);
        pool.trust.lost();
        pool.room = pool.limit;
    }

    /// How many packets of `len` bytes of an answer our own receive queue has room for, when nothing else is on its way to it.
    pub(crate) fn answers(&self, len: u32) -> u32 {
        let limit = &self.own.room;
        self.arrivals.held_by(limit.datagrams).min(limit.bytes / Budget::cost(len))
    }

    /// As many, if each takes a place of its own.
    pub(crate) fn answers_one_by_one(&self, len: u32) -> u32 {
        self.answers(len).min(self.own.room.datagrams)
    }

    /// What an answer of so many `packets`, of which each costs so much, takes of our own receive queue.
    #[inline]
    pub(crate) fn charge_of_answer(&self, packets: u32, each: u32) -> Charge {
        let all = Charge::of(packets, each);
        if packets == 1 {
            all
        } else {
            Charge { datagrams: self.arrivals.places_of(packets), ..all }
        }
    }

    /// `answer` will be asked for: our own receive queue keeps room for it.
    #[inline]
    pub(crate) fn expect(&mut self, answer: Charge) -> Expected {
        self.expect_each(answer, 1)
    }

    /// `count` answers of that kind will be asked for; returns what each is charged with.
    #[inline]
    pub(crate) fn expect_each(&mut self, answer: Charge, count: u32) -> Expected {
        let epoch = self.epochs.current;
        // Of our own receive queue, whose size is such a number.
        let bytes = u32::try_from(answer.bytes).unwrap_or(u32::MAX);
        let each = Expected { bytes, datagrams: answer.datagrams, epoch };
        let all = each.times(count).charge();
        self.own.charge(all);
        self.epochs.asked[epoch as usize % 2].add(all);
        each
    }

    /// Whether it is not reckoned with any more.
    #[inline]
    pub(crate) fn has_forgotten(&self, answer: Expected) -> bool {
        self.epochs.current.wrapping_sub(answer.epoch) > 1 && answer.datagrams > 0
    }

    /// It came, or will not come any more.
    #[inline]
    pub(crate) fn answered(&mut self, answer: Expected) {
        if self.has_forgotten(answer) || answer.datagrams == 0 {
            return;
        }
        self.epochs.asked[answer.epoch as usize % 2].take(answer.charge());
        self.release(PoolId::OWN, answer.charge());
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
        // After a pause nothing is reckoned with at all.
        let passed = if now.since(self.epochs.ends) < EXPECTED_NS { 1 } else { 2 };
        for _ in 0..passed {
            self.epochs.current = self.epochs.current.wrapping_add(1);
            let oldest = &mut self.epochs.asked[self.epochs.current as usize % 2];
            self.own.used.take(core::mem::take(oldest));
        }
        self.epochs.ends = now.after(EXPECTED_NS);
        self.call(PoolId::OWN);
    }

    /// When somebody who waits for room of our own may have it without any answer.
    #[inline]
    pub(crate) fn next_age(&self) -> Option<Time> {
        (!self.own.line.is_empty()).then_some(self.epochs.ends)
    }

    /// `slot`, which waits in the line of `waiting` or in none, cannot go on before `id` has room for `need`. If it was called, it stays the first until
    /// its turn is `over`.
    pub(crate) fn wait(
        &mut self,
        slot: u32,
        waiting: &mut Option<PoolId>,
        id: PoolId,
        need: Charge,
        over: bool,
    ) {
        if *waiting == Some(id) {
            let pool = self.get(id);
            if pool.called != Some(slot) {
                return;
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
    pub(crate) fn quit(&mut self, slot: u32, waiting: &mut Option<PoolId>) {
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
    pub(crate) fn get(&mut self, id: PoolId) -> &mut Pool {
        if id == PoolId::OWN {
            return &mut self.own;
        }
        &mut self.peers[id.0 as usize].2
    }

    /// Gives the first in line a turn, if there is room for it.
    fn call(&mut self, id: PoolId) {
        if let Some(slot) = self.get(id).call() {
            self.called.push_back(slot);
        }
    }
}

#[cfg(test)]
mod tests;
