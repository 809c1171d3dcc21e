//! A library to preload: paths below /sys/class/infiniband, the targets of its links, and
//! /dev/infiniband lead into the tree of files that `ROCINANTE_PATHS` names, as if it lay over the
//! machine's own. All other paths, and all other effects of these functions of libc, stay as they
//! are. Before a program looks into the tree, libibverbs.so.1 brings it up to date.
//!
//! The tree is read only, for root too: calls that would change it by a path or by an open file
//! fail as those of an ordinary user in the kernel's own. Files there are open for reading alone,
//! so the kernel refuses to write to them.
//!
//! Where `rocinante run` has mounted the tree, paths below /sys are the kernel's business.
//!
//! It also stands before `_exit(2)`, which ends a program without its handlers: libibverbs.so.1
//! sends its pending packets first.
//!
//! Programs call these functions in signal handlers and between fork and exec, so for other paths
//! nothing here takes a lock, allocates or panics.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicUsize, Ordering};

use libc::ssize_t;

mod hooks;
mod lists;
mod resolve;
mod walks;

use resolve::{Buffer, Named, follow};

const VARIABLE: &[u8] = b"ROCINANTE_PATHS=";
/// The directories that the tree stands for. `infiniband_verbs` and others of that class lie beside
/// the first.
const CLASS: &[u8] = b"/sys/class/infiniband";
const BUS: &[u8] = b"/sys/devices/rocinante";
const DEVICES: &[u8] = b"/dev/infiniband";

/// The tree's path without a zero, in the environment that the process began with. The kernel put
/// it there, and it stays.
static ROOT: AtomicPtr<u8> = AtomicPtr::new(ptr::null_mut());
/// The length of that path; 0 as long as there is no tree.
static ROOT_LEN: AtomicUsize = AtomicUsize::new(0);
/// The working directory is in the tree.
static IS_INSIDE: AtomicBool = AtomicBool::new(false);
/// Whether the tree is mounted: 0 until it was looked at, then 1 for no and 2 for yes.
static MOUNTED: AtomicU8 = AtomicU8::new(0);

/// A part of the paths of counters.
const COUNTERS: &[u8] = b"counters/";
/// The program has looked at counters.
static HAS_COUNTERS: AtomicBool = AtomicBool::new(false);

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
                moved();
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

/// The working directory is another one.
fn moved() {
    let mut now = Buffer::new();
    let inside = directory(libc::AT_FDCWD, &mut now) && is_ours(now.path());
    IS_INSIDE.store(inside, Ordering::Relaxed);
}

/// Whether an absolute path without links is one that the tree stands for.
fn is_ours(path: &[u8]) -> bool {
    let ends = |rest: &[u8]| rest.is_empty() || rest.starts_with(b"/");
    path.starts_with(CLASS)
        || [BUS, DEVICES].iter().any(|it| path.strip_prefix(*it).is_some_and(ends))
}

/// Whether such a path is answered here, and not by the kernel.
fn is_led(path: &[u8]) -> bool {
    is_ours(path) && !(path.starts_with(b"/sys") && is_mounted())
}

/// Whether /sys has the tree.
fn is_mounted() -> bool {
    let known = MOUNTED.load(Ordering::Relaxed);
    if known != 0 {
        return known == 2;
    }
    let place = |before: &[u8]| {
        let mut path = Buffer::new();
        path.push(before)?;
        path.push(CLASS)?;
        // SAFETY: all zeroes is a value of this plain structure.
        let mut found: libc::stat = unsafe { std::mem::zeroed() };
        let (at, into) = (path.with_zero().as_ptr(), &raw mut found);
        // SAFETY: a path with its zero, and a structure of which the kernel writes.
        let status = unsafe { libc::syscall(libc::SYS_newfstatat, libc::AT_FDCWD, at, into, 0) };
        (status == 0).then_some((found.st_dev, found.st_ino))
    };
    let mounted = place(root()).is_some_and(|tree| place(b"") == Some(tree));
    MOUNTED.store(if mounted { 2 } else { 1 }, Ordering::Relaxed);
    mounted
}

/// A path, by a quick look.
enum Look {
    /// It has nothing to do with the tree.
    Elsewhere,
    /// It may lead into the tree or out of it.
    Near,
    /// If there is nothing, it may lead out of the tree.
    IfMissing,
}

