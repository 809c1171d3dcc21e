//! Shared receive queues: any queue pair that needs a receive takes one from there.
//!
//! A queue pair takes a receive when a message begins to fill it, and moves it to its own queue,
//! which has room for one. From there on everything is as for receives of its own. If the queue
//! pair is reset or destroyed, the receives that it took and did not complete go back. If it
//! breaks, it flushes them. Receives that no queue pair took stay (`ibv_create_srq(3)`).

use core::fmt;
use std::collections::VecDeque;

use crate::mem::{AccessError, Memory, PdId};
use crate::qp::post::PostError;
use crate::qp::rq::{Received, RecvQueue};
use crate::types::Key;
use crate::verbs::{RecvWr, SrqId};

/// The arguments of creation (`struct ibv_srq_init_attr`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SrqInit {
    /// Protection domain of the memory of its receives; a queue pair's own domain does not matter.
    pub pd: PdId,
    /// Depth, at least 1.
    pub max_wr: u32,
    /// Scatter-gather elements of a receive.
    pub max_sge: u32,
}

/// Attributes to change (`ibv_modify_srq(3)`); the mask is which of them are `Some`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SrqChange {
    /// `IBV_SRQ_MAX_WR`: another depth.
    pub max_wr: Option<u32>,
    /// `IBV_SRQ_LIMIT`: when a message needs a receive and fewer than this remain after it, there
    /// is one event, and the limit is 0 again. 0 means no event.
    pub srq_limit: Option<u32>,
}

/// Attributes of a shared receive queue (`struct ibv_srq_attr`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SrqAttr {
    /// Depth.
    pub max_wr: u32,
    /// Scatter-gather elements of a receive.
    pub max_sge: u32,
    /// The limit that still waits for its event, or 0.
    pub srq_limit: u32,
}

/// Why a shared receive queue cannot be changed or destroyed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SrqError {
    /// No such queue (`EINVAL`).
    Unknown,
    /// Queue pairs use it (`EBUSY`).
    InUse,
    /// The depth is 0, or less than the number of receives that are posted or taken (`EINVAL`).
    Depth,
    /// The limit is above the depth (`EINVAL`).
    Limit,
}

impl fmt::Display for SrqError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unknown => "no such shared receive queue",
            Self::InUse => "queue pairs use the shared receive queue: destroy them first",
            Self::Depth => "the depth must be at least 1, and at least the posted receives",
            Self::Limit => "srq_limit must not exceed the depth",
        })
    }
}

impl core::error::Error for SrqError {}

#[derive(Debug)]
struct Srq {
    pd: PdId,
    queue: RecvQueue,
    /// Receives that queue pairs have taken and not completed: their slots stay reserved.
    taken: u64,
    limit: u32,
    users: u32,
}

/// All shared receive queues, by their numbers.
#[derive(Debug, Default)]
pub(crate) struct Srqs {
    slots: Vec<Option<Srq>>,
    /// Queues that reached their limit.
    pub(crate) events: VecDeque<SrqId>,
}

impl Srqs {
    fn get(&self, id: SrqId) -> Option<&Srq> {
        self.slots.get(id.0 as usize)?.as_ref()
    }

    fn get_mut(&mut self, id: SrqId) -> Option<&mut Srq> {
        self.slots.get_mut(id.0 as usize)?.as_mut()
    }

    /// Adds a queue pair as a user. Returns the queue's domain, and an own queue for the receives
    /// that the queue pair takes.
    pub(crate) fn join(&mut self, id: SrqId) -> Option<(PdId, RecvQueue)> {
        let srq = self.get_mut(id)?;
        srq.users += 1;
        Some((srq.pd, RecvQueue::new(1, srq.queue.max_sge())))
    }

    /// Removes a queue pair as a user.
    pub(crate) fn leave(&mut self, id: SrqId) {
        if let Some(srq) = self.get_mut(id) {
            srq.users -= 1;
        }
    }

    /// A message needs a receive; `remain` will be left after it. Queues the event if that is less
    /// than the limit; limit 0 means no event.
    #[inline]
    fn watch(&mut self, id: SrqId, remain: u64) {
        let Some(srq) = self.get_mut(id) else { return };
        if remain < u64::from(srq.limit) {
            srq.limit = 0;
            self.events.push_back(id);
        }
    }

    /// Moves the oldest receive to `own`.
    #[inline]
    fn take(&mut self, id: SrqId, own: &mut RecvQueue) {
        let Some(srq) = self.get_mut(id).filter(|srq| srq.queue.len() > 0) else { return };
        srq.queue.hand_over(own);
        srq.taken += 1;
        let remain = srq.queue.len();
        self.watch(id, remain);
    }

    /// Counts a taken receive as done.
    #[inline]
    pub(crate) fn complete(&mut self, id: SrqId) {
        if let Some(srq) = self.get_mut(id) {
            srq.taken -= 1;
        }
    }

    /// Takes back a receive that will not be completed: it is the oldest again.
    pub(crate) fn give_back(&mut self, id: SrqId, own: &mut RecvQueue) {
        if let Some(srq) = self.get_mut(id).filter(|_| own.len() > 0) {
            own.hand_back(&mut srq.queue);
            srq.taken -= 1;
        }
    }

