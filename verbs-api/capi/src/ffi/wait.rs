//! Sleeping in a blocking call.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::mem::ManuallyDrop;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::{Arc, OnceLock};

use rustix::event::epoll;
use rustix::fs::{OFlags, fcntl_getfl, fstat};
use rustix::io::Errno;

use super::border::{Outcome, caught, errno, quiet, reported};
use crate::plain::apart;
use crate::ucma::File;

/// A descriptor that the program has, too. If it closed it and has a file under its number, that
/// stays open.
pub(crate) struct Given {
    fd: ManuallyDrop<OwnedFd>,
    is: Option<(u64, u64)>,
}

impl Given {
    /// A descriptor that is readable while `inner` is. The program may change its flags, of which
    /// `inner` knows nothing.
    pub(crate) fn following(inner: BorrowedFd<'_>) -> Outcome<Self> {
        following(inner).map(Self::from).map_err(Errno::raw_os_error)
    }

    /// The same under a high number, if there is one that select(2) takes.
    pub(crate) fn following_high(inner: BorrowedFd<'_>) -> Outcome<Self> {
        let fd = following(inner).map_err(Errno::raw_os_error)?;
        let Ok(low) = fd.try_clone() else { return Ok(Self::from(fd)) };
        let high = apart(fd);
        let is_taken = usize::try_from(high.as_raw_fd()).is_ok_and(|fd| fd < libc::FD_SETSIZE);
        Ok(Self::from(if is_taken { high } else { low }))
    }

    pub(crate) fn number(&self) -> c_int {
        self.fd.as_raw_fd()
    }
}

impl From<OwnedFd> for Given {
    fn from(fd: OwnedFd) -> Self {
        Self { is: identity(&fd), fd: ManuallyDrop::new(fd) }
    }
}

