//! The centre of the simulated network: addresses, links, datagrams in flight, and the clock.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::mem;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use super::batch::{Batch, Flow, Mark};
use super::gate::Bell;
use super::stats::SimStats;
use super::{Tap, TapDatagram, Verdict};
use crate::fault::flight::Flight;
use crate::fault::link::{Fate, Link, LinkConfig};
use crate::fault::rng::{self, Rng};
use crate::fault::{CONGESTION, HEADERS};
use crate::port::contract::RxBudget;

/// A port as the hub sees it.
struct Inbox {
    batch: Batch,
    bell: Arc<Bell>,
    /// Whether a thread waits for the event.
    armed: bool,
    signalled: bool,
    /// Datagrams dropped because the inbox was full.
    drops: u64,
}

/// A link between two addresses.
struct SimLink {
    link: Link,
    /// Whether its config was set for this link, and does not follow the default.
    explicit: bool,
}

pub(super) struct Hub {
    seed: u64,
    pub(super) now: Duration,
    inboxes: Vec<Option<Inbox>>,
    addresses: HashMap<IpAddr, usize>,
    /// Memberships in groups.
    pub(super) groups: BTreeSet<(IpAddr, usize)>,
    links: HashMap<(IpAddr, IpAddr), SimLink>,
    default_link: LinkConfig,
    pub(super) flying: Flight<(Flow, Mark)>,
    pub(super) tap: Option<Tap>,
    pub(super) stats: SimStats,
}

