//! The end of a program: by `exit(3)` or a return from `main`, which run handlers, and by
//! `_exit(2)`, which runs none: the library that `rocinante run` preloads for paths stands before
//! it, and calls the function registered here.
#![allow(unsafe_code)]

use std::sync::Once;

use super::border::quiet;
use crate::report;

/// The library of paths shall have acknowledgements sent that wait for the program's next call.
pub(super) fn watch() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the name ends with a zero.
        let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"rocinante_before_exit".as_ptr()) };
        if found.is_null() {
            return;
        }
        // SAFETY: only the library of paths has a function of this name, and it is of this type.
        let tell: extern "C" fn(extern "C" fn()) = unsafe { std::mem::transmute(found) };
        tell(rocinante_soft::send_held_at_once);
    });
}

/// Has the counters reported when the program returns from `main` or calls exit(3).
pub(super) fn report() {
    static ONCE: Once = Once::new();
    // SAFETY: the library is never unloaded, and the function does not unwind. Without room for it
    // nothing is reported.
    ONCE.call_once(|| unsafe {
        libc::atexit(end);
    });
}

extern "C" fn end() {
    quiet(report::end);
}
