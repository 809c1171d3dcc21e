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

/// Waits until `port` is readable (or writable, if `write`), or `other` is readable, or `timeout` is over. Returns whether
/// it was the port or the time, and not only `other`.
pub(crate) fn wait(
    port: Option<(BorrowedFd<'_>, bool)>,
    other: BorrowedFd<'_>,
    timeout: Option<Duration>,
) -> bool {
    let timeout = timeout.map(|timeout| Timespec {
        tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    });
    let [port, other] = ready(port, other, timeout.as_ref());
    port || !other
}

/// Which of the two are, when one is or the time is over.
#[cfg(not(miri))]
fn ready(
    port: Option<(BorrowedFd<'_>, bool)>,
    other: BorrowedFd<'_>,
    timeout: Option<&Timespec>,
) -> [bool; 2] {
    use rustix::event::{PollFd, PollFlags, poll};
    let flags = match port {
        Some((_, true)) => PollFlags::IN | PollFlags::OUT,
        _ => PollFlags::IN,
    };
    let mut fds = [
        PollFd::from_borrowed_fd(other, PollFlags::IN),
        PollFd::from_borrowed_fd(port.map_or(other, |(fd, _)| fd), flags),
    ];
    let count = if port.is_some() { 2 } else { 1 };
    // An interrupted wait is a short one: callers look at their state again anyway.
    let _ = poll(&mut fds[..count], timeout);
    [count == 2 && !fds[1].revents().is_empty(), !fds[0].revents().is_empty()]
}

/// The same by `epoll(7)`, because miri does not know `poll(2)`; and no descriptor that it knows is ever not writable.
#[cfg(miri)]
fn ready(
    port: Option<(BorrowedFd<'_>, bool)>,
    other: BorrowedFd<'_>,
    timeout: Option<&Timespec>,
) -> [bool; 2] {
    use rustix::event::epoll::{CreateFlags, Event, EventData, EventFlags, add, create, wait};
    let epoll = create(CreateFlags::CLOEXEC).unwrap();
    let flags = EventFlags::IN | EventFlags::ET;
    let fds = [port.map(|(port, _)| port), Some(other)];
    for (at, fd) in (0..).zip(fds) {
        fd.map(|fd| add(&epoll, fd, EventData::new_u64(at), flags).unwrap());
    }
    let mut events = [Event { flags, data: EventData::new_u64(0) }; 2];
    let found = wait(&epoll, &mut events[..], timeout).unwrap();
    [0, 1].map(|at| events[..found].iter().any(|event| event.data.u64() == at))
}
