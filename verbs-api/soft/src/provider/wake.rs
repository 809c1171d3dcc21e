//! Event descriptors: one thread wakes another, and a program waits for the device in its own loop.

use std::io;
pub(crate) use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

pub(crate) use rocinante_netdev::apart;
use rustix::event::{EventfdFlags, Timespec};

/// A new event descriptor: non-blocking, closed on exec.
pub fn eventfd() -> io::Result<OwnedFd> {
    Ok(apart(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
}

/// A descriptor that is readable while one of these is (`epoll(7)`).
pub(crate) fn any_of(fds: &[BorrowedFd<'_>]) -> io::Result<OwnedFd> {
    use rustix::event::epoll::{CreateFlags, EventData, EventFlags, add, create};
    let set = apart(create(CreateFlags::CLOEXEC)?);
    for fd in fds {
        add(&set, fd, EventData::new_u64(0), EventFlags::IN)?;
    }
    Ok(set)
}

/// Makes it readable.
pub fn notify(fd: &OwnedFd) {
    // EAGAIN means that it is readable already: its counter is at the maximum of 2^64 - 2.
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

/// Makes it unreadable.
pub fn clear(fd: &OwnedFd) {
    take(fd);
}

/// Returns whether it is readable, and makes it unreadable.
pub fn take(fd: &OwnedFd) -> bool {
    let mut count = [0; 8];
    rustix::io::read(fd, &mut count).is_ok()
}

/// Wakes a sleeping thread: at once, or later by a timer.
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

    /// Wakes the thread that waits, or the next one that waits.
    pub(crate) fn wake(&self) {
        notify(&self.now);
    }

    /// Wakes the waiting thread after `time`; this replaces a time set before. It costs the caller
    /// far less than [`wake`](Self::wake), after which the scheduler may give the caller's
    /// processor to the woken thread at once.
    pub(crate) fn wake_in(&self, time: Duration) {
        set(&self.later, time);
    }

    /// Waits for a call, for `port` to be readable (or writable, if its flag is set), or for
    /// `timeout`. A call since the last wait counts as well. Returns whether the port or the
    /// timeout ended the wait, not only a call.
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
    Ok(apart(timerfd_create(TimerfdClockId::Monotonic, flags)?))
}

#[cfg(miri)]
fn timer() -> io::Result<OwnedFd> {
    eventfd()
}

/// Makes a timer readable after `time`.
#[cfg(not(miri))]
fn set(timer: &OwnedFd, time: Duration) {
    use rustix::time::{Itimerspec, TimerfdTimerFlags, timerfd_settime};
    // Zero would stop the timer.
    let it_value = timespec(time.max(Duration::from_nanos(1)));
    let it_interval = timespec(Duration::ZERO);
    let setting = Itimerspec { it_interval, it_value };
    // This cannot fail: the descriptor is a timer and the nanoseconds are below a second.
    let _ = timerfd_settime(timer, TimerfdTimerFlags::empty(), &setting);
}

#[cfg(miri)]
fn set(timer: &OwnedFd, _: Duration) {
    notify(timer);
}

/// Waits for `port` to be readable (or writable, if its flag is set), for `other` to be readable,
/// or for `timeout`. Returns whether the port or the timeout ended the wait, not only `other`.
pub fn wait(
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

/// Waits for the port, the others or the timeout, and returns which of the descriptors are ready.
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
    // An interrupted wait is a short one: callers check their state again.
    let _ = poll(&mut fds[..count], timeout.map(timespec).as_ref());
    let [now, later, port] = fds.map(|fd| !fd.revents().is_empty());
    [count == 3 && port, now, later]
}

/// The same by `epoll(7)`, because miri has no `poll(2)`. Every descriptor that miri supports is
/// always writable.
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
    // Both may be the same descriptor, which the epoll set takes only once.
    let later = (now.as_fd().as_raw_fd() != later.as_fd().as_raw_fd()).then_some(later.as_fd());
    for (at, fd) in (0..).zip([port.map(|(port, _)| port), Some(now.as_fd()), later]) {
        fd.map(|fd| add(&epoll, fd, EventData::new_u64(at), flags).unwrap());
    }
    let mut events = [Event { flags, data: EventData::new_u64(0) }; 3];
    let found = wait(&epoll, &mut events[..], timeout.map(timespec).as_ref()).unwrap();
    [0, 1, 2].map(|at| events[..found].iter().any(|event| event.data.u64() == at))
}
