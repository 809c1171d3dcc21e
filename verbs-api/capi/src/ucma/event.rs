//! Events, and the files that programs read them from.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;

use super::Outcome;
use super::id::Id;
use super::words::Out;
use crate::ffi::{Given, may_block};
use crate::plain::Bell;

/// `enum rdma_cm_event_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    AddrResolved = 0,
    AddrError = 1,
    RouteResolved = 2,
    ConnectRequest = 4,
    ConnectResponse = 5,
    Unreachable = 7,
    Rejected = 8,
    Established = 9,
    Disconnected = 10,
    DeviceRemoval = 11,
    MulticastJoin = 12,
    TimewaitExit = 15,
}

/// `struct rdma_ucm_conn_param` and `struct rdma_ucm_ud_param`, of an event.
#[derive(Debug, Default)]
pub(super) struct Param {
    pub(super) qpn: u32,
    pub(super) qkey: u32,
    /// `struct ib_uverbs_ah_attr`, for datagrams.
    pub(super) ah: [u8; AH],
    pub(super) private: Vec<u8>,
    pub(super) srq: bool,
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
    pub(super) flow_control: bool,
    pub(super) retry_count: u8,
    pub(super) rnr_retry: u8,
}

/// The length of `struct ib_uverbs_ah_attr`.
pub(super) const AH: usize = 32;
/// Where the parameters begin in `struct rdma_ucm_event_resp`, and its length.
const PARAM: usize = 20;
const EVENT: usize = 336;
/// The least room that a program must give: all but the members that later versions appended.
const EVENT_LEAST: usize = 324;
/// Length of the private data in both structures.
const PRIVATE: usize = 256;

/// An event that the program has not read.
pub(super) struct Event {
    /// The id that counts it: of a request, its listener's.
    pub(super) of: Arc<Id>,
    pub(super) kind: Kind,
    /// 0, a negative errno, or a reason of the peer.
    pub(super) status: c_int,
    pub(super) param: Param,
    /// The new id of a request.
    pub(super) child: Option<Arc<Id>>,
    pub(super) group: Option<Arc<Group>>,
}

/// A multicast group that an id has joined.
pub(super) struct Group {
    pub(super) number: u32,
    /// The program's own name for it.
    pub(super) uid: u64,
    pub(super) id: Arc<Id>,
    pub(super) reported: AtomicU32,
}

/// What librdmacm has as an open `/dev/infiniband/rdma_cm`: an event channel.
pub(crate) struct File {
    /// The program's descriptor, readable while there are events, until it closes it.
    fd: Mutex<Option<Given>>,
    bell: Bell,
    queue: Mutex<VecDeque<Event>>,
}

impl File {
    pub(super) fn new() -> Outcome<Self> {
        let bell = Bell::new().map_err(|error| error.raw_os_error().unwrap_or(libc::EMFILE))?;
        let fd = Mutex::new(Some(Given::following_high(bell.as_fd())?));
        Ok(Self { fd, bell, queue: Mutex::default() })
    }

    /// The number of the program's descriptor.
    pub(super) fn number(&self) -> Option<c_int> {
        self.fd.lock().as_ref().map(Given::number)
    }

    /// Closes the program's descriptor, whichever commands are under way.
    pub(super) fn close(&self) {
        *self.fd.lock() = None;
    }

    /// Error: `EAGAIN` if the program set `O_NONBLOCK`.
    pub(crate) fn may_block(&self) -> Outcome<()> {
        self.fd.lock().as_ref().map_or(Ok(()), may_block)
    }

    /// Readable while there are events.
    pub(crate) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    pub(super) fn push(&self, event: Event) {
        let mut queue = self.queue.lock();
        queue.push_back(event);
        self.bell.ring();
    }

    /// The number of requests to a listener that the program has not read.
    pub(super) fn requests(&self, of: &Id) -> usize {
        let request = |event: &&Event| event.child.is_some() && event.of.number == of.number;
        self.queue.lock().iter().filter(request).count()
    }

    /// Takes out the events of an id that is destroyed, or migrates. Returns them, and the number
    /// that the program has read, which cannot grow meanwhile.
    pub(super) fn take(
        &self,
        which: impl Fn(&Event) -> bool,
        reported: &AtomicU32,
    ) -> (Vec<Event>, u32) {
        let mut queue = self.queue.lock();
        let (taken, kept): (VecDeque<_>, _) = queue.drain(..).partition(which);
        *queue = kept;
        self.clear_if_idle(&queue);
        (taken.into(), reported.load(Ordering::Relaxed))
    }

    fn clear_if_idle(&self, queue: &VecDeque<Event>) {
        if queue.is_empty() {
            self.bell.clear();
        }
    }

    /// The next event as the program gets it. It stays the next one if the program's memory does
    /// not take its length. Error: `EAGAIN` if there is none; `ENOSPC` if there is too little room
    /// for it; what `check` says.
    pub(super) fn read(
        &self,
        room: usize,
        check: impl Fn(usize) -> Outcome<()>,
    ) -> Outcome<Vec<u8>> {
        if room < EVENT_LEAST {
            return Err(libc::ENOSPC);
        }
        // Not under the lock, which the device's thread takes: looking may bring in a page.
        if self.queue.lock().is_empty() {
            return Err(libc::EAGAIN);
        }
        check(room.min(EVENT))?;
        let mut queue = self.queue.lock();
        let event = queue.pop_front().ok_or(libc::EAGAIN)?;
        event.of.reported.fetch_add(1, Ordering::Relaxed);
        if let Some(group) = &event.group {
            group.reported.fetch_add(1, Ordering::Relaxed);
        }
        self.clear_if_idle(&queue);
        drop(queue);
        if let Some(child) = &event.child {
            child.facts.lock().is_told = true;
        }
        let mut bytes = event.bytes();
        bytes.truncate(room);
        Ok(bytes)
    }
}

impl Event {
    /// `struct rdma_ucm_event_resp`.
    fn bytes(&self) -> Vec<u8> {
        let (uid, number) = match (&self.group, &self.child) {
            (Some(group), _) => (group.uid, group.number),
            (None, Some(child)) => (self.of.uid(), child.number),
            (None, None) => (self.of.uid(), self.of.number),
        };
        let out = Out::default().u64(uid).u32(number).u32(self.kind as u32);
        let out = out.u32(self.status.cast_unsigned()).u32(self.param.qpn).u32(self.param.qkey);
        let it = &self.param;
        let len = u8::try_from(it.private.len()).unwrap_or(u8::MAX);
        let out = if self.of.is_of_datagrams() {
            let private = PARAM + 8 + AH;
            out.bytes(&it.ah).bytes(&it.private).until(private + PRIVATE).u8(len)
        } else {
            out.bytes(&it.private)
                .until(PARAM + 8 + PRIVATE)
                .u8(len)
                .u8(it.srq.into())
                .u8(it.responder_resources)
                .u8(it.initiator_depth)
                .u8(it.flow_control.into())
                .u8(it.retry_count)
                .u8(it.rnr_retry)
        };
        out.until(EVENT).0
    }
}
