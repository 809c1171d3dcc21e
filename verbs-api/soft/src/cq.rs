//! Completion queues and the channels that announce their completions.

use std::os::fd::{AsRawFd as _, BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rocinante_stack::types::Qpn;
use rocinante_stack::verbs::{CqId, Cqe};

use super::announce::{ChannelShared, CqShared, End};
use super::charge::Charge;
use super::events::Owner;
use super::faults::Verb;
use super::rivals::{self, EmptyPolls};
use super::{Device, gone};
use crate::model::error::VerbsError;
use crate::model::event::AsyncEvent;
use crate::model::wc::Wc;
use crate::provider::listeners::Listeners;
use crate::provider::wakers::{Wakers, Woken};

/// A completion queue.
#[derive(Debug)]
pub struct Cq {
    device: Arc<Device>,
    shared: Arc<CqShared>,
    shards: Users,
    channel: Option<Channel>,
    empty_polls: EmptyPolls,
    _charge: Charge,
}

/// The shards of the queue pairs that complete to a queue: polling the queue drives them.
#[derive(Debug)]
struct Users {
    counts: Mutex<Vec<u32>>,
    /// One bit for each shard.
    set: AtomicU64,
}

impl Users {
    fn new(shards: usize) -> Self {
        Self { counts: Mutex::new(vec![0; shards]), set: AtomicU64::new(0) }
    }

    fn add(&self, shard: usize) {
        self.change(shard, |count| *count += 1);
    }

    fn remove(&self, shard: usize) {
        self.change(shard, |count| *count -= 1);
    }

    fn change(&self, shard: usize, change: impl FnOnce(&mut u32)) {
        let mut counts = self.counts.lock();
        change(&mut counts[shard]);
        let bit = |(shard, count): (usize, &u32)| u64::from(*count > 0) << shard;
        self.set.store(counts.iter().enumerate().map(bit).sum(), Ordering::Relaxed);
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        let id = self.shared.id;
        let mut shards = self.device.shards.hold_all();
        for shard in shards.iter_mut() {
            shard.host.cqs.remove(id);
        }
        self.shared.leave_channel();
        let is_of =
            |event: &AsyncEvent| matches!(event, AsyncEvent::CqOverflow { cq } if *cq == id);
        self.device.remove_owner(Owner::Cq(id), is_of);
    }
}

impl Cq {
    pub fn create(
        device: &Arc<Device>,
        depth: u32,
        channel: Option<&Channel>,
    ) -> Result<Arc<Self>, VerbsError> {
        device.called(Verb::CreateCq)?;
        let charge = Charge::object(device.hca())?;
        let mut shards = device.shards.hold_all();
        let shard = shards.first();
        if shard.host.cqs.len() >= device.limits.max_cq as usize {
            return Err(VerbsError::Limit {
                what: "completion queues",
                max: u64::from(device.limits.max_cq),
            });
        }
        let events = channel.map(|channel| channel.shared.clone());
        let id = shard.host.cqs.insert(|id| {
            let shared = CqShared::new(id, depth as usize, events);
            Arc::new(if device.judges_completions() { shared.judged() } else { shared })
        });
        let shared = shard.host.cqs.get(id).expect("just inserted").clone();
        for shard in &mut shards.rest {
            // All shards assign and free numbers in the same order.
            let same = shard.host.cqs.insert(|_| shared.clone());
            debug_assert_eq!(same, id);
        }
        if shards.iter_mut().all(|shard| shard.io.is_broken()) {
            shared.gone(&mut Woken::default());
        }
        device.add_owner(Owner::Cq(id));
        drop(shards);
        let users = Users::new(device.shards.count());
        let (device, channel_of) = (device.clone(), channel.cloned());
        let cq = Arc::new(Self {
            device,
            shared,
            shards: users,
            channel: channel_of,
            empty_polls: EmptyPolls::default(),
            _charge: charge,
        });
        if let Some(channel) = channel {
            channel.queues.add(cq.shared.number, &cq);
        }
        Ok(cq)
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// A queue pair of this shard now completes to it.
    pub(super) fn used_by(&self, shard: usize) {
        self.shards.add(shard);
        if let Some(channel) = &self.channel {
            channel.shards.fetch_or(1 << shard, Ordering::Relaxed);
        }
    }

    /// A queue pair of this shard no longer completes to it.
    pub(super) fn left_by(&self, shard: usize) {
        self.shards.remove(shard);
    }

    fn drive(&self) {
        self.device.shards.drive(self.shards.set.load(Ordering::Relaxed));
    }

    pub fn id(&self) -> CqId {
        CqId(self.shared.id)
    }

    pub fn depth(&self) -> usize {
        self.shared.capacity()
    }

    pub fn resize(&self, depth: u32) -> Result<(), VerbsError> {
        self.device.called(Verb::ResizeCq)?;
        self.device.shards.send_waiting(self.shards.set.load(Ordering::Relaxed));
        self.shared.resize(depth as usize).map_err(|waiting| {
            VerbsError::Invalid(format!(
                "{waiting} completions wait in the queue, and it would have room for {depth}: \
                 poll it first"
            ))
        })
    }

    /// The queue pair was reset or destroyed, and all its completions have been delivered.
    pub(super) fn forget(&self, qpn: Qpn) {
        self.shared.forget(qpn);
    }

    pub fn poll(&self, out: &mut [Wc]) -> Result<usize, VerbsError> {
        self.poll_as(out, Wc::of)
    }

    /// As [`poll`](Self::poll), in the caller's own form of a completion.
    #[inline]
    pub fn poll_as<T>(&self, out: &mut [T], make: impl Fn(Cqe) -> T) -> Result<usize, VerbsError> {
        match self.take_or_drive(out, make) {
            0 if self.shared.has_ended() => self.check_end().map(|()| 0),
            count => Ok(count),
        }
    }

    /// The same without the error at the end.
    #[inline]
    pub fn take_or_drive<T>(&self, out: &mut [T], make: impl Fn(Cqe) -> T) -> usize {
        let take = || Some(self.shared.take(out, &make)).filter(|count| *count > 0);
        self.find(take).unwrap_or(0)
    }

    /// What `take` finds, before the device is driven or after.
    #[inline]
    fn find<T>(&self, mut take: impl FnMut() -> Option<T>) -> Option<T> {
        let mut found = take();
        if found.is_none() {
            self.drive();
            found = take();
        }
        if found.is_none()
            && let Some(until) = self.empty_polls.missed()
        {
            self.rest(until);
            found = take();
        }
        if found.is_some() {
            self.empty_polls.found();
        }
        found
    }

    #[inline]
    pub fn has_ended(&self) -> bool {
        self.shared.has_ended()
    }

    pub fn poll_one(&self) -> Result<Option<Wc>, VerbsError> {
        match self.find(|| self.shared.take_one()) {
            Some(cqe) => Ok(Some(Wc::of(cqe))),
            None => self.check_end().map(|()| None),
        }
    }

    /// Sleeps until the queue or its shard's port has something, or `until`, and drives the device.
    #[cold]
    pub fn rest(&self, until: Instant) {
        rivals::with_bell(|task, fd| {
            if !self.shared.rests(task) {
                self.device.shards.rest(self.shards.set.load(Ordering::Relaxed), fd, until);
            }
        });
    }

    pub fn req_notify(&self, solicited_only: bool) {
        self.shared.arm(solicited_only);
        self.device.shards.expect(self.shards.set.load(Ordering::Relaxed));
    }

    pub fn has_channel(&self) -> bool {
        self.shared.has_channel()
    }

    pub fn tasks(&self) -> &Wakers {
        &self.shared.tasks
    }

    /// As [`poll_one`](Self::poll_one), for a task that sleeps if there is none: the background
    /// thread does not stand aside for it.
    pub fn poll_for_task(&self) -> Result<Option<Wc>, VerbsError> {
        if let Some(wc) = self.shared.take_one() {
            return Ok(Some(Wc::of(wc)));
        }
        self.device.shards.drive_for_task(self.shards.set.load(Ordering::Relaxed));
        self.take_now()
    }

    /// The next completion, without driving the device.
    pub fn take_now(&self) -> Result<Option<Wc>, VerbsError> {
        match self.shared.take_one() {
            Some(cqe) => Ok(Some(Wc::of(cqe))),
            None => self.check_end().map(|()| None),
        }
    }

    /// The error if no more completions come.
    #[cold]
    pub fn check_end(&self) -> Result<(), VerbsError> {
        match self.shared.end() {
            None => Ok(()),
            Some(End::Overflow) => Err(VerbsError::Busy(
                "the completion queue overflowed: make it as deep as the queues that complete to it",
            )),
            Some(End::Gone) => {
                // Requests that were staged while the interface went complete when the shards'
                // locks are free.
                self.device.shards.all().for_each(|core| drop(core.hold()));
                if self.shared.end().is_some() { Err(gone()) } else { Ok(()) }
            }
        }
    }
}

/// A sleep on a channel, from before it begins until it is dropped. The device counts on this
/// thread meanwhile to see packets.
#[derive(Debug)]
pub struct Sleep {
    device: Arc<Device>,
    channel: Arc<ChannelShared>,
    shards: u64,
    port: Option<(RawFd, bool)>,
    longest: Option<Duration>,
    woken: bool,
}

impl Sleep {
    /// The descriptor that is readable when there is an event.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.channel.fd()
    }

    /// The port to wait for, if one is, with whether to wait for room to send, too. It stays open
    /// as long as this.
    pub fn port(&self) -> Option<(RawFd, bool)> {
        self.port
    }

    /// The longest sleep.
    pub fn longest(&self) -> Option<Duration> {
        self.longest
    }

    /// The sleep is over, and not by [`fd`](Self::fd) alone.
    pub fn woken(&mut self) {
        self.woken = self.port.is_some();
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        self.device.shards.waited(self.shards, self.woken);
    }
}

/// A completion event channel.
#[derive(Debug, Clone)]
pub struct Channel {
    device: Arc<Device>,
    shared: Arc<ChannelShared>,
    queues: Arc<Listeners<Cq>>,
    /// Shards with queue pairs that complete to these queues, now or earlier.
    shards: Arc<AtomicU64>,
}

impl Channel {
    pub fn create(device: &Arc<Device>) -> Result<Self, VerbsError> {
        device.called(Verb::CreateChannel)?;
        let (shared, queues) = (Arc::new(ChannelShared::new()?), Arc::new(Listeners::new()));
        Ok(Self { device: device.clone(), shared, queues, shards: Arc::default() })
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The queue of the next event, if there is one now.
    pub fn try_event(&self) -> Option<Arc<Cq>> {
        loop {
            let number = self.shared.next()?;
            if let Some(cq) = self.queues.find(number) {
                return Some(cq);
            }
        }
    }

    /// Sleeps on the channel and the port until `until`, and drives the device on this thread. If
    /// several shards complete to its queues, the background threads drive them.
    pub fn wait(&self, until: Option<Instant>) {
        let shards = self.shards.load(Ordering::Relaxed);
        self.device.shards.wait(shards, self.shared.fd(), until);
    }

    /// Begins what [`wait`](Self::wait) does: the caller sleeps, on the descriptors of the result.
    pub fn sleep(&self) -> Sleep {
        let (device, channel) = (self.device.clone(), self.shared.clone());
        let shards = self.shards.load(Ordering::Relaxed);
        let (port, longest) = device.shards.waits(shards, None);
        let port = port.map(|(port, writable)| (port.as_raw_fd(), writable));
        Sleep { device, channel, shards, port, longest, woken: false }
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.shared.fd()
    }

    pub fn tasks(&self) -> &Wakers {
        &self.shared.tasks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shard_is_driven_until_its_last_queue_pair_has_left() {
        let users = Users::new(2);
        let set = || users.set.load(Ordering::Relaxed);
        [1, 0, 1].iter().for_each(|shard| users.add(*shard));
        assert_eq!(set(), 0b11);
        users.remove(1);
        assert_eq!(set(), 0b11);
        users.remove(0);
        assert_eq!(set(), 0b10);
        users.remove(1);
        assert_eq!(set(), 0);
    }
}
