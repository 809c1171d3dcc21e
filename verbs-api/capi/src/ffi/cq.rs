//! Completion queues.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};

use parking_lot::RawMutex;
use parking_lot::lock_api::RawMutex as _;
use rocinante_soft::model::device::Limits;
use rocinante_stack::types::Qpn;

use super::border::{Outcome, afford, caught, pointer, posted, refuse, status};
use super::channel;
use super::context::{self, refused};
use super::cq_ex;
use super::object::{Object, Private, Unacknowledged, Users};
use super::pd::Domain;
use crate::abi;
use crate::convert;
use crate::failures;
use crate::plain;

/// The private part of a completion queue.
pub(super) struct Queue {
    pub(super) cq: plain::Cq,
    pub(super) users: Users,
    /// Events of its channel.
    pub(super) events: Unacknowledged,
    pub(super) async_events: Unacknowledged,
    /// Held from `ibv_start_poll` to `ibv_end_poll`.
    pub(super) polling: RawMutex,
    /// The completion between the two.
    pub(super) current: UnsafeCell<abi::Wc>,
}

impl Private for Queue {
    type Public = abi::CqEx;
    const KIND: usize = 8;
}

impl Queue {
    /// # Safety
    /// As [`Object::of`].
    #[inline]
    pub(super) unsafe fn of<'a>(cq: *mut abi::Cq) -> Outcome<&'a Self> {
        // SAFETY: the caller vouches for it; the structure begins with that of an extended queue.
        unsafe { Object::<Self>::of(cq.cast()) }.map(|object| &object.private)
    }
}

/// `ibv_create_cq(3)`.
pub(super) unsafe extern "C" fn create_cq(
    context: *mut abi::Context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut abi::CompChannel,
    comp_vector: c_int,
) -> *mut abi::Cq {
    // SAFETY: the program's objects.
    pointer(|| unsafe { create(context, cqe, cq_context, channel, comp_vector) }).cast()
}

/// `ibv_create_cq_ex(3)`.
pub(super) unsafe extern "C" fn create_cq_ex(
    context: *mut abi::Context,
    attr: *mut abi::CqInitAttrEx,
) -> *mut abi::CqEx {
    /// `IBV_CQ_INIT_ATTR_MASK_FLAGS` and `..._PD`.
    const KNOWN: u32 = 3;
    /// `IBV_CREATE_CQ_ATTR_SINGLE_THREADED`. A queue that overflows ends: `..._IGNORE_OVERRUN` is
    /// refused, as Soft-RoCE refuses it.
    const FLAGS: u32 = 1;
    /// `IBV_CREATE_CQ_SUP_WC_FLAGS` without time stamps, VLANs, flow and other tags.
    const WC_FLAGS: u64 = 0x7f;
    pointer(|| {
        // SAFETY: the program's structure and objects.
        unsafe {
            let attr = attr.as_ref().ok_or(libc::EINVAL)?;
            if attr.comp_mask & !KNOWN != 0 {
                return Err(libc::EINVAL);
            }
            if attr.wc_flags & !WC_FLAGS != 0
                || (attr.comp_mask & 1 != 0 && attr.flags & !FLAGS != 0)
            {
                return Err(libc::EOPNOTSUPP);
            }
            if attr.comp_mask & 2 != 0 {
                Domain::of(attr.parent_domain)?;
                context::same((*attr.parent_domain).context, context)?;
            }
            let (cqe, vector) = (c_int::try_from(attr.cqe), c_int::try_from(attr.comp_vector));
            let (cqe, vector) = (cqe.map_err(|_| libc::EINVAL)?, vector.map_err(|_| libc::EINVAL)?);
            create(context, cqe, attr.cq_context, attr.channel, vector)
        }
    })
}

/// # Safety
/// As for `ibv_create_cq(3)`.
unsafe fn create(
    context: *mut abi::Context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut abi::CompChannel,
    comp_vector: c_int,
) -> Outcome<*mut abi::CqEx> {
    // SAFETY: the program's context and channel.
    let (shared, events) = unsafe {
        let events = if channel.is_null() { None } else { Some(channel::of(channel)?) };
        if events.is_some() {
            context::same((*channel).context, context)?;
        }
        (context::of(context)?, events)
    };
    let depth = u32::try_from(cqe).map_err(|_| libc::EINVAL)?;
    // There is one completion vector.
    if comp_vector != 0 {
        return Err(libc::EINVAL);
    }
    let device = shared.device()?;
    afford(bytes(depth))?;
    let cq = device
        .create_cq(depth, events.map(|events| &events.channel))
        .map_err(refused("ibv_create_cq"))?;
    if let Some(events) = events {
        events.users.add();
    }
    let number = cq.number();
    let public = abi::Cq {
        context,
        channel,
        cq_context,
        handle: number,
        cqe,
        mutex: abi::MUTEX,
        cond: abi::COND,
        comp_events_completed: 0,
        async_events_completed: 0,
    };
    let queue = Queue {
        cq,
        users: Users::default(),
        events: Unacknowledged::default(),
        async_events: Unacknowledged::default(),
        polling: RawMutex::INIT,
        current: UnsafeCell::default(),
    };
    let made = Object::make(cq_ex::structure(public), queue);
    shared.objects.lock().cqs.insert(number, made as usize);
    Ok(made)
}

