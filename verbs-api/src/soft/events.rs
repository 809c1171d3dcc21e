//! The asynchronous events of a device: those of all its shards, in one queue with one descriptor.

use std::collections::VecDeque;

use super::shard::Shard;
use crate::event::AsyncEvent;
use crate::sync::Mutex;
use crate::wake::{self, AsFd as _, BorrowedFd, OwnedFd};

/// The events that the program has not taken.
#[derive(Debug)]
pub(crate) struct Events {
    queue: Mutex<VecDeque<AsyncEvent>>,
    /// Readable while there are some.
    fd: OwnedFd,
}

impl Events {
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self { queue: Mutex::new(VecDeque::new()), fd: wake::eventfd()? })
    }

    /// Takes those of a shard.
    pub(super) fn collect(&self, shard: &mut Shard) {
        let Some(first) = shard.poll_event() else { return };
        let mut events = self.queue.lock();
        events.push_back(first);
        while let Some(event) = shard.poll_event() {
            events.push_back(event);
        }
        wake::notify(&self.fd);
    }

    /// The oldest.
    pub(crate) fn next(&self) -> Option<AsyncEvent> {
        let mut events = self.queue.lock();
        let event = events.pop_front();
        if events.is_empty() {
            wake::clear(&self.fd);
        }
        event
    }

    /// Nobody shall hear of these any more.
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
