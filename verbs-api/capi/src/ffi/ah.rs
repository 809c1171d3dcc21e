//! Address handles.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::net::IpAddr;

use rocinante_stack::verbs::AhId;

use super::border::{Outcome, afford, minus, pointer, status};
use super::context::{self, Shared, refused};
use super::object::{Object, Private};
use super::pd::{Domain, Identity};
use crate::abi;
use crate::convert;
use crate::plain;

/// The private part of an address handle.
struct Handle {
    ah: plain::Ah,
    domain: Identity,
}

impl Private for Handle {
    type Public = abi::Ah;
    const KIND: usize = 10;
}

/// `ibv_create_ah(3)`.
pub(super) unsafe extern "C" fn create_ah(
    pd: *mut abi::Pd,
    attr: *mut abi::AhAttr,
) -> *mut abi::Ah {
    // SAFETY: the program's domain and structure.
    pointer(|| unsafe { create(pd, attr.as_ref().ok_or(libc::EINVAL)?) })
}

/// # Safety
/// As [`Object::of`].
unsafe fn create(pd: *mut abi::Pd, attr: &abi::AhAttr) -> Outcome<*mut abi::Ah> {
    // SAFETY: the program's domain, and its context.
    let (domain, context) = unsafe { (Domain::of(pd)?, (*pd).context) };
    // SAFETY: as above.
    unsafe { context::of(context)? }.is_own()?;
    afford(0)?;
    let path = convert::path(attr).ok_or(libc::EINVAL)?;
    let ah = domain.pd()?.create_ah(&path).map_err(refused("ibv_create_ah"))?;
    let identity = domain.identity()?;
    domain.add_user();
    let public = abi::Ah { context, pd, handle: ah.id().0 };
    Ok(Object::make(public, Handle { ah, domain: identity }))
}

/// `ibv_destroy_ah(3)`.
pub(super) unsafe extern "C" fn destroy_ah(ah: *mut abi::Ah) -> c_int {
    status(|| {
        // SAFETY: the program's handle, which it gives back.
        unsafe {
            let object = Object::<Handle>::own_or_inherited(ah)?;
            let shared = context::of((*ah).context)?;
            if let Ok(domain) = Domain::of((*ah).pd) {
                domain.remove_user();
            }
            shared.free(object.unmake());
        }
        Ok(())
    })
}

/// The engine's handle, for a queue pair of this protection domain. Error: `EINVAL` for a handle of
/// another domain, be it of this context or of another: the device knows handles by numbers, and
/// each context has its own.
///
/// # Safety
/// As [`Object::of`].
#[inline]
pub(super) unsafe fn id(ah: *mut abi::Ah, domain: Identity) -> Outcome<AhId> {
    // SAFETY: the caller vouches for it.
    let handle = unsafe { &Object::<Handle>::of(ah)?.private };
    if handle.domain == domain { Ok(handle.ah.id()) } else { Err(libc::EINVAL) }
}

/// The way back to the sender of a datagram. One without a GRH, which no RoCE port delivers, has a
/// way of LIDs, to which no handle can be made.
fn answer(shared: &Shared, port: u8, wc: &abi::Wc, grh: &[u8; 40]) -> Outcome<abi::AhAttr> {
    /// `IBV_WC_GRH`.
    const GRH: u32 = 1;
    if port != 1 {
        return Err(libc::EINVAL);
    }
    let attr = abi::AhAttr {
        dlid: wc.slid,
        sl: wc.sl,
        src_path_bits: wc.dlid_path_bits,
        port_num: port,
        ..abi::AhAttr::default()
    };
    if wc.wc_flags & GRH == 0 {
        return Ok(attr);
    }
    let (remote, local) = plain::grh_addresses(grh).ok_or(libc::EPROTONOSUPPORT)?;
    // The answer to a datagram to a group leaves from the first address of its family.
    let gids = shared.gids()?;
    let place = |is: &dyn Fn(IpAddr) -> bool| gids.iter().position(|gid| gid.is_some_and(is));
    let sgid_index = if local.is_multicast() {
        place(&|gid| gid.is_ipv4() == local.is_ipv4())
    } else {
        place(&|gid| gid == local)
    };
    let sgid_index = sgid_index.ok_or(libc::EINVAL)?;
    let (flow_label, hop_limit, traffic_class) = match remote {
        IpAddr::V4(_) => (0, grh[28], grh[21]),
        IpAddr::V6(_) => {
            let word = u32::from_be_bytes([grh[0], grh[1], grh[2], grh[3]]);
            (word & 0xf_ffff, grh[7], (word >> 20 & 0xff) as u8)
        }
    };
    let grh = abi::GlobalRoute {
        dgid: convert::gid(remote),
        flow_label,
        sgid_index: u8::try_from(sgid_index).map_err(|_| libc::EINVAL)?,
        hop_limit,
        traffic_class,
    };
    Ok(abi::AhAttr { grh, is_global: 1, ..attr })
}

/// `ibv_init_ah_from_wc(3)`.
pub(super) unsafe extern "C" fn init_ah_from_wc(
    context: *mut abi::Context,
    port: u8,
    wc: *mut abi::Wc,
    grh: *const [u8; 40],
    attr: *mut abi::AhAttr,
) -> c_int {
    minus(|| {
        // SAFETY: the program's context and structures.
        unsafe {
            let shared = context::of(context)?;
            let (wc, grh) = (wc.as_ref().ok_or(libc::EINVAL)?, grh.as_ref().ok_or(libc::EINVAL)?);
            *attr.as_mut().ok_or(libc::EINVAL)? = answer(shared, port, wc, grh)?;
        }
        Ok(0)
    })
}

/// `ibv_create_ah_from_wc(3)`.
pub(super) unsafe extern "C" fn create_ah_from_wc(
    pd: *mut abi::Pd,
    wc: *mut abi::Wc,
    grh: *const [u8; 40],
    port: u8,
) -> *mut abi::Ah {
    pointer(|| {
        // SAFETY: the program's domain and structures.
        unsafe {
            Domain::of(pd)?;
            let shared = context::of((*pd).context)?;
            let (wc, grh) = (wc.as_ref().ok_or(libc::EINVAL)?, grh.as_ref().ok_or(libc::EINVAL)?);
            create(pd, &answer(shared, port, wc, grh)?)
        }
    })
}

/// The Ethernet address of a destination, for providers' libraries: the device finds it itself.
/// Errors are negative.
pub(super) unsafe extern "C" fn resolve_eth_l2_from_gid(
    _: *mut abi::Context,
    _: *mut abi::AhAttr,
    _: *mut u8,
    _: *mut c_void,
) -> c_int {
    -libc::EOPNOTSUPP
}
