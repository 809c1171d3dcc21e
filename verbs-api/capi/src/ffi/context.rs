//! Contexts. The device is opened with the first object.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::c_int;
use std::net::IpAddr;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use rocinante_soft::model::event::AsyncEvent;
use rocinante_soft::{FAULTS_ARE_ON, Inbox, Prepared, Wishes};

use super::border::{Outcome, afford};
use super::object::{Object, Private};
use super::wait::Given;
use super::{ending, fork, wait};
use crate::abi;
use crate::convert::{self, errno};
use crate::devices::Found;
use crate::log::{Level, print, say};
use crate::plain;
use crate::report;

/// The private part of a context.
pub(super) struct Shared {
    pub(super) found: Found,
    opened: OnceLock<Opened>,
    /// The prepared context that the first object opens.
    prepared: Mutex<Option<Prepared>>,
    /// Its events, and the device's then: they can be asked for while it is opened.
    events: Arc<Inbox>,
    /// Readable while there are asynchronous events; the program's `async_fd`. It is a set of
    /// descriptors, so its flags are the program's.
    pub(super) async_fd: Given,
    /// The process that opened it.
    generation: u64,
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
    const KIND: usize = 2;
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
    unsafe { Object::own_or_inherited(context.byte_sub(INSIDE).cast()) }
}

impl Shared {
    /// The device, which this opens if it is not open yet.
    pub(super) fn device(&self) -> Outcome<&plain::Device> {
        self.opened().map(|opened| &opened.device)
    }

    /// `enum ibv_mtu` of the largest path MTU that a queue pair may have, once the device is open:
    /// a link that carries more since then changes nothing.
    pub(super) fn mtu(&self) -> Option<c_int> {
        self.opened.get().map(|opened| convert::mtu_code(opened.device.mtu()))
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
            Err(error) => return Err(self.found.refused(&error)),
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
        // Never silently: the program shows nothing of them.
        if let Some((_, faults)) = attr.chosen_because.split_once(FAULTS_ARE_ON) {
            print(format_args!("{}: {FAULTS_ARE_ON}{faults}", self.found.name));
        }
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

    pub(super) fn next_event(&self) -> Option<AsyncEvent> {
        self.events.next()
    }

    /// The GID table as it is now: a hole is `None`.
    pub(super) fn gids(&self) -> Outcome<Vec<Option<IpAddr>>> {
        self.is_own()?;
        Ok(self.events.gids().unwrap_or_default())
    }

    /// # Errors
    /// `EIO` in a child of the process that opened it: the child opens the device anew.
    pub(super) fn is_own(&self) -> Outcome<()> {
        if self.is_inherited() { Err(libc::EIO) } else { Ok(()) }
    }

    /// Whether it is a copy of a parent's. Its objects have locks of threads that are not here:
    /// they are neither used nor freed.
    pub(super) fn is_inherited(&self) -> bool {
        self.generation != fork::mark()
    }

    /// Frees the private part of an object, unless it is a copy of a parent's.
    pub(super) fn free<T>(&self, ours: T) {
        if self.is_inherited() {
            std::mem::forget(ours);
        }
    }
}

/// The private part of a new context.
pub(super) fn prepare(found: &Found) -> Outcome<Shared> {
    afford(0)?;
    // By now another interface may have its name.
    let interface = found.now().ok_or(libc::ENODEV)?;
    let wishes = Wishes { refuses_late: true, ..Wishes::default() };
    let prepared = wishes.prepare_interface(&interface.name);
    let prepared = prepared.map_err(|error| found.refused(&error))?;
    prepared.events.take_places(&found.gids);
    let async_fd = prepared.events.fd().try_clone_to_owned();
    let async_fd = async_fd.map_err(|error| error.raw_os_error().unwrap_or(libc::EMFILE))?;
    let async_fd = Given::from(async_fd);
    Ok(Shared {
        found: found.clone(),
        events: prepared.events.clone(),
        opened: OnceLock::new(),
        prepared: Mutex::new(Some(prepared)),
        async_fd,
        generation: fork::mark(),
        objects: Mutex::default(),
    })
}

/// Makes a context of its public and its private part.
pub(super) fn make(verbs: abi::VerbsContext, shared: Shared) -> *mut abi::Context {
    let verbs = Object::make(verbs, shared);
    // SAFETY: it points to the structure that was just made.
    unsafe { &raw mut (*verbs).context }
}

/// The device knows objects by numbers, and each context has its own. Error: `EINVAL` for objects
/// of two contexts.
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

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;
    use crate::devices::limited;

    /// The first object opens the device, which may wait for an agent or for another process.
    #[test]
    fn events_and_addresses_are_told_while_the_device_is_opened() {
        let found = limited(Some("lo")).expect("a list").remove(0);
        let shared = Arc::new(prepare(&found).expect("a context"));
        let opening = shared.prepared.lock();
        let (send, told) = channel();
        let asks = shared.clone();
        let asking =
            std::thread::spawn(move || send.send((asks.next_event(), asks.gids().unwrap())));
        let heard = told.recv_timeout(Duration::from_secs(20));
        drop(opening);
        asking.join().unwrap().unwrap();
        assert_eq!(heard.expect("it waits for the opening"), (None, found.gids));
        // They are those of the device, too.
        let device = shared.device().expect("an open device");
        assert!(Arc::ptr_eq(&device.events, &shared.events));
    }
}
