//! The program's exit.
#![allow(unsafe_code)]

use std::sync::Once;

use super::border::quiet;
use crate::report;

/// Has the counters printed when the program returns from `main` or calls exit(3).
pub(super) fn report() {
    static ONCE: Once = Once::new();
    // SAFETY: the library is never unloaded, and the function does not unwind. Without room for it
    // nothing is printed.
    ONCE.call_once(|| unsafe {
        libc::atexit(print);
    });
}

extern "C" fn print() {
    quiet(report::print);
}
