//! A library to preload: paths below /sys/class/infiniband and /dev/infiniband lead into the tree
//! of files that `ROCINANTE_PATHS` names. All other paths, and all else that these functions of
//! libc do, stay as they are.
//!
//! It also stands before `_exit(2)`, which ends a program without its handlers: what
//! libibverbs.so.1 has to send until then is sent.
//!
//! Programs call these functions in signal handlers and between fork and exec, so nothing here
//! takes a lock, allocates or panics.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use libc::{mode_t, size_t, ssize_t};

const VARIABLE: &[u8] = b"ROCINANTE_PATHS=";
/// What leads into the tree. `infiniband_verbs` and others of that class lie beside the first.
const CLASS: &[u8] = b"/sys/class/infiniband";
const DEVICES: &[u8] = b"/dev/infiniband";
/// Length of the longest path (`PATH_MAX`), with its zero.
const PATH_MAX: usize = libc::PATH_MAX as usize;

/// The tree's path without a zero, in the environment that the process began with. The kernel put
/// it there, and it stays.
static ROOT: AtomicPtr<u8> = AtomicPtr::new(ptr::null_mut());
/// The length of that path; 0 as long as there is no tree.
static ROOT_LEN: AtomicUsize = AtomicUsize::new(0);

/// glibc calls it with the arguments of `main` before that, and before the program can change its
/// environment.
#[used]
#[unsafe(link_section = ".init_array")]
static INIT: unsafe extern "C" fn(c_int, *const *const c_char, *const *const c_char) = init;

unsafe extern "C" fn init(
    _: c_int,
    _: *const *const c_char,
    mut environment: *const *const c_char,
) {
    while !environment.is_null() {
        // SAFETY: an array of C strings that ends with null, which the loop does not pass.
        let (entry, next) = unsafe { (*environment, environment.add(1)) };
        if entry.is_null() {
            return;
        }
        // SAFETY: a C string, which lives as long as the process.
        let entry = unsafe { CStr::from_ptr(entry) }.to_bytes();
        match entry.strip_prefix(VARIABLE) {
            // A relative path would lead elsewhere after a chdir(2).
            Some(root) if root.starts_with(b"/") => {
                ROOT.store(root.as_ptr().cast_mut(), Ordering::Relaxed);
                ROOT_LEN.store(root.len(), Ordering::Release);
            }
            _ => {}
        }
        environment = next;
    }
}

/// The tree's path; empty if there is none.
fn root() -> &'static [u8] {
    match ROOT_LEN.load(Ordering::Acquire) {
        0 => &[],
        // SAFETY: `init` stored both, the length last; the bytes live as long as the process.
        len => unsafe { std::slice::from_raw_parts(ROOT.load(Ordering::Relaxed), len) },
    }
}

/// Calls `then` with the path that stands for `path`: itself, or one in the tree.
fn lead<R>(path: *const c_char, then: impl FnOnce(*const c_char) -> R) -> R {
    // SAFETY: null, or a C string, as libc's own functions want.
    if path.is_null() || !unsafe { begins_as_ours(path) } {
        return then(path);
    }
    // SAFETY: not null, so a C string.
    into_tree(unsafe { CStr::from_ptr(path) }, then)
}

/// Whether the path may be one of the tree's: a quick look, as this happens to every path. It reads
/// no byte after the zero.
unsafe fn begins_as_ours(path: *const c_char) -> bool {
    let begins = |with: &[u8]| {
        // SAFETY: `all` stops at the first byte that differs, at the latest at the zero.
        with.iter().enumerate().all(|(at, byte)| unsafe { *path.cast::<u8>().add(at) } == *byte)
    };
    begins(CLASS) || begins(DEVICES)
}

/// As [`lead`], for a path that begins as ours. A function of its own, for its large stack frame.
#[cold]
#[inline(never)]
fn into_tree<R>(path: &CStr, then: impl FnOnce(*const c_char) -> R) -> R {
    let (root, bytes) = (root(), path.to_bytes_with_nul());
    if root.is_empty() || root.len() + bytes.len() > PATH_MAX || !is_ours(path.to_bytes()) {
        return then(path.as_ptr());
    }
    let mut whole = [MaybeUninit::<u8>::uninit(); PATH_MAX];
    for (to, from) in whole.iter_mut().zip(root.iter().chain(bytes)) {
        to.write(*from);
    }
    then(whole.as_ptr().cast())
}

