//! Descriptors that the runtime waits for.

use std::io;
use std::os::fd::AsRawFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Waits for `fd` to be readable.
pub(crate) fn readable<T: AsRawFd>(fd: T) -> io::Result<AsyncFd<T>> {
    ready(fd, Interest::READABLE)
}

/// Waits for `fd` to be readable or writable. Each type here owns or borrows the descriptor that it
/// names until it is dropped.
#[allow(
    deprecated,
    reason = "the other way is unsafe, for types that may close their descriptor early"
)]
pub(crate) fn ready<T: AsRawFd>(fd: T, interest: Interest) -> io::Result<AsyncFd<T>> {
    AsyncFd::with_interest(fd, interest)
}
