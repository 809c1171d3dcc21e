//! Completion queues and the channels that announce their completions.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rocinante_stack::verbs::{CqId, Cqe};

use crate::context::ContextInner;
use crate::error::VerbsError;
use crate::wake;

/// A completion (`struct ibv_wc`).
pub type Wc = Cqe;

/// A completion queue as the progress sees it.
#[derive(Debug)]
pub(crate) struct CqShared {
    id: u32,
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
            channel.push(self.id);
        }
    }

    fn take(&self, out: &mut [Option<Wc>]) -> usize {
        let mut ring = self.ring.lock();
        let count = out.len().min(ring.len());
        for (slot, cqe) in out.iter_mut().zip(ring.drain(..count)) {
            *slot = Some(cqe);
        }
        count
    }

    fn take_one(&self) -> Option<Wc> {
        self.ring.lock().pop_front()
    }

    fn is_empty(&self) -> bool {
        self.ring.lock().is_empty()
    }
}

/// The part of a queue that lives as long as somebody uses it.
#[derive(Debug)]
pub(crate) struct CqInner {
    pub(crate) ctx: Arc<ContextInner>,
    pub(crate) shared: Arc<CqShared>,
    _channel: Option<CompChannel>,
}

impl Drop for CqInner {
    fn drop(&mut self) {
        self.ctx.core.hold().host.cqs.remove(self.shared.id);
    }
}

/// A completion queue (`ibv_create_cq(3)`). Cheap to clone; it lives until the last clone and the last queue pair that uses
/// it are gone.
#[derive(Debug, Clone)]
pub struct Cq {
    pub(crate) inner: Arc<CqInner>,
}

impl Cq {
    pub(crate) fn create(
        ctx: &Arc<ContextInner>,
        depth: u32,
        channel: Option<&CompChannel>,
    ) -> Result<Self, VerbsError> {
        let max = ctx.limits.max_cqe;
        if depth == 0 || depth > max {
            return Err(VerbsError::Invalid(format!(
                "a completion queue has 1 to {max} entries, not {depth}"
            )));
        }
        let mut shard = ctx.core.hold();
        if shard.host.cqs.len() >= ctx.limits.max_cq as usize {
            return Err(VerbsError::Limit {
                what: "completion queues",
                max: u64::from(ctx.limits.max_cq),
            });
        }
        let events = channel.map(|channel| channel.shared.clone());
        let id = shard.host.cqs.insert(|id| Arc::new(CqShared::new(id, depth as usize, events)));
        let shared = shard.host.cqs.get(id).expect("just inserted").clone();
        drop(shard);
        let inner = Arc::new(CqInner { ctx: ctx.clone(), shared, _channel: channel.cloned() });
        if let Some(channel) = channel {
            channel.shared.queues.lock().push((id, Arc::downgrade(&inner)));
        }
        Ok(Self { inner })
    }

    pub(crate) fn id(&self) -> CqId {
        CqId(self.inner.shared.id)
    }