/// A quick look, as this happens to every path.
fn look(dirfd: c_int, path: &[u8], does: Does) -> Look {
    let root = root();
    if root.is_empty() {
        return Look::Elsewhere;
    }
    // The open file itself.
    if path.is_empty() {
        return Look::IfMissing;
    }
    let is_absolute = path.starts_with(b"/");
    if is_absolute && path.starts_with(root) {
        return Look::Elsewhere;
    }
    let named = has(path, b"infiniband")
        || has(path, b"devices/rocinante")
        || (!is_absolute && path.starts_with(b"rocinante"))
        // Files that are open. The kernel reads them, also those that have no name any more.
        || does != Does::Read
            && (path.starts_with(b"/dev/fd/")
                || (path.starts_with(b"/proc/") && has(path, b"/fd/")));
    match (named, is_absolute, dirfd) {
        (true, ..) => Look::Near,
        (_, true, _) => Look::Elsewhere,
        (_, _, libc::AT_FDCWD) if IS_INSIDE.load(Ordering::Relaxed) => Look::Near,
        (_, _, libc::AT_FDCWD) => Look::Elsewhere,
        _ if has(path, b"..") => Look::Near,
        _ => Look::IfMissing,
    }
}

fn has(path: &[u8], word: &[u8]) -> bool {
    let (at, len) = (path.as_ptr().cast(), path.len());
    // SAFETY: both are memory of these lengths.
    !unsafe { libc::memmem(at, len, word.as_ptr().cast(), word.len()) }.is_null()
}

/// The effect of a function of libc on the file that its path names.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Does {
    /// It only looks.
    Read,
    /// It changes the file, or its name.
    Change,
    /// It changes an attribute that only the file's owner may change.
    Own,
    /// It makes the file, which must not be there yet.
    Make,
    /// It makes the file, or changes it.
    Write,
}

/// Calls `then` with the directory and the path that stand for these: themselves, or a path in the
/// tree, or one out of it. A change in the tree fails without it.
fn lead<R: Answer>(
    dirfd: c_int,
    path: *const c_char,
    last: bool,
    does: Does,
    then: impl Fn(c_int, *const c_char) -> R,
) -> R {
    if path.is_null() {
        return by_file(dirfd, does, || then(dirfd, path));
    }
    // SAFETY: not null, so a C string, as libc's own functions want.
    let bytes = unsafe { CStr::from_ptr(path) }.to_bytes();
    let answer = match look(dirfd, bytes, does) {
        Look::Elsewhere => return then(dirfd, path).shown(),
        Look::Near => None,
        Look::IfMissing if bytes.is_empty() => return by_file(dirfd, does, || then(dirfd, path)),
        Look::IfMissing if does != Does::Read && !is_inside(dirfd) => {
            return then(dirfd, path).shown();
        }
        Look::IfMissing if does != Does::Read => None,
        Look::IfMissing => {
            Some(then(dirfd, path)).filter(|it| !it.failed() || errno() != libc::ENOENT)
        }
    };
    match answer {
        Some(answer) => answer,
        None => near(dirfd, bytes, last, does, &mut |dirfd, other| {
            then(dirfd, other.map_or(path, |other| other.as_ptr().cast()))
        })
        .shown(),
    }
}

/// As [`lead`], for a path that may have to do with the tree. `then` gets another path with its
/// zero, or none. A function of its own, for its large stack frame.
#[cold]
#[inline(never)]
fn near<R: Answer>(
    dirfd: c_int,
    path: &[u8],
    last: bool,
    does: Does,
    then: &mut dyn FnMut(c_int, Option<&[u8]>) -> R,
) -> R {
    let before = errno();
    let mut found = Buffer::new();
    let mut crossed = find(dirfd, path, last, &mut found);
    if crossed.is_some() && is_ours(found.path()) {
        show(&found);
        crossed = find(dirfd, path, last, &mut found);
    }
    set_errno(before);
    if crossed != Some(true) {
        return then(dirfd, None);
    }
    if !is_led(found.path()) {
        if found.path().is_empty() {
            let _ = found.push(b"/");
        }
        return then(libc::AT_FDCWD, Some(found.with_zero()));
    }
    let mut whole = Buffer::new();
    if whole.push(root()).and_then(|()| whole.push(found.path())).is_none() {
        return then(dirfd, None);
    }
    let refusal = match does {
        Does::Read => return then(libc::AT_FDCWD, Some(whole.with_zero())),
        Does::Change | Does::Own if !is_there(&whole) => libc::ENOENT,
        Does::Make if is_there(&whole) => libc::EEXIST,
        Does::Own => libc::EPERM,
        _ => libc::EACCES,
    };
    set_errno(refusal);
    R::FAILED
}

