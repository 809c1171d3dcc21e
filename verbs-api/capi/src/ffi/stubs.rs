//! Unsupported calls, in the forms in which they refuse. The pointers are those of calls with any
//! parameters: none is read.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::ptr;

use super::border::{refuse, set_errno};

/// Returns `EOPNOTSUPP`, which errno has, too.
pub(super) extern "C" fn errno() -> c_int {
    refuse(libc::EOPNOTSUPP)
}

/// Returns -1, with errno.
pub(super) extern "C" fn minus() -> c_int {
    set_errno(libc::EOPNOTSUPP);
    -1
}

/// Returns NULL, with errno.
pub(super) extern "C" fn null() -> *mut c_void {
    set_errno(libc::EOPNOTSUPP);
    ptr::null_mut()
}

/// Returns 0 of any width.
pub(super) extern "C" fn zero() -> u64 {
    0
}

pub(super) extern "C" fn nothing() {}

/// Returns `EOPNOTSUPP`, where the type of the slot asks for an argument.
pub(super) unsafe extern "C" fn one_argument(_: *mut c_void) -> c_int {
    errno()
}