impl Hub {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            seed,
            now: Duration::ZERO,
            inboxes: Vec::new(),
            addresses: HashMap::new(),
            groups: BTreeSet::new(),
            links: HashMap::new(),
            default_link: LinkConfig::default(),
            flying: Flight::default(),
            tap: None,
            stats: SimStats::default(),
        }
    }

    pub(super) fn set_default_link(&mut self, config: LinkConfig) {
        for link in self.links.values_mut().filter(|link| !link.explicit) {
            link.link.config = config.clone();
        }
        self.default_link = config;
    }

    pub(super) fn set_link(&mut self, from: IpAddr, to: IpAddr, config: LinkConfig) {
        let seed = self.seed;
        let link =
            self.links.entry((from, to)).or_insert_with(|| new_link(seed, from, to, &config));
        link.link.config = config;
        link.explicit = true;
    }

    /// Registers a port; returns its number.
    pub(super) fn attach(
        &mut self,
        addresses: &[IpAddr],
        budget: RxBudget,
        bell: Arc<Bell>,
    ) -> io::Result<usize> {
        if let Some(taken) = addresses.iter().find(|a| self.addresses.contains_key(a)) {
            let what = format!("{taken} is another simulated port's");
            return Err(io::Error::new(io::ErrorKind::AddrInUse, what));
        }
        let inbox =
            Inbox { batch: Batch::new(budget), bell, armed: false, signalled: false, drops: 0 };
        let id = self.inboxes.iter().position(Option::is_none).unwrap_or(self.inboxes.len());
        if id == self.inboxes.len() {
            self.inboxes.push(Some(inbox));
        } else {
            self.inboxes[id] = Some(inbox);
        }
        self.addresses.extend(addresses.iter().map(|&a| (a, id)));
        Ok(id)
    }

    pub(super) fn detach(&mut self, id: usize) {
        self.addresses.retain(|_, port| *port != id);
        self.groups.retain(|(_, port)| *port != id);
        self.inboxes[id] = None;
    }

    /// Swaps `read`, which must be empty, with all arrivals at a port; false if there are none.
    pub(super) fn take(&mut self, id: usize, read: &mut Batch) -> bool {
        let inbox = self.inboxes[id].as_mut().expect("attached while the port lives");
        if inbox.batch.is_empty() {
            // Only now: the datagrams taken before may not all have been handed up.
            if mem::take(&mut inbox.signalled) {
                inbox.bell.clear();
            }
            return false;
        }
        mem::swap(&mut inbox.batch, read);
        true
    }

    /// From now on arrivals signal a port's event; signals at once if `pending`.
    pub(super) fn arm(&mut self, id: usize, pending: bool) {
        let inbox = self.inboxes[id].as_mut().expect("attached while the port lives");
        inbox.armed = true;
        inbox.signal_if(pending || !inbox.batch.is_empty());
    }

    /// Datagrams dropped by a port's full queue.
    pub(super) fn drops(&self, id: usize) -> u64 {
        self.inboxes[id].as_ref().map_or(0, |inbox| inbox.drops)
    }

    /// Sends a whole batch and leaves an empty one.
    pub(super) fn send(&mut self, batch: &mut Batch) {
        self.stats.sent += batch.len() as u64;
        if !self.hand_over(batch) {
            for i in 0..batch.len() {
                let (flow, mark, payload) = batch.get(i);
                self.send_one(flow, mark, payload);
            }
        }
        batch.clear();
    }

    /// The case of a perfect link and an empty queue: no byte is touched. False in any other case.
    fn hand_over(&mut self, batch: &mut Batch) -> bool {
        let Some((src, dst)) = batch.pair() else { return false };
        let perfect = match self.links.get(&(src, dst)) {
            Some(link) => link.link.config.is_perfect(),
            None => self.default_link.is_perfect(),
        };
        let id = self.addresses.get(&dst);
        let inbox = id.and_then(|&id| self.inboxes[id].as_mut());
        let Some(inbox) = inbox.filter(|_| perfect && self.tap.is_none()) else { return false };
        if !inbox.batch.is_empty() || !inbox.batch.same_size(batch) {
            return false;
        }
        self.stats.delivered += batch.len() as u64;
        mem::swap(&mut inbox.batch, batch);
        inbox.signal_if(true);
        true
    }

    fn send_one(&mut self, flow: &Flow, mark: Mark, payload: &[u8]) {
        if let Some(tap) = &mut self.tap {
            let seen = TapDatagram { now: self.now, src: flow.src, dst: flow.dst, payload };
            if tap(&seen) == Verdict::Drop {
                self.stats.dropped_by_tap += 1;
                return;
            }
        }
        let (seed, key) = (self.seed, (flow.src, flow.dst));
        let default = &self.default_link;
        let link = self.links.entry(key).or_insert_with(|| new_link(seed, key.0, key.1, default));
        let header = HEADERS[usize::from(flow.dst.is_ipv6())];
        let decided = link.link.decide(self.now, payload.len(), header);
        self.stats.count(payload.len(), &decided);
        let Ok((first, second)) = decided else { return };
        for fate in [Some(first), second].into_iter().flatten() {
            let mut flow = *flow;
            flow.tos |= if fate.is_marked { CONGESTION } else { 0 };
            match fate {
                Fate { due, flip: None, len, .. } if due <= self.now => {
                    self.deliver(&flow, mark, &payload[..len]);
                }
                fate => {
                    self.flying.launch((flow, mark), payload, &fate);
                    self.land();
                }
            }
        }
    }

    /// Moves the clock and delivers everything due by then, in order.
    pub(super) fn advance_to(&mut self, now: Duration) {
        self.now = self.now.max(now);
        self.land();
    }

    fn land(&mut self) {
        while let Some(((flow, mark), payload)) = self.flying.land(self.now) {
            self.deliver(&flow, mark, &payload);
            self.flying.take_back(payload);
        }
    }

    fn deliver(&mut self, flow: &Flow, mark: Mark, payload: &[u8]) {
        if flow.dst.is_multicast() {
            let mut next = 0;
            let joined =
                |groups: &BTreeSet<_>, from| groups.range((flow.dst, from)..).next().copied();
            while let Some((_, id)) = joined(&self.groups, next).filter(|(to, _)| *to == flow.dst) {
                self.put(id, flow, mark, payload);
                next = id + 1;
            }
            return;
        }
        match self.addresses.get(&flow.dst) {
            Some(&id) => self.put(id, flow, mark, payload),
            None => self.stats.unroutable += 1,
        }
    }

    fn put(&mut self, id: usize, flow: &Flow, mark: Mark, payload: &[u8]) {
        let Some(inbox) = self.inboxes[id].as_mut() else { return self.stats.unroutable += 1 };
        if inbox.batch.push(flow, mark, payload) {
            self.stats.delivered += 1;
            inbox.signal_if(true);
        } else {
            self.stats.dropped_at_receiver += 1;
            inbox.drops += 1;
        }
    }
}

impl Inbox {
    fn signal_if(&mut self, pending: bool) {
        if self.armed && pending && !self.signalled {
            self.bell.signal();
            self.signalled = true;
        }
    }
}

fn new_link(seed: u64, from: IpAddr, to: IpAddr, config: &LinkConfig) -> SimLink {
    let name = [from, to].map(rng::name);
    let rng = Rng::fork(seed, name.as_flattened());
    SimLink { link: Link::new(config.clone(), rng), explicit: false }
}
