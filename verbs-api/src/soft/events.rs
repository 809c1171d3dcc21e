//! The asynchronous events of all shards of a device, in one queue with one descriptor.

use std::collections::VecDeque;

use super::shard::Shard;
use crate::model::event::AsyncEvent;
use crate::provider::sync::Mutex;
use crate::provider::wake::{self, AsFd as _, BorrowedFd, OwnedFd};

/// The events that the program has not taken yet.
#[derive(Debug)]
pub(crate) struct Events {
    queue: Mutex<VecDeque<AsyncEvent>>,
    /// Readable while there are events.
    fd: OwnedFd,
}

impl Events {
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self { queue: Mutex::new(VecDeque::new()), fd: wake::eventfd()? })
    }

    /// Takes the events of a shard.
    pub(super) fn collect(&self, shard: &mut Shard) {
        let Some(first) = shard.poll_event() else { return };
        let mut events = self.queue.lock();
        events.push_back(first);
        while let Some(event) = shard.poll_event() {
            events.push_back(event);
        }
        wake::notify(&self.fd);
    }

    /// Takes the oldest event.
    pub(crate) fn next(&self) -> Option<AsyncEvent> {
        let mut events = self.queue.lock();
        let event = events.pop_front();
        if events.is_empty() {
            wake::clear(&self.fd);
        }
        event
    }

    /// Removes events that no longer apply.
    pub(crate) fn forget(&self, gone: impl Fn(&AsyncEvent) -> bool) {
        let mut events = self.queue.lock();
        events.retain(|event| !gone(event));
        if events.is_empty() {
            wake::clear(&self.fd);
        }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
