//! Event channels and identifiers of `librdmacm`.
//!
//! The queue pairs are made through `libibverbs`, on a context of this crate. The kernel connects
//! queue pair numbers, and [`Id::init_qp_attr`] returns the attributes for them.
#![allow(unsafe_code)]

mod abi;

use std::ffi::{CStr, c_int, c_void};
use std::io;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;

pub(crate) use self::abi::{Library, OPTION_ID_ACK_TIMEOUT, OPTION_ID_TOS, SONAME, event};
use super::abi::QpAttr;
use super::objects::{done, made, nonblocking};

/// The channel of events. In the kernel it also owns the identifiers, which are gone when it
/// closes.
#[derive(Debug)]
pub(crate) struct EventChannel {
    library: &'static Library,
    pointer: NonNull<abi::EventChannel>,
}

// SAFETY: the library's functions may be called from any thread; one thread takes and acknowledges
// an event.
unsafe impl Send for EventChannel {}
// SAFETY: as above.
unsafe impl Sync for EventChannel {}

/// An event of an identifier.
#[derive(Debug)]
pub(crate) struct Event {
    /// One of [`event`].
    pub(crate) kind: c_int,
    /// A negative errno, or the reason of a peer's rejection.
    pub(crate) status: c_int,
    /// The number of the identifier; for a request, that of the listening one.
    pub(crate) number: u64,
    /// The peer's parameters; the event determines their meaning.
    pub(crate) param: Param,
    /// The private data of the peer's program.
    pub(crate) private: Vec<u8>,
    /// The identifier of a request.
    pub(crate) id: Option<Id>,
}

/// A path to a peer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Path {
    /// The GIDs of both ends.
    pub(crate) local: [u8; 16],
    pub(crate) remote: [u8; 16],
    /// `enum ibv_mtu`.
    pub(crate) mtu: c_int,
    /// The longest lifetime of a packet: 4.096 µs · 2^lifetime.
    pub(crate) lifetime: u8,
    pub(crate) traffic_class: u8,
    pub(crate) hop_limit: u8,
}

/// The parameters of our queue pair for a peer.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Terms {
    pub(crate) qp_num: u32,
    pub(crate) responder_resources: u8,
    pub(crate) initiator_depth: u8,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry_count: u8,
    pub(crate) srq: bool,
}

impl Terms {
    /// Adds private data, at most 255 bytes. It must live as long as the result.
    fn with(&self, private: &[u8]) -> abi::ConnParam {
        abi::ConnParam {
            private_data: private.as_ptr().cast(),
            private_data_len: u8::try_from(private.len()).unwrap_or(u8::MAX),
            responder_resources: self.responder_resources,
            initiator_depth: self.initiator_depth,
            flow_control: 0,
            retry_count: self.retry_count,
            rnr_retry_count: self.rnr_retry_count,
            srq: u8::from(self.srq),
            qp_num: self.qp_num,
        }
    }
}

/// The peer's parameters in an event.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Param {
    pub(crate) responder_resources: u8,
    pub(crate) initiator_depth: u8,
    pub(crate) srq: bool,
    pub(crate) qp_num: u32,
    /// For a datagram service.
    pub(crate) qkey: u32,
}

impl EventChannel {
    pub(crate) fn create(library: &'static Library) -> io::Result<Self> {
        // SAFETY: the function takes nothing.
        let pointer = made(unsafe { (library.rdma_create_event_channel)() })?;
        let channel = Self { library, pointer };
        // SAFETY: the descriptor is open as long as the channel.
        unsafe { nonblocking((*channel.pointer.as_ptr()).fd) }?;
        Ok(channel)
    }

