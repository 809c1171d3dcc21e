//! Contexts. The device is opened with the first object.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::net::IpAddr;
use std::ptr;
use std::sync::OnceLock;

use parking_lot::Mutex;
use rocinante_soft::model::event::AsyncEvent;
use rocinante_soft::{Prepared, Wishes};

use super::border::{Outcome, afford};
use super::object::{Object, Private};
use super::wait::Given;
use super::{cq, ending, fork, memory, pd, post, qp, query, srq, stubs, wait};
use crate::abi;
use crate::convert::errno;
use crate::devices::Found;
use crate::log::{Level, say};
use crate::plain;
use crate::report;

/// The private part of a context.
pub(super) struct Shared {
    pub(super) found: Found,
    opened: OnceLock<Opened>,
    /// The prepared context that the first object opens.
    prepared: Mutex<Option<Prepared>>,
    /// Readable while there are asynchronous events; the program's `async_fd`. It is a set of
    /// descriptors, so its flags are the program's.
    pub(super) async_fd: Given,
    /// The process that opened it.
    generation: u32,
    pub(super) objects: Mutex<Objects>,
}

/// The objects that events name, by their numbers: addresses of the public structures.
#[derive(Default)]
pub(super) struct Objects {
    pub(super) qps: HashMap<u32, usize>,
    pub(super) cqs: HashMap<u32, usize>,
    pub(super) srqs: HashMap<u32, usize>,
}

pub(super) struct Opened {
    pub(super) device: plain::Device,
    /// Of the counters, if they may be asked for.
    reported: Option<plain::Watched>,
}

impl Private for Shared {
    type Public = abi::VerbsContext;
    const MAGIC: u64 = 0x524f_4345_0000_0002;
}

/// An open device has buffers for packets, tables, and a thread with its stack.
const DEVICE_BYTES: usize = 64 << 20;

/// Where `struct ibv_context` begins in its `struct verbs_context`.
const INSIDE: usize = std::mem::offset_of!(abi::VerbsContext, context);

/// The private part of the program's context.
///
/// # Safety
/// As [`Object::of`].
pub(super) unsafe fn of<'a>(context: *mut abi::Context) -> Outcome<&'a Shared> {
    // SAFETY: the caller vouches for it.
    unsafe { object(context) }.map(|object| &object.private)
}

unsafe fn object<'a>(context: *mut abi::Context) -> Outcome<&'a Object<Shared>> {
    if context.is_null() {
        return Err(libc::EINVAL);
    }
    // SAFETY: the caller vouches for it; `open` gave away such pointers.
    unsafe { Object::of(context.byte_sub(INSIDE).cast()) }
}

impl Shared {
    /// The device, which this opens if it is not open yet.
    pub(super) fn device(&self) -> Outcome<&plain::Device> {
        self.opened().map(|opened| &opened.device)
    }

    pub(super) fn opened(&self) -> Outcome<&Opened> {
        self.is_own()?;
        if let Some(opened) = self.opened.get() {
            return Ok(opened);
        }
        let mut prepared = self.prepared.lock();
        if let Some(opened) = self.opened.get() {
            return Ok(opened);
        }
        let interface = &self.found.interface.name;
        afford(DEVICE_BYTES)?;
        let ready = prepared.as_ref().ok_or(libc::ENODEV)?;
        let device = match wait::without_signals(|| ready.open()) {
            Ok(device) => plain::Device::new(device),
            Err(error) => return Err(cannot_open(&self.found, &error)),
        };
        *prepared = None;
        let attr = device.query();
        let addresses: Vec<String> = device.gids.iter().map(ToString::to_string).collect();
        say(
            if attr.instead_of.is_some() { Level::Warn } else { Level::Info },
            format_args!(
                "{}: {interface} on {}: {}; bound UDP port 4791 of {}",
                self.found.name,
                device.capabilities.backend,
                attr.chosen_because,
                addresses.join(", ")
            ),
        );
        ending::watch();
        let reported = report::is_wanted().then(|| device.watch());
        if let Some(counters) = &reported {
            ending::report();
            report::opened(&self.found, counters.clone());
        }
        Ok(self.opened.get_or_init(|| Opened { device, reported }))
    }

    /// The open device, if there is one.
    pub(super) fn if_opened(&self) -> Option<&Opened> {
        self.opened.get()
    }

    /// The next asynchronous event, if there is one.
    pub(super) fn next_event(&self) -> Option<AsyncEvent> {
        let prepared = match self.opened.get() {
            Some(opened) => return opened.device.next_event(),
            None => self.prepared.lock(),
        };
        // Another thread may have opened it meanwhile.
        match (self.opened.get(), &*prepared) {
            (Some(opened), _) => opened.device.next_event(),
            (None, prepared) => prepared.as_ref()?.next_event(),
        }
    }

    /// The GID table as it is now: a hole is `None`.
    pub(super) fn gids(&self) -> Outcome<Vec<Option<IpAddr>>> {
        self.is_own()?;
        let prepared = match self.opened.get() {
            Some(opened) => return Ok(opened.device.gid_table()),
            None => self.prepared.lock(),
        };
        match (self.opened.get(), &*prepared) {
            (Some(opened), _) => Ok(opened.device.gid_table()),
            (None, prepared) => Ok(prepared.as_ref().ok_or(libc::ENODEV)?.gid_table()),
        }
    }

    /// # Errors
    /// `EIO` in a child of the process that opened it: the child opens the device anew.
    pub(super) fn is_own(&self) -> Outcome<()> {
        if self.is_inherited() { Err(libc::EIO) } else { Ok(()) }
    }

