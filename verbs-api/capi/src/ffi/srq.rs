//! Shared receive queues.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};

use rocinante_stack::SrqChange;

use super::border::{Outcome, afford, pointer, status};
use super::context::{self, refused};
use super::object::{Object, Private, Unacknowledged, Users};
use super::pd::Domain;
use super::stubs;
use crate::abi;
use crate::plain;

/// The private part of a shared receive queue.
pub(super) struct Shared {
    pub(super) srq: plain::Srq,
    pub(super) users: Users,
    pub(super) events: Unacknowledged,
    max_wr: u32,
}

impl Private for Shared {
    type Public = abi::Srq;
    const KIND: usize = 9;
}

/// # Safety
/// As [`Object::of`].
#[inline]
pub(super) unsafe fn of<'a>(srq: *mut abi::Srq) -> Outcome<&'a Shared> {
    // SAFETY: the caller vouches for it.
    unsafe { Object::<Shared>::of(srq) }.map(|object| &object.private)
}

/// `ibv_create_srq(3)`.
pub(super) unsafe extern "C" fn create_srq(
    pd: *mut abi::Pd,
    init: *mut abi::SrqInitAttr,
) -> *mut abi::Srq {
    pointer(|| {
        // SAFETY: the program's structure and domain.
        unsafe {
            let init = init.as_ref().ok_or(libc::EINVAL)?;
            create(pd, init.srq_context, &init.attr)
        }
    })
}

/// `ibv_create_srq_ex(3)`.
pub(super) unsafe extern "C" fn create_srq_ex(
    context: *mut abi::Context,
    init: *mut abi::SrqInitAttrEx,
) -> *mut abi::Srq {
    /// `IBV_SRQ_INIT_ATTR_TYPE` and `..._PD`.
    const TYPE: u32 = 1;
    const PD: u32 = 2;
    /// `IBV_SRQT_BASIC`.
    const BASIC: c_int = 0;
    pointer(|| {
        // SAFETY: the program's structure, context and domain.
        unsafe {
            context::of(context)?;
            let init = init.as_ref().ok_or(libc::EINVAL)?;
            if init.comp_mask & !(TYPE | PD) != 0
                || (init.comp_mask & TYPE != 0 && init.srq_type != BASIC)
            {
                return Err(libc::EOPNOTSUPP);
            }
            if init.comp_mask & PD == 0 {
                return Err(libc::EINVAL);
            }
            Domain::of(init.pd)?;
            context::same((*init.pd).context, context)?;
            create(init.pd, init.srq_context, &init.attr)
        }
    })
}

/// # Safety
/// As for `ibv_create_srq(3)`.
unsafe fn create(
    pd: *mut abi::Pd,
    srq_context: *mut c_void,
    attr: &abi::SrqAttr,
) -> Outcome<*mut abi::Srq> {
    // SAFETY: the program's domain, and its context.
    let (domain, context, shared) =
        unsafe { (Domain::of(pd)?, (*pd).context, context::of((*pd).context)?) };
    let limits = shared.found.attributes();
    let fits = |value: u32, max: c_int| value <= max.cast_unsigned();
    if attr.max_wr == 0
        || !fits(attr.max_wr, limits.max_srq_wr)
        || !fits(attr.max_sge, limits.max_srq_sge)
    {
        return Err(libc::EINVAL);
    }
    afford(bytes(attr.max_wr, attr.max_sge))?;
    let srq =
        domain.pd()?.create_srq(attr.max_wr, attr.max_sge).map_err(refused("ibv_create_srq"))?;
    domain.add_user();
    let number = srq.number();
    let public = abi::Srq {
        context,
        srq_context,
        pd,
        handle: number,
        mutex: abi::MUTEX,
        cond: abi::COND,
        events_completed: 0,
    };
    let (users, events) = (Users::default(), Unacknowledged::default());
    let max_wr = limits.max_srq_wr.cast_unsigned();
    let made = Object::make(public, Shared { srq, users, events, max_wr });
    shared.objects.lock().srqs.insert(number, made as usize);
    Ok(made)
}

/// About as many bytes as a queue takes.
fn bytes(max_wr: u32, max_sge: u32) -> usize {
    max_wr as usize * 2 * (64 + max_sge as usize * size_of::<abi::Sge>())
}

/// `ibv_modify_srq(3)`.
pub(super) unsafe extern "C" fn modify_srq(
    srq: *mut abi::Srq,
    attr: *mut abi::SrqAttr,
    mask: c_int,
) -> c_int {
    const MAX_WR: c_int = 1;
    const LIMIT: c_int = 2;
    status(|| {
        // SAFETY: the program's queue and structure.
        let (shared, attr) = unsafe { (of(srq)?, attr.as_ref().ok_or(libc::EINVAL)?) };
        let max_wr = (mask & MAX_WR != 0).then_some(attr.max_wr);
        if mask & !(MAX_WR | LIMIT) != 0
            || max_wr.is_some_and(|depth| depth == 0 || depth > shared.max_wr)
        {
            return Err(libc::EINVAL);
        }
        if let Some(depth) = max_wr {
            afford(bytes(depth, shared.srq.query().max_sge))?;
        }
        let srq_limit = (mask & LIMIT != 0).then_some(attr.srq_limit);
        shared.srq.modify(&SrqChange { max_wr, srq_limit }).map_err(refused("ibv_modify_srq"))
    })
}

/// `ibv_query_srq(3)`.
pub(super) unsafe extern "C" fn query_srq(srq: *mut abi::Srq, attr: *mut abi::SrqAttr) -> c_int {
    status(|| {
        // SAFETY: the program's queue and structure.
        let (shared, attr) = unsafe { (of(srq)?, attr.as_mut().ok_or(libc::EINVAL)?) };
        let is = shared.srq.query();
        *attr = abi::SrqAttr { max_wr: is.max_wr, max_sge: is.max_sge, srq_limit: is.srq_limit };
        Ok(())
    })
}

/// `ibv_get_srq_num(3)`: only a queue of type XRC has one that peers name.
pub(super) unsafe extern "C" fn get_srq_num(srq: *mut abi::Srq, number: *mut u32) -> c_int {
    let _ = (srq, number);
    stubs::errno()
}

/// `ibv_destroy_srq(3)`.
pub(super) unsafe extern "C" fn destroy_srq(srq: *mut abi::Srq) -> c_int {
    status(|| {
        // SAFETY: the program's queue, which it gives back.
        unsafe {
            let object = Object::<Shared>::own_or_inherited(srq)?;
            let context = context::of((*srq).context)?;
            if !context.is_inherited() {
                object.private.users.none()?;
                context.objects.lock().srqs.remove(&object.private.srq.number());
                object.private.events.wait();
                Domain::of((*srq).pd)?.remove_user();
            }
            context.free(object.unmake());
        }
        Ok(())
    })
}