impl AsFd for Given {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Given {
    fn drop(&mut self) {
        if identity(&self.fd) == self.is {
            // SAFETY: it is dropped here only, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.fd) };
        }
    }
}

fn following(inner: BorrowedFd<'_>) -> rustix::io::Result<OwnedFd> {
    let fd = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    epoll::add(&fd, inner, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
    Ok(fd)
}

/// The file behind a descriptor: device and inode. Those without a file of their own share them.
fn identity(fd: &OwnedFd) -> Option<(u64, u64)> {
    fstat(fd).ok().map(|stat| (stat.st_dev, stat.st_ino))
}

/// `EAGAIN` if the program set `O_NONBLOCK`; `EBADF` if it closed the descriptor.
pub(crate) fn may_block(fd: impl AsFd) -> Outcome<()> {
    let flags = fcntl_getfl(fd).map_err(Errno::raw_os_error)?;
    if flags.contains(OFlags::NONBLOCK) { Err(libc::EAGAIN) } else { Ok(()) }
}

/// The object of a thread's sleep.
pub(super) enum Sleep {
    /// A channel of completions, and the port that brings them.
    Completion(rocinante_soft::Sleep),
    /// A file of rdma_cm.
    Event(Arc<File>),
    /// A descriptor that the program must not close meanwhile.
    Readable(RawFd),
}

impl Sleep {
    fn polled(&self) -> Polled {
        let (fd, port, longest) = match self {
            Self::Completion(sleep) => (sleep.fd().as_raw_fd(), sleep.port(), sleep.longest()),
            Self::Event(file) => (file.bell().as_raw_fd(), None, None),
            Self::Readable(fd) => (*fd, None, None),
        };
        // The call looks at no descriptor of a negative number.
        let (port, writable) = port.unwrap_or((-1, false));
        let writable = if writable { libc::POLLOUT } else { 0 };
        let polled = |fd, events| libc::pollfd { fd, events, revents: 0 };
        Polled {
            fds: [polled(fd, libc::POLLIN), polled(port, libc::POLLIN | writable)],
            longest: longest.map(|longest| libc::timespec {
                tv_sec: libc::time_t::try_from(longest.as_secs()).unwrap_or(libc::time_t::MAX),
                tv_nsec: longest.subsec_nanos().into(),
            }),
        }
    }
}

/// The arguments of `ppoll(2)`.
#[derive(Clone, Copy)]
struct Polled {
    fds: [libc::pollfd; 2],
    longest: Option<libc::timespec>,
}

unsafe extern "C-unwind" {
    // A cancelled thread ends in these: they unwind (`pthreads(7)`).
    fn pthread_testcancel();
    fn ppoll(
        fds: *mut libc::pollfd,
        count: libc::nfds_t,
        longest: *const libc::timespec,
        mask: *const libc::sigset_t,
    ) -> c_int;
}

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

/// Runs `body`, in which the thread cannot be cancelled: nothing unwinds from it.
pub(super) fn uncancelled<T>(body: impl FnOnce() -> T) -> T {
    /// `PTHREAD_CANCEL_DISABLE`, of glibc and musl.
    const DISABLE: c_int = 1;
    let mut before = 0;
    // SAFETY: it writes the state of before.
    unsafe { pthread_setcancelstate(DISABLE, &raw mut before) };
    let result = body();
    // SAFETY: as above.
    unsafe { pthread_setcancelstate(before, &raw mut before) };
    result
}

/// The sleep of this thread. Where it is cancelled meanwhile its end drops this, also that of the
/// first thread, for which glibc runs no destructors of `thread_local!`.
struct Asleep(libc::pthread_key_t);

impl Asleep {
    fn of_process() -> Outcome<&'static Self> {
        static KEY: OnceLock<Asleep> = OnceLock::new();
        extern "C" fn end(sleep: *mut c_void) {
            // SAFETY: `set` leaked it, and only this takes it: the key has forgotten it.
            quiet(|| drop(unsafe { Box::from_raw(sleep.cast::<Sleep>()) }));
        }
        if let Some(key) = KEY.get() {
            return Ok(key);
        }
        let mut key = 0;
        // SAFETY: it writes the key. The library is never unloaded, so `end` stays.
        match unsafe { libc::pthread_key_create(&raw mut key, Some(end)) } {
            // Of two threads that come here at once, the key of one stays unused.
            0 => Ok(KEY.get_or_init(|| Self(key))),
            error => Err(error),
        }
    }

    fn set(&self, sleep: Sleep) -> Outcome<()> {
        let sleep = Box::into_raw(Box::new(sleep));
        // SAFETY: the key is one of the process.
        match unsafe { libc::pthread_setspecific(self.0, sleep.cast()) } {
            0 => Ok(()),
            error => {
                // SAFETY: the key did not take it.
                drop(unsafe { Box::from_raw(sleep) });
                Err(error)
            }
        }
    }

    fn take(&self) -> Option<Box<Sleep>> {
        // SAFETY: the value is null, or `set` leaked it. Once it is null nothing else takes it.
        unsafe {
            let sleep = libc::pthread_getspecific(self.0).cast::<Sleep>();
            if sleep.is_null() {
                return None;
            }
            libc::pthread_setspecific(self.0, ptr::null());
            Some(Box::from_raw(sleep))
        }
    }
}

/// Takes `step` until it has a result, and sleeps between. This is a cancellation point, as the
/// read(2) of rdma-core is. A cancelled thread unwinds from here to the program. Rust allows that
/// through frames without a destructor, and `Copy` has none.
pub(super) fn cancellable<T: Copy>(
    step: impl Fn() -> Outcome<ControlFlow<T, Sleep>> + Copy,
) -> Outcome<T> {
    // SAFETY: it has no arguments.
    unsafe { pthread_testcancel() };
    let before = errno();
    // Of the last sleep: whether more than the first descriptor ended it, and its error.
    let (mut woken, mut error) = (false, 0);
    loop {
        let next = uncancelled(|| caught(|| next(step, woken, error)));
        let mut polled = match next {
            Ok(ControlFlow::Continue(polled)) => polled,
            Ok(ControlFlow::Break(result)) => return reported(before, Ok(result)),
            Err(error) => return reported(before, Err(error)),
        };
        let longest = polled.longest.as_ref().map_or(ptr::null(), ptr::from_ref);
        // SAFETY: the structures are there during the call.
        let found = unsafe { ppoll(polled.fds.as_mut_ptr(), 2, longest, ptr::null()) };
        let [first, port] = polled.fds.map(|fd| fd.revents != 0);
        (woken, error) = (port || !first, if found < 0 { errno() } else { 0 });
    }
}

/// Ends the last sleep, and takes a step: its result, or the arguments of the next sleep.
fn next<T>(
    step: impl Fn() -> Outcome<ControlFlow<T, Sleep>>,
    woken: bool,
    error: c_int,
) -> Outcome<ControlFlow<T, Polled>> {
    let asleep = Asleep::of_process()?;
    let mut slept = asleep.take();
    if let Some(Sleep::Completion(sleep)) = slept.as_deref_mut()
        && woken
    {
        sleep.woken();
    }
    drop(slept);
    match error {
        0 => {}
        libc::EINTR => interrupted()?,
        error => return Err(error),
    }
    Ok(match step()? {
        ControlFlow::Break(result) => ControlFlow::Break(result),
        ControlFlow::Continue(sleep) => {
            let polled = sleep.polled();
            asleep.set(sleep)?;
            ControlFlow::Continue(polled)
        }
    })
}

/// A signal interrupted a call of the system that does not go on by itself. `EINTR`, as read(2)
/// would return, if the program has a handler without `SA_RESTART`. Which handler ran is not known:
/// a program that has handlers of both kinds gets `EINTR` for each.
fn interrupted() -> Outcome<()> {
    /// Signals of a fault of the thread itself, which interrupt no call.
    const FAULTS: [c_int; 6] =
        [libc::SIGILL, libc::SIGTRAP, libc::SIGABRT, libc::SIGBUS, libc::SIGFPE, libc::SIGSEGV];
    let ends = (1..=libc::SIGRTMAX()).filter(|signal| !FAULTS.contains(signal)).any(|signal| {
        let mut action = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: it only asks, and writes the structure. One of zeroes is valid if it fails.
        let action = unsafe {
            libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr());
            action.assume_init()
        };
        let handled = ![libc::SIG_DFL, libc::SIG_IGN].contains(&action.sa_sigaction);
        handled && action.sa_flags & libc::SA_RESTART == 0
    });
    if ends { Err(libc::EINTR) } else { Ok(()) }
}

/// Runs `body` with all signals blocked, which the threads that it starts inherit.
pub(crate) fn without_signals<T>(body: impl FnOnce() -> T) -> T {
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: both sets are written before they are read.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
    }
    let result = body();
    // SAFETY: the call above filled the set.
    let _: c_int =
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    result
}
