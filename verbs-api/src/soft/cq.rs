//! Completion queues and the channels that announce their completions.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Instant;

use parking_lot::Mutex;
use rocinante_stack::verbs::{CqId, Cqe};

use super::Device;
use crate::error::VerbsError;
use crate::listeners::{Listeners, fresh_number};
use crate::wake;

/// A completion queue as the progress sees it.
#[derive(Debug)]
pub(crate) struct CqShared {
    id: u32,
    /// What its channel calls it.
    number: u64,
    capacity: usize,
    ring: Mutex<VecDeque<Cqe>>,
    armed: AtomicU8,
    overflowed: AtomicBool,
    channel: Option<Arc<ChannelShared>>,
}

/// What became of completions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pushed {
    /// They are in the queue.
    All,
    /// Some found no room; `news` if that never happened before.
    Overflow { news: bool },
}

const DISARMED: u8 = 0;
const ARMED_SOLICITED: u8 = 1;
const ARMED: u8 = 2;

impl CqShared {
    pub(crate) fn new(id: u32, capacity: usize, channel: Option<Arc<ChannelShared>>) -> Self {
        Self {
            id,
            number: fresh_number(),
            capacity,
            ring: Mutex::new(VecDeque::with_capacity(capacity)),
            armed: AtomicU8::new(DISARMED),
            overflowed: AtomicBool::new(false),
            channel,
        }
    }

    /// Appends completions.
    pub(crate) fn push(&self, completions: impl Iterator<Item = Cqe>) -> Pushed {
        let mut solicited = false;
        let mut fits = true;
        let mut ring = self.ring.lock();
        for cqe in completions {
            if ring.len() == self.capacity {
                fits = false;
                break;
            }
            solicited |= cqe.solicited;
            ring.push_back(cqe);
        }
        drop(ring);
        let news = !fits && !self.overflowed.swap(true, Ordering::Relaxed);
        if news {
            self.announce();
        }
        match self.armed.load(Ordering::SeqCst) {
            ARMED => self.announce(),
            ARMED_SOLICITED if solicited => self.announce(),
            _ => {}
        }
        if fits { Pushed::All } else { Pushed::Overflow { news } }
    }

    /// Disarms, and tells the channel if it was armed.
    fn announce(&self) {
        if self.armed.swap(DISARMED, Ordering::SeqCst) != DISARMED
            && let Some(channel) = &self.channel
        {
            channel.push(self.number);
        }
    }

    fn take(&self, out: &mut [Option<Cqe>]) -> usize {
        let mut ring = self.ring.lock();
        let count = out.len().min(ring.len());
        for (slot, cqe) in out.iter_mut().zip(ring.drain(..count)) {
            *slot = Some(cqe);
        }
        count
    }

    fn take_one(&self) -> Option<Cqe> {
        self.ring.lock().pop_front()
    }

    fn is_empty(&self) -> bool {
        self.ring.lock().is_empty()
    }
}

/// A completion queue.
#[derive(Debug)]
pub(crate) struct Cq {
    device: Arc<Device>,
    shared: Arc<CqShared>,
    _channel: Option<Channel>,
}

impl Drop for Cq {
    fn drop(&mut self) {
        self.device.core.hold().host.cqs.remove(self.shared.id);
    }
}

impl Cq {
    pub(crate) fn create(
        device: &Arc<Device>,
        depth: u32,
        channel: Option<&Channel>,
    ) -> Result<Arc<Self>, VerbsError> {
        let mut shard = device.core.hold();
        if shard.host.cqs.len() >= device.limits.max_cq as usize {
            return Err(VerbsError::Limit {
                what: "completion queues",
                max: u64::from(device.limits.max_cq),
            });
        }
        let events = channel.map(|channel| channel.shared.clone());
        let id = shard.host.cqs.insert(|id| Arc::new(CqShared::new(id, depth as usize, events)));
        let shared = shard.host.cqs.get(id).expect("just inserted").clone();
        drop(shard);
        let cq = Arc::new(Self { device: device.clone(), shared, _channel: channel.cloned() });
        if let Some(channel) = channel {
            channel.shared.queues.add(cq.shared.number, &cq);
        }
        Ok(cq)
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(crate) fn id(&self) -> CqId {
        CqId(self.shared.id)
    }

    pub(crate) fn depth(&self) -> usize {
        self.shared.capacity
    }

    pub(crate) fn poll(&self, out: &mut [Option<Cqe>]) -> Result<usize, VerbsError> {
        match self.shared.take(out) {
            0 => {}
            count => return Ok(count),
        }
        self.device.core.drive();
        match self.shared.take(out) {
            0 => self.check_overflow().map(|()| 0),
            count => Ok(count),
        }
    }

    pub(crate) fn poll_one(&self) -> Result<Option<Cqe>, VerbsError> {
        if let Some(wc) = self.shared.take_one() {
            return Ok(Some(wc));
        }
        self.device.core.drive();
        match self.shared.take_one() {
            Some(wc) => Ok(Some(wc)),
            None => self.check_overflow().map(|()| None),
        }
    }

    pub(crate) fn req_notify(&self, solicited_only: bool) {
        let level = if solicited_only { ARMED_SOLICITED } else { ARMED };
        // The stronger of two wishes stays.
        self.shared.armed.fetch_max(level, Ordering::SeqCst);
    }

    pub(crate) fn has_channel(&self) -> bool {
        self.shared.channel.is_some()
    }

    fn check_overflow(&self) -> Result<(), VerbsError> {
        if self.shared.overflowed.load(Ordering::Relaxed) && self.shared.is_empty() {
            return Err(VerbsError::Busy(
                "the completion queue overflowed: make it as deep as the queues that complete to it",
            ));
        }
        Ok(())
    }
}

/// A channel as the progress sees it.
#[derive(Debug)]
pub(crate) struct ChannelShared {
    fd: OwnedFd,
    /// Numbers of queues.
    events: Mutex<VecDeque<u64>>,
    queues: Listeners<Cq>,
}

impl ChannelShared {
    fn push(&self, cq: u64) {
        self.events.lock().push_back(cq);
        wake::notify(&self.fd);
    }
}

/// A completion event channel.
#[derive(Debug, Clone)]
pub(crate) struct Channel {
    device: Arc<Device>,
    shared: Arc<ChannelShared>,
}

impl Channel {
    pub(crate) fn create(device: &Arc<Device>) -> Result<Self, VerbsError> {
        let shared = ChannelShared {
            fd: wake::eventfd()?,
            events: Mutex::new(VecDeque::with_capacity(64)),
            queues: Listeners::new(),
        };
        Ok(Self { device: device.clone(), shared: Arc::new(shared) })
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The queue of the next event, if there is one now.
    pub(crate) fn try_event(&self) -> Option<Arc<Cq>> {
        loop {
            let number = {
                let mut events = self.shared.events.lock();
                let number = events.pop_front();
                if events.is_empty() {
                    wake::clear(&self.shared.fd);
                }
                number?
            };
            if let Some(cq) = self.shared.queues.find(number) {
                return Some(cq);
            }
        }
    }

    /// Sleeps on the channel and on the port until `until`, and drives the device on this thread.
    pub(crate) fn wait(&self, until: Option<Instant>) {
        self.device.core.wait(self.shared.fd.as_fd(), until);
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.shared.fd.as_fd()
    }
}
