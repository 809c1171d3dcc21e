//! The kernel's `/dev/infiniband/rdma_cm` for librdmacm: before it opens that file it has called
//! this library, and by then its calls of open(2), fstat(2), write(2) and close(2) come here.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ops::ControlFlow;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Once};

use crate::plain::{OfProcess, is_accessible};

use super::border::{Outcome, minus, quiet, set_errno};
use super::fork;
use super::slots::{self, Before};
use super::wait::{Sleep, cancellable};
use crate::log::{Level, say};
use crate::ucma::{self, Answer, Memory, Ucma};

/// Only librdmacm imports this, by whatever name a copy of it is loaded.
const MARK: &CStr = c"ibv_copy_qp_attr_from_kern";
const FILE: &CStr = c"/dev/infiniband/rdma_cm";
/// The kernel's file for its number, where the machine has the module.
const NUMBER: &str = "/sys/class/misc/rdma_cm/dev";

/// Stands before librdmacm's calls, wherever it is loaded. Where that fails it says so once.
pub(super) fn watch() {
    static SAID: Once = Once::new();
    let before = |name, ours| Before { name, ours };
    let all = [
        before(c"open", open as *const c_void),
        before(c"open64", open as *const c_void),
        before(c"fstat", fstat as *const c_void),
        before(c"fstat64", fstat as *const c_void),
        before(c"write", write as *const c_void),
        before(c"close", close as *const c_void),
    ];
    // glibc's lock of its list of modules is none of those that a child finds free.
    let done = fork::undisturbed(|| slots::stand_before(MARK, &all));
    if let Err(error) = done {
        SAID.call_once(|| {
            say(
                Level::Warn,
                format_args!(
                    "no rdma_cm: librdmacm's import slots cannot be pointed to this library \
                     (mprotect: {error}), so it opens the kernel's {FILE:?} and finds none, or \
                     devices other than these: permit mprotect(2) in the seccomp profile"
                ),
            );
        });
    }
}

/// The state of this process.
fn ucma() -> &'static Arc<Ucma> {
    static NOW: OfProcess<Arc<Ucma>> = OfProcess::none();
    NOW.get()
}

/// Ends connections when the program ends, as the kernel does when the file is closed.
fn end_at_exit() {
    static ONCE: Once = Once::new();
    extern "C" fn end() {
        quiet(|| ucma().end());
    }
    // SAFETY: the library is never unloaded, and the function does not unwind. Without room for it
    // peers learn of the end by their timeouts.
    ONCE.call_once(|| unsafe {
        libc::atexit(end);
    });
}

/// The function that librdmacm would have called: of another preloaded library, or libc's.
macro_rules! theirs {
    ($name:literal as $function:ty) => {{
        static FOUND: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
        let mut found = FOUND.load(Ordering::Relaxed);
        if found.is_null() {
            // SAFETY: the name ends with a zero.
            found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, $name.as_ptr()) };
            FOUND.store(found, Ordering::Relaxed);
        }
        // SAFETY: the loader found a function of this name, and so of this type.
        (!found.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, $function>(found) })
    }};
}

unsafe extern "C" fn open(path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
    // SAFETY: the caller's C string.
    if !path.is_null() && unsafe { CStr::from_ptr(path) } == FILE {
        return minus(|| {
            end_at_exit();
            ucma().open()
        });
    }
    type Open = unsafe extern "C" fn(*const c_char, c_int, c_uint) -> c_int;
    match theirs!(c"open" as Open) {
        // SAFETY: as the caller's call.
        Some(open) => unsafe { open(path, flags, mode) },
        None => missing(),
    }
}

unsafe extern "C" fn fstat(fd: c_int, into: *mut libc::stat) -> c_int {
    // SAFETY: the caller's structure. A call by this library concerns libc alone.
    let result = unsafe { libc::fstat(fd, into) };
    if result == 0 && ucma().has(fd) {
        // SAFETY: the call above filled it.
        unsafe {
            (*into).st_mode = libc::S_IFCHR | 0o666;
            (*into).st_rdev = number();
        }
    }
    result
}

/// There is no such function, which no program that runs lacks.
fn missing() -> c_int {
    set_errno(libc::ENOSYS);
    -1
}

/// The number of the kernel's file, which librdmacm compares if it has learnt it.
fn number() -> libc::dev_t {
    let text = std::fs::read_to_string(NUMBER).unwrap_or_default();
    let number = text.trim().split_once(':');
    let number = number.and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    number.map_or(0, |(major, minor)| libc::makedev(major, minor))
}

unsafe extern "C" fn close(fd: c_int) -> c_int {
    if ucma().close(fd) {
        return 0;
    }
    type Close = unsafe extern "C" fn(c_int) -> c_int;
    match theirs!(c"close" as Close) {
        // SAFETY: as the caller's call.
        Some(close) => unsafe { close(fd) },
        None => missing(),
    }
}

unsafe extern "C-unwind" fn write(fd: c_int, bytes: *const c_void, len: usize) -> isize {
    if ucma().has(fd) {
        let done = cancellable(|| {
            let file = ucma().file(fd).ok_or(libc::EBADF)?;
            let taken = isize::try_from(len).map_err(|_| libc::EINVAL)?;
            let at = bytes as u64;
            // Bytes behind the command are not read, for any length of the write.
            let header = Program.load(at, len.min(ucma::HEADER))?;
            let input = Program.load(at, len.min(ucma::announced(&header)))?;
            match ucma().command(&file, &input, &Program) {
                Err(libc::EAGAIN) if ucma::waits(&header) => {
                    file.may_block()?;
                    Ok(ControlFlow::Continue(Sleep::Event(file)))
                }
                Ok(answer) => {
                    put(&answer)?;
                    Ok(ControlFlow::Break(taken))
                }
                Err(errno) => Err(errno),
            }
        });
        return done.unwrap_or(-1);
    }
    type Write = unsafe extern "C-unwind" fn(c_int, *const c_void, usize) -> isize;
    match theirs!(c"write" as Write) {
        // SAFETY: as the caller's call.
        Some(write) => unsafe { write(fd, bytes, len) },
        None => isize::try_from(missing()).unwrap_or(-1),
    }
}

/// The memory of this process.
struct Program;

impl Memory for Program {
    fn check(&self, at: u64, len: usize, writable: bool) -> Outcome<()> {
        // Rust has no object at 0, even where the program has mapped memory there.
        let is_there = len == 0 || at != 0 && is_accessible(at, len, writable);
        if is_there { Ok(()) } else { Err(libc::EFAULT) }
    }

    fn load(&self, at: u64, len: usize) -> Outcome<Vec<u8>> {
        self.check(at, len, false)?;
        let mut bytes = vec![0; len];
        if len > 0 {
            // SAFETY: all of it can be read, unless another thread takes it away meanwhile, which
            // a program that gives a command must not do. It overlaps nothing new.
            unsafe { ptr::copy_nonoverlapping(at as *const u8, bytes.as_mut_ptr(), len) };
        }
        Ok(bytes)
    }
}

/// Writes the answer where the command wants it.
fn put(answer: &Answer) -> Outcome<()> {
    let Answer { to, bytes } = answer;
    Program.check(*to, bytes.len(), true)?;
    if !bytes.is_empty() {
        // SAFETY: all of it can be written, as above, and is the caller's for the answer.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), *to as *mut u8, bytes.len()) };
    }
    Ok(())
}
