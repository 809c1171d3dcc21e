//! Questions about devices, ports and GIDs. They open nothing.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_uint};
use std::net::IpAddr;
use std::ptr;

use crate::plain::{container_limits, gid_table_len};

use super::border::{Outcome, minus, status};
use super::context::{self, Shared};
use crate::abi;
use crate::convert;
use crate::devices::CAPABILITIES_EX;

const PORT: u32 = 1;
/// The only key of a partition.
const PKEY: u16 = 0xffff;

/// `struct ibv_odp_caps`: all memory is touched on the processor, which takes its page faults. So
/// paging on demand is what every region has, but for the implicit region of all memory.
const ON_DEMAND_PAGING: [u64; 3] = {
    const SEND: u64 = 1;
    const RECV: u64 = 1 << 1;
    const WRITE: u64 = 1 << 2;
    const READ: u64 = 1 << 3;
    const ATOMIC: u64 = 1 << 4;
    const SRQ_RECV: u64 = 1 << 5;
    let rc = SEND | RECV | WRITE | READ | ATOMIC | SRQ_RECV;
    let uc = SEND | RECV | WRITE | SRQ_RECV;
    let ud = SEND | RECV | SRQ_RECV;
    // IBV_ODP_SUPPORT; then three words of 32 bits.
    [1, rc | uc << 32, ud]
};

/// Copies the members of a structure for which the caller's has room. The caller's own end becomes
/// zero: it is of a newer version.
///
/// # Safety
/// `to` has `len` bytes, and `T` has no padding that must not be read.
unsafe fn give<T>(value: &T, to: *mut T, len: usize) {
    let own = size_of::<T>().min(len);
    // SAFETY: the caller vouches for it.
    unsafe {
        ptr::copy_nonoverlapping(ptr::from_ref(value).cast::<u8>(), to.cast(), own);
        to.cast::<u8>().add(own).write_bytes(0, len - own);
    }
}

/// The attributes of the device, or what its container may have where that is less.
fn attributes(shared: &Shared) -> abi::DeviceAttr {
    let quota = shared.if_opened().map(|opened| opened.device.quota());
    shared.found.attributes_within(&quota.unwrap_or_else(container_limits))
}

/// `ibv_query_device(3)`.
pub(super) unsafe extern "C" fn query_device(
    context: *mut abi::Context,
    attr: *mut abi::DeviceAttr,
) -> c_int {
    status(|| {
        // SAFETY: the program's context and structure.
        unsafe {
            let attr = attr.as_mut().ok_or(libc::EINVAL)?;
            *attr = attributes(context::of(context)?);
        }
        Ok(())
    })
}

/// `ibv_query_device_ex(3)`.
pub(super) unsafe extern "C" fn query_device_ex(
    context: *mut abi::Context,
    input: *const abi::QueryDeviceExInput,
    attr: *mut abi::DeviceAttrEx,
    attr_size: usize,
) -> c_int {
    status(|| {
        // SAFETY: the program's context and structures.
        unsafe {
            if input.as_ref().is_some_and(|input| input.comp_mask != 0) {
                return Err(libc::EINVAL);
            }
            let too_short = attr_size < size_of::<abi::DeviceAttr>() + size_of::<u32>();
            if attr.is_null() || too_short {
                return Err(libc::EINVAL);
            }
            let is = abi::DeviceAttrEx {
                orig_attr: attributes(context::of(context)?),
                comp_mask: 0,
                odp_caps: ON_DEMAND_PAGING,
                completion_timestamp_mask: 0,
                hca_core_clock: 0,
                device_cap_flags_ex: CAPABILITIES_EX,
                offloads: [0; 27],
                phys_port_cnt_ex: PORT,
            };
            give(&is, attr, attr_size);
        }
        Ok(())
    })
}

/// `ibv_query_port(3)` of old programs, whose structure ends before `port_cap_flags2`.
pub(super) unsafe extern "C" fn query_port(
    context: *mut abi::Context,
    port: u8,
    attr: *mut abi::PortAttr,
) -> c_int {
    const OLD: usize = std::mem::offset_of!(abi::PortAttr, port_cap_flags2);
    // SAFETY: the program's context and structure.
    unsafe { query_port_ex(context, port, attr, OLD) }
}

/// `ibv_query_port(3)`.
pub(super) unsafe extern "C" fn query_port_ex(
    context: *mut abi::Context,
    port: u8,
    attr: *mut abi::PortAttr,
    len: usize,
) -> c_int {
    status(|| {
        // SAFETY: the program's context and structure.
        unsafe {
            let shared = context::of(context)?;
            if attr.is_null() || u32::from(port) != PORT {
                return Err(libc::EINVAL);
            }
            let is_down = shared.if_opened().is_some_and(|opened| opened.device.is_port_down());
            let mut now = shared.found.port(shared.gids()?.len(), is_down);
            now.active_mtu = shared.mtu().map_or(now.active_mtu, |mtu| mtu.min(now.active_mtu));
            give(&now, attr, len);
        }
        Ok(())
    })
}

/// `ibv_query_port_speed(3)`: in units of 100 Mb/s.
pub(super) unsafe extern "C" fn query_port_speed(
    context: *mut abi::Context,
    port: u32,
    speed: *mut u64,
) -> c_int {
    status(|| {
        // SAFETY: the program's context and number.
        unsafe {
            let shared = context::of(context)?;
            if speed.is_null() || port != PORT {
                return Err(libc::EINVAL);
            }
            // As `ibv_query_port` says of a port without a speed.
            let found = shared.found.interface.link_speed().unwrap_or(2_500);
            speed.write((found / 100).into());
        }
        Ok(())
    })
}