    /// Readable while there are events.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: it is open as long as the channel.
        unsafe { BorrowedFd::borrow_raw((*self.pointer.as_ptr()).fd) }
    }

    /// The next event, acknowledged, if there is one now. Only one thread may do this.
    pub(crate) fn next_event(self: &Arc<Self>) -> io::Result<Option<Event>> {
        let mut pointer = ptr::null_mut();
        // SAFETY: the channel is open, and does not block.
        let got =
            done(unsafe { (self.library.rdma_get_cm_event)(self.pointer.as_ptr(), &mut pointer) });
        match got {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            got => got?,
        }
        // SAFETY: the call succeeded; until the event is acknowledged it and its identifiers exist.
        // Both parts of the union are numbers and begin with the private data, which is as long as
        // its length says.
        let event = unsafe {
            let raw = &*pointer;
            let asks = raw.event == event::CONNECT_REQUEST;
            let of = if asks { raw.listen_id } else { raw.id };
            let conn = &raw.param.conn;
            let private = match (conn.private_data.is_null(), conn.private_data_len) {
                (false, len) => {
                    std::slice::from_raw_parts(conn.private_data.cast::<u8>(), len.into()).to_vec()
                }
                (true, _) => Vec::new(),
            };
            let param = if (*raw.id).qp_type == DATAGRAMS {
                let abi::UdParam { qp_num, qkey, .. } = raw.param.ud;
                Param { qp_num, qkey, ..Param::default() }
            } else {
                Param {
                    responder_resources: conn.responder_resources,
                    initiator_depth: conn.initiator_depth,
                    srq: conn.srq != 0,
                    qp_num: conn.qp_num,
                    qkey: 0,
                }
            };
            let id = NonNull::new(raw.id).filter(|_| asks);
            Event {
                kind: raw.event,
                status: raw.status,
                number: (*of).context as u64,
                param,
                private,
                id: id.map(|pointer| Id { channel: self.clone(), pointer }),
            }
        };
        // SAFETY: it was not acknowledged before.
        unsafe { (self.library.rdma_ack_cm_event)(pointer) };
        Ok(Some(event))
    }
}

impl Drop for EventChannel {
    fn drop(&mut self) {
        // SAFETY: every identifier holds an `Arc` of this, so none is left; all events are
        // acknowledged.
        unsafe { (self.library.rdma_destroy_event_channel)(self.pointer.as_ptr()) };
    }
}

/// `IBV_QPT_UC`.
const UNRELIABLE: c_int = 3;
/// `IBV_QPT_UD`.
const DATAGRAMS: c_int = 4;

/// The service of an identifier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Service {
    /// Reliable connections: `RDMA_PS_TCP`.
    Reliable,
    /// Unreliable connections: `RDMA_PS_IB`, because `RDMA_PS_TCP` has reliable ones only.
    Unreliable,
    /// Datagrams: `RDMA_PS_UDP`.
    Datagrams,
}

/// An identifier (`struct rdma_cm_id`). Dropping it destroys it, and tells a waiting peer. The
/// events that were taken must be acknowledged before.
#[derive(Debug)]
pub(crate) struct Id {
    channel: Arc<EventChannel>,
    pointer: NonNull<abi::CmId>,
}

// SAFETY: the library's functions may be called from any thread; the members that are read are
// written before the event that reports them.
unsafe impl Send for Id {}