/// Calls `then`, which changes an open file, unless that is one of the tree.
fn by_file<R: Answer>(fd: c_int, does: Does, then: impl Fn() -> R) -> R {
    if does == Does::Read || root().is_empty() || !is_inside(fd) {
        return then();
    }
    set_errno(if does == Does::Own { libc::EPERM } else { libc::EACCES });
    R::FAILED
}

/// Whether an open file is one of the tree, as this library answers it. A function of its own, for
/// its large stack frame.
#[cold]
#[inline(never)]
fn is_inside(dirfd: c_int) -> bool {
    let before = errno();
    let mut path = Buffer::new();
    let inside = directory(dirfd, &mut path) && is_led(path.path());
    set_errno(before);
    inside
}

/// Whether the path, which is where libc would look, names something.
fn is_there(path: &Buffer) -> bool {
    let (at, mut stat) = (path.with_zero().as_ptr(), std::mem::MaybeUninit::<libc::stat>::uninit());
    let (of, flags) = (libc::SYS_newfstatat, libc::AT_SYMLINK_NOFOLLOW);
    // SAFETY: a path with its zero, and room for the kernel's structure.
    unsafe { libc::syscall(of, libc::AT_FDCWD, at, stat.as_mut_ptr(), flags) == 0 }
}

/// Has the tree brought up to date, for a program that looks at this path.
fn show(path: &Buffer) {
    if has(path.path(), COUNTERS) {
        HAS_COUNTERS.store(true, Ordering::Relaxed);
    }
    let show = BEFORE_PATH.load(Ordering::Acquire);
    if show.is_null() || IS_SHOWING.replace(true) {
        return;
    }
    // SAFETY: `rocinante_before_path` stored a function of this type.
    let show: unsafe extern "C" fn(*const c_char) = unsafe { std::mem::transmute(show) };
    // SAFETY: a path with its zero.
    unsafe { show(path.with_zero().as_ptr().cast()) };
    IS_SHOWING.set(false);
}

thread_local! {
    /// This thread brings the tree up to date, and reads in it.
    static IS_SHOWING: Cell<bool> = const { Cell::new(false) };
}

/// A program may keep a counter's file open, and read it again: then it reads the present count, as
/// with the kernel.
#[cold]
#[inline(never)]
fn show_open(fd: c_int) {
    let before = errno();
    let mut path = Buffer::new();
    if directory(fd, &mut path) && is_ours(path.path()) && has(path.path(), COUNTERS) {
        show(&path);
    }
    set_errno(before);
}

/// Where a path leads, as an absolute one; the root is empty. Returns whether the way there leads
/// through the tree, if there is a way.
fn find(dirfd: c_int, path: &[u8], last: bool, found: &mut Buffer) -> Option<bool> {
    let mut crossed = false;
    if !path.starts_with(b"/") {
        if !directory(dirfd, found) {
            return None;
        }
        crossed = is_led(found.path());
    }
    let read_link = |path: &Buffer, target: &mut Buffer| {
        let led = is_led(path.path());
        crossed |= led;
        let named = target_of(path, if led { root() } else { &[] }, target);
        if matches!(named, Named::Link) {
            outside(target);
        }
        named
    };
    follow(found, path, last, read_link)?;
    Some(crossed || is_led(found.path()))
}

/// Reads a link, if it is one.
fn target_of(path: &Buffer, base: &[u8], target: &mut Buffer) -> Named {
    let mut whole = Buffer::new();
    if whole.push(base).and_then(|()| whole.push(path.path())).is_none() {
        return Named::Missing;
    }
    let room = target.room();
    let (at, into) = (whole.with_zero().as_ptr(), room.as_mut_ptr());
    // SAFETY: a path with its zero, and room of this length.
    let len = unsafe { libc::syscall(libc::SYS_readlinkat, libc::AT_FDCWD, at, into, room.len()) };
    match usize::try_from(len) {
        Ok(len) => {
            target.filled(len);
            Named::Link
        }
        Err(_) if errno() == libc::EINVAL => Named::Plain,
        Err(_) => Named::Missing,
    }
}

