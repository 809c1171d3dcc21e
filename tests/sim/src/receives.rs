//! The source of receives: an end's own queue, or one that several ends of a host share.

use std::collections::VecDeque;

use rocinante_stack::mem::{PdId, Region, Sge};
use rocinante_stack::types::Key;
use rocinante_stack::verbs::{RecvWr, SrqId};
use rocinante_stack::{PostError, SrqChange, SrqError, SrqInit};

use crate::check::{RECEIVE, Verdict};
use crate::memory::{DEPTH, LONGEST, Zone, stride};
use crate::model::{EndId, Piece, Receive};
use crate::work::{SGES, base_of};
use crate::world::{Host, Stage, World};

/// The owner of a stretch of a host's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    End(EndId),
    /// A shared receive queue, by its index on the host.
    Shared(usize),
}

/// A shared receive queue.
#[derive(Debug)]
pub(crate) struct Shared {
    /// The index of its receives' stretch in the host's memory.
    pub(crate) index: usize,
    pub(crate) pd: u32,
    /// `None` while the host is down.
    pub(crate) id: Option<SrqId>,
    pub(crate) key: Option<Key>,
    pub(crate) depth: u64,
    /// The limit with a pending event.
    pub(crate) limit: u64,
    /// Whether the event must come with this call.
    due: bool,
    /// Receives that no end has taken.
    pub(crate) posted: VecDeque<Receive>,
    /// Free slots of the zone.
    free: Vec<u64>,
    count: u64,
}

/// The bit of `wr_id` that marks receives of shared queues.
const SHARED: u32 = 62;

impl Shared {
    pub(crate) fn new(index: usize, pd: u32) -> Self {
        Self {
            index,
            pd,
            id: None,
            key: None,
            depth: DEPTH,
            limit: 0,
            due: false,
            posted: VecDeque::new(),
            free: (0..DEPTH).collect(),
            count: 0,
        }
    }

    /// The queue exists no longer.
    pub(crate) fn forget(&mut self) {
        *self = Self { count: self.count, ..Self::new(self.index, self.pd) };
    }

    /// Whether one of its receives must fail, or may.
    pub(crate) fn is_spoilt(&self) -> bool {
        self.posted.iter().any(Receive::is_spoilt)
    }
}

