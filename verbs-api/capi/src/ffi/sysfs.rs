//! Reads below /sys/class/infiniband: the library of paths, which `rocinante run` preloads, leads
//! them into a tree of files, and has it brought up to date here before.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char};

use super::border::quiet;
use crate::devices;

/// The loader calls it, after all libraries that are preloaded are there.
#[used]
#[unsafe(link_section = ".init_array")]
static INIT: extern "C" fn() = begin;

extern "C" fn begin() {
    // SAFETY: the name ends with a zero.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"rocinante_before_path".as_ptr()) };
    if found.is_null() {
        return;
    }
    // SAFETY: only the library of paths has a function of this name, and it is of this type.
    let tell: extern "C" fn(unsafe extern "C" fn(*const c_char)) =
        unsafe { std::mem::transmute(found) };
    tell(show);
}

/// # Safety
/// A path as a C string.
unsafe extern "C" fn show(path: *const c_char) {
    // SAFETY: the caller's promise.
    let path = unsafe { CStr::from_ptr(path) }.to_bytes();
    let counters = path.windows(8).any(|part| part == b"counters");
    quiet(|| devices::show(counters));
}