/// The most bytes that a queue of that depth takes. One that is too deep is refused for that.
fn bytes(depth: u32) -> usize {
    let depth = depth.min(Limits::default().max_cqe);
    depth as usize * 2 * size_of::<plain::Cqe>()
}

/// `ibv_resize_cq(3)`.
pub(super) unsafe extern "C" fn resize_cq(cq: *mut abi::Cq, cqe: c_int) -> c_int {
    status(|| {
        let depth = u32::try_from(cqe).ok().filter(|depth| *depth > 0).ok_or(libc::EINVAL)?;
        // SAFETY: the program's queue.
        let queue = unsafe { Queue::of(cq)? };
        afford(bytes(depth))?;
        queue.cq.resize(depth).map_err(refused("ibv_resize_cq"))?;
        // SAFETY: the program's queue.
        unsafe { (*cq).cqe = cqe };
        Ok(())
    })
}

/// `ibv_destroy_cq(3)`.
pub(super) unsafe extern "C" fn destroy_cq(cq: *mut abi::Cq) -> c_int {
    status(|| {
        // SAFETY: the program's queue, which it gives back.
        unsafe {
            let object = Object::<Queue>::own_or_inherited(cq.cast())?;
            let shared = context::of((*cq).context)?;
            if !shared.is_inherited() {
                let queue = &object.private;
                queue.users.none()?;
                shared.objects.lock().cqs.remove(&queue.cq.number());
                queue.events.wait();
                queue.async_events.wait();
                if let Ok(channel) = channel::of((*cq).channel) {
                    channel.users.remove();
                }
            }
            shared.free(object.unmake());
        }
        Ok(())
    })
}

/// `ibv_poll_cq(3)`: drives the device if there is no completion yet.
pub(super) unsafe extern "C" fn poll_cq(
    cq: *mut abi::Cq,
    entries: c_int,
    wc: *mut abi::Wc,
) -> c_int {
    // SAFETY: the program's queue and array.
    caught(|| unsafe { poll(cq, entries, wc) }).unwrap_or_else(|errno| -refuse(errno))
}

/// The number of completions.
///
/// # Safety
/// As for `ibv_poll_cq(3)`.
#[inline]
unsafe fn poll(cq: *mut abi::Cq, entries: c_int, wc: *mut abi::Wc) -> Outcome<c_int> {
    if entries <= 0 {
        return if entries == 0 { Ok(0) } else { Err(libc::EINVAL) };
    }
    if wc.is_null() {
        return Err(libc::EINVAL);
    }
    // SAFETY: the program's queue, and its array of `entries` entries, which are plain numbers.
    let (queue, out) = unsafe {
        (Queue::of(cq)?, std::slice::from_raw_parts_mut(wc, entries.unsigned_abs() as usize))
    };
    let count = queue.cq.take_or_drive(out, convert::wc);
    if count == 0 {
        // SAFETY: the program's queue.
        return if queue.cq.has_ended() { unsafe { ended(cq) } } else { Ok(0) };
    }
    if let Some(completions) = out.get(..count)
        && completions.iter().any(|wc| wc.status != 0)
    {
        // SAFETY: the program's queue.
        unsafe { tell(cq, completions) };
    }
    // No more than `entries`.
    Ok(count as c_int)
}

/// The errno of a queue that is empty and gets no more.
///
/// # Safety
/// It is the program's queue.
#[cold]
#[inline(never)]
unsafe fn ended(cq: *mut abi::Cq) -> Outcome<c_int> {
    // SAFETY: the caller vouches for it.
    let end = unsafe { Queue::of(cq) }?.cq.check_end();
    end.map(|()| 0).map_err(refused("ibv_poll_cq"))
}

/// Says why completions failed, if that was asked for.
///
/// # Safety
/// It is the program's queue.
#[cold]
#[inline(never)]
pub(super) unsafe fn tell(cq: *mut abi::Cq, completions: &[abi::Wc]) {
    // SAFETY: the queue's context.
    let Ok(shared) = (unsafe { context::of((*cq).context) }) else { return };
    failures::tell(completions, |qpn| {
        let opened = shared.if_opened()?;
        let (device, qpn) = (&opened.device, Qpn::new(qpn & 0xff_ffff));
        let (peer, patience) = (device.peer_of(qpn), device.patience_of(qpn));
        Some(failures::Asked { peer, patience, counters: device.counters() })
    });
}

/// `ibv_req_notify_cq(3)`.
pub(super) unsafe extern "C" fn req_notify_cq(cq: *mut abi::Cq, solicited_only: c_int) -> c_int {
    posted(|| {
        // SAFETY: the program's queue.
        unsafe { Queue::of(cq)? }.cq.req_notify(solicited_only != 0);
        Ok(())
    })
}
