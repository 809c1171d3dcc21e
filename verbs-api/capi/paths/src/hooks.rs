//! The functions of libc that take a path.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use libc::{mode_t, size_t, ssize_t};

use crate::Does::{self, Change, Make, Own, Read, Write};
use crate::{Answer, behind, by_file, lead, set_errno};

/// Defines functions of libc that lead their `path` to where it belongs and go on to the next
/// library that has them. The braces have whether the function follows a link that the path names,
/// and what it does if it does more than read.
macro_rules! hooks {
    ($($name:ident($([$before:ident: $type:ty],)? $(@$dirfd:ident,)? path
        $(, $after:ident: $other:ty)*) { $last:expr $(, $does:expr)? } -> $result:ty;)*) => {$(
        /// The function of libc, with another path.
        ///
        /// # Safety
        /// As libc's.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name(
            $($before: $type,)? $($dirfd: c_int,)? path: *const c_char $(, $after: $other)*
        ) -> $result {
            type Function = unsafe extern "C" fn(
                $($type,)? $(hooks!(@int $dirfd),)? *const c_char $(, $other)*
            ) -> $result;
            let Some(next) = behind!($name: Function) else {
                set_errno(libc::ENOSYS);
                return Answer::FAILED;
            };
            let from = hooks!(@from $($dirfd)?);
            lead(from, path, $last, hooks!(@does $($does)?), |dirfd, path| {
                let _ = dirfd;
                $(let $dirfd = dirfd;)?
                // SAFETY: the caller keeps to libc's rules; the path is a C string or null.
                unsafe { next($($before,)? $($dirfd,)? path $(, $after)*) }
            })
        }
    )*};
    (@int $dirfd:ident) => { c_int };
    (@does $does:expr) => { $does };
    (@does) => { Read };
    (@flags $flags:ident) => { c_uint };
    (@from $dirfd:ident) => { $dirfd };
    (@from) => { libc::AT_FDCWD };
}

/// Whether open(2) follows a link at the end.
fn opens(flags: c_int) -> bool {
    let made = libc::O_CREAT | libc::O_EXCL;
    flags & libc::O_NOFOLLOW == 0 && flags & made != made
}

/// The effect of open(2).
fn opening(flags: c_int) -> Does {
    let made = flags & (libc::O_CREAT | libc::O_EXCL);
    match flags & (libc::O_ACCMODE | libc::O_TRUNC) {
        _ if made == libc::O_CREAT | libc::O_EXCL => Make,
        _ if made & libc::O_CREAT != 0 => Write,
        libc::O_RDONLY => Read,
        _ => Change,
    }
}

/// The effect of fopen(3).
fn streaming(mode: *const c_char) -> Does {
    // SAFETY: a C string, as libc's function wants.
    let mode = unsafe { CStr::from_ptr(mode) }.to_bytes();
    let has = |wanted: u8| mode.iter().take_while(|it| **it != b',').any(|it| *it == wanted);
    match has(b'w') || has(b'a') {
        true if has(b'x') => Make,
        true => Write,
        false if has(b'+') => Change,
        false => Read,
    }
}

/// The wish of a program that asks by access(2).
fn asking(mode: c_int) -> Does {
    if mode & libc::W_OK == 0 { Read } else { Change }
}

/// The effect of utime(2): only a file's owner may set times of its choice.
fn timing(times: *const c_void) -> Does {
    if times.is_null() { Change } else { Own }
}

/// Whether a function with flags of fstatat(2) does.
fn looks(flags: c_int) -> bool {
    flags & libc::AT_SYMLINK_NOFOLLOW == 0
}

