//! The kernel's connection manager (`rdma_cm`), through `librdmacm`, for the queue pairs of a
//! kernel device.
//!
//! A device has one event channel, and a thread that handles its events. So a connection makes
//! progress, and its queue pair breaks when the peer ends it, even while the program makes no
//! calls. The thread starts with the first call and ends with the device.

mod calls;
mod events;

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, MutexGuard};
use rocinante_soft::model::error::VerbsError;
use rocinante_soft::provider::mailbox::Mailbox;
use rocinante_soft::provider::manager::{Breaks, Chosen};
use rocinante_soft::provider::wakers::Woken;
use rocinante_soft::provider::worker::Worker;
use rocinante_stack::cm::{CmError, ConnId, ListenerId, SidrQueryId, SidrReqId};
use rocinante_stack::wire::cm::CommId;
use rustix::io::Errno;

use super::ffi::rdmacm::{EventChannel, Id, Library, Path, Service, Terms};
use super::{Device, error};
use crate::tuning::FINDING;

/// One device's use of the connection manager. Dropping it ends all its connections, listeners and
/// queries.
#[derive(Debug)]
pub(super) struct Cm {
    shared: Arc<Shared>,
    worker: Worker,
}

/// State that the calls and the thread share.
#[derive(Debug)]
struct Shared {
    channel: Arc<EventChannel>,
    /// The device's name, and the port.
    place: (String, u8),
    table: Mutex<Table>,
    /// The thread has ended, because the kernel reports no more events.
    dead: AtomicBool,
}

/// All connections, listeners, queries and service requests, by number.
#[derive(Debug, Default)]
struct Table {
    conns: HashMap<u32, Conn>,
    listeners: HashMap<u32, Listening>,
    queries: HashMap<u32, Query>,
    asks: HashMap<u32, Id>,
    /// Tasks to wake once the table is unlocked.
    woken: Woken,
}

/// A connection, established or in setup.
#[derive(Debug)]
struct Conn {
    id: Id,
    stage: Stage,
    /// The listener's mailbox until the program has decided.
    mailbox: Arc<Mailbox>,
    /// The queue pair to break when the peer ends the connection.
    qp: Option<Weak<dyn Breaks>>,
    /// The kernel's choices for the queue pair, once they are known.
    chosen: Option<Chosen>,
}

/// The stage of a connection.
#[derive(Debug)]
enum Stage {
    /// The kernel is looking for the path to the peer; then it sends this request.
    Finding(Box<Question>),
    /// The request is sent.
    Asked,
    /// The peer has accepted; the program must establish the connection.
    Replied,
    /// A request at a listener waits for the program's decision.
    Requested(u32),
    /// The program of a listener has accepted; the peer must establish the connection.
    Accepted(u32),
    Established,
    /// The program has dropped the connection, and its end is on the way to the peer.
    Leaving,
}

/// The request to a peer, sent once the path to it is known.
#[derive(Debug)]
struct Question {
    terms: Terms,
    private: Vec<u8>,
    /// The path to take, if it is not the kernel's own choice.
    path: Option<Path>,
}

/// A listener, with an identifier for each address and service.
#[derive(Debug)]
struct Listening {
    _ids: Vec<Id>,
    mailbox: Arc<Mailbox>,
    backlog: usize,
}

/// A request for a datagram service.
#[derive(Debug)]
struct Query {
    id: Id,
    mailbox: Arc<Mailbox>,
    question: Question,
}

impl Table {
    /// A fresh number. Numbers of a manager that has died are not reused either, so a stale number
    /// never names a live object.
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

    /// The number of a listener's peers that wait for the program, or for their own establishment.
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
            place,
            table: Mutex::default(),
            dead: AtomicBool::new(false),
        });
        let events = shared.clone();
        let name = format!("rdma-cm-{}", shared.place.0);
        let worker = Worker::start(name, move |stop| events.serve(stop))?;
        Ok(Self { shared, worker })
    }
}

impl Drop for Cm {
    fn drop(&mut self) {
        self.worker.end();
        // These objects hold the channel.
        let gone = std::mem::take(&mut *self.shared.table.lock());
        drop(gone);
    }
}

impl Device {
    /// The connection manager. The first call starts it; a call after its death starts a new one.
    fn cm(&self) -> Result<Arc<Shared>, VerbsError> {
        let mut cm = self.cm.lock();
        if let Some(cm) = &*cm
            && !cm.shared.dead.load(Ordering::Acquire)
        {
            return Ok(cm.shared.clone());
        }
        let started = Cm::start((self.name.clone(), self.attr.port))?;
        let shared = started.shared.clone();
        let dead = cm.replace(started);
        // A task that its thread wakes may make a call.
        drop(cm);
        drop(dead);
        Ok(shared)
    }

    /// The connection manager, if it has started. Otherwise it knows no objects.
    fn begun(&self) -> Option<Arc<Shared>> {
        self.cm.lock().as_ref().map(|cm| cm.shared.clone())
    }
}

impl Shared {
    /// The locked table, for a new object. Error: the manager is dead, so no events would arrive.
    fn table(&self) -> Result<MutexGuard<'_, Table>, VerbsError> {
        let table = self.table.lock();
        // `dead` is set before the table is emptied.
        if self.dead.load(Ordering::Acquire) {
            return Err(error::failed("rdma_get_cm_event", Errno::NODEV.into()));
        }
        Ok(table)
    }

    /// An identifier bound to an address of the device.
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

    /// Checks that the kernel chose this device: several may have the address, and the kernel takes
    /// the first.
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

/// The number of a listener of this manager.
fn number_of(listener: ListenerId) -> u32 {
    u32::try_from(listener.0).unwrap_or(0)
}

fn query_id(number: u32) -> SidrQueryId {
    SidrQueryId(number)
}

fn ask_id(number: u32) -> SidrReqId {
    SidrReqId(number)
}