/// `ibv_query_gid(3)`.
pub(super) unsafe extern "C" fn query_gid(
    context: *mut abi::Context,
    port: u8,
    index: c_int,
    gid: *mut [u8; 16],
) -> c_int {
    minus(|| {
        // SAFETY: the program's context and GID.
        unsafe {
            let gids = context::of(context)?.gids()?;
            let index = usize::try_from(index).map_err(|_| libc::EINVAL)?;
            if u32::from(port) != PORT || index >= gid_table_len(gids.len()) {
                return Err(libc::EINVAL);
            }
            let entry = gids.get(index).copied().flatten().map_or([0; 16], convert::gid);
            *gid.as_mut().ok_or(libc::EINVAL)? = entry;
        }
        Ok(0)
    })
}

/// `IBV_GID_TYPE_ROCE_V2`.
const ROCE_V2: u32 = 2;

fn entry(shared: &Shared, index: usize, gid: IpAddr) -> abi::GidEntry {
    abi::GidEntry {
        gid: convert::gid(gid),
        gid_index: u32::try_from(index).unwrap_or(u32::MAX),
        port_num: PORT,
        gid_type: ROCE_V2,
        ndev_ifindex: shared.found.interface.index,
    }
}

/// `ibv_query_gid_ex(3)`.
pub(super) unsafe extern "C" fn query_gid_ex(
    context: *mut abi::Context,
    port: u32,
    index: u32,
    to: *mut abi::GidEntry,
    flags: u32,
    entry_size: usize,
) -> c_int {
    status(|| {
        // SAFETY: the program's context and structure.
        unsafe {
            let shared = context::of(context)?;
            if flags != 0 {
                return Err(libc::EOPNOTSUPP);
            }
            if to.is_null() || port != PORT {
                return Err(libc::EINVAL);
            }
            let (gids, index) = (shared.gids()?, index as usize);
            if index >= gid_table_len(gids.len()) {
                return Err(libc::EINVAL);
            }
            let gid = gids.get(index).copied().flatten().ok_or(libc::ENODATA)?;
            give(&entry(shared, index, gid), to, entry_size);
        }
        Ok(())
    })
}

/// `ibv_query_gid_table(3)`: the number of entries, or a negative errno.
pub(super) unsafe extern "C" fn query_gid_table(
    context: *mut abi::Context,
    to: *mut abi::GidEntry,
    room: usize,
    flags: u32,
    entry_size: usize,
) -> isize {
    let mut count = 0_usize;
    let errno = status(|| {
        // SAFETY: the program's context and its array of `room` entries of that size.
        unsafe {
            let shared = context::of(context)?;
            if flags != 0 {
                return Err(libc::EOPNOTSUPP);
            }
            if to.is_null() && room > 0 {
                return Err(libc::EINVAL);
            }
            let gids = shared.gids()?;
            if room < gids.iter().flatten().count() {
                return Err(libc::EINVAL);
            }
            // Holes are left out: an entry has its index.
            for (index, gid) in gids.iter().enumerate() {
                if let Some(gid) = gid {
                    give(&entry(shared, index, *gid), to.byte_add(count * entry_size), entry_size);
                    count += 1;
                }
            }
        }
        Ok(())
    });
    if errno == 0 { count.cast_signed() } else { -(errno as isize) }
}

/// For `ibv_devinfo` and pyverbs: `IBV_GID_TYPE_SYSFS_ROCE_V2`; of a hole `..._IB_ROCE_V1`, which
/// is 0.
pub(super) unsafe extern "C" fn query_gid_type(
    context: *mut abi::Context,
    port: u8,
    index: c_uint,
    kind: *mut c_int,
) -> c_int {
    minus(|| {
        // SAFETY: the program's context and number.
        unsafe {
            let (gids, index) = (context::of(context)?.gids()?, index as usize);
            if u32::from(port) != PORT || index >= gid_table_len(gids.len()) {
                return Err(libc::EINVAL);
            }
            let is_there = gids.get(index).is_some_and(Option::is_some);
            *kind.as_mut().ok_or(libc::EINVAL)? = is_there.into();
        }
        Ok(0)
    })
}

fn pkey_at(context: *mut abi::Context, port: u8, index: c_int) -> Outcome<u16> {
    // SAFETY: the program's context.
    unsafe { context::of(context)? };
    if u32::from(port) == PORT && index == 0 { Ok(PKEY) } else { Err(libc::EINVAL) }
}

/// `ibv_query_pkey(3)`: big-endian.
pub(super) unsafe extern "C" fn query_pkey(
    context: *mut abi::Context,
    port: u8,
    index: c_int,
    pkey: *mut u16,
) -> c_int {
    minus(|| {
        let found = pkey_at(context, port, index)?;
        // SAFETY: the program's number.
        unsafe { *pkey.as_mut().ok_or(libc::EINVAL)? = found.to_be() };
        Ok(0)
    })
}

/// `ibv_get_pkey_index(3)`.
pub(super) unsafe extern "C" fn get_pkey_index(
    context: *mut abi::Context,
    port: u8,
    pkey: u16,
) -> c_int {
    minus(|| {
        let found = pkey_at(context, port, 0)?;
        if found == u16::from_be(pkey) { Ok(0) } else { Err(libc::EINVAL) }
    })
}
