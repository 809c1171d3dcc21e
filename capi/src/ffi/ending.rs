//! The end of a program by `_exit(2)`, which runs no handler of `exit(3)`: the library that
//! `rocinante run` preloads for paths stands before it, and calls what it is told here.
#![allow(unsafe_code)]

use std::sync::Once;

use rocinante::plain;

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
        tell(plain::send_held_at_once);
    });
}
