//! Memory regions and windows.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_uint, c_void};

use parking_lot::Mutex;
use rocinante_soft::provider::advice::Advice;
use rocinante_stack::mem::Access;
use rocinante_stack::mem::MwType;

use super::border::{Outcome, afford, pointer, status};
use super::context::{self, refused};
use super::object::{Object, Private};
use super::pd::Domain;
use crate::abi;
use crate::convert;
use crate::plain;

/// The private part of a region.
struct Region {
    mr: Mutex<plain::Mr>,
    access: Mutex<Access>,
}

impl Private for Region {
    type Public = abi::Mr;
    const KIND: usize = 5;
}

/// The private part of a window.
struct Window {
    _mw: plain::Mw,
}

impl Private for Window {
    type Public = abi::Mw;
    const KIND: usize = 6;
}

fn checked(bits: c_uint) -> Outcome<Access> {
    let access = convert::access(bits).ok_or(libc::EINVAL)?;
    // FLUSH_PERSISTENT is for persistent memory.
    if access.admits(Access::FLUSH_PERSISTENT) {
        return Err(libc::EOPNOTSUPP);
    }
    if access.is_contradictory() { Err(libc::EINVAL) } else { Ok(access) }
}

/// # Safety
/// As for `ibv_reg_mr(3)`.
unsafe fn register(
    pd: *mut abi::Pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> Outcome<*mut abi::Mr> {
    // SAFETY: the program's domain.
    let (domain, context) = unsafe { (Domain::of(pd)?, (*pd).context) };
    // SAFETY: the domain's context.
    unsafe { context::of(context)? }.is_own()?;
    afford(0)?;
    let access = checked(access)?;
    let start = if access.admits(Access::ZERO_BASED) { 0 } else { iova };
    // Neither its addresses nor its pages wrap around. All memory at once, on demand, is more.
    let page = rustix::param::page_size() as u64;
    let end = |start: u64| start.checked_add(length as u64);
    let pages_end = end(addr as u64).and_then(|end| end.checked_next_multiple_of(page));
    if end(start).is_none() || pages_end.is_none() {
        return Err(libc::EINVAL);
    }
    // A kernel's device maps whole pages (`ib_uverbs_reg_mr`).
    if !(iova ^ addr as u64).is_multiple_of(page) {
        return Err(libc::EINVAL);
    }
    let memory = (addr as u64, length);
    let mr = domain.pd()?.register(memory, start, access).map_err(refused("ibv_reg_mr"))?;
    domain.add_user();
    let key = mr.key().0;
    let public = abi::Mr { context, pd, addr, length, handle: key, lkey: key, rkey: key };
    Ok(Object::make(public, Region { mr: Mutex::new(mr), access: Mutex::new(access) }))
}

/// `ibv_reg_mr(3)`.
pub(super) unsafe extern "C" fn reg_mr(
    pd: *mut abi::Pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut abi::Mr {
    // SAFETY: the program's memory.
    pointer(|| unsafe { register(pd, addr, length, addr as u64, access.cast_unsigned()) })
}

/// `ibv_reg_mr_iova(3)`.
pub(super) unsafe extern "C" fn reg_mr_iova(
    pd: *mut abi::Pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
) -> *mut abi::Mr {
    // SAFETY: the program's memory.
    pointer(|| unsafe { register(pd, addr, length, iova, access.cast_unsigned()) })
}

/// What `ibv_reg_mr` and `ibv_reg_mr_iova` of the header call.
pub(super) unsafe extern "C" fn reg_mr_iova2(
    pd: *mut abi::Pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut abi::Mr {
    // SAFETY: the program's memory.
    pointer(|| unsafe { register(pd, addr, length, iova, access) })
}

/// `ibv_reg_mr_ex(3)`: memory by its address, with or without an iova.
pub(super) unsafe extern "C" fn reg_mr_ex(
    pd: *mut abi::Pd,
    attr: *mut abi::MrInitAttr,
) -> *mut abi::Mr {
    /// `IBV_REG_MR_MASK_IOVA` and `IBV_REG_MR_MASK_ADDR`.
    const IOVA: u64 = 1;
    const ADDR: u64 = 2;
    pointer(|| {
        // SAFETY: the program's structure and memory.
        unsafe {
            let attr = attr.as_ref().ok_or(libc::EINVAL)?;
            if attr.comp_mask & !(IOVA | ADDR) != 0 || attr.comp_mask & ADDR == 0 {
                return Err(libc::EOPNOTSUPP);
            }
            let iova = if attr.comp_mask & IOVA == 0 { attr.addr as u64 } else { attr.iova };
            register(pd, attr.addr, attr.length, iova, attr.access.cast_unsigned())
        }
    })
}

/// `ibv_dereg_mr(3)`. Requests in flight that name it fail.
pub(super) unsafe extern "C" fn dereg_mr(mr: *mut abi::Mr) -> c_int {
    status(|| {
        // SAFETY: the program's region, which it gives back.
        unsafe {
            let object = Object::<Region>::own_or_inherited(mr)?;
            let shared = context::of((*mr).context)?;
            if !shared.is_inherited() {
                // Of a window that is bound to it, the kernel's device says EINVAL.
                let removed = object.private.mr.lock().remove();
                removed.map_err(refused("ibv_dereg_mr")).map_err(|_| libc::EINVAL)?;
            }
            if let Ok(domain) = Domain::of((*mr).pd) {
                domain.remove_user();
            }
            shared.free(object.unmake());
        }
        Ok(())
    })
}

/// `IBV_REREG_MR_ERR_INPUT` and `IBV_REREG_MR_ERR_CMD`: the region is as before; it may be broken.
const REREG_INPUT: c_int = -1;

/// `ibv_rereg_mr(3)`.
pub(super) unsafe extern "C" fn rereg_mr(
    mr: *mut abi::Mr,
    flags: c_int,
    pd: *mut abi::Pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    // SAFETY: the program's objects and memory.
    let changed = status(|| unsafe { change(mr, flags, pd, (addr, length), access) });
    if changed == 0 { 0 } else { REREG_INPUT }
}

/// # Safety
/// As for `ibv_rereg_mr(3)`.
unsafe fn change(
    mr: *mut abi::Mr,
    flags: c_int,
    pd: *mut abi::Pd,
    (addr, length): (*mut c_void, usize),
    access: c_int,
) -> Outcome<()> {
    const TRANSLATION: c_int = 1;
    const PD: c_int = 2;
    const ACCESS: c_int = 4;
    // SAFETY: the program's region.
    let (object, public) = unsafe { (Object::<Region>::of(mr)?, &mut *mr) };
    if flags & !(TRANSLATION | PD | ACCESS) != 0 || flags == 0 {
        return Err(libc::EINVAL);
    }
    if access != 0 && flags & ACCESS == 0 {
        return Err(libc::EINVAL);
    }
    if flags & TRANSLATION != 0 && (addr.is_null() || length == 0) {
        return Err(libc::EINVAL);
    }
    let mut held = object.private.access.lock();
    let access = if flags & ACCESS == 0 { *held } else { checked(access.cast_unsigned())? };
    let to = if flags & PD == 0 { public.pd } else { pd };
    let (addr, length) =
        if flags & TRANSLATION == 0 { (public.addr, public.length) } else { (addr, length) };
    // SAFETY: the program's domains.
    let (from, domain) = unsafe { (Domain::of(public.pd)?, Domain::of(to)?) };
    // SAFETY: as above.
    context::same(unsafe { (*to).context }, public.context)?;
    let mut mr = object.private.mr.lock();
    let new_pd = if flags & PD == 0 { None } else { Some(domain.pd()?) };
    let memory = (flags & TRANSLATION != 0).then_some((addr as u64, length));
    mr.change(new_pd, memory, access).map_err(refused("ibv_rereg_mr"))?;
    domain.add_user();
    from.remove_user();
    *held = access;
    let key = mr.key().0;
    (public.pd, public.addr, public.length) = (to, addr, length);
    (public.lkey, public.rkey) = (key, key);
    Ok(())
}

/// `ibv_advise_mr(3)`. The pages are there when it returns, whether it is to wait or not.
pub(super) unsafe extern "C" fn advise_mr(
    pd: *mut abi::Pd,
    advice: c_int,
    flags: u32,
    list: *mut abi::Sge,
    count: u32,
) -> c_int {
    status(|| {
        // SAFETY: the program's domain.
        let domain = unsafe { Domain::of(pd)? };
        let advice = match advice {
            0 => Advice::Prefetch,
            1 => Advice::PrefetchWrite,
            2 => Advice::PrefetchNoFault,
            _ => return Err(libc::EINVAL),
        };
        // IBV_ADVISE_MR_FLAG_FLUSH.
        if flags & !1 != 0 || list.is_null() || count == 0 {
            return Err(libc::EINVAL);
        }
        for at in 0..count as usize {
            // SAFETY: the program's list.
            let sge = unsafe { &*list.add(at) };
            domain.pd()?.advise(advice, sge).map_err(refused("ibv_advise_mr"))?;
        }
        Ok(())
    })
}

/// `ibv_alloc_mw(3)`.
pub(super) unsafe extern "C" fn alloc_mw(pd: *mut abi::Pd, mw_type: c_int) -> *mut abi::Mw {
    pointer(|| {
        // SAFETY: the program's domain.
        let (domain, context) = unsafe { (Domain::of(pd)?, (*pd).context) };
        afford(0)?;
        let kind = match mw_type {
            1 => MwType::Type1,
            2 => MwType::Type2,
            _ => return Err(libc::EINVAL),
        };
        let mw = domain.pd()?.alloc_mw(kind).map_err(refused("ibv_alloc_mw"))?;
        domain.add_user();
        let rkey = mw.first_key().0;
        let public = abi::Mw { context, pd, rkey, handle: rkey, mw_type };
        Ok(Object::make(public, Window { _mw: mw }))
    })
}

/// `ibv_dealloc_mw(3)`.
pub(super) unsafe extern "C" fn dealloc_mw(mw: *mut abi::Mw) -> c_int {
    status(|| {
        // SAFETY: the program's window, which it gives back.
        unsafe {
            let object = Object::<Window>::own_or_inherited(mw)?;
            let shared = context::of((*mw).context)?;
            if let Ok(domain) = Domain::of((*mw).pd) {
                domain.remove_user();
            }
            shared.free(object.unmake());
        }
        Ok(())
    })
}

/// Whether this is a window of the program's.
///
/// # Safety
/// As [`Object::of`].
pub(super) unsafe fn is_window(mw: *mut abi::Mw) -> bool {
    // SAFETY: the caller vouches for it.
    unsafe { Object::<Window>::of(mw) }.is_ok()
}