/// Whether the tree has the answer to a path that begins as ours: not to one that leads out of it
/// again, nor to a file of a similar name.
fn is_ours(path: &[u8]) -> bool {
    let rest = path.strip_prefix(DEVICES);
    rest.is_none_or(|rest| rest.is_empty() || rest.starts_with(b"/"))
        && path.split(|byte| *byte == b'/').all(|word| word != b"..")
}

/// Takes the tree's path away from the front of a path that libc found, so that the program sees
/// what it asked for.
fn out_of_tree(path: *mut c_char) -> *mut c_char {
    let root = root();
    if path.is_null() || root.is_empty() {
        return path;
    }
    // SAFETY: a C string that libc has just written.
    let found = unsafe { CStr::from_ptr(path) }.to_bytes_with_nul();
    if let Some(rest) = found.strip_prefix(root)
        && rest.starts_with(b"/")
    {
        // SAFETY: both lie in the string, and the end is before the place where it was.
        unsafe { ptr::copy(path.add(root.len()), path, rest.len()) };
    }
    path
}

/// What libibverbs.so.1 does before the end; null for nothing.
static BEFORE_EXIT: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// Has `then` called before `_exit(2)`. It may be called in a signal handler, and in a child of
/// `vfork(2)`.
#[unsafe(no_mangle)]
pub extern "C" fn rocinante_before_exit(then: extern "C" fn()) {
    BEFORE_EXIT.store(then as *mut c_void, Ordering::Release);
}

fn end(status: c_int) -> ! {
    let then = BEFORE_EXIT.load(Ordering::Acquire);
    if !then.is_null() {
        // SAFETY: `rocinante_before_exit` stored a function of this type.
        let then: extern "C" fn() = unsafe { std::mem::transmute(then) };
        then();
    }
    loop {
        // SAFETY: no pointers. As libc's function of this name.
        unsafe { libc::syscall(libc::SYS_exit_group, status) };
    }
}

/// The function of libc, after what libibverbs.so.1 has to do.
#[unsafe(no_mangle)]
pub extern "C" fn _exit(status: c_int) -> ! {
    end(status)
}

/// As [`_exit`].
#[unsafe(no_mangle)]
pub extern "C" fn _Exit(status: c_int) -> ! {
    end(status)
}

/// What functions of libc return.
trait Answer: Sized {
    /// The answer of a function that failed.
    const FAILED: Self;
    /// The answer as the program is to see it.
    fn shown(self) -> Self {
        self
    }
}

impl Answer for c_int {
    const FAILED: Self = -1;
}

impl Answer for ssize_t {
    const FAILED: Self = -1;
}

/// A stream.
impl Answer for *mut c_void {
    const FAILED: Self = ptr::null_mut();
}

/// A path that was found.
impl Answer for *mut c_char {
    const FAILED: Self = ptr::null_mut();
    fn shown(self) -> Self {
        out_of_tree(self)
    }
}

/// Defines functions of libc that lead their `path` to where it belongs and go on to the next
/// library that has them.
macro_rules! hooks {
    ($($name:ident($([$($before:ident: $type:ty),*])? path $(, $after:ident: $other:ty)*)
        -> $result:ty;)*) => {$(
        /// The function of libc, with another path.
        ///
        /// # Safety
        /// As libc's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            $($($before: $type,)*)? path: *const c_char $(, $after: $other)*
        ) -> $result {
            type Function =
                unsafe extern "C" fn($($($type,)*)? *const c_char $(, $other)*) -> $result;
            static NEXT: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
            let next = next(&NEXT, concat!(stringify!($name), "\0"));
            if next.is_null() {
                // SAFETY: the place of the thread's errno.
                unsafe { *libc::__errno_location() = libc::ENOSYS };
                return Answer::FAILED;
            }
            // SAFETY: the loader found a function of this name, and so of this type.
            let next: Function = unsafe { std::mem::transmute(next) };
            // SAFETY: the caller keeps to libc's rules; the path is a C string or null.
            lead(path, |path| unsafe { next($($($before,)*)? path $(, $after)*) }).shown()
        }
    )*};
}