impl World<'_> {
    /// The receive that `end` fills next.
    pub(crate) fn next_receive(&self, end: EndId) -> Option<&Receive> {
        let this = &self.ends[end];
        match this.srq {
            None => this.receives.front(),
            Some(at) => this.taken.as_ref().or(self.hosts[this.host].srqs[at].posted.front()),
        }
    }

    /// `end` begins to fill a receive: one from a shared queue belongs to it from now on.
    pub(crate) fn take_receive(&mut self, end: EndId) {
        let this = &mut self.ends[end];
        let Some(at) = this.srq.filter(|_| this.taken.is_none()) else { return };
        let srq = &mut self.hosts[this.host].srqs[at];
        this.taken = srq.posted.pop_front();
        if this.taken.is_some() && srq.limit > srq.posted.len() as u64 {
            (srq.limit, srq.due) = (0, true);
        }
    }

    /// A receive of `end` completes.
    pub(crate) fn pop_receive(&mut self, end: EndId) -> Option<Receive> {
        self.take_receive(end);
        let this = &mut self.ends[end];
        match this.srq {
            None => {
                this.receives_popped += 1;
                this.receives.pop_front()
            }
            Some(at) => {
                let receive = this.taken.take()?;
                self.hosts[this.host].srqs[at].free.push(receive.slot);
                Some(receive)
            }
        }
    }

    /// The queue pair of `end` is gone or was reset: the receive that it took is again the oldest
    /// of the shared queue.
    pub(crate) fn give_back(&mut self, end: EndId) {
        let this = &mut self.ends[end];
        if let (Some(at), Some(receive)) = (this.srq, this.taken.take()) {
            self.hosts[this.host].srqs[at].posted.push_front(receive);
        }
    }

    /// Judges the events of reached limits.
    pub(crate) fn limit_events(&mut self, host: usize) -> Verdict {
        let Host { engine: Some(engine), srqs, .. } = &mut self.hosts[host] else { return Ok(()) };
        while let Some(id) = engine.poll_srq_event() {
            let srq = srqs.iter_mut().find(|srq| srq.id == Some(id));
            let srq = srq.ok_or("the limit of a shared receive queue that is not there")?;
            self.tally.digest.add(u64::from(id.0) + 99);
            if srq.due {
                srq.due = false;
            } else if srq.limit > srq.posted.len() as u64 {
                srq.limit = 0;
            } else {
                return Err(format!(
                    "host {host}: a shared receive queue with {} receives reached its limit, {}",
                    srq.posted.len(),
                    srq.limit
                ));
            }
        }
        if srqs.iter().any(|srq| srq.due) {
            return Err(format!("host {host}: no event for a limit that was reached"));
        }
        Ok(())
    }

    /// Makes the shared receive queues of a host that has just started.
    pub(crate) fn share(&mut self, host: usize) -> Verdict {
        for at in 0..self.hosts[host].srqs.len() {
            let Host { engine: Some(engine), srqs, .. } = &mut self.hosts[host] else { continue };
            let srq = &mut srqs[at];
            if srq.id.is_none() {
                let init = SrqInit { pd: PdId(srq.pd), max_wr: srq.depth as u32, max_sge: SGES };
                srq.id = Some(engine.create_srq(&init).ok_or("no shared receive queue")?);
                self.tally.steps += 1;
            }
        }
        Ok(())
    }

    fn register_shared(&mut self, host: usize, at: usize) {
        let key = self.random.bits();
        let Host { ram, srqs, .. } = &mut self.hosts[host];
        let srq = &mut srqs[at];
        if srq.key.is_some() {
            return;
        }
        let (zone, place) = (Zone::Receive, srq.index as u64 * stride());
        let host = place + zone.offset();
        let start = base_of(0, ram.arena.len() as u64) + host;
        let region =
            Region { pd: PdId(srq.pd), start, len: zone.len(), host, access: zone.access() };
        ram.registered[srq.index][zone as usize] = true;
        srq.key = ram.regions.insert(region, key);
        self.tally.steps += 1;
    }

    /// The program serves a shared receive queue: it posts receives, now and then wrong ones, and
    /// changes depth and limit.
    pub(crate) fn tend(&mut self, host: usize, at: usize) -> Verdict {
        self.register_shared(host, at);
        if self.stage != Stage::Storm {
            self.resize(host, at, DEPTH, 0)?;
        } else if self.random.one_in(10) {
            let (depth, limit) = (self.random.below(DEPTH + 1), self.random.below(DEPTH + 1));
            self.resize(host, at, depth, limit)?;
        }
        while !self.random.one_in(3) && !self.is_full(host, at) {
            self.post_shared(host, at)?;
        }
        if self.is_full(host, at) && self.random.one_in(20) {
            self.post_shared(host, at)?;
        }
        Ok(())
    }

    /// Receives in the queue, and those that ends took and have not completed: they keep their
    /// slots.
    fn held(&self, host: usize, at: usize) -> u64 {
        let host = &self.hosts[host];
        let taken =
            |end: &&EndId| self.ends[**end].srq == Some(at) && self.ends[**end].taken.is_some();
        (host.srqs[at].posted.len() + host.ends.iter().filter(taken).count()) as u64
    }

    fn is_full(&self, host: usize, at: usize) -> bool {
        self.held(host, at) >= self.hosts[host].srqs[at].depth
    }

    fn resize(&mut self, host: usize, at: usize, depth: u64, limit: u64) -> Verdict {
        let held = self.held(host, at);
        let Host { engine: Some(engine), srqs, .. } = &mut self.hosts[host] else { return Ok(()) };
        let id = srqs_id(&srqs[at])?;
        let srq = &mut srqs[at];
        let expected = match () {
            () if depth == 0 || depth < held => Err(SrqError::Depth),
            () if limit > depth => Err(SrqError::Limit),
            () => Ok(()),
        };
        let change = SrqChange { max_wr: Some(depth as u32), srq_limit: Some(limit as u32) };
        self.tally.steps += 1;
        let found = engine.modify_srq(id, &change);
        if found != expected {
            return Err(format!("host {host}: {change:?} was answered with {found:?}"));
        }
        if found.is_ok() {
            (srq.depth, srq.limit) = (depth, limit);
        }
        Ok(())
    }

    fn post_shared(&mut self, host: usize, at: usize) -> Verdict {
        let full = self.is_full(host, at);
        let garbage = self.stage == Stage::Storm && self.random.one_in(300);
        let garbage = garbage && self.has.faults.garbage_receive;
        let short = garbage && self.random.one_in(2);
        let room = if short { self.random.below(LONGEST) } else { LONGEST };
        let srq = &mut self.hosts[host].srqs[at];
        let slot = if full { 0 } else { srq.free.pop().ok_or("a place was lost")? };
        srq.count += u64::from(!full);
        let id = 1 << RECEIVE | 1 << SHARED | srq.count;
        let (key, index) = (srq.key.unwrap_or_default(), srq.index as u64);
        let start = index * stride() + Zone::Receive.offset() + slot * LONGEST;
        let list = self.pieces(start, room, LONGEST);
        let Host { engine: Some(engine), srqs, ram, .. } = &mut self.hosts[host] else {
            return Ok(());
        };
        let bad = garbage && !short;
        let lkey = if bad { Key(key.0 ^ 0x100) } else { key };
        let base = base_of(0, ram.arena.len() as u64);
        let sge = |(at, len): &Piece| Sge { addr: base + at, len: *len, lkey };
        let sges: Vec<Sge> = list.iter().map(sge).collect();
        let id_of = srqs_id(&srqs[at])?;
        let posted = engine.post_srq_recv(id_of, &RecvWr { wr_id: id, sges: &sges });
        let expected = if full { Err(PostError::Full) } else { Ok(()) };
        if posted != expected {
            return Err(format!("host {host}: a shared receive was answered with {posted:?}"));
        }
        self.tally.steps += 1;
        if !full {
            srqs[at].posted.push_back(Receive { id, list, room: room as u32, bad, slot });
            self.tally.ops += 1;
            self.tally.faults.garbage_receive += u64::from(garbage);
        }
        self.settle(host, None)
    }

    /// Deregisters the memory of a shared queue while receives name it.
    pub(crate) fn deregister_shared(&mut self, host: usize, at: usize) {
        let Host { ram, srqs, ends, .. } = &mut self.hosts[host];
        let srq = &mut srqs[at];
        let Some(key) = srq.key.take() else { return };
        ram.registered[srq.index][Zone::Receive as usize] = false;
        ram.regions.remove(key);
        srq.posted.iter_mut().for_each(|receive| receive.bad = true);
        for end in ends {
            let this = &mut self.ends[*end];
            if let Some(receive) = this.taken.as_mut().filter(|_| this.srq == Some(at)) {
                receive.bad = true;
            }
        }
        self.tally.steps += 1;
    }

    /// The program destroys a shared receive queue, with all queue pairs that use it, and makes
    /// another one.
    pub(crate) fn renew(&mut self, host: usize, at: usize) -> Verdict {
        let users: Vec<EndId> = self.hosts[host]
            .ends
            .iter()
            .copied()
            .filter(|end| self.ends[*end].srq == Some(at) && self.ends[*end].qpn.is_some())
            .collect();
        self.destroy_shared(host, at, users.is_empty())?;
        if users.is_empty() {
            return self.share(host);
        }
        for end in users {
            self.destroy(end)?;
        }
        self.destroy_shared(host, at, true)?;
        self.share(host)
    }

    /// Destroys the queue, which must be refused while a queue pair uses it.
    fn destroy_shared(&mut self, host: usize, at: usize, free: bool) -> Verdict {
        let Host { engine: Some(engine), srqs, ram, .. } = &mut self.hosts[host] else {
            return Ok(());
        };
        let srq = &mut srqs[at];
        let found = engine.destroy_srq(srqs_id(srq)?);
        self.tally.steps += 1;
        if found != if free { Ok(()) } else { Err(SrqError::InUse) } {
            return Err(format!("host {host}: a shared receive queue's end: {found:?}"));
        }
        if free {
            if let Some(key) = srq.key {
                ram.registered[srq.index][Zone::Receive as usize] = false;
                ram.regions.remove(key);
            }
            srq.forget();
        }
        Ok(())
    }
}

fn srqs_id(srq: &Shared) -> Result<SrqId, String> {
    srq.id.ok_or_else(|| "a shared receive queue that is not there".to_owned())
}
