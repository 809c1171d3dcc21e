//! Calls of sockets by their numbers. A library that a program preloads (librspreload, libvma,
//! sanitizers) may have functions of their names, for the program's own sockets.
#![allow(unsafe_code)]

use std::ffi::c_void;

use libc::{c_int, sockaddr, socklen_t, ssize_t, syscall};

/// Declares functions that are as the C library's of the same names.
macro_rules! calls {
    ($($(#[$text:meta])* $name:ident: $number:ident($($arg:ident: $type:ty),*) -> $result:ty;)*) => {
        $(
            $(#[$text])*
            ///
            /// # Safety
            /// As the C library's function.
            pub(crate) unsafe fn $name($($arg: $type),*) -> $result {
                // SAFETY: the caller's promise. The kernel takes the C library's arguments
                // unchanged.
                unsafe { syscall(libc::$number, $($arg),*) as $result }
            }
        )*
    };
}

calls! {
    /// `socket(2)`.
    socket: SYS_socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int;
    /// `bind(2)`.
    bind: SYS_bind(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int;
    /// `getsockname(2)`.
    getsockname: SYS_getsockname(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int;
    /// `getsockopt(2)`.
    getsockopt: SYS_getsockopt(
        fd: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut socklen_t
    ) -> c_int;
    /// `setsockopt(2)`.
    setsockopt: SYS_setsockopt(
        fd: c_int, level: c_int, name: c_int, value: *const c_void, len: socklen_t
    ) -> c_int;
    /// `sendto(2)`.
    sendto: SYS_sendto(
        fd: c_int, bytes: *const c_void, len: usize, flags: c_int,
        to: *const sockaddr, to_len: socklen_t
    ) -> ssize_t;
    /// `recvfrom(2)`.
    recvfrom: SYS_recvfrom(
        fd: c_int, bytes: *mut c_void, len: usize, flags: c_int,
        from: *mut sockaddr, from_len: *mut socklen_t
    ) -> ssize_t;
    /// `recvmsg(2)`.
    recvmsg: SYS_recvmsg(fd: c_int, message: *mut libc::msghdr, flags: c_int) -> ssize_t;
}