/// The path of an open file, as the program knows it; the root is empty. `false` if it has
/// none.
fn directory(dirfd: c_int, into: &mut Buffer) -> bool {
    let room = into.room();
    let (at, len) = (room.as_mut_ptr(), room.len());
    let len = if dirfd == libc::AT_FDCWD {
        // SAFETY: room of this length. The kernel counts the zero.
        unsafe { libc::syscall(libc::SYS_getcwd, at, len) - 1 }
    } else {
        let mut name = *b"/proc/self/fd/..........\0";
        let digits = &mut name[14..24];
        digits.fill(b'0');
        let mut rest = dirfd.unsigned_abs();
        for digit in digits.iter_mut().rev() {
            *digit = b'0' + (rest % 10) as u8;
            rest /= 10;
        }
        // The kernel takes no number that begins with 0.
        let zeros = digits[..9].iter().take_while(|digit| **digit == b'0').count();
        name.copy_within(14 + zeros.., 14);
        // SAFETY: a path with its zero, and room of this length.
        unsafe { libc::syscall(libc::SYS_readlinkat, libc::AT_FDCWD, name.as_ptr(), at, len) }
    };
    let Ok(len) = usize::try_from(len) else { return false };
    into.filled(len);
    if !into.path().starts_with(b"/") {
        return false;
    }
    outside(into);
    if into.path() == b"/" {
        into.filled(0);
    }
    true
}

/// Replaces a path in the tree by the path that it stands for.
fn outside(path: &mut Buffer) {
    let inside = root().len();
    if is_in_tree(path.path()) {
        let len = path.path().len() - inside;
        path.room().copy_within(inside..inside + len, 0);
        path.filled(len);
    }
}

/// Whether a path without links is of a file in the tree.
fn is_in_tree(path: &[u8]) -> bool {
    let root = root();
    !root.is_empty() && path.strip_prefix(root).is_some_and(|rest| rest.starts_with(b"/"))
}

/// Takes the tree's path away from the front of a path that libc found, so that the program sees
/// the path that it asked for.
fn out_of_tree(path: *mut c_char) -> *mut c_char {
    if path.is_null() {
        return path;
    }
    // SAFETY: a C string that libc has just written.
    let found = unsafe { CStr::from_ptr(path) }.to_bytes_with_nul();
    if is_in_tree(found) {
        let inside = root().len();
        // SAFETY: both lie in the string, and the end is before the place where it was.
        unsafe { ptr::copy(path.add(inside), path, found.len() - inside) };
    }
    path
}

fn errno() -> c_int {
    // SAFETY: the place of the thread's errno.
    unsafe { *libc::__errno_location() }
}

fn set_errno(errno: c_int) {
    // SAFETY: the place of the thread's errno.
    unsafe { *libc::__errno_location() = errno };
}

/// The function of libibverbs.so.1 to call before the program looks into the tree; null for none.
static BEFORE_PATH: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// Has `then` called before the program looks at a path that the tree stands for.
#[unsafe(no_mangle)]
pub extern "C" fn rocinante_before_path(then: unsafe extern "C" fn(*const c_char)) {
    BEFORE_PATH.store(then as *mut c_void, Ordering::Release);
}

/// The function of libibverbs.so.1 to call before the end; null for none.
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

/// The function of libc, after the last work of libibverbs.so.1.
#[unsafe(no_mangle)]
pub extern "C" fn _exit(status: c_int) -> ! {
    end(status)
}

/// As [`_exit`].
#[unsafe(no_mangle)]
pub extern "C" fn _Exit(status: c_int) -> ! {
    end(status)
}

/// The function of this name and type of the libraries after this one.
macro_rules! behind {
    ($name:ident: $type:ty) => {{
        static NEXT: std::sync::atomic::AtomicPtr<c_void> =
            std::sync::atomic::AtomicPtr::new(std::ptr::null_mut());
        let next = crate::next(&NEXT, concat!(stringify!($name), "\0"));
        // SAFETY: the loader found a function of this name, and so of this type; null is `None`.
        unsafe { std::mem::transmute::<*mut c_void, Option<$type>>(next) }
    }};
}
pub(crate) use behind;

/// Return values of functions of libc.
trait Answer: Sized {
    /// The answer of a function that failed.
    const FAILED: Self;
    fn failed(&self) -> bool;
    /// The answer as the program is to see it.
    fn shown(self) -> Self {
        self
    }
}

impl Answer for c_int {
    const FAILED: Self = -1;
    fn failed(&self) -> bool {
        *self < 0
    }
}

impl Answer for ssize_t {
    const FAILED: Self = -1;
    fn failed(&self) -> bool {
        *self < 0
    }
}

/// A stream.
impl Answer for *mut c_void {
    const FAILED: Self = ptr::null_mut();
    fn failed(&self) -> bool {
        self.is_null()
    }
}

/// A path that was found.
impl Answer for *mut c_char {
    const FAILED: Self = ptr::null_mut();
    fn failed(&self) -> bool {
        self.is_null()
    }
    fn shown(self) -> Self {
        out_of_tree(self)
    }
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
