//! Asynchronous events.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::ops::ControlFlow;

use rocinante_soft::model::event::AsyncEvent;
use rocinante_stack::verbs::QpEvent;

use super::border::quiet;
use super::context::{self, Shared};
use super::cq::Queue;
use super::object::Unacknowledged;
use super::qp::Pair;
use super::srq;
use super::wait::{self, Sleep};
use crate::abi;

/// `enum ibv_event_type`.
mod kind {
    pub(super) const CQ_ERR: i32 = 0;
    pub(super) const QP_FATAL: i32 = 1;
    pub(super) const QP_REQ_ERR: i32 = 2;
    pub(super) const QP_ACCESS_ERR: i32 = 3;
    pub(super) const COMM_EST: i32 = 4;
    pub(super) const SQ_DRAINED: i32 = 5;
    pub(super) const DEVICE_FATAL: i32 = 8;
    pub(super) const PORT_ACTIVE: i32 = 9;
    pub(super) const PORT_ERR: i32 = 10;
    pub(super) const SRQ_ERR: i32 = 14;
    pub(super) const SRQ_LIMIT_REACHED: i32 = 15;
    pub(super) const QP_LAST_WQE_REACHED: i32 = 16;
    pub(super) const GID_CHANGE: i32 = 18;
}

/// The object that an event names.
enum Element {
    Qp(u32),
    Cq(u32),
    Srq(u32),
    Port,
}

fn named(event: AsyncEvent) -> Option<(c_int, Element)> {
    Some(match event {
        AsyncEvent::Qp { qpn, event } => {
            let kind = match event {
                QpEvent::CommEst => kind::COMM_EST,
                QpEvent::SqDrained => kind::SQ_DRAINED,
                QpEvent::Fatal => kind::QP_FATAL,
                QpEvent::ReqErr => kind::QP_REQ_ERR,
                QpEvent::AccessErr => kind::QP_ACCESS_ERR,
                QpEvent::LastWqeReached => kind::QP_LAST_WQE_REACHED,
                _ => return None,
            };
            (kind, Element::Qp(qpn.value()))
        }
        AsyncEvent::CqOverflow { cq } => (kind::CQ_ERR, Element::Cq(cq)),
        AsyncEvent::SrqLimitReached { srq } => (kind::SRQ_LIMIT_REACHED, Element::Srq(srq)),
        AsyncEvent::SrqErr { srq } => (kind::SRQ_ERR, Element::Srq(srq)),
        AsyncEvent::DeviceFatal => (kind::DEVICE_FATAL, Element::Port),
        AsyncEvent::PortActive => (kind::PORT_ACTIVE, Element::Port),
        AsyncEvent::PortErr => (kind::PORT_ERR, Element::Port),
        AsyncEvent::GidChange => (kind::GID_CHANGE, Element::Port),
        _ => return None,
    })
}

/// The object of the event as the program knows it, counted as taken. `None` if it is gone.
fn taken(shared: &Shared, element: &Element) -> Option<usize> {
    let objects = shared.objects.lock();
    let found = match element {
        // IBV port numbers begin with 1, and the union's first bytes are the number.
        Element::Port => return Some(1),
        Element::Qp(number) => *objects.qps.get(number)?,
        Element::Cq(number) => *objects.cqs.get(number)?,
        Element::Srq(number) => *objects.srqs.get(number)?,
    };
    // SAFETY: objects leave the table, under its lock, before they are destroyed.
    unsafe { of(element_kind(element), found) }?.took();
    Some(found)
}

#[derive(Clone, Copy)]
enum Kind {
    Qp,
    Cq,
    Srq,
}

fn element_kind(element: &Element) -> Option<Kind> {
    match element {
        Element::Qp(_) => Some(Kind::Qp),
        Element::Cq(_) => Some(Kind::Cq),
        Element::Srq(_) => Some(Kind::Srq),
        Element::Port => None,
    }
}

/// The counts of unacknowledged events of an object.
///
/// # Safety
/// The object is one of the program's.
unsafe fn of<'a>(kind: Option<Kind>, object: usize) -> Option<&'a Unacknowledged> {
    // SAFETY: the caller vouches for it.
    unsafe {
        match kind? {
            Kind::Qp => Pair::of(object as *mut abi::Qp).ok().map(|pair| &pair.events),
            Kind::Cq => Queue::of(object as *mut abi::Cq).ok().map(|queue| &queue.async_events),
            Kind::Srq => srq::of(object as *mut abi::Srq).ok().map(|queue| &queue.events),
        }
    }
}

/// `ibv_get_async_event(3)`.
pub(super) unsafe extern "C-unwind" fn get_async_event(
    context: *mut abi::Context,
    event: *mut abi::AsyncEvent,
) -> c_int {
    let taken = wait::cancellable(|| {
        // SAFETY: the program's context.
        let shared = unsafe { context::of(context)? };
        shared.is_own()?;
        if event.is_null() {
            return Err(libc::EINVAL);
        }
        if let Some((element, event_type)) = next(shared) {
            let element = element as *mut _;
            // SAFETY: the program's structure.
            unsafe { event.write(abi::AsyncEvent { element, event_type }) };
            return Ok(ControlFlow::Break(0));
        }
        wait::may_block(&shared.async_fd)?;
        Ok(ControlFlow::Continue(Sleep::Readable(shared.async_fd.number())))
    });
    taken.unwrap_or(-1)
}

fn next(shared: &Shared) -> Option<(usize, c_int)> {
    while let Some(event) = shared.next_event() {
        if let Some((event_type, element)) = named(event)
            && let Some(object) = taken(shared, &element)
        {
            return Some((object, event_type));
        }
    }
    None
}

/// `ibv_ack_async_event(3)`.
pub(super) unsafe extern "C" fn ack_async_event(event: *mut abi::AsyncEvent) {
    // SAFETY: the program's event, and the object that it names.
    quiet(|| unsafe {
        let Some(event) = event.as_ref() else { return };
        let kind = match event.event_type {
            kind::CQ_ERR => Kind::Cq,
            kind::QP_FATAL..=kind::SQ_DRAINED | kind::QP_LAST_WQE_REACHED => Kind::Qp,
            kind::SRQ_ERR | kind::SRQ_LIMIT_REACHED => Kind::Srq,
            _ => return,
        };
        if let Some(events) = of(Some(kind), event.element as usize) {
            events.acknowledged(1);
        }
    });
}
