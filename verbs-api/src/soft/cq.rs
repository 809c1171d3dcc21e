//! Completion queues and the channels that announce their completions.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

use rocinante_stack::verbs::{CqId, Cqe};

use super::Device;
use super::announce::{ChannelShared, CqShared};
use crate::error::VerbsError;
use crate::listeners::Listeners;

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
            channel.queues.add(cq.shared.number, &cq);
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
        self.shared.arm(solicited_only);
    }

    pub(crate) fn has_channel(&self) -> bool {
        self.shared.has_channel()
    }

    fn check_overflow(&self) -> Result<(), VerbsError> {
        if self.shared.is_lost() {
            return Err(VerbsError::Busy(
                "the completion queue overflowed: make it as deep as the queues that complete to it",
            ));
        }
        Ok(())
    }
}

/// A completion event channel.
#[derive(Debug, Clone)]
pub(crate) struct Channel {
    device: Arc<Device>,
    shared: Arc<ChannelShared>,
    queues: Arc<Listeners<Cq>>,
}

impl Channel {
    pub(crate) fn create(device: &Arc<Device>) -> Result<Self, VerbsError> {
        let (shared, queues) = (Arc::new(ChannelShared::new()?), Arc::new(Listeners::new()));
        Ok(Self { device: device.clone(), shared, queues })
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The queue of the next event, if there is one now.
    pub(crate) fn try_event(&self) -> Option<Arc<Cq>> {
        loop {
            let number = self.shared.next()?;
            if let Some(cq) = self.queues.find(number) {
                return Some(cq);
            }
        }
    }

    /// Sleeps on the channel and on the port until `until`, and drives the device on this thread.
    pub(crate) fn wait(&self, until: Option<Instant>) {
        self.device.core.wait(self.shared.fd(), until);
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.shared.fd()
    }
}
