//! Protection domains, parent domains and thread domains.
#![allow(unsafe_code)]

use std::ffi::c_int;

use crate::plain;

use super::border::{Outcome, afford, pointer, status};
use super::context::{self, refused};
use super::object::{Object, Private, Users};
use crate::abi;

/// The private part of a protection domain.
pub(super) struct Domain {
    kind: Kind,
    users: Users,
}

enum Kind {
    Own(plain::Pd),
    /// A parent domain: the domain that it stands for, and its thread domain.
    Parent {
        of: *mut abi::Pd,
        td: *mut abi::Td,
    },
}

/// Which domain objects are made in. A parent domain's are those of the domain that it stands for.
/// No two domains of a process have the same while objects are in them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Identity(usize);

impl Private for Domain {
    type Public = abi::Pd;
    const KIND: usize = 3;
}

/// The private part of a thread domain: its users. Its promise of one thread brings nothing here.
#[derive(Default)]
struct ThreadDomain(Users);

impl Private for ThreadDomain {
    type Public = abi::Td;
    const KIND: usize = 4;
}

impl Domain {
    /// # Safety
    /// As [`Object::of`].
    pub(super) unsafe fn of<'a>(pd: *mut abi::Pd) -> Outcome<&'a Self> {
        // SAFETY: the caller vouches for it.
        unsafe { Object::<Self>::of(pd) }.map(|object| &object.private)
    }

    /// The domain that objects are made in.
    pub(super) fn pd(&self) -> Outcome<&plain::Pd> {
        match &self.kind {
            Kind::Own(pd) => Ok(pd),
            // SAFETY: the parent domain uses it, so the program cannot have destroyed it.
            Kind::Parent { of, .. } => unsafe { Self::of(*of)? }.pd(),
        }
    }

    pub(super) fn identity(&self) -> Outcome<Identity> {
        self.pd().map(|pd| Identity(std::ptr::from_ref(pd).addr()))
    }

    pub(super) fn add_user(&self) {
        self.users.add();
    }

    pub(super) fn remove_user(&self) {
        self.users.remove();
    }
}

/// `ibv_alloc_pd(3)`.
pub(super) unsafe extern "C" fn alloc_pd(context: *mut abi::Context) -> *mut abi::Pd {
    pointer(|| {
        // SAFETY: the program's context.
        let shared = unsafe { context::of(context)? };
        afford(0)?;
        let pd = shared.device()?.alloc_pd().map_err(refused("ibv_alloc_pd"))?;
        let domain = Domain { kind: Kind::Own(pd), users: Users::default() };
        Ok(Object::make(abi::Pd { context, handle: 0 }, domain))
    })
}

/// `ibv_dealloc_pd(3)`.
pub(super) unsafe extern "C" fn dealloc_pd(pd: *mut abi::Pd) -> c_int {
    status(|| {
        // SAFETY: the program's domain, which it gives back.
        unsafe {
            let object = Object::<Domain>::own_or_inherited(pd)?;
            let shared = context::of((*pd).context)?;
            if !shared.is_inherited() {
                object.private.users.none()?;
                if let Kind::Parent { of, td } = object.private.kind {
                    Domain::of(of)?.remove_user();
                    if let Ok(td) = Object::<ThreadDomain>::of(td) {
                        td.private.0.remove();
                    }
                }
            }
            shared.free(object.unmake());
        }
        Ok(())
    })
}

/// `ibv_alloc_parent_domain(3)`. The allocators that a program may bring are never called, as the
/// device shares no memory with it; nor does it use `pd_context`.
pub(super) unsafe extern "C" fn alloc_parent_domain(
    context: *mut abi::Context,
    attr: *mut abi::ParentDomainInitAttr,
) -> *mut abi::Pd {
    /// `IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS` and `..._PD_CONTEXT`.
    const KNOWN: u32 = 3;
    pointer(|| {
        // SAFETY: the program's structures.
        unsafe {
            context::of(context)?.is_own()?;
            let attr = attr.as_ref().ok_or(libc::EINVAL)?;
            if attr.comp_mask & !KNOWN != 0 {
                return Err(libc::EOPNOTSUPP);
            }
            let pd = Domain::of(attr.pd)?;
            context::same((*attr.pd).context, context)?;
            if !attr.td.is_null() {
                let td = Object::<ThreadDomain>::of(attr.td)?;
                context::same((*attr.td).context, context)?;
                td.private.0.add();
            }
            pd.add_user();
            let kind = Kind::Parent { of: attr.pd, td: attr.td };
            let domain = Domain { kind, users: Users::default() };
            Ok(Object::make(abi::Pd { context, handle: 0 }, domain))
        }
    })
}

/// `ibv_alloc_td(3)`.
pub(super) unsafe extern "C" fn alloc_td(
    context: *mut abi::Context,
    attr: *mut abi::TdInitAttr,
) -> *mut abi::Td {
    pointer(|| {
        // SAFETY: the program's structures.
        unsafe {
            context::of(context)?.is_own()?;
            if attr.as_ref().is_none_or(|attr| attr.comp_mask != 0) {
                return Err(libc::EINVAL);
            }
        }
        Ok(Object::make(abi::Td { context }, ThreadDomain::default()))
    })
}

/// `ibv_dealloc_td(3)`.
pub(super) unsafe extern "C" fn dealloc_td(td: *mut abi::Td) -> c_int {
    status(|| {
        // SAFETY: the program's thread domain, which it gives back.
        unsafe {
            let object = Object::<ThreadDomain>::own_or_inherited(td)?;
            if Object::<ThreadDomain>::of(td).is_ok() {
                object.private.0.none()?;
            }
            let _: ThreadDomain = object.unmake();
        }
        Ok(())
    })
}