// Functions with a variable number of arguments take theirs in the same registers as if each were
// named (System V ABI, AAPCS64). Buffers are untyped: they are libc's business.
hooks! {
    open(path, flags: c_int, mode: mode_t) { opens(flags), opening(flags) } -> c_int;
    open64(path, flags: c_int, mode: mode_t) { opens(flags), opening(flags) } -> c_int;
    __open_2(path, flags: c_int) { opens(flags), opening(flags) } -> c_int;
    __open64_2(path, flags: c_int) { opens(flags), opening(flags) } -> c_int;
    openat(@dirfd, path, flags: c_int, mode: mode_t) { opens(flags), opening(flags) } -> c_int;
    openat64(@dirfd, path, flags: c_int, mode: mode_t) { opens(flags), opening(flags) } -> c_int;
    __openat_2(@dirfd, path, flags: c_int) { opens(flags), opening(flags) } -> c_int;
    __openat64_2(@dirfd, path, flags: c_int) { opens(flags), opening(flags) } -> c_int;
    fopen(path, mode: *const c_char) { true, streaming(mode) } -> *mut c_void;
    fopen64(path, mode: *const c_char) { true, streaming(mode) } -> *mut c_void;
    freopen(path, mode: *const c_char, stream: *mut c_void) { true, streaming(mode) }
        -> *mut c_void;
    freopen64(path, mode: *const c_char, stream: *mut c_void) { true, streaming(mode) }
        -> *mut c_void;
    opendir(path) { true } -> *mut c_void;
    scandir(path, list: *mut c_void, filter: *const c_void, order: *const c_void) { true }
        -> c_int;
    scandir64(path, list: *mut c_void, filter: *const c_void, order: *const c_void) { true }
        -> c_int;
    scandirat(@dirfd, path, list: *mut c_void, filter: *const c_void, order: *const c_void)
        { true } -> c_int;
    stat(path, into: *mut c_void) { true } -> c_int;
    stat64(path, into: *mut c_void) { true } -> c_int;
    lstat(path, into: *mut c_void) { false } -> c_int;
    lstat64(path, into: *mut c_void) { false } -> c_int;
    fstatat(@dirfd, path, into: *mut c_void, flags: c_int) { looks(flags) } -> c_int;
    fstatat64(@dirfd, path, into: *mut c_void, flags: c_int) { looks(flags) } -> c_int;
    statx(@dirfd, path, flags: c_int, mask: c_uint, into: *mut c_void) { looks(flags) } -> c_int;
    // stat before glibc 2.33.
    __xstat([version: c_int], path, into: *mut c_void) { true } -> c_int;
    __xstat64([version: c_int], path, into: *mut c_void) { true } -> c_int;
    __lxstat([version: c_int], path, into: *mut c_void) { false } -> c_int;
    __lxstat64([version: c_int], path, into: *mut c_void) { false } -> c_int;
    __fxstatat([version: c_int], @dirfd, path, into: *mut c_void, flags: c_int) { looks(flags) }
        -> c_int;
    __fxstatat64([version: c_int], @dirfd, path, into: *mut c_void, flags: c_int) { looks(flags) }
        -> c_int;
    statvfs(path, into: *mut c_void) { true } -> c_int;
    statvfs64(path, into: *mut c_void) { true } -> c_int;
    access(path, mode: c_int) { true, asking(mode) } -> c_int;
    eaccess(path, mode: c_int) { true, asking(mode) } -> c_int;
    euidaccess(path, mode: c_int) { true, asking(mode) } -> c_int;
    faccessat(@dirfd, path, mode: c_int, flags: c_int) { looks(flags), asking(mode) }
        -> c_int;
    readlink(path, into: *mut c_char, len: size_t) { false } -> ssize_t;
    readlinkat(@dirfd, path, into: *mut c_char, len: size_t) { false } -> ssize_t;
    __readlink_chk(path, into: *mut c_char, len: size_t, room: size_t) { false } -> ssize_t;
    __readlinkat_chk(@dirfd, path, into: *mut c_char, len: size_t, room: size_t) { false }
        -> ssize_t;
    // `ls -l` asks each file for its access control list.
    getxattr(path, name: *const c_char, into: *mut c_void, len: size_t) { true } -> ssize_t;
    lgetxattr(path, name: *const c_char, into: *mut c_void, len: size_t) { false } -> ssize_t;
    listxattr(path, into: *mut c_char, len: size_t) { true } -> ssize_t;
    llistxattr(path, into: *mut c_char, len: size_t) { false } -> ssize_t;
    inotify_add_watch([fd: c_int], path, mask: u32) { mask & libc::IN_DONT_FOLLOW == 0 } -> c_int;
    name_to_handle_at(@dirfd, path, into: *mut c_void, id: *mut c_void, flags: c_int)
        { flags & libc::AT_SYMLINK_FOLLOW != 0 } -> c_int;
    pathconf(path, name: c_int) { true } -> ssize_t;
    realpath(path, into: *mut c_char) { true } -> *mut c_char;
    __realpath_chk(path, into: *mut c_char, room: size_t) { true } -> *mut c_char;
    canonicalize_file_name(path) { true } -> *mut c_char;
    creat(path, mode: mode_t) { true, Write } -> c_int;
    creat64(path, mode: mode_t) { true, Write } -> c_int;
    truncate(path, len: libc::off_t) { true, Change } -> c_int;
    truncate64(path, len: libc::off_t) { true, Change } -> c_int;
    chmod(path, mode: mode_t) { true, Own } -> c_int;
    lchmod(path, mode: mode_t) { false, Own } -> c_int;
    fchmodat(@dirfd, path, mode: mode_t, flags: c_int) { looks(flags), Own } -> c_int;
    chown(path, user: c_uint, group: c_uint) { true, Own } -> c_int;
    lchown(path, user: c_uint, group: c_uint) { false, Own } -> c_int;
    fchownat(@dirfd, path, user: c_uint, group: c_uint, flags: c_int) { looks(flags), Own }
        -> c_int;
    unlink(path) { false, Change } -> c_int;
    unlinkat(@dirfd, path, flags: c_int) { false, Change } -> c_int;
    remove(path) { false, Change } -> c_int;
    rmdir(path) { false, Change } -> c_int;
    mkdir(path, mode: mode_t) { false, Make } -> c_int;
    mkdirat(@dirfd, path, mode: mode_t) { false, Make } -> c_int;
    mknod(path, mode: mode_t, device: libc::dev_t) { false, Make } -> c_int;
    mknodat(@dirfd, path, mode: mode_t, device: libc::dev_t) { false, Make } -> c_int;
    mkfifo(path, mode: mode_t) { false, Make } -> c_int;
    mkfifoat(@dirfd, path, mode: mode_t) { false, Make } -> c_int;
    symlink([target: *const c_char], path) { false, Make } -> c_int;
    symlinkat([target: *const c_char], @dirfd, path) { false, Make } -> c_int;
    utime(path, times: *const c_void) { true, timing(times) } -> c_int;
    utimes(path, times: *const c_void) { true, timing(times) } -> c_int;
    lutimes(path, times: *const c_void) { false, timing(times) } -> c_int;
    setxattr(path, name: *const c_char, from: *const c_void, len: size_t, flags: c_int)
        { true, Change } -> c_int;
    lsetxattr(path, name: *const c_char, from: *const c_void, len: size_t, flags: c_int)
        { false, Change } -> c_int;
    removexattr(path, name: *const c_char) { true, Change } -> c_int;
    lremovexattr(path, name: *const c_char) { false, Change } -> c_int;
    // A null path is the file of the descriptor.
    futimesat(@dirfd, path, times: *const c_void) { true, timing(times) } -> c_int;
    utimensat(@dirfd, path, times: *const c_void, flags: c_int) { looks(flags), timing(times) }
        -> c_int;
}

