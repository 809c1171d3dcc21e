//! The asynchronous events of a device: each reaches the contexts that it concerns.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use rocinante_stack::mem::PdId;

use super::shard::Shard;
use crate::model::event::AsyncEvent;
use crate::provider::sync::Mutex;
use crate::provider::trace;
use crate::provider::wake::{self, AsFd as _, BorrowedFd, OwnedFd};
use crate::provider::wakers::{Wakers, Woken};

/// The object of a context that an event names. A queue pair has its context's protection domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Owner {
    Pd(u32),
    Cq(u32),
    Srq(u32),
}

impl From<PdId> for Owner {
    fn from(pd: PdId) -> Self {
        Self::Pd(pd.0)
    }
}

/// The contexts of a device, and the objects of each.
#[derive(Debug, Default)]
pub(crate) struct Events {
    contexts: Mutex<Contexts>,
}

#[derive(Debug, Default)]
struct Contexts {
    all: Vec<Arc<Inbox>>,
    owners: BTreeMap<Owner, Arc<Inbox>>,
}

impl Events {
    /// Adds a context.
    pub(crate) fn join(&self, inbox: &Arc<Inbox>) {
        self.contexts.lock().all.push(inbox.clone());
    }

    /// Removes a context. Its objects are gone.
    pub(crate) fn leave(&self, inbox: &Arc<Inbox>) {
        self.contexts.lock().all.retain(|other| !Arc::ptr_eq(other, inbox));
    }

    /// An object of a context exists.
    pub(crate) fn add(&self, owner: Owner, inbox: &Arc<Inbox>) {
        self.contexts.lock().owners.insert(owner, inbox.clone());
    }

    /// The object is gone. Its number will be reused.
    pub(crate) fn remove(&self, owner: Owner) {
        self.contexts.lock().owners.remove(&owner);
    }

    /// Takes the events of a shard that is about to be unlocked. Adds the tasks to wake then to
    /// `woken`.
    pub(super) fn collect(&self, shard: &mut Shard, woken: &mut Woken) {
        if let Some(first) = shard.poll_event() {
            let contexts = self.contexts.lock();
            contexts.deliver(first, woken);
            while let Some(next) = shard.poll_event() {
                contexts.deliver(next, woken);
            }
        }
        if !shard.host.woken.is_empty() {
            woken.append(std::mem::take(&mut shard.host.woken));
        }
    }
}

impl Contexts {
    /// Delivers an event to the context of its owner, or to all contexts if it has none.
    fn deliver(&self, (owner, event): (Option<Owner>, AsyncEvent), woken: &mut Woken) {
        match owner {
            Some(owner) => {
                // An object that is gone has no events.
                if let Some(inbox) = self.owners.get(&owner) {
                    woken.append(inbox.push(event));
                }
            }
            None => self.all.iter().for_each(|inbox| woken.append(inbox.push(event))),
        }
    }
}

/// So many events may wait whatever they are.
const PLENTY: usize = 1024;

/// The events of a context that the program has not taken yet.
#[derive(Debug)]
pub(crate) struct Inbox {
    queue: Mutex<VecDeque<AsyncEvent>>,
    /// Readable while there are events.
    fd: OwnedFd,
    /// Tasks that wait for events.
    pub(super) tasks: Wakers,
}

impl Inbox {
    pub(crate) fn new() -> std::io::Result<Self> {
        let queue = Mutex::new(VecDeque::new());
        Ok(Self { queue, fd: wake::eventfd()?, tasks: Wakers::default() })
    }

    /// Queues an event. A program that never polls gets no event twice beyond [`PLENTY`], so that
    /// the number of events stays bounded by that of its objects.
    pub(super) fn push(&self, event: AsyncEvent) -> Woken {
        trace::event(&event);
        let mut events = self.queue.lock();
        if events.len() >= PLENTY && events.contains(&event) {
            return Woken::default();
        }
        events.push_back(event);
        // For each, as a channel of completions does.
        wake::notify(&self.fd);
        drop(events);
        self.tasks.take()
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

    pub(super) fn any(&self, is: impl Fn(&AsyncEvent) -> bool) -> bool {
        self.queue.lock().iter().any(is)
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
