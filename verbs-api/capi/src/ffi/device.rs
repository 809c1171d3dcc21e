//! The list of devices, opening and closing. Nothing here binds, starts or asks for a privilege.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int};
use std::io::Read as _;
use std::ptr;

use parking_lot::Mutex;

use super::border::{afford, hush, minus, pointer};
use super::object::{Object, Private};
use super::ucma;
use super::{context, operations};
use crate::abi;
use crate::convert::text;
use crate::devices::{self, Found, inherited};
use crate::log;
use crate::plain::OfProcess;

/// `struct ibv_device` and zeroes: providers' libraries look behind it for functions of their own,
/// to see whether it is theirs.
#[repr(C)]
pub(super) struct DeviceAndTail {
    device: abi::Device,
    tail: [usize; 32],
}

impl Private for Found {
    type Public = DeviceAndTail;
    const KIND: usize = 1;
}

type Device = Object<Found>;

/// The devices that programs have pointers to, which stay valid for ever, also in children of
/// fork(2). A device is listed anew when its interface or its addresses have changed.
static KNOWN: OfProcess<Mutex<Vec<usize>>> = OfProcess::none();

/// # Safety
/// As [`Object::of`].
pub(super) unsafe fn found<'a>(device: *mut abi::Device) -> Result<&'a Found, c_int> {
    // SAFETY: the caller vouches for it.
    unsafe { Device::own_or_inherited(device.cast()) }.map(|device| &device.private)
}

fn known(found: Found) -> *mut abi::Device {
    let known = KNOWN.get_or(|it| Mutex::new(it.and_then(inherited).unwrap_or_default()));
    let mut known = known.lock();
    for pointer in known.iter() {
        let pointer = *pointer as *mut DeviceAndTail;
        // SAFETY: it was made below, and is never destroyed.
        if unsafe { Device::own_or_inherited(pointer) }.is_ok_and(|other| other.private == found) {
            return pointer.cast();
        }
    }
    let device = abi::Device {
        ops: [ptr::null(); 2],
        // IBV_NODE_CA, IBV_TRANSPORT_IB.
        node_type: 1,
        transport_type: 0,
        name: text(&found.name),
        dev_name: text(&format!("uverbs{}", found.index)),
        dev_path: text(&format!("/sys/class/infiniband_verbs/uverbs{}", found.index)),
        ibdev_path: text(&format!("/sys/class/infiniband/{}", found.name)),
    };
    let pointer = Device::make(DeviceAndTail { device, tail: [0; 32] }, found);
    known.push(pointer as usize);
    pointer.cast()
}

/// `ibv_get_device_list(3)`.
pub(super) unsafe extern "C" fn get_device_list(count: *mut c_int) -> *mut *mut abi::Device {
    pointer(|| {
        hush();
        log::begin();
        ucma::watch();
        afford(0)?;
        if !count.is_null() {
            // SAFETY: the program's pointer to an int.
            unsafe { count.write(0) };
        }
        let found =
            devices::list().map_err(|error| error.raw_os_error().unwrap_or(libc::ENOSYS))?;
        let number = found.len();
        // SAFETY: one pointer more than there are devices, which the loop and calloc(3) fill.
        let list = unsafe { libc::calloc(number + 1, size_of::<usize>()) };
        let list = list.cast::<*mut abi::Device>();
        if list.is_null() {
            return Err(libc::ENOMEM);
        }
        for (index, found) in found.into_iter().enumerate() {
            // SAFETY: as above.
            unsafe { list.add(index).write(known(found)) };
        }
        if !count.is_null() {
            // SAFETY: the program's pointer to an int.
            unsafe { count.write(c_int::try_from(number).unwrap_or(c_int::MAX)) };
        }
        Ok(list)
    })
}

/// `ibv_free_device_list(3)`.
pub(super) unsafe extern "C" fn free_device_list(list: *mut *mut abi::Device) {
    // SAFETY: `get_device_list` allocated it so; or it is NULL.
    unsafe { libc::free(list.cast()) };
}

/// `ibv_get_device_name(3)`.
pub(super) unsafe extern "C" fn get_device_name(device: *mut abi::Device) -> *const c_char {
    // SAFETY: the program's device, which is never destroyed.
    pointer(|| unsafe { found(device).map(|_| (&raw mut (*device).name).cast::<c_char>()) })
}

/// `ibv_get_device_index(3)`.
pub(super) unsafe extern "C" fn get_device_index(device: *mut abi::Device) -> c_int {
    // SAFETY: the program's device.
    minus(|| unsafe { found(device) }.map(|found| found.index.cast_signed()))
}

/// `ibv_get_device_guid(3)`: big-endian.
pub(super) unsafe extern "C" fn get_device_guid(device: *mut abi::Device) -> u64 {
    // SAFETY: the program's device.
    unsafe { found(device) }.map_or(0, |found| u64::from_ne_bytes(found.guid()))
}

/// `ibv_open_device(3)`.
pub(super) unsafe extern "C" fn open_device(device: *mut abi::Device) -> *mut abi::Context {
    pointer(|| {
        // SAFETY: the program's device.
        let found = unsafe { found(device)? };
        operations::open(device, found)
    })
}

/// `ibv_close_device(3)`.
pub(super) unsafe extern "C" fn close_device(context: *mut abi::Context) -> c_int {
    // SAFETY: the program's context, which it gives back.
    minus(|| unsafe { context::close(context) }.map(|()| 0))
}

/// Where sysfs is (`SYSFS_PATH`, as in rdma-core).
pub(super) extern "C" fn get_sysfs_path() -> *const c_char {
    ucma::watch();
    c"/sys".as_ptr()
}

/// Reads a file below a folder of sysfs into `buf`, without the last newline. One for which there
/// is too little room is an error, `ENOSPC`.
pub(super) unsafe extern "C" fn read_sysfs_file(
    folder: *const c_char,
    file: *const c_char,
    buf: *mut c_char,
    size: usize,
) -> c_int {
    minus(|| {
        if folder.is_null() || file.is_null() || buf.is_null() || size == 0 {
            return Err(libc::EINVAL);
        }
        // SAFETY: the program's strings.
        let (folder, file) =
            unsafe { (std::ffi::CStr::from_ptr(folder), std::ffi::CStr::from_ptr(file)) };
        let path = format!("{}/{}", folder.to_string_lossy(), file.to_string_lossy());
        let mut bytes = Vec::new();
        let read = std::fs::File::open(path)
            .and_then(|file| file.take(size as u64).read_to_end(&mut bytes));
        read.map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))?;
        if bytes.last() == Some(&b'\n') {
            bytes.pop();
        } else if bytes.len() == size {
            return Err(libc::ENOSPC);
        }
        // SAFETY: the program's buffer of `size` bytes, of which one stays for the zero.
        unsafe {
            ptr::copy_nonoverlapping(bytes.as_ptr().cast(), buf, bytes.len());
            buf.add(bytes.len()).write(0);
        }
        Ok(c_int::try_from(bytes.len()).unwrap_or(c_int::MAX))
    })
}