/// The function `name` of the libraries after this one; null if they have none.
fn next(cached: &AtomicPtr<c_void>, name: &'static str) -> *mut c_void {
    let mut found = cached.load(Ordering::Relaxed);
    if found.is_null() {
        // SAFETY: the name ends with a zero.
        found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr().cast()) };
        cached.store(found, Ordering::Relaxed);
    }
    found
}

// Functions with a variable number of arguments take theirs in the same registers as if each were
// named (System V ABI, AAPCS64). Buffers are untyped: they are libc's business.
hooks! {
    open(path, flags: c_int, mode: mode_t) -> c_int;
    open64(path, flags: c_int, mode: mode_t) -> c_int;
    __open_2(path, flags: c_int) -> c_int;
    __open64_2(path, flags: c_int) -> c_int;
    openat([dirfd: c_int] path, flags: c_int, mode: mode_t) -> c_int;
    openat64([dirfd: c_int] path, flags: c_int, mode: mode_t) -> c_int;
    __openat_2([dirfd: c_int] path, flags: c_int) -> c_int;
    __openat64_2([dirfd: c_int] path, flags: c_int) -> c_int;
    fopen(path, mode: *const c_char) -> *mut c_void;
    fopen64(path, mode: *const c_char) -> *mut c_void;
    opendir(path) -> *mut c_void;
    scandir(path, list: *mut c_void, filter: *const c_void, order: *const c_void) -> c_int;
    scandir64(path, list: *mut c_void, filter: *const c_void, order: *const c_void) -> c_int;
    stat(path, into: *mut c_void) -> c_int;
    stat64(path, into: *mut c_void) -> c_int;
    lstat(path, into: *mut c_void) -> c_int;
    lstat64(path, into: *mut c_void) -> c_int;
    fstatat([dirfd: c_int] path, into: *mut c_void, flags: c_int) -> c_int;
    fstatat64([dirfd: c_int] path, into: *mut c_void, flags: c_int) -> c_int;
    statx([dirfd: c_int] path, flags: c_int, mask: c_uint, into: *mut c_void) -> c_int;
    // What stat was before glibc 2.33.
    __xstat([version: c_int] path, into: *mut c_void) -> c_int;
    __xstat64([version: c_int] path, into: *mut c_void) -> c_int;
    __lxstat([version: c_int] path, into: *mut c_void) -> c_int;
    __lxstat64([version: c_int] path, into: *mut c_void) -> c_int;
    __fxstatat([version: c_int, dirfd: c_int] path, into: *mut c_void, flags: c_int) -> c_int;
    __fxstatat64([version: c_int, dirfd: c_int] path, into: *mut c_void, flags: c_int) -> c_int;
    access(path, mode: c_int) -> c_int;
    eaccess(path, mode: c_int) -> c_int;
    euidaccess(path, mode: c_int) -> c_int;
    faccessat([dirfd: c_int] path, mode: c_int, flags: c_int) -> c_int;
    readlink(path, into: *mut c_char, len: size_t) -> ssize_t;
    readlinkat([dirfd: c_int] path, into: *mut c_char, len: size_t) -> ssize_t;
    __readlink_chk(path, into: *mut c_char, len: size_t, room: size_t) -> ssize_t;
    __readlinkat_chk([dirfd: c_int] path, into: *mut c_char, len: size_t, room: size_t)
        -> ssize_t;
    // `ls -l` asks each file for its access control list.
    getxattr(path, name: *const c_char, into: *mut c_void, len: size_t) -> ssize_t;
    lgetxattr(path, name: *const c_char, into: *mut c_void, len: size_t) -> ssize_t;
    listxattr(path, into: *mut c_char, len: size_t) -> ssize_t;
    llistxattr(path, into: *mut c_char, len: size_t) -> ssize_t;
    chdir(path) -> c_int;
    realpath(path, into: *mut c_char) -> *mut c_char;
    __realpath_chk(path, into: *mut c_char, room: size_t) -> *mut c_char;
    canonicalize_file_name(path) -> *mut c_char;
}
