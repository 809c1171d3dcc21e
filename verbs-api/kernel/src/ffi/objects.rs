//! Handles of the library's objects.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_int, c_void};
use std::io;
use std::mem::zeroed;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use rocinante_soft::model::qp::QpCaps;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use super::extended::{Extended, SendOps};
use super::{Library, abi};

/// The result of a function that returns 0 or an errno, or −1 and sets errno.
pub(super) fn done(result: c_int) -> io::Result<()> {
    match result {
        0 => Ok(()),
        errno if errno > 0 => Err(io::Error::from_raw_os_error(errno)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The result of a function that returns an object, or null and sets errno.
pub(super) fn made<T>(pointer: *mut T) -> io::Result<NonNull<T>> {
    NonNull::new(pointer).ok_or_else(io::Error::last_os_error)
}

/// # Safety
/// `fd` must stay open for the lifetime that the caller gives it.
pub(super) unsafe fn nonblocking(fd: c_int) -> io::Result<()> {
    // SAFETY: passed on; it is not used after this function.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    Ok(fcntl_setfl(fd, fcntl_getfl(fd)? | OFlags::NONBLOCK)?)
}

macro_rules! handle {
    ($($name:ident)*) => { $(
        // SAFETY: the library's objects may be used from any thread (ibv_alloc_td(3): "By default
        // all verbs objects are safe for multi-threaded access"), and the members that a handle
        // reads do not change while it lives.
        unsafe impl Send for $name {}
        // SAFETY: as above.
        unsafe impl Sync for $name {}
    )* };
}

handle! { Context Pd Channel Cq Ah Srq Qp }

/// A structure with room for members that newer libraries append.
#[repr(C)]
struct Roomy<T> {
    known: T,
    _more: [u64; 16],
}

/// An open device.
#[derive(Debug)]
pub(crate) struct Context {
    pub(super) library: &'static Library,
    pub(super) pointer: NonNull<abi::Context>,
}

/// Why a device could not be opened.
#[derive(Debug)]
pub(crate) enum OpenError {
    /// The library cannot list the devices.
    List(io::Error),
    /// The device cannot be opened.
    Open(io::Error),
}

/// An asynchronous event: `enum ibv_event_type`, and the number of its queue pair, completion
/// queue, shared receive queue or port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Event {
    pub(crate) kind: c_int,
    pub(crate) number: Option<u32>,
}

impl Context {
    /// Opens the device of this name; `None` if the library does not know it.
    pub(crate) fn open(library: &'static Library, name: &str) -> Result<Option<Self>, OpenError> {
        let mut count = 0;
        // SAFETY: `count` is written, the list is freed below.
        let list = unsafe { (library.ibv_get_device_list)(&mut count) };
        let list = made(list).map_err(OpenError::List)?.as_ptr();
        let mut opened = None;
        for index in 0..usize::try_from(count).unwrap_or(0) {
            // SAFETY: the list has `count` entries, which are valid until it is freed; an open
            // device stays valid.
            unsafe {
                let device = *list.add(index);
                let found = (library.ibv_get_device_name)(device);
                if !found.is_null() && CStr::from_ptr(found).to_bytes() == name.as_bytes() {
                    opened = Some(made((library.ibv_open_device)(device)));
                    break;
                }
            }
        }
        // SAFETY: it came from `ibv_get_device_list`, and this is the only time.
        unsafe { (library.ibv_free_device_list)(list) };
        let opened = opened.transpose().map_err(OpenError::Open)?;
        let Some(pointer) = opened else { return Ok(None) };
        let context = Self { library, pointer };
        // SAFETY: the descriptor is open as long as the device.
        unsafe { nonblocking(context.async_fd_number()) }.map_err(OpenError::Open)?;
        Ok(Some(context))
    }

    pub(crate) fn query_device(&self) -> io::Result<abi::DeviceAttr> {
        // SAFETY: all-zero bytes are a valid value.
        let mut attr: Roomy<abi::DeviceAttr> = unsafe { zeroed() };
        let to = (&raw mut attr).cast();
        // SAFETY: the device is open.
        done(unsafe { (self.library.ibv_query_device)(self.pointer.as_ptr(), to) })?;
        Ok(attr.known)
    }

    pub(crate) fn query_port(&self, port: u8) -> io::Result<abi::PortAttr> {
        // SAFETY: as in `query_device`.
        let mut attr: Roomy<abi::PortAttr> = unsafe { zeroed() };
        let to = (&raw mut attr).cast();
        // SAFETY: the device is open.
        done(unsafe { (self.library.ibv_query_port)(self.pointer.as_ptr(), port, to) })?;
        Ok(attr.known)
    }

    /// The next asynchronous event, acknowledged, if there is one now.
    pub(crate) fn next_event(&self) -> Option<Event> {
        // For an event of a port, the library writes only a part of the element.
        let mut event = abi::AsyncEvent { element: ptr::null_mut(), event_type: 0 };
        // SAFETY: the device is open, and its descriptor does not block.
        let result =
            unsafe { (self.library.ibv_get_async_event)(self.pointer.as_ptr(), &mut event) };
        if result != 0 {
            return None;
        }
        // SAFETY: the call succeeded. Destroying an object waits until its events are acknowledged,
        // so the element is valid until then. The kind of the event determines its type.
        unsafe {
            let number = match event.event_type {
                0 => Some((*event.element.cast::<abi::Cq>()).handle),
                14 | 15 => Some((*event.element.cast::<abi::Srq>()).handle),
                1..=7 | 16 => Some((*event.element.cast::<abi::Qp>()).qp_num),
                9..=13 | 17 | 18 => Some(*(&raw const event.element).cast::<u32>()),
                _ => None,
            };
            let kind = event.event_type;
            (self.library.ibv_ack_async_event)(&mut event);
            Some(Event { kind, number })
        }
    }

    fn async_fd_number(&self) -> c_int {
        // SAFETY: the device is open.
        unsafe { (*self.pointer.as_ptr()).async_fd }
    }

    /// Readable while there are asynchronous events.
    pub(crate) fn async_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: it is open as long as the device.
        unsafe { BorrowedFd::borrow_raw(self.async_fd_number()) }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: every object of the device holds an `Arc` of this, so none is left.
        unsafe { (self.library.ibv_close_device)(self.pointer.as_ptr()) };
    }
}

/// A protection domain.
#[derive(Debug)]
pub(crate) struct Pd {
    pub(super) context: Arc<Context>,
    pub(super) pointer: NonNull<abi::Pd>,
}

impl Pd {
    pub(crate) fn alloc(context: &Arc<Context>) -> io::Result<Self> {
        // SAFETY: the device is open.
        let pointer = unsafe { (context.library.ibv_alloc_pd)(context.pointer.as_ptr()) };
        Ok(Self { context: context.clone(), pointer: made(pointer)? })
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // SAFETY: every region and queue pair of the domain holds an `Arc` of this, so none is
        // left.
        unsafe { (self.context.library.ibv_dealloc_pd)(self.pointer.as_ptr()) };
    }
}

/// A completion event channel.
#[derive(Debug)]
pub(crate) struct Channel {
    context: Arc<Context>,
    pointer: NonNull<abi::CompChannel>,
}

impl Channel {
    pub(crate) fn create(context: &Arc<Context>) -> io::Result<Self> {
        // SAFETY: the device is open.
        let pointer =
            unsafe { (context.library.ibv_create_comp_channel)(context.pointer.as_ptr()) };
        let channel = Self { context: context.clone(), pointer: made(pointer)? };
        // SAFETY: the descriptor is open as long as the channel.
        unsafe { nonblocking((*channel.pointer.as_ptr()).fd) }?;
        Ok(channel)
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: it is open as long as the channel.
        unsafe { BorrowedFd::borrow_raw((*self.pointer.as_ptr()).fd) }
    }

    /// The creation number of the next event's queue, if there is an event now. The event is
    /// acknowledged.
    pub(crate) fn next_event(&self) -> Option<u64> {
        let (mut cq, mut number) = (ptr::null_mut(), ptr::null_mut());
        let library = self.context.library;
        // SAFETY: the channel exists and does not block.
        let result =
            unsafe { (library.ibv_get_cq_event)(self.pointer.as_ptr(), &mut cq, &mut number) };
        if result != 0 {
            return None;
        }
        // SAFETY: destroying a queue waits until its events are acknowledged, so it exists until
        // then.
        unsafe { (library.ibv_ack_cq_events)(cq, 1) };
        Some(number as u64)
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: every queue that uses it holds an `Arc` of this, so none is left.
        unsafe { (self.context.library.ibv_destroy_comp_channel)(self.pointer.as_ptr()) };
    }
}

/// A completion queue.
#[derive(Debug)]
pub(crate) struct Cq {
    context: Arc<Context>,
    pub(super) pointer: NonNull<abi::Cq>,
    _channel: Option<Arc<Channel>>,
    pub(super) ops: CqOps,
}

/// The provider's functions for a completion queue.
#[derive(Debug, Clone, Copy)]
pub(super) struct CqOps {
    pub(super) poll: unsafe extern "C" fn(*mut abi::Cq, c_int, *mut abi::Wc) -> c_int,
    req_notify: unsafe extern "C" fn(*mut abi::Cq, c_int) -> c_int,
}

impl Cq {
    /// Makes a queue with at least `depth` entries. Its events carry `number`.
    pub(crate) fn create(
        context: &Arc<Context>,
        depth: c_int,
        number: u64,
        channel: Option<&Arc<Channel>>,
    ) -> io::Result<Self> {
        let pointer = channel.map_or(ptr::null_mut(), |channel| channel.pointer.as_ptr());
        // SAFETY: device and channel exist; the number is never followed as a pointer.
        let pointer = unsafe {
            let number = number as *mut c_void;
            (context.library.ibv_create_cq)(context.pointer.as_ptr(), depth, number, pointer, 0)
        };
        let pointer = made(pointer)?;
        // SAFETY: the device is open, and its operations do not change.
        let ops = unsafe { &(*context.pointer.as_ptr()).ops };
        let (Some(poll), Some(req_notify)) = (ops.poll_cq, ops.req_notify_cq) else {
            // SAFETY: it was just made, and nothing uses it.
            unsafe { (context.library.ibv_destroy_cq)(pointer.as_ptr()) };
            return Err(io::ErrorKind::Unsupported.into());
        };
        let ops = CqOps { poll, req_notify };
        Ok(Self { context: context.clone(), pointer, _channel: channel.cloned(), ops })
    }

    /// The number by which asynchronous events name it, and its number of entries.
    pub(crate) fn handle_and_depth(&self) -> (u32, usize) {
        // SAFETY: the queue exists.
        let cq = unsafe { &*self.pointer.as_ptr() };
        (cq.handle, usize::try_from(cq.cqe).unwrap_or(0))
    }

    pub(crate) fn req_notify(&self, solicited_only: bool) -> io::Result<()> {
        // SAFETY: the queue exists.
        done(unsafe { (self.ops.req_notify)(self.pointer.as_ptr(), c_int::from(solicited_only)) })
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        // SAFETY: every queue pair that uses it holds an `Arc` of this, so none is left.
        unsafe { (self.context.library.ibv_destroy_cq)(self.pointer.as_ptr()) };
    }
}

/// An address handle.
#[derive(Debug)]
pub(crate) struct Ah {
    pd: Arc<Pd>,
    pointer: NonNull<abi::Ah>,
}

impl Ah {
    pub(crate) fn create(pd: &Arc<Pd>, attr: &mut abi::AhAttr) -> io::Result<Self> {
        // SAFETY: the domain exists.
        let pointer = unsafe { (pd.context.library.ibv_create_ah)(pd.pointer.as_ptr(), attr) };
        Ok(Self { pd: pd.clone(), pointer: made(pointer)? })
    }

    /// The address by which requests name it. They are valid only while it lives.
    pub(crate) fn address(&self) -> u64 {
        self.pointer.as_ptr() as u64
    }
}

impl Drop for Ah {
    fn drop(&mut self) {
        // SAFETY: it is destroyed once.
        unsafe { (self.pd.context.library.ibv_destroy_ah)(self.pointer.as_ptr()) };
    }
}

/// A shared receive queue.
#[derive(Debug)]
pub(crate) struct Srq {
    pd: Arc<Pd>,
    pub(super) pointer: NonNull<abi::Srq>,
    pub(super) max_sge: usize,
    pub(super) post_recv:
        unsafe extern "C" fn(*mut abi::Srq, *mut abi::RecvWr, *mut *mut abi::RecvWr) -> c_int,
}

impl Srq {
    pub(crate) fn create(pd: &Arc<Pd>, attr: abi::SrqAttr) -> io::Result<Self> {
        let context = &pd.context;
        let mut init = abi::SrqInitAttr { srq_context: ptr::null_mut(), attr };
        // SAFETY: the domain exists.
        let pointer =
            made(unsafe { (context.library.ibv_create_srq)(pd.pointer.as_ptr(), &mut init) })?;
        // SAFETY: the device is open, and its operations do not change.
        let Some(post_recv) = (unsafe { (*context.pointer.as_ptr()).ops.post_srq_recv }) else {
            // SAFETY: it was just made, and nothing uses it.
            unsafe { (context.library.ibv_destroy_srq)(pointer.as_ptr()) };
            return Err(io::ErrorKind::Unsupported.into());
        };
        // The library reports the actual sizes, which are at least the requested ones.
        let max_sge = init.attr.max_sge as usize;
        Ok(Self { pd: pd.clone(), pointer, max_sge, post_recv })
    }

    /// The number by which asynchronous events name it.
    pub(crate) fn handle(&self) -> u32 {
        // SAFETY: the queue exists.
        unsafe { (*self.pointer.as_ptr()).handle }
    }

    pub(crate) fn modify(&self, attr: &mut abi::SrqAttr, mask: c_int) -> io::Result<()> {
        // SAFETY: the queue exists.
        done(unsafe { (self.pd.context.library.ibv_modify_srq)(self.pointer.as_ptr(), attr, mask) })
    }

    pub(crate) fn query(&self) -> io::Result<abi::SrqAttr> {
        let mut attr = abi::SrqAttr::default();
        // SAFETY: the queue exists.
        done(unsafe { (self.pd.context.library.ibv_query_srq)(self.pointer.as_ptr(), &mut attr) })?;
        Ok(attr)
    }
}

impl Drop for Srq {
    fn drop(&mut self) {
        // SAFETY: every queue pair that uses it holds an `Arc` of this, so none is left.
        unsafe { (self.pd.context.library.ibv_destroy_srq)(self.pointer.as_ptr()) };
    }
}

/// A queue pair.
#[derive(Debug)]
pub(crate) struct Qp {
    pub(super) pd: Arc<Pd>,
    pub(super) pointer: NonNull<abi::Qp>,
    _cqs: [Arc<Cq>; 2],
    _srq: Option<Arc<Srq>>,
    caps: QpCaps,
    pub(super) ops: QpOps,
    /// For requests without a form in `struct ibv_send_wr`.
    pub(super) extended: Option<Extended>,
}

/// The provider's functions for a queue pair.
#[derive(Debug, Clone, Copy)]
pub(super) struct QpOps {
    pub(super) post_send:
        unsafe extern "C" fn(*mut abi::Qp, *mut abi::SendWr, *mut *mut abi::SendWr) -> c_int,
    pub(super) post_recv:
        unsafe extern "C" fn(*mut abi::Qp, *mut abi::RecvWr, *mut *mut abi::RecvWr) -> c_int,
}

impl Qp {
    /// Makes a queue pair of a type of `enum ibv_qp_type`, with the completion queues of sends and
    /// of receives.
    pub(crate) fn create(
        pd: &Arc<Pd>,
        cqs: [&Arc<Cq>; 2],
        srq: Option<&Arc<Srq>>,
        qp_type: c_int,
        cap: abi::QpCap,
        sq_sig_all: bool,
        operations: SendOps,
    ) -> io::Result<Self> {
        let context = &pd.context;
        let mut init = abi::QpInitAttr {
            qp_context: ptr::null_mut(),
            send_cq: cqs[0].pointer.as_ptr(),
            recv_cq: cqs[1].pointer.as_ptr(),
            srq: srq.map_or(ptr::null_mut(), |srq| srq.pointer.as_ptr()),
            cap,
            qp_type,
            sq_sig_all: c_int::from(sq_sig_all),
        };
        // SAFETY: domain and queues exist, also the shared receive queue.
        let extended = unsafe { context.create_qp(pd.pointer, &mut init, operations) };
        let (pointer, extended) = match extended {
            Some((pointer, extended)) => (pointer, Some(extended)),
            None => {
                // SAFETY: as above.
                let qp = unsafe { (context.library.ibv_create_qp)(pd.pointer.as_ptr(), &mut init) };
                (made(qp)?, None)
            }
        };
        // SAFETY: the device is open, and its operations do not change.
        let ops = unsafe { &(*context.pointer.as_ptr()).ops };
        let (Some(post_send), Some(post_recv)) = (ops.post_send, ops.post_recv) else {
            // SAFETY: it was just made, and nothing uses it.
            unsafe { (context.library.ibv_destroy_qp)(pointer.as_ptr()) };
            return Err(io::ErrorKind::Unsupported.into());
        };
        Ok(Self {
            pd: pd.clone(),
            pointer,
            _cqs: cqs.map(Arc::clone),
            _srq: srq.cloned(),
            caps: crate::convert::caps(init.cap),
            ops: QpOps { post_send, post_recv },
            extended,
        })
    }

    pub(crate) fn number(&self) -> u32 {
        // SAFETY: the queue pair exists.
        unsafe { (*self.pointer.as_ptr()).qp_num }
    }

    /// The actual sizes, which are at least the requested ones.
    pub(crate) fn caps(&self) -> QpCaps {
        self.caps
    }

    pub(crate) fn modify(&self, attr: &mut abi::QpAttr, mask: c_int) -> io::Result<()> {
        // SAFETY: the queue pair exists.
        done(unsafe { (self.pd.context.library.ibv_modify_qp)(self.pointer.as_ptr(), attr, mask) })
    }

    pub(crate) fn query(&self, mask: c_int) -> io::Result<abi::QpAttr> {
        let mut attr = abi::QpAttr::default();
        // SAFETY: all-zero bytes are a valid value; the call only writes it.
        let mut init = unsafe { zeroed() };
        let query = self.pd.context.library.ibv_query_qp;
        // SAFETY: the queue pair exists.
        done(unsafe { query(self.pointer.as_ptr(), &mut attr, mask, &mut init) })?;
        Ok(attr)
    }
}

impl Qp {
    /// Attaches to the group with this GID. The LID is 0, because Ethernet has none.
    pub(crate) fn attach_mcast(&self, gid: &[u8; 16]) -> io::Result<()> {
        // SAFETY: the queue pair exists, the GID is only read.
        done(unsafe { (self.pd.context.library.ibv_attach_mcast)(self.pointer.as_ptr(), gid, 0) })
    }

    pub(crate) fn detach_mcast(&self, gid: &[u8; 16]) -> io::Result<()> {
        // SAFETY: as above.
        done(unsafe { (self.pd.context.library.ibv_detach_mcast)(self.pointer.as_ptr(), gid, 0) })
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        // SAFETY: it is destroyed once.
        unsafe { (self.pd.context.library.ibv_destroy_qp)(self.pointer.as_ptr()) };
    }
}