    /// Whether it is a copy of a parent's. Its objects have locks of threads that are not here:
    /// they are neither used nor freed.
    pub(super) fn is_inherited(&self) -> bool {
        self.generation != fork::generation()
    }

    /// Frees the private part of an object, unless it is a copy of a parent's.
    pub(super) fn free<T>(&self, ours: T) {
        if self.is_inherited() {
            std::mem::forget(ours);
        }
    }
}

/// Says why the device cannot be opened.
fn cannot_open(found: &Found, error: &rocinante_soft::model::error::VerbsError) -> i32 {
    let interface = &found.interface.name;
    say(Level::Warn, format_args!("{} ({interface}): {error}", found.name));
    error.errno()
}

/// Makes a context.
pub(super) fn open(device: *mut abi::Device, found: &Found) -> Outcome<*mut abi::Context> {
    afford(0)?;
    // By now another interface may have its name.
    let interface = found.now().ok_or(libc::ENODEV)?;
    let wishes = Wishes { refuses_late: true, ..Wishes::default() };
    let prepared = wishes.prepare_interface(&interface.name);
    let prepared = prepared.map_err(|error| cannot_open(found, &error))?;
    prepared.take_places(&found.gids);
    let async_fd = prepared.event_fd().try_clone_to_owned();
    let async_fd = async_fd.map_err(|error| error.raw_os_error().unwrap_or(libc::EMFILE))?;
    let async_fd = Given::from(async_fd);
    let ops = abi::ContextOps {
        compat_mw: [ptr::null(); 7],
        alloc_mw: memory::alloc_mw,
        bind_mw: post::bind_mw,
        dealloc_mw: memory::dealloc_mw,
        compat_create_cq: ptr::null(),
        poll_cq: cq::poll_cq,
        req_notify_cq: cq::req_notify_cq,
        compat_srq: [ptr::null(); 7],
        post_srq_recv: post::post_srq_recv,
        compat_qp: [ptr::null(); 4],
        post_send: post::post_send,
        post_recv: post::post_recv,
        compat_rest: [ptr::null(); 5],
    };
    let context = abi::Context {
        device,
        ops,
        // There is no file of the kernel behind it; programs only look whether it is negative.
        cmd_fd: async_fd.number(),
        async_fd: async_fd.number(),
        num_comp_vectors: 1,
        mutex: libc::PTHREAD_MUTEX_INITIALIZER,
        // __VERBS_ABI_IS_EXTENDED.
        abi_compat: ptr::without_provenance_mut(usize::MAX),
    };
    let verbs = abi::VerbsContext {
        query_port: query::query_port_ex,
        advise_mr: memory::advise_mr,
        alloc_null_mr: ptr::null(),
        counters: [ptr::null(); 4],
        dm: [ptr::null(); 3],
        flow_action: [ptr::null(); 3],
        modify_qp_rate_limit: ptr::null(),
        alloc_parent_domain: pd::alloc_parent_domain,
        dealloc_td: pd::dealloc_td,
        alloc_td: pd::alloc_td,
        modify_cq: ptr::null(),
        post_srq_ops: ptr::null(),
        rwq_and_wq: [ptr::null(); 5],
        query_rt_values: ptr::null(),
        create_cq_ex: cq::create_cq_ex,
        private: ptr::null(),
        query_device_ex: query::query_device_ex,
        flows: [ptr::null(); 4],
        open_qp: ptr::null(),
        create_qp_ex: qp::create_qp_ex,
        get_srq_num: srq::get_srq_num,
        create_srq_ex: srq::create_srq_ex,
        open_xrcd: ptr::null(),
        // The header's inline function calls it without a look.
        close_xrcd: stubs::one_argument,
        placeholder: 0,
        sz: size_of::<abi::VerbsContext>(),
        context,
    };
    let shared = Shared {
        found: found.clone(),
        opened: OnceLock::new(),
        prepared: Mutex::new(Some(prepared)),
        async_fd,
        generation: fork::generation(),
        objects: Mutex::default(),
    };
    let verbs = Object::make(verbs, shared);
    // SAFETY: it points to the structure that was just made.
    Ok(unsafe { &raw mut (*verbs).context })
}

/// The device knows objects by numbers, and each context has its own.
///
/// # Errors
/// `EINVAL` for objects of two contexts.
pub(super) fn same(one: *mut abi::Context, other: *mut abi::Context) -> Outcome<()> {
    if one == other { Ok(()) } else { Err(libc::EINVAL) }
}

/// Closes a context. Its objects keep the parts that they need.
///
/// # Safety
/// The program gives the context back.
pub(super) unsafe fn close(context: *mut abi::Context) -> Outcome<()> {
    // SAFETY: the caller vouches for it.
    let object = unsafe { object(context)? };
    let inherited = object.private.is_inherited();
    // SAFETY: as above.
    let shared = unsafe { object.unmake() };
    if inherited {
        std::mem::forget(shared);
        return Ok(());
    }
    let reported = shared.if_opened().and_then(|opened| opened.reported.clone());
    if let Some(counters) = &reported {
        report::closing(counters);
    }
    drop(shared);
    if let Some(counters) = &reported {
        report::closed(counters);
    }
    Ok(())
}

/// The errno of a refusal by the device of this context.
pub(super) fn refused(
    what: &'static str,
) -> impl FnOnce(rocinante_soft::model::error::VerbsError) -> i32 {
    move |error| errno(what, &error)
}
