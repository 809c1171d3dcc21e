//! Room in receive queues: what a peer's can take, and what ours can.
//!
//! The window belongs to the receiver, not to the queue pair: all queue pairs that send to one device
//! share its socket buffer or ring. Before a packet leaves, its cost is charged to the receiver's pool;
//! the acknowledgement gives it back. READ responses and atomic results are charged to our own pool when they are asked for.

use core::net::IpAddr;
use std::collections::VecDeque;

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
    /// Linux accounts to a socket for it.
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

    /// Half of it.
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
    pub(crate) fn of(packets: u32, each: u32) -> Self {
        Self { bytes: u64::from(packets) * u64::from(each), datagrams: packets }
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

/// One receiver's room.
#[derive(Debug)]
pub(crate) struct Pool {
    limit: Budget,
    used: Charge,
    /// Queue pairs that wait for room, oldest first.
    pub(crate) waiters: VecDeque<u32>,
}

impl Pool {
    pub(crate) fn new(limit: Budget) -> Self {
        Self { limit, used: Charge::default(), waiters: VecDeque::new() }
    }

    pub(crate) fn set_limit(&mut self, limit: Budget) {
        self.limit = limit;
    }

    /// Whether `charge` fits; an unused pool takes anything, so that nothing waits for ever.
    #[inline]
    pub(crate) fn admits(&self, charge: Charge) -> bool {
        self.used.datagrams == 0
            || (self.used.bytes + charge.bytes <= u64::from(self.limit.bytes)
                && self.used.datagrams + charge.datagrams <= self.limit.datagrams)
    }

    #[inline]
    pub(crate) fn charge(&mut self, charge: Charge) {
        self.used.add(charge);
    }

    #[inline]
    pub(crate) fn release(&mut self, charge: Charge) {
        self.used.take(charge);
    }
}

/// The pools of all peers, by address, and our own.
#[derive(Debug)]
pub(crate) struct Pools {
    own: Pool,
    peers: Vec<(IpAddr, u32, Pool)>,
}

/// Index of a pool: [`PoolId::OWN`] or a peer's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PoolId(u32);

impl PoolId {
    pub(crate) const OWN: Self = Self(u32::MAX);
}

impl Pools {
    pub(crate) fn new(own: Budget) -> Self {
        Self { own: Pool::new(own), peers: Vec::new() }
    }

    /// The pool of a peer, which gets `limit`; counts one more user.
    pub(crate) fn join(&mut self, peer: IpAddr, limit: Budget, queue_pairs_max: usize) -> PoolId {
        let free = self.peers.iter().position(|(_, users, _)| *users == 0);
        let at = match self.peers.iter().position(|(addr, users, _)| *addr == peer && *users > 0) {
            Some(at) => at,
            None => match free {
                Some(at) => {
                    self.peers[at] = (peer, 0, Pool::new(limit));
                    at
                }
                None => {
                    self.peers.push((peer, 0, Pool::new(limit)));
                    self.peers.len() - 1
                }
            },
        };
        let (_, users, pool) = &mut self.peers[at];
        *users += 1;
        pool.set_limit(limit);
        let room = queue_pairs_max.min(*users as usize * 2);
        pool.waiters.reserve(room.saturating_sub(pool.waiters.len()));
        self.own.waiters.reserve(room.saturating_sub(self.own.waiters.len()));
        #[allow(clippy::cast_possible_truncation)]
        PoolId(at as u32)
    }

    /// One user less.
    pub(crate) fn leave(&mut self, id: PoolId) {
        if let Some((_, users, _)) = self.peers.get_mut(id.0 as usize) {
            *users = users.saturating_sub(1);
        }
    }

    /// Takes a queue pair that is gone out of all waiting lists.
    pub(crate) fn forget(&mut self, slot: u32) {
        self.own.waiters.retain(|waiter| *waiter != slot);
        for (_, _, pool) in &mut self.peers {
            pool.waiters.retain(|waiter| *waiter != slot);
        }
    }

    #[inline]
    pub(crate) fn get(&mut self, id: PoolId) -> &mut Pool {
        if id == PoolId::OWN {
            return &mut self.own;
        }
        &mut self.peers[id.0 as usize].2
    }
}
