//! Event descriptors: how one thread wakes another, and how a program waits for the device in its own loop.

use std::io;
pub(crate) use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{EventfdFlags, Timespec};

/// A new event descriptor: non-blocking, closed on exec.
pub(crate) fn eventfd() -> io::Result<OwnedFd> {
    Ok(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Makes it readable.
pub(crate) fn notify(fd: &OwnedFd) {
    // EAGAIN means that it is readable already, 2^64 - 2 times over.
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

/// Makes it unreadable.
pub(crate) fn clear(fd: &OwnedFd) {
    take(fd);
}

/// Whether it is readable; if so, no longer.
pub(crate) fn take(fd: &OwnedFd) -> bool {
    let mut count = [0; 8];
    rustix::io::read(fd, &mut count).is_ok()
}

/// How one thread is called by others while it sleeps: at once, or later without a thought of theirs.
#[derive(Debug)]
pub(crate) struct Calls {
    now: OwnedFd,
    /// A timer (`timerfd_create(2)`); under miri, which has none, another event descriptor.
    later: OwnedFd,
}

impl Calls {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { now: eventfd()?, later: timer()? })
    }

    /// Wakes who sleeps, or will.
    pub(crate) fn wake(&self) {
        notify(&self.now);
    }

    /// Wakes who sleeps when that time is over, and not when the one is that was set before. That costs the caller far less than
    /// [`wake`](Self::wake), after which the scheduler may give its processor to the other at once.
    pub(crate) fn wake_in(&self, time: Duration) {
        set(&self.later, time);
    }

    /// Sleeps until somebody calls, or has called since it was last asked, or `port` is readable (or writable, if so said), or `timeout` is over.
    /// Returns whether it was the port or the timeout, and not only a call.
    pub(crate) fn wait(
        &self,
        port: Option<(BorrowedFd<'_>, bool)>,
        timeout: Option<Duration>,
    ) -> bool {
        let [port, now, later] = ready(port, &[&self.now, &self.later], timeout);
        for (fd, is_ready) in [(&self.now, now), (&self.later, later)] {
            if is_ready {
                clear(fd);
            }
        }
        port || !(now || later)
    }
}

#[cfg(not(miri))]
fn timer() -> io::Result<OwnedFd> {
    use rustix::time::{TimerfdClockId, TimerfdFlags, timerfd_create};
    let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
    Ok(timerfd_create(TimerfdClockId::Monotonic, flags)?)
}

#[cfg(miri)]
fn timer() -> io::Result<OwnedFd> {
    eventfd()
}

/// Makes a timer readable when that time is over.
#[cfg(not(miri))]
fn set(timer: &OwnedFd, time: Duration) {
    use rustix::time::{Itimerspec, TimerfdTimerFlags, timerfd_settime};
    // No time at all would stop it.
    let it_value = timespec(time.max(Duration::from_nanos(1)));
    let it_interval = timespec(Duration::ZERO);
    let setting = Itimerspec { it_interval, it_value };
    // It cannot fail: the descriptor is a timer and the nanoseconds are below a second.
    let _ = timerfd_settime(timer, TimerfdTimerFlags::empty(), &setting);
}

#[cfg(miri)]
fn set(timer: &OwnedFd, _: Duration) {
    notify(timer);
}

/// Waits until `port` is readable (or writable, if `write`), or `other` is readable, or `timeout` is over. Returns whether
/// it was the port or the time, and not only `other`.
pub(crate) fn wait(
    port: Option<(BorrowedFd<'_>, bool)>,
    other: BorrowedFd<'_>,
    timeout: Option<Duration>,
) -> bool {
    let [port, other, _] = ready(port, &[other, other], timeout);
    port || !other
}

fn timespec(time: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: time.subsec_nanos().into(),
    }
}

/// Which are, the port or the others, when one is or the time is over.
#[cfg(not(miri))]
fn ready(
    port: Option<(BorrowedFd<'_>, bool)>,
    others: &[impl AsFd; 2],
    timeout: Option<Duration>,
) -> [bool; 3] {
    use rustix::event::{PollFd, PollFlags, poll};
    let flags = match port {
        Some((_, true)) => PollFlags::IN | PollFlags::OUT,
        _ => PollFlags::IN,
    };
    let [now, later] = others;
    let mut fds = [
        PollFd::new(now, PollFlags::IN),
        PollFd::new(later, PollFlags::IN),
        PollFd::from_borrowed_fd(port.map_or(now.as_fd(), |(fd, _)| fd), flags),
    ];
    let count = if port.is_some() { 3 } else { 2 };
    // An interrupted wait is a short one: callers look at their state again anyway.
    let _ = poll(&mut fds[..count], timeout.map(timespec).as_ref());
    let [now, later, port] = fds.map(|fd| !fd.revents().is_empty());
    [count == 3 && port, now, later]
}

/// The same by `epoll(7)`, because miri does not know `poll(2)`; and no descriptor that it knows is ever not writable.
#[cfg(miri)]
fn ready(
    port: Option<(BorrowedFd<'_>, bool)>,
    others: &[impl AsFd; 2],
    timeout: Option<Duration>,
) -> [bool; 3] {
    use rustix::event::epoll::{CreateFlags, Event, EventData, EventFlags, add, create, wait};
    use std::os::fd::AsRawFd as _;
    let epoll = create(CreateFlags::CLOEXEC).unwrap();
    let flags = EventFlags::IN | EventFlags::ET;
    let [now, later] = others;
    // One may be there twice, but not in the set.
    let later = (now.as_fd().as_raw_fd() != later.as_fd().as_raw_fd()).then_some(later.as_fd());
    for (at, fd) in (0..).zip([port.map(|(port, _)| port), Some(now.as_fd()), later]) {
        fd.map(|fd| add(&epoll, fd, EventData::new_u64(at), flags).unwrap());
    }
    let mut events = [Event { flags, data: EventData::new_u64(0) }; 3];
    let found = wait(&epoll, &mut events[..], timeout.map(timespec).as_ref()).unwrap();
    [0, 1, 2].map(|at| events[..found].iter().any(|event| event.data.u64() == at))
}