impl Id {
    /// Makes an identifier with a local address. Its events carry `number`.
    pub(crate) fn bind(
        channel: &Arc<EventChannel>,
        number: u64,
        service: Service,
        address: SocketAddr,
    ) -> io::Result<Self> {
        let library = channel.library;
        let mut address = abi::SockAddr::new(address);
        let mut pointer = ptr::null_mut();
        let (space, end) = match service {
            Service::Reliable => (abi::port_space::TCP, None),
            Service::Datagrams => (abi::port_space::UDP, None),
            Service::Unreliable => (abi::port_space::IB, Some(UNRELIABLE)),
        };
        let Some(qp_type) = end else {
            // SAFETY: the channel is open; the number is never followed as a pointer.
            done(unsafe {
                let number = number as *mut c_void;
                (library.rdma_create_id)(channel.pointer.as_ptr(), &mut pointer, number, space)
            })?;
            let id = Self { channel: channel.clone(), pointer: made(pointer)? };
            // SAFETY: the identifier exists, and the address is as long as its family says.
            done(unsafe { (library.rdma_bind_addr)(id.pointer.as_ptr(), &mut address) })?;
            return Ok(id);
        };
        // For other types only this call makes an identifier, with a channel of its own.
        let mut info = abi::AddrInfo {
            flags: abi::RAI_PASSIVE,
            family: 0,
            qp_type,
            port_space: space,
            src_len: address.len(),
            dst_len: 0,
            src_addr: &mut address,
            dst_addr: ptr::null_mut(),
            canonnames: [ptr::null_mut(); 2],
            route_len: 0,
            route: ptr::null_mut(),
            connect_len: 0,
            connect: ptr::null_mut(),
            next: ptr::null_mut(),
        };
        let none = ptr::null_mut();
        // SAFETY: the structure and its address live until the call returns; there is no queue
        // pair, and no domain for it.
        done(unsafe { (library.rdma_create_ep)(&mut pointer, &mut info, none, none) })?;
        let id = Self { channel: channel.clone(), pointer: made(pointer)? };
        id.set_number(number);
        // SAFETY: identifier and channel exist.
        done(unsafe { (library.rdma_migrate_id)(id.pointer.as_ptr(), channel.pointer.as_ptr()) })?;
        Ok(id)
    }

    /// Its events carry this number from now on.
    pub(crate) fn set_number(&self, number: u64) {
        // SAFETY: the identifier exists. The member is the program's; only the thread that takes
        // events reads it, and it has no event of this identifier now.
        unsafe { (*self.pointer.as_ptr()).context = number as *mut c_void };
    }

    /// The name of its device, and the port.
    pub(crate) fn device(&self) -> Option<(String, u8)> {
        // SAFETY: the identifier exists; its device is open as long as the identifier.
        unsafe {
            let id = self.pointer.as_ptr();
            let context = NonNull::new((*id).verbs)?.as_ptr();
            let name = (*abi::head((*context).device)).name.as_ptr();
            Some((CStr::from_ptr(name).to_string_lossy().into_owned(), (*id).port_num))
        }
    }

    /// Its own address, and the peer's.
    pub(crate) fn addresses(&self) -> Option<(SocketAddr, SocketAddr)> {
        // SAFETY: the identifier exists.
        let (local, peer) =
            unsafe { ((*self.pointer.as_ptr()).src_addr, (*self.pointer.as_ptr()).dst_addr) };
        Some((abi::address(&local)?, abi::address(&peer)?))
    }

    pub(crate) fn is_datagrams(&self) -> bool {
        self.qp_type() == DATAGRAMS
    }

    pub(crate) fn is_unreliable(&self) -> bool {
        self.qp_type() == UNRELIABLE
    }

    fn qp_type(&self) -> c_int {
        // SAFETY: the identifier exists.
        unsafe { (*self.pointer.as_ptr()).qp_type }
    }

    pub(crate) fn listen(&self, backlog: usize) -> io::Result<()> {
        let backlog = c_int::try_from(backlog).unwrap_or(c_int::MAX);
        // SAFETY: the identifier exists.
        done(unsafe { (self.channel.library.rdma_listen)(self.pointer.as_ptr(), backlog) })
    }

    /// Finds the peer's address.
    pub(crate) fn resolve_addr(&self, peer: SocketAddr, timeout_ms: c_int) -> io::Result<()> {
        let mut peer = abi::SockAddr::new(peer);
        let resolve = self.channel.library.rdma_resolve_addr;
        // SAFETY: the identifier exists and has an address; the peer's is as long as its family
        // says.
        done(unsafe { resolve(self.pointer.as_ptr(), ptr::null_mut(), &mut peer, timeout_ms) })
    }

