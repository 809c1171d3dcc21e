//! The asynchronous events of a device: each reaches the contexts that it concerns.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::IpAddr;
use std::sync::Arc;

use rocinante_stack::mem::PdId;

use super::gids::{Followed, GidTable};
use super::shard::Shard;
use crate::model::event::AsyncEvent;
use crate::provider::sync::Mutex;
use crate::provider::trace;
use crate::provider::wake::{self, AsFd as _, BorrowedFd, OwnedFd};
use crate::provider::wakers::{Wakers, Woken};
use crate::tuning::room::EVENTS;

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
        inbox.queue.lock().is_of_device = true;
    }

    /// Removes a context. Its objects are gone.
    pub(crate) fn leave(&self, inbox: &Arc<Inbox>) {
        inbox.queue.lock().is_of_device = false;
        self.contexts.lock().all.retain(|other| !Arc::ptr_eq(other, inbox));
    }

    /// An object of a context exists. Returns whether none had its number.
    pub(crate) fn add(&self, owner: Owner, inbox: &Arc<Inbox>) -> bool {
        match self.contexts.lock().owners.entry(owner) {
            Entry::Vacant(entry) => {
                entry.insert(inbox.clone());
                true
            }
            Entry::Occupied(_) => false,
        }
    }

    /// The object is gone. Its number will be reused.
    pub(crate) fn remove(&self, owner: Owner) {
        self.contexts.lock().owners.remove(&owner);
    }

    /// Number of protection domains, of all contexts.
    pub(crate) fn pds(&self) -> usize {
        self.contexts.lock().owners.range(Owner::Pd(0)..=Owner::Pd(u32::MAX)).count()
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

/// The events of a context that the program has not taken yet, and its port.
///
/// Nothing runs for the port: the program's descriptor is readable for the kernel's announcements,
/// too, and the thread that takes events looks at them.
#[derive(Debug)]
pub struct Inbox {
    queue: Mutex<Queue>,
    /// Readable while there are events.
    fd: OwnedFd,
    port: Option<Followed>,
    /// Tasks that wait for events.
    pub(super) tasks: Wakers,
}

#[derive(Debug, Default)]
struct Queue {
    events: VecDeque<AsyncEvent>,
    /// The loss of the interface was reported. A device reports it once, and perhaps to a context
    /// that has just come.
    fatal: bool,
    /// Its device is open, which alone reports the loss of the interface: with its queue pairs.
    is_of_device: bool,
}

impl Inbox {
    /// Of a context whose port is no interface.
    pub fn new() -> io::Result<Self> {
        let (queue, fd) = (Mutex::default(), wake::eventfd()?);
        Ok(Self { queue, fd, port: None, tasks: Wakers::default() })
    }

    /// Of a context of the interface with this index.
    pub fn of(interface: u32, table: GidTable) -> io::Result<Self> {
        let mut this = Self::new()?;
        this.port = Some(Followed::open(interface, table, this.fd())?);
        Ok(this)
    }

    /// Queues an event. A program that never polls gets no event twice beyond [`EVENTS`], so that
    /// the number of events stays bounded by that of its objects.
    pub(super) fn push(&self, event: AsyncEvent) -> Woken {
        let mut queue = self.queue.lock();
        let told = event == AsyncEvent::DeviceFatal && std::mem::replace(&mut queue.fatal, true);
        if told || queue.events.len() >= EVENTS && queue.events.contains(&event) {
            return Woken::default();
        }
        trace::event(&event);
        queue.events.push_back(event);
        // For each, as a channel of completions does.
        wake::notify(&self.fd);
        drop(queue);
        self.tasks.take()
    }

    /// Takes the oldest event.
    pub fn next(&self) -> Option<AsyncEvent> {
        let event = self.take().or_else(|| {
            drop(self.look()?);
            self.take()
        });
        if event == Some(AsyncEvent::DeviceFatal) {
            // The kernel announced it, too: nothing more comes of that.
            drop(self.look());
        }
        event
    }

    fn take(&self) -> Option<AsyncEvent> {
        let mut queue = self.queue.lock();
        let event = queue.events.pop_front();
        if queue.events.is_empty() {
            wake::clear(&self.fd);
        }
        event
    }

    /// Looks at the port, if it is followed. Returns the tasks to wake.
    fn look(&self) -> Option<Woken> {
        let mut woken = Woken::default();
        self.port.as_ref()?.look(|event| {
            if event != AsyncEvent::DeviceFatal || !self.queue.lock().is_of_device {
                woken.append(self.push(event));
            }
        });
        Some(woken)
    }

    /// Takes over the places that another context's addresses have in the table.
    pub fn take_places(&self, gids: &[Option<IpAddr>]) {
        if let Some(port) = &self.port {
            port.take_places(gids);
        }
    }

    /// The GID table as it is now; `None` if the port is not followed.
    pub fn gids(&self) -> Option<Vec<Option<IpAddr>>> {
        drop(self.look()?);
        Some(self.port.as_ref()?.gids())
    }

    /// Has announcements looked at by a thread: tasks wait, and no descriptor wakes a task.
    pub fn announce_to_tasks(self: &Arc<Self>) -> io::Result<()> {
        let Some(port) = &self.port else { return Ok(()) };
        let inbox = Arc::downgrade(self);
        port.look_on(move || inbox.upgrade().is_some_and(|inbox| inbox.look().is_some()))
    }

    /// Removes events that no longer apply.
    pub(crate) fn forget(&self, gone: impl Fn(&AsyncEvent) -> bool) {
        let mut queue = self.queue.lock();
        queue.events.retain(|event| !gone(event));
        if queue.events.is_empty() {
            wake::clear(&self.fd);
        }
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.port.as_ref().map_or(self.fd.as_fd(), |port| port.fd())
    }
}
