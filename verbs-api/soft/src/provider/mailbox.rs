//! Events of a connection or a listener, queued for the program.

use std::collections::VecDeque;
use std::io;

use rocinante_stack::cm::{CmEvent, ConnId};

use crate::model::error::VerbsError;
use crate::provider::sync::{AtomicBool, AtomicI32, Mutex, OnceLock, Ordering};
use crate::provider::wake::{self, AsFd, BorrowedFd, OwnedFd};
use crate::provider::wakers::{Wakers, Woken};

/// Events that wait for their owner, and a descriptor for threads that sleep until there are some.
#[derive(Debug, Default)]
pub struct Mailbox {
    /// The events; the last may say why no more will come.
    events: Mutex<VecDeque<Result<CmEvent, VerbsError>>>,
    /// The last event was taken: the descriptor stays readable, for all threads that sleep on it.
    /// Changes only under the lock of the events.
    over: AtomicBool,
    /// The errno for further calls after the reason was returned once; or 0.
    failed: AtomicI32,
    fd: OnceLock<OwnedFd>,
    /// Tasks that wait for events.
    pub tasks: Wakers,
}

impl Mailbox {
    /// Adds an event. Returns the tasks that wait for one.
    pub fn push(&self, event: CmEvent) -> Woken {
        self.put(Ok(event))
    }

    /// No more events will come, for this reason.
    pub fn fail(&self, why: VerbsError) -> Woken {
        self.put(Err(why))
    }

    fn put(&self, event: Result<CmEvent, VerbsError>) -> Woken {
        let mut events = self.events.lock();
        events.push_back(event);
        if let Some(fd) = self.fd.get() {
            wake::notify(fd);
        }
        drop(events);
        self.tasks.take()
    }

    /// The next event, if there is one. Error: the reason why no more will come.
    pub fn pop(&self) -> Result<Option<CmEvent>, VerbsError> {
        let mut events = self.events.lock();
        let event = events.pop_front();
        if let Some(Err(why)) = &event {
            self.failed.store(why.errno(), Ordering::Relaxed);
        }
        let failed = self.failed.load(Ordering::Relaxed);
        if event.is_none() && failed != 0 {
            return Err(VerbsError::Io(io::Error::from_raw_os_error(failed)));
        }
        if event.as_ref().is_some_and(is_last) {
            self.over.store(true, Ordering::Relaxed);
        }
        self.clear_if_idle(&events);
        event.transpose()
    }

    fn clear_if_idle(&self, events: &VecDeque<Result<CmEvent, VerbsError>>) {
        if events.is_empty()
            && !self.over.load(Ordering::Relaxed)
            && let Some(fd) = self.fd.get()
        {
            wake::clear(fd);
        }
    }

    /// Whether the last event of a connection or request was taken.
    pub fn is_over(&self) -> bool {
        let _events = self.events.lock();
        self.over.load(Ordering::Relaxed)
    }

    /// The number of waiting events.
    pub fn len(&self) -> usize {
        self.events.lock().len()
    }

    /// The connections and service requests that a listener's program has not taken yet.
    pub fn numbers(&self) -> Vec<u32> {
        let number = |event: &CmEvent| match event {
            CmEvent::Request { conn, .. } => Some(conn.0.0),
            CmEvent::Asked { ask, .. } => Some(ask.0),
            _ => None,
        };
        self.events.lock().iter().flatten().filter_map(number).collect()
    }

    pub(crate) fn has_request(&self, of: ConnId) -> bool {
        self.any(|event| matches!(event, CmEvent::Request { conn, .. } if *conn == of))
    }

    pub(crate) fn any(&self, of: impl Fn(&CmEvent) -> bool) -> bool {
        self.events.lock().iter().flatten().any(of)
    }

    /// Removes events that the program must not see any more.
    pub(crate) fn retain(&self, keep: impl Fn(&CmEvent) -> bool) {
        let mut events = self.events.lock();
        events.retain(|event| event.as_ref().map_or(true, &keep));
        self.clear_if_idle(&events);
    }

    /// A peer has withdrawn its request.
    pub fn withdraw(&self, gone: ConnId) {
        self.retain(|event| !matches!(event, CmEvent::Request { conn, .. } if *conn == gone));
    }

    /// Readable while there are events, and once the connection is over. Made at the first call:
    /// few connections need one.
    pub fn fd(&self) -> io::Result<BorrowedFd<'_>> {
        if self.fd.get().is_none() {
            let fd = wake::eventfd()?;
            let events = self.events.lock();
            let fd = self.fd.get_or_init(|| fd);
            if !events.is_empty() || self.over.load(Ordering::Relaxed) {
                wake::notify(fd);
            }
        }
        Ok(self.fd.get().expect("just made").as_fd())
    }
}

/// Whether this is the last event of a connection.
fn is_last(event: &Result<CmEvent, VerbsError>) -> bool {
    matches!(
        event,
        Err(_)
            | Ok(CmEvent::Disconnected { .. }
                | CmEvent::Rejected { .. }
                | CmEvent::TimedOut { .. }
                | CmEvent::Resolved { .. }
                | CmEvent::Unresolved { .. })
    )
}