    /// Finds the path to the peer.
    pub(crate) fn resolve_route(&self, timeout_ms: c_int) -> io::Result<()> {
        let resolve = self.channel.library.rdma_resolve_route;
        // SAFETY: the identifier exists, and is bound to a device.
        done(unsafe { resolve(self.pointer.as_ptr(), timeout_ms) })
    }

    /// Sets a one-byte option.
    pub(crate) fn set_option(&self, name: c_int, mut value: u8) -> io::Result<()> {
        let value = (&raw mut value).cast::<c_void>();
        let set = self.channel.library.rdma_set_option;
        // SAFETY: the identifier exists, and the value is read before the call returns.
        done(unsafe { set(self.pointer.as_ptr(), abi::OPTION_ID, name, value, 1) })
    }

    /// Uses this path to the peer, instead of finding one; the event is the same.
    pub(crate) fn set_path(&self, path: &Path) -> io::Result<()> {
        let mut data = abi::PathData::new(path);
        let (value, set) = ((&raw mut data).cast::<c_void>(), self.channel.library.rdma_set_option);
        let (level, name, len) = (abi::OPTION_IB, abi::OPTION_IB_PATH, size_of_val(&data));
        // SAFETY: the identifier exists, and the value is read before the call returns.
        done(unsafe { set(self.pointer.as_ptr(), level, name, value, len) })
    }

    /// Requests a connection or a datagram service.
    pub(crate) fn connect(&self, terms: &Terms, private: &[u8]) -> io::Result<()> {
        let mut param = terms.with(private);
        // SAFETY: the identifier exists and is bound to a device; the private data is read before
        // the call returns.
        done(unsafe { (self.channel.library.rdma_connect)(self.pointer.as_ptr(), &mut param) })
    }

    /// Accepts a request.
    pub(crate) fn accept(&self, terms: &Terms, private: &[u8]) -> io::Result<()> {
        let mut param = terms.with(private);
        // SAFETY: as above; the identifier of a request is bound to a device.
        done(unsafe { (self.channel.library.rdma_accept)(self.pointer.as_ptr(), &mut param) })
    }

    pub(crate) fn reject(&self, private: &[u8]) -> io::Result<()> {
        let len = u8::try_from(private.len()).unwrap_or(u8::MAX);
        let reject = self.channel.library.rdma_reject;
        // SAFETY: the identifier exists; no more than `len` bytes are read.
        done(unsafe { reject(self.pointer.as_ptr(), private.as_ptr().cast(), len) })
    }

    pub(crate) fn establish(&self) -> io::Result<()> {
        // SAFETY: the identifier exists, and has no queue pair of the library's.
        done(unsafe { (self.channel.library.rdma_establish)(self.pointer.as_ptr()) })
    }

    /// Ends the connection, or confirms that the peer has ended it.
    pub(crate) fn disconnect(&self) -> io::Result<()> {
        // SAFETY: the identifier exists.
        done(unsafe { (self.channel.library.rdma_disconnect)(self.pointer.as_ptr()) })
    }

    /// The attributes for the change of a queue pair to this state (`enum ibv_qp_state`).
    pub(crate) fn init_qp_attr(&self, state: c_int) -> io::Result<QpAttr> {
        let mut attr = QpAttr::to(state);
        let mut mask = 0;
        let init = self.channel.library.rdma_init_qp_attr;
        // SAFETY: the identifier exists.
        done(unsafe { init(self.pointer.as_ptr(), &mut attr, &mut mask) })?;
        Ok(attr)
    }
}

impl Drop for Id {
    fn drop(&mut self) {
        // SAFETY: it is destroyed once. The call waits until the events that were taken are
        // acknowledged, which happens as soon as they have been read.
        unsafe { (self.channel.library.rdma_destroy_id)(self.pointer.as_ptr()) };
    }
}