    /// Whether a receive that no queue pair took names the region `key`.
    pub(crate) fn uses(&self, key: Key) -> bool {
        self.slots.iter().flatten().any(|srq| srq.queue.uses(key))
    }

    pub(crate) fn count(&self) -> usize {
        self.slots.iter().flatten().count()
    }

    /// Adds a queue, at the first free number; `None` if its depth is 0.
    pub(crate) fn insert(&mut self, init: &SrqInit) -> Option<SrqId> {
        if init.max_wr == 0 {
            return None;
        }
        let free = self.slots.iter().position(Option::is_none);
        let index = free.unwrap_or(self.slots.len());
        if index == self.slots.len() {
            self.slots.push(None);
        }
        let queue = RecvQueue::new(init.max_wr, init.max_sge);
        self.slots[index] = Some(Srq { pd: init.pd, queue, taken: 0, limit: 0, users: 0 });
        self.reserve_events();
        u32::try_from(index).ok().map(SrqId)
    }

    pub(crate) fn modify(&mut self, id: SrqId, change: &SrqChange) -> Result<(), SrqError> {
        let srq = self.get_mut(id).ok_or(SrqError::Unknown)?;
        let depth = change.max_wr.unwrap_or(srq.queue.depth());
        if depth == 0 || u64::from(depth) < srq.queue.len() + srq.taken {
            return Err(SrqError::Depth);
        }
        if change.srq_limit.unwrap_or(srq.limit) > depth {
            return Err(SrqError::Limit);
        }
        if depth != srq.queue.depth() {
            srq.queue.resize(depth);
        }
        srq.limit = change.srq_limit.unwrap_or(srq.limit);
        self.reserve_events();
        Ok(())
    }

    pub(crate) fn query(&self, id: SrqId) -> Option<SrqAttr> {
        let srq = self.get(id)?;
        let (max_wr, max_sge) = (srq.queue.depth(), srq.queue.max_sge());
        Some(SrqAttr { max_wr, max_sge, srq_limit: srq.limit })
    }

    #[inline]
    pub(crate) fn post(&mut self, id: SrqId, wr: &RecvWr<'_>) -> Result<(), PostError> {
        let srq = self.get_mut(id).ok_or(PostError::UnknownQp)?;
        if srq.queue.len() + srq.taken >= u64::from(srq.queue.depth()) {
            return Err(PostError::Full);
        }
        srq.queue.push(wr)
    }

    /// Removes a queue that no queue pair uses; its events are dropped.
    pub(crate) fn remove(&mut self, id: SrqId) -> Result<(), SrqError> {
        let srq = self.get(id).ok_or(SrqError::Unknown)?;
        if srq.users > 0 {
            return Err(SrqError::InUse);
        }
        self.slots[id.0 as usize] = None;
        self.events.retain(|of| *of != id);
        Ok(())
    }

    fn reserve_events(&mut self) {
        let room = (2 * self.slots.len()).saturating_sub(self.events.len());
        self.events.reserve(room);
    }
}

/// The receives of a queue pair: its own queue, and the shared one behind it.
#[derive(Debug)]
pub(crate) struct Receives<'a> {
    pub(crate) own: &'a mut RecvQueue,
    pub(crate) srqs: &'a mut Srqs,
    pub(crate) srq: Option<SrqId>,
    /// The receive that was retired from the queue and is about to complete.
    pub(crate) done: Option<Received>,
}

impl Receives<'_> {
    /// `wr_id` of the next receive. If a shared queue is empty, that may raise its limit event.
    #[inline]
    pub(crate) fn front(&mut self) -> Option<u64> {
        let own = self.own.front();
        if own.is_some() {
            return own;
        }
        let id = self.srq?;
        let front = self.srqs.get(id)?.queue.front();
        if front.is_none() {
            self.srqs.watch(id, 0);
        }
        front
    }

    /// The room of the next receive, in bytes.
    #[inline]
    pub(crate) fn room(&self) -> u32 {
        let shared = || Some(self.srqs.get(self.srq?)?.queue.room());
        if self.own.len() > 0 { self.own.room() } else { shared().unwrap_or(0) }
    }

    #[inline]
    fn take(&mut self) {
        if self.own.len() == 0
            && let Some(id) = self.srq
        {
            self.srqs.take(id, self.own);
        }
    }

    /// Places `src` at `offset` of the next receive's list, which is in the domain `pd`.
    #[inline]
    pub(crate) fn scatter(
        &mut self,
        offset: u32,
        src: &[u8],
        pd: PdId,
        memory: &mut impl Memory,
    ) -> Result<(), AccessError> {
        self.take();
        self.own.scatter(offset, src, pd, memory)
    }

    /// Retires the next receive: it is about to complete.
    #[inline]
    pub(crate) fn complete(&mut self, received: Received) {
        self.done = Some(received);
        self.take();
        self.own.pop();
        if let Some(id) = self.srq {
            self.srqs.complete(id);
        }
    }
}