/// Defines functions of libc with an old path and a new one.
macro_rules! pairs {
    ($($name:ident($([$at:ident])? old, $([$to:ident])? new $(, $flags:ident)?);)*) => {$(
        /// The function of libc, with other paths.
        ///
        /// # Safety
        /// As libc's.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name(
            $($at: c_int,)? old: *const c_char, $($to: c_int,)? new: *const c_char
            $(, $flags: c_uint)?
        ) -> c_int {
            type Function = unsafe extern "C" fn(
                $(hooks!(@int $at),)? *const c_char, $(hooks!(@int $to),)? *const c_char
                $(, hooks!(@flags $flags))?
            ) -> c_int;
            let Some(next) = behind!($name: Function) else {
                set_errno(libc::ENOSYS);
                return Answer::FAILED;
            };
            let (from, to) = (hooks!(@from $($at)?), hooks!(@from $($to)?));
            lead(from, old, false, Change, |at, old| {
                lead(to, new, false, Write, |to, new| {
                    let _ = (at, to);
                    $(let $at = at;)?
                    $(let $to = to;)?
                    // SAFETY: the caller keeps to libc's rules; the paths are C strings or null.
                    unsafe { next($($at,)? old, $($to,)? new $(, $flags)?) }
                })
            })
        }
    )*};
}

pairs! {
    rename(old, new);
    renameat([at] old, [to] new);
    renameat2([at] old, [to] new, flags);
    link(old, new);
    linkat([at] old, [to] new, flags);
}

/// Defines functions of libc that change an open file, and may do so though it is open for reading
/// alone.
macro_rules! files {
    ($($name:ident(fd $(, $after:ident: $other:ty)*) { $does:expr };)*) => {$(
        /// The function of libc, but for files of the tree.
        ///
        /// # Safety
        /// As libc's.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name(fd: c_int $(, $after: $other)*) -> c_int {
            type Function = unsafe extern "C" fn(c_int $(, $other)*) -> c_int;
            let Some(next) = behind!($name: Function) else {
                set_errno(libc::ENOSYS);
                return Answer::FAILED;
            };
            // SAFETY: the caller keeps to libc's rules.
            by_file(fd, $does, || unsafe { next(fd $(, $after)*) })
        }
    )*};
}

files! {
    fchmod(fd, mode: mode_t) { Own };
    fchown(fd, user: c_uint, group: c_uint) { Own };
    futimens(fd, times: *const c_void) { timing(times) };
    futimes(fd, times: *const c_void) { timing(times) };
    fsetxattr(fd, name: *const c_char, from: *const c_void, len: size_t, flags: c_int) { Change };
    fremovexattr(fd, name: *const c_char) { Change };
}