    /// Its number among the device's queues, by which asynchronous events name it.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.inner.shared.id
    }

    /// How many completions it holds at most.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.inner.shared.capacity
    }

    /// Takes up to `out.len()` completions, oldest first, and returns how many (`ibv_poll_cq(3)`). If there is none, the
    /// device is driven first: this call receives and sends packets on the caller's thread.
    ///
    /// # Errors
    /// [`VerbsError::Busy`] once the queue has overflowed (`IBV_EVENT_CQ_ERR`): completions were lost, and the queue
    /// pairs that use it are in the error state. What is still in the queue can be taken first.
    pub fn poll(&self, out: &mut [Option<Wc>]) -> Result<usize, VerbsError> {
        let shared = &self.inner.shared;
        match shared.take(out) {
            0 => {}
            count => return Ok(count),
        }
        self.inner.ctx.core.drive();
        match shared.take(out) {
            0 => self.check_overflow().map(|()| 0),
            count => Ok(count),
        }
    }

    /// Takes one completion, if there is one: as [`poll`](Self::poll).
    ///
    /// # Errors
    /// As [`poll`](Self::poll).
    pub fn poll_one(&self) -> Result<Option<Wc>, VerbsError> {
        if let Some(wc) = self.inner.shared.take_one() {
            return Ok(Some(wc));
        }
        self.inner.ctx.core.drive();
        match self.inner.shared.take_one() {
            Some(wc) => Ok(Some(wc)),
            None => self.check_overflow().map(|()| None),
        }
    }

    /// Polls until there is a completion: spins for as long as that may pay, then sleeps.
    ///
    /// # Errors
    /// [`VerbsError::TimedOut`] after `timeout`; as [`poll`](Self::poll).
    pub fn wait_one(&self, timeout: Duration) -> Result<Wc, VerbsError> {
        let deadline = Instant::now() + timeout;
        let mut spins = 0u32;
        loop {
            if let Some(wc) = self.poll_one()? {
                return Ok(wc);
            }
            spins += 1;
            if spins.is_multiple_of(64) && Instant::now() >= deadline {
                return Err(VerbsError::TimedOut);
            }
            if spins > 100_000 {
                // The background thread drives while this one sleeps.
                std::thread::sleep(Duration::from_micros(50));
            } else {
                std::hint::spin_loop();
            }
        }
    }

    /// Asks for one event on the channel when the next completion arrives (`ibv_req_notify_cq(3)`), or the next
    /// solicited or failed one. Completions that are there already make none: poll once after arming.
    ///
    /// # Errors
    /// [`VerbsError::Invalid`] if the queue has no channel.
    pub fn req_notify(&self, solicited_only: bool) -> Result<(), VerbsError> {
        if self.inner.shared.channel.is_none() {
            return Err(VerbsError::Invalid("the completion queue has no channel".into()));
        }
        let level = if solicited_only { ARMED_SOLICITED } else { ARMED };
        // The stronger of two wishes stays.
        self.inner.shared.armed.fetch_max(level, Ordering::SeqCst);
        Ok(())
    }

    /// Destroys the queue (`ibv_destroy_cq(3)`).
    ///
    /// # Errors
    /// [`VerbsError::Busy`], with the queue, while a queue pair or another clone uses it.
    pub fn destroy(self) -> Result<(), (Self, VerbsError)> {
        match Arc::try_unwrap(self.inner) {
            Ok(_) => Ok(()),
            Err(inner) => {
                let why =
                    VerbsError::Busy("a queue pair or another handle uses the completion queue");
                Err((Self { inner }, why))
            }
        }
    }

    fn check_overflow(&self) -> Result<(), VerbsError> {
        if self.inner.shared.overflowed.load(Ordering::Relaxed) && self.inner.shared.is_empty() {
            return Err(VerbsError::Busy(
                "the completion queue overflowed: make it as deep as the queues that complete to it",
            ));
        }
        Ok(())
    }
}

impl PartialEq for Cq {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

/// A channel as the progress sees it.
#[derive(Debug)]
pub(crate) struct ChannelShared {
    fd: OwnedFd,
    events: Mutex<VecDeque<u32>>,
    queues: Mutex<Vec<(u32, Weak<CqInner>)>>,
}

impl ChannelShared {
    fn push(&self, cq: u32) {
        self.events.lock().push_back(cq);
        wake::notify(&self.fd);
    }
}

/// A completion event channel (`ibv_create_comp_channel(3)`): a descriptor that becomes readable when a queue that was armed
/// by [`Cq::req_notify`] completes something.
#[derive(Debug, Clone)]
pub struct CompChannel {
    ctx: Arc<ContextInner>,
    pub(crate) shared: Arc<ChannelShared>,
}

impl CompChannel {
    pub(crate) fn create(ctx: &Arc<ContextInner>) -> Result<Self, VerbsError> {
        let shared = ChannelShared {
            fd: wake::eventfd()?,
            events: Mutex::new(VecDeque::with_capacity(64)),
            queues: Mutex::new(Vec::new()),
        };
        Ok(Self { ctx: ctx.clone(), shared: Arc::new(shared) })
    }

    /// The queue of the next event, if there is one now.
    #[must_use]
    pub fn try_event(&self) -> Option<Cq> {
        loop {
            let id = {
                let mut events = self.shared.events.lock();
                let id = events.pop_front();
                if events.is_empty() {
                    wake::clear(&self.shared.fd);
                }
                id?
            };
            let mut queues = self.shared.queues.lock();
            queues.retain(|(_, queue)| queue.strong_count() > 0);
            let found = queues.iter().find(|(other, _)| *other == id);
            if let Some(inner) = found.and_then(|(_, queue)| queue.upgrade()) {
                return Some(Cq { inner });
            }
        }
    }

    /// Waits for the next event (`ibv_get_cq_event(3)`): sleeps on the channel and on the port, and drives the device on this
    /// thread. Events need no acknowledgement.
    ///
    /// # Errors
    /// [`VerbsError::TimedOut`] if there is none within `timeout`; `None` waits for ever.
    pub fn wait_event(&self, timeout: Option<Duration>) -> Result<Cq, VerbsError> {
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        loop {
            if let Some(cq) = self.try_event() {
                return Ok(cq);
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(VerbsError::TimedOut);
            }
            self.ctx.core.wait(self.shared.fd.as_fd(), deadline);
        }
    }
}

impl AsFd for CompChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.fd.as_fd()
    }
}
