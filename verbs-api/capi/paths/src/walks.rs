//! Functions of libc that call others of it by a way of their own, or that tell of a directory:
//! they are led as a whole.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::atomic::Ordering;

use libc::{size_t, ssize_t};

use crate::lists::{closedir, readdir64};
use crate::resolve::Buffer;
use crate::{
    Answer as _, Does, HAS_COUNTERS, behind, directory, is_in_tree, is_led, lead, moved,
    out_of_tree, root, set_errno, show_open,
};

/// The function of libc, with another path.
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn chdir(path: *const c_char) -> c_int {
    let Some(next) = behind!(chdir: unsafe extern "C" fn(*const c_char) -> c_int) else {
        return c_int::FAILED;
    };
    // SAFETY: the caller keeps to libc's rules.
    let status = lead(libc::AT_FDCWD, path, true, Does::Read, |_, path| unsafe { next(path) });
    moved();
    status
}

/// The function of libc.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fchdir(fd: c_int) -> c_int {
    let Some(next) = behind!(fchdir: extern "C" fn(c_int) -> c_int) else { return c_int::FAILED };
    let status = next(fd);
    moved();
    status
}

/// The function of libc, which shows no path of the tree.
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn getcwd(into: *mut c_char, len: size_t) -> *mut c_char {
    type Function = unsafe extern "C" fn(*mut c_char, size_t) -> *mut c_char;
    let Some(next) = behind!(getcwd: Function) else { return ptr::null_mut() };
    let mut now = Buffer::new();
    if into.is_null() || !directory(libc::AT_FDCWD, &mut now) || !is_led(now.path()) {
        // SAFETY: the caller keeps to libc's rules.
        return out_of_tree(unsafe { next(into, len) });
    }
    // The tree's own path may need more room than there is.
    let path = now.with_zero();
    if path.len() > len {
        set_errno(libc::ERANGE);
        return ptr::null_mut();
    }
    // SAFETY: the caller's memory of `len` bytes.
    unsafe { ptr::copy_nonoverlapping(path.as_ptr(), into.cast(), path.len()) };
    into
}

/// As [`getcwd`], with room for the longest path.
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn getwd(into: *mut c_char) -> *mut c_char {
    if into.is_null() {
        set_errno(libc::EINVAL);
        return into;
    }
    // SAFETY: the caller's promise.
    unsafe { getcwd(into, libc::PATH_MAX as size_t) }
}

/// As [`getcwd`].
#[unsafe(no_mangle)]
pub(crate) extern "C" fn get_current_dir_name() -> *mut c_char {
    let next = behind!(get_current_dir_name: extern "C" fn() -> *mut c_char);
    next.map_or(ptr::null_mut(), |next| out_of_tree(next()))
}

macro_rules! filesystems {
    ($($path:ident $fd:ident;)*) => {$(
        /// The function of libc, with another path. The tree says that it is sysfs.
        ///
        /// # Safety
        /// As libc's.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $path(
            path: *const c_char,
            into: *mut libc::statfs,
        ) -> c_int {
            type Function = unsafe extern "C" fn(*const c_char, *mut libc::statfs) -> c_int;
            let Some(next) = behind!($path: Function) else { return c_int::FAILED };
            lead(libc::AT_FDCWD, path, true, Does::Read, |_, other| {
                // SAFETY: the caller keeps to libc's rules. Another path is in the tree, or out of
                // it again.
                unsafe {
                    let status = next(other, into);
                    if status == 0 && is_in_tree(CStr::from_ptr(other).to_bytes()) {
                        (*into).f_type = SYSFS_MAGIC;
                    }
                    status
                }
            })
        }

        /// As the one with a path.
        ///
        /// # Safety
        /// As libc's.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $fd(fd: c_int, into: *mut libc::statfs) -> c_int {
            type Function = unsafe extern "C" fn(c_int, *mut libc::statfs) -> c_int;
            let Some(next) = behind!($fd: Function) else { return c_int::FAILED };
            // SAFETY: the caller keeps to libc's rules.
            let status = unsafe { next(fd, into) };
            let mut path = Buffer::new();
            if status == 0 && !root().is_empty() && directory(fd, &mut path) && is_led(path.path()) {
                // SAFETY: libc has filled it.
                unsafe { (*into).f_type = SYSFS_MAGIC };
            }
            status
        }
    )*};
}

filesystems! {
    statfs fstatfs;
    statfs64 fstatfs64;
}

/// Of `linux/magic.h`; the crate `libc` lacks it.
const SYSFS_MAGIC: libc::__fsword_t = 0x6265_6572;

