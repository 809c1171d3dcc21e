//! Completion channels.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_uint, c_void};
use std::ops::ControlFlow;

use crate::plain;

use super::border::{Outcome, afford, pointer, quiet, status};
use super::context::{self, refused};
use super::cq::Queue;
use super::object::{Object, Private, Users};
use super::wait::{self, Given, Sleep};
use crate::abi;

/// The private part of a channel.
pub(super) struct Channel {
    pub(super) channel: plain::Channel,
    /// The program's descriptor.
    fd: Given,
    pub(super) users: Users,
}

impl Private for Channel {
    type Public = abi::CompChannel;
    const KIND: usize = 7;
}

/// `ibv_create_comp_channel(3)`.
pub(super) unsafe extern "C" fn create_comp_channel(
    context: *mut abi::Context,
) -> *mut abi::CompChannel {
    pointer(|| {
        // SAFETY: the program's context.
        let shared = unsafe { context::of(context)? };
        afford(0)?;
        let channel =
            shared.device()?.create_channel().map_err(refused("ibv_create_comp_channel"))?;
        let fd = Given::following(channel.fd())?;
        let public = abi::CompChannel { context, fd: fd.number(), refcnt: 0 };
        Ok(Object::make(public, Channel { channel, fd, users: Users::default() }))
    })
}

/// `ibv_destroy_comp_channel(3)`.
pub(super) unsafe extern "C" fn destroy_comp_channel(channel: *mut abi::CompChannel) -> c_int {
    status(|| {
        // SAFETY: the program's channel, which it gives back.
        unsafe {
            let object = Object::<Channel>::own_or_inherited(channel)?;
            let shared = context::of((*channel).context)?;
            if !shared.is_inherited() {
                object.private.users.none()?;
            }
            shared.free(object.unmake());
        }
        Ok(())
    })
}

/// `ibv_get_cq_event(3)`.
pub(super) unsafe extern "C-unwind" fn get_cq_event(
    channel: *mut abi::CompChannel,
    cq: *mut *mut abi::Cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    let event = wait::cancellable(|| {
        // SAFETY: the program's channel, and its context.
        let (object, shared) =
            unsafe { (Object::<Channel>::of(channel)?, context::of((*channel).context)?) };
        shared.is_own()?;
        if cq.is_null() || cq_context.is_null() {
            return Err(libc::EINVAL);
        }
        let Channel { channel, fd, .. } = &object.private;
        while let Some(number) = channel.try_event().map(|cq| cq.id().0) {
            let objects = shared.objects.lock();
            let Some(found) = objects.cqs.get(&number) else { continue };
            let found = *found as *mut abi::Cq;
            // SAFETY: a queue leaves the table, under its lock, before it is destroyed; the others
            // are the program's pointers.
            unsafe {
                Queue::of(found)?.events.took();
                cq.write(found);
                cq_context.write((*found).cq_context);
            }
            return Ok(ControlFlow::Break(0));
        }
        wait::may_block(fd)?;
        Ok(ControlFlow::Continue(Sleep::Completion(channel.sleep())))
    });
    event.unwrap_or(-1)
}

/// `ibv_ack_cq_events(3)`.
pub(super) unsafe extern "C" fn ack_cq_events(cq: *mut abi::Cq, events: c_uint) {
    // SAFETY: the program's queue.
    quiet(|| unsafe {
        if let Ok(queue) = Queue::of(cq) {
            queue.events.acknowledged(events);
            (*cq).comp_events_completed = (*cq).comp_events_completed.wrapping_add(events);
        }
    });
}

/// # Safety
/// As [`Object::of`].
pub(super) unsafe fn of<'a>(channel: *mut abi::CompChannel) -> Outcome<&'a Channel> {
    // SAFETY: the caller vouches for it.
    unsafe { Object::<Channel>::of(channel) }.map(|object| &object.private)
}
