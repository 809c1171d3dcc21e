//! The kernel's connection manager (`rdma_cm`), through `librdmacm`, for the queue pairs of a device of the kernel's.
//!
//! A device has one event channel, and a thread that takes its events: so a connection goes on, and its queue pair breaks when the peer ends it,
//! whether the program looks or not. The thread begins with the first call and ends with the device.

mod calls;
mod events;

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

use parking_lot::{Mutex, MutexGuard};
use rocinante_stack::cm::{AskId, CmError, ConnId, ListenerId, QueryId};
use rocinante_stack::wire::cm::CommId;
use rustix::io::Errno;

use super::ffi::rdmacm::{EventChannel, Id, Library, Path, Service, Terms};
use super::{Device, error, ffi};
use crate::cm::{Chosen, Mailbox};
use crate::error::VerbsError;
use crate::wake;

/// The connection manager as far as one device uses it; dropping it ends everything.
#[derive(Debug)]
pub(super) struct Cm {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// What the calls and the thread share.
#[derive(Debug)]
struct Shared {
    channel: Arc<EventChannel>,
    /// Readable when the thread is to end.
    stop: OwnedFd,
    /// The device's name, and the port.
    place: (String, u8),
    table: Mutex<Table>,
    /// The thread has ended because the kernel tells nothing any more.
    dead: AtomicBool,
}

/// Everything under way, by number.
#[derive(Debug, Default)]
struct Table {
    conns: HashMap<u32, Conn>,
    listeners: HashMap<u32, Listening>,
    queries: HashMap<u32, Query>,
    asks: HashMap<u32, Id>,
}

/// A connection, made or being made.
#[derive(Debug)]
struct Conn {
    id: Id,
    stage: Stage,
    /// The listener's until the program has decided.
    mailbox: Arc<Mailbox>,
    /// To be broken when the peer ends the connection.
    qp: Weak<ffi::Qp>,
    /// What the kernel has chosen for the queue pair, once it is known.
    chosen: Option<Chosen>,
}

/// How far a connection is.
#[derive(Debug)]
enum Stage {
    /// The way to the peer is being found; then it is asked this.
    Finding(Box<Question>),
    /// The peer is asked.
    Asked,
    /// The peer has accepted; the program has to establish it.
    Replied,
    /// The program is asked by a listener.
    Requested(u32),
    /// The program of a listener has accepted; the peer has to establish it.
    Accepted(u32),
    Established,
    /// The program has dropped it, and the peer is told.
    Leaving,
}

/// What a peer will be asked once the way to it is known.
#[derive(Debug)]
struct Question {
    terms: Terms,
    private: Vec<u8>,
    /// The path that it shall take, if that is not the one that the kernel would.
    path: Option<Path>,
}

/// Somebody who listens, with an identifier for each address and service.
#[derive(Debug)]
struct Listening {
    _ids: Vec<Id>,
    mailbox: Arc<Mailbox>,
    backlog: usize,
}

/// A datagram service that is asked for.
#[derive(Debug)]
struct Query {
    id: Id,
    mailbox: Arc<Mailbox>,
    question: Question,
}

impl Table {
    /// A number that nothing has, and nothing of a manager that has died: whoever still holds that means nothing that is alive.
    fn number(&self) -> u32 {
        static LAST: AtomicU32 = AtomicU32::new(0);
        loop {
            let number = LAST.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
            let taken = self.conns.contains_key(&number)
                || self.listeners.contains_key(&number)
                || self.queries.contains_key(&number)
                || self.asks.contains_key(&number);
            if !taken && number != 0 {
                return number;
            }
        }
    }

    /// How many peers of a listener wait: for the program, or for their own establishment.
    fn waiting(&self, listener: u32) -> usize {
        let of = |conn: &&Conn| matches!(conn.stage, Stage::Requested(of) | Stage::Accepted(of) if of == listener);
        self.conns.values().filter(of).count()
    }

    fn conn(&mut self, conn: ConnId) -> Result<&mut Conn, CmError> {
        self.conns.get_mut(&conn.0.0).ok_or(CmError::Unknown)
    }
}

impl Cm {
    /// Opens the event channel.
    fn start(place: (String, u8)) -> Result<Self, VerbsError> {
        let library = Library::get().map_err(error::no_cm_library)?;
        let channel = EventChannel::create(library).map_err(error::no_cm)?;
        let shared = Arc::new(Shared {
            channel: Arc::new(channel),
            stop: wake::eventfd()?,
            place,
            table: Mutex::default(),
            dead: AtomicBool::new(false),
        });
        let thread = std::thread::Builder::new().name(format!("rdma-cm-{}", shared.place.0));
        let events = shared.clone();
        let thread = Some(thread.spawn(move || events.serve())?);
        Ok(Self { shared, thread })
    }
}

impl Drop for Cm {
    fn drop(&mut self) {
        wake::notify(&self.shared.stop);
        if let Some(thread) = self.thread.take() {
            // The thread never panics on purpose; if it did, there is nothing left to save.
            let _ = thread.join();
        }
        // They hold the channel.
        let gone = std::mem::take(&mut *self.shared.table.lock());
        drop(gone);
    }
}

impl Device {
    /// The connection manager, begun with the first call, and anew when it has died.
    fn cm(&self) -> Result<Arc<Shared>, VerbsError> {
        let mut cm = self.cm.lock();
        if let Some(cm) = &*cm
            && !cm.shared.dead.load(Ordering::Acquire)
        {
            return Ok(cm.shared.clone());
        }
        let started = Cm::start((self.name.clone(), self.attr.port))?;
        let shared = started.shared.clone();
        *cm = Some(started);
        Ok(shared)
    }

    /// The connection manager, if it has begun: of another nothing is known to it.
    fn begun(&self) -> Option<Arc<Shared>> {
        self.cm.lock().as_ref().map(|cm| cm.shared.clone())
    }
}

impl Shared {
    /// The table, for something new.
    ///
    /// # Errors
    /// Nothing would be heard of it.
    fn table(&self) -> Result<MutexGuard<'_, Table>, VerbsError> {
        let table = self.table.lock();
        // It dies before its table is taken away.
        if self.dead.load(Ordering::Acquire) {
            return Err(error::failed("rdma_get_cm_event", Errno::NODEV.into()));
        }
        Ok(table)
    }

    /// An identifier with an address of the device's.
    fn bind(&self, number: u32, service: Service, address: SocketAddr) -> Result<Id, VerbsError> {
        let id = Id::bind(&self.channel, number.into(), service, address).map_err(|error| {
            let errno = error.raw_os_error();
            if errno == Some(Errno::ADDRINUSE.raw_os_error()) {
                CmError::InUse.into()
            } else {
                error::cannot_bind(address, error)
            }
        })?;
        self.check(&id, address.ip())?;
        Ok(id)
    }

    /// Several devices may have an address: the kernel takes the first.
    fn check(&self, id: &Id, address: IpAddr) -> Result<(), VerbsError> {
        match id.device() {
            Some(place) if place == self.place => Ok(()),
            other => Err(error::another_device(&self.place, address, other)),
        }
    }
}

fn conn_id(number: u32) -> ConnId {
    ConnId(CommId(number))
}

fn listener_id(number: u32) -> ListenerId {
    ListenerId(number.into())
}

/// Of a listener of ours.
fn number_of(listener: ListenerId) -> u32 {
    u32::try_from(listener.0).unwrap_or(0)
}

fn query_id(number: u32) -> QueryId {
    QueryId(number)
}

fn ask_id(number: u32) -> AskId {
    AskId(number)
}