/// `glob_t`, up to what GLOB_ALTDIRFUNC uses.
#[repr(C)]
pub(crate) struct Glob {
    found: [usize; 4],
    functions: [*const c_void; 5],
}

/// The function of libc, which calls those of this library.
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn glob(
    pattern: *const c_char,
    flags: c_int,
    error: *const c_void,
    into: *mut Glob,
) -> c_int {
    type Function = unsafe extern "C" fn(*const c_char, c_int, *const c_void, *mut Glob) -> c_int;
    let Some(next) = behind!(glob: Function) else { return libc::GLOB_ABORTED };
    let mut flags = flags;
    // A pattern may lead there by any directory.
    if flags & libc::GLOB_ALTDIRFUNC == 0 && !root().is_empty() && !into.is_null() {
        flags |= libc::GLOB_ALTDIRFUNC;
        // SAFETY: the caller's structure, as libc wants it.
        unsafe {
            (*into).functions = [
                closedir as *const c_void,
                readdir64 as *const c_void,
                crate::hooks::opendir as *const c_void,
                crate::hooks::lstat as *const c_void,
                crate::hooks::stat as *const c_void,
            ];
        }
    }
    // SAFETY: as above.
    unsafe { next(pattern, flags, error, into) }
}

/// As [`glob`]: the structures are the same on 64-bit machines.
///
/// # Safety
/// As libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn glob64(
    pattern: *const c_char,
    flags: c_int,
    error: *const c_void,
    into: *mut Glob,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { glob(pattern, flags, error, into) }
}

/// `struct FTW`: the place of the file's name in the path, and the depth.
type At = [c_int; 2];
type Visit = unsafe extern "C" fn(*const c_char, *const c_void, c_int, *mut At) -> c_int;

/// A walk that goes on.
struct Walk {
    visit: Visit,
    /// The program's path of the top, and the length of its path in the tree.
    top: *const c_char,
    inside: usize,
}

thread_local! {
    static WALK: Cell<*const Walk> = const { Cell::new(ptr::null()) };
}

/// Tells the program of a file, by the path that it expects.
unsafe extern "C" fn visit(
    path: *const c_char,
    file: *const c_void,
    kind: c_int,
    at: *mut At,
) -> c_int {
    // SAFETY: nftw(3) is under way on this thread, so the walk is there; its paths are C strings.
    unsafe {
        let walk = &*WALK.get();
        let top = CStr::from_ptr(walk.top).to_bytes();
        let rest = CStr::from_ptr(path.add(walk.inside)).to_bytes();
        let mut shown = Buffer::new();
        if shown.push(top).and_then(|()| shown.push(rest)).is_none() {
            return (walk.visit)(path, file, kind, at);
        }
        let more = top.len().cast_signed() - walk.inside.cast_signed();
        // libc counts on with its own.
        let [base, depth] = *at;
        let mut at = [(base as isize + more) as c_int, depth];
        (walk.visit)(shown.with_zero().as_ptr().cast(), file, kind, &raw mut at)
    }
}

/// Walks from `top` by `go`, which is nftw(3) with its other arguments.
unsafe fn walk(
    top: *const c_char,
    seen: Visit,
    last: bool,
    go: impl Fn(*const c_char, Visit) -> c_int,
) -> c_int {
    lead(libc::AT_FDCWD, top, last, Does::Read, |_, path| {
        // SAFETY: C strings.
        let led = unsafe { CStr::from_ptr(path) }.to_bytes();
        if path == top {
            return go(path, seen);
        }
        let now = Walk { visit: seen, top, inside: led.len() };
        let before = WALK.replace(&raw const now);
        let status = go(path, visit);
        WALK.set(before);
        status
    })
}

/// `FTW_PHYS` of ftw.h; the crate `libc` lacks it.
const FTW_PHYS: c_int = 1;

macro_rules! walks {
    ($($name:ident;)*) => {$(
        /// The function of libc, from another path.
        ///
        /// # Safety
        /// As libc's.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name(
            top: *const c_char,
            seen: Visit,
            open: c_int,
            flags: c_int,
        ) -> c_int {
            type Function = unsafe extern "C" fn(*const c_char, Visit, c_int, c_int) -> c_int;
            let Some(next) = behind!($name: Function) else { return c_int::FAILED };
            let last = flags & FTW_PHYS == 0;
            // SAFETY: the caller keeps to libc's rules.
            unsafe { walk(top, seen, last, |top, seen| next(top, seen, open, flags)) }
        }
    )*};
}

walks! {
    nftw;
    nftw64;
}

