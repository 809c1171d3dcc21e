//! The centre of the simulated network: addresses, groups and receive queues.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::mem;
use std::net::IpAddr;
use std::sync::Arc;

use super::batch::{Batch, Flow, Mark};
use super::gate::Bell;
use super::{SimStats, Tap, TapDatagram, Verdict};
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

#[derive(Default)]
pub(super) struct Hub {
    inboxes: Vec<Option<Inbox>>,
    addresses: HashMap<IpAddr, usize>,
    /// Memberships in groups.
    pub(super) groups: BTreeSet<(IpAddr, usize)>,
    pub(super) tap: Option<Tap>,
    pub(super) stats: SimStats,
}

impl Hub {
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

    /// The case of one receiver with an empty queue: no byte is touched. False in any other case.
    fn hand_over(&mut self, batch: &mut Batch) -> bool {
        let Some((_, dst)) = batch.pair() else { return false };
        let id = self.addresses.get(&dst);
        let inbox = id.and_then(|&id| self.inboxes[id].as_mut());
        let Some(inbox) = inbox.filter(|_| self.tap.is_none()) else { return false };
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
            let seen = TapDatagram { src: flow.src, dst: flow.dst, payload };
            if tap(&seen) == Verdict::Drop {
                return;
            }
        }
        self.deliver(flow, mark, payload);
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