/// `FTS` and `FTSENT` of fts(3), as far as they are used here.
#[repr(C)]
pub(crate) struct Fts {
    current: *mut FtsEntry,
    others: [usize; 3],
    path: *mut c_char,
}

#[repr(C)]
pub(crate) struct FtsEntry {
    others: [usize; 6],
    path: *mut c_char,
    numbers: [c_int; 2],
    path_len: u16,
}

/// Roots of a walk by fts(3).
const ROOTS_MAX: usize = 16;

/// `FTS_COMFOLLOW` and `FTS_LOGICAL` of fts.h: links that are roots are followed.
const FTS_FOLLOW: c_int = 1 | 2;

unsafe fn begin(
    paths: *const *const c_char,
    last: bool,
    at: usize,
    all: &mut [*const c_char; ROOTS_MAX],
    then: &mut dyn FnMut(*const *const c_char) -> *mut c_void,
) -> *mut c_void {
    // SAFETY: the caller's list ends with null.
    let path = unsafe { *paths.add(at) };
    if path.is_null() {
        return then(all.as_ptr());
    }
    if at + 1 == ROOTS_MAX {
        return then(paths);
    }
    let (all, then) = (Cell::from_mut(all), std::cell::RefCell::new(then));
    // Each path stays on the stack until the walk has copied it.
    lead(libc::AT_FDCWD, path, last, Does::Read, |_, path| {
        let mut list = all.get();
        list[at] = path;
        // SAFETY: as above.
        unsafe { begin(paths, last, at + 1, &mut list, &mut **then.borrow_mut()) }
    })
}

macro_rules! fts {
    ($($open:ident $read:ident;)*) => {$(
        /// The function of libc, from other paths.
        ///
        /// # Safety
        /// As libc's.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $open(
            paths: *const *const c_char,
            options: c_int,
            order: *const c_void,
        ) -> *mut c_void {
            type Function = unsafe extern "C" fn(
                *const *const c_char, c_int, *const c_void
            ) -> *mut c_void;
            let Some(next) = behind!($open: Function) else { return ptr::null_mut() };
            let mut list = [ptr::null(); ROOTS_MAX];
            let last = options & FTS_FOLLOW != 0;
            // SAFETY: the caller keeps to libc's rules.
            unsafe { begin(paths, last, 0, &mut list, &mut |paths| next(paths, options, order)) }
        }

        /// The function of libc, which shows no path of the tree.
        ///
        /// # Safety
        /// As libc's.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $read(walk: *mut Fts) -> *mut FtsEntry {
            type Function = unsafe extern "C" fn(*mut Fts) -> *mut FtsEntry;
            let Some(next) = behind!($read: Function) else { return ptr::null_mut() };
            let inside = root().len();
            // SAFETY: the caller's walk; entries lie in its memory, and the current one's path is
            // that of the walk, which is longer than the tree's if it is in the tree.
            unsafe {
                let current = (*walk).current;
                if !current.is_null() && inside > 0
                    && (*current).path == (*walk).path.wrapping_add(inside)
                {
                    (*current).path = (*walk).path;
                    (*current).path_len += inside as u16;
                }
                let entry = next(walk);
                if !entry.is_null() && (*entry).path == (*walk).path
                    && is_in_tree(CStr::from_ptr((*entry).path).to_bytes())
                {
                    (*entry).path = (*walk).path.add(inside);
                    (*entry).path_len -= inside as u16;
                }
                entry
            }
        }
    )*};
}

fts! {
    fts_open fts_read;
    fts64_open fts64_read;
}

/// Defines functions of libc that read an open file.
macro_rules! readers {
    ($($name:ident($($more:ident: $type:ty),*);)*) => {$(
        /// The function of libc, after a look at the counters.
        ///
        /// # Safety
        /// As libc's.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name(
            fd: c_int, into: *mut c_void, len: size_t $(, $more: $type)*
        ) -> ssize_t {
            type Function =
                unsafe extern "C" fn(c_int, *mut c_void, size_t $(, $type)*) -> ssize_t;
            if HAS_COUNTERS.load(Ordering::Relaxed) {
                show_open(fd);
            }
            let Some(next) = behind!($name: Function) else { return ssize_t::FAILED };
            // SAFETY: the caller keeps to libc's rules.
            unsafe { next(fd, into, len $(, $more)*) }
        }
    )*};
}

readers! {
    read();
    pread(at: libc::off_t);
    pread64(at: libc::off_t);
    __read_chk(room: size_t);
    __pread_chk(at: libc::off_t, room: size_t);
    __pread64_chk(at: libc::off_t, room: size_t);
}
